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
    """Compute the result of a measurement point from the request records of its run.

    Args:
        point: The measurement point: a run with a fixed concurrency, or the Offline run, which
            sends all queries at once and has no steady window.
        run_dir: The directory of the run.
        dataset_size: The number of samples of the data set. The run is divided into blocks of as
            many queries, in which a steady window is searched.

    Raises:
        UserError: The directory has no run, or a file is damaged.
    """
    summary = run_folder.read_summary(run_dir)
    stored_run = store.read_run(run_dir)

    columns = _select_columns(stored_run)
    log = build_query_log(columns)
    output_tokens = _tokens_by_issue(columns, log)

    issued_count = len(log.issued_ns)
    completed_count = int((log.completed_ns != NEVER_NS).sum())
    steady_state = None
    if issued_count and not point.is_offline_run:
        steady_state = find_steady_state(log, dataset_size, point.concurrency)

    block = None
    window_metrics = None
    if steady_state is not None:
        block = build_steady_state_block(steady_state, log)
        window_metrics = _window_metrics(log, output_tokens, steady_state)

    return PointResult(
        point=point,
        load=_describe_load(summary, stored_run.manifest),
        issued=issued_count,
        completed=completed_count,
        failed=issued_count - completed_count,
        steady_state=steady_state,
        steady_state_block=block,
        window=window_metrics,
        total=_total_metrics(log, output_tokens),
        measurement_errors=tuple(_measurement_errors(summary)),
    )


def _measurement_errors(summary: Summary) -> list[str]:
    """Return why a run is not a valid measurement, by the checks that every run has."""
    return [str(reason) for reason in summary.verdict.reasons]


def _describe_load(summary: Summary, manifest: RunManifest) -> PointLoad:
    """Return how the requests of a run were sent, and to which server."""
    measured_stages = [stage for stage in manifest.stages if stage.measured]
    has_one_stage = len(measured_stages) == 1
    has_unmeasured_stages = len(measured_stages) < len(manifest.stages)
    run = summary.run
    server = summary.target

    return PointLoad(
        # How requests were sent.
        concurrency=measured_stages[0].concurrency if has_one_stage else None,
        has_warmup=has_unmeasured_stages,
        is_streaming=run.stream,
        seed=run.seed,
        salt=run.salt,
        metadata=run.metadata,
        # The server.
        target=server.name or server.url,
        model=server.model,
        gpus=server.gpus,
        precision=server.precision,
    )


def _select_columns(stored: store.Stored) -> dict[str, NDArray[np.int64]]:
    """Return the request records of the measured stages, as an array per field.

    Records of other stages, such as a warm-up, are left out.
    """
    measured_stages = [
        index for index, stage in enumerate(stored.manifest.stages) if stage.measured
    ]
    is_measured = np.isin(stored.rows["stage"], measured_stages)
    return {name: stored.rows[name][is_measured].astype(np.int64) for name in QUERY_COLUMNS}


def _tokens_by_issue(columns: dict[str, NDArray[np.int64]], log: QueryLog) -> NDArray[np.int64]:
    """Return the output tokens of each query in the order of issue, 0 if it did not complete."""
    issue_order = order_by_issue(columns)
    tokens = np.maximum(columns["output_tokens"][issue_order], 0)  # negative if it is not known
    is_completed = log.completed_ns != NEVER_NS
    return np.where(is_completed, tokens, 0)


def _window_metrics(
    log: QueryLog, output_tokens: NDArray[np.int64], steady_state: SteadyState
) -> PointMetrics | None:
    """Return the metrics of the steady part of a run (its window), or None if there is none.

    The throughput is the tokens of the queries that were issued in the window, divided by the time
    from the first to the last issue (section 4.4 of the rules). With a fixed concurrency, a query
    is issued when an earlier one completes, so both happen at the same rate.
    """
    window = steady_state.window
    if window is None or window.duration_s <= 0:
        return None
    queries = slice(window.first_query, window.end_query)
    return _compute_metrics(log, output_tokens, queries, duration_s=window.duration_s)


def _total_metrics(log: QueryLog, output_tokens: NDArray[np.int64]) -> PointMetrics:
    """Return the metrics of the complete run, from the first issue to the last completion."""
    duration_s = 0.0
    if len(log.issued_ns):
        first_issue_ns = int(log.issued_ns[0])
        last_completion_ns = int(log.completed_ns.max())
        duration_ns = max(last_completion_ns - first_issue_ns, 0)
        duration_s = duration_ns / NS_PER_S

    all_queries = slice(None)
    return _compute_metrics(log, output_tokens, all_queries, duration_s=duration_s)


def _compute_metrics(
    log: QueryLog, output_tokens: NDArray[np.int64], queries: slice, *, duration_s: float
) -> PointMetrics:
    """Return throughput and latency of a range of queries.

    The latencies are the time to the first token (TTFT) and the time per later token (TPOT). The
    rules report the quantile 0.9 of both.

    Args:
        log: The times of all queries, in the order of issue.
        output_tokens: The output tokens of each query.
        queries: The indices of the queries, as a slice of the order of issue.
        duration_s: The time over which the throughput is computed, in seconds.
    """
    ttft_ns = log.ttft_ns[queries]
    tpot_ns = log.tpot_ns[queries]
    is_completed = log.completed_ns[queries] != NEVER_NS
    token_count = int(output_tokens[queries].sum())

    return PointMetrics(
        # Throughput.
        queries=len(ttft_ns),
        completed=int(is_completed.sum()),
        duration_s=duration_s,
        output_tokens=token_count,
        system_tps=token_count / duration_s if duration_s > 0 else 0.0,
        # Latency.
        ttft_p50_ms=_percentile_ms(ttft_ns, 0.5),
        ttft_p90_ms=_percentile_ms(ttft_ns, rules.REPORTED_QUANTILE),
        tpot_p50_ms=_percentile_ms(tpot_ns, 0.5),
        tpot_p90_ms=_percentile_ms(tpot_ns, rules.REPORTED_QUANTILE),
    )


def _percentile_ms(samples_ns: NDArray[np.float64], quantile: float) -> float | None:
    """Return a percentile of samples in ms, without those that are NaN.

    Return None if no sample is left.
    """
    known_samples_ns = samples_ns[~np.isnan(samples_ns)]
    if len(known_samples_ns) == 0:
        return None
    return lower_percentile(np.sort(known_samples_ns), quantile) / NS_PER_MS
