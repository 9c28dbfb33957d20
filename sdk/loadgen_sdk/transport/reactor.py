"""Sockets, TLS and time stamps. Under load, only this module (and its timer in timer.py) uses sockets.

All connections of a process and its timer are registered in one epoll instance, or, where nothing is urgent, in a
second one (receiver.py). The event loop watches the descriptor of the first. One callback, called a turn, reads every
ready socket together with the kernel's arrival time stamps. It then decodes what it read in slices of limited duration,
so that decoding never delays the reading of packets for long.
This module knows nothing about HTTP.

How exact a stamp is (metrics.md): packets that wait in the receive queue are merged, and the merged data carries the
*newest* stamp. Each read therefore also reports `empty_at`, the last instant at which the socket was known to be empty:
the data arrived between `empty_at` and the stamp. While a load generator has requests in flight, it polls at least
every POLL_EVERY_NS (receiver.py). This bounds the error of the stamp when two events arrive in one read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

from ..compiled import module as compiled_module
from ..errors import TargetUnusable
from .proxy import tunnel_refusal
from .receiver import MAX_WRITE_BYTES, socket_error_text, first_bytes, parts_from
from .response_state import Read, Run
from .timer import Timer, create_timer
from .tls import tls_error_text

if TYPE_CHECKING or compiled_module is None:
    from .receiver import SocketBuffer, Receiver
else:
    SocketBuffer = compiled_module.SocketBuffer
    Receiver = compiled_module.Receiver

SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the socket module does not name it
IP_BIND_ADDRESS_NO_PORT = (
    24  # linux/in.h: connect chooses the port, so several targets can share one port
)
TICK_NS = 100_000_000  # housekeeping: timeouts, idle connections
# The shortest wait that epoll supports. It is used only when `Reactor.idle` has work for idle moments. Otherwise the wait
# has no timeout: arming a kernel timer for each wait costs more than the read, and our own timer ends it at the tick.
HOLD_POLL_MS = 1
BACKLOG_LIMIT = (
    20_000  # reads waiting to be decoded; at this number no more is read until some are decoded
)
FOREVER = 1 << 62

_IN_PROGRESS = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINPROGRESS)
LINUX = sys.platform == "linux"


class ConnectionOwner(Protocol):
    """The owner of connections, which the wire calls. Each call names the connection, so one owner can have many.

    `connected`: the connection is ready at the instant `at` (after the TLS handshake). `failed`: it could not be made;
    `kind` is "connect" or "tls". `arrived`: what was read since the last call, one or more reads. `over`: what was read
    went to its exchange, and ends the answer. `closed`: the connection ended; `reset` is "" for a regular end, else the
    error's text.
    """

    def connection_made(self, connection: ClientConnection, at: int) -> None: ...
    def connection_failed(self, connection: ClientConnection, kind: str, text: str) -> None: ...
    def receive_reads(self, connection: ClientConnection, reads: list[Read | Run]) -> None: ...
    def response_completed(self, connection: ClientConnection) -> None: ...
    def connection_lost(self, connection: ClientConnection, stamp: int, reset: str) -> None: ...


class ClientConnection(SocketBuffer):
    """One connection. Until it is open, `tls_ns` is when the handshake began."""

    __slots__ = (
        "address",
        "connecting_since",
        "sock",
        "state",
        "tls_in",
        "tls_out",
        "tunnel",
        "uses_left",
    )
    owner: ConnectionOwner

    def __init__(self, sock: socket.socket, owner: ConnectionOwner, address: int, now: int) -> None:
        super().__init__(sock.fileno(), now)
        self.sock = sock
        self.owner = owner
        self.address = address
        self.state = "connecting"
        self.uses_left: int | None = None
        self.connecting_since = now
        self.tls_in: ssl.MemoryBIO | None = None
        self.tls_out: ssl.MemoryBIO | None = None
        self.tunnel = b""  # the request that opens it; then what the proxy has answered so far


class Reactor:
    """The sockets of one process inside the running asyncio loop.

    `turn_ns`: above 0, a turn stays in its own poll for that long while there is traffic. This is for a load generator,
    because going back to the event loop costs as much as a read. 0: other tasks of the loop run after every turn.
    `delivery_slice_ns`: longest time that decoding may delay the next read of the sockets.
    `on_wake(now)` is called when the instant given to `wake_at` has come, and again in each turn until it is moved.
    `on_tick(now)` is called about every TICK_NS. `on_idle()` is called after HOLD_POLL_MS without traffic, and again for as
    long as it returns true. `open_exchanges` is the set of requests in flight: while it is not empty and `turn_ns` is above
    0, no wait is longer than POLL_EVERY_NS (BUSY_POLL_EVERY_NS under heavy traffic).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        if not hasattr(select, "epoll"):
            what = "load is sent from Linux only: it takes epoll and the kernel's time stamps"
            raise TargetUnusable(
                "wrong_platform",
                what,
                "a container or WSL2 is Linux; what is stored can be read here",
            )
        self._loop = loop
        self._poll = select.epoll()
        self._held = select.epoll()
        self._timer: Timer = create_timer(loop)
        self._connections: dict[int, ClientConnection] = {}
        self._queue: deque[ClientConnection] = (
            deque()
        )  # connections whose reads are to be handed over
        self._receiver = Receiver(self._poll, self._held, self._timer, self._queue)
        self.stop_deferring = (
            self._receiver.stop_deferring
        )  # what comes next of this connection is urgent again
        self.send_on_idle, self.recycle = self._receiver.send_on_idle, self._receiver.recycle
        self._tick_at = monotonic_ns()
        self._resume_queued = False
        self._turn_running = False
        self.on_wake: Callable[[int], None] | None = None
        self.on_tick: Callable[[int], None] | None = None
        self.on_idle: Callable[[], bool] | None = None
        self.turn_ns = 0
        self.delivery_slice_ns = 200_000
        self.open_exchanges: set[object] = set()
        self.turn_count = 0
        self._poll.register(self._timer.fileno(), select.EPOLLIN)
        loop.add_reader(self._poll.fileno(), self._turn)
        self._arm()

    @property
    def reads(self) -> int:
        """Reads of sockets so far."""
        return self._receiver.read_count

    # -- connections ---------------------------------------------------------------------------------------------

    def open(
        self,
        address: tuple[int, tuple[object, ...]],
        index: int,
        owner: ConnectionOwner,
        tls: ssl.SSLContext | None,
        name: str,
        source: str = "",
        tunnel: bytes = b"",
    ) -> ClientConnection:
        """Start to connect to `address` (family, sockaddr), from the local address `source` if given.

        `index` is the owner's number for the address; `name` is the host name for TLS; `tunnel`: what is sent first, to
        a proxy that opens a tunnel for the TLS that follows. The result is reported to `owner` by `connected` or
        `failed`. Raises OSError when the connection cannot be started at all.
        """
        family, sockaddr = address
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if LINUX:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            if source:
                if LINUX:
                    sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
                sock.bind((source, 0))
            code = sock.connect_ex(sockaddr)
            if code not in (0, *_IN_PROGRESS):
                raise OSError(code, os.strerror(code))
        except BaseException:
            sock.close()
            raise
        connection = ClientConnection(sock, owner, index, monotonic_ns())
        connection.tunnel = tunnel
        if tls is not None:
            connection.tls_in, connection.tls_out = ssl.MemoryBIO(), ssl.MemoryBIO()
            connection.tls = tls.wrap_bio(
                connection.tls_in, connection.tls_out, server_hostname=name
            )
        self._connections[connection.fd] = connection
        self._receiver.add(connection)
        self._poll.register(connection.fd, select.EPOLLIN | select.EPOLLOUT)
        return connection

    def close(self, connection: ClientConnection) -> None:
        """Drop a connection. Its owner gets no further calls for it."""
        if connection.is_closed:
            return
        connection.is_closed = True
        connection.state = "closed"
        connection.exchange = None
        del self._connections[connection.fd]
        self._receiver.remove(connection)
        with contextlib.suppress(OSError):
            self._poll.unregister(connection.fd)
        connection.sock.close()

    def send(self, connection: ClientConnection, parts: tuple[bytes | memoryview, ...]) -> int:
        """Write bytes to the socket, the rest when it takes more. Returns the instant (ns) before the first byte."""
        if connection.tls is not None and connection.tls_out is not None:
            for part in parts:
                connection.tls.write(part)
            parts = (connection.tls_out.read(),)
        if connection.unsent:
            connection.unsent.extend(parts)
            return monotonic_ns()
        at, taken = self._receiver.send(connection, parts)
        # after an error, the next read reports it, after the last bytes that the server sent
        if 0 <= taken < sum(map(len, parts)):
            self.send_rest(connection, parts, taken)
        return at

    def send_rest(
        self, connection: ClientConnection, parts: Sequence[bytes | memoryview], sent_bytes: int
    ) -> None:
        """Send what follows the first `sent_bytes` of a request as soon as the socket takes more."""
        connection.unsent.extend(parts_from(parts, sent_bytes))
        self._poll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)

    def defer(self, connection: ClientConnection, events: int) -> None:
        """Nothing of this connection is urgent before so many plain events have come: they may be read late."""
        if self.turn_ns and not connection.unsent:
            self._receiver.defer(connection, events)

    # -- time ----------------------------------------------------------------------------------------------------

    def wake_at(self, at: int) -> None:
        """Call `wake` at this monotonic instant (ns); FOREVER: never."""
        self._receiver.wake_at = at
        if not self._turn_running:
            self._arm()

    def _arm(self) -> None:
        receiver = self._receiver
        at = receiver.wake_at if receiver.wake_at < self._tick_at else self._tick_at
        waits_end = self._turn_running and receiver.is_deferring  # by themselves, at the next poll
        if receiver.next_poll_at < at and self.open_exchanges and self.turn_ns and not waits_end:
            at = receiver.next_poll_at
        if at != receiver.timer_armed_for:
            receiver.timer_armed_for = at
            self._timer.arm(at)

    # -- one turn ------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if self._poll.closed:  # the wire was shut while this turn was queued
            return
        self._turn_running = True
        queue, receiver = self._queue, self._receiver
        try:
            now = receiver.poll_started = monotonic_ns()
            hold_ends = now + self.turn_ns
            while True:
                now = self._receive(hold_ends)
                if now >= hold_ends or not self.turn_ns:
                    break
                if (
                    not receiver.ready_count
                    and not queue
                    and (self.on_idle is None or not self.on_idle())
                ):
                    break
                self._arm()
        finally:
            self._turn_running = False
            self._arm()
            if queue and not self._resume_queued:
                self._resume_queued = True
                self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        """Run the turn that was queued because reads were left to decode.

        At most one such turn is queued at a time, and only this method allows the next one. Turns started by the poll
        run in between; if each of them queued another turn, the other callbacks of the loop would wait for all of them.
        """
        self._resume_queued = False
        self._turn()

    def _receive(self, hold_ends: int) -> int:
        """Read what is ready, call `wake` and `tick` if they are due, hand over for a slice; returns the time (ns)."""
        self.turn_count += 1
        receiver = self._receiver
        others: list[tuple[int, int]] | None = []
        if receiver.queued_reads < BACKLOG_LIMIT:
            if self.turn_ns:
                wait_ms = HOLD_POLL_MS if self.on_idle is not None else -1
                rest = self.open_exchanges, self.delivery_slice_ns, self._deliver
                others = receiver.run(wait_ms, hold_ends, self._tick_at, *rest)
            else:
                others = receiver.receive(0, 0, -1)
            now = receiver.now
        else:
            now = monotonic_ns()
        if others is not None:
            for fd, events in others:
                self._other_event(fd, events)
            if now >= receiver.wake_at and self.on_wake is not None:
                receiver.timer_armed_for = 0
                self.on_wake(now)
            if self._queue:
                now = receiver.deliver_queued(self.delivery_slice_ns, self._deliver)
        if now >= self._tick_at:
            self._receiver.timer_armed_for = 0
            self._tick_at = now + TICK_NS
            if self.on_tick is not None:
                self.on_tick(now)
        return now

    def _other_event(self, fd: int, events: int) -> None:
        """The timer fired, or a socket can be written."""
        connection = self._connections.get(fd)
        if connection is None:
            # This poll returned after the timer fired: a socket that it does not report was empty at that instant.
            receiver = self._receiver
            if receiver.timer_armed_for > receiver.last_poll:
                receiver.last_poll = receiver.timer_armed_for
            self._timer.clear()
            self._receiver.timer_armed_for = 0
        elif not connection.is_closed:
            self._writable(connection)

    def deliver(self, connection: ClientConnection) -> None:
        """Give the owner now what a may_batch connection has kept."""
        if (
            connection.tls is None
            and not connection.is_closed
            and (reads := self._receiver.take_reads(connection))
        ):
            connection.owner.receive_reads(connection, reads)

    def _deliver(self, connection: ClientConnection) -> None:
        reads = self._receiver.take_reads(connection)
        connection.is_queued = False
        if connection.is_closed:
            return
        if connection.tls is not None:
            self._decrypt(connection, reads)
            return
        if reads:
            connection.owner.receive_reads(connection, reads)
        if connection.ended_at and not connection.is_closed:
            self._connection_ended(
                connection, connection.ended_at, socket_error_text(connection.error)
            )

    def _connection_ended(self, connection: ClientConnection, stamp: int, error: str) -> None:
        if connection.state in ("connecting", "tunnel", "handshake"):
            kind = "tls" if connection.state == "handshake" else "connect"
            self.give_up(
                connection, kind, error or "the connection was closed while it was being made"
            )
            return
        owner = connection.owner
        connection.state = "gone"
        owner.connection_lost(connection, stamp, error)
        self.close(connection)

    def give_up(self, connection: ClientConnection, kind: str, text: str) -> None:
        """Give up a connection that is not ready yet, and report `failed` to its owner."""
        connection.state = "gone"
        connection.owner.connection_failed(connection, kind, text)
        self.close(connection)

    def _writable(self, connection: ClientConnection) -> None:
        if connection.state == "connecting":
            code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.give_up(connection, "connect", os.strerror(code))
                return
            self._poll.modify(connection.fd, select.EPOLLIN)
            connection.emptied_at = now = monotonic_ns()
            connection.tcp_ns, connection.tls_ns = now - connection.connecting_since, now
            connection.is_readable = True
            if connection.tunnel:
                connection.state = "tunnel"
                connection.sock.send(
                    connection.tunnel
                )  # the first bytes of a connection: they always find room
                connection.tunnel = b""
            elif connection.tls is not None:
                connection.state = "handshake"
                self._handshake(connection)
            else:
                self._connection_made(connection)
            return
        try:
            sent_bytes = connection.sock.sendmsg(first_bytes(connection.unsent, MAX_WRITE_BYTES))
        except BlockingIOError:
            return
        except OSError:
            connection.unsent = []
            return
        connection.unsent = parts_from(connection.unsent, sent_bytes)
        if not connection.unsent:
            self._poll.modify(connection.fd, select.EPOLLIN)

    def _connection_made(self, connection: ClientConnection) -> None:
        connection.state, now = "open", monotonic_ns()
        connection.tls_ns = now - connection.tls_ns if connection.tls is not None else 0
        connection.owner.connection_made(connection, now)

    # -- TLS -----------------------------------------------------------------------------------------------------

    def _flush_tls(self, connection: ClientConnection) -> None:
        assert connection.tls_out is not None
        data = connection.tls_out.read()
        if data:
            if connection.unsent:
                connection.unsent.append(data)
                return
            try:
                taken = connection.sock.send(data)
            except BlockingIOError:
                taken = 0
            except OSError:
                return
            if taken < len(data):
                connection.unsent.append(data[taken:])
                self._poll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)

    def _handshake(self, connection: ClientConnection) -> None:
        assert connection.tls is not None
        try:
            connection.tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush_tls(connection)
            return
        except ssl.SSLError as error:
            self._flush_tls(connection)
            self.give_up(connection, "tls", tls_error_text(error))
            return
        self._flush_tls(connection)
        self._connection_made(connection)

    def _tunnel_answered(self, connection: ClientConnection, data: bytes) -> None:
        """A part of the proxy's answer has come. With its end TLS begins, and the client speaks first."""
        connection.tunnel += data
        if b"\r\n\r\n" not in connection.tunnel:
            return
        if problem := tunnel_refusal(connection.tunnel):
            self.give_up(connection, "connect", problem)
            return
        connection.state, connection.tls_ns = "handshake", monotonic_ns()
        self._handshake(connection)

    def _decrypt(self, connection: ClientConnection, reads: list[Read | Run]) -> None:
        """Decrypt what was read, hand over the plain reads, and see to the end of the connection."""
        assert connection.tls is not None and connection.tls_in is not None
        plain: list[Read | Run] = []
        ended_at, error = connection.ended_at, socket_error_text(connection.error)
        failed: ssl.SSLError | None = None
        for read in reads:
            assert len(read) == 5  # there is no template for what is encrypted
            data, stamp, read_at, empty_at, from_kernel = read
            if connection.state == "tunnel":
                self._tunnel_answered(connection, data)
                if connection.is_closed:
                    return
                continue
            connection.tls_in.write(data)
            if connection.state == "handshake":
                self._handshake(connection)
                if connection.is_closed:
                    return
                if connection.state != "open":
                    continue
            texts: list[bytes] = []
            try:
                while text := connection.tls.read(1 << 16):
                    texts.append(text)
                ended_at = ended_at or stamp
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                ended_at = ended_at or stamp
            except ssl.SSLError as tls_error:
                failed = tls_error
            if texts:
                plain.append(Read(b"".join(texts), stamp, read_at, empty_at, from_kernel))
            if failed is not None or ended_at:
                break
        if connection.state == "open" and failed is None:
            self._flush_tls(connection)
        if plain:
            connection.owner.receive_reads(connection, plain)
        if connection.is_closed:
            return
        if failed is not None:
            if connection.exchange is None:
                self._connection_ended(connection, reads[-1][1], tls_error_text(failed))
            else:  # for example an alert about our certificate, which TLS 1.3 sends after the handshake
                self.give_up(connection, "tls", tls_error_text(failed))
        elif ended_at:
            self._connection_ended(connection, ended_at, error)

    def shut_down(self) -> None:
        """Close every connection and stop watching. May be called twice."""
        if self._poll.closed:
            return
        self._loop.remove_reader(self._poll.fileno())
        for connection in list(self._connections.values()):
            self.close(connection)
        self._timer.close()
        self._held.close()
        self._poll.close()
