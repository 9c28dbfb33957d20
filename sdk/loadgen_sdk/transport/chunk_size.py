"""The size line before a chunk of an HTTP/1.1 body."""

from __future__ import annotations

MAX_DIGITS = 15
"""The largest number of digits in a number of a head or a chunk size. A longer number is an error.
"""

CHUNK_SIZES: dict[bytes, int] = {}
"""A cache of sizes by their line. A stream repeats a few dozen of them."""

_MAX_CACHED_SIZES = 4096
_MAX_CACHED_LINE_BYTES = 32
_HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")


class MalformedResponseError(ValueError):
    """The bytes are not HTTP/1.1 as this client accepts it."""


def parse_chunk_size(line: bytes) -> int:
    """Return the size in the line before a chunk, which may have extensions.

    The size is in hexadecimal: `1a` and `1a;name=value` both mean 26 bytes. It is added to
    CHUNK_SIZES, where callers look first, unless the cache is full or the line is long.

    Raises:
        MalformedResponseError: The line has no valid size.
    """
    digits = line.partition(b";")[0].strip(b" \t")
    if not digits or len(digits) > MAX_DIGITS or not _HEX_DIGITS.issuperset(digits):
        raise MalformedResponseError(f"chunk size {line[:40]!r}")
    size = int(digits, 16)
    if len(CHUNK_SIZES) < _MAX_CACHED_SIZES and len(line) < _MAX_CACHED_LINE_BYTES:
        CHUNK_SIZES[line] = size
    return size
