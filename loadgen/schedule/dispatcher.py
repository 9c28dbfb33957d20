"""What to start when: the sans-IO core between a timetable and whoever has a clock, one per worker.

It never waits or sends. Its caller tells it the time and each completion; it answers with what starts now, what must be
dropped, and when to ask again. It stands in the sending loop: plain integers, lists and a heap; no NumPy scalar and no
look at the whole timetable may come into a path taken once per slot.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from loadgen.schedule.timetable import Schedule, StageSpan

_NEVER = 1 << 62
_BLOCK = 2048  # offsets turned from an array into integers at a time: some 30 µs


class Start(NamedTuple):
    """A slot to start now, or, with `dropped` set, a slot that is never sent and is a record all the same."""

    number: int
    request: int
    stage: int
    session: int  # -1 when the request stands alone
    turn: int
    lane: int  # -1 in open loop
    due_ns: int  # from the start of the run; -1 when it never became known (a slot that waited for another one)
    dropped: str = ""  # "", "in_flight_cap", "previous_turn_failed" or "interrupted"


class Dispatcher:
    """What to start when, for one schedule or one share of it.

    Every slot comes out once: from `ready`, or after `stop` from `unsent`. Slots that a closed loop with a duration
    does not reach before its stage's end were never scheduled, and come out nowhere. An open loop's end stops new
    chains only: a conversation that has begun goes on to its last turn.

    `max_in_flight` drops starts of open-loop stages while that many requests are in flight (`in_flight_cap`, and
    `previous_turn_failed` for the turns after); the lanes are a closed loop's own cap, and nothing is dropped there.
    """

    __slots__ = (
        "_boundary",
        "_cap",
        "_chain",
        "_chain_step",
        "_dropped",
        "_due",
        "_dues",
        "_ends",
        "_flying",
        "_heap",
        "_left",
        "_offsets",
        "_place",
        "_read",
        "_sessions",
        "_span",
        "_stage_start",
        "_stopped",
        "_turns",
        "schedule",
    )

    def __init__(self, schedule: Schedule, *, max_in_flight: int | None = None) -> None:
        self.schedule = schedule
        self._cap = _NEVER if max_in_flight is None else max_in_flight
        self._turns = schedule.turns
        self._sessions = schedule.turns > 1
        self._flying: dict[int, Start] = {}
        self._heap: list[
            tuple[int, int, int, int, int]
        ] = []  # (due, number, stage, turn, lane): waited for another slot
        self._dropped: deque[Start] = deque()
        self._stopped = False
        self._ends: list[int] = []  # by begun stage: from here on its lanes start nothing
        self._left: list[int] = []  # by begun stage: own chains of a closed loop with a count that have not ended
        self._begin(0, 0)

    @property
    def in_flight(self) -> int:
        """Started, not finished."""
        return len(self._flying)

    @property
    def done(self) -> bool:
        """Nothing in flight and nothing to come."""
        return not self._flying and (self._stopped or self.next_ns() is None)

    def next_ns(self) -> int | None:
        """The earliest instant at which `ready` may have something; None: not before a `finished`, or never."""
        if self._stopped:
            return None
        if self._dropped:
            return self._dropped[0].due_ns
        due = min(self._due, self._boundary, self._heap[0][0] if self._heap else _NEVER)
        return None if due == _NEVER else due

    def ready(self, now_ns: int, limit: int = 64) -> list[Start]:
        """What is due at or before `now_ns`, in order of due, at most `limit`: ask again while it is full."""
        out: list[Start] = []
        if self._stopped:
            return out
        heap, dropped, flying, cap = self._heap, self._dropped, self._flying, self._cap
        while len(out) < limit:
            if dropped:
                out.append(dropped.popleft())
                continue
            due = self._due
            waiting = heap[0][0] if heap else _NEVER
            boundary = self._boundary
            if boundary <= now_ns and boundary < due:  # its offsets are spent: all lie before its end
                self._begin(self._span.index + 1, boundary)
                continue
            if due <= waiting:
                if due > now_ns:
                    break
                chain = self._chain
                self._advance()
                number, stage, turn, lane = chain * self._turns, self._span.index, 0, -1
            else:
                if waiting > now_ns:
                    break
                due, number, stage, turn, lane = heapq.heappop(heap)
                chain = number // self._turns
            session = chain if self._sessions else -1
            if lane < 0 and len(flying) >= cap:
                start = Start(number, number, stage, session, turn, lane, due, "in_flight_cap")
                self._drop_rest(start, due)
            else:
                start = Start(number, number, stage, session, turn, lane, due)
                flying[number] = start
            out.append(start)
        return out

    def finished(self, number: int, now_ns: int, ok: bool, pause_ns: int = 0) -> None:
        """The slot's request has ended: frees its place and makes the slot after it due; the next chain of a lane
        `pause_ns` later. KeyError if not in flight."""
        start = self._flying.pop(number)
        if self._stopped:
            return
        stage, turn, lane = start.stage, start.turn + 1, start.lane
        end = self._ends[stage]
        if turn < self._turns:
            if ok:
                due = now_ns + self.schedule.pauses.of(number // self._turns)[turn - 1]
                if due < end:
                    heapq.heappush(self._heap, (due, number + 1, stage, turn, lane))
                return
            if now_ns < end:
                self._drop_rest(start, now_ns)
        if lane < 0:
            return
        span = self.schedule.stages[stage]
        chain = number // self._turns + span.lanes
        due = now_ns + pause_ns
        if due < end and (span.chains is None or chain < span.first_chain + span.chains):
            heapq.heappush(self._heap, (due, chain * self._turns, stage, 0, lane))
        if span.dynamic:
            self._left[stage] -= 1
            if not self._left[stage] and span is self._span:
                self._stage_over(now_ns)

    def stop(self) -> None:
        """Nothing starts from now on. What is in flight may still be told as `finished`."""
        if self._stopped:
            return
        self._stopped = True
        # Chains that had begun, each by its first slot that did not start; taken now, before completions change them.
        turns = self._turns
        begun = list(self._heap)
        for start in self._flying.values():
            if start.turn + 1 < turns:
                begun.append((-1, start.number + 1, start.stage, start.turn + 1, start.lane))
            elif start.lane >= 0:
                span = self.schedule.stages[start.stage]
                chain = start.number // turns + span.lanes
                begun.append((-1, chain * turns, start.stage, 0, start.lane))
        self._heap = begun

    def unsent(self) -> Iterator[Start]:
        """After `stop`: every scheduled slot that did not start, once, with its reason (`interrupted`, or what had
        befallen it before). Of a closed loop with a duration there is none: it schedules only what it reaches.
        Raises RuntimeError before `stop`."""
        if not self._stopped:
            raise RuntimeError("the agenda has not been stopped")
        yield from self._dropped
        for due, number, stage, turn, lane in self._heap:
            span = self.schedule.stages[stage]
            if lane < 0:
                yield from self._interrupted(span, number // self._turns, turn, lane, due)
            elif span.length_ns is None and span.chains is not None:
                chains = range(number // self._turns, span.first_chain + span.chains, span.lanes)
                for chain in chains:
                    known = chain == chains[0]
                    yield from self._interrupted(span, chain, turn if known else 0, lane, due if known else -1)
        if self._due != _NEVER:
            yield from self._timetable(self._span, self._stage_start, self._read - len(self._dues) + self._place)
        for span in self.schedule.stages[self._span.index + 1 :]:
            if not span.lanes:
                yield from self._timetable(span, span.start_ns, 0)
            elif span.length_ns is None and span.chains is not None:
                for lane in self.schedule.own_lanes(span):
                    for chain in range(span.first_chain + lane, span.first_chain + span.chains, span.lanes):
                        yield from self._interrupted(span, chain, 0, lane, -1)

    def _begin(self, index: int, start_ns: int) -> None:
        """Begin stage `index` at `start_ns`: set the cursor on its offsets, or make its lanes due."""
        schedule = self.schedule
        span = self._span = schedule.stages[index]
        self._stage_start = start_ns
        self._boundary = _NEVER
        self._dues: list[int] = []
        self._place = self._read = 0
        self._due = _NEVER
        self._ends.append(start_ns + span.length_ns if span.lanes and span.length_ns is not None else _NEVER)
        self._left.append(schedule.own_chains(span) if span.dynamic else 0)
        if span.lanes:
            last = span.lanes if span.chains is None else min(span.lanes, span.chains)
            for lane in range(schedule.part, last, schedule.parts):
                due = start_ns + span.begins_ns(lane)
                heapq.heappush(self._heap, (due, (span.first_chain + lane) * self._turns, index, 0, lane))
        else:
            self._offsets = schedule.own_offsets(span)
            self._chain = span.first_chain + schedule.part - schedule.parts
            self._chain_step = schedule.parts
            self._advance()
        if span.length_ns is not None:
            self._stage_over(start_ns + span.length_ns)
        if span.dynamic and not self._left[index]:  # more workers than lanes
            self._stage_over(start_ns)

    def _stage_over(self, at_ns: int) -> None:
        """The next stage, if there is one, begins at this instant, or earlier if that was known already."""
        if self._span.index + 1 < len(self.schedule.stages):
            self._boundary = min(self._boundary, at_ns)

    def _advance(self) -> None:
        """Move the cursor to the next offset of this open-loop stage."""
        self._chain += self._chain_step
        self._place += 1
        if self._place >= len(self._dues):
            block = self._offsets[self._read : self._read + _BLOCK]
            self._dues = (block + self._stage_start).tolist()
            self._read += len(self._dues)
            self._place = 0
            if not self._dues:
                self._due = _NEVER
                return
        self._due = self._dues[self._place]

    def _drop_rest(self, start: Start, now_ns: int) -> None:
        """The turns after `start` will not be sent: their history would lack its reply."""
        number, session = start.number - start.turn, start.session
        for turn in range(start.turn + 1, self._turns):
            self._dropped.append(
                Start(
                    number + turn, number + turn, start.stage, session, turn, start.lane, now_ns, "previous_turn_failed"
                )
            )

    def _interrupted(self, span: StageSpan, chain: int, turn: int, lane: int, due_ns: int) -> Iterator[Start]:
        session = chain if self._sessions else -1
        for t in range(turn, self._turns):
            number = chain * self._turns + t
            yield Start(number, number, span.index, session, t, lane, due_ns if t == turn else -1, "interrupted")

    def _timetable(self, span: StageSpan, start_ns: int | None, place: int) -> Iterator[Start]:
        """An open-loop stage's own chains from this place on."""
        chain = span.first_chain + self.schedule.part + place * self.schedule.parts
        for offset in self.schedule.own_offsets(span)[place:]:
            due = -1 if start_ns is None else start_ns + int(offset)
            yield from self._interrupted(span, chain, 0, -1, due)
            chain += self.schedule.parts
