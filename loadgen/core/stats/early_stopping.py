"""Early stopping as in MLPerf LoadGen: how many of n queries may be over a limit. Pure.

Source: loadgen/early_stopping.cc of MLPerf Inference.
"""

from __future__ import annotations

import functools
import math


def at_most(n: int, t: int, q: float) -> float:
    """P[Binomial(n, q) <= t], for t < n.

    Summed from the term t downwards; the terms fall fast where the result is small.
    """
    log_term = (
        math.lgamma(n + 1)
        - math.lgamma(t + 1)
        - math.lgamma(n - t + 1)
        + t * math.log(q)
        + (n - t) * math.log1p(-q)
    )
    total = term = 1.0
    for k in range(t, 0, -1):
        term *= k / (n - k + 1) * (1 - q) / q
        total += term
        if term < total * 1e-17:
            break
    return min(1.0, math.exp(log_term) * total)


@functools.lru_cache(maxsize=4096)
def needed(t: int, p: float = 0.99, c: float = 0.99) -> int:
    """The smallest number of queries at which `t` queries over the limit still pass.

    It is h + t for the smallest h with P[Binomial(h + t, 1 - p) <= t] < 1 - c. Source: loadgen/early_stopping.cc
    (`MinPassingQueriesFinder`).
    """
    low = (
        math.ceil(t * p / (1 - p)) if t else 0
    )  # with a smaller h, t is not even below its expected value
    high = max(1, low)
    while at_most(high + t, t, 1 - p) >= 1 - c:
        low, high = high + 1, 2 * high
    while low < high:
        h = (low + high) // 2
        if at_most(h + t, t, 1 - p) < 1 - c:
            high = h
        else:
            low = h + 1
    return low + t


def allowed(n: int, p: float = 0.99) -> int:
    """The most queries of `n` that may be over the limit; -1 when `n` is too small even without one."""
    if needed(0, p) > n:
        return -1
    low, high = 0, max(1, int(n * (1 - p)) + 1)
    while low < high:
        t = (low + high + 1) // 2
        low, high = (t, high) if needed(t, p) <= n else (low, t - 1)
    return low
