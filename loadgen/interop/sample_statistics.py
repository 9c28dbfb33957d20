"""Samples of a latency, and their statistics as other tools compute them.

Percentiles of values without weights are interpolated as numpy does it, because all these tools do
so. A sample can have millions of values, so those that are derived from timestamps are computed
when they are needed and not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import as_selection
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import milliseconds

PERCENTILES = {
    "p1": 0.01,
    "p5": 0.05,
    "p10": 0.1,
    "p25": 0.25,
    "p50": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p99_9": 0.999,
}
"""The percentiles that other tools report, by name, as fractions."""


class WeightedValues(NamedTuple):
    """Values in ns, of which each counts as many times as its weight.

    Attributes:
        values: The values. NaN stands for a request without this latency.
        weights: The weights, or None if each value counts once.
    """

    values: NDArray[np.float64]
    weights: NDArray[np.int64] | None = None

    def statistics(self) -> dict[str, float]:
        """Return count and, in ms, mean, std, min, max and all PERCENTILES; {} without values."""
        values, weights = self._without_unknown()
        if len(values) == 0:
            return {}

        mean = np.average(values, weights=weights)
        variance = np.average((values - mean) ** 2, weights=weights)
        statistics_ns = {
            "mean": mean,
            "std": np.sqrt(variance),
            "min": values.min(),
            "max": values.max(),
            **_percentiles_ns(values, weights, tuple(PERCENTILES)),
        }
        count = len(values) if weights is None else int(weights.sum())

        return {"count": count} | _in_milliseconds(statistics_ns)

    def percentiles(self, names: Sequence[str]) -> dict[str, float]:
        """Return some of the PERCENTILES in ms by name; {} without values."""
        values, weights = self._without_unknown()
        if len(values) == 0:
            return {}
        return _in_milliseconds(_percentiles_ns(values, weights, names))

    def _without_unknown(self) -> WeightedValues:
        """Return the values that are known and count at least once."""
        is_known = ~np.isnan(self.values)
        if self.weights is None:
            return WeightedValues(self.values[as_selection(is_known)])
        selection = as_selection(is_known & (self.weights > 0))
        return WeightedValues(self.values[selection], self.weights[selection])


@dataclass(frozen=True, eq=False)
class DerivedSample:
    """A sample that is computed whenever it is used, to save memory.

    Attributes:
        compute: Returns the values.
    """

    compute: Callable[[], WeightedValues]

    @property
    def values(self) -> NDArray[np.float64]:
        """The values in ns, NaN for requests without this latency."""
        return self.compute().values

    def statistics(self) -> dict[str, float]:
        """Return the statistics in ms. See `WeightedValues.statistics`."""
        return self.compute().statistics()

    def percentiles(self, names: Sequence[str]) -> dict[str, float]:
        """Return some percentiles in ms. See `WeightedValues.percentiles`."""
        return self.compute().percentiles(names)


@dataclass(frozen=True, eq=False)
class PooledGaps:
    """The times between output events of all requests together, as a histogram."""

    histogram: Histogram

    def statistics(self) -> dict[str, float]:
        """Return the count of gaps and, in ms, their mean, std, min, max and all PERCENTILES.

        Return {} without gaps. Mean, minimum and maximum are exact. Percentiles and the standard
        deviation take the middle of a bucket of the histogram for each gap in it.
        """
        gap_count = self.histogram.count
        if gap_count == 0:
            return {}

        mean_ns = self.histogram.total_ns / gap_count
        percentiles_ns = {name: self.histogram.quantile(p) for name, p in PERCENTILES.items()}
        statistics_ns = {
            "mean": mean_ns,
            "std": self._standard_deviation_ns(mean_ns),
            "min": self.histogram.smallest_ns,
            "max": self.histogram.largest_ns,
            **percentiles_ns,
        }

        return {"count": gap_count} | _in_milliseconds(statistics_ns)

    def _standard_deviation_ns(self, mean_ns: float) -> float:
        """Return the standard deviation, computed from the middles of the buckets with gaps."""
        buckets = np.flatnonzero(self.histogram.counts)
        middles_ns = np.array([self.histogram.bucket_middle(int(bucket)) for bucket in buckets])
        variance = np.average((middles_ns - mean_ns) ** 2, weights=self.histogram.counts[buckets])
        return float(np.sqrt(variance))

    def percentiles(self, names: Sequence[str]) -> dict[str, float]:
        """Return some of the PERCENTILES in ms by name; {} without gaps."""
        if self.histogram.count == 0:
            return {}
        return _in_milliseconds(
            {name: self.histogram.quantile(PERCENTILES[name]) for name in names}
        )


def interpolated_percentiles(
    ordered: NDArray[np.float64], percents: Sequence[float]
) -> NDArray[np.float64]:
    """Return percentiles of sorted values, equal to those of `numpy.percentile` in every bit.

    `numpy.percentile` partitions the values again, although they are sorted.

    Args:
        ordered: The values in ascending order.
        percents: The percentiles, from 0 to 100.
    """
    last_index = len(ordered) - 1
    positions = last_index * (np.array(percents) / 100)
    indices = np.floor(positions).astype(np.int64)
    fractions = positions - indices
    lower = ordered[indices]
    upper = ordered[np.minimum(indices + 1, last_index)]

    # numpy interpolates from the nearer end, which has the smaller rounding error.
    from_lower = lower + (upper - lower) * fractions
    from_upper = upper - (upper - lower) * (1 - fractions)
    return np.where(fractions >= 0.5, from_upper, from_lower)


def _percentiles_ns(
    values_ns: NDArray[np.float64], weights: NDArray[np.int64] | None, names: Sequence[str]
) -> dict[str, float]:
    """Return percentiles of values in ns, by their names in PERCENTILES, such as "p90".

    Percentiles of values without weights (None) are interpolated, as numpy does it. Percentiles of
    weighted values are elements of the sample: the p90 is the first value, in ascending order, at
    which the cumulative weight reaches 90 % of the total weight.
    """
    fractions = [PERCENTILES[name] for name in names]
    if weights is None:
        percents = [100 * fraction for fraction in fractions]
        percentiles_ns = interpolated_percentiles(np.sort(values_ns), percents).tolist()
    else:
        percentiles_ns = _weighted_percentiles(values_ns, weights, fractions)
    return dict(zip(names, percentiles_ns, strict=True))


def _weighted_percentiles(
    values: NDArray[np.float64], weights: NDArray[np.int64], fractions: Sequence[float]
) -> list[float]:
    """Return the first value up to which the weights reach each fraction of their sum.

    For example, the values 10, 20, 30 with the weights 1, 1, 2 have the cumulative weights 1, 2, 4.
    The fraction 0.75 needs a weight of 3, which is reached at the value 30.
    """
    order = np.argsort(values).astype(np.int32)  # int32 needs half the memory of int64
    cumulative_weights = np.cumsum(weights[order])
    total_weight = int(cumulative_weights[-1])
    indices = np.searchsorted(cumulative_weights, [total_weight * f for f in fractions])
    return [float(value) for value in values[order[indices]]]


def _in_milliseconds(values_ns: dict[str, float]) -> dict[str, float]:
    return {name: milliseconds(float(value_ns)) for name, value_ns in values_ns.items()}
