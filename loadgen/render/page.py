"""The frame of every HTML page: style sheet, script, charts and tables in one file without links.

The page works without a network. The browser draws the charts with `page.js` at the available
width, so that their text is readable on a phone. `html.py` puts reports on these pages.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from loadgen.core import format
from loadgen.render.glossary import GLOSSARY

MAX_PHONE_COLUMNS = 4
"""Columns of a table that fit a phone. With more, each row becomes a card on a narrow screen."""

MAX_COLUMN_FACT = 120
"""Characters of a fact that fit a column of facts. A longer one takes the full width."""

COLORS = ("c1", "c2", "c3", "c4", "c5", "c6")
"""CSS variables of `page.css` for series. "good", "bad", "warn" and "soft" are colors too."""


class Axis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One axis of a chart.

    Attributes:
        label: What the axis shows.
        unit: The unit of its values.
        format: How tick labels are written. "nines" writes -log10(1 - p) as p90, p99 and so on.
        log: Whether the scale is logarithmic.
        min: The least value shown. If None, that of the data.
        max: The largest value shown. If None, that of the data.
        pad: Whether the range extends a little beyond the data.
        integer_ticks: Whether ticks stand at whole numbers only.
        clip_outliers: Whether the range of a y axis ends at a multiple of the median if few values
            are far above it, so that these do not flatten all others.
    """

    label: str = ""
    unit: str = ""
    format: Literal["number", "time", "percent", "nines"] = "number"
    log: bool = False
    min: float | None = None
    max: float | None = None
    pad: bool = False
    integer_ticks: bool = False
    clip_outliers: bool = False


class Series(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line, or one kind of bar or point, of a chart.

    Attributes:
        x: The x values.
        y: The y values. None leaves a gap.
        color: A name of `COLORS`, or another CSS variable of the page.
        name: Its entry in the legend.
        dash: The dash pattern of SVG, or "" for a solid line.
        width: The width of the line in pixels. 0 draws dots only.
        solid_until: Where x is larger, the line is dashed: too few samples support it.
        dots: Whether points are marked.
        labels: A label for each point.
        links: The target of each point: an id on this page, or a file relative to it.
        low: The lower end of the interval of each y.
        high: The upper end of the interval of each y.
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
    links: tuple[str, ...] = ()
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


class ShadedBand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A shaded interval of the x axis, or with `across` of the y axis, with a label."""

    start: float = msgspec.field(name="from")
    end: float = msgspec.field(name="to")
    label: str = ""
    color: str = ""
    across: bool = False


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A dashed line at one x or one y. With `extends_axis`, the y axis includes it in any case."""

    x: float | None = None
    y: float | None = None
    label: str = ""
    color: str = ""
    extends_axis: bool = False


class Chart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One chart.

    Attributes:
        title: The title above the chart.
        x: The x axis.
        y: The y axis.
        kind: Lines, bars, a scatter plot ("cloud") or a two-dimensional histogram ("cells").
        note: A sentence below the title.
        series: The data of all kinds but "cells".
        bands: Shaded intervals.
        marks: Dashed lines.
        cells: The cells of a histogram: left, right, low, high and the number of samples.
        step: The width of a bar.
        stack: Whether bars of several series are stacked.
        wide: Whether the chart takes the full width of the page.
        height: The height in pixels. 0 is the default height.
    """

    title: str
    x: Axis
    y: Axis
    kind: Literal["lines", "bars", "cloud", "cells"] = "lines"
    note: str = ""
    series: tuple[Series, ...] = ()
    bands: tuple[ShadedBand, ...] = ()
    marks: tuple[Mark, ...] = ()
    cells: tuple[tuple[float, float, float, float, int], ...] = ()
    step: float | None = None
    stack: bool = False
    wide: bool = False
    height: int = 0


class Tile(NamedTuple):
    """One headline number in a card: its name, value and unit, and a note below it."""

    name: str
    value: str
    unit: str = ""
    note: str = ""


class Bar(msgspec.Struct, frozen=True):
    """One horizontal bar.

    Attributes:
        name: The text left of the bar.
        text: The text right of it, usually its value.
        segments: The parts of the bar: start, end, color and meaning.
        whisker: The ends of an interval that is drawn over the bar.
    """

    name: str
    text: str = ""
    segments: Sequence[tuple[float, float, str, str]] = ()
    whisker: tuple[float, float] | None = None


class Page:
    """Collects the content of a page from top to bottom."""

    def __init__(self, title: str, generated_by: str) -> None:
        """Begin a page with the title of the browser tab, and the command that generates it."""
        self._title = title
        self._generated_by = generated_by
        self._blocks: list[str] = []
        self._charts: list[Chart] = []

    def add_html(self, *html: str) -> None:
        """Append HTML. The caller must have escaped every string from outside."""
        self._blocks += html

    def add_title(self, title: str) -> None:
        """Append the title of the page."""
        self.add_html(f"<h1>{escape(title)}</h1>")

    def add_heading(self, title: str, *, is_subsection: bool = False, id: str = "") -> None:
        """Append the heading of a section or subsection."""
        level = "h3" if is_subsection else "h2"
        self.add_html(f"<{level}{_format_id_attribute(id)}>{escape(title)}</{level}>")

    def add_paragraph(self, text: str, css_classes: str = "") -> None:
        """Append a paragraph with classes of `page.css`, like "soft" or "sentence good"."""
        attribute = f' class="{css_classes}"' if css_classes else ""
        self.add_html(f"<p{attribute}>{escape(text)}</p>")

    def add_badge(self, label: str, text: str) -> None:
        """Append a small neutral line, for example that a measurement is valid."""
        self.add_html(f'<p class="badge"><b>{escape(label)}</b> {escape(text)}</p>')

    def add_notice(
        self, label: str, text: str, kind: Literal["good", "bad", "warn"] = "warn"
    ) -> None:
        """Append a box with what the reader has to know first: the label in bold, then the text."""
        self.add_html(
            f'<div class="mark {kind}" role="note"><b>{escape(label)}</b>{escape(text)}</div>'
        )

    def add_tiles(self, tiles: Sequence[Tile]) -> None:
        """Append headline numbers, each in a card."""
        cards = [_render_tile(tile) for tile in tiles]
        self.add_html(f'<dl class="five">{"".join(cards)}</dl>')

    def add_facts(self, facts: Iterable[tuple[str, str]]) -> None:
        """Append short facts by name. Facts with an empty text are left out."""
        items = [_render_fact(name, text) for name, text in facts if text]
        self.add_html(f'<dl class="facts">{"".join(items)}</dl>')

    def add_table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[str]],
        kind: Literal["", "prose", "remarks"] = "",
        ids: Sequence[str] = (),
    ) -> None:
        """Append a table of plain-text cells, or nothing if there are no rows.

        On a phone, `page.css` shows each row of a table with many columns, or of sentences, as a
        card, in which every cell has the name of its column with it.

        Args:
            head: The name of each column.
            rows: The cells of each row.
            kind: "remarks" if the last column holds sentences, which wrap. "prose" if all do.
            ids: The HTML id of each row, so that links can lead to it.
        """
        if not rows:
            return

        is_prose = kind == "prose"
        is_card_table = not is_prose and len(head) > MAX_PHONE_COLUMNS
        if is_prose or is_card_table:  # each cell states its column, which `page.css` shows
            cell_attributes = [f' data-head="{escape(name)}"' if name else "" for name in head]
        else:
            cell_attributes = [""] * len(head)

        row_ids = ids or [""] * len(rows)
        row_elements = []
        for row_id, row in zip(row_ids, rows, strict=True):
            cells = "".join(map(_render_cell, row, cell_attributes))
            row_elements.append(f"<tr{_format_id_attribute(row_id)}>{cells}</tr>")

        body = "".join(row_elements)
        has_wrapping_sentences = kind != ""
        if has_wrapping_sentences:
            body = _NUMBER_AND_UNIT.sub("\\1\u00a0\\2", body)  # a no-break space

        head_cells = "".join(f"<th>{escape(name)}</th>" for name in head)
        css_classes = f"{kind} wide" if is_card_table else kind
        self.add_html(
            f'<div class="scroll"><table class="{css_classes}"><thead><tr>{head_cells}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def add_bullets(self, sentences: Iterable[str], kind: str = "") -> None:
        """Append a bulleted list of sentences, or nothing if there are none."""
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        if items:
            self.add_html(f'<ul class="said {kind}">{items}</ul>')

    @contextmanager
    def folded_block(self, label: str, *, id: str = "") -> Iterator[None]:
        """Hide what the `with` block appends until the reader clicks on the label."""
        self.add_html(f"<details{_format_id_attribute(id)}><summary>{escape(label)}</summary>")
        yield
        self.add_html("</details>")

    def add_bars(
        self,
        bars: Sequence[Bar],
        *,
        unit: str = "",
        marked_value: float | None = None,
        included_value: float | None = None,
        format_value: Callable[[float], str] = format.quantity,
    ) -> None:
        """Append horizontal bars on one scale, whose ends are written below them.

        They are HTML, not a chart that the script draws, so that long names and values wrap.

        Args:
            bars: The bars.
            unit: The unit of the scale.
            marked_value: A value that a line marks in every row, for example a limit.
            included_value: A value that the scale includes although no bar reaches it, usually 0.
            format_value: Formats the ends of the scale.
        """
        if not bars:
            return

        extra_values = [value for value in (marked_value, included_value) if value is not None]
        scale = _BarScale.covering(bars, extra_values)
        self.add_html('<div class="bars">')

        for bar in bars:
            self.add_html(_render_bar(bar, scale, marked_value))

        low_end = f"<em>{escape(format_value(scale.low))}</em>"
        high_end = f"<em>{escape(format_value(scale.high) + unit)}</em>"
        self.add_html(f"<div><span></span><div>{low_end}{high_end}</div><span></span></div></div>")

    def add_legend(self, colors: Mapping[str, str]) -> None:
        """Append what the colors of bars mean: the color of each meaning."""
        items = [
            f'<span style="color:var(--{color})">■</span> {escape(meaning)}'
            for meaning, color in colors.items()
        ]
        self.add_html(f'<p class="soft">{" ".join(items)}</p>')

    def add_charts(self, charts: Iterable[Chart]) -> None:
        """Append charts, side by side where the page is wide enough."""
        figure_blocks = [self._render_figure(chart) for chart in charts]
        if figure_blocks:
            self.add_html('<div class="charts">', *figure_blocks, "</div>")

    def _render_figure(self, chart: Chart) -> str:
        """Return the HTML of a figure without its drawing, and store the chart for `render`.

        `render` writes all charts into the page as JSON. When a browser opens the page, `page.js`
        draws each chart into its figure. `data-chart` is the index of the chart in the JSON.
        """
        css_class = ' class="wide"' if chart.wide else ""
        note = f"<p>{escape(chart.note)}</p>" if chart.note else ""
        chart_index = len(self._charts)
        self._charts.append(chart)

        return (
            f'<figure{css_class} data-chart="{chart_index}">'
            f"<figcaption>{escape(chart.title)}</figcaption>{note}</figure>"
        )

    def render(self) -> str:
        """Return the text of the whole HTML file, with its style sheet, script and chart data."""
        # Without this, "</script>" in a name would end the element with the data.
        data = msgspec.json.encode(self._charts).decode().replace("<", "\\u003c")
        blocks = "\n".join(self._blocks)
        return (
            f"{build_page_head()}"
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,">'
            f"<title>{escape(self._title)}</title>\n<style>{read_asset('page.css')}</style></head>\n"
            f'<body><main>\n<div class="top"><span>{escape(self._generated_by)}</span>'
            '<div><a href="#glossary">glossary</a>'
            '<button id="print" type="button">print or PDF</button>'
            '<button id="theme" type="button">theme: auto</button></div></div>\n'
            f"{blocks}{_render_glossary()}\n"
            "<noscript><p>The charts need JavaScript, which is in this file. The tables do not.</p>"
            "</noscript></main>\n"
            f'<script type="application/json" id="charts">{data}</script>\n'
            f"<script>{read_asset('page.js')}</script></body></html>\n"
        )


@cache
def build_security_policy() -> str:
    """Return the content security policy of every page.

    The browser loads nothing from outside the file and runs only the script `page.js`.
    """
    script_hash = hashlib.sha256(read_asset("page.js").encode()).digest()
    script_hash_text = base64.b64encode(script_hash).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash_text}'; "
        "img-src data:; form-action 'self'; base-uri 'none'"
    )


def build_page_head() -> str:
    """Return the beginning of every page, with its content security policy."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{build_security_policy()}">'
    )


@cache
def read_asset(name: str) -> str:
    """Return the text of a file in this folder: `page.css` or `page.js`."""
    return Path(__file__).with_name(name).read_text("utf-8")


_VERDICT_WORDS = {
    "good": ("PASS", "SLO MET", "met", "VALID", "better", "passed", "passes", "held", "ok"),
    "bad": (
        "FAIL",
        "FAILED",
        "SLO MISSED",
        "MISSED",
        "INVALID",
        "worse",
        "missed",
        "failed",
        "fault",
        "fails",
    ),
    "warn": ("INCONCLUSIVE", "UNDECIDED", "undecided", "not valid", "warning"),
}
VERDICT_KINDS = {word: kind for kind, group in _VERDICT_WORDS.items() for word in group}
"""The color of a cell that begins with a verdict."""


def extract_verdict(cell: str) -> str:
    """Return the beginning of a cell, where its verdict stands if it has one: `met` of `met: 3`."""
    return re.split("[:,(]", cell)[0].strip()


_NUMBER_AND_UNIT = re.compile(r"([0-9]) (ms|s|min|h|%)(?![\w])")
"""A number and its unit, between which a line must not break."""


class _BarScale(NamedTuple):
    """The scale of horizontal bars, from which positions in percent of the width follow."""

    low: float
    high: float

    @classmethod
    def covering(cls, bars: Sequence[Bar], values: Sequence[float]) -> _BarScale:
        """Return a scale from the least to the largest value of all bars and of `values`.

        Args:
            bars: The bars, with the intervals that are drawn over them.
            values: Other values that the scale has to include, such as a limit.
        """
        values_on_scale = list(values)
        for bar in bars:
            for start, end, _color, _meaning in bar.segments:
                values_on_scale += [start, end]
            values_on_scale += bar.whisker or ()
        return cls(min(values_on_scale, default=0.0), max(values_on_scale, default=1.0))

    def css_span(self, start: float, end: float) -> str:
        """Return the CSS position of an interval, in percent of the width of the scale."""
        length = self.high - self.low
        if length == 0:  # all values are equal
            length = 1.0
        percent_per_unit = 100 / length
        left = (start - self.low) * percent_per_unit
        width = (end - start) * percent_per_unit
        return f"left:{left:.2f}%;width:{width:.2f}%"


def _render_bar(bar: Bar, scale: _BarScale, marked_value: float | None) -> str:
    """Return the HTML row of a bar: its name, the bar and its text.

    The segments are <i> elements, the interval is a <b>, and the line at the marked value is a <u>.
    `page.css` draws these elements as boxes at the position that their style gives.

    Args:
        bar: The bar.
        scale: The scale that it shares with the other bars.
        marked_value: The value that a line marks in every row, or None for no line.
    """
    boxes = [
        f'<i style="{scale.css_span(start, end)};background:var(--{color})" '
        f'title="{escape(meaning)}"></i>'
        for start, end, color, meaning in bar.segments
    ]
    if bar.whisker is not None:
        boxes.append(f'<b style="{scale.css_span(*bar.whisker)}"></b>')

    if marked_value is not None:
        boxes.append(f'<u style="{scale.css_span(marked_value, marked_value)}"></u>')

    name = f"<span>{escape(bar.name)}</span>"
    text = f"<span>{escape(bar.text)}</span>"
    return f"<div>{name}<div>{''.join(boxes)}</div>{text}</div>"


def _render_tile(tile: Tile) -> str:
    """Return the card of a headline number. A number that does not exist is shown without unit."""
    unit = "" if tile.value == format.NONE else tile.unit
    return (
        f"<div><dt>{escape(tile.name)}</dt>"
        f"<dd>{escape(tile.value)} <small>{escape(unit)}</small></dd>"
        f"<p>{escape(tile.note)}</p></div>"
    )


def _render_fact(name: str, text: str) -> str:
    """Return a fact, which takes the full width of the page if it is long."""
    css_class = ' class="wide"' if len(text) > MAX_COLUMN_FACT else ""
    return f"<div{css_class}><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"


def _render_cell(text: str, attribute: str) -> str:
    """Return the HTML of a table cell.

    A text that starts with ~ is marked as uncertain, and a verdict such as PASS has its color.

    Args:
        text: The text of the cell, which is escaped here.
        attribute: An HTML attribute that holds the name of the column for phones, or "".
    """
    content = escape(text)
    verdict = re.split("[:,]", text)[0]
    kind = VERDICT_KINDS.get(verdict)
    if kind:
        return f'<td{attribute} class="{kind}"><b>{content}</b></td>'
    if text.startswith("~"):
        return f'<td{attribute} class="unsure">{content}</td>'

    return f"<td{attribute}>{content}</td>"


def _format_id_attribute(id: str) -> str:
    """Return the HTML attribute of an id, or "" without an id."""
    return f' id="{escape(id)}"' if id else ""


def _render_glossary() -> str:
    """Return the glossary, folded at the end of the page."""
    items = "".join(
        f"<div><dt>{escape(term)}</dt><dd>{escape(meaning)}</dd></div>"
        for term, meaning in GLOSSARY.items()
    )
    return (
        '<details id="glossary"><summary>Glossary</summary>'
        f'<dl class="facts">{items}</dl></details>'
    )
