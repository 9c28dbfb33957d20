"""Writes the records of a run as AIPerf's `profile_export.jsonl`: one line for each sent request.

Metrics follow AIPerf's definitions. Times of metrics are in ms. The values of `inter_chunk_latency`
are the times between output events, if the run kept them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.summary import Summary
from loadgen.core.results.record import KINDS
from loadgen.core.units import NS_PER_S, UNIT_NS
from loadgen.interop.export_source import Document, ExportSource, RunRows
from loadgen.interop.sample_statistics import DerivedSample
from loadgen.interop.tool_samples import ToolSamples

RECORD_FIELDS = (
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
BLOCK_ROWS = 10_000
"""Rows become Python objects in blocks of this size, to save memory."""
NS_PER_MS = UNIT_NS["ms"]


class _RequestRecord(NamedTuple):
    """The fields of a record that are written, with the names of RECORD_FIELDS."""

    slot: int
    session: int
    turn: int
    worker: int
    sent_ns: int
    first_byte_ns: int
    done_ns: int
    kind: int
    http_status: int
    is_successful: bool


class _MetricColumn(NamedTuple):
    """A metric with one value for each successful request. NaN stands for an unknown value."""

    name: str
    unit: str
    values: NDArray[Any]


def write(summary: Summary, stored: RunRows) -> Iterator[bytes]:
    """Yield the lines of the file. The first one also has the field `loadgen`."""
    source = ExportSource(summary, stored, "AIPerf")
    encoder = json.JSONEncoder(allow_nan=False)
    for index, document in enumerate(_create_documents(source)):
        if index == 0:
            document["loadgen"] = source.provenance
        yield encoder.encode(document).encode() + b"\n"


def _create_documents(source: ExportSource) -> Iterator[Document]:
    """Yield the record of each request that was sent, in the order of the schedule.

    Only successful requests have metrics. These come from an iterator of their own, which advances
    by one at each successful request.
    """
    run_id = source.summary.run.id
    start_ns = round(datetime.fromisoformat(source.manifest.started).timestamp() * NS_PER_S)
    columns = [source.columns[name] for name in RECORD_FIELDS]

    metrics_of_successful = _compute_metrics(source)
    for values in _iterate_rows([*columns, source.is_successful]):
        record = _RequestRecord(*values)
        was_sent = record.sent_ns >= 0
        if not was_sent:
            continue

        if record.is_successful:
            metrics = next(metrics_of_successful)
            error = None
        else:
            metrics = {}
            error = _create_error(record)

        yield {
            "metadata": _create_metadata(record, run_id, start_ns),
            "metrics": metrics,
            "error": error,
        }


def _create_metadata(record: _RequestRecord, run_id: str, start_ns: int) -> Document:
    """Return the object `metadata` of a record of AIPerf: the identity and times of a request.

    Fields of AIPerf that a run of loadgen does not have are constant. The phase "profiling" is
    AIPerf's name for the measured part of a run.

    Args:
        record: The request.
        run_id: The id of the run, which makes the ids of its requests unique.
        start_ns: The start of the run in ns since 1970, from which the record counts.
    """
    has_first_byte = record.first_byte_ns >= 0
    conversation = record.slot if record.session < 0 else record.session
    return {
        "session_num": record.slot,
        "x_request_id": f"{run_id}-{record.slot}",
        "x_correlation_id": f"{run_id}-{record.slot}",
        "conversation_id": f"{run_id}-{conversation}",
        "turn_index": record.turn,
        "request_start_ns": start_ns + record.sent_ns,
        "request_ack_ns": start_ns + record.first_byte_ns if has_first_byte else None,
        "request_end_ns": start_ns + record.done_ns,
        "worker_id": f"worker_{record.worker}",
        "record_processor_id": "",
        "benchmark_phase": "profiling",
        "was_cancelled": KINDS[record.kind] == "abandoned",
    }


def _create_error(record: _RequestRecord) -> Document:
    failure = KINDS[record.kind]
    return {"code": record.http_status or None, "type": failure, "message": failure}


def _compute_metrics(source: ExportSource) -> Iterator[Document]:
    """Yield the metrics of each successful request that has output, as AIPerf writes them.

    The gaps between output events are added for the requests of which the run recorded them.
    `slot` is the number of a request in the schedule of the run.
    """
    if source.samples is None:
        return

    metric_columns = _metric_columns(source.samples, source)
    slots = source.successful_column("slot")

    gaps_by_slot: Mapping[int, NDArray[np.int64]] = source.gaps_by_slot or {}
    for slot, *values in _iterate_rows([slots, *(column.values for column in metric_columns)]):
        metrics = _create_known_metrics(metric_columns, values)
        if slot in gaps_by_slot:
            gaps_ms = (gaps_by_slot[slot] / NS_PER_MS).tolist()
            metrics["inter_chunk_latency"] = {"value": gaps_ms, "unit": "ms"}
        yield metrics


def _create_known_metrics(columns: Sequence[_MetricColumn], values: Sequence[float]) -> Document:
    """Return the metrics of one request by name, without those whose value is unknown.

    For example, the ITL of a response of one token is unknown (NaN).

    Args:
        columns: The metrics.
        values: The value of each of them.
    """
    return {
        column.name: {"value": value, "unit": column.unit}
        for column, value in zip(columns, values, strict=True)
        if not math.isnan(value)
    }


def _metric_columns(samples: ToolSamples, source: ExportSource) -> list[_MetricColumn]:
    """Return the metrics that have one value for each successful request."""
    assert isinstance(samples.itl, DerivedSample), "AIPerf's ITL is one value per request"
    input_tokens = source.successful_column("input_tokens")
    output_tokens = source.successful_column("output_tokens")

    return [
        _MetricColumn("time_to_first_token", "ms", samples.ttft.values / NS_PER_MS),
        _MetricColumn("request_latency", "ms", samples.e2e.values / NS_PER_MS),
        _MetricColumn("inter_token_latency", "ms", samples.itl.values / NS_PER_MS),
        _MetricColumn("input_sequence_length", "tokens", input_tokens),
        _MetricColumn("output_sequence_length", "tokens", output_tokens),
    ]


def _iterate_rows(columns: Sequence[NDArray[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the values of each row of some columns as Python objects, block by block."""
    for first in range(0, len(columns[0]), BLOCK_ROWS):
        block = [column[first : first + BLOCK_ROWS].tolist() for column in columns]
        yield from zip(*block, strict=True)
