"""The schedule of a run: for each request, when it is due or which other request it waits for.

`arrivals.build` makes a schedule from a workload before the run starts, and `dispatcher.Dispatcher`
decides during the run what starts when. Everything here is a pure function of the schedule.

A *slot* is one request to send. A *chain* is a sequence or graph of slots that belong together: a
conversation, a task, or a single request. Chains are numbered through all stages of a run, and the
number of a slot is `chain * turns + position in the chain` (see `sessions.SessionSequence`), so that no two
stages send the same prompt.

A stage stores only what cannot be computed, which is the arrival times of an open loop. Slots and
columns of slots are computed when they are asked for. A slot of an open loop therefore costs 8
bytes, and a closed loop without a number of requests costs nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.core.schedule.sessions import Ints, Session, SessionSequence

T = TypeVar("T", int, Ints)

RESERVED_SESSIONS = 1 << 26
"""Session numbers reserved for a stage without a count, so that later stages use others."""

_CHAINS_PER_HASH_BLOCK = 1 << 16
_CHAINS_HASHED_WITHOUT_COUNT = 1024  # of a stage that only its duration ends


class Slot(NamedTuple, Generic[T]):
    """One request of the schedule, or with `Slot[Ints]` the columns of many, ordered by number.

    A slot either has a due time, and `after` is -1, or it follows another slot, and `due_ns` is -1.
    """

    number: T  # of the slot, and of its request
    due_ns: T  # from the start of the run, or of its stage if the start of the stage is not known
    after: T  # number of the slot that must end first; if several must, the highest of them
    pause_ns: T  # between the end of that slot and the start of this one
    stage: T
    session: T  # number of the conversation or task; -1 for a single request
    turn: T
    virtual_user: T  # the virtual user of a closed loop; -1 in an open loop


class ScheduledStage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One stage of the schedule.

    An open loop has one arrival time per chain in `offsets` and no virtual users (`lanes` is 0). A
    closed loop has `lanes` virtual users and no arrival times.
    """

    index: int
    name: str
    measured: bool
    # From the start of the run. None if the stage starts when all slots of the previous stage have
    # finished.
    start_ns: int | None
    # None if the stage ends when all its slots have finished. A closed loop with a count may end
    # earlier.
    length_ns: int | None
    first_session: int
    # Of the whole stage, not of one share. None if the stage sends as many as fit into its length.
    session_count: int | None
    concurrency: int
    arrivals_ns: Ints  # of the chains, in ns from the start of the stage
    slot_count: int | None  # of all its chains
    max_turns: int
    # Virtual users that take over from no other begin evenly spread over this time.
    ramp_ns: int = 0
    # How many virtual users here continue for those of the previous stage, when these have ended.
    inherited_users: int = 0

    def user_start_ns(self, virtual_user: Any) -> Any:
        """Return when a virtual user sends its first request, in ns from the start of the stage.

        A virtual user that takes over from one of the previous stage may begin later, when that one
        has ended. `virtual_user` is a number or an array of numbers.
        """
        new_users = max(self.concurrency - self.inherited_users, 1)
        return self.ramp_ns * np.maximum(virtual_user - self.inherited_users, 0) // new_users

    @property
    def offered_rps(self) -> float | None:
        """Return the scheduled requests per second, or None for a closed loop."""
        if self.concurrency:
            return None
        assert self.length_ns is not None
        if self.length_ns == 0:
            return math.inf
        return (self.slot_count or 0) * 1e9 / self.length_ns

    @property
    def is_end_unknown(self) -> bool:
        """Return True if the end of the stage is known only when its last slot has finished."""
        return self.concurrency > 0 and self.session_count is not None


class Schedule(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The schedule of one run, or one worker's share of it (share `part` of `parts`)."""

    stages: tuple[ScheduledStage, ...]
    sessions: SessionSequence
    shard_index: int = 0
    shard_count: int = 1

    @property
    def max_turns(self) -> int:
        """Return how many slot numbers each chain has: the size of the largest chain."""
        return self.sessions.turns

    @property
    def slot_count(self) -> int | None:
        """Return the number of slots in this share, or None if only a duration limits a stage."""
        total = 0
        for span in self.stages:
            count = self.slot_count_of(span)
            if count is None:
                return None
            total += count
        return total

    def slot_count_of(self, span: ScheduledStage) -> int | None:
        """Return the number of slots of a stage in this share, or None if unlimited."""
        if span.session_count is None:
            return None
        if self.shard_count == 1:
            return span.slot_count or 0
        if self.max_turns == 1:
            return self.session_count_of(span)
        sizes = self.sessions.sizes(span.first_session, span.session_count)
        return int(sizes[self._is_own(span)].sum())

    def _is_own(self, span: ScheduledStage) -> NDArray[np.bool_]:
        """Return, for each chain of a stage with a count, whether it belongs to this share."""
        index = np.arange(span.session_count or 0)
        if span.concurrency:
            index %= span.concurrency  # A virtual user sends all its chains in one share.
        is_own: NDArray[np.bool_] = index % self.shard_count == self.shard_index
        return is_own

    @property
    def horizon_ns(self) -> int | None:
        """Return the latest end of the last stage, in ns from the start of the run.

        Return None if it depends on when requests complete.
        """
        last = self.stages[-1]
        if last.start_ns is None or last.length_ns is None:
            return None
        return last.start_ns + last.length_ns

    def session_count_of(self, span: ScheduledStage) -> int:
        """Return how many chains of a stage, which must have a count, belong to this share."""
        assert span.session_count is not None
        if not span.concurrency:
            return len(range(self.shard_index, span.session_count, self.shard_count))
        rounds, rest = divmod(span.session_count, span.concurrency)
        return rounds * len(self.virtual_users_of(span)) + len(
            range(self.shard_index, rest, self.shard_count)
        )

    def virtual_users_of(self, span: ScheduledStage) -> range:
        """Return the virtual users of a stage that belong to this share."""
        return range(self.shard_index, span.concurrency, self.shard_count)

    def arrivals_ns_of(self, span: ScheduledStage) -> Ints:
        """Return the arrival times of the chains of a stage that belong to this share."""
        return span.arrivals_ns[self.shard_index :: self.shard_count]

    def slot_ids(self) -> Iterator[int]:
        """Yield the slot numbers of this share, stage by stage in ascending order.

        This is about the order in which they are sent. It does not end if only a duration limits a
        stage.
        """
        for span in self.stages:
            yield from self.slot_ids_of(span)

    def slot_ids_of(self, span: ScheduledStage) -> Iterator[int]:
        """Yield the slot numbers of one stage, in ascending order.

        It does not end if only a duration limits the stage.
        """
        for index in self._own_chain_indexes(span):
            if span.session_count is not None and index >= span.session_count:
                return
            chain = span.first_session + index
            if self.max_turns == 1:
                yield chain
            else:
                yield from self.session_slot_ids(chain)

    def _own_chain_indexes(self, span: ScheduledStage) -> Iterator[int]:
        """Yield the positions in a stage of the chains of this share, without end."""
        if not span.concurrency:
            yield from itertools.count(self.shard_index, self.shard_count)
        own_lanes = self.virtual_users_of(span)
        if own_lanes:
            for first in itertools.count(0, span.concurrency):
                yield from (first + lane for lane in own_lanes)

    def session_slot_ids(self, chain: int) -> Iterator[int]:
        """Yield the slot numbers of a chain, in order of its turns."""
        content = self.sessions.of(chain)
        return (self.number(chain, turn, content) for turn in range(len(content.waits)))

    def number(self, chain: int, turn: int, content: Session) -> int:
        """Return the slot number of a turn.

        The last turn of a conversation or task has the last number of its chain.
        """
        is_last_turn = content.is_session and turn + 1 == len(content.waits)
        position = self.max_turns - 1 if is_last_turn else turn
        return chain * self.max_turns + position

    def first_slot_id(self, chain: int) -> int:
        """Return the number of the first slot of a chain."""
        return chain * self.max_turns if self.max_turns == 1 else next(self.session_slot_ids(chain))

    def turn_of(self, number: int) -> int:
        """Return the turn of a slot in its chain.

        Raises IndexError if the chain has fewer turns and does not use this number.
        """
        chain, position = divmod(number, self.max_turns)
        content = self.sessions.of(chain)
        number_of_turns = len(content.waits)
        is_last_position = content.is_session and position == self.max_turns - 1
        turn = number_of_turns - 1 if is_last_position else position
        if turn >= number_of_turns or self.number(chain, turn, content) != number:
            raise IndexError(number)
        return turn

    def next_slot_ids(self, number: int) -> list[int]:
        """Return the numbers of the slots of the same chain that wait for this one."""
        chain = number // self.max_turns
        content = self.sessions.of(chain)
        followers = content.followers[self.turn_of(number)]
        return [self.number(chain, turn, content) for turn in followers]

    def columns(self) -> Slot[Ints]:
        """Return all slots of this share. Raises ValueError if only a duration limits a stage."""
        stage_columns = []
        for span in self.stages:
            if span.session_count is None:
                raise ValueError(f"stage {span.name!r} has no number of requests, so no columns")
            stage_columns.append(
                _slot_columns(self, span, 0, span.session_count, self._is_own(span))
            )
        return Slot(*(np.concatenate(column) for column in zip(*stage_columns, strict=True)))

    def columns_of(self, span: ScheduledStage) -> Slot[Ints]:
        """Return the slots of a stage of a complete schedule.

        For a stage without a count, these are the slots with which its virtual users begin.
        """
        return _slot_columns(
            self, span, 0, span.concurrency if span.session_count is None else span.session_count
        )

    def slot(self, number: int) -> Slot[int]:
        """Return the slot with this number. Raises IndexError if the run has no such slot."""
        chain = number // self.max_turns
        for span in self.stages:
            index = chain - span.first_session
            if (
                0
                <= index
                < (RESERVED_SESSIONS if span.session_count is None else span.session_count)
            ):
                turn = self.turn_of(number)
                return Slot(*(int(column[turn]) for column in _slot_columns(self, span, index, 1)))
        raise IndexError(number)


def shard(schedule: Schedule, i: int, n: int) -> Schedule:
    """Return share `i` of `n` of a schedule.

    A share has complete chains and can itself be divided again. It has every n-th chain of an open
    loop and every n-th virtual user of a closed loop. Slot numbers stay those of the complete run.

    A stage that starts when the previous one has finished starts in a share when the slots *of that
    share* have finished, because workers do not communicate. If all workers must change stage
    together, run with one worker. Raises ValueError if there is no share `i` of `n`.
    """
    if not 0 <= i < n:
        raise ValueError(f"no share {i} of {n}")
    return replace(
        schedule,
        shard_index=schedule.shard_index + schedule.shard_count * i,
        shard_count=schedule.shard_count * n,
    )


def complete_schedule(schedule: Schedule) -> Schedule:
    """Return the complete schedule that a share belongs to."""
    return replace(schedule, shard_index=0, shard_count=1)


def schedule_fingerprint(schedule: Schedule) -> str:
    """Return a hash of a complete schedule as 32 hexadecimal digits.

    Two schedules have the same fingerprint exactly if due time, predecessor, pause, stage, session
    and turn of all their slots are equal. A stage without a count contributes its parameters and
    its first 1,024 chains. Raises ValueError for a share: the fingerprint must not depend on the
    number of workers.
    """
    if schedule.shard_count != 1:
        raise ValueError("only a complete schedule has a fingerprint, not a share")
    digest = hashlib.blake2b(digest_size=16)
    for span in schedule.stages:
        digest.update(
            f"{span.start_ns} {span.length_ns} {span.session_count} {span.concurrency} {span.max_turns};".encode()
        )
        chains = _CHAINS_HASHED_WITHOUT_COUNT if span.session_count is None else span.session_count
        for first in range(0, chains, _CHAINS_PER_HASH_BLOCK):
            count = min(_CHAINS_PER_HASH_BLOCK, chains - first)
            block = _slot_columns(schedule, span, first, count)
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
    span: ScheduledStage,
    first: int,
    count: int,
    is_kept: NDArray[np.bool_] | None = None,
) -> Slot[Ints]:
    """Return the slots of `count` chains of a stage, from its chain number `first` on.

    `is_kept` selects some of these chains, for example those of one share.
    """
    turns = schedule.max_turns
    chains = schedule.sessions.columns(span.first_session + first, count)
    chain_index = np.arange(first, first + count, dtype=np.int64)
    first_number = (span.first_session + chain_index) * turns  # of each chain
    first_due_ns, first_after = _first_slots(schedule, span, chain_index)

    # From here on, `row` is the row in the arrays above that each slot belongs to.
    row = np.repeat(np.arange(count), chains.sizes)
    first_slot = np.cumsum(chains.sizes) - chains.sizes
    turn = np.arange(len(row)) - first_slot[row]
    is_last_turn = chains.is_session[row] & (turn + 1 == chains.sizes[row])
    virtual_user = chain_index % span.concurrency if span.concurrency else np.full(count, -1)
    columns = Slot(
        number=first_number[row] + np.where(is_last_turn, turns - 1, turn),
        due_ns=np.where(turn == 0, first_due_ns[row], -1),
        after=np.where(turn == 0, first_after[row], first_number[row] + chains.after),
        pause_ns=chains.pause_ns,
        stage=np.full(len(row), span.index),
        session=np.where(chains.is_session, span.first_session + chain_index, -1)[row],
        turn=turn,
        virtual_user=virtual_user[row],
    )
    if is_kept is None:
        return columns
    return Slot(*(column[is_kept[row]] for column in columns))


def _first_slots(schedule: Schedule, span: ScheduledStage, chain_index: Ints) -> tuple[Ints, Ints]:
    """Return `due_ns` and `after` of the first slot of each chain of a stage."""
    count = len(chain_index)
    start_ns = span.start_ns or 0
    if not span.concurrency:
        return start_ns + span.arrivals_ns[chain_index], np.full(count, -1, np.int64)
    # The first chain of a virtual user is due at a time; each later one follows the chain before
    # it.
    is_first_of_user = chain_index < span.concurrency
    due_ns = np.full(count, -1, np.int64)
    due_ns[is_first_of_user] = start_ns + span.user_start_ns(chain_index[is_first_of_user])
    previous_chain = span.first_session + chain_index - span.concurrency
    after = np.where(is_first_of_user, -1, previous_chain * schedule.max_turns)
    if schedule.max_turns > 1 and not is_first_of_user.all():
        # It follows the last slot of that chain, which for a conversation or task has the last
        # number.
        first_previous = max(int(chain_index[0]) - span.concurrency, 0)
        previous = schedule.sessions.columns(span.first_session + first_previous, count)
        first_user_chains = max(span.concurrency - int(chain_index[0]), 0)
        after[first_user_chains:] += np.where(
            previous.is_session[: count - first_user_chains], schedule.max_turns - 1, 0
        )
    return due_ns, after
