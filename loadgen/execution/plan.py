"""What is decided before the clock starts: who is asked, with which requests, when; and the header that says so.

Pure but for reading the tokenizer and a few facts about this machine. Nothing here talks to a target: that is `run.py`.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import os
import platform
import socket
import statistics
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.transport.target import Target
from loadgen_sdk.transport.wire import Tls

from loadgen import seeds
from loadgen.errors import Fault, Faults, UserError
from loadgen.execution import resource_limits
from loadgen.limits import ValidityLimits
from loadgen.metrics import columns
from loadgen.requests import prompts
from loadgen.requests import tokenizer as tokens
from loadgen.requests.build import build
from loadgen.results import manifest
from loadgen.schedule import timetable as schedule
from loadgen.schedule.timetable import Schedule
from loadgen.server_metrics.scraper import PagesAsked
from loadgen.sim.server.options import PHYSICAL
from loadgen.slo import Slo, Term
from loadgen.workload import Closed, Gamma, Ramp, Replay, Workload, recipe_fingerprint

EVENTS_EACH = 10_000  # output events/s that `auto` gives a worker: about half of what one carries
LANES_EACH = 64  # of a closed loop, whose rate nobody knows before
MOST_PER_CORE = 8  # workers: more only take memory (60 to 100 MB each) and each other's time
Route = Literal["auto", "round-robin", "least-in-flight", "sticky"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One target of a run, as the user named it. `url` "" is the embedded endpoint."""

    url: str
    name: str = ""
    api_key: str | None = field(default=None, repr=False)
    gpus: int | None = None
    shape: str = ""
    region: str = ""

    @property
    def shown(self) -> str:
        """Its name, or its URL without anything secret."""
        if self.name or not self.url:
            return self.name or "embedded simulation"
        if self.url.startswith("sim:"):
            return f"simulated: {self.url.removeprefix('sim:')}"
        try:
            return Target.parse(self.url).redacted
        except TargetUnusable:
            return "--url"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line says beside the workload. `url` None: the embedded endpoint.

    `targets`, when there are several, stand in the place of `url`, `api_key`, `gpus`, `shape` and `region`; `url` is
    then the first one's.
    """

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
    workers: int = 1  # 0: as many as the plan can use here
    ray: str | None = None  # address of a Ray cluster for the workers, or auto; None: they run on this machine
    sources: tuple[str, ...] = ()  # local addresses to send from
    keep: Literal["raw", "sample", "histogram"] = "raw"  # which rows
    out: Path | None = None
    store: str | None = None  # s3://..., az://..., ...: where the finished folder is copied to
    gpus: int | None = None
    shape: str = ""
    region: str = ""
    targets: tuple[Endpoint, ...] = ()
    route: Route = "auto"
    server_metrics: tuple[str, ...] = ("auto",)  # or off, drain, or URLs of pages: `scrape.places`
    on_target_failure: Literal["continue", "stop"] = "continue"
    command: tuple[str, ...] = ()
    embedded: dict[str, Any] = field(default_factory=PHYSICAL.copy)  # options of the embedded endpoint

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where the load goes; at least one."""
        if self.targets:
            return self.targets
        only = Endpoint(url=self.url or "", api_key=self.api_key, gpus=self.gpus, shape=self.shape, region=self.region)
        return (only,)

    @property
    def shown(self) -> str:
        """All of them in words, without secrets."""
        return ", ".join(endpoint.shown for endpoint in self.endpoints)

    @property
    def pages(self) -> PagesAsked:
        """The servers' own metrics pages to read."""
        keys = tuple(endpoint.api_key for endpoint in self.endpoints)
        return PagesAsked(self.server_metrics, keys, self.headers, self.tls)

    def of(self, endpoint: Endpoint) -> Settings:
        """These settings for one of its endpoints alone."""
        return replace(self, url=endpoint.url, api_key=endpoint.api_key, targets=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a worker needs to do its share; travels to worker processes as a pickle on their standard input."""

    workload: Workload
    settings: Settings
    found: tuple[ProbeResult, ...]  # one for each of settings.endpoints
    seed: int
    salt: int
    folder: Path
    run_id: str


def plan(job: Job) -> tuple[Schedule, prompts.Prompts, tokens.Tokenizer]:
    """The timetable and the requests of a job: the same in every process."""
    tokenizer = tokens.load_tokenizer(job.settings.tokenizer)
    return (
        schedule.build(job.workload, job.seed),
        build(job.workload, job.seed, job.salt, tokenizer, job.found[0].template_tokens or 0),
        tokenizer,
    )


def prepare(
    workload: Workload,
    settings: Settings,
    found: tuple[ProbeResult, ...],
    *,
    simulated: bool,
    folder: Path,
    cores: int | None = None,
) -> tuple[Job, manifest.Header, Schedule]:
    """Everything that is decided before the clock starts, and the header that says so. `cores`: of a cluster, where
    the workers run on one; what its nodes have room for is then not judged here."""
    seed = workload.seed if workload.seed is not None else seeds.fresh()
    salt = seeds.fresh()
    job = Job(
        workload=workload, settings=settings, found=found, seed=seed, salt=salt, folder=folder, run_id=folder.name
    )  # fmt: skip
    timetable, requests, tokenizer = plan(job)
    if not settings.workers:
        most = workload.max_in_flight
        useful = workers(timetable, requests, most, simulated=simulated and cores is None, cores=cores or 0)
        settings = replace(settings, workers=useful)
        job = replace(job, settings=settings)
    _enough(timetable, workload, settings, found, simulated, here=cores is None)
    slo, unjudged = _judged(_slo(workload), settings.stream)
    now = datetime.datetime.now(datetime.UTC).astimezone()
    first = found[0]
    source = "server" if all(one.usage for one in found) else tokenizer.tag
    slots = timetable.slots
    targets = tuple(
        manifest.TargetFacts(
            url=one.target.redacted,
            server=one.server,
            model=one.model,
            gpus=endpoint.gpus,
            shape=endpoint.shape,
            region=endpoint.region,
            name=_embedded(settings) if simulated else endpoint.name or ("simulation" if one.simulated else ""),
            simulated=simulated or one.simulated,
        )
        for one, endpoint in zip(found, settings.endpoints, strict=True)
    )
    header = manifest.Header(
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
        targets=targets,
        client=settings.client,
        api=settings.api,
        stream=settings.stream,
        slo=slo,
        limits=ValidityLimits(**workload.limits.model_dump()),
        stages=tuple(_stage(workload, timetable, i) for i in range(len(timetable.stages))),
        fingerprints=manifest.Fingerprints(
            recipe=recipe_fingerprint(workload, source), timetable=schedule.fingerprint(timetable)
        ),
        rtt_ms=statistics.median(one.rtt_ms for one in found),
        tokenizer=tokenizer.name,
        tokenizer_tag=tokenizer.tag,
        template_tokens=first.template_tokens,
        usage_asked=True,
        shares_prompts=_shares(workload),
        max_in_flight=workload.max_in_flight,
        grace_s=workload.grace_ns / 1e9,
        timeout_s=workload.timeout_ns / 1e9,
        stall_timeout_s=workload.stall_timeout_ns / 1e9,
        turns=timetable.turns,
        workers=settings.workers,
        keep=settings.keep,
        host=host(),
        notes=(
            *(_physics(settings) if simulated else ()),
            *dict.fromkeys(note for one in found for note in one.warnings),
            *requests.warnings(slots or 1000),
            *unjudged,
        ),
    )
    return job, header, timetable


def describe(workload: Workload, settings: Settings) -> str:
    """What a run would do, without touching the network: load, sizes, fingerprints."""
    seed = workload.seed if workload.seed is not None else seeds.fresh()
    timetable = schedule.build(workload, seed)
    requests = build(workload, seed, 0, tokens.load_tokenizer(settings.tokenizer))
    lines = [f"workload: {workload.name}", f"target: {settings.shown}", f"seed: {seed}"]
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


# -- workers -------------------------------------------------------------------------------------------------------


def workers(
    timetable: Schedule, requests: prompts.Prompts, max_in_flight: int | None, *, simulated: bool, cores: int = 0
) -> int:
    """How many worker processes `auto` is: enough for the events to come, a core each, and work for each of them.

    One where a stage ends with its last completion, since workers do not tell each other of that.
    """
    cores = cores or _cores()
    cores = max(1, cores - 1) if simulated else cores
    if any(span.dynamic for span in timetable.stages[:-1]):
        return 1
    asked = [requests[number].max_tokens or 0 for number in range(min(timetable.slots or 100, 100))]
    events = statistics.fmean(asked) if asked else 0.0
    useful = 1
    for span in timetable.stages:
        if span.lanes:
            useful = max(useful, min(span.lanes, -(-span.lanes // LANES_EACH)))
        else:
            rate = min(span.offered_rps or 0.0, len(span.offsets) * timetable.turns)
            useful = max(useful, math.ceil(rate * events / EVENTS_EACH))
    return max(1, min(cores, useful, max_in_flight or cores))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cap(max_in_flight: int | None, share: int, shares: int) -> int | None:
    """A worker's part of the in-flight cap; the parts add up to the whole."""
    return None if max_in_flight is None else len(range(share, max_in_flight, shares))


def _enough(
    timetable: Schedule,
    workload: Workload,
    settings: Settings,
    found: tuple[ProbeResult, ...],
    simulated: bool,
    *,
    here: bool,
) -> None:
    """Raises Faults where the plan needs more workers, files or ports than there are; `here`: on this machine."""
    faults: list[Fault] = list(resource_limits.unusable(settings.sources))
    if here and settings.workers > MOST_PER_CORE * _cores():
        what = f"{settings.workers:,} worker processes on {_cores()} core(s)"
        faults.append(UserError(what, f"--workers {settings.workers}", "--workers auto: a core each, if there is work"))
    most = workload.max_in_flight
    if most is not None and most < settings.workers and any(not span.lanes for span in timetable.stages):
        what = f"{most} requests in flight cannot be spread over {settings.workers} workers"
        faults.append(UserError(what, "--max-in-flight", f"--workers {most} or fewer: each has its part of the cap"))
    if here:
        faults += resource_limits.faults(
            total=resource_limits.connections(timetable, most),
            workers=settings.workers,
            addresses=[one.target.address for one in found],
            sources=len(settings.sources),
            simulated=simulated,
            room=resource_limits.room(),
        )
    if faults:
        raise Faults(faults)


# -- small facts -------------------------------------------------------------------------------------------------


def version() -> str:
    try:
        return metadata.version("loadgen")
    except metadata.PackageNotFoundError:
        return "unknown"


def host() -> manifest.Host:
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
    return manifest.Host(
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


def _slo(workload: Workload) -> Slo | None:
    slo = workload.slo
    if slo is None:
        return None
    terms = tuple(Term(metric=t.metric, limit_ns=t.limit_ns, quantile=t.quantile) for t in slo.terms)
    return Slo(terms=terms, goodput_share=slo.goodput_share)


def _judged(slo: Slo | None, stream: bool) -> tuple[Slo | None, list[str]]:
    """The SLO without the terms that answers in one piece cannot have, and a note about those."""
    if slo is None or stream:
        return slo, []
    without = tuple(term for term in slo.terms if term.metric not in columns.NEED_A_STREAM)
    names = ", ".join(term.metric for term in slo.terms if term.metric in columns.NEED_A_STREAM)
    notes = [f"SLO terms not judged: {names}: answers that are not streamed have none"] if names else []
    kept = Slo(terms=without, goodput_share=slo.goodput_share)
    return (kept if without or kept.goodput_share is not None else None), notes


def _embedded(settings: Settings) -> str:
    preset = settings.embedded.get("preset")
    return f"embedded simulation: {preset}" if preset else "embedded simulation"


def _physics(settings: Settings) -> tuple[str, ...]:
    """What the embedded endpoint is a model of, if it is one."""
    if not settings.embedded.get("preset"):
        return ()
    from loadgen.sim.presets.preset import load_preset

    preset = load_preset(settings.embedded["preset"])
    return (
        f"simulated in real time: {preset.words}; prompt and answer have {preset.limits.max_seq_len:,} tokens at most;"
        f" with fewer than {preset.valid_from_sequences.value:,.0f} sequences per replica the model extrapolates",
    )


def _shares(workload: Workload) -> bool:
    requests = workload.requests
    if getattr(requests, "turns", None) is not None:
        return True
    if hasattr(requests, "path") or hasattr(requests, "trace"):
        return True
    return bool(getattr(requests, "shared_prefix_tokens", 0) or getattr(requests, "system_tokens", 0))


def _stage(workload: Workload, timetable: Schedule, index: int) -> manifest.StagePlan:
    span, stage = timetable.stages[index], workload.stages[index]
    return manifest.StagePlan(
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
        ramp = f", begun over {arrival.ramp_ns / 1e9:g} s" if arrival.ramp_ns else ""
        return f"{arrival.concurrency} in flight (closed loop{ramp})"
    if isinstance(arrival, Ramp):
        return f"ramp {arrival.from_rate:g}/s to {arrival.to_rate:g}/s"
    if isinstance(arrival, Gamma):
        return f"gamma {arrival.rate:g}/s, burstiness {arrival.burstiness:g}"
    if isinstance(arrival, Replay):
        return f"trace {arrival.file.name}" + (f", {arrival.speed:g} times as fast" if arrival.speed != 1 else "")
    return "everything at once" if arrival.rate == float("inf") else f"{arrival.tag} {arrival.rate:g}/s"
