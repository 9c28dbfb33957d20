"""HTTP/1.1, sans IO: a request head out; a response head and its body (chunked, by length, until close) in.

One `Response` reads one answer. It never touches a socket; what it cannot accept it raises as `Malformed`.
"""

from __future__ import annotations

MAX_HEAD_BYTES = 64 << 10
MAX_LINE_BYTES = 4 << 10  # a chunk-size line with extensions, or one trailer
_NO_BODY = frozenset((204, 304))
_SIZES: dict[bytes, int] = {}  # chunk-size lines seen: a stream repeats a few dozen of them
_HEX = frozenset(b"0123456789abcdefABCDEF")
_DIGITS = 15  # of any number in a head or a chunk size; more is no number that a server means


class Malformed(ValueError):
    """The bytes are not HTTP/1.1 as this client accepts it."""


def head(method: str, path: str, headers: list[tuple[str, str]]) -> bytes:
    """The fixed part of a request head, without Content-Length and the closing blank line."""
    for name, value in headers:
        if "\r" in name + value or "\n" in name + value:
            raise ValueError(f"header {name!r} has a line break in it")
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n").encode("latin-1")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


def _size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip(b" \t")
    if not digits or len(digits) > _DIGITS or not _HEX.issuperset(digits):
        raise Malformed(f"chunk size {line[:40]!r}")
    size = int(digits, 16)
    if len(_SIZES) < 4096 and len(line) < 32:
        _SIZES[line] = size
    return size


class Response:
    """Feed it what arrives; each call returns the body pieces found in these bytes.

    `status` is 0 until the head has come, `complete` is true when the framing says that the body has ended, and
    `reusable` tells (once complete) whether the connection may serve again. `surplus` holds bytes after the end.
    """

    __slots__ = (
        "_held",
        "_left",
        "_mode",
        "complete",
        "headers",
        "idle_limit_s",
        "reusable",
        "status",
        "surplus",
        "until_close",
        "uses_left",
    )

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.reusable = True
        self.surplus = b""
        self.until_close = False  # the body is delimited by the end of the connection
        self.uses_left: int | None = None  # Keep-Alive: max=
        self.idle_limit_s: float | None = None  # Keep-Alive: timeout=
        self._held = b""
        self._mode = "head"
        self._left = 0

    def feed(self, data: bytes) -> list[bytes]:
        mode = self._mode
        if mode == "chunked":
            if not self._left and not self._held:  # most often a read is exactly one chunk
                line_end = data.find(b"\r\n")
                length = _SIZES.get(data[:line_end])
                if length and len(data) == line_end + length + 4 and data.endswith(b"\r\n"):
                    return [data[line_end + 2 : -2]]
            return self._chunked(data)
        if mode == "length":
            return self._length(data)
        if mode == "close":
            return [data]
        if mode == "head":
            return self._head(data)
        if mode == "trailer":
            return self._trailer(data)
        self.surplus += data
        self.reusable = False
        return []

    def end_of_file(self) -> bool:
        """The peer closed. True when that is a proper end of this body (it was delimited by closing)."""
        if self._mode == "close":
            self._finish(b"")
        return self.complete

    @property
    def between_chunks(self) -> bool:
        """Nothing but whole chunks has come, and the last one is still to come (true of bodies without chunks)."""
        return not (self._left or self._held or self.complete) or self._mode in ("length", "close")

    def _finish(self, surplus: bytes) -> None:
        self._mode = "end"
        self.complete = True
        self.surplus = surplus
        if surplus:
            self.reusable = False

    def _head(self, data: bytes) -> list[bytes]:
        data = self._held + data if self._held else data
        while data.startswith(b"HTTP/1.1 1") and (end := data.find(b"\r\n\r\n")) >= 0:  # an interim answer
            data = data[end + 4 :]
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > MAX_HEAD_BYTES:
                raise Malformed("a response head of more than 64 KiB")
            if not b"HTTP/1.".startswith(data[:7]):
                raise Malformed(f"not an HTTP/1.x answer: {data[:60]!r}")
            self._held = data
            return []
        self._held = b""
        lines = data[:end].decode("latin-1").split("\r\n")
        rest = data[end + 4 :]
        version, _, after = lines[0].partition(" ")
        code = after.partition(" ")[0]
        if not version.startswith("HTTP/1.") or not (_is_number(code) and len(code) == 3 and code >= "200"):
            raise Malformed(f"status line {lines[0][:80]!r}")
        headers = self.headers
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise Malformed(f"header line {line[:80]!r}")
            name = name.lower()
            value = value.strip(" \t")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        self.status = int(code)
        self._framing(version)
        if self._mode == "end":
            self._finish(rest)
            return []
        return self.feed(rest) if rest else []

    def _framing(self, version: str) -> None:
        headers = self.headers
        connection = headers.get("connection", "").lower()
        self.reusable = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)
        for part in headers.get("keep-alive", "").split(","):
            key, _, value = part.strip().partition("=")
            if _is_number(value):
                if key == "max":
                    self.uses_left = int(value)
                elif key == "timeout":
                    self.idle_limit_s = float(value)
        if self.status in _NO_BODY:
            self._mode = "end"
        elif headers.get("transfer-encoding", "").lower().endswith("chunked"):
            self._mode = "chunked"
        elif "content-length" in headers:
            lengths = {part.strip() for part in headers["content-length"].split(",")}
            text = lengths.pop()
            if lengths or not _is_number(text):
                raise Malformed(f"Content-Length {headers['content-length']!r}")
            self._left = int(text)
            self._mode = "length" if self._left else "end"
        else:
            self._mode = "close"
            self.until_close = True
            self.reusable = False

    def _length(self, data: bytes) -> list[bytes]:
        left = self._left
        if len(data) < left:
            self._left = left - len(data)
            return [data]
        self._left = 0
        self._finish(data[left:])
        return [data[:left]]

    def _chunked(self, data: bytes) -> list[bytes]:
        if self._held:
            data = self._held + data
            self._held = b""
        pieces: list[bytes] = []
        left = self._left  # bytes of the current chunk still to come, its closing CRLF included
        at, size = 0, len(data)
        while at < size:
            if left:
                end = at + left
                if end <= size:
                    if data[end - 2 : end] != b"\r\n":
                        raise Malformed("a chunk that is longer than its size")
                    if left > 2:
                        pieces.append(data[at : end - 2])
                    at = end
                    left = 0
                    continue
                body = min(size, end - 2)
                if body > at:
                    pieces.append(data[at:body])
                    left -= body - at
                self._held = data[body:]
                break
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                if size - at > MAX_LINE_BYTES:
                    raise Malformed("a chunk-size line of more than 4 KiB")
                self._held = data[at:]
                break
            line = data[at:line_end]
            length = _SIZES.get(line)
            if length is None:
                length = _size(line)
            at = line_end + 2
            if not length:
                self._mode = "trailer"
                self._left = 0
                self._trailer(data[at:])
                return pieces
            left = length + 2
        self._left = left
        return pieces

    def _trailer(self, data: bytes) -> list[bytes]:
        data = self._held + data
        self._held = b""
        while True:
            end = data.find(b"\r\n")
            if end < 0:
                if len(data) > MAX_LINE_BYTES:
                    raise Malformed("a trailer of more than 4 KiB")
                self._held = data
                return []
            if not end:
                self._finish(data[2:])
                return []
            data = data[end + 2 :]
