"""The confidence intervals of the metrics of one run, from the variation within it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.render.section import Paragraph, Section, Table, section
from loadgen.repeated.comparable_metrics import SHARE_PATHS, find_metric

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary

COVERAGE = (
    "95 % confidence, from the variation between blocks of time of this run. Variation between "
    "runs, for example after a restart of the server, is not covered: use --repeat 3 for that."
)

_TIME_STATISTICS = (".p50", ".p90", ".p95", ".p99", ".p99_9", ".mean")
"""How the paths of latencies end, which are in ms."""


def build_interval_section(summary: Summary) -> Section:
    """Return the section with the confidence intervals of the metrics of one run.

    They are computed from how much the metrics vary within the run. A run that is too short has no
    intervals. Its section has no content, and a report does not show such a section.
    """
    interval_by_path = summary.within
    rows = [
        (
            _label_with_unit(path),
            _format_value(path, estimate),
            _format_value(path, low),
            _format_value(path, high),
        )
        for path, (estimate, low, high) in interval_by_path.items()
    ]
    legend = COVERAGE if rows else ""

    return section(
        "Confidence intervals",
        Table(("metric", "value", "from", "to"), rows),
        Paragraph(legend, "soft"),
        folded=True,
        id="confidence-intervals",
    )


def _label_with_unit(path: str) -> str:
    """Return the name of a metric with its unit, or its path if it has no name."""
    metric = find_metric(path)
    if metric is None:
        return path
    return f"{metric.name}, {metric.unit}" if metric.unit else metric.name


def _format_value(path: str, value: float | None) -> str:
    if path in SHARE_PATHS:
        return format.percent(value)
    if path.endswith(_TIME_STATISTICS):
        return format.milliseconds(value)
    return format.quantity(value)
