"""Distributions fitted to samples, and how far each is from values that it was not fitted to.

The parameters of a distribution are estimated from every other value of a sample, and the
distribution is compared with the remaining values by the Kolmogorov-Smirnov distance. Parameters
estimated from the same values would make the distance look too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.core.stats.quantiles import ks_distance
from loadgen.core.stats.students_t import normal_cdf
from loadgen.interop.gamma_distribution import gamma_cdf
from loadgen.interop.trace_statistics import thin_sample

MAX_EMPIRICAL_VALUES = 200
"""An empirical distribution with more values would make a workload file hard to read."""
KS_COEFFICIENT_95 = 1.358
"""The 95 % quantile of the Kolmogorov distribution (Smirnov 1948)."""
MIN_BURSTINESS = 1e-3
MAX_BURSTINESS = 1e6
"""Gaps of this burstiness are practically equal."""
MIN_PROBABILITY = 1e-12
"""Stands for a probability of 0, by which a truncated distribution cannot be divided."""
MIN_LOG_ARGUMENT = 1e-9
"""Stands for values of 0 and below, which have no logarithm."""

Floats = NDArray[np.float64]
Cdf = Callable[[Floats], Floats]
"""A cumulative distribution function: the probability of a value up to each of the arguments."""
Parameters = dict[str, Any]
"""The parameters of a distribution as in a workload file: numbers, or lists of whole numbers."""


class DistributionFit(Struct, frozen=True, kw_only=True):
    """A distribution with its parameters, and its distance from values it was not fitted to.

    Attributes:
        distribution: The name of the distribution or arrival process, as in a workload file.
        parameters: Its parameters.
        ks_distance: The Kolmogorov-Smirnov distance: the largest difference between the two
            distribution functions.
        critical_distance: The distance that chance alone exceeds in at most 5 % of such fits.
    """

    distribution: str
    parameters: Parameters
    ks_distance: float
    critical_distance: float

    @property
    def is_good(self) -> bool:
        """Whether the distance can be explained by chance."""
        return self.ks_distance <= self.critical_distance


class _SplitSample(NamedTuple):
    """A sample in two halves: parameters are estimated from one and tested on the other.

    Attributes:
        training: Every other value, in the order of the sample.
        test: The remaining values in ascending order.
    """

    training: Floats
    test: Floats

    @property
    def critical_distance(self) -> float:
        """The Kolmogorov-Smirnov distance that two samples of one distribution exceed in 5 %.

        A distribution fitted to one half is nearer to the other half than the first half itself,
        so that a correct distribution exceeds this distance less often still.
        """
        return KS_COEFFICIENT_95 * math.sqrt(1 / len(self.training) + 1 / len(self.test))


class _Candidate(NamedTuple):
    """A distribution whose fit has not been tested yet."""

    distribution: str
    parameters: Parameters
    cdf: Cdf


def prefer_parametric(fits: Sequence[DistributionFit]) -> tuple[DistributionFit, ...]:
    """Return fits of `fit_lengths` with the one that a workload should use first.

    This is the nearest parametric distribution if it is a good fit, and otherwise the empirical
    one, which is the last.
    """
    if fits[0].is_good or len(fits) == 1:
        return tuple(fits)
    return (fits[-1], *fits[:-1])


def fit_lengths(lengths: NDArray[Any]) -> list[DistributionFit]:
    """Fit distributions to a sample of whole numbers, such as the lengths of prompts in tokens.

    The distributions are those that a workload file can specify. Each one is fitted to one half of
    the sample, and tested on the other half, so that it is not judged by the values it was made of.

    Returns:
        The uniform, normal and log-normal distributions between the smallest and the largest
        length, nearest to the sample first, and then the empirical distribution. If all lengths are
        equal, the only fit is `fixed`, a constant.
    """
    low = int(lengths.min())
    high = int(lengths.max())
    halves = _split_sample(thin_sample(lengths).astype(np.float64))
    if low == high:
        return [_constant_fit(low, halves)]

    training_half = np.sort(halves.training)
    candidates = [_uniform(low, high)]

    has_spread = training_half.std() > 0
    if has_spread:
        candidates += [_normal(training_half, low, high), _lognormal(training_half, low, high)]

    parametric_fits = [_test_length_fit(candidate, halves) for candidate in candidates]
    parametric_fits.sort(key=lambda fit: fit.ks_distance)
    empirical_fit = _test_length_fit(_empirical(training_half), halves)

    return [*parametric_fits, empirical_fit]


def _constant_fit(value: int, halves: _SplitSample) -> DistributionFit:
    """Return the fit of a sample in which all values are equal. It is exact."""
    return DistributionFit(
        distribution="fixed",
        parameters={"value": value},
        ks_distance=0.0,
        critical_distance=halves.critical_distance,
    )


def fit_interarrival_times(gaps: Floats, clock_step: float = 0.0) -> list[DistributionFit]:
    """Fit a Poisson process and a gamma process to the gaps between arrivals.

    Args:
        gaps: The gaps in multiples of their mean.
        clock_step: The resolution of the recorded times, in the same unit. 0 if it is too fine to
            matter.

    Returns:
        Both fits, the one to use first. Poisson is used if it is a good fit, because it is simpler,
        or if it is at least as near as gamma.
    """
    halves = _split_sample(thin_sample(gaps))
    burstiness = _estimate_burstiness(halves.training)
    poisson = _Candidate("poisson", {}, lambda x: -np.expm1(-x))
    gamma = _Candidate(
        "gamma", {"burstiness": burstiness}, lambda x: gamma_cdf(burstiness, burstiness * x)
    )
    poisson_fit = _test_gap_fit(poisson, halves, clock_step)
    gamma_fit = _test_gap_fit(gamma, halves, clock_step)
    if poisson_fit.is_good or poisson_fit.ks_distance <= gamma_fit.ks_distance:
        return [poisson_fit, gamma_fit]

    return [gamma_fit, poisson_fit]


def _split_sample(values: Floats) -> _SplitSample:
    """Split a sample into two halves by taking every other value. A single value is in both."""
    test = values[1::2] if len(values) > 1 else values
    return _SplitSample(training=values[::2], test=np.sort(test))


def _test_length_fit(candidate: _Candidate, halves: _SplitSample) -> DistributionFit:
    """Return the distance of a distribution of whole numbers from the test half.

    The probability of less than x is that of at most x - 1, because there are whole numbers only.
    """
    return DistributionFit(
        distribution=candidate.distribution,
        parameters=candidate.parameters,
        ks_distance=ks_distance(halves.test, candidate.cdf, lambda x: candidate.cdf(x - 1)),
        critical_distance=halves.critical_distance,
    )


def _test_gap_fit(
    candidate: _Candidate, halves: _SplitSample, clock_step: float
) -> DistributionFit:
    """Return a distribution of gaps with its Kolmogorov-Smirnov distance from the test half.

    The candidate describes true gaps, but the recorded gaps of the sample were rounded to whole
    steps of a clock. A recorded gap is at most g if the true gap is at most g + step / 2, and it is
    below g if the true gap is below g - step / 2. For example, a clock of whole seconds records
    1 s for true gaps from 0.5 s to 1.5 s.
    """

    def probability_recorded_up_to(gaps: Floats) -> Floats:
        return candidate.cdf(gaps + clock_step / 2)

    def probability_recorded_below(gaps: Floats) -> Floats:
        return candidate.cdf(np.maximum(gaps - clock_step / 2, 0))

    distance = ks_distance(
        halves.test, cdf=probability_recorded_up_to, cdf_below=probability_recorded_below
    )
    return DistributionFit(
        distribution=candidate.distribution,
        parameters=candidate.parameters,
        ks_distance=distance,
        critical_distance=halves.critical_distance,
    )


def _estimate_burstiness(gaps: Floats) -> float:
    """Return the shape of the gamma distribution of gaps by the method of moments.

    It is mean^2 / variance: 1 for a Poisson process, less for bursts, and more for regular
    arrivals. vLLM calls it burstiness.
    """
    mean = float(gaps.mean())
    squared_cv = float(gaps.var()) / mean**2 if mean > 0 else 0.0
    if squared_cv <= 0:
        return MAX_BURSTINESS
    return _round_parameter(min(max(1 / squared_cv, MIN_BURSTINESS), MAX_BURSTINESS))


def _uniform(low: int, high: int) -> _Candidate:
    """Return the distribution with equal probabilities of all whole numbers from low to high."""

    def cdf(x: Floats) -> Floats:
        return np.clip((x - low + 1) / (high - low + 1), 0, 1)

    return _Candidate("uniform", {"min": low, "max": high}, cdf)


def _normal(lengths: Floats, low: int, high: int) -> _Candidate:
    """Return the normal distribution with the mean and deviation of a sample, within a range."""
    mean = float(lengths.mean())
    deviation = float(lengths.std())
    parameters = {
        "mean": _round_parameter(mean),
        "stddev": _round_parameter(deviation),
        "min": low,
        "max": high,
    }

    def standardize(x: Floats) -> Floats:
        return (x - mean) / deviation

    return _Candidate("normal", parameters, _truncated_normal_cdf(standardize, low, high))


def _lognormal(lengths: Floats, low: int, high: int) -> _Candidate:
    """Return the log-normal distribution with the geometric mean of a sample, within a range."""
    logs = np.log(lengths)
    median = float(np.exp(logs.mean()))
    sigma = float(logs.std())
    parameters = {
        "median": max(1, round(median)),
        "sigma": _round_parameter(sigma),
        "min": low,
        "max": high,
    }

    def standardize(x: Floats) -> Floats:
        return (np.log(np.maximum(x, MIN_LOG_ARGUMENT)) - math.log(median)) / sigma

    return _Candidate("lognormal", parameters, _truncated_normal_cdf(standardize, low, high))


def _truncated_normal_cdf(standardize: Cdf, low: int, high: int) -> Cdf:
    """Return the CDF of a normal variable, rounded to whole numbers and truncated to [low, high].

    A workload draws such a number by repeating the draw until the rounded number is in the range.
    The CDF is therefore (P(x) - P(low - 1)) / (P(high) - P(low - 1)), where P(x) is the probability
    that the number is at most x before it is truncated.

    Args:
        standardize: Transforms values so that the variable becomes standard normal.
        low: The smallest number.
        high: The largest number.
    """

    def untruncated_cdf(x: Floats) -> Floats:
        # Values below x + 0.5 are rounded to x or less.
        return normal_cdf(standardize(x + 0.5))

    probability_below_low, probability_up_to_high = untruncated_cdf(np.array([low - 1.0, high]))
    probability_inside = max(float(probability_up_to_high - probability_below_low), MIN_PROBABILITY)

    def truncated_cdf(x: Floats) -> Floats:
        probabilities = (untruncated_cdf(x) - probability_below_low) / probability_inside
        return np.where(x < low, 0.0, np.clip(probabilities, 0, 1))

    return truncated_cdf


def _empirical(ordered_lengths: Floats) -> _Candidate:
    """Return the distribution that lists the values of a sample, each as often as it occurs.

    A workload file has the different values and their counts as weights. To keep the file short, a
    sample with more than MAX_EMPIRICAL_VALUES different values is represented by so many evenly
    spaced quantiles. If these all differ, every weight would be 1, so the weights are left out.

    Args:
        ordered_lengths: The sample, in ascending order.
    """
    values, counts = _count_values(ordered_lengths)
    if len(values) <= MAX_EMPIRICAL_VALUES:
        return _empirical_candidate(values, counts, has_weights=True)

    quantiles = _evenly_spaced_quantiles(ordered_lengths, MAX_EMPIRICAL_VALUES)
    quantile_values, quantile_counts = _count_values(quantiles)
    some_quantiles_are_equal = max(quantile_counts) > 1

    return _empirical_candidate(
        quantile_values, quantile_counts, has_weights=some_quantiles_are_equal
    )


def _evenly_spaced_quantiles(ordered_values: Floats, count: int) -> Floats:
    """Return quantiles of sorted values, each in the middle of an equal part of the sample.

    For example, 2 quantiles of 8 values are those at 1/4 and 3/4: the values with index 2 and 6.
    """
    fractions = (np.arange(count) + 0.5) / count
    indices = (fractions * len(ordered_values)).astype(np.int64)
    return ordered_values[indices]


def _empirical_candidate(values: list[int], counts: list[int], *, has_weights: bool) -> _Candidate:
    """Return the distribution over values that occur `counts` times.

    Args:
        values: The different values, in ascending order.
        counts: How often each of them occurs.
        has_weights: Whether the counts are written as weights. Without weights, all values are
            equally likely.
    """
    parameters: Parameters = {"values": values}
    if has_weights:
        parameters["weights"] = counts
    return _Candidate("empirical", parameters, _step_cdf(values, counts))


def _count_values(lengths: Floats) -> tuple[list[int], list[int]]:
    """Return the distinct values in ascending order, and how often each one occurs."""
    values, counts = np.unique(lengths.astype(np.int64), return_counts=True)
    return values.tolist(), counts.tolist()


def _step_cdf(values: list[int], weights: list[int]) -> Cdf:
    """Return the CDF of a distribution over ascending values with weights."""
    steps = np.array(values, float)
    cumulative_weights = np.cumsum(np.array(weights, float))
    probabilities = np.concatenate([[0.0], cumulative_weights / sum(weights)])
    return lambda x: probabilities[np.searchsorted(steps, x, side="right")]


def _round_parameter(value: float) -> float:
    """Return a value with four significant digits, which keeps a workload file readable."""
    return float(f"{value:.4g}")
