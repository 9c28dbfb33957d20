"""A forward proxy on the way to an endpoint, as HTTP_PROXY, HTTPS_PROXY and NO_PROXY name it.

https goes through a tunnel (CONNECT), http by requests that name the whole URL. Loads are never sent through one.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from ..errors import WrongUse
from .target import Target, parse_userinfo


class Proxy(NamedTuple):
    """Where the proxy listens. `basic`: what it wants in Proxy-Authorization, or ""."""

    host: str
    port: int
    basic: str

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("Proxy-Authorization", self.basic),) if self.basic else ()

    def connect_request(self, target: Target) -> bytes:
        """The request that opens a tunnel to the target."""
        lines = [f"CONNECT {target.address} HTTP/1.1", f"Host: {target.address}"]
        lines += (f"{name}: {value}" for name, value in self.headers)
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def tunnel_refusal(answer: bytes) -> str:
    """What a proxy's answer to CONNECT says against the tunnel; "" when it is open."""
    status = answer.partition(b"\r\n")[0].decode("latin-1")
    return (
        ""
        if status.split(" ")[1:2] == ["200"]
        else f"the proxy refused the tunnel: {status[:100]!r}"
    )


def proxy_for(target: Target, url: str | None) -> Proxy | None:
    """The proxy at this URL; "": none; None: what the environment says for this target. Raises WrongUse."""
    if url is None:
        from urllib.request import getproxies, proxy_bypass

        proxies = getproxies()
        url = proxies.get("https" if target.tls else "http") or proxies.get("all")
        if url is None or proxy_bypass(target.address):
            return None
    if not url:
        return None
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if parts.scheme != "http" or not host:
        raise WrongUse(
            "invalid_url",
            "this proxy cannot be used",
            'give proxy="http://HOST:PORT" (not https, not SOCKS), or proxy=""',
        )
    return Proxy(host, port, parse_userinfo(parts.netloc)[0])
