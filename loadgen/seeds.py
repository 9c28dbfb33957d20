"""Random numbers: an independent generator for every purpose, from one seed. The only maker of generators.

Who needs randomness names its purpose (`stream(seed, "prompts", 7)`) and so gets the same numbers whatever else was
drawn, in any order and in any process. Nothing here keeps state.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np

MOST = 2**64  # seeds are below this, as LoadGen's are


def fresh() -> int:
    """A new seed from the operating system's entropy: 53 bits, so that it survives any JSON reader."""
    return int.from_bytes(os.urandom(8), "little") >> 11


def derived(seed: int, *names: str | int) -> int:
    """A seed for a purpose, where a generator of another make needs one (Poisson as LoadGen draws it): 64 bits."""
    return int.from_bytes(_digest(seed, names)[:8], "little")


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The generator of (seed, names): PCG64 on the SHA-256 of both. 0 is a seed like any other; names are told apart
    by type and by place ("1" is not 1, ("a", "b") is not ("ab",))."""
    words = np.frombuffer(_digest(seed, names), dtype="<u4")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([int(word) for word in words])))


def _digest(seed: int, names: tuple[str | int, ...]) -> bytes:
    text = repr((int(seed), *(name if isinstance(name, str) else int(name) for name in names)))
    return hashlib.sha256(text.encode()).digest()
