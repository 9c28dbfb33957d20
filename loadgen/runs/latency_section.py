"""The sections about latency: the table of distributions, the SLO, and the confidence intervals.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.stats.quantiles import Distribution, needed_samples
from loadgen.render.section import PageSectionFactory, Paragraph, Section, Table, section
from loadgen.runs import cells, page, recovery, within_run_variance
from loadgen.runs.latency_text import label_with_unit, latency_notes, latency_rows

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.figures import MetricDefinition
    from loadgen.runs.latency_text import MetricRow
    from loadgen.runs.page import ComputeChartData

QUANTILES = ("p50", "p90", "p95", "p99", "p99_9")


def latency_sections(
    summary: Summary, compute_chart_data: ComputeChartData | None
) -> Iterator[Section | PageSectionFactory]:
    """Yield the table of latencies, their confidence intervals, recovery times and curves.

    The heading says if the run is INVALID, because its latencies are not reliable then.
    """
    rows = latency_rows(summary)
    unsupported = cells.describe_unsupported([row.distribution for row in rows], QUANTILES)
    head = "Latency" if summary.verdict.valid else "Latency (not reliable)"
    yield section(
        head,
        distribution_table(rows, summary),
        _requested_percentiles(summary, rows),
        Paragraph(unsupported, "soft"),
        *(Paragraph(note, "soft") for note in latency_notes(summary)),
        id="latency",
    )
    yield within_run_variance.build_interval_section(summary)
    yield from recovery.build_recovery_sections(summary.recovery, compute_chart_data)
    yield from page.build_percentile_charts(summary, compute_chart_data)


def distribution_table(rows: Iterable[MetricRow], summary: Summary) -> Table:
    """Return a table of distributions in ms. Statistics that are omitted are shown as a range."""
    head = ("ms", "mean", *map(cells.quantile_label, QUANTILES), "max", "samples")
    table_rows = []
    for definition, distribution in rows:
        ranges = _uncertain_ranges(summary, definition)
        values = cells.distribution_cells(distribution, QUANTILES, ranges)
        table_rows.append((label_with_unit(definition), *values))
    return Table(head, table_rows)


def _uncertain_ranges(
    summary: Summary, definition: MetricDefinition
) -> Mapping[str, tuple[float, float]]:
    """Return the ranges of the statistics of a metric that are too uncertain to be reported."""
    withheld = summary.withheld.get(definition.name)
    return {} if withheld is None else withheld.ranges


def _requested_percentiles(summary: Summary, rows: Iterable[MetricRow]) -> Table:
    """Return the percentiles that the user requested with --percentiles; no rows without them."""
    requested = [row for row in rows if summary.percentiles.get(row.definition.field)]
    names = list(
        dict.fromkeys(
            name for row in requested for name in summary.percentiles[row.definition.field]
        )
    )
    table_rows = [
        (
            label_with_unit(definition),
            *_percentile_cells(summary.percentiles[definition.field], names, distribution),
            format.count(distribution.count),
        )
        for definition, distribution in requested
    ]
    return Table(("requested, ms", *map(cells.quantile_label, names), "samples"), table_rows)


def _percentile_cells(
    value_by_percentile: Mapping[str, float], names: Iterable[str], distribution: Distribution
) -> list[str]:
    """Return the values of percentiles such as `p97_5`, marked if they are not supported."""
    row = []
    for name in names:
        quantile = float(cells.quantile_label(name)[1:]) / 100
        mark = cells.UNSUPPORTED if distribution.count < needed_samples(quantile) else ""
        row.append(f"{mark}{format.milliseconds(value_by_percentile.get(name))}")
    return row
