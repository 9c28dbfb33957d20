"""The timetable of a run, as a value: when each slot is due, or which slot it waits for. `arrivals.build` makes it.

Pure. A stage stores only what cannot be computed, namely the offsets of an open loop. Columns and `Slot` are views made
on demand. So each open-loop slot costs 8 bytes, and a closed loop without a count costs nothing.
`dispatcher.Dispatcher` decides what is started when.

A *chain* is a unit that must stay whole: a task, a conversation, or a single request. Chains are numbered through the
whole run. The number of a slot and of its request is `chain * turns + place` (`chains.Chains`), so no prompt appears in
two stages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.core.schedule.chains import Chain, Chains, Ints

T = TypeVar("T", int, Ints)

RESERVED = 1 << 26
"""Chain numbers reserved for a stage without a count, so that the stages after it get numbers of their own."""

_HASH_BLOCK = 1 << 16  # chains converted to columns at a time for the fingerprint


class Slot(NamedTuple, Generic[T]):
    """One row of the timetable. Either `due_ns` is an instant and `after` is -1, or the other way round.

    Of `Ints`: the columns of many slots, in ascending number. The number of its request is that of the slot.
    """

    number: T
    due_ns: T  # from the start of the run, or of the stage if the stage has no fixed start
    after: (
        T  # number of the slot that must end first; where several must, the last of them in order
    )
    pause_ns: T  # between the end of that slot and the start of this one
    stage: T
    session: T  # number of the conversation or task; -1 for a single request
    turn: T
    lane: T  # -1 in open loop


class StageSpan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One stage of the timetable: an open loop (`lanes` 0, one offset per chain) or a closed loop (`offsets` empty)."""

    index: int
    name: str
    measured: bool
    start_ns: (
        int | None
    )  # from the start of the run; None: when all slots of the previous stage have finished
    length_ns: (
        int | None
    )  # None: until all its slots have finished. A closed loop with a count may end earlier.
    first_chain: int
    chains: int | None  # of the whole stage, not of one share; None: as many as fit into its length
    lanes: int
    offsets: Ints  # of the chains, in ns from the start of the stage
    slots: int | None  # of all its chains
    turns: int
    ramp_ns: int = 0  # the lanes that take over from no other begin evenly spread over this time
    taken_over: int = (
        0  # lanes of the closed-loop stage before: as many lanes here begin when those have ended
    )

    def begins_ns(self, lane: Any) -> Any:
        """When a lane sends its first request, in ns from the start of the stage. `lane` is a number or an array.

        A lane that takes over from one of the stage before begins then at the earliest: when its place is free.
        """
        new_lanes = max(self.lanes - self.taken_over, 1)
        return self.ramp_ns * np.maximum(lane - self.taken_over, 0) // new_lanes

    @property
    def offered_rps(self) -> float | None:
        """Requests per second in the timetable; None for a closed loop, which offers no rate."""
        if self.lanes:
            return None
        assert self.length_ns is not None
        return (self.slots or 0) * 1e9 / self.length_ns if self.length_ns else math.inf

    @property
    def dynamic(self) -> bool:
        """Whether the end of the stage is known only when its last slot has finished."""
        return self.lanes > 0 and self.chains is not None


class Schedule(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The timetable of one run, or one worker's share of it (share `part` of `parts`)."""

    stages: tuple[StageSpan, ...]
    chains: Chains
    part: int = 0
    parts: int = 1

    @property
    def turns(self) -> int:
        """Places of each chain in the numbers of slots."""
        return self.chains.turns

    @property
    def slots(self) -> int | None:
        """Number of slots in this share; None if the duration alone limits a stage."""
        counts = [self.own_slots(span) for span in self.stages]
        known_counts = [count for count in counts if count is not None]
        return sum(known_counts) if len(known_counts) == len(counts) else None

    def own_slots(self, span: StageSpan) -> int | None:
        """Return the number of slots of a stage in this share, or None if its duration alone limits it."""
        if span.chains is None:
            return None
        if self.parts == 1:
            return span.slots or 0
        if self.turns == 1:
            return self.own_chains(span)
        sizes = self.chains.sizes(span.first_chain, span.chains)
        return int(sizes[self._is_own(span)].sum())

    def _is_own(self, span: StageSpan) -> NDArray[np.bool_]:
        """Which chains of a stage with a count belong to this share."""
        chain = np.arange(span.chains or 0)
        own: NDArray[np.bool_] = (
            chain % span.lanes if span.lanes else chain
        ) % self.parts == self.part
        return own

    @property
    def horizon_ns(self) -> int | None:
        """The latest end of the last stage, in ns from the start of the run; None if it depends on completions."""
        last = self.stages[-1]
        return (
            None
            if last.start_ns is None or last.length_ns is None
            else last.start_ns + last.length_ns
        )

    def own_chains(self, span: StageSpan) -> int:
        """Number of chains of a stage that belong to this share. The stage must have a count."""
        assert span.chains is not None
        if not span.lanes:
            return len(range(self.part, span.chains, self.parts))
        rounds, rest = divmod(span.chains, span.lanes)
        return rounds * len(self.own_lanes(span)) + len(range(self.part, rest, self.parts))

    def own_lanes(self, span: StageSpan) -> range:
        return range(self.part, span.lanes, self.parts)

    def own_offsets(self, span: StageSpan) -> Ints:
        return span.offsets[self.part :: self.parts]

    def numbers(self) -> Iterator[int]:
        """The numbers of this share's slots, stage by stage, ascending: about the order of sending. May be endless."""
        for span in self.stages:
            yield from self.stage_numbers(span)

    def stage_numbers(self, span: StageSpan) -> Iterator[int]:
        """The slot numbers of one stage, ascending; endless if the duration alone limits the stage."""
        step, alone = span.lanes or self.parts, self.turns == 1
        own_indexes = (
            self.own_lanes(span) if span.lanes else range(self.part, self.parts, self.parts)
        )
        base = 0
        while own_indexes and (span.chains is None or base < span.chains):
            for index in own_indexes:
                if span.chains is not None and base + index >= span.chains:
                    break
                chain = span.first_chain + base + index
                if alone:
                    yield chain
                else:
                    yield from self.numbers_of(chain)
            base += step

    def numbers_of(self, chain: int) -> Iterator[int]:
        """The slot numbers of a chain, in its order."""
        made = self.chains.of(chain)
        return (self.number(chain, turn, made) for turn in range(len(made.waits)))

    def number(self, chain: int, turn: int, made: Chain) -> int:
        """The number of a slot of a chain, from its turn."""
        is_end = made.is_session and turn + 1 == len(made.waits)
        return chain * self.turns + (self.turns - 1 if is_end else turn)

    def first_number(self, chain: int) -> int:
        """The number of the first slot of a chain."""
        return chain * self.turns if self.turns == 1 else next(self.numbers_of(chain))

    def turn_of(self, number: int) -> int:
        """The turn of a slot in its chain. Raises IndexError for a number that the chain does not use."""
        chain, place = divmod(number, self.turns)
        made = self.chains.of(chain)
        turn = len(made.waits) - 1 if made.is_session and place == self.turns - 1 else place
        if turn >= len(made.waits) or self.number(chain, turn, made) != number:
            raise IndexError(number)
        return turn

    def following(self, number: int) -> list[int]:
        """The numbers of the slots of the same chain that wait for this one."""
        chain = number // self.turns
        made = self.chains.of(chain)
        return [self.number(chain, turn, made) for turn in made.followers[self.turn_of(number)]]

    def columns(self) -> Slot[Ints]:
        """All slots of this share. Raises ValueError if the duration alone limits a stage."""
        stage_columns = []
        for span in self.stages:
            if span.chains is None:
                raise ValueError(
                    f"stage {span.name!r} is bounded by its duration alone: it has no columns"
                )
            stage_columns.append(_slot_columns(self, span, 0, span.chains, self._is_own(span)))
        return Slot(*(np.concatenate(column) for column in zip(*stage_columns, strict=True)))

    def stage_columns(self, span: StageSpan) -> Slot[Ints]:
        """Return the slots of a stage of a whole schedule.

        Of a stage without a count, these are the slots with which its virtual users begin.
        """
        return _slot_columns(self, span, 0, span.lanes if span.chains is None else span.chains)

    def slot(self, number: int) -> Slot[int]:
        """The row with this slot number, computed. Raises IndexError if the run has no such slot."""
        chain = number // self.turns
        for span in self.stages:
            index = chain - span.first_chain
            if 0 <= index < (RESERVED if span.chains is None else span.chains):
                turn = self.turn_of(number)
                return Slot(*(int(column[turn]) for column in _slot_columns(self, span, index, 1)))
        raise IndexError(number)


def shard(schedule: Schedule, i: int, n: int) -> Schedule:
    """Share i of n of a schedule, computed without copying: whole chains only.

    A share has every n-th chain of an open loop and every n-th lane of a closed loop. Numbers stay those of the whole
    run. A share can itself be divided again.

    A stage may begin when the stage before it has finished. In a share it begins when *that share's* slots have
    finished, because workers do not communicate. If all workers must change stage together, run with one worker. Raises
    ValueError if there is no share i of n.
    """
    if not 0 <= i < n:
        raise ValueError(f"no share {i} of {n}")
    return replace(schedule, part=schedule.part + schedule.parts * i, parts=schedule.parts * n)


def unsharded(schedule: Schedule) -> Schedule:
    """Return the schedule of the whole run that a share belongs to."""
    return replace(schedule, part=0, parts=1)


def fingerprint(schedule: Schedule) -> str:
    """The fingerprint of the *timetable*, as 32 hexadecimal digits.

    Two fingerprints are equal exactly when due time, after, pause, stage, session and turn of all slots are equal. A
    stage without a count contributes its parameters and its first 1,024 chains. The fingerprint describes the whole
    run, so it does not depend on the number of workers. Raises ValueError for a share.
    """
    if schedule.parts != 1:
        raise ValueError("the fingerprint is that of the whole timetable, not of a share")
    digest = hashlib.blake2b(digest_size=16)
    for span in schedule.stages:
        digest.update(
            f"{span.start_ns} {span.length_ns} {span.chains} {span.lanes} {span.turns};".encode()
        )
        chains = min(1024, RESERVED) if span.chains is None else span.chains
        for first in range(0, chains, _HASH_BLOCK):
            block = _slot_columns(schedule, span, first, min(_HASH_BLOCK, chains - first))
            for column in (
                block.due_ns,
                block.after,
                block.pause_ns,
                block.stage,
                block.session,
                block.turn,
            ):
                digest.update(np.ascontiguousarray(column, "<i8").data)
    return digest.hexdigest()


def _slot_columns(
    schedule: Schedule,
    span: StageSpan,
    first: int,
    count: int,
    keep: NDArray[np.bool_] | None = None,
) -> Slot[Ints]:
    """The slots of the stage's chains first … first + count - 1; with `keep`, of the chains where it is True."""
    turns, made = schedule.turns, schedule.chains.columns(span.first_chain + first, count)
    of_chain = np.repeat(np.arange(count), made.sizes)  # for each slot: the index of its chain
    starts = np.cumsum(made.sizes) - made.sizes
    turn = np.arange(len(of_chain)) - starts[of_chain]
    is_end = made.is_session[of_chain] & (turn + 1 == made.sizes[of_chain])
    chain = np.arange(first, first + count, dtype=np.int64)
    due, after = (
        np.full(count, -1, np.int64),
        np.full(count, -1, np.int64),
    )  # of the first slot of each chain
    start = span.start_ns or 0
    if span.lanes:
        begins = chain < span.lanes
        due[begins] = start + span.begins_ns(chain[begins])
        before = span.first_chain + chain - span.lanes
        after = np.where(begins, -1, before * turns)
        if turns > 1 and not begins.all():
            earlier = schedule.chains.columns(
                span.first_chain + max(first - span.lanes, 0), count
            ).is_session
            skipped = max(span.lanes - first, 0)  # chains here that follow none
            after[skipped:] += np.where(earlier[: count - skipped], turns - 1, 0)
    else:
        due = start + span.offsets[chain]
    number_of_chain = (span.first_chain + chain) * turns
    columns = Slot(
        number=number_of_chain[of_chain] + np.where(is_end, turns - 1, turn),
        due_ns=np.where(turn == 0, due[of_chain], -1),
        after=np.where(turn == 0, after[of_chain], number_of_chain[of_chain] + made.after),
        pause_ns=made.pause_ns,
        stage=np.full(len(of_chain), span.index),
        session=np.where(made.is_session, span.first_chain + chain, -1)[of_chain],
        turn=turn,
        lane=(chain % span.lanes if span.lanes else np.full(count, -1))[of_chain],
    )
    return columns if keep is None else Slot(*(column[keep[of_chain]] for column in columns))
