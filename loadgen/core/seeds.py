"""Random numbers: an independent generator for every purpose, derived from one seed.

All generators are made here. A caller names its purpose (`stream(seed, "prompts", 7)`) and gets the
same numbers in any process and in any order. This module keeps no state.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

FRESH = "fresh"
"""The salt that stands for a new one in every run."""
MOST = 2**64
"""Seeds are below this, as in LoadGen."""


def fresh() -> int:
    """Return a new seed from the entropy of the operating system.

    It has 53 bits, so that every JSON reader keeps it exactly.
    """
    return int.from_bytes(os.urandom(8), "little") >> 11


def salt_of(seed: int, requested: str | None) -> str:
    """Return the salt of a run: the requested one, a new one for FRESH, or the one of the seed."""
    if requested == FRESH:
        return f"{fresh():x}"
    return requested if requested is not None else f"{derived(seed, 'salt'):x}"


def salt_at(seed: int, requested: str | None, run_name: str) -> str:
    """Return the salt of one of several runs with one seed, so that their prompts differ.

    `run_name` is the name of the run among them, such as `c8` or `r2`.
    """
    if requested == FRESH:
        return FRESH
    if requested is not None:
        return f"{requested}.{run_name}"
    return f"{derived(seed, 'salt', run_name):x}"


def salt_number(salt: str) -> int:
    """Return the number with which prompts are drawn for a salt."""
    return derived(0, "salt word", salt)


def reproduction_options(seed: int | None, salt: str) -> str:
    """Return the options that reproduce a run: its seed, and its salt if the seed has another."""
    if seed is None:
        return "a seed that is not known"
    return f"--seed {seed}" + ("" if salt == salt_of(seed, None) else f" --salt {salt}")


def run_seed(seed: int, *names: str | int) -> int:
    """Return the seed of one of several runs with one seed, with 53 bits as that of `fresh`."""
    return derived(seed, *names) >> 11


def derived(seed: int, *names: str | int) -> int:
    """Return a 64-bit seed for a purpose, for generators other than that of numpy."""
    return int.from_bytes(_digest(seed, names)[:8], "little")


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return the generator of (seed, names): PCG64 seeded with the SHA-256 of both.

    0 is a valid seed. Names differ by type and position: "1" is not 1, and ("a", "b") differs from
    ("ab",).
    """
    import numpy as np

    entropy = np.frombuffer(_digest(seed, names), dtype="<u4").tolist()
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def draw_fractions(seed: int, name: str, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a random number from 0 to below 1 for each of some numbers, such as ids of requests.

    The same number always gets the same one, whichever numbers are drawn with it, so processes that
    send different requests agree. The generator is splitmix64 (Steele et al. 2014,
    https://doi.org/10.1145/2660193.2660195) with its published constants: the state of a number is
    a multiple of the golden ratio from the seed, and is then mixed.

    Args:
        seed: The seed of the run.
        name: The purpose, which selects a sequence of its own.
        numbers: The numbers.
    """
    import numpy as np

    golden_ratio = np.uint64(0x9E3779B97F4A7C15)
    mixing_steps = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
    bits = numbers.astype(np.uint64) * golden_ratio + np.uint64(derived(seed, name))
    for shift, factor in mixing_steps:
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits = bits ^ (bits >> np.uint64(31))
    # A float has 53 significant bits, so the highest 53 of 64 bits are used.
    highest_bits = bits >> np.uint64(11)
    return highest_bits.astype(np.float64) * 2.0**-53


def classes(seed: int, weights: Sequence[float], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the class of each request, drawn by weight from its number."""
    import numpy as np

    bounds = np.cumsum(weights)
    return np.searchsorted(
        bounds[:-1] / bounds[-1], draw_fractions(seed, "class", numbers), side="right"
    )


def _digest(seed: int, names: tuple[str | int, ...]) -> bytes:
    text = repr((int(seed), *(name if isinstance(name, str) else int(name) for name in names)))
    return hashlib.sha256(text.encode()).digest()
