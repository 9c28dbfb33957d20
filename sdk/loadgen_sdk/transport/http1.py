"""HTTP/1.1 without I/O: build request heads, parse response heads and bodies.

A body may be chunked, have a length, or end with the connection. A `ResponseParser` parses one
response. Bytes that it cannot accept raise `MalformedResponseError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .chunk_size import CHUNK_SIZES, MAX_DIGITS, MalformedResponseError, chunk_size_of_line
from .implementation import ResponseState

CREDENTIALS = frozenset(("authorization", "api-key", "x-api-key"))
"""The names of the headers that carry credentials, in lower case."""

MAX_HEAD_BYTES = 64 << 10
MAX_LINE_BYTES = 4 << 10
"""The largest size line of a chunk, with extensions, and the largest line of a trailer."""

HTTP_2 = "the server supports HTTP/2 but not HTTP/1.1"
_BARE_LF = "the lines of the response head end with LF instead of CRLF"

_LINE_END = b"\r\n"
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_STATUSES_WITHOUT_BODY = frozenset((204, 304))
_MAX_CACHED_HEADS = 64


def build_request_head(method: str, path: str, headers: list[tuple[str, str]]) -> bytes:
    """Return the fixed part of a request head, without Content-Length and the closing blank line.

    A line break in a header is refused, because what follows it would become a header of its own.

    Raises:
        ValueError: A header has a line break in it.
    """
    for name, value in headers:
        if "\r" in name + value or "\n" in name + value:
            raise ValueError(f"header {name!r} contains a line break")
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    return ("\r\n".join(lines) + "\r\n").encode("latin-1")


def merge_headers(
    own_headers: Iterable[tuple[str, str]], user_headers: Iterable[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return the headers of a request: those of this client, then those of the user.

    A header of the user replaces the one of the same name. A credential of the user, such as
    `api-key` (see CREDENTIALS), replaces every API key of this client, also one in another header.
    The key of this client may come from the environment and be meant for another server. User and
    password of the URL are meant for this server, so only an `Authorization` header replaces them.

    Args:
        own_headers: The headers of this client, as (name, value) pairs.
        user_headers: The headers that the user specifies.
    """
    own_headers = list(own_headers)
    user_headers = list(user_headers)
    user_names = {name.lower() for name, _ in user_headers}
    user_sets_credential = not user_names.isdisjoint(CREDENTIALS)

    merged: list[tuple[str, str]] = []
    for name, value in own_headers:
        is_replaced = name.lower() in user_names
        is_unwanted_key = user_sets_credential and _is_api_key(name, value)
        if not is_replaced and not is_unwanted_key:
            merged.append((name, value))

    return merged + user_headers


def _is_api_key(name: str, value: str) -> bool:
    """Return True for a header that carries an API key.

    User and password of a URL are in a credential header as well, as `Authorization: Basic ...`,
    but they are no API key.
    """
    is_user_and_password = value.startswith("Basic ")
    return name.lower() in CREDENTIALS and not is_user_and_password


class ResponseHead(NamedTuple):
    """The parsed head of a response (see `ResponseParser`).

    Attributes:
        status: The status code.
        headers: The headers, with names in lower case.
        mode: How the body is framed: "chunked", "length", "close" (it ends with the connection) or
            "end" (there is no body).
        length: The number of bytes of the body if `mode` is "length", else 0.
        is_reusable: The connection can carry another request after the response.
        uses_left: How many more requests the connection accepts, or None if that is not stated.
        idle_limit_s: For how many seconds the connection may be idle, or None if not stated.
    """

    status: int
    headers: dict[str, str]
    mode: str
    length: int
    is_reusable: bool
    uses_left: int | None
    idle_limit_s: float | None


PARSED_HEADS: dict[bytes, ResponseHead] = {}
"""A cache. A server repeats its head, byte by byte, until the date in it changes."""


def _parse_head(data: bytes) -> ResponseHead:
    """Parse the head of a final response, without the blank line after it.

    Raises:
        MalformedResponseError: The head is invalid.
    """
    status_line, *header_lines = data.decode("latin-1").split("\r\n")
    version, status = _parse_status_line(status_line)
    headers = _parse_headers(header_lines)
    uses_left, idle_limit_s = _parse_keep_alive(headers.get("keep-alive", ""))
    framing = _body_framing(status, headers)
    ends_with_connection = framing.mode == "close"

    return ResponseHead(
        status=status,
        headers=headers,
        mode=framing.mode,
        length=framing.length,
        is_reusable=_is_kept_alive(version, headers) and not ends_with_connection,
        uses_left=uses_left,
        idle_limit_s=idle_limit_s,
    )


def _parse_status_line(status_line: str) -> tuple[str, int]:
    """Return the version and the status of a line such as `HTTP/1.1 200 OK`.

    Raises:
        MalformedResponseError: It is not HTTP/1.x, or the status is not that of a final response,
            which is 200 or more.
    """
    version, _, code_and_reason = status_line.partition(" ")
    code = code_and_reason.partition(" ")[0]
    is_final_status = len(code) == 3 and _is_decimal(code) and int(code) >= 200
    if not version.startswith("HTTP/1.") or not is_final_status:
        raise MalformedResponseError(f"status line {status_line[:80]!r}")
    return version, int(code)


def _is_kept_alive(version: str, headers: dict[str, str]) -> bool:
    """Return True if the server keeps the connection open after the response.

    HTTP/1.1 does so unless it sends `Connection: close`. HTTP/1.0 does so only if it sends
    `Connection: keep-alive`.
    """
    connection = headers.get("connection", "").lower()
    if "close" in connection:
        return False
    return version != "HTTP/1.0" or "keep-alive" in connection


def _parse_headers(lines: list[str]) -> dict[str, str]:
    """Return the headers, with names in lower case. Repeated ones are joined with ", ".

    Raises:
        MalformedResponseError: A line has no name, or white space around it, or ends with LF alone.
    """
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise MalformedResponseError(f"header line {line[:80]!r}")
        if "\n" in line:
            raise MalformedResponseError(_BARE_LF)

        name = name.lower()
        value = value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value

    return headers


def _parse_keep_alive(value: str) -> tuple[int | None, float | None]:
    """Return `max` and `timeout` of a Keep-Alive header, such as `timeout=5, max=100`.

    `max` is how many more requests the connection accepts, and `timeout` for how many seconds it
    may be idle. What is missing or no number is None.
    """
    uses_left: int | None = None
    idle_limit_s: float | None = None
    for parameter in value.split(","):
        name, _, number = parameter.strip().lower().partition("=")
        if not _is_decimal(number):
            continue
        if name == "max":
            uses_left = int(number)
        elif name == "timeout":
            idle_limit_s = float(number)

    return uses_left, idle_limit_s


class _BodyFraming(NamedTuple):
    """How the end of a body is found.

    Attributes:
        mode: As in `ResponseHead`.
        length: The number of bytes of the body if `mode` is "length", else 0.
    """

    mode: str
    length: int = 0


def _body_framing(status: int, headers: dict[str, str]) -> _BodyFraming:
    """Return how the body of a response is framed.

    The rules and their order are those of RFC 9112, section 6.3.

    Raises:
        MalformedResponseError: The Content-Length is invalid.
    """
    if status in _STATUSES_WITHOUT_BODY:
        return _BodyFraming("end")
    if headers.get("transfer-encoding", "").lower().endswith("chunked"):
        return _BodyFraming("chunked")
    if "content-length" not in headers:
        return _BodyFraming("close")

    length = _parse_content_length(headers["content-length"])
    return _BodyFraming("length", length) if length else _BodyFraming("end")


def _parse_content_length(value: str) -> int:
    """Return the number of bytes that a Content-Length states.

    The header may be repeated, as in `12, 12`, but only with the same number.

    Raises:
        MalformedResponseError: The value is no number, or repeated with another number.
    """
    lengths = [length.strip() for length in value.split(",")]
    is_same_length = all(length == lengths[0] for length in lengths)
    if not is_same_length or not _is_decimal(lengths[0]):
        raise MalformedResponseError(f"Content-Length {value!r}")
    return int(lengths[0])


def _is_decimal(text: str) -> bool:
    """Return True if a text is a number of ASCII digits of reasonable length."""
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


class ResponseParser(ResponseState):
    """Parses one response. `feed` takes the bytes that arrive and returns the parts of the body.

    Attributes:
        status: The status code, or 0 until the head is complete.
        headers: The headers, with names in lower case. Repeated ones are joined with ", ". Equal
            heads share the dictionary.
        complete: The body has ended by its framing.
        is_reusable: Once the response is complete, the connection can carry another request.
        surplus: Bytes after the end.
    """

    __slots__ = ()

    def feed(self, data: bytes) -> list[bytes]:
        """Parse the next bytes of the response and return the parts of the body in them.

        In a chunked body, a part is the content of a chunk or of a piece of one. Bytes after the
        end are kept in `surplus`, and make the connection unusable for another request.

        Raises:
            MalformedResponseError: The bytes are not HTTP/1.1.
        """
        if self._mode == "chunked":
            return self._feed_chunked(data)
        if self._mode == "length":
            return self._feed_length(data)
        if self._mode == "close":
            return [data]

        if self._mode == "head":
            body_start = self.feed_head(data)
            return self.feed(body_start) if body_start else []

        if self._mode == "trailer":
            self._feed_trailer(data)
            return []

        self.surplus += data
        self.is_reusable = False
        return []

    def feed_end(self) -> bool:
        """Note that the server closed the connection. Return whether the body is complete."""
        if self._mode == "close":
            self._finish(b"")
        return self.is_complete

    @property
    def between_chunks(self) -> bool:
        """Whether the bytes so far end with a whole chunk and the body goes on.

        It is true for bodies without chunks.
        """
        if self._mode in ("length", "close"):
            return True
        return not (self._bytes_left or self._unparsed or self.is_complete)

    @property
    def missing_chunk_bytes(self) -> int:
        """The number of bytes of the current chunk that are still to come, or 0 if unknown.

        The line end after the chunk is counted.
        """
        if not self._bytes_left or self._mode != "chunked":
            return 0
        return self._bytes_left - len(self._unparsed)

    def _finish(self, surplus: bytes) -> None:
        """Note the end of the response, and the bytes that follow it."""
        self._mode = "end"
        self.is_complete = True
        self.surplus = surplus
        if surplus:
            self.is_reusable = False

    def feed_head(self, data: bytes) -> bytes:
        """Parse the head or a part of it, and return what follows it.

        `status` stays 0 until the head is complete. A response without a body ends with its head,
        and what follows it is `surplus`.

        Raises:
            MalformedResponseError: The head is invalid.
        """
        data = _skip_interim_responses(self._unparsed + data)
        lines, separator, body_start = data.partition(_HEAD_END)
        if not separator:
            _check_incomplete_head(data)
            self._unparsed = data
            return b""

        self._unparsed = b""
        self._use_head(_cached_head(lines))

        if self._mode == "end":
            self._finish(body_start)
            return b""

        return body_start

    def _use_head(self, head: ResponseHead) -> None:
        """Take over the fields of a parsed head."""
        self.status = head.status
        self.headers = head.headers
        self._mode = head.mode
        self._bytes_left = head.length
        self.is_reusable = head.is_reusable
        self.uses_left = head.uses_left
        self.idle_limit_s = head.idle_limit_s
        self.is_chunked = head.mode == "chunked"
        self.ends_with_connection = head.mode == "close"

    def _feed_length(self, data: bytes) -> list[bytes]:
        """Return the next part of a body with a Content-Length, and finish after its last byte."""
        bytes_left = self._bytes_left
        if len(data) < bytes_left:
            self._bytes_left = bytes_left - len(data)
            return [data]
        self._bytes_left = 0
        self._finish(data[bytes_left:])
        return [data[:bytes_left]]

    def _feed_chunked(self, data: bytes) -> list[bytes]:
        r"""Parse a part of a chunked body and return the contents of its chunks.

        The usual read of a stream is exactly one chunk, or the last chunk, `0\r\n\r\n`, which ends
        the body. Both are recognised first, without the general parsing.

        Args:
            data: The next bytes of the body. They may begin and end anywhere within a chunk.
        """
        is_within_chunk = self._bytes_left > 0 or self._unparsed != b""
        if not is_within_chunk:
            content = _content_of_single_chunk(data)
            if content is not None:
                return [content]
            if data == _LAST_CHUNK:
                self._finish(b"")
                return []

        if self._unparsed:
            data = self._unparsed + data
            self._unparsed = b""

        # Each step parses the size line or the content of a chunk, and returns the position after
        # it. The contents are added to `contents`.
        contents: list[bytes] = []
        position = 0
        while position < len(data):
            if self._bytes_left:
                position = self._feed_content(data, position, contents)
            else:
                position = self._feed_size_line(data, position)

        return contents

    def _feed_content(self, data: bytes, position: int, pieces: list[bytes]) -> int:
        """Parse the content of a chunk from `position`, and return the position after it.

        `_bytes_left` counts the bytes of the chunk that are still to come, with the CRLF after its
        content. A read may end anywhere in the chunk, and the next read then continues here.

        Args:
            data: The bytes to parse.
            position: Where the content, or the rest of it, begins.
            pieces: The list to which the content is added.

        Raises:
            MalformedResponseError: There is no line end after the content.
        """
        chunk_end = position + self._bytes_left
        content_end = chunk_end - len(_LINE_END)

        is_incomplete = chunk_end > len(data)
        if is_incomplete:
            self._feed_incomplete_content(data, position, content_end, pieces)
            return len(data)

        if data[content_end:chunk_end] != _LINE_END:
            raise MalformedResponseError("a chunk is longer than its stated size")

        if content_end > position:
            pieces.append(data[position:content_end])

        self._bytes_left = 0
        return chunk_end

    def _feed_incomplete_content(
        self, data: bytes, position: int, content_end: int, pieces: list[bytes]
    ) -> None:
        r"""Add the content of a chunk as far as it has come, and keep a part of its line end.

        Of the chunk `5\r\nhello\r\n`, the data may end after `hel`: this is added, and nothing is
        kept. If they end after `hello\r`, the content is added, and `\r` waits in `_unparsed` for
        the rest of the line end.

        Args:
            data: The bytes to parse, which end within the chunk.
            position: Where the content, or the rest of it, begins.
            content_end: The position after the last byte of the content. It is beyond the end of
                the data if a part of the content is missing.
            pieces: The list to which the content is added.
        """
        available_end = min(len(data), content_end)
        if available_end > position:
            pieces.append(data[position:available_end])
            self._bytes_left -= available_end - position
        self._unparsed = data[available_end:]

    def _feed_size_line(self, data: bytes, position: int) -> int:
        """Parse the size line of a chunk at `position`, and return the position after it.

        An incomplete line waits in `_unparsed`. A size of 0 marks the last chunk, and all that
        follows it is then parsed as the trailer.
        """
        line_end = data.find(_LINE_END, position)
        if line_end < 0:
            if len(data) - position > MAX_LINE_BYTES:
                raise MalformedResponseError("a chunk-size line is longer than 4 KiB")
            self._unparsed = data[position:]
            return len(data)

        line = data[position:line_end]
        size = chunk_size_of_line(line)
        position = line_end + len(_LINE_END)

        is_last_chunk = size == 0
        if is_last_chunk:
            self._mode = "trailer"
            self._feed_trailer(data[position:])
            return len(data)

        self._bytes_left = size + len(_LINE_END)
        return position

    def _feed_trailer(self, data: bytes) -> None:
        """Skip the lines after the last chunk, up to the blank line that ends the response.

        They are headers, which the client does not need. An incomplete line waits in `_unparsed`.
        """
        data = self._unparsed + data
        self._unparsed = b""
        while True:
            line_end = data.find(_LINE_END)
            if line_end < 0:
                if len(data) > MAX_LINE_BYTES:
                    raise MalformedResponseError("a trailer is longer than 4 KiB")
                self._unparsed = data
                return

            is_blank = line_end == 0
            data = data[line_end + len(_LINE_END) :]
            if is_blank:
                self._finish(data)
                return


def _skip_interim_responses(data: bytes) -> bytes:
    """Return what follows complete interim responses, whose status is 1xx.

    A server may send some, such as `100 Continue`, before the final response.
    """
    while data.startswith(b"HTTP/1.1 1") and _HEAD_END in data:
        data = data.partition(_HEAD_END)[2]
    return data


def _check_incomplete_head(data: bytes) -> None:
    """Raise MalformedResponseError if these bytes cannot be the beginning of a response head.

    Otherwise the client would wait for the end of the head until its timeout.
    """
    version_start = b"HTTP/1."
    if not version_start.startswith(data[: len(version_start)]):
        # A frame of HTTP/2 begins with its length in three bytes. Type 4 is SETTINGS, which is the
        # first frame of every server.
        is_http2_settings_frame = data[:2] == b"\0\0" and data[3:4] == b"\4"
        if is_http2_settings_frame:
            raise MalformedResponseError(HTTP_2)
        raise MalformedResponseError(f"not an HTTP/1.x response: {data[:60]!r}")

    if b"\n\n" in data:
        raise MalformedResponseError(_BARE_LF)
    if len(data) > MAX_HEAD_BYTES:
        raise MalformedResponseError("the response head is longer than 64 KiB")


def _cached_head(lines: bytes) -> ResponseHead:
    """Return the parsed head, from the cache if it is there.

    A full cache is emptied, because the dates in old heads make them useless.
    """
    head = PARSED_HEADS.get(lines)
    if head is None:
        head = _parse_head(lines)
        if len(PARSED_HEADS) >= _MAX_CACHED_HEADS:
            PARSED_HEADS.clear()
        PARSED_HEADS[lines] = head
    return head


def _content_of_single_chunk(data: bytes) -> bytes | None:
    r"""Return the content if the data is exactly one chunk, such as `5\r\nhello\r\n`, else None.

    The usual read of a stream is such a chunk, with a size that came before and is in the cache.
    Data with another size line are left to the general parsing.
    """
    line_end = data.find(_LINE_END)
    size = CHUNK_SIZES.get(data[:line_end])
    if not size:
        return None

    content_start = line_end + len(_LINE_END)
    content_end = content_start + size
    is_single_chunk = len(data) == content_end + len(_LINE_END) and data.endswith(_LINE_END)

    return data[content_start:content_end] if is_single_chunk else None
