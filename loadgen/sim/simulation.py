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
from enum import Enum, auto

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


class _Action(Enum):
    """A scheduled action."""

    CHANGE_REPLICAS = auto()
    CHECK_LOAD = auto()
    STOP_LOAD = auto()


class _ScheduledActions:
    """The actions that take place at certain times, and not because of a request.

    Attributes:
        changes: The changes of the number of replicas, in order of time.
        checks: The repeated checks of the load.
        stop_ns: When the load is stopped, or NEVER.
        next_ns: The time of the next action, or NEVER.
    """

    def __init__(
        self, changes: Sequence[ReplicaChange], checks: Sequence[InterimCheck], stop_ns: int
    ) -> None:
        """Schedule the actions of a run. The class describes the arguments."""
        self.changes = deque(changes)
        self.checks = [_ScheduledCheck(check, next_ns=check.every_ns) for check in checks]
        self.stop_ns = stop_ns
        self.update_next()

    def update_next(self) -> None:
        """Set `next_ns` after an action has been applied."""
        self.next_ns = min(self._next_change_ns(), self.next_check_ns(), self.stop_ns)

    def _next_change_ns(self) -> int:
        """Return when the number of replicas changes next, or NEVER."""
        return self.changes[0].at_ns if self.changes else NEVER

    def next_check_ns(self) -> int:
        """Return when the load is checked next, or NEVER."""
        return min((scheduled.next_ns for scheduled in self.checks), default=NEVER)

    def choose(self, next_event_ns: int, end_of_run_ns: int) -> _Action | None:
        """Return the next action, or None if another event comes first.

        At the same time, this order holds:

        1. a change of the number of replicas
        2. the next event: requests that are due, or the end of an iteration
        3. the stop of the load
        4. a check of the load

        Args:
            next_event_ns: The time of the next event, or NEVER, which is later than any time.
            end_of_run_ns: The end of the run. The number of replicas does not change after it.
        """
        change_ns = self._next_change_ns()
        check_ns = self.next_check_ns()
        has_change = change_ns < NEVER and change_ns <= end_of_run_ns
        if has_change and change_ns <= min(next_event_ns, self.stop_ns, check_ns):
            return _Action.CHANGE_REPLICAS
        if check_ns < min(next_event_ns, self.stop_ns):
            return _Action.CHECK_LOAD
        if self.stop_ns < next_event_ns:
            return _Action.STOP_LOAD
        return None


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

        # The source of requests.
        self._schedule = schedule
        self._request_sizer = request_sizer
        self._dispatcher = Dispatcher(
            schedule, max_in_flight=bounds.max_in_flight, max_in_prefill=bounds.max_in_prefill
        )
        self._is_prefill_limited = bounds.max_in_prefill is not None

        # The replicas. All have the same class, which has a static method for all of them.
        replica_class = type(self.replicas[0])
        self._advance_to_next_event = replica_class.advance_to_next_event
        self._choose_replica = choose_replica
        self._serving_count = len(replicas)  # only so many replicas, the first ones, get requests
        self._busy_count = 0  # replicas with an iteration in progress

        # The requests in flight, in order of due time. A request that has ended stays here until
        # all requests before it have ended, too: it is slow to remove one from the middle.
        self._in_flight: deque[SimRequest] = deque()
        self._unfinished_sequences: dict[int, list[SimRequest]] = {}  # by non-generative request
        self._abandonments = _Abandonments(schedule)

        # Actions and limits of time. At the end of the run, requests in flight fail with this name
        # of `record.KIND`.
        self._actions = _ScheduledActions(changes, checks, bounds.stop_ns)
        self._timeout_ns = bounds.timeout_ns
        self._drain_after_stop_ns = bounds.drain_after_stop_ns
        self._end_of_run_ns = bounds.end_ns(schedule.horizon_ns)
        self._failure_at_end_of_run = "unfinished"

    def run(self) -> None:
        """Simulate until every slot of the schedule has its record.

        Each turn of the loop handles the next event: a scheduled action, requests that are due, or
        the end of an iteration. If requests are due exactly when an iteration ends, they are sent
        before it ends.
        """
        while True:
            next_due_ns = self._dispatcher.next_due_ns()
            due_ns = NEVER if next_due_ns is None else next_due_ns
            # Skip the iterations in which nothing happens. `end_ns` is the end of the next one that
            # has to be handled here, NEVER if all replicas are idle.
            quiet_until_ns = self._find_quiet_until_ns(due_ns)
            end_ns, replica_index = self._advance_to_next_event(self.replicas, quiet_until_ns)
            next_event_ns = due_ns if due_ns <= end_ns else end_ns

            if self._actions.next_ns <= next_event_ns:
                has_acted = self._apply_scheduled_action(next_event_ns)
                if has_acted:
                    continue
            has_event = next_event_ns < NEVER
            if not has_event or next_event_ns > self._end_of_run_ns:
                break
            if due_ns <= end_ns:
                self._send_due_requests(due_ns, end_ns)
            else:
                self._end_iteration(end_ns, replica_index)
        self._end_run()
        self.iteration_ends_ns = [
            np.asarray(replica.iteration_ends_ns, np.int64) for replica in self.replicas
        ]

    def _find_quiet_until_ns(self, due_ns: int) -> int:
        """Return until when nothing can happen but ends of iterations.

        Until then no request is due or times out, no scheduled action takes place, and the run does
        not end. So iterations may end without notice to this class if no request starts or ends
        with them.

        A planned abandonment depends on the number of generated tokens. As long as there is one,
        every iteration has to be handled, so the result is 0.

        Args:
            due_ns: When the next request is due.
        """
        if self._abandonments.planned:
            return 0
        # Comparisons instead of `min`, because this runs once per event.
        quiet_until_ns = self._actions.next_ns
        if due_ns < quiet_until_ns:
            quiet_until_ns = due_ns
        if self._end_of_run_ns < quiet_until_ns:
            quiet_until_ns = self._end_of_run_ns
        if self._in_flight:
            timeout_ns = self._in_flight[0].due_ns + self._timeout_ns
            if timeout_ns < quiet_until_ns:
                quiet_until_ns = timeout_ns
        return quiet_until_ns

    # Starts of requests

    def _send_due_requests(self, due_ns: int, end_ns: int) -> None:
        """Send the requests that are due before the next other event.

        A request at a busy replica only joins its queue, which changes nothing before the next
        iteration ends. So if all replicas are busy, all requests that are due until then are sent
        at once. A request at an idle replica begins an iteration, which may end before the next
        request is due. So if a replica is idle, only the requests that are due now are sent.

        Args:
            due_ns: When the next request is due. No other event comes before.
            end_ns: The end of the first iteration in progress.
        """
        has_idle_replica = self._busy_count < len(self.replicas)
        if has_idle_replica:
            until_ns = due_ns
        else:
            until_ns = min(end_ns, self._end_of_run_ns, self._actions.next_ns)
        for slot in self._dispatcher.take_due_slots(until_ns):
            if slot.drop_reason:
                self.requests.add_unsent(slot.slot_id, slot.due_ns, slot.drop_reason)
            else:
                self._send_request(slot)

    def _send_request(self, slot: DispatchedSlot) -> None:
        """Send the request of a slot of the schedule to the next serving replica.

        An idle replica begins an iteration at once.
        """
        size = self._request_sizer(slot.slot_id)
        replica_index = self._choose_replica()
        # The router goes through all replicas in a fixed order, so those that do not serve now are
        # skipped. The first one always serves, so the loop ends.
        while replica_index >= self._serving_count:
            replica_index = self._choose_replica()

        if size.output_tokens:
            request = self._submit_request(slot, size, replica_index)
        else:
            request = self._submit_non_generative(slot, size, replica_index)
        if request is None:  # the replica has refused it, which is recorded already
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

        First come the effects of the tokens that requests got: first tokens are reported, complete
        requests are recorded, and users may leave. Then requests time out. The next iteration comes
        last, so that it computes nothing for requests that ended in one of these ways. The replica
        becomes idle if it has nothing left to compute.
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
        # The beginning of an iteration pauses requests if the memory of the replica is full.
        if replica.recent_pauses:
            self.requests.add_pauses(replica.recent_pauses)

    def _complete_requests(self, done_requests: list[SimRequest], end_ns: int) -> None:
        """Record requests that have succeeded, and report them to the dispatcher.

        The dispatcher has to know of the end, because in a closed loop or a session the next
        request follows it.
        """
        if self._unfinished_sequences:
            done_requests = self._select_complete_requests(done_requests)
        report_finished = self._dispatcher.report_finished
        for request in done_requests:
            report_finished(request.key, end_ns, ok=True)
        self.requests.add_sent(done_requests)

    def _select_complete_requests(self, done_requests: list[SimRequest]) -> list[SimRequest]:
        """Return those of the requests that are complete, because all of their sequences are.

        The replicas serve each sequence of a non-generative request by itself. The last one of them
        that is done stands for the whole request.
        """
        complete_requests = []
        for request in done_requests:
            is_non_generative = request.requested_tokens == 0  # it asks for no output tokens
            if not is_non_generative:
                complete_requests.append(request)
            elif self._remove_unfinished_sequence(request):
                request.input_tokens = self._request_sizer(request.key).input_tokens
                complete_requests.append(request)
        return complete_requests

    def _remove_unfinished_sequence(self, sequence: SimRequest) -> bool:
        """Remove a sequence that is done, and return whether it was the last one of its request."""
        unfinished_sequences = self._unfinished_sequences[sequence.key]
        unfinished_sequences.remove(sequence)
        if unfinished_sequences:
            return False
        del self._unfinished_sequences[sequence.key]
        return True

    def _cancel_timed_out(self, now_ns: int) -> None:
        """Cancel the requests whose timeout is over.

        All requests have the same timeout, so they time out in order of their due times, which is
        the order of the requests in flight. Requests at the front that are done are removed.
        """
        in_flight = self._in_flight
        while in_flight:
            request = in_flight[0]
            is_done = request.state == DONE
            if not is_done and request.due_ns + self._timeout_ns > now_ns:
                return
            if not is_done:
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
        # Counted first, because a cancelled request does not know its tokens any more.
        generated_tokens = replica.count_generated_tokens(request)
        is_non_generative = request.requested_tokens == 0  # it asks for no output tokens
        if is_non_generative:
            self._cancel_sequences(request)
        else:
            replica.cancel(request)

        _shorten_output(request, generated_tokens)
        request.failure = KIND[failure]
        request.failed_ns = now_ns
        self.requests.add_sent([request])
        drop_reason = "abandoned" if failure == "abandoned" else "previous_turn_failed"
        self._dispatcher.report_finished(request.key, now_ns, ok=False, drop_reason=drop_reason)

    def _cancel_sequences(self, request: SimRequest) -> None:
        """Cancel all unfinished sequences of a non-generative request.

        `request` is one of them. It stands for the whole request in the records, so it gets the
        number of its input tokens.
        """
        replica = self.replicas[request.replica_index]
        for sequence in self._unfinished_sequences.pop(request.key):
            replica.cancel(sequence)
        request.input_tokens = self._request_sizer(request.key).input_tokens

    def _apply_abandonments(self, replica_index: int, now_ns: int) -> None:
        """Cancel the requests of users who leave at the end of this iteration of a replica.

        An abandonment is planned for one request: its user leaves as soon as the request has a
        certain number of output tokens.
        """
        replica = self.replicas[replica_index]
        self._abandonments.remove_done()
        for abandonment in self._abandonments.planned:
            request = abandonment.request
            is_on_replica = request.replica_index == replica_index
            # A request may be done by now, because another one of its session was abandoned.
            if not is_on_replica or request.state == DONE:
                continue
            if replica.count_generated_tokens(request) >= abandonment.after_tokens:
                self._cancel_session(request, now_ns)

    def _cancel_session(self, request: SimRequest, now_ns: int) -> None:
        """Cancel a request and all others of its session, because the user of the session leaves.

        A task, which is a session, may have several requests in flight. The key of a request is its
        slot in the schedule.
        """
        other_slots = set(self._dispatcher.other_slots_in_flight(request.key))
        self._cancel_request(request, now_ns, "abandoned")
        for other_request in self._in_flight:
            if other_request.key in other_slots and other_request.state != DONE:
                self._cancel_request(other_request, now_ns, "abandoned")

    # Scheduled actions: changes of replicas, checks and the stop of the load

    def _apply_scheduled_action(self, next_event_ns: int) -> bool:
        """Apply the next scheduled action, and return whether there was one.

        There is none if the next event, at `next_event_ns`, comes first. NEVER means that no event
        follows, because all requests have ended.
        """
        actions = self._actions
        action = actions.choose(next_event_ns, self._end_of_run_ns)
        if action is None:
            return False
        if action is _Action.CHANGE_REPLICAS:
            self._change_replicas()
        elif action is _Action.STOP_LOAD:
            self._stop_load()
        elif next_event_ns < NEVER:
            self._run_checks(actions.next_check_ns())
        else:
            actions.checks.clear()  # nothing is left to check
        actions.update_next()
        return True

    def _change_replicas(self) -> None:
        """Apply the next change of the number of serving replicas.

        A new replica has an empty cache. The requests in flight at a removed replica fail with a
        connection reset.
        """
        change = self._actions.changes.popleft()
        new_replicas = self.replicas[self._serving_count : change.serving_count]
        for replica in new_replicas:
            replica.reset_cache()
        self._serving_count = change.serving_count
        for request in self._in_flight:
            is_removed = request.replica_index >= change.serving_count
            if is_removed and request.state != DONE:
                self._cancel_request(request, change.at_ns, "reset")

    def _stop_load(self) -> None:
        """Start no more requests. Those in flight may end within the drain."""
        self._dispatcher.stop()
        self._actions.checks.clear()
        end_of_drain_ns = self._actions.stop_ns + self._drain_after_stop_ns
        self._end_of_run_ns = min(self._end_of_run_ns, end_of_drain_ns)
        self._failure_at_end_of_run = "interrupted"
        self._actions.stop_ns = NEVER

    def _run_checks(self, now_ns: int) -> None:
        """Run the checks that are due now. A check may end the load.

        Each check gets the records of the requests that have ended since it ran last. If one of
        them returns True, the load stops now, and there are no more checks.
        """
        for scheduled in self._actions.checks:
            if scheduled.next_ns != now_ns:
                continue
            scheduled.next_ns += scheduled.check.every_ns
            new_records = self._build_records_since(scheduled.seen_count)
            scheduled.seen_count = self.requests.count_sent()
            if scheduled.check.ends(now_ns, new_records):
                self.is_ended_by_check = True
        if self.is_ended_by_check:
            self._actions.stop_ns = now_ns
            self._actions.checks.clear()

    def _build_records_since(self, seen_count: int) -> NDArray[np.void]:
        """Return the records of the ended requests that a check has not seen yet.

        The simulation goes on after the check, so the records are built from a copy. Their fields
        about gaps and events are 0, because these are only counted after the run.

        Args:
            seen_count: How many of the ended requests the check has seen before. They come first.
        """
        sent = self.requests.copy_sent_columns(skip_count=seen_count)
        return records_of_ended_requests(
            sent,
            first_ns=self._look_up_ends_ns(sent, sent.first_iteration),
            last_ns=self._look_up_ends_ns(sent, sent.last_iteration),
            schedule=self._schedule,
        )

    def _look_up_ends_ns(self, sent: SentColumns, iterations: Ints) -> Ints:
        """Return when one iteration ended for each of a few requests, while the simulation runs.

        Each request is looked up at its replica. For all requests of a run, that would be too slow:
        `virtual_records` copies the end times of all iterations to one array then. Here such a
        copy would cost more than it saves.

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
        """Cancel the requests in flight at the end of the run, and record those never sent.

        A run whose drain (the time for requests in flight after the load) has no limit has no end
        time. Then all requests have ended by now, and only unsent ones are left.
        """
        if self._end_of_run_ns < NEVER:
            self._cancel_timed_out(self._end_of_run_ns)
            self._cancel_all_in_flight()
        self._dispatcher.stop()
        for slot in self._dispatcher.unsent_slots():
            # To the dispatcher, a slot that was not started before the stop is interrupted. Here
            # the stop is the end of the run, so the slot has the same reason as the requests in
            # flight at that time.
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

    When its prefill ended, `last_iteration` was planned for the whole output. It becomes the
    iteration of the last generated token. A request that was paused has recorded the iterations
    before the pause already, so its own iterations are those since its last admission. Without a
    token since then, it has none (-1).

    Args:
        request: The request, which gets one token per iteration from `resumed_iteration` on.
        generated_tokens: How many tokens it got, those before a pause included.
    """
    # A pause sets `remaining_output_tokens` to the tokens that are missing then.
    tokens_before_pause = request.output_tokens - request.remaining_output_tokens
    tokens_since_admission = generated_tokens - tokens_before_pause
    request.output_tokens = generated_tokens
    if request.resumed_iteration < 0:
        request.last_iteration = -1
        return
    request.last_iteration = request.resumed_iteration + tokens_since_admission - 1
    if tokens_since_admission == 0:
        request.resumed_iteration = -1
