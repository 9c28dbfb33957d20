"""What samples show of a quantile, a share or a ratio of these: the value, and the interval to hold a promise against.

Pure. Every formula is `uncertainty.py`'s (what a sample is worth in independent requests, Wilson's interval for that).
Here the answer is laid over the sample's own ordered values, and has no bound where the sample has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.stats import intervals
from loadgen.stats.quantiles import index

LEAST_WORTH = 20
Series = Sequence[NDArray[np.float64]]  # one array per run, in order of time


class Bounds(NamedTuple):
    """`low` and `high` enclose the truth with the confidence asked for; infinite where the sample has no bound."""

    value: float
    low: float
    high: float


def share(marks: Series, confidence: float) -> Bounds:
    """Of 0/1 marks: Wilson's interval for the worth of the sample."""
    p = float(np.concatenate(marks).mean())
    return Bounds(p, *intervals.wilson(p, intervals.worth(marks, confidence), confidence))


def above(values: Series, p: float) -> list[NDArray[np.float64]]:
    """1 for each value above the sample's own quantile."""
    ordered = np.sort(np.concatenate(values))
    middle = ordered[index(len(ordered), p)]
    return [(run > middle).astype(np.float64) for run in values]


def known(values: Series, p: float, confidence: float) -> float:
    """How many independent values would show the quantile as surely as the sample does."""
    return intervals.worth(above(values, p), confidence)


def quantile(values: Series, p: float, confidence: float) -> Bounds:
    """`sorted[floor(n * p)]`, and the sample's own values at the ends of the share's interval around p (Woodruff 1952).

    Values may be infinite (requests that failed). An end is infinite where the interval reaches past the sample, and
    where the sample is worth so few independent values that all of them could lie on one side of the quantile: its own
    extreme is then no bound. One worth fewer than LEAST_WORTH shows no more than its own range.
    """
    ordered = np.sort(np.concatenate(values))
    n = len(ordered)
    worth = known(values, p, confidence)
    if worth < LEAST_WORTH:
        worth, first, last = LEAST_WORTH, 0, n - 1
    else:
        low, high = intervals.wilson(p, worth, confidence)
        first, last = math.floor(n * low) or -1, math.ceil(n * high)
    return Bounds(
        float(ordered[index(n, p)]),
        float(ordered[first]) if first >= 0 and worth >= intervals.unseen(1 - p, confidence) else -math.inf,
        float(ordered[last]) if last < n and worth >= intervals.unseen(p, confidence) else math.inf,
    )


def tolerance(values: Series, p: float, confidence: float) -> float:
    """An upper end for a quantile whose tail a few stretches made, and which slow swings move, no queue: what share p
    of batches as these stays below, the logarithms of their own quantiles taken for normal."""
    batches = [batch for run in values for batch in np.array_split(run, intervals.BATCHES) if len(batch)]
    found = np.array([np.sort(batch)[index(len(batch), p)] for batch in batches])
    return math.exp(min(intervals.tolerance(np.log(np.maximum(found, 1.0)), p, confidence), 700.0))


def ratio(over: Bounds, under: Bounds) -> Bounds:
    """`over / under` of two independent positive things."""
    return Bounds(*intervals.quotient(over, under))


def plain(found: intervals.Interval) -> Bounds:
    """An interval of `uncertainty` as one to judge by."""
    return Bounds(found.value, found.low, found.high)
