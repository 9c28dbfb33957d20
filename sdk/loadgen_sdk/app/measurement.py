"""The measurement of one call of an application: instants, attempts, token counts, cost.

A `Measurement` stores the observed instants. Its figures are computed from them by the definitions in `measures`. It
holds no text of a prompt or an answer unless the caller asked for it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextvars import Context, ContextVar
from typing import Any, Literal

import msgspec

from .. import measures
from ..prices import warn_once
from ..request import NEVER, Failure

Api = Literal[
    "chat",
    "completions",
    "responses",
    "messages",
    "embeddings",
    "rerank",
    "batches",
    "images",
    "speech",
    "transcriptions",
]
WRITING = frozenset(
    ("chat", "completions", "responses", "messages")
)  # the APIs whose answers are written
TEXT = WRITING | {
    "embeddings",
    "rerank",
}  # those whose prompts are text, of which traces keep the shape
Status = Literal["ok", "failed", "cancelled", "abandoned"]


MOST_DELAY = 0.05
"""The share of a time that the client may have added to it, as for the runs of the generator."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a call. Instants are monotonic ns. `failure` None: it was answered."""

    started: int
    ended: int
    failure: Failure | None = None
    waited_ms: float = 0.0  # wait between this attempt and the next: back-off or Retry-After


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a call (`n` asks for several). `tool_calls`: each with id, name and arguments (JSON, as text)."""

    text: str = ""
    finish_reason: str = ""
    tool_calls: tuple[dict[str, str], ...] = ()


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of a call, kept only on request: `input` as given (messages, prompt or input), `output` the text of the
    first answer, `choices` every answer with its finish reason and tool calls.
    """

    input: Any
    output: str
    choices: tuple[Choice, ...] = ()


class Measurement(msgspec.Struct, frozen=True):
    """The measurement of one call. Instants: integer ns of `time.monotonic_ns`, -1: never. Figures: ms, None: unknown.

    The definitions are those of the load generator. The call begins at `started`. Waits for a throttle and earlier
    attempts lie between `started` and `sent`: `ttft_ms` is the time that the application waited, `ttft_from_sent_ms`
    the time that the server took. Give its fields by name; only `Call.report` gives them by place, which costs a
    twelfth.
    """

    api: Api
    streamed: bool
    status: Status
    started: int
    started_unix_ns: int  # the same instant by the wall clock
    sent: int = NEVER  # the last attempt's start; with the project's own client the first byte handed to the kernel
    first_token: int = NEVER  # first event with generated output
    first_answer: int = NEVER  # first event with output that is not reasoning
    last_token: int = NEVER
    end: int = NEVER  # last output or finish event
    done: int = NEVER  # when the call was answered, failed, or given up
    instants: tuple[int, ...] = ()  # of every output event
    first_event_tokens: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None  # of the input tokens
    cache_written_tokens: int | None = (
        None  # of the input tokens, by servers that bill what goes into their cache
    )
    reasoning_tokens: int | None = None  # of the output tokens
    token_source: Literal["server", "events", ""] = (
        ""  # of the output count; "events": one token per event assumed
    )
    cost: float | None = None  # in the currency of the price given; None without price or counts
    attempts: tuple[Attempt, ...] = ()
    hidden_retries: int = 0  # made by the wrapped client inside the attempts
    finish_reason: str = ""
    failure: Failure | None = None
    model: str = ""  # as requested
    response_model: str = ""  # as named in the answer
    response_id: str = ""
    request_id: str = ""  # the server's id of the request: the x-request-id header
    server: str = ""  # host:port
    server_timing: dict[str, Any] = {}
    kernel_stamps: bool = False  # the instants are kernel stamps, not the times of the reads
    content: Content | None = None
    labels: dict[str, str] = {}  # see `labelled`
    parameters: dict[
        str, int | float
    ] = {}  # numbers of the request: temperature, max_tokens, seed, n, ...
    client_delay_ms: float | None = (
        None  # how long the call's thread waited for a processor; None: not known
    )

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token, from the call. For an answer that is not streamed, the time of the whole answer."""
        return _ms(measures.ttft(self.started, self.first_token))

    @property
    def ttft_from_sent_ms(self) -> float | None:
        """Time to first token from `sent`, the start of the last attempt."""
        return _ms(measures.ttft_from_sent(self.sent, self.first_token))

    @property
    def first_answer_ms(self) -> float | None:
        """Time from the call to the first output that is not reasoning."""
        return _ms(measures.first_answer(self.started, self.first_answer))

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first event. None for one token and for answers that are not streamed."""
        if self.output_tokens is None:
            return None
        streamed_tokens = measures.streamed_tokens(
            self.output_tokens, self.reasoning_tokens or 0, self.first_token, self.first_answer
        )
        n: float = streamed_tokens
        if self.choices > 1:  # the time that a reader of one choice sees
            n = streamed_tokens / self.choices
        return _ms(
            measures.tpot(self.first_token, self.last_token, n, self.first_event_tokens or 1)
        )

    @property
    def choices(self) -> int:
        """How many completions the call requested (`n`)."""
        choices = self.parameters.get("n", 1)
        return choices if isinstance(choices, int) and choices > 0 else 1

    @property
    def e2e_ms(self) -> float | None:
        """Time from the call to the last output or finish event."""
        return _ms(measures.e2e(self.started, self.end))

    @property
    def is_delayed(self) -> bool:
        """Whether the client waited for a processor for more than MOST_DELAY of TTFT, or of E2E.

        Then the times may be longer than the server's by up to `client_delay_ms`. It does not
        matter where the kernel takes the times.
        """
        if self.kernel_stamps:
            return False
        times_ms = [time_ms for time_ms in (self.ttft_ms, self.e2e_ms) if time_ms is not None]
        return bool(times_ms) and (self.client_delay_ms or 0.0) > MOST_DELAY * min(times_ms)

    @property
    def wait_ms(self) -> float | None:
        """Time from the call to the start of the last attempt: throttle, earlier attempts and back-off.

        For a call that was never sent, the time until it was given up.
        """
        return _ms(measures.send_lag(self.started, self.done if self.sent == NEVER else self.sent))

    @property
    def inter_chunk_ms(self) -> tuple[float, ...]:
        """Gaps between successive output events."""
        return tuple(gap / 1e6 for gap in measures.gaps(self.instants))

    @property
    def itl_ms(self) -> tuple[float, ...] | None:
        """`inter_chunk_ms` if every event carried one token of one choice, else None.

        Gaps between bundles of tokens, and between the tokens of different choices, are not ITL.
        """
        if self.choices > 1 or self.output_tokens != len(self.instants):
            return None
        return self.inter_chunk_ms

    @property
    def retries(self) -> int:
        """The number of attempts after the first, with those of the wrapped client."""
        return max(0, len(self.attempts) - 1) + self.hidden_retries

    def to_dict(self) -> dict[str, Any]:
        """Every field and every figure, of failed calls too, as plain values: for JSON, a log line, a table."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        figures = {name: getattr(self, name) for name in FIGURES}
        return fields | {
            name: [*value] if isinstance(value, tuple) else value for name, value in figures.items()
        }

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return msgspec.json.encode(self.to_dict()).decode()


FIGURES = (
    "ttft_ms",
    "ttft_from_sent_ms",
    "first_answer_ms",
    "tpot_ms",
    "e2e_ms",
    "wait_ms",
    "inter_chunk_ms",
    "itl_ms",
    "retries",
    "is_delayed",
)
"""The properties of a Measurement that `to_dict` adds to its fields."""

PARAMETERS = frozenset(
    (
        "temperature",
        "top_p",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "seed",
        "n",
        "frequency_penalty",
        "presence_penalty",
    )
)


def parameters_of(arguments: Mapping[str, Any]) -> dict[str, int | float]:
    """The numbers of a request that telemetry shows. Never a text."""
    if PARAMETERS.isdisjoint(arguments):
        return {}
    return {
        name: arguments[name]
        for name in PARAMETERS.intersection(arguments)
        if type(arguments[name]) in _NUMBERS
    }


_NUMBERS = (int, float)  # a bool is none

_LOCAL_KINDS = frozenset(
    (
        "dns",
        "connect",
        "tls",
        "reset",
        "timeout_total",
        "timeout_stall",
        "interrupted",
        "truncated",
        "client_resource",
    )
)
"""Failures whose text is made here. Those of other kinds may quote the prompt."""


def without_server_text(failure: Failure, code: str = "") -> Failure:
    """`failure` without what the server wrote: the text becomes the error's code, or the status."""
    if failure.kind in _LOCAL_KINDS:
        return failure
    if not (
        0 < len(code) <= 64 and code.replace("_", "").replace("-", "").replace(".", "").isalnum()
    ):
        code = f"HTTP {failure.http_status}" if failure.http_status else failure.kind
    return Failure(failure.kind, code, failure.http_status)


_latest: ContextVar[Measurement | None] = ContextVar("loadgen_sdk_measurement", default=None)


def latest_measurement() -> Measurement | None:
    """The last call that ended in this context (task or thread), or None."""
    return _latest.get()


def measurement_of(answer: object) -> Measurement | None:
    """The measurement of an answer, a raw response, a stream or a stream manager of an instrumented client.

    None while a stream has not ended, and for what is not measured. For type checkers, which cannot know of the
    attribute `measurement`.
    """
    for _ in range(4):
        found = getattr(answer, "measurement", None)
        if isinstance(found, Measurement):
            return found
        inner = vars(answer) if hasattr(answer, "__dict__") else {}
        names = [
            name
            for name in inner
            if name == "_raw_stream" or name.endswith(("Manager__stream", "__raw_stream"))
        ]
        if not names:
            return None
        answer = inner[names[0]]
    return None


def attach(owner: object, measurement: Measurement) -> None:
    """Make it `owner.measurement`: what the server sent stays all that dumping and comparing `owner` shows."""
    kind: Any = type(owner)
    if (old := _pydantic_1.get(kind)) is None:
        old = _is_pydantic_1(kind)
    if old:  # it dumps every attribute, and refers to its objects in no other way
        fields = _Fields(getattr(owner, "__fields_set__", ()))
        fields.measurement = measurement
        object.__setattr__(owner, "__fields_set__", fields)
        if not isinstance(vars(kind).get("measurement"), property):
            kind.measurement = property(_attached)
        return
    try:  # `suppress` costs as much as all the rest
        object.__setattr__(owner, "measurement", measurement)  # past pydantic
    except (AttributeError, TypeError):
        pass  # an object without room for it goes without


class _Fields(set[str]):
    """The names that pydantic 1 keeps beside an object's attributes, with a measurement at hand."""

    measurement: Measurement


def _attached(owner: Any) -> Measurement:
    fields = owner.__fields_set__
    if not isinstance(fields, _Fields):
        raise AttributeError("this object has no measurement")
    return fields.measurement


def _is_pydantic_1(kind: type) -> bool:
    bases = (
        base
        for base in kind.__mro__
        if base.__name__ == "BaseModel" and base.__module__.startswith("pydantic")
    )
    old = any(not hasattr(base, "model_validate") for base in bases)
    if len(_pydantic_1) < MOST_KINDS:
        _pydantic_1[kind] = old
    return old


MOST_KINDS = 256  # classes of answers that are remembered
_pydantic_1: dict[type, bool] = {}


def tell_latest(measurement: Measurement) -> None:
    _latest.set(measurement)
    if _COPIES and asyncio._get_running_loop() is not None:
        for context in _waiting_contexts(asyncio.current_task(), 8):
            context.run(_latest.set, measurement)


def _waiting_contexts(task: asyncio.Task[Any] | None, most: int) -> Iterator[Context]:
    """The contexts of those who wait for `task` by `asyncio.wait_for`: until Python 3.11 that makes a task of its own.

    Its callback releases a future, and what waits for that is the task that called `wait_for`, with its context.
    """
    for release, _ in getattr(task, "_callbacks", None) or ():
        waiter = release.args[0] if getattr(release, "func", None) is _RELEASE_WAITER else None
        for wakeup, context in getattr(waiter, "_callbacks", None) or ():
            yield context
            if most > 1 and isinstance(outer := getattr(wakeup, "__self__", None), asyncio.Task):
                yield from _waiting_contexts(outer, most - 1)


_COPIES = sys.version_info < (
    3,
    12,
)  # `asyncio.wait_for` runs what it waits for in a task of its own
_RELEASE_WAITER = getattr(asyncio.tasks, "_release_waiter", None)


def take_latest(context: Context) -> None:
    """The last call that ended in `context` (a copy of this one, for another thread) is the last one here too."""
    _latest.set(context.get(_latest))


def warn_uncounted(model: str) -> None:
    """Prices are given, and the server counted no tokens: say so, once per process and model."""
    text = f"the server sent no token counts for the model {model!r}: its cost is None"
    warn_once(f"{text}; for streams, ask_usage=True requests them")


def warn_contradiction(model: str, contradiction: str) -> None:
    """Say once per process, model and contradiction that the counts of a server are not used."""
    warn_once(
        f"the server's token counts for the model {model!r} contradict each other"
        f" ({contradiction}): they are not used, and the cost is None"
    )


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6
