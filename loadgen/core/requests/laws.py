"""Random draws as pure functions of an index: the bytes behind every prompt, and the length distributions.

A draw is SHAKE-128 of (key, index, purpose). One call gives the randomness of a whole prompt, the order of calls does
not matter, and every host gives the same bytes. (Seeding a numpy generator costs 20 us, more than building a prompt.)
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from loadgen.core.units import MOST_TOKENS

_LOW_64_BITS = (1 << 64) - 1
REDRAWS = 100  # attempts to draw a value inside [min, max] before it is clamped
_ROUNDING_MARGIN = 1e-6  # distance to a half: arrays can round differently from single numbers

LengthSampler = Callable[[bytes, str, int], int]  # (key, purpose, index) -> a length


def length_sampler(length: Any) -> LengthSampler:
    """Return a length distribution as a function of (key, purpose, index). `workload.fields` defines them."""
    match length.tag:
        case "fixed":
            value: int = length.value
            return lambda derive_key, purpose, index: value
        case "uniform":
            low, span = length.min, length.max - length.min + 1
            return lambda derive_key, purpose, index: (
                low + int.from_bytes(random_bytes(derive_key, purpose, index, 16), "little") % span
            )
        case "normal":
            return _truncated(length, lambda z: length.mean + length.stddev * z)
        case "lognormal":
            mu = lognormal_mu(length)
            return _truncated(length, lambda z: math.exp(min(mu + length.sigma * z, 700.0)))
        case "listed":
            listed: tuple[int, ...] = length.values
            return lambda derive_key, purpose, index: listed[index % len(listed)]
        case "empirical":
            return _weighted(length.values, length.weights or [1.0] * len(length.values))
        case other:
            raise ValueError(f"no length law {other!r}")


def sample_lengths(
    length: Any, derive_key: bytes, purpose: str, numbers: Sequence[int]
) -> list[int]:
    """`law(length)` for each number: the same integers, several times faster for normal and lognormal."""
    if length.tag == "fixed":
        return [length.value] * len(numbers)
    draw_length = length_sampler(length)
    if length.tag not in ("normal", "lognormal"):
        return [draw_length(derive_key, purpose, number) for number in numbers]
    copy_of_key, suffix = hashlib.shake_128(derive_key).copy, f"{purpose} 0".encode()
    random_bytes = bytearray()
    for number in numbers:
        hasher = copy_of_key()
        hasher.update(number.to_bytes(8, "little") + suffix)
        random_bytes += hasher.digest(16)
    u, v = ((np.frombuffer(random_bytes, "<u8").reshape(-1, 2) >> 11) + 0.5).T * 2.0**-53
    z = np.sqrt(-2.0 * np.log(u)) * np.cos(2.0 * math.pi * v)
    if length.tag == "normal":
        shaped = length.mean + length.stddev * z
    else:
        shaped = np.exp(np.minimum(lognormal_mu(length) + length.sigma * z, 700.0))
    rounded = np.rint(shaped)
    low, high = _bounds(length)
    unsure = (
        (np.abs(np.abs(shaped - rounded) - 0.5) < _ROUNDING_MARGIN)
        | (rounded < low)
        | (rounded > high)
    )
    values: list[int] = np.where(unsure, 0, rounded).astype(np.int64).tolist()
    for position in np.flatnonzero(unsure).tolist():
        values[position] = draw_length(derive_key, purpose, numbers[position])
    return values


def lognormal_mu(length: Any) -> float:
    """The mean of the logarithm of a lognormal length."""
    return math.log(length.median) if length.median else math.log(length.mean) - length.sigma**2 / 2


def _bounds(length: Any) -> tuple[int, int]:
    return (
        1 if length.min is None else length.min,
        MOST_TOKENS if length.max is None else length.max,
    )


def _truncated(length: Any, shape: Callable[[float], float]) -> LengthSampler:
    """A distribution: `shape` of a standard normal value, rounded, redrawn while outside [min, max]."""
    low, high = _bounds(length)

    def draw_length(derive_key: bytes, purpose: str, index: int) -> int:
        value = 0
        for attempt in range(REDRAWS):
            bits = int.from_bytes(
                random_bytes(derive_key, f"{purpose} {attempt}", index, 16), "little"
            )
            u, v = ((bits & _LOW_64_BITS) >> 11) + 0.5, (bits >> 75) + 0.5
            # Box-Muller transform
            z = math.sqrt(-2.0 * math.log(u * 2.0**-53)) * math.cos(2.0 * math.pi * v * 2.0**-53)
            value = round(shape(z))
            if low <= value <= high:
                return value
        return int(min(max(value, low), high))

    return draw_length


def _weighted(values: Sequence[int], weights: Iterable[float]) -> LengthSampler:
    bounds = list(accumulate(weights))
    last = max(i for i, bound in enumerate(bounds) if i == 0 or bound > bounds[i - 1])

    def draw_length(derive_key: bytes, purpose: str, index: int) -> int:
        share = (
            int.from_bytes(random_bytes(derive_key, purpose, index, 8), "little") >> 11
        ) * 2.0**-53
        return values[min(bisect_right(bounds, share * bounds[-1]), last)]

    return draw_length


def derive_key(*parts: int) -> bytes:
    """32 bytes derived from a seed, or from seed and salt. The 1 in the text is the version of the drawing method."""
    return hashlib.blake2b(
        " ".join(map(str, ("loadgen prompts 1", *parts))).encode(), digest_size=32
    ).digest()


def random_bytes(derive_key: bytes, purpose: str, index: int, size: int) -> bytes:
    """`size` random bytes. A longer draw for the same key, purpose and index begins with the shorter one."""
    return hashlib.shake_128(derive_key + index.to_bytes(8, "little") + purpose.encode()).digest(
        size
    )
