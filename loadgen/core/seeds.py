"""Random numbers: an independent generator for every purpose, derived from one seed.

All generators are made here. A caller names its purpose (`generator(seed, "prompts", 7)`) and gets
the same numbers in any process and in any order. This module keeps no state.
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
"""The salt that stands for a random one in every run."""
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, the increment of splitmix64."""
_MIX_FACTOR_1 = 0xBF58476D1CE4E5B9
_MIX_FACTOR_2 = 0x94D049BB133111EB
"""The factors of splitmix64."""
_MIX_SHIFT_1 = 30
_MIX_SHIFT_2 = 27
_MIX_SHIFT_3 = 31
"""The shifts of splitmix64, in bits."""
_FLOAT_BITS = 53
"""The significant bits of a float. So many of the highest random bits become a fraction."""
MOST = 2**64
"""Seeds are below this, as in LoadGen."""


def random_seed() -> int:
    """Return a new seed from the entropy of the operating system.

    It has 53 bits, so that every JSON reader keeps it exactly.
    """
    return int.from_bytes(os.urandom(8), "little") >> 11


def resolve_salt(seed: int, requested: str | None) -> str:
    """Return the salt of a run, a text that is mixed into the random words of its prompts.

    Runs with different salts share no prompts, so no run finds its prompts in the prefix cache that
    another run filled. Runs with the same seed and salt send the same prompts.

    Args:
        seed: The seed of the run.
        requested: The salt that the user requested, which is returned unchanged. With None, the
            user requested none, and the salt follows from the seed. With FRESH, the user wants new
            prompts in each run, and every call returns a new random salt.
    """
    if requested is None:
        return f"{derive_seed(seed, 'salt'):x}"
    if requested == FRESH:
        return f"{random_seed():x}"
    return requested


def salt_of_run(seed: int, requested: str | None, run_name: str) -> str:
    """Return the salt of one of several runs with the same seed, so that their prompts differ.

    A salt is a text from which prompts are drawn. Runs with different salts share no prompts.

    Args:
        seed: The seed of all the runs.
        requested: The salt that the user requested for all of them, or None. The special value
            FRESH is returned unchanged: `resolve_salt` replaces it when the run starts.
        run_name: The name of the run, such as `c8` or `r2`, which differs from run to run.
    """
    if requested == FRESH:
        return FRESH
    if requested is None:
        return f"{derive_seed(seed, 'salt', run_name):x}"
    return f"{requested}.{run_name}"


def salt_number(salt: str) -> int:
    """Return the number with which prompts are drawn for a salt."""
    return derive_seed(0, "salt word", salt)


def reproduction_options(seed: int | None, salt: str) -> str:
    """Return the options that reproduce a run: its seed, and its salt if the seed has another."""
    if seed is None:
        return "a seed that is not known"
    return f"--seed {seed}" + ("" if salt == resolve_salt(seed, None) else f" --salt {salt}")


def run_seed(seed: int, *names: str | int) -> int:
    """Return the seed of one of several runs with one seed. It has 53 bits, as `random_seed`."""
    return derive_seed(seed, *names) >> 11


def derive_seed(seed: int, *names: str | int) -> int:
    """Return a 64-bit seed that follows from another seed and the names of a purpose.

    Different names give independent seeds. `generator` does the same for NumPy's own generator.
    """
    return int.from_bytes(_digest(seed, names)[:8], "little")


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """Return the NumPy random generator of a purpose, such as `generator(seed, "prompts", 7)`.

    The same seed and names always give the same numbers, and other names give independent ones. The
    generator is PCG64, seeded with the SHA-256 of the seed and the names. 0 is a valid seed. Names
    differ by type and position: "1" is not 1, and ("a", "b") differs from ("ab",).
    """
    import numpy as np

    entropy = np.frombuffer(_digest(seed, names), dtype="<u4").tolist()
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def draw_fractions(seed: int, name: str, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a random number from 0 to below 1 for each of several ids, such as those of requests.

    The number depends only on the seed, the name and the id, so that processes which send different
    requests agree about all of them. The generator is splitmix64 (Steele et al. 2014,
    https://doi.org/10.1145/2660193.2660195) with its published constants.

    Args:
        seed: The seed of the run.
        name: The purpose. Other purposes give independent numbers for the same ids.
        ids: Integers such as request ids or session numbers.
    """
    import numpy as np

    # Splitmix64 adds a constant to its state in each step. Id n has the state after n steps.
    initial_state = np.uint64(derive_seed(seed, name))
    states = initial_state + ids.astype(np.uint64) * np.uint64(_GOLDEN_RATIO_64)
    random_bits = _mix_bits(states)

    highest_bits = random_bits >> np.uint64(64 - _FLOAT_BITS)
    return highest_bits.astype(np.float64) * 2.0**-_FLOAT_BITS


def _mix_bits(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the random 64-bit numbers that splitmix64 computes from its states.

    Shifts and factors are those of the reference implementation
    (https://prng.di.unimi.it/splitmix64.c). They were found by search, so that each bit of a state
    changes about half of the bits of the number. Products overflow, as the algorithm requires.
    """
    import numpy as np

    bits = _xor_with_shifted(state, _MIX_SHIFT_1) * np.uint64(_MIX_FACTOR_1)
    bits = _xor_with_shifted(bits, _MIX_SHIFT_2) * np.uint64(_MIX_FACTOR_2)
    return _xor_with_shifted(bits, _MIX_SHIFT_3)


def _xor_with_shifted(bits: NDArray[np.uint64], shift: int) -> NDArray[np.uint64]:
    """Return numbers, each combined by XOR with itself shifted to the right by some bits."""
    import numpy as np

    return bits ^ (bits >> np.uint64(shift))


def draw_classes(
    seed: int, weights: Sequence[float], session_ids: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the index of the request class of each session, drawn with these weights.

    With the weights 3 and 1, class 0 has the random numbers below 0.75 and class 1 the others.
    """
    import numpy as np

    cumulative_weights = np.cumsum(weights)
    upper_bounds = cumulative_weights / cumulative_weights[-1]
    fractions = draw_fractions(seed, "class", session_ids)
    # A fraction belongs to the first class whose upper bound is above it. If it is above all other
    # bounds, it belongs to the last class, so the bound of that one is not needed.
    return np.searchsorted(upper_bounds[:-1], fractions, side="right")


def _digest(seed: int, names: tuple[str | int, ...]) -> bytes:
    """Return the SHA-256 of a seed and the names of a purpose.

    NumPy integers count as the Python integers of the same value.
    """
    plain_names = (name if isinstance(name, str) else int(name) for name in names)
    text = repr((int(seed), *plain_names))
    return hashlib.sha256(text.encode()).digest()
