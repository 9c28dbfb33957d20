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
from loadgen.contracts.steady_state import TimedValues
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
    clusters, such as one bad minute, the upper end is found in another way or is infinite.

    Args:
        loaded_runs: The runs of the level.
        query: The quantile.
        name: The name of the latency in messages.
        limit_ns: The limit of the term: unfinished requests that already exceed it count. None if
            the latency is only compared with another one.

    Raises:
        EstimateError: There are too few requests, or too many of them are unfinished.
    """
    timed_samples = [
        collect_timed_values(loaded_run.columns, query.metric, limit_ns=limit_ns)
        for loaded_run in loaded_runs
    ]
    runs = [loaded_run.run for loaded_run in loaded_runs]
    return estimate_quantile_of_samples(runs, timed_samples, query, name)


def estimate_quantile_of_samples(
    runs: Sequence[RecordedRun],
    timed_samples: Sequence[TimedValues],
    query: QuantileQuery,
    name: str,
) -> LatencyEstimate:
    """Return a quantile of any values of requests, of which a larger one is worse.

    Args:
        runs: The runs of the level.
        timed_samples: The values of each run.
        query: The quantile. Its metric says whether the values depend on queueing.
        name: The name of the values in messages.

    Raises:
        EstimateError: There are too few requests.
    """
    load_s = compute_load_length_s(timed_samples)
    require_enough_values([samples.values for samples in timed_samples], query.p, name, load_s)
    sample = select_steady_sample(runs, timed_samples, query)
    has_queueing = depends_on_queueing(runs, query.metric)

    quantile = _estimate_bounded_quantile(sample.values, query, load_s, has_queueing=has_queueing)
    if sample.load_check.is_short:
        estimate = _estimate_from_short_load(sample, query)
    else:
        estimate = _estimate_from_sufficient_load(sample, quantile, query)

    # A longer load has to pass both checks, whichever of them failed.
    sufficient_load_s = max(
        sample.load_check.sufficient_load_s, quantile.load_check.sufficient_load_s
    )
    return estimate.with_sufficient_load(sufficient_load_s)


def _estimate_from_sufficient_load(
    sample: SteadySample, quantile: BoundedQuantile, query: QuantileQuery
) -> LatencyEstimate:
    """Return a latency quantile if the load showed enough of how the server changes over time.

    Args:
        sample: The steady-state values.
        quantile: The quantile of these values, with the check whether the slowest requests came at
            enough different times.
        query: Which quantile of which metric is estimated.
    """
    described_sample = sample._replace(
        load_description=_describe_load_and_method(sample, quantile),
        load_check=quantile.load_check,
    )
    interval = _widen_by_runs(quantile.interval, sample.values, query.p)
    return LatencyEstimate(interval, described_sample)


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


def _estimate_from_short_load(sample: SteadySample, query: QuantileQuery) -> LatencyEstimate:
    """Return a latency quantile if the load was too short to show how slow the server can become.

    Such a load may have missed the slowest times, so only the low end of the confidence interval
    comes from its values. The high end is at least `sample.upper_bound`, which is the quantile in
    the slowest interval of time or, if even that is no bound, infinity.
    """
    ranked = quantile_interval.estimate_quantile(sample.values, query.p, query.confidence)
    widened = _widen_by_runs(ranked, sample.values, query.p)
    interval = replace(widened, high=max(widened.high, sample.upper_bound))
    return LatencyEstimate(interval, sample)


def estimate_quantile_of_selection(
    runs: Sequence[RecordedRun], values: RunSeries, query: QuantileQuery, load_s: float
) -> BoundedQuantile:
    """Return a quantile of selected requests of a load: those in a window of time or at one node.

    Terms that compare windows or nodes use this. Unlike `estimate_latency` it uses all of these
    requests, without a search for the steady state. The high end of the interval is infinite if
    the selected part of the load is too short to contain enough different queues.

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
    """Return a quantile with its confidence interval, with a finite high end where possible.

    The high end is a value of the sample if enough values lie above the quantile. Otherwise it is
    found from the variation over time: see `_find_high_end_from_variation`. In both cases it is at
    least the quantile of an interval of time that is far slower than all others (an outlier),
    because that may be the first of several.

    Args:
        values: The values of each run, in order of time.
        query: Which quantile of which metric is estimated.
        load_s: The length of the load that has these values.
        has_queueing: Whether the metric includes queueing time.
    """
    ranked = quantile_interval.estimate_quantile(values, query.p, query.confidence)
    tail_check = load_checks.check_tail_clusters(values, query.p, query.confidence, load_s)

    high = ranked.high
    if math.isinf(high) and not has_queueing:
        high = _find_high_end_from_variation(ranked, values, query, tail_check)

    outlier_quantile = quantile_interval.find_outlier_quantile(values, query.p)
    if outlier_quantile is not None:
        high = max(high, outlier_quantile)

    return BoundedQuantile(replace(ranked, high=high), tail_check)


def _find_high_end_from_variation(
    ranked: Interval, values: RunSeries, query: QuantileQuery, tail_check: LoadCheck
) -> float:
    """Return the high end of an interval from how its quantile varies over time, or infinity.

    The high end is an upper tolerance limit. Do not use it for a metric with queueing time: waits
    are near zero or long, so their variation so far does not say how long they may become.

    Args:
        ranked: The quantile with its interval, which has no finite high end.
        values: The values of each run, in order of time.
        query: Which quantile of which metric is estimated.
        tail_check: The check whether the slow requests came at enough different times.
    """
    if not _is_unbounded_by_few_samples(values, query, tail_check):
        return math.inf
    limit = quantile_interval.compute_tolerance_limit(values, query.p, query.confidence)
    return max(ranked.value, limit)


def _is_unbounded_by_few_samples(
    values: RunSeries, query: QuantileQuery, tail_check: LoadCheck
) -> bool:
    """Return whether the interval of a quantile has no finite high end because of too few samples.

    The other possible reason is failed requests, whose latency counts as infinite: if many failed,
    the true quantile may be infinite, and a finite high end would be wrong. That is the reason if
    the sample is large and its slow requests came at enough different times.

    Args:
        values: The values of each run, in order of time.
        query: Which quantile of which metric is estimated.
        tail_check: The check whether the slow requests came at enough different times.
    """
    sample_size = quantile_interval.estimate_quantile_sample_size(values, query.p, query.confidence)
    is_small_sample = sample_size < quantile_interval.MIN_EFFECTIVE_SIZE
    has_few_slow_times = tail_check.is_short
    return is_small_sample or has_few_slow_times


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
