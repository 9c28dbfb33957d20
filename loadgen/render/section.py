"""The content of a report, before it is rendered: sections of paragraphs, facts, tables and charts.

These are values only. Every cell and every sentence is already text: renderers compute and round
nothing. `text.py`, `markdown.py` and `html.py` render the same report in three formats, and each
of them escapes strings from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from loadgen.core import format
from loadgen.render.page import Bar, Chart, Tile

Kind = Literal["", "good", "bad", "warn", "soft"]
"""The color of a text, on a page and on a terminal with colors. "soft" is for legends."""


class Paragraph(msgspec.Struct, frozen=True):
    """A paragraph. A page shows a `large` one as a result, in larger letters."""

    text: str
    kind: Kind = ""
    large: bool = False

    def is_empty(self) -> bool:
        """Return True if there is nothing to show."""
        return not self.text


class Bullets(msgspec.Struct, frozen=True):
    """A bulleted list of sentences. The kind "warn" marks each as a warning."""

    sentences: Sequence[str]
    kind: Literal["", "warn"] = ""

    def is_empty(self) -> bool:
        """Return True if there is nothing to show."""
        return not self.sentences


class Facts(msgspec.Struct, frozen=True):
    """Pairs of a name and a text. Pairs with an empty text are left out."""

    rows: Sequence[tuple[str, str]]

    def is_empty(self) -> bool:
        """Return True if there is nothing to show."""
        return not any(text for _, text in self.rows)


class Table(msgspec.Struct, frozen=True):
    """Rows of cells under a head. Without rows, nothing is shown.

    Attributes:
        head: The name of each column.
        rows: The cells of each row, one per column.
        kind: "remarks" if the last column holds sentences, "prose" if every column does.
        label_columns: How many columns at the left hold labels. The others hold numbers, which are
            right-aligned.
        wrap_columns: Whether columns that do not fit the width continue below, each block with the
            label columns. For tables with one column per item that is compared.
        ids: On a page, the HTML id of each row.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    kind: Literal["", "remarks", "prose"] = ""
    label_columns: int = 1
    wrap_columns: bool = False
    ids: Sequence[str] = ()

    def is_empty(self) -> bool:
        """Return True if there is nothing to show."""
        return not self.rows


class Quoted(msgspec.Struct, frozen=True):
    """Lines that are shown as they are: a command, a file, or the output of another program."""

    text: str

    def is_empty(self) -> bool:
        """Return True if there is nothing to show."""
        return not self.text


class Links(msgspec.Struct, frozen=True):
    """A text followed by links, each a name and the path of a file relative to the page.

    Only a page shows links. The same holds for the classes below.
    """

    text: str
    rows: Sequence[tuple[str, str]]

    def is_empty(self) -> bool:
        """Return True if there is nothing to show."""
        return not self.rows


class Signatures(msgspec.Struct, frozen=True):
    """A line to sign on for each party: its role, and its name or "" if it is not known."""

    names: Mapping[str, str]

    def is_empty(self) -> bool:
        """Return True if there is nothing to show."""
        return not self.names


class Tiles(msgspec.Struct, frozen=True):
    """The headline numbers of a page, each in a card. Another part has to repeat them for text."""

    tiles: Sequence[Tile]

    def is_empty(self) -> bool:
        """Return True if there is nothing to show."""
        return not self.tiles


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """Horizontal bars on one scale.

    Attributes:
        rows: The bars.
        title: The heading above them.
        unit: The unit of the scale.
        marked_value: A value that a line marks in every row, for example a limit.
        included_value: A value that the scale includes although no bar reaches it, usually 0.
        format_value: Formats the ends of the scale.
        legend: The color of each meaning.
    """

    rows: Sequence[Bar]
    title: str = ""
    unit: str = ""
    marked_value: float | None = None
    included_value: float | None = None
    format_value: Callable[[float], str] = format.quantity
    legend: Mapping[str, str] | None = None

    def is_empty(self) -> bool:
        """Return True if there is nothing to show."""
        return not self.rows


class Charts(msgspec.Struct, frozen=True):
    """Charts, side by side where the page is wide enough."""

    charts: Sequence[Chart]

    def is_empty(self) -> bool:
        """Return True if there is nothing to show."""
        return not self.charts


Part = (
    str | Paragraph | Bullets | Facts | Table | Quoted | Links | Signatures | Tiles | Bars | Charts
)
"""A part of a section. A `str` is a paragraph."""


def is_empty(part: Part) -> bool:
    """Return True if a part has nothing to show."""
    return not part if isinstance(part, str) else part.is_empty()


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A heading and the parts below it. A section whose parts are all empty is left out.

    Attributes:
        heading: The heading. Without one, the section continues the previous section.
        parts: The parts, from top to bottom.
        is_subsection: Whether the section belongs to the previous one and has a smaller heading.
        folded: Whether a page shows only the heading until the reader unfolds the section.
        fold_label: What the reader clicks on to unfold a section that has no heading.
        page_only: Whether text and Markdown leave the section out.
        text_only: Whether a page leaves the section out.
        indented: Whether text indents the parts by two columns.
        id: The HTML id of the section on a page.
    """

    heading: str
    parts: tuple[Part, ...]
    is_subsection: bool = False
    folded: bool = False
    fold_label: str = ""
    page_only: bool = False
    text_only: bool = False
    indented: bool = False
    id: str = ""


def section(
    heading: str,
    *parts: Part,
    is_subsection: bool = False,
    folded: bool = False,
    fold_label: str = "",
    page_only: bool = False,
    text_only: bool = False,
    indented: bool = False,
    id: str = "",
) -> Section:
    """Create a section from a heading and any number of parts, with the attributes of `Section`.

    This is shorter than the constructor where the parts are not in a tuple already:
    `section("Latency", table, note, id="latency")`.
    """
    return Section(
        heading=heading,
        parts=parts,
        is_subsection=is_subsection,
        folded=folded,
        fold_label=fold_label,
        page_only=page_only,
        text_only=text_only,
        indented=indented,
        id=id,
    )


PageSectionFactory = Callable[[], Iterable[Section]]
"""A function that creates sections which only an HTML page shows, for example with charts.

A report may contain it in place of a section. `html.py` calls it when it renders the page. Text and
Markdown skip it, so that `loadgen report` prints a result without computing its charts.
"""


class Notice(msgspec.Struct, frozen=True):
    """What a reader has to know before any number, like SIMULATED or INVALID, and what it means."""

    label: str
    text: str
    kind: Literal["good", "bad", "warn"] = "warn"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The output of a command, or the content of a result.

    Attributes:
        title: The title of the page and of the Markdown. Text shows it only without a headline.
        generated_by: The command and its version. Only a page shows it.
        sections: What follows the headline.
        notices: What the reader has to know first.
        headline: The result in one or a few sentences.
        headline_last: Whether text shows the headline at its end, where the reader of a long
            output looks first.
        verdict: Whether the measurement is valid. A page shows it first, text shows it last.
        page_title: The title of the browser tab, if it differs from `title`.
        brief: The few lines that a terminal shows by default in place of everything but the
            notices. Pages, Markdown and `--full` ignore it.
    """

    title: str
    generated_by: str
    sections: Sequence[Section | PageSectionFactory]
    notices: Sequence[Notice] = ()
    headline: Sequence[Paragraph] = ()
    headline_last: bool = False
    verdict: Notice | None = None
    page_title: str = ""
    brief: Sequence[Section] = ()


def simulated_notice(
    text: str = "results come from a performance model, not from real hardware",
) -> Notice:
    """Return the notice of every result of a simulated server."""
    return Notice("SIMULATED", text)


def named_facts(**texts: str | Iterable[str]) -> Facts:
    """Create facts from keywords: `named_facts(Model="llama-8b", Rate_limit="10/s")`.

    A name has a space for each `_`. Several texts of one fact are joined by commas, and empty texts
    are left out.
    """
    rows = []
    for name, value in texts.items():
        text = value if isinstance(value, str) else ", ".join(filter(None, value))
        if text:
            rows.append((name.replace("_", " "), text))
    return Facts(rows)
