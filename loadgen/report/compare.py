"""A comparison as text for a terminal, as Markdown and as JUnit cases. Pure: a `Comparison` in, strings out."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from loadgen import format
from loadgen.compare.comparison import UNLIKE
from loadgen.compare.thresholds import interval
from loadgen.report import markdown
from loadgen.report.junit import Case
from loadgen.report.text import LABEL, WIDTH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadgen.compare.comparison import Comparison, Difference
    from loadgen.compare.thresholds import ThresholdOutcome

_COLOURS = {"better": "32", "worse": "31"}


def render_text(found: Comparison, outcomes: Sequence[ThresholdOutcome] = (), *, color: bool = False) -> str:
    """Sides, whether their work is the same, one table per other side, what stands behind it, conditions."""
    lines = _said("Compare", f"{found.sides[0]} with {', '.join(found.sides[1:])}{_mark_simulated(found)}")
    lines += _said("Work", _work(found))
    lines += _said("Judged", found.scope)
    for side in found.sides[1:]:
        here = [one for one in found.differences if one.side == side]
        shared = _shared(here)
        head, cells = _table(found, side, here, shared)
        rows = _columns((*head, ""), [(*row, "") for row in cells]) if shared else _columns(head, cells)
        for i, one in enumerate(here, 1):
            if color and one.word in _COLOURS:
                rows[i] = rows[i][: -len(one.word)] + f"\x1b[{_COLOURS[one.word]}m{one.word}\x1b[0m"
        lines += ["", *rows]
        if shared:
            lines += _paragraph(_unjudged(shared))
    if _judging(found):
        lines += ["", *_paragraph(_legend(found))]
    if found.notes:
        lines += ["", "Notes", *(line for note in found.notes for line in _bullet(note))]
    if outcomes:
        lines += [
            "",
            *(f"{_mark(outcome)}  {outcome.condition}  ({outcome.side}: {outcome.said})" for outcome in outcomes),
        ]
    return "\n".join(lines) + "\n"


def render_markdown(found: Comparison, outcomes: Sequence[ThresholdOutcome] = ()) -> str:
    """The same, for pasting."""
    others = ", ".join(f"**{side}**" for side in found.sides[1:])
    parts = [f"**{found.sides[0]}** with {others}{_mark_simulated(found)}. Work: {_work(found)}.\n"]
    for side in found.sides[1:]:
        here = [one for one in found.differences if one.side == side]
        shared = _shared(here)
        parts.append(markdown.table(*_table(found, side, here, shared)))
        if shared:
            parts.append(_unjudged(shared) + "\n")
    if _judging(found):
        parts.append(_legend(found) + "\n")
    parts.append(f"Judged: {found.scope}.\n")
    if found.notes:
        parts.append("\n".join(f"- {note}" for note in found.notes) + "\n")
    if outcomes:
        parts.append("\n".join(f"- {_mark(o)} `{o.condition}` ({o.side}: {o.said})" for o in outcomes) + "\n")
    return "\n".join(parts)


def cases(found: Comparison, outcomes: Sequence[ThresholdOutcome]) -> Iterator[Case]:
    """A case for each condition; without conditions one for each difference, none of which can fail."""
    if found.simulated:
        yield Case(name=_mark_simulated(found).strip(" ()"), group="loadgen compare", outcome="passed")
    if not found.valid:
        reasons = "\n".join(note for note in found.notes if "not valid" in note)
        yield Case(name="measurements are valid", group="loadgen compare", outcome="error", text=reasons)
    for outcome in outcomes:
        kind = {True: "failed", False: "passed", None: "skipped"}[outcome.failed]
        yield Case(name=outcome.condition, group=f"loadgen compare {outcome.side}", outcome=kind, text=outcome.said)  # type: ignore[arg-type]
    if not outcomes:
        for one in found.differences:
            said = " ".join(cell for cell in _row(one)[1:] if cell != format.NONE)
            yield Case(name=one.name, group=f"loadgen compare {one.side}", outcome="passed", text=said)


def _work(found: Comparison) -> str:
    if found.same_work is None:
        return "whether the work was the same is not known: a side has no fingerprint"
    if found.same_work:
        return "the same: equal recipe fingerprints"
    return f"NOT the same: {'; '.join(found.unlike)}"


def _mark_simulated(found: Comparison) -> str:
    if not found.simulated:
        return ""
    which = "" if len(found.simulated) == len(found.sides) else f": {', '.join(found.simulated)}"
    return f" (SIMULATED{which})"


def _shared(rows: Sequence[Difference]) -> str:
    """The reason why none of them is judged, where it is one reason."""
    reasons = {one.why for one in rows}
    return reasons.pop() if len(rows) > 1 and len(reasons) == 1 else ""


def _unjudged(why: str) -> str:
    hint = "; --anyway judges all the same" if why == UNLIKE else ""
    return f"None of them is judged: {why}{hint}."


def _legend(found: Comparison) -> str:
    return (
        f"Intervals: {found.confidence:.0%} for all metrics together (Holm). Seen from: the smallest change that "
        "would be seen in nine of ten such comparisons. Shares differ in points."
    )


def _mark(outcome: ThresholdOutcome) -> str:
    return {True: "FAILED", False: "passed", None: "no figure"}[outcome.failed]


def _said(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{label:<{LABEL}}", subsequent_indent=" " * LABEL)


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """First and last column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for first, *middle, last in (head, *rows):
        cells = [f"{cell:>{width}}" for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells, last]).rstrip())
    return lines


def _judging(found: Comparison) -> bool:
    return any(one.low is not None for one in found.differences)


def _table(
    found: Comparison, side: str, rows: Sequence[Difference], shared: str
) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Its head and its rows; where no row is judged, without what a judgement says."""
    if shared:
        return ("metric", found.sides[0], side, "change"), [_row(one)[:4] for one in rows]
    head = ("metric", found.sides[0], side, "change", f"interval, {found.confidence:.0%}", "seen from", "")
    return head, [_row(one) for one in rows]


def _row(one: Difference) -> tuple[str, ...]:
    word = f"{one.word}: {one.why}" if one.word == "cannot tell" and one.why else one.word
    return (
        ", ".join(filter(None, (one.name, one.unit))),
        _figure(one, one.before),
        _figure(one, one.after),
        _change(one),
        interval(one),
        _reach(one),
        word,
    )


def _figure(one: Difference, value: float | None) -> str:
    return format.percent(value) if one.absolute else format.quantity(value)


def _change(one: Difference) -> str:
    if one.change is None:
        return format.NONE
    if one.change == 0:
        return "="
    if one.absolute:
        return f"{one.change * 100:+.2f} points"
    if abs(one.change) < 0.0005:
        return "0.0 %"
    return f"{one.change * 100:+.1f} %" if abs(one.change) < 1 else format.difference(one.before, one.after)


def _reach(one: Difference) -> str:
    if one.detectable is None:
        return format.NONE
    unit = "points" if one.absolute else "%"
    return f"{one.detectable * 100:.1f} {unit}" if one.detectable < 99 else format.NONE
