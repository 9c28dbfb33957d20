"""One run, from a checked workload to its summary: what happens before the clock starts and after it has stopped.

IO, in this order: start the embedded endpoint if there is no URL, probe the target, build timetable and bodies, write
the header, drive (here, or in `fanout`), read everything back, judge. What happens while the clock runs is `drive.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec
from loadgen_sdk.client import Client
from loadgen_sdk.direct import Direct
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.probe import Found, probe
from loadgen_sdk.target import Target
from loadgen_sdk.wire import Wire, raise_file_limit

from loadgen import depot, prompts, schedule, scrape, store
from loadgen import header as heads
from loadgen.bodies import Bodies
from loadgen.drive import AHEAD, HOLD_NS, Drive, no_collector
from loadgen.errors import Fault, Faults, TargetError, UserError
from loadgen.plan import Endpoint, Job, Settings, cap, describe, plan, prepare
from loadgen.progress import Counted
from loadgen.rolling import Rolling
from loadgen.schedule import Schedule
from loadgen.summary import Summary
from loadgen.workload import Closed, Workload

SETTLE_NS = 20_000_000  # from "everything is ready" to instant 0
SPARE_OPEN = 32  # connections opened before an open-loop run, beside those that its first second will want
MOST_SPARE = 1_000
MOST_AHEAD = 100_000  # requests of a load whose bodies are all built before it starts
LONG_NS = 120_000_000_000
BUILD_CPU_S = 20.0  # a load so large that its bodies take longer than this to build starts with a part of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a worker reports when it is done."""

    prompts_total: int
    prompts_count: int
    late: int  # bodies that were built in the sending loop
    interrupted: bool
    stopped: bool = False  # because a target stopped answering
    down: dict[int, float] = field(default_factory=dict)  # target -> when it stopped answering, s from the start
    notes: tuple[str, ...] = ()  # what was learned of the workers' machines while they ran


def run_id(name: str, now: datetime.datetime) -> str:
    """The folder name of a run: readable, sorted by time, unique."""
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:60]
    return f"{plain}-{now:%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"


def unused(out: Path | None, name: str, now: datetime.datetime) -> Path:
    """`out` itself when given and without a run, else another name beside it or under `results/`. Makes nothing."""
    folder = out if out is not None else Path("results") / run_id(name, now)
    if (folder / "run.json").exists():
        folder = folder.with_name(f"{folder.name}-{now:%Y%m%d-%H%M%S}")
    return folder


def new_folder(out: Path | None, name: str, now: datetime.datetime) -> Path:
    """The same, made."""
    folder = unused(out, name, now)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def find(settings: Settings) -> Found:
    """Probe the target. Raises TargetError with what to do about it."""
    assert settings.url is not None
    shown = Endpoint(url=settings.url).shown
    try:
        target = Target.parse(
            settings.url, api=settings.api, server=None if settings.server == "auto" else settings.server
        )
    except TargetUnusable as error:
        raise UserError(str(error), shown, error.hint) from None
    try:
        direct = Direct(target, settings.tls.context() if target.tls else None)
        return await probe(
            target,
            exchange=direct.exchange,
            connect=direct.connect,
            model=settings.model,
            server=settings.server,
            stream=settings.stream,
            api_key=settings.api_key,
            headers=settings.headers,
            extra_body=settings.extra_body,
        )
    except TargetUnusable as error:
        raise TargetError(str(error), shown, error.hint) from None


async def find_all(settings: Settings) -> tuple[Found, ...]:
    """Probe every endpoint. Raises the faults of all that cannot be used, or do not serve what the first one does."""
    endpoints = settings.endpoints
    found = await asyncio.gather(*(find(settings.of(one)) for one in endpoints), return_exceptions=True)
    faults: list[Fault] = []
    first: tuple[Endpoint, Found] | None = None
    for endpoint, one in zip(endpoints, found, strict=True):
        if isinstance(one, Fault):
            faults.append(one)
        elif isinstance(one, BaseException):
            raise one
        elif first is None:
            first = endpoint, one
        else:
            faults += _unlike(*first, endpoint, one)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise Faults(faults)
    return tuple(one for one in found if not isinstance(one, BaseException))


def _unlike(first: Endpoint, wanted: Found, endpoint: Endpoint, found: Found) -> Iterator[TargetError]:
    """What one target has behind it that the first one has not."""
    ours, theirs = _served(found), _served(wanted)
    if (ours, found.quirk) != (theirs, wanted.quirk):
        what = f"serves {ours} ({found.server}), but {first.shown} serves {theirs} ({wanted.server})"
        hint = "one run needs the same model and server behind every target; --model names one that all of them list"
        yield TargetError(what, endpoint.shown, hint)


def _served(found: Found) -> str:
    """The model that answers: by the server's own list, as some answer to any name."""
    return found.model if found.model in found.models or not found.models else ", ".join(found.models)


async def work(
    job: Job,
    share: int,
    shares: int,
    gate: Callable[[], Any],
    on_drive: Callable[[Drive], Any] | None = None,
) -> Share:
    """Do one share of a job in this process. `gate()` is awaited when all is ready and gives the start instant."""
    settings, workload = job.settings, job.workload
    raise_file_limit(0)
    whole, requests, _ = plan(job)
    part = schedule.shard(whole, share, shares)
    wire = Wire(asyncio.get_running_loop())
    clients = [_client(job, i, requests.history == "server", wire) for i in range(len(job.found))]
    rolling = large(whole) and settings.client == "wire"
    bodies = Rolling(job, part, requests) if rolling else Bodies(requests, clients[0].prepare, len(part.stages))
    spool = store.Spool(job.folder, share)
    secrets = [*(endpoint.api_key for endpoint in settings.endpoints), *(value for _, value in settings.headers)]

    def redact(text: str) -> str:
        for found in job.found:
            text = found.target.redact(text, *secrets)
        return text

    try:
        numbers = []
        if isinstance(bodies, Rolling):
            await bodies.filled()
        else:
            numbers = [part.stage_numbers(span) for span in part.stages]
            for stage, span in enumerate(part.stages):
                bodies.build(stage, numbers[stage], most=AHEAD if span.chains is None else None, cpu_s=BUILD_CPU_S)
        for client in clients:
            await client.open(-(-_connections(part) // len(clients)))
        with no_collector():
            drive = Drive(
                schedule=part,
                bodies=bodies,
                numbers=numbers,
                clients=clients,
                route=settings.route,
                stop_on_failure=settings.on_target_failure == "stop",
                wire=wire,
                hold_ns=0 if settings.client == "openai" else HOLD_NS,  # whose tasks need the loop
                spool=spool,
                start_ns=await gate(),
                grace_ns=workload.grace_ns,
                max_in_flight=cap(workload.max_in_flight, share, shares),
                worker=share,
                run_id=job.run_id,
                redact=redact,
            )
            if on_drive is not None:
                on_drive(drive)
            with drive.signals():
                await drive.run()
        digest = bodies.digest
        return Share(
            prompts_total=digest.total,
            prompts_count=digest.count,
            late=bodies.late,
            interrupted=drive.interrupted and not drive.stopped,
            stopped=drive.stopped,
            down=drive.down,
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
    """Whether bodies are built as they are needed, by a process of their own: too many, too long or too many lanes."""
    endless = [span for span in timetable.stages if span.chains is None]
    return (timetable.slots is not None and timetable.slots > MOST_AHEAD) or any(
        (span.length_ns or 0) > LONG_NS or span.lanes > AHEAD // 4 for span in endless
    )


def _connections(part: Schedule) -> int:
    """How many to open before the start: every lane its own; in open loop a few ahead of need."""
    lanes = max((len(part.own_lanes(span)) for span in part.stages if span.lanes), default=0)
    if lanes:
        return lanes
    rates = [rate for span in part.stages[:1] if (rate := span.offered_rps) is not None and math.isfinite(rate)]
    wanted = min(SPARE_OPEN + math.ceil(max(rates, default=0.0) / part.parts), MOST_SPARE)
    return min(wanted, part.slots if part.slots is not None else wanted)


def _client(job: Job, index: int, keep_text: bool, wire: Wire) -> Any:
    found = job.found[index]
    settings = job.settings.of(job.settings.endpoints[index])
    keep_text = keep_text or found.usage is False
    common: dict[str, Any] = {
        "model": found.model,
        "quirk": found.quirk,
        "stream": settings.stream,
        "api_key": settings.api_key,
        "headers": settings.headers,
        "extra_body": settings.extra_body,
        "timeout_ns": job.workload.timeout_ns,
        "stall_timeout_ns": job.workload.stall_timeout_ns,
        "tls": settings.tls,
        "keep_text": keep_text,
    }
    if settings.client == "openai":
        from loadgen_sdk.openai_client import OpenAIClient

        return OpenAIClient(found.target, **common)
    ahead = any(not isinstance(stage.arrival, Closed) for stage in job.workload.stages)
    return Client(found.target, wire=wire, ahead=ahead, sources=settings.sources, **common)


def finish(job: Job, header: heads.Header, share: Share, recorder: store.Recorder, timetable: Schedule) -> Summary:
    """Read everything back, judge it, and leave the folder in order."""
    folder = job.folder
    digest = prompts.Digest(share.prompts_total, share.prompts_count)
    if large(timetable):
        fingerprint = prompts.fingerprint(plan(job)[1], None)
    elif share.prompts_count == timetable.slots:
        fingerprint = digest.hexdigest()
    else:  # a load without end, or a worker that died with its part of the digest
        fingerprint = prompts.fingerprint(plan(job)[1], timetable.slots)
    notes = header.notes
    if share.late:
        notes = (*notes, f"{share.late} bodies were built in the sending loop, which can delay sends")
    notes = (*notes, *share.notes)
    for target, at_s in sorted(share.down.items()):
        name = header.targets[target].name or header.targets[target].url
        notes = (*notes, f"target {name} stopped answering {at_s:.1f} s after the start")
    header = msgspec.structs.replace(
        header,
        ended=datetime.datetime.now(datetime.UTC).astimezone().isoformat(timespec="milliseconds"),
        state="stopped" if share.stopped else "interrupted" if share.interrupted else "finished",
        fingerprints=msgspec.structs.replace(header.fingerprints, prompts=fingerprint),
        notes=notes,
    )
    store.replace(folder / "run.json", heads.encode(header))
    moving = header.keep != "raw" or any(one.first for one in store.segments(folder))  # they come and go
    whole = recorder.finish() if moving else None
    summary = store.summary(folder)
    from loadgen.report import machine

    store.replace(folder / "summary.json", machine.dump(summary))
    if recorder.finish() if whole is None else whole:
        store.drop_spool(folder)
    return summary


def execute(
    workload: Workload,
    settings: Settings,
    *,
    on_drive: Callable[[Counted], Any] | None = None,
    announce: Callable[[heads.Header, Schedule, Path], None] | None = None,
    placed: Callable[[heads.Cluster], None] | None = None,
) -> tuple[Summary, Path]:
    """The whole of it: one run and its folder. Raises Fault or Faults for whatever stands in its way.

    `on_drive` is called in a running event loop when the load begins, with what has the `counters` of all workers;
    `placed`, on a cluster, with where they are, shortly before.
    """
    if settings.url is not None and settings.url.startswith("sim:"):
        if settings.ray is not None:
            raise UserError(f"{settings.url} runs in virtual time, in one process", "--ray", "leave --ray out")
        from loadgen.sim import virtual

        return virtual.execute(workload, settings, settings.url.removeprefix("sim:"), announce=announce)
    import uvloop

    from loadgen.sim import embedded
    from loadgen.sim.options import Options

    simulated = settings.url is None
    with contextlib.ExitStack() as ends:
        if simulated:
            simulation = embedded.start(Options(**settings.embedded))
            ends.callback(simulation.stop)
            settings = replace(settings, url=simulation.url)
        cluster = None
        if settings.ray is not None:
            from loadgen.fanout import ray

            cluster = ends.enter_context(ray.connected(settings.ray))
        away = None if settings.store is None else depot.open(settings.store)
        now = datetime.datetime.now(datetime.UTC).astimezone()
        folder = unused(settings.out, workload.name, now)
        ends.enter_context(store.nothing_left(folder))
        folder.mkdir(parents=True, exist_ok=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(find_all(settings))
            scraper = ends.enter_context(contextlib.closing(scrape.Scraper(folder, settings, found)))
            job, header, timetable = prepare(
                workload, settings, found,
                simulated=simulated, folder=folder, cores=None if cluster is None else cluster.cores,
            )  # fmt: skip
            if cluster is not None:
                notes = runner.run(cluster.place(job, timetable, simulated=simulated))
                header = msgspec.structs.replace(header, notes=(*header.notes, *notes))
            header = msgspec.structs.replace(header, server_pages=scraper.pages())
            store.replace(folder / "run.json", heads.encode(header))
            if announce is not None:
                announce(header, timetable, folder)
            recorder = store.Recorder(folder)
            try:
                if cluster is not None:

                    def know(where: heads.Cluster) -> None:
                        nonlocal header
                        if header.cluster is None and placed is not None:
                            placed(where)
                        header = msgspec.structs.replace(header, cluster=where)
                        store.replace(folder / "run.json", heads.encode(header))

                    share = runner.run(cluster.run(job, timetable, on_drive, scraper.begin, know))
                elif job.settings.workers > 1:
                    from loadgen.fanout import local

                    share = runner.run(local.run(job, timetable, job.settings.workers, on_drive, scraper.begin))
                else:

                    async def gate() -> int:
                        start_ns = monotonic_ns() + SETTLE_NS
                        scraper.begin(start_ns)
                        return start_ns

                    share = runner.run(work(job, 0, 1, gate, on_drive))
            except BaseException:
                recorder.finish()
                raise
        scraper.close()
        summary = finish(job, header, share, recorder, timetable)
        if away is not None:
            away.put(folder)
        return summary, folder


class _Callable(types.ModuleType):
    """So that `loadgen.run("qa", url=...)` works: the call and this room have the same name."""

    def __call__(self, *args: Any, **flags: Any) -> Any:
        """See `loadgen.api.run`."""
        from loadgen.api import run

        return run(*args, **flags)


sys.modules[__name__].__class__ = _Callable

__all__ = [
    "Endpoint",
    "Job",
    "Settings",
    "Share",
    "describe",
    "execute",
    "find",
    "find_all",
    "finish",
    "new_folder",
    "plan",
    "prepare",
    "run_id",
    "work",
]
