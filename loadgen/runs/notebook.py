"""What a notebook shows of a run: its short report as tables, and a chart of TTFT and TPOT.

The chart is inline SVG, because notebooks remove scripts from the output of cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

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
    """Return a table with cells aligned to the left; notebooks align them to the right."""
    lines = []
    if head:
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        lines.append(f"<thead><tr>{cells}</tr></thead>")
    style = ' style="text-align:left"'
    for row in rows:
        cells = "".join(f"<td{style}>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
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
    polylines = [
        _polyline(series, bins.width_s, length_s, highest, _COLORS[name])
        for name, series in lines.items()
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


def _polyline(
    series: Sequence[float | None], width_s: float, length_s: float, highest: float, color: str
) -> str:
    """Return a series over time as an SVG polyline. Bins without a value are left out.

    Args:
        series: The value of each time bin.
        width_s: The width of a bin.
        length_s: The length of the run, which fills the width of the plot.
        highest: The value at the top of the plot. If it is 0, the line is at the bottom.
        color: The color of the line.
    """
    plot_width = CHART_WIDTH - MARGIN_LEFT - MARGIN_RIGHT
    plot_height = CHART_HEIGHT - MARGIN_TOP - MARGIN_BOTTOM
    points = []
    for index, value in enumerate(series):
        if value is None:
            continue
        middle_s = min((index + 0.5) * width_s, length_s)
        height_fraction = value / highest if highest else 0.0
        x = MARGIN_LEFT + plot_width * middle_s / length_s
        y = MARGIN_TOP + plot_height * (1 - height_fraction)
        points.append(f"{x:.1f},{y:.1f}")
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}"/>'


def _text(x: float, y: float, text: str, color: str = "currentColor") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}">{escape(text)}</text>'
