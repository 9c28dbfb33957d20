"""The timetable of a run: when each slot is due, or after which other slot, decided before the clock starts.

Pure: all randomness is spent here or is a pure function of (seed, conversation, turn). A stage keeps only what cannot
be worked out (the offsets of an open loop); columns and `Slot` are views made on demand, so millions of slots cost 8
bytes each, and a closed loop without end costs nothing. What is started when is `agenda.Agenda`'s part.

A *chain* is what may not be torn apart: a conversation, or a request that stands alone (a chain of one turn). Chains
are numbered through the whole run; slot and request number are `chain * turns + turn`: no prompt is in two stages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen import seeds
from loadgen.schedule import arrivals
from loadgen.units import LONGEST_NS
from loadgen.workload import (
    Closed,
    Constant,
    Empirical,
    Fixed,
    Gamma,
    LogNormal,
    Normal,
    Poisson,
    Ramp,
    Replay,
    Stage,
    Uniform,
    Workload,
    traces,
)

Ints = NDArray[np.int64]

RESERVED = 1 << 26
"""Chains kept free for a stage without a count, so that the stages after it still have numbers of their own."""

_PAUSES_DRAWN = 1024  # at a time: 75 µs where lognormal
_BLOCKS_KEPT = 64  # of them: the conversations in progress are near each other
_HASH_BLOCK = 1 << 16  # chains turned into columns at a time for the fingerprint


class Slot(NamedTuple):
    """One line of the timetable. Either `due_ns` is an instant and `after` is -1, or the other way round."""

    number: int
    request: int
    due_ns: int  # from the start of the run; of the stage where the stage has no fixed start
    after: int  # number of the slot whose end it waits for
    pause_ns: int  # from that end
    stage: int
    session: int  # conversation, -1 for a request that stands alone
    turn: int
    lane: int  # -1 in open loop


class SlotColumns(NamedTuple):
    """The same by columns, one line per slot in ascending number, each an int64 array; fields as in `Slot`."""

    number: Ints
    request: Ints
    due_ns: Ints
    after: Ints
    pause_ns: Ints
    stage: Ints
    session: Ints
    turn: Ints
    lane: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSpan:
    """One stage of the timetable: an open loop (`lanes` 0, one offset per chain) or a closed one (`offsets` empty)."""

    index: int
    name: str
    measured: bool
    start_ns: int | None  # from the start of the run; None: when all slots of the stage before have finished
    length_ns: int | None  # None: until all its slots have finished; with a count a closed loop may end earlier
    first_chain: int
    chains: int | None  # of the whole stage, whatever the shard; None: as many as fit its length
    lanes: int
    offsets: Ints  # of the chains, from the start of the stage
    turns: int
    ramp_ns: int = 0  # over which lanes begin, evenly

    def begins_ns(self, lane: Any) -> Any:
        """When a lane (or each of an array of them) sends its first request, from the start of the stage."""
        return self.ramp_ns * lane // self.lanes

    @property
    def offered_rps(self) -> float | None:
        """Requests per second that the timetable asks for; None in a closed loop, which offers no rate."""
        if self.lanes:
            return None
        assert self.length_ns is not None
        return len(self.offsets) * self.turns * 1e9 / self.length_ns if self.length_ns else math.inf

    @property
    def dynamic(self) -> bool:
        """Whether its end is known only when its last slot has finished."""
        return self.lanes > 0 and self.chains is not None


@dataclass(frozen=True, slots=True)
class Pauses:
    """Tool time before each turn but the first: a pure function of (seed, conversation, turn)."""

    seed: int
    tool_time: Any
    turns: int
    _memo: dict[int, list[list[int]]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def together(self) -> int:
        """Conversations drawn at a time: few enough to draw in the driver's loop, however long they are."""
        return max(1, _PAUSES_DRAWN // self.turns)

    def of(self, chain: int) -> list[int]:
        """ns before turn 1, 2, … of this conversation."""
        block, place = divmod(chain, self.together)
        drawn = self._memo.get(block)
        if drawn is None:
            if len(self._memo) == _BLOCKS_KEPT:
                del self._memo[next(iter(self._memo))]
            drawn = self._memo[block] = self.block(block).tolist()
        return drawn[place]

    def column(self, first: int, n: int) -> Ints:
        """Shape (n, turns - 1), for conversations first … first + n - 1."""
        low, high = first // self.together, (first + n - 1) // self.together + 1
        drawn = np.concatenate([np.zeros((0, self.turns - 1), np.int64), *map(self.block, range(low, high))])
        return drawn[first - low * self.together :][:n]

    def block(self, block: int) -> Ints:
        """Shape (together, turns - 1)."""
        stream = seeds.stream(self.seed, "tool_time", block)
        return _delays(self.tool_time, stream, (self.together, self.turns - 1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The timetable of one run, or a worker's share of it (`part` of `parts`)."""

    stages: tuple[StageSpan, ...]
    turns: int
    pauses: Pauses
    part: int = 0
    parts: int = 1

    @property
    def slots(self) -> int | None:
        """How many slots this share holds; None when a stage is bounded by its duration alone."""
        total = 0
        for span in self.stages:
            if span.chains is None:
                return None
            total += self.own_chains(span) * self.turns
        return total

    @property
    def horizon_ns(self) -> int | None:
        """Where the last stage ends at the latest; None when that depends on completions."""
        last = self.stages[-1]
        return None if last.start_ns is None or last.length_ns is None else last.start_ns + last.length_ns

    def own_chains(self, span: StageSpan) -> int:
        """How many chains of a counted stage belong to this share."""
        assert span.chains is not None
        if not span.lanes:
            return len(range(self.part, span.chains, self.parts))
        rounds, rest = divmod(span.chains, span.lanes)
        return rounds * len(self.own_lanes(span)) + len(range(self.part, rest, self.parts))

    def own_lanes(self, span: StageSpan) -> range:
        return range(self.part, span.lanes, self.parts)

    def own_offsets(self, span: StageSpan) -> Ints:
        return span.offsets[self.part :: self.parts]

    def numbers(self) -> Iterator[int]:
        """The slots' numbers, stage after stage, ascending: about the order of their sending. May have no end."""
        for span in self.stages:
            yield from self.stage_numbers(span)

    def stage_numbers(self, span: StageSpan) -> Iterator[int]:
        """Those of one stage; without end where its duration alone bounds it."""
        step = span.lanes or self.parts
        own = self.own_lanes(span) if span.lanes else range(self.part, self.parts, self.parts)
        base = 0
        while own and (span.chains is None or base < span.chains):
            for j in own:
                if span.chains is not None and base + j >= span.chains:
                    break
                number = (span.first_chain + base + j) * self.turns
                yield from range(number, number + self.turns)
            base += step

    def columns(self) -> SlotColumns:
        """All slots of this share. Raises ValueError when a stage is bounded by its duration alone."""
        parts = []
        for span in self.stages:
            if span.chains is None:
                raise ValueError(f"stage {span.name!r} is bounded by its duration alone: it has no columns")
            j = np.arange(span.chains, dtype=np.int64)
            place = j % span.lanes if span.lanes else j
            parts.append(_lines(self, span, 0, span.chains, place % self.parts == self.part))
        return SlotColumns(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def slot(self, number: int) -> Slot:
        """The line of this number, by arithmetic. Raises IndexError when the run has none."""
        chain, turn = divmod(number, self.turns)
        for span in self.stages:
            j = chain - span.first_chain
            if 0 <= j < (RESERVED if span.chains is None else span.chains):
                return Slot(*(int(column[turn]) for column in _lines(self, span, j, 1)))
        raise IndexError(number)


def build(workload: Workload, seed: int) -> Schedule:
    """The timetable of a workload: a pure function of the two.

    An explicit `schedule_seed` is used by the first measured Poisson stage as LoadGen uses its `schedule_rng_seed`; all
    other stages, and all stages without one, draw from seeds derived by stage, so that no two stages draw alike.
    """
    turns = getattr(workload.requests, "turns", None)
    count = turns.count if turns is not None else 1
    explicit = workload.schedule_seed
    exact = -1 if explicit is None else _exact(workload.stages)
    spans: list[StageSpan] = []
    start: int | None = 0
    chain = 0
    for index, stage in enumerate(workload.stages):
        if isinstance(stage.arrival, Closed):
            if stage.duration_ns is None and stage.count is None:
                raise ValueError(f"stage {stage.name!r} has neither a duration nor a count")
            lanes, offsets = stage.arrival.concurrency, np.zeros(0, np.int64)
            length, chains = stage.duration_ns, stage.count
        else:
            base = seed if explicit is None else explicit
            rng = seeds.stream(base, "arrivals", index)
            loadgen_seed = base if index == exact else seeds.derived(base, "arrivals", index)
            lanes, (offsets, length) = 0, _arrivals(stage, rng, loadgen_seed)
            chains = len(offsets)
        span = StageSpan(
            index=index,
            name=stage.name,
            measured=stage.measured,
            start_ns=start,
            length_ns=length,
            first_chain=chain,
            chains=chains,
            lanes=lanes,
            offsets=offsets,
            turns=count,
            ramp_ns=getattr(stage.arrival, "ramp_ns", 0),
        )
        spans.append(span)
        start = None if start is None or span.dynamic or length is None else start + length
        chain += RESERVED if chains is None else chains
    return Schedule(
        stages=tuple(spans),
        turns=count,
        pauses=Pauses(seed, turns.tool_time if turns is not None else None, count),
    )


def shard(schedule: Schedule, i: int, n: int) -> Schedule:
    """Worker i's share of n, by arithmetic and with chains whole: every n-th chain of an open loop, every n-th lane of
    a closed one. Numbers stay those of the whole run; shares of shares are shares.

    A stage that begins when the one before has finished begins, in each share, when that *share's* slots have: workers
    send each other nothing. Give such a run one worker where the boundary must be common.
    """
    if not 0 <= i < n:
        raise ValueError(f"no share {i} of {n}")
    return replace(schedule, part=schedule.part + schedule.parts * i, parts=schedule.parts * n)


def fingerprint(schedule: Schedule) -> str:
    """The *timetable* fingerprint: equal exactly when due, after, pause, stage, session and turn of all slots are.

    Of a stage without a count: its arithmetic and its first 1,024 chains. Always of the whole run, so that it does not
    depend on the number of workers: raises ValueError for a share.
    """
    if schedule.parts != 1:
        raise ValueError("the fingerprint is that of the whole timetable, not of a share")
    digest = hashlib.blake2b(digest_size=16)
    for span in schedule.stages:
        digest.update(f"{span.start_ns} {span.length_ns} {span.chains} {span.lanes} {span.turns};".encode())
        chains = min(1024, RESERVED) if span.chains is None else span.chains
        for j in range(0, chains, _HASH_BLOCK):
            lines = _lines(schedule, span, j, min(_HASH_BLOCK, chains - j))
            for column in (lines.due_ns, lines.after, lines.pause_ns, lines.stage, lines.session, lines.turn):
                digest.update(np.ascontiguousarray(column, "<i8").data)
    return digest.hexdigest()


def _lines(schedule: Schedule, span: StageSpan, j: int, n: int, keep: NDArray[np.bool_] | None = None) -> SlotColumns:
    """The slots of the stage's chains j … j + n - 1, those of `keep` (by chain) where given."""
    turns = schedule.turns
    chain = np.arange(j, j + n, dtype=np.int64)
    pauses = np.zeros((n, turns), np.int64)
    if turns > 1:
        pauses[:, 1:] = schedule.pauses.column(span.first_chain + j, n)
    if keep is not None:
        chain, pauses = chain[keep], pauses[keep]
        n = len(chain)
    start = span.start_ns or 0
    number = ((span.first_chain + chain) * turns)[:, None] + np.arange(turns, dtype=np.int64)
    due = np.full((n, turns), -1, np.int64)
    after = number - 1
    if span.lanes:
        due[:, 0] = np.where(chain < span.lanes, start + span.begins_ns(chain), -1)
        after[:, 0] = np.where(chain < span.lanes, -1, number[:, 0] - span.lanes * turns + turns - 1)
    else:
        due[:, 0] = start + span.offsets[chain]
        after[:, 0] = -1

    def spread(values: Ints | int) -> Ints:
        return np.broadcast_to(np.asarray(values, np.int64), (n, turns)).reshape(-1)

    return SlotColumns(
        number=number.reshape(-1),
        request=number.reshape(-1),
        due_ns=due.reshape(-1),
        after=after.reshape(-1),
        pause_ns=pauses.reshape(-1),
        stage=spread(span.index),
        session=spread((span.first_chain + chain)[:, None] if turns > 1 else -1),
        turn=spread(np.arange(turns)),
        lane=spread((chain % span.lanes)[:, None] if span.lanes else -1),
    )


def _exact(stages: tuple[Stage, ...]) -> int:
    """The stage that an explicit schedule seed is for; -1 when there is none."""
    return next((i for i, stage in enumerate(stages) if stage.measured and isinstance(stage.arrival, Poisson)), -1)


def _arrivals(stage: Stage, rng: np.random.Generator, loadgen_seed: int) -> arrivals.Arrivals:
    """The chains of an open-loop stage."""
    duration_ns, count = stage.duration_ns, stage.count
    match stage.arrival:
        case Constant(rate=rate):
            return arrivals.constant(rate, duration_ns=duration_ns, count=count)
        case Poisson(rate=rate) if stage.at_least is not None:
            least = stage.at_least
            return arrivals.poisson_at_least(
                rate,
                seed=loadgen_seed,
                min_duration_ns=least.duration_ns,
                min_count=least.count,
                multiple_of=least.passes_of,
            )
        case Poisson(rate=rate):
            return arrivals.poisson(rate, seed=loadgen_seed, duration_ns=duration_ns, count=count)
        case Gamma(rate=rate, burstiness=burstiness):
            return arrivals.gamma(rate, burstiness=burstiness, rng=rng, duration_ns=duration_ns, count=count)
        case Ramp(from_rate=low, to_rate=high):
            return arrivals.ramp(low, high, rng=rng, duration_ns=duration_ns, count=count)
        case Replay(file=file, speed=speed):
            trace = traces.read_trace(file)
            return arrivals.given(trace.due_ns, trace.end_ns, speed=speed, duration_ns=duration_ns, count=count)
    raise ValueError(f"{stage.arrival!r} has no arrivals")


def _delays(delay: Any, rng: np.random.Generator, shape: tuple[int, int]) -> Ints:
    """ns drawn from a workload's delay, each at least 0 and inside its min and max."""
    match delay:
        case Fixed(value=value):
            return np.full(shape, value, np.int64)
        case Uniform(min=low, max=high):
            return rng.integers(low, high, shape, endpoint=True)
        case Empirical(values=values, weights=weights):
            shares = None if weights is None else np.asarray(weights) / sum(weights)
            return rng.choice(np.asarray(values, np.int64), shape, p=shares)
        case Normal(mean=mean, stddev=stddev):
            return _held(lambda n: rng.normal(mean, stddev, n), delay, shape)
        case LogNormal(median=float() | int() as median, sigma=sigma):
            return _held(lambda n: rng.lognormal(math.log(median), sigma, n), delay, shape)
        case LogNormal(mean=float() | int() as unheld, sigma=sigma):
            return _held(lambda n: rng.lognormal(math.log(unheld) - sigma**2 / 2, sigma, n), delay, shape)
    raise ValueError(f"no delay {delay!r}")


def _held(draw: Callable[[int], NDArray[np.float64]], bounds: Any, shape: tuple[int, int]) -> Ints:
    """Rounded values of `draw` inside the bounds: drawn again outside; cut to them where 64 draws all missed."""
    low = bounds.min or 0
    high = LONGEST_NS if bounds.max is None else bounds.max
    values = np.rint(draw(shape[0] * shape[1]))
    for _ in range(64):
        (outside,) = np.nonzero((values < low) | (values > high))
        if not len(outside):
            break
        values[outside] = np.rint(draw(len(outside)))
    return np.clip(values, low, high).astype(np.int64).reshape(shape)
