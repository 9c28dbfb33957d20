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
    """Return the fraction of good requests of a tenant from the fractions of its request classes.

    It is the mean of the classes, weighted by their numbers of requests. The ends of its interval
    are the means of the low ends and of the high ends, as if the errors of all classes had the same
    direction.
    """
    request_counts = [fraction.sample_count for fraction in fractions]
    return Interval(
        value=_compute_weighted_mean(
            [fraction.interval.value for fraction in fractions], request_counts
        ),
        low=_compute_weighted_mean(
            [fraction.interval.low for fraction in fractions], request_counts
        ),
        high=_compute_weighted_mean(
            [fraction.interval.high for fraction in fractions], request_counts
        ),
    )


def _compute_weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the mean of values with weights."""
    products = [value * weight for value, weight in zip(values, weights, strict=True)]
    return math.fsum(products) / sum(weights)


def estimate_jain_index(fractions: Sequence[Interval]) -> Interval | None:
    """Return Jain's fairness index of the tenants' fractions of good requests, with its interval.

    The index is 1 if all fractions are equal, and 1/n if all but one of n fractions are 0. It is
    not defined if all are 0: then return None.

    Each fraction is only known as an interval. The ends of the interval of the index are its values
    for the most uneven and for the most even fractions that these intervals allow. Several
    candidates for both are tried.

    Args:
        fractions: The fraction of good requests of each tenant, with its interval.
    """
    value = fairness.jain_index([fraction.value for fraction in fractions])
    if value is None:
        return None
    candidates = [*_list_uneven_fractions(fractions), *_list_even_fractions(fractions)]
    indices = [fairness.jain_index(candidate) for candidate in candidates]
    known_indices = [value, *(index for index in indices if index is not None)]
    return Interval(value, low=min(known_indices), high=max(known_indices))


def _list_uneven_fractions(fractions: Sequence[Interval]) -> list[list[float]]:
    """Return candidates for the most uneven fractions of the tenants that the intervals allow.

    Jain's index falls as fractions move apart. So in the most uneven case the smaller fractions are
    at their low ends and the larger ones at their high ends. It is not known how many are the
    smaller ones, so each number is tried.
    """
    ordered = sorted(fractions, key=lambda fraction: fraction.low + fraction.high)
    candidates = []
    for small_count in range(len(fractions) + 1):
        lows = [fraction.low for fraction in ordered[:small_count]]
        highs = [fraction.high for fraction in ordered[small_count:]]
        candidates.append([*lows, *highs])
    return candidates


def _list_even_fractions(fractions: Sequence[Interval]) -> list[list[float]]:
    """Return candidates for the most even fractions of the tenants that the intervals allow.

    In the most even case, each tenant has the value of its interval that is nearest to one common
    fraction. Which common fraction is best is not known, so evenly spaced ones are tried.
    """
    lowest = min(fraction.low for fraction in fractions)
    highest = max(fraction.high for fraction in fractions)
    candidates = []
    for step in range(COMMON_FRACTIONS_TRIED + 1):
        common_fraction = lowest + (highest - lowest) * step / COMMON_FRACTIONS_TRIED
        nearest = [min(max(common_fraction, fraction.low), fraction.high) for fraction in fractions]
        candidates.append(nearest)
    return candidates
