"""Send the requests of a load through the `openai` package.

It is a reference for the SDK's own HTTP client, not a fast one: it runs one task per request, and
the timestamp of an event is the time at which the package delivers it. The package is imported only
in `open`. The methods are those of `Pool`: prepare, send, cancel, open, and `aclose`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from time import monotonic_ns
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.request import Failure, Request
from loadgen_sdk.transport.exchange import Exchange
from loadgen_sdk.transport.http1 import merge_headers
from loadgen_sdk.transport.response_state import OnDone
from loadgen_sdk.transport.target import Target, header_secrets
from loadgen_sdk.transport.tls import Tls
from loadgen_sdk.wire_formats.event_fields import ERROR_TEXT_CHARS
from loadgen_sdk.wire_formats.event_timeline import EventTimeline
from loadgen_sdk.wire_formats.library_errors import classify_library_error
from loadgen_sdk.wire_formats.request_body import BodyEncoder, BodyFormat
from loadgen_sdk.wire_formats.server_profiles import ServerProfile

CONNECT_S = 30.0
_CANCELLED = Failure("interrupted", "cancelled")
_NAMED_FIELDS = ("model", "messages", "prompt", "stream")  # parameters that the package requires


class OpenAIClient:
    """A client of one endpoint, one model and one API, through AsyncOpenAI.

    It has no retries, no proxy and no limit on connections. `timeout_ns` limits a request from its
    scheduled time, `stall_timeout_ns` the time between two events. `ready`, `sent` and `first_byte`
    come from the trace of the HTTP library, everything else from the objects of the package. Byte
    counts are of bodies, without heads. Data that a server sends after `[DONE]` is not seen.
    """

    def __init__(  # noqa: PLR0913 - the parameters are those of Pool
        self,
        target: Target,
        *,
        model: str,
        server_profile: ServerProfile,
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
        self.target, self.server_profile, self._streaming = target, server_profile, stream
        self._api_key, self._headers = api_key, headers
        self._timeout_ns, self._stall_ns = timeout_ns, stall_timeout_ns
        self._keep_text = keep_text
        self._tls: ssl.SSLContext | bool = (tls or Tls()).context() if target.tls else False
        self.prepare = BodyEncoder(  # the same bytes that our own client sends
            BodyFormat(
                server_profile,
                target.api,
                model,
                stream,
                extra_body=extra_body,
                continuous_usage=continuous_usage,
            )
        ).encode
        self._api: Any = None
        self._tasks: dict[Exchange, asyncio.Task[None]] = {}

    @property
    def in_flight(self) -> int:
        """Return the number of requests in flight."""
        return len(self._tasks)

    async def open(self, connections: int = 0) -> None:  # noqa: ARG002 - as Pool.open
        """Import the package and create its client.

        `connections` has no effect: it connects only on demand.
        """
        try:
            import openai
            from openai._constants import DEFAULT_CONNECTION_LIMITS
        except ImportError:
            raise TargetUnusable(
                "not_installed", "the openai package is not installed", "pip install openai"
            ) from None
        limits = type(DEFAULT_CONNECTION_LIMITS)(
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=self.server_profile.max_idle_s,
        )
        timeout = openai.Timeout(None, connect=CONNECT_S)
        headers = dict(merge_headers(self.target.auth_headers(self._api_key), self._headers))
        configured_names = {name.lower() for name in headers}
        unwanted = [
            name
            for name in ("authorization", "openai-organization", "openai-project")
            if name not in configured_names
        ]

        async def trace_request(request: Any) -> None:
            for name in unwanted:  # the package adds these from its own settings and environment
                request.headers.pop(name, None)
            request.extensions["trace"] = partial(_trace, _current.get())

        self._api = openai.AsyncOpenAI(
            base_url=self.target.base_url,
            # A real key is in the headers, which are the same as our own client's
            api_key="unused",
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
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._api is not None:
            await self._api.close()

    def send(  # noqa: PLR0913 - the parameters are those of Pool.send
        self,
        request: Request | None,
        body: bytes,
        due: int,
        on_done: OnDone,
        timeline: EventTimeline,
        *,
        name: str = "",
        header_lines: bytes = b"",
        requested_output_tokens: int = 0,  # noqa: ARG002 - as Pool.send
        on_output: Callable[[str, str, int], None] | None = None,
        on_first_output: Callable[[int], None] | None = None,
    ) -> Exchange:
        """Send a request now and return the object that `cancel` takes.

        `on_done` is called exactly once, with the Completion. `requested_output_tokens` is for
        clients that read sockets themselves.
        """
        exchange = Exchange(
            request,
            b"",
            body,
            due,
            on_done,
            timeline,
            is_stream_requested=self._streaming,
            keep_text=self._keep_text,
            on_output=on_output,
            on_first_output=on_first_output,
        )
        run = self._run(exchange, _headers(name or (request.id if request else ""), header_lines))
        task = self._tasks[exchange] = asyncio.get_running_loop().create_task(run)

        def ended(_: object) -> None:
            del self._tasks[exchange]
            if exchange.done_at < 0:  # cancelled before its first step
                exchange.done_at, exchange.failure = monotonic_ns(), exchange.failure or _CANCELLED
            exchange.report_completion()

        task.add_done_callback(ended)
        return exchange

    def tick(self, now: int) -> None:
        """Do nothing: the package does its own housekeeping.

        The driver calls this on every client.
        """

    def cancel(self, exchange: Exchange, failure: Failure) -> None:
        """End a request in the loop's next iterations.

        `on_done` gets the Completion with this failure.
        """
        if exchange in self._tasks:
            exchange.failure = failure
            self._tasks[exchange].cancel()

    async def _run(self, exchange: Exchange, headers: dict[str, str]) -> None:
        """Run a request, with one retry if the server had closed the idle connection."""
        deadline = (
            asyncio.get_running_loop().time()
            + (exchange.due_at + self._timeout_ns - monotonic_ns()) / 1e9
        )
        failure: Failure | None
        try:
            async with asyncio.timeout_at(deadline) as limit:
                _current.set(exchange)
                try:
                    await self._attempt(exchange, headers, limit, deadline)
                except Exception as error:
                    unanswered = (
                        exchange.is_connection_reused
                        and exchange.sent_at >= 0
                        and exchange.head_received_at < 0
                    )
                    if not (unanswered and classify_library_error(error).kind == "reset"):
                        raise
                    exchange.resend_count = (
                        1  # the server had closed the idle connection: metrics.md allows one resend
                    )
                    await self._attempt(exchange, headers, limit, deadline)
            failure = exchange.reader.find_failure(True, False, self._streaming)
        except TimeoutError:
            if limit.when() == deadline:
                failure = Failure(
                    "timeout_total",
                    f"not finished {self._timeout_ns / 1e9:g} s after its scheduled time",
                )
            else:
                failure = Failure("timeout_stall", f"no event for {self._stall_ns / 1e9:g} s")
        except asyncio.CancelledError:
            failure = exchange.failure or _CANCELLED
        except (
            Exception
        ) as error:  # an exception of the package is a failed request; it must not end the run
            failure = self._failure_of(error, exchange)
        exchange.done_at, exchange.failure, exchange.ready_at = (
            monotonic_ns(),
            failure,
            exchange.sent_at,
        )
        exchange.is_connection_reused = exchange.is_connection_reused and exchange.sent_at >= 0
        exchange.bytes_sent = len(exchange.body) if exchange.sent_at >= 0 else 0

    async def _attempt(
        self, exchange: Exchange, headers: dict[str, str], limit: asyncio.Timeout, deadline: float
    ) -> None:
        """Call the package once.

        Fields that are its required parameters are passed by name, the rest of our body as
        `extra_body`.
        """
        loop, stall_s, reader = asyncio.get_running_loop(), self._stall_ns / 1e9, exchange.reader
        exchange.is_connection_reused = True
        fields: dict[str, Any] = msgspec.json.decode(exchange.body)
        named_fields = {field: fields.pop(field) for field in _NAMED_FIELDS if field in fields}
        api = self._api.chat.completions if self.target.api == "chat" else self._api.completions
        response = await api.create(
            **named_fields, extra_body=fields, extra_headers=headers or None
        )
        if not self._streaming:
            received_ns = monotonic_ns()
            exchange.response.status = 200
            reader.feed([_json(response)], received_ns)
            reader.first_event_tokens = reader.usage().output or 0  # the whole answer came at once
            return
        exchange.response.status = response.response.status_code
        try:
            async for event in response:
                received_ns, is_first = monotonic_ns(), reader.first_token < 0
                reader.feed([_json(event)], received_ns)
                if is_first and reader.first_token >= 0 and exchange.on_first_output is not None:
                    exchange.on_first_output(received_ns)
                limit.reschedule(min(deadline, loop.time() + stall_s) if stall_s else deadline)
        finally:
            exchange.bytes_received = getattr(response.response, "num_bytes_downloaded", 0)

    def _failure_of(self, error: Exception, exchange: Exchange) -> Failure:
        """Return the Failure for an exception of the package.

        Its kind is one of loadgen_sdk.errors.KINDS.
        """
        failure = classify_library_error(error)
        kind, text = failure.kind, failure.text
        exchange.response.status = failure.http_status or exchange.response.status
        if kind in ("reset", "truncated") and exchange.head_received_at >= 0:
            text = f"{text}, after {exchange.reader.output_events} output events"
        text = self.target.redact(text, self._api_key, *header_secrets(self._headers))
        return Failure(kind, text[:ERROR_TEXT_CHARS], exchange.response.status)


def _json(event: Any) -> bytes:
    """Encode an object of the package as JSON again, so that our own reader applies its rules."""
    return event.model_dump_json(exclude_unset=True, warnings=False).encode()  # type: ignore[no-any-return]


def _headers(name: str, header_lines: bytes) -> dict[str, str]:
    """Return the headers that `Pool.send` adds to those of the target."""
    lines = [line.partition(": ") for line in header_lines.decode("latin-1").splitlines()]
    return ({"X-Request-Id": name} if name else {}) | {field: value for field, _, value in lines}


async def _trace(exchange: Exchange, name: str, _: Any) -> None:
    """Record the times of the HTTP library's steps; the library calls this at each of them."""
    if name == "connection.connect_tcp.started":
        exchange.is_connection_reused = False
    elif name == "http11.send_request_headers.started":
        exchange.sent_at = monotonic_ns()
    elif name == "http11.receive_response_headers.complete":
        exchange.head_received_at = monotonic_ns()


_current: ContextVar[Exchange] = ContextVar("_current")
