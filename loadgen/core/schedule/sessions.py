"""Describe the sessions of a run: which requests each has, in which order, with which pauses.

A session is a single request, a conversation, or a task (a graph of requests). The requests of a
session are called its turns. Sessions are numbered from 0 through the whole run, and the content of
a session is a pure function of the workload, the seed and the number of the session.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from typing_extensions import override

from loadgen.core import seeds
from loadgen.core.requests.sampling import lognormal_mu
from loadgen.core.requests.slot_layout import SlotLayout
from loadgen.core.requests.task_graphs import Abandonment, TaskGraphs
from loadgen.core.units import LONGEST_NS
from loadgen.core.workload import (
    Delay,
    Empirical,
    Fixed,
    FromFile,
    FromTrace,
    LogNormal,
    Mix,
    Normal,
    Synthetic,
    Task,
    Trajectories,
    Uniform,
)

if TYPE_CHECKING:
    from loadgen.core.requests.trajectory_plays import Play, TrajectoryPlays
    from loadgen.core.workload.trace_sessions import TraceSessions

Ints = NDArray[np.int64]

NOT_APPLICABLE = -1
"""The value of a column where a row has no value, for example the session of a single request."""


# Drawing this many pauses from a lognormal distribution takes 75 µs, little enough for the loop
# that sends requests.
_PAUSES_PER_BLOCK = 1024
# Conversations that run at the same time have nearby numbers, so few blocks are in use at a time.
_CACHED_BLOCKS = 64
_CACHED_SESSIONS = 4096
_CLASSES_PER_BLOCK = 1024
# How often values outside the bounds of a distribution are drawn again before they are clipped.
_MAX_REDRAWS = 64


class Session(Struct, frozen=True):
    """The turns of one session: which of them wait for which others, and for how long.

    Turns are numbered from 0. Turn 0 waits for no other turn.
    """

    predecessor_counts: tuple[int, ...]
    """For each turn, how many other turns must end before it starts."""
    successors: tuple[tuple[int, ...], ...]
    """For each turn, the turns that wait for it."""
    pauses_ns: Sequence[int]
    """For each turn, the time from the end of the last turn it waits for to its own start."""
    is_single_request: bool = False
    abandonment: Abandonment | None = None
    """Where the user of this session cancels a request and leaves, if the user does."""

    @property
    def turn_count(self) -> int:
        """Return the number of turns."""
        return len(self.predecessor_counts)


SINGLE_REQUEST = Session(
    predecessor_counts=(0,), successors=((),), pauses_ns=(0,), is_single_request=True
)


class SessionColumns(Struct, frozen=True):
    """The content of many sessions as columns."""

    # One value per session.
    turn_counts: Ints
    is_single_request: NDArray[np.bool_]
    # One value per turn.
    predecessor: Ints
    """The highest turn that a turn waits for; NOT_APPLICABLE for the first turn of a session."""
    pause_ns: Ints


class SessionSequence(ABC):
    """The sessions of a run, in the order of their numbers. The sequence has no end."""

    max_turns: int
    """The number of turns of the largest session."""
    max_parallel_turns: int
    """How many turns of one session can be in flight at the same time."""

    @functools.cached_property
    def layout(self) -> SlotLayout:
        """Return how the slots of the sessions are numbered."""
        return SlotLayout(block_size=self.max_turns)

    @abstractmethod
    def get(self, index: int) -> Session:
        """Return the session with this number."""

    @abstractmethod
    def turn_counts(self, first: int, count: int) -> Ints:
        """Return the number of turns of each of `count` sessions, from session `first` on."""

    @abstractmethod
    def columns(self, first: int, count: int) -> SessionColumns:
        """Return the content of `count` sessions, from session `first` on, as columns."""

    def affinity(self, index: int) -> int:
        """Return a number that is equal for sessions which the same server should serve.

        A router that sends a session to one server finds its earlier turns in the cache of that
        server. By default each session is by itself.
        """
        return index

    def total_turns(self, first: int, count: int) -> int:
        """Return how many turns `count` sessions have together, from session `first` on."""
        return int(self.turn_counts(first, count).sum())


class SingleRequests(SessionSequence):
    """Sessions that are single requests."""

    max_turns = 1
    max_parallel_turns = 1

    @override
    def get(self, index: int) -> Session:
        return SINGLE_REQUEST

    @override
    def turn_counts(self, first: int, count: int) -> Ints:
        return np.ones(count, np.int64)

    @override
    def total_turns(self, first: int, count: int) -> int:
        return count

    @override
    def columns(self, first: int, count: int) -> SessionColumns:
        return SessionColumns(
            turn_counts=np.ones(count, np.int64),
            is_single_request=np.ones(count, np.bool_),
            predecessor=np.full(count, NOT_APPLICABLE, np.int64),
            pause_ns=np.zeros(count, np.int64),
        )


class Conversations(SessionSequence):
    """Sessions that are conversations of equal length.

    Each turn but the first follows the turn before it after a pause, the time of a tool call.
    Pauses are drawn for a block of conversations at a time.
    """

    max_parallel_turns = 1

    def __init__(self, seed: int, tool_time: Delay, turns: int) -> None:
        """Create conversations of `turns` requests, between which a tool runs for `tool_time`."""
        self.max_turns = turns
        self._seed = seed
        self._tool_time = tool_time
        self._conversations_per_block = max(1, _PAUSES_PER_BLOCK // turns)

        # Every turn waits for the turn before it. With 3 turns, the predecessors are [], [0] and
        # [1], and the successors (1,), (2,) and ().
        predecessors = [[turn - 1] if turn > 0 else [] for turn in range(turns)]
        self._predecessor_counts = tuple(len(earlier_turns) for earlier_turns in predecessors)
        self._successors = _successors(predecessors)

        # Reading one conversation after the other would draw the same block again each time.
        self._cached_block = functools.lru_cache(maxsize=_CACHED_BLOCKS)(self._block_as_lists)

    @override
    def get(self, index: int) -> Session:
        pauses_ns = (0, *self.pauses_ns(index))
        return Session(self._predecessor_counts, self._successors, pauses_ns)

    def pauses_ns(self, index: int) -> list[int]:
        """Return the pauses before turn 1, 2, ... of a conversation."""
        block, index_in_block = divmod(index, self._conversations_per_block)
        return self._cached_block(block)[index_in_block]

    @override
    def turn_counts(self, first: int, count: int) -> Ints:
        return np.full(count, self.max_turns)

    @override
    def total_turns(self, first: int, count: int) -> int:
        return count * self.max_turns

    @override
    def columns(self, first: int, count: int) -> SessionColumns:
        """Return `count` conversations, from conversation `first` on, as columns.

        Turn i waits for turn i - 1 and for a pause. Turn 0 has neither predecessor nor pause. For
        example, the predecessors of two conversations with 3 turns are [-1, 0, 1, -1, 0, 1], where
        -1 is NOT_APPLICABLE.
        """
        predecessors_of_conversation = np.arange(self.max_turns) - 1
        predecessors_of_conversation[0] = NOT_APPLICABLE

        # One row per conversation and one column per turn.
        pauses_ns = np.zeros((count, self.max_turns), np.int64)
        if count:
            pauses_ns[:, 1:] = self._pauses_of(first, count)

        return SessionColumns(
            turn_counts=self.turn_counts(first, count),
            is_single_request=np.zeros(count, np.bool_),
            predecessor=np.tile(predecessors_of_conversation, count),
            pause_ns=pauses_ns.reshape(-1),
        )

    def _pauses_of(self, first: int, count: int) -> Ints:
        """Return the pauses in ns of `count` conversations, from conversation `first` on.

        The result has the shape (count, turns - 1). Pauses are drawn for complete blocks of
        conversations, of which a part is returned. So a conversation has the same pauses however
        many conversations are requested at once.
        """
        first_block, first_in_block = divmod(first, self._conversations_per_block)
        last_block = (first + count - 1) // self._conversations_per_block
        blocks = [self._draw_block(block) for block in range(first_block, last_block + 1)]
        pauses_ns = np.concatenate(blocks)
        return pauses_ns[first_in_block : first_in_block + count]

    def _block_as_lists(self, block: int) -> list[list[int]]:
        """Return the pauses of a block as lists, from which single values are read faster."""
        pauses_ns: list[list[int]] = self._draw_block(block).tolist()
        return pauses_ns

    def _draw_block(self, block: int) -> Ints:
        """Draw the pauses in ns of a block, with the shape (conversations, turns - 1)."""
        rng = seeds.generator(self._seed, "tool_time", block)
        shape = (self._conversations_per_block, self.max_turns - 1)
        return _draw_delays(self._tool_time, rng, shape)


class Tasks(SessionSequence):
    """Sessions that are tasks, which are graphs of requests."""

    def __init__(self, task: Task, seed: int) -> None:
        self._graphs = TaskGraphs(task, seed)
        self.max_turns = task.max_requests
        self.max_parallel_turns = task.max_concurrent_requests
        self._cached_session = functools.lru_cache(maxsize=_CACHED_SESSIONS)(self._build_session)

    @override
    def get(self, index: int) -> Session:
        return self._cached_session(index)

    def _build_session(self, index: int) -> Session:
        """Return a task as a session, in which each request of the task is a turn."""
        task_requests = self._graphs[index]
        return Session(
            predecessor_counts=tuple(len(request.predecessors) for request in task_requests),
            successors=_successors([request.predecessors for request in task_requests]),
            pauses_ns=tuple(request.pause_ns for request in task_requests),
            abandonment=self._graphs.abandonment(index),
        )

    @override
    def turn_counts(self, first: int, count: int) -> Ints:
        counts = [len(self._graphs[index]) for index in range(first, first + count)]
        return np.array(counts, np.int64)

    @override
    def columns(self, first: int, count: int) -> SessionColumns:
        """Return `count` tasks, from task `first` on, as columns with one value per request.

        A request may wait for several others, but the column `predecessor` has room for one. It has
        the one with the highest turn; the dispatcher uses the complete graph (`get`).
        """
        graphs = [self._graphs[index] for index in range(first, first + count)]
        task_requests = [request for graph in graphs for request in graph]
        predecessors = [_highest_turn(request.predecessors) for request in task_requests]

        return SessionColumns(
            turn_counts=np.array([len(graph) for graph in graphs], np.int64),
            is_single_request=np.zeros(count, np.bool_),
            predecessor=np.array(predecessors, np.int64),
            pause_ns=np.array([request.pause_ns for request in task_requests], np.int64),
        )


class ReplayedSessions(SessionSequence):
    """The sessions of a trace, which start again from the first when all have been used."""

    def __init__(self, sessions: TraceSessions) -> None:
        self._sessions = sessions
        self.max_turns = sessions.max_turns
        self.max_parallel_turns = sessions.max_concurrent_requests
        self._cached_session = functools.lru_cache(maxsize=_CACHED_SESSIONS)(self._build_session)

    @override
    def get(self, index: int) -> Session:
        return self._cached_session(index)

    def _build_session(self, index: int) -> Session:
        """Return the recorded session that session `index` repeats."""
        recorded_index = index % len(self._sessions)
        if self._sessions.is_single_request[recorded_index]:
            return SINGLE_REQUEST
        graph = self._sessions.graph(recorded_index)
        predecessor_counts = tuple(len(predecessors) for predecessors in graph.predecessors)
        return Session(predecessor_counts, _successors(graph.predecessors), graph.pauses_ns)

    @override
    def turn_counts(self, first: int, count: int) -> Ints:
        counts: Ints = self._sessions.turn_counts[self._recorded_indexes(first, count)]
        return counts

    @override
    def columns(self, first: int, count: int) -> SessionColumns:
        """Return `count` sessions, from session `first` on, as columns.

        The recorded sessions are used one after the other, and then again from the first. If a turn
        waits for several others, the column `predecessor` has only the highest of these.

        This loses nothing that a run needs. The columns only describe the schedule to users, while
        the dispatcher decides when a turn starts by the complete graph that `get` returns.
        """
        recorded_indexes = self._recorded_indexes(first, count)

        predecessors: list[int] = []
        pauses_ns: list[int] = []
        for recorded_index in recorded_indexes.tolist():
            graph = self._sessions.graph(recorded_index)
            predecessors.extend(_highest_turn(turns) for turns in graph.predecessors)
            pauses_ns.extend(graph.pauses_ns)

        return SessionColumns(
            turn_counts=self._sessions.turn_counts[recorded_indexes],
            is_single_request=self._sessions.is_single_request[recorded_indexes],
            predecessor=np.array(predecessors, np.int64),
            pause_ns=np.array(pauses_ns, np.int64),
        )

    def _recorded_indexes(self, first: int, count: int) -> Ints:
        """Return which session of the trace each of `count` sessions repeats, by its index."""
        return np.arange(first, first + count) % len(self._sessions)


class TrajectorySessions(SessionSequence):
    """Sessions that replay recorded trajectories.

    Each turn but the first follows the turn before it after the recorded pause, which is at most
    the idle cap.
    """

    max_parallel_turns = 1

    def __init__(self, plays: TrajectoryPlays, idle_cap_ns: int) -> None:
        """Create the sessions of some plays, with pauses of at most `idle_cap_ns`."""
        self.max_turns = plays.max_turns
        self._plays = plays
        self._idle_cap_ns = idle_cap_ns
        self._cached_session = functools.lru_cache(_CACHED_SESSIONS)(self._build_session)

    @override
    def get(self, index: int) -> Session:
        return self._cached_session(index)

    def _build_session(self, index: int) -> Session:
        """Return a session, in which each turn waits for the one before it."""
        play = self._plays.play(index)
        last_turn = play.turn_count - 1
        following_turns = tuple((turn + 1,) for turn in range(last_turn))
        return Session(
            predecessor_counts=(0, *(1,) * last_turn),
            successors=(*following_turns, ()),
            pauses_ns=self._pauses_ns(play),
        )

    def _pauses_ns(self, play: Play) -> tuple[int, ...]:
        """Return the pause before each turn of a play. The first turn follows nothing."""
        turns = self._plays.data[play.trajectory].turns
        sent_turns = turns[play.first_turn : play.first_turn + play.turn_count]
        later_pauses_ns = [min(turn.delay_ns, self._idle_cap_ns) for turn in sent_turns[1:]]
        return (0, *later_pauses_ns)

    @override
    def affinity(self, index: int) -> int:
        """Return the number of the play, which the session that fills the cache has as well."""
        return self._plays.play(index).number

    @override
    def turn_counts(self, first: int, count: int) -> Ints:
        return self._plays.turn_counts(first, count)

    @override
    def columns(self, first: int, count: int) -> SessionColumns:
        """Return `count` sessions, from session `first` on, as columns with one value per turn."""
        predecessors: list[int] = []
        pauses_ns: list[int] = []
        for index in range(first, first + count):
            session = self.get(index)
            predecessors += [NOT_APPLICABLE, *range(session.turn_count - 1)]
            pauses_ns += session.pauses_ns

        return SessionColumns(
            turn_counts=self.turn_counts(first, count),
            is_single_request=np.zeros(count, np.bool_),
            predecessor=np.array(predecessors, np.int64),
            pause_ns=np.array(pauses_ns, np.int64),
        )


class MixedSessions(SessionSequence):
    """Sessions of several request classes. The class of a session depends on its number."""

    def __init__(self, mix: Mix, seed: int) -> None:
        """Prepare a sequence of sessions for each request class of the mix.

        The class of session n is drawn from the seed and n, and its content is session n of the
        sequence of that class. With the classes chat, code, chat for the sessions 0, 1 and 2, the
        run has chat session 0, code session 1 and chat session 2. Chat session 1 is never sent.
        """
        classes = list(mix.classes.values())
        sequences = [build_sessions(request_class.requests, seed) for request_class in classes]
        self._seed = seed
        self._weights = [float(request_class.weight) for request_class in classes]
        self._sessions_of_class = sequences
        self._has_several_turns = np.array([sequence.max_turns > 1 for sequence in sequences])
        self.max_turns = max(sequence.max_turns for sequence in sequences)
        self.max_parallel_turns = max(sequence.max_parallel_turns for sequence in sequences)

        # Drawing the classes of a block of sessions costs about as much as drawing one.
        self._cached_block = functools.lru_cache(maxsize=_CACHED_BLOCKS)(self._block_as_list)

    @override
    def get(self, index: int) -> Session:
        block, index_in_block = divmod(index, _CLASSES_PER_BLOCK)
        class_index = self._cached_block(block)[index_in_block]
        session = self._sessions_of_class[class_index].get(index)
        if self._has_several_turns[class_index]:
            return session
        # A task of one step has the slot id of a single request, as in `columns`.
        return msgspec.structs.replace(session, is_single_request=True)

    @override
    def turn_counts(self, first: int, count: int) -> Ints:
        class_indexes = self._draw_classes(first, count)
        counts = np.ones(count, np.int64)
        # All other sessions are single requests.
        for index in np.flatnonzero(self._has_several_turns[class_indexes]).tolist():
            class_sessions = self._sessions_of_class[class_indexes[index]]
            counts[index] = class_sessions.turn_counts(first + index, 1)[0]
        return counts

    @override
    def columns(self, first: int, count: int) -> SessionColumns:
        """Return `count` sessions, from session `first` on, as columns.

        The columns `predecessor` and `pause_ns` have one row per turn, the turns of each session
        one after the other. With turn counts of 1, 3 and 1, the second session has the rows 1 to 3.

        Most sessions usually are single requests, whose turn waits for nothing. So all rows begin
        with these values, and only those of conversations and tasks are overwritten.
        """
        turn_counts = self.turn_counts(first, count)
        end_rows = np.cumsum(turn_counts)
        predecessors = np.full(int(turn_counts.sum()), NOT_APPLICABLE)
        pauses_ns = np.zeros(len(predecessors), np.int64)

        classes = self._draw_classes(first, count)
        has_several_turns = self._has_several_turns[classes]
        for index in np.flatnonzero(has_several_turns).tolist():
            class_sessions = self._sessions_of_class[classes[index]]
            session = class_sessions.columns(first + index, count=1)
            rows = slice(end_rows[index] - turn_counts[index], end_rows[index])
            predecessors[rows] = session.predecessor
            pauses_ns[rows] = session.pause_ns

        return SessionColumns(
            turn_counts=turn_counts,
            is_single_request=np.logical_not(has_several_turns),
            predecessor=predecessors,
            pause_ns=pauses_ns,
        )

    def _block_as_list(self, block: int) -> list[int]:
        """Return the class indexes of the sessions of a block."""
        first = block * _CLASSES_PER_BLOCK
        class_indexes: list[int] = self._draw_classes(first, _CLASSES_PER_BLOCK).tolist()
        return class_indexes

    def _draw_classes(self, first: int, count: int) -> Ints:
        """Return the class index of each of `count` sessions, from session `first` on."""
        return seeds.draw_classes(self._seed, self._weights, np.arange(first, first + count))


def build_sessions(
    requests: Synthetic | FromFile | FromTrace | Trajectories | Task | Mix,
    seed: int,
    cache_fills: int = 0,
) -> SessionSequence:
    """Return the sessions that the requests of a workload form.

    A session is a conversation, a task (a graph of requests), a session of a trace that is replayed
    as such, a trajectory of a data set, or else a single request.

    Args:
        requests: The requests.
        seed: Decides what is drawn for each session.
        cache_fills: How many sessions at the start fill the cache of the server, for trajectories
            that begin in the middle.
    """
    match requests:
        case Mix():
            return _build_mixed_sessions(requests, seed)
        case Task():
            return Tasks(requests, seed)
        case FromTrace(replay="sessions"):
            return _build_replayed_sessions(requests)
        case Trajectories():
            return _build_trajectory_sessions(requests, seed, cache_fills)
        case Synthetic(turns=turns) if turns is not None and turns.count > 1:
            return Conversations(seed, turns.tool_time, turns.count)
    return SingleRequests()


def _build_mixed_sessions(mix: Mix, seed: int) -> SessionSequence:
    """Return the sessions of several request classes.

    If all classes send single requests, these are scheduled alike, so that the class of each need
    not be drawn for the schedule.
    """
    mixed_sessions = MixedSessions(mix, seed)
    has_only_single_requests = mixed_sessions.max_turns == 1
    return SingleRequests() if has_only_single_requests else mixed_sessions


def _build_replayed_sessions(requests: FromTrace) -> SessionSequence:
    """Return the sessions that a trace recorded."""
    # Runs without a trace do not need these modules.
    from loadgen.core.workload import trace_sessions, traces

    trace = traces.read_replayed_trace(requests)
    return ReplayedSessions(trace_sessions.build_sessions(trace))


def _build_trajectory_sessions(
    requests: Trajectories, seed: int, cache_fills: int
) -> SessionSequence:
    """Return the sessions of a data set of trajectories."""
    # Runs without such a data set do not need these modules.
    from loadgen.core.requests.trajectory_plays import TrajectoryPlays
    from loadgen.core.workload.trajectory_data import read_trajectories

    data = read_trajectories(requests.trajectories)
    plays = TrajectoryPlays(data, requests, seed, cache_fills)
    if plays.max_turns == 1:
        return SingleRequests()
    return TrajectorySessions(plays, requests.idle_cap_ns)


def _highest_turn(predecessors: Sequence[int]) -> int:
    """Return the highest of the turns that a turn waits for, or NOT_APPLICABLE for none."""
    return max(predecessors, default=NOT_APPLICABLE)


def _successors(predecessors: Sequence[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Return, for each turn, the turns that wait for it.

    `predecessors` has the opposite direction: for each turn, the turns that it waits for.
    """
    successors: list[list[int]] = [[] for _ in predecessors]
    for turn, earlier_turns in enumerate(predecessors):
        for earlier_turn in earlier_turns:
            successors[earlier_turn].append(turn)
    return tuple(tuple(turns) for turns in successors)


def _draw_delays(delay: Delay, rng: np.random.Generator, shape: tuple[int, int]) -> Ints:
    """Draw delays in ns from a distribution, each at least 0 and within its `min` and `max`."""
    match delay:
        case Fixed(value=value):
            return np.full(shape, value, np.int64)
        case Uniform(min=low, max=high):
            return rng.integers(low, high, shape, endpoint=True)
        case Empirical(values=values, weights=weights):
            probabilities = None if weights is None else np.asarray(weights) / sum(weights)
            return rng.choice(np.asarray(values, np.int64), shape, p=probabilities)
        case Normal(mean=mean, stddev=stddev):
            return _draw_within_bounds(lambda n: rng.normal(mean, stddev, n), delay, shape)
        case LogNormal(sigma=sigma):
            mu = lognormal_mu(delay)
            return _draw_within_bounds(lambda n: rng.lognormal(mu, sigma, n), delay, shape)
    raise ValueError(f"{delay!r} is not a distribution of delays")


def _draw_within_bounds(
    draw: Callable[[int], NDArray[np.float64]],
    distribution: Normal | LogNormal,
    shape: tuple[int, int],
) -> Ints:
    """Draw delays in ns from a distribution that is truncated to its `min` and `max`.

    Values outside these bounds are drawn again (rejection sampling), so that they do not pile up at
    a bound. Bounds far from the mean could make that endless, so values that are still outside
    after _MAX_REDRAWS attempts are clipped.

    Args:
        draw: Returns n values of the distribution without bounds.
        distribution: The distribution, for its bounds. Without `min` the lower bound is 0.
        shape: The shape of the result.
    """
    min_ns = distribution.min or 0
    max_ns = LONGEST_NS if distribution.max is None else distribution.max
    rows, columns = shape

    delays_ns = np.rint(draw(rows * columns))
    for _ in range(_MAX_REDRAWS):
        is_outside = (delays_ns < min_ns) | (delays_ns > max_ns)
        outside_count = int(np.count_nonzero(is_outside))
        if outside_count == 0:
            break
        delays_ns[is_outside] = np.rint(draw(outside_count))

    return np.clip(delays_ns, min_ns, max_ns).astype(np.int64).reshape(shape)
