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
from typing import Any, Protocol

from ..errors import BudgetExceeded, ThrottleTimeout
from ..request import NEVER, Failure, Usage
from .background import is_collecting_garbage, run_in_background
from .call import (
    NO_HEADERS,
    Call,
    CallObservation,
    CallSettings,
    ThrottleArguments,
    context_of_spans,
)
from .event_types import build_response_event_types
from .measurement import TEXT_APIS, Api, Choice, Status, attach_measurement, warn_uncounted
from .observed_stream import (
    is_called_by_streaming_helper,
    observe_stream,
    observe_unread_response,
)
from .output_tracker import OutputTracker

log = logging.getLogger("loadgen_sdk")

RAW_HEADER = "X-Stainless-Raw-Response"
"""The header by which `with_raw_response` requests the raw response."""

NOT_GIVEN = object()
"""Stands for an argument that the application did not pass."""

_ABANDONED = Failure("interrupted", "the application stopped listening")

current_call: ContextVar[ObservedCall | None] = ContextVar("loadgen_sdk_sending", default=None)
"""The call whose request is being sent in this context, or None."""


class UnparsedHttpResponse(Protocol):
    """The part of a response of an HTTP library, such as httpx, that this module uses."""

    @property
    def status_code(self) -> int:
        """The HTTP status."""

    @property
    def content(self) -> bytes:
        """The whole body."""


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
        was_left_by_streaming_helper: A streaming helper, which is an object of the package that
            reads the stream for the application (the result of `chat.completions.stream`), has
            stopped before the end of the stream.
        get_stream: Returns the stream, or None if nobody uses it any more (a weak reference).
    """

    # Defaults are attributes of the class, because most calls need few of them.
    hidden_retries = 0
    raw_response: Any = None
    http_response: UnparsedHttpResponse | None = None
    is_raw_requested = False
    is_read_by_application = False
    hides_usage = False
    was_left_by_streaming_helper = False
    get_stream: Callable[[], Any] = staticmethod(lambda: None)
    _outer_call: ObservedCall | None = None
    _current_span: AbstractContextManager[object] | None = None

    def __init__(
        self, api: Api, settings: CallSettings, kwargs: dict[str, Any], labels: Any = None
    ) -> None:
        """Start to observe a call that the application makes.

        Args:
            api: The API.
            settings: What all calls of the client have in common.
            kwargs: The fields of the request, such as `model` and `stream`. The field
                `stream_options` is changed in place if `settings.requests_usage` is set and the
                server has to be asked for the token counts of a stream.
            labels: The labels of this call alone, without those of the client.
        """
        is_streamed = bool(kwargs.get("stream"))
        model_name = str(kwargs.get("model") or "")
        self.is_streamed = is_streamed
        self.call = Call(settings, api, model_name, kwargs, is_streamed=is_streamed, labels=labels)
        self.tracker = OutputTracker(
            api, is_streamed=is_streamed, keep_content=settings.policy.keep_content
        )

        # The tracker appends a timestamp to this list for each output event. The call reads them
        # from the same list at its end.
        self.call.instants = self.tracker.instants
        extra_headers = kwargs.get("extra_headers")
        if extra_headers:
            self._read_raw_response_header(extra_headers)

        has_usage_option = api in ("chat", "completions")
        if is_streamed and has_usage_option and settings.requests_usage:
            self._request_usage(kwargs)

    def __enter__(self) -> None:
        """Begin an attempt to send the request. `__exit__` ends it.

        During the attempt, two things refer to this call:

        - The context variable `current_call`. By it, hooks in the client's package find the call
          to which they pass the headers of a response.
        - The current span of OpenTelemetry. Spans of the HTTP library become its children.
        """
        call = self.call
        self._outer_call = current_call.get()
        current_call.set(self)

        if call.spans:
            # `__exit__` leaves this context manager, so that no `with` statement can surround it.
            self._current_span = context_of_spans(call.spans)
            self._current_span.__enter__()

        if self.is_streamed and call.api == "responses":
            # The openai package builds its types at their first use, which takes half a second.
            # That would count as time to the first token.
            build_response_event_types()

        # The start time is taken last, so that it does not include the preparations above.
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

    def throttle_arguments(self, timeout: object) -> ThrottleArguments:
        """Return the keyword arguments for `Throttle.acquire`, by the timeout of the call."""
        max_wait_s = self.call.settings.timeout_s
        if timeout is not NOT_GIVEN:
            max_wait_s = parse_timeout_s(timeout, max_wait_s)
        return self.call.throttle_arguments(max_wait_s)

    def end_failed_attempt(self, error: BaseException) -> float | None:
        """End an attempt that failed before any output reached the caller.

        Return the seconds to wait before the next attempt. Return None if there is no next attempt:
        the call has then ended, and its failure is reported. A call with wrong arguments, for which
        the client has raised a TypeError without sending a request, is not reported.
        """
        was_response_received = self.call.has_headers
        has_wrong_arguments = isinstance(error, TypeError) and not was_response_received
        if has_wrong_arguments:
            self.call.discard()
            return None

        if is_collecting_garbage():
            # The garbage collector closes a coroutine that nobody awaits any more. The code that it
            # has interrupted may hold any lock, so that another thread ends the attempt. There is
            # no retry, because nobody waits for its result.
            run_in_background(partial(self.end_failed_attempt, error))
            return None

        try:
            return self._retry_or_report(error)
        except Exception:
            # The application gets its own error, and not one of this package.
            self._log_not_measured()
            return None

    def read_token_counts_from_body(self, http_response: UnparsedHttpResponse | None) -> None:
        """Read the token counts from the JSON body of a response that the client could not parse.

        The package of the client has raised an error, for example because the output does not match
        the requested schema. The server bills the tokens nevertheless. Streams, error responses and
        bodies that are not complete JSON have no counts to read.

        Args:
            http_response: The response of the HTTP library, or None if no response has arrived.
        """
        if self.is_streamed or http_response is None:
            return
        response = _parse_json_body(http_response)
        if hasattr(response, "usage"):
            self.tracker.read_response(response, monotonic_ns())

    def observe_response(self, response: Any, parsed_response: Any, *, is_blocking: bool) -> Any:
        """Observe the response that a method has returned. Return what the application gets.

        The measurement is reported when the response is complete: now, or when its stream ends.
        How the application has called the method decides what is observed:

        - A plain call returns a parsed response or a stream, which is observed.
        - `with_raw_response` returns a raw response. The parsed response inside it is observed.
        - `with_streaming_response` returns a raw response whose body the application reads later.
          Its methods are replaced by methods that observe what is read.

        Args:
            response: What the method has returned.
            parsed_response: For `with_raw_response`, the parsed response or stream inside
                `response`. For all other calls, `response` itself.
            is_blocking: The client is a blocking one, and not an async one.
        """
        self.http_response = None  # The package has parsed it, so that its body may be freed.
        is_plain_call = not self.is_raw_requested and not self.is_read_by_application
        try:
            if not self.call.has_headers:
                self.call.settings.warn_missing_headers()

            if is_plain_call:
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
        self.read_token_counts_from_body(getattr(raw_response, "http_response", None))
        self._report("failed", failure_from_error(error), error_code=_error_code(error))
        return raw_response

    def observe_parsed_response(self, response: object) -> Any:
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

    def _read_raw_response_header(self, extra_headers: Mapping[str, object]) -> None:
        """Set `is_raw_requested` or `is_read_by_application` if the application used a raw method.

        The openai and anthropic packages pass this choice as a header of the request: "true" or
        "raw" for `with_raw_response`, and "stream" for `with_streaming_response`. A plain call,
        which returns a parsed response, does not have the header.

        Args:
            extra_headers: The headers that the call adds to the request.
        """
        raw_response_kind = extra_headers.get(RAW_HEADER)
        if not raw_response_kind:
            return
        if raw_response_kind in ("true", "raw"):
            self.is_raw_requested = True
        else:
            self.is_read_by_application = True

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

        Return the seconds to wait before the retry, or None if there is no retry. A call that was
        never sent, because the throttle or the budget of this process refused it, is not retried.
        """
        failure = failure_from_error(error)
        error_code = _error_code(error)
        was_sent = not isinstance(error, ThrottleTimeout | BudgetExceeded)
        self.hidden_retries = _hidden_retries(error)

        retry_wait_s = self.call.end_failed_attempt(
            failure,
            _headers_of(error, "response"),
            ended_at=monotonic_ns(),
            error_code=error_code,
            can_retry=was_sent,
        )
        if retry_wait_s is None:
            # The server may bill a response that the client could not parse.
            self.read_token_counts_from_body(self.http_response)
            self._report(_status_of(error), failure, error_code=error_code)

        return retry_wait_s

    def _report_left_loop(self) -> None:
        """Report a stream as abandoned, because a `for` loop over it was left before its end.

        Nothing is reported yet if a streaming helper has left the loop. That is an object of the
        client's package, such as the result of `chat.completions.stream`, which reads the stream
        for the application. It leaves the loop when it cannot parse the output, and then closes the
        response. `_report_and_close_response` reports the call at that point, with the error.
        """
        if is_collecting_garbage():
            # The garbage collector has ended the loop, from whatever code was running. The callers
            # of this function therefore say nothing about who read the stream.
            self.was_left_by_streaming_helper = False
        else:
            stream = self.get_stream()
            self.was_left_by_streaming_helper = is_called_by_streaming_helper(stream)
        if not self.was_left_by_streaming_helper:
            self.report_abandoned()

    def _report(
        self,
        status: Status,
        failure: Failure | None,
        response: object = None,
        error_code: str = "",
    ) -> None:
        """Create the measurement of the call and pass it to all who need it, but only once.

        Every later call of this method does nothing. The measurement also becomes an attribute of
        the objects that the application gets: the response, or stream, and the raw response.

        Args:
            status: How the call ended. "ok" becomes "failed" if the server has sent an error event
                inside the stream.
            failure: Why it is not ok, or None.
            response: The response or the stream, or None if the application gets none.
            error_code: The code in the error response of the server, or "" if it has none.
        """
        if self.call.is_reported or not self._claim_report():
            return

        error_event_text = self.tracker.error
        if error_event_text and status == "ok":
            status = "failed"
            failure = Failure("error_event", error_event_text)

        try:
            observation = self._make_observation()
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

    def _claim_report(self) -> bool:
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

    def _make_observation(self) -> CallObservation:
        """Return what the tracker has observed of the last attempt: timestamps, tokens and output.

        Timestamps are in monotonic ns, and NEVER if the event did not happen. The time of the first
        token is NEVER as well if the first events of the stream had text in fields that are not
        part of the API: whether that text was output is not known.
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
            # A response that is not streamed counts as a single event with all tokens.
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
    """Return the Failure (kind, text and HTTP status) that describes the exception of a call.

    Args:
        error: An exception of this package, of openai or anthropic, or of an HTTP library. One that
            is not a subclass of Exception, such as CancelledError, has interrupted the call.
    """
    if not isinstance(error, Exception):
        return Failure("interrupted", type(error).__name__)
    if isinstance(error, ThrottleTimeout):
        # The wait for the throttle is part of the total time that the call may take.
        return Failure("timeout_total", str(error))
    if isinstance(error, BudgetExceeded):
        return Failure("over_budget", str(error))

    # Imported here, because most applications never need it: none of their calls fail.
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


def parse_timeout_s(timeout: object, default: float | None) -> float | None:
    """Return the argument `timeout=` of a method of openai in seconds, or None for no limit.

    Args:
        timeout: A number of seconds, None for no limit, or an object of the class `httpx.Timeout`.
            Of its several timeouts, the one for reading a response (`read`) is used. Any other
            object means that the timeout was not passed.
        default: The result for a timeout that was not passed.
    """
    if isinstance(timeout, int | float) and not isinstance(timeout, bool):
        return max(0.0, float(timeout))
    if timeout is None:
        return None
    if not hasattr(timeout, "read"):
        return default
    return parse_timeout_s(timeout.read, default)


def _status_of(error: BaseException) -> Status:
    return "failed" if isinstance(error, Exception) else "cancelled"


def _headers_of(error: BaseException, name: str) -> Mapping[str, str]:
    """Return the headers of the "request" or the "response" of an error.

    The HTTP library raises RuntimeError if one of its own errors has none.
    """
    try:
        message = getattr(error, name, None)
        headers: Mapping[str, str] | None = getattr(message, "headers", None)
    except RuntimeError:
        return NO_HEADERS
    return headers or NO_HEADERS


def _error_code(error: BaseException) -> str:
    """Return the code in an error of the server, or else its type, or an empty string."""
    for name in ("code", "type"):
        code = getattr(error, name, None)
        if isinstance(code, str):
            return code
    return ""


def _parse_json_body(http_response: UnparsedHttpResponse) -> Any:
    """Return the JSON body of a response of an HTTP library as objects with attributes.

    Return None for an error response, and for a body that was cut off or is not JSON.
    """
    try:
        if http_response.status_code >= 400:
            return None
        return json.loads(http_response.content, object_hook=_to_namespace)
    except Exception:
        return None


def _to_namespace(fields: Mapping[str, object]) -> SimpleNamespace:
    return SimpleNamespace(**fields)
