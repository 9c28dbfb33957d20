"""A one-sided test for growth over time, of many series at once: a queue that grows is not in steady state.

Pure. Each series holds means of equal blocks of time. Two tests look at each, because no single one sees both kinds of
growth:

- *slope*: a straight line by least squares, against noise that passes. The noise is what a curve leaves, and its error
  is widened by (1 + r) / (1 - r), where r is the correlation of neighbours (of MANY series at least their mean one). It
  sees a small growth in brief noise.
- *steps*: the mean change from block to block, against a random walk, which wanders without growing. It sees a queue
  that grows steadily, whose values are so much alike that the slope's test takes them for few.

Holm's correction, over all series and both tests, keeps the chance of calling any series growing, when none is, at
`level`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from loadgen.core.stats import intervals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LEVEL = 0.01  # chance of calling any of several series growing when none of them grows
POWER = 0.90  # with which the smallest visible growth would have been seen
FEWEST = 8  # blocks that the tests need
CURVE = 2  # degree of the curve whose residuals are the noise: growth may bend, and its bend is no noise
LARGEST_CORRELATION = 0.9  # of residuals: few blocks cannot show more
ERRORS = 0.5  # standard errors (of Fisher's z) by which the correlation may be larger than it looks in so few blocks
FEWEST_FREEDOM = 3.0
MANY = 20  # series whose mean correlation is taken for known


class Trend(Struct, frozen=True):
    """The growth of one series from its first block to its last one, in the unit of the series.

    `level`: the mean of the series. `visible`: the smallest growth that the better of both tests would have seen, with
    probability POWER, at the significance that Bonferroni leaves to each. `chance`: the probability of so much growth
    when there is none, for both tests together. `grows`: by Holm's correction over all series of the call.
    """

    growth: float
    visible: float
    level: float
    chance: float
    grows: bool


def of(series: Sequence[NDArray[np.float64]], level: float = LEVEL) -> list[Trend | None]:
    """The trend of each series; None for one with fewer than FEWEST blocks. Blocks without a value are NaN."""
    lines = [_line(one) for one in series]
    common = _common_correlation(lines) if len(series) >= MANY else None
    pairs = [
        None if line is None else (_slope(line, common), _steps(line.values)) for line in lines
    ]
    count = sum(pair is not None for pair in pairs)
    chances = sorted(
        (min(1.0, 2 * min(test.chance for test in pair)), i) for i, pair in enumerate(pairs) if pair
    )
    growing = set()
    for rank, (chance, i) in enumerate(chances):
        if chance > level / (count - rank):
            break
        growing.add(i)
    chance_of = {i: chance for chance, i in chances}
    trends: list[Trend | None] = []
    for i, pair in enumerate(pairs):
        if pair is None:
            trends.append(None)
            continue
        visible = min(test.visible(level / (2 * count)) for test in pair)
        known = series[i][np.isfinite(series[i])]
        trends.append(
            Trend(pair[0].growth, visible, float(known.mean()), chance_of[i], i in growing)
        )
    return trends


class _Test(Struct, frozen=True):
    growth: float
    error: float
    freedom: float

    @property
    def chance(self) -> float:
        if self.growth <= 0:
            return 1.0
        return (
            1 - intervals.t_below(self.growth / self.error, self.freedom) if self.error > 0 else 0.0
        )

    def visible(self, level: float) -> float:
        if self.error == 0:
            return 0.0
        freedom = round(self.freedom, 1)
        return (_quantile(1 - level, freedom) + _quantile(POWER, freedom)) * self.error


@lru_cache(maxsize=4096)
def _quantile(p: float, freedom: float) -> float:
    return intervals.t_quantile(p, freedom)


class _Line(Struct, frozen=True):
    """The blocks of a series that have a value, the straight line through them, and the noise, which a curve leaves."""

    values: NDArray[np.float64]
    slope: float  # from the first block to the last one
    spread: float  # sum of squares of the places, which go from the first block to the last one in a length of 1
    square: float  # of the noise, summed
    correlation: float | None  # of neighbours in the noise; None: there is no noise


def _line(series: NDArray[np.float64]) -> _Line | None:
    """None where too few blocks have a value."""
    places = np.flatnonzero(np.isfinite(series))
    n = len(places)
    if n < FEWEST:
        return None
    values = series[places].astype(float)
    values = np.where(
        np.abs(values - values.mean()) <= 1e-9 * max(abs(float(values.mean())), 1e-9),
        values[0],
        values,
    )
    x = (places - places.mean()) / float(places[-1] - places[0])
    spread = float((x * x).sum())
    slope = float((x * values).sum()) / spread
    residuals = values - values.mean() - slope * x - _bend(values, x, spread)
    square = float((residuals * residuals).sum())
    if square <= (1e-9 * float(np.abs(values).max())) ** 2:
        return _Line(values, slope, spread, 0.0, None)
    fitted = CURVE + 1  # parameters, each of which hides some 1 / n of the correlation
    r = float((residuals[1:] * residuals[:-1]).sum()) / square
    r = min(max((r * n + fitted) / max(n - 2 * fitted, 1), 0.0), LARGEST_CORRELATION)
    return _Line(values, slope, spread, square, r)


def _bend(
    values: NDArray[np.float64], x: NDArray[np.float64], spread: float
) -> NDArray[np.float64]:
    """What a parabola by least squares adds to the straight line, with the part of x² that no line has (mean of x: 0).

    In sums: those of `np.polyfit` (LAPACK) differ in their last digits from one processor to the next.
    """
    square = x * x
    square = square - square.mean()
    square = square - x * (float((square * x).sum()) / spread)
    bend: NDArray[np.float64] = square * (
        float((square * values).sum()) / float((square * square).sum())
    )
    return bend


def _common_correlation(lines: Sequence[_Line | None]) -> float:
    """The mean correlation of neighbours over all series: replicas of one server share their kind of noise.

    The least correlated of many series looks so by chance. Its own correlation would call it growing too often.
    """
    correlations = [
        line.correlation for line in lines if line is not None and line.correlation is not None
    ]
    return float(np.mean(correlations)) if correlations else 0.0


def _slope(line: _Line, common: float | None) -> _Test:
    n, r = len(line.values), line.correlation
    if r is None:
        return _Test(line.slope, 0.0, n - CURVE - 1)
    r = min(
        max(math.tanh(math.atanh(r) + ERRORS / math.sqrt(n - 3)), common or 0.0),
        LARGEST_CORRELATION,
    )
    inflation = (1 + r) / (1 - r)
    error = math.sqrt(line.square / (n - CURVE - 1) / line.spread * inflation)
    # where the correlation is that of many series, only the size of the noise is guessed from this one
    worth = n / inflation if common is None else n * (1 - r * r) / (1 + r * r)
    return _Test(line.slope, error, max(worth - CURVE - 1, FEWEST_FREEDOM))


def _steps(values: NDArray[np.float64]) -> _Test:
    steps = np.diff(values)
    n = len(steps)
    return _Test(float(steps.sum()), float(steps.std(ddof=1)) * math.sqrt(n), n - 1)
