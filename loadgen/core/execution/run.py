"""Carry out one run, from a checked workload to its summary.

A run over HTTP starts the target if its backend does that, probes the targets, makes a plan, writes
the manifest, sends the load (see `driver`), reads everything back, and computes the summary.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadgen.core import run_folder
from loadgen.core.errors import UserError
from loadgen.core.execution import backend, events, host_facts, run_manifest, step_targets
from loadgen.core.execution.context import KnownTarget
from loadgen.core.execution.folder_names import new_run_folder
from loadgen.core.execution.plan import (
    Plan,
    PreparationContext,
    PreparedPlan,
    Settings,
    prepare_plan,
)
from loadgen.core.execution.plan_checks import check_plan
from loadgen.core.execution.probing import ProbeCache, probe_all
from loadgen.core.execution.process_memory import LARGEST_KEPT_BLOCK, set_largest_kept_block
from loadgen.core.execution.shard import PREPARATION_S, sleep_until_before_start
from loadgen.core.execution.worker_resources import WorkerResult, needs_builder_process
from loadgen.core.metrics import reasons
from loadgen.core.metrics.summary import Summary, dump_summary
from loadgen.core.requests.digest import Digest, fingerprint
from loadgen.core.results import (
    checksums,
    gaps,
    object_store,
    shard_schedule,
    store,
)
from loadgen.core.results.manifest import Fingerprints, RunManifest, ShardPart
from loadgen.core.results.record_log import segments
from loadgen.core.schedule.schedule import complete_schedule
from loadgen.core.server_metrics import request_accounts
from loadgen.core.sidecars import server_accounts
from loadgen.core.sidecars.compactor_process import Compactor
from loadgen.core.sidecars.event_handlers import (
    CacheReset,
    ManifestFile,
    Names,
    Pages,
    Profiling,
    ShardStart,
    StopWatch,
    write_manifest,
)
from loadgen.core.workload import Workload

Execute = Callable[..., tuple[Summary, Path]]
"""The type of `execute` and of its replacements: (workload, settings, listeners) -> (summary,
folder)."""


def execute(
    workload: Workload,
    settings: Settings,
    listeners: Sequence[events.EventHandler] = (),
    *,
    probe_cache: ProbeCache | None = None,
    folder: Path | None = None,
) -> tuple[Summary, Path]:
    """Carry out one run, and return its summary and its folder.

    Args:
        workload: The load, which is checked already.
        settings: The options of the run.
        listeners: Receive the events of the run, besides the listeners that every run has.
        probe_cache: The results of earlier probes. The runs of one command share it, so that each
            target is probed once.
        folder: The folder of the run, if the caller has created and locked it.

    Raises:
        LoadgenError: The run is not possible.
        CombinedError: The run is not possible, for several reasons.
    """
    _check_virtual_time(settings)
    # An object store that cannot be reached is reported before the run, not after it.
    remote = None if settings.store is None else object_store.open_folder(settings.store)
    stored_at = None
    manifest_file = ManifestFile()
    all_listeners: Sequence[events.EventHandler] = (
        manifest_file,
        *listeners,
        Pages(),
        Profiling(),
        StopWatch(),
        CacheReset(),
        Names(),
        ShardStart(),
    )
    emit = events.broadcast(all_listeners)
    try:
        with (
            _run_folder(workload, settings, folder) as run_dir,
            manifest_file.removed_without_load(run_dir),
        ):
            run_without_http = backend.run_function(settings)
            if run_without_http is not None:
                summary = run_without_http(workload, settings, run_dir, emit)
            else:
                http_run = _HttpRun(
                    workload=workload,
                    folder=run_dir,
                    listeners=all_listeners,
                    manifest_file=manifest_file,
                    probe_cache={} if probe_cache is None else probe_cache,
                )
                summary = http_run.execute(settings)
        if remote is not None:
            remote.put(run_dir)
            stored_at = settings.store
    finally:
        emit(events.RunEnded(stored_at))
    return summary, run_dir


def finish_run(
    plan: Plan,
    manifest: RunManifest,
    result: WorkerResult,
    compactor: Compactor,
    load: events.RunningLoad | None = None,
) -> Summary:
    """Write the final manifest and the summary of a run, and delete what is no longer needed.

    The record log is needed until the compactor has stored its records in the final format.

    Args:
        plan: The plan of the run.
        manifest: The manifest as it was before the load.
        result: What the workers reported.
        compactor: Stores the records, perhaps in a process of its own.
        load: Says whether and why the tool ended the run. Without it, an interrupted run was
            interrupted by the user.
    """
    folder = plan.job.folder
    set_largest_kept_block(LARGEST_KEPT_BLOCK)
    manifest = _final_manifest(plan, manifest, result, load)
    write_manifest(folder, manifest)
    summary = _compact_and_summarize(folder, manifest, compactor)
    store.replace(folder / "summary.json", dump_summary(summary))
    if plan.job.settings.keep == "gaps":
        gaps.write_request_gaps(folder, gaps.read_event_files(folder))
    if not compactor.failure:
        store.delete_record_log(folder)
    checksums.write(folder)
    return summary


def _compact_and_summarize(folder: Path, manifest: RunManifest, compactor: Compactor) -> Summary:
    """Let the compactor store the remaining records, and return the summary of a run.

    The summary is computed from the record log while the compactor works. Only if it needs what the
    compactor writes, the compactor ends first. A note on what went wrong is added to the stored
    manifest, and is part of the summary.
    """
    # The compactor deletes each segment of the record log that it has stored, except the last one
    # of a worker. A worker has written several segments if one begins after its record 0.
    has_deleted_segments = any(segment.first for segment in segments(folder))
    has_breakdowns = (folder / request_accounts.FILE).exists()
    if not has_deleted_segments and not has_breakdowns:
        summary = run_folder.summary(folder)
        if compactor.finish():
            return summary
    elif compactor.finish():
        if has_breakdowns:
            _add_breakdowns(folder, manifest)
        return run_folder.summary(folder)
    notes = reasons.make_note("store_died", {"why": compactor.failure})
    write_manifest(folder, run_manifest.add_notes(manifest, notes))
    return run_folder.summary(folder)


def _add_breakdowns(folder: Path, manifest: RunManifest) -> None:
    """Write the timing breakdowns of the servers into the records of a run.

    If some of them match no request, a note is added to the stored manifest.
    """
    unmatched = server_accounts.add_breakdowns_to_records(folder)
    if unmatched is not None:
        notes = reasons.make_note("accounts_unjoined", unmatched)
        write_manifest(folder, run_manifest.add_notes(manifest, notes))


def _check_virtual_time(settings: Settings) -> None:
    """Raise UserError for options that a run in virtual time does not have."""
    if not settings.backend.virtual:
        return
    if settings.shard is not None:
        raise UserError(
            "unsupported",
            what=(
                "a run in virtual time cannot be sharded, because its parts would "
                "not share one simulated server"
            ),
            where="--shard",
            hint="run it without --shard, or start `loadgen sim` and give its URL with --url",
        )
    if settings.profile is not None:
        raise UserError(
            "unsupported",
            what="a run in virtual time has no server that could be profiled",
            where="--profile",
            hint="leave it out",
        )


def _run_folder(
    workload: Workload, settings: Settings, folder: Path | None
) -> contextlib.AbstractContextManager[Path]:
    """Return a context with the folder of a run, which is created unless the caller did that."""
    if folder is not None:
        return contextlib.nullcontext(folder)
    now = datetime.datetime.now().astimezone()
    return new_run_folder(settings.out, workload.name, now)


@dataclass(frozen=True)
class _HttpRun:
    """One run over HTTP."""

    workload: Workload
    folder: Path
    listeners: Sequence[events.EventHandler]
    manifest_file: ManifestFile
    probe_cache: ProbeCache

    def execute(self, settings: Settings) -> Summary:
        """Carry out the run and return its summary.

        The steps are: start the target if it is simulated, probe and plan, write the manifest, wait
        for the common start of a shard, send the load, and finish. What was opened is closed in the
        reverse order. If the load fails, the compactor is closed, and listeners receive the end of
        the load.
        """
        # Runs in virtual time do not need this module.
        import uvloop

        known_target = backend.known(settings)
        with contextlib.ExitStack() as cleanup:
            served_settings = cleanup.enter_context(backend.running_server(settings))
            settings = step_targets.resolve_step_targets(self.workload, served_settings)
            senders = cleanup.enter_context(backend.open_senders(settings))
            runner = cleanup.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
            failure_cleanup = cleanup.enter_context(contextlib.ExitStack())
            prepared = self._prepare(settings, known_target, senders, runner, failure_cleanup)
            plan = prepared.plan
            manifest = run_manifest.create_manifest(plan, self.workload, prepared.starts)
            worker_notes = runner.run(senders.place(plan, self._emit))
            manifest = msgspec.structs.replace(
                manifest, warnings=(*manifest.warnings, *worker_notes)
            )
            manifest = events.complete_manifest(self.listeners, manifest)
            self._emit(events.RunPlanned(plan, manifest))

            if settings.shard is not None:
                shard_schedule.write(self.folder, complete_schedule(plan.schedule))
                self._emit(events.WaitingFor(f"the common start at {settings.shard.start_at}"))
                runner.run(sleep_until_before_start(settings.shard, lead_s=PREPARATION_S))

            compactor = self._start_compactor(plan)
            failure_cleanup.callback(compactor.close)
            result = runner.run(senders.run(plan, self._emit))
            # The load has not failed, so the cleanup for that case is dropped.
            failure_cleanup.pop_all()

            manifest = events.conclude_manifest(self.listeners, manifest)
            # Its threads and sockets are not needed while the summary is computed.
            runner.close()
            return finish_run(plan, manifest, result, compactor, self.manifest_file.load)

    @property
    def _emit(self) -> events.Emit:
        """Return a function that sends an event to all listeners."""
        return events.broadcast(self.listeners)

    def _prepare(
        self,
        settings: Settings,
        known_target: KnownTarget | None,
        senders: backend.Senders,
        runner: asyncio.Runner,
        failure_cleanup: contextlib.ExitStack,
    ) -> PreparedPlan:
        """Probe the targets, and return a plan that was checked.

        Listeners may start something when they receive `TargetsProbed`, and end it when they
        receive `LoadEnded`. Therefore `LoadEnded` is added to `failure_cleanup`.

        Args:
            settings: The settings of the run.
            known_target: What is known of the target without a request.
            senders: The processes that will send the load.
            runner: Runs the probe.
            failure_cleanup: The callbacks for a run that fails.
        """
        probe_results = runner.run(probe_all(settings, self.workload, self.probe_cache, self._emit))
        failure_cleanup.callback(self._emit, events.LoadEnded(None))
        self._emit(events.TargetsProbed(self.folder, settings, probe_results))
        context = PreparationContext(
            folder=self.folder,
            simulated=settings.backend.simulated,
            known=known_target,
            cluster_cores=senders.cores,
        )
        prepared = prepare_plan(self.workload, settings, probe_results, context)
        check_plan(prepared.plan, is_local=senders.cores is None)
        return prepared

    def _start_compactor(self, plan: Plan) -> Compactor:
        """Start storing records, in a process of its own if there are many."""
        tuning = plan.job.settings.tuning
        slot_count = plan.schedule.slot_count
        has_many_records = slot_count is None or slot_count > tuning.compacted_rows
        return Compactor(
            self.folder, frozen_s=tuning.helper_frozen_s, starts_process=has_many_records
        )


def _final_manifest(
    plan: Plan,
    manifest: RunManifest,
    result: WorkerResult,
    load: events.RunningLoad | None,
) -> RunManifest:
    """Return the manifest of a run with what is known after its load.

    That is how it ended, the fingerprints of the prompts that were sent, and notes on bodies that
    were built too late and on targets that stopped responding.

    Args:
        plan: The plan of the run.
        manifest: The manifest before the load.
        result: What the workers reported.
        load: See `finish_run`.
    """
    late_bodies = {"bodies": result.late_bodies} if result.late_bodies else None
    manifest = run_manifest.add_notes(manifest, reasons.make_note("bodies_late", late_bodies))
    manifest = msgspec.structs.replace(manifest, warnings=(*manifest.warnings, *result.notes))
    for target_index, at_s in sorted(result.down_since_s.items()):
        target = manifest.targets[target_index]
        values = {"target": target.name or target.url, "at_s": at_s}
        manifest = run_manifest.add_notes(manifest, reasons.make_note("target_gone", values))
    hot_path = result.hot_path or manifest.host.hot_path
    return msgspec.structs.replace(
        manifest,
        ended=host_facts.current_time(),
        state=_final_state(result, load),
        stopped_by=None if load is None else load.stopped_by,
        fingerprints=_with_sent_prompts(manifest.fingerprints, plan, result),
        cluster=result.cluster,
        shard=_with_digests(manifest.shard, result),
        host=msgspec.structs.replace(manifest.host, hot_path=hot_path),
    )


def _final_state(result: WorkerResult, load: events.RunningLoad | None) -> str:
    """Return the state of a run after its load, as the manifest records it.

    "stopped": a rule or a failed target ended it. "finished": it sent everything. "decided": a
    listener ended it because its outcome was certain. "interrupted": the user ended it.
    """
    if result.stopped or (load is not None and load.stopped_by):
        return "stopped"
    if not result.interrupted:
        return "finished"
    if load is not None and load.decided:
        return "decided"
    return "interrupted"


def _with_sent_prompts(
    fingerprints: Fingerprints, plan: Plan, result: WorkerResult
) -> Fingerprints:
    """Return the fingerprints of a run with those of its prompts and request bodies.

    There are three cases:

    1. The workers built all prompts of the plan. Their digests are the fingerprints. Bodies have
       one only if they do not depend on the replies of the server.
    2. A shard lost a worker, whose part of the digest is missing. There are no fingerprints.
    3. Otherwise separate processes built the bodies, or not all prompts were sent. The fingerprint
       of the prompts is computed from the plan.
    """
    slot_count = plan.schedule.slot_count
    has_builder = needs_builder_process(complete_schedule(plan.schedule), plan.job.settings.tuning)
    if result.prompts_count == slot_count and not has_builder:
        prompts_digest = Digest(result.prompts_total, result.prompts_count)
        bodies_digest = Digest(result.bodies_total, result.prompts_count)
        has_fixed_bodies = plan.requests.history == "scripted"
        return msgspec.structs.replace(
            fingerprints,
            prompts=prompts_digest.hexdigest(),
            bodies=bodies_digest.hexdigest() if has_fixed_bodies else "",
        )
    is_shard = plan.job.settings.shard is not None
    if is_shard and slot_count is not None and not has_builder:
        return fingerprints
    # A load with a builder is large, so its first prompts represent it.
    hashed_prompts = None if has_builder else slot_count
    return msgspec.structs.replace(fingerprints, prompts=fingerprint(plan.requests, hashed_prompts))


def _with_digests(shard_part: ShardPart | None, result: WorkerResult) -> ShardPart | None:
    """Return the part of a manifest about shards with the sums of hashes of this shard.

    `loadgen merge` adds the sums of all shards, and computes the fingerprints of the run from them.
    Return None for a run that was not divided into shards.
    """
    if shard_part is None:
        return None
    return msgspec.structs.replace(
        shard_part,
        prompts_total=f"{result.prompts_total:x}",
        bodies_total=f"{result.bodies_total:x}",
        prompts_count=result.prompts_count,
    )
