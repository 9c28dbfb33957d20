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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import Context, copy_context
from time import monotonic_ns, time_ns
from typing import Any, Literal, TypeVar, cast

from .conduct import Conduct, Observers, conduct, estimated_tokens
from .errors import WrongUse
from .measurement import Api, Attempt, Content, Measurement, Prices, Status, price_of, timings
from .request import NEVER, Failure
from .retry import Retry, retry_after_s
from .shapes import ShapeRecorder, Sighting
from .throttle import Permit, Throttle

C = TypeVar("C")

_RAW = "X-Stainless-Raw-Response"  # by which with_raw_response asks for the whole response
_RESOURCES: tuple[tuple[str, Api], ...] = (
    ("chat.completions", "chat"),
    ("beta.chat.completions", "chat"),
    ("completions", "completions"),
    ("responses", "responses"),
)
_METHODS = ("create", "parse")  # `stream` of both APIs goes through `create`
_NO_HEADERS: dict[str, str] = {}


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
    setting = _Setting(manner, server, str(getattr(client, "api_key", "") or ""), ask_usage)
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


class _Setting:
    """What all wrapped methods of one client share."""

    __slots__ = ("ask_usage", "key", "manner", "server", "warned")

    def __init__(self, manner: Conduct, server: str, key: str, ask_usage: bool) -> None:
        self.manner, self.server, self.key, self.ask_usage = manner, server, key, ask_usage
        self.warned = False


def _wrap(resource: Any, api: Api, setting: _Setting, blocking: bool) -> None:
    raw = resource.with_raw_response  # its methods are bound to the unwrapped ones, now
    held = vars(resource)
    for name in _METHODS:
        plain = getattr(resource, name, None)
        whole = getattr(raw, name, None)
        if plain is not None and whole is not None:
            held[name] = (_blocking if blocking else _waiting)(plain, whole, api, setting)
    for name in ("with_raw_response", "with_streaming_response"):  # made anew around the wrapped ones when asked for
        held.pop(name, None)


def _blocking(plain: Callable[..., Any], whole: Callable[..., Any], api: Api, setting: _Setting) -> Callable[..., Any]:
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
        sight = _Sight(api, setting, kwargs)
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


def _waiting(plain: Callable[..., Any], whole: Callable[..., Any], api: Api, setting: _Setting) -> Callable[..., Any]:
    """The same for an async client."""

    @functools.wraps(plain)
    async def call(*args: Any, **kwargs: Any) -> Any:
        form = _form(kwargs)
        if form == "stream":
            return await plain(*args, **kwargs)
        sight = _Sight(api, setting, kwargs)
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


def _close(sight: _Sight) -> None:
    """`close` of a measured stream."""
    sight.given_up()
    stream = sight.carrier()
    if stream is not None:
        type(stream).close(stream)


async def _close_async(sight: _Sight) -> None:
    sight.given_up()
    stream = sight.carrier()
    if stream is not None:
        await type(stream).close(stream)


class _Watch:
    """What stands in for the iterator inside a `Stream`. Each loop over the stream gets a generator of its own, which
    dies when the loop is left: that is how a `break` is noticed at once, though stream and iterator are a cycle."""

    __slots__ = ("_inner", "_sight")

    def __init__(self, inner: Iterator[Any], sight: _Sight) -> None:
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

    def __init__(self, inner: AsyncIterator[Any], sight: _Sight) -> None:
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


class _Sight:
    """What is seen of one call, until its measurement is told, once."""

    __slots__ = (
        "api",
        "attempts",
        "carrier",
        "context",
        "end",
        "finish_reason",
        "first_answer",
        "first_event_tokens",
        "headers",
        "hide",
        "instants",
        "kwargs",
        "last_attempt",
        "model",
        "over",
        "permit",
        "pieces",
        "response_id",
        "response_model",
        "retries",
        "said_error",
        "see",
        "sent",
        "setting",
        "sighting",
        "started",
        "started_unix_ns",
        "streamed",
        "usage",
    )

    def __init__(self, api: Api, setting: _Setting, kwargs: dict[str, Any]) -> None:
        self.started = self.sent = monotonic_ns()
        self.started_unix_ns = time_ns()
        self.api, self.setting, self.kwargs = api, setting, kwargs
        manner = setting.manner
        self.model: str = str(kwargs.get("model") or "")
        self.streamed = bool(kwargs.get("stream"))
        self.context: Context | None = copy_context() if manner.observers else None
        self.sighting: Sighting | None = None
        if manner.record is not None:
            self.sighting = manner.record.begin(self.started, kwargs)
        if manner.retry is not None:
            manner.retry.begun()
        self.permit: Permit | None = None
        self.attempts: list[Attempt] = []
        self.last_attempt = self.started
        self.instants: list[int] = []
        self.first_answer = self.end = NEVER
        self.first_event_tokens = self.retries = 0
        self.finish_reason = self.response_model = self.response_id = self.said_error = ""
        self.usage: Any = None
        self.headers: Mapping[str, str] = _NO_HEADERS
        self.pieces: list[str] | None = [] if manner.keep_content else None
        self.over = False
        self.hide = False
        self.carrier: Callable[[], Any] = _nothing
        self.see = self._see_event if api == "responses" else self._see_chunk
        if setting.ask_usage and self.streamed and api != "responses":
            options = kwargs.get("stream_options")
            if not isinstance(options, Mapping) or not options.get("include_usage"):
                kwargs["stream_options"] = {
                    **(options if isinstance(options, Mapping) else {}),
                    "include_usage": True,
                }
                self.hide = True

    # -- attempts ------------------------------------------------------------------------------------------------

    def booking(self) -> dict[str, Any]:
        """What a throttle wants to know."""
        throttle = self.setting.manner.throttle
        tokens = estimated_tokens(self.kwargs) if throttle is not None and throttle.counts_tokens else 0
        return {"key": self.setting.key, "model": self.model, "tokens": tokens}

    def begin(self) -> None:
        self.sent = monotonic_ns()

    def answered(self, raw: Any) -> None:
        """The head of an answer is here."""
        self.headers = raw.headers
        self.retries = raw.retries_taken
        if self.permit is not None:
            self.permit.heed(self.headers)

    def failed(self, error: BaseException) -> float | None:
        """An attempt has failed before anything of its answer was handed on: seconds until the next, None: that's it.

        The measurement is told when this was the last.
        """
        now = monotonic_ns()
        failure = self._failure(error)
        response = getattr(error, "response", None)
        headers = getattr(response, "headers", None) or _NO_HEADERS
        self.headers = headers
        request = getattr(error, "request", None)
        made = getattr(request, "headers", _NO_HEADERS).get("x-stainless-retry-count", "")
        self.retries = int(made) if made.isdecimal() else 0
        refused = failure.http_status in (429, 503)
        if self.permit is not None:
            self.permit.heed(headers, refused=refused)
            self.permit.done(0 if refused else None)
            self.permit = None
        retry = self.setting.manner.retry
        wait_s = None
        if retry is not None and isinstance(error, Exception) and not self.over:
            asked = retry_after_s(headers)
            wait_s = retry.wait_s(len(self.attempts) + 1, failure, asked_s=asked, delivered=False)
        waited = 0 if wait_s is None else int(wait_s * 1e9)
        self.attempts.append(Attempt(started=self.sent, ended=now, failure=failure, waited_ns=waited))
        if wait_s is None:
            self._tell("failed" if isinstance(error, Exception) else "cancelled", failure)
        return wait_s

    # -- answers -------------------------------------------------------------------------------------------------

    def whole(self, result: Any) -> None:
        """The answer came in one piece."""
        try:
            at = monotonic_ns()
            self.instants.append(at)
            self.first_answer = self.end = at
            self.usage = getattr(result, "usage", None)
            self.response_model = getattr(result, "model", "") or ""
            self.response_id = getattr(result, "id", "") or ""
            if self.api == "responses":
                self._response(result)
            else:
                for choice in result.choices:
                    self.finish_reason = choice.finish_reason or self.finish_reason
                    if self.pieces is not None:
                        said = choice.text if self.api == "completions" else choice.message.content
                        self.pieces.append(said or "")
        except Exception:  # an answer of an odd shape is the application's to judge
            pass
        self._tell("failed" if self.said_error else "ok", self._said(), result)

    def ended(self) -> None:
        """The stream is over."""
        self._tell("failed" if self.said_error else "ok", self._said(), self.carrier())

    def broken(self, error: BaseException) -> None:
        """The stream raised, or the loop over it was left."""
        if isinstance(error, GeneratorExit):
            self.given_up()
            return
        status: Status = "failed" if isinstance(error, Exception) else "cancelled"
        self._tell(status, self._failure(error), self.carrier())

    def given_up(self) -> None:
        """The application listens no more. With a finish reason seen the answer was whole."""
        if not self.over:
            whole = bool(self.finish_reason)
            self._tell("ok" if whole else "abandoned", None if whole else _GIVEN_UP, self.carrier())

    def is_extra(self, event: Any) -> bool:
        """Whether this event is there only because we asked for a count."""
        return event.usage is not None and not event.choices

    def _see_chunk(self, chunk: Any, at: int) -> None:
        """One event of chat or completions. Nothing in here may raise: the application is waiting for its event."""
        try:
            output = answer = False
            for choice in chunk.choices:
                delta = choice.delta if self.api == "chat" else choice
                text = delta.content if self.api == "chat" else choice.text
                if text:
                    output = answer = True
                    if self.pieces is not None:
                        self.pieces.append(text)
                elif text is None or self.api == "chat":
                    if delta.tool_calls or delta.function_call or delta.refusal:
                        output = answer = True
                    elif getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None):
                        output = True
                if choice.finish_reason:
                    self.finish_reason = choice.finish_reason
                    self.end = at
            if output:
                self.instants.append(at)
                self.end = at
                if answer and self.first_answer < 0:
                    self.first_answer = at
            usage = chunk.usage
            if usage is not None:
                self.usage = usage
                if output and len(self.instants) == 1 and not self.finish_reason:
                    self.first_event_tokens = usage.completion_tokens or 0
            if not self.response_id:
                self.response_id, self.response_model = chunk.id or "", chunk.model or ""
        except Exception:
            pass

    def _see_event(self, event: Any, at: int) -> None:
        """One event of the responses API."""
        try:
            kind = event.type
            if kind.endswith(".delta"):
                self.instants.append(at)
                self.end = at
                if self.first_answer < 0 and "reasoning" not in kind:
                    self.first_answer = at
                if self.pieces is not None and kind == "response.output_text.delta":
                    self.pieces.append(event.delta)
            elif kind in ("response.completed", "response.incomplete", "response.failed", "response.created"):
                self._response(event.response)
                if kind != "response.created":
                    self.end = at
            elif kind == "error":
                self.said_error = str(event.message)
        except Exception:
            pass

    def _response(self, response: Any) -> None:
        self.usage = response.usage or self.usage
        self.response_id, self.response_model = response.id or "", response.model or ""
        if response.status in ("completed", "incomplete", "failed", "cancelled"):
            self.finish_reason = response.status
            if response.status == "incomplete" and response.incomplete_details is not None:
                self.finish_reason = response.incomplete_details.reason or "incomplete"
            if response.status == "failed":
                self.said_error = str(getattr(response.error, "message", "") or "the response failed")
        if self.pieces is not None and not self.streamed:
            self.pieces.append(response.output_text)

    # -- the measurement -----------------------------------------------------------------------------------------

    def _said(self) -> Failure | None:
        return Failure("error_event", self._clean(self.said_error)) if self.said_error else None

    def _failure(self, error: BaseException) -> Failure:
        if not isinstance(error, Exception):
            return Failure("interrupted", type(error).__name__)
        from .openai_client import kind_of  # it knows what the package raises

        kind, text, status = kind_of(error)
        names = {type(cause).__name__ for cause in (error, error.__cause__)}
        if "APITimeoutError" in names and "ConnectTimeout" not in names:
            kind, text = "timeout_total", str(error)
        return Failure(kind, self._clean(text), status)

    def _clean(self, text: str) -> str:
        from .target import redact

        return redact(text, [self.setting.key] if self.setting.key else ())[:500]

    def _counts(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Input, output, cached and reasoning tokens as the server says."""
        usage = self.usage
        if usage is None:
            return None, None, None, None
        if self.api == "responses":
            read, written = getattr(usage, "input_tokens", None), getattr(usage, "output_tokens", None)
            of_read, of_written = "input_tokens_details", "output_tokens_details"
        else:
            read, written = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
            of_read, of_written = "prompt_tokens_details", "completion_tokens_details"
        more, further = getattr(usage, of_read, None), getattr(usage, of_written, None)
        cached = None if more is None else _whole(getattr(more, "cached_tokens", None))
        reasoning = None if further is None else _whole(getattr(further, "reasoning_tokens", None))
        return _whole(read), _whole(written), cached, reasoning

    def _tell(self, status: Status, failure: Failure | None, carrier: Any = None) -> None:
        if self.over:
            return
        self.over = True
        now = monotonic_ns()
        instants = self.instants
        read, written, cached, reasoning = self._counts()
        if not self.streamed:
            self.first_event_tokens = written or 0  # all of it came at once
        manner, headers = self.setting.manner, self.headers
        cost = None
        if manner.prices is not None and read is not None and written is not None:
            names = (self.response_model, self.model) if self.response_model else (self.model,)
            price = price_of(manner.prices, *names)
            cost = price.cost(read, written, cached or 0) if price is not None else None
        if not self.attempts or self.attempts[-1].started != self.sent:
            self.attempts.append(Attempt(started=self.sent, ended=now, failure=failure))
        measurement = Measurement(
            api=self.api,
            streamed=self.streamed,
            status=status,
            started=self.started,
            started_unix_ns=self.started_unix_ns,
            sent=self.sent,
            first_token=instants[0] if instants else NEVER,
            first_answer=self.first_answer,
            last_token=instants[-1] if instants else NEVER,
            end=self.end,
            done=now,
            instants=tuple(instants),
            first_event_tokens=self.first_event_tokens,
            input_tokens=read,
            output_tokens=written if written is not None or not self.streamed else len(instants),
            cached_tokens=cached,
            reasoning_tokens=reasoning,
            token_source="server" if written is not None else "events" if self.streamed and instants else "",
            cost=cost,
            attempts=tuple(self.attempts),
            hidden_retries=self.retries,
            finish_reason=self.finish_reason,
            failure=failure,
            model=self.model,
            response_model=self.response_model,
            response_id=self.response_id,
            request_id=headers.get("x-request-id", ""),
            server=self.setting.server,
            server_timing=timings(headers) if headers else {},
            content=self._content(),
        )
        if self.permit is not None:
            self.permit.done(None if read is None or written is None else read + written)
        if carrier is not None:
            try:
                # Past pydantic, so that what the application dumps or compares is what the server sent.
                object.__setattr__(carrier, "measurement", measurement)
            except (AttributeError, TypeError):
                pass
        manner.tell(measurement, self.context, self.sighting)

    def _content(self) -> Content | None:
        if self.pieces is None:
            return None
        sent = next((self.kwargs[name] for name in ("messages", "prompt", "input") if name in self.kwargs), None)
        return Content(input=sent, output="".join(self.pieces))


def _nothing() -> None:
    """Where a weak reference to the stream will be."""


_GIVEN_UP = Failure("interrupted", "the application stopped listening")


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
