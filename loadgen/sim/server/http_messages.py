"""HTTP messages of the simulated server: complete requests, whole responses and their heads."""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal

import msgspec

JSON = "application/json"

Headers = tuple[tuple[str, str], ...]

BodyFraming = int | Literal["chunked", "until_close"]
"""How a body is delimited: by its length in bytes, by chunks, or by closing the connection."""


class HttpRequest(msgspec.Struct, gc=False):
    """One complete request, or an error on the HTTP level in its place."""

    method: str
    path: str  # without the query
    headers: dict[bytes, bytes]  # names in lower case
    body: bytes
    keep_alive: bool
    arrival_ns: int  # monotonic time at which its last byte was read
    error_status: int = 0  # 400, 413 or 431: the response is this error, then the connection closes


class HttpResponse(msgspec.Struct, frozen=True):
    """One whole response, without what depends on its connection."""

    status: int
    body: bytes
    content_type: str = JSON
    headers: Headers = ()


def format_response_head(
    status: int,
    content_type: str,
    framing: BodyFraming,
    *,
    headers: Headers = (),
    keep_alive: bool = True,
) -> bytes:
    """Return the status line and the headers of a response.

    Args:
        status: The HTTP status code.
        content_type: The value of the content type header, or "" for none.
        framing: How the body is delimited.
        headers: Additional headers.
        keep_alive: Whether the connection stays open after the response.
    """
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "server: loadgen-sim"]
    if framing == "chunked":
        lines.append("transfer-encoding: chunked")
    elif framing != "until_close":
        lines.append(f"content-length: {framing}")

    if content_type:
        lines.append(f"content-type: {content_type}")

    lines += [f"{name}: {value}" for name, value in headers]
    if not keep_alive:
        lines.append("connection: close")

    return "\r\n".join((*lines, "", "")).encode("latin-1")
