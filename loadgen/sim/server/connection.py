"""One connection of the simulated server: bytes to complete HTTP requests, responses to bytes on a socket.

It knows HTTP and sockets, but not what the requests and responses mean. A write goes to the kernel at once, inside the
caller's call, because the log records the time of the send. What the kernel does not accept is buffered up to a limit.
If a client reads so slowly that the limit is exceeded, its connection is reset.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from typing import Any, Protocol

import httptools

from loadgen.sim.server.http_messages import Incoming

MAX_HEADER_BYTES = 64 << 10
MAX_WAITING = 16  # pipelined requests that may wait behind the one being answered
RECV_BYTES = 256 << 10
PATIENCE_NS = 60_000_000_000  # for a request that is never completed
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on with timeout 0: close sends a reset


class Owner(Protocol):
    """What a connection needs from its server."""

    max_body_bytes: int
    buffer_bytes: int
    slow_readers: int

    def requested(self, connection: Connection, incoming: Incoming) -> None:
        """Answer this request; the one before it on this connection has been answered."""

    def watch_writable(self, connection: Connection, wanted: bool) -> None:
        """Call `writable` when the socket accepts bytes again; no longer if `wanted` is False."""

    def gone(self, connection: Connection) -> None:
        """The connection is closed, by either side."""


class Connection:
    """See the module docstring. `answer` is the server's state of the request being answered; None: idle."""

    def __init__(self, sock: socket.socket, owner: Owner) -> None:
        self.sock, self.owner, self.fd = sock, owner, sock.fileno()
        self.answer: Any = None
        self.idle_since = time.monotonic_ns()
        self.served = 0
        self.closed = self._close_after = self._draining = self._partial = False
        self._unsent: bytearray | None = None
        self._pending: deque[Incoming] = deque()
        self._reset_message()
        self._parser: Any = httptools.HttpRequestParser(self)

    # Reading

    def readable(self) -> None:
        """The socket has bytes to read, or the client has closed it."""
        try:
            data = self.sock.recv(RECV_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self.idle_since = time.monotonic_ns()
        if self._draining:
            return
        self._header_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # an upgrade to another protocol, which is ignored; the request itself was read
        except httptools.HttpParserError:
            self._refuse(400)
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431)
        self._next()

    def on_message_begin(self) -> None:
        self._partial = True
        self._reset_message()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._header_bytes = -(1 << 62)  # stop counting header bytes until the next request
        if int(self._headers.get(b"content-length", b"0")) > self.owner.max_body_bytes:
            self._refuse(413)
        elif self._headers.get(b"expect", b"").lower() == b"100-continue" and not self._close_after:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body_bytes += len(data)
        if self._body_bytes > self.owner.max_body_bytes:
            self._refuse(413)
        elif not self._close_after:
            self._body.append(data)

    def on_message_complete(self) -> None:
        self._partial = False
        if self._close_after:
            return
        parser = self._parser
        incoming = Incoming(
            method=parser.get_method().decode("latin-1"),
            path=self._url.partition(b"?")[0].decode("latin-1"),
            headers=self._headers,
            body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
            keep_alive=parser.should_keep_alive(),
            arrival_ns=time.monotonic_ns(),
        )
        self._pending.append(incoming)
        if len(self._pending) > MAX_WAITING:
            self._refuse(400)
        self._reset_message()

    def _reset_message(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = self._header_bytes = 0

    def _refuse(self, status: int) -> None:
        """Read nothing more from this connection. Earlier requests are still answered."""
        if not self._close_after:
            self._close_after = True
            now = time.monotonic_ns()
            self._pending.append(Incoming("", "", {}, b"", False, now, status))

    def _next(self) -> None:
        if self.answer is None and self._pending and not self.closed:
            self.owner.requested(self, self._pending.popleft())

    # Writing

    def write(self, data: bytes) -> None:
        """Pass `data` to the kernel now, or append it to what is already buffered.

        A client that reads too slowly is reset at the next write beyond the limit. One single long page does not count
        against its reader.
        """
        if self.closed:
            return
        buffer = self._unsent
        if buffer is None:
            try:
                n_accepted = self.sock.send(data)
            except (BlockingIOError, InterruptedError):
                n_accepted = 0
            except OSError:
                self.close()
                return
            if n_accepted == len(data):
                return
            self._unsent = buffer = bytearray(data[n_accepted:])
            self.owner.watch_writable(self, True)
        elif len(buffer) > self.owner.buffer_bytes:
            self.owner.slow_readers += 1
            self.reset()
        else:
            buffer += data

    def writable(self) -> None:
        """The socket accepts bytes again."""
        buffer = self._unsent
        if buffer is None:
            return
        try:
            del buffer[: self.sock.send(buffer)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if not buffer:
            self._unsent = None
            self.owner.watch_writable(self, False)
            if self.answer is None and self._close_after and not self._pending:
                self._finish()

    def answered(self, keep_alive: bool) -> None:
        """The response is written or buffered: continue with the next request, or close."""
        self.answer = None
        self.served += 1
        self.idle_since = time.monotonic_ns()
        if keep_alive and not self._close_after:
            self._next()
            return
        self._close_after = True
        self._pending.clear()
        if self._unsent is None:
            self._finish()

    def _finish(self) -> None:
        """The last response is sent. Close, unless the client is still sending.

        A client that is still sending must not get a reset before it has read the response.
        """
        if not self._partial:
            self.close()
            return
        self._draining = True
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()

    def overdue(self, now_ns: int, idle_ns: int) -> bool:
        """Whether the connection was idle for too long.

        The limit is `idle_ns` after a response (as uvicorn counts), and PATIENCE_NS for an incomplete or missing
        request.
        """
        if self.answer is not None or self._unsent is not None:
            return False
        used = (self.served and not self._partial) or self._draining
        return now_ns - self.idle_since > (idle_ns if used else PATIENCE_NS)

    def close(self) -> None:
        """Close normally. Does nothing if already closed."""
        if not self.closed:
            self.closed = True
            self.owner.gone(self)
            self.sock.close()
            self._parser = None  # it refers to this connection: break the cycle, so that no collection is needed

    def reset(self) -> None:
        """Close with a TCP reset: the peer loses what it has not read."""
        if not self.closed:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.close()
