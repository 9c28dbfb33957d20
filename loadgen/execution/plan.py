"""Decides everything before the clock starts: targets, requests and timetable; and builds the header that records it.

Pure, except that it reads the tokenizer and a few facts about this machine. It talks to no target: `run.py` does.
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
from loadgen.execution import lane_start, resource_limits
from loadgen.limits import ValidityLimits
from loadgen.metrics import columns
from loadgen.requests import prompts, resonance
from loadgen.requests import tokenizer as tokens
from loadgen.requests.build import build
from loadgen.results import manifest
from loadgen.results.record import SCHEMA_MINOR
from loadgen.schedule import timetable as schedule
from loadgen.schedule.timetable import Schedule
from loadgen.server_metrics.scraper import PagesAsked
from loadgen.sim.server.options import PHYSICAL
from loadgen.slo import Slo, Term
from loadgen.workload import Closed, Gamma, Ramp, Replay, Workload, recipe_fingerprint

EVENTS_EACH = 10_000  # output events/s per worker for `auto`: about half of what a worker can handle
LANES_EACH = 64  # closed-loop lanes per worker for `auto`: the rate of a closed loop is not known in advance
MOST_PER_CORE = 8  # workers per core: more only use memory (60 to 100 MB each) and compete for the core
Route = Literal["auto", "round-robin", "least-in-flight", "sticky"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One target of a run, as the user gave it. `url` "" means the embedded endpoint."""

    url: str
    name: str = ""
    api_key: str | None = field(default=None, repr=False)
    gpus: int | None = None
    shape: str = ""
    region: str = ""

    @property
    def shown(self) -> str:
        """Its name, or its URL without secrets."""
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
    """The options of a run besides its workload. `url` None: the embedded endpoint.

    `targets`, if given, replaces `url`, `api_key`, `gpus`, `shape` and `region`; `url` is then the first one's.
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
    workers: int = 1  # 0: as many as the plan can use on this machine
    ray: str | None = None  # address of a Ray cluster for the workers, or auto; None: this machine
    sources: tuple[str, ...] = ()  # local addresses to send from
    keep: Literal["raw", "sample", "histogram"] = "raw"  # which rows to keep
    out: Path | None = None
    store: str | None = None  # s3://..., az://..., ...: the finished folder is copied there
    gpus: int | None = None
    shape: str = ""
    region: str = ""
    targets: tuple[Endpoint, ...] = ()
    route: Route = "auto"
    server_metrics: tuple[str, ...] = ("auto",)  # or off, drain, or URLs of pages: `server_metrics.scraper`
    on_target_failure: Literal["continue", "stop"] = "continue"
    metadata: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()
    leave_out_first_round: bool = False  # the first request of each lane is not measured, also with a count
    embedded: dict[str, Any] = field(default_factory=PHYSICAL.copy)  # options of the embedded endpoint

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The targets of the load; at least one."""
        if self.targets:
            return self.targets
        only = Endpoint(url=self.url or "", api_key=self.api_key, gpus=self.gpus, shape=self.shape, region=self.region)
        return (only,)

    @property
    def virtual(self) -> bool:
        """Whether the target is simulated in virtual time, where waiting costs nothing."""
        return self.url is not None and self.url.startswith("sim:")

    @property
    def shown(self) -> str:
        """All endpoints as text, without secrets."""
        return ", ".join(endpoint.shown for endpoint in self.endpoints)

    @property
    def pages(self) -> PagesAsked:
        """Which of the servers' own metrics pages to read, and with which keys."""
        keys = tuple(endpoint.api_key for endpoint in self.endpoints)
        return PagesAsked(self.server_metrics, keys, self.headers, self.tls)

    def of(self, endpoint: Endpoint) -> Settings:
        """These settings with `endpoint` as the only target."""
        return replace(self, url=endpoint.url, api_key=endpoint.api_key, targets=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a worker needs to do its share. Sent to worker processes as a pickle on their standard input."""

    workload: Workload
    settings: Settings
    found: tuple[ProbeResult, ...]  # probe results, one per endpoint of `settings.endpoints`
    seed: int
    salt: int
    folder: Path
    run_id: str


def plan(job: Job) -> tuple[Schedule, prompts.Prompts, tokens.Tokenizer]:
    """The timetable, the requests and the tokenizer of a job; equal in every process."""
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
    answer: lane_start.AnswerTime | None = None,
) -> tuple[Job, manifest.Header, Schedule]:
    """Decide everything before the clock starts: the job, the header and the timetable. Raises Faults.

    `found`: probe results, one per endpoint. `cores`: free CPUs of the cluster, if the workers run on one; the limits
    of its nodes (open files, ports) are then not checked here. `answer`: how long an answer takes, if it is known
    better than by the probe; the lanes of a closed loop begin spread over it.
    """
    asked_workload = workload
    seed = workload.seed if workload.seed is not None else seeds.fresh()
    salt = seeds.salt_of(seed, workload.salt)
    job = Job(
        workload=workload, settings=settings, found=found, seed=seed, salt=seeds.salt_number(salt), folder=folder,
        run_id=folder.name,
    )  # fmt: skip
    timetable, requests, tokenizer = plan(job)
    answer = answer or lane_start.by_probe(found[0].first_ms, found[0].token_ms)
    workload, begins = lane_start.resolve(workload, requests, answer, leave_out=settings.leave_out_first_round)
    asked_timetable = timetable  # how lanes begin by default is the target's doing: fingerprints are of what was asked
    if workload.stages != asked_workload.stages:
        job = replace(job, workload=workload)
        timetable = schedule.build(workload, seed)
    if not settings.workers:
        most = workload.max_in_flight
        useful = workers(timetable, requests, most, simulated=simulated and cores is None, cores=cores or 0)
        settings = replace(settings, workers=useful)
        job = replace(job, settings=settings)
    _check_limits(timetable, workload, settings, found, simulated, here=cores is None)
    slo, unjudged = _judged_slo(_slo(workload), settings.stream)
    now = datetime.datetime.now(datetime.UTC).astimezone()
    first_result = found[0]
    source = "server" if all(result.usage for result in found) else tokenizer.tag
    slots = timetable.slots
    targets = tuple(
        manifest.TargetFacts(
            url=result.target.redacted,
            server=result.server,
            model=result.model,
            gpus=endpoint.gpus,
            shape=endpoint.shape,
            region=endpoint.region,
            name=_embedded_name(settings) if simulated else endpoint.name or ("simulation" if result.simulated else ""),
            simulated=simulated or result.simulated,
            version=result.version,
            engine=result.engine,
            precision=result.precision,
        )
        for result, endpoint in zip(found, settings.endpoints, strict=True)
    )
    header = manifest.Header(
        schema_minor=SCHEMA_MINOR,
        run=folder.name,
        started=now.isoformat(timespec="milliseconds"),
        version=version(),
        command=settings.command,
        workload=workload.name,
        source_text=workload.source_text,
        source_sha256=_sha256(workload.source_text),
        seed=seed,
        schedule_seed=workload.schedule_seed,
        salt=salt,
        new_prompts=workload.seed is None or workload.salt == seeds.FRESH,
        targets=targets,
        metadata=dict(settings.metadata),
        client=settings.client,
        api=settings.api,
        stream=settings.stream,
        slo=slo,
        limits=ValidityLimits(**workload.limits.model_dump()),
        stages=tuple(_stage_plan(workload, timetable, i, begins[i]) for i in range(len(timetable.stages))),
        fingerprints=manifest.Fingerprints(
            recipe=recipe_fingerprint(asked_workload, source, tokenizer.file_sha256),
            timetable=schedule.fingerprint(asked_timetable),
        ),
        rtt_ms=statistics.median(result.rtt_ms for result in found),
        tokenizer=tokenizer.name,
        tokenizer_tag=tokenizer.tag,
        tokenizer_sha256=tokenizer.file_sha256,
        template_tokens=first_result.template_tokens,
        usage_asked=True,
        shares_prompts=_shares_prompts(workload),
        max_in_flight=workload.max_in_flight,
        grace_s=workload.drain_ns / 1e9,
        timeout_s=workload.timeout_ns / 1e9,
        stall_timeout_s=workload.stall_timeout_ns / 1e9,
        turns=timetable.turns,
        workers=settings.workers,
        keep=settings.keep,
        host=host(),
        notes=(
            *(_preset_notes(settings) if simulated else ()),
            *_resonance(workload, settings, timetable, requests),
            *dict.fromkeys(note for result in found for note in result.warnings),
            *requests.warnings(slots or 1000),
            *unjudged,
        ),
    )
    return job, header, timetable


def describe(workload: Workload, settings: Settings) -> str:
    """Text that says what a run would do: load, request sizes, fingerprints. Does not use the network."""
    seed = workload.seed if workload.seed is not None else seeds.fresh()
    timetable = schedule.build(workload, seed)
    salt = seeds.salt_of(seed, workload.salt)
    tokenizer = tokens.load_tokenizer(settings.tokenizer)
    requests = build(workload, seed, seeds.salt_number(salt), tokenizer)
    lines = [f"workload: {workload.name}", f"target: {settings.shown}", seed_words(seed, salt)]
    for index in range(len(timetable.stages)):
        stage = _stage_plan(workload, timetable, index)
        bounds = [f"{stage.slots:,} requests"] if stage.slots is not None else []
        if stage.end_ns is not None:
            bounds.append(f"{(stage.end_ns - stage.start_ns) / 1e9:g} s")
        lines.append(f"load: {stage.arrival}: {', '.join(bounds)}{'' if stage.measured else ', warm-up, not measured'}")
        law = workload.stages[index].arrival
        if isinstance(law, Closed) and law.ramp_ns is None and law.concurrency > 1:
            lines.append("      its lanes begin spread over an answer's length, which the probe of the target tells")
    sample = [requests[number] for number in range(min(timetable.slots or 100, 100))]
    input_tokens = sorted(request.input_tokens or 0 for request in sample)
    output_tokens = sorted(request.max_tokens or 0 for request in sample)
    prompt_range = f"{input_tokens[0]:,} to {input_tokens[-1]:,} prompt tokens"
    output_range = f"{output_tokens[0]:,} to {output_tokens[-1]:,} asked for"
    lines.append(f"first {len(sample)} requests: {prompt_range}, {output_range}")
    recipe = recipe_fingerprint(workload, "server", tokenizer.file_sha256)
    lines.append(f"recipe: {recipe}  timetable: {schedule.fingerprint(timetable)}")
    lines += [f"note: {note}" for note in requests.warnings(timetable.slots or 1000)]
    return "\n".join(lines)


def seed_words(seed: int | None, salt: str) -> str:
    """The seed as text, with the salt where it is not that of the seed: what `--seed` and `--salt` take."""
    if seed is None:
        return "seed: not known"
    return f"seed: {seed}" + ("" if salt == seeds.salt_of(seed, None) else f"  salt: {salt}")


# -- workers -------------------------------------------------------------------------------------------------------


def workers(
    timetable: Schedule, requests: prompts.Prompts, max_in_flight: int | None, *, simulated: bool, cores: int = 0
) -> int:
    """Number of worker processes for `auto`: enough for the expected output events, at most one per core.

    1 if a stage other than the last ends with its last completion, because workers do not report that to each other.
    `cores`: of a cluster; 0: those of this machine.
    """
    cores = cores or _cores()
    cores = max(1, cores - 1) if simulated else cores
    if any(span.dynamic for span in timetable.stages[:-1]):
        return 1
    output_tokens = [requests[number].max_tokens or 0 for number in range(min(timetable.slots or 100, 100))]
    events = statistics.fmean(output_tokens) if output_tokens else 0.0
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
    """A worker's part of the in-flight limit; the parts of all workers add up to the limit."""
    return None if max_in_flight is None else len(range(share, max_in_flight, shares))


def _check_limits(
    timetable: Schedule,
    workload: Workload,
    settings: Settings,
    results: tuple[ProbeResult, ...],
    simulated: bool,
    *,
    here: bool,
) -> None:
    """Raises Faults if the plan needs more workers, files or ports than there are. `here`: runs on this machine."""
    faults: list[Fault] = list(resource_limits.unusable(settings.sources))
    if here and settings.workers > MOST_PER_CORE * _cores():
        what = f"{settings.workers:,} worker processes on {_cores()} core(s)"
        faults.append(UserError(what, f"--workers {settings.workers}", "--workers auto: a core each, if there is work"))
    in_flight_limit = workload.max_in_flight
    if (
        in_flight_limit is not None
        and in_flight_limit < settings.workers
        and any(not span.lanes for span in timetable.stages)
    ):
        what = f"{in_flight_limit} requests in flight cannot be spread over {settings.workers} workers"
        faults.append(
            UserError(what, "--max-in-flight", f"--workers {in_flight_limit} or fewer: each has its part of the cap")
        )
    if here:
        faults += resource_limits.faults(
            total=resource_limits.connections(timetable, in_flight_limit),
            workers=settings.workers,
            addresses=[result.target.address for result in results],
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
    """Facts about this machine; a fact that cannot be read keeps its empty value."""
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


def _judged_slo(slo: Slo | None, stream: bool) -> tuple[Slo | None, list[str]]:
    """The SLO that can be judged, and notes. Without streaming, terms that need a stream are left out, with a note."""
    if slo is None or stream:
        return slo, []
    judged_terms = tuple(term for term in slo.terms if term.metric not in columns.NEED_A_STREAM)
    skipped_names = ", ".join(term.metric for term in slo.terms if term.metric in columns.NEED_A_STREAM)
    notes = [f"SLO terms not judged: {skipped_names}: answers that are not streamed have none"] if skipped_names else []
    judged_slo = Slo(terms=judged_terms, goodput_share=slo.goodput_share)
    return (judged_slo if judged_terms or judged_slo.goodput_share is not None else None), notes


def _embedded_name(settings: Settings) -> str:
    preset = settings.embedded.get("preset")
    return f"embedded simulation: {preset}" if preset else "embedded simulation"


def _resonance(workload: Workload, settings: Settings, timetable: Schedule, requests: Any) -> tuple[str, ...]:
    """A note where round robin over the targets keeps sending each the same part of a data set."""
    if settings.route not in ("auto", "round-robin") or timetable.turns > 1:
        return ()
    text = resonance.warning(workload.requests, requests, len(settings.endpoints), "target", timetable.slots)
    return (text,) if text else ()


def _preset_notes(settings: Settings) -> tuple[str, ...]:
    """Note about the preset that the embedded endpoint simulates, if it has one."""
    if not settings.embedded.get("preset"):
        return ()
    from loadgen.sim.presets.preset import load_preset

    preset = load_preset(settings.embedded["preset"])
    return (
        f"simulated in real time: {preset.words}; prompt and answer have {preset.limits.max_seq_len:,} tokens at most;"
        f" with fewer than {preset.valid_from_sequences.value:,.0f} sequences per replica the model extrapolates",
    )


def _shares_prompts(workload: Workload) -> bool:
    requests = workload.requests
    if getattr(requests, "turns", None) is not None:
        return True
    if hasattr(requests, "path") or hasattr(requests, "trace"):
        return True
    return bool(getattr(requests, "shared_prefix_tokens", 0) or getattr(requests, "system_tokens", 0))


def _stage_plan(
    workload: Workload, timetable: Schedule, index: int, begin: lane_start.Begin | None = None
) -> manifest.StagePlan:
    span, stage = timetable.stages[index], workload.stages[index]
    law = stage.arrival
    if isinstance(law, Closed) and begin is not None and begin.source != "asked":
        law = law.model_copy(update={"ramp_ns": None})  # what the workload says is equal for all servers
    return manifest.StagePlan(
        name=span.name,
        arrival=words(law),
        closed=bool(span.lanes),
        measured=span.measured,
        start_ns=span.start_ns or 0,
        end_ns=None if span.length_ns is None or span.start_ns is None else span.start_ns + span.length_ns,
        slots=None if span.chains is None else span.chains * span.turns,
        rate=getattr(stage.arrival, "rate", None),
        concurrency=span.lanes or None,
        first_slot=span.first_chain * span.turns,
        ramp_s=None if begin is None or begin.ramp_ns is None else begin.ramp_ns / 1e9,
        ramp_from="" if begin is None else begin.source,
    )


def words(arrival: Any) -> str:
    """An arrival law as text, for example "poisson 10/s"."""
    if isinstance(arrival, Closed):
        ramp = f", begun over {arrival.ramp_ns / 1e9:g} s" if arrival.ramp_ns else ""
        ramp = ", begun all at once" if arrival.ramp_ns == 0 else ramp
        return f"{arrival.concurrency} in flight (closed loop{ramp})"
    if isinstance(arrival, Ramp):
        return f"ramp {arrival.from_rate:g}/s to {arrival.to_rate:g}/s"
    if isinstance(arrival, Gamma):
        return f"gamma {arrival.rate:g}/s, burstiness {arrival.burstiness:g}"
    if isinstance(arrival, Replay):
        return f"trace {arrival.file.name}" + (f", {arrival.speed:g} times as fast" if arrival.speed != 1 else "")
    return "everything at once" if arrival.rate == float("inf") else f"{arrival.tag} {arrival.rate:g}/s"
