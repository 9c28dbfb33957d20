"""Result files of genai-bench: one concurrency's JSON. Pure."""

from __future__ import annotations

from typing import Any

from loadgen.interop.result import ForeignResult, counted, numbers, result, statistics


def genai_bench(value: dict[str, Any], where: str) -> ForeignResult:
    run = value["aggregated_metrics"]
    scale = 1.0 if value.get("_time_unit", "s") == "ms" else 1e3
    figures: dict[str, float] = {}
    for ours, theirs in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("e2e_ms", "e2e_latency")):
        figures |= statistics(ours, (run.get("stats") or {}).get(theirs), scale)
    figures |= numbers(
        {
            "load.completed_rps": run.get("requests_per_second"),
            "tokens.output_per_s": run.get("mean_output_throughput_tokens_per_s"),
            "tokens.total_per_s": run.get("mean_total_tokens_throughput_tokens_per_s"),
        }
    )
    figures |= counted(run.get("num_completed_requests"), run.get("num_error_requests"))
    lanes = run.get("num_concurrency")
    return result(
        "genai-bench",
        where,
        figures,
        {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E latency"},
        load=" ".join(filter(None, (str(run.get("scenario") or ""), f"{lanes} in flight" if lanes else ""))),
    )
