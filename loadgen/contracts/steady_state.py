"""Find the part of a run that is in steady state, and its effective sample size.

A contract is about a load that continues, but a run begins with an empty server and ends with a
server that empties. The MSER rule (White 1997) finds the end of the start-up. The correlation of
values that are neighbours in time gives the effective sample size: the number of independent values
that would show as much. Both computations are in `core/stats/intervals.py`.

Values are replaced by their ranks, so that infinite values (failed requests) and heavy tails do no
harm. The residence time of a request, a unit of time in this module, is the time from its scheduled
start to its end. This module is pure.
"""

from __future__ import annotations

import bisect
import math
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.stats import intervals
from loadgen.core.stats.quantiles import quantile_of

STARTUP_BATCHES = 60
"""The number of equal intervals of a load among which the end of the start-up is searched.

Each is 1.7 % of the load, which is how precisely the end is found.
"""

MIN_INTERVALS = 5
"""The number of intervals from which the correlation of neighbours can be estimated."""

MAX_PLANNED_INTERVALS = 1_000_000
"""The longest load that is planned, in residence times. It bounds a search and is never reached."""

UPPER_CORRELATION_Z = 1.96
"""Standard errors by which a correlation is assumed to be larger than estimated.

It is then the upper end of the correlation's 95 % confidence interval.
"""

MIN_SERIES_LENGTH = 4
"""The number of values from which a start-up can be found."""


class TimedValues(NamedTuple):
    """One value per request, in order of the scheduled times of the requests."""

    due_ns: NDArray[np.int64]
    values: NDArray[np.float64]

    def slice(self, start: int, end: int) -> TimedValues:
        """Return the values from index `start` to index `end` (exclusive)."""
        return TimedValues(self.due_ns[start:end], self.values[start:end])


class SteadyRange(NamedTuple):
    """The range of the values of a run that is in steady state.

    Attributes:
        start: The index of the first value in steady state.
        end: The index after the last one.
        has_steady_state: False if the start-up did not end in the first half of the load.
    """

    start: int
    end: int
    has_steady_state: bool


class IntervalMeans(NamedTuple):
    """The mean rank of the values in each interval of time, without intervals that have no values.

    Attributes:
        means: The mean rank of the values in each interval.
        first_indexes: The index of the first value in each interval.
    """

    means: NDArray[np.float64]
    first_indexes: NDArray[np.int64]


class SeriesCorrelation(NamedTuple):
    """How strongly the intervals of a run are correlated with the intervals next to them.

    Attributes:
        interval_count: The number of intervals of time that have values.
        correlation: The correlation of the mean rank of each interval with that of the next one.
            None if there are too few intervals to estimate it.
    """

    interval_count: int
    correlation: float | None


def find_steady_range(samples: TimedValues, residence_ns: float) -> SteadyRange:
    """Return the range of the samples without the start-up and without the end of the load.

    Requests that are scheduled within one residence time of the end are left out, because the
    server empties while it serves them. Values at the beginning count as start-up only if they are
    lower than the rest, because a server begins empty and therefore fast. A slow beginning, such as
    loading of weights, is a property of the server and is kept.

    The end of the start-up is searched in the mean ranks of short intervals of time, because ranks
    are not dominated by a few slow requests.

    Args:
        samples: The values of one run.
        residence_ns: The mean residence time of a request: from its scheduled start to its end.
    """
    due_ns = samples.due_ns
    count = len(due_ns)
    if count == 0:
        return SteadyRange(0, 0, has_steady_state=True)
    last_steady_due_ns = due_ns[-1] - residence_ns
    end = int(np.searchsorted(due_ns, last_steady_due_ns, "right"))
    if end <= count // 2:
        # The load lasts less than two residence times, so most requests met the emptying server.
        return SteadyRange(0, count, has_steady_state=False)
    interval_ns = (due_ns[end - 1] - due_ns[0]) / STARTUP_BATCHES
    ranks = _compute_ranks(samples.values[:end])
    intervals_of_load = _average_ranks_by_interval(due_ns[:end], ranks, interval_ns)
    startup_intervals = count_startup_values(intervals_of_load.means)
    if startup_intervals is None:
        return SteadyRange(0, end, has_steady_state=False)
    start = int(intervals_of_load.first_indexes[startup_intervals])
    return SteadyRange(start, end, has_steady_state=True)


def count_startup_values(series: NDArray[np.float64]) -> int | None:
    """Return how many of the first values of a series belong to a start-up, by the MSER rule.

    A start-up is lower than the rest, because a server begins empty. If the first values are
    higher, they are no start-up and the result is 0. Return None if the values are still rising in
    the middle of the series, so that the start-up has no end that could be found.
    """
    if len(series) < MIN_SERIES_LENGTH:
        return 0
    startup_end = intervals.startup_length(series)
    first_half = len(series) // 2
    compared_count = first_half if startup_end is None else startup_end
    if compared_count == 0:
        return 0
    is_start_lower = series[:compared_count].mean() < series[compared_count:].mean()
    return startup_end if is_start_lower else 0


def estimate_queue_sample_size(
    samples: TimedValues, residence_ns: float, *, correlation_z: float = UPPER_CORRELATION_Z
) -> float:
    """Return the effective sample size of the values of a run, counted in states of the queue.

    Requests within one residence time meet the same queue, so the load is cut into intervals of
    that length. The number of intervals is divided by (1 + r) / (1 - r), where r is the correlation
    of neighbouring intervals: the usual formula for a series in which each value depends on the one
    before it (AR(1)). Return 0 if there are too few intervals to estimate r.

    Args:
        samples: The values of one run.
        residence_ns: The mean residence time of a request.
        correlation_z: Standard errors (of Fisher's z) by which r is assumed to be larger than
            estimated, because a short sample of a slow queue makes r look small.
    """
    ranks = _compute_ranks(samples.values)
    return _estimate_sample_size(samples.due_ns, ranks, residence_ns, correlation_z)


def estimate_server_sample_size(samples: TimedValues, residence_ns: float) -> float:
    """Return the effective sample size for a server whose speed may change over minutes.

    Such a change is hardly visible between one residence time of a request and the next, but it
    correlates longer intervals of time. So the sample size is estimated for intervals of one, two,
    four, ... residence times, and the smallest is returned. The longest intervals are those of
    which the load still has `intervals.BATCHES`.

    Args:
        samples: The values of one run.
        residence_ns: The mean residence time of a request.
    """
    ranks = _compute_ranks(samples.values)
    interval_ns = residence_ns
    smallest_size = _estimate_sample_size(samples.due_ns, ranks, interval_ns, correlation_z=0.0)
    if smallest_size == 0:
        return 0.0  # too few values
    longest_interval_ns = _compute_duration_ns(samples) / intervals.BATCHES
    while 2 * interval_ns <= longest_interval_ns:
        interval_ns *= 2
        sample_size = _estimate_sample_size(samples.due_ns, ranks, interval_ns, correlation_z=0.0)
        smallest_size = min(smallest_size, sample_size)
    return smallest_size


def _compute_duration_ns(samples: TimedValues) -> float:
    """Return the time from the first to the last scheduled request."""
    return float(samples.due_ns[-1] - samples.due_ns[0])


def compute_load_for_sample_size_ns(
    sample_size: float, samples: TimedValues, residence_ns: float
) -> float:
    """Return how long one run must be to have this effective sample size, in ns.

    This is used to recommend a longer load. The load is assumed to be as correlated as these
    samples. With too few samples to estimate the correlation it is assumed to be 0, so the result
    is then a lower bound.

    Args:
        sample_size: The number of independent states of the queue that are needed.
        samples: The values of a run with this load.
        residence_ns: The mean residence time of a request.
    """
    ranks = _compute_ranks(samples.values)
    correlation = _estimate_correlation(samples.due_ns, ranks, residence_ns).correlation
    if correlation is None:
        correlation = 0.0
    compute_size = partial(
        _compute_effective_size, correlation=correlation, correlation_z=UPPER_CORRELATION_Z
    )
    # The effective size grows with the number of intervals, so the least number that is enough is
    # found by bisection.
    interval_count = bisect.bisect_left(
        range(MAX_PLANNED_INTERVALS), sample_size, lo=MIN_INTERVALS, key=compute_size
    )
    return residence_ns * interval_count


def compute_worst_interval_quantile(samples: TimedValues, residence_ns: float, p: float) -> float:
    """Return the largest p quantile of the values in any interval of one residence time.

    Requests that are scheduled within one residence time meet the same queue, so this is the
    quantile in the worst state of the queue that occurred.
    """
    interval_numbers = _assign_intervals(samples.due_ns, residence_ns)
    _, first_indexes = np.unique(interval_numbers, return_index=True)
    values_of_intervals = np.split(samples.values, first_indexes[1:])
    return max(quantile_of(interval_values, p) for interval_values in values_of_intervals)


def _estimate_sample_size(
    due_ns: NDArray[np.int64],
    ranks: NDArray[np.float64],
    interval_ns: float,
    correlation_z: float,
) -> float:
    """Return the effective sample size of a series that is cut into intervals of time.

    Intervals that are next to each other are correlated, so they count as fewer independent values.
    Return 0 if there are too few intervals to estimate the correlation.

    Args:
        due_ns: The scheduled time of each request, in ascending order.
        ranks: The rank of the value of each request. Ranks are used because values may be infinite.
        interval_ns: The length of an interval.
        correlation_z: Standard errors by which the correlation is assumed to be larger than
            estimated.
    """
    series = _estimate_correlation(due_ns, ranks, interval_ns)
    if series.correlation is None:
        return 0.0
    return _compute_effective_size(series.interval_count, series.correlation, correlation_z)


def _estimate_correlation(
    due_ns: NDArray[np.int64], ranks: NDArray[np.float64], interval_ns: float
) -> SeriesCorrelation:
    """Return the correlation (at lag 1) of the mean ranks of neighbouring intervals of time.

    A negative correlation is replaced by 0: it would make the effective sample size larger than the
    number of intervals, and is most likely due to chance.

    Args:
        due_ns: The scheduled time of each request, in ascending order.
        ranks: The rank of the value of each request.
        interval_ns: The length of an interval.
    """
    if len(ranks) < MIN_INTERVALS:
        return SeriesCorrelation(interval_count=0, correlation=None)
    means = _average_ranks_by_interval(due_ns, ranks, interval_ns).means
    if len(means) < MIN_INTERVALS:
        return SeriesCorrelation(len(means), correlation=None)
    correlation = max(intervals.neighbour_correlation(means), 0.0)
    return SeriesCorrelation(len(means), correlation)


def _compute_effective_size(count: int, correlation: float, correlation_z: float) -> float:
    """Return the effective sample size of `count` values, each correlated with the next one.

    With a correlation of 0.5, for example, it is a third of their number. The correlation is first
    increased by `correlation_z` standard errors.
    """
    # Fisher's z, the atanh of a correlation, is normally distributed with a standard error of
    # 1 / sqrt(count - 3). `count` is at least MIN_INTERVALS.
    z = math.atanh(correlation) + correlation_z / math.sqrt(count - 3)
    upper_correlation = math.tanh(z)
    return count * (1 - upper_correlation) / (1 + upper_correlation)


def _compute_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rank of each value among all values, from 1. Equal values get their mean rank."""
    _, unique_indexes, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts)
    mean_ranks = last_ranks - (counts - 1) / 2
    ranks: NDArray[np.float64] = mean_ranks[unique_indexes]
    return ranks


def _average_ranks_by_interval(
    due_ns: NDArray[np.int64], ranks: NDArray[np.float64], interval_ns: float
) -> IntervalMeans:
    """Return the mean rank of the values in each interval of time that has values.

    Args:
        due_ns: The scheduled time of each request, in ascending order.
        ranks: The rank of the value of each request.
        interval_ns: The length of an interval. The first one begins at the first request.
    """
    interval_numbers = _assign_intervals(due_ns, interval_ns)
    # Requests are in order of time, so an interval begins wherever its number changes. The number
    # -1 before the first request makes the first interval begin there.
    first_indexes = np.flatnonzero(np.diff(interval_numbers, prepend=-1))
    value_counts = np.diff(first_indexes, append=len(ranks))
    rank_sums = np.add.reduceat(ranks, first_indexes)
    return IntervalMeans(rank_sums / value_counts, first_indexes)


def _assign_intervals(due_ns: NDArray[np.int64], interval_ns: float) -> NDArray[np.int64]:
    """Return the number of the interval, from 0, in which each request is scheduled."""
    # A server that responds at once has a residence time of 0, by which nothing can be divided.
    at_least_1_ns = max(interval_ns, 1.0)
    numbers: NDArray[np.int64] = ((due_ns - due_ns[0]) / at_least_1_ns).astype(np.int64)
    return numbers
