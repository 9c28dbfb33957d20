"""Carries out one share of a plan in one process: `Driver` waits until requests are due, sends them, records the
results, drains and stops. `share.py` makes what it needs for that: bodies, connections, files.

`Driver` is a thin shell over `schedule.dispatcher.Dispatcher`, which decides what starts when, and `Sender.send`, which
sends. There is no asyncio task and no future per request. Records go to a `Spool`; the driver computes only the
counters of the progress line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic_ns
from typing import Any, Protocol

import msgspec
from loadgen_sdk.dialects.reader import Flow
from loadgen_sdk.request import Completion, Failure
from loadgen_sdk.transport.wire import FOREVER

from loadgen.core.execution import stop_signals
from loadgen.core.execution.events import Counters, LoadStarted, RunningLoad, Tell
from loadgen.core.execution.plan import Plan, cap
from loadgen.core.execution.self_sampling import SECOND_NS, SelfSampling
from loadgen.core.execution.shard import sleep_until_before_start, start_instant_ns
from loadgen.core.execution.share import (
    AHEAD,
    LARGE_BLOCK,
    Equipment,
    Share,
    equipped,
    no_collector,
    return_blocks,
)
from loadgen.core.execution.target_selection import TargetSelection
from loadgen.core.requests.trace_context import TraceContext
from loadgen.core.results.record import (
    CUTS,
    Built,
    RecordKey,
    sent_record,
    text_of,
    unsent_record,
)
from loadgen.core.results.spool import Timeline
from loadgen.core.schedule.dispatcher import Dispatcher, Start
from loadgen.core.schedule.timetable import Schedule, shard

BURST = 8  # requests started in one turn: a send takes about 20 µs, and reading must not wait long
HOLD_NS = 5_000_000  # longest time without a turn of the event loop, which handles signals and the progress line
FLUSH_NS = SECOND_NS // 2  # how often rows are written to disk
FLOWS_NS = (
    2 * SECOND_NS
)  # how often histograms and timelines are written; a histogram is rewritten in full
AFTER_STOP_NS = (
    30 * SECOND_NS
)  # longest time that requests in flight may go on after the user stopped the load
SETTLE_NS = 20_000_000  # from the moment when everything is ready to instant 0


class Sender(Protocol):
    """What the driver needs of a client, which is the SDK's `Pool`."""

    def send(
        self,
        request: None,
        body: bytes,
        due: int,
        on_done: Callable[[Completion], None],
        flow: Flow,
        *,
        name: str,
        asked_output: int,
        **more: Any,
    ) -> object:
        """`more`: `more` header lines; for requests of conversations and tasks also `sink` of output events;
        `on_first`, which is told when the first output came.
        """

    def cancel(self, exchange: object, failure: Failure) -> None: ...

    def tick(self, now: int) -> None: ...

    @property
    def in_flight(self) -> int: ...


class DriveSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver keeps to.

    `route`: how a target is chosen. `stop_on_failure`: the run ends when a target stops answering. `hold_ns`: longest
    time without a turn of the event loop. `drain_ns`: how long requests in flight may go on after the last one is due.
    """

    route: str = "auto"
    stop_on_failure: bool = False
    hold_ns: int = HOLD_NS
    drain_ns: int
    max_in_flight: int | None = None
    max_in_prefill: int | None = None
    worker: int = 0
    run_id: str = ""
    trace: TraceContext | None = None
    session_header: str | None = None


class Driver:
    """One schedule, one client per target, one spool. `run` returns when every slot has a record."""

    def __init__(
        self, schedule: Schedule, own: Equipment, settings: DriveSettings, *, start_ns: int
    ) -> None:
        """`start_ns`: instant 0 of the schedule, on the monotonic clock."""
        clients, wire, drain_ns = own.clients, own.wire, settings.drain_ns
        self._schedule, self._session_header = schedule, settings.session_header
        self._dispatcher = Dispatcher(
            schedule, max_in_flight=settings.max_in_flight, max_in_prefill=settings.max_in_prefill
        )
        self._caps_prefill = settings.max_in_prefill is not None
        self._bodies, self._clients, self._wire, self._spool = own.bodies, clients, wire, own.spool
        self._numbers_by_stage, self._head_lines = own.numbers, own.head_lines
        self._sent_by_stage = [0] * len(schedule.stages)
        self._chain_step = [
            0 if span.chains is not None else span.lanes * schedule.turns
            for span in schedule.stages
        ]
        self._selection = TargetSelection(
            settings.route,
            len(clients),
            schedule.turns,
            lambda target: clients[target].in_flight,
            own.serving,
        )
        self._stop_on_failure = settings.stop_on_failure
        self.start_ns, self._drain_ns = start_ns, drain_ns
        self._worker, self._run_id, self._trace = settings.worker, settings.run_id, settings.trace
        self._redact = own.redact
        self._timelines = [Timeline(start_ns) for _ in schedule.stages]
        horizon = schedule.horizon_ns
        self._load_end_ns = FOREVER if horizon is None else start_ns + horizon
        self._drain_end_ns = FOREVER if horizon is None else start_ns + horizon + drain_ns
        self._is_rest_recorded = False  # the slots that will never be sent have their records
        self._in_flight: dict[int, tuple[int, object]] = {}
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flush_at_ns = start_ns + FLUSH_NS
        self._flows_at_ns = start_ns + FLOWS_NS
        self._sampling = SelfSampling(settings.worker, start_ns)
        self.counters = Counters()
        self.interrupted = False
        self.stopped = False  # because a target stopped answering
        self._cancelling = False  # we are cancelling the requests in flight
        self._starting = (
            False  # requests are started or ended in bulk: a completion must not start more
        )
        wire.hold_ns = settings.hold_ns
        wire.wake = self._on_wake
        wire.tick = self._on_tick
        # bodies of a load without end are built during the run, where no other process does
        if own.numbers and schedule.slots is None:
            wire.idle = self._build_ahead

    async def run(self) -> None:
        """Run from the start instant to the last record. Raises an exception that a callback raised (a bug)."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        try:
            self._set_wake_up()
            self._check_finished()
            await self._finished
        finally:
            self._wire.wake_at(FOREVER)
            self._wire.wake = self._wire.tick = self._wire.idle = None
            self._wire.hold_ns = 0
            self._write_rest(monotonic_ns())
            self._sampling.close()
            loop.set_exception_handler(None)

    @property
    def down(self) -> dict[int, float]:
        """Targets that stopped answering -> when they first did, s from the start."""
        return {
            target: round((at_ns - self.start_ns) / SECOND_NS, 3)
            for target, at_ns in self._selection.down.items()
        }

    def give_up(self) -> None:
        """Stop because a target stopped answering and the run is configured to end in that case."""
        if not self.interrupted:
            self.stopped = True
            self.stop()

    def stop(self) -> None:
        """Start no more requests; those in flight may end within the drain, at most AFTER_STOP_NS.

        A second call ends the run at once, and so does the first one where the load is over and only the drain is left.
        """
        if self._finished.done():
            return
        now = monotonic_ns()
        if self.interrupted or (now >= self._load_end_ns and not self.stopped):
            self.interrupted = True
            self._dispatcher.stop()
            self._cancel_all(Failure("interrupted", "interrupted by the user"))
            self._record_rest("interrupted")
            self._finish()
            return
        self.interrupted = True
        self._dispatcher.stop()
        self._record_rest("interrupted")
        self._drain_end_ns = min(self._drain_end_ns, now + min(self._drain_ns, AFTER_STOP_NS))
        self._check_finished()

    # -- starting and ending requests ----------------------------------------------------------------------------

    def _on_wake(self, now: int) -> None:
        self._starting = True
        for start in self._dispatcher.ready(now - self.start_ns, BURST):
            if start.dropped:
                self._record_unsent(start)
            else:
                self._send(start)
        self._starting = False
        self._set_wake_up()

    def _set_wake_up(self) -> None:
        due = self._dispatcher.next_ns()
        self._wire.wake_at(FOREVER if due is None else self.start_ns + due)

    def _send(self, start: Start) -> None:
        number = start.number
        self._sent_by_stage[start.stage] += 1
        self.counters.sent += 1
        self.counters.in_flight += 1
        target = self._selection.choose(number, monotonic_ns()) if len(self._clients) > 1 else 0
        self._in_flight[number] = (target, None)
        body, built = self._bodies.take(start.stage, number)
        more = self._of_session(start) if start.session >= 0 else {}
        if self._trace is not None:
            more["more"] = self._trace.header(number) + more.get("more", b"")
        if self._head_lines is not None:
            more["more"] = self._head_lines(number) + more.get("more", b"")
        if self._caps_prefill:
            more["on_first"] = partial(self._on_first, number)
        exchange = self._clients[target].send(
            None,
            body,
            self.start_ns + start.due_ns,
            partial(self._on_done, start, target, built),
            self._timelines[start.stage].flow,
            name=f"{self._run_id}-{number}",
            asked_output=built.asked_output,
            **more,
        )
        if number in self._in_flight:  # not there if it failed at once because no socket was free
            self._in_flight[number] = (target, exchange)

    def _of_session(self, start: Start) -> dict[str, Any]:
        """What is said with a request of a conversation or task: its session, and where its user goes away."""
        more: dict[str, Any] = {}
        if self._session_header is not None:
            more["more"] = f"{self._session_header}: {self._run_id}-{start.session}\r\n".encode(
                "latin-1"
            )
        leaving = self._schedule.chains.of(start.session).leaving
        if leaving is not None and leaving.turn == start.turn:
            events_left = leaving.tokens

            def hear(text: str, reasoning: str, at: int) -> None:
                nonlocal events_left
                events_left -= 1
                if not events_left:  # not from within the reading of its events
                    asyncio.get_running_loop().call_soon(self._abandon, start.number)

            more["sink"] = hear
        return more

    def _abandon(self, number: int) -> None:
        """The user of a task goes away: end this request, and those in flight beside it."""
        if number not in self._in_flight:  # its last event came in the same read
            return
        for one in (number, *self._dispatcher.beside(number)):
            target, exchange = self._in_flight[one]
            self._clients[target].cancel(
                exchange, Failure("abandoned", "its user went away in the middle of an answer")
            )

    def _build_ahead(self) -> bool:
        """Called when there is no traffic: build one body of a load without end. True if there may be more to do."""
        for stage, numbers in enumerate(self._numbers_by_stage):
            if self._sent_by_stage[stage] + AHEAD > self._bodies.ahead(
                stage
            ) and self._bodies.build(stage, numbers, most=1):
                return True
        return False

    def _on_first(self, number: int, at_ns: int) -> None:
        """The first output of a request has come: its place in prefill is free."""
        self._dispatcher.first_output(number, at_ns - self.start_ns)
        if not self._starting:
            self._on_wake(monotonic_ns())

    def _on_done(self, start: Start, target: int, built: Built, completion: Completion) -> None:
        """Record the end of a request, and start what follows it."""
        self._in_flight.pop(start.number, None)
        self.counters.in_flight -= 1
        if completion.failure is not None:
            self._count_failure(target, completion)
        else:
            self._count_success(target, completion)
        self._bodies.answered(start.number, completion)
        self._spool.row(self._record_of(start, target, built, completion))
        self._report_end(start, completion)
        if self._starting:
            return
        self._on_wake(monotonic_ns())
        if not self._in_flight:
            self._check_finished()

    def _count_success(self, target: int, completion: Completion) -> None:
        self.counters.ok += 1
        if self._selection.refusals[target]:
            self._selection.answered(target)
        if completion.first_token >= 0:
            self.counters.recent_ttft_ns.append(completion.first_token - completion.due)

    def _count_failure(self, target: int, completion: Completion) -> None:
        """Count a failure of the server, and give up if the target stopped answering."""
        assert completion.failure is not None
        if completion.failure.kind not in CUTS:
            self.counters.failed += 1
        if self._cancelling:
            return
        has_gone_down = self._selection.failed(target, completion, completion.done)
        if has_gone_down and self._stop_on_failure:
            self.give_up()

    def _report_end(self, start: Start, completion: Completion) -> None:
        """Tell the dispatcher that a request has ended."""
        failure = completion.failure
        pause_ns = 0
        step = 0 if failure is None else self._chain_step[start.stage]
        if step:  # a virtual user of a stage without a count may go on to its next chain
            pause_ns = self._selection.pause_ns(start.number - start.turn + step)
        is_abandoned = failure is not None and failure.kind == "abandoned"
        self._dispatcher.finished(
            start.number,
            completion.done - self.start_ns,
            failure is None,
            pause_ns,
            "abandoned" if is_abandoned else "previous_turn_failed",
        )

    def _record_key(self, start: Start, target: int) -> RecordKey:
        return RecordKey(
            slot=start.number,
            request=start.number,
            stage=start.stage,
            worker=self._worker,
            target=target,
            session=start.session,
            turn=start.turn,
            lane=start.lane,
        )

    def _record_of(self, start: Start, target: int, built: Built, completion: Completion) -> bytes:
        text = -1
        if words := text_of(completion):
            text = self._spool.text(self._redact(words))
        key = self._record_key(start, target)
        return sent_record(key, completion, self.start_ns, text=text, built=built)

    def _record_unsent(self, start: Start) -> None:
        """Record a slot whose request was never sent."""
        self.counters.dropped += 1
        target = self._selection.choose(start.number, -1)
        status = CUTS.get(start.dropped, "dropped")
        built = self._bodies.built(start.stage, start.number)
        key = self._record_key(start, target)
        self._spool.row(unsent_record(key, start.due_ns, start.dropped, status, built))

    def _check_finished(self) -> None:
        if self._dispatcher.done:
            self._finish()

    def _finish(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)
            self._wire.hold_ns = 0  # the event loop continues at once

    def _end_drain(self) -> None:
        """The drain is over: cut what is in flight; record the slots that would have followed as never sent."""
        if self.interrupted:
            self._cancel_all(
                Failure("interrupted", "not finished when the drain after the interruption ended")
            )
            return
        self._dispatcher.stop()  # before the cut: it must not drop the turns after those that are cut
        self._starting = True
        drain = self._drain_ns / SECOND_NS
        self._cancel_all(
            Failure(
                "unfinished",
                f"in flight when the drain ended, {drain:g} s after the load (--grace)",
            )
        )
        self._starting = False
        self._record_rest("unfinished")

    def _record_rest(self, kind: str) -> None:
        """After `dispatcher.stop`: record every slot that will never be sent. `kind`: why, where nothing else was."""
        if self._is_rest_recorded:
            return
        self._is_rest_recorded = True
        for start in self._dispatcher.unsent():
            self._record_unsent(
                msgspec.structs.replace(start, dropped=kind)
                if start.dropped == "interrupted"
                else start
            )

    def _cancel_all(self, failure: Failure) -> None:
        self._cancelling = True
        for target, exchange in list(self._in_flight.values()):
            self._clients[target].cancel(exchange, failure)

    # -- housekeeping --------------------------------------------------------------------------------------------

    def _on_tick(self, now: int) -> None:
        for client in self._clients:
            client.tick(now)
        if now >= self._drain_end_ns and not self._dispatcher.done:
            due = self._dispatcher.next_ns()
            if (
                due is None or self.start_ns + due > now
            ):  # what is due and not started is sent first, even if late
                self._drain_end_ns = FOREVER
                self._end_drain()
        for timeline in self._timelines:
            self.counters.events += timeline.fold()
        if self._sampling.is_due(now):
            self._spool.second(self._sampling.second(now, self.counters))
        began = monotonic_ns()
        if now >= self._flush_at_ns:
            self._flush_at_ns = now + FLUSH_NS
            self._spool.flush()
        if now >= self._flows_at_ns:
            self._flows_at_ns = now + FLOWS_NS
            self._store_flows()
        self._sampling.written_ns += monotonic_ns() - began
        self._check_finished()

    def _store_flows(self) -> None:
        for stage, timeline in enumerate(self._timelines):
            if timeline.used:
                bins = timeline.bins[: timeline.used]
                self._spool.flows(
                    stage, timeline.gaps, bins, timeline.first, errors=timeline.errors
                )
                timeline.stored()

    def _write_rest(self, now: int) -> None:
        for timeline in self._timelines:
            timeline.fold()
        self._spool.second(self._sampling.second(now, self.counters))
        self._store_flows()
        self._spool.flush()

    def _on_loop_error(self, _: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if not self._finished.done():
            exception = (
                error if isinstance(error, Exception) else RuntimeError(str(context.get("message")))
            )
            self._finished.set_exception(exception)


# -- a share of a plan in this process ---------------------------------------------------------------------------------


async def run(plan: Plan, tell: Tell) -> Share:
    """Carry out a plan in this process."""

    shard_of_run = plan.job.settings.shard

    async def gate() -> int:
        await sleep_until_before_start(shard_of_run, lead_s=SETTLE_NS / SECOND_NS)
        return start_instant_ns(shard_of_run, lead_ns=SETTLE_NS)

    def begun(driver: Driver) -> None:
        with stop_signals.calling(lambda _: driver.stop()):
            tell(LoadStarted(driver.start_ns, RunningLoad(lambda: driver.counters, driver.stop)))

    return await work(plan, 0, 1, gate, begun)


def drive_settings(plan: Plan, part: Schedule, worker: int) -> DriveSettings:
    """Return the settings of the driver that sends `part` of a plan as worker number `worker`."""
    job, settings, workload = plan.job, plan.job.settings, plan.job.workload
    return DriveSettings(
        route=settings.route,
        stop_on_failure=settings.on_target_failure == "stop",
        drain_ns=workload.drain_ns,
        max_in_flight=cap(workload.max_in_flight, part.part, part.parts),
        max_in_prefill=cap(workload.max_in_prefill, part.part, part.parts),
        worker=worker,
        run_id=job.run_id,
        trace=TraceContext(job.run_id) if settings.traceparent else None,
        session_header=settings.session_header,
    )


async def work(
    plan: Plan,
    share: int,
    shares: int,
    gate: Callable[[], Awaitable[int]],
    begun: Callable[[Driver], None],
) -> Share:
    """Do one share of a plan in this process. Raises TargetError if a target cannot be used.

    `gate()` is awaited when everything is ready and returns the start instant (monotonic ns). `begun` is called with
    the driver before it runs.
    """
    part = shard(plan.timetable, share, shares)
    async with equipped(plan, part, share) as own:
        return_blocks(LARGE_BLOCK)
        with no_collector():
            driver = Driver(part, own, drive_settings(plan, part, share), start_ns=await gate())
            await stop_signals.heard()
            begun(driver)
            with stop_signals.calling(lambda _: driver.stop()):
                await driver.run()
        digest = own.bodies.digest
        return Share(
            prompts_total=digest.total,
            prompts_count=digest.count,
            bodies_total=own.bodies.sent_bytes.total,
            late=own.bodies.late,
            interrupted=driver.interrupted and not driver.stopped,
            stopped=driver.stopped,
            down=driver.down,
            hot_path=plan.job.settings.hot_path,
        )
