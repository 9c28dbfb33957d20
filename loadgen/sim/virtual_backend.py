"""A run in virtual time: workload, timetable and dispatcher as over HTTP, against simulated replicas in memory.

There is no socket, no task per request and no event per token; the only clock is a heap of iteration ends. The result
is an ordinary run folder that says *simulated* wherever it names its target.
"""

from __future__ import annotations

import gc
import hashlib
import heapq
import resource
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, cast

import msgspec
import numpy as np
from loadgen_sdk.dialects.quirks import QUIRKS
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.transport.target import Target
from numpy.typing import NDArray

from loadgen.backends import after_scheme
from loadgen.core.errors import UserError
from loadgen.core.execution import run_header
from loadgen.core.execution.context import Context, KnownTarget
from loadgen.core.execution.driver import AFTER_STOP_NS
from loadgen.core.execution.events import Look, RunPlanned, Simulated, SimulationStarted, Tell
from loadgen.core.execution.lane_start import AnswerTime
from loadgen.core.execution.plan import Settings, prepare
from loadgen.core.execution.steering import MakeSteering
from loadgen.core.execution.stop_watch import LOOK_NS
from loadgen.core.metrics import reasons
from loadgen.core.metrics.summary import Summary, dump_summary, summarize
from loadgen.core.requests import prompts, resonance
from loadgen.core.requests.task_graphs import Leaving
from loadgen.core.results import checksums, store
from loadgen.core.results.manifest import Header, Second
from loadgen.core.results.record import KIND, STATUS, WITH_UNFINISHED
from loadgen.core.schedule.dispatcher import Dispatcher
from loadgen.core.schedule.steered import End, Steered
from loadgen.core.schedule.timetable import Schedule
from loadgen.core.workload import Workload
from loadgen.sim import open_loop, virtual_folder
from loadgen.sim.engine.replica import DONE, NEVER, Costs, Replica, ServerLimits, SimRequest
from loadgen.sim.engine.routing import Route, route
from loadgen.sim.presets.preset import Preset, load_preset
from loadgen.sim.request_lengths import Sizes, sizes_of
from loadgen.sim.stop_watch import VirtualStopWatch, first_breach
from loadgen.sim.virtual_rows import Flights, VirtualRows, outcome, rows_so_far

TEXTS = (
    "not finished when its time was over",
    "the simulated server refuses a prompt of this length",
    "in flight when the drain ended (--grace)",
    "not finished when the drain after the stop ended",
    "its user went away in the middle of an answer",
    "its replica went away",
)
REFUSED = KIND["http_4xx"]


class SimulatedSystem(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated: replicas of these costs and limits, and how fast each is. `interval`: tokens per event.
    `changes`: from when on only the first so many of them serve."""

    costs: Costs
    limits: ServerLimits
    speeds: Sequence[float] = (1.0,)
    routing: str = "round_robin"
    interval: int = 1
    changes: Sequence[tuple[int, int]] = ()

    def replicas(self) -> list[Replica]:
        return [Replica(self.costs.at_speed(speed), self.limits) for speed in self.speeds]

    def route(self) -> Route:
        return route(self.speeds, self.routing)


class Course:
    """One simulated run: replicas, and the dispatcher that sends requests to them. `run` simulates the whole load."""

    def __init__(
        self,
        schedule: Schedule,
        sizes: Sizes,
        replicas: Sequence[Replica],
        next_replica: Route,
        *,
        max_in_flight: int | None = None,
        max_in_prefill: int | None = None,
        timeout_ns: int = NEVER,
        drain_ns: int = NEVER,
        stop_ns: int = NEVER,
        steer: Callable[[Dispatcher], Steered] | None = None,
        looks: Sequence[Look] = (),
        changes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.flights = Flights()
        self.replicas = replicas
        self._serving = len(replicas)  # the first so many take requests
        self._changes = deque(changes)
        self.ends: list[NDArray[np.int64]] = []  # of the iterations of each replica, once all are over
        self._dispatcher = Dispatcher(schedule, max_in_flight=max_in_flight, max_in_prefill=max_in_prefill)
        self._caps_prefill = max_in_prefill is not None
        self.steered = None if steer is None else steer(self._dispatcher)
        self._looks = list(looks)
        self.decided = False  # one of `looks` has ended the load
        self._seen = 0  # values of `flights.sent` that the steering, or `looks`, have seen
        self._sizes, self._next_replica = sizes, next_replica
        horizon = None if steer is not None else schedule.horizon_ns
        self._end_ns = NEVER if horizon is None or drain_ns >= NEVER else horizon + drain_ns
        self._timeout_ns, self._stop_ns = timeout_ns, stop_ns
        self._after_stop_ns = min(drain_ns, AFTER_STOP_NS)
        self._in_flight: deque[SimRequest] = deque()  # in order of due time; may contain requests that are done
        self._schedule = schedule
        self._leaves: dict[int, Leaving] = {}  # tasks whose user goes away, and where
        self._leaving: list[tuple[SimRequest, int]] = []  # requests whose user goes away after so many tokens
        self._sequences: dict[int, list[SimRequest]] = {}  # number -> of a request for values, those not done

    def run(self) -> None:
        """Simulate until every slot has its record."""
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
            if change_ns < NEVER and change_ns <= min(NEVER if due is None else due, end, look_ns, stop_ns, end_of_run):
                change_ns = self._change(change_ns)
                continue
            if look_ns < end and look_ns < stop_ns and (due is None or due > look_ns):
                if self._looks:
                    if end >= NEVER and due is None:  # all is over
                        look_ns = NEVER
                    elif self._is_decided(look_ns):
                        stop_ns, look_ns = look_ns, NEVER
                    else:
                        look_ns += self._looks[0].every_ns
                    continue
                end_of_run = min(end_of_run, self._look(look_ns))
                look_ns = NEVER if self.steered is None or self.steered.over else self.steered.next_look_ns
                continue
            if end > stop_ns and (due is None or due > stop_ns):
                if self.steered is not None:
                    self.steered.stop(stop_ns)
                    look_ns = NEVER
                dispatcher.stop()
                end_of_run = min(end_of_run, stop_ns + self._after_stop_ns)
                due, stop_ns, cut = None, NEVER, "interrupted"
            if due is not None and due <= end and due <= end_of_run:
                # While a replica is idle, an arrival may begin an iteration that ends before the next arrival.
                idle -= self._start(due if idle else min(end, end_of_run, stop_ns, look_ns, change_ns), ends)
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
                    (number, due_ns, index, request.first, request.from_iteration, request.last, request.input_tokens,
                     request.asked, request.output_tokens, request.cached, 0, -1, request.admitted_ns)
                )  # fmt: skip
                finished(number, end, True)
            if self._leaving:
                self._let_go(index, end)
            while in_flight and (in_flight[0].state == DONE or in_flight[0].due_ns + timeout_ns <= end):
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
        for start in dispatcher.unsent():  # nobody interrupts a virtual run: the end of the drain left these
            kind = cut if start.dropped == "interrupted" else start.dropped
            flights.unsent.extend((start.number, start.due_ns, KIND[kind]))

    def _next_change_ns(self) -> int:
        return self._changes[0][0] if self._changes else NEVER

    def _change(self, now_ns: int) -> int:
        """So many replicas serve from now on. What one that goes has in work breaks off; one that comes is empty.
        Returns when they change next."""
        before, self._serving = self._serving, self._changes.popleft()[1]
        for replica in self.replicas[before : self._serving]:
            replica.reset_cache()
        for request in self._in_flight:
            if request.at >= self._serving and request.state != DONE:
                self._give_up(request, now_ns, "reset")
        return self._next_change_ns()

    def _first_look_ns(self) -> int:
        if self.steered is not None:
            return self.steered.next_look_ns
        return self._looks[0].every_ns if self._looks else NEVER

    def _look(self, now_ns: int) -> int:
        """Let the steering see what has ended since it looked last; returns when the run ends at the latest."""
        assert self.steered is not None
        return now_ns if isinstance(self.steered.look(now_ns, self._news()), End) else NEVER

    def _is_decided(self, now_ns: int) -> bool:
        rows = self._news()
        self.decided = any(look.ends(now_ns, rows) for look in self._looks)
        return self.decided

    def _news(self) -> NDArray[np.void]:
        """The rows of what has ended since the last call."""
        sent, ends = self.flights.sent, [replica.end_of for replica in self.replicas]
        rows = rows_so_far(sent[self._seen :], ends, self._dispatcher.schedule)
        self._seen = len(sent)
        return rows

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
                refused = (number, due_ns, index, -1, -1, -1, input_tokens, output_tokens, 0, -1, REFUSED, due_ns, -1)
                self.flights.sent.extend(refused)
                dispatcher.finished(number, due_ns, False)
                continue
            if output_tokens:
                sequences = [replica.Request(number, due_ns, input_tokens, output_tokens, blocks)]
            else:  # for values: it is done when the last of its sequences is prefilled
                sequences = self._sequences[number] = [replica.Request(number, due_ns, one, 0) for one in lengths]
            for request in sequences:
                request.at = index
                replica.submit(request)
                in_flight.append(request)
            if start.session >= 0:
                if not start.turn and (leaves := self._schedule.chains.of(start.session).leaving) is not None:
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
            if request.at == index and request.state != DONE and replica.generated(request) >= tokens:
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
            (request.key, request.due_ns, index, request.first, start, last, request.input_tokens, request.asked,
             generated, request.cached, KIND[kind], now_ns, request.admitted_ns)
        )  # fmt: skip
        why = "abandoned" if kind == "abandoned" else "previous_turn_failed"
        self._dispatcher.finished(request.key, now_ns, False, why=why)


def simulate(
    schedule: Schedule,
    sizes: Sizes,
    system: SimulatedSystem,
    *,
    source: str = "estimate",
    max_in_flight: int | None = None,
    max_in_prefill: int | None = None,
    timeout_ns: int = NEVER,
    drain_ns: int = NEVER,
    stop_ns: int = NEVER,
    steer: Callable[[Dispatcher], Steered] | None = None,
    looks: Sequence[Look] = (),
    keep_events: bool = False,
) -> tuple[VirtualRows, Course]:
    """Simulate a schedule on a system; returns the rows of the run, and the simulation.

    `stop_ns`: when the load is stopped; what is in flight then may end within the drain. `steer`: of a load that is
    decided while it goes; the schedule is that of its first step.
    """
    replicas, flights = system.replicas(), None
    if steer is None and max_in_flight is max_in_prefill is None and not looks and not system.changes:
        flights = open_loop.carried(
            schedule, sizes, replicas, system.route(),
            timeout_ns=timeout_ns, drain_ns=drain_ns, stop_ns=stop_ns, after_stop_ns=min(drain_ns, AFTER_STOP_NS),
        )  # fmt: skip
        replicas = replicas if flights is not None else system.replicas()
    course = Course(
        schedule, sizes, replicas, system.route(),
        max_in_flight=max_in_flight, max_in_prefill=max_in_prefill, timeout_ns=timeout_ns, drain_ns=drain_ns,
        stop_ns=stop_ns, steer=steer, looks=looks, changes=system.changes,
    )  # fmt: skip
    collecting = gc.isenabled()
    gc.disable()  # requests create no cycles, and a collection would scan hundreds of thousands of them
    try:
        if flights is None:
            course.run()
        else:
            course.flights = flights
    finally:
        if collecting:
            gc.enable()
    course.ends = [np.asarray(replica.ends, np.int64) for replica in replicas]
    flights, course.flights = course.flights, Flights()  # they are forgotten with the rows: 150 MB of a rack's run
    results = outcome(
        flights, course.ends, course.timetable,
        interval=system.interval, source=source, kept_cache=system.limits.block_reuse, keep_events=keep_events,
    )  # fmt: skip
    return results, course


def run(
    workload: Workload, settings: Settings, folder: Path, tell: Tell, steering: MakeSteering | None = None
) -> Summary:
    """Carry out one simulated run in `folder`. Raises Fault or Faults if the run is not possible.

    A prompt has exactly the tokens that the workload asks for; the chat template adds none. Client and network take no
    time.
    """
    _check(settings)
    preset = preset_of(settings)
    started = process_time()
    settings = msgspec.structs.replace(settings, workers=1, keep="gaps" if settings.keep == "gaps" else "raw")
    found, answer = (_probe_result(preset, settings),), AnswerTime(preset.answer_ns, "preset")
    plan, begins = prepare(
        workload,
        settings,
        found,
        folder=folder,
        simulated=True,
        known=known(settings),
        answer=answer,
        steering=steering,
    )
    requests, timetable = plan.requests, plan.timetable
    header = _with_target(run_header.header(plan, workload, begins), preset, settings)
    tell(RunPlanned(plan, header))
    system = _system_of(preset)
    looks: list[Look] = []
    tell(SimulationStarted(looks))
    watch = VirtualStopWatch(workload.stop_when, timetable.horizon_ns)
    capped = not (workload.max_in_flight is workload.max_in_prefill is None)
    at_once = open_loop.fits(timetable, system.replicas()) and not capped and not system.changes
    if workload.stop_when and not looks and steering is None and not at_once:
        looks.append(Look(LOOK_NS, watch.ends))
    per_block = preset.server.tokens_per_block if preset.server.block_reuse else 0
    simulated = partial(
        simulate,
        timetable,
        sizes_of(workload.requests, requests, per_block, settings),
        system,
        source=plan.tokenizer.tag,
        max_in_flight=workload.max_in_flight,
        max_in_prefill=workload.max_in_prefill,
        timeout_ns=workload.timeout_ns,
        drain_ns=workload.drain_ns,
        keep_events=settings.keep == "gaps",
    )

    def carried_out(stop_ns: int = NEVER) -> tuple[VirtualRows, Course]:
        if steering is None:
            return simulated(stop_ns=stop_ns, looks=looks)
        return simulated(
            stop_ns=stop_ns, steer=partial(Steered, steering(), stage=plan.job.workload.stages[0], seed=plan.job.seed)
        )

    results, course = carried_out()
    stops: list[int] = []
    tell(Simulated(cast(Any, results.rows), stops))
    horizon = course.timetable.horizon_ns
    stopped_by, is_decided = watch.broken, course.decided or bool(stops)
    first = None if stopped_by else first_breach(workload.stop_when, cast(Any, results.rows), LOOK_NS)
    if first is not None and first[0] < min(stops, default=NEVER if horizon is None else horizon):
        stops, stopped_by = [first[0]], first[1]
    if stops:
        results, course = carried_out(min(stops))
        tell(Simulated(cast(Any, results.rows), []))
    header = _final_header(header, preset, course, requests)
    if course.steered is not None:
        header = run_header.of_steps(header, plan, course.steered.stages, course.timetable)
    if stopped_by is not None:
        header = msgspec.structs.replace(header, state="stopped", stopped_by=stopped_by)
    elif is_decided:
        header = msgspec.structs.replace(header, state="decided")
    if preset.routing == "round_robin":
        values = resonance.found(workload.requests, requests, len(course.replicas), "replica", len(results.rows))
        header = run_header.noted(header, reasons.coded("resonance", values))
    seconds = [_own_second(results, course, process_time() - started)]
    rows: Any = results.rows
    counted = virtual_folder.replicas_told(preset)
    summary = summarize(
        header, rows, results.gaps, results.timeline, seconds, TEXTS, virtual_folder.no_errors(results), counted
    )
    if (results.rows["status"] == STATUS["unfinished"]).any():
        header = msgspec.structs.replace(header, schema=WITH_UNFINISHED)
    virtual_folder.write(folder, header, results, seconds, TEXTS, counted)
    store.replace(folder / "summary.json", dump_summary(summary))
    checksums.write(folder)
    return summary


def _system_of(preset: Preset) -> SimulatedSystem:
    return SimulatedSystem(
        costs=preset.costs, limits=preset.limits, speeds=preset.speeds, routing=preset.routing,
        interval=preset.server.stream_interval, changes=preset.changes,
    )  # fmt: skip


def _check(settings: Settings) -> None:
    """Raises UserError where a run in virtual time cannot do what was asked for."""
    if settings.ray is not None:
        raise UserError(
            "unsupported", f"{settings.url} runs in virtual time, in one process", "--ray", "leave --ray out"
        )
    if len(settings.endpoints) > 1:
        raise UserError(
            "unsupported",
            "a simulated target cannot share a run with others",
            f"--url {settings.url}",
            "run it alone",
        )


def known(settings: Settings) -> KnownTarget:
    """What the preset says of itself. Raises UserError for one that there is not, or that is not valid."""
    preset = preset_of(settings)
    return KnownTarget(
        name=f"simulated: {preset.name}",
        words=preset.words,
        context=Context(preset.model.name, preset.limits.max_seq_len),
        notes=preset.notes,
        virtual_url=settings.url or "",
        identity=hashlib.sha256(msgspec.json.encode(preset)).hexdigest(),
    )


def preset_of(settings: Settings) -> Preset:
    """The preset that the URL names. Raises UserError."""
    return load_preset(after_scheme(settings.url), "--url sim:")


def _probe_result(preset: Preset, settings: Settings) -> ProbeResult:
    """The result that a probe of such a server would have."""
    return ProbeResult(
        target=Target.parse("http://simulated", api=settings.api),
        server="trtllm",
        quirk=QUIRKS["trtllm"],
        model=settings.model or preset.model.name,
        models=(preset.model.name,),
        version="",
        evidence=("it is simulated",),
        rtt_ms=0.0,
        template_tokens=0,
        token_ratio=1.0,
        usage=not settings.values,
        exact=True,
        tokens_per_event=float(preset.server.stream_interval),
        warnings=(),
        engine="simulated",
        precision=preset.precision,
        max_context=preset.limits.max_seq_len,
        account=True,
    )


def _with_target(header: Header, preset: Preset, settings: Settings) -> Header:
    """The header with the simulated target and the notes about it."""
    target = msgspec.structs.replace(header.targets[0], url="", gpus=settings.gpus or preset.gpus)
    coded = reasons.coded("virtual_time", {"preset": preset.words})
    return msgspec.structs.replace(
        header,
        targets=(target,),
        client="virtual",
        rtt_ms=None,
        notes=(*coded, *header.notes),
        note_codes=coded | header.note_codes,
    )


def _final_header(header: Header, preset: Preset, course: Course, requests: prompts.Prompts) -> Header:
    replicas = course.replicas
    steps = sum(map(len, course.ends))
    mean_batch = sum(replica.decoded for replica in replicas) / steps if steps else 0.0
    minimum = preset.valid_from_sequences.value
    if mean_batch < minimum:
        header = run_header.noted(header, reasons.coded("extrapolated", {"sequences": mean_batch, "limit": minimum}))
    pauses = sum(replica.pauses for replica in replicas)
    header = run_header.noted(header, reasons.coded("paused", {"times": pauses} if pauses else None))
    return msgspec.structs.replace(
        header,
        ended=run_header.now(),
        state="finished",
        fingerprints=msgspec.structs.replace(header.fingerprints, prompts=prompts.fingerprint(requests, None)),
    )


def _own_second(results: VirtualRows, course: Course, cpu_s: float) -> Second:
    """What the simulation itself used. `span_s` is 0, so that it is not taken for the load of a client."""
    last = max((int(ends[-1]) for ends in course.ends if len(ends)), default=0)
    return Second(
        t_s=last / 1e9,
        span_s=0.0,
        cpu_s=round(cpu_s, 4),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        sent=len(results.rows),
        done=len(results.rows),
    )
