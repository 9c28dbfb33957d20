"""The chunks of a corpus that each prompt begins with, as retrieval brings them: popular ones often (Zipf). Pure."""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import numpy as np

from loadgen.core.requests.laws import random_bytes

ATTEMPTS = 100  # at chunks that are not drawn yet; then the most popular ones that are missing


class Corpus:
    """`of(number)`: the chunks of a prompt, in the order in which they stand in it; no chunk twice."""

    def __init__(self, chunks: Any, key: bytes) -> None:
        self.tokens: int = chunks.tokens
        self._count: int = chunks.count
        self._key = key
        weights = np.arange(1, chunks.corpus + 1, dtype=float) ** -chunks.zipf
        self._ends = np.cumsum(weights) / weights.sum()
        self.of = functools.lru_cache(maxsize=4096)(self._of)

    def _of(self, number: int) -> tuple[int, ...]:
        chosen: dict[int, None] = {}
        for attempt in range(ATTEMPTS):
            bits = np.frombuffer(
                random_bytes(self._key, f"chunks {attempt}", number, 8 * self._count), "<u8"
            )
            drawn = np.searchsorted(self._ends, (bits >> 11) * 2.0**-53, side="right")
            chosen |= dict.fromkeys(np.minimum(drawn, len(self._ends) - 1).tolist())
            if len(chosen) >= self._count:
                break
        missing = (chunk for chunk in range(len(self._ends)) if chunk not in chosen)
        while len(chosen) < self._count:
            chosen[next(missing)] = None
        return tuple(chosen)[: self._count]

    def reuse(self, n: int) -> tuple[float, float]:
        """Shares of the chunks of the first n prompts: in an earlier prompt, and there after the same chunks."""
        known: set[int] = set()
        beginnings: set[int] = set()
        reused = leading = 0
        for number in range(n):
            chunks = self.of(number)
            up_to_each = list(
                accumulate(chunks, lambda before, chunk: hash((before, chunk)), initial=0)
            )[1:]
            reused += sum(chunk in known for chunk in chunks)
            leading += sum(beginning in beginnings for beginning in up_to_each)
            known.update(chunks)
            beginnings.update(up_to_each)
        return reused / (n * self._count), leading / (n * self._count)
