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
RESPONSE_TIME_COLUMNS = (
    "first_byte_ns",
    "first_event_ns",
    "first_token_ns",
    "first_answer_ns",
    "last_token_ns",
    "end_ns",
    "done_ns",
)
"""The columns with the times of a response, in their order."""

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


_UNKNOWN_COUNT_COLUMNS = {
    "session",
    "virtual_user",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "built_tokens",
    "asked_output",
    "replica",
    "draft_tokens",
    "accepted_tokens",
    "cache_written_tokens",
}
NULLABLE_COLUMNS = _UNKNOWN_COUNT_COLUMNS | {
    column.name for column in FIELDS if column.name.endswith("_ns") and column.name != "due_ns"
}
"""Numeric columns in which -1 means "never" or "unknown". Parquet files store it as null."""

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
    """Raise ValueError if records hold values that loadgen never writes, which shows damage.

    Args:
        rows: The records, as an array of ROW.

    Raises:
        ValueError: A code has no name, a time or duration is longer than LONGEST_NS, or a
            successful request has no scheduled time.
    """
    if not len(rows):
        return

    for column in FIELDS:
        if column.name.endswith("_ns"):
            _check_range(rows, column.name, lowest=-LONGEST_NS, highest=LONGEST_NS)

    for column_name, code_names in NAMES.items():
        _check_range(rows, column_name, lowest=0, highest=len(code_names) - 1)

    check_scheduled_times(rows)


def _check_range(rows: NDArray[np.void], column_name: str, lowest: int, highest: int) -> None:
    """Raise ValueError if a column of at least one row has a value outside of a range."""
    largest = int(rows[column_name].max())
    if largest > highest:
        raise ValueError(f"a request with {column_name} {largest}")
    smallest = int(rows[column_name].min())
    if smallest < lowest:
        raise ValueError(f"a request with {column_name} {smallest}")


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
    key: RecordKey,
    completion: Completion,
    start_ns: int,
    *,
    text_index: int,
    request_facts: RequestFacts,
) -> bytes:
    """Return the binary record of a request that was sent, in the layout of ROW.

    Args:
        key: Which request it is.
        completion: How the request ended, and what was measured. Token counts of the server that
            contradict each other are not stored.
        start_ns: The start of the run on the clock of `completion`.
        text_index: The index of the text of this record among the texts that the worker has
            stored, or -1 if it has none. See `text_for_record`.
        request_facts: What was known of the request before it was sent.
    """
    usage = completion.usage
    if usage.contradiction:
        usage = without_doubtful_counts(usage)

    values = msgspec.structs.asdict(key)
    values |= _outcome_columns(completion)
    values |= _time_columns(completion, start_ns)
    values |= _token_columns(completion, usage, request_facts)
    values |= _server_timing_columns(completion, usage)
    values |= {
        "bytes_sent": completion.bytes_sent,
        "bytes_received": completion.bytes_received,
        "resent": completion.resent,  # how often, after a reset of an idle connection
        "reused": completion.reused,  # whether the connection had served before
        "kernel_stamp": completion.kernel_stamp,  # whether times come from the kernel
        "text": text_index,
    }

    return encode(values)


def text_for_record(completion: Completion) -> str:
    """Return the text to store next to the record of a request, or "" if there is none.

    For a failed request it is the error message. For a successful one it is the first of these that
    the response has: a finish reason that is not in FINISH, the table of known ones (shortened to
    FINISH_REASON_CHARS), token counts that contradict each other, or a remark of the client.
    """
    if completion.failure is not None:
        return completion.failure.text

    is_known_finish_reason = completion.finish_reason in FINISH
    if not is_known_finish_reason:
        return completion.finish_reason[:FINISH_REASON_CHARS]

    contradiction = completion.usage.contradiction
    if contradiction:
        return f"{CONTRADICTORY_USAGE}: {contradiction}"

    return completion.remark


def encode_unsent_record(
    key: RecordKey,
    due_ns: int,
    kind: str,
    status: str,
    request_facts: RequestFacts,
    text_index: int = -1,
) -> bytes:
    """Return the binary record of a scheduled request that was never sent, in the layout of ROW.

    Columns that only a sent request has, such as its times, take their default.

    Args:
        key: Which request it is, and its place in the schedule.
        due_ns: Its scheduled time from the start of the run, -1 if it was never due.
        kind: Why it was not sent, one of KINDS.
        status: Its status, one of STATUSES, such as "dropped".
        request_facts: The tokens of the prompt (column `built_tokens`) and the requested output
            tokens (`asked_output`), as far as they are known.
        text_index: The number of the error text to which the record refers, -1 for none.
    """
    status_code = STATUS[status]
    kind_code = KIND[kind]
    values = msgspec.structs.asdict(key)
    values["status"] = status_code
    values["kind"] = kind_code
    values["due_ns"] = due_ns
    values["built_tokens"] = request_facts.tokens
    values["asked_output"] = request_facts.requested_output
    values["text"] = text_index

    return encode(values)


def _outcome_columns(completion: Completion) -> dict[str, int]:
    """Return the columns that say how a request ended: its status, its failure, its HTTP status.

    A record has numbers, so statuses, kinds of failures and finish reasons have codes: STATUS, KIND
    and FINISH. A failed request has the status "failed", unless loadgen itself has ended it, for
    example at the end of the load: then CUTS has the status for this kind of failure. The column
    `kind` of a request that succeeded is 0.
    """
    failure = completion.failure
    if failure is None:
        status = "ok"
        kind_code = 0
    else:
        status = CUTS.get(failure.kind, "failed")
        kind_code = KIND[failure.kind]

    finish_code = FINISH.get(completion.finish_reason, FINISH["other"])
    return {
        "status": STATUS[status],
        "kind": kind_code,
        "http_status": completion.http_status,
        "finish_reason": finish_code,
    }


def _time_columns(completion: Completion, start_ns: int) -> dict[str, int]:
    """Return the columns of a record with the times and durations of a request, in ns.

    An event, such as the first token, may not have happened. Its time is then -1, in the completion
    and in the record. Some columns need an explanation:

    - `due_ns`: the time in the schedule. `ready_ns`: when a connection was available.
    - `first_answer_ns`: the first output that is not reasoning.
    - `..._error_ns`: by how much an event may have arrived before its timestamp.

    Args:
        completion: The times of the request on the monotonic clock, and its durations.
        start_ns: The start of the run on this clock, from which the times of a record count.
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
    columns = {}
    for column_name, time_ns in times_ns.items():
        columns[column_name] = time_ns - start_ns if time_ns >= 0 else -1

    columns |= {
        "due_ns": completion.due - start_ns,
        "client_lag_ns": completion.client_lag,
        "stamp_error_ns": completion.stamp_error,
        "last_token_error_ns": completion.last_token_error,
        "max_gap_ns": completion.max_gap,
        "max_gap_error_ns": completion.max_gap_error,
        "tcp_ns": completion.tcp,
        "tls_ns": completion.tls,
    }
    return columns


def _token_columns(
    completion: Completion, usage: Usage, request_facts: RequestFacts
) -> dict[str, int]:
    """Return the columns of a record with its token counts.

    The columns `input_source` and `output_source` say where a count is from:

    - input tokens: the server (`usage`), or else the prompt as loadgen built it,
    - output tokens: the server, or else one token for each output event. A successful response
      without output events has 0 tokens and no source.

    A column that is left out takes its default, which is -1 (unknown) for token counts.

    Args:
        completion: How the request ended, and its output events.
        usage: The counts that the server reported, None for each that it did not.
        request_facts: The tokens of the prompt as built (column `built_tokens`, -1 if unknown) and
            the requested output tokens (`asked_output`).
    """
    columns = {
        "built_tokens": request_facts.tokens,
        "asked_output": request_facts.requested_output,
        "first_event_tokens": completion.first_event_tokens,
        "output_events": completion.output_events,
    }
    if usage.reasoning is not None:
        columns["reasoning_tokens"] = usage.reasoning

    if usage.cache_written is not None:
        columns["cache_written_tokens"] = usage.cache_written

    if usage.input is not None:
        columns["input_tokens"] = usage.input
        columns["input_source"] = SOURCE["server"]
    elif request_facts.tokens >= 0:
        columns["input_tokens"] = request_facts.tokens
        columns["input_source"] = SOURCE[request_facts.source]

    if usage.output is not None:
        columns["output_tokens"] = usage.output
        columns["output_source"] = SOURCE["server"]
    elif completion.output_events:
        columns["output_tokens"] = completion.output_events
        columns["output_source"] = SOURCE["events"]
    elif completion.failure is None:
        columns["output_tokens"] = 0

    return columns


def _server_timing_columns(completion: Completion, usage: Usage) -> dict[str, int]:
    """Return the columns with the durations (ns) and token counts that the server reports.

    They come from the timing fields in the response, which few servers send. The number of cached
    tokens is also part of the usage, which takes precedence. What the server does not report is
    left out, and the record then has the default of the column.
    """
    cached_tokens = usage.cached
    if completion.server_timing is None:
        return {} if cached_tokens is None else {"cached_tokens": cached_tokens}

    timing = parse_server_timing(completion.server_timing)
    if cached_tokens is None:
        cached_tokens = timing.cached_tokens

    columns = {
        "cached_tokens": cached_tokens,
        "server_queue_ns": timing.queue_ns,
        "server_prefill_ns": timing.prefill_ns,
        "server_transfer_ns": timing.transfer_ns,
        "server_decode_ns": timing.decode_ns,
        "draft_tokens": timing.drafted_tokens,
        "accepted_tokens": timing.accepted_tokens,
    }
    return {name: value for name, value in columns.items() if value is not None}
