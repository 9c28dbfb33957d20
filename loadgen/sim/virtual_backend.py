"""Run a workload in virtual time, against simulated replicas in memory.

Workload, schedule and dispatcher are those of a run over HTTP. There is no socket, no task per
request and no event per token. The result is an ordinary run directory, which names its target as
*simulated*.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import msgspec
import numpy as np
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.transport.target import Target
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES
from numpy.typing import NDArray

from loadgen.backends import after_scheme
from loadgen.core.errors import UserError
from loadgen.core.execution.context import Context, KnownTarget
from loadgen.core.execution.events import (
    Emit,
    InterimCheck,
    RunPlanned,
    Simulated,
    SimulationStarted,
)
from loadgen.core.execution.host_facts import current_time
from loadgen.core.execution.plan import Plan, PreparationContext, Settings, prepare_plan
from loadgen.core.execution.plan_checks import check_plan
from loadgen.core.execution.run_manifest import add_notes, create_manifest
from loadgen.core.execution.self_sampling import peak_memory_bytes
from loadgen.core.execution.staggered_start import ResponseTime
from loadgen.core.metrics import reasons
from loadgen.core.metrics.answer_warnings import add_answer_scores
from loadgen.core.metrics.stop_rules import CHECK_INTERVAL_NS, StopRuleMonitor
from loadgen.core.metrics.summary import Summary, dump_summary
from loadgen.core.requests import digest, resonance
from loadgen.core.requests.question_prompts import create_question_finder, list_known_answers
from loadgen.core.results import checksums, store
from loadgen.core.results.answer_files import AnswerOutcomes, score_responses
from loadgen.core.results.manifest import ReasonCode, RunManifest, WorkerSample
from loadgen.core.run_summary import summarize
from loadgen.core.schedule.schedule import Schedule
from loadgen.core.workload import Workload
from loadgen.core.workload.known_answers import KnownAnswer
from loadgen.sim.engine.system import SimulatedSystem
from loadgen.sim.event_gaps import iterate_gaps
from loadgen.sim.load_bounds import UNBOUNDED, LoadBounds
from loadgen.sim.presets.preset import Preset, load_preset
from loadgen.sim.record_columns import as_record_array
from loadgen.sim.request_lengths import RequestSizer, create_request_sizer
from loadgen.sim.simulation import Simulation
from loadgen.sim.virtual_records import (
    ERROR_TEXTS,
    RecordOptions,
    VirtualRecords,
    build_records,
    build_whole_response_columns,
)
from loadgen.sim.virtual_run_files import (
    RunContents,
    build_replica_count_samples,
    build_timestamp_uncertainties,
    write_run,
)


def simulate(
    schedule: Schedule,
    request_sizer: RequestSizer,
    system: SimulatedSystem,
    bounds: LoadBounds = UNBOUNDED,
    *,
    source: str = "estimate",
    checks: Sequence[InterimCheck] = (),
    is_streamed: bool = True,
    keep_events: bool = False,
) -> tuple[VirtualRecords, Simulation]:
    """Simulate a schedule in virtual time.

    Args:
        schedule: When requests start.
        request_sizer: The lengths of the requests.
        system: The simulated servers.
        bounds: The limits of the load.
        source: Where the prompt token counts come from, a name of `record.SOURCE`.
        checks: Interim checks of the requests that have ended, each of which may end the load.
        is_streamed: Whether the client gets responses token by token, not as a whole.
        keep_events: Whether the single output events are kept.

    Returns:
        What was recorded, and the simulation after its end.
    """
    if not is_streamed:
        checks = [_check_whole_responses(check) for check in checks]

    simulation = Simulation(
        schedule,
        request_sizer,
        system.create_replicas(),
        system.create_router(),
        bounds,
        checks=checks,
        changes=system.changes,
    )
    with _without_garbage_collection():
        simulation.run()

    options = RecordOptions(
        tokens_per_event=system.tokens_per_event,
        source=source,
        reports_cached_tokens=system.limits.block_reuse,
        is_streamed=is_streamed,
        keep_events=keep_events,
    )
    results = build_records(simulation.requests, simulation.iteration_ends_ns, schedule, options)
    return results, simulation


def _check_whole_responses(check: InterimCheck) -> InterimCheck:
    """Return the interim check of responses that are not streamed, which come as a whole."""

    def ends(now_ns: int, records: NDArray[np.void]) -> bool:
        for name, column in build_whole_response_columns(records).items():
            records[name] = column
        return check.ends(now_ns, records)

    return InterimCheck(check.every_ns, ends)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector within a `with` block.

    A simulation creates no reference cycles, and the collector would scan its hundreds of thousands
    of requests again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run(workload: Workload, settings: Settings, run_dir: Path, emit: Emit) -> Summary:
    """Carry out one simulated run, write its files to a directory, and return its summary.

    The run has three steps: it is planned, its load is simulated, and its results are written. A
    prompt has exactly the tokens that the workload requests, because the chat template adds none.
    The client and the network take no time.

    Args:
        workload: What is sent, and when.
        settings: The options of the run, such as its target.
        run_dir: The directory of the run.
        emit: Notifies the listeners of the run about each step.

    Raises:
        LoadgenError: The run is not possible.
        CombinedError: The run is not possible for several reasons.
    """
    _check_supported(settings)
    preset = load_target_preset(settings)
    start_cpu_s = process_time()
    plan, planned_manifest = _plan_run(workload, settings, preset, run_dir)
    emit(RunPlanned(plan, planned_manifest))

    load = _simulate_load(plan, preset, emit)
    used_cpu_s = process_time() - start_cpu_s

    known_answers = list_known_answers(plan.requests)
    contents = RunContents(
        run_manifest=_complete_manifest(planned_manifest, preset, load, plan),
        results=load.results,
        worker_samples=[_measure_worker(load, used_cpu_s)],
        replica_counts=build_replica_count_samples(preset),
        known_answers=known_answers,
        answer_outcomes=_check_answers(plan, preset, load.results, known_answers),
    )
    return _write_results(run_dir, contents)


def _check_answers(
    plan: Plan, preset: Preset, results: VirtualRecords, known_answers: Sequence[KnownAnswer]
) -> AnswerOutcomes:
    """Return the outcome of the check of each response to a question with a known answer.

    The responses are those of a simulated model, which are right unless the preset has defects.
    """
    find_question = create_question_finder(plan.requests)
    if find_question is None:
        return AnswerOutcomes([], [])

    # Runs without known answers do not need this module.
    from loadgen.sim.simulated_answers import AnswerDefects, simulate_responses

    defects = AnswerDefects() if preset.answers is None else preset.answers.defects
    records = as_record_array(results.records)
    responses = simulate_responses(known_answers, find_question, records, defects)
    return score_responses(known_answers, responses)


def _write_results(run_dir: Path, contents: RunContents) -> Summary:
    """Write the files of a run to its directory, and return its summary.

    These are the same files as for a run over HTTP. Their checksums are written last.
    """
    summary = _summarize_run(contents)
    write_run(run_dir, contents)
    store.replace(run_dir / "summary.json", dump_summary(summary))
    checksums.write(run_dir)
    return summary


def _summarize_run(contents: RunContents) -> Summary:
    """Return the summary (the metrics) of a run from the contents of its files."""
    results = contents.results
    summary = summarize(
        contents.run_manifest,
        as_record_array(results.records),
        gaps=results.gaps,
        timeline=results.timeline,
        worker_samples=contents.worker_samples,
        texts=ERROR_TEXTS,  # which the field `text` of a record is an index of
        event_errors=build_timestamp_uncertainties(results),
        # The only metric of a simulated server is how many replicas it has.
        server_samples=contents.replica_counts,
        request_gaps=None if results.events is None else iterate_gaps(results.events),
    )
    if not contents.known_answers:
        return summary
    records = as_record_array(results.records)
    return add_answer_scores(
        summary, contents.run_manifest, records, contents.answer_outcomes.scored
    )


def _plan_run(
    workload: Workload, settings: Settings, preset: Preset, run_dir: Path
) -> tuple[Plan, RunManifest]:
    """Return the plan of a run, and its manifest: the description of the run, before its start.

    The plan is created as for a run over HTTP, which first sends a request (a probe) to its target.
    There is nothing to probe here, so the result of the probe is derived from the preset.

    Raises:
        CombinedError: The plan has errors, so the run is not possible.
    """
    settings = msgspec.structs.replace(settings, workers=1)  # a simulation is one process

    # Virtual users start one after the other, within about the time of a response.
    response_time = ResponseTime(preset.response_ns, "preset")
    context = PreparationContext(
        folder=run_dir,
        simulated=True,
        known=describe_target(settings),
        response_time=response_time,
    )
    probe_results = (_create_probe_result(preset, settings),)
    plan, starts_of_virtual_users = prepare_plan(workload, settings, probe_results, context)
    check_plan(plan, is_local=True)

    run_manifest = create_manifest(plan, workload, starts_of_virtual_users)
    return plan, _describe_target_in_manifest(run_manifest, preset, settings)


@dataclass(frozen=True)
class _SimulatedLoad:
    """A simulated load and why it ended.

    Attributes:
        results: What was recorded.
        simulation: The simulation after its end.
        broken_rule: The rule of `--stop-when` that ended the load, if one did.
        is_ended_early: Whether an interim check or a listener ended the load early.
    """

    results: VirtualRecords
    simulation: Simulation
    broken_rule: ReasonCode | None
    is_ended_early: bool


def _simulate_load(plan: Plan, preset: Preset, emit: Emit) -> _SimulatedLoad:
    """Simulate the load of a plan, which may end early.

    The load can end early in two ways:

    - An interim check runs during the simulation, every few seconds of virtual time, and ends it.
    - A listener gets all records after the simulation, and finds a time at which the load should
      have stopped. Then the load is simulated again, with the stop at that time and without checks.
    """
    workload = plan.job.workload
    bounds = _create_load_bounds(workload)
    stop_rules = StopRuleMonitor(workload.stop_when)
    checks = _collect_checks(plan, stop_rules, emit)

    results, simulation = _simulate_plan(plan, preset, bounds, checks)
    requested_stops_ns = _emit_results(results, emit)
    if requested_stops_ns:
        shorter_bounds = msgspec.structs.replace(bounds, stop_ns=min(requested_stops_ns))
        results, simulation = _simulate_plan(plan, preset, shorter_bounds, checks=[])
        _emit_results(results, emit)

    is_ended_early = simulation.is_ended_by_check or bool(requested_stops_ns)
    return _SimulatedLoad(results, simulation, stop_rules.breach, is_ended_early)


def _collect_checks(plan: Plan, stop_rules: StopRuleMonitor, emit: Emit) -> list[InterimCheck]:
    """Return the interim checks of a load: those of event listeners, and one for `--stop-when`.

    The event `SimulationStarted` has a list, to which its listeners append their checks.
    """
    started = SimulationStarted(checks=[])
    emit(started)
    checks = started.checks
    if plan.job.workload.stop_when:
        checks.append(_create_stop_rule_check(stop_rules, plan.schedule.horizon_ns))
    return checks


def _emit_results(results: VirtualRecords, emit: Emit) -> list[int]:
    """Emit the event `Simulated`, and return the times in ns at which listeners want to stop.

    The event has a list, to which its listeners append these times.
    """
    requested_stops_ns: list[int] = []
    emit(Simulated(as_record_array(results.records), requested_stops_ns))
    return requested_stops_ns


def _simulate_plan(
    plan: Plan, preset: Preset, bounds: LoadBounds, checks: Sequence[InterimCheck]
) -> tuple[VirtualRecords, Simulation]:
    """Simulate the schedule of a plan once. Return what was recorded, and the ended simulation.

    Args:
        plan: The requests, and the schedule of when they are sent.
        preset: The simulated server.
        bounds: How many requests may be in flight, and when the load ends.
        checks: Checks of the ended requests at fixed intervals, each of which may end the load.
    """
    workload = plan.job.workload
    settings = plan.job.settings

    server = preset.server
    has_prefix_cache = server.block_reuse
    request_sizer = create_request_sizer(
        workload.requests,
        plan.requests,
        tokens_per_block=server.tokens_per_block if has_prefix_cache else 0,
        # APIs such as embeddings and rerank return numbers instead of generated tokens.
        is_non_generative=settings.returns_numbers,
    )

    stores_gaps = settings.keep == "gaps"  # each gap between two events, from the option --keep
    return simulate(
        plan.schedule,
        request_sizer,
        preset.system,
        bounds,
        source=plan.tokenizer.tag,  # "tokenizer" or "estimate": how the client counts tokens
        checks=checks,
        is_streamed=settings.stream,
        keep_events=stores_gaps,
    )


def _create_stop_rule_check(monitor: StopRuleMonitor, horizon_ns: int | None) -> InterimCheck:
    """Return an interim check that ends the load when a rule of `--stop-when` is broken.

    After `horizon_ns` the schedule starts no more requests. Then the check never ends the load,
    because there is nothing left to stop. Without a horizon it goes on until the end.
    """

    def should_stop(now_ns: int, ended_records: NDArray[np.void]) -> bool:
        if horizon_ns is not None and now_ns >= horizon_ns:
            return False
        return monitor.check(now_ns, ended_records)

    return InterimCheck(CHECK_INTERVAL_NS, should_stop)


def _create_load_bounds(workload: Workload) -> LoadBounds:
    """Return the limits of the load that a workload specifies."""
    return LoadBounds(
        max_in_flight=workload.max_in_flight,
        max_in_prefill=workload.max_in_prefill,
        timeout_ns=workload.timeout_ns,
        drain_ns=workload.drain_ns,
    )


def _check_supported(settings: Settings) -> None:
    """Raise UserError if a run in virtual time does not support the settings."""
    if settings.ray is not None:
        problem = f"{settings.url} runs in virtual time in one process"
        raise UserError("unsupported", problem, "--ray", "remove --ray")
    if len(settings.endpoints) > 1:
        problem = "a run in virtual time can have only one target"
        raise UserError("unsupported", problem, f"--url {settings.url}", "remove the others")


def describe_target(settings: Settings) -> KnownTarget:
    """Return what is known of a simulated target from its preset, without a request.

    Raises:
        UserError: The preset does not exist or cannot be read.
        CombinedError: There are errors in the file of the preset.
    """
    preset = load_target_preset(settings)
    return KnownTarget(
        name=f"simulated: {preset.name}",
        description=preset.description,
        context=Context(preset.model.name, preset.limits.max_seq_len),
        notes=preset.notes,
        virtual_url=settings.url or "",
        gpus=preset.gpus,
        identity=preset.identity,
        provisioned_kw=preset.provisioned_kw,
    )


def load_target_preset(settings: Settings) -> Preset:
    """Return the preset that the URL of a target names. Raises UserError or CombinedError."""
    return load_preset(after_scheme(settings.url), "--url sim:")


def _create_probe_result(preset: Preset, settings: Settings) -> ProbeResult:
    """Return what a probe of the simulated server would find out, without a request.

    Over HTTP, a run begins with a probe of its target, and its plan and its manifest use the
    result. A simulated server is described as a trtllm-serve to which the network has no delay. It
    counts tokens exactly as the workload does: the chat template adds none (`template_tokens`), and
    both counts are equal (`token_ratio`).
    """
    return ProbeResult(
        target=Target.parse("http://simulated", api=settings.api),
        server="trtllm",
        server_profile=SERVER_PROFILES["trtllm"],
        model=settings.model or preset.model.name,
        models=(preset.model.name,),
        version="",
        evidence=("it is simulated",),
        rtt_ms=0.0,
        template_tokens=0,
        token_ratio=1.0,
        reports_usage=not settings.returns_numbers,
        has_exact_length=True,
        tokens_per_event=float(preset.server.stream_interval),
        warnings=(),
        engine="simulated",
        precision=preset.precision,
        max_context=preset.limits.max_seq_len,
        reports_server_timing=True,
    )


def _describe_target_in_manifest(
    run_manifest: RunManifest, preset: Preset, settings: Settings
) -> RunManifest:
    """Return the manifest of a run whose only target is simulated, with a note that says so.

    Nothing is sent, so the target has no URL, and there is no round-trip time. The note comes
    before all other warnings. A manifest has each warning twice: as a sentence, and as a code with
    its values.
    """
    gpus = settings.gpus or preset.gpus
    target = msgspec.structs.replace(run_manifest.targets[0], url="", gpus=gpus)
    code_by_sentence = reasons.make_note("virtual_time", {"preset": preset.description})
    sentences = tuple(code_by_sentence.keys())

    return msgspec.structs.replace(
        run_manifest,
        targets=(target,),
        client="virtual",
        rtt_ms=None,
        warnings=(*sentences, *run_manifest.warnings),
        warning_codes={**code_by_sentence, **run_manifest.warning_codes},
    )


def _complete_manifest(
    planned_manifest: RunManifest, preset: Preset, load: _SimulatedLoad, plan: Plan
) -> RunManifest:
    """Return the manifest (the description of the run) as it is after the end of the run.

    It has all fields of the planned manifest. These are new: when and how the run ended, the rule
    that stopped it, notes about the load, and a fingerprint of the prompts, by which runs with
    equal prompts are recognized.
    """
    run_manifest = planned_manifest
    for code, values in _collect_notes(preset, load, plan).items():
        run_manifest = add_notes(run_manifest, reasons.make_note(code, values))

    fingerprints = msgspec.structs.replace(
        run_manifest.fingerprints,
        prompts=digest.fingerprint(plan.requests, count=None),
    )
    return msgspec.structs.replace(
        run_manifest,
        ended=current_time(),
        state=_find_state(load),
        stopped_by=load.broken_rule,
        fingerprints=fingerprints,
    )


def _find_state(load: _SimulatedLoad) -> str:
    """Return how a run has ended, as its manifest says it.

    It is `stopped` if a rule of `--stop-when` was broken, `decided` if an interim check or a
    listener has ended the load early, and `finished` otherwise.
    """
    if load.broken_rule is not None:
        return "stopped"
    if load.is_ended_early:
        return "decided"
    return "finished"


NoteValues = dict[str, Any]
"""The values in the text of a note, by the names of their placeholders."""


def _collect_notes(
    preset: Preset, load: _SimulatedLoad, plan: Plan
) -> dict[str, NoteValues | None]:
    """Return the values of the notes about a simulation, by the code of the note.

    There are three notes. One that does not apply has None, and is left out of the manifest.

    - `extrapolated`: the batches were smaller than those that the preset was fitted on
    - `paused`: requests were paused because the cache was full
    - `resonance`: the order of the requests and round-robin routing have a common period, so that
      replicas get different requests
    """
    return {
        "extrapolated": _find_extrapolation(preset, load.simulation),
        "paused": _find_pauses(load.simulation),
        "resonance": _find_resonance(preset, load, plan),
    }


def _find_extrapolation(preset: Preset, simulation: Simulation) -> NoteValues | None:
    """Return the values of the note about extrapolation, or None if there was none.

    A preset is fitted on measurements with a certain batch size and larger ones. The duration of an
    iteration with a smaller batch is extrapolated from them.
    """
    min_sequences = preset.valid_from_sequences.value
    mean_batch_size = _mean_batch_size(simulation)
    if mean_batch_size >= min_sequences:
        return None
    return {"sequences": mean_batch_size, "limit": min_sequences}


def _find_pauses(simulation: Simulation) -> NoteValues | None:
    """Return the values of the note about pauses, or None if no request was paused."""
    pause_count = sum(replica.pause_count for replica in simulation.replicas)
    return {"times": pause_count} if pause_count else None


def _find_resonance(preset: Preset, load: _SimulatedLoad, plan: Plan) -> NoteValues | None:
    """Return the values of the note about resonance, or None if there is none.

    Resonance means that the order of the requests and the order of the replicas have a common
    period, so that replicas get different requests. For example, if every second request is long,
    one of two replicas gets all long ones.
    """
    # Round-robin routing repeats after as many requests as there are replicas. No other routing has
    # a period that is short enough.
    if preset.routing != "round_robin":
        return None
    return resonance.find_resonance(
        plan.job.workload.requests,
        plan.requests,
        server_count=len(load.simulation.replicas),
        kind="replica",
        planned_requests=len(load.results.records),
    )


def _mean_batch_size(simulation: Simulation) -> float:
    """Return the mean number of decoding sequences of an iteration."""
    iterations = sum(map(len, simulation.iteration_ends_ns))
    if not iterations:
        return 0.0
    return sum(replica.decoded_tokens for replica in simulation.replicas) / iterations


def _measure_worker(load: _SimulatedLoad, cpu_s: float) -> WorkerSample:
    """Return the CPU time and the memory of the simulation, as a sample of its only worker.

    The single sample is taken at the end of the run, when every request has ended.

    Args:
        load: The simulated load.
        cpu_s: The CPU time of the simulation in seconds.
    """
    last_ends_ns = [int(ends[-1]) for ends in load.simulation.iteration_ends_ns if len(ends)]
    end_ns = max(last_ends_ns, default=0)
    request_count = len(load.results.records)

    return WorkerSample(
        t_s=end_ns / 1e9,
        # With a length of 0, the sample is not used to judge whether the client was too slow.
        span_s=0.0,
        cpu_s=round(cpu_s, 4),
        peak_rss_bytes=peak_memory_bytes(),
        sent=request_count,
        done=request_count,
    )
