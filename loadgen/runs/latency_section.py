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
    """Yield the sections about latency: tables first, then how latency recovered, then curves.

    The heading says if the run is INVALID, because its latencies are not reliable then. Below the
    table there are notes, for example on percentiles with too few samples.
    """
    yield _latency_section(summary)
    yield within_run_variance.build_interval_section(summary)
    yield from recovery.build_recovery_sections(summary.recovery, compute_chart_data)
    yield from page.build_percentile_section(summary, compute_chart_data)


def _latency_section(summary: Summary) -> Section:
    """Return the table of all latencies, that of the requested percentiles, and notes on both."""
    rows = latency_rows(summary)
    distributions = [row.distribution for row in rows]
    has_ranges = any(_uncertain_ranges(summary, row.definition) for row in rows)
    notes = [
        cells.describe_unsupported(distributions, QUANTILES),
        cells.RANGE_LEGEND if has_ranges else "",
        *latency_notes(summary),
    ]

    return section(
        "Latency" if summary.verdict.valid else "Latency (not reliable)",
        distribution_table(rows, summary),
        _requested_percentile_table(summary, rows),
        *[Paragraph(note, "soft") for note in notes],
        id="latency",
    )


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
    uncertain = summary.withheld_statistics.get(definition.name)
    return {} if uncertain is None else uncertain.ranges


def _requested_percentile_table(summary: Summary, rows: Sequence[MetricRow]) -> Table:
    """Return a table of the percentiles that the user requested with --percentiles.

    Each latency may have other percentiles, so the columns are those of all latencies together. The
    table is empty, and is not shown, if no percentiles were requested.
    """
    # The values in ms of the requested percentiles, by latency: {"ttft_ms": {"p97_5": 812.0}}.
    values_by_latency = summary.percentiles
    requested_rows = [row for row in rows if values_by_latency.get(row.definition.field)]

    percentiles: dict[str, None] = {}  # used as a set that keeps the order
    for row in requested_rows:
        percentiles.update(dict.fromkeys(values_by_latency[row.definition.field]))

    table_rows = []
    for row in requested_rows:
        values_ms = values_by_latency[row.definition.field]
        value_cells = _percentile_cells(values_ms, percentiles, row.distribution)
        sample_count = format.count(row.distribution.count)
        table_rows.append((label_with_unit(row.definition), *value_cells, sample_count))

    labels = [cells.quantile_label(percentile) for percentile in percentiles]
    return Table(("requested, ms", *labels, "samples"), table_rows)


def _percentile_cells(
    values_ms: Mapping[str, float], percentiles: Iterable[str], distribution: Distribution
) -> list[str]:
    """Return a latency at percentiles such as "p97_5" (97.5), as table cells.

    A value that rests on too few samples is marked with ~. The cell of a percentile that was not
    requested for this latency is empty.
    """
    value_cells = []
    for percentile in percentiles:
        needed_count = needed_samples(_quantile_of_name(percentile))
        has_enough_samples = distribution.count >= needed_count
        mark = "" if has_enough_samples else cells.UNSUPPORTED
        value_cells.append(f"{mark}{format.milliseconds(values_ms.get(percentile))}")
    return value_cells


def _quantile_of_name(name: str) -> float:
    """Return the quantile of a percentile by its JSON key: 0.975 for `p97_5`."""
    percentile = float(name.removeprefix("p").replace("_", "."))
    return percentile / 100
