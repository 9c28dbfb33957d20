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

    Two bytes, least significant byte first, are a number that chooses a word. The vocabulary is
    repeated until each number has a word. All words are equally likely if their number is a power
    of two.
    """
    repetitions = math.ceil(NUMBER_COUNT / len(vocabulary))
    word_by_number = (list(vocabulary) * repetitions)[:NUMBER_COUNT]

    def append_words(beginning: str, random_bytes: bytes) -> str:
        numbers = unpack(f"<{len(random_bytes) // 2}H", random_bytes)
        return beginning + "".join([word_by_number[number] for number in numbers])

    return append_words
