"""Estimate quantiles and fractions, with confidence intervals that hold for correlated samples.

Requests that are served at the same time have similar latencies, so the values of a load are
correlated in time. The intervals here use the effective sample size instead of the number of
values. This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.core.stats import intervals, students_t
from loadgen.core.stats.intervals import Interval
from loadgen.core.stats.quantiles import quantile_index, quantile_of

MIN_EFFECTIVE_SIZE = 20
"""Effective sample size below which the interval of a quantile is the range of the sample.

Wilson's interval, which larger samples get, is not reliable for so few values.
"""

OUTLIER_DEVIATIONS = 5.0
"""Standard deviations above the median from which a batch of time is an outlier.

By chance, one normally distributed batch in 3.5 million is so far away.
"""

MAD_TO_STANDARD_DEVIATION = 1.4826
"""Ratio of the standard deviation of a normal distribution to its median absolute deviation."""

MAX_EXPONENT = 700.0
"""The largest argument of `math.exp` that is used, because exp(710) overflows a float."""

MIN_LATENCY_NS = 1.0
"""The latency that replaces 0 before a logarithm is taken."""

RunSeries = Sequence[NDArray[np.float64]]
"""One array of values per run, in order of time."""


def effective_sample_size(marks: RunSeries, confidence: float = intervals.LEVEL) -> float:
    """Return how many independent 0/1 marks would estimate the mean of these marks as precisely.

    A mark says, for example, whether a request was slow. Marks that come in clusters, such as the
    slow requests of one bad minute, show less than their number suggests. The effective sample size
    is the number of marks divided by the mean size of a cluster.

    Args:
        marks: An array of 0 and 1 per run, in order of time.
        confidence: The confidence of the interval in which the result is used.

    Returns:
        A number between 0 and the number of marks. It is 0 if a run is too short to show clusters.
    """
    mark_count = sum(map(len, marks))
    mean = float(np.concatenate(marks).mean())
    if mean in (0.0, 1.0):
        return float(mark_count)
    runs = [run_marks for run_marks in marks if len(run_marks)]
    if min(map(len, runs)) < 2:
        return 0.0
    run_intervals = [intervals.batch_means(run_marks, level=confidence) for run_marks in runs]
    cluster_size = _cluster_size(runs, run_intervals, mean)
    uncertainty_factor = _cluster_uncertainty_factor(runs, run_intervals, mean, confidence)
    # Independent marks have clusters of one mark, so only the excess over 1 is uncertain.
    cautious_cluster_size = 1 + (cluster_size - 1) * uncertainty_factor
    return mark_count / cautious_cluster_size


def _cluster_size(runs: RunSeries, run_intervals: Sequence[Interval], mean: float) -> float:
    """Return the mean number of marks that come together, at least 1.

    It is the variance of the mean mark, estimated from batches of time, divided by the variance
    that it would have if the marks were independent.

    Args:
        runs: The marks of each run that has any.
        run_intervals: The interval of the mean mark of each run, from batches of time.
        mean: The mean of all marks.
    """
    mark_count = sum(map(len, runs))
    weighted_errors = [
        len(run_marks) / mark_count * run_interval.standard_error
        for run_marks, run_interval in zip(runs, run_intervals, strict=True)
    ]
    measured_variance = math.hypot(*weighted_errors) ** 2
    variance_of_a_mark = mean * (1 - mean)
    return max(1.0, measured_variance * mark_count / variance_of_a_mark)


def _cluster_uncertainty_factor(
    runs: RunSeries, run_intervals: Sequence[Interval], mean: float, confidence: float
) -> float:
    """Return the factor by which the excess of the cluster size over 1 is increased.

    The cluster size is itself an estimate, from few batches and few clusters: one bad minute does
    not show how long bad minutes are. There are two corrections:

    - With k batches that contain the rarer mark, the factor (k + 1) / k. For k clusters whose sizes
      are exponentially distributed, the estimated size is on average k / (k + 1) of the true one.
    - For the number of batches, Student's t in place of the normal quantile. A sample size is
      proportional to a variance, so the ratio of the two quantiles is squared.
    """
    rarer_mark = 1.0 if mean <= 0.5 else 0.0
    batches_with_rarer_mark = sum(_count_batches_with(run_marks, rarer_mark) for run_marks in runs)
    few_clusters_factor = 1 + 1 / max(batches_with_rarer_mark, 1)
    degrees_of_freedom = sum(run_interval.count - 1 for run_interval in run_intervals)
    t = students_t.t_quantile(0.5 + confidence / 2, degrees_of_freedom)
    few_batches_factor = (t / students_t.z_quantile(confidence)) ** 2
    return few_clusters_factor * few_batches_factor


def _count_batches_with(marks: NDArray[np.float64], mark: float) -> int:
    """Return the number of batches of one run that contain a mark of this value."""
    batch_count = min(intervals.BATCHES, len(marks))
    batch_numbers = np.arange(len(marks)) * batch_count // len(marks)
    return len(np.unique(batch_numbers[marks == mark]))


def estimate_share(marks: RunSeries, confidence: float) -> Interval:
    """Return the fraction of 1 among 0/1 marks, with its confidence interval (Wilson 1927)."""
    share = float(np.concatenate(marks).mean())
    effective_size = effective_sample_size(marks, confidence)
    low, high = intervals.wilson(share, effective_size, confidence)
    return Interval(share, low, high, confidence)


def quantile_sample_size(values: RunSeries, p: float, confidence: float) -> float:
    """Return the effective sample size of values for the estimate of their p quantile.

    A quantile is as certain as the fraction of values above it, so the sample size is that of marks
    that say whether a value is above the quantile.
    """
    quantile = quantile_of(np.concatenate(values), p)
    marks_above = [(run > quantile).astype(np.float64) for run in values]
    return effective_sample_size(marks_above, confidence)


def estimate_quantile(values: RunSeries, p: float, confidence: float) -> Interval:
    """Return the p quantile of values with its confidence interval (Woodruff 1952).

    The ends of the interval are values of the sample. An end is infinite if the effective sample
    size is so small that all values could lie on one side of the quantile. Values may be infinite
    (failed requests).
    """
    ordered = np.sort(np.concatenate(values))
    value = float(ordered[quantile_index(len(ordered), p)])
    effective_size = quantile_sample_size(values, p, confidence)
    if effective_size < MIN_EFFECTIVE_SIZE:
        effective_size = MIN_EFFECTIVE_SIZE  # the range of the sample stands for this size
        interval = Interval(value, float(ordered[0]), float(ordered[-1]), confidence)
    else:
        interval = _order_statistics_interval(ordered, p, effective_size, confidence)
    # With fewer observations than this, all values could be above the quantile, or all below it.
    if effective_size < intervals.observations_to_see(1 - p, confidence):
        interval = replace(interval, low=-math.inf)
    if effective_size < intervals.observations_to_see(p, confidence):
        interval = replace(interval, high=math.inf)
    return interval


def _order_statistics_interval(
    ordered: NDArray[np.float64], p: float, effective_size: float, confidence: float
) -> Interval:
    """Return the p quantile of ordered values with an interval whose ends are values of the sample.

    Wilson's interval says between which fractions of the values the quantile lies. For p = 0.5 and
    fractions from 0.4 to 0.6, the ends are the 40th and the 60th of 100 values. An end is infinite
    if it would be before the first or after the last value.
    """
    count = len(ordered)
    low_fraction, high_fraction = intervals.wilson(p, effective_size, confidence)
    low_index = math.floor(count * low_fraction)
    high_index = math.ceil(count * high_fraction)
    value = float(ordered[quantile_index(count, p)])
    low = float(ordered[low_index]) if low_index > 0 else -math.inf
    high = float(ordered[high_index]) if high_index < count else math.inf
    return Interval(value, low, high, confidence)


def tolerance_limit(values: RunSeries, p: float, confidence: float) -> float:
    """Return an upper limit for a quantile whose slow requests came in a few batches of time.

    This is for values that change slowly without queueing. If the logarithms of the p quantiles of
    such batches are normally distributed, the fraction p of all batches stays below the limit. The
    limit is at least the quantile of the slowest batch, because the logarithms are not normally
    distributed for a server that switches between two speeds.
    """
    batch_quantiles = _batch_quantiles(values, p)
    log_quantiles = np.log(np.maximum(batch_quantiles, MIN_LATENCY_NS))
    log_limit = intervals.upper_tolerance_limit(log_quantiles, p, confidence)
    limit = math.exp(min(log_limit, MAX_EXPONENT))
    finite = batch_quantiles[np.isfinite(batch_quantiles)]
    return max(limit, float(finite.max(initial=0.0)))


def _batch_quantiles(values: RunSeries, p: float) -> NDArray[np.float64]:
    """Return the p quantile of each batch of time of all runs."""
    batches = [batch for run in values for batch in np.array_split(run, intervals.BATCHES)]
    return np.array([quantile_of(batch, p) for batch in batches if len(batch)])


def outlying_batch_quantile(values: RunSeries, p: float) -> float:
    """Return the highest p quantile of a batch of time if it is far above the others, else 0.

    Such a batch met another state of the server, once. How often this state recurs is not known, so
    it may affect more than the fraction 1 - p of the requests, however many requests there are.

    Latencies vary by factors, so the batches are compared on a logarithmic scale. Their center and
    spread are the median and the median absolute deviation, which the outlier hardly changes.
    """
    log_quantiles = np.log(np.maximum(_batch_quantiles(values, p), MIN_LATENCY_NS))
    has_failed_requests = not np.isfinite(log_quantiles).all()
    if len(log_quantiles) < MIN_EFFECTIVE_SIZE or has_failed_requests:
        return 0.0
    median = float(np.median(log_quantiles))
    median_deviation = float(np.median(np.abs(log_quantiles - median)))
    standard_deviation = median_deviation * MAD_TO_STANDARD_DEVIATION
    highest = float(log_quantiles.max())
    if highest - median <= OUTLIER_DEVIATIONS * standard_deviation:
        return 0.0
    return math.exp(highest)
