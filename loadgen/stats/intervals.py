"""The one room for intervals: replications, batch means, block bootstrap, shares, ratios; where a start-up ends.

Pure. Values within a run are correlated (requests share a queue and a batch), so nothing here treats them as coin
flips: a run is cut into batches long against that correlation, or is one value among replications. An interval that
the data cannot support is (-inf, inf), never a guess.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
BATCHES = 20  # more make the batches short against the correlation, fewer the quantile of t large (Schmeiser 1982)
RESAMPLES = 2000

Ends = tuple[float, float, float]  # a value, and the low and high end of its interval


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """`value` with its confidence interval. `count`: how many independent values stand behind it, batches or runs."""

    value: float
    low: float
    high: float
    level: float = LEVEL
    count: int = 0
    method: str = ""

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    @property
    def error(self) -> float:
        """The standard error that half the width is Student's quantile of, at count - 1 degrees of freedom."""
        return self.half_width / t_quantile(0.5 + self.level / 2, self.count - 1)

    def excludes(self, value: float) -> bool:
        """Whether the interval lies wholly on one side of `value`."""
        return value < self.low or value > self.high


# -- Student's t and the normal law ------------------------------------------------------------------------------------


def z_quantile(level: float) -> float:
    """Standard deviations of a normal law that enclose `level` of it."""
    return NormalDist().inv_cdf((1 + level) / 2)


def welch(var_a: float, freedom_a: float, var_b: float, freedom_b: float) -> float:
    """Degrees of freedom of a difference whose two variances are estimates (Welch 1947, Satterthwaite 1946)."""
    total = var_a + var_b
    if total <= 0:
        return freedom_a + freedom_b
    return total**2 / (var_a**2 / freedom_a + var_b**2 / freedom_b)


def t_quantile(p: float, freedom: float) -> float:
    """The p quantile of Student's t, to 1e-10: its distribution is inverted by bisection. 0 < p < 1, freedom > 0."""
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
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
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


def replications(values: ArrayLike, level: float = LEVEL) -> Interval:
    """The mean of independent runs' values, by Student's t. One run has no interval."""
    data = np.asarray(values, float)
    n = len(data)
    if n == 0:
        return Interval(value=math.nan, low=-math.inf, high=math.inf, level=level, count=0, method="replications")
    mean = float(data.mean())
    half = math.inf if n < 2 else t_quantile(0.5 + level / 2, n - 1) * float(data.std(ddof=1)) / math.sqrt(n)
    return Interval(value=mean, low=mean - half, high=mean + half, level=level, count=n, method="replications")


def batch_means(values: ArrayLike, *, batches: int = BATCHES, level: float = LEVEL) -> Interval:
    """The mean of one run's values in their order, by the means of equal batches.

    The values are correlated, their batches nearly not; what correlation of neighbouring batches is left widens the
    interval by sqrt((1 + r) / (1 - r)), r at least 0. Values that do not fill the batches are left out at the start,
    where a transient would be. Fewer than two batches have no interval.
    """
    data = np.asarray(values, float)
    count = min(batches, len(data))
    if count < 2:
        value = float(data.mean()) if len(data) else math.nan
        return Interval(value=value, low=-math.inf, high=math.inf, level=level, count=count, method="batch means")
    size = len(data) // count
    means = data[len(data) - size * count :].reshape(count, size).mean(axis=1)
    found = replications(means, level)
    wider = math.sqrt(inflation(means))
    half = found.half_width * wider
    return Interval(
        value=found.value,
        low=found.value - half,
        high=found.value + half,
        level=level,
        count=count,
        method="batch means",
    )


def tolerance(values: ArrayLike, p: float, level: float = LEVEL) -> float:
    """The upper end for the p quantile of the law that values in order of time come from, if that is a normal one.

    A tolerance limit (Natrella 1963, section 2-2), its n reduced for the correlation of neighbours, and the variance
    raised for what correlated values hide of it. inf where too few are left.
    """
    data = np.asarray(values, float)
    n = len(data)
    if n < 3 or not np.isfinite(data).all():
        return math.inf
    wider = inflation(data)
    worth, sure, reach = n / wider, z_quantile(level), NormalDist().inv_cdf(p)
    a = 1 - sure**2 / (2 * (worth - 1)) if worth > 1 else 0.0
    if a <= 0:
        return math.inf
    b = reach**2 - sure**2 / worth
    factor = (reach + math.sqrt(max(reach**2 - a * b, 0.0))) / a
    return float(data.mean() + factor * math.sqrt(data.var() * n / (n - wider)))


def inflation(values: NDArray[np.float64]) -> float:
    """By how much the correlation of neighbours makes the variance of a mean larger: (1 + r) / (1 - r), at least 1."""
    r = correlation(values)
    return (1 + r) / (1 - r) if r > 0 else 1.0


def correlation(values: NDArray[np.float64]) -> float:
    """Of each value with its successor; at most 0.95, since few values cannot tell more. 0 when all are equal."""
    centred = values - values.mean()
    square = float((centred * centred).sum())
    if square <= 0 or len(values) < 3:
        return 0.0
    return min(0.95, float((centred[1:] * centred[:-1]).sum()) / square)


def block_bootstrap(
    values: ArrayLike,
    statistic: Callable[[NDArray[np.float64]], float],
    rng: np.random.Generator,
    *,
    blocks: int = BATCHES,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> Interval:
    """Any statistic of one run's values in their order (a p99, say), by resampling whole blocks of them (Kuensch 1989).

    Blocks of equal length overlap, so that no place of a cut matters. `count` is the number of blocks that fit.
    """
    data = np.asarray(values, float)
    n = len(data)
    if n < 2 * blocks:
        value = statistic(data) if n else math.nan
        return Interval(value=value, low=-math.inf, high=math.inf, level=level, count=0, method="block bootstrap")
    size = n // blocks
    starts = rng.integers(0, n - size + 1, (resamples, blocks))
    offsets = np.arange(size)
    found = np.array([statistic(data[(row[:, None] + offsets).ravel()]) for row in starts])
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(
        value=statistic(data), low=float(low), high=float(high), level=level, count=blocks, method="block bootstrap"
    )


def ratio(above: ArrayLike, below: ArrayLike, *, paired: bool = False, level: float = LEVEL) -> Interval:
    """mean(above) / mean(below) of independent values each, or of pairs, by Fieller's theorem.

    Where the mean below may be zero the interval is unbounded, as it should be.
    """
    up, down = np.asarray(above, float), np.asarray(below, float)
    n, m = len(up), len(down)
    if n < 2 or m < 2:
        value = float(up.mean() / down.mean()) if n and m and down.mean() else math.nan
        return Interval(value=value, low=-math.inf, high=math.inf, level=level, count=min(n, m), method="ratio")
    if paired and n != m:
        raise ValueError(f"{n} values cannot be paired with {m}")
    a, b = float(up.mean()), float(down.mean())
    a_var, b_var = float(up.var(ddof=1)) / n, float(down.var(ddof=1)) / m
    shared = float(np.cov(up, down, ddof=1)[0, 1]) / n if paired else 0.0
    scale = (a / b) ** 2 if b else 1.0  # for the variance of the difference at the ratio found
    freedom = float(n - 1) if paired else welch(a_var, n - 1, scale * b_var, m - 1)
    t = t_quantile(0.5 + level / 2, freedom)
    # All x with (a - x b)^2 <= t^2 (a_var - 2 x shared + x^2 b_var): a quadratic in x
    q2, q1, q0 = b * b - t * t * b_var, a * b - t * t * shared, a * a - t * t * a_var
    root = q1 * q1 - q2 * q0
    value = a / b if b else math.nan
    if q2 <= 0 or root < 0:
        return Interval(value=value, low=-math.inf, high=math.inf, level=level, count=min(n, m), method="ratio")
    low, high = (q1 - math.sqrt(root)) / q2, (q1 + math.sqrt(root)) / q2
    return Interval(value=value, low=low, high=high, level=level, count=min(n, m), method="ratio")


def quotient(over: Ends, under: Ends) -> Ends:
    """`over / under` of two independent positive things, from the intervals of each (MOVER on the logarithms: Zou and
    Donner 2008), which need not be symmetric."""
    (value, low, high), (base, base_low, base_high) = over, under
    if not (0 < base < math.inf and 0 < value < math.inf):
        return math.nan, 0.0, math.inf

    def log(x: float) -> float:
        return math.log(x) if x > 0 else -math.inf

    middle = math.log(value / base)
    down = math.hypot(log(value) - log(low), log(base_high) - log(base))
    up = math.hypot(log(high) - log(value), log(base) - log(base_low))
    return math.exp(middle), math.exp(middle - down), math.exp(middle + up) if up < 700 else math.inf


# -- shares ------------------------------------------------------------------------------------------------------------


def wilson(p: float, n: float, level: float = LEVEL) -> tuple[float, float]:
    """The interval of a share p among n independent ones (Wilson 1927)."""
    if n <= 0:
        return 0.0, 1.0
    z = z_quantile(level)
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def worth(marks: Sequence[NDArray[np.float64]], level: float = LEVEL) -> float:
    """How many independent 0/1 marks would show their mean as surely as these do, an array per run in order of time; at
    most as many as there are.

    The variance of their batch means over that of independent marks is the size of the clusters in which the rarer
    come. What it is above 1 was itself seen but a few times: it is widened for Student's t of the batches, and by
    (k + 1) / k, k the batches with a rarer mark, since sum(m^2) / sum(m) of k exponential sizes is k / (k + 1) of the
    truth. One bad minute does not say how long bad minutes are.
    """
    n = sum(map(len, marks))
    p = float(np.concatenate(marks).mean())
    if p in (0.0, 1.0):
        return float(n)
    runs = [run for run in marks if len(run)]
    if min(map(len, runs)) < 2:
        return 0.0
    found = [batch_means(run, level=level) for run in runs]
    error = math.hypot(*(len(run) / n * one.error for run, one in zip(runs, found, strict=True)))
    cluster = max(1.0, error**2 * n / (p * (1 - p)))
    seen = sum(_with(run, 1.0 if p <= 0.5 else 0.0) for run in runs)
    t = t_quantile(0.5 + level / 2, sum(one.count - 1 for one in found))
    return n / (1 + (cluster - 1) * (1 + 1 / max(seen, 1)) * (t / z_quantile(level)) ** 2)


def _with(marks: NDArray[np.float64], wanted: float) -> int:
    """The batches that hold a wanted mark."""
    batches = np.arange(len(marks)) * min(BATCHES, len(marks)) // len(marks)
    return len(np.unique(batches[marks == wanted]))


def faultless(limit: float, level: float = LEVEL) -> int:
    """Requests from which Wilson's interval shows that less than `limit` miss, when not one does."""
    z = z_quantile(level)
    return math.ceil(z * z * (1 - limit) / limit)


def unseen(p: float, level: float = LEVEL) -> int:
    """Independent looks from which a state that holds for 1 - p of the time would not go unseen, at the confidence of
    one side of a two-sided interval."""
    return math.ceil(math.log((1 - level) / 2) / math.log(p))


# -- the start-up transient --------------------------------------------------------------------------------------------


def transient(values: ArrayLike) -> int | None:
    """How many of the first values belong to the start-up, by MSER (White 1997): where the rest's mean is surest.

    Looked for in the first half. None when the best place is the half's end: the values have not settled, and nothing
    can be said of a steady state.
    """
    data = np.asarray(values, float)
    n = len(data)
    if n < 4:
        return None
    sums = np.cumsum(data[::-1])[::-1]
    squares = np.cumsum((data * data)[::-1])[::-1]
    left = np.arange(n, 0, -1)
    half = n // 2
    errors = (squares - sums * sums / left)[: half + 1] / (left[: half + 1] ** 2)
    place = int(np.argmin(errors))
    return place if place < half else None


def growth(values: Sequence[float] | NDArray[np.float64], ahead: float, level: float = 0.99) -> tuple[float, float]:
    """By how much evenly spaced values will have grown `ahead` steps after the last one, and the upper bound of that.

    A straight line by least squares; its error is widened for the correlation of the residuals. For fewer than four
    values the bound is inf.
    """
    data = np.asarray(values, float)
    n = len(data)
    if n < 4:
        return 0.0, math.inf
    x = np.arange(n) - (n - 1) / 2
    spread = float((x * x).sum())
    slope = float((x * data).sum()) / spread
    rest = data - data.mean() - slope * x
    error = math.sqrt(float((rest * rest).sum()) / (n - 2) / spread * inflation(rest))
    return slope * ahead, (slope + t_quantile(level, n - 2) * error) * ahead
