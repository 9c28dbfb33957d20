"""One connection of the simulated server: reads HTTP requests from a socket and writes bytes to it.

It knows HTTP and sockets, but not what requests and responses mean. A write goes to the kernel at
once, inside the caller's call, because the log records the time of the send. What the kernel does
not accept is buffered up to a limit. If a client reads so slowly that the limit is exceeded, its
connection is reset.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from typing import Any, Protocol

import httptools

from loadgen.sim.server.http_messages import HttpRequest

MAX_HEADER_BYTES = 64 << 10
MAX_PIPELINED_REQUESTS = 16  # that may wait behind the one being answered
RECV_BYTES = 256 << 10
INCOMPLETE_REQUEST_TIMEOUT_NS = 60_000_000_000
_LINGER_WITH_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on with timeout 0: close sends a reset


class ConnectionOwner(Protocol):
    """What a connection needs from its server."""

    max_body_bytes: int
    max_buffered_bytes: int

    def handle_request(self, connection: Connection, request: HttpRequest) -> None:
        """Answer a request. The request before it on this connection has been answered."""

    def watch_writable(self, connection: Connection, is_wanted: bool) -> None:
        """Start or stop calling `on_writable` when the socket accepts bytes again."""

    def count_slow_reader(self) -> None:
        """Note that a connection is reset because its client reads too slowly."""

    def remove_connection(self, connection: Connection) -> None:
        """Forget a connection, which is closed by either side."""


class Connection:
    """An accepted connection and its HTTP parser.

    Attributes:
        sock: The socket, which does not block.
        owner: The server, which answers requests and watches the socket.
        fd: The file descriptor of the socket.
        response: The server's state of the response that is being written, or None if there is
            none. The next request is handled after `finish_response`.
        idle_since_ns: When the connection last received bytes or finished a response.
        responses_sent: How many responses were finished.
        closed: Whether the connection is closed.
    """

    def __init__(self, sock: socket.socket, owner: ConnectionOwner) -> None:
        """Take over an accepted socket. The class describes the attributes."""
        self.sock = sock
        self.owner = owner
        self.fd = sock.fileno()
        self.response: object | None = None
        self.idle_since_ns = time.monotonic_ns()
        self.responses_sent = 0
        self.closed = False
        self._close_after_response = False
        self._is_draining = False  # everything is sent, and the client has to stop sending
        self._is_request_incomplete = False
        self._unsent: bytearray | None = None  # bytes that the kernel has not accepted yet
        self._pending: deque[HttpRequest] = deque()  # requests that wait for their responses
        self._reset_request()
        self._parser: Any = httptools.HttpRequestParser(self)

    # Reading

    def on_readable(self) -> None:
        """Read from the socket and handle the requests that are complete.

        The connection is closed if the client has closed its side. After the last response, what
        the client still sends is discarded.
        """
        try:
            data = self.sock.recv(RECV_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""

        if not data:
            self.close()
            return

        self.idle_since_ns = time.monotonic_ns()
        if not self._is_draining:
            self._parse(data)
            self._handle_next_request()

    def _parse(self, data: bytes) -> None:
        """Pass bytes to the parser, which calls the `on_...` methods below with what it finds.

        Invalid requests, and headers that are too long, are refused. Only the first refusal of a
        connection has an effect.
        """
        self._header_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an upgrade to another protocol, which is ignored; the request itself was read
        except httptools.HttpParserError:
            self._refuse(400)

        has_long_headers = not self._has_all_headers and self._header_bytes > MAX_HEADER_BYTES
        if has_long_headers:
            self._refuse(431)

    def on_message_begin(self) -> None:
        """Start a request (called by httptools)."""
        self._is_request_incomplete = True
        self._reset_request()

    def on_url(self, url: bytes) -> None:
        """Add a piece of the request target (called by httptools)."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header (called by httptools)."""
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Check the announced size, and confirm `Expect: 100-continue` (called by httptools).

        A client that sends this header waits for the confirmation before it sends the body. A body
        that is too large is refused before it is sent.
        """
        self._has_all_headers = True
        if int(self._headers.get(b"content-length", b"0")) > self.owner.max_body_bytes:
            self._refuse(413)
            return
        expects_continue = self._headers.get(b"expect", b"").lower() == b"100-continue"
        if expects_continue and not self._close_after_response:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """Add a piece of the body (called by httptools)."""
        self._body_bytes += len(data)
        if self._body_bytes > self.owner.max_body_bytes:
            self._refuse(413)
        elif not self._close_after_response:
            self._body_pieces.append(data)

    def on_message_complete(self) -> None:
        """Queue the complete request (called by httptools).

        A client may send several requests without waiting for the responses (HTTP pipelining). They
        are answered one after the other, so a request waits in the queue for those before it. A
        client that sends too many at once is refused.
        """
        self._is_request_incomplete = False
        if self._close_after_response:
            return

        request = HttpRequest(
            method=self._parser.get_method().decode("latin-1"),
            path=self._url.partition(b"?")[0].decode("latin-1"),
            headers=self._headers,
            body=b"".join(self._body_pieces),
            keep_alive=self._parser.should_keep_alive(),
            arrival_ns=time.monotonic_ns(),
        )
        self._pending.append(request)

        if len(self._pending) > MAX_PIPELINED_REQUESTS:
            self._refuse(400)

        self._reset_request()

    def _reset_request(self) -> None:
        """Clear what has been read of the current request."""
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body_pieces: list[bytes] = []
        self._body_bytes = 0
        # The bytes read since the request began, which are headers until all of these are read.
        self._header_bytes = 0
        self._has_all_headers = False

    def _refuse(self, status: int) -> None:
        """Answer with an HTTP error and read no more requests from this connection.

        The error must not overtake the responses to earlier requests. So a request that has only
        the status of the error waits in the queue, and the server answers it with the error.
        """
        if self._close_after_response:
            return

        self._close_after_response = True
        invalid_request = HttpRequest(
            method="",
            path="",
            headers={},
            body=b"",
            keep_alive=False,
            arrival_ns=time.monotonic_ns(),
            error_status=status,
        )
        self._pending.append(invalid_request)

    def _handle_next_request(self) -> None:
        """Pass the next complete request to the server, unless a response is being written."""
        if self.response is None and self._pending and not self.closed:
            self.owner.handle_request(self, self._pending.popleft())

    # Writing

    def write(self, data: bytes) -> None:
        """Pass `data` to the kernel now, or append it to the buffered bytes if there are some.

        If the buffer already exceeds its limit, the client reads too slowly, and the connection is
        reset. A single write may exceed the limit, because one long response does not mean that its
        reader is slow.
        """
        if self.closed:
            return

        buffer = self._unsent
        if buffer is None:
            self._send_or_buffer(data)
        elif len(buffer) > self.owner.max_buffered_bytes:
            self.owner.count_slow_reader()
            self.reset()
        else:
            buffer += data

    def _send_or_buffer(self, data: bytes) -> None:
        """Pass `data` to the kernel, and buffer the part that it does not accept now."""
        try:
            accepted_bytes = self.sock.send(data)
        except (BlockingIOError, InterruptedError):
            accepted_bytes = 0
        except OSError:
            self.close()
            return
        if accepted_bytes < len(data):
            self._unsent = bytearray(data[accepted_bytes:])
            self.owner.watch_writable(self, True)

    def on_writable(self) -> None:
        """Send buffered bytes. The server calls this when the socket accepts bytes again.

        After the last response, the connection is closed. If the last bytes of that response were
        still buffered when it ended, the connection is closed here, after they are sent.
        """
        buffer = self._unsent
        if buffer is None:
            return

        try:
            sent_bytes = self.sock.send(buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return

        del buffer[:sent_bytes]
        if buffer:
            return

        self._unsent = None
        self.owner.watch_writable(self, False)

        has_ended_last_response = self.response is None and not self._pending
        if has_ended_last_response and self._close_after_response:
            self._close_gracefully()

    def finish_response(self, keep_alive: bool) -> None:
        """Continue with the next request, or close the connection.

        The server calls this once per response, after its last byte is written or buffered. A
        connection with buffered bytes is closed later, when they are sent.
        """
        self.response = None
        self.responses_sent += 1

        self.idle_since_ns = time.monotonic_ns()
        if keep_alive and not self._close_after_response:
            self._handle_next_request()
            return

        self._close_after_response = True
        self._pending.clear()

        if self._unsent is None:
            self._close_gracefully()

    def _close_gracefully(self) -> None:
        """Close the connection after the last response, without a TCP reset.

        If the client is still sending a request, closing at once would cause a reset, and the
        client could lose the response. Then only the sending side is closed, and everything that
        the client sends is discarded until it closes its side, too.
        """
        if not self._is_request_incomplete:
            self.close()
            return

        self._is_draining = True
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()

    def is_overdue(self, now_ns: int, keep_alive_ns: int) -> bool:
        """Return whether the connection has been idle for too long and has to be closed.

        A connection with a response in progress, or with bytes to send, is not idle. The limit is
        the keep-alive time of the server if the connection waits for the next request, or for the
        client to close it. It is a minute if the connection waits for its first request, or for the
        rest of a request.

        Args:
            now_ns: The current time.
            keep_alive_ns: The keep-alive time of the server.
        """
        is_busy = self.response is not None or self._unsent is not None
        if is_busy:
            return False

        is_between_requests = self.responses_sent > 0 and not self._is_request_incomplete
        if is_between_requests or self._is_draining:
            limit_ns = keep_alive_ns
        else:
            limit_ns = INCOMPLETE_REQUEST_TIMEOUT_NS

        return now_ns - self.idle_since_ns > limit_ns

    def close(self) -> None:
        """Close the connection, and let the server cancel its response.

        A second call does nothing.
        """
        if self.closed:
            return

        self.closed = True
        self.owner.remove_connection(self)
        self.sock.close()

        # The parser refers to this connection. Without it there is no cycle, so the connection is
        # freed without the garbage collector.
        self._parser = None

    def reset(self) -> None:
        """Close with a TCP reset, so that the client loses what it has not read."""
        if not self.closed:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_WITH_RESET)
            self.close()
