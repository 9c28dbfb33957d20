"""Find the part of a run that is in steady state, and its effective sample size.

A contract is about a load that continues, but a run begins with an empty server and ends with a
server that empties. The MSER rule (White 1997) finds the end of the start-up. The correlation of
values that are neighbours in time gives the effective sample size: the number of independent values
that would give an equally precise estimate. Both computations are in `core/stats/intervals.py`.

Values are replaced by their ranks, so that infinite values (failed requests) and heavy tails do no
harm. The residence time of a request, a unit of time in this module, is the time from its scheduled
start to its end. This module is pure.
"""

from __future__ import annotations

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
    """Return the range of a run's requests that is in steady state.

    The start-up, during which the server fills, and the end of the load, during which it empties,
    are left out. There is no steady state if the start-up or the end takes up half of the run.

    Args:
        samples: The values of one run.
        residence_ns: The mean residence time of a request: from its scheduled start to its end.
    """
    count = len(samples.values)
    if count == 0:
        return SteadyRange(0, 0, has_steady_state=True)

    end = _count_requests_before_end(samples.due_ns, residence_ns)
    if end <= count // 2:
        # The load lasts less than two residence times, so most requests met the emptying server.
        return SteadyRange(0, count, has_steady_state=False)

    startup_count = _count_startup_requests(samples.slice(0, end))
    if startup_count is None:
        return SteadyRange(0, end, has_steady_state=False)

    return SteadyRange(startup_count, end, has_steady_state=True)


def _count_requests_before_end(due_ns: NDArray[np.int64], residence_ns: float) -> int:
    """Return how many requests of a run were scheduled before the end of the load.

    The end is the last residence time of the load. No new requests follow it, so the requests that
    are scheduled in it are served while the server empties.
    """
    end_start_ns = due_ns[-1] - residence_ns
    return int((due_ns <= end_start_ns).sum())


def _count_startup_requests(samples: TimedValues) -> int | None:
    """Return how many requests at the beginning of a run belong to the start-up of the server.

    A server begins empty and therefore fast. Only a beginning that is faster than the rest counts
    as start-up: a slow one, such as the loading of weights, is a property of the server. The search
    uses mean ranks of short intervals, which a few very slow requests cannot dominate.

    Returns:
        The number of requests, or None if the start-up did not end in the first half of the run.
    """
    duration_ns = samples.due_ns[-1] - samples.due_ns[0]
    interval_ns = duration_ns / STARTUP_BATCHES
    ranks = _compute_ranks(samples.values)
    mean_ranks = _average_ranks_by_interval(samples.due_ns, ranks, interval_ns)
    startup_intervals = count_startup_values(mean_ranks.means)
    if startup_intervals is None:
        return None

    return int(mean_ranks.first_indexes[startup_intervals])


def count_startup_values(series: NDArray[np.float64]) -> int | None:
    """Return how many of the first values of a series belong to a start-up.

    The MSER rule (White 1997) finds the first values that do not fit the rest. They count as a
    start-up only if they are lower, because a server begins empty and is fast at first.

    Args:
        series: A metric of consecutive intervals of time, such as mean latencies.

    Returns:
        The number of values. It is 0 if there is no start-up, and None if the values still rise in
        the middle of the series, so that the start-up has no end.
    """
    if len(series) < MIN_SERIES_LENGTH:
        return 0

    transient_count = intervals.startup_length(series)
    if transient_count == 0:
        return 0

    first_count = len(series) // 2 if transient_count is None else transient_count
    begins_lower = series[:first_count].mean() < series[first_count:].mean()
    if not begins_lower:
        return 0

    return transient_count  # None if no end of the start-up was found


def estimate_queue_sample_size(
    samples: TimedValues, residence_ns: float, *, is_cautious: bool = True
) -> float:
    """Return how many independent observations of the server's queue a run contains.

    This is the effective sample size of a metric with queueing time. Requests within one residence
    time wait in the same queue, so they count as one observation. A long queue also lasts for
    several residence times, which reduces the number further.

    Args:
        samples: The values of one run.
        residence_ns: The mean residence time of a request: from its scheduled start to its end.
        is_cautious: Whether to assume the largest correlation that the values allow (the upper end
            of its confidence interval). A short sample of a slow queue looks less correlated than
            it is.

    Returns:
        The effective sample size, or 0 if there are too few values to estimate it.
    """
    ranks = _compute_ranks(samples.values)
    return _estimate_sample_size(samples.due_ns, ranks, residence_ns, is_cautious=is_cautious)


def estimate_server_sample_size(samples: TimedValues, residence_ns: float) -> float:
    """Return how many independent observations of the server's speed a run contains.

    This is the effective sample size: requests at the same time are similarly fast, so they count
    as one observation. To find out how long the speed stays the same, the run is cut into intervals
    of one residence time, and their correlation is estimated. If the speed changes slowly, over
    minutes, only longer intervals show it. So the estimate is repeated with intervals of 2, 4, 8,
    ... residence times, as long as `intervals.BATCHES` of them fit into the run. The smallest
    result is the cautious one and is returned.

    Args:
        samples: The values of one run.
        residence_ns: The mean residence time of a request: from its scheduled start to its end.

    Returns:
        The effective sample size, or 0 if there are too few values to estimate it.
    """
    if len(samples.values) < MIN_INTERVALS:
        return 0.0

    longest_interval_ns = _compute_duration_ns(samples) / intervals.BATCHES
    interval_lengths_ns = [residence_ns]
    while 2 * interval_lengths_ns[-1] <= longest_interval_ns:
        interval_lengths_ns.append(2 * interval_lengths_ns[-1])

    ranks = _compute_ranks(samples.values)
    return min(
        _estimate_sample_size(samples.due_ns, ranks, interval_ns, is_cautious=False)
        for interval_ns in interval_lengths_ns
    )


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
        sample_size: The number of independent observations of the queue that are needed.
        samples: The values of a run with this load.
        residence_ns: The mean residence time of a request.
    """
    ranks = _compute_ranks(samples.values)
    correlation = _estimate_correlation(samples.due_ns, ranks, residence_ns).correlation
    if correlation is None:
        correlation = 0.0
    return residence_ns * _find_required_interval_count(sample_size, correlation)


def _find_required_interval_count(sample_size: float, correlation: float) -> int:
    """Return the least number of correlated intervals that have this effective sample size.

    The effective size grows with the number of intervals, so a binary search finds the number. The
    result is at most `MAX_PLANNED_INTERVALS`.
    """
    too_few = MIN_INTERVALS - 1
    enough = MAX_PLANNED_INTERVALS
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if _compute_cautious_effective_size(middle, correlation) >= sample_size:
            enough = middle
        else:
            too_few = middle

    return enough


def compute_worst_interval_quantile(samples: TimedValues, residence_ns: float, p: float) -> float:
    """Return the largest p quantile of the values in any interval of one residence time.

    Requests that are scheduled within one residence time wait in the same queue, so this is the
    quantile for the longest queue of the run.
    """
    interval_numbers = _assign_intervals(samples.due_ns, residence_ns)
    _, first_indexes = np.unique(interval_numbers, return_index=True)
    values_of_intervals = np.split(samples.values, first_indexes[1:])
    return max(quantile_of(interval_values, p) for interval_values in values_of_intervals)


def _estimate_sample_size(
    due_ns: NDArray[np.int64],
    ranks: NDArray[np.float64],
    interval_ns: float,
    *,
    is_cautious: bool,
) -> float:
    """Return the effective sample size of a run that is cut into intervals of time.

    This is a number of independent observations. It is smaller than the number of intervals,
    because the values of neighbouring intervals are correlated. Return 0 if there are too few
    intervals to estimate the correlation.

    Args:
        due_ns: The scheduled time of each request, in ascending order.
        ranks: The rank of the value of each request. Ranks are used because values may be infinite.
        interval_ns: The length of an interval.
        is_cautious: Whether to assume the largest correlation that the values allow.
    """
    series = _estimate_correlation(due_ns, ranks, interval_ns)
    if series.correlation is None:
        return 0.0
    if is_cautious:
        return _compute_cautious_effective_size(series.interval_count, series.correlation)
    return _compute_effective_size(series.interval_count, series.correlation)


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


def _compute_effective_size(count: int, correlation: float) -> float:
    """Return the effective sample size of values that are each correlated with the next one.

    This is the usual formula for an AR(1) series: n (1 - r) / (1 + r). With a correlation of 0.5,
    for example, it is a third of the number of values.
    """
    return count * (1 - correlation) / (1 + correlation)


def _compute_cautious_effective_size(count: int, correlation: float) -> float:
    """Return the effective sample size if the correlation is as large as the sample allows.

    The correlation is only an estimate, so the upper end of its 95 % confidence interval is used.
    The interval is Fisher's: z = atanh(r) is normally distributed with a standard error of
    1 / sqrt(n - 3). `count` is at least `MIN_INTERVALS`, so that this is defined.
    """
    standard_error = 1 / math.sqrt(count - 3)
    upper_z = math.atanh(correlation) + UPPER_CORRELATION_Z * standard_error
    upper_correlation = math.tanh(upper_z)
    return _compute_effective_size(count, upper_correlation)


def _compute_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rank of each value among all values, from 1. Equal values get their mean rank.

    Example: the values 10, 30, 30, 20 have the ranks 1, 3.5, 3.5, 2.
    """
    # In the example the distinct values are 10, 20, 30, and occur 1, 1 and 2 times.
    _, index_of_distinct_value, occurrences = np.unique(
        values, return_inverse=True, return_counts=True
    )
    last_ranks = np.cumsum(occurrences)  # 1, 2, 4
    first_ranks = last_ranks - occurrences + 1  # 1, 2, 3
    mean_ranks = (first_ranks + last_ranks) / 2  # 1, 2, 3.5
    ranks: NDArray[np.float64] = mean_ranks[index_of_distinct_value]

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
    _, first_indexes, interval_indexes, value_counts = np.unique(
        interval_numbers, return_index=True, return_inverse=True, return_counts=True
    )
    rank_sums = np.bincount(interval_indexes, weights=ranks)
    return IntervalMeans(rank_sums / value_counts, first_indexes)


def _assign_intervals(due_ns: NDArray[np.int64], interval_ns: float) -> NDArray[np.int64]:
    """Return the number of the interval, from 0, in which each request is scheduled."""
    # A server that responds at once has a residence time of 0, by which nothing can be divided.
    at_least_1_ns = max(interval_ns, 1.0)
    numbers: NDArray[np.int64] = ((due_ns - due_ns[0]) / at_least_1_ns).astype(np.int64)
    return numbers
