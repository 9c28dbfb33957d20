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

NO_OUTPUT_TOKENS = 0
"""The output length of a non-generative request (embeddings, rerank)."""

EVERY_ITERATION = 0
"""A time before the end of any iteration, so that the simulation stops after each of them."""

NO_ITERATION = -1
"""The iteration of a token that a request never got."""


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

        Args:
            slot: The slot of the schedule that the request was started for, with its turn.
            session: The number of the session.
            request: The request, which has just been submitted.
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
        """Return the next action, or None if another event comes before it or there is no action.

        An event is a request that is due, or the end of an iteration. If several things happen at
        the same time, they happen in this order: a change of the number of replicas, the event, the
        stop of the load, and a check of the load.

        Args:
            next_event_ns: The time of the next event, or NEVER, which is later than any time.
            end_of_run_ns: The end of the run. The number of replicas does not change after it.
        """
        change_ns = self._next_change_ns()
        if change_ns > end_of_run_ns:
            change_ns = NEVER

        check_ns = self.next_check_ns()
        earliest_ns = min(change_ns, next_event_ns, self.stop_ns, check_ns)
        if earliest_ns == NEVER:
            return None

        # The first of these times that is the earliest. Their order is that of the docstring.
        if change_ns == earliest_ns:
            return _Action.CHANGE_REPLICAS
        if next_event_ns == earliest_ns:
            return None
        if self.stop_ns == earliest_ns:
            return _Action.STOP_LOAD

        return _Action.CHECK_LOAD


@dataclass(slots=True)
class _TimeLimits:
    """The limits of time of a run, which is in ns since its start.

    Attributes:
        timeout_ns: How long a request may take.
        drain_after_stop_ns: How long requests in flight may go on after a stop of the load.
        end_of_run_ns: When the requests in flight are cancelled, or NEVER.
        failure_at_end: The failure that these get, a name of `record.KIND`.
    """

    timeout_ns: int
    drain_after_stop_ns: int
    end_of_run_ns: int
    failure_at_end: str = "unfinished"


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

        # The source of requests. The dispatcher decides when each of them starts.
        self._schedule = schedule
        self._request_sizer = request_sizer
        self._dispatcher = Dispatcher(
            schedule, max_in_flight=bounds.max_in_flight, max_in_prefill=bounds.max_in_prefill
        )
        self._is_prefill_limited = bounds.max_in_prefill is not None

        # The replicas. Only the first `_serving_count` ones get requests. The class of the replicas
        # is the compiled one or the one in Python, and has a method that advances all together.
        replica_class = type(self.replicas[0])
        self._advance_to_next_event = replica_class.advance_to_next_event
        self._choose_replica = choose_replica
        self._serving_count = len(replicas)
        self._busy_count = 0  # replicas with an iteration in progress

        # The requests in flight, in order of due time. A request that has ended stays here until
        # all requests before it have ended, too: it is slow to remove one from the middle.
        self._in_flight: deque[SimRequest] = deque()

        # The sequences in flight of each non-generative request, by the key of the request.
        self._unfinished_sequences: dict[int, list[SimRequest]] = {}
        self._abandonments = _Abandonments(schedule)

        # What happens at certain times, whatever the requests do.
        self._actions = _ScheduledActions(changes, checks, bounds.stop_ns)
        self._limits = _TimeLimits(
            timeout_ns=bounds.timeout_ns,
            drain_after_stop_ns=bounds.drain_after_stop_ns,
            end_of_run_ns=bounds.end_ns(schedule.horizon_ns),
        )

    def run(self) -> None:
        """Simulate until every slot of the schedule (one request each) has its record.

        Each turn of the loop does the next thing in order of time. There are three kinds: requests
        are due, an iteration of a replica ends, or a scheduled action takes place, such as a change
        of the number of replicas. If requests are due exactly when an iteration ends, they are sent
        before it ends.
        """
        while True:
            next_due_ns = self._dispatcher.next_due_ns()
            due_ns = NEVER if next_due_ns is None else next_due_ns

            # This skips iterations in which nothing but the generation of tokens happens.
            iteration_end_ns, replica_index = self._advance_to_next_event(
                self.replicas, self._find_next_interruption_ns(due_ns)
            )
            are_requests_next = due_ns <= iteration_end_ns
            next_event_ns = due_ns if are_requests_next else iteration_end_ns

            # A scheduled action may change the times of the other events, so they are found again.
            may_action_be_next = self._actions.next_ns <= next_event_ns
            if may_action_be_next and self._apply_scheduled_action(next_event_ns):
                continue

            is_all_done = next_event_ns >= NEVER
            is_after_run = next_event_ns > self._limits.end_of_run_ns
            if is_all_done or is_after_run:
                break

            if are_requests_next:
                self._send_due_requests(due_ns, iteration_end_ns)
            else:
                self._end_iteration(iteration_end_ns, replica_index)

        self._end_run()
        self.iteration_ends_ns = [
            np.asarray(replica.iteration_ends_ns, np.int64) for replica in self.replicas
        ]

    def _find_next_interruption_ns(self, due_ns: int) -> int:
        """Return the next time at which something may happen besides the generation of tokens.

        That is the earliest of four times: when a request is due, when one times out, when a
        scheduled action takes place, and when the run ends. Until then, the replicas may go through
        several iterations at once, as long as each of them only generates tokens.

        A user who leaves after a number of tokens is different: after each iteration, the tokens
        have to be counted. As long as there is such a user, the result is EVERY_ITERATION.

        Args:
            due_ns: When the next request is due.
        """
        if self._abandonments.planned:
            return EVERY_ITERATION
        timeout_ns = NEVER
        if self._in_flight:
            oldest_request = self._in_flight[0]
            timeout_ns = oldest_request.due_ns + self._limits.timeout_ns
        return min(self._actions.next_ns, due_ns, self._limits.end_of_run_ns, timeout_ns)

    # Starts of requests

    def _send_due_requests(self, due_ns: int, iteration_end_ns: int) -> None:
        """Send the requests that are due now and, if all replicas are busy, those that follow.

        At a busy replica, a request only joins a queue, where it waits until an iteration ends. So
        if all are busy, the requests that are due until the next event of another kind are sent at
        once, which saves time. Each request has its due time, so the result is the same as if it
        were sent then.

        At an idle replica, a request begins an iteration, which may end before the next request is
        due. So only the requests that are due now are sent.

        Args:
            due_ns: When the first of the requests is due. No other event comes before.
            iteration_end_ns: When the first iteration in progress ends.
        """
        are_all_busy = self._busy_count == len(self.replicas)
        if are_all_busy:
            next_other_event_ns = min(
                iteration_end_ns, self._limits.end_of_run_ns, self._actions.next_ns
            )
            last_due_ns = next_other_event_ns
        else:
            last_due_ns = due_ns

        # A slot of the schedule is one request. It is dropped if it cannot be sent any more.
        for slot in self._dispatcher.take_due_slots(last_due_ns):
            if slot.drop_reason:
                self.requests.add_unsent(slot.slot_id, slot.due_ns, slot.drop_reason)
            else:
                self._send_request(slot)

    def _send_request(self, slot: DispatchedSlot) -> None:
        """Send the request of a slot of the schedule to the next serving replica.

        An idle replica begins an iteration at once.
        """
        # Choose a replica. The router returns the indexes of all replicas in turn. Only the first
        # `_serving_count` serve now, so the others are skipped.
        replica_index = self._choose_replica()
        while replica_index >= self._serving_count:
            replica_index = self._choose_replica()

        # Submit the request.
        size = self._request_sizer(slot.slot_id)
        is_generative = size.output_tokens > 0
        if is_generative:
            request = self._submit_request(slot, size, replica_index)
        else:
            request = self._submit_non_generative(slot, size, replica_index)

        if request is None:  # the replica has refused it
            return

        # The request may be a turn of a session whose user leaves during the response.
        if slot.session is not None:
            self._abandonments.plan(slot, slot.session, request)

        # An idle replica does not wait for the end of an iteration.
        replica = self.replicas[replica_index]
        is_idle = replica.end_ns == NEVER
        if is_idle:
            has_begun = replica.begin_iteration(slot.due_ns)
            if has_begun:
                self._busy_count += 1

    def _submit_request(
        self, slot: DispatchedSlot, size: RequestSize, replica_index: int
    ) -> SimRequest | None:
        """Submit a request for output tokens to a replica, and return it.

        A replica refuses a prompt that it could never serve. Then the failure is recorded, and the
        result is None.
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
        """Submit a non-generative request (embeddings, rerank) to a replica.

        The replica serves each text of the request by itself, as a sequence that ends with its
        prefill and has no output tokens. All sequences have the same key, the id of the slot. The
        request is complete when all of them are.

        Returns:
            The last sequence, which stands for the whole request. If a text is too long, the
            replica refuses the request. Then the failure is recorded, and the result is None.
        """
        replica = self.replicas[replica_index]
        can_serve_all = all(replica.can_serve(tokens) for tokens in size.sequence_lengths)
        if not can_serve_all:
            refused_request = replica.Request(
                slot.slot_id, slot.due_ns, size.input_tokens, NO_OUTPUT_TOKENS
            )
            self._record_refusal(refused_request, replica_index)
            return None

        sequences = [
            replica.Request(slot.slot_id, slot.due_ns, input_tokens, NO_OUTPUT_TOKENS)
            for input_tokens in size.sequence_lengths
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

        First the requests are handled that end with this iteration: some are complete, and others
        are cancelled, because their users leave or they time out. Only then does the next iteration
        begin, so that it computes nothing for them.
        """
        replica = self.replicas[replica_index]
        complete_requests = replica.end_iteration()

        if self._is_prefill_limited:
            self._report_first_tokens(replica, end_ns)

        if complete_requests:
            self._complete_requests(complete_requests, end_ns)

        if self._abandonments.planned:
            self._apply_abandonments(replica_index, end_ns)

        self._cancel_timed_out(end_ns)

        has_work = replica.begin_iteration(end_ns)
        if not has_work:
            self._busy_count -= 1

        # The beginning of an iteration pauses requests if the memory of the replica is full.
        if replica.recent_pauses:
            self.requests.add_pauses(replica.recent_pauses)

    def _report_first_tokens(self, replica: Replica, now_ns: int) -> None:
        """Report the requests that have left the prefill, whose number the workload limits."""
        for request in replica.first_token_requests:
            self._dispatcher.report_first_output(request.key, now_ns)

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
        """Return the complete requests among those that a replica has finished.

        To a replica, each sequence (text) of a non-generative request (embeddings, rerank) is a
        request. The whole request is complete when its last sequence is done. That sequence is then
        recorded in place of the whole request, so it gets the input tokens of all sequences.
        """
        complete_requests = []
        for request in done_requests:
            is_sequence = request.key in self._unfinished_sequences
            if is_sequence:
                is_last_sequence = self._remove_unfinished_sequence(request)
                if not is_last_sequence:
                    continue
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
            if request.state != DONE:
                has_time_left = request.due_ns + self._limits.timeout_ns > now_ns
                if has_time_left:
                    return  # and so have all later ones
                self._cancel_request(request, now_ns, "timeout_total")
            in_flight.popleft()

    def _cancel_request(self, request: SimRequest, now_ns: int, failure: str) -> None:
        """Cancel a request in flight, record it as failed, and report it to the dispatcher.

        The dispatcher then drops the later turns of the same session. The record has the number of
        tokens that were generated until now.

        Args:
            request: The request, or one of the sequences of a non-generative request.
            now_ns: The time of the failure.
            failure: Why it fails, a name of `record.KIND`.
        """
        replica = self.replicas[request.replica_index]

        # Cancel the request in the replica, which can count its tokens only before that.
        generated_tokens = replica.count_generated_tokens(request)
        is_sequence = request.key in self._unfinished_sequences
        if is_sequence:
            self._cancel_sequences(request)
        else:
            replica.cancel(request)

        # Record the request as failed.
        _shorten_output(request, generated_tokens)
        request.failure = KIND[failure]
        request.failed_ns = now_ns
        self.requests.add_sent([request])

        # Report the failure to the dispatcher.
        drop_reason = "abandoned" if failure == "abandoned" else "previous_turn_failed"
        self._dispatcher.report_finished(request.key, now_ns, ok=False, drop_reason=drop_reason)

    def _cancel_sequences(self, sequence: SimRequest) -> None:
        """Cancel all unfinished sequences of a non-generative request (embeddings, rerank).

        Args:
            sequence: One of them. It becomes the record of the whole request, so it gets the input
                tokens of all sequences.
        """
        replica = self.replicas[sequence.replica_index]
        for unfinished_sequence in self._unfinished_sequences.pop(sequence.key):
            replica.cancel(unfinished_sequence)
        sequence.input_tokens = self._request_sizer(sequence.key).input_tokens

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
        """Apply the next scheduled action, unless the next event comes before it.

        Args:
            next_event_ns: When the next event takes place: a request is due, or an iteration ends.
                NEVER means that no event follows, because all requests have ended.

        Returns:
            Whether an action was applied.
        """
        actions = self._actions
        action = actions.choose(next_event_ns, self._limits.end_of_run_ns)
        if action is None:
            return False

        match action:
            case _Action.CHANGE_REPLICAS:
                self._change_replicas()
            case _Action.STOP_LOAD:
                self._stop_load()
            case _Action.CHECK_LOAD:
                have_all_requests_ended = next_event_ns == NEVER
                if have_all_requests_ended:
                    actions.checks.clear()  # nothing is left to check
                else:
                    self._run_checks(now_ns=actions.next_check_ns())

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
        limits = self._limits
        end_of_drain_ns = self._actions.stop_ns + limits.drain_after_stop_ns
        limits.end_of_run_ns = min(limits.end_of_run_ns, end_of_drain_ns)
        limits.failure_at_end = "interrupted"
        self._actions.stop_ns = NEVER

    def _run_checks(self, now_ns: int) -> None:
        """Run the interim checks of the load that are due now.

        If one of them finds that the load has to end, the load is stopped now, and there are no
        more checks. All checks that are due at the same time run before.
        """
        due_checks = [check for check in self._actions.checks if check.next_ns == now_ns]
        for scheduled_check in due_checks:
            has_to_end = self._run_check(scheduled_check, now_ns)
            if has_to_end:
                self.is_ended_by_check = True

        if self.is_ended_by_check:
            self._actions.stop_ns = now_ns
            self._actions.checks.clear()

    def _run_check(self, scheduled_check: _ScheduledCheck, now_ns: int) -> bool:
        """Run an interim check, schedule its next run, and return whether the load has to end.

        The check gets the records of the requests that have ended since it ran last.
        """
        check = scheduled_check.check
        new_records = self._build_new_records(scheduled_check.seen_count)
        scheduled_check.seen_count = self.requests.count_sent()
        scheduled_check.next_ns += check.every_ns
        return check.ends(now_ns, new_records)

    def _build_new_records(self, seen_count: int) -> NDArray[np.void]:
        """Return the records of the requests that have ended since an interim check ran last.

        An interim check looks at the load while it is simulated, and may end it. The simulation
        goes on after it, so the records are built from a copy. Their fields about gaps and events
        are 0, because these are only counted after the run.

        Args:
            seen_count: How many ended requests the check has seen before. Requests are stored in
                the order in which they ended, so these are the first ones.
        """
        sent = self.requests.copy_sent_columns(skip_count=seen_count)
        return records_of_ended_requests(
            sent,
            first_ns=self._find_iteration_ends_ns(sent, sent.first_iteration),
            last_ns=self._find_iteration_ends_ns(sent, sent.last_iteration),
            schedule=self._schedule,
        )

    def _find_iteration_ends_ns(self, sent: SentColumns, iterations: Ints) -> Ints:
        """Return when one iteration of each request ended, such as that of its first token, in ns.

        This asks the replicas for one iteration after the other, which is fast enough for the few
        requests that have ended since the last interim check.

        Args:
            sent: The requests, each with the index of its replica.
            iterations: For each request, the number of an iteration of its replica. -1 means that
                there is none, and gives the time -1.
        """
        ends_ns = np.full(len(iterations), -1, np.int64)
        for row in np.flatnonzero(iterations >= 0).tolist():
            replica = self.replicas[sent.replica[row]]
            ends_ns[row] = replica.iteration_end_ns(int(iterations[row]))
        return ends_ns

    # The end of the run

    def _end_run(self) -> None:
        """Cancel the requests in flight at the end of the run, and record those never sent.

        The run ends at a certain time if the drain, the time for requests in flight after the load,
        is limited. Otherwise it ends when no request is in flight any more. In both cases, the
        schedule may have slots (one request each) that were never sent.
        """
        has_end_time = self._limits.end_of_run_ns < NEVER
        if has_end_time:
            self._cancel_timed_out(self._limits.end_of_run_ns)
            self._cancel_all_in_flight()

        self._dispatcher.stop()
        for slot in self._dispatcher.unsent_slots():
            # To the dispatcher, a slot that was left when it was stopped is "interrupted". The
            # record has the same reason as that of a request in flight at the end of the run.
            was_left_at_end = slot.drop_reason == "interrupted"
            reason = self._limits.failure_at_end if was_left_at_end else slot.drop_reason
            self.requests.add_unsent(slot.slot_id, slot.due_ns, reason)

    def _cancel_all_in_flight(self) -> None:
        """Cancel all requests in flight at the end of the run.

        The dispatcher is stopped first. Otherwise it would drop the turns after a cancelled one
        because of a failed turn, and not because the run has ended.
        """
        self._dispatcher.stop()
        limits = self._limits
        for request in self._in_flight:
            if request.state != DONE:
                self._cancel_request(request, limits.end_of_run_ns, limits.failure_at_end)


def _shorten_output(request: SimRequest, generated_tokens: int) -> None:
    """Reduce the output of a cancelled request to the tokens that it really got.

    A request gets one token per iteration, from the iteration `resumed_iteration` on. If it was
    paused, this is the first one after the pause. Its `last_iteration` was planned for the full
    output, and becomes the iteration of its last token. For example, a request with 3 tokens since
    iteration 10 got the last one in iteration 12.

    Args:
        request: The request, whose fields are changed.
        generated_tokens: How many tokens it got, including those before a pause.
    """
    tokens_before_pause = request.output_tokens - request.remaining_output_tokens  # 0: no pause
    tokens_since_pause = generated_tokens - tokens_before_pause
    request.output_tokens = generated_tokens

    has_had_tokens = request.resumed_iteration >= 0
    if not has_had_tokens:
        request.last_iteration = NO_ITERATION
        return

    request.last_iteration = request.resumed_iteration + tokens_since_pause - 1
    if tokens_since_pause == 0:
        request.resumed_iteration = NO_ITERATION
