"""Build texts that have an exact number of tokens, from random words or passages of a book.

A text is a function of the key of the generator, a purpose and an index.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from loadgen_sdk.words import TextWriter, text_writer

from loadgen.core.requests.sampling import random_bytes, random_integer
from loadgen.core.requests.tokenizer import DATA, Tokenizer, read_packaged_data

HEAD_TOKENS = 4
"""The number of words at the start of a prompt that make it different from all others."""

MAX_FITTING_ATTEMPTS = 8
SHARED_TEXTS_CACHED = 256
HISTORY_TEXTS_CACHED = 1024

BOOK_FILE = "natural.txt.gz"
BOOK_SHA256 = "562ed0e6fc00eef7ad50ce6057c0df5e6406d5ee4bb9d6909023e83624985cd2"


class Text(NamedTuple):
    """A text and its number of tokens."""

    text: str
    tokens: int


NO_TEXT = Text("", 0)


class TextGenerator:
    """A source of texts of an exact length, made of words that are one token each.

    If the generator is natural, a text is a few random words followed by a passage of a book.
    """

    def __init__(self, tokenizer: Tokenizer, key: bytes, *, is_natural: bool = False) -> None:
        self._tokenizer = tokenizer
        self._key = key
        self._starts = tokenizer.starts
        self._words = tokenizer.words
        self._book = Book(tokenizer) if is_natural else None
        head_count = len(self._starts) * len(self._words) ** (HEAD_TOKENS - 1)
        self._head_order = _Permutation(head_count, key)
        self.shared_text = functools.lru_cache(SHARED_TEXTS_CACHED)(self.exact_text)
        # Each later turn of a conversation contains these texts again.
        self.history_text = functools.lru_cache(HISTORY_TEXTS_CACHED)(self.exact_text)

    @functools.cached_property
    def _write_words(self) -> TextWriter:
        return text_writer(self._words)

    def start_word(self, index: int) -> str:
        """Return a word that can stand at the beginning of a text, one for each index in turn."""
        return self._starts[index % len(self._starts)]

    def unique_head(self, index: int, tokens: int) -> list[str]:
        """Return the first words of a text, at most HEAD_TOKENS and at most `tokens` of them.

        They are different for every index, as far as so few words allow: they are the digits of a
        number that is unique for the index.
        """
        word_count = len(self._words)
        number, start = divmod(self._head_order.position_of(index), len(self._starts))
        head = [self._starts[start]]
        for _ in range(HEAD_TOKENS - 1):
            number, word = divmod(number, word_count)
            head.append(self._words[word])
        return head if tokens >= HEAD_TOKENS else head[:tokens]

    def exact_text(
        self,
        purpose: str,
        index: int,
        tokens: int,
        head: Sequence[str] = (),
        prefix: Text = NO_TEXT,
    ) -> Text:
        """Return `prefix` followed by a text of so many tokens that begins with `head`.

        The number of tokens in the result is that of both parts. It can differ from the requested
        number if the tokenizer is not additive.
        """
        if tokens <= 0:
            return prefix
        if not head:
            head = (self.start_word(random_integer(self._key, purpose + " start", index, 4)),)
        if not self._tokenizer.additive:
            return self._fitted_text(purpose, index, tokens, head, prefix)
        text = self.random_text(purpose, index, tokens, head, prefix.text)
        return Text(text, prefix.tokens + tokens)

    def _fitted_text(
        self, purpose: str, index: int, tokens: int, head: Sequence[str], prefix: Text
    ) -> Text:
        """Return a text for a tokenizer with which the token counts of words do not add up.

        Words are added or removed until the whole text has the requested number of tokens. If no
        attempt succeeds, the closest text is returned with its true number of tokens.
        """
        requested_tokens = prefix.tokens + tokens
        word_count = tokens
        closest: Text | None = None
        for _ in range(MAX_FITTING_ATTEMPTS + 1):
            text = self.random_text(purpose, index, word_count, head, prefix.text)
            candidate = Text(text, self._tokenizer.count(text))
            missing_tokens = requested_tokens - candidate.tokens
            if closest is None or abs(missing_tokens) < abs(requested_tokens - closest.tokens):
                closest = candidate
            if missing_tokens == 0:
                break
            word_count = max(1, word_count + missing_tokens)
        assert closest is not None
        return closest

    def random_text(
        self, purpose: str, index: int, word_count: int, head: Sequence[str], prefix: str = ""
    ) -> str:
        """Return `prefix`, then `head`, then words, so that head and words are `word_count`."""
        remaining_words = word_count - len(head)
        if remaining_words <= 0:
            return prefix + "".join(head[:word_count])
        passage = ""
        if self._book is not None:
            position = random_integer(self._key, purpose + " passage", index, 4)
            passage, remaining_words = self._book.passage(position, remaining_words)
        beginning = "".join((prefix, *head, passage))
        choices = random_bytes(self._key, purpose, index, 2 * remaining_words)
        return self._write_words(beginning, choices)


class _Permutation:
    """A one-to-one mapping of the integers below `size` that looks random, also in its low digits.

    Number n is mapped to (step * n + offset) mod size, where step and size have no common factor.
    """

    def __init__(self, size: int, key: bytes) -> None:
        offset = random_integer(key, "offset", 0, 16)
        step = random_integer(key, "step", 0, 16) | 1
        while math.gcd(step, size) != 1:
            step += 2
        self._size = size
        self._step = step % size
        self._offset = offset % size

    def position_of(self, number: int) -> int:
        return (self._step * number + self._offset) % self._size


class Book:
    """The words of "Alice's Adventures in Wonderland" (L. Carroll, 1865), with token counts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        text = read_packaged_data(DATA / BOOK_FILE, BOOK_SHA256).decode("ascii")
        self._words = [f" {word}" for word in text.split(" ")]
        self._tokens = np.array([tokenizer.count(word) for word in self._words])

    def passage(self, position: int, max_tokens: int) -> tuple[str, int]:
        """Return a passage from a position on, and by how many tokens it is shorter than requested.

        The book begins again after its last word. Token counts of words add up if the tokenizer
        splits texts at spaces.
        """
        start = position % len(self._words)
        repetitions = max_tokens // int(self._tokens.sum()) + 2
        cumulative_tokens = np.cumsum(np.tile(np.roll(self._tokens, -start), repetitions))
        word_count = int(np.searchsorted(cumulative_tokens, max_tokens, side="right"))
        words = (self._words[start:] + self._words[:start]) * repetitions
        passage_tokens = int(cumulative_tokens[word_count - 1]) if word_count else 0
        return "".join(words[:word_count]), max_tokens - passage_tokens
