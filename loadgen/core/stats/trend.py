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

CURVE_PARAMETERS = CURVE_DEGREE + 1
"""The number of parameters of that curve."""

MAX_CORRELATION = 0.9
"""The residuals of a few blocks cannot show a larger correlation of neighbours."""

CORRELATION_ERRORS = 0.5
"""Standard errors, of Fisher's z, by which the correlation may be larger than it looks."""

MIN_DEGREES_OF_FREEDOM = 3.0
"""A slope has at least so many degrees of freedom, however correlated its noise is."""

MANY_SERIES = 20
"""From so many series on, their mean correlation is known well enough to bound that of each one."""

_TESTS_PER_SERIES = 2
"""The test of the slope and the test of the steps, see `_TrendTests`."""

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
        """Return the smallest true growth that this test finds with probability POWER.

        This is the formula of power analysis: a critical value plus a margin, in standard errors.
        The test finds a growth if the estimate exceeds the critical value. The margin is needed
        because the estimate may be smaller than the true growth.

        Args:
            significance_level: The probability of finding a growth when there is none.
        """
        if self.standard_error == 0:
            return 0.0  # without noise, any growth is found

        # Rounded numbers are more often in the cache of `t_quantile`.
        degrees_of_freedom = round(self.degrees_of_freedom, 1)
        critical_value = t_quantile(1 - significance_level, degrees_of_freedom)
        power_margin = t_quantile(POWER, degrees_of_freedom)

        return (critical_value + power_margin) * self.standard_error


class _TrendTests(NamedTuple):
    """Both tests of one series, as the docstring of this module describes them."""

    slope: _TrendTest
    steps: _TrendTest

    @property
    def growth_by_line(self) -> float:
        """The growth of the straight line through the series, from the first block to the last."""
        return self.slope.growth

    @property
    def p_value(self) -> float:
        """The probability that either test shows so much growth when there is none.

        It is the smaller p-value times the number of tests, which is Bonferroni's correction.
        """
        smaller_p_value = min(self.slope.p_value, self.steps.p_value)
        return min(1.0, _TESTS_PER_SERIES * smaller_p_value)

    def detectable_growth(self, significance_level: float) -> float:
        """Return the smallest growth that the better test finds at this significance level."""
        return min(
            self.slope.detectable_growth(significance_level),
            self.steps.detectable_growth(significance_level),
        )


def find_trends(
    series: Sequence[NDArray[np.float64]], significance_level: float = SIGNIFICANCE_LEVEL
) -> list[Trend | None]:
    """Return how much each series grows over time, and whether that growth is significant.

    A trend is None if the series has fewer than MIN_BLOCKS values.

    Args:
        series: The series. Each has the means of equal blocks of time, NaN for a block without a
            value.
        significance_level: The probability that any series is reported as growing when none grows.
    """
    tests_by_index = _test_all_series(series)
    p_values = {index: tests.p_value for index, tests in tests_by_index.items()}
    growing_indices = _reject_by_holm(p_values, significance_level)

    # The level that Holm's procedure applies to a series depends on the p-values of all series. The
    # detectable growth is that at the strictest level that can apply, which is Bonferroni's.
    strictest_level = _bonferroni_level(significance_level, series_count=len(tests_by_index))

    trends: list[Trend | None] = [None] * len(series)
    for index, tests in tests_by_index.items():
        trends[index] = Trend(
            growth=tests.growth_by_line,
            detectable_growth=tests.detectable_growth(strictest_level),
            mean=_mean_of_known(series[index]),
            p_value=p_values[index],
            grows=index in growing_indices,
        )

    return trends


def _bonferroni_level(significance_level: float, series_count: int) -> float:
    """Return the significance level of each single test, so that all together have another level.

    Bonferroni's correction divides the common level by the number of tests.
    """
    test_count = max(_TESTS_PER_SERIES * series_count, 1)  # 1 if there is no test at all
    return significance_level / test_count


def _mean_of_known(values: NDArray[np.float64]) -> float:
    """Return the mean of the values that are neither NaN nor infinite."""
    known_values = values[np.isfinite(values)]
    return float(known_values.mean())


def _test_all_series(series: Sequence[NDArray[np.float64]]) -> dict[int, _TrendTests]:
    """Return the test of the slope and the test of the steps of each series, by its index.

    A series with fewer than MIN_BLOCKS values is left out.
    """
    fitted_lines = [_fit_line(values) for values in series]
    line_by_index = {index: line for index, line in enumerate(fitted_lines) if line is not None}

    # A single short series shows the correlation of its noise only roughly, and often too small. If
    # there are many series, each is taken to be at least as correlated as the mean of all.
    common_correlation = None
    if len(series) >= MANY_SERIES:
        common_correlation = _mean_noise_correlation(list(line_by_index.values()))

    return {
        index: _TrendTests(
            slope=_test_slope(line, common_correlation),
            steps=_test_steps(line.values),
        )
        for index, line in line_by_index.items()
    }


def _reject_by_holm(p_values: dict[int, float], significance_level: float) -> set[int]:
    """Return the indices of the series whose hypothesis of no growth is rejected.

    Holm's procedure goes through the p-values from the smallest to the largest. Each is compared
    with the significance level divided by the number of hypotheses that are left.
    """
    rejected = set()
    ordered = sorted((p_value, index) for index, p_value in p_values.items())

    for rank, (p_value, index) in enumerate(ordered):
        hypotheses_left = len(p_values) - rank
        if p_value > significance_level / hypotheses_left:
            break
        rejected.add(index)

    return rejected


class _Noise(NamedTuple):
    """What a smooth curve through a series leaves over.

    Attributes:
        sum_of_squares: The sum of squares of the noise of all blocks.
        correlation: The correlation of the noise of neighbouring blocks, from 0 to MAX_CORRELATION.
    """

    sum_of_squares: float
    correlation: float


class _FittedLine(Struct, frozen=True):
    """A straight line by least squares through the blocks of a series, and the noise around it.

    Attributes:
        values: The values of the blocks that have one.
        slope: The growth from the first block to the last one.
        sum_of_squared_times: The sum of squares of the times of the blocks, see `_scale_times`.
        noise: The noise of the series, None if there is none.
    """

    values: NDArray[np.float64]
    slope: float
    sum_of_squared_times: float
    noise: _Noise | None


def _fit_line(series: NDArray[np.float64]) -> _FittedLine | None:
    """Fit a straight line to a series by least squares, or return None for too few values.

    With times t whose mean is 0, the slope is sum(t * value) / sum(t^2).

    Args:
        series: The value of each block of time, NaN for a block without one.
    """
    blocks = np.flatnonzero(np.isfinite(series))
    if len(blocks) < MIN_BLOCKS:
        return None

    # Without rounding errors, a constant series has no noise, and no slope.
    values = _replace_rounding_errors(series[blocks].astype(float))

    times = _scale_times(blocks)
    slope = _least_squares_factor(values, times)
    sum_of_squared_times = float((times**2).sum())
    noise = _measure_noise(values, times, slope)
    return _FittedLine(values, slope, sum_of_squared_times, noise)


def _least_squares_factor(values: NDArray[np.float64], curve: NDArray[np.float64]) -> float:
    """Return the factor c for which c * curve + a constant fits the values by least squares.

    The curve has a mean of 0, so the constant, which is the mean of the values, does not matter.
    For example, the curve -1, 0, 1 fits the values 3, 5, 7 with c = 2.
    """
    return float((values * curve).sum()) / float((curve * curve).sum())


def _scale_times(blocks: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the times of blocks with a mean of 0 and a distance of 1 from the first to the last.

    For example, the blocks 0, 1 and 4 have the times -5/12, -2/12 and 7/12.
    """
    times: NDArray[np.float64] = (blocks - blocks.mean()) / float(blocks[-1] - blocks[0])
    return times


def _measure_noise(
    values: NDArray[np.float64], times: NDArray[np.float64], slope: float
) -> _Noise | None:
    """Return the noise of a series, or None if there are only rounding errors.

    The noise is what a least-squares parabola through the values leaves over: its residuals. So
    growth that becomes faster or slower does not count as noise.

    Args:
        values: The values of the series.
        times: The time of each value. Their mean is 0.
        slope: The slope of the least-squares straight line through the values.
    """
    residuals_of_line = values - values.mean() - slope * times
    residuals = residuals_of_line - _bend_of_parabola(values, times)
    sum_of_squares = float((residuals**2).sum())

    # The root of the sum of squares is the length of the vector of residuals.
    largest_rounding_error = ROUNDING * float(np.abs(values).max())
    is_only_rounding = sum_of_squares <= largest_rounding_error**2
    if is_only_rounding:
        return None

    products_of_neighbours = residuals[1:] * residuals[:-1]
    residual_correlation = float(products_of_neighbours.sum()) / sum_of_squares
    noise_correlation = _correct_for_fitted_curve(residual_correlation, len(residuals))
    return _Noise(sum_of_squares, noise_correlation)


def _correct_for_fitted_curve(residual_correlation: float, residual_count: int) -> float:
    """Return the correlation of neighbours in the noise, from that of the residuals of a curve.

    A fitted curve follows the noise, so its residuals look less correlated than the noise is. For n
    residuals of a curve with k parameters, and a correlation r of the noise, the expected
    correlation of the residuals is about r - k (1 + 2 r) / n. Solved for r, this is

        r = (n * residual correlation + k) / (n - 2 k).

    For example, 20 residuals of a parabola (k = 3) with a correlation of 0.2 show a noise
    correlation of 7 / 14 = 0.5. The result is from 0 to MAX_CORRELATION.

    Args:
        residual_correlation: The correlation of each residual with the next one.
        residual_count: The number of residuals, at least MIN_BLOCKS.
    """
    divisor = residual_count - 2 * CURVE_PARAMETERS
    noise_correlation = (residual_correlation * residual_count + CURVE_PARAMETERS) / divisor
    return min(max(noise_correlation, 0.0), MAX_CORRELATION)


def _replace_rounding_errors(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values, of which those that differ from the mean by rounding alone are made equal.

    They all become the first value. So a series such as 0.3, 0.30000000000000004, 0.3 becomes
    constant.
    """
    mean = float(values.mean())
    rounding_error = ROUNDING * max(abs(mean), ROUNDING)
    is_mean = np.abs(values - mean) <= rounding_error
    return np.where(is_mean, values[0], values)


def _bend_of_parabola(
    values: NDArray[np.float64], times: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the least-squares parabola minus the least-squares straight line, at each time.

    The difference is a multiple of one curve: the squared times minus their own least-squares line.
    For the times -0.5, 0 and 0.5, this curve is 1/12, -2/12 and 1/12. It is orthogonal to every
    straight line (Gram-Schmidt process), so the factor is fitted without the line.

    Args:
        values: The values of a series.
        times: The time of each value. Their mean is 0.
    """
    # The last digits of `np.polyfit` would differ from one processor to the next.
    squared_times = times * times
    centered_squares = squared_times - squared_times.mean()
    slope_of_squares = _least_squares_factor(centered_squares, times)
    bent_curve = centered_squares - slope_of_squares * times

    bend: NDArray[np.float64] = _least_squares_factor(values, bent_curve) * bent_curve
    return bend


def _mean_noise_correlation(lines: Sequence[_FittedLine]) -> float:
    """Return the mean correlation of the noise of neighbouring blocks, 0 if no line has noise."""
    correlations = [line.noise.correlation for line in lines if line.noise is not None]
    return float(np.mean(correlations)) if correlations else 0.0


def _test_slope(line: _FittedLine, common_correlation: float | None) -> _TrendTest:
    """Return Student's t test of whether the slope of a line is above 0, with correlated noise.

    For independent noise, the variance of a slope is (variance of the noise) / sum(t^2), with times
    t whose mean is 0. If neighbouring blocks have the correlation r, as in an autoregressive
    process of order 1, it is (1 + r) / (1 - r) times as large.

    Args:
        line: The least-squares line through the blocks of a series.
        common_correlation: The mean correlation of the noise of many series, which is the least
            that is assumed for this series. None if there are only few series.
    """
    block_count = len(line.values)
    degrees_of_freedom_of_noise = block_count - CURVE_PARAMETERS
    if line.noise is None:
        return _TrendTest(
            line.slope, standard_error=0.0, degrees_of_freedom=degrees_of_freedom_of_noise
        )

    correlation = _cautious_correlation(line.noise.correlation, block_count, common_correlation)
    noise_variance = line.noise.sum_of_squares / degrees_of_freedom_of_noise
    variance_if_independent = noise_variance / line.sum_of_squared_times
    slope_variance = variance_if_independent * _variance_inflation(correlation)

    if common_correlation is None:
        independent_blocks = _independent_blocks_of_mean(block_count, correlation)
    else:
        independent_blocks = _independent_blocks_of_variance(block_count, correlation)

    # Each parameter of the fitted curve takes one degree of freedom.
    degrees_of_freedom = max(independent_blocks - CURVE_PARAMETERS, MIN_DEGREES_OF_FREEDOM)
    return _TrendTest(line.slope, math.sqrt(slope_variance), degrees_of_freedom)


def _variance_inflation(correlation: float) -> float:
    """Return the factor by which the correlation of neighbours increases the variance of a mean."""
    return (1 + correlation) / (1 - correlation)


def _independent_blocks_of_variance(block_count: int, correlation: float) -> float:
    """Return how many independent blocks show the variance of the noise as well as correlated ones.

    For a correlation r of neighbours, n blocks count as n (1 - r^2) / (1 + r^2) independent blocks
    (Bayley and Hammersley 1946). With r = 0.5, 20 blocks count as 12.
    """
    correlation_of_squares = correlation * correlation
    return block_count * (1 - correlation_of_squares) / (1 + correlation_of_squares)


def _independent_blocks_of_mean(block_count: int, correlation: float) -> float:
    """Return how many independent blocks show a mean as well as correlated ones do.

    For a correlation r of neighbours, n blocks count as n (1 - r) / (1 + r) independent blocks. For
    r = 0.5, 20 blocks count as 6.7, fewer than for a variance. This smaller number also makes up
    for the error of a correlation that is estimated from a single series.
    """
    return block_count / _variance_inflation(correlation)


def _cautious_correlation(
    correlation: float, block_count: int, common_correlation: float | None
) -> float:
    """Return a correlation of neighbouring blocks that is cautiously larger than the estimate.

    The estimate is raised by CORRELATION_ERRORS standard errors, after Fisher's transformation
    z = atanh(correlation), by which the standard error of z is 1 / sqrt(n - 3) for n blocks. The
    result is at most MAX_CORRELATION.

    Args:
        correlation: The estimate.
        block_count: The number of blocks, at least MIN_BLOCKS.
        common_correlation: The mean correlation of many series, which is the smallest result. None
            if there are only few series.
    """
    fisher_z = math.atanh(correlation)
    standard_error = 1 / math.sqrt(block_count - 3)
    cautious_correlation = math.tanh(fisher_z + CORRELATION_ERRORS * standard_error)

    if common_correlation is not None:
        cautious_correlation = max(cautious_correlation, common_correlation)
    return min(cautious_correlation, MAX_CORRELATION)


def _test_steps(values: NDArray[np.float64]) -> _TrendTest:
    """Test whether the changes from one block to the next have a mean above 0 (a random walk).

    The growth is the sum of these steps. The standard error of a sum of n independent steps is the
    standard deviation of one step times sqrt(n).
    """
    steps = np.diff(values)
    standard_error = float(steps.std(ddof=1)) * math.sqrt(len(steps))
    return _TrendTest(
        growth=float(steps.sum()),
        standard_error=standard_error,
        degrees_of_freedom=len(steps) - 1,
    )
