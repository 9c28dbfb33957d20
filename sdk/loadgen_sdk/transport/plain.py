"""Finds plain events in a chunked body: those that differ from an earlier event of the same answer in their text alone.

Of a long stream nearly all events are plain (see `Reading._learn`), and comparing bytes is several times cheaper than
decoding. What is not recognised here is left to `http1`, `sse` and `reader`, which define what an answer means. The
two functions are written twice: here, and in `_compiled.c`, which is used where it was built (`compiled.py`).
"""

from __future__ import annotations

from ..compiled import module as _compiled
from .http1 import CHUNK_SIZES

Read = tuple[bytes, int, int, int, bool]

_PLAIN_BYTES = bytes(byte for byte in range(0x20, 0x100) if byte not in b'"\\')  # in a JSON string without escapes
_MOST_SIZE_DIGITS = 8


def _is_plain(text: bytes) -> bool:
    if not text or text.translate(None, _PLAIN_BYTES):
        return False
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            return False
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
            if text_end < 0 or not data.startswith(end, text_end) or not _is_plain(data[at + start_bytes : text_end]):
                break
            at = text_end + end_bytes
            found += 1
        if at != close:
            break
        chunks += 1
        events += found
        position = close + 2
    return chunks, events, position


def plain_reads(reads: list[Read], first: int, before: bytes, after: bytes) -> int:
    """How many reads in a row, from number `first` on, are one chunk with one plain event, and nothing else."""
    start, end = b"data: " + before, after + b"\n\n\r\n"
    start_bytes, end_bytes = len(start), len(end)
    sizes = CHUNK_SIZES
    number = first
    for number in range(first, len(reads)):
        data = reads[number][0]
        line_end = data.find(b"\r\n")
        if (
            sizes.get(data[:line_end]) != len(data) - line_end - 4
            or not data.startswith(start, line_end + 2)
            or not data.endswith(end)
            or not _is_plain(data[line_end + 2 + start_bytes : -end_bytes])
        ):
            return number - first
    return len(reads) - first


pure_plain_chunks, pure_plain_reads = plain_chunks, plain_reads
if _compiled is not None:
    plain_chunks, plain_reads = _compiled.plain_chunks, _compiled.plain_reads
