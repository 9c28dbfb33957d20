"""Draws that are pure functions of a number: the bytes behind every prompt, and the length laws of a workload.

A draw is SHAKE-128 of (key, number, purpose): one call gives a whole prompt's randomness, the order of calls does not
matter, and any host gives the same bytes. (A numpy generator costs 20 us to seed, more than the prompt it would make.)
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

MOST_TOKENS = 10_000_000  # where a law has no max of its own
_HALF = (1 << 64) - 1
REDRAWS = 100  # of a value outside [min, max], before it is clamped
_NEAR = 1e-6  # to a half: arrays may round otherwise than single numbers do

Law = Callable[[bytes, str, int], int]  # (key, purpose, index) -> a length


def law(length: Any) -> Law:
    """A length law of the workload as a function of (key, purpose, index). The laws are defined at their types."""
    match length.tag:
        case "fixed":
            value: int = length.value
            return lambda key, purpose, index: value
        case "uniform":
            low, span = length.min, length.max - length.min + 1
            return lambda key, purpose, index: low + int.from_bytes(draw(key, purpose, index, 16), "little") % span
        case "normal":
            return _held(length, lambda z: length.mean + length.stddev * z)
        case "lognormal":
            mu = _mu(length)
            return _held(length, lambda z: math.exp(min(mu + length.sigma * z, 700.0)))
        case "listed":
            listed: tuple[int, ...] = length.values
            return lambda key, purpose, index: listed[index % len(listed)]
        case "empirical":
            return _weighted(length.values, length.weights or [1.0] * len(length.values))
        case other:
            raise ValueError(f"no length law {other!r}")


def together(length: Any, key: bytes, purpose: str, numbers: range) -> list[int]:
    """`law(length)` of each of these numbers: the same integers, several times as fast for the normal laws."""
    one = law(length)
    if length.tag not in ("normal", "lognormal"):
        return [one(key, purpose, number) for number in numbers]
    begun, rest = hashlib.shake_128(key).copy, f"{purpose} 0".encode()
    drawn = bytearray()
    for number in numbers:
        state = begun()
        state.update(number.to_bytes(8, "little") + rest)
        drawn += state.digest(16)
    u, v = ((np.frombuffer(drawn, "<u8").reshape(-1, 2) >> 11) + 0.5).T * 2.0**-53
    z = np.sqrt(-2.0 * np.log(u)) * np.cos(2.0 * math.pi * v)
    if length.tag == "normal":
        shaped = length.mean + length.stddev * z
    else:
        shaped = np.exp(np.minimum(_mu(length) + length.sigma * z, 700.0))
    rounded = np.rint(shaped)
    low, high = _bounds(length)
    unsure = (np.abs(np.abs(shaped - rounded) - 0.5) < _NEAR) | (rounded < low) | (rounded > high)
    values: list[int] = np.where(unsure, 0, rounded).astype(np.int64).tolist()
    for place in np.flatnonzero(unsure).tolist():
        values[place] = one(key, purpose, numbers[place])
    return values


def _mu(length: Any) -> float:
    """The mean of a lognormal length's logarithm."""
    return math.log(length.median) if length.median else math.log(length.mean) - length.sigma**2 / 2


def _bounds(length: Any) -> tuple[int, int]:
    return 1 if length.min is None else length.min, MOST_TOKENS if length.max is None else length.max


def _held(length: Any, shape: Callable[[float], float]) -> Law:
    """A function of a standard normal, rounded, drawn again while outside [min, max]."""
    low, high = _bounds(length)

    def drawn(key: bytes, purpose: str, index: int) -> int:
        value = 0
        for attempt in range(REDRAWS):
            bits = int.from_bytes(draw(key, f"{purpose} {attempt}", index, 16), "little")
            u, v = ((bits & _HALF) >> 11) + 0.5, (bits >> 75) + 0.5
            z = math.sqrt(-2.0 * math.log(u * 2.0**-53)) * math.cos(2.0 * math.pi * v * 2.0**-53)  # Box and Muller
            value = round(shape(z))
            if low <= value <= high:
                return value
        return int(min(max(value, low), high))

    return drawn


def _weighted(values: Sequence[int], weights: Iterable[float]) -> Law:
    bounds = list(accumulate(weights))
    last = max(i for i, bound in enumerate(bounds) if i == 0 or bound > bounds[i - 1])

    def drawn(key: bytes, purpose: str, index: int) -> int:
        share = (int.from_bytes(draw(key, purpose, index, 8), "little") >> 11) * 2.0**-53
        return values[min(bisect_right(bounds, share * bounds[-1]), last)]

    return drawn


def key(*parts: int) -> bytes:
    """32 bytes that stand for a seed, or for seed and salt. The 1 is the version of the recipe of all draws."""
    return hashlib.blake2b(" ".join(map(str, ("loadgen prompts 1", *parts))).encode(), digest_size=32).digest()


def draw(key: bytes, purpose: str, index: int, size: int) -> bytes:
    """`size` random bytes; a longer draw of the same name begins with the shorter one."""
    return hashlib.shake_128(key + index.to_bytes(8, "little") + purpose.encode()).digest(size)
