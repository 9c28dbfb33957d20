"""Sends the same requests through the `openai` package, to compare what an application sees with our own wire.

This is a reference, not a fast client: it runs one task per request, and an event's stamp is the instant at which the
package delivers it. The package is imported only in `open`. The methods are those of `Pool`: prepare, send, cancel,
open, and `aclose`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from time import monotonic_ns
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from ..dialects.body import body as make_body
from ..dialects.quirks import Quirk
from ..dialects.reader import ERROR_TEXT_CHARS, Flow, Reading, error_text
from ..errors import TargetUnusable
from ..request import NEVER, Completion, Failure, Request
from .exchange import OnDone
from .http1 import merged
from .target import Target, header_secrets
from .wire import Tls

CONNECT_S = 30.0


class OpenAIClient:
    """One endpoint, one model and one API, through AsyncOpenAI: no retries, no proxy, no limit on connections.

    `timeout_ns` limits a request from its due instant, `stall_timeout_ns` the time between two events. `ready`, `sent`
    and `first_byte` come from the trace of the HTTP library, everything else from the objects of the package. Byte
    counts are of bodies, without heads. What a server sends after `[DONE]` is not seen.
    """

    def __init__(
        self,
        target: Target,
        *,
        model: str,
        quirk: Quirk,
        stream: bool = True,
        api_key: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        extra_body: Mapping[str, Any] | None = None,
        timeout_ns: int = 600 * 1_000_000_000,
        stall_timeout_ns: int = 120 * 1_000_000_000,
        tls: Tls | None = None,
        keep_text: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self.target, self.quirk, self._streaming = target, quirk, stream
        self._api_key, self._headers = api_key, headers
        self._timeout_ns, self._stall_ns = timeout_ns, stall_timeout_ns
        self._keep_text = keep_text
        self._tls: ssl.SSLContext | bool = (tls or Tls()).context() if target.tls else False
        self.prepare = partial(  # the same bytes that our own client sends
            make_body,
            quirk=quirk,
            api=target.api,
            model=model,
            stream=stream,
            extra_body=extra_body,
            continuous_usage=continuous_usage,
        )
        self._api: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.in_flight = 0

    async def open(self, connections: int = 0) -> None:
        """Import the package and create its client. `connections` has no effect: it connects only on demand."""
        try:
            import openai
            from openai._constants import DEFAULT_CONNECTION_LIMITS
        except ImportError:
            raise TargetUnusable("--client openai needs the openai package", "pip install openai") from None
        limits = type(DEFAULT_CONNECTION_LIMITS)(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=self.quirk.reuse_s
        )
        timeout = openai.Timeout(None, connect=CONNECT_S)
        headers = dict(merged(self.target.auth(self._api_key), self._headers))
        named = {name.lower() for name in headers}
        unwanted = [name for name in ("authorization", "openai-organization", "openai-project") if name not in named]

        async def trace_request(request: Any) -> None:
            for name in unwanted:  # the package adds these from its own settings and environment
                request.headers.pop(name, None)
            request.extensions["trace"] = _current.get().trace

        self._api = openai.AsyncOpenAI(
            base_url=self.target.base_url,
            api_key="unused",  # a real key is in the headers, which are the same as our own client's
            default_headers=headers,
            default_query=dict(parse_qsl(self.target.query[1:], keep_blank_values=True)),
            max_retries=0,
            timeout=timeout,
            http_client=openai.DefaultAsyncHttpxClient(
                limits=limits,
                timeout=timeout,
                verify=self._tls,
                trust_env=False,
                follow_redirects=False,
                event_hooks={"request": [trace_request]},
            ),
        )

    async def aclose(self) -> None:
        """End requests in flight as `interrupted`, and close every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._api is not None:
            await self._api.close()

    def send(
        self,
        request: Request | None,
        body: bytes,
        due: int,
        on_done: OnDone,
        flow: Flow,
        *,
        name: str = "",
        sink: Callable[[str, str, int], None] | None = None,
    ) -> _Exchange:
        """Send now. `on_done` is called exactly once, with the Completion. The returned object is for `cancel`."""
        exchange = _Exchange(self, request, body, due, flow, name or (request.id if request else ""), sink)
        self.in_flight += 1
        task = exchange.task = asyncio.get_running_loop().create_task(exchange.run())
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self.in_flight -= 1
            on_done(exchange.completion())

        task.add_done_callback(ended)  # also runs for a task cancelled before its first step
        return exchange

    def tick(self, now: int) -> None:
        """Do nothing: the package does its own housekeeping. The driver calls this on every client."""

    def cancel(self, exchange: _Exchange, failure: Failure) -> None:
        """End a request in the loop's next iterations. `on_done` gets the Completion with this failure."""
        exchange.interruption = failure
        if exchange.task is not None:
            exchange.task.cancel()


class _Exchange:
    """One request through the package, and what was observed of it. Instants are monotonic ns."""

    def __init__(
        self,
        client: OpenAIClient,
        request: Request | None,
        body: bytes,
        due: int,
        flow: Flow,
        name: str,
        sink: Callable[[str, str, int], None] | None,
    ) -> None:
        self._client, self._request, self._body, self._due, self._name = client, request, body, due, name
        self._reading = Reading(flow, client._keep_text, sink)
        self._sent = self._first_byte = self._done = NEVER
        self._reused = True
        self._resent = self._status = self._received = 0
        self.task: asyncio.Task[None] | None = None
        self.interruption = Failure("interrupted", "cancelled")
        self._failure: Failure | None = None

    async def run(self) -> None:
        client = self._client
        deadline = asyncio.get_running_loop().time() + (self._due + client._timeout_ns - monotonic_ns()) / 1e9
        try:
            async with asyncio.timeout_at(deadline) as limit:
                _current.set(self)
                try:
                    await self._attempt(limit, deadline)
                except Exception as error:
                    if not (self._reused and self._sent >= 0 and self._first_byte < 0 and kind_of(error)[0] == "reset"):
                        raise
                    self._resent = 1  # the server had closed the idle connection: metrics.md allows one resend
                    await self._attempt(limit, deadline)
            self._failure = self._reading.judge(True, False, client._streaming)
        except TimeoutError:
            if limit.when() == deadline:
                text = f"not finished {client._timeout_ns / 1e9:g} s after it was due"
                self._failure = Failure("timeout_total", text)
            else:
                self._failure = Failure("timeout_stall", f"no event for {client._stall_ns / 1e9:g} s")
        except asyncio.CancelledError:
            self._failure = self.interruption
        except Exception as error:  # an exception of the package is a failed request; it must not end the run
            self._failure = self._failure_of(error)
        self._done = monotonic_ns()

    async def trace(self, name: str, _: Any) -> None:
        """Called by the HTTP library at each of its steps."""
        if name == "connection.connect_tcp.started":
            self._reused = False
        elif name == "http11.send_request_headers.started":
            self._sent = monotonic_ns()
        elif name == "http11.receive_response_headers.complete":
            self._first_byte = monotonic_ns()

    async def _attempt(self, limit: asyncio.Timeout, deadline: float) -> None:
        """Call the package: fields that are required parameters by name, the rest of our body as `extra_body`."""
        client, loop = self._client, asyncio.get_running_loop()
        self._reused = True
        fields: dict[str, Any] = msgspec.json.decode(self._body)
        chat = client.target.api == "chat"
        named_fields = {name: fields.pop(name) for name in ("model", "messages", "prompt", "stream") if name in fields}
        create = client._api.chat.completions.create if chat else client._api.completions.create
        headers = {"X-Request-Id": self._name} if self._name else None
        answer = await create(**named_fields, extra_body=fields, extra_headers=headers)
        if not client._streaming:
            self._status = 200
            self._take(answer, monotonic_ns())
            self._reading.first_event_tokens = self._reading.usage().output or 0  # the whole answer came at once
            return
        self._status, stall_s = answer.response.status_code, client._stall_ns / 1e9
        try:
            async for event in answer:
                self._take(event, monotonic_ns())
                limit.reschedule(min(deadline, loop.time() + stall_s) if stall_s else deadline)
        finally:
            self._received = getattr(answer.response, "num_bytes_downloaded", 0)

    def _take(self, event: Any, at: int) -> None:
        """Process one event object that came at `at`: as JSON again, so that our own reader applies its rules."""
        self._reading.take([event.model_dump_json(exclude_unset=True, warnings=False).encode()], at)

    def _failure_of(self, error: Exception) -> Failure:
        """The Failure of an exception of the package; its kind is one of loadgen_sdk.errors.KINDS."""
        kind, text, status = kind_of(error)
        self._status = status or self._status
        if kind in ("reset", "truncated") and self._first_byte >= 0:
            text = f"{text}, after {self._reading.output_events} output events"
        client = self._client
        secrets = (client._api_key, *header_secrets(client._headers))
        return Failure(kind, client.target.redact(text, *secrets)[:ERROR_TEXT_CHARS], self._status)

    def completion(self) -> Completion:
        reading = self._reading
        pieces, reasoning_pieces = reading.pieces, reading.reasoning_pieces
        return Completion(
            request=self._request,
            due=self._due,
            ready=self._sent,
            sent=self._sent,
            first_byte=self._first_byte,
            first_event=reading.first_event,
            first_token=reading.first_token,
            first_answer=reading.first_answer,
            last_token=reading.last_token,
            end=reading.end,
            done=self._done if self._done >= 0 else monotonic_ns(),
            output_events=reading.output_events,
            first_event_tokens=reading.first_event_tokens,
            max_gap=reading.max_gap,
            reused=self._reused and self._sent >= 0,
            resent=self._resent,
            http_status=self._status,
            bytes_sent=len(self._body) if self._sent >= 0 else 0,
            bytes_received=self._received,
            finish_reason=reading.finish_reason,
            usage=reading.usage(),
            text="".join(pieces) if pieces is not None else None,
            reasoning_text="".join(reasoning_pieces) if reasoning_pieces is not None else None,
            server_timing=reading.server_timing,
            failure=self._failure if self._done >= 0 else self.interruption,  # cancelled before its first step
        )


_current: ContextVar[_Exchange] = ContextVar("_current")


def client_classes() -> tuple[type, ...]:
    """The classes of the package's clients. Raises ImportError when it is not installed."""
    import openai

    return openai.OpenAI, openai.AsyncOpenAI, openai.AzureOpenAI, openai.AsyncAzureOpenAI


def kind_of(error: Exception) -> tuple[str, str, int]:
    """(kind, text, HTTP status or 0) of an exception raised by the package or by its HTTP library."""
    import openai

    if isinstance(error, openai.APIStatusError):
        status = error.status_code
        kind = next((kind for least, kind in _KINDS_BY_STATUS if status >= least), "malformed")
        text = error_text(error.response.content) or f"HTTP {status} without a body"
        return "http_429" if status == 429 else kind, text, status
    if isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError):
        message = error.body if isinstance(error.body, str) else error.message
        return "error_event", message or "an error event without a text", 0
    causes = list(_causes(error))
    names = {type(cause).__name__ for cause in causes}
    text = str(causes[-1]) or str(error) or type(error).__name__
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return "tls", text, 0
    if "RemoteProtocolError" in names:
        messages = " ".join(map(str, causes))
        cut = "peer closed" in messages or "incomplete" in messages
        return "reset" if "without sending a response" in messages else "truncated" if cut else "malformed", text, 0
    for kind, names_of_kind in _KINDS_BY_CAUSE:
        if names & names_of_kind:
            return kind, text, 0
    return "malformed", f"{type(error).__name__}: {text}", 0


_KINDS_BY_STATUS = ((500, "http_5xx"), (400, "http_4xx"))
_KINDS_BY_CAUSE = (
    ("dns", {"gaierror"}),
    ("connect", {"ConnectError", "ConnectTimeout"}),
    ("reset", {"ReadError", "WriteError", "CloseError", "ConnectionResetError"}),
)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
