"""Checks that the steps of a task, as they are written, are a graph which can be carried out.

The graph begins with one request and ends with one. These checks see the whole graph, so that they
report all mistakes with their positions, also where a step is not valid by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from loadgen.core.errors import Code, LoadgenError, UserError, did_you_mean
from loadgen.core.workload.yaml_marks import Map, Seq, child_path

KEYS_OF_CHATS = ("output_tokens", "system_tokens", "turns", "context", "best")
"""The keys of a step that only a chat can have."""
REFUSED_KEYS: dict[str, tuple[str, ...]] = {
    "chat": (),
    "embed": (*KEYS_OF_CHATS, "documents"),
    "rerank": KEYS_OF_CHATS,
}
"""The keys that a step of each kind cannot have."""


def check_steps(steps: Map, tools: object, file: str) -> Iterator[LoadgenError]:
    """Yield an error for everything that keeps the steps of a task from being carried out.

    If a step waits for a step that does not exist, the order of the steps is not checked, because
    one wrong name would lead to several errors.

    Args:
        steps: The steps as they are written, by their names.
        tools: The tools as they are written. Anything but a mapping is reported by pydantic.
        file: The name of the file.
    """
    tools_by_name = tools if isinstance(tools, dict) else {}
    graph = _StepGraph(steps, tools_by_name, file)
    unknown_steps = list(graph.check_references())
    yield from unknown_steps

    for name, step in steps.items():
        if isinstance(step, Map):
            yield from graph.check_step(name, step)

    if unknown_steps or not steps:
        return

    # A cycle of steps may have no first or last step, so this would be reported twice.
    cycles = list(graph.check_cycles())
    yield from cycles or graph.check_ends()


def _kind(step: Map) -> str:
    """Return the kind of a step as it is written, which may be no valid kind."""
    return str(step.get("kind", "chat"))


def _predecessor_names(step: object) -> list[str]:
    """Return the names of the steps that a step waits for, its predecessors.

    The key `after` of a step is one name or a list of names. Other values are ignored here, because
    pydantic reports them when it validates the step.
    """
    names = step.get("after") if isinstance(step, Map) else None
    if isinstance(names, str):
        return [names]
    if isinstance(names, Seq):
        return [name for name in names if isinstance(name, str)]
    return []


def _tool_names(step: Map) -> list[str]:
    """Return the names of the tools of a step.

    The key `tool` is one name, or a mapping of several names to weights.
    """
    tool = step.get("tool")
    if isinstance(tool, str):
        return [tool]
    return list(tool) if isinstance(tool, Map) else []


class _StepGraph:
    """The steps of a task, and which of them wait for which.

    The methods `check_...` yield the errors that they find.

    Attributes:
        steps: The steps as they are written, by their names.
        tools: The tools as they are written, by their names.
        file: The name of the file in error messages.
        predecessors: Maps each step to the names of the steps that it waits for.
    """

    def __init__(self, steps: Map, tools: dict[str, Any], file: str) -> None:
        self.steps = steps
        self.tools = tools
        self.file = file
        self.predecessors = {name: _predecessor_names(step) for name, step in steps.items()}

    def build_error(self, code: Code, name: str, key: str, problem: str, hint: str) -> LoadgenError:
        """Return the error for a mistake in a step, with its position in the file.

        Args:
            code: The kind of error.
            name: The name of the step.
            key: The key of the step that is wrong or missing, or "" for the step as a whole.
            problem: What is wrong.
            hint: What to do.
        """
        step = self.steps[name]
        if isinstance(step, Map) and key in step:
            place = step.place_of_value(key, self.file)
        else:
            # A missing key has no place in the file, so that of the step is used.
            place = self.steps.place_of_key(name, self.file)

        # Programs that read errors identify a mistake by the path of its key, such as
        # `requests.task.steps.plan.tool`.
        path = self.steps.path_of(name)
        if key:
            path = child_path(path, key)
        return UserError(code, problem, place, hint, key=path)

    def check_references(self) -> Iterator[LoadgenError]:
        """Yield an error for each step that waits for a step that does not exist."""
        # A set, because a step may name the same unknown step twice.
        unknown_references = {
            (name, predecessor)
            for name, predecessors in self.predecessors.items()
            for predecessor in predecessors
            if predecessor not in self.steps
        }
        for name, predecessor in sorted(unknown_references):
            problem = (
                f'step "{name}" waits for "{predecessor}", but there is no step with that name'
            )
            hint = did_you_mean(predecessor, list(self.steps))
            yield self.build_error("unknown_name", name, "after", problem, hint)

    def check_cycles(self) -> Iterator[LoadgenError]:
        """Yield an error for one cycle of steps that wait for each other, if there is any."""
        try:
            TopologicalSorter(self.predecessors).prepare()
        except CycleError as error:
            # The second argument is the cycle, in which each step is a predecessor of the next one.
            steps_in_cycle: list[str] = error.args[1]
            order = " after ".join(reversed(steps_in_cycle))
            problem = f"steps wait for each other, so none of them can start: {order}"
            hint = "let each step wait only for steps before it"
            yield self.build_error("cycle", steps_in_cycle[0], "after", problem, hint)

    def check_ends(self) -> Iterator[LoadgenError]:
        """Yield an error unless the task begins with one request and ends with one request.

        The first request is the start of the task, and the last response is its end, so a task has
        one time from start to end. So there must be one first step (it waits for no other step) and
        one last step (no other step waits for it), and both must run once. `check_cycles` must have
        passed: without cycles there is at least one first and one last step.
        """
        awaited_steps = set(itertools.chain.from_iterable(self.predecessors.values()))
        first_steps = [name for name in self.steps if not self.predecessors[name]]
        last_steps = [name for name in self.steps if name not in awaited_steps]

        yield from self.check_one_first_step(first_steps)
        yield from self.check_one_last_step(last_steps)

        yield from self.check_runs_once(first_steps[0], verb="begins", hint="add a step before it")
        yield from self.check_runs_once(
            last_steps[0], verb="ends", hint="add a step after it, which waits for all of them"
        )

    def check_one_first_step(self, first_steps: list[str]) -> Iterator[LoadgenError]:
        """Yield an error if several steps wait for no other step."""
        if len(first_steps) > 1:
            first, second = first_steps[:2]
            problem = (
                f'a task must begin with one step, but both "{first}" and "{second}" '
                "wait for no other step"
            )
            yield self.build_error("unsupported", second, "after", problem, f"after: {first}")

    def check_one_last_step(self, last_steps: list[str]) -> Iterator[LoadgenError]:
        """Yield an error if there are several steps that no other step waits for."""
        if len(last_steps) > 1:
            first, second = last_steps[:2]
            problem = (
                f'a task must end with one step, but no step waits for "{first}" and "{second}"'
            )
            hint = f"let one wait for all others: after: [{', '.join(last_steps[:-1])}]"
            yield self.build_error("unsupported", first, "", problem, hint)

    def check_runs_once(self, name: str, verb: str, hint: str) -> Iterator[LoadgenError]:
        """Yield an error if the first or last step has several copies that run in parallel.

        Args:
            name: The name of the step.
            verb: "begins" for the first step, "ends" for the last one.
            hint: How to mend it.
        """
        step = self.steps[name]
        if isinstance(step, Map) and step.get("parallel", 1) != 1:
            problem = (
                f'a task {verb} with a single request, but "{name}" runs several times in parallel'
            )
            yield self.build_error("unsupported", name, "parallel", problem, hint)

    def check_step(self, name: str, step: Map) -> Iterator[LoadgenError]:
        """Yield the errors of one step."""
        yield from self.check_tools(name, step)
        yield from self.check_content(name, step)
        yield from self.check_think_time(name, step)
        yield from self.check_context(name, step)
        yield from self.check_kind(name, step)

    def check_tools(self, name: str, step: Map) -> Iterator[LoadgenError]:
        """Yield the errors of the tools that a step may call."""
        yield from self.check_tools_exist(name, step)
        yield from self.check_all_or_no_results(name, step)

    def check_tools_exist(self, name: str, step: Map) -> Iterator[LoadgenError]:
        """Yield an error for each tool of a step that the task does not define."""
        for tool in _tool_names(step):
            if tool not in self.tools:
                hint = f"tools: {{{tool}: {{time: 1s, result_tokens: 500}}}}"
                if self.tools:
                    hint = did_you_mean(tool, list(self.tools))
                problem = f'unknown tool "{tool}"'
                yield self.build_error("unknown_name", name, "tool", problem, hint)

    def check_all_or_no_results(self, name: str, step: Map) -> Iterator[LoadgenError]:
        """Yield an error if only some tools of a step have a result that the model gets.

        A tool with `result_tokens` adds a message to the conversation, and one without only takes
        time. Which tool runs is drawn for each request, so requests of such a step would differ in
        their messages.
        """
        tools = self.known_tools(step)
        tools_with_result = [tool for tool in tools if "result_tokens" in tool]
        if 0 < len(tools_with_result) < len(tools):
            problem = "has tools with and without result_tokens"
            hint = "use a separate step for each of them"
            yield self.build_error("conflict", name, "tool", problem, hint)

    def known_tools(self, step: Map) -> list[Map]:
        """Return the tools of a step as they are written, without the unknown ones."""
        tools = [self.tools.get(tool) for tool in _tool_names(step)]
        return [tool for tool in tools if isinstance(tool, Map)]

    def sends_tool_result(self, step: Map) -> bool:
        """Return True if the requests of a step send the result of a tool to the model."""
        return any("result_tokens" in tool for tool in self.known_tools(step))

    def predecessor_steps(self, name: str) -> list[Map]:
        """Return the steps that a step waits for, as they are written, without unknown ones."""
        steps = [self.steps.get(predecessor) for predecessor in self.predecessors[name]]
        return [step for step in steps if isinstance(step, Map)]

    def continues_conversation(self, name: str, step: Map) -> bool:
        """Return True if the requests of a step begin with the messages of a step before it.

        A chat continues the conversation of the first step that it waits for, if that is a chat
        too. With `context: new` it begins a new conversation instead. Embeddings and rankings
        belong to no conversation.
        """
        is_chat = _kind(step) == "chat"
        requests_new_context = "context" in step  # The only value of this key is `new`.
        waits_for_steps = len(self.predecessors[name]) > 0
        if not is_chat or requests_new_context or not waits_for_steps:
            return False

        existing_predecessors = self.predecessor_steps(name)
        if not existing_predecessors:
            # Another check reports that the steps which this one waits for do not exist. They count
            # as chats, so that no second error follows from that.
            return True

        return _kind(existing_predecessors[0]) == "chat"

    def check_content(self, name: str, step: Map) -> Iterator[LoadgenError]:
        """Yield an error if the requests of a step contain nothing new.

        A step with a user message (`input_tokens`) always contains something new. Without one

        - the first step of a task is wrong, because there is nothing before it
        - a later chat must send the result of a tool, or the responses of other steps
        - a later embedding or ranking repeats an earlier message, which is right
        """
        has_message = "input_tokens" in step
        if has_message:
            return

        is_first_step = not self.predecessors[name]
        if is_first_step:
            problem = f'step "{name}" begins the task, but has no message'
            yield self.build_error(
                "missing_key", name, "input_tokens", problem, "input_tokens: 500"
            )
            return

        is_chat = _kind(step) == "chat"
        if is_chat and not self.sends_tool_result(step):
            yield from self.check_has_responses_to_send(name, step)

    def check_think_time(self, name: str, step: Map) -> Iterator[LoadgenError]:
        """Yield an error for a think time, the pause before a user message, without a message."""
        if "think_time" in step and "input_tokens" not in step:
            problem = "think_time has no effect before the result of a tool"
            hint = "set the time of the tool instead"
            yield self.build_error("conflict", name, "think_time", problem, hint)

    def check_has_responses_to_send(self, name: str, step: Map) -> Iterator[LoadgenError]:
        """Yield an error if a request of a chat step would send no new text.

        The step has neither a message nor a tool. So its first request can only send the responses
        of the steps that it waits for, and its later requests have nothing to send.

        A chat that continues a conversation continues that of the first step in this list. The
        conversation already contains the response of that step, so it is no new text.
        """
        predecessors = self.predecessors[name]
        continues_conversation = self.continues_conversation(name, step)
        steps_with_new_response = predecessors[1:] if continues_conversation else predecessors

        has_later_requests = step.get("turns", 1) != 1
        if not steps_with_new_response:
            problem = f'step "{name}" sends no new text'
        elif has_later_requests:
            problem = f'step "{name}" sends no new text after its first request'
        else:
            return

        hint = "add input_tokens: 500 (a message), or tool: (the result of a tool call)"
        yield self.build_error("missing_key", name, "input_tokens", problem, hint)

    def check_context(self, name: str, step: Map) -> Iterator[LoadgenError]:
        """Yield the errors of a step that continues the conversation (context) of another step.

        The other step is the first one that it waits for.
        """
        if self.continues_conversation(name, step):
            continued_name = self.predecessors[name][0]
            yield from self.check_no_second_system_message(name, step, continued_name)
            yield from self.check_single_context(name, continued_name)

    def check_no_second_system_message(
        self, name: str, step: Map, continued_name: str
    ) -> Iterator[LoadgenError]:
        """Yield an error if a step adds a system message to a conversation, which has one already.

        `continued_name` is the step whose conversation it continues.
        """
        if "system_tokens" in step:
            problem = (
                f'step "{name}" continues the context of "{continued_name}", which '
                "already has a system message"
            )
            hint = "leave the system message out, or add context: new"
            yield self.build_error("conflict", name, "system_tokens", problem, hint)

    def check_single_context(self, name: str, continued_name: str) -> Iterator[LoadgenError]:
        """Yield an error if the step to continue runs several times in parallel.

        There would then be several conversations to continue.
        """
        existing_predecessors = self.predecessor_steps(name)
        if existing_predecessors and existing_predecessors[0].get("parallel", 1) != 1:
            problem = (
                f'step "{name}" cannot continue the context of "{continued_name}", '
                "which runs several times in parallel"
            )
            hint = "put the step whose context continues first, or add context: new"
            yield self.build_error("conflict", name, "after", problem, hint)

    def check_kind(self, name: str, step: Map) -> Iterator[LoadgenError]:
        """Yield an error for each key that a step of its kind must have or cannot have.

        A kind that does not exist is reported when the step itself is checked.
        """
        kind = _kind(step)
        for key in REFUSED_KEYS.get(kind, ()):
            if key in step:
                problem = f"a step of kind {kind} cannot have {key}"
                yield self.build_error("no_effect", name, key, problem, "leave it out")

        if kind == "chat":
            yield from self.check_chat(name, step)

        if kind == "rerank" and "documents" not in step:
            problem = f'step "{name}" has no documents to rank'
            hint = "documents: {count: 20, tokens: 384}"
            yield self.build_error("missing_key", name, "documents", problem, hint)

    def check_chat(self, name: str, step: Map) -> Iterator[LoadgenError]:
        """Yield an error for a chat without `output_tokens`, and those of its key `best`."""
        if "output_tokens" not in step:
            problem = f'step "{name}" has no output_tokens'
            yield self.build_error(
                "missing_key", name, "output_tokens", problem, "output_tokens: 300"
            )
        if "best" in step:
            yield from self.check_ranked_documents(name, step)

    def check_ranked_documents(self, name: str, step: Map) -> Iterator[LoadgenError]:
        """Yield the errors of a chat that gets the best documents of a ranking (`best: 5`).

        There must be a rerank step right before it, and the chat can have no other documents.
        """
        kinds_of_predecessors = [_kind(predecessor) for predecessor in self.predecessor_steps(name)]
        if "rerank" not in kinds_of_predecessors:
            problem = "there is no rerank step directly before it"
            hint = "use after: with the step that ranks, or documents: {}"
            yield self.build_error("missing_key", name, "best", problem, hint)

        if "documents" in step:
            problem = "has both best and documents"
            hint = "keep one of them: best uses the documents of the rerank step before it"
            yield self.build_error("conflict", name, "best", problem, hint)
