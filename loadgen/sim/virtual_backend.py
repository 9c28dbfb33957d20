"""Runs a workload in virtual time, against simulated replicas in memory.

Workload, schedule and dispatcher are those of a run over HTTP.

There is no socket, no task per request and no event per token; the only clock is a heap of
iteration ends. The result is an ordinary run folder that says *simulated* wherever it names its
target.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import resource
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, cast

import msgspec
import numpy as np
from loadgen_sdk.probe.probe import ProbeResult
from loadgen_sdk.transport.target import Target
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES
from numpy.typing import NDArray

from loadgen.backends import after_scheme
from loadgen.core.errors import UserError
from loadgen.core.execution import run_header
from loadgen.core.execution.context import Context, KnownTarget
from loadgen.core.execution.events import Emit, Look, RunPlanned, Simulated, SimulationStarted
from loadgen.core.execution.plan import Settings, prepare
from loadgen.core.execution.staggered_start import AnswerTime
from loadgen.core.metrics import reasons
from loadgen.core.metrics.stop_rules import CHECK_INTERVAL_NS, StopRuleMonitor
from loadgen.core.metrics.summary import Summary, dump_summary
from loadgen.core.requests import digest, resonance
from loadgen.core.requests.prompts import Prompts
from loadgen.core.results import checksums, store
from loadgen.core.results.manifest import RunManifest, WorkerSample
from loadgen.core.run_summary import summarize
from loadgen.core.schedule.schedule import Schedule
from loadgen.core.workload import Workload
from loadgen.sim import virtual_run_files
from loadgen.sim.engine.system import SimulatedSystem
from loadgen.sim.load_bounds import UNBOUNDED, LoadBounds
from loadgen.sim.presets.preset import Preset, load_preset
from loadgen.sim.request_lengths import Sizes, sizes_of
from loadgen.sim.simulation import Simulation
from loadgen.sim.virtual_records import VirtualRecords, build_records

TEXTS = (
    "not finished when its time was over",
    "the simulated server refuses a prompt of this length",
    "in flight when the drain ended (--grace)",
    "not finished when the drain after the stop ended",
    "its user went away in the middle of an answer",
    "its replica went away",
)


def simulate(
    schedule: Schedule,
    sizes: Sizes,
    system: SimulatedSystem,
    bounds: LoadBounds = UNBOUNDED,
    *,
    source: str = "estimate",
    looks: Sequence[Look] = (),
    keep_events: bool = False,
) -> tuple[VirtualRecords, Simulation]:
    """Simulate a schedule on a system; return what was recorded, and the simulation after its end.

    `source` is where the prompt token counts come from. Each of `looks` may end the load early.
    """
    simulation = Simulation(
        schedule,
        sizes,
        system.create_replicas(),
        system.make_router(),
        bounds,
        looks=looks,
        changes=system.changes,
    )
    with _collector_disabled():
        simulation.run()
    recorded = build_records(
        simulation.requests,
        simulation.ends,
        schedule,
        interval=system.interval,
        source=source,
        kept_cache=system.limits.block_reuse,
        keep_events=keep_events,
    )
    return recorded, simulation


@contextlib.contextmanager
def _collector_disabled() -> Iterator[None]:
    """Disable the garbage collector.

    Requests create no cycles, and the collector would scan hundreds of thousands of them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run(
    workload: Workload,
    settings: Settings,
    folder: Path,
    tell: Emit,
) -> Summary:
    """Carry out one simulated run in `folder`. Raises Fault or Faults if the run is not possible.

    A prompt has exactly the tokens that the workload asks for; the chat template adds none. Client
    and network take no time.
    """
    _check(settings)
    preset = preset_of(settings)
    started = process_time()
    settings = msgspec.structs.replace(settings, workers=1)
    found, answer = (_probe_result(preset, settings),), AnswerTime(preset.answer_ns, "preset")
    plan, begins = prepare(
        workload,
        settings,
        found,
        folder=folder,
        simulated=True,
        known=known(settings),
        answer=answer,
    )
    header = _with_target(run_header.header(plan, workload, begins), preset, settings)
    tell(RunPlanned(plan, header))
    looks: list[Look] = []
    tell(SimulationStarted(looks))
    monitor = StopRuleMonitor(workload.stop_when)
    if workload.stop_when:
        looks.append(_look_of_stop_rules(monitor, plan.schedule.horizon_ns))
    per_block = preset.server.tokens_per_block if preset.server.block_reuse else 0
    simulate_plan = partial(
        simulate,
        plan.schedule,
        sizes_of(workload.requests, plan.requests, per_block, settings),
        preset.system,
        source=plan.tokenizer.tag,
        keep_events=settings.keep == "gaps",
    )
    bounds = _bounds_of(workload)
    results, simulation = simulate_plan(bounds, looks=looks)
    stops: list[int] = []
    tell(Simulated(cast(Any, results.rows), stops))
    if stops:
        results, simulation = simulate_plan(msgspec.structs.replace(bounds, stop_ns=min(stops)))
        tell(Simulated(cast(Any, results.rows), []))
    header = _final_header(header, preset, simulation, plan.requests)
    if monitor.breach is not None:
        header = msgspec.structs.replace(header, state="stopped", stopped_by=monitor.breach)
    elif simulation.is_decided or stops:
        header = msgspec.structs.replace(header, state="decided")
    if preset.routing == "round_robin":
        values = resonance.find_resonance(
            workload.requests,
            plan.requests,
            len(simulation.replicas),
            "replica",
            len(results.rows),
        )
        header = run_header.noted(header, reasons.coded("resonance", values))
    seconds = [_own_second(results, simulation, process_time() - started)]
    rows: Any = results.rows
    counted = virtual_run_files.replicas_told(preset)
    summary = summarize(
        header,
        rows,
        results.gaps,
        results.timeline,
        seconds,
        TEXTS,
        virtual_run_files.no_errors(results),
        counted,
    )
    virtual_run_files.write(folder, header, results, seconds, TEXTS, counted)
    store.replace(folder / "summary.json", dump_summary(summary))
    checksums.write(folder)
    return summary


def _look_of_stop_rules(monitor: StopRuleMonitor, horizon_ns: int | None) -> Look:
    """Return the look that checks the rules of `--stop-when`, until nothing is left to start."""

    def is_broken(now_ns: int, ended: NDArray[np.void]) -> bool:
        if horizon_ns is not None and now_ns >= horizon_ns:
            return False
        return monitor.check(now_ns, ended)

    return Look(CHECK_INTERVAL_NS, is_broken)


def _bounds_of(workload: Workload) -> LoadBounds:
    return LoadBounds(
        max_in_flight=workload.max_in_flight,
        max_in_prefill=workload.max_in_prefill,
        timeout_ns=workload.timeout_ns,
        drain_ns=workload.drain_ns,
    )


def _check(settings: Settings) -> None:
    """Raise UserError if a run in virtual time does not support the settings."""
    if settings.ray is not None:
        raise UserError(
            "unsupported",
            f"{settings.url} runs in virtual time, in one process",
            "--ray",
            "leave --ray out",
        )
    if len(settings.endpoints) > 1:
        raise UserError(
            "unsupported",
            "a simulated target cannot share a run with others",
            f"--url {settings.url}",
            "run it alone",
        )


def known(settings: Settings) -> KnownTarget:
    """Return what the preset says of itself.

    Raises UserError if the preset does not exist or is not valid.
    """
    preset = preset_of(settings)
    return KnownTarget(
        name=f"simulated: {preset.name}",
        words=preset.words,
        context=Context(preset.model.name, preset.limits.max_seq_len),
        notes=preset.notes,
        virtual_url=settings.url or "",
        gpus=preset.gpus,
        identity=hashlib.sha256(preset.model_dump_json().encode()).hexdigest(),
    )


def preset_of(settings: Settings) -> Preset:
    """Return the preset that the URL names. Raises UserError or Faults."""
    return load_preset(after_scheme(settings.url), "--url sim:")


def _probe_result(preset: Preset, settings: Settings) -> ProbeResult:
    """Return the result that a probe of such a server would have."""
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
        reports_usage=not settings.values,
        has_exact_length=True,
        tokens_per_event=float(preset.server.stream_interval),
        warnings=(),
        engine="simulated",
        precision=preset.precision,
        max_context=preset.limits.max_seq_len,
        reports_server_timing=True,
    )


def _with_target(header: RunManifest, preset: Preset, settings: Settings) -> RunManifest:
    """Return the header with the simulated target and the notes about it."""
    target = msgspec.structs.replace(header.targets[0], url="", gpus=settings.gpus or preset.gpus)
    coded = reasons.coded("virtual_time", {"preset": preset.words})
    return msgspec.structs.replace(
        header,
        targets=(target,),
        client="virtual",
        rtt_ms=None,
        notes=(*coded, *header.notes),
        note_codes=coded | header.note_codes,
    )


def _final_header(
    header: RunManifest, preset: Preset, simulation: Simulation, requests: Prompts
) -> RunManifest:
    replicas = simulation.replicas
    steps = sum(map(len, simulation.ends))
    mean_batch = sum(replica.decoded for replica in replicas) / steps if steps else 0.0
    minimum = preset.valid_from_sequences.value
    if mean_batch < minimum:
        header = run_header.noted(
            header, reasons.coded("extrapolated", {"sequences": mean_batch, "limit": minimum})
        )
    pauses = sum(replica.pauses for replica in replicas)
    header = run_header.noted(
        header, reasons.coded("paused", {"times": pauses} if pauses else None)
    )
    return msgspec.structs.replace(
        header,
        ended=run_header.now(),
        state="finished",
        fingerprints=msgspec.structs.replace(
            header.fingerprints, prompts=digest.fingerprint(requests, None)
        ),
    )


def _own_second(results: VirtualRecords, simulation: Simulation, cpu_s: float) -> WorkerSample:
    """Return what the simulation itself used.

    `span_s` is 0, so that it is not taken for the load of a client.
    """
    last = max((int(ends[-1]) for ends in simulation.ends if len(ends)), default=0)
    return WorkerSample(
        t_s=last / 1e9,
        span_s=0.0,
        cpu_s=round(cpu_s, 4),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        sent=len(results.rows),
        done=len(results.rows),
    )
