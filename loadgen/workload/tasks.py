"""Tasks of agents as a workload file writes them: steps that wait for each other, and the tools between them.

This module checks that the steps are a graph that begins once, ends once and gets there. What a task of a given number
looks like is drawn in `requests/task_graphs.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from loadgen import format, units
from loadgen.errors import Fault, UserError, meant
from loadgen.workload.fields import (
    Delay,
    Duration,
    Fixed,
    JsonSchema,
    Length,
    OneTokenOrMore,
    Part,
    Positive,
    Share,
    Source,
    Tokens,
)
from loadgen.workload.yaml_marks import Map, Seq, Spot, child, where

MOST_REQUESTS = 10_000  # of one task
SMALLEST_SCHEMA = 48  # tokens of the definition of a tool without a description
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"  # what servers take as the name of a function


class Tool(Part):
    """A kind of tool: what its definition adds to every prompt, how long it works, and what it gives back."""

    schema_tokens: Annotated[Tokens, Field(ge=SMALLEST_SCHEMA)] = 100  # of its definition in the field `tools`
    time: Delay = Fixed[Duration](value=0)
    result_tokens: Length


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _as_weights(value: Any) -> Any:
    return {value: 1.0} if isinstance(value, str) else value


class TaskStep(Part):
    """A step of a task: `turns` requests one after the other, `parallel` times side by side.

    Each request begins with something new: a message of the user, or the result of a tool that the answer before it
    called, or the answers of other steps.
    """

    after: Annotated[
        tuple[str, ...],
        BeforeValidator(_as_tuple),
        JsonSchema(anyOf=[{"type": "string"}, {"type": "array", "items": {"type": "string"}}]),
    ] = ()  # the steps that must end before; it continues the context of the first, the others' answers are results
    context: Literal["new"] | None = None  # new: a sub-agent; it knows its message, or without one those answers
    system_tokens: Tokens = 0  # of a context that begins here: its system message, equal in all tasks
    input_tokens: Length | None = None  # a message of the user, before its first request; before each if it has no tool
    think_time: Delay = Fixed[Duration](value=0)  # before each of these messages but the one that begins the task
    tool: Annotated[
        dict[str, Positive] | None,
        BeforeValidator(_as_weights),
        JsonSchema(anyOf=[{"type": "string"}, {"type": "object", "additionalProperties": {"type": "number"}}]),
    ] = None  # the kinds of tools that run before its requests, each drawn by weight
    output_tokens: Length
    turns: Length = Fixed[OneTokenOrMore](value=1)
    parallel: Length = Fixed[OneTokenOrMore](value=1)

    @field_validator("turns", "parallel")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        if most(value) is None:
            raise units.Wrong("has no upper end", "{lognormal: {median: 8, sigma: 0.5, max: 30}}")
        return value


def most(length: Any) -> int | None:
    """The largest value of a length; None where there is none."""
    if hasattr(length, "values"):
        return int(max(length.values))
    largest: int | None = length.value if isinstance(length, Fixed) else length.max
    return largest


class Task(Part):
    """Tasks of an agent: a graph of steps with one request at its beginning and one at its end."""

    steps: Annotated[dict[Annotated[str, Field(pattern=_NAME)], TaskStep], Field(min_length=1)]
    tools: dict[Annotated[str, Field(pattern=_NAME)], Tool] = Field({})  # every request carries the definitions of all
    tool_choice: Literal["auto", "none", "required"] | None = None  # sent with requests whose answer calls a tool
    history: Literal["scripted", "server"] = "scripted"  # earlier answers: generated from the seed, or real replies
    abandoned: Share = 0.0  # of the tasks: their user goes away in the middle of an answer

    @model_validator(mode="before")
    @classmethod
    def _is_a_graph(cls, data: Any, info: ValidationInfo) -> Any:
        if isinstance(info.context, Source) and isinstance(data, Map) and isinstance(data.get("steps"), Map):
            tools = data.get("tools", {})
            known = list(tools) if isinstance(tools, dict) else []
            info.context.faults.extend(_faults(data["steps"], known, info.context))
        return data

    @model_validator(mode="after")
    def _fits(self) -> Task:
        if self.width > MOST_REQUESTS:
            problem = f"may have {format.counted(self.width, 'request')}, more than {MOST_REQUESTS:,}"
            raise units.Wrong(problem, "lower the max of turns or parallel")
        if self.tool_choice is not None and not self.tools:
            raise units.Wrong("has tool_choice, and no tools", "tools: {search: {time: 1s, result_tokens: 500}}")
        return self

    @property
    def width(self) -> int:
        """The most requests that a task may have."""
        return sum((most(step.turns) or 0) * (most(step.parallel) or 0) for step in self.steps.values())

    @property
    def side_by_side(self) -> int:
        """At most so many requests of a task are in flight at one time: steps that do not wait for each other."""
        before: dict[str, set[str]] = {}
        for name in self.order:
            after = self.steps[name].after
            before[name] = set(after).union(*(before[one] for one in after))
        copies = {name: most(step.parallel) or 0 for name, step in self.steps.items()}
        return max(
            sum(n for other, n in copies.items() if other not in before[name] and name not in before[other])
            for name in copies
        )

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the steps, each after those that it waits for."""
        return tuple(TopologicalSorter({name: step.after for name, step in self.steps.items()}).static_order())


def _faults(steps: Map, tools: list[str], source: Source) -> Iterator[Fault]:
    """What makes these steps, as they are written, no graph that can be carried out; with the place of each."""
    after = {name: _names(steps[name]) for name in steps}

    def fault(name: str, key: str, problem: str, hint: str) -> Fault:
        step, path = steps[name], child(steps.path, name)
        inside = isinstance(step, Map) and key in step
        spot: Spot = step.values_at[key] if inside else steps.keys_at[name]
        return UserError(problem, where(source.file, spot, child(path, key) if inside else path), hint)

    unknown = {(name, one) for name, names in after.items() for one in names if one not in steps}
    for name, one in sorted(unknown):
        yield fault(name, "after", f'step "{name}" waits for "{one}", which is no step', meant(one, list(steps)))
    for name in steps:
        yield from _faults_of_step(name, steps[name], steps, tools, fault)
    if unknown:
        return
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        cycle = error.args[1]
        problem = f"steps wait for each other, so none of them can begin: {' after '.join(reversed(cycle))}"
        yield fault(cycle[0], "after", problem, "a step waits for steps that come before it")
        return
    first, last = ([name for name in steps if name not in others] for others in _waiting_and_awaited(after))
    if len(first) > 1:
        problem = f'a task begins with one step, and both "{first[0]}" and "{first[1]}" wait for none'
        yield fault(first[1], "after", problem, f"after: {first[0]}")
    if len(last) > 1:
        problem = f'a task ends with one step, and nothing waits for "{last[0]}" and "{last[1]}"'
        yield fault(last[0], "", problem, f"let one wait for all others: after: [{', '.join(last[:-1])}]")


def _waiting_and_awaited(after: dict[str, list[str]]) -> tuple[set[str], set[str]]:
    return {name for name, names in after.items() if names}, {one for names in after.values() for one in names}


def _names(step: Any) -> list[str]:
    """The steps that a step waits for, as written."""
    after = step.get("after", ()) if isinstance(step, Map) else ()
    return (
        [after]
        if isinstance(after, str)
        else [name for name in after if isinstance(name, str)]
        if isinstance(after, Seq)
        else []
    )


def _faults_of_step(name: str, step: Any, steps: Map, tools: list[str], fault: Any) -> Iterator[Fault]:
    if not isinstance(step, Map):
        return
    after, tool = _names(step), step.get("tool")
    for kind in [tool] if isinstance(tool, str) else list(tool) if isinstance(tool, Map) else []:
        if kind not in tools:
            known = meant(kind, tools) if tools else f"tools: {{{kind}: {{time: 1s, result_tokens: 500}}}}"
            yield fault(name, "tool", f'unknown tool "{kind}"', known)
    begins = not after or "context" in step
    message, several = "input_tokens" in step, step.get("turns", 1) != 1
    if not message and not after:
        yield fault(name, "", f'step "{name}" begins the task, without a message', "input_tokens: 500")
    elif not message and not tool and (several or (len(after) < 2 and not begins)):
        later = "" if len(after) < 2 and not begins else " after its first request"
        hint = "input_tokens: 500 (a message), or tool: (the result of one)"
        yield fault(name, "", f'step "{name}" sends nothing new{later}', hint)
    if "think_time" in step and not message:
        yield fault(name, "think_time", "nobody thinks before the result of a tool", "the time of a tool is its own")
    if not begins and "system_tokens" in step:
        problem = f'step "{name}" continues the context of "{after[0]}", which has its system message'
        yield fault(name, "system_tokens", problem, "leave it out, or add context: new")
    if not begins and isinstance(before := steps.get(after[0]), Map) and before.get("parallel", 1) != 1:
        problem = f'step "{name}" cannot continue the context of "{after[0]}", which runs several times side by side'
        yield fault(name, "after", problem, "name first the step whose context goes on, or add context: new")
