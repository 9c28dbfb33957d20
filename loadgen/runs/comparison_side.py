"""What a run, or repeats of one, is for a comparison: values, and pure. `loadgen.compare` judges them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import Columns, is_measured
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import RunManifest, TargetFacts
from loadgen.runs.headline import promises


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its summary, and its rows if they were kept (`record.ROW`, all stages)."""

    name: str
    summary: Summary
    manifest: RunManifest | None = None
    rows: NDArray[np.void] | None = None

    @property
    def targets(self) -> tuple[TargetFacts, ...]:
        return tuple(part.target for part in self.summary.targets) or (self.summary.target,)

    def measured(self) -> Columns | None:
        """The rows of measured stages as columns; None without rows."""
        if self.rows is None or self.manifest is None:
            return None
        return Columns(self.rows, is_measured(self.manifest, self.rows))


class SideFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one side of a comparison is, in words; "" where it is not known."""

    name: str = ""
    tool: str = ""  # that measured it, with its version
    workload: str = ""
    load: str = ""
    model: str = ""
    server: str = ""  # with its version
    url: str = ""
    started: str = ""  # when the first run started
    slo: str = ""
    runs: int = 0


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison: a run, repeats of it, or the figures that another tool reported.

    `told` holds the figures of another tool by path, and `described` what else it reported.
    """

    name: str
    runs: tuple[ComparedRun, ...] = ()
    told: dict[str, float] = {}
    notes: tuple[str, ...] = ()
    described: SideFacts = SideFacts()

    @property
    def facts(self) -> SideFacts:
        """What the side is, in words. Of repeats with different values, all of them."""
        if not self.runs:
            return msgspec.structs.replace(self.described, name=self.name)
        summaries = [run.summary for run in self.runs]
        return SideFacts(
            name=self.name,
            tool=_joined(f"loadgen {summary.run.version}" for summary in summaries),
            workload=_joined(summary.run.workload or summary.run.name for summary in summaries),
            load=_joined(summary.load.arrival for summary in summaries),
            model=_joined(target.model for run in self.runs for target in run.targets),
            server=_joined(_server(target) for run in self.runs for target in run.targets),
            url=_joined(target.url or target.name for run in self.runs for target in run.targets),
            started=min(summary.run.started for summary in summaries)[:19].replace("T", " "),
            slo=_joined(", ".join(promises(summary)) for summary in summaries),
            runs=len(self.runs),
        )


def _server(target: TargetFacts) -> str:
    """Return what answered: the server with its version, marked if it is simulated."""
    software = f"{target.server} {target.version}".strip()
    return f"simulated {software}".rstrip() if target.simulated else software


def _joined(values: Iterable[str]) -> str:
    """Return the different values in order of their first appearance."""
    return "; ".join(dict.fromkeys(value for value in values if value))
