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
    """Return how many independent values would estimate a fraction as precisely as these marks.

    A mark is 1 or 0 for each request and says, for example, whether it was slow. Slow requests come
    in clusters, such as one bad minute. All requests of a cluster count as one observation, so the
    effective sample size is the number of marks divided by the mean size of a cluster.

    Args:
        marks: An array of 0 and 1 per run, in order of time.
        confidence: The confidence of the interval in which the result is used.

    Returns:
        A number between 0 and the number of marks. It is 0 if a run is too short to show clusters.
    """
    mark_count = sum(len(run_marks) for run_marks in marks)
    fraction_of_ones = float(np.concatenate(marks).mean())
    has_equal_marks = fraction_of_ones in (0.0, 1.0)
    if has_equal_marks:
        return float(mark_count)  # there are no clusters

    runs_with_marks = [run_marks for run_marks in marks if len(run_marks) > 0]
    has_single_mark = any(len(run_marks) == 1 for run_marks in runs_with_marks)
    if has_single_mark:
        return 0.0  # a run of one mark does not show how large clusters are

    return mark_count / _estimate_cautious_cluster_size(
        runs_with_marks, fraction_of_ones, confidence
    )


def _estimate_cautious_cluster_size(
    marks: RunSeries, fraction_of_ones: float, confidence: float
) -> float:
    """Return the mean number of marks in a cluster, enlarged if the estimate is uncertain.

    A cluster is a group of neighbouring equal marks, such as all slow requests of a bad minute. The
    size is uncertain if the load has few clusters, or few batches of time to compare.

    Args:
        marks: The marks (0 or 1) of each run, at least two per run.
        fraction_of_ones: The fraction of 1 among all marks, between 0 and 1 (exclusive).
        confidence: The confidence of the interval in which the result is used.
    """
    run_intervals = [intervals.batch_means(run_marks, level=confidence) for run_marks in marks]
    cluster_size = _estimate_cluster_size(marks, run_intervals, fraction_of_ones)
    few_clusters_factor = _compute_few_clusters_factor(marks, fraction_of_ones)
    few_batches_factor = _compute_few_batches_factor(run_intervals, confidence)
    # Independent marks are clusters of size 1. Only the size beyond that is uncertain.
    size_beyond_one = cluster_size - 1
    return 1 + size_beyond_one * (few_clusters_factor * few_batches_factor)


def _estimate_cluster_size(
    marks: RunSeries, run_intervals: Sequence[Interval], fraction_of_ones: float
) -> float:
    """Return the mean number of marks in a cluster, at least 1.

    This is the design effect of survey statistics (Kish 1965): the measured variance of the mean of
    all marks, divided by the variance that it would have if the marks were independent.

    Args:
        marks: The marks (0 or 1) of each run that has any.
        run_intervals: The interval of the mean mark of each run, from batches of time.
        fraction_of_ones: The mean of all marks, between 0 and 1 (exclusive).
    """
    mark_count = sum(len(run_marks) for run_marks in marks)

    # The mean of all marks is the mean of the runs, weighted by their numbers of marks.
    weighted_errors = [
        len(run_marks) / mark_count * run_interval.standard_error
        for run_marks, run_interval in zip(marks, run_intervals, strict=True)
    ]

    # The runs are independent, so the squares of their standard errors add up.
    measured_variance = math.fsum(error**2 for error in weighted_errors)

    # A Bernoulli variable with mean m has the variance m (1 - m). A mean of n has 1/n of it.
    independent_variance = fraction_of_ones * (1 - fraction_of_ones) / mark_count
    return max(1.0, measured_variance / independent_variance)


def _compute_few_clusters_factor(marks: RunSeries, fraction_of_ones: float) -> float:
    """Return the factor that corrects a mean cluster size for a small number of clusters.

    A mark is 1 or 0 for each request, for example 1 if it was slow. Slow requests come in clusters,
    such as one bad minute, and one bad minute does not show how long bad minutes are. If the sizes
    of k clusters are exponentially distributed, their estimate is on average k / (k + 1) of the
    true size, so the factor is (k + 1) / k.

    The run is cut into batches of time. A batch with at least one mark of the rarer value (the slow
    requests, if fewer than half are slow) counts as one cluster.

    Args:
        marks: The marks of each run that has any.
        fraction_of_ones: The fraction of 1 among all marks, which says whether 0 or 1 is rarer.
    """
    rarer_mark = 1.0 if fraction_of_ones <= 0.5 else 0.0
    cluster_count = sum(_count_batches_with(run_marks, rarer_mark) for run_marks in marks)
    return 1 + 1 / max(cluster_count, 1)


def _compute_few_batches_factor(run_intervals: Sequence[Interval], confidence: float) -> float:
    """Return the factor that corrects a mean cluster size for a small number of batches of time.

    A cluster size is computed from a variance between batches of time. If it comes from few
    batches, Student's t has to take the place of the normal quantile z, which makes a confidence
    interval wider by t / z. A variance is the square of a width, so the factor is (t / z) squared.

    Args:
        run_intervals: The mean of each run with its interval, from batches of time.
        confidence: The confidence of the interval in which the cluster size is used.
    """
    degrees_of_freedom = sum(run_interval.count - 1 for run_interval in run_intervals)
    # A two-sided interval of 95 % ends at the 97.5 % quantile of the distribution.
    one_sided_probability = 0.5 + confidence / 2
    t = students_t.t_quantile(one_sided_probability, degrees_of_freedom)
    z = students_t.z_quantile(confidence)  # takes the two-sided confidence
    return (t / z) ** 2


def _count_batches_with(marks: NDArray[np.float64], mark: float) -> int:
    """Return how many of the batches of one run contain a mark of this value.

    A run is cut into `intervals.BATCHES` consecutive batches, or into single marks if it has fewer.
    """
    batch_count = min(intervals.BATCHES, len(marks))
    # With 6 marks and 3 batches, the batch numbers are 0, 0, 1, 1, 2, 2.
    batch_numbers = np.arange(len(marks)) * batch_count // len(marks)
    return len(np.unique(batch_numbers[marks == mark]))


def estimate_fraction(marks: RunSeries, confidence: float) -> Interval:
    """Return the fraction of 1 among 0/1 marks, with its confidence interval (Wilson 1927)."""
    fraction = float(np.concatenate(marks).mean())
    effective_size = estimate_effective_sample_size(marks, confidence)
    low, high = intervals.wilson_interval(fraction, effective_size, confidence)
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
    distribution. A sample of few independent values gets its full range, which counts as the
    interval of `MIN_EFFECTIVE_SIZE` values. An end is infinite if by chance all values of the
    sample could lie on one side of the quantile.

    Args:
        values: The values of each run. They are infinite for failed requests.
        p: The quantile, such as 0.99.
        confidence: The confidence of the interval.
    """
    ordered = np.sort(np.concatenate(values))
    sample_size = estimate_quantile_sample_size(values, p, confidence)
    if sample_size < MIN_EFFECTIVE_SIZE:
        value = float(ordered[quantile_index(len(ordered), p)])
        interval = Interval(value, float(ordered[0]), float(ordered[-1]), confidence)
    else:
        interval = _compute_order_statistics_interval(ordered, p, sample_size, confidence)

    assumed_size = max(sample_size, MIN_EFFECTIVE_SIZE)
    has_value_below = assumed_size >= intervals.observations_to_see(1 - p, confidence)
    has_value_above = assumed_size >= intervals.observations_to_see(p, confidence)

    return replace(
        interval,
        low=interval.low if has_value_below else -math.inf,
        high=interval.high if has_value_above else math.inf,
    )


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
        effective_size: The number of independent values that would estimate it as precisely.
        confidence: The confidence of the interval.
    """
    count = len(ordered)
    low_fraction, high_fraction = intervals.wilson_interval(p, effective_size, confidence)
    low_index = math.floor(count * low_fraction)
    high_index = math.ceil(count * high_fraction)
    value = float(ordered[quantile_index(count, p)])
    low = float(ordered[low_index]) if low_index > 0 else -math.inf
    high = float(ordered[high_index]) if high_index < count else math.inf

    return Interval(value, low, high, confidence)


def compute_tolerance_limit(values: RunSeries, p: float, confidence: float) -> float:
    """Return an upper bound of a latency quantile, from how it varies between batches of time.

    It is used if the slow requests came in so few clusters that their ranks give no upper bound.
    The load is cut into batches of time, and the p quantile of each batch is computed. The bound is
    an upper tolerance limit of these quantiles. For p = 0.99, it means: with this confidence, the
    server would exceed the bound in at most 1 % of further batches.

    The method assumes that the logarithms of the quantiles are normally distributed. That is wrong
    for a server that switches between a fast and a slow state, so the result is at least the
    quantile of the slowest batch. It is unsuitable for time in a queue, which is near zero or long.

    Args:
        values: The latencies of each run in ns, in order of time.
        p: The quantile, such as 0.99. The bound also has to hold for this fraction of batches.
        confidence: The confidence of the limit.
    """
    batch_quantiles = _compute_batch_quantiles(values, p)
    log_quantiles = np.log(np.maximum(batch_quantiles, MIN_LATENCY_NS))
    log_limit = intervals.upper_tolerance_limit(log_quantiles, p, confidence)
    tolerance_limit = math.exp(min(log_limit, MAX_EXPONENT))
    finite_quantiles = batch_quantiles[np.isfinite(batch_quantiles)]
    slowest_quantile = float(finite_quantiles.max(initial=0.0))
    return max(tolerance_limit, slowest_quantile)


def _compute_batch_quantiles(values: RunSeries, p: float) -> NDArray[np.float64]:
    """Return the p quantile of each batch of time of all runs."""
    batches = [batch for run in values for batch in np.array_split(run, intervals.BATCHES)]
    return np.array([quantile_of(batch, p) for batch in batches if len(batch)])


def find_outlier_quantile(values: RunSeries, p: float) -> float | None:
    """Return the p quantile of the slowest batch of time if it is an outlier, else None.

    An outlier is a batch that is far slower than all others, for example because the server
    restarted in it. One such event does not show how often they happen, so the true quantile may be
    as high as that of the batch, however many requests there are.

    The method is the modified z-score (Iglewicz and Hoaglin 1993): distances from the median,
    relative to the median absolute deviation, which an outlier hardly changes. Latencies vary by
    factors, so their logarithms are compared.

    Returns:
        The quantile of the outlier. None if there is none, if there are too few batches, or if
        requests failed in a batch: then its quantile may be infinite.
    """
    batch_quantiles = _compute_batch_quantiles(values, p)
    has_failed_batch = not np.isfinite(batch_quantiles).all()
    if has_failed_batch or len(batch_quantiles) < MIN_EFFECTIVE_SIZE:
        return None

    log_quantiles = np.log(np.maximum(batch_quantiles, MIN_LATENCY_NS))
    median = float(np.median(log_quantiles))
    median_absolute_deviation = float(np.median(np.abs(log_quantiles - median)))
    standard_deviation = median_absolute_deviation * MAD_TO_STANDARD_DEVIATION
    slowest = float(log_quantiles.max())
    is_outlier = slowest - median > OUTLIER_DEVIATIONS * standard_deviation

    return math.exp(slowest) if is_outlier else None
