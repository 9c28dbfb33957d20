"""Quantiles, shares and their ratios estimated from samples, with the interval to compare a limit with.

Pure. The formulas are those of `core.stats.intervals` (effective sample size, Wilson's interval). This module maps them
to the ordered values of the sample. A bound is infinite where the sample has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import Interval
from loadgen.core.stats.quantiles import element, index

LEAST_WORTH = 20  # effective sample size below which the range of the sample is its interval
OUTLYING = 5.0  # standard deviations by which a batch of time is another state of the server
Series = Sequence[NDArray[np.float64]]  # one array per run, in order of time


def worth(marks: Series, level: float = intervals.LEVEL) -> float:
    """The effective sample size of 0/1 marks: how many independent marks would show the mean with the same certainty.

    `marks`: one array per run, in order of time. The result is at most the number of marks. The variance of the batch
    means, divided by the variance that independent marks would have, is the size of the clusters in which the rarer
    mark comes. The excess of this size over 1 is itself an estimate from a few clusters. So it is increased for
    Student's t of the batches, and by (k + 1) / k, where k is the number of batches with a rarer mark, since sum(m^2) /
    sum(m) of k exponential sizes is k / (k + 1) of the true value. One bad minute does not say how long bad minutes
    are.
    """
    n = sum(map(len, marks))
    p = float(np.concatenate(marks).mean())
    if p in (0.0, 1.0):
        return float(n)
    runs = [run for run in marks if len(run)]
    if min(map(len, runs)) < 2:
        return 0.0
    run_intervals = [intervals.batch_means(run, level=level) for run in runs]
    error = math.hypot(
        *(
            len(run) / n * run_interval.error
            for run, run_interval in zip(runs, run_intervals, strict=True)
        )
    )
    cluster_size = max(1.0, error**2 * n / (p * (1 - p)))
    batches_hit = sum(_batches_with(run, 1.0 if p <= 0.5 else 0.0) for run in runs)
    t = intervals.t_quantile(
        0.5 + level / 2, sum(run_interval.count - 1 for run_interval in run_intervals)
    )
    return n / (
        1
        + (cluster_size - 1)
        * (1 + 1 / max(batches_hit, 1))
        * (t / intervals.z_quantile(level)) ** 2
    )


def _batches_with(marks: NDArray[np.float64], wanted: float) -> int:
    """The number of batches that hold a wanted mark."""
    batches = np.arange(len(marks)) * min(intervals.BATCHES, len(marks)) // len(marks)
    return len(np.unique(batches[marks == wanted]))


def share(marks: Series, confidence: float) -> Interval:
    """The share of 1 among 0/1 marks, with Wilson's interval at the effective sample size."""
    p = float(np.concatenate(marks).mean())
    return Interval(p, *intervals.wilson(p, worth(marks, confidence), confidence), confidence)


def above(values: Series, p: float) -> list[NDArray[np.float64]]:
    """Marks of the values: 1 for each value above the p quantile of the whole sample, else 0."""
    quantile_value = element(np.concatenate(values), p)
    return [(run > quantile_value).astype(np.float64) for run in values]


def known(values: Series, p: float, confidence: float) -> float:
    """The effective sample size for a quantile: the number of independent values that would be as certain."""
    return worth(above(values, p), confidence)


def quantile(values: Series, p: float, confidence: float) -> Interval:
    """The quantile `sorted[floor(n * p)]` with its interval (Woodruff 1952).

    The bounds are the sample's own values at the ends of Wilson's interval around p. Values may be infinite (failed
    requests). A bound is infinite where the interval reaches past the sample. It is also infinite where the effective
    sample size is so small that all values could lie on one side of the quantile: then the extreme of the sample is no
    bound. A sample with an effective size below LEAST_WORTH shows no more than its own range.
    """
    ordered = np.sort(np.concatenate(values))
    n = len(ordered)
    worth = known(values, p, confidence)
    if worth < LEAST_WORTH:
        worth, first, last = LEAST_WORTH, 0, n - 1
    else:
        low, high = intervals.wilson(p, worth, confidence)
        first, last = math.floor(n * low) or -1, math.ceil(n * high)
    return Interval(
        float(ordered[index(n, p)]),
        float(ordered[first])
        if first >= 0 and worth >= intervals.unseen(1 - p, confidence)
        else -math.inf,
        float(ordered[last]) if last < n and worth >= intervals.unseen(p, confidence) else math.inf,
        confidence,
    )


def tolerance(values: Series, p: float, confidence: float) -> float:
    """An upper bound for a quantile whose tail comes from a few intervals of time, through slow fluctuations and not a
    queue.

    The share p of batches like these stays below it, if the logarithms of their own quantiles are normally distributed.
    It is at least the worst of them: of a server that switches between two speeds the logarithms are not normal.
    """
    batch_quantiles = _batch_quantiles(values, p)
    limit = math.exp(
        min(intervals.tolerance(np.log(np.maximum(batch_quantiles, 1.0)), p, confidence), 700.0)
    )
    finite = batch_quantiles[np.isfinite(batch_quantiles)]
    return max(limit, float(finite.max(initial=0.0)))


def _batch_quantiles(values: Series, p: float) -> NDArray[np.float64]:
    batches = [
        batch for run in values for batch in np.array_split(run, intervals.BATCHES) if len(batch)
    ]
    return np.array([element(batch, p) for batch in batches])


def other_state(values: Series, p: float) -> float:
    """The highest quantile of a batch of time, where it is far off those of the other batches; else 0.

    Such a batch met another state of the server, once. How often it comes back is known only by its count, so it may
    hold more than the share 1 - p, however many requests there are. Far: OUTLYING times the spread, by medians.
    """
    logs = np.log(np.maximum(_batch_quantiles(values, p), 1.0))
    finite = logs[np.isfinite(logs)]
    if len(finite) < LEAST_WORTH or len(finite) < len(logs):
        return 0.0
    middle = float(np.median(finite))
    spread = (
        float(np.median(np.abs(finite - middle))) * 1.4826
    )  # the standard deviation, if they are normal
    worst = float(finite.max())
    return math.exp(worst) if worst - middle > OUTLYING * spread else 0.0
