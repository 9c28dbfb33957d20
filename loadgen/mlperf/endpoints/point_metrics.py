"""Computes the metrics of a measurement point from the records of its run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadgen.core import run_folder
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.results.manifest import RunManifest
from loadgen.mlperf.endpoints import rules
from loadgen.mlperf.endpoints.curve_result import PointLoad, PointMetrics, PointResult
from loadgen.mlperf.endpoints.points import CurvePoint
from loadgen.mlperf.endpoints.steady_state_block import build_steady_state_block
from loadgen.mlperf.endpoints.steady_window import SteadyState, find_steady_state
from loadgen.mlperf.endpoints.super_passes import (
    NEVER_NS,
    QUERY_COLUMNS,
    QueryLog,
    build_query_log,
    lower_percentile,
    order_by_issue,
)

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


def measure_point(point: CurvePoint, run_dir: Path, *, dataset_size: int) -> PointResult:
    """Return the result of the run of a point, computed from its records.

    Args:
        point: The point.
        run_dir: The directory of its run.
        dataset_size: The samples of the data set, which are the queries of a super-pass.

    Raises:
        UserError: The directory has no run, or a file is damaged.
    """
    summary = run_folder.read_summary(run_dir)
    stored = store.read_run(run_dir)
    columns = _select_columns(stored)
    log = build_query_log(columns)
    output_tokens = _tokens_by_issue(columns, log)
    issued = len(log.issued_ns)
    completed = int((log.completed_ns != NEVER_NS).sum())

    steady_state = None
    block = None
    window = None
    if not point.is_offline_run and issued:
        steady_state = find_steady_state(log, dataset_size, point.concurrency)
        block = build_steady_state_block(steady_state, log)
        window = _window_metrics(log, output_tokens, steady_state)

    return PointResult(
        point=point,
        load=_describe_load(summary, stored.manifest),
        issued=issued,
        completed=completed,
        failed=issued - completed,
        steady_state=steady_state,
        steady_state_block=block,
        window=window,
        total=_total_metrics(log, output_tokens),
        measurement_errors=tuple(_measurement_errors(summary)),
    )


def _measurement_errors(summary: Summary) -> list[str]:
    """Return why a run is not a valid measurement, by the checks that every run has."""
    return [str(reason) for reason in summary.verdict.reasons]


def _describe_load(summary: Summary, manifest: RunManifest) -> PointLoad:
    """Return how the requests of a run were sent."""
    measured_stages = [stage for stage in manifest.stages if stage.measured]
    return PointLoad(
        concurrency=measured_stages[0].concurrency if len(measured_stages) == 1 else None,
        has_warmup=len(measured_stages) < len(manifest.stages),
        is_streaming=summary.run.stream,
        seed=summary.run.seed,
        salt=summary.run.salt,
        target=summary.target.name or summary.target.url,
        model=summary.target.model,
        metadata=summary.run.metadata,
        gpus=summary.target.gpus,
        precision=summary.target.precision,
    )


def _select_columns(stored: store.Stored) -> dict[str, NDArray[np.int64]]:
    """Return the columns of the records of a run, without those of a warm-up."""
    measured_stages = [
        index for index, stage in enumerate(stored.manifest.stages) if stage.measured
    ]
    is_measured = np.isin(stored.rows["stage"], measured_stages)
    return {name: stored.rows[name][is_measured].astype(np.int64) for name in QUERY_COLUMNS}


def _tokens_by_issue(columns: dict[str, NDArray[np.int64]], log: QueryLog) -> NDArray[np.int64]:
    """Return the output tokens of each query in the order of issue, 0 if it did not complete."""
    tokens = np.maximum(columns["output_tokens"][order_by_issue(columns)], 0)
    return np.where(log.completed_ns != NEVER_NS, tokens, 0)


def _window_metrics(
    log: QueryLog, output_tokens: NDArray[np.int64], steady_state: SteadyState
) -> PointMetrics | None:
    """Return the metrics of the steady window, or None without one.

    The throughput is that of the queries issued in the window, over the time from its first to its
    last issue (section 4.4). In a closed loop a query is issued when another one completes, so that
    the rate of issue is the rate of completion.
    """
    window = steady_state.window
    if window is None or window.duration_s <= 0:
        return None
    queries = slice(window.first_query, window.end_query)
    return _compute_metrics(log, output_tokens, queries, duration_s=window.duration_s)


def _total_metrics(log: QueryLog, output_tokens: NDArray[np.int64]) -> PointMetrics:
    """Return the metrics of the complete run, until the last completion."""
    duration_s = 0.0
    if len(log.issued_ns):
        duration_ns = int(log.completed_ns.max()) - int(log.issued_ns[0])
        duration_s = max(duration_ns, 0) / NS_PER_S
    return _compute_metrics(log, output_tokens, slice(None), duration_s=duration_s)


def _compute_metrics(
    log: QueryLog, output_tokens: NDArray[np.int64], queries: slice, *, duration_s: float
) -> PointMetrics:
    """Return the metrics of a range of queries in the order of issue."""
    ttft_ns = log.ttft_ns[queries]
    tpot_ns = log.tpot_ns[queries]
    tokens = int(output_tokens[queries].sum())
    return PointMetrics(
        queries=len(ttft_ns),
        completed=int((log.completed_ns[queries] != NEVER_NS).sum()),
        duration_s=duration_s,
        output_tokens=tokens,
        system_tps=tokens / duration_s if duration_s > 0 else 0.0,
        ttft_p50_ms=_percentile_ms(ttft_ns, 0.5),
        ttft_p90_ms=_percentile_ms(ttft_ns, rules.REPORTED_QUANTILE),
        tpot_p50_ms=_percentile_ms(tpot_ns, 0.5),
        tpot_p90_ms=_percentile_ms(tpot_ns, rules.REPORTED_QUANTILE),
    )


def _percentile_ms(samples_ns: NDArray[np.float64], quantile: float) -> float | None:
    """Return a percentile in ms, without samples that are NaN. None if no sample is left."""
    samples = np.sort(samples_ns[~np.isnan(samples_ns)])
    if not len(samples):
        return None
    return lower_percentile(samples, quantile) / NS_PER_MS
