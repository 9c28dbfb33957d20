"""Recognise plain events in a chunked body, without decoding them.

A plain event differs from an earlier event of the same response in its text alone. Nearly all
events of a long stream are plain, and comparing bytes is several times cheaper than decoding JSON.
For example, after `ResponseReader` has decoded the event

    data: {"id":"c-1","choices":[{"delta":{"content":"The"}}]}

it learns the template of the response, which is a pair of bytes:

    before_text = b'{"id":"c-1","choices":[{"delta":{"content":"'
    after_text = b'"}}]}'

The next event, whose content is " cat", has the same bytes around its text and is plain. It is only
counted and timestamped. A text is plain if it needs no decoding either (see `is_plain_text`). An
event with a finish reason, a usage or another id is not plain. What is not recognised here is left
to `http1`, `sse` and `response_reader`, which define what a response means.

A server usually writes each event as one chunk, which arrives in one read:

    3c CRLF  data: {"id": ... "}}]} LF LF  CRLF

This is the reference implementation. `_compiled.c` has a faster one, and `implementation.py`
chooses between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..wire_formats.reference import is_plain_text
from .chunk_size import CHUNK_SIZES, MalformedResponseError, parse_chunk_size

if TYPE_CHECKING:
    from ..wire_formats.event_timeline import EventOrCount

_MAX_SIZE_DIGITS = 8
"""A chunk whose size has more hexadecimal digits than this is not recognised."""

_LARGE_READ_BYTES = 2048
"""In a read of this size or more (as in `receiver.py`), several chunks are not counted as plain."""

_MAX_CACHED_ITEMS = 1 << 14
_MAX_CACHED_TEXT_BYTES = 64
_EVENT_START = b"data: "
_EVENT_END = b"\n\n"
_CHUNK_END = b"\r\n"

_beginnings_by_read_bytes: dict[int, bytes] = {}
"""A cache of the results of `_beginning_of_single_event_read`."""

_plain_texts: set[bytes] = set()
"""A cache of plain texts that were seen before. The vocabulary of a model repeats itself."""


class PlainChunks(NamedTuple):
    """The chunks at the beginning of some data that hold plain events only."""

    chunks: int
    events: int
    size_bytes: int


def count_plain_events(data: bytes, before_text: bytes, after_text: bytes) -> tuple[int, int]:
    """Count the chunks and events of a read that holds plain events only.

    Args:
        data: The bytes of the read, which begin with a chunk.
        before_text: The bytes of a plain event before its text, from the template.
        after_text: The bytes after its text.

    Returns:
        The number of chunks and the number of events, such as (1, 1) for the usual read of one
        event. The number of events is 0 if the read holds anything else, or if it is large and has
        several chunks.
    """
    if _is_one_plain_event(data, before_text, after_text):
        return 1, 1
    plain = scan_plain_chunks(data, before_text, after_text)
    is_all_plain = plain.size_bytes == len(data)
    if is_all_plain and (plain.chunks == 1 or len(data) < _LARGE_READ_BYTES):
        return plain.chunks, plain.events
    return plain.chunks, 0


def _is_one_plain_event(data: bytes, before_text: bytes, after_text: bytes) -> bool:
    """Return True if the data is one chunk that holds one plain event.

    This is the usual read of a stream, so it is recognised with four comparisons, without parsing
    the size of the chunk: the size of the read alone says with which bytes it must begin.
    """
    read_bytes = len(data)
    beginning = _beginnings_by_read_bytes.get(read_bytes)
    if beginning is None:
        beginning = _beginning_of_single_event_read(read_bytes)
    text_start = len(beginning) + len(before_text)
    end_bytes = len(_EVENT_END) + len(_CHUNK_END)
    if not (
        data.startswith(beginning)
        and data.startswith(before_text, len(beginning))
        and data.endswith(_EVENT_END + _CHUNK_END)
        and data.endswith(after_text, text_start, -end_bytes)
    ):
        return False
    text = data[text_start : -end_bytes - len(after_text)]
    return text in _plain_texts or _is_new_plain_text(text)


def _beginning_of_single_event_read(read_bytes: int) -> bytes:
    """Return the bytes with which a read of this size begins if it is one chunk of one event.

    They are the size line of the chunk and `data: `. A read of 66 bytes, for instance, begins with
    `3c CRLF data: `: the size line and both line ends take 6 bytes and leave 60 (hexadecimal 3c).
    The result is cached.
    """
    size_line = _size_line_of_single_chunk_read(read_bytes)
    if size_line is not None:
        beginning = size_line + _CHUNK_END + _EVENT_START
    else:
        beginning = bytes(read_bytes + 1)  # It is longer than the read, so that it never matches.
    if len(_beginnings_by_read_bytes) < _MAX_CACHED_ITEMS:
        _beginnings_by_read_bytes[read_bytes] = beginning
    return beginning


def _size_line_of_single_chunk_read(read_bytes: int) -> bytes | None:
    """Return the size line, without its line end, of a read of this size that is one chunk.

    The digits of the size take some bytes of the read themselves, so each possible number of digits
    is tried. Return None if no chunk fits: one of 15 bytes (`f`) makes a read of 20 bytes and one
    of 16 bytes (`10`) one of 22, so that a read of 21 bytes is no single chunk.
    """
    line_ends_bytes = 2 * len(_CHUNK_END)
    for digits in range(1, _MAX_SIZE_DIGITS):
        chunk_bytes = read_bytes - digits - line_ends_bytes
        if chunk_bytes <= 0:
            return None
        size_line = b"%x" % chunk_bytes
        if len(size_line) == digits:
            return size_line
    return None


def _is_new_plain_text(text: bytes) -> bool:
    """Return True if this is a plain text, and remember it."""
    if not is_plain_text(text):
        return False
    if len(_plain_texts) < _MAX_CACHED_ITEMS and len(text) < _MAX_CACHED_TEXT_BYTES:
        _plain_texts.add(text)
    return True


def scan_plain_chunks(data: bytes, before_text: bytes, after_text: bytes) -> PlainChunks:
    """Find the whole chunks at the beginning of `data` that hold plain events only.

    The scan ends at the first chunk that is incomplete, has an invalid or very long size line, is
    the last one (of size 0), or holds anything but plain events.

    Args:
        data: Bytes that begin with a chunk.
        before_text: The bytes of a plain event before its text, from the template.
        after_text: The bytes after its text.
    """
    chunks = 0
    events = 0
    position = 0
    while position < len(data):
        max_line_end = position + _MAX_SIZE_DIGITS + len(_CHUNK_END)
        line_end = data.find(_CHUNK_END, position, max_line_end)
        if line_end <= position:
            break
        chunk_bytes = _size_in_line(data[position:line_end])
        content_start = line_end + len(_CHUNK_END)
        content_end = content_start + chunk_bytes
        chunk_end = content_end + len(_CHUNK_END)
        if not chunk_bytes or data[content_end:chunk_end] != _CHUNK_END:
            break
        events_in_chunk = _count_events(data[content_start:content_end], before_text, after_text)
        if not events_in_chunk:
            break
        chunks += 1
        events += events_in_chunk
        position = chunk_end
    return PlainChunks(chunks, events, position)


def _size_in_line(line: bytes) -> int:
    """Return the size in the line before a chunk, or 0 if it has none or is the last one."""
    size = CHUNK_SIZES.get(line)
    if size is not None:
        return size
    try:
        return parse_chunk_size(line)
    except MalformedResponseError:
        return 0


def _count_events(content: bytes, before_text: bytes, after_text: bytes) -> int:
    """Return how many events a chunk holds if all of them are plain, else 0.

    The text of an event ends at the first quote: one that belongs to the text would be escaped with
    a backslash, and a text with a backslash is not plain.
    """
    event_start = _EVENT_START + before_text
    event_end = after_text + _EVENT_END
    events = 0
    position = 0
    while position < len(content):
        text_start = position + len(event_start)
        text_end = content.find(b'"', text_start)
        if (
            text_end < 0
            or not content.startswith(event_start, position)
            or not content.startswith(event_end, text_end)
            or not is_plain_text(content[text_start:text_end])
        ):
            return 0
        position = text_end + len(event_end)
        events += 1
    return events


def parse_whole_chunks(
    data: bytes, before_text: bytes, after_text: bytes
) -> tuple[int, list[EventOrCount], int]:
    """Recognise events in whole chunks at the beginning of `data`.

    Without a template (`before_text` is empty) nothing is recognised. The compiled version
    recognises more than this one, namely all chunks whose events are one line of data each.

    Args:
        data: A part of a chunked body that begins with a chunk and an event.
        before_text: The bytes of a plain event before its text, from the template.
        after_text: The bytes after its text.

    Returns:
        The number of chunks, their events (a number stands for that many plain events), and the
        number of bytes. For two chunks of one plain event each this is `(2, [2], size)`.
    """
    if not before_text:
        return 0, [], 0
    plain = scan_plain_chunks(data, before_text, after_text)
    events: list[EventOrCount] = [plain.events] if plain.events else []
    return plain.chunks, events, plain.size_bytes
