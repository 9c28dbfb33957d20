"""Draw the arrival times of an open loop.

All functions are pure: they return arrival times in integer nanoseconds, and use no clock, no I/O
and no global random generator. `poisson_arrivals` reproduces the schedule of MLPerf LoadGen bit for
bit, and uses the same Mersenne Twister as LoadGen for that. The other arrival processes draw from
the generator that the caller passes in (see `seeds.generator`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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

    # The arrival after the last one is needed too, because it can be the end of the stage.
    max_arrivals = _max_constant_arrivals(rate_per_s, duration_ns, count)
    indexes = np.arange(max_arrivals + 1)

    # Each offset is computed from its index: adding up rounded gaps would accumulate their errors.
    # The index is multiplied first, because that product is exact.
    offsets_ns = np.rint(indexes * _NS_PER_S / rate_per_s).astype(np.int64)
    return _cut_at_end(offsets_ns, duration_ns, count)


def _max_constant_arrivals(rate_per_s: float, duration_ns: int | None, count: int | None) -> int:
    """Return an upper bound of how many evenly spaced arrivals a duration and a count allow.

    Raises ValueError if there is neither a duration nor a count.
    """
    upper_bounds = []
    if count is not None:
        upper_bounds.append(count)

    if duration_ns is not None:
        expected_arrivals = math.ceil(duration_ns * rate_per_s / _NS_PER_S)
        upper_bounds.append(expected_arrivals + 1)  # The product may have been rounded down.

    if not upper_bounds:
        raise ValueError("arrivals need a duration or a count")

    return min(upper_bounds)


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

    The last request arrives at or after the minimum duration. The stage ends when the request after
    it would arrive, as in LoadGen.

    Args:
        rate_per_s: The mean rate.
        seed: LoadGen's `schedule_rng_seed`.
        min_duration_ns: The minimum duration.
        min_count: The minimum number of arrivals.
        multiple_of: The number of arrivals is rounded up to a multiple of this. It is the size of
            the data set if every sample must be sent equally often, and 1 otherwise.
    """
    gaps = LoadGenGaps(rate_per_s, seed)
    offsets_ns = _draw_offsets_past_end(gaps.draw, duration_ns=min_duration_ns, count=None)

    arrivals_before_minimum = int(np.count_nonzero(offsets_ns < min_duration_ns))
    count_for_duration = arrivals_before_minimum + 1
    count = _round_up(max(count_for_duration, min_count, 1), multiple_of)

    # The offset after the last arrival is the end of the stage.
    offsets_ns = _extend_offsets(offsets_ns, gaps.draw, needed_offsets=count + 1)
    return Arrivals(offsets_ns[:count], end_ns=int(offsets_ns[count]))


def _extend_offsets(
    offsets_ns: Offsets, draw_gaps: Callable[[int], Offsets], needed_offsets: int
) -> Offsets:
    """Return arrival offsets in ns, followed by as many more as are missing, with random gaps.

    Nothing is drawn if there are at least `needed_offsets` already. `draw_gaps` returns the next n
    gaps between arrivals in ns.
    """
    missing_offsets = needed_offsets - len(offsets_ns)
    if missing_offsets <= 0:
        return offsets_ns

    further_gaps_ns = draw_gaps(missing_offsets)
    further_offsets_ns = offsets_ns[-1] + np.cumsum(further_gaps_ns)
    return np.concatenate((offsets_ns, further_offsets_ns))


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


@dataclass(frozen=True)
class _Ramp:
    """A rate of arrivals that changes linearly from `from_rate` to `to_rate`, both per second."""

    from_rate: float
    to_rate: float
    duration_s: float

    def times_s(self, expected_counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the times at which the ramp is expected to have had these numbers of arrivals.

        The expected number up to time t is n = from_rate * t + rate_change * t^2 / 2. Solved for t,
        this is 2 n / (from_rate + rate at t) with the rate at t = sqrt(from_rate^2 + 2 *
        rate_change * n). Nothing is divided by `rate_change`, which may be 0.
        """
        rate_change_per_s = (self.to_rate - self.from_rate) / self.duration_s
        squared_rates = self.from_rate * self.from_rate + 2 * rate_change_per_s * expected_counts
        # At the end of a ramp to rate 0, rounding can make the square negative.
        rates_per_s = np.sqrt(np.maximum(squared_rates, 0.0))
        times_s: NDArray[np.float64] = 2 * expected_counts / (self.from_rate + rates_per_s)
        return times_s


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
    exactly `count` arrivals and lasts as long as these are expected to take. Raises ValueError if
    there is neither a duration nor a count.

    This is time rescaling (Cinlar 1975). First a process with one expected arrival per unit is
    drawn, for example with arrivals at 0.7 and 1.9. Then 0.7 is converted to the time until which
    the ramp is expected to have 0.7 arrivals, and so on.
    """
    mean_rate = (from_rate + to_rate) / 2
    if duration_ns is not None:
        end_ns = duration_ns
        ramp = _Ramp(from_rate, to_rate, duration_s=duration_ns / _NS_PER_S)
        unit_arrivals = _draw_unit_poisson(mean_rate * ramp.duration_s, rng)
    elif count is not None:
        ramp = _Ramp(from_rate, to_rate, duration_s=count / mean_rate)
        end_ns = round(ramp.duration_s * _NS_PER_S)
        unit_arrivals = _draw_unit_poisson_of_count(count, rng)
    else:
        raise ValueError("arrivals need a duration or a count")

    if not len(unit_arrivals):
        return Arrivals(np.zeros(0, np.int64), end_ns)

    arrivals_ns = (ramp.times_s(unit_arrivals) * _NS_PER_S).astype(np.int64)
    # Rounding can move the last arrival to the end of the ramp.
    return _first_arrivals(arrivals_ns[arrivals_ns < end_ns], count, end_ns)


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

    For example, the times 0 and 4 of a recording of 10 ns give 0, 4, 10 and 14 with `loop=2`. With
    `loop=2` and `speed=2` they give 0, 2, 5 and 7.

    Args:
        recorded_ns: The recorded times in ns, which ascend from 0.
        recording_end_ns: The length of the recording, after which a repetition begins.
        speed: How many times as fast the arrivals are.
        loop: How often the recording is replayed, unless there is a `count`.
        duration_ns: Only earlier arrivals are returned. It does not extend the replay.
        count: The number of arrivals; the recording is replayed as often as they need.
    """
    repetitions = loop if count is None else max(1, math.ceil(count / len(recorded_ns)))
    if duration_ns is not None and recording_end_ns:
        # Repetitions that start after the end of the duration would be cut off anyway.
        starting_before_end = math.floor(duration_ns * speed / recording_end_ns) + 1
        repetitions = min(repetitions, starting_before_end)

    # `_cut_at_end` needs one more time than there are arrivals: the end of the last repetition.
    arrivals_ns = _repeat_recording(recorded_ns, recording_end_ns, repetitions)
    offsets_ns = np.append(arrivals_ns, repetitions * recording_end_ns)
    if speed != 1.0:
        offsets_ns = np.rint(offsets_ns / speed).astype(np.int64)

    return _cut_at_end(offsets_ns, duration_ns, count)


def _repeat_recording(recorded_ns: Offsets, recording_end_ns: int, repetitions: int) -> Offsets:
    """Return recorded times several times, each repetition after the end of the one before it.

    For example, 2 repetitions of the times 0 and 4 of a recording of 10 ns are 0, 4, 10 and 14.
    """
    starts_ns = np.arange(repetitions, dtype=np.int64) * recording_end_ns
    # Adding a column to a row gives a matrix: one row per repetition, one column per recorded time.
    starts_column_ns = starts_ns[:, np.newaxis]
    times_ns: Offsets = (starts_column_ns + recorded_ns).reshape(-1)
    return times_ns


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

        A gap is exponentially distributed: it is -log(1 - u) / rate for a uniform number u in
        [0, 1), as in libstdc++.
        """
        # A u of 1, to which rounding can lead, would be an infinite gap.
        uniform = np.minimum(self._draw_uniform(n), self._LARGEST_BELOW_ONE)
        gaps_ns = -np.log(1.0 - uniform) / self._rate_per_s * _NS_PER_S
        self._replace_inexact_gaps(gaps_ns, uniform)
        return gaps_ns.astype(np.int64)

    def _replace_inexact_gaps(
        self, gaps_ns: NDArray[np.float64], uniform: NDArray[np.float64]
    ) -> None:
        """Compute those gaps again that LoadGen may round down to another nanosecond.

        LoadGen uses the `log` of libm. NumPy's is faster, but the last bit of its result can
        differ. This changes the rounded gap only if the exact one is very close to an integer.

        Args:
            gaps_ns: The gaps before rounding, which are changed in place.
            uniform: The uniform numbers that they are computed from.
        """
        distance_to_integer_ns = np.abs(gaps_ns - np.rint(gaps_ns))
        largest_error_ns = gaps_ns * _LOG_ERROR
        is_near_integer = distance_to_integer_ns <= largest_error_ns
        for index in np.flatnonzero(is_near_integer).tolist():
            gaps_ns[index] = -math.log(1.0 - uniform[index]) / self._rate_per_s * _NS_PER_S

    def _draw_uniform(self, n: int) -> NDArray[np.float64]:
        """Return `n` uniform numbers in [0, 1] as libstdc++'s std::generate_canonical does.

        It makes each from two 32-bit numbers of the generator: (low + high * 2^32) / 2^64.
        """
        random_bytes = self._twister.bytes(8 * n)
        random_numbers = np.frombuffer(random_bytes, "<u4").astype(np.float64)
        low = random_numbers[0::2]
        high = random_numbers[1::2]
        uniform: NDArray[np.float64] = (low + high * 2.0**32) / 2.0**64
        return uniform


def _draw_unit_poisson(length: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the points of a Poisson process of rate 1 on [0, length), in ascending order.

    Gaps are drawn in blocks until the points reach `length`. The number of points has mean `length`
    and standard deviation sqrt(length), so the first block nearly always suffices.
    """
    gaps_per_block = int(length + _SPARE_DEVIATIONS * math.sqrt(length)) + _MIN_SPARE_GAPS
    points = np.cumsum(rng.standard_exponential(gaps_per_block))
    while points[-1] < length:
        further_gaps = rng.standard_exponential(gaps_per_block)
        points = np.append(points, points[-1] + np.cumsum(further_gaps))
    return points[points < length]


def _draw_unit_poisson_of_count(count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return exactly `count` points of a Poisson process of rate 1 on [0, count), ascending.

    If the number of points of a Poisson process is fixed, they are independent and uniform.
    """
    sorted_fractions = np.sort(rng.random(count))
    return sorted_fractions * count


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
    """Return arrival offsets in ns, from 0 to the end of a stage and at least one beyond it.

    The stage ends at its duration or after `count` arrivals, whichever comes first. How many gaps
    fit into a duration is not known in advance, so they are drawn in blocks. The last block may go
    far beyond the end; the caller cuts the offsets.

    Args:
        draw_gaps: Returns the next n gaps between arrivals in ns.
        duration_ns: The duration of the stage, or None if only the count limits it.
        count: The number of arrivals, or None if only the duration limits it.

    Raises:
        ValueError: There is neither a duration nor a count.
    """
    if duration_ns is None and count is None:
        raise ValueError("arrivals need a duration or a count")

    # The end of a stage with a count is the offset after its last arrival.
    needed_offsets = math.inf if count is None else count + 1
    end_ns = math.inf if duration_ns is None else duration_ns

    # The first arrival is at 0.
    blocks = [np.zeros(1, np.int64)]
    offset_count = 1
    last_ns = 0

    while offset_count < needed_offsets and last_ns < end_ns:
        gap_count = int(min(_GAPS_PER_DRAW, needed_offsets - offset_count))
        block = last_ns + np.cumsum(draw_gaps(gap_count))
        blocks.append(block)
        offset_count += gap_count
        last_ns = int(block[-1])

    return np.concatenate(blocks)


def _first_arrivals(arrivals_ns: Offsets, count: int | None, end_ns: int) -> Arrivals:
    """Return at most `count` arrivals of a stage that otherwise ends at `end_ns`.

    If there are more arrivals, the stage ends at the first one that is left out.
    """
    if count is None or len(arrivals_ns) <= count:
        return Arrivals(arrivals_ns, end_ns)
    return Arrivals(arrivals_ns[:count].copy(), end_ns=int(arrivals_ns[count]))


def _cut_at_end(offsets_ns: Offsets, duration_ns: int | None, count: int | None) -> Arrivals:
    """Return the arrivals before the end of a stage, and the time of this end.

    The stage ends at its duration or at the first time that is not one of its arrivals, whichever
    is earlier. For example, the times 0, 5, 9 and 14 give

    - with the count 2: the arrivals 0 and 5, and the end 9
    - with the duration 12: the arrivals 0, 5 and 9, and the end 12
    - with neither: the arrivals 0, 5 and 9, and the end 14

    Args:
        offsets_ns: Ascending times in ns, one more than the stage has arrivals.
        duration_ns: The duration of the stage. Times from then on are not its arrivals.
        count: The largest number of arrivals.
    """
    arrival_count = _count_arrivals(offsets_ns, duration_ns, count)
    end_ns = int(offsets_ns[arrival_count])
    if duration_ns is not None:
        end_ns = min(end_ns, duration_ns)

    return Arrivals(offsets_ns[:arrival_count].copy(), end_ns)


def _count_arrivals(offsets_ns: Offsets, duration_ns: int | None, count: int | None) -> int:
    """Return how many of some ascending times are arrivals of a stage.

    All times before the end of the duration are, but at most `count`. The last time is only the end
    of the stage and no arrival.
    """
    arrivals_ns = offsets_ns[:-1]
    if duration_ns is not None:
        arrivals_ns = arrivals_ns[arrivals_ns < duration_ns]

    return len(arrivals_ns) if count is None else min(len(arrivals_ns), count)


def _round_up(value: int, multiple_of: int) -> int:
    """Return the smallest multiple of `multiple_of` that is at least `value`."""
    return math.ceil(value / multiple_of) * multiple_of
