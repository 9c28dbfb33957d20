"""What a notebook shows of a run: its short report as tables, and a chart of TTFT and TPOT.

The chart is inline SVG, because notebooks remove scripts from the output of cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loadgen.core import format
from loadgen.render.section import Facts, Paragraph, Table
from loadgen.runs.brief import brief_sections
from loadgen.runs.notices import notices

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.render.section import Part
    from loadgen.runs.page_data import Bins

CHART_WIDTH = 420
CHART_HEIGHT = 140
MARGIN_LEFT = 52
MARGIN_BOTTOM = 18
MARGIN_TOP = 18
MARGIN_RIGHT = 4
FONT_SIZE = 11
TITLE_BASELINE = 12
TITLE_WIDTH = 110
LEGEND_ENTRY_WIDTH = 50
LENGTH_LABEL_WIDTH = 60
"""The size of a chart and the room for its labels, in pixels."""

_COLORS = {"p50": "#2563c9", "p90": "#0f8a5f", "p99": "#c2570c"}
"""The percentiles that are drawn, with their colors."""


def notebook_html(summary: Summary, run_dir: Path | None = None) -> str:
    """Return a run as HTML for a notebook. Without records, it has tables and no charts."""
    parts = [
        f"<p><b>{escape(notice.label)}</b> {escape(notice.text)}</p>" for notice in notices(summary)
    ]
    for section in brief_sections(summary, run_dir):
        parts += [html for part in section.parts for html in _part_html(part)]

    if run_dir is not None:
        parts += _svg_charts(run_dir)

    return f"<div>{''.join(parts)}</div>"


def _part_html(part: Part) -> Iterator[str]:
    """Yield a part of a section as HTML. Parts that need the scripts of a page are left out."""
    match part:
        case str() if part:
            yield f"<p>{escape(part)}</p>"
        case Paragraph() if part.text:
            yield f"<p>{escape(part.text)}</p>"
        case Table() if part.rows:
            yield _table_html(part.head, part.rows)
        case Facts():
            yield _table_html((), part.rows)


def _table_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML, without a head row if `head` is empty.

    Notebooks align cells to the right by default. The cells of this table have texts, so they are
    aligned to the left.
    """
    lines = []
    if head:
        head_cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        lines.append(f"<thead><tr>{head_cells}</tr></thead>")

    style = ' style="text-align:left"'
    for row in rows:
        row_cells = "".join(f"<td{style}>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{row_cells}</tr>")

    return f"<table>{''.join(lines)}</table>"


# -- charts ----------------------------------------------------------------------------------------


def _svg_charts(run_dir: Path) -> list[str]:
    """Return TTFT and TPOT over time as SVG, or nothing if the records were not kept."""
    from loadgen.core.results import store
    from loadgen.runs import page_data

    if not store.has_rows(run_dir):
        return []

    stored = store.read_run(run_dir)
    data = page_data.compute_chart_data(stored.manifest, stored.rows, event_counts=stored.timeline)
    charts = (("TTFT (ms)", data.latency.ttft), ("TPOT (ms)", data.latency.tpot))

    return [svg_chart(title, bins, data.length_s) for title, bins in charts if bins.series]


def svg_chart(title: str, bins: Bins, length_s: float) -> str:
    """Return percentiles over the time of a run as an SVG image; "" if no bin has a value."""
    lines = {name: bins.series[name] for name in _COLORS if name in bins.series}
    values = [value for series in lines.values() for value in series if value is not None]
    if not values:
        return ""

    highest = max(values)
    plot = _PlotArea(length_s=length_s, highest_value=highest)
    polylines = [
        _polyline(series, bins.width_s, plot, _COLORS[name]) for name, series in lines.items()
    ]
    elements = [
        *_title_and_legend(title, lines),
        *polylines,
        *_axis_labels(format.quantity(highest), format.duration(length_s)),
    ]

    return (
        f'<svg width="{CHART_WIDTH}" height="{CHART_HEIGHT}" xmlns="http://www.w3.org/2000/svg" '
        f'font-size="{FONT_SIZE}" fill="currentColor">{"".join(elements)}</svg>'
    )


def _title_and_legend(title: str, line_names: Iterable[str]) -> Iterator[str]:
    """Yield the title of a chart, and on the same line the name of each line in its color."""
    yield _text(MARGIN_LEFT, TITLE_BASELINE, title)
    for index, name in enumerate(line_names):
        x = MARGIN_LEFT + TITLE_WIDTH + LEGEND_ENTRY_WIDTH * index
        yield _text(x, TITLE_BASELINE, name, _COLORS[name])


def _axis_labels(highest_value: str, length: str) -> Iterator[str]:
    """Yield the labels of the ends of both axes."""
    y_label_left = 2
    x_label_baseline = CHART_HEIGHT - 4
    yield _text(y_label_left, MARGIN_TOP + 8, highest_value)
    yield _text(y_label_left, CHART_HEIGHT - MARGIN_BOTTOM, "0")
    yield _text(MARGIN_LEFT, x_label_baseline, "0 s")
    yield _text(CHART_WIDTH - LENGTH_LABEL_WIDTH, x_label_baseline, length)


class _PlotArea(NamedTuple):
    """The part of a chart inside its margins, which the time of a run fills.

    Attributes:
        length_s: The length of the run. It ends at the right side.
        highest_value: The value at the top. If it is 0, all values are at the bottom.
    """

    length_s: float
    highest_value: float

    def position(self, time_s: float, value: float) -> str:
        """Return the position of a value in the chart, as the coordinates `x,y` of SVG."""
        width = CHART_WIDTH - MARGIN_LEFT - MARGIN_RIGHT
        height = CHART_HEIGHT - MARGIN_TOP - MARGIN_BOTTOM
        height_fraction = value / self.highest_value if self.highest_value else 0.0
        x = MARGIN_LEFT + width * time_s / self.length_s
        # In SVG, y is 0 at the top.
        y = MARGIN_TOP + height * (1 - height_fraction)
        return f"{x:.1f},{y:.1f}"


def _polyline(
    values: Sequence[float | None], bin_width_s: float, plot: _PlotArea, color: str
) -> str:
    """Return a line over time as an SVG polyline, with a point in the middle of each time bin.

    `values` has the value of each time bin. A bin without a value (None) has no point.
    """
    points = []
    for index, value in enumerate(values):
        if value is not None:
            middle_s = min((index + 0.5) * bin_width_s, plot.length_s)
            points.append(plot.position(middle_s, value))
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}"/>'


def _text(x: float, y: float, text: str, color: str = "currentColor") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}">{escape(text)}</text>'
