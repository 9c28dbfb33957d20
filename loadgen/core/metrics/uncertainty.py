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
from loadgen.core.metrics.sample_bounds import Range, blocks_of, bound_metric, bound_values
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
    """Return the ranges, in ms, of those statistics of a metric that are too uncertain to report.

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
        if statistic_range.exceeds(value_ms * 1e6, limit):
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

    Metrics of which no statistic is too uncertain are left out.

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
    """Return the ranges of the statistics of a metric, or None if they are certain.

    The metric "inter_chunk" is the gaps between events, which have bounds of their own.
    """
    if metric == "inter_chunk" and gap_bounds is not None:
        return gap_bounds.bound_statistics()
    return requests.statistic_ranges(metric)


def certain_distribution(
    accumulator: MetricAccumulator, metric: str, limits: ValidityLimits
) -> Distribution:
    """Return the distribution of a metric without the statistics that are too uncertain."""
    distribution = accumulator.distribution(metric)
    ranges = accumulator.statistic_ranges(metric)
    limit = max_error_share(metric, limits)
    return distribution.without(find_uncertain_ranges(distribution, ranges, limit))


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
        """Return the probabilities of those quantiles that are certain enough.

        A quantile is certain enough if its bounds differ from the measured value by no more than
        the share `max_error_share` of that value.

        Args:
            probabilities: The probabilities of some quantiles, such as 0.99 for p99.
            max_error_share: By which share of its value a quantile may be off.
        """
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

    It is a limit that the user may change, such as `limits.tpot_error_share` for TPOT. A metric for
    which there is no limit may not be off at all.
    """
    definition = METRICS.get(metric)
    if definition is None or not definition.uncertainty_limit:
        return 0.0
    return float(getattr(limits, definition.uncertainty_limit))


def is_tpot_uncertain_by_timestamps(
    requests: MetricAccumulator, tpot: Distribution, limits: ValidityLimits
) -> bool:
    """Return True if the errors of timestamps make a statistic of TPOT too uncertain to report.

    TPOT is a time divided by the number of tokens after the first event. This function takes the
    number of tokens as exact, so only errors of the time count.

    Args:
        requests: All measured requests.
        tpot: The distribution of TPOT.
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

    A response stalled if its largest gap between output events is above STALL_NS. So the bounds of
    the largest gaps give the fewest and the most stalls. They are certain enough if these differ
    from the counted stalls by no more than the share `event_error_share`.
    """
    max_gap_bounds = bound_metric(requests.columns, "max_gap")
    if max_gap_bounds is None:  # all gaps are certain
        return False
    possible_stalls = max_gap_bounds.count_over(STALL_NS)
    return possible_stalls.exceeds(requests.sum("stalled"), limits.event_error_share)


def bound_good_requests(accumulator: MetricAccumulator, slo: Slo) -> Range:
    """Return the fewest and the most requests that may meet every SLO term.

    Timestamps have errors, so latencies are only known within bounds. The fewest requests meet the
    SLO if all latencies are at their upper bounds. Both numbers are the measured one if no metric
    of the SLO is uncertain.

    Args:
        accumulator: The requests.
        slo: The SLO.
    """
    bound_functions = _find_bound_functions(accumulator, slo)
    if not bound_functions:
        good_requests = accumulator.sum("good")
        return Range(good_requests, good_requests)

    fewest_good = 0
    most_good = 0
    for block in blocks_of(accumulator.columns):
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
