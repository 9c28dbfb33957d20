"""HTTP/1.1 without IO: writes request heads, reads response heads and bodies (chunked, by length, until close).

One `ResponseParser` reads one answer. This module uses no socket. Bytes that it cannot accept raise `MalformedResponseError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .chunk_size import CHUNK_SIZES, MAX_DIGITS, MalformedResponseError, chunk_size
from .implementation import ResponseState

CREDENTIALS = frozenset(("authorization", "api-key", "x-api-key"))
MAX_HEAD_BYTES = 64 << 10
MAX_LINE_BYTES = 4 << 10  # a chunk-size line with extensions, or one trailer
_NO_BODY = frozenset((204, 304))
HTTP_2 = "the server speaks HTTP/2 and no HTTP/1.1"
_BARE_LF = "a response head whose lines end with LF alone, not with CRLF"


def build_request_head(method: str, path: str, headers: list[tuple[str, str]]) -> bytes:
    """The fixed part of a request head, without Content-Length and the closing blank line."""
    for name, value in headers:
        if "\r" in name + value or "\n" in name + value:
            raise ValueError(f"header {name!r} has a line break in it")
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n").encode("latin-1")


def merge_headers(
    ours: Iterable[tuple[str, str]], users: Iterable[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Header lines in which the user's replace ours of the same name.

    A user's own credentials (any header of CREDENTIALS) replace our keys: a key from the environment is not meant for a
    server that the user gives another one. User and password of the URL were given for this server: only the user's
    own `Authorization` replaces them.
    """
    ours, users = list(ours), list(users)
    names = {name.lower() for name, _ in users}
    if names & CREDENTIALS:
        keys = {name.lower() for name, value in ours if not value.startswith("Basic ")}
        names |= CREDENTIALS & keys
    return [*(pair for pair in ours if pair[0].lower() not in names), *users]


def _is_decimal(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


class Head(NamedTuple):
    """What the head of an answer says; see `ResponseParser`. `mode`: how the body is framed."""

    status: int
    headers: dict[str, str]
    mode: str
    length: int  # of the body, if `mode` is "length"
    reusable: bool
    uses_left: int | None
    idle_limit_s: float | None


HEADS: dict[
    bytes, Head
] = {}  # cache: a server repeats its head, byte by byte, until the date in it changes


def _parsed_head(data: bytes) -> Head:
    """The head of a final answer, without the blank line."""
    lines = data.decode("latin-1").split("\r\n")
    version, _, after = lines[0].partition(" ")
    code = after.partition(" ")[0]
    if not version.startswith("HTTP/1.") or not (
        _is_decimal(code) and len(code) == 3 and code >= "200"
    ):
        raise MalformedResponseError(f"status line {lines[0][:80]!r}")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise MalformedResponseError(f"header line {line[:80]!r}")
        if "\n" in line:
            raise MalformedResponseError(_BARE_LF)
        name = name.lower()
        value = value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    connection = headers.get("connection", "").lower()
    reusable = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)
    uses_left, idle_limit_s = None, None
    for part in headers.get("keep-alive", "").split(","):
        key, _, value = part.strip().lower().partition("=")
        if _is_decimal(value):
            if key == "max":
                uses_left = int(value)
            elif key == "timeout":
                idle_limit_s = float(value)
    mode, length = _framing(int(code), headers)
    return Head(
        int(code), headers, mode, length, reusable and mode != "close", uses_left, idle_limit_s
    )


def _framing(status: int, headers: dict[str, str]) -> tuple[str, int]:
    """How the body is framed, and its length if that is known."""
    if status in _NO_BODY:
        return "end", 0
    if headers.get("transfer-encoding", "").lower().endswith("chunked"):
        return "chunked", 0
    if "content-length" not in headers:
        return "close", 0
    lengths = {part.strip() for part in headers["content-length"].split(",")}
    text = lengths.pop()
    if lengths or not _is_decimal(text):
        raise MalformedResponseError(f"Content-Length {headers['content-length']!r}")
    length = int(text)
    return "length" if length else "end", length


class ResponseParser(ResponseState):
    """The reader of one answer. `feed` takes arriving bytes and returns the body parts in them.

    `status` is 0 until the head is complete. `complete` is true when the body has ended by its framing. Once complete,
    `reusable` says whether the connection can carry another request. `surplus` holds bytes after the end.
    `headers` has names in lower case; repeated headers are joined with ", ". Equal heads share it.
    """

    __slots__ = ()

    def feed(self, data: bytes) -> list[bytes]:
        mode = self._mode
        if mode == "chunked":
            if (
                not self._bytes_left and not self._unparsed
            ):  # the usual case: a read is exactly one chunk
                line_end = data.find(b"\r\n")
                length = CHUNK_SIZES.get(data[:line_end])
                if length and len(data) == line_end + length + 4 and data.endswith(b"\r\n"):
                    return [data[line_end + 2 : -2]]
                if data == b"0\r\n\r\n":
                    self._finish(b"")
                    return []
            return self._chunked_body(data)
        if mode == "length":
            return self._length_body(data)
        if mode == "close":
            return [data]
        if mode == "head":
            body_start = self.take_head(data)
            return self.feed(body_start) if body_start else []
        if mode == "trailer":
            return self._trailer(data)
        self.surplus += data
        self.reusable = False
        return []

    def end_of_file(self) -> bool:
        """The server closed the connection. Returns whether the body is complete, by its framing or by this close."""
        if self._mode == "close":
            self._finish(b"")
        return self.complete

    @property
    def between_chunks(self) -> bool:
        """Whether the bytes so far end with a whole chunk and the body goes on. True for bodies without chunks."""
        return not (self._bytes_left or self._unparsed or self.complete) or self._mode in (
            "length",
            "close",
        )

    @property
    def missing(self) -> int:
        """How many bytes of the current chunk, with its line end, are still to come; 0 if that is not known."""
        return (
            self._bytes_left - len(self._unparsed)
            if self._bytes_left and self._mode == "chunked"
            else 0
        )

    def _finish(self, surplus: bytes) -> None:
        self._mode = "end"
        self.complete = True
        self.surplus = surplus
        if surplus:
            self.reusable = False

    def take_head(self, data: bytes) -> bytes:
        """Read the head or a part of it; returns what follows it. `status` stays 0 until it is complete."""
        data = self._unparsed + data if self._unparsed else data
        while (
            data.startswith(b"HTTP/1.1 1") and (end := data.find(b"\r\n\r\n")) >= 0
        ):  # skip interim answers (1xx)
            data = data[end + 4 :]
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if not b"HTTP/1.".startswith(data[:7]):
                if (
                    data[:2] == b"\0\0" and data[3:4] == b"\4"
                ):  # a frame of settings, with which HTTP/2 begins
                    raise MalformedResponseError(HTTP_2)
                raise MalformedResponseError(f"not an HTTP/1.x answer: {data[:60]!r}")
            if b"\n\n" in data:
                raise MalformedResponseError(_BARE_LF)
            if len(data) > MAX_HEAD_BYTES:
                raise MalformedResponseError("a response head of more than 64 KiB")
            self._unparsed = data
            return b""
        self._unparsed = b""
        lines, body_start = data[:end], data[end + 4 :]
        head = HEADS.get(lines)
        if head is None:
            head = _parsed_head(lines)
            if len(HEADS) >= 64:
                HEADS.clear()
            HEADS[lines] = head
        (
            self.status,
            self.headers,
            self._mode,
            self._bytes_left,
            self.reusable,
            self.uses_left,
            self.idle_limit_s,
        ) = head
        self.chunked = self._mode == "chunked"
        self.until_close = self._mode == "close"
        if self._mode == "end":
            self._finish(body_start)
            return b""
        return body_start

    def _length_body(self, data: bytes) -> list[bytes]:
        bytes_left = self._bytes_left
        if len(data) < bytes_left:
            self._bytes_left = bytes_left - len(data)
            return [data]
        self._bytes_left = 0
        self._finish(data[bytes_left:])
        return [data[:bytes_left]]

    def _chunked_body(self, data: bytes) -> list[bytes]:
        if self._unparsed:
            data = self._unparsed + data
            self._unparsed = b""
        pieces: list[bytes] = []
        bytes_left = self._bytes_left  # bytes of the current chunk to come, with its closing CRLF
        position, size = 0, len(data)
        while position < size:
            if bytes_left:
                end = position + bytes_left
                if end <= size:
                    if data[end - 2 : end] != b"\r\n":
                        raise MalformedResponseError("a chunk that is longer than its size")
                    if bytes_left > 2:
                        pieces.append(data[position : end - 2])
                    position = end
                    bytes_left = 0
                    continue
                body = min(size, end - 2)
                if body > position:
                    pieces.append(data[position:body])
                    bytes_left -= body - position
                self._unparsed = data[body:]
                break
            line_end = data.find(b"\r\n", position)
            if line_end < 0:
                if size - position > MAX_LINE_BYTES:
                    raise MalformedResponseError("a chunk-size line of more than 4 KiB")
                self._unparsed = data[position:]
                break
            line = data[position:line_end]
            length = CHUNK_SIZES.get(line)
            if length is None:
                length = chunk_size(line)
            position = line_end + 2
            if not length:
                self._mode = "trailer"
                self._bytes_left = 0
                self._trailer(data[position:])
                return pieces
            bytes_left = length + 2
        self._bytes_left = bytes_left
        return pieces

    def _trailer(self, data: bytes) -> list[bytes]:
        data = self._unparsed + data
        self._unparsed = b""
        while True:
            end = data.find(b"\r\n")
            if end < 0:
                if len(data) > MAX_LINE_BYTES:
                    raise MalformedResponseError("a trailer of more than 4 KiB")
                self._unparsed = data
                return []
            if not end:
                self._finish(data[2:])
                return []
            data = data[end + 2 :]
