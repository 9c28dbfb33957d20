"""The simulated server's socket loop: one process, one epoll instance, raw sockets.

It does not use asyncio: every event is one `send` in the loop turn that finds it due, and a loop
around one epoll instance adds the least delay between the planned time and the kernel.
"""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress
from typing import Any

from loadgen_sdk.transport.timer import TimerFd

from loadgen.core.errors import TargetError, UserError, of_reading
from loadgen.sim.engine.latency_model import parse_duration_ns
from loadgen.sim.server import tls
from loadgen.sim.server.connection import Connection
from loadgen.sim.server.http_messages import HttpRequest
from loadgen.sim.server.options import Options
from loadgen.sim.server.request_handler import RequestHandler
from loadgen.sim.server.response import SimResponse

IDLE_CHECK_S = 0.25  # idle connections are closed at most this late
MAX_WAIT_S = 60.0  # of a poll without connections
MAX_ACCEPTS = 256  # connections accepted in one turn, so that streams are not delayed for long
LISTEN_BACKLOG = 4096
STDIN_READ_BYTES = 4096
NS_PER_S = 1_000_000_000
TIMER_NOT_SET = -1  # no time at which the timer could end
_EDGE_TRIGGERED = getattr(select, "EPOLLET", 0)
_HANGUP = select.POLLERR | select.POLLHUP


class SimServer:
    """The endpoint. `run` serves until `stop` is called; `close` releases everything."""

    def __init__(self, options: Options) -> None:
        """Create the server and listen on its port. No connection is accepted before `run`.

        Raises UserError, CombinedError or TargetError if the options are not valid or the address
        cannot be used.
        """
        self.max_body_bytes = options.max_body_bytes
        self.max_buffered_bytes = options.buffer_bytes
        self._handler = RequestHandler(options)
        self._sender = self._handler.sender
        self._log_path = options.log
        self._create_log_file()
        self._keep_alive_ns = parse_duration_ns(options.idle_close, "--idle-close")

        self._connections: dict[int, Connection] = {}  # by file descriptor
        self._last_idle_check_ns = 0
        self._is_stopping = False
        self._listener = _listen(options)
        self._tls = tls.create_context(options.cert, options.key) if options.cert else None
        self.url = _format_url(self._listener, is_tls=self._tls is not None)
        self._create_poll()

    def _create_poll(self) -> None:
        """Create the poll object, by which the event loop waits until something happens.

        It watches three file descriptors from the beginning: the listening socket, a timer for what
        is due next, and a socket by which `stop` wakes up the loop. Connections are added when they
        are accepted.
        """
        has_epoll = hasattr(select, "epoll")  # Linux has it, other systems have only `poll`
        self._poll: Any = select.epoll() if has_epoll else select.poll()

        # The timeout of an epoll is in s, and that of a poll is in ms.
        self._timeout_units_per_s = 1 if has_epoll else 1000
        self._poll.register(self._listener.fileno(), select.POLLIN)

        self._timer = self._create_timer()
        self._timer_due_ns = TIMER_NOT_SET

        self._wake_receiver, self._wake_sender = _create_wake_sockets()
        self._poll.register(self._wake_receiver.fileno(), select.POLLIN)

    def run(self, stdin_fd: int = -1) -> None:
        """Serve until `stop` is called, or until the file with the descriptor `stdin_fd` ends.

        A parent process keeps the other end of this file open as long as it needs the server. -1
        means that there is no such file.
        """
        if stdin_fd >= 0:
            self._poll.register(stdin_fd, select.POLLIN)

        listener_fd = self._listener.fileno()
        while not self._is_stopping:
            timeout_s = self._prepare_wait()
            for fd, events in self._poll.poll(timeout_s * self._timeout_units_per_s):
                connection = self._connections.get(fd)
                if connection is not None:
                    _handle_connection_events(connection, events)
                elif fd == listener_fd:
                    self._accept()
                elif fd == stdin_fd:
                    self._read_stdin(stdin_fd)

            self._sender.send_due(time.monotonic_ns())
            self._close_idle_connections()

    def _read_stdin(self, stdin_fd: int) -> None:
        """Read and discard what the parent process has sent, and stop if it has closed the file."""
        data = os.read(stdin_fd, STDIN_READ_BYTES)
        if not data:
            self._is_stopping = True

    def stop(self, *_: object) -> None:
        """End `run` after this turn. It can be used as a signal handler."""
        self._is_stopping = True
        with suppress(OSError):  # the socket is closed, or its buffer is full of earlier wake-ups
            self._wake_sender.send(b"\0")

    def close(self) -> None:
        """Write the log, if it has a file, and close everything.

        Connections that are still open are closed in the middle of their responses.
        """
        if self._log_path:
            with open(self._log_path, "wb") as file:
                file.write(self._handler.log.drain())

        for connection in list(self._connections.values()):
            connection.close()

        self._listener.close()
        self._wake_receiver.close()
        self._wake_sender.close()

        if self._timer is not None:
            self._timer.close()

        if hasattr(self._poll, "close"):  # select.poll has no such method
            self._poll.close()

    # Called by connections (see `ConnectionOwner`)

    def handle_request(self, connection: Connection, request: HttpRequest) -> None:
        """Answer a request. The request before it on this connection has been answered."""
        counters = self._handler.counters
        counters.open_connections = len(self._connections)
        self._handler.handle(connection, request)

    def watch_writable(self, connection: Connection, is_wanted: bool) -> None:
        """Start or stop calling `on_writable` when the socket accepts bytes again."""
        events = select.POLLIN | select.POLLOUT if is_wanted else select.POLLIN
        self._poll.modify(connection.fd, events)

    def count_slow_reader(self) -> None:
        """Note that a connection is reset because its client reads too slowly."""
        self._handler.counters.slow_readers += 1

    def remove_connection(self, connection: Connection) -> None:
        """Forget a closed connection, and cancel its response."""
        self._poll.unregister(connection.fd)
        del self._connections[connection.fd]
        if isinstance(connection.response, SimResponse):
            self._sender.cancel(connection.response)

    def _create_log_file(self) -> None:
        """Create the log file, so that a wrong path fails now rather than after the run.

        Raises UserError if the file cannot be written.
        """
        if not self._log_path:
            return
        try:
            open(self._log_path, "wb").close()
        except OSError as error:
            error_code = of_reading(error)  # the same codes as for files that are read
            problem = f"cannot be opened: {error.strerror}"
            raise UserError(error_code, problem, str(error.filename)) from None

    def _create_timer(self) -> TimerFd | None:
        """Return a timer that ends the poll, or None if the system has none.

        Without a timer the timeout of the poll is used, which is less precise.
        """
        try:
            timer = TimerFd()
            self._poll.register(timer.fileno(), select.POLLIN | _EDGE_TRIGGERED)
        except OSError:
            return None
        return timer

    def _prepare_wait(self) -> float:
        """Return the timeout of the next wait for events in seconds, and set the timer.

        The wait has to end when something has to be sent. For this the timer is set, because its
        resolution is nanoseconds, while that of a timeout is milliseconds. A system without a timer
        uses the timeout. With a timer, the timeout only makes sure that idle connections are
        checked from time to time.
        """
        max_wait_s = IDLE_CHECK_S if self._connections else MAX_WAIT_S
        due_ns = self._sender.next_due_ns()
        if due_ns is None:
            return max_wait_s

        wait_ns = due_ns - time.monotonic_ns()
        is_due_now = wait_ns <= 0
        if is_due_now:
            return 0
        if self._timer is None:
            return min(max_wait_s, wait_ns / NS_PER_S)

        is_timer_set = due_ns == self._timer_due_ns
        if not is_timer_set:
            self._timer.arm(due_ns)
            self._timer_due_ns = due_ns

        return max_wait_s

    def _accept(self) -> None:
        """Accept the waiting connections, at most MAX_ACCEPTS of them in one turn of the loop.

        Small writes are sent at once (TCP_NODELAY), because each token is a write of its own.
        """
        for _ in range(MAX_ACCEPTS):
            try:
                sock, _address = self._listener.accept()
            except OSError:
                return  # none is left, or there is no free file descriptor for it

            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

            connection = Connection(sock, self)
            self._connections[connection.fd] = connection
            self._poll.register(connection.fd, select.POLLIN)

    def _close_idle_connections(self) -> None:
        """Close the connections that have been idle for too long.

        The check takes place about four times a second, because a check of all connections in every
        turn of the loop would delay the streams.
        """
        now_ns = time.monotonic_ns()
        if now_ns < self._last_idle_check_ns + IDLE_CHECK_S * NS_PER_S:
            return

        self._last_idle_check_ns = now_ns
        overdue = [
            connection
            for connection in self._connections.values()
            if connection.is_overdue(now_ns, self._keep_alive_ns)
        ]
        for connection in overdue:
            connection.close()


def _handle_connection_events(connection: Connection, events: int) -> None:
    """Let a connection send and read, according to the events of its socket.

    A socket with an error, or whose client has gone, is read, too: reading finds the cause.
    """
    if events & select.POLLOUT:
        connection.on_writable()
    is_readable = events & (select.POLLIN | _HANGUP)
    if is_readable and not connection.closed:
        connection.on_readable()


def _listen(options: Options) -> socket.socket:
    """Return a listening socket. Raises TargetError if the address cannot be used.

    Several processes may listen on one port; the kernel then distributes the connections.
    """
    try:
        addresses = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = addresses[0]
        listener = socket.create_server(
            address[:2], family=family, backlog=LISTEN_BACKLOG, reuse_port=options.cores > 1
        )
    except OSError as error:
        raise TargetError(
            "cannot_listen",
            f"cannot listen: {error}",
            f"{options.host}:{options.port}",
            "another --port, or 0 for any free one",
        ) from None

    listener.setblocking(False)
    return listener


def _create_wake_sockets() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets: a byte that is sent by the second ends a poll of the first.

    A signal handler uses them, because a signal alone does not end a poll in Python.
    """
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    return receiver, sender


def _format_url(listener: socket.socket, *, is_tls: bool) -> str:
    """Return the URL of a listening socket. An IPv6 address is put in brackets."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
