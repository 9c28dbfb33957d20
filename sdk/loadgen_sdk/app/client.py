"""The client for applications: it throttles, measures and retries calls to one endpoint.

An attempt is one `Pool.send`, the function that the load generator uses. Timestamps come from the
kernel. Calls are retried only while no output was delivered.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..errors import (
    BudgetExceeded,
    ClientError,
    RequestFailed,
    ThrottleTimeout,
    WrongUse,
    refuse_unknown,
)
from ..prices import Prices
from ..request import Completion, Failure, Request
from ..transport.exchange import Exchange
from ..transport.pool import STALL_TIMEOUT_NS, TIMEOUT_NS, Pool, SendingOptions
from ..transport.proxy import proxy_for
from ..transport.target import Target
from ..transport.tls import Tls
from ..wire_formats.event_timeline import EventTimeline
from ..wire_formats.server_profiles import (
    SERVER_PROFILES,
    SERVERS,
    Api,
    ServerProfile,
    server_names,
)
from .background import is_collecting_garbage, run_in_background
from .budget import Budget, BudgetHold, BudgetOption
from .call import Call, CallObservation, CallSettings
from .fallback import Fallback, failure_from_client_error, validate_fallback
from .labels import Labels
from .measurement import Choice, Status
from .policy import Observers, make_policy
from .retry import Retry
from .throttle import Throttle
from .trace_recorder import ShapeRecorder

if TYPE_CHECKING:
    from typing import Unpack

LOOP_LEFT = "the loop over the stream was left before its end"
"""The message by which a BlockingClient cancels a call whose loop was left in the caller's thread.

It tells such a call, which counts as abandoned, from a cancelled one.
"""

_UNSENT_KINDS = {ThrottleTimeout: "timeout_total", BudgetExceeded: "over_budget"}
"""The kind of failure of a call that was not sent, by the type of its exception."""

_CALLER_LEFT = Failure("interrupted", "the caller stopped listening")
_MAX_TIMEOUT_S = 1e9


class Event(NamedTuple):
    """One output event.

    Attributes:
        text: Its text.
        reasoning: Its reasoning text.
        at_ns: Its time of arrival, in monotonic ns.
    """

    text: str
    reasoning: str
    at_ns: int


RequestLike = Request | str | Sequence[dict[str, Any]]
"""What `stream` and `complete` accept: a Request, a text, or the messages of a chat."""


def to_request(prompt: RequestLike) -> Request:
    """Return a Request for what a caller has passed to `stream` or `complete`.

    A string becomes one message of the user. A Request that is created here lets the model decide
    how long its output is (`exact_output=False`).

    Raises:
        WrongUse: The prompt is neither a Request nor a string nor messages.
    """
    if isinstance(prompt, Request):
        return prompt

    messages: list[dict[str, Any]]
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif _is_messages(prompt):
        messages = [*prompt]
    else:
        raise WrongUse(
            "wrong_type",
            f"a {type(prompt).__name__} cannot be sent as a prompt",
            'give a text, messages ([{"role": …}]), or a Request',
        )

    return Request(id=secrets.token_hex(8), messages=messages, exact_output=False)


def _is_messages(prompt: object) -> bool:
    """Return True for a sequence of messages that is not empty."""
    if not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(isinstance(message, dict) for message in prompt)


class ClientOptions(SendingOptions, total=False):
    """The options of a `Client`, with those of a `Pool`.

    - `on_measurement`, `prices`, `throttle`, `retry`, `record`, `keep_content`, `labels`, `budget`
      and `fallback` are those of `instrument`. The Client in a `fallback` is closed by its owner.
    - `timeout_s` limits a call, and `stall_timeout_s` the time between two of its events.
      `timeout_ns` and `stall_timeout_ns` are the same in ns.
    - `proxy` is "http://HOST:PORT", "" for none, or None for that of HTTP_PROXY, HTTPS_PROXY and
      NO_PROXY.
    """

    model: str | None
    server_profile: ServerProfile | None
    api: Api
    server: str
    timeout_s: float | None
    stall_timeout_s: float | None
    proxy: str | None
    keep_text: bool | None
    keep_headers: bool | None
    on_measurement: Observers
    prices: Prices
    throttle: Throttle | None
    retry: Retry | None
    record: ShapeRecorder | None
    keep_content: bool
    labels: Labels | None
    budget: BudgetOption
    fallback: Fallback | None


_POLICY_OPTIONS = (
    "on_measurement",
    "prices",
    "throttle",
    "retry",
    "record",
    "keep_content",
    "labels",
    "budget",
)
_PROBE_OPTIONS = ("server", "stream", "api_key", "headers", "extra_body")
"""The options of a Client that its probe needs, too."""

_DEFAULTS: dict[str, Any] = dict.fromkeys(ClientOptions.__annotations__) | {
    "api": "chat",
    "server": "auto",
    "stream": True,
    "headers": (),
    "timeout_ns": TIMEOUT_NS,
    "stall_timeout_ns": STALL_TIMEOUT_NS,
    "continuous_usage": False,
    "open_ahead": False,
    "sources": (),
    "keep_content": False,
}


class Client:
    """A client for one endpoint, one model and one API.

    Create it in a running event loop. Its first call opens it. If the model or the server is not
    given, a probe finds out when the client opens.

    Attributes:
        target: The endpoint.
        model: The model, or "" until a probe has found it.
        server_profile: The kind of server.
        policy: Prices, limits, retries and observers.
        timeout_s: The longest duration of a call.
        is_simulated: A probe found that the server is the simulated server of this project.
    """

    def __init__(self, target: Target | str, **options: Unpack[ClientOptions]) -> None:
        """Create a client. It is not connected yet: its first call opens it.

        Args:
            target: A URL, or a parsed Target. With a URL, texts and headers are kept by default.
            options: The options, such as `model`, `api`, `throttle` and `retry`. `ClientOptions`
                describes each of them.

        Raises:
            WrongUse: An option is not valid.
            TargetUnusable: The URL is not valid.
        """
        refuse_unknown(options, ClientOptions, "Client()")
        all_options = _with_defaults(options)
        is_url = isinstance(target, str)
        self.target = _parse_target(target, all_options) if isinstance(target, str) else target
        self.policy = make_policy(**{name: all_options[name] for name in _POLICY_OPTIONS})
        self.model = all_options["model"] or ""
        self.timeout_s = all_options["timeout_ns"] / 1e9
        self.is_simulated = False
        self._streams = all_options["stream"]
        self._tls = all_options["tls"]
        self._settings = self._call_settings(api_key=all_options["api_key"] or "")

        specified_profile = _select_profile(all_options["server_profile"], all_options["server"])
        self.server_profile = specified_profile or SERVER_PROFILES["generic"]

        # A probe finds out the model and the kind of server when the client opens. None if the
        # options specify both.
        self._probe_options: dict[str, Any] | None = None
        if specified_profile is None or not self.model:
            self._probe_options = {name: all_options[name] for name in _PROBE_OPTIONS}

        self._proxy = proxy_for(self.target, all_options["proxy"])
        self._make_pool = self._pool_factory(all_options, is_url=is_url)
        self._pool = self._make_pool(model=self.model, server_profile=self.server_profile)
        self._exchanges: set[Exchange] = set()
        self._opening_lock = asyncio.Lock()
        self._closed = False
        self._fallback = validate_fallback(
            all_options["fallback"], get_client_kind=type, first_client=self
        )

    def _call_settings(self, api_key: str) -> CallSettings:
        """Return what all calls of this client have in common."""
        return CallSettings(
            self.policy,
            server=self.target.address,
            key=api_key,
            package="",
            timeout_s=self.timeout_s,
            url_secrets=self.target.secrets,
        )

    def _pool_factory(self, options: dict[str, Any], *, is_url: bool) -> Callable[..., Pool]:
        """Return a function that creates the pool of connections of the client.

        The function takes the `model` and the `server_profile`. It is called again when a probe has
        found them.

        Args:
            options: All options of the client, with their defaults.
            is_url: The target was passed as a URL. An application passes a URL and gets texts and
                headers by default. The load generator passes a Target and does not need them.
        """
        keep_text = options["keep_text"]
        if keep_text is None:
            keep_text = is_url or options["keep_content"]

        keep_headers = options["keep_headers"]
        if keep_headers is None:
            keep_headers = is_url

        # The other options of the pool are among those of the client, under the same names.
        pool_option_names = SendingOptions.__annotations__
        sending_options = {name: options[name] for name in pool_option_names}
        return partial(
            Pool,
            self.target,
            **sending_options,
            keep_text=keep_text,
            keep_headers=keep_headers,
            proxy=self._proxy,
        )

    @property
    def in_flight(self) -> int:
        """The number of requests that were sent and have not ended."""
        return self._pool.in_flight

    def close(self) -> None:
        """Close every connection.

        Calls in flight end as `interrupted`, and later ones raise ClientError.
        """
        self._closed = True
        for exchange in [*self._exchanges]:
            self._pool.cancel(
                exchange, Failure("interrupted", "the client was closed during the call")
            )
        self._pool.close()

    async def open(self, connections: int = 0) -> None:
        """Probe the server if necessary, resolve the host, and open connections in advance.

        A client that is open already is not probed again. Two tasks cannot open it at the same
        time.

        Args:
            connections: How many connections to open now. Requests open any others they need.

        Raises:
            TargetUnusable: No connection can be opened, or the probe shows that no request can
                work.
            ClientError: The client is closed.
        """
        self._check_usable()
        async with self._opening_lock:
            if self._probe_options is not None:
                await self._probe(self._probe_options)
                self._probe_options = None
            await self._pool.open(connections)

    async def __aenter__(self) -> Client:
        """Open the client."""
        try:
            await self.open()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the client."""
        self.close()

    async def stream(
        self, request: RequestLike, *, labels: Labels | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield the output events as they arrive. Open the client if it is not open.

        A failure before the first event is retried as `retry` allows, and then passed to the
        client of the `fallback`, if there is one. Leaving the loop ends the request and its
        connection.

        Args:
            request: A Request, a text or messages.
            labels: The labels of the call.

        Raises:
            RequestFailed: The request is not ok. It is raised after the events that did arrive.
        """
        parsed_request = to_request(request)
        if self._fallback is None:
            events = self._stream_here(parsed_request, labels)
        else:
            events = self._stream_with_fallback(self._fallback, parsed_request, labels)

        async with aclosing(events):
            async for event in events:
                yield event

    async def complete(
        self, request: RequestLike, *, labels: Labels | None = None, raise_on_failure: bool = False
    ) -> Completion:
        """Send a request and wait for its completion.

        A failure is retried as `retry` allows, even in the middle of a response, because no output
        was delivered.

        Args:
            request: A Request, a text or messages.
            labels: The labels of the call.
            raise_on_failure: Raise RequestFailed for a failed request. Otherwise a Completion with
                its `failure` is returned.

        Raises:
            TargetUnusable: The client cannot be opened.
            ThrottleTimeout: The throttle gave no permit in time.
            WrongUse: The request is not valid.
            ClientError: The client is closed.
        """
        parsed_request = to_request(request)
        fallback = self._fallback
        if fallback is None:
            completion = await self._complete_here(parsed_request, labels)
        else:
            completion = await fallback.complete(
                partial(self._complete_here, parsed_request, labels),
                partial(fallback.client.complete, parsed_request, labels=labels),
            )

        if raise_on_failure and completion.failure is not None:
            raise _request_failed(completion.failure)

        return completion

    async def _probe(self, options: dict[str, Any]) -> None:
        """Send a few requests to the server to find out its model and what kind of server it is.

        The pool of connections is replaced by one that sends requests in the form that this server
        understands.

        Args:
            options: The options of the client by which the probe sends its requests.
        """
        # Imported here, because a client with a model and a server profile needs no probe.
        from ..probe.fetch import HttpFetcher
        from ..probe.probe import probe
        from ..probe.probe_client import ProbeOptions

        tls = (self._tls or Tls()).context() if self.target.tls else None
        fetcher = HttpFetcher(self.target, tls, timeout_s=self.timeout_s, proxy=self._proxy)
        result = await probe(
            self.target,
            send_request=fetcher.send_request,
            connect=fetcher.connect,
            options=ProbeOptions(model=self.model or None, **options),
        )
        self.model = result.model
        self.server_profile = result.server_profile
        self.is_simulated = result.simulated
        self._pool.close()
        self._pool = self._make_pool(model=self.model, server_profile=self.server_profile)

    async def _stream_with_fallback(
        self, fallback: Fallback, request: Request, labels: Labels | None
    ) -> AsyncGenerator[Event, None]:
        """Yield the output events of this endpoint, or of the second one if this one fails.

        The second endpoint is used if the circuit breaker of this one is open, because it has
        failed too often recently, or if this one fails before its first event. A failure after an
        event is raised: the second endpoint would repeat output that the caller already has.
        """
        is_first_endpoint_allowed = fallback.circuit.allows_call(monotonic_ns())
        if is_first_endpoint_allowed:
            has_output = False
            try:
                # `aclosing` cancels the request at once if the caller leaves its loop.
                async with aclosing(self._stream_here(request, labels)) as events:
                    async for event in events:
                        has_output = True
                        yield event
            except BaseException as error:
                should_try_second = fallback.handle_error(
                    error, failure_from_client_error, has_output=has_output
                )
                if not should_try_second:
                    raise
            else:
                fallback.circuit.record_success()
                return

        async with aclosing(fallback.client.stream(request, labels=labels)) as events:
            async for event in events:
                yield event

    async def _stream_here(
        self, request: Request, labels: Labels | None
    ) -> AsyncGenerator[Event, None]:
        """Yield the output events of a call to this endpoint, without the fallback.

        Raises:
            RequestFailed: The request is not ok, after its retries.
        """
        async with aclosing(self._run_call(request, labels, with_events=True)) as items:
            async for item in items:
                if isinstance(item, Event):
                    yield item
                elif item.failure is not None:
                    raise _request_failed(item.failure)

    async def _complete_here(self, request: Request, labels: Labels | None) -> Completion:
        """Return the completion of a call to this endpoint, without the fallback."""
        completion: Completion | None = None
        async for item in self._run_call(request, labels, with_events=False):
            assert isinstance(item, Completion)  # Events are yielded only with `with_events`.
            completion = item
        assert completion is not None
        return completion

    # -- the life of a call ------------------------------------------------------------------------

    async def _run_call(
        self, request: Request, labels: Labels | None, *, with_events: bool
    ) -> AsyncGenerator[Event | Completion, None]:
        """Send a request, with its retries, and report the call once, at its end.

        Yield the output events of an attempt as they arrive, if `with_events` is set. After them,
        the Completion of the last attempt is yielded, which may contain a failure. There is no
        retry after an event was yielded, because the caller would get the same output twice.
        """
        self._check_usable()
        call = self._begin_call(request, labels)

        retry_wait_s: float | None = 0.0  # None after the last attempt
        while retry_wait_s is not None:
            await self._prepare_attempt(call, retry_wait_s)
            attempt = self._begin_attempt(call, request, with_events=with_events)

            has_output = False
            try:
                event = await attempt.next_event()
                while event is not None:
                    has_output = True
                    yield event
                    event = await attempt.next_event()
            except BaseException as error:
                # The caller was cancelled, or has left the loop over the events (GeneratorExit).
                self._cancel_attempt(call, attempt, error)
                raise
            finally:
                self._exchanges.discard(attempt.exchange)

            call.instants = attempt.timeline.all_timestamps()
            completion = self._redacted(attempt.completion())
            retry_wait_s = self._end_attempt(call, completion, has_output=has_output)

        self._report(call, completion, "ok" if completion.failure is None else "failed")
        yield completion

    def _begin_call(self, request: Request, labels: Labels | None) -> Call:
        """Return the Call that measures a request.

        Its arguments are those that the openai package would have got, so that calls of both are
        estimated, recorded and shown by telemetry in the same way.
        """
        arguments = {
            **request.extra,
            "messages": request.messages,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
        }
        return Call(
            self._settings,
            self.target.api,
            self.model,
            arguments,
            is_streamed=self._streams,
            labels=labels,
        )

    def _begin_attempt(self, call: Call, request: Request, *, with_events: bool) -> _Attempt:
        """Send the request over the pool, and return the attempt from which its events are read.

        The pool is not awaited: it calls functions, which put what has arrived into the queue of
        the attempt. These are the output events, if `with_events` is set, and the Completion at
        the end of the request.
        """
        queue: asyncio.Queue[Event | Completion] = asyncio.Queue()
        timeline = EventTimeline()

        def put_event(text: str, reasoning: str, at_ns: int) -> None:
            queue.put_nowait(Event(text, reasoning, at_ns))

        call.instants = ()  # Drop the timestamps of an earlier attempt.
        call.attempt_started = monotonic_ns()
        body = self._pool.prepare(request)
        exchange = self._pool.send(
            request,
            body,
            due=monotonic_ns(),
            on_done=queue.put_nowait,
            timeline=timeline,
            on_output=put_event if with_events else None,
        )
        self._exchanges.add(exchange)

        return _Attempt(exchange, queue, timeline)

    def _cancel_attempt(self, call: Call, attempt: _Attempt, error: BaseException) -> None:
        """Cancel the request of a caller that stopped waiting for it, and report the call.

        `error` is the exception that was raised in the caller's task or generator.
        """
        self._pool.cancel(attempt.exchange, _CALLER_LEFT)
        call.instants = attempt.timeline.all_timestamps()
        self._report_abandoned(call, attempt.queued_completion(), error)

    async def _prepare_attempt(self, call: Call, backoff_s: float) -> None:
        """Wait until an attempt may be sent.

        This waits for the back-off, opens the client if it is not open, waits for a permit of the
        throttle, and books the estimated cost in the budget. The permit and the booking are stored
        in the call, which returns them at its end. A call that may not be sent is reported here.

        Args:
            call: The call.
            backoff_s: The seconds to wait after a failed attempt, or 0 for the first one.

        Raises:
            ThrottleTimeout: The throttle gave no permit in time.
            BudgetExceeded: The call may cost more than the budget has left.
            TargetUnusable: The client cannot be opened.
            ClientError: The client was closed during the wait.
        """
        throttle = self.policy.throttle
        budget = self.policy.budget
        try:
            if backoff_s:
                await asyncio.sleep(backoff_s)

            if not self._pool.is_open:
                await self.open()

            # A probe may have found the name of the model when the client was opened just now.
            call.model = self.model
            if throttle is not None:
                arguments = call.throttle_arguments(self.timeout_s)
                call.permit = await throttle.acquire(**arguments)
                # The application may have closed the client while the call waited.
                self._check_usable()

            if budget is not None:
                call.budget_hold = await self._book_cost(budget, call)
        except BaseException as error:
            self._report_unsent(call, error)
            raise

    async def _book_cost(self, budget: Budget, call: Call) -> BudgetHold:
        """Book the estimated cost of a call in the budget, and return the booking.

        Raises:
            BudgetExceeded: The call may cost more than the budget has left.
        """
        book = budget.select_book_function(is_blocking=False)
        booking = book(call.estimated_cost(), call.model)
        # The function is a coroutine function only if processes share the budget in a file or in
        # Redis. Otherwise it returns the booking at once.
        if isinstance(booking, Awaitable):
            return await booking
        return booking

    def _report_unsent(self, call: Call, error: BaseException) -> None:
        """Report a call that was not sent, and return its permit if it has one.

        It failed if `error` is an Exception. Otherwise its caller was cancelled while it waited.
        """
        if call.permit is not None:
            call.permit.done(0)

        if isinstance(error, Exception):
            # Any error but those of throttle and budget is raised while the client is opened.
            kind = _UNSENT_KINDS.get(type(error), "connect")
            failure = Failure(kind, self.target.redact(str(error)))
            status: Status = "failed"
        else:
            failure = _CALLER_LEFT
            status = "cancelled"

        call.report(status, failure, CallObservation(), done=monotonic_ns())

    def _redacted(self, completion: Completion) -> Completion:
        """Return a completion whose failure does not quote the key."""
        failure = completion.failure
        if failure is None:
            return completion
        text = self._settings.redact(failure.text)
        redacted_failure = Failure(failure.kind, text, failure.http_status)
        return msgspec.structs.replace(completion, failure=redacted_failure)

    def _end_attempt(self, call: Call, completion: Completion, *, has_output: bool) -> float | None:
        """End an attempt. Return the seconds to wait before a retry, or None without a retry.

        There is no retry after a success, and if the retry policy does not allow one, for example
        because of the kind of failure or the number of attempts. The caller then has to report the
        call.

        Args:
            call: The call of the attempt.
            completion: What the server has sent, or the failure of the attempt.
            has_output: Output has reached the caller, so that a retry would repeat it.
        """
        headers = completion.headers or {}
        if completion.failure is None:
            call.record_headers(headers)
            return None
        return call.end_failed_attempt(
            completion.failure, headers, ended_at=completion.done, can_retry=not has_output
        )

    def _report_abandoned(self, call: Call, completion: Completion, error: BaseException) -> None:
        """Report a call whose caller stopped waiting for it or reading it.

        Args:
            call: The call.
            completion: The completion of its cancelled request.
            error: The exception that has ended the generator of the caller: CancelledError,
                KeyboardInterrupt, or GeneratorExit if the loop over the events was left.
        """
        if is_collecting_garbage():
            # The garbage collector closes a generator that nobody reads any more. The code that it
            # has interrupted may hold any lock, so that another thread does the work.
            run_in_background(partial(self._report_abandoned, call, completion, error))
            return

        call.record_headers(completion.headers or {})
        if completion.failure is None:
            status: Status = "ok"  # The response was complete before the caller left.
        elif _is_cancellation(error):
            status = "cancelled"
        else:
            status = "abandoned"

        self._report(call, completion, status)

    def _report(self, call: Call, completion: Completion, status: Status) -> None:
        """Report a call that was sent, with the completion of its last attempt.

        A Call is common to this client and to instrumented clients. What the pool has observed is
        therefore passed in the form that both use: a CallObservation with a single choice.

        Args:
            call: The call.
            completion: What the last attempt has received, with timestamps and perhaps a failure.
            status: How the call ended.
        """
        choice = Choice(
            text=completion.text or "",
            finish_reason=completion.finish_reason,
            tool_calls=completion.tool_calls,
        )

        observation = CallObservation(
            sent=completion.sent,
            first_token=completion.first_token,
            first_answer=completion.first_answer,
            last_token=completion.last_token,
            end=completion.end,
            first_event_tokens=completion.first_event_tokens,
            finish_reason=completion.finish_reason,
            # The pool sends a request again if a kept connection was closed under it.
            hidden_retries=completion.resent,
            response_id=completion.response_id,
            server_timing=completion.server_timing,
            kernel_stamps=completion.kernel_stamp,
            usage=completion.usage,
            choices=(choice,),
        )
        call.report(status, completion.failure, observation, done=completion.done)

    def _check_usable(self) -> None:
        """Raise ClientError if the client is closed."""
        if self._closed:
            raise ClientError("this client is closed; create a new one")


class _Attempt:
    """A request that was sent, and the queue into which its events are put as they arrive.

    Attributes:
        exchange: The exchange with the server. It is needed to cancel the request.
        timeline: The timestamps of the output events.
    """

    def __init__(
        self,
        exchange: Exchange,
        queue: asyncio.Queue[Event | Completion],
        timeline: EventTimeline,
    ) -> None:
        """Keep the queue, which has the output events and, at the end, the completion."""
        self.exchange = exchange
        self.timeline = timeline
        self._queue = queue
        self._completion: Completion | None = None

    async def next_event(self) -> Event | None:
        """Wait for the next output event and return it, or return None if the request has ended."""
        item = await self._queue.get()
        if isinstance(item, Completion):
            self._completion = item
            return None
        return item

    def completion(self) -> Completion:
        """Return the completion, after all events were read."""
        assert self._completion is not None
        return self._completion

    def queued_completion(self) -> Completion:
        """Return the completion of a cancelled attempt, behind the events that were not read."""
        while True:
            item = self._queue.get_nowait()
            if isinstance(item, Completion):
                return item


def _is_cancellation(error: BaseException) -> bool:
    """Return True if the caller of a call was cancelled, and did not just leave its loop.

    A BlockingClient, whose caller leaves a loop in another thread, has to cancel the call as well.
    It does so with the message LOOP_LEFT.
    """
    if not isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return False
    return LOOP_LEFT not in error.args


def _with_defaults(options: ClientOptions) -> dict[str, Any]:
    """Return all options of a Client, with the defaults of those that are not specified.

    The timeouts in seconds, if they are specified, replace those in ns.

    Raises:
        WrongUse: A timeout is not a positive number.
    """
    all_options: dict[str, Any] = {**_DEFAULTS, **options}
    if all_options["timeout_s"] is not None:
        all_options["timeout_ns"] = _timeout_ns("timeout_s", all_options["timeout_s"])

    if all_options["stall_timeout_s"] is not None:
        all_options["stall_timeout_ns"] = _timeout_ns(
            "stall_timeout_s", all_options["stall_timeout_s"]
        )

    return all_options


def _timeout_ns(option_name: str, seconds: object) -> int:
    """Convert the value of a timeout option from seconds to ns.

    Raises:
        WrongUse: The value is not a positive number, or far too large.
    """
    if not isinstance(seconds, int | float) or not 0 < seconds < _MAX_TIMEOUT_S:
        raise WrongUse(
            "out_of_range", f"{option_name}={seconds!r}", "give a number of seconds above 0"
        )
    return int(seconds * 1e9)


def _parse_target(url: str, options: dict[str, Any]) -> Target:
    server = None if options["server"] == "auto" else options["server"]
    return Target.parse(url, api=options["api"], server=server, deployment=options["model"] or "")


def _select_profile(profile: ServerProfile | None, server: str) -> ServerProfile | None:
    """Return the server profile of a Client, or None if a probe has to find it.

    Args:
        profile: The option `server_profile`, which has precedence if both options are used.
        server: The option `server`: the name of a server, or "auto".

    Raises:
        WrongUse: There is no server of this name.
    """
    if server == "auto":
        return profile

    named_profile = SERVERS.find(server)
    if named_profile is None:
        raise WrongUse(
            "unknown_name", f"unknown server {server!r}", f"known: {', '.join(server_names())}"
        )

    return profile or named_profile


def _request_failed(failure: Failure) -> RequestFailed:
    return RequestFailed(failure.kind, failure.text, failure.http_status)


def _client_signature() -> inspect.Signature:
    """Return the signature of `Client()` with all options, for `help` and notebooks.

    `Client.__init__` has `**options: Unpack[ClientOptions]`. Type checkers read the names of the
    options from that annotation, but `inspect.signature` shows only `**options`.
    """
    signature = inspect.signature(Client.__init__)
    option_types = ClientOptions.__annotations__
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            # Annotations of a TypedDict are ForwardRef objects, which contain the source text.
            annotation=option_types[name].__forward_arg__,
        )
        for name, default in _DEFAULTS.items()
    ]
    positional_parameters = [signature.parameters["self"], signature.parameters["target"]]

    return signature.replace(parameters=[*positional_parameters, *options])


vars(Client.__init__)["__signature__"] = _client_signature()
