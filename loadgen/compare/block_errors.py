"""Computes metrics of several runs taken as one, with standard errors from blocks of time.

Pure. `core.analysis.within_run_variance` does the same for a single run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.analysis.within_run_variance import (
    BLOCKS,
    LEAST_SAMPLES,
    ScaledEstimate,
    blocks_beyond,
    estimate_mean,
    estimate_rate,
    in_order,
    pieces_of,
    rank_error,
)
from loadgen.core.metrics.columns import OK, UNDEFINED, Columns
from loadgen.core.metrics.windows import Span, spread_tokens
from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import Interval
from loadgen.core.stats.quantiles import QUANTILES, SUPPORT, quantile_of
from loadgen.repeated.comparable_metrics import Metric

RESAMPLES = 300
"""Resamples of a bootstrap, which give a standard error to 4 %."""

MOST_RESAMPLED = 20_000
"""Samples above which the rank of a percentile is used instead: the same result at less cost."""

ONE_SIGMA_LEVEL = math.erf(1 / math.sqrt(2))
"""Level of a normal interval whose half width is the standard error."""


class EstimateOrReason(NamedTuple):
    """An estimate, or why there is none."""

    estimate: ScaledEstimate | None
    reason: str = ""


class StretchCount(NamedTuple):
    """How many stretches of time there are, and in how many of them a percentile is high."""

    above: int
    total: int


def samples(columns: Columns, metric: str) -> NDArray[np.int64]:
    """Return the values of a metric of successful requests, ordered by scheduled time."""
    values = columns.measure(metric)
    return in_order(columns, values, columns.where(OK) & (values != UNDEFINED))


def too_few_samples(runs: Sequence[Columns], metric: Metric) -> str:
    """Return why the runs together do not support a percentile, or "" if they do."""
    percentile = next((name for name, p in QUANTILES if p == metric.p), "")
    count = sum(len(samples(run, metric.per_request)) for run in runs)
    if not percentile or count >= SUPPORT[percentile]:
        return ""
    return f"{count:,} samples, {percentile.replace('_', '.')} needs {SUPPORT[percentile]:,}"


def estimate_latency(runs: Sequence[Columns], metric: Metric, value: float) -> EstimateOrReason:
    """Return a percentile or mean of successful requests, with its error by blocks of time.

    Args:
        runs: The records of each run.
        metric: The metric.
        value: Its value in the summary.
    """
    values = _all_samples(runs, metric)
    reason = too_few_samples(runs, metric)
    if reason:
        return EstimateOrReason(None, reason)
    if len(values) < LEAST_SAMPLES:
        return EstimateOrReason(None, f"{len(values):,} samples are too few for blocks")
    if metric.p is None:
        mean = estimate_mean(values)
        if mean is None:
            return EstimateOrReason(None)
        scaled = ScaledEstimate(math.log(value), mean.error / mean.value, mean.freedom)
        return EstimateOrReason(scaled)
    error, freedom = percentile_error(values, metric.p)
    if not math.isfinite(error):
        return EstimateOrReason(None, "too few samples beyond it")
    return EstimateOrReason(ScaledEstimate(math.log(value), error, freedom))


def estimate_token_rate(
    windows: Sequence[Span], runs: Sequence[Columns], value: float
) -> EstimateOrReason:
    """Return output tokens per second in the steady state, with the error by pieces of that time.

    Args:
        windows: The steady-state window of each run.
        runs: The records of each run.
        value: The rate in the summary.
    """
    rates: list[float] = []
    for window, run in zip(windows, runs, strict=True):
        pieces = pieces_of(window)
        if not pieces:
            return EstimateOrReason(None, "no time under load")
        rates += [spread_tokens(run, piece) / (piece.duration_s or 1) for piece in pieces]
    estimate = estimate_rate(rates, value)
    return EstimateOrReason(estimate, "" if estimate is not None else "no tokens under load")


class StandardError(NamedTuple):
    """A standard error of the logarithm of a metric, and its degrees of freedom."""

    error: float
    freedom: float


def error_within_runs(runs: Sequence[Columns], metric: Metric) -> StandardError:
    """Return the error that blocks of time within the runs explain.

    The error between repeats is never taken as smaller, because three runs that agree by chance
    hide it. It is computed by the rank of the percentile, which is cheap. Returns an error of 0 if
    the runs are too short for blocks.
    """
    values = np.maximum(_all_samples(runs, metric), 1.0)
    if len(values) < LEAST_SAMPLES:
        return StandardError(0.0, math.inf)
    if metric.p is None:
        mean = estimate_mean(values)
        if mean is None:
            return StandardError(0.0, math.inf)
        return StandardError(mean.error / mean.value, mean.freedom)
    ordered = np.sort(values)
    freedom = max(min(BLOCKS[0] - 1.0, blocks_beyond(values, ordered, metric.p) - 1.0), 1.0)
    return StandardError(rank_error(values, ordered, metric.p, BLOCKS[0]), freedom)


def count_stretches_above(
    runs: Sequence[Columns], metric: Metric, threshold_ns: float
) -> StretchCount:
    """Count the stretches of time of the runs whose own percentile is above a threshold."""
    stretches_per_run = max(BLOCKS[0] // len(runs), 2)
    above = 0
    total = 0
    for run in runs:
        for stretch in np.array_split(samples(run, metric.per_request), stretches_per_run):
            if len(stretch):
                total += 1
                above += quantile_of(stretch, metric.p or 0.5) > threshold_ns
    return StretchCount(above, total)


def percentile_error(values: NDArray[np.float64], p: float) -> StandardError:
    """Return the standard error of the logarithm of a percentile.

    It is the widest of the errors by BLOCKS. The values beyond the percentile may come from a few
    intervals of time, such as one long queue. Then the estimate rests on those few, however many
    blocks there are, so the degrees of freedom are limited by their number.
    """
    positive = np.maximum(values, 1.0)
    ordered = np.sort(values)
    errors = []
    for blocks in BLOCKS:
        if len(values) <= MOST_RESAMPLED:
            error = block_bootstrap(
                np.log(positive),
                partial(quantile_of, p=p),
                np.random.default_rng(blocks),
                blocks=blocks,
                resamples=RESAMPLES,
                level=ONE_SIGMA_LEVEL,
            ).half_width
        else:
            error = rank_error(positive, np.maximum(ordered, 1.0), p, blocks)
        errors.append(StandardError(error * _bootstrap_correction(blocks), float(blocks - 1)))
    widest = max(errors)
    freedom = max(min(widest.freedom, blocks_beyond(values, ordered, p) - 1.0), 1.0)
    return StandardError(widest.error, freedom)


def block_bootstrap(
    values: NDArray[np.float64],
    statistic: Callable[[NDArray[np.float64]], float],
    rng: np.random.Generator,
    *,
    blocks: int = intervals.BATCHES,
    level: float = intervals.LEVEL,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the interval of a statistic of correlated values, by resampling whole blocks.

    The method is that of Kuensch (1989). Blocks have equal length and overlap, so it does not
    matter where they are cut. With fewer than two values per block the interval is unbounded.

    Args:
        values: The values of one run, in order of time.
        statistic: The statistic, such as a p99.
        rng: The random generator.
        blocks: The number of blocks.
        level: The confidence level.
        resamples: The number of resamples.
    """
    count = len(values)
    if count < 2 * blocks:
        value = statistic(values) if count else math.nan
        return Interval(value, -math.inf, math.inf, level, 0, "block bootstrap")
    size = count // blocks
    starts = rng.integers(0, count - size + 1, (resamples, blocks))
    offsets = np.arange(size)
    resampled = np.array(
        [statistic(values[(block_starts[:, None] + offsets).ravel()]) for block_starts in starts]
    )
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(statistic(values), float(low), float(high), level, blocks, "block bootstrap")


def _all_samples(runs: Sequence[Columns], metric: Metric) -> NDArray[np.float64]:
    values = np.concatenate([samples(run, metric.per_request) for run in runs])
    return values.astype(np.float64)


def _bootstrap_correction(blocks: int) -> float:
    """Return a factor for standard errors: resampled blocks have (b - 1) / b of the variance."""
    return math.sqrt(blocks / (blocks - 1))
