"""The dispatcher: decides which slots of a timetable start when. A sans-IO core, one instance per worker.

It never waits and never sends. The caller reports the time and every completion. The dispatcher answers which slots
start now, which slots are dropped, and when to ask again. It runs inside the sending loop, so it works on plain
integers, lists and a heap. A code path that runs once per slot must not use NumPy scalars or scan the whole timetable.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterator

import msgspec

from loadgen.core.schedule.chains import Chain, Ints
from loadgen.core.schedule.timetable import Schedule, StageSpan

_NEVER = 1 << 62
_BLOCK = 2048  # offsets converted from array to integers at a time; about 30 µs


class Start(msgspec.Struct, frozen=True, gc=False):
    """A slot to start now or, if `dropped` is set, a slot that is never sent but still leaves a record."""

    number: int  # of the slot, and of its request
    stage: int
    session: int  # of a conversation or task; -1 for a single request
    turn: int
    lane: int  # -1 in open loop
    due_ns: int  # from the start of the run; -1 if never known: the slot was still waiting for another one
    dropped: str = ""  # "", "in_flight_cap", "prefill_cap", "previous_turn_failed", "abandoned" or "interrupted"


_STARTED = -1


class _OpenChain:
    """A conversation or task that has begun: for each slot, how many slots must still end before it can start."""

    __slots__ = ("chain", "is_over", "latest_ns", "pending", "waits")

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.waits = array(
            "h", chain.waits
        )  # _STARTED for slots that are due, in flight, dropped or ended
        self.waits[0] = _STARTED
        self.pending = 1  # slots due or in flight
        self.latest_ns: dict[
            int, int
        ] = {}  # turn of a join -> the latest end of those that it waits for, so far
        self.is_over = False  # nothing of it starts any more

    def rest(self) -> list[int]:
        """The turns that have not started; from now on they count as started."""
        turns = [turn for turn, waits in enumerate(self.waits) if waits != _STARTED]
        for turn in turns:
            self.waits[turn] = _STARTED
        return turns


class Dispatcher:
    """Decides which slots start when, for one schedule or one share of it.

    Every slot is returned exactly once: by `ready`, or after `stop` by `unsent`. There is one exception: slots that a
    closed loop with a duration does not reach before its stage ends were never scheduled, so no method returns them.
    The end of an open-loop stage only stops new chains: a conversation that has begun continues to its last turn.

    `max_in_flight` limits open-loop stages only. While that many requests are in flight, a start is dropped
    (`in_flight_cap`), and so is the rest of its conversation or task (`previous_turn_failed`). A closed loop is limited
    by its number of lanes, and nothing is dropped there. A request of a task that fails ends the task: what is in
    flight beside it goes on, and nothing more starts.

    `max_in_prefill` limits how many requests have been started and have no output yet (`first_output`). While they are
    so many, a start of an open loop is dropped (`prefill_cap`); one of a closed loop waits, in order, and is due when a
    place is free.

    A closed-loop stage takes over from the stage before it place by place: each of its lanes begins when the requests
    (and lanes, and conversations) of earlier stages leave a place free. So the number in flight never exceeds the lanes
    of the stage, also at the end of a warm-up. After a closed loop that ends with its requests, the stage begins when
    the first lane of that one has nothing more to send.
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
        self._in_prefill: set[int] = set()
        self._held: deque[tuple[int, int, int, int, int]] = (
            deque()
        )  # as in `_heap`: they wait for a place in prefill
        self._freed_ns = 0  # when such a place was freed last
        self._turns = schedule.turns
        self._open: dict[
            int, _OpenChain
        ] = {}  # conversations and tasks that have begun and are not over
        self._in_flight: dict[int, Start] = {}
        # (due, number, stage, turn, lane) of slots that waited for another slot, and of the first slots of lanes
        self._heap: list[tuple[int, int, int, int, int]] = []
        self._dropped: deque[Start] = deque()
        self._stopped = False
        self._lanes_stopped: list[Start] = []
        self._stage_ends_ns: list[
            int
        ] = []  # per begun stage: from this instant its lanes start nothing
        self._chains_left: list[
            int
        ] = []  # per begun stage: own unfinished chains, if a closed loop with a count
        self._at_work: list[
            int
        ] = []  # per begun stage: own lanes, or conversations of an open loop, not yet ended
        self._waiting_lanes: deque[tuple[int, int, int]] = (
            deque()
        )  # (stage, lane, earliest due): no place is free
        self._current: StageSpan
        self._due_times: Iterator[int] = iter(
            ()
        )  # of the open-loop stage that goes on, without the next
        self._next_due = _NEVER
        self._chain = 0  # the next one that the open-loop stage begins
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
        if self._held and len(self._in_prefill) < self._max_in_prefill:
            return self._freed_ns
        due = min(self._next_due, self._next_stage_ns, self._heap[0][0] if self._heap else _NEVER)
        return None if due == _NEVER else due

    def ready(self, now_ns: int, limit: int = 64) -> list[Start]:
        """The slots due at or before `now_ns`, in order of due time, at most `limit`.

        If the list is full, call again. A returned slot counts as in flight unless its `dropped` is set.
        """
        out: list[Start] = []
        if self._stopped:
            return out
        heap, dropped, in_flight, cap = (
            self._heap,
            self._dropped,
            self._in_flight,
            self._max_in_flight,
        )
        held, in_prefill, prefill_cap = self._held, self._in_prefill, self._max_in_prefill
        while len(out) < limit:
            if dropped:
                out.append(dropped.popleft())
                continue
            due = self._next_due
            heap_due = heap[0][0] if heap else _NEVER
            next_stage_ns = self._next_stage_ns
            if held and len(in_prefill) < prefill_cap:
                due, number, stage, turn, lane = held.popleft()
                due, chain = max(due, self._freed_ns), number // self._turns
                if due >= self._stage_ends_ns[stage]:
                    self._end_held(chain, stage, turn, due)
                    continue
            # no offsets left: all lie before the stage's end; what was due before it comes before its lanes
            elif next_stage_ns <= now_ns and next_stage_ns < due and next_stage_ns <= heap_due:
                self._begin_stage(self._current.index + 1, next_stage_ns)
                continue
            elif due <= heap_due:
                if due > now_ns:
                    break
                chain = self._chain
                self._chain += self.schedule.parts
                self._next_due = next(self._due_times, _NEVER)
                number, stage, turn, lane = chain * self._turns, self._current.index, 0, -1
                if len(in_flight) < cap and len(in_prefill) < prefill_cap:
                    self._at_work[stage] += 1
            else:
                if heap_due > now_ns:
                    break
                due, number, stage, turn, lane = waited = heapq.heappop(heap)
                if lane >= 0 and len(in_prefill) >= prefill_cap:
                    held.append(waited)
                    continue
                chain = number // self._turns
            session = -1
            if self._turns > 1:
                made = self._open[chain].chain if turn else self.schedule.chains.of(chain)
                session, number = (
                    chain if made.is_session else -1,
                    self.schedule.number(chain, turn, made),
                )
            if lane < 0 and (len(in_flight) >= cap or len(in_prefill) >= prefill_cap):
                why = "in_flight_cap" if len(in_flight) >= cap else "prefill_cap"
                start = Start(number, stage, session, turn, lane, due, why)
                if session >= 0:
                    self._end_at_cap(start, due)
            else:
                start = Start(number, stage, session, turn, lane, due)
                in_flight[number] = start
                if prefill_cap < _NEVER:
                    in_prefill.add(number)
                if session >= 0 and not turn:
                    self._open[chain] = _OpenChain(made)
            out.append(start)
        return out

    def finished(
        self,
        number: int,
        now_ns: int,
        ok: bool,
        pause_ns: int = 0,
        why: str = "previous_turn_failed",
    ) -> None:
        """Report that the request of slot `number` has ended at `now_ns`.

        This frees its place in flight and schedules the slots after it. The next chain of a lane starts `pause_ns`
        later. `why`: where it is not ok, the reason for which the rest of its conversation or task is dropped. Raises
        KeyError if the slot is not in flight.
        """
        start = self._in_flight.pop(number)
        if self._in_prefill:
            self.first_output(number, now_ns)
        if self._stopped:
            return
        stage, lane = start.stage, start.lane
        if start.session >= 0 and self._goes_on(start, now_ns, ok, pause_ns, why):
            return
        if lane < 0:
            self._leave(stage, now_ns)
            return
        span = self.schedule.stages[stage]
        chain = number // self._turns + span.lanes
        due = now_ns + pause_ns
        goes_on = due < self._stage_ends_ns[stage] and (
            span.chains is None or chain < span.first_chain + span.chains
        )
        if goes_on:
            heapq.heappush(self._heap, (due, chain * self._turns, stage, 0, lane))
        if span.chains is not None:
            self._chains_left[stage] -= 1
            if span is self._current and (
                not self._chains_left[stage] or (not goes_on and self._hands_over(stage))
            ):
                self._end_stage_at(now_ns)
        if not goes_on:
            self._leave(stage, due)

    def first_output(self, number: int, now_ns: int) -> None:
        """The request of slot `number` has its first output: its place in prefill, if it had one, is free."""
        if number in self._in_prefill:
            self._in_prefill.remove(number)
            self._freed_ns = now_ns

    def _end_held(self, chain: int, stage: int, turn: int, now_ns: int) -> None:
        """A slot waited for a place in prefill until its stage was over: its lane leaves."""
        if turn:
            task = self._open[chain]
            task.pending -= 1
            task.is_over = True
            if task.pending:
                return
            del self._open[chain]
        self._leave(stage, now_ns)

    def beside(self, number: int) -> list[int]:
        """The slots in flight of the same conversation or task."""
        chain = number // self._turns
        return [one for one in self._in_flight if one // self._turns == chain and one != number]

    def _goes_on(self, start: Start, now_ns: int, ok: bool, pause_ns: int, why: str) -> bool:
        """A slot of a conversation or task has ended: schedule those that waited for it alone. False: it was the last.

        Where the stage ends before they are due, the lane leaves, and there is nothing more to do.
        """
        stage, lane, end = start.stage, start.lane, self._stage_ends_ns[start.stage]
        number = start.session * self._turns
        task = self._open[start.session]
        task.pending -= 1
        is_cut = False
        if ok and not task.is_over:
            for turn in task.chain.followers[start.turn]:
                task.waits[turn] -= 1
                latest_ns = now_ns
                if (
                    task.chain.waits[turn] > 1
                ):  # ends are reported in the order in which they were read
                    latest_ns = task.latest_ns[turn] = max(now_ns, task.latest_ns.get(turn, now_ns))
                due = latest_ns + task.chain.pauses[turn]
                if task.waits[turn] == 0 and due < end:
                    task.waits[turn] = _STARTED
                    task.pending += 1
                    heapq.heappush(self._heap, (due, number + turn, stage, turn, lane))
                elif task.waits[turn] == 0:
                    is_cut = task.is_over = True
        elif not ok and not task.is_over:
            task.is_over = True
            if now_ns < end:
                self._drop_rest(task, start, now_ns, why)
        if task.pending:
            return True
        del self._open[start.session]
        if is_cut:
            self._leave(stage, now_ns + pause_ns)
        return is_cut

    def _drop_rest(self, task: _OpenChain, start: Start, now_ns: int, why: str) -> None:
        """Drop what of a conversation or task has not started: its history would be incomplete."""
        chain, turns = start.session, task.rest()
        waiting = (*self._heap, *self._held) if task.pending else ()
        due = [entry for entry in waiting if entry[1] // self._turns == chain]
        if due:  # of a branch beside the one that failed
            self._heap[:] = [entry for entry in self._heap if entry[1] // self._turns != chain]
            heapq.heapify(self._heap)
            _keep(self._held, [entry for entry in self._held if entry[1] // self._turns != chain])
            task.pending -= len(due)
            turns += [entry[3] for entry in due]
        for turn in sorted(turns):
            number = self.schedule.number(chain, turn, task.chain)
            self._dropped.append(
                msgspec.structs.replace(start, number=number, turn=turn, due_ns=now_ns, dropped=why)
            )

    def _end_at_cap(self, start: Start, due_ns: int) -> None:
        """A start was dropped because too many requests are in flight: so is the rest of its conversation or task."""
        task = self._open.get(start.session)
        if task is None:  # it had not begun
            task = _OpenChain(self.schedule.chains.of(start.session))
            task.pending = 0
            self._drop_rest(task, start, due_ns, "previous_turn_failed")
            return
        task.pending -= 1
        task.is_over = True
        self._drop_rest(task, start, due_ns, "previous_turn_failed")
        if not task.pending:
            del self._open[start.session]
            self._leave(start.stage, due_ns)

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
                heapq.heappush(
                    self._heap,
                    (due, (span.first_chain + lane) * self._turns, waiting_stage, 0, lane),
                )
            self._waiting_lanes.popleft()

    def stop(self) -> None:
        """Start nothing from now on. Requests still in flight may still be reported with `finished`."""
        if self._stopped:
            return
        self._stopped = True
        self._stage_ends_ns[:] = [0] * len(
            self._stage_ends_ns
        )  # nor does a lane go on by itself: see `lanes`
        # Lanes whose request in flight is a single one: what they would have sent next. Taken now, before completions.
        self._lanes_stopped = [
            start for start in self._in_flight.values() if start.lane >= 0 and start.session < 0
        ]

    def unsent(self) -> Iterator[Start]:
        """After `stop`: every scheduled slot that did not start, once, with the reason.

        The reason is `interrupted`, or the one for which the slot had already been dropped. A closed loop with a
        duration has no unsent slots, because it schedules only the slots that it reaches. Raises RuntimeError before
        `stop`.
        """
        if not self._stopped:
            raise RuntimeError("the agenda has not been stopped")
        yield from self._dropped
        for due, number, stage, turn, lane in (*self._heap, *self._held):
            span, chain = self.schedule.stages[stage], number // self._turns
            if turn == 0:  # only lanes have first slots here
                yield from self._unsent_of_lane(span, lane, chain, due)
            elif lane < 0 or _sends_all(span):
                yield self._interrupted(span, chain, turn, lane, due)
        for session, task in self._open.items():
            span = next(one for one in reversed(self.schedule.stages) if one.first_chain <= session)
            lane = (session - span.first_chain) % span.lanes if span.lanes else -1
            if lane < 0 or _sends_all(span):
                yield from (
                    self._interrupted(span, session, turn, lane, -1) for turn in task.rest()
                )
            if lane >= 0:
                yield from self._unsent_of_lane(span, lane, session + span.lanes)
        for start in self._lanes_stopped:
            span = self.schedule.stages[start.stage]
            yield from self._unsent_of_lane(
                span, start.lane, start.number // self._turns + span.lanes
            )
        for stage, lane, _ in self._waiting_lanes:
            span = self.schedule.stages[stage]
            yield from self._unsent_of_lane(span, lane, span.first_chain + lane)
        if self._next_due != _NEVER:
            yield from self._unsent_of_stage(self._current, self._stage_start, self._chains_begun())
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
        self._next_due = _NEVER
        self._stage_ends_ns.append(
            start_ns + span.length_ns if span.lanes and span.length_ns is not None else _NEVER
        )
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
                    heapq.heappush(
                        self._heap, (due, (span.first_chain + lane) * self._turns, index, 0, lane)
                    )
                else:
                    self._waiting_lanes.append((index, lane, due))
        else:
            self._due_times = _due_times(schedule.own_offsets(span), start_ns)
            self._chain = span.first_chain + schedule.part
            self._next_due = next(self._due_times, _NEVER)
        if span.length_ns is not None:
            self._end_stage_at(start_ns + span.length_ns)
        if (
            span.dynamic and not self._chains_left[index]
        ):  # this share has no lane: there are more workers than lanes
            self._end_stage_at(start_ns)

    def _end_stage_at(self, at_ns: int) -> None:
        """Let the next stage, if there is one, begin at this instant, or earlier if an earlier one was already set."""
        if self._current.index + 1 < len(self.schedule.stages):
            self._next_stage_ns = min(self._next_stage_ns, at_ns)

    def _chains_begun(self) -> int:
        """Return how many chains of this share have begun in the current open-loop stage."""
        first_chain = self._current.first_chain + self.schedule.part
        return (self._chain - first_chain) // self.schedule.parts

    def _interrupted(self, span: StageSpan, chain: int, turn: int, lane: int, due_ns: int) -> Start:
        made = self.schedule.chains.of(chain)
        number = self.schedule.number(chain, turn, made)
        return Start(
            number, span.index, chain if made.is_session else -1, turn, lane, due_ns, "interrupted"
        )

    def _interrupt_chain(
        self, span: StageSpan, chain: int, lane: int, due_ns: int
    ) -> Iterator[Start]:
        for turn in range(len(self.schedule.chains.of(chain).waits)):
            yield self._interrupted(span, chain, turn, lane, -1 if turn else due_ns)

    def _unsent_of_lane(
        self, span: StageSpan, lane: int, first_chain: int, due_ns: int = -1
    ) -> Iterator[Start]:
        """The chains of a lane from this one on; none where a duration ends the stage."""
        if _sends_all(span):
            for chain in range(first_chain, span.first_chain + (span.chains or 0), span.lanes):
                yield from self._interrupt_chain(span, chain, lane, due_ns)
                due_ns = -1

    def _unsent_of_stage(
        self, span: StageSpan, start_ns: int | None, first_index: int
    ) -> Iterator[Start]:
        """The chains of this share in an open-loop stage, from `first_index` on, as interrupted slots."""
        chain = span.first_chain + self.schedule.part + first_index * self.schedule.parts
        for offset in self.schedule.own_offsets(span)[first_index:]:
            due = -1 if start_ns is None else start_ns + int(offset)
            yield from self._interrupt_chain(span, chain, -1, due)
            chain += self.schedule.parts


def _due_times(offsets: Ints, start_ns: int) -> Iterator[int]:
    """Yield the due times of an open-loop stage, converted to integers a block at a time."""
    for first in range(0, len(offsets), _BLOCK):
        yield from (offsets[first : first + _BLOCK] + start_ns).tolist()


def _keep(
    held: deque[tuple[int, int, int, int, int]], rest: list[tuple[int, int, int, int, int]]
) -> None:
    held.clear()
    held.extend(rest)


def _sends_all(span: StageSpan) -> bool:
    """Whether a closed loop goes on until all its chains were sent, whatever the time."""
    return span.length_ns is None and span.chains is not None
