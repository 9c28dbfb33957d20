"""Which part of a run shows the state that a promise is about, and how often that part saw it anew.

Pure. A promise is about a load that goes on; a run begins with an empty server and ends with an emptying one. Where the
start-up ends is MSER's to say and how neighbours hang together the correlation's, both in `uncertainty.py`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.stats import intervals
from loadgen.stats.quantiles import index

BATCHES = 60  # in which a start-up is looked for: of 1.7 % of the load each
FEWEST = 5  # stretches of one stay, from which their correlation says anything
SURE = 1.96  # standard errors that a correlation may be larger than it looks


class SteadyPart(NamedTuple):
    """`start` to `end`: places in order of due. `settled` is False where the start-up is not over in the first half."""

    start: int
    end: int
    settled: bool


def part(due_ns: NDArray[np.int64], values: NDArray[np.float64], stay_ns: float) -> SteadyPart:
    """The values after the start-up, less those due within a stay of the end, which met an emptying server.

    Only a start that is lower than the rest is a start-up: a server begins empty. A high one was seen and counts.
    """
    n = len(values)
    if n == 0:
        return SteadyPart(0, 0, True)
    end = int(np.searchsorted(due_ns, due_ns[-1] - stay_ns, "right"))
    if end <= n // 2:
        return SteadyPart(0, n, False)
    series, firsts = _stretches(due_ns[:end], values[:end], (due_ns[end - 1] - due_ns[0]) / BATCHES)
    start = rising(series)
    return SteadyPart(0, end, False) if start is None else SteadyPart(int(firsts[start]), end, True)


def rising(series: NDArray[np.float64]) -> int | None:
    """How many of the first are a start-up: lower than the rest. None: it is not over by the middle."""
    if len(series) < 4:
        return 0
    found = intervals.transient(series)
    begin = len(series) // 2 if found is None else found
    if begin == 0 or series[:begin].mean() >= series[begin:].mean():
        return 0
    return found


def looks(due_ns: NDArray[np.int64], values: NDArray[np.float64], stay_ns: float, errors: float = SURE) -> float:
    """How many independent looks at the server the values are: their time over that for which it remembers.

    That is a stay times the inflation (1 + r) / (1 - r) of stretches of one stay, r taken larger than found by so many
    standard errors (of Fisher's z): a short sample of a slow queue makes r look small. 0 where there
    are too few to tell.
    """
    if len(values) < FEWEST:
        return 0.0
    series, _ = _stretches(due_ns, values, stay_ns)
    if len(series) < FEWEST:
        return 0.0
    r = max(intervals.correlation(series), 0.0)
    r = math.tanh(math.atanh(r) + errors / math.sqrt(len(series) - 3))
    return len(series) * (1 - r) / (1 + r)


def worst(due_ns: NDArray[np.int64], values: NDArray[np.float64], stay_ns: float, p: float) -> float:
    """The highest that the p quantile of a stretch of one stay came to."""
    places = ((due_ns - due_ns[0]) / max(stay_ns, 1.0)).astype(np.int64)
    _, firsts = np.unique(places, return_index=True)
    return max(float(np.sort(one)[index(len(one), p)]) for one in np.split(values, firsts[1:]))


def _stretches(
    due_ns: NDArray[np.int64], values: NDArray[np.float64], width_ns: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Mean rank of the values in each stretch of time that has any, and the place of its first."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # of equal ones the middle
    places = ((due_ns - due_ns[0]) / max(width_ns, 1.0)).astype(np.int64)
    _, firsts, sizes = np.unique(places, return_index=True, return_counts=True)
    return np.add.reduceat(ranks, firsts) / sizes, firsts


__all__ = ["SteadyPart", "looks", "part", "rising", "worst"]
