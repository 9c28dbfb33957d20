"""Summarizes repeats of one load: the mean of each metric, and the interval of the mean.

Every run counts as one value, whatever its length. The interval of the mean therefore covers what
another start of the server or another time of day changes, which the interval within one run does
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import LEVEL
from loadgen.repeated.comparable_metrics import (
    SHARE_PATHS,
    Metric,
    default_metric_paths,
    find_metric,
    metric_value,
)

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import NamedSummary, Summary

FILE = "repeats.json"
MIN_RUNS = 3
"""Runs before a mean may be called precise: two runs agree by chance too often."""
DEFAULT_MAX_RUNS = 10
DEFAULT_PRECISION = 0.05
PRECISION_METRICS = ("ttft_ms.p50", "tpot_ms.p50", "e2e_ms.p50", "tokens.steady_output_per_s")
"""The paths of the metrics whose means have to be precise, of those that a run has."""


class RepeatedMetric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric over all runs.

    Attributes:
        metric: Its path in `summary.json`.
        name: Its name for readers.
        unit: Its unit.
        mean: The mean of the runs.
        low: The lower end of the interval of the mean. Null with one run.
        high: The upper end.
        spread: The standard deviation between runs, as a part of the mean; of a share, in points.
            Null with one run.
        values: The values of the runs, in order.
    """

    metric: str
    name: str
    unit: str
    mean: float
    low: float | None
    high: float | None
    spread: float | None
    values: tuple[float, ...]

    @property
    def half_width(self) -> float | None:
        """Half the width of the interval as a part of the mean, or None if there is no interval."""
        if self.low is None or self.high is None or not self.mean:
            return None
        return (self.high - self.low) / 2 / abs(self.mean)


class RepeatSummary(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "metrics": "figures",
        "excluded_runs": "left_out",
        "requested_precision": "within",
        "is_precise": "tight",
    },
):
    """The content of `repeats.json`.

    Attributes:
        schema: The version of the format.
        runs: The names of all runs, in order.
        seeds: The seed of each run.
        confidence: The confidence level of the intervals.
        metrics: The metrics that every run has.
        valid: Whether the metrics are those of valid runs.
        simulated: Whether a performance model responded instead of a real server.
        requested_precision: The largest half width of the interval of each metric of
            PRECISION_METRICS, as a fraction of its mean. Null if none was requested.
        is_precise: Whether these metrics have that precision. Null if none was requested.
        excluded_runs: The names of the runs that are INVALID and so count in no metric. Empty if
            every run is INVALID: then the metrics are those of all runs, and `valid` is false.
    """

    schema: int = 1
    runs: tuple[str, ...]
    seeds: tuple[int | None, ...]
    confidence: float
    metrics: tuple[RepeatedMetric, ...]
    valid: bool
    simulated: bool
    requested_precision: float | None = None
    is_precise: bool | None = None
    excluded_runs: tuple[str, ...] = ()

    @property
    def counted_runs(self) -> tuple[str, ...]:
        """The names of the runs whose values are in the metrics, in the order of the values."""
        return tuple(run for run in self.runs if run not in self.excluded_runs)


class Repetition(msgspec.Struct, frozen=True, kw_only=True):
    """How often a load is repeated.

    Attributes:
        count: The number of runs. None to repeat until the means have the requested precision.
        most: The largest number of runs if `count` is None.
        precision: The largest half width of an interval, as a fraction of the mean, with which the
            runs end if `count` is None.
        pause_ns: The pause between two runs.
    """

    count: int | None = 1
    most: int = DEFAULT_MAX_RUNS
    precision: float = DEFAULT_PRECISION
    pause_ns: int = 0

    @property
    def max_runs(self) -> int:
        """The largest number of runs."""
        return self.most if self.count is None else self.count

    @property
    def min_runs(self) -> int:
        """The smallest number of runs."""
        return MIN_RUNS if self.count is None else self.count

    @property
    def description(self) -> str:
        """The number of runs as text."""
        if self.count is not None:
            return f"{self.count}"
        percent = f"{self.precision * 100:g} %"
        return f"{MIN_RUNS} to {self.most}, until the metrics are known to {percent}"

    def is_complete(self, summaries: Sequence[Summary]) -> bool:
        """Return whether no more runs than these are needed."""
        if len(summaries) >= self.max_runs:
            return True
        if self.count is not None:
            return False
        return has_precision(summarize_metrics(valid_or_all(summaries)), self.precision)


def is_valid(summary: Summary) -> bool:
    """Return True if the measurement of a run is valid."""
    return summary.verdict.valid


def valid_or_all(summaries: Sequence[Summary]) -> list[Summary]:
    """Return the summaries of the valid repeats, or all of them if none is valid.

    An INVALID run says nothing about the server, so it neither counts in a mean nor spoils the
    other repeats.
    """
    valid = [summary for summary in summaries if is_valid(summary)]
    return valid or list(summaries)


def has_precision(metrics: Sequence[RepeatedMetric], precision: float) -> bool:
    """Return whether the intervals of all metrics of PRECISION_METRICS are narrow enough.

    `precision` is the largest half width of an interval, as a fraction of the mean. Return False if
    the runs have none of these metrics.
    """
    examined = [metric for metric in metrics if metric.metric in PRECISION_METRICS and metric.mean]
    return bool(examined) and all(_is_narrow(metric, precision) for metric in examined)


def _is_narrow(metric: RepeatedMetric, precision: float) -> bool:
    """Return whether a metric has enough values and an interval that is narrow enough."""
    if len(metric.values) < MIN_RUNS or metric.half_width is None:
        return False
    return metric.half_width <= precision


def summarize_repeats(
    runs: Sequence[NamedSummary], *, requested_precision: float | None = None
) -> RepeatSummary:
    """Return the summary of repeats of one load: the means of their metrics with intervals.

    INVALID runs are excluded from the means. If all runs are INVALID, none is excluded, and the
    summary is marked as not valid.

    Args:
        runs: The name and the summary of each run, in order.
        requested_precision: The largest half width of an interval, as a fraction of the mean, if
            the load was repeated until the means were so precise. None if the number of repeats was
            fixed.
    """
    summaries = [run.summary for run in runs]
    metrics = summarize_metrics(valid_or_all(summaries))
    has_valid_run = any(map(is_valid, summaries))
    invalid_runs = tuple(run.name for run in runs if not is_valid(run.summary))

    is_precise = None
    if requested_precision is not None:
        is_precise = has_precision(metrics, requested_precision)

    return RepeatSummary(
        runs=tuple(run.name for run in runs),
        seeds=tuple(summary.run.seed for summary in summaries),
        confidence=LEVEL,
        metrics=metrics,
        valid=has_valid_run,
        simulated=any(summary.target.simulated for summary in summaries),
        requested_precision=requested_precision,
        is_precise=is_precise,
        excluded_runs=invalid_runs if has_valid_run else (),
    )


def summarize_metrics(summaries: Sequence[Summary]) -> tuple[RepeatedMetric, ...]:
    """Return the mean over several runs of each metric that all of them have.

    Each mean has its confidence interval. A metric is identified by its path in the summary, such
    as `ttft_ms.p50`.
    """
    request_count = sum(summary.requests.scheduled for summary in summaries)
    repeated_metrics = []
    for path in default_metric_paths():
        metric = find_metric(path)
        values = [metric_value(summary, path) for summary in summaries]
        known_values = [value for value in values if value is not None]
        has_all_values = bool(known_values) and len(known_values) == len(summaries)
        if metric is not None and has_all_values:
            repeated_metrics.append(_summarize_metric(metric, known_values, request_count))

    return tuple(repeated_metrics)


class _MeanInterval(NamedTuple):
    """The confidence interval of the mean of several runs. Both ends are None for one run."""

    low: float | None
    high: float | None


def _summarize_metric(
    metric: Metric, values: Sequence[float], request_count: int
) -> RepeatedMetric:
    """Return the mean of a metric over several runs, its confidence interval and its spread.

    Args:
        metric: The metric.
        values: Its value in each run.
        request_count: The number of requests of all runs together.
    """
    interval = _mean_interval(metric, values, request_count)
    return RepeatedMetric(
        metric=metric.path,
        name=metric.name,
        unit=metric.unit,
        mean=float(np.mean(values)),
        low=interval.low,
        high=interval.high,
        spread=_relative_spread(metric, values),
        values=tuple(values),
    )


def _relative_spread(metric: Metric, values: Sequence[float]) -> float | None:
    """Return the standard deviation between runs as a fraction of the mean, or None for one run.

    For a share (0 to 1), it is the standard deviation itself, because a fraction of a mean near 0
    would be meaninglessly large.
    """
    if len(values) < 2:
        return None
    standard_deviation = float(np.std(values, ddof=1))
    if metric.path in SHARE_PATHS:
        return standard_deviation
    mean = float(np.mean(values))
    return standard_deviation / abs(mean) if mean else None


def _mean_interval(metric: Metric, values: Sequence[float], request_count: int) -> _MeanInterval:
    """Return the confidence interval of the mean of several runs, which is not below 0.

    It is the interval of Student's t distribution, with each run as one value. That of a share,
    such as the fraction of successful requests, also depends on the number of requests. A single
    run has no interval.

    Args:
        metric: The metric.
        values: Its value in each run.
        request_count: The number of requests of all runs together.
    """
    if len(values) < 2:
        return _MeanInterval(low=None, high=None)
    if metric.path in SHARE_PATHS:
        return _share_interval(values, request_count)
    interval = intervals.mean_of_runs(values, LEVEL)  # independent runs of the same load
    return _MeanInterval(low=max(interval.low, 0.0), high=interval.high)


def _share_interval(shares: Sequence[float], request_count: int) -> _MeanInterval:
    """Return the confidence interval of the mean of shares (0 to 1), such as that of ok requests.

    It covers two intervals: that of Student's t distribution with each run as one value, and the
    Wilson score interval (Wilson, 1927) of a proportion with each request as one trial. The second
    one matters if all requests of all runs were ok: then the first one has no width, although a
    few of further requests may fail.

    Args:
        shares: The share in each run.
        request_count: The number of requests of all runs together.
    """
    mean_share = float(np.mean(shares))
    low, high = intervals.wilson_interval(mean_share, request_count, LEVEL)
    wilson_interval = intervals.Interval(mean_share, low, high, LEVEL)
    # This computes the t interval of the shares, and extends the Wilson interval to include it.
    covering_interval = intervals.widen_by_runs(wilson_interval, shares)
    return _MeanInterval(low=max(covering_interval.low, 0.0), high=min(covering_interval.high, 1.0))
