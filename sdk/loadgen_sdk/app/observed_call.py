"""What is seen of one call through an instrumented client: its attempts, its events, and at the end its measurement.

Called from inside the application's own calls and loops, so nothing here may raise, wait, or cost more than it must.
No transport and no package is known here but the shapes of the objects that the openai package hands out.
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
from .trace_recorder import Sighting

_NO_HEADERS: dict[str, str] = {}


class Setting:
    """What all wrapped methods of one client share."""

    __slots__ = ("ask_usage", "key", "manner", "server", "warned")

    def __init__(self, manner: Policy, server: str, key: str, ask_usage: bool) -> None:
        self.manner, self.server, self.key, self.ask_usage = manner, server, key, ask_usage
        self.warned = False


class Sight:
    """What is seen of one call, until its measurement is told, once."""

    __slots__ = (
        "api",
        "attempts",
        "carrier",
        "context",
        "end",
        "finish_reason",
        "first_answer",
        "first_event_tokens",
        "headers",
        "hide",
        "instants",
        "kwargs",
        "last_attempt",
        "model",
        "over",
        "permit",
        "pieces",
        "response_id",
        "response_model",
        "retries",
        "said_error",
        "see",
        "sent",
        "setting",
        "sighting",
        "started",
        "started_unix_ns",
        "streamed",
        "usage",
    )

    def __init__(self, api: Api, setting: Setting, kwargs: dict[str, Any]) -> None:
        self.started = self.sent = monotonic_ns()
        self.started_unix_ns = time_ns()
        self.api, self.setting, self.kwargs = api, setting, kwargs
        manner = setting.manner
        self.model: str = str(kwargs.get("model") or "")
        self.streamed = bool(kwargs.get("stream"))
        self.context: Context | None = copy_context() if manner.observers else None
        self.sighting: Sighting | None = None
        if manner.record is not None:
            self.sighting = manner.record.begin(self.started, kwargs)
        if manner.retry is not None:
            manner.retry.begun()
        self.permit: Permit | None = None
        self.attempts: list[Attempt] = []
        self.last_attempt = self.started
        self.instants: list[int] = []
        self.first_answer = self.end = NEVER
        self.first_event_tokens = self.retries = 0
        self.finish_reason = self.response_model = self.response_id = self.said_error = ""
        self.usage: Any = None
        self.headers: Mapping[str, str] = _NO_HEADERS
        self.pieces: list[str] | None = [] if manner.keep_content else None
        self.over = False
        self.hide = False
        self.carrier: Callable[[], Any] = _nothing
        self.see = self._see_event if api == "responses" else self._see_chunk
        if setting.ask_usage and self.streamed and api != "responses":
            options = kwargs.get("stream_options")
            if not isinstance(options, Mapping) or not options.get("include_usage"):
                kwargs["stream_options"] = {
                    **(options if isinstance(options, Mapping) else {}),
                    "include_usage": True,
                }
                self.hide = True

    # -- attempts ------------------------------------------------------------------------------------------------

    def booking(self) -> dict[str, Any]:
        """What a throttle wants to know."""
        throttle = self.setting.manner.throttle
        tokens = estimated_tokens(self.kwargs) if throttle is not None and throttle.counts_tokens else 0
        return {"key": self.setting.key, "model": self.model, "tokens": tokens}

    def begin(self) -> None:
        self.sent = monotonic_ns()

    def answered(self, raw: Any) -> None:
        """The head of an answer is here."""
        self.headers = raw.headers
        self.retries = raw.retries_taken
        if self.permit is not None:
            self.permit.heed(self.headers)

    def failed(self, error: BaseException) -> float | None:
        """An attempt has failed before anything of its answer was handed on: seconds until the next, None: that's it.

        The measurement is told when this was the last.
        """
        now = monotonic_ns()
        failure = self._failure(error)
        response = getattr(error, "response", None)
        headers = getattr(response, "headers", None) or _NO_HEADERS
        self.headers = headers
        request = getattr(error, "request", None)
        made = getattr(request, "headers", _NO_HEADERS).get("x-stainless-retry-count", "")
        self.retries = int(made) if made.isdecimal() else 0
        refused = failure.http_status in (429, 503)
        if self.permit is not None:
            self.permit.heed(headers, refused=refused)
            self.permit.done(0 if refused else None)
            self.permit = None
        retry = self.setting.manner.retry
        wait_s = None
        if retry is not None and isinstance(error, Exception) and not self.over:
            asked = retry_after_s(headers)
            wait_s = retry.wait_s(len(self.attempts) + 1, failure, asked_s=asked, delivered=False)
        waited = 0 if wait_s is None else int(wait_s * 1e9)
        self.attempts.append(Attempt(started=self.sent, ended=now, failure=failure, waited_ns=waited))
        if wait_s is None:
            self._tell("failed" if isinstance(error, Exception) else "cancelled", failure)
        return wait_s

    # -- answers -------------------------------------------------------------------------------------------------

    def whole(self, result: Any) -> None:
        """The answer came in one piece."""
        try:
            at = monotonic_ns()
            self.instants.append(at)
            self.first_answer = self.end = at
            self.usage = getattr(result, "usage", None)
            self.response_model = getattr(result, "model", "") or ""
            self.response_id = getattr(result, "id", "") or ""
            if self.api == "responses":
                self._response(result)
            else:
                for choice in result.choices:
                    self.finish_reason = choice.finish_reason or self.finish_reason
                    if self.pieces is not None:
                        said = choice.text if self.api == "completions" else choice.message.content
                        self.pieces.append(said or "")
        except Exception:  # an answer of an odd shape is the application's to judge
            pass
        self._tell("failed" if self.said_error else "ok", self._said(), result)

    def ended(self) -> None:
        """The stream is over."""
        self._tell("failed" if self.said_error else "ok", self._said(), self.carrier())

    def broken(self, error: BaseException) -> None:
        """The stream raised, or the loop over it was left."""
        if isinstance(error, GeneratorExit):
            self.given_up()
            return
        status: Status = "failed" if isinstance(error, Exception) else "cancelled"
        self._tell(status, self._failure(error), self.carrier())

    def given_up(self) -> None:
        """The application listens no more. With a finish reason seen the answer was whole."""
        if not self.over:
            whole = bool(self.finish_reason)
            self._tell("ok" if whole else "abandoned", None if whole else _GIVEN_UP, self.carrier())

    def is_extra(self, event: Any) -> bool:
        """Whether this event is there only because we asked for a count."""
        return event.usage is not None and not event.choices

    def _see_chunk(self, chunk: Any, at: int) -> None:
        """One event of chat or completions. Nothing in here may raise: the application is waiting for its event."""
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

    def _see_event(self, event: Any, at: int) -> None:
        """One event of the responses API."""
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
                self._response(event.response)
                if kind != "response.created":
                    self.end = at
            elif kind == "error":
                self.said_error = str(event.message)
        except Exception:
            pass

    def _response(self, response: Any) -> None:
        self.usage = response.usage or self.usage
        self.response_id, self.response_model = response.id or "", response.model or ""
        if response.status in ("completed", "incomplete", "failed", "cancelled"):
            self.finish_reason = response.status
            if response.status == "incomplete" and response.incomplete_details is not None:
                self.finish_reason = response.incomplete_details.reason or "incomplete"
            if response.status == "failed":
                self.said_error = str(getattr(response.error, "message", "") or "the response failed")
        if self.pieces is not None and not self.streamed:
            self.pieces.append(response.output_text)

    # -- the measurement -----------------------------------------------------------------------------------------

    def _said(self) -> Failure | None:
        return Failure("error_event", self._clean(self.said_error)) if self.said_error else None

    def _failure(self, error: BaseException) -> Failure:
        if not isinstance(error, Exception):
            return Failure("interrupted", type(error).__name__)
        from ..transport.openai_client import kind_of  # it knows what the package raises

        kind, text, status = kind_of(error)
        names = {type(cause).__name__ for cause in (error, error.__cause__)}
        if "APITimeoutError" in names and "ConnectTimeout" not in names:
            kind, text = "timeout_total", str(error)
        return Failure(kind, self._clean(text), status)

    def _clean(self, text: str) -> str:
        from ..transport.target import redact

        return redact(text, [self.setting.key] if self.setting.key else ())[:500]

    def _counts(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Input, output, cached and reasoning tokens as the server says."""
        usage = self.usage
        if usage is None:
            return None, None, None, None
        if self.api == "responses":
            read, written = getattr(usage, "input_tokens", None), getattr(usage, "output_tokens", None)
            of_read, of_written = "input_tokens_details", "output_tokens_details"
        else:
            read, written = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
            of_read, of_written = "prompt_tokens_details", "completion_tokens_details"
        more, further = getattr(usage, of_read, None), getattr(usage, of_written, None)
        cached = None if more is None else _whole(getattr(more, "cached_tokens", None))
        reasoning = None if further is None else _whole(getattr(further, "reasoning_tokens", None))
        return _whole(read), _whole(written), cached, reasoning

    def _tell(self, status: Status, failure: Failure | None, carrier: Any = None) -> None:
        if self.over:
            return
        self.over = True
        now = monotonic_ns()
        instants = self.instants
        read, written, cached, reasoning = self._counts()
        if not self.streamed:
            self.first_event_tokens = written or 0  # all of it came at once
        manner, headers = self.setting.manner, self.headers
        cost = None
        if manner.prices is not None and read is not None and written is not None:
            names = (self.response_model, self.model) if self.response_model else (self.model,)
            price = price_of(manner.prices, *names)
            cost = price.cost(read, written, cached or 0) if price is not None else None
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
            input_tokens=read,
            output_tokens=written if written is not None or not self.streamed else len(instants),
            cached_tokens=cached,
            reasoning_tokens=reasoning,
            token_source="server" if written is not None else "events" if self.streamed and instants else "",
            cost=cost,
            attempts=tuple(self.attempts),
            hidden_retries=self.retries,
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
            self.permit.done(None if read is None or written is None else read + written)
        if carrier is not None:
            try:
                # Past pydantic, so that what the application dumps or compares is what the server sent.
                object.__setattr__(carrier, "measurement", measurement)
            except (AttributeError, TypeError):
                pass
        manner.tell(measurement, self.context, self.sighting)

    def _content(self) -> Content | None:
        if self.pieces is None:
            return None
        sent = next((self.kwargs[name] for name in ("messages", "prompt", "input") if name in self.kwargs), None)
        return Content(input=sent, output="".join(self.pieces))


def _nothing() -> None:
    """Where a weak reference to the stream will be."""


_GIVEN_UP = Failure("interrupted", "the application stopped listening")


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
