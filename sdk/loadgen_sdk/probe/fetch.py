"""Send HTTP requests of the probe over TCP and TLS, one connection per request.

This is simple and complete rather than fast: asyncio streams, `transport/http1.py`, limits of size
and time, and errors with a hint for the user. A load uses `transport/reactor.py` instead. Errors
name the address or the redacted URL, never the URL itself.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import NoReturn

from ..errors import TargetUnusable, WrongUse
from ..transport.chunk_size import MalformedResponseError
from ..transport.host_resources import resolve_host
from ..transport.http1 import HTTP_2, ResponseParser, build_request_head, merge_headers
from ..transport.proxy import Proxy, proxy_for, tunnel_refusal
from ..transport.target import Target
from .http_types import Headers, HttpResponse, TransientFailure

MAX_BODY_BYTES = 4 << 20
"""The largest response that is read. A larger one does not come from an API for inference."""

CONNECT_TIMEOUT_S = 10.0
"""The longest wait for a name, a TCP connection or a TLS handshake."""

PAGE_TIMEOUT_S = 60.0
"""The longest wait for a page, such as the list of models."""

_READ_BYTES = 1 << 16
_BROKEN_HINT = (
    "check the logs of the server and of a proxy before it, which closed the "
    "connection during a response"
)
_HTTP_2_HINT = "this client uses HTTP/1.1; enable it in the server or in a proxy before it"
_CERTIFICATE_HINT = "trust its certificate with --cacert, or use --insecure if you know this server"
_PROXY_HINT = "check HTTPS_PROXY and NO_PROXY"


class HttpFetcher:
    """Sends requests to one target. All methods raise TargetUnusable with a text for the user.

    Attributes:
        dns_ns: How long the lookup of the host's name took. It is None before the first request,
            and if the host is an address.
    """

    def __init__(
        self,
        target: Target,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 60,
        proxy: Proxy | None = None,
    ) -> None:
        """Prepare to send requests.

        Args:
            target: The target.
            tls: The settings of TLS, or None for the defaults.
            timeout_s: The longest wait for the response to a POST, as in the load that follows.
            proxy: The proxy to use, or None.
        """
        self.dns_ns: int | None = None
        self._target = target
        self._tls = (tls or ssl.create_default_context()) if target.tls else None
        self._timeout_s = timeout_s
        self._connect_s = min(CONNECT_TIMEOUT_S, timeout_s)
        self._proxy = proxy
        self._peer_host = target.host if proxy is None else proxy.host
        self._peer_port = target.port if proxy is None else proxy.port
        self._address: str | None = None

    async def connect(self) -> int:
        """Open and close a TCP connection. Return how many ns it took, without the name lookup.

        TCP is opened after one round trip, so that this is the round-trip time of the network.
        """
        address = await self._resolved_address()
        started_ns = monotonic_ns()
        _, writer = await self._open_tcp(address)
        duration_ns = monotonic_ns() - started_ns
        writer.transport.abort()
        return duration_ns

    async def send_request(
        self, method: str, path: str, headers: Headers, body: bytes
    ) -> HttpResponse:
        """Send a request over a connection of its own and return the complete response.

        The duration in the response is without the time to connect.

        Args:
            method: The HTTP method, such as "POST".
            path: The path of the URL.
            headers: The headers of the request, without those of the connection.
            body: The body, or b"" for a GET.

        Raises:
            TransientFailure: The connection broke, and the next request may get a response.
            TargetUnusable: There is no response in time, or none that can be read.
        """
        reader, writer = await self._open_connection()

        # A page takes the server less time than a generation, which is a POST with a body.
        is_page = not body
        timeout_s = min(self._timeout_s, PAGE_TIMEOUT_S) if is_page else self._timeout_s

        reading = _ResponseReading(self._target, method)
        try:
            # A TimeoutError of `asyncio.timeout` becomes an error for the user.
            with reading.convert_errors(timeout_s):
                started_ns = monotonic_ns()
                async with asyncio.timeout(timeout_s):
                    writer.write(self._encode_request(method, path, headers, body))
                    await reading.read_from(reader)
                duration_ns = monotonic_ns() - started_ns
        finally:
            writer.transport.abort()

        return reading.result(duration_ns)

    async def _open_connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection to the target, with TLS if its URL says so. Raises TargetUnusable."""
        address = await self._resolved_address()
        if self._tls is None:
            return await self._open_tcp(address)
        return await self._open_tls(address, self._tls)

    def _encode_request(self, method: str, path: str, headers: Headers, body: bytes) -> bytes:
        """Return the bytes of a request.

        A proxy for plain HTTP needs the whole URL and gets its own headers. A proxy for TLS only
        passes on bytes, so that the request has the form for the server itself.
        """
        target = self._target
        all_headers = merge_headers(
            [("Host", target.host_header), ("Connection", "close")], headers
        )

        request_target = path
        if self._proxy is not None and not target.tls:
            request_target = f"http://{target.host_header}{path}"
            all_headers += self._proxy.headers

        if body:
            all_headers.append(("Content-Length", str(len(body))))

        return build_request_head(method, request_target, all_headers) + b"\r\n" + body

    async def _resolved_address(self) -> str:
        """Return the first address of the host that accepts a connection, and remember it.

        A host may have an IPv6 address that does not work from here.

        Raises:
            TargetUnusable: No address accepts a connection. The error is that of the last address.
        """
        if self._address is not None:
            return self._address

        failure = TargetUnusable(
            "dns", f"the host {self._peer_host!r} has no address", "check the host name"
        )
        for address in await self._look_up_addresses():
            try:
                _, writer = await self._open_tcp(address)
            except TargetUnusable as error:
                failure = error
                continue

            writer.transport.abort()
            self._address = address
            return address

        raise failure

    async def _look_up_addresses(self) -> list[str]:
        """Return the addresses of the host, each once, in the order of the resolver.

        The time of the lookup is stored as `dns_ns`, unless the host is an address itself.

        Raises:
            TargetUnusable: The host has no address, or DNS gives no response in time.
        """
        started_ns = monotonic_ns()
        try:
            async with asyncio.timeout(self._connect_s):
                resolved = await resolve_host(self._peer_host, self._peer_port)
        except TimeoutError:
            raise self._lookup_error("DNS did not respond") from None
        except (OSError, UnicodeError) as error:
            raise self._lookup_error(getattr(error, "strerror", "") or "unknown") from None

        duration_ns = monotonic_ns() - started_ns

        # A socket address is (address, port, ...). The resolver may repeat it for each protocol.
        addresses = [str(socket_address[0]) for _family, socket_address in resolved]
        unique_addresses = list(dict.fromkeys(addresses))
        if self._peer_host not in unique_addresses:
            self.dns_ns = duration_ns

        return unique_addresses

    async def _open_tcp(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a TCP connection to an address of the target, or of the proxy if there is one.

        Raises:
            TargetUnusable: There is no connection in time.
        """
        with self._convert_connect_errors(uses_tls=False):
            async with asyncio.timeout(self._connect_s):
                return await asyncio.open_connection(address, self._peer_port)

    async def _open_tls(
        self, address: str, tls: ssl.SSLContext
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a TLS connection to the target, through the proxy if there is one.

        Raises:
            TargetUnusable: There is no connection in time, or the TLS handshake fails.
        """
        with self._convert_connect_errors(uses_tls=True):
            async with asyncio.timeout(self._connect_s):
                if self._proxy is not None:
                    return await self._open_tls_through_proxy(address, tls, self._proxy)
                return await asyncio.open_connection(
                    address, self._peer_port, ssl=tls, server_hostname=self._target.host
                )

    async def _open_tls_through_proxy(
        self, address: str, tls: ssl.SSLContext, proxy: Proxy
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Ask the proxy for a tunnel and do the TLS handshake with the target inside it.

        Raises:
            TargetUnusable: The proxy refuses the tunnel.
        """
        reader, writer = await asyncio.open_connection(address, self._peer_port)
        writer.write(proxy.connect_request(self._target))
        response_head = await reader.readuntil(b"\r\n\r\n")

        refusal = tunnel_refusal(response_head)
        if refusal:
            writer.transport.abort()
            raise TargetUnusable("proxy", refusal, _PROXY_HINT)

        await writer.start_tls(tls, server_hostname=self._target.host)
        return reader, writer

    @contextmanager
    def _convert_connect_errors(self, *, uses_tls: bool) -> Iterator[None]:
        """Convert the errors of connecting in the `with` block to TargetUnusable, with a hint.

        Args:
            uses_tls: The `with` block opens a TLS connection, and not only a TCP connection.
        """
        address = self._target.address
        try:
            yield
        except asyncio.IncompleteReadError:
            # Only the tunnel through a proxy reads before the connection is open.
            raise self._closed_by_proxy_error() from None
        # OSError is the base class of all further exceptions, so that it comes last. In the same
        # way, SSLError is the base class of SSLCertVerificationError.
        except ssl.SSLCertVerificationError as error:
            message = f"the certificate of {address} is not trusted: {error.verify_message}"
            raise TargetUnusable("tls", message, _CERTIFICATE_HINT) from None
        except ssl.SSLError as error:
            raise _handshake_error(address, error) from None
        except TimeoutError:
            raise self._connect_timeout_error(uses_tls=uses_tls) from None
        except OSError as error:
            raise self._connect_error(error) from None

    def _closed_by_proxy_error(self) -> TargetUnusable:
        """Return the exception for a proxy that closes the connection instead of a tunnel."""
        message = (
            f"the proxy at {self._peer_host}:{self._peer_port} closed the "
            "connection without a response"
        )
        return TargetUnusable("proxy", message, _PROXY_HINT)

    def _connect_timeout_error(self, *, uses_tls: bool) -> TargetUnusable:
        """Return the exception for a connection, or a TLS handshake, that takes too long."""
        missing = "TLS" if uses_tls else "answer"
        message = f"no {missing} from {self._target.address} within {self._connect_s:g} s"
        hint = "check host, port and firewall"
        if uses_tls:
            hint = "check whether the URL should begin with http://"
        return TargetUnusable("timeout", message, self._unused_proxy_hint() or hint)

    def _connect_error(self, error: OSError) -> TargetUnusable:
        """Return the exception for a TCP connection that was refused or failed.

        Args:
            error: The error of asyncio. If a host has several addresses, asyncio raises a plain
                OSError, whose text contains the errors of all addresses. A refusal can then be
                recognised only by this text.
        """
        address = self._target.address
        was_refused = isinstance(error, ConnectionRefusedError) or "refused" in str(error)
        if was_refused:
            message = f"nothing listens at {address}"
        else:
            reason = error.strerror or type(error).__name__
            message = f"cannot connect ({reason}) to {address}"

        hint = self._unused_proxy_hint() or "start the server, or check host and port"
        return TargetUnusable("connect", message, hint)

    def _lookup_error(self, reason: str) -> TargetUnusable:
        """Return the exception for a host name that cannot be resolved to an address."""
        message = f"cannot resolve the host name {self._peer_host!r}: {reason}"
        hint = self._unused_proxy_hint() or "check the host name"
        return TargetUnusable("dns", message, hint)

    def _unused_proxy_hint(self) -> str:
        """Return a hint if the environment names a proxy that is not used, else an empty string.

        The server may be reachable only through the proxy that a variable such as HTTPS_PROXY
        names. A load ignores these variables and goes directly to the server.
        """
        if self._proxy is not None:
            return ""
        if not self._has_proxy_in_environment():
            return ""

        return (
            "the proxy in the environment is not used. The load goes directly to the "
            "server, so use a host that can reach it"
        )

    def _has_proxy_in_environment(self) -> bool:
        """Return True if HTTP_PROXY or HTTPS_PROXY names a proxy for the target."""
        try:
            return proxy_for(self._target, None) is not None
        except WrongUse:
            # The variable is not the URL of a proxy that this client supports.
            return True


class _ResponseReading:
    """Reads the response to one request and explains what is wrong with it."""

    def __init__(self, target: Target, method: str) -> None:
        self._target = target
        self._method = method
        self._response = ResponseParser()
        self._body_pieces: list[bytes] = []
        self._received_bytes = 0

    async def read_from(self, reader: asyncio.StreamReader) -> None:
        """Read until the response is complete or the server closes the connection.

        Raises:
            TransientFailure: The server closed the connection before the response was complete.
            TargetUnusable: The response is larger than MAX_BODY_BYTES.
        """
        while not self._response.is_complete:
            data = await reader.read(_READ_BYTES)
            if not data:
                # The end of the connection is also the end of a body without a length.
                if not self._response.feed_end():
                    self._raise_closed_early()
                return

            self._body_pieces += self._response.feed(data)
            self._received_bytes += len(data)
            if self._received_bytes > MAX_BODY_BYTES:
                raise self._too_large_error()

    def _too_large_error(self) -> TargetUnusable:
        """Return the exception for a response that is larger than MAX_BODY_BYTES."""
        limit = f"{MAX_BODY_BYTES >> 20} MiB"
        message = (
            f"{self._target.redacted} sent more than {limit} in response to a preflight request"
        )
        return TargetUnusable("invalid_answer", message, "check the URL")

    def result(self, duration_ns: int) -> HttpResponse:
        """Return the response that was read."""
        return HttpResponse(
            self._response.status, self._response.headers, b"".join(self._body_pieces), duration_ns
        )

    @contextmanager
    def convert_errors(self, timeout_s: float) -> Iterator[None]:
        """Convert the errors of reading a response in the `with` block, with a hint for the user.

        A response that is not HTTP/1.1, and a broken connection, become a TransientFailure, which
        is tried again: a proxy may cause them now and then. A timeout becomes a TargetUnusable.

        Args:
            timeout_s: The longest wait for the response, for the error message.
        """
        target = self._target
        try:
            yield
        except MalformedResponseError as error:
            raise self._protocol_error(error) from None
        except TimeoutError:  # a subclass of OSError, and therefore before it
            message = f"{target.redacted} did not send a complete response within {timeout_s:g} s"
            hint = "check whether the server is overloaded"
            raise TargetUnusable("timeout", message, hint) from None
        except OSError as error:
            message = f"{target.address}: {error.strerror or 'the connection broke'}"
            hint = self._broken_connection_hint(hint_for_tls_target="")
            raise TransientFailure("reset", message, hint) from None

    def _protocol_error(self, error: MalformedResponseError) -> TargetUnusable:
        """Return the exception for a response that is not HTTP/1.1."""
        target = self._target
        is_http_2 = str(error) == HTTP_2  # the message of the parser for HTTP/2
        if is_http_2:
            return _http_2_error(target.address)
        message = f"{target.address} does not speak HTTP/1.1"
        hint = "check the port" if target.tls else target.tls_hint
        return TransientFailure("wrong_protocol", message, hint)

    def _raise_closed_early(self) -> NoReturn:
        """Raise the TransientFailure for a connection that was closed before the response ended."""
        address = self._target.address
        if self._received_bytes:
            message = f"{address} closed the connection during its response to {self._method}"
        else:
            message = f"{address} closed the connection without a response to {self._method}"
        hint = self._broken_connection_hint(hint_for_tls_target="see the server's log")
        raise TransientFailure("reset", message, hint)

    def _broken_connection_hint(self, *, hint_for_tls_target: str) -> str:
        """Return a hint for a broken connection. A server that sent nothing may expect TLS.

        Args:
            hint_for_tls_target: The hint for a server that sent nothing although TLS is used.
        """
        if self._received_bytes:
            return _BROKEN_HINT
        return hint_for_tls_target if self._target.tls else self._target.tls_hint


def _http_2_error(address: str) -> TargetUnusable:
    return TargetUnusable("wrong_protocol", f"{address}: {HTTP_2}", _HTTP_2_HINT)


def _handshake_error(address: str, error: ssl.SSLError) -> TargetUnusable:
    """Return the exception for a TLS handshake that failed.

    NO_APPLICATION_PROTOCOL comes from a server that offers HTTP/2 only, and WRONG_VERSION from one
    that responds without TLS.
    """
    if "NO_APPLICATION_PROTOCOL" in str(error):
        return _http_2_error(address)
    hint = "check --cert and the port"
    if "WRONG_VERSION" in str(error):
        hint = "the server seems to use plain http://"
    reason = (error.reason or "handshake failed").lower().replace("_", " ")
    return TargetUnusable("tls", f"TLS with {address} failed: {reason}", hint)
