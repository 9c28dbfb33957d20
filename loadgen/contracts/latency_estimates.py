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
    depends_on_queueing,
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

    def with_sufficient_load(self, sufficient_load_s: float) -> LatencyEstimate:
        """Return the estimate with another sufficient load in its load check."""
        load_check = self.sample.load_check._replace(sufficient_load_s=sufficient_load_s)
        return self._replace(sample=self.sample._replace(load_check=load_check))


class BoundedQuantile(NamedTuple):
    """A quantile with its interval, and the check whether the load was long enough for it."""

    interval: Interval
    load_check: LoadCheck

    @property
    def is_bounded_by_variation(self) -> bool:
        """Whether the upper end comes from the variation between intervals of time.

        Usually it is a value of the sample. If the check failed, no value of the sample can be the
        upper end, so a finite one is an upper tolerance limit.
        """
        return self.load_check.is_short and math.isfinite(self.interval.high)


def estimate_latency(
    loaded_runs: Sequence[LoadedRun],
    query: QuantileQuery,
    name: str,
    limit_ns: int | None = None,
) -> LatencyEstimate:
    """Return a quantile of a latency in the steady state of the runs of a level.

    The load can be too short in two respects. If the server or its queue changed too little during
    it, the values give only the lower end of the interval. If the slowest requests came in a few
    clusters, the upper end is found in another way or is infinite.

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
    has_queueing = depends_on_queueing(runs, query.metric)
    quantile = _estimate_bounded_quantile(sample.values, query, load_s, has_queueing=has_queueing)
    if sample.load_check.is_short:
        estimate = _estimate_lower_end(sample, query)
    else:
        estimate = _estimate_both_ends(sample, quantile, query)
    # A longer load has to pass both checks, whichever of them failed.
    sufficient_load_s = max(
        sample.load_check.sufficient_load_s, quantile.load_check.sufficient_load_s
    )
    return estimate.with_sufficient_load(sufficient_load_s)


def _estimate_both_ends(
    sample: SteadySample, quantile: BoundedQuantile, query: QuantileQuery
) -> LatencyEstimate:
    """Return the estimate of a latency from a load that was long enough for the server.

    Args:
        sample: The steady-state values.
        quantile: Their quantile, with the check whether the slowest requests were spread out.
        query: The quantile that is estimated.
    """
    sample = sample._replace(
        load_description=_describe_load_and_method(sample, quantile),
        load_check=quantile.load_check,
    )
    interval = _widen_by_runs(quantile.interval, sample.values, query.p)
    return LatencyEstimate(interval, sample)


def _describe_load_and_method(sample: SteadySample, quantile: BoundedQuantile) -> str:
    """Return which part of the load a quantile is from and, if unusual, how its end was found.

    The upper end of an interval usually is a value of the sample. The text says so if it comes from
    the variation between intervals of time instead. Example: "steady state from 1 min 29 s, upper
    end from the variation over time".
    """
    descriptions = []
    if sample.load_description:
        descriptions.append(sample.load_description)
    if quantile.is_bounded_by_variation:
        descriptions.append("upper end from the variation over time")
    return ", ".join(descriptions)


def _estimate_lower_end(sample: SteadySample, query: QuantileQuery) -> LatencyEstimate:
    """Return a quantile of a sample whose load was too short for an upper end.

    The upper end is at least the upper bound of the sample: the quantile in the slowest interval of
    the load, or infinity.
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
    has_queueing = depends_on_queueing(runs, query.metric)
    if has_queueing:
        queue_check = _check_queue_of_selection(runs, query, load_s)
        if queue_check.is_short:
            interval = quantile_interval.estimate_quantile(values, query.p, query.confidence)
            return BoundedQuantile(replace(interval, high=math.inf), queue_check)
    return _estimate_bounded_quantile(values, query, load_s, has_queueing=has_queueing)


def _check_queue_of_selection(
    runs: Sequence[RecordedRun], query: QuantileQuery, selected_load_s: float
) -> LoadCheck:
    """Check whether a part of the load is long enough for a quantile of a queueing metric.

    Requests within one residence time (from scheduled start to end) wait in the same queue, so the
    number of residence times in the part stands for the number of independent observations. A
    closed loop passes, because its concurrency limits the queue.

    Args:
        runs: The runs of a level.
        query: The quantile.
        selected_load_s: The length of the selected part of the load.
    """
    open_loop_length = measure_load_length(runs)
    if open_loop_length is None:
        return LoadCheck()
    selected_residence_times = (
        open_loop_length.residence_times * selected_load_s / open_loop_length.seconds
    )
    return load_checks.check_queue_tail(
        sample_size=selected_residence_times,
        load=LoadLength(selected_residence_times, selected_load_s),
        p=query.p,
        confidence=query.confidence,
        metric_label=query.label,
    )


def _estimate_bounded_quantile(
    values: RunSeries, query: QuantileQuery, load_s: float, *, has_queueing: bool
) -> BoundedQuantile:
    """Return a quantile whose interval has an upper end, if the sample allows one.

    - The upper end is a value of the sample if enough values lie above the quantile.
    - Otherwise it is an upper tolerance limit, computed from the variation between intervals of
      time. A metric with queueing time gets none and stays unbounded: waits are near zero or long,
      so their variation so far does not say how long they may become.
    - It is at least the quantile of an interval of time that is far slower than all others, because
      that may be the first of several.

    Args:
        values: The values of each run, in order of time.
        query: The quantile.
        load_s: The length of the load that has these values.
        has_queueing: Whether the metric includes queueing time.
    """
    ranked = quantile_interval.estimate_quantile(values, query.p, query.confidence)
    load_check = load_checks.check_tail_clusters(values, query.p, query.confidence, load_s)
    upper_end = ranked.high
    needs_tolerance_limit = math.isinf(ranked.high) and not has_queueing
    if needs_tolerance_limit and _has_finite_quantile(values, query, load_check):
        limit = quantile_interval.compute_tolerance_limit(values, query.p, query.confidence)
        upper_end = max(ranked.value, limit)
    slowest_outlier = quantile_interval.find_outlier_quantile(values, query.p)
    if slowest_outlier is not None:
        upper_end = max(upper_end, slowest_outlier)
    return BoundedQuantile(replace(ranked, high=upper_end), load_check)


def _has_finite_quantile(values: RunSeries, query: QuantileQuery, load_check: LoadCheck) -> bool:
    """Return whether an unbounded quantile may be finite, so that a tolerance limit makes sense.

    The rank interval of a quantile has no upper end for one of two reasons. Either there are too
    few independent slow requests, and a tolerance limit can bound it. Or so many requests failed,
    which counts as an infinite latency, that the true quantile may be infinite. The second reason
    applies if the sample is large and its slow requests were spread over the load.

    Args:
        values: The values of each run, in order of time.
        query: The quantile.
        load_check: The check whether the slow requests were spread over the load.
    """
    sample_size = quantile_interval.estimate_quantile_sample_size(values, query.p, query.confidence)
    is_small_sample = sample_size < quantile_interval.MIN_EFFECTIVE_SIZE
    return is_small_sample or load_check.is_short


def compute_run_quantiles(values: RunSeries, p: float) -> list[float]:
    """Return the quantile of each run that has values."""
    return [quantile_of(run_values, p) for run_values in values if len(run_values)]


def _widen_by_runs(interval: Interval, values: RunSeries, p: float) -> Interval:
    """Return the interval of a quantile, widened if the quantiles of single runs differ by more.

    Two runs can differ by more than the requests within one run suggest, for example because the
    server was restarted between them.
    """
    return intervals.widen_by_runs(interval, compute_run_quantiles(values, p), on_log_scale=True)


def widen_ratio_by_runs(
    ratio: Interval, numerators: Sequence[float], denominators: Sequence[float]
) -> Interval:
    """Return the interval of a ratio, widened if the ratios of the single runs differ by more.

    Two runs can differ by more than the requests within one run suggest, for example because the
    server was restarted between them.

    Args:
        ratio: The ratio with its interval from the requests of all runs.
        numerators: The numerator of each run.
        denominators: The denominator of each run.
    """
    has_missing_run = len(numerators) != len(denominators)
    has_zero_denominator = not all(denominators)
    if has_missing_run or has_zero_denominator:
        return ratio  # the ratio of a run is not known
    run_ratios = [
        numerator / denominator
        for numerator, denominator in zip(numerators, denominators, strict=True)
    ]
    # Ratios vary by factors, so they are compared on a logarithmic scale.
    return intervals.widen_by_runs(ratio, run_ratios, on_log_scale=True)


def divide_latencies(numerator: Interval, denominator: Interval, denominator_name: str) -> Interval:
    """Return the ratio of two latency quantiles with its interval.

    A failed request counts as an infinite latency, so a quantile is infinite if many requests
    failed. If that is the numerator, the ratio is infinite too, and only its lower end is known.

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
    if math.isfinite(numerator.value):
        return intervals.divide_intervals(numerator, denominator)
    # `divide_intervals` needs finite values. The least possible ratio is the low end of the
    # numerator divided by the high end of the denominator.
    lowest_ratio = 0.0
    if math.isfinite(denominator.high):
        lowest_ratio = max(numerator.low, 0.0) / denominator.high
    return Interval(math.inf, lowest_ratio, math.inf, numerator.level)
