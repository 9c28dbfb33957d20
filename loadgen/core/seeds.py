"""Random numbers: an independent generator for every purpose, derived from one seed.

All generators are made here. A caller names its purpose (`stream(seed, "prompts", 7)`) and gets the same numbers in any
process and in any order, whatever else was drawn. This module keeps no state.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

FRESH = "fresh"  # the word that asks for a new salt in every run
MOST = 2**64  # seeds are below this, as in LoadGen


def fresh() -> int:
    """A new seed from the entropy of the operating system: 53 bits, so that every JSON reader keeps it exactly."""
    return int.from_bytes(os.urandom(8), "little") >> 11


def salt_of(seed: int, asked: str | None) -> str:
    """The salt of a run as text: the word asked for, a new one for FRESH, or without a word the one of the seed."""
    if asked == FRESH:
        return f"{fresh():x}"
    return asked if asked is not None else f"{derived(seed, 'salt'):x}"


def salt_at(seed: int, asked: str | None, place: str) -> str:
    """The salt of one run among several of one seed, by its place in them (`c8`, `r2`): their prompts differ."""
    if asked == FRESH:
        return FRESH
    return f"{asked}.{place}" if asked is not None else f"{derived(seed, 'salt', place):x}"


def salt_number(salt: str) -> int:
    """The number that prompts are drawn with for a salt."""
    return derived(0, "salt word", salt)


def words(seed: int | None, salt: str) -> str:
    """The flags that repeat a run: its seed, and its salt where it is not that of the seed."""
    if seed is None:
        return "a seed that is not known"
    return f"--seed {seed}" + ("" if salt == salt_of(seed, None) else f" --salt {salt}")


def own(seed: int, *names: str | int) -> int:
    """A seed for one run among several of one seed, by its place in them: 53 bits, as `fresh`."""
    return derived(seed, *names) >> 11


def derived(seed: int, *names: str | int) -> int:
    """A 64-bit seed for a purpose, for a generator other than numpy (Poisson arrivals as LoadGen draws them)."""
    return int.from_bytes(_digest(seed, names)[:8], "little")


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The generator of (seed, names): PCG64 seeded with the SHA-256 of both.

    0 is a valid seed. Names differ by type and position: "1" is not 1, and ("a", "b") is not ("ab",).
    """
    import numpy as np

    words = np.frombuffer(_digest(seed, names), dtype="<u4")
    return np.random.Generator(
        np.random.PCG64(np.random.SeedSequence([int(word) for word in words]))
    )


def shares(seed: int, name: str, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) for each number, whatever the others are: splitmix64 of a derived seed and the number."""
    import numpy as np

    state = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        derived(seed, name)
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def classes(seed: int, weights: Sequence[float], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of which of several classes each request is, by its number: a pure function of both, drawn by weight."""
    import numpy as np

    bounds = np.cumsum(weights)
    return np.searchsorted(bounds[:-1] / bounds[-1], shares(seed, "class", numbers), side="right")


def _digest(seed: int, names: tuple[str | int, ...]) -> bytes:
    text = repr((int(seed), *(name if isinstance(name, str) else int(name) for name in names)))
    return hashlib.sha256(text.encode()).digest()
