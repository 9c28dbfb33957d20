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

    This is the test of Mann and Kendall, with the correction of Hamed and Rao (1998) for values
    that are correlated with their neighbours.
    """
    score = _mann_kendall_score(values)
    if score == 0:
        return MonotonicTrend("none", 1.0)

    # The score is not 0, so the values differ, and their variance is above 0.
    variance = _mann_kendall_variance(values) * _hamed_rao_correction(values)

    # The continuity correction moves the score, which is an integer, by 1 towards 0.
    z_score = (abs(score) - 1) / math.sqrt(variance)

    # The series may rise or fall, so both tails of the normal distribution count.
    probability_of_one_tail = 1.0 - _normal_cdf(z_score)
    p_value = 2.0 * probability_of_one_tail
    if p_value >= SIGNIFICANCE_LEVEL:
        return MonotonicTrend("none", p_value)

    return MonotonicTrend("up" if score > 0 else "down", p_value)


def _mann_kendall_score(values: NDArray[np.float64]) -> int:
    """Return Mann and Kendall's S: the pairs of values that rise minus the pairs that fall.

    For the values 1, 3, 2, the pairs (1, 3) and (1, 2) rise, and (3, 2) falls, so S is 1.
    """
    # The upper triangle of a table of all pairs has each pair once, with the earlier value first.
    earlier_index, later_index = np.triu_indices(len(values), k=1)
    changes = values[later_index] - values[earlier_index]
    return int(np.sign(changes).sum())


def _mann_kendall_variance(values: NDArray[np.float64]) -> float:
    """Return the variance of Mann and Kendall's S without a trend, with the correction for ties.

    For n values, and groups of t equal values, Kendall (1975) gives

        (n (n - 1) (2 n + 5) - sum of t (t - 1) (2 t + 5)) / 18.
    """
    count = len(values)
    _, tie_sizes = np.unique(values, return_counts=True)
    tie_term = int((tie_sizes * (tie_sizes - 1) * (2 * tie_sizes + 5)).sum())
    return (count * (count - 1) * (2 * count + 5) - tie_term) / 18.0


def _hamed_rao_correction(values: NDArray[np.float64]) -> float:
    """Return the factor by which autocorrelation increases the variance of a Mann-Kendall score.

    For n values, the factor of Hamed and Rao (1998) is

        1 + 2 / (n (n - 1) (n - 2)) * sum of (weight of a lag * autocorrelation at the lag),

    where only the significant autocorrelations of the ranks count.
    """
    n = len(values)
    correlation_at_lag = _autocorrelate_ranks(values)
    significance_limit = NORMAL_QUANTILE_95 / math.sqrt(n)
    is_significant = np.abs(correlation_at_lag) > significance_limit

    weighted_correlations = _hamed_rao_weights(n) * correlation_at_lag
    weighted_sum = float(weighted_correlations[is_significant].sum())

    factor = 1.0 + 2.0 / (n * (n - 1) * (n - 2)) * weighted_sum
    return factor if factor > 0 else 1.0  # a negative variance has no meaning


def _hamed_rao_weights(count: int) -> NDArray[np.float64]:
    """Return the weight of each lag from 1 to n - 1: (n - lag) (n - lag - 1) (n - lag - 2)."""
    distances_to_end = count - np.arange(1, count, dtype=np.float64)
    return distances_to_end * (distances_to_end - 1) * (distances_to_end - 2)


def _autocorrelate_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the autocorrelations of the ranks of values at the lags 1 to n - 1.

    The autocorrelation at a lag is the sum of the products of each deviation from the mean rank
    with that `lag` values later, divided by the sum of the squared deviations. Equal values get
    consecutive ranks in their order of time.
    """
    count = len(values)
    indexes_by_value = np.argsort(values, kind="stable")
    ranks = np.empty(count)
    ranks[indexes_by_value] = np.arange(1, count + 1)

    deviations = ranks - ranks.mean()
    sum_of_squares = float((deviations * deviations).sum())

    sums_of_products = []
    for lag in range(1, count):
        earlier = deviations[:-lag]
        later = deviations[lag:]
        sums_of_products.append(float((later * earlier).sum()))

    return np.array(sums_of_products) / sum_of_squares


def find_change_point(values: NDArray[np.float64]) -> ChangePoint:
    """Return the most likely single step of a series by Pettitt's test, with its p-value.

    The step divides the series into the two parts whose ranks differ most. If K is the largest
    absolute value of Pettitt's U for n values, the p-value is about 2 exp(-6 K^2 / (n^3 + n^2)).
    """
    absolute_u = np.abs(_pettitt_statistics(values))
    k = float(absolute_u.max(initial=0.0))
    if k == 0:
        return ChangePoint(index=0, p_value=1.0)

    n = len(values)
    p_value = 2.0 * math.exp(-6.0 * k * k / (n**3 + n**2))

    last_index_before_step = int(np.argmax(absolute_u))
    return ChangePoint(index=last_index_before_step + 1, p_value=min(1.0, p_value))


def _pettitt_statistics(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return Pettitt's statistic U for each place at which a series can be divided in two.

    If the first t of n values are the first part,

        U = 2 * (sum of the ranks of the first part) - t * (n + 1),

    which is 0 if both parts have the same mean rank. The values 5, 5, 9 have the ranks 1.5, 1.5, 3.
    So U is -1 for the part 5, and -2 for the part 5, 5.
    """
    # The first part has 1 to n - 1 values, so that the second part is not empty.
    count = len(values)
    first_lengths = np.arange(1, count)
    ranks = _average_ranks(values)
    first_rank_sums = np.cumsum(ranks[:-1])

    statistics: NDArray[np.float64] = 2.0 * first_rank_sums - first_lengths * (count + 1)
    return statistics


def _average_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ranks from 1 on. Equal values share the mean of their ranks."""
    _, group_index, group_sizes = np.unique(values, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(group_sizes)
    mean_ranks: NDArray[np.float64] = last_ranks - (group_sizes - 1) / 2.0
    return mean_ranks[group_index]


def relative_linear_growth(values: NDArray[np.float64]) -> float:
    """Return by which fraction of the median the least-squares line through the values rises.

    The rise is that from the first value to the last one. The values 10, 11, 12 rise by 2, and
    their median is 11, so the result is 2 / 11. If the median is 0, the result is infinite with the
    sign of the rise, and 0 without a rise.
    """
    count = len(values)
    times = np.arange(count) - (count - 1) / 2.0  # with a mean of 0
    deviations = values - values.mean()
    slope = float((times * deviations).sum()) / float((times * times).sum())
    rise = slope * (count - 1)

    median = float(np.median(values))
    if median != 0:
        return rise / median
    return math.copysign(math.inf, rise) if rise else 0.0


def _normal_cdf(z_score: float) -> float:
    """Return the standard normal distribution function."""
    return 0.5 * (1.0 + math.erf(z_score / math.sqrt(2.0)))
