"""The requests of each task: which ones it has, what they wait for, and what they continue.

The graph of a task is a function of the seed and the number of the task. The schedule and the
prompts both use it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from loadgen.core.requests.sampling import (
    DelaySampler,
    LengthSampler,
    delay_sampler,
    derive_key,
    length_sampler,
    random_integer,
    weighted_sampler,
)
from loadgen.core.requests.slot_layout import SlotLayout

if TYPE_CHECKING:
    from loadgen.core.workload.tasks import Task, TaskStep

GRAPHS_CACHED = 4096  # Tasks in progress have nearby numbers.
RANDOM_BYTES_OF_ABANDONMENT = 16
"""The size of the random number that decides where a user leaves.

It is large enough that both choices from it, of a chat and of a token, are uniform to within 1 in
2**64.
"""


class TaskRequest(Struct, frozen=True):
    """One request of a task.

    Requests are identified by their turn, which is their position in the order of the task.

    Attributes:
        step: The name of the step.
        predecessors: The requests that must end before. Empty for the first request of the task.
        continued_turn: The request whose messages and response it sends again and continues, or
            None if it begins a new conversation (context).
        branch_turns: The requests whose responses it sends as results of tools, because it comes
            after several parallel branches.
        tool_of_result: The tool whose result it sends, or "" if there is none.
        has_message: Whether it has a user message of its own.
        pause_ns: The time from the end of the last request it waits for to its own start: the work
            of the tool or the thinking of the user.
        repeated_message_turn: The earlier request whose user message it sends again, or None.
        is_first_of_step: Whether it is the first turn of its step.
    """

    step: str
    predecessors: tuple[int, ...]
    continued_turn: int | None
    branch_turns: tuple[int, ...]
    tool_of_result: str
    has_message: bool
    pause_ns: int
    repeated_message_turn: int | None = None
    is_first_of_step: bool = True


class Abandonment(Struct, frozen=True):
    """Where the user of a task cancels a response and leaves.

    Attributes:
        turn: The request whose response is canceled.
        tokens: How many tokens of the response the user receives before.
    """

    turn: int
    tokens: int


class _StepSamplers(NamedTuple):
    """What is drawn for each copy and each request of a step.

    Attributes:
        turns: How many requests each copy of the step has.
        parallel: How many copies run in parallel.
        think_time_ns: How long the user thinks before a message.
        output_tokens: The length of a response, or None for embeddings and rankings.
        tool: The name of the tool that runs before a request, or None without tools.
    """

    turns: LengthSampler
    parallel: LengthSampler
    think_time_ns: DelaySampler
    output_tokens: LengthSampler | None
    tool: Callable[[bytes, str, int], str] | None


class TaskGraphs:
    """The graphs of tasks: `graphs[n]` has the requests of task n, each after those it waits for.

    The first and the last request of a task run alone.

    Attributes:
        task: The task as the workload describes it.
        layout: How the requests of all tasks are numbered.
        steps_with_tool_results: The names of the steps whose tools the model knows. Their requests
            send the results of these tools. Other tools only take time before a request.
    """

    def __init__(self, task: Task, seed: int) -> None:
        """Prepare the samplers from which the requests and delays of each task are drawn.

        A task is drawn from the seed and its number when it is needed, because a run may have very
        many tasks.

        Args:
            task: The description of all tasks of the workload: the steps of a task, their lengths
                and delays, and the tools that run between them.
            seed: The seed of the run.
        """
        self.task = task
        self.layout = SlotLayout(block_size=task.max_requests)
        self._step_order = task.order
        self._key = derive_key(seed)
        self._samplers = {name: _step_samplers(step) for name, step in task.steps.items()}
        self._tool_times = {name: delay_sampler(tool.time) for name, tool in task.tools.items()}
        self.steps_with_tool_results = _find_steps_with_tool_results(task)

        # Each instance has a cache of its own, which is freed with it.
        self._cached_graph = functools.lru_cache(GRAPHS_CACHED)(self._draw_graph)

    def __getitem__(self, task_index: int) -> tuple[TaskRequest, ...]:
        return self._cached_graph(task_index)

    def step(self, task_index: int, turn: int) -> TaskStep:
        """Return the step of the task that a request belongs to."""
        return self.task.steps[self[task_index][turn].step]

    def is_chat(self, task_index: int, turn: int) -> bool:
        """Return True if a request is a chat, and False if it is for embeddings or a ranking."""
        return self.step(task_index, turn).kind == "chat"

    def conversation_turns(self, task_index: int, turn: int) -> list[int]:
        """Return the turns whose messages are in a request, from the first to the request itself.

        A request contains all messages of the request that it continues, which may in turn continue
        an earlier one. The first of them began the conversation.
        """
        graph = self[task_index]
        newest_first = [turn]
        continued_turn = graph[turn].continued_turn
        while continued_turn is not None:
            newest_first.append(continued_turn)
            continued_turn = graph[continued_turn].continued_turn
        return newest_first[::-1]

    def message_turn(self, task_index: int, turn: int) -> int:
        """Return the turn that first sent the user message of a request, maybe the request itself.

        Some requests repeat the user message of an earlier one.
        """
        repeated_turn = self[task_index][turn].repeated_message_turn
        return turn if repeated_turn is None else repeated_turn

    def output_tokens(self, task_index: int, turn: int) -> int:
        """Return the requested output tokens of a request, 0 for embeddings and rankings."""
        sample = self._samplers[self[task_index][turn].step].output_tokens
        if sample is None:
            return 0
        return sample(self._key, "output", self.draw_index(task_index, turn))

    def abandonment(self, task_index: int) -> Abandonment | None:
        """Return where the user of a task leaves, or None if the user stays to the end.

        The workload says which share of tasks is abandoned. The user leaves during the response to
        a chat, after its first and before its last token.
        """
        abandoned_share = self.task.abandoned
        if not abandoned_share:
            return None
        uniform_number = random_integer(self._key, "leaves", task_index, 8) / 2**64
        if uniform_number >= abandoned_share:
            return None
        return self._draw_abandonment(task_index)

    def _draw_abandonment(self, task_index: int) -> Abandonment:
        """Draw during which response the user of an abandoned task leaves, and after which token.

        All chats of the task are equally likely, and so are all tokens of the response except the
        last one.
        """
        # Only chats have output tokens.
        chat_turns = [
            turn for turn in range(len(self[task_index])) if self.output_tokens(task_index, turn)
        ]

        random_number = random_integer(
            self._key, purpose="leaves at", index=task_index, size=RANDOM_BYTES_OF_ABANDONMENT
        )
        # Both choices are made from one number, which is split like a number into its last digit
        # and the digits before it: with 10 chats, 1234 chooses chat 4, and 123 chooses the token.
        number_for_token, chat_index = divmod(random_number, len(chat_turns))
        turn = chat_turns[chat_index]

        # A response of one token has no token before the last one, so the user receives that one.
        max_received_tokens = max(1, self.output_tokens(task_index, turn) - 1)
        received_tokens = 1 + number_for_token % max_received_tokens
        return Abandonment(turn, tokens=received_tokens)

    def draw_turns_and_copies(self, step: str, task_index: int) -> tuple[int, int]:
        """Return how many turns a step has in a task, and how many copies of it run in parallel."""
        samplers = self._samplers[step]
        turns = samplers.turns(self._key, f"turns {step}", task_index)
        copies = samplers.parallel(self._key, f"parallel {step}", task_index)
        return turns, copies

    def draw_tool(self, step: str, task_index: int, turn: int) -> str:
        """Return the name of the tool that runs before a request, or "" if there is none."""
        sample = self._samplers[step].tool
        if sample is None:
            return ""
        return sample(self._key, "tool", self.draw_index(task_index, turn))

    def draw_tool_time_ns(self, tool: str, task_index: int, turn: int) -> int:
        """Return how long a tool works before a request, 0 if there is no tool."""
        if not tool:
            return 0
        return self._tool_times[tool](self._key, "tool time", self.draw_index(task_index, turn))

    def draw_think_time_ns(self, step: str, task_index: int, turn: int) -> int:
        """Return how long the user thinks before a request."""
        sample = self._samplers[step].think_time_ns
        return sample(self._key, "think time", self.draw_index(task_index, turn))

    def draw_index(self, task_index: int, turn: int) -> int:
        """Return the index under which the values of a request are drawn from the seed.

        It differs between all requests of a run, and depends on no other request.
        """
        return task_index * self.layout.block_size + turn

    def _draw_graph(self, task_index: int) -> tuple[TaskRequest, ...]:
        """Return the requests of a task, each after those that it waits for."""
        builder = _GraphBuilder(self, task_index)
        for step in self._step_order:
            builder.add_step(step)
        return tuple(builder.requests)


class _GraphBuilder:
    """Builds the graph of one task, each step after those that it waits for.

    Attributes:
        requests: The requests so far.
    """

    def __init__(self, graphs: TaskGraphs, task_index: int) -> None:
        """Begin the graph of the task with this number, which has no requests yet."""
        self.requests: list[TaskRequest] = []
        self._graphs = graphs
        self._task_index = task_index
        self._steps = graphs.task.steps
        # For each step, the last request of each of its copies.
        self._last_turns: dict[str, list[int]] = {}

    def add_step(self, name: str) -> None:
        """Add the requests of a step: one or more turns, in one or more parallel copies.

        The first turn of each copy waits for the last turns of all copies of the steps that the
        step comes after. So these steps must have been added before.
        """
        turn_count, copy_count = self._graphs.draw_turns_and_copies(name, self._task_index)
        predecessors = [
            last_turn
            for previous_step in self._steps[name].after
            for last_turn in self._last_turns[previous_step]
        ]
        self._last_turns[name] = [
            self._add_copy_of_step(name, turn_count, tuple(predecessors)) for _ in range(copy_count)
        ]

    def _add_copy_of_step(self, name: str, turn_count: int, predecessors: tuple[int, ...]) -> int:
        """Add the requests of one copy of a step, and return the turn of the last of them.

        A turn is the position of a request in the task. The first request of the copy waits for
        `predecessors`, each other one for the request before it.
        """
        self.requests.append(self._build_first_request(name, predecessors))
        for _ in range(turn_count - 1):
            self.requests.append(self._build_later_request(name))
        return len(self.requests) - 1

    def _build_first_request(self, step_name: str, predecessors: tuple[int, ...]) -> TaskRequest:
        """Return the first request of a step, which begins or continues a conversation.

        Other requests are identified by their turn, which is their position in the task.

        Args:
            step_name: The name of the step.
            predecessors: The turns of the requests that must have ended before this one starts.
                Empty for the request that begins the task.
        """
        step = self._steps[step_name]
        continued_turn = self._find_continued_turn(step, predecessors)
        has_message = step.input_tokens is not None
        sends_tool_results = step_name in self._graphs.steps_with_tool_results
        tool_before = self._draw_first_tool(step_name, continued_turn, has_message=has_message)

        # The user thinks before a message, except before the one that begins the task.
        has_think_time = has_message and len(predecessors) > 0
        return TaskRequest(
            step=step_name,
            predecessors=predecessors,
            pause_ns=self._draw_pause_ns(step_name, tool_before, has_think_time=has_think_time),
            is_first_of_step=True,
            # The other fields say what the request sends.
            continued_turn=continued_turn,
            branch_turns=self._find_branch_turns(step, predecessors, continued_turn),
            tool_of_result=tool_before if sends_tool_results else "",
            has_message=has_message,
            repeated_message_turn=self._find_repeated_message(step, predecessors),
        )

    def _draw_first_tool(
        self, step_name: str, continued_turn: int | None, *, has_message: bool
    ) -> str:
        """Return the tool that runs before the first request of a step, or "" if none runs.

        A tool whose result the model never sees only takes time, and always runs. A tool whose
        result the model sees runs only if the request can send the result: the request continues a
        conversation, in which a response can call the tool, and sends no user message instead.
        """
        does_model_see_result = step_name in self._graphs.steps_with_tool_results
        if not does_model_see_result:
            return self._draw_tool(step_name)
        can_send_result = continued_turn is not None and not has_message
        return self._draw_tool(step_name) if can_send_result else ""

    def _build_later_request(self, step_name: str) -> TaskRequest:
        """Return a later request of a step, which continues the conversation of the one before it.

        A later request adds one thing to the conversation: the result of a tool if the step has
        tools whose results the model sees, and else a message of the user. Other requests are
        identified by their turn, which is their position in the task.
        """
        step = self._steps[step_name]
        previous_turn = len(self.requests) - 1

        sends_tool_results = step_name in self._graphs.steps_with_tool_results
        has_message = step.input_tokens is not None and not sends_tool_results
        tool_before = self._draw_tool(step_name)

        return TaskRequest(
            step=step_name,
            predecessors=(previous_turn,),
            pause_ns=self._draw_pause_ns(step_name, tool_before, has_think_time=has_message),
            is_first_of_step=False,
            # The other fields say what the request sends.
            continued_turn=previous_turn,
            tool_of_result=tool_before if sends_tool_results else "",
            has_message=has_message,
            # Only the first request of a step sends responses of parallel branches, or the message
            # of an earlier request.
            branch_turns=(),
            repeated_message_turn=None,
        )

    def _find_continued_turn(self, step: TaskStep, predecessors: tuple[int, ...]) -> int | None:
        """Return the request whose conversation (context) the first request of a step continues.

        A step lists the steps that it comes after, and a chat continues the first of them if that
        is a chat too. If that step ran in several copies, the conversation of the first copy is
        continued. Return None if the step begins a new conversation.
        """
        is_first_of_task = not predecessors
        if is_first_of_task or step.context == "new" or step.kind != "chat":
            return None

        continued_step = step.after[0]
        if self._steps[continued_step].kind != "chat":
            return None

        last_turns_of_copies = self._last_turns[continued_step]
        return last_turns_of_copies[0]

    def _find_branch_turns(
        self, step: TaskStep, predecessors: tuple[int, ...], continued_turn: int | None
    ) -> tuple[int, ...]:
        """Return the turns whose responses the first request of a step sends as tool results.

        A turn is the position of a request in the task. After parallel branches, such as
        sub-agents, a chat continues the conversation of one of them and receives the responses of
        the others. The result is empty for an embedding or ranking, whose input is only a text, and
        for a chat that begins a new conversation with a user message.

        Args:
            step: The step.
            predecessors: The turns that its first request waits for.
            continued_turn: The turn whose conversation it continues, or None.
        """
        if step.kind != "chat":
            return ()

        begins_conversation = continued_turn is None
        has_user_message = step.input_tokens is not None
        if begins_conversation and has_user_message:
            return ()

        return tuple(
            turn for turn in predecessors if self._is_chat(turn) and turn != continued_turn
        )

    def _find_repeated_message(self, step: TaskStep, predecessors: tuple[int, ...]) -> int | None:
        """Return the earlier turn whose user message the first request of a step sends again.

        A step without a message of its own repeats one in two cases:

        - It comes after an embedding or ranking. Their responses are numbers, so a chat sends the
          message again that was embedded or ranked.
        - It is an embedding or ranking itself, which needs a text: the latest user message.

        Return None in all other cases.
        """
        is_first_of_task = not predecessors
        has_message = step.input_tokens is not None
        if is_first_of_task or has_message:
            return None

        non_generative_turns = [turn for turn in predecessors if not self._is_chat(turn)]
        if non_generative_turns:
            return _find_turn_of_message(self.requests, non_generative_turns[0])

        is_embedding_or_ranking = step.kind in ("embed", "rerank")
        if is_embedding_or_ranking:
            return _find_turn_of_message(self.requests, predecessors[0])

        return None

    def _is_chat(self, turn: int) -> bool:
        """Return True if a request is a chat, not an embedding or ranking."""
        return self._steps[self.requests[turn].step].kind == "chat"

    def _draw_tool(self, step_name: str) -> str:
        """Return the tool that runs before the next request, or "" if the step has no tool."""
        return self._graphs.draw_tool(step_name, self._task_index, len(self.requests))

    def _draw_pause_ns(self, step_name: str, tool: str, *, has_think_time: bool) -> int:
        """Return the time that a tool works and that the user thinks before the next request."""
        turn = len(self.requests)
        pause_ns = self._graphs.draw_tool_time_ns(tool, self._task_index, turn)
        if has_think_time:
            pause_ns += self._graphs.draw_think_time_ns(step_name, self._task_index, turn)
        return pause_ns


def _find_turn_of_message(requests: list[TaskRequest], turn: int) -> int:
    """Return the turn that first sent the latest user message before or at `turn`.

    The first request of a task always has a message, so the search ends there at the latest.
    """
    while not requests[turn].has_message:
        turn = _earlier_turn_with_same_message(requests[turn])
    return turn


def _earlier_turn_with_same_message(request: TaskRequest) -> int:
    """Return an earlier turn with the same latest user message as a request that has no new one.

    The request either repeats the message of that turn, or sends tool results and responses after
    it.
    """
    if request.repeated_message_turn is not None:
        return request.repeated_message_turn
    return request.predecessors[0]


def _find_steps_with_tool_results(task: Task) -> set[str]:
    """Return the names of the steps whose requests send the result of a tool to the model.

    A tool has a result for the model if the workload defines `result_tokens` for it. Before each
    request of a step, one of the step's tools is chosen at random. So the step is returned only if
    all of its tools have a result.
    """
    tools_with_result = task.known_tools
    return {
        name
        for name, step in task.steps.items()
        if step.tool and all(tool in tools_with_result for tool in step.tool)
    }


def _step_samplers(step: TaskStep) -> _StepSamplers:
    """Return the samplers of a step. Embeddings have no output, and not every step has a tool."""
    return _StepSamplers(
        turns=length_sampler(step.turns),
        parallel=length_sampler(step.parallel),
        think_time_ns=delay_sampler(step.think_time),
        output_tokens=length_sampler(step.output_tokens) if step.output_tokens else None,
        tool=weighted_sampler(list(step.tool), step.tool.values()) if step.tool else None,
    )
