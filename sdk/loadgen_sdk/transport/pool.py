"""A pool of kept-alive connections to one endpoint: it sends requests and returns measured completions.

The load generator calls `Pool.send`, which takes a callback and creates neither a task nor a future. This module only
decides which connection carries which request. HTTP is in `exchange.py` and `wire_formats/`, sockets are in `reactor.py`.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypedDict

from ..errors import TargetUnusable, WrongUse, refuse_unknown
from ..request import Failure, Request
from ..wire_formats.event_timeline import EventTimeline
from ..wire_formats.request_body import BodyEncoder, BodyFormat
from ..wire_formats.server_profiles import ServerProfile
from .exchange import Exchange
from .host_resources import raise_file_limit, resolve_host
from .http1 import build_request_head, merge_headers
from .proxy import Proxy
from .reactor import TICK_NS, ClientConnection, Reactor
from .response_state import OnDone, Read, Run
from .target import Target
from .tls import Tls

if TYPE_CHECKING:
    from typing import Unpack

SPARE = 2  # idle connections kept open ahead of need
OPEN_PER_TICK = 32  # most connections opened ahead of need per tick
CONNECT_NS = 10_000_000_000  # limit for one address; then the next address is tried
BEING_MADE = ("connecting", "tunnel", "handshake")
LOOK_NS = 1_000_000_000  # a round over the requests in flight; one sent during it is looked at in the next
KEEP_ALIVE_MARGIN_S = (
    1.0  # a connection is reused until this long before the server's own idle limit
)
TIMEOUT_NS = 600 * 1_000_000_000
STALL_TIMEOUT_NS = 120 * 1_000_000_000


STALE_NS = 1_000_000  # no server waits less than this for a request before it answers 408
HELD_EVENTS = 4  # an answer with fewer events to come is not held: moving it there and back costs as much as a read
LARGE_READ = 2048  # bytes, of many events: to wait for more of them would save nothing
TIMED_OUT_IDLE = (
    b"HTTP/1.1 408",
    b"HTTP/1.0 408",
)  # how some servers close a connection that was idle for long


_OUT_OF_RESOURCES = frozenset(
    (
        errno.EMFILE,
        errno.ENFILE,
        errno.EADDRNOTAVAIL,
        errno.ENOBUFS,
        errno.ENOMEM,
        errno.ENETDOWN,
        errno.ENETUNREACH,
    )
)
"""Error numbers that say that this host, not the server, is why a connection cannot be opened."""


def _failure_to_connect(error: OSError) -> Failure:
    """Return the failure of a request whose connection could not be opened."""
    kind = "client_resource" if error.errno in _OUT_OF_RESOURCES else "connect"
    return Failure(kind, error.strerror or str(error))


class SendingOptions(TypedDict, total=False):
    """How requests are sent: what a `Pool` and a `Client` have in common.

    headers: added to, or instead of, those of every request. extra_body: fields of every body. sources: local addresses
    to connect from, used in turn; each has its own local ports. wire: shared by several pools.
    """

    stream: bool
    api_key: str | None
    headers: tuple[tuple[str, str], ...]
    extra_body: Mapping[str, Any] | None
    timeout_ns: int
    stall_timeout_ns: int
    tls: Tls | None
    continuous_usage: bool
    ahead: bool
    sources: Sequence[str]
    reactor: Reactor | None


class PoolOptions(SendingOptions, total=False):
    """What a `Pool` takes beside its target, model and server."""

    keep_text: bool
    keep_headers: bool
    proxy: Proxy | None


class Pool:
    """Connections to one endpoint, for one model and one API. Create it in a running event loop; `open` it first.

    `timeout_ns` limits a request from its due instant, `stall_timeout_ns` the time between two events of a stream
    (comments of the stream do not count as events). `ahead`: open connections ahead of need while requests are sent,
    for an open loop; otherwise a connection is opened only for a request that finds no idle one. The host is resolved
    once, in `open`. `sources`: local addresses to connect from, used in turn; each has its own local ports. `proxy`: on
    the way to the endpoint.
    """

    def __init__(
        self,
        target: Target,
        *,
        model: str,
        server_profile: ServerProfile,
        **options: Unpack[PoolOptions],
    ) -> None:
        refuse_unknown(options, PoolOptions, "Pool()")
        self.target, self.model, self.server_profile = target, model, server_profile
        self._streaming = stream = options.get("stream", True)
        extra, continuous = options.get("extra_body"), options.get("continuous_usage", False)
        self.prepare = BodyEncoder(
            BodyFormat(
                server_profile,
                target.api,
                model,
                stream,
                extra_body=extra,
                continuous_usage=continuous,
            )
        ).encode
        """A request's body for this endpoint, as bytes. Build it before the request is due."""
        self._open_ahead = options.get("ahead", False)
        self._sources = tuple(options.get("sources", ()))
        self._timeout_ns = options.get("timeout_ns", TIMEOUT_NS)
        self._stall_ns = options.get("stall_timeout_ns", STALL_TIMEOUT_NS)
        self._keep_text = options.get("keep_text", False)
        self._keep_headers = options.get("keep_headers", False)
        tls, reactor, proxy = options.get("tls"), options.get("reactor"), options.get("proxy")
        self._tls: ssl.SSLContext | None = (tls or Tls()).context() if target.tls else None
        self._owns_wire = reactor is None
        try:
            self.reactor = reactor or Reactor(asyncio.get_running_loop())
        except RuntimeError:
            raise WrongUse(
                "event_loop",
                "a client lives in an event loop, and none is running",
                "make it inside a coroutine, or BlockingClient",
            ) from None
        self._send_on_idle, self._recycle, self._awaited = (
            self.reactor.send_on_idle,
            self.reactor.recycle,
            self.reactor.open_exchanges,
        )
        if self._owns_wire:
            self.reactor.on_tick = self.tick
        accept = "text/event-stream" if stream else "application/json"
        ours = [
            ("Host", target.host_header),
            *target.auth_headers(options.get("api_key")),
            ("Content-Type", "application/json"),
            ("Accept", accept),
            ("User-Agent", "loadgen"),
        ]
        path = target.path
        if proxy is not None and not target.tls:
            path = f"http://{target.host_header}{path}"
            ours += proxy.headers
        self._head = build_request_head(
            "POST", path, merge_headers(ours, options.get("headers", ()))
        )
        self._tunnel = proxy.connect_request(target) if proxy is not None and target.tls else b""
        self._peer = (proxy.host, proxy.port) if proxy is not None else (target.host, target.port)
        self._reuse_ns = int(server_profile.max_idle_s * 1e9)
        self._addresses: list[tuple[int, tuple[object, ...]]] = []
        self._preferred_address = 0  # index of the address to try first: the one that worked last
        self._refusing: set[int] = (
            set()
        )  # addresses that failed since the last successful connection
        self._idle: deque[ClientConnection] = deque()
        self._connecting: deque[ClientConnection] = deque()
        self._spares = 0  # connecting ahead of need
        self._wanted_spares = SPARE
        self._sent_this_tick = 0
        self._busiest_tick = 0
        self._in_flight: dict[
            Exchange, None
        ] = {}  # in the order of sending; what has ended is not kept alive
        self._round: deque[Exchange] = deque()  # those that are still to be looked at: see `tick`
        self._open_done: asyncio.Future[None] | None = None
        self._left_to_open = 0
        self.connections_opened = 0

    @property
    def in_flight(self) -> int:
        """Requests sent and not over."""
        return len(self._in_flight)

    # -- open, close ---------------------------------------------------------------------------------------------

    async def open(self, connections: int = 0) -> None:
        """Resolve the host and open this many connections. Raises TargetUnusable when that is not possible."""
        try:
            self._addresses = await resolve_host(*self._peer)
        except OSError as error:
            raise TargetUnusable(
                "dns", f"cannot resolve {self._peer[0]!r}: {error.strerror}", "check the host name"
            ) from None
        if not connections:
            return
        raise_file_limit(connections + 64)
        self._wanted_spares = connections
        self._refusing.clear()
        self._left_to_open = connections
        self._open_done = asyncio.get_running_loop().create_future()
        for _ in range(min(connections, OPEN_PER_TICK * 4)):
            self._open_spare()
        set_tick = (
            self.reactor.on_tick is None
        )  # a shared wire has no housekeeping before its owner runs
        if set_tick:
            self.reactor.on_tick = self.tick
        try:
            async with asyncio.timeout(30):
                await self._open_done
        except TimeoutError:
            raise TargetUnusable(
                "timeout", f"connecting to {self.target.redacted} took more than 30 s", "is it up?"
            ) from None
        finally:
            if set_tick:
                self.reactor.on_tick = None
            self._open_done = None
            self._wanted_spares = SPARE

    @property
    def is_open(self) -> bool:
        """Whether `open` has resolved the host."""
        return bool(self._addresses)

    def close(self) -> None:
        """Close every connection (of a shared wire only the idle ones). Requests in flight get no `on_done` call."""
        if self._owns_wire:
            self.reactor.shut_down()
            return
        for connection in self._idle:
            self.reactor.close(connection)
        self._idle.clear()

    # -- requests ------------------------------------------------------------------------------------------------

    def send(
        self,
        request: Request | None,
        body: bytes | memoryview,
        due: int,
        on_done: OnDone,
        flow: EventTimeline,
        *,
        name: str = "",
        more: bytes = b"",
        asked_output: int = 0,
        sink: Callable[[str, str, int], None] | None = None,
        on_first: Callable[[int], None] | None = None,
    ) -> Exchange:
        """Send now. `on_done` is called exactly once, with the Completion. `due`: the planned instant (monotonic ns).

        `name` is sent as X-Request-Id, `more` after it (whole header lines). `asked_output`: tokens that the body asks
        for, 0 or less if unknown; the end is expected with them. `sink` is called with (text, reasoning, instant) for
        each output event, `on_first` with the instant of the first one.
        """
        exchange = Exchange(
            request,
            b"%sX-Request-Id: %s\r\n%sContent-Length: %d\r\n\r\n"
            % (
                self._head,
                (name or (request.id if request else "")).encode("latin-1", "replace"),
                more,
                len(body),
            ),
            body,
            due,
            on_done,
            flow,
            stream=self._streaming,
            asked_output=asked_output,
            keep_text=self._keep_text,
            keep_headers=self._keep_headers,
            sink=sink,
            on_first=on_first,
        )
        exchange.deadline = due + self._timeout_ns
        self._in_flight[exchange] = None
        self._sent_this_tick += 1
        left = self._send_on_idle(exchange, self._idle, self._reuse_ns, self._awaited)
        if left:
            self._carried(exchange, left)
        return exchange

    def _carried(self, exchange: Exchange, left: int) -> None:
        """The socket did not take so many bytes; below 0: there was none."""
        if left < 0:
            self._dispatch(exchange)
        elif isinstance(exchange.connection, ClientConnection):
            parts = (exchange.head, exchange.payload)
            self.reactor.send_rest(exchange.connection, parts, sum(map(len, parts)) - left)

    def cancel(self, exchange: Exchange, failure: Failure) -> None:
        """End a request now and close its connection. `on_done` gets the Completion with this failure."""
        connection = exchange.connection
        if isinstance(connection, ClientConnection) and not exchange.is_reported:
            self.reactor.deliver(connection)  # what came before may be its end
        if exchange.is_reported:
            return
        if isinstance(connection, ClientConnection):
            self.reactor.close(connection)
        self._end(exchange, monotonic_ns(), failure)

    # -- connections for requests --------------------------------------------------------------------------------

    def _dispatch(self, exchange: Exchange) -> None:
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.is_closed:
                continue
            now = monotonic_ns()
            if now - connection.idle_since > self._reuse_ns:
                self.reactor.close(connection)
                continue
            exchange.ready = now
            self._write(connection, exchange)
            return
        self._connect(exchange)

    def _connect(self, exchange: Exchange | None) -> None:
        """Open a connection for this request, or ahead of need (None)."""
        while True:
            tries = exchange.tries if exchange is not None else 0
            if tries >= len(self._addresses):
                if exchange is not None:
                    self._end(
                        exchange,
                        monotonic_ns(),
                        Failure("connect", "no address of the host could be connected"),
                    )
                return
            index = (self._preferred_address + tries) % len(self._addresses)
            if exchange is not None:
                exchange.tries += 1
            try:
                source = (
                    self._sources[self.connections_opened % len(self._sources)]
                    if self._sources
                    else ""
                )
                connection = self.reactor.open(
                    self._addresses[index],
                    index,
                    self,
                    self._tls,
                    self.target.host,
                    source,
                    self._tunnel,
                )
            except OSError as error:
                if exchange is None:
                    self._refused(index, "connect", error.strerror or str(error))
                    return
                if exchange.tries >= len(self._addresses):
                    self._end(exchange, monotonic_ns(), _failure_to_connect(error))
                    return
                continue
            self.connections_opened += 1
            self._connecting.append(connection)
            connection.exchange = exchange
            if exchange is None:
                self._spares += 1
            else:
                exchange.connection = connection
            return

    def _open_spare(self) -> None:
        self._connect(None)

    def _write(self, connection: ClientConnection, exchange: Exchange) -> None:
        connection.exchange = exchange
        connection.may_batch, connection.template = False, None
        exchange.connection = connection
        exchange.reused = connection.responses_served > 0
        if not exchange.reused:
            exchange.tcp, exchange.tls = connection.tcp_ns, connection.tls_ns
        self.reactor.open_exchanges.add(exchange)
        exchange.sent = self.reactor.send(connection, (exchange.head, exchange.payload))
        exchange.bytes_sent += len(exchange.head) + len(exchange.payload)

    def _keep_idle(self, connection: ClientConnection) -> None:
        """An answer is over and its connection can be reused."""
        connection.exchange = None
        connection.responses_served += 1
        self.reactor.stop_deferring(connection)
        connection.idle_since = monotonic_ns()
        self._idle.append(connection)

    def _end(self, exchange: Exchange, at: int, failure: Failure) -> None:
        exchange.done = at
        exchange.failure = failure
        self._report(exchange)

    def _report(self, exchange: Exchange) -> None:
        exchange.connection = None
        exchange.payload = b""
        self.reactor.open_exchanges.discard(exchange)
        self._in_flight.pop(exchange, None)
        exchange.report_completion()

    # -- calls from the wire -------------------------------------------------------------------------------------

    def connection_made(self, connection: ClientConnection, at: int) -> None:
        exchange = connection.exchange
        self._preferred_address = connection.address
        self._refusing.clear()
        if isinstance(exchange, Exchange):
            exchange.ready = at
            self._write(connection, exchange)
            return
        self._spares -= 1
        connection.idle_since = at
        self._idle.append(connection)
        if self._open_done is not None:
            self._left_to_open -= 1
            if self._left_to_open <= 0 and not self._open_done.done():
                self._open_done.set_result(None)
            elif self._spares + len(self._idle) < self._wanted_spares:
                self._open_spare()

    def connection_failed(self, connection: ClientConnection, kind: str, text: str) -> None:
        exchange = connection.exchange
        connection.exchange = None
        if isinstance(exchange, Exchange):
            if exchange.tries < len(self._addresses) and kind == "connect":
                self._connect(exchange)
            else:
                self._end(exchange, monotonic_ns(), Failure(kind, text))
        else:
            self._spares -= 1
            self._refused(connection.address, kind, text)

    def _refused(self, address: int, kind: str, text: str) -> None:
        """A connection ahead of need could not be made. While the pool is being opened, try the next address."""
        self._refusing.add(address)
        others = [i for i in range(len(self._addresses)) if i not in self._refusing]
        if others:
            self._preferred_address = others[0]
        if self._open_done is None or self._open_done.done():
            return
        if others and kind == "connect":
            self._open_spare()
        else:
            self._open_done.set_exception(
                TargetUnusable(
                    "tls" if kind == "tls" else "connect",
                    f"cannot connect to {self.target.redacted}: {text}",
                    "is it up?",
                )
            )

    def receive_reads(self, connection: ClientConnection, reads: list[Read | Run]) -> None:
        exchange = connection.exchange
        if not isinstance(exchange, Exchange):  # bytes without a request
            self.reactor.close(connection)
            return
        first = reads[0]
        if (
            exchange.first_byte < 0
            and not exchange.resent
            and connection.idle_since > connection.connecting_since
            and len(first) == 5
            and first[1] < exchange.sent + STALE_NS
            and first[0].startswith(TIMED_OUT_IDLE)
        ):
            self.reactor.close(
                connection
            )  # the server gave up the idle connection before it saw this request
            connection.exchange = None
            self._resend(exchange)
            return
        if exchange.feed_reads(reads):
            self.response_completed(connection)
        elif connection.tls is None:
            connection.may_batch, connection.template = exchange.may_batch, exchange.template
            events_until_urgent = (
                exchange.events_until_urgent if exchange.template is not None else 0
            )
            if connection.is_deferred or (
                events_until_urgent >= HELD_EVENTS and len(reads[-1][0]) < LARGE_READ
            ):
                self.reactor.defer(connection, events_until_urgent)

    def response_completed(self, connection: ClientConnection) -> None:
        if (
            freed := self._recycle(connection, self._idle, self._in_flight, self._awaited)
        ) is not None:
            freed.report_completion()
            return
        exchange = connection.exchange
        assert isinstance(exchange, Exchange)
        response = exchange.response
        if response.complete and response.reusable and not connection.unsent:
            if response.uses_left is not None and response.uses_left <= 1:
                self.reactor.close(connection)
            else:
                if response.idle_limit_s is not None:
                    limit_ns = int(max(0.5, response.idle_limit_s - KEEP_ALIVE_MARGIN_S) * 1e9)
                    self._reuse_ns = min(self._reuse_ns, limit_ns)
                self._keep_idle(connection)
        else:
            self.reactor.close(connection)
        self._report(
            exchange
        )  # after the connection is free: the next request of the lane may use it

    def connection_lost(self, connection: ClientConnection, stamp: int, reset: str) -> None:
        exchange = connection.exchange
        connection.exchange = None
        if not isinstance(exchange, Exchange):
            return
        was_idle = (
            connection.idle_since > connection.connecting_since
        )  # it was not opened for this request
        if was_idle and not exchange.bytes_received and not exchange.resent:
            self._resend(exchange)
            return
        exchange.connection_ended(stamp, reset)
        self._report(exchange)

    def _resend(self, exchange: Exchange) -> None:
        """The server closed an idle connection as the request was on its way: once more, on a new connection, with the
        original due instant.
        """
        exchange.resent += 1
        exchange.reset_response()
        exchange.tries = 0
        self._connect(exchange)

    # -- housekeeping --------------------------------------------------------------------------------------------

    def tick(self, now: int) -> None:
        """Check timeouts, close idle connections, open connections ahead of need. Called about every TICK_NS."""
        overdue = []
        for exchange in self._in_flight:
            if exchange.deadline > now:
                break
            overdue.append(exchange)
        for exchange in overdue:
            timeout_s = self._timeout_ns / 1e9
            self.cancel(
                exchange, Failure("timeout_total", f"not finished {timeout_s:g} s after it was due")
            )
        if not self._round:
            self._round = deque(self._in_flight)
        # A few in each tick: all of them within LOOK_NS, or four times per stall timeout.
        left = len(self._in_flight) * TICK_NS // min(LOOK_NS, self._stall_ns // 4 + 1) + 1
        while self._round and left:
            exchange = self._round.popleft()
            connection = exchange.connection
            if not isinstance(
                connection, ClientConnection
            ):  # it is over, or has just failed to connect
                continue
            left -= 1
            self.reactor.deliver(connection)
            if exchange.is_reported:
                continue
            if exchange.progress and now - exchange.progress >= self._stall_ns:
                self.cancel(
                    exchange, Failure("timeout_stall", f"no event for {self._stall_ns / 1e9:g} s")
                )
        connecting = self._connecting
        while connecting and (
            connecting[0].state not in BEING_MADE
            or now - connecting[0].connecting_since > CONNECT_NS
        ):
            connection = connecting.popleft()
            if connection.state in BEING_MADE:
                self.reactor.give_up(
                    connection, "connect", f"no answer within {CONNECT_NS / 1e9:g} s"
                )
        idle = self._idle
        while idle and (idle[0].is_closed or now - idle[0].idle_since > self._reuse_ns):
            connection = idle.popleft()
            self.reactor.close(connection)
        self._busiest_tick = max(self._sent_this_tick, self._busiest_tick * 7 // 8)
        self._sent_this_tick = 0
        if self._open_ahead and self._open_done is None and self._busiest_tick:
            missing = max(SPARE, self._busiest_tick) - len(idle) - self._spares
            for _ in range(min(missing, OPEN_PER_TICK)):
                self._open_spare()
