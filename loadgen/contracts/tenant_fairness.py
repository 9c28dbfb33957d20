"""Estimate how evenly a server treats the tenants of a workload, with a confidence interval.

This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadgen.contracts.term_estimate import TermEstimate
from loadgen.core.analysis import fairness
from loadgen.core.stats.intervals import Interval

JAIN_CENTRES = 200
"""Values that all tenants may have in common of which the most even one is searched."""


def combine_shares(shares: Sequence[TermEstimate]) -> Interval:
    """Return the share of several classes together, weighted by their requests."""
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
    ordered = sorted(shares, key=lambda share: share.low + share.high)
    candidates = []
    for split in range(len(shares) + 1):
        lows = [share.low for share in ordered[:split]]
        highs = [share.high for share in ordered[split:]]
        candidates.append([*lows, *highs])
    least = min(share.low for share in shares)
    most = max(share.high for share in shares)
    for step in range(JAIN_CENTRES + 1):
        centre = least + (most - least) * step / JAIN_CENTRES
        candidates.append([min(max(centre, share.low), share.high) for share in shares])
    indices = [value]
    for candidate in candidates:
        index = fairness.jain(candidate)
        if index is not None:
            indices.append(index)
    return Interval(value, min(indices), max(indices))
