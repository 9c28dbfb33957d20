"""Network connections for the probe: one per request, closed after it. For load, `transport/wire.py` is used instead.

It uses asyncio streams and `transport/http1.py`. Sizes and times are limited. Errors name the address or the redacted
URL, never the URL itself.
"""

from __future__ import annotations

import asyncio
import ssl
from time import monotonic_ns

from ..errors import TargetUnusable, WrongUse
from ..transport.chunk_size import Malformed
from ..transport.http1 import HTTP_2, Response, head, merged
from ..transport.proxy import Proxy, proxy_for, refusal
from ..transport.target import Target
from ..transport.wire import resolve
from .probe import Headers, HttpResponse, TransientFailure

MAX_BODY_BYTES = 4 << 20
PAGE_S = 60.0  # longest wait for a page: list of models, version
_BROKEN_HINT = (
    "the server, or a proxy before it, gave up in the middle of an answer: see their logs"
)
_HTTP_2_HINT = "this client speaks HTTP/1.1: let the server speak it too, or a proxy before it"
_CERTIFICATE_HINT = (
    "give the authority's certificate with --cacert, or --insecure if you know this server"
)


class HttpFetcher:
    """The two functions that `probe` needs, over TCP and TLS. They raise TargetUnusable with a text for the user.

    `timeout_s`: of a generation, as in the load that follows. A page is answered within PAGE_S at most. `most_bytes`:
    of an answer.
    """

    def __init__(
        self,
        target: Target,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 60,
        connect_s: float = 10,
        proxy: Proxy | None = None,
        most_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._most_bytes = most_bytes
        self._target, self._timeout_s, self._connect_s = (
            target,
            timeout_s,
            min(connect_s, timeout_s),
        )
        self._tls = (tls or ssl.create_default_context()) if target.tls else None
        self._proxy = proxy
        self._peer = (target.host, target.port) if proxy is None else (proxy.host, proxy.port)
        self._address: str | None = None
        self.dns_ns: int | None = (
            None  # how long the host's name took to be looked up; None: not yet, or an address
        )

    async def connect(self) -> int:
        """Open one TCP connection and drop it. Returns the ns it took, without name resolution."""
        address = self._address or await self._resolve()
        started = monotonic_ns()
        _, writer = await self._open(address, None)
        duration_ns = monotonic_ns() - started
        writer.transport.abort()
        return duration_ns

    async def send_request(
        self, method: str, path: str, headers: Headers, body: bytes
    ) -> HttpResponse:
        """Send one request on its own connection. See `probe.Exchange`."""
        target = self._target
        reader, writer = await self._open(self._address or await self._resolve(), self._tls)
        response, pieces, size = Response(), [], 0
        timeout_s = self._timeout_s if body else min(self._timeout_s, PAGE_S)
        lines = merged([("Host", target.host_header), ("Connection", "close")], headers)
        if self._proxy is not None and not target.tls:
            path = f"http://{target.host_header}{path}"
            lines += self._proxy.headers
        if body:
            lines.append(("Content-Length", str(len(body))))
        try:
            started = monotonic_ns()
            async with asyncio.timeout(timeout_s):
                writer.write(head(method, path, lines) + b"\r\n" + body)
                while not response.complete:
                    data = await reader.read(1 << 16)
                    if not data:
                        if not response.end_of_file():
                            raise self._cut_short(method, size)
                        break
                    pieces += response.feed(data)
                    size += len(data)
                    if size > self._most_bytes:
                        most = f"{self._most_bytes >> 20} MiB"
                        raise TargetUnusable(
                            "invalid_answer",
                            f"{target.redacted} sends more than {most} to a probe",
                            "check the URL",
                        )
        except Malformed as error:
            if str(error) == HTTP_2:
                raise TargetUnusable(
                    "wrong_protocol", f"{target.address}: {HTTP_2}", _HTTP_2_HINT
                ) from None
            hint = "check the port" if target.tls else target.tls_hint
            raise TransientFailure(
                "wrong_protocol", f"{target.address} does not speak HTTP/1.1", hint
            ) from None
        except TimeoutError:
            what = f"{target.redacted} gave no whole answer within {timeout_s:g} s"
            raise TargetUnusable("timeout", what, "is the server stuck or overloaded?") from None
        except OSError as error:
            reason = error.strerror or "the connection broke"
            hint = "" if target.tls else target.tls_hint
            raise TransientFailure(
                "reset", f"{target.address}: {reason}", _BROKEN_HINT if size else hint
            ) from None
        finally:
            writer.transport.abort()
        return HttpResponse(
            response.status, response.headers, b"".join(pieces), monotonic_ns() - started
        )

    def _cut_short(self, method: str, size: int) -> TransientFailure:
        """The server closed the connection after `size` bytes. With 0 bytes, it may expect TLS."""
        target = self._target
        if size:
            what = f"{target.address} closed the connection in the middle of its answer to {method}"
            return TransientFailure("reset", what, _BROKEN_HINT)
        hint = "see the server's log" if target.tls else target.tls_hint
        return TransientFailure(
            "reset", f"{target.address} closed the connection without an answer to {method}", hint
        )

    async def _resolve(self) -> str:
        """The first address of the host that accepts a connection."""
        try:
            started = monotonic_ns()
            async with asyncio.timeout(self._connect_s):
                found = await resolve(*self._peer)
            if self._peer[0] not in [address[0] for _, address in found]:
                self.dns_ns = monotonic_ns() - started
        except TimeoutError:
            raise self._unresolved("no answer from DNS") from None
        except (OSError, UnicodeError) as error:
            raise self._unresolved(getattr(error, "strerror", "") or "unknown") from None
        failure = TargetUnusable(
            "dns", f"the host {self._peer[0]!r} has no address", "check the host's name"
        )
        for address in dict.fromkeys(str(address[0]) for _, address in found):
            try:
                _, writer = await self._open(address, None)
            except TargetUnusable as error:
                failure = error
                continue
            writer.transport.abort()
            self._address = address
            return address
        raise failure

    async def _open(
        self, address: str, tls: ssl.SSLContext | None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target = self._target
        try:
            async with asyncio.timeout(self._connect_s):
                server_name = target.host if tls else None
                if self._proxy is None or tls is None:
                    return await asyncio.open_connection(
                        address, self._peer[1], ssl=tls, server_hostname=server_name
                    )
                reader, writer = await asyncio.open_connection(address, self._peer[1])
                writer.write(self._proxy.connect_request(target))
                if problem := refusal(await reader.readuntil(b"\r\n\r\n")):
                    writer.transport.abort()
                    raise TargetUnusable("proxy", problem, "check HTTPS_PROXY and NO_PROXY")
                await writer.start_tls(tls, server_hostname=server_name)
                return reader, writer
        except asyncio.IncompleteReadError:
            what = f"the proxy at {self._peer[0]}:{self._peer[1]} closed the connection without an answer"
            raise TargetUnusable("proxy", what, "check HTTPS_PROXY and NO_PROXY") from None
        except ssl.SSLCertVerificationError as error:
            what = f"the certificate of {target.address} is not trusted: {error.verify_message}"
            raise TargetUnusable("tls", what, _CERTIFICATE_HINT) from None
        except ssl.SSLError as error:
            if "NO_APPLICATION_PROTOCOL" in str(error):
                raise TargetUnusable(
                    "wrong_protocol", f"{target.address}: {HTTP_2}", _HTTP_2_HINT
                ) from None
            hint = (
                "it seems to speak plain http://"
                if "WRONG_VERSION" in str(error)
                else "check --cert and the port"
            )
            reason = (error.reason or "handshake failed").lower().replace("_", " ")
            raise TargetUnusable(
                "tls", f"TLS with {target.address} failed: {reason}", hint
            ) from None
        except TimeoutError:
            hint = "does it want http:// ?" if tls else "check host, port and firewall"
            what = f"no {'TLS' if tls else 'answer'} from {target.address} within {self._connect_s:g} s"
            raise TargetUnusable("timeout", what, self._unused_proxy() or hint) from None
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError) or "refused" in str(error)
            reason = f"cannot connect ({error.strerror or type(error).__name__}) to"
            what = f"{'nothing listens at' if refused else reason} {target.address}"
            raise TargetUnusable(
                "connect", what, self._unused_proxy() or "start the server, or check host and port"
            ) from None

    def _unused_proxy(self) -> str:
        """What to say of a proxy that the environment names for this target and that is not used; "" without one."""
        try:
            if self._proxy is not None or proxy_for(self._target, None) is None:
                return ""
        except WrongUse:
            pass  # one that cannot be used is not used either
        return "the proxy of the environment is not used: a load goes straight to the server, from a host that reaches it"

    def _unresolved(self, reason: str) -> TargetUnusable:
        hint = self._unused_proxy() or "check the host's name"
        return TargetUnusable("dns", f"cannot resolve the host {self._peer[0]!r}: {reason}", hint)
