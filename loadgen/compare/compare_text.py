"""Renders a comparison as a report, of which text, Markdown and page are made, and as JUnit cases.

Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from loadgen.compare.answer_difference import build_answer_section
from loadgen.compare.comparison import (
    NOT_SAME_WORK,
    Comparison,
    SideRecovery,
)
from loadgen.compare.difference import DIFFER, Difference, Outcome, describe_needed_load
from loadgen.compare.judgement import EQUIVALENT_CHANGE, EQUIVALENT_POINTS
from loadgen.compare.thresholds import ThresholdOutcome, format_interval
from loadgen.core import format
from loadgen.core.metrics.reasons import format_reason
from loadgen.render.junit import OUTCOME_OF_MET, JUnitCase
from loadgen.render.page import Bar
from loadgen.render.section import (
    Bars,
    Bullets,
    Notice,
    Paragraph,
    Report,
    Section,
    Table,
    named_facts,
    section,
    simulated_notice,
)
from loadgen.runs import recovery

LARGEST_DRAWN_CHANGE = 9.0
"""The largest change that is drawn, 900 %. A longer bar would leave no room for the others."""

LARGEST_DETECTABLE_CHANGE = 99
"""The minimum detectable change from which it is not printed: more than 9,900 %."""

SMALLEST_PRINTED_CHANGE = 0.0005
"""A change below this is printed as 0.0 %, without a sign."""

_OUTCOMES_TO_NAME = ("worse", "better", "different", DIFFER)
"""The outcomes whose metrics the summary names, in this order."""

_OUTCOMES_TO_COUNT: tuple[Outcome, ...] = ("equivalent", "inconclusive")
"""The outcomes whose metrics the summary counts, in this order."""

_OUTCOMES_WITHOUT_DIRECTION = ("different", DIFFER)
"""The outcomes for which the summary says which metrics are lower and which are higher."""

_OUTCOME_TEXTS: Mapping[str, str] = {
    DIFFER: "runs differ",
    "equivalent": "no significant difference",
}
"""How an outcome is printed, if not by its own name.

A difference is only called equivalent if its interval is known, because the interval shows that the
sides are about equal.
"""

_FACTS_IN_BRIEF = ("workload", "load", "model", "server", "URL")
"""Keys of `_FACT_FIELDS`: the facts that a terminal names if the sides differ in them."""

_SHARED_FACTS_IN_BRIEF = ("workload", "load")
"""Keys of `_FACT_FIELDS`: the facts that a terminal names if they are the same for all sides."""

LONGEST_BRIEF_FACTS = 200
"""The most characters of the facts on a terminal, about two lines. Longer ones are left out."""

NOT_COMPARED = "not compared"
"""How the outcome of a metric is printed if the sides have different SLOs."""

NEUTRAL_COLOR = "c6"
"""The color of a change that is not significant, as a CSS variable of the page."""

_OUTCOME_COLORS = {"better": "good", "worse": "bad", "different": "warn", DIFFER: "warn"}
_FACT_FIELDS = {
    "workload": "workload",
    "load": "load",
    "model": "model",
    "server": "server",
    "URL": "url",
    "started": "started",
    "SLO": "slo",
    "runs": "runs",
    "measured by": "tool",
}
"""The facts of a side: the name of a row, and the field of `SideFacts`."""


def build_report(comparison: Comparison, outcomes: Sequence[ThresholdOutcome] = ()) -> Report:
    """Return the report of a comparison, and of the conditions of `--fail-on` that were checked.

    A terminal shows its brief form: the summary, the metrics and what limits the comparison.
    """
    first_side, *other_sides = comparison.sides
    headline = [
        Paragraph(summarize_differences(comparison, side_name), large=True)
        for side_name in other_sides
    ]
    conditions = _build_condition_section(outcomes)

    return Report(
        title=f"{', '.join(other_sides)} vs. {first_side}",
        generated_by="loadgen compare",
        notices=list(_list_notices(comparison)),
        headline=headline,
        sections=[
            section("What is compared", _build_fact_table(comparison)),
            section(
                "", named_facts(Workload=_describe_work(comparison), Uncertainty=comparison.scope)
            ),
            *(_build_side_section(comparison, side_name) for side_name in other_sides),
            section("", Paragraph(_explain_columns(comparison), "soft")),
            build_answer_section(comparison.answers),
            section("Recovery to the SLO", _build_recovery_table(comparison)),
            section("Notes", Bullets(comparison.notes)),
            conditions,
        ],
        brief=[
            section("", *headline, Paragraph(describe_sides(comparison))),
            *(_build_terminal_section(comparison, side_name) for side_name in other_sides),
            build_answer_section(comparison.answers),
            section("", *_list_brief_caveats(comparison)),
            conditions,
        ],
    )


def _build_condition_section(outcomes: Sequence[ThresholdOutcome]) -> Section:
    """Return the section with the outcome of each condition of `--fail-on`."""
    rows = [
        (_describe_failed(outcome), outcome.condition, outcome.side, outcome.text)
        for outcome in outcomes
    ]
    return section("Conditions", Table(("", "condition", "side", "result"), rows, "prose"))


def _build_terminal_section(comparison: Comparison, side_name: str) -> Section:
    """Return the table that a terminal shows of one side: a row for each metric.

    A row has the value of the first side, the value of this side, the change from one to the other,
    its confidence interval and its outcome. Interval and outcome are left out if no metric of this
    side is judged.

    Metrics of a single request class, and of a single step of a task, are only shown if they
    differ, because there may be dozens of them. The full report has all of them.
    """
    differences = _select_differences(comparison, side_name)
    rows_to_show = [
        difference
        for difference in differences
        if not _is_of_class_or_step(difference) or difference.outcome == "different"
    ]
    value_columns = ("metric", comparison.sides[0], side_name, "change")

    reason_not_judged = _find_common_reason(differences)
    if reason_not_judged:
        value_rows = [_format_values(difference) for difference in rows_to_show]
        return section("", Table(value_columns, value_rows))

    columns = (*value_columns, f"{comparison.confidence:.0%} CI", "outcome")
    rows = [_format_judged_cells(difference) for difference in rows_to_show]
    return section("", Table(columns, rows))


def _select_differences(comparison: Comparison, side_name: str) -> list[Difference]:
    """Return the differences of one side from the first one, one for each metric."""
    return [difference for difference in comparison.differences if difference.side == side_name]


def _is_of_class_or_step(difference: Difference) -> bool:
    """Return True for a metric of one request class, or of one step of the workload's tasks."""
    return difference.metric.startswith(("classes.", "steps."))


def _list_brief_caveats(comparison: Comparison) -> Iterator[Paragraph]:
    """Yield what limits the comparison: different workloads, drafts that differ, too few runs."""
    if comparison.same_work is False:
        workloads = "; ".join(comparison.work_differences)
        yield Paragraph(
            f"The workloads differ ({workloads}). Use --anyway to judge the metrics even so.",
            "warn",
        )

    for note in comparison.accepted_length_notes:
        yield Paragraph(f"{note}.", "warn")

    slo_caveat = _describe_slo_caveat(comparison)
    if slo_caveat:
        yield Paragraph(slo_caveat, "warn")

    has_repeats = all(count > 1 for count in comparison.runs)
    if not has_repeats:
        yield Paragraph(comparison.scope)


def _describe_slo_caveat(comparison: Comparison) -> str:
    """Return which metrics are not compared because the SLOs differ, or "" if they are equal.

    For example: `Not compared: SLO attainment (the SLOs differ).`
    """
    texts = [
        f"{difference.name} ({difference.reason})"
        for difference in comparison.differences
        if not difference.is_compared and not _is_of_class_or_step(difference)
    ]
    return f"Not compared: {', '.join(dict.fromkeys(texts))}." if texts else ""


def list_junit_cases(
    comparison: Comparison, outcomes: Sequence[ThresholdOutcome]
) -> Iterator[JUnitCase]:
    """Yield a JUnit case per condition, or per difference if there are no conditions.

    Cases of differences cannot fail. A comparison with simulated sides has one more case that says
    so, and one of invalid runs has one more case in error.
    """
    if comparison.simulated:
        yield JUnitCase(
            name=f"SIMULATED: {_describe_simulated(comparison)}",
            group="loadgen compare",
            outcome="passed",
        )

    if not comparison.valid:
        reasons = [
            f"{run} is INVALID: {'; '.join(map(format_reason, codes))}"
            for run, codes in comparison.codes.items()
        ]
        yield JUnitCase(
            name="measurements are valid",
            group="loadgen compare",
            outcome="error",
            text="\n".join(reasons),
        )

    for outcome in outcomes:
        has_passed = None if outcome.failed is None else not outcome.failed
        yield JUnitCase(
            name=outcome.condition,
            group=f"loadgen compare {outcome.side}",
            outcome=OUTCOME_OF_MET[has_passed],
            text=outcome.text,
        )

    if not outcomes:
        for difference in comparison.differences:
            yield _create_difference_case(difference)


def _create_difference_case(difference: Difference) -> JUnitCase:
    """Return the JUnit case of a difference. It cannot fail, because it has no limit."""
    _metric_name, *cells = _format_row(difference)
    return JUnitCase(
        name=difference.name,
        group=f"loadgen compare {difference.side}",
        outcome="skipped" if difference.outcome == "inconclusive" else "passed",
        text=" ".join(cell for cell in cells if cell != format.NONE),
    )


def _list_notices(comparison: Comparison) -> Iterator[Notice]:
    """Yield what a reader must know first: simulated sides and INVALID runs."""
    yield from list_simulated_notices(comparison)
    for run, codes in comparison.codes.items():
        yield Notice("INVALID", f"{run}: {'; '.join(map(format_reason, codes))}", "bad")


def list_simulated_notices(comparison: Comparison) -> Iterator[Notice]:
    """Yield a notice that names the simulated sides, if there are any."""
    if comparison.simulated:
        yield simulated_notice(_describe_simulated(comparison))


def _describe_simulated(comparison: Comparison) -> str:
    """Return which sides are results of a performance model."""
    sides = ", ".join(comparison.simulated)
    return f"Results come from a performance model, not from real hardware: {sides}."


def summarize_differences(comparison: Comparison, side_name: str) -> str:
    """Return what differs between a side and the first one, in one sentence.

    An example is "after vs. before: worse in TTFT p99; equivalent in 8 metrics."
    """
    heading = f"{side_name} vs. {comparison.sides[0]}"
    differences = _select_differences(comparison, side_name)
    if not differences:
        return f"{heading}: the results have no metric in common."

    reason_not_judged = _find_common_reason(differences)
    if reason_not_judged:
        return f"{heading}: the metrics are not judged ({reason_not_judged})."

    clauses = [*_list_naming_clauses(differences), *_list_counting_clauses(differences)]
    if not clauses:
        return f"{heading}: no metric is compared."
    return f"{heading}: {'; '.join(clauses)}."


def _list_naming_clauses(differences: Sequence[Difference]) -> Iterator[str]:
    """Yield which metrics differ, such as "worse in TTFT p99".

    The outcomes of single runs say neither better nor worse, so their clause has the direction:
    "runs differ (lower in TTFT p50, TTFT p99; higher in TPOT p50)".
    """
    for outcome in _OUTCOMES_TO_NAME:
        of_outcome = [
            difference for difference in differences if difference.detailed_outcome == outcome
        ]
        if not of_outcome:
            continue

        text = _OUTCOME_TEXTS.get(outcome, outcome)
        if outcome in _OUTCOMES_WITHOUT_DIRECTION:
            yield f"{text} ({_describe_directions(of_outcome)})"
        else:
            yield f"{text} in {_join_names(of_outcome)}"


def _describe_directions(differences: Sequence[Difference]) -> str:
    """Return which metrics are lower and which are higher than those of the first side."""
    lower = [difference for difference in differences if (difference.change or 0.0) < 0]
    higher = [difference for difference in differences if (difference.change or 0.0) >= 0]
    clauses = []
    if lower:
        clauses.append(f"lower in {_join_names(lower)}")
    if higher:
        clauses.append(f"higher in {_join_names(higher)}")
    return "; ".join(clauses)


def _join_names(differences: Sequence[Difference]) -> str:
    """Return the names of the metrics of several differences, such as "TTFT p50, TTFT p99"."""
    return ", ".join(difference.name for difference in differences)


def _list_counting_clauses(differences: Sequence[Difference]) -> Iterator[str]:
    """Yield how many metrics have an outcome that is only counted.

    An example is "equivalent in 2 metrics". The words are those of the table, apart from the width
    of the interval.
    """
    for outcome in _OUTCOMES_TO_COUNT:
        texts = [
            _describe_outcome(difference)
            for difference in differences
            if difference.outcome == outcome and difference.is_compared
        ]
        for text, count in Counter(texts).items():
            yield f"{text} in {format.counted(count, 'metric')}"


def describe_sides(comparison: Comparison) -> str:
    """Return the workload and load of all sides, and the facts in which they differ.

    An example is "Same workload and load: qa, poisson 20/s. Different URL: http://h1:8000 (before),
    http://h2:8000 (after)."

    Return "" if the text would be long, for example for many sides. The full report has a table.
    """
    same_names: list[str] = []
    same_values: list[str] = []
    sentences: list[str] = []
    for fact_name in _FACTS_IN_BRIEF:
        field = _FACT_FIELDS[fact_name]
        value_by_side = {facts.name: getattr(facts, field) for facts in comparison.facts}
        values = set(value_by_side.values())
        is_known = all(values)
        is_same = len(values) == 1
        if is_known and is_same and fact_name in _SHARED_FACTS_IN_BRIEF:
            same_names.append(fact_name)
            same_values.extend(values)
        elif is_known and len(values) > 1:
            texts = [f"{value} ({side_name})" for side_name, value in value_by_side.items()]
            sentences.append(f"Different {fact_name}: {', '.join(texts)}.")

    if same_names:
        sentences.insert(0, f"Same {' and '.join(same_names)}: {', '.join(same_values)}.")
    text = " ".join(sentences)
    return text if len(text) <= LONGEST_BRIEF_FACTS else ""


def _build_fact_table(comparison: Comparison) -> Table:
    """Return a table with a row for each fact about the sides, such as the model, and their values.

    A value that is the same as that of the first side is written as "same". A fact that is not
    known of any side has no row.
    """
    rows = []
    for row_name, field in _FACT_FIELDS.items():
        first_value, *other_values = (getattr(facts, field) for facts in comparison.facts)
        if not first_value and not any(other_values):
            continue
        other_cells = [
            "same" if value == first_value else _format_fact(value) for value in other_values
        ]
        rows.append((row_name, _format_fact(first_value), *other_cells))

    side_names = (facts.name for facts in comparison.facts)
    return Table(("", *side_names), rows, "prose")


def _format_fact(value: object) -> str:
    """Return a fact of a side as text, or a dash if it is not known."""
    return str(value) if value else format.NONE


def _describe_work(comparison: Comparison) -> str:
    """Return whether the workloads of all sides are the same, and how they differ if not."""
    if comparison.same_work is None:
        return "may differ: a side has no fingerprint"
    if comparison.same_work:
        return "the same (equal fingerprints)"
    return f"DIFFERENT: {'; '.join(comparison.work_differences)}"


def _build_side_section(comparison: Comparison, side_name: str) -> Section:
    """Return the bars and the table of all differences between one side and the first.

    If no difference is judged, and all for one reason, the table has no columns of outcomes, and
    the reason is given once below it.
    """
    differences = _select_differences(comparison, side_name)
    heading = f"{side_name} vs. {comparison.sides[0]}"
    bars = _build_change_bars(differences)
    value_columns = ("metric", comparison.sides[0], side_name, "change")

    reason_not_judged = _find_common_reason(differences)
    if reason_not_judged:
        hint = "; use --anyway to judge them even so" if reason_not_judged == NOT_SAME_WORK else ""
        return section(
            heading,
            *bars,
            Table(value_columns, [_format_values(difference) for difference in differences]),
            Paragraph(f"Not judged: {reason_not_judged}{hint}.", "warn"),
        )

    run_count = min(comparison.runs, default=0)

    # The last column, which has no heading, says why a metric is inconclusive.
    columns = (*value_columns, f"{comparison.confidence:.0%} CI", "outcome", "")
    rows = [_format_row(difference, run_count) for difference in differences]
    return section(heading, *bars, Table(columns, rows, "remarks"))


def _find_common_reason(differences: Sequence[Difference]) -> str:
    """Return the reason for which no difference is judged, if all have the same one, or "".

    It is then shown once and not in every row. A single difference always shows its own reason. A
    difference that is judged and conclusive has the reason "".
    """
    reasons = {difference.reason for difference in differences}
    if len(differences) > 1 and len(reasons) == 1:
        return reasons.pop()
    return ""


def _build_change_bars(differences: Sequence[Difference]) -> Iterator[Bars]:
    """Yield one chart of relative changes and one of changes of fractions, if there are any.

    Their scales are different: percent and percentage points.
    """
    relative_bars: list[Bar] = []
    fraction_bars: list[Bar] = []
    for difference in differences:
        change = difference.change
        if change is None or abs(change) > LARGEST_DRAWN_CHANGE:
            continue
        bars = fraction_bars if difference.is_fraction else relative_bars
        bars.append(_build_change_bar(difference, change))

    suffix = "change with confidence interval"
    if relative_bars:
        title = f"Latencies and rates: {suffix}"
        yield Bars(rows=relative_bars, title=title, unit=" %", marked_value=0.0)

    if fraction_bars:
        title = f"Percentages: {suffix}"
        yield Bars(rows=fraction_bars, title=title, unit=" points", marked_value=0.0)


def _build_change_bar(difference: Difference, change: float) -> Bar:
    """Return a bar from zero to a change, in percent or points, with its interval as a whisker.

    The whisker is left out if the interval is unknown or would not fit into the chart.
    """
    text = _format_change(difference)
    if difference.outcome != "inconclusive":
        text += f"  {_format_outcome(difference)}"

    start, end = sorted((0.0, change * 100))
    color = _OUTCOME_COLORS.get(difference.detailed_outcome, NEUTRAL_COLOR)
    whisker = None
    low = difference.low

    high = difference.high
    if low is not None and high is not None and high <= LARGEST_DRAWN_CHANGE:
        whisker = (low * 100, high * 100)

    return Bar(difference.name, text, [(start, end, color, text)], whisker)


def _build_recovery_table(comparison: Comparison) -> Table:
    """Return how long each side took to meet its SLO again after an event, such as a load spike.

    Each event has a row, and each side a column. Sides are compared event by event: the second
    spike of one side is in the row of the second spike of the other side.

    The columns are, in this order:

    - after: The event, such as "spike".
    - before: The load before the event.
    - then: The load after the event.
    - The name of each side: How long it took to recover.
    - resolution: How precisely the times are known.
    """
    recoveries_by_event: dict[_EventKey, list[SideRecovery]] = {}
    for side_recovery in comparison.recovery:
        event_label = recovery.EVENTS[side_recovery.recovery.event]
        event_key = _EventKey(event_label, number_in_run=side_recovery.number)
        recoveries_by_event.setdefault(event_key, []).append(side_recovery)

    rows = [
        _build_recovery_row(event_key.label, side_recoveries, comparison.sides)
        for event_key, side_recoveries in recoveries_by_event.items()
    ]
    columns = ("after", "before", "then", *comparison.sides, "resolution")
    return Table(columns, rows, "prose")


class _EventKey(NamedTuple):
    """Identifies the same event in the runs of all sides, such as the second spike of the load.

    Attributes:
        label: The label of the kind of event, such as "spike".
        number_in_run: The number of the event among those of its kind in a run, from 1.
    """

    label: str
    number_in_run: int


def _build_recovery_row(
    event_label: str, side_recoveries: Sequence[SideRecovery], side_names: Sequence[str]
) -> tuple[str, ...]:
    """Return the row of one event: the event, its load, and how long each side took to recover.

    A side that has several runs may have several times. The last cell is the resolution of the
    times: the coarsest of the runs.

    Args:
        event_label: The label of the event.
        side_recoveries: How the runs of all sides recovered from it.
        side_names: The names of the sides, one for each column.
    """
    recovery_times = []
    for side_name in side_names:
        recoveries_of_side = [item.recovery for item in side_recoveries if item.side == side_name]
        recovery_times.append(_join_unique(map(recovery.describe_recovery, recoveries_of_side)))

    resolution_s = max(item.recovery.resolution_s for item in side_recoveries)
    return (
        event_label,
        _join_unique(item.recovery.load_before for item in side_recoveries),
        _join_unique(item.recovery.load_after for item in side_recoveries),
        *recovery_times,
        format.duration(resolution_s),
    )


def _join_unique(texts: Iterable[str]) -> str:
    """Join texts, each of them once, because several runs may have the same one.

    Return a dash if there are no texts.
    """
    return "; ".join(dict.fromkeys(texts)) or format.NONE


def _explain_columns(comparison: Comparison) -> str:
    """Return what the columns of the tables mean, or "" if no difference has an interval."""
    if all(difference.low is None for difference in comparison.differences):
        return ""
    return (
        f"CI: confidence interval, {comparison.confidence:.0%} for all metrics "
        "together (Holm). Different: the interval excludes 0. Equivalent (X %): the "
        f"whole interval is within X %, which is at most {EQUIVALENT_CHANGE:.0%}, or "
        f"{EQUIVALENT_POINTS * 100:g} point for percentages. Inconclusive: neither of "
        "them. A change as large as the minimum detectable change is found in 90 % "
        "of such comparisons. Changes of percentages are in percentage points."
    )


def _describe_failed(outcome: ThresholdOutcome) -> str:
    """Return the outcome of a condition. A condition that holds fails the command."""
    if outcome.failed is None:
        return "inconclusive"
    return "FAILED" if outcome.failed else "passed"


def _format_row(difference: Difference, run_count: int = 0) -> tuple[str, ...]:
    """Return the row of a judged difference in the full report.

    The last cell says why the difference is inconclusive. It is "" for any other outcome.

    Args:
        difference: The difference.
        run_count: The number of runs per side, from which the number of runs that would decide an
            inconclusive difference is computed.
    """
    return (*_format_judged_cells(difference), _describe_inconclusive(difference, run_count))


def _format_judged_cells(difference: Difference) -> tuple[str, ...]:
    """Return the cells of a judged difference: name, values, change, interval and outcome."""
    return (
        *_format_values(difference),
        format_interval(difference),
        _format_outcome(difference),
    )


def _format_values(difference: Difference) -> tuple[str, ...]:
    """Return the cells that a difference has even if it is not judged: name, values and change."""
    name_with_unit = difference.name
    if difference.unit:
        name_with_unit += f", {difference.unit}"

    return (
        name_with_unit,
        _format_value(difference, difference.before),
        _format_value(difference, difference.after),
        _format_change(difference),
    )


def _format_outcome(difference: Difference) -> str:
    """Return the outcome as text, such as "worse" or "equivalent (3.1 %)".

    The percentage says that the whole interval is within 3.1 % of no change.
    """
    if not difference.is_compared:
        return NOT_COMPARED
    outcome = _describe_outcome(difference)
    if difference.equivalent_within is None:
        return outcome
    unit = "points" if difference.is_fraction else "%"
    return f"{outcome} ({difference.equivalent_within * 100:.1f} {unit})"


def _describe_outcome(difference: Difference) -> str:
    """Return the outcome in a few words, without the width of the interval."""
    if difference.equivalent_within is not None:
        return difference.detailed_outcome
    return _OUTCOME_TEXTS.get(difference.detailed_outcome, difference.detailed_outcome)


def _describe_inconclusive(difference: Difference, run_count: int) -> str:
    """Return why a difference is inconclusive and what would decide it, or "" if it is decided."""
    if difference.outcome != "inconclusive":
        return ""

    texts = [difference.reason]
    detectable = _format_detectable(difference)
    if detectable != format.NONE:
        texts.append(f"minimum detectable change {detectable}")

    needed_load = describe_needed_load(difference, difference.needed_load_factor, run_count)
    texts.append(needed_load)
    return "; ".join(filter(None, texts))


def _format_value(difference: Difference, value: float | None) -> str:
    """Return a value of a metric, as a percentage if the metric is a fraction."""
    return format.percent(value) if difference.is_fraction else format.quantity(value)


def _format_change(difference: Difference) -> str:
    """Return a change for a table, such as "+8.1 %", "-0.52 points" or, when it doubles, "2.3x"."""
    change = difference.change
    if change is None:
        return format.NONE
    if change == 0:
        return "="
    if difference.is_fraction:
        return f"{change * 100:+.2f} points"
    if abs(change) < SMALLEST_PRINTED_CHANGE:
        return "0.0 %"
    if abs(change) < 1:
        return f"{change * 100:+.1f} %"

    return format.difference(difference.before, difference.after)


def _format_detectable(difference: Difference) -> str:
    """Return the minimum detectable change, or a dash if it is unknown or too large to say."""
    detectable = difference.detectable
    if detectable is None or detectable >= LARGEST_DETECTABLE_CHANGE:
        return format.NONE
    unit = "points" if difference.is_fraction else "%"
    return f"{detectable * 100:.1f} {unit}"
