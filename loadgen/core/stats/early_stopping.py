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

    It is the sum of P[Binomial = k] for k from 0 to `max_events`. The term of `max_events` is
    computed by logarithms, because its factors overflow. Each other term follows from the one
    above it: P[k - 1] / P[k] = k / (trials - k + 1) * (1 - probability) / probability. The terms
    fall fast where the sum is small, so it ends when a term does not change it any more.

    Args:
        trials: The number of trials.
        max_events: The largest number of events, less than `trials`.
        probability: The probability of an event in one trial.
    """
    log_of_top_term = (
        math.lgamma(trials + 1)
        - math.lgamma(max_events + 1)
        - math.lgamma(trials - max_events + 1)
        + max_events * math.log(probability)
        + (trials - max_events) * math.log1p(-probability)
    )

    # Terms are relative to the top one, so that they neither overflow nor underflow.
    term = 1.0
    sum_of_terms = 1.0
    for k in range(max_events, 0, -1):
        term *= k / (trials - k + 1) * (1 - probability) / probability
        sum_of_terms += term
        if term < sum_of_terms * NEGLIGIBLE_TERM:
            break

    return min(1.0, math.exp(log_of_top_term) * sum_of_terms)


@functools.lru_cache(maxsize=4096)
def needed_queries(over_limit: int, quantile: float = 0.99, confidence: float = 0.99) -> int:
    """Return the smallest number of queries in a test that passes with `over_limit` slow ones.

    This is early stopping of MLPerf LoadGen (`MinPassingQueriesFinder`). A test passes if it shows,
    with the required confidence, that the server is fast enough. A server that is just too slow has
    each query over the limit with probability 1 - quantile. It may have only a few slow queries by
    chance. The test passes if the probability of that is below 1 - confidence.

    The result is found by doubling the number of queries within the limit until the test passes,
    and then by bisection.

    Args:
        over_limit: The number of queries over the latency limit.
        quantile: The fraction of all queries that must be within the limit, 0.99 for a p99.
        confidence: The confidence with which the test must show it.
    """
    # The smallest sufficient number of queries within the limit is from `lower` to `upper`.
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
