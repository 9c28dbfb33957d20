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

MOST_BLOCKS = max(BLOCK_COUNTS)
"""The largest number of blocks that runs are cut into."""

RESAMPLES = 300
"""The number of resamples of a bootstrap. The standard error is then known to 4 %."""

MOST_RESAMPLED_SAMPLES = 20_000
"""The largest sample for which a bootstrap is computed.

For larger ones the error follows from the rank of the percentile, which is cheaper and agrees.
"""

ONE_SIGMA_LEVEL = math.erf(1 / math.sqrt(2))
"""The confidence level at which the half width of a normal interval is the standard error: 68 %."""


class EstimateOrReason(NamedTuple):
    """An estimate, or why there is none.

    Attributes:
        estimate: The estimate. None if there is none.
        reason: Why there is no estimate. "" if there is one, or if nothing is to be said.
    """

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
    """Return why the runs have too few samples for a percentile, or "" if they have enough.

    The reason is, for example, "212 samples, p99 needs 1,000". Only the percentiles that reports
    show have a minimum, not a mean.
    """
    percentile = _find_percentile_name(metric.quantile)
    if percentile is None:
        return ""

    needed_count = NEEDED_SAMPLES[percentile]
    sample_count = sum(len(select_samples(run, metric.request_metric)) for run in runs)
    if sample_count >= needed_count:
        return ""

    label = percentile.replace("_", ".")  # "p99_9" becomes "p99.9"
    return f"{sample_count:,} samples, {label} needs {needed_count:,}"


def _find_percentile_name(quantile: float | None) -> str | None:
    """Return the name of a reported percentile, such as "p99" for 0.99, or None for any other."""
    for name, reported_quantile in QUANTILES:
        if quantile == reported_quantile:
            return name
    return None


def estimate_latency(runs: Sequence[Columns], metric: Metric, value: float) -> EstimateOrReason:
    """Return the logarithm of a percentile or mean of latencies, with its standard error.

    Return the reason instead if there are too few samples.

    Args:
        runs: The records of each run.
        metric: The metric: a percentile or the mean of a latency of successful requests.
        value: The value of the metric in the summary, whose logarithm is returned.
    """
    reason = describe_missing_samples(runs, metric)
    if reason:
        return EstimateOrReason(None, reason)

    latencies = _concatenate_samples(runs, metric)
    if len(latencies) < MIN_SAMPLES:
        return EstimateOrReason(None, f"only {len(latencies):,} samples")

    if metric.quantile is None:
        mean = estimate_mean(latencies)
        if mean is None:  # blocks of time would have too few samples
            return EstimateOrReason(None)
        return EstimateOrReason(_to_log_estimate(value, _to_log_error(mean)))

    percentile_error = estimate_percentile_error(latencies, metric.quantile)
    if not math.isfinite(percentile_error.error):
        return EstimateOrReason(None, "too few samples above this percentile")
    return EstimateOrReason(_to_log_estimate(value, percentile_error))


def _to_log_estimate(value: float, standard_error: StandardError) -> ScaledEstimate:
    """Return the logarithm of a value, with the standard error of this logarithm."""
    return ScaledEstimate(
        value=math.log(value),
        error=standard_error.error,
        degrees_of_freedom=standard_error.degrees_of_freedom,
    )


def estimate_token_rate(
    windows: Sequence[Span], runs: Sequence[Columns], value: float
) -> EstimateOrReason:
    """Return the logarithm of a rate of output tokens, with its standard error.

    The rate is that of the steady state, the time in which the load is constant. This time is
    divided into equal intervals, and the error follows from how much their rates differ. Return the
    reason instead if a run has no steady state, or if no token came in it.

    Args:
        windows: The start and the end of the steady state of each run.
        runs: The records of each run.
        value: The rate in the summary, in tokens per second, whose logarithm is returned.
    """
    rates_per_s: list[float] = []
    for window, run in zip(windows, runs, strict=True):
        time_intervals = divide_steady_state(window)
        if not time_intervals:
            return EstimateOrReason(None, "no steady-state window")
        rates_per_s += [_compute_token_rate(run, interval) for interval in time_intervals]

    log_estimate = estimate_log_rate(rates_per_s, value)
    if log_estimate is None:
        return EstimateOrReason(None, "no tokens in the steady-state window")
    return EstimateOrReason(log_estimate)


class StandardError(NamedTuple):
    """A standard error of the logarithm of a metric.

    Attributes:
        error: The error. As it is of the logarithm, 0.02 is about 2 % of the metric.
        degrees_of_freedom: Its degrees of freedom. The fewer, the less certain the error is itself.
    """

    error: float
    degrees_of_freedom: float


UNKNOWN_BLOCK_ERROR = StandardError(0.0, math.inf)
"""Stands for the error of runs that are too short for blocks of time.

It is 0, so that the larger one of it and the error between repeated runs is always the latter.
"""


def estimate_error_within_runs(runs: Sequence[Columns], metric: Metric) -> StandardError:
    """Return the standard error of the logarithm of a metric, from the variation within runs.

    It is a lower limit for the error that repeated runs show: two or three runs may have almost the
    same value by chance, which would make their error much too small. Runs with too few requests
    have UNKNOWN_BLOCK_ERROR, which is 0 and so no limit.
    """
    latencies = _clip_to_positive(_concatenate_samples(runs, metric))
    if len(latencies) < MIN_SAMPLES:
        return UNKNOWN_BLOCK_ERROR

    if metric.quantile is not None:
        return _estimate_error_from_ranks(latencies, metric.quantile)

    mean = estimate_mean(latencies)
    return UNKNOWN_BLOCK_ERROR if mean is None else _to_log_error(mean)


def _estimate_error_from_ranks(latencies: NDArray[np.float64], fraction: float) -> StandardError:
    """Return the standard error of the logarithm of a percentile, without a bootstrap.

    The method is that of Woodruff (1952). Example: by definition 1 % of all latencies are above the
    p99, but their share differs between blocks of time, with a standard error of 0.2 %. The true
    p99 is then between the measured p98.8 and p99.2, and its error is half of the distance between
    their logarithms.

    Args:
        latencies: Positive latencies, ordered by time.
        fraction: The percentile as a fraction, such as 0.99.
    """
    block_count = MOST_BLOCKS
    sorted_latencies = np.sort(latencies)
    log_error = estimate_log_percentile_error(latencies, sorted_latencies, fraction, block_count)
    standard_error = StandardError(log_error, degrees_of_freedom=block_count - 1.0)

    # A percentile whose latencies all come from a few blocks is less certain.
    slow_block_count = count_blocks_above(latencies, sorted_latencies, fraction)
    return _limit_degrees_of_freedom(standard_error, slow_block_count)


def count_slow_periods(runs: Sequence[Columns], metric: Metric, threshold_ns: float) -> PeriodCount:
    """Divide runs into periods of time and count the periods whose percentile exceeds a threshold.

    All runs together have MOST_BLOCKS periods, which share them equally, but each run has at least
    two. Example: with MOST_BLOCKS of 20, each of 4 runs has 5 periods.

    Args:
        runs: The records of each run.
        metric: The metric, which is a percentile of a latency.
        threshold_ns: The latency above which the percentile of a period counts as slow.
    """
    assert metric.quantile is not None
    periods_per_run = max(MOST_BLOCKS // len(runs), 2)

    percentiles_ns: list[float] = []
    for run in runs:
        latencies_ns = select_samples(run, metric.request_metric)
        periods = np.array_split(latencies_ns, periods_per_run)
        percentiles_ns += [
            quantile_of(period, metric.quantile) for period in periods if len(period)
        ]

    slow_count = sum(percentile_ns > threshold_ns for percentile_ns in percentiles_ns)
    return PeriodCount(slow=slow_count, total=len(percentiles_ns))


def estimate_percentile_error(latencies: NDArray[np.float64], fraction: float) -> StandardError:
    """Return the standard error of the logarithm of a percentile: 0.02 is about 2 % of it.

    The latencies are divided into blocks of time, because successive ones are correlated. For how
    long is not known, so several numbers of blocks are tried, and the largest error is returned.

    If the latencies above the percentile come from a few blocks only, the error itself is
    uncertain, and has fewer degrees of freedom.

    Args:
        latencies: The latencies of all runs, ordered by time within each run.
        fraction: The percentile as a fraction, such as 0.99.
    """
    positive_latencies = _clip_to_positive(latencies)  # zero has no logarithm
    errors = _list_log_errors(positive_latencies, fraction)
    largest_error = max(errors, key=_error_size)

    slow_block_count = count_blocks_above(latencies, np.sort(latencies), fraction)
    return _limit_degrees_of_freedom(largest_error, slow_block_count)


def _list_log_errors(latencies: NDArray[np.float64], fraction: float) -> Iterator[StandardError]:
    """Yield the standard error of the logarithm of a percentile for each number of BLOCK_COUNTS.

    The error is computed by a bootstrap, which is slow. For many latencies, it follows from their
    ranks instead. The variance among few blocks is too small on average, which is corrected.

    Args:
        latencies: Positive latencies, ordered by time.
        fraction: The percentile as a fraction, such as 0.99.
    """
    uses_bootstrap = len(latencies) <= MOST_RESAMPLED_SAMPLES
    sorted_latencies = np.sort(latencies)
    for block_count in BLOCK_COUNTS:
        if uses_bootstrap:
            log_error = _bootstrap_log_error(latencies, fraction, block_count)
        else:
            log_error = estimate_log_percentile_error(
                latencies, sorted_latencies, fraction, block_count
            )
        corrected_error = log_error * _bootstrap_correction(block_count)
        yield StandardError(corrected_error, degrees_of_freedom=block_count - 1.0)


def _error_size(standard_error: StandardError) -> tuple[float, float]:
    """Return a sort key of errors: by size, and equal ones by their degrees of freedom."""
    return standard_error.error, standard_error.degrees_of_freedom


def _bootstrap_log_error(latencies: NDArray[np.float64], p: float, block_count: int) -> float:
    """Return the standard error of the logarithm of a percentile by a block bootstrap.

    The half width of a 68 % interval is the standard error.
    """
    interval = block_bootstrap(
        np.log(latencies),
        partial(quantile_of, p=p),
        np.random.default_rng(block_count),  # a fixed seed, so that the result is reproducible
        blocks=block_count,
        resamples=RESAMPLES,
        level=ONE_SIGMA_LEVEL,
    )
    return interval.half_width


def _limit_degrees_of_freedom(
    standard_error: StandardError, slow_block_count: int
) -> StandardError:
    """Return an error whose degrees of freedom are less than the number of slow blocks of time.

    Example: a run has 20 blocks, but all latencies above p99 come from 3 of them. The estimate of
    p99 then rests on 3 blocks, so it has 2 degrees of freedom instead of 19.

    Args:
        standard_error: The error of a percentile.
        slow_block_count: The number of blocks with latencies above the percentile.
    """
    supported_degrees = max(slow_block_count - 1.0, 1.0)  # Student's t has at least one
    return StandardError(
        standard_error.error,
        degrees_of_freedom=min(standard_error.degrees_of_freedom, supported_degrees),
    )


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

    Each resample joins blocks of successive values, drawn with replacement, so it keeps the
    correlation within a block. Blocks have equal length and may begin at any value (moving block
    bootstrap, Kuensch 1989). With fewer than two values per block, the interval is unbounded.

    Args:
        values: The values of one run, in order of time.
        statistic: The statistic, such as a p99.
        rng: The random generator.
        blocks: The number of blocks.
        level: The confidence level, such as 0.95.
        resamples: The number of resamples.
    """
    count = len(values)
    has_two_values_per_block = count >= 2 * blocks
    if not has_two_values_per_block:
        value = statistic(values) if count else math.nan
        return Interval(value, -math.inf, math.inf, level, 0, "block bootstrap")

    block_size = count // blocks
    last_start = count - block_size
    starts_of_resamples = rng.integers(0, last_start + 1, (resamples, blocks))
    resampled_statistics = []
    for block_starts in starts_of_resamples:
        resample = _join_blocks(values, block_starts, block_size)
        resampled_statistics.append(statistic(resample))

    low_fraction = (1 - level) / 2  # 0.025 at a level of 0.95
    high_fraction = (1 + level) / 2
    low, high = np.quantile(resampled_statistics, [low_fraction, high_fraction])
    return Interval(statistic(values), float(low), float(high), level, blocks, "block bootstrap")


def _join_blocks(
    values: NDArray[np.float64], block_starts: NDArray[np.int64], block_size: int
) -> NDArray[np.float64]:
    """Return blocks of successive values, joined in the order of `block_starts`.

    With starts 5 and 1 and a block size of 2, the values at the indices 5, 6, 1 and 2 are returned.
    """
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
