"""Create the manifest of a run (`run.json`): its plan, its targets, this machine, and notes."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from loadgen_sdk.probe.probe import ProbeResult

from loadgen import plugins
from loadgen.core import seeds
from loadgen.core.execution import host_facts
from loadgen.core.execution.plan import Endpoint, Job, Plan, Settings
from loadgen.core.execution.plan_notes import CodedNotes, coded_notes, plan_notes
from loadgen.core.execution.stage_plans import create_stage_plan
from loadgen.core.execution.staggered_start import UserStart
from loadgen.core.limits import ValidityLimits
from loadgen.core.metrics import reasons
from loadgen.core.requests.synthetic_prompts import SyntheticPrompts
from loadgen.core.requests.task_graphs import TaskGraphs
from loadgen.core.results.manifest import (
    ChunkReuse,
    ClassPlan,
    Fingerprints,
    PluginUsed,
    RunManifest,
    ShardPart,
    StepPlan,
    TargetFacts,
)
from loadgen.core.schedule.build import build_schedule
from loadgen.core.schedule.schedule import complete_schedule, schedule_fingerprint
from loadgen.core.slo import Slo, Term, state_token_deadlines
from loadgen.core.workload import (
    FromFile,
    FromTrace,
    Mix,
    Synthetic,
    Task,
    Trajectories,
    Workload,
    recipe_fingerprint,
    requests_by_class,
    work_fingerprint,
)
from loadgen.core.workload.request_classes import Requests
from loadgen.core.workload.tasks import TaskStep
from loadgen.figures import needs as response_parts_needed_for

# How many chunks of prompts are drawn to estimate how often chunks are repeated.
_SAMPLED_CHUNKS = 30_000


class JudgeableSlo(NamedTuple):
    """The part of an SLO that can be judged, and notes on the rest."""

    slo: Slo | None
    notes: CodedNotes


class PlannedClasses(NamedTuple):
    """The request classes, each with the SLO that it is judged by, and notes."""

    classes: tuple[ClassPlan, ...]
    notes: CodedNotes


def create_manifest(plan: Plan, requested: Workload, starts: Sequence[UserStart]) -> RunManifest:
    """Return the manifest of a run before it starts.

    `requested` is the workload before the start of its virtual users was decided, and `starts` says
    for each stage of the plan how its virtual users start.
    """
    job = plan.job
    settings = job.settings
    workload = job.workload
    slo = select_judgeable_terms(workload.slo, settings)
    classes = plan_classes(workload, settings)
    has_common_slo = all(class_plan.slo == slo.slo for class_plan in classes.classes)
    complete_plan = msgspec.structs.replace(plan, schedule=complete_schedule(plan.schedule))
    targets = _targets(job)
    coded = coded_notes(complete_plan, targets[0])
    slo_notes = slo.notes | classes.notes
    requests_of_classes = requests_by_class(workload.requests).values()

    return RunManifest(
        run=job.run_id,
        started=host_facts.current_time(),
        version=host_facts.loadgen_version(),
        plugins=tuple(PluginUsed(**used._asdict()) for used in plugins.used_plugins()),
        command=settings.command,
        workload=workload.name,
        source_text=workload.source_text,
        source_sha256=hashlib.sha256(workload.source_text.encode()).hexdigest(),
        seed=job.seed,
        schedule_seed=workload.schedule_seed,
        salt=job.salt,
        new_prompts=workload.seed is None or workload.salt == seeds.FRESH,
        targets=targets,
        metadata=dict(settings.metadata),
        api=settings.api,
        stream=settings.stream,
        slo=slo.slo if has_common_slo else None,
        classes=classes.classes,
        steps=tuple(_step_plans(workload, settings)),
        limits=ValidityLimits(**dict(iter(workload.limits))),
        stages=tuple(
            create_stage_plan(workload, plan.schedule, index, start)
            for index, start in enumerate(starts)
        ),
        fingerprints=_fingerprints(complete_plan, requested),
        rtt_ms=statistics.median(result.rtt_ms for result in job.probe_results),
        dns_ms=_longest_dns_ms(job.probe_results),
        tokenizer=plan.tokenizer.name,
        tokenizer_tag=plan.tokenizer.tag,
        tokenizer_sha256=plan.tokenizer.file_sha256,
        template_tokens=job.probe_results[0].template_tokens,
        requests_usage=not settings.returns_numbers,
        session_header=settings.session_header,
        slo_headers=settings.slo_headers,
        accepted_length=settings.accepted_length or workload.accepted_length,
        server_timing=settings.server_timing,
        percentiles=settings.percentiles,
        cache_reset=settings.reset_cache,
        chunks=_chunk_reuse(complete_plan),
        requested_cache_share=getattr(workload.requests, "cache", None),
        trace_cache_share=_reused_share_of_trace(complete_plan),
        random_words=any(_has_random_words(requests) for requests in requests_of_classes),
        prompt_lengths_requested=any(
            _has_requested_prompt_lengths(requests) for requests in requests_of_classes
        ),
        shares_prompts=any(_shares_prompts(requests) for requests in requests_of_classes),
        max_in_flight=workload.max_in_flight,
        max_in_prefill=workload.max_in_prefill,
        grace_s=workload.drain_ns / 1e9,
        timeout_s=workload.timeout_ns / 1e9,
        stall_timeout_s=workload.stall_timeout_ns / 1e9,
        turns_per_session=plan.schedule.max_turns,
        workers=settings.workers,
        # The nodes of a cluster report their hot path at the end of the run.
        host=host_facts.read_host_facts("" if settings.ray else settings.hot_path),
        warnings=(*dict.fromkeys(plan_notes(complete_plan, coded)), *slo_notes),
        warning_codes=coded | slo_notes,
        shard=_shard_part(complete_plan, starts),
    )


def add_notes(manifest: RunManifest, notes: CodedNotes) -> RunManifest:
    """Return a manifest with more notes, as sentences and as codes."""
    return msgspec.structs.replace(
        manifest,
        warnings=(*manifest.warnings, *notes),
        warning_codes={**manifest.warning_codes, **notes},
    )


def add_warnings(manifest: RunManifest, sentences: Iterable[str]) -> RunManifest:
    """Return a manifest with more warnings that have no code."""
    return msgspec.structs.replace(manifest, warnings=(*manifest.warnings, *sentences))


def select_judgeable_terms(slo: Slo | None, settings: Settings) -> JudgeableSlo:
    """Return the terms of an SLO whose metrics these responses have, and a note on the others.

    A term is a limit of one metric, such as "p95 of TTFT at most 500 ms". A response that is not
    streamed arrives at once, so it has no times of single tokens. One that consists of numbers,
    such as an embedding, has no tokens at all. If nothing of the SLO can be judged, the SLO of the
    result is None.
    """
    if slo is None or settings.stream:
        return JudgeableSlo(slo, notes={})

    judgeable_terms = tuple(term for term in slo.terms if _can_judge(term, settings))
    unjudged_terms = [term for term in slo.terms if term not in judgeable_terms]

    # An SLO can also limit the share of good requests and the duration of tasks. Its objective of
    # token deadlines stays too, and the summary says that there is no index without a stream.
    judgeable_slo = msgspec.structs.replace(
        slo, terms=judgeable_terms, fluidity=state_token_deadlines(slo)
    )
    is_empty = judgeable_slo == Slo()
    return JudgeableSlo(
        slo=None if is_empty else judgeable_slo,
        notes=_unjudged_note(unjudged_terms, settings),
    )


def _unjudged_note(terms: Sequence[Term], settings: Settings) -> CodedNotes:
    """Return a note on the terms of an SLO that cannot be judged, or nothing if there are none.

    A term limits one metric. The note says which metrics these are, and whether responses have no
    tokens or are not streamed.
    """
    if not terms:
        return {}
    reason = "no_tokens" if settings.returns_numbers else "no_stream"
    metrics = [term.metric for term in terms]
    values = {"metrics": metrics, "because": reason, "api": settings.api}
    return reasons.make_note("not_judged", values)


def _can_judge(term: Term, settings: Settings) -> bool:
    """Return True if responses that are not streamed have what the metric of a term needs."""
    needed_parts = response_parts_needed_for(term.metric)
    if settings.returns_numbers:
        return not needed_parts
    return needed_parts not in ("stream", "tokens")


def plan_classes(workload: Workload, settings: Settings) -> PlannedClasses:
    """Return what the manifest records of each request class of a mix, and notes on their SLOs.

    A class has the SLO by which its requests will be judged: its own or else that of the workload,
    without the terms that cannot be judged (see `select_judgeable_terms`). A workload that is not a
    mix has no classes.
    """
    if not isinstance(workload.requests, Mix):
        return PlannedClasses((), {})

    classes = []
    notes: CodedNotes = {}
    for name, request_class in workload.requests.classes.items():
        judgeable = select_judgeable_terms(request_class.slo or workload.slo, settings)
        notes |= judgeable.notes
        class_plan = ClassPlan(
            name=name,
            share=float(request_class.weight),
            slo=judgeable.slo,
            model=request_class.model,
            priority=request_class.priority,
            tenant=request_class.tenant,
        )
        classes.append(class_plan)

    return PlannedClasses(tuple(classes), notes)


def _fingerprints(complete_plan: Plan, requested: Workload) -> Fingerprints:
    """Return the hashes by which two results are recognised as being of the same workload.

    `recipe` is a hash of the description of the workload, `work` of the part of it that decides
    which requests are sent, and `schedule` of the times at which they are sent. The first two also
    cover who counts tokens: the server, or else the tokenizer of loadgen.

    The same workload must have equal hashes on two targets. Before a run, the start of its virtual
    users is adapted to the response time of the target, so the hashes are computed without that.

    Args:
        complete_plan: The plan with the schedule of all shards.
        requested: The workload before it was adapted to the target.
    """
    job = complete_plan.job
    tokenizer = complete_plan.tokenizer
    token_source = "server" if _all_report_usage(job) else tokenizer.tag
    is_adapted_to_target = requested.stages != job.workload.stages

    requested_schedule = complete_plan.schedule
    if is_adapted_to_target:
        requested_schedule = build_schedule(requested, job.seed)

    return Fingerprints(
        recipe=recipe_fingerprint(requested, token_source, tokenizer.file_sha256),
        work=work_fingerprint(requested, token_source, tokenizer.file_sha256),
        schedule=schedule_fingerprint(requested_schedule),
    )


def _all_report_usage(job: Job) -> bool:
    """Return True if all targets of the API of the run report token counts."""
    return all(
        result.reports_usage
        for result in job.probe_results
        if result.target.api == job.settings.api
    )


def _longest_dns_ms(probe_results: Sequence[ProbeResult]) -> float | None:
    """Return the longest time of a name lookup, or None if no name was looked up."""
    times_ms = [result.dns_ms for result in probe_results if result.dns_ms is not None]
    return max(times_ms, default=None)


def _shard_part(complete_plan: Plan, starts: Sequence[UserStart]) -> ShardPart | None:
    """Return what the manifest of a shard records of the complete run, for `loadgen merge`.

    Return None for a run that was not divided into shards. `starts` says for each stage how its
    virtual users start.
    """
    job = complete_plan.job
    shard = job.settings.shard
    if shard is None:
        return None

    return ShardPart(
        index=shard.index,
        count=shard.count,
        start_at=shard.start_at,
        stages=tuple(
            create_stage_plan(job.workload, complete_plan.schedule, index, start)
            for index, start in enumerate(starts)
        ),
    )


def _chunk_reuse(plan: Plan) -> ChunkReuse | None:
    """Return how often the first requests repeat chunks, or None if prompts have no chunks.

    Chunks are passages that prompts share, as with retrieval-augmented generation. Two fractions of
    the chunks are measured: those that an earlier prompt contains at any place (`reused_share`),
    and those that a prefix cache can reuse, because all chunks before them are also the same
    (`leading_share`). About _SAMPLED_CHUNKS chunks are examined.
    """
    prompts = plan.requests
    if not isinstance(prompts, SyntheticPrompts):
        return None

    chunks_per_request = max(len(prompts.chunks_of(request_id=0)), 1)
    sampled_requests = _SAMPLED_CHUNKS // chunks_per_request

    request_count = plan.schedule.slot_count
    if request_count is not None:
        sampled_requests = min(sampled_requests, request_count)

    reuse = prompts.measure_chunk_reuse(sampled_requests)
    if reuse is None:
        return None

    return ChunkReuse(
        requests=sampled_requests,
        reused_share=reuse.anywhere,
        leading_share=reuse.after_same_chunks,
    )


def _reused_share_of_trace(plan: Plan) -> float | None:
    """Return the fraction of a trace's prompt tokens that an unlimited prefix cache would contain.

    A trace is a recording of real requests that the run replays. With `replay: instants`, it sends
    the requests at their recorded times, so the first rows of the trace are sent, and only these
    are considered. Otherwise it sends session by session. The order then depends on the responses,
    so the complete trace is considered. Return None for requests that do not come from a trace.
    """
    workload_requests = plan.job.workload.requests
    if not isinstance(workload_requests, FromTrace):
        return None

    # Runs without a trace do not need this module.
    from loadgen.core.requests.trace_prompts import TracePrompts

    prompts = plan.requests
    assert isinstance(prompts, TracePrompts)  # These are the prompts of `FromTrace`.
    sends_at_recorded_times = workload_requests.replay == "instants"
    considered_rows = plan.schedule.slot_count if sends_at_recorded_times else None

    return prompts.trace.reused_share(considered_rows)


def _targets(job: Job) -> tuple[TargetFacts, ...]:
    """Return what is known of each target of a run, from the user and from the probe."""
    return tuple(
        TargetFacts(
            url=result.target.redacted,
            server=result.server,
            model=result.model,
            gpus=endpoint.gpus,
            shape=endpoint.shape,
            region=endpoint.region,
            node=endpoint.node,
            name=_target_name(job, result, endpoint),
            simulated=job.simulated or result.simulated,
            version=result.version,
            engine=result.engine,
            precision=result.precision,
            serves=endpoint.serves,
        )
        for result, endpoint in zip(job.probe_results, job.settings.endpoints, strict=True)
    )


def _target_name(job: Job, result: ProbeResult, endpoint: Endpoint) -> str:
    """Return the name of a target, or an empty string if it has none."""
    if job.known is not None and not endpoint.serves:
        return job.known.name
    if endpoint.name:
        return endpoint.name
    return "simulation" if result.simulated else ""


def _step_plans(workload: Workload, settings: Settings) -> Iterator[StepPlan]:
    """Yield the descriptions of task steps for the manifest, so that results can be split by step.

    A task is a graph of requests, each of which belongs to a step with a name, such as "search".
    The requests of a task are numbered, and a record has only this number, its turn. So results can
    be split only if the same turn always belongs to the same step. That is not so if a step is
    repeated a random number of times. With a single step there is nothing to split.
    """
    for class_name, requests in requests_by_class(workload.requests).items():
        if not isinstance(requests, Task):
            continue
        has_several_steps = len(requests.steps) > 1
        has_same_turns_in_every_task = requests.has_fixed_turns
        if has_several_steps and has_same_turns_in_every_task:
            yield from _step_plans_of_class(class_name, requests, settings)


def _step_plans_of_class(class_name: str, task: Task, settings: Settings) -> Iterator[StepPlan]:
    """Yield what the manifest records of each step of a class of tasks.

    All tasks of the class must have the same graph, so that a step has the same turns (requests) in
    each of them.
    """
    # The seed and the index of a task do not matter, because the graphs of all tasks are equal.
    graphs = TaskGraphs(task, seed=0)
    nodes_of_any_task = graphs[0]
    for step_name, step in task.steps.items():
        # A step can occur several times in a task, for example in a loop.
        turns = tuple(turn for turn, node in enumerate(nodes_of_any_task) if node.step == step_name)
        yield StepPlan(
            name=step_name,
            of_class=class_name,
            kind=step.kind,
            targets=_targets_of_step(settings, class_name, step_name),
            model=step.model,
            pause=", ".join(_pauses_before(step)),
            turns=turns,
            after=tuple(nodes_of_any_task[turn].predecessors for turn in turns),
        )


def _targets_of_step(settings: Settings, class_name: str, step_name: str) -> tuple[int, ...]:
    """Return the numbers of the targets that serve a step."""
    all_targets = tuple(range(len(settings.endpoints)))
    return settings.step_targets.get((class_name, step_name), all_targets)


def _pauses_before(step: TaskStep) -> list[str]:
    """Return what a step waits for besides other steps: its tools and the time to think."""
    pauses = list(step.tool or ())
    if step.think_time != type(step).model_fields["think_time"].default:
        pauses.append("thinking")
    return pauses


def _has_requested_prompt_lengths(requests: Requests) -> bool:
    """Return True if the prompts are generated to a requested length, not read from a file."""
    return not isinstance(requests, FromFile | Trajectories)


def _has_random_words(requests: Requests) -> bool:
    """Return True if the prompts are generated from random words, not from a natural text."""
    if isinstance(requests, Synthetic):
        return requests.prompts == "random"
    return not isinstance(requests, FromFile | Trajectories)


def _shares_prompts(requests: Requests) -> bool:
    """Return True if a request may begin with the same text as another request.

    Only such requests can profit from a prefix cache. Files, traces and tasks may contain anything.
    Generated prompts share a beginning only if one of their options creates it.
    """
    if not isinstance(requests, Synthetic):
        return True
    return bool(
        requests.turns
        or requests.shared_prefix_tokens
        or requests.system_tokens
        or requests.cache
        or requests.chunks
    )
