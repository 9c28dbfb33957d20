"""Early stopping as in MLPerf LoadGen: how many of n queries may be over a limit.

Pure. Source: loadgen/early_stopping.cc of MLPerf Inference.
"""

from __future__ import annotations

import functools
import math

TOO_FEW_QUERIES = -1
"""The result of `allowed_over` if there are too few queries even without one over the limit."""

NEGLIGIBLE_TERM = 1e-17
"""Terms of a sum smaller than this share of it do not change the sum."""


def binomial_cdf(trials: int, max_events: int, probability: float) -> float:
    """Return the probability of at most `max_events` events in independent trials.

    Args:
        trials: The number of trials.
        max_events: The largest number of events, less than `trials`.
        probability: The probability of an event in one trial.
    """
    # The probabilities of 0 to `max_events` events are summed as multiples of the last of them.
    log_of_last_probability = _log_binomial_probability(trials, max_events, probability)
    last_probability = math.exp(log_of_last_probability)
    sum_of_ratios = _sum_relative_probabilities(trials, max_events, probability)

    # The rounding of floats may make the product a little larger than 1.
    return min(1.0, last_probability * sum_of_ratios)


def _sum_relative_probabilities(trials: int, max_events: int, probability: float) -> float:
    """Return P[at most `max_events` events] / P[exactly `max_events` events].

    P is the probability in a binomial distribution. The ratio is a sum of the terms
    P[k events] / P[exactly `max_events` events], from k = `max_events`, whose term is 1, down to
    k = 0. Each term follows from the previous one by

        P[k - 1 events] / P[k events] = k / (trials - k + 1) * (1 - probability) / probability.
    """
    term = 1.0
    total = 1.0
    for events in range(max_events, 0, -1):
        term *= events / (trials - events + 1) * (1 - probability) / probability
        total += term

        # The further terms are even smaller, and would not change the sum.
        if term < total * NEGLIGIBLE_TERM:
            break

    return total


def _log_binomial_probability(trials: int, events: int, probability: float) -> float:
    """Return the logarithm of the probability of exactly `events` events in independent trials.

    The probability is n! / (k! (n - k)!) * p^k * (1 - p)^(n - k). `math.lgamma(n + 1)` is the
    logarithm of n!, which does not overflow.
    """
    return (
        math.lgamma(trials + 1)
        - math.lgamma(events + 1)
        - math.lgamma(trials - events + 1)
        + events * math.log(probability)
        + (trials - events) * math.log1p(-probability)
    )


@functools.lru_cache(maxsize=4096)
def needed_queries(over_limit: int, quantile: float = 0.99, confidence: float = 0.99) -> int:
    """Return the smallest number of queries in a test that passes with `over_limit` slow ones.

    This is the rule of early stopping of MLPerf LoadGen (class `MinPassingQueriesFinder`). For
    example, if 1 % of all queries are slow, 459 queries have no slow one with a probability of
    0.99^459, just below 0.01. So a test without a slow query needs 459 queries.

    Args:
        over_limit: The number of queries over the latency limit.
        quantile: The fraction of all queries that must be within the limit, 0.99 for a p99.
        confidence: The confidence of the test.
    """
    # The needed number of queries within the limit is from `lower` to `upper`. At first, double
    # `upper` until a test with so many passes.
    lower = _expected_within_limit(over_limit, quantile)
    upper = max(1, lower)
    while not _passes(upper, over_limit, quantile, confidence):
        lower = upper + 1
        upper = 2 * upper

    # Then halve the range until only one number is left.
    while lower < upper:
        middle = (lower + upper) // 2
        if _passes(middle, over_limit, quantile, confidence):
            upper = middle
        else:
            lower = middle + 1

    needed_within_limit = lower
    return needed_within_limit + over_limit


def _passes(within_limit: int, over_limit: int, quantile: float, confidence: float) -> bool:
    """Return True if a test with so many queries within and over the limit passes.

    A test passes if a server with a fraction 1 - quantile of slow queries shows so few of them with
    a probability below 1 - confidence.
    """
    queries = within_limit + over_limit
    return binomial_cdf(queries, over_limit, 1 - quantile) < 1 - confidence


def _expected_within_limit(over_limit: int, quantile: float) -> int:
    """Return how many queries are within a limit on average if `over_limit` queries are over it."""
    if not over_limit:
        return 0
    return math.ceil(over_limit * quantile / (1 - quantile))


def allowed_over(queries: int, quantile: float = 0.99) -> int:
    """Return how many queries of a test may be over its latency limit if the test is to pass.

    The test passes by MLPerf's rule of early stopping, see `needed_queries`. The result is
    TOO_FEW_QUERIES if it cannot pass even without a query over the limit.

    Args:
        queries: The number of all queries of the test.
        quantile: The fraction of all queries that must be within the limit, 0.99 for a p99.
    """
    if needed_queries(0, quantile) > queries:
        return TOO_FEW_QUERIES

    # A test never passes with more queries over the limit than the quantile leaves, which are 1 %
    # for a p99. One more is too many, and another one allows for the rounding down.
    over_limit_by_quantile = int(queries * (1 - quantile))
    smallest_too_many = over_limit_by_quantile + 2

    # Bisection, between a number that is allowed and a number that is too large.
    largest_allowed = 0
    while smallest_too_many - largest_allowed > 1:
        middle = (largest_allowed + smallest_too_many) // 2
        is_allowed = needed_queries(middle, quantile) <= queries
        if is_allowed:
            largest_allowed = middle
        else:
            smallest_too_many = middle

    return largest_allowed
