"""Computes metrics of several runs taken as one, with standard errors from blocks of time.

Requests that follow each other meet the same queue, so their latencies are correlated, and a
standard error that takes them as independent would be too small. The runs are therefore cut into
blocks of time, and the blocks, which are nearly independent, tell how far the metric varies.

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
    BLOCK_COUNTS,
    MIN_SAMPLES,
    ScaledEstimate,
    count_blocks_above,
    divide_steady_state,
    estimate_log_percentile_error,
    estimate_log_rate,
    estimate_mean,
    sort_by_due_time,
)
from loadgen.core.metrics.columns import OK, UNDEFINED, Columns
from loadgen.core.metrics.windows import Span, estimate_tokens_within
from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import Interval
from loadgen.core.stats.quantiles import QUANTILES, SUPPORT, quantile_of
from loadgen.repeated.comparable_metrics import Metric

RESAMPLES = 300
"""The number of resamples of a bootstrap. The standard error is then known to 4 %."""

MOST_RESAMPLED_SAMPLES = 20_000
"""The largest sample for which a bootstrap is computed.

For larger ones the error follows from the rank of the percentile, which is cheaper and agrees.
"""

ONE_SIGMA_LEVEL = math.erf(1 / math.sqrt(2))
"""The confidence level at which the half width of a normal interval is the standard error: 68 %."""


class EstimateOrReason(NamedTuple):
    """An estimate, or why there is none. The reason is "" beside an estimate."""

    estimate: ScaledEstimate | None
    reason: str = ""


class StretchCount(NamedTuple):
    """How many stretches of time there are, and in how many of them a percentile is high."""

    above: int
    total: int


def samples(columns: Columns, metric: str) -> NDArray[np.int64]:
    """Return the values of a metric of successful requests, ordered by scheduled time.

    A successful request may have no value, such as a TPOT of a response of one token.
    """
    values = columns.measure(metric)
    has_value = columns.where(OK) & (values != UNDEFINED)
    return sort_by_due_time(columns, values, has_value)


def too_few_samples(runs: Sequence[Columns], metric: Metric) -> str:
    """Return why the runs together do not support a percentile, or "" if they do.

    The reason is such as "212 samples, p99 needs 1,000".
    """
    percentile_names = {quantile: name for name, quantile in QUANTILES}
    if metric.p is None or metric.p not in percentile_names:
        return ""
    percentile = percentile_names[metric.p]
    sample_count = sum(len(samples(run, metric.per_request)) for run in runs)
    if sample_count >= SUPPORT[percentile]:
        return ""
    label = percentile.replace("_", ".")
    return f"{sample_count:,} samples, {label} needs {SUPPORT[percentile]:,}"


def estimate_latency(runs: Sequence[Columns], metric: Metric, value: float) -> EstimateOrReason:
    """Return the logarithm of a latency of successful requests, with its error by blocks of time.

    Args:
        runs: The records of each run.
        metric: The metric, a percentile or a mean.
        value: Its value in the summary.
    """
    latencies = _all_samples(runs, metric)
    reason = too_few_samples(runs, metric)
    if reason:
        return EstimateOrReason(None, reason)
    if len(latencies) < MIN_SAMPLES:
        return EstimateOrReason(None, f"only {len(latencies):,} samples")
    if metric.p is None:
        mean = estimate_mean(latencies)
        if mean is None:
            return EstimateOrReason(None)
        standard_error = _error_of_log_mean(mean)
    else:
        standard_error = percentile_error(latencies, metric.p)
        if not math.isfinite(standard_error.error):
            return EstimateOrReason(None, "too few samples above this percentile")
    return EstimateOrReason(ScaledEstimate(math.log(value), *standard_error))


def estimate_token_rate(
    windows: Sequence[Span], runs: Sequence[Columns], value: float
) -> EstimateOrReason:
    """Return output tokens per second in the steady state, with the error by pieces of that time.

    The steady state is the time in which the load is constant, after its start and before its end.
    It is cut into equal pieces, and the rates of the pieces tell how far the rate varies.

    Args:
        windows: The steady-state window of each run.
        runs: The records of each run.
        value: The rate in the summary.
    """
    rates: list[float] = []
    for window, run in zip(windows, runs, strict=True):
        pieces = divide_steady_state(window)
        if not pieces:
            return EstimateOrReason(None, "no steady-state window")
        rates += [_token_rate(run, piece) for piece in pieces]
    estimate = estimate_log_rate(rates, value)
    if estimate is None:
        return EstimateOrReason(None, "no tokens in the steady-state window")
    return EstimateOrReason(estimate)


class StandardError(NamedTuple):
    """A standard error of the logarithm of a metric.

    Attributes:
        error: The error. As it is of the logarithm, 0.02 is about 2 % of the metric.
        degrees_of_freedom: Its degrees of freedom. The fewer, the less certain the error is itself.
    """

    error: float
    degrees_of_freedom: float


UNKNOWN_BLOCK_ERROR = StandardError(0.0, math.inf)
"""The error of runs that are too short for blocks: it is smaller than any other."""


def error_within_runs(runs: Sequence[Columns], metric: Metric) -> StandardError:
    """Return the error of the mean over repeats that chance within the runs explains.

    Three runs that agree by chance would show too small an error between them. The error that
    blocks of time within the runs show is therefore a lower bound of it. For a percentile it is
    computed from ranks, which is cheaper than a bootstrap.

    Returns UNKNOWN_BLOCK_ERROR if the runs are too short for blocks.
    """
    latencies = _positive(_all_samples(runs, metric))
    if len(latencies) < MIN_SAMPLES:
        return UNKNOWN_BLOCK_ERROR
    if metric.p is None:
        mean = estimate_mean(latencies)
        return UNKNOWN_BLOCK_ERROR if mean is None else _error_of_log_mean(mean)
    block_count = BLOCK_COUNTS[0]
    ordered = np.sort(latencies)
    return _limit_freedom(
        StandardError(
            estimate_log_percentile_error(latencies, ordered, metric.p, block_count),
            block_count - 1.0,
        ),
        count_blocks_above(latencies, ordered, metric.p),
    )


def count_stretches_above(
    runs: Sequence[Columns], metric: Metric, threshold_ns: float
) -> StretchCount:
    """Count the stretches of time of the runs whose own percentile is above a threshold.

    All runs together have about as many stretches as a single run has blocks, so that a stretch
    has enough samples for a percentile.
    """
    assert metric.p is not None
    stretches_per_run = max(BLOCK_COUNTS[0] // len(runs), 2)
    above = 0
    total = 0
    for run in runs:
        for stretch in np.array_split(samples(run, metric.per_request), stretches_per_run):
            if len(stretch):
                total += 1
                above += quantile_of(stretch, metric.p) > threshold_ns
    return StretchCount(above, total)


def percentile_error(latencies: NDArray[np.float64], p: float) -> StandardError:
    """Return the standard error of the logarithm of a percentile.

    How long latencies stay correlated is not known, so the error is computed with several numbers
    of blocks, and the largest one is taken.

    Args:
        latencies: The latencies of all runs, ordered by time within each run.
        p: The percentile as a fraction, such as 0.99.
    """
    positive = _positive(latencies)
    ordered = np.sort(latencies)
    errors = []
    for block_count in BLOCK_COUNTS:
        if len(latencies) <= MOST_RESAMPLED_SAMPLES:
            interval = block_bootstrap(
                np.log(positive),
                partial(quantile_of, p=p),
                np.random.default_rng(block_count),
                blocks=block_count,
                resamples=RESAMPLES,
                level=ONE_SIGMA_LEVEL,
            )
            error = interval.half_width
        else:
            error = estimate_log_percentile_error(positive, _positive(ordered), p, block_count)
        corrected_error = error * _bootstrap_correction(block_count)
        errors.append(StandardError(corrected_error, block_count - 1.0))
    largest_error = max(errors)
    return _limit_freedom(largest_error, count_blocks_above(latencies, ordered, p))


def _limit_freedom(standard_error: StandardError, blocks_with_slow_requests: int) -> StandardError:
    """Return an error of a percentile with as few degrees of freedom as its evidence has.

    The latencies beyond the percentile may all come from a few intervals of time, such as one long
    queue. The estimate then rests on these few, however many blocks there are.

    Args:
        standard_error: The error.
        blocks_with_slow_requests: In how many blocks there are latencies beyond the percentile.
    """
    freedom = min(standard_error.degrees_of_freedom, blocks_with_slow_requests - 1.0)
    return StandardError(standard_error.error, max(freedom, 1.0))


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
    """Return the latencies of all runs, one run after the other."""
    latencies = np.concatenate([samples(run, metric.per_request) for run in runs])
    return latencies.astype(np.float64)


def _positive(latencies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return latencies of at least 1 ns, because zero has no logarithm."""
    return np.maximum(latencies, 1.0)


def _token_rate(run: Columns, piece: Span) -> float:
    """Return the output tokens per second in a piece of time, 0 in a piece without duration."""
    tokens = estimate_tokens_within(run, piece)
    return tokens / piece.duration_s if piece.duration_s else tokens


def _error_of_log_mean(mean: ScaledEstimate) -> StandardError:
    """Return the error of the logarithm of a mean: to first order, the relative error."""
    return StandardError(mean.error / mean.value, mean.degrees_of_freedom)


def _bootstrap_correction(block_count: int) -> float:
    """Return a factor for standard errors: resampled blocks have (b - 1) / b of the variance."""
    return math.sqrt(block_count / (block_count - 1))
