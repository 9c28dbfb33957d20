"""TLS for the simulated server's raw sockets. Only the server's connections use it; nothing here knows HTTP."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from loadgen.core.errors import UserError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_RECORDS_BYTES = 256 << 10


def context(cert: str, key: str) -> ssl.SSLContext:
    """A context with this certificate and key (PEM files). Raises UserError if they cannot be loaded."""
    ssl_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        ssl_context.load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            "unreadable_file",
            f"cannot load the certificate: {error}",
            f"{cert}, {key}",
            "two PEM files that match",
        ) from None
    ssl_context.sslsocket_class = TlsSocket
    return ssl_context


class TlsSocket(ssl.SSLSocket):
    """A non-blocking socket with TLS; the handshake takes place while it is read.

    `recv` returns everything that is decrypted, since what stayed inside would not make the socket readable.
    """

    def recv(self, limit: int = _RECORDS_BYTES, flags: int = 0) -> bytes:
        plain = bytearray()
        try:
            while piece := super().recv(limit, flags):
                plain += piece
        except ssl.SSLWantReadError:
            if not plain:
                raise BlockingIOError from None
        return bytes(plain)

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
