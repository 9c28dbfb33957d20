"""Renders a report as text for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loadgen.render.page import VERDICT_KINDS, verdict_word
from loadgen.render.section import (
    Bullets,
    Facts,
    Notice,
    PageSectionFactory,
    Paragraph,
    Part,
    Quoted,
    Report,
    Section,
    Table,
    is_empty,
)
from loadgen.render.table import COLUMN_GAP, WIDTH, format_text, wrap_text

MIN_LABEL_WIDTH = 11
"""Least width of the column with the names of facts, so that successive facts line up."""

MIN_REMARK_WIDTH = 36
"""Least width of a column of sentences. With less room, sentences stand below their rows."""

_ANSI_COLORS = {"good": "32", "bad": "31", "warn": "33", "bold": "1"}


def render(report: Report, *, full: bool = False, color: bool = False, width: int = WIDTH) -> str:
    """Return the report as text that ends in a newline.

    A report with a brief form is rendered in that form unless `full` is True. Lines have at most
    `width` columns; tables and names may be wider.
    """
    renderer = TextRenderer(color=color, width=width)
    if report.brief and not full:
        lines = renderer.brief_lines(report)
    else:
        lines = renderer.full_lines(report)
    return "\n".join(lines) + "\n"


def render_sections(
    sections: Sequence[Section | PageSectionFactory], *, color: bool = False, width: int = WIDTH
) -> str:
    """Return sections as text that ends in a newline, or "" if they have nothing to show."""
    lines = TextRenderer(color=color, width=width).section_lines(sections)
    return "\n".join(lines) + "\n" if lines else ""


class TableLines(NamedTuple):
    """A table as lines of text."""

    head: list[str]
    rows: list[str]

    @property
    def width(self) -> int:
        """The columns of the widest line."""
        return max(map(len, (*self.head, *self.rows)))


class TextRenderer:
    """Renders reports and their parts as lines of text.

    Lines have at most `width` columns. With `color`, verdicts and headings have ANSI colors.
    """

    def __init__(self, *, color: bool, width: int) -> None:
        """Render with these colors and this width."""
        self._color = color
        self._width = width

    def brief_lines(self, report: Report) -> list[str]:
        """Return the notices and the brief form of a report."""
        lines = self._notices(report.notices)
        return lines + self.section_lines(report.brief, follows_text=bool(lines))

    def full_lines(self, report: Report) -> list[str]:
        """Return a whole report, except what only a page shows."""
        headline: list[str] = []
        for paragraph in report.headline:
            headline += self._part(paragraph)
        lines = self._notices(report.notices)
        if headline and not report.headline_last:
            lines += headline
        else:
            lines += self._heading(report.title)
        lines += self.section_lines(report.sections, follows_text=True)
        if headline and report.headline_last:
            lines += ["", *headline]
        if report.verdict is not None:
            text = f"{report.verdict.label}: {report.verdict.text}"
            kind = report.verdict.kind
            lines += [self._paint(line, kind) for line in wrap_text(text, width=self._width)]
        return lines

    def section_lines(
        self, sections: Sequence[Section | PageSectionFactory], *, follows_text: bool = False
    ) -> list[str]:
        """Return the lines of sections, with an empty line before each that is no subsection.

        The first section has an empty line before it only if it `follows_text`.
        """
        lines: list[str] = []
        for section in sections:
            body = self._section_body(section)
            if not isinstance(section, Section) or not body:
                continue
            if (lines or follows_text) and not section.is_subsection:
                lines.append("")
            lines += self._heading(section.heading)
            lines += body
        return lines

    def _section_body(self, section: Section | PageSectionFactory) -> list[str]:
        """Return the lines of the parts of a section, which are empty if only a page has them."""
        if not isinstance(section, Section) or section.page_only:
            return []
        margin = "  " if section.indented else ""
        renderer = TextRenderer(color=self._color, width=self._width - len(margin))
        lines: list[str] = []
        for part in section.parts:
            part_lines = list(renderer._part(part, indent="  " if section.is_subsection else ""))
            if lines and part_lines and isinstance(part, Table):
                lines.append("")
            lines += part_lines
        return [f"{margin}{line}".rstrip() for line in lines]

    def _heading(self, text: str) -> list[str]:
        """Return the lines of a heading, in bold where colors are on."""
        return [self._paint(line, "bold") for line in wrap_text(text, width=self._width)]

    def _notices(self, notices: Sequence[Notice]) -> list[str]:
        """Return the lines of notices. The label of each has the color of its kind."""
        lines: list[str] = []
        for notice in notices:
            text = f"{notice.label}: {notice.text}"
            first, *next_lines = wrap_text(text, other_indent="  ", width=self._width)
            lines.append(first.replace(notice.label, self._paint(notice.label, notice.kind), 1))
            lines += next_lines
        return lines

    def _part(self, part: Part, indent: str = "") -> Iterator[str]:
        """Yield the lines of a part; none for a part that only a page shows."""
        if is_empty(part):
            return
        match part:
            case str():
                yield from wrap_text(part, indent, indent, self._width)
            case Paragraph():
                for line in wrap_text(part.text, indent, indent, self._width):
                    yield self._paint(line, part.kind)
            case Bullets():
                yield from self._bullets(part)
            case Facts():
                yield from self._facts(part)
            case Table():
                yield from self._table(part)
            case Quoted():
                yield from part.text.splitlines()

    def _bullets(self, bullets: Bullets) -> Iterator[str]:
        """Yield the lines of a bulleted list. A warning has an exclamation mark for a bullet."""
        bullet = "  ! " if bullets.kind == "warn" else "  - "
        for sentence in bullets.sentences:
            yield from wrap_text(sentence, bullet, "    ", self._width)

    def _facts(self, facts: Facts) -> Iterator[str]:
        """Yield names on the left and their texts in a column beside them."""
        name_widths = [len(name) + 2 for name, text in facts.rows if text]
        label_width = max([MIN_LABEL_WIDTH, *name_widths])
        for name, text in facts.rows:
            yield from wrap_text(text, f"{name:<{label_width}}", " " * label_width, self._width)

    def _table(self, table: Table) -> Iterator[str]:
        """Yield the lines of a table.

        A table that is wider than the text is split into blocks of columns, unless it has only one
        column besides its labels.
        """
        if table.wrap_columns:
            yield from self._column_blocks(table)
        elif table.kind:
            yield from self._table_with_remarks(table)
        else:
            formatted = _format_table(table, self._width)
            can_be_split = len(table.head) > table.label_columns + 1
            if formatted.width > self._width and can_be_split:
                yield from self._column_blocks(table)
            else:
                yield from self._colored_table(table, formatted)

    def _colored_table(self, table: Table, formatted: TableLines) -> Iterator[str]:
        """Yield the lines of a table with the verdicts in its cells in color."""
        for line in formatted.head:
            yield self._color_verdicts(table.head, line)
        for row, line in zip(table.rows, formatted.rows, strict=True):
            yield self._color_verdicts(row, line)

    def _table_with_remarks(self, table: Table) -> Iterator[str]:
        """Yield a table whose last column holds sentences.

        The sentences wrap in the space beside the other columns. If that is too narrow, each
        sentence follows its row, or the whole table if not even the other columns fit.
        """
        labels = len(table.head) - 1 if table.kind == "prose" else table.label_columns
        rows_without_remarks = [row[:-1] for row in table.rows]
        columns = Table(table.head[:-1], rows_without_remarks, label_columns=labels)
        longest_remark = max(len(row[-1]) for row in table.rows)
        remark_width = min(MIN_REMARK_WIDTH, longest_remark)
        available_width = self._width - len(COLUMN_GAP) - remark_width
        formatted = _format_table(columns, available_width)
        if formatted.width <= available_width:
            yield from self._remarks_beside(table, formatted)
            return
        formatted = _format_table(columns, self._width)
        if formatted.width <= self._width:
            yield from self._remarks_below_rows(table, formatted)
        else:
            yield from self._remarks_below_table(table)

    def _remarks_beside(self, table: Table, formatted: TableLines) -> Iterator[str]:
        """Yield a table with its remarks in the last column, where they wrap.

        `formatted` has the other columns.
        """
        remark_column = formatted.width + len(COLUMN_GAP)
        *upper_head, last_head = formatted.head
        yield from upper_head
        head_line = f"{last_head:<{remark_column}}{table.head[-1]}".rstrip()
        if head_line:
            yield head_line
        for row, line in zip(table.rows, formatted.rows, strict=True):
            remark_lines = wrap_text(row[-1], width=self._width - remark_column) or [""]
            first_line = f"{line:<{remark_column}}{remark_lines[0]}".rstrip()
            yield self._color_verdicts(row, first_line)
            for remark_line in remark_lines[1:]:
                yield f"{'':<{remark_column}}{remark_line}"

    def _remarks_below_rows(self, table: Table, formatted: TableLines) -> Iterator[str]:
        """Yield a table in which each remark follows its row. `formatted` has the other columns."""
        yield from filter(str.strip, formatted.head)
        for row, line in zip(table.rows, formatted.rows, strict=True):
            yield self._color_verdicts(row[:-1], line)
            yield from wrap_text(row[-1], "    ", "    ", self._width)

    def _remarks_below_table(self, table: Table) -> Iterator[str]:
        """Yield a table in blocks of columns, then each remark with the label of its row."""
        rows = [row[:-1] for row in table.rows]
        labels = 1 if table.kind == "prose" else table.label_columns
        yield from self._column_blocks(Table(table.head[:-1], rows, label_columns=labels))
        remarks = [(row[0].strip(), row[-1]) for row in table.rows if row[-1]]
        if remarks:
            yield ""
        for label, remark in remarks:
            yield from wrap_text(f"{label}: {remark}", "", "    ", self._width)

    def _column_blocks(self, table: Table) -> Iterator[str]:
        """Yield a table in blocks of as many columns as fit, each with the label columns."""
        labels = list(range(max(table.label_columns, 1)))
        for number, block in enumerate(_split_columns(table, len(labels), self._width)):
            if number:
                yield ""
            columns = [*labels, *block]
            block_table = Table(
                [table.head[column] for column in columns],
                [[row[column] for column in columns] for row in table.rows],
                label_columns=len(labels),
            )
            yield from self._colored_table(block_table, _format_table(block_table, self._width))

    def _color_verdicts(self, row: Sequence[str], line: str) -> str:
        """Return the line of a table row with its verdicts in color."""
        if not self._color:
            return line
        for cell in row:
            word = verdict_word(cell)
            kind = VERDICT_KINDS.get(word)
            if kind:
                pattern = rf"(?<!\w){re.escape(word)}(?!\w)"
                line = re.sub(pattern, self._paint(word, kind), line, count=1)
        return line

    def _paint(self, text: str, kind: str) -> str:
        """Return a text in the color of a kind, or as it is if colors are off or there is none."""
        ansi_color = _ANSI_COLORS.get(kind)
        if not self._color or not text or ansi_color is None:
            return text
        return f"\x1b[{ansi_color}m{text}\x1b[0m"


def _format_table(table: Table, width: int) -> TableLines:
    """Return the lines of a table.

    If they are wider than `width`, the head takes two lines: the last word of each column name
    stands in the second one.
    """
    labels = table.label_columns
    if not table.head:
        return TableLines([""], [""] * len(table.rows))
    head_line, *row_lines = format_text(table.head, table.rows, labels)
    one_line_head = TableLines([head_line], row_lines)
    can_be_narrower = any(" " in name for name in table.head[labels:])
    if one_line_head.width <= width or not can_be_narrower:
        return one_line_head
    names = [
        _split_column_name(name, is_label=column < labels) for column, name in enumerate(table.head)
    ]
    upper_names = [name.upper for name in names]
    lower_names = [name.lower for name in names]
    upper_line, lower_line, *row_lines = format_text(
        upper_names, [lower_names, *table.rows], labels
    )
    return TableLines([upper_line, lower_line], row_lines)


class _TwoLineName(NamedTuple):
    """The name of a column, split over two lines."""

    upper: str
    lower: str


def _split_column_name(name: str, *, is_label: bool) -> _TwoLineName:
    """Split the name of a column before its last word. The names of label columns stay whole."""
    if is_label:
        return _TwoLineName("", name)
    upper, _, lower = name.rpartition(" ")
    return _TwoLineName(upper, lower)


def _split_columns(table: Table, labels: int, width: int) -> Iterator[range]:
    """Yield the indices of the columns of each block of a wide table.

    Each block holds as many columns as fit `width` beside the first `labels` columns, which are
    repeated in each block, and at least one.
    """
    columns = zip(table.head, *table.rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    gap = len(COLUMN_GAP)
    label_width = sum(column_width + gap for column_width in widths[:labels])
    start = labels
    while start < len(widths):
        stop = start + 1
        block_width = label_width + widths[start]
        while stop < len(widths) and block_width + gap + widths[stop] <= width:
            block_width += gap + widths[stop]
            stop += 1
        yield range(start, stop)
        start = stop
