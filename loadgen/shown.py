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

from loadgen import uncertainty
from loadgen.quantiles import index

LEAST_WORTH = 20
Series = Sequence[NDArray[np.float64]]  # one array per run, in order of time


class Interval(NamedTuple):
    """`low` and `high` enclose the truth with the confidence asked for; infinite where the sample has no bound."""

    value: float
    low: float
    high: float


def share(marks: Series, confidence: float) -> Interval:
    """Of 0/1 marks: Wilson's interval for the worth of the sample."""
    p = float(np.concatenate(marks).mean())
    return Interval(p, *uncertainty.wilson(p, uncertainty.worth(marks, confidence), confidence))


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
    known = uncertainty.worth(above(values, p), confidence)
    if known < LEAST_WORTH:
        return Interval(float(ordered[index(n, p)]), float(ordered[0]), float(ordered[-1]))
    low, high = uncertainty.wilson(p, known, confidence)
    first, last = math.floor(n * low), math.ceil(n * high)
    return Interval(
        float(ordered[index(n, p)]),
        float(ordered[first]) if n * low >= 1 else -math.inf,
        float(ordered[last]) if last < n else math.inf,
    )


def ratio(over: Interval, under: Interval) -> Interval:
    """`over / under` of two independent positive things."""
    return Interval(*uncertainty.quotient(over, under))


def plain(found: uncertainty.Interval) -> Interval:
    """An interval of `uncertainty` as one to judge by."""
    return Interval(found.value, found.low, found.high)
