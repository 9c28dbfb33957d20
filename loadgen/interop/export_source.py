"""What the exports of a run in the formats of other tools have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import FAILED, LOST
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import RunManifest, StagePlan
from loadgen.core.stats.histogram import Histogram
from loadgen.formats import definitions_of
from loadgen.interop import benchmark_windows
from loadgen.interop.sample_statistics import DerivedSample, PooledGaps
from loadgen.interop.tool_samples import compute_tool_samples, select_successful

Document = dict[str, Any]
"""A JSON object. Its values may also be numpy arrays, which are written as lists."""

LatencyName = Literal["ttft", "tpot", "itl", "e2e"]

INFINITE_RATE_ARRIVAL = "everything at once"
"""How `arrival` of a stage with an infinite rate begins."""


class RunRows(Protocol):
    """The records of a run that are exported (`core.results.store.Stored`)."""

    @property
    def manifest(self) -> RunManifest:
        """The manifest of the run."""

    @property
    def rows(self) -> NDArray[np.void]:
        """The records of its requests."""

    @property
    def gaps(self) -> Sequence[Histogram]:
        """For each stage, the times between output events."""


@runtime_checkable
class RunRowsWithGaps(RunRows, Protocol):
    """The records of a run with the times between output events of each request."""

    @property
    def gaps_ns_by_slot(self) -> Mapping[int, NDArray[np.int64]] | None:
        """The times, by the number of the request in the schedule. None if they were not kept."""


def _find_gaps_by_slot(stored: RunRows) -> Mapping[int, NDArray[np.int64]] | None:
    """Return the times between output events by request, or None if the run did not keep them."""
    return stored.gaps_ns_by_slot if isinstance(stored, RunRowsWithGaps) else None


def _find_first_measured_stage(manifest: RunManifest) -> StagePlan | None:
    """Return the first stage of a run that is no warm-up, or None if there is none."""
    return next((stage for stage in manifest.stages if stage.measured), None)


class ExportSource:
    """A run with its samples by the definitions of the tool whose format is written.

    Attributes:
        summary: The summary of the run.
        manifest: The manifest of the run.
        columns: Its measured requests.
        is_successful: Which of them succeeded and have output.
        samples: The samples of the tool, None if no request succeeded.
        gaps_by_slot: The times between output events of single requests, by their number in the
            schedule. None if the run did not keep them.
        stage: The first measured stage, None if there is none.
        sent_span: The time from the first request sent to the end of the last one.
    """

    def __init__(self, summary: Summary, stored: RunRows, tool: str) -> None:
        """Select the requests and compute the samples of a run for one tool.

        Args:
            summary: The summary of the run.
            stored: The manifest and the records that the run wrote. If it also has the times
                between output events of each request, they are exported, too.
            tool: The name of the tool in `loadgen.formats`.
        """
        manifest = stored.manifest
        requests = select_successful(manifest, stored.rows)
        samples_by_tool = compute_tool_samples(manifest, stored.rows, stored.gaps)
        self._tool = tool
        self.summary = summary
        self.manifest = manifest
        self.columns = requests.columns
        self.is_successful = requests.is_successful
        self.samples = samples_by_tool.get(tool)
        self.gaps_by_slot = _find_gaps_by_slot(stored)
        self.stage = _find_first_measured_stage(manifest)
        self.sent_span = benchmark_windows.span_of_sent_requests(requests.columns)

    def successful_column(self, name: str) -> NDArray[np.int64]:
        """Return a field of the measured requests that succeeded and have output."""
        return self.columns[name][self.is_successful]

    def statistics(self, latency: LatencyName) -> dict[str, float]:
        """Return the statistics of a latency by the tool's definition, in ms by name.

        The summary of the run withholds a latency whose values cannot be trusted, and single
        statistics that are too uncertain. Neither is exported. The result is {} if nothing is left,
        or if the tool has no such latency.
        """
        sample = self._find_sample(latency)
        is_withheld = latency in self.summary.withheld_metrics
        if sample is None or is_withheld:
            return {}

        withheld = self.summary.withheld_statistics.get(latency)
        withheld_names = withheld.ranges.keys() if withheld is not None else ()
        statistics_ms = sample.statistics()

        return {name: value for name, value in statistics_ms.items() if name not in withheld_names}

    def _find_sample(self, latency: LatencyName) -> DerivedSample | PooledGaps | None:
        """Return the sample of a latency, or None if the tool or the run has none."""
        if self.samples is None:
            return None

        samples: dict[LatencyName, DerivedSample | PooledGaps | None] = {
            "ttft": self.samples.ttft,
            "tpot": self.samples.tpot,
            "itl": self.samples.itl,
            "e2e": self.samples.e2e,
        }
        return samples[latency]

    @property
    def provenance(self) -> Document:
        """The field `loadgen` of every exported file: the run, its validity and the definitions.

        Other tools ignore this field.
        """
        run = self.summary.run
        return {
            "written_by": f"loadgen {run.version}",
            "run": run.id,
            "simulated": self.summary.target.simulated,
            "valid": self.summary.verdict.valid,
            "caveats": list(self.summary.verdict.caveats),
            "recipe": self.summary.fingerprints.recipe,
            "definitions": f"those of {self._tool}: {definitions_of(self._tool)}",
        }

    @property
    def concurrency(self) -> int | None:
        """The virtual users of the first measured stage, None in an open loop."""
        return self.stage.concurrency if self.stage is not None else None

    @property
    def rate_per_s(self) -> float | None:
        """The requested rate of the first measured stage, None if it has none."""
        return self.stage.rate if self.stage is not None else None

    @property
    def arrival(self) -> str:
        """The arrival process of the first measured stage in words, "" if there is none."""
        return self.stage.arrival if self.stage is not None else ""

    @property
    def failed_requests(self) -> int:
        """The number of measured requests that failed or were lost."""
        return int((self.columns.has_status(FAILED) | self.columns.has_status(LOST)).sum())

    @property
    def sent_requests(self) -> int:
        """The number of measured requests that were sent."""
        return int((self.columns["sent_ns"] >= 0).sum())

    @property
    def total_tokens(self) -> int | None:
        """The tokens of successful requests, prompts included; None if they are unknown."""
        tokens = self.summary.tokens
        if tokens.input is None or tokens.output is None:
            return None
        return tokens.input + tokens.output
