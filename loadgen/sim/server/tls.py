"""TLS for the raw sockets of the simulated server's connections."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from loadgen.core.errors import UserError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_RECV_BYTES = 256 << 10


def create_context(certificate_path: str, key_path: str) -> ssl.SSLContext:
    """Return a server context with a certificate and its private key (PEM files).

    An empty key path means that the certificate file contains the key. Raises UserError if the
    files cannot be loaded.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate_path, key_path or None)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            "unreadable_file",
            f"cannot load the certificate: {error}",
            f"{certificate_path}, {key_path}",
            "use a certificate and its private key in PEM format",
        ) from None

    context.sslsocket_class = TlsSocket
    return context


class TlsSocket(ssl.SSLSocket):
    """A non-blocking TLS socket. The handshake takes place while it is read."""

    def recv(self, limit: int = _RECV_BYTES, flags: int = 0) -> bytes:
        """Return all bytes that can be decrypted now, b"" if the client has closed its side.

        The result may be longer than `limit`, unlike that of other sockets. TLS decrypts whole
        records, and a poll does not see decrypted bytes that are left over, because it watches the
        socket below. So reading goes on until there are none. Raises BlockingIOError if there is
        nothing to return yet.
        """
        plaintext = bytearray()
        while True:
            try:
                data = super().recv(limit, flags)
            except ssl.SSLWantReadError:  # nothing is left
                if not plaintext:
                    raise BlockingIOError from None
                return bytes(plaintext)

            is_closed_by_client = not data
            if is_closed_by_client:
                return bytes(plaintext)

            plaintext += data

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """Send bytes and return how many. Raises BlockingIOError if the socket accepts none."""
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
