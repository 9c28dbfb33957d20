"""One call through a method of an instrumented client: sent, observed, and reported exactly once.

This code runs inside the application's own calls and loops. It must not raise or wait, and it must
be cheap. It depends on no transport and no package, only on the attributes of the objects that the
openai package returns.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import logging
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from time import monotonic_ns
from types import FrameType, SimpleNamespace
from typing import Any

from ..errors import BudgetExceeded, ThrottleTimeout, warn
from ..request import NEVER, Failure
from . import event_loop
from .call import NO_HEADERS, Call, CallObservation, CallSettings, make_current
from .event_types import build_response_event_types
from .finishing import collecting, later
from .measurement import TEXT_APIS, Api, Status, attach, warn_uncounted
from .output_tracker import OutputTracker
from .steps import Steps, isawaitable, repeatable, run_async, run_blocking, runner

log = logging.getLogger("loadgen_sdk")

RAW_HEADER = (
    "X-Stainless-Raw-Response"  # the header by which with_raw_response asks for the whole response
)
LABELS = "loadgen_labels"  # the argument of a call that is ours; every other one, `labels` too, is the package's
_ABANDONED = Failure("interrupted", "the application stopped listening")
_NOT_GIVEN = object()

sending: ContextVar[ObservedCall | None] = ContextVar("loadgen_sdk_sending", default=None)
"""The call whose request is being sent here: `head_arrived` is for it."""


class ObservedCall:
    """One call while it runs: what the tracker saw of its answer, reported to the call's end.

    `with observed:` around each attempt: what is sent inside belongs to this call.
    """

    hidden_retries = 0  # made by the package inside the attempts
    raw: Any = None  # the raw response, if the application holds it
    response: Any = None  # the HTTP library's, until the package has made an answer of it
    raw_asked = unread = (
        False  # the application called with_raw_response, or with_streaming_response
    )
    hides_usage = False  # the event with the token count is there only because we asked for it
    left_by_reader = False  # what reads the stream for the application has given it up
    get_stream: Callable[[], Any] = staticmethod(
        lambda: None
    )  # a weak reference to the stream, once there is one
    _outer: ObservedCall | None = None
    _current_span: AbstractContextManager[object] | None = None

    def __init__(
        self, api: Api, setting: CallSettings, kwargs: dict[str, Any], labels: Any = None
    ) -> None:
        self.streamed = streamed = bool(kwargs.get("stream"))
        model = kwargs.get("model") or ""
        self.call = Call(
            setting, api, model if type(model) is str else str(model), kwargs, streamed, labels
        )
        self.tracker = OutputTracker(api, streamed, setting.policy.keep_content)
        self.call.instants = self.tracker.instants
        if (headers := kwargs.get("extra_headers")) and (form := headers.get(RAW_HEADER)):
            self.raw_asked = form in ("true", "raw")
            self.unread = not self.raw_asked
        if streamed and setting.ask_usage and api in ("chat", "completions"):
            options, more = kwargs.get("stream_options"), kwargs.get("extra_body")
            options = options if isinstance(options, Mapping) else {}
            if not options.get("include_usage") and not (
                isinstance(more, Mapping) and "stream_options" in more
            ):
                kwargs["stream_options"] = {**options, "include_usage": True}
                self.hides_usage = True

    def __enter__(self) -> None:
        call, self._outer = self.call, sending.get()
        sending.set(self)
        if call.spans:
            self._current_span = make_current(call.spans)
            self._current_span.__enter__()
        if self.streamed and call.api == "responses":
            build_response_event_types()
        call.attempt_started = monotonic_ns()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        sending.set(self._outer)  # no token: a coroutine may be closed in another context
        if self._current_span is not None:
            self._current_span.__exit__(kind, error, trace)
            self._current_span = None

    def throttle_arguments(self, timeout: Any) -> dict[str, Any]:
        """The keyword arguments for `Throttle.acquire`. timeout: of the call."""
        client_s = self.call.settings.timeout_s
        return self.call.throttle_arguments(
            client_s if timeout is _NOT_GIVEN else seconds_of(timeout, client_s)
        )

    @property
    def reported(self) -> bool:
        return self.call.reported

    def attempt_failed(self, error: BaseException) -> float | None:
        """An attempt failed before any output reached the caller.

        Returns the seconds until the next attempt.

        None: there is no further attempt, and the measurement has been reported, if it was a call
        at all.
        """
        if (
            isinstance(error, TypeError) and not self.call.has_head
        ):  # wrong arguments: there was no call
            self.call.withdraw()
            return None
        try:
            return self._attempt_failed(error)
        except Exception:  # the application gets its own error, not one of ours
            self._not_measured()
            return None

    def _attempt_failed(self, error: BaseException) -> float | None:
        if collecting():  # a coroutine that nobody awaits any more: closed by the collector
            later(partial(self.attempt_failed, error))
            return None
        retry_count = _headers_of(error, "request").get("x-stainless-retry-count", "")
        self.hidden_retries = int(retry_count) if retry_count.isdecimal() else 0
        failure = failure_of(error)
        wait_s = self.call.attempt_failed(
            failure,
            _headers_of(error, "response"),
            at=monotonic_ns(),
            code=_code_of(error),
            final=isinstance(error, ThrottleTimeout | BudgetExceeded),
        )
        if wait_s is None:
            self.read_unparsed(self.response)
            status: Status = "failed" if isinstance(error, Exception) else "cancelled"
            self._report(status, failure, code=_code_of(error))
        return wait_s

    def read_unparsed(self, response: Any) -> None:
        """A whole answer came of which the package cannot make what was asked for (`parse`): its
        tokens are billed.
        """
        try:
            if response is None or response.status_code >= 400 or self.streamed:
                return
            answer = json.loads(response.content, object_hook=_object)
        except Exception:  # it was cut off, or is no JSON
            return
        if hasattr(answer, "usage"):
            self.tracker.whole(answer, monotonic_ns())

    def answered(self, answer: Any, result: Any, blocking: bool) -> Any:
        """The method has returned `answer`, and `result` is what is in it.

        Returns what the application gets.
        """
        self.response = None
        try:
            if not self.call.has_head:
                self.call.settings.warn_blind()
            if self.unread:
                self.raw = answer
                _observe_unread(answer, self, blocking)
                return answer
            if self.raw_asked:
                self.raw = answer
                self.observe_result(result)
                return answer
            return self.observe_result(result)
        except Exception:
            self._not_measured()
            return answer

    def unreadable(self, answer: Any, error: Exception) -> Any:
        """What came cannot be read.

        Who asked for the raw response gets it, and the error where it is parsed.
        """
        self.raw = answer
        self.read_unparsed(getattr(answer, "http_response", None))
        self._report("failed", failure_of(error), None, _code_of(error))
        return answer

    def observe_result(self, result: Any) -> Any:
        """Observe the stream, or report the answer. Returns what the application gets."""
        if not self.streamed:
            self.tracker.whole(result, monotonic_ns())
            self._report("ok", None, result)
        elif hasattr(result, "_iterator"):
            stream = _unwrapped(result)
            self.get_stream = weakref.ref(
                stream
            )  # a cycle would delay the end of an abandoned stream
            twin = copy.copy(stream)
            twin._iterator = None
            events = _own_iterator(stream, twin)
            stream._iterator = ObservedEvents(events, self)
            stream.close = partial(_close, self, twin)
            _watch_response(getattr(stream, "response", None), events, self)
        else:
            result = ObservedStream(result, self)
            self.get_stream = weakref.ref(result)
        return result

    def stream_ended(self) -> None:
        """The stream has ended."""
        self._report("ok", None, self.get_stream())

    def stream_failed(self, error: BaseException) -> None:
        """The stream raised `error`, or the loop over it was left (GeneratorExit)."""
        if isinstance(error, GeneratorExit):
            try:
                self.left_by_reader = not collecting() and _is_read_by_caller(self.get_stream())
            except Exception:  # there are frames that show nothing of themselves
                log.debug("the reader of a stream is not known", exc_info=True)
            if not self.left_by_reader:
                self.abandoned()
            return
        status: Status = "failed" if isinstance(error, Exception) else "cancelled"
        self._report(status, failure_of(error), self.get_stream(), _code_of(error))

    def abandoned(self) -> None:
        """The application stopped reading.

        The call is ok if a finish reason has come, else abandoned.
        """
        if collecting():  # the code below may hold any lock
            later(self.abandoned)
        elif self.tracker.finish_reason:
            self._report("ok", None, self.get_stream())
        else:
            self._report("abandoned", _ABANDONED, self.get_stream())

    def raw_stream_closed(self, consumed: bool) -> None:
        """A streaming response that the application read by itself is closed."""
        if not self.reported:
            self.tracker.finished = monotonic_ns()
            self._report("ok" if consumed else "abandoned", None if consumed else _ABANDONED)

    def _report(
        self, status: Status, failure: Failure | None, answer: Any = None, code: str = ""
    ) -> None:
        call = self.call
        # one step, for all threads: a destructor hands the end to another one, while this one
        # closes
        if call.reported or vars(self).setdefault("_told_by", mine := object()) is not mine:
            return
        try:
            tracker = self.tracker
            if tracker.error and status == "ok":
                status, failure = "failed", Failure("error_event", tracker.error)
            instants, usage = tracker.instants, tracker.usage()
            uncounted = usage.input is None or usage.output is None
            if (
                uncounted
                and status == "ok"
                and call.policy.prices is not None
                and call.api in TEXT_APIS
            ):
                warn_uncounted(call.model)
            first, last = (instants[0], instants[-1]) if instants else (NEVER, NEVER)
            if not tracker.is_first_output_known:
                first = NEVER
            observed = CallObservation(  # by place, in the order of its fields
                call.attempt_started,
                first,
                tracker.first_answer,
                last,
                last if last > tracker.finished else tracker.finished,
                tracker.first_event_tokens
                if self.streamed
                else usage.output or 0,  # all came at once
                tracker.finish_reason,
                self.hidden_retries,
                tracker.response_model,
                tracker.response_id,
                None,  # server_timing
                False,  # kernel_stamps
                usage,
                () if tracker.contents is None else tracker.contents.choices(tracker.finish_reason),
            )
            measurement = call.report(status, failure, observed, done=monotonic_ns(), code=code)
            if answer is not None:
                attach(answer, measurement)
            if self.raw is not None:
                attach(self.raw, measurement)
        except Exception:
            self._not_measured()

    def _not_measured(self) -> None:
        """A fault of ours is none of the application's."""
        log.exception("a call is not measured")
        self.call.withdraw()


def _object(fields: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**fields)


def failure_of(error: BaseException) -> Failure:
    """What an exception of a package's call says."""
    if not isinstance(error, Exception):
        return Failure("interrupted", type(error).__name__)
    if isinstance(error, ThrottleTimeout):
        return Failure("timeout_total", str(error))
    if isinstance(error, BudgetExceeded):
        return Failure("over_budget", str(error))
    from ..wire_formats.library_errors import classify_library_error

    failure = classify_library_error(error)
    names = {type(cause).__name__ for cause in (error, error.__cause__)}
    if "APITimeoutError" in names and "ConnectTimeout" not in names:
        return Failure("timeout_total", str(error), failure.http_status)
    return failure


def _headers_of(error: BaseException, name: str) -> Any:
    """The headers of an error's request or response.

    The HTTP library raises where an error of its own has none.
    """
    try:
        return getattr(getattr(error, name, None), "headers", None) or NO_HEADERS
    except RuntimeError:
        return NO_HEADERS


def _code_of(error: BaseException) -> str:
    codes = (getattr(error, name, None) for name in ("code", "type"))
    return next((code for code in codes if isinstance(code, str)), "")


def seconds_of(timeout: Any, default: float | None) -> float | None:
    """A `timeout=` of the openai package in seconds: a number, an object with parts, None for
    none, or not given.
    """
    if isinstance(timeout, int | float) and not isinstance(timeout, bool):
        return max(0.0, float(timeout))
    if timeout is None:
        return None
    read = getattr(timeout, "read", _NOT_GIVEN)
    return default if read is _NOT_GIVEN else seconds_of(read, default)


# -- the methods that the application calls
# --------------------------------------------------------------------------


def measured(
    method: Callable[..., Any],
    api: Api,
    setting: CallSettings,
    blocking: bool,
    arguments_of: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Callable[..., Any]:
    """`method` of a client, measured.

    The client calls `head_arrived` when the head of a response is there.

    arguments_of: finds the request's arguments in those of the method; None: they are the same.
    """
    policy = setting.policy
    throttle, budget = policy.throttle, policy.budget
    book = None if budget is None else budget.booker(blocking)
    acquire = (
        None if throttle is None else throttle.acquire_blocking if blocking else throttle.acquire
    )
    plain = (
        acquire is None and book is None and policy.retry is None
    )  # one attempt, and no wait before it
    reads_twice = not plain or policy.record is not None or policy.keep_content

    def begin(kwargs: dict[str, Any]) -> ObservedCall | None:
        """The call that begins, or None for one that is a part of another."""
        labels = kwargs.pop(LABELS, None)
        outer = sending.get()
        if outer is not None and outer.call.settings.covers_inner:
            return None
        if blocking and not setting.warned and asyncio._get_running_loop() is not None:
            setting.warned = True
            message = "a blocking OpenAI client was called inside a running event loop: every other task stands still"
            warn(f"{message}; use AsyncOpenAI, or asyncio.to_thread", RuntimeWarning, stacklevel=4)
        try:
            if reads_twice:
                repeatable(kwargs)
            return ObservedCall(
                api, setting, kwargs if arguments_of is None else arguments_of(kwargs), labels
            )
        except Exception:  # a fault of ours is none of the application's
            log.exception("a call is not measured")
            return None

    # What most calls need is done here, as a generator costs as much as all the rest of a call.

    def call(*args: Any, **kwargs: Any) -> Any:
        if (observed := begin(kwargs)) is None:
            return method(*args, **kwargs)
        if not plain or observed.raw_asked:
            return run_blocking(
                _attempts(observed, partial(method, *args, **kwargs), acquire, book, blocking)
            )
        try:
            with observed:
                answer = method(*args, **kwargs)
        except BaseException as error:
            observed.attempt_failed(error)
            raise
        return observed.answered(answer, answer, True)

    async def call_in_loop(*args: Any, **kwargs: Any) -> Any:
        if (observed := begin(kwargs)) is None:
            answer = method(*args, **kwargs)
            return await answer if isawaitable(answer) else answer
        if not plain or observed.raw_asked:
            return await run_async(
                _attempts(observed, partial(method, *args, **kwargs), acquire, book, blocking)
            )
        try:
            with observed:
                answer = method(*args, **kwargs)
                if isawaitable(answer):
                    answer = await answer
        except BaseException as error:
            observed.attempt_failed(error)
            raise
        return observed.answered(answer, answer, False)

    return functools.wraps(method)(call if blocking else call_in_loop)


def _attempts(
    observed: ObservedCall,
    send: Any,
    acquire: Callable[..., Any] | None,
    book: Callable[..., Any] | None,
    blocking: bool,
) -> Steps[Any]:
    """A call that may wait, be refused, or be tried again. send: the method with its arguments, a
    partial.
    """
    wait_s: float | None = None
    setting = observed.call.settings
    if not blocking and setting.policy.retry is not None:
        event_loop.check()
    while True:
        try:
            if wait_s:
                yield partial(time.sleep if blocking else event_loop.sleep, wait_s)
            if acquire is not None:
                arguments = observed.throttle_arguments(send.keywords.get("timeout", _NOT_GIVEN))
                observed.call.permit = yield partial(acquire, **arguments)
            if book is not None and observed.call.is_budgeted:
                observed.call.hold = yield partial(
                    book, observed.call.estimated_cost(), observed.call.model
                )
            with observed:
                answer = yield send
            break
        except BaseException as error:
            wait_s = observed.attempt_failed(error)
            if wait_s is None:
                if isinstance(error, ThrottleTimeout):
                    raise _timeout_of(sys.modules[setting.package], error) from error
                raise
    result = answer
    if observed.raw_asked:
        try:
            result = yield answer.parse
        except Exception as error:
            return observed.unreadable(answer, error)
    return observed.answered(answer, result, blocking)


def head_arrived(headers: Any, hidden_retries: int = 0, response: Any = None) -> None:
    """The head of a response has arrived in the client of a package: for the call that is being
    sent here, if any.
    """
    if (observed := sending.get()) is not None:
        observed.hidden_retries, observed.response = hidden_retries, response
        observed.call.head_received(headers)


def _timeout_of(package: Any, error: ThrottleTimeout) -> BaseException:
    """A ThrottleTimeout as an application of this package expects it: also as its APITimeoutError."""
    kind = _timeout_kinds.get(package)
    if kind is None:

        def without_request(self: Any, what: ThrottleTimeout) -> None:
            Exception.__init__(self, str(what))
            self.message, self.hint = str(what), what.hint
            self.request, self.code, self.param, self.type, self.body = None, None, None, None, None

        bases = (ThrottleTimeout, package.APITimeoutError)
        kind = _timeout_kinds[package] = type(
            "ThrottleTimeout", bases, {"__init__": without_request}
        )
    return kind(error)


_timeout_kinds: dict[Any, type[BaseException]] = {}


def _observe_unread(response: Any, observed: ObservedCall, blocking: bool) -> None:
    """A response of `with_streaming_response`: what is parsed is observed; the call ends when it
    is closed.
    """
    parse, close = response.parse, response.close

    def parse_steps(*args: Any, **kwargs: Any) -> Steps[Any]:
        result = yield partial(parse, *args, **kwargs)
        return result if observed.reported else observed.observe_result(result)

    def close_steps() -> Steps[None]:
        consumed = bool(getattr(response.http_response, "is_stream_consumed", False))
        try:
            if consumed and not observed.streamed and not observed.reported:
                yield from parse_steps()
        except Exception:  # what the application read is no whole answer, or not what it asked for
            observed.read_unparsed(response.http_response)
        observed.raw_stream_closed(consumed)
        yield close

    response.parse, response.close = runner(parse_steps, blocking), runner(close_steps, blocking)


def _unwrapped(stream: Any) -> Any:
    """The package's own stream, in which the proxies of other instrumentations (wrapt's) look for
    what they lack.
    """
    while (inner := getattr(stream, "__wrapped__", None)) is not None:
        stream = inner
    return stream


def _own_iterator(stream: Any, twin: Any) -> Any:
    """The events of a stream, without a reference to it.

    The package's iterator refers to its stream and the stream to the iterator: such a cycle stays
    until the collector comes, and with it the permit of a stream that nobody reads. A twin of the
    stream, its copy, breaks it.
    """
    make_iterator = getattr(type(stream), "__stream__", None)
    return stream._iterator if make_iterator is None else make_iterator(twin)


def _close(observed: ObservedCall, twin: Any) -> Any:
    """The `close` method of a measured stream: end the call, then close the stream (a coroutine if
    it is async).

    twin: of the stream, which may be gone: what closes it is often all that is kept.
    """
    observed.abandoned()
    return type(twin).close(twin)


def _watch_response(response: Any, events: Any, observed: ObservedCall) -> None:
    """What `chat.completions.stream` and its kin return closes the response of its stream, not the
    stream.
    """
    name = "aclose" if hasattr(events, "__anext__") else "close"
    if (close := getattr(response, name, None)) is not None:
        setattr(response, name, partial(_close_response, observed, weakref.ref(events), close))


def _close_response(
    observed: ObservedCall, events: Callable[[], Any], close: Callable[[], Any]
) -> Any:
    """`close` of a response.

    Its events close it themselves when they end: they are running then, or over.
    """
    reading = events()
    if reading is None or _is_suspended(reading) is False:
        return close()
    error = sys.exc_info()[1]
    if error is None and observed.left_by_reader:  # the application has caught it already
        error = ValueError("the answer is not what was asked for")
    elif error is None or not _raised_by_reader(error, observed.get_stream()):
        observed.abandoned()
        return close()
    if hasattr(reading, "__anext__"):
        return _close_unfit_async(observed, reading, error, close)
    try:
        if observed.tracker.is_near_its_end:
            for event in reading:
                observed.tracker.observe(event, monotonic_ns())
    except Exception:
        pass  # the rest would only complete what is measured: the application has an error of its own to see
    observed.stream_failed(error)
    return close()


def _is_suspended(events: Any) -> bool | None:
    """Of a generator, of either kind: whether it can go on. None: it is none."""
    for kind in ("gi", "ag"):
        if hasattr(events, f"{kind}_frame"):
            return getattr(events, f"{kind}_frame") is not None and not getattr(
                events, f"{kind}_running"
            )
    return None


async def _close_unfit_async(
    observed: ObservedCall, reading: Any, error: BaseException, close: Any
) -> None:
    try:
        if observed.tracker.is_near_its_end:
            async for event in reading:
                observed.tracker.observe(event, monotonic_ns())
    except Exception:
        pass  # the rest would only complete what is measured: the application has an error of its own to see
    finally:
        observed.stream_failed(error)
        await close()


def _raised_by_reader(error: BaseException, stream: Any) -> bool:
    """Whether what reads `stream` for the application, as `chat.completions.stream`, has raised
    `error`: the answer is not what was asked for. Its end, with the tokens, is still to be read
    then.
    """
    trace = error.__traceback__
    while trace is not None:
        if _reads(trace.tb_frame, stream):
            return True
        trace = trace.tb_next
    return False


def _is_read_by_caller(stream: Any) -> bool:
    """Whether such a reader is the caller: it fails, or is given up itself.

    Then the response is closed, which says.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(MOST_FRAMES):
        if frame is None:
            break
        if _reads(frame, stream):
            return True
        frame = frame.f_back
    return False


MOST_FRAMES = 6  # between a stream and its reader: the package's loop over it, and those of other instrumentations


def _reads(frame: FrameType, stream: Any) -> bool:
    reader = getattr(frame.f_locals.get("self"), "__dict__", {})
    return stream is not None and _unwrapped(reader.get("_raw_stream")) is stream


class ObservedEvents:
    """Replaces the iterator inside a `Stream` or `AsyncStream`, and passes each event to the
    observed call.

    Each loop over the stream gets its own generator, which is closed when the loop is left. A
    `break` is therefore noticed at once, although stream and iterator refer to each other.
    """

    def __init__(self, events: Any, observed: ObservedCall) -> None:
        self._events, self._observed = events, observed
        self._single: Any = None  # the generator behind `next` and `anext`

    def __iter__(self) -> Iterator[Any]:
        return _events(
            self._events, self._observed, self
        )  # `for event in litellm.completion(…)` holds no stream

    def __aiter__(self) -> AsyncIterator[Any]:
        return _async_events(self._events, self._observed, self)

    def __next__(self) -> Any:
        self._single = self._single or _events(self._events, self._observed)
        return next(self._single)

    def __anext__(self) -> Any:
        self._single = self._single or _async_events(self._events, self._observed)
        return anext(self._single)

    def __del__(self) -> None:
        if not self._observed.reported:  # a stream that was never read: no work in a destructor
            later(self._observed.abandoned)


class ObservedStream(ObservedEvents):
    """A stream of another make (LiteLLM's), observed.

    In all else it is that stream, also for `isinstance`.
    """

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


def _events(events: Iterator[Any], observed: ObservedCall, owner: object = None) -> Iterator[Any]:
    """The events of a stream, observed. owner: is not over while they are read."""
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


async def _async_events(
    events: AsyncIterator[Any], observed: ObservedCall, owner: object = None
) -> AsyncIterator[Any]:
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
