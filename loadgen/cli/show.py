"""The output of `loadgen run`: first lines, progress, answer, exit code. Only printing."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.execution import lane_start, run
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
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


class Show:
    """The output of one command: the answer goes to stdout, everything else to stderr."""

    def __init__(self, *, as_json: bool, plain: bool = False) -> None:
        self._as_json = as_json
        self._plain = plain
        self._progress: Progress | None = None
        self._dashboard: Dashboard | None = None
        self._printed: set[str] = set()

    def one(self, workload: Workload, settings: Settings) -> int:
        """Perform one run and print its summary. Returns the exit code."""
        summary, folder = self.perform(workload, settings)
        if self._as_json:
            sys.stdout.buffer.write(summary_json.dump_summary(summary))
        else:
            print(text.render(summary, color=_color()))
            say(f"results in {folder}")
        return exit_code(summary)

    def levels(self, workloads: list[Workload], settings: Settings) -> int:
        """Run one level of concurrency after the other and print a table of all. Returns the highest exit code."""
        from datetime import datetime

        from loadgen.report import sweep
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
        summaries = [summary for _, summary in named_summaries]
        if self._as_json:
            sys.stdout.buffer.write(
                b"[" + b",\n".join(summary_json.dump_summary(summary).strip() for summary in summaries) + b"]\n"
            )
        else:
            # The same table as `loadgen report` of the folder.
            print(sweep.render_text(curve(named_summaries)), end="", flush=True)
            say(f"results in {parent}")
        return max(exit_code(summary) for summary in summaries)

    def plans(self, workloads: list[Workload], settings: Settings) -> int:
        """Print what would be sent."""
        for workload in workloads:
            print(describe(workload, settings))
        return 0

    def perform(self, workload: Workload, settings: Settings) -> tuple[Summary, Path]:
        """Perform one run with messages on stderr. Returns summary and folder; prints no answer."""
        if settings.url is None and os.environ.get("OPENAI_BASE_URL"):
            self._say_once("note: OPENAI_BASE_URL is set and not used: only --url sends load to a server")
        try:
            summary_and_folder = run.execute(
                workload, settings, announce=self._announce, on_drive=self._follow, placed=self._announce_cluster
            )
            if settings.store is not None:
                say(f"stored in {settings.store}")
            return summary_and_folder
        finally:
            if self._progress is not None:
                self._progress.clear()
            if self._dashboard is not None:
                self._dashboard.close()
                self._dashboard = None

    def _announce(self, header: Header, timetable: Schedule, folder: Path) -> None:
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
        if header.server_pages is not None:
            self._say_once(f"server metrics: {', '.join(header.server_pages) or 'none'}")
        for note in header.notes:
            self._say_once(f"note: {note}")
        say(f"seed: {header.seed}  results: {folder}")
        if self._plain or not sys.stderr.isatty():
            self._progress = Progress(timetable.slots, timetable.horizon_ns, plain=self._plain)
        elif not self._is_virtual(header):
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

    @staticmethod
    def _is_virtual(header: Header) -> bool:
        """Whether the run is in virtual time, which is too fast for a live view."""
        return header.targets[0].url.startswith("sim:")

    def _follow(self, counters: Counted) -> None:
        if self._progress is not None:
            self._progress.follow(counters)


def _color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
