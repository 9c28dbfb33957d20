"""One call through a method of an instrumented client: sent, observed, and reported exactly once.

This code runs inside the application's own calls and loops. It must not raise or wait, and it must be cheap.
It depends on no transport and no package, only on the attributes of the objects that the openai package returns.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import sys
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from time import monotonic_ns
from typing import Any

from ..errors import ThrottleTimeout
from ..request import NEVER, Completion, Failure
from .call import NO_HEADERS, Call, Setting
from .finishing import collecting, later
from .measurement import Api, Status, warn_uncounted
from .output_tracker import OutputTracker
from .steps import Steps, runner

log = logging.getLogger("loadgen_sdk")

RAW_HEADER = "X-Stainless-Raw-Response"  # the header by which with_raw_response asks for the whole response
_ABANDONED = Failure("interrupted", "the application stopped listening")
_NOT_GIVEN = object()

inside: ContextVar[bool] = ContextVar("loadgen_sdk_inside", default=False)
"""Whether a measured call is being made here: what it calls in turn (LiteLLM calls openai) is not measured again."""


class ObservedCall:
    """One call while it runs: what the tracker saw of its answer, reported to the call's end."""

    def __init__(self, api: Api, setting: Setting, kwargs: dict[str, Any]) -> None:
        self.streamed, timeout = bool(kwargs.get("stream")), kwargs.get("timeout", _NOT_GIVEN)
        self.call = Call(
            setting,
            api,
            str(kwargs.get("model") or ""),
            kwargs,
            streamed=self.streamed,
            labels=kwargs.pop("labels", None),
            max_wait_s=setting.timeout_s if timeout is _NOT_GIVEN else seconds_of(timeout, setting.timeout_s),
        )
        self.tracker = OutputTracker(api, self.streamed, setting.policy.keep_content)
        self.call.instants = self.tracker.instants
        self.hidden_retries = 0  # made by the package inside the attempts
        self.raw: Any = None  # the raw response, if the application holds it
        self.get_stream: Callable[[], Any] = lambda: None  # a weak reference to the stream, once there is one
        self.hides_usage = False  # the event with the token count is there only because we asked for it
        if setting.ask_usage and self.streamed and api in ("chat", "completions"):
            options = kwargs.get("stream_options")
            options = options if isinstance(options, Mapping) else {}
            if not options.get("include_usage"):
                kwargs["stream_options"] = {**options, "include_usage": True}
                self.hides_usage = True

    @property
    def reported(self) -> bool:
        return self.call.reported

    def attempt_failed(self, error: BaseException) -> float | None:
        """An attempt failed before any output reached the caller. Returns the seconds until the next attempt.

        None: there is no further attempt, and the measurement has been reported.
        """
        if collecting():  # a coroutine that nobody awaits any more: closed by the collector
            later(partial(self.attempt_failed, error))
            return None
        request_headers = getattr(getattr(error, "request", None), "headers", NO_HEADERS)
        retry_count = request_headers.get("x-stainless-retry-count", "")
        self.hidden_retries = int(retry_count) if retry_count.isdecimal() else 0
        headers = getattr(getattr(error, "response", None), "headers", None) or NO_HEADERS
        failure = _failure_of(error)
        wait_s = self.call.attempt_failed(failure, headers, at=monotonic_ns(), code=_code_of(error))
        if wait_s is None:
            status: Status = "failed" if isinstance(error, Exception) else "cancelled"
            self._report(status, failure, code=_code_of(error))
        return wait_s

    def head_received(self, raw: Any) -> None:
        """The head of a response has arrived."""
        self.hidden_retries = raw.retries_taken
        self.call.head_received(raw.headers)

    def answer_received(self, result: Any) -> None:
        """A response that is not streamed has arrived."""
        self.tracker.whole(result, monotonic_ns())
        self._report_answer(result)

    def stream_ended(self) -> None:
        """The stream has ended."""
        self._report_answer(self.get_stream())

    def stream_failed(self, error: BaseException) -> None:
        """The stream raised `error`, or the loop over it was left (GeneratorExit)."""
        if isinstance(error, GeneratorExit):
            self.abandoned()
            return
        status: Status = "failed" if isinstance(error, Exception) else "cancelled"
        self._report(status, _failure_of(error), self.get_stream(), _code_of(error))

    def abandoned(self) -> None:
        """The application stopped reading. The call is ok if a finish reason has come, else abandoned."""
        if collecting():  # the code below may hold any lock
            later(self.abandoned)
        elif self.tracker.finish_reason:
            self._report("ok", None, self.get_stream())
        else:
            self._report("abandoned", _ABANDONED, self.get_stream())

    def raw_stream_closed(self, consumed: bool) -> None:
        """A streaming response that the application read by itself is closed."""
        if not self.reported:
            self.tracker.end = monotonic_ns()
            self._report("ok" if consumed else "abandoned", None if consumed else _ABANDONED)

    def _report_answer(self, answer: Any) -> None:
        error = self.tracker.error
        self._report("failed" if error else "ok", Failure("error_event", error) if error else None, answer)

    def _report(self, status: Status, failure: Failure | None, answer: Any = None, code: str = "") -> None:
        if self.reported:
            return
        call, tracker = self.call, self.tracker
        instants, usage = tracker.instants, tracker.usage()
        uncounted = usage.input is None or usage.output is None
        if uncounted and status == "ok" and call.policy.prices is not None and call.api != "batches":
            warn_uncounted(call.model)
        choices = tracker.contents.choices(tracker.finish_reason) if tracker.contents is not None else ()
        seen = Completion(
            request=None,
            due=call.started,
            sent=call.attempt_started,
            first_token=instants[0] if instants else NEVER,
            first_answer=tracker.first_answer,
            last_token=instants[-1] if instants else NEVER,
            end=tracker.end,
            done=monotonic_ns(),
            first_event_tokens=tracker.first_event_tokens if self.streamed else usage.output or 0,  # all came at once
            finish_reason=tracker.finish_reason,
            usage=usage,
            resent=self.hidden_retries,
            response_id=tracker.response_id,
            failure=failure,
        )
        measurement = call.report(status, seen, code=code, response_model=tracker.response_model, choices=choices)
        for owner in (answer,) if self.raw is None else (answer, self.raw):
            if owner is not None:
                try:
                    # Bypass pydantic, so that dumping or comparing the object still shows only what the server sent.
                    object.__setattr__(owner, "measurement", measurement)
                except (AttributeError, TypeError):
                    pass


def _failure_of(error: BaseException) -> Failure:
    if not isinstance(error, Exception):
        return Failure("interrupted", type(error).__name__)
    if isinstance(error, ThrottleTimeout):
        return Failure("timeout_total", str(error))
    from ..transport.openai_client import kind_of  # it maps the exceptions of the package

    kind, text, status = kind_of(error)
    names = {type(cause).__name__ for cause in (error, error.__cause__)}
    if "APITimeoutError" in names and "ConnectTimeout" not in names:
        kind, text = "timeout_total", str(error)
    return Failure(kind, text, status)


def _code_of(error: BaseException) -> str:
    codes = (getattr(error, name, None) for name in ("code", "type"))
    return next((code for code in codes if isinstance(code, str)), "")


def seconds_of(timeout: Any, default: float | None) -> float | None:
    """A `timeout=` of the openai package in seconds: a number, an object with parts, None for none, or not given."""
    if isinstance(timeout, int | float) and not isinstance(timeout, bool):
        return max(0.0, float(timeout))
    if timeout is None:
        return None
    read = getattr(timeout, "read", _NOT_GIVEN)
    return default if read is _NOT_GIVEN else seconds_of(read, default)


# -- the methods that the application calls --------------------------------------------------------------------------


def measured(
    method: Callable[..., Any],
    raw_method: Callable[..., Any],
    api: Api,
    setting: Setting,
    blocking: bool,
    arguments_of: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Callable[..., Any]:
    """`method` of a client, measured. `raw_method` is its variant that returns the raw response.

    arguments_of: finds the request's arguments in those of the method; None: they are the same.
    """

    def steps(*args: Any, **kwargs: Any) -> Steps[Any]:
        if inside.get():
            return (yield partial(method, *args, **kwargs))
        if blocking and not setting.warned and asyncio._get_running_loop() is not None:
            setting.warned = True
            message = "a blocking OpenAI client was called inside a running event loop: every other task stands still"
            warnings.warn(f"{message}; use AsyncOpenAI, or asyncio.to_thread", RuntimeWarning, stacklevel=4)
        form = (kwargs.get("extra_headers") or {}).get(RAW_HEADER)  # set by with_raw_ and with_streaming_response
        raw_asked, unread = form in ("true", "raw"), form is not None and form not in ("true", "raw")
        observed = ObservedCall(api, setting, kwargs if arguments_of is None else arguments_of(kwargs))
        call, throttle = observed.call, setting.policy.throttle
        send = partial(method if unread else raw_method, *args, **kwargs)
        while True:
            try:
                if throttle is not None:
                    acquire = throttle.acquire_blocking if blocking else throttle.acquire
                    call.permit = yield partial(acquire, **call.throttle_arguments())
                call.attempt_begins()
                with call.current_span():
                    raw = yield send
                observed.head_received(raw)
                result = None if unread else (yield raw.parse)
                break
            except BaseException as error:
                wait_s = observed.attempt_failed(error)
                if wait_s is None:
                    if isinstance(error, ThrottleTimeout):
                        raise _timeout_of(sys.modules[setting.package], error) from error
                    raise
                yield partial(time.sleep if blocking else asyncio.sleep, wait_s)
        if unread or raw_asked:
            observed.raw = raw
        if unread:
            _observe_unread(raw, observed, blocking)
            return raw
        result = _observe_result(result, observed)
        return raw if raw_asked else result

    return functools.wraps(method)(runner(steps, blocking))


def _timeout_of(package: Any, error: ThrottleTimeout) -> BaseException:
    """A ThrottleTimeout as an application of this package expects it: also as its APITimeoutError."""
    kind = _timeout_kinds.get(package)
    if kind is None:

        def without_request(self: Any, what: ThrottleTimeout) -> None:
            Exception.__init__(self, str(what))
            self.message, self.hint = str(what), what.hint
            self.request, self.code, self.param, self.type, self.body = None, None, None, None, None

        bases = (ThrottleTimeout, package.APITimeoutError)
        kind = _timeout_kinds[package] = type("ThrottleTimeout", bases, {"__init__": without_request})
    return kind(error)


_timeout_kinds: dict[Any, type[BaseException]] = {}


def _observe_unread(response: Any, observed: ObservedCall, blocking: bool) -> None:
    """A response of `with_streaming_response`: what is parsed is observed; the call ends when it is closed."""
    parse, close = response.parse, response.close

    def parse_steps(*args: Any, **kwargs: Any) -> Steps[Any]:
        result = yield partial(parse, *args, **kwargs)
        return result if observed.reported else _observe_result(result, observed)

    def close_steps() -> Steps[None]:
        consumed = bool(getattr(response.http_response, "is_stream_consumed", False))
        try:
            if consumed and not observed.streamed and not observed.reported:
                yield from parse_steps()
        except Exception:  # what the application read is not a whole answer
            pass
        observed.raw_stream_closed(consumed)
        yield close

    response.parse, response.close = runner(parse_steps, blocking), runner(close_steps, blocking)


def _observe_result(result: Any, observed: ObservedCall) -> Any:
    """Observe the stream, or report the answer. Returns what the application gets."""
    if not observed.streamed:
        observed.answer_received(result)
    elif hasattr(result, "_iterator"):
        observed.get_stream = weakref.ref(result)  # a cycle would delay the end of an abandoned stream
        result._iterator = ObservedEvents(_own_iterator(result), observed)
        result.close = partial(_close, observed)
    else:
        result = ObservedStream(result, observed)
        observed.get_stream = weakref.ref(result)
    return result


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


def _close(observed: ObservedCall) -> Any:
    """The `close` method of a measured stream: end the call, then close the stream (a coroutine if it is async)."""
    observed.abandoned()
    stream = observed.get_stream()
    return type(stream).close(stream)


class ObservedEvents:
    """Replaces the iterator inside a `Stream` or `AsyncStream`, and passes each event to the observed call.

    Each loop over the stream gets its own generator, which is closed when the loop is left. A `break` is therefore
    noticed at once, although stream and iterator refer to each other.
    """

    def __init__(self, events: Any, observed: ObservedCall) -> None:
        self._events, self._observed = events, observed
        self._single: Any = None  # the generator behind `next` and `anext`

    def __iter__(self) -> Iterator[Any]:
        return _events(self._events, self._observed)

    def __aiter__(self) -> AsyncIterator[Any]:
        return _async_events(self._events, self._observed)

    def __next__(self) -> Any:
        self._single = self._single or iter(self)
        return next(self._single)

    def __anext__(self) -> Any:
        self._single = self._single or aiter(self)
        return anext(self._single)

    def __del__(self) -> None:
        if not self._observed.reported:  # a stream that was never read: no work in a destructor
            later(self._observed.abandoned)


class ObservedStream(ObservedEvents):
    """A stream of another make (LiteLLM's), observed. In all else it is that stream, also for `isinstance`."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._events, name)

    def close(self) -> Any:
        self._observed.abandoned()
        return self._events.close()

    def aclose(self) -> Any:
        self._observed.abandoned()
        return self._events.aclose()

    def __enter__(self) -> Any:
        self._events.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        self._observed.abandoned()
        return self._events.__exit__(*error)

    async def __aenter__(self) -> Any:
        await self._events.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        self._observed.abandoned()
        return await self._events.__aexit__(*error)


def _events(events: Iterator[Any], observed: ObservedCall) -> Iterator[Any]:
    observe, clock, hides_usage = observed.tracker.observe, monotonic_ns, observed.hides_usage
    try:
        for event in events:
            observe(event, clock())
            if not hides_usage or event.choices or getattr(event, "usage", None) is None:
                yield event
        observed.stream_ended()
    except BaseException as error:
        observed.stream_failed(error)
        raise


async def _async_events(events: AsyncIterator[Any], observed: ObservedCall) -> AsyncIterator[Any]:
    observe, clock, hides_usage = observed.tracker.observe, monotonic_ns, observed.hides_usage
    try:
        async for event in events:
            observe(event, clock())
            if not hides_usage or event.choices or getattr(event, "usage", None) is None:
                yield event
        observed.stream_ended()
    except BaseException as error:
        observed.stream_failed(error)
        raise
