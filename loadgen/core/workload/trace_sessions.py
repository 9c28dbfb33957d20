"""The sessions of a trace: which of their requests wait for which, and for how long.

A session is a conversation, or the work of an agent with its sub-agents. The requests of an agent
follow each other. A sub-agent begins after the last request of the main agent that had ended before
it, or else that had been sent before it. The first request that the main agent sent after a
sub-agent had ended waits for that sub-agent. The time between the recorded end of what a request
waits for and the request is the time of a tool or of the user. It is 0 where the two overlap.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.errors import UserError
from loadgen.core.workload.request_kinds import FromTrace
from loadgen.core.workload.stages import Replay
from loadgen.core.workload.tasks import MAX_TASK_REQUESTS
from loadgen.core.workload.trace import NO_VALUE, Trace, end_of_starts_ns
from loadgen.core.workload.traces import read_replayed_trace

GRAPHS_CACHED = 4096  # Sessions in progress have nearby numbers.
TRACES_CACHED = 4

Integers = NDArray[np.int64]


class SessionGraph(NamedTuple):
    """The graph of the requests of a session, in order of time.

    Attributes:
        waits: For each request, those that it waits for.
        pauses: For each request, the pause in ns after the last of them has ended.
    """

    waits: tuple[tuple[int, ...], ...]
    pauses: tuple[int, ...]


class TraceSessions:
    """The sessions of a trace in order of their first request.

    A request that belongs to no session is a session by itself.

    Attributes:
        trace: The trace.
        sizes: The number of requests of each session.
        due_ns: When the first request of each session was sent.
        is_session: False for a request that belongs to no session.
        turns: The number of requests of the largest session.
        max_concurrent_requests: The largest number of agents in a session.
    """

    def __init__(self, trace: Trace) -> None:
        """Find the sessions of a trace.

        Raises UserError if the trace does not say how long responses took, or if a session is too
        long.
        """
        self.trace = trace
        # Rows are grouped by session with a stable sort, so they stay in order of time. The rows of
        # session n are the `sizes[n]` rows from `_starts[n]` on in `_rows_by_session`.
        session_of_row = _number_sessions(trace)
        self._rows_by_session: Integers = np.argsort(session_of_row, kind="stable")
        self.sizes: Integers = np.bincount(session_of_row)
        self._starts: Integers = np.cumsum(self.sizes) - self.sizes
        first_rows = self._rows_by_session[self._starts]
        self.due_ns: Integers = trace.due_ns[first_rows]
        self.is_session: NDArray[np.bool_] = trace.group[first_rows] != NO_VALUE
        self.turns = int(self.sizes.max())
        # Each agent has one request in flight at a time. An agent is a pair of a session and the
        # name of a conversation in it.
        agents = np.unique(np.stack((session_of_row, trace.session)), axis=1)
        session_of_agent = agents[0]
        self.max_concurrent_requests = int(np.bincount(session_of_agent).max())
        self.graph = functools.lru_cache(GRAPHS_CACHED)(self._build_graph)
        self._check_size()
        self._check_durations(session_of_row)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def end_ns(self) -> int:
        """The end of the starts: one mean gap after the last."""
        return end_of_starts_ns(self.due_ns)

    def rows(self, session: int) -> Integers:
        """Return the rows of a session in order of time."""
        start = self._starts[session]
        return self._rows_by_session[start : start + self.sizes[session]]

    def _check_size(self) -> None:
        """Raise UserError if a session has more requests than a task may have."""
        if self.turns > MAX_TASK_REQUESTS:
            problem = (
                f"a session of the trace has {self.turns:,} requests, at most {MAX_TASK_REQUESTS:,}"
            )
            hint = "--set trace_slice=..10m, or --set trace_replay=instants"
            raise UserError("too_large", problem, str(self.trace.path), hint)

    def _check_durations(self, session_of_row: Integers) -> None:
        """Raise UserError if sessions lack the durations that their pauses are computed from.

        A session needs them if a later request of it has no recorded pause.
        """
        is_later_row = np.ones(len(self.trace), bool)
        is_later_row[self._rows_by_session[self._starts]] = False
        # Unknown durations are negative.
        lacks_pause = is_later_row & (self.trace.pause_ns < 0)
        needs_durations = self._any_row(session_of_row, lacks_pause)
        lacks_durations = self._any_row(session_of_row, self.trace.took_ns < 0)
        bad_sessions = np.count_nonzero(needs_durations & lacks_durations)
        if bad_sessions:
            problem = (
                "the trace does not say when answers ended, nor the pause before the next request: "
                f"{bad_sessions:,} of its {len(self):,} sessions cannot be replayed as such"
            )
            hint = (
                "replay its instants; or a trace with ends of answers: Weka, TraceLab, "
                "OpenTelemetry, loadgen_sdk"
            )
            raise UserError("unsupported", problem, str(self.trace.path), hint)

    def _any_row(self, session_of_row: Integers, condition: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return for each session whether a condition holds for any of its rows."""
        return np.bincount(session_of_row[condition], minlength=len(self)) > 0

    def _build_graph(self, session: int) -> SessionGraph:
        """Return the graph of a session, whose requests are numbered by their turns from 0 on."""
        rows = self.rows(session)
        times = _RequestTimes.of_rows(self.trace, rows)
        turns_of_agents: dict[int, list[int]] = {}
        for turn, agent in enumerate(self.trace.session[rows].tolist()):
            turns_of_agents.setdefault(agent, []).append(turn)
        waits = _find_waits(list(turns_of_agents.values()), times)
        pauses = [_pause_ns(turn, awaited, times) for turn, awaited in enumerate(waits)]
        return SessionGraph(tuple(tuple(sorted(awaited)) for awaited in waits), tuple(pauses))


class _RequestTimes(NamedTuple):
    """The recorded times of the requests of a session in ns.

    Attributes:
        sent: When each request was sent.
        ended: When its response ended, or when it was sent if that is not known.
        pauses: The recorded pause before it, negative if there is none.
    """

    sent: list[int]
    ended: list[int]
    pauses: list[int]

    @classmethod
    def of_rows(cls, trace: Trace, rows: Integers) -> _RequestTimes:
        """Return the times of some rows of a trace."""
        sent = trace.due_ns[rows]
        # An unknown duration is negative and counts as 0.
        ended = sent + np.maximum(trace.took_ns[rows], 0)
        return cls(sent.tolist(), ended.tolist(), trace.pause_ns[rows].tolist())


def _number_sessions(trace: Trace) -> Integers:
    """Return the number of the session of each row.

    Sessions are numbered from 0 on in order of their first requests. A row that belongs to no group
    is a session by itself.
    """
    belongs_to_group = trace.group != NO_VALUE
    first_unused_group = int(trace.group.max(initial=NO_VALUE)) + 1
    group_of_own = first_unused_group + np.arange(len(trace))
    groups = np.where(belongs_to_group, trace.group, group_of_own)
    _, first_rows, group_index = np.unique(groups, return_index=True, return_inverse=True)
    # Sorting twice gives the rank of each group by its first row.
    rank_of_group = np.argsort(np.argsort(first_rows))
    session_of_row: Integers = rank_of_group[group_index]
    return session_of_row


def _find_waits(turns_of_agents: list[list[int]], times: _RequestTimes) -> list[set[int]]:
    """Return for each request of a session the requests that it waits for.

    The module docstring describes the rules. `turns_of_agents` has the turns of each agent. The
    first of them is the main agent, which sent the first request of the session.
    """
    waits: list[set[int]] = [set() for _ in times.sent]
    for turns in turns_of_agents:
        for earlier, later in itertools.pairwise(turns):
            waits[later].add(earlier)
    main_turns, *turns_of_sub_agents = turns_of_agents
    for turns in turns_of_sub_agents:
        _join_sub_agent(waits, main_turns, turns, times)
    # A session ends with one request, which waits for all that nothing else waits for.
    last = len(waits) - 1
    awaited = set[int]().union(*waits)
    waits[last].update(turn for turn in range(last) if turn not in awaited)
    return waits


def _join_sub_agent(
    waits: list[set[int]], main_turns: list[int], turns: list[int], times: _RequestTimes
) -> None:
    """Add what the first request of a sub-agent waits for, and what waits for its last request.

    The sub-agent begins after the last request of the main agent that had ended before it, or else
    that had been sent before it. There is one, as the main agent sent the first request of all. The
    first request that the main agent sent after the end of the sub-agent waits for it, if there is
    one.
    """
    first = turns[0]
    last = turns[-1]
    sent_before = main_turns[: bisect_left(main_turns, first)]
    ended_before = [turn for turn in sent_before if times.ended[turn] <= times.sent[first]]
    waits[first].add(ended_before[-1] if ended_before else sent_before[-1])
    # Turns are in order of time. The next main request has a later turn, which also avoids cycles
    # among requests with equal times, and it was sent when the sub-agent had ended.
    main_sent_times = [times.sent[turn] for turn in main_turns]
    first_position_by_turn = bisect_left(main_turns, last)
    first_position_by_time = bisect_left(main_sent_times, times.ended[last])
    position = max(first_position_by_turn, first_position_by_time)
    if position < len(main_turns):
        waits[main_turns[position]].add(last)


def _pause_ns(turn: int, awaited: set[int], times: _RequestTimes) -> int:
    """Return the pause before a request, after the last request that it waits for has ended.

    A recorded pause counts from the end of one request, so it is not used if there are several.
    """
    has_recorded_pause = times.pauses[turn] >= 0 and len(awaited) == 1
    if has_recorded_pause:
        return times.pauses[turn]
    if not awaited:
        return 0
    return max(0, times.sent[turn] - max(times.ended[earlier] for earlier in awaited))


@functools.lru_cache(TRACES_CACHED)
def build_sessions(trace: Trace) -> TraceSessions:
    """Return the sessions of a trace. Raises UserError if they cannot be replayed."""
    return TraceSessions(trace)


def replay_starts(replay: FromTrace | Replay) -> Trace | TraceSessions:
    """Return what starts when a trace is replayed: its requests or its sessions.

    Both have `due_ns` and `end_ns`. Raises UserError if the trace does not say when they started.
    """
    trace = read_replayed_trace(replay)
    if replay.replay == "sessions":
        return build_sessions(trace)
    if trace.untimed:
        problem = (
            f"{trace.untimed:,} of {len(trace):,} rows have no timestamp, but the pause before "
            "them in their session"
        )
        hint = "--set trace_replay=sessions"
        raise UserError("unsupported", problem, str(trace.path), hint)
    return trace
