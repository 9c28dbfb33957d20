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
from .call import NO_HEADERS, Call, CallObservation, CallSettings, activate_spans
from .event_types import build_response_event_types
from .measurement import TEXT_APIS, Api, Choice, Status, attach_measurement, warn_uncounted
from .observed_stream import is_read_by_calling_code, observe_stream, observe_unread_response
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
        is_left_by_reader: A helper of the package that reads the stream for the application (such
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
    is_left_by_reader = False
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
            kwargs: The fields of the request. If the settings say so, `stream_options` is changed
                in place to request the token counts of a stream.
            labels: The labels of this call alone, without those of the client.
        """
        is_streamed = bool(kwargs.get("stream"))
        model = kwargs.get("model") or ""
        if type(model) is not str:
            model = str(model)
        self.is_streamed = is_streamed
        self.call = Call(settings, api, model, kwargs, is_streamed=is_streamed, labels=labels)
        self.tracker = OutputTracker(
            api, is_streamed=is_streamed, keep_content=settings.policy.keep_content
        )
        # The call sees the timestamps that the tracker appends.
        self.call.instants = self.tracker.instants
        extra_headers = kwargs.get("extra_headers")
        if extra_headers:
            self._read_raw_header(extra_headers)
        if is_streamed and settings.requests_usage and api in ("chat", "completions"):
            self._request_usage(kwargs)

    def __enter__(self) -> None:
        """Begin an attempt: what this context sends from now on belongs to this call.

        Spans of the call become the current ones, and the time of the attempt is taken last.
        """
        call = self.call
        self._outer_call = current_call.get()
        current_call.set(self)
        if call.spans:
            self._current_span = activate_spans(call.spans)
            self._current_span.__enter__()
        if self.is_streamed and call.api == "responses":
            # Before the time is taken, because it is slow once in a process.
            build_response_event_types()
        call.attempt_started = monotonic_ns()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """End an attempt. A call that this one was made inside is the current one again."""
        # The token of the variable is not used, because a coroutine may be closed in another
        # context.
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

        Return the seconds to wait before the next attempt. Return None if there is none: the call
        was then reported. A call that was not sent because its arguments are wrong (TypeError) is
        discarded without a report.
        """
        has_wrong_arguments = isinstance(error, TypeError) and not self.call.has_headers
        if has_wrong_arguments:
            self.call.discard()
            return None
        try:
            return self._end_failed_attempt(error)
        except Exception:
            # The application gets its own error, and not one of this package.
            self._log_not_measured()
            return None

    def read_unparsed(self, http_response: Any) -> None:
        """Read the token counts of a response that the package of the client could not parse.

        Its tokens are billed all the same. `http_response` is a response of the HTTP library or
        None. A response that is an error, a stream, cut off or no JSON is ignored.
        """
        try:
            if http_response is None or http_response.status_code >= 400 or self.is_streamed:
                return
            response = json.loads(http_response.content, object_hook=_to_namespace)
        except Exception:
            return
        if hasattr(response, "usage"):
            self.tracker.read_response(response, monotonic_ns())

    def observe_response(self, response: Any, parsed_response: Any, *, is_blocking: bool) -> Any:
        """Observe the response that a method has returned. Return what the application gets.

        A complete response is reported now, and a stream when it has ended. A response of
        `with_streaming_response` is observed while the application reads it.

        Args:
            response: What the method has returned.
            parsed_response: The response or stream inside it, if it is a raw response. Else it is
                `response` itself.
            is_blocking: The client is a blocking one.
        """
        self.http_response = None
        try:
            if not self.call.has_headers:
                self.call.settings.warn_missing_headers()
            if self.is_read_by_application:
                self.raw_response = response
                observe_unread_response(response, self, is_blocking=is_blocking)
                return response
            if self.is_raw_requested:
                self.raw_response = response
                self.observe_parsed_response(parsed_response)
                return response
            return self.observe_parsed_response(response)
        except Exception:
            self._log_not_measured()
            return response

    def report_unparsable(self, raw_response: Any, error: Exception) -> Any:
        """Report a raw response that cannot be parsed, and return it.

        The application gets the same error when it parses the response.
        """
        self.raw_response = raw_response
        self.read_unparsed(getattr(raw_response, "http_response", None))
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
        """Report a stream that raised an error, or whose loop was left (GeneratorExit)."""
        if isinstance(error, GeneratorExit):
            self._report_left_loop()
            return
        self._report(
            _status_of(error), failure_from_error(error), self.get_stream(), _error_code(error)
        )

    def report_abandoned(self) -> None:
        """Report a stream that the application has stopped reading.

        The status is "ok" if a finish reason has come, because the output is then complete, and
        "abandoned" otherwise.
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

    def _read_raw_header(self, extra_headers: Mapping[str, Any]) -> None:
        """Find out whether the application requests the raw response, or reads it by itself."""
        raw_format = extra_headers.get(RAW_HEADER)
        if raw_format:
            self.is_raw_requested = raw_format in ("true", "raw")
            self.is_read_by_application = not self.is_raw_requested

    def _request_usage(self, kwargs: dict[str, Any]) -> None:
        """Request the token counts of a stream, unless the application does so itself.

        The event with the counts is then hidden from the application (`hides_usage`), which may
        not expect an event without choices.
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

    def _end_failed_attempt(self, error: BaseException) -> float | None:
        """Do the work of `end_failed_attempt` for a call that was sent.

        In the garbage collector, which closes a coroutine that nobody awaits any more, it is done
        in the background: the code that the collector has interrupted may hold any lock.
        """
        if is_collecting_garbage():
            run_in_background(partial(self.end_failed_attempt, error))
            return None
        retry_count = _headers_of(error, "request").get("x-stainless-retry-count", "")
        self.hidden_retries = int(retry_count) if retry_count.isdecimal() else 0
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
            self.read_unparsed(self.http_response)
            self._report(_status_of(error), failure, error_code=error_code)
        return wait_s

    def _report_left_loop(self) -> None:
        """Report a stream whose loop was left, unless a helper of the package has left it.

        Such a helper (`chat.completions.stream`) reads the stream for the application. If it stops,
        for example because it cannot parse the output, it closes the response next, and that
        reports the call with the error of the helper. The helper is found in the stack of callers.
        """
        try:
            # This method, `report_stream_error` and the generator do not read the stream.
            self.is_left_by_reader = not is_collecting_garbage() and is_read_by_calling_code(
                self.get_stream(), skipped_frames=2
            )
        except Exception:
            # There are frames whose variables cannot be read.
            log.debug("the reader of a stream is not known", exc_info=True)
        if not self.is_left_by_reader:
            self.report_abandoned()

    def _report(
        self,
        status: Status,
        failure: Failure | None,
        response: Any = None,
        error_code: str = "",
    ) -> None:
        """Report the call, unless it was reported already.

        Args:
            status: How the call ended.
            failure: Why it is not ok, or None.
            response: The response or the stream, which gets the measurement as an attribute.
            error_code: The code in the error response of the server, or "".
        """
        if self.call.is_reported or not self._claim_report():
            return
        try:
            if self.tracker.error and status == "ok":
                status = "failed"
                failure = Failure("error_event", self.tracker.error)
            self._warn_uncounted(status)
            measurement = self.call.report(
                status,
                failure,
                self._observation(),
                done=monotonic_ns(),
                error_code=error_code,
            )
            if response is not None:
                attach_measurement(response, measurement)
            if self.raw_response is not None:
                attach_measurement(self.raw_response, measurement)
        except Exception:
            self._log_not_measured()

    def _claim_report(self) -> bool:
        """Return True for the first caller, of all threads.

        A destructor passes the end of a call to another thread, while this one may close it.
        """
        claim = object()
        # `dict.setdefault` is atomic, so that no lock is needed.
        return vars(self).setdefault("_report_claim", claim) is claim

    def _warn_uncounted(self, status: Status) -> None:
        """Warn if the cost of a call is not known because the server has sent no token counts."""
        call = self.call
        if status != "ok" or call.policy.prices is None or call.api not in TEXT_APIS:
            return
        usage = self.tracker.usage()
        if usage.input is None or usage.output is None:
            warn_uncounted(call.model)

    def _observation(self) -> CallObservation:
        """Return what was observed of the last attempt.

        There is no first token if events with unknown fields came first, which may be output.
        """
        tracker = self.tracker
        usage = tracker.usage()
        instants = tracker.instants
        first_token = instants[0] if instants and tracker.is_first_output_known else NEVER
        last_token = instants[-1] if instants else NEVER
        # All tokens of a response that is not streamed come at once.
        first_event_tokens = tracker.first_event_tokens if self.is_streamed else usage.output or 0
        choices: tuple[Choice, ...] = ()
        if tracker.content is not None:
            choices = tracker.content.choices(tracker.finish_reason)
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
        log.exception("a call could not be measured")
        self.call.discard()


def failure_from_error(error: BaseException) -> Failure:
    """Return the failure that an exception of a call means.

    Exceptions of this package come first, then those of openai, anthropic and HTTP libraries.
    """
    if not isinstance(error, Exception):
        return Failure("interrupted", type(error).__name__)
    if isinstance(error, ThrottleTimeout):
        return Failure("timeout_total", str(error))
    if isinstance(error, BudgetExceeded):
        return Failure("over_budget", str(error))
    from ..wire_formats.library_errors import classify_library_error

    failure = classify_library_error(error)
    # A timeout of the package without one of the connection is that of the whole call.
    class_names = {type(cause).__name__ for cause in (error, error.__cause__)}
    if "APITimeoutError" in class_names and "ConnectTimeout" not in class_names:
        return Failure("timeout_total", str(error), failure.http_status)
    return failure


def parse_timeout_s(timeout: Any, default: float | None) -> float | None:
    """Return the argument `timeout=` of a method of openai in seconds, or None for no limit.

    It is a number, None, or an `httpx.Timeout`, whose `read` is used. Any other object is the
    sentinel of the package for a timeout that was not passed, for which `default` is returned.
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


def _to_namespace(fields: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**fields)
