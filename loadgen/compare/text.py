"""A comparison as a report, of which text, Markdown and page are made, and as JUnit cases. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from loadgen.compare.comparison import (
    DIFFER,
    EQUIVALENT_CHANGE,
    EQUIVALENT_POINTS,
    UNLIKE,
    Comparison,
    Difference,
    WayBack,
    needed_in_words,
)
from loadgen.compare.thresholds import ThresholdOutcome, interval
from loadgen.core import format
from loadgen.core.metrics.reasons import sentence
from loadgen.render.junit import OF_MET, Case
from loadgen.render.page import Bar
from loadgen.render.section import (
    Bars,
    Bullets,
    Paragraph,
    Report,
    Section,
    Table,
    Warned,
    facts,
    section,
    simulated,
)
from loadgen.runs import recovery

MOST_DRAWN = 9.0  # a change of more than 900 % would leave no room for the others


def report(comparison: Comparison, outcomes: Sequence[ThresholdOutcome] = ()) -> Report:
    """What differs, whether the work was the same, each change with its interval, notes, and what `--fail-on` asked."""
    first, *others = comparison.sides
    reasons = {run: "; ".join(map(sentence, codes)) for run, codes in comparison.codes.items()}
    warned = [Warned("INVALID", f"{run}: {why}", "bad") for run, why in reasons.items()]
    if comparison.simulated:
        warned.insert(0, simulated(_of_simulated(comparison)))
    cells = [(_mark(one), one.condition, one.side, one.said) for one in outcomes]
    return Report(
        title=f"{first} with {', '.join(others)}",
        made_by="loadgen compare",
        warned=warned,
        answer=[Paragraph(_answer(comparison, side), large=True) for side in others],
        sections=[
            section("What is compared", _sides(comparison)),
            section("", facts(Work=_work(comparison), Judged=comparison.scope)),
            *(_against(comparison, side) for side in others),
            section("", Paragraph(_legend(comparison), "soft")),
            section("Back within the SLO", _ways_back(comparison)),
            section("Notes", Bullets(comparison.notes)),
            section("Conditions", Table(("", "condition", "side", "came out"), cells, "words")),
        ],
    )


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
"""The facts of a side: the name of a row, and the field."""


def _sides(comparison: Comparison) -> Table:
    """Return a table with a row for each fact and a column for each side."""
    rows = []
    for name, field in _FACTS.items():
        values = [getattr(side, field) for side in comparison.facts]
        if any(values):
            rows.append((name, *(str(value) if value else format.NONE for value in values)))
    return Table(("", *(side.name for side in comparison.facts)), rows, "words")


def _of_simulated(comparison: Comparison) -> str:
    return f"a model of a server answered: {', '.join(comparison.simulated)}"


def _against(comparison: Comparison, side: str) -> Section:
    """The differences of one side. Where none is judged, for one reason, that is said once, without those columns."""
    head = (
        "metric",
        comparison.sides[0],
        side,
        "change",
        f"interval, {comparison.confidence:.0%}",
        "outcome",
        "",
    )
    differences = [difference for difference in comparison.differences if difference.side == side]
    reasons = {difference.why for difference in differences}
    reason = reasons.pop() if len(differences) > 1 and len(reasons) == 1 else ""
    hint = "; --anyway judges all the same" if reason == UNLIKE else ""
    columns = 4 if reason else len(head)
    runs = min(comparison.runs, default=0)
    rows = [_row(difference, runs)[:columns] for difference in differences]
    return section(
        f"{side} against {comparison.sides[0]}",
        *_change_bars(differences),
        Table(head[:columns], rows, "" if reason else "remarks"),
        Paragraph(f"None of them is judged: {reason}{hint}." if reason else "", "warn"),
    )


def _answer(comparison: Comparison, side: str) -> str:
    """What differs between a side and the first, in one sentence: the worse first."""
    names: dict[str, list[str]] = {}
    for difference in comparison.differences:
        if difference.side == side:
            names.setdefault(difference.word, []).append(difference.name)
    said = [
        f"{word} in {', '.join(names[word])}"
        for word in ("worse", "better", "different", DIFFER)
        if word in names
    ]
    equivalent = [
        difference.within
        for difference in comparison.differences
        if difference.side == side and difference.within is not None
    ]
    if equivalent:
        said.append(f"equivalent within {max(equivalent) * 100:.1f} % in {len(equivalent)}")
    if "inconclusive" in names:
        said.append(f"inconclusive in {len(names['inconclusive'])}")
    return f"{side} against {comparison.sides[0]}: {'; '.join(said) or 'no figure on both sides'}."


_COLORS = {"better": "good", "worse": "bad", "different": "warn", DIFFER: "warn"}


def _change_bars(differences: Sequence[Difference]) -> Iterator[Bars]:
    """Every change as a bar from zero, with its interval as a whisker; ratios and shares on scales of their own."""
    for absolute, title, unit in (
        (False, "Latencies and rates", " %"),
        (True, "Shares", " points"),
    ):
        bars = []
        for one in differences:
            if one.absolute != absolute or one.change is None or abs(one.change) > MOST_DRAWN:
                continue
            color = _COLORS.get(one.word, "c6")
            has_whisker = one.low is not None and one.high is not None and one.high <= MOST_DRAWN
            whisker = (one.low * 100, one.high * 100) if has_whisker else None  # type: ignore[operator]
            start, end = sorted((0.0, one.change * 100))
            text = f"{_change(one)}  {_outcome(one) if one.outcome != 'inconclusive' else ''}"
            text = text.rstrip()
            bars.append(Bar(one.name, text, [(start, end, color, text)], whisker))
        if bars:
            yield Bars(rows=bars, title=f"{title}: change, with its interval", unit=unit, line=0.0)


def cases(comparison: Comparison, outcomes: Sequence[ThresholdOutcome]) -> Iterator[Case]:
    """JUnit cases: one per condition; without conditions, one per difference, which cannot fail.

    A comparison with simulated sides has one more case that says so; one of invalid runs has one more case in error.
    """
    if comparison.simulated:
        yield Case(
            name=f"SIMULATED: {_of_simulated(comparison)}",
            group="loadgen compare",
            outcome="passed",
        )
    if not comparison.valid:
        why = [
            f"{run} is not valid: {'; '.join(map(sentence, codes))}"
            for run, codes in comparison.codes.items()
        ]
        yield Case(
            name="measurements are valid",
            group="loadgen compare",
            outcome="error",
            text="\n".join(why),
        )
    for outcome in outcomes:
        kind = OF_MET[None if outcome.failed is None else not outcome.failed]
        yield Case(
            name=outcome.condition,
            group=f"loadgen compare {outcome.side}",
            outcome=kind,
            text=outcome.said,
        )
    if not outcomes:
        for difference in comparison.differences:
            figures = " ".join(cell for cell in _row(difference)[1:] if cell != format.NONE)
            yield Case(
                name=difference.name,
                group=f"loadgen compare {difference.side}",
                outcome="skipped" if difference.outcome == "inconclusive" else "passed",
                text=figures,
            )


def _work(comparison: Comparison) -> str:
    if comparison.same_work is None:
        return "whether the work was the same is not known: a side has no fingerprint"
    if comparison.same_work:
        return "the same: equal fingerprints"
    return f"NOT the same: {'; '.join(comparison.unlike)}"


def _ways_back(comparison: Comparison) -> Table:
    """A row for each event, in which the nth of a kind of one side stands beside the nth of another."""
    events: dict[tuple[str, int], list[WayBack]] = {}
    for one in comparison.recovery:
        events.setdefault((recovery.EVENTS[one.found.event], one.number), []).append(one)

    def each(told: Iterable[str]) -> str:
        return "; ".join(dict.fromkeys(told)) or format.NONE

    rows = [
        (
            event,
            each(one.found.spike for one in seen),
            each(one.found.after for one in seen),
            *(
                each(recovery.back(one.found) for one in seen if one.side == side)
                for side in comparison.sides
            ),
            format.duration(max(one.found.spacing_s for one in seen)),
        )
        for (event, _), seen in events.items()
    ]
    return Table(("after", "before it", "then", *comparison.sides, "seen to within"), rows, "words")


def _legend(comparison: Comparison) -> str:
    if all(difference.low is None for difference in comparison.differences):
        return ""
    return (
        f"Intervals: {comparison.confidence:.0%} for all metrics together (Holm). Different: the "
        "interval does not hold zero. Equivalent (X %): it holds no change beyond X %, at most "
        f"{EQUIVALENT_CHANGE:.0%}, of a share {EQUIVALENT_POINTS * 100:g} point. "
        "Inconclusive: neither; the smallest change that nine of ten such comparisons would see "
        "stands below. Shares differ in points."
    )


def _mark(outcome: ThresholdOutcome) -> str:
    return {True: "FAILED", False: "passed", None: "inconclusive"}[outcome.failed]


def _outcome(difference: Difference) -> str:
    """Return the outcome of a difference in words."""
    if difference.within is not None:
        unit = "points" if difference.absolute else "%"
        return f"equivalent ({difference.within * 100:.1f} {unit})"
    return difference.word


def _why_inconclusive(difference: Difference, runs: int) -> str:
    """Return why a difference is inconclusive and what would decide it, or "" if it is decided."""
    if difference.outcome != "inconclusive":
        return ""
    decides = needed_in_words(difference, difference.needed, runs)
    detectable = _detectable(difference)
    seen = f"a change of {detectable} would be seen" if detectable != format.NONE else ""
    return "; ".join(filter(None, (difference.why, seen, decides)))


def _row(difference: Difference, runs: int = 0) -> tuple[str, ...]:
    return (
        ", ".join(filter(None, (difference.name, difference.unit))),
        _figure(difference, difference.before),
        _figure(difference, difference.after),
        _change(difference),
        interval(difference),
        _outcome(difference),
        _why_inconclusive(difference, runs),
    )


def _figure(difference: Difference, value: float | None) -> str:
    return format.percent(value) if difference.absolute else format.quantity(value)


def _change(difference: Difference) -> str:
    if difference.change is None:
        return format.NONE
    if difference.change == 0:
        return "="
    if difference.absolute:
        return f"{difference.change * 100:+.2f} points"
    if abs(difference.change) < 0.0005:
        return "0.0 %"
    return (
        f"{difference.change * 100:+.1f} %"
        if abs(difference.change) < 1
        else format.difference(difference.before, difference.after)
    )


def _detectable(difference: Difference) -> str:
    if difference.detectable is None:
        return format.NONE
    unit = "points" if difference.absolute else "%"
    return (
        f"{difference.detectable * 100:.1f} {unit}" if difference.detectable < 99 else format.NONE
    )
