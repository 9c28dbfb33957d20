"""Checks that the steps of a task, as they are written, are a graph which can be carried out.

The graph begins with one request and ends with one. These checks see the whole graph, so that they
report all mistakes with their positions, also where a step is not valid by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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

    for step in graph.steps.values():
        if step.is_mapping:
            yield from graph.check_step(step)

    if unknown_steps or not steps:
        return

    # A cycle of steps may have no first or last step, so this would be reported twice.
    cycles = list(graph.check_cycles())
    yield from cycles or graph.check_ends()


@dataclass(frozen=True)
class _Step:
    """A step of a task as it is written in a file, whether it is valid or not.

    Attributes:
        name: The name of the step.
        content: Its keys and values, a `Map`. It is {} if the step is not written as a mapping,
            which pydantic reports.
    """

    name: str
    content: dict[str, Any]

    @property
    def is_mapping(self) -> bool:
        """Return True if the step is written as a mapping."""
        return isinstance(self.content, Map)

    @property
    def kind(self) -> str:
        """Return the kind of the step, which may be no valid kind."""
        return str(self.content.get("kind", "chat"))

    @property
    def predecessors(self) -> list[str]:
        """Return the names of the steps that this one waits for.

        The key `after` is one name or a list of names. Other values are ignored here, because
        pydantic reports them when it validates the step.
        """
        names = self.content.get("after")
        if isinstance(names, str):
            return [names]
        if isinstance(names, Seq):
            return [name for name in names if isinstance(name, str)]
        return []

    @property
    def tools(self) -> list[str]:
        """Return the names of the tools. The key `tool` is one name, or maps names to weights."""
        tool = self.content.get("tool")
        if isinstance(tool, str):
            return [tool]
        return list(tool) if isinstance(tool, Map) else []

    @property
    def has_message(self) -> bool:
        """Return True if its requests send a message of the user."""
        return "input_tokens" in self.content

    @property
    def runs_in_parallel(self) -> bool:
        """Return True if several copies of the step may run at the same time."""
        return bool(self.content.get("parallel", 1) != 1)


class _StepGraph:
    """The steps of a task, and which of them wait for which.

    The methods `check_...` yield the errors that they find.

    Attributes:
        steps: The steps by their names.
        written_steps: The steps as they are written, for their places in the file.
        tools: The tools as they are written, by their names.
        file: The name of the file in error messages.
    """

    def __init__(self, written_steps: Map, tools: dict[str, Any], file: str) -> None:
        self.steps = {
            name: _Step(name, content if isinstance(content, Map) else {})
            for name, content in written_steps.items()
        }
        self.written_steps = written_steps
        self.tools = tools
        self.file = file

    def build_error(
        self, code: Code, step: _Step, key: str, problem: str, hint: str
    ) -> LoadgenError:
        """Return the error for a mistake in a step, with its place in the file.

        `key` is the key of the step that is wrong or missing, or "" for the step as a whole.
        """
        content = step.content
        if isinstance(content, Map) and key in content:
            place = content.place_of_value(key, self.file)
        else:
            # A missing key has no place in the file, so that of the step is used.
            place = self.written_steps.place_of_key(step.name, self.file)

        # Programs that read errors identify a mistake by the path of its key, such as
        # `requests.task.steps.plan.tool`.
        path = self.written_steps.path_of(step.name)
        if key:
            path = child_path(path, key)
        return UserError(code, problem, place, hint, key=path)

    def existing_predecessors(self, step: _Step) -> list[_Step]:
        """Return the steps that a step waits for, without those that do not exist."""
        steps = [self.steps[name] for name in step.predecessors if name in self.steps]
        return [step for step in steps if step.is_mapping]

    def check_references(self) -> Iterator[LoadgenError]:
        """Yield an error for each step that waits for a step that does not exist."""
        # A set, because a step may name the same unknown step twice.
        unknown_references = {
            (step.name, predecessor)
            for step in self.steps.values()
            for predecessor in step.predecessors
            if predecessor not in self.steps
        }
        for name, predecessor in sorted(unknown_references):
            problem = (
                f'step "{name}" waits for "{predecessor}", but there is no step with that name'
            )
            hint = did_you_mean(predecessor, list(self.steps))
            yield self.build_error("unknown_name", self.steps[name], "after", problem, hint)

    def check_cycles(self) -> Iterator[LoadgenError]:
        """Yield an error for one cycle of steps that wait for each other, if there is any."""
        predecessors = {step.name: step.predecessors for step in self.steps.values()}
        try:
            TopologicalSorter(predecessors).prepare()
        except CycleError as error:
            # The second argument is the cycle, in which each step is a predecessor of the next one.
            names_in_cycle: list[str] = error.args[1]
            order = " after ".join(reversed(names_in_cycle))
            problem = f"steps wait for each other, so none of them can start: {order}"
            hint = "let each step wait only for steps before it"
            yield self.build_error("cycle", self.steps[names_in_cycle[0]], "after", problem, hint)

    def check_ends(self) -> Iterator[LoadgenError]:
        """Yield an error unless the task begins with one request and ends with one request.

        The first request is the start of the task, and the last response is its end, so a task has
        one time from start to end. So there must be one first step (it waits for no other step) and
        one last step (no other step waits for it), and both must run once. `check_cycles` must have
        passed: without cycles there is at least one first and one last step.
        """
        steps = list(self.steps.values())
        awaited_names = {name for step in steps for name in step.predecessors}
        first_steps = [step for step in steps if not step.predecessors]
        last_steps = [step for step in steps if step.name not in awaited_names]

        yield from self.check_one_first_step(first_steps)
        yield from self.check_one_last_step(last_steps)

        yield from self.check_runs_once(first_steps[0], verb="begins", hint="add a step before it")
        yield from self.check_runs_once(
            last_steps[0], verb="ends", hint="add a step after it, which waits for all of them"
        )

    def check_one_first_step(self, first_steps: list[_Step]) -> Iterator[LoadgenError]:
        """Yield an error if several steps wait for no other step."""
        if len(first_steps) > 1:
            first, second = first_steps[:2]
            problem = (
                f'a task must begin with one step, but both "{first.name}" and "{second.name}" '
                "wait for no other step"
            )
            yield self.build_error("unsupported", second, "after", problem, f"after: {first.name}")

    def check_one_last_step(self, last_steps: list[_Step]) -> Iterator[LoadgenError]:
        """Yield an error if there are several steps that no other step waits for."""
        if len(last_steps) > 1:
            names = [step.name for step in last_steps]
            problem = (
                f'a task must end with one step, but no step waits for "{names[0]}" and '
                f'"{names[1]}"'
            )
            hint = f"let one wait for all others: after: [{', '.join(names[:-1])}]"
            yield self.build_error("unsupported", last_steps[0], "", problem, hint)

    def check_runs_once(self, step: _Step, verb: str, hint: str) -> Iterator[LoadgenError]:
        """Yield an error if the first or last step has several copies that run in parallel.

        Args:
            step: The step.
            verb: "begins" for the first step, "ends" for the last one.
            hint: How to mend it.
        """
        if step.runs_in_parallel:
            problem = (
                f'a task {verb} with a single request, but "{step.name}" runs several times in '
                "parallel"
            )
            yield self.build_error("unsupported", step, "parallel", problem, hint)

    def check_step(self, step: _Step) -> Iterator[LoadgenError]:
        """Yield the errors of one step."""
        yield from self.check_tools_exist(step)
        yield from self.check_all_or_no_results(step)
        yield from self.check_content(step)
        yield from self.check_think_time(step)
        yield from self.check_context(step)
        yield from self.check_kind(step)

    def check_tools_exist(self, step: _Step) -> Iterator[LoadgenError]:
        """Yield an error for each tool of a step that the task does not define."""
        for tool in step.tools:
            if tool not in self.tools:
                hint = f"tools: {{{tool}: {{time: 1s, result_tokens: 500}}}}"
                if self.tools:
                    hint = did_you_mean(tool, list(self.tools))
                problem = f'unknown tool "{tool}"'
                yield self.build_error("unknown_name", step, "tool", problem, hint)

    def check_all_or_no_results(self, step: _Step) -> Iterator[LoadgenError]:
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
            yield self.build_error("conflict", step, "tool", problem, hint)

    def known_tools(self, step: _Step) -> list[Map]:
        """Return the tools of a step as they are written, without the unknown ones."""
        tools = [self.tools.get(tool) for tool in step.tools]
        return [tool for tool in tools if isinstance(tool, Map)]

    def sends_tool_result(self, step: _Step) -> bool:
        """Return True if the requests of a step send the result of a tool to the model."""
        return any("result_tokens" in tool for tool in self.known_tools(step))

    def continues_conversation(self, step: _Step) -> bool:
        """Return True if the requests of a step begin with the messages of a step before it.

        A chat continues the conversation of the first step that it waits for, if that is a chat
        too. With `context: new` it begins a new conversation instead. Embeddings and rankings
        belong to no conversation.
        """
        is_chat = step.kind == "chat"
        requests_new_context = "context" in step.content  # The only value of this key is `new`.
        if not is_chat or requests_new_context or not step.predecessors:
            return False

        existing_predecessors = self.existing_predecessors(step)
        if not existing_predecessors:
            # Another check reports that the steps which this one waits for do not exist. They count
            # as chats, so that no second error follows from that.
            return True

        return existing_predecessors[0].kind == "chat"

    def check_content(self, step: _Step) -> Iterator[LoadgenError]:
        """Yield an error if the requests of a step contain nothing new.

        A step with a user message (`input_tokens`) always contains something new. Without one

        - the first step of a task is wrong, because there is nothing before it
        - a later chat must send the result of a tool, or the responses of other steps
        - a later embedding or ranking repeats an earlier message, which is right
        """
        if step.has_message:
            return

        is_first_step = not step.predecessors
        if is_first_step:
            problem = f'step "{step.name}" begins the task, but has no message'
            yield self.build_error(
                "missing_key", step, "input_tokens", problem, "input_tokens: 500"
            )
            return

        is_chat = step.kind == "chat"
        if is_chat and not self.sends_tool_result(step):
            yield from self.check_has_responses_to_send(step)

    def check_think_time(self, step: _Step) -> Iterator[LoadgenError]:
        """Yield an error for a think time, the pause before a user message, without a message."""
        if "think_time" in step.content and not step.has_message:
            problem = "think_time has no effect before the result of a tool"
            hint = "set the time of the tool instead"
            yield self.build_error("conflict", step, "think_time", problem, hint)

    def check_has_responses_to_send(self, step: _Step) -> Iterator[LoadgenError]:
        """Yield an error if a request of a chat step would send no new text.

        The step has neither a message nor a tool. So its first request can only send the responses
        of the steps that it waits for, and its later requests have nothing to send.

        A chat that continues a conversation continues that of the first step in this list. The
        conversation already contains the response of that step, so it is no new text.
        """
        steps_with_new_response = step.predecessors
        if self.continues_conversation(step):
            steps_with_new_response = step.predecessors[1:]

        has_later_requests = step.content.get("turns", 1) != 1
        if not steps_with_new_response:
            problem = f'step "{step.name}" sends no new text'
        elif has_later_requests:
            problem = f'step "{step.name}" sends no new text after its first request'
        else:
            return

        hint = "add input_tokens: 500 (a message), or tool: (the result of a tool call)"
        yield self.build_error("missing_key", step, "input_tokens", problem, hint)

    def check_context(self, step: _Step) -> Iterator[LoadgenError]:
        """Yield the errors of a step that continues the conversation (context) of another step.

        The other step is the first one that it waits for.
        """
        if self.continues_conversation(step):
            continued_name = step.predecessors[0]
            yield from self.check_no_second_system_message(step, continued_name)
            yield from self.check_single_context(step, continued_name)

    def check_no_second_system_message(
        self, step: _Step, continued_name: str
    ) -> Iterator[LoadgenError]:
        """Yield an error if a step adds a system message to a conversation, which has one already.

        `continued_name` is the step whose conversation it continues.
        """
        if "system_tokens" in step.content:
            problem = (
                f'step "{step.name}" continues the context of "{continued_name}", which '
                "already has a system message"
            )
            hint = "leave the system message out, or add context: new"
            yield self.build_error("conflict", step, "system_tokens", problem, hint)

    def check_single_context(self, step: _Step, continued_name: str) -> Iterator[LoadgenError]:
        """Yield an error if the step to continue runs several times in parallel.

        There would then be several conversations to continue.
        """
        existing_predecessors = self.existing_predecessors(step)
        if existing_predecessors and existing_predecessors[0].runs_in_parallel:
            problem = (
                f'step "{step.name}" cannot continue the context of "{continued_name}", '
                "which runs several times in parallel"
            )
            hint = "put the step whose context continues first, or add context: new"
            yield self.build_error("conflict", step, "after", problem, hint)

    def check_kind(self, step: _Step) -> Iterator[LoadgenError]:
        """Yield an error for each key that a step of its kind must have or cannot have.

        A kind that does not exist is reported when the step itself is checked.
        """
        for key in REFUSED_KEYS.get(step.kind, ()):
            if key in step.content:
                problem = f"a step of kind {step.kind} cannot have {key}"
                yield self.build_error("no_effect", step, key, problem, "leave it out")

        if step.kind == "chat":
            yield from self.check_chat(step)

        if step.kind == "rerank" and "documents" not in step.content:
            problem = f'step "{step.name}" has no documents to rank'
            hint = "documents: {count: 20, tokens: 384}"
            yield self.build_error("missing_key", step, "documents", problem, hint)

    def check_chat(self, step: _Step) -> Iterator[LoadgenError]:
        """Yield an error for a chat without `output_tokens`, and those of its key `best`."""
        if "output_tokens" not in step.content:
            problem = f'step "{step.name}" has no output_tokens'
            yield self.build_error(
                "missing_key", step, "output_tokens", problem, "output_tokens: 300"
            )
        if "best" in step.content:
            yield from self.check_ranked_documents(step)

    def check_ranked_documents(self, step: _Step) -> Iterator[LoadgenError]:
        """Yield the errors of a chat that gets the best documents of a ranking (`best: 5`).

        There must be a rerank step right before it, and the chat can have no other documents.
        """
        kinds_of_predecessors = [
            predecessor.kind for predecessor in self.existing_predecessors(step)
        ]
        if "rerank" not in kinds_of_predecessors:
            problem = "there is no rerank step directly before it"
            hint = "use after: with the step that ranks, or documents: {}"
            yield self.build_error("missing_key", step, "best", problem, hint)

        if "documents" in step.content:
            problem = "has both best and documents"
            hint = "keep one of them: best uses the documents of the rerank step before it"
            yield self.build_error("conflict", step, "best", problem, hint)
