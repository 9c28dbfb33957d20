"""Renders a report as text for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loadgen.render.page import VERDICT_KINDS, extract_verdict
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
        lines = renderer.render_brief(report)
    else:
        lines = renderer.render_full(report)
    return "\n".join(lines) + "\n"


def render_sections(
    sections: Sequence[Section | PageSectionFactory], *, color: bool = False, width: int = WIDTH
) -> str:
    """Return sections as text that ends in a newline, or "" if they have nothing to show."""
    lines = TextRenderer(color=color, width=width).render_sections(sections)
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

    def render_brief(self, report: Report) -> list[str]:
        """Return the notices and the brief form of a report."""
        lines = self._render_notices(report.notices)
        return lines + self.render_sections(report.brief, follows_text=bool(lines))

    def render_full(self, report: Report) -> list[str]:
        """Return the full form of a report, which leaves out only what is for pages.

        It begins with the notices and the headline, or the title if there is no headline or if it
        comes last. The validity of the measurement is at the very end.
        """
        headline: list[str] = []
        for paragraph in report.headline:
            headline += self._render_part(paragraph)

        begins_with_headline = bool(headline) and not report.headline_last
        ends_with_headline = bool(headline) and report.headline_last

        lines = self._render_notices(report.notices)
        lines += headline if begins_with_headline else self._render_heading(report.title)
        lines += self.render_sections(report.sections, follows_text=True)

        if ends_with_headline:
            lines += ["", *headline]

        if report.verdict is not None:
            lines += self._render_verdict(report.verdict)

        return lines

    def _render_verdict(self, verdict: Notice) -> list[str]:
        """Return the lines that say whether a measurement is valid, in the color of the verdict."""
        text = f"{verdict.label}: {verdict.text}"
        return [self._paint(line, verdict.kind) for line in wrap_text(text, width=self._width)]

    def render_sections(
        self, sections: Sequence[Section | PageSectionFactory], *, follows_text: bool = False
    ) -> list[str]:
        """Return the lines of sections, with an empty line before each section.

        No empty line separates a subsection from its section. Sections that have nothing to show as
        text are left out, and so are the functions that create sections of HTML pages.

        Args:
            sections: The sections, and functions that create sections which only a page shows.
            follows_text: Whether the caller prints other lines before these. If not, the first
                section has no empty line before it.
        """
        lines: list[str] = []
        for section in sections:
            if not isinstance(section, Section):
                continue

            body_lines = self._render_section_body(section)
            if not body_lines:
                continue

            is_at_top = not lines and not follows_text
            if not is_at_top and not section.is_subsection:
                lines.append("")

            lines += self._render_heading(section.heading)
            lines += body_lines

        return lines

    def _render_section_body(self, section: Section) -> list[str]:
        """Return the lines below the heading of a section, or none if only a page shows it.

        Paragraphs of a subsection are indented. If the section is `indented`, all of its lines are,
        so that its parts have to be rendered for a narrower terminal.
        """
        if section.page_only:
            return []

        margin = "  " if section.indented else ""
        prose_indent = "  " if section.is_subsection else ""
        narrower_renderer = TextRenderer(color=self._color, width=self._width - len(margin))

        lines: list[str] = []
        for part in section.parts:
            part_lines = list(narrower_renderer._render_part(part, prose_indent))
            is_table_below_text = isinstance(part, Table) and bool(lines) and bool(part_lines)
            if is_table_below_text:
                lines.append("")
            lines += part_lines

        return [f"{margin}{line}".rstrip() for line in lines]

    def _render_heading(self, text: str) -> list[str]:
        """Return the lines of a heading, in bold where colors are on."""
        return [self._paint(line, "bold") for line in wrap_text(text, width=self._width)]

    def _render_notices(self, notices: Sequence[Notice]) -> list[str]:
        """Return the lines of notices. The label of each has the color of its kind."""
        lines: list[str] = []
        for notice in notices:
            text = f"{notice.label}: {notice.text}"
            first_line, *next_lines = wrap_text(text, other_indent="  ", width=self._width)
            painted_label = self._paint(notice.label, notice.kind)
            lines.append(first_line.replace(notice.label, painted_label, 1))
            lines += next_lines

        return lines

    def _render_part(self, part: Part, indent: str = "") -> Iterator[str]:
        """Yield the lines of one part of a section, or none if only a page shows this type of part.

        `indent` is put in front of the lines of paragraphs.
        """
        if is_empty(part):
            return
        match part:
            case str():
                yield from wrap_text(part, indent, indent, self._width)
            case Paragraph():
                for line in wrap_text(part.text, indent, indent, self._width):
                    yield self._paint(line, part.kind)
            case Bullets():
                yield from self._render_bullets(part)
            case Facts():
                yield from self._render_facts(part)
            case Table():
                yield from self._render_table(part)
            case Quoted():
                yield from part.text.splitlines()

    def _render_bullets(self, bullets: Bullets) -> Iterator[str]:
        """Yield the lines of a bulleted list. A warning has an exclamation mark for a bullet."""
        bullet = "  ! " if bullets.kind == "warn" else "  - "
        for sentence in bullets.sentences:
            yield from wrap_text(sentence, bullet, "    ", self._width)

    def _render_facts(self, facts: Facts) -> Iterator[str]:
        """Yield names on the left and their texts, which wrap, in a column beside them.

        A fact with an empty text is left out: `wrap_text` returns no line for it.
        """
        name_widths = [len(name) + len(COLUMN_GAP) for name, text in facts.rows if text]
        name_column_width = max([MIN_LABEL_WIDTH, *name_widths])
        for name, text in facts.rows:
            padded_name = f"{name:<{name_column_width}}"
            yield from wrap_text(text, padded_name, " " * name_column_width, self._width)

    def _render_table(self, table: Table) -> Iterator[str]:
        """Yield the lines of a table.

        A table of numbers that does not fit the width is split into blocks of columns, which follow
        each other, unless it has only one column besides its labels. The last column of a table of
        the kind "remarks" or "prose" holds sentences, which wrap instead.
        """
        if table.wrap_columns:
            yield from self._render_column_blocks(table)
            return

        has_sentences = table.kind != ""
        if has_sentences:
            yield from self._render_table_with_remarks(table)
            return

        formatted = _format_table(table, self._width)
        can_be_split = len(table.head) > table.label_columns + 1
        if formatted.width > self._width and can_be_split:
            yield from self._render_column_blocks(table)
        else:
            yield from self._render_colored_table(table, formatted)

    def _render_colored_table(self, table: Table, formatted: TableLines) -> Iterator[str]:
        """Yield the lines of a table with the verdicts in its cells in color."""
        for line in formatted.head:
            yield self._color_verdicts(table.head, line)
        for row, line in zip(table.rows, formatted.rows, strict=True):
            yield self._color_verdicts(row, line)

    def _render_table_with_remarks(self, table: Table) -> Iterator[str]:
        """Yield a table whose last column holds a sentence, the remark, for each row.

        There are three layouts, of which the first that fits is used: the remarks wrap in the space
        beside the other columns, each remark is below its row, or all remarks are below the table.
        """
        # In a table of prose, the other columns hold text, too, which is left-aligned like labels.
        label_columns = len(table.head) - 1 if table.kind == "prose" else table.label_columns
        table_without_remarks = Table(
            table.head[:-1], [row[:-1] for row in table.rows], label_columns=label_columns
        )
        longest_remark = max(len(row[-1]) for row in table.rows)
        remark_width = max(1, min(MIN_REMARK_WIDTH, longest_remark))  # all remarks may be empty
        width_beside_remarks = self._width - len(COLUMN_GAP) - remark_width

        narrow_lines = _format_table(table_without_remarks, width_beside_remarks)
        if narrow_lines.width <= width_beside_remarks:
            yield from self._render_remarks_beside(table, narrow_lines)
            return

        full_width_lines = _format_table(table_without_remarks, self._width)
        if full_width_lines.width <= self._width:
            yield from self._render_remarks_below_rows(table, full_width_lines)
        else:
            yield from self._render_remarks_below_table(table)

    def _render_remarks_beside(self, table: Table, formatted: TableLines) -> Iterator[str]:
        """Yield a table with its remarks in the last column, where they wrap.

        Args:
            table: The table, whose last column holds the remarks.
            formatted: The lines of the other columns.
        """
        remark_start = formatted.width + len(COLUMN_GAP)

        # The head has one or two lines. The name of the remarks is on the last one.
        *upper_head_lines, last_head_line = formatted.head
        yield from upper_head_lines

        head_line = f"{last_head_line:<{remark_start}}{table.head[-1]}".rstrip()
        if head_line:  # a table may have no names of columns
            yield head_line

        for row, line in zip(table.rows, formatted.rows, strict=True):
            remark_lines = wrap_text(row[-1], width=self._width - remark_start) or [""]
            first_line = f"{line:<{remark_start}}{remark_lines[0]}".rstrip()
            yield self._color_verdicts(row, first_line)
            for remark_line in remark_lines[1:]:
                yield " " * remark_start + remark_line

    def _render_remarks_below_rows(self, table: Table, formatted: TableLines) -> Iterator[str]:
        """Yield a table in which each remark is below its row.

        Args:
            table: The table, whose last column holds the remarks.
            formatted: The lines of the other columns.
        """
        yield from filter(str.strip, formatted.head)
        for row, line in zip(table.rows, formatted.rows, strict=True):
            yield self._color_verdicts(row[:-1], line)
            yield from wrap_text(row[-1], "    ", "    ", self._width)

    def _render_remarks_below_table(self, table: Table) -> Iterator[str]:
        """Yield a table in blocks of columns, then each remark with the label of its row.

        This is for a table that is too wide even without its remarks.
        """
        rows_without_remarks = [row[:-1] for row in table.rows]
        label_columns = 1 if table.kind == "prose" else table.label_columns
        yield from self._render_column_blocks(
            Table(table.head[:-1], rows_without_remarks, label_columns=label_columns)
        )

        remarks = [(row[0].strip(), row[-1]) for row in table.rows if row[-1]]
        if remarks:
            yield ""

        for label, remark in remarks:
            yield from wrap_text(f"{label}: {remark}", "", "    ", self._width)

    def _render_column_blocks(self, table: Table) -> Iterator[str]:
        """Yield a wide table as narrower tables, with an empty line between them.

        Each of them has the label columns at its left, and as many other columns as fit the width.
        """
        label_columns = max(table.label_columns, 1)
        blocks = _divide_columns(table, label_columns, self._width)
        for block_index, number_columns in enumerate(blocks):
            if block_index > 0:
                yield ""

            columns = [*range(label_columns), *number_columns]
            narrow_table = Table(
                [table.head[column] for column in columns],
                [[row[column] for column in columns] for row in table.rows],
                label_columns=label_columns,
            )
            table_lines = _format_table(narrow_table, self._width)
            yield from self._render_colored_table(narrow_table, table_lines)

    def _color_verdicts(self, row: Sequence[str], line: str) -> str:
        """Return the line of a table row with its verdicts, such as PASS and FAILED, in color.

        Args:
            row: The cells from which the line was formatted.
            line: The line.
        """
        if not self._color:
            return line

        colored_line = line
        for cell in row:
            verdict = extract_verdict(cell)
            kind = VERDICT_KINDS.get(verdict)
            if kind:
                verdict_as_word = rf"(?<!\w){re.escape(verdict)}(?!\w)"
                painted_verdict = self._paint(verdict, kind)
                colored_line = re.sub(verdict_as_word, painted_verdict, colored_line, count=1)

        return colored_line

    def _paint(self, text: str, kind: str) -> str:
        """Return a text in the color of a kind, or as it is if colors are off or there is none."""
        ansi_color = _ANSI_COLORS.get(kind)
        if not self._color or not text or ansi_color is None:
            return text
        return f"\x1b[{ansi_color}m{text}\x1b[0m"


def _format_table(table: Table, width: int) -> TableLines:
    """Return the lines of a table, made narrower by a head of two lines if it is too wide.

    With two lines, the last word of each column name is on the second line and the words before it
    are on the first line. The result may still be wider than `width`: the caller then has to split
    the columns or to choose another layout.

    Args:
        table: The table, whose label columns are at the left.
        width: The available columns of the terminal.
    """
    if not table.head:  # all columns of the table were taken away, so each row is an empty line
        return TableLines([""], [""] * len(table.rows))

    head_line, *row_lines = format_text(table.head, table.rows, table.label_columns)
    one_line_head = TableLines([head_line], row_lines)
    number_column_names = table.head[table.label_columns :]
    can_be_narrower = any(" " in name for name in number_column_names)
    if one_line_head.width <= width or not can_be_narrower:
        return one_line_head

    split_names = [
        _split_column_name(name, is_label_column=column < table.label_columns)
        for column, name in enumerate(table.head)
    ]
    upper_cells = [split_name.upper for split_name in split_names]
    lower_cells = [split_name.lower for split_name in split_names]

    # The lower line of the head is formatted as the first row, so that it has the same columns.
    upper_line, lower_line, *row_lines = format_text(
        upper_cells, [lower_cells, *table.rows], table.label_columns
    )
    return TableLines([upper_line, lower_line], row_lines)


class _TwoLineName(NamedTuple):
    """The name of a column, split over the two lines of a table head."""

    upper: str
    lower: str


def _split_column_name(name: str, *, is_label_column: bool) -> _TwoLineName:
    """Split the name of a column before its last word: `TTFT p95 ms` into `TTFT p95` and `ms`.

    The name of a label column is not split. All of it is on the lower line.
    """
    if is_label_column:
        return _TwoLineName("", name)
    first_words, _, last_word = name.rpartition(" ")
    return _TwoLineName(first_words, last_word)


def _divide_columns(table: Table, label_columns: int, width: int) -> Iterator[range]:
    """Divide the columns of a wide table into blocks, and yield the column indices of each block.

    The label columns are in no block: the caller repeats them at the left of each one. A block has
    as many columns as fit beside them, and at least one, even if that is too wide.

    Args:
        table: The table.
        label_columns: The number of label columns at its left.
        width: The available columns of the terminal.
    """
    cells_by_column = zip(table.head, *table.rows, strict=True)
    column_widths = [max(map(len, cells)) for cells in cells_by_column]
    gap_width = len(COLUMN_GAP)
    labels_width = sum(label_width + gap_width for label_width in column_widths[:label_columns])

    block_start = label_columns
    while block_start < len(column_widths):
        block_width = labels_width + column_widths[block_start]
        block_end = block_start + 1
        while block_end < len(column_widths):
            wider_block_width = block_width + gap_width + column_widths[block_end]
            if wider_block_width > width:
                break
            block_width = wider_block_width
            block_end += 1

        yield range(block_start, block_end)
        block_start = block_end
