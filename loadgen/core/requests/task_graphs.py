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
        predecessors: The requests that must end before. Empty for the first request of the task.
        context_turn: The request whose messages and response it continues, or None for a new
            context.
        joined_turns: The requests whose responses it sends as results of tools, as it joins
            parallel branches.
        tool: The tool whose result it sends, or "" if there is none.
        has_message: Whether it has a user message of its own.
        pause_ns: The time from the end of the last request it waits for to its own start: the work
            of the tool or the thinking of the user.
        repeated_message_turn: The earlier request whose user message it sends again, or None.
        is_first_of_step: Whether it is the first turn of its step.
    """

    step: str
    predecessors: tuple[int, ...]
    context_turn: int | None
    joined_turns: tuple[int, ...]
    tool: str
    has_message: bool
    pause_ns: int
    repeated_message_turn: int | None = None
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


class TaskGraphs:
    """The graphs of tasks: `graphs[n]` has the requests of task n, each after those it waits for.

    The first and the last request of a task run alone.

    Attributes:
        task: The task as the workload describes it.
        width: The most requests that a task may have.
        steps_with_tool_results: The steps whose tools the model knows, so that their results are
            sent.
    """

    def __init__(self, task: Task, seed: int) -> None:
        """Prepare the samplers of the lengths, times and choices that all tasks draw.

        `task` is the description in the workload, and `seed` decides all draws.
        """
        self.task = task
        self.width = task.width
        self._key = derive_key(seed)
        self._samplers = {name: _step_samplers(step) for name, step in task.steps.items()}
        self._tool_times = {name: _delay_sampler(tool.time) for name, tool in task.tools.items()}
        known_tools = task.known_tools
        self.steps_with_tool_results = {
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
        return 0 if sample is None else sample(self._key, "output", self._request_id(task, turn))

    def abandonment(self, task: int) -> Abandonment | None:
        """Return where the user of a task leaves, or None if the user stays to the end.

        The workload says which share of tasks is abandoned. The user leaves during the response to
        a chat, whose turn and token are drawn at random: after its first token, before its last.
        """
        abandoned_share = self.task.abandoned
        if not abandoned_share:
            return None
        uniform_number = random_integer(self._key, "leaves", task, 8) / 2**64
        if uniform_number >= abandoned_share:
            return None
        chat_turns = [turn for turn in range(len(self[task])) if self.output_tokens(task, turn)]
        # The remainder of one large random number chooses the turn, and its quotient the token.
        random_number = random_integer(self._key, "leaves at", task, 16)
        quotient, chat_index = divmod(random_number, len(chat_turns))
        turn = chat_turns[chat_index]
        possible_tokens = max(1, self.output_tokens(task, turn) - 1)
        return Abandonment(turn, tokens=1 + quotient % possible_tokens)

    def draw_turns_and_copies(self, step: str, task: int) -> tuple[int, int]:
        """Return how many turns a step has in a task, and how many copies of it run in parallel."""
        samplers = self._samplers[step]
        turns = samplers.turns(self._key, f"turns {step}", task)
        copies = samplers.parallel(self._key, f"parallel {step}", task)
        return turns, copies

    def draw_tool(self, step: str, task: int, turn: int) -> str:
        """Return the name of the tool that runs before a request, or "" if there is none."""
        tools = self.task.steps[step].tool
        sample = self._samplers[step].tool_index
        if tools is None or sample is None:
            return ""
        return list(tools)[sample(self._key, "tool", self._request_id(task, turn))]

    def draw_tool_time_ns(self, tool: str, task: int, turn: int) -> int:
        """Return how long a tool works before a request, 0 if there is no tool."""
        if not tool:
            return 0
        return self._tool_times[tool](self._key, "tool time", self._request_id(task, turn))

    def draw_think_time_ns(self, step: str, task: int, turn: int) -> int:
        """Return how long the user thinks before a request."""
        sample = self._samplers[step].think_time_ns
        return sample(self._key, "think time", self._request_id(task, turn))

    def _request_id(self, task: int, turn: int) -> int:
        """Return the index of a request in random draws."""
        return task * self.width + turn

    def _draw_graph(self, task: int) -> tuple[TaskRequest, ...]:
        """Return the requests of a task, each after those that it waits for."""
        builder = _GraphBuilder(self, task)
        for step in self._order:
            builder.add_step(step)
        return tuple(builder.requests)


class _GraphBuilder:
    """Builds the graph of one task, each step after those that it waits for.

    Attributes:
        requests: The requests so far.
    """

    def __init__(self, graphs: TaskGraphs, task: int) -> None:
        self.requests: list[TaskRequest] = []
        self._graphs = graphs
        self._task = task
        self._steps = graphs.task.steps
        # The last request of each copy of a step.
        self._last_turns: dict[str, list[int]] = {}

    def add_step(self, name: str) -> None:
        """Add the requests of a step: one or more turns, in one or more parallel copies.

        The first turn of each copy waits for the last turns of all copies of the steps that the
        step comes after. So these steps must have been added before.
        """
        turns, copies = self._graphs.draw_turns_and_copies(name, self._task)
        predecessors: list[int] = []
        for step_before in self._steps[name].after:
            predecessors += self._last_turns[step_before]
        self._last_turns[name] = []
        for _ in range(copies):
            self.requests.append(self._build_first_request(name, tuple(predecessors)))
            for _ in range(turns - 1):
                self.requests.append(self._build_later_request(name))
            self._last_turns[name].append(len(self.requests) - 1)

    def _build_first_request(self, name: str, predecessors: tuple[int, ...]) -> TaskRequest:
        """Return the first request of a copy of a step, which waits for its predecessors.

        A tool whose result is sent runs only if the request can send it. Any other tool of the step
        only takes time before the request.
        """
        step = self._steps[name]
        has_message = step.input_tokens is not None
        context_turn = self._find_context_turn(step, predecessors)
        sends_tool_result = name in self._graphs.steps_with_tool_results
        # A tool result answers a call in the response before it, so it cannot begin a context. And
        # a message of the user takes its place.
        can_send_tool_result = not has_message and context_turn is not None
        runs_tool = can_send_tool_result or not sends_tool_result
        tool = self._draw_tool(name) if runs_tool else ""
        has_think_time = has_message and len(predecessors) > 0
        return TaskRequest(
            step=name,
            predecessors=predecessors,
            context_turn=context_turn,
            joined_turns=self._find_joined_turns(step, predecessors, context_turn),
            tool=tool if sends_tool_result else "",
            has_message=has_message,
            pause_ns=self._draw_pause_ns(name, tool, has_think_time=has_think_time),
            repeated_message_turn=self._find_repeated_message(step, predecessors),
            is_first_of_step=True,
        )

    def _build_later_request(self, name: str) -> TaskRequest:
        """Return a request of a step that continues the previous request of the same copy.

        It sends the result of a tool or, without one, a message of the user.
        """
        step = self._steps[name]
        previous_turn = len(self.requests) - 1
        sends_tool_result = name in self._graphs.steps_with_tool_results
        has_message = step.input_tokens is not None and not sends_tool_result
        tool = self._draw_tool(name)
        return TaskRequest(
            step=name,
            predecessors=(previous_turn,),
            context_turn=previous_turn,
            joined_turns=(),
            tool=tool if sends_tool_result else "",
            has_message=has_message,
            pause_ns=self._draw_pause_ns(name, tool, has_think_time=has_message),
            repeated_message_turn=None,
            is_first_of_step=False,
        )

    def _find_context_turn(self, step: TaskStep, predecessors: tuple[int, ...]) -> int | None:
        """Return the request whose context the first request of a step continues.

        It is the last request of the first step that the step comes after, if both are chats.
        Return None if the step begins a new context.
        """
        if not predecessors or step.context == "new" or step.kind != "chat":
            return None
        continued_step = step.after[0]
        if self._steps[continued_step].kind != "chat":
            return None
        return self._last_turns[continued_step][0]

    def _find_joined_turns(
        self, step: TaskStep, predecessors: tuple[int, ...], context_turn: int | None
    ) -> tuple[int, ...]:
        """Return the requests whose responses the first request of a step sends as tool results.

        These are all chats among its predecessors, apart from the one whose context it continues
        anyway. Two kinds of requests send none: a new context with a message, which begins with
        that message alone, and an embedding or ranking, which is a text alone.
        """
        begins_with_message = context_turn is None and step.input_tokens is not None
        if step.kind != "chat" or begins_with_message:
            return ()
        return tuple(turn for turn in predecessors if self._is_chat(turn) and turn != context_turn)

    def _find_repeated_message(self, step: TaskStep, predecessors: tuple[int, ...]) -> int | None:
        """Return the request whose user message the first request of a step sends again, or None.

        Only a step without a message of its own repeats one. An embedding or ranking does, because
        it needs a text. A chat does if it waits for an embedding or ranking, which has no response
        that the chat could send. The first embedding or ranking among the predecessors leads to
        the message, or the first predecessor if all are chats.
        """
        if not predecessors or step.input_tokens is not None:
            return None
        non_generative_turns = [turn for turn in predecessors if not self._is_chat(turn)]
        if non_generative_turns:
            return _find_message(self.requests, non_generative_turns[0])
        if step.kind == "chat":
            return None
        return _find_message(self.requests, predecessors[0])

    def _is_chat(self, turn: int) -> bool:
        return self._steps[self.requests[turn].step].kind == "chat"

    def _draw_tool(self, name: str) -> str:
        return self._graphs.draw_tool(name, self._task, len(self.requests))

    def _draw_pause_ns(self, name: str, tool: str, *, has_think_time: bool) -> int:
        """Return the time that a tool works and that the user thinks before the next request."""
        turn = len(self.requests)
        pause_ns = self._graphs.draw_tool_time_ns(tool, self._task, turn)
        if has_think_time:
            pause_ns += self._graphs.draw_think_time_ns(name, self._task, turn)
        return pause_ns


def _find_message(requests: list[TaskRequest], turn: int) -> int:
    """Return the request with the user message that a request sends, repeats or follows.

    Starting from the request at `turn`, requests without a message lead to the one whose message
    they repeat, else to the first one that they wait for.
    """
    while not requests[turn].has_message:
        repeated_turn = requests[turn].repeated_message_turn
        turn = requests[turn].predecessors[0] if repeated_turn is None else repeated_turn
    return turn


def _step_samplers(step: TaskStep) -> _StepSamplers:
    """Return the samplers of a step. Embeddings have no output, and not every step has a tool."""
    return _StepSamplers(
        turns=length_sampler(step.turns),
        parallel=length_sampler(step.parallel),
        think_time_ns=_delay_sampler(step.think_time),
        output_tokens=length_sampler(step.output_tokens) if step.output_tokens else None,
        tool_index=_index_sampler(list(step.tool.values())) if step.tool else None,
    )


def _delay_sampler(delay: Any) -> LengthSampler:
    """Return a sampler of durations in ns.

    Without bounds in the workload, a duration is from 0 to LONGEST_NS, while a length is at least
    1.
    """
    if delay.tag in ("normal", "lognormal"):
        bounds = {"min": delay.min or 0, "max": LONGEST_NS if delay.max is None else delay.max}
        delay = delay.model_copy(update=bounds)
    return length_sampler(delay)


def _index_sampler(weights: list[float]) -> LengthSampler:
    """Return a sampler of indices, each with a probability in proportion to its weight."""
    return length_sampler(
        SimpleNamespace(tag="empirical", values=range(len(weights)), weights=weights)
    )
