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

from loadgen.core.stats.students_t import t_quantile, welch_degrees_of_freedom, z_quantile

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
    """Return the mean of the values of one run, with an interval by the method of batch means.

    Values in order of time are correlated; the means of equal batches of them hardly are, so they
    are treated as independent (Law and Kelton, Simulation Modeling and Analysis). The lag-1
    correlation r of the batch means that remains widens the interval by sqrt((1 + r) / (1 - r)),
    with r at least 0. Values that do not fill a batch are left out at the start, where a transient
    would be. With fewer than two batches the interval is unbounded.

    Args:
        values: The values, in order of time.
        batches: The number of batches.
        level: The confidence level.
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
    """Return a one-sided upper tolerance limit of normally distributed values in order of time.

    At least the fraction `p` of all such values is below it, with this confidence. It is the mean
    plus k standard deviations, where k is the approximation of Natrella (1963, Experimental
    Statistics, section 2-2). Because neighbouring values are correlated, n is the number of
    independent values that would tell as much of the mean, and the variance, which correlated
    values underestimate, is increased. The limit is infinite with too few values.

    Args:
        values: The values in order of time.
        p: The fraction of values below the limit.
        level: The confidence that the limit is high enough.
    """
    data = np.asarray(values, float)
    count = len(data)
    if count < 3 or not np.isfinite(data).all():
        return math.inf
    inflation = variance_inflation(data)
    effective_count = count / inflation
    if effective_count <= 1:
        return math.inf
    k = _tolerance_factor(effective_count, p, level)
    variance = data.var() * count / (count - inflation)
    return float(data.mean() + k * math.sqrt(variance))


def _tolerance_factor(n: float, p: float, level: float) -> float:
    """Return k of Natrella (1963, section 2-2) for n independent values, with her names a and b.

    It is infinite if n is too small for the confidence.
    """
    z_level = z_quantile(level)
    z_p = NormalDist().inv_cdf(p)
    a = 1 - z_level**2 / (2 * (n - 1))
    if a <= 0:
        return math.inf
    b = z_p**2 - z_level**2 / n
    return (z_p + math.sqrt(max(z_p**2 - a * b, 0.0))) / a


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


def ratio_of_means(
    numerators: ArrayLike,
    denominators: ArrayLike,
    *,
    paired: bool = False,
    level: float = LEVEL,
) -> Interval:
    """Return the ratio of the means of two samples, with an interval by Fieller's theorem (1954).

    The interval is unbounded if the mean of the denominators may be 0, or if a sample has fewer
    than two values.

    Args:
        numerators: The sample whose mean is divided.
        denominators: The sample by whose mean it is divided.
        paired: Whether the values are pairs; else the samples are independent.
        level: The confidence level.

    Raises:
        ValueError: The samples are paired and differ in length.
    """
    x = np.asarray(numerators, float)
    y = np.asarray(denominators, float)
    count = min(len(x), len(y))
    if count < 2:
        has_value = count and y.mean()
        value = float(x.mean() / y.mean()) if has_value else math.nan
        return _symmetric(value, math.inf, count, "ratio", level)
    if paired and len(x) != len(y):
        raise ValueError(f"{len(x)} values cannot be paired with {len(y)}")
    x_mean = float(x.mean())
    y_mean = float(y.mean())
    x_variance = float(x.var(ddof=1)) / len(x)
    y_variance = float(y.var(ddof=1)) / len(y)
    covariance = 0.0
    if paired:
        covariance = float(((x - x_mean) * (y - y_mean)).sum()) / (count - 1) / count
        degrees_of_freedom = float(count - 1)
    else:
        # The variance of x_mean - r y_mean is x_variance + r^2 y_variance, here at the estimated r.
        r_squared = (x_mean / y_mean) ** 2 if y_mean else 1.0
        degrees_of_freedom = welch_degrees_of_freedom(
            x_variance, len(x) - 1, r_squared * y_variance, len(y) - 1
        )
    t = t_quantile(0.5 + level / 2, degrees_of_freedom)
    # The interval holds all r with
    #     (x_mean - r y_mean)^2 <= t^2 (x_variance - 2 r covariance + r^2 y_variance),
    # which is the quadratic inequality q2 r^2 - 2 q1 r + q0 <= 0.
    q2 = y_mean * y_mean - t * t * y_variance
    q1 = x_mean * y_mean - t * t * covariance
    q0 = x_mean * x_mean - t * t * x_variance
    discriminant = q1 * q1 - q2 * q0
    value = x_mean / y_mean if y_mean else math.nan
    if q2 <= 0 or discriminant < 0:
        return _symmetric(value, math.inf, count, "ratio", level)
    low = (q1 - math.sqrt(discriminant)) / q2
    high = (q1 + math.sqrt(discriminant)) / q2
    return Interval(value, low, high, level, count, "ratio")


def divide_intervals(numerator: Interval, denominator: Interval) -> Interval:
    """Return the ratio of two independent positive values, from the interval of each.

    This is MOVER, the method of variance estimates recovery, on logarithms (Zou and Donner 2008).
    It needs no symmetric intervals. The distance from the ratio to its lower end is the root of the
    sum of two squares: the distance of the numerator to its lower end, and that of the denominator
    to its upper end. The other distance is computed likewise.
    """
    value, low, high = numerator
    base, base_low, base_high = denominator
    if not (0 < base < math.inf and 0 < value < math.inf):
        return Interval(math.nan, 0.0, math.inf, numerator.level)
    log_value = _log(value)
    log_base = _log(base)
    distance_below = math.hypot(log_value - _log(low), _log(base_high) - log_base)
    distance_above = math.hypot(_log(high) - log_value, log_base - _log(base_low))
    log_ratio = math.log(value / base)
    ratio_low = math.exp(log_ratio - distance_below)
    is_bounded = distance_above < MAX_EXPONENT
    ratio_high = math.exp(log_ratio + distance_above) if is_bounded else math.inf
    return Interval(math.exp(log_ratio), ratio_low, ratio_high, numerator.level)


def _log(x: float) -> float:
    """Return the logarithm of a number, -inf for 0 and below."""
    return math.log(x) if x > 0 else -math.inf


# -- shares and rare states ------------------------------------------------------------------------


def wilson(p: float, n: float, level: float = LEVEL) -> tuple[float, float]:
    """Return the ends of Wilson's score interval (1927) of a share p of n independent trials."""
    if n <= 0:
        return 0.0, 1.0
    z = z_quantile(level)
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(middle - half_width, 0.0), min(middle + half_width, 1.0)


def next_interim_level(level: float) -> float:
    """Return the confidence of the next interim analysis of growing data, after one at `level`.

    Each analysis may spend half of the error that the one before it spent. So all analyses together
    err at most twice as often as the first one, however many there are (Bonferroni).
    `contracts.judge` explains why contracts need this.
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
    interval: Interval, value_of_runs: Sequence[float], *, on_log_scale: bool = False
) -> Interval:
    """Return an interval that is at least as wide as the differences between repeated runs suggest.

    Blocks of time within runs do not show what differs from run to run, such as a restart of the
    server. So the interval is extended to Student's interval of the values of the runs, placed
    around the value of `interval`. It is unchanged with one run, or if a run has no finite value.

    Args:
        interval: The interval by blocks of time within runs.
        value_of_runs: The value of each run.
        on_log_scale: Whether Student's interval is that of the logarithms, as for latencies.
    """
    value = interval.value
    data = np.asarray(value_of_runs, float)
    if len(data) < 2 or not np.isfinite(data).all() or not math.isfinite(value):
        return interval
    if not on_log_scale:
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
    """Return how many values at the start are a transient, by MSER (White 1997).

    MSER, the marginal standard error rule, cuts off the values at the start such that the standard
    error of the mean of the others is smallest. Only the first half is examined. Returns None if
    the best cut is the end of that half: then no steady state is in sight. Also returns None for
    fewer than four values.
    """
    data = np.asarray(values, float)
    count = len(data)
    if count < 4:
        return None
    # At index i, each array describes the values from i to the end.
    remaining_sums = np.cumsum(data[::-1])[::-1]
    remaining_squares = np.cumsum((data * data)[::-1])[::-1]
    remaining_counts = np.arange(count, 0, -1)
    squared_deviations = remaining_squares - remaining_sums * remaining_sums / remaining_counts
    half = count // 2
    squared_standard_errors = (squared_deviations / (remaining_counts**2))[: half + 1]
    cut = int(np.argmin(squared_standard_errors))
    return cut if cut < half else None


def extrapolate_growth(
    values: Sequence[float] | NDArray[np.float64], ahead: float, level: float = 0.99
) -> tuple[float, float]:
    """Return how far evenly spaced values will grow in the next steps, and an upper bound of it.

    A straight line is fitted by least squares. The standard error of its slope is widened for the
    correlation of neighbouring residuals, and the bound follows from Student's t. With fewer than
    MIN_VALUES_OF_TREND values the bound is infinite.

    Args:
        values: The values, in order of time.
        ahead: The number of steps after the last value.
        level: The one-sided confidence of the bound.
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
