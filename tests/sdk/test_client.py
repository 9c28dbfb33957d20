"""Tests of the client over real sockets: injected failures, the pool, TLS and timeouts."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import ssl
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple, cast

import msgspec
import pytest
import trustme
import uvloop
from expected_errors import refused
from loadgen_sdk.app.client import Client, Event
from loadgen_sdk.errors import RequestFailed, TargetUnusable
from loadgen_sdk.request import Completion, Failure, Request
from loadgen_sdk.transport.connection import ClientConnection, Route
from loadgen_sdk.transport.exchange import Exchange
from loadgen_sdk.transport.host_resources import Address
from loadgen_sdk.transport.pool import CONNECT_NS, AddressList, Pool
from loadgen_sdk.transport.reactor import FOREVER, Reactor
from loadgen_sdk.transport.receiver import MAX_WRITE_BYTES, Receiver
from loadgen_sdk.transport.response_state import PlainRun, Read
from loadgen_sdk.transport.target import Target
from loadgen_sdk.transport.tls import Tls, TlsStream
from loadgen_sdk.wire_formats.event_timeline import EventTimeline
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES
from servers import start

from loadgen.sim.server.embedded import EmbeddedServer
from loadgen.sim.server.fault_injection import FAILURE_EFFECTS
from loadgen.sim.server.options import Options

FAST = {"ttft": "2ms", "itl": "0.2ms"}
TOKENS = 6
DAY_NS = 86_400 * 10**9


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EmbeddedServer]:
    with start(Options(**FAST, log_bodies=True)) as server:
        yield server


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work, 120))


def request(tokens: int = TOKENS, text: str = " tell me more") -> Request:
    return Request(id="r", messages=[{"role": "user", "content": text}], max_tokens=tokens)


def client_of(
    url: str, *, fault: str = "", api: Any = "chat", server: str = "trtllm", **options: Any
) -> Client:
    headers = (("X-Sim-Fault", fault),) if fault else ()
    options = {
        "model": "sim",
        "keep_text": True,
        "headers": headers,
        "server_profile": SERVER_PROFILES[server],
    } | options
    return Client(Target.parse(url, api=api), **options)


def ask(url: str, count: int = 1, **options: Any) -> list[Completion]:
    """Send requests one after the other with one client, and return the completions."""

    async def work() -> list[Completion]:
        async with client_of(url, **options) as client:
            return [await client.complete(request()) for _ in range(count)]

    return run(work())


async def until(true: Callable[[], bool]) -> None:
    """Let the loop turn until this holds."""
    while not true():
        await asyncio.sleep(0)


def send(
    client: Client, body: bytes | memoryview | None = None
) -> tuple[Exchange, asyncio.Future[Completion]]:
    future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    sent = client._pool.prepare(request()) if body is None else body
    return client._pool.send(None, sent, monotonic_ns(), future.set_result, EventTimeline()), future


# -- faults ----------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    kind: str = ""
    error_text: str = ""
    status: int = 200
    events: int | None = TOKENS  # None: what a reset leaves depends on who was quicker
    output: int | None = TOKENS


OUTCOMES: dict[str, Outcome] = {
    "": Outcome(),
    "http_429": Outcome("http_429", "simulated 429", 429, 0, None),
    "http_500": Outcome("http_5xx", "simulated 500", 500, 0, None),
    "http_503": Outcome("http_5xx", "simulated 503", 503, 0, None),
    "slow_first_byte@5ms": Outcome(),
    "empty": Outcome("empty", "the response has no event", 200, 0, None),
    "reset_before": Outcome("reset", "Connection reset by peer", 200, 0, None),
    "idle_reset": Outcome(),
    "reset_after@2": Outcome("reset", "Connection reset by peer", 200, None, None),
    "truncate@2": Outcome("truncated", "after 3 output events", 200, 3, None),
    "stall@2": Outcome("timeout_stall", "no event for 86400 s", 200, 3, None),
    "malformed@2": Outcome("malformed", "not JSON", 200, 5),
    "error_event@2": Outcome("error_event", "simulated error", 200, 3, None),
    "engine_error@2": Outcome("truncated", "after 3 output events", 200, 3, None),
    "oversized@2": Outcome(),
    "split": Outcome(),
    "wrong_count": Outcome(output=TOKENS + 7),
    "corrupt": Outcome(),
    "clamp@2": Outcome(events=2, output=2),
    "one_event": Outcome(events=1),
    "no_text": Outcome(events=0),
    "no_finish": Outcome("no_finish_reason", "no finish reason"),
    "no_done": Outcome(),
    "close_delimited": Outcome(),
    "connection_close": Outcome(),
}
CUT_SHORT = ("clamp@2", "one_event", "no_text")
COMPLETIONS = OUTCOMES | {"engine_error@2": Outcome("error_event", "", 200, 3, None)}
# A response that is not a stream has one event, and only some failures of streams.
FULL_OUTCOMES = {
    name: outcome._replace(events=outcome.events and (0 if outcome.kind else 1))
    for name, outcome in OUTCOMES.items()
    if name != "stall@2"
} | {
    "truncate@2": Outcome("truncated", "after 0 output events", 200, 0, None),
    "reset_after@2": Outcome("reset", "Connection reset by peer", 200, 0, None),
    "malformed@2": Outcome("malformed", "not JSON", 200, 0, None),
    "error_event@2": Outcome("http_5xx", "", 500, 0, None),
    "engine_error@2": Outcome("http_5xx", "", 500, 0, None),
    "no_finish": Outcome("no_finish_reason", "", 200, 1),
    "no_text": Outcome(events=1),
}


def test_every_injected_failure_has_an_expected_outcome() -> None:
    assert {name.partition("@")[0] for name in OUTCOMES} == {"", *FAILURE_EFFECTS}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "table"), [("chat", OUTCOMES), ("completions", COMPLETIONS), ("whole", FULL_OUTCOMES)]
)
def test_each_injected_failure_has_its_failure_kind(
    endpoint: EmbeddedServer, how: str, table: dict[str, Outcome]
) -> None:
    async def work() -> dict[str, Completion]:
        completions = {}
        for fault in table:
            api = "chat" if how == "whole" else how
            options = {
                "api": api,
                "stream": how != "whole",
                "stall_timeout_ns": DAY_NS,
                "timeout_ns": 9 * DAY_NS,
            }
            async with client_of(endpoint.url, fault=fault, **options) as client:
                exchange, future = send(client)
                if fault.startswith("stall"):
                    await until(
                        partial(lambda reading: reading.output_events == 3, exchange.reader)
                    )
                    client._pool.tick(exchange.last_event_read_at + DAY_NS)
                completions[fault] = await future
                assert client.in_flight == 0
        return completions

    completions = run(work())
    plain = completions[""]
    assert plain.text and plain.finish_reason == "length"
    for fault, expected in table.items():
        completion = completions[fault]
        failure = completion.failure or Failure("", "")
        assert (failure.kind, completion.http_status) == (expected.kind, expected.status), (
            fault,
            failure,
        )
        assert expected.error_text in failure.text, (fault, failure)
        if expected.events is not None:
            assert completion.output_events == expected.events, fault
        assert completion.usage.output == expected.output, fault
        if not expected.kind and fault != "oversized@2":
            assert (
                plain.text.startswith(completion.text or "")
                if fault in CUT_SHORT
                else completion.text == plain.text
            ), fault
        assert completion.done >= completion.sent >= completion.ready >= completion.due
        stamps = [
            completion.sent,
            completion.first_byte,
            completion.first_event,
            completion.first_token,
            completion.last_token,
            completion.end,
            completion.done,
        ]
        known = [timestamp for timestamp in stamps if timestamp >= 0]
        assert known == sorted(known), fault
    assert how == "whole" or len(completions["oversized@2"].text or "") > 1 << 20


@pytest.mark.processes
def test_a_successful_stream_is_measured(endpoint: EmbeddedServer) -> None:
    completion = ask(endpoint.url, 2)[1]

    assert completion.failure is None
    assert (
        completion.output_events,
        completion.usage.output,
        completion.usage.cached,
        completion.reused,
    ) == (
        TOKENS,
        TOKENS,
        0,
        True,
    )
    assert completion.kernel_stamp is sys.platform.startswith("linux")
    assert min(completion.client_lag, completion.stamp_error) >= 0
    assert completion.bytes_sent > 100
    assert completion.bytes_received > 1000


# -- the pool --------------------------------------------------------------------------------------

RESET, SILENCE, END = b"<reset>", b"<silence>", b"<end>"
GOOD = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def encode_response(more: bytes = b"", body: bytes = GOOD) -> bytes:
    return HEAD + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Scripted:
    """A server that sends given responses in order, and counts connections and requests."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers
        self.connections = 0
        self.bodies: list[bytes] = []
        self.url = ""
        self.open: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.partition(b"content-length:")[2].split()[0])
                self.bodies.append(await reader.readexactly(size))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if answer == RESET:
                    writer.transport.abort()
                    return
                if answer == END:
                    return
                if answer != SILENCE:
                    writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            self.open.discard(writer)
            writer.close()


@asynccontextmanager
async def scripted(
    *answers: bytes, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> Any:
    server = Scripted(list(answers))
    tasks: list[asyncio.Task[None]] = []
    listening_server = await asyncio.start_server(
        lambda *ends: tasks.append(asyncio.ensure_future(server.serve(*ends))), host, 0, ssl=tls
    )
    port = listening_server.sockets[0].getsockname()[1]
    server.url = f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        yield server
    finally:
        listening_server.close()
        for writer in list(server.open):
            writer.transport.abort()
        await asyncio.gather(*tasks)


def talk(answers: list[bytes], count: int, **options: Any) -> tuple[list[Completion], int]:
    """Send requests one after the other. Return the completions and the number of connections."""

    async def work() -> tuple[list[Completion], int]:
        async with scripted(*answers) as server, client_of(server.url, **options) as client:
            return [await client.complete(request()) for _ in range(count)], server.connections

    return run(work())


@pytest.mark.parametrize(
    ("more", "connections"),
    [
        (b"", 1),
        (b"Connection: keep-alive\r\n", 1),
        (b"Connection: close\r\n", 4),
        (b"Keep-Alive: timeout=5, max=100\r\n", 1),
        (b"Keep-Alive: max=1\r\n", 4),
        (b"Keep-Alive: max=0\r\n", 4),
    ],
)
def test_a_connection_is_reused_as_often_as_the_server_allows(
    more: bytes, connections: int
) -> None:
    completions, connection_count = talk([encode_response(more)], 4)
    assert [completion.failure for completion in completions] == [None] * 4
    assert connection_count == connections
    assert [completion.reused for completion in completions] == [False] + [connections == 1] * 3


def test_a_body_may_end_with_its_connection() -> None:
    answer = HEAD + b"\r\n" + GOOD

    async def work() -> Completion:
        async with scripted(answer) as server, client_of(server.url) as client:
            exchange, future = send(client)
            await until(lambda: exchange.bytes_received == len(answer))
            assert not future.done()
            (writer,) = server.open
            writer.close()
            return await future

    done = run(work())
    assert (done.failure, done.text) == (None, "a")


def test_bytes_after_the_end_close_the_connection_and_keep_the_response() -> None:
    completions, connection_count = talk(
        [encode_response() + b"HTTP/1.1 200 OK\r\n\r\n", encode_response()], 2
    )
    assert [completion.failure for completion in completions] == [None, None]
    assert connection_count == 2


@pytest.mark.parametrize("how", [RESET, END])
def test_a_request_on_a_silently_closed_connection_is_sent_once_more(how: bytes) -> None:
    completions, connection_count = talk(
        [encode_response(), how, encode_response(), encode_response()], 3
    )
    assert [completion.failure for completion in completions] == [None] * 3
    assert [completion.resent for completion in completions] == [0, 1, 0]
    assert connection_count == 2
    assert (
        completions[1].due
        <= completions[1].ready
        <= completions[1].sent
        < completions[1].first_byte
    )
    assert completions[1].bytes_sent == 2 * completions[0].bytes_sent
    assert not completions[1].reused  # it was answered on a fresh connection


def test_a_request_is_resent_once_on_a_reused_connection_without_a_response_byte() -> None:
    (first_completion,), connection_count = talk([RESET], 1)
    assert (
        first_completion.failure and first_completion.failure.kind,
        first_completion.resent,
        connection_count,
    ) == ("reset", 0, 1)
    completions, connection_count = talk([encode_response(), RESET, RESET, encode_response()], 3)
    assert [completion.failure and completion.failure.kind for completion in completions] == [
        None,
        "reset",
        None,
    ]
    assert [completion.resent for completion in completions] == [0, 1, 0]

    async def work() -> Completion:
        async with (
            scripted(encode_response(), b"HTTP/1.1 2") as server,
            client_of(server.url) as client,
        ):
            await client.complete(request())
            exchange, future = send(client)
            await until(lambda: exchange.bytes_received == 10)
            (writer,) = server.open
            writer.transport.abort()
            return await future

    cut = run(work())
    assert (cut.failure.kind, cut.resent) == ("truncated", 0)  # within the head


@pytest.mark.processes
def test_a_request_whose_idle_connection_was_reset_is_resent_and_succeeds(
    endpoint: EmbeddedServer,
) -> None:
    completions = ask(endpoint.url, 6, fault="idle_reset")
    assert [completion.failure for completion in completions] == [None] * 6
    assert sum(completion.resent for completion in completions) == 5


@pytest.mark.parametrize(
    "last_words", [b"", b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"]
)
@pytest.mark.parametrize("answered_before", [False, True])
def test_a_request_is_resent_if_its_idle_connection_closes_as_it_is_sent(
    last_words: bytes, answered_before: bool
) -> None:
    """The end of the connection, or a 408, waits in the socket when the request is sent."""

    async def work() -> tuple[list[Completion], int]:
        loop, done = asyncio.get_running_loop(), []
        with socket.create_server(("127.0.0.1", 0)) as listening_server:
            listening_server.setblocking(False)

            async def answered(client: Client) -> Completion:
                _, future = send(client)
                await loop.sock_recv(peer, 1 << 16)
                await loop.sock_sendall(peer, encode_response())
                return await future

            async with client_of(f"http://127.0.0.1:{listening_server.getsockname()[1]}") as client:
                await client.open(1)
                peer, _ = await loop.sock_accept(listening_server)
                if answered_before:
                    done.append(await answered(client))
                peer.sendall(last_words)
                peer.close()
                _, future = send(client)  # before the loop has had a look at the socket
                peer, _ = await loop.sock_accept(listening_server)
                await loop.sock_recv(peer, 1 << 16)
                await loop.sock_sendall(peer, encode_response())
                done.append(await future)
                peer.close()
                return done, client._pool.connections_opened

    done, opened = run(work())
    assert [completion.failure for completion in done] == [None] * len(done)
    assert [completion.resent for completion in done] == [0, 1][-len(done) :]
    assert opened == 2
    assert not done[-1].reused


def test_a_connection_that_the_server_closed_while_idle_is_not_used() -> None:
    async def work() -> tuple[list[Completion], int]:
        async with scripted(encode_response()) as server, client_of(server.url) as client:
            first_completion = await client.complete(request())
            (writer,) = server.open
            writer.close()
            await until(lambda: all(line.is_closed for line in client._pool._idle))
            return [first_completion, await client.complete(request())], server.connections

    done, connection_count = run(work())
    assert [(completion.failure, completion.resent, completion.reused) for completion in done] == [
        (None, 0, False)
    ] * 2
    assert connection_count == 2


def test_idle_connections_are_dropped_before_the_server_would() -> None:
    async def work() -> tuple[int, int]:
        async with (
            scripted(encode_response(), encode_response(b"Keep-Alive: timeout=3\r\n")) as server,
            client_of(server.url) as client,
        ):
            await client.complete(request())
            now = monotonic_ns()
            client._pool.tick(now + 3_900_000_000)  # servers close after 5 s
            idle_count = len(client._pool._idle)
            client._pool.tick(now + 4_600_000_000)
            assert not [
                line for line in client._pool._idle if not line.is_closed and line.responses_served
            ]
            await client.complete(request())
            client._pool.tick(monotonic_ns() + 2_100_000_000)  # this one said 3 s
            assert not [
                line for line in client._pool._idle if not line.is_closed and line.responses_served
            ]
            return idle_count, server.connections

    idle_count, connection_count = run(work())
    assert idle_count >= 1
    assert connection_count >= 2


@pytest.mark.processes
def test_connections_are_opened_before_they_are_needed(endpoint: EmbeddedServer) -> None:
    async def work() -> None:
        async with client_of(endpoint.url) as client:
            await client.open(200)
            assert (client._pool.connections_opened, client.in_flight) == (200, 0)
            completions = await asyncio.gather(*(client.complete(request()) for _ in range(200)))
            assert [completion.failure for completion in completions] == [None] * 200
            assert client._pool.connections_opened == 200
            assert all(
                completion.ready - completion.due < completion.first_byte - completion.due
                for completion in completions
            )

    run(work())


@pytest.mark.processes
def test_a_load_generator_polls_quiet_sockets_often(endpoint: EmbeddedServer) -> None:
    """Without traffic there is no poll between two ticks. A busy machine gets fifty tries."""

    async def work(hold_ns: int, ticks: int) -> int:
        async with client_of(endpoint.url) as client:
            await client.open(1)
            polls: list[int] = []
            client._pool.reactor.on_tick = lambda _now: polls.append(
                client._pool.reactor._receiver.poll_count
            )
            client._pool.reactor.turn_ns = hold_ns
            client._pool.reactor.open_exchanges.add(None)  # somebody without a first token
            client._pool.reactor.wake_at(FOREVER)

            def most() -> int:
                return max((after - before for before, after in pairwise(polls)), default=0)

            await until(lambda: len(polls) > ticks or most() > 20)
            return most()

    assert run(work(1_000_000, 50)) > 20
    assert run(work(0, 2)) < 5  # an application's client sleeps instead


@pytest.mark.processes
def test_a_backlog_of_reads_does_not_block_the_event_loop(endpoint: EmbeddedServer) -> None:
    """A callback of the loop waits for a pass or two, however many reads wait for decoding."""

    async def work() -> int:
        async with client_of(endpoint.url) as client:
            client._pool.reactor.delivery_slice_ns = (
                0  # the backlog grows as on a machine that is too slow
            )
            await client.open(100)
            load = asyncio.gather(*(client.complete(request(40)) for _ in range(100)))
            most = 0
            while not load.done():
                before = client._pool.reactor.turn_count
                await asyncio.sleep(0)
                most = max(most, client._pool.reactor.turn_count - before)
            assert not any(completion.failure for completion in await load)
            return most

    assert run(work()) <= 3


class TwoAddresses(asyncio.SelectorEventLoop):
    """A resolver that knows two addresses of every host, of which the first refuses."""

    live = dead = 0

    async def getaddrinfo(self, *_: Any, **__: Any) -> Any:
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, ("127.0.0.1", self.dead)), (*kind, ("127.0.0.1", self.live))]


@pytest.mark.processes
@pytest.mark.parametrize("connections", [0, 1, 150])
def test_the_next_address_is_tried_when_one_refuses(
    endpoint: EmbeddedServer, connections: int
) -> None:
    async def work() -> None:
        async with client_of("http://two.test") as client:
            await client.open(connections)
            for _ in range(2):
                completion = await client.complete(request())
                assert completion.failure is None

    with asyncio.Runner(loop_factory=TwoAddresses) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, TwoAddresses)
        loop.live, loop.dead = int(endpoint.url.rpartition(":")[2]), closed_port()
        runner.run(asyncio.wait_for(work(), 120))


@pytest.mark.processes
def test_the_client_works_on_the_standard_event_loop(endpoint: EmbeddedServer) -> None:
    async def work() -> Completion:
        async with client_of(endpoint.url) as client:
            return await client.complete(request())

    assert asyncio.run(work()).failure is None


# -- no connection ---------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_a_closed_port_is_a_connection_failure() -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    (completion,) = ask(url)
    assert completion.failure is not None
    assert (completion.failure.kind, completion.failure.text) == (
        "connect",
        os.strerror(errno.ECONNREFUSED),
    )
    assert (completion.sent, completion.first_byte, completion.bytes_sent) == (-1, -1, 0)

    async def work() -> None:
        async with client_of(url) as client:
            await client.open(3)

    with refused(TargetUnusable, "connect"):
        run(work())


def test_an_unknown_host_is_a_name_resolution_failure() -> None:
    with refused(TargetUnusable, "dns"):
        ask("http://no-such-host.invalid:8000")


def test_the_client_connects_over_ipv6() -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")

    async def work() -> Completion:
        async with (
            scripted(encode_response(), host="::1") as server,
            client_of(server.url) as client,
        ):
            return await client.complete(request())

    assert run(work()).failure is None


# -- much and large --------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_prompt_larger_than_the_socket_buffer_is_sent() -> None:
    async def work() -> tuple[list[Completion], list[bytes], list[bytes]]:
        text = " word" * 400_000
        async with scripted(encode_response()) as server, client_of(server.url) as client:
            prepared = [client._pool.prepare(request(text=text + str(i))) for i in range(8)]
            completions = await asyncio.gather(*(send(client, body)[1] for body in prepared))
            completions += [await send(client, prepared[0])[1]]
            return completions, prepared, server.bodies

    done, prepared, bodies = run(work())
    assert [completion.failure for completion in done] == [None] * 9
    assert sorted(bodies) == sorted([*prepared, prepared[0]])
    assert all(completion.bytes_sent > 2_000_000 for completion in done)


def test_a_large_body_is_written_in_pieces_so_that_other_requests_are_not_delayed() -> None:
    body_bytes = 8 * MAX_WRITE_BYTES

    async def work() -> tuple[int, Completion]:
        async with scripted(encode_response()) as server, client_of(server.url) as client:
            await send(client)[1]
            exchange, completion = send(client, b"x" * body_bytes)
            assert isinstance(exchange.connection, ClientConnection)
            unsent_bytes = sum(map(len, exchange.connection.unsent))
            return len(exchange.head) + body_bytes - unsent_bytes, await completion

    written_at_once, completion = run(work())
    assert 0 < written_at_once <= MAX_WRITE_BYTES
    assert completion.failure is None
    assert completion.bytes_sent > body_bytes


def test_a_body_that_is_a_view_of_other_memory_is_sent_completely() -> None:
    async def work() -> tuple[list[bytes], Completion]:
        async with scripted(encode_response()) as server, client_of(server.url) as client:
            body = client._pool.prepare(request(text=" word" * 200_000))
            completion = await send(client, memoryview(body))[1]
            completion = await send(client, memoryview(body))[1]
            return [*server.bodies, body], completion

    bodies, completion = run(work())
    assert bodies == [bodies[-1]] * 3
    assert completion.failure is None


def test_a_response_that_arrives_before_its_request_was_sent_is_read() -> None:
    async def work() -> Completion:
        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(
                b'HTTP/1.1 413 Too Large\r\nContent-Length: 19\r\n\r\n{"error":"too long"}'[:-1]
                + b"}"
            )
            await reader.read(1)
            writer.close()

        server = await asyncio.start_server(refuse, "127.0.0.1", 0, limit=1 << 12)
        async with (
            server,
            client_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client,
        ):
            return await send(client, b"x" * 20_000_000)[1]

    done = run(work())
    assert done.failure is not None
    assert (done.failure.kind, done.http_status) == ("http_4xx", 413)


@pytest.mark.processes
def test_many_simultaneous_requests_leave_no_open_descriptor(endpoint: EmbeddedServer) -> None:
    faults = [
        "",
        "reset_after@1",
        "truncate@1",
        "http_503",
        "connection_close",
        "idle_reset",
        "malformed",
        "split",
    ]

    async def work() -> list[Completion]:
        clients = [client_of(endpoint.url, fault=fault) for fault in faults]
        for client in clients:
            await client.open(4)
        completions = await asyncio.gather(
            *(clients[i % 8].complete(request()) for i in range(400))
        )
        for client in clients:
            assert client.in_flight == 0
            client.close()
            client.close()
        return completions

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ResourceWarning
        )  # sockets that other tests have left to the collector
        gc.collect()
    gc.freeze()  # what was there before is not looked through again
    run(work())  # whatever is opened once and kept
    before = descriptors()
    done = run(work())
    assert descriptors() <= before
    kinds = [completion.failure.kind if completion.failure else "" for completion in done]
    assert [kinds[i::8] for i in range(8)] == [
        [kind] * 50 for kind in ("", "reset", "truncated", "http_5xx", "", "", "malformed", "")
    ]


# -- time ------------------------------------------------------------------------------------------


def test_the_stall_timeout_restarts_with_events_and_not_with_pings() -> None:
    head = HEAD + b"\r\n"
    pings = b": ping - now\n\n" * 3

    async def work() -> Completion:
        stall = DAY_NS
        async with (
            scripted(head + GOOD.replace(b'"stop"', b"null")) as server,
            client_of(server.url, stall_timeout_ns=stall, timeout_ns=9 * DAY_NS) as client,
        ):
            exchange, future = send(client)
            await until(lambda: exchange.reader.output_events == 1)
            fed = exchange.last_event_read_at
            (writer,) = server.open
            received = exchange.bytes_received
            writer.write(pings)
            await until(lambda: exchange.bytes_received == received + len(pings))
            client._pool.tick(fed + stall - 1)
            assert not future.done()
            client._pool.tick(fed + stall)
            return await future

    done = run(work())
    assert (done.failure.kind, done.failure.text) == ("timeout_stall", "no event for 86400 s")
    assert (done.text, done.output_events) == ("a", 1)


def test_the_total_timeout_counts_from_the_due_time() -> None:
    async def work() -> Completion:
        limit = DAY_NS
        async with scripted(SILENCE) as server, client_of(server.url, timeout_ns=limit) as client:
            _, early = send(client)
            exchange, future = send(client)
            await until(lambda: len(server.bodies) == 2)
            client._pool.tick(exchange.due_at + limit - 1)
            assert early.done() or exchange.due_at == early.result().due
            assert not future.done()
            client._pool.tick(exchange.due_at + limit)
            assert client.in_flight == 0
            return await future

    done = run(work())
    assert done.failure.kind == "timeout_total"
    assert "86400 s" in done.failure.text
    assert (done.first_byte, done.http_status) == (-1, 0)


def test_total_and_stall_timeouts_end_a_request_without_further_events() -> None:
    (completion,), _ = talk([SILENCE], 1, timeout_ns=10_000_000)
    assert completion.failure is not None
    assert completion.failure.kind == "timeout_total"
    (completion,), _ = talk([HEAD + b"\r\n" + GOOD], 1, stall_timeout_ns=10_000_000)
    assert completion.failure is not None
    assert completion.failure.kind == "timeout_stall"


def test_a_cancelled_request_is_reported_once_and_its_connection_closed() -> None:
    async def work() -> None:
        async with scripted(SILENCE, encode_response()) as server, client_of(server.url) as client:
            exchange, future = send(client)
            await until(lambda: len(server.bodies) == 1)
            for _ in range(2):
                client._pool.cancel(exchange, Failure("interrupted", "enough"))
            assert (await future).failure == Failure("interrupted", "enough")
            assert client.in_flight == 0
            await until(lambda: not server.open)
            assert (await client.complete(request())).failure is None
            client._pool.cancel(exchange, Failure("interrupted", "again"))
            assert server.connections == 2

    run(work())


@pytest.mark.processes
def test_closing_the_event_iterator_cancels_its_request(endpoint: EmbeddedServer) -> None:
    async def work() -> None:
        async with client_of(endpoint.url) as client:
            task = asyncio.ensure_future(client.complete(request(tokens=10_000)))
            await until(lambda: client.in_flight == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert client.in_flight == 0
            events = client.stream(request(tokens=10_000))
            assert isinstance(await anext(events), Event)
            await events.aclose()
            assert client.in_flight == 0

    run(work())


@pytest.mark.processes
def test_a_stream_delivers_its_events_and_raises_one_error_if_it_fails(
    endpoint: EmbeddedServer,
) -> None:
    async def texts(fault: str) -> list[Event]:
        async with client_of(endpoint.url, fault=fault) as client:
            return [event async for event in client.stream(request())]

    events = run(texts(""))
    assert "".join(event.text for event in events) == ask(endpoint.url)[0].text
    assert [event.at_ns for event in events] == sorted(event.at_ns for event in events)

    async def failing() -> int:
        async with client_of(endpoint.url, fault="truncate@2") as client:
            seen = 0
            with pytest.raises(RequestFailed, match=r"^truncated: ") as exc_info:
                async for _ in client.stream(request()):
                    seen += 1
            assert exc_info.value.kind == "truncated"
            return seen

    assert run(failing()) == 3


# -- TLS -------------------------------------------------------------------------------------------


class Papers(NamedTuple):
    ca: str
    server: ssl.SSLContext  # wants a certificate of the client
    client: str
    cert: str
    key: str


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(server)
    issued.configure_cert(server)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    authority.issue_cert("tester@example.com").private_key_and_cert_chain_pem.write_to_path(
        str(folder / "client.pem")
    )
    issued.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    return Papers(
        *(
            str(folder / "ca.pem"),
            server,
            *(str(folder / f"{name}.pem") for name in ("client", "cert", "key")),
        )
    )


@pytest.mark.processes
def test_tls_accepts_a_certificate_of_a_known_authority(papers: Papers) -> None:
    with start(Options(**FAST, cert=papers.cert, key=papers.key)) as endpoint:
        assert endpoint.url.startswith("https://")
        completions = ask(endpoint.url, 3, tls=Tls(ca=papers.ca))

        assert [
            (completion.failure, completion.reused, completion.output_events)
            for completion in completions
        ] == [
            (None, False, TOKENS),
            (None, True, TOKENS),
            (None, True, TOKENS),
        ]
        assert [completion.tcp >= 0 and completion.tls > 0 for completion in completions] == [
            True,
            False,
            False,
        ]
        assert completions[0].tcp + completions[0].tls <= completions[0].ready - completions[0].due
        assert [(completion.tcp, completion.tls) for completion in completions[1:]] == [
            (-1, -1)
        ] * 2

        faults = ("split", "truncate@2", "oversized@2", "reset_after@1", "close_delimited")
        kinds = [
            ask(endpoint.url, tls=Tls(ca=papers.ca), fault=fault)[0].failure for fault in faults
        ]

        assert [kind and kind.kind for kind in kinds] == [None, "truncated", None, "reset", None]
        (bare,) = ask(endpoint.url)
        assert bare.failure is not None
        assert bare.failure.kind == "tls"
        assert bare.failure.text.startswith("certificate verify failed: ")
        (response_completion,) = ask(
            endpoint.url.replace("127.0.0.1", "localhost"), tls=Tls(ca=papers.ca)
        )
        assert response_completion.failure is not None
        assert response_completion.failure.kind == "tls"
        assert ask(endpoint.url, tls=Tls(verify=False))[0].failure is None
        with refused(TargetUnusable, "tls"):
            run(client_opened(endpoint.url))
        (plain,) = ask(endpoint.url.replace("https", "http"))
        assert plain.failure is not None
        assert plain.failure.kind in ("reset", "malformed")


def tls_records(papers: Papers, tls: TlsStream, texts: list[bytes]) -> list[bytes]:
    """Complete the handshake of a client in memory. Return a TLS record for each text."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(papers.cert, papers.key)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(incoming, outgoing, server_side=True)
    while not tls.continue_handshake():
        incoming.write(tls.take_output())
        with suppress(ssl.SSLWantReadError):
            server.do_handshake()
        tls.receive(outgoing.read())
    incoming.write(tls.take_output())
    server.do_handshake()
    tls.receive(outgoing.read())
    assert tls.decrypt().data == b""
    records = []
    for text in texts:
        server.write(text)
        records.append(outgoing.read())
    return records


def test_all_reads_of_a_tls_connection_are_delivered_when_its_end_was_read_with_them(
    papers: Papers,
) -> None:
    received: list[bytes] = []
    lost: list[int] = []

    class Owner:
        def receive_reads(self, _: object, reads: list[Read]) -> None:
            received.extend(read.data for read in reads)

        def connection_lost(self, _: object, timestamp: int, __: str) -> None:
            lost.append(timestamp)

    async def scenario() -> None:
        reactor = Reactor(asyncio.get_running_loop())
        tls = TlsStream(Tls(ca=papers.ca).context(), "127.0.0.1")
        records = tls_records(papers, tls, [b"first", b"second"])
        our_socket, peer_socket = socket.socketpair()
        connection = ClientConnection(our_socket, cast(Any, Owner()), 0, Route("127.0.0.1"))
        reactor._connections[connection.fd] = connection
        connection.state = "open"
        connection.ended_at = 5
        reads: list[Read | PlainRun] = [Read(record, 3, 4, 2, True) for record in records]
        reactor._deliver_encrypted(connection, tls, reads)
        peer_socket.close()
        reactor.shut_down()

    run(scenario())
    assert received == [b"first", b"second"]
    assert lost == [5]


async def client_opened(url: str) -> None:
    async with client_of(url) as client:
        await client.open(2)


def test_tls_sends_a_client_certificate(papers: Papers) -> None:
    async def work(tls: Tls, body: bytes | None = None) -> Completion:
        async with (
            scripted(encode_response(), tls=papers.server) as server,
            client_of(server.url, tls=tls) as client,
        ):
            return await send(client, body)[1]

    assert run(work(Tls(ca=papers.ca, cert=papers.client))).failure is None
    assert run(work(Tls(ca=papers.ca, cert=papers.client), b"x" * 3_000_000)).failure is None


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_without_a_required_client_certificate_is_a_failure(
    papers: Papers, version: ssl.TLSVersion
) -> None:
    """Before TLS 1.3 the handshake fails; since then an alert comes after the client's part."""
    listener = socket.create_server(("127.0.0.1", 0))
    sockets: list[socket.socket] = []

    def refuse() -> None:
        sockets.append(
            papers.server.wrap_socket(
                listener.accept()[0], server_side=True, do_handshake_on_connect=False
            )
        )
        with suppress(ssl.SSLError):
            sockets[0].do_handshake()  # type: ignore[attr-defined]

    server = threading.Thread(target=refuse)
    papers.server.maximum_version = version
    server.start()
    (completion,) = ask(f"https://127.0.0.1:{listener.getsockname()[1]}", tls=Tls(ca=papers.ca))
    server.join()
    listener.close()
    sockets[0].close()
    papers.server.maximum_version = ssl.TLSVersion.MAXIMUM_SUPPORTED
    assert completion.failure is not None
    assert (completion.failure.kind, "ALERT" in completion.failure.text.upper()) == ("tls", True)


@pytest.mark.processes
def test_https_to_a_plain_http_server_is_a_failure(endpoint: EmbeddedServer) -> None:
    (completion,) = ask(endpoint.url.replace("http", "https"))
    assert completion.failure is not None
    assert completion.failure.kind == "tls"


@pytest.mark.parametrize("name", ["ca", "cert"])
def test_invalid_tls_files_are_refused(tmp_path: Path, name: str) -> None:
    for content in (None, b"no certificate"):
        path = tmp_path / "x.pem"
        if content is not None:
            path.write_bytes(content)
        with refused(TargetUnusable, "unreadable_file"):
            Tls(**{name: str(path)}).context()


# -- what is sent ----------------------------------------------------------------------------------


def test_the_server_receives_the_body_and_the_request_id() -> None:
    async def work() -> tuple[bytes, bytes]:
        async with (
            scripted(encode_response()) as server,
            client_of(server.url, extra_body={"seed": 3}) as client,
        ):
            await client.complete(request())
            return server.bodies[0], client._pool.prepare(request())

    got, prepared = run(work())
    assert got == prepared
    assert msgspec.json.decode(got) == {
        "model": "sim",
        "messages": [{"role": "user", "content": " tell me more"}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": 3,
        **({"min_tokens": TOKENS} if b"min_tokens" in got else {}),
    }


def test_an_unresponsive_address_ends_with_a_timeout() -> None:
    """A connection that takes longer than CONNECT_NS makes way for the next address."""

    async def scenario() -> None:
        reactor = Reactor(asyncio.get_running_loop())
        client = Pool(
            Target.parse("http://127.0.0.1:9"),
            model="m",
            server_profile=SERVER_PROFILES["trtllm"],
            reactor=reactor,
        )
        events: list[tuple[str, str]] = []
        client.connection_failed = lambda _line, kind, text: events.append((kind, text))  # type: ignore[method-assign]
        with (
            socket.socket() as listening
        ):  # its queue is full: further connections stay in the making
            listening.bind(("127.0.0.1", 0))
            listening.listen(0)
            where = listening.getsockname()
            client._addresses = AddressList([Address(socket.AF_INET, where)])
            connections = [socket.create_connection(where) for _ in range(1)]
            for _ in range(8):
                client._open_spare_connection()
            making = len(client._connecting)
            client.tick(monotonic_ns() + CONNECT_NS + 1)
            assert making == 8 and not client._connecting
            assert events and all(
                kind == "connect" and "within 10 s" in text for kind, text in events
            )
            for connection in connections:
                connection.close()
        reactor.shut_down()

    uvloop.run(scenario())


@pytest.mark.processes
@pytest.mark.parametrize("size", [10, 4 << 20])
def test_both_implementations_send_requests_and_free_connections_alike(
    endpoint: EmbeddedServer, size: int
) -> None:
    """Also one that the socket does not take at once."""

    async def course(pure: bool) -> list[Any]:
        seen: list[Any] = []
        async with client_of(endpoint.url) as client:
            pool = client._pool
            await pool.open(2)
            if pure:
                pool._try_send_on_idle, pool._try_recycle = (
                    partial(getattr(Receiver, n), None) for n in ("try_send_on_idle", "try_recycle")
                )
            for _ in range(3):
                exchange, future = send(client, pool.prepare(request(text="a" * size)))
                busy: Any = exchange.connection
                seen.append(
                    (
                        busy.responses_served,
                        exchange.is_connection_reused,
                        exchange.bytes_sent,
                        len(pool._idle),
                        len(pool._open_exchanges),
                    )
                )
                completion = await future
                assert completion.due <= completion.ready <= completion.sent < completion.first_byte
                seen.append(
                    (
                        completion.failure,
                        completion.tcp > 0,
                        completion.tls,
                        completion.reused,
                        completion.bytes_sent,
                        completion.output_events,
                    )
                )
                seen.append(
                    (
                        busy.exchange,
                        busy.responses_served,
                        exchange.connection,
                        exchange.body,
                        len(pool._idle),
                        pool.in_flight,
                    )
                )
        return seen

    ours = run(course(pure=False))
    assert ours == run(course(pure=True)) and ours[1][0] is None
