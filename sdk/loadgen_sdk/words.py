"""Texts of random words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from struct import unpack

TextWriter = Callable[[str, bytes], str]
"""A function that appends random words to a text. It gets the text and two bytes per word."""

NUMBER_COUNT = 1 << 16
"""How many numbers two bytes can have."""


def create_text_writer(vocabulary: Sequence[str]) -> TextWriter:
    """Return a function that appends words of a vocabulary to a text, chosen by random bytes.

    Each two bytes choose a word. They are a number from 0 to 65,535, least significant byte first,
    and word 0 belongs to number 0. When the vocabulary is used up, it starts again: with 3 words,
    the numbers 0, 3, 6 and so on mean the first word. If the number of words is a power of two, all
    words are equally likely.
    """
    repetitions = math.ceil(NUMBER_COUNT / len(vocabulary))
    word_by_number = (list(vocabulary) * repetitions)[:NUMBER_COUNT]

    def append_words(beginning: str, random_bytes: bytes) -> str:
        """Return the text with a word for each two of the bytes."""
        numbers = unpack(f"<{len(random_bytes) // 2}H", random_bytes)
        random_words = map(word_by_number.__getitem__, numbers)
        return beginning + "".join(random_words)

    return append_words
