"""Tests many series at once for growth over time, because a queue that grows is not steady.

Pure. Each series holds the means of equal blocks of time. Two tests look at each series, because no
single one sees both kinds of growth:

- *slope*: the slope of a straight line by least squares, against noise that passes. The noise is
  the residuals of a parabola. Its variance is widened by (1 + r) / (1 - r), where r is the
  correlation of neighbouring blocks. This test finds a small growth in noise of short duration.
- *steps*: the mean change from block to block, against a random walk, which wanders without
  growing. This test finds a queue that grows steadily. The values of such a queue are so correlated
  that the test of the slope counts them as few independent ones.

Holm's correction, over all series and both tests, keeps the probability of calling any series
growing, when none is, at the level of the test.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct

from loadgen.core.stats.students_t import t_cdf, t_quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SIGNIFICANCE_LEVEL = 0.01
"""The probability of calling any of several series growing when none of them grows."""

POWER = 0.90
"""The probability with which a growth of `Trend.detectable_growth` is found."""

MIN_BLOCKS = 8
"""The tests need so many blocks with a value."""

CURVE_DEGREE = 2
"""The degree of the curve whose residuals are the noise. Growth may bend, and its bend is no noise.
"""

MAX_CORRELATION = 0.9
"""The residuals of a few blocks cannot show a larger correlation of neighbours."""

CORRELATION_ERRORS = 0.5
"""Standard errors, of Fisher's z, by which the correlation may be larger than it looks."""

MIN_DEGREES_OF_FREEDOM = 3.0
"""A slope has at least so many degrees of freedom, however correlated its noise is."""

MANY_SERIES = 20
"""The mean correlation of so many series is taken as known."""

ROUNDING = 1e-9
"""Relative differences below this are rounding and no noise."""


class Trend(Struct, frozen=True):
    """The growth of one series from its first block to its last one, in the unit of the series.

    Attributes:
        growth: The growth by a straight line.
        detectable_growth: The smallest growth that the better of both tests finds, with probability
            POWER, at the significance level that Bonferroni leaves to each.
        mean: The mean of the series.
        p_value: The probability of so much growth when there is none, for both tests together.
        grows: Whether the series grows by Holm's correction over all series of the call.
    """

    growth: float
    detectable_growth: float
    mean: float
    p_value: float
    grows: bool


class _TrendTest(Struct, frozen=True):
    """A one-sided Student's t test of the growth of one series.

    Attributes:
        growth: The estimated growth from the first block to the last one.
        standard_error: The standard error of the growth. It is 0 for a series without noise.
        degrees_of_freedom: The degrees of freedom of the standard error.
    """

    growth: float
    standard_error: float
    degrees_of_freedom: float

    @property
    def p_value(self) -> float:
        """The probability of so much growth when there is none."""
        if self.growth <= 0:
            return 1.0
        if self.standard_error == 0:
            return 0.0  # without noise, any growth is certain
        return 1 - t_cdf(self.growth / self.standard_error, self.degrees_of_freedom)

    def detectable_growth(self, significance_level: float) -> float:
        """Return the smallest growth that this test finds with probability POWER.

        The test finds a growth if its estimate exceeds the critical value of the significance
        level. The estimate does so with probability POWER if the true growth is larger than the
        critical value by the t quantile of POWER, both in standard errors.
        """
        if self.standard_error == 0:
            return 0.0
        # `t_quantile` caches its results, which rounded degrees of freedom make useful.
        degrees_of_freedom = round(self.degrees_of_freedom, 1)
        critical_value = t_quantile(1 - significance_level, degrees_of_freedom)
        power_margin = t_quantile(POWER, degrees_of_freedom)
        return (critical_value + power_margin) * self.standard_error


class _TrendTests(NamedTuple):
    """Both tests of one series, as the docstring of this module describes them."""

    slope: _TrendTest
    steps: _TrendTest

    @property
    def p_value(self) -> float:
        """The probability that either test shows so much growth when there is none.

        It is the smaller p-value times the number of tests, which is Bonferroni's correction.
        """
        return min(1.0, len(self) * min(self.slope.p_value, self.steps.p_value))

    def detectable_growth(self, significance_level: float) -> float:
        """Return the smallest growth that the better test finds at this significance level."""
        return min(
            self.slope.detectable_growth(significance_level),
            self.steps.detectable_growth(significance_level),
        )


def find_trends(
    series: Sequence[NDArray[np.float64]], significance_level: float = SIGNIFICANCE_LEVEL
) -> list[Trend | None]:
    """Return the trend of each series, None for one with fewer than MIN_BLOCKS values.

    Blocks without a value are NaN. The significance level holds for all series together: it is the
    probability of calling any of them growing when none of them grows.
    """
    tests_by_index = _test_all_series(series)
    p_values = {index: tests.p_value for index, tests in tests_by_index.items()}
    growing_indices = _reject_by_holm(p_values, significance_level)
    trends: list[Trend | None] = [None] * len(series)
    for index, tests in tests_by_index.items():
        # Bonferroni: the significance level is shared equally by the tests of all series.
        level_per_test = significance_level / (len(tests) * len(tests_by_index))
        trends[index] = Trend(
            growth=tests.slope.growth,
            detectable_growth=tests.detectable_growth(level_per_test),
            mean=float(series[index][np.isfinite(series[index])].mean()),
            p_value=p_values[index],
            grows=index in growing_indices,
        )
    return trends


def _test_all_series(series: Sequence[NDArray[np.float64]]) -> dict[int, _TrendTests]:
    """Return both tests of each series, by its index, without series of too few values."""
    fitted_lines = [_fit_line(values) for values in series]
    common_correlation = None
    if len(series) >= MANY_SERIES:
        common_correlation = _mean_correlation(fitted_lines)
    return {
        index: _TrendTests(
            slope=_test_slope(line, common_correlation), steps=_test_steps(line.values)
        )
        for index, line in enumerate(fitted_lines)
        if line is not None
    }


def _reject_by_holm(p_values: dict[int, float], significance_level: float) -> set[int]:
    """Return the indices of the series whose hypothesis of no growth is rejected.

    Holm's procedure goes through the p-values from the smallest one up. It compares each with the
    significance level divided by the number of hypotheses that are left, and stops at the first
    p-value that is larger.
    """
    rejected = set()
    ordered = sorted((p_value, index) for index, p_value in p_values.items())
    for rank, (p_value, index) in enumerate(ordered):
        hypotheses_left = len(p_values) - rank
        if p_value > significance_level / hypotheses_left:
            break
        rejected.add(index)
    return rejected


class _FittedLine(Struct, frozen=True):
    """A straight line by least squares through the blocks of a series, and the noise around it.

    The times of the blocks are scaled to a length of 1, from the first block to the last one, and
    their mean is 0. The noise is the residuals of a parabola and not of the line, because growth
    may bend.

    Attributes:
        values: The values of the blocks that have one.
        slope: The growth from the first block to the last one.
        time_squares: The sum of squares of the scaled times.
        noise_squares: The sum of squares of the noise.
        correlation: The correlation of neighbours in the noise, None if there is no noise.
    """

    values: NDArray[np.float64]
    slope: float
    time_squares: float
    noise_squares: float
    correlation: float | None


def _fit_line(series: NDArray[np.float64]) -> _FittedLine | None:
    """Return the line by least squares through a series, None if too few blocks have a value.

    A block without a value is NaN. The noise around the line is the residuals of a parabola, and is
    0 if it is not larger than the rounding of the values.
    """
    blocks = np.flatnonzero(np.isfinite(series))
    if len(blocks) < MIN_BLOCKS:
        return None
    values = _without_rounding(series[blocks].astype(float))
    times = (blocks - blocks.mean()) / float(blocks[-1] - blocks[0])
    time_squares = float((times * times).sum())
    slope = float((times * values).sum()) / time_squares
    bend = _fit_bend(values, times, time_squares)
    residuals = values - values.mean() - slope * times - bend
    noise_squares = float((residuals * residuals).sum())
    largest_rounding_error = ROUNDING * float(np.abs(values).max())
    if noise_squares <= largest_rounding_error**2:
        return _FittedLine(values, slope, time_squares, noise_squares=0.0, correlation=None)
    correlation = _neighbour_correlation(residuals, noise_squares)
    return _FittedLine(values, slope, time_squares, noise_squares, correlation)


def _neighbour_correlation(residuals: NDArray[np.float64], noise_squares: float) -> float:
    """Return the lag-1 autocorrelation of residuals, from 0 to MAX_CORRELATION.

    The fit of a curve makes residuals look less correlated than the noise is, by about 1 / count
    for each of its parameters. That bias is removed. A negative correlation counts as none, because
    it would make the growth look more certain than independent noise does.

    Args:
        residuals: The residuals of the blocks, in order of time.
        noise_squares: The sum of their squares.
    """
    count = len(residuals)
    observed = float((residuals[1:] * residuals[:-1]).sum()) / noise_squares
    parameters = CURVE_DEGREE + 1
    unbiased = (observed * count + parameters) / max(count - 2 * parameters, 1)
    return min(max(unbiased, 0.0), MAX_CORRELATION)


def _without_rounding(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values, with those that differ from the mean by rounding alone made equal."""
    mean = float(values.mean())
    is_mean = np.abs(values - values.mean()) <= ROUNDING * max(abs(mean), ROUNDING)
    return np.where(is_mean, values[0], values)


def _fit_bend(
    values: NDArray[np.float64], times: NDArray[np.float64], time_squares: float
) -> NDArray[np.float64]:
    """Return what a parabola by least squares adds to the straight line, at each time.

    The square of the times is made orthogonal to the mean and to the straight line (Gram-Schmidt),
    so that its coefficient can be fitted alone. It is computed from sums, because the results of
    `np.polyfit` (LAPACK) differ in their last digits from one processor to the next.

    Args:
        values: The values of the blocks.
        times: The times of the blocks, whose mean is 0.
        time_squares: The sum of the squares of the times.
    """
    squares = times * times
    centred = squares - squares.mean()
    curve = centred - times * (float((centred * times).sum()) / time_squares)
    coefficient = float((curve * values).sum()) / float((curve * curve).sum())
    bend: NDArray[np.float64] = curve * coefficient
    return bend


def _mean_correlation(fitted_lines: Sequence[_FittedLine | None]) -> float:
    """Return the mean correlation of neighbours over all series, 0 if none has noise.

    Replicas of one server share their kind of noise. The least correlated of many series looks so
    by chance, and its own correlation would call it growing too often.
    """
    correlations = [
        line.correlation
        for line in fitted_lines
        if line is not None and line.correlation is not None
    ]
    return float(np.mean(correlations)) if correlations else 0.0


def _test_slope(line: _FittedLine, common_correlation: float | None) -> _TrendTest:
    """Test the slope of a line by Student's t, with a standard error widened for correlated noise.

    Noise in which neighbours have a correlation of r (an autoregressive process of order 1) carries
    as much information as (1 - r) / (1 + r) times as many independent blocks. So the variance of
    the slope is divided by that factor, and the degrees of freedom are those of fewer blocks.

    Args:
        line: The fitted line.
        common_correlation: The mean correlation of many series, below which the correlation is not
            taken to be. None if there are too few series for one.
    """
    count = len(line.values)
    noise_degrees_of_freedom = count - CURVE_DEGREE - 1
    if line.correlation is None:
        return _TrendTest(line.slope, 0.0, noise_degrees_of_freedom)
    correlation = _upper_correlation(line.correlation, count, common_correlation)
    inflation = (1 + correlation) / (1 - correlation)
    noise_variance = line.noise_squares / noise_degrees_of_freedom
    standard_error = math.sqrt(noise_variance / line.time_squares * inflation)
    # If the correlation is that of many series, only the size of the noise is estimated from this
    # one, which leaves more degrees of freedom.
    if common_correlation is None:
        effective_count = count / inflation
    else:
        effective_count = count * (1 - correlation * correlation) / (1 + correlation * correlation)
    degrees_of_freedom = max(effective_count - CURVE_DEGREE - 1, MIN_DEGREES_OF_FREEDOM)
    return _TrendTest(line.slope, standard_error, degrees_of_freedom)


def _upper_correlation(correlation: float, count: int, common_correlation: float | None) -> float:
    """Return how large the correlation of neighbours may be, given its estimate from few blocks.

    The estimate is raised by CORRELATION_ERRORS of its standard error, which is 1 / sqrt(count - 3)
    for Fisher's z = atanh(correlation). The result is between the common correlation of many
    series, if it is known, and MAX_CORRELATION.
    """
    raised_z = math.atanh(correlation) + CORRELATION_ERRORS / math.sqrt(count - 3)
    lowest_correlation = 0.0 if common_correlation is None else common_correlation
    return min(max(math.tanh(raised_z), lowest_correlation), MAX_CORRELATION)


def _test_steps(values: NDArray[np.float64]) -> _TrendTest:
    """Test the mean change from block to block, whose standard error is that of a random walk.

    The growth is the sum of the steps. Steps that are independent of each other have a sum whose
    standard error is that of one step times the square root of their number.
    """
    steps = np.diff(values)
    standard_error = float(steps.std(ddof=1)) * math.sqrt(len(steps))
    return _TrendTest(float(steps.sum()), standard_error, len(steps) - 1)
