"""Percentile curves: the value at each percentile, and up to which percentile the sample supports it. Pure numpy.

Nothing is drawn here: `charts.py` describes the chart, in which the unsupported part is dashed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics import columns
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import needed_samples, quantile_index


class PercentileCurve(msgspec.Struct, frozen=True, kw_only=True):
    """One percentile curve. `nines` are -log10(1 - p): 1 is p90, 2 is p99; the last point is the largest sample.

    `carried`, also in nines, is the highest percentile that `count` samples support (`stats.quantiles.support`). Beyond
    it, the curve is only an anecdote.
    """

    name: str
    count: int
    nines: tuple[float, ...]
    ms: tuple[float, ...]
    carried: float


def carried(count: int) -> float:
    """The largest p with support(p) <= count, in nines: -log10(1 - p), rounded down; 0 for fewer than support(0.01)."""
    if count < needed_samples(0.01):
        return 0.0
    low, high = 0.01, 1 - 1e-12
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if needed_samples(middle) <= count else (low, middle)
    return int(-float(np.log10(1 - low)) * 1e4) / 1e4  # rounded down


def curve(name: str, values_ns: NDArray[np.int64]) -> PercentileCurve | None:
    """The percentile curve of per-request values in ns. Each point is a value of the sample; None without samples."""
    values = np.sort(columns.drop_undefined(values_ns))
    if len(values) == 0:
        return None
    return _curve(
        name,
        len(values),
        lambda p: float(values[quantile_index(len(values), p)]),
        float(values[-1]),
    )


def curve_of_histogram(name: str, histogram: Histogram) -> PercentileCurve | None:
    """The same from a histogram, with the error bound of its buckets; None when it is empty."""
    count = histogram.count
    if count == 0:
        return None
    sums = np.cumsum(histogram.counts)

    def value_at(p: float) -> float:
        return histogram.middle(int(np.searchsorted(sums, quantile_index(count, p), side="right")))

    return _curve(name, count, value_at, float(histogram.largest_ns))


def _curve(
    name: str, count: int, value_at: Callable[[float], float], largest: float
) -> PercentileCurve:
    last_place = max(float(np.log10(count)), 0.3)
    places = np.unique(np.concatenate((np.linspace(0, 0.3, 12), np.linspace(0.3, last_place, 90))))[
        :-1
    ]
    values = [value_at(1 - 10 ** -float(place)) for place in places]
    return PercentileCurve(
        name=name,
        count=count,
        nines=rounded([*places, last_place], 4),
        ms=rounded([value / 1e6 for value in (*values, largest)], 4),
        carried=carried(count),
    )


def round_to(value: float, digits: int) -> float:
    """The value rounded to `digits` significant digits, which is enough for a chart."""
    return float(f"{value:.{digits}g}")


def rounded(values: Sequence[float] | NDArray[np.float64], digits: int) -> tuple[float, ...]:
    return tuple(round_to(float(value), digits) for value in values)
