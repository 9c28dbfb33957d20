"""What the compiled course asks for: chains and lengths of requests, as columns of so many chains at a time. Pure.

The columns are those of `engine/_course.h`, in its order; None where there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from loadgen.core.schedule.chains import Chains, Conversations
from loadgen.core.schedule.timetable import Schedule, StageSpan
from loadgen.sim.request_lengths import DrawnAtOnce, SharedPrefixes, Sizes

Columns = tuple[Any, ...]

SINGLES, TASKS = 1024, 16
"""Chains drawn together: single requests, and what is made one by one."""
NONE = np.zeros(0, np.int64)


def stages(schedule: Schedule) -> list[tuple[Any, ...]]:
    """The stages of a schedule: -1 where something is None; last the offsets, or when each lane begins."""
    return [
        (
            _known(span.start_ns),
            _known(span.length_ns),
            span.first_chain,
            _known(span.chains),
            span.lanes,
            span.taken_over,
            _times(span),
        )
        for span in schedule.stages
    ]


def _known(value: int | None) -> int:
    return -1 if value is None else value


def _times(span: StageSpan) -> Any:
    if not span.lanes:
        return np.ascontiguousarray(span.offsets, np.int64)
    lanes = span.lanes if span.chains is None else min(span.lanes, span.chains)
    return np.ascontiguousarray(span.begins_ns(np.arange(lanes)), np.int64)


def drawn(schedule: Schedule, sizes: Sizes) -> tuple[int, Callable[[int, int], Columns]]:
    """How many chains are drawn together, and what draws them: first chain, number of them -> 12 columns."""
    chains, turns = schedule.chains, schedule.turns
    of_chains = (None,) * 8
    together = (
        chains.together if isinstance(chains, Conversations) else SINGLES if turns == 1 else TASKS
    )

    def block(first: int, count: int) -> Columns:
        made = of_chains if turns == 1 else _chains(chains, first, count)
        if isinstance(sizes, DrawnAtOnce):
            return (
                *made,
                *map(_column, sizes.of_many(np.arange(first * turns, (first + count) * turns))),
                NONE,
                NONE,
            )
        if isinstance(sizes, SharedPrefixes):
            return (*made, *map(_column, sizes.of_conversations(first, count)))
        return (*made, None, None, None, None)

    return together, block


def _column(values: Any) -> Any:
    return np.ascontiguousarray(values, np.int64)


def _chains(chains: Chains, first: int, count: int) -> Columns:
    """Of these chains: where the slots of each begin, whether it is a session; of their slots: for how many they wait,
    where their followers begin, the followers, the pauses; of each chain: in which turn its user leaves, after so many
    tokens.
    """
    if isinstance(chains, Conversations):
        turns, nobody = chains.turns, np.full(count, -1)
        waits, follows = np.ones((count, turns), np.int64), np.ones((count, turns), np.int64)
        waits[:, 0] = follows[:, -1] = 0
        starts, ends = np.arange(count + 1) * turns, np.concatenate([[0], np.cumsum(follows)])
        followers, pauses = (
            np.tile(np.arange(1, turns), count),
            chains.columns(first, count).pause_ns,
        )
        return (
            *map(_column, (starts, np.ones(count), waits, ends, followers, pauses)),
            nobody,
            nobody,
        )
    made = [chains.of(chain) for chain in range(first, first + count)]
    leaving = [one.leaving for one in made]
    return tuple(
        np.array(values, np.int64)
        for values in (
            np.cumsum([0, *(len(one.waits) for one in made)]),
            [one.is_session for one in made],
            [waits for one in made for waits in one.waits],
            np.cumsum([0, *(len(after) for one in made for after in one.followers)]),
            [turn for one in made for after in one.followers for turn in after],
            [pause for one in made for pause in one.pauses],
            [-1 if one is None else one.turn for one in leaving],
            [-1 if one is None else one.tokens for one in leaving],
        )
    )
