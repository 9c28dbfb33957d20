"""Writes the records of a run as AIPerf's `profile_export.jsonl`: a line for each request that was sent.

Pure. Figures are by AIPerf's definitions, times in ms; `inter_chunk_latency` are the gaps, where the run kept them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import numpy as np

from loadgen.core.metrics.summary import Summary
from loadgen.core.results.record import KINDS
from loadgen.interop.export import ExportSource, RunRows

FIELDS = ("slot", "session", "turn", "worker", "sent_ns", "first_byte_ns", "done_ns", "kind", "http_status")


def write(summary: Summary, stored: RunRows) -> bytes:
    """The first line has the field `loadgen` too."""
    lines = list(_records(ExportSource(summary, stored, "AIPerf")))
    lines[:1] = [line | {"loadgen": ExportSource(summary, stored, "AIPerf").note} for line in lines[:1]]
    return b"".join(json.dumps(line, allow_nan=False).encode() + b"\n" for line in lines)


def _records(source: ExportSource) -> Iterator[dict[str, Any]]:
    columns, run = source.columns, source.summary.run.id
    zero_ns = round(datetime.fromisoformat(source.header.started).timestamp() * 1e9)
    metrics = _metrics(source)
    is_ok = source.ok.tolist()
    for number, (slot, session, turn, worker, sent, first_byte, done, kind, status) in enumerate(
        zip(*(columns[name].tolist() for name in FIELDS), strict=True)
    ):
        if sent < 0:
            continue
        of_request = next(metrics) if is_ok[number] else {}
        error = None if is_ok[number] else {"code": status or None, "type": KINDS[kind], "message": KINDS[kind]}
        yield {
            "metadata": {
                "session_num": slot,
                "x_request_id": f"{run}-{slot}",
                "x_correlation_id": f"{run}-{slot}",
                "conversation_id": f"{run}-{slot if session < 0 else session}",
                "turn_index": turn,
                "request_start_ns": zero_ns + sent,
                "request_ack_ns": zero_ns + first_byte if first_byte >= 0 else None,
                "request_end_ns": zero_ns + done,
                "worker_id": f"worker_{worker}",
                "record_processor_id": "",
                "benchmark_phase": "profiling",
                "was_cancelled": KINDS[kind] == "abandoned",
            },
            "metrics": of_request,
            "error": error,
        }


def _metrics(source: ExportSource) -> Iterator[dict[str, Any]]:
    """Of each request that is ok and has output."""
    samples = source.samples
    if samples is None:
        return
    columns = {
        "time_to_first_token": (samples.ttft.values / 1e6, "ms"),
        "request_latency": (samples.e2e.values / 1e6, "ms"),
        "inter_token_latency": (samples.itl.values / 1e6, "ms"),  # type: ignore[union-attr]  # one a request
        "input_sequence_length": (source.column("input_tokens"), "tokens"),
        "output_sequence_length": (source.column("output_tokens"), "tokens"),
    }
    each_gap = source.each_gap or {}
    for number, slot in enumerate(source.column("slot").tolist()):
        found = {
            name: {"value": values[number].item(), "unit": unit}
            for name, (values, unit) in columns.items()
            if not np.isnan(values[number])
        }
        if (gaps := each_gap.get(slot)) is not None:
            found["inter_chunk_latency"] = {"value": (gaps / 1e6).tolist(), "unit": "ms"}
        yield found
