"""What an answer says, before it is text, Markdown or HTML: a report of sections, each a head, rows and remarks.

Values only. Every cell and every sentence is words already: no figure is computed or rounded here. `text.py`,
`markdown.py` and `html.py` write the same report in three ways; outside strings are escaped there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from loadgen.core import format
from loadgen.render.page import Bar, Chart, Tile

Kind = Literal["", "good", "bad", "warn", "soft"]
"""How words are coloured, on a page and on a terminal that has colours; "soft": a legend."""


class Paragraph(msgspec.Struct, frozen=True):
    """A paragraph. `large`: it is an answer."""

    text: str
    kind: Kind = ""
    large: bool = False


class Bullets(msgspec.Struct, frozen=True):
    """Sentences, one under the other. "warn": each speaks against a figure."""

    sentences: Sequence[str]
    kind: Literal["", "warn"] = ""


class Facts(msgspec.Struct, frozen=True):
    """Short facts by name; what is empty is left out."""

    rows: Sequence[tuple[str, str]]


class Table(msgspec.Struct, frozen=True):
    """Rows of cells under a head; nothing without rows.

    label_columns: columns that begin with words, the others are figures. kind: "remarks", the last column is a sentence;
    "prose", every column is. wrap_columns: one column for each thing compared, so that those without room may follow below.
    ids: a place on the page for each row.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    kind: Literal["", "remarks", "prose"] = ""
    label_columns: int = 1
    wrap_columns: bool = False
    ids: Sequence[str] = ()


class Quoted(msgspec.Struct, frozen=True):
    """Lines of somebody else, or of a file, letter by letter."""

    text: str


class Links(msgspec.Struct, frozen=True):
    """Words, and behind them names that lead to files beside the page. Text and Markdown leave it out, as the next."""

    text: str
    rows: Sequence[tuple[str, str]]


class Signatures(msgspec.Struct, frozen=True):
    """A line to sign on for each party, by its name where it is known."""

    names: Mapping[str, str]


class Tiles(msgspec.Struct, frozen=True):
    """The few numbers to see first, drawn large on a page. They stand in another part too: text leaves these out."""

    tiles: Sequence[Tile]


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """Horizontal bars on one scale, as `page.Page.bars` takes them, under a title. Only a page draws them."""

    rows: Sequence[Bar]
    title: str = ""
    unit: str = ""
    line: float | None = None
    low: float | None = None
    number: Callable[[float], str] = format.quantity
    legend: Mapping[str, str] | None = None


class Charts(msgspec.Struct, frozen=True):
    """Charts beside each other. Only a page draws them: what they show stands in a table, or on a page alone."""

    charts: Sequence[Chart]


Part = (
    str | Paragraph | Bullets | Facts | Table | Quoted | Links | Signatures | Tiles | Bars | Charts
)
"""A part of a section, from top to bottom; a `str` is a paragraph."""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A head and the parts below it; where the parts are empty the head is left out too. Made by `section`.

    small: it belongs to the section before. folded: a page shows it when asked, under its head or these
    words. page_only: text and Markdown leave it
    out; text_only: a page does. indented: a text indents the parts by two columns. id: a place on the page.
    """

    head: str
    parts: tuple[Part, ...]
    small: bool = False
    folded: bool | str = False
    page_only: bool = False
    text_only: bool = False
    indented: bool = False
    id: str = ""


def section(
    head: str,
    *parts: Part,
    small: bool = False,
    folded: bool | str = False,
    page_only: bool = False,
    text_only: bool = False,
    indented: bool = False,
    id: str = "",
) -> Section:
    """A section; without a head it is what stands first, or goes on with the one before."""
    return Section(
        head=head,
        parts=parts,
        small=small,
        folded=folded,
        page_only=page_only,
        text_only=text_only,
        indented=indented,
        id=id,
    )


PageOnly = Callable[[], Iterable[Section]]
"""Sections that only a page has, and that take work to make: they are made when a page is written."""


class Notice(msgspec.Struct, frozen=True):
    """What a reader has to know before any figure: SIMULATED, INVALID, and what that means here."""

    label: str
    text: str
    kind: Literal["good", "bad", "warn"] = "warn"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: what has to be known first, the answer itself, and the sections below it.

    title: of page and Markdown, and of a text that does not begin with its answer. headline_last: a text says it at its
    end, since what stands above is long. generated_by: the command and its version, at the top of a page. page_title: the name of
    the page in a browser, where it is not the title. verdict: whether the measurement is sound: first on a
    page, behind the answer in a text. brief: the few lines that a terminal prints by default, in place of everything
    but the warnings. Pages, Markdown and `--full` ignore it.
    """

    title: str
    generated_by: str
    sections: Sequence[Section | PageOnly]
    notices: Sequence[Notice] = ()
    headline: Sequence[Paragraph] = ()
    headline_last: bool = False
    verdict: Notice | None = None
    page_title: str = ""
    brief: Sequence[Section] = ()


def simulated_notice(
    text: str = "a model of a server answered: nothing here was measured on hardware",
) -> Notice:
    """The warning of every result that a simulated server gave."""
    return Notice("SIMULATED", text)


def named_facts(**named: str | Iterable[str]) -> Facts:
    """Facts by name (`_` for a space). Several values are joined; what is empty is left out."""
    rows = []
    for name, value in named.items():
        words = value if isinstance(value, str) else ", ".join(filter(None, value))
        if words:
            rows.append((name.replace("_", " "), words))
    return Facts(rows)
