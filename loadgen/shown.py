"""What samples show of a quantile, a share or a ratio of these: the value, and the interval to hold a promise against.

Pure. How surely a mean is known is `uncertainty.py`'s business alone (batches, because requests share a queue). Here
its answer becomes the worth of a sample in independent requests, and by that an interval of order statistics, which
has no bound where the sample has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen import uncertainty
from loadgen.quantiles import index

LEAST_WORTH = 20
Series = Sequence[NDArray[np.float64]]  # one array per run, in order of time


class Interval(NamedTuple):
    """`low` and `high` enclose the truth with the confidence asked for; infinite where the sample has no bound."""

    value: float
    low: float
    high: float


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


def worth(marks: Series, confidence: float) -> float:
    """How many independent 0/1 marks would show their mean as surely as these do; at most as many as there are.

    From the half widths of the batch means of each run: z^2 p (1 - p) / h^2.
    """
    n = sum(map(len, marks))
    p = float(np.concatenate(marks).mean())
    halves = [len(run) / n * uncertainty.batch_means(run, level=confidence).half_width for run in marks if len(run)]
    half = math.hypot(*halves)
    if half == 0 or p in (0.0, 1.0):
        return float(n)
    return min(float(n), _z(confidence) ** 2 * p * (1 - p) / half**2)


def _wilson(p: float, n: float, z: float) -> tuple[float, float]:
    """Wilson's interval of a share p among n independent ones."""
    if n <= 0:
        return 0.0, 1.0
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def share(marks: Series, confidence: float) -> Interval:
    """Of 0/1 marks: Wilson's interval for the worth of the sample."""
    p = float(np.concatenate(marks).mean())
    return Interval(p, *_wilson(p, worth(marks, confidence), _z(confidence)))


def faultless(limit: float, confidence: float) -> int:
    """Requests from which `share` shows that less than `limit` miss, when not one does."""
    z = _z(confidence)
    return math.ceil(z * z * (1 - limit) / limit)


def unseen(p: float, confidence: float) -> int:
    """Independent looks from which a state that holds for 1 - p of the time would not go unseen, at the confidence of
    one side of a two-sided interval."""
    return math.ceil(math.log((1 - confidence) / 2) / math.log(p))


def above(values: Series, p: float) -> list[NDArray[np.float64]]:
    """1 for each value above the sample's own quantile."""
    ordered = np.sort(np.concatenate(values))
    middle = ordered[index(len(ordered), p)]
    return [(run > middle).astype(np.float64) for run in values]


def quantile(values: Series, p: float, confidence: float) -> Interval:
    """`sorted[floor(n * p)]`, and the sample's own values at the ends of the share's interval around p (Woodruff 1952).

    Values may be infinite (requests that failed). An end is infinite where the interval reaches past the sample. A
    sample worth fewer than LEAST_WORTH independent ones shows no more than its own range.
    """
    ordered = np.sort(np.concatenate(values))
    n = len(ordered)
    known = worth(above(values, p), confidence)
    if known < LEAST_WORTH:
        return Interval(float(ordered[index(n, p)]), float(ordered[0]), float(ordered[-1]))
    low, high = _wilson(p, known, _z(confidence))
    first, last = math.floor(n * low), math.ceil(n * high)
    return Interval(
        float(ordered[index(n, p)]),
        float(ordered[first]) if n * low >= 1 else -math.inf,
        float(ordered[last]) if last < n else math.inf,
    )


def ratio(over: Interval, under: Interval) -> Interval:
    """`over / under` of two independent positive things, from the intervals of each (MOVER on the logarithms: Zou and
    Donner 2008), which need not be symmetric."""
    if not (0 < under.value < math.inf) or not 0 < over.value < math.inf:
        return Interval(math.nan, 0.0, math.inf)
    middle = math.log(over.value / under.value)

    def log(x: float) -> float:
        return math.log(x) if x > 0 else -math.inf

    down = math.hypot(log(over.value) - log(over.low), log(under.high) - log(under.value))
    up = math.hypot(log(over.high) - log(over.value), log(under.value) - log(under.low))
    return Interval(math.exp(middle), math.exp(middle - down), math.exp(middle + up) if up < 700 else math.inf)


def plain(found: uncertainty.Interval) -> Interval:
    """An interval of `uncertainty` as one to judge by."""
    return Interval(found.value, found.low, found.high)
