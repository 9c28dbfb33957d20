"""What `loadgen run` says while and after it runs: first lines, progress, answer, exit code. Printing only."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.execution import run
from loadgen.execution.folder_names import new_folder
from loadgen.execution.plan import Settings, describe
from loadgen.metrics import summary_json
from loadgen.metrics.summary import Summary, exit_code
from loadgen.report import text
from loadgen.report.progress import Progress

if TYPE_CHECKING:
    from loadgen.execution.shared_counters import Counted
    from loadgen.report.dashboard import Dashboard
    from loadgen.results.manifest import Cluster, Header
    from loadgen.schedule.timetable import Schedule
    from loadgen.workload import Workload


def say(line: str) -> None:
    """A line of conversation: stderr."""
    print(line, file=sys.stderr, flush=True)


class Show:
    """One invocation's output. stdout is the answer, stderr the conversation."""

    def __init__(self, *, as_json: bool, plain: bool = False) -> None:
        self._as_json = as_json
        self._plain = plain
        self._progress: Progress | None = None
        self._live: Dashboard | None = None
        self._said: set[str] = set()

    def one(self, workload: Workload, settings: Settings) -> int:
        """A single run."""
        summary, folder = self.perform(workload, settings)
        if self._as_json:
            sys.stdout.buffer.write(summary_json.dump_summary(summary))
        else:
            print(text.render(summary, color=_color()))
            say(f"results in {folder}")
        return exit_code(summary)

    def levels(self, workloads: list[Workload], settings: Settings) -> int:
        """One level after the other, and a table of them all."""
        from datetime import datetime

        from loadgen.report import sweep
        from loadgen.search.sweep import curve

        parent = new_folder(settings.out, workloads[0].name, datetime.now().astimezone())
        named = []
        for i, workload in enumerate(workloads):
            level = next((stage.arrival.concurrency for stage in workload.stages if stage.measured), i)  # type: ignore[union-attr]
            store = settings.store and f"{settings.store}/c{level}"
            summary, _ = self.perform(workload, replace(settings, out=parent / f"c{level}", store=store))
            named.append((f"c{level}", summary))
            if summary.run.state == "interrupted":
                break
        summaries = [summary for _, summary in named]
        if self._as_json:
            sys.stdout.buffer.write(
                b"[" + b",\n".join(summary_json.dump_summary(summary).strip() for summary in summaries) + b"]\n"
            )
        else:
            print(sweep.render_text(curve(named)), end="", flush=True)  # as `loadgen report` of the folder
            say(f"results in {parent}")
        return max(exit_code(summary) for summary in summaries)

    def plans(self, workloads: list[Workload], settings: Settings) -> int:
        """What would be sent."""
        for workload in workloads:
            print(describe(workload, settings))
        return 0

    def perform(self, workload: Workload, settings: Settings) -> tuple[Summary, Path]:
        """One run with its conversation on stderr; prints no answer."""
        if settings.url is None and os.environ.get("OPENAI_BASE_URL"):
            self._once("note: OPENAI_BASE_URL is set and not used: only --url sends load to a server")
        try:
            found = run.execute(workload, settings, announce=self._announce, on_drive=self._follow, placed=self._placed)
            if settings.store is not None:
                say(f"stored in {settings.store}")
            return found
        finally:
            if self._progress is not None:
                self._progress.clear()
            if self._live is not None:
                self._live.close()
                self._live = None

    def _announce(self, header: Header, timetable: Schedule, folder: Path) -> None:
        target, *others = header.targets
        where = target.url
        if target.simulated:
            where = f"{target.name} (a SIMULATED server, not a measurement of any real one)"
        self._once(f"target: {where}, model {target.model}, server {target.server}, api {header.api}")
        for other in others:
            self._once(f"        {other.name or other.url}")
        for stage in header.stages:
            bounds = [f"{stage.slots:,} requests" if stage.slots is not None else ""]
            if stage.end_ns is not None:
                bounds.append(f"{(stage.end_ns - stage.start_ns) / 1e9:g} s")
            note = "" if stage.measured else ", warm-up, not measured"
            say(f"load: {stage.arrival}: {', '.join(b for b in bounds if b)}{note}")
        if header.server_pages is not None:
            self._once(f"server metrics: {', '.join(header.server_pages) or 'none'}")
        for note in header.notes:
            self._once(f"note: {note}")
        say(f"seed: {header.seed}  results: {folder}")
        if self._plain or not sys.stderr.isatty():
            self._progress = Progress(timetable.slots, timetable.horizon_ns, plain=self._plain)
        elif not self._virtual(header):
            from loadgen.report.dashboard import Dashboard

            self._live = Dashboard(folder)

    def _once(self, line: str) -> None:
        """What every level would say alike."""
        if line not in self._said:
            self._said.add(line)
            say(line)

    def _placed(self, cluster: Cluster) -> None:
        nodes = ", ".join(dict.fromkeys(f"{one.node} ({one.address})" for one in cluster.workers))
        say(f"cluster: {len(cluster.workers)} worker(s) on {cluster.nodes} node(s): {nodes}")
        say(f"start: common to all workers within ±{cluster.start_bound_ms:.3f} ms, by exchanges with their clocks")

    @staticmethod
    def _virtual(header: Header) -> bool:
        """Over before there is anything to see."""
        return header.targets[0].url.startswith("sim:")

    def _follow(self, drive: Counted) -> None:
        if self._progress is not None:
            self._progress.follow(drive)


def _color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
