"""Writes the list of figures in `docs/reference/summary.md` from their rows, and from nothing else.

`python tests/make_figures.py` writes it again; `core/metrics/test_figures.py` checks that it is what it would write.
"""

from __future__ import annotations

from pathlib import Path

from loadgen.figures import METRICS, MetricDefinition

PAGE = Path(__file__).parent.parent / "docs/reference/summary.md"
BEGIN = "<!-- figures: made by tests/make_figures.py from the rows of loadgen/core/metrics/metric_definitions.py -->"
END = "<!-- end of the figures -->"


def line(row: MetricDefinition) -> str:
    sample = "" if row.sample == "ok" else f"; of {row.sample}"
    guards = f" [{', '.join(f'`{code}`' for code in row.guards)}]" if row.guards else ""
    unit = "" if row.unit == "ms" else f" ({row.unit})"
    return f"- `{row.path}`{' ↑' * (row.better > 0)}: {row.meaning}{unit}{sample}{guards}"


def figures() -> str:
    return "\n".join([BEGIN, "", *map(line, METRICS.own), "", END])


def page() -> str:
    """The page with the list as it should be."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return before + figures() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
