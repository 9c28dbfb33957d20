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

    Two bytes are one number from 0 to 65,535, which chooses one word. The numbers run through the
    vocabulary again and again: with 3 words, the numbers 0, 3, 6 and so on choose the first word.
    All words are equally likely if the number of words divides 65,536, which any power of two up to
    that does.
    """
    repetitions = math.ceil(NUMBER_COUNT / len(vocabulary))
    word_by_number = (list(vocabulary) * repetitions)[:NUMBER_COUNT]

    def append_words(beginning: str, random_bytes: bytes) -> str:
        """Return the text with one word for each pair of bytes."""
        number_count = len(random_bytes) // 2
        numbers = unpack(f"<{number_count}H", random_bytes)  # H: two bytes, the lower one first
        # `map` is faster than a comprehension, and prompts of long contexts have many words.
        random_words = map(word_by_number.__getitem__, numbers)
        return beginning + "".join(random_words)

    return append_words
