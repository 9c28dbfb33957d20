"""Assemble summary.json from what `metrics` measures and the sections that `analysis` adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from loadgen.core.analysis import (
    causes,
    fairness,
    latency_breakdown,
    load_fidelity,
    recovery,
    replica_differences,
    speculation,
    within_run_variance,
)
from loadgen.core.metrics.measurement import MeasuredRun, RunData, apply_verdict, measure_run
from loadgen.core.metrics.run_accumulator import RunAccumulator
from loadgen.core.metrics.summary import Summary

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from loadgen.core.results.manifest import RunManifest, WorkerSample
    from loadgen.core.server_metrics.series import MetricSample
    from loadgen.core.stats.histogram import Histogram


def summarize(  # noqa: PLR0913 - the parts of a run that are stored separately
    manifest: RunManifest,
    rows: NDArray[np.void],
    gaps: Sequence[Histogram] = (),
    timeline: Sequence[NDArray[np.int64]] = (),
    seconds: Sequence[WorkerSample] = (),
    texts: Sequence[str] = (),
    event_errors: Sequence[Histogram] = (),
    server_samples: Sequence[MetricSample] = (),
    *,
    explained: bool = True,
) -> Summary:
    """Compute the summary of a run from its records.

    Args:
        manifest: The manifest of the run.
        rows: The records (`record.ROW`) of all workers, in any order.
        gaps: Per stage, a histogram of the gaps between output events.
        timeline: Per stage, counts of output events in bins of `BIN_NS` from the start of the run.
        seconds: The samples that each worker takes of itself.
        texts: The error texts, which `rows["text"]` indexes.
        event_errors: Per stage, a histogram of the timestamp errors of output events. Empty if they
            are not known.
        server_samples: The samples of the servers' metrics pages.
        explained: Whether to compute also what only readers need: causes, breakdowns, intervals and
            trends.
    """
    data = RunData(manifest, gaps, timeline, seconds, event_errors, server_samples)
    run = measure_run(data, RunAccumulator(manifest, rows, texts), explained=explained)
    summary = _with_sections_of_records(run, manifest, server_samples, explained)
    summary = msgspec.structs.replace(
        summary,
        speculation=speculation.summarize_speculation(run.measured.columns, server_samples),
        fairness=fairness.measure_fairness(summary.classes),
    )
    if explained:
        checks = load_fidelity.check_load(
            manifest, summary, run.verdict_inputs, run.measured.columns
        )
        summary = msgspec.structs.replace(summary, stimulus=checks)
    return apply_verdict(manifest, run, summary, seconds)


def _with_sections_of_records(
    run: MeasuredRun,
    manifest: RunManifest,
    server_samples: Sequence[MetricSample],
    explained: bool,
) -> Summary:
    """Return the summary with the sections that need all records at once."""
    measured = run.measured.columns
    summary = msgspec.structs.replace(
        run.summary, recovery=recovery.measure_recoveries(measured, manifest, server_samples)
    )
    if not explained:
        return summary
    warmup = run.accumulated.warmup.columns
    differences = replica_differences.compare_nodes(measured, summary.window.steady, manifest)
    return msgspec.structs.replace(
        summary,
        splits=latency_breakdown.split_latencies(measured, manifest),
        slowest=latency_breakdown.list_slowest_requests(measured, warmup, manifest),
        node_differences=replica_differences.without_metrics(
            differences, summary.metrics_without("mean")
        ),
        causes=causes.explain(measured, manifest, server_samples, summary.metrics_without("p50")),
        within=within_run_variance.metric_intervals(measured, summary, manifest.slo, run.tokens_in),
    )
