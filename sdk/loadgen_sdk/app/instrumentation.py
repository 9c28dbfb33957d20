"""Measures an OpenAI client that an application already has: `measured = instrument(AsyncOpenAI(...))`.

Methods and streams are wrapped. Transports are not, because they differ between major versions of the package. The
package is not imported here. The application calls the same methods and gets the same results and exceptions.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import sys
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from time import monotonic_ns
from typing import Any, Literal, NamedTuple, TypeVar, cast

from ..errors import ThrottleTimeout, WrongUse
from .finishing import later
from .measurement import Api, Prices
from .observed_call import ObservedCall, Setting, seconds_of
from .policy import Observer, Observers, Policy, make_policy
from .retry import Retry
from .throttle import Throttle
from .trace_recorder import ShapeRecorder

log = logging.getLogger("loadgen_sdk")

C = TypeVar("C")

_RAW_HEADER = "X-Stainless-Raw-Response"  # the header by which with_raw_response asks for the whole response
_RESOURCES: tuple[tuple[str, Api], ...] = (
    ("chat.completions", "chat"),
    ("beta.chat.completions", "chat"),
    ("completions", "completions"),
    ("responses", "responses"),
    ("embeddings", "embeddings"),
)
_METHODS = ("create", "parse")  # `stream` of both APIs goes through `create`
_OPTIONS = "_loadgen_sdk_options"  # the attribute by which an instrumented client is known


class Options(NamedTuple):
    """The arguments of `instrument`, as kept on an instrumented client."""

    observers: tuple[Observer, ...]
    prices: Prices
    throttle: Throttle | None
    retry: Retry | None
    record: ShapeRecorder | None
    ask_usage: bool | None
    keep_content: bool
    labels: dict[str, str]


def instrument(
    client: C,
    on_measurement: Observers = None,
    *,
    prices: Prices = None,
    throttle: Throttle | None = None,
    retry: Retry | None = None,
    record: ShapeRecorder | None = None,
    ask_usage: bool | None = None,
    keep_content: bool = False,
    labels: Mapping[str, str | int] | None = None,
) -> C:
    """A copy of `client` whose calls are measured. `client` itself is not changed; both share its connections.

    client: OpenAI, AsyncOpenAI, AzureOpenAI, AsyncAzureOpenAI or a subclass. Measured are `create`, `parse` and
    `stream` of chat.completions, completions, responses and embeddings, streaming or not, also through `with_options`,
    `with_raw_response` and `with_streaming_response`. A client that is instrumented already keeps its observers and
    settings: those given here come on top.

    Each call makes one Measurement. It is passed to `on_measurement` (one function or several, coroutines too), set as
    `.measurement` of the answer (of a stream when it has ended), and returned by `latest_measurement()`. Failed,
    cancelled and abandoned calls make one too. Their exceptions reach the caller unchanged.

    prices: used for `cost`. throttle: waits before each attempt, at most the call's timeout. retry: replaces the
    client's own `max_retries`, which is set to 0. record: from `record_shape`. ask_usage: requests a token count for
    streams (`stream_options`); the extra event with the count is not passed to the application. None: when there are
    prices. keep_content: store texts in the measurement. labels: of every call; see also `labelled`.

    Raises WrongUse when `client` is not such a client or an argument is invalid.
    """
    policy = make_policy(on_measurement, prices, throttle, retry, record, keep_content, labels)
    _blocking_kind(client)
    measured: Any = copy.copy(client)
    _install(measured, client, _merged(getattr(client, _OPTIONS, None), policy, ask_usage))
    return cast(C, measured)


def _blocking_kind(client: Any) -> bool:
    """Whether this OpenAI client is a blocking one. Raises WrongUse when it is none."""
    openai = sys.modules.get("openai")
    blocking = openai is not None and isinstance(client, openai.OpenAI)
    if openai is None or not (blocking or isinstance(client, openai.AsyncOpenAI)):
        message = f"the class {client.__name__}" if isinstance(client, type) else f"a {type(client).__name__}"
        raise WrongUse(
            f"{message} is no OpenAI client", "give an object of OpenAI, AsyncOpenAI, AzureOpenAI or AsyncAzureOpenAI"
        )
    return blocking


def _merged(inner: Options | None, policy: Policy, ask_usage: bool | None) -> Options:
    """What the client had, and what is given now. Two throttles, retries or recorders cannot both hold: WrongUse."""
    given = Options(
        policy.observers, policy.prices, policy.throttle, policy.retry, policy.record, ask_usage, policy.keep_content,
        policy.labels,
    )  # fmt: skip
    if inner is None:
        return given
    for name in ("throttle", "retry", "record"):
        first, second = getattr(inner, name), getattr(given, name)
        if first is not None and second is not None and first is not second:
            raise WrongUse(f"this client has a {name} already, and gets another one", f"give {name} once")
    return Options(
        (*inner.observers, *given.observers),
        inner.prices if given.prices is None else given.prices,
        given.throttle or inner.throttle,
        given.retry or inner.retry,
        inner.record if given.record is None else given.record,
        inner.ask_usage if given.ask_usage is None else given.ask_usage,
        inner.keep_content or given.keep_content,
        {**inner.labels, **given.labels},
    )


def _install(measured: Any, client: Any, options: Options) -> None:
    """Replace the resources of `measured` by wrapped ones. `client`: where its copies come from."""
    blocking = _blocking_kind(measured)
    _check_streams(sys.modules["openai"])
    policy = Policy(*options[:5], options.keep_content, options.labels)
    attributes = vars(measured)
    attributes[_OPTIONS] = options
    if options.retry is not None:
        attributes["max_retries"] = 0
    url = getattr(client, "base_url", None)
    server = f"{url.host}:{url.port or (443 if url.scheme == 'https' else 80)}" if url is not None else ""
    ask_usage = options.prices is not None if options.ask_usage is None else options.ask_usage
    timeout_s = seconds_of(getattr(client, "timeout", None), None)
    setting = Setting(policy, server, str(getattr(client, "api_key", "") or ""), ask_usage, timeout_s)
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
    make_copy = type(measured).copy

    def with_options(*args: Any, **changes: Any) -> Any:
        other = make_copy(measured, *args, **changes)
        _install(other, other, options)  # also if `auto` was there first: these options hold its own
        return other

    attributes["copy"] = attributes["with_options"] = with_options


@functools.lru_cache(maxsize=1)
def _check_streams(openai: Any) -> None:
    """Say loudly if this openai package keeps the iterator of a stream elsewhere: its streams cannot be observed."""
    for name in ("Stream", "AsyncStream"):
        made = getattr(getattr(openai, name, None), "__init__", None)
        if "_iterator" not in getattr(getattr(made, "__code__", None), "co_names", ("_iterator",)):
            _say_unobservable(openai)
            return


def _say_unobservable(openai: Any) -> None:
    text = (
        f"openai {getattr(openai, '__version__', '')} keeps its streams in a way that loadgen_sdk does not know:"
        ' streamed calls are measured as "unobserved", without TTFT and tokens; use a version that docs/sdk.md names'
    )
    log.error(text)
    warnings.warn(text, RuntimeWarning, stacklevel=4)


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
        call = ObservedCall(api, setting, kwargs)
        throttle = setting.policy.throttle
        send = method if response_form == "stream" else raw_method
        while True:
            try:
                if throttle is not None:
                    call.permit = throttle.acquire_blocking(**call.throttle_arguments())
                call.begin()
                with call.current_span():
                    raw = send(*args, **kwargs)
                call.head_received(raw)
                result = None if response_form == "stream" else raw.parse()
                break
            except BaseException as error:
                wait_s = call.attempt_failed(error)
                if wait_s is None:
                    if isinstance(error, ThrottleTimeout):
                        raise _for_openai(error) from error
                    raise
                time.sleep(wait_s)
        if response_form == "stream":
            return _observe_raw_blocking(raw, call)
        if response_form == "raw":
            call.raw = raw
        _observe_result(result, call, _ObservedStream, _close)
        return raw if response_form == "raw" else result

    return measured_call


def _measured_async(
    method: Callable[..., Any], raw_method: Callable[..., Any], api: Api, setting: Setting
) -> Callable[..., Any]:
    """`method` of an async client, measured. `raw_method` is its variant that returns the raw response."""

    @functools.wraps(method)
    async def measured_call(*args: Any, **kwargs: Any) -> Any:
        response_form = _response_form(kwargs)
        call = ObservedCall(api, setting, kwargs)
        throttle = setting.policy.throttle
        send = method if response_form == "stream" else raw_method
        while True:
            try:
                if throttle is not None:
                    call.permit = await throttle.acquire(**call.throttle_arguments())
                call.begin()
                with call.current_span():
                    raw = await send(*args, **kwargs)
                call.head_received(raw)
                result = None if response_form == "stream" else raw.parse()
                if inspect.isawaitable(result):
                    result = await result
                break
            except BaseException as error:
                wait_s = call.attempt_failed(error)
                if wait_s is None:
                    if isinstance(error, ThrottleTimeout):
                        raise _for_openai(error) from error
                    raise
                await asyncio.sleep(wait_s)
        if response_form == "stream":
            return _observe_raw_async(raw, call)
        if response_form == "raw":
            call.raw = raw
        _observe_result(result, call, _ObservedAsyncStream, _close_async)
        return raw if response_form == "raw" else result

    return measured_call


def _for_openai(error: ThrottleTimeout) -> BaseException:
    """A ThrottleTimeout as an application of the openai package expects it: also as its APITimeoutError."""
    openai: Any = sys.modules["openai"]
    kind = _timeout_kinds.get(openai)
    if kind is None:

        def without_request(self: Any, what: ThrottleTimeout) -> None:
            Exception.__init__(self, str(what))
            self.message, self.hint = str(what), what.hint
            self.request, self.code, self.param, self.type, self.body = None, None, None, None, None

        bases = (ThrottleTimeout, openai.APITimeoutError)
        kind = _timeout_kinds[openai] = type("ThrottleTimeout", bases, {"__init__": without_request})
    return kind(error)


_timeout_kinds: dict[Any, type[BaseException]] = {}


def _observe_result(
    result: Any, call: ObservedCall, observed_stream: Any, close: Callable[[ObservedCall], Any]
) -> None:
    """Observe the stream, or report the answer."""
    if not call.streamed:
        call.answer_received(result)
    elif hasattr(result, "_iterator"):
        call.get_stream = weakref.ref(result)  # a cycle would delay the end of an abandoned stream
        result._iterator = observed_stream(_own_iterator(result), call)
        result.close = functools.partial(close, call)
    else:
        _say_unobservable(sys.modules.get("openai"))
        call.unobserved(result)


def _own_iterator(stream: Any) -> Any:
    """The events of a stream, without a reference to it.

    The package's iterator refers to its stream and the stream to the iterator: such a cycle stays until the collector
    comes, and with it the permit of a stream that nobody reads. A twin of the stream breaks it.
    """
    make_iterator = getattr(type(stream), "__stream__", None)
    if make_iterator is None:
        return stream._iterator
    twin = copy.copy(stream)
    twin._iterator = None
    return make_iterator(twin)


def _observe_raw_blocking(response: Any, call: ObservedCall) -> Any:
    """A response of `with_streaming_response`: what is parsed is observed; the call ends when it is closed."""
    call.raw = response
    parse, close = response.parse, response.close

    def observed_parse(*args: Any, **kwargs: Any) -> Any:
        result = parse(*args, **kwargs)
        if not call.reported:
            _observe_result(result, call, _ObservedStream, _close)
        return result

    def observed_close() -> None:
        try:
            if not call.streamed and not call.reported and getattr(response.http_response, "is_stream_consumed", False):
                observed_parse()
        except Exception:  # what the application read is not a whole answer
            pass
        call.raw_stream_closed(bool(getattr(response.http_response, "is_stream_consumed", False)))
        close()

    response.parse, response.close = observed_parse, observed_close
    return response


def _observe_raw_async(response: Any, call: ObservedCall) -> Any:
    call.raw = response
    parse, close = response.parse, response.close

    async def observed_parse(*args: Any, **kwargs: Any) -> Any:
        result = await parse(*args, **kwargs)
        if not call.reported:
            _observe_result(result, call, _ObservedAsyncStream, _close_async)
        return result

    async def observed_close() -> None:
        try:
            if not call.streamed and not call.reported and getattr(response.http_response, "is_stream_consumed", False):
                await observed_parse()
        except Exception:
            pass
        call.raw_stream_closed(bool(getattr(response.http_response, "is_stream_consumed", False)))
        await close()

    response.parse, response.close = observed_parse, observed_close
    return response


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
        if not self._call.reported:  # a stream that was never read: no work in a destructor
            later(self._call.abandoned)


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
        if not self._call.reported:
            later(self._call.abandoned)
