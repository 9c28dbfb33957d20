"""Computes metrics of several runs taken as one, with standard errors from blocks of time.

Requests that follow each other meet the same queue, so their latencies are correlated, and a
standard error that takes them as independent would be too small. The runs are therefore cut into
blocks of time, and the blocks, which are nearly independent, tell how far the metric varies.

Pure. `core.analysis.within_run_variance` does the same for a single run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
from loadgen.core.stats.quantiles import NEEDED_SAMPLES, QUANTILES, quantile_of
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


class PeriodCount(NamedTuple):
    """How many periods of time the runs of a side have, and how many of them are slow."""

    slow: int
    total: int


def select_samples(columns: Columns, metric: str) -> NDArray[np.int64]:
    """Return the values of a metric of successful requests, ordered by scheduled time.

    A successful request may have no value, such as a TPOT of a response of one token.
    """
    values = columns.measure(metric)
    has_value = columns.has_status(OK) & (values != UNDEFINED)
    return sort_by_due_time(columns, values, has_value)


def describe_missing_samples(runs: Sequence[Columns], metric: Metric) -> str:
    """Return why the runs together do not support a percentile, or "" if they do.

    The reason is, for example, "212 samples, p99 needs 1,000". `NEEDED_SAMPLES` has the number of
    samples that each percentile needs. A mean, and a percentile that is not in it, has no minimum.
    """
    percentile_names = {quantile: name for name, quantile in QUANTILES}
    if metric.quantile is None or metric.quantile not in percentile_names:
        return ""

    percentile = percentile_names[metric.quantile]
    sample_count = sum(len(select_samples(run, metric.request_metric)) for run in runs)
    if sample_count >= NEEDED_SAMPLES[percentile]:
        return ""

    label = percentile.replace("_", ".")
    return f"{sample_count:,} samples, {label} needs {NEEDED_SAMPLES[percentile]:,}"


def estimate_latency(runs: Sequence[Columns], metric: Metric, value: float) -> EstimateOrReason:
    """Return the logarithm of a percentile or mean of latencies, with its standard error.

    The error is estimated from blocks of time. If there are too few samples, the reason is returned
    in place of an estimate.

    Args:
        runs: The records of each run.
        metric: The metric: a percentile or the mean of a latency of successful requests.
        value: Its value in the summary.
    """
    latencies = _concatenate_samples(runs, metric)
    reason = describe_missing_samples(runs, metric)
    if reason:
        return EstimateOrReason(None, reason)
    if len(latencies) < MIN_SAMPLES:
        return EstimateOrReason(None, f"only {len(latencies):,} samples")

    if metric.quantile is None:
        mean = estimate_mean(latencies)
        if mean is None:
            return EstimateOrReason(None)
        standard_error = _to_log_error(mean)
    else:
        standard_error = estimate_percentile_error(latencies, metric.quantile)
        if not math.isfinite(standard_error.error):
            return EstimateOrReason(None, "too few samples above this percentile")

    return EstimateOrReason(
        ScaledEstimate(
            value=math.log(value),
            error=standard_error.error,
            degrees_of_freedom=standard_error.degrees_of_freedom,
        )
    )


def estimate_token_rate(
    windows: Sequence[Span], runs: Sequence[Columns], value: float
) -> EstimateOrReason:
    """Return output tokens per second in the steady state, with a standard error.

    The steady state is the time in which the load is constant, after its start and before its end.
    It is cut into equal intervals, and the rates in the intervals tell how far the rate varies.

    Args:
        windows: The steady-state window of each run.
        runs: The records of each run.
        value: The rate in the summary.
    """
    rates: list[float] = []
    for window, run in zip(windows, runs, strict=True):
        intervals_of_window = divide_steady_state(window)
        if not intervals_of_window:
            return EstimateOrReason(None, "no steady-state window")
        rates += [_compute_token_rate(run, interval) for interval in intervals_of_window]

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


def estimate_error_within_runs(runs: Sequence[Columns], metric: Metric) -> StandardError:
    """Return a lower bound of the standard error of the mean of a metric over repeated runs.

    It is estimated from the variation within the runs, because a few runs may agree by chance.
    Return UNKNOWN_BLOCK_ERROR if the runs are too short.
    """
    latencies = _clip_to_positive(_concatenate_samples(runs, metric))
    if len(latencies) < MIN_SAMPLES:
        return UNKNOWN_BLOCK_ERROR

    if metric.quantile is None:
        mean = estimate_mean(latencies)
        return UNKNOWN_BLOCK_ERROR if mean is None else _to_log_error(mean)

    return _estimate_error_from_ranks(latencies, metric.quantile)


def _estimate_error_from_ranks(latencies: NDArray[np.float64], p: float) -> StandardError:
    """Return the standard error of the logarithm of a percentile from the ranks of the latencies.

    This is cheaper than a bootstrap. The latencies are positive and ordered by time.
    """
    block_count = BLOCK_COUNTS[0]
    sorted_latencies = np.sort(latencies)
    error = estimate_log_percentile_error(latencies, sorted_latencies, p, block_count)
    standard_error = StandardError(error, degrees_of_freedom=block_count - 1.0)
    slow_block_count = count_blocks_above(latencies, sorted_latencies, p)
    return _limit_degrees_of_freedom(standard_error, slow_block_count)


def count_slow_periods(runs: Sequence[Columns], metric: Metric, threshold_ns: float) -> PeriodCount:
    """Cut runs into periods of time and count those whose percentile is above a threshold.

    All runs together have about as many periods as a single run has blocks, so that each period has
    enough samples for a percentile.

    Args:
        runs: The records of each run.
        metric: The metric, which is a percentile of a latency.
        threshold_ns: The percentile above which a period counts as slow.
    """
    assert metric.quantile is not None
    periods_per_run = max(BLOCK_COUNTS[0] // len(runs), 2)
    slow_count = 0

    total_count = 0
    for run in runs:
        latencies = select_samples(run, metric.request_metric)
        for period in np.array_split(latencies, periods_per_run):
            if not len(period):
                continue
            total_count += 1
            if quantile_of(period, metric.quantile) > threshold_ns:
                slow_count += 1

    return PeriodCount(slow_count, total_count)


def estimate_percentile_error(latencies: NDArray[np.float64], p: float) -> StandardError:
    """Return the standard error of the logarithm of a percentile.

    How long latencies stay correlated is not known, so the error is computed with several numbers
    of blocks, and the largest one is taken.

    Args:
        latencies: The latencies of all runs, ordered by time within each run.
        p: The percentile as a fraction, such as 0.99.
    """
    largest_error = max(_list_log_errors(_clip_to_positive(latencies), p), key=_error_size)
    slow_block_count = count_blocks_above(latencies, np.sort(latencies), p)
    return _limit_degrees_of_freedom(largest_error, slow_block_count)


def _list_log_errors(latencies: NDArray[np.float64], p: float) -> Iterator[StandardError]:
    """Yield the standard error of the logarithm of a percentile for each number of blocks.

    A bootstrap would be slow for many latencies, so their error follows from ranks.
    """
    uses_bootstrap = len(latencies) <= MOST_RESAMPLED_SAMPLES
    sorted_latencies = np.sort(latencies)
    for block_count in BLOCK_COUNTS:
        if uses_bootstrap:
            error = _bootstrap_log_error(latencies, p, block_count)
        else:
            error = estimate_log_percentile_error(latencies, sorted_latencies, p, block_count)
        corrected_error = error * _bootstrap_correction(block_count)
        yield StandardError(corrected_error, degrees_of_freedom=block_count - 1.0)


def _error_size(standard_error: StandardError) -> tuple[float, float]:
    """Return the order of errors: by size, and the more degrees of freedom the larger."""
    return standard_error.error, standard_error.degrees_of_freedom


def _bootstrap_log_error(latencies: NDArray[np.float64], p: float, block_count: int) -> float:
    """Return the standard error of the logarithm of a percentile by a block bootstrap.

    It is the half width of the interval that covers one standard deviation on each side.
    """
    interval = block_bootstrap(
        np.log(latencies),
        partial(quantile_of, p=p),
        np.random.default_rng(block_count),  # the same result each time
        blocks=block_count,
        resamples=RESAMPLES,
        level=ONE_SIGMA_LEVEL,
    )
    return interval.half_width


def _limit_degrees_of_freedom(
    standard_error: StandardError, slow_block_count: int
) -> StandardError:
    """Reduce the degrees of freedom of an error to what the slow blocks of time support.

    The latencies above the percentile may all come from a few blocks of time, such as one long
    queue. The estimate then rests on these few blocks, however many blocks there are. So the
    degrees of freedom are at most the number of these blocks minus one.

    Args:
        standard_error: The error of a percentile.
        slow_block_count: The number of blocks with latencies above the percentile.
    """
    degrees_of_freedom = min(standard_error.degrees_of_freedom, slow_block_count - 1.0)
    # Student's t has at least one degree of freedom.
    return StandardError(standard_error.error, max(degrees_of_freedom, 1.0))


def block_bootstrap(
    values: NDArray[np.float64],
    statistic: Callable[[NDArray[np.float64]], float],
    rng: np.random.Generator,
    *,
    blocks: int = intervals.BATCHES,
    level: float = intervals.LEVEL,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return the confidence interval of a statistic of correlated values, by a block bootstrap.

    A block bootstrap draws whole blocks of successive values with replacement, so that resamples
    keep the correlation within a block. This is the moving block bootstrap of Kuensch (1989):
    blocks have equal length and may begin at any value. With fewer than two values per block, the
    interval is unbounded.

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

    block_size = count // blocks
    starts_of_resamples = rng.integers(0, count - block_size + 1, (resamples, blocks))
    resampled_statistics = [
        statistic(_join_blocks(values, block_starts, block_size))
        for block_starts in starts_of_resamples
    ]
    low, high = np.quantile(resampled_statistics, [(1 - level) / 2, (1 + level) / 2])
    return Interval(statistic(values), float(low), float(high), level, blocks, "block bootstrap")


def _join_blocks(
    values: NDArray[np.float64], block_starts: NDArray[np.int64], block_size: int
) -> NDArray[np.float64]:
    """Return blocks of successive values, one after the other, by the index where each starts."""
    offsets = np.arange(block_size)
    # A column of starts plus a row of offsets is a table with a row of indices for each block.
    value_indices = block_starts[:, np.newaxis] + offsets
    joined_values: NDArray[np.float64] = values[value_indices.ravel()]
    return joined_values


def _concatenate_samples(runs: Sequence[Columns], metric: Metric) -> NDArray[np.float64]:
    """Return the latencies of all runs, one run after the other."""
    latencies = np.concatenate([select_samples(run, metric.request_metric) for run in runs])
    return latencies.astype(np.float64)


def _clip_to_positive(latencies: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the latencies with at least 1 ns each, because zero has no logarithm."""
    return np.maximum(latencies, 1.0)


def _compute_token_rate(run: Columns, interval: Span) -> float:
    """Return the output tokens per second in an interval of time."""
    tokens = estimate_tokens_within(run, interval)
    if not interval.duration_s:
        return tokens  # 0, because an interval without duration contains no token
    return tokens / interval.duration_s


def _to_log_error(mean: ScaledEstimate) -> StandardError:
    """Return the error of the logarithm of a mean, which is about the relative error."""
    return StandardError(mean.error / mean.value, mean.degrees_of_freedom)


def _bootstrap_correction(block_count: int) -> float:
    """Return the factor that corrects the standard error of a bootstrap with few blocks.

    With b blocks, the variance among resamples is (b - 1) / b of the true one.
    """
    return math.sqrt(block_count / (block_count - 1))
