"""llm-d's Benchmark Report v0.2.1, written of a run and read: a row of `loadgen.formats`. Pure.

The format: https://github.com/llm-d/llm-d-benchmark, `benchmark-report/`. It forbids fields that it does not know, so
what other exports say in a field `loadgen` stands in `scenario.load.native.config`. Figures are ours, as in
docs/reference/metrics.md: the report names the tool that made them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.core.errors import UserError
from loadgen.core.metrics.summary import Summary
from loadgen.core.stats.quantiles import Distribution
from loadgen.core.workload.yaml_marks import plain_yaml
from loadgen.formats import ForeignResult, ToolFile
from loadgen.interop.export import ExportSource, RunRows
from loadgen.interop.result import WITH_FIRST, as_number, at, counted, made, statistics
from loadgen.runs.rates import select_headline_rates

VERSION = "0.2.1"
TOOL = "llm-d Benchmark Report"
_IN_MS = {"ms": 1.0, "s": 1e3, "ms/token": 1.0, "s/token": 1e3}
_LATENCIES = {  # ours -> theirs, and its unit
    "ttft_ms": ("time_to_first_token", "ms"),
    "tpot_ms": ("time_per_output_token", "ms/token"),
    "inter_chunk_ms": ("inter_token_latency", "ms/token"),
    "e2e_ms": ("request_latency", "ms"),
}
_RATES = {
    "load.completed_rps": "request_rate",
    "tokens.input_per_s": "input_token_rate",
    "tokens.output_per_s": "output_token_rate",
    "tokens.total_per_s": "total_token_rate",
}


def write(summary: Summary, stored: RunRows) -> dict[str, Any]:
    """The report of a run, as JSON, which is YAML too. What the run does not have is left out."""
    source, run, requests = ExportSource(summary, stored, TOOL), summary.run, summary.requests
    latency = {
        theirs: block
        for ours, (theirs, units) in _LATENCIES.items()
        if ours.removesuffix("_ms") not in summary.unsound
        and (block := _distribution(getattr(summary, ours), units))
    }
    counts = {
        "total": requests.scheduled - requests.dropped,
        "failures": source.failed - requests.lost,
        "incomplete": requests.cancelled + requests.unfinished + requests.lost,
        "input_length": _lengths(source.column("input_tokens")),
        "output_length": _lengths(source.column("output_tokens")),
    }
    said = ["simulated"] if summary.target.simulated else []
    said += [] if summary.verdict.valid else ["invalid"]
    time = {"start": run.started or None, "end": run.ended or None}
    whole_run_s = summary.window.whole.duration_s
    if whole_run_s is not None:
        time["duration"] = f"PT{whole_run_s:.6f}S"
    report: dict[str, Any] = _known(
        {
            "version": VERSION,
            "run": {
                "uid": run.id,
                "time": time,
                "keywords": said or None,
                "description": "answered by a model of a server, not by hardware"
                if summary.target.simulated
                else None,
            },
            "scenario": {"stack": [_server(summary)], "load": _load(summary, source)},
            "results": {
                "request_performance": {
                    "aggregate": {
                        "requests": counts,
                        "latency": latency,
                        "throughput": _throughput(summary),
                    }
                }
            },
        }
    )
    return report


def _known(value: Any) -> Any:
    """A document without the keys that have no value."""
    if isinstance(value, dict):
        return {key: _known(one) for key, one in value.items() if one is not None}
    return [_known(one) for one in value] if isinstance(value, list) else value


def _throughput(summary: Summary) -> dict[str, Any]:
    """Return the headline rates of a run, without those that are unknown."""
    rates = select_headline_rates(summary)
    named = {
        "request_rate": ("queries/s", rates.requests),
        "input_token_rate": ("tokens/s", rates.input),
        "output_token_rate": ("tokens/s", rates.output),
        "total_token_rate": ("tokens/s", rates.total),
    }
    return {
        name: {"units": units, "mean": value}
        for name, (units, value) in named.items()
        if value is not None
    }


def _distribution(ours: Distribution, units: str) -> dict[str, Any] | None:
    """Return the known statistics of a metric; None without its mean, which is required."""
    if ours.mean is None:
        return None
    values = {
        name: getattr(ours, name) for name in ("mean", "min", "p50", "p90", "p95", "p99", "max")
    }
    statistics_known: dict[str, Any] = _known({"units": units, **values, "p99p9": ours.p99_9})
    return statistics_known


def _lengths(tokens: NDArray[np.int64]) -> dict[str, Any] | None:
    """Statistics of counts of tokens; percentiles are elements of the sample, as ours are."""
    tokens = np.sort(tokens[tokens >= 0])
    if len(tokens) == 0:
        return None
    places = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
    elements = {
        name: int(tokens[max(math.ceil(q * len(tokens)) - 1, 0)]) for name, q in places.items()
    }
    return {
        "units": "count",
        "mean": float(tokens.mean()),
        "min": int(tokens[0]),
        "max": int(tokens[-1]),
        **elements,
    }


def _server(summary: Summary) -> dict[str, Any]:
    target = summary.target
    facts = {"model": {"name": target.model}, "gpus": target.gpus, "shape": target.shape or None}
    return {
        "metadata": {"label": target.name or target.url or "server", "cfg_id": ""},
        "standardized": {
            "kind": "generic",
            "tool": target.server or "unknown",
            "tool_version": target.version or "unknown",
            **facts,
        },
        "native": {},
    }


def _load(summary: Summary, source: ExportSource) -> dict[str, Any]:
    def length(tokens: NDArray[np.int64]) -> dict[str, Any]:
        tokens = tokens[tokens >= 0]
        if len(tokens) == 0:
            return {"distribution": "other", "value": 0}
        low, high = int(tokens.min()), int(tokens.max())
        form = "fixed" if low == high else "other"
        return {
            "distribution": form,
            "value": float(tokens.mean()),
            "min": low,
            "max": max(high, 1),
        }

    rate = source.stage.rate if source.stage is not None and not source.lanes else None
    return {
        "metadata": {
            "cfg_id": summary.fingerprints.recipe or None,
            "description": f"{summary.run.workload}: {summary.load.arrival}",
        },
        "standardized": {
            "tool": "loadgen",
            "tool_version": summary.run.version,
            "parallelism": max(source.manifest.workers, 1),
            "source": "unknown",
            "input_seq_len": length(source.column("input_tokens")),
            "output_seq_len": length(source.column("output_tokens")),
            "rate_qps": rate if rate and math.isfinite(rate) else None,
            "concurrency": source.lanes,
        },
        "native": {"config": source.note},
    }


# -- reading -------------------------------------------------------------------------------------------------------


def _document(file: ToolFile) -> Mapping[str, Any]:
    """The report, which most write as YAML; {} where the file is none."""
    if file.value:
        return file.value
    if "request_performance" not in file.text:
        return {}
    try:
        value = plain_yaml(file.text, file.where)
    except UserError:
        return {}
    return value if isinstance(value, Mapping) else {}


def fits(file: ToolFile) -> bool:
    value = _document(file)
    return (
        str(value.get("version", "")).startswith("0.2")
        and at(value, "results.request_performance") is not None
    )


def read(file: ToolFile) -> ForeignResult:
    value = _document(file)
    aggregate = at(value, "results.request_performance.aggregate") or {}
    figures: dict[str, float] = {}
    called: dict[str, str] = {}
    latencies = {ours: theirs for ours, (theirs, _) in _LATENCIES.items()}
    for ours, theirs in {**latencies, WITH_FIRST: "normalized_time_per_output_token"}.items():
        block = at(aggregate, f"latency.{theirs}")
        if isinstance(block, Mapping):
            scale = _IN_MS[str(block["units"])]
            figures |= statistics(ours, {**block, "p99.9": block.get("p99p9")}, scale)
            called[ours] = theirs
    for ours, theirs in _RATES.items():
        if (number := as_number(at(aggregate, f"throughput.{theirs}.mean"))) is not None:
            figures[ours] = number
    total, failures, incomplete = (as_number(at(aggregate, f"requests.{name}")) for name in _COUNTS)
    failed = (failures or 0.0) + (incomplete or 0.0)
    figures |= counted(None if total is None else total - failed, failed)
    load = at(value, "scenario.load.standardized") or {}
    rate, lanes = as_number(load.get("rate_qps")), load.get("concurrency")
    loads = [*([f"{rate:g}/s"] if rate else []), *([f"{lanes} in flight"] if lanes else [])]
    models = [at(one, "standardized.model.name") for one in at(value, "scenario.stack") or ()]
    tool = " ".join(str(load[key]) for key in ("tool", "tool_version") if load.get(key))
    return made(
        file.where,
        figures,
        called,
        version=value.get("version"),
        model=next(filter(None, models), ""),
        load=", ".join(loads),
        started=at(value, "run.time.start"),
        notes=[f"figures of {tool}, by its definitions"] if tool else [],
    )


_COUNTS = ("total", "failures", "incomplete")
