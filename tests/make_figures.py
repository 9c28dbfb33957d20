"""Writes the list of metrics in `docs/reference/summary.md` from their definitions.

`python tests/make_figures.py` writes the list again. `core/metrics/test_figures.py` checks that it
is current.
"""

from __future__ import annotations

from pathlib import Path

from loadgen.figures import METRICS, MetricDefinition

PAGE = Path(__file__).parent.parent / "docs/reference/summary.md"
BEGIN = (
    "<!-- metrics: made by tests/make_figures.py from the rows of "
    "loadgen/core/metrics/metric_definitions.py -->"
)
END = "<!-- end of the metrics -->"


SAMPLES = {
    "ok": "",
    "sent": " It covers all requests that were sent.",
    "gaps": " It covers the times between all events.",
    "events": " It covers all output events.",
}
"""What a metric covers if it is not the successful requests."""


def render_metric(row: MetricDefinition) -> str:
    """Return the line of one metric: its path, its definition, unit and guards."""
    arrow = " ↑" if row.better > 0 else ""
    unit = "" if row.unit == "ms" else f" ({row.unit})"
    codes = " and ".join(f"`{code}`" for code in row.guards)
    guards = f" Not reported in the case of {codes}." if codes else ""
    meaning = row.meaning[0].upper() + row.meaning[1:]
    return f"- `{row.path}`{arrow}{unit}: {meaning}.{SAMPLES[row.sample]}{guards}"


def render_metrics() -> str:
    """Return the list of all metrics between its marks."""
    return "\n".join([BEGIN, "", *map(render_metric, METRICS.builtin_rows), "", END])


def page() -> str:
    """Return the page with the current list."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return before + render_metrics() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
