"""Random draws as pure functions of a key, a purpose and an index, and samplers of lengths.

A draw is the SHAKE-128 hash of key, index and purpose, so it is the same on every host and does not
depend on the order of the calls. One hash gives the randomness of a whole prompt. To seed a numpy
generator for each prompt would take 20 us, more than the rest of building the prompt.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.core.units import MOST_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY_PREFIX = "loadgen prompts 1"  # The number is the version of the drawing method.
KEY_BYTES = 32

MAX_REDRAWS = 100  # attempts to draw a value inside [min, max] before it is clamped
MAX_EXPONENT = 700.0  # exp() of a larger number overflows
UNIT_OF_53_BITS = 2.0**-53
LOW_64_BITS = (1 << 64) - 1

ROUNDING_MARGIN = 1e-6
"""Distance from a half below which arrays and single numbers can be rounded differently."""

LengthSampler = Callable[[bytes, str, int], int]
"""A function of (key, purpose, index) that returns a length."""


def derive_key(*parts: int) -> bytes:
    """Return a key for `random_bytes` that depends on a seed, or on a seed and a salt."""
    text = " ".join(map(str, (KEY_PREFIX, *parts)))
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


def random_bytes(key: bytes, purpose: str, index: int, size: int) -> bytes:
    """Return `size` random bytes.

    A longer draw for the same key, purpose and index begins with the shorter one.
    """
    return hashlib.shake_128(key + index.to_bytes(8, "little") + purpose.encode()).digest(size)


def random_integer(key: bytes, purpose: str, index: int, size: int) -> int:
    """Return a random unsigned integer of `size` bytes."""
    return int.from_bytes(random_bytes(key, purpose, index, size), "little")


def length_sampler(length: Any) -> LengthSampler:
    """Return a function that draws from a length distribution of `workload.distributions`."""
    match length.tag:
        case "fixed":
            return _fixed_sampler(length.value)
        case "uniform":
            return _uniform_sampler(length.min, length.max)
        case "normal":
            return _truncated_sampler(length, lambda z: length.mean + length.stddev * z)
        case "lognormal":
            mu = lognormal_mu(length)
            return _truncated_sampler(
                length, lambda z: math.exp(min(mu + length.sigma * z, MAX_EXPONENT))
            )
        case "listed":
            return _listed_sampler(length.values)
        case "empirical":
            return _weighted_sampler(length.values, length.weights or [1.0] * len(length.values))
        case other:
            raise ValueError(f"no length law {other!r}")


def sample_lengths(length: Any, key: bytes, purpose: str, numbers: Sequence[int]) -> list[int]:
    """Return what `length_sampler(length)` returns for each number.

    For normal and log-normal distributions this is several times faster than single calls.
    """
    if length.tag == "fixed":
        return [length.value] * len(numbers)
    sampler = length_sampler(length)
    if length.tag not in ("normal", "lognormal"):
        return [sampler(key, purpose, number) for number in numbers]
    normal = _standard_normal_values(key, purpose, numbers)
    if length.tag == "normal":
        unrounded = length.mean + length.stddev * normal
    else:
        exponents = np.minimum(lognormal_mu(length) + length.sigma * normal, MAX_EXPONENT)
        unrounded = np.exp(exponents)
    rounded = np.rint(unrounded)
    low, high = _bounds(length)
    is_near_half = np.abs(np.abs(unrounded - rounded) - 0.5) < ROUNDING_MARGIN
    needs_single_draw = is_near_half | (rounded < low) | (rounded > high)
    lengths: list[int] = np.where(needs_single_draw, 0, rounded).astype(np.int64).tolist()
    for position in np.flatnonzero(needs_single_draw).tolist():
        lengths[position] = sampler(key, purpose, numbers[position])
    return lengths


def lognormal_mu(length: Any) -> float:
    """Return the mean of the logarithm of a log-normal distribution."""
    if length.median:
        return math.log(length.median)
    mean_log: float = math.log(length.mean) - length.sigma**2 / 2
    return mean_log


def _standard_normal_values(
    key: bytes, purpose: str, numbers: Sequence[int]
) -> NDArray[np.float64]:
    """Return the first standard normal value that `_truncated_sampler` draws for each number."""
    copy_hash_of_key = hashlib.shake_128(key).copy
    suffix = f"{purpose} 0".encode()
    drawn_bytes = bytearray()
    for number in numbers:
        hasher = copy_hash_of_key()
        hasher.update(number.to_bytes(8, "little") + suffix)
        drawn_bytes += hasher.digest(16)
    integers = np.frombuffer(drawn_bytes, "<u8").reshape(-1, 2) >> 11
    u, v = (integers + 0.5).T * UNIT_OF_53_BITS
    normal: NDArray[np.float64] = np.sqrt(-2.0 * np.log(u)) * np.cos(2.0 * math.pi * v)
    return normal


def _bounds(length: Any) -> tuple[int, int]:
    """Return the smallest and the largest value of a normal or log-normal length."""
    low = 1 if length.min is None else length.min
    high = MOST_TOKENS if length.max is None else length.max
    return low, high


def _fixed_sampler(value: int) -> LengthSampler:
    def sample(key: bytes, purpose: str, index: int) -> int:  # noqa: ARG001
        return value

    return sample


def _uniform_sampler(low: int, high: int) -> LengthSampler:
    value_count = high - low + 1

    def sample(key: bytes, purpose: str, index: int) -> int:
        return low + random_integer(key, purpose, index, 16) % value_count

    return sample


def _listed_sampler(values: Sequence[int]) -> LengthSampler:
    """Return a sampler that takes the values in their order and begins again after the last."""

    def sample(key: bytes, purpose: str, index: int) -> int:  # noqa: ARG001
        return values[index % len(values)]

    return sample


def _truncated_sampler(length: Any, transform: Callable[[float], float]) -> LengthSampler:
    """Return a sampler of `transform(z)`, where z has a standard normal distribution.

    The result is rounded, and drawn again while it is outside the bounds of `length`.
    """
    low, high = _bounds(length)

    def sample(key: bytes, purpose: str, index: int) -> int:
        value = 0
        for attempt in range(MAX_REDRAWS):
            bits = random_integer(key, f"{purpose} {attempt}", index, 16)
            u = (((bits & LOW_64_BITS) >> 11) + 0.5) * UNIT_OF_53_BITS
            v = (bits >> 75) + 0.5
            # Box-Muller transform
            z = math.sqrt(-2.0 * math.log(u)) * math.cos(2.0 * math.pi * v * UNIT_OF_53_BITS)
            value = round(transform(z))
            if low <= value <= high:
                return value
        return int(min(max(value, low), high))

    return sample


def _weighted_sampler(values: Sequence[int], weights: Iterable[float]) -> LengthSampler:
    """Return a sampler that draws each value with a probability in proportion to its weight."""
    cumulative_weights = list(accumulate(weights))
    total_weight = cumulative_weights[-1]
    # Rounding can make the share equal to 1. A last value of weight 0 must not be drawn then.
    last_index = bisect_left(cumulative_weights, total_weight)

    def sample(key: bytes, purpose: str, index: int) -> int:
        share = (random_integer(key, purpose, index, 8) >> 11) * UNIT_OF_53_BITS
        return values[min(bisect_right(cumulative_weights, share * total_weight), last_index)]

    return sample
