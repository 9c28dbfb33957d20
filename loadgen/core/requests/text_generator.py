"""Build texts that have an exact number of tokens, from random words or passages of a book.

A text is a function of the key of the generator, a purpose and an index.

The first words of a prompt that no other prompt begins with are called its head. A prefix cache of
the server can then reuse a prompt only as far as the workload lets prompts share a prefix.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from loadgen_sdk.words import TextWriter, create_text_writer

from loadgen.core.requests.sampling import random_bytes, random_integer
from loadgen.core.requests.tokenizer import DATA, Tokenizer, read_packaged_data

HEAD_TOKENS = 4
"""The number of words in the head of a prompt, which makes it different from all others.

With thousands of words to choose from, four words give more heads than any run has prompts.
"""

BYTES_PER_CHOICE = 2
"""The random bytes from which `create_text_writer` chooses one word."""

INDEX_BYTES = 4
"""The random bytes from which one of many words, or a position in the book, is chosen."""

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


class Passage(NamedTuple):
    """Words of a book, and how many tokens they are short of the requested number."""

    text: str
    missing_tokens: int


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

        The first words of a text, its head, make it differ from all other texts (`unique_head`). If
        `is_natural`, a passage of a book follows. Otherwise all other words are random.
        """
        self._tokenizer = tokenizer
        self._key = key

        # Words for the beginning of a text have no space before them, all others have one.
        self._start_words = tokenizer.start_words
        self._inner_words = tokenizer.inner_words
        self._book = Book(tokenizer) if is_natural else None
        self._head_order = self._draw_head_order()

        # Two caches, because the many history texts would displace the few shared ones from one.
        self.shared_text = functools.lru_cache(SHARED_TEXTS_CACHED)(self.exact_text)
        self.history_text = functools.lru_cache(HISTORY_TEXTS_CACHED)(self.exact_text)

    def _draw_head_order(self) -> _Permutation:
        """Return the random order in which the possible heads are used.

        A head is one start word followed by HEAD_TOKENS - 1 other words. In the order of the words,
        prompts with successive indices would look alike, and every run would begin with the same
        heads.
        """
        head_count = len(self._start_words) * len(self._inner_words) ** (HEAD_TOKENS - 1)
        return _Permutation(head_count, self._key)

    @functools.cached_property
    def _write_words(self) -> TextWriter:
        """Return the function that appends random words to a text."""
        return create_text_writer(self._inner_words)

    def start_word(self, index: int) -> str:
        """Return a word that can stand at the beginning of a text, one for each index in turn."""
        return self._start_words[index % len(self._start_words)]

    def unique_head(self, index: int, tokens: int) -> list[str]:
        """Return the first words of text number `index`, which no other number has.

        With them a prompt is unknown to a prefix cache. There are HEAD_TOKENS words, each one
        token. A text of fewer `tokens` has only so many, and another text may begin with them too.

        The possible heads are numbered, and the words of a head are the digits of its number. With
        10 words and 4 digits, number 4725 would be the words 5, 2, 7 and 4.
        """
        head_number = self._head_order.position_of(index)
        higher_digits, digit = divmod(head_number, len(self._start_words))

        head = [self._start_words[digit]]
        for _ in range(HEAD_TOKENS - 1):
            higher_digits, digit = divmod(higher_digits, len(self._inner_words))
            head.append(self._inner_words[digit])

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

        A tokenizer that merges words with their neighbours (not `is_additive`) may have no text of
        exactly that length. The closest text is returned then, with its true number of tokens.

        Args:
            purpose: What the text is for, such as "user". Texts for different purposes differ.
            index: The number of the text among those for its purpose.
            tokens: The tokens of the text without the prefix.
            head: The first words of the text. If empty, it begins with one random word.
            prefix: A text before it, with its number of tokens.

        Returns:
            The text with its number of tokens, the prefix included.
        """
        if tokens <= 0:
            return prefix

        if not head:
            random_index = random_integer(self._key, purpose + " start", index, INDEX_BYTES)
            head = (self.start_word(random_index),)

        if not self._tokenizer.is_additive:
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
        # Most words are one token, so this is a first guess.
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
        """Return a prefix and `word_count` words after it: those of `head`, and then random words.

        For natural texts, a passage of a book follows the head instead. It has as many tokens as
        words are left. If the next word of the book would have too many tokens, random words of one
        token each complete the text.

        Args:
            purpose: What the text is for. Texts for different purposes differ.
            index: The number of the text among those for its purpose.
            word_count: The number of words, the head included.
            head: The first words.
            prefix: A text before them, which is not counted.
        """
        words_after_head = word_count - len(head)
        if words_after_head <= 0:
            return prefix + "".join(head[:word_count])

        text = prefix + "".join(head)
        random_word_count = words_after_head
        if self._book is not None:
            position = random_integer(self._key, purpose + " passage", index, INDEX_BYTES)
            passage = self._book.passage(position, max_tokens=words_after_head)
            text += passage.text
            random_word_count = passage.missing_tokens

        # Each random word is chosen by this many random bytes.
        choices = random_bytes(self._key, purpose, index, BYTES_PER_CHOICE * random_word_count)
        return self._write_words(text, choices)


class _Permutation:
    """A one-to-one mapping of the integers below `size` that looks random, also in its low digits.

    Number n is mapped to (step * n + offset) mod size, where step and size have no common factor.
    This is a linear congruence, which visits every integer below `size` once before it repeats.
    """

    def __init__(self, size: int, key: bytes) -> None:
        """Draw the step and the offset of the mapping from the key.

        Number n is mapped to (step * n + offset) mod size. If step and size have a common factor,
        some integers are never reached, so the step is increased until they have none.
        """
        offset = random_integer(key, "offset", 0, 16)
        step = random_integer(key, "step", 0, 16)
        if step % 2 == 0:
            step += 1  # The loop then only tries odd numbers, of which more qualify.

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
        """Read the packaged book and count the tokens of its words."""
        text = read_packaged_data(DATA / BOOK_FILE, BOOK_SHA256).decode("ascii")
        book_words = [f" {word}" for word in text.split(" ")]
        token_counts = [tokenizer.count(word) for word in book_words]
        self._word_count = len(book_words)
        self._tokens = sum(token_counts)

        # The book twice in a row, so that it can be read once from any word without starting again.
        self._words = book_words * 2

        # The tokens of all words before word i, for each i up to the end of `_words`.
        self._tokens_before = list(accumulate(token_counts * 2, initial=0))

    def passage(self, position: int, max_tokens: int) -> Passage:
        """Return a passage of whole words that has at most `max_tokens` tokens.

        It may be shorter by a few tokens, because the next word would be too long.

        It begins at the word number `position`. After the last word of the book, the book begins
        again. The tokens of words are added up, which is right for tokenizers that split texts at
        spaces.

        For example, a book of the words a, b and c has 3 tokens. From position 1 on, a passage of 7
        tokens is "b c a b c a b": it has 2 complete readings of the book and the word b.
        """
        start = position % self._word_count
        complete_readings, remaining_tokens = divmod(max_tokens, self._tokens)

        # `_words` has the book twice in a row, so this is the whole book, read from word `start` to
        # the end and then from the beginning.
        one_reading = self._words[start : start + self._word_count]

        end = self._end_of_passage(start, remaining_tokens)
        last_words = self._words[start:end]
        tokens_of_last_words = self._tokens_before[end] - self._tokens_before[start]

        text = "".join(one_reading * complete_readings + last_words)
        return Passage(text, missing_tokens=remaining_tokens - tokens_of_last_words)

    def _end_of_passage(self, start: int, max_tokens: int) -> int:
        """Return the index of the first word that no longer fits into a passage.

        The passage begins with word `start` and has at most `max_tokens` tokens. For words of 1, 2,
        1 and 3 tokens, `_tokens_before` is [0, 1, 3, 4, 7]. A passage from word 1 on with at most 4
        tokens has the words 1 and 2 (3 tokens), so the result is 3: with word 3 it would have 6.
        """
        most_tokens_before_end = self._tokens_before[start] + max_tokens
        # The last index with at most so many tokens before it. `bisect_right` returns the next one.
        return bisect_right(self._tokens_before, most_tokens_before_end) - 1
