"""Tasks as a workload file describes them: steps that wait for each other, and tools.

All steps of an agent are chats. Some steps of a pipeline ask for embeddings or a ranking, each at
an endpoint of its own. `task_checks.py` checks that the steps are a graph, and
`requests/task_graphs.py` draws the task of a given number.
"""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import Annotated, Any, Literal, Self

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
from loadgen.core.workload.distributions import (
    Delay,
    Fixed,
    FixedDuration,
    FixedTokens,
    Length,
    ListOfValues,
    LogNormal,
    Normal,
)
from loadgen.core.workload.fields import OneTokenOrMore, Positive, Share, Tokens
from loadgen.core.workload.file_models import FileContext, Part
from loadgen.core.workload.task_checks import check_steps
from loadgen.core.workload.yaml_marks import Map

MAX_TASK_REQUESTS = 10_000  # of one task
MAX_DOCUMENTS = 1_000
TARGET_NAME = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"  # that a URL cannot be taken for
MIN_SCHEMA_TOKENS = 48  # tokens of the definition of a tool without a description
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
"""The names of steps and tools, which servers accept as names of functions."""


class Tool(Part):
    """A kind of tool: its definition, the time it takes, and the size of its result.

    Without `result_tokens` the model does not know the tool: it is a part of the pipeline, such as
    a vector search, and only its time counts.
    """

    # The tokens of the definition of the tool in the field `tools`, as compact JSON.
    schema_tokens: Annotated[Tokens, Field(ge=MIN_SCHEMA_TOKENS)] = 100
    # How long a call of the tool takes.
    time: Delay = FixedDuration.model_construct(value=0)
    # The tokens of a result. Without this key the tool is a part of the pipeline that the model
    # does not know.
    result_tokens: Length | None = None


class Documents(Part):
    """The result of a retrieval: chunks of a corpus, drawn by popularity (Zipf's law).

    No chunk occurs twice.
    """

    count: Length = FixedTokens.model_construct(value=20)
    # The tokens of each chunk.
    tokens: OneTokenOrMore = 384
    # The number of chunks in the corpus.
    corpus: Annotated[int, Strict(), Field(ge=1, le=10_000_000)] = 10_000
    # Chunk k is drawn in proportion to 1 / k^zipf. With 0 all chunks are equally likely.
    zipf: Annotated[float, Strict(), Field(ge=0, le=10)] = 1.0

    @model_validator(mode="after")
    def _check_corpus_is_large_enough(self) -> Self:
        """Refuse a count of more chunks than the corpus has, or than a request may have."""
        if is_unbounded(self.count) or largest_value(self.count) > MAX_DOCUMENTS:
            problem = f"has a count that can exceed {MAX_DOCUMENTS}"
            hint = "for example count: {uniform: {min: 3, max: 20}}"
            raise units.InvalidValueError("out_of_range", problem, hint)

        # No chunk occurs twice in a request.
        max_count = largest_value(self.count)
        corpus_size = self.corpus
        if max_count > corpus_size:
            problem = f"needs {max_count} different chunks from {corpus_size}"
            raise units.InvalidValueError("out_of_range", problem, "a larger corpus")

        return self


class StepTarget(Part):
    """The endpoint of a step, if the workload itself names it."""

    url: Annotated[str, Field(min_length=1)]
    # The environment variable that holds its API key. Without it, the key of the run is sent.
    api_key_env: str | None = None


class TaskStep(Part):
    """A step of a task: `turns` requests one after the other, `parallel` times side by side.

    Each request of a chat contains something new. This is a message of the user, the result of a
    tool that the response before it called, or the responses of other steps. A request for
    embeddings or a ranking is a text alone. A step that has no message and no context to continue
    sends the message of the step before it.
    """

    # `embed` sends the text of the step to `/v1/embeddings`, and `rerank` sends it as the query to
    # `/v1/rerank`. Such a step has no output tokens, turns or context.
    kind: Literal["chat", "embed", "rerank"] = "chat"
    # The endpoint of the step: a name that `--url` or `--targets` gives to an endpoint, or
    # `{url: ..., api_key_env: NAME}`. By default it is that of the run.
    target: Annotated[str, Field(pattern=TARGET_NAME)] | StepTarget | None = None
    # The model that is requested from this endpoint. By default it is the only model that the
    # endpoint lists.
    model: Annotated[str, Field(min_length=1)] | None = None

    # The steps that must have ended before this step starts. It continues the context of the first
    # of them, and gets the responses of the others as results of tool calls.
    after: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
        WithJsonSchema(
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
        ),
    ] = ()
    # `new` starts a new context with a system message and the message of the step. Without
    # `input_tokens` this message holds the responses of the steps that it waits for.
    context: Literal["new"] | None = None
    # The tokens of the system message of a context that begins with this step. It is the same in
    # all tasks.
    system_tokens: Tokens = 0
    # The tokens of a message of the user before the first request. In a step without `tool` there
    # is such a message before each later request, too.
    input_tokens: Length | None = None
    # How long the user thinks before each message, except before the one that begins the task.
    think_time: Delay = FixedDuration.model_construct(value=0)
    # The tool that runs before each request of the step, called by the response before it. Of
    # several tools with weights, one is drawn for each request.
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
    # The documents that a rerank ranks, or that the message of a chat begins with.
    documents: Documents | None = None
    # How many documents of the rerank before it a chat gets. They are drawn at random, not chosen
    # by the ranking.
    best: Annotated[int, Strict(), Field(ge=1)] | None = None
    # The tokens of each response. A chat must have this key.
    output_tokens: Length | None = None
    # The number of requests one after the other. A distribution must have a `max`.
    turns: Length = FixedTokens.model_construct(value=1)
    # How many times the step runs at the same time. A distribution must have a `max`.
    parallel: Length = FixedTokens.model_construct(value=1)

    @field_validator("turns", "parallel")
    @classmethod
    def _check_has_upper_end(cls, value: Length) -> Length:
        """Refuse a distribution without a maximum, with which a task could have any size."""
        if is_unbounded(value):
            raise units.InvalidValueError(
                "endless", "has no upper limit", "{lognormal: {median: 8, sigma: 0.5, max: 30}}"
            )
        return value


def is_unbounded(length: Length) -> bool:
    """Return True if a length may have any value, as a normal distribution without a maximum."""
    return isinstance(length, Normal | LogNormal) and length.max is None


def largest_value(length: Length) -> int:
    """Return the largest value of a length, which must not be unbounded."""
    if isinstance(length, Fixed):
        return length.value
    if isinstance(length, ListOfValues):
        return max(length.values)

    assert length.max is not None, "an unbounded length has no largest value"
    return length.max


class Task(Part):
    """A graph of steps that begins with one request and ends with one.

    It is the task of an agent, or a pipeline.
    """

    # The steps of the task by their names.
    steps: Annotated[dict[Annotated[str, Field(pattern=_NAME)], TaskStep], Field(min_length=1)]
    # The tools by their names. Every request contains the definitions of all of them.
    tools: dict[Annotated[str, Field(pattern=_NAME)], Tool] = Field(default_factory=dict)
    # The field `tool_choice` of requests whose response calls a tool. Servers that cannot parse
    # tool calls need `none`.
    tool_choice: Literal["auto", "none", "required"] | None = None
    # The earlier responses in later requests: drawn from the seed (`scripted`), or the real ones of
    # the server (`server`). A real response without a tool call is sent as the argument of a call.
    history: Literal["scripted", "server"] = "scripted"
    # The share of tasks whose user leaves during a response. Requests in flight are then cancelled
    # and later ones are not sent, and none of them counts as failed.
    abandoned: Share = 0.0

    @model_validator(mode="before")
    @classmethod
    def _check_graph(cls, data: Any, info: ValidationInfo) -> Any:
        """Add the errors of the steps as they are written to those of the file."""
        steps = data.get("steps") if isinstance(data, Map) else None
        if isinstance(info.context, FileContext) and isinstance(steps, Map):
            errors = check_steps(steps, data.get("tools"), info.context.file)
            info.context.errors.extend(errors)
        return data

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        """Refuse a task that may have more requests than are allowed."""
        max_requests = self.max_requests
        if max_requests > MAX_TASK_REQUESTS:
            problem = (
                f"may have {format.counted(max_requests, 'request')}, but at most "
                f"{MAX_TASK_REQUESTS:,} are allowed"
            )
            hint = "lower the maximum of turns or parallel"
            raise units.InvalidValueError("too_large", problem, hint)
        return self

    @model_validator(mode="after")
    def _check_tool_choice_has_tools(self) -> Self:
        """Refuse a tool choice if the model knows no tools."""
        if self.tool_choice is not None and not self.known_tools:
            raise units.InvalidValueError(
                "missing_key",
                "has tool_choice, but no tools",
                "for example tools: {search: {time: 1s, result_tokens: 500}}",
            )
        return self

    @property
    def known_tools(self) -> dict[str, Tool]:
        """The tools that the model knows, by name."""
        return {name: tool for name, tool in self.tools.items() if tool.result_tokens is not None}

    @property
    def has_fixed_turns(self) -> bool:
        """Whether all tasks have the same requests, which differ in their lengths alone."""
        lengths = [length for step in self.steps.values() for length in (step.turns, step.parallel)]
        return all(isinstance(length, Fixed) for length in lengths)

    @property
    def max_requests(self) -> int:
        """The most requests that a task may have."""
        # The validators have refused unbounded numbers.
        return sum(
            largest_value(step.turns) * largest_value(step.parallel) for step in self.steps.values()
        )

    @property
    def max_concurrent_requests(self) -> int:
        """An upper bound of the requests of a task that are in flight at the same time.

        It is the largest bound of a step. The bound may be too large: if both B and C can run
        together with A, but not with each other, the bound of A adds up all three.
        """
        return max(self._max_requests_during(step) for step in self.steps)

    def _max_requests_during(self, step_name: str) -> int:
        """Return an upper bound of the requests in flight while a step runs.

        The most parallel requests of the step and of all steps that can run at the same time are
        added up. Each parallel copy of a step has one request at a time.
        """
        return sum(
            largest_value(self.steps[name].parallel)
            for name in self._steps_at_the_same_time(step_name)
        )

    def _steps_at_the_same_time(self, step_name: str) -> list[str]:
        """Return the steps that can run at the same time as a step, the step itself included.

        Two steps can if neither waits for the other, directly or through others.
        """
        ancestors = self._ancestors_of_steps()
        return [
            name
            for name in self.steps
            if name not in ancestors[step_name] and step_name not in ancestors[name]
        ]

    def _ancestors_of_steps(self) -> dict[str, set[str]]:
        """Return, for each step, the steps that it waits for directly or through others."""
        ancestors: dict[str, set[str]] = {}
        for name in self.order:
            parents = self.steps[name].after
            ancestors[name] = set(parents).union(*(ancestors[parent] for parent in parents))
        return ancestors

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the steps, each after those that it waits for."""
        predecessors = {name: step.after for name, step in self.steps.items()}
        return tuple(TopologicalSorter(predecessors).static_order())
