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
from loadgen.core.workload.distributions import Delay, Fixed, FixedDuration, FixedTokens, Length
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

    # of its definition in the field `tools` (as compact JSON)
    schema_tokens: Annotated[Tokens, Field(ge=MIN_SCHEMA_TOKENS)] = 100
    # it works
    time: Delay = FixedDuration.model_construct(value=0)
    # it gives back; without: a part of the pipeline, unknown to the model
    result_tokens: Length | None = None


class Documents(Part):
    """The result of a retrieval: chunks of a corpus, drawn by popularity (Zipf's law).

    No chunk occurs twice.
    """

    count: Length = FixedTokens.model_construct(value=20)
    tokens: OneTokenOrMore = 384  # of each
    corpus: Annotated[int, Strict(), Field(ge=1, le=10_000_000)] = 10_000  # chunks in it
    zipf: Annotated[float, Strict(), Field(ge=0, le=10)] = (
        1.0  # chunk k in proportion to 1 / k^zipf; 0: evenly
    )

    @model_validator(mode="after")
    def _check_corpus_is_large_enough(self) -> Self:
        """Refuse more documents than the corpus has, or than a request may have."""
        largest = largest_value(self.count)
        if largest is None or largest > MAX_DOCUMENTS:
            problem = f"has a count that may be over {MAX_DOCUMENTS}"
            raise units.Wrong("out_of_range", problem, "count: {uniform: {min: 3, max: 20}}")
        if largest > self.corpus:
            problem = f"draws {largest} different chunks from {self.corpus}"
            raise units.Wrong("out_of_range", problem, "a larger corpus")
        return self


class StepTarget(Part):
    """The endpoint of a step, if the workload itself names it."""

    url: Annotated[str, Field(min_length=1)]
    api_key_env: str | None = (
        None  # the environment variable with its key; None: the key of the run
    )


class TaskStep(Part):
    """A step of a task: `turns` requests one after the other, `parallel` times side by side.

    Each request of a chat begins with something new. This is a message of the user, the result of a
    tool that the answer before it called, or the answers of other steps. A request for embeddings
    or a ranking is a text alone. A step that has no message and no context to continue asks the
    question of the step before it.
    """

    # embed: its text to `/v1/embeddings`; rerank: as the query to `/v1/rerank`; without tokens,
    # turns or context
    kind: Literal["chat", "embed", "rerank"] = "chat"
    # name of an endpoint of `--url` or `--targets`, or `{url: ..., api_key_env: NAME}`; else the
    # run's
    target: Annotated[str, Field(pattern=TARGET_NAME)] | StepTarget | None = None
    # asked for there; else the only one it lists
    model: Annotated[str, Field(min_length=1)] | None = None

    # steps that must have ended. The first one's context goes on; the others' answers come as
    # results of calls
    after: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
        WithJsonSchema(
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
        ),
    ] = ()
    # `new`: its own, a system message and its message; without `input_tokens` the answers it waits
    # for
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
    def _check_has_upper_end(cls, value: Length) -> Length:
        if largest_value(value) is None:
            raise units.Wrong(
                "endless", "has no upper end", "{lognormal: {median: 8, sigma: 0.5, max: 30}}"
            )
        return value


def largest_value(length: Length) -> int | None:
    """Return the largest value of a length, or None if it has no upper end."""
    if hasattr(length, "values"):
        return int(max(length.values))
    largest: int | None = length.value if isinstance(length, Fixed) else length.max
    return largest


class Task(Part):
    """A graph of steps that begins with one request and ends with one.

    It is the task of an agent, or a pipeline.
    """

    # by name, below
    steps: Annotated[dict[Annotated[str, Field(pattern=_NAME)], TaskStep], Field(min_length=1)]
    # by name; every request carries all definitions
    tools: dict[Annotated[str, Field(pattern=_NAME)], Tool] = Field(default_factory=dict)
    # of requests whose answer calls a tool. Servers without a parser of calls take `none`
    tool_choice: Literal["auto", "none", "required"] | None = None
    # earlier answers: from the seed, or the server's; one without a call stands as the argument of
    # one
    history: Literal["scripted", "server"] = "scripted"
    # tasks whose user goes away within an answer: what is in flight is cancelled, the rest never
    # sent, nothing failed
    abandoned: Share = 0.0

    @model_validator(mode="before")
    @classmethod
    def _check_graph(cls, data: Any, info: ValidationInfo) -> Any:
        steps = data.get("steps") if isinstance(data, Map) else None
        if isinstance(info.context, FileContext) and isinstance(steps, Map):
            errors = check_steps(steps, data.get("tools"), info.context.file)
            info.context.errors.extend(errors)
        return data

    @model_validator(mode="after")
    def _check_size_and_tool_choice(self) -> Self:
        if self.width > MAX_TASK_REQUESTS:
            problem = (
                f"may have {format.counted(self.width, 'request')}, more than {MAX_TASK_REQUESTS:,}"
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
    def has_fixed_turns(self) -> bool:
        """Whether all tasks have the same requests, which differ in their lengths alone."""
        lengths = [length for step in self.steps.values() for length in (step.turns, step.parallel)]
        return all(isinstance(length, Fixed) for length in lengths)

    @property
    def width(self) -> int:
        """The most requests that a task may have."""
        return sum(
            (largest_value(step.turns) or 0) * (largest_value(step.parallel) or 0)
            for step in self.steps.values()
        )

    @property
    def max_concurrent_requests(self) -> int:
        """The largest number of requests of a task in flight at one time.

        These are requests of steps that do not wait for each other.
        """
        ancestors: dict[str, set[str]] = {}
        for name in self.order:
            parents = self.steps[name].after
            ancestors[name] = set(parents).union(*(ancestors[parent] for parent in parents))
        copies = {name: largest_value(step.parallel) or 0 for name, step in self.steps.items()}
        concurrent_requests = [
            sum(
                copies[other]
                for other in copies
                if other not in ancestors[name] and name not in ancestors[other]
            )
            for name in copies
        ]
        return max(concurrent_requests)

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the steps, each after those that it waits for."""
        predecessors = {name: step.after for name, step in self.steps.items()}
        return tuple(TopologicalSorter(predecessors).static_order())
