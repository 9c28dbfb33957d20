"""Recognise plain events in a chunked body, without decoding them.

A plain event differs from an earlier event of the same response in its text alone (see
`ResponseReader._learn_template`). Nearly all events of a long stream are plain, and comparing bytes
is several times cheaper than decoding them. What is not recognised here is left to `http1`, `sse`
and `response_reader`, which define what a response means.

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
_LARGE_READ_BYTES = 2048  # As in receiver.py: of a larger read, only the first chunk is looked at.
_MAX_CACHED_ITEMS = 1 << 14
_MAX_CACHED_TEXT_BYTES = 64
_EVENT_START = b"data: "
_EVENT_END = b"\n\n"
_CHUNK_END = b"\r\n"

_beginnings: dict[int, bytes] = {}
"""The bytes before the payload in a read that is one chunk of one event, by the size of the read.
"""

_plain_texts: set[bytes] = set()
"""Plain texts that were seen before. The vocabulary of a model repeats itself."""


class PlainChunks(NamedTuple):
    """The chunks at the beginning of some data that hold plain events only."""

    chunks: int
    events: int
    size_bytes: int


def count_plain_events(data: bytes, before: bytes, after: bytes) -> tuple[int, int]:
    """Count the chunks and events of a read that holds plain events only.

    Args:
        data: The bytes of the read, which begin with a chunk.
        before: The bytes before the text of a plain event.
        after: The bytes after its text.

    Returns:
        The number of chunks and the number of events. The latter is 0 if the read holds anything
        else, or if it is large and has several chunks.
    """
    if _is_one_plain_event(data, before, after):
        return 1, 1
    plain = scan_plain_chunks(data, before, after)
    is_whole = plain.size_bytes == len(data)
    if is_whole and (plain.chunks == 1 or len(data) < _LARGE_READ_BYTES):
        return plain.chunks, plain.events
    return plain.chunks, 0


def _is_one_plain_event(data: bytes, before: bytes, after: bytes) -> bool:
    """Return True if the data is one chunk that holds one plain event, the usual case."""
    beginning = _beginnings.get(len(data)) or _beginning_of_read(len(data))
    text_start = len(beginning) + len(before)
    end_bytes = len(_EVENT_END) + len(_CHUNK_END)
    if not (
        data.startswith(beginning)
        and data.startswith(before, len(beginning))
        and data.endswith(_EVENT_END + _CHUNK_END)
        and data.endswith(after, text_start, -end_bytes)
    ):
        return False
    text = data[text_start : -end_bytes - len(after)]
    return text in _plain_texts or _is_new_plain_text(text)


def _beginning_of_read(size: int) -> bytes:
    """Return the bytes before the payload if a read of `size` bytes is one chunk of one event.

    The size line of the chunk takes some of the bytes itself. If no chunk fits the size, the result
    is longer than the read, so that no read begins with it.
    """
    beginning = bytes(size + 1)
    for digits in range(1, _MAX_SIZE_DIGITS):
        chunk_bytes = size - digits - 2 * len(_CHUNK_END)
        size_line = b"%x" % max(chunk_bytes, 0)
        if chunk_bytes > 0 and len(size_line) == digits:
            beginning = size_line + _CHUNK_END + _EVENT_START
    if len(_beginnings) < _MAX_CACHED_ITEMS:
        _beginnings[size] = beginning
    return beginning


def _is_new_plain_text(text: bytes) -> bool:
    """Return True if this is a plain text, and remember it."""
    if not is_plain_text(text):
        return False
    if len(_plain_texts) < _MAX_CACHED_ITEMS and len(text) < _MAX_CACHED_TEXT_BYTES:
        _plain_texts.add(text)
    return True


def scan_plain_chunks(data: bytes, before: bytes, after: bytes) -> PlainChunks:
    """Find the whole chunks at the beginning of `data` that hold plain events only.

    Args:
        data: Bytes that begin with a chunk.
        before: The bytes before the text of a plain event.
        after: The bytes after its text.
    """
    chunks = 0
    events = 0
    position = 0
    while position < len(data):
        line_end = data.find(_CHUNK_END, position, position + _MAX_SIZE_DIGITS + len(_CHUNK_END))
        chunk_bytes = _size_in_line(data[position:line_end]) if line_end > position else 0
        content_start = line_end + len(_CHUNK_END)
        content_end = content_start + chunk_bytes
        chunk_end = content_end + len(_CHUNK_END)
        if not chunk_bytes or data[content_end:chunk_end] != _CHUNK_END:
            break
        events_in_chunk = _count_events(data[content_start:content_end], before, after)
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


def _count_events(content: bytes, before: bytes, after: bytes) -> int:
    """Return how many events a chunk holds if all of them are plain, else 0."""
    event_start = _EVENT_START + before
    event_end = after + _EVENT_END
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
    data: bytes, before: bytes, after: bytes
) -> tuple[int, list[EventOrCount], int]:
    """Recognise events in whole chunks at the beginning of `data`.

    Without a template (`before` is empty) nothing is recognised. The compiled version recognises
    more than this one, namely all chunks whose events are one line of data each.

    Args:
        data: A part of a chunked body that begins with a chunk and an event.
        before: The bytes before the text of a plain event.
        after: The bytes after its text.

    Returns:
        The number of chunks, their events (a number stands for that many plain events), and the
        number of bytes.
    """
    if not before:
        return 0, [], 0
    plain = scan_plain_chunks(data, before, after)
    events: list[EventOrCount] = [plain.events] if plain.events else []
    return plain.chunks, events, plain.size_bytes
