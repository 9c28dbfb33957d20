"""Choose the chunks of a corpus that each prompt begins with, as a retrieval system would."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loadgen.core.requests.sampling import UNIT_OF_53_BITS, UNUSED_BITS, random_bytes

MAX_DRAWS = 100  # of `count` chunks each, before the most popular missing chunks are taken
PROMPTS_CACHED = 4096


@dataclass(frozen=True)
class ChunkSpec:
    """How many chunks each prompt has, and the corpus that they come from.

    Chunk k of the corpus is drawn in proportion to 1 / k^zipf.
    """

    count: int
    tokens: int
    corpus: int
    zipf: float


class CorpusReuse(NamedTuple):
    """Which shares of the chunks of some prompts occur in an earlier prompt.

    Attributes:
        anywhere: The share of chunks that an earlier prompt has, too.
        after_same_chunks: The share of chunks that an earlier prompt has after the same chunks, so
            that a prefix cache knows them.
    """

    anywhere: float
    after_same_chunks: float


class Corpus:
    """A corpus of chunks with a popularity according to Zipf's law.

    `chunks_of(prompt_index)` returns the numbers of the chunks of a prompt, in their order. No
    chunk occurs twice in a prompt.
    """

    def __init__(self, spec: ChunkSpec, key: bytes) -> None:
        """Compute the popularity of each chunk of the corpus by Zipf's law.

        A chunk is a passage of a document, of which a retrieval system puts several into a prompt.
        By Zipf's law, the chunk of rank k is drawn in proportion to 1 / k^s with the exponent s
        (`spec.zipf`). Ranks begin at 1.

        Args:
            spec: The size of the corpus, its chunks and their popularity.
            key: Decides the random draws; see `sampling.derive_key`.
        """
        self.tokens = spec.tokens
        self._chunks_per_prompt = spec.count
        self._key = key

        ranks = np.arange(1, spec.corpus + 1, dtype=float)
        popularity = ranks**-spec.zipf
        self._cumulative_shares = np.cumsum(popularity) / popularity.sum()

        # `chunks_of` has a cache, because the chunks of a prompt are needed for its text and for
        # its lengths. The cache belongs to this instance, so that it is freed with it.
        self.chunks_of = functools.lru_cache(maxsize=PROMPTS_CACHED)(self._draw_chunks)

    def _draw_chunks(self, prompt_index: int) -> tuple[int, ...]:
        """Draw the chunks of a prompt, none of them twice.

        Chunks are drawn with repetition until there are enough different ones. If the popularity is
        so uneven that this does not happen, the most popular other chunks are added. These have the
        lowest numbers.
        """
        drawn_chunks: list[int] = []
        for attempt in range(MAX_DRAWS):
            drawn_chunks = _without_repeats(
                drawn_chunks + self._draw_with_repeats(prompt_index, attempt)
            )
            if len(drawn_chunks) >= self._chunks_per_prompt:
                return tuple(drawn_chunks[: self._chunks_per_prompt])

        chunks_by_popularity = range(len(self._cumulative_shares))
        chunks = _without_repeats([*drawn_chunks, *chunks_by_popularity])
        return tuple(chunks[: self._chunks_per_prompt])

    def _draw_with_repeats(self, prompt_index: int, attempt: int) -> list[int]:
        """Draw as many chunks as a prompt has, by their popularity. A chunk may be drawn twice.

        This is inverse transform sampling: with the cumulative shares 0.5, 0.8 and 1, the uniform
        random number 0.6 draws chunk 1, because it is at or above 0.5 and below 0.8.

        Args:
            prompt_index: The number of the prompt, from 0.
            attempt: How many draws for this prompt have been made before. Each of them differs.
        """
        purpose = f"chunks {attempt}"
        byte_count = 8 * self._chunks_per_prompt
        random_words = np.frombuffer(
            random_bytes(self._key, purpose, prompt_index, byte_count), "<u8"
        )

        # A float has 53 bits of precision, so only the upper 53 of the 64 random bits are used.
        # Divided by 2**53, they are a uniform number from 0 to below 1.
        uniform_numbers = (random_words >> UNUSED_BITS) * UNIT_OF_53_BITS
        chunks = np.searchsorted(self._cumulative_shares, uniform_numbers, side="right")

        # The last cumulative share may be rounded to less than 1. A uniform number at or above it
        # would draw a chunk after the last one.
        last_chunk = len(self._cumulative_shares) - 1
        chunks_with_repeats: list[int] = np.minimum(chunks, last_chunk).tolist()
        return chunks_with_repeats

    def measure_reuse(self, prompt_count: int) -> CorpusReuse:
        """Return which shares of the chunks in the first prompts occur in an earlier prompt.

        A prefix cache can only reuse a chunk that an earlier prompt has after the same chunks. Such
        a prefix is recognized by a hash of the chunk and all chunks before it.
        """
        known_chunks: set[int] = set()
        known_prefixes: set[int] = set()
        repeated_chunks = 0
        repeated_prefixes = 0

        for prompt_index in range(prompt_count):
            chunks = self.chunks_of(prompt_index)
            prefixes = list(_prefix_hashes(chunks))
            repeated_chunks += sum(chunk in known_chunks for chunk in chunks)
            repeated_prefixes += sum(prefix in known_prefixes for prefix in prefixes)
            known_chunks.update(chunks)
            known_prefixes.update(prefixes)

        chunk_count = prompt_count * self._chunks_per_prompt
        return CorpusReuse(
            anywhere=repeated_chunks / chunk_count,
            after_same_chunks=repeated_prefixes / chunk_count,
        )


def _without_repeats(chunks: list[int]) -> list[int]:
    """Return chunks in their order, each at its first position only."""
    return list(dict.fromkeys(chunks))


def _prefix_hashes(chunks: tuple[int, ...]) -> Iterator[int]:
    """Yield for each chunk a hash of it and all chunks before it."""
    prefix_hash = 0
    for chunk in chunks:
        prefix_hash = hash((prefix_hash, chunk))
        yield prefix_hash
