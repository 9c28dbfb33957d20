"""Draw the arrival times of an open loop.

All functions are pure: they return arrival times in integer nanoseconds, and use no clock, no I/O
and no global random generator. `poisson_arrivals` reproduces the schedule of MLPerf LoadGen bit for
bit, and uses the same Mersenne Twister as LoadGen for that. The other arrival processes draw from
the generator that the caller passes in (see `seeds.generator`).
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
# Two implementations of `log` differ by at most one unit in the last place, about 2e-16 of a value.
# The two operations after it add as much. This bound is far above their sum.
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
    if duration_ns is None and count is None:
        raise ValueError("arrivals need a duration or a count")

    upper_bounds = []
    if count is not None:
        upper_bounds.append(count)
    if duration_ns is not None:
        expected_arrivals = math.ceil(duration_ns * rate_per_s / _NS_PER_S)
        upper_bounds.append(expected_arrivals + 1)  # The product may have been rounded down.
    # `_cut_at_end` needs one arrival after the end.
    indexes = np.arange(min(upper_bounds) + 1)
    # Each offset is computed from its index: adding up rounded gaps would accumulate their errors.
    # The index is multiplied first, because that product is exact.
    offsets_ns = np.rint(indexes * _NS_PER_S / rate_per_s).astype(np.int64)
    return _cut_at_end(offsets_ns, duration_ns, count)


def poisson_arrivals(
    rate_per_s: float, *, seed: int, duration_ns: int | None = None, count: int | None = None
) -> Arrivals:
    """Return the Poisson schedule of MLPerf LoadGen for `schedule_rng_seed = seed`.

    The first arrival is at 0 and the gaps are exponential. The duration or the count ends the
    schedule, whichever comes first.
    """
    gaps = LoadGenGaps(rate_per_s, seed)
    return _arrivals_with_gaps(gaps.draw, duration_ns, count)


def poisson_arrivals_at_least(
    rate_per_s: float, *, seed: int, min_duration_ns: int, min_count: int, multiple_of: int
) -> Arrivals:
    """Return the Poisson schedule of MLPerf LoadGen for a test with a minimum length.

    The last arrival is at or after the minimum duration, and there are at least `min_count`
    arrivals, as LoadGen requires of a valid test. The end of the stage is what LoadGen reports as
    the duration of the schedule.

    Args:
        rate_per_s: The mean rate.
        seed: LoadGen's `schedule_rng_seed`.
        min_duration_ns: The minimum duration.
        min_count: The minimum number of arrivals.
        multiple_of: The number of arrivals is rounded up to a multiple of this, the size of the
            data set, if every sample must be sent equally often; else 1.
    """
    gaps = LoadGenGaps(rate_per_s, seed)
    offsets_ns = _draw_offsets_past_end(gaps.draw, duration_ns=min_duration_ns, count=None)
    arrivals_before_minimum = int(np.count_nonzero(offsets_ns < min_duration_ns))
    count_at_minimum = arrivals_before_minimum + 1  # The last one is at or after the minimum.
    count = _round_up(max(count_at_minimum, min_count, 1), multiple_of)

    needed = count + 1  # The arrival after the last one is the end of the stage.
    missing = needed - len(offsets_ns)
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

    return _arrivals_with_gaps(draw_gaps, duration_ns, count)


def ramp_arrivals(
    from_rate: float,
    to_rate: float,
    *,
    rng: np.random.Generator,
    duration_ns: int | None = None,
    count: int | None = None,
) -> Arrivals:
    """Return a Poisson process whose rate changes linearly from `from_rate` to `to_rate`.

    The ramp lasts `duration_ns`, and `count` only truncates it. Without a duration, the ramp has
    exactly `count` arrivals and lasts as long as that many are expected to take. The first arrival
    is not at 0, because a ramp that starts at rate 0 has no arrival there.

    The arrivals are generated by time rescaling (Cinlar 1975): the points of a Poisson process of
    rate 1 are mapped to times by the inverse of the expected number of arrivals up to a time.
    """
    mean_rate = (from_rate + to_rate) / 2
    if duration_ns is not None:
        duration_s = duration_ns / _NS_PER_S
        unit_points = _draw_unit_poisson(mean_rate * duration_s, rng)
    elif count is not None:
        duration_s = count / mean_rate
        duration_ns = round(duration_s * _NS_PER_S)
        # If the number of points of a Poisson process is fixed, they are independent and uniform.
        unit_points = np.sort(rng.random(count)) * count
    else:
        raise ValueError("arrivals need a duration or a count")
    if not len(unit_points):
        return Arrivals(np.zeros(0, np.int64), end_ns=duration_ns)

    rate_change_per_s = (to_rate - from_rate) / duration_s
    times_s = _invert_expected_count(unit_points, from_rate, rate_change_per_s)
    offsets_ns = (times_s * _NS_PER_S).astype(np.int64)
    # The end of the ramp takes the place of the arrival after the end that `_cut_at_end` needs.
    return _cut_at_end(np.append(offsets_ns, duration_ns), duration_ns, count)


def replayed_arrivals(
    recorded_ns: Offsets,
    recording_end_ns: int,
    *,
    speed: float = 1.0,
    loop: int = 1,
    duration_ns: int | None = None,
    count: int | None = None,
) -> Arrivals:
    """Return recorded arrivals, repeated as often as needed and `speed` times as fast.

    Args:
        recorded_ns: The recorded times in ns, which ascend from 0.
        recording_end_ns: The length of the recording, after which a repetition begins.
        speed: How many times as fast the arrivals are.
        loop: How often the recording is replayed, unless there is a `count`.
        duration_ns: Only earlier arrivals are returned. It does not extend the replay.
        count: The number of arrivals; the recording is replayed as often as they need.
    """
    passes = loop
    if count is not None:
        passes = max(1, math.ceil(count / len(recorded_ns)))
    if duration_ns is not None and recording_end_ns:
        # Passes that start after the end of the duration would be truncated anyway.
        passes_before_end = math.floor(duration_ns * speed / recording_end_ns) + 1
        passes = min(passes, passes_before_end)

    pass_starts_ns = np.arange(passes, dtype=np.int64) * recording_end_ns
    # One row per pass, and one column per recorded arrival.
    passes_ns = pass_starts_ns[:, np.newaxis] + recorded_ns
    # The end of the last pass takes the place of the arrival after the end that `_cut_at_end`
    # needs.
    offsets_ns = np.append(passes_ns.reshape(-1), passes * recording_end_ns)
    if speed != 1.0:
        offsets_ns = np.rint(offsets_ns / speed).astype(np.int64)
    return _cut_at_end(offsets_ns, duration_ns, count)


def _invert_expected_count(
    expected_counts: NDArray[np.float64], from_rate: float, rate_change_per_s: float
) -> NDArray[np.float64]:
    """Return the times in s at which a ramp has these expected numbers of arrivals.

    The expected number up to time t is n(t) = from_rate * t + rate_change_per_s * t^2 / 2. This
    solves the quadratic equation for t, as t = 2 n / (from_rate + sqrt(discriminant)). Unlike the
    usual form, it does not divide by 0 if the rate does not change.
    """
    # At the end of a ramp to rate 0, rounding can make the discriminant negative.
    discriminant = np.maximum(from_rate * from_rate + 2 * rate_change_per_s * expected_counts, 0.0)
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
        """Return the next `n` gaps in ns, rounded down as LoadGen does.

        A gap is exponentially distributed: it is -log(u) / rate for a uniform number u in (0, 1].
        libstdc++ computes u as 1 - c, where c in [0, 1) is what it calls a canonical number.
        """
        canonical = np.minimum(self._draw_canonical(n), self._LARGEST_BELOW_ONE)
        uniform = 1.0 - canonical
        gaps_ns = -np.log(uniform) / self._rate_per_s * _NS_PER_S

        # LoadGen calls the `log` of libm. NumPy's vectorised `log` differs from it in the last bit
        # of about 0.3 % of all values, depending on the processor. That changes the result only
        # where a gap is within _LOG_ERROR of an integer; these few gaps are computed with libm.
        distance_to_integer = np.abs(gaps_ns - np.rint(gaps_ns))
        (near_integer,) = np.nonzero(distance_to_integer <= gaps_ns * _LOG_ERROR)
        for index in near_integer.tolist():
            gaps_ns[index] = -math.log(uniform[index]) / self._rate_per_s * _NS_PER_S
        return gaps_ns.astype(np.int64)

    def _draw_canonical(self, n: int) -> NDArray[np.float64]:
        """Return `n` numbers in [0, 1] as libstdc++'s std::generate_canonical does.

        It makes each from two 32-bit numbers of the generator: (low + high * 2^32) / 2^64.
        """
        random_bytes = self._twister.bytes(8 * n)
        random_numbers = np.frombuffer(random_bytes, "<u4").astype(np.float64)
        low = random_numbers[0::2]
        high = random_numbers[1::2]
        canonical: NDArray[np.float64] = (low + high * 2.0**32) / 2.0**64
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


def _arrivals_with_gaps(
    draw_gaps: Callable[[int], Offsets], duration_ns: int | None, count: int | None
) -> Arrivals:
    """Return arrivals with random gaps. The duration or the count ends them, whichever is first.

    The first arrival is at 0. `draw_gaps` returns the next n gaps in ns. Raises ValueError if there
    is neither a duration nor a count.
    """
    offsets_ns = _draw_offsets_past_end(draw_gaps, duration_ns, count)
    return _cut_at_end(offsets_ns, duration_ns, count)


def _draw_offsets_past_end(
    draw_gaps: Callable[[int], Offsets], duration_ns: int | None, count: int | None
) -> Offsets:
    """Return arrival offsets in ns, from 0 on, until one is after the end of the stage.

    The last offset is at or after the duration, or it follows the first `count` offsets. Gaps are
    drawn in blocks, so there may be further ones.

    Args:
        draw_gaps: Returns the next n gaps between arrivals in ns.
        duration_ns: The duration of the stage, or None if only the count limits it.
        count: The number of arrivals, or None if only the duration limits it.

    Raises:
        ValueError: There is neither a duration nor a count.
    """
    if duration_ns is None and count is None:
        raise ValueError("arrivals need a duration or a count")
    max_offsets = math.inf if count is None else count + 1
    end_ns = math.inf if duration_ns is None else duration_ns
    blocks = [np.zeros(1, np.int64)]  # The first arrival is at 0.
    offset_count = 1
    last_ns = 0
    while offset_count < max_offsets and last_ns < end_ns:
        gap_count = int(min(_GAPS_PER_DRAW, max_offsets - offset_count))
        block = last_ns + np.cumsum(draw_gaps(gap_count))
        blocks.append(block)
        offset_count += len(block)
        last_ns = int(block[-1])
    return np.concatenate(blocks)


def _cut_at_end(offsets_ns: Offsets, duration_ns: int | None, count: int | None) -> Arrivals:
    """Return the arrivals before the end of a stage, and the time of this end.

    Arrivals from `duration_ns` on are left out, and so are those after the first `count`. The stage
    ends at its duration or at the first arrival that is left out, whichever is earlier.

    Args:
        offsets_ns: Arrival times in ns in ascending order. Without a duration, the last one is
            after the end. With a duration that is later than all of them, all are arrivals.
        duration_ns: The duration of the stage, or None.
        count: The largest number of arrivals, or None.
    """
    if duration_ns is None:
        arrival_count = len(offsets_ns) - 1
    else:
        arrival_count = int(np.count_nonzero(offsets_ns < duration_ns))
    if count is not None:
        arrival_count = min(arrival_count, count)

    is_one_left_out = arrival_count < len(offsets_ns)
    end_ns = int(offsets_ns[arrival_count] if is_one_left_out else offsets_ns[-1])
    if duration_ns is not None:
        end_ns = min(end_ns, duration_ns)
    return Arrivals(offsets_ns[:arrival_count].copy(), end_ns)


def _round_up(value: int, multiple_of: int) -> int:
    """Return the smallest multiple of `multiple_of` that is at least `value`."""
    return math.ceil(value / multiple_of) * multiple_of
