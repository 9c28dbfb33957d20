"""Decides what a run sends and when, before the clock starts: requests, schedule, lanes, number of workers.

Pure, except that it reads the tokenizer, the user's data and the limits of this machine. It talks to no target.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from loadgen_sdk import compiled
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.transport.target import Target
from loadgen_sdk.transport.tls import Tls
from loadgen_sdk.wire_formats.server_profiles import NON_GENERATIVE_APIS, Api
from msgspec import structs
from msgspec.structs import replace

from loadgen import backends, plugins
from loadgen.backends import BackendRow
from loadgen.core import format, seeds, slo
from loadgen.core.child_process import FROZEN_S
from loadgen.core.errors import CombinedError, LoadgenError, UserError
from loadgen.core.execution import resource_limits, staggered_start
from loadgen.core.execution.context import KnownTarget, TooLong, shortest, too_long
from loadgen.core.execution.shard import Shard
from loadgen.core.requests import tokenizer as tokens
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import Prompts, PromptTarget
from loadgen.core.results.spool import SEGMENT_ROWS
from loadgen.core.schedule.build import build_schedule
from loadgen.core.schedule.schedule import Schedule, shard
from loadgen.core.sidecars.profiler import ProfilerOptions
from loadgen.core.sidecars.scraper import MetricsPageOptions
from loadgen.core.workload import Mix, Task, Workload, requests_by_class
from loadgen.figures import needs
from loadgen.plugins import UsedPlugin

EVENTS_EACH = (
    10_000  # output events/s per worker for `auto`: about half of what a worker can handle
)
LANES_EACH = (
    64  # closed-loop lanes per worker for `auto`: the rate of a closed loop is not known in advance
)
MOST_PER_CORE = (
    8  # workers per core: more only use memory (60 to 100 MB each) and compete for the core
)
Route = Literal["auto", "round-robin", "least-in-flight", "sticky"]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One target of a run, as the user gave it. `url` "" means the embedded endpoint."""

    url: str
    name: str = ""
    api_key: str | None = None
    gpus: int | None = None
    shape: str = ""
    region: str = ""
    node: str = ""
    serves: str = ""  # the name by which steps of tasks ask for it; "": all that name no other
    api: Api | None = None  # of these steps; None: that of the run
    model: str | None = None  # of these steps; None: the only one that the server lists

    def __repr__(self) -> str:  # a key is shown nowhere
        return f"Endpoint({self.shown})"

    @property
    def shown(self) -> str:
        """Its name, or its URL without secrets."""
        if said := self.name or backends.shown(self.url):
            return said
        try:
            return Target.parse(self.url).redacted
        except TargetUnusable:
            return "--url"


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and waits of a run that a user never has to set."""

    most_ahead: int = (
        100_000  # requests of a load, up to which all bodies are built before it starts
    )
    long_ns: int = 120_000_000_000  # length of a stage without a count, up to which the worker itself builds its bodies
    window: int = 2_000  # requests of an open loop whose bodies are built before they are sent, where a process builds
    segment_rows: int = SEGMENT_ROWS
    compacted_rows: int = (
        20_000  # requests of a load, up to which its rows are compacted at its end, by no process
    )
    frozen_s: float = (
        30.0  # without a sign of life of a worker, which publishes its counters once a second
    )
    helper_frozen_s: float = FROZEN_S  # the same of the processes that build bodies and store rows


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run besides its workload. `url` None: the embedded endpoint.

    `targets`, if given, replaces `url`, `api_key`, `gpus`, `shape` and `region`; `url` is then the first one's.
    """

    url: str | None = None
    model: str | None = None
    server: str = "auto"
    api: Api = "chat"
    stream: bool = True
    api_key: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    extra_body: dict[str, Any] | None = None
    tls: Tls = msgspec.field(default_factory=Tls)
    tokenizer: str | None = None
    workers: int = 1  # 0: as many as the plan can use on this machine
    ray: str | None = None  # address of a Ray cluster for the workers, or auto; None: this machine
    sources: tuple[str, ...] = ()  # local addresses to send from
    shard: Shard | None = None  # the part of the run to send; None: the whole run
    keep: Literal["raw", "gaps"] = "raw"  # gaps: beside the records, each gap between events
    out: Path | None = None
    store: str | None = None  # s3://..., az://..., ...: the finished folder is copied there
    gpus: int | None = None
    shape: str = ""
    region: str = ""
    targets: tuple[Endpoint, ...] = ()
    step_targets: Mapping[tuple[str, str], tuple[int, ...]] = msgspec.field(default_factory=dict)
    """(class, step of a task) -> its endpoints, by number; ("", ""): of all others; {}: each endpoint serves all."""
    route: Route = "auto"
    server_metrics: tuple[str, ...] = (
        "auto",
    )  # or off, drain, or URLs of pages: `server_metrics.scraper`
    session_header: str | None = (
        None  # a header with the session of each request of a conversation or task
    )
    slo_headers: bool = False  # each request tells a gateway its SLO: `slo.SENT_AS`
    percentiles: tuple[float, ...] = ()  # further ones that the result shows, as shares
    server_timing: bool = False  # ask for the server's own account of each request
    reset_cache: bool = False  # empty the servers' prefix caches before the load
    traceparent: bool = False  # each request carries a W3C trace of its own
    profile: ProfilerOptions | None = (
        None  # a part of the load around which the servers' profiler runs
    )
    energy: tuple[str, ...] = (
        "auto",
    )  # or off, nvidia-smi, or URLs of pages: `server_metrics.scraper`
    on_target_failure: Literal["continue", "stop"] = "continue"
    metadata: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()
    leave_out_first_round: bool = (
        False  # the first request of each lane is not measured, also with a count
    )
    embedded: dict[str, Any] | None = (
        None  # options of the embedded endpoint; None: a whole machine, by its model
    )
    tuning: Tuning = msgspec.field(default_factory=Tuning)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The targets of the load; at least one."""
        if self.targets:
            return self.targets
        only = Endpoint(
            url=self.url or "",
            api_key=self.api_key,
            gpus=self.gpus,
            shape=self.shape,
            region=self.region,
        )
        return (only,)

    @property
    def shown(self) -> str:
        """All endpoints as text, without secrets."""
        return ", ".join(endpoint.shown for endpoint in self.endpoints)

    @property
    def values(self) -> bool:
        """Whether answers are numbers that come at once (embeddings, rerank): no tokens, no TTFT."""
        return self.api in NON_GENERATIVE_APIS

    @property
    def backend(self) -> BackendRow:
        """What answers. Raises UserError for a URL of a scheme that no backend has."""
        return backends.of_target(self.url)

    @property
    def virtual(self) -> bool:
        """Whether the target is simulated in virtual time."""
        return self.backend.virtual

    @property
    def hot_path(self) -> str:
        """What reads the sockets of a load in this process: `compiled` or `python`; "": none of ours is read."""
        return "" if self.virtual else compiled.RUNS

    @property
    def pages(self) -> MetricsPageOptions:
        """Which pages of servers and hardware to read, and with which keys."""
        keys = tuple(endpoint.api_key for endpoint in self.endpoints)
        return MetricsPageOptions(
            self.server_metrics, keys, self.headers, self.tls, self.energy, self.server_timing
        )

    def of(self, endpoint: Endpoint) -> Settings:
        """These settings with `endpoint` as the only target, asked as it has to be."""
        only = replace(
            self, url=endpoint.url, api_key=endpoint.api_key, targets=(), step_targets={}
        )
        if not endpoint.serves:
            return only
        api = endpoint.api or self.api
        only = replace(only, api=api, model=endpoint.model, server="auto")
        return replace(only, stream=False, extra_body=None) if api in NON_GENERATIVE_APIS else only


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker needs to make the plan again. Sent to worker processes as a pickle on their standard input."""

    workload: Workload  # with the start of every lane decided
    settings: Settings
    found: tuple[ProbeResult, ...]  # probe results, one per endpoint of `settings.endpoints`
    seed: int
    salt: str
    folder: Path
    run_id: str  # the name of the folder; a node of a cluster writes into another one
    simulated: bool = (
        False  # the target is a simulation of our own: the embedded endpoint, or virtual time
    )
    known: KnownTarget | None = None  # what was known of it without asking it
    plugins: tuple[UsedPlugin, ...] = ()  # rows of other packages that its maker has used


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a job sends, and when. Made once in a process: by `prepare`, and in each worker by `build_plan`."""

    job: Job
    schedule: Schedule
    requests: Prompts
    tokenizer: tokens.Tokenizer
    too_long: TooLong | None = None  # for its targets; known to `prepare` alone


def build_plan(job: Job) -> Plan:
    """The plan of a job; equal in every process. Raises UserError where a package that it needs is another here."""
    if others := plugins.version_differences(job.plugins):
        hint = "the same packages wherever a worker runs: pip install them there"
        raise UserError("nodes_differ", f"plug-ins differ: {'; '.join(others)}", "", hint)
    plan = _whole_plan(job)
    return structs.replace(plan, schedule=own_part(plan.schedule, job.settings))


def own_part(schedule: Schedule, settings: Settings) -> Schedule:
    """Return the part of a schedule that these settings ask for: the shard, or all of it."""
    if settings.shard is None:
        return schedule
    return shard(schedule, settings.shard.index - 1, settings.shard.count)


def _whole_plan(job: Job) -> Plan:
    tokenizer = tokens.load_tokenizer(job.settings.tokenizer)
    salt, template_tokens = seeds.salt_number(job.salt), job.found[0].template_tokens or 0
    return Plan(
        job=job,
        schedule=build_schedule(job.workload, job.seed),
        requests=build_prompts(
            job.workload,
            job.seed,
            salt,
            tokenizer,
            PromptTarget(template_tokens, job.settings.api, job.found[0].models),
        ),
        tokenizer=tokenizer,
    )


def prepare(
    workload: Workload,
    settings: Settings,
    found: tuple[ProbeResult, ...],
    *,
    folder: Path,
    simulated: bool = False,
    known: KnownTarget | None = None,
    cores: int | None = None,
    answer: staggered_start.AnswerTime | None = None,
) -> tuple[Plan, tuple[staggered_start.Begin, ...]]:
    """The plan of a run, and how the lanes of each of its stages begin. Raises Faults.

    `found`: probe results, one per endpoint. `known`: what was known of the target without asking it. `cores`: free
    CPUs of the cluster, if the workers run on one; the limits of its nodes (open files, ports) are then not checked
    here. `answer`: how long an answer takes, if it is known better than by the probe; the lanes of a closed loop begin
    spread over it.
    """
    seed = workload.seed if workload.seed is not None else seeds.fresh()
    job = Job(
        workload=workload,
        settings=settings,
        found=found,
        seed=seed,
        salt=seeds.salt_of(seed, workload.salt),
        folder=folder,
        run_id=folder.name,
        simulated=simulated,
        known=known,
        plugins=plugins.used_plugins(),
    )
    plan = _whole_plan(job)
    plan = structs.replace(
        plan, too_long=too_long(plan.requests, plan.schedule.slot_count, shortest(found))
    )
    answer = answer or staggered_start.by_probe(
        found[0].one_token_response_ms, found[0].per_token_ms
    )
    started, begins = staggered_start.resolve(
        workload, plan.requests, answer, leave_out=settings.leave_out_first_round
    )
    if started.stages != workload.stages:
        job = structs.replace(job, workload=started)
        plan = structs.replace(plan, job=job, schedule=build_schedule(started, seed))
    plan = structs.replace(plan, schedule=own_part(plan.schedule, settings))
    if not settings.workers:
        own_cores = max(1, resource_limits.cpus() - simulated) if cores is None else cores
        most = workers(plan.schedule, plan.requests, workload, own_cores)
        settings = replace(settings, workers=most)
        plan = structs.replace(plan, job=structs.replace(plan.job, settings=settings))
    _check_limits(plan, here=cores is None)
    return plan, begins


def workers(schedule: Schedule, requests: Prompts, workload: Workload, cores: int) -> int:
    """Number of worker processes for `auto`: enough for the expected output events, at most one per core.

    1 if a stage other than the last ends with its last completion, because workers do not report that to each other.
    """
    if any(span.is_end_unknown for span in schedule.stages[:-1]):
        return 1
    output_tokens = [
        requests.requested_output_tokens(number) or 0
        for number in requests.numbers(min(schedule.slot_count or 100, 100))
    ]
    events = statistics.fmean(output_tokens) if output_tokens else 0.0
    useful = 1
    for span in schedule.stages:
        if span.concurrency:
            useful = max(useful, -(-len(schedule.virtual_users_of(span)) // LANES_EACH))
        else:
            rate = min(
                (span.offered_rps or 0.0) / schedule.shard_count, schedule.slot_count_of(span) or 0
            )
            useful = max(useful, math.ceil(rate * events / EVENTS_EACH))
    in_flight = cap(workload.max_in_flight, schedule.shard_index, schedule.shard_count)
    in_prefill = cap(workload.max_in_prefill, schedule.shard_index, schedule.shard_count)
    return max(1, min(cores, useful, in_flight or cores, in_prefill or cores))


def cap(most: int | None, share: int, shares: int) -> int | None:
    """A worker's part of a limit of requests at once; the parts of all workers add up to the limit."""
    return None if most is None else len(range(share, most, shares))


def _check_limits(plan: Plan, *, here: bool) -> None:
    """Raises Faults if the plan needs more workers, files or ports than there are. `here`: runs on this machine."""
    job, schedule = plan.job, plan.schedule
    settings, in_flight_limit = job.settings, job.workload.max_in_flight
    faults: list[LoadgenError] = [
        *resource_limits.unusable(settings.sources),
        *_faults_of_tasks(job.workload, settings),
    ]
    if (
        plan.too_long is not None
        and (fault := plan.too_long.refused(job.workload, settings.shown)) is not None
    ):
        faults.append(fault)
    if here and settings.workers > MOST_PER_CORE * resource_limits.cpus():
        cores = format.counted(resource_limits.cpus(), "core")
        what = (
            f"{format.counted(settings.workers, 'worker process', 'worker processes')} on {cores}"
        )
        faults.append(
            UserError(
                "resource_limit",
                what,
                f"--workers {settings.workers}",
                "--workers auto: a core each, if there is work",
            )
        )
    caps = [("in prefill", job.workload.max_in_prefill, "--set max_in_prefill")]
    if any(not span.concurrency for span in schedule.stages):
        caps.append(("in flight", in_flight_limit, "--max-in-flight"))
    for where, most, flag in caps:
        if most is not None and most < settings.workers * schedule.shard_count:
            workers = format.counted(settings.workers * schedule.shard_count, "worker")
            what = f"{format.counted(most, 'request')} {where} cannot be spread over {workers}"
            faults.append(
                UserError(
                    "out_of_range",
                    what,
                    flag,
                    f"{most} workers or fewer, over all shards: each has its part",
                )
            )
    if settings.shard is not None and not _has_measured_slots(schedule):
        faults.append(
            UserError(
                "out_of_range",
                "this part of the run has nothing to send",
                f"--shard {settings.shard.index}/{settings.shard.count}",
                "fewer shards than requests and virtual users",
            )
        )
    if here:
        faults += resource_limits.faults(
            total=resource_limits.connections(
                schedule, cap(in_flight_limit, schedule.shard_index, schedule.shard_count)
            ),
            workers=settings.workers,
            addresses=[result.target.address for result in job.found],
            sources=len(settings.sources),
            simulated=job.simulated,
            room=resource_limits.room(),
        )
    if faults:
        raise CombinedError(faults)


def _has_measured_slots(schedule: Schedule) -> bool:
    """Return whether each measured stage has slots in this share of a schedule."""
    return all(
        len(schedule.virtual_users_of(span)) > 0
        if span.session_count is None
        else schedule.slot_count_of(span)
        for span in schedule.stages
        if span.measured
    )


def _faults_of_tasks(workload: Workload, settings: Settings) -> Iterator[UserError]:
    """What the tasks of a workload ask for and these settings do not give."""
    tasks = [
        part for part in requests_by_class(workload.requests).values() if isinstance(part, Task)
    ]
    if any(task.known_tools for task in tasks) and settings.api not in ("chat", "messages"):
        yield UserError(
            "unsupported",
            "calls of tools are messages of a chat",
            f"--api {settings.api}",
            "--api chat",
        )
    if any(task.abandoned for task in tasks) and not settings.stream:
        hint = "leave it out, or abandoned: out of the workload"
        yield UserError(
            "unsupported",
            "nobody goes away in the middle of an answer that comes whole",
            "--no-stream",
            hint,
        )
    if workload.max_in_prefill is not None and not (settings.stream or settings.values):
        problem = "an answer that comes whole does not tell when its prefill was over"
        yield UserError(
            "unsupported", problem, "--no-stream", "stream, or leave max_in_prefill out"
        )
    if settings.values:
        for rule in workload.stop_when:
            if rule.metric != "errors" and needs(rule.metric):
                what = f"answers of {settings.api} have no tokens, so this rule would never hold"
                yield UserError(
                    "unsupported", what, f"--stop-when {rule.metric}", "errors:20%, or e2e:p50:5s"
                )
    classes = workload.requests.classes.values() if isinstance(workload.requests, Mix) else ()
    if settings.slo_headers and not any(
        slo.sent_headers(one) for one in (workload.slo, *(c.slo for c in classes))
    ):
        problem = "no SLO of TTFT or TPOT, so there is none to tell a gateway"
        yield UserError(
            "missing_key", problem, "--set slo_headers", "--slo ttft:500ms:p95 --slo tpot:50ms:p95"
        )
