"""The dispatcher: decides which slots of a timetable start when. A sans-IO core, one instance per worker.

It never waits and never sends. The caller reports the time and every completion. The dispatcher answers which slots
start now, which slots are dropped, and when to ask again. It runs inside the sending loop, so it works on plain
integers, lists and a heap. A code path that runs once per slot must not use NumPy scalars or scan the whole timetable.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from loadgen.schedule.timetable import Schedule, StageSpan

_NEVER = 1 << 62
_BLOCK = 2048  # offsets converted from array to integers at a time; about 30 µs


class Start(NamedTuple):
    """A slot to start now or, if `dropped` is set, a slot that is never sent but still leaves a record."""

    number: int  # of the slot, and of its request
    stage: int
    session: int  # -1 for a single request, outside any conversation
    turn: int
    lane: int  # -1 in open loop
    due_ns: int  # from the start of the run; -1 if never known: the slot was still waiting for another one
    dropped: str = ""  # "", "in_flight_cap", "previous_turn_failed" or "interrupted"


class Dispatcher:
    """Decides which slots start when, for one schedule or one share of it.

    Every slot is returned exactly once: by `ready`, or after `stop` by `unsent`. There is one exception: slots that a
    closed loop with a duration does not reach before its stage ends were never scheduled, so no method returns them.
    The end of an open-loop stage only stops new chains: a conversation that has begun continues to its last turn.

    `max_in_flight` limits open-loop stages only. While that many requests are in flight, a start is dropped
    (`in_flight_cap`), and so are the later turns of its conversation (`previous_turn_failed`). A closed loop is limited
    by its number of lanes, and nothing is dropped there.

    A closed-loop stage takes over from the stage before it place by place: each of its lanes begins when the requests
    (and lanes, and conversations) of earlier stages leave a place free. So the number in flight never exceeds the lanes
    of the stage, also at the end of a warm-up. After a closed loop that ends with its requests, the stage begins when
    the first lane of that one has nothing more to send.
    """

    def __init__(self, schedule: Schedule, *, max_in_flight: int | None = None) -> None:
        self.schedule = schedule
        self._max_in_flight = _NEVER if max_in_flight is None else max_in_flight
        self._turns = schedule.turns
        self._has_sessions = schedule.turns > 1
        self._in_flight: dict[int, Start] = {}
        # (due, number, stage, turn, lane) of slots that waited for another slot, and of the first slots of lanes
        self._heap: list[tuple[int, int, int, int, int]] = []
        self._dropped: deque[Start] = deque()
        self._stopped = False
        self._stage_ends_ns: list[int] = []  # per begun stage: from this instant its lanes start nothing
        self._chains_left: list[int] = []  # per begun stage: own unfinished chains, if a closed loop with a count
        self._at_work: list[int] = []  # per begun stage: own lanes, or conversations of an open loop, not yet ended
        self._waiting_lanes: deque[tuple[int, int, int]] = deque()  # (stage, lane, earliest due): no place is free
        self._begin_stage(0, 0)

    @property
    def in_flight(self) -> int:
        """Number of requests started and not finished."""
        return len(self._in_flight)

    @property
    def done(self) -> bool:
        """True when nothing is in flight and nothing is still to start."""
        return not self._in_flight and (self._stopped or self.next_ns() is None)

    def next_ns(self) -> int | None:
        """The earliest instant at which `ready` may return a slot; None: only after a `finished`, or never."""
        if self._stopped:
            return None
        if self._dropped:
            return self._dropped[0].due_ns
        due = min(self._next_due, self._next_stage_ns, self._heap[0][0] if self._heap else _NEVER)
        return None if due == _NEVER else due

    def ready(self, now_ns: int, limit: int = 64) -> list[Start]:
        """The slots due at or before `now_ns`, in order of due time, at most `limit`.

        If the list is full, call again. A returned slot counts as in flight unless its `dropped` is set.
        """
        out: list[Start] = []
        if self._stopped:
            return out
        heap, dropped, in_flight, cap = self._heap, self._dropped, self._in_flight, self._max_in_flight
        while len(out) < limit:
            if dropped:
                out.append(dropped.popleft())
                continue
            due = self._next_due
            heap_due = heap[0][0] if heap else _NEVER
            next_stage_ns = self._next_stage_ns
            # no offsets left: all lie before the stage's end; what was due before it comes before its lanes
            if next_stage_ns <= now_ns and next_stage_ns < due and next_stage_ns <= heap_due:
                self._begin_stage(self._current.index + 1, next_stage_ns)
                continue
            if due <= heap_due:
                if due > now_ns:
                    break
                chain = self._chain
                self._advance()
                number, stage, turn, lane = chain * self._turns, self._current.index, 0, -1
                if len(in_flight) < cap:
                    self._at_work[stage] += 1
            else:
                if heap_due > now_ns:
                    break
                due, number, stage, turn, lane = heapq.heappop(heap)
                chain = number // self._turns
            session = chain if self._has_sessions else -1
            if lane < 0 and len(in_flight) >= cap:
                start = Start(number, stage, session, turn, lane, due, "in_flight_cap")
                self._drop_later_turns(start, due)
                if turn:  # the conversation had begun
                    self._leave(stage, due)
            else:
                start = Start(number, stage, session, turn, lane, due)
                in_flight[number] = start
            out.append(start)
        return out

    def finished(self, number: int, now_ns: int, ok: bool, pause_ns: int = 0) -> None:
        """Report that the request of slot `number` has ended at `now_ns`.

        This frees its place in flight and schedules the slot after it. The next chain of a lane starts `pause_ns`
        later. Raises KeyError if the slot is not in flight.
        """
        start = self._in_flight.pop(number)
        if self._stopped:
            return
        stage, turn, lane = start.stage, start.turn + 1, start.lane
        end = self._stage_ends_ns[stage]
        if turn < self._turns:
            if ok:
                due = now_ns + self.schedule.pauses.of(number // self._turns)[turn - 1]
                if due < end:
                    heapq.heappush(self._heap, (due, number + 1, stage, turn, lane))
                else:
                    self._leave(stage, now_ns + pause_ns)
                return
            if now_ns < end:
                self._drop_later_turns(start, now_ns)
        if lane < 0:
            self._leave(stage, now_ns)
            return
        span = self.schedule.stages[stage]
        chain = number // self._turns + span.lanes
        due = now_ns + pause_ns
        goes_on = due < end and (span.chains is None or chain < span.first_chain + span.chains)
        if goes_on:
            heapq.heappush(self._heap, (due, chain * self._turns, stage, 0, lane))
        if span.dynamic:
            self._chains_left[stage] -= 1
            if span is self._current and (not self._chains_left[stage] or (not goes_on and self._hands_over(stage))):
                self._end_stage_at(now_ns)
        if not goes_on:
            self._leave(stage, due)

    def _hands_over(self, stage: int) -> bool:
        """Whether the stage after this one takes its lanes over one by one."""
        return stage + 1 < len(self.schedule.stages) and self.schedule.stages[stage + 1].lanes > 0

    def _leave(self, stage: int, now_ns: int) -> None:
        """A lane, or a conversation of an open loop, has ended: its place is free for a lane that waits for one."""
        self._at_work[stage] -= 1
        while self._waiting_lanes and not self._stopped:
            waiting_stage, lane, due = self._waiting_lanes[0]
            span = self.schedule.stages[waiting_stage]
            due = max(due, now_ns)
            if due < self._stage_ends_ns[waiting_stage]:
                if sum(self._at_work[: waiting_stage + 1]) >= len(self.schedule.own_lanes(span)):
                    return
                self._at_work[waiting_stage] += 1
                heapq.heappush(self._heap, (due, (span.first_chain + lane) * self._turns, waiting_stage, 0, lane))
            self._waiting_lanes.popleft()

    def stop(self) -> None:
        """Start nothing from now on. Requests still in flight may still be reported with `finished`."""
        if self._stopped:
            return
        self._stopped = True
        # For each chain that had begun: its first slot that did not start. Taken now, before completions change them.
        turns = self._turns
        unstarted = list(self._heap)
        for start in self._in_flight.values():
            if start.turn + 1 < turns:
                unstarted.append((-1, start.number + 1, start.stage, start.turn + 1, start.lane))
            elif start.lane >= 0:
                span = self.schedule.stages[start.stage]
                chain = start.number // turns + span.lanes
                unstarted.append((-1, chain * turns, start.stage, 0, start.lane))
        self._heap = unstarted

    def unsent(self) -> Iterator[Start]:
        """After `stop`: every scheduled slot that did not start, once, with the reason.

        The reason is `interrupted`, or the one for which the slot had already been dropped. A closed loop with a
        duration has no unsent slots, because it schedules only the slots that it reaches. Raises RuntimeError before
        `stop`.
        """
        if not self._stopped:
            raise RuntimeError("the agenda has not been stopped")
        yield from self._dropped
        for due, number, stage, turn, lane in self._heap:
            span, chain = self.schedule.stages[stage], number // self._turns
            if lane < 0:
                yield from self._interrupt_chain(span, chain, turn, lane, due)
            else:
                yield from self._unsent_of_lane(span, lane, chain, turn, due)
        for stage, lane, _ in self._waiting_lanes:
            span = self.schedule.stages[stage]
            yield from self._unsent_of_lane(span, lane, span.first_chain + lane)
        if self._next_due != _NEVER:
            first = self._offsets_read - len(self._due_block) + self._due_index
            yield from self._unsent_of_stage(self._current, self._stage_start, first)
        for span in self.schedule.stages[self._current.index + 1 :]:
            if not span.lanes:
                yield from self._unsent_of_stage(span, span.start_ns, 0)
            for lane in self.schedule.own_lanes(span):
                yield from self._unsent_of_lane(span, lane, span.first_chain + lane)

    def _begin_stage(self, index: int, start_ns: int) -> None:
        """Begin stage `index` at `start_ns`: point the cursor at its offsets, or make its lanes due."""
        schedule = self.schedule
        span = self._current = schedule.stages[index]
        self._stage_start = start_ns
        self._next_stage_ns = _NEVER
        self._due_block: list[int] = []
        self._due_index = self._offsets_read = 0
        self._next_due = _NEVER
        self._stage_ends_ns.append(start_ns + span.length_ns if span.lanes and span.length_ns is not None else _NEVER)
        self._chains_left.append(schedule.own_chains(span) if span.dynamic else 0)
        self._at_work.append(0)
        if span.lanes:
            last = span.lanes if span.chains is None else min(span.lanes, span.chains)
            places = len(schedule.own_lanes(span)) - sum(self._at_work) - len(self._waiting_lanes)
            own_lanes = range(schedule.part, last, schedule.parts)
            # lanes beyond those of the stage before are new; the others take over from it, and wait for its requests
            for lane in sorted(own_lanes, key=lambda lane: (lane < span.taken_over, lane)):
                due = start_ns + int(span.begins_ns(lane))
                if places > 0:
                    places -= 1
                    self._at_work[index] += 1
                    heapq.heappush(self._heap, (due, (span.first_chain + lane) * self._turns, index, 0, lane))
                else:
                    self._waiting_lanes.append((index, lane, due))
        else:
            self._offsets = schedule.own_offsets(span)
            self._chain = span.first_chain + schedule.part - schedule.parts
            self._chain_step = schedule.parts
            self._advance()
        if span.length_ns is not None:
            self._end_stage_at(start_ns + span.length_ns)
        if span.dynamic and not self._chains_left[index]:  # this share has no lane: there are more workers than lanes
            self._end_stage_at(start_ns)

    def _end_stage_at(self, at_ns: int) -> None:
        """Let the next stage, if there is one, begin at this instant, or earlier if an earlier one was already set."""
        if self._current.index + 1 < len(self.schedule.stages):
            self._next_stage_ns = min(self._next_stage_ns, at_ns)

    def _advance(self) -> None:
        """Move the cursor to the next offset of the current open-loop stage."""
        self._chain += self._chain_step
        self._due_index += 1
        if self._due_index >= len(self._due_block):
            block = self._offsets[self._offsets_read : self._offsets_read + _BLOCK]
            self._due_block = (block + self._stage_start).tolist()
            self._offsets_read += len(self._due_block)
            self._due_index = 0
            if not self._due_block:
                self._next_due = _NEVER
                return
        self._next_due = self._due_block[self._due_index]

    def _drop_later_turns(self, start: Start, now_ns: int) -> None:
        """Drop the turns after `start`: without its reply their history would be incomplete."""
        for later in range(1, self._turns - start.turn):
            number, turn = start.number + later, start.turn + later
            dropped = start._replace(number=number, turn=turn, due_ns=now_ns, dropped="previous_turn_failed")
            self._dropped.append(dropped)

    def _interrupt_chain(self, span: StageSpan, chain: int, first_turn: int, lane: int, due_ns: int) -> Iterator[Start]:
        session = chain if self._has_sessions else -1
        for turn in range(first_turn, self._turns):
            due = due_ns if turn == first_turn else -1
            yield Start(chain * self._turns + turn, span.index, session, turn, lane, due, "interrupted")

    def _unsent_of_lane(
        self, span: StageSpan, lane: int, first_chain: int, turn: int = 0, due_ns: int = -1
    ) -> Iterator[Start]:
        """The chains of a lane from this turn of this chain on; none where a duration ends the stage."""
        if span.length_ns is None and span.chains is not None:
            for chain in range(first_chain, span.first_chain + span.chains, span.lanes):
                yield from self._interrupt_chain(span, chain, turn, lane, due_ns)
                turn, due_ns = 0, -1

    def _unsent_of_stage(self, span: StageSpan, start_ns: int | None, first_index: int) -> Iterator[Start]:
        """The chains of this share in an open-loop stage, from `first_index` on, as interrupted slots."""
        chain = span.first_chain + self.schedule.part + first_index * self.schedule.parts
        for offset in self.schedule.own_offsets(span)[first_index:]:
            due = -1 if start_ns is None else start_ns + int(offset)
            yield from self._interrupt_chain(span, chain, 0, -1, due)
            chain += self.schedule.parts
