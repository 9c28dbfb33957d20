"""Statistics of a trace that decide what a fitted workload can reproduce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SAMPLE = 200_000
"""More values would only take time: the error of a fit to this many is far below what matters."""
NORMAL_QUANTILE_99 = 2.326
"""The 99 % quantile of the standard normal distribution."""
MIN_DISPERSION = 1e-9
"""Stands for a dispersion of 0, by which counts cannot be divided."""

Floats = NDArray[np.float64]


def thin_sample(values: NDArray[Any]) -> NDArray[Any]:
    """Return at most MAX_SAMPLE of the values, evenly spread over their order."""
    if len(values) <= MAX_SAMPLE:
        return values
    return values[np.linspace(0, len(values) - 1, MAX_SAMPLE).astype(np.int64)]


def is_overdispersed(counts: Sequence[int], dispersion: float) -> bool:
    """Return True if the counts of arrivals in equal intervals differ by more than chance explains.

    This is the chi-square test of dispersion at a significance of 1 %. It decides whether a
    workload needs a rate of its own for each hour.

    Args:
        counts: The arrivals in each interval.
        dispersion: The variance of a count divided by its mean if the rate is constant: 1 for a
            Poisson process, more for arrivals in bursts.
    """
    mean = sum(counts) / len(counts)
    if len(counts) < 2 or mean == 0:
        return False
    squared_deviations = sum((count - mean) ** 2 for count in counts)
    chi_square = squared_deviations / (mean * max(dispersion, MIN_DISPERSION))
    return chi_square > _chi_square_quantile_99(len(counts) - 1)


def _chi_square_quantile_99(degrees_of_freedom: int) -> float:
    """Return the 99 % quantile of chi-square by the approximation of Wilson and Hilferty (1931)."""
    variance = 2 / (9 * degrees_of_freedom)
    return degrees_of_freedom * (1 - variance + NORMAL_QUANTILE_99 * math.sqrt(variance)) ** 3


def rank_correlation(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return Spearman's rank correlation of two columns, 0 if one of them does not vary."""
    first = thin_sample(first)
    second = thin_sample(second)
    if len(first) < 2 or first.min() == first.max() or second.min() == second.max():
        return 0.0

    first_ranks = _mean_ranks(first)
    second_ranks = _mean_ranks(second)
    first_deviations = first_ranks - first_ranks.mean()
    second_deviations = second_ranks - second_ranks.mean()
    covariance = float((first_deviations * second_deviations).sum())
    first_squares = float((first_deviations * first_deviations).sum())
    second_squares = float((second_deviations * second_deviations).sum())

    return covariance / math.sqrt(first_squares * second_squares)


def _mean_ranks(values: NDArray[Any]) -> Floats:
    """Return the rank of each value, from 1. Equal values share the mean of their ranks."""
    _, distinct_index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts)
    ranks: Floats = (last_ranks - (counts - 1) / 2)[distinct_index]
    return ranks
