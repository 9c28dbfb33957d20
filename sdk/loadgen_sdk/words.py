"""Texts of random words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import unpack

TextWriter = Callable[[str, bytes], str]
"""A function that returns a text, given its beginning and two random bytes for each word."""

MOST_WORDS = 1 << 16


def text_writer(vocabulary: Sequence[str]) -> TextWriter:
    """Return a function that appends random words to a text.

    Each two random bytes, least significant byte first, choose a word. The choice has no bias if
    the number of words is a power of two.
    """
    copies = 1 + (MOST_WORDS - 1) // len(vocabulary)
    word_by_number = (list(vocabulary) * copies)[:MOST_WORDS]

    def write(beginning: str, random_bytes: bytes) -> str:
        numbers = unpack(f"<{len(random_bytes) // 2}H", random_bytes)
        return beginning + "".join([word_by_number[number] for number in numbers])

    return write
