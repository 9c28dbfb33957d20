"""A report as one HTML page, and sections on a page that has others. Pure; `page.Page` is the frame, and escapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from loadgen.render.page import Page
from loadgen.render.section import (
    Bars,
    Bullets,
    Charts,
    Facts,
    Links,
    PageOnly,
    Paragraph,
    Part,
    Quoted,
    Report,
    Section,
    Signatures,
    Table,
    Tiles,
)


def render(report: Report) -> str:
    """The text of the whole file."""
    sheet = Page(report.page_title or report.title, report.generated_by)
    for one in (*([report.verdict] if report.verdict is not None else []), *report.notices):
        sheet.mark(one.label, one.text, one.kind)
    sheet.heading(report.title)
    for said in report.headline:
        sheet.say(said.text, f"sentence {said.kind}".rstrip())
    sections = list(_made(report.sections))
    _contents(sheet, sections)
    add_sections(sheet, sections)
    return sheet.render()


def _made(sections: Iterable[Section | PageOnly]) -> Iterator[Section]:
    """The sections that have something to show, with those that are made when a page is."""
    for section in sections:
        if not isinstance(section, Section):
            yield from _made(section())
        elif not section.text_only and any(map(_is_there, section.parts)):
            yield section


LONG_FROM = 6  # sections with a place of their own: a page that has as many gets contents


def _contents(sheet: Page, sections: Sequence[Section]) -> None:
    """Links to the sections of a long page; one that is folded unfolds."""
    places = [(section.id, section.head) for section in sections if section.id and section.head]
    if len(places) >= LONG_FROM:
        links = " · ".join(f'<a href="#{escape(id)}">{escape(head)}</a>' for id, head in places)
        sheet.add(f'<nav class="soft" aria-label="contents">{links}</nav>')


def add_sections(sheet: Page, sections: Iterable[Section | PageOnly]) -> None:
    """Append sections to a page."""
    for section in _made(sections):
        if section.folded:
            with sheet.details(section.head or str(section.folded), id=section.id):
                _parts(sheet, section)
            continue
        if section.head and section.small:
            sheet.add(f"<h3>{escape(section.head)}</h3>")
        elif section.head:
            sheet.section(section.head, id=section.id)
        _parts(sheet, section)


def _is_there(part: Part) -> bool:
    """Whether a part has anything to show."""
    match part:
        case str():
            return bool(part)
        case Paragraph():
            return bool(part.text)
        case Bullets():
            return bool(part.sentences)
        case Facts():
            return any(words for _, words in part.rows)
        case Table() | Bars():
            return bool(part.rows)
        case Quoted():
            return bool(part.text)
        case Links():
            return bool(part.rows)
        case Signatures():
            return bool(part.names)
        case Tiles():
            return bool(part.tiles)
        case Charts():
            return bool(part.charts)


def _parts(sheet: Page, section: Section) -> None:
    for part in filter(_is_there, section.parts):
        match part:
            case str():
                sheet.say(part)
            case Paragraph():
                sheet.say(part.text, f"sentence {part.kind}".rstrip() if part.large else part.kind)
            case Bullets():
                sheet.listed(part.sentences, part.kind)
            case Facts():
                sheet.facts(**dict(part.rows))
            case Table():
                sheet.table(part.head, part.rows, part.kind, part.ids)
            case Quoted():
                sheet.add(f"<pre>{escape(part.text)}</pre>")
            case Links():
                links = ", ".join(
                    f'<a href="{escape(where)}">{escape(name)}</a>' for name, where in part.rows
                )
                sheet.add(f"<p>{escape(part.text)}: {links}.</p>")
            case Signatures():
                lines = (
                    f"<div><b>{escape(party)}</b> {escape(name)}{_TO_SIGN}"
                    for party, name in part.names.items()
                )
                sheet.add(f'<div class="signed">{"".join(lines)}</div>')
            case Tiles():
                sheet.tiles(part.tiles)
            case Bars():
                _bars(sheet, part)
            case Charts():
                sheet.charts(part.charts)


_TO_SIGN = "<p>name, date, signature</p></div>"


def _bars(sheet: Page, part: Bars) -> None:
    if part.title:
        sheet.add(f"<h3>{escape(part.title)}</h3>")
    sheet.bars(part.rows, unit=part.unit, line=part.line, low=part.low, number=part.number)
    if part.legend:
        sheet.legend(part.legend)
