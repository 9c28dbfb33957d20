"""Reads result files of GuideLLM: the last benchmark of a `benchmarks.json`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen.interop.result import WITH_FIRST, ForeignResult, counted, numbers, result, statistics


def guidellm(value: dict[str, Any], where: str) -> ForeignResult:
    runs = value["benchmarks"]
    run = runs[-1]
    metrics = run["metrics"]

    def successful(name: str) -> Any:
        block = metrics.get(name)
        return block.get("successful") if isinstance(block, Mapping) else None

    figures: dict[str, float] = {}
    for our_name, their_name, scale in (
        ("ttft_ms", "time_to_first_token_ms", 1.0),
        ("tpot_ms", "inter_token_latency_ms", 1.0),
        (WITH_FIRST, "time_per_output_token_ms", 1.0),
        ("e2e_ms", "request_latency", 1e3),
    ):
        figures |= statistics(our_name, successful(their_name), scale)
    rates = {"load.completed_rps": "requests_per_second", "tokens.output_per_s": "output_tokens_per_second"}
    rates |= {"tokens.total_per_s": "tokens_per_second"}
    figures |= numbers({path: (successful(their_name) or {}).get("mean") for path, their_name in rates.items()})
    totals = {"tokens.input": "prompt_token_count", "tokens.output": "output_token_count"}
    figures |= numbers({path: (successful(their_name) or {}).get("total_sum") for path, their_name in totals.items()})
    request_totals = metrics.get("request_totals") or {}
    figures |= counted(
        request_totals.get("successful"), (request_totals.get("errored") or 0) + (request_totals.get("incomplete") or 0)
    )
    spec = (value.get("config") or {}).get("spec") or {}
    backend = spec.get("backend") or {}
    strategy = (run.get("config") or {}).get("strategy") or {}
    lanes = strategy.get("streams") or strategy.get("max_concurrency")
    notes = (f"the last of {len(runs)} benchmarks in the file",) if len(runs) > 1 else ()
    return result(
        "GuideLLM",
        where,
        figures,
        {"ttft_ms": "TTFT", "tpot_ms": "ITL", WITH_FIRST: "TPOT", "e2e_ms": "Request latency"},
        version=(value.get("metadata") or {}).get("guidellm_version"),
        model=backend.get("model"),
        target=backend.get("target"),
        load=" ".join(filter(None, (strategy.get("type_"), f"{lanes}" if lanes else ""))),
        notes=notes,
    )
