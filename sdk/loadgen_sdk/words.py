"""Random bytes -> a text of words, by the compiled part where it is installed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import unpack

from .compiled import module

Write = Callable[
    [str, bytes], str
]  # (what the text begins with, 2 random bytes per word) -> the text
Spans = tuple[
    bytes, bytes
]  # words as one text; of each, in SPAN_BYTES, its place there, shifted by 8, and its length

MOST_WORDS = 1 << 16
SPAN_BYTES = 4
_compiled = getattr(
    module, "written", None
)  # a wire of its own wheel may be older than these functions
_spans = getattr(module, "spans", None)


def writer(words: Sequence[str]) -> Write:
    """Each 16 bits, least byte first, choose a word: without bias if the number of words is a power of two."""
    write, found = _compiled, spans_of(words[:MOST_WORDS])
    if write is None or found is None:
        return in_python(words)
    text, spans = found
    return lambda begin, bits: write(begin, bits, spans, text)


def spans_of(words: Sequence[str]) -> Spans | None:
    """What the compiled part takes words as. None: it is not there, or a word has more than 255 bytes."""
    text = "".join(words).encode()
    try:
        lengths = bytes(map(len, words if text.isascii() else map(str.encode, words)))
    except ValueError:
        return None
    return None if _spans is None else (text, _spans(lengths))


def in_python(words: Sequence[str]) -> Write:
    """The twin of the compiled part."""
    copies = 1 + (MOST_WORDS - 1) // len(words)
    by_draw = (list(words) * copies)[:MOST_WORDS]
    return lambda begin, bits: (
        begin + "".join([by_draw[drawn] for drawn in unpack(f"<{len(bits) // 2}H", bits)])
    )
