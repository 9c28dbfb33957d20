"""Build the schedule of a workload, and draw the arrival times of its open loops.

All functions are pure: they return arrival times in integer nanoseconds, and use no clock, no I/O
and no global random generator. `poisson` reproduces the schedule of MLPerf LoadGen bit for bit, and
uses the same Mersenne Twister as LoadGen for that. The other arrival processes draw from the
generator that the caller passes in (see `seeds.stream`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core import seeds
from loadgen.core.schedule.schedule import RESERVED_SESSIONS, Schedule, ScheduledStage
from loadgen.core.schedule.sessions import SessionSequence, build_sessions
from loadgen.core.workload import Closed, Constant, Gamma, Poisson, Ramp, Replay, Stage, Workload

Offsets = NDArray[np.int64]

_NS_PER_S = 1_000_000_000
# Results do not depend on this number: a generator gives the same stream in blocks of any size.
_GAPS_PER_DRAW = 1 << 16
# A computed gap that is closer than this to a whole nanosecond, relative to its size, may round
# either way.
_LOG_ERROR = 1e-14


class Arrivals(NamedTuple):
    """Arrival times of one stage, ascending, in ns from the start of the stage, and its end.

    `end_ns` is the duration if the duration ended the stage. Otherwise it is the offset of the next
    arrival, the first one that is left out. This is LoadGen's definition of a schedule's duration:
    n queries own n gaps.
    """

    offsets: Offsets
    end_ns: int


def build(workload: Workload, seed: int) -> Schedule:
    """Return the schedule of a workload, a pure function of the workload and the seed.

    If the workload sets `schedule_seed`, the first measured Poisson stage uses it exactly as
    LoadGen uses its `schedule_rng_seed`. All other stages derive a seed of their own, so that no
    two stages have the same draws.
    """
    chains = build_sessions(workload.requests, seed)
    base_seed = seed if workload.schedule_seed is None else workload.schedule_seed
    explicit_seed_stage = _stage_with_explicit_seed(workload)
    spans: list[ScheduledStage] = []
    start_ns: int | None = 0
    first_chain = 0
    for index, stage in enumerate(workload.stages):
        has_explicit_seed = index == explicit_seed_stage
        span = _build_stage(
            stage,
            chains,
            index=index,
            start_ns=start_ns,
            first_chain=first_chain,
            seed=base_seed,
            loadgen_seed=(
                base_seed if has_explicit_seed else seeds.derived(base_seed, "arrivals", index)
            ),
            taken_over=_users_at_end(spans[-1]) if spans else 0,
        )
        spans.append(span)
        if start_ns is None or span.is_end_unknown or span.length_ns is None:
            start_ns = None
        else:
            start_ns += span.length_ns
        first_chain += RESERVED_SESSIONS if span.session_count is None else span.session_count
    return Schedule(stages=tuple(spans), sessions=chains)


def _stage_with_explicit_seed(workload: Workload) -> int | None:
    """Return the index of the stage that uses `schedule_seed` as LoadGen does, or None."""
    if workload.schedule_seed is None:
        return None
    for index, stage in enumerate(workload.stages):
        if stage.measured and isinstance(stage.arrival, Poisson):
            return index
    return None


def _build_stage(
    stage: Stage,
    chains: SessionSequence,
    *,
    index: int,
    start_ns: int | None,
    first_chain: int,
    seed: int,
    loadgen_seed: int,
    taken_over: int,
) -> ScheduledStage:
    """Return one stage of the schedule. Raises ValueError if nothing limits a closed loop."""
    if isinstance(stage.arrival, Closed):
        if stage.duration_ns is None and stage.count is None:
            raise ValueError(f"stage {stage.name!r} has neither a duration nor a count")
        lanes = stage.arrival.concurrency
        offsets = np.zeros(0, np.int64)
        length_ns = stage.duration_ns
        count = stage.count
    else:
        lanes = 0
        rng = seeds.stream(seed, "arrivals", index)
        offsets, length_ns = _draw_arrivals(stage, rng, loadgen_seed)
        count = len(offsets)
    return ScheduledStage(
        index=index,
        name=stage.name,
        measured=stage.measured,
        start_ns=start_ns,
        length_ns=length_ns,
        first_session=first_chain,
        session_count=count,
        concurrency=lanes,
        arrivals_ns=offsets,
        slot_count=None if count is None else chains.slots(first_chain, count),
        max_turns=chains.turns,
        ramp_ns=getattr(stage.arrival, "ramp_ns", None) or 0,
        inherited_users=taken_over if lanes else 0,
    )


def _users_at_end(span: ScheduledStage) -> int:
    """Return how many virtual users the next stage can take over from this one."""
    return min(span.concurrency, span.session_count or span.concurrency)


def at_load(stage: Stage, load: float) -> Stage:
    """Return a stage at another load: the rate of an open loop, or the users of a closed one."""
    arrival = stage.arrival
    field = {"concurrency": round(load)} if isinstance(arrival, Closed) else {"rate": load}
    return stage.model_copy(update={"arrival": arrival.model_copy(update=field)})


def _draw_arrivals(stage: Stage, rng: np.random.Generator, loadgen_seed: int) -> Arrivals:
    """Return the arrival times of an open loop. Raises ValueError if its arrivals have no times."""
    bounds = {"duration_ns": stage.duration_ns, "count": stage.count}
    match stage.arrival:
        case Constant(rate=rate):
            return constant(rate, **bounds)
        case Poisson(rate=rate) if (least := stage.at_least) is not None:
            return poisson_at_least(
                rate,
                seed=loadgen_seed,
                min_duration_ns=least.duration_ns,
                min_count=least.count,
                multiple_of=least.passes_of,
            )
        case Poisson(rate=rate):
            return poisson(rate, seed=loadgen_seed, **bounds)
        case Gamma(rate=rate, burstiness=burstiness):
            return gamma(rate, burstiness=burstiness, rng=rng, **bounds)
        case Ramp(from_rate=low, to_rate=high):
            return ramp(low, high, rng=rng, **bounds)
        case Replay(speed=speed, loop=loop) as arrival:
            from loadgen.core.workload import trace_sessions

            starts = trace_sessions.replay_starts(arrival)
            return replay(starts.due_ns, starts.end_ns, speed=speed, loop=loop, **bounds)
    raise ValueError(f"{stage.arrival!r} has no arrival times")


def constant(rate: float, *, duration_ns: int | None = None, count: int | None = None) -> Arrivals:
    """Return evenly spaced arrivals: arrival i is at i / rate seconds, rounded to a nanosecond.

    With an infinite rate all arrivals are at 0. Raises ValueError if neither a duration nor a count
    is given.
    """
    if math.isinf(rate):
        if count is None:
            raise ValueError("an infinite rate needs a count")
        return Arrivals(np.zeros(count, np.int64), 0)
    max_count = math.ceil(duration_ns * rate / _NS_PER_S) + 1 if duration_ns is not None else count
    if max_count is None:
        raise ValueError("arrivals need a duration or a count")
    if count is not None:
        max_count = min(max_count, count)
    # Multiply by 1e9 first: the product is exact. Adding up rounded gaps would accumulate their
    # errors.
    return _truncate(
        np.rint(np.arange(max_count + 1) * 1e9 / rate).astype(np.int64), duration_ns, count
    )


def poisson(
    rate: float, *, seed: int, duration_ns: int | None = None, count: int | None = None
) -> Arrivals:
    """Return MLPerf LoadGen's Poisson schedule for `schedule_rng_seed = seed`.

    The first arrival is at 0 and the gaps are exponential. The duration or the count ends it,
    whichever comes first.
    """
    return _truncate(
        _cumulative_offsets(_loadgen_gaps(rate, seed), duration_ns, count), duration_ns, count
    )


def poisson_at_least(
    rate: float, *, seed: int, min_duration_ns: int, min_count: int, multiple_of: int
) -> Arrivals:
    """Return the arrivals of `poisson` under LoadGen's rule for the minimum length of a test.

    Arrivals continue until the last offset reaches the minimum duration *and* their number reaches
    the minimum. Their number is then rounded up to a multiple of `multiple_of`, the size of the
    data set, for models of which every sample must be sent equally often. `end_ns` is LoadGen's
    `duration_ns`.
    """
    gaps = _loadgen_gaps(rate, seed)
    offsets = _cumulative_offsets(gaps, min_duration_ns, None)
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
    """Return arrivals with gamma-distributed gaps of mean 1 / rate; the first arrival is at 0.

    The shape `burstiness` is vLLM's option of the same name: below 1 the arrivals are burstier than
    Poisson, at 1 they follow a Poisson process, above 1 they are more even. The gaps' coefficient
    of variation is 1 / sqrt(burstiness).
    """

    def gaps(n: int) -> Offsets:
        return (rng.gamma(burstiness, 1 / (rate * burstiness), n) * 1e9).astype(np.int64)

    return _truncate(_cumulative_offsets(gaps, duration_ns, count), duration_ns, count)


def ramp(
    from_rate: float,
    to_rate: float,
    *,
    rng: np.random.Generator,
    duration_ns: int | None = None,
    count: int | None = None,
) -> Arrivals:
    """Return a Poisson process whose rate changes linearly from `from_rate` to `to_rate`.

    Generated by time rescaling: t = L^-1(s), where L(t) is the integral of the rate and s a Poisson
    process of rate 1 (Cinlar 1975). If both a duration and a count are given, the count truncates.
    A count alone is met exactly: that many points, distributed in proportion to the rate over the
    time in which that many are expected. The first arrival is not at 0, because a ramp that starts
    at rate 0 has no arrival there.
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
    return _truncate(np.append((t * 1e9).astype(np.int64), duration_ns), duration_ns, count)


def replay(
    offsets: Offsets,
    end_ns: int,
    *,
    speed: float = 1.0,
    loop: int = 1,
    duration_ns: int | None = None,
    count: int | None = None,
) -> Arrivals:
    """Return recorded arrivals, `speed` times as fast.

    `offsets` ascend from 0, and the recording ends at `end_ns`. It is replayed `loop` times, or
    with a `count` as often as that needs. A duration only truncates.
    """
    passes = loop if count is None else max(1, -(-count // len(offsets)))
    if duration_ns is not None and end_ns:
        passes = min(passes, math.floor(duration_ns * speed / end_ns) + 1)
    pass_starts = np.arange(passes, dtype=np.int64)[:, None] * end_ns
    repeated = np.append((pass_starts + offsets).reshape(-1), passes * end_ns)
    scaled = repeated if speed == 1.0 else np.rint(repeated / speed).astype(np.int64)
    return _truncate(scaled, duration_ns, count)


def _unit_poisson(length: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the points of a Poisson process of rate 1 on [0, length), in ascending order."""
    points = np.zeros(0)
    while not len(points) or points[-1] < length:
        gaps = rng.standard_exponential(int(length + 6 * math.sqrt(length)) + 16)
        points = np.append(points, np.cumsum(gaps) + points[-1:].sum())
    return points[points < length]


def _loadgen_gaps(rate: float, seed: int) -> Callable[[int], Offsets]:
    """Return a function that returns the next n gaps of LoadGen 6.0.17, in ns.

    They are what libstdc++'s `exponential_distribution<double>(rate)` draws from `mt19937`.
    """
    # RandomState(int) seeds with init_genrand, as std::mt19937 does, and NumPy guarantees that its
    # stream never changes.
    twister = np.random.RandomState(seed & 0xFFFFFFFF)
    below_one = math.nextafter(1.0, 0.0)  # the upper bound that generate_canonical applies

    def gaps(n: int) -> Offsets:
        words = np.frombuffer(twister.bytes(8 * n), "<u4").reshape(n, 2).astype(np.float64)
        uniform = 1.0 - np.minimum((words[:, 0] + words[:, 1] * 2.0**32) / 2.0**64, below_one)
        gaps_ns = -np.log(uniform) / rate * 1e9
        # NumPy's vectorised log differs from libm's, which LoadGen calls, in the last bit of about
        # 0.3 % of all values, depending on the processor. Where that bit could change the rounded
        # nanosecond, use libm's log.
        (near_integer,) = np.nonzero(np.abs(gaps_ns - np.rint(gaps_ns)) <= gaps_ns * _LOG_ERROR)
        for i in near_integer.tolist():
            gaps_ns[i] = -math.log(uniform[i]) / rate * 1e9
        return gaps_ns.astype(np.int64)

    return gaps


def _cumulative_offsets(
    gaps: Callable[[int], Offsets], duration_ns: int | None, count: int | None
) -> Offsets:
    """Return offsets from 0 on: `count` + 1 of them, or until one reaches the duration.

    Raises ValueError if neither a duration nor a count is given.
    """
    if duration_ns is None and count is None:
        raise ValueError("arrivals need a duration or a count")
    blocks = [np.zeros(1, np.int64)]
    n_offsets = 1
    last_ns = 0
    while (count is None or n_offsets <= count) and (duration_ns is None or last_ns < duration_ns):
        missing = _GAPS_PER_DRAW if count is None else count + 1 - n_offsets
        block = last_ns + np.cumsum(gaps(min(_GAPS_PER_DRAW, missing)))
        blocks.append(block)
        n_offsets += len(block)
        last_ns = int(block[-1])
    return np.concatenate(blocks)


def _truncate(offsets: Offsets, duration_ns: int | None, count: int | None) -> Arrivals:
    """Return the offsets before the duration, at most `count` of them.

    `offsets` holds at least one more than are returned: the arrival that is left out gives the end
    of the stage.
    """
    number = len(offsets) - 1 if duration_ns is None else int(np.searchsorted(offsets, duration_ns))
    if count is not None:
        number = min(number, count)
    end_ns = int(offsets[min(number, len(offsets) - 1)])
    if duration_ns is not None:
        end_ns = min(end_ns, duration_ns)
    return Arrivals(offsets[:number].copy(), end_ns)
