"""The schedule of a run: when each request is due, or which other request it waits for.

`build.build_schedule` makes the schedule of a workload before the run starts, and
`dispatcher.Dispatcher` decides during the run what starts when. Everything here is a pure function
of the schedule.

A *slot* is one request to send: one turn of a session (see `sessions`). `SlotLayout` defines the
ids of slots. Sessions are numbered through all stages of a run, so no two stages send the same
prompt.

A stage stores only what cannot be computed: the arrival times of an open loop. Slots and columns of
slots are computed on demand. A slot of an open loop therefore costs 8 bytes, and a closed loop
without a number of requests costs nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.core.requests.slot_layout import SlotLayout
from loadgen.core.schedule.sessions import (
    NOT_APPLICABLE,
    Ints,
    Session,
    SessionColumns,
    SessionSequence,
)

RESERVED_SESSIONS = 1 << 26
"""Session numbers reserved for a stage without a count, so that later stages use others."""

_NS_PER_S = 1e9
_SESSIONS_PER_HASH_BLOCK = 1 << 16
# The fingerprint of a stage that only its duration ends covers this many sessions.
_SESSIONS_HASHED_WITHOUT_COUNT = 1024


class ScheduleShard(msgspec.Struct, frozen=True):
    """The part of a complete schedule that one worker sends.

    Sessions of an open loop and virtual users of a closed loop are dealt to the shards in turn,
    like cards: with 3 shards, shard 1 has the numbers 1, 4, 7 and so on. A complete schedule is
    shard 0 of 1.
    """

    index: int = 0
    count: int = 1

    @property
    def is_complete(self) -> bool:
        """Return True if this is the complete schedule."""
        return self.count == 1

    def numbers_below(self, end: int) -> range:
        """Return the numbers from 0 to `end - 1` that this shard has, in ascending order."""
        return range(self.index, end, self.count)

    def number_at(self, position: int) -> int:
        """Return one of the numbers of this shard by its position, from 0.

        In shard 1 of 3, which has 1, 4, 7 and so on, the number at position 2 is 7.
        """
        return self.index + position * self.count

    def contains(self, numbers: Ints) -> NDArray[np.bool_]:
        """Return for each number whether this shard has it."""
        is_in_shard: NDArray[np.bool_] = numbers % self.count == self.index
        return is_in_shard

    def divide(self, index: int, count: int) -> ScheduleShard:
        """Return one of `count` parts of this shard, as a shard of the complete schedule.

        Shard 1 of 2 has the numbers 1, 3, 5, 7 and so on. Its part 0 of 2 has every second of
        these, 1, 5 and so on. This is shard 1 of 4 of the complete schedule.
        """
        return ScheduleShard(index=self.number_at(index), count=self.count * count)


class Slot(NamedTuple):
    """One request of the schedule. It has either a due time or a predecessor.

    A value that a slot does not have is NOT_APPLICABLE.
    """

    slot_id: int
    due_ns: int
    """From the start of the run, or from the start of the stage if the stage's is not known."""
    predecessor: int
    """Id of the slot that must end first; the highest one if several must."""
    pause_ns: int
    """Between the end of the predecessor and the start of this slot."""
    stage: int
    session: int
    """Number of the conversation or task. A single request has none."""
    turn: int
    virtual_user: int
    """A slot of an open loop has none."""


class SlotColumns(NamedTuple):
    """Many slots as columns, ordered by id. The fields are those of `Slot`."""

    slot_id: Ints
    due_ns: Ints
    predecessor: Ints
    pause_ns: Ints
    stage: Ints
    session: Ints
    turn: Ints
    virtual_user: Ints

    def row(self, index: int) -> Slot:
        """Return one row as a slot."""
        return Slot(*(int(column[index]) for column in self))

    def select(self, is_selected: NDArray[np.bool_]) -> SlotColumns:
        """Return the rows for which `is_selected` is True."""
        return SlotColumns(*(column[is_selected] for column in self))

    @classmethod
    def concatenate(cls, tables: Sequence[SlotColumns]) -> SlotColumns:
        """Return the rows of several tables, one table after the other."""
        pieces_of_columns = zip(*tables, strict=True)
        return cls(*(np.concatenate(pieces) for pieces in pieces_of_columns))


class ScheduledStage(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One stage of the schedule: an open loop or a closed loop.

    An open loop has one arrival time per session. A closed loop has virtual users, each of which
    sends one session after the other, and no arrival times. The sessions are assigned to the users
    in turn: if the first session of the stage is 100 and there are 8 users, user 3 sends the
    sessions 103, 111, 119 and so on.
    """

    index: int
    name: str
    measured: bool
    start_ns: int | None
    """From the start of the run, or None if the stage starts when the previous one has finished."""
    length_ns: int | None
    """None if the stage ends when all its slots have finished. A closed loop with a count may end
    earlier."""
    first_session: int
    session_count: int | None
    """Number of sessions in all shards, or None if as many are sent as fit into the duration."""
    concurrency: int
    """Number of virtual users of a closed loop, or 0 for an open loop."""
    arrivals_ns: Ints
    """Arrival times of an open loop, from the start of the stage, one per session."""
    slot_count: int | None
    """Number of slots of all its sessions."""
    max_turns: int
    ramp_ns: int = 0
    """Virtual users that are new in this stage start evenly spread over this time."""
    inherited_users: int = 0
    """How many virtual users each replace one of the previous stage when that one has ended."""
    is_drained_at_end: bool = False
    """Whether the next stage begins only when all requests of this one have ended."""
    ends_with_first_user: bool = False
    """Whether a closed loop with a number of sessions ends when a virtual user has none left."""

    @property
    def is_closed_loop(self) -> bool:
        """Return True if virtual users send the requests of this stage."""
        return self.concurrency > 0

    @property
    def is_end_unknown(self) -> bool:
        """Return True if the end of the stage is known only when its last slot has finished."""
        return self.is_closed_loop and self.session_count is not None

    @property
    def due_time_origin_ns(self) -> int:
        """Return the time in ns that the due times in the schedule of this stage begin with.

        It is the start of the stage, or 0 if that depends on when requests of earlier stages
        complete.
        """
        return 0 if self.start_ns is None else self.start_ns

    @property
    def offered_rps(self) -> float | None:
        """Return the scheduled requests per second, or None for a closed loop."""
        if self.is_closed_loop:
            return None
        assert self.length_ns is not None
        if self.length_ns == 0:
            return math.inf
        return (self.slot_count or 0) * _NS_PER_S / self.length_ns

    def user_start_ns(self, virtual_user: int) -> int:
        """Return when a virtual user sends its first request, in ns from the start of the stage.

        A virtual user that replaces one of the previous stage may start later, when that one has
        ended.
        """
        return int(self.user_starts_ns(np.array([virtual_user]))[0])

    def user_starts_ns(self, virtual_users: Ints) -> Ints:
        """Return `user_start_ns` of several virtual users."""
        # The users that replace others have the lowest numbers and start at 0. The `max` avoids a
        # division by 0 if there are no other users.
        new_users = max(self.concurrency - self.inherited_users, 1)
        starts_ns: Ints = (
            self.ramp_ns * np.maximum(virtual_users - self.inherited_users, 0) // new_users
        )
        return starts_ns

    def user_of_session(self, session_index: int) -> int | None:
        """Return the virtual user that sends a session of this stage, or None in an open loop."""
        if not self.is_closed_loop:
            return None
        return (session_index - self.first_session) % self.concurrency

    def first_session_of(self, virtual_user: int) -> int:
        """Return the first session that a virtual user of this stage sends."""
        return self.first_session + virtual_user

    def next_session_of_user(self, session_index: int) -> int:
        """Return the session that the user of a session sends next, if the stage has so many."""
        return session_index + self.concurrency

    @property
    def session_numbers(self) -> range:
        """Return the numbers of the sessions that this stage may send.

        A stage without a number of sessions has a large range that no other stage uses.
        """
        count = RESERVED_SESSIONS if self.session_count is None else self.session_count
        return range(self.first_session, self.first_session + count)


class Schedule(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The schedule of one run, or the share of it that one worker sends (a shard).

    Methods about "this shard" return everything if the schedule is complete.
    """

    stages: tuple[ScheduledStage, ...]
    sessions: SessionSequence
    shard: ScheduleShard = ScheduleShard()

    @property
    def shard_index(self) -> int:
        """Return the number of this shard, from 0."""
        return self.shard.index

    @property
    def shard_count(self) -> int:
        """Return the number of shards of the complete schedule."""
        return self.shard.count

    @property
    def max_turns(self) -> int:
        """Return the number of turns of the largest session; 1 if all are single requests."""
        return self.sessions.max_turns

    @property
    def layout(self) -> SlotLayout:
        """Return how the slots of the sessions are numbered."""
        return self.sessions.layout

    @property
    def slot_count(self) -> int | None:
        """Return how many requests (slots) this shard sends in all stages.

        Return None if only a duration limits one of them.
        """
        total = 0
        for stage in self.stages:
            count = self.slot_count_of(stage)
            if count is None:
                return None
            total += count
        return total

    @property
    def horizon_ns(self) -> int | None:
        """Return the latest end of the last stage, in ns from the start of the run.

        This is the end of the load: no request starts after it. Return None if the end depends on
        when requests complete.
        """
        last_stage = self.stages[-1]
        if last_stage.start_ns is None or last_stage.length_ns is None:
            return None
        return last_stage.start_ns + last_stage.length_ns

    # The content of a stage in this shard

    def slot_count_of(self, stage: ScheduledStage) -> int | None:
        """Return how many requests (slots) of a stage this shard sends.

        Return None if only a duration limits the stage, so that the number depends on how fast the
        server responds.
        """
        if stage.session_count is None or stage.ends_with_first_user:
            return None

        if self.shard.is_complete:
            return stage.slot_count or 0

        has_single_requests_only = self.max_turns == 1
        if has_single_requests_only:
            return self.session_count_in_shard(stage)

        turn_counts = self.sessions.turn_counts(stage.first_session, stage.session_count)
        is_in_shard = self._is_in_shard(stage, stage.session_count)
        return int(turn_counts[is_in_shard].sum())

    def session_count_in_shard(self, stage: ScheduledStage) -> int:
        """Return how many sessions of a stage belong to this shard, the part that one worker sends.

        The stage must have a `session_count`. An open loop is divided by sessions, and a closed
        loop by virtual users, each of which brings all its sessions.

        For example, 3 users send 7 sessions in rounds, in which each user sends one: two full
        rounds, and a last round in which only user 0 sends one. Shard 0 of 2 has the users 0 and 2,
        which send 2 sessions in each full round and 1 in the last one, 5 together.
        """
        assert stage.session_count is not None, "the stage must have a number of sessions"
        if not stage.is_closed_loop:
            return len(self.shard.numbers_below(stage.session_count))

        full_rounds, users_in_last_round = divmod(stage.session_count, stage.concurrency)
        users_in_shard = len(self.virtual_users_of(stage))
        return full_rounds * users_in_shard + len(self.shard.numbers_below(users_in_last_round))

    def virtual_users_of(self, stage: ScheduledStage) -> range:
        """Return the virtual users of a stage that belong to this shard."""
        return self.shard.numbers_below(stage.concurrency)

    def arrivals_ns_of(self, stage: ScheduledStage) -> Ints:
        """Return the arrival times of a stage that belong to this shard."""
        return stage.arrivals_ns[self.shard.index :: self.shard.count]

    def slot_ids_of(self, stage: ScheduledStage) -> Iterator[int]:
        """Yield the ids of the planned requests (slots) of a stage, in ascending order.

        Only those of this shard are yielded, the part of the schedule that one worker sends. Each
        session of the stage has one slot per turn. The iterator is infinite if only a duration
        limits the stage.
        """
        has_one_slot_per_session = self.max_turns == 1
        for index_in_stage in self._session_indexes_of(stage):
            session_index = stage.first_session + index_in_stage
            if has_one_slot_per_session:
                # The id of the slot is then the number of the session.
                yield session_index
            else:
                yield from self.session_slot_ids(session_index)

    def columns_of(self, stage: ScheduledStage) -> SlotColumns:
        """Return the slots of a stage of a complete schedule.

        For a stage without a count, these are the slots of the first session of each virtual user.
        """
        count = stage.concurrency if stage.session_count is None else stage.session_count
        return _build_columns(self, stage, first=0, count=count)

    def _session_indexes_of(self, stage: ScheduledStage) -> Iterator[int]:
        """Iterate over the sessions of a stage in this shard, counted from 0 in the stage.

        The iterator is infinite if only a duration limits the stage, which must be a closed loop.
        """
        if stage.is_closed_loop:
            return self._session_indexes_of_users(stage)
        return iter(self.shard.numbers_below(len(stage.arrivals_ns)))

    def _session_indexes_of_users(self, stage: ScheduledStage) -> Iterator[int]:
        """Yield the sessions that the virtual users of this shard send, in ascending order.

        Sessions are counted from 0 in the stage, a closed loop. Every user sends one session per
        round. With 3 users, shard 0 of 2 has the users 0 and 2. They send the sessions 0 and 2 in
        the first round, 3 and 5 in the second, and 6 and 8 in the third.
        """
        users_in_shard = self.virtual_users_of(stage)
        if not users_in_shard:
            return

        for first_session_of_round in itertools.count(0, stage.concurrency):
            for virtual_user in users_in_shard:
                session_index = first_session_of_round + virtual_user
                if stage.session_count is not None and session_index >= stage.session_count:
                    return
                yield session_index

    def _is_in_shard(self, stage: ScheduledStage, session_count: int) -> NDArray[np.bool_]:
        """Return, for each session of a stage, whether it belongs to this shard."""
        index = np.arange(session_count)
        if stage.is_closed_loop:
            index %= stage.concurrency  # All sessions of a virtual user belong to one shard.
        return self.shard.contains(index)

    # Slots and their ids

    def slot_ids(self) -> Iterator[int]:
        """Yield the slot ids of this shard, stage by stage in ascending order.

        This is about the order in which they are sent. The iterator is infinite if only a duration
        limits a stage.
        """
        for stage in self.stages:
            yield from self.slot_ids_of(stage)

    def session_slot_ids(self, session_index: int) -> Iterator[int]:
        """Return an iterator over the slot ids of a session, in the order of its turns."""
        session = self.sessions.get(session_index)
        return self.layout.slots_of(
            session_index, session.turn_count, is_single_request=session.is_single_request
        )

    def slot_id(self, session_index: int, turn: int, session: Session) -> int:
        """Return the slot id of a turn of a session.

        `session` is the session with the number `session_index`. The caller passes it because a
        look-up for every request would take too long.
        """
        return self.layout.slot_of(
            session_index, turn, session.turn_count, is_single_request=session.is_single_request
        )

    def first_slot_id(self, session_index: int) -> int:
        """Return the slot id of the first turn of a session."""
        return next(self.session_slot_ids(session_index))

    def turn_of(self, slot_id: int) -> int:
        """Return the turn of a slot: its position in its session, counted from 0.

        Raises IndexError for an id that the session does not use.
        """
        session = self.sessions.get(self.layout.session_of(slot_id))
        return self.layout.turn_of(
            slot_id, session.turn_count, is_single_request=session.is_single_request
        )

    def next_slot_ids(self, slot_id: int) -> list[int]:
        """Return the ids of the slots of the same session that wait for this slot."""
        session_index = self.layout.session_of(slot_id)
        session = self.sessions.get(session_index)
        next_turns = session.successors[self.turn_of(slot_id)]
        return [self.slot_id(session_index, turn, session) for turn in next_turns]

    def slot(self, slot_id: int) -> Slot:
        """Return the slot with this id. Raises IndexError if the run has no such slot.

        Only the slots of its session are computed.
        """
        session_index = self.layout.session_of(slot_id)
        stage = self.stage_of_session(session_index)
        index_in_stage = session_index - stage.first_session
        slots_of_session = _build_columns(self, stage, first=index_in_stage, count=1)
        return slots_of_session.row(self.turn_of(slot_id))

    def stage_of_session(self, session_index: int) -> ScheduledStage:
        """Return the stage that sends a session. Raises IndexError if the run has no such session.

        Sessions are numbered through all stages, so each stage has a range of numbers.
        """
        for stage in self.stages:
            if session_index in stage.session_numbers:
                return stage
        raise IndexError(session_index)

    def columns(self) -> SlotColumns:
        """Return all slots of this shard, stage by stage.

        Raises ValueError if only a duration limits a stage, because the number of its slots is then
        not known before the run.
        """
        columns_by_stage = []
        for stage in self.stages:
            if stage.session_count is None:
                raise ValueError(f"stage {stage.name!r} has no number of requests, so no columns")
            stage_columns = _build_columns(self, stage, first=0, count=stage.session_count)
            is_in_shard = self._is_in_shard(stage, stage.session_count)
            turn_counts = self.sessions.turn_counts(stage.first_session, stage.session_count)
            is_slot_in_shard = np.repeat(is_in_shard, turn_counts)
            columns_by_stage.append(stage_columns.select(is_slot_in_shard))

        return SlotColumns.concatenate(columns_by_stage)


def shard(schedule: Schedule, shard_index: int, shard_count: int) -> Schedule:
    """Return one of `shard_count` shards of a schedule, the requests that one worker sends.

    `ScheduleShard` says which sessions and virtual users a shard has. Its sessions are complete,
    and slot ids stay those of the complete run.

    A shard can itself be divided again.

    A stage that starts when the previous one has finished starts in a shard when the slots *of that
    shard* have finished, because workers do not communicate. If all workers must change stage
    together, run with one worker. Raises ValueError if there is no such shard.
    """
    if not 0 <= shard_index < shard_count:
        raise ValueError(f"no shard {shard_index} of {shard_count}")

    return replace(schedule, shard=schedule.shard.divide(shard_index, shard_count))


def complete_schedule(schedule: Schedule) -> Schedule:
    """Return the complete schedule that a shard belongs to."""
    return replace(schedule, shard=ScheduleShard())


def schedule_fingerprint(schedule: Schedule) -> str:
    """Return a hash of a complete schedule as 32 hexadecimal digits.

    Two schedules with equal stages and equal slots have the same fingerprint, so it shows whether
    two runs had the same load. Slot ids and virtual users are not hashed, because they follow from
    the other values. For a stage that only a duration ends, the first 1,024 sessions are hashed.
    Raises ValueError for a shard: the fingerprint must not depend on the number of workers.
    """
    if not schedule.shard.is_complete:
        raise ValueError("only a complete schedule has a fingerprint, not a shard")

    digest = hashlib.blake2b(digest_size=16)
    for stage in schedule.stages:
        digest.update(
            f"{stage.start_ns} {stage.length_ns} {stage.session_count} {stage.concurrency} "
            f"{stage.max_turns};".encode()
        )
        for columns in _blocks_to_hash(schedule, stage):
            hashed_columns = (
                columns.due_ns,
                columns.predecessor,
                columns.pause_ns,
                columns.stage,
                columns.session,
                columns.turn,
            )
            for column in hashed_columns:
                digest.update(np.ascontiguousarray(column, "<i8").data)

    return digest.hexdigest()


def _blocks_to_hash(schedule: Schedule, stage: ScheduledStage) -> Iterator[SlotColumns]:
    """Yield the slots of a stage that its fingerprint covers, in blocks that bound the memory."""
    session_count = stage.session_count
    if session_count is None:
        session_count = _SESSIONS_HASHED_WITHOUT_COUNT
    for first in range(0, session_count, _SESSIONS_PER_HASH_BLOCK):
        count = min(_SESSIONS_PER_HASH_BLOCK, session_count - first)
        yield _build_columns(schedule, stage, first, count)


def _build_columns(
    schedule: Schedule, stage: ScheduledStage, first: int, count: int
) -> SlotColumns:
    """Return the slots (requests) of `count` consecutive sessions of a stage, from `first` on.

    `first` is counted from 0 in the stage. All slots are computed at once with NumPy, because a
    schedule may have millions of them.
    """
    first_index = stage.first_session + first
    session_indexes = np.arange(first_index, first_index + count, dtype=np.int64)
    sessions = schedule.sessions.columns(first_index, count)
    turns = _list_turns(session_indexes, sessions)

    return SlotColumns(
        slot_id=turns.slot_ids(schedule.layout),
        due_ns=_due_times_of_turns(stage, session_indexes, turns),
        predecessor=_predecessors_of_turns(
            schedule, stage, session_indexes, turns, sessions.predecessor
        ),
        pause_ns=sessions.pause_ns,
        stage=np.full(len(turns.turn), stage.index),
        session=np.where(turns.is_single_request, NOT_APPLICABLE, turns.session_index),
        turn=turns.turn,
        virtual_user=_virtual_users(stage, turns.session_index),
    )


class _TurnColumns(NamedTuple):
    """The turns (requests) of several sessions as columns, each with one value per turn."""

    session_index: Ints
    turn: Ints
    """The position of the turn in its session, from 0."""
    turn_count: Ints
    """The number of turns of its session."""
    is_single_request: NDArray[np.bool_]
    """Whether its session is a single request, not a conversation or task."""

    def slot_ids(self, layout: SlotLayout) -> Ints:
        """Return the slot id of each turn."""
        return layout.slots_of_turns(
            self.session_index, self.turn, self.turn_count, self.is_single_request
        )


def _list_turns(session_indexes: Ints, sessions: SessionColumns) -> _TurnColumns:
    """Return all turns of several sessions, one session after the other.

    For example, sessions 7 and 8 with 2 and 3 turns have five turns. Their sessions are [7, 7, 8,
    8, 8], and their positions in these are [0, 1, 0, 1, 2].
    """
    turn_counts = sessions.turn_counts
    # `np.repeat` repeats the value of a session for each of its turns.
    return _TurnColumns(
        session_index=np.repeat(session_indexes, turn_counts),
        turn=_number_turns(turn_counts),
        turn_count=np.repeat(turn_counts, turn_counts),
        is_single_request=np.repeat(sessions.is_single_request, turn_counts),
    )


def _number_turns(turn_counts: Ints) -> Ints:
    """Return the position of each turn in its session, for sessions with these numbers of turns.

    For example, [2, 3] gives [0, 1, 0, 1, 2].
    """
    # The index of the first turn of each session among all turns, [0, 2] in the example.
    first_turns = np.cumsum(turn_counts) - turn_counts
    return np.arange(int(turn_counts.sum())) - np.repeat(first_turns, turn_counts)


def _virtual_users(stage: ScheduledStage, session_indexes: Ints) -> Ints:
    """Return the virtual user of each session, or NOT_APPLICABLE in an open loop.

    This is `ScheduledStage.user_of_session` for many sessions at once.
    """
    if not stage.is_closed_loop:
        return np.full(len(session_indexes), NOT_APPLICABLE)
    return (session_indexes - stage.first_session) % stage.concurrency


def _due_times_of_turns(stage: ScheduledStage, session_indexes: Ints, turns: _TurnColumns) -> Ints:
    """Return when each turn is due in ns, or NOT_APPLICABLE if it waits for another slot.

    Only the first turn of a session can have a due time, which is that of the session.
    """
    due_ns = np.full(len(turns.turn), NOT_APPLICABLE)
    is_first_turn = turns.turn == 0
    due_ns[is_first_turn] = _due_times_of_sessions(stage, session_indexes)
    return due_ns


def _due_times_of_sessions(stage: ScheduledStage, session_indexes: Ints) -> Ints:
    """Return when each session is due in ns, or NOT_APPLICABLE if it waits for another session.

    In an open loop every session has an arrival time. In a closed loop, virtual user i sends
    session i of the stage first. These first sessions have a due time, and all later ones wait.
    """
    index_in_stage = session_indexes - stage.first_session
    if not stage.is_closed_loop:
        return stage.due_time_origin_ns + stage.arrivals_ns[index_in_stage]

    is_first_of_user = index_in_stage < stage.concurrency
    due_ns = np.full(len(session_indexes), NOT_APPLICABLE, np.int64)
    user_starts_ns = stage.user_starts_ns(index_in_stage[is_first_of_user])
    due_ns[is_first_of_user] = stage.due_time_origin_ns + user_starts_ns
    return due_ns


def _predecessors_of_turns(
    schedule: Schedule,
    stage: ScheduledStage,
    session_indexes: Ints,
    turns: _TurnColumns,
    predecessor_turns: Ints,
) -> Ints:
    """Return the id of the slot that must end before each turn, or NOT_APPLICABLE for none.

    The first turn of a session waits for what its session waits for. Each later turn waits for an
    earlier turn of its session.

    Args:
        schedule: The schedule.
        stage: The stage of the sessions.
        session_indexes: The numbers of the sessions, which are consecutive.
        turns: All turns of these sessions.
        predecessor_turns: For each turn, the turn of its session that it waits for. The values of
            first turns are not used.
    """
    predecessor = turns._replace(turn=predecessor_turns).slot_ids(schedule.layout)
    is_first_turn = turns.turn == 0
    predecessor[is_first_turn] = _predecessors_of_sessions(schedule, stage, session_indexes)
    return predecessor


def _predecessors_of_sessions(
    schedule: Schedule, stage: ScheduledStage, session_indexes: Ints
) -> Ints:
    """Return the id of the slot that must end before each session, or NOT_APPLICABLE for none.

    In a closed loop, a session waits for the last slot of the previous session of its virtual user.
    With 3 users, session 3 of the stage waits for session 0, and session 4 for session 1. No
    session of an open loop waits for another one.

    `session_indexes` are consecutive sessions of the stage.
    """
    predecessor = np.full(len(session_indexes), NOT_APPLICABLE, np.int64)
    if stage.is_closed_loop:
        index_in_stage = session_indexes - stage.first_session
        has_previous_session = index_in_stage >= stage.concurrency
        previous_sessions = session_indexes[has_previous_session] - stage.concurrency
        predecessor[has_previous_session] = _last_slot_ids(schedule, previous_sessions)

    return predecessor


def _last_slot_ids(schedule: Schedule, session_indexes: Ints) -> Ints:
    """Return the id of the last slot (the last request) of each of several consecutive sessions."""
    has_only_single_requests = schedule.max_turns == 1
    if has_only_single_requests or not len(session_indexes):
        return session_indexes  # Sessions and slots have the same numbers.

    sessions = schedule.sessions.columns(int(session_indexes[0]), len(session_indexes))
    return schedule.layout.slots_of_turns(
        session_indexes,
        turns=sessions.turn_counts - 1,
        turn_counts=sessions.turn_counts,
        is_single_request=sessions.is_single_request,
    )
