"""The life of one call of an application: its attempts, its permit and, at its end, its measurement, told once.

Instrumented clients and the project's own client live by it. This code runs inside the application's own calls and
loops. It must not wait, and it must be cheap.
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
from ..prices import price_of
from ..request import NEVER, Failure, Usage
from ..wire_formats.usage import without_doubtful_counts
from .budget import BudgetHold
from .labels import Labels
from .measurement import (
    TEXT,
    WRITING,
    Api,
    Attempt,
    Choice,
    Content,
    Measurement,
    Status,
    parameters_of,
    warn_contradiction,
    without_server_text,
)
from .policy import Policy
from .processor_wait import processor_wait_ns
from .prompt_text import estimated_tokens, given
from .rate_limit_headers import REQUEST_ID, read_once, retry_after_s, should_retry, timings
from .throttle import Permit
from .trace_recorder import CallShape

log = logging.getLogger("loadgen_sdk")

NO_HEADERS: dict[str, str] = {}
NEVER_ARRIVED = ("dns", "connect", "tls", "client_resource", "over_budget")
REFUSED = (429, 503)  # statuses by which a server asks for a pause


class Setting(msgspec.Struct):
    """What all calls of one client have in common."""

    policy: Policy
    server: str
    key: str
    ask_usage: bool = False  # of an instrumented client: streams are asked for their token counts
    package: str = "openai"  # whose exceptions the application expects
    timeout_s: float | None = None  # of the client: no call waits longer for its throttle
    url_secrets: tuple[str, ...] = ()
    covers_inner: bool = (
        False  # calls made within its calls (LiteLLM calls openai) are no calls of their own
    )
    warned: bool = False  # of a blocking client in an event loop
    warned_blind: bool = False

    def redact(self, text: str) -> str:
        from ..redaction import redact, shown

        return shown(redact(text, (*self.url_secrets, self.key)))

    def warn_blind(self) -> None:
        """An answer came without a head: say so once. Only LiteLLM's answers may have none."""
        if not self.warned_blind and not self.covers_inner:
            self.warned_blind = True
            module = sys.modules.get(self.package)
            named = f"{self.package} {getattr(module, '__version__', '')}".rstrip()
            warn(
                f"{named} hides the headers of its answers from this loadgen_sdk: measurements have no "
                "request_id and no server_timing, throttles see the headers of refusals alone; take a newer one",
                RuntimeWarning,
                stacklevel=5,
            )


class Observed(msgspec.Struct, frozen=True):
    """What was seen of the last attempt of a call. The fields are those of `Measurement`; choices: the answers.

    Give its fields by name; only `ObservedCall` gives them by place, as it is quicker.
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
    """One call while it runs. Instants are monotonic ns.

    arguments: of the request, for its prompt, its numbers and its output limit.
    """

    permit: Permit | None = None
    hold: BudgetHold | None = None  # of the budget
    attempt_started = NEVER
    reported = False
    _head: Any = NO_HEADERS  # of the last response, as the HTTP library has it
    has_head = False
    _shape: CallShape | None = None
    _context: Context | None = None
    spans: tuple[Any, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    instants: Sequence[int] = ()  # of the output events of the last attempt

    def __init__(
        self,
        setting: Setting,
        api: Api,
        model: str,
        arguments: Mapping[str, Any],
        streamed: bool,
        labels: Labels | None,
    ) -> None:
        self.started, self.started_unix_ns = monotonic_ns(), time_ns()
        self._thread = get_ident()
        self._processor_wait_ns = processor_wait_ns()
        self.setting, self.api, self.model, self.streamed = setting, api, model, streamed
        self._arguments = arguments
        self.policy = policy = setting.policy
        self.labels = policy.labels_of(labels)
        if policy.observers:
            self._context = copy_context()
            if policy.follows_calls:
                self.spans = policy.begin(self)
        if policy.record is not None and api in TEXT:
            self._shape = policy.record.begin(self.started, arguments)
        if policy.retry is not None:
            policy.retry.begun()

    @property
    def server(self) -> str:
        return self.setting.server

    @property
    def parameters(self) -> dict[str, int | float]:
        """The numbers of the request that telemetry shows."""
        return parameters_of(self._arguments)

    # -- attempts ------------------------------------------------------------------------------------------------

    def throttle_arguments(self, max_wait_s: float | None) -> dict[str, Any]:
        """The keyword arguments for `Throttle.acquire`."""
        throttle = self.policy.throttle
        tokens = (
            self._estimated_tokens() if throttle is not None and throttle.counts_tokens else (0, 0)
        )
        return {
            "key": self.setting.key or str(self._arguments.get("api_key") or ""),
            "model": self.model,
            "tokens": tokens[0],
            "output_tokens": tokens[1],
            "max_wait_s": max_wait_s,
        }

    def _estimated_tokens(self) -> tuple[int, int]:
        try:
            return estimated_tokens(self._arguments, writes=self.api in WRITING)
        except Exception:  # a message of a kind that nobody has thought of must not fail the call
            log.exception("the tokens of a call are not estimated")
            return 0, 0

    @property
    def is_budgeted(self) -> bool:
        """Whether a budget holds for it. Not for batches of files: they have prices of their own."""
        return self.policy.budget is not None and self.api != "batches"

    def estimated_cost(self) -> float | None:
        """What it may cost: nothing comes from a cache, and all goes into one. None without a price for its model."""
        if (price := price_of(self.policy.prices, self.model)) is None:
            return None
        tokens, output = self._estimated_tokens()
        prompt = tokens - output
        return max(price.cost(prompt, output), price.cost(prompt, output, written=prompt))

    def _settle(self, cost: float | None, failure: Failure | None) -> None:
        """What was booked becomes what it cost. Not known: 0 if it was refused or never arrived, else the estimate."""
        if self.hold is not None:
            unpaid = failure is not None and (
                failure.http_status >= 400 or failure.kind in NEVER_ARRIVED
            )
            if cost is not None or unpaid:
                self.hold.settle(cost or 0.0)
            self.hold = None

    def head_received(self, headers: Any, *, refused: bool = False) -> None:
        """The head of a response has arrived. Its headers are read when they are needed."""
        self._head, self.has_head = headers, headers is not NO_HEADERS
        if self.permit is not None:
            self.permit.heed(read_once(headers), refused=refused)

    def attempt_failed(
        self, failure: Failure, headers: Any, *, at: int, code: str = "", final: bool = False
    ) -> float | None:
        """The attempt has failed. Returns the seconds until the next; None: there is none, and the call is to be
        reported. code: of the error. final: there is no other attempt whatever
        the failure, as output has reached the caller or the throttle gave no permit.
        """
        refused = failure.http_status in REFUSED
        self.head_received(headers, refused=refused)
        retry, wait_s = self.policy.retry, None
        if retry is not None:
            read = read_once(headers)
            wait_s = retry.wait_s(
                len(self.attempts) + 1,
                failure,
                asked_s=retry_after_s(read),
                server_says=should_retry(read),
                delivered=final,
            )
        if wait_s is not None or refused or failure.kind == "over_budget":
            self._give_back(0 if refused else None)
        if wait_s is not None:
            self._settle(None, failure)
        self._attempt_ended(at, self._public(failure, code), wait_s or 0.0)
        return wait_s

    def _public(self, failure: Failure, code: str) -> Failure:
        """`failure` as measurements carry it. The server's text may quote the prompt: kept only if asked for."""
        if self.policy.keep_content:
            return Failure(
                failure.kind, self.setting.redact(failure.text)[:500], failure.http_status
            )
        return without_server_text(failure, code)

    def _attempt_ended(self, at: int, failure: Failure | None, wait_s: float = 0.0) -> None:
        started = self.attempt_started
        if started != NEVER and (not self.attempts or self.attempts[-1].started != started):
            self.attempts += (
                Attempt(started=started, ended=at, failure=failure, waited_ms=wait_s * 1e3),
            )

    def _give_back(self, tokens: int | None, output_tokens: int | None = None) -> None:
        if self.permit is not None:
            self.permit.done(tokens, output_tokens)
            self.permit = None

    def withdraw(self) -> None:
        """Nothing was sent, as the arguments were wrong: there was no call, and nobody is told of one."""
        self.reported = True
        self._give_back(0)
        if self.hold is not None:
            self.hold.settle(0.0)

    # -- the end -------------------------------------------------------------------------------------------------

    def report(
        self,
        status: Status,
        failure: Failure | None,
        observed: Observed,
        *,
        done: int,
        code: str = "",
    ) -> Measurement:
        """The call is over. `observed`: in its last attempt; code: of its error."""
        self.reported = True
        if failure is not None:
            failure = self._public(failure, code)
        policy, headers, instants, streamed = (
            self.policy,
            read_once(self._head),
            self.instants,
            self.streamed,
        )
        if observed.usage.contradiction:
            warn_contradiction(self.model, observed.usage.contradiction)
        usage = without_doubtful_counts(observed.usage)
        input_tokens, output_tokens, cached = usage.input, usage.output, usage.cached
        self._attempt_ended(done, failure)
        cost, total, counted = None, None, output_tokens is not None
        if (
            input_tokens is not None and output_tokens is not None and self.api != "batches"
        ):  # other prices, limits
            total = input_tokens + output_tokens
            if (
                price := price_of(policy.prices, observed.response_model or self.model, self.model)
            ) is not None:
                cost = price.cost(
                    input_tokens, output_tokens, cached or 0, usage.cache_written or 0
                )
        if self.permit is not None:
            self._give_back(total, output_tokens)
        if self.hold is not None:
            self._settle(cost, failure)
        if not counted and streamed:
            output_tokens = len(instants)
        timing = timings(headers)
        measurement = Measurement(  # by place, in the order of its fields
            self.api,
            streamed,
            status,
            self.started,
            self.started_unix_ns,
            observed.sent,
            observed.first_token,
            observed.first_answer,
            observed.last_token,
            observed.end,
            done,
            tuple(instants),
            observed.first_event_tokens,
            input_tokens,
            output_tokens,
            cached,
            usage.cache_written,
            usage.reasoning,
            "server" if counted else "events" if streamed and instants else "",  # token_source
            cost,
            self.attempts,
            observed.hidden_retries,
            observed.finish_reason,
            failure,
            self.model,
            observed.response_model,
            observed.response_id,
            headers.get(REQUEST_ID, ""),
            self.setting.server,
            timing | observed.server_timing if observed.server_timing else timing,
            observed.kernel_stamps,
            self._content(observed.choices) if policy.keep_content else None,
            self.labels,
            parameters_of(self._arguments),
            self._client_delay_ms(),
        )
        policy.tell(measurement, self._context, self._shape, self.spans)
        return measurement

    def _client_delay_ms(self) -> float | None:
        """Return how long the thread of the call has waited for a processor since its start.

        It is None if the system does not say it, or if another thread ends the call.
        """
        waited_before_ns = self._processor_wait_ns
        if waited_before_ns is None or self._thread != get_ident():
            return None
        waited_ns = processor_wait_ns()
        return None if waited_ns is None else (waited_ns - waited_before_ns) / 1e6

    def _content(self, choices: tuple[Choice, ...]) -> Content:
        names = ("messages", "prompt", "input")
        sent = next(
            (value for name in names if (value := given(self._arguments, name)) is not None), None
        )
        return Content(input=sent, output=choices[0].text if choices else "", choices=choices)


def all_current(spans: Sequence[Any]) -> AbstractContextManager[object]:
    """Makes the spans of a call current while its request is sent: spans of the HTTP library go below them."""
    found = [span for span in spans if span is not None]
    if len(found) == 1:
        only: AbstractContextManager[object] = found[0].current()
        return only
    stack = ExitStack()
    for span in found:
        stack.enter_context(span.current())
    return stack
