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
from typing import Any

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
    parameters_of,
    warn_contradiction,
    without_server_text,
)
from .policy import Policy
from .processor_wait import processor_wait_ns
from .prompt_text import argument_of, estimated_tokens
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

_MAX_FAILURE_CHARS = 500


class CallSettings(msgspec.Struct):
    """What all calls of one client have in common.

    Attributes:
        policy: Prices, limits, retries and observers.
        server: The address of the server, host:port.
        key: The key of the client.
        ask_usage: Streams of an instrumented client are asked for their token counts.
        package: The package whose exceptions the application expects.
        timeout_s: The timeout of the client. No call waits longer for its throttle.
        url_secrets: Texts of the URL that must not be shown.
        covers_inner: Calls inside its calls (LiteLLM calls openai) are not calls of their own.
        warned: It was warned that a blocking client is used in an event loop.
        warned_blind: It was warned that responses have no headers.
    """

    policy: Policy
    server: str
    key: str
    ask_usage: bool = False
    package: str = "openai"
    timeout_s: float | None = None
    url_secrets: tuple[str, ...] = ()
    covers_inner: bool = False
    warned: bool = False
    warned_blind: bool = False

    def redact(self, text: str) -> str:
        """Return a text without secrets and control characters."""
        from ..redaction import escape_controls, redact

        return escape_controls(redact(text, (*self.url_secrets, self.key)))

    def warn_blind(self) -> None:
        """Warn once that the package hides the headers of its responses.

        Only the responses of LiteLLM may have none.
        """
        if self.warned_blind or self.covers_inner:
            return
        self.warned_blind = True
        module = sys.modules.get(self.package)
        package = f"{self.package} {getattr(module, '__version__', '')}".rstrip()
        warn(
            f"{package} hides the headers of its responses from this version of loadgen_sdk: "
            "measurements have no request_id and no server_timing, and throttles see only the "
            "headers of refused requests; upgrade loadgen-sdk",
            RuntimeWarning,
            stacklevel=5,
        )


class CallObservation(msgspec.Struct, frozen=True):
    """What was observed of the last attempt of a call.

    The fields are those of `Measurement`, and `choices` are the completions. `ObservedCall` alone
    passes them by position, which is faster.
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
    """One call while it runs.

    Attributes:
        permit: The permit of the throttle.
        hold: What the call has booked of the budget.
        attempt_started: When the current attempt began.
        reported: The call has ended, and its measurement was reported.
        has_head: The head of a response has arrived.
        spans: What the observers follow the call with.
        attempts: The attempts that have ended.
        instants: The timestamps of the output events of the last attempt.
        labels: The labels of the call.
    """

    # Defaults are attributes of the class, because most calls need few of them.
    permit: Permit | None = None
    hold: BudgetHold | None = None
    attempt_started = NEVER
    reported = False
    has_head = False
    spans: tuple[Any, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    instants: Sequence[int] = ()
    _head: Any = NO_HEADERS
    _shape: CallShape | None = None
    _context: Context | None = None

    def __init__(
        self,
        settings: CallSettings,
        api: Api,
        model: str,
        arguments: Mapping[str, Any],
        streamed: bool,
        labels: Labels | None,
    ) -> None:
        """Begin a call.

        Args:
            settings: What all calls of the client have in common.
            api: The API.
            model: The requested model.
            arguments: The arguments of the request: its prompt, its numbers and its output limit.
            streamed: A stream is requested.
            labels: The labels that the call itself was given.
        """
        self.started = monotonic_ns()
        self.started_unix_ns = time_ns()
        self.settings = settings
        self.api = api
        self.model = model
        self.streamed = streamed
        self._arguments = arguments
        self._thread = get_ident()
        self._processor_wait_ns = processor_wait_ns()
        policy = settings.policy
        self.policy = policy
        self.labels = policy.labels_of(labels)
        if policy.observers:
            self._context = copy_context()
            if policy.follows_calls:
                self.spans = policy.begin(self)
        if policy.record is not None and api in TEXT_APIS:
            self._shape = policy.record.begin(self.started, arguments)
        if policy.retry is not None:
            policy.retry.call_started()

    @property
    def server(self) -> str:
        """The address of the server."""
        return self.settings.server

    @property
    def parameters(self) -> dict[str, int | float]:
        """The numbers of the request that telemetry shows."""
        return parameters_of(self._arguments)

    @property
    def is_budgeted(self) -> bool:
        """Whether a budget limits the call. Batches of files have prices of their own."""
        return self.policy.budget is not None and self.api != "batches"

    # -- attempts ----------------------------------------------------------------------------------

    def throttle_arguments(self, max_wait_s: float | None) -> dict[str, Any]:
        """Return the keyword arguments for `Throttle.acquire`."""
        throttle = self.policy.throttle
        tokens, output_tokens = 0, 0
        if throttle is not None and throttle.counts_tokens:
            tokens, output_tokens = self._estimated_tokens()
        return {
            "key": self.settings.key or str(self._arguments.get("api_key") or ""),
            "model": self.model,
            "tokens": tokens,
            "output_tokens": output_tokens,
            "max_wait_s": max_wait_s,
        }

    def estimated_cost(self) -> float | None:
        """Return what the call may cost, or None if its model has no price.

        The estimate is the higher one of two: nothing is cached, or all of the prompt is written
        to a cache.
        """
        price = find_price(self.policy.prices, self.model)
        if price is None:
            return None
        tokens, output_tokens = self._estimated_tokens()
        prompt_tokens = tokens - output_tokens
        uncached_cost = price.cost(prompt_tokens, output_tokens)
        written_cost = price.cost(prompt_tokens, output_tokens, written=prompt_tokens)
        return max(uncached_cost, written_cost)

    def head_received(self, headers: Any, *, refused: bool = False) -> None:
        """Note that the head of a response has arrived. Headers are read when needed."""
        self._head = headers
        self.has_head = headers is not NO_HEADERS
        if self.permit is not None:
            self.permit.heed(read_useful_headers(headers), refused=refused)

    def attempt_failed(
        self, failure: Failure, headers: Any, *, at: int, code: str = "", final: bool = False
    ) -> float | None:
        """Note that an attempt has failed. Return the seconds until the next attempt.

        Return None if there is no other attempt and the call is to be reported.

        Args:
            failure: The failure.
            headers: The headers of the response.
            at: When the attempt failed.
            code: The code of the error.
            final: There is no other attempt whatever the failure is, because output has reached the
                caller or the throttle gave no permit.
        """
        refused = failure.http_status in REFUSED_STATUSES
        self.head_received(headers, refused=refused)
        wait_s = self._retry_wait_s(failure, headers, final)
        if wait_s is not None or refused or failure.kind == "over_budget":
            self._return_permit(0 if refused else None)
        if wait_s is not None:
            self._settle_budget(None, failure)
        self._end_attempt(at, self._public_failure(failure, code), wait_s or 0.0)
        return wait_s

    def withdraw(self) -> None:
        """End a call of which nothing was sent, because its arguments were wrong.

        It is not reported.
        """
        self.reported = True
        self._return_permit(0)
        if self.hold is not None:
            self.hold.settle(0.0)

    def _retry_wait_s(self, failure: Failure, headers: Any, final: bool) -> float | None:
        retry = self.policy.retry
        if retry is None:
            return None
        useful_headers = read_useful_headers(headers)
        return retry.wait_s(
            len(self.attempts) + 1,
            failure,
            server_wait_s=retry_after_s(useful_headers),
            server_says_retry=should_retry(useful_headers),
            delivered=final,
        )

    def _estimated_tokens(self) -> tuple[int, int]:
        """Return the estimated tokens of the call, and the output tokens among them."""
        try:
            return estimated_tokens(self._arguments, writes=self.api in WRITING_APIS)
        except Exception:
            # A message of an unexpected kind must not fail the call.
            log.exception("the tokens of a call are not estimated")
            return 0, 0

    def _settle_budget(self, cost: float | None, failure: Failure | None) -> None:
        """Replace what was booked by the cost.

        If the cost is not known, it is 0 for a call that was refused or never arrived. Otherwise
        the estimate stays.
        """
        if self.hold is None:
            return
        is_free = failure is not None and (
            failure.http_status >= 400 or failure.kind in NEVER_ARRIVED_KINDS
        )
        if cost is not None or is_free:
            self.hold.settle(cost or 0.0)
        self.hold = None

    def _public_failure(self, failure: Failure, code: str) -> Failure:
        """Return a failure as measurements have it.

        The text of the server may quote the prompt, so that it is kept only if contents are kept.
        """
        if not self.policy.keep_content:
            return without_server_text(failure, code)
        text = self.settings.redact(failure.text)[:_MAX_FAILURE_CHARS]
        return Failure(failure.kind, text, failure.http_status)

    def _end_attempt(self, at: int, failure: Failure | None, wait_s: float = 0.0) -> None:
        """Add the current attempt to those that have ended, once."""
        started = self.attempt_started
        if started != NEVER and (not self.attempts or self.attempts[-1].started != started):
            attempt = Attempt(started=started, ended=at, failure=failure, waited_ms=wait_s * 1e3)
            self.attempts += (attempt,)

    def _return_permit(self, tokens: int | None, output_tokens: int | None = None) -> None:
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
        code: str = "",
    ) -> Measurement:
        """End the call.

        Its permit is returned, its budget settled, and its measurement passed to the observers.

        Args:
            status: How the call ended.
            failure: Why it is not ok, or None.
            observation: What was observed of the last attempt.
            done: When the call ended.
            code: The code of its error.
        """
        self.reported = True
        if failure is not None:
            failure = self._public_failure(failure, code)
        if observation.usage.contradiction:
            warn_contradiction(self.model, observation.usage.contradiction)
        usage = without_doubtful_counts(observation.usage)
        self._end_attempt(done, failure)
        cost = self._cost(usage, observation.response_model)
        if self.permit is not None:
            self._return_permit(self._total_tokens(usage), usage.output)
        if self.hold is not None:
            self._settle_budget(cost, failure)
        measurement = self._make_measurement(status, failure, observation, usage, cost, done)
        self.policy.tell(measurement, self._context, self._shape, self.spans)
        return measurement

    def _total_tokens(self, usage: Usage) -> int | None:
        """Return the input and output tokens, or None if they are not known or not limited."""
        if usage.input is None or usage.output is None or self.api == "batches":
            return None
        return usage.input + usage.output

    def _cost(self, usage: Usage, response_model: str) -> float | None:
        """Return the cost of the call, or None without a price or without counts.

        Batches have other prices.
        """
        if usage.input is None or usage.output is None or self.api == "batches":
            return None
        price = find_price(self.policy.prices, response_model or self.model, self.model)
        if price is None:
            return None
        return price.cost(usage.input, usage.output, usage.cached or 0, usage.cache_written or 0)

    def _make_measurement(
        self,
        status: Status,
        failure: Failure | None,
        observation: CallObservation,
        usage: Usage,
        cost: float | None,
        done: int,
    ) -> Measurement:
        headers = read_useful_headers(self._head)
        timing = timing_headers(headers)
        if observation.server_timing:
            timing = timing | observation.server_timing
        output_tokens = usage.output
        token_source: TokenSource = "server"
        if output_tokens is None:
            token_source = "events" if self.streamed and self.instants else ""
            if self.streamed:
                output_tokens = len(self.instants)
        return Measurement(  # by position, in the order of the fields, which is faster
            self.api,
            self.streamed,
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
            self._content(observation.choices) if self.policy.keep_content else None,
            self.labels,
            parameters_of(self._arguments),
            self._client_delay_ms(),
        )

    def _client_delay_ms(self) -> float | None:
        """Return how long the thread of the call has waited for a processor since its start.

        It is None if the system does not state it, or if another thread ends the call.
        """
        waited_before_ns = self._processor_wait_ns
        if waited_before_ns is None or self._thread != get_ident():
            return None
        waited_ns = processor_wait_ns()
        return None if waited_ns is None else (waited_ns - waited_before_ns) / 1e6

    def _content(self, choices: tuple[Choice, ...]) -> Content:
        prompt = None
        for name in ("messages", "prompt", "input"):
            prompt = argument_of(self._arguments, name)
            if prompt is not None:
                break
        return Content(input=prompt, output=choices[0].text if choices else "", choices=choices)


def make_current(spans: Sequence[Any]) -> AbstractContextManager[object]:
    """Return a context in which the spans of a call are current.

    The request is sent inside it, so that spans of the HTTP library become their children.
    """
    present = [span for span in spans if span is not None]
    if len(present) == 1:
        context: AbstractContextManager[object] = present[0].current()
        return context
    stack = ExitStack()
    for span in present:
        stack.enter_context(span.current())
    return stack
