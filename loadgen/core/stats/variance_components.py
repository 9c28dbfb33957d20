"""Components of variance of parts that are measured side by side over time, and outliers. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from loadgen.core.stats.intervals import LEVEL
from loadgen.core.stats.students_t import t_quantile

MIN_VALUES = 3
"""Nothing can be said about outliers among fewer values."""


class VarianceComponents(Struct, frozen=True):
    """Variances that add up to that of one value. Negative estimates are 0.

    The values come from several parts, such as replicas, that are measured at the same time.

    Attributes:
        mean: The mean of all values.
        between_parts: The variance between the means of the parts.
        over_time: The variance over time that all parts share, for example due to a rising load.
        interaction: The variance over time that each part has on its own, for example because a
            single replica was busy for a while.
        within_cells: The variance of values of one part in one block of time.
    """

    mean: float
    between_parts: float
    over_time: float
    interaction: float
    within_cells: float

    @property
    def total(self) -> float:
        """The variance of one value."""
        return self.between_parts + self.over_time + self.interaction + self.within_cells


class _MeanSquares(NamedTuple):
    """The mean squares of the analysis of variance of a table of cell means."""

    parts: float
    blocks: float
    residuals: float


def estimate_components(
    cell_means: NDArray[np.float64], cell_counts: NDArray[np.int64], variance_within: float
) -> VarianceComponents:
    """Estimate how much values vary between parts, such as replicas, and over time.

    A cell has the values of one part in one block of time. This is the two-way analysis of variance
    of the cell means. The method of moments for two random effects (Searle, Casella and McCulloch
    1992, chapter 4) sets each mean square equal to its expected value:

        mean square of the parts = residual mean square + blocks * variance between parts,
        mean square of the blocks = residual mean square + parts * variance over time,
        residual mean square = variance of interaction + variance of a cell mean by chance.

    The interaction is the changes over time that single parts have.

    Args:
        cell_means: The mean of each cell, parts x blocks of time, two or more of each.
        cell_counts: The number of values of each cell, 1 or more.
        variance_within: The variance of the values around the mean of their cell.
    """
    part_count, block_count = cell_means.shape
    mean_squares = _compute_mean_squares(cell_means)
    residual = mean_squares.residuals

    variance_between_parts = (mean_squares.parts - residual) / block_count
    variance_over_time = (mean_squares.blocks - residual) / part_count

    # By chance, a mean of n values has 1 / n of the variance of one value.
    mean_of_reciprocal_counts = float((1 / cell_counts).mean())
    chance_variance_of_cell_mean = variance_within * mean_of_reciprocal_counts
    variance_of_interaction = residual - chance_variance_of_cell_mean

    # No variance is negative, although an estimate may be.
    return VarianceComponents(
        mean=float(cell_means.mean()),
        between_parts=max(variance_between_parts, 0.0),
        over_time=max(variance_over_time, 0.0),
        interaction=max(variance_of_interaction, 0.0),
        within_cells=variance_within,
    )


def _compute_mean_squares(cell_means: NDArray[np.float64]) -> _MeanSquares:
    """Return the mean squares of a two-way analysis of variance without replication.

    Args:
        cell_means: The mean of each cell, parts x blocks of time.
    """
    part_count, block_count = cell_means.shape
    grand_mean = float(cell_means.mean())
    part_effects = cell_means.mean(axis=1) - grand_mean
    block_effects = cell_means.mean(axis=0) - grand_mean
    residuals = _residuals_of_cells(cell_means)

    return _MeanSquares(
        parts=block_count * _sum_of_squares(part_effects) / (part_count - 1),
        blocks=part_count * _sum_of_squares(block_effects) / (block_count - 1),
        residuals=_sum_of_squares(residuals) / ((part_count - 1) * (block_count - 1)),
    )


def _residuals_of_cells(cell_means: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each cell mean without the effects of its part and of its block of time."""
    part_means = cell_means.mean(axis=1, keepdims=True)
    block_means = cell_means.mean(axis=0, keepdims=True)
    residuals: NDArray[np.float64] = cell_means - part_means - block_means + cell_means.mean()
    return residuals


def _sum_of_squares(values: NDArray[np.float64]) -> float:
    """Return the sum of the squares of values."""
    return float((values**2).sum())


def find_outliers(values: ArrayLike, max_outliers: int, level: float = LEVEL) -> list[int]:
    """Return the indices of the outliers among normally distributed values.

    The generalized ESD test (Rosner 1983) repeatedly removes the value farthest from the mean. Each
    removal has a critical distance, which depends on the number of values. If a removed value is
    beyond its critical distance, that value and all values removed before are outliers.

    Args:
        values: The values.
        max_outliers: The most outliers to return. The farthest outlier comes first.
        level: The probability that no index is returned if there is no outlier.
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
        if standard_deviation == 0:
            break

        # Remove the value that is farthest from the mean.
        distances = np.abs(remaining - remaining.mean()) / standard_deviation
        farthest = int(distances.argmax())
        largest_distance = float(distances[farthest])
        removed_indices.append(remaining_indices.pop(farthest))

        # All values that were removed up to now are outliers.
        if largest_distance > _critical_distance(len(remaining), level):
            outlier_count = len(removed_indices)

    return removed_indices[:outlier_count]


def _critical_distance(count: int, level: float) -> float:
    """Return the distance from the mean, in standard deviations, that makes a value an outlier.

    This is lambda of the generalized ESD test (Rosner 1983) for one of n = `count` values:

        (n - 1) t / sqrt((n - 2 + t^2) n),

    where t is a quantile of Student's t with n - 2 degrees of freedom. For example, the distance is
    2.71 for 20 values and a level of 0.95.
    """
    # Each of the n values may be too small or too large, so there are 2 n tests. Bonferroni's
    # correction divides the probability of an error by the number of tests.
    error_probability = (1 - level) / (2 * count)
    t = t_quantile(1 - error_probability, count - 2)

    numerator = (count - 1) * t
    denominator = math.sqrt((count - 2 + t * t) * count)
    return numerator / denominator
