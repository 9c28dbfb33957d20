"""The kinds of requests in a workload file: generated prompts, prompts of a file, traces.

Tasks are in `tasks.py`. The comments at the fields are the descriptions of the keys in
docs/reference/workload-file.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    Strict,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)

from loadgen.core import units
from loadgen.core.workload.distributions import (
    Delay,
    Empirical,
    Fixed,
    FixedDuration,
    Length,
    Listed,
)
from loadgen.core.workload.fields import Count, OneTokenOrMore, Tokens
from loadgen.core.workload.file_models import FileContext, Part

# ---------------------------------------------------------------------------------------------
# generated prompts


class Turns(Part):
    """A conversation: `count` requests, each of which contains all earlier messages."""

    # The number of requests of each conversation.
    count: Annotated[int, Strict(), Field(ge=1, le=10_000)]
    # The tokens of the message that each later turn adds, as a tool would return it.
    tool_result_tokens: Length
    # The time from the end of a turn to the start of the next one.
    tool_time: Delay = FixedDuration.model_construct(value=0)
    # The earlier responses in later turns: drawn from the seed, so that they are the same for every
    # server (`scripted`), or the real responses of the server (`server`).
    history: Literal["scripted", "server"] = "scripted"


class Chunks(Part):
    """Retrieval: each prompt begins with some chunks of a corpus.

    The chunks are drawn by popularity (Zipf's law), and no chunk occurs twice in a prompt.
    """

    synonyms: ClassVar[dict[str, str]] = {
        "size": "tokens",
        "documents": "count",
        "exponent": "zipf",
    }
    count: Annotated[int, Strict(), Field(ge=1, le=1_000)] = 3
    # The tokens of each chunk.
    tokens: OneTokenOrMore = 384
    # The number of chunks in the corpus.
    corpus: Annotated[int, Strict(), Field(ge=1, le=10_000_000)] = 10_000
    # Chunk k is drawn in proportion to 1 / k^zipf. With 0 all chunks are equally likely.
    zipf: Annotated[float, Strict(), Field(ge=0, le=10)] = 1.0

    @model_validator(mode="after")
    def _check_corpus_is_large_enough(self) -> Self:
        if self.count > self.corpus:
            problem = f"needs {self.count} different chunks from {self.corpus}"
            raise units.InvalidValueError("out_of_range", problem, "a larger corpus")
        return self


Pixels = Annotated[int, Strict(), Field(ge=1, le=8192)]


class Images(Part):
    """Images in each (first) message, drawn from the seed.

    Their tokens come on top of `input_tokens`.
    """

    count: Annotated[int, Strict(), Field(ge=1, le=100)] = 1
    width: Pixels = 512
    height: Pixels = 512


def _parse_cache_state(value: object, info: ValidationInfo) -> float:
    """Return the cache hit rate that a value of the key `cache` stands for.

    It is the share of the tokens of each prompt that the prefix cache of the server contains: 0.0
    for `cold`, 1.0 for `warm`, and 0.6 for `{hit_rate: 60%}`. A workload that is built in Python,
    without a file, may have the number itself. Raises `InvalidValueError` for anything else.
    """
    is_built_in_python = not isinstance(info.context, FileContext)
    match value:
        case float() if is_built_in_python:
            return value
        case "cold":
            return 0.0
        case "warm":
            return 1.0
        case {"hit_rate": str() as hit_rate, **other_keys} if not other_keys:
            return units.share(hit_rate)
        case _:
            hint = "use cache: cold, cache: warm, or cache: {hit_rate: 60%}"
            raise units.InvalidValueError("unknown_name", "is not a state of a cache", hint)


CacheState = Annotated[
    float,
    PlainValidator(_parse_cache_state),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["cold", "warm"]},
                {
                    "type": "object",
                    "properties": {"hit_rate": {"type": "string", "pattern": units.SHARE_PATTERN}},
                    "required": ["hit_rate"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]


class Synthetic(Part):
    """Generated prompts that have exactly the specified numbers of tokens."""

    synonyms: ClassVar[dict[str, str]] = {
        "isl": "input_tokens",
        "osl": "output_tokens",
        "input": "input_tokens",
        "output": "output_tokens",
        "prompt_tokens": "input_tokens",
        "max_tokens": "output_tokens",
        "random_input_len": "input_tokens",
        "random_output_len": "output_tokens",
    }
    # The tokens of the prompt as the server counts them, including the shared prefix and the
    # chunks. In a conversation, they are those of the first prompt.
    input_tokens: Length
    # The tokens of each response.
    output_tokens: Length
    # The tokens at the start of a prompt that all prompts of a prefix group have in common.
    shared_prefix_tokens: Tokens = 0
    # The number of prefix groups, that is, of different shared prefixes.
    prefixes: Count = 1
    # The tokens of a system message, which is the same for all requests. They come on top of
    # `input_tokens`.
    system_tokens: Tokens = 0
    # Makes each start a conversation of several requests.
    turns: Turns | None = None
    # Chunks of a corpus at the start of each prompt, as retrieval puts them there.
    chunks: Chunks | None = None
    # PNG images in each first message. Their tokens come on top of `input_tokens`.
    images: Images | None = None
    # The text of prompts: random words, or a few random words and then passages of a book.
    prompts: Literal["random", "natural"] = "random"
    # How much of each prompt the prefix cache of the server contains: nothing (`cold`), everything
    # (`warm`), or a share (`{hit_rate: 60%}`).
    cache: CacheState | None = None

    @model_validator(mode="after")
    def _check_cache_stands_alone(self) -> Self:
        """Refuse `cache` beside keys that also decide which beginnings prompts share."""
        if self.cache is None:
            return self
        for key in ("shared_prefix_tokens", "turns", "chunks"):
            if getattr(self, key):
                hint = "cache creates the shared prefixes; keep one of the two"
                raise units.InvalidValueError("conflict", f"has both cache and {key}", hint)
        return self

    @model_validator(mode="after")
    def _check_shared_beginning(self) -> Self:
        """Refuse prompts that are too short for the beginning that they share with others.

        Prompts may begin with chunks of a corpus or with a shared prefix, but not with both. A
        shortest length of 0 means that the distribution of lengths has no lower bound.
        """
        shortest_prompt = _smallest_value(self.input_tokens)
        if self.chunks is not None:
            self._refuse_beginnings_besides_chunks()
            self._check_chunks_fit(self.chunks, shortest_prompt)

        if shortest_prompt and self.shared_prefix_tokens > shortest_prompt:
            problem = (
                f"has a shared prefix of {self.shared_prefix_tokens} tokens in "
                f"prompts of only {shortest_prompt} tokens"
            )
            hint = "shared_prefix_tokens is part of input_tokens"
            raise units.InvalidValueError("out_of_range", problem, hint)

        return self

    def _refuse_beginnings_besides_chunks(self) -> None:
        """Refuse keys that define another beginning of prompts, if prompts begin with chunks."""
        if self.shared_prefix_tokens or self.turns:
            problem = "has chunks together with shared_prefix_tokens or turns"
            raise units.InvalidValueError("conflict", problem, "keep one of them")

    def _check_chunks_fit(self, chunks: Chunks, shortest_prompt: int) -> None:
        """Refuse prompts that are not longer than their chunks.

        A prompt is its chunks and then a question, which needs at least one token.
        """
        chunk_tokens = chunks.count * chunks.tokens
        if shortest_prompt <= chunk_tokens:
            # A distribution without a lower bound can give prompts of one token.
            shortest_tokens = max(shortest_prompt, 1)
            problem = (
                f"has {chunks.count} chunks of {chunks.tokens} tokens in prompts of "
                f"only {shortest_tokens} tokens"
            )
            hint = (
                f"set input_tokens to more than {chunk_tokens}, as a number or with a "
                "min; the rest is the question"
            )
            raise units.InvalidValueError("out_of_range", problem, hint)


def _smallest_value(length: Length) -> int:
    """Return the smallest value of a distribution, or 0 if it has no lower bound."""
    if isinstance(length, Fixed):
        return length.value
    if isinstance(length, Empirical | Listed):
        return min(length.values)
    return length.min or 0


# -----------------------------------------------------------------------------------------------
# files and traces


def _resolve_file(value: object, info: ValidationInfo) -> Any:
    """Return the path for a file name in a workload file. Pydantic calls this for a field.

    The name of a data set of Hugging Face, such as `hf:owner/name`, stays as it is. If the workload
    is built in Python, there is no workload file (no `FileContext`), and `value` is returned
    unchanged. Raises `InvalidValueError` if `value` is not a text, or if there is no such file.
    """
    if not isinstance(info.context, FileContext):
        return value

    if not isinstance(value, str) or not value:
        example = "requests: {from: prompts.jsonl}"
        raise units.InvalidValueError("wrong_type", "is not a file name", example)

    if value.startswith("hf:"):
        return Path(value)

    return _find_file(value, info.context.directory)


def _find_file(file_name: str, directory: Path) -> Path:
    """Return the path of a file with a name relative to the directory of the workload file.

    Raises `InvalidValueError` if it does not exist, or if it is a directory itself.
    """
    path = directory / file_name
    hint = f"give a file, with a path relative to the folder of the workload ({directory})"
    if path.is_dir():
        raise units.InvalidValueError("unreadable_file", "is a folder", hint)
    if not path.is_file():
        raise units.InvalidValueError("missing_file", "does not exist", hint)
    return path


ExistingFile = Annotated[Path, BeforeValidator(_resolve_file)]


class FromFile(Part):
    """The user's own prompts or messages.

    They are the rows of a file or of a data set of Hugging Face.
    """

    synonyms: ClassVar[dict[str, str]] = dict.fromkeys(("path", "file", "dataset"), "from")
    path: ExistingFile = Field(validation_alias="from")
    # The output tokens of rows that do not set them. With `unlimited` such rows are sent without a
    # limit.
    output_tokens: Length | Literal["unlimited"] | None = None
    order: Literal["sequential", "shuffled"] = "sequential"
    # Whether the rows have known answers, which the responses are checked against after the run.
    check_answers: Annotated[bool, Strict()] = False


def _parse_time_slice(value: object, info: ValidationInfo) -> tuple[int, int | None]:
    """Return the begin and the end, in ns, of a range of time such as `10m..20m`.

    A file must have such a text. A workload that is built in Python, without a file, may have a
    pair of numbers in ns. Raises `InvalidValueError` for anything else.
    """
    is_built_in_python = not isinstance(info.context, FileContext)
    if is_built_in_python and isinstance(value, tuple | list):
        begin_ns, end_ns = value
        return begin_ns, end_ns

    if not isinstance(value, str):
        hint = "for example slice: 10m..20m, counted from the first request of the trace"
        raise units.InvalidValueError("wrong_type", "is not a time range", hint)

    return units.time_slice(value)


TimeSlice = Annotated[
    tuple[int, int | None],
    PlainValidator(_parse_time_slice),
    PlainSerializer(list),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^[^.]*(\.[0-9]+)?[a-z]*\.\.[^.]*(\.[0-9]+)?[a-z]*$",
            "examples": ["10m..20m", "..1h"],
        }
    ),
]
"""Begin and end in ns, from the first request of a trace on. The end may be None."""
OnBadRow = Literal["fail", "skip"]
TraceReplay = Literal["instants", "sessions"]


class FromTrace(Part):
    """Prompts that are as long as those of a trace and share the beginnings that those share.

    The text of the prompts is new in every run.
    """

    synonyms: ClassVar[dict[str, str]] = {"path": "trace", "file": "trace"}
    trace: ExistingFile
    # The part of the trace whose requests are sent, such as `10m..20m`.
    slice_ns: TimeSlice | None = Field(default=None, validation_alias="slice")
    # With `skip`, rows with mistakes are left out and counted.
    on_bad_row: OnBadRow = "fail"
    # With `sessions`, a request waits for the requests of its session that it followed in the
    # trace.
    replay: TraceReplay = "instants"
    # The unit of the times, for formats that do not define it. By default it is decided from all
    # rows.
    unit: units.TimeUnit | None = None
