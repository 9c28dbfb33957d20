"""The size line before a chunk of an HTTP/1.1 body."""

from __future__ import annotations

MAX_DIGITS = 15
"""The largest number of digits in a number of a head or a chunk size. A longer number is an error.
"""

CHUNK_SIZES: dict[bytes, int] = {}
"""The cache of `chunk_size_of_line`: the sizes by their line."""

_MAX_CACHED_SIZES = 4096
_MAX_CACHED_LINE_BYTES = 32
_HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")


class MalformedResponseError(ValueError):
    """The bytes are not HTTP/1.1 as this client accepts it."""


def chunk_size_of_line(line: bytes) -> int:
    """Return the size in the line before a chunk, in bytes, from a cache if possible.

    The size is in hexadecimal, and extensions may follow it: `1a` and `1a;name=value` both mean 26
    bytes. The cache, CHUNK_SIZES, is there because a stream repeats a few dozen sizes.

    Raises:
        MalformedResponseError: The line has no valid size.
    """
    size = CHUNK_SIZES.get(line)
    if size is not None:
        return size
    size = _parse_chunk_size(line)
    if len(CHUNK_SIZES) < _MAX_CACHED_SIZES and len(line) < _MAX_CACHED_LINE_BYTES:
        CHUNK_SIZES[line] = size
    return size


def _parse_chunk_size(line: bytes) -> int:
    """Parse the line before a chunk (see `chunk_size_of_line`)."""
    digits = line.partition(b";")[0].strip(b" \t")
    if not digits or len(digits) > MAX_DIGITS or not _HEX_DIGITS.issuperset(digits):
        raise MalformedResponseError(f"chunk size {line[:40]!r}")
    return int(digits, 16)
