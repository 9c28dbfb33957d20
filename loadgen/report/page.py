"""The frame of every HTML page: style sheet, script, charts and tables in one file that needs no network.

Pure, except that it reads `page.css` and `page.js` from its own folder. It knows nothing about runs: `html.py` decides
what goes on a page. The browser draws the charts at the available width, so that their text is readable on a phone.
"""

from __future__ import annotations

from functools import cache
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

COLORS = ("c1", "c2", "c3", "c4", "c5", "c6")  # CSS variables of page.css, as are "good", "bad", "warn", "soft"


class Axis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One axis. Without `min` and `max` its range is that of the data. `nines` prints -log10(1 - p) as p90, p99, ..."""

    label: str = ""
    unit: str = ""
    format: Literal["number", "time", "percent", "nines"] = "number"
    log: bool = False
    min: float | None = None
    max: float | None = None
    pad: bool = False


class Series(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line, or one kind of bar or point. Where x > `carried`, a line is dashed: too few samples support it."""

    x: Sequence[float]
    y: Sequence[float | None]
    color: str
    name: str = ""
    dash: str = ""
    width: float = 1.8
    carried: float | None = None
    dots: bool = False
    labels: tuple[str, ...] = ()


class Band(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A shaded interval of the x axis, with a label."""

    start: float = msgspec.field(name="from")
    end: float = msgspec.field(name="to")
    label: str = ""
    color: str = ""


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A dashed line at one x or one y. With `fit`, the y axis is extended to include it."""

    x: float | None = None
    y: float | None = None
    label: str = ""
    color: str = ""
    fit: bool = False


class Chart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chart: lines, bars (`step` wide, stacked), a scatter plot, or cells of (left, right, low, high, count)."""

    kind: Literal["lines", "bars", "cloud", "cells"]
    title: str
    x: Axis
    y: Axis
    note: str = ""
    series: tuple[Series, ...] = ()
    bands: tuple[Band, ...] = ()
    marks: tuple[Mark, ...] = ()
    cells: tuple[tuple[float, float, float, float, int], ...] = ()
    step: float | None = None
    stack: bool = False
    wide: bool = False
    height: int = 0  # in pixels; 0: the usual one


class Page:
    """Collects the parts of a page from top to bottom; `render` returns the text of the file."""

    def __init__(self, title: str, made_by: str) -> None:
        self._title, self._made_by = title, made_by
        self._parts: list[str] = []
        self._charts: list[Chart] = []

    def add(self, *html: str) -> None:
        """Append HTML. The caller must have passed every outside string through `escape`."""
        self._parts += html

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
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'
            f"<title>{escape(self._title)}</title>\n<style>{asset('page.css')}</style></head>\n<body><main>\n"
            f'<div class="top"><span>{escape(self._made_by)}</span>'
            '<button id="theme" type="button">theme: auto</button></div>\n'
            + "\n".join(self._parts)
            + "\n<noscript><p>The charts need JavaScript, which is in this file; every table is complete without.</p>"
            f'</noscript></main>\n<script type="application/json" id="charts">{data}</script>\n'
            f"<script>{asset('page.js')}</script></body></html>\n"
        )


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Content security policy: the browser refuses to load anything from outside the file."""


@cache
def asset(name: str) -> str:
    """The text of a file in this folder: `page.css` or `page.js`."""
    return resources.files("loadgen.report").joinpath(name).read_text("utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: bool = False) -> str:
    """An HTML table of plain-text cells; the empty string without rows.

    A cell that starts with ~ is shown as uncertain. `words`: the cells are sentences, left-aligned and wrapped.
    """
    if not rows:
        return ""
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    css_class = ' class="words"' if words else ""
    return f'<div class="scroll"><table{css_class}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    css_class = ' class="unsure"' if text.startswith("~") else ""
    return f"<td{css_class}>{escape(text)}</td>"


def listed(sentences: Iterable[str], kind: str = "") -> str:
    """A bulleted list of sentences; the empty string when there are none."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="said {kind}">{items}</ul>' if items else ""


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Short facts, each a name and a value. Pairs with an empty value are left out."""
    items = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs if value)
    return f'<dl class="facts">{"".join(items)}</dl>'


def mark(word: str, text: str, kind: Literal["bad", "warn"]) -> str:
    """A large box that warns the reader: `word` in bold, then `text`."""
    return f'<div class="mark {kind}" role="note"><b>{escape(word)}</b>{escape(text)}</div>'
