"""Figures of repeated runs: their mean, its interval by the spread between runs, and when there are enough runs.

Pure. Each run is one value, whatever its length: an interval of a mean over runs covers what another start of the
server, or another time of day, does to it; the interval within one run does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import LEVEL
from loadgen.repeated.comparable_metrics import (
    SHARE_PATHS,
    default_metric_paths,
    find_metric,
    metric_value,
)

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import NamedSummary, Summary

FILE = "repeats.json"
MIN_RUNS = 3  # runs, before an interval may be called tight: two agree by chance too often
DEFAULT_MAX_RUNS = 10
DEFAULT_PRECISION = 0.05
TIGHT_METRICS = ("ttft_ms.p50", "tpot_ms.p50", "e2e_ms.p50", "tokens.steady_output_per_s")
"""The figures whose intervals have to be tight; those that a run has."""


class RepeatedMetric(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over all runs: `mean` with its interval (null with one run), and the values of the runs in order.

    `spread`: the standard deviation between runs, as a part of the mean; of a share, of one.
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
        """Half the width of the interval as a part of the mean; null where there is none."""
        if self.low is None or self.high is None or not self.mean:
            return None
        return (self.high - self.low) / 2 / abs(self.mean)


class RepeatSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `repeats.json`.

    Attributes:
        runs: The names of all runs, in order.
        seeds: The seed of each run.
        left_out: The names of the runs that are INVALID and so count in no figure. Empty if every
            run is INVALID: then the figures are those of all runs, and `valid` is false.
        valid: Whether the figures are those of valid runs.
        tight: Whether the figures of TIGHT_METRICS are known to `within`. Null if that was not requested.
    """

    schema: int = 1
    runs: tuple[str, ...]
    seeds: tuple[int | None, ...]
    confidence: float
    figures: tuple[RepeatedMetric, ...]
    valid: bool
    simulated: bool
    within: float | None = None
    tight: bool | None = None
    left_out: tuple[str, ...] = ()

    @property
    def counted_runs(self) -> tuple[str, ...]:
        """The names of the runs whose values are in the figures, in the order of the values."""
        return tuple(run for run in self.runs if run not in self.left_out)


class Repetition(msgspec.Struct, frozen=True, kw_only=True):
    """How often a load is repeated: `count` times, or (None) until tight, at most `most` times; with pauses between."""

    count: int | None = 1
    most: int = DEFAULT_MAX_RUNS
    within: float = DEFAULT_PRECISION
    pause_ns: int = 0

    @property
    def max_runs(self) -> int:
        return self.most if self.count is None else self.count

    @property
    def min_runs(self) -> int:
        return MIN_RUNS if self.count is None else self.count

    @property
    def description(self) -> str:
        if self.count is not None:
            return f"{self.count}"
        return f"{MIN_RUNS} to {self.most}, until the figures are known to {self.within * 100:g} %"

    def is_complete(self, summaries: Sequence[Summary]) -> bool:
        """Whether these runs are all that is asked for."""
        if len(summaries) >= self.max_runs:
            return True
        return self.count is None and is_tight(_figures(valid_or_all(summaries)), self.within)


def is_tight(figures: Sequence[RepeatedMetric], within: float) -> bool:
    """Whether every figure of TIGHT_METRICS that there is has an interval of at most `within` of it to either side."""
    judged = [one for one in figures if one.metric in TIGHT_METRICS and one.mean]
    return bool(judged) and all(
        len(one.values) >= MIN_RUNS and one.half_width is not None and one.half_width <= within
        for one in judged
    )


def is_valid(summary: Summary) -> bool:
    """Return True if the measurement of a run is valid."""
    return summary.verdict.valid


def valid_or_all(summaries: Sequence[Summary]) -> list[Summary]:
    """Return the summaries of the valid repeats, or all of them if none is valid.

    An INVALID run says nothing about the server, so it neither counts in a mean nor spoils the
    other repeats.
    """
    return [summary for summary in summaries if is_valid(summary)] or list(summaries)


def summarize_repeats(
    named: Sequence[NamedSummary], *, within: float | None = None
) -> RepeatSummary:
    """Return the summary of repeats of one load.

    `named` holds the name and the summary of each run, in order.
    """
    summaries = [summary for _, summary in named]
    figures = _figures(valid_or_all(summaries))
    has_valid_run = any(map(is_valid, summaries))
    invalid_runs = tuple(name for name, summary in named if not is_valid(summary))
    return RepeatSummary(
        runs=tuple(name for name, _ in named),
        seeds=tuple(summary.run.seed for summary in summaries),
        confidence=LEVEL,
        figures=figures,
        valid=has_valid_run,
        simulated=any(summary.target.simulated for summary in summaries),
        within=within,
        tight=None if within is None else is_tight(figures, within),
        left_out=invalid_runs if has_valid_run else (),
    )


def _figures(summaries: Sequence[Summary]) -> tuple[RepeatedMetric, ...]:
    """The figures that every run has."""
    made = []
    for path in default_metric_paths():
        known = find_metric(path)
        values = [
            value for summary in summaries if (value := metric_value(summary, path)) is not None
        ]
        if known is None or not values or len(values) < len(summaries):
            continue
        mean = float(np.mean(values))
        interval = intervals.replications(values, LEVEL)
        several = len(values) > 1
        low, high = interval.low, interval.high
        if path in SHARE_PATHS:  # runs without a failure do not say that there is none
            within = intervals.wilson(
                mean, sum(summary.requests.scheduled for summary in summaries), LEVEL
            )
            _, low, high = intervals.widened(intervals.Interval(mean, *within, LEVEL), values)
        spread = float(np.std(values, ddof=1)) if several else None
        if spread is not None and path not in SHARE_PATHS:
            spread = spread / abs(mean) if mean else None
        made.append(
            RepeatedMetric(
                metric=path,
                name=known.name,
                unit=known.unit,
                mean=mean,
                low=max(low, 0.0) if several else None,
                high=(min(high, 1.0) if path in SHARE_PATHS else high) if several else None,
                spread=spread,
                values=tuple(values),
            )
        )
    return tuple(made)
