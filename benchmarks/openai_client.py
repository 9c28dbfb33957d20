"""Send requests through the `openai` package, as a reference for the SDK's own HTTP client.

A test sends the same requests through both and compares what they measured. This client is not a
fast one: it runs one task per request, and the timestamp of an event is the time at which the
package delivers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import msgspec
from loadgen_sdk.errors import TargetUnusable
from loadgen_sdk.request import Failure, Request
from loadgen_sdk.transport.exchange import Exchange
from loadgen_sdk.transport.http1 import merge_headers
from loadgen_sdk.transport.pool import STALL_TIMEOUT_NS, TIMEOUT_NS
from loadgen_sdk.transport.response_state import OnDone
from loadgen_sdk.transport.target import Target, header_secrets
from loadgen_sdk.wire_formats.event_fields import ERROR_TEXT_CHARS
from loadgen_sdk.wire_formats.event_timeline import EventTimeline
from loadgen_sdk.wire_formats.library_errors import classify_library_error
from loadgen_sdk.wire_formats.request_body import BodyEncoder, BodyFormat
from loadgen_sdk.wire_formats.server_profiles import ServerProfile

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CONNECT_TIMEOUT_S = 30.0
CANCELLED = Failure("interrupted", "cancelled")

# Fields of a request body that are parameters of the package's functions. It requires some of them,
# and it decides by `stream` which type of response it returns.
NAMED_PARAMETERS = ("model", "messages", "prompt", "stream")

# Headers that the package adds from its own settings and from environment variables
PACKAGE_HEADERS = ("authorization", "openai-organization", "openai-project")

# The exchange of the running task. The hooks of the HTTP library do not know whose request it is.
_current_exchange: ContextVar[Exchange] = ContextVar("_current_exchange")


class OpenAIClient:
    """A client of one endpoint, one model and one API, with the methods of `Pool`.

    It has no retries, no proxy and no limit on connections. The times at which a request was sent
    and at which the head of its response came are from the trace of the HTTP library, all others
    from the objects of the package. Byte counts are of bodies, without heads. Data that a server
    sends after `[DONE]` is not seen.
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
        timeout_ns: int = TIMEOUT_NS,
        stall_timeout_ns: int = STALL_TIMEOUT_NS,
        keep_text: bool = False,
    ) -> None:
        """Prepare the encoding of requests; `open` creates the client of the package.

        Args:
            target: The endpoint.
            model: The model that each request names.
            server_profile: What the kind of server accepts, and how long it keeps idle connections.
            stream: Whether responses are streamed.
            api_key: The API key, if the endpoint needs one.
            headers: The user's headers, which replace those of the endpoint.
            extra_body: Further fields of each request body.
            timeout_ns: The time limit of a request, from its scheduled time.
            stall_timeout_ns: The time limit between two events of a stream.
            keep_text: Whether the completion has the text of the response.
        """
        self.target = target
        self.server_profile = server_profile
        self._is_streaming = stream
        self._api_key = api_key
        self._headers = headers
        self._timeout_ns = timeout_ns
        self._stall_timeout_ns = stall_timeout_ns
        self._keep_text = keep_text

        # Bodies are encoded as the SDK's own client encodes them, so that both send the same.
        body_format = BodyFormat(server_profile, target.api, model, stream, extra_body=extra_body)
        self.prepare = BodyEncoder(body_format).encode

        self._client: AsyncOpenAI | None = None
        self._tasks: dict[Exchange, asyncio.Task[None]] = {}

    @property
    def in_flight(self) -> int:
        """Return the number of requests in flight."""
        return len(self._tasks)

    async def open(self) -> None:
        """Import the openai package and create its client. Connections open on demand.

        Raises TargetUnusable if the package is not installed.
        """
        try:
            import openai
        except ImportError:
            raise TargetUnusable(
                "not_installed", "the openai package is not installed", "pip install openai"
            ) from None

        query = self.target.query[1:]  # without the question mark
        self._client = openai.AsyncOpenAI(
            base_url=self.target.base_url,
            # The real key is in the headers, which are those of the SDK's own client.
            api_key="unused",
            default_headers=self._default_headers(),
            default_query=dict(parse_qsl(query, keep_blank_values=True)),
            max_retries=0,
            timeout=openai.Timeout(None, connect=CONNECT_TIMEOUT_S),
            http_client=self._create_http_client(),
        )

    def _default_headers(self) -> dict[str, str]:
        """Return the headers of every request: those of the endpoint, then those of the user."""
        auth_headers = self.target.auth_headers(self._api_key)
        return dict(merge_headers(auth_headers, self._headers))

    def _create_http_client(self) -> Any:
        """Return an HTTP client that limits no connections, uses no proxy and follows no redirect.

        Its class comes from the package, which uses httpx or its successor, depending on its
        version. For the same reason the class of the limits is taken from an object of the package.
        """
        import openai
        from openai._constants import DEFAULT_CONNECTION_LIMITS

        limits_class = type(DEFAULT_CONNECTION_LIMITS)
        limits = limits_class(
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=self.server_profile.max_idle_s,
        )
        return openai.DefaultAsyncHttpxClient(
            limits=limits,
            timeout=openai.Timeout(None, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
            follow_redirects=False,
            event_hooks={"request": [self._prepare_http_request]},
        )

    async def _prepare_http_request(self, request: Any) -> None:
        """Remove the package's own headers from a request, and record the steps of its sending.

        The HTTP library calls this before it sends a request, in the task of the exchange.
        """
        configured_names = {name.lower() for name in self._default_headers()}
        for name in PACKAGE_HEADERS:
            if name not in configured_names:
                request.headers.pop(name, None)

        request.extensions["trace"] = partial(_record_http_step, _current_exchange.get())

    async def aclose(self) -> None:
        """End all requests in flight as `interrupted`, and close every connection."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        if self._client is not None:
            await self._client.close()

    def send(
        self,
        request: Request,
        body: bytes,
        due_ns: int,
        on_done: OnDone,
        timeline: EventTimeline,
    ) -> Exchange:
        """Send a request now and return the exchange, which `cancel` takes.

        Args:
            request: The request, for the completion and the header X-Request-Id.
            body: Its body, from `prepare`.
            due_ns: The scheduled time on the monotonic clock, with which the timeout begins.
            on_done: A function that is called exactly once, with the completion.
            timeline: The timeline that gets the time of each output event.
        """
        exchange = Exchange(
            request,
            b"",  # the package makes the head of the request
            body,
            due_ns,
            on_done,
            timeline,
            is_stream_requested=self._is_streaming,
            keep_text=self._keep_text,
        )
        headers = {"X-Request-Id": request.id}
        task = asyncio.get_running_loop().create_task(self._run_exchange(exchange, headers))
        self._tasks[exchange] = task
        task.add_done_callback(lambda _task: self._finish_exchange(exchange))
        return exchange

    def cancel(self, exchange: Exchange, failure: Failure) -> None:
        """End a request soon; its completion has this failure. A finished request is left alone."""
        task = self._tasks.get(exchange)
        if task is not None:
            exchange.failure = failure
            task.cancel()

    def _finish_exchange(self, exchange: Exchange) -> None:
        """Forget the task of an exchange, which has ended, and report the completion."""
        del self._tasks[exchange]

        was_cancelled_before_its_first_step = exchange.done_at < 0
        if was_cancelled_before_its_first_step:
            exchange.done_at = monotonic_ns()
            exchange.failure = exchange.failure or CANCELLED

        exchange.report_completion()

    async def _run_exchange(self, exchange: Exchange, headers: dict[str, str]) -> None:
        """Send a request, read its response, and store the outcome in the exchange.

        It raises nothing: every exception becomes the failure of the exchange.
        """
        exchange.failure = await self._send_until_done(exchange, headers)
        exchange.done_at = monotonic_ns()
        exchange.ready_at = exchange.sent_at

        was_sent = exchange.sent_at >= 0
        if was_sent:
            exchange.bytes_sent = len(exchange.body)
        else:
            exchange.is_connection_reused = False

    async def _send_until_done(self, exchange: Exchange, headers: dict[str, str]) -> Failure | None:
        """Send a request within its time limits, and return its failure or None."""
        limits = TimeLimits(exchange.due_at, self._timeout_ns, self._stall_timeout_ns)
        try:
            async with limits.timeout:
                await self._send_with_resend(exchange, headers, limits)
        except TimeoutError:
            return limits.failure()
        except asyncio.CancelledError:
            return exchange.failure or CANCELLED
        except Exception as error:
            # An exception of the package is a failed request. It must not end the run.
            return self._convert_error(error, exchange)

        return exchange.reader.find_failure(
            is_framing_complete=True,
            ends_with_connection=False,
            is_stream=self._is_streaming,
        )

    async def _send_with_resend(
        self, exchange: Exchange, headers: dict[str, str], limits: TimeLimits
    ) -> None:
        """Send a request, and once more if the server had closed the idle connection.

        The definition of the metrics allows this one resend: the server did not see the request.
        """
        _current_exchange.set(exchange)
        try:
            await self._send_once(exchange, headers, limits)
        except Exception as error:
            if not self._allows_resend(exchange, error):
                raise
            exchange.resend_count = 1
            await self._send_once(exchange, headers, limits)

    @staticmethod
    def _allows_resend(exchange: Exchange, error: Exception) -> bool:
        """Return whether a request failed because its idle connection had been closed."""
        was_sent_on_idle_connection = exchange.is_connection_reused and exchange.sent_at >= 0
        has_response = exchange.head_received_at >= 0
        is_reset = classify_library_error(error).kind == "reset"
        return was_sent_on_idle_connection and is_reset and not has_response

    async def _send_once(
        self, exchange: Exchange, headers: dict[str, str], limits: TimeLimits
    ) -> None:
        """Call the openai package once, and feed its response to the reader of the exchange."""
        # The trace of the HTTP library reports a new connection, but not a reused one.
        exchange.is_connection_reused = True
        response = await self._call_package(exchange.body, headers)
        if self._is_streaming:
            await _read_stream(exchange, response, limits)
        else:
            _read_complete_response(exchange, response)

    async def _call_package(self, body: bytes | memoryview, headers: dict[str, str]) -> Any:
        """Call the package with the fields of an encoded request body.

        Return its response object, or its stream if the body asks for one.
        """
        assert self._client is not None, "open() was not called"
        fields: dict[str, Any] = msgspec.json.decode(body)
        named = {name: fields.pop(name) for name in NAMED_PARAMETERS if name in fields}

        api: Any = self._client.completions
        if self.target.api == "chat":
            api = self._client.chat.completions
        return await api.create(**named, extra_body=fields, extra_headers=headers)

    def _convert_error(self, error: Exception, exchange: Exchange) -> Failure:
        """Return the failure that an exception of the package means, without secrets in its text.

        If the exception has an HTTP status, the exchange gets it too.
        """
        failure = classify_library_error(error)
        if failure.http_status:
            exchange.response.status = failure.http_status

        text = failure.text
        is_connection_lost = failure.kind in ("reset", "truncated")
        if is_connection_lost and exchange.head_received_at >= 0:
            text = f"{text}, after {exchange.reader.output_events} output events"

        text = self.target.redact(text, self._api_key, *header_secrets(self._headers))
        return Failure(failure.kind, text[:ERROR_TEXT_CHARS], exchange.response.status)


class TimeLimits:
    """The time limits of one request: its total time, and the time between two events.

    Enter `timeout` around the request. It raises TimeoutError at the end of either limit. The limit
    between two events begins with the first event.
    """

    def __init__(self, due_ns: int, timeout_ns: int, stall_timeout_ns: int) -> None:
        self._timeout_s = timeout_ns / 1e9
        self._stall_timeout_s = stall_timeout_ns / 1e9
        elapsed_s = (monotonic_ns() - due_ns) / 1e9
        self._deadline_s = asyncio.get_running_loop().time() + self._timeout_s - elapsed_s
        self.timeout = asyncio.timeout_at(self._deadline_s)

    def restart_stall_timeout(self) -> None:
        """Wait for the next event from now on, but not longer than the request may take."""
        stall_deadline_s = asyncio.get_running_loop().time() + self._stall_timeout_s
        self.timeout.reschedule(min(self._deadline_s, stall_deadline_s))

    def failure(self) -> Failure:
        """Return the failure of a request that exceeded the limit which is now set."""
        if self.timeout.when() == self._deadline_s:
            text = f"not finished {self._timeout_s:g} s after its scheduled time"
            return Failure("timeout_total", text)
        return Failure("timeout_stall", f"no event for {self._stall_timeout_s:g} s")


async def _read_stream(exchange: Exchange, stream: Any, limits: TimeLimits) -> None:
    """Feed a stream of the package to the reader of an exchange, event by event.

    The timestamp of an event is the time at which the package delivers it.
    """
    exchange.response.status = stream.response.status_code
    try:
        async for event in stream:
            exchange.reader.feed([_encode_event(event)], monotonic_ns())
            limits.restart_stall_timeout()
    finally:
        exchange.bytes_received = getattr(stream.response, "num_bytes_downloaded", 0)


def _read_complete_response(exchange: Exchange, response: Any) -> None:
    """Feed a response that was not streamed to the reader; all of its tokens came at once."""
    received_ns = monotonic_ns()
    reader = exchange.reader
    exchange.response.status = 200
    reader.feed([_encode_event(response)], received_ns)
    reader.first_event_tokens = reader.usage().output or 0


def _encode_event(event: Any) -> bytes:
    """Encode an object of the package as JSON again, so that the SDK's reader applies its rules."""
    text: str = event.model_dump_json(exclude_unset=True, warnings=False)
    return text.encode()


async def _record_http_step(exchange: Exchange, step: str, _details: object) -> None:
    """Record the time of a step of the HTTP library, which calls this as its trace function."""
    if step == "connection.connect_tcp.started":
        exchange.is_connection_reused = False
    elif step == "http11.send_request_headers.started":
        exchange.sent_at = monotonic_ns()
    elif step == "http11.receive_response_headers.complete":
        exchange.head_received_at = monotonic_ns()
