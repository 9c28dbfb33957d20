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
    has_queueing_time,
    measure_load_length,
)
from loadgen.contracts.steady_samples import (
    QuantileQuery,
    SteadySample,
    collect_timed_values,
    compute_load_length_s,
    require_enough_values,
    select_steady_sample,
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
    """A quantile with its interval, and the check whether the load is long enough for it.

    If the check failed, the upper end of the interval does not come from the ranks of the values:
    it comes from the variation between intervals of time, or is infinite.
    """

    interval: Interval
    load_check: LoadCheck


def estimate_latency(
    loaded_runs: Sequence[LoadedRun],
    query: QuantileQuery,
    name: str,
    limit_ns: int | None = None,
) -> LatencyEstimate:
    """Return a quantile of a latency in the steady state of the runs of a level.

    The load has to be long enough in two respects: its steady state has to show enough states of
    the server, and its slowest requests must not come from a few clusters. If the first check
    fails, the interval has no upper end, or only the upper bound of the steady sample.

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
        collect_timed_values(loaded_run.columns, query.metric, limit_ns=limit_ns)
        for loaded_run in loaded_runs
    ]
    load_s = compute_load_length_s(timed_samples)
    require_enough_values([samples.values for samples in timed_samples], query.p, name, load_s)
    sample = select_steady_sample(runs, timed_samples, query)
    quantile = _estimate_bounded_quantile(
        sample.values, query, load_s, has_queueing=has_queueing_time(runs, query.metric)
    )
    # A longer load has to pass both checks, whichever of them failed.
    sufficient_load_s = max(
        sample.load_check.sufficient_load_s, quantile.load_check.sufficient_load_s
    )
    if sample.load_check.is_short:
        load_check = sample.load_check._replace(sufficient_load_s=sufficient_load_s)
        return _estimate_lower_end(sample._replace(load_check=load_check), query)
    sample = sample._replace(
        load_description=_describe_load_and_method(sample, quantile),
        load_check=quantile.load_check._replace(sufficient_load_s=sufficient_load_s),
    )
    interval = _widen_by_runs(quantile.interval, sample.values, query.p)
    return LatencyEstimate(interval, sample)


def _describe_load_and_method(sample: SteadySample, quantile: BoundedQuantile) -> str:
    """Return which part of the load a quantile is from and, if unusual, how its end was found.

    The upper end of an interval usually is a value of the sample. The text says so if it comes from
    the variation between intervals of time instead.
    """
    descriptions = [sample.load_description] if sample.load_description else []
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
    """Return a quantile of some requests of a load: those in one window of time or at one node.

    Terms that compare windows or nodes use this. Unlike `estimate_latency` it uses all
    of these requests, without a search for the steady state.

    Args:
        runs: The runs of a level.
        values: The values of the selected requests of each run.
        query: The quantile.
        load_s: The length of the load in which these requests were scheduled.
    """
    require_enough_values(values, query.p, query.metric, load_s)
    has_queueing = has_queueing_time(runs, query.metric)
    full_load = measure_load_length(runs)
    if has_queueing and full_load is not None:
        # The selected time has as many residence times per second as the full load.
        residences = full_load.residences * load_s / full_load.seconds
        load_check = load_checks.check_queue_tail(
            sample_size=residences,
            load=LoadLength(residences, load_s),
            p=query.p,
            confidence=query.confidence,
            metric_label=query.label,
        )
        if load_check.is_short:
            interval = quantile_interval.estimate_quantile(values, query.p, query.confidence)
            return BoundedQuantile(replace(interval, high=math.inf), load_check)
    return _estimate_bounded_quantile(values, query, load_s, has_queueing=has_queueing)


def _estimate_bounded_quantile(
    values: RunSeries, query: QuantileQuery, load_s: float, *, has_queueing: bool
) -> BoundedQuantile:
    """Return a quantile whose interval has an upper end, if the sample allows one.

    The upper end is a value of the sample if the sample is large enough. If it is not, a metric
    without queueing time gets an upper tolerance limit, from the variation between intervals of
    time. Queueing time gets none: it is either near zero or long, so its variation so far does not
    say how long it may become.

    Args:
        values: The values of each run, in order of time.
        query: The quantile.
        load_s: The length of the load that has these values.
        has_queueing: Whether the metric includes queueing time.
    """
    interval = quantile_interval.estimate_quantile(values, query.p, query.confidence)
    load_check = load_checks.check_tail_clusters(values, query.p, query.confidence, load_s)
    if math.isinf(interval.high) and not has_queueing:
        interval = _add_tolerance_limit(interval, values, query, load_check)
    # One interval of time that is far slower than the others may be the first of several.
    outlier = quantile_interval.find_outlier_quantile(values, query.p)
    interval = replace(interval, high=max(interval.high, outlier))
    return BoundedQuantile(interval, load_check)


def _add_tolerance_limit(
    interval: Interval, values: RunSeries, query: QuantileQuery, load_check: LoadCheck
) -> Interval:
    """Return the interval of a quantile with an upper tolerance limit in place of infinity.

    The interval stays unbounded if the sample is large and its slow requests were spread over the
    load: then so many requests failed that the quantile itself may be infinite.

    Args:
        interval: The interval without an upper end.
        values: The values of each run, in order of time.
        query: The quantile.
        load_check: The check whether the slow requests were spread over the load.
    """
    sample_size = quantile_interval.estimate_quantile_sample_size(values, query.p, query.confidence)
    is_small_sample = sample_size < quantile_interval.MIN_EFFECTIVE_SIZE
    if not load_check.is_short and not is_small_sample:
        return interval
    limit = quantile_interval.compute_tolerance_limit(values, query.p, query.confidence)
    return replace(interval, high=max(interval.value, limit))


def compute_run_quantiles(values: RunSeries, p: float) -> list[float]:
    """Return the quantile of each run that has values."""
    return [quantile_of(run_values, p) for run_values in values if len(run_values)]


def _widen_by_runs(interval: Interval, values: RunSeries, p: float) -> Interval:
    """Return an interval at least as wide as the quantiles of the single runs differ."""
    return intervals.widen_by_runs(interval, compute_run_quantiles(values, p), on_log_scale=True)


def widen_ratio_by_runs(
    ratio: Interval, numerators: Sequence[float], denominators: Sequence[float]
) -> Interval:
    """Return the interval of a ratio, at least as wide as the ratios of the single runs differ.

    Two runs can differ by more than the requests within one run show, for example because a server
    was restarted. The interval stays as it is if a run has no ratio.

    Args:
        ratio: The ratio with its interval from the requests of all runs.
        numerators: The numerator of each run.
        denominators: The denominator of each run.
    """
    if len(numerators) != len(denominators) or not all(denominators):
        return ratio
    run_ratios = [
        numerator / denominator
        for numerator, denominator in zip(numerators, denominators, strict=True)
    ]
    # Ratios vary by factors, so they are compared on a logarithmic scale.
    return intervals.widen_by_runs(ratio, run_ratios, on_log_scale=True)


def divide_latencies(numerator: Interval, denominator: Interval, denominator_name: str) -> Interval:
    """Return the ratio of two latency quantiles with its interval.

    A quantile is infinite if so many requests failed that it is the latency of a failed one. The
    ratio is then infinite too if this is the numerator.

    Args:
        numerator: The quantile to divide.
        denominator: The quantile to divide by.
        denominator_name: The origin of the denominator in messages, such as "the first window".

    Raises:
        EstimateError: The denominator is infinite.
    """
    if math.isinf(denominator.value):
        raise EstimateError(
            f"too many requests of {denominator_name} failed, so it has no latency to compare with"
        )
    if math.isinf(numerator.value):
        # The interval of a ratio is computed on a logarithmic scale, which needs finite values. The
        # least possible ratio is the low end of the numerator by the high end of the denominator.
        low = 0.0
        if math.isfinite(denominator.high):
            low = max(numerator.low, 0.0) / denominator.high
        return Interval(math.inf, low, math.inf, numerator.level)
    return intervals.divide_intervals(numerator, denominator)
