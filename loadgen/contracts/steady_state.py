"""The part of a run that is in steady state, and how many independent observations of the server that part holds.

Pure. A promise is about a load that continues, but a run begins with an empty server and ends with one that empties.
MSER finds the end of the start-up, and the correlation of neighbours gives the number of independent observations; both
are in `core/stats/intervals.py`.
"""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.stats import intervals
from loadgen.core.stats.quantiles import element

BATCHES = 60  # batches for finding the start-up: 1.7 % of the load each
FEWEST = 5  # fewest intervals of one stay for which their correlation means anything
MOST_STAYS = 1_000_000  # of a load that is planned
SURE = 1.96  # standard errors by which a correlation may be larger than estimated


class SteadyPart(NamedTuple):
    """The steady part: indices `start` to `end` in order of due instant.

    `settled` is False where the start-up is not over in the first half.
    """

    start: int
    end: int
    settled: bool


def part(due_ns: NDArray[np.int64], values: NDArray[np.float64], stay_ns: float) -> SteadyPart:
    """The steady part of the values: without the start-up, and without those due within one stay of the end.

    `stay_ns`: how long a request stays in the server. Requests due near the end met a server that empties. A start
    counts as start-up only when it is lower than the rest, since a server begins empty; a high start was real and
    counts.
    """
    n = len(values)
    if n == 0:
        return SteadyPart(0, 0, True)
    end = int(np.searchsorted(due_ns, due_ns[-1] - stay_ns, "right"))
    if end <= n // 2:
        return SteadyPart(0, n, False)
    series, firsts = _stretches(
        due_ns[:end], _ranks(values[:end]), (due_ns[end - 1] - due_ns[0]) / BATCHES
    )
    start = rising(series)
    return SteadyPart(0, end, False) if start is None else SteadyPart(int(firsts[start]), end, True)


def rising(series: NDArray[np.float64]) -> int | None:
    """How many of the first elements are a start-up, lower than the rest; None when it is not over by the middle."""
    if len(series) < 4:
        return 0
    transient_end = intervals.transient(series)
    begin = len(series) // 2 if transient_end is None else transient_end
    if begin == 0 or series[:begin].mean() >= series[begin:].mean():
        return 0
    return transient_end


def looks(
    due_ns: NDArray[np.int64], values: NDArray[np.float64], stay_ns: float, errors: float = SURE
) -> float:
    """The number of independent observations of the server that the values are.

    That is their time divided by the time for which the server remembers: one stay times the inflation (1 + r) / (1 -
    r), where r is the correlation of intervals of one stay. r is taken larger than estimated by `errors` standard
    errors (of Fisher's z), because a short sample of a slow queue makes r look small. 0 with too few values.
    """
    return _looks(due_ns, _ranks(values), stay_ns, errors)


def _looks(
    due_ns: NDArray[np.int64], ranks: NDArray[np.float64], stay_ns: float, errors: float
) -> float:
    count, r = _of_stays(due_ns, ranks, stay_ns)
    return 0.0 if r is None else _worth(count, r, errors)


def length_for(
    looks: float,
    due_ns: NDArray[np.int64],
    values: NDArray[np.float64],
    stay_ns: float,
    errors: float = SURE,
) -> float:
    """The ns of load in one piece that are worth so many `looks`, if it correlates as these values do.

    With too few values to know, as if nothing correlated: so the least that it can be.
    """
    _, r = _of_stays(due_ns, _ranks(values), stay_ns)
    return stay_ns * bisect.bisect_left(
        range(MOST_STAYS), looks, FEWEST, key=lambda n: _worth(n, r or 0.0, errors)
    )


def _of_stays(
    due_ns: NDArray[np.int64], ranks: NDArray[np.float64], stay_ns: float
) -> tuple[int, float | None]:
    """How many intervals of one stay have values, and their correlation; None with too few of them."""
    if len(ranks) < FEWEST:
        return 0, None
    series, _ = _stretches(due_ns, ranks, stay_ns)
    return len(series), max(intervals.correlation(series), 0.0) if len(series) >= FEWEST else None


def _worth(count: int, r: float, errors: float) -> float:
    """What so many intervals of one stay are worth, each correlated with the next by `r`, give or take `errors`."""
    r = math.tanh(math.atanh(r) + errors / math.sqrt(count - 3))
    return count * (1 - r) / (1 + r)


def slow_looks(due_ns: NDArray[np.int64], values: NDArray[np.float64], stay_ns: float) -> float:
    """The number of independent observations of the server, also of one that changes over many stays.

    As `looks`, for intervals of one stay, of two, of four ... up to a twentieth of the load: what wanders for minutes
    is hardly seen between one stay and the next. The least of them.
    """
    ranks = _ranks(values)
    count, width = _looks(due_ns, ranks, stay_ns, errors=0.0), stay_ns
    while count and (due_ns[-1] - due_ns[0]) / (2 * width) >= intervals.BATCHES:
        width *= 2
        count = min(count, _looks(due_ns, ranks, width, errors=0.0))
    return count


def worst(
    due_ns: NDArray[np.int64], values: NDArray[np.float64], stay_ns: float, p: float
) -> float:
    """The largest p quantile of any interval of one stay."""
    places = ((due_ns - due_ns[0]) / max(stay_ns, 1.0)).astype(np.int64)
    _, firsts = np.unique(places, return_index=True)
    return max(element(stay_values, p) for stay_values in np.split(values, firsts[1:]))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The place of each value among all; equal values get their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


def _stretches(
    due_ns: NDArray[np.int64], ranks: NDArray[np.float64], width_ns: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Per interval of time that has values: their mean rank, and the index of the first of them."""
    places = ((due_ns - due_ns[0]) / max(width_ns, 1.0)).astype(np.int64)
    firsts = np.flatnonzero(np.diff(places, prepend=-1))
    return np.add.reduceat(ranks, firsts) / np.diff(firsts, append=len(ranks)), firsts
