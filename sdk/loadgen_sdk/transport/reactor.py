"""The reactor waits for the sockets of a process, reads and writes them and calls their owners.

All connections of a process and its timer are registered in one epoll instance, or, while nothing
of them is urgent, in a second one (see `receiver.py`). The event loop watches the descriptor of
the first. On a system without epoll, it watches the sockets (see `loop_poll.py`). One callback,
called a turn, reads every ready socket together with the kernel's timestamps. It then delivers what
it read, in slices of limited duration, so that decoding never delays the reading of packets for
long. This module knows nothing about HTTP.

How exact a timestamp is (see docs/reference/metrics.md): packets that wait in the receive queue are
merged, and the merged data has the timestamp of the newest. Each read therefore also reports
`empty_at`, the last time at which the socket was known to be empty. The data arrived between
`empty_at` and the timestamp. While a load generator has requests in flight, it polls at least every
POLL_EVERY_NS. This bounds the uncertainty of the timestamp when two events arrive in one read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic_ns

from .connection import ClientConnection, ConnectionOwner, Receiver, Route, connect_socket
from .host_resources import Address
from .loop_poll import READABLE, WRITABLE, LoopPoll, Poll
from .proxy import tunnel_refusal
from .receiver import (
    MAX_WRITE_BYTES,
    NO_TIMER,
    WAIT_FOREVER_MS,
    WRITE_FAILED,
    first_bytes,
    parts_from,
    socket_error_text,
)
from .response_state import PlainRun, Read
from .timer import Timer, create_timer
from .tls import TlsStream, tls_error_text

TICK_NS = 100_000_000
"""How often `on_tick` is called, for timeouts and idle connections."""

IDLE_WAIT_MS = 1
"""The shortest wait that epoll supports. It is used only while `on_idle` has something to do.
Otherwise the wait has no timeout: setting the kernel's timer for each wait costs more than a read,
and the reactor's own timer ends it at the tick."""

DELIVERY_SLICE_NS = 200_000
"""The usual duration of a slice of delivering. Meanwhile packets wait in the kernel, which has
timestamped them, so that only their reading is delayed."""

BACKLOG_LIMIT = 20_000
"""The number of undelivered reads at which nothing more is read until some are delivered."""

FOREVER = 1 << 62
"""A time that never comes, in ns."""

NO_WAIT_MS = 0
"""As a wait of `Receiver.receive`: poll without waiting."""

AFTER_ONE_PASS = 0
"""As the `return_at` of `Receiver.receive`: a time in the past, so that it returns at once."""


@dataclass
class _DecryptedReads:
    """Reads whose bytes were decrypted.

    Attributes:
        reads: The reads, without those that hold only a part of the handshake.
        last_timestamp: The timestamp of the last read that was looked at, in ns.
        has_ended: The server has ended the TLS stream with that read.
        error: The error that ended the decryption, or None.
    """

    reads: list[Read | PlainRun] = field(default_factory=list)
    last_timestamp: int = 0
    has_ended: bool = False
    error: ssl.SSLError | None = None


class Reactor:
    """The sockets of one process inside the running asyncio loop.

    A turn is one call from the event loop. It consists of passes, each of which reads what is
    ready and delivers for a slice of time. All times are monotonic, in ns.

    Attributes:
        turn_ns: If above 0, a turn stays in its own poll for that long while there is traffic.
            This is for a load generator, because going back to the event loop costs as much as a
            read. With 0, other tasks of the loop run after every turn.
        delivery_slice_ns: The longest time for which delivering may delay the next read.
        on_wake: Called with the time when it is time for `wake_at`, and again in each turn until
            that is moved.
        on_tick: Called with the time about every TICK_NS.
        on_idle: Called after IDLE_WAIT_MS without traffic, and again for as long as it returns
            True.
        open_exchanges: The requests in flight. While there are any and `turn_ns` is above 0, no
            wait is longer than POLL_EVERY_NS (BUSY_POLL_EVERY_NS under heavy traffic).
        turn_count: The number of passes so far.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Create a reactor without connections, which the event loop calls from now on.

        A *turn* is one call from the event loop, and a *tick* is the periodic call of `on_tick`.
        """
        # The callbacks and settings of the owner, described in the class docstring
        self.on_wake: Callable[[int], None] | None = None
        self.on_tick: Callable[[int], None] | None = None
        self.on_idle: Callable[[], bool] | None = None
        self.turn_ns = 0
        self.delivery_slice_ns = DELIVERY_SLICE_NS
        self.open_exchanges: set[object] = set()

        # What reports ready sockets
        self._loop = loop
        self._has_epoll = hasattr(select, "epoll")
        self._poll = self._create_poll()
        self._deferred_poll = self._create_poll()  # for sockets that may be read late
        self._timer: Timer = create_timer(loop)

        # The sockets, and the receiver that reads them
        self._connections: dict[int, ClientConnection] = {}  # by descriptor
        self._queue: deque[ClientConnection] = deque()  # connections with reads to deliver
        self._receiver = Receiver(self._poll, self._deferred_poll, self._timer, self._queue)

        # Methods of the receiver that the reactor offers as its own. They are called for each
        # request, and an attribute costs less than a method that only passes the call on.
        self.stop_deferring = self._receiver.stop_deferring
        self.try_send_on_idle = self._receiver.try_send_on_idle
        self.try_recycle = self._receiver.try_recycle

        # The state of the current turn
        self.turn_count = 0
        self._next_tick_at = monotonic_ns()
        self._is_turn_running = False
        self._is_resume_scheduled = False

        self._watch_sockets_and_timer()

    def _watch_sockets_and_timer(self) -> None:
        """Let the event loop call `_run_turn` when a socket or the timer is ready."""
        self._poll.register(self._timer.fileno(), READABLE)
        if self._has_epoll:
            self._loop.add_reader(self._poll.fileno(), self._run_turn)
        self._arm_timer()

    def _create_poll(self) -> Poll:
        """Return an epoll, or on a system without it, a poll whose sockets the event loop watches.

        The event loop calls `_run_turn` for the sockets of the latter.
        """
        if self._has_epoll:
            return select.epoll()
        return LoopPoll(self._loop, self._run_turn)

    @property
    def reads(self) -> int:
        """The number of reads of sockets so far."""
        return self._receiver.read_count

    # -- connections ---------------------------------------------------------------------------

    def open(
        self,
        owner: ConnectionOwner,
        route: Route,
        address: Address,
        *,
        address_index: int,
        source: str = "",
    ) -> ClientConnection:
        """Begin to connect. Later `connection_made` or `connection_failed` of the owner is called.

        Args:
            owner: The owner of the connection.
            route: How to reach the server.
            address: The address of the server or of the proxy.
            address_index: The owner's number for the address.
            source: The local address to connect from, or "" for any.

        Raises:
            OSError: The connection cannot be begun.
        """
        sock = connect_socket(address, source)
        connection = ClientConnection(sock, owner, address_index, route)
        self._connections[connection.fd] = connection
        self._receiver.add(connection)
        self._poll.register(connection.fd, READABLE | WRITABLE)
        return connection

    def close(self, connection: ClientConnection) -> None:
        """Close a connection. Its owner gets no further calls for it.

        A second call has no effect.
        """
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

    def fail(self, connection: ClientConnection, kind: str, text: str) -> None:
        """Close a connection and report `connection_failed` to its owner."""
        connection.state = "ended"
        connection.owner.connection_failed(connection, kind, text)
        self.close(connection)

    def shut_down(self) -> None:
        """Close every connection and stop watching. A second call has no effect."""
        if self._poll.closed:
            return

        if self._has_epoll:
            self._loop.remove_reader(self._poll.fileno())

        for connection in list(self._connections.values()):
            self.close(connection)

        self._timer.close()
        self._deferred_poll.close()
        self._poll.close()

    # -- sending -------------------------------------------------------------------------------

    def send(self, connection: ClientConnection, parts: tuple[bytes | memoryview, ...]) -> int:
        """Write a request to the socket of a connection.

        What the socket does not accept is kept in `connection.unsent` and written as soon as it
        accepts more. What was kept before goes first. With TLS, the parts are encrypted together.

        Returns:
            The time before the first byte was written.
        """
        if connection.tls is not None:
            parts = (connection.tls.encrypt(parts),)

        if connection.unsent:
            connection.unsent.extend(parts)
            return monotonic_ns()

        started_at, sent_bytes = self._receiver.send(connection, parts)

        # An error is reported by the next read, after the last bytes that the server sent.
        if sent_bytes != WRITE_FAILED and sent_bytes < sum(map(len, parts)):
            self.send_rest(connection, parts, sent_bytes)

        return started_at

    def send_rest(
        self, connection: ClientConnection, parts: Sequence[bytes | memoryview], sent_bytes: int
    ) -> None:
        """Send what follows the first `sent_bytes` of the parts when the socket accepts more."""
        connection.unsent.extend(parts_from(parts, sent_bytes))
        self._poll.modify(connection.fd, READABLE | WRITABLE)

    def _send_unsent(self, connection: ClientConnection) -> None:
        """Write what the socket has not accepted before. Epoll reports that it accepts more now.

        When all is written, epoll need no longer report this. After an error nothing more is
        written, and the next read reports the error.
        """
        try:
            sent_bytes = connection.sock.sendmsg(first_bytes(connection.unsent, MAX_WRITE_BYTES))
        except BlockingIOError:
            return
        except OSError:
            connection.unsent = []
            return

        connection.unsent = parts_from(connection.unsent, sent_bytes)
        if not connection.unsent:
            self._poll.modify(connection.fd, READABLE)

    # -- time ----------------------------------------------------------------------------------

    def wake_at(self, at: int) -> None:
        """Call `on_wake` at this time, or never if it is FOREVER."""
        self._receiver.wake_at = at
        if not self._is_turn_running:
            self._arm_timer()

    def defer(self, connection: ClientConnection, events: int) -> None:
        """Let this connection be read late until it has received so many plain events.

        Without epoll nothing is read late (see `loop_poll.py`).
        """
        if self._has_epoll and self.turn_ns and not connection.unsent:
            self._receiver.defer(connection, events)

    def _arm_timer(self) -> None:
        """Set the timer for the next time at which the reactor must run without traffic.

        This is the time for `on_wake`, the next tick, or the planned poll, whichever comes first.
        """
        receiver = self._receiver
        timer_at = min(receiver.wake_at, self._next_tick_at)
        if self._needs_timer_for_poll():
            timer_at = min(timer_at, receiver.next_poll_at)
        if timer_at != receiver.timer_armed_for:
            receiver.timer_armed_for = timer_at
            self._timer.arm(timer_at)

    def _needs_timer_for_poll(self) -> bool:
        """Return True if the timer must end a wait for the next planned poll.

        Frequent polls bound the uncertainty of timestamps. Only a load generator that awaits
        responses needs them. While it reads sockets late ("deferred", see `receiver.py`), it waits
        for a millisecond at most, so that no timer is needed within a turn.
        """
        is_load_generator = self.turn_ns > 0
        if not is_load_generator or not self.open_exchanges:
            return False
        has_short_waits = self._is_turn_running and self._receiver.is_deferring
        return not has_short_waits

    # -- one turn ------------------------------------------------------------------------------

    def _run_turn(self) -> None:
        """Read sockets and deliver what was read, until the turn is over or nothing is left to do.

        The event loop calls this when a socket or the timer is ready. A turn lasts for `turn_ns` at
        most, or a single pass without it. If reads are left to deliver, the event loop runs its
        other callbacks first and then `_resume`.
        """
        if self._poll.closed:  # The reactor was shut down while this turn was queued.
            return

        self._is_turn_running = True
        try:
            now = monotonic_ns()
            self._receiver.poll_started_at = now
            turn_ends_at = now + self.turn_ns
            while self._run_pass(turn_ends_at):
                self._arm_timer()
        finally:
            self._is_turn_running = False
            self._arm_timer()
            if self._queue and not self._is_resume_scheduled:
                self._is_resume_scheduled = True
                self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        """Run the turn that was queued because reads were not delivered yet.

        At most one such turn is queued at a time, and only this method allows the next one. Turns
        started by the poll run in between. If each of them queued another turn, the other callbacks
        of the loop would wait for all of them.
        """
        self._is_resume_scheduled = False
        self._run_turn()

    def _run_pass(self, turn_ends_at: int) -> bool:
        """Read what is ready, call `on_wake` and `on_tick` when they are due, and deliver.

        A pass is one step of a turn, which is one call from the event loop. A turn has several
        passes only in a load generator, for which `turn_ns` is above 0.

        Args:
            turn_ends_at: When to return to the event loop, monotonic in ns.

        Returns:
            Whether another pass is to follow in this turn.
        """
        self.turn_count += 1
        has_backlog = self._receiver.queued_reads >= BACKLOG_LIMIT
        if has_backlog:
            # Nothing more is read before reads are delivered, so that memory stays bounded.
            now = self._wake_and_deliver(monotonic_ns())
        else:
            now = self._receive(turn_ends_at)

        if now >= self._next_tick_at:
            self._run_tick(now)

        has_single_pass = self.turn_ns == 0
        if has_single_pass or now >= turn_ends_at:
            return False

        has_traffic = self._receiver.ready_count > 0 or len(self._queue) > 0
        if has_traffic:
            return True

        return self.on_idle is not None and self.on_idle()

    def _run_tick(self, now: int) -> None:
        """Call `on_tick`, and plan the next tick."""
        self._forget_armed_timer()
        self._next_tick_at = now + TICK_NS
        if self.on_tick is not None:
            self.on_tick(now)

    def _forget_armed_timer(self) -> None:
        """Note that the timer is set for no time, so that the next `_arm_timer` sets it.

        The timer may have fired. `_arm_timer` does nothing if it is set for the right time already.
        """
        self._receiver.timer_armed_for = 0

    def _receive(self, turn_ends_at: int) -> int:
        """Read what is ready, handle all other events, and deliver for a limited time.

        A load generator waits for traffic in the receiver's own poll for as long as the turn lasts.
        Any other client only looks what is ready, and the event loop does the waiting.

        Args:
            turn_ends_at: When to return to the event loop, monotonic in ns.

        Returns:
            The time after that, monotonic in ns.
        """
        is_load_generator = self.turn_ns > 0
        if is_load_generator:
            unhandled = self._wait_and_receive(turn_ends_at)
        else:
            unhandled = self._receiver.receive(NO_WAIT_MS, AFTER_ONE_PASS, NO_TIMER)

        now = self._receiver.now
        if unhandled is None:  # Everything was handled and delivered already.
            return now

        for fd, _events in unhandled:
            self._handle_event(fd)

        return self._wake_and_deliver(now)

    def _wait_and_receive(self, turn_ends_at: int) -> list[tuple[int, int]] | None:
        """Wait for traffic until the turn ends, and read it.

        Returns:
            The (descriptor, events) pairs that are left to handle, or None if the compiled receiver
            has already handled and delivered everything.
        """
        max_wait_ms = IDLE_WAIT_MS if self.on_idle is not None else WAIT_FOREVER_MS
        return self._receiver.receive_and_deliver(
            max_wait_ms,
            turn_ends_at,
            self._next_tick_at,
            self.open_exchanges,
            self.delivery_slice_ns,
            self._deliver_queued,
        )

    def _wake_and_deliver(self, now: int) -> int:
        """Call `on_wake` if it is time, then deliver queued reads for `delivery_slice_ns`.

        Returns:
            The time after that, monotonic in ns. It is `now` if nothing was delivered.
        """
        receiver = self._receiver
        if now >= receiver.wake_at and self.on_wake is not None:
            self._forget_armed_timer()
            self.on_wake(now)
        if self._queue:
            return receiver.deliver_queued(self.delivery_slice_ns, self._deliver_queued)
        return now

    def _handle_event(self, fd: int) -> None:
        """Handle an event of the timer, or of a socket that can be written.

        A socket that connects can be written when TCP has connected or failed. The only descriptor
        that belongs to no connection is that of the timer.
        """
        connection = self._connections.get(fd)
        if connection is None:
            self._clear_timer()
        elif connection.state == "connecting":
            self._handle_tcp_connected(connection)
        elif not connection.is_closed:
            self._send_unsent(connection)

    def _clear_timer(self) -> None:
        """Clear the timer after it has fired, and note what that proves about the sockets.

        A poll reported the timer, so it looked at all sockets after the time for which the timer
        was set. Every socket that it did not report was therefore still empty at that time. This
        counts like a poll that began then.
        """
        receiver = self._receiver
        fired_at = receiver.timer_armed_for
        receiver.last_poll_at = max(receiver.last_poll_at, fired_at)
        self._forget_armed_timer()
        self._timer.clear()

    # -- making a connection -------------------------------------------------------------------

    def _handle_tcp_connected(self, connection: ClientConnection) -> None:
        """Continue to open a connection after TCP has connected, or fail it if TCP has failed.

        The steps are the request for a tunnel if there is a proxy for https, then the TLS handshake
        if there is TLS, and then `connection_made` of the owner.
        """
        error_number = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error_number:
            self.fail(connection, "connect", os.strerror(error_number))
            return

        self._poll.modify(connection.fd, READABLE)
        now = monotonic_ns()
        connection.emptied_at = now
        connection.tcp_connect_ns = now - connection.connecting_since

        connection.is_readable = True
        if connection.tunnel_request:
            connection.state = "tunnel"
            # These are the first bytes of a connection, so the socket always accepts them.
            connection.sock.send(connection.tunnel_request)
        elif connection.tls is not None:
            self._begin_handshake(connection, connection.tls)
        else:
            self._report_connected(connection)

    def _receive_from_proxy(self, connection: ClientConnection, data: bytes) -> None:
        """Collect the response of a proxy to the request for a tunnel, and begin TLS at its end.

        `connection.proxy_response` holds what the proxy has sent so far. There is always TLS,
        because only https goes through a tunnel.
        """
        connection.proxy_response += data
        if b"\r\n\r\n" not in connection.proxy_response:
            return

        refusal = tunnel_refusal(connection.proxy_response)
        if refusal:
            self.fail(connection, "connect", refusal)
            return

        assert connection.tls is not None
        self._begin_handshake(connection, connection.tls)

    def _begin_handshake(self, connection: ClientConnection, tls: TlsStream) -> None:
        """Send the first message of the TLS handshake."""
        connection.state = "handshake"
        connection.handshake_since = monotonic_ns()
        self._continue_handshake(connection, tls)

    def _continue_handshake(self, connection: ClientConnection, tls: TlsStream) -> None:
        """Go on with the TLS handshake as far as the bytes received so far allow.

        Its output is sent in every case: after an error it is the alert that tells the server why.
        """
        try:
            is_complete = tls.continue_handshake()
        except ssl.SSLError as error:
            self._send_tls_output(connection, tls)
            self.fail(connection, "tls", tls_error_text(error))
            return

        self._send_tls_output(connection, tls)
        if is_complete:
            connection.tls_handshake_ns = monotonic_ns() - connection.handshake_since
            self._report_connected(connection)

    def _report_connected(self, connection: ClientConnection) -> None:
        """Report to the owner that the connection is ready."""
        connection.state = "open"
        connection.owner.connection_made(connection, monotonic_ns())

    def _send_tls_output(self, connection: ClientConnection, tls: TlsStream) -> None:
        """Send the messages that TLS itself has produced, such as a part of the handshake.

        What the socket does not accept now is stored and sent later. An error of the socket is
        ignored here, because the next read reports it.
        """
        data = tls.take_output()
        if not data:
            return

        if connection.unsent:
            connection.unsent.append(data)
            return

        try:
            sent_bytes = connection.sock.send(data)
        except BlockingIOError:
            sent_bytes = 0
        except OSError:
            return

        if sent_bytes < len(data):
            self.send_rest(connection, (data,), sent_bytes)

    # -- delivering reads ----------------------------------------------------------------------

    def deliver(self, connection: ClientConnection) -> None:
        """Give the owner the reads that the connection has kept so far."""
        if connection.tls is not None or connection.is_closed:
            return
        reads = self._receiver.take_reads(connection)
        if reads:
            connection.owner.receive_reads(connection, reads)

    def _deliver_queued(self, connection: ClientConnection) -> None:
        """Pass the reads of a connection to its owner, and then report the end of the connection.

        `ended_at` is 0 as long as the connection has not ended. The owner may itself close the
        connection when it gets the reads. Then the end is not reported.
        """
        reads = self._receiver.take_reads(connection)
        connection.is_queued = False
        if connection.is_closed:
            return

        if connection.tls is not None:
            self._deliver_encrypted(connection, connection.tls, reads)
            return

        if reads:
            connection.owner.receive_reads(connection, reads)

        if connection.ended_at and not connection.is_closed:
            error = socket_error_text(connection.error)
            self._report_connection_end(connection, connection.ended_at, error)

    def _report_connection_end(
        self, connection: ClientConnection, timestamp: int, error: str
    ) -> None:
        """Close a connection that the server or an error has ended, and report that to its owner.

        A connection that was never ready has failed, even if the server closed it regularly.

        Args:
            connection: The connection.
            timestamp: When it ended.
            error: The text of the error, or "" for a regular end.
        """
        if connection.is_opening:
            kind = "tls" if connection.state == "handshake" else "connect"
            text = error or "the connection was closed while it was being opened"
            self.fail(connection, kind, text)
            return

        connection.state = "ended"
        connection.owner.connection_lost(connection, timestamp, error)
        self.close(connection)

    def _deliver_encrypted(
        self, connection: ClientConnection, tls: TlsStream, reads: list[Read | PlainRun]
    ) -> None:
        """Decrypt the reads of a connection, pass them to its owner, and report its end.

        Two steps may close the connection: decryption if the handshake fails, and the owner.
        """
        # No `PlainRun` is among them, since the receiver counts only events that are not encrypted.
        decrypted = self._decrypt_reads(connection, tls, reads)  # type: ignore[arg-type]
        if connection.is_closed:
            return

        if connection.state == "open" and decrypted.error is None:
            self._send_tls_output(connection, tls)  # for example the answer to a key update

        if decrypted.reads:
            connection.owner.receive_reads(connection, decrypted.reads)

        if not connection.is_closed:
            self._report_encrypted_end(connection, decrypted)

    def _report_encrypted_end(
        self, connection: ClientConnection, decrypted: _DecryptedReads
    ) -> None:
        """Report the end of an encrypted connection to its owner, if it has ended.

        There are three ways for it to end: bytes that cannot be decrypted, the end of the TCP
        connection, and a message of TLS that announces the end.
        """
        if decrypted.error is not None:
            self._handle_tls_error(connection, decrypted.error, decrypted.last_timestamp)
            return

        has_tcp_ended = connection.ended_at != 0
        if has_tcp_ended:
            ended_at = connection.ended_at
        elif decrypted.has_ended:
            ended_at = decrypted.last_timestamp
        else:
            return

        error_text = socket_error_text(connection.error)
        self._report_connection_end(connection, ended_at, error_text)

    def _decrypt_reads(
        self, connection: ClientConnection, tls: TlsStream, reads: list[Read]
    ) -> _DecryptedReads:
        """Return what the reads of a connection hold after decryption, with their timestamps.

        The first reads of a connection open it: the response of a proxy, and the TLS handshake.
        They hold nothing for the owner, and close the connection if they are an error. Later reads
        are decrypted, up to the end of the TLS stream or an error.

        Args:
            connection: The connection.
            tls: Its TLS layer.
            reads: The encrypted reads, in their order.
        """
        result = _DecryptedReads()

        # The compiled receiver makes plain tuples, so the fields of a read have no names here.
        for encrypted_data, timestamp, read_at, empty_at, from_kernel in reads:
            result.last_timestamp = timestamp
            self._receive_encrypted(connection, tls, encrypted_data)
            if connection.is_closed:
                return result

            if connection.state == "open":
                decrypted = tls.decrypt()
                if decrypted.data:
                    decrypted_read = Read(decrypted.data, timestamp, read_at, empty_at, from_kernel)
                    result.reads.append(decrypted_read)
                result.has_ended = decrypted.has_ended
                result.error = decrypted.error

            if result.has_ended or result.error is not None:
                return result

        return result

    def _receive_encrypted(self, connection: ClientConnection, tls: TlsStream, data: bytes) -> None:
        """Pass the bytes of a read to whoever waits for them, which depends on the state.

        While a proxy opens the tunnel, the bytes are the response of the proxy. Later they are
        messages of TLS. The first of these messages belong to the handshake, which continues with
        them, and the others are decrypted by the caller.
        """
        if connection.state == "tunnel":
            self._receive_from_proxy(connection, data)
            return
        tls.receive(data)
        if connection.state == "handshake":
            self._continue_handshake(connection, tls)

    def _handle_tls_error(
        self, connection: ClientConnection, error: ssl.SSLError, timestamp: int
    ) -> None:
        """End a connection whose bytes cannot be decrypted, for example after an alert of TLS.

        If a request is in flight on the connection, it fails with an error of TLS. Without one, no
        request has failed, and only the end of the connection is reported.
        """
        text = tls_error_text(error)
        if connection.exchange is None:
            self._report_connection_end(connection, timestamp, text)
        else:  # For example an alert about our certificate, sent after the handshake.
            self.fail(connection, "tls", text)
