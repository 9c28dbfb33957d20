"""Estimate latency quantiles of the steady state of runs, with confidence intervals.

This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.contracts import load_checks, quantile_interval
from loadgen.contracts.load_checks import EstimateError, LoadCheck, LoadLength
from loadgen.contracts.quantile_interval import RunSeries
from loadgen.contracts.recorded_run import (
    LoadedRun,
    RecordedRun,
    includes_queueing,
    load_in_residences,
)
from loadgen.contracts.steady_samples import (
    QuantileQuery,
    SteadySample,
    load_length_s,
    require_supported,
    select_steady_sample,
    timed_values,
)
from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import Interval
from loadgen.core.stats.quantiles import quantile_of


class LatencyEstimate(NamedTuple):
    """A latency quantile in ns, and the sample behind it.

    If the load was too short, the upper end of the interval is at least the upper bound of the
    sample, which may be infinite.
    """

    interval: Interval
    sample: SteadySample


class BoundedQuantile(NamedTuple):
    """A quantile with its interval, and the check whether the sample bounds it from above."""

    interval: Interval
    load_check: LoadCheck


def estimate_latency(
    loaded_runs: Sequence[LoadedRun],
    query: QuantileQuery,
    name: str,
    limit_ns: int | None = None,
) -> LatencyEstimate:
    """Return a quantile of a latency in the steady state of the runs of a level.

    If the load is too short, only the lower end of the interval is estimated from the sample.

    Args:
        loaded_runs: The runs of the level.
        query: The quantile.
        name: The name of the latency in messages.
        limit_ns: The limit of the term: unfinished requests that already exceed it count. None if
            the latency is only compared with another one.

    Raises:
        EstimateError: There are too few requests, or too many of them are unfinished.
    """
    runs = [loaded_run.run for loaded_run in loaded_runs]
    timed_samples = [
        timed_values(loaded_run.columns, query.metric, limit_ns=limit_ns)
        for loaded_run in loaded_runs
    ]
    load_s = load_length_s(timed_samples)
    require_supported([samples.values for samples in timed_samples], query.p, name, load_s)
    sample = select_steady_sample(runs, timed_samples, query)
    quantile = _bound_quantile(
        sample.values, query, load_s, has_queueing=includes_queueing(runs, query.metric)
    )
    # A longer load has to satisfy both checks, whichever of them failed.
    sufficient_load_s = max(
        sample.load_check.sufficient_load_s, quantile.load_check.sufficient_load_s
    )
    if sample.load_check.is_short:
        load_check = sample.load_check._replace(sufficient_load_s=sufficient_load_s)
        return _estimate_lower_end(sample._replace(load_check=load_check), query)
    load_check = quantile.load_check._replace(sufficient_load_s=sufficient_load_s)
    sample = sample._replace(load_part=_describe_part(sample, quantile), load_check=load_check)
    return LatencyEstimate(_widen_by_runs(quantile.interval, sample.values, query.p), sample)


def _describe_part(sample: SteadySample, quantile: BoundedQuantile) -> str:
    """Return the part of the load behind a quantile, as text, and how its upper end was found.

    The second is mentioned only if the upper end does not come from the sample itself, but from the
    variation between intervals of time.
    """
    descriptions = [sample.load_part] if sample.load_part else []
    if quantile.load_check.is_short and math.isfinite(quantile.interval.high):
        descriptions.append("upper end from the variation over time")
    return ", ".join(descriptions)


def _estimate_lower_end(sample: SteadySample, query: QuantileQuery) -> LatencyEstimate:
    """Return a quantile of a sample whose load was too short for an upper end.

    The upper end is only the worst state of the queue that the load met, or infinite.
    """
    interval = quantile_interval.estimate_quantile(sample.values, query.p, query.confidence)
    interval = _widen_by_runs(interval, sample.values, query.p)
    interval = replace(interval, high=max(interval.high, sample.upper_bound))
    return LatencyEstimate(interval, sample)


def estimate_selected_quantile(
    runs: Sequence[RecordedRun], values: RunSeries, query: QuantileQuery, load_s: float
) -> BoundedQuantile:
    """Return a quantile of values that were selected from a part of the load.

    A part is, for example, a window of time or the requests to one node.

    Args:
        runs: The runs of a level.
        values: The selected values of each run.
        query: The quantile.
        load_s: The length of the load in which these values were scheduled.
    """
    require_supported(values, query.p, query.metric, load_s)
    has_queueing = includes_queueing(runs, query.metric)
    load = load_in_residences(runs)
    if has_queueing and load is not None:
        # The selected part has as many residence times per second as the whole load.
        residences = load.residences * load_s / load.seconds
        selected_load = LoadLength(residences, load_s)
        load_check = load_checks.check_queue_tail(
            residences, selected_load, query.p, query.confidence, query.label
        )
        if load_check.is_short:
            interval = quantile_interval.estimate_quantile(values, query.p, query.confidence)
            return BoundedQuantile(replace(interval, high=math.inf), load_check)
    return _bound_quantile(values, query, load_s, has_queueing=has_queueing)


def _bound_quantile(
    values: RunSeries, query: QuantileQuery, load_s: float, *, has_queueing: bool
) -> BoundedQuantile:
    """Return a quantile, and the check whether the sample alone bounds it from above.

    If it does not, a metric without queueing time gets its upper end from the variation between
    intervals of time. Queueing time gets none: it is either near zero or long, so its variation so
    far does not say how long it may become.
    """
    interval = quantile_interval.estimate_quantile(values, query.p, query.confidence)
    load_check = load_checks.check_tail_clusters(values, query.p, query.confidence, load_s)
    if math.isinf(interval.high) and not has_queueing:
        interval = _with_tolerance_limit(interval, values, query, load_check)
    # One interval of time that is far slower than the others may be the first of several.
    outlier = quantile_interval.outlying_batch_quantile(values, query.p)
    return BoundedQuantile(replace(interval, high=max(interval.high, outlier)), load_check)


def _with_tolerance_limit(
    interval: Interval, values: RunSeries, query: QuantileQuery, load_check: LoadCheck
) -> Interval:
    """Return an interval without an upper end, bounded by the variation between intervals of time.

    The interval stays unbounded if the sample is large and its slow requests were spread over the
    load: then so many requests failed that the quantile itself may be infinite.
    """
    sample_size = quantile_interval.quantile_sample_size(values, query.p, query.confidence)
    is_small = sample_size < quantile_interval.MIN_EFFECTIVE_SIZE
    if not load_check.is_short and not is_small:
        return interval
    limit = quantile_interval.tolerance_limit(values, query.p, query.confidence)
    return replace(interval, high=max(interval.value, limit))


def run_quantiles(values: RunSeries, p: float) -> list[float]:
    """Return the quantile of each run that has values."""
    return [quantile_of(run_values, p) for run_values in values if len(run_values)]


def _widen_by_runs(interval: Interval, values: RunSeries, p: float) -> Interval:
    """Return an interval at least as wide as the quantiles of the single runs differ."""
    return intervals.widen_by_runs(interval, run_quantiles(values, p), log=True)


def widen_ratio_by_runs(
    ratio: Interval, numerators: Sequence[float], denominators: Sequence[float]
) -> Interval:
    """Return the interval of a ratio, at least as wide as the ratios of the single runs differ.

    Two runs can differ by more than the requests within one run show, for example because a server
    was restarted. Without a pair of quantiles for each run the interval stays as it is.
    """
    if len(numerators) != len(denominators) or not all(denominators):
        return ratio
    run_ratios = [
        numerator / denominator
        for numerator, denominator in zip(numerators, denominators, strict=True)
    ]
    return intervals.widen_by_runs(ratio, run_ratios, log=True)


def divide_latencies(numerator: Interval, denominator: Interval, denominator_name: str) -> Interval:
    """Return the ratio of two latency quantiles.

    It is infinite if the numerator is that of a failed request.

    Raises:
        EstimateError: The denominator is that of a failed request. The message has its name.
    """
    if math.isinf(denominator.value):
        raise EstimateError(
            f"too many requests of {denominator_name} failed, so it has no latency to compare with"
        )
    if math.isinf(numerator.value):
        # The interval of a ratio is computed on a logarithmic scale, which needs finite values.
        # The least possible ratio is that of the opposite ends.
        low = 0.0
        if math.isfinite(denominator.high):
            low = max(numerator.low, 0.0) / denominator.high
        return Interval(math.inf, low, math.inf, numerator.level)
    return intervals.ratio_of_intervals(numerator, denominator)
