"""One run, from a checked workload to its summary: what happens before the clock starts and after it has stopped.

IO, in this order: start the embedded endpoint if there is no URL, probe the target, build timetable and bodies, write
the header, drive (here, or in `fanout`), read everything back, judge. What happens while the clock runs is `drive.py`.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import os
import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from time import monotonic_ns
from typing import Any, Literal

import msgspec
from loadgen_sdk.client import Client
from loadgen_sdk.direct import Direct
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.probe import Found, probe
from loadgen_sdk.target import Target
from loadgen_sdk.wire import Tls, Wire

from loadgen import header as heads
from loadgen import metrics, prompts, schedule, seeds, store, tokens
from loadgen.bodies import Bodies
from loadgen.drive import Drive, no_collector
from loadgen.errors import TargetError
from loadgen.schedule import Schedule
from loadgen.summary import Summary, summarize
from loadgen.workload import Closed, Gamma, Ramp, Workload, recipe_fingerprint

SETTLE_NS = 20_000_000  # from "everything is ready" to instant 0
SPARE_OPEN = 32  # connections opened before an open-loop run
BUILD_CPU_S = 20.0  # a load so large that its bodies take longer than this to build starts with a part of them
ENDLESS_AHEAD = 2_000  # bodies built ahead for a load without end


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line says beside the workload. `url` None: the embedded endpoint."""

    url: str | None = None
    model: str | None = None
    server: str = "auto"
    api: Literal["chat", "completions"] = "chat"
    stream: bool = True
    client: Literal["wire", "openai"] = "wire"
    api_key: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    extra_body: dict[str, Any] | None = None
    tls: Tls = field(default_factory=Tls)
    tokenizer: str | None = None
    workers: int = 1
    out: Path | None = None
    gpus: int | None = None
    shape: str = ""
    region: str = ""
    command: tuple[str, ...] = ()
    embedded: dict[str, Any] = field(default_factory=dict)  # options of the embedded endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a worker needs to do its share; travels to worker processes as a pickle on their standard input."""

    workload: Workload
    settings: Settings
    found: Found
    seed: int
    salt: int
    folder: Path
    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a worker reports when it is done."""

    prompts_total: int
    prompts_count: int
    late: int
    interrupted: bool


def run_id(name: str, now: datetime.datetime) -> str:
    """The folder name of a run: readable, sorted by time, unique."""
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)[:60]
    return f"{plain}-{now:%Y%m%d-%H%M%S}-{os.urandom(2).hex()}"


def new_folder(out: Path | None, name: str, now: datetime.datetime) -> Path:
    """`out` itself when given and unused, else a new folder under `results/`."""
    folder = out if out is not None else Path("results") / run_id(name, now)
    if (folder / "run.json").exists():
        folder = folder.with_name(f"{folder.name}-{now:%Y%m%d-%H%M%S}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def find(settings: Settings) -> Found:
    """Probe the target. Raises TargetError with what to do about it."""
    assert settings.url is not None
    try:
        target = Target.parse(
            settings.url, api=settings.api, server=None if settings.server == "auto" else settings.server
        )
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
        where = Target.parse(settings.url, api=settings.api).redacted if "@" not in settings.url else "--url"
        raise TargetError(str(error), where, error.hint) from None


def plan(job: Job) -> tuple[Schedule, prompts.Prompts, tokens.Tokenizer]:
    """The timetable and the requests of a job: the same in every process."""
    tokenizer = tokens.load(job.settings.tokenizer)
    return (
        schedule.build(job.workload, job.seed),
        prompts.build(job.workload, job.seed, job.salt, tokenizer),
        tokenizer,
    )


async def work(
    job: Job,
    share: int,
    shares: int,
    gate: Callable[[], Any],
    on_drive: Callable[[Drive], Any] | None = None,
) -> Share:
    """Do one share of a job in this process. `gate()` is awaited when all is ready and gives the start instant."""
    settings, workload, found = job.settings, job.workload, job.found
    whole, requests, _ = plan(job)
    part = schedule.shard(whole, share, shares)
    wire = Wire(asyncio.get_running_loop())
    client = _client(job, requests.history == "server", wire)
    bodies = Bodies(requests, client.prepare, None)
    spool = store.Spool(job.folder, share)
    try:
        bounded = part.slots is not None
        bodies.build(part.numbers(), most=None if bounded else ENDLESS_AHEAD, cpu_s=BUILD_CPU_S)
        await client.open(_connections(part))
        with no_collector():
            drive = Drive(
                schedule=part,
                bodies=bodies,
                client=client,
                wire=wire,
                spool=spool,
                start_ns=await gate(),
                grace_ns=workload.grace_ns,
                max_in_flight=workload.max_in_flight,
                worker=share,
                run_id=job.run_id,
                redact=lambda text: found.target.redact(text, settings.api_key),
            )
            if on_drive is not None:
                on_drive(drive)
            with drive.signals():
                await drive.run()
        digest = bodies.digest
        return Share(
            prompts_total=digest.total, prompts_count=digest.count, late=bodies.late, interrupted=drive.interrupted
        )
    except TargetUnusable as error:
        raise TargetError(str(error), found.target.redacted, error.hint) from None
    finally:
        spool.close()
        bodies.close()
        if settings.client == "openai":
            await client.aclose()
        else:
            client.close()
        wire.shut()


def _connections(part: Schedule) -> int:
    """How many to open before the start: every lane its own; in open loop a few ahead of need."""
    lanes = max((len(part.own_lanes(span)) for span in part.stages if span.lanes), default=0)
    slots = part.slots
    return lanes or min(SPARE_OPEN, slots if slots is not None else SPARE_OPEN)


def _client(job: Job, keep_text: bool, wire: Wire) -> Any:
    settings, found = job.settings, job.found
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
    return Client(found.target, wire=wire, ahead=ahead, **common)


# -- before and after --------------------------------------------------------------------------------------------


def prepare(
    workload: Workload, settings: Settings, found: Found, *, simulated: bool, folder: Path
) -> tuple[Job, heads.Header, Schedule]:
    """Everything that is decided before the clock starts, and the header that says so."""
    seed = workload.seed if workload.seed is not None else seeds.fresh()
    salt = seeds.fresh()
    job = Job(
        workload=workload, settings=settings, found=found, seed=seed, salt=salt, folder=folder, run_id=folder.name
    )  # fmt: skip
    timetable, requests, tokenizer = plan(job)
    now = datetime.datetime.now(datetime.UTC).astimezone()
    source = "server" if found.usage else tokenizer.tag
    slots = timetable.slots
    target = heads.Target(
        url=found.target.redacted,
        server=found.server,
        model=found.model,
        gpus=settings.gpus,
        shape=settings.shape,
        region=settings.region,
        name="embedded simulation" if simulated else "",
        simulated=simulated,
    )
    header = heads.Header(
        run=folder.name,
        started=now.isoformat(timespec="milliseconds"),
        version=version(),
        command=settings.command,
        workload=workload.name,
        source_text=workload.source_text,
        source_sha256=_sha256(workload.source_text),
        seed=seed,
        schedule_seed=workload.schedule_seed,
        salt=f"{salt:x}",
        targets=(target,),
        client=settings.client,
        api=settings.api,
        stream=settings.stream,
        slo=_slo(workload),
        limits=metrics.Limits(**workload.limits.model_dump()),
        stages=tuple(_stage(workload, timetable, i) for i in range(len(timetable.stages))),
        fingerprints=heads.Fingerprints(
            recipe=recipe_fingerprint(workload, source), timetable=schedule.fingerprint(timetable)
        ),
        rtt_ms=found.rtt_ms,
        tokenizer=tokenizer.name,
        tokenizer_tag=tokenizer.tag,
        template_tokens=found.template_tokens,
        usage_asked=True,
        shares_prompts=_shares(workload),
        max_in_flight=workload.max_in_flight,
        grace_s=workload.grace_ns / 1e9,
        timeout_s=workload.timeout_ns / 1e9,
        stall_timeout_s=workload.stall_timeout_ns / 1e9,
        workers=settings.workers,
        host=host(),
        notes=(*found.warnings, *requests.warnings(slots or 1000)),
    )
    return job, header, timetable


def finish(job: Job, header: heads.Header, share: Share, recorder: store.Recorder, timetable: Schedule) -> Summary:
    """Read everything back, judge it, and leave the folder in order."""
    folder = job.folder
    digest = prompts.Digest(share.prompts_total, share.prompts_count)
    fingerprint = digest.hexdigest() if timetable.slots is not None else prompts.fingerprint(plan(job)[1], None)
    notes = header.notes
    if share.late:
        notes = (*notes, f"{share.late} bodies were built in the sending loop, which can delay sends")
    header = msgspec.structs.replace(
        header,
        ended=datetime.datetime.now(datetime.UTC).astimezone().isoformat(timespec="milliseconds"),
        state="interrupted" if share.interrupted else "finished",
        fingerprints=msgspec.structs.replace(header.fingerprints, prompts=fingerprint),
        notes=notes,
    )
    store.replace(folder / "run.json", heads.encode(header))
    stored = store.read(folder)
    summary = summarize(*stored)
    from loadgen.report import machine

    store.replace(folder / "summary.json", machine.dump(summary))
    if recorder.finish():
        store.drop_spool(folder)
    return summary


def describe(workload: Workload, settings: Settings) -> str:
    """What a run would do, without touching the network: load, sizes, fingerprints."""
    seed = workload.seed if workload.seed is not None else seeds.fresh()
    timetable = schedule.build(workload, seed)
    requests = prompts.build(workload, seed, 0, tokens.load(settings.tokenizer))
    lines = [f"workload: {workload.name}", f"target: {settings.url or 'embedded simulation'}", f"seed: {seed}"]
    for index in range(len(timetable.stages)):
        stage = _stage(workload, timetable, index)
        bounds = [f"{stage.slots:,} requests"] if stage.slots is not None else []
        if stage.end_ns is not None:
            bounds.append(f"{(stage.end_ns - stage.start_ns) / 1e9:g} s")
        lines.append(f"load: {stage.arrival}: {', '.join(bounds)}{'' if stage.measured else ', warm-up, not measured'}")
    sample = [requests[number] for number in range(min(timetable.slots or 100, 100))]
    sizes = sorted(request.input_tokens or 0 for request in sample)
    asked = sorted(request.max_tokens or 0 for request in sample)
    spans = f"{sizes[0]:,} to {sizes[-1]:,} prompt tokens, {asked[0]:,} to {asked[-1]:,} asked for"
    lines.append(f"first {len(sample)} requests: {spans}")
    lines.append(f"recipe: {recipe_fingerprint(workload, 'server')}  timetable: {schedule.fingerprint(timetable)}")
    lines += [f"note: {note}" for note in requests.warnings(timetable.slots or 1000)]
    return "\n".join(lines)


def execute(
    workload: Workload,
    settings: Settings,
    *,
    on_drive: Callable[[Drive], Any] | None = None,
    announce: Callable[[heads.Header, Schedule, Path], None] | None = None,
) -> tuple[Summary, Path]:
    """The whole of it: one run and its folder. Raises Fault or Faults for whatever stands in its way."""
    import uvloop

    from loadgen.sim import embedded
    from loadgen.sim.options import Options

    simulation = None
    simulated = settings.url is None
    if simulated:
        simulation = embedded.start(Options(**settings.embedded))
        settings = replace(settings, url=simulation.url)
    try:
        now = datetime.datetime.now(datetime.UTC).astimezone()
        folder = new_folder(settings.out, workload.name, now)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(find(settings))
            job, header, timetable = prepare(workload, settings, found, simulated=simulated, folder=folder)
            store.replace(folder / "run.json", heads.encode(header))
            if announce is not None:
                announce(header, timetable, folder)
            recorder = store.Recorder(folder)
            if settings.workers > 1:
                from loadgen.fanout import local

                share = local.run(job, timetable, settings.workers)
            else:

                async def gate() -> int:
                    return monotonic_ns() + SETTLE_NS

                share = runner.run(work(job, 0, 1, gate, on_drive))
        return finish(job, header, share, recorder, timetable), folder
    finally:
        if simulation is not None:
            simulation.stop()


# -- small facts -------------------------------------------------------------------------------------------------


def version() -> str:
    try:
        return metadata.version("loadgen")
    except metadata.PackageNotFoundError:
        return "unknown"


def host() -> heads.Host:
    """The machine this runs on, as far as it tells."""
    cpu, memory, clock = "", None, ""
    try:
        with open("/proc/cpuinfo") as file:
            cpu = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        clock = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except (OSError, ValueError):
        pass
    names = ("uvloop", "msgspec", "numpy", "openai", "tiktoken")
    return heads.Host(
        name=socket.gethostname(),
        kernel=platform.release(),
        python=platform.python_version(),
        cpu=cpu,
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        memory_bytes=memory,
        clock=clock,
        versions={name: metadata.version(name) for name in names},
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _slo(workload: Workload) -> metrics.Slo | None:
    slo = workload.slo
    if slo is None:
        return None
    terms = tuple(metrics.Term(metric=t.metric, limit_ns=t.limit_ns, quantile=t.quantile) for t in slo.terms)
    return metrics.Slo(terms=terms, goodput_share=slo.goodput_share)


def _shares(workload: Workload) -> bool:
    requests = workload.requests
    if getattr(requests, "turns", None) is not None:
        return True
    return bool(getattr(requests, "shared_prefix_tokens", 0) or getattr(requests, "system_tokens", 0)) or hasattr(
        requests, "path"
    )


def _stage(workload: Workload, timetable: Schedule, index: int) -> heads.Stage:
    span, stage = timetable.stages[index], workload.stages[index]
    return heads.Stage(
        name=span.name,
        arrival=words(stage.arrival),
        closed=bool(span.lanes),
        measured=span.measured,
        start_ns=span.start_ns or 0,
        end_ns=None if span.length_ns is None or span.start_ns is None else span.start_ns + span.length_ns,
        slots=None if span.chains is None else span.chains * span.turns,
        rate=getattr(stage.arrival, "rate", None),
        concurrency=span.lanes or None,
    )


def words(arrival: Any) -> str:
    """An arrival law as one says it."""
    if isinstance(arrival, Closed):
        return f"{arrival.concurrency} in flight (closed loop)"
    if isinstance(arrival, Ramp):
        return f"ramp {arrival.from_rate:g}/s to {arrival.to_rate:g}/s"
    if isinstance(arrival, Gamma):
        return f"gamma {arrival.rate:g}/s, burstiness {arrival.burstiness:g}"
    return "everything at once" if arrival.rate == float("inf") else f"{arrival.tag} {arrival.rate:g}/s"
