"""Compare the reading of a response in C with the reference implementation in Python.

For the tests and the fuzzer of the compiled module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loadgen_sdk.transport.exchange import Exchange
from loadgen_sdk.transport.response_state import ExchangeState, ResponseState
from loadgen_sdk.wire_formats.event_timeline import EventTimeline
from loadgen_sdk.wire_formats.reference import DecoderState, ResponseReaderState

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FIELDS = {
    "Exchange": ExchangeState.__slots__,
    "ResponseParser": ResponseState.__slots__,
    "SseDecoder": DecoderState.__slots__,
    "ResponseReader": ResponseReaderState.__slots__,
}
CALLBACKS = ("on_done", "on_first_output")
STEP_NS = 1_000

Arrived = Callable[[Exchange, list[Any]], bool]
"""`Exchange.feed_reads`, which may be compiled, or `ExchangeState.feed_reads` of the reference."""


def fields_of(value: Any) -> Any:
    """Return the fields of the state of a response, and of the states that it contains.

    Callbacks are left out. Any other value is returned as it is.
    """
    if isinstance(value, EventTimeline):
        return (
            value.gaps[:],
            value.timestamps[:],
            value.simultaneous_counts[:],
            value.uncertainties[:],
        )
    names = FIELDS.get(type(value).__name__)
    if names is None:
        return value
    return {name: fields_of(getattr(value, name)) for name in names if name not in CALLBACKS}


def read_response(reads: list[bytes], arrived: Arrived, **options: Any) -> list[Any]:
    """Read a response with an implementation of `arrived`.

    Returns:
        The result and all fields after each read, and the arguments of all calls of callbacks.
    """
    calls: list[Any] = []
    exchange = Exchange(
        None,
        b"",
        b"",
        0,
        calls.append,
        EventTimeline(),
        is_stream_requested=True,
        on_first_output=calls.append,
        **options,
    )
    exchange.sent_at = 7
    timestamp_ns = 10
    states: list[Any] = []
    for number, data in enumerate(reads):
        timestamp_ns += STEP_NS
        is_from_kernel = number % 3 == 0
        over = arrived(
            exchange, [(data, timestamp_ns, timestamp_ns + 5, timestamp_ns - 9, is_from_kernel)]
        )
        states.append((over, fields_of(exchange)))
        if over:
            break
    else:
        exchange.end_with_connection(timestamp_ns + STEP_NS, "")
    exchange.report_completion()
    return [states, calls]


def check_response(reads: list[bytes], **options: Any) -> None:
    """Raise AssertionError if the two implementations differ.

    The response is read twice, because the head is known the second time.
    """
    reads = [data for data in reads if data]
    for _ in range(2):
        result = read_response(reads, Exchange.feed_reads, **options)
        assert result == read_response(reads, ExchangeState.feed_reads, **options)


def chunked(payloads: list[bytes], per_chunk: int = 1) -> list[bytes]:
    """Return chunks of `per_chunk` events each."""
    events = [b"data: %s\n\n" % payload for payload in payloads]
    contents = [b"".join(events[at : at + per_chunk]) for at in range(0, len(events), per_chunk)]
    return [b"%x\r\n%s\r\n" % (len(content), content) for content in contents]


def as_reads(pieces: list[bytes], per_read: int) -> list[bytes]:
    """Return the head and the pieces of a response in reads of `per_read` pieces each."""
    parts = [HEAD, *pieces]
    return [b"".join(parts[at : at + per_read]) for at in range(0, len(parts), per_read)]
