"""Defines the records of a run: one row per slot of the schedule, its fields and their codes.

Pure. The binary row, the Parquet columns and the documentation are all made from the table FIELDS.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np

# The kinds of failures are also the kinds of records.
from loadgen_sdk.errors import KINDS as KINDS  # noqa: PLC0414
from loadgen_sdk.request import Completion, Usage
from loadgen_sdk.wire_formats.server_timing_lookup import parse_server_timing
from loadgen_sdk.wire_formats.usage import without_doubtful_counts
from numpy.typing import NDArray

SCHEMA = 1
"""The version of records and manifest. A reader refuses newer ones."""

STATUSES = ("ok", "failed", "dropped", "cancelled", "lost", "unfinished")
"""The index of a status is its code in a record. Append only."""
CUTS = {"interrupted": "cancelled", "abandoned": "cancelled", "unfinished": "unfinished"}
"""The status of a request that loadgen itself ended, by the kind of its failure.

It was ended because the user interrupted the run, because a simulated user went away, or because
the drain at the end of the load took too long.
"""
FINISH_REASONS = (
    "",
    "stop",
    "length",
    "tool_calls",
    "function_call",
    "content_filter",
    "abort",
    "error",
    "other",
)
FINISH_REASON_CHARS = 60
"""The longest finish reason that is kept whole. Known ones are much shorter."""

CONTRADICTORY_USAGE = "have token counts that contradict each other and are not used"
SOURCES = ("", "server", "tokenizer", "estimate", "events")


class Column(NamedTuple):
    """One column of the record table.

    Attributes:
        name: the name of the column, in the binary record and in Parquet.
        dtype: its type without byte order, as NumPy names it.
        meaning: what a value means, as the documentation shows it.
        default: the value of a request that was never sent.
    """

    name: str
    dtype: str
    meaning: str
    default: int


FIELDS: tuple[Column, ...] = (
    Column("slot", "i8", "number of the slot in the arrival schedule of the run", 0),
    Column("request", "i8", "number of the request; equals slot unless a data set is repeated", 0),
    Column("stage", "i2", "index of the stage", 0),
    Column("worker", "i2", "index of the worker process", 0),
    Column("target", "i2", "index of the target", 0),
    Column("session", "i4", "conversation, -1 when the request stands alone", -1),
    Column("turn", "i2", "index of the turn in the conversation, from 0", 0),
    Column("virtual_user", "i4", "virtual user of a closed loop, -1 in open loop", -1),
    Column("status", "u1", "index into STATUSES", 0),
    Column("kind", "u1", "index into KINDS: why it is not ok", 0),
    Column("http_status", "i2", "0 when no response head came", 0),
    Column("finish_reason", "u1", "index into FINISH_REASONS", 0),
    Column("due_ns", "i8", "scheduled time, from the start of the run", -1),
    Column("ready_ns", "i8", "connection available; -1 never, as in all times below", -1),
    Column("sent_ns", "i8", "first byte handed to the kernel", -1),
    Column("first_byte_ns", "i8", "response head", -1),
    Column("first_event_ns", "i8", "first SSE event of any kind", -1),
    Column("first_token_ns", "i8", "first event with generated output", -1),
    Column("first_answer_ns", "i8", "first event with output that is not reasoning", -1),
    Column("last_token_ns", "i8", "last event with output", -1),
    Column("end_ns", "i8", "last output or finish event: where E2E ends", -1),
    Column("done_ns", "i8", "end of the body, or the time of the failure", -1),
    Column(
        "client_lag_ns",
        "i8",
        "first token: time from the kernel's timestamp to the read (receive delay)",
        0,
    ),
    Column("stamp_error_ns", "i8", "first token: timestamp uncertainty", 0),
    Column(
        "last_token_error_ns",
        "i8",
        "last token: timestamp uncertainty; -1 unknown",
        0,
    ),
    Column("max_gap_ns", "i8", "longest time between two output events (max ITL)", 0),
    Column(
        "max_gap_error_ns",
        "i8",
        "max ITL: uncertainty of the timestamp at its end; -1 unknown",
        0,
    ),
    Column("input_tokens", "i4", "prompt tokens, -1 unknown", -1),
    Column("output_tokens", "i4", "generated tokens, -1 unknown", -1),
    Column(
        "cached_tokens",
        "i4",
        "prompt tokens served from the prefix cache, -1 when the server does not say",
        -1,
    ),
    Column("reasoning_tokens", "i4", "of the output, -1 when the server does not say", -1),
    Column("built_tokens", "i4", "content tokens of the prompt as built, -1 unknown", -1),
    Column("asked_output", "i4", "requested output tokens, -1 when no length was requested", -1),
    Column(
        "first_event_tokens",
        "i4",
        "tokens of the first output event, 0 when the server does not say",
        0,
    ),
    Column("output_events", "i4", "events that carried output", 0),
    Column("input_source", "u1", "index into SOURCES", 0),
    Column("output_source", "u1", "index into SOURCES", 0),
    Column("bytes_sent", "i8", "on the wire, head and body", 0),
    Column("bytes_received", "i8", "on the wire, head and body", 0),
    Column(
        "resent",
        "u1",
        "times it was sent again after a reset with no response byte on a reused connection",
        0,
    ),
    Column("reused", "u1", "1 when sent on a connection that had served before", 0),
    Column("kernel_stamp", "u1", "1 when arrival times come from the kernel", 0),
    Column(
        "text",
        "i4",
        "index into the run's texts: the message of an error, or of an ok request the finish "
        "reason that is not in FINISH_REASONS, or what else is unusual about its response; -1 none",
        -1,
    ),
    Column("replica", "i2", "index of the simulated replica that served it, -1 unknown", -1),
    Column(
        "server_queue_ns",
        "i8",
        "queueing time that the server reports; -1 not reported, as in those below",
        -1,
    ),
    Column("server_prefill_ns", "i8", "from there to the first token", -1),
    Column("server_transfer_ns", "i8", "of the KV cache between servers", -1),
    Column("server_decode_ns", "i8", "from the first token to the last one", -1),
    Column("draft_tokens", "i4", "tokens that speculation proposed, -1 not reported", -1),
    Column("accepted_tokens", "i4", "proposed tokens that were accepted, -1 not reported", -1),
    Column(
        "cache_written_tokens",
        "i4",
        "prompt tokens that the server wrote to its cache, -1 not reported",
        -1,
    ),
    Column(
        "tcp_ns",
        "i8",
        "TCP connection setup, of the first request on a connection; -1 for later requests",
        -1,
    ),
    Column("tls_ns", "i8", "TLS handshake of the same connection, 0 without TLS", -1),
)
ROW = np.dtype([(column.name, "<" + column.dtype) for column in FIELDS])

STATUS = {name: i for i, name in enumerate(STATUSES)}
KIND = {name: i for i, name in enumerate(KINDS)}
FINISH = {name: i for i, name in enumerate(FINISH_REASONS)}
SOURCE = {name: i for i, name in enumerate(SOURCES)}
NAMES = {
    "status": STATUSES,
    "kind": KINDS,
    "finish_reason": FINISH_REASONS,
    "input_source": SOURCES,
    "output_source": SOURCES,
}
"""Columns that are codes in a row and strings in Parquet. A code is the index in the tuple."""

LONGEST_NS = 400 * 86_400_000_000_000
"""400 days: no run is longer."""

_LETTER = {"i8": "q", "i4": "i", "i2": "h", "u1": "B"}
_pack = struct.Struct("<" + "".join(_LETTER[column.dtype] for column in FIELDS)).pack
_DEFAULTS = {column.name: column.default for column in FIELDS}

BIN_NS = 10_000_000
"""Length of a bin of the timeline of output events."""

_BYTES = np.dtype((np.void, ROW.itemsize))


def concatenate_rows(parts: Iterable[NDArray[np.void]]) -> NDArray[np.void]:
    """Return the rows of several arrays in one array.

    Rows are copied as bytes, because NumPy copies a structured row field by field, 25 times slower.
    """
    return np.concatenate([np.zeros(0, _BYTES), *(part.view(_BYTES) for part in parts)]).view(ROW)


def select_rows(rows: NDArray[np.void], selection: NDArray[Any]) -> NDArray[np.void]:
    """Return `rows[selection]` for a mask or for indexes, copied as bytes."""
    selected: NDArray[np.void] = rows.view(_BYTES)[selection].view(ROW)
    return selected


def check_rows(rows: NDArray[np.void]) -> None:
    """Raise ValueError for rows that no run can have written, so that damage is noticed.

    Such rows have a code without a name, or a time that is longer than LONGEST_NS.
    """
    if not len(rows):
        return
    bounds: dict[str, tuple[int, int]] = {}
    for column in FIELDS:
        if column.name.endswith("_ns"):
            bounds[column.name] = (-LONGEST_NS, LONGEST_NS)
    for name, code_names in NAMES.items():
        bounds[name] = (0, len(code_names) - 1)
    for name, (lower_bound, upper_bound) in bounds.items():
        lowest = int(rows[name].min())
        highest = int(rows[name].max())
        if highest > upper_bound:
            raise ValueError(f"a request with {name} {highest}")
        if lowest < lower_bound:
            raise ValueError(f"a request with {name} {lowest}")
    check_scheduled_times(rows)


def check_scheduled_times(rows: NDArray[np.void]) -> None:
    """Raise ValueError if a successful request has no scheduled time, which all metrics need."""
    is_ok = rows["status"] == STATUS["ok"]
    if ((rows["due_ns"] < 0) & is_ok).any():
        raise ValueError("a successful request without a scheduled time")


class RecordKey(msgspec.Struct, frozen=True, gc=False):
    """The slot that a record belongs to, and who sent its request where."""

    slot: int
    request: int
    stage: int
    worker: int
    target: int
    session: int = -1
    turn: int = 0
    virtual_user: int = -1


class RequestFacts(msgspec.Struct, frozen=True, gc=False):
    """What is known of a request before it is sent.

    Attributes:
        tokens: content tokens of the prompt, -1 if unknown.
        source: where that count is from, one of SOURCES.
        requested_output: output tokens requested, -1 for no fixed length.
    """

    tokens: int
    source: str
    requested_output: int


def encode(values: dict[str, int]) -> bytes:
    """Return the bytes of one record. Columns that are not named take their default.

    Raises struct.error for a value that does not fit into its column.
    """
    return _pack(*(_DEFAULTS | values).values())


def encode_sent_record(
    key: RecordKey, completion: Completion, start_ns: int, *, text: int, request_facts: RequestFacts
) -> bytes:
    """Return the bytes of the record of a request that was sent.

    Args:
        key: Which request it is.
        completion: How the request ended.
        start_ns: The start of the run on the clock of `completion`.
        text: The number of the text that `text_for_record` returns, -1 for none.
        request_facts: What was known of the request before it was sent.
    """
    values = msgspec.structs.asdict(key)
    values |= _outcome(completion)
    values |= _times(completion, start_ns)
    usage = completion.usage
    if usage.contradiction:
        usage = without_doubtful_counts(usage)
    values |= _token_counts(completion, usage, request_facts)
    values |= _server_timing(completion, usage)
    values["bytes_sent"] = completion.bytes_sent
    values["bytes_received"] = completion.bytes_received
    values["resent"] = completion.resent
    values["reused"] = completion.reused
    values["kernel_stamp"] = completion.kernel_stamp
    values["text"] = text
    return encode(values)


def text_for_record(completion: Completion) -> str:
    """Return the text that is stored with the record of a request, or "" for none.

    A failed request has its error message. An ok request has a text only if something is unusual:
    a finish reason that FINISH_REASONS lacks, token counts that contradict each other, or the
    remark of the client.
    """
    if completion.failure is not None:
        return completion.failure.text
    if completion.finish_reason not in FINISH:
        return completion.finish_reason[:FINISH_REASON_CHARS]
    if completion.usage.contradiction:
        return f"{CONTRADICTORY_USAGE}: {completion.usage.contradiction}"
    return completion.remark


def encode_unsent_record(
    key: RecordKey, due_ns: int, kind: str, status: str, request_facts: RequestFacts, text: int = -1
) -> bytes:
    """Return the bytes of the record of a slot whose request was never sent.

    Args:
        key: Which slot it is.
        due_ns: Its scheduled time from the start of the run, -1 if it was never due.
        kind: Why it was not sent, one of KINDS.
        status: Its status, one of STATUSES.
        request_facts: What is known of its request.
        text: The number of the text that is stored with the record, -1 for none.
    """
    values = msgspec.structs.asdict(key)
    values["status"] = STATUS[status]
    values["kind"] = KIND[kind]
    values["due_ns"] = due_ns
    values["built_tokens"] = request_facts.tokens
    values["asked_output"] = request_facts.requested_output
    values["text"] = text
    return encode(values)


def _outcome(completion: Completion) -> dict[str, int]:
    """Return the columns that say how a request ended."""
    failure = completion.failure
    status = "ok" if failure is None else CUTS.get(failure.kind, "failed")
    return {
        "status": STATUS[status],
        "kind": 0 if failure is None else KIND[failure.kind],
        "http_status": completion.http_status,
        "finish_reason": FINISH.get(completion.finish_reason, FINISH["other"]),
    }


def _times(completion: Completion, start_ns: int) -> dict[str, int]:
    """Return the columns of a request with times and durations, and how uncertain they are.

    Times count from the start of the run. A time that a request did not reach is -1.
    """
    times_ns = {
        "ready_ns": completion.ready,
        "sent_ns": completion.sent,
        "first_byte_ns": completion.first_byte,
        "first_event_ns": completion.first_event,
        "first_token_ns": completion.first_token,
        "first_answer_ns": completion.first_answer,
        "last_token_ns": completion.last_token,
        "end_ns": completion.end,
        "done_ns": completion.done,
    }
    values = {}
    for name, time_ns in times_ns.items():
        values[name] = time_ns - start_ns if time_ns >= 0 else -1
    values["due_ns"] = completion.due - start_ns
    values["client_lag_ns"] = completion.client_lag
    values["stamp_error_ns"] = completion.stamp_error
    values["last_token_error_ns"] = completion.last_token_error
    values["max_gap_ns"] = completion.max_gap
    values["max_gap_error_ns"] = completion.max_gap_error
    values["tcp_ns"] = completion.tcp
    values["tls_ns"] = completion.tls
    return values


def _token_counts(
    completion: Completion, usage: Usage, request_facts: RequestFacts
) -> dict[str, int]:
    """Return the columns with token counts, and with the source of the two main counts.

    The server's own counts (`usage`) are used if it reports them. Without them, the input tokens
    are those of the prompt that was built, and the output tokens are the output events.
    """
    counts = {
        "built_tokens": request_facts.tokens,
        "asked_output": request_facts.requested_output,
        "first_event_tokens": completion.first_event_tokens,
        "output_events": completion.output_events,
        "reasoning_tokens": -1 if usage.reasoning is None else usage.reasoning,
        "cache_written_tokens": -1 if usage.cache_written is None else usage.cache_written,
    }
    if usage.input is not None:
        counts["input_tokens"] = usage.input
        counts["input_source"] = SOURCE["server"]
    elif request_facts.tokens >= 0:
        counts["input_tokens"] = request_facts.tokens
        counts["input_source"] = SOURCE[request_facts.source]
    if usage.output is not None:
        counts["output_tokens"] = usage.output
        counts["output_source"] = SOURCE["server"]
    elif completion.output_events:
        counts["output_tokens"] = completion.output_events
        counts["output_source"] = SOURCE["events"]
    elif completion.failure is None:
        counts["output_tokens"] = 0
    return counts


def _server_timing(completion: Completion, usage: Usage) -> dict[str, int]:
    """Return the durations and token counts that the server states, by the names of their columns.

    What the server does not state is left out. Cached tokens come from the usage if it has them.
    """
    if completion.server_timing is None:
        return {} if usage.cached is None else {"cached_tokens": usage.cached}
    timing = parse_server_timing(completion.server_timing)
    values = {
        "cached_tokens": timing.cached_tokens if usage.cached is None else usage.cached,
        "server_queue_ns": timing.queue_ns,
        "server_prefill_ns": timing.prefill_ns,
        "server_transfer_ns": timing.transfer_ns,
        "server_decode_ns": timing.decode_ns,
        "draft_tokens": timing.drafted_tokens,
        "accepted_tokens": timing.accepted_tokens,
    }
    return {name: value for name, value in values.items() if value is not None}
