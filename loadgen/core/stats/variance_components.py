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
    """Estimate variance components by the two-way analysis of variance of cell means.

    A cell holds the values of one part, such as a replica, in one block of time. Parts and blocks
    are both random effects, whose variances follow from the expected mean squares by the method of
    moments (Searle, Casella and McCulloch 1992, chapter 4). For example, the mean square of the
    parts is expected to be that of the residuals plus the number of blocks times the variance
    between parts.

    Args:
        means: The mean of each cell, parts x blocks of time, two or more of each.
        counts: The number of values of each cell, 1 or more.
        within: The variance of the values inside of cells.
    """
    part_count, block_count = means.shape
    grand_mean = float(means.mean())
    part_means = means.mean(axis=1)
    block_means = means.mean(axis=0)
    residuals = means - part_means[:, None] - block_means[None, :] + grand_mean

    part_squares = float(((part_means - grand_mean) ** 2).sum())
    block_squares = float(((block_means - grand_mean) ** 2).sum())
    residual_squares = float((residuals**2).sum())
    mean_square_of_parts = block_count * part_squares / (part_count - 1)
    mean_square_of_blocks = part_count * block_squares / (block_count - 1)
    mean_square_of_residuals = residual_squares / ((part_count - 1) * (block_count - 1))

    # A cell mean of few values varies by chance, which is not part of the course over time.
    variance_of_cell_means = within * float((1 / counts).mean())
    return VarianceComponents(
        mean=grand_mean,
        between=max((mean_square_of_parts - mean_square_of_residuals) / block_count, 0.0),
        time=max((mean_square_of_blocks - mean_square_of_residuals) / part_count, 0.0),
        own_time=max(mean_square_of_residuals - variance_of_cell_means, 0.0),
        within=within,
    )


def find_outliers(values: ArrayLike, max_outliers: int, level: float = LEVEL) -> list[int]:
    """Return the indices of the values that do not belong to the normal spread of the others.

    This is the generalized ESD test (Rosner 1983). It removes the value that is farthest from the
    mean, again and again. All values removed up to the last one whose distance, in standard
    deviations, exceeds its critical value are outliers. So several outliers cannot hide each other.

    Args:
        values: The values.
        max_outliers: The most outliers to return. The farthest comes first.
        level: The confidence level: the probability of no outlier if there is none, however many
            values there are.
    """
    data = np.asarray(values, float)
    remaining_indices = list(range(len(data)))
    removed_indices: list[int] = []
    outlier_count = 0
    for _ in range(max_outliers):
        remaining = data[remaining_indices]
        if len(remaining) < MIN_VALUES:
            break
        standard_deviation = float(remaining.std(ddof=1))
        if not standard_deviation:
            break
        distances = np.abs(remaining - remaining.mean()) / standard_deviation
        farthest = int(distances.argmax())
        removed_indices.append(remaining_indices.pop(farthest))
        if float(distances[farthest]) > _critical_distance(len(remaining), level):
            outlier_count = len(removed_indices)
    return removed_indices[:outlier_count]


def _critical_distance(n: int, level: float) -> float:
    """Return the distance from the mean, in standard deviations, that makes one of n an outlier.

    It is lambda of Rosner 1983, from the t quantile that Bonferroni's correction leaves to each of
    the n values and both directions.
    """
    t = t_quantile(1 - (1 - level) / (2 * n), n - 2)
    return (n - 1) * t / math.sqrt((n - 2 + t * t) * n)
