"""The measurement of one call of an application: timestamps, attempts, token counts and cost.

A `Measurement` has the observed timestamps, and its metrics are computed from them by the
definitions in `measures`. It has no text of a prompt or a completion unless the caller asked for
it.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import Context, ContextVar
from typing import Any, Literal, NamedTuple

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
WRITING_APIS = frozenset(("chat", "completions", "responses", "messages"))
"""The APIs that generate text."""

TEXT_APIS = WRITING_APIS | {"embeddings", "rerank"}
"""The APIs whose prompts are text, so that traces record their lengths."""

Status = Literal["ok", "failed", "cancelled", "abandoned"]
TokenSource = Literal["server", "events", ""]

MAX_DELAY_SHARE = 0.05
"""The share of a time that the client may have added to it, as in the runs of the load generator.
"""

_MAX_CODE_CHARS = 64
_MAX_WRAPPERS = 4
_MAX_CACHED_CLASSES = 256


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a call.

    Attributes:
        started: When it began.
        ended: When it ended.
        failure: Why it failed, or None.
        waited_ms: The wait between this attempt and the next one: back-off or Retry-After.
    """

    started: int
    ended: int
    failure: Failure | None = None
    waited_ms: float = 0.0


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of a call, which may request several (`n`).

    Attributes:
        text: The text.
        finish_reason: The finish reason.
        tool_calls: The tool calls: id, name and arguments (JSON, as text).
    """

    text: str = ""
    finish_reason: str = ""
    tool_calls: tuple[dict[str, str], ...] = ()


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """The texts of a call, which are kept only on request.

    Attributes:
        input: The messages, the prompt or the input of the request.
        output: The text of the first completion.
        choices: All completions.
    """

    input: Any
    output: str
    choices: tuple[Choice, ...] = ()


class Measurement(msgspec.Struct, frozen=True):
    """The measurement of one call.

    Timestamps are in ns of `time.monotonic_ns`, and NEVER if the event did not happen. Metrics are
    in ms, and None if they are not known. The definitions are those of the load generator.

    The call begins at `started`. Waits for a throttle and earlier attempts lie between `started`
    and `sent`. `ttft_ms` is the time that the application waited, and `ttft_from_sent_ms` the time
    that the server took. `Call.report` alone passes the fields by position, which is a twelfth
    faster.

    Attributes:
        api: The API.
        streamed: A stream was requested.
        status: How the call ended.
        started: When the call began.
        started_unix_ns: The same time by the wall clock.
        sent: When the last attempt began. For the client of this project, when its first byte was
            passed to the kernel.
        first_token: When the first event with output arrived.
        first_answer: When the first output arrived that is not reasoning.
        last_token: When the last event with output arrived.
        end: When the last output or finish event arrived.
        done: When the call was answered, failed or was given up.
        instants: The timestamps of all output events.
        first_event_tokens: The tokens of the first output event, or 0 if that is not reported.
        input_tokens: The input tokens.
        output_tokens: The output tokens.
        cached_tokens: The input tokens that came from a cache.
        cache_written_tokens: The input tokens that were written to a cache, if the server bills
            them.
        reasoning_tokens: The output tokens that are reasoning.
        token_source: Where the number of output tokens comes from. "events" assumes one per event.
        cost: The cost in the currency of the price, or None without a price or without counts.
        attempts: The attempts.
        hidden_retries: The retries of the wrapped client inside the attempts.
        finish_reason: The finish reason.
        failure: Why the call is not ok, or None.
        model: The requested model.
        response_model: The model that the response names.
        response_id: The id of the response.
        request_id: The server's id of the request, from the x-request-id header.
        server: The address of the server, host:port.
        server_timing: The server's own timing by the names of its formats.
        kernel_stamps: The timestamps come from the kernel. Otherwise they are the times of reads.
        content: The texts, if they are kept.
        labels: The labels (see `labelled`).
        parameters: The numbers of the request: temperature, max_tokens, seed, n, ...
        client_delay_ms: How long the thread of the call waited for a processor, or None if not
            known.
    """

    api: Api
    streamed: bool
    status: Status
    started: int
    started_unix_ns: int
    sent: int = NEVER
    first_token: int = NEVER
    first_answer: int = NEVER
    last_token: int = NEVER
    end: int = NEVER
    done: int = NEVER
    instants: tuple[int, ...] = ()
    first_event_tokens: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    cache_written_tokens: int | None = None
    reasoning_tokens: int | None = None
    token_source: TokenSource = ""
    cost: float | None = None
    attempts: tuple[Attempt, ...] = ()
    hidden_retries: int = 0
    finish_reason: str = ""
    failure: Failure | None = None
    model: str = ""
    response_model: str = ""
    response_id: str = ""
    request_id: str = ""
    server: str = ""
    server_timing: dict[str, Any] = {}
    kernel_stamps: bool = False
    content: Content | None = None
    labels: dict[str, str] = {}
    parameters: dict[str, int | float] = {}
    client_delay_ms: float | None = None

    @property
    def ttft_ms(self) -> float | None:
        """Time from the call to the first token, or to a whole response that is not streamed."""
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
        """Time per output token (TPOT) in ms: the mean time between tokens after the first event.

        It is None if the server counts no tokens, for a single token, and for responses that are
        not streamed. For several choices (`n`), it is the time per token of one choice, because
        the server writes them at the same time.
        """
        if self.output_tokens is None:
            return None

        # Some servers count reasoning tokens without streaming them. The measure leaves them out if
        # the first output event is already part of the answer.
        streamed_tokens = measures.streamed_tokens(
            self.output_tokens,
            reasoning_tokens=self.reasoning_tokens or 0,
            first_token=self.first_token,
            first_answer=self.first_answer,
        )
        tokens_per_choice: float = streamed_tokens
        if self.choices > 1:
            tokens_per_choice = streamed_tokens / self.choices

        tpot_ns = measures.tpot(
            first_token=self.first_token,
            last_token=self.last_token,
            tokens=tokens_per_choice,
            first_event_tokens=self.first_event_tokens or 1,
        )
        return _ms(tpot_ns)

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
        """Whether the client may have distorted the measured times.

        This is the case if the thread of the call waited for a processor for more than
        MAX_DELAY_SHARE of its TTFT or of its E2E time. Each measured time may then be too long by
        up to `client_delay_ms`. Timestamps of the kernel are exact and never affected.
        """
        if self.kernel_stamps:
            return False
        times_ms = [time_ms for time_ms in (self.ttft_ms, self.e2e_ms) if time_ms is not None]
        if not times_ms:
            return False
        delay_ms = self.client_delay_ms or 0.0
        return delay_ms > MAX_DELAY_SHARE * min(times_ms)

    @property
    def wait_ms(self) -> float | None:
        """Time from the call to the start of the last attempt.

        It is spent in the throttle, in earlier attempts and in back-off. For a call that was never
        sent, it is the time until it was given up.
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
        """Return all fields and metrics as plain values, also of failed calls."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        for name in METRICS:
            value = getattr(self, name)
            values[name] = [*value] if isinstance(value, tuple) else value
        return values

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return msgspec.json.encode(self.to_dict()).decode()


METRICS = (
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


def numeric_parameters(arguments: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the numbers of a request that telemetry shows, and never a text."""
    if PARAMETERS.isdisjoint(arguments):
        return {}
    return {
        name: arguments[name]
        for name in PARAMETERS.intersection(arguments)
        if type(arguments[name]) in _NUMBER_TYPES
    }


_NUMBER_TYPES = (int, float)
"""The exact types of numbers: bool is not one of them."""

_KINDS_WITH_TEXT_OF_CLIENT = frozenset(
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
"""Failures whose text comes from this client. Those of other kinds may quote the prompt."""


def without_server_text(failure: Failure, code: str = "") -> Failure:
    """Return a failure without the error message of the server, which may quote the prompt.

    The message is replaced by the error code of the server, or else by the HTTP status or the kind
    of failure. A failure such as "connect", whose message was written by this client, is returned
    as it is.

    Args:
        failure: The failure.
        code: The code in the error response, such as `context_length_exceeded`, or "". It is used
            only if it is a single word, because a server may put any text there.
    """
    if failure.kind in _KINDS_WITH_TEXT_OF_CLIENT:
        return failure

    if _is_single_word(code):
        safe_text = code
    elif failure.http_status:
        safe_text = f"HTTP {failure.http_status}"
    else:
        safe_text = failure.kind

    return Failure(failure.kind, safe_text, failure.http_status)


def _is_single_word(text: str) -> bool:
    """Return True for a word such as `context_length_exceeded`, of at most _MAX_CODE_CHARS."""
    if not 0 < len(text) <= _MAX_CODE_CHARS:
        return False
    return text.replace("_", "").replace("-", "").replace(".", "").isalnum()


_latest: ContextVar[Measurement | None] = ContextVar("loadgen_sdk_measurement", default=None)


def latest_measurement() -> Measurement | None:
    """Return the last call that ended in this context (task or thread), or None."""
    return _latest.get()


def measurement_of(answer: object) -> Measurement | None:
    """Return the measurement of an object that a call of an instrumented client has returned.

    The object is a response, a raw response, a stream or a stream manager. Return None for a
    stream that has not ended, and for any other object. The attribute `measurement` of the object
    has the same value, but type checkers do not know it.
    """
    # A stream manager contains a stream, and that stream may contain another one.
    for _ in range(_MAX_WRAPPERS):
        measurement = getattr(answer, "measurement", None)
        if isinstance(measurement, Measurement):
            return measurement
        wrapped_stream = _wrapped_stream(answer)
        if wrapped_stream is None:
            return None
        answer = wrapped_stream
    return None


def _wrapped_stream(wrapper: object) -> object | None:
    """Return the stream inside a stream manager of the openai or the anthropic package, or None."""
    if not hasattr(wrapper, "__dict__"):
        return None
    for name, value in vars(wrapper).items():
        if name == "_raw_stream" or name.endswith(("Manager__stream", "__raw_stream")):
            stream: object = value
            return stream
    return None


def attach_measurement(result: object, measurement: Measurement) -> None:
    """Set the attribute `measurement` of the response or stream that the application gets.

    The attribute is not a field of the object: pydantic neither serialises nor compares it. An
    object that accepts no new attribute is left as it is.

    Args:
        result: The response or stream. It may be an object of pydantic, of version 1 or 2.
        measurement: The measurement of its call.
    """
    result_class: Any = type(result)
    if _is_pydantic_1_model(result_class):
        _attach_to_pydantic_1_model(result, measurement)
        return

    try:  # noqa: SIM105 - `contextlib.suppress` would take as long as the rest of this function
        # The `__setattr__` of pydantic 2 would reject an attribute that is not a field. That of
        # `object`, which it overrides, sets any attribute.
        object.__setattr__(result, "measurement", measurement)
    except (AttributeError, TypeError):
        pass  # The object has no `__dict__`, for example.


def _attach_to_pydantic_1_model(model: object, measurement: Measurement) -> None:
    """Attach a measurement to an object of pydantic 1 so that it is not serialised.

    pydantic 1 serialises every attribute of an object except one, `__fields_set__`: the set of the
    names of the fields that were passed to the constructor. The measurement is therefore stored in
    that set, in three steps:

    1. Copy the names into a subclass of `set`, whose objects can have attributes.
    2. Store the measurement as an attribute of the copy, and replace the set of the object by it.
    3. Give the class of the object a property `measurement`, which reads it from there.
    """
    old_field_names: Iterable[str] = getattr(model, "__fields_set__", ())
    new_field_names = _FieldNamesWithMeasurement(old_field_names)
    new_field_names.measurement = measurement
    # The `__setattr__` of pydantic would reject the assignment.
    object.__setattr__(model, "__fields_set__", new_field_names)
    _add_measurement_property(type(model))


def _add_measurement_property(model_class: Any) -> None:
    """Give a class of pydantic 1 the property `measurement`, unless it has it already."""
    has_property = isinstance(vars(model_class).get("measurement"), property)
    if not has_property:
        model_class.measurement = property(_read_measurement_of_pydantic_1_model)


class _FieldNamesWithMeasurement(set[str]):
    """The `__fields_set__` of an object of pydantic 1, with the measurement of the object."""

    measurement: Measurement


def _read_measurement_of_pydantic_1_model(model: Any) -> Measurement:
    field_names = model.__fields_set__
    if not isinstance(field_names, _FieldNamesWithMeasurement):
        raise AttributeError("this object has no measurement")
    return field_names.measurement


@functools.lru_cache(maxsize=_MAX_CACHED_CLASSES)
def _is_pydantic_1_model(object_class: type) -> bool:
    """Return whether a class is a model class of pydantic 1, which has no `model_validate`."""
    return any(
        base.__name__ == "BaseModel"
        and base.__module__.startswith("pydantic")
        and not hasattr(base, "model_validate")
        for base in object_class.__mro__
    )


def set_latest_measurement(measurement: Measurement) -> None:
    """Make a measurement the latest one of this context and of the tasks that wait for it.

    In Python 3.11, `asyncio.wait_for` runs its awaitable in a new task with a copy of the context.
    The code that called `wait_for` would not see a context variable that is set in the copy. The
    variable is therefore also set in the contexts of the tasks that wait for the current one. Since
    Python 3.12, `wait_for` creates no task, and nothing of this is necessary.
    """
    _latest.set(measurement)
    if not _WAIT_FOR_COPIES_CONTEXT:
        return

    # The public `asyncio.get_running_loop` would raise an exception if no loop is running.
    is_in_event_loop = asyncio._get_running_loop() is not None
    if is_in_event_loop:
        current_task = asyncio.current_task()
        for context in _waiting_contexts(current_task, max_depth=_MAX_NESTED_WAITS):
            context.run(_latest.set, measurement)


class _WaitingCaller(NamedTuple):
    """Code that waits in `asyncio.wait_for`.

    Attributes:
        context: The context that it runs in.
        task: The task that it runs in, or None if it is not a task of asyncio.
    """

    context: Context
    task: asyncio.Task[Any] | None


def _waiting_contexts(task: asyncio.Task[object] | None, max_depth: int) -> Iterator[Context]:
    """Yield the contexts of the code that waits for a task in `asyncio.wait_for` of Python 3.11.

    Calls of `wait_for` may be nested: in `wait_for(outer(), 2)`, where `outer` calls
    `wait_for(inner(), 1)`, the caller of `outer` also waits for the task of `inner`. This function
    calls itself for each caller to follow the nested calls outwards.

    Args:
        task: The task. None ends the recursion.
        max_depth: How many nested calls of `wait_for` are followed.
    """
    if task is None or max_depth == 0:
        return
    for caller in _callers_that_wait_for(task):
        yield caller.context
        yield from _waiting_contexts(caller.task, max_depth - 1)


def _callers_that_wait_for(inner_task: asyncio.Task[object]) -> Iterator[_WaitingCaller]:
    """Yield the callers of `asyncio.wait_for` for which Python 3.11 has created an inner task.

    asyncio has no public link from the inner task to the task of the caller. But its private
    callbacks lead there, in two steps:

    1. `wait_for` adds a callback to the inner task, which resolves a future.
    2. The task of the caller awaits that future. It has added its own method `__wakeup` to the
       future as a callback. The object of a bound method is its `__self__`.
    """
    for future in _futures_resolved_by(inner_task):
        for wake_up_method, context in _callbacks_of(future):
            method_owner = getattr(wake_up_method, "__self__", None)
            calling_task = method_owner if isinstance(method_owner, asyncio.Task) else None
            yield _WaitingCaller(context, calling_task)


def _futures_resolved_by(task: asyncio.Task[object]) -> Iterator[asyncio.Future[Any]]:
    """Yield the futures on which callers of `asyncio.wait_for` wait for the end of a task.

    `wait_for` adds the callback `functools.partial(_release_waiter, future)` to the task.
    """
    for callback, _ in _callbacks_of(task):
        if isinstance(callback, functools.partial) and callback.func is _RELEASE_WAITER:
            yield callback.args[0]


def _callbacks_of(future: asyncio.Future[object]) -> Sequence[tuple[Any, Context]]:
    """Return the callbacks of a future or task, each with the context that it runs in."""
    return getattr(future, "_callbacks", None) or ()


_WAIT_FOR_COPIES_CONTEXT = sys.version_info < (3, 12)
_RELEASE_WAITER = getattr(asyncio.tasks, "_release_waiter", None)
_MAX_NESTED_WAITS = 8


def copy_latest_measurement(context: Context) -> None:
    """Make the latest measurement of another context the latest one of this context, too."""
    _latest.set(context.get(_latest))


def warn_uncounted(model: str) -> None:
    """Warn once per process and model that there are prices, but no token counts of the server."""
    text = f"the server sent no token counts for the model {model!r}, so the cost is None"
    warn_once(f"{text}. For streams, ask_usage=True requests them")


def warn_contradiction(model: str, contradiction: str) -> None:
    """Warn once per process, model and contradiction that the counts of a server are not used."""
    warn_once(
        f"the server's token counts for the model {model!r} contradict each other "
        f"({contradiction}), so they are not used and the cost is None"
    )


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6
