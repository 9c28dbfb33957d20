"""Finds the statistics of a run that are withheld because they rest on too uncertain values. Pure.

Each statistic is judged by itself: it is withheld if moving all values to their bounds changes it
by more than the limit of its metric. So the p99 of a metric can be withheld while its p50 is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec
import numpy as np

from loadgen.core.limits import STALL_NS
from loadgen.core.metrics import bounds, outcomes
from loadgen.core.metrics.columns import OK, UNDEFINED
from loadgen.core.stats.quantiles import QUANTILES, milliseconds, quantile_index
from loadgen.figures import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from loadgen.core.limits import ValidityLimits
    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.bounds import Bounds
    from loadgen.core.metrics.columns import Columns
    from loadgen.core.results.manifest import RunManifest
    from loadgen.core.slo import Slo
    from loadgen.core.stats.histogram import Histogram
    from loadgen.core.stats.quantiles import Distribution, Values
    from loadgen.figures import MetricDefinition

STATISTICS = ("mean", *(name for name, _ in QUANTILES), "max")

MAX_THRESHOLDS = 200
"""So many thresholds of the errors of events are tried for the bounds of the gaps. Each gives valid
bounds, and the tightest are used, so fewer thresholds only make the bounds wider."""

RangesMs: TypeAlias = dict[str, tuple[float, float]]
"""The smallest and the largest value, in ms, of each statistic of a metric that is withheld."""


class Range(NamedTuple):
    """The smallest and the largest value that a statistic may have, in ns."""

    lower: float
    upper: float

    def exceeds(self, value: float, limit: float) -> bool:
        """Return True if the statistic may be off by more than `limit`, a share of its value."""
        largest_error = max(value - self.lower, self.upper - value)
        return largest_error > limit * value


class WithheldStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of one metric that are withheld, with the range of each in its unit."""

    ranges: RangesMs
    reason: str = msgspec.field(name="why")


class StatisticRanges(NamedTuple):
    """The ranges of the statistics of a sample.

    Attributes:
        by_name: The range of each of STATISTICS.
        by_index: The range of the value at some indices of the ordered sample.
    """

    by_name: dict[str, Range]
    by_index: dict[int, Range]


class ValueBounds:
    """The bounds of all values of a metric that has one value per request, such as TTFT."""

    def __init__(self, lower: NDArray[np.int64], upper: NDArray[np.int64]) -> None:
        """Take the bounds of at least one value, and put both arrays in ascending order."""
        lower.sort()
        upper.sort()
        self._lower = lower
        self._upper = upper

    def bound_nth(self, index_in_order: int) -> Range:
        """Return the bounds of the value at an index of the ordered sample."""
        return Range(float(self._lower[index_in_order]), float(self._upper[index_in_order]))

    def bound_quantile(self, probability: float) -> Range:
        """Return the bounds of a quantile."""
        return self.bound_nth(quantile_index(len(self._lower), probability))

    def count_over(self, limit_ns: int) -> Range:
        """Return the fewest and the most values that may be over a limit."""
        count = len(self._lower)
        fewest = count - int(np.searchsorted(self._lower, limit_ns, side="right"))
        most = count - int(np.searchsorted(self._upper, limit_ns, side="right"))
        return Range(fewest, most)

    def bound_statistics(self) -> StatisticRanges:
        """Return the bounds of the mean, the maximum and each quantile."""
        count = len(self._lower)
        indices = {name: quantile_index(count, p) for name, p in QUANTILES} | {"max": count - 1}
        mean = Range(float(self._lower.mean()), float(self._upper.mean()))
        by_name = {name: self.bound_nth(index) for name, index in indices.items()}
        by_index = {index: self.bound_nth(index) for index in indices.values()}
        return StatisticRanges({"mean": mean, **by_name}, by_index)


class GapBounds:
    """The bounds of the gaps between output events, which follow from the errors of timestamps.

    An event that came earlier than its timestamp makes one gap shorter and the next one longer. It
    is not known which gap has which error, but how many events have an error above any threshold.
    If n events have an error above e, at most n gaps are too long, and at most n too short, by more
    than e. So each threshold e gives bounds of the distribution of the gaps (as Makarov 1982 for a
    sum of two variables with an unknown dependence). The tightest of these bounds is used.
    """

    def __init__(
        self,
        gaps: Histogram,
        event_errors: Histogram,
        *,
        mean: Range,
        largest_gap_lower_bound_ns: float,
    ) -> None:
        """Prepare to bound any quantile of the gaps.

        The mean and the largest gap are not bounded here. The caller bounds them by the times of
        single requests, which is tighter.

        Args:
            gaps: The gaps between events of all requests.
            event_errors: The error of the timestamp of each event.
            mean: The bounds of the mean gap.
            largest_gap_lower_bound_ns: The largest gap is at least this long. It is at most as long
                as measured.
        """
        self._gaps = gaps
        self._mean = mean
        self._largest_gap_lower_bound_ns = largest_gap_lower_bound_ns

        # For each threshold of the error, the number of events with a larger error.
        thresholds = _sample_error_thresholds(event_errors)
        self._thresholds_ns = np.array([threshold.error_ns for threshold in thresholds])
        self._events_above = np.array([threshold.events_above for threshold in thresholds])

        # Entry i is the number of gaps in bucket i of the histogram and in all smaller ones.
        self._gaps_up_to_bucket = np.cumsum(gaps.counts)

    def bound_quantile(self, probability: float) -> Range:
        """Return the bounds of a quantile."""
        return self.bound_nth(quantile_index(self._gaps.count, probability))

    def bound_nth(self, index_in_order: int) -> Range:
        """Return the bounds of the gap at an index of all gaps in ascending order.

        Suppose that 3 events have an error above 2 ms. Then at most 3 gaps are wrong by more than
        2 ms. So the true gap at index 100 is at least (measured gap at index 97) - 2 ms, and at
        most (measured gap at index 103) + 2 ms.
        """
        lower = self._lower_bound_ns(index_in_order)
        upper = self._upper_bound_ns(index_in_order)
        return Range(lower, upper)

    def _lower_bound_ns(self, index_in_order: int) -> float:
        """Return the tightest lower bound of the gap at an index, which is 0 or more.

        Each threshold of the error gives a bound, and the largest one is the tightest. If 3 events
        are above a threshold of 2 ms, the bound at index 100 is (measured gap at index 97) - 2 ms.
        At index 2 this threshold gives no bound, because there is no index -1.
        """
        gap_indices = index_in_order - self._events_above
        exists = gap_indices >= 0
        gaps_ns = self._measured_gaps_at(gap_indices[exists])
        bounds_ns = gaps_ns - self._thresholds_ns[exists]
        return float(bounds_ns.max(initial=0.0))

    def _upper_bound_ns(self, index_in_order: int) -> float:
        """Return the tightest upper bound of the gap at an index.

        Each threshold of the error gives a bound, and the smallest one is the tightest. If 3 events
        are above a threshold of 2 ms, the bound at index 100 is (measured gap at index 103) + 2 ms.
        With fewer than 104 gaps it does not exist. The largest threshold always gives a bound.
        """
        gap_count = int(self._gaps_up_to_bucket[-1])
        gap_indices = index_in_order + self._events_above
        exists = gap_indices < gap_count
        gaps_ns = self._measured_gaps_at(gap_indices[exists])
        bounds_ns = gaps_ns + self._thresholds_ns[exists]
        return float(bounds_ns.min())

    def _measured_gaps_at(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the measured gaps at indices of the ordered sample, in ns.

        A gap lies in the first bucket up to which there are more gaps than its index. With 5 gaps
        in bucket 0 and 3 in bucket 1, for example, index 5 is in bucket 1.
        """
        buckets = np.searchsorted(self._gaps_up_to_bucket, indices, side="right")
        return self._gaps.bucket_middles(buckets.astype(np.int64))

    def bound_statistics(self) -> StatisticRanges:
        """Return the bounds of the mean, the maximum and each quantile."""
        by_name = {name: self.bound_quantile(p) for name, p in QUANTILES}
        largest = Range(self._largest_gap_lower_bound_ns, float(self._gaps.largest_ns))
        return StatisticRanges({"mean": self._mean, **by_name, "max": largest}, by_index={})


class ErrorThreshold(NamedTuple):
    """A size of timestamp errors, and the number of events whose error is above it."""

    error_ns: float
    events_above: int


def _sample_error_thresholds(event_errors: Histogram) -> list[ErrorThreshold]:
    """Return thresholds for timestamp errors, in ascending order from 0 to the largest error.

    Args:
        event_errors: The timestamp errors of all output events. Its bucket 0 has the errors of 0.
    """
    events_above = (event_errors.count - np.cumsum(event_errors.counts)).tolist()
    thresholds = [ErrorThreshold(error_ns=0.0, events_above=events_above[0])]

    buckets = _sample_buckets(event_errors)
    if buckets:
        for bucket in buckets:
            error_ns = event_errors.bucket_middle(bucket)
            thresholds.append(ErrorThreshold(error_ns, events_above[bucket]))
        largest_error_ns = float(event_errors.largest_ns)
        thresholds.append(ErrorThreshold(largest_error_ns, events_above=0))

    return thresholds


def _sample_buckets(event_errors: Histogram) -> list[int]:
    """Return about MAX_THRESHOLDS of the buckets with errors above 0, at regular distances.

    More thresholds would give tighter bounds, but take more time. With 200 thresholds and errors in
    1,000 buckets, every fifth of these buckets is returned.
    """
    buckets_with_events = np.flatnonzero(event_errors.counts)
    buckets_above_0 = buckets_with_events[buckets_with_events > 0]
    step = max(len(buckets_above_0) // MAX_THRESHOLDS, 1)
    sampled_buckets: list[int] = buckets_above_0[::step].tolist()
    return sampled_buckets


SampleBounds: TypeAlias = ValueBounds | GapBounds


def bound_values(
    stages: Sequence[Columns], compute_bounds: Callable[[Columns], Bounds]
) -> ValueBounds | None:
    """Return the bounds of a metric of the ok requests, or None if all values are certain.

    Most runs have only certain values. So the first pass over the requests only checks that, block
    by block, which takes little memory. Otherwise `_collect_bounds` makes a second pass.

    Args:
        stages: The records of each stage.
        compute_bounds: Returns the bounds of the metric for each of some records.
    """
    are_all_certain = all(_is_certain(block, compute_bounds) for block in _blocks_of(stages))
    return None if are_all_certain else _collect_bounds(stages, compute_bounds)


def _collect_bounds(
    stages: Sequence[Columns], compute_bounds: Callable[[Columns], Bounds]
) -> ValueBounds:
    """Return the bounds of a metric of those ok requests for which the metric is defined."""
    lower_blocks: list[NDArray[np.int64]] = []
    upper_blocks: list[NDArray[np.int64]] = []
    for block in _blocks_of(stages):
        lower, upper = compute_bounds(block)
        is_defined = block.where(OK) & (lower != UNDEFINED)
        lower_blocks.append(lower[is_defined])
        upper_blocks.append(upper[is_defined])

    all_lower = np.concatenate(lower_blocks)
    lower_blocks.clear()  # frees much memory before the next copy is made
    all_upper = np.concatenate(upper_blocks)
    return ValueBounds(all_lower, all_upper)


def _is_certain(block: Columns, compute_bounds: Callable[[Columns], Bounds]) -> bool:
    """Return True if the lower and the upper bound of each ok request are equal."""
    lower, upper = compute_bounds(block)
    if lower is upper:
        return True
    ok = block.where(OK)
    return bool(np.array_equal(lower[ok], upper[ok]))


def bound_metric(stages: Sequence[Columns], metric: str) -> ValueBounds | None:
    """Return the bounds of a metric, or None if its values are certain or it has no bounds."""
    definition = METRICS.get(metric)
    if definition is None or definition.bounds is None:
        return None
    return bound_values(stages, definition.bounds)


def bound_gaps(
    stages: Sequence[Columns], gaps: Histogram, event_errors: Histogram
) -> GapBounds | None:
    """Return the bounds of the gaps between output events, or None if all of them are certain.

    Args:
        stages: The records of each stage.
        gaps: The gaps between output events of all stages.
        event_errors: How much earlier than its timestamp each of these events may have arrived.
    """
    if not gaps.count or not event_errors.count or event_errors.largest_ns <= 0:
        return None

    # The largest gap of the run is at least as large as that of each stage.
    lower_bounds_ns = [_largest_gap_lower_bound_ns(columns) for columns in stages]
    return GapBounds(
        gaps,
        event_errors,
        mean=_bound_mean_gap(stages, gaps),
        largest_gap_lower_bound_ns=float(max(lower_bounds_ns, default=0)),
    )


def _bound_mean_gap(stages: Sequence[Columns], gaps: Histogram) -> Range:
    """Return the bounds of the mean gap between output events.

    The gaps of a response add up to the time from its first to its last event. So only the errors
    of these two timestamps matter. If the last event arrived 2 ms before its timestamp, the sum of
    the gaps is 2 ms smaller. If the first event arrived 2 ms before its timestamp, the sum is 2 ms
    larger.
    """
    first_errors_ns = sum(_sum_errors(columns, "stamp_error_ns") for columns in stages)
    last_errors_ns = sum(_sum_errors(columns, "last_token_error_ns") for columns in stages)
    smallest_total_ns = max(gaps.total_ns - last_errors_ns, 0)
    largest_total_ns = gaps.total_ns + first_errors_ns
    return Range(smallest_total_ns / gaps.count, largest_total_ns / gaps.count)


def _sum_errors(columns: Columns, field: str) -> int:
    """Return the sum of a timestamp error over the responses with gaps.

    An error that is not known, which is -1, counts as 0.
    """
    has_gaps = columns["output_events"] > 1
    return int(np.maximum(columns[field], 0)[has_gaps].sum())


def _largest_gap_lower_bound_ns(columns: Columns) -> int:
    """Return a lower bound of the largest gap between the events of a response, in ns.

    A gap is at least as long as measured less the timestamp error of the event at its end. If two
    responses have largest gaps of 50 and 40 ms, with errors of 20 and 5 ms, the true gaps are at
    least 30 and 35 ms, and the bound is 35 ms.
    """
    errors_ns = np.maximum(columns["max_gap_error_ns"], 0)  # -1 is an error that is not known
    lower_bounds_ns = columns["max_gap_ns"] - errors_ns
    has_gaps = columns["output_events"] > 1
    return int(lower_bounds_ns[has_gaps].max(initial=0))


def find_uncertain_ranges(
    distribution: Distribution, ranges: StatisticRanges | None, limit: float
) -> RangesMs:
    """Return the ranges, in ms, of those statistics of a metric that are too uncertain to report.

    Args:
        distribution: The distribution of the metric.
        ranges: The range of each statistic, None if all of them are certain.
        limit: The share of its value by which a statistic may be off.
    """
    if ranges is None:
        return {}

    uncertain_ranges: RangesMs = {}
    for name, statistic_range in ranges.by_name.items():
        value_ms = getattr(distribution, name)
        if value_ms is None:
            continue
        if statistic_range.exceeds(value_ms * 1e6, limit):
            lower_ms = milliseconds(statistic_range.lower)
            upper_ms = milliseconds(statistic_range.upper)
            uncertain_ranges[name] = (lower_ms, upper_ms)

    return uncertain_ranges


def find_uncertain_statistics(
    distributions: Mapping[str, Distribution],
    measured: MetricAccumulator,
    gap_bounds: GapBounds | None,
    limits: ValidityLimits,
) -> dict[str, RangesMs]:
    """Return the statistics that are too uncertain to report, by metric, with their ranges in ms.

    Metrics of which no statistic is too uncertain are left out.

    Args:
        distributions: The distribution of each metric.
        measured: All measured requests.
        gap_bounds: The bounds of the gaps between events, None if all gaps are certain.
        limits: The shares by which statistics may be off.
    """
    uncertain_statistics = {}
    for definition in METRICS.available():
        metric = definition.name
        ranges = _statistic_ranges(metric, measured, gap_bounds)
        if ranges is None:
            continue

        limit = _uncertainty_limit(definition, limits)
        uncertain_ranges = find_uncertain_ranges(distributions[metric], ranges, limit)
        if uncertain_ranges:
            uncertain_statistics[metric] = uncertain_ranges

    return uncertain_statistics


def _statistic_ranges(
    metric: str, measured: MetricAccumulator, gap_bounds: GapBounds | None
) -> StatisticRanges | None:
    """Return the ranges of the statistics of a metric, or None if they are certain.

    The metric "inter_chunk" is the gaps between events, which have bounds of their own.
    """
    if metric == "inter_chunk" and gap_bounds is not None:
        return gap_bounds.bound_statistics()
    return measured.statistic_ranges(metric)


def certain_distribution(
    accumulator: MetricAccumulator, metric: str, limits: ValidityLimits
) -> Distribution:
    """Return the distribution of a metric without the statistics that are too uncertain."""
    distribution = accumulator.distribution(metric)
    ranges = accumulator.statistic_ranges(metric)
    limit = uncertainty_limit(metric, limits)
    return distribution.without(find_uncertain_ranges(distribution, ranges, limit))


def certain_gap_distribution(
    gaps: Histogram, gap_bounds: GapBounds | None, limits: ValidityLimits
) -> Distribution:
    """Return the distribution of the gaps between events, without too uncertain statistics."""
    distribution = gaps.distribution()
    ranges = None if gap_bounds is None else gap_bounds.bound_statistics()
    uncertain_ranges = find_uncertain_ranges(distribution, ranges, limits.event_error_share)
    return distribution.without(uncertain_ranges)


def certain_quantiles(
    sample: Values | Histogram,
    sample_bounds: SampleBounds | None,
    definition: MetricDefinition,
    manifest: RunManifest,
) -> tuple[float, ...]:
    """Return the quantiles of a metric that the user requested and that are certain enough.

    A quantile is certain enough if the bounds of its value differ from the measured value by no
    more than the limit of the metric, which is a share of that value.

    Args:
        sample: The sample of the metric.
        sample_bounds: The bounds of its values, None if all of them are certain.
        definition: The metric.
        manifest: The manifest, with the requested percentiles and the limits.

    Returns:
        The probabilities of the quantiles, such as 0.99 for p99.
    """
    requested_probabilities = manifest.percentiles
    if sample_bounds is None or not sample.count:
        return requested_probabilities

    limit = _uncertainty_limit(definition, manifest.limits)
    certain_probabilities = []
    for probability in requested_probabilities:
        value_ns = sample.quantile(probability)
        value_bounds = sample_bounds.bound_quantile(probability)
        if not value_bounds.exceeds(value_ns, limit):
            certain_probabilities.append(probability)

    return tuple(certain_probabilities)


def uncertainty_limit(metric: str, limits: ValidityLimits) -> float:
    """Return by how much, as a share, a statistic of a metric may be off."""
    definition = METRICS.get(metric)
    return 0.0 if definition is None else _uncertainty_limit(definition, limits)


def _uncertainty_limit(definition: MetricDefinition, limits: ValidityLimits) -> float:
    """Return the limit that the definition of a metric names, 0 if it names none."""
    if not definition.uncertainty_limit:
        return 0.0
    return float(getattr(limits, definition.uncertainty_limit))


def is_tpot_uncertain_by_timestamps(
    measured: MetricAccumulator, tpot: Distribution, limits: ValidityLimits
) -> bool:
    """Return True if the errors of timestamps make a statistic of TPOT too uncertain to report.

    TPOT is a time divided by the number of tokens after the first event. This function takes the
    number of tokens as exact, so only errors of the time count.

    Args:
        measured: All measured requests.
        tpot: The distribution of TPOT.
        limits: The shares by which statistics may be off.
    """
    tpot_bounds = bound_values(measured.columns, bounds.bound_tpot_times)
    if tpot_bounds is None:
        return False  # all timestamps are exact
    ranges = tpot_bounds.bound_statistics()
    uncertain_ranges = find_uncertain_ranges(tpot, ranges, limits.tpot_error_share)
    return bool(uncertain_ranges)


def are_stalls_uncertain(measured: MetricAccumulator, limits: ValidityLimits) -> bool:
    """Return True if timestamps are too uncertain to tell how many responses stalled.

    A response stalled if its largest gap between output events is above STALL_NS. So the bounds of
    the largest gaps give the fewest and the most stalls. They are certain enough if these differ
    from the counted stalls by no more than the share `event_error_share`.
    """
    max_gap_bounds = bound_metric(measured.columns, "max_gap")
    if max_gap_bounds is None:  # all gaps are certain
        return False
    possible_stalls = max_gap_bounds.count_over(STALL_NS)
    return possible_stalls.exceeds(measured.sum("stalled"), limits.event_error_share)


def bound_good_requests(accumulator: MetricAccumulator, slo: Slo) -> Range | None:
    """Return the fewest and the most requests that may meet every SLO term.

    Timestamps have errors, so latencies are only known within bounds. The fewest requests meet the
    SLO if all latencies are at their upper bounds. Returns None if no metric of the SLO is
    uncertain.

    Args:
        accumulator: The requests.
        slo: The SLO.
    """
    bound_functions = _find_bound_functions(accumulator, slo)
    if not bound_functions:
        return None

    fewest_good = 0
    most_good = 0
    for block in _blocks_of(accumulator.columns):
        longest = {}
        shortest = {}
        for metric, compute_bounds in bound_functions.items():
            latency_bounds = compute_bounds(block)
            shortest[metric] = latency_bounds.lower
            longest[metric] = latency_bounds.upper
        fewest_good += int(outcomes.meets_slo(block, slo, longest).sum())
        most_good += int(outcomes.meets_slo(block, slo, shortest).sum())

    return Range(fewest_good, most_good)


def _find_bound_functions(
    accumulator: MetricAccumulator, slo: Slo
) -> dict[str, Callable[[Columns], Bounds]]:
    """Return, for each uncertain metric that an SLO limits, the function that bounds its values."""
    limited_metrics = {term.metric for term in slo.terms}
    bound_functions = {}
    for definition in METRICS.available():
        if definition.name not in limited_metrics or definition.bounds is None:
            continue
        is_uncertain = accumulator.statistic_ranges(definition.name) is not None
        if is_uncertain:
            bound_functions[definition.name] = definition.bounds
    return bound_functions


def _blocks_of(stages: Sequence[Columns]) -> Iterator[Columns]:
    """Yield the requests of all stages in blocks, which take little memory at a time."""
    for columns in stages:
        yield from columns.blocks()
