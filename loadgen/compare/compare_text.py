"""Renders a comparison as a report, of which text, Markdown and page are made, and as JUnit cases.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from loadgen.compare.comparison import NOT_SAME_WORK, Comparison, SideRecovery
from loadgen.compare.difference import DIFFER, Difference, describe_needed_load
from loadgen.compare.judgement import EQUIVALENT_CHANGE, EQUIVALENT_POINTS
from loadgen.compare.thresholds import ThresholdOutcome, format_interval
from loadgen.core import format
from loadgen.core.metrics.reasons import format_reason
from loadgen.render.junit import OUTCOME_OF_MET, Case
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
"""A bar of a change of more than 900 % would leave no room for the others."""

LARGEST_DETECTABLE_CHANGE = 99
SMALLEST_PRINTED_CHANGE = 0.0005

_WORDS_IN_ORDER = ("worse", "better", "different", DIFFER)
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
    first, *others = comparison.sides
    conditions = [
        (_describe_failed(outcome), outcome.condition, outcome.side, outcome.text)
        for outcome in outcomes
    ]
    return Report(
        title=f"{first} with {', '.join(others)}",
        generated_by="loadgen compare",
        notices=list(_warnings(comparison)),
        headline=[Paragraph(_answer(comparison, side), large=True) for side in others],
        sections=[
            section("What is compared", _fact_table(comparison)),
            section("", named_facts(Work=_describe_work(comparison), Judged=comparison.scope)),
            *(_side_section(comparison, side) for side in others),
            section("", Paragraph(_legend(comparison), "soft")),
            section("Back within the SLO", _recovery_table(comparison)),
            section("Notes", Bullets(comparison.notes)),
            section(
                "Conditions", Table(("", "condition", "side", "came out"), conditions, "prose")
            ),
        ],
    )


def junit_cases(comparison: Comparison, outcomes: Sequence[ThresholdOutcome]) -> Iterator[Case]:
    """Yield a JUnit case per condition, or per difference if there are no conditions.

    Cases of differences cannot fail. A comparison with simulated sides has one more case that says
    so, and one of invalid runs has one more case in error.
    """
    if comparison.simulated:
        yield Case(
            name=f"SIMULATED: {_describe_simulated(comparison)}",
            group="loadgen compare",
            outcome="passed",
        )
    if not comparison.valid:
        reasons = [
            f"{run} is not valid: {'; '.join(map(format_reason, codes))}"
            for run, codes in comparison.codes.items()
        ]
        yield Case(
            name="measurements are valid",
            group="loadgen compare",
            outcome="error",
            text="\n".join(reasons),
        )
    for outcome in outcomes:
        is_met = None if outcome.failed is None else not outcome.failed
        yield Case(
            name=outcome.condition,
            group=f"loadgen compare {outcome.side}",
            outcome=OUTCOME_OF_MET[is_met],
            text=outcome.text,
        )
    if not outcomes:
        for difference in comparison.differences:
            yield _difference_case(difference)


def _difference_case(difference: Difference) -> Case:
    _, *cells = _row(difference)
    return Case(
        name=difference.name,
        group=f"loadgen compare {difference.side}",
        outcome="skipped" if difference.outcome == "inconclusive" else "passed",
        text=" ".join(cell for cell in cells if cell != format.NONE),
    )


def _warnings(comparison: Comparison) -> Iterator[Notice]:
    if comparison.simulated:
        yield simulated_notice(_describe_simulated(comparison))
    for run, codes in comparison.codes.items():
        yield Notice("INVALID", f"{run}: {'; '.join(map(format_reason, codes))}", "bad")


def _describe_simulated(comparison: Comparison) -> str:
    return f"a model of a server answered: {', '.join(comparison.simulated)}"


def _answer(comparison: Comparison, side: str) -> str:
    """Return what differs between a side and the first one, in one sentence.

    What is worse is first.
    """
    differences = [difference for difference in comparison.differences if difference.side == side]
    names_by_word: dict[str, list[str]] = {}
    for difference in differences:
        names_by_word.setdefault(difference.word, []).append(difference.name)
    clauses = [
        f"{word} in {', '.join(names_by_word[word])}"
        for word in _WORDS_IN_ORDER
        if word in names_by_word
    ]
    largest_changes = [
        difference.within for difference in differences if difference.within is not None
    ]
    if largest_changes:
        margin = max(largest_changes)
        clauses.append(f"equivalent within {margin * 100:.1f} % in {len(largest_changes)}")
    if "inconclusive" in names_by_word:
        clauses.append(f"inconclusive in {len(names_by_word['inconclusive'])}")
    text = "; ".join(clauses) or "no figure on both sides"
    return f"{side} against {comparison.sides[0]}: {text}."


def _fact_table(comparison: Comparison) -> Table:
    """Return a table with a row for each fact and a column for each side."""
    rows = []
    for name, field in _FACTS.items():
        values = [getattr(side, field) for side in comparison.facts]
        if any(values):
            rows.append((name, *(str(value) if value else format.NONE for value in values)))
    return Table(("", *(side.name for side in comparison.facts)), rows, "prose")


def _describe_work(comparison: Comparison) -> str:
    if comparison.same_work is None:
        return "whether the work was the same is not known: a side has no fingerprint"
    if comparison.same_work:
        return "the same: equal fingerprints"
    return f"NOT the same: {'; '.join(comparison.unlike)}"


def _side_section(comparison: Comparison, side: str) -> Section:
    """Return the table and the bars of the differences between one side and the first.

    If no difference is judged, and all for one reason, the table has no columns of outcomes, and
    the reason is given once below it.
    """
    differences = [difference for difference in comparison.differences if difference.side == side]
    heading = f"{side} against {comparison.sides[0]}"
    bars = _change_bars(differences)
    run_count = min(comparison.runs, default=0)
    rows = [_row(difference, run_count) for difference in differences]
    value_columns = ("metric", comparison.sides[0], side, "change")
    outcome_columns = (f"interval, {comparison.confidence:.0%}", "outcome", "")
    reason = _common_reason(differences)
    if not reason:
        return section(heading, *bars, Table(value_columns + outcome_columns, rows, "remarks"))
    hint = "; --anyway judges all the same" if reason == NOT_SAME_WORK else ""
    return section(
        heading,
        *bars,
        Table(value_columns, [row[: len(value_columns)] for row in rows], ""),
        Paragraph(f"None of them is judged: {reason}{hint}.", "warn"),
    )


def _common_reason(differences: Sequence[Difference]) -> str:
    """Return why no difference is judged if it is the same reason for all of several, or ""."""
    reasons = {difference.why for difference in differences}
    if len(differences) > 1 and len(reasons) == 1:
        return reasons.pop()
    return ""


def _change_bars(differences: Sequence[Difference]) -> Iterator[Bars]:
    """Yield every change as a bar from zero, with its interval as a whisker.

    Ratios and fractions have scales of their own.
    """
    for is_absolute, title, unit in (
        (False, "Latencies and rates", " %"),
        (True, "Shares", " points"),
    ):
        bars = [
            _change_bar(difference, difference.change)
            for difference in differences
            if difference.absolute == is_absolute
            and difference.change is not None
            and abs(difference.change) <= LARGEST_DRAWN_CHANGE
        ]
        if bars:
            yield Bars(rows=bars, title=f"{title}: change, with its interval", unit=unit, line=0.0)


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
    """Return a row for each event of the load or of the server, with a column for each side.

    Sides are compared event by event: the second spike of one side shares a row with the second
    spike of the other.
    """
    recoveries_by_event: dict[tuple[str, int], list[SideRecovery]] = {}
    for side_recovery in comparison.recovery:
        event = recovery.EVENTS[side_recovery.recovery.event]
        recoveries_by_event.setdefault((event, side_recovery.number), []).append(side_recovery)
    rows = [
        _recovery_row(event, recoveries, comparison.sides)
        for (event, _number), recoveries in recoveries_by_event.items()
    ]
    return Table(("after", "before it", "then", *comparison.sides, "seen to within"), rows, "prose")


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
        f"Intervals: {comparison.confidence:.0%} for all metrics together (Holm). Different: the "
        "interval does not hold zero. Equivalent (X %): it holds no change beyond X %, at most "
        f"{EQUIVALENT_CHANGE:.0%}, of a share {EQUIVALENT_POINTS * 100:g} point. "
        "Inconclusive: neither; the smallest change that nine of ten such comparisons would see "
        "stands below. Shares differ in points."
    )


def _describe_failed(outcome: ThresholdOutcome) -> str:
    if outcome.failed is None:
        return "inconclusive"
    return "FAILED" if outcome.failed else "passed"


def _row(difference: Difference, run_count: int = 0) -> tuple[str, ...]:
    """Return the row of a difference in the table of its side.

    `run_count` is the number of runs on a side, from which the runs that would decide are counted.
    """
    return (
        ", ".join(filter(None, (difference.name, difference.unit))),
        _format_value(difference, difference.before),
        _format_value(difference, difference.after),
        _format_change(difference),
        format_interval(difference),
        _format_outcome(difference),
        _describe_inconclusive(difference, run_count),
    )


def _format_outcome(difference: Difference) -> str:
    if difference.within is None:
        return difference.word
    unit = "points" if difference.absolute else "%"
    return f"equivalent ({difference.within * 100:.1f} {unit})"


def _describe_inconclusive(difference: Difference, run_count: int) -> str:
    """Return why a difference is inconclusive and what would decide it, or "" if it is decided."""
    if difference.outcome != "inconclusive":
        return ""
    texts = [difference.why]
    detectable = _format_detectable(difference)
    if detectable != format.NONE:
        texts.append(f"a change of {detectable} would be seen")
    texts.append(describe_needed_load(difference, difference.needed, run_count))
    return "; ".join(filter(None, texts))


def _format_value(difference: Difference, value: float | None) -> str:
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
    detectable = difference.detectable
    if detectable is None or detectable >= LARGEST_DETECTABLE_CHANGE:
        return format.NONE
    unit = "points" if difference.absolute else "%"
    return f"{detectable * 100:.1f} {unit}"
