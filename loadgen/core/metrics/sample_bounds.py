"""The bounds of the statistics of a sample whose values are uncertain, such as a p99. Pure.

`bounds` has the smallest and the largest value that a metric of one request may have. This module
derives from them the smallest and the largest value that a statistic over all requests may have. It
does the same for the gaps between output events, of which only a histogram is stored.
"""

from __future__ import annotations

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
        """Return the fewest and the most values that may be over a limit."""
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


class GapBounds:
    """The bounds of the gaps between output events, which follow from the errors of timestamps.

    An event that came earlier than its timestamp makes one gap shorter and the next one longer. It
    is not known which gap has which error, but how many events have an error above any threshold.
    If n events have an error above e, at most n gaps are too long, and at most n too short, by more
    than e. So each threshold e gives bounds of the distribution of the gaps (as Makarov 1982 for a
    sum of two variables with an unknown dependence). The tightest of these bounds is used.
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
        self._mean_bounds = mean
        self._largest_gap_bounds = largest

        # Two arrays with one entry for each error threshold: its size, and the largest number of
        # gaps that can be wrong by more, which is the number of events with a larger error.
        thresholds = _sample_error_thresholds(event_errors)
        self._thresholds_ns = np.array([threshold.error_ns for threshold in thresholds])
        self._wrong_gap_counts = np.array([threshold.events_above for threshold in thresholds])

        # Entry i is the number of gaps in the histogram buckets 0 to i.
        self._gaps_up_to_bucket = np.cumsum(gaps.counts)

    def bound_quantile(self, probability: float) -> Range:
        """Return the bounds of a quantile.

        If 3 events have an error above 2 ms, at most 3 gaps are wrong by more than 2 ms. So the
        true gap at index 100 of the sorted gaps is at least (measured gap at index 97) - 2 ms, and
        at most (measured gap at index 103) + 2 ms.
        """
        index_in_order = quantile_index(self._gaps.count, probability)
        lower = self._lower_bound_ns(index_in_order)
        upper = self._upper_bound_ns(index_in_order)
        return Range(lower, upper)

    def _lower_bound_ns(self, index_in_order: int) -> float:
        """Return the largest lower bound of the true gap at an index of the sorted gaps, in ns.

        Each error threshold gives one bound. If at most 3 gaps are wrong by more than 2 ms, the
        true gap at index 100 is at least 2 ms shorter than the measured gap at index 97.

        Args:
            index_in_order: The index in the ascending order of all gaps.
        """
        shorter_gap_indices = index_in_order - self._wrong_gap_counts
        has_shorter_gap = shorter_gap_indices >= 0
        shorter_gaps_ns = self._measured_gaps_at(shorter_gap_indices[has_shorter_gap])
        bounds_ns = shorter_gaps_ns - self._thresholds_ns[has_shorter_gap]

        smallest_possible_gap_ns = 0.0
        return float(bounds_ns.max(initial=smallest_possible_gap_ns))

    def _upper_bound_ns(self, index_in_order: int) -> float:
        """Return the smallest upper bound of the true gap at an index of the sorted gaps, in ns.

        Each error threshold gives one bound. If at most 3 gaps are wrong by more than 2 ms, the
        true gap at index 100 is at most 2 ms longer than the measured gap at index 103.

        Args:
            index_in_order: The index in the ascending order of all gaps.
        """
        total_gaps = int(self._gaps_up_to_bucket[-1])
        longer_gap_indices = index_in_order + self._wrong_gap_counts
        has_longer_gap = longer_gap_indices < total_gaps
        longer_gaps_ns = self._measured_gaps_at(longer_gap_indices[has_longer_gap])
        bounds_ns = longer_gaps_ns + self._thresholds_ns[has_longer_gap]

        # The largest threshold always gives a bound, because no gap is wrong by more.
        return float(bounds_ns.min())

    def _measured_gaps_at(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the measured gaps at indices of the sorted gaps, in ns.

        With 5 gaps in bucket 0 of the histogram and 3 gaps in bucket 1, index 5 is in bucket 1.
        """
        buckets = np.searchsorted(self._gaps_up_to_bucket, indices, side="right")
        return self._gaps.bucket_middles(buckets.astype(np.int64))

    def bound_statistics(self) -> StatisticRanges:
        """Return the bounds of the mean, each quantile and the maximum."""
        quantiles = {name: self.bound_quantile(p) for name, p in QUANTILES}
        return {"mean": self._mean_bounds, **quantiles, "max": self._largest_gap_bounds}


class ErrorThreshold(NamedTuple):
    """A size of timestamp errors, and the number of events whose error is above it."""

    error_ns: float
    events_above: int


def _sample_error_thresholds(event_errors: Histogram) -> list[ErrorThreshold]:
    """Return thresholds for timestamp errors, in ascending order from 0 to the largest error.

    Args:
        event_errors: A histogram of the timestamp errors of all output events. Bucket 0 counts the
            events without an error.
    """
    events_up_to_bucket = np.cumsum(event_errors.counts)
    events_above_bucket = (event_errors.count - events_up_to_bucket).tolist()

    zero_bucket = 0
    zero_threshold = ErrorThreshold(0.0, events_above=events_above_bucket[zero_bucket])

    sampled_buckets = _sample_nonzero_error_buckets(event_errors)
    if not sampled_buckets:
        return [zero_threshold]

    sampled_thresholds = [
        ErrorThreshold(event_errors.bucket_middle(bucket), events_above_bucket[bucket])
        for bucket in sampled_buckets
    ]
    largest_threshold = ErrorThreshold(float(event_errors.largest_ns), events_above=0)
    return [zero_threshold, *sampled_thresholds, largest_threshold]


def _sample_nonzero_error_buckets(event_errors: Histogram) -> list[int]:
    """Return about MAX_THRESHOLDS of the buckets with errors above 0, at regular distances."""
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

    Args:
        stages: The records of each stage.
        compute_bounds: Returns the lower and the upper bound of the metric for each record.
    """
    # A value is certain if its bounds are equal. Most runs have only certain values, and this check
    # takes little memory.
    are_all_certain = all(_are_bounds_equal(block, compute_bounds) for block in blocks_of(stages))
    if are_all_certain:
        return None

    return _collect_bounds(stages, compute_bounds)


def _are_bounds_equal(block: Columns, compute_bounds: Callable[[Columns], Bounds]) -> bool:
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
    """Return the bounds of a metric of the ok requests that have a value."""
    lower_bounds: list[NDArray[np.int64]] = []
    upper_bounds: list[NDArray[np.int64]] = []
    for block in blocks_of(stages):
        lower, upper = compute_bounds(block)
        has_value = block.is_ok & (lower != UNDEFINED)
        lower_bounds.append(lower[has_value])
        upper_bounds.append(upper[has_value])

    joined_lower_bounds = np.concatenate(lower_bounds)

    # The arrays of the blocks are copied now. Their memory is freed before the next copy.
    lower_bounds.clear()
    joined_upper_bounds = np.concatenate(upper_bounds)
    return ValueBounds(joined_lower_bounds, joined_upper_bounds)


def blocks_of(stages: Sequence[Columns]) -> Iterator[Columns]:
    """Yield the requests of all stages in blocks, which take little memory at a time."""
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
    """Return the bounds of the mean gap between output events.

    The gaps of a response add up to the time from its first to its last event. Each event may have
    come before its timestamp: an error of the last event makes the sum smaller, and an error of the
    first event makes the sum larger.

    Args:
        stages: The records of each stage, with the errors of the timestamps.
        gaps: The gaps of all responses.
    """
    errors_of_first_events_ns = sum(_sum_errors(columns, "stamp_error_ns") for columns in stages)
    errors_of_last_events_ns = sum(
        _sum_errors(columns, "last_token_error_ns") for columns in stages
    )

    smallest_sum_ns = max(gaps.total_ns - errors_of_last_events_ns, 0)
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
