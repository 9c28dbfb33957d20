"""Find the part of a run that is in steady state, and its effective sample size.

A contract is about a load that continues, but a run begins with an empty server and ends with one
that empties. MSER finds the end of the start-up, and the correlation of neighbours in time gives
the effective sample size; both are in `core/stats/intervals.py`. Values are replaced by their
ranks, so that infinite values and heavy tails do no harm. This module is pure.
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
"""Batches of time in which the end of the start-up is searched: each is 1.7 % of the load."""

MIN_INTERVALS = 5
"""Intervals of one residence time from which their correlation can be estimated."""

MAX_PLANNED_INTERVALS = 1_000_000
"""Upper limit of the load that is planned, in residence times."""

UPPER_CORRELATION_Z = 1.96
"""Standard errors by which a correlation is assumed to be larger than estimated."""

MIN_SERIES_LENGTH = 4
"""Values from which a start-up can be found."""


class TimedValues(NamedTuple):
    """One value per request, in order of the due times of the requests."""

    due_ns: NDArray[np.int64]
    values: NDArray[np.float64]


class SteadyPart(NamedTuple):
    """The indices from `start` to `end` (exclusive) that are in steady state.

    `is_settled` is False if the start-up did not end in the first half of the load.
    """

    start: int
    end: int
    is_settled: bool


class IntervalMeans(NamedTuple):
    """The mean rank of the values in each interval that has values, and their first index."""

    means: NDArray[np.float64]
    first_indexes: NDArray[np.int64]


class SeriesCorrelation(NamedTuple):
    """The number of intervals of time that have values, and the correlation of each with the next.

    The correlation is None if there are too few intervals to estimate it.
    """

    interval_count: int
    correlation: float | None


def find_steady_part(samples: TimedValues, residence_ns: float) -> SteadyPart:
    """Return the part of the samples without the start-up and without the end of the load.

    Requests that are due within one residence time of the end are left out, because they met a
    server that empties. A beginning counts as start-up only if its values are lower than the rest:
    a server begins empty and therefore fast. High values at the beginning were real and are kept.

    Args:
        samples: The values of one run.
        residence_ns: The mean time from the due time of a request to its end.
    """
    due_ns, values = samples
    count = len(values)
    if count == 0:
        return SteadyPart(0, 0, is_settled=True)
    last_steady_due_ns = due_ns[-1] - residence_ns
    end = int(np.searchsorted(due_ns, last_steady_due_ns, "right"))
    if end <= count // 2:
        # The load is so short that most of it is its own end.
        return SteadyPart(0, count, is_settled=False)
    batch_ns = (due_ns[end - 1] - due_ns[0]) / STARTUP_BATCHES
    batches = _mean_ranks(due_ns[:end], _ranks(values[:end]), batch_ns)
    startup_batches = count_startup_values(batches.means)
    if startup_batches is None:
        return SteadyPart(0, end, is_settled=False)
    return SteadyPart(int(batches.first_indexes[startup_batches]), end, is_settled=True)


def count_startup_values(series: NDArray[np.float64]) -> int | None:
    """Return how many of the first values are a start-up that is lower than the rest.

    Return None if the start-up is not over by the middle of the series.
    """
    if len(series) < MIN_SERIES_LENGTH:
        return 0
    startup_end = intervals.startup_length(series)
    split = len(series) // 2 if startup_end is None else startup_end
    is_lower = split > 0 and series[:split].mean() < series[split:].mean()
    return startup_end if is_lower else 0


def effective_sample_size(
    samples: TimedValues, residence_ns: float, *, correlation_z: float = UPPER_CORRELATION_Z
) -> float:
    """Return the number of independent observations of the server that the samples are worth.

    This is the length of the load in residence times, divided by (1 + r) / (1 - r), where r is the
    correlation of neighbouring intervals of one residence time. Return 0 if there are too few
    values.

    Args:
        samples: The values of one run.
        residence_ns: The mean time from the due time of a request to its end.
        correlation_z: Standard errors (of Fisher's z) by which r is taken larger than estimated. A
            short sample of a slow queue makes r look small.
    """
    return _ranked_sample_size(samples.due_ns, _ranks(samples.values), residence_ns, correlation_z)


def slow_effective_sample_size(samples: TimedValues, residence_ns: float) -> float:
    """Return the effective sample size for a server that may change over many residence times.

    It is the smallest effective sample size for intervals of one, two, four, ... residence times,
    up to a twentieth of the load. A change over minutes is hardly visible between one residence
    time and the next.
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
    """Return the time from the first to the last due time."""
    return float(samples.due_ns[-1] - samples.due_ns[0])


def load_for_sample_size_ns(sample_size: float, samples: TimedValues, residence_ns: float) -> float:
    """Return the length of one run that has this effective sample size, in ns.

    The load is assumed to be as correlated as these samples. With too few samples to estimate the
    correlation it is taken as 0, so the result is then a lower bound.
    """
    estimated = _correlate(samples.due_ns, _ranks(samples.values), residence_ns).correlation
    correlation = 0.0 if estimated is None else estimated
    # The effective sample size grows with the number of intervals: find the least that is enough.
    interval_count = bisect.bisect_left(
        range(MAX_PLANNED_INTERVALS),
        sample_size,
        lo=MIN_INTERVALS,
        key=lambda count: _discounted(count, correlation, UPPER_CORRELATION_Z),
    )
    return residence_ns * interval_count


def worst_interval_quantile(samples: TimedValues, residence_ns: float, p: float) -> float:
    """Return the largest p quantile of the values in any interval of one residence time.

    Requests that are due within one residence time meet the same queue, so this is the worst state
    of the queue that the load saw.
    """
    due_ns, values = samples
    interval_numbers = ((due_ns - due_ns[0]) / max(residence_ns, 1.0)).astype(np.int64)
    _, first_indexes = np.unique(interval_numbers, return_index=True)
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
    return _discounted(series.interval_count, series.correlation, correlation_z)


def _correlate(
    due_ns: NDArray[np.int64], ranks: NDArray[np.float64], interval_ns: float
) -> SeriesCorrelation:
    """Return the correlation of the mean ranks of neighbouring intervals of this length."""
    if len(ranks) < MIN_INTERVALS:
        return SeriesCorrelation(0, None)
    means = _mean_ranks(due_ns, ranks, interval_ns).means
    if len(means) < MIN_INTERVALS:
        return SeriesCorrelation(len(means), None)
    return SeriesCorrelation(len(means), max(intervals.neighbour_correlation(means), 0.0))


def _discounted(count: int, correlation: float, correlation_z: float) -> float:
    """Return the effective sample size of `count` values, each correlated with the next one.

    Values with a correlation of 0.5 are worth a third of their number, for example. The correlation
    is first increased by `correlation_z` standard errors of Fisher's z.
    """
    # Fisher's z is the atanh of a correlation. Its standard error is 1 / sqrt(count - 3).
    increase_of_z = correlation_z / math.sqrt(count - 3)
    upper = math.tanh(math.atanh(correlation) + increase_of_z)
    return count * (1 - upper) / (1 + upper)


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
    # Values are in order of time, so an interval begins at each value with another number.
    interval_numbers = ((due_ns - due_ns[0]) / max(interval_ns, 1.0)).astype(np.int64)
    first_indexes = np.flatnonzero(np.diff(interval_numbers, prepend=-1))
    value_counts = np.diff(first_indexes, append=len(ranks))
    return IntervalMeans(np.add.reduceat(ranks, first_indexes) / value_counts, first_indexes)
