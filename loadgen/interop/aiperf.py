"""Reads result files of AIPerf: `profile_export_aiperf.json`, and its records with one line per request. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from loadgen.errors import UserError
from loadgen.interop.result import ForeignResult, counted, numbers, result, statistics
from loadgen.stats.quantiles import QUANTILES


def aiperf(value: dict[str, Any], where: str) -> ForeignResult:
    def average(name: str) -> Any:
        block = value.get(name)
        return block.get("avg") if isinstance(block, Mapping) else None

    units = {"ms": 1.0, "s": 1e3, "sec": 1e3, "us": 1e-3, "ns": 1e-6}
    figures: dict[str, float] = {}
    for our_name, their_name in (
        ("ttft_ms", "time_to_first_token"),
        ("tpot_ms", "inter_token_latency"),
        ("inter_chunk_ms", "inter_chunk_latency"),
        ("e2e_ms", "request_latency"),
    ):
        block = value.get(their_name)
        if isinstance(block, Mapping):
            figures |= statistics(our_name, block, units.get(str(block.get("unit")), 1.0))
    figures |= numbers(
        {
            "load.completed_rps": average("request_throughput"),
            "goodput.rps": average("goodput"),
            "tokens.output_per_s": average("output_token_throughput"),
            "tokens.total_per_s": average("total_token_throughput"),
            "tokens.input": average("total_isl"),
            "tokens.output": average("total_osl"),
        }
    )
    figures |= counted(average("request_count"), average("error_request_count"))
    input_config = value.get("input_config") or {}
    models = (input_config.get("models") or {}).get("items") or [{}]
    urls = (input_config.get("endpoint") or {}).get("urls") or [""]
    return result(
        "AIPerf",
        where,
        figures,
        {
            "ttft_ms": "Time to First Token",
            "tpot_ms": "Inter Token Latency",
            "inter_chunk_ms": "Inter Chunk Latency",
            "e2e_ms": "Request Latency",
        },
        version=value.get("aiperf_version"),
        model=models[0].get("name"),
        target=urls[0],
        started=value.get("start_time"),
    )


def records(text: str, where: str) -> ForeignResult:
    """`profile_export.jsonl`: one line per request. The statistics are computed as AIPerf computes them."""
    names = {"ttft_ms": "time_to_first_token", "tpot_ms": "inter_token_latency", "e2e_ms": "request_latency"}
    values: dict[str, list[float]] = {our_name: [] for our_name in (*names, "inter_chunk_ms")}
    tokens, failed = 0.0, 0
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            metrics = record["metrics"]
            if record.get("error"):
                failed += 1
                continue
            for our_name, their_name in names.items():
                if their_name in metrics:
                    values[our_name].append(float(metrics[their_name]["value"]))
            values["inter_chunk_ms"] += metrics.get("inter_chunk_latency", {}).get("value", [])
            tokens += metrics.get("output_sequence_length", {}).get("value", 0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"no record of AIPerf: {error}", f"{where}:{number}", "the line is damaged") from None
    figures: dict[str, float] = {}
    for our_name, sample in values.items():
        if sample:
            stats = {name: float(np.percentile(sample, 100 * p)) for name, p in QUANTILES}
            figures |= statistics(
                our_name, {**stats, "mean": float(np.mean(sample)), "min": min(sample), "max": max(sample)}
            )
    figures |= counted(len(values["e2e_ms"]), failed) | {"tokens.output": tokens}
    called = {our_name: their_name.replace("_", " ") for our_name, their_name in names.items()}
    return result("AIPerf", where, figures, {**called, "inter_chunk_ms": "inter chunk latency"})
