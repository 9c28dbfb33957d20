"""Tests many series at once for growth over time, because a queue that grows is not steady.

Pure. Each series holds the means of equal blocks of time. Two tests look at each series, because no
single one sees both kinds of growth:

- *slope*: a straight line by least squares, against noise that passes. The noise is what a
  parabola leaves, and its error is widened by (1 + r) / (1 - r), where r is the correlation of
  neighbours (of MANY_SERIES at least their mean one). It sees a small growth in brief noise.
- *steps*: the mean change from block to block, against a random walk, which wanders without
  growing. It sees a queue that grows steadily, whose values are so much alike that the test of the
  slope takes them for few.

Holm's correction, over all series and both tests, keeps the probability of calling any series
growing, when none is, at the level of the test.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct

from loadgen.core.stats.students_t import t_cdf, t_quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LEVEL = 0.01
"""The probability of calling any of several series growing when none of them grows."""

POWER = 0.90
"""The probability with which the smallest visible growth would have been seen."""

MIN_BLOCKS = 8
"""The tests need so many blocks with a value."""

CURVE_DEGREE = 2
"""The degree of the curve whose residuals are the noise. Growth may bend, and its bend is no noise.
"""

MAX_CORRELATION = 0.9
"""The residuals of a few blocks cannot show a larger correlation of neighbours."""

CORRELATION_ERRORS = 0.5
"""Standard errors, of Fisher's z, by which the correlation may be larger than it looks."""

MIN_FREEDOM = 3.0

MANY_SERIES = 20
"""The mean correlation of so many series is taken as known."""

ROUNDING = 1e-9
"""Relative differences below this are rounding and no noise."""


class Trend(Struct, frozen=True):
    """The growth of one series from its first block to its last one, in the unit of the series.

    Attributes:
        growth: The growth by a straight line.
        visible: The smallest growth that the better of both tests would have seen, with probability
            POWER, at the significance that Bonferroni leaves to each.
        mean: The mean of the series.
        chance: The probability of so much growth when there is none, for both tests together.
        grows: Whether the series grows by Holm's correction over all series of the call.
    """

    growth: float
    visible: float
    mean: float
    chance: float
    grows: bool


class _Test(Struct, frozen=True):
    """A test of one series for growth by Student's t."""

    growth: float
    error: float
    freedom: float

    @property
    def chance(self) -> float:
        """The probability of so much growth when there is none."""
        if self.growth <= 0:
            return 1.0
        return 1 - t_cdf(self.growth / self.error, self.freedom) if self.error > 0 else 0.0

    def visible(self, level: float) -> float:
        """Return the smallest growth that is seen with probability POWER at this level."""
        if self.error == 0:
            return 0.0
        freedom = round(self.freedom, 1)
        return (
            _cached_quantile(1 - level, freedom) + _cached_quantile(POWER, freedom)
        ) * self.error


@lru_cache(maxsize=4096)
def _cached_quantile(p: float, freedom: float) -> float:
    return t_quantile(p, freedom)


class _TestPair(NamedTuple):
    """Both tests of one series."""

    slope: _Test
    steps: _Test

    @property
    def chance(self) -> float:
        """The probability that either test shows so much growth when there is none."""
        return min(1.0, 2 * min(self.slope.chance, self.steps.chance))

    def visible(self, level: float) -> float:
        """Return the smallest growth that the better test sees at this level."""
        return min(self.slope.visible(level), self.steps.visible(level))


def find_trends(series: Sequence[NDArray[np.float64]], level: float = LEVEL) -> list[Trend | None]:
    """Return the trend of each series, None for one with fewer than MIN_BLOCKS values.

    Blocks without a value are NaN.
    """
    lines = [_fit_line(values) for values in series]
    common = _common_correlation(lines) if len(series) >= MANY_SERIES else None
    pairs: dict[int, _TestPair] = {
        i: _TestPair(_test_slope(line, common), _test_steps(line.values))
        for i, line in enumerate(lines)
        if line is not None
    }
    chances = {i: pair.chance for i, pair in pairs.items()}
    growing = _reject_by_holm(chances, level)
    trends: list[Trend | None] = [None] * len(series)
    for i, pair in pairs.items():
        trends[i] = Trend(
            growth=pair.slope.growth,
            visible=pair.visible(level / (2 * len(pairs))),
            mean=float(series[i][np.isfinite(series[i])].mean()),
            chance=chances[i],
            grows=i in growing,
        )
    return trends


def _reject_by_holm(chances: dict[int, float], level: float) -> set[int]:
    """Return the series whose hypothesis of no growth Holm's procedure rejects."""
    rejected = set()
    for rank, (chance, i) in enumerate(sorted((chance, i) for i, chance in chances.items())):
        if chance > level / (len(chances) - rank):
            break
        rejected.add(i)
    return rejected


class _Line(Struct, frozen=True):
    """A straight line through the blocks of a series, and the noise, which is what a curve leaves.

    Attributes:
        values: The values of the blocks that have one.
        slope: The growth from the first block to the last one.
        spread: The sum of squares of the times, which go from the first block to the last one in a
            length of 1 around their mean.
        noise_square: The sum of squares of the noise.
        correlation: The correlation of neighbours in the noise, None if there is no noise.
    """

    values: NDArray[np.float64]
    slope: float
    spread: float
    noise_square: float
    correlation: float | None


def _fit_line(series: NDArray[np.float64]) -> _Line | None:
    """Return the line through a series, None if too few blocks have a value."""
    blocks = np.flatnonzero(np.isfinite(series))
    count = len(blocks)
    if count < MIN_BLOCKS:
        return None
    values = _without_rounding(series[blocks].astype(float))
    x = (blocks - blocks.mean()) / float(blocks[-1] - blocks[0])
    spread = float((x * x).sum())
    slope = float((x * values).sum()) / spread
    residuals = values - values.mean() - slope * x - _bend(values, x, spread)
    square = float((residuals * residuals).sum())
    if square <= (ROUNDING * float(np.abs(values).max())) ** 2:
        return _Line(values, slope, spread, 0.0, None)
    observed = float((residuals[1:] * residuals[:-1]).sum()) / square
    # Each parameter of the curve hides some 1 / count of the correlation.
    parameters = CURVE_DEGREE + 1
    unbiased = (observed * count + parameters) / max(count - 2 * parameters, 1)
    correlation = min(max(unbiased, 0.0), MAX_CORRELATION)
    return _Line(values, slope, spread, square, correlation)


def _without_rounding(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values, with those that differ from the mean by rounding alone made equal."""
    mean = float(values.mean())
    is_mean = np.abs(values - values.mean()) <= ROUNDING * max(abs(mean), ROUNDING)
    return np.where(is_mean, values[0], values)


def _bend(
    values: NDArray[np.float64], x: NDArray[np.float64], spread: float
) -> NDArray[np.float64]:
    """Return what a parabola by least squares adds to the straight line.

    It is a multiple of the part of x² that no line has; the mean of x is 0. It is computed from
    sums, because the results of `np.polyfit` (LAPACK) differ in their last digits from one
    processor to the next.
    """
    square = x * x
    square = square - square.mean()
    square = square - x * (float((square * x).sum()) / spread)
    bend: NDArray[np.float64] = square * (
        float((square * values).sum()) / float((square * square).sum())
    )
    return bend


def _common_correlation(lines: Sequence[_Line | None]) -> float:
    """Return the mean correlation of neighbours over all series.

    Replicas of one server share their kind of noise. The least correlated of many series looks so
    by chance, and its own correlation would call it growing too often.
    """
    correlations = [
        line.correlation for line in lines if line is not None and line.correlation is not None
    ]
    return float(np.mean(correlations)) if correlations else 0.0


def _test_slope(line: _Line, common_correlation: float | None) -> _Test:
    """Test the slope of a line, whose error the correlation of its noise widens."""
    count = len(line.values)
    noise_freedom = count - CURVE_DEGREE - 1
    if line.correlation is None:
        return _Test(line.slope, 0.0, noise_freedom)
    z = math.atanh(line.correlation) + CORRELATION_ERRORS / math.sqrt(count - 3)
    r = min(max(math.tanh(z), common_correlation or 0.0), MAX_CORRELATION)
    inflation = (1 + r) / (1 - r)
    error = math.sqrt(line.noise_square / noise_freedom / line.spread * inflation)
    # If the correlation is that of many series, only the size of the noise is estimated from this
    # one, which leaves more degrees of freedom.
    if common_correlation is None:
        effective_count = count / inflation
    else:
        effective_count = count * (1 - r * r) / (1 + r * r)
    return _Test(line.slope, error, max(effective_count - CURVE_DEGREE - 1, MIN_FREEDOM))


def _test_steps(values: NDArray[np.float64]) -> _Test:
    """Test the mean change from block to block, whose error is that of a random walk."""
    steps = np.diff(values)
    count = len(steps)
    error = float(steps.std(ddof=1)) * math.sqrt(count)
    return _Test(float(steps.sum()), error, count - 1)
