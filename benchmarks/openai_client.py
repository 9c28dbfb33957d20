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
        extra_body: Mapping[str, object] | None = None,
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
        """Run a request to its end, and store its outcome in `exchange`. It raises nothing."""
        failure = await self._send_until_done(exchange, headers)
        was_sent = exchange.sent_at >= 0
        exchange.done_at = monotonic_ns()
        exchange.failure = failure
        exchange.ready_at = exchange.sent_at
        exchange.is_connection_reused = exchange.is_connection_reused and was_sent
        exchange.bytes_sent = len(exchange.body) if was_sent else 0

    async def _send_until_done(self, exchange: Exchange, headers: dict[str, str]) -> Failure | None:
        """Send a request within its time limits and return its failure, or None."""
        left_s = (exchange.due_at + self._timeout_ns - monotonic_ns()) / 1e9
        deadline_s = asyncio.get_running_loop().time() + left_s

        limit = asyncio.timeout_at(deadline_s)
        try:
            async with limit:
                await self._send_with_retry(exchange, headers, limit, deadline_s)
        except TimeoutError:
            return self._timeout_failure(is_total=limit.when() == deadline_s)
        except asyncio.CancelledError:
            return exchange.failure or _CANCELLED
        except Exception as error:
            # An exception of the package is a failed request. It must not end the run.
            self._store_error_status(error, exchange)
            return self._describe_error(error, exchange)

        return exchange.reader.find_failure(True, False, self._streaming)

    def _timeout_failure(self, *, is_total: bool) -> Failure:
        """Return the failure of a request that exceeded its total time, or that of an event."""
        if is_total:
            text = f"not finished {self._timeout_ns / 1e9:g} s after its scheduled time"
            return Failure("timeout_total", text)
        return Failure("timeout_stall", f"no event for {self._stall_ns / 1e9:g} s")

    async def _send_with_retry(
        self,
        exchange: Exchange,
        headers: dict[str, str],
        limit: asyncio.Timeout,
        deadline_s: float,
    ) -> None:
        """Send a request, and once more if the server had closed the idle connection.

        The definition of the metrics allows this one resend: the server did not see the request.
        """
        _current.set(exchange)
        try:
            await self._attempt(exchange, headers, limit, deadline_s)
        except Exception as error:
            was_sent_on_idle_connection = exchange.is_connection_reused and exchange.sent_at >= 0
            has_response = exchange.head_received_at >= 0
            is_reset = classify_library_error(error).kind == "reset"
            if has_response or not (was_sent_on_idle_connection and is_reset):
                raise
            exchange.resend_count = 1
            await self._attempt(exchange, headers, limit, deadline_s)

    async def _attempt(
        self,
        exchange: Exchange,
        headers: dict[str, str],
        limit: asyncio.Timeout,
        deadline_s: float,
    ) -> None:
        """Call the openai package once, and feed its response to the reader of the exchange.

        The connection counts as reused until the trace of the HTTP library reports a new one.
        """
        exchange.is_connection_reused = True
        response = await self._call_package(exchange.body, headers)
        if self._streaming:
            await self._read_events(exchange, response, limit, deadline_s)
        else:
            _read_complete_response(exchange, response)

    async def _call_package(self, body: bytes | memoryview, headers: dict[str, str]) -> object:
        """Call the package with our request body, and return its response object.

        Fields that are its required parameters are passed by name, the rest as `extra_body`.
        """
        fields: dict[str, Any] = msgspec.json.decode(body)
        named_fields = {field: fields.pop(field) for field in _NAMED_FIELDS if field in fields}
        api = self._api.chat.completions if self.target.api == "chat" else self._api.completions
        return await api.create(**named_fields, extra_body=fields, extra_headers=headers or None)

    async def _read_events(
        self, exchange: Exchange, stream: Any, limit: asyncio.Timeout, deadline_s: float
    ) -> None:
        """Read a stream to its end. Each event moves the time limit for the next one."""
        loop = asyncio.get_running_loop()
        reader = exchange.reader
        stall_s = self._stall_ns / 1e9

        exchange.response.status = stream.response.status_code
        try:
            async for event in stream:
                received_ns = monotonic_ns()
                had_token = reader.first_token >= 0
                reader.feed([_json(event)], received_ns)
                is_first_token = not had_token and reader.first_token >= 0
                if is_first_token and exchange.on_first_output is not None:
                    exchange.on_first_output(received_ns)
                limit.reschedule(min(deadline_s, loop.time() + stall_s) if stall_s else deadline_s)
        finally:
            exchange.bytes_received = getattr(stream.response, "num_bytes_downloaded", 0)

    def _store_error_status(self, error: Exception, exchange: Exchange) -> None:
        """Store the HTTP status of an exception of the package, if it has one."""
        status = classify_library_error(error).http_status
        exchange.response.status = status or exchange.response.status

    def _describe_error(self, error: Exception, exchange: Exchange) -> Failure:
        """Return the failure for an exception of the package, without secrets in its text.

        Its kind is one of loadgen_sdk.errors.KINDS.
        """
        failure = classify_library_error(error)
        text = failure.text
        if failure.kind in ("reset", "truncated") and exchange.head_received_at >= 0:
            text = f"{text}, after {exchange.reader.output_events} output events"
        text = self.target.redact(text, self._api_key, *header_secrets(self._headers))
        return Failure(failure.kind, text[:ERROR_TEXT_CHARS], exchange.response.status)


def _read_complete_response(exchange: Exchange, response: object) -> None:
    """Feed a response that was not streamed to the reader; all of its tokens came at once."""
    received_ns = monotonic_ns()
    reader = exchange.reader
    exchange.response.status = 200
    reader.feed([_json(response)], received_ns)
    reader.first_event_tokens = reader.usage().output or 0


def _json(event: Any) -> bytes:
    """Encode an object of the package as JSON again, so that our own reader applies its rules."""
    return event.model_dump_json(exclude_unset=True, warnings=False).encode()  # type: ignore[no-any-return]


def _headers(name: str, header_lines: bytes) -> dict[str, str]:
    """Return the headers that `Pool.send` adds to those of the target."""
    lines = [line.partition(": ") for line in header_lines.decode("latin-1").splitlines()]
    return ({"X-Request-Id": name} if name else {}) | {field: value for field, _, value in lines}


async def _trace(exchange: Exchange, name: str, _: object) -> None:
    """Record the times of the HTTP library's steps; the library calls this at each of them."""
    if name == "connection.connect_tcp.started":
        exchange.is_connection_reused = False
    elif name == "http11.send_request_headers.started":
        exchange.sent_at = monotonic_ns()
    elif name == "http11.receive_response_headers.complete":
        exchange.head_received_at = monotonic_ns()


_current: ContextVar[Exchange] = ContextVar("_current")
