"""Exact tests of whether failures are more frequent in one part of a sample. Pure.

Sources:
    Fisher (1935), "The logic of inductive inference", for one table of two parts; Gart (1970),
    "Point and interval estimation of the common odds ratio in the combination of 2 x 2 tables with
    fixed marginals", Biometrika 57, for several tables (the exact form of the test of Cochran,
    Mantel and Haenszel); Dixon and Mood (1946), "The statistical sign test".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from loadgen.core.stats.early_stopping import binomial_cdf

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Stratum(NamedTuple):
    """Comparable trials, for example all responses to one question, in two parts.

    Attributes:
        trials: The number of trials in both parts.
        failures: The number of failures in both parts.
        suspect_trials: The number of trials in the suspected part.
        suspect_failures: The number of failures in the suspected part.
    """

    trials: int
    failures: int
    suspect_trials: int
    suspect_failures: int


def excess_p_value(strata: Iterable[Stratum]) -> float:
    """Return the probability of so many failures in the suspected part, if the parts do not differ.

    The test is exact. In each stratum, such as the trials of one question, every way to distribute
    the failures over the trials is equally likely.
    """
    # The probabilities of 0, 1, 2, ... failures more than the smallest possible number.
    probabilities = np.ones(1)
    observed_excess = 0
    for stratum in strata:
        smallest, distribution = _distribute_failures(stratum)
        probabilities = _add_independent(probabilities, distribution)
        observed_excess += stratum.suspect_failures - smallest

    return min(1.0, float(probabilities[observed_excess:].sum()))


def _distribute_failures(stratum: Stratum) -> tuple[int, NDArray[np.float64]]:
    """Return the hypergeometric distribution of the failures in the suspected part of a stratum.

    The first value is the smallest possible number of failures. The array has the probability of
    this number, and of each larger possible number.
    """
    other_trials = stratum.trials - stratum.suspect_trials
    smallest = max(0, stratum.failures - other_trials)
    largest = min(stratum.failures, stratum.suspect_trials)

    # The number of ways to distribute the failures, as logarithms.
    log_of_ways = [
        _log_binomial(stratum.suspect_trials, failures)
        + _log_binomial(other_trials, stratum.failures - failures)
        for failures in range(smallest, largest + 1)
    ]
    log_of_all_ways = _log_binomial(stratum.trials, stratum.failures)
    return smallest, np.exp(np.array(log_of_ways) - log_of_all_ways)


def _log_binomial(count: int, chosen: int) -> float:
    """Return the logarithm of the number of ways to choose `chosen` of `count` things."""
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)


def _add_independent(
    first: NDArray[np.float64], second: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the distribution of the sum of two independent counts.

    Element k of an array is the probability of k.
    """
    # `numpy.convolve` would add in an order that depends on the processor.
    total = np.zeros(len(first) + len(second) - 1)
    for shift, probability in enumerate(second):
        total[shift : shift + len(first)] += probability * first
    return total


def sign_test_p_value(worse: int, better: int) -> float:
    """Return the probability of at least `worse` worse pairs if either direction is as likely.

    Args:
        worse: The number of pairs that differ in the suspected direction.
        better: The number of pairs that differ in the other direction. Pairs without a difference
            do not count.
    """
    if worse == 0:
        return 1.0
    # At least `worse` of the pairs are worse exactly if at most `better` of them are better.
    return binomial_cdf(worse + better, better, 0.5)
