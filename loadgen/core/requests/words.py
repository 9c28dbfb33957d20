"""Random bytes -> a text of words, by the compiled part where it is installed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from loadgen_sdk.compiled import module

Write = Callable[[str, bytes], str]  # (what the text begins with, 2 random bytes per word) -> the text

MOST_WORDS = 1 << 16
LONGEST = 255  # bytes of a word, for the compiled part
_compiled = getattr(module, "written", None)  # a wire of its own wheel may be older than this function


def writer(words: Sequence[str]) -> Write:
    """Each 16 bits, least byte first, choose a word: without bias if the number of words is a power of two."""
    write, drawn = _compiled, words[:MOST_WORDS]
    text = "".join(drawn).encode()
    lengths = np.fromiter(map(len, drawn if text.isascii() else map(str.encode, drawn)), np.uint32, len(drawn))
    if write is None or lengths.max() > LONGEST:
        return in_python(words)
    spans = ((np.cumsum(lengths, dtype=np.uint32) - lengths) << 8 | lengths).astype("=u4").tobytes()
    return lambda begin, bits: write(begin, bits, spans, text)


def in_python(words: Sequence[str]) -> Write:
    """The twin of the compiled part."""
    copies = 1 + (MOST_WORDS - 1) // len(words)
    by_draw = np.array((list(words) * copies)[:MOST_WORDS], dtype=object)
    return lambda begin, bits: begin + "".join(by_draw.take(np.frombuffer(bits, dtype="<u2")).tolist())
