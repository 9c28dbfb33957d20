"""A report as Markdown, for the summary of a build or a comment on a change. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from loadgen.render import table
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


def render(report: Report) -> str:
    """The whole report, ending in a newline; what a page alone draws is left out."""
    blocks = [f"**{one.label}**: {escape(one.text)}" for one in report.notices]
    blocks.append(f"### {escape(report.title)}")
    blocks += [f"**{escape(said.text)}**" for said in report.headline]
    if report.verdict is not None:
        blocks.append(f"**{escape(f'{report.verdict.label}: {report.verdict.text}')}**")
    return "\n\n".join([*blocks, *render_sections(report.sections)]) + "\n"


def render_sections(sections: Sequence[Section | PageOnly]) -> list[str]:
    """The blocks of sections, to be set apart by an empty line; [] where they are empty."""
    return [
        block for section in sections if isinstance(section, Section) for block in _section(section)
    ]


def escape(words: str) -> str:
    """Words of somebody as one line without markup of theirs: no tag, no emphasis, no code, no link."""
    return re.sub(r"([\\`*<\[]|\b_|_\b)", r"\\\1", " ".join(words.split()))


def _section(section: Section) -> list[str]:
    blocks = (
        []
        if section.page_only
        else [block for part in section.parts if (block := "\n".join(_part(part)))]
    )
    head = f"{'#####' if section.small else '####'} {escape(section.head)}"
    return [head, *blocks] if blocks and section.head else blocks


def _part(part: Part) -> Iterator[str]:
    match part:
        case str():
            yield escape(part)
        case Paragraph():
            words = escape(part.text)
            yield f"**{words}**" if part.large and words else words
        case Bullets():
            yield from (f"- {escape(sentence)}" for sentence in part.sentences)
        case Facts():
            yield from (f"- {escape(name)}: {escape(words)}" for name, words in part.rows if words)
        case Table():
            if part.rows:
                left = len(part.head) if part.kind == "prose" else part.label_columns
                rows = [[escape(cell) for cell in row] for row in part.rows]
                head = [escape(cell) for cell in part.head]
                yield table.format_markdown(head, rows, left, remarks=bool(part.kind)).rstrip()
        case Quoted():
            fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", part.text))])
            yield f"{fence}text\n{part.text.rstrip()}\n{fence}"
        case _:
            return  # only a page draws these
