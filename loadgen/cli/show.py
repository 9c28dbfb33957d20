"""The output of `loadgen run`: first lines, progress, answer, exit code. Only printing."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen import format, seeds
from loadgen.execution import lane_start, run
from loadgen.execution.events import LoadStarted, ProbeWaits, RunEvent, RunPlanned, Tell, WorkersPlaced, silent
from loadgen.execution.folder_names import new_folder
from loadgen.execution.plan import Settings
from loadgen.execution.run_header import describe
from loadgen.metrics.summary import Summary, dump_summary, exit_code
from loadgen.report import text
from loadgen.report.progress import Progress

if TYPE_CHECKING:
    from loadgen.metrics.repeats import Repetition
    from loadgen.report.dashboard import Dashboard
    from loadgen.results.manifest import Cluster
    from loadgen.workload import Workload


def say(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode(), flush=True)


def write_file(path: Path, data: str | bytes, flag: str) -> None:
    """Write a file that the user named with `flag`. Raises UserError."""
    from loadgen.errors import UserError

    try:
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", f"{flag} {path}") from None


def in_color() -> bool:
    """Whether stdout is a terminal that wants colour."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def say_changed(folder: Path) -> None:
    """Say which files of a results folder are not as the command that wrote it left them; nothing when all are."""
    from loadgen.results import checksums

    if not folder.is_dir():
        return
    differences = checksums.changed(folder)
    if not differences:
        return
    listed = ", ".join(f"{name} ({what})" for name, what in list(differences.items())[:5])
    more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
    say(
        f"note: {folder} is not as it was written: {listed}{more}. The figures below are of the files as they are now. "
        f"To see every change: cd {folder} && sha256sum -c {checksums.FILE}"
    )


class Show:
    """The output of one command: the answer goes to stdout, everything else to stderr."""

    def __init__(self, *, as_json: bool, plain: bool = False, strict: bool = False) -> None:
        self._as_json = as_json
        self._plain = plain
        self._strict = strict  # an undecided SLO is exit code 3
        self._progress: Progress | None = None
        self._dashboard: Dashboard | None = None
        self._printed: set[str] = set()
        self._execute = partial(run.execute, known={})

    def one(self, workload: Workload, settings: Settings) -> int:
        """Perform one run and print its summary. Returns the exit code."""
        summary, folder = self.perform(workload, settings)
        if self._as_json:
            sys.stdout.buffer.write(dump_summary(summary))
        else:
            print(text.render(summary, color=in_color()))
            say(f"results in {folder}")
        return exit_code(summary, strict=self._strict)

    def levels(self, workloads: list[Workload], settings: Settings) -> int:
        """Run one level of concurrency after the other and print a table of all. Returns the highest exit code."""
        from datetime import datetime

        from loadgen.report import sweep
        from loadgen.results import checksums
        from loadgen.search.sweep import curve

        parent = new_folder(settings.out, workloads[0].name, datetime.now().astimezone())
        named_summaries = []
        for i, workload in enumerate(workloads):
            level = next((stage.arrival.concurrency for stage in workload.stages if stage.measured), i)  # type: ignore[union-attr]
            store = settings.store and f"{settings.store}/c{level}"
            summary, _ = self.perform(workload, replace(settings, out=parent / f"c{level}", store=store))
            named_summaries.append((f"c{level}", summary))
            if summary.run.state == "interrupted":
                break
        checksums.write(parent)
        summaries = [summary for _, summary in named_summaries]
        if self._as_json:
            sys.stdout.buffer.write(b"[" + b",\n".join(dump_summary(summary).strip() for summary in summaries) + b"]\n")
        else:
            # The same table as `loadgen report` of the folder.
            print(sweep.render_text(curve(named_summaries)), end="", flush=True)
            say(f"results in {parent}")
        return max(exit_code(summary, strict=self._strict) for summary in summaries)

    def repeats(self, workload: Workload, settings: Settings, how: Repetition) -> int:
        """Perform several runs of one load and print their summary. Returns the highest exit code."""
        from datetime import datetime

        from loadgen.cli import repeats
        from loadgen.errors import INTERRUPTED
        from loadgen.execution.repeats import seeded
        from loadgen.report import repeats as table

        parent = new_folder(settings.out, workload.name, datetime.now().astimezone())
        repeats.refuse_used(parent)

        def one(number: int, folder: Path) -> Summary:
            store = settings.store and f"{settings.store}/{folder.name}"
            summary, _ = self.perform(seeded(workload, number), replace(settings, out=folder, store=store))
            return summary

        named = repeats.repeat(how, parent, one, virtual=settings.virtual, say=say)
        made = repeats.finish(parent, how, named)
        if self._as_json:
            print_json(made)
        else:
            print(text.render_levels([summary for _, summary in named], color=in_color()), end="")
            print("\n" + table.render_text(made), end="", flush=True)
        say(f"results in {parent}; a folder of repeats is one side of: loadgen compare {parent} OTHER")
        codes = [exit_code(summary, strict=self._strict) for _, summary in named]
        return max(codes) if how.enough([summary for _, summary in named]) else max(*codes, INTERRUPTED)

    def plans(self, workloads: list[Workload], settings: Settings) -> int:
        """Print what would be sent."""
        for workload in workloads:
            print(describe(workload, settings))
        return 0

    def perform(self, workload: Workload, settings: Settings, tell: Tell = silent) -> tuple[Summary, Path]:
        """Perform one run with messages on stderr. Returns summary and folder; prints no answer."""

        def hear(event: RunEvent) -> None:
            self._hear(event)
            tell(event)

        if settings.url is None and os.environ.get("OPENAI_BASE_URL"):
            self._say_once("note: OPENAI_BASE_URL is set and not used: only --url sends load to a server")
        try:
            summary_and_folder = self._execute(workload, settings, hear)
            if settings.store is not None:
                say(f"stored in {settings.store}")
            return summary_and_folder
        finally:
            if self._progress is not None:
                self._progress.clear()
            if self._dashboard is not None:
                self._dashboard.close()
                self._dashboard = None

    def _hear(self, event: RunEvent) -> None:
        match event:
            case ProbeWaits(targets, timeout_s):
                say(f"waiting for the first answer of {targets}; it may take {timeout_s:g} s (--timeout)")
            case RunPlanned():
                self._announce(event)
            case WorkersPlaced(cluster):
                self._announce_cluster(cluster)
            case LoadStarted():
                if self._progress is not None:
                    self._progress.follow(event.load.counters)

    def _announce(self, planned: RunPlanned) -> None:
        plan, header = planned
        timetable, folder = plan.timetable, plan.job.folder
        target, *other_targets = header.targets
        target_text = target.url
        if target.simulated:
            target_text = f"{target.name} (a SIMULATED server, not a measurement of any real one)"
        self._say_once(f"target: {target_text}, model {target.model}, server {target.server}, api {header.api}")
        for other in other_targets:
            self._say_once(f"        {other.name or other.url}")
        for stage in header.stages:
            bounds = [f"{stage.slots:,} requests" if stage.slots is not None else ""]
            if stage.end_ns is not None:
                bounds.append(f"{(stage.end_ns - stage.start_ns) / 1e9:g} s")
            note = "" if stage.measured else ", warm-up, not measured"
            if stage.name == lane_start.FIRST_ROUND:
                bounds, note = ["the first request of each lane"], ", not measured"
            if begin := lane_start.words(stage.ramp_s, stage.ramp_from, stage.concurrency):
                note += f"; {begin}"
            say(f"load: {stage.arrival}: {', '.join(bound for bound in bounds if bound)}{note}")
        for target in header.targets:
            if target.software:
                self._say_once(f"software: {', '.join(target.software)}")
        for head, texts in format.said(header.metadata).items():
            self._say_once(f"{head.lower()}: {', '.join(texts)}")
        if header.server_pages is not None:
            self._say_once(f"server metrics: {', '.join(header.server_pages) or 'none'}")
        for note in header.notes:
            self._say_once(f"note: {note}")
        say(f"{seeds.words(header.seed, header.salt)}  results: {folder}")
        if self._plain or not sys.stderr.isatty():
            drain_ns = None if header.grace_s is None else round(header.grace_s * 1e9)
            self._progress = Progress(timetable.slots, timetable.horizon_ns, drain_ns=drain_ns, plain=self._plain)
        elif header.client != "virtual":  # which is too fast for a live view
            from loadgen.report.dashboard import Dashboard

            self._dashboard = Dashboard(folder)

    def _say_once(self, line: str) -> None:
        """Print a line that is equal for every level only once."""
        if line not in self._printed:
            self._printed.add(line)
            say(line)

    def _announce_cluster(self, cluster: Cluster) -> None:
        nodes = ", ".join(dict.fromkeys(f"{worker.node} ({worker.address})" for worker in cluster.workers))
        say(f"cluster: {len(cluster.workers)} worker(s) on {cluster.nodes} node(s): {nodes}")
        say(f"start: common to all workers within ±{cluster.start_bound_ms:.3f} ms, by exchanges with their clocks")
