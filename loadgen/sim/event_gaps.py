"""The gaps between the output events of each request of a virtual run, for `--keep gaps`. Pure, on columns only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.results.gaps import RequestGaps

Ints = NDArray[np.int64]
GROUP_EVENTS = 1 << 20


class Stretches(NamedTuple):
    """Unbroken series of iterations in which a request got tokens: one per request, more of those that were paused."""

    row: Ints
    replica: Ints
    first: Ints
    last: Ints


class Emitted(NamedTuple):
    """What the replicas emitted. `slots`: of each row. `ends`: of the iterations of each replica. `interval`: a
    stretch has an event at its first iteration, at every `interval`-th after it, and at its last.
    """

    slots: Ints
    stretches: Stretches
    ends: Sequence[Ints]
    interval: int


def gaps(emitted: Emitted) -> Iterator[RequestGaps]:
    """The gaps of all requests that have one, in the order of the rows, some at a time."""
    slots, stretches, ends, interval = emitted
    order = np.lexsort((stretches.first, stretches.row))
    row, replica, first, last = (column[order] for column in stretches)
    events = 1 - (first - last) // interval  # the last rounds up
    instants, offsets = np.concatenate(ends), np.cumsum([0, *map(len, ends)])
    begins = np.flatnonzero(np.diff(row, prepend=-1))  # of the stretches of each row
    groups = (np.cumsum(events) - events)[begins] // GROUP_EVENTS
    cuts = begins[np.flatnonzero(np.diff(groups, prepend=-1))].tolist()
    for part in map(slice, cuts, [*cuts[1:], len(row)]):
        count = events[part]
        of = np.repeat(np.arange(len(count)), count)
        place = np.arange(len(of)) - (np.cumsum(count) - count)[of]
        iteration = np.minimum(first[part][of] + place * interval, last[part][of])
        steps = np.diff(instants[offsets[replica[part]][of] + iteration])
        of_row = row[part][of]
        is_gap = of_row[1:] == of_row[:-1]
        rows, counts = np.unique(of_row[1:][is_gap], return_counts=True)
        yield RequestGaps(slots[rows], counts, steps[is_gap])
