"""Bodies whose prompts are words alone, many at a time, by the compiled part: the bytes that `body` makes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from ..compiled import module
from ..request import Request
from ..words import MOST_WORDS, SPAN_BYTES, Spans
from .body import MOST_ENDS, around

_encode = msgspec.json.Encoder().encode
TOGETHER, MEAN_TOKENS = (
    64,
    256,
)  # bodies that are made in one call, of so many tokens: more would leave the cache
FEW = 8  # of longer ones
MOST_COMBINATIONS = 1 << 63
_bodies = getattr(module, "bodies", None)  # a wheel of its own may be older than it

Drawn = Callable[[list[int]], tuple[list[int], list[bytes], list[int]]]
"""Of requests, by their numbers: tokens, two random bytes for each word behind the first four, the output asked for."""


class Together(NamedTuple):
    """Bodies that stand one behind the other."""

    requests: int
    bodies: bytes
    rows: bytes  # of each five numbers of 8 bytes: its request's, its place, its size, its tokens, the output asked for
    told: bytes  # the sum of the hashes of what the digest of prompts has of each; 16 bytes, least first
    hashes: bytes  # of the bodies


class PlainBodies:
    """Makes the bodies of requests, by their numbers."""

    def __init__(
        self, words: tuple[Any, ...], drawn: Drawn, ends: Callable[[int], tuple[bytes, bytes]]
    ) -> None:
        self._words, self._drawn, self._size = words, drawn, FEW
        self._around = lru_cache(maxsize=MOST_ENDS)(
            lambda asked: (asked, _told(asked), *ends(asked))
        )

    def made(self, numbers: list[int], at: int) -> Iterator[Together]:
        """The bodies of requests. `at`: where the first of them stands."""
        assert _bodies is not None
        while numbers:
            part, numbers = numbers[: self._size], numbers[self._size :]
            tokens, bits, asked = self._drawn(part)
            made = Together(
                len(part),
                *_bodies(self._words, part, tokens, bits, list(map(self._around, asked)), at),
            )
            self._size = TOGETHER if sum(tokens) <= MEAN_TOKENS * len(part) else FEW  # next time
            at += len(made.bodies)
            yield made


def plain_bodies(
    spans: Spans | None,
    starts: int,
    by_number: tuple[int, int, int],
    make: Callable[[Request], bytes],
    drawn: Drawn,
) -> PlainBodies | None:
    """What makes the bodies that `make` does. None where the compiled part cannot.

    `spans`: of words, then of as many as `starts`, with which texts begin. `by_number`: step, offset, combinations;
    the first words of prompt n are the digits of (step * n + offset) mod combinations: a start, then three words.
    """
    if _bodies is None or spans is None or by_number[2] >= MOST_COMBINATIONS:
        return None
    text, ends = spans[0], around(make)
    escaped = not text.isascii() or _encode(text.decode()) != b'"%s"' % text
    if escaped or ends is None or len(spans[1]) // SPAN_BYTES - starts > MOST_WORDS:
        return None
    return PlainBodies((*spans, starts, *by_number), drawn, ends)


def _told(asked: int) -> bytes:
    """What the digest of prompts has of such a request between its number and its prompt."""
    return b",%s," % _encode((asked, True, None))[1:-1]
