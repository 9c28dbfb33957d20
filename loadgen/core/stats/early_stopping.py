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


def binomial_cdf(n: int, t: int, q: float) -> float:
    """Return P[Binomial(n, q) <= t], for t < n: the probability of at most t events in n trials.

    The largest term P[Binomial(n, q) = t] is computed by logarithms, because its factors overflow.
    The smaller terms follow from their ratios. They fall fast where the result is small, so the sum
    ends when a term does not change it any more.
    """
    log_of_term_t = (
        math.lgamma(n + 1)
        - math.lgamma(t + 1)
        - math.lgamma(n - t + 1)
        + t * math.log(q)
        + (n - t) * math.log1p(-q)
    )
    relative_term = 1.0  # the term divided by the term t
    relative_sum = 1.0
    for k in range(t, 0, -1):
        relative_term *= k / (n - k + 1) * (1 - q) / q
        relative_sum += relative_term
        if relative_term < relative_sum * NEGLIGIBLE_TERM:
            break
    return min(1.0, math.exp(log_of_term_t) * relative_sum)


@functools.lru_cache(maxsize=4096)
def needed_queries(over: int, p: float = 0.99, confidence: float = 0.99) -> int:
    """Return the smallest number of queries of which `over` may be over the limit.

    This is early stopping of MLPerf LoadGen (`MinPassingQueriesFinder`). A test passes if so few
    queries over the limit would be improbable for a server that exceeds it just too often: h
    queries within the limit are enough if P[Binomial(h + over, 1 - p) <= over] < 1 - confidence.
    The smallest such h is found by doubling and bisection.

    Args:
        over: The number of queries over the limit.
        p: The share of all queries that must be within the limit.
        confidence: The confidence with which the sample must show it.
    """

    def is_improbable(within: int) -> bool:
        return binomial_cdf(within + over, over, 1 - p) < 1 - confidence

    # With fewer queries within the limit, `over` is not even below its expected value.
    low = math.ceil(over * p / (1 - p)) if over else 0
    high = max(1, low)
    while not is_improbable(high):
        low = high + 1
        high = 2 * high
    while low < high:
        middle = (low + high) // 2
        if is_improbable(middle):
            high = middle
        else:
            low = middle + 1
    return low + over


def allowed_over(queries: int, p: float = 0.99) -> int:
    """Return how many of the queries may be over the limit in a test that passes by early stopping.

    Returns TOO_FEW_QUERIES if the test cannot pass with so few. It bisects `needed_queries`, which
    grows with the number over the limit. That number is at most the expected one, which is
    queries * (1 - p).

    Args:
        queries: The number of all queries.
        p: The share of all queries that must be within the limit.
    """
    if needed_queries(0, p) > queries:
        return TOO_FEW_QUERIES
    low = 0
    high = max(1, int(queries * (1 - p)) + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if needed_queries(middle, p) <= queries:
            low = middle
        else:
            high = middle - 1
    return low
