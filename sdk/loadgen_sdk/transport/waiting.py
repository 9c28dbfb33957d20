"""An HTTP/1.1 connection for a thread that waits for its answers: one question at a time, a page now and then.

The load has `wire.py`; the standard library's own client would import the parser of mails.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from time import monotonic

from .http1 import Response, head

READ_BYTES = 1 << 16


class WaitingConnection:
    """Opened by its first question, and by the next one after an answer that ended it, or a failure.

    `context`: of TLS; None for plain TCP. `timeout_s`: for a whole answer: a server may send a byte now and then.
    """

    def __init__(
        self, host: str, port: int, context: ssl.SSLContext | None, timeout_s: float
    ) -> None:
        self._host, self._port, self._context, self._timeout_s = host, port, context, timeout_s
        self._socket: socket.socket | None = None

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], most_bytes: int
    ) -> tuple[int, bytes]:
        """The status and the body of an answer. Raises OSError, and ValueError for what is no answer, or too long.

        ConnectionError: the server closed the connection before it answered.
        """
        until = monotonic() + self._timeout_s
        response, parts, size = Response(), list[bytes](), 0
        try:
            stream = self._socket = self._socket or self._opened()
            stream.settimeout(self._timeout_s)
            stream.sendall(self._question(method, path, headers))
            while not response.complete:
                if (left_s := until - monotonic()) <= 0 or size > most_bytes:
                    raise ValueError(f"{size:,} bytes after {self._timeout_s:g} s")
                stream.settimeout(left_s)
                if data := stream.recv(READ_BYTES):
                    parts += response.feed(data)
                    size += len(data)
                elif not size:
                    raise ConnectionResetError("closed without an answer")
                elif not response.end_of_file():
                    raise ValueError("an answer that ends too early")
        except BaseException:
            self.close()
            raise
        if not response.reusable:
            self.close()
        return response.status, b"".join(parts)

    def close(self) -> None:
        """Close it; the next question opens it again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _opened(self) -> socket.socket:
        host = (
            self._host.encode() if self._host.isascii() else self._host
        )  # text imports the tables of IDNA
        found: socket.socket = socket.create_connection((host, self._port), self._timeout_s)  # type: ignore[arg-type]
        try:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return (
                found
                if self._context is None
                else self._context.wrap_socket(found, server_hostname=self._host)
            )
        except BaseException:
            found.close()
            raise

    def _question(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        usual = 80 if self._context is None else 443
        name = f"[{self._host}]" if ":" in self._host else self._host
        ours = {
            "Host": name if self._port == usual else f"{name}:{self._port}",
            "Accept-Encoding": "identity",
        }
        ours |= {"Content-Length": "0"} if method == "POST" else {}
        users = {one.lower() for one in headers}
        lines = [*(pair for pair in ours.items() if pair[0].lower() not in users), *headers.items()]
        return head(method, path, lines) + b"\r\n"
