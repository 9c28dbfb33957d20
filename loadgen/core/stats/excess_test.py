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


class _FailureDistribution(NamedTuple):
    """The probability of each possible number of failures in the suspected part of a sample.

    Attributes:
        smallest: The smallest possible number of failures.
        probabilities: The probabilities of `smallest`, `smallest` + 1, and so on.
    """

    smallest: int
    probabilities: NDArray[np.float64]

    def probability_of_at_least(self, failures: int) -> float:
        """Return the probability of a number of failures or more, for a number that is possible."""
        first_index = failures - self.smallest
        return float(self.probabilities[first_index:].sum())


def excess_p_value(strata: Iterable[Stratum]) -> float:
    """Return the probability of at least the observed failures in the suspected part, by chance.

    A stratum is a group of comparable trials in two parts, for example the responses to one
    question before and after a change. The exact test of Gart (1970) assumes that each trial of a
    stratum fails with the same probability, which may differ from stratum to stratum.

    The result is 1 unless a stratum has failures and successes, and trials in both parts. For
    example, if both failures of 4 trials are among the 2 suspected ones, it is 1 / 6.
    """
    # The distribution of the failures of all strata together, which begins with no stratum.
    total = _FailureDistribution(smallest=0, probabilities=np.ones(1))
    observed_failures = 0
    for stratum in strata:
        total = _add_independent(total, _distribute_failures(stratum))
        observed_failures += stratum.suspect_failures

    p_value = total.probability_of_at_least(observed_failures)
    return min(1.0, p_value)  # rounding can leave a sum slightly above 1


def _distribute_failures(stratum: Stratum) -> _FailureDistribution:
    """Return how likely each number of failures is among the suspected trials, by chance.

    This is the hypergeometric distribution: if f of n trials are failures, and m of the n trials
    are suspected, the probability of k failures among the suspected trials is

        C(m, k) * C(n - m, f - k) / C(n, f),

    where C(a, b) is the number of ways to choose b of a trials.
    """
    other_trials = stratum.trials - stratum.suspect_trials
    fewest_failures = max(0, stratum.failures - other_trials)
    most_failures = min(stratum.failures, stratum.suspect_trials)

    # The numbers of ways may exceed the largest float, so their logarithms are used.
    logs_of_ways = []
    for suspect_failures in range(fewest_failures, most_failures + 1):
        other_failures = stratum.failures - suspect_failures
        log_of_suspect_ways = _log_binomial(stratum.suspect_trials, suspect_failures)
        log_of_other_ways = _log_binomial(other_trials, other_failures)
        logs_of_ways.append(log_of_suspect_ways + log_of_other_ways)

    log_of_all_ways = _log_binomial(stratum.trials, stratum.failures)
    probabilities = np.exp(np.array(logs_of_ways) - log_of_all_ways)
    return _FailureDistribution(fewest_failures, probabilities)


def _log_binomial(count: int, chosen: int) -> float:
    """Return the logarithm of the number of ways to choose `chosen` of `count` things."""
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)


def _add_independent(
    first: _FailureDistribution, second: _FailureDistribution
) -> _FailureDistribution:
    """Return the distribution of the sum of two independent numbers of failures.

    The probabilities are the convolution of those of both numbers. It is written out, because
    `numpy.convolve` adds in an order, and so rounds in a way, that depends on the processor.
    """
    first_length = len(first.probabilities)
    second_length = len(second.probabilities)

    probabilities_of_sum = np.zeros(first_length + second_length - 1)
    for index, second_probability in enumerate(second.probabilities):
        sums = slice(index, index + first_length)
        probabilities_of_sum[sums] += second_probability * first.probabilities

    return _FailureDistribution(first.smallest + second.smallest, probabilities_of_sum)


def sign_test_p_value(worse: int, better: int) -> float:
    """Return the p-value of the one-sided sign test (Dixon and Mood, 1946).

    This is the probability that at least `worse` of the pairs are worse if each pair is worse or
    better with the probability 0.5. Pairs without a difference do not count.
    """
    if worse == 0:
        return 1.0

    # At least `worse` of the pairs are worse exactly if at most `better` of them are better.
    pairs = worse + better
    return binomial_cdf(pairs, better, 0.5)
