"""A natural text for prompts, from which passages of a number of tokens are taken: L. Carroll, "Alice" (1865). Pure
after it was read.
"""

from __future__ import annotations

import numpy as np

from loadgen.core.requests.tokenizer import DATA, Tokenizer, read_packaged_data

TEXT_SHA256 = "562ed0e6fc00eef7ad50ce6057c0df5e6406d5ee4bb9d6909023e83624985cd2"


class NaturalText:
    """The text as words with the space before them, and how many tokens each is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        text = read_packaged_data(DATA / "natural.txt.gz", TEXT_SHA256).decode("ascii")
        self._words = [f" {word}" for word in text.split(" ")]
        self._tokens = np.array([tokenizer.count(word) for word in self._words])

    def passage(self, draw: int, tokens: int) -> tuple[str, int]:
        """A passage of at most so many tokens from the word that `draw` chooses on, and how many are missing.

        It begins again where the text ends. The counts of words add up where the tokenizer splits at spaces.
        """
        start, laps = draw % len(self._words), tokens // int(self._tokens.sum()) + 2
        ends = np.cumsum(np.tile(np.roll(self._tokens, -start), laps))
        count = int(np.searchsorted(ends, tokens, side="right"))
        words = (self._words[start:] + self._words[:start]) * laps
        return "".join(words[:count]), tokens - (int(ends[count - 1]) if count else 0)
