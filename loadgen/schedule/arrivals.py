"""When requests arrive in open loop: each law is a pure function from its parameters to integer nanosecond offsets.

No clock, no IO and no global generator here. Poisson is MLPerf LoadGen's draw, bit for bit, and so carries LoadGen's
own Mersenne twister; the other laws draw from the generator they are given (`seeds.stream`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]

_S = 1_000_000_000
_BLOCK = 1 << 16  # gaps drawn at a time; no result depends on it, a generator's stream is the same in any blocks


class Arrivals(NamedTuple):
    """Ascending offsets in ns from the start of the stage, and where the stage ends.

    `end_ns` is the duration where the duration cut the arrivals, else the offset of the arrival that would have come
    next: LoadGen's reading of the duration of a schedule, by which n gaps belong to n queries.
    """

    offsets: Offsets
    end_ns: int


def constant(rate: float, *, duration_ns: int | None = None, count: int | None = None) -> Arrivals:
    """`rate` per second, evenly: arrival i at i / rate, rounded to the ns. An infinite rate puts all at 0."""
    if math.isinf(rate):
        return _all_at_once(count)
    most = math.ceil(duration_ns * rate / _S) + 1 if duration_ns is not None else count
    if most is None:
        raise ValueError("arrivals need a duration or a count")
    if count is not None:
        most = min(most, count)
    # i * 1e9 first: it is exact, so that no error of a rounded gap adds up
    return _cut(np.rint(np.arange(most + 1) * 1e9 / rate).astype(np.int64), duration_ns, count)


def poisson(rate: float, *, seed: int, duration_ns: int | None = None, count: int | None = None) -> Arrivals:
    """MLPerf LoadGen's Poisson schedule with `schedule_rng_seed = seed`: the first at 0, the gaps exponential.

    Stops at whichever of duration and count comes first. An infinite rate puts all at 0.
    """
    if math.isinf(rate):
        return _all_at_once(count)
    return _cut(_cumulated(_loadgen_gaps(rate, seed), rate, duration_ns, count), duration_ns, count)


def poisson_at_least(
    rate: float, *, seed: int, min_duration_ns: int, min_count: int = 1, multiple_of: int = 1
) -> Arrivals:
    """The same draw under LoadGen's stop rule: on until the last offset reaches the minimum duration *and* the count
    reaches the minimum, then up to a whole multiple of `multiple_of` (passes of the data set, for models whose
    samples must be issued equally often). `end_ns` is LoadGen's `duration_ns`.
    """
    gaps = _loadgen_gaps(rate, seed)
    offsets = _cumulated(gaps, rate, min_duration_ns, None)
    count = max(int(np.searchsorted(offsets, min_duration_ns)) + 1, min_count, 1)
    count += -count % multiple_of
    while len(offsets) <= count:
        offsets = np.concatenate((offsets, offsets[-1] + np.cumsum(gaps(count + 1 - len(offsets)))))
    return Arrivals(offsets[:count], int(offsets[count]))


def gamma(
    rate: float,
    *,
    burstiness: float,
    rng: np.random.Generator,
    duration_ns: int | None = None,
    count: int | None = None,
) -> Arrivals:
    """Gamma gaps of mean 1 / rate and shape `burstiness`, as vLLM's option of that name: below 1 burstier than Poisson,
    1 Poisson in law, above 1 more even. The gaps' coefficient of variation is 1 / sqrt(burstiness). The first at 0.
    """
    if math.isinf(rate):
        return _all_at_once(count)

    def gaps(n: int) -> Offsets:
        return (rng.gamma(burstiness, 1 / (rate * burstiness), n) * 1e9).astype(np.int64)

    return _cut(_cumulated(gaps, rate, duration_ns, count), duration_ns, count)


def ramp(
    from_rate: float,
    to_rate: float,
    *,
    rng: np.random.Generator,
    duration_ns: int | None = None,
    count: int | None = None,
) -> Arrivals:
    """A Poisson process whose rate goes linearly from one value to the other over the duration.

    Made by the change of time t = L^-1(s), L(t) the integral of the rate, s a Poisson process of rate 1 (Cinlar 1975).
    With a duration and a count, the count cuts. A count alone is met exactly: that many points, spread by the rate over
    the time in which so many are expected. The first arrival is not at 0: a ramp from 0 has none there.
    """
    if duration_ns is None:
        if count is None:
            raise ValueError("arrivals need a duration or a count")
        duration_s = 2 * count / (from_rate + to_rate)
        duration_ns = round(duration_s * 1e9)
        s = np.sort(rng.random(count)) * count
    else:
        duration_s = duration_ns / 1e9
        s = _unit_poisson((from_rate + to_rate) / 2 * duration_s, rng)
    if not len(s):
        return Arrivals(np.zeros(0, np.int64), duration_ns)
    slope = (to_rate - from_rate) / duration_s
    # The root of from*t + slope*t^2/2 = s, in the form that has no 0/0 at slope 0.
    t = 2 * s / (from_rate + np.sqrt(np.maximum(from_rate * from_rate + 2 * slope * s, 0.0)))
    return _cut(np.append((t * 1e9).astype(np.int64), duration_ns), duration_ns, count)


def given(
    offsets: Offsets, end_ns: int, *, speed: float = 1.0, duration_ns: int | None = None, count: int | None = None
) -> Arrivals:
    """Arrivals that were written down: `offsets` ascending from 0, `speed` times as fast, ending at `end_ns` / speed.

    A count beyond their number makes them come again from the start; a duration only cuts.
    """
    passes = 1 if count is None else max(1, -(-count // len(offsets)))
    rounds = np.arange(passes, dtype=np.int64)[:, None] * end_ns
    every = np.append((rounds + offsets).reshape(-1), passes * end_ns)
    scaled = every if speed == 1.0 else np.rint(every / speed).astype(np.int64)
    return _cut(scaled, duration_ns, count)


def _unit_poisson(length: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """The points of a Poisson process of rate 1 on [0, length)."""
    points = np.zeros(0)
    while not len(points) or points[-1] < length:
        points = np.append(
            points, np.cumsum(rng.standard_exponential(int(length + 6 * math.sqrt(length)) + 16)) + points[-1:].sum()
        )
    return points[points < length]


def _loadgen_gaps(rate: float, seed: int) -> Callable[[int], Offsets]:
    """The next n gaps of LoadGen 6.0.17 in ns: `exponential_distribution<double>(rate)` of libstdc++ over mt19937."""
    # RandomState(int) is init_genrand, as std::mt19937's constructor, and its stream is frozen by NumPy's policy.
    twister = np.random.RandomState(seed & 0xFFFFFFFF)
    below_one = math.nextafter(1.0, 0.0)  # generate_canonical's own cap

    def gaps(n: int) -> Offsets:
        words = np.frombuffer(twister.bytes(8 * n), "<u4").reshape(n, 2).astype(np.float64)
        v = 1.0 - np.minimum((words[:, 0] + words[:, 1] * 2.0**32) / 2.0**64, below_one)
        exact = -np.log(v) / rate * 1e9
        # NumPy's vectorised log differs from libm's in the last bit for some 0.3 % of all values, by processor; where
        # that bit could change the whole nanosecond, take libm's, which LoadGen calls.
        (doubtful,) = np.nonzero(np.abs(exact - np.rint(exact)) <= exact * 1e-14)
        for i in doubtful.tolist():
            exact[i] = -math.log(v[i]) / rate * 1e9
        return exact.astype(np.int64)

    return gaps


def _cumulated(gaps: Callable[[int], Offsets], rate: float, duration_ns: int | None, count: int | None) -> Offsets:
    """Offsets from 0 on, one more than needed: until `count` + 1 are there or one lies at or beyond the duration."""
    if duration_ns is None and count is None:
        raise ValueError("arrivals need a duration or a count")
    blocks = [np.zeros(1, np.int64)]
    have, last = 1, 0
    while (count is None or have <= count) and (duration_ns is None or last < duration_ns):
        block = last + np.cumsum(gaps(_BLOCK if count is None else min(_BLOCK, count + 1 - have)))
        blocks.append(block)
        have, last = have + len(block), int(block[-1])
    return np.concatenate(blocks)


def _cut(offsets: Offsets, duration_ns: int | None, count: int | None) -> Arrivals:
    """Keep what lies before the duration, at most `count`; `offsets` holds at least one more than that."""
    n = len(offsets) - 1 if duration_ns is None else int(np.searchsorted(offsets, duration_ns))
    if count is not None and count < n:
        n = count
    end_ns = int(offsets[n]) if n < len(offsets) else int(offsets[-1])
    return Arrivals(offsets[:n].copy(), end_ns if duration_ns is None else min(end_ns, duration_ns))


def _all_at_once(count: int | None) -> Arrivals:
    if count is None:
        raise ValueError("an infinite rate needs a count")
    return Arrivals(np.zeros(count, np.int64), 0)
