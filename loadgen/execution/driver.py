"""Runs one schedule in one process: sleeps, sends, keeps the records, stops. The only place that waits.

A thin shell over `agenda.Agenda` (which decides) and `Client.send` (which sends): no task and no future per request.
What it learns goes to a `store.Spool`; it computes nothing from it but the counters of the progress line.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic_ns, process_time_ns
from typing import Protocol

import numpy as np
from loadgen_sdk.dialects.reader import Flow
from loadgen_sdk.request import Completion, Failure
from loadgen_sdk.transport.wire import FOREVER, Wire
from numpy.typing import NDArray

from loadgen.execution.bodies import Bodies
from loadgen.execution.target_selection import TargetSelection
from loadgen.results.manifest import Second
from loadgen.results.record import BIN_NS, RowPlace, row, unsent_row
from loadgen.results.store import Spool
from loadgen.schedule.dispatcher import Dispatcher, Start
from loadgen.schedule.timetable import Schedule
from loadgen.stats.quantiles import Histogram

AHEAD = 2_000  # bodies kept built ahead of a load without end
BURST = 8  # requests started in one turn: a send costs some 20 µs, and reading must not wait for long
HOLD_NS = 2_000_000  # between two looks at the event loop's own affairs: signals and the progress line
SECOND_NS = 1_000_000_000
FLUSH_NS = SECOND_NS // 2  # rows reach the disk this often
FLOWS_NS = 2 * SECOND_NS  # histograms and timelines, which are rewritten whole
GROWING_BINS = 1_000  # of the timeline: an event is counted within 10 s of its coming
RECENT = 2_000  # latencies kept for the progress line


class Sender(Protocol):
    """What the driver needs of a client: `Client`, or the reference client around the openai package."""

    def send(
        self, request: None, body: bytes, due: int, on_done: Callable[[Completion], None], flow: Flow, *, name: str
    ) -> object: ...

    def cancel(self, exchange: object, failure: Failure) -> None: ...

    def tick(self, now: int) -> None: ...

    @property
    def in_flight(self) -> int: ...


class Waiting:
    """How long this thread has been ready to run while others had its core: Linux counts it, elsewhere it is None."""

    __slots__ = ("_before", "_file")

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1
        self._before = self.ns()

    def ns(self) -> int | None:
        """In all."""
        return int(os.pread(self._file, 64, 0).split()[1]) if self._file >= 0 else None

    def since(self) -> int | None:
        """Since this was last asked, or since it was made."""
        before, self._before = self._before, self.ns()
        return None if before is None or self._before is None else self._before - before

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Counters:
    """What the progress line shows; updated in place while the run goes."""

    __slots__ = ("dropped", "events", "failed", "in_flight", "ok", "recent_ttft_ns", "sent")

    def __init__(self) -> None:
        self.sent = self.ok = self.failed = self.dropped = self.events = self.in_flight = 0
        self.recent_ttft_ns: deque[int] = deque(maxlen=RECENT)


class Timeline:
    """Output events of one stage: their gaps as a histogram, their instants as counts per BIN_NS of the run."""

    __slots__ = ("_start_ns", "bins", "first", "flow", "gaps", "used")

    def __init__(self, start_ns: int) -> None:
        self.flow = Flow()
        self.gaps = Histogram()
        self.bins: NDArray[np.int64] = np.zeros(1024, np.int64)
        self.first = 0  # the bin of `bins[0]`: those before are stored and done with
        self.used = 0
        self._start_ns = start_ns

    def fold(self) -> None:
        """Count what the flow has collected, and empty it."""
        flow = self.flow
        if flow.gaps:
            self.gaps.add(np.array(flow.gaps, np.int64))
            flow.gaps.clear()
        if flow.instants:
            places = (np.array(flow.instants, np.int64) - self._start_ns) // BIN_NS - self.first
            flow.instants.clear()
            counts = np.bincount(np.maximum(places, 0))
            if len(counts) > len(self.bins):
                grown = np.zeros(len(counts) * 2, np.int64)
                grown[: len(self.bins)] = self.bins
                self.bins = grown
            self.bins[: len(counts)] += counts
            self.used = max(self.used, len(counts))

    def stored(self) -> None:
        """All so far is on disk: keep only the bins that may still grow."""
        gone = self.used - GROWING_BINS
        if gone > GROWING_BINS:
            self.bins[:GROWING_BINS] = self.bins[gone : self.used]
            self.bins[GROWING_BINS:] = 0
            self.first += gone
            self.used = GROWING_BINS


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """While inside, Python's cycle collector rests: a pass over all that exists would hold the sending loop for tens of
    ms, and the path of a request makes no cycles. Enter it before the start instant is chosen."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class Driver:
    """One schedule, its clients (one per target), one spool. `run` returns when every slot has its record."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        bodies: Bodies,
        numbers: Sequence[Iterator[int]],
        clients: Sequence[Sender],
        route: str = "auto",
        stop_on_failure: bool = False,
        wire: Wire,
        hold_ns: int = HOLD_NS,
        spool: Spool,
        start_ns: int,
        grace_ns: int,
        max_in_flight: int | None = None,
        worker: int = 0,
        run_id: str = "",
        redact: Callable[[str], str] = str,
    ) -> None:
        self._agenda = Dispatcher(schedule, max_in_flight=max_in_flight)
        self._bodies, self._clients, self._wire, self._spool = bodies, clients, wire, spool
        self._numbers = numbers
        self._sent = [0] * len(schedule.stages)
        self._step = [0 if span.chains is not None else span.lanes * schedule.turns for span in schedule.stages]
        self._routes = TargetSelection(route, len(clients), schedule.turns, lambda target: clients[target].in_flight)
        self._stop_on_failure = stop_on_failure
        self._start_ns, self._grace_ns, self._worker, self._run_id = start_ns, grace_ns, worker, run_id
        self._redact = redact
        self._timelines = [Timeline(start_ns) for _ in schedule.stages]
        horizon = schedule.horizon_ns
        self._grace_over = FOREVER if horizon is None else start_ns + horizon + grace_ns
        self._flying: dict[int, tuple[int, object]] = {}
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flush_at = start_ns + FLUSH_NS
        self._flows_at = start_ns + FLOWS_NS
        self._second_from = start_ns
        self._cpu_ns = process_time_ns()
        self._cpu_start_ns = self._cpu_ns
        self._waiting: Waiting | None = None  # while it runs
        self.counters = Counters()
        self.interrupted = False
        self.stopped = False  # because a target stopped answering
        self._cutting = False  # what is in flight is being ended by us
        self._starting = False  # requests are being started or ended in bulk: a completion must not start more
        wire.hold_ns = hold_ns
        wire.wake = self._wake
        wire.tick = self._tick
        if schedule.slots is None:  # a load without end is built as it goes
            wire.idle = self._idle

    async def run(self) -> None:
        """From the start instant to the last record. Raises whatever a bug in a callback raised."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._bug)
        self._waiting = Waiting()
        try:
            self._arm()
            self._check_over()
            await self._over
        finally:
            self._wire.wake_at(FOREVER)
            self._wire.wake = self._wire.tick = self._wire.idle = None
            self._wire.hold_ns = 0
            self._last_words(monotonic_ns())
            self._waiting.close()
            loop.set_exception_handler(None)

    @property
    def down(self) -> dict[int, float]:
        """Targets that stopped answering, and when they first did, in s from the start."""
        return {target: round((at - self._start_ns) / SECOND_NS, 3) for target, at in self._routes.down.items()}

    def give_up(self) -> None:
        """`stop`, because a target stopped answering and the run was asked to end then."""
        if not self.interrupted:
            self.stopped = True
            self.stop()

    def stop(self) -> None:
        """Start nothing more; what is in flight may finish within the grace time. A second call leaves at once."""
        if self._over.done():
            return
        if self.interrupted:
            self._cancel_all(Failure("interrupted", "interrupted by the user"))
            self._finish()
            return
        self.interrupted = True
        self._agenda.stop()
        for start in self._agenda.unsent():
            self._never(start)
        self._grace_over = min(self._grace_over, monotonic_ns() + self._grace_ns)
        self._check_over()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """While inside, the first SIGINT or SIGTERM asks the run to stop and the second insists."""
        if threading.current_thread() is not threading.main_thread():  # a caller's thread gets no signals
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    # -- starting and ending requests ----------------------------------------------------------------------------

    def _wake(self, now: int) -> None:
        self._starting = True
        for start in self._agenda.ready(now - self._start_ns, BURST):
            if start.dropped:
                self._never(start)
            else:
                self._send(start)
        self._starting = False
        self._arm()

    def _arm(self) -> None:
        due = self._agenda.next_ns()
        self._wire.wake_at(FOREVER if due is None else self._start_ns + due)

    def _send(self, start: Start) -> None:
        number = start.number
        self._sent[start.stage] += 1
        self.counters.sent += 1
        self.counters.in_flight += 1
        target = self._routes.choose(number, monotonic_ns())
        self._flying[number] = (target, None)
        exchange = self._clients[target].send(
            None,
            self._bodies.body(start.stage, number),
            self._start_ns + start.due_ns,
            partial(self._done, start, target),
            self._timelines[start.stage].flow,
            name=f"{self._run_id}-{number}",
        )
        if number in self._flying:  # it may have failed at once, for want of a socket
            self._flying[number] = (target, exchange)

    def _idle(self) -> bool:
        """A moment without traffic: build one body of a load without end ahead. True when there may be more to do."""
        for stage, numbers in enumerate(self._numbers):
            if self._sent[stage] + AHEAD > self._bodies.ahead(stage) and self._bodies.build(stage, numbers, most=1):
                return True
        return False

    def _done(self, start: Start, target: int, done: Completion) -> None:
        number = start.number
        self._flying.pop(number, None)
        counters = self.counters
        counters.in_flight -= 1
        failure = done.failure
        text = -1
        if failure is None:
            counters.ok += 1
            if done.first_token >= 0:
                counters.recent_ttft_ns.append(done.first_token - done.due)
            self._routes.answered(target)
        else:
            counters.failed += 1
            if not self._cutting and self._routes.failed(target, done, done.done) and self._stop_on_failure:
                self.give_up()
            text = self._spool.text(self._redact(failure.text))
        place = RowPlace(
            number, start.request, start.stage, self._worker, target, start.session, start.turn, start.lane
        )
        self._spool.row(row(place, done, self._start_ns, text=text, built=self._bodies.built(start.stage, number)))
        self._bodies.answered(number, done)
        agenda = self._agenda
        pause = 0
        if failure is not None and (step := self._step[start.stage]):  # of a load without a count, to its next chain
            pause = self._routes.pause_ns(number - start.turn + step)
        agenda.finished(number, done.done - self._start_ns, failure is None, pause)
        if self._starting:
            return
        if agenda.next_ns() is not None:
            self._wake(monotonic_ns())
        elif not self._flying:
            self._check_over()

    def _never(self, start: Start) -> None:
        self.counters.dropped += 1
        place = RowPlace(
            start.number,
            start.request,
            start.stage,
            self._worker,
            self._routes.choose(start.number, -1),
            start.session,
            start.turn,
            start.lane,
        )
        status = "cancelled" if start.dropped == "interrupted" else "dropped"
        self._spool.row(
            unsent_row(place, start.due_ns, start.dropped, status, self._bodies.built(start.stage, start.number))
        )

    def _check_over(self) -> None:
        if self._agenda.done and not self._over.done():
            self._finish()

    def _finish(self) -> None:
        if not self._over.done():
            self._over.set_result(None)
            self._wire.hold_ns = 0  # the loop has its say at once

    def _behind(self, now: int) -> bool:
        """Something is due that has not been started yet: late or not, it is sent first."""
        due = self._agenda.next_ns()
        return due is not None and self._start_ns + due <= now

    def _end_grace(self) -> None:
        """What is in flight has had its time; what would have come after it never starts, and has its record."""
        if self.interrupted:
            self._cancel_all(Failure("interrupted", "not finished within the grace time after the interruption"))
            return
        self._starting = True
        grace = self._grace_ns / SECOND_NS
        self._cancel_all(Failure("timeout_total", f"not finished {grace:g} s (grace) after the end of the load"))
        self._starting = False
        self._agenda.stop()
        for start in self._agenda.unsent():
            self._never(start._replace(dropped="timeout_total") if start.dropped == "interrupted" else start)

    def _cancel_all(self, failure: Failure) -> None:
        self._cutting = True
        for target, exchange in list(self._flying.values()):
            self._clients[target].cancel(exchange, failure)

    # -- housekeeping --------------------------------------------------------------------------------------------

    def _tick(self, now: int) -> None:
        for client in self._clients:
            client.tick(now)
        if now >= self._grace_over and not self._agenda.done and not self._behind(now):
            self._grace_over = FOREVER
            self._end_grace()
        for timeline in self._timelines:
            self.counters.events += len(timeline.flow.instants)
            timeline.fold()
        if now >= self._second_from + SECOND_NS:
            self._sample(now)
        if now >= self._flush_at:
            self._flush_at = now + FLUSH_NS
            self._spool.flush()
        if now >= self._flows_at:
            self._flows_at = now + FLOWS_NS
            self._store_flows()
        self._check_over()

    def _sample(self, now: int) -> None:
        cpu = process_time_ns()
        span = now - self._second_from
        waited = self._waiting.since() if self._waiting is not None else None
        counters = self.counters
        self._spool.second(
            Second(
                t_s=round((now - self._start_ns) / SECOND_NS, 3),
                worker=self._worker,
                span_s=round(span / SECOND_NS, 3),
                cpu_share=round((cpu - self._cpu_ns) / span, 4) if span else 0.0,
                waited_share=round(waited / span, 4) if span and waited is not None else None,
                cpu_s=round((cpu - self._cpu_start_ns) / SECOND_NS, 4),
                peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                in_flight=counters.in_flight,
                sent=counters.sent,
                done=counters.ok + counters.failed,
                failed=counters.failed,
            )
        )
        self._second_from, self._cpu_ns = now, cpu

    def _store_flows(self) -> None:
        for stage, timeline in enumerate(self._timelines):
            if timeline.used:
                self._spool.flows(stage, timeline.gaps, timeline.bins[: timeline.used], timeline.first)
                timeline.stored()

    def _last_words(self, now: int) -> None:
        for timeline in self._timelines:
            timeline.fold()
        self._sample(now)
        self._store_flows()
        self._spool.flush()

    def _bug(self, _: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        if not self._over.done():
            told = error if isinstance(error, Exception) else RuntimeError(str(context.get("message")))
            self._over.set_exception(told)
