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

    It is the sum of the binomial probabilities P[k] for k = max_events, max_events - 1, ... 0. Each
    follows from the one before it by

        P[k - 1] / P[k] = k / (trials - k + 1) * (1 - probability) / probability.

    The sum ends early when a probability is too small to change it.

    Args:
        trials: The number of trials.
        max_events: The largest number of events, less than `trials`.
        probability: The probability of an event in one trial.
    """
    # The probabilities are relative to P[max_events], so that they neither overflow nor underflow.
    relative_probability = 1.0
    relative_sum = 1.0
    for k in range(max_events, 0, -1):
        relative_probability *= k / (trials - k + 1) * (1 - probability) / probability
        relative_sum += relative_probability
        if relative_probability < relative_sum * NEGLIGIBLE_TERM:
            break

    log_of_first = _log_binomial_probability(trials, max_events, probability)
    return min(1.0, math.exp(log_of_first) * relative_sum)


def _log_binomial_probability(trials: int, events: int, probability: float) -> float:
    """Return the logarithm of the probability of exactly `events` events in independent trials.

    The probability is n! / (k! (n - k)!) * p^k * (1 - p)^(n - k). For many trials its factorials
    overflow, but their logarithms do not: `math.lgamma(n + 1)` is the logarithm of n!.
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

    This is early stopping of MLPerf LoadGen (`MinPassingQueriesFinder`). A test passes if a server
    that is just too slow would hardly ever show so few slow queries: with a probability below
    1 - confidence, see `_passes`. For example, with a quantile of 0.99 and a confidence of 0.99, a
    test without a slow query needs 459 queries, because 0.99^459 is below 0.01.

    The result is found by doubling the number of queries within the limit until the test passes,
    and then by bisection.

    Args:
        over_limit: The number of queries over the latency limit.
        quantile: The fraction of all queries that must be within the limit, 0.99 for a p99.
        confidence: The confidence with which the test must show it.
    """
    # The smallest sufficient number of queries within the limit is from `lower` to `upper`. A test
    # with fewer than expected has too large a share of slow queries to pass.
    lower = _expected_within_limit(over_limit, quantile)
    upper = max(1, lower)
    while not _passes(upper, over_limit, quantile, confidence):
        lower = upper + 1
        upper = 2 * upper

    while lower < upper:
        middle = (lower + upper) // 2
        if _passes(middle, over_limit, quantile, confidence):
            upper = middle
        else:
            lower = middle + 1

    return lower + over_limit


def _passes(within_limit: int, over_limit: int, quantile: float, confidence: float) -> bool:
    """Return True if a test with so many queries within and over the limit passes.

    A server that exceeds the limit in a fraction 1 - quantile of its queries would then show so few
    queries over the limit with a probability below 1 - confidence.
    """
    queries = within_limit + over_limit
    return binomial_cdf(queries, over_limit, 1 - quantile) < 1 - confidence


def _expected_within_limit(over_limit: int, quantile: float) -> int:
    """Return how many queries are within the limit on average when `over_limit` are over it.

    A test with fewer cannot pass, because it has more queries over the limit than expected.
    """
    if not over_limit:
        return 0
    return math.ceil(over_limit * quantile / (1 - quantile))


def allowed_over(queries: int, quantile: float = 0.99) -> int:
    """Return how many of the queries may be over the limit in a test that passes by early stopping.

    Returns TOO_FEW_QUERIES if a test with so few queries cannot pass, even without a query over the
    limit. The result is found by bisection of `needed_queries`, which grows with the number of
    queries over the limit. For a p99, no more than 1 % of the queries can be allowed.

    Args:
        queries: The number of all queries of the test.
        quantile: The fraction of all queries that must be within the limit, 0.99 for a p99.
    """
    if needed_queries(0, quantile) > queries:
        return TOO_FEW_QUERIES

    # The allowed number is from `lower` to `upper`. On average, a server that is just fast enough
    # has this many queries over the limit, and a test allows no more.
    expected_over_limit = queries * (1 - quantile)
    lower = 0
    upper = int(expected_over_limit) + 1  # rounded up
    while lower < upper:
        middle = (lower + upper + 1) // 2  # above `lower`, so that the interval becomes smaller
        if needed_queries(middle, quantile) <= queries:
            lower = middle
        else:
            upper = middle - 1

    return lower
