"""The sessions of a trace as chains: which of their requests wait for which, and for how long. Pure.

A session is a conversation, or the work of an agent with its sub-agents. The requests of an agent follow each other. A
sub-agent begins after the last request of the agent that had ended before it (else that was sent), and the first
request that the agent sent after a sub-agent had ended waits for it. What lies between the recorded end of what a
request waits for and the request is the time of a tool or of the user; where the two overlap it is 0.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.core.errors import UserError
from loadgen.core.workload.request_kinds import FromTrace
from loadgen.core.workload.stages import Replay
from loadgen.core.workload.tasks import MOST_REQUESTS
from loadgen.core.workload.traces import Trace, read_replayed_trace

GRAPHS_KEPT = 4096  # sessions in progress have nearby numbers
Ints = NDArray[np.int64]


class SessionGraph(NamedTuple):
    """For each request of a session, in order of time: those that it waits for, and the pause in ns after the last."""

    waits: tuple[tuple[int, ...], ...]
    pauses: tuple[int, ...]


class TraceSessions:
    """The sessions of a trace in order of their first request; a request without one is a session by itself."""

    def __init__(self, trace: Trace) -> None:
        """Raises UserError where the trace does not say how long answers took, or a session is too long."""
        self.trace = trace
        alone = trace.group < 0
        named = np.where(
            alone, int(trace.group.max(initial=-1)) + 1 + np.arange(len(trace)), trace.group
        )
        _, first, inverse = np.unique(named, return_index=True, return_inverse=True)
        number = np.argsort(np.argsort(first))[inverse]  # of the session of each row
        self._rows: Ints = np.argsort(number, kind="stable")
        self.sizes: Ints = np.bincount(number)
        self._starts: Ints = np.cumsum(self.sizes) - self.sizes
        firsts = self._rows[self._starts]
        self.due_ns: Ints = trace.due_ns[firsts]
        self.is_session: NDArray[np.bool_] = ~alone[firsts]
        self.turns = int(self.sizes.max())
        agents = np.unique(np.stack((number, trace.session)), axis=1)[0]
        self.max_concurrent_requests = int(np.bincount(agents).max())
        self.graph = functools.lru_cache(maxsize=GRAPHS_KEPT)(self._graph)
        self._check(number)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def end_ns(self) -> int:
        """End of the starts: one mean gap after the last."""
        n, last = len(self), int(self.due_ns[-1])
        return last + (last // (n - 1) if n > 1 else 0)

    def rows(self, session: int) -> Ints:
        """The rows of a session, in order of time."""
        start = self._starts[session]
        return self._rows[start : start + self.sizes[session]]

    def _check(self, number: Ints) -> None:
        path = str(self.trace.path)
        if self.turns > MOST_REQUESTS:
            problem = (
                f"a session of the trace has {self.turns:,} requests, at most {MOST_REQUESTS:,}"
            )
            raise UserError(
                "too_large",
                problem,
                path,
                "--set trace_slice=..10m, or --set trace_replay=instants",
            )
        later = np.ones(len(self._rows), bool)
        later[self._starts] = False
        asks = np.zeros(len(self), bool)  # sessions of which the end of an answer is needed
        np.logical_or.at(asks, number[self._rows], later & (self.trace.pause_ns[self._rows] < 0))
        unknown = np.zeros(len(self), bool)
        np.logical_or.at(unknown, number, self.trace.took_ns < 0)
        if (bad := np.flatnonzero(asks & unknown)).size:
            problem = (
                f"the trace does not say when answers ended, nor the pause before the next request: "
                f"{bad.size:,} of its {len(self):,} sessions cannot be replayed as such"
            )
            hint = "replay its instants; or a trace with ends of answers: Weka, TraceLab, OpenTelemetry, loadgen_sdk"
            raise UserError("unsupported", problem, path, hint)

    def _graph(self, session: int) -> SessionGraph:
        rows = self.rows(session)
        at, took, pause, agents = (
            column[rows].tolist()
            for column in (
                self.trace.due_ns,
                self.trace.took_ns,
                self.trace.pause_ns,
                self.trace.session,
            )
        )
        ends = [start + max(length, 0) for start, length in zip(at, took, strict=True)]
        waits: list[set[int]] = [set() for _ in rows]
        of_agent: dict[int, list[int]] = {}
        for place, agent in enumerate(agents):
            if agent in of_agent:
                waits[place].add(of_agent[agent][-1])
            of_agent.setdefault(agent, []).append(place)
        main = of_agent[agents[0]]
        main_at = [at[place] for place in main]
        for agent, places in of_agent.items():
            if agent == agents[0]:
                continue
            sent = main[: bisect_left(main, places[0])]
            over = [place for place in sent if ends[place] <= at[places[0]]]
            waits[places[0]].add((over or sent)[-1])
            joins = main[
                max(bisect_left(main, places[-1]), bisect_left(main_at, ends[places[-1]])) :
            ]
            if joins:
                waits[joins[0]].add(places[-1])
        last = len(rows) - 1
        awaited = set[int]().union(*waits)
        waits[last] |= {
            place for place in range(last) if place not in awaited
        }  # a session ends with one request
        pauses = [0] * len(rows)
        for place, before in enumerate(waits):
            if pause[place] >= 0 and len(before) == 1:
                pauses[place] = pause[place]
            elif before:
                pauses[place] = max(0, at[place] - max(ends[one] for one in before))
        return SessionGraph(tuple(tuple(sorted(before)) for before in waits), tuple(pauses))


@functools.lru_cache(maxsize=4)
def build_sessions(trace: Trace) -> TraceSessions:
    """The sessions of a trace. Raises UserError where they cannot be replayed as such."""
    return TraceSessions(trace)


def replay_starts(by: FromTrace | Replay) -> Trace | TraceSessions:
    """What starts when a trace is replayed: its requests, or its sessions. Both have `due_ns` and `end_ns`.

    Raises UserError where the trace does not tell when they did.
    """
    trace = read_replayed_trace(by)
    if trace.untimed and by.replay != "sessions":
        problem = f"{trace.untimed:,} of {len(trace):,} rows have no timestamp, but the pause before them in their session"
        raise UserError("unsupported", problem, str(trace.path), "--set trace_replay=sessions")
    return build_sessions(trace) if by.replay == "sessions" else trace
