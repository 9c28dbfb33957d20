"""The graph of each task: which requests it has, what each waits for and how long, and which context each continues.

Pure: the graph of task n is a function of (seed, n) alone. The schedule and the prompts both read it here.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from loadgen.core.requests.laws import LengthSampler, derive_key, length_sampler, random_bytes
from loadgen.core.units import LONGEST_NS

if TYPE_CHECKING:
    from loadgen.core.workload.tasks import Task, TaskStep

GRAPHS_KEPT = 4096  # tasks in progress have nearby numbers


class Node(Struct, frozen=True):
    """One request of a task; requests are named by their turn, their place in the order of the task."""

    step: str
    after: tuple[int, ...]  # the requests that must end before; empty for the first of the task
    context: int  # the request whose messages and answer it continues; -1: a new context
    joined: tuple[int, ...]  # the requests whose answers it brings as results
    tool: str  # the kind of tool whose result it brings; "": none
    message: bool  # whether it brings a message of the user
    pause_ns: int  # from the end of the last request it waits for: the tool's work, or the user's thinking
    asks: int = -1  # the earlier request whose message it brings again; -1: none
    first: bool = True  # of the turns of its step


class Abandonment(Struct, frozen=True):
    """Where the user of a task goes away: in the answer of this request, after so many tokens."""

    turn: int
    tokens: int


class TaskGraphs:
    """`graphs[n]`: the requests of task n, each after those that it waits for; the first and the last stand alone."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.width = task, task.width
        self._key = derive_key(seed)
        self._counts = {
            name: (length_sampler(step.turns), length_sampler(step.parallel))
            for name, step in task.steps.items()
        }
        self._think = {name: _delay(step.think_time) for name, step in task.steps.items()}
        self._output = {
            name: length_sampler(step.output_tokens)
            for name, step in task.steps.items()
            if step.output_tokens
        }
        self._kinds = {name: _choice(step.tool) for name, step in task.steps.items() if step.tool}
        self._tool_times = {kind: _delay(tool.time) for kind, tool in task.tools.items()}
        known = task.known_tools
        self._results = {
            name
            for name, step in task.steps.items()
            if step.tool and all(kind in known for kind in step.tool)
        }  # the steps whose tools give a result that is sent on
        self._order = task.order
        self._graph = functools.lru_cache(maxsize=GRAPHS_KEPT)(self._draw)

    def __getitem__(self, number: int) -> tuple[Node, ...]:
        return self._graph(number)

    def output_tokens(self, number: int, turn: int) -> int:
        """Tokens asked for as the answer of a request; 0 of one for embeddings or a ranking."""
        length = self._output.get(self[number][turn].step)
        return 0 if length is None else length(self._key, "output", number * self.width + turn)

    def abandonment(self, number: int) -> Abandonment | None:
        """Where the user of this task goes away; None for one that stays to the end."""
        share = self.task.abandoned
        if (
            not share
            or int.from_bytes(random_bytes(self._key, "leaves", number, 8), "little") * 2.0**-64
            >= share
        ):
            return None
        choice = int.from_bytes(random_bytes(self._key, "leaves at", number, 16), "little")
        chats = [turn for turn in range(len(self[number])) if self.output_tokens(number, turn)]
        turn, rest = chats[choice % len(chats)], choice // len(chats)
        return Abandonment(turn, 1 + rest % max(1, self.output_tokens(number, turn) - 1))

    def _draw(self, number: int) -> tuple[Node, ...]:
        nodes: list[Node] = []
        ends: dict[str, tuple[int, ...]] = {}  # step -> the last request of each of its copies
        for name in self._order:
            step = self.task.steps[name]
            turns, copies = (
                count(self._key, f"{what} {name}", number) for count, what in self._of(name)
            )
            before = tuple(turn for other in step.after for turn in ends[other])
            lasts = []
            for _ in range(copies):
                for turn in range(turns):
                    nodes.append(
                        self._node(number, nodes, name, step, before if not turn else None, ends)
                    )
                lasts.append(len(nodes) - 1)
            ends[name] = tuple(lasts)
        return tuple(nodes)

    def _of(self, name: str) -> tuple[tuple[LengthSampler, str], tuple[LengthSampler, str]]:
        turns, parallel = self._counts[name]
        return (turns, "turns"), (parallel, "parallel")

    def _node(
        self,
        number: int,
        nodes: list[Node],
        name: str,
        step: TaskStep,
        before: tuple[int, ...] | None,
        ends: dict[str, tuple[int, ...]],
    ) -> Node:
        """`nodes`: those so far. `before`: what the first request of a step waits for; None for its later ones."""
        first, turn, steps = before is not None, len(nodes), self.task.steps
        after = before if before is not None else (turn - 1,)
        for_values = step.kind != "chat"
        goes_on = (
            before
            and step.context != "new"
            and not for_values
            and steps[step.after[0]].kind == "chat"
        )
        begins = first and not goes_on
        context = -1 if begins else ends[step.after[0]][0] if first else turn - 1
        with_result = name in self._results
        message = step.input_tokens is not None and (first or not with_result)
        chats = [one for one in after if steps[nodes[one].step].kind == "chat"]
        # a context begins with its message, if it has one
        joined: tuple[int, ...] = ()
        if first and not for_values and not (begins and message):
            joined = tuple(one for one in chats if one != context)
        asks = -1
        if first and after and not message and (for_values or len(chats) < len(after)):
            asks = next((one for one in after if one not in chats), after[0])
            while not nodes[asks].message:
                asks = nodes[asks].asks if nodes[asks].asks >= 0 else nodes[asks].after[0]
        place = number * self.width + turn
        tool, pause_ns = "", 0
        if step.tool and not (with_result and (message or begins)):
            tool = list(step.tool)[self._kinds[name](self._key, "tool", place)]
            pause_ns = self._tool_times[tool](self._key, "tool time", place)
        if message and after:
            pause_ns += self._think[name](self._key, "think time", place)
        return Node(
            name,
            after,
            context,
            joined,
            tool if with_result else "",
            message,
            pause_ns,
            asks,
            first,
        )


def _delay(delay: Any) -> LengthSampler:
    """A law of durations: as of lengths, with other ends where none are given."""
    if delay.tag in ("normal", "lognormal"):
        ends = {"min": delay.min or 0, "max": LONGEST_NS if delay.max is None else delay.max}
        delay = delay.model_copy(update=ends)
    return length_sampler(delay)


def _choice(weights: dict[str, float]) -> LengthSampler:
    """A law of the place of one of these names, drawn by weight."""
    return length_sampler(
        SimpleNamespace(tag="empirical", values=range(len(weights)), weights=list(weights.values()))
    )
