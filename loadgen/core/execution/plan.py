"""Decide what a run sends and when, before it starts: requests, schedule and number of workers.

Building a plan reads the tokenizer and the user's data, and sends nothing to a target.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
from loadgen.core import seeds
from loadgen.core.accepted_lengths import AcceptedLengthTarget
from loadgen.core.child_process import FROZEN_S, count_cpus
from loadgen.core.errors import UserError
from loadgen.core.execution import staggered_start
from loadgen.core.execution.context import (
    KnownTarget,
    OversizedRequests,
    find_oversized_requests,
    shortest_context,
)
from loadgen.core.execution.shard import Shard
from loadgen.core.execution.staggered_start import ResponseTime, UserStart
from loadgen.core.requests import tokenizer as tokens
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.prompts import Prompts, PromptTarget
from loadgen.core.results.record_log import SEGMENT_ROWS
from loadgen.core.schedule.build import build_schedule
from loadgen.core.schedule.schedule import Schedule, ScheduledStage, shard
from loadgen.core.sidecars.page_addresses import MetricsPageOptions
from loadgen.core.sidecars.profiler import ProfilerOptions
from loadgen.core.workload import Workload
from loadgen.core.workload.cache_fill import with_cache_fill
from loadgen.plugins import UsedPlugin

# Output events per second for each worker: about half of what a worker can handle.
_EVENTS_PER_WORKER = 10_000
# The request rate of a closed loop is not known in advance, so its workers are chosen by users.
_USERS_PER_WORKER = 64
# The first requests of a run show how many output tokens its requests ask for.
_SAMPLED_REQUESTS = 100

Route = Literal["auto", "round-robin", "least-in-flight", "sticky"]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One target of a run as the user specified it. An empty URL means the embedded endpoint."""

    url: str
    name: str = ""
    api_key: str | None = None
    gpus: int | None = None
    shape: str = ""
    region: str = ""
    node: str = ""
    serves: str = ""
    """The name by which steps of tasks request this target. Without a name it serves all steps that
    request none."""
    api: Api | None = None
    """The API of these steps, or None for the API of the run."""
    model: str | None = None
    """The model of these steps, or None for the only model that the server lists."""

    def __repr__(self) -> str:
        # The API key must not be printed.
        return f"Endpoint({self.display_name})"

    @property
    def display_name(self) -> str:
        """Return the name of the endpoint, or its URL without secrets."""
        known_name = self.name or backends.display_name(self.url)
        if known_name:
            return known_name
        try:
            return Target.parse(self.url).redacted
        except TargetUnusable:
            return "--url"


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and time limits of a run that a user never has to set."""

    most_ahead: int = 100_000
    """All request bodies are built before the load if it has at most this many requests."""
    long_ns: int = 120_000_000_000
    """A worker builds its own bodies if no stage without a count is longer than this."""
    window: int = 2_000
    """Bodies of an open loop that are built in advance if another process builds them."""
    segment_rows: int = SEGMENT_ROWS
    compacted_rows: int = 20_000
    """The records of a load with at most this many requests are compacted at its end, by no
    separate process."""
    frozen_s: float = 30.0
    """A worker that shows no progress for this long is killed. It publishes its counters every
    second."""
    helper_frozen_s: float = FROZEN_S
    """The same limit for the processes that build bodies and store records."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run besides its workload.

    If `targets` is given, it replaces `url`, `api_key`, `gpus`, `shape` and `region`, and `url` is
    that of the first target. A URL of None means the embedded endpoint.
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
    workers: int = 1
    """Number of worker processes, or 0 for as many as the plan can use on this machine."""
    ray: str | None = None
    """Address of a Ray cluster for the workers, or "auto". None means this machine."""
    sources: tuple[str, ...] = ()
    """Local addresses to send from."""
    shard: Shard | None = None
    """The part of the run to send, or None for the complete run."""
    keep: Literal["raw", "gaps"] = "raw"
    """With "gaps", each gap between output events is stored besides the records."""
    out: Path | None = None
    store: str | None = None
    """Where the finished folder is copied to, for example an s3:// or az:// URL."""
    gpus: int | None = None
    shape: str = ""
    region: str = ""
    targets: tuple[Endpoint, ...] = ()
    step_targets: Mapping[tuple[str, str], tuple[int, ...]] = msgspec.field(default_factory=dict)
    """For each (class, step of a task), the indexes of its endpoints. The key ("", "") stands for
    all other steps. An empty mapping means that each endpoint serves everything."""
    route: Route = "auto"
    server_metrics: tuple[str, ...] = ("auto",)
    """One of "auto", "off", "drain", or URLs of pages; see `sidecars.page_addresses`."""
    session_header: str | None = None
    """Name of a header with the session of each request of a conversation or task."""
    accepted_length: AcceptedLengthTarget | None = None
    """The accepted length that speculative decoding is to have, instead of the workload's."""
    slo_headers: bool = False
    """True if each request states its SLO to a gateway; see `slo.HEADER_PREFIXES`."""
    percentiles: tuple[float, ...] = ()
    """Further percentiles that the result shows, as shares."""
    server_timing: bool = False
    """True if the server is asked for its own timing breakdown of each request."""
    reset_cache: bool = False
    """True if the prefix caches of the servers are emptied before the load."""
    traceparent: bool = False
    """True if each request carries a W3C trace of its own."""
    profile: ProfilerOptions | None = None
    """The part of the load during which the profiler of the servers runs."""
    energy: tuple[str, ...] = ("auto",)
    """One of "auto", "off", "nvidia-smi", or URLs of pages; see `sidecars.page_addresses`."""
    on_target_failure: Literal["continue", "stop"] = "continue"
    metadata: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()
    leave_out_first_round: bool = False
    """True if the first request of each virtual user is not measured, also with a count."""
    embedded: dict[str, Any] | None = None
    """Options of the embedded endpoint. None means a complete machine, by its model."""
    tuning: Tuning = msgspec.field(default_factory=Tuning)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return the targets of the load; there is at least one."""
        if self.targets:
            return self.targets

        endpoint = Endpoint(
            url=self.url or "",
            api_key=self.api_key,
            gpus=self.gpus,
            shape=self.shape,
            region=self.region,
        )
        return (endpoint,)

    @property
    def display_name(self) -> str:
        """Return the names of all endpoints as text, without secrets."""
        return ", ".join(endpoint.display_name for endpoint in self.endpoints)

    @property
    def returns_numbers(self) -> bool:
        """Return True if responses are numbers that arrive at once, as embeddings and scores do.

        Such responses have neither tokens nor a time to first token.
        """
        return self.api in NON_GENERATIVE_APIS

    @property
    def backend(self) -> BackendRow:
        """Return the backend of the target.

        Raises UserError if no backend supports the scheme of the URL.
        """
        return backends.get_backend_of_target(self.url)

    @property
    def virtual(self) -> bool:
        """Return True if the target is simulated in virtual time."""
        return self.backend.virtual

    @property
    def hot_path(self) -> str:
        """Return the implementation that reads sockets here: `compiled`, `python`, or empty."""
        return "" if self.virtual else compiled.RUNS

    @property
    def pages(self) -> MetricsPageOptions:
        """Return which metrics pages of servers and hardware are read, and with which keys."""
        keys = tuple(endpoint.api_key for endpoint in self.endpoints)
        return MetricsPageOptions(
            self.server_metrics, keys, self.headers, self.tls, self.energy, self.server_timing
        )

    def for_endpoint(self, endpoint: Endpoint) -> Settings:
        """Return the settings of a run that has `endpoint` as its only target.

        Some endpoints serve only one step of the tasks of a workload, for example an embedding
        before a completion (`Endpoint.serves`). The settings of such an endpoint have the API and
        the model of this step.
        """
        settings = replace(
            self, url=endpoint.url, api_key=endpoint.api_key, targets=(), step_targets={}
        )
        serves_one_step = endpoint.serves != ""
        return settings._for_step(endpoint) if serves_one_step else settings

    def _for_step(self, endpoint: Endpoint) -> Settings:
        """Return the settings with the API and the model of an endpoint that serves one step.

        The kind of its server is detected separately. If its API returns numbers instead of text,
        such as embeddings, responses are not streamed, and extra fields of the request body, which
        are for generated text, are left out.
        """
        api = endpoint.api or self.api  # An endpoint without an API of its own has None.
        settings = replace(self, api=api, model=endpoint.model, server="auto")
        if settings.returns_numbers:
            settings = replace(settings, stream=False, extra_body=None)
        return settings


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a worker needs to build the plan of a run again.

    A job is sent to worker processes as a pickle on their standard input.
    """

    workload: Workload
    """The workload with the start of every virtual user decided."""
    settings: Settings
    probe_results: tuple[ProbeResult, ...]
    """One result for each endpoint of the settings."""
    seed: int
    salt: str
    folder: Path
    run_id: str
    """The name of the folder. A node of a cluster writes into a folder with another name."""
    simulated: bool = False
    """True if the target is the embedded endpoint or a simulation in virtual time."""
    known: KnownTarget | None = None
    """What is known of the target without probing it."""
    plugins: tuple[UsedPlugin, ...] = ()
    """Plug-ins of other packages that the process that created the job has used."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a job sends, and when.

    The process that starts a run creates the plan by `prepare_plan`, and each worker creates it
    again by `build_plan`.
    """

    job: Job
    schedule: Schedule
    requests: Prompts
    tokenizer: tokens.Tokenizer
    oversized_requests: OversizedRequests | None = None
    """Requests that do not fit the context of the targets. Only `prepare_plan` sets them."""


class PreparedPlan(NamedTuple):
    """The plan of a run, and how the virtual users of each of its stages start."""

    plan: Plan
    starts: tuple[UserStart, ...]


class PreparationContext(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a run besides its workload, its settings and the results of the probe."""

    folder: Path
    simulated: bool = False
    known: KnownTarget | None = None
    cluster_cores: int | None = None
    """Free CPUs of the cluster, or None if the workers run on this machine."""
    response_time: ResponseTime | None = None
    """How long a response takes, if that is known better than from the probe."""


def build_plan(job: Job) -> Plan:
    """Return the plan of a job. Each worker process builds it, and all get the same plan.

    Raises UserError if a plug-in that the job needs has another version here.
    """
    differences = plugins.version_differences(job.plugins)
    if differences:
        raise UserError(
            "nodes_differ",
            message=f"plug-ins differ: {'; '.join(differences)}",
            where="",
            hint="install the same packages with pip wherever a worker runs",
        )

    plan = _build_complete_plan(job)
    return structs.replace(plan, schedule=requested_shard(plan.schedule, job.settings))


def prepare_plan(
    workload: Workload,
    settings: Settings,
    probe_results: tuple[ProbeResult, ...],
    context: PreparationContext,
) -> PreparedPlan:
    """Return the plan of a run: what it sends, when, and with how many workers.

    A run may be distributed over several machines, each of which sends one shard. The plan is
    built for the complete run first, and then reduced to the shard of this machine.

    Args:
        workload: The workload.
        settings: The settings. If their number of workers is 0, it is chosen here.
        probe_results: What the probe found out about each target.
        context: Further facts about this run and its host, such as the output folder.

    Returns:
        The plan, which `plan_checks.check_plan` then checks, and how the virtual users of each of
        its stages start.
    """
    job = _create_job(with_cache_fill(workload), settings, probe_results, context)
    plan = _build_complete_plan(job)
    oversized_requests = find_oversized_requests(
        plan.requests, plan.schedule.slot_count, shortest_context(probe_results)
    )
    plan, user_starts = _decide_user_starts(plan, context.response_time)

    plan = structs.replace(
        plan,
        schedule=requested_shard(plan.schedule, settings),
        oversized_requests=oversized_requests,
    )
    if settings.workers == 0:
        plan = _with_workers(plan, _choose_workers(plan, context))

    return PreparedPlan(plan, user_starts)


def _create_job(
    workload: Workload,
    settings: Settings,
    probe_results: tuple[ProbeResult, ...],
    context: PreparationContext,
) -> Job:
    """Return the job of a run, from which each worker builds the plan again."""
    seed = workload.seed if workload.seed is not None else seeds.random_seed()
    return Job(
        workload=workload,
        settings=settings,
        probe_results=probe_results,
        seed=seed,
        salt=seeds.resolve_salt(seed, workload.salt),
        folder=context.folder,
        run_id=context.folder.name,
        simulated=context.simulated,
        known=context.known,
        plugins=plugins.used_plugins(),
    )


def _with_workload(plan: Plan, workload: Workload) -> Plan:
    """Return a plan with another workload, for which the schedule is built again.

    The workload may differ from that of the plan only in its stages. If they are equal, the plan is
    returned unchanged.
    """
    if workload.stages == plan.job.workload.stages:
        return plan
    job = structs.replace(plan.job, workload=workload)
    return structs.replace(plan, job=job, schedule=build_schedule(workload, job.seed))


def _with_workers(plan: Plan, workers: int) -> Plan:
    """Return a plan whose settings have a number of workers."""
    settings = structs.replace(plan.job.settings, workers=workers)
    return structs.replace(plan, job=structs.replace(plan.job, settings=settings))


def requested_shard(schedule: Schedule, settings: Settings) -> Schedule:
    """Return the shard of a schedule that the settings request, or the complete schedule."""
    if settings.shard is None:
        return schedule
    return shard(schedule, settings.shard.index - 1, settings.shard.count)


def count_useful_workers(
    schedule: Schedule, prompts: Prompts, workload: Workload, max_workers: int
) -> int:
    """Return how many worker processes a run can use, from 1 to `max_workers`.

    There are enough workers to read the output events (tokens) of the busiest stage, which is one
    phase of the run. The workload may limit how many requests are in flight, or in prefill, at the
    same time. Each worker gets a part of such a limit and must be able to send at least one
    request, so there are not more workers than requests within the limit.
    """
    if _needs_single_worker(schedule):
        return 1

    events_per_request = _mean_output_tokens(schedule, prompts)
    workers = max(
        _count_workers_of_stage(schedule, stage, events_per_request) for stage in schedule.stages
    )
    for limit in (workload.max_in_flight, workload.max_in_prefill):
        shard_limit = share_of_limit(limit, schedule)  # None without a limit
        if shard_limit:
            workers = min(workers, shard_limit)

    return max(1, min(workers, max_workers))


def _needs_single_worker(schedule: Schedule) -> bool:
    """Return True if several workers could not tell when a stage ends and the next one starts.

    A closed loop with a fixed number of requests ends with its last response, at a time that is not
    known in advance, and workers do not report responses to each other. Neither do they report that
    one of their virtual users has nothing more to send, with which a load may end.
    """
    stages_before_another = schedule.stages[:-1]
    if schedule.stages[-1].ends_with_first_user:
        return True
    return any(stage.is_end_unknown for stage in stages_before_another)


def _count_workers_of_stage(
    schedule: Schedule, stage: ScheduledStage, events_per_request: float
) -> int:
    """Return how many workers one stage needs, perhaps 0.

    A closed loop has a fixed number of virtual users. Its rate depends on the server and is not
    known before the run, so each worker gets a number of users. An open loop has a rate, so each
    worker gets a number of output events (tokens) per second.

    Args:
        schedule: The schedule of this machine's part (shard) of the run.
        stage: One of its stages.
        events_per_request: The mean number of output events of a response.
    """
    if stage.is_closed_loop:
        users = len(schedule.virtual_users_of(stage))
        return math.ceil(users / _USERS_PER_WORKER)

    rate_of_shard = (stage.offered_rps or 0.0) / schedule.shard_count
    request_count = schedule.slot_count_of(stage) or 0

    # The rate is infinite if all requests start at once. Even then, no more requests than there are
    # can start in one second.
    requests_per_s = min(rate_of_shard, request_count)
    events_per_s = requests_per_s * events_per_request
    return math.ceil(events_per_s / _EVENTS_PER_WORKER)


def share_of_limit(limit: int | None, schedule: Schedule) -> int | None:
    """Return the share that a shard has of a limit of requests, or None without a limit.

    The shares of all shards add up to the limit: of 10 requests and 4 shards, the shares are 3, 3,
    2 and 2.
    """
    if limit is None:
        return None
    return len(range(schedule.shard_index, limit, schedule.shard_count))


def _build_complete_plan(job: Job) -> Plan:
    """Return the plan of a job with the complete schedule, even if the job sends only a shard.

    The salt decides how prompts begin: runs with different salts share no prompts, so a server does
    not have them in its prefix cache. If the probe did not show how many tokens the chat template
    adds, they count as 0.
    """
    tokenizer = tokens.load_tokenizer(job.settings.tokenizer)
    first_result = job.probe_results[0]
    prompt_target = PromptTarget(
        template_tokens=first_result.template_tokens or 0,
        api=job.settings.api,
        models=first_result.models,
    )

    prompts = build_prompts(
        job.workload,
        seed=job.seed,
        salt=seeds.salt_number(job.salt),
        tokenizer=tokenizer,
        target=prompt_target,
    )
    schedule = build_schedule(job.workload, job.seed)
    return Plan(job=job, schedule=schedule, requests=prompts, tokenizer=tokenizer)


def _decide_user_starts(plan: Plan, response_time: ResponseTime | None) -> PreparedPlan:
    """Return the plan in which the virtual users start spread over one response time.

    This may add stages to its workload, in which the users start. The result also has a `UserStart`
    for each stage.

    Args:
        plan: The plan.
        response_time: How long a response takes, or None to estimate it from the probe of the first
            target.
    """
    if response_time is None:
        probe_result = plan.job.probe_results[0]
        response_time = staggered_start.estimate_from_probe(
            probe_result.one_token_response_ms, probe_result.per_token_ms
        )

    started_workload = staggered_start.decide_starts(
        plan.job.workload,
        plan.requests,
        response_time,
        leave_out_first_round=plan.job.settings.leave_out_first_round,
    )
    return PreparedPlan(_with_workload(plan, started_workload.workload), started_workload.starts)


def _choose_workers(plan: Plan, context: PreparationContext) -> int:
    """Return the number of workers of a run whose settings do not give it."""
    max_workers = context.cluster_cores
    if max_workers is None:
        # The embedded endpoint needs a core of its own.
        reserved_cpus = 1 if context.simulated else 0
        max_workers = max(1, count_cpus() - reserved_cpus)
    return count_useful_workers(plan.schedule, plan.requests, plan.job.workload, max_workers)


def _mean_output_tokens(schedule: Schedule, prompts: Prompts) -> float:
    """Return the mean number of output tokens that the first requests ask for.

    A request that asks for no number counts as 0.
    """
    count = min(schedule.slot_count or _SAMPLED_REQUESTS, _SAMPLED_REQUESTS)
    output_tokens = [
        prompts.requested_output_tokens(number) or 0 for number in prompts.request_ids(count)
    ]
    return statistics.fmean(output_tokens) if output_tokens else 0.0
