"""Simulates one run in virtual time. Pure.

The dispatcher starts requests, and simulated replicas serve them.

The loop jumps from one event to the next: a request is due, an iteration of a replica ends, the
number of serving replicas changes, the load is checked, or the load stops. There is no event per
token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.core.execution.events import Look
from loadgen.core.requests.task_graphs import Abandonment
from loadgen.core.results.record import KIND
from loadgen.core.schedule.dispatched_slots import DispatchedSlot
from loadgen.core.schedule.dispatcher import Dispatcher
from loadgen.core.schedule.schedule import Schedule
from loadgen.sim.engine.implementation import Replica, SimRequest
from loadgen.sim.engine.replica import DONE, NEVER
from loadgen.sim.engine.routing import Router
from loadgen.sim.engine.system import ReplicaChange
from loadgen.sim.load_bounds import UNBOUNDED, LoadBounds
from loadgen.sim.request_lengths import RequestSizer
from loadgen.sim.simulated_requests import Ints, SentColumns, SimulatedRequests
from loadgen.sim.virtual_records import records_of_ended_requests


@dataclass(slots=True)
class _ScheduledLook:
    """A look at the load that repeats, and what it has seen so far."""

    look: Look
    next_ns: int
    rows_seen: int = 0


@dataclass(frozen=True, slots=True)
class _Departure:
    """The user of a request goes away when it has got so many tokens."""

    request: SimRequest
    after_tokens: int


class Simulation:
    """One simulated run. `run` simulates the whole load; then `requests` holds what happened.

    Each of `looks` may end the load early; then `is_decided` is True. `changes` are in order of
    time.
    """

    def __init__(
        self,
        schedule: Schedule,
        request_sizer: RequestSizer,
        replicas: Sequence[Replica],
        next_replica: Router,
        bounds: LoadBounds = UNBOUNDED,
        *,
        looks: Sequence[Look] = (),
        changes: Sequence[ReplicaChange] = (),
    ) -> None:
        self.requests = SimulatedRequests()
        self.replicas = list(replicas)
        self.is_decided = False
        self.ends: list[
            NDArray[np.int64]
        ] = []  # end times of the iterations of each replica, after `run`
        self._schedule = schedule
        self._request_size = request_sizer
        self._next_replica = next_replica
        self._dispatcher = Dispatcher(
            schedule,
            max_in_flight=bounds.max_in_flight,
            max_in_prefill=bounds.max_in_prefill,
        )
        self._looks = [_ScheduledLook(look, look.every_ns) for look in looks]
        self._changes = deque(changes)
        self._serving = len(replicas)
        self._next_iteration = type(self.replicas[0]).next_iteration
        self._busy = 0  # replicas with an iteration in progress
        self._in_flight: deque[SimRequest] = deque()  # in order of due time; may contain ended ones
        self._sequences: dict[
            int, list[SimRequest]
        ] = {}  # requests for values -> unfinished sequences
        self._leaving_users: dict[int, Abandonment] = {}  # by session
        self._departures: list[_Departure] = []
        self._is_prefill_limited = bounds.max_in_prefill is not None
        self._timeout_ns = bounds.timeout_ns
        self._stop_ns = bounds.stop_ns
        self._after_stop_ns = bounds.after_stop_ns
        self._end_of_run_ns = bounds.end_ns(schedule.horizon_ns)
        self._cut_kind = "unfinished"  # failure of requests that the end of the run cuts
        self._next_control_ns = self._find_next_control()

    def run(self) -> None:
        """Simulate until every slot of the schedule has its record."""
        while True:
            next_due_ns = self._dispatcher.next_due_ns()
            due_ns = NEVER if next_due_ns is None else next_due_ns
            end_ns, index = self._next_iteration(self.replicas, self._quiet_until_ns(due_ns))
            control_ns = self._next_control_ns
            if control_ns <= due_ns and control_ns <= end_ns and self._control(due_ns, end_ns):
                continue
            if due_ns < NEVER and due_ns <= end_ns and due_ns <= self._end_of_run_ns:
                self._start_requests(due_ns, end_ns)
            elif end_ns < NEVER and end_ns <= self._end_of_run_ns:
                self._end_iteration(end_ns, index)
            else:
                break
        self._end_run()
        self.ends = [np.asarray(replica.ends, np.int64) for replica in self.replicas]

    def _quiet_until_ns(self, due_ns: int) -> int:
        """Return before when iterations that start and end no request need no attention."""
        if self._departures:
            return 0
        until_ns = self._next_control_ns
        if due_ns < until_ns:
            until_ns = due_ns
        if self._end_of_run_ns < until_ns:
            until_ns = self._end_of_run_ns
        if self._in_flight:
            timeout_ns = self._in_flight[0].due_ns + self._timeout_ns
            if timeout_ns < until_ns:
                until_ns = timeout_ns
        return until_ns

    def _start_requests(self, due_ns: int, end_ns: int) -> None:
        """Start the requests that are due before anything else happens."""
        until_ns = min(end_ns, self._end_of_run_ns, self._next_control_ns)
        if self._busy < len(self.replicas):
            # The request may wake an idle replica, whose iteration may end before the next request
            # is due.
            until_ns = due_ns
        for start in self._dispatcher.take_due_slots(until_ns):
            if start.drop_reason:
                self.requests.add_unsent(start.slot_id, start.due_ns, start.drop_reason)
            else:
                self._send(start)

    def _send(self, start: DispatchedSlot) -> None:
        """Send one request to the next replica that serves."""
        number = start.slot_id
        due_ns = start.due_ns
        size = self._request_size(number)
        index = self._next_replica()
        while index >= self._serving:
            index = self._next_replica()
        replica = self.replicas[index]
        if size.output_tokens:
            request = replica.Request(
                number, due_ns, size.input_tokens, size.output_tokens, size.blocks
            )
            is_accepted = replica.admissible(size.input_tokens)
            if is_accepted:
                self._submit(request, replica, index)
        else:
            lengths = size.sequence_lengths
            request = replica.Request(number, due_ns, size.input_tokens, 0)
            is_accepted = all(replica.admissible(tokens) for tokens in lengths)
            if is_accepted:
                request = self._submit_sequences(start, lengths, replica, index)
        if not is_accepted:
            self._refuse(request, index)
            return
        if start.session is not None:
            self._plan_departure(start, start.session, request)
        if replica.end_ns == NEVER and replica.begin(due_ns):
            self._busy += 1

    def _submit(self, request: SimRequest, replica: Replica, index: int) -> None:
        request.replica_index = index
        replica.submit(request)
        self._in_flight.append(request)

    def _submit_sequences(
        self, start: DispatchedSlot, lengths: Sequence[int], replica: Replica, index: int
    ) -> SimRequest:
        """Submit the sequences of a request for values, and return the last one."""
        sequences = [replica.Request(start.slot_id, start.due_ns, tokens, 0) for tokens in lengths]
        for sequence in sequences:
            self._submit(sequence, replica, index)
        self._sequences[start.slot_id] = list(sequences)
        return sequences[-1]

    def _refuse(self, request: SimRequest, index: int) -> None:
        """Record a request whose prompt is too long for the replica."""
        request.replica_index = index
        request.output_tokens = 0
        request.failure = KIND["http_4xx"]
        request.failed_ns = request.due_ns
        self.requests.add_sent([request])
        self._dispatcher.report_finished(request.key, request.due_ns, ok=False)

    def _plan_departure(self, start: DispatchedSlot, session: int, request: SimRequest) -> None:
        """Note when the user of a task goes away, if that is during this request."""
        if start.turn == 0:
            leaving = self._schedule.sessions.get(session).abandonment
            if leaving is not None:
                self._leaving_users[session] = leaving
        leaving = self._leaving_users.get(session)
        if leaving is not None and leaving.turn == start.turn:
            self._departures.append(_Departure(request, leaving.tokens))

    def _end_iteration(self, end_ns: int, index: int) -> None:
        """End the iteration that ends first, and begin the next one of its replica."""
        replica = self.replicas[index]
        done = replica.finish()
        if self._is_prefill_limited:
            for request in replica.started:
                self._dispatcher.report_first_output(request.key, end_ns)
        if done:
            self._complete(done, end_ns)
        if self._departures:
            self._apply_departures(index, end_ns)
        self._cancel_timed_out(end_ns)
        if not replica.begin(end_ns):
            self._busy -= 1
        if replica.paused:
            self.requests.add_pauses(replica.paused)

    def _complete(self, done: list[SimRequest], end_ns: int) -> None:
        """Record requests that have got their last token, and report them to the dispatcher."""
        if self._sequences:
            done = [request for request in done if self._is_last_sequence(request)]
        finished = self._dispatcher.report_finished
        for request in done:
            finished(request.key, end_ns, ok=True)
        self.requests.add_sent(done)

    def _is_last_sequence(self, request: SimRequest) -> bool:
        """Return whether a request is done with this sequence.

        The sequence that is done last stands for all sequences of its request.
        """
        if request.requested_tokens:
            return True
        sequences = self._sequences[request.key]
        sequences.remove(request)
        if sequences:
            return False
        del self._sequences[request.key]
        request.input_tokens = self._request_size(request.key).input_tokens
        return True

    def _apply_departures(self, index: int, now_ns: int) -> None:
        """Cancel the requests of one replica whose users go away now.

        The other requests of their tasks are cancelled, too.
        """
        replica = self.replicas[index]
        self._departures = [one for one in self._departures if one.request.state != DONE]
        for departure in self._departures:
            request = departure.request
            if request.replica_index != index or request.state == DONE:
                continue
            if replica.generated(request) < departure.after_tokens:
                continue
            of_same_task = set(self._dispatcher.other_slots_in_flight(request.key))
            self._cancel(request, now_ns, "abandoned")
            for other in self._in_flight:
                if other.key in of_same_task and other.state != DONE:
                    self._cancel(other, now_ns, "abandoned")

    def _cancel_timed_out(self, now_ns: int) -> None:
        """Cancel the requests whose time at the client is over."""
        in_flight = self._in_flight
        while in_flight:
            request = in_flight[0]
            if request.state != DONE:
                if request.due_ns + self._timeout_ns > now_ns:
                    return
                self._cancel(request, now_ns, "timeout_total")
            in_flight.popleft()

    def _cancel(self, request: SimRequest, now_ns: int, kind: str) -> None:
        """Cancel a request in flight and record it; `kind` is a name of `record.KIND`."""
        replica = self.replicas[request.replica_index]
        generated = replica.generated(request)
        replica.cancel(request)
        if not request.requested_tokens:
            for sequence in self._sequences.pop(request.key):
                replica.cancel(sequence)
            request.input_tokens = self._request_size(request.key).input_tokens
        if request.resumed_iteration >= 0:
            # Tokens from before a pause are recorded already.
            tokens = generated - (request.output_tokens - request.remaining_tokens)
            request.last_iteration = request.resumed_iteration + tokens - 1
        else:
            request.last_iteration = -1
        if request.last_iteration < request.resumed_iteration:
            request.resumed_iteration = -1
        request.output_tokens = generated
        request.failure = KIND[kind]
        request.failed_ns = now_ns
        self.requests.add_sent([request])
        reason = "abandoned" if kind == "abandoned" else "previous_turn_failed"
        self._dispatcher.report_finished(request.key, now_ns, ok=False, drop_reason=reason)

    def _end_run(self) -> None:
        """Cut what is in flight at the end of the run, and record what was never sent."""
        if self._end_of_run_ns < NEVER:
            self._cancel_timed_out(self._end_of_run_ns)
            # Before the cut, because a failed turn would drop the turns after it for another
            # reason.
            self._dispatcher.stop()
            for request in self._in_flight:
                if request.state != DONE:
                    self._cancel(request, self._end_of_run_ns, self._cut_kind)
        self._dispatcher.stop()
        for start in self._dispatcher.unsent_slots():
            # Nobody interrupts a virtual run: the end of the drain left these.
            reason = self._cut_kind if start.drop_reason == "interrupted" else start.drop_reason
            self.requests.add_unsent(start.slot_id, start.due_ns, reason)

    def _find_next_control(self) -> int:
        """Return when the load is looked at, stopped, or its replicas change next."""
        return min(self._next_change_ns(), self._next_look_ns(), self._stop_ns)

    def _next_change_ns(self) -> int:
        return self._changes[0].at_ns if self._changes else NEVER

    def _next_look_ns(self) -> int:
        return min((one.next_ns for one in self._looks), default=NEVER)

    def _control(self, due_ns: int, end_ns: int) -> bool:
        """Do what comes before the next start and the next end of an iteration.

        Return False if there is nothing to do. At the same instant, a change of replicas comes
        first, then starts and ends of iterations, then a stop of the load, then a look at it.
        """
        change_ns = self._next_change_ns()
        look_ns = self._next_look_ns()
        stop_ns = self._stop_ns
        if change_ns < NEVER and change_ns <= min(
            due_ns, end_ns, look_ns, stop_ns, self._end_of_run_ns
        ):
            self._change_replicas()
        elif look_ns < min(due_ns, end_ns, stop_ns):
            if due_ns == end_ns == NEVER:
                self._looks.clear()  # all is over
            else:
                self._look(look_ns)
        elif stop_ns < min(due_ns, end_ns):
            self._stop_load()
        else:
            return False
        self._next_control_ns = self._find_next_control()
        return True

    def _change_replicas(self) -> None:
        """Change how many replicas serve.

        A new replica has an empty cache. Requests in flight at a removed replica fail.
        """
        change = self._changes.popleft()
        for replica in self.replicas[self._serving : change.serving]:
            replica.reset_cache()
        self._serving = change.serving
        for request in self._in_flight:
            if request.replica_index >= change.serving and request.state != DONE:
                self._cancel(request, change.at_ns, "reset")

    def _stop_load(self) -> None:
        """Start nothing more. What is in flight may end within the drain."""
        self._dispatcher.stop()
        self._looks.clear()
        self._end_of_run_ns = min(self._end_of_run_ns, self._stop_ns + self._after_stop_ns)
        self._cut_kind = "interrupted"
        self._stop_ns = NEVER

    def _look(self, now_ns: int) -> None:
        """Show each look that is due what has ended since it was shown something last."""
        for one in self._looks:
            if one.next_ns != now_ns:
                continue
            one.next_ns += one.look.every_ns
            rows = self._rows_since(one.rows_seen)
            one.rows_seen = self.requests.count_sent()
            if one.look.ends(now_ns, rows):
                self.is_decided = True
        if self.is_decided:
            self._stop_ns = now_ns
            self._looks.clear()

    def _rows_since(self, index: int) -> NDArray[np.void]:
        """Return the records of the requests that have ended, without the first `index` of them."""
        sent = self.requests.sent_since(index)
        return records_of_ended_requests(
            sent,
            first_ns=self._iteration_ends(sent, sent.first_iteration),
            last_ns=self._iteration_ends(sent, sent.last_iteration),
            schedule=self._schedule,
        )

    def _iteration_ends(self, sent: SentColumns, iterations: Ints) -> Ints:
        """Return when the iterations of sent requests ended, and -1 for an iteration of -1."""
        pairs = zip(sent.replica.tolist(), iterations.tolist(), strict=True)
        return np.array(
            [
                -1 if iteration < 0 else self.replicas[index].end_of(iteration)
                for index, iteration in pairs
            ],
            np.int64,
        )
