"""The functions in C do what the reference does, for any bytes, splits and ends of connections."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import socket
import struct
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from compare_chunks import AFTER, BEFORE, check_chunks
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loadgen_sdk.transport import chunk_size, http1, plain_events, receiver
from loadgen_sdk.transport.timer import TimerFd
from loadgen_sdk.wire_formats import reference, sse

compiled = pytest.importorskip(
    "loadgen_sdk._compiled", reason="built by pip install where a C compiler is"
)
FOREVER = 1 << 62
SIOCOUTQNSD = 0x894B  # linux/sockios.h: bytes that were not sent yet
RELAXED = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # the machine may be busy

PLAIN = b"data: " + BEFORE + b"word" + AFTER + b"\n\n"
TWO = b"%x\r\n%s\r\n" % (2 * len(PLAIN), 2 * PLAIN)
PLAIN = b"%x\r\n%s\r\n" % (len(PLAIN), PLAIN)
SENT = {
    "plain": PLAIN,
    "three": PLAIN * 3,
    "two in one": TWO,
    "mixed": PLAIN + TWO,
    "long": PLAIN * 40,
}
SENT |= {"cut": PLAIN + PLAIN[:9], "odd after": PLAIN + b"5\r\nhello\r\n"}
BYTES = SENT | {
    "odd": PLAIN.replace(b"word", b'wo"d'),
    "end": b"0\r\n\r\n",
    "more end": b"\n\r\n\r\n" * 3,
}
SIZES = st.sampled_from(
    [1, 2, 4, 5, 100, 2047, 2048, 3000, (32 << 10) - 1, 32 << 10, (32 << 10) + 1]
)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # socket
        st.one_of(
            SIZES,
            st.sampled_from(
                [
                    "plain",
                    "plain",
                    *SENT,
                    "odd",
                    "end",
                    "more end",
                    "can_batch_reads",
                    "must_not_batch",
                    "template",
                    "no template",
                    "shut",
                    "reset",
                    "take",
                    "hand over",
                    "early",
                    "hold",
                    "hold two",
                    "release",
                ]
            ),
        ),
    ),
    max_size=120,
)


def script(steps: list[tuple[int, Any]], buffer_class: Any, receiver_class: Any) -> list[Any]:
    """Return what a receiver reports at each step, with sockets by number and without times."""
    session = ReceiverSession(buffer_class, receiver_class)
    try:
        for number, step in steps:
            session.do(number, step)
        return session.finish()
    finally:
        session.close()


class ReceiverSession:
    """A receiver with three sockets, the last of which is not readable."""

    def __init__(self, buffer_class: Any, receiver_class: Any) -> None:
        class Connection(buffer_class):  # type: ignore[misc]
            __slots__ = ("number", "sock")

        for data in (PLAIN, TWO, PLAIN.replace(b"word", b'wo"d')):
            learn(data)
        self.poll = select.epoll()
        self.deferred = select.epoll()
        self.queue: deque[Any] = deque()
        self.timer = TimerFd()
        self.receiver = receiver_class(self.poll, self.deferred, self.timer, self.queue)
        self.report: list[Any] = []
        self.connections = []
        self.senders = []
        for number in range(3):
            sock, sender = make_pair()
            connection = Connection(sock.fileno(), 1)
            connection.sock = sock
            connection.number = number
            connection.is_readable = number < 2
            self.receiver.add(connection)
            self.poll.register(sock, select.EPOLLIN)
            self.connections.append(connection)
            self.senders.append(sender)

    def do(self, number: int, step: Any) -> None:
        """Do a step for a socket, receive once, and report the state of all sockets."""
        receiver = self.receiver
        connection = self.connections[number]
        with contextlib.suppress(OSError):
            self._send(number, step)
        self._set_options(connection, step)
        self._take(connection, step)
        receiver.wake_at = 0 if step == "early" else FOREVER
        unhandled = receiver.receive(0, 0, FOREVER if number else -1)
        for other in self.connections:
            check_times(other)
        self.report.append((self._numbered(unhandled), *self._state()))
        assert receiver.next_poll_at > receiver.now - 1_000_000
        queued = [other for other in self.connections if other.is_queued]
        assert receiver.queued_reads == sum(len(other.reads) for other in queued)

    def _send(self, number: int, step: Any) -> None:
        """Send what a step says from the other end of a socket, or end the connection there."""
        sock = self.connections[number].sock
        sender = self.senders[number]
        if isinstance(step, int):
            deliver(bytes([65 + number]) * step, sender, sock)
        elif step in BYTES:
            deliver(BYTES[step], sender, sock)
        elif step == "shut":
            sender.shutdown(socket.SHUT_WR)
            wait_for_end(sock)
        elif step == "reset":
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sender.close()
            wait_for_end(sock)

    def _set_options(self, connection: Any, step: Any) -> None:
        """Change how a socket is read, if the step says so."""
        if step in ("can_batch_reads", "must_not_batch"):
            connection.can_batch_reads = step == "can_batch_reads"
        elif step in ("template", "no template"):
            # The owner takes all reads before it changes the template.
            self.report.append(texts(self.receiver.take_reads(connection)))
            connection.template = (BEFORE, AFTER) if step == "template" else None
        elif step == "release":
            self.receiver.stop_deferring(connection)
        elif step in ("hold", "hold two") and connection.is_readable and not connection.ended_at:
            self.receiver.defer(connection, 2 if step == "hold two" else 1 << 40)

    def _take(self, connection: Any, step: Any) -> None:
        """Take the reads of a socket, or those of the first one in the queue."""
        if step == "take":
            self.report.append(texts(self.receiver.take_reads(connection)))
        elif step == "hand over" and self.queue:
            first = self.queue.popleft()
            self.report.append((first.number, texts(self.receiver.take_reads(first))))
            first.is_queued = False

    def _numbered(self, unhandled: Any) -> list[tuple[int, int]]:
        """Return descriptors and events with the numbers of their sockets, in order."""
        numbers = {connection.fd: connection.number for connection in self.connections}
        return sorted((numbers[fd], events) for fd, events in unhandled)

    def _state(self) -> tuple[Any, ...]:
        """Return the reads and flags of each socket, and the counts of the receiver."""
        reads = [texts(connection.reads) for connection in self.connections]
        flags = [
            (
                connection.is_queued,
                connection.is_last_read_full,
                bool(connection.ended_at),
                connection.error,
                connection.is_deferred,
                connection.events_until_urgent,
            )
            for connection in self.connections
        ]
        return reads, flags, self.receiver.ready_count, self.receiver.queued_reads

    def finish(self) -> list[Any]:
        """Return the report of all steps."""
        queue = [connection.number for connection in self.queue]
        self.report.append((self.receiver.poll_count, self.receiver.read_count, queue))
        return self.report

    def close(self) -> None:
        """Close all sockets."""
        for connection, sender in zip(self.connections, self.senders, strict=True):
            self.receiver.remove(connection)
            connection.sock.close()
            sender.close()
        self.timer.close()
        self.deferred.close()
        self.poll.close()


def check_times(connection: Any) -> None:
    """Assert that the times of the reads of a socket are in their order."""
    for read in connection.reads:
        if len(read) == 3:  # a run of plain events
            timestamps = [item if isinstance(item, int) else item[0] for item in read[0]]
            assert sorted(timestamps) == timestamps and timestamps[-1] <= read[2]
            continue
        data, timestamp, read_at, empty_at, from_kernel = read
        assert data
        assert 0 < empty_at <= timestamp <= read_at
        assert isinstance(from_kernel, bool)


def deliver(data: bytes, sender: socket.socket, receiving: socket.socket) -> None:
    """Send data and wait until it has arrived, which takes a while on a busy machine."""
    wanted = bytes_in(receiving, termios.FIONREAD) + sender.send(data)
    while bytes_in(receiving, termios.FIONREAD) < wanted and not bytes_in(sender, SIOCOUTQNSD):
        os.sched_yield()  # what waits in the sender will not arrive: the other end is full


def bytes_in(sock: socket.socket, queue: int) -> int:
    number: int = struct.unpack("i", fcntl.ioctl(sock, queue, bytes(4)))[0]
    return number


def wait_for_end(receiving: socket.socket) -> None:
    poll = select.poll()
    poll.register(receiving, select.POLLRDHUP)
    assert poll.poll(60_000), "an end does not arrive"


def texts(reads: list[Any]) -> list[Any]:
    """Return what was read, without times. A run becomes its events and its number of bytes."""
    return [
        read[0]
        if len(read) == 5
        else (
            [1 if isinstance(item, int) else (item[1], item[2] is not None) for item in read[0]],
            read[1],
        )
        for read in reads
    ]


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Over TCP, where there are stamps of the kernel and resets."""
    with socket.create_server(("127.0.0.1", 0)) as listening_server:
        ours = socket.create_connection(listening_server.getsockname())
        peer_socket, _ = listening_server.accept()
    ours.setblocking(False)
    peer_socket.setblocking(False)
    peer_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ours.setsockopt(socket.SOL_SOCKET, 35, 1)
    return ours, peer_socket


@settings(RELAXED, max_examples=40)
@given(STEPS)
# A run begins and ends while its buffer is queued: by another read, or because it is taken.
@example([(1, 1), (1, "template"), (1, "plain"), (1, 1)])
@example([(1, 1), (1, "template"), (1, "plain"), (1, "take")])
def test_both_receiver_implementations_read_queue_and_end_alike(
    steps: list[tuple[int, Any]],
) -> None:
    pure = script(steps, receiver.SocketBuffer, receiver.Receiver)
    assert script(steps, compiled.SocketBuffer, compiled.Receiver) == pure


CLASSES = [
    (compiled.SocketBuffer, compiled.Receiver),
    (receiver.SocketBuffer, receiver.Receiver),
]


@pytest.mark.parametrize("classes", CLASSES, ids=["compiled", "python"])
def test_reads_of_plain_events_are_stored_as_timestamps_only(classes: tuple[Any, Any]) -> None:
    steps = script(
        [(0, "template"), (0, "can_batch_reads"), *[(0, "plain")] * 600, (0, "take"), (0, "odd")],
        *classes,
    )
    read_timestamps = [step[1][0] for step in steps[:-1] if isinstance(step, tuple)]
    assert read_timestamps[513] == [([1] * 512, 512 * len(PLAIN))], "then its owner is called"
    assert steps[-1] == (604, 601, [0])


@pytest.mark.parametrize("classes", CLASSES, ids=["compiled", "python"])
def test_reads_of_several_plain_events_are_stored_with_their_number_of_events(
    classes: tuple[Any, Any],
) -> None:
    sent = ["plain", "three", "two in one", "mixed", "long"]
    steps = script(
        [(0, "template"), (0, "can_batch_reads"), *[(0, step) for step in sent]], *classes
    )
    counted = [1, (3, True), (2, False), (3, True)]
    size = sum(len(SENT[step]) for step in sent[:4])

    assert steps[-2][1][0] == [(counted, size), PLAIN * 40], (
        "a long read is looked at once, by its owner"
    )


@contextmanager
def receiving(
    classes: tuple[Any, Any], sockets: int
) -> Iterator[tuple[Any, list[Any], list[socket.socket]]]:
    """Return a receiver whose buffers have a template, and the other ends of its sockets."""
    poll, deferred_poll, timer = select.epoll(), select.epoll(), TimerFd()
    socket_receiver = classes[1](poll, deferred_poll, timer, deque())
    buffers, ends = [], []
    learn(PLAIN)
    for _ in range(sockets):
        our_socket, peer_socket = make_pair()
        buffer = type("Connection", (classes[0],), {})(our_socket.fileno(), socket_receiver.now)
        buffer.sock, buffer.is_readable, buffer.can_batch_reads, buffer.template = (
            our_socket,
            True,
            True,
            (BEFORE, AFTER),
        )
        socket_receiver.add(buffer)
        poll.register(our_socket, select.EPOLLIN)
        buffers.append(buffer)
        ends.append(peer_socket)
    yield socket_receiver, buffers, ends
    for closing in (*(buffer.sock for buffer in buffers), *ends, timer, deferred_poll, poll):
        closing.close()


def counted(socket_receiver: Any, buffer: Any) -> int:
    """Plain events that were counted since the last call."""
    return sum(len(read[0]) for read in socket_receiver.take_reads(buffer))


@pytest.mark.parametrize("classes", CLASSES, ids=["compiled", "python"])
def test_a_stream_is_deferred_until_it_may_end(classes: tuple[Any, Any]) -> None:
    with receiving(classes, 1) as (socket_receiver, (buffer,), (peer_socket,)):
        socket_receiver.defer(buffer, 2)
        for is_deferred in (True, False, False):
            peer_socket.send(PLAIN)
            socket_receiver.receive(-1, 0, -1)
            assert buffer.is_deferred is is_deferred

        assert counted(socket_receiver, buffer) == 3

        socket_receiver.defer(buffer, 9)
        socket_receiver.defer(buffer, 0)
        assert not buffer.is_deferred, "its owner knows that it ends"


@pytest.mark.parametrize("classes", CLASSES, ids=["compiled", "python"])
def test_all_data_of_a_deferred_socket_is_read(classes: tuple[Any, Any]) -> None:
    with receiving(classes, 1) as (socket_receiver, (buffer,), (peer_socket,)):
        socket_receiver.defer(buffer, 1 << 40)
        peer_socket.send(PLAIN)
        peer_socket.shutdown(socket.SHUT_WR)  # the end has no edge of its own
        socket_receiver.receive(-1, 0, -1)
        socket_receiver.receive(0, 0, -1)
        assert counted(socket_receiver, buffer) == 1 and buffer.ended_at and not buffer.error
    with receiving(classes, 1) as (socket_receiver, (buffer,), (peer_socket,)):
        socket_receiver.defer(buffer, 1 << 40)
        sent = peer_socket.send(b"x" * (100 << 10))
        while sum(len(read[0]) for read in buffer.reads) < sent:
            socket_receiver.receive(-1, 0, -1)

        assert not buffer.is_deferred, "a read that fills its buffer leaves something"


@pytest.mark.parametrize("classes", CLASSES, ids=["compiled", "python"])
def test_deferring_sockets_under_many_events_preserves_each_timestamp(
    classes: tuple[Any, Any],
) -> None:
    def until(is_deferring: bool, chunk: bytes) -> None:
        for _ in range(
            1_000_000
        ):  # turns, not seconds: a busy machine makes fewer of them in its time
            if socket_receiver.is_deferring is is_deferring:
                return
            for end in ends:
                end.send(chunk)
            socket_receiver.receive(-1, socket_receiver.now + 1, -1)
            for buffer in buffers:
                socket_receiver.take_reads(buffer)
                buffer.is_queued = False
        raise AssertionError(f"is_deferring is not {is_deferring} after a million turns")

    with receiving(classes, 4) as (socket_receiver, buffers, ends):
        for buffer in buffers:
            socket_receiver.defer(buffer, 1 << 40)
        until(True, PLAIN)
        ends[0].send(PLAIN)
        sent_start_ns = time.monotonic_ns()
        socket_receiver.receive(-1, sent_start_ns + 5_000_000, -1)
        ((stamps, _, read_at),) = socket_receiver.take_reads(buffers[0])
        assert stamps[-1] <= sent_start_ns <= read_at, "stamped when it came, read when it was time"
        until(False, PLAIN * 2)  # reads of several events have less sure stamps
        until(True, PLAIN)  # another trial, a second later
        for buffer in buffers:
            socket_receiver.stop_deferring(buffer)
        assert not socket_receiver.is_deferring, "nothing is held"
        socket_receiver.next_poll_at = 0
        socket_receiver.receive(0, 0, FOREVER)
        assert (
            socket_receiver.timer_armed_for == socket_receiver.next_poll_at > socket_receiver.now
        ), "so waits need the timer again"


@pytest.mark.parametrize("classes", CLASSES, ids=["compiled", "python"])
def test_a_poll_does_not_bound_the_arrival_at_a_socket_that_it_does_not_watch(
    classes: tuple[Any, Any],
) -> None:
    with receiving(classes, 2) as (socket_receiver, (late, other), (to_late, to_other)):
        socket_receiver.defer(other, 1 << 40)
        late.is_readable, late.template = False, None  # not read, though it is ready
        sent_start_ns = time.monotonic_ns()
        to_late.send(b"x" * 100)
        for _ in range(3):
            to_other.send(PLAIN)
            while not counted(socket_receiver, other):
                socket_receiver.receive(0, 0, -1)
        late.is_readable = True
        socket_receiver.defer(late, 1 << 40)
        while not late.reads:
            socket_receiver.receive(0, 0, -1)
        ((_, timestamp_ns, _, empty_at, _),) = late.reads

        assert empty_at < sent_start_ns <= timestamp_ns


def test_reads_have_the_timestamps_of_the_kernel() -> None:
    for buffer_class, receiver_class in (
        (compiled.SocketBuffer, compiled.Receiver),
        (receiver.SocketBuffer, receiver.Receiver),
    ):
        poll, deferred_poll, timer, our_socket, peer_socket = (
            select.epoll(),
            select.epoll(),
            TimerFd(),
            *make_pair(),
        )
        socket_receiver = receiver_class(poll, deferred_poll, timer, deque())
        buffer = type("Connection", (buffer_class,), {})(our_socket.fileno(), socket_receiver.now)
        buffer.sock, buffer.is_readable, buffer.can_batch_reads = our_socket, True, True
        socket_receiver.add(buffer)
        poll.register(our_socket, select.EPOLLIN)
        stamps = []
        for _ in range(3):
            peer_socket.send(b"x" * 100)
            socket_receiver.receive(-1, 0, -1)
        stamps = [read[1] for read in socket_receiver.take_reads(buffer)]
        assert len(stamps) == 3 and stamps == sorted(stamps) and not buffer.is_queued
        poll.register(timer, select.EPOLLIN)
        socket_receiver.next_poll_at = 0
        assert socket_receiver.receive(0, 0, FOREVER) == []
        assert socket_receiver.timer_armed_for == socket_receiver.next_poll_at > socket_receiver.now
        assert socket_receiver.receive(-1, FOREVER, FOREVER) == [(timer.fileno(), select.EPOLLIN)]
        assert socket_receiver.now >= socket_receiver.timer_armed_for
        for closing in (our_socket, peer_socket, timer, deferred_poll, poll):
            closing.close()


TEXT = st.one_of(
    st.text(max_size=5).map(str.encode),
    st.binary(max_size=5),
    st.sampled_from([b"", b'"', b"\\", b"\xff"]),
)
EVENT = TEXT.map(lambda text: b"data: " + BEFORE + text + AFTER + b"\n\n")
CHUNK = (
    st.lists(EVENT, min_size=1, max_size=3)
    .map(b"".join)
    .map(lambda data: b"%x\r\n%s\r\n" % (len(data), data))
)
PIECE = st.one_of(
    CHUNK,
    CHUNK,
    CHUNK.map(lambda data: data[:-1]),
    CHUNK.map(lambda data: b"0" + data),
    CHUNK.map(lambda data: data.replace(b"\r\n", b";x\r\n", 1)),
    st.binary(max_size=30),
    st.sampled_from([b"0\r\n\r\n", b"\r\n", b"fffffffff\r\n", b"zz\r\n"]),
)


def learn(data: bytes) -> None:
    """Parse chunks, whose sizes the reference then knows."""
    response = http1.ResponseParser()
    with contextlib.suppress(chunk_size.MalformedResponseError):
        response.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + data)


@settings(RELAXED, max_examples=3 * settings().max_examples)
@given(st.lists(PIECE, max_size=8))
def test_plain_events_of_a_read_equal_those_of_its_chunks(pieces: list[bytes]) -> None:
    for data in [*pieces, b"".join(pieces)]:
        learn(data)
        chunks, events, used_bytes = plain_events.scan_plain_chunks(data, BEFORE, AFTER)
        for _ in range(2):  # the second time its text is known
            counted_events = plain_events.count_plain_events(data, BEFORE, AFTER)
            assert counted_events == (
                (chunks, events) if used_bytes == len(data) else (counted_events[0], 0)
            )


LINE = st.one_of(
    st.sampled_from([b"[DONE]", b"{}", b"", BEFORE, b"a\x00b", b"\xff"]),
    TEXT.map(lambda text: BEFORE + text + AFTER),
)
BLOCK = st.one_of(
    LINE.map(lambda line: b"data: " + line + b"\n\n"),
    LINE.map(lambda line: b"data:" + line + b"\n\n"),
    LINE.map(lambda line: b"data: " + line + b"\r\n\r\n"),
    LINE.map(lambda line: b"data: " + line + b"\ndata: x\n\n"),
    st.sampled_from(
        [b": ping\n\n", b"event: x\ndata: y\n\n", b"\n", b"data: half", b"data: \n\n\n"]
    ),
)
CHUNKED_BODIES = (
    st.lists(BLOCK, min_size=1, max_size=4)
    .map(b"".join)
    .map(lambda data: b"%x\r\n%s\r\n" % (len(data), data))
)


@settings(RELAXED, max_examples=4 * settings().max_examples)
@given(st.lists(st.one_of(CHUNKED_BODIES, CHUNKED_BODIES, PIECE), max_size=6), st.booleans())
def test_complete_chunks_are_parsed_as_http_and_the_event_stream_grammar_define(
    pieces: list[bytes], templated: bool
) -> None:
    check_chunks(compiled, b"".join(pieces), templated=templated)


@settings(RELAXED, max_examples=2 * settings().max_examples)
@given(
    st.lists(st.one_of(LINE, st.integers(1, 9), st.just(sse.NamedEvent(b"a", b"b"))), max_size=8),
    st.integers(0, 9),
)
def test_both_implementations_count_the_same_plain_events(events: list[Any], start: int) -> None:
    counted_events = compiled.count_leading_plain_events(events, start, BEFORE, AFTER)
    assert counted_events == reference.count_leading_plain_events(events, start, BEFORE, AFTER)


def test_compiled_functions_refuse_arguments_of_another_type() -> None:
    for call, arguments in (
        (compiled.count_leading_plain_events, ((b"a",), 0, BEFORE, AFTER)),
        (compiled.count_leading_plain_events, ([], -1, BEFORE, AFTER)),
        (compiled.count_leading_plain_events, ([1 << 80], 0, BEFORE, AFTER)),
        (compiled.parse_whole_chunks, ("text", BEFORE, AFTER)),
        (compiled.parse_whole_chunks, (b"", None, AFTER)),
    ):
        with pytest.raises((TypeError, OverflowError)):
            call(*arguments)


def test_the_compiled_receiver_refuses_values_that_are_no_socket_buffer() -> None:
    poll, deferred_poll = select.epoll(), select.epoll()
    socket_receiver = compiled.Receiver(poll, deferred_poll, poll, deque())

    for call in (
        socket_receiver.add,
        socket_receiver.remove,
        socket_receiver.take_reads,
        socket_receiver.stop_deferring,
        lambda value: socket_receiver.defer(value, 1),
    ):
        with pytest.raises(TypeError):
            call(object())

    buffer = compiled.SocketBuffer(3, 0)
    buffer.reads = None
    with pytest.raises(TypeError):
        socket_receiver.take_reads(buffer)
    with pytest.raises(TypeError):
        compiled.Receiver(object(), deferred_poll, poll, deque())
    with pytest.raises(OSError):
        compiled.Receiver(poll, deferred_poll, poll, deque())  # which is in it already
    with pytest.raises(AttributeError):
        compiled.Receiver(poll, deferred_poll, poll, object())
    buffer = compiled.SocketBuffer(-1, 0)
    with pytest.raises(ValueError):
        socket_receiver.add(buffer)

    deferred_poll.close()
    poll.close()


def test_the_receiver_releases_removed_connections() -> None:
    class Connection(compiled.SocketBuffer):  # type: ignore[misc]
        __slots__ = ("owner",)

    alive = []

    class Owner:
        def __del__(self) -> None:
            alive.append(self)

    poll, deferred_poll, queue = select.epoll(), select.epoll(), deque[Any]()
    socket_receiver = compiled.Receiver(poll, deferred_poll, poll, queue)
    connection = Connection(5, 0)
    connection.owner = Owner()
    connection.owner.receiver = socket_receiver  # a circle through the module in C
    connection.owner = connection.exchange = connection.owner  # and one through the buffer alone
    connection.owner.connection = connection
    socket_receiver.add(connection)
    queue.append(connection)
    del socket_receiver, connection, queue
    gc.collect()
    assert len(alive) == 1
    deferred_poll.close()
    poll.close()


@pytest.mark.processes
@pytest.mark.parametrize(("pure", "runs"), [("1", "python"), ("", "compiled")])
def test_an_environment_variable_selects_the_implementation(pure: str, runs: str) -> None:
    script = (
        "from loadgen_sdk import compiled\n"
        "from loadgen_sdk.transport.connection import ClientConnection\n"
        "print(compiled.RUNS, ClientConnection.__mro__[1].__module__)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "LOADGEN_PURE": pure},
        capture_output=True,
        text=True,
        check=True,
    )
    name, module = process.stdout.split()

    assert name == runs
    assert (module == "loadgen_sdk._compiled") is (runs == "compiled")
