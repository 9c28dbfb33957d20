"""Tests of the event decoder, however its bytes are cut, against a slow reference."""

from __future__ import annotations

import re
from itertools import pairwise
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loadgen_sdk.wire_formats.sse import MAX_EVENT_BYTES, EventTooLargeError, NamedEvent, SseDecoder


def reference(body: bytes) -> list[bytes | NamedEvent]:
    """Yield events line by line, as the WHATWG grammar says, an incomplete last one included."""
    events: list[bytes | NamedEvent] = []
    name, error, data = b"", b"", []
    for line in [*re.split(rb"\r\n|\n|\r", body.removeprefix(b"\xef\xbb\xbf")), b""]:
        field, colon, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if not line:
            joined = b"\n".join(data)
            if joined:
                events.append(NamedEvent(name, joined) if name not in (b"", b"message") else joined)
            if error:
                events.append(NamedEvent(b"error", error))
            name, error, data = b"", b"", []
        elif field == b"data":
            data.append(value if colon else b"")
        elif field == b"event":
            name = value
        elif field == b"error":
            error = value
    return events


def decoded(*pieces: bytes) -> list[bytes | NamedEvent]:
    decoder = SseDecoder()
    return [*(event for piece in pieces for event in decoder.feed(piece)), *decoder.end()]


def cut(body: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(body) + 1) for place in places), len(body)]
    return [body[a:b] for a, b in pairwise(bounds)]


TABLE = {
    "LF": (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
    "CRLF": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "CR": (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    "line ends mixed": (
        b"data: a\r\n\ndata: b\n\r\ndata: c\r\r\ndata: d\r\n\r\n",
        [b"a", b"b", b"c", b"d"],
    ),
    "no space": (b"data:a\n\n", [b"a"]),
    "two spaces": (b"data:  a\n\n", [b" a"]),
    "trailing blank is kept": (b'data: {"x":1} \n\n', [b'{"x":1} ']),
    "several lines": (b"data: a\ndata:b\ndata\ndata: \n\n", [b"a\nb\n\n"]),
    "empty data": (b"data:\n\ndata\n\ndata: \n\ndata: a\n\n", [b"a"]),
    "a name and empty data": (b"event: heartbeat\ndata:\n\ndata: a\n\n", [b"a"]),
    "an error as a field": (
        b'error: {"message":"x"}\n\n',
        [NamedEvent(b"error", b'{"message":"x"}')],
    ),
    "data and an error as a field": (b"data: a\nerror: x\n\n", [b"a", NamedEvent(b"error", b"x")]),
    "comments": (b": ping\n\n:\n\n: x\ndata: a\n: y\n\n", [b"a"]),
    "named": (b"event: m.perf\ndata: a\n\ndata: b\n\n", [NamedEvent(b"m.perf", b"a"), b"b"]),
    "named, name last": (b"data: a\nevent:n\n\n", [NamedEvent(b"n", b"a")]),
    "the default name": (b"event: message\ndata: a\n\n", [b"a"]),
    "name without data": (b'event: request_id\n: "7b"\n\ndata: b\n\n', [b"b"]),
    "other fields": (b"id: 7\nretry: 3\ndatum: x\ndata: a\n\n", [b"a"]),
    "colon in data": (b"data: a: b\n\n", [b"a: b"]),
    "BOM": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    "BOM twice is a field's name": (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
    "U+2028, U+0085": (
        "data: a\u2028b\u0085c\x0bd\n\n".encode(),
        ["a\u2028b\u0085c\x0bd".encode()],
    ),
    "blank lines": (b"\n\n\ndata: a\n\n\n\n\ndata: b\n\n", [b"a", b"b"]),
    "no blank line at the end": (b"data: a\n\ndata: b\n", [b"a", b"b"]),
    "no line end at the end": (b"data: a\n\ndata: b", [b"a", b"b"]),
    "nothing": (b"", []),
    "DONE twice": (b"data: [DONE]\n\ndata: [DONE]\n\n", [b"[DONE]", b"[DONE]"]),
}


@pytest.mark.parametrize("name", TABLE)
def test_each_stream_is_decoded_into_its_events(name: str) -> None:
    body, expected = TABLE[name]
    assert reference(body) == expected
    assert decoded(body) == expected
    assert decoded(*(body[i : i + 1] for i in range(len(body)))) == expected
    for place in range(len(body)):
        assert decoded(body[:place], body[place:]) == expected, place


LINES = st.sampled_from(
    [
        b"data: x",
        b"data:y",
        b"data",
        b"data: ",
        b"event: n",
        b"event: message",
        b": c",
        b"",
        b"id: 1",
        b"error: e",
        b"\xef\xbb\xbf",
    ]
)
BODIES = st.one_of(
    st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"]))).map(
        lambda lines: b"".join(line + end for line, end in lines)
    ),
    st.lists(st.sampled_from(list(b"\r\n:d \xef\xbb\xbf")), max_size=40).map(bytes),
    st.binary(max_size=200),
)


@given(BODIES, st.lists(st.integers(0, 10_000), max_size=8))
def test_any_split_of_a_stream_is_decoded_into_the_same_events(
    body: bytes, places: list[int]
) -> None:
    assert decoded(*cut(body, places)) == reference(body)


def test_an_event_is_emitted_with_its_last_byte() -> None:
    for body, ends in (
        (b"data: a\n\nd", 9),
        (b"data: a\r\n\r\nd", 10),
        (b"data: a\r\rd", 9),
    ):  # a CR ends a line
        decoder = SseDecoder()
        assert [i for i in range(1, len(body) + 1) if decoder.feed(body[i - 1 : i])] == [ends], body


def test_the_decoder_is_pending_while_an_event_is_unfinished() -> None:
    decoder = SseDecoder()
    assert not decoder.pending
    decoder.feed(b"data: a\n\nda")
    assert decoder.pending
    decoder.feed(b"ta: b\n\n")
    assert not decoder.pending


def test_an_event_above_the_size_limit_is_refused() -> None:
    decoder = SseDecoder()
    piece = b"x" * (1 << 20)
    with pytest.raises(EventTooLargeError):
        for _ in range(MAX_EVENT_BYTES // len(piece) + 1):
            decoder.feed(piece)


def _cpu_s(kib: int) -> float:
    """Return the CPU time to decode one event in reads of 64 bytes, the least of three."""
    pieces = [b"data: ", *[b"x" * 64] * (16 * kib), b"\n\n"]
    times = []
    for _ in range(3):
        began = process_time()
        (event,) = decoded(*pieces)
        times.append(process_time() - began)
        assert len(event) == 1024 * kib
    return min(times)


def test_the_cost_of_a_large_event_in_small_reads_is_proportional_to_its_size() -> None:
    assert _cpu_s(2048) < 10 * _cpu_s(512), "4 times the size: some 4 times the work, not 16"
