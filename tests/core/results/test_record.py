"""Each value of a record stands in the column of its name."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from loadgen_sdk.request import Completion, Failure, Usage
from numpy.typing import NDArray

from loadgen.core.results.record import (
    FINISH,
    KIND,
    ROW,
    SOURCE,
    STATUS,
    RecordKey,
    RequestFacts,
    encode_sent_record,
    encode_unsent_record,
)

START_NS = 1_000
KEY = RecordKey(slot=1, request=2, stage=3, worker=4, target=5, session=6, turn=7, virtual_user=8)
BUILT = RequestFacts(tokens=41, source="tokenizer", requested_output=43)
TIMESTAMPS = {
    "ready": 20,
    "sent": 30,
    "first_byte": 40,
    "first_event": 50,
    "first_token": 60,
    "first_answer": 70,
    "last_token": 80,
    "end": 90,
    "done": 100,
}
"""Nanoseconds after the start of the run."""


def completion(**changes: object) -> Completion:
    absolute = {name: START_NS + offset for name, offset in TIMESTAMPS.items()}
    values: dict[str, object] = {
        "request": None,
        "due": START_NS + 10,
        **absolute,
        "tcp": 11,
        "tls": 12,
        "output_events": 13,
        "first_event_tokens": 14,
        "max_gap": 15,
        "max_gap_error": 16,
        "client_lag": 17,
        "stamp_error": 18,
        "last_token_error": 19,
        "kernel_stamp": True,
        "reused": True,
        "resent": 3,
        "http_status": 200,
        "bytes_sent": 21,
        "bytes_received": 22,
        "finish_reason": "length",
        "usage": Usage(input=31, output=32, cached=33, reasoning=34, cache_written=35),
    }
    return Completion(**(values | changes))  # type: ignore[arg-type]


def record_of(data: bytes) -> NDArray[np.void]:
    (record,) = np.frombuffer(data, ROW)
    return record


def test_every_value_of_a_completion_is_in_its_column() -> None:
    record = record_of(
        encode_sent_record(KEY, completion(), START_NS, text_index=-1, request_facts=BUILT)
    )
    expected = {
        **msgspec.structs.asdict(KEY),
        "status": STATUS["ok"],
        "kind": 0,
        "http_status": 200,
        "finish_reason": FINISH["length"],
        "due_ns": 10,
        **{f"{name}_ns": offset for name, offset in TIMESTAMPS.items()},
        "client_lag_ns": 17,
        "stamp_error_ns": 18,
        "last_token_error_ns": 19,
        "max_gap_ns": 15,
        "max_gap_error_ns": 16,
        "input_tokens": 31,
        "output_tokens": 32,
        "cached_tokens": 33,
        "reasoning_tokens": 34,
        "built_tokens": 41,
        "asked_output": 43,
        "first_event_tokens": 14,
        "output_events": 13,
        "input_source": SOURCE["server"],
        "output_source": SOURCE["server"],
        "bytes_sent": 21,
        "bytes_received": 22,
        "resent": 3,
        "reused": 1,
        "kernel_stamp": 1,
        "text": -1,
        "replica": -1,
        "cache_written_tokens": 35,
        "tcp_ns": 11,
        "tls_ns": 12,
    }

    assert {name: int(record[name]) for name in expected} == expected


@pytest.mark.parametrize("name", TIMESTAMPS)
def test_a_timestamp_of_zero_is_stored_and_an_absent_one_is_minus_one(name: str) -> None:
    """In virtual time the clock itself begins at 0."""
    zero = completion(**{name: 0})
    absent = completion(**{name: -1})
    column = f"{name}_ns"

    assert (
        record_of(encode_sent_record(KEY, zero, 0, text_index=-1, request_facts=BUILT))[column] == 0
    )
    assert (
        record_of(encode_sent_record(KEY, absent, START_NS, text_index=-1, request_facts=BUILT))[
            column
        ]
        == -1
    )


def test_a_failure_is_recorded_with_its_kind_and_its_text() -> None:
    failed = completion(failure=Failure("reset", "connection reset"))
    record = record_of(encode_sent_record(KEY, failed, START_NS, text_index=9, request_facts=BUILT))
    assert record["status"] == STATUS["failed"]
    assert record["kind"] == KIND["reset"]
    assert record["text"] == 9


def test_a_slot_that_was_not_sent_has_its_place_and_its_due_time_only() -> None:
    record = record_of(encode_unsent_record(KEY, 77, "in_flight_cap", "dropped", BUILT))

    assert {name: int(record[name]) for name in KEY.__struct_fields__} == msgspec.structs.asdict(
        KEY
    )
    assert record["status"] == STATUS["dropped"]
    assert record["kind"] == KIND["in_flight_cap"]
    assert record["due_ns"] == 77
    assert record["built_tokens"] == 41
    assert record["asked_output"] == 43
    for name in TIMESTAMPS:
        assert record[f"{name}_ns"] == -1
    for name in ("input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "text"):
        assert record[name] == -1
    for name in ("http_status", "output_events", "bytes_sent", "bytes_received", "resent"):
        assert record[name] == 0
