"""One connection of the simulated server: bytes to whole HTTP requests, answers to bytes on a non-blocking socket.

It knows HTTP and sockets, and nothing of what is asked or answered. Writes go to the kernel at once, in the caller's
own stack frame, because the instant of the send is what the log claims to know; what the kernel does not take is kept
up to a bound, beyond which a reader too slow to matter is cut.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from typing import Any, Protocol

import httptools

from loadgen.sim.server.message import Incoming

MAX_HEADER_BYTES = 64 << 10
MAX_WAITING = 16  # pipelined requests that may wait behind the one being answered
RECV_BYTES = 256 << 10
PATIENCE_NS = 60_000_000_000  # for a request that does not come to its end
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, no time: close sends a reset


class Owner(Protocol):
    """What a connection needs of its server."""

    max_body_bytes: int
    buffer_bytes: int
    slow_readers: int

    def requested(self, connection: Connection, incoming: Incoming) -> None:
        """A request is to be answered; the one before it on this connection has been."""

    def watch_writable(self, connection: Connection, wanted: bool) -> None:
        """Call `writable` when the socket takes bytes again."""

    def gone(self, connection: Connection) -> None:
        """The connection is closed, by either side."""


class Plain:
    """Bytes as they are. The TLS form of this is in tls.py."""

    __slots__ = ("recv", "send")

    def __init__(self, sock: socket.socket) -> None:
        self.recv, self.send = sock.recv, sock.send


class Connection:
    """See the top of the file. `answer` is the server's own state of the request being answered; None: idle."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_close_after",
        "_draining",
        "_header_bytes",
        "_headers",
        "_kept",
        "_parser",
        "_partial",
        "_url",
        "_waiting",
        "answer",
        "closed",
        "fd",
        "idle_since",
        "owner",
        "served",
        "sock",
        "wire",
    )

    def __init__(self, sock: socket.socket, owner: Owner, wire: Any = None) -> None:
        self.sock, self.owner, self.fd = sock, owner, sock.fileno()
        self.wire = wire or Plain(sock)
        self.answer: Any = None
        self.idle_since = time.monotonic_ns()
        self.served = 0
        self.closed = self._close_after = self._draining = self._partial = False
        self._kept: bytearray | None = None
        self._waiting: deque[Incoming] = deque()
        self._fresh()
        self._parser: Any = httptools.HttpRequestParser(self)

    # Reading

    def readable(self) -> None:
        """The socket has bytes, or its end."""
        try:
            data = self.wire.recv(RECV_BYTES)
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
            pass  # an offer of another protocol that is not taken up; the request itself was read
        except httptools.HttpParserError:
            self._refuse(400)
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431)
        self._next()

    def on_message_begin(self) -> None:
        self._partial = True
        self._fresh()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._header_bytes = -(1 << 62)  # the count of what may still be header is over until the next request
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
        self._waiting.append(incoming)
        if len(self._waiting) > MAX_WAITING:
            self._refuse(400)
        self._fresh()

    def _fresh(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = self._header_bytes = 0

    def _refuse(self, status: int) -> None:
        """Nothing more is read from this connection; the answers before this one are still given."""
        if not self._close_after:
            self._close_after = True
            now = time.monotonic_ns()
            self._waiting.append(Incoming("", "", {}, b"", False, now, status))

    def _next(self) -> None:
        if self.answer is None and self._waiting and not self.closed:
            self.owner.requested(self, self._waiting.popleft())

    # Writing

    def write(self, data: bytes) -> None:
        """Hand `data` to the kernel now, or keep it in order behind what is kept already.

        Who reads too slowly is cut when there is more to say: one page of any length is no fault of its reader.
        """
        if self.closed:
            return
        kept = self._kept
        if kept is None:
            try:
                taken = self.wire.send(data)
            except (BlockingIOError, InterruptedError):
                taken = 0
            except OSError:
                self.close()
                return
            if taken == len(data):
                return
            self._kept = kept = bytearray(data[taken:])
            self.owner.watch_writable(self, True)
        elif len(kept) > self.owner.buffer_bytes:
            self.owner.slow_readers += 1
            self.reset()
        else:
            kept += data

    def writable(self) -> None:
        """The socket takes bytes again."""
        kept = self._kept
        if kept is None:
            return
        try:
            del kept[: self.wire.send(kept)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if not kept:
            self._kept = None
            self.owner.watch_writable(self, False)
            if self.answer is None and self._close_after and not self._waiting:
                self._finish()

    def answered(self, keep_alive: bool) -> None:
        """The answer is written (or kept): on to the next request, or to the end."""
        self.answer = None
        self.served += 1
        self.idle_since = time.monotonic_ns()
        if keep_alive and not self._close_after:
            self._next()
            return
        self._close_after = True
        self._waiting.clear()
        if self._kept is None:
            self._finish()

    def _finish(self) -> None:
        """The last answer is out. A client that is still sending must not meet a reset before it has read it."""
        if not self._partial:
            self.close()
            return
        self._draining = True
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()

    def overdue(self, now_ns: int, idle_ns: int) -> bool:
        """Idle for too long: `idle_ns` after an answer (as uvicorn counts), PATIENCE_NS with a request half sent or
        never begun."""
        if self.answer is not None or self._kept is not None:
            return False
        used = (self.served and not self._partial) or self._draining
        return now_ns - self.idle_since > (idle_ns if used else PATIENCE_NS)

    def close(self) -> None:
        """Close in order; harmless when closed."""
        if not self.closed:
            self.closed = True
            self.owner.gone(self)
            self.sock.close()
            self._parser = None  # it refers to this connection: nothing must wait for the cycle collector

    def reset(self) -> None:
        """Close by a TCP reset: what the peer has not read is lost."""
        if not self.closed:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.close()
