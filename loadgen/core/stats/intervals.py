"""Confidence intervals: replications, batch means, shares and ratios; also the end of a start-up.

Pure. The values within a run are correlated, because requests share a queue and a batch. So nothing
here treats them as independent: a run is cut into batches that are long compared with the
correlation, or counts as one value among replications. An interval that the data cannot support is
(-inf, inf), never a guess.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from loadgen.core.stats.students_t import t_quantile, welch_freedom, z_quantile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
"""The confidence level of an interval for which none is given."""

BATCHES = 20
"""With more batches, they are short against the correlation; with fewer, Student's t is large
(Schmeiser 1982)."""

MAX_CORRELATION = 0.95
"""A few values cannot show a larger correlation of neighbours."""

MIN_VALUES_OF_TREND = 4
"""Fewer values leave no residual to estimate the error of a straight line from."""

MAX_EXPONENT = 700.0
"""The exponential of a larger number is treated as infinite."""


class Interval(msgspec.Struct, frozen=True):
    """A value with a confidence interval. It unpacks as value, low, high.

    Attributes:
        value: The estimate.
        low: The lower end; -inf if the sample has no bound.
        high: The upper end; inf if the sample has no bound.
        level: The confidence that the true value lies between `low` and `high`.
        count: The number of independent values (batches or runs) behind it.
        method: How it was computed.
    """

    value: float
    low: float
    high: float
    level: float = LEVEL
    count: int = 0
    method: str = ""

    def __iter__(self) -> Iterator[float]:
        return iter((self.value, self.low, self.high))

    def map(self, function: Callable[[float], float]) -> Interval:
        """Return the interval with a rising function applied to the value and both ends."""
        return replace(
            self, value=function(self.value), low=function(self.low), high=function(self.high)
        )

    @property
    def half_width(self) -> float:
        """Half of the distance between the ends."""
        return (self.high - self.low) / 2

    @property
    def standard_error(self) -> float:
        """Half the width divided by Student's quantile at count - 1 degrees of freedom."""
        return self.half_width / t_quantile(0.5 + self.level / 2, self.count - 1)


def _symmetric(value: float, half_width: float, count: int, method: str, level: float) -> Interval:
    """Return the interval with as much on either side of a value.

    An infinite half width is no bound, also around a value that is not known.
    """
    if half_width == math.inf:
        return Interval(value, -math.inf, math.inf, level, count, method)
    return Interval(value, value - half_width, value + half_width, level, count, method)


# -- means -----------------------------------------------------------------------------------------


def replications(values: ArrayLike, level: float = LEVEL) -> Interval:
    """Return the mean over independent runs, with an interval by Student's t.

    With one run the interval is unbounded.
    """
    data = np.asarray(values, float)
    count = len(data)
    if count == 0:
        return _symmetric(math.nan, math.inf, count, "replications", level)
    mean = float(data.mean())
    if count < 2:
        return _symmetric(mean, math.inf, count, "replications", level)
    standard_deviation = float(data.std(ddof=1))
    half_width = t_quantile(0.5 + level / 2, count - 1) * standard_deviation / math.sqrt(count)
    return _symmetric(mean, half_width, count, "replications", level)


def batch_means(values: ArrayLike, *, batches: int = BATCHES, level: float = LEVEL) -> Interval:
    """Return the mean of the values of one run, with an interval from the means of equal batches.

    The values are in the order of time and correlated; the batch means hardly are. The correlation
    r of neighbouring batches that remains widens the interval by sqrt((1 + r) / (1 - r)), with r at
    least 0. Values that do not fill a batch are left out at the start, where a transient would be.
    With fewer than two batches the interval is unbounded.
    """
    data = np.asarray(values, float)
    count = min(batches, len(data))
    if count < 2:
        mean = float(data.mean()) if len(data) else math.nan
        return _symmetric(mean, math.inf, count, "batch means", level)
    size = len(data) // count
    means = data[len(data) - size * count :].reshape(count, size).mean(axis=1)
    of_independent_means = replications(means, level)
    half_width = of_independent_means.half_width * math.sqrt(variance_inflation(means))
    return _symmetric(of_independent_means.value, half_width, count, "batch means", level)


def upper_tolerance_limit(values: ArrayLike, p: float, level: float = LEVEL) -> float:
    """Return an upper limit for the p quantile of normally distributed values.

    The values are in order of time. This is a tolerance limit (Natrella 1963, section 2-2). Its n
    is reduced for the correlation of neighbours, and the variance is increased by what correlated
    values hide of it. It is infinite with too few values.
    """
    data = np.asarray(values, float)
    count = len(data)
    if count < 3 or not np.isfinite(data).all():
        return math.inf
    inflation = variance_inflation(data)
    effective_count = count / inflation  # so many independent values tell as much of the mean
    if effective_count <= 1:
        return math.inf
    z_level = z_quantile(level)
    z_p = NormalDist().inv_cdf(p)
    a = 1 - z_level**2 / (2 * (effective_count - 1))
    if a <= 0:
        return math.inf
    b = z_p**2 - z_level**2 / effective_count
    factor = (z_p + math.sqrt(max(z_p**2 - a * b, 0.0))) / a
    variance = data.var() * count / (count - inflation)
    return float(data.mean() + factor * math.sqrt(variance))


def variance_inflation(values: NDArray[np.float64]) -> float:
    """Return the factor by which the correlation of neighbours increases the variance of a mean.

    It is (1 + r) / (1 - r) for the correlation r, and at least 1.
    """
    r = neighbour_correlation(values)
    return (1 + r) / (1 - r) if r > 0 else 1.0


def neighbour_correlation(values: NDArray[np.float64]) -> float:
    """Return the correlation of each value with its successor, at most MAX_CORRELATION.

    It is 0 if all values are equal, and for fewer than three values.
    """
    centred = values - values.mean()
    sum_of_squares = float((centred * centred).sum())
    if sum_of_squares <= 0 or len(values) < 3:
        return 0.0
    sum_of_products = float((centred[1:] * centred[:-1]).sum())
    return min(MAX_CORRELATION, sum_of_products / sum_of_squares)


# -- ratios ----------------------------------------------------------------------------------------


def ratio(
    above: ArrayLike, below: ArrayLike, *, paired: bool = False, level: float = LEVEL
) -> Interval:
    """Return mean(above) / mean(below) of two samples, with an interval by Fieller's theorem.

    The interval is unbounded if the mean of `below` may be zero.

    Args:
        above: The sample whose mean is the numerator.
        below: The sample whose mean is the denominator.
        paired: Whether the values are pairs; else the samples are independent.
        level: The confidence.

    Raises ValueError for pairs of unequal number.
    """
    numerators = np.asarray(above, float)
    denominators = np.asarray(below, float)
    n = len(numerators)
    m = len(denominators)
    if n < 2 or m < 2:
        has_value = n and m and denominators.mean()
        value = float(numerators.mean() / denominators.mean()) if has_value else math.nan
        return _symmetric(value, math.inf, min(n, m), "ratio", level)
    if paired and n != m:
        raise ValueError(f"{n} values cannot be paired with {m}")
    a = float(numerators.mean())
    b = float(denominators.mean())
    a_var = float(numerators.var(ddof=1)) / n
    b_var = float(denominators.var(ddof=1)) / m
    covariance = 0.0
    if paired:
        covariance = float(((numerators - a) * (denominators - b)).sum()) / (n - 1) / n
        degrees_of_freedom = float(n - 1)
    else:
        # The variance of a - x b at the estimated ratio x is a_var + x^2 b_var.
        scale = (a / b) ** 2 if b else 1.0
        degrees_of_freedom = welch_freedom(a_var, n - 1, scale * b_var, m - 1)
    t = t_quantile(0.5 + level / 2, degrees_of_freedom)
    # The interval holds all x with (a - x b)^2 <= t^2 (a_var - 2 x covariance + x^2 b_var), which
    # is the quadratic inequality q2 x^2 - 2 q1 x + q0 <= 0.
    q2 = b * b - t * t * b_var
    q1 = a * b - t * t * covariance
    q0 = a * a - t * t * a_var
    discriminant = q1 * q1 - q2 * q0
    value = a / b if b else math.nan
    if q2 <= 0 or discriminant < 0:
        return _symmetric(value, math.inf, min(n, m), "ratio", level)
    low = (q1 - math.sqrt(discriminant)) / q2
    high = (q1 + math.sqrt(discriminant)) / q2
    return Interval(value, low, high, level, min(n, m), "ratio")


def ratio_of_intervals(over: Interval, under: Interval) -> Interval:
    """Return `over / under` of two independent positive values from the interval of each.

    The intervals need not be symmetric. This is MOVER on the logarithms (Zou and Donner 2008): the
    distance from the estimate to each end is the root of the sum of the squared distances of both
    values, where the ratio is low if the denominator is high.
    """
    value, low, high = over
    base, base_low, base_high = under
    if not (0 < base < math.inf and 0 < value < math.inf):
        return Interval(math.nan, 0.0, math.inf, over.level)
    log_ratio = math.log(value / base)
    distance_below = math.hypot(_log(value) - _log(low), _log(base_high) - _log(base))
    distance_above = math.hypot(_log(high) - _log(value), _log(base) - _log(base_low))
    ratio_low = math.exp(log_ratio - distance_below)
    is_bounded = distance_above < MAX_EXPONENT
    ratio_high = math.exp(log_ratio + distance_above) if is_bounded else math.inf
    return Interval(math.exp(log_ratio), ratio_low, ratio_high, over.level)


def _log(x: float) -> float:
    """Return the logarithm of a number, -inf for 0 and below."""
    return math.log(x) if x > 0 else -math.inf


# -- shares and rare states ------------------------------------------------------------------------


def wilson(p: float, n: float, level: float = LEVEL) -> tuple[float, float]:
    """Return the ends of the interval of a share p of n independent trials (Wilson 1927)."""
    if n <= 0:
        return 0.0, 1.0
    z = z_quantile(level)
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(middle - half_width, 0.0), min(middle + half_width, 1.0)


def next_interim_level(level: float) -> float:
    """Return the confidence of the next interim analysis of growing data, after one at `level`.

    See contracts.judge.
    """
    return 1 - (1 - level) / 2


def observations_to_see(p: float, level: float = LEVEL) -> int:
    """Return how many independent observations would see a state with probability 1 - p.

    All of n observations miss the state with probability p^n. That is not to exceed the error which
    the level leaves to one side of a two-sided interval.
    """
    return math.ceil(math.log((1 - level) / 2) / math.log(p))


def longest_recurrence_s(length_s: float, level: float = LEVEL) -> float:
    """Return the longest mean time between occurrences of an event that `length_s` would have met.

    A random event that occurs every so many seconds on average stays out of a load with probability
    exp(-length / mean). The confidence is that of one side of a two-sided interval of this level.
    """
    return length_s / math.log(2 / (1 - level))


def length_to_meet_s(recurrence_s: float, level: float = LEVEL) -> float:
    """Return the length of load that meets an event that occurs every `recurrence_s` on average.

    It is the inverse of `longest_recurrence_s`.
    """
    return recurrence_s * math.log(2 / (1 - level))


def widen_by_runs(
    interval: Interval, value_of_runs: Sequence[float], *, log: bool = False
) -> Interval:
    """Return an interval that is at least as wide as that of the runs among each other.

    The interval of the runs is that of Student's t around the value of `interval`. The interval is
    unchanged with one run, or if a run has no finite value.

    Args:
        interval: The interval by the times within runs.
        value_of_runs: The value of each run.
        log: Whether to compute the interval of the runs on logarithms.
    """
    value = interval.value
    data = np.asarray(value_of_runs, float)
    if len(data) < 2 or not np.isfinite(data).all() or not math.isfinite(value):
        return interval
    if not log:
        half_width = replications(data, interval.level).half_width
        low = value - half_width
        high = value + half_width
    elif min(*data, value) <= 0:
        return interval
    else:
        half_width = replications(np.log(data), interval.level).half_width
        low = value * math.exp(-half_width)
        high = value * math.exp(min(half_width, MAX_EXPONENT))
    return replace(interval, low=min(interval.low, low), high=max(interval.high, high))


# -- the start of a run, and its future ------------------------------------------------------------


def startup_length(values: ArrayLike) -> int | None:
    """Return how many first values belong to the start-up, by MSER (White 1997).

    That is the cut that minimizes the standard error of the mean of the rest. Only the first half
    is examined. Returns None if the best cut is the end of that half: then the values have not
    settled, and nothing can be said about a steady state.
    """
    data = np.asarray(values, float)
    count = len(data)
    if count < 4:
        return None
    # The entries at i are of the values from i on: their sum, sum of squares and number.
    sums = np.cumsum(data[::-1])[::-1]
    squares = np.cumsum((data * data)[::-1])[::-1]
    remaining = np.arange(count, 0, -1)
    half = count // 2
    squared_deviations = (squares - sums * sums / remaining)[: half + 1]
    squared_standard_errors = squared_deviations / (remaining[: half + 1] ** 2)
    cut = int(np.argmin(squared_standard_errors))
    return cut if cut < half else None


def extrapolate_growth(
    values: Sequence[float] | NDArray[np.float64], ahead: float, level: float = 0.99
) -> tuple[float, float]:
    """Return the growth of evenly spaced values within `ahead` steps, and its upper bound.

    A straight line is fitted by least squares, and its error is widened for the correlation of the
    residuals. With fewer than four values the bound is infinite.
    """
    data = np.asarray(values, float)
    count = len(data)
    if count < MIN_VALUES_OF_TREND:
        return 0.0, math.inf
    times = np.arange(count) - (count - 1) / 2  # their mean is 0
    time_squares = float((times * times).sum())
    slope = float((times * data).sum()) / time_squares
    residuals = data - data.mean() - slope * times
    degrees_of_freedom = count - 2
    slope_variance = float((residuals * residuals).sum()) / degrees_of_freedom / time_squares
    standard_error = math.sqrt(slope_variance * variance_inflation(residuals))
    highest_slope = slope + t_quantile(level, degrees_of_freedom) * standard_error
    return slope * ahead, highest_slope * ahead
