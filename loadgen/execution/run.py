"""One run, from a checked workload to its summary: what happens before the clock starts and after it has stopped.

IO, in this order: start the embedded endpoint if there is no URL, probe the target, build timetable and bodies, write
the header, drive (here, or in `fanout`), read everything back, judge. What happens while the clock runs is `drive.py`.
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
from loadgen.results import manifest, object_store, store
from loadgen.schedule.timetable import Schedule
from loadgen.server_metrics import scraper as scrape
from loadgen.workload import Workload

SETTLE_NS = 20_000_000  # from "everything is ready" to instant 0


def finish(job: Job, header: manifest.Header, share: Share, recorder: Compactor, timetable: Schedule) -> Summary:
    """Read everything back, judge it, and leave the folder in order."""
    folder = job.folder
    digest = prompts.Digest(share.prompts_total, share.prompts_count)
    if large(timetable):
        fingerprint = prompts.fingerprint(plan(job)[1], None)
    elif share.prompts_count == timetable.slots:
        fingerprint = digest.hexdigest()
    else:  # a load without end, or a worker that died with its part of the digest
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
        state="stopped" if share.stopped else "interrupted" if share.interrupted else "finished",
        fingerprints=msgspec.structs.replace(header.fingerprints, prompts=fingerprint),
        notes=notes,
    )
    store.replace(folder / "run.json", manifest.encode(header))
    moving = header.keep != "raw" or any(one.first for one in store.segments(folder))  # they come and go
    whole = recorder.finish() if moving else None
    summary = run_folder.summary(folder)
    from loadgen.metrics import summary_json

    store.replace(folder / "summary.json", summary_json.dump_summary(summary))
    if recorder.finish() if whole is None else whole:
        store.drop_spool(folder)
    return summary


def execute(
    workload: Workload,
    settings: Settings,
    *,
    on_drive: Callable[[Counted], Any] | None = None,
    announce: Callable[[manifest.Header, Schedule, Path], None] | None = None,
    placed: Callable[[manifest.Cluster], None] | None = None,
) -> tuple[Summary, Path]:
    """The whole of it: one run and its folder. Raises Fault or Faults for whatever stands in its way.

    `on_drive` is called in a running event loop when the load begins, with what has the `counters` of all workers;
    `placed`, on a cluster, with where they are, shortly before.
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
    with contextlib.ExitStack() as ends:
        if simulated:
            simulation = embedded.start(Options(**settings.embedded))
            ends.callback(simulation.stop)
            settings = replace(settings, url=simulation.url)
        cluster = None
        if settings.ray is not None:
            from loadgen.execution.backends import ray

            cluster = ends.enter_context(ray.connected(settings.ray))
        away = None if settings.store is None else object_store.open(settings.store)
        now = datetime.datetime.now(datetime.UTC).astimezone()
        folder = unused(settings.out, workload.name, now)
        ends.enter_context(store.nothing_left(folder))
        folder.mkdir(parents=True, exist_ok=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(find_all(settings))
            scraper = ends.enter_context(contextlib.closing(scrape.Scraper(folder, settings.pages, found)))
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

                    def know(where: manifest.Cluster) -> None:
                        nonlocal header
                        if header.cluster is None and placed is not None:
                            placed(where)
                        header = msgspec.structs.replace(header, cluster=where)
                        store.replace(folder / "run.json", manifest.encode(header))

                    share = runner.run(cluster.run(job, timetable, on_drive, scraper.begin, know))
                elif job.settings.workers > 1:
                    from loadgen.execution.backends import local

                    share = runner.run(local.run(job, timetable, job.settings.workers, on_drive, scraper.begin))
                else:

                    async def gate() -> int:
                        start_ns = monotonic_ns() + SETTLE_NS
                        scraper.begin(start_ns)
                        return start_ns

                    share = runner.run(work(job, 0, 1, gate, on_drive))
            except BaseException:
                recorder.finish()
                raise
        scraper.close()
        summary = finish(job, header, share, recorder, timetable)
        if away is not None:
            away.put(folder)
        return summary, folder
