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
from ..request import NEVER, Failure, Usage
from .background import is_collecting_garbage, run_in_background
from .call import NO_HEADERS, Call, CallObservation, CallSettings, context_of_spans
from .event_types import build_response_event_types
from .measurement import TEXT_APIS, Api, Choice, Status, attach_measurement, warn_uncounted
from .observed_stream import is_called_by_helper, observe_stream, observe_unread_response
from .output_tracker import OutputTracker

log = logging.getLogger("loadgen_sdk")

RAW_HEADER = "X-Stainless-Raw-Response"
"""The header by which `with_raw_response` requests the raw response."""

NOT_GIVEN = object()
"""Stands for an argument that the application did not pass."""

_ABANDONED = Failure("interrupted", "the application stopped listening")

current_call: ContextVar[ObservedCall | None] = ContextVar("loadgen_sdk_sending", default=None)
"""The call whose request is being sent in this context, or None."""


class ObservedCall:
    """One call through a method of an instrumented client, while it runs.

    `with observed:` surrounds each attempt, so that this is the `current_call` while its request is
    sent. Each of the `report_...` methods ends the call. Only the first one reports it.

    Attributes:
        call: The call.
        tracker: Tracks the output of the response.
        is_streamed: A stream was requested.
        hidden_retries: The retries that the package of the client makes inside the attempts.
        raw_response: The raw response, if the application has requested it.
        http_response: The response of the HTTP library, until the package has parsed it.
        is_raw_requested: The application called `with_raw_response`: it gets a raw response, which
            was read.
        is_read_by_application: The application called `with_streaming_response`: it gets a raw
            response and reads it by itself.
        hides_usage: The event with the token counts is hidden, because the application did not
            request it.
        is_left_by_helper: A helper of the package that reads the stream for the application (such
            as `chat.completions.stream`) has stopped before its end.
        get_stream: Returns the stream, or None if nobody uses it any more (a weak reference).
    """

    # Defaults are attributes of the class, because most calls need few of them.
    hidden_retries = 0
    raw_response: Any = None
    http_response: Any = None
    is_raw_requested = False
    is_read_by_application = False
    hides_usage = False
    is_left_by_helper = False
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
            kwargs: The fields of the request. If `settings.requests_usage` is set, the field
                `stream_options` of a stream is changed in place to request token counts.
            labels: The labels of this call alone, without those of the client.
        """
        self.is_streamed = bool(kwargs.get("stream"))
        model_name = str(kwargs.get("model") or "")
        self.call = Call(
            settings, api, model_name, kwargs, is_streamed=self.is_streamed, labels=labels
        )
        self.tracker = OutputTracker(
            api, is_streamed=self.is_streamed, keep_content=settings.policy.keep_content
        )
        # Both have the same list: the call sees the timestamps that the tracker appends.
        self.call.instants = self.tracker.instants
        extra_headers = kwargs.get("extra_headers")
        if extra_headers:
            self._find_requested_form(extra_headers)
        if self.is_streamed and settings.requests_usage and api in ("chat", "completions"):
            self._request_usage(kwargs)

    def __enter__(self) -> None:
        """Begin an attempt, so that this is the `current_call` while its request is sent.

        Hooks of the client's package find the call by `current_call`, for example to record the
        headers of its response. The spans of the call become the current ones of OpenTelemetry, so
        that spans of the HTTP library are their children. `__exit__` undoes both.
        """
        call = self.call
        self._outer_call = current_call.get()
        current_call.set(self)
        if call.spans:
            self._current_span = context_of_spans(call.spans)
            self._current_span.__enter__()
        if self.is_streamed and call.api == "responses":
            # The openai package builds its types at their first use, which takes half a second.
            # That would count as time to the first token.
            build_response_event_types()
        # The start time is taken last, so that the duration leaves out the preparations.
        call.attempt_started = monotonic_ns()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """End an attempt. The call that contains this one, if any, is the current one again."""
        # `ContextVar.reset` would fail for a coroutine that is closed in another context.
        current_call.set(self._outer_call)
        if self._current_span is not None:
            self._current_span.__exit__(kind, error, trace)
            self._current_span = None

    @property
    def is_reported(self) -> bool:
        """Whether the call has ended and was reported."""
        return self.call.is_reported

    def throttle_arguments(self, timeout: Any) -> dict[str, Any]:
        """Return the keyword arguments for `Throttle.acquire`, by the timeout of the call."""
        max_wait_s = self.call.settings.timeout_s
        if timeout is not NOT_GIVEN:
            max_wait_s = parse_timeout_s(timeout, max_wait_s)
        return self.call.throttle_arguments(max_wait_s)

    def end_failed_attempt(self, error: BaseException) -> float | None:
        """End an attempt that failed before any output reached the caller.

        Return the seconds to wait before the next attempt, or None if there is none and the call
        has ended. It is then reported, unless the arguments of the application were wrong: the
        method of the client has then raised a TypeError before it sent a request.
        """
        has_wrong_arguments = isinstance(error, TypeError) and not self.call.has_headers
        if has_wrong_arguments:
            self.call.discard()
            return None
        if is_collecting_garbage():
            # The garbage collector closes a coroutine that nobody awaits any more. The code that
            # it has interrupted may hold any lock, so that another thread does the work.
            run_in_background(partial(self.end_failed_attempt, error))
            return None
        try:
            return self._retry_or_report(error)
        except Exception:
            # The application gets its own error, and not one of this package.
            self._log_not_measured()
            return None

    def read_usage_of_unparsed(self, http_response: Any) -> None:
        """Read the token counts of a response that the package of the client could not parse.

        The server bills these tokens although the application gets an error. Streams, error
        responses and bodies that are not complete JSON have no counts to read.

        Args:
            http_response: The response of the HTTP library, or None if there is none.
        """
        if self.is_streamed or http_response is None:
            return
        response = _parse_json_body(http_response)
        if hasattr(response, "usage"):
            self.tracker.read_response(response, monotonic_ns())

    def observe_response(self, response: Any, parsed_response: Any, *, is_blocking: bool) -> Any:
        """Observe the response that a method has returned. Return what the application gets.

        A complete response is reported now, and any other when it has ended. What the method
        returns depends on how the application has called it:

        - A plain call returns a parsed response or a stream.
        - `with_raw_response` returns a raw response, which contains the parsed one.
        - `with_streaming_response` returns a raw response that the application reads later.

        Args:
            response: What the method has returned.
            parsed_response: The response or stream inside a raw response. Otherwise it is
                `response` itself.
            is_blocking: The client is a blocking one.
        """
        self.http_response = None  # The package has parsed it, so that its body may be freed.
        try:
            if not self.call.has_headers:
                self.call.settings.warn_missing_headers()
            if not (self.is_raw_requested or self.is_read_by_application):
                return self.observe_parsed_response(response)
            self.raw_response = response
            if self.is_read_by_application:
                observe_unread_response(response, self, is_blocking=is_blocking)
            else:
                self.observe_parsed_response(parsed_response)
        except Exception:
            # A defect of this package must not become an error of the application.
            self._log_not_measured()
        return response

    def report_unparsable(self, raw_response: Any, error: Exception) -> Any:
        """Report a raw response that cannot be parsed as failed, and return it.

        The application gets the same error when it parses the response.
        """
        self.raw_response = raw_response
        self.read_usage_of_unparsed(getattr(raw_response, "http_response", None))
        self._report("failed", failure_from_error(error), error_code=_error_code(error))
        return raw_response

    def observe_parsed_response(self, response: Any) -> Any:
        """Observe a stream, or report a complete response. Return what the application gets."""
        if self.is_streamed:
            return observe_stream(response, self)
        self.tracker.read_response(response, monotonic_ns())
        self._report("ok", None, response)
        return response

    def report_stream_end(self) -> None:
        """Report a stream that has ended."""
        self._report("ok", None, self.get_stream())

    def report_stream_error(self, error: BaseException) -> None:
        """Report a stream that raised an error, or whose loop was left early (GeneratorExit)."""
        if isinstance(error, GeneratorExit):
            self._report_left_loop()
            return
        self._report(
            _status_of(error), failure_from_error(error), self.get_stream(), _error_code(error)
        )

    def report_abandoned(self) -> None:
        """Report a stream that the application has stopped reading.

        The status is "ok" if the finish reason has arrived, because the output is then complete.
        Otherwise it is "abandoned".
        """
        if is_collecting_garbage():
            # The code that the garbage collector has interrupted may hold any lock.
            run_in_background(self.report_abandoned)
        elif self.tracker.finish_reason:
            self._report("ok", None, self.get_stream())
        else:
            self._report("abandoned", _ABANDONED, self.get_stream())

    def report_closed_response(self, *, is_consumed: bool) -> None:
        """Report a response that the application read by itself and closed.

        The status is "abandoned" if it was not read to its end.
        """
        if self.is_reported:
            return
        self.tracker.finished = monotonic_ns()
        if is_consumed:
            self._report("ok", None)
        else:
            self._report("abandoned", _ABANDONED)

    def _find_requested_form(self, extra_headers: Mapping[str, Any]) -> None:
        """Find out which kind of response the application requests, by the headers of the request.

        Without RAW_HEADER it is a parsed response. The packages of openai and anthropic set the
        header to "true" or "raw" for `with_raw_response`, and to "stream" for
        `with_streaming_response`, whose body the application reads by itself.
        """
        raw_format = extra_headers.get(RAW_HEADER)
        if raw_format:
            self.is_raw_requested = raw_format in ("true", "raw")
            self.is_read_by_application = not self.is_raw_requested

    def _request_usage(self, kwargs: dict[str, Any]) -> None:
        """Request the token counts of a stream, unless the application requests them itself.

        The server sends the counts in an event without choices, which the application may not
        expect. The event is therefore hidden from the application (`hides_usage`).
        """
        extra_body = kwargs.get("extra_body")
        if isinstance(extra_body, Mapping) and "stream_options" in extra_body:
            return
        options = kwargs.get("stream_options")
        if not isinstance(options, Mapping):
            options = {}
        if not options.get("include_usage"):
            kwargs["stream_options"] = {**options, "include_usage": True}
            self.hides_usage = True

    def _retry_or_report(self, error: BaseException) -> float | None:
        """Ask the retry policy about a failed attempt, and report the call if there is no retry.

        Return the seconds to wait before the retry, or None if there is none. A call that the
        throttle or the budget of this process has refused is not retried.
        """
        self.hidden_retries = _hidden_retries(error)
        failure = failure_from_error(error)
        error_code = _error_code(error)
        is_refused_here = isinstance(error, ThrottleTimeout | BudgetExceeded)
        wait_s = self.call.end_failed_attempt(
            failure,
            _headers_of(error, "response"),
            ended_at=monotonic_ns(),
            error_code=error_code,
            can_retry=not is_refused_here,
        )
        if wait_s is None:
            self.read_usage_of_unparsed(self.http_response)
            self._report(_status_of(error), failure, error_code=error_code)
        return wait_s

    def _report_left_loop(self) -> None:
        """Report a stream whose `for` loop was left before its end as abandoned.

        It is not reported here if a helper has left the loop. A helper is an object of the client's
        package that reads the stream for the application, such as the result of
        `chat.completions.stream`. It leaves the loop if it cannot parse the output, and closes the
        response next. The new `close` of the response then reports the call, with the error.
        """
        # The garbage collector ends a loop that nobody continues, in the middle of any other code.
        is_left_by_reader = not is_collecting_garbage()
        self.is_left_by_helper = is_left_by_reader and is_called_by_helper(self.get_stream())
        if not self.is_left_by_helper:
            self.report_abandoned()

    def _report(
        self,
        status: Status,
        failure: Failure | None,
        response: Any = None,
        error_code: str = "",
    ) -> None:
        """Report the call, unless it was reported already.

        A stream that ends normally after an error event of the server counts as failed.

        Args:
            status: How the call ended.
            failure: Why it is not ok, or None.
            response: The response or the stream, which gets the measurement as an attribute.
            error_code: The code in the error response of the server, or "".
        """
        if self.call.is_reported or not self._is_first_report():
            return
        if self.tracker.error and status == "ok":
            status = "failed"
            failure = Failure("error_event", self.tracker.error)
        try:
            observation = self._observation()
            self._warn_uncounted(status, observation.usage)
            measurement = self.call.report(
                status,
                failure,
                observation,
                done=monotonic_ns(),
                error_code=error_code,
            )
            for measured_object in (response, self.raw_response):
                if measured_object is not None:
                    attach_measurement(measured_object, measurement)
        except Exception:
            # A defect of this package must not become an error of the application.
            self._log_not_measured()

    def _is_first_report(self) -> bool:
        """Return True for the first caller among all threads, and False for any later one.

        A stream may be closed by the application while the background thread, to which the
        destructor of the stream passes its work, ends the same call.
        """
        claim = object()
        # `dict.setdefault` is atomic: the first caller stores its claim, and no lock is needed.
        return vars(self).setdefault("_first_claim", claim) is claim

    def _warn_uncounted(self, status: Status, usage: Usage) -> None:
        """Warn if the cost of a call is not known because the server has sent no token counts."""
        call = self.call
        needs_counts = call.policy.prices is not None and call.api in TEXT_APIS
        if status != "ok" or not needs_counts:
            return
        if usage.input is None or usage.output is None:
            warn_uncounted(call.model)

    def _observation(self) -> CallObservation:
        """Return what was observed of the last attempt.

        The time of the first token is unknown (NEVER) if the stream began with texts in fields
        that this package does not know, because they may have been the first output.
        """
        tracker = self.tracker
        usage = tracker.usage()
        first_token = NEVER
        last_token = NEVER
        if tracker.instants:
            last_token = tracker.instants[-1]
            if tracker.is_first_output_known:
                first_token = tracker.instants[0]
        first_event_tokens = tracker.first_event_tokens
        if not self.is_streamed:
            # A response that is not streamed is a single event with all tokens.
            first_event_tokens = usage.output or 0
        choices: tuple[Choice, ...] = ()
        if tracker.content is not None:
            choices = tracker.content.choices(tracker.finish_reason)
        return CallObservation(
            sent=self.call.attempt_started,
            first_token=first_token,
            first_answer=tracker.first_answer,
            last_token=last_token,
            end=max(last_token, tracker.finished),
            first_event_tokens=first_event_tokens,
            finish_reason=tracker.finish_reason,
            hidden_retries=self.hidden_retries,
            response_model=tracker.response_model,
            response_id=tracker.response_id,
            usage=usage,
            choices=choices,
        )

    def _log_not_measured(self) -> None:
        """Log a defect of this package, which must not become an error of the application."""
        log.exception("a call could not be measured")
        self.call.discard()


def _hidden_retries(error: BaseException) -> int:
    """Return how often the package of the client had retried the request by itself.

    The openai and anthropic packages state it in a header of the request. Return 0 without it.
    """
    retry_count = _headers_of(error, "request").get("x-stainless-retry-count", "")
    return int(retry_count) if retry_count.isdecimal() else 0


def failure_from_error(error: BaseException) -> Failure:
    """Return the kind of failure that an exception stands for.

    The exception comes from this package, from openai or anthropic, or from an HTTP library. One
    that is not a subclass of Exception, such as CancelledError, has interrupted the call.
    """
    if not isinstance(error, Exception):
        return Failure("interrupted", type(error).__name__)
    if isinstance(error, ThrottleTimeout):
        return Failure("timeout_total", str(error))
    if isinstance(error, BudgetExceeded):
        return Failure("over_budget", str(error))
    # Imported here, because most applications start without a failed call.
    from ..wire_formats.library_errors import classify_library_error

    failure = classify_library_error(error)
    if _is_timeout_of_request(error):
        return Failure("timeout_total", str(error), failure.http_status)
    return failure


def _is_timeout_of_request(error: Exception) -> bool:
    """Return True for an APITimeoutError of openai or anthropic, unless no connection was opened.

    Names of classes are compared, because the packages may not be installed. The HTTP library's
    own timeout is the cause of the error.
    """
    class_names = {type(error).__name__, type(error.__cause__).__name__}
    return "APITimeoutError" in class_names and "ConnectTimeout" not in class_names


def parse_timeout_s(timeout: Any, default: float | None) -> float | None:
    """Return the argument `timeout=` of a method of openai in seconds, or None for no limit.

    Args:
        timeout: A number of seconds, None for no limit, or an `httpx.Timeout`, whose `read` is
            used. Any other object is the sentinel of the package for "not passed".
        default: The result for a timeout that was not passed.
    """
    if isinstance(timeout, int | float) and not isinstance(timeout, bool):
        return max(0.0, float(timeout))
    if timeout is None:
        return None
    read_timeout = getattr(timeout, "read", NOT_GIVEN)
    if read_timeout is NOT_GIVEN:
        return default
    return parse_timeout_s(read_timeout, default)


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


def _error_code(error: BaseException) -> str:
    """Return the code in an error of the server, or else its type, or an empty string."""
    for name in ("code", "type"):
        code = getattr(error, name, None)
        if isinstance(code, str):
            return code
    return ""


def _parse_json_body(http_response: Any) -> Any:
    """Return the JSON body of a response of an HTTP library as objects with attributes.

    Return None for an error response, and for a body that was cut off or is not JSON.
    """
    try:
        if http_response.status_code >= 400:
            return None
        return json.loads(http_response.content, object_hook=_to_namespace)
    except Exception:
        return None


def _to_namespace(fields: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**fields)
