"""Writes and reads llm-d's Benchmark Report v0.2.1: a row of the table `loadgen.formats`.

https://github.com/llm-d/llm-d-benchmark (`benchmark-report/`) describes the format. It forbids
unknown fields, so what other exports have in a field `loadgen` is in `scenario.load.native.config`.
Metrics are those of docs/reference/metrics.md, because the report names the tool that made them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.errors import UserError
from loadgen.core.metrics.summary import Summary
from loadgen.core.stats.quantiles import Distribution
from loadgen.core.workload.yaml_marks import plain_yaml
from loadgen.formats import ForeignResult, ToolFile
from loadgen.interop.export_source import Document, ExportSource, RunRows
from loadgen.interop.result_values import (
    SECONDS_MS,
    TPOT_WITH_TTFT,
    RunDescription,
    create_result,
    find_number,
    find_numbers,
    find_value,
    finite_number,
    latency_metrics,
    request_metrics,
)
from loadgen.runs.rates import select_headline_rates

VERSION = "0.2.1"
TOOL = "llm-d Benchmark Report"
UNITS_MS = {"ms": 1.0, "s": SECONDS_MS, "ms/token": 1.0, "s/token": SECONDS_MS}


class _Latency(NamedTuple):
    """A latency of the report: its name, and the unit in which it is written."""

    name: str
    units: str


_LATENCIES = {
    "ttft_ms": _Latency("time_to_first_token", "ms"),
    "tpot_ms": _Latency("time_per_output_token", "ms/token"),
    "inter_chunk_ms": _Latency("inter_token_latency", "ms/token"),
    "e2e_ms": _Latency("request_latency", "ms"),
}
"""The latencies that are written, by the name of our metric."""

_LATENCY_NAMES = {
    **{metric: latency.name for metric, latency in _LATENCIES.items()},
    TPOT_WITH_TTFT: "normalized_time_per_output_token",
}
"""The latencies that are read, by the name of our metric."""

_RATE_PATHS = {
    "load.completed_rps": "throughput.request_rate.mean",
    "tokens.input_per_s": "throughput.input_token_rate.mean",
    "tokens.output_per_s": "throughput.output_token_rate.mean",
    "tokens.total_per_s": "throughput.total_token_rate.mean",
}

_LENGTH_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


# -- writing -------------------------------------------------------------------------------------


def write(summary: Summary, stored: RunRows) -> Document:
    """Return the report of a run as a JSON object. Fields whose value is unknown are left out.

    The format is YAML, of which JSON is a part.
    """
    source = ExportSource(summary, stored, TOOL)
    report: Document = _without_nulls(
        {
            "version": VERSION,
            "run": _describe_run(summary),
            "scenario": {
                "stack": [_describe_server(summary)],
                "load": _describe_load(summary, source),
            },
            "results": {
                "request_performance": {
                    "aggregate": {
                        "requests": _count_requests(summary, source),
                        "latency": _describe_latencies(summary),
                        "throughput": _describe_throughput(summary),
                    }
                }
            },
        }
    )
    return report


def _without_nulls(value: Any) -> Any:
    """Return a document without the keys whose value is None, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _describe_run(summary: Summary) -> Document:
    """Return the id and the times of a run, and whether it is simulated or invalid."""
    run = summary.run
    is_simulated = summary.target.simulated

    keywords = []
    if is_simulated:
        keywords.append("simulated")

    if not summary.verdict.valid:
        keywords.append("invalid")

    duration_s = summary.window.full_run.duration_s
    return {
        "uid": run.id,
        "time": {
            "start": run.started or None,
            "end": run.ended or None,
            "duration": None if duration_s is None else f"PT{duration_s:.6f}S",
        },
        "keywords": keywords or None,
        "description": "produced by a performance model, not by real hardware"
        if is_simulated
        else None,
    }


def _count_requests(summary: Summary, source: ExportSource) -> Document:
    """Return the counts of requests by outcome, and the statistics of their lengths.

    A lost request is one whose outcome is unknown, because its worker process died. The report
    counts it as incomplete, but `source.failed_requests` includes it, so it is subtracted there.
    """
    requests = summary.requests
    failed_without_lost = source.failed_requests - requests.lost
    return {
        "total": requests.scheduled - requests.dropped,
        "failures": failed_without_lost,
        "incomplete": requests.cancelled + requests.unfinished + requests.lost,
        "input_length": _describe_lengths(source.successful_column("input_tokens")),
        "output_length": _describe_lengths(source.successful_column("output_tokens")),
    }


def _describe_latencies(summary: Summary) -> Document:
    """Return the statistics of each latency that is not withheld and has values."""
    latencies: Document = {}
    for metric, latency in _LATENCIES.items():
        is_withheld = metric.removesuffix("_ms") in summary.withheld_metrics
        distribution: Distribution = getattr(summary, metric)
        # The format requires the mean.
        if not is_withheld and distribution.mean is not None:
            latencies[latency.name] = _describe_distribution(distribution, latency.units)

    return latencies


def _describe_distribution(distribution: Distribution, units: str) -> Document:
    """Return the statistics of a latency by the names of the report; withheld ones are None."""
    names = ("mean", "min", "p50", "p90", "p95", "p99", "max")
    return {
        "units": units,
        **{name: getattr(distribution, name) for name in names},
        "p99p9": distribution.p99_9,
    }


def _describe_throughput(summary: Summary) -> Document:
    """Return the headline rates of a run, without those that are unknown."""
    rates = select_headline_rates(summary)
    fields = (
        ("request_rate", "queries/s", rates.requests),
        ("input_token_rate", "tokens/s", rates.input),
        ("output_token_rate", "tokens/s", rates.output),
        ("total_token_rate", "tokens/s", rates.total),
    )
    return {
        name: {"units": units, "mean": value} for name, units, value in fields if value is not None
    }


def _describe_lengths(token_counts: NDArray[np.int64]) -> Document | None:
    """Return the statistics of the lengths of prompts or responses, in tokens.

    Return None if no length is known. Unknown lengths are negative.
    """
    known_counts = np.sort(token_counts[token_counts >= 0])
    if len(known_counts) == 0:
        return None

    percentiles = {
        name: _nearest_rank_percentile(known_counts, fraction)
        for name, fraction in _LENGTH_QUANTILES.items()
    }
    return {
        "units": "count",
        "mean": float(known_counts.mean()),
        "min": int(known_counts[0]),
        "max": int(known_counts[-1]),
        **percentiles,
    }


def _nearest_rank_percentile(ordered: NDArray[np.int64], fraction: float) -> int:
    """Return a percentile of sorted values by the nearest-rank method, without interpolation.

    It is the smallest value that is at least as large as the fraction of all values. For example,
    the p50 of 5 values is the third one, because it has the rank ceil(0.5 * 5) = 3.
    """
    rank = max(math.ceil(fraction * len(ordered)), 1)
    return int(ordered[rank - 1])


def _describe_server(summary: Summary) -> Document:
    """Return the server as a component of the stack that was measured."""
    target = summary.target
    return {
        "metadata": {"label": target.name or target.url or "server", "cfg_id": ""},
        "standardized": {
            "kind": "generic",
            "tool": target.server or "unknown",
            "tool_version": target.version or "unknown",
            "model": {"name": target.model},
            "gpus": target.gpus,
            "shape": target.shape or None,
        },
        "native": {},
    }


def _describe_load(summary: Summary, source: ExportSource) -> Document:
    """Return the object `scenario.load` of the report: which tool sent which load.

    A load has a rate in an open loop and a concurrency in a closed loop; the other one is None.
    The format forbids fields of other names except in `native.config`, which therefore has what
    the reports in other formats have in the field `loadgen`.
    """
    input_lengths = _describe_requested_lengths(source.successful_column("input_tokens"))
    output_lengths = _describe_requested_lengths(source.successful_column("output_tokens"))
    return {
        "metadata": {
            "cfg_id": summary.fingerprints.recipe or None,
            "description": f"{summary.run.workload}: {summary.load.arrival}",
        },
        "standardized": {
            "tool": "loadgen",
            "tool_version": summary.run.version,
            "parallelism": max(source.manifest.workers, 1),
            # The source of the prompts. The format has no value for those of a workload file.
            "source": "unknown",
            "input_seq_len": input_lengths,
            "output_seq_len": output_lengths,
            "rate_qps": _find_open_loop_rate(source),
            "concurrency": source.concurrency,
        },
        "native": {"config": source.provenance},
    }


def _find_open_loop_rate(source: ExportSource) -> float | None:
    """Return the requested rate per second, or None in a closed loop or without a finite rate."""
    rate_per_s = source.rate_per_s
    if source.concurrency or rate_per_s is None:
        return None
    has_finite_rate = 0 < rate_per_s < math.inf
    return rate_per_s if has_finite_rate else None


def _describe_requested_lengths(tokens: NDArray[np.int64]) -> Document:
    """Return the distribution of token counts that the scenario requested, a required field.

    It is "fixed" if all counts are equal. The format has no empirical distribution, so counts that
    vary are "other".
    """
    known_tokens = tokens[tokens >= 0]
    if len(known_tokens) == 0:
        return {"distribution": "other", "value": 0}

    shortest = int(known_tokens.min())
    longest = int(known_tokens.max())
    return {
        "distribution": "fixed" if shortest == longest else "other",
        "value": float(known_tokens.mean()),
        "min": shortest,
        # The format requires a maximum above 0.
        "max": max(longest, 1),
    }


# -- reading -------------------------------------------------------------------------------------


def fits(file: ToolFile) -> bool:
    """Return True if a file is a report of version 0.2."""
    report = _parse_report(file)
    has_results = find_value(report, "results.request_performance") is not None
    return str(report.get("version", "")).startswith("0.2") and has_results


def read(file: ToolFile) -> ForeignResult:
    """Return the result in a report. Metrics keep the definitions of the tool that wrote it.

    Raises:
        KeyError: A latency has no units, or units that the format does not have. The caller
            reports this as a file that cannot be read.
    """
    report = _parse_report(file)
    aggregate = find_value(report, "results.request_performance.aggregate") or {}
    latency_statistics = _find_latency_statistics(aggregate)

    metrics: dict[str, float] = {}
    for metric, statistics in latency_statistics.items():
        unit_ms = UNITS_MS[str(statistics["units"])]
        metrics |= latency_metrics(metric, statistics, unit_ms)

    metrics |= find_numbers(aggregate, _RATE_PATHS)
    metrics |= _read_request_counts(aggregate)
    labels = {metric: _LATENCY_NAMES[metric] for metric in latency_statistics}

    return create_result(file.where, metrics, labels, _read_run(report))


def _find_latency_statistics(aggregate: object) -> dict[str, Mapping[str, Any]]:
    """Return the statistics of each latency in a report, by the name of our metric."""
    statistics_by_metric: dict[str, Mapping[str, Any]] = {}
    for metric, name in _LATENCY_NAMES.items():
        statistics = find_value(aggregate, f"latency.{name}")
        if isinstance(statistics, Mapping):
            # `latency_metrics` does not know p99p9, which is the format's name of p99.9.
            statistics_by_metric[metric] = {**statistics, "p99.9": statistics.get("p99p9")}
    return statistics_by_metric


def _parse_report(file: ToolFile) -> Mapping[str, Any]:
    """Return the report in a file, {} if there is none. Most tools write it as YAML."""
    is_json = bool(file.value)
    if is_json:
        return file.value

    # A YAML file without this key is no report, so it need not be parsed.
    if "request_performance" not in file.text:
        return {}

    try:
        document = plain_yaml(file.text, file.where)
    except UserError:
        return {}

    return document if isinstance(document, Mapping) else {}


def _read_request_counts(aggregate: object) -> dict[str, float]:
    """Return the counts of requests. Incomplete requests count as failed."""
    total = find_number(aggregate, "requests.total")
    failures = find_number(aggregate, "requests.failures") or 0.0
    incomplete = find_number(aggregate, "requests.incomplete") or 0.0
    failed = failures + incomplete
    return request_metrics(None if total is None else total - failed, failed)


def _read_run(report: Mapping[str, Any]) -> RunDescription:
    """Return what a report says about the run, its load and the tool that measured it."""
    # The format names the tool that generated the load in the description of the load.
    load = find_value(report, "scenario.load.standardized") or {}
    tool = " ".join(str(load[key]) for key in ("tool", "tool_version") if load.get(key))
    return RunDescription(
        version=report.get("version"),
        model=_find_model(report),
        load=_read_load(load),
        started=find_value(report, "run.time.start"),
        notes=[f"metrics of {tool}, by its definitions"] if tool else [],
    )


def _read_load(load: Any) -> str:
    """Return a load in words, such as "10/s, 8 in flight", as far as the report specifies it."""
    rate_per_s = finite_number(load.get("rate_qps"))
    concurrency = load.get("concurrency")

    texts = []
    if rate_per_s:
        texts.append(f"{rate_per_s:g}/s")

    if concurrency:
        texts.append(f"{concurrency} in flight")

    return ", ".join(texts)


def _find_model(report: Mapping[str, Any]) -> Any:
    """Return the first model that a component of the serving stack names, "" if none does."""
    for component in find_value(report, "scenario.stack") or ():
        model = find_value(component, "standardized.model.name")
        if model:
            return model
    return ""
