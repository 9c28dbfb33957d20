"""Tests a short series for a trend and for a step, by the ranks of its values.

Pure. A test by ranks assumes no distribution, so it suits a series of a few percentiles. `trend`
has tests of means, which assume a straight line with noise.

Sources:
    Mann (1945) and Kendall (1975) for the test of a trend; Hamed and Rao (1998), "A modified
    Mann-Kendall trend test for autocorrelated data", Journal of Hydrology 204, for its variance;
    Pettitt (1979), "A non-parametric approach to the change-point problem", Applied Statistics 28.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
from msgspec import Struct

if TYPE_CHECKING:
    from numpy.typing import NDArray

TrendDirection = Literal["up", "down", "none"]

NORMAL_QUANTILE_95 = 1.96
"""The two-sided 95 % quantile of the normal distribution, as the tests of MLPerf round it."""

SIGNIFICANCE_LEVEL = 0.05
"""The probability of finding a trend or a step where there is none."""


class MonotonicTrend(Struct, frozen=True):
    """The result of a Mann-Kendall test.

    Attributes:
        direction: Whether the values rise or fall significantly, or neither.
        p_value: The probability of so clear an order when there is no trend.
    """

    direction: TrendDirection
    p_value: float


class ChangePoint(Struct, frozen=True):
    """The result of Pettitt's test.

    Attributes:
        index: The index of the first value after the step, 0 if all values are equal.
        p_value: The approximate probability of so large a step when there is none.
    """

    index: int
    p_value: float

    @property
    def is_significant(self) -> bool:
        """Whether a step is significant at SIGNIFICANCE_LEVEL."""
        return self.p_value < SIGNIFICANCE_LEVEL


def find_monotonic_trend(values: NDArray[np.float64]) -> MonotonicTrend:
    """Test whether a series of at least 3 values rises or falls.

    The statistic S of Mann and Kendall is the number of pairs that rise minus the number of pairs
    that fall. Its variance is corrected for autocorrelation by the method of Hamed and Rao, because
    neighbouring values that resemble each other would otherwise look like a trend.
    """
    count = len(values)
    earlier, later = np.triu_indices(count, k=1)
    score = int(np.sign(values[later] - values[earlier]).sum())
    variance = _mann_kendall_variance(values) * _hamed_rao_correction(values)
    if score == 0 or variance <= 0:
        return MonotonicTrend("none", 1.0)

    # The continuity correction moves S, which is an integer, by 1 towards 0.
    z_score = (abs(score) - 1) / math.sqrt(variance)
    p_value = 2.0 * (1.0 - _normal_cdf(z_score))
    if p_value >= SIGNIFICANCE_LEVEL:
        return MonotonicTrend("none", p_value)
    return MonotonicTrend("up" if score > 0 else "down", p_value)


def _mann_kendall_variance(values: NDArray[np.float64]) -> float:
    """Return the variance of Mann and Kendall's S without a trend, with the correction for ties."""
    count = len(values)
    _, tie_sizes = np.unique(values, return_counts=True)
    tie_term = int((tie_sizes * (tie_sizes - 1) * (2 * tie_sizes + 5)).sum())
    return (count * (count - 1) * (2 * count + 5) - tie_term) / 18.0


def _hamed_rao_correction(values: NDArray[np.float64]) -> float:
    """Return the factor by which autocorrelation widens the variance of S.

    The factor is 1 + 2 / (n (n-1) (n-2)) * sum over lags k of (n-k) (n-k-1) (n-k-2) r(k). r(k) is
    the autocorrelation of the ranks, and only lags count whose r(k) is significant. Strong negative
    autocorrelation can make the factor negative, which has no meaning; the factor is then 1.
    """
    count = len(values)
    correlations = _autocorrelate_ranks(values)
    is_significant = np.abs(correlations) > NORMAL_QUANTILE_95 / math.sqrt(count)
    lags = np.arange(1, count, dtype=np.float64)
    weights = (count - lags) * (count - lags - 1) * (count - lags - 2)
    weighted_sum = float((weights * correlations)[is_significant].sum())

    correction = 1.0 + 2.0 / (count * (count - 1) * (count - 2)) * weighted_sum
    return correction if correction > 0 else 1.0


def _autocorrelate_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the autocorrelations of the ranks at lags 1 to n - 1.

    Equal values get consecutive ranks in their order of time.
    """
    count = len(values)
    ranks = np.empty(count)
    ranks[np.argsort(values, kind="stable")] = np.arange(1, count + 1)
    deviations = ranks - ranks.mean()
    products = [float((deviations[lag:] * deviations[:-lag]).sum()) for lag in range(1, count)]
    return np.array(products) / float((deviations * deviations).sum())


def find_change_point(values: NDArray[np.float64]) -> ChangePoint:
    """Return the most likely single step of a series, and how significant it is.

    Pettitt's statistic K is the largest |U(t)| over the lengths t of the first part, where U(t) is
    2 * (sum of the first t ranks) - t * (n + 1). Its p-value is about 2 exp(-6 K² / (n³ + n²)).
    """
    count = len(values)
    lengths = np.arange(1, count)
    statistics = np.abs(2.0 * np.cumsum(_average_ranks(values))[:-1] - lengths * (count + 1))
    largest = float(statistics.max(initial=0.0))
    if largest == 0:
        return ChangePoint(0, 1.0)

    p_value = 2.0 * math.exp(-6.0 * largest * largest / (count**3 + count**2))
    return ChangePoint(int(np.argmax(statistics)) + 1, min(1.0, p_value))


def _average_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 1 on. Equal values share the mean of their ranks."""
    _, group_index, group_sizes = np.unique(values, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(group_sizes)
    mean_ranks: NDArray[np.float64] = last_ranks - (group_sizes - 1) / 2.0
    return mean_ranks[group_index]


def relative_change(values: NDArray[np.float64]) -> float:
    """Return the change along a least-squares line from first to last value, over the median.

    For example, 0.1 means that the line rises by 10 % of the median. Any change is infinite if the
    median is 0.
    """
    count = len(values)
    times = np.arange(count) - (count - 1) / 2.0
    slope = float((times * (values - values.mean())).sum()) / float((times * times).sum())
    change = slope * (count - 1)
    median = float(np.median(values))
    if median == 0:
        return math.copysign(math.inf, change) if change else 0.0
    return change / median


def _normal_cdf(z_score: float) -> float:
    """Return the standard normal distribution function."""
    return 0.5 * (1.0 + math.erf(z_score / math.sqrt(2.0)))
