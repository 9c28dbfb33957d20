"""A report as text for a terminal. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from loadgen.render import table
from loadgen.render.page import VERDICTS
from loadgen.render.section import (
    Bullets,
    Facts,
    PageOnly,
    Paragraph,
    Part,
    Quoted,
    Report,
    Section,
    Table,
)
from loadgen.render.table import WIDTH, wrap_text

LABEL = 11  # least width of the names of facts
ROOM = 36  # least width of a last column of sentences; longer ones that have less stand below their row
_COLOURS = {"good": "32", "bad": "31", "warn": "33", "bold": "1"}
Paint = Callable[[str, str], str]
"""Words and a kind -> the words in its colour, or as they are."""


def render(report: Report, *, full: bool = False, color: bool = False, width: int = WIDTH) -> str:
    """Return the report as text that ends in a newline.

    A report with a brief form is rendered in that form unless `full` is True. Lines have at most
    `width` columns; tables and names may be wider.
    """
    paint = painter(color)
    lines = [
        line
        for one in report.notices
        for line in _warned(one.label, one.text, one.kind, paint, width)
    ]
    if report.brief and not full:
        lines += _below(report.brief, paint, width, begun=bool(lines))
        return "\n".join(lines) + "\n"
    answer = [line for said in report.headline for line in _part(said, paint, width, "")]
    if answer and not report.headline_last:
        lines += answer
    else:
        lines += [paint(line, "bold") for line in wrap_text(report.title, width=width)]
    lines += _below(report.sections, paint, width, begun=True)
    lines += ["", *answer] if answer and report.headline_last else []
    if report.verdict is not None:
        words = f"{report.verdict.label}: {report.verdict.text}"
        lines += [paint(line, report.verdict.kind) for line in wrap_text(words, width=width)]
    return "\n".join(lines) + "\n"


def render_sections(
    sections: Sequence[Section | PageOnly], *, color: bool = False, width: int = WIDTH
) -> str:
    """Sections as they stand below another text, ending in a newline; "" where they are empty."""
    lines = _below(sections, painter(color), width, begun=False)
    return "\n".join(lines) + "\n" if lines else ""


def painter(color: bool) -> Paint:
    """What colours words by kind, and leaves them as they are where colours are not wanted."""

    def paint(words: str, kind: str) -> str:
        return f"\x1b[{_COLOURS[kind]}m{words}\x1b[0m" if kind in _COLOURS and words else words

    return paint if color else lambda words, kind: words


def _warned(word: str, words: str, kind: str, paint: Paint, width: int) -> Iterator[str]:
    first, *others = wrap_text(f"{word}: {words}", rest="  ", width=width)
    yield first.replace(word, paint(word, kind), 1)
    yield from others


def _below(
    sections: Sequence[Section | PageOnly], paint: Paint, width: int, *, begun: bool
) -> list[str]:
    """The lines of sections, with an empty one between them. begun: lines stand above."""
    lines: list[str] = []
    for section in sections:
        if (
            not isinstance(section, Section)
            or section.page_only
            or not (own := _section(section, paint, width))
        ):
            continue
        lines += [""] * ((begun or bool(lines)) and not section.small)
        lines += [paint(line, "bold") for line in wrap_text(section.head, width=width)] + own
    return lines


def _section(section: Section, paint: Paint, width: int) -> list[str]:
    """Return the lines of the parts of a section, without its head."""
    margin = "  " if section.indented else ""
    lines: list[str] = []
    for part in section.parts:
        own = list(_part(part, paint, width - len(margin), "  " * section.small))
        lines += [""] if lines and own and isinstance(part, Table) else []
        lines += own
    return [f"{margin}{line}".rstrip() for line in lines]


def _part(part: Part, paint: Paint, width: int, indent: str) -> Iterator[str]:
    match part:
        case str():
            yield from wrap_text(part, indent, indent, width)
        case Paragraph():
            yield from (
                paint(line, part.kind) for line in wrap_text(part.text, indent, indent, width)
            )
        case Bullets():
            lead = f"  {'!' if part.kind == 'warn' else '-'} "
            for sentence in part.sentences:
                yield from wrap_text(sentence, lead, "    ", width)
        case Facts():
            label = max([LABEL, *(len(name) + 2 for name, words in part.rows if words)])
            for name, words in part.rows:
                yield from wrap_text(words, f"{name:<{label}}", " " * label, width)
        case Table():
            if part.rows:
                yield from _table(part, paint, width)
        case Quoted():
            yield from part.text.splitlines()
        case _:
            return  # only a page draws these


def _table(part: Table, paint: Paint, width: int) -> Iterator[str]:
    if part.wrap_columns:
        yield from _in_columns(part, paint, width)
    elif part.kind:
        yield from _with_sentences(part, paint, width)
    else:
        above, lines = _fitted(part.head, part.rows, part.label_columns, width)
        if max(map(len, (*above, *lines))) > width and len(part.head) > part.label_columns + 1:
            yield from _in_columns(part, paint, width)
        else:
            yield from above
            yield from map(_coloured, part.rows, lines, [paint] * len(part.rows))


def _lines(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: int, paint: Paint, width: int
) -> Iterator[str]:
    above, lines = _fitted(head, rows, left, width)
    yield from above
    yield from map(_coloured, rows, lines, [paint] * len(rows))


def _fitted(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: int, width: int
) -> tuple[list[str], list[str]]:
    """The lines of the head, and those of the rows. Of a table that is too wide the head takes two lines: the last word
    of each name of a figure stands below the others.
    """
    first, *lines = table.format_text(head, rows, left)
    if max(map(len, (first, *lines))) <= width or not any(" " in name for name in head[left:]):
        return [first], lines
    parts = [("", "", name) if i < left else name.rpartition(" ") for i, name in enumerate(head)]
    upper, lower, *lines = table.format_text(
        [part[0] for part in parts], [[part[2] for part in parts], *rows], left
    )
    return [upper, lower], lines


def _coloured(row: Sequence[str], line: str, paint: Paint) -> str:
    """A line of a table, its verdicts in their colours."""
    for cell in row:
        word = re.split("[:,(]", cell)[0].strip()
        if kind := VERDICTS.get(word):
            line = re.sub(
                rf"(?<!\w){re.escape(word)}(?!\w)",
                lambda found: paint(found[0], kind),
                line,
                count=1,
            )
    return line


def _with_sentences(part: Table, paint: Paint, width: int) -> Iterator[str]:
    """A table whose last column is sentences: they wrap in the room they have, or else stand below their row."""
    left = len(part.head) - 1 if part.kind == "prose" else part.label_columns
    rows = [row[:-1] for row in part.rows]
    needed = min(ROOM, max(len(row[-1]) for row in part.rows))
    above, lines = [""], [""] * len(rows)
    for free in (needed + 2, 0):  # with room for the sentences, else without
        if left or part.head[1:]:
            above, lines = _fitted(part.head[:-1], rows, left, width - free)
        at = max(map(len, (*above, *lines))) + 2
        room = width - at
        if beside := room >= needed:
            break
    if at - 2 > width:
        yield from _with_sentences_below(part, paint, width)
        return
    *upper, last = above
    yield from upper
    first = f"{last:<{at}}{part.head[-1]}" if beside else last
    yield from [first.rstrip()] if first.strip() else []
    for row, whole in zip(part.rows, lines, strict=True):
        said = wrap_text(row[-1], width=room if beside else width - 4)
        if not beside:
            yield _coloured(row[:-1], whole, paint)
            yield from (f"    {line}" for line in said)
        else:
            start, *others = said or [""]
            yield _coloured(row, f"{whole:<{at}}{start}".rstrip(), paint)
            yield from (f"{'':<{at}}{line}" for line in others)


def _with_sentences_below(part: Table, paint: Paint, width: int) -> Iterator[str]:
    """Yield a table whose figures do not fit beside each other, then the sentence of each row."""
    rows = [row[:-1] for row in part.rows]
    left = 1 if part.kind == "prose" else part.label_columns
    yield from _in_columns(Table(part.head[:-1], rows, label_columns=left), paint, width)
    sentences = [(row[0].strip(), row[-1]) for row in part.rows if row[-1]]
    if sentences:
        yield ""
    for label, sentence in sentences:
        yield from wrap_text(f"{label}: {sentence}", "", "    ", width)


def _in_columns(part: Table, paint: Paint, width: int) -> Iterator[str]:
    """Yield the lines of a table in blocks of as many columns as fit.

    The columns that do not fit follow below, and each block begins with the columns of labels.
    """
    labels = list(range(max(part.label_columns, 1)))
    widths = [max(map(len, column)) for column in zip(part.head, *part.rows, strict=True)]
    first = len(labels)
    while first < len(part.head):
        last = first
        used = sum(widths[label] + 2 for label in labels) + widths[first]
        while last + 1 < len(part.head) and used + 2 + widths[last + 1] <= width:
            last += 1
            used += 2 + widths[last]
        if first > len(labels):
            yield ""
        columns = [*labels, *range(first, last + 1)]
        rows = [[row[i] for i in columns] for row in part.rows]
        yield from _lines([part.head[i] for i in columns], rows, len(labels), paint, width)
        first = last + 1
