"""Reads result files of inference-perf: `summary_lifecycle_metrics.json`. Pure."""

from __future__ import annotations

from typing import Any

from loadgen.interop.result import WITH_FIRST, ForeignResult, as_number, counted, numbers, result, statistics


def inference_perf(value: dict[str, Any], where: str) -> ForeignResult:
    successes = value["successes"]
    latency, rates = successes.get("latency") or {}, successes.get("throughput") or {}
    figures: dict[str, float] = {}
    for our_name, their_name in (
        ("ttft_ms", "time_to_first_token"),
        ("tpot_ms", "time_per_output_token"),
        (WITH_FIRST, "normalized_time_per_output_token"),
        ("inter_chunk_ms", "inter_token_latency"),
        ("e2e_ms", "request_latency"),
    ):
        figures |= statistics(our_name, latency.get(their_name), 1e3)
    figures |= numbers(
        {
            "load.completed_rps": rates.get("requests_per_sec"),
            "tokens.output_per_s": rates.get("output_tokens_per_sec"),
            "tokens.total_per_s": rates.get("total_tokens_per_sec"),
        }
    )
    figures |= counted(successes.get("count"), (value.get("failures") or {}).get("count"))
    load_summary = value.get("load_summary") or {}
    delay_p99_s = as_number((load_summary.get("schedule_delay") or {}).get("p99"))
    notes = (
        (f"requests were sent up to {delay_p99_s * 1e3:,.0f} ms (p99) after they were due",)
        if delay_p99_s and delay_p99_s > 0.05
        else ()
    )
    rate = as_number(load_summary.get("requested_rate"))
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
