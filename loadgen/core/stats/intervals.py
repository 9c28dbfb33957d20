"""Confidence intervals: replications, batch means, shares and ratios; also the end of a start-up.

Pure. The values within a run are correlated, because requests share a queue and a batch. So nothing
here treats them as independent: a run is cut into batches that are long compared with the
correlation, or counts as one value among replications. An interval that the data cannot support is
(-inf, inf), never a guess.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

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
"""`math.exp` of a number above 709 raises OverflowError, so larger exponents are cut off here."""


class IntervalEnds(NamedTuple):
    """The ends of a confidence interval."""

    low: float
    high: float


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


def _symmetric_interval(
    value: float, half_width: float, *, count: int, method: str, level: float
) -> Interval:
    """Return the interval that reaches as far below a value as above it.

    Args:
        value: The value in the middle.
        half_width: The distance to each end. If it is infinite, the interval has no bounds.
        count: The number of independent values behind the interval.
        method: How the interval was computed.
        level: The confidence level.
    """
    if half_width == math.inf:  # also if the value is NaN, which is not known
        return Interval(value, -math.inf, math.inf, level, count, method)
    return Interval(value, value - half_width, value + half_width, level, count, method)


# -- means -----------------------------------------------------------------------------------------


def mean_of_runs(values: ArrayLike, level: float = LEVEL) -> Interval:
    """Return the mean of the values of independent runs, with an interval by Student's t.

    The interval is unbounded for fewer than two runs, and the mean is NaN for no run.
    """
    run_values = np.asarray(values, float)
    mean = _mean_or_nan(run_values)
    half_width = _student_half_width(run_values, level)
    return _symmetric_interval(
        mean, half_width, count=len(run_values), method="replications", level=level
    )


def _mean_or_nan(values: NDArray[np.float64]) -> float:
    """Return the mean of values, NaN without any."""
    return float(values.mean()) if len(values) else math.nan


def _student_half_width(values: NDArray[np.float64], level: float) -> float:
    """Return how far Student's interval reaches from the mean of independent values to each side.

    This half width is infinite for fewer than two values.
    """
    count = len(values)
    if count < 2:
        return math.inf

    t = t_quantile(0.5 + level / 2, count - 1)
    standard_deviation = float(values.std(ddof=1))
    return t * standard_deviation / math.sqrt(count)


def batch_means(values: ArrayLike, *, batches: int = BATCHES, level: float = LEVEL) -> Interval:
    """Return the mean of the values of one run, with an interval by the method of batch means.

    Values of one run are correlated, but means of long batches of values hardly are (Law and
    Kelton, Simulation Modeling and Analysis). The interval is unbounded for fewer than two batches.

    Args:
        values: The values, in order of time.
        batches: The number of batches.
        level: The confidence level.
    """
    data = np.asarray(values, float)
    batch_count = min(batches, len(data))
    if batch_count < 2:
        mean = _mean_or_nan(data)
        return _interval_of_batches(mean, math.inf, batch_count, level)

    # At first, the batches are treated like independent runs.
    means = _means_of_batches(data, batch_count)
    interval_if_independent = mean_of_runs(means, level)

    # A correlation that remains between neighbouring batches makes the interval wider.
    widening = math.sqrt(variance_inflation(means))
    half_width = interval_if_independent.half_width * widening
    return _interval_of_batches(interval_if_independent.value, half_width, batch_count, level)


def _interval_of_batches(
    mean: float, half_width: float, batch_count: int, level: float
) -> Interval:
    """Return the interval that reaches as far below the mean of batches as above it."""
    return _symmetric_interval(
        mean, half_width, count=batch_count, method="batch means", level=level
    )


def _means_of_batches(values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return the means of `count` batches of equal size.

    Three batches of 1, 2, 3, 4, 5, 6, 7 have the means 2.5, 4.5 and 6.5. The first value is left
    out.
    """
    batch_size = len(values) // count
    left_out = len(values) - batch_size * count
    batches = values[left_out:].reshape(count, batch_size)
    means: NDArray[np.float64] = batches.mean(axis=1)
    return means


def upper_tolerance_limit(values: ArrayLike, fraction: float, level: float = LEVEL) -> float:
    """Return a limit that at least a fraction of normally distributed values stays below.

    This is a one-sided tolerance limit: the mean plus a number of standard deviations. The limit is
    infinite for too few values.

    Args:
        values: The values in order of time. Neighbouring values may be correlated.
        fraction: The fraction of values below the limit, such as 0.99.
        level: The confidence that the limit is high enough.
    """
    data = np.asarray(values, float)
    if len(data) < 3 or not np.isfinite(data).all():
        return math.inf

    # The mean of correlated values is as uncertain as that of fewer independent values.
    independent_count = len(data) / variance_inflation(data)
    if independent_count <= 1:
        return math.inf

    standard_deviation = _deviation_of_correlated(data)
    factor = _tolerance_factor(independent_count, fraction, level)
    return float(data.mean() + factor * standard_deviation)


def _deviation_of_correlated(values: NDArray[np.float64]) -> float:
    """Return the standard deviation of the population that correlated values come from.

    Bessel's correction multiplies the variance of n independent values by n / (n - 1). For
    correlated values, the 1 is replaced by the variance inflation.
    """
    count = len(values)
    corrected_variance = values.var() * count / (count - variance_inflation(values))
    return math.sqrt(corrected_variance)


def _tolerance_factor(independent_count: float, fraction: float, level: float) -> float:
    """Return by how many standard deviations an upper tolerance limit is above the mean.

    This is the approximation of Natrella (1963, Experimental Statistics, section 2-2). For n values
    and the normal quantiles z_p of the fraction and z_c of the confidence,

        factor = (z_p + sqrt(z_p^2 - a b)) / a,
        where a = 1 - z_c^2 / (2 (n - 1)) and b = z_p^2 - z_c^2 / n.

    The factor is 2.4 for n = 20, a fraction of 0.95 and a level of 0.9. It is infinite for too few
    values, for which a is not positive.
    """
    z_of_fraction = NormalDist().inv_cdf(fraction)
    z_of_confidence = z_quantile(level)

    a = 1 - z_of_confidence**2 / (2 * (independent_count - 1))
    b = z_of_fraction**2 - z_of_confidence**2 / independent_count
    if a <= 0:
        return math.inf

    root = math.sqrt(z_of_fraction**2 - a * b)
    return (z_of_fraction + root) / a


def variance_inflation(values: NDArray[np.float64]) -> float:
    """Return the factor by which the correlation of neighbours increases the variance of a mean.

    The factor is (1 + r) / (1 - r) for the correlation r, and at least 1.
    """
    r = neighbour_correlation(values)
    return (1 + r) / (1 - r) if r > 0 else 1.0


def neighbour_correlation(values: NDArray[np.float64]) -> float:
    """Return the correlation of each value with its successor, at most MAX_CORRELATION.

    The correlation is 0 if all values are equal, and for fewer than three values.
    """
    deviations = values - values.mean()
    sum_of_squares = float((deviations * deviations).sum())
    if sum_of_squares <= 0 or len(values) < 3:
        return 0.0

    products_of_neighbours = deviations[1:] * deviations[:-1]
    correlation = float(products_of_neighbours.sum()) / sum_of_squares
    return min(MAX_CORRELATION, correlation)


# -- ratios ----------------------------------------------------------------------------------------


class _TwoMeans(NamedTuple):
    """The means of two samples whose ratio is estimated, with the errors of both means.

    Attributes:
        numerator: The mean of the numerators.
        denominator: The mean of the denominators.
        numerator_variance: The variance of the mean of the numerators, which is the variance of one
            value divided by the number of values.
        denominator_variance: The variance of the mean of the denominators.
        covariance: The covariance of both means, 0 for independent samples.
        degrees_of_freedom: The degrees of freedom of these variances.
    """

    numerator: float
    denominator: float
    numerator_variance: float
    denominator_variance: float
    covariance: float
    degrees_of_freedom: float


def ratio_of_means(
    numerators: ArrayLike,
    denominators: ArrayLike,
    *,
    paired: bool = False,
    level: float = LEVEL,
) -> Interval:
    """Return the ratio of the means of two samples, with an interval by Fieller's theorem (1954).

    The interval has no bounds if the mean of the denominators may be 0, or for fewer than two
    values. The ratio is NaN if there is no value, or if the mean of the denominators is 0.

    Args:
        numerators: The sample whose mean is divided.
        denominators: The sample whose mean is the divisor.
        paired: Whether the samples are pairs of values, such as the scores of two servers in each
            task. If not, the samples are independent of each other.
        level: The confidence level.

    Raises:
        ValueError: The samples are paired and differ in length.
    """
    tops = np.asarray(numerators, float)
    bottoms = np.asarray(denominators, float)
    count = min(len(tops), len(bottoms))

    is_ratio_defined = count > 0 and bottoms.mean() != 0
    ratio = float(tops.mean()) / float(bottoms.mean()) if is_ratio_defined else math.nan
    unbounded = Interval(ratio, -math.inf, math.inf, level, count, method="ratio")
    if count < 2:
        return unbounded  # a single value has no variance

    have_equal_lengths = len(tops) == len(bottoms)
    if paired and not have_equal_lengths:
        raise ValueError(f"{len(tops)} values cannot be paired with {len(bottoms)}")
    if not is_ratio_defined:
        return unbounded

    means = _means_of_pairs(tops, bottoms) if paired else _independent_means(tops, bottoms)
    t = t_quantile(0.5 + level / 2, means.degrees_of_freedom)
    ends = _fieller_ends(means, t)
    return replace(unbounded, low=ends.low, high=ends.high)


def _means_of_pairs(
    numerators: NDArray[np.float64], denominators: NDArray[np.float64]
) -> _TwoMeans:
    """Return the means of two samples of pairs, with the variances and covariance of these means.

    The variance of a mean of n values is that of one value divided by n. In the same way, the
    covariance of two means of n pairs is that of one pair divided by n.
    """
    pair_count = len(numerators)
    numerator_mean = float(numerators.mean())
    denominator_mean = float(denominators.mean())

    products = (numerators - numerator_mean) * (denominators - denominator_mean)
    covariance_of_one_pair = float(products.sum()) / (pair_count - 1)

    return _TwoMeans(
        numerator=numerator_mean,
        denominator=denominator_mean,
        numerator_variance=float(numerators.var(ddof=1)) / pair_count,
        denominator_variance=float(denominators.var(ddof=1)) / pair_count,
        covariance=covariance_of_one_pair / pair_count,
        degrees_of_freedom=float(pair_count - 1),
    )


def _independent_means(
    numerators: NDArray[np.float64], denominators: NDArray[np.float64]
) -> _TwoMeans:
    """Return the means of two independent samples, with the variances of these means.

    The samples may differ in length and variance. Fieller's interval needs the variance of the
    difference (numerator mean) - ratio * (denominator mean), which is

        (variance of numerator mean) + ratio^2 * (variance of denominator mean).

    This is a sum of two estimated variances, so its degrees of freedom are those of Welch (1947).
    The mean of the denominators is not 0.
    """
    numerator_mean = float(numerators.mean())
    denominator_mean = float(denominators.mean())
    numerator_variance = float(numerators.var(ddof=1)) / len(numerators)
    denominator_variance = float(denominators.var(ddof=1)) / len(denominators)

    ratio = numerator_mean / denominator_mean
    degrees_of_freedom = welch_degrees_of_freedom(
        variance_a=numerator_variance,
        degrees_of_freedom_a=len(numerators) - 1,
        variance_b=ratio**2 * denominator_variance,
        degrees_of_freedom_b=len(denominators) - 1,
    )

    return _TwoMeans(
        numerator=numerator_mean,
        denominator=denominator_mean,
        numerator_variance=numerator_variance,
        denominator_variance=denominator_variance,
        covariance=0.0,
        degrees_of_freedom=degrees_of_freedom,
    )


def _fieller_ends(means: _TwoMeans, t: float) -> IntervalEnds:
    """Return the ends of Fieller's interval (1954) of the ratio x / y of two means.

    A ratio r is in the interval if x - r y differs from 0 by at most t standard errors. So the ends
    are the solutions of a quadratic equation:

        (y^2 - t^2 variance(y)) r^2 - 2 (x y - t^2 covariance) r + (x^2 - t^2 variance(x)) = 0.

    The interval has no bounds unless the coefficient of r^2 is positive, which means that y differs
    significantly from 0.

    Args:
        means: The means x (numerator) and y (denominator), with their variances.
        t: Student's quantile for the confidence of the interval.
    """
    x = means.numerator
    y = means.denominator
    t_squared = t * t

    # The equation is a r^2 - 2 b r + c = 0.
    a = y * y - t_squared * means.denominator_variance
    b = x * y - t_squared * means.covariance
    c = x * x - t_squared * means.numerator_variance
    discriminant = b * b - a * c

    is_unbounded = a <= 0 or discriminant < 0
    if is_unbounded:
        return IntervalEnds(-math.inf, math.inf)

    root = math.sqrt(discriminant)
    return IntervalEnds(low=(b - root) / a, high=(b + root) / a)


def divide_intervals(numerator: Interval, denominator: Interval) -> Interval:
    """Return the ratio of two independent positive values, with a confidence interval.

    The interval of the ratio is computed from the intervals of both values. If the numerator may be
    3 % lower and the denominator 4 % higher, the ratio may be about sqrt(3^2 + 4^2) = 5 % lower.
    This is the method of variance estimates recovery (MOVER, Zou and Donner 2008). It is applied to
    logarithms, because the logarithm of a ratio is a difference.

    The ratio is NaN, and has no bounds, unless both values are positive and finite.
    """
    is_numerator_valid = 0 < numerator.value < math.inf
    is_denominator_valid = 0 < denominator.value < math.inf
    if not is_numerator_valid or not is_denominator_valid:
        return Interval(value=math.nan, low=0.0, high=math.inf, level=numerator.level)

    log_ratio = math.log(numerator.value / denominator.value)
    log_distances = _distances_of_ratio(_log_distances(numerator), _log_distances(denominator))
    log_low = log_ratio - log_distances.to_low
    log_high = log_ratio + log_distances.to_high
    is_bounded = log_distances.to_high < MAX_EXPONENT  # `math.exp` of more would overflow

    return Interval(
        value=math.exp(log_ratio),
        low=math.exp(log_low),
        high=math.exp(log_high) if is_bounded else math.inf,
        level=numerator.level,
    )


class _EndDistances(NamedTuple):
    """How far the ends of an interval are from its value, as differences of logarithms."""

    to_low: float
    to_high: float


def _distances_of_ratio(numerator: _EndDistances, denominator: _EndDistances) -> _EndDistances:
    """Return how far the ends of the interval of a ratio are from the ratio.

    A ratio is low if its numerator is low and its denominator is high.
    """
    return _EndDistances(
        to_low=math.hypot(numerator.to_low, denominator.to_high),
        to_high=math.hypot(numerator.to_high, denominator.to_low),
    )


def _log_distances(interval: Interval) -> _EndDistances:
    """Return how far the ends of an interval are from its positive value, as logarithms."""
    log_value = math.log(interval.value)
    return _EndDistances(
        to_low=log_value - _log_of_bound(interval.low),
        to_high=_log_of_bound(interval.high) - log_value,
    )


def _log_of_bound(bound: float) -> float:
    """Return the logarithm of a bound of a positive value: -inf for a bound of 0 or below."""
    return math.log(bound) if bound > 0 else -math.inf


# -- shares and rare states ------------------------------------------------------------------------


def wilson_interval(p: float, n: float, level: float = LEVEL) -> IntervalEnds:
    """Return Wilson's score interval (1927) of the share of successes in independent trials.

    With the quantile z of the normal distribution for the confidence level, the interval is

        (p + z^2 / 2n  -+  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n).

    Args:
        p: The observed share of successes.
        n: The number of trials.
        level: The confidence level.
    """
    if n <= 0:
        return IntervalEnds(0.0, 1.0)

    # The letters are those of the formula.
    z = z_quantile(level)
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))

    # A share is between 0 and 1.
    return IntervalEnds(low=max(middle - half_width, 0.0), high=min(middle + half_width, 1.0))


def next_interim_level(level: float) -> float:
    """Return the confidence of the next interim analysis of growing data, after one at `level`.

    Each analysis has half the error probability of the one before. So all analyses together err at
    most twice as often as the first one (Bonferroni).
    """
    return 1 - (1 - level) / 2


def observations_to_see(p: float, level: float = LEVEL) -> int:
    """Return how many independent observations would see a state with probability 1 - p.

    All of n observations miss the state with probability p^n. This must not exceed (1 - level) / 2,
    the error of one side of a two-sided interval.
    """
    return math.ceil(math.log((1 - level) / 2) / math.log(p))


def longest_recurrence_s(length_s: float, level: float = LEVEL) -> float:
    """Return the longest mean time between occurrences of an event that `length_s` would have met.

    A random event misses a load with probability exp(-length / mean time between occurrences). This
    must not exceed (1 - level) / 2, the error of one side of a two-sided interval.
    """
    return length_s / math.log(2 / (1 - level))


def length_to_meet_s(recurrence_s: float, level: float = LEVEL) -> float:
    """Return the length of load that meets an event that occurs every `recurrence_s` on average.

    This is the inverse of `longest_recurrence_s`.
    """
    return recurrence_s * math.log(2 / (1 - level))


def widen_by_runs(
    interval: Interval, values_of_runs: Sequence[float], *, on_log_scale: bool = False
) -> Interval:
    """Return an interval that also covers the differences between repeated runs.

    Only several runs show what differs from run to run, such as a restart of the server. The result
    is at least as wide as Student's interval of the values of the runs. The interval stays as it is
    for a single run, and if a value is not finite or has no logarithm.

    Args:
        interval: The interval from within the runs.
        values_of_runs: The value of each run.
        on_log_scale: Whether to compare the logarithms of the values, as for latencies, whose
            errors are relative.
    """
    run_values = np.array(values_of_runs, float)
    if len(run_values) < 2:
        return interval

    are_all_finite = math.isfinite(interval.value) and np.isfinite(run_values).all()
    if not are_all_finite:
        return interval

    if on_log_scale:
        are_all_positive = interval.value > 0 and run_values.min() > 0
        if not are_all_positive:
            return interval
        ends = _log_scale_ends(interval.value, run_values, interval.level)
    else:
        half_width = mean_of_runs(run_values, interval.level).half_width
        ends = IntervalEnds(low=interval.value - half_width, high=interval.value + half_width)

    return replace(
        interval,
        low=min(interval.low, ends.low),
        high=max(interval.high, ends.high),
    )


def _log_scale_ends(value: float, run_values: NDArray[np.float64], level: float) -> IntervalEnds:
    """Return the ends of Student's interval of the logarithms of values, around a value.

    If the logarithms differ by up to 0.1 from their mean, the ends are the value times exp(-0.1)
    and exp(0.1), so about 10 % below and above the value.
    """
    log_half_width = mean_of_runs(np.log(run_values), level).half_width
    limited_half_width = min(log_half_width, MAX_EXPONENT)  # `exp` of more would overflow
    return IntervalEnds(
        low=value * math.exp(-log_half_width),
        high=value * math.exp(limited_half_width),
    )


# -- the start of a run, and its future ------------------------------------------------------------


def startup_length(values: ArrayLike) -> int | None:
    """Return how many values at the start of a series differ from its later steady state.

    MSER, the marginal standard error rule (White 1997), cuts off the first values such that the
    mean of the remaining values has the smallest standard error. At most half of the values are cut
    off. The result is None if the values do not reach a steady state, or if there are fewer than 4.
    """
    data = np.asarray(values, float)
    count = len(data)
    if count < 4:
        return None

    # Entry i is for the values that remain if the first i values are cut off.
    squared_standard_errors = _squared_standard_errors_of_rest(data)
    longest_cut = count // 2
    best_cut = int(np.argmin(squared_standard_errors[: longest_cut + 1]))

    # If the longest cut is the best one, an even longer cut may be better.
    is_steady_state_reached = best_cut < longest_cut
    return best_cut if is_steady_state_reached else None


def _squared_standard_errors_of_rest(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each index, the squared standard error of the mean of the values from there on.

    The squared error is the variance divided by the count: [5, 1, 3] gives [8 / 9, 2 / 4, 0].
    """
    counts = np.arange(len(values), 0, -1)
    sums = _sums_to_end(values)
    sums_of_squares = _sums_to_end(values * values)

    # Sum of (value - mean)^2 = sum of value^2 - (sum of value)^2 / count.
    sums_of_squared_deviations = sums_of_squares - sums * sums / counts
    squared_errors: NDArray[np.float64] = sums_of_squared_deviations / counts**2
    return squared_errors


def _sums_to_end(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of the values from each index to the end: [1, 2, 3] gives [6, 5, 3]."""
    return np.cumsum(values[::-1])[::-1]


class ExpectedGrowth(NamedTuple):
    """By how much values are expected to grow, and an upper bound of that growth."""

    growth: float
    upper_bound: float


def extrapolate_growth(
    values: Sequence[float] | NDArray[np.float64], steps_ahead: float, level: float = 0.99
) -> ExpectedGrowth:
    """Return by how much evenly spaced values will grow in the next steps, and an upper bound.

    A straight line is fitted by least squares. The bound follows from Student's t and the standard
    error of the slope, which is larger if neighbouring values are correlated.

    Args:
        values: The values, in order of time.
        steps_ahead: The number of steps after the last value.
        level: The one-sided confidence of the bound.
    """
    data = np.asarray(values, float)
    if len(data) < MIN_VALUES_OF_TREND:
        return ExpectedGrowth(growth=0.0, upper_bound=math.inf)

    slope = _estimate_slope(data)
    t = t_quantile(level, slope.degrees_of_freedom)
    upper_slope = slope.per_step + t * slope.standard_error

    return ExpectedGrowth(
        growth=slope.per_step * steps_ahead,
        upper_bound=upper_slope * steps_ahead,
    )


class _Slope(NamedTuple):
    """The slope of a straight line through evenly spaced values.

    Attributes:
        per_step: By how much the line rises from one value to the next.
        standard_error: The standard error of `per_step`.
        degrees_of_freedom: The degrees of freedom of the standard error.
    """

    per_step: float
    standard_error: float
    degrees_of_freedom: int


def _estimate_slope(values: NDArray[np.float64]) -> _Slope:
    """Return the slope of the least-squares line through evenly spaced values.

    With times t whose mean is 0, slope = sum(t * value) / sum(t^2). Its variance is that of the
    residuals divided by sum(t^2), times the inflation by correlated neighbours.
    """
    count = len(values)
    times = np.arange(count) - (count - 1) / 2
    sum_of_squared_times = float((times * times).sum())
    slope = float((times * values).sum()) / sum_of_squared_times

    # The residuals are the distances of the values from the line.
    residuals = values - values.mean() - slope * times
    degrees_of_freedom = count - 2  # two parameters were fitted: the mean and the slope
    residual_variance = float((residuals * residuals).sum()) / degrees_of_freedom

    variance_if_independent = residual_variance / sum_of_squared_times
    slope_variance = variance_if_independent * variance_inflation(residuals)
    return _Slope(slope, math.sqrt(slope_variance), degrees_of_freedom)
