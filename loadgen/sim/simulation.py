"""Simulate one run in virtual time: the dispatcher starts requests, and replicas serve them.

The loop jumps from one event to the next. An event is a request that is due, the end of an
iteration of a replica, or a scheduled action: a change of the number of replicas, an interim check
of the load, or the stop of the load. There is no event per token.

A non-generative request (embeddings, rerank) asks for values instead of output tokens. It has one
sequence per text, and each sequence ends with its prefill.
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
        seen_count: How many of the ended requests it has been given.
    """

    check: InterimCheck
    next_ns: int
    seen_count: int = 0


@dataclass(frozen=True, slots=True)
class _PlannedAbandonment:
    """A request in flight whose user leaves as soon as it has `after_tokens` output tokens."""

    request: SimRequest
    after_tokens: int


class _Abandonments:
    """The users who leave in the middle of a session, according to the workload.

    Attributes:
        planned: The requests in flight during which a user leaves.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.planned: list[_PlannedAbandonment] = []
        self._schedule = schedule
        self._abandonment_by_session: dict[int, Abandonment] = {}

    def plan(self, slot: DispatchedSlot, session: int, request: SimRequest) -> None:
        """Add the request of a slot to `planned` if its user leaves during this turn.

        The session says in which turn its user leaves, and after how many tokens. It is looked up
        once per session, with the first turn, because building a session is expensive.
        """
        if slot.turn == 0:
            session_abandonment = self._schedule.sessions.get(session).abandonment
            if session_abandonment is not None:
                self._abandonment_by_session[session] = session_abandonment
        abandonment = self._abandonment_by_session.get(session)
        if abandonment is not None and abandonment.turn == slot.turn:
            self.planned.append(_PlannedAbandonment(request, abandonment.tokens))

    def remove_done(self) -> None:
        """Remove the requests that ended before their users left."""
        self.planned = [entry for entry in self.planned if entry.request.state != DONE]


class Simulation:
    """One simulated run. `run` simulates the whole load.

    Attributes:
        requests: After `run`, what happened to each request.
        replicas: The replicas of the simulated system.
        iteration_ends_ns: After `run`, the end times of the iterations of each replica.
        is_ended_by_check: Whether one of the checks has ended the load early.
    """

    def __init__(
        self,
        schedule: Schedule,
        request_sizer: RequestSizer,
        replicas: Sequence[Replica],
        choose_replica: Router,
        bounds: LoadBounds = UNBOUNDED,
        *,
        checks: Sequence[InterimCheck] = (),
        changes: Sequence[ReplicaChange] = (),
    ) -> None:
        """Prepare the simulation of a schedule.

        Args:
            schedule: When requests start.
            request_sizer: Returns the lengths of the request of a slot of the schedule.
            replicas: The replicas that serve the requests. They are idle.
            choose_replica: Returns the index of the next request's replica at each call.
            bounds: How many requests may be in flight, and when the load ends.
            checks: Interim checks of the load, each of which may end it early.
            changes: Changes of the number of replicas, in order of time.
        """
        self.requests = SimulatedRequests()
        self.replicas = list(replicas)
        self.iteration_ends_ns: list[Ints] = []
        self.is_ended_by_check = False

        self._schedule = schedule
        self._request_sizer = request_sizer
        self._dispatcher = Dispatcher(
            schedule,
            max_in_flight=bounds.max_in_flight,
            max_in_prefill=bounds.max_in_prefill,
        )
        self._is_prefill_limited = bounds.max_in_prefill is not None

        # Replicas. Only the first `_serving_count` ones get requests.
        self._choose_replica = choose_replica
        self._advance_to_next_event = type(self.replicas[0]).advance_to_next_event
        self._serving_count = len(replicas)
        self._busy_count = 0  # replicas with an iteration in progress

        # Requests in flight, in order of due time. Those that have ended stay in the queue until
        # all before them have ended, because only its ends can be changed quickly.
        self._in_flight: deque[SimRequest] = deque()
        self._timeout_ns = bounds.timeout_ns
        # The sequences of each non-generative request that are not finished, by its key.
        self._unfinished_sequences: dict[int, list[SimRequest]] = {}
        self._abandonments = _Abandonments(schedule)

        # Scheduled actions: changes of the number of replicas, checks and the stop of the load.
        self._changes = deque(changes)
        self._checks = [_ScheduledCheck(check, next_ns=check.every_ns) for check in checks]
        self._stop_ns = bounds.stop_ns
        self._drain_after_stop_ns = bounds.drain_after_stop_ns
        self._next_action_ns = self._find_next_action_ns()

        # At this time, requests in flight are cancelled. They fail with this name of `record.KIND`.
        self._end_of_run_ns = bounds.end_ns(schedule.horizon_ns)
        self._failure_at_end_of_run = "unfinished"

    def run(self) -> None:
        """Simulate until every slot of the schedule has its record.

        Each turn of the loop handles what comes next: a scheduled action, requests that are due, or
        the end of an iteration. At the same time, requests start before an iteration ends.
        """
        while True:
            next_due_ns = self._dispatcher.next_due_ns()
            due_ns = NEVER if next_due_ns is None else next_due_ns
            until_ns = self._uneventful_until_ns(due_ns)
            end_ns, replica_index = self._advance_to_next_event(self.replicas, until_ns)
            next_event_ns = due_ns if due_ns <= end_ns else end_ns

            if self._next_action_ns <= next_event_ns:
                has_acted = self._apply_scheduled_action(next_event_ns)
                if has_acted:
                    continue
            if next_event_ns >= NEVER or next_event_ns > self._end_of_run_ns:
                break
            if due_ns <= end_ns:
                self._start_requests(due_ns, end_ns)
            else:
                self._end_iteration(end_ns, replica_index)
        self._end_run()
        self.iteration_ends_ns = [
            np.asarray(replica.iteration_ends_ns, np.int64) for replica in self.replicas
        ]

    def _uneventful_until_ns(self, due_ns: int) -> int:
        """Return until when iterations may pass without this class if they are uneventful.

        An iteration is uneventful if no request starts or ends with it. Until the returned time, no
        request is due (the next one is at `due_ns`) or times out, no scheduled action takes place,
        and the run does not end.

        A planned abandonment depends on the number of generated tokens. As long as there is one,
        every iteration has to be handled, so the result is 0.
        """
        if self._abandonments.planned:
            return 0
        # Comparisons instead of `min`, because this runs once per event.
        until_ns = self._next_action_ns
        if due_ns < until_ns:
            until_ns = due_ns
        if self._end_of_run_ns < until_ns:
            until_ns = self._end_of_run_ns
        if self._in_flight:
            timeout_ns = self._in_flight[0].due_ns + self._timeout_ns
            if timeout_ns < until_ns:
                until_ns = timeout_ns
        return until_ns

    # Starts of requests

    def _start_requests(self, due_ns: int, end_ns: int) -> None:
        """Start the requests that are due before anything else happens.

        The next request is due at `due_ns`, and the next iteration ends at `end_ns`. As long as all
        replicas are busy, requests only join their queues, so all that are due up to `end_ns` can
        be started at once.
        """
        if self._busy_count < len(self.replicas):
            # The request may wake an idle replica, whose iteration may end before the next request
            # is due.
            until_ns = due_ns
        else:
            until_ns = min(end_ns, self._end_of_run_ns, self._next_action_ns)
        for slot in self._dispatcher.take_due_slots(until_ns):
            if slot.drop_reason:
                self.requests.add_unsent(slot.slot_id, slot.due_ns, slot.drop_reason)
            else:
                self._send_request(slot)

    def _send_request(self, slot: DispatchedSlot) -> None:
        """Send the request of a slot to the next serving replica.

        An idle replica begins an iteration at once. The router chooses from all replicas, so it is
        asked again if its choice does not serve now.
        """
        size = self._request_sizer(slot.slot_id)
        replica_index = self._choose_replica()
        while replica_index >= self._serving_count:
            replica_index = self._choose_replica()

        if size.output_tokens:
            request = self._submit_request(slot, size, replica_index)
        else:
            request = self._submit_non_generative(slot, size, replica_index)
        if request is None:
            return
        if slot.session is not None:
            self._abandonments.plan(slot, slot.session, request)

        replica = self.replicas[replica_index]
        is_idle = replica.end_ns == NEVER
        if is_idle and replica.begin_iteration(slot.due_ns):
            self._busy_count += 1

    def _submit_request(
        self, slot: DispatchedSlot, size: RequestSize, replica_index: int
    ) -> SimRequest | None:
        """Submit a request for output tokens to a replica. Return None if it is refused.

        A replica refuses a prompt that it could never serve.
        """
        replica = self.replicas[replica_index]
        request = replica.Request(
            slot.slot_id, slot.due_ns, size.input_tokens, size.output_tokens, size.blocks
        )
        if not replica.can_serve(size.input_tokens):
            self._record_refusal(request, replica_index)
            return None
        request.replica_index = replica_index
        replica.submit(request)
        self._in_flight.append(request)
        return request

    def _submit_non_generative(
        self, slot: DispatchedSlot, size: RequestSize, replica_index: int
    ) -> SimRequest | None:
        """Submit a non-generative request (embeddings, rerank). Return None if it is refused.

        Each text of the request is a sequence without output tokens, which ends with its prefill.
        The request is complete when all of them are. The last sequence is returned, because any of
        them can stand for the request.
        """
        replica = self.replicas[replica_index]
        if not all(replica.can_serve(tokens) for tokens in size.sequence_lengths):
            request = replica.Request(slot.slot_id, slot.due_ns, size.input_tokens, 0)
            self._record_refusal(request, replica_index)
            return None
        sequences = [
            replica.Request(slot.slot_id, slot.due_ns, tokens, 0)
            for tokens in size.sequence_lengths
        ]
        for sequence in sequences:
            sequence.replica_index = replica_index
            replica.submit(sequence)
        self._in_flight += sequences
        self._unfinished_sequences[slot.slot_id] = sequences
        return sequences[-1]

    def _record_refusal(self, request: SimRequest, replica_index: int) -> None:
        """Record a request that fails at once, because its prompt is too long for the replica."""
        request.replica_index = replica_index
        request.output_tokens = 0  # nothing is generated
        request.failure = KIND["http_4xx"]
        request.failed_ns = request.due_ns
        self.requests.add_sent([request])
        self._dispatcher.report_finished(request.key, request.due_ns, ok=False)

    # Ends of iterations and requests

    def _end_iteration(self, end_ns: int, replica_index: int) -> None:
        """End the current iteration of a replica at `end_ns`, and begin its next one.

        Requests that are done with it are recorded, and those that end at the same time for another
        reason (a timeout, or a user who leaves) are cancelled. The replica becomes idle if it has
        nothing left to compute.
        """
        replica = self.replicas[replica_index]
        done_requests = replica.end_iteration()
        if self._is_prefill_limited:
            for request in replica.first_token_requests:
                self._dispatcher.report_first_output(request.key, end_ns)
        if done_requests:
            self._complete_requests(done_requests, end_ns)
        if self._abandonments.planned:
            self._apply_abandonments(replica_index, end_ns)
        self._cancel_timed_out(end_ns)

        has_work = replica.begin_iteration(end_ns)
        if not has_work:
            self._busy_count -= 1
        if replica.recent_pauses:
            self.requests.add_pauses(replica.recent_pauses)

    def _complete_requests(self, done_requests: list[SimRequest], end_ns: int) -> None:
        """Record requests that have succeeded, and report them to the dispatcher.

        The dispatcher has to know of the end, because in a closed loop or a session the next
        request follows it.
        """
        if self._unfinished_sequences:
            done_requests = self._merge_sequences(done_requests)
        report_finished = self._dispatcher.report_finished
        for request in done_requests:
            report_finished(request.key, end_ns, ok=True)
        self.requests.add_sent(done_requests)

    def _merge_sequences(self, done_requests: list[SimRequest]) -> list[SimRequest]:
        """Return the requests that are complete, each once.

        Of a non-generative request, each sequence is done for itself. The last one that is done
        completes the request, and stands for all of them with the sum of their tokens.
        """
        complete_requests = []
        for request in done_requests:
            if request.requested_tokens:  # no non-generative request
                complete_requests.append(request)
                continue
            unfinished = self._unfinished_sequences[request.key]
            unfinished.remove(request)
            if not unfinished:
                del self._unfinished_sequences[request.key]
                request.input_tokens = self._request_sizer(request.key).input_tokens
                complete_requests.append(request)
        return complete_requests

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
                self._cancel_request(request, now_ns, "timeout_total")
            in_flight.popleft()

    def _cancel_request(self, request: SimRequest, now_ns: int, failure: str) -> None:
        """Cancel a request in flight, record it as failed, and report it to the dispatcher.

        The dispatcher then drops the later turns of the same session.

        Args:
            request: The request, or one of the sequences of a non-generative request.
            now_ns: The time of the failure.
            failure: Why it fails, a name of `record.KIND`.
        """
        replica = self.replicas[request.replica_index]
        generated_tokens = replica.count_generated_tokens(request)
        replica.cancel(request)
        if not request.requested_tokens:  # a non-generative request
            for sequence in self._unfinished_sequences.pop(request.key):
                replica.cancel(sequence)
            request.input_tokens = self._request_sizer(request.key).input_tokens

        _shorten_output(request, generated_tokens)
        request.failure = KIND[failure]
        request.failed_ns = now_ns
        self.requests.add_sent([request])
        drop_reason = "abandoned" if failure == "abandoned" else "previous_turn_failed"
        self._dispatcher.report_finished(request.key, now_ns, ok=False, drop_reason=drop_reason)

    def _apply_abandonments(self, replica_index: int, now_ns: int) -> None:
        """Cancel the requests of a replica whose users leave at the end of this iteration.

        A user leaves when the request has enough output tokens. The user takes part in one session
        (a task may have several requests in flight), so all its requests are cancelled.
        """
        replica = self.replicas[replica_index]
        self._abandonments.remove_done()
        for entry in self._abandonments.planned:
            request = entry.request
            # A request may be done by now, because another one of its session was abandoned.
            if request.replica_index != replica_index or request.state == DONE:
                continue
            if replica.count_generated_tokens(request) < entry.after_tokens:
                continue
            slots_of_session = set(self._dispatcher.other_slots_in_flight(request.key))
            self._cancel_request(request, now_ns, "abandoned")
            for in_flight in self._in_flight:
                if in_flight.key in slots_of_session and in_flight.state != DONE:
                    self._cancel_request(in_flight, now_ns, "abandoned")

    # Scheduled actions: changes of replicas, checks and the stop of the load

    def _find_next_action_ns(self) -> int:
        """Return the time of the next scheduled action, or NEVER."""
        return min(self._next_change_ns(), self._next_check_ns(), self._stop_ns)

    def _next_change_ns(self) -> int:
        """Return when the number of replicas changes next, or NEVER."""
        return self._changes[0].at_ns if self._changes else NEVER

    def _next_check_ns(self) -> int:
        """Return when the load is checked next, or NEVER."""
        return min((scheduled.next_ns for scheduled in self._checks), default=NEVER)

    def _apply_scheduled_action(self, next_event_ns: int) -> bool:
        """Apply the next scheduled action, unless another event comes first.

        At the same time, this order holds:

        1. a change of the number of replicas
        2. the next event: requests that are due, or the end of an iteration
        3. the stop of the load
        4. a check of the load

        Args:
            next_event_ns: The time of the next event, or NEVER.

        Returns:
            Whether an action was applied.
        """
        change_ns = self._next_change_ns()
        check_ns = self._next_check_ns()
        stop_ns = self._stop_ns
        latest_change_ns = min(next_event_ns, check_ns, stop_ns, self._end_of_run_ns)
        if change_ns < NEVER and change_ns <= latest_change_ns:
            self._change_replicas()
        elif check_ns < min(next_event_ns, stop_ns):
            if next_event_ns == NEVER:
                self._checks.clear()  # all requests have ended, and nothing is left to check
            else:
                self._run_checks(check_ns)
        elif stop_ns < next_event_ns:
            self._stop_load()
        else:
            return False
        self._next_action_ns = self._find_next_action_ns()
        return True

    def _change_replicas(self) -> None:
        """Apply the next change of the number of serving replicas.

        A new replica has an empty cache. The requests in flight at a removed replica fail with a
        connection reset.
        """
        change = self._changes.popleft()
        for replica in self.replicas[self._serving_count : change.serving_count]:
            replica.reset_cache()
        self._serving_count = change.serving_count
        for request in self._in_flight:
            is_removed = request.replica_index >= change.serving_count
            if is_removed and request.state != DONE:
                self._cancel_request(request, change.at_ns, "reset")

    def _stop_load(self) -> None:
        """Start no more requests. Those in flight may end within the drain."""
        self._dispatcher.stop()
        self._checks.clear()
        self._end_of_run_ns = min(self._end_of_run_ns, self._stop_ns + self._drain_after_stop_ns)
        self._failure_at_end_of_run = "interrupted"
        self._stop_ns = NEVER

    def _run_checks(self, now_ns: int) -> None:
        """Run the checks that are due now. A check may end the load.

        Each check gets the records of the requests that have ended since it ran last. If one of
        them returns True, the load stops now, and there are no more checks.
        """
        for scheduled in self._checks:
            if scheduled.next_ns != now_ns:
                continue
            scheduled.next_ns += scheduled.check.every_ns
            new_records = self._build_records_since(scheduled.seen_count)
            scheduled.seen_count = self.requests.count_sent()
            if scheduled.check.ends(now_ns, new_records):
                self.is_ended_by_check = True
        if self.is_ended_by_check:
            self._stop_ns = now_ns
            self._checks.clear()

    def _build_records_since(self, seen_count: int) -> NDArray[np.void]:
        """Return the records of all ended requests but the first `seen_count`, for a check.

        They are built while the simulation goes on, and lack the gaps and events of whole runs.
        """
        sent = self.requests.copy_sent_columns(seen_count)
        return records_of_ended_requests(
            sent,
            first_ns=self._look_up_ends_ns(sent, sent.first_iteration),
            last_ns=self._look_up_ends_ns(sent, sent.last_iteration),
            schedule=self._schedule,
        )

    def _look_up_ends_ns(self, sent: SentColumns, iterations: Ints) -> Ints:
        """Return when one iteration ended for each sent request, such as that of its first token.

        After the run, `virtual_records` looks up all requests at once. Here the requests are few,
        and the replicas go on with their iterations.

        Args:
            sent: The requests, each with the index of its replica.
            iterations: For each request, the number of an iteration of its replica, or -1.

        Returns:
            The end times in ns, -1 where the iteration is -1.
        """
        ends_ns = np.full(len(iterations), -1, np.int64)
        for row in np.flatnonzero(iterations >= 0).tolist():
            replica = self.replicas[sent.replica[row]]
            ends_ns[row] = replica.iteration_end_ns(int(iterations[row]))
        return ends_ns

    # The end of the run

    def _end_run(self) -> None:
        """Cancel what is in flight at the end of the run, and record what was never sent.

        Without a limit of the drain the run has no end time. Then all requests have ended by now,
        and only slots that were never started are left.
        """
        if self._end_of_run_ns < NEVER:
            self._cancel_timed_out(self._end_of_run_ns)
            self._cancel_all_in_flight()
        self._dispatcher.stop()
        for slot in self._dispatcher.unsent_slots():
            # The dispatcher calls the slots interrupted that it could not start before it was
            # stopped. In virtual time nobody interrupts a run: its drain has ended.
            is_interrupted = slot.drop_reason == "interrupted"
            reason = self._failure_at_end_of_run if is_interrupted else slot.drop_reason
            self.requests.add_unsent(slot.slot_id, slot.due_ns, reason)

    def _cancel_all_in_flight(self) -> None:
        """Cancel all requests in flight at the end of the run.

        The dispatcher is stopped first. Otherwise it would drop the turns after a cancelled one
        because of a failed turn, and not because the run has ended.
        """
        self._dispatcher.stop()
        for request in self._in_flight:
            if request.state != DONE:
                self._cancel_request(request, self._end_of_run_ns, self._failure_at_end_of_run)


def _shorten_output(request: SimRequest, generated_tokens: int) -> None:
    """Reduce the output of a cancelled request to the tokens that it really got.

    Its `last_iteration` was planned for the whole output when its prefill ended, and is moved to
    the iteration of the last generated token. Iterations before a pause are recorded apart, so only
    the tokens since the last admission count for it. Without such tokens, the iterations become -1.
    """
    tokens_before_pause = request.output_tokens - request.remaining_output_tokens
    tokens_since_admission = generated_tokens - tokens_before_pause
    request.output_tokens = generated_tokens
    if request.resumed_iteration < 0:
        request.last_iteration = -1
        return
    request.last_iteration = request.resumed_iteration + tokens_since_admission - 1
    if not tokens_since_admission:
        request.resumed_iteration = -1
