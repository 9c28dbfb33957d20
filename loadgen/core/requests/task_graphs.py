"""The requests of each task: which ones it has, what they wait for, and what they continue.

The graph of a task is a function of the seed and the number of the task. The schedule and the
prompts both use it.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from loadgen.core.requests.sampling import (
    LengthSampler,
    derive_key,
    length_sampler,
    random_integer,
)
from loadgen.core.units import LONGEST_NS

if TYPE_CHECKING:
    from loadgen.core.workload.tasks import Task, TaskStep

GRAPHS_CACHED = 4096  # Tasks in progress have nearby numbers.


class TaskRequest(Struct, frozen=True):
    """One request of a task.

    Requests are identified by their turn, which is their position in the order of the task.

    Attributes:
        step: The name of the step.
        after: The requests that must end before. Empty for the first request of the task.
        context: The request whose messages and response it continues, or None for a new context.
        joined: The requests whose responses it sends as results of tools.
        tool: The tool whose result it sends, or "" if there is none.
        has_message: Whether it has a user message of its own.
        pause_ns: The time from the end of the last request it waits for to its own start: the work
            of the tool or the thinking of the user.
        repeats_message_of: The earlier request whose user message it sends again, or None.
        is_first_of_step: Whether it is the first turn of its step.
    """

    step: str
    after: tuple[int, ...]
    context: int | None
    joined: tuple[int, ...]
    tool: str
    has_message: bool
    pause_ns: int
    repeats_message_of: int | None = None
    is_first_of_step: bool = True


class Abandonment(Struct, frozen=True):
    """Where the user of a task goes away: after so many tokens of the response to a turn."""

    turn: int
    tokens: int


class _StepSamplers(NamedTuple):
    """What is drawn for each copy and each request of a step."""

    turns: LengthSampler
    parallel: LengthSampler
    think_time_ns: LengthSampler
    output_tokens: LengthSampler | None
    tool_index: LengthSampler | None


class _RequestPosition(NamedTuple):
    """The position of a request in its task.

    Attributes:
        task: The number of the task.
        turn: The turn of the request.
        awaited: The requests that the step waits for, or None if it is a later turn of the step.
    """

    task: int
    turn: int
    awaited: tuple[int, ...] | None


class TaskGraphs:
    """The graphs of tasks: `graphs[n]` has the requests of task n, each after those it waits for.

    The first and the last request of a task run alone.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self.task = task
        self.width = task.width
        self._key = derive_key(seed)
        self._samplers = {name: _step_samplers(step) for name, step in task.steps.items()}
        self._tool_times = {name: _delay_sampler(tool.time) for name, tool in task.tools.items()}
        known_tools = task.known_tools
        self._steps_with_results = {
            name
            for name, step in task.steps.items()
            if step.tool and all(tool in known_tools for tool in step.tool)
        }
        self._order = task.order
        self._cached_graph = functools.lru_cache(GRAPHS_CACHED)(self._draw_graph)

    def __getitem__(self, task: int) -> tuple[TaskRequest, ...]:
        return self._cached_graph(task)

    def output_tokens(self, task: int, turn: int) -> int:
        """Return the requested output tokens, 0 for embeddings and rankings."""
        sample = self._samplers[self[task][turn].step].output_tokens
        return 0 if sample is None else sample(self._key, "output", self._number(task, turn))

    def abandonment(self, task: int) -> Abandonment | None:
        """Return where the user of a task goes away, or None if the user stays to the end."""
        share = self.task.abandoned
        if not share or random_integer(self._key, "leaves", task, 8) * 2.0**-64 >= share:
            return None
        choice = random_integer(self._key, "leaves at", task, 16)
        chats = [turn for turn in range(len(self[task])) if self.output_tokens(task, turn)]
        turn = chats[choice % len(chats)]
        last_token = max(1, self.output_tokens(task, turn) - 1)
        return Abandonment(turn, 1 + choice // len(chats) % last_token)

    def _number(self, task: int, turn: int) -> int:
        """Return the index of a request in random draws."""
        return task * self.width + turn

    def _draw_graph(self, task: int) -> tuple[TaskRequest, ...]:
        requests: list[TaskRequest] = []
        last_turns: dict[str, tuple[int, ...]] = {}  # of each copy of a step
        for name in self._order:
            samplers = self._samplers[name]
            turns = samplers.turns(self._key, f"turns {name}", task)
            copies = samplers.parallel(self._key, f"parallel {name}", task)
            awaited = tuple(
                turn for other in self.task.steps[name].after for turn in last_turns[other]
            )
            last_turns_of_step = []
            for _ in range(copies):
                for turn_of_step in range(turns):
                    position = _RequestPosition(
                        task, len(requests), awaited if turn_of_step == 0 else None
                    )
                    requests.append(self._draw_request(name, position, requests, last_turns))
                last_turns_of_step.append(len(requests) - 1)
            last_turns[name] = tuple(last_turns_of_step)
        return tuple(requests)

    def _draw_request(
        self,
        name: str,
        position: _RequestPosition,
        earlier: list[TaskRequest],
        last_turns: dict[str, tuple[int, ...]],
    ) -> TaskRequest:
        """Return a request of a step.

        Args:
            name: The name of the step.
            position: The position of the request in its task.
            earlier: The requests of the task before this one.
            last_turns: The last request of each copy of the steps before this one.
        """
        step = self.task.steps[name]
        is_first = position.awaited is not None
        after = (position.turn - 1,) if position.awaited is None else position.awaited
        context = self._context(step, position, last_turns)
        sends_tool_result = name in self._steps_with_results
        has_message = step.input_tokens is not None and (is_first or not sends_tool_result)
        is_chat = step.kind == "chat"
        chats = [turn for turn in after if self.task.steps[earlier[turn].step].kind == "chat"]
        joined: tuple[int, ...] = ()
        # A new context with a message begins with that message.
        if is_first and is_chat and not (context is None and has_message):
            joined = tuple(turn for turn in chats if turn != context)
        repeats_message_of = None
        needs_message = is_first and bool(after) and not has_message
        if needs_message and (not is_chat or len(chats) < len(after)):
            others = [turn for turn in after if turn not in chats]
            repeats_message_of = _find_message(earlier, [*others, *after][0])
        tool = self._draw_tool(name, position)
        if sends_tool_result and (has_message or (is_first and context is None)):
            tool = ""
        return TaskRequest(
            step=name,
            after=after,
            context=context,
            joined=joined,
            tool=tool if sends_tool_result else "",
            has_message=has_message,
            pause_ns=self._draw_pause_ns(name, position, tool, thinks=has_message and bool(after)),
            repeats_message_of=repeats_message_of,
            is_first_of_step=is_first,
        )

    def _context(
        self, step: TaskStep, position: _RequestPosition, last_turns: dict[str, tuple[int, ...]]
    ) -> int | None:
        """Return the request whose context a request continues, or None if it begins a new one."""
        if position.awaited is None:
            return position.turn - 1
        if not position.awaited or step.context == "new" or step.kind != "chat":
            return None
        if self.task.steps[step.after[0]].kind != "chat":
            return None
        return last_turns[step.after[0]][0]

    def _draw_tool(self, name: str, position: _RequestPosition) -> str:
        """Return the name of the tool that runs before a request, or "" if there is none."""
        sample = self._samplers[name].tool_index
        if sample is None:
            return ""
        index = sample(self._key, "tool", self._number(position.task, position.turn))
        return list(self.task.steps[name].tool or ())[index]

    def _draw_pause_ns(
        self, name: str, position: _RequestPosition, tool: str, *, thinks: bool
    ) -> int:
        """Return the time that a tool works and that the user thinks before a request."""
        number = self._number(position.task, position.turn)
        pause_ns = 0
        if tool:
            pause_ns += self._tool_times[tool](self._key, "tool time", number)
        if thinks:
            pause_ns += self._samplers[name].think_time_ns(self._key, "think time", number)
        return pause_ns


def _find_message(requests: list[TaskRequest], turn: int) -> int:
    """Return the request with the user message that a request repeats, answers or follows."""
    while not requests[turn].has_message:
        repeated = requests[turn].repeats_message_of
        turn = requests[turn].after[0] if repeated is None else repeated
    return turn


def _step_samplers(step: TaskStep) -> _StepSamplers:
    return _StepSamplers(
        turns=length_sampler(step.turns),
        parallel=length_sampler(step.parallel),
        think_time_ns=_delay_sampler(step.think_time),
        output_tokens=length_sampler(step.output_tokens) if step.output_tokens else None,
        tool_index=_index_sampler(list(step.tool.values())) if step.tool else None,
    )


def _delay_sampler(delay: Any) -> LengthSampler:
    """Return a sampler of durations. Their default bounds differ from those of lengths."""
    if delay.tag in ("normal", "lognormal"):
        bounds = {"min": delay.min or 0, "max": LONGEST_NS if delay.max is None else delay.max}
        delay = delay.model_copy(update=bounds)
    return length_sampler(delay)


def _index_sampler(weights: list[float]) -> LengthSampler:
    """Return a sampler of indices, each with a probability in proportion to its weight."""
    return length_sampler(
        SimpleNamespace(tag="empirical", values=range(len(weights)), weights=weights)
    )
