"""Estimate how evenly a server treats the tenants of a workload, with a confidence interval.

This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadgen.contracts.term_estimate import TermEstimate
from loadgen.core.analysis import fairness
from loadgen.core.stats.intervals import Interval

COMMON_FRACTIONS_TRIED = 200
"""The number of steps in which the most even fractions of the tenants are searched.

The index is then exact to four digits, which is far less than the width of its interval.
"""


def combine_fractions(fractions: Sequence[TermEstimate]) -> Interval:
    """Return the fraction of good requests of several classes together.

    The value and both ends of the interval are each the mean of those of the classes, weighted by
    their requests.
    """
    request_counts = [fraction.sample_count for fraction in fractions]
    return Interval(
        _weighted_mean([fraction.interval.value for fraction in fractions], request_counts),
        _weighted_mean([fraction.interval.low for fraction in fractions], request_counts),
        _weighted_mean([fraction.interval.high for fraction in fractions], request_counts),
    )


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the mean of values with weights."""
    products = [value * weight for value, weight in zip(values, weights, strict=True)]
    return math.fsum(products) / sum(weights)


def estimate_jain_index(fractions: Sequence[Interval]) -> Interval | None:
    """Return Jain's index of fractions that are known as intervals, or None if all are 0.

    The ends of its interval are the index of the most uneven and of the most even fractions that
    the intervals allow. The index falls as fractions move away from a common center. So fractions
    are most even near one center, and most uneven if the smaller ones are at their low ends and the
    larger ones at their high ends.
    """
    value = fairness.jain_index([fraction.value for fraction in fractions])
    if value is None:
        return None
    candidates = [*_uneven_fractions(fractions), *_even_fractions(fractions)]
    indices = [fairness.jain_index(candidate) for candidate in candidates]
    known_indices = [value, *(index for index in indices if index is not None)]
    return Interval(value, min(known_indices), max(known_indices))


def _uneven_fractions(fractions: Sequence[Interval]) -> list[list[float]]:
    """Return lists of possible fractions of the tenants, one of which is the most uneven.

    The smaller fractions are at their low ends and the larger ones at their high ends. It is not
    known how many are the smaller ones, so each number is tried.
    """
    ordered = sorted(fractions, key=lambda fraction: fraction.low + fraction.high)
    candidates = []
    for small_count in range(len(fractions) + 1):
        lows = [fraction.low for fraction in ordered[:small_count]]
        highs = [fraction.high for fraction in ordered[small_count:]]
        candidates.append([*lows, *highs])
    return candidates


def _even_fractions(fractions: Sequence[Interval]) -> list[list[float]]:
    """Return lists of possible fractions of the tenants, one of which is nearly the most even.

    Each tenant has the value of its interval that is nearest to a common fraction. Which common
    fraction gives the most even list is not known, so evenly spaced ones are tried.
    """
    lowest = min(fraction.low for fraction in fractions)
    highest = max(fraction.high for fraction in fractions)
    candidates = []
    for step in range(COMMON_FRACTIONS_TRIED + 1):
        common = lowest + (highest - lowest) * step / COMMON_FRACTIONS_TRIED
        candidates.append([min(max(common, fraction.low), fraction.high) for fraction in fractions])
    return candidates
