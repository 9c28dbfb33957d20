"""Computes percentile curves: the latency at each percentile, for a chart.

Pure numpy. `charts.py` describes the chart, which dashes the part of a curve beyond the highest
percentile that the samples support.

The percentile axis is stretched towards p100, because the slowest requests matter most. A quantile
q has the position -log10(1 - q) on it: p50 is at 0.3, p90 at 1, p99 at 2, and p99.9 at 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics import columns
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import needed_samples, quantile_index

LOWEST_QUANTILE = 0.01
"""No percentile below this one is called supported."""

HIGHEST_QUANTILE = 1 - 1e-12
"""No number of samples that fits into memory supports this percentile."""

POSITIONS_PER_UNIT = 10_000
"""The highest supported position is a multiple of 1 / POSITIONS_PER_UNIT."""

BISECTION_STEPS = 50
"""Halvings of an interval of length 1 that reach the precision of a float."""

MEDIAN_POSITION = 0.3
"""The position of p50 on the percentile axis: -log10(0.5), rounded."""

POINTS_BELOW_MEDIAN = 12
POINTS_ABOVE_MEDIAN = 90
"""The numbers of points of a curve. Most are above the median, where the axis is stretched."""

SIGNIFICANT_DIGITS = 4
"""The precision of positions and values, which is finer than a pixel of the chart."""

NS_PER_MS = 1e6


class PercentileCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The percentile curve of a latency.

    Attributes:
        name: The name of the latency.
        count: The number of samples.
        positions: The position of each point on the percentile axis, in ascending order.
        values_ms: The latency at each point. The last one is the largest sample.
        supported_until: The position of the highest percentile that the samples support. A point
            beyond it depends on a single request.
    """

    name: str
    count: int
    positions: tuple[float, ...]
    values_ms: tuple[float, ...]
    supported_until: float


def highest_supported_position(count: int) -> float:
    """Return the position on the percentile axis of the highest percentile that samples support.

    The position of a quantile q is -log10(1 - q), so that p90 is at 1, p99 at 2 and p99.9 at 3. It
    is rounded down, so that it never claims too much. Return 0 if not even LOWEST_QUANTILE is
    supported by `count` samples.
    """
    if count < needed_samples(LOWEST_QUANTILE):
        return 0.0
    quantile = _highest_supported_quantile(count)
    position = -float(np.log10(1 - quantile))
    return int(position * POSITIONS_PER_UNIT) / POSITIONS_PER_UNIT


def _highest_supported_quantile(count: int) -> float:
    """Return the highest quantile for which `count` samples are enough, at least LOWEST_QUANTILE.

    `needed_samples` grows with the quantile and has no inverse, so the quantile is found by
    bisection: each step halves the interval between one that is supported and one that is not.
    """
    supported = LOWEST_QUANTILE
    unsupported = HIGHEST_QUANTILE
    for _ in range(BISECTION_STEPS):
        middle = (supported + unsupported) / 2
        if needed_samples(middle) <= count:
            supported = middle
        else:
            unsupported = middle

    return supported


def curve_of_values(name: str, values_ns: NDArray[np.int64]) -> PercentileCurve | None:
    """Return the percentile curve of a latency from the values of the requests, in ns.

    Each point is the exact value of a request. Requests without a value are left out. Return None
    if no request has a value.
    """
    sorted_values_ns = np.sort(columns.drop_undefined(values_ns))
    count = len(sorted_values_ns)
    if count == 0:
        return None

    def value_at(quantile: float) -> float:
        return float(sorted_values_ns[quantile_index(count, quantile)])

    largest_ns = float(sorted_values_ns[-1])
    return _percentile_curve(name, count, value_at, largest_ns)


def curve_of_histogram(name: str, histogram: Histogram) -> PercentileCurve | None:
    """Return the percentile curve of a histogram, or None if it is empty.

    Values have the relative error of the buckets of the histogram.
    """
    count = histogram.count
    if count == 0:
        return None

    cumulative_counts = np.cumsum(histogram.counts)

    def value_at(quantile: float) -> float:
        sample_index = quantile_index(count, quantile)
        bucket = np.searchsorted(cumulative_counts, sample_index, side="right")
        return histogram.bucket_middle(int(bucket))

    return _percentile_curve(name, count, value_at, largest_ns=float(histogram.largest_ns))


def _percentile_curve(
    name: str, count: int, value_at: Callable[[float], float], largest_ns: float
) -> PercentileCurve:
    """Return the percentile curve of a latency whose value at each quantile is known.

    A point of the curve has a position on the percentile axis, which is -log10(1 - quantile): 1 for
    p90, 2 for p99. The last point is the largest of the n samples, at the position of the quantile
    1 - 1/n, which is log10(n). It is not taken from `value_at`, because the value at that quantile
    may be that of a smaller sample.

    Args:
        name: The name of the latency.
        count: The number of samples.
        value_at: Returns the value in ns at a quantile.
        largest_ns: The largest sample.
    """
    last_position = max(float(np.log10(count)), MEDIAN_POSITION)
    positions = _point_positions(last_position).tolist()
    positions_before_last = positions[:-1]
    values_ns = [value_at(_quantile_at(position)) for position in positions_before_last]
    values_ns.append(largest_ns)
    values_ms = [value_ns / NS_PER_MS for value_ns in values_ns]

    return PercentileCurve(
        name=name,
        count=count,
        positions=round_all(positions, SIGNIFICANT_DIGITS),
        values_ms=round_all(values_ms, SIGNIFICANT_DIGITS),
        supported_until=highest_supported_position(count),
    )


def _quantile_at(position: float) -> float:
    """Return the quantile at a position on the percentile axis: 0.9 at 1, 0.99 at 2."""
    return float(1 - 10**-position)


def _point_positions(last_position: float) -> NDArray[np.float64]:
    """Return the positions of the points of a curve in ascending order, from 0 to the last one."""
    below_median = np.linspace(0, MEDIAN_POSITION, POINTS_BELOW_MEDIAN)
    above_median = np.linspace(MEDIAN_POSITION, last_position, POINTS_ABOVE_MEDIAN)
    return np.unique(np.concatenate((below_median, above_median)))


def round_to(value: float, digits: int) -> float:
    """Return a value rounded to a number of significant digits."""
    return float(f"{value:.{digits}g}")


def round_all(values: Sequence[float] | NDArray[np.float64], digits: int) -> tuple[float, ...]:
    """Return values rounded to a number of significant digits."""
    return tuple(round_to(float(value), digits) for value in values)
