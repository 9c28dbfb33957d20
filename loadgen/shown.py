"""What samples show of a quantile, a share, a rate or a ratio: the value, and the interval to hold a promise against.

Pure. Requests of a run hang together (they share a queue), so no sample counts at its face: n of them are worth n / d
independent ones, d by the means of batches in order of time (d >= 1). Repeats are further batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.quantiles import index

BATCHES = (10, 20)  # of all runs together; fewer see longer memory, more know their own spread better
Series = Sequence[NDArray[np.float64]]  # one array per run, in order of time


class Interval(NamedTuple):
    """`low` and `high` enclose the truth with the confidence asked for; infinite where the sample has no bound."""

    value: float
    low: float
    high: float


def student(confidence: float, degrees: int) -> float:
    """Two-sided quantile of Student's t: exact for 1 and 2 degrees, else the expansion of Cornish and Fisher (within
    1 % from 3 degrees on; Abramowitz and Stegun 26.7.5)."""
    p = (1 + confidence) / 2
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / degrees**power for power, term in enumerate(terms, 1))


def dependence(marks: Series) -> float:
    """By how much the mean of 0/1 `marks` varies more than that of independent ones: at least 1."""
    everything = np.concatenate(marks)
    p = float(everything.mean())
    if p in (0.0, 1.0):
        return 1.0
    found = 1.0
    for batches in BATCHES:
        length = len(everything) // batches
        if length < 2:
            continue
        means = [float(run[at : at + length].mean()) for run in marks for at in range(0, len(run) - length + 1, length)]
        if len(means) > 2:
            found = max(found, stdev(means) ** 2 * length / (p * (1 - p)))
    return found


def _wilson(p: float, n: float, t: float) -> tuple[float, float]:
    """Wilson's interval of a share p among n independent ones."""
    middle = (p + t * t / (2 * n)) / (1 + t * t / n)
    half = t / (1 + t * t / n) * math.sqrt(p * (1 - p) / n + t * t / (4 * n * n))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def share(marks: Series, confidence: float) -> Interval:
    """Of 0/1 marks: Wilson's interval with the worth of the sample."""
    everything = np.concatenate(marks)
    p = float(everything.mean())
    d = dependence(marks)
    t = student(confidence, BATCHES[0] - 1) if d > 1 else NormalDist().inv_cdf((1 + confidence) / 2)
    return Interval(p, *_wilson(p, len(everything) / d, t))


def faultless(limit: float, confidence: float) -> int:
    """Requests from which `share` shows that less than `limit` miss, when not one does."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    return math.ceil(z * z * (1 - limit) / limit)


def quantile(values: Series, p: float, confidence: float) -> Interval:
    """`sorted[floor(n * p)]`, and the sample's own values at the ends of the share's interval around p (Woodruff).

    Values may be infinite (requests that failed). `high` is infinite where the interval reaches past the sample.
    """
    ordered = np.sort(np.concatenate(values))
    n = len(ordered)
    middle = float(ordered[index(n, p)])
    d = dependence([(run > middle).astype(np.float64) for run in values])
    low, high = _wilson(p, n / d, student(confidence, BATCHES[0] - 1))
    first, last = math.floor(n * low), math.ceil(n * high)
    return Interval(
        middle,
        float(ordered[first]) if n * low >= 1 else -math.inf,
        float(ordered[last]) if last < n else math.inf,
    )


def mean(values: Sequence[float], confidence: float) -> Interval:
    """Of batches or repeats that stand for themselves: Student's interval; without bounds from fewer than two."""
    middle = fmean(values)
    if len(values) < 2:
        return Interval(middle, -math.inf, math.inf)
    half = student(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(middle, middle - half, middle + half)


def ratio(over: Interval, under: Interval) -> Interval:
    """`over / under` of two independent positive things, from the intervals of each (MOVER on the logarithms: Zou and
    Donner 2008)."""
    if not (0 < under.value < math.inf) or not 0 < over.value < math.inf:
        return Interval(math.nan, 0.0, math.inf)
    middle = math.log(over.value / under.value)

    def log(x: float) -> float:
        return math.log(x) if x > 0 else -math.inf

    down = math.hypot(log(over.value) - log(over.low), log(under.high) - log(under.value))
    up = math.hypot(log(over.high) - log(over.value), log(under.value) - log(under.low))
    return Interval(math.exp(middle), math.exp(middle - down), math.exp(min(middle + up, 700.0)))
