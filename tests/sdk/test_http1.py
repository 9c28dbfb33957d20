"""Tests of the HTTP/1.1 parser, with bytes cut anywhere and with invalid bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from loadgen_sdk.transport.chunk_size import MalformedResponseError
from loadgen_sdk.transport.http1 import (
    MAX_HEAD_BYTES,
    MAX_LINE_BYTES,
    ResponseParser,
    build_request_head,
    merge_headers,
)

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def read(*pieces: bytes, closed: bool = False) -> tuple[ResponseParser, bytes]:
    response, body = ResponseParser(), b""
    for piece in pieces:
        body += b"".join(response.feed(piece))
    if closed:
        response.feed_end()
    return response, body


def facts(response: ResponseParser, body: bytes) -> tuple[object, ...]:
    return (
        response.status,
        response.headers,
        body,
        response.is_complete,
        response.is_reusable,
        response.surplus,
    )


ANSWERS: dict[str, tuple[bytes, int, bytes, bool, bool, bytes]] = {
    "length": (OK + b"Content-Length: 3\r\n\r\nabc", 200, b"abc", True, True, b""),
    "length, twice the same": (
        OK + b"Content-Length: 3\r\ncontent-length: 3\r\n\r\nabc",
        200,
        b"abc",
        True,
        True,
        b"",
    ),
    "length 0": (OK + b"Content-Length: 0\r\n\r\n", 200, b"", True, True, b""),
    "length, cut": (OK + b"Content-Length: 4\r\n\r\nabc", 200, b"abc", False, True, b""),
    "surplus": (OK + b"Content-Length: 3\r\n\r\nabcHTTP", 200, b"abc", True, False, b"HTTP"),
    "chunked": (CHUNKED + b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n", 200, b"abcd", True, True, b""),
    "upper-case hex": (
        CHUNKED + b"1A\r\n" + b"x" * 26 + b"\r\n0\r\n\r\n",
        200,
        b"x" * 26,
        True,
        True,
        b"",
    ),
    "lower-case hex": (
        CHUNKED + b"1a\r\n" + b"x" * 26 + b"\r\n0\r\n\r\n",
        200,
        b"x" * 26,
        True,
        True,
        b"",
    ),
    "leading zeros": (CHUNKED + b"0003\r\nabc\r\n000\r\n\r\n", 200, b"abc", True, True, b""),
    "extensions": (
        CHUNKED + b'3;a="b\r\nabc\r\n1 ;c\r\nd\r\n0;end\r\n\r\n',
        200,
        b"abcd",
        True,
        True,
        b"",
    ),
    "trailers": (
        CHUNKED + b"1\r\na\r\n0\r\nServer-Timing: x\r\nB: c\r\n\r\n",
        200,
        b"a",
        True,
        True,
        b"",
    ),
    "line ends inside a chunk": (
        CHUNKED + b"8\r\n0\r\n\r\n\r\n\n\r\n0\r\n\r\n",
        200,
        b"0\r\n\r\n\r\n\n",
        True,
        True,
        b"",
    ),
    "chunked, no last chunk": (CHUNKED + b"3\r\nabc\r\n", 200, b"abc", False, True, b""),
    "chunked, last blank line missing": (CHUNKED + b"1\r\na\r\n0\r\n", 200, b"a", False, True, b""),
    "chunked and surplus": (CHUNKED + b"1\r\na\r\n0\r\n\r\nX", 200, b"a", True, False, b"X"),
    "chunked wins over a length": (
        OK + b"Content-Length: 99\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        200,
        b"a",
        True,
        True,
        b"",
    ),
    "204": (b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", 204, b"", True, True, b""),
    "304": (b"HTTP/1.1 304 Not Modified\r\n\r\n", 304, b"", True, True, b""),
    "100 first": (
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\na",
        200,
        b"a",
        True,
        True,
        b"",
    ),
    "many interim answers": (
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 3 + OK + b"Content-Length: 1\r\n\r\na",
        200,
        b"a",
        True,
        True,
        b"",
    ),
    "a head that ends like a last chunk": (
        OK
        + b"Transfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
        + b"1\r\na\r\n0\r\n\r\n",
        200,
        b"a",
        True,
        True,
        b"",
    ),
    "until close": (OK + b"\r\nabc", 200, b"abc", False, False, b""),
    "close asked": (
        OK + b"Connection: close\r\nContent-Length: 1\r\n\r\na",
        200,
        b"a",
        True,
        False,
        b"",
    ),
    "close among others": (
        OK + b"Connection: x, Close\r\nContent-Length: 0\r\n\r\n",
        200,
        b"",
        True,
        False,
        b"",
    ),
    "1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", 200, b"a", True, False, b""),
    "1.0, kept": (
        b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 1\r\n\r\na",
        200,
        b"a",
        True,
        True,
        b"",
    ),
    "no reason phrase": (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", 200, b"", True, True, b""),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_response_is_parsed_alike_in_one_piece_and_in_any_two_pieces(name: str) -> None:
    data, status, body, complete, reusable, surplus = ANSWERS[name]
    expected_facts = facts(*read(data))
    assert (expected_facts[0], *expected_facts[2:]) == (status, body, complete, reusable, surplus)
    assert facts(*read(*(data[i : i + 1] for i in range(len(data))))) == expected_facts
    for place in range(1, len(data)):
        assert facts(*read(data[:place], data[place:])) == expected_facts, place


def test_equal_heads_are_parsed_once() -> None:
    data = OK + b"Keep-Alive: timeout=5, max=100\r\nContent-Length: 3\r\n\r\nabc"
    for _ in range(2):
        response, body = read(data)
        assert (
            response.status,
            response.idle_limit_s,
            response.uses_left,
            response.is_complete,
        ) == (
            200,
            5.0,
            100,
            True,
        )
        assert (body, response.is_reusable) == (b"abc", True)
    for length in range(200):  # more than are remembered
        body = b"x" * length
        assert read(OK + b"Content-Length: %d\r\n\r\n%s" % (length, body))[1] == body


def test_the_end_of_a_connection_completes_only_a_body_that_it_delimits() -> None:
    assert read(OK + b"\r\nabc", closed=True)[0].is_complete
    for data in (
        b"",
        OK,
        OK + b"Content-Length: 4\r\n\r\nabc",
        CHUNKED + b"3\r\nabc\r\n",
        CHUNKED + b"1\r\na\r\n0\r\n",
    ):
        assert not read(data, closed=True)[0].is_complete, data


def test_the_connection_headers_of_a_response_are_read() -> None:
    response, _ = read(OK + b"Keep-Alive: timeout=5, max=100\r\nContent-Length: 0\r\n\r\n")
    assert (response.idle_limit_s, response.uses_left) == (5.0, 100)
    response, _ = read(OK + b"Keep-Alive: timeout=5s, max=-1, x\r\nContent-Length: 0\r\n\r\n")
    assert (response.idle_limit_s, response.uses_left) == (None, None)


MALFORMED = {
    "a head with bare LF": OK.replace(b"\r\n", b"\n") + b"Content-Length: 1\n\na",
    "a header with a bare LF": OK + b"A: b\nContent-Length: 0\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9\r\n",
    "TLS": b"\x15\x03\x01\x00\x02\x02\x46",
    "HTTP/2": b"HTTP/2 200\r\n\r\n",
    "no code": b"HTTP/1.1 OK\r\n\r\n",
    "code of two digits": b"HTTP/1.1 20\r\n\r\n",
    "code of four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "code 0": b"HTTP/1.1 000 OK\r\n\r\n",
    "digits that are not ASCII": "HTTP/1.1 ²00 OK\r\n\r\n".encode("latin-1"),
    "a header without a colon": OK + b"nonsense\r\n\r\n",
    "a header without a name": OK + b": x\r\n\r\n",
    "a folded header": OK + b"A: b\r\n c\r\n\r\n",
    "a blank before the colon": OK + b"A : b\r\n\r\n",
    "a negative length": OK + b"Content-Length: -1\r\n\r\n",
    "a length in words": OK + b"Content-Length: x\r\n\r\n",
    "two lengths": OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "no length": OK + b"Content-Length:\r\n\r\n",
    "a length of 5000 digits": OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "a chunk without a size": CHUNKED + b"\r\nabc",
    "a size in words": CHUNKED + b"xyz\r\nabc\r\n",
    "a negative size": CHUNKED + b"-1\r\n\r\n",
    "a size with a prefix": CHUNKED + b"0x3\r\nabc\r\n",
    "a size with a blank inside": CHUNKED + b"1 1\r\n" + b"x" * 17 + b"\r\n",
    "a size of 16 digits": CHUNKED + b"f" * 16 + b"\r\n",
    "a chunk longer than its size": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "a chunk shorter than its size": CHUNKED + b"3\r\nab\r\n0\r\n\r\n",
    "a head without end": OK + b"A: " + b"x" * MAX_HEAD_BYTES,
    "a size line without end": CHUNKED + b"1;" + b"x" * MAX_LINE_BYTES,
    "a trailer without end": CHUNKED + b"0\r\n" + b"x" * (MAX_LINE_BYTES + 1),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_responses_are_refused(name: str) -> None:
    data = MALFORMED[name]
    with pytest.raises(MalformedResponseError):
        read(data)
    if len(data) < 200:
        with pytest.raises(MalformedResponseError):
            read(*(data[i : i + 1] for i in range(len(data))))


TOKENS = st.sampled_from(
    [
        OK,
        b"\r\n",
        b"\r",
        b"\n",
        b"HTTP/1.1 ",
        b"100 C\r\n\r\n",
        b"Content-Length: ",
        b"Transfer-Encoding: chunked\r\n",
        b"Keep-Alive: max=",
        b"Connection: close\r\n",
        b"0\r\n\r\n",
        b"3",
        b"f" * 15,
        b";x",
        b"abc",
        b":",
        b" ",
        b"\xff",
        b"9" * 400,
    ]
)
BYTES = st.one_of(
    st.binary(max_size=300),
    st.lists(st.one_of(TOKENS, st.binary(max_size=4)), max_size=30).map(b"".join),
    st.lists(TOKENS, max_size=20).map(lambda parts: CHUNKED + b"".join(parts)),
    st.lists(TOKENS, max_size=20).map(lambda parts: OK + b"".join(parts) + b"\r\n\r\n"),
)


@given(BYTES, st.lists(st.integers(0, 10_000), max_size=6))
@example(b"HTTP/1.1 100 C\r\n\r\n" * 2000, [])
@example(OK + b"Keep-Alive: timeout=" + b"9" * 5000 + b"\r\n\r\n", [])
def test_any_bytes_are_read_as_a_response_or_refused_as_malformed(
    data: bytes, places: list[int]
) -> None:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    outcomes = []
    for pieces in ([data], [data[a:b] for a, b in pairwise(bounds)]):
        response = ResponseParser()
        try:
            body = b"".join(piece for part in pieces if part for piece in response.feed(part))
        except MalformedResponseError:
            outcomes.append("malformed")
            continue
        assert response.status == 0 or 200 <= response.status <= 999
        assert response.idle_limit_s is None or response.idle_limit_s < 1e10
        outcomes.append(repr(facts(response, body)))

    # Bytes without a line end may be refused at once or awaited, depending on how they are cut.
    assert len(set(outcomes)) == 1 or "malformed" in outcomes


BODY = st.lists(st.binary(min_size=1, max_size=40), max_size=8)


@given(
    BODY,
    st.lists(st.integers(0, 10_000), max_size=8),
    st.booleans(),
    st.sampled_from([b"", b"HTTP/1.1 200"]),
)
def test_any_split_gives_the_same_chunked_body(
    parts: list[bytes], places: list[int], upper: bool, more: bytes
) -> None:
    body = b"".join(parts)
    sizes = [f"{len(part):X}" if upper else f"{len(part):x};n=1" for part in parts]
    data = CHUNKED + b"".join(
        b"%s\r\n%s\r\n" % (size.encode(), part) for size, part in zip(sizes, parts, strict=True)
    )
    data += b"0\r\n\r\n" + more
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    response, got = read(*(data[a:b] for a, b in pairwise(bounds) if a < b))

    assert (got, response.is_complete, response.surplus, response.is_reusable) == (
        body,
        True,
        more,
        not more,
    )


def test_a_request_head_has_its_headers_and_refuses_line_breaks_in_them() -> None:
    assert (
        build_request_head("POST", "/v1/x?a=b", [("Host", "h"), ("A", "ü")])
        == b"POST /v1/x?a=b HTTP/1.1\r\nHost: h\r\nA: \xfc\r\n"
    )
    for name, value in (("A", "b\r\nC: d"), ("A\n", "b"), ("A", "b\r")):
        with pytest.raises(ValueError, match="line break"):
            build_request_head("GET", "/", [(name, value)])


@pytest.mark.parametrize(
    ("users", "sent"),
    [
        ([], [("Host", "h"), ("Authorization", "Bearer ours"), ("Accept", "x")]),
        (
            [("A", "1"), ("A", "2")],
            [
                ("Host", "h"),
                ("Authorization", "Bearer ours"),
                ("Accept", "x"),
                ("A", "1"),
                ("A", "2"),
            ],
        ),
        (
            [("authorization", "Bearer theirs")],
            [("Host", "h"), ("Accept", "x"), ("authorization", "Bearer theirs")],
        ),
        ([("api-key", "theirs")], [("Host", "h"), ("Accept", "x"), ("api-key", "theirs")]),
        (
            [("HOST", "other"), ("accept", "y")],
            [("Authorization", "Bearer ours"), ("HOST", "other"), ("accept", "y")],
        ),
    ],
)
def test_headers_of_the_user_replace_default_ones_and_a_key_replaces_every_key(
    users: list[tuple[str, str]], sent: object
) -> None:
    assert (
        merge_headers([("Host", "h"), ("Authorization", "Bearer ours"), ("Accept", "x")], users)
        == sent
    )
