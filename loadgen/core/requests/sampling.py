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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from loadgen.core.units import LONGEST_NS, MOST_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY_PREFIX = "loadgen prompts 1"  # The number is the version of the drawing method.
KEY_BYTES = 32

INDEX_BYTES = 8  # the length of an index in the hash of a draw
BYTES_PER_NORMAL_VALUE = 16  # two 64-bit integers, for the Box-Muller transform

MAX_REDRAWS = 100  # attempts to draw a value inside [min, max] before it is clamped
MAX_EXPONENT = 700.0  # exp() of a larger number overflows
# A float has 53 significant bits. Of a random 64-bit integer, `(integer >> UNUSED_BITS) *
# UNIT_OF_53_BITS` is a uniform number from 0 to below 1.
UNUSED_BITS = 64 - 53
UNIT_OF_53_BITS = 2.0**-53
LOW_64_BITS = (1 << 64) - 1

ROUNDING_MARGIN = 1e-6
"""Values closer than this to the middle between two integers are not rounded as an array.

numpy and the math module may differ in the last bit of a logarithm, cosine or exponential. The
margin is far above that difference.
"""

LengthDistribution = Any
"""A distribution of lengths: one of the classes in `workload.distributions`.

They are told apart by their `tag` and not by their class, because workers need not import pydantic,
which those classes are made of.
"""

DelayDistribution = LengthDistribution
"""A distribution of delays in ns, of the same classes."""

LengthSampler = Callable[[bytes, str, int], int]
"""A function of (key, purpose, index) that returns a length."""
DelaySampler = Callable[[bytes, str, int], int]
"""A function of (key, purpose, index) that returns a delay in ns."""

Value = TypeVar("Value")


class _Bounds(NamedTuple):
    """The smallest and the largest value that is drawn from a distribution."""

    low: int
    high: int


# The bounds of normal and log-normal distributions for which the workload sets none.
_LENGTH_BOUNDS = _Bounds(low=1, high=MOST_TOKENS)
_DELAY_BOUNDS_NS = _Bounds(low=0, high=LONGEST_NS)


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


def length_sampler(length: LengthDistribution) -> LengthSampler:
    """Return a function that draws a number of tokens from a distribution.

    Raises ValueError if the distribution is of an unknown kind.
    """
    return _build_sampler(length, _LENGTH_BOUNDS)


def delay_sampler(delay: DelayDistribution) -> DelaySampler:
    """Return a function that draws a delay in ns, such as the think time of a user.

    Raises ValueError if the distribution is of an unknown kind.
    """
    return _build_sampler(delay, _DELAY_BOUNDS_NS)


def _build_sampler(distribution: Any, default_bounds: _Bounds) -> Callable[[bytes, str, int], int]:
    """Return a function that draws from a distribution of `workload.distributions`.

    `default_bounds` limit a normal or log-normal distribution that has no `min` or `max`. Raises
    ValueError if the distribution is of an unknown kind.
    """
    match distribution.tag:
        case "fixed":
            return _fixed_sampler(distribution.value)
        case "uniform":
            return _uniform_sampler(distribution.min, distribution.max)
        case "normal":
            return _normal_sampler(distribution, default_bounds)
        case "lognormal":
            return _lognormal_sampler(distribution, default_bounds)
        case "listed":
            return _listed_sampler(distribution.values)
        case "empirical":
            values = distribution.values
            return weighted_sampler(values, distribution.weights or [1.0] * len(values))
        case other:
            raise ValueError(f"there is no length distribution {other!r}")


def _normal_sampler(normal: Any, default_bounds: _Bounds) -> Callable[[bytes, str, int], int]:
    """Return a sampler of a normal distribution that is truncated to its bounds."""

    def transform(standard_normal: float) -> float:
        value: float = normal.mean + normal.stddev * standard_normal
        return value

    return _truncated_sampler(_bounds_of(normal, default_bounds), transform)


def _lognormal_sampler(lognormal: Any, default_bounds: _Bounds) -> Callable[[bytes, str, int], int]:
    """Return a sampler of a log-normal distribution that is truncated to its bounds."""
    mu = lognormal_mu(lognormal)

    def transform(standard_normal: float) -> float:
        # `math.exp` raises OverflowError for a large exponent.
        return math.exp(min(mu + lognormal.sigma * standard_normal, MAX_EXPONENT))

    return _truncated_sampler(_bounds_of(lognormal, default_bounds), transform)


def sample_lengths(
    length: LengthDistribution, key: bytes, purpose: str, indices: Sequence[int]
) -> list[int]:
    """Return the length that `length_sampler(length)` draws for each index, in their order.

    For normal and log-normal distributions this is several times faster than single calls, because
    most of the lengths are computed as one array.
    """
    if length.tag == "fixed":
        return [length.value] * len(indices)
    if length.tag in ("normal", "lognormal"):
        return _sample_truncated_lengths(length, key, purpose, indices)
    sampler = length_sampler(length)
    return [sampler(key, purpose, index) for index in indices]


def _sample_truncated_lengths(
    length: LengthDistribution, key: bytes, purpose: str, indices: Sequence[int]
) -> list[int]:
    """Return normal or log-normal lengths, exactly as single calls of the sampler draw them.

    All lengths are computed as one NumPy array, which is faster. The few that could differ from the
    sampler's are drawn with the sampler instead (see `_needs_sampler`).
    """
    normal_values = _standard_normal_values(key, purpose, indices)
    unrounded = _transform_normal_values(length, normal_values)
    rounded = np.rint(unrounded)
    needs_sampler = _needs_sampler(length, unrounded, rounded)

    # These values may be too large for an integer of 64 bits, so they are 0 until they are drawn.
    rounded[needs_sampler] = 0
    lengths: list[int] = rounded.astype(np.int64).tolist()

    sampler = length_sampler(length)
    for position in np.flatnonzero(needs_sampler).tolist():
        lengths[position] = sampler(key, purpose, indices[position])

    return lengths


def _needs_sampler(
    length: LengthDistribution, unrounded: NDArray[np.float64], rounded: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Return for each value whether its sampler must draw it, because NumPy may give another one.

    These are the values outside the bounds of the distribution, which the sampler draws again, and
    those so close to the middle between two integers that NumPy may round them to the other one.
    """
    bounds = _bounds_of(length, _LENGTH_BOUNDS)
    is_rejected = (rounded < bounds.low) | (rounded > bounds.high)
    # A value is in the middle between two integers if its fraction is 0.5.
    fraction = unrounded - np.floor(unrounded)
    may_round_differently = np.abs(fraction - 0.5) < ROUNDING_MARGIN
    return is_rejected | may_round_differently


def _transform_normal_values(
    length: LengthDistribution, normal_values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Turn standard normal values z into values of a normal or log-normal distribution.

    They are mean + stddev * z and exp(mu + sigma * z), before they are rounded to lengths.
    """
    transformed: NDArray[np.float64]
    if length.tag == "normal":
        transformed = length.mean + length.stddev * normal_values
    else:
        exponents = lognormal_mu(length) + length.sigma * normal_values
        transformed = np.exp(np.minimum(exponents, MAX_EXPONENT))
    return transformed


def lognormal_mu(length: LengthDistribution) -> float:
    """Return the mean of the logarithm of a log-normal distribution.

    The workload sets either the median, which is exp(mu), or the mean, which is
    exp(mu + sigma^2 / 2).
    """
    if length.median:
        return math.log(length.median)
    mean_log: float = math.log(length.mean) - length.sigma**2 / 2
    return mean_log


def _standard_normal_values(
    key: bytes, purpose: str, indices: Sequence[int]
) -> NDArray[np.float64]:
    """Return a random number of the standard normal distribution for each index.

    The Box-Muller transform makes each of them from two uniform numbers u and v, as
    sqrt(-2 ln u) * cos(2 pi v). The results equal those of `_standard_normal_value`, which computes
    one number at a time, so that it does not matter how many lengths are drawn together.
    """
    random_data = _random_bytes_of_first_draws(key, purpose, indices)
    random_integers = np.frombuffer(random_data, dtype="<u8")  # 64 bits each, little-endian
    integers_by_index = random_integers.reshape(-1, 2)
    u = _uniform_numbers(integers_by_index[:, 0])
    v = _uniform_numbers(integers_by_index[:, 1])
    normal: NDArray[np.float64] = np.sqrt(-2.0 * np.log(u)) * np.cos(2.0 * math.pi * v)
    return normal


def _uniform_numbers(random_words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Turn random 64-bit integers into uniform numbers above 0 and below 1.

    A float has 53 bits, so that many of the upper bits are used: n is mapped to (n + 0.5) / 2^53.
    The 0.5 keeps the result above 0, where its logarithm is finite.
    """
    numbers_of_53_bits = (random_words >> UNUSED_BITS).astype(np.float64)
    return (numbers_of_53_bits + 0.5) * UNIT_OF_53_BITS


def _random_bytes_of_first_draws(key: bytes, purpose: str, indices: Sequence[int]) -> bytes:
    """Return the random bytes of the first draw for each index, one after the other.

    A value outside the bounds of its distribution is drawn again, and each draw has a number; the
    first one is 0. The result is that of `random_bytes(key, f"{purpose} 0", index,
    BYTES_PER_NORMAL_VALUE)` for all indices. It is faster, because the key, with which the hash of
    every index begins, is hashed once and the state is copied.
    """
    hash_of_key = hashlib.shake_128(key)
    purpose_of_first_draw = f"{purpose} 0".encode()

    joined_bytes = bytearray()
    for index in indices:
        index_hash = hash_of_key.copy()
        index_hash.update(index.to_bytes(INDEX_BYTES, "little") + purpose_of_first_draw)
        joined_bytes += index_hash.digest(BYTES_PER_NORMAL_VALUE)

    return bytes(joined_bytes)


def _bounds_of(distribution: Any, default_bounds: _Bounds) -> _Bounds:
    """Return the bounds of a normal or log-normal distribution, or the default if it has none."""
    low, high = default_bounds
    return _Bounds(
        low=low if distribution.min is None else distribution.min,
        high=high if distribution.max is None else distribution.max,
    )


def _fixed_sampler(value: int) -> LengthSampler:
    """Return a sampler whose every draw is `value`."""

    def sample(key: bytes, purpose: str, index: int) -> int:  # noqa: ARG001
        return value

    return sample


def _uniform_sampler(low: int, high: int) -> LengthSampler:
    """Return a sampler that draws an integer from `low` to `high`, each equally often."""
    value_count = high - low + 1

    def sample(key: bytes, purpose: str, index: int) -> int:
        # With 128 random bits, the remainder favours no value noticeably.
        return low + random_integer(key, purpose, index, 16) % value_count

    return sample


def _listed_sampler(values: Sequence[int]) -> LengthSampler:
    """Return a sampler that takes the values in their order and begins again after the last."""

    def sample(key: bytes, purpose: str, index: int) -> int:  # noqa: ARG001
        return values[index % len(values)]

    return sample


def _truncated_sampler(
    bounds: _Bounds, transform: Callable[[float], float]
) -> Callable[[bytes, str, int], int]:
    """Return a sampler of a normal or log-normal distribution that is truncated to its bounds.

    A value is rounded to an integer. If it is outside the bounds, it is drawn again (rejection
    sampling), and after MAX_REDRAWS attempts it is set to the nearer bound.

    Args:
        bounds: The smallest and the largest value.
        transform: Turns a value of the standard normal distribution into one of the distribution.
    """
    low, high = bounds

    def sample(key: bytes, purpose: str, index: int) -> int:
        value = 0
        for attempt in range(MAX_REDRAWS):
            # The number of the attempt is part of the purpose, so that each attempt draws anew.
            random_bits = random_integer(key, f"{purpose} {attempt}", index, BYTES_PER_NORMAL_VALUE)
            value = round(transform(_standard_normal_value(random_bits)))
            if low <= value <= high:
                return value

        # The nearer bound.
        return low if value < low else high

    return sample


def _standard_normal_value(random_bits: int) -> float:
    """Turn 128 random bits into a value of the standard normal distribution.

    This is the Box-Muller transform of two uniform numbers u and v between 0 and 1, which are made
    of the lower and the upper 64 bits. Each uses 53 of its 64 bits, as many as a float has.
    """
    low_bits = (random_bits & LOW_64_BITS) >> UNUSED_BITS
    high_bits = (random_bits >> 64) >> UNUSED_BITS
    # The 0.5 keeps u above 0, where its logarithm is finite.
    u = (low_bits + 0.5) * UNIT_OF_53_BITS
    v = (high_bits + 0.5) * UNIT_OF_53_BITS
    return math.sqrt(-2.0 * math.log(u)) * math.cos(2.0 * math.pi * v)


def weighted_sampler(
    values: Sequence[Value], weights: Iterable[float]
) -> Callable[[bytes, str, int], Value]:
    """Return a sampler that draws each value with a probability in proportion to its weight.

    This is inverse transform sampling. With the weights 2, 1 and 0, a random number from 0 to below
    2 draws the first value and one from 2 to below 3 the second. The third is never drawn.
    """
    cumulative_weights = list(accumulate(weights))  # [2, 3, 3] in the example
    total_weight = cumulative_weights[-1]

    # The first value that reaches the total weight: those after it have the weight 0.
    last_drawable_index = bisect_left(cumulative_weights, total_weight)

    def sample(key: bytes, purpose: str, index: int) -> Value:
        random_bits = random_integer(key, purpose, index, 8)
        # The upper 53 of the 64 bits, as many as a float has, give a number from 0 to below 1.
        uniform_number = (random_bits >> UNUSED_BITS) * UNIT_OF_53_BITS
        random_weight = uniform_number * total_weight
        drawn_index = bisect_right(cumulative_weights, random_weight)
        # Rounding can make `random_weight` equal to the total weight, after the last value.
        return values[min(drawn_index, last_drawable_index)]

    return sample
