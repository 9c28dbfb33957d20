"""Reads of a response leave the same state in C and in Python, however they are cut."""

from __future__ import annotations

import gc
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import repository_paths
from compare_responses import HEAD, as_reads, check_response, chunked, read_response
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loadgen_sdk.transport import receiver
from loadgen_sdk.transport.exchange import Exchange
from loadgen_sdk.transport.response_state import ExchangeState, ResponseState
from loadgen_sdk.transport.timer import TimerFd
from loadgen_sdk.wire_formats import reference, response_reader
from loadgen_sdk.wire_formats.event_timeline import EventTimeline
from loadgen_sdk.wire_formats.reference import DecoderState, ResponseReaderState
from loadgen_sdk.wire_formats.server_timing import HEADER

compiled = pytest.importorskip(
    "loadgen_sdk._compiled", reason="built by pip install where a C compiler is"
)
RELAXED = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # the machine may be busy
TRANSCRIPTS = sorted((repository_paths.DATA / "transcripts").glob("*/*.http"))
END = b"0\r\n\r\n"

TEXTS = [
    b'"a"',
    b'""',
    b"null",
    '"é"'.encode(),
    b'"\\n"',
    b'"\\ud83d"',
    b'"\\u0041"',
    b'"\\x"',
    b'"\xff"',
    b'"\x01"',
    b"7",
]
RAW = [
    b"null",
    b"[]",
    b"{}",
    b'"x"',
    b"[1]",
    b'{"a":1}',
    b"0.5",
    b"-1",
    b"01",
    b"1e3",
    b"1.",
    b"-",
    b"true",
    b"[",
    b"",
]
COUNTS = [b"4", b"0", b"null", b"-1", b'"4"', b"1.5", b"9999999999"]
SPACE = st.sampled_from([b"", b"", b"", b" ", b"\t", b"\r"])


def fields(**kinds: Any) -> st.SearchStrategy[bytes]:
    """Draw a JSON object with some of these fields, some twice, with blanks."""
    field_strategy = st.sampled_from(sorted(kinds)).flatmap(
        lambda name: st.tuples(st.just(name.encode()), SPACE, kinds[name])
    )
    return st.lists(
        field_strategy.map(lambda parts: b'%s"%s":%s' % (parts[1], parts[0], parts[2])), max_size=5
    ).map(lambda parts: b"{" + b",".join(parts) + b"}")


raw, text = st.sampled_from(RAW), st.sampled_from(TEXTS)
DELTA = fields(
    content=text,
    role=text,
    reasoning_content=text,
    reasoning=text,
    tool_calls=raw,
    function_call=raw,
    refusal=text,
    token_ids=raw,
    other=raw,
)
CHOICE = fields(
    delta=st.one_of(DELTA, DELTA, raw),
    text=text,
    finish_reason=st.sampled_from([b'"stop"', b'"odd"', *TEXTS]),
    index=raw,
    logprobs=raw,
    message=raw,
    meta_info=raw,
    token_ids=raw,
    speculative_decoding=raw,
)
CHOICES = st.lists(CHOICE, max_size=2).map(lambda choices: b"[" + b",".join(choices) + b"]")
COUNT = st.sampled_from(COUNTS)
USAGE = fields(
    prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT, prompt_tokens_details=raw
)
ODD_EVENT = fields(
    choices=st.one_of(CHOICES, CHOICES, CHOICES, raw),
    usage=st.one_of(USAGE, raw),
    id=text,
    created=raw,
    error=raw,
    message=raw,
    detail=raw,
    timings=raw,
    metrics=raw,
    data=raw,
    output=raw,
    type=text,
)


def usual(delta: bytes, finish: bytes = b"null", more: bytes = b"") -> bytes:
    choice = b'{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}' % (delta, finish)
    return b'{"id":"chatcmpl-1","created":1,"choices":[%s]%s}' % (choice, more)


ROLE, WORD = usual(b'{"role":"assistant","content":""}'), usual(b'{"content":" word"}')
FINISH = usual(b"{}", b'"length"')
COUNTED = b'{"choices":[],"usage":{"prompt_tokens":64,"completion_tokens":4,"total_tokens":68}}'
USUAL = [ROLE, WORD, WORD, WORD, usual(b'{"content":"."}', b'"stop"'), COUNTED, b"[DONE]"]
EVENT = st.one_of(
    st.sampled_from([ROLE, WORD, WORD, FINISH, COUNTED, b"[DONE]", usual(b'{"reasoning":"hm"}')]),
    ODD_EVENT,
    CHOICE.map(lambda choice: b'{"choices":[%s]}' % choice),
    DELTA.map(usual),
    USAGE.map(lambda usage: usual(b'{"content":"a"}', more=b',"usage":' + usage)),
)


@settings(RELAXED)
@given(
    st.lists(EVENT, max_size=8),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([0, 4, 5]),
    st.booleans(),
)
@example([b'{"choices":[{"delta":{"content":"a"},"delta":null}]}', FINISH], 1, 1, 4, True)
@example([b'{"choices":[{"delta":{"content":"a"}}],"choices":[]}', FINISH], 1, 1, 4, True)
@example([b'{"choices":[{"delta":{"content":"a"}}],"type":null}', FINISH], 1, 1, 4, True)
@example([ROLE, WORD, usual(b'{"content":"\xed\xa0\xbd"}'), FINISH], 1, 2, 4, True)
def test_both_implementations_read_any_events_alike(
    payloads: list[bytes], per_chunk: int, per_read: int, requested_tokens: int, ends: bool
) -> None:
    pieces = chunked(payloads, per_chunk) + [END] * ends
    check_response(as_reads(pieces, per_read), requested_output_tokens=requested_tokens)


@settings(RELAXED)
@given(
    st.lists(st.integers(0, 1200), max_size=9),
    st.integers(0, 1200),
    st.integers(-1, 255),
    st.sampled_from([0, 4]),
)
def test_both_implementations_read_any_split_and_any_damage_alike(
    cuts: list[int], place: int, byte: int, requested_tokens: int
) -> None:
    body = HEAD + b"".join(chunked(USUAL)) + END
    if byte >= 0:
        body = body[:place] + bytes([byte]) + body[place + 1 :]
    check_response(
        [body[a:b] for a, b in pairwise([0, *sorted(cuts), len(body)])],
        requested_output_tokens=requested_tokens,
    )


@pytest.mark.parametrize("file", TRANSCRIPTS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_both_implementations_read_real_streams_alike(file: Path) -> None:
    data = file.read_bytes()[:20_000]
    by_chunk = [at + 2 for at in range(len(data)) if data[at : at + 2] == b"\r\n"]
    for cuts in ([], by_chunk, by_chunk[::5], range(0, len(data), 997)):
        reads = [data[a:b] for a, b in pairwise([0, *cuts, len(data)])]
        check_response(reads, requested_output_tokens=4)
        check_response(reads, keep_text=True)


def functions_called(reads: list[bytes]) -> set[str]:
    """Of Python, while an answer of four tokens is read."""
    called: set[str] = set()
    sys.setprofile(
        lambda frame, event, _: called.add(frame.f_code.co_name) if event == "call" else None
    )
    try:
        read_response(reads, Exchange.feed_reads, requested_output_tokens=4)
    finally:
        sys.setprofile(None)
    return called


def test_a_usual_response_is_read_without_calls_of_python_methods() -> None:
    for delta in (b'{"content":"a"}', b'{"reasoning_content":"a","content":null,"tool_calls":[]}'):
        reads = as_reads(
            [*chunked([ROLE, *([usual(delta)] * 4), FINISH, COUNTED, b"[DONE]"]), END], 2
        )
        check_response(reads, requested_output_tokens=4)
        called = functions_called(reads)
        assert (
            "report_completion" in called
            and not {"_feed_read", "take", "find_failure", "_finish_response"} & called
        )


@pytest.mark.parametrize(
    "counts",
    [
        b'"prompt_tokens_details":{"cached_tokens":3,"cache_write_tokens":2}',
        b'"prompt_tokens_details":null,"input_tokens_details":{"cached_tokens":7},'
        b'"cache_creation_input_tokens":5',
        b'"completion_tokens_details":{"reasoning_tokens":1},'
        b'"prompt_tokens_details":{"cached_tokens":null}',
        b'"output_tokens_details":{"reasoning_tokens":4},"cache_creation_input_tokens":-5',
        b'"prompt_tokens":-1',
        b'"completion_tokens":null',
        b'"prompt_tokens":2147483648',
    ],
)
def test_compiled_and_python_readers_read_the_same_usage(counts: bytes) -> None:
    names = [name for name in (b'"prompt_tokens":', b'"completion_tokens":') if name not in counts]
    usage = b'{"choices":[],"usage":{%s}}' % b",".join([*(name + b"9" for name in names), counts])
    for finish in (b'"stop"', b'"length"', b'"content_filter"'):
        last_word = usual(b'{"content":"."}', finish)
        reads = as_reads([*chunked([ROLE, WORD, last_word, usage, b"[DONE]"]), END], 2)
        check_response(reads, requested_output_tokens=4)
        check_response(reads, requested_output_tokens=4, keep_text=True)
        timing = b"\r\n%s: a\r\n\r\n" % HEADER.encode()
        with_timing = reads[0].replace(b"\r\n\r\n", timing, 1)
        check_response([with_timing, *reads[1:]], requested_output_tokens=4)


class ReferenceResponse(ResponseState):
    """A response whose fields are kept in Python."""


class ReferenceDecoder(DecoderState):
    """A decoder whose fields are kept in Python."""


class ReferenceReading(ResponseReaderState):
    """A reading whose fields are kept in Python."""


class ReferenceExchange(ExchangeState):
    """An exchange whose fields, and those of its response, are kept in Python."""

    response_class: Any = ReferenceResponse
    decoder_class: Any = ReferenceDecoder
    reader_class: Any = ReferenceReading


def initial_values(instance: Any, state_class: type) -> dict[str, Any]:
    """Return the fields of an instance. Those that contain other fields are left out."""
    names = [
        n for n in state_class.__slots__ if n not in ("response", "decoder", "reader", "timeline")
    ]
    return {name: getattr(instance, name) for name in names}


def test_compiled_and_python_readers_have_the_same_fields_and_initial_values() -> None:
    timeline = EventTimeline()
    options: dict[str, Any] = {
        "is_stream_requested": True,
        "requested_output_tokens": 3,
        "keep_text": True,
        "on_output": print,
    }
    our_exchange = Exchange(None, b"h", b"b", 5, print, timeline, **options)
    their_reference_exchange = ReferenceExchange(None, b"h", b"b", 5, print, timeline, **options)
    few = (
        response_reader.ResponseReader(timeline, expects_few_events=True),
        ReferenceReading(timeline, expects_few_events=True),
    )
    for state_class, compiled_state, reference_state in (
        (ExchangeState, our_exchange, their_reference_exchange),
        (ResponseState, our_exchange.response, their_reference_exchange.response),
        (DecoderState, our_exchange.decoder, their_reference_exchange.decoder),
        (ResponseReaderState, our_exchange.reader, their_reference_exchange.reader),
        (ResponseReaderState, *few),
    ):
        base = type(compiled_state).__mro__[1]
        assert base.__module__ == "loadgen_sdk._compiled"
        assert set(state_class.__slots__) <= set(vars(base))
        values = initial_values(compiled_state, state_class)
        assert values == initial_values(reference_state, state_class)

    for arguments in ((), (None, b"", b"", 0, print, timeline)):
        with pytest.raises(TypeError):
            Exchange(*arguments)


def test_reading_responses_leaks_no_memory() -> None:
    inputs = [
        as_reads([*chunked(USUAL), END], 2),
        as_reads(chunked([ROLE, b"{", FINISH]), 1),
        [HEAD[:40], b"x"],
    ]

    def all_of_them() -> None:
        for reads in inputs:
            read_response(reads, Exchange.feed_reads, requested_output_tokens=4)

    class Listener:
        def __call__(self, *_: Any) -> None: ...

    all_of_them()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(100):
        all_of_them()
    gc.collect()
    assert sys.getallocatedblocks() - before < 100
    ring = Listener()
    exchange = Exchange(None, b"", b"", 0, ring, EventTimeline(), is_stream_requested=True)
    ring.held = exchange  # type: ignore[attr-defined]
    del ring, exchange
    assert gc.collect() > 0, "a ring through an exchange is found"


@pytest.mark.parametrize("value", [0, 4, (1 << 31) - 1, 1 << 31, 1 << 70, -1, True, 1.0, "4", None])
def test_compiled_and_python_readers_read_the_same_token_counts(value: Any) -> None:
    assert compiled.token_count(value) == reference.token_count(value)


class Connection(compiled.SocketBuffer):  # type: ignore[misc]
    """What the receiver knows of a connection."""

    __slots__ = ("sock",)

    def __init__(self, sock: socket.socket, exchange: Any, reads: list[Any]) -> None:
        super().__init__(sock.fileno(), 1)
        self.sock, self.exchange, self.reads, self.is_queued = sock, exchange, reads, True
        self.idle_since, self.tcp_connect_ns = time.monotonic_ns(), 3


@pytest.mark.parametrize(
    "byte", [0, 0x1F, 0x20, 0x21, 0x22, 0x23, 0x5B, 0x5C, 0x5D, 0x7F, 0x80, 0xC3, 0xFF]
)
def test_a_special_byte_is_detected_at_any_position_of_a_long_text(byte: int) -> None:
    for place in range(10):
        text_bytes = b"n" * place + bytes([byte]) + b"r" * (12 - place)
        check_response(
            as_reads(
                [*chunked([usual(b'{"content":"%s"}' % text_bytes), FINISH, COUNTED]), END], 9
            ),
            requested_output_tokens=4,
        )


VALUES = [
    b'"a"',
    b'""',
    b'"\\""',
    b'"\xff"',
    b"null",
    b"7",
    b"07",
    b"1.5e3",
    b"-",
    b"[1,{}]",
    b"{}",
    b"true",
    b'"b',
    b'a"',
    b"",
]
FORM = b'{"id":%s,"n":%s,"choices":[{"delta":{"content":%s},"finish_reason":%s,"x":%s}],"usage":%s}'
PLAIN = [b'"i"', b"3", b'"word"', b"null", b"1.0", b"null"]


@pytest.mark.parametrize("place", range(6))
def test_an_event_that_matches_an_earlier_pattern_is_read_like_the_first(
    place: int,
) -> None:
    def event(at: int, value: bytes) -> bytes:
        return FORM % tuple(
            value if at == number else template_part for number, template_part in enumerate(PLAIN)
        )

    usage = COUNTED[COUNTED.index(b'"usage":') + 8 : -1]
    for value in [*VALUES, b'"stop"', b'"length"', usage, b'{"prompt_tokens":"no"}']:
        for between in (b"", b'{"role":"assistant"}'):
            events = [
                event(0, b'"o"'),
                event(place, value),
                event(place, b'"z"'),
                event(place, value),
            ]
            more = [usual(between)] if between else []
            check_response(
                as_reads([*chunked([*more, *events, FINISH, COUNTED]), END], 2),
                requested_output_tokens=4,
            )


def test_the_compiled_loop_runs_until_python_is_needed() -> None:
    pieces = as_reads([*chunked(USUAL), END], 5)
    check_response(pieces, requested_output_tokens=4)  # its head is known
    our_socket, peer_socket = socket.socketpair()
    completed: list[Any] = []
    our_socket.setblocking(False)
    with (
        our_socket,
        peer_socket,
        select.epoll() as poll,
        select.epoll() as deferred_poll,
        closing(TimerFd()) as timer,
    ):
        poll.register(timer.fileno(), select.EPOLLIN)
        socket_receiver = compiled.Receiver(poll, deferred_poll, timer, deque())
        short = Connection(our_socket, an_exchange(), [])
        short.is_readable, short.is_queued, short.owner = (
            True,
            False,
            SimpleNamespace(response_completed=completed.append),
        )
        poll.register(our_socket.fileno(), select.EPOLLIN)
        socket_receiver.add(short)
        later = time.monotonic_ns() + 60 * 10**9

        def go(until: int, tick_at: int) -> Any:
            return socket_receiver.receive_and_deliver(
                0, until, tick_at, {short}, 10**6, completed.append
            )

        peer_socket.send(pieces[0])
        assert (
            go(later, later) is None
            and short.exchange.reader.output_events
            and short.can_batch_reads
            and not completed
        )
        assert socket_receiver.timer_armed_for == socket_receiver.next_poll_at < later, (
            "so that no wait is longer than may be"
        )
        peer_socket.send(b"".join(pieces[1:]))
        assert go(later, later) is None and completed == [short], "the end is its owner's"
        assert go(later, 0) is None and go(0, later) is None, "the tick is due, or the loop's turn"
        socket_receiver.wake_at = 1
        assert go(later, later) == [] and completed == [short]
        socket_receiver.wake_at = later
        socket_receiver.timer_armed_for = fires = time.monotonic_ns() + 10**6
        timer.arm(fires)
        select.select([timer], [], [])
        assert go(later, 0) is None and not select.select([timer], [], [], 0)[0], (
            "it has fired, and is read"
        )
        assert socket_receiver.last_poll_at == fires, (
            "what it did not report was empty when it fired"
        )
        our_socket.shutdown(socket.SHUT_RDWR)
        poll.modify(our_socket.fileno(), select.EPOLLIN | select.EPOLLOUT)
        timer.arm(1)
        select.select([timer], [], [])
        ready_sockets = go(later, later)
        assert sorted(fd for fd, _ in ready_sockets) == sorted(
            [our_socket.fileno(), timer.fileno()]
        ), "with others it is Python's"


@pytest.fixture
def compiled_receiver() -> Iterator[Any]:
    poll, deferred_poll, timer = select.epoll(), select.epoll(), TimerFd()
    yield compiled.Receiver(poll, deferred_poll, timer, deque())
    for each in (timer, deferred_poll, poll):
        each.close()


def an_exchange(requested_tokens: int = 4) -> Any:
    received: list[Any] = []
    return Exchange(
        None,
        b"",
        b"",
        0,
        received.append,
        EventTimeline(),
        is_stream_requested=True,
        requested_output_tokens=requested_tokens,
    )


def test_only_reads_of_short_responses_are_delivered_in_c(compiled_receiver: Any) -> None:
    pieces = as_reads([*chunked(USUAL), END], 5)
    reads = [[(data, 10 + at, 20 + at, 5, True)] for at, data in enumerate(pieces)]
    our_socket, peer_socket = socket.socketpair()
    with our_socket, peer_socket:
        check_response(pieces, requested_output_tokens=4)  # its head is known
        short = Connection(our_socket, an_exchange(), reads[0])
        assert [
            compiled_receiver.deliver(short),
            short.reads,
            short.is_queued,
            short.can_batch_reads,
        ] == [
            1,
            [],
            False,
            True,
        ]
        assert compiled_receiver.deliver(short) == 0, "nothing came"
        short.reads = reads[1]
        assert (
            compiled_receiver.deliver(short) == 2
            and short.exchange.response.is_complete
            and short.exchange.failure is None
        )
        timed_out = [(b"HTTP/1.1 408 Request Timeout\r\n\r\n", 10, 20, 5, True)]
        connections = [
            Connection(our_socket, an_exchange(400), reads[0]),
            Connection(our_socket, None, reads[0]),
        ]
        connections += [
            Connection(our_socket, an_exchange(), timed_out),
            Connection(our_socket, an_exchange(), []),
        ]
        connections += [Connection(our_socket, an_exchange(), reads[0]) for _ in range(4)]
        (
            connections[-1].is_closed,
            connections[-2].tls,
            connections[-3].ended_at,
            connections[-4].template,
        ) = (
            True,
            peer_socket,
            7,
            (b"a", b"b"),
        )
        for other in connections:
            before = other.reads
            assert (
                compiled_receiver.deliver(other) == 0 and other.reads is before and other.is_queued
            )
        short.reads, short.exchange = [3], an_exchange()
        assert compiled_receiver.deliver(short) == 0


def test_both_receiver_implementations_send_parts_alike(compiled_receiver: Any) -> None:
    pure = receiver.Receiver.send
    for send in (
        compiled_receiver.send,
        lambda buffer, parts: pure(compiled_receiver, buffer, parts),
    ):
        our_socket, peer_socket = socket.socketpair()
        with our_socket, peer_socket:
            our_socket.setblocking(False)
            buffer = Connection(our_socket, None, [])
            before = time.monotonic_ns()
            at, taken = send(buffer, (b"head", b"", b"body"))
            assert (
                before <= at <= time.monotonic_ns()
                and taken == 8
                and peer_socket.recv(9) == b"headbody"
            )
            many = bytes(1 << 20)
            taken = send(buffer, (many, many))[1]
            assert 0 < taken < 2 << 20
            while taken > 0:
                taken = send(buffer, (many,))[1]
            assert taken == 0, "it is full"
            peer_socket.close()
            assert send(buffer, (b"x",))[1] == -1

    with pytest.raises(TypeError):
        compiled_receiver.send(buffer, ("text",))


def test_a_request_takes_the_last_idle_connection_and_returns_it_when_done(
    compiled_receiver: Any,
) -> None:
    our_socket, peer_socket = socket.socketpair()
    with our_socket, peer_socket:
        our_socket.setblocking(False)
        connection, exchange = Connection(our_socket, None, []), an_exchange()
        idle, awaited = (
            deque([Connection(our_socket, None, []), connection]),
            {exchange} - {exchange},
        )
        exchange.head, exchange.body, connection.template, connection.can_batch_reads = (
            b"head",
            b"body",
            (b"", b""),
            True,
        )
        before = time.monotonic_ns()
        assert (
            compiled_receiver.try_send_on_idle(exchange, idle, 10**9, awaited) == 0
            and peer_socket.recv(9) == b"headbody"
        )
        assert before <= exchange.ready_at <= exchange.sent_at <= time.monotonic_ns() and (
            exchange.tcp_connect_ns,
            exchange.tls_handshake_ns,
            exchange.bytes_sent,
        ) == (
            3,
            0,
            8,
        )
        assert [
            exchange.connection,
            exchange.is_connection_reused,
            connection.exchange,
            len(idle),
            awaited,
        ] == [
            connection,
            False,
            exchange,
            1,
            {exchange},
        ]
        assert [connection.template, connection.can_batch_reads] == [None, False]

        answer, in_flight = exchange.response, {exchange: None}
        field_values = [
            ("is_complete", False),
            ("is_reusable", False),
            ("uses_left", 1),
            ("idle_limit_s", 5.0),
        ]
        answer.is_complete = True
        for name, value in field_values:  # each is for Python
            usual, _ = getattr(answer, name), setattr(answer, name, value)
            assert (
                compiled_receiver.try_recycle(connection, idle, in_flight, awaited) is None
                and in_flight
                and awaited
            )
            setattr(answer, name, usual)
        assert (
            compiled_receiver.try_recycle(connection, idle, in_flight, awaited) is exchange
            and not in_flight
            and not awaited
        )
        assert [
            connection.exchange,
            connection.responses_served,
            idle[-1],
            exchange.connection,
            exchange.body,
        ] == [
            None,
            1,
            connection,
            None,
            b"",
        ]
        assert (
            before < connection.idle_since
            and compiled_receiver.try_recycle(connection, idle, in_flight, awaited) is None
        )

        second_exchange = an_exchange()
        second_exchange.head, second_exchange.body = b"h", bytes(4 << 20)
        for name, value in (
            ("is_closed", True),
            ("tls", peer_socket),
            ("unsent", [b"x"]),
            ("idle_since", before - 10**9),
        ):
            usual, _ = getattr(connection, name), setattr(connection, name, value)
            assert (
                compiled_receiver.try_send_on_idle(second_exchange, idle, 10**9, awaited) == -1
                and len(idle) == 2
                and not awaited
                and second_exchange.sent_at < 0
            )
            setattr(connection, name, usual)
        left = compiled_receiver.try_send_on_idle(second_exchange, idle, 10**9, awaited)
        assert 0 < left < 4 << 20 and (
            second_exchange.is_connection_reused,
            second_exchange.tcp_connect_ns,
            second_exchange.bytes_sent,
        ) == (
            True,
            -1,
            1 + (4 << 20),
        )
        assert (
            compiled_receiver.try_send_on_idle(second_exchange, deque(), 10**9, awaited) == -1
            and compiled_receiver.try_send_on_idle(None, idle, 10**9, awaited) == -1
        )
        peer_socket.close()
        assert compiled_receiver.try_send_on_idle(second_exchange, idle, 10**9, awaited) == 0, (
            "an error: the next read reports it"
        )


def test_queued_buffers_are_delivered_in_order_within_a_time_slice() -> None:
    poll, deferred_poll, timer = select.epoll(), select.epoll(), TimerFd()
    queue, received_requests = deque[Any](), list[Any]()
    socket_receiver = compiled.Receiver(poll, deferred_poll, timer, queue)
    our_socket, peer_socket = socket.socketpair()
    pieces = as_reads([*chunked(USUAL), END], 20)
    check_response(pieces, requested_output_tokens=4)  # its head is known
    with our_socket, peer_socket, poll, deferred_poll:

        class ConnectionOwner:
            def response_completed(self, connection: Any) -> None:
                received_requests.append(("over", connection))

        def queued(reads: list[bytes], busy: Any) -> Any:
            connection = Connection(
                our_socket,
                busy,
                [(data, 10 + at, 20 + at, 5, True) for at, data in enumerate(reads)],
            )
            connection.owner = ConnectionOwner()
            queue.append(connection)
            return connection

        full_connection, part, other = (
            queued(pieces, an_exchange()),
            queued([HEAD], an_exchange()),
            queued([HEAD], None),
        )
        before = time.monotonic_ns()
        now = socket_receiver.deliver_queued(
            10**9, lambda event: received_requests.append(("other", event))
        )
        assert before <= now <= time.monotonic_ns() and not queue
        assert (
            received_requests == [("over", full_connection), ("other", other)]
            and part.exchange.response.status == 200
        )
        for _ in range(20):
            queued([], None)
        socket_receiver.deliver_queued(0, lambda _: None)
        assert len(queue) == 12, "eight, and then the slice is over"
        with pytest.raises(ZeroDivisionError):
            socket_receiver.deliver_queued(0, lambda _: 1 // 0)
        with pytest.raises(TypeError):
            socket_receiver.deliver_queued(None, print)
    timer.close()
