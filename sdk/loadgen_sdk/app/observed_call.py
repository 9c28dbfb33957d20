"""The state of one call through an instrumented client: its attempts, its events and, at the end, its measurement.

This code runs inside the application's own calls and loops. It must not raise or wait, and it must be cheap.
It depends on no transport and no package, only on the attributes of the objects that the openai package returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from time import monotonic_ns, time_ns
from typing import Any

from ..request import NEVER, Failure
from .measurement import Api, Attempt, Content, Measurement, Status, price_of, timings
from .policy import Policy
from .prompt_text import estimated_tokens
from .retry import retry_after_s
from .throttle import Permit
from .trace_recorder import CallShape

_NO_HEADERS: dict[str, str] = {}


class Setting:
    """The settings shared by all wrapped methods of one client."""

    __slots__ = ("ask_usage", "key", "policy", "server", "warned")

    def __init__(self, policy: Policy, server: str, key: str, ask_usage: bool) -> None:
        self.policy, self.server, self.key, self.ask_usage = policy, server, key, ask_usage
        self.warned = False


class ObservedCall:
    """One call while it runs. Its measurement is reported exactly once. Instants are monotonic ns."""

    __slots__ = (
        "api",
        "attempts",
        "call_shape",
        "context",
        "end",
        "error_message",
        "finish_reason",
        "first_answer",
        "first_event_tokens",
        "get_stream",
        "headers",
        "hidden_retries",
        "hides_usage",
        "instants",
        "kwargs",
        "last_attempt",
        "model",
        "observe",
        "permit",
        "pieces",
        "reported",
        "response_id",
        "response_model",
        "sent",
        "setting",
        "started",
        "started_unix_ns",
        "streamed",
        "usage",
    )

    def __init__(self, api: Api, setting: Setting, kwargs: dict[str, Any]) -> None:
        self.started = self.sent = monotonic_ns()
        self.started_unix_ns = time_ns()
        self.api, self.setting, self.kwargs = api, setting, kwargs
        policy = setting.policy
        self.model: str = str(kwargs.get("model") or "")
        self.streamed = bool(kwargs.get("stream"))
        self.context: Context | None = copy_context() if policy.observers else None
        self.call_shape: CallShape | None = None
        if policy.record is not None:
            self.call_shape = policy.record.begin(self.started, kwargs)
        if policy.retry is not None:
            policy.retry.begun()
        self.permit: Permit | None = None
        self.attempts: list[Attempt] = []
        self.last_attempt = self.started
        self.instants: list[int] = []
        self.first_answer = self.end = NEVER
        self.first_event_tokens = self.hidden_retries = 0
        self.finish_reason = self.response_model = self.response_id = self.error_message = ""
        self.usage: Any = None
        self.headers: Mapping[str, str] = _NO_HEADERS
        self.pieces: list[str] | None = [] if policy.keep_content else None
        self.reported = False
        self.hides_usage = False
        self.get_stream: Callable[[], Any] = _no_stream
        self.observe = self._observe_event if api == "responses" else self._observe_chunk
        if setting.ask_usage and self.streamed and api != "responses":
            options = kwargs.get("stream_options")
            if not isinstance(options, Mapping) or not options.get("include_usage"):
                kwargs["stream_options"] = {
                    **(options if isinstance(options, Mapping) else {}),
                    "include_usage": True,
                }
                self.hides_usage = True

    # -- attempts ------------------------------------------------------------------------------------------------

    def throttle_arguments(self) -> dict[str, Any]:
        """The keyword arguments for `Throttle.acquire`."""
        throttle = self.setting.policy.throttle
        tokens = estimated_tokens(self.kwargs) if throttle is not None and throttle.counts_tokens else 0
        return {"key": self.setting.key, "model": self.model, "tokens": tokens}

    def begin(self) -> None:
        self.sent = monotonic_ns()

    def head_received(self, raw: Any) -> None:
        """The head of a response has arrived."""
        self.headers = raw.headers
        self.hidden_retries = raw.retries_taken
        if self.permit is not None:
            self.permit.heed(self.headers)

    def attempt_failed(self, error: BaseException) -> float | None:
        """An attempt failed before any output reached the caller. Returns the seconds until the next attempt.

        None: there is no further attempt, and the measurement has been reported.
        """
        now = monotonic_ns()
        failure = self._failure_of(error)
        response = getattr(error, "response", None)
        headers = getattr(response, "headers", None) or _NO_HEADERS
        self.headers = headers
        request = getattr(error, "request", None)
        retry_count = getattr(request, "headers", _NO_HEADERS).get("x-stainless-retry-count", "")
        self.hidden_retries = int(retry_count) if retry_count.isdecimal() else 0
        refused = failure.http_status in (429, 503)
        if self.permit is not None:
            self.permit.heed(headers, refused=refused)
            self.permit.done(0 if refused else None)
            self.permit = None
        retry = self.setting.policy.retry
        wait_s = None
        if retry is not None and isinstance(error, Exception) and not self.reported:
            server_wait_s = retry_after_s(headers)
            wait_s = retry.wait_s(len(self.attempts) + 1, failure, asked_s=server_wait_s, delivered=False)
        waited_ns = 0 if wait_s is None else int(wait_s * 1e9)
        self.attempts.append(Attempt(started=self.sent, ended=now, failure=failure, waited_ns=waited_ns))
        if wait_s is None:
            self._report("failed" if isinstance(error, Exception) else "cancelled", failure)
        return wait_s

    # -- answers -------------------------------------------------------------------------------------------------

    def answer_received(self, result: Any) -> None:
        """A response that is not streamed has arrived."""
        try:
            at = monotonic_ns()
            self.instants.append(at)
            self.first_answer = self.end = at
            self.usage = getattr(result, "usage", None)
            self.response_model = getattr(result, "model", "") or ""
            self.response_id = getattr(result, "id", "") or ""
            if self.api == "responses":
                self._read_response(result)
            else:
                for choice in result.choices:
                    self.finish_reason = choice.finish_reason or self.finish_reason
                    if self.pieces is not None:
                        text = choice.text if self.api == "completions" else choice.message.content
                        self.pieces.append(text or "")
        except Exception:  # an answer of an unexpected shape is left to the application
            pass
        self._report("failed" if self.error_message else "ok", self._error_event(), result)

    def stream_ended(self) -> None:
        """The stream has ended."""
        self._report("failed" if self.error_message else "ok", self._error_event(), self.get_stream())

    def stream_failed(self, error: BaseException) -> None:
        """The stream raised `error`, or the loop over it was left (GeneratorExit)."""
        if isinstance(error, GeneratorExit):
            self.abandoned()
            return
        status: Status = "failed" if isinstance(error, Exception) else "cancelled"
        self._report(status, self._failure_of(error), self.get_stream())

    def abandoned(self) -> None:
        """The application stopped reading. The call is ok if a finish reason has come, else abandoned."""
        if not self.reported:
            complete = bool(self.finish_reason)
            self._report("ok" if complete else "abandoned", None if complete else _ABANDONED, self.get_stream())

    def is_extra(self, event: Any) -> bool:
        """Whether this event was sent only because we asked for a token count."""
        return event.usage is not None and not event.choices

    def _observe_chunk(self, chunk: Any, at: int) -> None:
        """One event of chat or completions. Must not raise: the application is waiting for its event."""
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

    def _observe_event(self, event: Any, at: int) -> None:
        """One event of the responses API. Must not raise."""
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
                self._read_response(event.response)
                if kind != "response.created":
                    self.end = at
            elif kind == "error":
                self.error_message = str(event.message)
        except Exception:
            pass

    def _read_response(self, response: Any) -> None:
        self.usage = response.usage or self.usage
        self.response_id, self.response_model = response.id or "", response.model or ""
        if response.status in ("completed", "incomplete", "failed", "cancelled"):
            self.finish_reason = response.status
            if response.status == "incomplete" and response.incomplete_details is not None:
                self.finish_reason = response.incomplete_details.reason or "incomplete"
            if response.status == "failed":
                self.error_message = str(getattr(response.error, "message", "") or "the response failed")
        if self.pieces is not None and not self.streamed:
            self.pieces.append(response.output_text)

    # -- the measurement -----------------------------------------------------------------------------------------

    def _error_event(self) -> Failure | None:
        return Failure("error_event", self._clean(self.error_message)) if self.error_message else None

    def _failure_of(self, error: BaseException) -> Failure:
        if not isinstance(error, Exception):
            return Failure("interrupted", type(error).__name__)
        from ..transport.openai_client import kind_of  # it maps the exceptions of the package

        kind, text, status = kind_of(error)
        names = {type(cause).__name__ for cause in (error, error.__cause__)}
        if "APITimeoutError" in names and "ConnectTimeout" not in names:
            kind, text = "timeout_total", str(error)
        return Failure(kind, self._clean(text), status)

    def _clean(self, text: str) -> str:
        from ..transport.target import redact

        return redact(text, [self.setting.key] if self.setting.key else ())[:500]

    def _token_counts(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Input, output, cached and reasoning tokens, as reported by the server; None where missing."""
        usage = self.usage
        if usage is None:
            return None, None, None, None
        if self.api == "responses":
            input_tokens, output_tokens = getattr(usage, "input_tokens", None), getattr(usage, "output_tokens", None)
            input_details_name, output_details_name = "input_tokens_details", "output_tokens_details"
        else:
            input_tokens, output_tokens = (
                getattr(usage, "prompt_tokens", None),
                getattr(usage, "completion_tokens", None),
            )
            input_details_name, output_details_name = "prompt_tokens_details", "completion_tokens_details"
        input_details, output_details = (
            getattr(usage, input_details_name, None),
            getattr(usage, output_details_name, None),
        )
        cached = None if input_details is None else _count(getattr(input_details, "cached_tokens", None))
        reasoning = None if output_details is None else _count(getattr(output_details, "reasoning_tokens", None))
        return _count(input_tokens), _count(output_tokens), cached, reasoning

    def _report(self, status: Status, failure: Failure | None, answer_object: Any = None) -> None:
        if self.reported:
            return
        self.reported = True
        now = monotonic_ns()
        instants = self.instants
        input_tokens, output_tokens, cached, reasoning = self._token_counts()
        if not self.streamed:
            self.first_event_tokens = output_tokens or 0  # the whole answer came at once
        policy, headers = self.setting.policy, self.headers
        cost = None
        if policy.prices is not None and input_tokens is not None and output_tokens is not None:
            names = (self.response_model, self.model) if self.response_model else (self.model,)
            price = price_of(policy.prices, *names)
            cost = price.cost(input_tokens, output_tokens, cached or 0) if price is not None else None
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
            input_tokens=input_tokens,
            output_tokens=output_tokens if output_tokens is not None or not self.streamed else len(instants),
            cached_tokens=cached,
            reasoning_tokens=reasoning,
            token_source="server" if output_tokens is not None else "events" if self.streamed and instants else "",
            cost=cost,
            attempts=tuple(self.attempts),
            hidden_retries=self.hidden_retries,
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
            self.permit.done(None if input_tokens is None or output_tokens is None else input_tokens + output_tokens)
        if answer_object is not None:
            try:
                # Bypass pydantic, so that dumping or comparing the object still shows only what the server sent.
                object.__setattr__(answer_object, "measurement", measurement)
            except (AttributeError, TypeError):
                pass
        policy.tell(measurement, self.context, self.call_shape)

    def _content(self) -> Content | None:
        if self.pieces is None:
            return None
        sent = next((self.kwargs[name] for name in ("messages", "prompt", "input") if name in self.kwargs), None)
        return Content(input=sent, output="".join(self.pieces))


def _no_stream() -> None:
    """Placeholder until there is a weak reference to the stream."""


_ABANDONED = Failure("interrupted", "the application stopped listening")


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
