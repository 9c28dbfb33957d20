"""One side of a comparison: a run, repeats of a run, or the metrics that another tool reported.

Pure. `loadgen.compare` compares two sides.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import Columns, is_measured
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.token_deadlines import DeadlineCounts
from loadgen.core.results.manifest import RunManifest, TargetFacts
from loadgen.runs.slo_text import list_objectives

DATE_AND_TIME_LENGTH = len("2026-11-29T22:08:38")


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a side.

    Attributes:
        name: The name of its directory.
        summary: Its summary.
        manifest: Its manifest. None if only the summary was kept.
        rows: Its records (`record.ROW`) of all stages. None if only the summary was kept.
        deadline_counts: The token deadlines of each response, None if its token times or the
            deadlines are not known.
    """

    name: str
    summary: Summary
    manifest: RunManifest | None = None
    rows: NDArray[np.void] | None = None
    deadline_counts: DeadlineCounts | None = None

    @property
    def targets(self) -> tuple[TargetFacts, ...]:
        """The targets that received the load."""
        return tuple(part.target for part in self.summary.targets) or (self.summary.target,)

    def measured(self) -> Columns | None:
        """Return the records of the measured stages as columns, or None without records."""
        if self.rows is None or self.manifest is None:
            return None
        return Columns(self.rows, is_measured(self.manifest, self.rows))


class SideFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a side of a comparison is, as text. A field is empty if it is not known.

    Attributes:
        name: The name of the side.
        tool: The tool that measured it, with its version.
        workload: The workload.
        load: The load.
        model: The model.
        server: The server with its version.
        url: The address of the target.
        started: When the first run started.
        slo: The objectives.
        runs: The number of runs.
    """

    name: str = ""
    tool: str = ""
    workload: str = ""
    load: str = ""
    model: str = ""
    server: str = ""
    url: str = ""
    started: str = ""
    slo: str = ""
    runs: int = 0


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison.

    Attributes:
        name: The name of the side.
        runs: The runs. Empty for a result of another tool.
        reported_metrics: The metrics that another tool reported, by their paths.
        notes: What the reader of the comparison has to know about the side.
        reported_facts: What else another tool reported.
    """

    name: str
    runs: tuple[ComparedRun, ...] = ()
    reported_metrics: dict[str, float] = {}
    notes: tuple[str, ...] = ()
    reported_facts: SideFacts = SideFacts()

    @property
    def facts(self) -> SideFacts:
        """The texts that identify one side of a comparison: its tool, workload, server, and so on.

        If its runs have different values, such as two models, the text names all of them.
        """
        if not self.runs:  # a result of another tool
            return msgspec.structs.replace(self.reported_facts, name=self.name)

        summaries = [run.summary for run in self.runs]
        targets = [target for run in self.runs for target in run.targets]
        versions = [f"loadgen {summary.run.version}" for summary in summaries]
        workloads = [summary.run.workload or summary.run.name for summary in summaries]
        objectives = [", ".join(list_objectives(summary)) for summary in summaries]
        first_start = min(summary.run.started for summary in summaries)

        return SideFacts(
            name=self.name,
            tool=_join_unique(versions),
            workload=_join_unique(workloads),
            load=_join_unique(summary.load.arrival for summary in summaries),
            model=_join_unique(target.model for target in targets),
            server=_join_unique(_describe_server(target) for target in targets),
            url=_join_unique(target.url or target.name for target in targets),
            started=_format_time(first_start),
            slo=_join_unique(objectives),
            runs=len(self.runs),
        )


def _format_time(iso_time: str) -> str:
    """Return a time in ISO 8601 without its fraction of a second and its zone.

    For example, "2026-11-29T22:08:38.123+00:00" becomes "2026-11-29 22:08:38".
    """
    return iso_time[:DATE_AND_TIME_LENGTH].replace("T", " ")


def _describe_server(target: TargetFacts) -> str:
    """Return the server with its version, marked if it is simulated."""
    software = f"{target.server} {target.version}".strip()
    return f"simulated {software}".rstrip() if target.simulated else software


def _join_unique(values: Iterable[str]) -> str:
    """Return the different values, without empty ones, in order of their first appearance."""
    return "; ".join(dict.fromkeys(value for value in values if value))
