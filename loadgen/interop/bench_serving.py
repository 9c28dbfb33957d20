"""Reads result files of `vllm bench serve` and SGLang's bench_serving: flat JSON of a common origin. Pure."""

from __future__ import annotations

from typing import Any

from loadgen.interop.result import ForeignResult, counted, in_flight, numbers, result, statistics


def _bench_serving(value: dict[str, Any], where: str, tool: str, e2e: str) -> ForeignResult:
    """The result in a flat file of either tool; `e2e` is the tool's name for end-to-end latency."""
    figures: dict[str, float] = {}
    for our_name, their_name in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("inter_chunk_ms", "itl"), ("e2e_ms", e2e)):
        stats = {
            stat: value.get(f"{stat}_{their_name}_ms")
            for stat in ("mean", "median", "p50", "p90", "p95", "p99", "p99.9")
        }
        stats["p99_9"] = stats.pop("p99.9")
        figures |= statistics(our_name, stats)
    total = value.get("total_token_throughput", value.get("total_throughput"))
    figures |= numbers(
        {
            "load.completed_rps": value.get("request_throughput"),
            "goodput.rps": value.get("request_goodput"),
            "tokens.output_per_s": value.get("output_throughput"),
            "tokens.total_per_s": total,
            "tokens.input": value.get("total_input_tokens"),
            "tokens.output": value.get("total_output_tokens"),
        }
    )
    figures |= counted(value.get("completed"), value.get("failed"))
    return result(
        tool,
        where,
        figures,
        {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "inter_chunk_ms": "ITL", "e2e_ms": "E2EL"},
        model=value.get("model_id"),
        load=in_flight(value.get("max_concurrency"), value.get("request_rate")),
        started=value.get("date"),
    )


def vllm(value: dict[str, Any], where: str) -> ForeignResult:
    return _bench_serving(value, where, "vllm bench serve", "e2el")


def sglang(value: dict[str, Any], where: str) -> ForeignResult:
    return _bench_serving(value, where, "SGLang bench_serving", "e2e_latency")
