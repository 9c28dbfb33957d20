"""One run, from a checked workload to its summary: everything before the clock starts and after it stops.

IO, in this order: start the embedded endpoint if there is no URL, probe the targets, build timetable and bodies, write
the header, run the load (`backends/`), read everything back, compute the summary. `driver.py` works while the clock
runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec

from loadgen import run_folder
from loadgen.errors import UserError
from loadgen.execution.backends.single import Share, large, work
from loadgen.execution.compactor import Compactor
from loadgen.execution.folder_names import unused
from loadgen.execution.plan import Job, Settings, plan, prepare
from loadgen.execution.probing import find_all
from loadgen.execution.shared_counters import Counted
from loadgen.metrics.summary import Summary
from loadgen.requests import prompts
from loadgen.results import checksums, manifest, object_store, store
from loadgen.results.record import WITH_UNFINISHED
from loadgen.results.spool import segments
from loadgen.schedule.timetable import Schedule
from loadgen.server_metrics import scraper as scrape
from loadgen.workload import Workload

SETTLE_NS = 20_000_000  # from the moment when everything is ready to instant 0


def finish(
    job: Job, header: manifest.Header, share: Share, recorder: Compactor, timetable: Schedule, decided: bool = False
) -> Summary:
    """Read everything back, write the final header and the summary, and delete what is no longer needed.

    `decided`: a search ended the run because its outcome was certain; it was not the user.
    """
    folder = job.folder
    digest = prompts.Digest(share.prompts_total, share.prompts_count)
    bodies = ""
    if large(timetable):
        fingerprint = prompts.fingerprint(plan(job)[1], None)
    elif share.prompts_count == timetable.slots:
        fingerprint = digest.hexdigest()
        turns = getattr(job.workload.requests, "turns", None)
        if turns is None or turns.history == "scripted":  # else bodies carry the server's replies
            bodies = prompts.Digest(share.bodies_total, share.prompts_count).hexdigest()
    else:  # a load without end, or a worker died and its part of the digest is missing
        fingerprint = prompts.fingerprint(plan(job)[1], timetable.slots)
    notes = header.notes
    if share.late:
        notes = (*notes, f"{share.late} bodies were built in the sending loop, which can delay sends")
    notes = (*notes, *share.notes)
    for target, at_s in sorted(share.down.items()):
        name = header.targets[target].name or header.targets[target].url
        notes = (*notes, f"target {name} stopped answering {at_s:.1f} s after the start")
    header = msgspec.structs.replace(
        header,
        ended=datetime.datetime.now(datetime.UTC).astimezone().isoformat(timespec="milliseconds"),
        state=_state(share, decided),
        fingerprints=msgspec.structs.replace(header.fingerprints, prompts=fingerprint, bodies=bodies),
        notes=notes,
    )
    store.replace(folder / "run.json", manifest.encode(header))
    segments_change = header.keep != "raw" or any(
        segment.first for segment in segments(folder)
    )  # the compactor deletes segments
    compacted = recorder.finish() if segments_change else None
    summary = run_folder.summary(folder)
    if summary.requests.unfinished or summary.warmup.unfinished:
        header = msgspec.structs.replace(header, schema=WITH_UNFINISHED)
        store.replace(folder / "run.json", manifest.encode(header))
    from loadgen.metrics import summary_json

    store.replace(folder / "summary.json", summary_json.dump_summary(summary))
    if recorder.finish() if compacted is None else compacted:
        store.drop_spool(folder)
    checksums.write(folder)
    return summary


def _state(share: Share, decided: bool) -> str:
    if share.stopped:
        return "stopped"
    return ("decided" if decided else "interrupted") if share.interrupted else "finished"


def execute(
    workload: Workload,
    settings: Settings,
    *,
    on_drive: Callable[[Counted], Any] | None = None,
    announce: Callable[[manifest.Header, Schedule, Path], None] | None = None,
    placed: Callable[[manifest.Cluster], None] | None = None,
    decided: Callable[[], bool] = lambda: False,
) -> tuple[Summary, Path]:
    """Carry out one run; returns its summary and its folder. Raises Fault or Faults if the run is not possible.

    `announce` is called when the header is written, before the load. `on_drive` is called in a running event loop when
    the load begins, with an object that has the `counters` of all workers. On a cluster, `placed` is called shortly
    before the start with the placement of the workers. `decided` says at the end whether the caller itself stopped the
    load, through `on_drive`, because it had seen enough: then the run is not called interrupted.
    """
    if settings.url is not None and settings.url.startswith("sim:"):
        if settings.ray is not None:
            raise UserError(f"{settings.url} runs in virtual time, in one process", "--ray", "leave --ray out")
        from loadgen.execution.backends import virtual

        return virtual.execute(workload, settings, settings.url.removeprefix("sim:"), announce=announce)
    import uvloop

    from loadgen.sim.server import embedded
    from loadgen.sim.server.options import Options

    simulated = settings.url is None
    with contextlib.ExitStack() as cleanup:
        if simulated:
            simulation = embedded.start(Options(**settings.embedded))
            cleanup.callback(simulation.stop)
            settings = replace(settings, url=simulation.url)
        cluster = None
        if settings.ray is not None:
            from loadgen.execution.backends import ray

            cluster = cleanup.enter_context(ray.connected(settings.ray))
        remote = None if settings.store is None else object_store.open(settings.store)
        now = datetime.datetime.now(datetime.UTC).astimezone()
        folder = unused(settings.out, workload.name, now)
        cleanup.enter_context(store.nothing_left(folder))
        folder.mkdir(parents=True, exist_ok=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(find_all(settings))
            scraper = cleanup.enter_context(contextlib.closing(scrape.Scraper(folder, settings.pages, found)))
            job, header, timetable = prepare(
                workload, settings, found,
                simulated=simulated, folder=folder, cores=None if cluster is None else cluster.cores,
            )  # fmt: skip
            if cluster is not None:
                notes = runner.run(cluster.place(job, timetable, simulated=simulated))
                header = msgspec.structs.replace(header, notes=(*header.notes, *notes))
            header = msgspec.structs.replace(header, server_pages=scraper.pages())
            store.replace(folder / "run.json", manifest.encode(header))
            if announce is not None:
                announce(header, timetable, folder)
            recorder = Compactor(folder)
            try:
                if cluster is not None:

                    def on_placed(placement: manifest.Cluster) -> None:
                        nonlocal header
                        if header.cluster is None and placed is not None:
                            placed(placement)
                        header = msgspec.structs.replace(header, cluster=placement)
                        store.replace(folder / "run.json", manifest.encode(header))

                    share = runner.run(cluster.run(job, timetable, on_drive, scraper.begin, on_placed))
                elif job.settings.workers > 1:
                    from loadgen.execution.backends import local

                    share = runner.run(local.run(job, timetable, job.settings.workers, on_drive, scraper.begin))
                else:

                    async def choose_start() -> int:
                        start_ns = monotonic_ns() + SETTLE_NS
                        scraper.begin(start_ns)
                        return start_ns

                    share = runner.run(work(job, 0, 1, choose_start, on_drive))
            except BaseException:
                recorder.finish()
                raise
        scraper.close()
        summary = finish(job, header, share, recorder, timetable, decided())
        if remote is not None:
            remote.put(folder)
        return summary, folder
