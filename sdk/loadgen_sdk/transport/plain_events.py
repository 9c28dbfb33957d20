"""Finds plain events in a chunked body: those that differ from an earlier event of the same answer in their text alone.

Of a long stream nearly all events are plain (see `ResponseReader._learn`), and comparing bytes is several times cheaper than
decoding. What is not recognised here is left to `http1`, `sse` and `reader`, which define what an answer means. This is
the reference implementation; `_compiled.c` has a faster one, and `implementation.py` chooses between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..wire_formats.reference import is_plain_text
from .chunk_size import CHUNK_SIZES, MalformedResponseError, chunk_size

if TYPE_CHECKING:
    from ..wire_formats.event_timeline import EventOrCount

_MOST_SIZE_DIGITS = 8
_MANY_BYTES = 2048  # as in receiver.py: of a longer read only the first chunk is looked at
_MOST_TEXTS = 1 << 14
_first_lines: dict[int, bytes] = {}  # of a read of so many bytes that is one chunk of one event
_texts: set[bytes] = set()  # plain ones, seen before: the vocabulary of a model repeats itself


def plain_read(data: bytes, before: bytes, after: bytes) -> tuple[int, int]:
    """How many chunks and plain events a read holds; no events: it holds something else, or it is long.

    `before` and `after`: what stands before and after the text of a plain event's payload.
    """
    size = len(data)
    first_line = _first_lines.get(size) or _first_line(size)
    text_at = len(first_line) + len(before)
    if (
        data.startswith(first_line)
        and data.startswith(before, len(first_line))
        and data.endswith(b"\n\n\r\n")
    ):
        text = data[text_at : -4 - len(after)]
        if data.endswith(after, text_at, -4) and (text in _texts or _is_new_plain_text(text)):
            return 1, 1
    chunks, events, used = plain_chunks(data, before, after)
    return (chunks, events) if used == size and (chunks == 1 or size < _MANY_BYTES) else (chunks, 0)


def _first_line(size: int) -> bytes:
    """The size line of the one chunk in so many bytes, and how its event begins."""
    line = bytes(size + 1)  # no chunk has this size: not found
    for digits in range(1, _MOST_SIZE_DIGITS):
        length = size - 4 - digits
        if length > 0 and len(b"%x" % length) == digits:
            line = b"%x\r\ndata: " % length
    if len(_first_lines) < _MOST_TEXTS:
        _first_lines[size] = line
    return line


def _is_new_plain_text(text: bytes) -> bool:
    if not is_plain_text(text):
        return False
    if len(_texts) < _MOST_TEXTS and len(text) < 64:
        _texts.add(text)
    return True


def plain_chunks(data: bytes, before: bytes, after: bytes) -> tuple[int, int, int]:
    """How many chunks at the beginning of `data` hold nothing but plain events: chunks, events in them, their bytes.

    `before` and `after`: what stands before and after the text of a plain event's payload.
    """
    start, end = b"data: " + before, after + b"\n\n"
    start_bytes, end_bytes = len(start), len(end)
    chunks = events = position = 0
    size = len(data)
    while position < size:
        line_end = data.find(b"\r\n", position, position + _MOST_SIZE_DIGITS + 2)
        length = CHUNK_SIZES.get(data[position:line_end]) or _size(data, position, line_end)
        if not length:
            break
        at = line_end + 2
        close = at + length
        if data[close : close + 2] != b"\r\n":
            break
        found = 0
        while at < close and data.startswith(start, at):
            text_end = data.find(b'"', at + start_bytes, close)
            if (
                text_end < 0
                or not data.startswith(end, text_end)
                or not is_plain_text(data[at + start_bytes : text_end])
            ):
                break
            at = text_end + end_bytes
            found += 1
        if at != close:
            break
        chunks += 1
        events += found
        position = close + 2
    return chunks, events, position


def _size(data: bytes, start: int, end: int) -> int:
    """The size in the size line between these places; 0: it is none, or that of the last chunk."""
    try:
        return chunk_size(data[start:end]) if end > start else 0
    except MalformedResponseError:
        return 0


def whole_chunks(data: bytes, before: bytes, after: bytes) -> tuple[int, list[EventOrCount], int]:
    """Recognise events in whole chunks at the beginning of `data`.

    Without a template (`before` is empty) nothing is recognised. The compiled version recognises more than this one:
    all chunks whose events are one line of data each.

    Args:
        data: A part of a chunked body that begins with a chunk and an event.
        before: The bytes before the text of a plain event.
        after: The bytes after its text.

    Returns:
        The number of chunks, their events (a number stands for that many plain events), and the number of bytes.
    """
    if not before:
        return 0, [], 0
    chunks, plain, used = plain_chunks(data, before, after)
    return chunks, [plain] if plain else [], used
