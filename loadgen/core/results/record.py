"""The record of a run: one row per slot of the timetable. Its fields, their codes and its binary form.

The binary row, the Parquet columns and the documentation are all made from the table FIELDS. Pure: touches no file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from loadgen_sdk.compiled import module as _compiled
from loadgen_sdk.dialects.account_lookup import server_account
from loadgen_sdk.dialects.server_account import HEADER, NO_ACCOUNT
from loadgen_sdk.errors import KINDS as KINDS  # noqa: PLC0414 - other rooms know it as the kinds of a record
from loadgen_sdk.request import Completion
from numpy.typing import NDArray

SCHEMA = 1  # version of records and header; a reader refuses newer ones
WITH_UNFINISHED = (
    2  # the schema of a run with unfinished requests: readers of schema 1 would take them for ok
)
SCHEMA_MINOR = (
    10  # grows with new columns, statuses, fields and nulls: docs/summary.md, "What came when"
)

STATUSES = ("ok", "failed", "dropped", "cancelled", "lost", "unfinished")
"""The index of a status is its code in a record. Append only."""
CUTS = {"interrupted": "cancelled", "abandoned": "cancelled", "unfinished": "unfinished"}
"""Kind -> status of what was ended on this side: by the user, by a user of the load who went away, by the drain."""
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
SOURCES = ("", "server", "tokenizer", "estimate", "events")

FIELDS: tuple[tuple[str, str, str], ...] = (
    ("slot", "i8", "number of the slot in the whole run's timetable"),
    ("request", "i8", "number of the request; equals slot unless a data set is repeated"),
    ("stage", "i2", "index of the stage"),
    ("worker", "i2", "index of the worker process"),
    ("target", "i2", "index of the target"),
    ("session", "i4", "conversation, -1 when the request stands alone"),
    ("turn", "i2", "place in the conversation, from 0"),
    ("lane", "i4", "closed-loop lane, -1 in open loop"),
    ("status", "u1", "index into STATUSES"),
    ("kind", "u1", "index into KINDS: why it is not ok"),
    ("http_status", "i2", "0 when no response head came"),
    ("finish_reason", "u1", "index into FINISH_REASONS"),
    ("due_ns", "i8", "planned instant, from the start of the run"),
    ("ready_ns", "i8", "connection available; -1 never, as in all instants below"),
    ("sent_ns", "i8", "first byte handed to the kernel"),
    ("first_byte_ns", "i8", "response head"),
    ("first_event_ns", "i8", "first SSE event of any kind"),
    ("first_token_ns", "i8", "first event with generated output"),
    ("first_answer_ns", "i8", "first event with output that is not reasoning"),
    ("last_token_ns", "i8", "last event with output"),
    ("end_ns", "i8", "last output or finish event: where E2E ends"),
    ("done_ns", "i8", "end of the body, or the instant of the failure"),
    ("client_lag_ns", "i8", "first token: kernel stamp to read"),
    ("stamp_error_ns", "i8", "first token: how wrong its stamp can be"),
    (
        "last_token_error_ns",
        "i8",
        "last token: how wrong its stamp can be; -1 unknown (older runs)",
    ),
    ("max_gap_ns", "i8", "largest gap between output events"),
    (
        "max_gap_error_ns",
        "i8",
        "largest gap: how wrong the stamp at its end can be; -1 unknown (older runs)",
    ),
    ("input_tokens", "i4", "prompt tokens, -1 unknown"),
    ("output_tokens", "i4", "generated tokens, -1 unknown"),
    (
        "cached_tokens",
        "i4",
        "prompt tokens served from the prefix cache, -1 when the server does not say",
    ),
    ("reasoning_tokens", "i4", "of the output, -1 when the server does not say"),
    ("built_tokens", "i4", "content tokens of the prompt as built, -1 unknown"),
    ("asked_output", "i4", "output tokens asked for, -1 when no length was asked"),
    (
        "first_event_tokens",
        "i4",
        "tokens of the first output event, 0 when the server does not say",
    ),
    ("output_events", "i4", "events that carried output"),
    ("input_source", "u1", "index into SOURCES"),
    ("output_source", "u1", "index into SOURCES"),
    ("bytes_sent", "i8", "on the wire, head and body"),
    ("bytes_received", "i8", "on the wire, head and body"),
    (
        "resent",
        "u1",
        "times it was sent again after a reset with no response byte on a reused connection",
    ),
    ("reused", "u1", "1 when sent on a connection that had served before"),
    ("kernel_stamp", "u1", "1 when arrival instants come from the kernel"),
    ("text", "i4", "index into the run's error texts, -1 none"),
    ("replica", "i2", "index of the simulated replica that served it, -1 unknown"),
    (
        "server_queue_ns",
        "i8",
        "by the server's account: before it began to work on it; -1 not told, as in those below",
    ),
    ("server_prefill_ns", "i8", "from there to the first token"),
    ("server_transfer_ns", "i8", "of the KV cache between servers"),
    ("server_decode_ns", "i8", "from the first token to the last one"),
    ("draft_tokens", "i4", "tokens that speculation proposed, -1 not told"),
    ("accepted_tokens", "i4", "of those, the ones that were right, -1 not told"),
    (
        "cache_written_tokens",
        "i4",
        "prompt tokens that the server says it wrote to its cache, -1 not told",
    ),
    ("tcp_ns", "i8", "how long TCP took of a connection that it was the first on; -1 it was not"),
    ("tls_ns", "i8", "the same of its TLS handshake, 0 without TLS"),
)
ROW = np.dtype([(name, "<" + code) for name, code, _ in FIELDS])

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
"""Columns that are integer codes in a row and strings in Parquet; the code is the index in the tuple."""

LONGEST_NS = 400 * 86_400_000_000_000  # no run is longer
_LETTER = {"i8": "q", "i4": "i", "i2": "h", "u1": "B"}
pack = struct.Struct("<" + "".join(_LETTER[code] for _, code, _ in FIELDS)).pack
"""Packs values, in the order of FIELDS, into the bytes of one ROW."""

BIN_NS = 10_000_000  # length of a bin of the timeline of output events


_BYTES = np.dtype((np.void, ROW.itemsize))


def joined(parts: Iterable[NDArray[np.void]]) -> NDArray[np.void]:
    """The rows of several arrays, one after the other. As bytes: numpy copies a row field by field, 25 times slower."""
    return np.concatenate([np.zeros(0, _BYTES), *(part.view(_BYTES) for part in parts)]).view(ROW)


def picked(rows: NDArray[np.void], which: NDArray[Any]) -> NDArray[np.void]:
    """`rows[which]` for a mask or for places, copied as bytes."""
    of_rows: NDArray[np.void] = rows.view(_BYTES)[which].view(ROW)
    return of_rows


def check(rows: NDArray[np.void]) -> None:
    """Raises ValueError for rows that no run has written: a code without a name, a time longer than any run."""
    if not len(rows):
        return
    ends = {name: (-LONGEST_NS, LONGEST_NS) for name, _, _ in FIELDS if name.endswith("_ns")}
    ends |= {name: (0, len(words) - 1) for name, words in NAMES.items()}
    for name, (least, most) in ends.items():
        low, high = int(rows[name].min()), int(rows[name].max())
        if low < least or high > most:
            raise ValueError(f"a request with {name} {high if high > most else low}")
    check_due(rows)


def check_due(rows: NDArray[np.void]) -> None:
    """Raises ValueError for rows without the instant that all figures go by."""
    if ((rows["due_ns"] < 0) & (rows["status"] == STATUS["ok"])).any():
        raise ValueError("an answered request that was never due")


class RowPlace(NamedTuple):
    """The slot that a record belongs to: the first fields of FIELDS, in their order."""

    slot: int
    request: int
    stage: int
    worker: int
    target: int
    session: int
    turn: int
    lane: int


def row(
    place: tuple[int, ...], done: Completion, start_ns: int, *, text: int, built: Built
) -> bytes:
    """The bytes of one ROW for a request that was sent.

    `start_ns`: instant 0 of the run on the clock of `done`; `text`: index of the error text, -1 for none.
    """
    failure = done.failure
    usage = done.usage
    account = NO_ACCOUNT if done.server_timing is None else server_account(done.server_timing)
    source = SOURCE["server"]
    output_tokens, output_source = usage.output, source
    if output_tokens is None:
        output_tokens = done.output_events if done.output_events else (-1 if failure else 0)
        output_source = SOURCE["events"] if done.output_events else 0
    input_tokens, input_source = usage.input, source
    if input_tokens is None:
        input_tokens, input_source = built.tokens, SOURCE[built.source] if built.tokens >= 0 else 0
    status = 0
    if failure is not None:
        status = STATUS[CUTS.get(failure.kind, "failed")]
    return pack(
        *place,
        status,
        KIND[failure.kind] if failure is not None else 0,
        done.http_status,
        FINISH.get(done.finish_reason, FINISH["other"]),
        done.due - start_ns,
        at - start_ns if (at := done.ready) >= 0 else -1,
        at - start_ns if (at := done.sent) >= 0 else -1,
        at - start_ns if (at := done.first_byte) >= 0 else -1,
        at - start_ns if (at := done.first_event) >= 0 else -1,
        at - start_ns if (at := done.first_token) >= 0 else -1,
        at - start_ns if (at := done.first_answer) >= 0 else -1,
        at - start_ns if (at := done.last_token) >= 0 else -1,
        at - start_ns if (at := done.end) >= 0 else -1,
        at - start_ns if (at := done.done) >= 0 else -1,
        done.client_lag,
        done.stamp_error,
        done.last_token_error,
        done.max_gap,
        done.max_gap_error,
        input_tokens,
        output_tokens,
        account.cached if usage.cached is None else usage.cached,
        -1 if usage.reasoning is None else usage.reasoning,
        built.tokens,
        built.asked_output,
        done.first_event_tokens,
        done.output_events,
        input_source,
        output_source,
        done.bytes_sent,
        done.bytes_received,
        done.resent,
        done.reused,
        done.kernel_stamp,
        text,
        -1,
        account.queue,
        account.prefill,
        account.transfer,
        account.decode,
        account.drafted,
        account.accepted,
        -1 if usage.cache_written is None else usage.cache_written,
        done.tcp,
        done.tls,
    )


usual_row: Callable[[tuple[int, ...], Any, int, Built], tuple[bytes, int, int] | None]
"""Of an exchange: its row, the time of its first token (-1 without) and its end; None: for `row` to make. Only in C."""
if hasattr(_compiled, "usual_row"):  # a wheel of its own may be older
    _compiled.rows(
        "".join(_LETTER[code] for _, code, _ in FIELDS),
        FINISH,
        FINISH["other"],
        SOURCE["server"],
        HEADER,
    )
    usual_row = _compiled.usual_row
else:
    usual_row = lambda *_: None  # noqa: E731


class Built(msgspec.Struct, frozen=True, gc=False):
    """What is known of a request before it is sent.

    `tokens`: content tokens of the prompt, -1 unknown; `source`: where that count is from, one of SOURCES;
    `asked_output`: output tokens requested, -1 for no fixed length.
    """

    tokens: int
    source: str
    asked_output: int


def unsent_row(
    place: tuple[int, ...], due_ns: int, kind: str, status: str, built: Built, text: int = -1
) -> bytes:
    """The bytes of one ROW for a slot that was never sent. `due_ns`: from the start of the run, -1 if never due."""
    never = (-1,) * 9
    counts = (-1, -1, -1, -1, built.tokens, built.asked_output, 0, 0, 0, 0)
    return pack(
        *place,
        STATUS[status],
        KIND[kind],
        0,
        0,
        due_ns,
        *never,
        0,
        0,
        0,
        0,
        0,
        *counts,
        0,
        0,
        0,
        0,
        0,
        text,
        -1,
        -1,
        -1,
        -1,
        -1,
        -1,
        -1,
        -1,
        -1,
        -1,
    )
