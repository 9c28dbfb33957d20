"""TLS settings of a client and the text of TLS errors."""

from __future__ import annotations

import ssl

import msgspec

from ..errors import TargetUnusable


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """TLS settings: whether to `verify` the server, and with which `ca` file (None: the system's authorities).

    `cert` is a PEM file with the client certificate. Its private key is in the same file or in the file `key`.
    """

    verify: bool = True
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def context(self) -> ssl.SSLContext:
        """The SSL context of these settings. Raises TargetUnusable when a file is missing or holds no certificate."""
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


def tls_error_text(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate verify failed: {error.verify_message}"
    return error.reason or str(error)
