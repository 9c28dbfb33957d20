"""Compare the chunks of events that C recognises with HTTP, the event grammar and the reference.

For the tests and the fuzzer of the compiled module.
"""

from __future__ import annotations

from typing import Any

from loadgen_sdk.transport import http1, plain_events
from loadgen_sdk.wire_formats import reference, sse

DIGITS = frozenset(b"0123456789abcdefABCDEF")
BEFORE, AFTER = b'{"choices":[{"delta":{"content":"', b'"}}]}'


def with_plain_events_replaced(events: list[Any]) -> list[Any]:
    """Return the events with the number 1 in place of each plain event."""
    result: list[Any] = []
    for event in events:
        if isinstance(event, int):
            plain_events = event
        else:
            _, plain_events = reference.count_leading_plain_events([event], 0, BEFORE, AFTER)
        result += [1] * plain_events or [event]
    return result


def check_chunks(compiled: Any, data: bytes, *, templated: bool) -> None:
    """Raise AssertionError if `compiled` recognises other chunks in `data` than Python, or fewer.

    The compiled version leaves a size line with an extension or a blank to the HTTP parser.
    """
    template = (BEFORE, AFTER) if templated else (b"", b"")
    chunks, events, used_bytes = compiled.parse_whole_chunks(data, *template)
    response, decoder = http1.ResponseParser(), sse.SseDecoder()
    response.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    decoder.has_started = True
    bodies = response.feed(data[:used_bytes])
    assert (len(bodies), response.between_chunks, response.missing_chunk_bytes) == (chunks, True, 0)
    expected = decoder.feed(b"".join(bodies))
    assert decoder.between_events
    assert with_plain_events_replaced(events) == with_plain_events_replaced(expected)
    assert templated or events == expected
    assert not templated or used_bytes >= _sized_by_digits(
        data, plain_events.scan_plain_chunks(data, BEFORE, AFTER)[2]
    )


def _sized_by_digits(data: bytes, known: int) -> int:
    """Return the end of the leading chunks, before `known`, whose size lines are digits only."""
    at = 0
    while at < known:
        line = data[at : data.index(b"\r\n", at)]
        if not DIGITS.issuperset(line):
            break
        at += len(line) + 2 + int(line, 16) + 2
    return at
