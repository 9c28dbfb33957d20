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
"""Runs before an interval may be called tight: two runs agree by chance too often."""
DEFAULT_MAX_RUNS = 10
DEFAULT_PRECISION = 0.05
TIGHT_METRICS = ("ttft_ms.p50", "tpot_ms.p50", "e2e_ms.p50", "tokens.steady_output_per_s")
"""The paths of the metrics whose intervals have to be tight, of those that a run has."""


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
    rename={"metrics": "figures", "excluded_runs": "left_out"},
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
        within: The requested precision of the metrics of TIGHT_METRICS. Null if none was requested.
        tight: Whether they are known to that precision. Null if none was requested.
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
    within: float | None = None
    tight: bool | None = None
    excluded_runs: tuple[str, ...] = ()

    @property
    def counted_runs(self) -> tuple[str, ...]:
        """The names of the runs whose values are in the metrics, in the order of the values."""
        return tuple(run for run in self.runs if run not in self.excluded_runs)


class Repetition(msgspec.Struct, frozen=True, kw_only=True):
    """How often a load is repeated.

    Attributes:
        count: The number of runs. None to repeat until the metrics are known to `within`.
        most: The largest number of runs if `count` is None.
        within: The precision to reach if `count` is None.
        pause_ns: The pause between two runs.
    """

    count: int | None = 1
    most: int = DEFAULT_MAX_RUNS
    within: float = DEFAULT_PRECISION
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
        percent = f"{self.within * 100:g} %"
        return f"{MIN_RUNS} to {self.most}, until the figures are known to {percent}"

    def is_complete(self, summaries: Sequence[Summary]) -> bool:
        """Return whether no more runs than these are needed."""
        if len(summaries) >= self.max_runs:
            return True
        if self.count is not None:
            return False
        return is_tight(summarize_metrics(valid_or_all(summaries)), self.within)


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


def is_tight(metrics: Sequence[RepeatedMetric], within: float) -> bool:
    """Return whether every metric of TIGHT_METRICS is known to this part of its mean.

    Return False if the runs have none of these metrics.
    """
    judged = [metric for metric in metrics if metric.metric in TIGHT_METRICS and metric.mean]
    return bool(judged) and all(_is_known_to(metric, within) for metric in judged)


def _is_known_to(metric: RepeatedMetric, within: float) -> bool:
    """Return whether the interval of a metric is no wider than this part of its mean."""
    if len(metric.values) < MIN_RUNS or metric.half_width is None:
        return False
    return metric.half_width <= within


def summarize_repeats(
    runs: Sequence[NamedSummary], *, within: float | None = None
) -> RepeatSummary:
    """Return the summary of repeats of one load.

    Args:
        runs: The name and the summary of each run, in order.
        within: The requested precision, or None.
    """
    summaries = [run.summary for run in runs]
    metrics = summarize_metrics(valid_or_all(summaries))
    has_valid_run = any(map(is_valid, summaries))
    invalid_runs = tuple(run.name for run in runs if not is_valid(run.summary))
    return RepeatSummary(
        runs=tuple(run.name for run in runs),
        seeds=tuple(summary.run.seed for summary in summaries),
        confidence=LEVEL,
        metrics=metrics,
        valid=has_valid_run,
        simulated=any(summary.target.simulated for summary in summaries),
        within=within,
        tight=None if within is None else is_tight(metrics, within),
        excluded_runs=invalid_runs if has_valid_run else (),
    )


def summarize_metrics(summaries: Sequence[Summary]) -> tuple[RepeatedMetric, ...]:
    """Return the metrics that every one of these runs has."""
    request_count = sum(summary.requests.scheduled for summary in summaries)
    summarized = []
    for path in default_metric_paths():
        metric = find_metric(path)
        values = [metric_value(summary, path) for summary in summaries]
        known = [value for value in values if value is not None]
        if metric is not None and known and len(known) == len(summaries):
            summarized.append(_summarize(metric, known, request_count))
    return tuple(summarized)


class _Spread(NamedTuple):
    """The interval of a mean, and the standard deviation between runs."""

    low: float
    high: float
    standard_deviation: float


def _summarize(metric: Metric, values: Sequence[float], request_count: int) -> RepeatedMetric:
    """Return one metric over all runs, which have `request_count` requests together.

    The spread is relative to the mean, for example 0.03. That of a share is in points, because a
    relative spread of a share near 0 says nothing.
    """
    mean = float(np.mean(values))
    spread = None
    relative_spread = None
    if len(values) > 1:
        spread = _spread_of(metric, values, request_count)
        relative_spread = spread.standard_deviation
        if metric.path not in SHARE_PATHS:
            relative_spread = spread.standard_deviation / abs(mean) if mean else None
    return RepeatedMetric(
        metric=metric.path,
        name=metric.name,
        unit=metric.unit,
        mean=mean,
        low=None if spread is None else spread.low,
        high=None if spread is None else spread.high,
        spread=relative_spread,
        values=tuple(values),
    )


def _spread_of(metric: Metric, values: Sequence[float], request_count: int) -> _Spread:
    """Return the interval of the mean of several runs, and their standard deviation.

    The interval of a share is at least as wide as the number of requests implies: runs without a
    failure do not show that there are none.
    """
    interval = intervals.replications(values, LEVEL)
    low = interval.low
    high = interval.high
    if metric.path in SHARE_PATHS:
        mean = float(np.mean(values))
        by_requests = intervals.Interval(mean, *intervals.wilson(mean, request_count, LEVEL), LEVEL)
        _, low, high = intervals.widen_by_runs(by_requests, values)
        high = min(high, 1.0)
    return _Spread(max(low, 0.0), high, float(np.std(values, ddof=1)))
