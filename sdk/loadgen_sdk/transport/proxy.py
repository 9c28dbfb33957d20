"""A forward proxy on the way to an endpoint, as HTTP_PROXY, HTTPS_PROXY and NO_PROXY name it.

https goes through a tunnel (CONNECT), http by requests that name the whole URL. Loads are never
sent through a proxy.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from ..errors import WrongUse
from .target import Target, parse_userinfo

DEFAULT_PORT = 80


class Proxy(NamedTuple):
    """A forward proxy.

    Attributes:
        host: The host on which it listens.
        port: The port on which it listens.
        authorization: The value of the header Proxy-Authorization, or "" for none.
    """

    host: str
    port: int
    authorization: str

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """The headers that authenticate a request to the proxy."""
        return (("Proxy-Authorization", self.authorization),) if self.authorization else ()

    def connect_request(self, target: Target) -> bytes:
        """Return the request that opens a tunnel to the target."""
        lines = [f"CONNECT {target.address} HTTP/1.1", f"Host: {target.address}"]
        lines += (f"{name}: {value}" for name, value in self.headers)
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def tunnel_refusal(response: bytes) -> str:
    """Return why a proxy refused a tunnel, or "" if its response to CONNECT opens it.

    It opens the tunnel by the status 200, as in `HTTP/1.1 200 Connection established`.
    """
    status_line = response.partition(b"\r\n")[0].decode("latin-1")
    status_and_reason = status_line.partition(" ")[2]
    status = status_and_reason.partition(" ")[0]
    if status == "200":
        return ""
    return f"the proxy refused the tunnel: {status_line[:100]!r}"


def proxy_for(target: Target, url: str | None) -> Proxy | None:
    """Return the proxy for a target, or None if there is none.

    Args:
        target: The target.
        url: The URL of the proxy, "" for no proxy, or None to follow the environment.

    Raises:
        WrongUse: The proxy cannot be used.
    """
    proxy_url = _proxy_of_environment(target) if url is None else url
    return _parse_proxy_url(proxy_url) if proxy_url else None


def _parse_proxy_url(url: str) -> Proxy:
    """Parse the URL of a proxy, such as `http://user:password@host:3128` or `host:3128`.

    Raises:
        WrongUse: The proxy is not reached by plain HTTP, or the host or the port is not valid.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        host = parts.hostname
        port = parts.port or DEFAULT_PORT
    except ValueError:  # The port is not valid.
        raise _unusable_proxy() from None

    is_plain_http = parts.scheme == "http"
    if not is_plain_http or not host:
        raise _unusable_proxy()

    return Proxy(host, port, parse_userinfo(parts.netloc).authorization)


def _unusable_proxy() -> WrongUse:
    """Return the error for a proxy that this client does not support."""
    return WrongUse(
        "invalid_url",
        "this proxy cannot be used",
        'use proxy="http://HOST:PORT" (not https or SOCKS), or proxy="" for no proxy',
    )


def _proxy_of_environment(target: Target) -> str:
    """Return the URL of the proxy that the environment names for a target, or "".

    HTTPS_PROXY or HTTP_PROXY, depending on the URL of the target, has precedence over ALL_PROXY.
    NO_PROXY lists the hosts that are reached directly.
    """
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    url = proxies.get("https" if target.tls else "http") or proxies.get("all")
    if url is None or proxy_bypass(target.address):
        return ""
    return url
