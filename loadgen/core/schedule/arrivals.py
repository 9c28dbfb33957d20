"""Draw the arrival times of an open loop.

All functions are pure: they return arrival times in integer nanoseconds, and use no clock, no I/O
and no global random generator. `poisson_arrivals` reproduces the schedule of MLPerf LoadGen bit for
bit, and uses the same Mersenne Twister as LoadGen for that. The other arrival processes draw from
the generator that the caller passes in (see `seeds.stream`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]

_NS_PER_S = 1e9
# Results do not depend on this number: a generator gives the same stream in blocks of any size.
_GAPS_PER_DRAW = 1 << 16
# A computed gap that is closer than this to a whole nanosecond, relative to its size, may be
# rounded up or down.
_LOG_ERROR = 1e-14
# Gaps are drawn in blocks. A block covers the expected number of gaps and this many standard
# deviations more, so that one block nearly always suffices.
_SPARE_DEVIATIONS = 6


class Arrivals(NamedTuple):
    """Arrival times of one stage, in ascending order, and the end of the stage.

    All times are in ns from the start of the stage. `end_ns` is the duration if the duration ended
    the stage. Otherwise it is the offset of the next arrival, the first one that is left out. This
    is LoadGen's definition of the duration of a schedule: n queries have n gaps.
    """

    offsets_ns: Offsets
    end_ns: int


def constant_arrivals(
    rate_per_s: float, *, duration_ns: int | None = None, count: int | None = None
) -> Arrivals:
    """Return evenly spaced arrivals: arrival i is at i / rate seconds, rounded to a nanosecond.

    With an infinite rate all arrivals are at 0. Raises ValueError if neither a duration nor a count
    limits the arrivals.
    """
    if math.isinf(rate_per_s):
        if count is None:
            raise ValueError("an infinite rate needs a count")
        return Arrivals(np.zeros(count, np.int64), 0)
    limits = []
    if duration_ns is not None:
        limits.append(math.ceil(duration_ns * rate_per_s / _NS_PER_S) + 1)
    if count is not None:
        limits.append(count)
    if not limits:
        raise ValueError("arrivals need a duration or a count")
    # Each offset is computed from its index: adding up rounded gaps would accumulate their errors.
    # The index is multiplied first, because that product is exact.
    indexes = np.arange(min(limits) + 1)
    offsets_ns = np.rint(indexes * _NS_PER_S / rate_per_s).astype(np.int64)
    return _truncate(offsets_ns, duration_ns, count)


def poisson_arrivals(
    rate_per_s: float, *, seed: int, duration_ns: int | None = None, count: int | None = None
) -> Arrivals:
    """Return the Poisson schedule of MLPerf LoadGen for `schedule_rng_seed = seed`.

    The first arrival is at 0 and the gaps are exponential. The duration or the count ends the
    schedule, whichever comes first.
    """
    gaps = LoadGenGaps(rate_per_s, seed)
    return _truncate(_add_up_gaps(gaps.draw, duration_ns, count), duration_ns, count)


def poisson_arrivals_at_least(
    rate_per_s: float, *, seed: int, min_duration_ns: int, min_count: int, multiple_of: int
) -> Arrivals:
    """Return `poisson_arrivals` with the minimum length that LoadGen requires of a test.

    There are enough arrivals that the last offset reaches the minimum duration *and* their number
    reaches the minimum. Their number is then rounded up to a multiple of `multiple_of`, the size of
    the data set, for models of which every sample must be sent equally often. `end_ns` is LoadGen's
    `duration_ns`.
    """
    gaps = LoadGenGaps(rate_per_s, seed)
    offsets_ns = _add_up_gaps(gaps.draw, min_duration_ns, None)
    count_for_duration = int(np.searchsorted(offsets_ns, min_duration_ns)) + 1
    count = _round_up(max(count_for_duration, min_count, 1), multiple_of)
    missing = count + 1 - len(offsets_ns)
    if missing > 0:
        further_offsets_ns = offsets_ns[-1] + np.cumsum(gaps.draw(missing))
        offsets_ns = np.concatenate((offsets_ns, further_offsets_ns))
    return Arrivals(offsets_ns[:count], int(offsets_ns[count]))


def gamma_arrivals(
    rate_per_s: float,
    *,
    burstiness: float,
    rng: np.random.Generator,
    duration_ns: int | None = None,
    count: int | None = None,
) -> Arrivals:
    """Return arrivals with gamma-distributed gaps of mean 1 / rate; the first arrival is at 0.

    The shape `burstiness` is vLLM's option of the same name: below 1 the arrivals are burstier than
    a Poisson process, at 1 they are a Poisson process, above 1 they are more even. The coefficient
    of variation of the gaps is 1 / sqrt(burstiness).
    """

    def draw_gaps(n: int) -> Offsets:
        gaps_s = rng.gamma(burstiness, 1 / (rate_per_s * burstiness), n)
        return (gaps_s * _NS_PER_S).astype(np.int64)

    return _truncate(_add_up_gaps(draw_gaps, duration_ns, count), duration_ns, count)


def ramp_arrivals(
    from_rate: float,
    to_rate: float,
    *,
    rng: np.random.Generator,
    duration_ns: int | None = None,
    count: int | None = None,
) -> Arrivals:
    """Return a Poisson process whose rate changes linearly from `from_rate` to `to_rate`.

    If both a duration and a count are given, the count truncates. A count alone is met exactly:
    that many arrivals, distributed in proportion to the rate over the time in which that many are
    expected. The first arrival is not at 0, because a ramp that starts at rate 0 has no arrival
    there.

    The arrivals are generated by time rescaling (Cinlar 1975): the points of a Poisson process of
    rate 1 are mapped by the inverse of the integral of the rate.
    """
    mean_rate = (from_rate + to_rate) / 2
    if duration_ns is None:
        if count is None:
            raise ValueError("arrivals need a duration or a count")
        duration_s = 2 * count / (from_rate + to_rate)
        duration_ns = round(duration_s * _NS_PER_S)
        unit_points = np.sort(rng.random(count)) * count
    else:
        duration_s = duration_ns / _NS_PER_S
        unit_points = _draw_unit_poisson(mean_rate * duration_s, rng)
    if not len(unit_points):
        return Arrivals(np.zeros(0, np.int64), duration_ns)
    slope = (to_rate - from_rate) / duration_s
    # The time t at which the integral of the rate, from_rate * t + slope * t^2 / 2, reaches each
    # point. This form of the root does not divide by 0 when the slope is 0.
    discriminant = np.maximum(from_rate * from_rate + 2 * slope * unit_points, 0.0)
    times_s = 2 * unit_points / (from_rate + np.sqrt(discriminant))
    offsets_ns = (times_s * _NS_PER_S).astype(np.int64)
    return _truncate(np.append(offsets_ns, duration_ns), duration_ns, count)


def replayed_arrivals(
    recorded_ns: Offsets,
    recording_end_ns: int,
    *,
    speed: float = 1.0,
    loop: int = 1,
    duration_ns: int | None = None,
    count: int | None = None,
) -> Arrivals:
    """Return recorded arrivals, `speed` times as fast.

    The recorded times ascend from 0. The recording is replayed `loop` times or, if a count is
    given, as often as the count needs. A duration only truncates.
    """
    passes = loop
    if count is not None:
        passes = max(1, math.ceil(count / len(recorded_ns)))
    if duration_ns is not None and recording_end_ns:
        passes = min(passes, math.floor(duration_ns * speed / recording_end_ns) + 1)
    pass_starts_ns = np.arange(passes, dtype=np.int64)[:, None] * recording_end_ns
    repeated_ns = (pass_starts_ns + recorded_ns).reshape(-1)
    offsets_ns = np.append(repeated_ns, passes * recording_end_ns)
    if speed != 1.0:
        offsets_ns = np.rint(offsets_ns / speed).astype(np.int64)
    return _truncate(offsets_ns, duration_ns, count)


class LoadGenGaps:
    """The gaps between the arrivals of MLPerf LoadGen 6.0.17.

    LoadGen draws them from libstdc++'s `exponential_distribution<double>(rate)` with the generator
    `mt19937`.
    """

    # The largest double below 1, to which generate_canonical limits its result.
    _LARGEST_BELOW_ONE = math.nextafter(1.0, 0.0)

    def __init__(self, rate_per_s: float, seed: int) -> None:
        self._rate_per_s = rate_per_s
        # RandomState(int) seeds with init_genrand, as std::mt19937 does, and NumPy guarantees that
        # its stream never changes.
        self._twister = np.random.RandomState(seed & 0xFFFFFFFF)

    def draw(self, n: int) -> Offsets:
        """Return the next `n` gaps in ns."""
        uniform = 1.0 - np.minimum(self._draw_canonical(n), self._LARGEST_BELOW_ONE)
        gaps_ns = -np.log(uniform) / self._rate_per_s * _NS_PER_S
        # NumPy's vectorised log differs from libm's, which LoadGen calls, in the last bit of about
        # 0.3 % of all values, depending on the processor. Use libm's log where that bit could
        # change the rounded nanosecond.
        distance_to_integer = np.abs(gaps_ns - np.rint(gaps_ns))
        (near_integer,) = np.nonzero(distance_to_integer <= gaps_ns * _LOG_ERROR)
        for index in near_integer.tolist():
            gaps_ns[index] = -math.log(uniform[index]) / self._rate_per_s * _NS_PER_S
        return gaps_ns.astype(np.int64)

    def _draw_canonical(self, n: int) -> NDArray[np.float64]:
        """Return `n` numbers in [0, 1] as std::generate_canonical does: from two 32-bit words."""
        words = np.frombuffer(self._twister.bytes(8 * n), "<u4").reshape(n, 2).astype(np.float64)
        canonical: NDArray[np.float64] = (words[:, 0] + words[:, 1] * 2.0**32) / 2.0**64
        return canonical


def _draw_unit_poisson(length: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the points of a Poisson process of rate 1 on [0, length), in ascending order."""
    gaps_per_draw = int(length + _SPARE_DEVIATIONS * math.sqrt(length)) + 16
    points = np.zeros(0)
    last_point = 0.0
    while not len(points) or last_point < length:
        points = np.append(points, last_point + np.cumsum(rng.standard_exponential(gaps_per_draw)))
        last_point = points[-1]
    return points[points < length]


def _add_up_gaps(
    draw_gaps: Callable[[int], Offsets], duration_ns: int | None, count: int | None
) -> Offsets:
    """Return offsets from 0 on: `count` + 1 of them, or until one reaches the duration.

    `draw_gaps(n)` returns the next n gaps. Raises ValueError if neither a duration nor a count
    limits the offsets.
    """
    if duration_ns is None and count is None:
        raise ValueError("arrivals need a duration or a count")
    blocks = [np.zeros(1, np.int64)]
    offset_count = 1
    last_ns = 0
    while True:
        has_count = count is not None and offset_count > count
        has_duration = duration_ns is not None and last_ns >= duration_ns
        if has_count or has_duration:
            return np.concatenate(blocks)
        missing = _GAPS_PER_DRAW if count is None else count + 1 - offset_count
        block = last_ns + np.cumsum(draw_gaps(min(_GAPS_PER_DRAW, missing)))
        blocks.append(block)
        offset_count += len(block)
        last_ns = int(block[-1])


def _truncate(offsets_ns: Offsets, duration_ns: int | None, count: int | None) -> Arrivals:
    """Return the offsets before the duration, at most `count` of them.

    `offsets_ns` holds at least one more than are returned: the first arrival that is left out gives
    the end of the stage.
    """
    if duration_ns is None:
        kept = len(offsets_ns) - 1
    else:
        kept = int(np.searchsorted(offsets_ns, duration_ns))
    if count is not None:
        kept = min(kept, count)
    end_ns = int(offsets_ns[min(kept, len(offsets_ns) - 1)])
    if duration_ns is not None:
        end_ns = min(end_ns, duration_ns)
    return Arrivals(offsets_ns[:kept].copy(), end_ns)


def _round_up(value: int, multiple_of: int) -> int:
    """Return the smallest multiple of `multiple_of` that is at least `value`."""
    return math.ceil(value / multiple_of) * multiple_of
