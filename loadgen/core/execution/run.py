"""Carry out one run, from a checked workload to its summary.

A run over HTTP starts the target if its backend does that, probes the targets, makes a plan, writes
the manifest, sends the load (see `driver`), reads everything back, and computes the summary.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadgen.core import run_folder
from loadgen.core.errors import CombinedError, LoadgenError, UserError
from loadgen.core.execution import backend, events, host_facts, run_manifest, step_targets
from loadgen.core.execution.context import KnownTarget
from loadgen.core.execution.folder_names import new_run_folder
from loadgen.core.execution.load_description import slo_by_class
from loadgen.core.execution.plan import (
    Plan,
    PreparationContext,
    PreparedPlan,
    Settings,
    prepare_plan,
)
from loadgen.core.execution.plan_checks import check_plan, workload_errors
from loadgen.core.execution.probing import ProbeCache, probe_all
from loadgen.core.execution.process_memory import LARGEST_KEPT_BLOCK, set_largest_kept_block
from loadgen.core.execution.shard import PREPARATION_S, Shard, sleep_until_before_start
from loadgen.core.execution.worker_resources import WorkerResult, needs_builder_process
from loadgen.core.metrics import reasons
from loadgen.core.metrics.summary import Summary, dump_summary
from loadgen.core.requests.digest import Digest, fingerprint
from loadgen.core.requests.question_prompts import list_known_answers
from loadgen.core.results import (
    answer_files,
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
    HostNameCheck,
    ManifestFile,
    MetricsPages,
    Profiling,
    ShardStart,
    StopWatch,
    write_manifest,
)
from loadgen.core.workload import Workload

_FIRST_PROMPTS = None
"""The count of prompts by which `fingerprint` hashes a fixed number of the first ones."""

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
    _check_workload(workload, settings)
    settings = _keep_gaps_for_fluidity(workload, settings)

    # An object store that cannot be reached is reported before the run, not after it.
    remote = None if settings.store is None else object_store.open_folder(settings.store)
    stored_at = None
    manifest_file = ManifestFile()
    all_listeners: Sequence[events.EventHandler] = (
        manifest_file.handle_event,
        *listeners,
        MetricsPages().handle_event,
        Profiling().handle_event,
        StopWatch().handle_event,
        CacheReset().handle_event,
        HostNameCheck().handle_event,
        ShardStart().handle_event,
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


def _keep_gaps_for_fluidity(workload: Workload, settings: Settings) -> Settings:
    """Return the settings, which store the times between events if an SLO needs them.

    The objective `fluidity` is about the times of single tokens. The workload or a request class of
    it may have such an objective.
    """
    slos = [workload.slo, *slo_by_class(workload).values()]
    needs_gaps = any(slo is not None and slo.fluidity is not None for slo in slos)
    if not needs_gaps:
        return settings
    return msgspec.structs.replace(settings, keep="gaps")


def finish_run(
    plan: Plan,
    manifest: RunManifest,
    result: WorkerResult,
    compactor: Compactor,
    load: events.RunningLoad | None = None,
) -> Summary:
    """Write the results of a run whose load has ended, and return its summary.

    The order matters. The summary is computed from the stored manifest, so that is written first.
    The record log, to which the workers appended, is deleted after the last step that reads it. The
    checksums of all files come last: a folder that has them is complete.

    Args:
        plan: The plan of the run.
        manifest: The manifest as it was before the load.
        result: What the workers reported.
        compactor: Converts the record log to Parquet, perhaps in a process of its own.
        load: The load that was sent, which says whether and why the tool ended it. Without it, an
            interrupted run was interrupted by the user.
    """
    folder = plan.job.folder

    # Computing a summary needs large arrays again and again, so the allocator keeps freed ones.
    set_largest_kept_block(LARGEST_KEPT_BLOCK)
    final_manifest = _final_manifest(plan, manifest, result, load)
    write_manifest(folder, final_manifest)
    if answer_files.has_checked_answers(folder):
        outcomes = answer_files.check_recorded_responses(folder)
        answer_files.write_outcomes(folder, outcomes)
    summary = _compact_and_summarize(folder, final_manifest, compactor)
    store.replace(folder / "summary.json", dump_summary(summary))

    if plan.job.settings.keep == "gaps":
        gaps.write_request_gaps(folder, gaps.read_event_files(folder))

    if not compactor.failure:
        store.delete_record_log(folder)

    checksums.write(folder)
    return summary


def _compact_and_summarize(folder: Path, manifest: RunManifest, compactor: Compactor) -> Summary:
    """Wait until the compactor has converted all records to Parquet, and return the summary.

    To save time, the summary is computed from the record log while the compactor still works, if
    that has the same data as the Parquet files will have. It has not if the compactor has deleted a
    part of it, or if the servers have reported how long they worked on each request (their timing
    breakdowns), which are added to the Parquet files afterwards.

    If the compactor fails, the record log stays, a note about the failure is added to the stored
    manifest, and the summary is computed with this note.
    """
    has_breakdowns = (folder / request_accounts.FILE).exists()
    is_record_log_sufficient = not has_breakdowns and not _has_deleted_segments(folder)
    early_summary = run_folder.summary(folder) if is_record_log_sufficient else None

    is_compacted = compactor.finish()
    if not is_compacted:
        _note_failed_compaction(folder, manifest, compactor.failure)
    elif early_summary is not None:
        return early_summary
    elif has_breakdowns:
        _add_breakdowns(folder, manifest)

    return run_folder.summary(folder)


def _note_failed_compaction(folder: Path, manifest: RunManifest, failure: str) -> None:
    """Add a note to the stored manifest that records could not be converted to Parquet."""
    notes = reasons.make_note("store_died", {"why": failure})
    write_manifest(folder, run_manifest.add_notes(manifest, notes))


def _has_deleted_segments(folder: Path) -> bool:
    """Return True if the compactor may have deleted a part of the record log.

    It deletes each segment of the record log that it has converted, except the last one of each
    worker. So nothing is deleted if every worker has only one segment, which begins at record 0.
    """
    return any(segment.first > 0 for segment in segments(folder))


def _add_breakdowns(folder: Path, manifest: RunManifest) -> None:
    """Write the timing breakdowns of the servers into the records of a run.

    If some of them match no request, a note is added to the stored manifest.
    """
    unmatched = server_accounts.add_breakdowns_to_records(folder)
    if unmatched is not None:
        notes = reasons.make_note("accounts_unjoined", unmatched)
        write_manifest(folder, run_manifest.add_notes(manifest, notes))


def _check_workload(workload: Workload, settings: Settings) -> None:
    """Raise CombinedError for everything that a workload needs and the options exclude.

    `check_plan` repeats this with the settings of the plan, after the targets were probed.
    """
    errors: list[LoadgenError] = list(workload_errors(workload, settings))
    if errors:
        raise CombinedError(errors)


def _check_virtual_time(settings: Settings) -> None:
    """Raise UserError for options that a run in virtual time does not have."""
    if not settings.backend.virtual:
        return

    if settings.shard is not None:
        raise UserError(
            "unsupported",
            message=(
                "a run in virtual time cannot be sharded, because its parts would "
                "not share one simulated server"
            ),
            where="--shard",
            hint="run it without --shard, or start `loadgen sim` and give its URL with --url",
        )

    if settings.profile is not None:
        raise UserError(
            "unsupported",
            message="a run in virtual time has no server that could be profiled",
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
class _RunContext:
    """What was opened for a run over HTTP.

    Attributes:
        settings: The settings of the run, with the URLs of its targets.
        senders: The processes that will send the load.
        runner: Runs coroutines, such as the load, in an event loop.
        failure_cleanup: Callbacks that are called only if the run fails before its load has ended.
    """

    settings: Settings
    senders: backend.Senders
    runner: asyncio.Runner
    failure_cleanup: contextlib.ExitStack


@dataclass(frozen=True)
class _HttpRun:
    """One run over HTTP."""

    workload: Workload
    folder: Path
    listeners: Sequence[events.EventHandler]
    manifest_file: ManifestFile
    probe_cache: ProbeCache

    def execute(self, settings: Settings) -> Summary:
        """Carry out the run and return its summary."""
        known_target = backend.known(settings)
        with self._open_context(settings) as context:
            prepared = self._probe_and_plan(context, known_target)
            plan = prepared.plan
            planned_manifest = self._announce_plan(prepared, context)
            self._write_known_answers(plan)

            if context.settings.shard is not None:
                self._wait_for_other_shards(plan, context.settings.shard, context.runner)

            # The compactor converts the records of the load to Parquet during the load.
            compactor = self._start_compactor(plan)
            context.failure_cleanup.callback(compactor.close)
            result = context.runner.run(context.senders.run(plan, self._emit))

            # `finish_run` closes the compactor, and `conclude_manifest` sends `LoadEnded`.
            _discard_callbacks(context.failure_cleanup)

            manifest = events.conclude_manifest(self.listeners, planned_manifest)

            # Frees threads and sockets that are not needed while the summary is computed.
            context.runner.close()
            return finish_run(plan, manifest, result, compactor, self.manifest_file.load)

    @contextlib.contextmanager
    def _open_context(self, settings: Settings) -> Iterator[_RunContext]:
        """Start what the run needs, such as an embedded server, and close it afterwards.

        All parts are closed in the reverse order. So the callbacks for a failed run are called
        first, while everything else is still open.
        """
        # Runs in virtual time do not need this module.
        import uvloop

        with (
            backend.running_server(settings) as served_settings,
            contextlib.ExitStack() as cleanup,
        ):
            run_settings = step_targets.resolve_step_targets(self.workload, served_settings)
            senders = cleanup.enter_context(backend.open_senders(run_settings))
            runner = cleanup.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
            failure_cleanup = cleanup.enter_context(contextlib.ExitStack())
            yield _RunContext(run_settings, senders, runner, failure_cleanup)

    @property
    def _emit(self) -> events.Emit:
        """Return a function that sends an event to all listeners."""
        return events.broadcast(self.listeners)

    def _probe_and_plan(
        self, context: _RunContext, known_target: KnownTarget | None
    ) -> PreparedPlan:
        """Send a probe to each target, and return the checked plan of the run.

        Args:
            context: What was opened for the run.
            known_target: What is known of the target without a request.

        Raises:
            CombinedError: The run is not possible as planned.
        """
        settings = context.settings
        probe_results = context.runner.run(
            probe_all(settings, self.workload, self.probe_cache, self._emit)
        )

        # Some listeners start something at `TargetsProbed`, such as a reader of metrics pages, and
        # end it at `LoadEnded`. So from here on, a run that fails must send them `LoadEnded`.
        context.failure_cleanup.callback(self._emit, events.LoadEnded(manifest=None))
        self._emit(events.TargetsProbed(self.folder, settings, probe_results))
        cluster_cores = context.senders.cores  # None if this machine sends the load
        facts = PreparationContext(
            folder=self.folder,
            simulated=settings.backend.simulated,
            known=known_target,
            cluster_cores=cluster_cores,
        )
        prepared = prepare_plan(self.workload, settings, probe_results, facts)
        check_plan(prepared.plan, is_local=cluster_cores is None)

        return prepared

    def _announce_plan(self, prepared: PreparedPlan, context: _RunContext) -> RunManifest:
        """Create the manifest, which describes the run, and send it to the listeners.

        On a cluster, the workers are first distributed over its machines. Problems with that become
        warnings in the manifest. Then each listener may add facts to the manifest, for example the
        URLs of metrics pages, before `RunPlanned` is sent with it.
        """
        plan = prepared.plan
        manifest = run_manifest.create_manifest(plan, self.workload, prepared.starts)
        placement_warnings = context.runner.run(context.senders.place(plan, self._emit))
        manifest = run_manifest.add_warnings(manifest, placement_warnings)
        manifest = events.complete_manifest(self.listeners, manifest)
        self._emit(events.RunPlanned(plan, manifest))
        return manifest

    def _write_known_answers(self, plan: Plan) -> None:
        """Write what the responses will be checked against, if the load has known answers."""
        known_answers = list_known_answers(plan.requests)
        answer_files.write_known_answers(self.folder, known_answers)

    def _wait_for_other_shards(self, plan: Plan, shard: Shard, runner: asyncio.Runner) -> None:
        """Wait until shortly before the time at which all shards of a run start together.

        The schedule of the whole run is stored before, because `loadgen merge` needs it.
        """
        shard_schedule.write(self.folder, complete_schedule(plan.schedule))
        self._emit(events.WaitingFor(f"the common start at {shard.start_at}"))
        runner.run(sleep_until_before_start(shard, lead_s=PREPARATION_S))

    def _start_compactor(self, plan: Plan) -> Compactor:
        """Start storing records, in a process of its own if there are many."""
        tuning = plan.job.settings.tuning
        slot_count = plan.schedule.slot_count
        has_many_records = slot_count is None or slot_count > tuning.compacted_rows
        return Compactor(
            self.folder, stuck_after_s=tuning.helper_frozen_s, starts_process=has_many_records
        )


def _discard_callbacks(cleanup: contextlib.ExitStack) -> None:
    """Remove all callbacks from a stack of cleanups without calling them."""
    cleanup.pop_all()


def _final_manifest(
    plan: Plan,
    planned_manifest: RunManifest,
    result: WorkerResult,
    load: events.RunningLoad | None,
) -> RunManifest:
    """Return the manifest of a run with what is known after its load.

    That is how it ended, the fingerprints of the prompts that were sent, and notes on problems.

    Args:
        plan: The plan of the run.
        planned_manifest: The manifest before the load.
        result: What the workers reported.
        load: See `finish_run`.
    """
    manifest = _add_load_notes(planned_manifest, result)

    # On a cluster, only the workers know which implementation read their sockets.
    host = msgspec.structs.replace(
        manifest.host, hot_path=result.hot_path or manifest.host.hot_path
    )
    return msgspec.structs.replace(
        manifest,
        ended=host_facts.current_time(),
        state=_final_state(result, load),
        stopped_by=None if load is None else load.stopped_by,
        fingerprints=_add_prompt_fingerprints(manifest.fingerprints, plan, result),
        cluster=result.cluster,
        shard=_add_shard_digests(manifest.shard, result),
        host=host,
    )


def _add_load_notes(manifest: RunManifest, result: WorkerResult) -> RunManifest:
    """Return a manifest with notes on what went wrong during the load.

    These are request bodies that were built too late, warnings of the workers, and targets that
    stopped responding.
    """
    if result.late_bodies:
        notes = reasons.make_note("bodies_late", {"bodies": result.late_bodies})
        manifest = run_manifest.add_notes(manifest, notes)

    manifest = run_manifest.add_warnings(manifest, result.notes)
    for target_index, down_since_s in sorted(result.down_since_s.items()):
        target = manifest.targets[target_index]
        values = {"target": target.name or target.url, "at_s": down_since_s}
        manifest = run_manifest.add_notes(manifest, reasons.make_note("target_gone", values))

    return manifest


def _final_state(result: WorkerResult, load: events.RunningLoad | None) -> str:
    """Return the state of a run after its load, as the manifest records it.

    "stopped": a rule (`--stop-when`) or a failed target ended it. "finished": it sent everything.
    "decided": loadgen ended it, because nothing that followed could change the result of a trial.
    "interrupted": the user ended it.

    Args:
        result: What the workers reported. Its `interrupted` is also True if a rule or a listener
            has ended the load.
        load: The load as listeners have stopped it, or None if there were no listeners.
    """
    was_stopped_by_rule = load is not None and load.stopped_by is not None
    was_decided = load is not None and load.decided
    if result.stopped or was_stopped_by_rule:
        return "stopped"
    if not result.interrupted:
        return "finished"
    if was_decided:
        return "decided"

    return "interrupted"


def _add_prompt_fingerprints(
    fingerprints: Fingerprints, plan: Plan, result: WorkerResult
) -> Fingerprints:
    """Return the fingerprints of a run with hashes of its prompts and request bodies.

    Equal fingerprints show that two runs sent the same prompts. Hashing all prompts of a large load
    would take too long, so only its first ones are hashed. Usually, the workers have hashed every
    prompt that they built, and the fingerprint is the sum of their hashes. If they have not built
    all, for example because the run was ended early, the prompts are built again here. In a shard
    (one machine's part of a run) that is not done, because `loadgen merge` combines the sums of the
    workers of all shards. The fingerprints of such a shard are returned unchanged.

    Args:
        fingerprints: The other fingerprints of the run.
        plan: The plan of the run, or of this shard of it.
        result: The merged result of the workers.
    """
    request_count = plan.schedule.slot_count

    # The schedule of the run decides this, so that all of its shards compute the same fingerprint.
    schedule_of_run = complete_schedule(plan.schedule)
    is_large_load = needs_builder_process(schedule_of_run, plan.job.settings.tuning)
    if is_large_load:
        first_prompts_hash = fingerprint(plan.requests, count=_FIRST_PROMPTS)
        return msgspec.structs.replace(fingerprints, prompts=first_prompts_hash)

    have_workers_hashed_all = result.prompts_count == request_count
    if have_workers_hashed_all:
        return _add_worker_fingerprints(fingerprints, plan, result)

    is_incomplete_shard = plan.job.settings.shard is not None and request_count is not None
    if is_incomplete_shard:
        return fingerprints

    all_prompts_hash = fingerprint(plan.requests, request_count)
    return msgspec.structs.replace(fingerprints, prompts=all_prompts_hash)


def _add_worker_fingerprints(
    fingerprints: Fingerprints, plan: Plan, result: WorkerResult
) -> Fingerprints:
    """Return the fingerprints with the hashes that the workers computed of all prompts and bodies.

    The hash of the bodies is left empty if conversations contain replies of the server, because
    such bodies differ between runs. Each request has one prompt and one body.
    """
    request_count = result.prompts_count
    prompts_digest = Digest(result.prompts_total, request_count)
    bodies_digest = Digest(result.bodies_total, request_count)
    has_fixed_bodies = plan.requests.history == "scripted"

    return msgspec.structs.replace(
        fingerprints,
        prompts=prompts_digest.hexdigest(),
        bodies=bodies_digest.hexdigest() if has_fixed_bodies else "",
    )


def _add_shard_digests(shard_part: ShardPart | None, result: WorkerResult) -> ShardPart | None:
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
