"""Components of variance of parts that are measured side by side over time, and outliers. Pure."""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from loadgen.core.stats.intervals import LEVEL
from loadgen.core.stats.students_t import t_quantile

MIN_VALUES = 3
"""Nothing can be said about outliers among fewer values."""


class VarianceComponents(Struct, frozen=True):
    """Variances that add up to that of one value. Negative estimates are 0.

    Attributes:
        mean: The mean of all values.
        between: The variance between the parts.
        time: The variance over time that all parts share.
        own_time: The variance of a part's own course over time.
        within: The variance of values of one part and time.
    """

    mean: float
    between: float
    time: float
    own_time: float
    within: float

    @property
    def total(self) -> float:
        """The variance of one value."""
        return self.between + self.time + self.own_time + self.within


def estimate_components(
    means: NDArray[np.float64], counts: NDArray[np.int64], within: float
) -> VarianceComponents:
    """Estimate the components by the two-way analysis of variance of cell means.

    Parts and blocks of time are both random (Searle et al. 1992, chapter 4).

    Args:
        means: The mean of each cell, parts x blocks of time, two or more of each.
        counts: The number of values of each cell, 1 or more.
        within: The variance inside of cells.
    """
    part_count, block_count = means.shape
    grand_mean = float(means.mean())
    part_means = means.mean(axis=1)
    block_means = means.mean(axis=0)
    residuals = means - part_means[:, None] - block_means[None, :] + grand_mean
    square_of_parts = block_count * float(((part_means - grand_mean) ** 2).sum()) / (part_count - 1)
    square_of_blocks = (
        part_count * float(((block_means - grand_mean) ** 2).sum()) / (block_count - 1)
    )
    square_of_residuals = float((residuals**2).sum()) / ((part_count - 1) * (block_count - 1))
    return VarianceComponents(
        mean=grand_mean,
        between=max((square_of_parts - square_of_residuals) / block_count, 0.0),
        time=max((square_of_blocks - square_of_residuals) / part_count, 0.0),
        own_time=max(square_of_residuals - within * float((1 / counts).mean()), 0.0),
        within=within,
    )


def find_outliers(values: ArrayLike, max_outliers: int, level: float = LEVEL) -> list[int]:
    """Return the indices of the values that do not belong to the normal spread of the others.

    This is the generalized ESD test (Rosner 1983). It returns at most `max_outliers`, the farthest
    first. With probability `level` it returns none if there is none, however many values there are.
    """
    data = np.asarray(values, float)
    remaining = list(range(len(data)))
    removed: list[int] = []
    outlier_count = 0
    for step in range(1, max_outliers + 1):
        n = len(remaining)
        spread = float(data[remaining].std(ddof=1)) if n >= MIN_VALUES else 0.0
        if not spread:
            break
        distances = np.abs(data[remaining] - data[remaining].mean()) / spread
        farthest = int(distances.argmax())
        t = t_quantile(1 - (1 - level) / (2 * n), n - 2)
        critical_distance = (n - 1) * t / math.sqrt((n - 2 + t * t) * n)
        removed.append(remaining.pop(farthest))
        if float(distances[farthest]) > critical_distance:
            outlier_count = step
    return removed[:outlier_count]
