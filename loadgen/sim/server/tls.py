"""TLS for the simulated server's raw sockets: `ssl.MemoryBIO` between TLS records and the socket.

Has the `recv` and `send` of a socket. Only the server's connections use it; nothing here knows HTTP.
"""

from __future__ import annotations

import socket
import ssl

from loadgen.errors import UserError

_RECORDS_BYTES = 256 << 10


def context(cert: str, key: str) -> ssl.SSLContext:
    """A context with this certificate and key (PEM files). Raises UserError if they cannot be loaded."""
    ssl_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        ssl_context.load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"cannot load the certificate: {error}", f"{cert}, {key}", "two PEM files that match") from None
    return ssl_context


class TlsSocket:
    """TLS over a non-blocking socket.

    `recv` returns decrypted bytes, `b""` at the end, and raises BlockingIOError if there are none. `send` accepts all
    data and keeps the records that the kernel did not accept; they are sent first next time. The handshake takes place
    while it is read.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._pending = b""

    def recv(self, limit: int) -> bytes:
        data = self._sock.recv(_RECORDS_BYTES)
        if not data:
            return b""
        self._in.write(data)
        plain = bytearray()
        try:
            while True:  # read everything decrypted: data left inside would not make the socket readable
                piece = self._tls.read(limit)
                if not piece:
                    return bytes(plain)
                plain += piece
        except ssl.SSLWantReadError:
            pass
        finally:
            self._flush()
        if not plain:
            raise BlockingIOError
        return bytes(plain)

    def send(self, data: bytes | bytearray) -> int:
        self._flush()
        if self._pending:
            raise BlockingIOError
        taken = self._tls.write(data)
        self._flush()
        return taken

    def _flush(self) -> None:
        self._pending += self._out.read()
        if self._pending:
            try:
                self._pending = self._pending[self._sock.send(self._pending) :]
            except BlockingIOError:
                pass
