"""Confidence intervals: replications, batch means, block bootstrap, shares and ratios; also the end of a start-up.

Pure. The values within a run are correlated, because requests share a queue and a batch. So nothing here treats them as
independent: a run is cut into batches that are long compared with the correlation, or counts as one value among
replications. An interval that the data cannot support is (-inf, inf), never a guess.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
BATCHES = 20  # with more, batches are short against the correlation; with fewer, t is large (Schmeiser 1982)


class Interval(msgspec.Struct, frozen=True):
    """`low` and `high` enclose the true value at confidence `level`; infinite where the sample has no bound.

    `count`: the number of independent values (batches or runs) behind it. Unpacks as value, low, high.
    """

    value: float
    low: float
    high: float
    level: float = LEVEL
    count: int = 0
    method: str = ""

    def __iter__(self) -> Iterator[float]:
        return iter((self.value, self.low, self.high))

    def each(self, change: Callable[[float], float]) -> Interval:
        """Value and ends changed alike, by a function that rises."""
        return replace(
            self, **{name: change(getattr(self, name)) for name in ("value", "low", "high")}
        )

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def error(self) -> float:
        """The standard error: half the width divided by Student's quantile at count - 1 degrees of freedom."""
        return self.half_width / t_quantile(0.5 + self.level / 2, self.count - 1)


# -- Student's t and the normal distribution ---------------------------------------------------------------------------


def z_quantile(level: float) -> float:
    """The number of standard deviations around the mean of a normal distribution that enclose the share `level`."""
    return NormalDist().inv_cdf((1 + level) / 2)


_ERFC = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)


def normal_cdf(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """The standard normal distribution, each tail to 1.2e-7 of itself (Numerical Recipes, 2nd edition, 6.2: erfcc)."""
    x = np.abs(z) / math.sqrt(2)
    t = 1 / (1 + 0.5 * x)
    series = np.full_like(t, _ERFC[-1])
    for term in _ERFC[-2::-1]:
        np.add(np.multiply(series, t, out=series), term, out=series)  # in place: twice as fast
    tail = 0.5 * t * np.exp(np.subtract(series, np.multiply(x, x, out=x), out=series), out=series)
    return np.where(z >= 0, 1 - tail, tail)


def welch(var_a: float, freedom_a: float, var_b: float, freedom_b: float) -> float:
    """Degrees of freedom of a difference whose two variances are both estimates (Welch 1947, Satterthwaite 1946)."""
    total = var_a + var_b
    if total <= 0:
        return freedom_a + freedom_b
    return total**2 / (var_a**2 / freedom_a + var_b**2 / freedom_b)


@lru_cache(4096)
def t_quantile(p: float, freedom: float) -> float:
    """The p quantile of Student's t, to 1e-10, by bisection of the distribution function. 0 < p < 1, freedom > 0."""
    if p < 0.5:
        return -t_quantile(1 - p, freedom)
    low, high = 0.0, 1.0
    while t_below(high, freedom) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if high - low <= 1e-12 * max(1.0, middle):
            break
        low, high = (middle, high) if t_below(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def t_below(t: float, freedom: float) -> float:
    """P(T <= t) of Student's t: half the regularized incomplete beta function of freedom / (freedom + t^2)."""
    tail = _beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2
    return 1 - tail if t > 0 else tail


def _beta(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22, Lentz's method)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    front = (
        math.exp(
            math.lgamma(a + b)
            - math.lgamma(a)
            - math.lgamma(b)
            + a * math.log(x)
            + b * math.log1p(-x)
        )
        / a
    )
    tiny = 1e-300
    c, d = 1.0, 1 / max(tiny, 1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction


# -- intervals ---------------------------------------------------------------------------------------------------------


def _symmetric(value: float, half: float, count: int, method: str, level: float) -> Interval:
    """`value` with as much on either side; a `half` of inf is no bound, also around a value that is not known."""
    low, high = (value - half, value + half) if half < math.inf else (-math.inf, math.inf)
    return Interval(value, low, high, level, count, method)


def replications(values: ArrayLike, level: float = LEVEL) -> Interval:
    """The mean over independent runs, with an interval by Student's t. With one run the interval is unbounded."""
    data = np.asarray(values, float)
    n = len(data)
    mean = float(data.mean()) if n else math.nan
    half = (
        math.inf
        if n < 2
        else t_quantile(0.5 + level / 2, n - 1) * float(data.std(ddof=1)) / math.sqrt(n)
    )
    return _symmetric(mean, half, n, "replications", level)


def batch_means(values: ArrayLike, *, batches: int = BATCHES, level: float = LEVEL) -> Interval:
    """The mean of the values of one run, in their order, with an interval from the means of equal batches.

    The values are correlated; the batch means hardly are. The correlation r of neighbouring batches that remains widens
    the interval by sqrt((1 + r) / (1 - r)), with r at least 0. Values that do not fill a batch are left out at the
    start, where a transient would be. With fewer than two batches the interval is unbounded.
    """
    data = np.asarray(values, float)
    count = min(batches, len(data))
    if count < 2:
        return _symmetric(
            float(data.mean()) if len(data) else math.nan, math.inf, count, "batch means", level
        )
    size = len(data) // count
    means = data[len(data) - size * count :].reshape(count, size).mean(axis=1)
    unwidened = replications(means, level)
    half = unwidened.half_width * math.sqrt(inflation(means))
    return _symmetric(unwidened.value, half, count, "batch means", level)


def tolerance(values: ArrayLike, p: float, level: float = LEVEL) -> float:
    """An upper limit for the p quantile of the distribution that these values come from, if that is a normal one.

    `values` are in order of time. This is a tolerance limit (Natrella 1963, section 2-2), with n reduced for the
    correlation of neighbours, and the variance increased by what correlated values hide of it. inf with too few values.
    """
    data = np.asarray(values, float)
    n = len(data)
    if n < 3 or not np.isfinite(data).all():
        return math.inf
    variance_inflation = inflation(data)
    effective_n, z_level, z_p = n / variance_inflation, z_quantile(level), NormalDist().inv_cdf(p)
    a = 1 - z_level**2 / (2 * (effective_n - 1)) if effective_n > 1 else 0.0
    if a <= 0:
        return math.inf
    b = z_p**2 - z_level**2 / effective_n
    factor = (z_p + math.sqrt(max(z_p**2 - a * b, 0.0))) / a
    return float(data.mean() + factor * math.sqrt(data.var() * n / (n - variance_inflation)))


def inflation(values: NDArray[np.float64]) -> float:
    """The factor by which the correlation r of neighbours increases the variance of a mean: (1 + r) / (1 - r), at least
    1.
    """
    r = correlation(values)
    return (1 + r) / (1 - r) if r > 0 else 1.0


def correlation(values: NDArray[np.float64]) -> float:
    """The correlation of each value with its successor; 0 when all values are equal.

    At most 0.95, since few values cannot show more.
    """
    centred = values - values.mean()
    square = float((centred * centred).sum())
    if square <= 0 or len(values) < 3:
        return 0.0
    return min(0.95, float((centred[1:] * centred[:-1]).sum()) / square)


def ratio(
    above: ArrayLike, below: ArrayLike, *, paired: bool = False, level: float = LEVEL
) -> Interval:
    """mean(above) / mean(below) of independent samples, or of pairs, with an interval by Fieller's theorem.

    The interval is unbounded where the mean of `below` may be zero. Raises ValueError for pairs of unequal number.
    """
    numerators, denominators = np.asarray(above, float), np.asarray(below, float)
    n, m = len(numerators), len(denominators)
    if n < 2 or m < 2:
        value = (
            float(numerators.mean() / denominators.mean())
            if n and m and denominators.mean()
            else math.nan
        )
        return _symmetric(value, math.inf, min(n, m), "ratio", level)
    if paired and n != m:
        raise ValueError(f"{n} values cannot be paired with {m}")
    a, b = float(numerators.mean()), float(denominators.mean())
    a_var, b_var = float(numerators.var(ddof=1)) / n, float(denominators.var(ddof=1)) / m
    shared = float(((numerators - a) * (denominators - b)).sum()) / (n - 1) / n if paired else 0.0
    scale = (a / b) ** 2 if b else 1.0  # for the variance of the difference at the estimated ratio
    freedom = float(n - 1) if paired else welch(a_var, n - 1, scale * b_var, m - 1)
    t = t_quantile(0.5 + level / 2, freedom)
    # All x with (a - x b)^2 <= t^2 (a_var - 2 x shared + x^2 b_var): a quadratic in x
    q2, q1, q0 = b * b - t * t * b_var, a * b - t * t * shared, a * a - t * t * a_var
    root = q1 * q1 - q2 * q0
    value = a / b if b else math.nan
    if q2 <= 0 or root < 0:
        return _symmetric(value, math.inf, min(n, m), "ratio", level)
    low, high = (q1 - math.sqrt(root)) / q2, (q1 + math.sqrt(root)) / q2
    return Interval(value, low, high, level, min(n, m), "ratio")


def quotient(over: Interval, under: Interval) -> Interval:
    """`over / under` of two independent positive figures, from the interval of each, which need not be symmetric.

    MOVER on the logarithms (Zou and Donner 2008).
    """
    (value, low, high), (base, base_low, base_high) = over, under
    if not (0 < base < math.inf and 0 < value < math.inf):
        return Interval(math.nan, 0.0, math.inf, over.level)

    def log(x: float) -> float:
        return math.log(x) if x > 0 else -math.inf

    log_ratio = math.log(value / base)
    below = math.hypot(log(value) - log(low), log(base_high) - log(base))
    above = math.hypot(log(high) - log(value), log(base) - log(base_low))
    high_end = math.exp(log_ratio + above) if above < 700 else math.inf
    return Interval(math.exp(log_ratio), math.exp(log_ratio - below), high_end, over.level)


# -- shares ------------------------------------------------------------------------------------------------------------


def wilson(p: float, n: float, level: float = LEVEL) -> tuple[float, float]:
    """The interval of a share p of n independent trials (Wilson 1927)."""
    if n <= 0:
        return 0.0, 1.0
    z = z_quantile(level)
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def at_next_look(level: float) -> float:
    """The confidence that the next look at growing data is judged at, after one at `level`: see contracts.verdict."""
    return 1 - (1 - level) / 2


def unseen(p: float, level: float = LEVEL) -> int:
    """The number of independent observations from which a state that holds with probability 1 - p would be observed.

    The confidence is that of one side of a two-sided interval of this level.
    """
    return math.ceil(math.log((1 - level) / 2) / math.log(p))


def recurrence(length_s: float, level: float = LEVEL) -> float:
    """The longest mean time between two occurrences of something, so that `length_s` of load would have met it.

    What comes at random, every so many seconds on average, stays out of a load with probability exp(-length / mean).
    The confidence is that of one side of a two-sided interval of this level.
    """
    return length_s / math.log(2 / (1 - level))


def length_for(recurrence_s: float, level: float = LEVEL) -> float:
    """The length of load that meets what comes every `recurrence_s` on average: the inverse of `recurrence`."""
    return recurrence_s * math.log(2 / (1 - level))


def widened(interval: Interval, per_run: Sequence[float], *, log: bool = False) -> Interval:
    """An interval by the times within runs, widened to at least the interval of the runs among each other.

    `per_run`: the figure of each run. By Student's t around `interval`'s value, on logarithms where `log`. Unchanged
    with one run, or where a run has no finite figure.
    """
    value, low, high = interval
    data = np.asarray(per_run, float)
    if (
        len(data) < 2
        or not np.isfinite(data).all()
        or not math.isfinite(value)
        or (log and min(*data, value) <= 0)
    ):
        return interval
    half = replications(np.log(data) if log else data, interval.level).half_width
    below, above = value - half, value + half
    if log:
        below, above = value * math.exp(-half), value * math.exp(min(half, 700.0))
    return replace(interval, low=min(low, below), high=max(high, above))


# -- the start-up transient --------------------------------------------------------------------------------------------


def transient(values: ArrayLike) -> int | None:
    """The number of first values that belong to the start-up, by MSER (White 1997).

    That is the cut that minimizes the standard error of the mean of the rest. Only the first half is examined. None
    when the best cut is the end of that half: then the values have not settled, and nothing can be said about a steady
    state.
    """
    data = np.asarray(values, float)
    n = len(data)
    if n < 4:
        return None
    sums = np.cumsum(data[::-1])[::-1]
    squares = np.cumsum((data * data)[::-1])[::-1]
    remaining = np.arange(n, 0, -1)
    half = n // 2
    errors = (squares - sums * sums / remaining)[: half + 1] / (remaining[: half + 1] ** 2)
    place = int(np.argmin(errors))
    return place if place < half else None


def growth(
    values: Sequence[float] | NDArray[np.float64], ahead: float, level: float = 0.99
) -> tuple[float, float]:
    """The growth of evenly spaced values up to `ahead` steps after the last one, and the upper bound of that growth.

    A straight line by least squares; its error is widened for the correlation of the residuals. With fewer than four
    values the bound is inf.
    """
    data = np.asarray(values, float)
    n = len(data)
    if n < 4:
        return 0.0, math.inf
    x = np.arange(n) - (n - 1) / 2
    spread = float((x * x).sum())
    slope = float((x * data).sum()) / spread
    residuals = data - data.mean() - slope * x
    error = math.sqrt(
        float((residuals * residuals).sum()) / (n - 2) / spread * inflation(residuals)
    )
    return slope * ahead, (slope + t_quantile(level, n - 2) * error) * ahead
