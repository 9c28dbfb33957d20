"""Build texts that have an exact number of tokens, from random words or passages of a book.

A text is a function of the key of the generator, a purpose and an index.

The first words of a prompt that no other prompt begins with are called its head. A prefix cache of
the server can then reuse a prompt only as far as the workload lets prompts share a prefix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from loadgen_sdk.words import TextWriter, create_text_writer

from loadgen.core.requests.sampling import random_bytes, random_integer
from loadgen.core.requests.tokenizer import DATA, Tokenizer, read_packaged_data

HEAD_TOKENS = 4
"""The number of words in the head of a prompt, which makes it different from all others.

With thousands of words to choose from, four words give more heads than any run has prompts.
"""

BYTES_PER_CHOICE = 2
"""The random bytes from which `create_text_writer` chooses one word."""

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

    Attributes:
        shared_text: `exact_text` with a cache, for texts that many prompts contain: prefixes,
            chunks and system messages.
        history_text: `exact_text` with a cache of its own, for replies and tool results, which each
            later turn of a conversation contains again. They are many, so they would displace the
            few shared texts from a common cache.
    """

    def __init__(self, tokenizer: Tokenizer, key: bytes, *, is_natural: bool = False) -> None:
        """Create a generator whose texts depend on `key`.

        If `is_natural`, a text is its head followed by a passage of a book. Otherwise all words
        are random.
        """
        self._tokenizer = tokenizer
        self._key = key
        # Words for the beginning of a text have no space before them, all others have one.
        self._start_words = tokenizer.starts
        self._words = tokenizer.words
        self._book = Book(tokenizer) if is_natural else None
        # A head is one start word followed by HEAD_TOKENS - 1 other words. Indices are mapped to
        # heads in a random order that depends on the key. In the order of the words, prompts with
        # successive indices would look alike, and every run would begin with the same heads.
        head_count = len(self._start_words) * len(self._words) ** (HEAD_TOKENS - 1)
        self._head_order = _Permutation(head_count, key)
        self.shared_text = functools.lru_cache(SHARED_TEXTS_CACHED)(self.exact_text)
        self.history_text = functools.lru_cache(HISTORY_TEXTS_CACHED)(self.exact_text)

    @functools.cached_property
    def _write_words(self) -> TextWriter:
        return create_text_writer(self._words)

    def start_word(self, index: int) -> str:
        """Return a word that can stand at the beginning of a text, one for each index in turn."""
        return self._start_words[index % len(self._start_words)]

    def unique_head(self, index: int, tokens: int) -> list[str]:
        """Return the first words of text number `index`, with which no other text begins.

        They make a prompt unknown to a prefix cache. There are HEAD_TOKENS of them, or `tokens` if
        that is less; then another text may begin with the same words.

        All possible heads are numbered. A head is its number written with words as digits (a mixed
        radix numeral), so different numbers have different words. Each index has one of the numbers
        in a random order.
        """
        word_count = len(self._words)
        head_number = self._head_order.position_of(index)
        remaining_number, digit = divmod(head_number, len(self._start_words))
        head = [self._start_words[digit]]
        for _ in range(HEAD_TOKENS - 1):
            remaining_number, digit = divmod(remaining_number, word_count)
            head.append(self._words[digit])
        return head[:tokens]

    def exact_text(
        self,
        purpose: str,
        index: int,
        tokens: int,
        head: Sequence[str] = (),
        prefix: Text = NO_TEXT,
    ) -> Text:
        """Return `prefix` followed by a text of `tokens` tokens that begins with `head`.

        If the tokenizer is not additive, the length of a text is not the sum of the lengths of its
        words, and the returned number of tokens can differ from the requested number.

        Args:
            purpose: What the text is for, such as "user". Texts for different purposes differ.
            index: The number of the text among those for its purpose.
            tokens: The tokens of the text without the prefix.
            head: The first words of the text. If empty, it begins with one random word.
            prefix: A text before it, with its number of tokens.

        Returns:
            The whole text with its number of tokens, the prefix included.
        """
        if tokens <= 0:
            return prefix
        if not head:
            random_index = random_integer(self._key, purpose + " start", index, 4)
            head = (self.start_word(random_index),)
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
        """Return `prefix` and after it `word_count` words, of which the first are `head`.

        The words after the head are a passage of the book, if there is one, and random words.
        """
        remaining_words = word_count - len(head)
        if remaining_words <= 0:
            return prefix + "".join(head[:word_count])
        passage = ""
        if self._book is not None:
            position = random_integer(self._key, purpose + " passage", index, 4)
            passage, remaining_words = self._book.passage(position, remaining_words)
        beginning = "".join((prefix, *head, passage))
        choices = random_bytes(self._key, purpose, index, BYTES_PER_CHOICE * remaining_words)
        return self._write_words(beginning, choices)


class _Permutation:
    """A one-to-one mapping of the integers below `size` that looks random, also in its low digits.

    Number n is mapped to (step * n + offset) mod size, where step and size have no common factor.
    This is a linear congruence, which visits every integer below `size` once before it repeats.
    """

    def __init__(self, size: int, key: bytes) -> None:
        """Draw the step and the offset from the key, as 128-bit numbers."""
        offset = random_integer(key, "offset", 0, 16)
        # A step is odd, as it must have no common factor with an even size.
        step = random_integer(key, "step", 0, 16) | 1
        while math.gcd(step, size) != 1:
            step += 2
        self._size = size
        self._step = step % size
        self._offset = offset % size

    def position_of(self, number: int) -> int:
        """Return the integer that `number` is mapped to."""
        return (self._step * number + self._offset) % self._size


class Book:
    """The words of "Alice's Adventures in Wonderland" (L. Carroll, 1865), with token counts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        text = read_packaged_data(DATA / BOOK_FILE, BOOK_SHA256).decode("ascii")
        self._words = [f" {word}" for word in text.split(" ")]
        self._tokens = np.array([tokenizer.count(word) for word in self._words])

    def passage(self, position: int, max_tokens: int) -> tuple[str, int]:
        """Return a passage of at most `max_tokens`, and how many tokens it has less than that.

        The passage has whole words and begins at the word number `position`. After its last word
        the book begins again. The tokens of words are added up, which is right for tokenizers that
        split texts at spaces.
        """
        start = position % len(self._words)
        words = self._words[start:] + self._words[:start]
        token_counts = np.roll(self._tokens, -start)
        # One repetition more than needed leaves a word after the passage in any case.
        repetitions = max_tokens // int(self._tokens.sum()) + 2
        cumulative_tokens = np.cumsum(np.tile(token_counts, repetitions))
        word_count = int(np.searchsorted(cumulative_tokens, max_tokens, side="right"))
        passage_tokens = int(cumulative_tokens[word_count - 1]) if word_count else 0
        passage_words = (words * repetitions)[:word_count]
        return "".join(passage_words), max_tokens - passage_tokens
