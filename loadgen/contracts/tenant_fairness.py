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

    It is the mean of the classes, weighted by their numbers of requests. The low end of its
    interval is the mean of the low ends, and the high end that of the high ends, as if the errors
    of all classes had the same direction. This is the widest interval that is possible.
    """
    weights = [fraction.sample_count for fraction in fractions]
    values = [fraction.interval.value for fraction in fractions]
    low_ends = [fraction.interval.low for fraction in fractions]
    high_ends = [fraction.interval.high for fraction in fractions]

    return Interval(
        value=_compute_weighted_mean(values, weights),
        low=_compute_weighted_mean(low_ends, weights),
        high=_compute_weighted_mean(high_ends, weights),
    )


def _compute_weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the mean of values with weights."""
    products = [value * weight for value, weight in zip(values, weights, strict=True)]
    return math.fsum(products) / sum(weights)


def estimate_jain_index(fractions: Sequence[Interval]) -> Interval | None:
    """Return Jain's fairness index of the tenants' fractions of good requests, with its interval.

    The index is 1 if all fractions are equal, and 1/n if all but one of n fractions are 0. It is
    not defined if all are 0: then return None.

    Each fraction may be anywhere in its interval. So the low end of the index is its value for the
    most uneven fractions in these intervals, and the high end that for the most even ones. There is
    no formula for them, so a list of candidates is tried for each.

    Args:
        fractions: The fraction of good requests of each tenant, with its interval.
    """
    value = fairness.jain_index([fraction.value for fraction in fractions])
    if value is None:
        return None

    candidates = [*_list_uneven_fractions(fractions), *_list_even_fractions(fractions)]
    possible_indexes = [value]
    for candidate in candidates:
        index = fairness.jain_index(candidate)
        if index is not None:
            possible_indexes.append(index)

    return Interval(value, low=min(possible_indexes), high=max(possible_indexes))


def _list_uneven_fractions(fractions: Sequence[Interval]) -> list[list[float]]:
    """Return candidates for the most uneven fractions of the tenants that the intervals allow.

    Fractions are most uneven if the smaller ones are at the low ends of their intervals and the
    larger ones at the high ends. How many count as smaller is not known, so each number is tried:
    none, the smallest one, the two smallest, and so on.
    """
    ordered = sorted(fractions, key=lambda fraction: (fraction.low + fraction.high) / 2)
    candidates = []
    for smaller_count in range(len(ordered) + 1):
        low_ends = [fraction.low for fraction in ordered[:smaller_count]]
        high_ends = [fraction.high for fraction in ordered[smaller_count:]]
        candidates.append([*low_ends, *high_ends])
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
        candidates.append(
            [_find_nearest_value(fraction, common_fraction) for fraction in fractions]
        )

    return candidates


def _find_nearest_value(interval: Interval, value: float) -> float:
    """Return the value of an interval that is nearest to another value: itself or an end."""
    return min(max(value, interval.low), interval.high)
