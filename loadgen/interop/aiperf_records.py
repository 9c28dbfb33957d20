"""Writes the records of a run as AIPerf's `profile_export.jsonl`: a line for each request that was sent.

Pure. Figures are by AIPerf's definitions, times in ms; `inter_chunk_latency` are the gaps, where the run kept them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from numpy.typing import NDArray

from loadgen.core.metrics.summary import Summary
from loadgen.core.results.record import KINDS
from loadgen.interop.export import ExportSource, RunRows

FIELDS = (
    "slot",
    "session",
    "turn",
    "worker",
    "sent_ns",
    "first_byte_ns",
    "done_ns",
    "kind",
    "http_status",
)
AT_ONCE = 10_000  # rows that are objects at a time


def write(summary: Summary, stored: RunRows) -> Iterator[bytes]:
    """The first line has the field `loadgen` too."""
    source = ExportSource(summary, stored, "AIPerf")
    encode, note = json.JSONEncoder(allow_nan=False).encode, {"loadgen": source.note}
    for line in _records(source):
        yield encode(line | note).encode() + b"\n"
        note = {}


def _records(source: ExportSource) -> Iterator[dict[str, Any]]:
    columns, run = source.columns, source.summary.run.id
    zero_ns = round(datetime.fromisoformat(source.manifest.started).timestamp() * 1e9)
    metrics = _metrics(source)
    of_rows = _rows_of([*(columns[name] for name in FIELDS), source.ok])
    for slot, session, turn, worker, sent, first_byte, done, kind, status, is_ok in of_rows:
        if sent < 0:
            continue
        of_request = next(metrics) if is_ok else {}
        error = (
            None if is_ok else {"code": status or None, "type": KINDS[kind], "message": KINDS[kind]}
        )
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
    units = [(name, unit) for name, (_, unit) in columns.items()]
    for slot, *values in _rows_of(
        [source.column("slot"), *(column for column, _ in columns.values())]
    ):
        found: dict[str, Any] = {
            name: {"value": value, "unit": unit}
            for (name, unit), value in zip(units, values, strict=True)
            if not math.isnan(value)
        }
        if (gaps := each_gap.get(slot)) is not None:
            found["inter_chunk_latency"] = {"value": (gaps / 1e6).tolist(), "unit": "ms"}
        yield found


def _rows_of(columns: Sequence[NDArray[Any]]) -> Iterator[tuple[Any, ...]]:
    """The values of each row, made of a part of the columns at a time."""
    for first in range(0, len(columns[0]), AT_ONCE):
        yield from zip(
            *(column[first : first + AT_ONCE].tolist() for column in columns), strict=True
        )
