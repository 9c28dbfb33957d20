"""Writes a run as `result_summary.json` of mlcommons/endpoints, which MLPerf's checker reads."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.windows import Span, per_second
from loadgen.core.results.record import FINISH_REASONS
from loadgen.core.stats.early_stopping import allowed_over
from loadgen.core.stats.quantiles import quantile_index
from loadgen.core.units import NS_PER_S
from loadgen.interop.export_source import (
    INFINITE_RATE_ARRIVAL,
    Document,
    ExportSource,
    RunRows,
)

PERCENTS = (99.9, 99.0, 97.0, 95.0, 90.0, 80.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0)
"""The percentiles of mlcommons/endpoints."""
MIN_EARLY_STOPPING_PERCENT = 50
"""Early stopping is defined for percentiles from the median on."""
BUCKETS = 30
"""The number of buckets in its histograms."""
KNOWN_FINISH_REASONS = ("stop", "length", "tool_calls", "content_filter", "function_call")


def export_mlcommons(summary: Summary, stored: RunRows) -> Document:
    """Return `result_summary.json` of mlcommons/endpoints 0.1. Times are in ns.

    The tool calls a request a sample or a query, and counts a failed sample as completed, too.
    """
    source = ExportSource(summary, stored, "mlcommons/endpoints")
    completed = summary.requests.ok + source.failed_requests
    throughput = _compute_throughput(source, completed)
    is_finished = summary.run.state == "finished"

    return {
        "version": "0.1.0",
        "git_sha": None,
        "test_started_at": 0,  # not filled in
        "n_samples_issued": source.sent_requests,
        "n_samples_completed": completed,
        "n_samples_failed": source.failed_requests,
        "duration_ns": round((source.sent_span.duration_s or 0) * NS_PER_S),
        # "complete" is the tool's name for our state "finished".
        "state": "complete" if is_finished else summary.run.state,
        "complete": is_finished,
        **_describe_latencies(source),
        "output_sequence_lengths": _describe_tokens(source, "output_tokens"),
        "input_sequence_lengths": _describe_tokens(source, "input_tokens"),
        "legacy_loadgen_window_duration_ns": throughput.legacy_window_ns,
        "qps": throughput.queries_per_s,
        "tps": throughput.tokens_per_s,
        "finish_reason_counts": _count_finish_reasons(source),
        "run_config": _describe_run_config(source),
        "loadgen": source.provenance,
    }


def _describe_run_config(source: ExportSource) -> Document:
    """Return the load, the warm-up and the random seeds of a run."""
    summary = source.summary
    is_closed_loop = bool(source.concurrency)
    return {
        "load_pattern": {
            "type": _load_pattern(source),
            "target_qps": None if is_closed_loop else source.rate_per_s,
            "target_concurrency": source.concurrency,
        },
        "warmup": {
            "enabled": bool(summary.warmup.scheduled),
            "n_requests": summary.warmup.scheduled or None,
        },
        "scheduler_random_seed": summary.run.schedule_seed,
        "dataloader_random_seed": summary.run.seed,
    }


class _Throughput(NamedTuple):
    """The throughput of mlcommons/endpoints, and the time over which it was computed.

    Attributes:
        queries_per_s: The completed requests per second, or None if it is unknown.
        tokens_per_s: The output tokens per second, or None if it is unknown.
        legacy_window_ns: The length of MLPerf LoadGen's window, or None if the throughput is that
            of the full run.
    """

    queries_per_s: float | None
    tokens_per_s: float | None
    legacy_window_ns: int | None


class _LegacyWindow(NamedTuple):
    """The time over which MLPerf LoadGen computes its throughput.

    It begins with the first request, and ends when the request that was sent last has completed.
    """

    span: Span
    duration_s: float


def _compute_throughput(source: ExportSource, completed: int) -> _Throughput:
    """Return the throughput as mlcommons/endpoints computes it.

    An open loop (requests at a rate) has the throughput of MLPerf LoadGen, over its own window. A
    closed loop (a constant concurrency), and a run for which LoadGen's throughput is not defined,
    has the throughput of the full run.

    Args:
        source: The run.
        completed: The number of requests that completed.
    """
    window = _find_legacy_window(source, completed)
    if window is not None:
        return _legacy_throughput(source, completed, window)

    full_run = source.sent_span
    return _Throughput(
        queries_per_s=per_second(completed, full_run),
        tokens_per_s=per_second(source.summary.tokens.output, full_run),
        legacy_window_ns=None,
    )


def _find_legacy_window(source: ExportSource, completed: int) -> _LegacyWindow | None:
    """Return the window of MLPerf LoadGen's throughput, or None if it does not apply to a run.

    LoadGen counts the intervals between completions, and fewer than two completions have none.
    """
    is_open_loop = not source.concurrency
    has_interval = completed >= 2
    span = source.summary.window.last_issued
    if span.duration_s is None or not (is_open_loop and has_interval):
        return None
    return _LegacyWindow(span, span.duration_s)


def _legacy_throughput(source: ExportSource, completed: int, window: _LegacyWindow) -> _Throughput:
    """Return the throughput of a run as MLPerf LoadGen defines it.

    The rate of queries is the number of intervals between completions, which is one less than the
    number of completions, divided by the length of the window.
    """
    intervals = completed - 1
    return _Throughput(
        queries_per_s=per_second(intervals, window.span),
        tokens_per_s=per_second(source.summary.tokens.output, window.span),
        legacy_window_ns=round(window.duration_s * NS_PER_S),
    )


def _load_pattern(source: ExportSource) -> str | None:
    """Return the load pattern of mlcommons/endpoints, or None for a load that it does not have."""
    if source.concurrency:
        return "concurrency"
    if source.arrival.startswith(INFINITE_RATE_ARRIVAL):
        return "max_throughput"
    return "poisson" if source.arrival.startswith("poisson") else None


def _count_finish_reasons(source: ExportSource) -> dict[str, int]:
    """Return how many responses ended for each reason. Rare reasons are counted as "other"."""
    reasons = source.successful_column("finish_reason")
    counts = {
        reason: int((reasons == FINISH_REASONS.index(reason)).sum())
        for reason in KNOWN_FINISH_REASONS
    }
    return counts | {"other": len(reasons) - sum(counts.values())}


def _describe_latencies(source: ExportSource) -> Document:
    """Return the statistics of each latency with early-stopping percentiles."""
    if source.samples is None:
        return {}

    samples = {
        "ttft": source.samples.ttft,
        "tpot": source.samples.tpot,
        "latency": source.samples.e2e,
    }
    document: Document = {}
    for key, sample in samples.items():
        assert sample is not None, "mlcommons/endpoints defines these three latencies"
        values = sample.values
        document[key] = describe_values(values[~np.isnan(values)], with_early_stopping=True)

    return document


def _describe_tokens(source: ExportSource, field: str) -> Document | None:
    """Return the statistics of the numbers of tokens in a field, None without requests."""
    tokens = source.successful_column(field).astype(np.float64)
    return describe_values(tokens, with_early_stopping=False)


def describe_values(values: NDArray[np.float64], *, with_early_stopping: bool) -> Document | None:
    """Return the statistics of values, or None if there are none.

    Percentiles are elements of the sample and not interpolated.
    """
    count = len(values)
    if count == 0:
        return None

    ordered = np.sort(values)
    document: Document = {
        "total": float(ordered.sum()),
        "min": float(ordered[0]),
        "max": float(ordered[-1]),
        "median": float(ordered[quantile_index(count, 0.5)]),
        "avg": float(ordered.mean()),
        "std_dev": float(ordered.std()),
        "percentiles": {
            f"{percent:.1f}": float(ordered[quantile_index(count, percent / 100)])
            for percent in PERCENTS
        },
    }
    if with_early_stopping:
        document["early_stopping_percentiles"] = _early_stopping_percentiles(ordered)

    return {**document, "histogram": _histogram(ordered)}


def _early_stopping_percentiles(ordered: NDArray[np.float64]) -> dict[str, float | None]:
    """Return MLPerf's early-stopping estimates of the percentiles of sorted values.

    They are conservative: the true percentile is at most the estimate with 99 % confidence. MLPerf
    accepts a latency limit for a percentile if only a few of the values, at most
    `allowed_over(...)`, are above it. With 3 values allowed, the lowest limit that it accepts is
    the third largest value, which is the estimate. It is None if no value is allowed above a limit,
    which needs more values.
    """
    count = len(ordered)
    estimates: dict[str, float | None] = {}
    for percent in PERCENTS:
        if percent < MIN_EARLY_STOPPING_PERCENT:
            continue
        max_values_over = allowed_over(count, percent / 100)
        has_enough_values = max_values_over >= 1
        # The n-th largest value of an ascending array has the index -n.
        estimate = float(ordered[-max_values_over]) if has_enough_values else None
        estimates[f"{percent:.1f}"] = estimate

    return estimates


def _histogram(ordered: NDArray[np.float64]) -> Document:
    """Return a histogram of sorted values in BUCKETS buckets whose edges grow by a ratio.

    Edges that grow by a ratio begin above 0, so the first bucket is extended to the smallest value.
    The buckets span at least a factor of 10.
    """
    smallest = float(ordered[0])
    first_edge = max(smallest, 1.0)
    last_edge = max(float(ordered[-1]), 10 * first_edge)
    edges = np.geomspace(first_edge, last_edge, BUCKETS + 1)
    edges[0] = min(edges[0], smallest)

    # Rounding can put the last edge below the largest value.
    counts, _ = np.histogram(np.minimum(ordered, edges[-1]), edges)
    buckets = [[float(lower), float(upper)] for lower, upper in pairwise(edges)]
    return {"buckets": buckets, "counts": counts.tolist()}
