"""Measuring the client that an application already has: `measured = instrument(AsyncOpenAI(...))`.

Methods and streams are wrapped, never transports, which differ between major versions of the package; the package is
not imported here. What the application calls and gets back stays the same, its exceptions too.
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
from .observed_call import Setting, Sight
from .policy import Observers, conduct
from .retry import Retry
from .throttle import Throttle
from .trace_recorder import ShapeRecorder

C = TypeVar("C")

_RAW = "X-Stainless-Raw-Response"  # by which with_raw_response asks for the whole response
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
    """A client like `client` (which stays as it is; both share its connections) whose calls are measured.

    client: OpenAI, AsyncOpenAI, AzureOpenAI, AsyncAzureOpenAI or a subclass. Measured are `create`, `parse` and
    `stream` of chat.completions, completions and responses, streaming or not, through `with_options` and
    `with_raw_response` too; not `with_streaming_response`.

    Each call yields one Measurement: to `on_measurement` (one function or several), as `.measurement` of the answer or,
    once it has ended, of the stream, and from `latest_measurement()`. Failed, cancelled and abandoned calls yield one
    too; what they raise goes on to the caller unchanged.

    prices: for `cost`. throttle: waits before each attempt. retry: stands in for the client's own `max_retries`, which
    is then 0. record: from `record_shape`. ask_usage: asks streams for a token count (`stream_options`) and keeps
    the extra event that carries it from the application. keep_content: texts go into the measurement.

    Raises WrongUse for anything that is no such client, or arguments without a meaning.
    """
    openai = sys.modules.get("openai")
    blocking = openai is not None and isinstance(client, openai.OpenAI)
    if openai is None or not (blocking or isinstance(client, openai.AsyncOpenAI)):
        what = f"the class {client.__name__}" if isinstance(client, type) else f"a {type(client).__name__}"
        raise WrongUse(
            f"{what} is no OpenAI client", "give an object of OpenAI, AsyncOpenAI, AzureOpenAI or AsyncAzureOpenAI"
        )
    manner = conduct(on_measurement, prices, throttle, retry, record, keep_content)
    measured: Any = copy.copy(client)
    held = vars(measured)
    if retry is not None:
        held["max_retries"] = 0
    url = getattr(client, "base_url", None)
    server = f"{url.host}:{url.port or (443 if url.scheme == 'https' else 80)}" if url is not None else ""
    setting = Setting(manner, server, str(getattr(client, "api_key", "") or ""), ask_usage)
    for name in {path.partition(".")[0] for path, _ in _RESOURCES}:
        if (resource := getattr(client, name, None)) is not None:
            held[name] = type(resource)(measured)  # of its own: those of `client` stay as they are
    for path, api in _RESOURCES:
        resource = measured
        for name in path.split("."):
            resource = getattr(resource, name, None)
        if resource is not None:
            _wrap(resource, api, setting, blocking)
    for name in ("with_raw_response", "with_streaming_response"):
        held[name] = type(getattr(client, name))(measured)

    def with_options(*args: Any, **options: Any) -> C:
        plain: Any = client
        other: C = plain.copy(*args, **options)
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

    held["copy"] = held["with_options"] = with_options
    return cast(C, measured)


def _wrap(resource: Any, api: Api, setting: Setting, blocking: bool) -> None:
    raw = resource.with_raw_response  # its methods are bound to the unwrapped ones, now
    held = vars(resource)
    for name in _METHODS:
        plain = getattr(resource, name, None)
        whole = getattr(raw, name, None)
        if plain is not None and whole is not None:
            held[name] = (_blocking if blocking else _waiting)(plain, whole, api, setting)
    for name in ("with_raw_response", "with_streaming_response"):  # made anew around the wrapped ones when asked for
        held.pop(name, None)


def _blocking(plain: Callable[..., Any], whole: Callable[..., Any], api: Api, setting: Setting) -> Callable[..., Any]:
    """A method of a blocking client, measured. `whole` is the one that returns the raw response."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not setting.warned and asyncio._get_running_loop() is not None:
            setting.warned = True
            what = "a blocking OpenAI client was called inside a running event loop: every other task stands still"
            warnings.warn(f"{what}; use AsyncOpenAI, or asyncio.to_thread", RuntimeWarning, stacklevel=2)
        form = _form(kwargs)
        if form == "stream":
            return plain(*args, **kwargs)
        sight = Sight(api, setting, kwargs)
        throttle = setting.manner.throttle
        while True:
            try:
                if throttle is not None:
                    sight.permit = throttle.acquire_blocking(**sight.booking())
                sight.begin()
                raw = whole(*args, **kwargs)
                sight.answered(raw)
                result = raw.parse()
                break
            except BaseException as error:
                wait_s = sight.failed(error)
                if wait_s is None:
                    raise
                time.sleep(wait_s)
        if sight.streamed and hasattr(result, "_iterator"):
            sight.carrier = weakref.ref(result)  # a cycle would put off the end of an abandoned stream
            result._iterator = _Watch(result._iterator, sight)
            result.close = functools.partial(_close, sight)
        else:
            sight.whole(result)
        return raw if form == "raw" else result

    return call


def _waiting(plain: Callable[..., Any], whole: Callable[..., Any], api: Api, setting: Setting) -> Callable[..., Any]:
    """The same for an async client."""

    @functools.wraps(plain)
    async def call(*args: Any, **kwargs: Any) -> Any:
        form = _form(kwargs)
        if form == "stream":
            return await plain(*args, **kwargs)
        sight = Sight(api, setting, kwargs)
        throttle = setting.manner.throttle
        while True:
            try:
                if throttle is not None:
                    sight.permit = await throttle.acquire(**sight.booking())
                sight.begin()
                raw = await whole(*args, **kwargs)
                sight.answered(raw)
                result = raw.parse()
                break
            except BaseException as error:
                wait_s = sight.failed(error)
                if wait_s is None:
                    raise
                await asyncio.sleep(wait_s)
        if sight.streamed and hasattr(result, "_iterator"):
            sight.carrier = weakref.ref(result)
            result._iterator = _WatchAsync(result._iterator, sight)
            result.close = functools.partial(_close_async, sight)
        else:
            sight.whole(result)
        return raw if form == "raw" else result

    return call


def _form(kwargs: dict[str, Any]) -> Literal["parsed", "raw", "stream"]:
    """What the caller is to get: with_raw_response and with_streaming_response ask by a header."""
    asked = kwargs.get("extra_headers")
    if not asked or _RAW not in asked:
        return "parsed"
    return "raw" if asked[_RAW] in ("true", "raw") else "stream"


def _close(sight: Sight) -> None:
    """`close` of a measured stream."""
    sight.given_up()
    stream = sight.carrier()
    if stream is not None:
        type(stream).close(stream)


async def _close_async(sight: Sight) -> None:
    sight.given_up()
    stream = sight.carrier()
    if stream is not None:
        await type(stream).close(stream)


class _Watch:
    """What stands in for the iterator inside a `Stream`. Each loop over the stream gets a generator of its own, which
    dies when the loop is left: that is how a `break` is noticed at once, though stream and iterator are a cycle."""

    __slots__ = ("_inner", "_sight")

    def __init__(self, inner: Iterator[Any], sight: Sight) -> None:
        self._inner, self._sight = inner, sight

    def __iter__(self) -> Iterator[Any]:
        sight = self._sight
        see, clock, skip = sight.see, monotonic_ns, sight.hide
        try:
            for event in self._inner:
                see(event, clock())
                if skip and sight.is_extra(event):
                    continue
                yield event
            sight.ended()
        except BaseException as error:
            sight.broken(error)
            raise

    def __next__(self) -> Any:
        sight = self._sight
        try:
            while True:
                event = next(self._inner)
                sight.see(event, monotonic_ns())
                if not (sight.hide and sight.is_extra(event)):
                    return event
        except StopIteration:
            sight.ended()
            raise
        except BaseException as error:
            sight.broken(error)
            raise

    def __del__(self) -> None:
        self._sight.given_up()  # a stream that nobody ever read


class _WatchAsync:
    """The same for an `AsyncStream`."""

    __slots__ = ("_inner", "_sight")

    def __init__(self, inner: AsyncIterator[Any], sight: Sight) -> None:
        self._inner, self._sight = inner, sight

    async def __aiter__(self) -> AsyncIterator[Any]:
        sight = self._sight
        see, clock, skip = sight.see, monotonic_ns, sight.hide
        try:
            async for event in self._inner:
                see(event, clock())
                if skip and sight.is_extra(event):
                    continue
                yield event
            sight.ended()
        except BaseException as error:
            sight.broken(error)
            raise

    async def __anext__(self) -> Any:
        sight = self._sight
        try:
            while True:
                event = await anext(self._inner)
                sight.see(event, monotonic_ns())
                if not (sight.hide and sight.is_extra(event)):
                    return event
        except StopAsyncIteration:
            sight.ended()
            raise
        except BaseException as error:
            sight.broken(error)
            raise

    def __del__(self) -> None:
        self._sight.given_up()
