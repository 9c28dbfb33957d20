"""The state of one call through an instrumented client: its attempts, its events and, at the end, its measurement.

This code runs inside the application's own calls and loops. It must not raise or wait, and it must be cheap.
It depends on no transport and no package, only on the attributes of the objects that the openai package returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import Context, copy_context
from functools import partial
from time import monotonic_ns, time_ns
from typing import Any

from ..errors import ThrottleTimeout
from ..request import NEVER, Failure
from .finishing import collecting, later
from .measurement import (
    Api,
    Attempt,
    Choice,
    Content,
    Measurement,
    Status,
    parameters_of,
    price_of,
    timings,
    warn_uncounted,
    without_server_text,
)
from .policy import CallStart, Policy
from .prompt_text import estimated_tokens
from .rate_limit_headers import retry_after_s
from .throttle import Permit
from .trace_recorder import CallShape

_NO_HEADERS: dict[str, str] = {}


class Setting:
    """The settings shared by all wrapped methods of one client."""

    __slots__ = ("ask_usage", "follows_calls", "key", "policy", "server", "timeout_s", "warned")

    def __init__(self, policy: Policy, server: str, key: str, ask_usage: bool, timeout_s: float | None = None) -> None:
        self.policy, self.server, self.key, self.ask_usage = policy, server, key, ask_usage
        self.timeout_s = timeout_s  # of the client: no call waits longer for its throttle
        self.follows_calls = policy.follows_calls
        self.warned = False


class ObservedCall:
    """One call while it runs. Its measurement is reported exactly once. Instants are monotonic ns."""

    __slots__ = (
        "api",
        "attempts",
        "call_shape",
        "contents",
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
        "labels",
        "last_attempt",
        "model",
        "observe",
        "parameters",
        "permit",
        "raw",
        "reported",
        "response_id",
        "response_model",
        "sent",
        "setting",
        "spans",
        "started",
        "started_unix_ns",
        "streamed",
        "usage",
    )

    def __init__(self, api: Api, setting: Setting, kwargs: dict[str, Any]) -> None:
        self.started = monotonic_ns()
        self.sent = NEVER
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
        self.labels = policy.labels_of(kwargs.pop("labels", None))
        self.parameters = parameters_of(kwargs)
        self.spans: tuple[Any, ...] = ()
        if setting.follows_calls:
            self.spans = policy.begin(
                CallStart(
                    api, self.model, self.streamed, setting.server, self.started_unix_ns, self.parameters, self.labels
                )
            )
        self.permit: Permit | None = None
        self.attempts: list[Attempt] = []
        self.last_attempt = self.started
        self.instants: list[int] = []
        self.first_answer = self.end = NEVER
        self.first_event_tokens = self.hidden_retries = 0
        self.finish_reason = self.response_model = self.response_id = self.error_message = ""
        self.usage: Any = None
        self.headers: Mapping[str, str] = _NO_HEADERS
        self.contents = Contents() if policy.keep_content else None
        self.raw: Any = None  # the raw response, if the application holds it
        self.reported = False
        self.hides_usage = False
        self.get_stream: Callable[[], Any] = _no_stream
        self.observe = self._observe_event if api == "responses" else self._observe_chunk
        if setting.ask_usage and self.streamed and api in ("chat", "completions"):
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
        tokens = output_tokens = 0
        if throttle is not None and throttle.counts_tokens:
            tokens, output_tokens = estimated_tokens(self.kwargs, writes=self.api != "embeddings")
        timeout = self.kwargs.get("timeout", _NOT_GIVEN)
        return {
            "key": self.setting.key,
            "model": self.model,
            "tokens": tokens,
            "output_tokens": output_tokens,
            "max_wait_s": seconds_of(timeout, self.setting.timeout_s),
        }

    def begin(self) -> None:
        self.sent = monotonic_ns()

    def current_span(self) -> AbstractContextManager[object]:
        """Makes the spans of this call current while its request is sent: spans of the HTTP library go below them."""
        if not self.spans:
            return _NO_SPAN
        spans = [span for span in self.spans if span is not None]
        return spans[0].current() if len(spans) == 1 else _all_current(spans) if spans else _NO_SPAN

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
        if collecting():  # a coroutine that nobody awaits any more: closed by the collector
            later(partial(self.attempt_failed, error))
            return None
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
        public = self._public(failure, error)
        if self.sent != NEVER and (not self.attempts or self.attempts[-1].started != self.sent):
            self.attempts.append(Attempt(started=self.sent, ended=now, failure=public, waited_ns=waited_ns))
        if wait_s is None:
            self._report("failed" if isinstance(error, Exception) else "cancelled", public)
        return wait_s

    # -- answers -------------------------------------------------------------------------------------------------

    def answer_received(self, result: Any) -> None:
        """A response that is not streamed has arrived."""
        try:
            at = monotonic_ns()
            self.end = at
            if self.api != "embeddings":  # they have no first token
                self.instants.append(at)
                self.first_answer = at
            self.usage = getattr(result, "usage", None)
            self.response_model = getattr(result, "model", "") or ""
            self.response_id = getattr(result, "id", "") or ""
            if self.api == "responses":
                self._read_response(result)
            elif self.api != "embeddings":
                for choice in result.choices:
                    self.finish_reason = choice.finish_reason or self.finish_reason
                if self.contents is not None:
                    self.contents.add(result.choices)
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
        self._report(status, self._public(self._failure_of(error), error), self.get_stream())

    def abandoned(self) -> None:
        """The application stopped reading. The call is ok if a finish reason has come, else abandoned."""
        if collecting():  # the code below may hold any lock
            later(self.abandoned)
            return
        if not self.reported:
            complete = bool(self.finish_reason)
            self._report("ok" if complete else "abandoned", None if complete else _ABANDONED, self.get_stream())

    def unobserved(self, result: Any) -> None:
        """A stream that cannot be looked into: the call is measured up to its head, and says that it is no more."""
        self._report("unobserved", None, result)

    def raw_stream_closed(self, consumed: bool) -> None:
        """A streaming response that the application read by itself is closed."""
        if not self.reported:
            self.end = monotonic_ns()
            self._report("ok" if consumed else "abandoned", None if consumed else _ABANDONED)

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
                elif text is None or self.api == "chat":
                    if delta.tool_calls or delta.function_call or delta.refusal:
                        output = answer = True
                    elif getattr(delta, "reasoning_content", None) or getattr(delta, "reasoning", None):
                        output = True
                if choice.finish_reason:
                    self.finish_reason = choice.finish_reason
                    self.end = at
            if self.contents is not None:
                self.contents.add(chunk.choices)
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
                if self.contents is not None and kind == "response.output_text.delta":
                    self.contents.text_of(0).append(event.delta)
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
        if self.contents is not None:
            self.contents.add_response(response, self.finish_reason, with_text=not self.streamed)

    # -- the measurement -----------------------------------------------------------------------------------------

    def _error_event(self) -> Failure | None:
        return self._public(Failure("error_event", self.error_message)) if self.error_message else None

    def _failure_of(self, error: BaseException) -> Failure:
        if not isinstance(error, Exception):
            return Failure("interrupted", type(error).__name__)
        from ..transport.openai_client import kind_of  # it maps the exceptions of the package

        if isinstance(error, ThrottleTimeout):
            return Failure("timeout_total", str(error))
        kind, text, status = kind_of(error)
        names = {type(cause).__name__ for cause in (error, error.__cause__)}
        if "APITimeoutError" in names and "ConnectTimeout" not in names:
            kind, text = "timeout_total", str(error)
        return Failure(kind, self._clean(text), status)

    def _public(self, failure: Failure, error: BaseException | None = None) -> Failure:
        """`failure` as measurements carry it. The server's text may quote the prompt: kept only if asked for."""
        if self.setting.policy.keep_content:
            return Failure(failure.kind, self._clean(failure.text), failure.http_status)
        codes = (getattr(error, name, None) for name in ("code", "type"))
        return without_server_text(failure, next((code for code in codes if isinstance(code, str)), ""))

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
        if self.api == "embeddings":
            output_tokens = 0
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
        if policy.prices is None:
            pass
        elif input_tokens is None or output_tokens is None:
            if status == "ok":
                warn_uncounted(self.model)
        else:
            names = (self.response_model, self.model) if self.response_model else (self.model,)
            price = price_of(policy.prices, *names)
            cost = price.cost(input_tokens, output_tokens, cached or 0) if price is not None else None
        if self.sent != NEVER and (not self.attempts or self.attempts[-1].started != self.sent):
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
            output_tokens=output_tokens
            if output_tokens is not None or not self.streamed or status == "unobserved"
            else len(instants),
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
            labels=self.labels,
            parameters=self.parameters,
        )
        if self.permit is not None:
            counted = input_tokens is not None and output_tokens is not None
            self.permit.done((input_tokens or 0) + (output_tokens or 0) if counted else None, output_tokens)
        for owner in (answer_object, self.raw):
            if owner is not None:
                try:
                    # Bypass pydantic, so that dumping or comparing the object still shows only what the server sent.
                    object.__setattr__(owner, "measurement", measurement)
                except (AttributeError, TypeError):
                    pass
        policy.tell(measurement, self.context, self.call_shape, self.spans)

    def _content(self) -> Content | None:
        if self.contents is None:
            return None
        sent = next((self.kwargs[name] for name in ("messages", "prompt", "input") if name in self.kwargs), None)
        choices = self.contents.choices()
        return Content(input=sent, output=choices[0].text if choices else "", choices=choices)


class Contents:
    """The texts and tool calls of one call's answers, kept only on request."""

    __slots__ = ("_finish", "_texts", "_tools")

    def __init__(self) -> None:
        self._texts: dict[int, list[str]] = {}
        self._finish: dict[int, str] = {}
        self._tools: dict[int, dict[int, dict[str, str]]] = {}

    def text_of(self, index: int) -> list[str]:
        return self._texts.setdefault(index, [])

    def add(self, choices: Iterable[Any]) -> None:
        """The choices of a chunk or of a whole answer, of chat or completions."""
        for position, choice in enumerate(choices):
            index = getattr(choice, "index", position) or 0
            pieces = self.text_of(index)
            part = getattr(choice, "delta", None) or getattr(choice, "message", None)
            text = part.content if part is not None else getattr(choice, "text", None)
            if text:
                pieces.append(text)
            if choice.finish_reason:
                self._finish[index] = choice.finish_reason
            for number, tool in enumerate((getattr(part, "tool_calls", None) or ()) if part is not None else ()):
                function = getattr(tool, "function", None)
                at = getattr(tool, "index", None)
                self._add_tool(index, number if at is None else at, tool.id, function)

    def add_response(self, response: Any, finish_reason: str, *, with_text: bool) -> None:
        """An answer of the responses API."""
        if with_text:
            self.text_of(0).append(response.output_text)
        self._finish[0] = finish_reason
        self._tools[0] = {}
        for number, item in enumerate(response.output or ()):
            if getattr(item, "type", "") == "function_call":
                self._add_tool(0, number, item.call_id, item)

    def _add_tool(self, index: int, number: int, tool_id: Any, function: Any) -> None:
        call = self._tools.setdefault(index, {}).setdefault(number, {"id": "", "name": "", "arguments": ""})
        call["id"] = call["id"] or str(tool_id or "")
        call["name"] = call["name"] or str(getattr(function, "name", "") or "")
        call["arguments"] += str(getattr(function, "arguments", "") or "")

    def choices(self) -> tuple[Choice, ...]:
        return tuple(
            Choice(
                text="".join(self._texts.get(index, ())),
                finish_reason=self._finish.get(index, ""),
                tool_calls=tuple(self._tools.get(index, {}).values()),
            )
            for index in sorted({*self._texts, *self._finish, *self._tools})
        )


_NOT_GIVEN = object()
_NO_SPAN: AbstractContextManager[object] = nullcontext()


@contextmanager
def _all_current(spans: list[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for span in spans:
            stack.enter_context(span.current())
        yield


def seconds_of(timeout: Any, default: float | None) -> float | None:
    """A `timeout=` of the openai package in seconds: a number, an object with parts, None for none, or not given."""
    if isinstance(timeout, int | float) and not isinstance(timeout, bool):
        return max(0.0, float(timeout))
    if timeout is None:
        return None
    read = getattr(timeout, "read", _NOT_GIVEN)
    return default if read is _NOT_GIVEN else seconds_of(read, default)


def _no_stream() -> None:
    """Placeholder until there is a weak reference to the stream."""


_ABANDONED = Failure("interrupted", "the application stopped listening")


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
