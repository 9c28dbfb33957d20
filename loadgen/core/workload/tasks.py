"""Tasks as a workload file writes them: steps that wait for each other, and the tools between them.

Of agents all steps are chats; of a pipeline some ask for embeddings or a ranking, each at an endpoint of its own.

This module checks that the steps are a graph that begins once, ends once and gets there. What a task of a given number
looks like is drawn in `requests/task_graphs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    Strict,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from loadgen.core import format, units
from loadgen.core.errors import Code, Fault, UserError, meant
from loadgen.core.workload.distributions import Delay, Fixed, FixedDuration, FixedTokens, Length
from loadgen.core.workload.fields import OneTokenOrMore, Positive, Share, Tokens
from loadgen.core.workload.file_models import FileContext, Part
from loadgen.core.workload.yaml_marks import Map, Seq, Spot, child, where

MOST_REQUESTS = 10_000  # of one task
MOST_DOCUMENTS = 1_000
TARGET_NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"  # that a URL cannot be taken for
SMALLEST_SCHEMA = 48  # tokens of the definition of a tool without a description
_MakeFault = Callable[
    [Code, str, str, str, str], Fault
]  # of a step: its name, the key in it, problem and hint
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"  # what servers take as the name of a function


class Tool(Part):
    """A kind of tool: what its definition adds to every prompt, how long it works, and what it gives back.

    Without `result_tokens` no model knows it: it is a part of the pipeline (a vector search), of which the time counts.
    """

    # of its definition in the field `tools` (as compact JSON)
    schema_tokens: Annotated[Tokens, Field(ge=SMALLEST_SCHEMA)] = 100
    # it works
    time: Delay = FixedDuration.model_construct(value=0)
    # it gives back; without: a part of the pipeline, unknown to the model
    result_tokens: Length | None = None


class Documents(Part):
    """What a retrieval brings: chunks of a corpus, drawn by popularity (Zipf), none twice."""

    count: Length = FixedTokens.model_construct(value=20)
    tokens: OneTokenOrMore = 384  # of each
    corpus: Annotated[int, Strict(), Field(ge=1, le=10_000_000)] = 10_000  # chunks in it
    zipf: Annotated[float, Strict(), Field(ge=0, le=10)] = (
        1.0  # chunk k in proportion to 1 / k^zipf; 0: evenly
    )

    @model_validator(mode="after")
    def _drawable(self) -> Documents:
        largest = most(self.count)
        if largest is None or largest > MOST_DOCUMENTS:
            raise units.Wrong(
                "out_of_range",
                f"has a count that may be over {MOST_DOCUMENTS}",
                "count: {uniform: {min: 3, max: 20}}",
            )
        if largest > self.corpus:
            raise units.Wrong(
                "out_of_range",
                f"draws {largest} different chunks from {self.corpus}",
                "a larger corpus",
            )
        return self


class StepTarget(Part):
    """The endpoint of a step, where the workload itself names it."""

    url: Annotated[str, Field(min_length=1)]
    api_key_env: str | None = (
        None  # the environment variable with its key; None: the key of the run
    )


class TaskStep(Part):
    """A step of a task: `turns` requests one after the other, `parallel` times side by side.

    Each request of a chat begins with something new: a message of the user, or the result of a tool that the answer
    before it called, or the answers of other steps. One for embeddings or a ranking is a text alone. What has no
    message and nothing to go on from asks the question of the step before it.
    """

    # embed: its text to `/v1/embeddings`; rerank: as the query to `/v1/rerank`; without tokens, turns or context
    kind: Literal["chat", "embed", "rerank"] = "chat"
    # name of an endpoint of `--url` or `--targets`, or `{url: ..., api_key_env: NAME}`; else the run's
    target: Annotated[str, Field(pattern=TARGET_NAME)] | StepTarget | None = None
    # asked for there; else the only one it lists
    model: Annotated[str, Field(min_length=1)] | None = None

    # steps that must have ended. The first one's context goes on; the others' answers come as results of calls
    after: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
        WithJsonSchema(
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
        ),
    ] = ()
    # `new`: its own, a system message and its message; without `input_tokens` the answers it waits for
    context: Literal["new"] | None = None
    # of a context that begins here, equal in all tasks
    system_tokens: Tokens = 0
    # a user's message: before its first request, without `tool` before later ones too
    input_tokens: Length | None = None
    # before each such message but the one that begins the task
    think_time: Delay = FixedDuration.model_construct(value=0)
    # runs before its requests; or several with weights, drawn for each. The answer before calls it
    tool: Annotated[
        dict[str, Positive] | None,
        BeforeValidator(lambda value: {value: 1.0} if isinstance(value, str) else value),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "object", "additionalProperties": {"type": "number"}},
                ]
            }
        ),
    ] = None
    # what a rerank ranks; what stands at the start of a chat's message
    documents: Documents | None = None
    # of a chat right after a rerank: so many of its documents, drawn, not by the ranking
    best: Annotated[int, Strict(), Field(ge=1)] | None = None
    # of each answer; required of chats
    output_tokens: Length | None = None
    # requests one after the other; laws need a `max`
    turns: Length = FixedTokens.model_construct(value=1)
    # such rows side by side
    parallel: Length = FixedTokens.model_construct(value=1)

    @field_validator("turns", "parallel")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        if most(value) is None:
            raise units.Wrong(
                "endless", "has no upper end", "{lognormal: {median: 8, sigma: 0.5, max: 30}}"
            )
        return value


def most(length: Any) -> int | None:
    """The largest value of a length; None where there is none."""
    if hasattr(length, "values"):
        return int(max(length.values))
    largest: int | None = length.value if isinstance(length, Fixed) else length.max
    return largest


class Task(Part):
    """A graph of steps with one request at its beginning and one at its end: an agent's task, or a pipeline."""

    # by name, below
    steps: Annotated[dict[Annotated[str, Field(pattern=_NAME)], TaskStep], Field(min_length=1)]
    # by name; every request carries all definitions
    tools: dict[Annotated[str, Field(pattern=_NAME)], Tool] = Field(default_factory=dict)
    # of requests whose answer calls a tool. Servers without a parser of calls take `none`
    tool_choice: Literal["auto", "none", "required"] | None = None
    # earlier answers: from the seed, or the server's; one without a call stands as the argument of one
    history: Literal["scripted", "server"] = "scripted"
    # tasks whose user goes away within an answer: what is in flight is cancelled, the rest never sent, nothing failed
    abandoned: Share = 0.0

    @model_validator(mode="before")
    @classmethod
    def _is_a_graph(cls, data: Any, info: ValidationInfo) -> Any:
        if (
            isinstance(info.context, FileContext)
            and isinstance(data, Map)
            and isinstance(data.get("steps"), Map)
        ):
            tools = data.get("tools", {})
            known = tools if isinstance(tools, dict) else {}
            info.context.faults.extend(_faults(data["steps"], known, info.context))
        return data

    @model_validator(mode="after")
    def _fits(self) -> Task:
        if self.width > MOST_REQUESTS:
            problem = (
                f"may have {format.counted(self.width, 'request')}, more than {MOST_REQUESTS:,}"
            )
            raise units.Wrong("too_large", problem, "lower the max of turns or parallel")
        if self.tool_choice is not None and not self.known_tools:
            raise units.Wrong(
                "missing_key",
                "has tool_choice, and no tools",
                "tools: {search: {time: 1s, result_tokens: 500}}",
            )
        return self

    @property
    def known_tools(self) -> dict[str, Tool]:
        """The tools that the model knows, by name."""
        return {name: tool for name, tool in self.tools.items() if tool.result_tokens is not None}

    @property
    def fixed_turns(self) -> bool:
        """Whether all tasks have the same requests, which differ in their lengths alone."""
        lengths = [length for step in self.steps.values() for length in (step.turns, step.parallel)]
        return all(isinstance(length, Fixed) for length in lengths)

    @property
    def width(self) -> int:
        """The most requests that a task may have."""
        return sum(
            (most(step.turns) or 0) * (most(step.parallel) or 0) for step in self.steps.values()
        )

    @property
    def side_by_side(self) -> int:
        """At most so many requests of a task are in flight at one time: steps that do not wait for each other."""
        before: dict[str, set[str]] = {}
        for name in self.order:
            after = self.steps[name].after
            before[name] = set(after).union(*(before[one] for one in after))
        copies = {name: most(step.parallel) or 0 for name, step in self.steps.items()}
        return max(
            sum(
                n
                for other, n in copies.items()
                if other not in before[name] and name not in before[other]
            )
            for name in copies
        )

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the steps, each after those that it waits for."""
        return tuple(
            TopologicalSorter(
                {name: step.after for name, step in self.steps.items()}
            ).static_order()
        )


def _faults(steps: Map, tools: Any, source: FileContext) -> Iterator[Fault]:
    """What makes these steps, as they are written, no graph that can be carried out; with the place of each."""
    after = {name: _names(steps[name]) for name in steps}

    def fault(code: Code, name: str, key: str, problem: str, hint: str) -> Fault:
        step, path = steps[name], child(steps.path, name)
        inside = isinstance(step, Map) and key in step
        spot: Spot = step.values_at[key] if inside else steps.keys_at[name]
        at = where(source.file, spot, child(path, key) if inside else path)
        return UserError(code, problem, at, hint, key=child(path, key) if key else path)

    unknown = {(name, one) for name, names in after.items() for one in names if one not in steps}
    for name, one in sorted(unknown):
        yield fault(
            "unknown_name",
            name,
            "after",
            f'step "{name}" waits for "{one}", which is no step',
            meant(one, list(steps)),
        )
    for name in steps:
        yield from _faults_of_step(name, steps[name], steps, tools, fault)
    if unknown or not steps:  # the schema tells that there are none
        return
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        cycle = error.args[1]
        problem = f"steps wait for each other, so none of them can begin: {' after '.join(reversed(cycle))}"
        yield fault(
            "cycle", cycle[0], "after", problem, "a step waits for steps that come before it"
        )
        return
    first, last = (
        [name for name in steps if name not in others] for others in _waiting_and_awaited(after)
    )
    if len(first) > 1:
        problem = (
            f'a task begins with one step, and both "{first[0]}" and "{first[1]}" wait for none'
        )
        yield fault("unsupported", first[1], "after", problem, f"after: {first[0]}")
    if len(last) > 1:
        problem = f'a task ends with one step, and nothing waits for "{last[0]}" and "{last[1]}"'
        yield fault(
            "unsupported",
            last[0],
            "",
            problem,
            f"let one wait for all others: after: [{', '.join(last[:-1])}]",
        )
    for name, does in ((first[0], "begins"), (last[0], "ends")):
        if isinstance(steps[name], Map) and steps[name].get("parallel", 1) != 1:
            problem = (
                f'a task {does} with one request, and "{name}" runs several times side by side'
            )
            hint = (
                "a step before it"
                if does == "begins"
                else "a step after it, which waits for all of them"
            )
            yield fault("unsupported", name, "parallel", problem, hint)


def _waiting_and_awaited(after: dict[str, list[str]]) -> tuple[set[str], set[str]]:
    return {name for name, names in after.items() if names}, {
        one for names in after.values() for one in names
    }


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


def _faults_of_step(
    name: str, step: Any, steps: Map, tools: Any, fault: _MakeFault
) -> Iterator[Fault]:
    if not isinstance(step, Map):
        return
    after, tool = _names(step), step.get("tool")
    kinds = [tool] if isinstance(tool, str) else list(tool) if isinstance(tool, Map) else []
    for kind in kinds:
        if kind not in tools:
            known = (
                meant(kind, list(tools))
                if tools
                else f"tools: {{{kind}: {{time: 1s, result_tokens: 500}}}}"
            )
            yield fault("unknown_name", name, "tool", f'unknown tool "{kind}"', known)
    before = [steps[one] for one in after if isinstance(steps.get(one), Map)]
    of_chats = [_kind(one) == "chat" for one in before]
    begins = not after or "context" in step or _kind(step) != "chat" or not all(of_chats[:1])
    message, several = "input_tokens" in step, step.get("turns", 1) != 1
    with_result = [
        "result_tokens" in tools[kind] for kind in kinds if isinstance(tools.get(kind), Map)
    ]
    known_tool = any(with_result)
    if known_tool and not all(with_result):
        yield fault(
            "conflict", name, "tool", "tools with and without result_tokens", "a step of each"
        )
    if not message and not after:
        problem = f'step "{name}" begins the task, without a message'
        yield fault("missing_key", name, "input_tokens", problem, "input_tokens: 500")
    elif (
        _kind(step) == "chat"
        and not message
        and not known_tool
        and (several or (len(after) < 2 and not begins))
    ):
        later = "" if len(after) < 2 and not begins else " after its first request"
        hint = "input_tokens: 500 (a message), or tool: (the result of one)"
        yield fault(
            "missing_key", name, "input_tokens", f'step "{name}" sends nothing new{later}', hint
        )
    if "think_time" in step and not message:
        yield fault(
            "conflict",
            name,
            "think_time",
            "nobody thinks before the result of a tool",
            "the time of a tool is its own",
        )
    if not begins and "system_tokens" in step:
        problem = (
            f'step "{name}" continues the context of "{after[0]}", which has its system message'
        )
        yield fault("conflict", name, "system_tokens", problem, "leave it out, or add context: new")
    if not begins and before and before[0].get("parallel", 1) != 1:
        problem = f'step "{name}" cannot continue the context of "{after[0]}", which runs several times side by side'
        yield fault(
            "conflict",
            name,
            "after",
            problem,
            "name first the step whose context goes on, or add context: new",
        )
    yield from _faults_of_kind(name, step, before, fault)


def _faults_of_kind(name: str, step: Map, before: list[Map], fault: _MakeFault) -> Iterator[Fault]:
    """What a step says that those of its kind do not have, or does not say that they need."""
    kind = _kind(step)
    if kind == "chat" and "output_tokens" not in step:
        yield fault(
            "missing_key",
            name,
            "output_tokens",
            f'step "{name}" has no output_tokens',
            "output_tokens: 300",
        )
    if kind in ("embed", "rerank"):
        lacking = [
            key
            for key in ("output_tokens", "system_tokens", "turns", "context", "best")
            if key in step
        ]
        for key in (
            lacking
            if kind == "rerank"
            else [*lacking, *(["documents"] if "documents" in step else [])]
        ):
            yield fault(
                "no_effect", name, key, f"a step of kind {kind} has no {key}", "leave it out"
            )
        if kind == "rerank" and "documents" not in step:
            problem = f'step "{name}" has no documents to rank'
            yield fault(
                "missing_key", name, "documents", problem, "documents: {count: 20, tokens: 384}"
            )
    ranked = any(_kind(one) == "rerank" for one in before)
    if kind == "chat" and "best" in step and not ranked:
        hint = "after: the step that ranks, or documents: {}"
        yield fault("missing_key", name, "best", "there is no rerank right before it", hint)
    if kind == "chat" and "best" in step and "documents" in step:
        yield fault(
            "conflict",
            name,
            "best",
            "has both best and documents",
            "best takes those of the rerank before it",
        )


def _kind(step: Map) -> str:
    return str(step.get("kind", "chat"))
