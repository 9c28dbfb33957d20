"""Cells of tables: statistics of distributions, and the metrics of a part of a run.

Pure. A part of a run is a stage, a target, a request class or a model, with its own summary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.stats.quantiles import NEEDED_SAMPLES, Distribution
from loadgen.runs.rates import select_headline_rates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.core.metrics.part_summaries import (
        ClassSummary,
        ModelSummary,
        StageSummary,
        TargetSummary,
    )

    RunPart = StageSummary | TargetSummary | ClassSummary | ModelSummary

UNSUPPORTED = "~"
"""Marks a percentile that rests on fewer samples than it needs."""

RANGE_LEGEND = "a-b: the client could not measure the value exactly; it lies between a and b"
"""What a range in a table of latencies means."""

RUN_PART_HEAD = (
    "ok",
    "failed",
    "req/s",
    "out tok/s",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "SLO attainment",
)
"""The heads of the columns of `run_part_cells`. Latencies are in ms."""


def quantile_label(quantile: str) -> str:
    """Return a field of a distribution as a percentile: `p99_9` is `p99.9`."""
    return quantile.replace("_", ".")


def quantile_ms(distribution: Distribution, quantile: str) -> str:
    """Return a percentile in ms, marked with ~ if the samples do not support it."""
    value = getattr(distribution, quantile)
    is_marked = value is not None and quantile not in distribution.supported
    return f"{UNSUPPORTED if is_marked else ''}{format.milliseconds(value)}"


def quantile_s(distribution: Distribution, quantile: str) -> str:
    """Return a percentile as a duration, marked with ~ if the samples do not support it."""
    value_ms = getattr(distribution, quantile)
    if value_ms is None:
        return format.NONE
    is_marked = distribution.count and quantile not in distribution.supported
    return f"{UNSUPPORTED if is_marked else ''}{format.duration(value_ms / 1000)}"


def statistic_ms(
    distribution: Distribution,
    statistic: str,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """Return the mean, a percentile or the maximum of a distribution in ms, as a table cell.

    A percentile is marked with ~ if it rests on too few samples.

    Args:
        distribution: The distribution.
        statistic: The field of `Distribution` to show: "mean", "max" or a percentile like "p99".
        ranges: The lowest and the highest possible value, in ms, of each statistic that could not
            be measured exactly. Its cell shows this range and not a single number.
    """
    if ranges and statistic in ranges:
        low_ms, high_ms = ranges[statistic]
        return format_range_ms(low_ms, high_ms)

    if statistic == "mean":
        return format.milliseconds(distribution.mean)
    if statistic == "max":
        return format.milliseconds(distribution.max)

    return quantile_ms(distribution, statistic)


def distribution_cells(
    distribution: Distribution,
    quantiles: Sequence[str],
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> tuple[str, ...]:
    """Return the mean, percentiles and the maximum in ms, and the number of samples."""
    statistics = ("mean", *quantiles, "max")
    cells = [statistic_ms(distribution, statistic, ranges) for statistic in statistics]
    return (*cells, format.count(distribution.count))


def format_range_ms(low_ms: float, high_ms: float) -> str:
    """Return a range of times: `8.33-10.0`."""
    return format.value_range(format.milliseconds(low_ms), format.milliseconds(high_ms), joint="-")


def describe_unsupported(distributions: Sequence[Distribution], quantiles: Sequence[str]) -> str:
    """Return the legend of the percentiles that are marked with ~, or "" if none is marked.

    A percentile is marked in a table if it rests on too few samples. The legend says how many each
    one needs: `~ low confidence: p99 needs at least 662 samples, p99.9 6,636`.
    """
    marked_quantiles = _find_unsupported_quantiles(distributions, quantiles)
    if not marked_quantiles:
        return ""
    first, *rest = marked_quantiles
    phrases = [f"{quantile_label(first)} needs at least {NEEDED_SAMPLES[first]:,} samples"]
    phrases += [f"{quantile_label(quantile)} {NEEDED_SAMPLES[quantile]:,}" for quantile in rest]
    return f"{UNSUPPORTED} low confidence: {', '.join(phrases)}"


def _find_unsupported_quantiles(
    distributions: Sequence[Distribution], quantiles: Sequence[str]
) -> list[str]:
    """Return the quantiles for which at least one of the distributions has too few samples."""
    return [
        quantile
        for quantile in quantiles
        if any(
            distribution.count and quantile not in distribution.supported
            for distribution in distributions
        )
    ]


def run_part_cells(part: RunPart) -> tuple[str, ...]:
    """Return the metrics of a part of a run, such as a stage or a target, as cells of a table.

    RUN_PART_HEAD has the heads of the columns. Lost requests count as failed.
    """
    rates = select_headline_rates(part)
    return (
        format.count(part.requests.ok),
        format.count(part.requests.failed + part.requests.lost),
        format.quantity(rates.requests),
        format.quantity(rates.output),
        quantile_ms(part.ttft_ms, "p50"),
        quantile_ms(part.ttft_ms, "p99"),
        quantile_ms(part.tpot_ms, "p50"),
        quantile_ms(part.tpot_ms, "p99"),
        format.percent(part.goodput.share),
    )
