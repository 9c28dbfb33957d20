"""What a notebook shows of a run: its short report as tables, and a chart of TTFT and TPOT.

The chart is inline SVG, because notebooks remove scripts from the output of cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    parts = [_text(MARGIN_LEFT, 12, title)]
    for index, (name, series) in enumerate(lines.items()):
        parts.append(_text(MARGIN_LEFT + 110 + 50 * index, 12, name, _COLORS[name]))
        parts.append(_polyline(series, bins.width_s, length_s, highest, _COLORS[name]))
    bottom = CHART_HEIGHT - MARGIN_BOTTOM
    parts.append(_text(2, MARGIN_TOP + 8, format.quantity(highest)))
    parts.append(_text(2, bottom, "0"))
    parts.append(_text(MARGIN_LEFT, CHART_HEIGHT - 4, "0 s"))
    parts.append(_text(CHART_WIDTH - 60, CHART_HEIGHT - 4, format.duration(length_s)))
    return (
        f'<svg width="{CHART_WIDTH}" height="{CHART_HEIGHT}" xmlns="http://www.w3.org/2000/svg" '
        f'font-size="11" fill="currentColor">{"".join(parts)}</svg>'
    )


def _polyline(
    series: Sequence[float | None], width_s: float, length_s: float, highest: float, color: str
) -> str:
    """Return the line of a series. Bins without a value are left out."""
    plot_width = CHART_WIDTH - MARGIN_LEFT - 4
    plot_height = CHART_HEIGHT - MARGIN_TOP - MARGIN_BOTTOM
    points = []
    for index, value in enumerate(series):
        if value is None:
            continue
        middle_s = min((index + 0.5) * width_s, length_s)
        x = MARGIN_LEFT + plot_width * middle_s / length_s
        y = MARGIN_TOP + plot_height * (1 - value / (highest or 1.0))
        points.append(f"{x:.1f},{y:.1f}")
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}"/>'


def _text(x: float, y: float, text: str, color: str = "currentColor") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}">{escape(text)}</text>'
