"""HTTP messages of the simulated server as values: a complete request, and the head of a response. Pure."""

from __future__ import annotations

from http import HTTPStatus

import msgspec


class Incoming(msgspec.Struct, gc=False):
    """One complete request."""

    method: str
    path: str  # without the query
    headers: dict[bytes, bytes]  # names in lower case
    body: bytes
    keep_alive: bool
    arrival_ns: int
    refused: int = (
        0  # error status on the HTTP level: 400, 413, 431; the connection closes after it
    )


def head(
    status: int,
    content_type: str,
    length: int | None,
    *,
    headers: tuple[tuple[str, str], ...] = (),
    keep_alive: bool = True,
) -> bytes:
    """The head of a response. `length` None: chunked; -1: the body ends when the connection closes."""
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "server: loadgen-sim"]
    if length is None:
        lines.append("transfer-encoding: chunked")
    elif length >= 0:
        lines.append(f"content-length: {length}")
    if content_type:
        lines.append(f"content-type: {content_type}")
    lines += [f"{name}: {value}" for name, value in headers]
    if not keep_alive:
        lines.append("connection: close")
    return "\r\n".join((*lines, "", "")).encode("latin-1")
