"""A compact set of slot numbers: which slots of a worker have a row, as evenly spaced ranges. Pure.

Without `--keep raw`, rows are deleted after they are added to sums. If a worker then dies, the slots that it had
finished must still be known, or they would be reported as `lost`. A worker has every n-th chain, and each lane
processes its chains in order. So the number of ranges is about the number of requests in flight at one time, however
long the run is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.core.results.manifest import Header

RUN = np.dtype(
    [("stage", "<i2"), ("lane", "<i4"), ("step", "<i8"), ("first", "<i8"), ("last", "<i8")]
)
"""One range: the slots first, first + step, ... last of one stage and lane (lane -1: open loop)."""


def of(rows: NDArray[np.void], header: Header) -> NDArray[np.void]:
    """One range per row, with that one slot. `step`: the distance between successive slots of its lane or worker."""
    ranges = np.zeros(len(rows), RUN)
    ranges["stage"], ranges["lane"] = rows["stage"], rows["lane"]
    ranges["first"] = ranges["last"] = rows["slot"]
    lanes = np.array([stage.concurrency or 1 for stage in header.stages] or [1])
    stages = np.clip(ranges["stage"], 0, len(lanes) - 1)
    ranges["step"] = header.turns * np.where(ranges["lane"] >= 0, lanes[stages], header.workers)
    return ranges


def joined(runs: NDArray[np.void], turns: int) -> NDArray[np.void]:
    """The same slots in as few ranges as possible. No slot may be in two of the given ranges."""
    if not len(runs):
        return runs
    turn = runs["first"] % turns
    runs = runs[np.lexsort((runs["first"], turn, runs["lane"], runs["stage"]))]
    turn = runs["first"] % turns
    before, after = runs[:-1], runs[1:]
    follows = (
        (before["stage"] == after["stage"])
        & (before["lane"] == after["lane"])
        & (turn[:-1] == turn[1:])
        & (before["step"] == after["step"])
        & (before["last"] + before["step"] == after["first"])
    )
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    result = runs[starts]
    result["last"] = runs["last"][np.append(starts[1:], len(runs)) - 1]
    return result


def among(runs: NDArray[np.void], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """For each of `numbers` (ascending), whether it is in a range.

    The memory needed grows with the slots between the first and the last number, not with all slots of the ranges.
    """
    if not len(runs) or not len(numbers):
        return np.zeros(len(numbers), np.bool_)
    step, first = runs["step"], runs["first"]
    low = np.maximum(
        -((first - numbers[0]) // step), 0
    )  # the least k with first + k * step >= the least number
    high = (np.minimum(runs["last"], numbers[-1]) - first) // step
    counts = np.maximum(high - low + 1, 0)
    range_index = np.repeat(np.arange(len(runs)), counts)
    k = (
        np.arange(len(range_index))
        - np.repeat(np.cumsum(counts) - counts, counts)
        + low[range_index]
    )
    return np.isin(numbers, first[range_index] + k * step[range_index])
