"""TLS for the simulated server's raw sockets: `ssl.MemoryBIO` between the records and the socket, with the face of a
socket's `recv` and `send`. Only the server's connections use it; nothing here knows HTTP.
"""

from __future__ import annotations

import socket
import ssl

from loadgen.errors import UserError

_RECORDS_BYTES = 256 << 10


class Context:
    """A server-side context that wraps accepted sockets."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context

    def wrap(self, sock: socket.socket) -> TlsSocket:
        """The TLS face of `sock`, whose handshake happens while it is read."""
        return TlsSocket(sock, self._context)


def context(cert: str, key: str) -> Context:
    """A context with this certificate and key (PEM files); raises UserError when they cannot be read."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        made.load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"cannot load the certificate: {error}", f"{cert}, {key}", "two PEM files that match") from None
    return Context(made)


class TlsSocket:
    """`recv` gives plain bytes, `b""` at the end, BlockingIOError when there are none; `send` takes all and keeps the
    records that the kernel did not take, to go first next time."""

    __slots__ = ("_in", "_out", "_pending", "_sock", "_tls")

    def __init__(self, sock: socket.socket, made: ssl.SSLContext) -> None:
        self._sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = made.wrap_bio(self._in, self._out, server_side=True)
        self._pending = b""

    def recv(self, limit: int) -> bytes:
        data = self._sock.recv(_RECORDS_BYTES)
        if not data:
            return b""
        self._in.write(data)
        plain = bytearray()
        try:
            while True:  # all that these records hold: what stays inside would make no socket readable
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
