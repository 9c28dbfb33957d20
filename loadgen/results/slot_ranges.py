"""Which slots of a worker have a row, in little room: evenly spaced runs of slot numbers instead of the numbers. Pure.

Without `--keep raw` rows are folded and gone, and of a worker that dies nobody may call `lost` what it had finished. A
share is every n-th chain, and every lane goes through its own in order, so there are about as many runs as requests
were under way at a time, however long it goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.results.manifest import Header

RUN = np.dtype([("stage", "<i2"), ("lane", "<i4"), ("step", "<i8"), ("first", "<i8"), ("last", "<i8")])
"""Slots first, first + step, … last of a stage and lane (-1: of none)."""


def of(rows: NDArray[np.void], header: Header) -> NDArray[np.void]:
    """A run of one for each row, with the step at which the slots of its worker follow each other."""
    found = np.zeros(len(rows), RUN)
    found["stage"], found["lane"] = rows["stage"], rows["lane"]
    found["first"] = found["last"] = rows["slot"]
    lanes = np.array([stage.concurrency or 1 for stage in header.stages] or [1])
    places = np.clip(found["stage"], 0, len(lanes) - 1)
    found["step"] = header.turns * np.where(found["lane"] >= 0, lanes[places], header.workers)
    return found


def joined(runs: NDArray[np.void], turns: int) -> NDArray[np.void]:
    """The same slots in as few runs; no slot may be in two of them."""
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
    found = runs[starts]
    found["last"] = runs["last"][np.append(starts[1:], len(runs)) - 1]
    return found


def among(runs: NDArray[np.void], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of these numbers, ascending, are in a run. Takes memory for the slots in their span, not for all."""
    if not len(runs) or not len(numbers):
        return np.zeros(len(numbers), np.bool_)
    step, first = runs["step"], runs["first"]
    low = np.maximum(-((first - numbers[0]) // step), 0)  # the least k with first + k * step >= the least number
    high = (np.minimum(runs["last"], numbers[-1]) - first) // step
    counts = np.maximum(high - low + 1, 0)
    which = np.repeat(np.arange(len(runs)), counts)
    k = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + low[which]
    return np.isin(numbers, first[which] + k * step[which])
