"""The client for applications: it throttles, measures and retries calls to one endpoint.

An attempt is one `Pool.send`, the function that the load generator uses. Timestamps come from the
kernel. Calls are retried only while no output was delivered.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
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
from .budget import BudgetOption
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

    A text becomes a message of the user. A text and messages get no limit on the output length.

    Raises:
        WrongUse: It is neither a Request nor a text nor messages.
    """
    if isinstance(prompt, Request):
        return prompt
    messages: list[dict[str, Any]] | None = None
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif _is_messages(prompt):
        messages = [*prompt]
    if messages is None:
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
    """The options of a `Client`, with those of a `Pool`."""

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
        """Create a client. It is not connected yet.

        Args:
            target: A URL, or a parsed Target. With a URL, texts and headers are kept by default.
            options: See `ClientOptions`. `on_measurement`, `prices`, `throttle`, `retry`,
                `record`, `keep_content`, `labels`, `budget` and `fallback` are those of
                `instrument`. The Client in a `fallback` is closed by its owner. `timeout_s` and
                `stall_timeout_s` limit a call and the time between two of its events, and
                `timeout_ns` and `stall_timeout_ns` are the same in ns. `proxy` is
                "http://HOST:PORT", "" for none, or None for that of HTTP_PROXY, HTTPS_PROXY and
                NO_PROXY. All others are those of `Pool`.

        Raises:
            WrongUse: An option is not valid.
            TargetUnusable: The URL is not valid.
        """
        refuse_unknown(options, ClientOptions, "Client()")
        values: dict[str, Any] = {**_DEFAULTS, **options}
        timeout_ns = _timeout_ns(values, "timeout")
        stall_timeout_ns = _timeout_ns(values, "stall_timeout")
        is_url = isinstance(target, str)
        if isinstance(target, str):
            target = _parse_target(target, values)
        self.policy = make_policy(**{name: values[name] for name in _POLICY_OPTIONS})
        self.target = target
        self.model = values["model"] or ""
        server_profile = _find_profile(values)
        self.server_profile = server_profile or SERVER_PROFILES["generic"]
        self.timeout_s = timeout_ns / 1e9
        self.is_simulated = False
        self._streams = values["stream"]
        self._tls = values["tls"]
        self._settings = CallSettings(
            self.policy,
            target.address,
            values["api_key"] or "",
            package="",
            timeout_s=self.timeout_s,
            url_secrets=target.secrets,
        )
        self._probe_options: dict[str, Any] | None = None
        if server_profile is None or not self.model:
            names = ("server", "stream", "api_key", "headers", "extra_body")
            self._probe_options = {name: values[name] for name in names}
        self._proxy = proxy_for(target, values["proxy"])
        self._opening = asyncio.Lock()
        sending_options = {name: values[name] for name in SendingOptions.__annotations__}
        sending_options["timeout_ns"] = timeout_ns
        sending_options["stall_timeout_ns"] = stall_timeout_ns
        keep_text = values["keep_text"]
        if keep_text is None:
            keep_text = is_url or values["keep_content"]
        keep_headers = values["keep_headers"]
        if keep_headers is None:
            keep_headers = is_url
        self._make_pool = partial(
            Pool,
            target,
            **sending_options,
            keep_text=keep_text,
            keep_headers=keep_headers,
            proxy=self._proxy,
        )
        self._pool = self._make_pool(model=self.model, server_profile=self.server_profile)
        self._exchanges: set[Exchange] = set()
        self._closed = False
        self._fallback = validate_fallback(values["fallback"], type, self)

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
        """Probe the server if necessary, resolve the host, and open a number of connections.

        Raises:
            TargetUnusable: No connection can be opened, or the probe shows that no request can
                work.
            ClientError: The client is closed.
        """
        self._check_usable()
        async with self._opening:
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

        A failure before the first event is retried as `retry` allows. Leaving the loop ends the
        request and its connection.

        Args:
            request: A Request, a text or messages.
            labels: The labels of the call.

        Raises:
            RequestFailed: The request is not ok. It is raised after the events that did arrive.
        """
        parsed_request = to_request(request)
        fallback = self._fallback
        if fallback is None:
            async with aclosing(self._stream_here(parsed_request, labels)) as events:
                async for event in events:
                    yield event
            return

        if fallback.circuit.allows_call(monotonic_ns()):
            has_output = False
            try:
                async with aclosing(self._stream_here(parsed_request, labels)) as events:
                    async for event in events:
                        has_output = True
                        yield event
            except BaseException as error:
                if not fallback.handle_error(
                    error, failure_from_client_error, has_output=has_output
                ):
                    raise
            else:
                fallback.circuit.record_success()
                return

        async with aclosing(fallback.client.stream(parsed_request, labels=labels)) as events:
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
        """Find out the model and the kind of server by a few requests.

        The pool of connections is replaced by one that sends requests in the form that this server
        understands. `options` are those of the client that the probe needs.
        """
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
        items = [item async for item in self._run_call(request, labels, with_events=False)]
        completion = items[-1]
        assert isinstance(completion, Completion)
        return completion

    # -- the life of a call ------------------------------------------------------------------------

    async def _run_call(
        self, request: Request, labels: Labels | None, *, with_events: bool
    ) -> AsyncGenerator[Event | Completion, None]:
        """Send a request, with its retries, and report its measurement once.

        Yield the output events as they arrive, if `with_events`, and at the end the Completion of
        the last attempt, which may be a failure. There is no retry after an event was yielded.
        """
        self._check_usable()
        call = self._begin_call(request, labels)
        backoff_s = 0.0
        while True:
            await self._wait_for_permission(call, backoff_s)
            attempt = self._begin_attempt(call, request, with_events=with_events)
            has_output = False
            completion: Completion | None = None
            try:
                while completion is None:
                    item = await attempt.queue.get()
                    if isinstance(item, Completion):
                        completion = item
                    else:
                        has_output = True
                        yield item
            except BaseException as error:
                # The caller was cancelled, or has left the loop over the events (GeneratorExit).
                self._pool.cancel(attempt.exchange, _CALLER_LEFT)
                call.instants = attempt.timeline.all_timestamps()
                self._report_abandoned(call, attempt.queued_completion(), error)
                raise
            finally:
                self._exchanges.discard(attempt.exchange)

            call.instants = attempt.timeline.all_timestamps()
            completion = self._redacted(completion)
            next_backoff_s = self._end_attempt(call, completion, has_output=has_output)
            if next_backoff_s is None:
                self._report(call, completion, "ok" if completion.failure is None else "failed")
                yield completion
                return
            backoff_s = next_backoff_s

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
        """Send the request over the pool, whose callbacks put events into the attempt's queue."""
        queue: asyncio.Queue[Event | Completion] = asyncio.Queue()
        timeline = EventTimeline()

        def put_event(text: str, reasoning: str, at_ns: int) -> None:
            queue.put_nowait(Event(text, reasoning, at_ns))

        call.instants = ()
        call.attempt_started = monotonic_ns()
        exchange = self._pool.send(
            request,
            self._pool.prepare(request),
            monotonic_ns(),
            queue.put_nowait,
            timeline,
            on_output=put_event if with_events else None,
        )
        self._exchanges.add(exchange)
        return _Attempt(exchange, queue, timeline)

    async def _wait_for_permission(self, call: Call, backoff_s: float) -> None:
        """Wait until an attempt may be sent, and open the client if necessary.

        That is after the backoff of a retry, when the throttle gives a permit, and when the budget
        has room for the estimated cost. A call that gets no permission is reported here.

        Raises:
            ThrottleTimeout: The throttle gave no permit in time.
            BudgetExceeded: The call may cost more than the budget has left.
            TargetUnusable: The client cannot be opened.
        """
        try:
            if backoff_s:
                await asyncio.sleep(backoff_s)
            if not self._pool.is_open:
                await self.open()
            call.model = self.model
            if self.policy.throttle is not None:
                arguments = call.throttle_arguments(self.timeout_s)
                call.permit = await self.policy.throttle.acquire(**arguments)
                self._check_usable()
            if self.policy.budget is not None:
                book = self.policy.budget.select_book_function(is_blocking=False)
                hold = book(call.estimated_cost(), call.model)
                call.budget_hold = await hold if isinstance(hold, Awaitable) else hold
        except BaseException as error:
            self._report_unsent(call, error)
            raise

    def _report_unsent(self, call: Call, error: BaseException) -> None:
        """Report a call that got no permission to be sent.

        It failed if the error is an Exception. Otherwise its caller was cancelled while it waited.
        """
        if call.permit is not None:
            call.permit.done(0)
        status: Status = "cancelled"
        failure = _CALLER_LEFT
        if isinstance(error, Exception):
            status = "failed"
            # Any other error is one of opening the client.
            kind = _UNSENT_KINDS.get(type(error), "connect")
            failure = Failure(kind, self.target.redact(str(error)))
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
        """End an attempt. Return the seconds to wait before a retry, or None if there is none.

        `has_output` says that output has reached the caller, after which there is no retry.
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

        The status is "ok" if the response was complete, "cancelled" if the task of the caller was
        cancelled, and "abandoned" if the caller left the loop over the events. `error` is the
        exception that has ended the generator.
        """
        if is_collecting_garbage():
            # The garbage collector closes a generator that nobody reads any more. The code that it
            # has interrupted may hold any lock.
            run_in_background(partial(self._report_abandoned, call, completion, error))
            return
        call.record_headers(completion.headers or {})
        status: Status = "abandoned"
        if completion.failure is None:
            status = "ok"
        elif isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            has_left_loop = LOOP_LEFT in error.args
            status = "abandoned" if has_left_loop else "cancelled"
        self._report(call, completion, status)

    def _report(self, call: Call, completion: Completion, status: Status) -> None:
        """Report a call that was sent, with what its last attempt has returned."""
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


@dataclass(frozen=True)
class _Attempt:
    """A request that was sent.

    Attributes:
        exchange: The exchange with the server, by which the request can be cancelled.
        queue: The events that were not read yet, in their order, and the completion at the end.
        timeline: The timestamps of the output events.
    """

    exchange: Exchange
    queue: asyncio.Queue[Event | Completion]
    timeline: EventTimeline

    def queued_completion(self) -> Completion:
        """Return the completion of a cancelled attempt, behind the events that were not read."""
        while True:
            item = self.queue.get_nowait()
            if isinstance(item, Completion):
                return item


def _timeout_ns(options: dict[str, Any], name: str) -> int:
    """Return the timeout of the options `NAME_s` or `NAME_ns`. Raises WrongUse."""
    seconds = options[f"{name}_s"]
    if seconds is None:
        timeout_ns: int = options[f"{name}_ns"]
        return timeout_ns
    if not isinstance(seconds, int | float) or not 0 < seconds < _MAX_TIMEOUT_S:
        raise WrongUse("out_of_range", f"{name}_s={seconds!r}", "give a number of seconds above 0")
    return int(seconds * 1e9)


def _parse_target(url: str, options: dict[str, Any]) -> Target:
    server = None if options["server"] == "auto" else options["server"]
    return Target.parse(url, api=options["api"], server=server, deployment=options["model"] or "")


def _find_profile(options: dict[str, Any]) -> ServerProfile | None:
    """Return the server profile that the options name, or None if a probe has to find it.

    `options` are all options of a Client. Only `server_profile` and `server` are read.

    Raises:
        WrongUse: There is no server of this name.
    """
    profile: ServerProfile | None = options["server_profile"]
    server = options["server"]
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

    The function itself has `**options`, whose names only type checkers find in ClientOptions.
    """
    signature = inspect.signature(Client.__init__)
    option_types = ClientOptions.__annotations__
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=option_types[name].__forward_arg__,
        )
        for name, default in _DEFAULTS.items()
    ]
    own_parameters = [signature.parameters["self"], signature.parameters["target"]]
    return signature.replace(parameters=[*own_parameters, *options])


vars(Client.__init__)["__signature__"] = _client_signature()
