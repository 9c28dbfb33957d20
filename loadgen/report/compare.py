"""A comparison as text for a terminal, as Markdown and as JUnit cases. Pure: takes a `Comparison`, returns strings."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from loadgen import format
from loadgen.compare.comparison import UNLIKE
from loadgen.compare.thresholds import interval
from loadgen.metrics.reasons import sentence
from loadgen.report import markdown
from loadgen.report.junit import Case
from loadgen.report.text import LABEL, WIDTH

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadgen.compare.comparison import Comparison, Difference
    from loadgen.compare.thresholds import ThresholdOutcome

_COLOURS = {"better": "32", "worse": "31"}


def render_text(comparison: Comparison, outcomes: Sequence[ThresholdOutcome] = (), *, color: bool = False) -> str:
    """The sides, whether their work is the same, one table per compared side, notes, and the `--fail-on` outcomes."""
    lines = _labelled(
        "Compare", f"{comparison.sides[0]} with {', '.join(comparison.sides[1:])}{_mark_simulated(comparison)}"
    )
    lines += _labelled("Work", _work(comparison))
    lines += _labelled("Judged", comparison.scope)
    for side in comparison.sides[1:]:
        differences = [difference for difference in comparison.differences if difference.side == side]
        shared_reason = _shared(differences)
        head, cells = _table(comparison, side, differences, shared_reason)
        rows = _aligned((*head, ""), [(*row, "") for row in cells]) if shared_reason else _aligned(head, cells)
        for i, difference in enumerate(differences, 1):
            if color and difference.word in _COLOURS:
                rows[i] = (
                    rows[i][: -len(difference.word)] + f"\x1b[{_COLOURS[difference.word]}m{difference.word}\x1b[0m"
                )
        lines += ["", *rows]
        if shared_reason:
            lines += _paragraph(_unjudged(shared_reason))
    if _has_intervals(comparison):
        lines += ["", *_paragraph(_legend(comparison))]
    if comparison.notes:
        lines += ["", "Notes", *(line for note in comparison.notes for line in _bullet(note))]
    if outcomes:
        lines += [
            "",
            *(f"{_mark(outcome)}  {outcome.condition}  ({outcome.side}: {outcome.said})" for outcome in outcomes),
        ]
    return "\n".join(lines) + "\n"


def render_markdown(comparison: Comparison, outcomes: Sequence[ThresholdOutcome] = ()) -> str:
    """The same content as Markdown."""
    others = ", ".join(f"**{side}**" for side in comparison.sides[1:])
    parts = [f"**{comparison.sides[0]}** with {others}{_mark_simulated(comparison)}. Work: {_work(comparison)}.\n"]
    for side in comparison.sides[1:]:
        differences = [difference for difference in comparison.differences if difference.side == side]
        shared_reason = _shared(differences)
        parts.append(markdown.table(*_table(comparison, side, differences, shared_reason)))
        if shared_reason:
            parts.append(_unjudged(shared_reason) + "\n")
    if _has_intervals(comparison):
        parts.append(_legend(comparison) + "\n")
    parts.append(f"Judged: {comparison.scope}.\n")
    if comparison.notes:
        parts.append("\n".join(f"- {note}" for note in comparison.notes) + "\n")
    if outcomes:
        parts.append(
            "\n".join(
                f"- {_mark(outcome)} `{outcome.condition}` ({outcome.side}: {outcome.said})" for outcome in outcomes
            )
            + "\n"
        )
    return "\n".join(parts)


def cases(comparison: Comparison, outcomes: Sequence[ThresholdOutcome]) -> Iterator[Case]:
    """JUnit cases: one per condition; without conditions, one per difference, which cannot fail.

    A comparison with simulated sides has one more case that says so; one of invalid runs has one more case in error.
    """
    if comparison.simulated:
        yield Case(name=_mark_simulated(comparison).strip(" ()"), group="loadgen compare", outcome="passed")
    if not comparison.valid:
        why = [f"{run} is not valid: {'; '.join(map(sentence, codes))}" for run, codes in comparison.codes.items()]
        yield Case(name="measurements are valid", group="loadgen compare", outcome="error", text="\n".join(why))
    for outcome in outcomes:
        kind = {True: "failed", False: "passed", None: "skipped"}[outcome.failed]
        yield Case(name=outcome.condition, group=f"loadgen compare {outcome.side}", outcome=kind, text=outcome.said)  # type: ignore[arg-type]
    if not outcomes:
        for difference in comparison.differences:
            figures = " ".join(cell for cell in _row(difference)[1:] if cell != format.NONE)
            yield Case(name=difference.name, group=f"loadgen compare {difference.side}", outcome="passed", text=figures)


def _work(comparison: Comparison) -> str:
    if comparison.same_work is None:
        return "whether the work was the same is not known: a side has no fingerprint"
    if comparison.same_work:
        return "the same: equal recipe fingerprints"
    return f"NOT the same: {'; '.join(comparison.unlike)}"


def _mark_simulated(comparison: Comparison) -> str:
    if not comparison.simulated:
        return ""
    sides = "" if len(comparison.simulated) == len(comparison.sides) else f": {', '.join(comparison.simulated)}"
    return f" (SIMULATED{sides})"


def _shared(differences: Sequence[Difference]) -> str:
    """The one reason for which none of several differences is judged; the empty string if there is no such reason."""
    reasons = {difference.why for difference in differences}
    return reasons.pop() if len(differences) > 1 and len(reasons) == 1 else ""


def _unjudged(reason: str) -> str:
    hint = "; --anyway judges all the same" if reason == UNLIKE else ""
    return f"None of them is judged: {reason}{hint}."


def _legend(comparison: Comparison) -> str:
    return (
        f"Intervals: {comparison.confidence:.0%} for all metrics together (Holm). Seen from: the smallest change that "
        "would be seen in nine of ten such comparisons. Shares differ in points."
    )


def _mark(outcome: ThresholdOutcome) -> str:
    return {True: "FAILED", False: "passed", None: "undecided"}[outcome.failed]


def _labelled(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{label:<{LABEL}}", subsequent_indent=" " * LABEL)


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a text table: first and last column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = []
    for first, *middle, last in (head, *rows):
        cells = [f"{cell:>{width}}" for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells, last]).rstrip())
    return lines


def _has_intervals(comparison: Comparison) -> bool:
    return any(difference.low is not None for difference in comparison.differences)


def _table(
    comparison: Comparison, side: str, differences: Sequence[Difference], shared_reason: str
) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Head and rows of the table for `side`. With a `shared_reason`, the columns of the judgement are left out."""
    if shared_reason:
        return ("metric", comparison.sides[0], side, "change"), [_row(difference)[:4] for difference in differences]
    head = ("metric", comparison.sides[0], side, "change", f"interval, {comparison.confidence:.0%}", "seen from", "")
    return head, [_row(difference) for difference in differences]


def _row(difference: Difference) -> tuple[str, ...]:
    word = (
        f"{difference.word}: {difference.why}"
        if difference.word == "cannot tell" and difference.why
        else difference.word
    )
    return (
        ", ".join(filter(None, (difference.name, difference.unit))),
        _figure(difference, difference.before),
        _figure(difference, difference.after),
        _change(difference),
        interval(difference),
        _detectable(difference),
        word,
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
    return f"{difference.detectable * 100:.1f} {unit}" if difference.detectable < 99 else format.NONE
