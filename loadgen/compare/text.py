"""A comparison as text for a terminal, as Markdown, as an HTML page and as JUnit cases.

Pure: takes a `Comparison`, returns strings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.compare.comparison import DIFFER, UNLIKE, Comparison, Difference
from loadgen.compare.thresholds import ThresholdOutcome, interval
from loadgen.core import format
from loadgen.core.metrics.reasons import sentence
from loadgen.present import page, table
from loadgen.present.junit import OF_MET, Case
from loadgen.present.table import wrapped
from loadgen.runs.text import LABEL

MOST_DRAWN = 9.0  # a change of more than 900 % would leave no room for the others
_COLOURS = {"better": "32", "worse": "31"}


def render_text(comparison: Comparison, outcomes: Sequence[ThresholdOutcome] = (), *, color: bool = False) -> str:
    """The sides, whether their work is the same, one table per compared side, notes, and the `--fail-on` outcomes."""
    sides = f"{comparison.sides[0]} with {', '.join(comparison.sides[1:])}{_mark_simulated(comparison)}"
    lines = [*_labelled("Compare", sides), *_labelled("Work", _work(comparison))]
    lines += _labelled("Judged", comparison.scope)
    for differences, head, rows, unjudged in _tables(comparison):
        shown = table.text(head, rows, remarks=not unjudged)
        for i, word in enumerate((difference.word for difference in differences), 1):
            if color and word in _COLOURS:
                shown[i] = f"{shown[i].removesuffix(word)}\x1b[{_COLOURS[word]}m{word}\x1b[0m"
        lines += ["", *shown, *wrapped(unjudged)]
    if _has_intervals(comparison):
        lines += ["", *wrapped(_legend(comparison))]
    if comparison.notes:
        lines += ["", "Notes", *(line for note in comparison.notes for line in wrapped(note, "  - ", "    "))]
    if outcomes:
        lines += ["", *(f"{_mark(one)}  {one.condition}  ({one.side}: {one.said})" for one in outcomes)]
    return "\n".join(lines) + "\n"


def render_markdown(comparison: Comparison, outcomes: Sequence[ThresholdOutcome] = ()) -> str:
    """The same content as Markdown."""
    others = ", ".join(f"**{side}**" for side in comparison.sides[1:])
    parts = [f"**{comparison.sides[0]}** with {others}{_mark_simulated(comparison)}. Work: {_work(comparison)}."]
    for _, head, rows, unjudged in _tables(comparison):
        parts += [table.markdown(head, rows, remarks=not unjudged).rstrip(), *([unjudged] if unjudged else [])]
    if _has_intervals(comparison):
        parts.append(_legend(comparison))
    parts.append(f"Judged: {comparison.scope}.")
    if comparison.notes:
        parts.append("\n".join(f"- {note}" for note in comparison.notes))
    if outcomes:
        parts.append("\n".join(f"- {_mark(one)} `{one.condition}` ({one.side}: {one.said})" for one in outcomes))
    return "\n\n".join(parts) + "\n"


def render_html(comparison: Comparison, outcomes: Sequence[ThresholdOutcome] = ()) -> str:
    """The page: whether the work was the same, each change with its interval, the figures, notes and conditions."""
    title = f"{comparison.sides[0]} with {', '.join(comparison.sides[1:])}"
    sheet = page.Page(title, "loadgen compare")
    if comparison.simulated:
        sheet.mark("SIMULATED", f"a model of a server answered: {', '.join(comparison.simulated)}")
    for run, codes in comparison.codes.items():
        sheet.mark("INVALID", f"{run}: {'; '.join(map(sentence, codes))}", "bad")
    sheet.heading(title)
    kind = {True: "good", False: "bad", None: "warn"}[comparison.same_work]
    for side in comparison.sides[1:]:
        sheet.say(_answer(comparison, side), "sentence")
    sheet.say(f"Work: {_work(comparison)}.", kind)
    sheet.say(f"Judged: {comparison.scope}.")
    for (differences, head, rows, unjudged), side in zip(_tables(comparison), comparison.sides[1:], strict=True):
        sheet.section(f"{side} against {comparison.sides[0]}")
        _change_bars(sheet, differences)
        sheet.table(head, rows, "" if unjudged else "remarks")
        if unjudged:
            sheet.say(unjudged, "warn")
    if _has_intervals(comparison):
        sheet.say(_legend(comparison), "soft")
    if outcomes:
        sheet.section("Conditions")
        cells = [(_mark(one), one.condition, one.side, one.said) for one in outcomes]
        sheet.table(("", "condition", "side", "came out"), cells, "words")
    if comparison.notes:
        sheet.section("Notes")
        sheet.listed(comparison.notes)
    return sheet.render()


def _answer(comparison: Comparison, side: str) -> str:
    """What differs between a side and the first, in one sentence: the worse first."""
    names: dict[str, list[str]] = {}
    for difference in comparison.differences:
        if difference.side == side:
            names.setdefault(difference.word, []).append(difference.name)
    said = [f"{word} in {', '.join(names[word])}" for word in ("worse", "better", DIFFER) if word in names]
    said += [f"{word} in {len(names[word])}" for word in ("no difference seen", "cannot tell") if word in names]
    return f"{side} against {comparison.sides[0]}: {'; '.join(said) or 'no figure on both sides'}."


def _change_bars(sheet: page.Page, differences: Sequence[Difference]) -> None:
    """Every change as a bar from zero, with its interval as a whisker; ratios and shares on scales of their own."""
    for absolute, title, unit in ((False, "Latencies and rates", " %"), (True, "Shares", " points")):
        bars = []
        for one in differences:
            if one.absolute != absolute or one.change is None or abs(one.change) > MOST_DRAWN:
                continue
            color = {"better": "good", "worse": "bad", DIFFER: "warn"}.get(one.word, "c6")
            has_whisker = one.low is not None and one.high is not None and one.high <= MOST_DRAWN
            whisker = (one.low * 100, one.high * 100) if has_whisker else None  # type: ignore[operator]
            start, end = sorted((0.0, one.change * 100))
            text = f"{_change(one)}  {one.word if one.word != 'cannot tell' else ''}".rstrip()
            bars.append(page.Bar(one.name, text, [(start, end, color, text)], whisker))
        if bars:
            sheet.add(f"<h3>{title}: change, with its interval</h3>")
            sheet.bars(bars, unit=unit, line=0.0)


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
        kind = OF_MET[None if outcome.failed is None else not outcome.failed]
        yield Case(name=outcome.condition, group=f"loadgen compare {outcome.side}", outcome=kind, text=outcome.said)
    if not outcomes:
        for difference in comparison.differences:
            figures = " ".join(cell for cell in _row(difference)[1:] if cell != format.NONE)
            yield Case(name=difference.name, group=f"loadgen compare {difference.side}", outcome="passed", text=figures)


def _work(comparison: Comparison) -> str:
    if comparison.same_work is None:
        return "whether the work was the same is not known: a side has no fingerprint"
    if comparison.same_work:
        return "the same: equal fingerprints"
    return f"NOT the same: {'; '.join(comparison.unlike)}"


def _mark_simulated(comparison: Comparison) -> str:
    if not comparison.simulated:
        return ""
    sides = "" if len(comparison.simulated) == len(comparison.sides) else f": {', '.join(comparison.simulated)}"
    return f" (SIMULATED{sides})"


def _tables(
    comparison: Comparison,
) -> Iterator[tuple[list[Difference], tuple[str, ...], list[tuple[str, ...]], str]]:
    """For each compared side: its differences, head and rows of their table, and why none of them is judged.

    That is "" where they are judged, or have no reason in common; otherwise the columns of the judgement are left out.
    """
    head = ("metric", comparison.sides[0], "", "change", f"interval, {comparison.confidence:.0%}", "seen from", "")
    for side in comparison.sides[1:]:
        differences = [difference for difference in comparison.differences if difference.side == side]
        reasons = {difference.why for difference in differences}
        reason = reasons.pop() if len(differences) > 1 and len(reasons) == 1 else ""
        hint = "; --anyway judges all the same" if reason == UNLIKE else ""
        columns = 4 if reason else len(head)
        rows = [_row(difference)[:columns] for difference in differences]
        yield (
            differences,
            (*head[:2], side, *head[3:columns]),
            rows,
            f"None of them is judged: {reason}{hint}." if reason else "",
        )


def _legend(comparison: Comparison) -> str:
    return (
        f"Intervals: {comparison.confidence:.0%} for all metrics together (Holm). Seen from: the smallest change that "
        "would be seen in nine of ten such comparisons. Shares differ in points."
    )


def _mark(outcome: ThresholdOutcome) -> str:
    return {True: "FAILED", False: "passed", None: "undecided"}[outcome.failed]


def _labelled(label: str, words: str) -> list[str]:
    return wrapped(words, f"{label:<{LABEL}}", " " * LABEL)


def _has_intervals(comparison: Comparison) -> bool:
    return any(difference.low is not None for difference in comparison.differences)


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
