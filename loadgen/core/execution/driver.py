"""Send one worker's share of a plan in real time.

The `Driver` waits until requests are due, sends them and records the results. It is a thin shell
around `schedule.dispatcher.Dispatcher`, which decides what starts when, and a `Sender`, which
sends. There is no asyncio task and no future per request: the event loop calls the driver when a
request is due and when one has ended. `worker_resources.py` prepares the bodies, connections and
files that the driver uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic_ns
from typing import Protocol, TypedDict, Unpack

import msgspec
from loadgen_sdk.request import Completion, Failure
from loadgen_sdk.transport.reactor import FOREVER
from loadgen_sdk.wire_formats.event_timeline import EventTimeline

from loadgen.core.execution import stop_signals
from loadgen.core.execution.events import Counters, Emit, LoadStarted, RunningLoad
from loadgen.core.execution.plan import Plan, share_of_limit
from loadgen.core.execution.process_memory import (
    LARGEST_KEPT_BLOCK_UNDER_LOAD,
    garbage_collection_disabled,
    set_largest_kept_block,
)
from loadgen.core.execution.self_sampling import SECOND_NS, SelfSampling
from loadgen.core.execution.shard import sleep_until_before_start, start_instant_ns
from loadgen.core.execution.target_selection import TargetSelection
from loadgen.core.execution.worker_resources import (
    BODIES_AHEAD,
    WorkerResources,
    WorkerResult,
    open_resources,
)
from loadgen.core.requests.trace_context import TraceContext
from loadgen.core.results.answer_files import create_recorded_response
from loadgen.core.results.record import (
    CUTS,
    RecordKey,
    RequestFacts,
    encode_sent_record,
    encode_unsent_record,
    text_for_record,
)
from loadgen.core.results.record_log import NO_TEXT, Timeline
from loadgen.core.schedule.dispatched_slots import DispatchedSlot
from loadgen.core.schedule.dispatcher import Dispatcher
from loadgen.core.schedule.schedule import Schedule, shard
from loadgen.core.schedule.sessions import NOT_APPLICABLE

MAX_DRAIN_AFTER_STOP_NS = 30 * SECOND_NS
"""How long requests in flight may continue after the user has stopped the load."""

START_DELAY_NS = 20_000_000
"""Time from the moment when everything is ready to the start of the schedule."""

_REQUESTS_PER_TURN = 8  # Sending one takes about 20 µs, and reading must not wait long.
_MAX_HOLD_NS = 5_000_000  # Signals and the progress line wait at most this long.
_DROP_REASON_OF_STOP = "interrupted"  # the reason of slots that `Dispatcher.stop` drops
_FLUSH_INTERVAL_NS = SECOND_NS // 2  # how often records are written to disk
_TIMELINE_INTERVAL_NS = 2 * SECOND_NS  # Less often, since a histogram is written in full each time.


class OptionalSendArguments(TypedDict, total=False):
    """The arguments of `Sender.send` that only some loads use."""

    header_lines: bytes  # further header lines of the request
    on_output: Callable[..., None]  # called with each output event
    on_first_output: Callable[[int], None]  # called with the time of the first output
    keep_text: bool  # keep the text of the response for the completion


class Sender(Protocol):
    """The client of one target, as far as the driver uses it. The SDK's `Pool` is one."""

    def send(
        self,
        request: None,
        body: bytes,
        due: int,
        on_done: Callable[[Completion], None],
        timeline: EventTimeline,
        *,
        name: str,
        requested_output_tokens: int,
        **options: Unpack[OptionalSendArguments],
    ) -> object:
        """Send a request and call `on_done` when it has ended. Return a handle for `cancel`.

        Args:
            request: Always None. Other users of the client pass the unencoded request here, but
                the driver only has its encoded body.
            body: The bytes of the HTTP body.
            due: The scheduled time of the request on the monotonic clock, in ns.
            on_done: Called exactly once, perhaps before this method returns.
            timeline: Receives the time of each output event.
            name: The id of the request, which is sent in a header.
            requested_output_tokens: The requested number of output tokens, -1 for none.
            **options: Arguments that most loads do not need: additional header lines, and
                callbacks for output events.
        """

    def cancel(self, exchange: object, failure: Failure) -> None:
        """End a request with a failure."""

    def tick(self, now: int) -> None:
        """Check the timeouts of the requests in flight."""

    @property
    def in_flight(self) -> int:
        """Return how many requests are in flight."""


class DriveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one driver."""

    route: str = "auto"  # how the target of a request is chosen
    stop_on_failure: bool = False  # end the run when a target stops responding
    hold_ns: int = _MAX_HOLD_NS
    drain_ns: int  # how long requests in flight may continue after the load
    max_in_flight: int | None = None
    max_in_prefill: int | None = None
    worker: int = 0  # number of this worker among the workers of the run
    run_id: str = ""
    trace: TraceContext | None = None  # gives each request a `traceparent` header
    session_header: str | None = None  # name of the header that carries the session


class _SentRequest(msgspec.Struct):
    """A request that was sent and has not ended.

    Attributes:
        target: The index of its target.
        handle: What `Sender.send` returned, for `Sender.cancel`. None while it is being sent.
    """

    target: int
    handle: object = None


class Driver:
    """Send the requests of one schedule and write one record per slot.

    `start_ns` is the start of the schedule on the monotonic clock.
    """

    def __init__(
        self,
        schedule: Schedule,
        resources: WorkerResources,
        settings: DriveSettings,
        *,
        start_ns: int,
    ) -> None:
        """Prepare to send a schedule. Call this in the running event loop of the reactor.

        Args:
            schedule: The schedule, or the share of it that this worker sends.
            resources: The bodies, clients and files of the worker.
            settings: The settings of this driver.
            start_ns: The start of the schedule on the monotonic clock.
        """
        self.start_ns = start_ns
        self.counters = Counters()
        self.is_stopping = False  # `stop` was called, by the user or for another reason
        self.was_stopped_by_target = False  # because a target stopped responding

        self._schedule = schedule
        self._worker = settings.worker
        self._run_id = settings.run_id
        self._trace = settings.trace
        self._session_header = settings.session_header
        self._stop_on_failure = settings.stop_on_failure
        self._limits_prefill = settings.max_in_prefill is not None
        self._dispatcher = Dispatcher(
            schedule, max_in_flight=settings.max_in_flight, max_in_prefill=settings.max_in_prefill
        )
        self._bodies = resources.bodies
        self._clients = resources.clients
        self._reactor = resources.reactor
        self._record_log = resources.record_log
        self._redact = resources.redact
        self._hide_keys = resources.hide_keys
        self._class_header_lines = resources.header_lines
        self._find_question = resources.find_question
        self._unbuilt_slot_ids_by_stage = resources.unbuilt_slot_ids
        self._target_selection = TargetSelection(
            settings.route,
            target_count=len(resources.clients),
            max_turns=schedule.max_turns,
            in_flight=lambda target: resources.clients[target].in_flight,
            targets_by_slot=resources.targets_by_slot,
            affinity_of_session=schedule.sessions.affinity,
        )

        self._in_flight: dict[int, _SentRequest] = {}  # by slot id
        self._sent_by_stage = [0] * len(schedule.stages)
        self._timelines = [Timeline(start_ns) for _ in schedule.stages]

        # By how much the slot ids of two successive sessions of a virtual user differ. None in a
        # stage with a fixed number of requests.
        self._slots_between_sessions_by_stage = [
            stage.concurrency * schedule.max_turns if stage.session_count is None else None
            for stage in schedule.stages
        ]

        # Options of `Sender.send` that do not depend on whether the request has a session.
        self._has_send_options = (
            self._trace is not None
            or self._class_header_lines is not None
            or self._limits_prefill
            or self._find_question is not None
        )
        self._drain_ns = settings.drain_ns
        self._load_end_ns = FOREVER

        self._drain_end_ns = FOREVER
        if schedule.horizon_ns is not None:
            self._load_end_ns = start_ns + schedule.horizon_ns
            self._drain_end_ns = self._load_end_ns + settings.drain_ns

        self._next_flush_ns = start_ns + _FLUSH_INTERVAL_NS
        self._next_timeline_ns = start_ns + _TIMELINE_INTERVAL_NS
        self._sampling = SelfSampling(settings.worker, start_ns)

        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._has_recorded_unsent = False
        self._is_cancelling = False  # True while the requests in flight are being cancelled

        # True while several requests are started or cancelled in a row. A request that ends
        # meanwhile then starts no other one, which the caller does afterwards if needed.
        self._defers_next_requests = False

        self._reactor.turn_ns = settings.hold_ns
        self._reactor.on_wake = self._start_due_requests
        self._reactor.on_tick = self._on_tick

        # Without a separate process, bodies of an endless load are built while nothing else
        # happens.
        if resources.unbuilt_slot_ids and schedule.slot_count is None:
            self._reactor.on_idle = self._build_next_body

    async def run(self) -> None:
        """Send everything, and return when every slot has a record.

        A slot is the place of one request in the schedule. This method only waits: the event loop
        calls `_start_due_requests` when a request is due, and a client calls `_on_done` when one
        has ended. They complete the future `_finished` after the last request. If one of them
        raises an exception, which is a bug, this method raises it.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)

        try:
            self._schedule_wake_up()
            self._check_finished()  # The schedule may be empty.
            await self._finished
        finally:
            self._detach_from_reactor()
            self._write_remaining(monotonic_ns())
            self._sampling.close()
            loop.set_exception_handler(None)

    def _detach_from_reactor(self) -> None:
        """Undo what the constructor has set on the reactor, which may be used after the load."""
        self._reactor.wake_at(FOREVER)
        self._reactor.on_wake = None
        self._reactor.on_tick = None
        self._reactor.on_idle = None
        self._reactor.turn_ns = 0

    @property
    def down_since_s(self) -> dict[int, float]:
        """Return when each unresponsive target first stopped responding, in s from the start."""
        return {
            target: round((at_ns - self.start_ns) / SECOND_NS, 3)
            for target, at_ns in self._target_selection.down_since_ns.items()
        }

    def stop_after_failure(self) -> None:
        """Stop because a target stopped responding and the run is configured to end then."""
        if not self.is_stopping:
            self.was_stopped_by_target = True
            self.stop()

    def stop(self) -> None:
        """Stop the load, when the user interrupts it or a rule or a failed target ends it.

        No more requests start. Those in flight have a limited time to end, the drain: that of the
        settings, but at most MAX_DRAIN_AFTER_STOP_NS. They are cancelled at once, without a drain,
        in two cases: if this is the second call, or if the user calls this when the load is over
        and its drain has already begun. A failed target does not shorten the drain of the others.
        """
        if self._finished.done():
            return

        now = monotonic_ns()
        was_already_stopping = self.is_stopping
        is_draining_after_load = now >= self._load_end_ns
        ends_drain_early = is_draining_after_load and not self.was_stopped_by_target
        self.is_stopping = True

        # The dispatcher must stop first, so that the end of a request starts no other one.
        self._dispatcher.stop()
        if was_already_stopping or ends_drain_early:
            self._end_at_once()
        else:
            self._begin_drain_after_stop(now)

    def _end_at_once(self) -> None:
        """Cancel all requests in flight and let `run` return, without a drain."""
        self._cancel_all(Failure("interrupted", "interrupted by the user"))
        self._record_unsent_slots("interrupted")
        self._finish()

    def _begin_drain_after_stop(self, now: int) -> None:
        """Give the requests in flight a limited time to end, after the load was stopped."""
        self._record_unsent_slots("interrupted")
        drain_ns = min(self._drain_ns, MAX_DRAIN_AFTER_STOP_NS)
        self._drain_end_ns = min(self._drain_end_ns, now + drain_ns)
        self._check_finished()

    # Starting and ending requests

    def _start_due_requests(self, now: int) -> None:
        """Start the requests that are due, and record the slots that the dispatcher dropped.

        The event loop calls this when the next request is due. At most _REQUESTS_PER_TURN are
        started, so that responses are read in between. If more are due, it is called again.
        """
        # A request may fail while it is being sent, and `_on_done` would then call this method from
        # inside this loop. The flag prevents that. It needs no `finally`, because an exception here
        # ends the run.
        self._defers_next_requests = True
        for slot in self._dispatcher.take_due_slots(now - self.start_ns, _REQUESTS_PER_TURN):
            if slot.drop_reason:
                self._record_unsent_slot(slot)
            else:
                self._send(slot)

        self._defers_next_requests = False
        self._schedule_wake_up()

    def _schedule_wake_up(self) -> None:
        """Let the event loop call `_start_due_requests` when the next request is due."""
        due_ns = self._dispatcher.next_due_ns()
        self._reactor.wake_at(FOREVER if due_ns is None else self.start_ns + due_ns)

    def _send(self, slot: DispatchedSlot) -> None:
        """Send the request of a slot to the target that the route selects for it.

        A slot is the place of one request in the schedule. The client calls `_on_done` when the
        request has ended, which removes it from `_in_flight`. That can happen even before the
        client's `send` returns, for example if no socket could be opened. The request is therefore
        added before it is sent, and the handle that can cancel it is set afterwards.
        """
        slot_id = slot.slot_id
        self._sent_by_stage[slot.stage] += 1
        self.counters.sent += 1
        self.counters.in_flight += 1

        # The conditions avoid two calls for each request of a usual load, which has a single target
        # and no options.
        target = 0
        if len(self._clients) > 1:
            target = self._target_selection.choose(slot_id, monotonic_ns())

        body, request_facts = self._bodies.take_body(slot.stage, slot_id)
        options: OptionalSendArguments = {}
        if self._has_send_options or slot.session is not None:
            options = self._send_options(slot)

        sent_request = _SentRequest(target)
        self._in_flight[slot_id] = sent_request
        sent_request.handle = self._clients[target].send(
            request=None,  # The client needs only its body.
            body=body,
            due=self.start_ns + slot.due_ns,
            on_done=partial(self._on_done, slot, target, request_facts),
            timeline=self._timelines[slot.stage].events,
            name=f"{self._run_id}-{slot_id}",
            requested_output_tokens=request_facts.requested_output,
            **options,
        )

    def _send_options(self, slot: DispatchedSlot) -> OptionalSendArguments:
        """Return the optional arguments of `Sender.send` for a request.

        The arguments are additional header lines, and callbacks for the output events of the
        request. A session is one conversation of several requests, its turns. The schedule can let
        a user leave during the response to one turn, after a number of output events.
        """
        options: OptionalSendArguments = {}
        header_lines = b""
        if self._class_header_lines is not None:  # request class and SLO
            header_lines += self._class_header_lines(slot.slot_id)

        if self._trace is not None:
            header_lines += self._trace.header(slot.slot_id)

        if slot.session is not None:
            header_lines += self._session_header_line(slot.session)
            session = self._schedule.sessions.get(slot.session)
            abandonment = None if session is None else session.abandonment
            if abandonment is not None and abandonment.turn == slot.turn:
                options["on_output"] = self._abandon_after(slot.slot_id, abandonment.tokens)

        if header_lines:
            options["header_lines"] = header_lines

        if self._find_question is not None and self._find_question(slot.slot_id) is not None:
            options["keep_text"] = True

        if self._limits_prefill:
            # The first output ends the prefill of this request, so that another one may start.
            options["on_first_output"] = partial(self._on_first_output, slot.slot_id)

        return options

    def _session_header_line(self, session: int) -> bytes:
        """Return the header line that names a session, or nothing if the load has none.

        Gateways use it to send all requests of a session to the same server.
        """
        if self._session_header is None:
            return b""
        affinity = self._schedule.sessions.affinity(session)
        return f"{self._session_header}: {self._run_id}-{affinity}\r\n".encode("latin-1")

    def _abandon_after(self, slot_id: int, output_events: int) -> Callable[..., None]:
        """Return a callback for the output events of a request, which simulates a user who leaves.

        When it has been called `output_events` times, the request and its session are cancelled.
        """
        loop = asyncio.get_running_loop()
        events_left = output_events

        def count_event(*_: object) -> None:
            nonlocal events_left
            events_left -= 1
            if events_left == 0:
                # Not from here, because the events of the request are being read.
                loop.call_soon(self._abandon, slot_id)

        return count_event

    def _abandon(self, slot_id: int) -> None:
        """Cancel a request whose user has left, and the requests in flight of the same task."""
        if slot_id not in self._in_flight:  # Its last event arrived in the same read.
            return
        failure = Failure("abandoned", "the user abandoned it during the response")
        for cancelled_id in (slot_id, *self._dispatcher.other_slots_in_flight(slot_id)):
            sent_request = self._in_flight[cancelled_id]
            self._clients[sent_request.target].cancel(sent_request.handle, failure)

    def _build_next_body(self) -> bool:
        """Build one request body in advance. Return True if there may be more to build.

        The event loop calls this while it has nothing else to do, and again after True. It is for a
        load without a known number of requests, of which only the first bodies can be built before
        the load. In each stage, the bodies of the next BODIES_AHEAD requests are kept ready.
        """
        for stage, unbuilt_slot_ids in enumerate(self._unbuilt_slot_ids_by_stage):
            needed_bodies = self._sent_by_stage[stage] + BODIES_AHEAD
            has_enough_bodies = self._bodies.built_count(stage) >= needed_bodies
            if has_enough_bodies:
                continue

            # This takes the next id from the iterator. It builds nothing if there is none left.
            built_count = self._bodies.build(stage, unbuilt_slot_ids, max_bodies=1)
            if built_count > 0:
                return True
        return False

    def _on_first_output(self, slot_id: int, at_ns: int) -> None:
        """Tell the dispatcher that a request is no longer in prefill, so another may start."""
        self._dispatcher.report_first_output(slot_id, at_ns - self.start_ns)
        if not self._defers_next_requests:
            self._start_due_requests(monotonic_ns())

    def _on_done(
        self, slot: DispatchedSlot, target: int, request_facts: RequestFacts, completion: Completion
    ) -> None:
        """Record the end of a request, and start the requests that are due after it.

        A client calls this for each request, whether it succeeded or failed. That may happen while
        this driver is starting or cancelling several requests in a loop, because `send` or `cancel`
        can fail a request at once. `_defers_next_requests` is True during such a loop: nothing is
        started here, and the driver starts what is due after the loop.

        Args:
            slot: The place of the request in the schedule.
            target: The index of the target that it was sent to.
            request_facts: What was known of it before it was sent.
            completion: How it ended.
        """
        self._in_flight.pop(slot.slot_id, None)
        self.counters.in_flight -= 1

        if completion.failure is not None:
            self._count_failure(target, completion)
        else:
            self._count_success(target, completion)

        self._bodies.record_response(slot.slot_id, completion)
        if self._find_question is not None:
            self._record_answer(slot.slot_id, completion)
        self._record_log.add_record(self._encode_record(slot, target, request_facts, completion))
        self._report_end(slot, completion)
        if self._defers_next_requests:
            return

        self._start_due_requests(monotonic_ns())
        if not self._in_flight:
            self._check_finished()

    def _count_success(self, target: int, completion: Completion) -> None:
        """Count a request that succeeded, and its TTFT if it has one."""
        self.counters.ok += 1
        # The usual case, no failure before this success, needs no call.
        if self._target_selection.silent_failures[target]:
            self._target_selection.report_success(target)
        if completion.first_token >= 0:
            self.counters.recent_ttft_ns.append(completion.first_token - completion.due)

    def _count_failure(self, target: int, completion: Completion) -> None:
        """Count a failed request, and stop the run if its target has stopped responding.

        The run is stopped only if it is configured so (`--on-target-failure stop`). CUTS are the
        kinds of failure by which the load generator itself ends a request, for example at the end
        of the drain. They do not count as failed.
        """
        assert completion.failure is not None
        failure_kind = completion.failure.kind
        was_ended_by_loadgen = failure_kind in CUTS
        if not was_ended_by_loadgen:
            self.counters.failed += 1
        elif CUTS[failure_kind] == "cancelled":
            self.counters.cancelled += 1

        # While all requests are being cancelled, a failure says nothing about its target.
        if self._is_cancelling:
            return

        has_gone_down = self._target_selection.report_failure(target, completion, completion.done)
        if has_gone_down and self._stop_on_failure:
            self.stop_after_failure()

    def _report_end(self, slot: DispatchedSlot, completion: Completion) -> None:
        """Tell the dispatcher that a request has ended, so that it can start what follows.

        A session is one conversation of several requests, its turns. If a request fails, the
        dispatcher drops the later turns of its session, and their records say why: `drop_reason`.
        The virtual user then begins its next session, after a pause if needed. If the request
        succeeded, the dispatcher ignores `drop_reason`.
        """
        failure = completion.failure
        was_abandoned = failure is not None and failure.kind == "abandoned"
        self._dispatcher.report_finished(
            slot.slot_id,
            completion.done - self.start_ns,
            ok=failure is None,
            pause_ns=0 if failure is None else self._pause_after_failure_ns(slot),
            drop_reason="abandoned" if was_abandoned else "previous_turn_failed",
        )

    def _pause_after_failure_ns(self, failed_slot: DispatchedSlot) -> int:
        """Return how long a virtual user waits before its next session after a failed request.

        It waits only if the next session would go to a target that is down, since its requests
        would otherwise fail in a fast loop. In a stage with a fixed number of requests it does not
        wait, because the stage ends anyway.

        The turns of a session have successive slot ids, and the sessions of one virtual user are
        equally far apart. Example: if they are 6 slots apart and slot 14 is turn 2 of its session,
        this session begins at slot 12 and the next one at slot 18.
        """
        slots_between_sessions = self._slots_between_sessions_by_stage[failed_slot.stage]
        if slots_between_sessions is None:  # The stage has a fixed number of requests.
            return 0
        first_slot_of_session = failed_slot.slot_id - failed_slot.turn
        first_slot_of_next_session = first_slot_of_session + slots_between_sessions
        return self._target_selection.pause_ns(first_slot_of_next_session)

    def _record_key(self, slot: DispatchedSlot, target: int) -> RecordKey:
        """Return the columns of a record that say which request it belongs to."""
        return RecordKey(
            slot=slot.slot_id,
            request=slot.slot_id,
            stage=slot.stage,
            worker=self._worker,
            target=target,
            session=NOT_APPLICABLE if slot.session is None else slot.session,
            turn=slot.turn,
            virtual_user=NOT_APPLICABLE if slot.virtual_user is None else slot.virtual_user,
        )

    def _encode_record(
        self, slot: DispatchedSlot, target: int, request_facts: RequestFacts, completion: Completion
    ) -> bytes:
        """Return the encoded record of a request that was sent, for the record log.

        Texts, such as the message of a failure, are stored in a file of their own, without API
        keys. The record refers to its text by the number of the text.
        """
        text_index = NO_TEXT
        text = text_for_record(completion)
        if text:
            text_index = self._record_log.store_text(self._redact(text))

        key = self._record_key(slot, target)
        return encode_sent_record(
            key, completion, self.start_ns, text_index=text_index, request_facts=request_facts
        )

    def _record_answer(self, slot_id: int, completion: Completion) -> None:
        """Record the response to a question with a known answer, which is checked after the load.

        Responses to all other requests, and those of requests that failed, are not recorded.
        """
        assert self._find_question is not None, "the load has questions"
        question = self._find_question(slot_id)
        if question is None or completion.failure is not None:
            return
        response = create_recorded_response(slot_id, question, completion, self._hide_keys)
        self._record_log.add_answer(response)

    def _record_unsent_slot(self, slot: DispatchedSlot) -> None:
        """Write the record of a slot whose request was never sent, and never will be.

        A slot is the place of one request in the schedule. The status of its record depends on why
        it was not sent: "cancelled" or "unfinished" if the load ended first (see CUTS), or else
        "dropped", for example by a limit of requests in flight. The target of the record is the one
        that the request would have had.
        """
        target = self._target_selection.choose_unsent(slot.slot_id)
        status = CUTS.get(slot.drop_reason, "dropped")
        if status == "dropped":
            self.counters.dropped += 1
        elif status == "cancelled":
            self.counters.cancelled += 1

        request_facts = self._bodies.facts_of_unsent(slot.stage, slot.slot_id)
        key = self._record_key(slot, target)
        self._record_log.add_record(
            encode_unsent_record(key, slot.due_ns, slot.drop_reason, status, request_facts)
        )

    def _check_finished(self) -> None:
        """Let `run` return if every slot has ended or was recorded as not sent."""
        if self._dispatcher.is_done:
            self._finish()

    def _finish(self) -> None:
        """Let `run` return."""
        if not self._finished.done():
            self._finished.set_result(None)
            # Without this, the reactor would hold the event loop until its turn is over.
            self._reactor.turn_ns = 0

    def _end_drain(self) -> None:
        """Cancel the requests that are still in flight at the end of the drain.

        The drain is the time that they have to end. It begins at the end of the load and lasts for
        `--grace`. If the load was stopped before its end, it begins at the stop.
        """
        if self.is_stopping:
            # `stop` has already recorded the slots that will not be sent.
            self._cancel_all(
                Failure("interrupted", "not finished when the drain after the interruption ended")
            )
        else:
            self._cancel_unfinished()

    def _cancel_unfinished(self) -> None:
        """Cancel the requests in flight at the end of the drain of a load that was not stopped.

        The drain is the time that requests have to end after the load. The cancelled requests, and
        the slots (places in the schedule) that were never sent, are recorded as "unfinished".
        """
        drain_s = self._drain_ns / SECOND_NS
        failure = Failure(
            "unfinished",
            f"still in flight when the drain ended, {drain_s:g} s after the load (--grace)",
        )

        # A running dispatcher would drop the later turns of the sessions of cancelled requests as
        # "previous_turn_failed". They are recorded as "unfinished" below instead.
        self._dispatcher.stop()

        # `_on_done`, which is called for each cancelled request, must not start other ones.
        self._defers_next_requests = True
        self._cancel_all(failure)
        self._defers_next_requests = False
        self._record_unsent_slots("unfinished")

    def _record_unsent_slots(self, stop_reason: str) -> None:
        """Record, after `Dispatcher.stop`, every slot that will never be sent.

        A slot is the place of one request in the schedule. Some slots were dropped before the stop,
        for example because an earlier turn of their conversation failed. Their records have that
        reason. The others are dropped by the stop, and their records have `stop_reason`. A second
        call does nothing.

        Args:
            stop_reason: Why the load ended: "interrupted" by the user or a rule, or "unfinished"
                when the drain was over.
        """
        if self._has_recorded_unsent:
            return

        self._has_recorded_unsent = True
        for slot in self._dispatcher.unsent_slots():
            # The dispatcher does not know why the load ended and has one reason for every stop.
            if slot.drop_reason == _DROP_REASON_OF_STOP:
                unsent_slot = msgspec.structs.replace(slot, drop_reason=stop_reason)
            else:
                unsent_slot = slot
            self._record_unsent_slot(unsent_slot)

    def _cancel_all(self, failure: Failure) -> None:
        """End all requests in flight with a failure. They do not count against their targets."""
        self._is_cancelling = True
        # Cancelling a request removes it from the dictionary.
        for sent_request in list(self._in_flight.values()):
            self._clients[sent_request.target].cancel(sent_request.handle, failure)

    # Housekeeping

    def _on_tick(self, now: int) -> None:
        """Do the periodic work of a load. The event loop calls this several times per second.

        It ends requests that have timed out, and all others after the drain, which is the time that
        requests have to end after the load. It also counts output events, takes a sample of this
        process each second, and writes to disk what was recorded.
        """
        for client in self._clients:
            client.tick(now)

        if self._is_drain_over(now):
            self._drain_end_ns = FOREVER  # The drain must not end again at the next tick.
            self._end_drain()

        for timeline in self._timelines:
            self.counters.events += timeline.count_new_events()

        if self._sampling.is_due(now):
            self._record_log.add_sample(self._sampling.take_sample(now, self.counters))

        self._write_recorded_data(now)
        self._check_finished()

    def _is_drain_over(self, now: int) -> bool:
        """Return True if the drain has ended and something is still in flight or will follow.

        Slots that are due and have not started are sent first, even if they are late.
        """
        if now < self._drain_end_ns or self._dispatcher.is_done:
            return False
        due_ns = self._dispatcher.next_due_ns()
        return due_ns is None or self.start_ns + due_ns > now

    def _write_recorded_data(self, now: int) -> None:
        """Write records and timelines if it is time to, and measure how long that takes."""
        write_start_ns = monotonic_ns()
        if now >= self._next_flush_ns:
            self._next_flush_ns = now + _FLUSH_INTERVAL_NS
            self._record_log.flush()

        if now >= self._next_timeline_ns:
            self._next_timeline_ns = now + _TIMELINE_INTERVAL_NS
            self._write_timelines()

        self._sampling.written_ns += monotonic_ns() - write_start_ns

    def _write_timelines(self) -> None:
        """Write the counts of output events of each stage: a histogram of gaps and a timeline.

        A stage is a phase of the load, such as the warm-up. Its timeline counts output events by
        bins, short intervals of time. When the bins have been written, those that are too old for
        further events are removed from memory. A stage without any event is skipped.
        """
        for stage_index, timeline in enumerate(self._timelines):
            if timeline.bin_count == 0:
                continue

            self._record_log.write_event_counts(
                stage_index,
                timeline.gaps,
                timeline.bins[: timeline.bin_count],
                timeline.first_bin,
                uncertainties=timeline.uncertainties,
            )
            timeline.discard_final_bins()

    def _write_remaining(self, now: int) -> None:
        """Write everything that has not been written yet."""
        for timeline in self._timelines:
            timeline.count_new_events()
        self._record_log.add_sample(self._sampling.take_sample(now, self.counters))
        self._write_timelines()
        self._record_log.flush()

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """End the run with the exception that a callback raised.

        asyncio would only log it. `context` has no exception if the loop itself reports a problem.
        """
        if self._finished.done():
            return
        exception = context.get("exception")
        if not isinstance(exception, Exception):
            exception = RuntimeError(str(context.get("message")))
        self._finished.set_exception(exception)


async def run_in_this_process(plan: Plan, emit: Emit) -> WorkerResult:
    """Send a complete plan from this process, without worker processes.

    If the plan is a shard of a run, the load starts at the time that all shards have in common.

    Args:
        plan: The plan.
        emit: Called with `LoadStarted` when the load starts.

    Raises:
        TargetError: A target cannot be used.
    """
    shard_of_run = plan.job.settings.shard

    async def wait_for_start() -> int:
        await sleep_until_before_start(shard_of_run, lead_s=START_DELAY_NS / SECOND_NS)
        return start_instant_ns(shard_of_run, lead_ns=START_DELAY_NS)

    return await run_worker(
        plan,
        worker=0,
        workers=1,
        wait_for_start=wait_for_start,
        on_started=partial(_announce_start, emit),
    )


def _announce_start(emit: Emit, driver: Driver) -> None:
    """Send listeners `LoadStarted`, with which they can watch and stop the load of a driver.

    A listener may take long, so SIGINT and the like already stop the load while it is called.
    """
    load = RunningLoad(counters=lambda: driver.counters, stop=driver.stop)
    with stop_signals.on_stop_signal(lambda _signal_number: driver.stop()):
        emit(LoadStarted(driver.start_ns, load))


def make_drive_settings(plan: Plan, worker_schedule: Schedule, worker: int) -> DriveSettings:
    """Return the settings of the driver of one worker.

    Limits of requests in flight or in prefill are for the complete run. Each worker gets its share
    of them, so that the workers together keep to the limits.

    Args:
        plan: The plan of the run.
        worker_schedule: The part of its schedule that the worker sends.
        worker: The number of the worker, from 0.
    """
    job = plan.job
    settings = job.settings
    workload = job.workload

    return DriveSettings(
        route=settings.route,
        stop_on_failure=settings.on_target_failure == "stop",
        drain_ns=workload.drain_ns,
        max_in_flight=share_of_limit(workload.max_in_flight, worker_schedule),
        max_in_prefill=share_of_limit(workload.max_in_prefill, worker_schedule),
        worker=worker,
        run_id=job.run_id,
        trace=TraceContext(job.run_id) if settings.traceparent else None,
        session_header=settings.session_header,
    )


async def run_worker(
    plan: Plan,
    worker: int,
    workers: int,
    wait_for_start: Callable[[], Awaitable[int]],
    on_started: Callable[[Driver], None],
) -> WorkerResult:
    """Send one worker's share of a plan from this process.

    Bodies and connections are ready before the common start time is requested, and the garbage
    collector is off from then on, because a collection would delay the requests that are due.

    Args:
        plan: The plan of the run.
        worker: The number of this worker, from 0.
        workers: How many workers share the plan.
        wait_for_start: Awaited when everything is ready. It returns the start time on the
            monotonic clock in ns.
        on_started: Called with the driver before it sends.

    Raises:
        TargetError: A target cannot be used.
    """
    worker_schedule = shard(plan.schedule, worker, workers)
    settings = make_drive_settings(plan, worker_schedule, worker)
    async with open_resources(plan, worker_schedule, worker) as resources:
        # The preparation has freed much memory that the load does not need. From now on, the
        # allocator returns freed blocks above this size to the system.
        set_largest_kept_block(LARGEST_KEPT_BLOCK_UNDER_LOAD)
        with garbage_collection_disabled():
            start_ns = await wait_for_start()
            driver = Driver(worker_schedule, resources, settings, start_ns=start_ns)
            # The user may have pressed Ctrl-C while the worker waited for the start.
            await stop_signals.raise_pending_interrupt()
            on_started(driver)
            with stop_signals.on_stop_signal(lambda _: driver.stop()):
                await driver.run()

        return _collect_result(driver, resources, hot_path=plan.job.settings.hot_path)


def _collect_result(driver: Driver, resources: WorkerResources, *, hot_path: str) -> WorkerResult:
    """Return what a worker reports after its load to the process that started the run.

    Args:
        driver: The driver of the load, which has ended.
        resources: The bodies that it has sent.
        hot_path: Which implementation read the sockets, "compiled" or "python".
    """
    bodies = resources.bodies
    was_stopped_early_by_user = driver.is_stopping and not driver.was_stopped_by_target
    return WorkerResult(
        prompts_total=bodies.digest.total,
        prompts_count=bodies.digest.count,
        bodies_total=bodies.body_digest.total,
        late_bodies=bodies.late_bodies,
        interrupted=was_stopped_early_by_user,
        stopped=driver.was_stopped_by_target,
        down_since_s=driver.down_since_s,
        hot_path=hot_path,
    )
