"""The sections about latency: the table of distributions, the SLO, and the confidence intervals.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    uncertain = summary.withheld.get(definition.name)
    return {} if uncertain is None else uncertain.ranges


def _requested_percentiles(summary: Summary, rows: Sequence[MetricRow]) -> Table:
    """Return the percentiles that the user requested with --percentiles; no rows without them.

    Each latency may have other percentiles, so the columns are those of all latencies together.
    """
    percentile_names: list[str] = []
    for definition, _ in rows:
        percentile_names += summary.percentiles.get(definition.field, {})
    columns = list(dict.fromkeys(percentile_names))
    table_rows = []
    for definition, distribution in rows:
        values_ms = summary.percentiles.get(definition.field)
        if values_ms:
            cells_of_row = _percentile_cells(values_ms, columns, distribution)
            sample_count = format.count(distribution.count)
            table_rows.append((label_with_unit(definition), *cells_of_row, sample_count))
    return Table(("requested, ms", *map(cells.quantile_label, columns), "samples"), table_rows)


def _percentile_cells(
    values_ms: Mapping[str, float], names: Iterable[str], distribution: Distribution
) -> list[str]:
    """Return the values of percentiles such as `p97_5`, marked with ~ if they lack samples.

    A percentile that was not requested for this latency has an empty cell.
    """
    percentile_cells = []
    for name in names:
        percentile = float(cells.quantile_label(name).removeprefix("p"))
        is_supported = distribution.count >= needed_samples(percentile / 100)
        mark = "" if is_supported else cells.UNSUPPORTED
        percentile_cells.append(f"{mark}{format.milliseconds(values_ms.get(name))}")
    return percentile_cells
