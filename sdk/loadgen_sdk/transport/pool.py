"""A pool of kept-alive connections to one endpoint, which sends requests and reports completions.

The load generator calls `Pool.send`, which takes a callback and creates neither a task nor a
future. This module only decides which connection carries which request. HTTP is in `exchange.py`
and `wire_formats/`, sockets are in `reactor.py`.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypedDict

from ..errors import TargetUnusable, WrongUse, refuse_unknown
from ..request import NEVER, Failure, Request
from ..wire_formats.event_timeline import EventTimeline
from ..wire_formats.request_body import BodyEncoder, BodyFormat
from ..wire_formats.server_profiles import ServerProfile
from .connection import ClientConnection, Route
from .exchange import Exchange
from .host_resources import Address, raise_file_limit, resolve_host
from .http1 import ResponseParser, build_request_head, merge_headers
from .proxy import Proxy
from .reactor import TICK_NS, Reactor
from .receiver import NOT_SENT
from .response_state import OnDone, PlainRun, Read, is_plain_run
from .target import Target
from .tls import Tls

if TYPE_CHECKING:
    from typing import Unpack

TIMEOUT_NS = 600 * 1_000_000_000
STALL_TIMEOUT_NS = 120 * 1_000_000_000

CONNECT_NS = 10_000_000_000
"""The time limit for one address. Then the next address is tried."""

OPEN_TIMEOUT_S = 30
"""The time limit of `Pool.open`."""

SPARE_CONNECTIONS = 2
"""The number of idle connections that are kept open ahead of need."""

OPEN_PER_TICK = 32
"""The largest number of connections that one tick opens ahead of need."""

FILES_BESIDE_CONNECTIONS = 64
"""How many open files a process needs for other things than connections."""

STALL_CHECK_PERIOD_NS = 1_000_000_000
"""The time in which each request in flight is checked for a stall once."""

STALL_CHECKS_PER_TIMEOUT = 4
"""How often a request is checked within the stall timeout if that is short."""

NS_PER_S = 1_000_000_000

FIRST_OPENS = 4 * OPEN_PER_TICK
"""How many connections `Pool.open` begins at once. Each one that succeeds begins another."""

KEEP_ALIVE_MARGIN_S = 1.0
"""A connection is reused until this long before the server's own idle limit."""

MIN_REUSE_S = 0.5
"""It is reused for at least this long, however short the server's idle limit is."""

STALE_NS = 1_000_000
"""A 408 within this time of a request answers an idle connection. No server gives up sooner on a
request that it has begun to receive."""

IDLE_TIMEOUT_STARTS = (b"HTTP/1.1 408", b"HTTP/1.0 408")
"""How some servers end a connection that was idle for long."""

MIN_DEFERRED_EVENTS = 4
"""A response with fewer events to come is not deferred, because moving its socket to the other
epoll and back costs as much as a read.
"""

LARGE_READ_BYTES = 2048
"""A read of this size has many events, so that waiting for more would save nothing."""

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


class SendingOptions(TypedDict, total=False):
    """How requests are sent. These options are common to `Pool` and `Client`.

    Attributes:
        stream: Request the response as a stream of events.
        headers: Headers that are added to those of every request or replace them.
        extra_body: Fields that are added to every body.
        timeout_ns: The limit of a request, from its due time.
        stall_timeout_ns: The limit of the time between two events of a stream. Comments of the
            stream do not count as events.
        continuous_usage: Request a usage with each event.
        open_ahead: Open connections ahead of need while requests are sent, for an open loop.
            Otherwise a connection is opened only for a request that finds no idle one.
        sources: Local addresses to connect from, used in turn. Each has its own local ports.
        reactor: A reactor that several pools share, or None for one of their own.
    """

    stream: bool
    api_key: str | None
    headers: tuple[tuple[str, str], ...]
    extra_body: Mapping[str, Any] | None
    timeout_ns: int
    stall_timeout_ns: int
    tls: Tls | None
    continuous_usage: bool
    open_ahead: bool
    sources: Sequence[str]
    reactor: Reactor | None


class PoolOptions(SendingOptions, total=False):
    """The options of a `Pool`."""

    keep_text: bool
    keep_headers: bool
    proxy: Proxy | None


class AddressList:
    """The addresses of a host, and which of them to try first.

    A host name may have several addresses, of which some may be unreachable, such as those of IPv6.
    The address that was connected last is preferred. An index names an address.
    """

    def __init__(self, addresses: Sequence[Address] = ()) -> None:
        self._addresses = list(addresses)
        self._preferred_index = 0
        self._refused: set[int] = set()  # since the last successful connection

    def __len__(self) -> int:
        return len(self._addresses)

    def get(self, index: int) -> Address:
        """Return the address with this index."""
        return self._addresses[index]

    def index_to_try(self, tries: int) -> int:
        """Return the index of the address to try after so many unsuccessful tries of a request.

        They begin with the preferred address and go round the list.
        """
        return (self._preferred_index + tries) % len(self._addresses)

    def note_success(self, index: int) -> None:
        """Prefer the address that has just been connected."""
        self._preferred_index = index
        self._refused.clear()

    def prefer_another_address(self, index: int) -> bool:
        """Note that an address was refused, and prefer one that was not.

        Only refusals since the last successful connection count. If every address was refused, the
        preference stays.

        Returns:
            True if there is an address that was not refused.
        """
        self._refused.add(index)
        for other_index in range(len(self._addresses)):
            if other_index not in self._refused:
                self._preferred_index = other_index
                return True
        return False

    def forget_refusals(self) -> None:
        """Try every address again."""
        self._refused.clear()


class Pool:
    """Connections to one endpoint, for one model and one API.

    Create it in a running event loop, and `open` it first. The host is resolved once, in `open`.

    Attributes:
        prepare: Returns the body of a request for this endpoint, as bytes. Call it before the
            request is due.
        connections_opened: The number of connections so far.
    """

    def __init__(
        self,
        target: Target,
        *,
        model: str,
        server_profile: ServerProfile,
        **options: Unpack[PoolOptions],
    ) -> None:
        """Prepare the head and the encoding of all requests, but open no connection yet.

        Args:
            target: The endpoint.
            model: The model that each request names.
            server_profile: What the kind of server accepts, and how long it keeps idle connections.
            options: See `PoolOptions`.

        Raises:
            WrongUse: An option is unknown, or no event loop is running.
            TargetUnusable: A file of the TLS options or the API key cannot be used.
        """
        refuse_unknown(options, PoolOptions, "Pool()")
        self.target = target
        self.model = model
        self.server_profile = server_profile

        # What is requested, and what is kept of each response
        self._stream = options.get("stream", True)
        self._keep_text = options.get("keep_text", False)
        self._keep_headers = options.get("keep_headers", False)

        # How requests are encoded
        body_format = BodyFormat(
            server_profile,
            target.api,
            model,
            self._stream,
            extra_body=options.get("extra_body"),
            continuous_usage=options.get("continuous_usage", False),
        )

        # An attribute instead of a method, because it is called for each request.
        self.prepare = BodyEncoder(body_format).encode

        # How connections are made, and the head of each request, which depends on the proxy
        self._proxy = options.get("proxy")
        self._route = self._make_route(options.get("tls"))
        self._head = self._build_head(options.get("api_key"), options.get("headers", ()))
        self._sources = tuple(options.get("sources", ()))
        self._opens_spares_ahead = options.get("open_ahead", False)

        # Time limits
        self._timeout_ns = options.get("timeout_ns", TIMEOUT_NS)
        self._stall_timeout_ns = options.get("stall_timeout_ns", STALL_TIMEOUT_NS)
        self._max_idle_ns = int(server_profile.max_idle_s * NS_PER_S)

        self._use_reactor(options.get("reactor"))
        self._init_connection_state()

    def _use_reactor(self, shared_reactor: Reactor | None) -> None:
        """Use a reactor that several pools share, or create one for this pool alone.

        The reactor reads and writes the sockets. The owner of a shared one calls `tick` of each
        pool.

        Raises:
            WrongUse: No event loop is running.
        """
        self._owns_reactor = shared_reactor is None
        self.reactor = shared_reactor or _create_reactor()
        if self._owns_reactor:
            self.reactor.on_tick = self.tick

        # These are used for each request, so they are looked up once.
        self._try_send_on_idle = self.reactor.try_send_on_idle
        self._try_recycle = self.reactor.try_recycle
        self._open_exchanges = self.reactor.open_exchanges

    def _init_connection_state(self) -> None:
        """Start without addresses, connections and requests.

        A *spare* connection, which some fields count, is one that is opened before a request needs
        it.
        """
        # Addresses and connections
        self._addresses = AddressList()  # filled by `open`
        self._idle: deque[ClientConnection] = deque()  # the one that became idle last is at the end
        self._connecting: deque[ClientConnection] = deque()  # the oldest attempt is first
        self._spares_being_opened = 0
        self.connections_opened = 0

        # Requests
        # This dict is used as a set that keeps the order of sending. Its values mean nothing.
        self._in_flight: dict[Exchange, None] = {}
        self._stall_checks: deque[Exchange] = deque()  # still to be checked in this period
        self._requests_this_tick = 0
        self._recent_max_requests_per_tick = 0  # decides how many spares are opened

        # While `open` runs
        self._all_opened: asyncio.Future[None] | None = None  # done when every connection is ready
        self._connections_left_to_open = 0
        self._max_spares_while_opening = SPARE_CONNECTIONS

    def _make_route(self, tls: Tls | None) -> Route:
        """Return how connections reach the server: through TLS, and through a tunnel if need be.

        Only https goes through a tunnel of the proxy. A request by http names the whole URL to the
        proxy instead (see `_build_head`).
        """
        target = self.target
        if not target.tls:
            return Route(target.host)
        context: ssl.SSLContext = (tls or Tls()).context()
        tunnel_request = self._proxy.connect_request(target) if self._proxy is not None else b""
        return Route(target.host, context, tunnel_request)

    def _build_head(self, api_key: str | None, user_headers: tuple[tuple[str, str], ...]) -> bytes:
        """Return the part of the request head that is the same for all requests.

        Args:
            api_key: The API key, or None.
            user_headers: Headers of the user, which replace others of the same name.
        """
        target = self.target
        headers = [
            ("Host", target.host_header),
            *target.auth_headers(api_key),
            ("Content-Type", "application/json"),
            ("Accept", "text/event-stream" if self._stream else "application/json"),
            ("User-Agent", "loadgen"),
        ]

        path = target.path
        if self._proxy is not None and not target.tls:
            path = f"http://{target.host_header}{path}"
            headers += self._proxy.headers

        return build_request_head("POST", path, merge_headers(headers, user_headers))

    @property
    def in_flight(self) -> int:
        """The number of requests that were sent and have not ended."""
        return len(self._in_flight)

    # -- opening and closing -------------------------------------------------------------------

    async def open(self, connections: int = 0) -> None:
        """Resolve the host, or that of the proxy, and open this many connections.

        Raises:
            TargetUnusable: The host cannot be resolved or connected, or this process may not open
                so many files.
        """
        host = self.target.host if self._proxy is None else self._proxy.host
        port = self.target.port if self._proxy is None else self._proxy.port
        try:
            self._addresses = AddressList(await resolve_host(host, port))
        except OSError as error:
            raise TargetUnusable(
                "dns", f"cannot resolve {host!r}: {error.strerror}", "check the host name"
            ) from None

        if connections:
            raise_file_limit(connections + FILES_BESIDE_CONNECTIONS)
            await self._open_connections(connections)

    async def _open_connections(self, connections: int) -> None:
        """Open this many connections and wait until all of them are ready.

        At most FIRST_OPENS of them are begun here, so that the server is not flooded. Each one that
        becomes ready begins another in `connection_made`, which also completes `_all_opened`.

        Raises:
            TargetUnusable: The connections cannot be opened, or not within OPEN_TIMEOUT_S.
        """
        all_opened = asyncio.get_running_loop().create_future()
        self._all_opened = all_opened
        self._connections_left_to_open = connections
        self._max_spares_while_opening = connections
        self._addresses.forget_refusals()

        connections_to_begin = min(connections, FIRST_OPENS)
        for _ in range(connections_to_begin):
            self._open_spare_connection()

        try:
            with self._receiving_ticks():
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    await all_opened
        except TimeoutError:
            raise TargetUnusable(
                "timeout",
                f"connecting to {self.target.redacted} took more than {OPEN_TIMEOUT_S} s",
                "check that the server is running",
            ) from None
        finally:
            # From now on, connections are opened as requests need them.
            self._all_opened = None
            self._max_spares_while_opening = SPARE_CONNECTIONS

    @contextmanager
    def _receiving_ticks(self) -> Iterator[None]:
        """Make sure that this pool gets the ticks of the reactor inside the context.

        The periodic ticks end attempts to connect that take too long. The owner of a shared reactor
        sets `on_tick` only when it begins to send. Until then, this pool receives the ticks itself.
        """
        if self.reactor.on_tick is not None:
            yield
            return

        self.reactor.on_tick = self.tick
        try:
            yield
        finally:
            self.reactor.on_tick = None

    @property
    def is_open(self) -> bool:
        """Whether `open` has resolved the host."""
        return len(self._addresses) > 0

    def close(self) -> None:
        """Close every connection, or only the idle ones if the reactor is shared.

        `on_done` is not called for requests in flight.
        """
        if self._owns_reactor:
            self.reactor.shut_down()
            return
        for connection in self._idle:
            self.reactor.close(connection)
        self._idle.clear()

    # -- requests ------------------------------------------------------------------------------

    def send(  # noqa: PLR0913 - one argument for each property of a request
        self,
        request: Request | None,
        body: bytes | memoryview,
        due: int,
        on_done: OnDone,
        timeline: EventTimeline,
        *,
        name: str = "",
        header_lines: bytes = b"",
        requested_output_tokens: int = 0,
        on_output: Callable[[str, str, int], None] | None = None,
        on_first_output: Callable[[int], None] | None = None,
        keep_text: bool = False,
    ) -> Exchange:
        """Send a request now, on an idle connection or on a new one.

        Args:
            request: The request, for the completion.
            body: Its body, from `prepare`.
            due: The planned start of the request, monotonic in ns. The timeout begins there.
            on_done: A function that is called exactly once, with the completion.
            timeline: The event timeline that gets the time of each output event.
            name: The value of the header X-Request-Id, or "" for the id of the request.
            header_lines: Further header lines, complete with their line ends.
            requested_output_tokens: The number of output tokens that the body requests, or 0 if
                unknown. Shortly before as many have come, the response is read without delay.
            on_output: A function called with (text, reasoning, timestamp) for each output event.
            on_first_output: A function called with the time of the first output event.
            keep_text: Keep the text of this response, even if the pool keeps no texts.

        Returns:
            The request and its response, for `cancel`.
        """
        request_id = name or (request.id if request else "")
        head = b"%sX-Request-Id: %s\r\n%sContent-Length: %d\r\n\r\n" % (
            self._head,
            request_id.encode("latin-1", "replace"),
            header_lines,
            len(body),
        )

        exchange = Exchange(
            request,
            head,
            body,
            due,
            on_done,
            timeline,
            is_stream_requested=self._stream,
            requested_output_tokens=requested_output_tokens,
            keep_text=keep_text or self._keep_text,
            keep_headers=self._keep_headers,
            on_output=on_output,
            on_first_output=on_first_output,
        )
        exchange.deadline = due + self._timeout_ns
        self._in_flight[exchange] = None
        self._requests_this_tick += 1

        # In the usual case, the compiled receiver sends the request by this one call.
        unsent_bytes = self._try_send_on_idle(
            exchange, self._idle, self._max_idle_ns, self._open_exchanges
        )
        if unsent_bytes == NOT_SENT:
            self._dispatch(exchange)
        elif unsent_bytes > 0:
            self._send_rest(exchange, unsent_bytes)

        return exchange

    def _send_rest(self, exchange: Exchange, unsent_bytes: int) -> None:
        """Send the last bytes of a request later, because its socket did not accept them."""
        parts = (exchange.head, exchange.body)
        if isinstance(exchange.connection, ClientConnection):
            sent_bytes = sum(map(len, parts)) - unsent_bytes
            self.reactor.send_rest(exchange.connection, parts, sent_bytes)

    def cancel(self, exchange: Exchange, failure: Failure) -> None:
        """End a request now and close its connection. Its completion has this failure.

        What was read already is processed first. If that ends the response, the request succeeds.
        """
        connection = exchange.connection
        if isinstance(connection, ClientConnection) and not exchange.is_reported:
            self.reactor.deliver(connection)

        if exchange.is_reported:
            return

        if isinstance(connection, ClientConnection):
            self.reactor.close(connection)

        self._fail_request(exchange, failure)

    def _fail_request(self, exchange: Exchange, failure: Failure) -> None:
        """End a request now with a failure."""
        exchange.done_at = monotonic_ns()
        exchange.failure = failure
        self._report_completion(exchange)

    def _report_completion(self, exchange: Exchange) -> None:
        """Call `on_done` of a request that has ended, and forget the request.

        Its body is released, since the caller may keep the exchange for long.
        """
        exchange.connection = None
        exchange.body = b""
        self._open_exchanges.discard(exchange)
        self._in_flight.pop(exchange, None)
        exchange.report_completion()

    # -- connections for requests --------------------------------------------------------------

    def _dispatch(self, exchange: Exchange) -> None:
        """Send a request on an idle connection, or on a new one if there is none.

        The connection that became idle last is used, because the server is least likely to have
        closed it.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.is_closed:
                continue

            now = monotonic_ns()
            if now - connection.idle_since > self._max_idle_ns:
                self.reactor.close(connection)
                continue

            exchange.ready_at = now
            self._send_on_connection(connection, exchange)
            return
        self._connect_for_request(exchange)

    def _connect_for_request(self, exchange: Exchange) -> None:
        """Open a connection for a request, or report its failure if no address can be reached.

        An attempt that fails later leads to `connection_failed`, which tries the next address.
        """
        last_failure = Failure("connect", "no address of the host accepted a connection")
        while exchange.connect_attempts < len(self._addresses):
            index = self._addresses.index_to_try(exchange.connect_attempts)
            exchange.connect_attempts += 1

            try:
                connection = self._start_connecting(index)
            except OSError as error:
                last_failure = _connect_failure(error)
                continue

            connection.exchange = exchange
            exchange.connection = connection
            return

        self._fail_request(exchange, last_failure)

    def _open_spare_connection(self) -> None:
        """Start to open a connection before a request needs it.

        `connection_made` or `connection_failed` is called later. An error at once is handled like a
        later failure.
        """
        if not self.is_open:
            return

        index = self._addresses.index_to_try(tries=0)
        try:
            self._start_connecting(index)
        except OSError as error:
            self._handle_spare_failure(index, "connect", error.strerror or str(error))
            return

        self._spares_being_opened += 1

    def _start_connecting(self, address_index: int) -> ClientConnection:
        """Begin to connect to one of the addresses, from the local addresses in turn.

        Raises:
            OSError: The connection cannot be begun.
        """
        source = ""
        if self._sources:
            source = self._sources[self.connections_opened % len(self._sources)]

        connection = self.reactor.open(
            self,
            self._route,
            self._addresses.get(address_index),
            address_index=address_index,
            source=source,
        )
        self.connections_opened += 1
        self._connecting.append(connection)

        return connection

    def _send_on_connection(self, connection: ClientConnection, exchange: Exchange) -> None:
        """Send a request on a connection, and note the times of connecting and sending.

        The times of connecting belong to the first request of a connection only.
        """
        connection.exchange = exchange
        exchange.connection = connection

        # The receiver passes on each read of the new response until it learns more about it.
        connection.can_batch_reads = False
        connection.template = None

        exchange.is_connection_reused = connection.responses_served > 0
        if not exchange.is_connection_reused:
            exchange.tcp_connect_ns = connection.tcp_connect_ns
            exchange.tls_handshake_ns = connection.tls_handshake_ns

        self._open_exchanges.add(exchange)
        exchange.sent_at = self.reactor.send(connection, (exchange.head, exchange.body))
        exchange.bytes_sent += len(exchange.head) + len(exchange.body)

    # -- calls from the reactor ----------------------------------------------------------------

    def connection_made(self, connection: ClientConnection, at: int) -> None:
        """Use a connection that has just become ready. The reactor calls this.

        Either a request waits for the connection and is sent, or it is a spare connection, which
        was opened before a request needs it and becomes idle.

        Args:
            connection: The connection.
            at: When it became ready, monotonic in ns.
        """
        self._addresses.note_success(connection.address_index)
        waiting_exchange = connection.exchange
        if isinstance(waiting_exchange, Exchange):
            waiting_exchange.ready_at = at
            self._send_on_connection(connection, waiting_exchange)
        else:
            self._add_spare_connection(connection, at)

    def _add_spare_connection(self, connection: ClientConnection, at: int) -> None:
        """Add a connection without a request, which became ready at `at`, to the idle ones.

        While `open` runs, it waits until a number of connections are ready. The last of them ends
        the wait. Each one before it makes room for another to be opened, because only a limited
        number is opened at the same time.
        """
        self._spares_being_opened -= 1
        connection.idle_since = at
        self._idle.append(connection)

        if self._all_opened is None:  # `open` is not running.
            return

        self._connections_left_to_open -= 1
        is_last = self._connections_left_to_open <= 0
        if is_last and not self._all_opened.done():
            self._all_opened.set_result(None)
            return

        spares = self._spares_being_opened + len(self._idle)
        if spares < self._max_spares_while_opening:
            self._open_spare_connection()

    def connection_failed(self, connection: ClientConnection, kind: str, text: str) -> None:
        """Handle a connection that could not be opened. The reactor calls this.

        If a request waits for the connection, the next address of the server is tried, or the
        request fails. After a failure of TLS no other address is tried, because all of them are the
        same server. A spare connection, which no request waits for, is handled by
        `_handle_spare_failure`.

        Args:
            connection: The connection.
            kind: "connect" or "tls".
            text: The text of the error.
        """
        waiting_exchange = connection.exchange
        connection.exchange = None
        if not isinstance(waiting_exchange, Exchange):
            self._spares_being_opened -= 1
            self._handle_spare_failure(connection.address_index, kind, text)
            return

        has_untried_address = waiting_exchange.connect_attempts < len(self._addresses)
        if kind == "connect" and has_untried_address:
            self._connect_for_request(waiting_exchange)
        else:
            self._fail_request(waiting_exchange, Failure(kind, text))

    def _handle_spare_failure(self, address_index: int, kind: str, text: str) -> None:
        """Prefer another address after a spare connection, one without a request, has failed.

        If `open` waits for it, the next address is tried, or `open` raises an error if there is
        none. At any other time the failure is ignored, because a request that needs a connection
        opens one and reports why it cannot.
        """
        has_other_address = self._addresses.prefer_another_address(address_index)
        if self._all_opened is None or self._all_opened.done():
            return

        if has_other_address and kind == "connect":
            self._open_spare_connection()
            return

        self._all_opened.set_exception(
            TargetUnusable(
                "tls" if kind == "tls" else "connect",
                f"cannot connect to {self.target.redacted}: {text}",
                "check that the server is running",
            )
        )

    def receive_reads(self, connection: ClientConnection, reads: list[Read | PlainRun]) -> None:
        """Process what was read on a connection. The reactor calls this.

        There are four cases:

        1. No request is in flight on the connection: it is closed.
        2. The server has just ended the idle connection: the request is sent again on another one.
        3. The reads complete the response: the completion is reported.
        4. The response goes on: the receiver learns how urgent its next reads are.
        """
        exchange = connection.exchange
        if not isinstance(exchange, Exchange):
            self.reactor.close(connection)
            return

        if _is_idle_timeout(connection, exchange, reads[0]):
            self.reactor.close(connection)
            connection.exchange = None
            self._resend(exchange)
            return

        is_complete = exchange.feed_reads(reads)
        if is_complete:
            self.response_completed(connection)
        elif connection.tls is None:
            self._update_read_urgency(connection, exchange, reads[-1])

    def _update_read_urgency(
        self, connection: ClientConnection, exchange: Exchange, last_read: Read | PlainRun
    ) -> None:
        """Tell the receiver how soon it has to read and pass on the rest of a response.

        The exchange says whether reads may be collected before they are passed on, and by which
        bytes (the template) the receiver recognises events that it only has to count.

        A stream of many small reads may also be *deferred*: data at its socket then does not wake
        the process, and the socket is read about every millisecond, together with others.

        Args:
            connection: The connection.
            exchange: The request and the response that it carries.
            last_read: The latest read. A `PlainRun` stands for several small ones.
        """
        connection.can_batch_reads = exchange.can_batch_reads
        connection.template = exchange.template
        deferrable_events = exchange.deferrable_events  # 0 if the next event is urgent
        should_begin = deferrable_events >= MIN_DEFERRED_EVENTS and _is_small_read(last_read)

        # A socket that is deferred already gets the new number in any case, because a small number
        # ends the deferring before the last events of the response.
        if connection.is_deferred or should_begin:
            self.reactor.defer(connection, deferrable_events)

    def response_completed(self, connection: ClientConnection) -> None:
        """Make the connection idle or close it, and report the completion of its request.

        The connection is free before the report, because `on_done` may send the next request of the
        virtual user.
        """
        # Usually the compiled receiver makes the connection idle and returns its exchange. If the
        # server has limited the use of the connection, it does nothing and returns None. The
        # receiver in Python always does that. The code after this handles these cases.
        recycled_exchange = self._try_recycle(
            connection, self._idle, self._in_flight, self._open_exchanges
        )
        if recycled_exchange is not None:
            recycled_exchange.report_completion()
            return

        exchange = connection.exchange
        assert isinstance(exchange, Exchange)

        if _can_reuse(connection, exchange.response):
            self._note_idle_limit(exchange.response)
            self._make_idle(connection)
        else:
            self.reactor.close(connection)

        self._report_completion(exchange)

    def _note_idle_limit(self, response: ResponseParser) -> None:
        """Shorten the time for which connections are reused to the idle limit of the server.

        A Keep-Alive header states after how many seconds the server closes an idle connection. The
        pool stops using its connections KEEP_ALIVE_MARGIN_S earlier, so that no request is sent on
        a connection that is about to be closed.
        """
        if response.idle_limit_s is not None:
            reuse_s = max(MIN_REUSE_S, response.idle_limit_s - KEEP_ALIVE_MARGIN_S)
            self._max_idle_ns = min(self._max_idle_ns, int(reuse_s * NS_PER_S))

    def _make_idle(self, connection: ClientConnection) -> None:
        """Keep the connection of a completed response for a later request."""
        connection.exchange = None
        connection.responses_served += 1
        self.reactor.stop_deferring(connection)
        connection.idle_since = monotonic_ns()
        self._idle.append(connection)

    def connection_lost(self, connection: ClientConnection, timestamp: int, error: str) -> None:
        """End the request of a connection that has ended, or send it again on another connection.

        The reactor calls this. The request is sent again, once, if the server closed the connection
        while it was idle, so that the request reached nobody.

        Args:
            connection: The connection.
            timestamp: When it ended, monotonic in ns.
            error: The text of the error, or "" after a regular close.
        """
        exchange = connection.exchange
        connection.exchange = None
        if not isinstance(exchange, Exchange):  # The connection was idle.
            return

        has_no_response = not exchange.bytes_received
        is_first_send = not exchange.resend_count
        if _was_idle(connection) and has_no_response and is_first_send:
            self._resend(exchange)
            return

        exchange.end_with_connection(timestamp, error)
        self._report_completion(exchange)

    def _resend(self, exchange: Exchange) -> None:
        """Send a request again on a new connection, with its original due time.

        The server has closed the idle connection while the request was on its way.
        """
        exchange.resend_count += 1
        exchange.reset_response()
        exchange.connect_attempts = 0
        self._connect_for_request(exchange)

    # -- housekeeping --------------------------------------------------------------------------

    def tick(self, now: int) -> None:
        """Check timeouts, close idle connections and open spare ones, about every TICK_NS.

        How many spare connections are opened follows from the busiest of the recent ticks.
        """
        self._cancel_overdue(now)
        self._cancel_stalled(now)
        self._fail_slow_connections(now)
        self._close_old_idle(now)

        # An old maximum fades by one eighth per tick, so that it counts for about a second.
        faded_maximum = self._recent_max_requests_per_tick * 7 // 8
        self._recent_max_requests_per_tick = max(self._requests_this_tick, faded_maximum)
        self._requests_this_tick = 0
        is_open_running = self._all_opened is not None

        has_recent_requests = self._recent_max_requests_per_tick > 0
        if self._opens_spares_ahead and has_recent_requests and not is_open_running:
            self._open_ahead()

    def _cancel_overdue(self, now: int) -> None:
        """End the requests whose deadline has passed with a failure.

        The requests in flight are in the order of sending, so the first one that still has time
        ends the search. They are collected first, because `cancel` removes them.
        """
        overdue: list[Exchange] = []
        for exchange in self._in_flight:
            if exchange.deadline > now:
                break
            overdue.append(exchange)

        text = f"not finished within {self._timeout_ns / NS_PER_S:g} s of its scheduled time"
        for exchange in overdue:
            self.cancel(exchange, Failure("timeout_total", text))

    def _cancel_stalled(self, now: int) -> None:
        """End requests that have stalled: no event has come for the stall timeout.

        To spread the work, each tick checks only some of the requests in flight, so that all of
        them are checked once within a period. `_stall_checks` has those that are still to be
        checked in this period. It is a copy of `_in_flight`, which changes meanwhile, so some of
        its requests may have ended.

        Args:
            now: The monotonic time, in ns.
        """
        is_new_period = not self._stall_checks
        if is_new_period:
            self._stall_checks = deque(self._in_flight)

        checks_left = self._stall_checks_per_tick()
        while self._stall_checks and checks_left:
            exchange = self._stall_checks.popleft()
            connection = exchange.connection
            if not isinstance(connection, ClientConnection):
                continue  # The request has ended, or its connection has just failed.

            checks_left -= 1

            # An event may have been read and not processed yet. Process it, because it means that
            # the request has not stalled. It may also complete the request.
            self.reactor.deliver(connection)
            has_ended = exchange.is_reported
            if not has_ended and self._has_stalled(exchange, now):
                text = f"no event for {self._stall_timeout_ns / NS_PER_S:g} s"
                self.cancel(exchange, Failure("timeout_stall", text))

    def _has_stalled(self, exchange: Exchange, now: int) -> bool:
        """Return True if the last event of a response came longer ago than the stall timeout.

        A request without any event so far has not stalled. The total timeout ends it.
        """
        last_event_at = exchange.last_event_read_at
        has_event = last_event_at != 0
        return has_event and now - last_event_at >= self._stall_timeout_ns

    def _stall_checks_per_tick(self) -> int:
        """Return how many requests to check for a stall in each tick, at least one.

        All requests in flight are checked once per period. The period is STALL_CHECK_PERIOD_NS, or
        a fraction of the stall timeout if that is less, so that a stall is noticed soon after the
        timeout.
        """
        timeout_fraction_ns = self._stall_timeout_ns // STALL_CHECKS_PER_TIMEOUT
        # The period must not be 0, which a timeout of a few nanoseconds would make it.
        period_ns = min(STALL_CHECK_PERIOD_NS, timeout_fraction_ns + 1)
        return len(self._in_flight) * TICK_NS // period_ns + 1

    def _fail_slow_connections(self, now: int) -> None:
        """Fail connections that were not opened within CONNECT_NS.

        `_connecting` is in the order of their beginning, so the first one that still has time ends
        the loop. Connections that are open by now, or have failed, are dropped from it.
        """
        connecting = self._connecting
        while connecting:
            connection = connecting[0]
            if connection.is_opening and now - connection.connecting_since <= CONNECT_NS:
                return
            connecting.popleft()
            if connection.is_opening:
                text = f"no TCP connection within {CONNECT_NS / 1e9:g} s"
                self.reactor.fail(connection, "connect", text)

    def _close_old_idle(self, now: int) -> None:
        """Close connections that were idle for longer than the limit, before the server does.

        The connections are in the order in which they became idle, so the first one that is young
        enough ends the loop. Connections that are closed already are dropped.
        """
        while self._idle:
            connection = self._idle[0]
            is_too_old = now - connection.idle_since > self._max_idle_ns
            if not connection.is_closed and not is_too_old:
                return
            self._idle.popleft()
            self.reactor.close(connection)

    def _open_ahead(self) -> None:
        """Open spare connections, so that as many are idle as the busiest recent tick needed."""
        wanted = max(SPARE_CONNECTIONS, self._recent_max_requests_per_tick)
        missing = wanted - len(self._idle) - self._spares_being_opened
        for _ in range(min(missing, OPEN_PER_TICK)):
            self._open_spare_connection()


def _create_reactor() -> Reactor:
    """Return a reactor in the running event loop.

    Raises:
        WrongUse: No event loop is running.
    """
    try:
        return Reactor(asyncio.get_running_loop())
    except RuntimeError:
        raise WrongUse(
            "event_loop",
            "a client needs a running event loop",
            "create it inside a coroutine, or use BlockingClient",
        ) from None


def _connect_failure(error: OSError) -> Failure:
    """Return the failure of a request whose connection could not be opened.

    The kind `client_resource` means that this host lacks something, such as free ports or files.
    """
    kind = "client_resource" if error.errno in _OUT_OF_RESOURCES else "connect"
    return Failure(kind, error.strerror or str(error))


def _can_reuse(connection: ClientConnection, response: ResponseParser) -> bool:
    """Return whether the connection of a response that is over can carry another request."""
    if not response.is_complete or not response.is_reusable or connection.unsent:
        return False
    return response.uses_left is None or response.uses_left > 1


def _was_idle(connection: ClientConnection) -> bool:
    """Return True if the connection was not opened for the request that it carries."""
    return connection.idle_since > connection.connecting_since


def _is_small_read(read: Read | PlainRun) -> bool:
    """Return True if a read has few events, so that waiting for more of them saves work.

    The reads of a `PlainRun` are small, because the receiver makes no run of large ones.
    """
    if is_plain_run(read):
        return True
    data = read[0]
    return len(data) < LARGE_READ_BYTES


def _is_idle_timeout(
    connection: ClientConnection, exchange: Exchange, first_read: Read | PlainRun
) -> bool:
    """Return True if the server ended the idle connection before it saw the request.

    Some servers send a response with the status 408 (Request Timeout) when they close an idle
    connection. A request that was sent at that moment gets it as its response, and is sent again on
    another connection, at most once.

    The same status may also mean that the server gave up this request. But then the connection was
    not idle before, or the response comes more than STALE_NS after the request.

    Args:
        connection: The connection that carries the request.
        exchange: The request and its response so far.
        first_read: The oldest read that was not processed yet.
    """
    has_response = exchange.head_received_at != NEVER
    if has_response or exchange.resend_count or not _was_idle(connection):
        return False

    # The compiled receiver makes plain tuples, so the items are unpacked by their positions.
    data, timestamp = first_read[:2]
    if not isinstance(data, bytes):  # It is a `PlainRun`, which has no head of a response.
        return False

    is_soon_after_sending = timestamp < exchange.sent_at + STALE_NS
    return is_soon_after_sending and data.startswith(IDLE_TIMEOUT_STARTS)
