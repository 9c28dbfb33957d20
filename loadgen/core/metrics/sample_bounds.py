"""The bounds of the statistics of a sample whose values are uncertain, such as a p99. Pure.

`bounds` has the smallest and the largest value that a metric of one request may have. This module
derives from them the smallest and the largest value that a statistic over all requests may have. It
does the same for the gaps between output events, of which only a histogram is stored.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from loadgen.core.metrics.columns import UNDEFINED
from loadgen.core.stats.quantiles import QUANTILES, quantile_index
from loadgen.figures import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.bounds import Bounds
    from loadgen.core.metrics.columns import Columns
    from loadgen.core.stats.histogram import Histogram

MAX_THRESHOLDS = 200
"""So many error thresholds are tried to bound the gaps between events. Each gives valid bounds, and
the tightest are used, so fewer thresholds only make the bounds wider."""

FIRST_EVENT_ERROR = "stamp_error_ns"
"""The column with how much earlier than its timestamp the first output event may have come."""

LAST_EVENT_ERROR = "last_token_error_ns"
"""The column with how much earlier than its timestamp the last output event may have come."""


class Range(NamedTuple):
    """The smallest and the largest value that a statistic may have, in ns, or that a count may."""

    lower: float
    upper: float

    def exceeds(self, value: float, limit: float) -> bool:
        """Return True if the statistic may be off by more than `limit`, a share of its value."""
        largest_error = max(value - self.lower, self.upper - value)
        return largest_error > limit * value


StatisticRanges: TypeAlias = dict[str, Range]
"""The range of each statistic of a sample: of its mean, its quantiles such as "p99", and "max"."""


class ValueBounds:
    """The bounds of all values of a metric that has one value per request, such as TTFT."""

    def __init__(self, lower: NDArray[np.int64], upper: NDArray[np.int64]) -> None:
        """Take the bounds of at least one value, and put both arrays in ascending order."""
        lower.sort()
        upper.sort()
        self._lower = lower
        self._upper = upper

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._lower)

    def bound_nth(self, index_in_order: int) -> Range:
        """Return the bounds of the value at an index of the ordered sample."""
        return Range(float(self._lower[index_in_order]), float(self._upper[index_in_order]))

    def bound_quantile(self, probability: float) -> Range:
        """Return the bounds of a quantile, such as the p99 for the probability 0.99."""
        index_in_order = quantile_index(len(self), probability)
        return self.bound_nth(index_in_order)

    def count_over(self, limit_ns: int) -> Range:
        """Return the fewest and the most values that may be over a limit.

        A value is over the limit for certain if its lower bound is, and may be if its upper bound
        is.
        """
        lower_within_limit = int(np.searchsorted(self._lower, limit_ns, side="right"))
        upper_within_limit = int(np.searchsorted(self._upper, limit_ns, side="right"))
        fewest_over = len(self) - lower_within_limit
        most_over = len(self) - upper_within_limit
        return Range(fewest_over, most_over)

    def bound_statistics(self) -> StatisticRanges:
        """Return the bounds of the mean, each quantile and the maximum."""
        mean = Range(float(self._lower.mean()), float(self._upper.mean()))
        quantiles = {name: self.bound_quantile(p) for name, p in QUANTILES}
        return {"mean": mean, **quantiles, "max": self.bound_nth(len(self) - 1)}


class ErrorThreshold(NamedTuple):
    """A size of timestamp errors, and how many output events have a larger error than that."""

    error_ns: float
    events_above: int


class GapBounds:
    """The bounds of the gaps between output events, which follow from the errors of timestamps.

    An event may have arrived earlier than its timestamp, so its gap to the previous event is
    measured too long, and its gap to the next event too short. Which event has which error is not
    stored, only how many events have an error above a threshold. If 3 events have an error above
    2 ms, at most 3 gaps are too long by more than 2 ms, and at most 3 are too short by more.

    Bounds of the quantiles follow from each threshold (Makarov 1982, for sums with an unknown
    dependence), and the tightest are used.
    """

    def __init__(
        self, gaps: Histogram, event_errors: Histogram, *, mean: Range, largest: Range
    ) -> None:
        """Prepare to bound any quantile of the gaps.

        Args:
            gaps: The measured gaps between the output events of all responses.
            event_errors: How much earlier than its timestamp each event may have come.
            mean: The smallest and the largest value that the mean gap may have.
            largest: The smallest and the largest value that the largest gap may have.
        """
        self._gaps = gaps
        self._gaps_up_to_bucket: list[int] = np.cumsum(gaps.counts).tolist()
        self._thresholds = _choose_error_thresholds(event_errors)
        self._mean_bounds = mean
        self._largest_gap_bounds = largest

    def bound_quantile(self, probability: float) -> Range:
        """Return the bounds of a quantile of the gaps, such as the p99 for the probability 0.99.

        If 3 events have an error above the threshold of 2 ms, the true gap at index 100 of the
        sorted gaps is at least the measured gap at index 97, less 2 ms, and at most the measured
        gap at index 103, plus 2 ms. The tightest bounds of all thresholds are returned.
        """
        total_gaps = self._gaps.count
        index_in_order = quantile_index(total_gaps, probability)

        lower_bounds_ns = [0.0]  # no gap is negative
        upper_bounds_ns = []
        for threshold in self._thresholds:
            lower_index = index_in_order - threshold.events_above
            if lower_index >= 0:
                lower_bounds_ns.append(self._measured_gap(lower_index) - threshold.error_ns)

            upper_index = index_in_order + threshold.events_above
            if upper_index < total_gaps:
                upper_bounds_ns.append(self._measured_gap(upper_index) + threshold.error_ns)

        # There is an upper bound, because no event has an error above the largest threshold.
        return Range(max(lower_bounds_ns), min(upper_bounds_ns))

    def _measured_gap(self, index_in_order: int) -> float:
        """Return the measured gap at an index of the sorted gaps, in ns.

        If 5 gaps are in bucket 0 of the histogram and 3 gaps in bucket 1, index 5 is in bucket 1.
        """
        bucket = bisect_right(self._gaps_up_to_bucket, index_in_order)
        return self._gaps.bucket_middle(bucket)

    def bound_statistics(self) -> StatisticRanges:
        """Return the bounds of the mean, each quantile and the maximum."""
        quantiles = {name: self.bound_quantile(p) for name, p in QUANTILES}
        return {"mean": self._mean_bounds, **quantiles, "max": self._largest_gap_bounds}


def _choose_error_thresholds(event_errors: Histogram) -> list[ErrorThreshold]:
    """Return sizes of timestamp errors, each with how many output events have a larger error.

    The sizes are 0, about MAX_THRESHOLDS sizes of errors that occur, and the largest error.

    Args:
        event_errors: The timestamp errors of all output events. Bucket 0 of the histogram counts
            the events without an error.
    """
    events_up_to_bucket = np.cumsum(event_errors.counts)
    events_above_bucket = event_errors.count - events_up_to_bucket

    buckets = [0, *_sample_nonzero_error_buckets(event_errors)]
    thresholds = [
        ErrorThreshold(event_errors.bucket_middle(bucket), int(events_above_bucket[bucket]))
        for bucket in buckets
    ]
    largest_threshold = ErrorThreshold(float(event_errors.largest_ns), events_above=0)
    return [*thresholds, largest_threshold]


def _sample_nonzero_error_buckets(event_errors: Histogram) -> list[int]:
    """Return about MAX_THRESHOLDS of the histogram buckets with errors above 0, evenly spaced.

    If more buckets have errors, every second, third or n-th of them is returned.
    """
    buckets_with_events = np.flatnonzero(event_errors.counts)
    buckets_above_0 = buckets_with_events[buckets_with_events > 0]
    step = max(len(buckets_above_0) // MAX_THRESHOLDS, 1)
    sampled_buckets: list[int] = buckets_above_0[::step].tolist()
    return sampled_buckets


SampleBounds: TypeAlias = ValueBounds | GapBounds


# -- metrics with a value per request --------------------------------------------------------------


def bound_metric(stages: Sequence[Columns], metric: str) -> ValueBounds | None:
    """Return the bounds of a metric, or None if its values are certain or it has no bounds."""
    definition = METRICS.get(metric)
    if definition is None or definition.bounds is None:
        return None
    return bound_values(stages, definition.bounds)


def bound_values(
    stages: Sequence[Columns], compute_bounds: Callable[[Columns], Bounds]
) -> ValueBounds | None:
    """Return the bounds of a metric of the ok requests, or None if all values are certain.

    A value is certain if its lower and its upper bound are equal.

    Args:
        stages: The records of each stage.
        compute_bounds: Returns the lower and the upper bound of the metric for each record.
    """
    # Most runs have only certain values, and this check takes less memory than all bounds do.
    are_all_certain = all(
        _are_values_certain(block, compute_bounds) for block in iterate_blocks(stages)
    )
    if are_all_certain:
        return None

    return _collect_bounds(stages, compute_bounds)


def _are_values_certain(block: Columns, compute_bounds: Callable[[Columns], Bounds]) -> bool:
    """Return True if the lower and the upper bound of each ok request are equal.

    Args:
        block: Some of the records.
        compute_bounds: Returns the lower and the upper bound of a metric for each record.
    """
    lower, upper = compute_bounds(block)
    is_same_array = lower is upper
    if is_same_array:
        return True

    is_ok = block.is_ok
    return bool(np.array_equal(lower[is_ok], upper[is_ok]))


def _collect_bounds(
    stages: Sequence[Columns], compute_bounds: Callable[[Columns], Bounds]
) -> ValueBounds:
    """Return the bounds of a metric of the ok requests that have a value.

    Args:
        stages: The records of each stage.
        compute_bounds: Returns the lower and the upper bound of the metric for each record. Both
            are UNDEFINED for a record without a value.
    """
    lower_by_block: list[NDArray[np.int64]] = []
    upper_by_block: list[NDArray[np.int64]] = []
    for block in iterate_blocks(stages):
        lower, upper = compute_bounds(block)
        has_value = block.is_ok & (lower != UNDEFINED)
        lower_by_block.append(lower[has_value])
        upper_by_block.append(upper[has_value])

    lower_bounds = np.concatenate(lower_by_block)
    del lower_by_block  # a large copy, which is freed before the next one is made
    return ValueBounds(lower_bounds, np.concatenate(upper_by_block))


def iterate_blocks(stages: Sequence[Columns]) -> Iterator[Columns]:
    """Yield the records of all stages in blocks, so that computations need little memory."""
    for columns in stages:
        yield from columns.blocks()


# -- gaps between output events --------------------------------------------------------------------


def bound_gaps(
    stages: Sequence[Columns], gaps: Histogram, event_errors: Histogram
) -> GapBounds | None:
    """Return the bounds of the gaps between output events, or None if all of them are certain.

    Args:
        stages: The records of each stage.
        gaps: The gaps between output events of all stages.
        event_errors: How much earlier than its timestamp each of these events may have arrived.
    """
    has_errors = event_errors.count > 0 and event_errors.largest_ns > 0
    if not gaps.count or not has_errors:
        return None

    largest_gap = _bound_largest_gap(stages, gaps)
    mean_gap = _bound_mean_gap(stages, gaps)
    return GapBounds(gaps, event_errors, mean=mean_gap, largest=largest_gap)


def _bound_largest_gap(stages: Sequence[Columns], gaps: Histogram) -> Range:
    """Return the bounds of the largest gap between output events.

    Args:
        stages: The records of each stage.
        gaps: The measured gaps between output events of all stages.
    """
    certain_gaps_ns = [_largest_certain_gap_ns(columns) for columns in stages]
    lower_bound_ns = max(certain_gaps_ns, default=0)
    return Range(float(lower_bound_ns), float(gaps.largest_ns))


def _bound_mean_gap(stages: Sequence[Columns], gaps: Histogram) -> Range:
    """Return the bounds of the mean gap between output events, in ns.

    The gaps of a response add up to the time from its first to its last event. If the measured gaps
    add up to 1,000 ms, and the last event may have come 50 ms and the first one 20 ms before its
    timestamp, the true gaps add up to 950 to 1,020 ms.

    Args:
        stages: The records of each stage, with the errors of the timestamps.
        gaps: The gaps of all responses.
    """
    errors_of_first_events_ns = sum(_sum_errors(columns, FIRST_EVENT_ERROR) for columns in stages)
    errors_of_last_events_ns = sum(_sum_errors(columns, LAST_EVENT_ERROR) for columns in stages)

    smallest_sum_ns = max(gaps.total_ns - errors_of_last_events_ns, 0)  # no gap is negative
    largest_sum_ns = gaps.total_ns + errors_of_first_events_ns
    return Range(smallest_sum_ns / gaps.count, largest_sum_ns / gaps.count)


def _sum_errors(columns: Columns, field: str) -> int:
    """Return the sum of a timestamp error over the responses with gaps between events, in ns."""
    has_gaps = columns["output_events"] > 1
    return int(columns.known_or_zero(field)[has_gaps].sum())


def _largest_certain_gap_ns(columns: Columns) -> int:
    """Return the longest gap that some response had for certain, in ns, 0 without gaps.

    If two responses have largest gaps of 50 and 40 ms, with timestamp errors of 20 and 5 ms, the
    true gaps are at least 30 and 35 ms, and the result is 35 ms.
    """
    shortest_true_gaps_ns = columns["max_gap_ns"] - columns.known_or_zero("max_gap_error_ns")
    has_gaps = columns["output_events"] > 1
    return int(shortest_true_gaps_ns[has_gaps].max(initial=0))
