"""Decide which slots of a schedule start when, without doing any I/O.

The `Dispatcher` owns the scheduling rules of a run: when an open loop sends the next request, what
a virtual user of a closed loop does after a response, which turn of a conversation follows, and
what is dropped at a limit. It never waits and never sends. Its caller (the driver in real time, the
simulation in virtual time) reports the time and every completion, and asks which slots start now
and when to ask again.

The dispatcher runs inside the sending loop, once per request. It therefore works on plain integers
and a heap, and never scans the complete schedule.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from loadgen.core.schedule.dispatched_slots import (
    IN_FLIGHT_CAP,
    PREFILL_CAP,
    PREVIOUS_TURN_FAILED,
    DispatchedSlot,
    InterruptedSlots,
    has_planned_slots,
)
from loadgen.core.schedule.schedule import Schedule, ScheduledStage
from loadgen.core.schedule.sessions import NOT_APPLICABLE, SINGLE_REQUEST, Ints, Session

_NEVER_NS = 1 << 62  # a time after every other one, so that minimums need no special case
_UNLIMITED = 1 << 62  # a limit that is never reached
_ARRIVALS_PER_BLOCK = 2048  # Converting this many NumPy values to integers takes about 30 µs.
_DEFAULT_BATCH_SIZE = 64


class _PendingSlot(msgspec.Struct, frozen=True, order=True, gc=False):
    """A slot whose due time is known, ordered by due time, then by its place in the schedule."""

    due_ns: int
    session_index: int
    turn: int
    stage: int
    virtual_user: int | None


class _WaitingUser(NamedTuple):
    """A virtual user that waits for requests of earlier stages to end, at least until `due_ns`."""

    stage: int
    virtual_user: int
    due_ns: int


class _StageProgress(msgspec.Struct):
    """What has happened in a stage that has begun."""

    stage: ScheduledStage
    start_ns: int
    """When the stage began, in ns from the start of the run."""
    unfinished_sessions: int
    """Only counted for a closed loop that ends with its last session, else 0."""
    end_session: int = _UNLIMITED
    """The first session number after those of the stage, if it has a number of sessions."""
    end_ns: int = _NEVER_NS
    """When the duration of a closed loop is over. Its virtual users start nothing from then on.

    An open loop needs no such time, because all of its arrivals are before its end.
    """
    active: int = 0
    """Virtual users, or sessions of an open loop, that have begun and not ended."""


class _SessionProgress(msgspec.Struct):
    """What has happened in a conversation or task that has begun."""

    index: int
    """The number of the session."""
    session: Session
    unmet_predecessors: array[int]
    """For each turn, how many of the turns that it waits for have not ended yet."""
    has_due_time: bytearray
    """For each turn, 1 if it has a due time or has started, else 0."""
    open_turns: int = 1
    """The number of turns that have a due time or are in flight. At first it is turn 0 alone."""
    latest_end_ns: dict[int, int] = {}
    """For each turn that waits for several others, the latest end of those that have ended."""
    is_over: bool = False
    """Whether no further turn may start."""

    @classmethod
    def after_first_start(cls, index: int, session: Session) -> _SessionProgress:
        """Return the progress of a session of which turn 0 has just started."""
        unmet_predecessors = array("h", session.predecessor_counts)
        has_due_time = bytearray(len(unmet_predecessors))
        has_due_time[0] = True
        return cls(index, session, unmet_predecessors, has_due_time)

    def turns_without_due_time(self) -> list[int]:
        """Return the turns that have neither started nor a due time."""
        return [turn for turn, has_due_time in enumerate(self.has_due_time) if not has_due_time]

    def take_turns_without_due_time(self) -> list[int]:
        """Return the turns without a due time, and mark them so that no call returns them again."""
        turns = self.turns_without_due_time()
        for turn in turns:
            self.has_due_time[turn] = True
        return turns

    def cancel_due_turn(self) -> None:
        """Record that a turn with a due time will not start, which also ends the session."""
        self.open_turns -= 1
        self.is_over = True

    def record_predecessor_end(self, turn: int, end_ns: int) -> int | None:
        """Record that one of the turns that `turn` waits for has ended at `end_ns`.

        A turn is due one pause after the last of the turns that it waits for has ended. Return
        that due time in ns, or None while `turn` still waits for another one.
        """
        latest_end_ns = end_ns
        if self.session.predecessor_counts[turn] > 1:
            # Completions are reported in the order in which they were read, so the last report may
            # not be the latest end.
            latest_end_ns = max(end_ns, self.latest_end_ns.get(turn, end_ns))
            self.latest_end_ns[turn] = latest_end_ns

        self.unmet_predecessors[turn] -= 1
        if self.unmet_predecessors[turn] > 0:
            return None

        return latest_end_ns + self.session.pauses_ns[turn]


class _ArrivalCursor:
    """Iterates over the arrivals of a stage that this shard has to send. A closed loop has none."""

    def __init__(self, schedule: Schedule, stage: ScheduledStage, start_ns: int) -> None:
        self._stage = stage.index
        self._times_ns = _iterate_times(schedule.arrivals_ns_of(stage), start_ns)
        self.next_ns = next(self._times_ns, _NEVER_NS)

        # Sessions are dealt to the shards in turn, so the next one of this shard is so many later.
        self._session_step = schedule.shard.count
        self._first_session = stage.first_session + schedule.shard.number_at(0)
        self._next_session = self._first_session

    @property
    def taken_arrivals(self) -> int:
        """Return how many arrivals have been taken."""
        return (self._next_session - self._first_session) // self._session_step

    def take(self) -> _PendingSlot:
        """Return the first slot of the next session, and advance to the one after it."""
        slot = _PendingSlot(self.next_ns, self._next_session, 0, self._stage, None)
        self._next_session += self._session_step
        self.next_ns = next(self._times_ns, _NEVER_NS)
        return slot


class Dispatcher:
    """Decide which slots start when, for one schedule or one shard of it.

    Every slot is returned exactly once: by `take_due_slots`, or after `stop` by `unsent_slots`.
    There is one exception: slots that a closed loop with a duration does not reach before its stage
    ends were never scheduled, so no method returns them. The end of an open-loop stage only stops
    new sessions: a conversation that has begun continues to its last turn.

    `max_in_flight` limits open-loop stages only. While that many requests are in flight, a start is
    dropped (`in_flight_cap`), and so is the rest of its conversation or task
    (`previous_turn_failed`). A closed loop is limited by its number of virtual users, and nothing
    is dropped there. If a request of a task fails, the task is over: its other requests in flight
    continue, and nothing more of it starts.

    `max_in_prefill` limits how many requests have been started and have no output yet (see
    `report_first_output`). At that limit a start of an open loop is dropped (`prefill_cap`). A
    start of a closed loop waits, and is due when another request has its first output.

    The virtual users of a closed-loop stage replace those of the stage before it one by one: each
    begins when enough requests, virtual users and conversations of earlier stages have ended. So
    the number of requests in flight never exceeds the virtual users of the stage, not even at the
    end of a warm-up. After a closed loop that ends with its number of requests, the next stage
    begins when the first virtual user has nothing more to send.
    """

    # The current stage is the one that began last. `_begin_stage` sets these attributes.
    _current: _StageProgress
    # The arrivals of the current stage that have not been taken.
    _arrivals: _ArrivalCursor
    # When the next stage begins. It is _NEVER_NS while that is not known, and without a next stage.
    _next_stage_ns: int

    def __init__(
        self,
        schedule: Schedule,
        *,
        max_in_flight: int | None = None,
        max_in_prefill: int | None = None,
    ) -> None:
        """Begin the first stage of a schedule at time 0.

        A slot is one request of the schedule. A request is in prefill from its start to its first
        output. A session is a single request, a conversation or a task.

        Args:
            schedule: The schedule, or the shard of it that this worker sends.
            max_in_flight: The limit of requests that have been sent and have not ended, for open
                loops. None means no limit.
            max_in_prefill: The limit of requests that have been sent and have no output yet. None
                means no limit.
        """
        self.schedule = schedule
        self._layout = schedule.layout
        self._max_turns = schedule.max_turns
        self._is_stopped = False

        # -- Limits --
        self._max_in_flight = _UNLIMITED if max_in_flight is None else max_in_flight
        self._max_in_prefill = _UNLIMITED if max_in_prefill is None else max_in_prefill

        # -- Requests and sessions in progress --
        # Requests that have started and not ended, by slot id.
        self._in_flight: dict[int, DispatchedSlot] = {}

        # Ids of those requests in flight that have no output yet.
        self._in_prefill: set[int] = set()

        # When a request last left prefill, which made room there for another one.
        self._prefill_exit_ns = 0

        # Conversations and tasks that have begun and not ended, by session number.
        self._sessions: dict[int, _SessionProgress] = {}

        # -- Slots and virtual users that have not started --
        # Slots with a due time: later turns, and the sessions of virtual users. A heap.
        self._pending: list[_PendingSlot] = []

        # Slots of virtual users that are due and wait for room in prefill.
        self._waiting_for_prefill: deque[_PendingSlot] = deque()

        # Virtual users that wait for requests of earlier stages to end.
        self._waiting_users: deque[_WaitingUser] = deque()

        # Slots that `take_due_slots` returns as dropped.
        self._dropped: deque[DispatchedSlot] = deque()

        # Requests of virtual users that were in flight at `stop` and belong to no conversation or
        # task. They show `unsent_slots` which users were sending.
        self._single_requests_at_stop: list[DispatchedSlot] = []

        # -- Stages --
        # Progress of the stages that have begun.
        self._stages: list[_StageProgress] = []
        self._begin_stage(index=0, start_ns=0)

    @property
    def in_flight(self) -> int:
        """Return the number of requests that have started and not finished."""
        return len(self._in_flight)

    @property
    def is_done(self) -> bool:
        """Return True if nothing is in flight and nothing is still to start."""
        return not self._in_flight and (self._is_stopped or self.next_due_ns() is None)

    def next_due_ns(self) -> int | None:
        """Return the earliest time, in ns, at which `take_due_slots` may return a slot.

        The time may be in the past. Return None if it is unknown until another request has
        finished, or if nothing is left to start.
        """
        if self._is_stopped:
            return None
        if self._dropped:
            # Dropped slots are due already, because they only have to leave a record.
            return self._dropped[0].due_ns
        if self._waiting_for_prefill and self._has_room_in_prefill():
            return self._prefill_exit_ns

        pending_ns = self._pending[0].due_ns if self._pending else _NEVER_NS
        due_ns = min(self._arrivals.next_ns, self._next_stage_ns, pending_ns)
        return None if due_ns == _NEVER_NS else due_ns

    def take_due_slots(
        self, now_ns: int, max_slots: int = _DEFAULT_BATCH_SIZE
    ) -> list[DispatchedSlot]:
        """Return the slots that are due at or before `now_ns`, in order of due time.

        The caller must send them now. At most `max_slots` slots are returned, so that it can send
        the first ones early; if the list is full, call again. A returned slot counts as in flight
        unless it has a `drop_reason`: then a limit was reached and it must not be sent.
        """
        slots: list[DispatchedSlot] = []
        if self._is_stopped:
            return slots

        while len(slots) < max_slots:
            if self._dropped:
                slots.append(self._dropped.popleft())
                continue
            pending_slot = self._take_due_slot(now_ns)
            if pending_slot is None:
                break
            slots.append(self._start_or_drop(pending_slot))

        return slots

    def report_first_output(self, slot_id: int, now_ns: int) -> None:
        """Report that a request has its first output and leaves prefill."""
        if slot_id in self._in_prefill:
            self._in_prefill.remove(slot_id)
            self._prefill_exit_ns = now_ns

    def report_finished(
        self,
        slot_id: int,
        now_ns: int,
        ok: bool,
        pause_ns: int = 0,
        drop_reason: str = PREVIOUS_TURN_FAILED,
    ) -> None:
        """Report that a request ended at `now_ns`, and schedule what follows it.

        A session is a conversation, a task or a single request, and a turn is one request of it.
        The turns that waited for this one follow, or are dropped if it failed. When the session has
        ended, its virtual user begins its next session, or ends too if the stage is over. In an
        open loop there are no virtual users, so nothing follows a session.

        Args:
            slot_id: The slot of the request.
            now_ns: When it ended.
            ok: False if it failed, so that the rest of its conversation or task is dropped.
            pause_ns: How long the virtual user waits before its next session.
            drop_reason: The reason for which the rest is dropped.

        Raises:
            KeyError: The slot is not in flight.
        """
        slot = self._in_flight.pop(slot_id)
        if self._in_prefill:
            # A request that ended without any output leaves prefill now. Without `max_in_prefill`
            # the set is always empty.
            self.report_first_output(slot_id, now_ns)

        if self._is_stopped:
            return

        if slot.session is not None:
            self._finish_turn(slot, slot.session, now_ns, ok, pause_ns, drop_reason)
        elif slot.virtual_user is not None:
            self._continue_user(slot, slot.virtual_user, now_ns, pause_ns)
        else:
            self._release_capacity(slot.stage, now_ns)

    def other_slots_in_flight(self, slot_id: int) -> list[int]:
        """Return the ids of the other slots in flight of the same conversation or task."""
        session_of = self._layout.session_of
        session_index = session_of(slot_id)
        return [
            other_id
            for other_id in self._in_flight
            if session_of(other_id) == session_index and other_id != slot_id
        ]

    def stop(self) -> None:
        """Stop the run, so that no further request starts.

        Requests in flight continue, and may still be reported as finished.

        Afterwards, `unsent_slots` yields what each virtual user would have sent after its request
        in flight. For this it needs to know what each user was sending. A conversation or task
        stays in `_sessions` after the stop. A single request leaves no trace when it ends, so this
        method stores those in flight. Requests of an open loop have no virtual user, and nothing
        follows them.
        """
        if self._is_stopped:
            return

        self._is_stopped = True
        self._single_requests_at_stop = [
            slot
            for slot in self._in_flight.values()
            if slot.is_single_request and slot.virtual_user is not None
        ]

    def unsent_slots(self) -> Iterator[DispatchedSlot]:
        """Yield, after `stop`, every scheduled slot that did not start, once.

        The drop reason is `interrupted`, or the one for which the slot had already been dropped. A
        closed loop with a duration has no unsent slots, because it schedules only the slots that it
        reaches. Raises RuntimeError before `stop`.
        """
        if not self._is_stopped:
            raise RuntimeError("unsent_slots() needs stop() to be called first")

        interrupted = InterruptedSlots(self.schedule)
        yield from self._dropped
        yield from self._unsent_pending_slots(interrupted)
        yield from self._unsent_turns_of_sessions(interrupted)
        yield from self._unsent_sessions_of_sending_users(interrupted)
        yield from self._unsent_sessions_of_waiting_users(interrupted)
        yield from self._unsent_arrivals_of_current_stage(interrupted)
        yield from self._unsent_slots_of_later_stages(interrupted)

    # Which slot is next

    def _take_due_slot(self, now_ns: int) -> _PendingSlot | None:
        """Remove and return the next slot that is due, or None if there is none.

        A slot is one planned request. It is in prefill from its start to its first output, and
        `max_in_prefill` limits how many requests are. Slots that waited for room in prefill come
        first, then all others by their due times.

        While there is no room in prefill, a slot of a virtual user is not returned: it waits in a
        queue for room. A slot of an open loop is returned even then, and the caller drops it.
        """
        if self._waiting_for_prefill:
            waiting_slot = self._take_slot_waiting_for_prefill()
            if waiting_slot is not None:
                return waiting_slot

        while True:
            # The slots of a stage that begins now may be the next ones.
            if self._next_stage_ns <= now_ns:
                self._begin_due_stages(now_ns)

            slot = self._pop_due_slot(now_ns)
            if slot is None:
                return None

            is_open_loop = slot.virtual_user is None
            if is_open_loop or self._has_room_in_prefill():
                return slot

            self._waiting_for_prefill.append(slot)

    def _take_slot_waiting_for_prefill(self) -> _PendingSlot | None:
        """Remove and return the first slot that waits for room in prefill, if there is room now.

        The slot is due when the room became free. Slots whose stage has ended by then are
        discarded.
        """
        while self._waiting_for_prefill and self._has_room_in_prefill():
            waiting_slot = self._waiting_for_prefill.popleft()
            due_ns = max(waiting_slot.due_ns, self._prefill_exit_ns)
            slot = msgspec.structs.replace(waiting_slot, due_ns=due_ns)

            if due_ns < self._stages[slot.stage].end_ns:
                return slot
            self._discard_waiting_slot(slot)

        return None

    def _begin_due_stages(self, now_ns: int) -> None:
        """Begin each stage that is due at `now_ns` and comes before the next slot.

        Several stages can be due at once: some may be empty, or this call comes late.
        """
        while self._next_stage_ns <= now_ns and self._next_stage_precedes_next_slot():
            self._begin_stage(self._current.stage.index + 1, start_ns=self._next_stage_ns)

    def _next_stage_precedes_next_slot(self) -> bool:
        """Return True if the next stage begins before the next slot of the current stage is due.

        At the same time, an arrival comes before the next stage, to which it does not belong. A
        later turn or a session of a virtual user comes after the start of the next stage.
        """
        if self._next_stage_ns >= self._arrivals.next_ns:
            return False
        return not self._pending or self._next_stage_ns <= self._pending[0].due_ns

    def _pop_due_slot(self, now_ns: int) -> _PendingSlot | None:
        """Remove and return the earliest arrival or pending slot, or None if none is due."""
        pending_ns = self._pending[0].due_ns if self._pending else _NEVER_NS
        arrival_ns = self._arrivals.next_ns
        if arrival_ns > now_ns and pending_ns > now_ns:
            return None
        if arrival_ns <= pending_ns:
            return self._arrivals.take()
        return heapq.heappop(self._pending)

    def _start_or_drop(self, pending_slot: _PendingSlot) -> DispatchedSlot:
        """Start a request (slot), or drop it if it belongs to an open loop and a limit is reached.

        A request of a closed loop is never dropped, because the number of virtual users limits
        those. If a turn of a conversation or task is dropped, the rest is dropped with it.

        Returns:
            The request. Its `drop_reason` is the limit, or "" if it was started.
        """
        drop_reason = self._reached_limit() if pending_slot.virtual_user is None else ""

        if self._max_turns == 1:
            # All sessions are single requests, so slots and sessions have the same numbers. Looking
            # them up as below gives the same values, but costs two more calls per request.
            session = SINGLE_REQUEST
            slot_id = pending_slot.session_index
        else:
            session = self._session_of(pending_slot)
            slot_id = self._layout.slot_of(
                pending_slot.session_index,
                pending_slot.turn,
                session.turn_count,
                is_single_request=session.is_single_request,
            )

        slot = DispatchedSlot(
            slot_id=slot_id,
            stage=pending_slot.stage,
            # Only conversations and tasks are recorded with a session number.
            session=None if session.is_single_request else pending_slot.session_index,
            turn=pending_slot.turn,
            virtual_user=pending_slot.virtual_user,
            due_ns=pending_slot.due_ns,
            drop_reason=drop_reason,
        )

        if drop_reason == "":
            self._record_start(slot, session)
        elif slot.session is not None:
            self._drop_session_at_limit(slot, session)

        return slot

    def _record_start(self, slot: DispatchedSlot, session: Session) -> None:
        """Record that a request is in flight, and that its session has begun if it is the first.

        An open-loop session counts as active in its stage from its first request on. A closed loop
        counts virtual users instead of sessions, and `_begin_user` has already counted this one.
        """
        self._in_flight[slot.slot_id] = slot
        if self._max_in_prefill < _UNLIMITED:
            # The set only serves to enforce the limit, so without one it stays empty.
            self._in_prefill.add(slot.slot_id)

        is_first_turn = slot.turn == 0
        is_open_loop = slot.virtual_user is None
        if is_first_turn and is_open_loop:
            self._stages[slot.stage].active += 1

        if is_first_turn and slot.session is not None:
            progress = _SessionProgress.after_first_start(slot.session, session)
            self._sessions[slot.session] = progress

    def _session_of(self, slot: _PendingSlot) -> Session:
        """Return the session that a slot belongs to."""
        if slot.turn > 0:
            return self._sessions[slot.session_index].session
        return self.schedule.sessions.get(slot.session_index)

    def _reached_limit(self) -> str:
        """Return the name of the limit at which an open loop drops a start, or an empty string."""
        if len(self._in_flight) >= self._max_in_flight:
            return IN_FLIGHT_CAP
        if len(self._in_prefill) >= self._max_in_prefill:
            return PREFILL_CAP
        return ""

    def _has_room_in_prefill(self) -> bool:
        """Return True if another request may start without exceeding `max_in_prefill`."""
        return len(self._in_prefill) < self._max_in_prefill

    # What follows a request

    def _finish_turn(
        self,
        slot: DispatchedSlot,
        session_index: int,
        now_ns: int,
        succeeded: bool,
        pause_ns: int,
        drop_reason: str,
    ) -> None:
        """Schedule what follows a finished turn (request) of a conversation or task.

        The turns that waited for this one follow. After a failure they are dropped. If no turn has
        a due time or is in flight any more, the session has ended, and its virtual user continues.

        Args:
            slot: The turn that finished.
            session_index: The number of its conversation or task.
            now_ns: When it finished.
            succeeded: Whether it succeeded.
            pause_ns: How long the virtual user waits before its next session.
            drop_reason: The reason that is recorded for dropped turns.
        """
        progress = self._sessions[session_index]
        progress.open_turns -= 1

        does_stage_end_first = False
        # A parallel turn may have ended the session before, while this one was in flight.
        may_continue = not progress.is_over
        if may_continue and succeeded:
            does_stage_end_first = self._schedule_waiting_turns(progress, slot, now_ns)
            progress.is_over = does_stage_end_first
        elif may_continue:
            self._fail_session(progress, slot, now_ns, drop_reason)

        if progress.open_turns > 0:
            return

        del self._sessions[session_index]
        if slot.virtual_user is None:
            self._release_capacity(slot.stage, now_ns)
        elif does_stage_end_first:
            # The next turn would be due after the end of the stage. The virtual user does not begin
            # another session instead: it ends, at the time when that session would have begun.
            self._release_capacity(slot.stage, now_ns + pause_ns)
        else:
            self._continue_user(slot, slot.virtual_user, now_ns, pause_ns)

    def _schedule_waiting_turns(
        self, progress: _SessionProgress, slot: DispatchedSlot, now_ns: int
    ) -> bool:
        """Schedule the turns of a session that waited for `slot`, which has ended at `now_ns`.

        A turn is one request of the session. It is due one pause after the end of the last of the
        turns that it waits for. A turn that would be due after the end of its stage is not
        scheduled, and never starts.

        Returns:
            True if the stage ends before at least one of these turns would be due. The session is
            over then.
        """
        stage_end_ns = self._stages[slot.stage].end_ns
        does_stage_end_first = False

        for waiting_turn in progress.session.successors[slot.turn]:
            due_ns = progress.record_predecessor_end(waiting_turn, now_ns)
            if due_ns is None:
                continue  # This turn still waits for another turn than `slot`.

            if due_ns >= stage_end_ns:
                does_stage_end_first = True
                continue

            progress.has_due_time[waiting_turn] = True
            progress.open_turns += 1
            pending_slot = _PendingSlot(
                due_ns=due_ns,
                session_index=progress.index,
                turn=waiting_turn,
                stage=slot.stage,
                virtual_user=slot.virtual_user,
            )
            heapq.heappush(self._pending, pending_slot)

        return does_stage_end_first

    def _fail_session(
        self, progress: _SessionProgress, slot: DispatchedSlot, now_ns: int, drop_reason: str
    ) -> None:
        """Mark a conversation or task as over because the turn `slot` failed at `now_ns`.

        Its turns that have not started are dropped with `drop_reason`. After the end of the stage
        nothing is dropped, because these turns would not have started even if `slot` had succeeded.
        Turns in flight continue, and the session is removed when the last of them has ended.
        """
        progress.is_over = True
        if now_ns < self._stages[slot.stage].end_ns:
            self._drop_remaining_turns(progress, slot, now_ns, drop_reason)

    def _drop_session_at_limit(self, slot: DispatchedSlot, session: Session) -> None:
        """Drop the rest of a conversation or task whose request `slot` was dropped at a limit.

        `max_in_flight` and `max_in_prefill` are these limits. Later requests (turns) contain the
        response to the dropped one, so they cannot be sent. Turns in flight continue, and the
        session ends with the last of them.
        """
        is_first_turn = slot.turn == 0
        if is_first_turn:
            # The session has not begun, so there is no progress of it to update.
            later_turns = range(1, session.turn_count)
            self._drop_turns(slot, session, later_turns, slot.due_ns, PREVIOUS_TURN_FAILED)
            return

        progress = self._sessions[self._layout.session_of(slot.slot_id)]
        progress.cancel_due_turn()  # This is `slot` itself, which had a due time.
        self._drop_remaining_turns(progress, slot, slot.due_ns, PREVIOUS_TURN_FAILED)
        self._remove_session_if_idle(progress, slot.stage, slot.due_ns)

    def _remove_session_if_idle(
        self, progress: _SessionProgress, stage_index: int, now_ns: int
    ) -> None:
        """Remove a session that is over, and let a waiting virtual user begin in its place.

        While some of its turns are in flight, nothing is done: `report_finished` removes the
        session when the last of them has ended.
        """
        if progress.open_turns == 0:
            del self._sessions[progress.index]
            self._release_capacity(stage_index, now_ns)

    def _drop_remaining_turns(
        self, progress: _SessionProgress, cause: DispatchedSlot, now_ns: int, drop_reason: str
    ) -> None:
        """Drop all turns (requests) of a session that have not started.

        Their prompts would contain the response of the turn `cause`, which has none. Turns of
        parallel branches that wait for their due time are dropped, too. Turns in flight continue.

        Args:
            progress: The session. The dropped turns are marked in it, so that they are dropped only
                once.
            cause: The turn of the session that failed or was dropped at a limit.
            now_ns: When the turns are dropped.
            drop_reason: The reason that is recorded for them.
        """
        turns_without_due_time = progress.take_turns_without_due_time()

        # All slots with a due time must be searched, which is only useful if the session has some.
        turns_with_due_time: list[int] = []
        if progress.open_turns > 0:
            turns_with_due_time = self._cancel_turns_with_due_time(progress)

        dropped_turns = sorted(turns_without_due_time + turns_with_due_time)
        self._drop_turns(cause, progress.session, dropped_turns, now_ns, drop_reason)

    def _drop_turns(
        self,
        cause: DispatchedSlot,
        session: Session,
        turns: Iterable[int],
        now_ns: int,
        drop_reason: str,
    ) -> None:
        """Add turns of a session to the dropped slots that `take_due_slots` returns.

        Args:
            cause: The turn of the same session that failed or was not sent.
            session: The turns of the session and what they wait for.
            turns: The turns to drop, in ascending order.
            now_ns: When they are dropped, which is recorded as their due time.
            drop_reason: The reason that is recorded.
        """
        session_index = self._layout.session_of(cause.slot_id)
        for turn in turns:
            dropped_slot = DispatchedSlot(
                slot_id=self.schedule.slot_id(session_index, turn, session),
                stage=cause.stage,
                session=session_index,
                turn=turn,
                virtual_user=cause.virtual_user,
                due_ns=now_ns,
                drop_reason=drop_reason,
            )
            self._dropped.append(dropped_slot)

    def _cancel_turns_with_due_time(self, progress: _SessionProgress) -> list[int]:
        """Remove and return the turns of a session that have a due time and have not started.

        They no longer count as open turns of the session.
        """
        session_index = progress.index
        turns = [
            slot.turn
            for slot in (*self._pending, *self._waiting_for_prefill)
            if slot.session_index == session_index
        ]
        if turns:
            self._pending = [slot for slot in self._pending if slot.session_index != session_index]
            heapq.heapify(self._pending)
            self._waiting_for_prefill = deque(
                slot for slot in self._waiting_for_prefill if slot.session_index != session_index
            )

        progress.open_turns -= len(turns)
        return turns

    def _discard_waiting_slot(self, slot: _PendingSlot) -> None:
        """Discard a request (slot) of a virtual user whose stage ended before it could start.

        At the limit `max_in_prefill`, a request that is due waits until another one has its first
        output. If the stage ends meanwhile, the request is never sent, and its virtual user ends.
        This makes room for a user of a later stage:

        - If the request would have begun a session (a conversation, a task or a single request),
          the user has no other request in flight. It ends at once.
        - Otherwise it ends as soon as no other request of the session is in flight.
        """
        would_begin_session = slot.turn == 0
        if would_begin_session:
            self._release_capacity(slot.stage, slot.due_ns)
        else:
            progress = self._sessions[slot.session_index]
            progress.cancel_due_turn()
            self._remove_session_if_idle(progress, slot.stage, slot.due_ns)

    def _continue_user(
        self, slot: DispatchedSlot, virtual_user: int, now_ns: int, pause_ns: int
    ) -> None:
        """Schedule the next session of a virtual user after that of `slot`, or end the user.

        A session is a conversation, a task or a single request. There are two reasons for the user
        to end: its stage ends before the next session is due, or the stage has no such session.
        """
        progress = self._stages[slot.stage]
        stage = progress.stage

        # These are `SlotLayout.session_of` and `ScheduledStage.next_session_of_user`, whose calls
        # would cost time after every request.
        session_index = slot.slot_id // self._max_turns
        next_session = session_index + stage.concurrency

        due_ns = now_ns + pause_ns
        is_before_end = due_ns < progress.end_ns
        has_next_session = is_before_end and next_session < progress.end_session
        if has_next_session:
            pending_slot = _PendingSlot(
                due_ns=due_ns,
                session_index=next_session,
                turn=0,
                stage=slot.stage,
                virtual_user=virtual_user,
            )
            heapq.heappush(self._pending, pending_slot)
        else:
            self._release_capacity(slot.stage, due_ns)

        if stage.session_count is not None:
            self._update_stage_after_session(progress, now_ns, is_last_of_user=not has_next_session)

    def _update_stage_after_session(
        self, progress: _StageProgress, now_ns: int, is_last_of_user: bool
    ) -> None:
        """Count a finished session of a closed loop, and schedule the next stage if it can begin.

        The stage has a fixed number of sessions. When the next stage begins depends on its kind:

        - An open loop begins when the last session of this stage has finished.
        - A closed loop begins when the first virtual user of this stage has no session left. Its
          users then replace those of this stage one by one, so that the number of requests in
          flight stays the same.

        For example, 2 virtual users send 5 sessions: user 0 the sessions 0, 2 and 4, and user 1 the
        sessions 1 and 3. A closed loop begins after session 3, because user 1 has no session left.
        An open loop begins after all 5 sessions.

        Args:
            progress: The progress of the stage of the session.
            now_ns: When the session finished.
            is_last_of_user: Whether its virtual user has no further session.
        """
        stage = progress.stage
        progress.unfinished_sessions -= 1
        has_next_stage_begun = progress is not self._current
        if has_next_stage_begun:
            return

        if is_last_of_user and stage.ends_with_first_user:
            self._end_stage(stage, now_ns)

        is_stage_finished = progress.unfinished_sessions == 0
        can_user_be_replaced = is_last_of_user and self._is_followed_by_closed_loop(stage)
        if stage.is_drained_at_end:
            can_user_be_replaced = False
        has_next_stage = stage.index + 1 < len(self.schedule.stages)
        if has_next_stage and (is_stage_finished or can_user_be_replaced):
            # The duration of the stage may be over before.
            self._next_stage_ns = min(self._next_stage_ns, now_ns)

    def _end_stage(self, stage: ScheduledStage, now_ns: int) -> None:
        """Let the virtual users of a stage start nothing more. Requests in flight continue."""
        progress = self._stages[stage.index]
        if progress.end_ns <= now_ns:
            return

        progress.end_ns = now_ns
        discarded_slots = [slot for slot in self._pending if slot.stage == stage.index]
        self._pending = [slot for slot in self._pending if slot.stage != stage.index]
        heapq.heapify(self._pending)
        for slot in discarded_slots:
            self._discard_waiting_slot(slot)

    # Stages and their virtual users

    def _begin_stage(self, index: int, start_ns: int) -> None:
        """Make stage `index` the current one, which begins at `start_ns`.

        An open loop has arrivals and no virtual users, and a closed loop has virtual users and no
        arrivals. So for each of them, one of the two is empty.
        """
        stage = self.schedule.stages[index]
        progress = _StageProgress(
            stage, start_ns, unfinished_sessions=self._sessions_until_end(stage)
        )
        if stage.session_count is not None:
            progress.end_session = stage.session_numbers.stop
        if stage.is_closed_loop and stage.length_ns is not None:
            progress.end_ns = start_ns + stage.length_ns

        self._stages.append(progress)
        self._current = progress
        self._next_stage_ns = self._planned_start_of_next_stage_ns(progress)
        self._arrivals = _ArrivalCursor(self.schedule, stage, start_ns)
        self._begin_users(stage, start_ns)

    def _sessions_until_end(self, stage: ScheduledStage) -> int:
        """Return how many sessions of this shard must finish for a stage to end.

        This matters only for a closed loop that ends with its last session. All other stages end at
        a time and need no count, so it is 0. A shard is the part of the schedule that this worker
        sends.
        """
        ends_with_last_session = stage.is_end_unknown
        return self.schedule.session_count_in_shard(stage) if ends_with_last_session else 0

    def _planned_start_of_next_stage_ns(self, current: _StageProgress) -> int:
        """Return when the stage after the current one begins, or _NEVER_NS if that is not known.

        It begins when the current stage ends, which is known if that has a duration. A stage that
        ends with its last session ends at once if this shard (the part of the schedule that this
        worker sends) has none of its sessions, as with more workers than virtual users. Otherwise
        `_update_stage_after_session` finds the end. Without a next stage the result is _NEVER_NS.
        """
        stage = current.stage
        is_last_stage = stage.index + 1 == len(self.schedule.stages)
        if is_last_stage:
            return _NEVER_NS

        is_empty_in_shard = stage.is_end_unknown and current.unfinished_sessions == 0
        if is_empty_in_shard:
            return current.start_ns
        if stage.length_ns is not None:
            return current.start_ns + stage.length_ns

        return _NEVER_NS

    def _begin_users(self, stage: ScheduledStage, start_ns: int) -> None:
        """Let the virtual users of a stage begin, or wait for those of earlier stages to end.

        The virtual users of all stages together must not exceed the concurrency of this stage. So
        only as many begin at once as earlier stages leave free, and the others wait until
        `_release_capacity` lets them begin.
        """
        concurrency_of_shard = len(self.schedule.virtual_users_of(stage))
        active_or_waiting = sum(progress.active for progress in self._stages)
        active_or_waiting += len(self._waiting_users)
        free_places = max(0, concurrency_of_shard - active_or_waiting)

        users = [
            _WaitingUser(stage.index, virtual_user, start_ns + stage.user_start_ns(virtual_user))
            for virtual_user in self._users_in_starting_order(stage)
        ]
        for user in users[:free_places]:
            self._begin_user(user)

        self._waiting_users.extend(users[free_places:])

    def _users_in_starting_order(self, stage: ScheduledStage) -> list[int]:
        """Return the virtual users of a stage in this shard, in the order in which they begin.

        The first `inherited_users` of a stage each replace a user of the previous stage. The others
        are new and begin first, because they need not wait for the end of another user.
        """
        users = list(self.schedule.virtual_users_of(stage))
        if stage.session_count is not None:
            # With fewer sessions than virtual users, the last users have nothing to send.
            users = [user for user in users if user < stage.session_count]
        new_users = [user for user in users if user >= stage.inherited_users]
        replacing_users = [user for user in users if user < stage.inherited_users]
        return new_users + replacing_users

    def _begin_user(self, user: _WaitingUser) -> None:
        """Schedule the first slot of a virtual user."""
        stage = self.schedule.stages[user.stage]
        self._stages[user.stage].active += 1
        pending_slot = _PendingSlot(
            due_ns=user.due_ns,
            session_index=stage.first_session_of(user.virtual_user),
            turn=0,
            stage=user.stage,
            virtual_user=user.virtual_user,
        )
        heapq.heappush(self._pending, pending_slot)

    def _release_capacity(self, stage_index: int, now_ns: int) -> None:
        """Count one virtual user, or one session of an open loop, less as active in a stage.

        This may make room for a virtual user of a later stage that waits for it.
        """
        self._stages[stage_index].active -= 1
        if self._waiting_users:
            self._begin_waiting_users(now_ns)

    def _begin_waiting_users(self, now_ns: int) -> None:
        """Let virtual users that wait for earlier ones begin, until their stage is full.

        They begin in order, at `now_ns` or at their own start time if that is later. A user whose
        stage ends before that is removed from the queue.
        """
        while self._waiting_users:
            user = self._waiting_users[0]
            due_ns = max(user.due_ns, now_ns)
            is_before_end = due_ns < self._stages[user.stage].end_ns
            if is_before_end and not self._has_capacity(user.stage):
                return

            self._waiting_users.popleft()
            if is_before_end:
                self._begin_user(user._replace(due_ns=due_ns))

    def _has_capacity(self, stage_index: int) -> bool:
        """Return True if another virtual user of a stage may begin.

        The virtual users and open-loop sessions of this and all earlier stages together may be as
        many as the stage has virtual users in this shard.
        """
        stage = self.schedule.stages[stage_index]
        active = sum(progress.active for progress in self._stages[: stage_index + 1])
        return active < len(self.schedule.virtual_users_of(stage))

    def _is_followed_by_closed_loop(self, stage: ScheduledStage) -> bool:
        """Return True if the virtual users of the next stage replace those of this stage."""
        next_stages = self.schedule.stages[stage.index + 1 :]
        return bool(next_stages) and next_stages[0].is_closed_loop

    # Slots that were never sent

    def _unsent_pending_slots(self, interrupted: InterruptedSlots) -> Iterator[DispatchedSlot]:
        """Yield the slots that had a due time but had not started at `stop`, and what follows them.

        There are two kinds of pending slots. A first turn begins the next session of a virtual
        user, and is yielded with the rest of that session and all later sessions of the user. A
        later turn of a session is yielded alone. Nothing is yielded for a stage that a duration
        ends, because nobody knows how many slots it would have reached.
        """
        for slot in (*self._pending, *self._waiting_for_prefill):
            stage = self.schedule.stages[slot.stage]
            is_first_turn = slot.turn == 0
            if is_first_turn:
                assert slot.virtual_user is not None, "only virtual users have pending first turns"
                yield from interrupted.slots_of_user(
                    stage, slot.virtual_user, slot.session_index, slot.due_ns
                )
            elif has_planned_slots(stage):
                yield interrupted.create_slot(
                    stage, slot.session_index, slot.turn, slot.virtual_user, slot.due_ns
                )

    def _unsent_turns_of_sessions(self, interrupted: InterruptedSlots) -> Iterator[DispatchedSlot]:
        """Yield the turns of begun sessions that still waited for a response at `stop`.

        They have no due time yet; `_unsent_pending_slots` yields the turns that have one. If a
        virtual user sends the session, all later sessions of that user follow it. A stage that a
        duration ends has no planned slots: how many it would have reached is not known.
        """
        for session_index, progress in self._sessions.items():
            stage = self.schedule.stage_of_session(session_index)
            virtual_user = stage.user_of_session(session_index)
            if has_planned_slots(stage):
                for turn in progress.turns_without_due_time():
                    yield interrupted.create_slot(
                        stage, session_index, turn, virtual_user, due_ns=NOT_APPLICABLE
                    )

            if virtual_user is not None:
                next_session = stage.next_session_of_user(session_index)
                yield from interrupted.slots_of_user(stage, virtual_user, next_session)

    def _unsent_sessions_of_sending_users(
        self, interrupted: InterruptedSlots
    ) -> Iterator[DispatchedSlot]:
        """Yield the later sessions of virtual users that had a single request in flight at `stop`.

        The users of conversations and tasks are not among them, because
        `_unsent_turns_of_sessions` yields their later sessions.
        """
        for slot in self._single_requests_at_stop:
            assert slot.virtual_user is not None, "`stop` stores only requests of virtual users"
            stage = self.schedule.stages[slot.stage]
            session_in_flight = self._layout.session_of(slot.slot_id)
            next_session = stage.next_session_of_user(session_in_flight)
            yield from interrupted.slots_of_user(stage, slot.virtual_user, next_session)

    def _unsent_sessions_of_waiting_users(
        self, interrupted: InterruptedSlots
    ) -> Iterator[DispatchedSlot]:
        """Yield all sessions of virtual users that still waited for earlier users to end."""
        for user in self._waiting_users:
            stage = self.schedule.stages[user.stage]
            first_session = stage.first_session_of(user.virtual_user)
            yield from interrupted.slots_of_user(stage, user.virtual_user, first_session)

    def _unsent_arrivals_of_current_stage(
        self, interrupted: InterruptedSlots
    ) -> Iterator[DispatchedSlot]:
        """Yield the sessions of the current stage that had not arrived, if it is an open loop."""
        if not self._current.stage.is_closed_loop:
            yield from interrupted.slots_of_arrivals(
                self._current.stage, self._current.start_ns, self._arrivals.taken_arrivals
            )

    def _unsent_slots_of_later_stages(
        self, interrupted: InterruptedSlots
    ) -> Iterator[DispatchedSlot]:
        """Yield all slots of the stages that had not begun."""
        for stage in self.schedule.stages[self._current.stage.index + 1 :]:
            if stage.is_closed_loop:
                for virtual_user in self.schedule.virtual_users_of(stage):
                    first_session = stage.first_session_of(virtual_user)
                    yield from interrupted.slots_of_user(stage, virtual_user, first_session)
            else:
                yield from interrupted.slots_of_arrivals(stage, stage.start_ns)


def _iterate_times(arrivals_ns: Ints, start_ns: int) -> Iterator[int]:
    """Return an iterator over the arrival times, from the start of the run, as Python integers.

    They are converted a block at a time, because the conversion of all would take too long.
    """
    blocks = (
        (arrivals_ns[first : first + _ARRIVALS_PER_BLOCK] + start_ns).tolist()
        for first in range(0, len(arrivals_ns), _ARRIVALS_PER_BLOCK)
    )
    return itertools.chain.from_iterable(blocks)
