"""What a chain of the timetable is made of: its slots, which of them wait for which, and for how long. Pure.

A chain is a single request, a conversation, or a task. What it is made of is a function of (seed, chain number).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.core import seeds
from loadgen.core.requests.laws import log_mean
from loadgen.core.requests.task_graphs import Leaving, TaskGraphs
from loadgen.core.units import LONGEST_NS
from loadgen.core.workload import (
    Empirical,
    Fixed,
    FromTrace,
    LogNormal,
    Mix,
    Normal,
    Synthetic,
    Task,
    Uniform,
)

if TYPE_CHECKING:
    from loadgen.core.workload.trace_sessions import TraceSessions

Ints = NDArray[np.int64]
_PAUSES_DRAWN = 1024  # drawn at a time; 75 µs for a lognormal distribution
_BLOCKS_KEPT = 64  # blocks of pauses in memory; conversations in progress have nearby numbers
_CHAINS_KEPT = 4096
_CLASSES_DRAWN = 1024  # starts whose classes are drawn together


class Chain(Struct, frozen=True):
    """One chain. Its slots are named by their turn, in the order of the chain; the first waits for nothing."""

    waits: tuple[int, ...]  # for each slot: how many others must end before it
    followers: tuple[tuple[int, ...], ...]  # for each slot: those that wait for it
    pauses: Sequence[int]  # for each slot: ns from the end of the last that it waits for
    is_session: bool = True
    leaving: Leaving | None = None  # where its user goes away


SINGLE = Chain((0,), ((),), (0,), is_session=False)


class ChainColumns(Struct, frozen=True):
    """Many chains as columns: `sizes` and `is_session` of each chain, the other two of each of their slots."""

    sizes: Ints
    is_session: NDArray[np.bool_]
    after: Ints  # the turn of the last slot that it waits for; -1 for the first of a chain
    pause_ns: Ints


class Chains(Protocol):
    """The chains of a run. The number of a slot is `chain * turns + place`.

    A chain of fewer slots than `turns` uses the first places, and the last place for its last slot, so that the end of
    a conversation or task shows in the number. A single request uses the first place alone.
    """

    @property
    def turns(self) -> int: ...

    @property
    def side_by_side(self) -> int:
        """The most slots of a chain in flight at one time."""

    def of(self, chain: int) -> Chain: ...

    def sizes(self, first: int, count: int) -> Ints:
        """How many slots each of so many chains has."""

    def slots(self, first: int, count: int) -> int:
        """How many slots so many chains have together."""

    def columns(self, first: int, count: int) -> ChainColumns: ...


class Singles:
    """Each chain is a single request."""

    turns = side_by_side = 1

    def of(self, chain: int) -> Chain:
        return SINGLE

    def sizes(self, first: int, count: int) -> Ints:
        return np.ones(count, np.int64)

    def slots(self, first: int, count: int) -> int:
        return count

    def columns(self, first: int, count: int) -> ChainColumns:
        none = np.zeros(count, np.int64)
        return ChainColumns(self.sizes(first, count), none > 0, none - 1, none)


class Conversations(Struct, frozen=True):
    """Each chain is a conversation of `turns` slots, with the time of a tool before each but the first."""

    seed: int
    tool_time: Any
    turns: int
    side_by_side: int = 1
    _memo: dict[int, list[list[int]]] = {}

    @property
    def together(self) -> int:
        """Conversations drawn at a time: few enough to draw inside the driver's loop, however many turns they have."""
        return max(1, _PAUSES_DRAWN // self.turns)

    def of(self, chain: int) -> Chain:
        waits, followers = _in_a_row(self.turns)
        return Chain(waits, followers, (0, *self.pauses(chain)))

    def pauses(self, chain: int) -> list[int]:
        """The pauses in ns before turn 1, 2, … of this conversation."""
        block, index = divmod(chain, self.together)
        pauses = self._memo.get(block)
        if pauses is None:
            if len(self._memo) == _BLOCKS_KEPT:
                del self._memo[next(iter(self._memo))]
            pauses = self._memo[block] = self._block(block).tolist()
        return pauses[index]

    def sizes(self, first: int, count: int) -> Ints:
        return np.full(count, self.turns)

    def slots(self, first: int, count: int) -> int:
        return count * self.turns

    def columns(self, first: int, count: int) -> ChainColumns:
        first_block, end_block = first // self.together, (first + count - 1) // self.together + 1
        pause_ns = np.zeros((count, self.turns), np.int64)
        if count:
            blocks = np.concatenate([self._block(block) for block in range(first_block, end_block)])
            pause_ns[:, 1:] = blocks[first - first_block * self.together :][:count]
        after = np.tile(np.arange(self.turns) - 1, count)
        return ChainColumns(
            self.sizes(first, count), np.ones(count, np.bool_), after, pause_ns.reshape(-1)
        )

    def _block(self, block: int) -> Ints:
        """The pauses of block number `block`, in ns. Shape (together, turns - 1)."""
        rng = seeds.stream(self.seed, "tool_time", block)
        return _draw_delays(self.tool_time, rng, (self.together, self.turns - 1))


class Tasks:
    """Each chain is a task: a graph of requests."""

    def __init__(self, task: Task, seed: int) -> None:
        self._graphs = TaskGraphs(task, seed)
        self.turns, self.side_by_side = task.width, task.side_by_side
        self.of = functools.lru_cache(maxsize=_CHAINS_KEPT)(self._chain)

    def _chain(self, chain: int) -> Chain:
        nodes = self._graphs[chain]
        followers: list[list[int]] = [[] for _ in nodes]
        for turn, node in enumerate(nodes):
            for before in node.after:
                followers[before].append(turn)
        return Chain(
            waits=tuple(len(node.after) for node in nodes),
            followers=tuple(map(tuple, followers)),
            pauses=tuple(node.pause_ns for node in nodes),
            leaving=self._graphs.leaving(chain),
        )

    def sizes(self, first: int, count: int) -> Ints:
        return np.array(
            [len(self._graphs[chain]) for chain in range(first, first + count)], np.int64
        )

    def slots(self, first: int, count: int) -> int:
        return int(self.sizes(first, count).sum())

    def columns(self, first: int, count: int) -> ChainColumns:
        graphs = [self._graphs[chain] for chain in range(first, first + count)]
        nodes = [node for graph in graphs for node in graph]
        return ChainColumns(
            sizes=np.array([len(graph) for graph in graphs], np.int64),
            is_session=np.ones(count, np.bool_),
            after=np.array([max(node.after, default=-1) for node in nodes], np.int64),
            pause_ns=np.array([node.pause_ns for node in nodes], np.int64),
        )


class TraceChains:
    """Each chain is a session of a trace; after the last one the first comes again."""

    def __init__(self, sessions: TraceSessions) -> None:
        self._sessions = sessions
        self.turns, self.side_by_side = sessions.turns, sessions.side_by_side
        self.of = functools.lru_cache(maxsize=_CHAINS_KEPT)(self._chain)

    def _chain(self, chain: int) -> Chain:
        session = chain % len(self._sessions)
        if not self._sessions.is_session[session]:
            return SINGLE
        waits, pauses = self._sessions.graph(session)
        followers: list[list[int]] = [[] for _ in waits]
        for turn, before in enumerate(waits):
            for one in before:
                followers[one].append(turn)
        return Chain(tuple(map(len, waits)), tuple(map(tuple, followers)), pauses)

    def sizes(self, first: int, count: int) -> Ints:
        sizes: Ints = self._sessions.sizes[np.arange(first, first + count) % len(self._sessions)]
        return sizes

    def slots(self, first: int, count: int) -> int:
        return int(self.sizes(first, count).sum())

    def columns(self, first: int, count: int) -> ChainColumns:
        sessions = np.arange(first, first + count) % len(self._sessions)
        graphs = [self._sessions.graph(session) for session in sessions.tolist()]
        return ChainColumns(
            sizes=self.sizes(first, count),
            is_session=self._sessions.is_session[sessions],
            after=np.array(
                [max(before, default=-1) for graph in graphs for before in graph.waits], np.int64
            ),
            pause_ns=np.array([pause for graph in graphs for pause in graph.pauses], np.int64),
        )


class ClassChains:
    """The chains of several classes: each chain is that of its class, which seed and number decide."""

    def __init__(self, mix: Mix, seed: int) -> None:
        self._parts = [of_requests(one.requests, seed) for one in mix.classes.values()]
        self._seed, self._weights = seed, [float(one.weight) for one in mix.classes.values()]
        self.turns = max(part.turns for part in self._parts)
        self.side_by_side = max(part.side_by_side for part in self._parts)
        self._are_sessions = np.array([part.turns > 1 for part in self._parts])

        @functools.lru_cache(maxsize=_BLOCKS_KEPT)
        def block(index: int) -> list[int]:
            drawn: list[int] = self._drawn(index * _CLASSES_DRAWN, _CLASSES_DRAWN).tolist()
            return drawn

        self._block = block

    def _drawn(self, first: int, count: int) -> Ints:
        return seeds.classes(self._seed, self._weights, np.arange(first, first + count))

    def of(self, chain: int) -> Chain:
        block, index = divmod(chain, _CLASSES_DRAWN)
        return self._parts[self._block(block)[index]].of(chain)

    def sizes(self, first: int, count: int) -> Ints:
        drawn, sizes = self._drawn(first, count), np.ones(count, np.int64)
        for index in np.flatnonzero(self._are_sessions[drawn]).tolist():
            sizes[index] = self._parts[drawn[index]].sizes(first + index, 1)[0]
        return sizes

    def slots(self, first: int, count: int) -> int:
        return int(self.sizes(first, count).sum())

    def columns(self, first: int, count: int) -> ChainColumns:
        drawn, sizes = self._drawn(first, count), self.sizes(first, count)
        is_session = self._are_sessions[drawn]
        slots, starts = int(sizes.sum()), np.cumsum(sizes) - sizes
        after, pause_ns = np.full(slots, -1), np.zeros(slots, np.int64)
        for index in np.flatnonzero(is_session).tolist():
            columns = self._parts[drawn[index]].columns(first + index, 1)
            own = slice(starts[index], starts[index] + sizes[index])
            after[own], pause_ns[own] = columns.after, columns.pause_ns
        return ChainColumns(sizes, is_session, after, pause_ns)


def of_requests(requests: Any, seed: int) -> Chains:
    """The chains of a workload, by what it sends."""
    if isinstance(requests, Mix):
        parts = ClassChains(requests, seed)
        return parts if parts.turns > 1 else Singles()
    if isinstance(requests, Task):
        return Tasks(requests, seed)
    if isinstance(requests, FromTrace) and requests.replay == "sessions":
        from loadgen.core.workload import trace_sessions, traces

        return TraceChains(trace_sessions.sessions_of(traces.replayed(requests)))
    if isinstance(requests, Synthetic) and requests.turns is not None and requests.turns.count > 1:
        return Conversations(seed, requests.turns.tool_time, requests.turns.count)
    return Singles()


@functools.cache
def _in_a_row(turns: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """`waits` and `followers` of slots that follow each other."""
    return (0, *(1,) * (turns - 1)), (*((turn + 1,) for turn in range(turns - 1)), ())


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


def _draw_within(
    draw: Callable[[int], NDArray[np.float64]], bounds: Any, shape: tuple[int, int]
) -> Ints:
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
