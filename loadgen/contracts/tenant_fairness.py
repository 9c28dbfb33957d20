"""Estimate how evenly a server treats the tenants of a workload, with a confidence interval.

This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadgen.contracts.term_estimate import TermEstimate
from loadgen.core.analysis import fairness
from loadgen.core.stats.intervals import Interval

COMMON_SHARES_TRIED = 200
"""Steps in which the share is searched that all tenants come nearest to having in common."""


def combine_fractions(shares: Sequence[TermEstimate]) -> Interval:
    """Return the share of several classes together, weighted by their requests.

    The value and both ends of the interval are each the weighted mean of those of the classes.
    """
    request_count = sum(share.sample_count for share in shares)

    def weighted_mean(ends: Sequence[float]) -> float:
        weighted = [end * share.sample_count for end, share in zip(ends, shares, strict=True)]
        return math.fsum(weighted) / request_count

    return Interval(
        weighted_mean([share.interval.value for share in shares]),
        weighted_mean([share.interval.low for share in shares]),
        weighted_mean([share.interval.high for share in shares]),
    )


def estimate_jain_index(shares: Sequence[Interval]) -> Interval | None:
    """Return Jain's index of shares that are known as intervals, or None if all are 0.

    The index grows with a value below a certain centre and falls with a value above it. So the
    most even values are those nearest to one centre, and the most uneven ones are the low ends of
    the smaller shares with the high ends of the larger ones.
    """
    value = fairness.jain([share.value for share in shares])
    if value is None:
        return None
    candidates = [*_uneven_shares(shares), *_even_shares(shares)]
    indices = [fairness.jain(candidate) for candidate in candidates]
    known_indices = [value, *(index for index in indices if index is not None)]
    return Interval(value, min(known_indices), max(known_indices))


def _uneven_shares(shares: Sequence[Interval]) -> list[list[float]]:
    """Return possible shares of the tenants, of which one list is the most uneven.

    The smaller shares are at their low ends and the larger ones at their high ends. Each number of
    small shares is tried.
    """
    ordered = sorted(shares, key=lambda share: share.low + share.high)
    candidates = []
    for split in range(len(shares) + 1):
        lows = [share.low for share in ordered[:split]]
        highs = [share.high for share in ordered[split:]]
        candidates.append([*lows, *highs])
    return candidates


def _even_shares(shares: Sequence[Interval]) -> list[list[float]]:
    """Return possible shares of the tenants, of which one list is nearly the most even.

    Each tenant has the value of its interval that is nearest to a common share.
    """
    least = min(share.low for share in shares)
    most = max(share.high for share in shares)
    candidates = []
    for step in range(COMMON_SHARES_TRIED + 1):
        common_share = least + (most - least) * step / COMMON_SHARES_TRIED
        candidates.append([min(max(common_share, share.low), share.high) for share in shares])
    return candidates
