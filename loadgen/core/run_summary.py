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
    worker_samples: Sequence[WorkerSample] = (),
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
        worker_samples: The samples that each worker takes of itself.
        texts: The error texts, which `rows["text"]` indexes.
        event_errors: Per stage, a histogram of the timestamp errors of output events. Empty if they
            are not known.
        server_samples: The samples of the servers' metrics pages.
        explained: Whether to compute also what only people read, such as the causes of slow
            requests. It takes time, so code that computes many summaries leaves it out.
    """
    data = RunData(manifest, gaps, timeline, worker_samples, event_errors, server_samples)
    run = measure_run(data, RunAccumulator(manifest, rows, texts), explained=explained)
    summary = _add_sections(run, data)
    if explained:
        summary = _add_explanations(run, data, summary)
    return apply_verdict(manifest, run, summary, worker_samples)


def _add_sections(run: MeasuredRun, data: RunData) -> Summary:
    """Return the summary with the sections that every summary has besides the metrics."""
    measured_records = run.measured.columns
    return msgspec.structs.replace(
        run.summary,
        recovery=recovery.measure_recoveries(measured_records, data.manifest, data.server_samples),
        speculation=speculation.summarize_speculation(measured_records, data.server_samples),
        fairness=fairness.measure_fairness(run.summary.classes),
    )


def _add_explanations(run: MeasuredRun, data: RunData, summary: Summary) -> Summary:
    """Return the summary with the sections that explain its metrics to people.

    The fields of the summary have these sections: `splits` divides latencies into the phases of a
    request, `slowest` lists the slowest requests, `node_differences` compares the hosts that sent
    the load, `causes` are likely reasons of high latencies, `within` has the confidence intervals
    of the metrics, and `stimulus` shows whether the load was sent as planned. A statistic that too
    few requests support is withheld, so it is not explained either.
    """
    manifest = data.manifest
    measured_records = run.measured.columns
    warmup_records = run.accumulated.warmup.columns
    metrics_without_mean = summary.metrics_without("mean")
    metrics_without_median = summary.metrics_without("p50")

    node_differences = replica_differences.compare_nodes(
        measured_records, summary.window.steady, manifest
    )
    explained_summary = msgspec.structs.replace(
        summary,
        splits=latency_breakdown.split_latencies(measured_records, manifest),
        slowest=latency_breakdown.list_slowest_requests(measured_records, warmup_records, manifest),
        node_differences=replica_differences.without_metrics(
            node_differences, metrics_without_mean
        ),
        causes=causes.explain(
            measured_records, manifest, data.server_samples, metrics_without_median
        ),
        within=within_run_variance.metric_intervals(
            measured_records, summary, manifest.slo, run.tokens_in
        ),
    )
    load_checks = load_fidelity.check_load(
        manifest, explained_summary, run.verdict_inputs, measured_records
    )
    return msgspec.structs.replace(explained_summary, stimulus=load_checks)
