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


def estimate_effective_sample_size(marks: RunSeries, confidence: float = intervals.LEVEL) -> float:
    """Return how many independent marks would estimate the mean of these marks as precisely.

    A mark is 0 or 1 for each request and says, for example, whether it was slow. Marks that come in
    clusters, such as the slow requests of one bad minute, show less than their number suggests. The
    effective sample size is the number of marks divided by the mean size of a cluster.

    Args:
        marks: An array of 0 and 1 per run, in order of time.
        confidence: The confidence of the interval in which the result is used.

    Returns:
        A number between 0 and the number of marks. It is 0 if a run is too short to show clusters.
    """
    mark_count = sum(len(run_marks) for run_marks in marks)
    mean = float(np.concatenate(marks).mean())
    if mean in (0.0, 1.0):
        return float(mark_count)  # all marks are equal, so none of them form a cluster
    runs = [run_marks for run_marks in marks if len(run_marks) > 0]
    shortest_run = min(len(run_marks) for run_marks in runs)
    if shortest_run < 2:
        return 0.0
    run_intervals = [intervals.batch_means(run_marks, level=confidence) for run_marks in runs]
    cluster_size = _estimate_cluster_size(runs, run_intervals, mean)
    uncertainty_factor = _compute_cluster_uncertainty_factor(runs, run_intervals, mean, confidence)
    # Independent marks are clusters of size 1. Only the size beyond that is uncertain.
    cautious_cluster_size = 1 + (cluster_size - 1) * uncertainty_factor
    return mark_count / cautious_cluster_size


def _estimate_cluster_size(
    runs: RunSeries, run_intervals: Sequence[Interval], mean: float
) -> float:
    """Return the mean number of marks in a cluster, at least 1 (the design effect of a sample).

    It is the variance of the mean of all marks, estimated from batches of time, divided by the
    variance that the mean would have if the marks were independent.

    Args:
        runs: The marks (0 or 1) of each run that has any.
        run_intervals: The interval of the mean mark of each run, from batches of time.
        mean: The mean of all marks.
    """
    mark_count = sum(len(run_marks) for run_marks in runs)
    weighted_errors = [
        len(run_marks) / mark_count * run_interval.standard_error
        for run_marks, run_interval in zip(runs, run_intervals, strict=True)
    ]
    # The runs are independent, so the squares of their standard errors add up.
    measured_variance = math.hypot(*weighted_errors) ** 2
    # The mean of n independent marks has the variance of one mark (Bernoulli) divided by n.
    variance_of_a_mark = mean * (1 - mean)
    return max(1.0, measured_variance * mark_count / variance_of_a_mark)


def _compute_cluster_uncertainty_factor(
    runs: RunSeries, run_intervals: Sequence[Interval], mean: float, confidence: float
) -> float:
    """Return a factor above 1 that makes an estimated cluster size cautious.

    The cluster size is estimated from few batches and few clusters: one bad minute does not show
    how long bad minutes are. The factor is the product of two corrections:

    - With k batches that contain the rarer mark, (k + 1) / k. For k clusters whose sizes are
      exponentially distributed, the estimated size is on average k / (k + 1) of the true one.
    - For the number of batches, Student's t in place of the normal quantile. A cluster size is
      proportional to a variance, so the ratio of the two quantiles is squared.

    Args:
        runs: The marks (0 or 1) of each run that has any.
        run_intervals: The interval of the mean mark of each run, from batches of time.
        mean: The mean of all marks, which says whether 0 or 1 is rarer.
        confidence: The confidence of the interval in which the cluster size is used.
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


def estimate_fraction(marks: RunSeries, confidence: float) -> Interval:
    """Return the fraction of 1 among 0/1 marks, with its confidence interval (Wilson 1927)."""
    fraction = float(np.concatenate(marks).mean())
    effective_size = estimate_effective_sample_size(marks, confidence)
    low, high = intervals.wilson(fraction, effective_size, confidence)
    return Interval(fraction, low, high, confidence)


def estimate_quantile_sample_size(values: RunSeries, p: float, confidence: float) -> float:
    """Return the effective sample size of values for the estimate of their p quantile.

    A quantile is as certain as the fraction of values above it, so the sample size is that of marks
    that say whether a value is above the quantile.
    """
    quantile = quantile_of(np.concatenate(values), p)
    marks_above = [(run > quantile).astype(np.float64) for run in values]
    return estimate_effective_sample_size(marks_above, confidence)


def estimate_quantile(values: RunSeries, p: float, confidence: float) -> Interval:
    """Return the p quantile of values with its confidence interval (Woodruff 1952).

    Both ends of the interval are values of the sample: there is no assumption about the
    distribution. An end is infinite if so few independent values could all lie on one side of the
    quantile by chance.

    Args:
        values: The values of each run. They are infinite for failed requests.
        p: The quantile, such as 0.99.
        confidence: The confidence of the interval.
    """
    ordered = np.sort(np.concatenate(values))
    effective_size = estimate_quantile_sample_size(values, p, confidence)
    if effective_size < MIN_EFFECTIVE_SIZE:
        effective_size = MIN_EFFECTIVE_SIZE  # the range of the sample stands for this size
        value = float(ordered[quantile_index(len(ordered), p)])
        interval = Interval(value, float(ordered[0]), float(ordered[-1]), confidence)
    else:
        interval = _compute_order_statistics_interval(ordered, p, effective_size, confidence)
    size_to_see_a_value_below = intervals.observations_to_see(1 - p, confidence)
    if effective_size < size_to_see_a_value_below:
        interval = replace(interval, low=-math.inf)
    size_to_see_a_value_above = intervals.observations_to_see(p, confidence)
    if effective_size < size_to_see_a_value_above:
        interval = replace(interval, high=math.inf)
    return interval


def _compute_order_statistics_interval(
    ordered: NDArray[np.float64], p: float, effective_size: float, confidence: float
) -> Interval:
    """Return the p quantile of a sample with an interval whose ends are values of the sample.

    Wilson's interval says between which fractions of the sample the true quantile lies. For p = 0.5
    and fractions from 0.4 to 0.6, the ends are the 40th and the 60th of 100 values. An end is
    infinite if it would be before the first or after the last value.

    Args:
        ordered: The values in ascending order.
        p: The quantile.
        effective_size: The number of independent values that show as much as the sample.
        confidence: The confidence of the interval.
    """
    count = len(ordered)
    low_fraction, high_fraction = intervals.wilson(p, effective_size, confidence)
    low_index = math.floor(count * low_fraction)
    high_index = math.ceil(count * high_fraction)
    value = float(ordered[quantile_index(count, p)])
    low = float(ordered[low_index]) if low_index > 0 else -math.inf
    high = float(ordered[high_index]) if high_index < count else math.inf
    return Interval(value, low, high, confidence)


def compute_tolerance_limit(values: RunSeries, p: float, confidence: float) -> float:
    """Return an upper tolerance limit for a quantile, from how it varies between batches of time.

    This bounds a latency quantile whose slow requests came in so few clusters that their ranks give
    no upper bound. The load is cut into batches of time. If the logarithms of the p quantiles of
    the batches are normally distributed, the fraction p of all batches stays below the limit, with
    this confidence.

    The limit is at least the quantile of the slowest batch, because the logarithms are not normally
    distributed for a server that switches between two speeds. It is not used for queueing time,
    which is near zero or long.
    """
    batch_quantiles = _compute_batch_quantiles(values, p)
    log_quantiles = np.log(np.maximum(batch_quantiles, MIN_LATENCY_NS))
    log_limit = intervals.upper_tolerance_limit(log_quantiles, p, confidence)
    limit = math.exp(min(log_limit, MAX_EXPONENT))
    finite_quantiles = batch_quantiles[np.isfinite(batch_quantiles)]
    slowest_batch = float(finite_quantiles.max(initial=0.0))
    return max(limit, slowest_batch)


def _compute_batch_quantiles(values: RunSeries, p: float) -> NDArray[np.float64]:
    """Return the p quantile of each batch of time of all runs."""
    batches = [batch for run in values for batch in np.array_split(run, intervals.BATCHES)]
    return np.array([quantile_of(batch, p) for batch in batches if len(batch)])


def find_outlier_quantile(values: RunSeries, p: float) -> float:
    """Return the p quantile of the slowest batch of time if it is an outlier, else 0.

    A batch that is far slower than all others met another state of the server, once. How often this
    state recurs is not known, so it may affect more than the fraction 1 - p of the requests,
    however many requests there are.

    Latencies vary by factors, so the batches are compared on a logarithmic scale. Their center and
    spread are the median and the median absolute deviation, which the outlier hardly changes.
    """
    log_quantiles = np.log(np.maximum(_compute_batch_quantiles(values, p), MIN_LATENCY_NS))
    has_failed_batch = not np.isfinite(log_quantiles).all()
    if len(log_quantiles) < MIN_EFFECTIVE_SIZE or has_failed_batch:
        return 0.0
    median = float(np.median(log_quantiles))
    median_absolute_deviation = float(np.median(np.abs(log_quantiles - median)))
    standard_deviation = median_absolute_deviation * MAD_TO_STANDARD_DEVIATION
    slowest = float(log_quantiles.max())
    if slowest - median <= OUTLIER_DEVIATIONS * standard_deviation:
        return 0.0
    return math.exp(slowest)
