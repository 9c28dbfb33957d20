"""A pool of kept-alive connections to one endpoint: requests in, measured completions out.

`Pool.send` is the generator's way: a callback, no task, no future. HTTP meaning lives in `exchange.py` and `dialects/`,
sockets in `wire.py`; here is only which connection carries what.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any

from ..dialects.body import body as make_body
from ..dialects.quirks import Quirk
from ..dialects.reader import Flow
from ..errors import TargetUnusable, WrongUse
from ..request import Failure, Request
from .exchange import Exchange, OnDone
from .http1 import head
from .target import Target
from .wire import TICK_NS, Line, Tls, Wire, raise_file_limit, resolve

SPARE = 2  # idle connections kept open ahead of need
OPEN_PER_TICK = 32  # pace at which further ones are opened ahead of need
CONNECT_NS = 10_000_000_000  # for one address; then the next one is tried
MAKING = ("connecting", "handshake")
KEEP_ALIVE_MARGIN_S = 1.0  # below the server's own idle limit
TIMEOUT_NS = 600 * 1_000_000_000
STALL_TIMEOUT_NS = 120 * 1_000_000_000


class Pool:
    """One endpoint, one model, one API. Create it inside a running event loop; `open` before the first send.

    `timeout_ns` bounds a request from its due instant, `stall_timeout_ns` the silence between two events of a stream
    (comments do not count as a sign of life). `ahead`: while requests are sent, connections are opened ahead of need,
    as an open loop wants it; else only for a request that finds none idle. The host is resolved once, in `open`.
    `sources`: local addresses to connect from, in turn; each has local ports of its own.
    """

    def __init__(
        self,
        target: Target,
        *,
        model: str,
        quirk: Quirk,
        stream: bool = True,
        api_key: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        extra_body: Mapping[str, Any] | None = None,
        timeout_ns: int = TIMEOUT_NS,
        stall_timeout_ns: int = STALL_TIMEOUT_NS,
        tls: Tls | None = None,
        keep_text: bool = False,
        keep_headers: bool = False,
        continuous_usage: bool = False,
        ahead: bool = False,
        sources: Sequence[str] = (),
        wire: Wire | None = None,
    ) -> None:
        self.target, self.model, self.quirk = target, model, quirk
        self._stream_on = stream
        self._extra_body = extra_body
        self._continuous_usage = continuous_usage
        self._ahead = ahead
        self._sources = tuple(sources)
        self._timeout_ns = timeout_ns
        self._stall_ns = stall_timeout_ns
        self._keep_text = keep_text
        self._keep_headers = keep_headers
        self._tls: ssl.SSLContext | None = (tls or Tls()).context() if target.tls else None
        self._owns_wire = wire is None
        try:
            self.wire = wire or Wire(asyncio.get_running_loop())
        except RuntimeError:
            raise WrongUse(
                f"a {type(self).__name__} lives in an event loop, and none is running",
                "make it inside a coroutine, or BlockingClient",
            ) from None
        if self._owns_wire:
            self.wire.tick = self.tick
        accept = "text/event-stream" if stream else "application/json"
        self._head = head(
            "POST",
            target.path,
            [
                ("Host", target.host_header),
                *target.auth(api_key),
                ("Content-Type", "application/json"),
                ("Accept", accept),
                ("User-Agent", "loadgen"),
                *headers,
            ],
        )
        self._reuse_ns = int(quirk.reuse_s * 1e9)
        self._addresses: list[tuple[int, tuple[object, ...]]] = []
        self._best = 0  # index of the address that worked last
        self._refusing: set[int] = set()  # addresses that refused since one last worked
        self._idle: deque[Line] = deque()
        self._connecting: deque[Line] = deque()
        self._spares = 0  # connecting ahead of need
        self._wanted_spares = SPARE
        self._sent_this_tick = 0
        self._busiest_tick = 0
        self._by_due: deque[Exchange] = deque()
        self._by_silence: deque[Exchange] = deque()
        self._opened: asyncio.Future[None] | None = None
        self._open_left = 0
        self.in_flight = 0
        self.connections_opened = 0

    # -- life ----------------------------------------------------------------------------------------------------

    async def open(self, connections: int = 0) -> None:
        """Resolve the host, and open this many connections. Raises TargetUnusable when none can be opened."""
        try:
            self._addresses = await resolve(self.target.host, self.target.port)
        except OSError as error:
            raise TargetUnusable(
                f"cannot resolve {self.target.host!r}: {error.strerror}", "check the host name"
            ) from None
        if not connections:
            return
        raise_file_limit(connections + 64)
        self._wanted_spares = connections
        self._refusing.clear()
        self._open_left = connections
        self._opened = asyncio.get_running_loop().create_future()
        for _ in range(min(connections, OPEN_PER_TICK * 4)):
            self._open_spare()
        borrowed = self.wire.tick is None  # a wire that is shared has no housekeeping before its owner runs
        if borrowed:
            self.wire.tick = self.tick
        try:
            await asyncio.wait_for(self._opened, 30)
        except TimeoutError:
            raise TargetUnusable(f"connecting to {self.target.redacted} took more than 30 s", "is it up?") from None
        finally:
            if borrowed:
                self.wire.tick = None
            self._opened = None
            self._wanted_spares = SPARE

    @property
    def is_open(self) -> bool:
        """Whether `open` has been."""
        return bool(self._addresses)

    def close(self) -> None:
        """Drop every connection; requests in flight end without a word."""
        if self._owns_wire:
            self.wire.shut()
            return
        for line in self._idle:
            self.wire.close(line)
        self._idle.clear()

    # -- requests ------------------------------------------------------------------------------------------------

    def prepare(self, request: Request) -> bytes:
        """The body of this request for this endpoint; build it ahead of the send."""
        return make_body(
            request,
            self.quirk,
            self.target.api,
            self.model,
            self._stream_on,
            extra_body=self._extra_body,
            continuous_usage=self._continuous_usage,
        )

    def send(
        self,
        request: Request | None,
        body: bytes,
        due: int,
        on_done: OnDone,
        flow: Flow,
        *,
        name: str = "",
        sink: Callable[[str, str, int], None] | None = None,
    ) -> Exchange:
        """Send now; `on_done` gets the Completion, always, once. `due` is the planned instant (monotonic ns).

        `name` is sent as X-Request-Id; `sink` is called with (text, reasoning, instant) for each output event.
        """
        exchange = Exchange(
            request,
            b"%sX-Request-Id: %s\r\nContent-Length: %d\r\n\r\n"
            % (self._head, (name or (request.id if request else "")).encode("latin-1", "replace"), len(body)),
            body,
            due,
            on_done,
            flow,
            stream=self._stream_on,
            keep_text=self._keep_text,
            keep_headers=self._keep_headers,
            sink=sink,
        )
        exchange.deadline = due + self._timeout_ns
        self.in_flight += 1
        self._sent_this_tick += 1
        self._by_due.append(exchange)
        self._by_silence.append(exchange)
        self._dispatch(exchange)
        return exchange

    def cancel(self, exchange: Exchange, failure: Failure) -> None:
        """End a request now, its connection with it; `on_done` hears of it."""
        if exchange.over:
            return
        line = exchange.line
        if isinstance(line, Line):
            self.wire.close(line)
        self._end(exchange, monotonic_ns(), failure)

    # -- which connection carries what ---------------------------------------------------------------------------

    def _dispatch(self, exchange: Exchange) -> None:
        idle = self._idle
        while idle:
            line = idle.pop()
            if line.closed:
                continue
            if monotonic_ns() - line.idle_since > self._reuse_ns:
                self.wire.close(line)
                continue
            exchange.ready = monotonic_ns()
            self._write(line, exchange)
            return
        self._connect(exchange)

    def _connect(self, exchange: Exchange | None) -> None:
        """A new connection, for this request or (None) ahead of need."""
        while True:
            tries = exchange.tries if exchange is not None else 0
            if tries >= len(self._addresses):
                if exchange is not None:
                    self._end(exchange, monotonic_ns(), Failure("connect", "no address of the host could be connected"))
                return
            index = (self._best + tries) % len(self._addresses)
            if exchange is not None:
                exchange.tries += 1
            try:
                source = self._sources[self.connections_opened % len(self._sources)] if self._sources else ""
                line = self.wire.open(self._addresses[index], index, self, self._tls, self.target.host, source)
            except OSError as error:
                if exchange is None:
                    self._refused(index, "connect", error.strerror or str(error))
                    return
                if exchange.tries >= len(self._addresses):
                    self._end(exchange, monotonic_ns(), Failure("connect", error.strerror or str(error)))
                    return
                continue
            self.connections_opened += 1
            self._connecting.append(line)
            line.busy = exchange
            if exchange is None:
                self._spares += 1
            else:
                exchange.line = line
            return

    def _open_spare(self) -> None:
        self._connect(None)

    def _write(self, line: Line, exchange: Exchange) -> None:
        line.busy = exchange
        exchange.line = line
        exchange.reused = line.served > 0
        exchange.awaited = self.wire.awaited
        exchange.awaited.add(exchange)
        exchange.sent = self.wire.send(line, (exchange.head, exchange.payload))
        exchange.bytes_sent += len(exchange.head) + len(exchange.payload)

    def _rest(self, line: Line) -> None:
        """An answer is over and its connection may serve again."""
        line.busy = None
        line.served += 1
        line.idle_since = monotonic_ns()
        self._idle.append(line)

    def _end(self, exchange: Exchange, at: int, failure: Failure) -> None:
        exchange.done = at
        exchange.failure = failure
        self._tell(exchange)

    def _tell(self, exchange: Exchange) -> None:
        exchange.line = None
        exchange.payload = b""
        self.wire.awaited.discard(exchange)
        self.in_flight -= 1
        exchange.tell()

    # -- what the wire tells -------------------------------------------------------------------------------------

    def connected(self, line: Line, at: int) -> None:
        exchange = line.busy
        self._best = line.address
        self._refusing.clear()
        if isinstance(exchange, Exchange):
            exchange.ready = at
            self._write(line, exchange)
            return
        self._spares -= 1
        line.idle_since = at
        self._idle.append(line)
        if self._opened is not None:
            self._open_left -= 1
            if self._open_left <= 0 and not self._opened.done():
                self._opened.set_result(None)
            elif self._spares + len(self._idle) < self._wanted_spares:
                self._open_spare()

    def failed(self, line: Line, kind: str, text: str) -> None:
        exchange = line.busy
        line.busy = None
        if isinstance(exchange, Exchange):
            if exchange.tries < len(self._addresses) and kind == "connect":
                self._connect(exchange)
            else:
                self._end(exchange, monotonic_ns(), Failure(kind, text))
        else:
            self._spares -= 1
            self._refused(line.address, kind, text)

    def _refused(self, address: int, kind: str, text: str) -> None:
        """A connection ahead of need could not be made; while the pool is being opened, the next address may do."""
        self._refusing.add(address)
        left = [i for i in range(len(self._addresses)) if i not in self._refusing]
        if left:
            self._best = left[0]
        if self._opened is None or self._opened.done():
            return
        if left and kind == "connect":
            self._open_spare()
        else:
            self._opened.set_exception(TargetUnusable(f"cannot connect to {self.target.redacted}: {text}", "is it up?"))

    def arrived(self, line: Line, data: bytes, stamp: int, read: int, base: int, kernel: bool) -> None:
        exchange = line.busy
        if not isinstance(exchange, Exchange):  # bytes that nobody asked for
            self.wire.close(line)
            return
        if exchange.arrived(data, stamp, read, base, kernel):
            response = exchange.response
            if response.complete and response.reusable and not line.out:
                if response.uses_left is not None and response.uses_left <= 1:
                    self.wire.close(line)
                else:
                    if response.idle_limit_s is not None:
                        bound = int(max(0.5, response.idle_limit_s - KEEP_ALIVE_MARGIN_S) * 1e9)
                        self._reuse_ns = min(self._reuse_ns, bound)
                    self._rest(line)
            else:
                self.wire.close(line)
            self._tell(exchange)  # after the connection is free: the next request of its lane wants it

    def closed(self, line: Line, stamp: int, reset: str) -> None:
        exchange = line.busy
        line.busy = None
        if not isinstance(exchange, Exchange):
            return
        if exchange.reused and not exchange.bytes_received and not exchange.resent:
            exchange.resent += 1
            exchange.fresh()
            exchange.tries = 0
            self._connect(exchange)  # a fresh connection, the original due
            return
        exchange.ended(stamp, reset)
        self._tell(exchange)

    # -- housekeeping --------------------------------------------------------------------------------------------

    def tick(self, now: int) -> None:
        """Timeouts, idle connections, connections ahead of need: about every TICK_NS."""
        by_due = self._by_due
        while by_due and (by_due[0].over or by_due[0].deadline <= now):
            exchange = by_due.popleft()
            if not exchange.over:
                waited = self._timeout_ns / 1e9
                self.cancel(exchange, Failure("timeout_total", f"not finished {waited:g} s after it was due"))
        if len(by_due) > 2 * self.in_flight + 1000:
            self._by_due = deque(exchange for exchange in by_due if not exchange.over)
        if len(self._by_silence) > 2 * self.in_flight + 1000:  # else those that are over stay for half a stall time
            self._by_silence = deque(exchange for exchange in self._by_silence if not exchange.over)
        by_silence = self._by_silence  # looked through once in half a stall time, a few each tick
        for _ in range(len(by_silence) * 2 * TICK_NS // self._stall_ns + 1 if by_silence else 0):
            exchange = by_silence.popleft()
            if exchange.over:
                continue
            if not exchange.progress or now - exchange.progress < self._stall_ns:
                by_silence.append(exchange)
            else:
                self.cancel(exchange, Failure("timeout_stall", f"no event for {self._stall_ns / 1e9:g} s"))
            if not by_silence:
                break
        connecting = self._connecting
        while connecting and (connecting[0].state not in MAKING or now - connecting[0].since > CONNECT_NS):
            line = connecting.popleft()
            if line.state in MAKING:
                self.wire.give_up(line, "connect", f"no answer within {CONNECT_NS / 1e9:g} s")
        idle = self._idle
        while idle and (idle[0].closed or now - idle[0].idle_since > self._reuse_ns):
            line = idle.popleft()
            self.wire.close(line)
        self._busiest_tick = max(self._sent_this_tick, self._busiest_tick * 7 // 8)
        self._sent_this_tick = 0
        if self._ahead and self._opened is None and self._busiest_tick:
            missing = max(SPARE, self._busiest_tick) - len(idle) - self._spares
            for _ in range(min(missing, OPEN_PER_TICK)):
                self._open_spare()
