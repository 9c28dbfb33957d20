"""The frame of every HTML page: style sheet, script, charts and tables in one file that needs no network.

Pure, except that it reads `page.css` and `page.js` from its own folder. It knows nothing about runs: `html.py` puts
reports on it. The browser draws the charts at the available width, so that their text is readable on a phone.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from loadgen.core import format
from loadgen.render.glossary import GLOSSARY

FEW = 4  # columns that fit a phone; a row of more becomes a card there
COLORS = (
    "c1",
    "c2",
    "c3",
    "c4",
    "c5",
    "c6",
)  # CSS variables of page.css, as are "good", "bad", "warn", "soft"
WIDE = 120  # letters of a fact that are more than a column holds well


def escape(text: str) -> str:
    """`html.escape`. Its module makes tables of all entities, which only a page has to wait for, not each run."""
    from html import escape

    return escape(text)


class Axis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One axis. Without `min` and `max` its range is that of the data. `nines` prints -log10(1 - p) as p90, p99, ..."""

    label: str = ""
    unit: str = ""
    format: Literal["number", "time", "percent", "nines"] = "number"
    log: bool = False
    min: float | None = None
    max: float | None = None
    pad: bool = False
    integer_ticks: bool = False  # it counts: no tick between two whole numbers


class Series(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line, or one kind of bar or point. Where x > `solid_until`, a line is dashed: too few samples support it.

    `width` 0: dots only. `low`, `high`: the interval of each y.
    """

    x: Sequence[float]
    y: Sequence[float | None]
    color: str
    name: str = ""
    dash: str = ""
    width: float = 1.8
    solid_until: float | None = None
    dots: bool = False
    labels: tuple[str, ...] = ()
    links: tuple[str, ...] = ()  # where each point leads: a place on this page, or a file beside it
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


class Band(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A shaded interval of the x axis, or with `across` of the y axis, with a label."""

    start: float = msgspec.field(name="from")
    end: float = msgspec.field(name="to")
    label: str = ""
    color: str = ""
    across: bool = False


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A dashed line at one x or one y. With `extends_axis`, the y axis is extended to include it."""

    x: float | None = None
    y: float | None = None
    label: str = ""
    color: str = ""
    extends_axis: bool = False


class Chart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chart: lines, bars (`step` wide, stacked), a scatter plot, or cells of (left, right, low, high, count)."""

    title: str
    x: Axis
    y: Axis
    kind: Literal["lines", "bars", "cloud", "cells"] = "lines"
    note: str = ""
    series: tuple[Series, ...] = ()
    bands: tuple[Band, ...] = ()
    marks: tuple[Mark, ...] = ()
    cells: tuple[tuple[float, float, float, float, int], ...] = ()
    step: float | None = None
    stack: bool = False
    wide: bool = False
    height: int = 0  # in pixels; 0: the usual one


class Tile(NamedTuple):
    """One headline number: its name, value and unit, and the text beside it."""

    name: str
    value: str
    unit: str = ""
    note: str = ""


class Bar(msgspec.Struct, frozen=True):
    """A row of `Page.bars`: its figure as text, segments of (start, end, colour, meaning), an interval as a whisker."""

    name: str
    text: str = ""
    segments: Sequence[tuple[float, float, str, str]] = ()
    whisker: tuple[float, float] | None = None


class Page:
    """Collects the parts of a page from top to bottom; `render` returns the text of the file."""

    def __init__(self, title: str, made_by: str) -> None:
        self._title, self._made_by = title, made_by
        self._parts: list[str] = []
        self._charts: list[Chart] = []

    def add(self, *html: str) -> None:
        """Append HTML. The caller must have passed every outside string through `escape`."""
        self._parts += html

    def say(self, text: str, kind: str = "") -> None:
        """Append a paragraph; `kind`: "soft", "sentence good", ... of page.css."""
        self.add(f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")

    def heading(self, title: str) -> None:
        """Append the title of the page."""
        self.add(f"<h1>{escape(title)}</h1>")

    def mark(self, word: str, text: str, kind: Literal["good", "bad", "warn"] = "warn") -> None:
        """Append a large box with what the reader has to know first: `word` in bold, then `text`."""
        self.add(f'<div class="mark {kind}" role="note"><b>{escape(word)}</b>{escape(text)}</div>')

    def tiles(self, numbers: Sequence[Tile]) -> None:
        """Append the headline numbers, each in a card."""
        cards = (
            f"<div><dt>{escape(n.name)}</dt>"
            f"<dd>{escape(n.value)} <small>{escape(n.unit if n.value != format.NONE else '')}</small></dd>"
            f"<p>{escape(n.note)}</p></div>"
            for n in numbers
        )
        self.add(f'<dl class="five">{"".join(cards)}</dl>')

    def facts(self, **facts: str | Iterable[str]) -> None:
        """Append short facts by name (`_` for a space). Several values are joined; what is empty is left out."""
        items = []
        for name, value in facts.items():
            text = value if isinstance(value, str) else ", ".join(filter(None, value))
            if text:
                wide = (
                    ' class="wide"' if len(text) > WIDE else ""
                )  # a row of its own, not a column of a dozen lines
                items.append(
                    f"<div{wide}><dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(text)}</dd></div>"
                )
        self.add(f'<dl class="facts">{"".join(items)}</dl>')

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        kind: Literal["", "prose", "remarks"] = "",
        ids: Sequence[str] = (),
    ) -> None:
        """Append a table of plain-text cells; nothing without rows.

        `kind`: "prose", every cell is a sentence, which wraps; "remarks", the last column is. `ids`: of the rows, for
        links to them.
        """
        if rows:
            heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
            marks = [f' id="{escape(id)}"' for id in ids] or [""] * len(rows)
            wide = " wide" if kind != "prose" and len(head) > FEW else ""
            names = [f' data-head="{escape(name)}"' if wide else "" for name in head]
            cells = ("".join(map(_cell, row, names)) for row in rows)
            body = "".join(f"<tr{mark}>{row}</tr>" for mark, row in zip(marks, cells, strict=True))
            body = (
                re.sub(_UNITS, "\\1\u00a0\\2", body) if kind else body
            )  # a number stays with its unit
            rows_html = f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>"
            self.add(f'<div class="scroll"><table class="{kind}{wide}">{rows_html}</table></div>')

    def listed(self, sentences: Iterable[str], kind: str = "") -> None:
        """Append a bulleted list of sentences; nothing when there are none."""
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        if items:
            self.add(f'<ul class="said {kind}">{items}</ul>')

    @contextmanager
    def details(self, summary: str, *, id: str = "") -> Iterator[None]:
        """What is appended inside unfolds under `summary`."""
        place = f' id="{escape(id)}"' if id else ""
        self.add(f"<details{place}><summary>{escape(summary)}</summary>")
        yield
        self.add("</details>")

    def bars(
        self,
        rows: Sequence[Bar],
        *,
        unit: str = "",
        line: float | None = None,
        low: float | None = None,
        number: Callable[[float], str] = format.quantity,
    ) -> None:
        """Append horizontal bars on one scale, which covers all of them; `line`: a value marked in every row.

        They need no script: names and figures are text that wraps. `number` writes the ends of the scale.
        """
        if not rows:
            return
        ends = [end for row in rows for start, stop, *_ in row.segments for end in (start, stop)]
        ends += [end for row in rows for end in row.whisker or ()]
        ends += [value for value in (line, low) if value is not None]
        least, most = min(ends, default=0.0), max(ends, default=1.0)
        scale = 100 / ((most - least) or 1.0)

        def span(start: float, end: float) -> str:
            return f"left:{(start - least) * scale:.2f}%;width:{(end - start) * scale:.2f}%"

        self.add('<div class="bars">')
        for row in rows:
            marks = [
                f'<i style="{span(start, end)};background:var(--{color})" title="{escape(meaning)}"></i>'
                for start, end, color, meaning in row.segments
            ]
            marks += [f'<b style="{span(*row.whisker)}"></b>'] if row.whisker is not None else []
            marks += [f'<u style="{span(line, line)}"></u>'] if line is not None else []
            name, text = escape(row.name), escape(row.text)
            self.add(
                f"<div><span>{name}</span><div>{''.join(marks)}</div><span>{text}</span></div>"
            )
        ends_html = f"<em>{escape(number(least))}</em><em>{escape(number(most) + unit)}</em>"
        self.add(f"<div><span></span><div>{ends_html}</div><span></span></div></div>")

    def legend(self, colors: Mapping[str, str]) -> None:
        """Append what the colours of bars mean."""
        items = (
            f'<span style="color:var(--{color})">■</span> {escape(name)}'
            for name, color in colors.items()
        )
        self.add(f'<p class="soft">{" ".join(items)}</p>')

    def section(self, title: str, *, id: str = "") -> None:
        id_attribute = f' id="{escape(id)}"' if id else ""
        self.add(f"<h2{id_attribute}>{escape(title)}</h2>")

    def charts(self, charts: Iterable[Chart]) -> None:
        """Append charts, side by side where the page is wide enough. Without charts, nothing is added."""
        figures = [self._figure(chart) for chart in charts]
        if figures:
            self.add('<div class="charts">', *figures, "</div>")

    def _figure(self, chart: Chart) -> str:
        self._charts.append(chart)
        css_class = ' class="wide"' if chart.wide else ""
        note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
        number = len(self._charts) - 1
        return f'<figure{css_class} data-chart="{number}"><figcaption>{escape(chart.title)}</figcaption>{note}</figure>'

    def render(self) -> str:
        """The text of the whole HTML file."""
        data = msgspec.json.encode(self._charts).decode().replace("<", "\\u003c")
        return (
            f'{head()}<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,">'
            f"<title>{escape(self._title)}</title>\n<style>{asset('page.css')}</style></head>\n<body><main>\n"
            f'<div class="top"><span>{escape(self._made_by)}</span>'
            '<div><a href="#glossary">glossary</a><button id="print" type="button">print or PDF</button>'
            '<button id="theme" type="button">theme: auto</button></div></div>\n'
            + "\n".join(self._parts)
            + _glossary()
            + "\n<noscript><p>The charts need JavaScript, which is in this file; every table is complete without.</p>"
            f'</noscript></main>\n<script type="application/json" id="charts">{data}</script>\n'
            f"<script>{asset('page.js')}</script></body></html>\n"
        )


def _glossary() -> str:
    """Return the folded list of terms at the end of a page."""
    entries = "".join(
        f"<div><dt>{escape(term)}</dt><dd>{escape(meaning)}</dd></div>"
        for term, meaning in GLOSSARY.items()
    )
    summary = "<summary>Glossary</summary>"
    return f'<details id="glossary">{summary}<dl class="facts">{entries}</dl></details>'


@cache
def policy() -> str:
    """Content security policy: the browser loads nothing from outside the file, and runs the script of pages alone."""
    script = base64.b64encode(hashlib.sha256(asset("page.js").encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'; img-src data:; "
        "form-action 'self'; base-uri 'none'"
    )


def head() -> str:
    """How every page begins. Whatever follows in such a file, the browser keeps to the policy in it."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy()}">'
    )


@cache
def asset(name: str) -> str:
    """The text of a file in this folder: `page.css` or `page.js`."""
    return Path(__file__).with_name(name).read_text("utf-8")


_WORDS = {
    "good": ("PASS", "met", "VALID", "better", "passed", "passes", "held"),
    "bad": ("FAIL", "FAILED", "MISSED", "INVALID", "worse", "missed", "fault", "fails"),
    "warn": ("INCONCLUSIVE", "UNDECIDED", "undecided", "not valid", "warning"),
}
VERDICTS = {word: kind for kind, words in _WORDS.items() for word in words}
"""A verdict in a cell -> its colour."""
_UNITS = r"([0-9]) (ms|s|min|h|%)(?![\w])"


def _cell(text: str, attribute: str) -> str:
    """Return a cell of a table as HTML. `attribute` holds the head of its column, for phones.

    A text that starts with ~ is marked as uncertain, and a verdict has its color.
    """
    content = escape(text)
    kind = VERDICTS.get(re.split("[:,]", text)[0])
    if kind:
        return f'<td{attribute} class="{kind}"><b>{content}</b></td>'
    if text.startswith("~"):
        return f'<td{attribute} class="unsure">{content}</td>'
    return f"<td{attribute}>{content}</td>"
