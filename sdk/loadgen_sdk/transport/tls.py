"""TLS settings of a client and TLS streams in memory. No socket."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from ..errors import TargetUnusable

_READ_BYTES = 1 << 16


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """TLS settings.

    Attributes:
        verify: Verify the certificate of the server.
        ca: A file of certificate authorities, or None for those of the system.
        cert: A PEM file with the client certificate.
        key: The file with its private key, or None if `cert` has it too.
    """

    verify: bool = True
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """Return the SSL context of these settings.

        It offers HTTP/1.1 only, which is all that this client speaks.

        Raises:
            TargetUnusable: A file is missing or holds no certificate.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise TargetUnusable(
                "unreadable_file",
                f"cannot use {self.cert or self.ca} for TLS: {error}",
                "give PEM files",
            ) from None

        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE

        context.set_alpn_protocols(["http/1.1"])
        return context


class Decrypted(NamedTuple):
    """The result of a decryption.

    Attributes:
        data: The decrypted bytes.
        has_ended: The server ended the TLS stream after them.
        error: The error that ended the decryption, or None.
    """

    data: bytes
    has_ended: bool = False
    error: ssl.SSLError | None = None


class TlsStream:
    """The client's end of a TLS connection, in memory.

    The module `ssl` usually reads and writes the socket itself. Here it works on two buffers
    (`MemoryBIO`), because the reactor reads all sockets with their timestamps. The owner passes the
    bytes of the socket to `receive` and sends the bytes of `take_output`.
    """

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    def receive(self, encrypted: bytes) -> None:
        """Take bytes that were read from the socket."""
        self._incoming.write(encrypted)

    def take_output(self) -> bytes:
        """Return the bytes that have to be sent."""
        return self._outgoing.read()

    def continue_handshake(self) -> bool:
        """Go on with the handshake and return whether it is complete.

        It goes on as far as the bytes received so far allow. Send its output afterwards.

        Raises:
            ssl.SSLError: The handshake failed.
        """
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def encrypt(self, parts: Iterable[bytes | memoryview]) -> bytes:
        """Return the encrypted parts, and whatever else has to be sent."""
        for part in parts:
            self._ssl.write(part)
        return self.take_output()

    def decrypt(self) -> Decrypted:
        """Return all bytes that can be decrypted now.

        `read` raises SSLWantReadError when more bytes have to arrive first. At the end of the TLS
        stream it raises SSLZeroReturnError or returns b"".
        """
        plaintexts: list[bytes] = []
        try:
            while plaintext := self._ssl.read(_READ_BYTES):
                plaintexts.append(plaintext)
        except ssl.SSLWantReadError:
            return Decrypted(b"".join(plaintexts))
        except ssl.SSLZeroReturnError:
            return Decrypted(b"".join(plaintexts), has_ended=True)
        except ssl.SSLError as error:
            return Decrypted(b"".join(plaintexts), error=error)

        return Decrypted(b"".join(plaintexts), has_ended=True)


def tls_error_text(error: ssl.SSLError) -> str:
    """Return the text of a TLS error for users."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    return error.reason or str(error)
