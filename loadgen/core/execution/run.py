"""One run, from a checked workload to its summary: everything before the clock starts and after it stops.

IO, in this order: start the target if its backend does that, probe the targets, make the plan, write the header,
carry it out (`backend.py`), read everything back, compute the summary. `driver.py` works while the clock runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from loadgen_sdk.dialects.quirks import VALUES

from loadgen.backends import BACKENDS
from loadgen.core import run_folder
from loadgen.core.errors import Fault, Faults, UserError
from loadgen.core.execution import backend, run_header, step_targets
from loadgen.core.execution.events import (
    LoadStarted,
    RunEnded,
    RunEvent,
    RunningLoad,
    StepBegun,
    Tell,
    WorkersPlaced,
    silent,
)
from loadgen.core.execution.folder_names import taken
from loadgen.core.execution.plan import Plan, Settings, prepare
from loadgen.core.execution.probing import Known, find_all
from loadgen.core.execution.share import Share, large
from loadgen.core.execution.steering import MakeSteering
from loadgen.core.execution.stop_watch import watch
from loadgen.core.followers import cache_reset, server_accounts
from loadgen.core.followers.compactor_process import Compactor
from loadgen.core.followers.profiler import Profiler, span
from loadgen.core.followers.scraper import Scraper
from loadgen.core.metrics import reasons
from loadgen.core.metrics.summary import Summary, dump_summary
from loadgen.core.requests import prompts
from loadgen.core.results import checksums, manifest, object_store, store
from loadgen.core.results.record import WITH_UNFINISHED
from loadgen.core.results.spool import segments
from loadgen.core.server_metrics import request_accounts
from loadgen.core.workload import Workload

Execute = Callable[..., tuple[Summary, Path]]
"""`execute`, or what stands for it: (workload, settings, tell) -> (summary, folder)."""


def execute(
    workload: Workload,
    settings: Settings,
    tell: Tell = silent,
    *,
    known: Known | None = None,
    own: Path | None = None,
    steering: MakeSteering | None = None,
) -> tuple[Summary, Path]:
    """Carry out one run; returns its summary and its folder. Raises Fault or Faults if the run is not possible.

    `tell` hears the events of the run. `known`: what was found out about targets, for all runs of one command, each of
    which adds to it and asks no target again. `own`: the folder of the run, where the caller has taken it.
    `steering`: decides the load while it goes; the workload has its first step.
    """
    row = settings.backend
    if settings.profile is not None and row.virtual:
        raise UserError(
            "unsupported", "a run in virtual time has no server whose profiler could run", "--profile", "leave it out"
        )
    remote = None if settings.store is None else object_store.open(settings.store)
    stored = None
    try:
        now = datetime.datetime.now().astimezone()
        with (
            contextlib.nullcontext(own) if own else taken(settings.out, workload.name, now) as folder,
            _no_header_without_load(folder, tell) as hear,
        ):
            if row.run:
                summary = BACKENDS.function(row, row.run)(workload, settings, folder, hear, steering)
            else:
                summary = _over_http(workload, settings, folder, hear, {} if known is None else known, steering)
            if steering is not None:
                steering.finish(folder)
        if remote is not None:
            remote.put(folder)
            stored = settings.store
    finally:
        tell(RunEnded(stored))
    return summary, folder


@contextlib.contextmanager
def _no_header_without_load(folder: Path, tell: Tell) -> Iterator[Tell]:
    """Yields `tell`. A Fault or a Ctrl-C inside before the load starts removes the header: nothing was measured."""
    started = False

    def hear(event: RunEvent) -> None:
        nonlocal started
        started = started or isinstance(event, LoadStarted)
        tell(event)

    try:
        yield hear
    except (Fault, Faults, KeyboardInterrupt):
        if not started:
            (folder / "run.json").unlink(missing_ok=True)
        raise


def _over_http(
    workload: Workload, settings: Settings, folder: Path, tell: Tell, known: Known, steering: MakeSteering | None
) -> Summary:
    import uvloop

    simulated, known_before = settings.backend.simulated, backend.known(settings)
    with contextlib.ExitStack() as cleanup:
        settings = step_targets.resolved(workload, cleanup.enter_context(backend.serving(settings)))
        senders = cleanup.enter_context(backend.senders(settings))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(find_all(settings, known, workload.timeout_ns / 1e9, tell))
            scraper = cleanup.enter_context(contextlib.closing(Scraper(folder, settings.pages, found)))
            profiler = None
            if settings.profile is not None:
                profiler = cleanup.enter_context(contextlib.closing(Profiler(settings.pages, found)))
            plan, begins = prepare(
                workload, settings, found, folder=folder, simulated=simulated, known=known_before, cores=senders.cores,
                steering=steering,
            )  # fmt: skip
            pages = scraper.found()
            header = run_header.header(plan, workload, begins, accounts=bool(pages.accounts))
            notes = runner.run(senders.place(plan))
            header = msgspec.structs.replace(header, notes=(*header.notes, *notes))
            header = msgspec.structs.replace(header, server_pages=scraper.pages(), energy_pages=pages.energy)
            if settings.profile is not None:
                span(settings.profile, header.stages)
            run_header.announce(plan, header, tell)
            if settings.reset_cache:
                runner.run(cache_reset.empty(settings, [one for one in found if one.target.api not in VALUES]))
            load: RunningLoad | None = None
            watching: asyncio.Task[None] | None = None

            def hear(event: RunEvent) -> None:
                nonlocal load, watching
                if isinstance(event, WorkersPlaced):
                    _write(folder, msgspec.structs.replace(header, cluster=event.cluster))
                elif isinstance(event, LoadStarted):
                    scraper.begin(event.start_ns)
                    if profiler is not None and settings.profile is not None:
                        profiler.begin(event.start_ns, header.stages, settings.profile)
                    load = event.load
                    if workload.stop_when:
                        until_ns = None if steering is not None else plan.timetable.horizon_ns
                        watching = asyncio.get_running_loop().create_task(
                            watch(workload.stop_when, folder, event, until_ns)
                        )
                elif isinstance(event, StepBegun):  # a run that is killed has its steps
                    _write(folder, run_header.of_steps(header, plan, *event, goes_on=True))
                tell(event)

            compactor = Compactor(folder, frozen_s=settings.tuning.helper_frozen_s)
            try:
                share = runner.run(senders.run(plan, hear))
            except BaseException:
                compactor.close()
                raise
            finally:
                if watching is not None:
                    watching.cancel()
                if profiler is not None:
                    header = run_header.noted(header, profiler.notes())
        scraper.close()
        return finish(plan, header, share, compactor, load)


def finish(
    plan: Plan, header: manifest.Header, share: Share, compactor: Compactor, load: RunningLoad | None = None
) -> Summary:
    """Read everything back, write the final header and the summary, and delete what is no longer needed.

    `load`: says whether and why the tool ended the run; otherwise it was the user.
    """
    folder, timetable = plan.job.folder, plan.timetable
    bodies = ""
    if share.steps is not None:
        timetable = share.steps.timetable
        header = run_header.of_steps(header, plan, *share.steps)
    if large(timetable, plan.job.settings.tuning) or share.steps is not None:
        fingerprint = prompts.fingerprint(plan.requests, None)
    elif share.prompts_count == timetable.slots:
        fingerprint = prompts.Digest(share.prompts_total, share.prompts_count).hexdigest()
        if plan.requests.history == "scripted":  # else bodies carry the server's replies
            bodies = prompts.Digest(share.bodies_total, share.prompts_count).hexdigest()
    else:  # a load without end, or a worker died and its part of the digest is missing
        fingerprint = prompts.fingerprint(plan.requests, timetable.slots)
    coded = reasons.coded("bodies_late", {"bodies": share.late} if share.late else None)
    header = run_header.noted(header, coded)
    header = msgspec.structs.replace(header, notes=(*header.notes, *share.notes))
    for target, at_s in sorted(share.down.items()):
        name = header.targets[target].name or header.targets[target].url
        header = run_header.noted(header, reasons.coded("target_gone", {"target": name, "at_s": at_s}))
    header = msgspec.structs.replace(
        header,
        ended=run_header.now(),
        state=_state(share, load),
        stopped_by=None if load is None else load.stopped_by,
        fingerprints=msgspec.structs.replace(header.fingerprints, prompts=fingerprint, bodies=bodies),
        cluster=share.cluster,
        host=msgspec.structs.replace(header.host, hot_path=share.hot_path or header.host.hot_path),
    )
    _write(folder, header)
    compactor_deletes_rows = header.keep != "raw" or any(segment.first for segment in segments(folder))
    has_accounts = (folder / request_accounts.FILE).exists()
    compacted = compactor.finish() if compactor_deletes_rows or has_accounts else None
    if compacted and has_accounts and (unjoined := server_accounts.join(folder)) is not None:
        header = run_header.noted(header, reasons.coded("accounts_unjoined", unjoined))
        _write(folder, header)
    summary = run_folder.summary(folder)
    if not (compactor.finish() if compacted is None else compacted):
        header = run_header.noted(header, reasons.coded("store_died", {"why": compactor.died}))
        _write(folder, header)
        summary = run_folder.summary(folder)
    if summary.requests.unfinished or summary.warmup.unfinished:
        _write(folder, msgspec.structs.replace(header, schema=WITH_UNFINISHED))
    store.replace(folder / "summary.json", dump_summary(summary))
    if not compactor.died:
        store.drop_spool(folder)
    checksums.write(folder)
    return summary


def _state(share: Share, load: RunningLoad | None) -> str:
    if share.stopped or (load is not None and load.stopped_by):
        return "stopped"
    return ("decided" if load is not None and load.decided else "interrupted") if share.interrupted else "finished"


def _write(folder: Path, header: manifest.Header) -> None:
    store.replace(folder / "run.json", manifest.encode(header))
