"""Estimate quantiles and shares, with confidence intervals that hold for correlated samples.

Requests that are served at the same time fare alike, so the values of a load are correlated in
time. The intervals here use the effective sample size instead of the number of values. This module
is pure.
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
"""Effective sample size below which the interval of a quantile is the range of the sample."""

OUTLIER_DEVIATIONS = 5.0
"""Standard deviations from the other batches at which a batch of time shows another state of the
server.
"""

MAD_TO_STANDARD_DEVIATION = 1.4826
"""Ratio of the standard deviation of a normal distribution to its median absolute deviation."""

MAX_EXPONENT = 700.0
"""Largest argument of `math.exp` that is used: exp(710) overflows a float."""

RunSeries = Sequence[NDArray[np.float64]]
"""One array of values per run, in order of time."""


def effective_sample_size(marks: RunSeries, confidence: float = intervals.LEVEL) -> float:
    """Return how many independent 0/1 marks would estimate the mean of these marks as precisely.

    Marks that come in clusters, such as the slow requests of one bad minute, are worth fewer than
    their number. The size of the clusters is the variance of the batch means divided by the
    variance of independent marks. The excess of this size over 1 is itself estimated from few
    clusters, so it is increased in two ways: by Student's t for the number of batches, and by (k +
    1) / k, where k is the number of batches with a rare mark. (For k clusters of exponential size
    m, sum(m^2) / sum(m) is on average k / (k + 1) of the true value.) One bad minute does not show
    how long bad minutes are.

    Args:
        marks: An array of 0 and 1 per run, in order of time.
        confidence: The confidence of the interval in which the result is used.

    Returns:
        A number between 0 and the number of marks.
    """
    mark_count = sum(map(len, marks))
    mean = float(np.concatenate(marks).mean())
    if mean in (0.0, 1.0):
        return float(mark_count)
    runs = [run_marks for run_marks in marks if len(run_marks)]
    if min(map(len, runs)) < 2:
        return 0.0
    run_intervals = [intervals.batch_means(run_marks, level=confidence) for run_marks in runs]
    weighted_errors = [
        len(run_marks) / mark_count * run_interval.standard_error
        for run_marks, run_interval in zip(runs, run_intervals, strict=True)
    ]
    standard_error = math.hypot(*weighted_errors)
    variance_of_a_mark = mean * (1 - mean)
    # Independent marks would have a squared error of variance_of_a_mark / mark_count.
    cluster_size = max(1.0, standard_error**2 * mark_count / variance_of_a_mark)
    rare_mark = 1.0 if mean <= 0.5 else 0.0
    batches_hit = sum(_count_batches_with(run_marks, rare_mark) for run_marks in runs)
    few_clusters_factor = 1 + 1 / max(batches_hit, 1)
    degrees_of_freedom = sum(run_interval.count - 1 for run_interval in run_intervals)
    t = students_t.t_quantile(0.5 + confidence / 2, degrees_of_freedom)
    t_to_normal = t / students_t.z_quantile(confidence)
    # A sample size is a variance, so the ratio of two widths is squared.
    excess = (cluster_size - 1) * few_clusters_factor * t_to_normal**2
    return mark_count / (1 + excess)


def _count_batches_with(marks: NDArray[np.float64], mark: float) -> int:
    """Return the number of batches of one run that contain a mark of this value."""
    batch_count = min(intervals.BATCHES, len(marks))
    batch_numbers = np.arange(len(marks)) * batch_count // len(marks)
    return len(np.unique(batch_numbers[marks == mark]))


def estimate_share(marks: RunSeries, confidence: float) -> Interval:
    """Return the share of 1 among 0/1 marks, with its confidence interval (Wilson 1927)."""
    share = float(np.concatenate(marks).mean())
    effective_size = effective_sample_size(marks, confidence)
    low, high = intervals.wilson(share, effective_size, confidence)
    return Interval(share, low, high, confidence)


def quantile_sample_size(values: RunSeries, p: float, confidence: float) -> float:
    """Return the effective sample size of values for the estimate of their p quantile.

    A quantile is as certain as the share of values above it, so the sample size is that of marks
    which say whether a value is above the quantile.
    """
    quantile = quantile_of(np.concatenate(values), p)
    marks_above = [(run > quantile).astype(np.float64) for run in values]
    return effective_sample_size(marks_above, confidence)


def estimate_quantile(values: RunSeries, p: float, confidence: float) -> Interval:
    """Return the p quantile of values with its confidence interval (Woodruff 1952).

    The ends of the interval are the values of the sample at the ends of Wilson's interval around
    p. An end is infinite where that interval reaches past the sample, or where the effective
    sample size is so small that all values could lie on one side of the quantile. Values may be
    infinite (failed requests).
    """
    ordered = np.sort(np.concatenate(values))
    value = float(ordered[quantile_index(len(ordered), p)])
    effective_size = quantile_sample_size(values, p, confidence)
    if effective_size < MIN_EFFECTIVE_SIZE:
        # Such a sample shows no more than its own range.
        effective_size = MIN_EFFECTIVE_SIZE
        interval = Interval(value, float(ordered[0]), float(ordered[-1]), confidence)
    else:
        interval = _order_statistics_interval(ordered, p, effective_size, confidence)
    # So few values could all be above the quantile, or all below it.
    if effective_size < intervals.observations_to_see(1 - p, confidence):
        interval = replace(interval, low=-math.inf)
    if effective_size < intervals.observations_to_see(p, confidence):
        interval = replace(interval, high=math.inf)
    return interval


def _order_statistics_interval(
    ordered: NDArray[np.float64], p: float, effective_size: float, confidence: float
) -> Interval:
    """Return the p quantile of ordered values. The ends of its interval are values of the sample.

    For p = 0.5 and a Wilson interval from 0.4 to 0.6, these are the 40th and the 60th of 100
    values. An end is infinite if it would be past the first or the last value.
    """
    count = len(ordered)
    low_share, high_share = intervals.wilson(p, effective_size, confidence)
    low_index = math.floor(count * low_share)
    high_index = math.ceil(count * high_share)
    value = float(ordered[quantile_index(count, p)])
    low = float(ordered[low_index]) if low_index > 0 else -math.inf
    high = float(ordered[high_index]) if high_index < count else math.inf
    return Interval(value, low, high, confidence)


def tolerance_limit(values: RunSeries, p: float, confidence: float) -> float:
    """Return an upper limit for a quantile whose tail comes from a few batches of time.

    This is for values that fluctuate slowly without queueing. The share p of such batches stays
    below the limit if the logarithms of their p quantiles are normally distributed. The limit is
    at least the worst batch: the logarithms are not normal for a server that switches between two
    speeds.
    """
    batch_quantiles = _batch_quantiles(values, p)
    log_quantiles = np.log(np.maximum(batch_quantiles, 1.0))  # at least 1 ns: log(0) is infinite
    log_limit = intervals.upper_tolerance_limit(log_quantiles, p, confidence)
    limit = math.exp(min(log_limit, MAX_EXPONENT))
    finite = batch_quantiles[np.isfinite(batch_quantiles)]
    return max(limit, float(finite.max(initial=0.0)))


def _batch_quantiles(values: RunSeries, p: float) -> NDArray[np.float64]:
    """Return the p quantile of each batch of time of all runs."""
    batches = [batch for run in values for batch in np.array_split(run, intervals.BATCHES)]
    return np.array([quantile_of(batch, p) for batch in batches if len(batch)])


def outlying_batch_quantile(values: RunSeries, p: float) -> float:
    """Return the highest p quantile of a batch if it is far above the others, else 0.

    Such a batch met another state of the server, once. How often this state comes back is not
    known, so it may affect more than the share 1 - p of the requests, however many requests there
    are. Latencies vary by factors, so the batches are compared on a logarithmic scale, by their
    median and median deviation, which the outlier itself hardly changes.
    """
    log_quantiles = np.log(np.maximum(_batch_quantiles(values, p), 1.0))
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
