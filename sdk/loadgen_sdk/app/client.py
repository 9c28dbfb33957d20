"""The client for applications.

It throttles and measures calls, and retries them while no output was delivered.

One attempt is one `Pool.send`, the function that the load generator uses. Instants are the
kernel's stamps.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncGenerator, Awaitable, Sequence
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
from .budget import BudgetOption
from .call import Call, CallObservation, CallSettings
from .fallback import Fallback, checked_fallback, failure_of_client
from .finishing import collecting, later
from .labels import Labels
from .measurement import Choice, Status
from .policy import Observers, make_policy
from .retry import Retry
from .throttle import Throttle
from .trace_recorder import ShapeRecorder

if TYPE_CHECKING:
    from typing import Unpack

LOOP_LEFT = "the loop over the stream was left"
"""Message of a cancellation that means: a caller in another thread left its loop.

The call counts as abandoned.
"""

_CALLER_LEFT = Failure("interrupted", "the caller stopped listening")


class Event(NamedTuple):
    """One output event: its text, its reasoning text, and its arrival instant (monotonic ns)."""

    text: str
    reasoning: str
    at_ns: int


Askable = Request | str | Sequence[dict[str, Any]]
"""What `stream` and `complete` accept: a Request, a text, or the messages of a chat."""


def as_request(prompt: Askable) -> Request:
    """`prompt` as a Request; a text or messages get no limit on the output length. Raises WrongUse."""
    if isinstance(prompt, Request):
        return prompt
    request_id = secrets.token_hex(8)
    if isinstance(prompt, str):
        return Request(
            id=request_id, messages=[{"role": "user", "content": prompt}], exact_output=False
        )
    if (
        isinstance(prompt, Sequence)
        and prompt
        and all(isinstance(message, dict) for message in prompt)
    ):
        return Request(id=request_id, messages=[*prompt], exact_output=False)
    raise WrongUse(
        "wrong_type",
        f"cannot ask a {type(prompt).__name__}",
        'give a text, messages ([{"role": …}]), or a Request',
    )


def _put_event(
    queue: asyncio.Queue[Event | Completion], text: str, reasoning: str, at: int
) -> None:
    queue.put_nowait(Event(text, reasoning, at))


class ClientOptions(SendingOptions, total=False):
    """What a `Client` takes beside its target.

    Those of `SendingOptions` are of the same names there.
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


POLICY = (
    "on_measurement",
    "prices",
    "throttle",
    "retry",
    "record",
    "keep_content",
    "labels",
    "budget",
)
DEFAULTS: dict[str, Any] = dict.fromkeys(ClientOptions.__annotations__) | {
    "api": "chat",
    "server": "auto",
    "stream": True,
    "headers": (),
    "timeout_ns": TIMEOUT_NS,
    "stall_timeout_ns": STALL_TIMEOUT_NS,
    "continuous_usage": False,
    "ahead": False,
    "sources": (),
    "keep_content": False,
}


def _ns(name: str, seconds: float | None, otherwise: int) -> int:
    """`seconds` as ns, if they are given. Raises WrongUse."""
    if seconds is None:
        return otherwise
    if not (isinstance(seconds, int | float) and 0 < seconds < 1e9):
        raise WrongUse("out_of_range", f"{name}={seconds!r}", "give seconds, above 0")
    return int(seconds * 1e9)


class Client:
    """One endpoint, one model, one API. Create it in a running event loop; its first call opens it.

    `target` is a URL, or a parsed Target. With a URL, texts and headers are kept by default. If
    model or server are not given, a probe finds them when the client opens. `stream` and
    `complete` are throttled, retried and measured by `on_measurement`, `prices`, `throttle`,
    `retry`, `record`, `keep_content`, `labels`, `budget` and `fallback` (see `instrument`; the
    Client in a `fallback` is closed by its owner). timeout_s and stall_timeout_s limit a call, and
    the time between two of its events; `timeout_ns` and `stall_timeout_ns` are the same in
    nanoseconds. proxy: "http://HOST:PORT"; None: as HTTP_PROXY, HTTPS_PROXY and NO_PROXY say; "":
    none. All other parameters are those of `Pool`.
    """

    def __init__(self, target: Target | str, **options: Unpack[ClientOptions]) -> None:
        refuse_unknown(options, ClientOptions, "Client()")
        given: dict[str, Any] = {**DEFAULTS, **options}
        model, server_profile, server = given["model"], given["server_profile"], given["server"]
        timeout_ns = _ns("timeout_s", given["timeout_s"], given["timeout_ns"])
        stall_timeout_ns = _ns(
            "stall_timeout_s", given["stall_timeout_s"], given["stall_timeout_ns"]
        )
        given_url = isinstance(target, str)
        if isinstance(target, str):
            kind = None if server == "auto" else server
            target = Target.parse(target, api=given["api"], server=kind, deployment=model or "")
        if server != "auto":
            if (known := SERVERS.find(server)) is None:
                raise WrongUse(
                    "unknown_name",
                    f"unknown server {server!r}",
                    f"known: {', '.join(server_names())}",
                )
            server_profile = server_profile or known
        self.policy = make_policy(**{name: given[name] for name in POLICY})
        self.target, self.model, self.server_profile = (
            target,
            model or "",
            server_profile or SERVER_PROFILES["generic"],
        )
        self.timeout_s, self._streams, self._tls = timeout_ns / 1e9, given["stream"], given["tls"]
        self._setting = CallSettings(
            self.policy,
            target.address,
            given["api_key"] or "",
            package="",
            timeout_s=self.timeout_s,
            url_secrets=target.secrets,
        )
        asked = {
            name: given[name] for name in ("server", "stream", "api_key", "headers", "extra_body")
        }
        self._probe_options = asked if server_profile is None or not model else None
        self.is_simulated = False  # True once a probe finds that a simulated server answers
        self._proxy = proxy_for(target, given["proxy"])
        self._opening = asyncio.Lock()
        keep_text, keep_headers = given["keep_text"], given["keep_headers"]
        sending = {name: given[name] for name in SendingOptions.__annotations__} | {
            "timeout_ns": timeout_ns,
            "stall_timeout_ns": stall_timeout_ns,
            "keep_text": given_url or given["keep_content"] if keep_text is None else keep_text,
            "keep_headers": given_url if keep_headers is None else keep_headers,
        }
        self._make_pool = partial(Pool, target, **sending, proxy=self._proxy)
        self._pool = self._make_pool(model=self.model, server_profile=self.server_profile)
        self._exchanges: set[Exchange] = set()  # of the calls in flight
        self._closed = False
        self._fallback = checked_fallback(given["fallback"], type, self)

    @property
    def in_flight(self) -> int:
        """The number of requests that were sent and have not ended."""
        return self._pool.in_flight

    def close(self) -> None:
        """Close every connection.

        Calls in flight end as `interrupted`; later ones raise ClientError.
        """
        self._closed = True
        for exchange in [*self._exchanges]:
            self._pool.cancel(exchange, Failure("interrupted", "the client was closed"))
        self._pool.close()

    async def open(self, connections: int = 0) -> None:
        """Probe the server if its model or kind is not known, resolve the host, and open this many
        connections.

        Raises TargetUnusable when no connection can be opened, or when the probe shows that no
        request can work.
        """
        self._check_usable()
        async with self._opening:
            if self._probe_options is not None:
                from ..probe.fetch import HttpFetcher
                from ..probe.probe import probe
                from ..probe.probe_client import ProbeOptions

                tls = (self._tls or Tls()).context() if self.target.tls else None
                fetcher = HttpFetcher(self.target, tls, timeout_s=self.timeout_s, proxy=self._proxy)
                result = await probe(
                    self.target,
                    send_request=fetcher.send_request,
                    connect=fetcher.connect,
                    options=ProbeOptions(model=self.model or None, **self._probe_options),
                )
                self._pool.close()
                self.model, self.server_profile, self._probe_options = (
                    result.model,
                    result.server_profile,
                    None,
                )
                self.is_simulated = result.simulated
                self._pool = self._make_pool(model=self.model, server_profile=self.server_profile)
            await self._pool.open(connections)

    async def __aenter__(self) -> Client:
        try:
            await self.open()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def stream(
        self, request: Askable, *, labels: Labels | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield the output events of a Request, a text or messages as they arrive.

        Opens the client if needed.

        Raises RequestFailed when the request is not ok, after the events that did arrive. A
        failure before the first event is retried as `retry` allows. Leaving the loop ends the
        request and its connection.
        """
        asked, fallback, delivered = as_request(request), self._fallback, False
        if fallback is None or fallback.circuit.admits(monotonic_ns()):
            try:
                async with aclosing(self._attempts(asked, labels, with_events=True)) as items:
                    async for item in items:
                        if isinstance(item, Event):
                            delivered = True
                            yield item
                        elif (failure := item.failure) is not None:
                            raise RequestFailed(failure.kind, failure.text, failure.http_status)
            except BaseException as error:
                if fallback is None or not fallback.takes_over(error, failure_of_client, delivered):
                    raise
            else:
                if fallback is not None:
                    fallback.circuit.answered()
                return
        async with aclosing(fallback.client.stream(asked, labels=labels)) as events:
            async for event in events:
                yield event

    async def complete(
        self, request: Askable, *, labels: Labels | None = None, raise_on_failure: bool = False
    ) -> Completion:
        """Send a request and wait for it. A failed request returns a Completion with its `failure`.

        raise_on_failure: raise RequestFailed instead. A failure is retried as `retry` allows, even
        in the middle of an answer, because no output was delivered. Raised in any case:
        TargetUnusable when the client cannot be opened, ThrottleTimeout, WrongUse for what cannot
        be asked, ClientError when the client is closed.
        """
        asked, fallback = as_request(request), self._fallback
        if fallback is None:
            completion = await self._complete(asked, labels)
        else:
            send = partial(self._complete, asked, labels)
            completion = await fallback.completed(
                send, partial(fallback.client.complete, asked, labels=labels)
            )
        if raise_on_failure and (failure := completion.failure) is not None:
            raise RequestFailed(failure.kind, failure.text, failure.http_status)
        return completion

    async def _complete(self, request: Request, labels: Labels | None) -> Completion:
        items = [item async for item in self._attempts(request, labels, with_events=False)]
        assert isinstance(items[-1], Completion)
        return items[-1]

    # -- the life of a call
    # --------------------------------------------------------------------------------------

    async def _attempts(
        self, request: Request, labels: Labels | None, *, with_events: bool
    ) -> AsyncGenerator[Event | Completion, None]:
        """Yield the output events, if they are wanted, of every attempt, and at last the
        Completion of the last one.
        """
        self._check_usable()
        prompt = {
            "messages": request.messages,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
        }
        call = Call(
            self._setting,
            self.target.api,
            self.model,
            {**request.extra, **prompt},
            streamed=self._streams,
            labels=labels,
        )
        wait_s = 0.0
        while True:
            await self._may_start(call, request, wait_s)
            queue: asyncio.Queue[Event | Completion] = asyncio.Queue()
            flow, completion, delivered = EventTimeline(), None, False
            call.instants = ()
            call.attempt_started = monotonic_ns()
            exchange = self._pool.send(
                request,
                self._pool.prepare(request),
                monotonic_ns(),
                queue.put_nowait,
                flow,
                sink=partial(_put_event, queue) if with_events else None,
            )
            self._exchanges.add(exchange)
            try:
                while completion is None:
                    item = await queue.get()
                    if isinstance(item, Completion):
                        completion = item
                    else:
                        delivered = True
                        yield item
            except BaseException as error:
                self._pool.cancel(exchange, _CALLER_LEFT)
                while (
                    completion is None
                ):  # `cancel` has queued it, behind the events that were not read
                    item = queue.get_nowait()
                    completion = item if isinstance(item, Completion) else None
                call.instants = flow.each_instant()
                self._abandoned(call, completion, error)
                raise
            finally:
                self._exchanges.discard(exchange)
            call.instants = flow.each_instant()
            headers, failure = completion.headers or {}, completion.failure
            if failure is None:
                call.head_received(headers)
                again_s = None
            else:  # its text may quote the key
                failure = Failure(
                    failure.kind, self._setting.redact(failure.text), failure.http_status
                )
                completion = msgspec.structs.replace(completion, failure=failure)
                again_s = call.attempt_failed(failure, headers, at=completion.done, final=delivered)
            if again_s is None:
                self._report(call, completion, "ok" if failure is None else "failed")
                yield completion
                return
            wait_s = again_s

    async def _may_start(self, call: Call, request: Request, wait_s: float) -> None:
        """Before an attempt: wait the back-off, open the client if it is not open, wait for the
        throttle.
        """
        try:
            if wait_s:
                await asyncio.sleep(wait_s)
            if not self._pool.is_open:
                await self.open()
            call.model = self.model
            if self.policy.throttle is not None:
                call.permit = await self.policy.throttle.acquire(
                    **call.throttle_arguments(self.timeout_s)
                )
                self._check_usable()
            if self.policy.budget is not None:
                booked = self.policy.budget.booker(False)(call.estimated_cost(), call.model)
                call.hold = await booked if isinstance(booked, Awaitable) else booked
        except BaseException as error:
            if call.permit is not None:
                call.permit.done(0)
            failed = isinstance(error, Exception)
            kinds = {ThrottleTimeout: "timeout_total", BudgetExceeded: "over_budget"}
            kind = kinds.get(type(error), "connect")
            failure = Failure(kind, self.target.redact(str(error))) if failed else _CALLER_LEFT
            call.report(
                "failed" if failed else "cancelled", failure, CallObservation(), done=monotonic_ns()
            )
            raise

    def _abandoned(self, call: Call, completion: Completion, error: BaseException) -> None:
        """The caller stopped waiting or reading: the call is cancelled, abandoned, or ok if it was
        complete.
        """
        if collecting():  # a generator that nobody reads any more: the code below may hold any lock
            later(partial(self._abandoned, call, completion, error))
            return
        call.head_received(completion.headers or {})
        cancelled = (
            isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
            and LOOP_LEFT not in error.args
        )
        left: Status = "cancelled" if cancelled else "abandoned"
        self._report(call, completion, "ok" if completion.failure is None else left)

    def _report(self, call: Call, completion: Completion, status: Status) -> None:
        text, tool_calls = completion.text or "", completion.tool_calls
        observed = CallObservation(
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
            choices=(
                Choice(text=text, finish_reason=completion.finish_reason, tool_calls=tool_calls),
            ),
        )
        call.report(status, completion.failure, observed, done=completion.done)

    def _check_usable(self) -> None:
        """Raises ClientError when this client is closed."""
        if self._closed:
            raise ClientError("this client is closed; make a new one")


def _signature() -> inspect.Signature:
    """What `help` and notebooks show and complete; type checkers read ClientOptions."""
    own, kinds = inspect.signature(Client.__init__), ClientOptions.__annotations__
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=kinds[name].__forward_arg__,
        )
        for name, default in DEFAULTS.items()
    ]
    return own.replace(parameters=[own.parameters["self"], own.parameters["target"], *options])


vars(Client.__init__)["__signature__"] = _signature()
