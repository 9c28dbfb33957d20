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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.errors import UserError
from loadgen.core.workload.request_kinds import FromTrace
from loadgen.core.workload.stages import Replay
from loadgen.core.workload.tasks import MAX_TASK_REQUESTS
from loadgen.core.workload.trace import NO_VALUE, Trace, end_of_arrivals_ns
from loadgen.core.workload.traces import read_replayed_trace

GRAPHS_CACHED = 4096  # Sessions in progress have nearby numbers.
TRACES_CACHED = 4

Integers = NDArray[np.int64]


class SessionGraph(NamedTuple):
    """The graph of the requests of a session, in order of time.

    Attributes:
        predecessors: For each request, those that it waits for.
        pauses_ns: For each request, the pause after the last of its predecessors has ended.
    """

    predecessors: tuple[tuple[int, ...], ...]
    pauses_ns: tuple[int, ...]


class _RowsBySession(NamedTuple):
    """Which rows of a trace each session has, in order of time.

    For example, if the rows 0 to 3 belong to the sessions 0, 1, 0 and 1, `grouped_rows` is [0, 2,
    1, 3]. Session 0 has the 2 rows from index 0 on, and session 1 has the 2 rows from index 2 on.

    Attributes:
        grouped_rows: The rows of all sessions, one session after the other.
        starts: The index in `grouped_rows` at which each session starts.
        row_counts: How many rows each session has.
    """

    grouped_rows: Integers
    starts: Integers
    row_counts: Integers

    def first_rows(self) -> Integers:
        """Return the first row of each session, the earliest one."""
        return self.grouped_rows[self.starts]

    def of_session(self, session: int) -> Integers:
        """Return the rows of one session."""
        start = self.starts[session]
        return self.grouped_rows[start : start + self.row_counts[session]]


def _group_rows_by_session(session_of_row: Integers) -> _RowsBySession:
    """Return the rows of each session, for rows that are in order of time."""
    row_counts = np.bincount(session_of_row)
    ends = np.cumsum(row_counts)
    return _RowsBySession(
        # A stable sort keeps the rows of a session in order of time.
        grouped_rows=np.argsort(session_of_row, kind="stable"),
        starts=ends - row_counts,
        row_counts=row_counts,
    )


class TraceSessions:
    """The sessions of a trace in order of their first request.

    A request that belongs to no session is a session by itself.

    Attributes:
        trace: The trace.
        turn_counts: The number of requests of each session.
        due_ns: When the first request of each session was sent.
        is_single_request: True for a session that is only a request without a recorded session.
        max_turns: The number of requests of the largest session.
        max_concurrent_requests: How many requests of one session can be in flight at a time: each
            of its agents has one.
        graph: Returns the graph of a session by its number.
    """

    def __init__(self, trace: Trace) -> None:
        """Group the rows of a trace by session, and check that the sessions can be replayed.

        A row of the trace is a request. Raises UserError if the trace does not say how long
        responses took, or if a session is too long.
        """
        self.trace = trace
        session_of_row = _number_sessions(trace)
        self._rows = _group_rows_by_session(session_of_row)
        first_rows = self._rows.first_rows()

        self.turn_counts: Integers = self._rows.row_counts
        self.due_ns: Integers = trace.due_ns[first_rows]
        self.is_single_request: NDArray[np.bool_] = ~trace.has_session[first_rows]
        self.max_turns = int(self.turn_counts.max())
        self.max_concurrent_requests = _max_agents(session_of_row, trace.session)

        # `_build_graph` with a cache, because each request of a session needs the graph.
        self.graph = functools.lru_cache(GRAPHS_CACHED)(self._build_graph)

        self._check_size()
        self._check_durations(session_of_row, first_rows)

    def __len__(self) -> int:
        return len(self.turn_counts)

    @property
    def end_ns(self) -> int:
        """The end of the arrivals of sessions: one mean gap after the last."""
        return end_of_arrivals_ns(self.due_ns)

    def rows(self, session: int) -> Integers:
        """Return the rows of a session in order of time."""
        return self._rows.of_session(session)

    def _check_size(self) -> None:
        """Raise UserError if a session has more requests than a task may have."""
        if self.max_turns > MAX_TASK_REQUESTS:
            problem = (
                f"a session of the trace has {self.max_turns:,} requests, at most "
                f"{MAX_TASK_REQUESTS:,} are allowed"
            )
            hint = (
                "use a part of the trace with --set trace_slice=..10m, or --set "
                "trace_replay=instants"
            )
            raise UserError("too_large", problem, str(self.trace.path), hint)

    def _check_durations(self, session_of_row: Integers, first_rows: Integers) -> None:
        """Raise UserError if the pauses of some sessions are neither recorded nor computable.

        A pause that is not recorded is computed from the times at which earlier responses ended. So
        a session cannot be replayed if it lacks both: some pause, and the duration of some
        response.

        Args:
            session_of_row: The session of each row of the trace.
            first_rows: The first row of each session, which needs no pause before it.
        """
        needs_pause = np.ones(len(self.trace), bool)
        needs_pause[first_rows] = False
        lacks_pause = needs_pause & ~self.trace.has_pause

        session_lacks_pause = self._has_row_with(lacks_pause, session_of_row)
        session_lacks_duration = self._has_row_with(~self.trace.has_duration, session_of_row)

        unusable_count = np.count_nonzero(session_lacks_pause & session_lacks_duration)
        if unusable_count:
            problem = (
                "the trace records neither when responses ended nor the pauses "
                f"before the next request, so {unusable_count:,} of its {len(self):,} "
                "sessions cannot be replayed"
            )
            hint = (
                "replay instants, or use a format that records when responses end: "
                "Weka, TraceLab, OpenTelemetry, loadgen_sdk"
            )
            raise UserError("unsupported", problem, str(self.trace.path), hint)

    def _has_row_with(
        self, condition: NDArray[np.bool_], session_of_row: Integers
    ) -> NDArray[np.bool_]:
        """Return for each session whether a condition holds for any of its rows."""
        return np.bincount(session_of_row[condition], minlength=len(self)) > 0

    def _build_graph(self, session_index: int) -> SessionGraph:
        """Return the graph of a session: which of its requests wait for which, and for how long.

        The requests are numbered by their turns, from 0 on in order of time. A session may have
        several agents, a main agent and its sub-agents.
        """
        rows = self.rows(session_index)
        times = _RequestTimes.of_rows(self.trace, rows)

        # In the trace, the agents of a session share a `group`, and each has another `session`.
        agent_of_turn = self.trace.session[rows].tolist()
        predecessors = _find_predecessors(_group_turns_by_agent(agent_of_turn), times)
        pauses_ns = [
            _pause_ns(turn, earlier_turns, times) for turn, earlier_turns in enumerate(predecessors)
        ]
        sorted_predecessors = [tuple(sorted(earlier_turns)) for earlier_turns in predecessors]

        return SessionGraph(tuple(sorted_predecessors), tuple(pauses_ns))


class _RequestTimes(NamedTuple):
    """The recorded times of the requests of a session.

    Attributes:
        sent_ns: When each request was sent.
        end_ns: When its response ended, or when it was sent if that is not known.
        pause_ns: The pause before it, or None if the trace does not record it.
    """

    sent_ns: list[int]
    end_ns: list[int]
    pause_ns: list[int | None]

    @classmethod
    def of_rows(cls, trace: Trace, rows: Integers) -> _RequestTimes:
        """Return the times of some rows of a trace."""
        sent_ns = trace.due_ns[rows]
        end_ns = sent_ns + np.where(trace.has_duration[rows], trace.duration_ns[rows], 0)
        pauses_ns = zip(trace.pause_ns[rows].tolist(), trace.has_pause[rows].tolist(), strict=True)
        return cls(
            sent_ns=sent_ns.tolist(),
            end_ns=end_ns.tolist(),
            pause_ns=[pause_ns if is_recorded else None for pause_ns, is_recorded in pauses_ns],
        )


def _group_turns_by_agent(agent_of_turn: list[int]) -> list[list[int]]:
    """Return the turns of each agent of a session, in the order of the agents' first turns.

    For example, the agents 5, 8, 5 of the turns 0 to 2 give [[0, 2], [1]].
    """
    turns_by_agent: dict[int, list[int]] = {}
    for turn, agent in enumerate(agent_of_turn):
        turns_by_agent.setdefault(agent, []).append(turn)
    return list(turns_by_agent.values())


def _number_sessions(trace: Trace) -> Integers:
    """Return the number of the session of each row, from 0 on in order of their first rows.

    All rows of a session have the same group in the trace. A row without a group is a session by
    itself. For example, the groups 7, none, 3, 7 are the sessions 0, 1, 2, 0.
    """
    group_of_row = _replace_missing_groups(trace.group)

    # `np.unique` sorts the distinct groups. For each of them it returns the first row, and for each
    # row the index of its group. In the example, the rows have the groups 7, 9, 3 and 7:
    #
    #     group                          3  7  9
    #     first row, by np.unique        2  0  1
    #     number of the session          2  0  1
    _, first_row_of_group, group_index_of_row = np.unique(
        group_of_row, return_index=True, return_inverse=True
    )
    session_of_group = _ranks(first_row_of_group)
    return session_of_group[group_index_of_row]


def _replace_missing_groups(groups: Integers) -> Integers:
    """Return the groups of rows, with a new group for each row that has none.

    For example, 7, none, 3, 7 becomes 7, 9, 3, 7.
    """
    first_unused_group = int(groups.max(initial=NO_VALUE)) + 1
    unused_groups = first_unused_group + np.arange(len(groups))
    return np.where(groups == NO_VALUE, unused_groups, groups)


def _ranks(values: Integers) -> Integers:
    """Return the rank of each of several distinct values, 0 for the smallest one.

    For example, the values 20, 0 and 10 have the ranks 2, 0 and 1.
    """
    indexes_in_order = np.argsort(values)  # 1, 2 and 0 in the example
    ranks = np.empty(len(values), np.int64)
    ranks[indexes_in_order] = np.arange(len(values))
    return ranks


def _max_agents(session_of_row: Integers, agent_of_row: Integers) -> int:
    """Return the largest number of agents in a session.

    Each agent has one request in flight at a time. The arguments are the session and the agent of
    each row of the trace. Agents of different sessions are different, even with equal numbers.
    """
    session_and_agent_of_row = np.stack((session_of_row, agent_of_row))
    distinct_agents = np.unique(session_and_agent_of_row, axis=1)  # one column per agent
    session_of_agent = distinct_agents[0]
    return int(np.bincount(session_of_agent).max())


class _Wait(NamedTuple):
    """One request of a session that waits for another one. Both are identified by their turns."""

    waiting_turn: int
    awaited_turn: int


def _find_predecessors(turns_by_agent: list[list[int]], times: _RequestTimes) -> list[set[int]]:
    """Return for each request of a session the requests that it waits for.

    Requests are identified by their turns, their positions in the session in order of time. For
    example, [[0, 1, 4], [2, 3]] are the turns of a main agent and a sub-agent. If request 1 started
    the sub-agent, and request 4 was sent after its end, the result is [{}, {0}, {1}, {2}, {1, 3}].

    Args:
        turns_by_agent: The turns of each agent. The first one is the main agent, which sent the
            first request of the session.
        times: When each request was sent and ended.
    """
    main_turns, *turns_by_sub_agent = turns_by_agent
    waits = [wait for agent_turns in turns_by_agent for wait in _waits_within_agent(agent_turns)]
    for sub_agent_turns in turns_by_sub_agent:
        waits += _waits_around_sub_agent(main_turns, sub_agent_turns, times)

    predecessors: list[set[int]] = [set() for _ in times.sent_ns]
    for wait in waits:
        predecessors[wait.waiting_turn].add(wait.awaited_turn)

    # The session must end with its last request, so that one also waits for all requests for which
    # no other one waits.
    last_turn = len(predecessors) - 1
    awaited_turns = {wait.awaited_turn for wait in waits}
    predecessors[last_turn].update(set(range(last_turn)) - awaited_turns)

    return predecessors


def _waits_within_agent(agent_turns: list[int]) -> list[_Wait]:
    """Return the waits of an agent: each of its requests waits for its previous one."""
    return [
        _Wait(waiting_turn=later_turn, awaited_turn=earlier_turn)
        for earlier_turn, later_turn in itertools.pairwise(agent_turns)
    ]


def _waits_around_sub_agent(
    main_turns: list[int], sub_agent_turns: list[int], times: _RequestTimes
) -> list[_Wait]:
    """Return how a sub-agent begins and ends between requests of the main agent.

    Its first request waits for the request of the main agent that probably started it. The next
    request of the main agent after its end waits for its last request.
    """
    first_turn = sub_agent_turns[0]
    last_turn = sub_agent_turns[-1]
    starting_turn = _find_starting_turn(main_turns, first_turn, times)
    waits = [_Wait(waiting_turn=first_turn, awaited_turn=starting_turn)]

    next_main_turn = _find_waiting_turn(main_turns, last_turn, times)
    if next_main_turn is not None:
        waits.append(_Wait(waiting_turn=next_main_turn, awaited_turn=last_turn))

    return waits


def _find_starting_turn(main_turns: list[int], first_turn: int, times: _RequestTimes) -> int:
    """Return the request of the main agent that probably started a sub-agent.

    It is the last request that had ended before the sub-agent sent its first request
    (`first_turn`). If no request had ended by then, it is the last one that had been sent. There is
    at least one, because the main agent sends the first request of a session.
    """
    sent_before = [turn for turn in main_turns if turn < first_turn]
    ended_before = [turn for turn in sent_before if times.end_ns[turn] <= times.sent_ns[first_turn]]
    return ended_before[-1] if ended_before else sent_before[-1]


def _find_waiting_turn(main_turns: list[int], last_turn: int, times: _RequestTimes) -> int | None:
    """Return the first request that the main agent sent after the end of a sub-agent, if any.

    `last_turn` is the last request of the sub-agent.
    """
    end_ns = times.end_ns[last_turn]
    for turn in main_turns:
        # Several requests may have the same time. The comparison of turns makes sure that no
        # request waits for a later turn, which could be a cycle.
        if turn > last_turn and times.sent_ns[turn] >= end_ns:
            return turn
    return None


def _pause_ns(turn: int, predecessors: set[int], times: _RequestTimes) -> int:
    """Return the pause in ns between the end of the requests that a request waits for and itself.

    `turn` is the request, and `predecessors` are the requests that it waits for. A trace records
    the pause after one request, so the recorded pause is only used if there is one predecessor.
    Otherwise the pause is inferred from the times at which requests were sent and ended. It is 0 if
    they overlap, and for the first request of a session.
    """
    if not predecessors:
        return 0

    recorded_pause_ns = times.pause_ns[turn]
    if recorded_pause_ns is not None and len(predecessors) == 1:
        return recorded_pause_ns

    last_end_ns = max(times.end_ns[predecessor] for predecessor in predecessors)
    return max(0, times.sent_ns[turn] - last_end_ns)


@functools.lru_cache(TRACES_CACHED)
def build_sessions(trace: Trace) -> TraceSessions:
    """Return the sessions of a trace. Raises UserError if they cannot be replayed."""
    return TraceSessions(trace)


def read_replay_source(source: FromTrace | Replay) -> Trace | TraceSessions:
    """Return the arrivals of a trace that is replayed: those of its sessions, or of its requests.

    - A replay of sessions (`TraceSessions`) starts each session at its recorded time. Each later
      request waits for the responses to earlier ones.
    - A replay of requests (`Trace`) sends each request at its recorded time.

    Both types have a length, the times of arrival (`due_ns`) and the end of the arrivals
    (`end_ns`), as an arrival schedule needs them.

    Raises UserError if single requests are replayed and the trace does not say when each of them
    was sent.
    """
    trace = read_replayed_trace(source)
    if source.replay == "sessions":
        return build_sessions(trace)

    if trace.untimed_rows:
        problem = (
            f"{trace.untimed_rows:,} of {len(trace):,} rows have no timestamp, only the pause "
            "before them in their session"
        )
        hint = "use --set trace_replay=sessions"
        raise UserError("unsupported", problem, str(trace.path), hint)

    return trace
