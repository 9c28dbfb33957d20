"""Renders a report as one HTML page, and sections on a page that has other content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import singledispatch
from html import escape

from loadgen.render.page import Page
from loadgen.render.section import (
    Bars,
    Bullets,
    Charts,
    Facts,
    Links,
    PageSectionFactory,
    Paragraph,
    Part,
    Quoted,
    Report,
    Section,
    Signatures,
    Table,
    Tiles,
    is_empty,
)

MIN_SECTIONS_FOR_CONTENTS = 6
"""A page with at least so many sections that have an id begins with links to them."""


def render(report: Report) -> str:
    """Return the report as the text of an HTML file."""
    page = Page(report.page_title or report.title, report.generated_by)
    for notice in report.notices:
        page.add_notice(notice.label, notice.text, notice.kind)

    page.add_title(report.title)
    for paragraph in report.headline:
        page.add_paragraph(paragraph.text, _large_text_classes(paragraph.kind))

    if report.verdict is not None:
        page.add_badge(report.verdict.label, report.verdict.text)

    sections = list(_sections_to_show(report.sections))
    _add_contents(page, sections)
    add_sections(page, sections)

    return page.render()


def add_sections(page: Page, sections: Iterable[Section | PageSectionFactory]) -> None:
    """Append sections to a page, each with its heading, or folded below a label.

    Pages that are no reports, such as the list of results in the browser, use this, too.
    """
    for section in _sections_to_show(sections):
        if section.folded:
            with page.folded_block(section.heading or section.fold_label, id=section.id):
                _add_parts(page, section)
            continue
        if section.heading:
            page.add_heading(section.heading, is_subsection=section.is_subsection, id=section.id)
        _add_parts(page, section)


def _sections_to_show(sections: Iterable[Section | PageSectionFactory]) -> Iterator[Section]:
    """Yield the sections that have something to show, and create those that only pages have."""
    for section in sections:
        if not isinstance(section, Section):
            yield from _sections_to_show(section())
        elif not section.text_only and not all(map(is_empty, section.parts)):
            yield section


def _add_contents(page: Page, sections: Sequence[Section]) -> None:
    """Append links to the sections of a long page. A link to a folded section unfolds it."""
    linked_sections = [section for section in sections if section.id and section.heading]
    if len(linked_sections) < MIN_SECTIONS_FOR_CONTENTS:
        return

    links = [
        f'<a href="#{escape(section.id)}">{escape(section.heading)}</a>'
        for section in linked_sections
    ]
    page.add_html(
        '<details class="contents"><summary>Contents</summary>'
        f'<nav class="soft" aria-label="contents">{" · ".join(links)}</nav></details>'
    )


def _add_parts(page: Page, section: Section) -> None:
    """Append the parts of a section to a page, without those that have nothing to show."""
    for part in section.parts:
        if not is_empty(part):
            _add_part(part, page)


def _large_text_classes(kind: str) -> str:
    """Return the CSS classes of a paragraph in large letters and in the color of a kind."""
    return f"sentence {kind}".rstrip()


@singledispatch
def _add_part(part: Part, page: Page) -> None:  # noqa: ARG001 - the implementations use it
    """Append a part to a page. There is one implementation for each type of part."""
    raise TypeError(f"no part of a section: {part!r}")


@_add_part.register
def _(part: str, page: Page) -> None:
    page.add_paragraph(part)


@_add_part.register
def _(part: Paragraph, page: Page) -> None:
    css_classes = _large_text_classes(part.kind) if part.large else part.kind
    page.add_paragraph(part.text, css_classes)


@_add_part.register
def _(part: Bullets, page: Page) -> None:
    page.add_bullets(part.sentences, part.kind)


@_add_part.register
def _(part: Facts, page: Page) -> None:
    page.add_facts(part.rows)


@_add_part.register
def _(part: Table, page: Page) -> None:
    page.add_table(part.head, part.rows, part.kind, part.ids)


@_add_part.register
def _(part: Quoted, page: Page) -> None:
    page.add_html(f"<pre>{escape(part.text)}</pre>")


@_add_part.register
def _(part: Links, page: Page) -> None:
    links = [f'<a href="{escape(path)}">{escape(name)}</a>' for name, path in part.rows]
    page.add_html(f"<p>{escape(part.text)}: {', '.join(links)}.</p>")


@_add_part.register
def _(part: Signatures, page: Page) -> None:
    lines = [
        f"<div><b>{escape(role)}</b> {escape(name)}<p>name, date, signature</p></div>"
        for role, name in part.names.items()
    ]
    page.add_html(f'<div class="signed">{"".join(lines)}</div>')


@_add_part.register
def _(part: Tiles, page: Page) -> None:
    page.add_tiles(part.tiles)


@_add_part.register
def _(part: Bars, page: Page) -> None:
    """Append bars below their heading, and above what their colors mean."""
    if part.title:
        page.add_heading(part.title, is_subsection=True)

    page.add_bars(
        part.rows,
        unit=part.unit,
        marked_value=part.marked_value,
        included_value=part.included_value,
        format_value=part.format_value,
    )
    if part.legend:
        page.add_legend(part.legend)


@_add_part.register
def _(part: Charts, page: Page) -> None:
    page.add_charts(part.charts)
