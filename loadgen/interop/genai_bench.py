"""Reads result files of genai-bench: the JSON of one concurrency level. Pure."""

from __future__ import annotations

from typing import Any

from loadgen.interop.result import ForeignResult, counted, numbers, result, statistics


def genai_bench(value: dict[str, Any], where: str) -> ForeignResult:
    metrics = value["aggregated_metrics"]
    scale = 1.0 if value.get("_time_unit", "s") == "ms" else 1e3
    figures: dict[str, float] = {}
    for our_name, their_name in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("e2e_ms", "e2e_latency")):
        figures |= statistics(our_name, (metrics.get("stats") or {}).get(their_name), scale)
    figures |= numbers(
        {
            "load.completed_rps": metrics.get("requests_per_second"),
            "tokens.output_per_s": metrics.get("mean_output_throughput_tokens_per_s"),
            "tokens.total_per_s": metrics.get("mean_total_tokens_throughput_tokens_per_s"),
        }
    )
    figures |= counted(metrics.get("num_completed_requests"), metrics.get("num_error_requests"))
    lanes = metrics.get("num_concurrency")
    return result(
        "genai-bench",
        where,
        figures,
        {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E latency"},
        load=" ".join(filter(None, (str(metrics.get("scenario") or ""), f"{lanes} in flight" if lanes else ""))),
    )
