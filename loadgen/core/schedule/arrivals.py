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
# Gaps are drawn in blocks to bound memory. Results do not depend on the size of a block, because a
# generator gives the same stream in blocks of any size.
_GAPS_PER_DRAW = 1 << 16
# A computed gap that is closer than this to a whole nanosecond, relative to its size, may be
# rounded up or down.
_LOG_ERROR = 1e-14
# Gaps are drawn in blocks. A block covers the expected number of gaps and this many standard
# deviations more, so that one block nearly always suffices.
_SPARE_DEVIATIONS = 6
_MIN_SPARE_GAPS = 16


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
        arrivals_before_end = math.ceil(duration_ns * rate_per_s / _NS_PER_S)
        limits.append(arrivals_before_end + 1)  # One more, because the product is rounded.
    if count is not None:
        limits.append(count)
    if not limits:
        raise ValueError("arrivals need a duration or a count")
    # Each offset is computed from its index: adding up rounded gaps would accumulate their errors.
    # The index is multiplied first, because that product is exact.
    # The last one is the first arrival that is left out, which `_truncate` needs.
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
    offsets_ns = _add_up_gaps(gaps.draw, duration_ns, count)
    return _truncate(offsets_ns, duration_ns, count)


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
    offsets_ns = _add_up_gaps(gaps.draw, duration_ns=min_duration_ns, count=None)
    arrivals_before_minimum = int(np.searchsorted(offsets_ns, min_duration_ns))
    # One more arrival reaches the minimum duration.
    count = _round_up(max(arrivals_before_minimum + 1, min_count, 1), multiple_of)
    # The arrival after the last one gives the end of the stage.
    missing = count + 1 - len(offsets_ns)
    if missing > 0:
        further_offsets_ns = offsets_ns[-1] + np.cumsum(gaps.draw(missing))
        offsets_ns = np.concatenate((offsets_ns, further_offsets_ns))
    return Arrivals(offsets_ns[:count], end_ns=int(offsets_ns[count]))


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
    # The mean of a gamma distribution is shape * scale.
    scale_s = 1 / (rate_per_s * burstiness)

    def draw_gaps(n: int) -> Offsets:
        gaps_s = rng.gamma(burstiness, scale_s, n)
        return (gaps_s * _NS_PER_S).astype(np.int64)

    offsets_ns = _add_up_gaps(draw_gaps, duration_ns, count)
    return _truncate(offsets_ns, duration_ns, count)


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
    rate 1 are mapped by the inverse of the integral of the rate. The integral is the expected
    number of arrivals up to a time.
    """
    mean_rate = (from_rate + to_rate) / 2
    if duration_ns is not None:
        duration_s = duration_ns / _NS_PER_S
        unit_points = _draw_unit_poisson(mean_rate * duration_s, rng)
    elif count is not None:
        duration_s = count / mean_rate
        duration_ns = round(duration_s * _NS_PER_S)
        # Given their number, the points of a Poisson process are independent and uniform.
        unit_points = np.sort(rng.random(count)) * count
    else:
        raise ValueError("arrivals need a duration or a count")
    if not len(unit_points):
        return Arrivals(np.zeros(0, np.int64), end_ns=duration_ns)
    slope = (to_rate - from_rate) / duration_s
    times_s = _invert_expected_count(unit_points, from_rate, slope)
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
        # Passes that start after the end of the duration would be truncated anyway.
        passes_before_end = math.floor(duration_ns * speed / recording_end_ns) + 1
        passes = min(passes, passes_before_end)
    # One row per pass.
    pass_starts_ns = np.arange(passes, dtype=np.int64)[:, None] * recording_end_ns
    repeated_ns = (pass_starts_ns + recorded_ns).reshape(-1)
    # The end of the last pass stands for the first arrival that is left out.
    offsets_ns = np.append(repeated_ns, passes * recording_end_ns)
    if speed != 1.0:
        offsets_ns = np.rint(offsets_ns / speed).astype(np.int64)
    return _truncate(offsets_ns, duration_ns, count)


def _invert_expected_count(
    expected_counts: NDArray[np.float64], from_rate: float, slope: float
) -> NDArray[np.float64]:
    """Return the times in s at which a ramp has these expected numbers of arrivals.

    The expected number up to time t is from_rate * t + slope * t^2 / 2. This solves the quadratic
    equation for t in the form that does not divide by 0 when the slope is 0.
    """
    # At the end of a ramp to rate 0, rounding can make the discriminant negative.
    discriminant = np.maximum(from_rate * from_rate + 2 * slope * expected_counts, 0.0)
    times_s: NDArray[np.float64] = 2 * expected_counts / (from_rate + np.sqrt(discriminant))
    return times_s


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
        """Return the next `n` gaps in ns, rounded as LoadGen rounds them.

        A gap is -log(1 - c) / rate, the inverse of the exponential distribution at a uniform
        number c in [0, 1), which libstdc++ calls canonical.

        NumPy's vectorised log differs from libm's, which LoadGen calls, in the last bit of about
        0.3 % of all values, depending on the processor. Where that bit could change the rounded
        nanosecond, the gap is therefore computed again with libm's log.
        """
        uniform = 1.0 - np.minimum(self._draw_canonical(n), self._LARGEST_BELOW_ONE)
        gaps_ns = -np.log(uniform) / self._rate_per_s * _NS_PER_S
        distance_to_integer = np.abs(gaps_ns - np.rint(gaps_ns))
        (near_integer,) = np.nonzero(distance_to_integer <= gaps_ns * _LOG_ERROR)
        for index in near_integer.tolist():
            gaps_ns[index] = -math.log(uniform[index]) / self._rate_per_s * _NS_PER_S
        return gaps_ns.astype(np.int64)

    def _draw_canonical(self, n: int) -> NDArray[np.float64]:
        """Return `n` numbers in [0, 1] as libstdc++'s std::generate_canonical does.

        It makes each from two 32-bit words of the generator: (low + high * 2^32) / 2^64.
        """
        random_bytes = self._twister.bytes(8 * n)
        words = np.frombuffer(random_bytes, "<u4").reshape(n, 2).astype(np.float64)
        canonical: NDArray[np.float64] = (words[:, 0] + words[:, 1] * 2.0**32) / 2.0**64
        return canonical


def _draw_unit_poisson(length: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the points of a Poisson process of rate 1 on [0, length), in ascending order.

    The number of points has mean `length` and standard deviation sqrt(length).
    """
    gaps_per_draw = int(length + _SPARE_DEVIATIONS * math.sqrt(length)) + _MIN_SPARE_GAPS
    points = np.zeros(0)
    last_point = 0.0
    while not len(points) or last_point < length:
        points = np.append(points, last_point + np.cumsum(rng.standard_exponential(gaps_per_draw)))
        last_point = points[-1]
    return points[points < length]


def _add_up_gaps(
    draw_gaps: Callable[[int], Offsets], duration_ns: int | None, count: int | None
) -> Offsets:
    """Return arrival offsets in ns, from 0 on, until the duration or the count is reached.

    There is one arrival more than the stage has: the last offset is at or after the duration, or it
    is number `count` + 1. `_truncate` needs it for the end of the stage.

    Args:
        draw_gaps: Returns the next n gaps between arrivals in ns.
        duration_ns: The duration of the stage, or None if only the count limits it.
        count: The number of arrivals, or None if only the duration limits it.

    Raises:
        ValueError: There is neither a duration nor a count.
    """
    if duration_ns is None and count is None:
        raise ValueError("arrivals need a duration or a count")
    blocks = [np.zeros(1, np.int64)]  # The first arrival is at 0.
    offset_count = 1
    last_ns = 0
    while True:
        has_reached_count = count is not None and offset_count > count
        has_reached_duration = duration_ns is not None and last_ns >= duration_ns
        if has_reached_count or has_reached_duration:
            return np.concatenate(blocks)
        gaps_to_draw = _GAPS_PER_DRAW
        if count is not None:
            gaps_to_draw = min(_GAPS_PER_DRAW, count + 1 - offset_count)
        block = last_ns + np.cumsum(draw_gaps(gaps_to_draw))
        blocks.append(block)
        offset_count += len(block)
        last_ns = int(block[-1])


def _truncate(offsets_ns: Offsets, duration_ns: int | None, count: int | None) -> Arrivals:
    """Return the arrivals before the duration, at most `count` of them, and the end of the stage.

    `offsets_ns` must have at least one arrival more than are returned: the first one that is left
    out is the end of the stage, unless the duration ends before it.
    """
    arrival_count = len(offsets_ns) - 1
    if duration_ns is not None:
        arrival_count = int(np.searchsorted(offsets_ns, duration_ns))
    if count is not None:
        arrival_count = min(arrival_count, count)
    # All offsets are before the duration if it is longer than a recording that is replayed.
    index_of_end = min(arrival_count, len(offsets_ns) - 1)
    end_ns = int(offsets_ns[index_of_end])
    if duration_ns is not None:
        end_ns = min(end_ns, duration_ns)
    return Arrivals(offsets_ns[:arrival_count].copy(), end_ns)


def _round_up(value: int, multiple_of: int) -> int:
    """Return the smallest multiple of `multiple_of` that is at least `value`."""
    return math.ceil(value / multiple_of) * multiple_of
