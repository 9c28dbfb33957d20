"""Cells of tables: statistics of distributions, and the metrics of a part of a run. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.core import format
from loadgen.core.stats.quantiles import SUPPORT, Distribution
from loadgen.runs.rates import headline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.core.metrics.part_summaries import (
        ClassSummary,
        ModelSummary,
        StageSummary,
        TargetSummary,
    )

    Part = StageSummary | TargetSummary | ClassSummary | ModelSummary

UNSUPPORTED = "~"
"""Marks a percentile that rests on fewer samples than it needs."""

PART_HEAD = (
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
"""The heads of `part_cells`. Latencies are in ms."""


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
    """Return the mean, a percentile or the maximum in ms.

    Args:
        distribution: The distribution.
        statistic: Its field, such as `p99`.
        ranges: The statistics that are too uncertain to be reported, with the range that contains
            each. They are shown as a range.
    """
    if ranges and statistic in ranges:
        return format_range_ms(*ranges[statistic])
    if statistic in ("mean", "max"):
        return format.milliseconds(getattr(distribution, statistic))
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
    return f"{format.milliseconds(low_ms)}-{format.milliseconds(high_ms)}"


def describe_unsupported(distributions: Sequence[Distribution], quantiles: Sequence[str]) -> str:
    """Return what the marked percentiles of a table need, or "" if none is marked.

    Example: `~ low confidence: p99 needs at least 662 samples, p99.9 6,636`.
    """
    unsupported = _unsupported(distributions, quantiles)
    if not unsupported:
        return ""
    first, *further = unsupported
    text = (
        f"{UNSUPPORTED} low confidence: {quantile_label(first)} needs at least {SUPPORT[first]:,}"
    )
    text += " samples"
    for quantile in further:
        text += f", {quantile_label(quantile)} {SUPPORT[quantile]:,}"
    return text


def _unsupported(distributions: Sequence[Distribution], quantiles: Sequence[str]) -> list[str]:
    return [
        quantile
        for quantile in quantiles
        if any(d.count and quantile not in d.supported for d in distributions)
    ]


def part_cells(part: Part) -> tuple[str, ...]:
    """Return the metrics of a part of a run, such as a stage or a target. PART_HEAD has the heads.

    Lost requests count as failed.
    """
    rates = headline(part)
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
