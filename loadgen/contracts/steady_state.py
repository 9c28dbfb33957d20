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


class SteadyPart(NamedTuple):
    """The part of the values of a run that is in steady state.

    Attributes:
        start: The index of the first value in steady state.
        end: The index after the last one.
        is_settled: False if the start-up did not end in the first half of the load.
    """

    start: int
    end: int
    is_settled: bool


class IntervalMeans(NamedTuple):
    """The mean rank of the values in each interval that has values, and their first index."""

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


def find_steady_part(samples: TimedValues, residence_ns: float) -> SteadyPart:
    """Return the part of the samples without the start-up and without the end of the load.

    Requests that are scheduled within one residence time of the end are left out, because they met
    a server that empties. A beginning counts as start-up only if its values are lower than the
    rest, because a server begins empty and therefore fast. A slow beginning, such as loading of
    weights, is a property of the server and is kept.

    Args:
        samples: The values of one run.
        residence_ns: The mean residence time of a request.
    """
    due_ns, values = samples
    count = len(values)
    if count == 0:
        return SteadyPart(0, 0, is_settled=True)
    last_steady_due_ns = due_ns[-1] - residence_ns
    end = int(np.searchsorted(due_ns, last_steady_due_ns, "right"))
    if end <= count // 2:
        # The load lasts less than two residence times, so most requests met the emptying server.
        return SteadyPart(0, count, is_settled=False)
    batch_ns = (due_ns[end - 1] - due_ns[0]) / STARTUP_BATCHES
    batches = _mean_ranks(due_ns[:end], _ranks(values[:end]), batch_ns)
    startup_batches = count_startup_values(batches.means)
    if startup_batches is None:
        return SteadyPart(0, end, is_settled=False)
    return SteadyPart(int(batches.first_indexes[startup_batches]), end, is_settled=True)


def count_startup_values(series: NDArray[np.float64]) -> int | None:
    """Return how many of the first values are a start-up that is lower than the rest.

    Return None if the values are still rising in the middle of the series, so that the start-up has
    no end that could be found.
    """
    if len(series) < MIN_SERIES_LENGTH:
        return 0
    startup_end = intervals.startup_length(series)
    split = len(series) // 2 if startup_end is None else startup_end
    if split == 0:
        return 0
    is_start_lower = series[:split].mean() < series[split:].mean()
    return startup_end if is_start_lower else 0


def effective_sample_size(
    samples: TimedValues, residence_ns: float, *, correlation_z: float = UPPER_CORRELATION_Z
) -> float:
    """Return the number of independent observations that would show as much as the samples.

    Requests within one residence time meet the same queue, so the load is cut into intervals of
    that length. Their number is divided by (1 + r) / (1 - r), where r is the correlation of
    neighbouring intervals: this is the effective sample size of a series in which each value
    depends on the one before it. Return 0 if there are too few values.

    Args:
        samples: The values of one run.
        residence_ns: The mean residence time of a request.
        correlation_z: Standard errors (of Fisher's z) by which r is assumed to be larger than
            estimated, because a short sample of a slow queue makes r look small.
    """
    return _ranked_sample_size(samples.due_ns, _ranks(samples.values), residence_ns, correlation_z)


def slow_effective_sample_size(samples: TimedValues, residence_ns: float) -> float:
    """Return the effective sample size for a server that may change over many residence times.

    It is the smallest effective sample size for intervals of one, two, four, ... residence times,
    as long as the load has `intervals.BATCHES` of them. A change over minutes is hardly visible
    between one residence time and the next, but it is between longer intervals.
    """
    ranks = _ranks(samples.values)
    interval_ns = residence_ns
    smallest_size = _ranked_sample_size(samples.due_ns, ranks, interval_ns, correlation_z=0.0)
    while smallest_size > 0 and _duration_ns(samples) / (2 * interval_ns) >= intervals.BATCHES:
        interval_ns *= 2
        sample_size = _ranked_sample_size(samples.due_ns, ranks, interval_ns, correlation_z=0.0)
        smallest_size = min(smallest_size, sample_size)
    return smallest_size


def _duration_ns(samples: TimedValues) -> float:
    """Return the time from the first to the last scheduled request."""
    return float(samples.due_ns[-1] - samples.due_ns[0])


def load_for_sample_size_ns(sample_size: float, samples: TimedValues, residence_ns: float) -> float:
    """Return the length of one run that has this effective sample size, in ns.

    The load is assumed to be as correlated as these samples. With too few samples to estimate the
    correlation it is assumed to be 0, so the result is then a lower bound.
    """
    estimated = _correlate(samples.due_ns, _ranks(samples.values), residence_ns).correlation
    correlation = 0.0 if estimated is None else estimated

    def effective_size_of(interval_count: int) -> float:
        return _effective_size(interval_count, correlation, UPPER_CORRELATION_Z)

    # The effective size grows with the number of intervals, so the least number that is enough is
    # found by bisection.
    interval_count = bisect.bisect_left(
        range(MAX_PLANNED_INTERVALS), sample_size, lo=MIN_INTERVALS, key=effective_size_of
    )
    return residence_ns * interval_count


def worst_interval_quantile(samples: TimedValues, residence_ns: float, p: float) -> float:
    """Return the largest p quantile of the values in any interval of one residence time.

    Requests that are scheduled within one residence time meet the same queue, so this is the worst
    state of the queue that the load met.
    """
    due_ns, values = samples
    _, first_indexes = np.unique(_number_intervals(due_ns, residence_ns), return_index=True)
    return max(
        quantile_of(interval_values, p) for interval_values in np.split(values, first_indexes[1:])
    )


def _ranked_sample_size(
    due_ns: NDArray[np.int64],
    ranks: NDArray[np.float64],
    interval_ns: float,
    correlation_z: float,
) -> float:
    """Return the effective sample size of ranked values, for intervals of this length.

    It is 0 if there are too few intervals to estimate their correlation.
    """
    series = _correlate(due_ns, ranks, interval_ns)
    if series.correlation is None:
        return 0.0
    return _effective_size(series.interval_count, series.correlation, correlation_z)


def _correlate(
    due_ns: NDArray[np.int64], ranks: NDArray[np.float64], interval_ns: float
) -> SeriesCorrelation:
    """Return the correlation of the mean ranks of neighbouring intervals of this length.

    A negative correlation is replaced by 0: it would make the effective sample size larger than the
    number of intervals, and is most likely due to chance.
    """
    if len(ranks) < MIN_INTERVALS:
        return SeriesCorrelation(0, None)
    means = _mean_ranks(due_ns, ranks, interval_ns).means
    if len(means) < MIN_INTERVALS:
        return SeriesCorrelation(len(means), None)
    return SeriesCorrelation(len(means), max(intervals.neighbour_correlation(means), 0.0))


def _effective_size(count: int, correlation: float, correlation_z: float) -> float:
    """Return the effective sample size of `count` values, each correlated with the next one.

    With a correlation of 0.5, for example, it is a third of their number. The correlation is first
    increased by `correlation_z` standard errors.
    """
    # Fisher's z, the atanh of a correlation, is normally distributed with a standard error of
    # 1 / sqrt(count - 3). `count` is at least MIN_INTERVALS.
    z = math.atanh(correlation) + correlation_z / math.sqrt(count - 3)
    upper_correlation = math.tanh(z)
    return count * (1 - upper_correlation) / (1 + upper_correlation)


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rank of each value among all values, from 1. Equal values get their mean rank."""
    _, unique_indexes, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts)
    mean_ranks = last_ranks - (counts - 1) / 2
    ranks: NDArray[np.float64] = mean_ranks[unique_indexes]
    return ranks


def _mean_ranks(
    due_ns: NDArray[np.int64], ranks: NDArray[np.float64], interval_ns: float
) -> IntervalMeans:
    """Return the mean rank of the values in each interval of this length that has values."""
    # Values are in order of time, so an interval begins wherever its number changes.
    interval_numbers = _number_intervals(due_ns, interval_ns)
    first_indexes = np.flatnonzero(np.diff(interval_numbers, prepend=-1))
    value_counts = np.diff(first_indexes, append=len(ranks))
    rank_sums = np.add.reduceat(ranks, first_indexes)
    return IntervalMeans(rank_sums / value_counts, first_indexes)


def _number_intervals(due_ns: NDArray[np.int64], interval_ns: float) -> NDArray[np.int64]:
    """Return the number of the interval, from 0, in which each request is scheduled."""
    at_least_1_ns = max(interval_ns, 1.0)  # a server that answers at once has a residence time of 0
    numbers: NDArray[np.int64] = ((due_ns - due_ns[0]) / at_least_1_ns).astype(np.int64)
    return numbers
