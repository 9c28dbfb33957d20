"""Finds the statistics of a run that are too uncertain to report. Pure.

Each statistic is judged by itself: it is too uncertain if moving all values to their bounds changes
it by more than the limit of its metric (`sample_bounds`). So the p99 of a metric may be too
uncertain while its p50 is reported. The number of stalls and of good requests is judged likewise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from loadgen.core.limits import STALL_NS
from loadgen.core.metrics import bounds, outcomes
from loadgen.core.metrics.sample_bounds import Range, bound_metric, bound_values, iterate_blocks
from loadgen.core.stats.quantiles import QUANTILES, milliseconds
from loadgen.figures import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loadgen.core.limits import ValidityLimits
    from loadgen.core.metrics.accumulator import MetricAccumulator
    from loadgen.core.metrics.bounds import Bounds
    from loadgen.core.metrics.columns import Columns
    from loadgen.core.metrics.sample_bounds import GapBounds, SampleBounds, StatisticRanges
    from loadgen.core.slo import Slo
    from loadgen.core.stats.histogram import Histogram
    from loadgen.core.stats.quantiles import Distribution, Values

STATISTICS = ("mean", *(name for name, _ in QUANTILES), "max")

RangesMs: TypeAlias = dict[str, tuple[float, float]]
"""The smallest and the largest value, in ms, of each statistic of a metric that is too uncertain to
report."""


class WithheldStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of one metric that are withheld: the range of each in ms, and the reason."""

    ranges: RangesMs
    reason: str = msgspec.field(name="why")


def find_uncertain_ranges(
    distribution: Distribution, ranges: StatisticRanges | None, limit: float
) -> RangesMs:
    """Return the ranges, in ms, of the statistics of a metric that are too uncertain to report.

    Args:
        distribution: The distribution of the metric.
        ranges: The range of each statistic, None if all of them are certain.
        limit: The share of its value by which a statistic may be off.
    """
    if ranges is None:
        return {}

    uncertain_ranges: RangesMs = {}
    for name, statistic_range in ranges.items():
        value_ms = getattr(distribution, name)
        if value_ms is None:
            continue

        value_ns = value_ms * 1e6
        if statistic_range.exceeds(value_ns, limit):
            lower_ms = milliseconds(statistic_range.lower)
            upper_ms = milliseconds(statistic_range.upper)
            uncertain_ranges[name] = (lower_ms, upper_ms)

    return uncertain_ranges


def find_uncertain_statistics(
    distributions: Mapping[str, Distribution],
    requests: MetricAccumulator,
    gap_bounds: GapBounds | None,
    limits: ValidityLimits,
) -> dict[str, RangesMs]:
    """Return the statistics that are too uncertain to report, by metric, with their ranges in ms.

    Args:
        distributions: The distribution of each metric.
        requests: All measured requests.
        gap_bounds: The bounds of the gaps between events, None if all gaps are certain.
        limits: The shares by which statistics may be off.
    """
    uncertain_statistics = {}
    for definition in METRICS.available():
        metric = definition.name
        ranges = _statistic_ranges(metric, requests, gap_bounds)
        if ranges is None:
            continue

        limit = max_error_share(metric, limits)
        uncertain_ranges = find_uncertain_ranges(distributions[metric], ranges, limit)
        if uncertain_ranges:
            uncertain_statistics[metric] = uncertain_ranges

    return uncertain_statistics


def _statistic_ranges(
    metric: str, requests: MetricAccumulator, gap_bounds: GapBounds | None
) -> StatisticRanges | None:
    """Return the ranges of the statistics of a metric, or None if they are certain."""
    is_about_gaps = metric == "inter_chunk"
    if is_about_gaps and gap_bounds is not None:
        return gap_bounds.bound_statistics()
    return requests.statistic_ranges(metric)


def certain_distribution(
    accumulator: MetricAccumulator, metric: str, limits: ValidityLimits
) -> Distribution:
    """Return the distribution of a metric without the statistics that are too uncertain."""
    distribution = accumulator.distribution(metric)
    ranges = accumulator.statistic_ranges(metric)
    limit = max_error_share(metric, limits)

    uncertain_ranges = find_uncertain_ranges(distribution, ranges, limit)
    return distribution.without(uncertain_ranges)


def certain_gap_distribution(
    gaps: Histogram, gap_bounds: GapBounds | None, limits: ValidityLimits
) -> Distribution:
    """Return the distribution of the gaps between events, without too uncertain statistics."""
    distribution = gaps.distribution()
    ranges = None if gap_bounds is None else gap_bounds.bound_statistics()
    uncertain_ranges = find_uncertain_ranges(distribution, ranges, limits.event_error_share)
    return distribution.without(uncertain_ranges)


class BoundedSample(NamedTuple):
    """The values of a metric, with their bounds, which are None if all values are certain."""

    values: Values | Histogram
    bounds: SampleBounds | None

    def select_certain(
        self, probabilities: Sequence[float], max_error_share: float
    ) -> Sequence[float]:
        """Return the probabilities of the quantiles that are certain enough.

        Args:
            probabilities: The probabilities of some quantiles, such as 0.99 for p99.
            max_error_share: The largest error of a quantile that is accepted, as a share of its
                value.
        """
        # Without bounds, all values are exact.
        if self.bounds is None or not self.values.count:
            return probabilities

        certain_probabilities = []
        for probability in probabilities:
            value_ns = self.values.quantile(probability)
            value_range = self.bounds.bound_quantile(probability)
            if not value_range.exceeds(value_ns, max_error_share):
                certain_probabilities.append(probability)

        return certain_probabilities


def max_error_share(metric: str, limits: ValidityLimits) -> float:
    """Return by which share of its value a statistic of a metric may be off and be reported.

    For TPOT, for example, it is `limits.tpot_error_share`. A metric without a limit may not be off.
    """
    definition = METRICS.get(metric)
    if definition is None or not definition.uncertainty_limit:
        return 0.0
    return float(getattr(limits, definition.uncertainty_limit))


def is_tpot_uncertain_by_timestamps(
    requests: MetricAccumulator, tpot: Distribution, limits: ValidityLimits
) -> bool:
    """Return True if the errors of timestamps make a statistic of TPOT too uncertain to report.

    Args:
        requests: All measured requests.
        tpot: The distribution of the time per output token.
        limits: The shares by which statistics may be off.
    """
    tpot_bounds = bound_values(requests.columns, bounds.bound_tpot_times)
    if tpot_bounds is None:
        return False  # all timestamps are exact

    ranges = tpot_bounds.bound_statistics()
    uncertain_ranges = find_uncertain_ranges(tpot, ranges, limits.tpot_error_share)
    return bool(uncertain_ranges)


def are_stalls_uncertain(requests: MetricAccumulator, limits: ValidityLimits) -> bool:
    """Return True if timestamps are too uncertain to tell how many responses stalled.

    A response stalled if its largest gap between output events is above STALL_NS.
    """
    max_gap_bounds = bound_metric(requests.columns, "max_gap")
    if max_gap_bounds is None:  # all gaps are certain
        return False

    possible_stalls = max_gap_bounds.count_over(STALL_NS)
    return possible_stalls.exceeds(requests.sum("stalled"), limits.event_error_share)


def bound_good_requests(accumulator: MetricAccumulator, slo: Slo) -> Range:
    """Return the fewest and the most requests that may meet an SLO.

    The latency of a request is not known exactly, because timestamps have errors. It is between a
    lower and an upper bound.
    """
    bound_functions = _find_bound_functions(accumulator, slo)
    if not bound_functions:
        good_requests = accumulator.sum("good")
        return Range(good_requests, good_requests)

    fewest_good = 0
    most_good = 0
    for block in iterate_blocks(accumulator.columns):
        shortest_latencies = {}
        longest_latencies = {}
        for metric, compute_bounds in bound_functions.items():
            latency_bounds = compute_bounds(block)
            shortest_latencies[metric] = latency_bounds.lower
            longest_latencies[metric] = latency_bounds.upper

        is_good_for_certain = outcomes.meets_slo(block, slo, longest_latencies)
        may_be_good = outcomes.meets_slo(block, slo, shortest_latencies)
        fewest_good += int(is_good_for_certain.sum())
        most_good += int(may_be_good.sum())

    return Range(fewest_good, most_good)


def _find_bound_functions(
    accumulator: MetricAccumulator, slo: Slo
) -> dict[str, Callable[[Columns], Bounds]]:
    """Return the functions that compute the bounds of each uncertain metric that an SLO limits.

    A function returns the smallest and the largest value that each request may have had.
    """
    limited_metrics = {term.metric for term in slo.terms}
    bound_functions = {}
    for definition in METRICS.available():
        if definition.name not in limited_metrics or definition.bounds is None:
            continue

        # The ranges of its statistics are None if all values of a metric are certain.
        is_uncertain = accumulator.statistic_ranges(definition.name) is not None
        if is_uncertain:
            bound_functions[definition.name] = definition.bounds

    return bound_functions
