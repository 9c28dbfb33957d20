"""Simulate one run in virtual time: the dispatcher starts requests, and replicas serve them.

The loop jumps from one event to the next. An event is a request that is due, the end of an
iteration of a replica, a change of the number of replicas, a check of the load, or its stop. There
is no event per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.core.execution.events import InterimCheck
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
from loadgen.sim.request_lengths import RequestSize, RequestSizer
from loadgen.sim.simulated_requests import Ints, SentColumns, SimulatedRequests
from loadgen.sim.virtual_records import records_of_ended_requests


@dataclass(slots=True)
class _ScheduledCheck:
    """A repeated check of the load (an interim analysis), its next time, and what it has seen.

    Attributes:
        check: The check and its interval.
        next_ns: When it takes place next.
        requests_seen: How many of the ended requests it has been given.
    """

    check: InterimCheck
    next_ns: int
    requests_seen: int = 0


@dataclass(frozen=True, slots=True)
class _PlannedAbandonment:
    """A request whose user cancels it and leaves when it has got so many tokens."""

    request: SimRequest
    after_tokens: int


class Simulation:
    """One simulated run. `run` simulates the whole load.

    Attributes:
        requests: After `run`, what happened to each request.
        replicas: The replicas of the simulated system.
        ends: After `run`, the end times of the iterations of each replica, in ns.
        is_decided: Whether one of the checks has ended the load early.
    """

    def __init__(
        self,
        schedule: Schedule,
        request_sizer: RequestSizer,
        replicas: Sequence[Replica],
        next_replica: Router,
        bounds: LoadBounds = UNBOUNDED,
        *,
        checks: Sequence[InterimCheck] = (),
        changes: Sequence[ReplicaChange] = (),
    ) -> None:
        self.requests = SimulatedRequests()
        self.replicas = list(replicas)
        self.ends: list[NDArray[np.int64]] = []
        self.is_decided = False
        self._schedule = schedule
        self._request_size = request_sizer
        self._next_replica = next_replica
        self._dispatcher = Dispatcher(
            schedule,
            max_in_flight=bounds.max_in_flight,
            max_in_prefill=bounds.max_in_prefill,
        )
        self._is_prefill_limited = bounds.max_in_prefill is not None
        self._timeout_ns = bounds.timeout_ns
        self._checks = [_ScheduledCheck(check, check.every_ns) for check in checks]
        self._changes = deque(changes)
        self._serving = len(replicas)  # number of replicas that get requests: the first ones
        self._busy_replicas = 0  # number of replicas with an iteration in progress
        self._next_iteration = type(self.replicas[0]).next_iteration
        # In order of due time. Requests that have ended stay until those before them have ended.
        self._in_flight: deque[SimRequest] = deque()
        # Sequences that are not finished yet, of each request for values.
        self._unfinished_sequences: dict[int, list[SimRequest]] = {}
        self._abandonment_of_session: dict[int, Abandonment] = {}
        self._planned_abandonments: list[_PlannedAbandonment] = []
        self._stop_ns = bounds.stop_ns
        self._after_stop_ns = bounds.after_stop_ns
        self._end_of_run_ns = bounds.end_ns(schedule.horizon_ns)
        # The failure of the requests that are in flight when the run ends, a name of `record.KIND`.
        self._kind_at_end_of_run = "unfinished"
        self._next_control_ns = self._find_next_control()

    def run(self) -> None:
        """Simulate until every slot of the schedule has its record.

        Three times decide what happens next: when the next request is due, when the next iteration
        ends, and when the next change, check or stop of the load takes place (a control). At the
        same time, requests start before an iteration ends.
        """
        while True:
            next_due_ns = self._dispatcher.next_due_ns()
            due_ns = NEVER if next_due_ns is None else next_due_ns
            end_ns, index = self._next_iteration(self.replicas, self._quiet_until_ns(due_ns))
            control_ns = self._next_control_ns
            is_control_next = control_ns <= due_ns and control_ns <= end_ns
            if is_control_next and self._apply_control(due_ns, end_ns):
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
        """Return until when the replicas may end iterations that start and end no request.

        Until then nothing else happens that a simulated iteration could change: no request is due,
        no timeout ends, and nothing is controlled. Planned abandonments depend on the number of
        generated tokens, so every iteration has to be looked at (0).
        """
        if self._planned_abandonments:
            return 0
        # Comparisons instead of `min`, because this runs once per event.
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

    # Starting requests

    def _start_requests(self, due_ns: int, end_ns: int) -> None:
        """Start the requests that are due before anything else happens.

        As long as all replicas are busy, requests only join their queues, so all that are due up to
        the next end of an iteration can be started in one go.
        """
        if self._busy_replicas < len(self.replicas):
            # The request may wake an idle replica, whose iteration may end before the next request
            # is due.
            until_ns = due_ns
        else:
            until_ns = min(end_ns, self._end_of_run_ns, self._next_control_ns)
        for slot in self._dispatcher.take_due_slots(until_ns):
            if slot.drop_reason:
                self.requests.add_unsent(slot.slot_id, slot.due_ns, slot.drop_reason)
            else:
                self._send(slot)

    def _send(self, slot: DispatchedSlot) -> None:
        """Send the request of a slot to the next replica that serves.

        An idle replica begins an iteration at once. The router knows all replicas, so those that do
        not serve now are skipped.
        """
        size = self._request_size(slot.slot_id)
        index = self._next_replica()
        while index >= self._serving:
            index = self._next_replica()
        if size.output_tokens:
            request = self._submit_request(slot, size, index)
        else:
            request = self._submit_sequences(slot, size, index)
        if request is None:
            return
        if slot.session is not None:
            self._plan_abandonment(slot, slot.session, request)
        replica = self.replicas[index]
        if replica.end_ns == NEVER and replica.begin(slot.due_ns):
            self._busy_replicas += 1

    def _submit_request(
        self, slot: DispatchedSlot, size: RequestSize, index: int
    ) -> SimRequest | None:
        """Submit a request for tokens to a replica. Return None if the replica refuses it.

        A replica refuses a prompt that it could never serve.
        """
        replica = self.replicas[index]
        request = replica.Request(
            slot.slot_id, slot.due_ns, size.input_tokens, size.output_tokens, size.blocks
        )
        if not replica.admissible(size.input_tokens):
            self._refuse(request, index)
            return None
        request.replica_index = index
        replica.submit(request)
        self._in_flight.append(request)
        return request

    def _submit_sequences(
        self, slot: DispatchedSlot, size: RequestSize, index: int
    ) -> SimRequest | None:
        """Submit the sequences of a request for values to a replica, and return the last one.

        A request for values (embeddings, rerank) is prefilled as one sequence per text. They have
        no output (0 tokens): each of them ends with its prefill. Return None if the replica refuses
        the request.
        """
        replica = self.replicas[index]
        if not all(replica.admissible(tokens) for tokens in size.sequence_lengths):
            self._refuse(replica.Request(slot.slot_id, slot.due_ns, size.input_tokens, 0), index)
            return None
        sequences = [
            replica.Request(slot.slot_id, slot.due_ns, tokens, 0)
            for tokens in size.sequence_lengths
        ]
        for sequence in sequences:
            sequence.replica_index = index
            replica.submit(sequence)
        self._in_flight += sequences
        self._unfinished_sequences[slot.slot_id] = sequences
        return sequences[-1]

    def _refuse(self, request: SimRequest, index: int) -> None:
        """Record a request whose prompt is too long for the replica."""
        request.replica_index = index
        request.output_tokens = 0  # nothing is generated
        request.failure = KIND["http_4xx"]
        request.failed_ns = request.due_ns
        self.requests.add_sent([request])
        self._dispatcher.report_finished(request.key, request.due_ns, ok=False)

    # Ends of iterations and requests

    def _end_iteration(self, end_ns: int, index: int) -> None:
        """End the iteration of a replica, and begin its next one.

        `end_ns` is the end of the iteration, and `index` the index of the replica. It becomes idle
        if it has nothing to compute.
        """
        replica = self.replicas[index]
        done = replica.finish()
        if self._is_prefill_limited:
            for request in replica.started:
                self._dispatcher.report_first_output(request.key, end_ns)
        if done:
            self._complete(done, end_ns)
        if self._planned_abandonments:
            self._apply_abandonments(index, end_ns)
        self._cancel_timed_out(end_ns)
        if not replica.begin(end_ns):
            self._busy_replicas -= 1
        if replica.paused:
            self.requests.add_pauses(replica.paused)

    def _complete(self, done: list[SimRequest], end_ns: int) -> None:
        """Record requests that have got their last token, and report them to the dispatcher.

        A request for values consists of sequences and is complete with its last one. The dispatcher
        has to know of the end, because in a closed loop or a session the next request follows it.
        """
        if self._unfinished_sequences:
            done = [request for request in done if self._is_last_sequence(request)]
        report_finished = self._dispatcher.report_finished
        for request in done:
            report_finished(request.key, end_ns, ok=True)
        self.requests.add_sent(done)

    def _is_last_sequence(self, sequence: SimRequest) -> bool:
        """Return whether a request is done with this sequence.

        The sequence that is done last stands for all sequences of its request.
        """
        if sequence.requested_tokens:
            return True
        unfinished = self._unfinished_sequences[sequence.key]
        unfinished.remove(sequence)
        if unfinished:
            return False
        del self._unfinished_sequences[sequence.key]
        sequence.input_tokens = self._request_size(sequence.key).input_tokens
        return True

    def _cancel_timed_out(self, now_ns: int) -> None:
        """Cancel the requests whose timeout is over.

        All requests have the same timeout, so the first one in order of due time times out first.
        """
        in_flight = self._in_flight
        while in_flight:
            request = in_flight[0]
            if request.state != DONE:
                if request.due_ns + self._timeout_ns > now_ns:
                    return
                self._cancel(request, now_ns, "timeout_total")
            in_flight.popleft()

    def _cancel(self, request: SimRequest, now_ns: int, kind: str) -> None:
        """Cancel a request in flight and record it as failed.

        Args:
            request: The request, or one of the sequences of a request for values.
            now_ns: The time of the failure.
            kind: Why it fails, a name of `record.KIND`.
        """
        replica = self.replicas[request.replica_index]
        generated_tokens = replica.generated(request)
        replica.cancel(request)
        if not request.requested_tokens:
            for sequence in self._unfinished_sequences.pop(request.key):
                replica.cancel(sequence)
            request.input_tokens = self._request_size(request.key).input_tokens
        _shorten_to_generated(request, generated_tokens)
        request.output_tokens = generated_tokens
        request.failure = KIND[kind]
        request.failed_ns = now_ns
        self.requests.add_sent([request])
        reason = "abandoned" if kind == "abandoned" else "previous_turn_failed"
        self._dispatcher.report_finished(request.key, now_ns, ok=False, drop_reason=reason)

    # Users who leave

    def _plan_abandonment(self, slot: DispatchedSlot, session: int, request: SimRequest) -> None:
        """Note when the user of a task leaves, if that is during this request.

        A task says in which turn its user leaves, and after how many tokens. It is looked up once
        per task, with its first turn.
        """
        if slot.turn == 0:
            abandonment = self._schedule.sessions.get(session).abandonment
            if abandonment is not None:
                self._abandonment_of_session[session] = abandonment
        abandonment = self._abandonment_of_session.get(session)
        if abandonment is not None and abandonment.turn == slot.turn:
            planned = _PlannedAbandonment(request, abandonment.tokens)
            self._planned_abandonments.append(planned)

    def _apply_abandonments(self, index: int, now_ns: int) -> None:
        """Cancel the requests of one replica whose users leave now.

        The other requests of their tasks are cancelled, too.
        """
        replica = self.replicas[index]
        self._planned_abandonments = [
            planned for planned in self._planned_abandonments if planned.request.state != DONE
        ]
        for planned in self._planned_abandonments:
            request = planned.request
            if request.replica_index != index or request.state == DONE:
                continue
            if replica.generated(request) < planned.after_tokens:
                continue
            slots_of_same_task = set(self._dispatcher.other_slots_in_flight(request.key))
            self._cancel(request, now_ns, "abandoned")
            for in_flight in self._in_flight:
                if in_flight.key in slots_of_same_task and in_flight.state != DONE:
                    self._cancel(in_flight, now_ns, "abandoned")

    # Changes of replicas, checks and the stop of the load

    def _find_next_control(self) -> int:
        """Return when the next control takes place: a change, a check or the stop of the load."""
        return min(self._next_change_ns(), self._next_check_ns(), self._stop_ns)

    def _next_change_ns(self) -> int:
        """Return when the number of replicas changes next, or NEVER."""
        return self._changes[0].at_ns if self._changes else NEVER

    def _next_check_ns(self) -> int:
        """Return when the load is checked next, or NEVER."""
        return min((scheduled.next_ns for scheduled in self._checks), default=NEVER)

    def _apply_control(self, due_ns: int, end_ns: int) -> bool:
        """Apply what comes before the next due request and the next end of an iteration.

        Return False if there is nothing to apply. If several things have the same time, a change of
        replicas comes first, then starts of requests and ends of iterations, then a stop of the
        load, then a check of it.
        """
        next_event_ns = min(due_ns, end_ns)
        change_ns = self._next_change_ns()
        check_ns = self._next_check_ns()
        stop_ns = self._stop_ns
        last_ns_for_change = min(next_event_ns, check_ns, stop_ns, self._end_of_run_ns)
        if change_ns < NEVER and change_ns <= last_ns_for_change:
            self._change_replicas()
        elif check_ns < min(next_event_ns, stop_ns):
            if next_event_ns == NEVER:
                self._checks.clear()  # nothing is left to check
            else:
                self._check_load(check_ns)
        elif stop_ns < next_event_ns:
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
        """Start no more requests. Those in flight may end within the drain."""
        self._dispatcher.stop()
        self._checks.clear()
        self._end_of_run_ns = min(self._end_of_run_ns, self._stop_ns + self._after_stop_ns)
        self._kind_at_end_of_run = "interrupted"
        self._stop_ns = NEVER

    def _check_load(self, now_ns: int) -> None:
        """Pass the requests that have ended since its last check to each check that is due.

        A check may then end the load: the load is stopped now, and there are no more checks. Their
        times are multiples of their intervals.
        """
        for scheduled in self._checks:
            if scheduled.next_ns != now_ns:
                continue
            scheduled.next_ns += scheduled.check.every_ns
            records = self._records_since(scheduled.requests_seen)
            scheduled.requests_seen = self.requests.count_sent()
            if scheduled.check.ends(now_ns, records):
                self.is_decided = True
        if self.is_decided:
            self._stop_ns = now_ns
            self._checks.clear()

    def _records_since(self, index: int) -> NDArray[np.void]:
        """Return the records of the requests that have ended, without the first `index` of them.

        The records are those that a check of the load needs, built while the simulation goes on.
        """
        sent = self.requests.sent_since(index)
        return records_of_ended_requests(
            sent,
            first_ns=self._iteration_ends(sent, sent.first_iteration),
            last_ns=self._iteration_ends(sent, sent.last_iteration),
            schedule=self._schedule,
        )

    def _iteration_ends(self, sent: SentColumns, iterations: Ints) -> Ints:
        """Return when an iteration ended, for each sent request; -1 if the request has none.

        `iterations` has one iteration per request, such as that of its first token: a number of the
        iterations of the request's replica, or -1. After the run, `virtual_records` looks up all
        requests at once; here they are few, and the replicas are still at work.
        """
        ends_ns = np.full(len(iterations), -1, np.int64)
        for row in np.flatnonzero(iterations >= 0).tolist():
            replica = self.replicas[sent.replica[row]]
            ends_ns[row] = replica.end_of(int(iterations[row]))
        return ends_ns

    def _end_run(self) -> None:
        """Cancel what is in flight at the end of the run, and record what was never sent.

        Without an end of the run (a drain without limit), all requests have ended by now, and only
        slots that were never started are left.
        """
        if self._end_of_run_ns < NEVER:
            self._cancel_timed_out(self._end_of_run_ns)
            # Before the cancellations, because a failed turn would drop the turns after it for
            # another reason.
            self._dispatcher.stop()
            for request in self._in_flight:
                if request.state != DONE:
                    self._cancel(request, self._end_of_run_ns, self._kind_at_end_of_run)
        self._dispatcher.stop()
        for slot in self._dispatcher.unsent_slots():
            reason = slot.drop_reason
            if reason == "interrupted":  # no user interrupts a virtual run: its drain has ended
                reason = self._kind_at_end_of_run
            self.requests.add_unsent(slot.slot_id, slot.due_ns, reason)


def _shorten_to_generated(request: SimRequest, generated_tokens: int) -> None:
    """Set the iterations of a cancelled request to those in which it really got tokens.

    `last_iteration` was planned when its prefill ended, for the whole output. Only the tokens since
    the last admission are meant, because those from before a pause are recorded already.
    """
    if request.resumed_iteration < 0:
        request.last_iteration = -1
        return
    tokens_before_pause = request.output_tokens - request.remaining_tokens
    tokens_since_admission = generated_tokens - tokens_before_pause
    request.last_iteration = request.resumed_iteration + tokens_since_admission - 1
    if not tokens_since_admission:
        request.resumed_iteration = -1
