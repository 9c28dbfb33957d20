"""The metrics that each tool would report of the records of a run.

The page of a run shows them side by side, because the same word means different metrics in them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import RunManifest
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import Distribution
from loadgen.formats import definitions_of
from loadgen.interop.sample_statistics import DerivedSample, PooledGaps
from loadgen.interop.tool_samples import compute_tool_samples

OWN_DEFINITIONS = (
    "Latencies start at the scheduled time. TTFT ends at the first event with output. TPOT is "
    "(last - first) / (n - n1). ITL is pooled over requests, and reported only if an event has one "
    "token. Percentiles are elements of the sample"
)


class ReportedLatency(NamedTuple):
    """What a tool reports of a latency, in ms. None if it has no such metric or no values."""

    p50_ms: float | None = None
    p99_ms: float | None = None


class ToolMetrics(NamedTuple):
    """What one tool would report.

    Attributes:
        tool: The name of the tool.
        definitions: How it defines its metrics.
        latencies: Its TTFT, TPOT, ITL and end-to-end latency.
    """

    tool: str
    definitions: str
    latencies: tuple[ReportedLatency, ...]


def compute_tool_metrics(
    summary: Summary, manifest: RunManifest, rows: NDArray[np.void], gaps: Sequence[Histogram]
) -> list[ToolMetrics]:
    """Return the metrics of loadgen, then those that each tool would report of the same records.

    Args:
        summary: The summary of the run.
        manifest: The manifest of the run.
        rows: The records of its requests.
        gaps: For each stage, the times between output events.

    Returns:
        The metrics, or an empty list if no request succeeded.
    """
    samples_by_tool = compute_tool_samples(manifest, rows, gaps)
    if not samples_by_tool:
        return []

    # The latencies of each tool are in the order TTFT, TPOT, ITL, end to end.
    distributions = (summary.ttft_ms, summary.tpot_ms, summary.itl_ms, summary.e2e_ms)
    own_latencies = tuple(_report_distribution(distribution) for distribution in distributions)
    tools = [ToolMetrics("loadgen", OWN_DEFINITIONS, own_latencies)]

    # Several tools use the same sample object, whose percentiles are computed once.
    report_sample_once = functools.cache(_report_sample)
    for tool, samples in samples_by_tool.items():
        latencies = tuple(
            report_sample_once(sample)
            for sample in (samples.ttft, samples.tpot, samples.itl, samples.e2e)
        )
        tools.append(ToolMetrics(tool, definitions_of(tool), latencies))

    return tools


def _report_distribution(distribution: Distribution | None) -> ReportedLatency:
    """Return the percentiles of a distribution of the summary."""
    if distribution is None:
        return ReportedLatency()
    return ReportedLatency(distribution.p50, distribution.p99)


def _report_sample(sample: DerivedSample | PooledGaps | None) -> ReportedLatency:
    """Return the percentiles of a sample, without values if a tool has no such metric."""
    if sample is None:
        return ReportedLatency()
    percentiles_ms = sample.percentiles(("p50", "p99"))
    return ReportedLatency(percentiles_ms.get("p50"), percentiles_ms.get("p99"))
