"""Renders a report as Markdown, for the summary of a CI job or a comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from loadgen.render.section import (
    Bullets,
    Facts,
    PageSectionFactory,
    Paragraph,
    Part,
    Quoted,
    Report,
    Section,
    Table,
    is_empty,
)
from loadgen.render.table import format_markdown

_MARKUP = re.compile(r"([\\`*<\[]|\b_|_\b)")
"""Characters that could begin a tag, emphasis, code or a link."""


def render(report: Report) -> str:
    """Return the report as Markdown that ends in a newline, without what only a page shows."""
    blocks = [f"**{notice.label}**: {escape(notice.text)}" for notice in report.notices]
    blocks.append(f"### {escape(report.title)}")
    blocks += [f"**{escape(paragraph.text)}**" for paragraph in report.headline]
    if report.verdict is not None:
        blocks.append(f"**{escape(f'{report.verdict.label}: {report.verdict.text}')}**")
    blocks += render_sections(report.sections)
    return "\n\n".join(blocks) + "\n"


def render_sections(sections: Sequence[Section | PageSectionFactory]) -> list[str]:
    """Return the blocks of sections, which have to be separated by empty lines."""
    blocks: list[str] = []
    for section in sections:
        if isinstance(section, Section) and not section.page_only:
            blocks += _render_section(section)
    return blocks


def escape(text: str) -> str:
    """Return the text on one line, with all Markdown markup in it escaped."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))


def _render_section(section: Section) -> list[str]:
    """Return the blocks of a section, its heading first, or none if it has nothing to show."""
    rendered_parts = [_render_part(part) for part in section.parts if not is_empty(part)]
    blocks = [block for block in rendered_parts if block]  # "" is a part that only a page shows
    if not blocks or not section.heading:
        return blocks
    level = "#####" if section.is_subsection else "####"
    return [f"{level} {escape(section.heading)}", *blocks]


def _render_part(part: Part) -> str:
    """Return a part as one block, or "" if only a page shows it."""
    block = ""
    match part:
        case str():
            block = escape(part)
        case Paragraph():
            text = escape(part.text)
            block = f"**{text}**" if part.large else text
        case Bullets():
            block = "\n".join(f"- {escape(sentence)}" for sentence in part.sentences)
        case Facts():
            items = [f"- {escape(name)}: {escape(text)}" for name, text in part.rows if text]
            block = "\n".join(items)
        case Table():
            block = _render_table(part)
        case Quoted():
            block = _render_quoted(part)

    return block


def _render_table(table: Table) -> str:
    """Return a table as Markdown. In a table of prose, every column is left-aligned."""
    label_columns = len(table.head) if table.kind == "prose" else table.label_columns
    head = [escape(cell) for cell in table.head]
    rows = [[escape(cell) for cell in row] for row in table.rows]
    return format_markdown(head, rows, label_columns, remarks=bool(table.kind)).rstrip()


def _render_quoted(quoted: Quoted) -> str:
    """Return the text between fences that are longer than any fence inside it."""
    longest_fence_inside = max(map(len, re.findall("`+", quoted.text)), default=0)
    fence = "`" * max(3, longest_fence_inside + 1)
    return f"{fence}text\n{quoted.text.rstrip()}\n{fence}"
