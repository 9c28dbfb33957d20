"""The timetable of a run: when each slot is due, or which slot it waits for. Decided before the clock starts.

Pure: all randomness is spent here or is a pure function of (seed, conversation, turn). A stage stores only what cannot
be computed, namely the offsets of an open loop. Columns and `Slot` are views made on demand. So each open-loop slot
costs 8 bytes, and a closed loop without a count costs nothing. `dispatcher.Dispatcher` decides what is started when.

A *chain* is a unit that must stay whole: a conversation, or a single request (a chain of one turn). Chains are numbered
through the whole run. The number of a slot and of its request is `chain * turns + turn`, so no prompt appears in two
stages.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from loadgen import seeds
from loadgen.requests.laws import log_mean
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
T = TypeVar("T", int, Ints)

RESERVED = 1 << 26
"""Chain numbers reserved for a stage without a count, so that the stages after it get numbers of their own."""

_PAUSES_DRAWN = 1024  # drawn at a time; 75 µs for a lognormal distribution
_BLOCKS_KEPT = 64  # blocks of pauses in memory; conversations in progress have nearby numbers
_HASH_BLOCK = 1 << 16  # chains converted to columns at a time for the fingerprint


class Slot(NamedTuple, Generic[T]):
    """One row of the timetable. Either `due_ns` is an instant and `after` is -1, or the other way round.

    Of `Ints`: the columns of many slots, in ascending number. The number of its request is that of the slot.
    """

    number: T
    due_ns: T  # from the start of the run, or of the stage if the stage has no fixed start
    after: T  # number of the slot that must end first
    pause_ns: T  # between the end of that slot and the start of this one
    stage: T
    session: T  # number of the conversation; -1 for a single request
    turn: T
    lane: T  # -1 in open loop


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSpan:
    """One stage of the timetable: an open loop (`lanes` 0, one offset per chain) or a closed loop (`offsets` empty)."""

    index: int
    name: str
    measured: bool
    start_ns: int | None  # from the start of the run; None: when all slots of the previous stage have finished
    length_ns: int | None  # None: until all its slots have finished. A closed loop with a count may end earlier.
    first_chain: int
    chains: int | None  # of the whole stage, not of one share; None: as many as fit into its length
    lanes: int
    offsets: Ints  # of the chains, in ns from the start of the stage
    turns: int
    ramp_ns: int = 0  # the lanes that take over from no other begin evenly spread over this time
    taken_over: int = 0  # lanes of the closed-loop stage before: as many lanes here begin when those have ended

    def begins_ns(self, lane: Any) -> Any:
        """When a lane sends its first request, in ns from the start of the stage. `lane` is a number or an array.

        A lane that takes over from one of the stage before begins then at the earliest: when its place is free.
        """
        new_lanes = max(self.lanes - self.taken_over, 1)
        return self.ramp_ns * np.maximum(lane - self.taken_over, 0) // new_lanes

    @property
    def offered_rps(self) -> float | None:
        """Requests per second in the timetable; None for a closed loop, which offers no rate."""
        if self.lanes:
            return None
        assert self.length_ns is not None
        return len(self.offsets) * self.turns * 1e9 / self.length_ns if self.length_ns else math.inf

    @property
    def dynamic(self) -> bool:
        """Whether the end of the stage is known only when its last slot has finished."""
        return self.lanes > 0 and self.chains is not None


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses (tool time) before each turn except the first: a pure function of (seed, conversation, turn)."""

    seed: int
    tool_time: Any
    turns: int
    _memo: dict[int, list[list[int]]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def together(self) -> int:
        """Conversations drawn at a time: few enough to draw inside the driver's loop, however many turns they have."""
        return max(1, _PAUSES_DRAWN // self.turns)

    def of(self, chain: int) -> list[int]:
        """The pauses in ns before turn 1, 2, … of this conversation."""
        block, index = divmod(chain, self.together)
        pauses = self._memo.get(block)
        if pauses is None:
            if len(self._memo) == _BLOCKS_KEPT:
                del self._memo[next(iter(self._memo))]
            pauses = self._memo[block] = self.block(block).tolist()
        return pauses[index]

    def column(self, first: int, n: int) -> Ints:
        """The pauses of conversations first … first + n - 1, in ns. Shape (n, turns - 1)."""
        first_block, end_block = first // self.together, (first + n - 1) // self.together + 1
        none = np.zeros((0, self.turns - 1), np.int64)
        pauses = np.concatenate([none, *map(self.block, range(first_block, end_block))])
        return pauses[first - first_block * self.together :][:n]

    def block(self, block: int) -> Ints:
        """The pauses of block number `block`, in ns. Shape (together, turns - 1)."""
        rng = seeds.stream(self.seed, "tool_time", block)
        return _draw_delays(self.tool_time, rng, (self.together, self.turns - 1))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """The timetable of one run, or one worker's share of it (share `part` of `parts`)."""

    stages: tuple[StageSpan, ...]
    turns: int
    pauses: Pauses
    part: int = 0
    parts: int = 1

    @property
    def slots(self) -> int | None:
        """Number of slots in this share; None if the duration alone limits a stage."""
        if any(span.chains is None for span in self.stages):
            return None
        return sum(self.own_chains(span) for span in self.stages) * self.turns

    @property
    def horizon_ns(self) -> int | None:
        """The latest end of the last stage, in ns from the start of the run; None if it depends on completions."""
        last = self.stages[-1]
        return None if last.start_ns is None or last.length_ns is None else last.start_ns + last.length_ns

    def own_chains(self, span: StageSpan) -> int:
        """Number of chains of a stage that belong to this share. The stage must have a count."""
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
        """The numbers of this share's slots, stage by stage, ascending: about the order of sending. May be endless."""
        for span in self.stages:
            yield from self.stage_numbers(span)

    def stage_numbers(self, span: StageSpan) -> Iterator[int]:
        """The slot numbers of one stage, ascending; endless if the duration alone limits the stage."""
        step = span.lanes or self.parts
        own_indexes = self.own_lanes(span) if span.lanes else range(self.part, self.parts, self.parts)
        base = 0
        while own_indexes and (span.chains is None or base < span.chains):
            for index in own_indexes:
                if span.chains is not None and base + index >= span.chains:
                    break
                number = (span.first_chain + base + index) * self.turns
                yield from range(number, number + self.turns)
            base += step

    def columns(self) -> Slot[Ints]:
        """All slots of this share. Raises ValueError if the duration alone limits a stage."""
        stage_columns = []
        for span in self.stages:
            if span.chains is None:
                raise ValueError(f"stage {span.name!r} is bounded by its duration alone: it has no columns")
            chain = np.arange(span.chains, dtype=np.int64)
            owner_index = chain % span.lanes if span.lanes else chain
            stage_columns.append(_slot_columns(self, span, 0, span.chains, owner_index % self.parts == self.part))
        return Slot(*(np.concatenate(column) for column in zip(*stage_columns, strict=True)))

    def slot(self, number: int) -> Slot[int]:
        """The row with this slot number, computed. Raises IndexError if the run has no such slot."""
        chain, turn = divmod(number, self.turns)
        for span in self.stages:
            index = chain - span.first_chain
            if 0 <= index < (RESERVED if span.chains is None else span.chains):
                return Slot(*(int(column[turn]) for column in _slot_columns(self, span, index, 1)))
        raise IndexError(number)


def build(workload: Workload, seed: int) -> Schedule:
    """The timetable of a workload: a pure function of the workload and the seed.

    If the workload sets `schedule_seed`, the first measured Poisson stage uses it exactly as LoadGen uses its
    `schedule_rng_seed`. All other stages, and all stages without an explicit seed, use seeds derived per stage, so that
    no two stages have the same draws.
    """
    turns = getattr(workload.requests, "turns", None)
    turn_count = turns.count if turns is not None else 1
    schedule_seed = workload.schedule_seed
    measured_poisson = [i for i, s in enumerate(workload.stages) if s.measured and isinstance(s.arrival, Poisson)]
    explicit_seed_stage = measured_poisson[0] if measured_poisson and schedule_seed is not None else -1
    spans: list[StageSpan] = []
    start_ns: int | None = 0
    first_chain = 0
    for index, stage in enumerate(workload.stages):
        if isinstance(stage.arrival, Closed):
            if stage.duration_ns is None and stage.count is None:
                raise ValueError(f"stage {stage.name!r} has neither a duration nor a count")
            lanes, offsets = stage.arrival.concurrency, np.zeros(0, np.int64)
            length_ns, chains = stage.duration_ns, stage.count
        else:
            base_seed = seed if schedule_seed is None else schedule_seed
            rng = seeds.stream(base_seed, "arrivals", index)
            loadgen_seed = base_seed if index == explicit_seed_stage else seeds.derived(base_seed, "arrivals", index)
            lanes, (offsets, length_ns) = 0, _arrivals(stage, rng, loadgen_seed)
            chains = len(offsets)
        span = StageSpan(
            index=index,
            name=stage.name,
            measured=stage.measured,
            start_ns=start_ns,
            length_ns=length_ns,
            first_chain=first_chain,
            chains=chains,
            lanes=lanes,
            offsets=offsets,
            turns=turn_count,
            ramp_ns=getattr(stage.arrival, "ramp_ns", None) or 0,
            taken_over=min(spans[-1].lanes, spans[-1].chains or spans[-1].lanes) if spans and lanes else 0,
        )
        spans.append(span)
        start_ns = None if start_ns is None or span.dynamic or length_ns is None else start_ns + length_ns
        first_chain += RESERVED if chains is None else chains
    pauses = Pauses(seed, turns.tool_time if turns is not None else None, turn_count)
    return Schedule(stages=tuple(spans), turns=turn_count, pauses=pauses)


def shard(schedule: Schedule, i: int, n: int) -> Schedule:
    """Share i of n of a schedule, computed without copying: whole chains only.

    A share has every n-th chain of an open loop and every n-th lane of a closed loop. Numbers stay those of the whole
    run. A share can itself be divided again.

    A stage may begin when the stage before it has finished. In a share it begins when *that share's* slots have
    finished, because workers do not communicate. If all workers must change stage together, run with one worker. Raises
    ValueError if there is no share i of n.
    """
    if not 0 <= i < n:
        raise ValueError(f"no share {i} of {n}")
    return replace(schedule, part=schedule.part + schedule.parts * i, parts=schedule.parts * n)


def fingerprint(schedule: Schedule) -> str:
    """The fingerprint of the *timetable*, as 32 hexadecimal digits.

    Two fingerprints are equal exactly when due time, after, pause, stage, session and turn of all slots are equal. A
    stage without a count contributes its parameters and its first 1,024 chains. The fingerprint describes the whole
    run, so it does not depend on the number of workers. Raises ValueError for a share.
    """
    if schedule.parts != 1:
        raise ValueError("the fingerprint is that of the whole timetable, not of a share")
    digest = hashlib.blake2b(digest_size=16)
    for span in schedule.stages:
        digest.update(f"{span.start_ns} {span.length_ns} {span.chains} {span.lanes} {span.turns};".encode())
        chains = min(1024, RESERVED) if span.chains is None else span.chains
        for first in range(0, chains, _HASH_BLOCK):
            block = _slot_columns(schedule, span, first, min(_HASH_BLOCK, chains - first))
            for column in (block.due_ns, block.after, block.pause_ns, block.stage, block.session, block.turn):
                digest.update(np.ascontiguousarray(column, "<i8").data)
    return digest.hexdigest()


def _slot_columns(
    schedule: Schedule, span: StageSpan, first: int, count: int, keep: NDArray[np.bool_] | None = None
) -> Slot[Ints]:
    """The slots of the stage's chains first … first + count - 1; with `keep`, of the chains where it is True."""
    turns = schedule.turns
    chain = np.arange(first, first + count, dtype=np.int64)
    pauses = np.zeros((count, turns), np.int64)
    if turns > 1:
        pauses[:, 1:] = schedule.pauses.column(span.first_chain + first, count)
    if keep is not None:
        chain, pauses = chain[keep], pauses[keep]
        count = len(chain)
    start = span.start_ns or 0
    number = ((span.first_chain + chain) * turns)[:, None] + np.arange(turns, dtype=np.int64)
    due = np.full((count, turns), -1, np.int64)
    after = number - 1
    if span.lanes:
        due[:, 0] = np.where(chain < span.lanes, start + span.begins_ns(chain), -1)
        after[:, 0] = np.where(chain < span.lanes, -1, number[:, 0] - span.lanes * turns + turns - 1)
    else:
        due[:, 0] = start + span.offsets[chain]
        after[:, 0] = -1

    def per_slot(values: Ints | int) -> Ints:
        return np.broadcast_to(np.asarray(values, np.int64), (count, turns)).reshape(-1)

    return Slot(
        number=number.reshape(-1),
        due_ns=due.reshape(-1),
        after=after.reshape(-1),
        pause_ns=pauses.reshape(-1),
        stage=per_slot(span.index),
        session=per_slot((span.first_chain + chain)[:, None] if turns > 1 else -1),
        turn=per_slot(np.arange(turns)),
        lane=per_slot((chain % span.lanes)[:, None] if span.lanes else -1),
    )


def _arrivals(stage: Stage, rng: np.random.Generator, loadgen_seed: int) -> arrivals.Arrivals:
    """Start times of the chains of an open-loop stage. Raises ValueError for an arrival law that has none."""
    bounds = {"duration_ns": stage.duration_ns, "count": stage.count}
    match stage.arrival:
        case Constant(rate=rate):
            return arrivals.constant(rate, **bounds)
        case Poisson(rate=rate) if (least := stage.at_least) is not None:
            return arrivals.poisson_at_least(
                rate, seed=loadgen_seed, min_duration_ns=least.duration_ns, min_count=least.count,
                multiple_of=least.passes_of,
            )  # fmt: skip
        case Poisson(rate=rate):
            return arrivals.poisson(rate, seed=loadgen_seed, **bounds)
        case Gamma(rate=rate, burstiness=burstiness):
            return arrivals.gamma(rate, burstiness=burstiness, rng=rng, **bounds)
        case Ramp(from_rate=low, to_rate=high):
            return arrivals.ramp(low, high, rng=rng, **bounds)
        case Replay(speed=speed, loop=loop) as replay:
            trace = traces.replayed(replay)
            return arrivals.given(trace.due_ns, trace.end_ns, speed=speed, loop=loop, **bounds)
    raise ValueError(f"{stage.arrival!r} has no arrivals")


def _draw_delays(delay: Any, rng: np.random.Generator, shape: tuple[int, int]) -> Ints:
    """Delays in ns drawn from a workload's delay law, each at least 0 and within its min and max."""
    match delay:
        case Fixed(value=value):
            return np.full(shape, value, np.int64)
        case Uniform(min=low, max=high):
            return rng.integers(low, high, shape, endpoint=True)
        case Empirical(values=values, weights=weights):
            shares = None if weights is None else np.asarray(weights) / sum(weights)
            return rng.choice(np.asarray(values, np.int64), shape, p=shares)
        case Normal(mean=mean, stddev=stddev):
            return _draw_within(lambda n: rng.normal(mean, stddev, n), delay, shape)
        case LogNormal(sigma=sigma):
            return _draw_within(lambda n: rng.lognormal(log_mean(delay), sigma, n), delay, shape)
    raise ValueError(f"no delay {delay!r}")


def _draw_within(draw: Callable[[int], NDArray[np.float64]], bounds: Any, shape: tuple[int, int]) -> Ints:
    """Values of `draw`, rounded and within the bounds.

    Values outside are drawn again; what is still outside after 64 attempts is clipped to the bounds.
    """
    low = bounds.min or 0
    high = LONGEST_NS if bounds.max is None else bounds.max
    values = np.rint(draw(shape[0] * shape[1]))
    for _ in range(64):
        (outside,) = np.nonzero((values < low) | (values > high))
        if not len(outside):
            break
        values[outside] = np.rint(draw(len(outside)))
    return np.clip(values, low, high).astype(np.int64).reshape(shape)
