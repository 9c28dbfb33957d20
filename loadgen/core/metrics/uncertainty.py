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

ERROR_SIZES = 200
"""So many sizes of the errors of events are tried for the bounds of the gaps. Each gives valid
bounds, and the best of them is taken, so fewer sizes only make the bounds wider."""

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
    why: str


class StatisticRanges(NamedTuple):
    """The ranges of the statistics of a sample.

    Attributes:
        by_name: The range of each of STATISTICS.
        by_index: The range of the value at some indices of the ordered sample.
    """

    by_name: dict[str, Range]
    by_index: dict[int, Range]


class ValueBounds:
    """The bounds of all values of a metric that has one value per request."""

    def __init__(self, lower: NDArray[np.int64], upper: NDArray[np.int64]) -> None:
        """Take the bounds of at least one value, and put both arrays in ascending order."""
        lower.sort()
        upper.sort()
        self._lower = lower
        self._upper = upper

    def nth(self, index_in_order: int) -> Range:
        """Return the bounds of the value at an index of the ordered sample."""
        return Range(float(self._lower[index_in_order]), float(self._upper[index_in_order]))

    def quantile(self, probability: float) -> Range:
        """Return the bounds of a quantile."""
        return self.nth(quantile_index(len(self._lower), probability))

    def count_over(self, limit_ns: int) -> Range:
        """Return the fewest and the most values that may be over a limit."""
        count = len(self._lower)
        fewest = count - int(np.searchsorted(self._lower, limit_ns, side="right"))
        most = count - int(np.searchsorted(self._upper, limit_ns, side="right"))
        return Range(fewest, most)

    def ranges(self) -> StatisticRanges:
        """Return the bounds of each statistic."""
        count = len(self._lower)
        indices = {name: quantile_index(count, p) for name, p in QUANTILES} | {"max": count - 1}
        mean = Range(float(self._lower.mean()), float(self._upper.mean()))
        by_name = {name: self.nth(index) for name, index in indices.items()}
        by_index = {index: self.nth(index) for index in indices.values()}
        return StatisticRanges({"mean": mean, **by_name}, by_index)


class GapBounds:
    """The bounds of the gaps between events, from the gaps and the errors of the timestamps.

    Which gap has which error is not known. An event that came earlier than its timestamp makes one
    gap shorter and the next one longer. So if n events have an error above e, at most n gaps are
    too long, and at most n too short, by more than e. For each size e of an error, this gives
    bounds of the distribution of the gaps (as Makarov 1982 for a sum of two variables with an
    unknown dependence). The best of these bounds is used.
    """

    def __init__(
        self, gaps: Histogram, event_errors: Histogram, mean: Range, smallest_maximum: float
    ) -> None:
        """Take the gaps and the errors of events, and the bounds that are computed otherwise.

        Args:
            gaps: The gaps between events of all requests.
            event_errors: The error of the timestamp of each event.
            mean: The bounds of the mean, which follows from the first and the last token.
            smallest_maximum: A lower bound of the largest gap: the largest gap of any request
                less the error of the event at its end.
        """
        self._gaps = gaps
        self._mean = mean
        self._smallest_maximum = smallest_maximum
        self._error_counts = _sample_error_sizes(event_errors)
        self._errors_ns = np.array([count.error_ns for count in self._error_counts])
        self._events_above = np.array([count.events_above for count in self._error_counts])
        self._gaps_up_to_bucket = np.cumsum(gaps.counts)

    def _gaps_at(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the gaps at indices of the ordered sample."""
        buckets = np.searchsorted(self._gaps_up_to_bucket, indices, side="right")
        return self._gaps.bucket_middles(buckets.astype(np.int64))

    def quantile(self, probability: float) -> Range:
        """Return the bounds of a quantile."""
        return self.nth(quantile_index(self._gaps.count, probability))

    def nth(self, index_in_order: int) -> Range:
        """Return the bounds of the gap at an index of the ordered sample.

        If n events have an error above e, at most n gaps change by more than e. So the gap at the
        index is at least the one n places below it less e, and at most the one n places above it
        plus e. The best of these bounds over all sizes e is returned. A size whose n leads out of
        the sample gives no bound.
        """
        last_index = int(self._gaps_up_to_bucket[-1]) - 1
        lower_indices = index_in_order - self._events_above
        upper_indices = index_in_order + self._events_above
        has_lower = lower_indices >= 0
        has_upper = upper_indices <= last_index
        lower_bounds = self._gaps_at(lower_indices[has_lower]) - self._errors_ns[has_lower]
        upper_bounds = self._gaps_at(upper_indices[has_upper]) + self._errors_ns[has_upper]
        return Range(float(lower_bounds.max(initial=0.0)), float(upper_bounds.min()))

    def ranges(self) -> StatisticRanges:
        """Return the bounds of each statistic."""
        by_name = {name: self.quantile(p) for name, p in QUANTILES}
        largest = Range(self._smallest_maximum, float(self._gaps.largest_ns))
        return StatisticRanges({"mean": self._mean, **by_name, "max": largest}, by_index={})


class ErrorCount(NamedTuple):
    """A size of timestamp errors, and the number of events whose error is above it."""

    error_ns: float
    events_above: int


def _sample_error_sizes(event_errors: Histogram) -> list[ErrorCount]:
    """Return sizes of errors from 0 to the largest, each with the number of events above it.

    Bounds are computed for each of them, so only about ERROR_SIZES of the buckets of the histogram
    are taken, evenly. Its bucket 0 has the events without an error.
    """
    total = event_errors.count
    events_up_to_bucket = np.cumsum(event_errors.counts)
    filled_buckets = np.flatnonzero(event_errors.counts[1:]) + 1
    step = max(len(filled_buckets) // ERROR_SIZES, 1)
    counts = [ErrorCount(error_ns=0.0, events_above=total - int(events_up_to_bucket[0]))]
    for bucket in filled_buckets[::step].tolist():
        error_ns = event_errors.bucket_middle(bucket)
        counts.append(ErrorCount(error_ns, total - int(events_up_to_bucket[bucket])))
    if len(filled_buckets):
        counts.append(ErrorCount(float(event_errors.largest_ns), events_above=0))
    return counts


SampleBounds: TypeAlias = ValueBounds | GapBounds


def bound_values(
    stages: Sequence[Columns], bound: Callable[[Columns], Bounds]
) -> ValueBounds | None:
    """Return the bounds of a metric of the ok requests, or None if all values are certain.

    Most runs are certain. To recognize them takes little memory, because the bounds of one block of
    requests at a time are computed and dropped. So those of an uncertain run are computed twice.

    Args:
        stages: The records of each stage.
        bound: Computes the bounds of the metric for each of some records.
    """
    if all(_is_certain(block, bound) for block in _blocks_of(stages)):
        return None
    lower_bounds: list[NDArray[np.int64]] = []
    upper_bounds: list[NDArray[np.int64]] = []
    for block in _blocks_of(stages):
        lower, upper = bound(block)
        is_defined = block.where(OK) & (lower != UNDEFINED)
        lower_bounds.append(lower[is_defined])
        upper_bounds.append(upper[is_defined])
    all_lower = np.concatenate(lower_bounds)
    lower_bounds.clear()  # frees memory before the second array is made
    return ValueBounds(all_lower, np.concatenate(upper_bounds))


def _is_certain(block: Columns, bound: Callable[[Columns], Bounds]) -> bool:
    """Return True if the lower and the upper bound of each ok request are equal."""
    lower, upper = bound(block)
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
    """Return the bounds of the gaps between events, or None if all of them are certain.

    The gaps of a request add up to the time from its first to its last token. So the errors of
    these two tokens bound the mean gap: the sum is smaller by the error of the last token, and
    larger by the error of the first token. A negative error is not known and counts as 0.

    Args:
        stages: The records of each stage.
        gaps: The gaps between output events of all stages.
        event_errors: The timestamp errors of these events.
    """
    if not gaps.count or not event_errors.count or event_errors.largest_ns <= 0:
        return None
    first_errors_ns = 0
    last_errors_ns = 0
    smallest_maximum_ns = 0
    for columns in stages:
        has_gaps = columns["output_events"] > 1
        first_errors_ns += int(np.maximum(columns["stamp_error_ns"], 0)[has_gaps].sum())
        last_errors_ns += int(np.maximum(columns["last_token_error_ns"], 0)[has_gaps].sum())
        max_gap_errors_ns = np.maximum(columns["max_gap_error_ns"], 0)
        shortest_max_gaps_ns = (columns["max_gap_ns"] - max_gap_errors_ns)[has_gaps]
        smallest_maximum_ns = max(smallest_maximum_ns, int(shortest_max_gaps_ns.max(initial=0)))
    mean = Range(
        lower=max(gaps.total_ns - last_errors_ns, 0) / gaps.count,
        upper=(gaps.total_ns + first_errors_ns) / gaps.count,
    )
    return GapBounds(gaps, event_errors, mean, float(smallest_maximum_ns))


def find_withheld_ranges(
    distribution: Distribution, ranges: StatisticRanges | None, limit: float
) -> RangesMs:
    """Return the statistics of a metric that are withheld, with their ranges in ms.

    Args:
        distribution: The distribution of the metric.
        ranges: The range of each statistic, None if all of them are certain.
        limit: The share of its value by which a statistic may be off.
    """
    if ranges is None:
        return {}
    withheld: RangesMs = {}
    for name, statistic_range in ranges.by_name.items():
        value_ms = getattr(distribution, name)
        if value_ms is None:
            continue
        if statistic_range.exceeds(value_ms * 1e6, limit):
            lower_ms = milliseconds(statistic_range.lower)
            upper_ms = milliseconds(statistic_range.upper)
            withheld[name] = (lower_ms, upper_ms)
    return withheld


def find_withheld(
    distributions: Mapping[str, Distribution],
    measured: MetricAccumulator,
    gap_bounds: GapBounds | None,
    limits: ValidityLimits,
) -> dict[str, RangesMs]:
    """Return, for each metric with any, the withheld statistics with their ranges in ms.

    Args:
        distributions: The distribution of each metric.
        measured: All measured requests.
        gap_bounds: The bounds of the gaps between events, None if all gaps are certain.
        limits: The shares by which statistics may be off.
    """
    withheld = {}
    for definition in METRICS.available():
        ranges = measured.statistic_ranges(definition.name)
        if definition.name == "inter_chunk" and gap_bounds is not None:
            ranges = gap_bounds.ranges()
        if ranges is None:
            continue
        limit = _uncertainty_limit(definition, limits)
        metric_ranges = find_withheld_ranges(distributions[definition.name], ranges, limit)
        if metric_ranges:
            withheld[definition.name] = metric_ranges
    return withheld


def shown_distribution(
    accumulator: MetricAccumulator, metric: str, limits: ValidityLimits
) -> Distribution:
    """Return the distribution of a metric without the statistics that are too uncertain."""
    distribution = accumulator.distribution(metric)
    ranges = accumulator.statistic_ranges(metric)
    return distribution.without(
        find_withheld_ranges(distribution, ranges, uncertainty_limit(metric, limits))
    )


def shown_gap_distribution(
    gaps: Histogram, gap_bounds: GapBounds | None, limits: ValidityLimits
) -> Distribution:
    """Return the distribution of the gaps without the statistics that are too uncertain."""
    distribution = gaps.distribution()
    ranges = None if gap_bounds is None else gap_bounds.ranges()
    withheld = find_withheld_ranges(distribution, ranges, limits.event_error_share)
    return distribution.without(withheld)


def certain_quantiles(
    sample: Values | Histogram,
    sample_bounds: SampleBounds | None,
    definition: MetricDefinition,
    manifest: RunManifest,
) -> tuple[float, ...]:
    """Return those of the percentiles that the user requested that are certain enough to be shown.

    Args:
        sample: The sample of the metric.
        sample_bounds: The bounds of its values, None if all of them are certain.
        definition: The metric.
        manifest: The manifest, with the requested percentiles and the limits.
    """
    if sample_bounds is None or not sample.count:
        return manifest.percentiles
    limit = _uncertainty_limit(definition, manifest.limits)

    def is_certain(probability: float) -> bool:
        value_ns = sample.quantile(probability)
        return not sample_bounds.quantile(probability).exceeds(value_ns, limit)

    return tuple(filter(is_certain, manifest.percentiles))


def uncertainty_limit(metric: str, limits: ValidityLimits) -> float:
    """Return by how much, as a share, a statistic of a metric may be off."""
    definition = METRICS.get(metric)
    return 0.0 if definition is None else _uncertainty_limit(definition, limits)


def _uncertainty_limit(definition: MetricDefinition, limits: ValidityLimits) -> float:
    """Return the limit that the definition of a metric names, 0 if it names none."""
    if not definition.uncertainty_limit:
        return 0.0
    return float(getattr(limits, definition.uncertainty_limit))


def is_tpot_limited_by_first_event(
    measured: MetricAccumulator, tpot: Distribution, limits: ValidityLimits
) -> bool:
    """Return True if TPOT could be shown if the number of tokens of first events were known.

    TPOT is divided by the tokens after the first event, so that number is a source of its
    uncertainty, beside timestamps. It is the only one that matters if the bounds by timestamps
    alone would withhold nothing.
    """
    bounds_by_times = bound_values(measured.columns, bounds.bound_tpot_times)
    if bounds_by_times is None:
        return True
    return not find_withheld_ranges(tpot, bounds_by_times.ranges(), limits.tpot_error_share)


def are_stalls_uncertain(measured: MetricAccumulator, limits: ValidityLimits) -> bool:
    """Return True if the number of stalls may be off by more than the limit of the gaps.

    A stall is a request whose largest gap is above STALL_NS, so the bounds of the largest gaps give
    the fewest and the most stalls.
    """
    if measured.statistic_ranges("max_gap") is None:
        return False
    max_gap_bounds = bound_metric(measured.columns, "max_gap")
    if max_gap_bounds is None:
        return False
    stalls = max_gap_bounds.count_over(STALL_NS)
    return stalls.exceeds(measured.sum("stalled"), limits.event_error_share)


def bound_good_requests(accumulator: MetricAccumulator, slo: Slo) -> Range | None:
    """Return the fewest and the most requests that may meet every SLO term.

    They are counted with all uncertain values at their upper bounds, and at their lower bounds.
    Returns None if no metric that the SLO limits is uncertain.
    """
    limited_metrics = {term.metric for term in slo.terms}
    bound_by_metric = {
        definition.name: definition.bounds
        for definition in METRICS.available()
        if definition.name in limited_metrics
        and definition.bounds
        and accumulator.statistic_ranges(definition.name) is not None
    }
    if not bound_by_metric:
        return None
    fewest = 0
    most = 0
    for block in _blocks_of(accumulator.columns):
        bounds_by_metric = {metric: bound(block) for metric, bound in bound_by_metric.items()}
        upper = {metric: metric_bounds.upper for metric, metric_bounds in bounds_by_metric.items()}
        lower = {metric: metric_bounds.lower for metric, metric_bounds in bounds_by_metric.items()}
        fewest += int(outcomes.meets_slo(block, slo, upper).sum())
        most += int(outcomes.meets_slo(block, slo, lower).sum())
    return Range(fewest, most)


def _blocks_of(stages: Sequence[Columns]) -> Iterator[Columns]:
    """Yield the requests of all stages in blocks, which take little memory at a time."""
    for columns in stages:
        yield from columns.blocks()
