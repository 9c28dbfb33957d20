"""One run, from a checked workload to its summary: everything before the clock starts and after it stops.

IO, in this order: start the target if its backend does that, probe the targets, make the plan, write the header,
carry it out (`backend.py`), read everything back, compute the summary. `driver.py` works while the clock runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from loadgen.core import run_folder
from loadgen.core.errors import UserError
from loadgen.core.execution import backend, events, run_header, step_targets
from loadgen.core.execution.folder_names import taken
from loadgen.core.execution.plan import Plan, Settings, prepare
from loadgen.core.execution.probing import Known, find_all
from loadgen.core.execution.process_memory import LARGEST_KEPT_BLOCK, release_blocks_above
from loadgen.core.execution.shard import PREPARATION_S, sleep_until_before_start
from loadgen.core.execution.worker_resources import WorkerResult, is_large
from loadgen.core.metrics import reasons
from loadgen.core.metrics.summary import Summary, dump_summary
from loadgen.core.requests.digest import Digest, fingerprint
from loadgen.core.results import (
    checksums,
    gaps,
    manifest,
    object_store,
    shard_schedule,
    store,
)
from loadgen.core.results.spool import segments
from loadgen.core.schedule.schedule import complete_schedule
from loadgen.core.server_metrics import request_accounts
from loadgen.core.sidecars import server_accounts
from loadgen.core.sidecars.compactor_process import Compactor
from loadgen.core.sidecars.hearers import (
    CacheReset,
    HeaderFile,
    Names,
    Pages,
    Profiling,
    ShardStart,
    StopWatch,
    write_header,
)
from loadgen.core.workload import Workload

Execute = Callable[..., tuple[Summary, Path]]
"""`execute`, or what stands for it: (workload, settings, hearers) -> (summary, folder)."""


def execute(
    workload: Workload,
    settings: Settings,
    hearers: Sequence[events.EventHandler] = (),
    *,
    known: Known | None = None,
    own: Path | None = None,
) -> tuple[Summary, Path]:
    """Carry out one run; returns its summary and its folder. Raises Fault or Faults if the run is not possible.

    `hearers`: who hears the events of the run, beside what goes along with every run. `known`: what was found out about
    targets, for all runs of one command, each of which adds to it and asks no target again. `own`: the folder of the
    run, where the caller has taken it.
    """
    row = settings.backend
    if settings.shard is not None and row.virtual:
        raise UserError(
            "unsupported",
            "the parts of a run in virtual time would not share one simulated server",
            "--shard",
            "run it whole, or start `loadgen sim` and name it with --url",
        )
    if settings.profile is not None and row.virtual:
        raise UserError(
            "unsupported",
            "a run in virtual time has no server whose profiler could run",
            "--profile",
            "leave it out",
        )
    remote = None if settings.store is None else object_store.open(settings.store)
    stored = None
    header_file = HeaderFile()
    every: Sequence[events.EventHandler] = (
        header_file,
        *hearers,
        Pages(),
        Profiling(),
        StopWatch(),
        CacheReset(),
        Names(),
        ShardStart(),
    )
    tell = events.broadcast(every)
    try:
        now = datetime.datetime.now().astimezone()
        with (
            contextlib.nullcontext(own)
            if own
            else taken(settings.out, workload.name, now) as folder,
            header_file.of_a_load(folder),
        ):
            run_whole = backend.run_function(settings)
            if run_whole is not None:
                summary = run_whole(workload, settings, folder, tell)
            else:
                probed = {} if known is None else known
                summary = _over_http(workload, settings, folder, every, header_file, probed)
        if remote is not None:
            remote.put(folder)
            stored = settings.store
    finally:
        tell(events.RunEnded(stored))
    return summary, folder


def _over_http(
    workload: Workload,
    settings: Settings,
    folder: Path,
    hearers: Sequence[events.EventHandler],
    header_file: HeaderFile,
    known: Known,
) -> Summary:
    import uvloop

    simulated, known_before, tell = (
        settings.backend.simulated,
        backend.known(settings),
        events.broadcast(hearers),
    )
    with contextlib.ExitStack() as cleanup:
        settings = step_targets.resolved(workload, cleanup.enter_context(backend.serving(settings)))
        senders = cleanup.enter_context(backend.senders(settings))
        runner, on_failure = (
            asyncio.Runner(loop_factory=uvloop.new_event_loop),
            contextlib.ExitStack(),
        )
        with runner, on_failure:
            found = runner.run(find_all(settings, workload, known, tell))
            on_failure.callback(tell, events.LoadEnded(None))
            tell(events.TargetsProbed(folder, settings, found))
            plan, begins = prepare(
                workload,
                settings,
                found,
                folder=folder,
                simulated=simulated,
                known=known_before,
                cores=senders.cores,
            )
            header = run_header.header(plan, workload, begins)
            notes = runner.run(senders.place(plan, tell))
            header = events.completed(
                hearers, msgspec.structs.replace(header, notes=(*header.notes, *notes))
            )
            tell(events.RunPlanned(plan, header))
            if settings.shard is not None:
                shard_schedule.write(folder, complete_schedule(plan.schedule))
                tell(events.WaitingFor(f"the common start at {settings.shard.start_at}"))
                runner.run(sleep_until_before_start(settings.shard, lead_s=PREPARATION_S))
            slots, tuning = plan.schedule.slot_count, settings.tuning
            many = slots is None or slots > tuning.compacted_rows
            compactor = Compactor(folder, frozen_s=tuning.helper_frozen_s, beside=many)
            on_failure.callback(compactor.close)
            share = runner.run(senders.run(plan, tell))
            on_failure.pop_all()
            header = events.concluded(hearers, header)
        return finish(plan, header, share, compactor, header_file.load)


def finish(
    plan: Plan,
    header: manifest.RunManifest,
    share: WorkerResult,
    compactor: Compactor,
    load: events.RunningLoad | None = None,
) -> Summary:
    """Read everything back, write the final header and the summary, and delete what is no longer needed.

    `load`: says whether and why the tool ended the run; otherwise it was the user.
    """
    folder = plan.job.folder
    release_blocks_above(LARGEST_KEPT_BLOCK)
    coded = reasons.make_note("bodies_late", {"bodies": share.late} if share.late else None)
    header = run_header.noted(header, coded)
    header = msgspec.structs.replace(header, notes=(*header.notes, *share.notes))
    for target, at_s in sorted(share.down.items()):
        name = header.targets[target].name or header.targets[target].url
        header = run_header.noted(
            header, reasons.make_note("target_gone", {"target": name, "at_s": at_s})
        )
    header = msgspec.structs.replace(
        header,
        ended=run_header.now(),
        state=_state(share, load),
        stopped_by=None if load is None else load.stopped_by,
        fingerprints=_with_sent_prompts(header.fingerprints, plan, share),
        cluster=share.cluster,
        shard=_with_digests(header.shard, share),
        host=msgspec.structs.replace(header.host, hot_path=share.hot_path or header.host.hot_path),
    )
    write_header(folder, header)
    compactor_deletes_rows = any(segment.first for segment in segments(folder))
    has_accounts = (folder / request_accounts.FILE).exists()
    compacted = compactor.finish() if compactor_deletes_rows or has_accounts else None
    if compacted and has_accounts and (unjoined := server_accounts.join(folder)) is not None:
        header = run_header.noted(header, reasons.make_note("accounts_unjoined", unjoined))
        write_header(folder, header)
    summary = run_folder.summary(folder)
    if not (compactor.finish() if compacted is None else compacted):
        header = run_header.noted(header, reasons.make_note("store_died", {"why": compactor.died}))
        write_header(folder, header)
        summary = run_folder.summary(folder)
    store.replace(folder / "summary.json", dump_summary(summary))
    if plan.job.settings.keep == "gaps":
        gaps.write(folder, gaps.spooled(folder))
    if not compactor.died:
        store.drop_spool(folder)
    checksums.write(folder)
    return summary


def _with_sent_prompts(
    fingerprints: manifest.Fingerprints, plan: Plan, share: WorkerResult
) -> manifest.Fingerprints:
    """Return the fingerprints of a run with those of its prompts and request bodies.

    Bodies have a fingerprint only if they do not depend on the replies of the server. A shard whose
    worker died has none of its prompts either: the part of the digest of that worker is missing.
    """
    slots = plan.schedule.slot_count
    has_prefetch = is_large(complete_schedule(plan.schedule), plan.job.settings.tuning)
    if share.prompts_count == slots and not has_prefetch:
        digest = Digest(share.prompts_total, share.prompts_count)
        bodies = Digest(share.bodies_total, share.prompts_count)
        is_scripted = plan.requests.history == "scripted"
        return msgspec.structs.replace(
            fingerprints,
            prompts=digest.hexdigest(),
            bodies=bodies.hexdigest() if is_scripted else "",
        )
    if plan.job.settings.shard is not None and slots is not None and not has_prefetch:
        return fingerprints
    return msgspec.structs.replace(
        fingerprints, prompts=fingerprint(plan.requests, None if has_prefetch else slots)
    )


def _with_digests(
    part: manifest.ShardPart | None, share: WorkerResult
) -> manifest.ShardPart | None:
    """Return the shard of a header with the sums from which a merge computes the fingerprints."""
    if part is None:
        return None
    return msgspec.structs.replace(
        part,
        prompts_total=f"{share.prompts_total:x}",
        bodies_total=f"{share.bodies_total:x}",
        prompts_count=share.prompts_count,
    )


def _state(share: WorkerResult, load: events.RunningLoad | None) -> str:
    if share.stopped or (load is not None and load.stopped_by):
        return "stopped"
    return (
        ("decided" if load is not None and load.decided else "interrupted")
        if share.interrupted
        else "finished"
    )
