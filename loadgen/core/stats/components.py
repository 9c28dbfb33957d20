"""Components of variance of parts that are measured side by side over time, and the parts that stand out. Pure."""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from loadgen.core.stats.intervals import LEVEL, t_quantile


class Components(Struct, frozen=True):
    """Variances that add up to that of one value: of the part it is from, of the time (which all parts share), of the
    part's own course over time, and of what is left between values of one part and time. Negative estimates are 0.
    """

    mean: float
    between: float
    time: float
    own_time: float
    within: float

    @property
    def total(self) -> float:
        return self.between + self.time + self.own_time + self.within


def components(means: NDArray[np.float64], counts: NDArray[np.int64], within: float) -> Components:
    """The two-way analysis of variance of cell means, parts x blocks of time, both random (Searle et al. 1992, ch. 4).

    `counts`: values per cell, 1 or more. `within`: the variance inside of cells. At least two parts and two blocks.
    """
    parts, blocks = means.shape
    grand = float(means.mean())
    of_parts, of_blocks = means.mean(axis=1), means.mean(axis=0)
    rest = means - of_parts[:, None] - of_blocks[None, :] + grand
    square_parts = blocks * float(((of_parts - grand) ** 2).sum()) / (parts - 1)
    square_blocks = parts * float(((of_blocks - grand) ** 2).sum()) / (blocks - 1)
    square_rest = float((rest**2).sum()) / ((parts - 1) * (blocks - 1))
    return Components(
        mean=grand,
        between=max((square_parts - square_rest) / blocks, 0.0),
        time=max((square_blocks - square_rest) / parts, 0.0),
        own_time=max(square_rest - within * float((1 / counts).mean()), 0.0),
        within=within,
    )


def outliers(values: ArrayLike, most: int, level: float = LEVEL) -> list[int]:
    """The places of the values that do not belong to the normal spread of the others: the generalized ESD test.

    At most `most` of them, the farthest first (Rosner 1983). With probability `level` none where there is none, however
    many values there are. Nothing is said of fewer than three values.
    """
    left = np.asarray(values, float).copy()
    places = list(range(len(left)))
    removed: list[int] = []
    found = 0
    for step in range(1, most + 1):
        n = len(places)
        spread = float(left[places].std(ddof=1)) if n >= 3 else 0.0
        if not spread:
            break
        distances = np.abs(left[places] - left[places].mean()) / spread
        farthest = int(distances.argmax())
        t = t_quantile(1 - (1 - level) / (2 * n), n - 2)
        removed.append(places.pop(farthest))
        if float(distances[farthest]) > (n - 1) * t / math.sqrt((n - 2 + t * t) * n):
            found = step
    return removed[:found]
