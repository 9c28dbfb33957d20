"""Where each tool that writes JSON keeps its figures: rows of `loadgen.formats`. Pure; `result.py` has what they share.

The value of a `ToolFile` is a mapping here.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from loadgen.core.errors import UserError
from loadgen.core.stats.quantiles import QUANTILES
from loadgen.formats import ForeignResult, ToolFile
from loadgen.interop.result import WITH_FIRST, as_number, at, counted, made, result, statistics

SECONDS, NANOSECONDS = 1e3, 1e-6  # in ms


def _words(*parts: Any) -> str:
    return " ".join(str(part) for part in parts if part)


# -- vllm bench serve, SGLang's bench_serving: flat JSON of a common origin -----------------------------------------


def is_sglang(file: ToolFile) -> bool:
    return "mean_e2e_latency_ms" in file.value and "mean_ttft_ms" in file.value


def sglang(file: ToolFile) -> ForeignResult:
    return _bench_serving(file, "e2e_latency")


def is_vllm(file: ToolFile) -> bool:
    return "mean_ttft_ms" in file.value and "request_throughput" in file.value


def vllm(file: ToolFile) -> ForeignResult:
    return _bench_serving(file, "e2el")


def _bench_serving(file: ToolFile, e2e: str) -> ForeignResult:
    """`e2e` is the tool's name for end-to-end latency."""
    value = file.value
    stats = ("mean", "median", "p50", "p90", "p95", "p99", "p99.9")
    blocks = {
        name: {stat: value.get(f"{stat}_{name}_ms") for stat in stats}
        for name in ("ttft", "tpot", "itl", e2e)
    }
    lanes, rate = (
        value.get("max_concurrency"),
        as_number(value.get("request_rate")),
    )  # an infinite rate: lanes decide
    loads = [
        *([f"{rate:g}/s"] if rate is not None else []),
        *([f"{lanes} in flight at most"] if lanes else []),
    ]
    return result(
        file,
        {**value, **blocks},
        latencies={
            "ttft_ms": ("ttft", "TTFT"),
            "tpot_ms": ("tpot", "TPOT"),
            "inter_chunk_ms": ("itl", "ITL"),
            "e2e_ms": (e2e, "E2EL"),
        },
        figures={
            "load.completed_rps": "request_throughput",
            "goodput.rps": "request_goodput",
            "tokens.output_per_s": "output_throughput",
            "tokens.total_per_s": "total_token_throughput"
            if "total_token_throughput" in value
            else "total_throughput",
            "tokens.input": "total_input_tokens",
            "tokens.output": "total_output_tokens",
        },
        ok="completed",
        failed=("failed",) if "failed" in value else (),
        model=value.get("model_id"),
        load=", ".join(loads) or "everything at once",
        started=value.get("date"),
    )


# -- AIPerf ---------------------------------------------------------------------------------------------------------

_AIPERF = {
    "ttft_ms": ("time_to_first_token", "Time to First Token"),
    "tpot_ms": ("inter_token_latency", "Inter Token Latency"),
    "inter_chunk_ms": ("inter_chunk_latency", "Inter Chunk Latency"),
    "e2e_ms": ("request_latency", "Request Latency"),
}


def is_aiperf(file: ToolFile) -> bool:
    value = file.value
    return (
        _is_records(file.text)
        or "aiperf_version" in value
        or isinstance(value.get("request_latency"), dict)
    )


def aiperf(file: ToolFile) -> ForeignResult:
    """`profile_export_aiperf.json`, or `profile_export.jsonl`."""
    value = file.value
    if _is_records(file.text):
        return _aiperf_records(file.text, file.where)
    return result(
        file,
        value,
        latencies=_AIPERF,
        figures={
            "load.completed_rps": "request_throughput.avg",
            "goodput.rps": "goodput.avg",
            "tokens.output_per_s": "output_token_throughput.avg",
            "tokens.total_per_s": "total_token_throughput.avg",
            "tokens.input": "total_isl.avg",
            "tokens.output": "total_osl.avg",
        },
        ok="request_count.avg",
        failed=("error_request_count.avg",),
        version=value.get("aiperf_version"),
        model=at(value, "input_config.models.items.0.name"),
        target=at(value, "input_config.endpoint.urls.0"),
        started=value.get("start_time"),
    )


def _is_records(text: str) -> bool:
    return (
        text.startswith('{"metadata"')
        and '"metrics"' in text.splitlines()[0]
        and '"benchmarks"' not in text
    )


def _aiperf_records(text: str, where: str) -> ForeignResult:
    """`profile_export.jsonl`: one line per request. The statistics are computed as AIPerf computes them."""
    values: dict[str, list[float]] = {our_name: [] for our_name in _AIPERF}
    tokens, failed = 0.0, 0
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            metrics = record["metrics"]
            if record.get("error"):
                failed += 1
                continue
            for our_name, (their_name, _) in _AIPERF.items():
                if their_name in metrics:
                    value = metrics[their_name]["value"]
                    values[our_name] += map(
                        float, value if our_name == "inter_chunk_ms" else [value]
                    )
            tokens += metrics.get("output_sequence_length", {}).get("value", 0)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise UserError(
                "damaged_file",
                f"no record of AIPerf: {error}",
                f"{where}:{number}",
                "the line is damaged",
            ) from None
    figures: dict[str, float] = {}
    for our_name, sample in values.items():
        if sample:
            stats = {name: float(np.percentile(sample, 100 * p)) for name, p in QUANTILES}
            stats |= {"mean": float(np.mean(sample)), "min": min(sample), "max": max(sample)}
            figures |= statistics(our_name, stats)
    figures |= counted(len(values["e2e_ms"]), failed) | {"tokens.output": tokens}
    return made(
        where, figures, {ours: theirs.replace("_", " ") for ours, (theirs, _) in _AIPERF.items()}
    )


# -- GuideLLM, inference-perf, genai-bench, mlcommons/endpoints -------------------------------------------------------


def is_guidellm(file: ToolFile) -> bool:
    benchmarks = file.value.get("benchmarks")
    return isinstance(benchmarks, list) and len(benchmarks) > 0


def guidellm(file: ToolFile) -> ForeignResult:
    """The last benchmark of a `benchmarks.json`."""
    value = file.value
    runs = value["benchmarks"]
    metrics = runs[-1]["metrics"]
    strategy = at(runs[-1], "config.strategy") or {}
    notes = [f"the last of {len(runs)} benchmarks in the file"] if len(runs) > 1 else []
    return result(
        file,
        metrics,
        latencies={
            "ttft_ms": ("time_to_first_token_ms.successful", "TTFT"),
            "tpot_ms": ("inter_token_latency_ms.successful", "ITL"),
            WITH_FIRST: ("time_per_output_token_ms.successful", "TPOT"),
            "e2e_ms": ("request_latency.successful", "Request latency", SECONDS),
        },
        figures={
            "load.completed_rps": "requests_per_second.successful.mean",
            "tokens.output_per_s": "output_tokens_per_second.successful.mean",
            "tokens.total_per_s": "tokens_per_second.successful.mean",
            "tokens.input": "prompt_token_count.successful.total_sum",
            "tokens.output": "output_token_count.successful.total_sum",
        },
        ok="request_totals.successful",
        failed=("request_totals.errored", "request_totals.incomplete"),
        version=at(value, "metadata.guidellm_version"),
        model=at(value, "config.spec.backend.model"),
        target=at(value, "config.spec.backend.target"),
        load=_words(
            strategy.get("type_"), strategy.get("streams") or strategy.get("max_concurrency")
        ),
        notes=notes,
    )


def is_inference_perf(file: ToolFile) -> bool:
    return "successes" in file.value and "load_summary" in file.value


def inference_perf(file: ToolFile) -> ForeignResult:
    """`summary_lifecycle_metrics.json`."""
    value = file.value
    delay_p99_s = as_number(at(value, "load_summary.schedule_delay.p99")) or 0.0
    rate = as_number(at(value, "load_summary.requested_rate"))
    latencies = {
        "ttft_ms": "time_to_first_token",
        "tpot_ms": "time_per_output_token",
        WITH_FIRST: "normalized_time_per_output_token",
        "inter_chunk_ms": "inter_token_latency",
        "e2e_ms": "request_latency",
    }
    late = f"requests were sent up to {delay_p99_s * 1e3:,.0f} ms (p99) after they were due"
    return result(
        file,
        value,
        latencies={
            ours: (f"successes.latency.{theirs}", theirs, SECONDS)
            for ours, theirs in latencies.items()
        },
        figures={
            "load.completed_rps": "successes.throughput.requests_per_sec",
            "tokens.output_per_s": "successes.throughput.output_tokens_per_sec",
            "tokens.total_per_s": "successes.throughput.total_tokens_per_sec",
        },
        ok="successes.count",
        failed=("failures.count",),
        load=f"{rate:g}/s" if rate else "",
        notes=[late] if delay_p99_s > 0.05 else [],
    )


def is_genai_bench(file: ToolFile) -> bool:
    return isinstance(file.value.get("aggregated_metrics"), dict)


def genai_bench(file: ToolFile) -> ForeignResult:
    """The JSON of one concurrency level."""
    value = file.value
    metrics, lanes = value["aggregated_metrics"], at(value, "aggregated_metrics.num_concurrency")
    scale = 1.0 if value.get("_time_unit", "s") == "ms" else SECONDS
    return result(
        file,
        metrics,
        latencies={
            "ttft_ms": ("stats.ttft", "TTFT", scale),
            "tpot_ms": ("stats.tpot", "TPOT", scale),
            "e2e_ms": ("stats.e2e_latency", "E2E latency", scale),
        },
        figures={
            "load.completed_rps": "requests_per_second",
            "tokens.output_per_s": "mean_output_throughput_tokens_per_s",
            "tokens.total_per_s": "mean_total_tokens_throughput_tokens_per_s",
        },
        ok="num_completed_requests",
        failed=("num_error_requests",),
        load=_words(metrics.get("scenario"), f"{lanes} in flight" if lanes else ""),
    )


def is_endpoints(file: ToolFile) -> bool:
    return "n_samples_issued" in file.value and "latency" in file.value


def endpoints(file: ToolFile) -> ForeignResult:
    """The `result_summary.json` of mlcommons/endpoints."""
    value = file.value
    pattern = at(value, "run_config.load_pattern") or {}
    target_load = pattern.get("target_qps") or pattern.get("target_concurrency")
    notes = []
    if (as_number(at(value, "tpot.min")) or 0.0) < 0:
        notes.append(
            "some of its TPOTs are negative: a first token was stamped after the end of its answer"
        )
    if value.get("complete") is False:
        notes.append("its run is not complete")
    # A sample that fails is counted as completed too.
    completed = as_number(value.get("n_samples_completed"))
    failed = as_number(value.get("n_samples_failed")) or 0.0
    succeeded = None if completed is None else completed - failed
    return result(
        file,
        {**value, "n_samples_succeeded": succeeded},
        latencies={
            "ttft_ms": ("ttft", "ttft", NANOSECONDS),
            "tpot_ms": ("tpot", "tpot", NANOSECONDS),
            "e2e_ms": ("latency", "latency", NANOSECONDS),
        },
        figures={
            "load.completed_rps": "qps",
            "tokens.output_per_s": "tps",
            "tokens.input": "input_sequence_lengths.total",
            "tokens.output": "output_sequence_lengths.total",
        },
        ok="n_samples_succeeded",
        failed=("n_samples_failed",),
        version=value.get("version"),
        load=_words(pattern.get("type"), f"{target_load:g}" if target_load else ""),
        notes=notes,
    )
