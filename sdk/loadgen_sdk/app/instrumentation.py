"""Measures an OpenAI client that an application already has: `measured = instrument(AsyncOpenAI(...))`.

Methods and streams are wrapped. Transports are not, because they differ between major versions of the package. The
package is not imported here. The application calls the same methods and gets the same results and exceptions.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import sys
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from time import monotonic_ns
from typing import Any, Literal, TypeVar, cast

from ..errors import WrongUse
from .measurement import Api, Prices
from .observed_call import ObservedCall, Setting
from .policy import Observers, make_policy
from .retry import Retry
from .throttle import Throttle
from .trace_recorder import ShapeRecorder

C = TypeVar("C")

_RAW_HEADER = "X-Stainless-Raw-Response"  # the header by which with_raw_response asks for the whole response
_RESOURCES: tuple[tuple[str, Api], ...] = (
    ("chat.completions", "chat"),
    ("beta.chat.completions", "chat"),
    ("completions", "completions"),
    ("responses", "responses"),
)
_METHODS = ("create", "parse")  # `stream` of both APIs goes through `create`


def instrument(
    client: C,
    on_measurement: Observers = None,
    *,
    prices: Prices = None,
    throttle: Throttle | None = None,
    retry: Retry | None = None,
    record: ShapeRecorder | None = None,
    ask_usage: bool = False,
    keep_content: bool = False,
) -> C:
    """A copy of `client` whose calls are measured. `client` itself is not changed; both share its connections.

    client: OpenAI, AsyncOpenAI, AzureOpenAI, AsyncAzureOpenAI or a subclass. Measured are `create`, `parse` and
    `stream` of chat.completions, completions and responses, streaming or not, also through `with_options` and
    `with_raw_response`. Calls through `with_streaming_response` are not measured.

    Each call makes one Measurement. It is passed to `on_measurement` (one function or several), set as `.measurement`
    of the answer (of a stream when it has ended), and returned by `latest_measurement()`. Failed, cancelled and
    abandoned calls make one too. Their exceptions reach the caller unchanged.

    prices: used for `cost`. throttle: waits before each attempt. retry: replaces the client's own `max_retries`, which
    is set to 0. record: from `record_shape`. ask_usage: requests a token count for streams (`stream_options`); the
    extra event with the count is not passed to the application. keep_content: store texts in the measurement.

    Raises WrongUse when `client` is not such a client or an argument is invalid.
    """
    openai = sys.modules.get("openai")
    blocking = openai is not None and isinstance(client, openai.OpenAI)
    if openai is None or not (blocking or isinstance(client, openai.AsyncOpenAI)):
        message = f"the class {client.__name__}" if isinstance(client, type) else f"a {type(client).__name__}"
        raise WrongUse(
            f"{message} is no OpenAI client", "give an object of OpenAI, AsyncOpenAI, AzureOpenAI or AsyncAzureOpenAI"
        )
    policy = make_policy(on_measurement, prices, throttle, retry, record, keep_content)
    measured: Any = copy.copy(client)
    attributes = vars(measured)
    if retry is not None:
        attributes["max_retries"] = 0
    url = getattr(client, "base_url", None)
    server = f"{url.host}:{url.port or (443 if url.scheme == 'https' else 80)}" if url is not None else ""
    setting = Setting(policy, server, str(getattr(client, "api_key", "") or ""), ask_usage)
    for name in {path.partition(".")[0] for path, _ in _RESOURCES}:
        if (resource := getattr(client, name, None)) is not None:
            attributes[name] = type(resource)(measured)  # a new object: that of `client` stays unwrapped
    for path, api in _RESOURCES:
        resource = measured
        for name in path.split("."):
            resource = getattr(resource, name, None)
        if resource is not None:
            _wrap(resource, api, setting, blocking)
    for name in ("with_raw_response", "with_streaming_response"):
        attributes[name] = type(getattr(client, name))(measured)

    def with_options(*args: Any, **options: Any) -> C:
        untyped: Any = client
        other: C = untyped.copy(*args, **options)
        return instrument(
            other,
            on_measurement,
            prices=prices,
            throttle=throttle,
            retry=retry,
            record=record,
            ask_usage=ask_usage,
            keep_content=keep_content,
        )

    attributes["copy"] = attributes["with_options"] = with_options
    return cast(C, measured)


def _wrap(resource: Any, api: Api, setting: Setting, blocking: bool) -> None:
    raw = resource.with_raw_response  # read before wrapping: its methods call the unwrapped ones
    attributes = vars(resource)
    for name in _METHODS:
        method = getattr(resource, name, None)
        raw_method = getattr(raw, name, None)
        if method is not None and raw_method is not None:
            attributes[name] = (_measured_blocking if blocking else _measured_async)(method, raw_method, api, setting)
    for name in (
        "with_raw_response",
        "with_streaming_response",
    ):  # cached: made again with wrapped methods
        attributes.pop(name, None)


def _measured_blocking(
    method: Callable[..., Any], raw_method: Callable[..., Any], api: Api, setting: Setting
) -> Callable[..., Any]:
    """`method` of a blocking client, measured. `raw_method` is its variant that returns the raw response."""

    @functools.wraps(method)
    def measured_call(*args: Any, **kwargs: Any) -> Any:
        if not setting.warned and asyncio._get_running_loop() is not None:
            setting.warned = True
            message = "a blocking OpenAI client was called inside a running event loop: every other task stands still"
            warnings.warn(f"{message}; use AsyncOpenAI, or asyncio.to_thread", RuntimeWarning, stacklevel=2)
        response_form = _response_form(kwargs)
        if response_form == "stream":
            return method(*args, **kwargs)
        call = ObservedCall(api, setting, kwargs)
        throttle = setting.policy.throttle
        while True:
            try:
                if throttle is not None:
                    call.permit = throttle.acquire_blocking(**call.throttle_arguments())
                call.begin()
                raw = raw_method(*args, **kwargs)
                call.head_received(raw)
                result = raw.parse()
                break
            except BaseException as error:
                wait_s = call.attempt_failed(error)
                if wait_s is None:
                    raise
                time.sleep(wait_s)
        if call.streamed and hasattr(result, "_iterator"):
            call.get_stream = weakref.ref(result)  # a cycle would delay the end of an abandoned stream
            result._iterator = _ObservedStream(result._iterator, call)
            result.close = functools.partial(_close, call)
        else:
            call.answer_received(result)
        return raw if response_form == "raw" else result

    return measured_call


def _measured_async(
    method: Callable[..., Any], raw_method: Callable[..., Any], api: Api, setting: Setting
) -> Callable[..., Any]:
    """`method` of an async client, measured. `raw_method` is its variant that returns the raw response."""

    @functools.wraps(method)
    async def measured_call(*args: Any, **kwargs: Any) -> Any:
        response_form = _response_form(kwargs)
        if response_form == "stream":
            return await method(*args, **kwargs)
        call = ObservedCall(api, setting, kwargs)
        throttle = setting.policy.throttle
        while True:
            try:
                if throttle is not None:
                    call.permit = await throttle.acquire(**call.throttle_arguments())
                call.begin()
                raw = await raw_method(*args, **kwargs)
                call.head_received(raw)
                result = raw.parse()
                break
            except BaseException as error:
                wait_s = call.attempt_failed(error)
                if wait_s is None:
                    raise
                await asyncio.sleep(wait_s)
        if call.streamed and hasattr(result, "_iterator"):
            call.get_stream = weakref.ref(result)
            result._iterator = _ObservedAsyncStream(result._iterator, call)
            result.close = functools.partial(_close_async, call)
        else:
            call.answer_received(result)
        return raw if response_form == "raw" else result

    return measured_call


def _response_form(kwargs: dict[str, Any]) -> Literal["parsed", "raw", "stream"]:
    """The form of response that the caller asked for; with_raw_response and with_streaming_response set a header."""
    extra_headers = kwargs.get("extra_headers")
    if not extra_headers or _RAW_HEADER not in extra_headers:
        return "parsed"
    return "raw" if extra_headers[_RAW_HEADER] in ("true", "raw") else "stream"


def _close(call: ObservedCall) -> None:
    """The `close` method of a measured stream: end the call, then close the stream."""
    call.abandoned()
    stream = call.get_stream()
    if stream is not None:
        type(stream).close(stream)


async def _close_async(call: ObservedCall) -> None:
    call.abandoned()
    stream = call.get_stream()
    if stream is not None:
        await type(stream).close(stream)


class _ObservedStream:
    """Replaces the iterator inside a `Stream`, and passes each event to the observed call.

    Each loop over the stream gets its own generator, which is closed when the loop is left. A `break` is therefore
    noticed at once, although stream and iterator refer to each other.
    """

    __slots__ = ("_call", "_inner")

    def __init__(self, inner: Iterator[Any], call: ObservedCall) -> None:
        self._inner, self._call = inner, call

    def __iter__(self) -> Iterator[Any]:
        call = self._call
        observe, clock, hides_usage = call.observe, monotonic_ns, call.hides_usage
        try:
            for event in self._inner:
                observe(event, clock())
                if hides_usage and call.is_extra(event):
                    continue
                yield event
            call.stream_ended()
        except BaseException as error:
            call.stream_failed(error)
            raise

    def __next__(self) -> Any:
        call = self._call
        try:
            while True:
                event = next(self._inner)
                call.observe(event, monotonic_ns())
                if not (call.hides_usage and call.is_extra(event)):
                    return event
        except StopIteration:
            call.stream_ended()
            raise
        except BaseException as error:
            call.stream_failed(error)
            raise

    def __del__(self) -> None:
        self._call.abandoned()  # covers a stream that was never read


class _ObservedAsyncStream:
    """Replaces the iterator inside an `AsyncStream`; see `_ObservedStream`."""

    __slots__ = ("_call", "_inner")

    def __init__(self, inner: AsyncIterator[Any], call: ObservedCall) -> None:
        self._inner, self._call = inner, call

    async def __aiter__(self) -> AsyncIterator[Any]:
        call = self._call
        observe, clock, hides_usage = call.observe, monotonic_ns, call.hides_usage
        try:
            async for event in self._inner:
                observe(event, clock())
                if hides_usage and call.is_extra(event):
                    continue
                yield event
            call.stream_ended()
        except BaseException as error:
            call.stream_failed(error)
            raise

    async def __anext__(self) -> Any:
        call = self._call
        try:
            while True:
                event = await anext(self._inner)
                call.observe(event, monotonic_ns())
                if not (call.hides_usage and call.is_extra(event)):
                    return event
        except StopAsyncIteration:
            call.stream_ended()
            raise
        except BaseException as error:
            call.stream_failed(error)
            raise

    def __del__(self) -> None:
        self._call.abandoned()
