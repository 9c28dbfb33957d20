"""Percentile curves: the value at each percentile, and up to which one the samples support it.

Pure numpy. `charts.py` describes the chart, in which the unsupported part is dashed.

A position on the percentile axis is counted in nines, -log10(1 - p): 1 is p90, 2 is p99.
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

BISECTION_STEPS = 50
"""Halvings of an interval of length 1 that reach the precision of a float."""

MEDIAN_NINES = 0.3
"""The position of p50: -log10(0.5), rounded."""

POINTS_BELOW_MEDIAN = 12
POINTS_ABOVE_MEDIAN = 90
"""A curve has so many points. Most are above the median, where the axis is stretched."""

NS_PER_MS = 1e6


class PercentileCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The percentile curve of a latency.

    Attributes:
        name: The name of the latency.
        count: The number of samples.
        nines: The positions of the points; the last one is the largest sample.
        ms: The values of the points.
        carried: The position of the highest percentile that the samples support. Beyond it, a point
            depends on a single request.
    """

    name: str
    count: int
    nines: tuple[float, ...]
    ms: tuple[float, ...]
    carried: float


def supported_nines(count: int) -> float:
    """Return the position of the highest percentile that so many samples support, rounded down.

    It is 0 if not even LOWEST_QUANTILE is supported.
    """
    if count < needed_samples(LOWEST_QUANTILE):
        return 0.0
    supported = LOWEST_QUANTILE
    unsupported = 1 - 1e-12
    for _ in range(BISECTION_STEPS):
        middle = (supported + unsupported) / 2
        if needed_samples(middle) <= count:
            supported = middle
        else:
            unsupported = middle
    return int(-float(np.log10(1 - supported)) * 1e4) / 1e4


def curve_of_values(name: str, values_ns: NDArray[np.int64]) -> PercentileCurve | None:
    """Return the percentile curve of per-request values, or None if there are none.

    Each point is the value of a request.
    """
    values = np.sort(columns.drop_undefined(values_ns))
    count = len(values)
    if count == 0:
        return None

    def value_at(quantile: float) -> float:
        return float(values[quantile_index(count, quantile)])

    return _curve(name, count, value_at, largest_ns=float(values[-1]))


def curve_of_histogram(name: str, histogram: Histogram) -> PercentileCurve | None:
    """Return the percentile curve of a histogram, or None if it is empty.

    Values have the relative error of the buckets of the histogram.
    """
    count = histogram.count
    if count == 0:
        return None
    sums = np.cumsum(histogram.counts)

    def value_at(quantile: float) -> float:
        bucket = np.searchsorted(sums, quantile_index(count, quantile), side="right")
        return histogram.middle(int(bucket))

    return _curve(name, count, value_at, largest_ns=float(histogram.largest_ns))


def _curve(
    name: str, count: int, value_at: Callable[[float], float], largest_ns: float
) -> PercentileCurve:
    """Return a curve from a function that gives the value in ns at a quantile."""
    last_position = max(float(np.log10(count)), MEDIAN_NINES)
    below = np.linspace(0, MEDIAN_NINES, POINTS_BELOW_MEDIAN)
    above = np.linspace(MEDIAN_NINES, last_position, POINTS_ABOVE_MEDIAN)
    positions = np.unique(np.concatenate((below, above)))[:-1]
    values_ns = [value_at(1 - 10 ** -float(position)) for position in positions]
    return PercentileCurve(
        name=name,
        count=count,
        nines=round_all([*positions, last_position], 4),
        ms=round_all([value / NS_PER_MS for value in (*values_ns, largest_ns)], 4),
        carried=supported_nines(count),
    )


def round_to(value: float, digits: int) -> float:
    """Return a value rounded to so many significant digits, which is enough for a chart."""
    return float(f"{value:.{digits}g}")


def round_all(values: Sequence[float] | NDArray[np.float64], digits: int) -> tuple[float, ...]:
    """Return values rounded to so many significant digits."""
    return tuple(round_to(float(value), digits) for value in values)
