"""What C says of chunks of events, held against HTTP, the grammar of events and the twin in Python.

For the tests and the fuzzer of these functions.
"""

from __future__ import annotations

from typing import Any

from loadgen_sdk.dialects import reader, sse
from loadgen_sdk.transport import http1, plain

DIGITS = frozenset(b"0123456789abcdefABCDEF")
BEFORE, AFTER = b'{"choices":[{"delta":{"content":"', b'"}}]}'


def plainly(events: list[Any]) -> list[Any]:
    """Plain events as the number 1 each."""
    out: list[Any] = []
    for event in events:
        many = (
            event if isinstance(event, int) else reader.pure_plain_run([event], 0, BEFORE, AFTER)[1]
        )
        out += [1] * many or [event]
    return out


def hold_chunks(compiled: Any, data: bytes, *, templated: bool) -> None:
    """Raises AssertionError where the chunks that `compiled` recognises in `data` are others, or fewer than Python's.

    A size line with more than digits (an extension, a blank) is left to the parser of HTTP by C alone.
    """
    template = (BEFORE, AFTER) if templated else (b"", b"")
    chunks, events, used = compiled.whole_chunks(data, *template)
    response, decoder = http1.Response(), sse.Decoder()
    response.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    decoder.started = True
    bodies = response.feed(data[:used])
    assert (len(bodies), response.between_chunks, response.missing) == (chunks, True, 0)
    expected = decoder.feed(b"".join(bodies))
    assert decoder.between_events
    assert plainly(events) == plainly(expected)
    assert templated or events == expected
    assert not templated or used >= _sized_by_digits(
        data, plain.plain_chunks(data, BEFORE, AFTER)[2]
    )


def _sized_by_digits(data: bytes, known: int) -> int:
    """How far the chunks of `data` go whose size lines are digits and nothing else, of those until `known`."""
    at = 0
    while at < known:
        line = data[at : data.index(b"\r\n", at)]
        if not DIGITS.issuperset(line):
            break
        at += len(line) + 2 + int(line, 16) + 2
    return at
