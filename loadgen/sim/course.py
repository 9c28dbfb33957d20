"""One simulated run: replicas, and the dispatcher that sends requests to them. Pure.

There is no event per token; the only clock is a heap of iteration ends. `Course.step_by_step` is written twice: here,
and in `engine/_course.h`. The two give the same, to the last row.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.core.execution.events import Look
from loadgen.core.requests.task_graphs import Leaving
from loadgen.core.results.record import KIND
from loadgen.core.schedule.dispatcher import Dispatcher
from loadgen.core.schedule.timetable import Schedule
from loadgen.sim import chain_blocks
from loadgen.sim.engine import replica as engine
from loadgen.sim.engine.replica import DONE, NEVER, Replica, SimRequest
from loadgen.sim.engine.routing import Route
from loadgen.sim.load_bounds import UNBOUNDED, LoadBounds
from loadgen.sim.request_lengths import Sizes
from loadgen.sim.virtual_rows import FLIGHT, LONG, Flights, columns_of, rows_so_far

REFUSED = KIND["http_4xx"]
KINDS_IN_C = (
    "in_flight_cap",
    "prefill_cap",
    "previous_turn_failed",
    "abandoned",
    "interrupted",
    "unfinished",
    "timeout_total",
    "reset",
    "http_4xx",
)


class Course:
    """One simulated run: replicas, and the dispatcher that sends requests to them. `run` simulates the whole load."""

    def __init__(
        self,
        schedule: Schedule,
        sizes: Sizes,
        replicas: Sequence[Replica],
        next_replica: Route,
        bounds: LoadBounds = UNBOUNDED,
        *,
        looks: Sequence[Look] = (),
        changes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.flights = Flights()
        self.replicas = replicas
        self._serving = len(replicas)  # the first so many take requests
        self._changes = deque(changes)
        self.ends: list[
            NDArray[np.int64]
        ] = []  # of the iterations of each replica, once all are over
        caps = bounds.max_in_flight, bounds.max_in_prefill
        self._dispatcher = Dispatcher(schedule, max_in_flight=caps[0], max_in_prefill=caps[1])
        self._caps_prefill = caps[1] is not None
        self._caps = tuple(NEVER if cap is None else cap for cap in caps)
        self._looks = list(looks)
        self.decided = False  # one of `looks` has ended the load
        self._seen = 0  # values of `flights.sent` that `looks` have seen
        self._sizes, self._next_replica = sizes, next_replica
        self._end_ns = bounds.end_ns(schedule.horizon_ns)
        self._timeout_ns, self._stop_ns, self._after_stop_ns = (
            bounds.timeout_ns,
            bounds.stop_ns,
            bounds.after_stop_ns,
        )
        self._in_flight: deque[SimRequest] = (
            deque()
        )  # in order of due time; may contain requests that are done
        self._schedule = schedule
        self._leaves: dict[int, Leaving] = {}  # tasks whose user goes away, and where
        self._leaving: list[
            tuple[SimRequest, int]
        ] = []  # requests whose user goes away after so many tokens
        self._sequences: dict[
            int, list[SimRequest]
        ] = {}  # number -> of a request for values, those not done

    def run(self) -> None:
        """Simulate until every slot has its record: in C where it is compiled."""
        module, whole = engine.module, self._schedule.parts == 1
        if module is None or not whole or type(self.replicas[0]) is not module.Replica:
            self.step_by_step()
            return
        together, draw = chain_blocks.drawn(self._schedule, self._sizes)
        changes = np.array(self._changes, np.int64).reshape(-1)
        sent, unsent, stretches, self.decided = module.course(
            (
                chain_blocks.stages(self._schedule),
                self._schedule.turns,
                together,
                draw,
                self._sizes,
            ),
            (self.replicas, self._next_replica, changes),
            self._caps,
            (self._timeout_ns, self._end_ns, self._stop_ns, self._after_stop_ns),
            (self._is_over, self._looks[0].every_ns if self._looks else 0),
            tuple(KIND[kind] for kind in KINDS_IN_C),
        )
        columns = columns_of(np.frombuffer(sent, np.int64), FLIGHT)
        narrow: dict[str, Any] = {
            name: np.array(column, np.int64 if name in LONG else np.int32)
            for name, column in columns.items()
        }
        self.flights = Flights(
            unsent=array("q", unsent), stretches=array("q", stretches), columns=narrow
        )

    def _is_over(self, now_ns: int, news: bytes) -> bool:
        """Whether one of `looks` says so. `news`: FLIGHT, and when it had its first and its last token, of each."""
        *flights, first_ns, last_ns = columns_of(
            np.frombuffer(news, np.int64), (*FLIGHT, "first_ns", "last_ns")
        ).values()
        rows = rows_so_far(
            dict(zip(FLIGHT, flights, strict=True)), first_ns, last_ns, self._schedule
        )
        return any(look.ends(now_ns, rows) for look in self._looks)

    def step_by_step(self) -> None:
        """What `run` does, in Python."""
        dispatcher, replicas, flights = self._dispatcher, self.replicas, self.flights
        add_sent = flights.sent.extend
        finished = dispatcher.finished
        in_flight, end_of_run, timeout_ns = self._in_flight, self._end_ns, self._timeout_ns
        ends: list[tuple[int, int]] = []  # a heap of (end of the iteration in progress, replica)
        idle = len(replicas)
        stop_ns, cut = self._stop_ns, "unfinished"
        look_ns, change_ns = self._first_look_ns(), self._next_change_ns()
        while True:
            due = dispatcher.next_ns()
            end = ends[0][0] if ends else NEVER
            if change_ns < NEVER and change_ns <= min(
                NEVER if due is None else due, end, look_ns, stop_ns, end_of_run
            ):
                change_ns = self._change(change_ns)
                continue
            if look_ns < end and look_ns < stop_ns and (due is None or due > look_ns):
                if end >= NEVER and due is None:  # all is over
                    look_ns = NEVER
                elif self._is_decided(look_ns):
                    stop_ns, look_ns = look_ns, NEVER
                else:
                    look_ns += self._looks[0].every_ns
                continue
            if end > stop_ns and (due is None or due > stop_ns):
                dispatcher.stop()
                end_of_run = min(end_of_run, stop_ns + self._after_stop_ns)
                due, stop_ns, cut = None, NEVER, "interrupted"
            if due is not None and due <= end and due <= end_of_run:
                # While a replica is idle, an arrival may begin an iteration that ends before the next arrival.
                idle -= self._start(
                    due if idle else min(end, end_of_run, stop_ns, look_ns, change_ns), ends
                )
                continue
            if end >= NEVER or end > end_of_run:
                break
            index = ends[0][1]
            replica = replicas[index]
            done = replica.finish()
            for request in replica.started if self._caps_prefill else ():
                dispatcher.first_output(request.key, end)
            for request in done:
                number, due_ns = request.key, request.due_ns
                if not request.asked and not self._is_last(request):
                    continue
                add_sent(
                    (
                        number,
                        due_ns,
                        index,
                        request.first,
                        request.from_iteration,
                        request.last,
                        request.input_tokens,
                        request.asked,
                        request.output_tokens,
                        request.cached,
                        0,
                        -1,
                        request.admitted_ns,
                    )
                )
                finished(number, end, True)
            if self._leaving:
                self._let_go(index, end)
            while in_flight and (
                in_flight[0].state == DONE or in_flight[0].due_ns + timeout_ns <= end
            ):
                if (late := in_flight.popleft()).state != DONE:
                    self._give_up(late, end)
            if replica.begin(end):
                heapq.heapreplace(ends, (replica.end_ns, index))
            else:
                heapq.heappop(ends)
                idle += 1
            if replica.paused:
                for request, first, last in replica.paused:
                    if last >= first:
                        flights.stretches.extend((request.key, index, first, last))
        if end_of_run < NEVER:
            while in_flight and in_flight[0].due_ns + timeout_ns <= end_of_run:
                if (late := in_flight.popleft()).state != DONE:
                    self._give_up(late, end_of_run)
            dispatcher.stop()  # before the cut: it must not drop the turns after those that are cut
            for request in in_flight:
                if request.state != DONE:
                    self._give_up(request, end_of_run, cut)
        dispatcher.stop()
        for start in (
            dispatcher.unsent()
        ):  # nobody interrupts a virtual run: the end of the drain left these
            kind = cut if start.dropped == "interrupted" else start.dropped
            flights.unsent.extend((start.number, start.due_ns, KIND[kind]))

    def _next_change_ns(self) -> int:
        return self._changes[0][0] if self._changes else NEVER

    def _change(self, now_ns: int) -> int:
        """So many replicas serve from now on. What one that goes has in work breaks off; one that comes is empty.
        Returns when they change next.
        """
        before, self._serving = self._serving, self._changes.popleft()[1]
        for replica in self.replicas[before : self._serving]:
            replica.reset_cache()
        for request in self._in_flight:
            if request.at >= self._serving and request.state != DONE:
                self._give_up(request, now_ns, "reset")
        return self._next_change_ns()

    def _first_look_ns(self) -> int:
        return self._looks[0].every_ns if self._looks else NEVER

    def _is_decided(self, now_ns: int) -> bool:
        rows = self._news()
        self.decided = any(look.ends(now_ns, rows) for look in self._looks)
        return self.decided

    def _news(self) -> NDArray[np.void]:
        """The rows of what has ended since the last call."""
        columns = columns_of(self.flights.sent[self._seen :], FLIGHT)
        self._seen = len(self.flights.sent)
        first_ns, last_ns = (
            np.array(
                [
                    self.replicas[replica].end_of(iteration) if iteration >= 0 else -1
                    for replica, iteration in zip(
                        columns["replica"].tolist(), columns[name].tolist(), strict=True
                    )
                ],
                np.int64,
            )
            for name in ("first", "last")
        )
        return rows_so_far(columns, first_ns, last_ns, self._dispatcher.schedule)

    @property
    def timetable(self) -> Schedule:
        """The timetable as it was carried out."""
        return self._dispatcher.schedule

    def _start(self, until_ns: int, ends: list[tuple[int, int]]) -> int:
        """Start the requests that are due until `until_ns`; returns how many replicas were idle and are busy now."""
        woken = 0
        dispatcher, replicas, in_flight = self._dispatcher, self.replicas, self._in_flight
        for start in dispatcher.ready(until_ns):
            number, due_ns = start.number, start.due_ns
            if start.dropped:
                self.flights.unsent.extend((number, due_ns, KIND[start.dropped]))
                continue
            input_tokens, output_tokens, blocks = self._sizes(number)
            index = self._next_replica()
            while index >= self._serving:
                index = self._next_replica()
            replica = replicas[index]
            lengths: Any = (input_tokens,) if output_tokens else blocks
            if not all(map(replica.admissible, lengths)):
                refused = (
                    number,
                    due_ns,
                    index,
                    -1,
                    -1,
                    -1,
                    input_tokens,
                    output_tokens,
                    0,
                    -1,
                    REFUSED,
                    due_ns,
                    -1,
                )
                self.flights.sent.extend(refused)
                dispatcher.finished(number, due_ns, False)
                continue
            if output_tokens:
                sequences = [replica.Request(number, due_ns, input_tokens, output_tokens, blocks)]
            else:  # for values: it is done when the last of its sequences is prefilled
                sequences = self._sequences[number] = [
                    replica.Request(number, due_ns, one, 0) for one in lengths
                ]
            for request in sequences:
                request.at = index
                replica.submit(request)
                in_flight.append(request)
            if start.session >= 0:
                if (
                    not start.turn
                    and (leaves := self._schedule.chains.of(start.session).leaving) is not None
                ):
                    self._leaves[start.session] = leaves
                leaving = self._leaves.get(start.session)
                if leaving is not None and leaving.turn == start.turn:
                    self._leaving.append((request, leaving.tokens))
            if replica.end_ns == NEVER and replica.begin(due_ns):
                heapq.heappush(ends, (replica.end_ns, index))
                woken += 1
        return woken

    def _is_last(self, request: SimRequest) -> bool:
        """Whether with this sequence the whole request is done; then it stands for all of them."""
        number, sequences = request.key, self._sequences[request.key]
        sequences.remove(request)
        if sequences:
            return False
        del self._sequences[number]
        request.input_tokens = self._sizes(number)[0]
        return True

    def _let_go(self, index: int, now_ns: int) -> None:
        """An iteration of a replica has ended: end its requests whose user goes away now, and those beside them."""
        replica = self.replicas[index]
        self._leaving = [entry for entry in self._leaving if entry[0].state != DONE]
        for request, tokens in self._leaving:
            if (
                request.at == index
                and request.state != DONE
                and replica.generated(request) >= tokens
            ):
                beside = set(self._dispatcher.beside(request.key))
                self._give_up(request, now_ns, "abandoned")
                for other in self._in_flight:
                    if other.key in beside and other.state != DONE:
                        self._give_up(other, now_ns, "abandoned")

    def _give_up(self, request: SimRequest, now_ns: int, kind: str = "timeout_total") -> None:
        """Cancel a request whose time at the client is over, or which the end of the drain cuts."""
        index = request.at
        replica = self.replicas[index]
        generated = replica.generated(request)
        replica.cancel(request)
        if not request.asked:
            for sequence in self._sequences.pop(request.key):
                replica.cancel(sequence)
            request.input_tokens = self._sizes(request.key)[0]
        start = request.from_iteration
        # the last stretch of a paused request is recorded already
        last = start + generated - (request.output_tokens - request.todo) - 1 if start >= 0 else -1
        if last < start:
            start = -1
        self.flights.sent.extend(
            (
                request.key,
                request.due_ns,
                index,
                request.first,
                start,
                last,
                request.input_tokens,
                request.asked,
                generated,
                request.cached,
                KIND[kind],
                now_ns,
                request.admitted_ns,
            )
        )
        why = "abandoned" if kind == "abandoned" else "previous_turn_failed"
        self._dispatcher.finished(request.key, now_ns, False, why=why)
