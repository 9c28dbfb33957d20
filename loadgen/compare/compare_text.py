"""Renders a comparison as a report, of which text, Markdown and page are made, and as JUnit cases.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from loadgen.compare.comparison import NOT_SAME_WORK, Comparison, SideRecovery
from loadgen.compare.difference import DIFFER, Difference, describe_needed_load
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

VALUE_COLUMNS = ("metric", "first side", "other side", "change")
"""The columns of a table of differences that are known without an interval."""

_OUTCOMES_TO_NAME = ("worse", "better", "different", DIFFER)
"""The outcomes whose metrics the answer names, in this order."""

_OUTCOME_TEXTS: Mapping[str, str] = {DIFFER: "runs differ"}
"""How an outcome is printed, if not by its own name."""

_COLORS = {"better": "good", "worse": "bad", "different": "warn", DIFFER: "warn"}
_FACTS = {
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


def report(comparison: Comparison, outcomes: Sequence[ThresholdOutcome] = ()) -> Report:
    """Return the report of a comparison and of the conditions that were checked."""
    first, *other_sides = comparison.sides
    answer = [Paragraph(_answer(comparison, side), large=True) for side in other_sides]
    conditions = _condition_section(outcomes)
    return Report(
        title=f"{', '.join(other_sides)} vs. {first}",
        generated_by="loadgen compare",
        notices=list(_warnings(comparison)),
        headline=answer,
        sections=[
            section("What is compared", _fact_table(comparison)),
            section(
                "", named_facts(Workload=_describe_work(comparison), Uncertainty=comparison.scope)
            ),
            *(_side_section(comparison, side) for side in other_sides),
            section("", Paragraph(_legend(comparison), "soft")),
            section("Recovery to the SLO", _recovery_table(comparison)),
            section("Notes", Bullets(comparison.notes)),
            conditions,
        ],
        brief=[
            section("", *answer),
            *(_brief_table(comparison, side) for side in other_sides),
            section("", *_brief_caveats(comparison)),
            conditions,
        ],
    )


def _condition_section(outcomes: Sequence[ThresholdOutcome]) -> Section:
    """Return the section with the outcome of each condition of `--fail-on`."""
    rows = [
        (_describe_failed(outcome), outcome.condition, outcome.side, outcome.text)
        for outcome in outcomes
    ]
    return section("Conditions", Table(("", "condition", "side", "result"), rows, "prose"))


def _brief_table(comparison: Comparison, side: str) -> Section:
    """Return a row per metric: both values, the change, its interval and the outcome.

    Metrics of request classes and steps are left out unless they differ, because there may be
    dozens of them.
    """
    first = comparison.sides[0]
    differences = [difference for difference in comparison.differences if difference.side == side]
    rows = [
        _value_cells(difference)
        for difference in differences
        if not _is_of_part(difference) or difference.outcome == "different"
    ]
    head = ("metric", first, side, "change", f"{comparison.confidence:.0%} CI", "outcome")
    if _common_reason(differences):
        # No difference is judged, so there are no intervals and outcomes.
        column_count = len(VALUE_COLUMNS)
        return section("", Table(head[:column_count], [row[:column_count] for row in rows]))
    return section("", Table(head, rows))


def _is_of_part(difference: Difference) -> bool:
    """Return True for a metric of one request class or of one step."""
    return difference.metric.startswith(("classes.", "steps."))


def _brief_caveats(comparison: Comparison) -> Iterator[Paragraph]:
    """Yield what limits the comparison: different workloads, or too few runs."""
    if comparison.same_work is False:
        workloads = "; ".join(comparison.unlike)
        yield Paragraph(f"The workloads differ ({workloads}). --anyway judges anyway.", "warn")
    has_repeats = all(count > 1 for count in comparison.runs)
    if not has_repeats:
        yield Paragraph(comparison.scope)


def junit_cases(
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
        is_met = None if outcome.failed is None else not outcome.failed
        yield JUnitCase(
            name=outcome.condition,
            group=f"loadgen compare {outcome.side}",
            outcome=OUTCOME_OF_MET[is_met],
            text=outcome.text,
        )
    if not outcomes:
        for difference in comparison.differences:
            yield _difference_case(difference)


def _difference_case(difference: Difference) -> JUnitCase:
    """Return the JUnit case of a difference. It cannot fail, because it has no limit."""
    _, *cells = _row(difference)
    return JUnitCase(
        name=difference.name,
        group=f"loadgen compare {difference.side}",
        outcome="skipped" if difference.outcome == "inconclusive" else "passed",
        text=" ".join(cell for cell in cells if cell != format.NONE),
    )


def _warnings(comparison: Comparison) -> Iterator[Notice]:
    """Yield what a reader must know first: simulated sides and INVALID runs."""
    if comparison.simulated:
        yield simulated_notice(_describe_simulated(comparison))
    for run, codes in comparison.codes.items():
        yield Notice("INVALID", f"{run}: {'; '.join(map(format_reason, codes))}", "bad")


def _describe_simulated(comparison: Comparison) -> str:
    """Return which sides are results of a performance model."""
    sides = ", ".join(comparison.simulated)
    return f"Results come from a performance model, not from real hardware: {sides}."


def _answer(comparison: Comparison, side: str) -> str:
    """Return what differs between a side and the first one, in one sentence.

    Metrics that are worse come first. Of those without a significant difference only the number is
    given.
    """
    heading = f"{side} vs. {comparison.sides[0]}"
    differences = [difference for difference in comparison.differences if difference.side == side]
    if not differences:
        return f"{heading}: no metric in common."
    reason = _common_reason(differences)
    if reason:
        return f"{heading}: not judged ({reason})."
    names_by_outcome: dict[str, list[str]] = {}
    for difference in differences:
        names_by_outcome.setdefault(difference.word, []).append(difference.name)
    clauses = [
        f"{_OUTCOME_TEXTS.get(outcome, outcome)} in {', '.join(names_by_outcome[outcome])}"
        for outcome in _OUTCOMES_TO_NAME
        if outcome in names_by_outcome
    ]
    similar = [difference for difference in differences if difference.outcome != "different"]
    if similar:
        metrics = format.counted(len(similar), "metric")
        clauses.append(f"no significant difference in {metrics}")
    return f"{heading}: {'; '.join(clauses)}."


def _fact_table(comparison: Comparison) -> Table:
    """Return a table with a row for each fact and a column for each side.

    A value that is the same as that of the first side is not repeated.
    """
    rows = []
    for name, field in _FACTS.items():
        first, *other_values = (getattr(side, field) for side in comparison.facts)
        if first or any(other_values):
            cells = ["same" if value == first else _fact_text(value) for value in other_values]
            rows.append((name, _fact_text(first), *cells))
    return Table(("", *(side.name for side in comparison.facts)), rows, "prose")


def _fact_text(value: object) -> str:
    """Return a fact of a side as text, or a dash if it is not known."""
    return str(value) if value else format.NONE


def _describe_work(comparison: Comparison) -> str:
    """Return whether the workloads of all sides are the same, and how they differ if not."""
    if comparison.same_work is None:
        return "may differ: a side has no fingerprint"
    if comparison.same_work:
        return "the same (equal fingerprints)"
    return f"DIFFERENT: {'; '.join(comparison.unlike)}"


def _side_section(comparison: Comparison, side: str) -> Section:
    """Return the table and the bars of the differences between one side and the first.

    If no difference is judged, and all for one reason, the table has no columns of outcomes, and
    the reason is given once below it.
    """
    differences = [difference for difference in comparison.differences if difference.side == side]
    heading = f"{side} vs. {comparison.sides[0]}"
    bars = _change_bars(differences)
    run_count = min(comparison.runs, default=0)
    rows = [_row(difference, run_count) for difference in differences]
    value_columns = ("metric", comparison.sides[0], side, "change")
    outcome_columns = (f"{comparison.confidence:.0%} CI", "outcome", "")
    reason = _common_reason(differences)
    if not reason:
        return section(heading, *bars, Table(value_columns + outcome_columns, rows, "remarks"))
    hint = "; use --anyway to judge them anyway" if reason == NOT_SAME_WORK else ""
    return section(
        heading,
        *bars,
        Table(value_columns, [row[: len(value_columns)] for row in rows], ""),
        Paragraph(f"Not judged: {reason}{hint}.", "warn"),
    )


def _common_reason(differences: Sequence[Difference]) -> str:
    """Return why no difference is judged if it is the same reason for all of several, or ""."""
    reasons = {difference.reason for difference in differences}
    if len(differences) > 1 and len(reasons) == 1:
        return reasons.pop()
    return ""


def _change_bars(differences: Sequence[Difference]) -> Iterator[Bars]:
    """Yield every change as a bar from zero, with its interval as a whisker.

    Ratios and fractions have scales of their own.
    """
    for is_absolute, title, unit in (
        (False, "Latencies and rates", " %"),
        (True, "Percentages", " points"),
    ):
        bars = [
            _change_bar(difference, difference.change)
            for difference in differences
            if difference.absolute == is_absolute
            and difference.change is not None
            and abs(difference.change) <= LARGEST_DRAWN_CHANGE
        ]
        if bars:
            heading = f"{title}: change with confidence interval"
            yield Bars(rows=bars, title=heading, unit=unit, line=0.0)


def _change_bar(difference: Difference, change: float) -> Bar:
    """Return a bar from zero to a change, in percent or points, with its interval as a whisker.

    The whisker is left out if the interval is unknown or would not fit into the chart.
    """
    text = _format_change(difference)
    if difference.outcome != "inconclusive":
        text += f"  {_format_outcome(difference)}"
    start, end = sorted((0.0, change * 100))
    color = _COLORS.get(difference.word, "c6")
    whisker = None
    low = difference.low
    high = difference.high
    if low is not None and high is not None and high <= LARGEST_DRAWN_CHANGE:
        whisker = (low * 100, high * 100)
    return Bar(difference.name, text, [(start, end, color, text)], whisker)


def _recovery_table(comparison: Comparison) -> Table:
    """Return a row for each event, such as a spike of the load, with a column for each side.

    Sides are compared event by event: the second spike of one side is in the row of the second
    spike of the other side.
    """
    recoveries_by_event: dict[tuple[str, int], list[SideRecovery]] = {}
    for side_recovery in comparison.recovery:
        event = recovery.EVENTS[side_recovery.recovery.event]
        recoveries_by_event.setdefault((event, side_recovery.number), []).append(side_recovery)
    rows = [
        _recovery_row(event, recoveries, comparison.sides)
        for (event, _number), recoveries in recoveries_by_event.items()
    ]
    return Table(("after", "before", "then", *comparison.sides, "resolution"), rows, "prose")


def _recovery_row(
    event: str, recoveries: Sequence[SideRecovery], sides: Sequence[str]
) -> tuple[str, ...]:
    """Return what an event was and how long each side took to return to its SLO.

    The last cell is the resolution of these times: the coarsest of the runs.
    """
    recovery_times = [
        _join_unique(
            recovery.describe_recovery(side_recovery.recovery)
            for side_recovery in recoveries
            if side_recovery.side == side
        )
        for side in sides
    ]
    resolution_s = max(side_recovery.recovery.resolution_s for side_recovery in recoveries)
    return (
        event,
        _join_unique(side_recovery.recovery.load_before for side_recovery in recoveries),
        _join_unique(side_recovery.recovery.load_after for side_recovery in recoveries),
        *recovery_times,
        format.duration(resolution_s),
    )


def _join_unique(texts: Iterable[str]) -> str:
    """Return the texts without repetitions, because several runs of a side may agree."""
    return "; ".join(dict.fromkeys(texts)) or format.NONE


def _legend(comparison: Comparison) -> str:
    """Return what the columns of the tables mean, or "" if no difference has an interval."""
    if all(difference.low is None for difference in comparison.differences):
        return ""
    return (
        f"CI: confidence interval, {comparison.confidence:.0%} for all metrics together (Holm). "
        "Different: the interval excludes 0. Equivalent (X %): the whole interval is within X %, "
        f"which is at most {EQUIVALENT_CHANGE:.0%}, or {EQUIVALENT_POINTS * 100:g} point for "
        "percentages. Inconclusive: neither. The minimum detectable change is found by 90 % of "
        "such comparisons. Changes of percentages are in percentage points."
    )


def _describe_failed(outcome: ThresholdOutcome) -> str:
    """Return the outcome of a condition. A condition that holds fails the command."""
    if outcome.failed is None:
        return "inconclusive"
    return "FAILED" if outcome.failed else "passed"


def _row(difference: Difference, run_count: int = 0) -> tuple[str, ...]:
    """Return the row of a difference in the table of its side, with why it is inconclusive.

    `run_count` is the number of runs per side, from which the number of runs that would decide is
    computed.
    """
    return (*_value_cells(difference), _describe_inconclusive(difference, run_count))


def _value_cells(difference: Difference) -> tuple[str, ...]:
    """Return the metric, both values, the change, its interval and the outcome."""
    name = f"{difference.name}, {difference.unit}" if difference.unit else difference.name
    return (
        name,
        _format_value(difference, difference.before),
        _format_value(difference, difference.after),
        _format_change(difference),
        format_interval(difference),
        _format_outcome(difference),
    )


def _format_outcome(difference: Difference) -> str:
    """Return the outcome, with the margin within which two sides are equivalent."""
    if difference.within is None:
        return _OUTCOME_TEXTS.get(difference.word, difference.word)
    unit = "points" if difference.absolute else "%"
    return f"equivalent ({difference.within * 100:.1f} {unit})"


def _describe_inconclusive(difference: Difference, run_count: int) -> str:
    """Return why a difference is inconclusive and what would decide it, or "" if it is decided."""
    if difference.outcome != "inconclusive":
        return ""
    texts = [difference.reason]
    detectable = _format_detectable(difference)
    if detectable != format.NONE:
        texts.append(f"minimum detectable change {detectable}")
    texts.append(describe_needed_load(difference, difference.needed, run_count))
    return "; ".join(filter(None, texts))


def _format_value(difference: Difference, value: float | None) -> str:
    """Return a value of a metric, as a percentage if the metric is a fraction."""
    return format.percent(value) if difference.absolute else format.quantity(value)


def _format_change(difference: Difference) -> str:
    """Return a change for a table, such as "+8.1 %", "-0.52 points" or, when it doubles, "2.3x"."""
    change = difference.change
    if change is None:
        return format.NONE
    if change == 0:
        return "="
    if difference.absolute:
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
    unit = "points" if difference.absolute else "%"
    return f"{detectable * 100:.1f} {unit}"
