"""The header of a run (`run.json`): its plan, its targets, this machine, and notes on what a reader should know.

Pure, except that it reads a few facts about this machine.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import socket
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from loadgen_sdk.installed import NOT_INSTALLED, version_of
from loadgen_sdk.probe.probe import ProbeResult

from loadgen import plugins
from loadgen.core import format, seeds
from loadgen.core.errors import LoadgenError
from loadgen.core.execution import backend, resource_limits
from loadgen.core.execution.context import too_long
from loadgen.core.execution.plan import Endpoint, Job, Plan, Settings
from loadgen.core.execution.staggered_start import Begin
from loadgen.core.limits import ValidityLimits
from loadgen.core.metrics import reasons
from loadgen.core.requests import lengths, resonance
from loadgen.core.requests import tokenizer as tokens
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.file_prompts import FilePrompts
from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.prompts import Prompts, PromptTarget
from loadgen.core.requests.synthetic_prompts import SyntheticPrompts
from loadgen.core.requests.task_graphs import TaskGraphs
from loadgen.core.results import manifest
from loadgen.core.schedule.build import build_schedule
from loadgen.core.schedule.forecast import Forecast, forecast_load, mean_tokens
from loadgen.core.schedule.schedule import Schedule, complete_schedule, schedule_fingerprint
from loadgen.core.slo import Slo, describe_slo
from loadgen.core.workload import (
    Closed,
    FromFile,
    FromTrace,
    Gamma,
    Mix,
    Ramp,
    Replay,
    Synthetic,
    Task,
    Workload,
    recipe_fingerprint,
    requests_by_class,
    work_fingerprint,
)
from loadgen.figures import needs

MOST_CHUNKS = 30_000  # drawn, to say how often chunks come again


def header(plan: Plan, asked: Workload, begins: Sequence[Begin]) -> manifest.RunManifest:
    """The header of a run before it starts. `asked`, `begins`: the workload as it was given, and how lanes begin."""
    job, schedule, tokenizer = plan.job, plan.schedule, plan.tokenizer
    settings, workload, found = job.settings, job.workload, job.found
    slo, unjudged = judged_slo(workload.slo, settings)
    classes, unjudged_of_classes = class_plans(workload, settings)
    unjudged |= unjudged_of_classes
    source = (
        "server"
        if all(result.reports_usage for result in found if result.target.api == settings.api)
        else tokenizer.tag
    )
    # how lanes begin by default is the target's doing: fingerprints are of what was asked
    whole_schedule = complete_schedule(schedule)
    whole_plan = msgspec.structs.replace(plan, schedule=whole_schedule)
    requested_schedule = (
        whole_schedule if asked.stages == workload.stages else build_schedule(asked, job.seed)
    )
    coded = (
        _resonant(whole_plan)
        | _undisclosed(plan)
        | _repeated_rows(whole_plan.requests, whole_schedule.slot_count)
    )
    return manifest.RunManifest(
        run=job.run_id,
        started=now(),
        version=version(),
        plugins=tuple(manifest.PluginUsed(**one._asdict()) for one in plugins.used_plugins()),
        command=settings.command,
        workload=workload.name,
        source_text=workload.source_text,
        source_sha256=hashlib.sha256(workload.source_text.encode()).hexdigest(),
        seed=job.seed,
        schedule_seed=workload.schedule_seed,
        salt=job.salt,
        new_prompts=workload.seed is None or workload.salt == seeds.FRESH,
        targets=_targets(plan),
        metadata=dict(settings.metadata),
        api=settings.api,
        stream=settings.stream,
        slo=None
        if any(one.slo != slo for one in classes)
        else slo,  # else each class has that, or its own
        classes=classes,
        steps=tuple(_steps(workload, settings)),
        limits=ValidityLimits(**dict(iter(workload.limits))),
        stages=tuple(_stage_plan(workload, schedule, i, begin) for i, begin in enumerate(begins)),
        fingerprints=manifest.Fingerprints(
            recipe=recipe_fingerprint(asked, source, tokenizer.file_sha256),
            work=work_fingerprint(asked, source, tokenizer.file_sha256),
            timetable=schedule_fingerprint(requested_schedule),
        ),
        rtt_ms=statistics.median(result.rtt_ms for result in found),
        dns_ms=max((result.dns_ms for result in found if result.dns_ms is not None), default=None),
        tokenizer=tokenizer.name,
        tokenizer_tag=tokenizer.tag,
        tokenizer_sha256=tokenizer.file_sha256,
        template_tokens=found[0].template_tokens,
        usage_asked=not settings.values,
        session_header=settings.session_header,
        slo_headers=settings.slo_headers,
        server_timing=settings.server_timing,
        percentiles=settings.percentiles,
        cache_reset=settings.reset_cache,
        chunks=_chunk_reuse(whole_plan),
        cache_asked=getattr(workload.requests, "cache", None),
        cache_bound=_cache_bound(whole_plan),
        random_words=any(map(_has_random_words, requests_by_class(workload.requests).values())),
        prompt_lengths_requested=any(
            map(_has_requested_prompt_lengths, requests_by_class(workload.requests).values())
        ),
        shares_prompts=any(map(_shares_prompts, requests_by_class(workload.requests).values())),
        max_in_flight=workload.max_in_flight,
        max_in_prefill=workload.max_in_prefill,
        grace_s=workload.drain_ns / 1e9,
        timeout_s=workload.timeout_ns / 1e9,
        stall_timeout_s=workload.stall_timeout_ns / 1e9,
        turns=schedule.max_turns,
        workers=settings.workers,
        host=_host("" if settings.ray else settings.hot_path),  # the nodes tell theirs at the end
        notes=(*dict.fromkeys(_notes(whole_plan, coded)), *unjudged),
        note_codes=coded | unjudged,
        shard=_shard_part(whole_plan, begins),
    )


def _shard_part(whole_plan: Plan, begins: Sequence[Begin]) -> manifest.ShardPart | None:
    """Return what the header of a part records of the whole run, or None for a run that is not divided."""
    shard = whole_plan.job.settings.shard
    if shard is None:
        return None
    workload = whole_plan.job.workload
    return manifest.ShardPart(
        index=shard.index,
        count=shard.count,
        start_at=shard.start_at,
        stages=tuple(
            _stage_plan(workload, whole_plan.schedule, i, begin) for i, begin in enumerate(begins)
        ),
    )


def _chunk_reuse(plan: Plan) -> manifest.ChunkReuse | None:
    if not isinstance(plan.requests, SyntheticPrompts):
        return None
    slots, most = plan.schedule.slot_count, MOST_CHUNKS // len(plan.requests.chunks_of(0) or (0,))
    requests = most if slots is None else min(slots, most)
    found = plan.requests.measure_chunk_reuse(requests)
    if found is None:
        return None
    return manifest.ChunkReuse(
        requests=requests, reused_share=found.anywhere, leading_share=found.after_same_chunks
    )


def _cache_bound(plan: Plan) -> float | None:
    asked, trace = plan.job.workload.requests, getattr(plan.requests, "trace", None)
    if trace is None or not isinstance(asked, FromTrace):
        return None
    slots = (
        plan.schedule.slot_count if asked.replay == "instants" else None
    )  # rows of sessions are sent by session
    found: float | None = trace.reused_share(slots)
    return found


def noted(
    header: manifest.RunManifest, words: dict[str, manifest.ReasonCode]
) -> manifest.RunManifest:
    """The header with more notes, in words and as codes."""
    return msgspec.structs.replace(
        header, notes=(*header.notes, *words), note_codes={**header.note_codes, **words}
    )


def now() -> str:
    """This instant, as headers write it."""
    return datetime.datetime.now(datetime.UTC).astimezone().isoformat(timespec="milliseconds")


def _target_name(job: Job, result: ProbeResult, endpoint: Endpoint) -> str:
    if job.known is not None and not endpoint.serves:
        return job.known.name
    return endpoint.name or ("simulation" if result.simulated else "")


def _steps(workload: Workload, settings: Settings) -> Iterator[manifest.StepPlan]:
    """The steps of tasks that all have the same requests."""
    places = settings.step_targets
    for of_class, part in requests_by_class(workload.requests).items():
        if not isinstance(part, Task) or not part.has_fixed_turns or len(part.steps) == 1:
            continue
        nodes = TaskGraphs(part, 0)[0]
        for name, step in part.steps.items():
            turns = tuple(turn for turn, node in enumerate(nodes) if node.step == name)
            thinking = (
                ["thinking"]
                if step.think_time != type(step).model_fields["think_time"].default
                else []
            )
            yield manifest.StepPlan(
                name=name,
                of_class=of_class,
                kind=step.kind,
                targets=places.get((of_class, name), tuple(range(len(settings.endpoints)))),
                model=step.model,
                pause=", ".join([*(step.tool or ()), *thinking]),
                turns=turns,
                after=tuple(nodes[turn].after for turn in turns),
            )


def _targets(plan: Plan) -> tuple[manifest.TargetFacts, ...]:
    job = plan.job
    return tuple(
        manifest.TargetFacts(
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
        for result, endpoint in zip(job.found, job.settings.endpoints, strict=True)
    )


def _notes(plan: Plan, coded: Iterable[str]) -> Iterator[str]:
    job, requests, schedule = plan.job, plan.requests, plan.schedule
    settings = job.settings
    yield from job.known.notes if job.known is not None else ()
    if not settings.tls.verify and any(result.target.tls for result in job.found):
        yield "the server's certificate was not verified (--insecure): whoever is on the way can read key and prompts"
    if plan.too_long is not None:
        yield f"{plan.too_long.words}; these will fail"
    yield from coded
    yield from _replaced(job.workload)
    yield from trace_notes(job.workload)
    yield from dict.fromkeys(note for result in job.found for note in result.warnings)
    yield from requests.warnings(schedule.slot_count or 1000)


def trace_notes(workload: Workload) -> list[str]:
    """Return a note for each trace of a workload whose unit of time had to be decided."""
    replays: list[FromTrace | Replay] = [
        part
        for part in (workload.requests, *requests_by_class(workload.requests).values())
        if isinstance(part, FromTrace)
    ]
    replays += [stage.arrival for stage in workload.stages if isinstance(stage.arrival, Replay)]
    if not replays:
        return []
    # Runs without a trace do not need this module.
    from loadgen.core.workload.traces import read_replayed_trace

    notes = []
    for replay in replays:
        trace = read_replayed_trace(replay)
        if trace.time_unit:
            rate = format.quantity(trace.rate)
            notes.append(
                f"{trace.path.name}: times read as {trace.time_unit}: {rate} requests/s "
                "on average; --set trace_unit=s, ms, us or ns states the unit"
            )
    return list(dict.fromkeys(notes))


def _replaced(workload: Workload) -> Iterator[str]:
    """That a workload file has more stages than the load that was asked for on the command line."""
    if names := workload.replaced:
        yield f"one load of the command line in place of {len(names)} stages of the file: {', '.join(names)}"


def _resonant(plan: Plan) -> dict[str, manifest.ReasonCode]:
    """Where round robin over the targets keeps sending each the same part of a data set: that, in words and as code."""
    job, schedule = plan.job, plan.schedule
    if job.settings.route not in ("auto", "round-robin") or schedule.max_turns > 1:
        return {}
    targets = len(job.settings.endpoints)
    found = resonance.find_resonance(
        job.workload.requests, plan.requests, targets, "target", schedule.slot_count
    )
    return reasons.make_note("resonance", found)


def _undisclosed(plan: Plan) -> dict[str, manifest.ReasonCode]:
    """What a description of the system under test leaves out, in words and as code; nothing without a description."""
    metadata = dict(plan.job.settings.metadata)
    if not any(key.startswith(format.SYSTEM) for key in metadata):
        return {}
    from loadgen.core.execution import system_file  # many models, for those who have such a file

    missing = system_file.missing(metadata, _targets(plan)[0])
    return reasons.make_note("undisclosed", {"missing": missing} if missing else None)


def _repeated_rows(prompts: Prompts, slots: int | None) -> dict[str, manifest.ReasonCode]:
    """Return a note for each file whose rows are sent more than once, as sentences and codes."""
    count = slots or 1000
    parts_of_load = [(prompts, 1.0)]
    if isinstance(prompts, MixPrompts):
        parts_of_load = list(zip(prompts.parts, prompts.shares, strict=True))
    notes: dict[str, manifest.ReasonCode] = {}
    for part, share in parts_of_load:
        requests = round(count * share)
        if isinstance(part, FilePrompts) and requests > len(part.rows):
            values = {"requests": requests, "rows": len(part.rows)}
            notes |= reasons.make_note("rows_repeated", values)
    return notes


def version() -> str:
    found = version_of("loadgen")
    return found if found != NOT_INSTALLED else "unknown"


def _host(hot_path: str) -> manifest.Host:
    """Facts about this machine; a fact that cannot be read keeps its empty value."""
    cpu, memory, clock = "", None, ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            cpu = next(
                (line.partition(":")[2].strip() for line in file if line.startswith("model name")),
                "",
            )
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        clock = (
            Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
            .read_text("utf-8")
            .strip()
        )
    except (OSError, ValueError):
        pass
    names = ("uvloop", "msgspec", "numpy", "tiktoken")
    return manifest.Host(
        name=socket.gethostname(),
        kernel=platform.release(),
        python=platform.python_version(),
        cpu=cpu,
        cpus=resource_limits.cpus(),
        memory_bytes=memory,
        clock=clock,
        versions={name: version_of(name) for name in names},
        hot_path=hot_path,
    )


def judged_slo(
    slo: Slo | None, settings: Settings
) -> tuple[Slo | None, dict[str, manifest.ReasonCode]]:
    """The SLO that can be judged, and notes. Terms that the answers of this API do not have are left out."""
    if slo is None or settings.stream:
        return slo, {}
    lacking = {term.metric for term in slo.terms if needs(term.metric) in ("stream", "tokens")}
    if settings.values:
        lacking = {term.metric for term in slo.terms if needs(term.metric)}
    judged_terms = tuple(term for term in slo.terms if term.metric not in lacking)
    skipped = [term.metric for term in slo.terms if term.metric in lacking]
    because = {"because": "no_tokens" if settings.values else "no_stream", "api": settings.api}
    notes = reasons.make_note("not_judged", {"metrics": skipped, **because} if skipped else None)
    judged_slo = Slo(terms=judged_terms, goodput_share=slo.goodput_share, task=slo.task)
    return (judged_slo if judged_slo != Slo() else None), notes


def class_plans(
    workload: Workload, settings: Settings
) -> tuple[tuple[manifest.ClassPlan, ...], dict[str, manifest.ReasonCode]]:
    """The classes of the requests with the SLO that each is judged by, and notes."""
    plans: list[manifest.ClassPlan] = []
    notes: dict[str, manifest.ReasonCode] = {}
    for name, one in (
        workload.requests.classes.items() if isinstance(workload.requests, Mix) else ()
    ):
        slo, unjudged = judged_slo(one.slo or workload.slo, settings)
        notes |= unjudged
        share = float(one.weight)
        facts = {field: getattr(one, field) for field in ("model", "priority", "tenant")}
        plans.append(manifest.ClassPlan(name=name, share=share, slo=slo, **facts))
    return tuple(plans), notes


def _has_requested_prompt_lengths(requests: Any) -> bool:
    """Return True if the prompts are generated to a requested length, not read from a file."""
    return not isinstance(requests, FromFile)


def _has_random_words(requests: Any) -> bool:
    """Return True if the prompts are generated from random words, not from a natural text."""
    is_random = getattr(requests, "prompts", "random") == "random"
    return _has_requested_prompt_lengths(requests) and is_random


def _shares_prompts(requests: Any) -> bool:
    if isinstance(requests, Task) or hasattr(requests, "path") or hasattr(requests, "trace"):
        return True
    return any(
        getattr(requests, name, None)
        for name in ("turns", "shared_prefix_tokens", "system_tokens", "cache", "chunks")
    )


def _stage_plan(
    workload: Workload, schedule: Schedule, index: int, begin: Begin | None = None
) -> manifest.StagePlan:
    span, stage = schedule.stages[index], workload.stages[index]
    law = stage.arrival
    if isinstance(law, Closed) and begin is not None and begin.source != "asked":
        law = law.model_copy(
            update={"ramp_ns": None}
        )  # what the workload says is equal for all servers
    rate = getattr(stage.arrival, "rate", None)
    slots = schedule.slot_count_of(span)
    chains = None if span.session_count is None else schedule.session_count_of(span)
    part = (
        ""
        if schedule.shard_count == 1
        else f"part {schedule.shard_index + 1} of {schedule.shard_count}: "
    )
    return manifest.StagePlan(
        name=span.name,
        arrival=part + words(law, workload.max_in_prefill),
        closed=bool(span.concurrency),
        measured=span.measured,
        start_ns=span.start_ns or 0,
        end_ns=None
        if span.length_ns is None or span.start_ns is None
        else span.start_ns + span.length_ns,
        slots=slots,
        rate=None if rate is None else rate / schedule.shard_count,
        concurrency=len(schedule.virtual_users_of(span)) or None,
        first_slot=span.first_session * span.max_turns,
        chains=None if slots is None or slots == (chains or 0) * span.max_turns else chains,
        ramp_s=None if begin is None or begin.ramp_ns is None else begin.ramp_ns / 1e9,
        ramp_from="" if begin is None else begin.source,
    )


def words(arrival: Any, in_prefill: int | None = None) -> str:
    """An arrival law as text, for example "poisson 10/s". `in_prefill`: the most requests there at once."""
    if in_prefill is not None:
        return f"{words(arrival)}, at most {in_prefill:,} in prefill"
    if isinstance(arrival, Closed):
        ramp = f", begun over {arrival.ramp_ns / 1e9:g} s" if arrival.ramp_ns else ""
        ramp = ", begun all at once" if arrival.ramp_ns == 0 else ramp
        return f"{arrival.concurrency} in flight (closed loop{ramp})"
    if isinstance(arrival, Ramp):
        return f"ramp {arrival.from_rate:g}/s to {arrival.to_rate:g}/s"
    if isinstance(arrival, Gamma):
        return f"gamma {arrival.rate:g}/s, burstiness {arrival.burstiness:g}"
    if isinstance(arrival, Replay):
        return f"trace {arrival.file.name}" + (
            f", {arrival.speed:g} times as fast" if arrival.speed != 1 else ""
        )
    return (
        "everything at once"
        if arrival.rate == float("inf")
        else f"{arrival.tag} {arrival.rate:g}/s"
    )


def bounds_of(
    stage: manifest.StagePlan, schedule: Schedule, index: int, workload: Workload
) -> list[str]:
    """How much a stage sends, and for how long: 1,077 conversations, 4,308 requests, 180 s."""
    bounds = [] if stage.slots is None else [format.counted(stage.slots, "request")]
    if schedule.max_turns > 1 and (chains := schedule.stages[index].session_count) is not None:
        of = workload.requests
        noun = (
            "task" if isinstance(of, Task) else "start" if isinstance(of, Mix) else "conversation"
        )
        bounds.insert(0, format.counted(chains, noun))
    if stage.end_ns is not None:
        bounds.append(f"{(stage.end_ns - stage.start_ns) / 1e9:g} s")
    return bounds


def _range(values: Iterable[int]) -> str:
    ordered = sorted(values)
    least, most = ordered[0], ordered[-1]
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _lengths_words(workload: Workload, requests: Prompts, count: int | None) -> Iterator[str]:
    """How long the first requests are, the tasks that they make, and the shares of classes."""
    first = lengths.first_request_lengths(requests, count)
    prompt_range = f"{_range(one.input_tokens for one in first.values())} prompt tokens"
    asked = [one.output_tokens for one in first.values()]
    answers = (
        f"{_range(asked)} asked for" if any(asked) else "answers as long as the server makes them"
    )
    contexts = lengths.context_lengths(first)
    largest = f", largest context {max(contexts):,}" if contexts else ""
    yield f"first {format.counted(len(first), 'request')}: {prompt_range}, {answers}{largest}"
    if tasks := lengths.task_lengths(requests, first):
        noun = "conversation" if isinstance(workload.requests, Synthetic) else "task"
        counts = [one.requests for one in tasks]
        mean = "" if min(counts) == max(counts) else f" ({statistics.fmean(counts):.1f} on average)"
        yield (
            f"a {noun}: {_range(counts)} requests{mean}, "
            f"{_range(one.input_tokens for one in tasks)} prompt and {_range(one.output_tokens for one in tasks)} "
            "output tokens"
        )
    if isinstance(requests, MixPrompts):
        for one in lengths.class_shares(requests, first):
            yield (
                f"class {one.name}: {format.percent(one.starts)} of all starts, {format.percent(one.requests)} of "
                f"these requests, {format.percent(one.tokens)} of their tokens"
            )


class Described(msgspec.Struct, frozen=True):
    """What a run would do, as text and as forecast; and why its target, where that is simulated here, refuses it."""

    text: str
    load: Forecast
    refused: LoadgenError | None


def slo_lines(slo: Slo | None, slo_of_class: Mapping[str, Slo | None]) -> list[str]:
    """Return the lines that tell which SLO a run is judged by, also of classes with their own."""
    lines = [f"SLO: {describe_slo(slo) if slo is not None else 'none'}"]
    own = {name: one for name, one in slo_of_class.items() if one is not None and one != slo}
    if own and slo is None:
        lines = []
    return lines + [f"SLO of {name}: {describe_slo(one)}" for name, one in own.items()]


def slo_of_classes(workload: Workload) -> dict[str, Slo | None]:
    """Return the SLO of each class of a workload, by name; None for a class without its own."""
    classes = workload.requests.classes if isinstance(workload.requests, Mix) else {}
    return {name: one.slo for name, one in classes.items()}


def describe(workload: Workload, settings: Settings) -> Described:
    """What a run would do: load, request sizes, fingerprints. Does not use the network."""
    seed = workload.seed if workload.seed is not None else seeds.fresh()
    schedule = build_schedule(workload, seed)
    salt = seeds.salt_of(seed, workload.salt)
    tokenizer = tokens.load_tokenizer(settings.tokenizer)
    requests = build_prompts(
        workload, seed, seeds.salt_number(salt), tokenizer, PromptTarget(api=settings.api)
    )
    lines = [
        f"workload: {workload.name}",
        f"target: {settings.shown}",
        f"repeat with {seeds.words(seed, salt)}",
    ]
    for index in range(len(schedule.stages)):
        stage = _stage_plan(workload, schedule, index)
        bounds = bounds_of(stage, schedule, index, workload)
        lines.append(
            f"load: {stage.arrival}: {', '.join(bounds)}{'' if stage.measured else ', warm-up, not measured'}"
        )
        law = workload.stages[index].arrival
        if isinstance(law, Closed) and law.ramp_ns is None and law.concurrency > 1:
            lines.append(
                "      starts staggered over one response time, which the probe of the target measures"
            )
    lines += slo_lines(workload.slo, slo_of_classes(workload))
    lines += _lengths_words(workload, requests, schedule.slot_count)
    load = forecast_load(schedule, mean_tokens(requests))
    lines.append(f"expected: about {load.text}")
    recipe = recipe_fingerprint(workload, "server", tokenizer.file_sha256)
    lines.append(f"recipe: {recipe}  timetable: {schedule_fingerprint(schedule)}")
    lines += [
        f"note: {note}"
        for note in (
            *_replaced(workload),
            *trace_notes(workload),
            *requests.warnings(schedule.slot_count or 1000),
            *_repeated_rows(requests, schedule.slot_count),
        )
    ]
    known = backend.known(settings)
    long = too_long(requests, schedule.slot_count, None if known is None else known.context)
    refused = None if long is None else long.refused(workload, settings.shown)
    lines += (
        [f"note: {long.words}; these will fail"] if long is not None and refused is None else []
    )
    return Described("\n".join(lines), load, refused)
