"""An HTTP connection for reading a page again and again from a thread that may block."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from http.client import HTTPConnection, HTTPResponse
    from socket import socket

READ_BYTES = 1 << 16


class PageConnection:
    """A connection that is kept open between requests and reopened after a failure.

    `context` is the TLS configuration, or None for plain TCP. A connection attempt and the reading
    of a response body may each take `timeout_s`, however slowly the server sends.
    """

    def __init__(
        self, host: str, port: int, context: ssl.SSLContext | None, timeout_s: float
    ) -> None:
        # Imported here because a run that reads no page does not need this client at its start.
        from http.client import HTTPConnection, HTTPSConnection

        self._timeout_s = timeout_s
        self._connection: HTTPConnection
        if context is None:
            self._connection = HTTPConnection(host, port, timeout=timeout_s)
        else:
            self._connection = HTTPSConnection(host, port, timeout=timeout_s, context=context)

    def request(
        self, method: str, path: str, headers: Mapping[str, str], max_bytes: int
    ) -> tuple[int, bytes]:
        """Send a request without a body and return the status and the body of the response.

        After any failure the connection is closed, and the next request opens a new one.

        Raises:
            ConnectionError: The server closed the connection before it responded.
            OSError: The server cannot be reached in time.
            ValueError: The response is malformed or longer than `max_bytes`.
        """
        # A run that reads no page does not need this client at its start.
        from http.client import HTTPException

        try:
            return self._exchange(method, path, headers, max_bytes)
        # Some exceptions of http.client are errors of these types already.
        except (OSError, ValueError):
            self.close()
            raise
        except HTTPException as error:
            self.close()
            raise ValueError(f"malformed response: {error!r}") from error

    def _exchange(
        self, method: str, path: str, headers: Mapping[str, str], max_bytes: int
    ) -> tuple[int, bytes]:
        """Send a request over the open connection or a new one, and read the response."""
        if self._connection.sock is None:
            self._connection.connect()

        # The client drops its reference to the socket when the response is complete, but reading
        # the body changes the timeout of the socket, so it is needed here.
        sock = self._connection.sock
        sock.settimeout(self._timeout_s)
        self._connection.request(method, path, headers=dict(headers))

        with self._connection.getresponse() as response:
            return response.status, self._read_body(response, sock, max_bytes)

    def close(self) -> None:
        """Close the connection. The next request opens it again."""
        self._connection.close()

    def _read_body(self, response: HTTPResponse, sock: socket, max_bytes: int) -> bytes:
        """Return the body of a response, which must arrive completely within the timeout.

        The timeout of a socket applies to each single read. A server that sends a byte now and then
        would never exceed it. So before each read, it is shortened to the time that remains.

        Args:
            response: The response.
            sock: The socket from which it is read.
            max_bytes: The largest size of the body.

        Raises:
            ValueError: The body takes too long, is too large, or ends too early.
        """
        deadline_s = monotonic() + self._timeout_s
        body = bytearray()
        while chunk := response.read1(READ_BYTES):
            body += chunk
            remaining_s = deadline_s - monotonic()
            is_too_slow = remaining_s <= 0
            is_too_large = len(body) > max_bytes
            if is_too_slow or is_too_large:
                raise ValueError(f"{len(body):,} bytes after {self._timeout_s:g} s")

            # From Python 3.13 on, a response closes itself after the last byte of its body. The
            # socket may then be closed, too, and has no timeout to set.
            if response.isclosed():
                break

            sock.settimeout(remaining_s)

        missing_bytes = response.length  # None if the server did not send the length.
        if missing_bytes:
            raise ValueError(f"the response ends {missing_bytes:,} bytes too early")

        return bytes(body)
