"""Does one share of a job in this process: builds bodies, opens connections, runs the driver, reports. IO."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import monotonic_ns
from typing import Any, NamedTuple

from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.transport.pool import Pool
from loadgen_sdk.transport.target import header_secrets
from loadgen_sdk.transport.wire import Wire, raise_file_limit

from loadgen.errors import TargetError
from loadgen.execution import stop_signals
from loadgen.execution.bodies import Bodies
from loadgen.execution.body_prefetch import BodyPrefetch
from loadgen.execution.driver import AHEAD, HOLD_NS, Driver, no_collector
from loadgen.execution.events import LoadStarted, RunningLoad, Tell
from loadgen.execution.plan import Job, Plan, cap
from loadgen.execution.probing import client_options
from loadgen.execution.trace_context import TraceContext
from loadgen.results.manifest import Cluster
from loadgen.results.spool import Spool
from loadgen.schedule import timetable as schedule
from loadgen.schedule.steered import Steered
from loadgen.schedule.timetable import Schedule
from loadgen.workload import Closed, Stage

SETTLE_NS = 20_000_000  # from the moment when everything is ready to instant 0
SPARE_OPEN = 32  # connections opened before an open-loop run, besides those that its first second needs
MOST_SPARE = 1_000  # most connections opened before an open-loop run
MOST_AHEAD = 100_000  # requests of a load, up to which all bodies are built before it starts
LONG_NS = 120_000_000_000  # length of a stage without a count, up to which its bodies are built by the worker itself
BUILD_CPU_S = 20.0  # longest time to build bodies in advance; after it, the load starts with a part of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a worker reports when its share is done.

    `prompts_total`, `prompts_count`: its part of `prompts.Digest`. `bodies_total`: the same of the bodies.
    """

    prompts_total: int
    prompts_count: int
    bodies_total: int = 0
    late: int  # bodies that were built in the sending loop
    interrupted: bool
    stopped: bool = False  # because a target stopped answering
    down: dict[int, float] = field(default_factory=dict)  # target -> when it stopped answering, s from the start
    notes: tuple[str, ...] = ()  # warnings about the workers' machines, found during the run
    cluster: Cluster | None = None  # where the workers were
    steps: CarriedOut | None = None  # of a load that was decided while it went: what it was


class CarriedOut(NamedTuple):
    """The stages of a load that was decided while it went, and its timetable."""

    stages: tuple[Stage, ...]
    timetable: Schedule


async def run(plan: Plan, tell: Tell) -> Share:
    """Carry out a plan in this process."""

    async def gate() -> int:
        return monotonic_ns() + SETTLE_NS

    def begun(driver: Driver) -> None:
        tell(LoadStarted(driver.start_ns, RunningLoad(lambda: driver.counters, driver.stop)))

    return await work(plan, 0, 1, gate, begun)


async def work(
    plan: Plan, share: int, shares: int, gate: Callable[[], Awaitable[int]], begun: Callable[[Driver], None]
) -> Share:
    """Do one share of a plan in this process. Raises TargetError if a target cannot be used.

    `gate()` is awaited when everything is ready and returns the start instant (monotonic ns). `begun` is called with
    the driver before it runs.
    """
    job, requests, timetable = plan.job, plan.requests, plan.timetable
    settings, workload = job.settings, job.workload
    raise_file_limit(0)
    part = schedule.shard(timetable, share, shares)
    try:
        wire = Wire(asyncio.get_running_loop())
    except TargetUnusable as error:
        raise TargetError(str(error), "", error.hint) from None
    clients = [_client(job, i, requests.history == "server", wire) for i in range(len(job.found))]
    make_steering = plan.steering
    prefetch = large(timetable) and settings.client == "wire" and make_steering is None
    if prefetch:
        bodies: Bodies = BodyPrefetch(job, part, requests)
    else:
        linked = job.settings.api == "responses" and getattr(job.workload.requests, "turns", None) is not None
        bodies = Bodies(requests, clients[0].prepare, len(part.stages), linked=linked)
    spool = Spool(job.folder, share)
    secrets = [*(endpoint.api_key for endpoint in settings.endpoints), *header_secrets(settings.headers)]

    def redact(text: str) -> str:
        for probed in job.found:
            text = probed.target.redact(text, *secrets)
        return text

    try:
        numbers: list[Iterator[int]] = []
        steer = None
        if isinstance(bodies, BodyPrefetch):
            await bodies.filled()
        elif make_steering is not None:
            numbers = [itertools.count()]
            bodies.build(0, numbers[0], most=AHEAD, cpu_s=BUILD_CPU_S)
            steer = partial(Steered, make_steering(), stage=workload.stages[0], seed=job.seed)
        else:
            numbers = [part.stage_numbers(span) for span in part.stages]
            for stage, span in enumerate(part.stages):
                bodies.build(stage, numbers[stage], most=AHEAD if span.chains is None else None, cpu_s=BUILD_CPU_S)
        for client in clients:
            await client.open(-(-_connections(part) // len(clients)))
        with no_collector():
            driver = Driver(
                schedule=part,
                bodies=bodies,
                numbers=numbers,
                clients=clients,
                route=settings.route,
                stop_on_failure=settings.on_target_failure == "stop",
                wire=wire,
                hold_ns=0 if settings.client == "openai" else HOLD_NS,  # its tasks need turns of the event loop
                spool=spool,
                start_ns=await gate(),
                drain_ns=workload.drain_ns,
                max_in_flight=cap(workload.max_in_flight, share, shares),
                worker=share,
                run_id=job.run_id,
                trace=TraceContext(job.run_id) if job.settings.traceparent else None,
                session_header=settings.session_header,
                redact=redact,
                steer=steer,
            )
            begun(driver)
            with stop_signals.calling(lambda _: driver.stop()):
                await driver.run()
        digest = bodies.digest
        return Share(
            prompts_total=digest.total,
            prompts_count=digest.count,
            bodies_total=bodies.sent_bytes.total,
            late=bodies.late,
            interrupted=driver.interrupted and not driver.stopped,
            stopped=driver.stopped,
            down=driver.down,
            steps=None if driver.steered is None else CarriedOut(tuple(driver.steered.stages), driver.timetable),
        )
    except TargetUnusable as error:
        raise TargetError(str(error), job.found[0].target.redacted, error.hint) from None
    finally:
        spool.close()
        bodies.close()
        for client in clients:
            if settings.client == "openai":
                await client.aclose()
            else:
                client.close()
        wire.shut()


def large(timetable: Schedule) -> bool:
    """Whether a separate process builds bodies during the run: too many requests, too long, or too many lanes."""
    endless = [span for span in timetable.stages if span.chains is None]
    return (timetable.slots is not None and timetable.slots > MOST_AHEAD) or any(
        (span.length_ns or 0) > LONG_NS or span.lanes > AHEAD // 4 for span in endless
    )


def _connections(part: Schedule) -> int:
    """Connections to open before the start: one per lane of a closed loop; for an open loop, an estimate."""
    lanes = max((len(part.own_lanes(span)) for span in part.stages if span.lanes), default=0)
    if lanes:
        return lanes * part.chains.side_by_side
    rates = [rate for span in part.stages[:1] if (rate := span.offered_rps) is not None and math.isfinite(rate)]
    count = min(SPARE_OPEN + math.ceil(max(rates, default=0.0) / part.parts), MOST_SPARE)
    return min(count, part.slots if part.slots is not None else count)


def _client(job: Job, index: int, keep_text: bool, wire: Wire) -> Any:
    probed = job.found[index]
    settings = job.settings.of(job.settings.endpoints[index])
    keep_text = keep_text or probed.usage is False
    options: dict[str, Any] = {
        **client_options(settings, probed),
        "timeout_ns": job.workload.timeout_ns,
        "stall_timeout_ns": job.workload.stall_timeout_ns,
        "keep_text": keep_text,
    }
    if settings.client == "openai":
        from loadgen_sdk.transport.openai_client import OpenAIClient

        return OpenAIClient(probed.target, **options)
    open_ahead = any(not isinstance(stage.arrival, Closed) for stage in job.workload.stages)
    return Pool(probed.target, wire=wire, ahead=open_ahead, sources=settings.sources, **options)
