"""The life of one call of an application: its attempts, its permit and its measurement.

Instrumented clients and the client of this project both use it. This code runs inside the calls
and the loops of the application, so it must not wait, and it must be cheap.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import Context, copy_context
from threading import get_ident
from time import monotonic_ns, time_ns
from typing import Any, TypedDict

import msgspec

from ..errors import warn
from ..prices import find_price
from ..request import NEVER, Failure, Usage
from ..wire_formats.usage import without_doubtful_counts
from .budget import BudgetHold
from .labels import Labels
from .measurement import (
    TEXT_APIS,
    WRITING_APIS,
    Api,
    Attempt,
    Choice,
    Content,
    Measurement,
    Status,
    TokenSource,
    numeric_parameters,
    warn_contradiction,
    without_server_text,
)
from .policy import ObserverSpan, Policy
from .processor_wait import processor_wait_ns
from .prompt_text import estimate_tokens, passed_argument
from .rate_limit_headers import (
    REQUEST_ID,
    read_useful_headers,
    retry_after_s,
    should_retry,
    timing_headers,
)
from .throttle import Permit
from .trace_recorder import CallShape

log = logging.getLogger("loadgen_sdk")

NO_HEADERS: dict[str, str] = {}

NEVER_ARRIVED_KINDS = ("dns", "connect", "tls", "client_resource", "over_budget")
"""Failures after which the server has not got the request, so that it costs nothing."""

REFUSED_STATUSES = (429, 503)
"""Statuses by which a server asks for a pause."""

_WARNING_STACK_LEVEL = 5
"""The frames from a warning in `CallSettings` up to the application that makes the call."""

_MAX_FAILURE_CHARS = 500
"""Longer texts of the server, such as a page of HTML, are cut in a measurement."""


class CallSettings(msgspec.Struct):
    """What all calls of one client have in common.

    Attributes:
        policy: Prices, limits, retries and observers.
        server: The address of the server, host:port.
        key: The key of the client.
        requests_usage: Streams of an instrumented client request their token counts.
        package: The package whose exceptions the application expects.
        timeout_s: The timeout of the client. No call waits longer for its throttle.
        url_secrets: Texts of the URL that must not be shown.
        hides_inner_calls: Calls that are made inside its calls are not measured, as those of
            LiteLLM to openai.
        has_warned_about_event_loop: A warning has said that a blocking client is used in an event
            loop.
        has_warned_about_headers: A warning has said that responses have no headers.
    """

    policy: Policy
    server: str
    key: str
    requests_usage: bool = False
    package: str = "openai"
    timeout_s: float | None = None
    url_secrets: tuple[str, ...] = ()
    hides_inner_calls: bool = False
    has_warned_about_event_loop: bool = False
    has_warned_about_headers: bool = False

    def redact(self, text: str) -> str:
        """Return a text without secrets and control characters."""
        from ..redaction import escape_controls, redact

        return escape_controls(redact(text, (*self.url_secrets, self.key)))

    def warn_missing_headers(self) -> None:
        """Warn once that the headers of a response did not reach this package.

        A newer version of openai or anthropic may process responses in a way that
        `packages._record_headers_of_responses` does not expect. No warning is needed for LiteLLM
        (`hides_inner_calls`), because it does not always have headers.
        """
        if self.has_warned_about_headers or self.hides_inner_calls:
            return

        self.has_warned_about_headers = True
        module = sys.modules.get(self.package)
        package = f"{self.package} {getattr(module, '__version__', '')}".rstrip()
        warn(
            (
                "this version of loadgen_sdk cannot read the response headers of "
                f"{package}, so measurements have no request_id and no server_timing, and "
                "throttles see only the headers of refused requests. Upgrade loadgen-sdk"
            ),
            RuntimeWarning,
            stacklevel=_WARNING_STACK_LEVEL,
        )


class ThrottleArguments(TypedDict):
    """The keyword arguments of `Throttle.acquire`."""

    key: str
    model: str
    tokens: float
    output_tokens: float
    max_wait_s: float | None


class CallObservation(msgspec.Struct, frozen=True):
    """What was observed of the last attempt of a call.

    The fields are those of `Measurement`, and `choices` are the completions.
    """

    sent: int = NEVER
    first_token: int = NEVER
    first_answer: int = NEVER
    last_token: int = NEVER
    end: int = NEVER
    first_event_tokens: int = 0
    finish_reason: str = ""
    hidden_retries: int = 0
    response_model: str = ""
    response_id: str = ""
    server_timing: dict[str, Any] | None = None
    kernel_stamps: bool = False
    usage: Usage = Usage()
    choices: tuple[Choice, ...] = ()


class Call:
    """One call while it runs. Times are in monotonic ns.

    Attributes:
        permit: The permit of the throttle, until it is returned.
        budget_hold: The estimated cost that the call has booked of the budget, until it is settled.
        attempt_started: When the current attempt began.
        is_reported: The call has ended, and its measurement was reported.
        has_headers: The headers of a response have arrived.
        spans: What each observer has returned at the start of the call, such as a span of
            OpenTelemetry. Empty if no observer wants to know of the start.
        attempts: The attempts that have ended.
        instants: The timestamps of the output events of the last attempt.
        labels: The labels of the call.
    """

    # Defaults are attributes of the class, because most calls need few of them.
    permit: Permit | None = None
    budget_hold: BudgetHold | None = None
    attempt_started = NEVER
    is_reported = False
    has_headers = False
    spans: tuple[ObserverSpan | None, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    instants: Sequence[int] = ()
    _response_headers: Mapping[str, str] = NO_HEADERS
    _shape: CallShape | None = None
    _context: Context | None = None

    def __init__(
        self,
        settings: CallSettings,
        api: Api,
        model: str,
        arguments: Mapping[str, object],
        *,
        is_streamed: bool,
        labels: Labels | None,
    ) -> None:
        """Begin a call: take the start time, and tell observers, recorder and retry policy of it.

        Args:
            settings: What all calls of the client have in common.
            api: The API.
            model: The requested model.
            arguments: The fields of the request: prompt, sampling parameters and output limit.
            is_streamed: A stream is requested.
            labels: The labels of this call alone, without those of the client.
        """
        self.started = monotonic_ns()
        self.started_unix_ns = time_ns()
        self.settings = settings
        self.policy = settings.policy
        self.api = api
        self.model = model
        self.is_streamed = is_streamed
        self._arguments = arguments
        self._thread = get_ident()
        self._processor_wait_ns = processor_wait_ns()
        self.labels = self.policy.merge_labels(labels)
        self._announce_start()

    def _announce_start(self) -> None:
        """Tell the observers, the recorder of shapes and the retry policy that the call begins."""
        policy = self.policy
        if policy.observers:
            self._context = copy_context()
            if policy.has_call_observers:
                self.spans = policy.begin_observation(self)

        if policy.record is not None and self.api in TEXT_APIS:
            self._shape = policy.record.begin(self.started, self._arguments)

        if policy.retry is not None:
            # Each call adds to the balance from which retries are paid.
            policy.retry.call_started()

    @property
    def server(self) -> str:
        """The address of the server."""
        return self.settings.server

    @property
    def parameters(self) -> dict[str, int | float]:
        """The numbers of the request that telemetry shows."""
        return numeric_parameters(self._arguments)

    @property
    def is_budgeted(self) -> bool:
        """Whether a budget limits the call. Batches of files have prices of their own."""
        return self.policy.budget is not None and self.api != "batches"

    # -- attempts ----------------------------------------------------------------------------------

    def throttle_arguments(self, max_wait_s: float | None) -> ThrottleArguments:
        """Return the keyword arguments with which `Throttle.acquire` waits for this call.

        Args:
            max_wait_s: The longest wait, or None for no limit.
        """
        throttle = self.policy.throttle
        total_tokens = 0

        output_tokens = 0
        if throttle is not None and throttle.counts_tokens:
            total_tokens, output_tokens = self._estimated_tokens()

        api_key = self.settings.key
        if not api_key:
            # A function of LiteLLM has no client with a key, so that each call may pass its own.
            api_key = str(self._arguments.get("api_key") or "")

        return ThrottleArguments(
            key=api_key,
            model=self.model,
            tokens=total_tokens,
            output_tokens=output_tokens,
            max_wait_s=max_wait_s,
        )

    def estimated_cost(self) -> float | None:
        """Return an upper estimate of what the call may cost, or None if its model has no price.

        Providers have another price for prompt tokens that they write to a cache. Whether they will
        do so is not known before the call, so that the higher cost of both cases is returned.
        """
        price = find_price(self.policy.prices, self.model)
        if price is None:
            return None

        total_tokens, output_tokens = self._estimated_tokens()
        prompt_tokens = total_tokens - output_tokens
        uncached_cost = price.cost(prompt_tokens, output_tokens)
        written_cost = price.cost(prompt_tokens, output_tokens, written=prompt_tokens)

        return max(uncached_cost, written_cost)

    def record_headers(self, headers: Mapping[str, str], *, is_refused: bool = False) -> None:
        """Keep the headers of a response that has arrived, and apply its rate limits.

        `is_refused` says that the status is 429 or 503, so that Retry-After holds for all calls.
        """
        self._response_headers = headers
        self.has_headers = headers is not NO_HEADERS
        if self.permit is not None:
            self.permit.heed(read_useful_headers(headers), refused=is_refused)

    def end_failed_attempt(
        self,
        failure: Failure,
        headers: Mapping[str, str],
        *,
        ended_at: int,
        error_code: str = "",
        can_retry: bool = True,
    ) -> float | None:
        """End an attempt that has failed. Return the seconds to wait before the next attempt.

        Return None if there is no next attempt. The caller then has to `report` the call.

        Args:
            failure: The failure.
            headers: The headers of the response, or NO_HEADERS.
            ended_at: When the attempt failed.
            error_code: The code in the error response of the server, or "".
            can_retry: False if there is no next attempt whatever the failure is, because output
                has reached the caller, or because the throttle or the budget refused the call.
        """
        is_refused = failure.http_status in REFUSED_STATUSES

        # The headers of a refused request may make the throttle pause all calls. They are therefore
        # applied while the call still has its permit.
        self.record_headers(headers, is_refused=is_refused)
        retry_wait_s = self._retry_wait_s(failure, headers, can_retry=can_retry)
        will_retry = retry_wait_s is not None
        self._return_permit_after_failure(failure, will_retry=will_retry)

        if will_retry:
            # The retry books an estimated cost of its own.
            self._settle_budget(cost=None, failure=failure)

        public_failure = self._public_failure(failure, error_code)
        self._end_attempt(ended_at, public_failure, retry_wait_s or 0.0)
        return retry_wait_s

    def _return_permit_after_failure(self, failure: Failure, *, will_retry: bool) -> None:
        """Return the permit of a failed attempt to the throttle in three cases.

        In all other cases, `report` returns it at the end of the call. The cases are:

        - The server has refused the request (429 or 503). It has used no tokens.
        - The call will be retried, and the retry waits for a permit of its own. The server may have
          used tokens, so that the throttle continues to count the estimated ones.
        - The budget has refused the call after the throttle had given it a permit.
        """
        is_refused_by_server = failure.http_status in REFUSED_STATUSES
        is_refused_by_budget = failure.kind == "over_budget"
        if is_refused_by_server:
            self._return_permit(tokens=0)
        elif will_retry or is_refused_by_budget:
            self._return_permit(tokens=None)

    def discard(self) -> None:
        """End a call without a report, because nothing was sent or it could not be measured.

        Its permit is returned, and its budget gets back what was booked.
        """
        self.is_reported = True
        self._return_permit(0)
        if self.budget_hold is not None:
            self.budget_hold.settle(0.0)

    def _retry_wait_s(
        self, failure: Failure, headers: Mapping[str, str], *, can_retry: bool
    ) -> float | None:
        """Return the seconds to wait before a retry, or None if the policy allows no retry."""
        retry = self.policy.retry
        if retry is None:
            return None

        useful_headers = read_useful_headers(headers)
        attempts_made = len(self.attempts) + 1  # the current one is added later
        return retry.wait_s(
            attempts_made,
            failure,
            server_wait_s=retry_after_s(useful_headers),
            server_says_retry=should_retry(useful_headers),
            # The policy never retries a call whose output was delivered.
            delivered=not can_retry,
        )

    def _estimated_tokens(self) -> tuple[int, int]:
        """Return the estimated tokens of the call, and the output tokens among them."""
        try:
            return estimate_tokens(self._arguments, has_output=self.api in WRITING_APIS)
        except Exception:
            # A message of an unexpected kind must not fail the call.
            log.exception("the tokens of a call could not be estimated")
            return 0, 0

    def _settle_budget(self, cost: float | None, failure: Failure | None) -> None:
        """Replace the estimated cost that was booked in the budget by the cost of the call.

        If the cost is not known, it depends on the failure. A request that the server answered with
        an error status (400 or more), or that never arrived at the server, costs nothing. After any
        other failure, the estimated cost stays booked, because the server may bill the request.

        Args:
            cost: The cost, or None if it is not known.
            failure: Why the call or its attempt failed, or None.
        """
        if self.budget_hold is None:
            return

        if cost is None and failure is not None:
            has_error_status = failure.http_status >= 400
            has_never_arrived = failure.kind in NEVER_ARRIVED_KINDS
            if has_error_status or has_never_arrived:
                cost = 0.0

        if cost is not None:
            self.budget_hold.settle(cost)

        self.budget_hold = None

    def _public_failure(self, failure: Failure, error_code: str) -> Failure:
        """Return a failure in the form in which measurements contain it.

        The error message of the server may quote the prompt. It is therefore kept only if the
        application keeps the contents of its calls.
        """
        if not self.policy.keep_content:
            return without_server_text(failure, error_code)
        text = self.settings.redact(failure.text)[:_MAX_FAILURE_CHARS]
        return Failure(failure.kind, text, failure.http_status)

    def _end_attempt(self, ended_at: int, failure: Failure | None, wait_s: float = 0.0) -> None:
        """Add the current attempt to `attempts`, unless it is there already.

        For a call that fails without a retry, this method is called twice: when its last attempt
        fails, and when the call is reported. The start time tells whether the last element of
        `attempts` is the current attempt. Nothing is added for a call that was never sent.

        Args:
            ended_at: When the attempt ended, in monotonic ns.
            failure: Why it failed, or None.
            wait_s: The seconds to wait before the next attempt.
        """
        started = self.attempt_started
        was_sent = started != NEVER

        is_added_already = bool(self.attempts) and self.attempts[-1].started == started
        if was_sent and not is_added_already:
            attempt = Attempt(
                started=started, ended=ended_at, failure=failure, waited_ms=wait_s * 1e3
            )
            self.attempts += (attempt,)

    def _return_permit(self, tokens: int | None, output_tokens: int | None = None) -> None:
        """Return the permit, if there is one, so that the throttle can let another call start.

        Args:
            tokens: The input and output tokens that the call used, which replace the estimate in
                the throttle. None keeps the estimate.
            output_tokens: The output tokens among them, or None if their number is not known.
        """
        if self.permit is not None:
            self.permit.done(tokens, output_tokens)
            self.permit = None

    # -- the end -----------------------------------------------------------------------------------

    def report(
        self,
        status: Status,
        failure: Failure | None,
        observation: CallObservation,
        *,
        done: int,
        error_code: str = "",
    ) -> Measurement:
        """End the call, and return its measurement.

        The permit is returned to the throttle, and the budget gets the cost of the call. Then the
        measurement is passed to the recorder and the observers of the application.

        Args:
            status: How the call ended.
            failure: Why it is not ok, or None.
            observation: What was observed of the last attempt.
            done: When the call ended, in monotonic ns.
            error_code: The code in the error response of the server, or "" if it has none.
        """
        self.is_reported = True
        if failure is not None:
            failure = self._public_failure(failure, error_code)

        self._end_attempt(done, failure)

        # The throttle and the budget replace their estimates by what the call has used.
        usage = self._without_contradictions(observation.usage)
        cost = self._cost(usage, observation.response_model)

        if self.permit is not None:
            self._return_permit(self._total_tokens(usage), usage.output)

        if self.budget_hold is not None:
            self._settle_budget(cost, failure)

        measurement = self._make_measurement(status, failure, observation, usage, cost, done)
        self.policy.report_measurement(measurement, self._context, self._shape, self.spans)
        return measurement

    def _without_contradictions(self, usage: Usage) -> Usage:
        """Return the server's token counts without those that contradict each other, and warn."""
        if usage.contradiction:
            warn_contradiction(self.model, usage.contradiction)
        return without_doubtful_counts(usage)

    def _total_tokens(self, usage: Usage) -> int | None:
        """Return the input and output tokens, or None if they are not known or not limited."""
        if usage.input is None or usage.output is None or self.api == "batches":
            return None
        return usage.input + usage.output

    def _cost(self, usage: Usage, response_model: str) -> float | None:
        """Return what the call costs: the token counts of the server times the prices of the model.

        Return None if the server has sent no counts, if the model has no price, and for batches of
        files, which have other prices.

        Args:
            usage: The token counts of the server.
            response_model: The model that the response names, or "". Its price is used first,
                because the requested model may be an alias. Without one, the price of the requested
                model is used.
        """
        if usage.input is None or usage.output is None or self.api == "batches":
            return None

        price = find_price(self.policy.prices, response_model or self.model, self.model)
        if price is None:
            return None

        cached_tokens = usage.cached or 0
        cache_written_tokens = usage.cache_written or 0
        return price.cost(usage.input, usage.output, cached_tokens, cache_written_tokens)

    def _make_measurement(
        self,
        status: Status,
        failure: Failure | None,
        observation: CallObservation,
        usage: Usage,
        cost: float | None,
        done: int,
    ) -> Measurement:
        """Return the measurement of the call from what is known at its end.

        Args:
            status: How the call ended.
            failure: Why it is not ok, or None.
            observation: What was observed of the last attempt.
            usage: The token counts of the server that can be believed.
            cost: The cost, or None if it is not known.
            done: When the call ended.
        """
        headers = read_useful_headers(self._response_headers)
        timing = timing_headers(headers)
        if observation.server_timing:
            timing = timing | observation.server_timing

        output_tokens = usage.output
        token_source: TokenSource = "server"
        if output_tokens is None:
            # Without a count, the events of a stream are the best estimate: most have one token.
            token_source = "events" if self.is_streamed and self.instants else ""
            if self.is_streamed:
                output_tokens = len(self.instants)

        content = self._content(observation.choices) if self.policy.keep_content else None
        return Measurement(  # by position, in the order of the fields, which is faster
            self.api,
            self.is_streamed,
            status,
            self.started,
            self.started_unix_ns,
            observation.sent,
            observation.first_token,
            observation.first_answer,
            observation.last_token,
            observation.end,
            done,
            tuple(self.instants),
            observation.first_event_tokens,
            usage.input,
            output_tokens,
            usage.cached,
            usage.cache_written,
            usage.reasoning,
            token_source,
            cost,
            self.attempts,
            observation.hidden_retries,
            observation.finish_reason,
            failure,
            self.model,
            observation.response_model,
            observation.response_id,
            headers.get(REQUEST_ID, ""),
            self.settings.server,
            timing,
            observation.kernel_stamps,
            content,
            self.labels,
            numeric_parameters(self._arguments),
            self._client_delay_ms(),
        )

    def _client_delay_ms(self) -> float | None:
        """Return how many ms the thread was ready to run during the call, but had no processor.

        The measured times may be too long by this delay. Linux counts the wait of each thread from
        the start of the thread, so that the difference of two counts is returned. Return None on a
        system that does not count it, or if another thread than that of the start ends the call.
        """
        wait_at_start_ns = self._processor_wait_ns
        is_thread_of_start = self._thread == get_ident()
        if wait_at_start_ns is None or not is_thread_of_start:
            return None

        wait_at_end_ns = processor_wait_ns()
        if wait_at_end_ns is None:
            return None

        return (wait_at_end_ns - wait_at_start_ns) / 1e6

    def _content(self, choices: tuple[Choice, ...]) -> Content:
        """Return the prompt and the completions, for a client that keeps them."""
        prompt = None
        for name in ("messages", "prompt", "input"):
            prompt = passed_argument(self._arguments, name)
            if prompt is not None:
                break
        return Content(input=prompt, output=choices[0].text if choices else "", choices=choices)


def context_of_spans(spans: Sequence[ObserverSpan | None]) -> AbstractContextManager[object]:
    """Return a context manager that makes the spans of a call the current spans of OpenTelemetry.

    An attempt is sent inside it, so that spans of the HTTP library become children of the call. The
    caller has to enter it at once, because several spans are entered here already.

    Args:
        spans: What each observer has returned at the start of the call: a span, or None from an
            observer without spans.
    """
    spans_of_call = [span for span in spans if span is not None]
    if len(spans_of_call) == 1:
        # The usual case, without the cost of an ExitStack.
        return spans_of_call[0].current()

    stack = ExitStack()
    for span in spans_of_call:
        stack.enter_context(span.current())

    return stack
