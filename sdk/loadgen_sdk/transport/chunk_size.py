"""The size line before a chunk of an HTTP/1.1 body."""

from __future__ import annotations

MAX_DIGITS = 15
"""Digits of a number in a head or a chunk size. A longer number is an error."""

CHUNK_SIZES: dict[bytes, int] = {}
"""Cache of sizes by their line. A stream repeats a few dozen of them."""

_MOST_CACHED_SIZES = 4096
_LONGEST_CACHED_LINE = 32
_HEX_DIGITS = frozenset(b"0123456789abcdefABCDEF")


class MalformedResponseError(ValueError):  # noqa: N818 - the name is known to callers
    """The bytes are not HTTP/1.1 as this client accepts it."""


def chunk_size(line: bytes) -> int:
    """Return the size in the line before a chunk, which may have extensions.

    Raises:
        Malformed: The line is no size.
    """
    digits = line.partition(b";")[0].strip(b" \t")
    if not digits or len(digits) > MAX_DIGITS or not _HEX_DIGITS.issuperset(digits):
        raise MalformedResponseError(f"chunk size {line[:40]!r}")
    size = int(digits, 16)
    if len(CHUNK_SIZES) < _MOST_CACHED_SIZES and len(line) < _LONGEST_CACHED_LINE:
        CHUNK_SIZES[line] = size
    return size
