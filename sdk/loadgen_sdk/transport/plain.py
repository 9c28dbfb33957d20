"""Finds plain events in a chunked body: those that differ from an earlier event of the same answer in their text alone.

Of a long stream nearly all events are plain (see `Reading._learn`), and comparing bytes is several times cheaper than
decoding. What is not recognised here is left to `http1`, `sse` and `reader`, which define what an answer means. The
functions are written twice: here, and in `_compiled.c`, which is used where it was built (`compiled.py`).
"""

from __future__ import annotations

from ..compiled import module as _compiled
from ..dialects.reader import Events, is_plain_text
from .http1 import CHUNK_SIZES

_MOST_SIZE_DIGITS = 8


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
        length = CHUNK_SIZES.get(data[position:line_end])
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


def whole_chunks(data: bytes, before: bytes, after: bytes) -> tuple[int, list[Events], int]:
    """The events of as many chunks at the beginning of `data` as are recognised: chunks, events, their bytes.

    A number among the events stands for so many plain ones. Without a template (`before` is empty) there are none. The
    twin in C recognises more than this one: all chunks of events that are one line of data each.
    """
    if not before:
        return 0, [], 0
    chunks, plain, used = plain_chunks(data, before, after)
    return chunks, [plain] if plain else [], used


pure_plain_chunks = plain_chunks
if _compiled is not None:
    plain_chunks, whole_chunks = _compiled.plain_chunks, _compiled.whole_chunks
