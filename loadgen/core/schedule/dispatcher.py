"""Decide which request slots start when, without doing any I/O.

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
from array import array
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from loadgen.core.schedule.schedule import Schedule, ScheduledStage
from loadgen.core.schedule.sessions import Ints, Session

_NEVER = 1 << 62
_OFFSETS_PER_BLOCK = 2048  # Converting this many NumPy offsets to integers takes about 30 µs.
_STARTED = -1


class Start(msgspec.Struct, frozen=True, gc=False):
    """A slot to start now or, if `dropped` is set, one that is not sent but leaves a record."""

    number: int  # of the slot, and of its request
    stage: int
    session: int  # number of the conversation or task; -1 for a single request
    turn: int
    virtual_user: int  # the virtual user of a closed loop; -1 in an open loop
    due_ns: int  # from the start of the run; -1 if the slot was still waiting for another one
    # "in_flight_cap", "prefill_cap", "previous_turn_failed", "abandoned", "interrupted", or empty
    dropped: str = ""


class _PendingSlot(msgspec.Struct, frozen=True, order=True, gc=False):
    """A slot whose due time is known, ordered by due time, then by its place in the schedule."""

    due_ns: int
    chain: int
    turn: int
    stage: int
    virtual_user: int


class _WaitingUser(NamedTuple):
    """A virtual user that waits for requests of earlier stages to end, at least until `due_ns`."""

    stage: int
    virtual_user: int
    due_ns: int


class _StageProgress(msgspec.Struct):
    """What has happened in a stage that has begun."""

    ends_ns: int  # Virtual users of the stage start nothing from this time on.
    unfinished_chains: int  # Only counted for a closed loop that ends after a number of requests.
    active: int = 0  # virtual users, or chains of an open loop, that have begun and not ended


class _ChainProgress:
    """A conversation or task that has begun.

    `waits` holds, for each turn, how many other turns must still end before it can start, or
    `_STARTED`.
    """

    __slots__ = ("chain", "is_over", "latest_end_ns", "pending", "waits")

    def __init__(self, chain: Session) -> None:
        self.chain = chain
        self.waits = array("h", chain.waits)
        self.waits[0] = _STARTED
        self.pending = 1  # turns that are due or in flight
        # For a turn that waits for several others: when the latest of those that have ended did so.
        self.latest_end_ns: dict[int, int] = {}
        self.is_over = False  # True once no further turn may start

    def take_remaining_turns(self) -> list[int]:
        """Return the turns that have not started, and count them as started."""
        turns = [turn for turn, waits in enumerate(self.waits) if waits != _STARTED]
        for turn in turns:
            self.waits[turn] = _STARTED
        return turns

    def due_after(self, turn: int, now_ns: int) -> int:
        """Return when `turn` is due if one of the turns it waits for has ended at `now_ns`."""
        if self.chain.waits[turn] > 1:
            # Completions are reported in the order in which they were read, so the last report may
            # not be the latest.
            now_ns = max(now_ns, self.latest_end_ns.get(turn, now_ns))
            self.latest_end_ns[turn] = now_ns
        return now_ns + self.chain.pauses[turn]


class Dispatcher:
    """Decide which slots start when, for one schedule or one share of it.

    Every slot is returned exactly once: by `ready`, or after `stop` by `unsent`. There is one
    exception: slots that a closed loop with a duration does not reach before its stage ends were
    never scheduled, so no method returns them. The end of an open-loop stage only stops new chains:
    a conversation that has begun continues to its last turn.

    `max_in_flight` limits open-loop stages only. While that many requests are in flight, a start is
    dropped (`in_flight_cap`), and so is the rest of its conversation or task
    (`previous_turn_failed`). A closed loop is limited by its number of virtual users, and nothing
    is dropped there. If a request of a task fails, the task is over: its other requests in flight
    continue, and nothing more of it starts.

    `max_in_prefill` limits how many requests have been started and have no output yet (see
    `first_output`). At that limit a start of an open loop is dropped (`prefill_cap`). A start of a
    closed loop waits its turn, and is due when another request has its first output.

    A closed-loop stage takes over from the stage before it place by place: each of its virtual
    users begins when the requests, virtual users and conversations of earlier stages leave a place
    free. So the number of requests in flight never exceeds the virtual users of the stage, not even
    at the end of a warm-up. After a closed loop that ends with its number of requests, the next
    stage begins when the first virtual user has nothing more to send.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        max_in_flight: int | None = None,
        max_in_prefill: int | None = None,
    ) -> None:
        self.schedule = schedule
        self._max_in_flight = _NEVER if max_in_flight is None else max_in_flight
        self._max_in_prefill = _NEVER if max_in_prefill is None else max_in_prefill
        self._turns = schedule.max_turns
        self._stopped = False

        self._in_flight: dict[int, Start] = {}
        self._in_prefill: set[int] = set()
        self._prefill_freed_ns = 0  # when a request had its first output last
        self._chains: dict[int, _ChainProgress] = {}  # conversations and tasks that are not over

        # Slots that start later: after another slot, as the first one of a virtual user, or once
        # prefill has room.
        self._pending: list[_PendingSlot] = []
        self._waiting_for_prefill: deque[_PendingSlot] = deque()
        self._waiting_users: deque[_WaitingUser] = deque()
        self._dropped: deque[Start] = deque()
        self._stopped_users: list[Start] = []  # see `stop`

        self._stages: list[_StageProgress] = []  # of the stages that have begun
        self._current: ScheduledStage
        self._current_start_ns = 0
        self._next_stage_ns = _NEVER
        # Arrivals of the current stage, if it is an open loop: the next one, and those after it.
        self._next_arrival_ns = _NEVER
        self._next_arrival_chain = 0
        self._arrivals: Iterator[int] = iter(())
        self._begin_stage(0, 0)

    @property
    def in_flight(self) -> int:
        """Return the number of requests that have started and not finished."""
        return len(self._in_flight)

    @property
    def done(self) -> bool:
        """Return True if nothing is in flight and nothing is still to start."""
        return not self._in_flight and (self._stopped or self.next_ns() is None)

    def next_ns(self) -> int | None:
        """Return the earliest time at which `ready` may return a slot.

        Return None if that is unknown until another request has finished, or if nothing is left to
        start.
        """
        if self._stopped:
            return None
        if self._dropped:
            return self._dropped[0].due_ns
        if self._waiting_for_prefill and self._has_room_in_prefill():
            return self._prefill_freed_ns
        pending_due_ns = self._pending[0].due_ns if self._pending else _NEVER
        due_ns = min(self._next_arrival_ns, self._next_stage_ns, pending_due_ns)
        return None if due_ns == _NEVER else due_ns

    def ready(self, now_ns: int, limit: int = 64) -> list[Start]:
        """Return the slots that are due at or before `now_ns`, in order of due time.

        At most `limit` slots are returned; if the list is full, call again. A returned slot counts
        as in flight unless its `dropped` is set.
        """
        starts: list[Start] = []
        if self._stopped:
            return starts
        while len(starts) < limit:
            if self._dropped:
                starts.append(self._dropped.popleft())
                continue
            slot = self._take_due_slot(now_ns)
            if slot is None:
                break
            starts.append(self._start_or_drop(slot))
        return starts

    def finished(
        self,
        number: int,
        now_ns: int,
        ok: bool,
        pause_ns: int = 0,
        why: str = "previous_turn_failed",
    ) -> None:
        """Report that the request of slot `number` ended at `now_ns`, and schedule what follows.

        The virtual user that sent it starts its next chain `pause_ns` later. If the request is not
        `ok`, the rest of its conversation or task is dropped for the reason `why`. Raises KeyError
        if the slot is not in flight.
        """
        start = self._in_flight.pop(number)
        if self._in_prefill:
            self.first_output(number, now_ns)
        if self._stopped:
            return
        if start.session >= 0:
            progress = self._chains[start.session]
            is_cut = self._advance_chain(progress, start, now_ns, ok, why)
            if progress.pending:
                return
            del self._chains[start.session]
            if is_cut:
                self._free_place(start.stage, now_ns + pause_ns)
                return
        if start.virtual_user < 0:
            self._free_place(start.stage, now_ns)
        else:
            self._continue_user(start, now_ns, pause_ns)

    def first_output(self, number: int, now_ns: int) -> None:
        """Report that the request of slot `number` has its first output and leaves prefill."""
        if number in self._in_prefill:
            self._in_prefill.remove(number)
            self._prefill_freed_ns = now_ns

    def beside(self, number: int) -> list[int]:
        """Return the other slots in flight of the same conversation or task."""
        chain = number // self._turns
        return [
            other for other in self._in_flight if other // self._turns == chain and other != number
        ]

    def stop(self) -> None:
        """Start nothing from now on. Requests in flight may still be reported with `finished`."""
        if self._stopped:
            return
        self._stopped = True
        # Virtual users whose request in flight is a single one: `unsent` needs to know where each
        # of them stood.
        self._stopped_users = [
            start
            for start in self._in_flight.values()
            if start.virtual_user >= 0 and start.session < 0
        ]

    def unsent(self) -> Iterator[Start]:
        """Yield, after `stop`, every scheduled slot that did not start, once.

        The reason in `dropped` is `interrupted`, or the one for which the slot had already been
        dropped. A closed loop with a duration has no unsent slots, because it schedules only the
        slots that it reaches. Raises RuntimeError before `stop`.
        """
        if not self._stopped:
            raise RuntimeError("unsent() needs stop() to be called first")
        yield from self._dropped
        yield from self._unsent_pending()
        yield from self._unsent_of_begun_chains()
        yield from self._unsent_of_users()
        if self._next_arrival_ns != _NEVER:
            yield from self._interrupt_arrivals(
                self._current, self._current_start_ns, self._arrivals_begun()
            )
        for span in self.schedule.stages[self._current.index + 1 :]:
            if not span.concurrency:
                yield from self._interrupt_arrivals(span, span.start_ns, 0)
            for lane in self.schedule.virtual_users_of(span):
                yield from self._interrupt_user(span, lane, span.first_session + lane)

    # Which slot is next

    def _take_due_slot(self, now_ns: int) -> _PendingSlot | None:
        """Remove and return the next slot that is due and may start, or None if none is due."""
        while True:
            if self._waiting_for_prefill and self._has_room_in_prefill():
                slot = self._waiting_for_prefill.popleft()
                slot = msgspec.structs.replace(
                    slot, due_ns=max(slot.due_ns, self._prefill_freed_ns)
                )
                if slot.due_ns < self._stages[slot.stage].ends_ns:
                    return slot
                self._discard_waiting(slot)
                continue
            pending_due_ns = self._pending[0].due_ns if self._pending else _NEVER
            # What was due before a stage ended comes before the first slots of the next stage.
            if self._next_stage_ns <= min(now_ns, self._next_arrival_ns - 1, pending_due_ns):
                self._begin_stage(self._current.index + 1, self._next_stage_ns)
            elif self._next_arrival_ns <= pending_due_ns:
                return self._take_arrival() if self._next_arrival_ns <= now_ns else None
            elif pending_due_ns > now_ns:
                return None
            else:
                slot = heapq.heappop(self._pending)
                if slot.virtual_user < 0 or self._has_room_in_prefill():
                    return slot
                self._waiting_for_prefill.append(slot)

    def _take_arrival(self) -> _PendingSlot:
        """Return the next arrival of the current open loop, and advance to the one after it."""
        slot = _PendingSlot(
            self._next_arrival_ns, self._next_arrival_chain, 0, self._current.index, -1
        )
        self._next_arrival_chain += self.schedule.shard_count
        self._next_arrival_ns = next(self._arrivals, _NEVER)
        return slot

    def _start_or_drop(self, slot: _PendingSlot) -> Start:
        """Start a slot, or drop it if it belongs to an open loop and a limit is reached."""
        number = slot.chain
        session = -1
        if self._turns > 1:
            chain = (
                self._chains[slot.chain].chain
                if slot.turn
                else self.schedule.sessions.of(slot.chain)
            )
            number = self.schedule.number(slot.chain, slot.turn, chain)
            if chain.is_session:
                session = slot.chain
        reason = self._limit_reached() if slot.virtual_user < 0 else ""
        start = Start(
            number, slot.stage, session, slot.turn, slot.virtual_user, slot.due_ns, reason
        )
        if reason and session >= 0:
            self._drop_chain_at_limit(start)
        if reason:
            return start
        self._in_flight[number] = start
        if self._max_in_prefill < _NEVER:
            self._in_prefill.add(number)
        if slot.turn == 0:
            if slot.virtual_user < 0:
                self._stages[slot.stage].active += 1
            if session >= 0:
                self._chains[session] = _ChainProgress(chain)
        return start

    def _limit_reached(self) -> str:
        """Return the name of the limit at which an open loop drops a start, or an empty string."""
        if len(self._in_flight) >= self._max_in_flight:
            return "in_flight_cap"
        if len(self._in_prefill) >= self._max_in_prefill:
            return "prefill_cap"
        return ""

    def _has_room_in_prefill(self) -> bool:
        return len(self._in_prefill) < self._max_in_prefill

    # After a request

    def _continue_user(self, start: Start, now_ns: int, pause_ns: int) -> None:
        """Schedule the next chain of a virtual user, or free its place if there is none."""
        span = self.schedule.stages[start.stage]
        progress = self._stages[start.stage]
        chain = start.number // self._turns + span.concurrency
        due_ns = now_ns + pause_ns
        has_next = due_ns < progress.ends_ns and (
            span.session_count is None or chain < span.first_session + span.session_count
        )
        if has_next:
            self._schedule(_PendingSlot(due_ns, chain, 0, start.stage, start.virtual_user))
        if span.session_count is not None:
            progress.unfinished_chains -= 1
            is_finished = not progress.unfinished_chains
            hands_over = not has_next and self._is_taken_over(start.stage)
            if span is self._current and (is_finished or hands_over):
                self._end_current_stage(now_ns)
        if not has_next:
            self._free_place(start.stage, due_ns)

    def _advance_chain(
        self, progress: _ChainProgress, start: Start, now_ns: int, ok: bool, why: str
    ) -> bool:
        """Schedule the turns that waited only for this one, or drop the rest if it failed.

        Return True if a turn that would be next is cut off because its stage ends before it is due.
        """
        progress.pending -= 1
        if progress.is_over:
            return False
        ends_ns = self._stages[start.stage].ends_ns
        if not ok:
            progress.is_over = True
            if now_ns < ends_ns:
                self._drop_remaining_turns(progress, start, now_ns, why)
            return False
        is_cut = False
        for turn in progress.chain.followers[start.turn]:
            progress.waits[turn] -= 1
            due_ns = progress.due_after(turn, now_ns)
            if progress.waits[turn] > 0:
                continue
            if due_ns < ends_ns:
                progress.waits[turn] = _STARTED
                progress.pending += 1
                self._schedule(
                    _PendingSlot(due_ns, start.session, turn, start.stage, start.virtual_user)
                )
            else:
                is_cut = True
        progress.is_over = is_cut
        return is_cut

    def _drop_remaining_turns(
        self, progress: _ChainProgress, start: Start, now_ns: int, why: str
    ) -> None:
        """Drop the turns of a chain that have not started: their history would be incomplete."""
        chain = start.session
        turns = progress.take_remaining_turns()
        if progress.pending:  # Turns of another branch may be due already.
            due = [
                slot for slot in (*self._pending, *self._waiting_for_prefill) if slot.chain == chain
            ]
            if due:
                self._pending = [slot for slot in self._pending if slot.chain != chain]
                heapq.heapify(self._pending)
                self._waiting_for_prefill = deque(
                    slot for slot in self._waiting_for_prefill if slot.chain != chain
                )
                progress.pending -= len(due)
                turns += [slot.turn for slot in due]
        for turn in sorted(turns):
            number = self.schedule.number(chain, turn, progress.chain)
            self._dropped.append(
                msgspec.structs.replace(start, number=number, turn=turn, due_ns=now_ns, dropped=why)
            )

    def _drop_chain_at_limit(self, start: Start) -> None:
        """Drop the rest of a conversation or task of which one turn was dropped at a limit."""
        progress = self._chains.get(start.session)
        has_begun = progress is not None
        if progress is None:
            progress = _ChainProgress(self.schedule.sessions.of(start.session))
        progress.pending -= 1
        progress.is_over = True
        self._drop_remaining_turns(progress, start, start.due_ns, "previous_turn_failed")
        if has_begun and not progress.pending:
            del self._chains[start.session]
            self._free_place(start.stage, start.due_ns)

    def _discard_waiting(self, slot: _PendingSlot) -> None:
        """End the chain of a slot that still waited for room in prefill when its stage ended."""
        if slot.turn:
            progress = self._chains[slot.chain]
            progress.pending -= 1
            progress.is_over = True
            if progress.pending:
                return
            del self._chains[slot.chain]
        self._free_place(slot.stage, slot.due_ns)

    def _schedule(self, slot: _PendingSlot) -> None:
        heapq.heappush(self._pending, slot)

    # Stages and their virtual users

    def _begin_stage(self, index: int, start_ns: int) -> None:
        """Make stage `index` the current one: read its arrivals, or let its virtual users begin."""
        span = self.schedule.stages[index]
        ends_with_duration = span.concurrency > 0 and span.length_ns is not None
        progress = _StageProgress(
            ends_ns=start_ns + (span.length_ns or 0) if ends_with_duration else _NEVER,
            unfinished_chains=self.schedule.session_count_of(span) if span.is_end_unknown else 0,
        )
        self._current = span
        self._current_start_ns = start_ns
        self._next_stage_ns = _NEVER
        self._next_arrival_ns = _NEVER
        self._stages.append(progress)
        if span.concurrency:
            self._begin_users(span, start_ns)
        else:
            self._arrivals = _iterate_due_times(self.schedule.arrivals_ns_of(span), start_ns)
            self._next_arrival_chain = span.first_session + self.schedule.shard_index
            self._next_arrival_ns = next(self._arrivals, _NEVER)
        if span.length_ns is not None:
            self._end_current_stage(start_ns + span.length_ns)
        if span.is_end_unknown and not progress.unfinished_chains:
            # There are more workers than virtual users, so this share has none.
            self._end_current_stage(start_ns)

    def _begin_users(self, span: ScheduledStage, start_ns: int) -> None:
        """Let the virtual users of a stage begin, or wait for places of earlier stages."""
        schedule = self.schedule
        number_of_users = (
            span.concurrency
            if span.session_count is None
            else min(span.concurrency, span.session_count)
        )
        active = sum(progress.active for progress in self._stages)
        places = len(schedule.virtual_users_of(span)) - active - len(self._waiting_users)
        # Users beyond those of the stage before are new. The others take over from it and wait for
        # its requests.
        own_users = range(schedule.shard_index, number_of_users, schedule.shard_count)
        new_users_first = sorted(own_users, key=lambda lane: (lane < span.inherited_users, lane))
        for lane in new_users_first:
            user = _WaitingUser(span.index, lane, start_ns + int(span.user_start_ns(lane)))
            if places > 0:
                places -= 1
                self._begin_user(user)
            else:
                self._waiting_users.append(user)

    def _begin_user(self, user: _WaitingUser) -> None:
        """Schedule the first slot of a virtual user."""
        first_chain = self.schedule.stages[user.stage].first_session + user.virtual_user
        self._stages[user.stage].active += 1
        self._schedule(_PendingSlot(user.due_ns, first_chain, 0, user.stage, user.virtual_user))

    def _free_place(self, stage: int, now_ns: int) -> None:
        """Count a virtual user or an open-loop chain as ended, and let waiting users begin."""
        self._stages[stage].active -= 1
        while self._waiting_users and not self._stopped:
            user = self._waiting_users[0]
            user = user._replace(due_ns=max(user.due_ns, now_ns))
            if user.due_ns < self._stages[user.stage].ends_ns:
                active = sum(progress.active for progress in self._stages[: user.stage + 1])
                if active >= len(self.schedule.virtual_users_of(self.schedule.stages[user.stage])):
                    return
                self._begin_user(user)
            self._waiting_users.popleft()

    def _is_taken_over(self, stage: int) -> bool:
        """Return True if the next stage takes over the virtual users of this one, one by one."""
        stages = self.schedule.stages
        return stage + 1 < len(stages) and stages[stage + 1].concurrency > 0

    def _end_current_stage(self, at_ns: int) -> None:
        """Let the next stage begin at `at_ns`, unless it begins earlier or there is none."""
        if self._current.index + 1 < len(self.schedule.stages):
            self._next_stage_ns = min(self._next_stage_ns, at_ns)

    # Slots that were never sent

    def _arrivals_begun(self) -> int:
        """Return how many chains of this share have begun in the current open loop."""
        first_chain = self._current.first_session + self.schedule.shard_index
        return (self._next_arrival_chain - first_chain) // self.schedule.shard_count

    def _unsent_pending(self) -> Iterator[Start]:
        """Yield the slots whose due time was known, and the later chains of their users."""
        for slot in (*self._pending, *self._waiting_for_prefill):
            span = self.schedule.stages[slot.stage]
            if slot.turn == 0:  # Only virtual users have pending first turns.
                yield from self._interrupt_user(span, slot.virtual_user, slot.chain, slot.due_ns)
            elif slot.virtual_user < 0 or _sends_all_chains(span):
                yield self._interrupt(span, slot.chain, slot.turn, slot.virtual_user, slot.due_ns)

    def _unsent_of_begun_chains(self) -> Iterator[Start]:
        """Yield the remaining turns of begun chains, and the later chains of their users."""
        for chain, progress in self._chains.items():
            span = self._stage_of_chain(chain)
            lane = (chain - span.first_session) % span.concurrency if span.concurrency else -1
            if lane < 0 or _sends_all_chains(span):
                for turn in progress.take_remaining_turns():
                    yield self._interrupt(span, chain, turn, lane, -1)
            if lane >= 0:
                yield from self._interrupt_user(span, lane, chain + span.concurrency)

    def _unsent_of_users(self) -> Iterator[Start]:
        """Yield the chains of users that were at a single request or had not begun."""
        for start in self._stopped_users:
            span = self.schedule.stages[start.stage]
            next_chain = start.number // self._turns + span.concurrency
            yield from self._interrupt_user(span, start.virtual_user, next_chain)
        for user in self._waiting_users:
            span = self.schedule.stages[user.stage]
            yield from self._interrupt_user(
                span, user.virtual_user, span.first_session + user.virtual_user
            )

    def _stage_of_chain(self, chain: int) -> ScheduledStage:
        """Return the stage that a chain belongs to."""
        return next(span for span in reversed(self.schedule.stages) if span.first_session <= chain)

    def _interrupt(
        self, span: ScheduledStage, chain: int, turn: int, lane: int, due_ns: int
    ) -> Start:
        """Return one slot as an interrupted one."""
        content = self.schedule.sessions.of(chain)
        number = self.schedule.number(chain, turn, content)
        session = chain if content.is_session else -1
        return Start(number, span.index, session, turn, lane, due_ns, "interrupted")

    def _interrupt_chain(
        self, span: ScheduledStage, chain: int, lane: int, due_ns: int
    ) -> Iterator[Start]:
        """Yield all slots of a chain as interrupted ones. Only the first has a due time."""
        for turn in range(len(self.schedule.sessions.of(chain).waits)):
            yield self._interrupt(span, chain, turn, lane, -1 if turn else due_ns)

    def _interrupt_user(
        self, span: ScheduledStage, lane: int, first_chain: int, due_ns: int = -1
    ) -> Iterator[Start]:
        """Yield the chains of a user from `first_chain` on, unless a duration ends its stage."""
        if _sends_all_chains(span):
            for chain in range(
                first_chain, span.first_session + (span.session_count or 0), span.concurrency
            ):
                yield from self._interrupt_chain(span, chain, lane, due_ns)
                due_ns = -1

    def _interrupt_arrivals(
        self, span: ScheduledStage, start_ns: int | None, first_index: int
    ) -> Iterator[Start]:
        """Yield the chains of this share in an open loop, from `first_index` on."""
        chain = (
            span.first_session + self.schedule.shard_index + first_index * self.schedule.shard_count
        )
        for offset in self.schedule.arrivals_ns_of(span)[first_index:]:
            due_ns = -1 if start_ns is None else start_ns + int(offset)
            yield from self._interrupt_chain(span, chain, -1, due_ns)
            chain += self.schedule.shard_count


def _iterate_due_times(offsets: Ints, start_ns: int) -> Iterator[int]:
    """Yield the due times of an open loop, converted to integers a block at a time."""
    for first in range(0, len(offsets), _OFFSETS_PER_BLOCK):
        yield from (offsets[first : first + _OFFSETS_PER_BLOCK] + start_ns).tolist()


def _sends_all_chains(span: ScheduledStage) -> bool:
    """Return True if a closed loop sends all its chains, however long that takes."""
    return span.length_ns is None and span.session_count is not None
