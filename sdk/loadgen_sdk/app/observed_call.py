"""One call through a method of an instrumented client: observed, and reported exactly once.

This code runs inside the calls and the loops of the application. It must not raise or wait, and it
must be cheap. It depends on no transport and no package, only on the attributes of the objects
that the openai package returns.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

from ..errors import BudgetExceeded, ThrottleTimeout
from ..request import NEVER, Failure
from .background import is_collecting_garbage, run_in_background
from .call import NO_HEADERS, Call, CallObservation, CallSettings, make_current
from .event_types import build_response_event_types
from .measurement import TEXT_APIS, Api, Choice, Status, attach, warn_uncounted
from .observed_stream import is_read_by_caller, observe_stream, observe_unread_response
from .output_tracker import OutputTracker

log = logging.getLogger("loadgen_sdk")

RAW_HEADER = "X-Stainless-Raw-Response"
"""The header by which `with_raw_response` requests the raw response."""

NOT_GIVEN = object()
"""Stands for an argument that the application did not pass."""

_ABANDONED = Failure("interrupted", "the application stopped listening")

sending: ContextVar[ObservedCall | None] = ContextVar("loadgen_sdk_sending", default=None)
"""The call whose request is being sent in this context."""


class ObservedCall:
    """One call while it runs.

    `with observed:` surrounds each attempt. What is sent inside it belongs to this call.

    Attributes:
        call: The call.
        tracker: Tracks the output of the response.
        streamed: A stream was requested.
        hidden_retries: The retries of the package inside the attempts.
        raw: The raw response, if the application has it.
        response: The response of the HTTP library, until the package has parsed it.
        raw_requested: The application called `with_raw_response`.
        is_read_by_application: The application called `with_streaming_response`.
        hides_usage: The event with the token counts is hidden, because the application did not
            request it.
        left_by_reader: What reads the stream for the application has given it up.
        get_stream: Returns the stream, or None. It is a weak reference.
    """

    # Defaults are attributes of the class, because most calls need few of them.
    hidden_retries = 0
    raw: Any = None
    response: Any = None
    raw_requested = False
    is_read_by_application = False
    hides_usage = False
    left_by_reader = False
    get_stream: Callable[[], Any] = staticmethod(lambda: None)
    _outer_call: ObservedCall | None = None
    _current_span: AbstractContextManager[object] | None = None

    def __init__(
        self, api: Api, settings: CallSettings, kwargs: dict[str, Any], labels: Any = None
    ) -> None:
        """Begin a call.

        Args:
            api: The API.
            settings: What all calls of the client have in common.
            kwargs: The arguments of the method. The usage of streams is requested in them, if it is
                needed.
            labels: The labels of the call.
        """
        streamed = bool(kwargs.get("stream"))
        model = kwargs.get("model") or ""
        if type(model) is not str:
            model = str(model)
        self.streamed = streamed
        self.call = Call(settings, api, model, kwargs, streamed, labels)
        self.tracker = OutputTracker(api, streamed, settings.policy.keep_content)
        self.call.instants = self.tracker.instants
        extra_headers = kwargs.get("extra_headers")
        if extra_headers:
            self._read_raw_header(extra_headers)
        if streamed and settings.ask_usage and api in ("chat", "completions"):
            self._request_usage(kwargs)

    def __enter__(self) -> None:
        """Begin an attempt."""
        call = self.call
        self._outer_call = sending.get()
        sending.set(self)
        if call.spans:
            self._current_span = make_current(call.spans)
            self._current_span.__enter__()
        if self.streamed and call.api == "responses":
            build_response_event_types()
        call.attempt_started = monotonic_ns()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """End an attempt."""
        # The token of the variable is not used, because a coroutine may be closed in another
        # context.
        sending.set(self._outer_call)
        if self._current_span is not None:
            self._current_span.__exit__(kind, error, trace)
            self._current_span = None

    @property
    def reported(self) -> bool:
        """Whether the call has ended and was reported."""
        return self.call.reported

    def throttle_arguments(self, timeout: Any) -> dict[str, Any]:
        """Return the keyword arguments for `Throttle.acquire`, by the timeout of the call."""
        max_wait_s = self.call.settings.timeout_s
        if timeout is not NOT_GIVEN:
            max_wait_s = seconds_of(timeout, max_wait_s)
        return self.call.throttle_arguments(max_wait_s)

    def attempt_failed(self, error: BaseException) -> float | None:
        """Note that an attempt failed before any output reached the caller.

        Return the seconds until the next attempt. Return None if there is none: the measurement
        has then been reported, unless there was no call.
        """
        has_wrong_arguments = isinstance(error, TypeError) and not self.call.has_head
        if has_wrong_arguments:
            self.call.withdraw()
            return None
        try:
            return self._attempt_failed(error)
        except Exception:
            # The application gets its own error, and not one of this package.
            self._log_not_measured()
            return None

    def read_unparsed(self, response: Any) -> None:
        """Read the token counts of a response that the package cannot parse as requested.

        Its tokens are billed all the same.
        """
        try:
            if response is None or response.status_code >= 400 or self.streamed:
                return
            answer = json.loads(response.content, object_hook=_to_namespace)
        except Exception:
            # The response was cut off, or is no JSON.
            return
        if hasattr(answer, "usage"):
            self.tracker.read_response(answer, monotonic_ns())

    def answered(self, answer: Any, result: Any, blocking: bool) -> Any:
        """Observe what the method returned. Return what the application gets.

        Args:
            answer: What the method returned.
            result: The result in it. It differs from `answer` for a raw response.
            blocking: The client is a blocking one.
        """
        self.response = None
        try:
            if not self.call.has_head:
                self.call.settings.warn_blind()
            if self.is_read_by_application:
                self.raw = answer
                observe_unread_response(answer, self, blocking)
                return answer
            if self.raw_requested:
                self.raw = answer
                self.observe_result(result)
                return answer
            return self.observe_result(result)
        except Exception:
            self._log_not_measured()
            return answer

    def unreadable(self, answer: Any, error: Exception) -> Any:
        """Report a raw response that cannot be parsed, and return it.

        The application gets the error when it parses the response.
        """
        self.raw = answer
        self.read_unparsed(getattr(answer, "http_response", None))
        self._report("failed", failure_of(error), code=_code_of(error))
        return answer

    def observe_result(self, result: Any) -> Any:
        """Observe a stream, or report a response. Return what the application gets."""
        if self.streamed:
            return observe_stream(result, self)
        self.tracker.read_response(result, monotonic_ns())
        self._report("ok", None, result)
        return result

    def stream_ended(self) -> None:
        """Report a stream that has ended."""
        self._report("ok", None, self.get_stream())

    def stream_failed(self, error: BaseException) -> None:
        """Report a stream that raised an error, or whose loop was left (GeneratorExit)."""
        if isinstance(error, GeneratorExit):
            self._loop_left()
            return
        self._report(_status_of(error), failure_of(error), self.get_stream(), _code_of(error))

    def abandoned(self) -> None:
        """Report a call whose application stopped reading. It is ok if a finish reason has come."""
        if is_collecting_garbage():
            # The code below the destructor may hold any lock.
            run_in_background(self.abandoned)
        elif self.tracker.finish_reason:
            self._report("ok", None, self.get_stream())
        else:
            self._report("abandoned", _ABANDONED, self.get_stream())

    def raw_stream_closed(self, consumed: bool) -> None:
        """Report a response that the application read by itself and closed."""
        if self.reported:
            return
        self.tracker.finished = monotonic_ns()
        if consumed:
            self._report("ok", None)
        else:
            self._report("abandoned", _ABANDONED)

    def _read_raw_header(self, extra_headers: Mapping[str, Any]) -> None:
        """Find out whether the application requests the raw response, or reads it by itself."""
        raw_format = extra_headers.get(RAW_HEADER)
        if raw_format:
            self.raw_requested = raw_format in ("true", "raw")
            self.is_read_by_application = not self.raw_requested

    def _request_usage(self, kwargs: dict[str, Any]) -> None:
        """Request the token counts of a stream, and hide them from the application."""
        extra_body = kwargs.get("extra_body")
        if isinstance(extra_body, Mapping) and "stream_options" in extra_body:
            return
        options = kwargs.get("stream_options")
        if not isinstance(options, Mapping):
            options = {}
        if not options.get("include_usage"):
            kwargs["stream_options"] = {**options, "include_usage": True}
            self.hides_usage = True

    def _attempt_failed(self, error: BaseException) -> float | None:
        if is_collecting_garbage():
            # The collector closes a coroutine that nobody awaits any more.
            run_in_background(partial(self.attempt_failed, error))
            return None
        retry_count = _headers_of(error, "request").get("x-stainless-retry-count", "")
        self.hidden_retries = int(retry_count) if retry_count.isdecimal() else 0
        failure = failure_of(error)
        code = _code_of(error)
        wait_s = self.call.attempt_failed(
            failure,
            _headers_of(error, "response"),
            at=monotonic_ns(),
            code=code,
            final=isinstance(error, ThrottleTimeout | BudgetExceeded),
        )
        if wait_s is None:
            self.read_unparsed(self.response)
            self._report(_status_of(error), failure, code=code)
        return wait_s

    def _loop_left(self) -> None:
        """Report a stream whose loop was left by the application.

        If a reader of the package has left it, the response is closed next, and reports the call.
        """
        try:
            # This method, `stream_failed` and the generator are no readers.
            self.left_by_reader = not is_collecting_garbage() and is_read_by_caller(
                self.get_stream(), skipped_frames=2
            )
        except Exception:
            # There are frames whose variables cannot be read.
            log.debug("the reader of a stream is not known", exc_info=True)
        if not self.left_by_reader:
            self.abandoned()

    def _report(
        self, status: Status, failure: Failure | None, answer: Any = None, code: str = ""
    ) -> None:
        """Report the call, unless it was reported already.

        Args:
            status: How the call ended.
            failure: Why it is not ok, or None.
            answer: The response or the stream, which gets the measurement as an attribute.
            code: The code of the error.
        """
        if self.call.reported or not self._claim_report():
            return
        try:
            if self.tracker.error and status == "ok":
                status = "failed"
                failure = Failure("error_event", self.tracker.error)
            self._warn_uncounted(status)
            measurement = self.call.report(
                status, failure, self._observation(), done=monotonic_ns(), code=code
            )
            if answer is not None:
                attach(answer, measurement)
            if self.raw is not None:
                attach(self.raw, measurement)
        except Exception:
            self._log_not_measured()

    def _claim_report(self) -> bool:
        """Return True for the first caller, of all threads.

        A destructor passes the end of a call to another thread, while this one may close it.
        """
        claim = object()
        return vars(self).setdefault("_report_claim", claim) is claim

    def _warn_uncounted(self, status: Status) -> None:
        call = self.call
        if status != "ok" or call.policy.prices is None or call.api not in TEXT_APIS:
            return
        usage = self.tracker.usage()
        if usage.input is None or usage.output is None:
            warn_uncounted(call.model)

    def _observation(self) -> CallObservation:
        """Return what was observed of the last attempt."""
        tracker = self.tracker
        usage = tracker.usage()
        instants = tracker.instants
        first_token = instants[0] if instants and tracker.is_first_output_known else NEVER
        last_token = instants[-1] if instants else NEVER
        # All tokens of a response that is not streamed come at once.
        first_event_tokens = tracker.first_event_tokens if self.streamed else usage.output or 0
        choices: tuple[Choice, ...] = ()
        if tracker.contents is not None:
            choices = tracker.contents.choices(tracker.finish_reason)
        return CallObservation(  # by position, in the order of the fields, which is faster
            self.call.attempt_started,
            first_token,
            tracker.first_answer,
            last_token,
            max(last_token, tracker.finished),
            first_event_tokens,
            tracker.finish_reason,
            self.hidden_retries,
            tracker.response_model,
            tracker.response_id,
            None,  # server_timing
            False,  # kernel_stamps
            usage,
            choices,
        )

    def _log_not_measured(self) -> None:
        """Log a defect of this package, which must not become an error of the application."""
        log.exception("a call is not measured")
        self.call.withdraw()


def failure_of(error: BaseException) -> Failure:
    """Return the failure that an exception of a call means."""
    if not isinstance(error, Exception):
        return Failure("interrupted", type(error).__name__)
    if isinstance(error, ThrottleTimeout):
        return Failure("timeout_total", str(error))
    if isinstance(error, BudgetExceeded):
        return Failure("over_budget", str(error))
    from ..wire_formats.library_errors import classify_library_error

    failure = classify_library_error(error)
    class_names = {type(cause).__name__ for cause in (error, error.__cause__)}
    if "APITimeoutError" in class_names and "ConnectTimeout" not in class_names:
        return Failure("timeout_total", str(error), failure.http_status)
    return failure


def seconds_of(timeout: Any, default: float | None) -> float | None:
    """Return a `timeout=` of the openai package in seconds, or None for no limit.

    It is a number, an object with parts such as `httpx.Timeout`, or the mark of the package for a
    timeout that was not passed. `default` is returned for the latter.
    """
    if isinstance(timeout, int | float) and not isinstance(timeout, bool):
        return max(0.0, float(timeout))
    if timeout is None:
        return None
    read_timeout = getattr(timeout, "read", NOT_GIVEN)
    return default if read_timeout is NOT_GIVEN else seconds_of(read_timeout, default)


def _status_of(error: BaseException) -> Status:
    return "failed" if isinstance(error, Exception) else "cancelled"


def _headers_of(error: BaseException, name: str) -> Any:
    """Return the headers of the "request" or the "response" of an error.

    The HTTP library raises RuntimeError if one of its own errors has none.
    """
    try:
        return getattr(getattr(error, name, None), "headers", None) or NO_HEADERS
    except RuntimeError:
        return NO_HEADERS


def _code_of(error: BaseException) -> str:
    """Return the code of an error of the server, or else its type, or an empty string."""
    for name in ("code", "type"):
        code = getattr(error, name, None)
        if isinstance(code, str):
            return code
    return ""


def _to_namespace(fields: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**fields)
