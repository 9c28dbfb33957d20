"""The content of chains: which slots a chain has, which of them wait for which, and for how long.

A chain is a single request, a conversation, or a task. Its content is a pure function of the seed
and of its number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.core import seeds
from loadgen.core.requests.sampling import lognormal_mu
from loadgen.core.requests.task_graphs import Abandonment, TaskGraphs
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
_PAUSES_PER_BLOCK = 1024  # Drawing this many from a lognormal distribution takes 75 µs.
_CACHED_BLOCKS = 64  # Conversations in progress have nearby numbers, so few blocks are in use.
_CACHED_CHAINS = 4096
_CLASSES_PER_BLOCK = 1024
_MAX_REDRAWS = 64  # of values outside the bounds of a distribution, before they are clipped


class Session(Struct, frozen=True):
    """The content of one chain. Its slots are numbered by turn; turn 0 waits for nothing."""

    waits: tuple[int, ...]  # for each turn: how many others must end before it starts
    followers: tuple[tuple[int, ...], ...]  # for each turn: the turns that wait for it
    pauses: Sequence[int]  # for each turn: ns from the end of the last turn that it waits for
    is_session: bool = True  # False for a single request
    leaving: Abandonment | None = None  # the turn at which its user cancels and leaves


SINGLE_REQUEST = Session((0,), ((),), (0,), is_session=False)


class SessionColumns(Struct, frozen=True):
    """The content of many chains as columns."""

    # One value per chain.
    sizes: Ints
    is_session: NDArray[np.bool_]
    # One value per slot.
    after: Ints  # the highest turn that it waits for; -1 for the first turn of a chain
    pause_ns: Ints


class SessionSequence(Protocol):
    """The chains of a run.

    The number of a slot is `chain * turns + position`. A chain with fewer slots than `turns` uses
    the first positions, and the last position for its last slot, so that the number shows where a
    conversation or task ends. A single request uses the first position only.
    """

    @property
    def turns(self) -> int:
        """Return the number of slots of the largest chain."""

    @property
    def side_by_side(self) -> int:
        """Return how many slots of one chain can be in flight at the same time."""

    def of(self, chain: int) -> Session:
        """Return the content of a chain."""

    def sizes(self, first: int, count: int) -> Ints:
        """Return the number of slots of each of `count` chains, from chain `first` on."""

    def slots(self, first: int, count: int) -> int:
        """Return the number of slots of these chains together."""

    def columns(self, first: int, count: int) -> SessionColumns:
        """Return the content of these chains as columns."""


class SingleRequests:
    """Chains that are single requests."""

    turns = side_by_side = 1

    def of(self, chain: int) -> Session:
        return SINGLE_REQUEST

    def sizes(self, first: int, count: int) -> Ints:
        return np.ones(count, np.int64)

    def slots(self, first: int, count: int) -> int:
        return count

    def columns(self, first: int, count: int) -> SessionColumns:
        return SessionColumns(
            sizes=self.sizes(first, count),
            is_session=np.zeros(count, np.bool_),
            after=np.full(count, -1, np.int64),
            pause_ns=np.zeros(count, np.int64),
        )


class Conversations(Struct, frozen=True):
    """Chains that are conversations: `turns` slots, with a tool call before each but the first."""

    seed: int
    tool_time: Any
    turns: int
    side_by_side: int = 1
    _cache: dict[int, list[list[int]]] = {}  # from the number of a block to its pauses

    @property
    def conversations_per_block(self) -> int:
        """Return how many conversations are drawn together: few enough for the loop that sends."""
        return max(1, _PAUSES_PER_BLOCK // self.turns)

    def of(self, chain: int) -> Session:
        waits, followers = _linear_graph(self.turns)
        return Session(waits, followers, (0, *self.pauses(chain)))

    def pauses(self, chain: int) -> list[int]:
        """Return the pauses in ns before turn 1, 2, ... of a conversation."""
        block, index = divmod(chain, self.conversations_per_block)
        pauses = self._cache.get(block)
        if pauses is None:
            if len(self._cache) == _CACHED_BLOCKS:
                oldest_block = next(iter(self._cache))
                del self._cache[oldest_block]
            pauses = self._draw_block(block).tolist()
            self._cache[block] = pauses
        return pauses[index]

    def sizes(self, first: int, count: int) -> Ints:
        return np.full(count, self.turns)

    def slots(self, first: int, count: int) -> int:
        return count * self.turns

    def columns(self, first: int, count: int) -> SessionColumns:
        pause_ns = np.zeros((count, self.turns), np.int64)
        if count:
            block_size = self.conversations_per_block
            blocks = range(first // block_size, (first + count - 1) // block_size + 1)
            drawn = np.concatenate([self._draw_block(block) for block in blocks])
            pause_ns[:, 1:] = drawn[first - blocks.start * block_size :][:count]
        return SessionColumns(
            sizes=self.sizes(first, count),
            is_session=np.ones(count, np.bool_),
            after=np.tile(np.arange(self.turns) - 1, count),
            pause_ns=pause_ns.reshape(-1),
        )

    def _draw_block(self, block: int) -> Ints:
        """Draw the pauses of a block in ns, with the shape (conversations_per_block, turns - 1)."""
        rng = seeds.stream(self.seed, "tool_time", block)
        return _draw_delays(self.tool_time, rng, (self.conversations_per_block, self.turns - 1))


class Tasks:
    """Chains that are tasks, which are graphs of requests."""

    def __init__(self, task: Task, seed: int) -> None:
        self._graphs = TaskGraphs(task, seed)
        self.turns, self.side_by_side = task.width, task.max_concurrent_requests
        self.of = functools.lru_cache(maxsize=_CACHED_CHAINS)(self._build_chain)

    def _build_chain(self, chain: int) -> Session:
        nodes = self._graphs[chain]
        return Session(
            waits=tuple(len(node.after) for node in nodes),
            followers=_invert([node.after for node in nodes]),
            pauses=tuple(node.pause_ns for node in nodes),
            leaving=self._graphs.abandonment(chain),
        )

    def sizes(self, first: int, count: int) -> Ints:
        return np.array(
            [len(self._graphs[chain]) for chain in range(first, first + count)], np.int64
        )

    def slots(self, first: int, count: int) -> int:
        return int(self.sizes(first, count).sum())

    def columns(self, first: int, count: int) -> SessionColumns:
        graphs = [self._graphs[chain] for chain in range(first, first + count)]
        nodes = [node for graph in graphs for node in graph]
        return SessionColumns(
            sizes=np.array([len(graph) for graph in graphs], np.int64),
            is_session=np.ones(count, np.bool_),
            after=np.array([max(node.after, default=-1) for node in nodes], np.int64),
            pause_ns=np.array([node.pause_ns for node in nodes], np.int64),
        )


class ReplayedSessions:
    """Chains that are the sessions of a trace, which repeat when all have been used."""

    def __init__(self, sessions: TraceSessions) -> None:
        self._sessions = sessions
        self.turns, self.side_by_side = sessions.turns, sessions.max_concurrent_requests
        self.of = functools.lru_cache(maxsize=_CACHED_CHAINS)(self._build_chain)

    def _build_chain(self, chain: int) -> Session:
        session = chain % len(self._sessions)
        if not self._sessions.is_session[session]:
            return SINGLE_REQUEST
        predecessors, pauses = self._sessions.graph(session)
        return Session(tuple(map(len, predecessors)), _invert(predecessors), pauses)

    def sizes(self, first: int, count: int) -> Ints:
        sizes: Ints = self._sessions.sizes[np.arange(first, first + count) % len(self._sessions)]
        return sizes

    def slots(self, first: int, count: int) -> int:
        return int(self.sizes(first, count).sum())

    def columns(self, first: int, count: int) -> SessionColumns:
        sessions = np.arange(first, first + count) % len(self._sessions)
        graphs = [self._sessions.graph(session) for session in sessions.tolist()]
        return SessionColumns(
            sizes=self.sizes(first, count),
            is_session=self._sessions.is_session[sessions],
            after=np.array(
                [max(predecessors, default=-1) for graph in graphs for predecessors in graph.waits],
                np.int64,
            ),
            pause_ns=np.array([pause for graph in graphs for pause in graph.pauses], np.int64),
        )


class MixedSessions:
    """Chains of several request classes. The seed and the number of a chain decide its class."""

    def __init__(self, mix: Mix, seed: int) -> None:
        classes = list(mix.classes.values())
        self._seed = seed
        self._weights = [float(request_class.weight) for request_class in classes]
        self._class_chains = [
            build_sessions(request_class.requests, seed) for request_class in classes
        ]
        self._class_has_sessions = np.array([chains.turns > 1 for chains in self._class_chains])
        self.turns = max(chains.turns for chains in self._class_chains)
        self.side_by_side = max(chains.side_by_side for chains in self._class_chains)
        self._classes_of_block = functools.lru_cache(maxsize=_CACHED_BLOCKS)(self._draw_block)

    def _draw_block(self, block: int) -> list[int]:
        """Return the classes of the chains of a block."""
        classes: list[int] = self._draw(block * _CLASSES_PER_BLOCK, _CLASSES_PER_BLOCK).tolist()
        return classes

    def _draw(self, first: int, count: int) -> Ints:
        """Return the class of each of `count` chains, from chain `first` on."""
        return seeds.classes(self._seed, self._weights, np.arange(first, first + count))

    def of(self, chain: int) -> Session:
        block, index = divmod(chain, _CLASSES_PER_BLOCK)
        request_class = self._classes_of_block(block)[index]
        return self._class_chains[request_class].of(chain)

    def sizes(self, first: int, count: int) -> Ints:
        classes = self._draw(first, count)
        sizes = np.ones(count, np.int64)
        for index in np.flatnonzero(self._class_has_sessions[classes]).tolist():
            sizes[index] = self._class_chains[classes[index]].sizes(first + index, 1)[0]
        return sizes

    def slots(self, first: int, count: int) -> int:
        return int(self.sizes(first, count).sum())

    def columns(self, first: int, count: int) -> SessionColumns:
        classes = self._draw(first, count)
        sizes = self.sizes(first, count)
        is_session = self._class_has_sessions[classes]
        first_slots = np.cumsum(sizes) - sizes
        after = np.full(int(sizes.sum()), -1)
        pause_ns = np.zeros(len(after), np.int64)
        for index in np.flatnonzero(is_session).tolist():
            columns = self._class_chains[classes[index]].columns(first + index, 1)
            slots = slice(first_slots[index], first_slots[index] + sizes[index])
            after[slots] = columns.after
            pause_ns[slots] = columns.pause_ns
        return SessionColumns(sizes, is_session, after, pause_ns)


def build_sessions(requests: Any, seed: int) -> SessionSequence:
    """Return the chains that the requests of a workload form."""
    if isinstance(requests, Mix):
        class_chains = MixedSessions(requests, seed)
        return class_chains if class_chains.turns > 1 else SingleRequests()
    if isinstance(requests, Task):
        return Tasks(requests, seed)
    if isinstance(requests, FromTrace) and requests.replay == "sessions":
        from loadgen.core.workload import trace_sessions, traces

        return ReplayedSessions(trace_sessions.build_sessions(traces.read_replayed_trace(requests)))
    if isinstance(requests, Synthetic) and requests.turns is not None and requests.turns.count > 1:
        return Conversations(seed, requests.turns.tool_time, requests.turns.count)
    return SingleRequests()


@functools.cache
def _linear_graph(turns: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return `waits` and `followers` of a chain in which each turn waits for the one before."""
    waits = (0,) + (1,) * (turns - 1)
    followers = (*((turn + 1,) for turn in range(turns - 1)), ())
    return waits, followers


def _invert(predecessors: Sequence[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Return, for each turn, the turns that wait for it, from the turns that each one waits for."""
    followers: list[list[int]] = [[] for _ in predecessors]
    for turn, earlier_turns in enumerate(predecessors):
        for earlier_turn in earlier_turns:
            followers[earlier_turn].append(turn)
    return tuple(map(tuple, followers))


def _draw_delays(delay: Any, rng: np.random.Generator, shape: tuple[int, int]) -> Ints:
    """Draw delays in ns from a distribution, each at least 0 and within its `min` and `max`."""
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
            return _draw_within(
                lambda n: rng.lognormal(lognormal_mu(delay), sigma, n), delay, shape
            )
    raise ValueError(f"{delay!r} is not a distribution of delays")


def _draw_within(
    draw: Callable[[int], NDArray[np.float64]], bounds: Any, shape: tuple[int, int]
) -> Ints:
    """Return values of `draw`, rounded to integers within the bounds.

    Values outside the bounds are drawn again. Those that are still outside after 64 attempts are
    clipped.
    """
    low = bounds.min or 0
    high = LONGEST_NS if bounds.max is None else bounds.max
    values = np.rint(draw(shape[0] * shape[1]))
    for _ in range(_MAX_REDRAWS):
        (outside,) = np.nonzero((values < low) | (values > high))
        if not len(outside):
            break
        values[outside] = np.rint(draw(len(outside)))
    return np.clip(values, low, high).astype(np.int64).reshape(shape)
