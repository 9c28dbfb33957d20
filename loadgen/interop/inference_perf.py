"""Result files of inference-perf: `summary_lifecycle_metrics.json`. Pure."""

from __future__ import annotations

from typing import Any

from loadgen.interop.result import WITH_FIRST, ForeignResult, as_number, counted, numbers, result, statistics


def inference_perf(value: dict[str, Any], where: str) -> ForeignResult:
    good = value["successes"]
    latency, rates = good.get("latency") or {}, good.get("throughput") or {}
    figures: dict[str, float] = {}
    for ours, theirs in (
        ("ttft_ms", "time_to_first_token"),
        ("tpot_ms", "time_per_output_token"),
        (WITH_FIRST, "normalized_time_per_output_token"),
        ("inter_chunk_ms", "inter_token_latency"),
        ("e2e_ms", "request_latency"),
    ):
        figures |= statistics(ours, latency.get(theirs), 1e3)
    figures |= numbers(
        {
            "load.completed_rps": rates.get("requests_per_sec"),
            "tokens.output_per_s": rates.get("output_tokens_per_sec"),
            "tokens.total_per_s": rates.get("total_tokens_per_sec"),
        }
    )
    figures |= counted(good.get("count"), (value.get("failures") or {}).get("count"))
    asked = value.get("load_summary") or {}
    late = as_number((asked.get("schedule_delay") or {}).get("p99"))
    notes = (
        (f"requests were sent up to {late * 1e3:,.0f} ms (p99) after they were due",) if late and late > 0.05 else ()
    )
    rate = as_number(asked.get("requested_rate"))
    return result(
        "inference-perf",
        where,
        figures,
        {
            "ttft_ms": "time_to_first_token",
            "tpot_ms": "time_per_output_token",
            WITH_FIRST: "normalized_time_per_output_token",
            "inter_chunk_ms": "inter_token_latency",
            "e2e_ms": "request_latency",
        },
        load=f"{rate:g}/s" if rate else "",
        notes=notes,
    )
