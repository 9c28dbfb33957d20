"""The client for applications. It throttles and measures calls, and retries them while no output was delivered.

One attempt is one `Pool.send`, the function that the load generator uses. This module adds throttle, retries and
measurements. Instants are the kernel's stamps.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from time import monotonic_ns, time_ns
from typing import Any, NamedTuple

from ..dialects.quirks import QUIRKS, Api, Quirk
from ..dialects.reader import Flow
from ..errors import ClientError, RequestFailed, ThrottleTimeout, WrongUse
from ..request import Completion, Failure, Request
from ..transport.pool import STALL_TIMEOUT_NS, TIMEOUT_NS, Pool
from ..transport.target import Target
from ..transport.wire import Tls, Wire
from .finishing import collecting, later
from .measurement import Attempt, Choice, Content, Prices, Status, from_completion, parameters_of
from .policy import CallStart, Observers, make_policy
from .prompt_text import estimated_tokens
from .rate_limit_headers import retry_after_s
from .retry import Retry
from .throttle import Permit, Throttle
from .trace_recorder import ShapeRecorder

LOOP_LEFT = "the loop over the stream was left"
"""Message of a cancellation that means: a caller in another thread left its loop. The call counts as abandoned."""

_CALLER_LEFT = Failure("interrupted", "the caller stopped listening")


class Event(NamedTuple):
    """One output event: its text, its reasoning text, and its arrival instant (monotonic ns)."""

    text: str
    reasoning: str
    at_ns: int


Askable = Request | str | Sequence[dict[str, Any]]
"""What `stream` and `complete` accept: a Request, a text, or the messages of a chat."""


Labels = Mapping[str, str | int] | None
"""Labels of one call, on top of those of the client and of the block that it is made in."""


def as_request(prompt: Askable) -> Request:
    """`prompt` as a Request; a text or messages get no limit on the output length. Raises WrongUse."""
    if isinstance(prompt, Request):
        return prompt
    request_id = secrets.token_hex(8)
    if isinstance(prompt, str):
        return Request(id=request_id, messages=[{"role": "user", "content": prompt}], exact_output=False)
    if (
        not isinstance(prompt, str)
        and isinstance(prompt, Sequence)
        and prompt
        and all(isinstance(message, dict) for message in prompt)
    ):
        return Request(id=request_id, messages=[*prompt], exact_output=False)
    raise WrongUse(f"cannot ask a {type(prompt).__name__}", 'give a text, messages ([{"role": …}]), or a Request')


async def stream(client: Client, request: Askable, labels: Labels = None) -> AsyncGenerator[Event, None]:
    """See `Client.stream`."""
    call = _Call(client, as_request(request), labels)
    while True:
        await call.begin()
        queue: asyncio.Queue[Event | Completion] = asyncio.Queue()

        def sink(text: str, reasoning: str, at: int, put: Any = queue.put_nowait) -> None:
            put(Event(text, reasoning, at))

        exchange = client.send(
            call.request, client.prepare(call.request), monotonic_ns(), queue.put_nowait, call.flow, sink=sink
        )
        completion, delivered = None, False
        try:
            while completion is None:
                item = await queue.get()
                if isinstance(item, Completion):
                    completion = item
                else:
                    delivered = True
                    yield item
        except BaseException as error:
            client.cancel(exchange, _CALLER_LEFT)
            while completion is None:  # `cancel` has queued it, behind the events that were not read
                item = queue.get_nowait()
                completion = item if isinstance(item, Completion) else None
            call.abandoned(completion, error)
            raise
        if call.attempt_ended(completion, delivered):
            if failure := completion.failure:
                raise RequestFailed(failure.kind, failure.text, failure.http_status)
            return


async def complete(client: Client, request: Askable, labels: Labels = None) -> Completion:
    """See `Client.complete`."""
    call = _Call(client, as_request(request), labels)
    while True:
        await call.begin()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        def done(completion: Completion, future: asyncio.Future[Completion] = future) -> None:
            if not future.done():
                future.set_result(completion)
            elif future.cancelled():
                call.abandoned(completion, asyncio.CancelledError())

        exchange = client.send(call.request, client.prepare(call.request), monotonic_ns(), done, call.flow)
        try:
            completion = await future
        except BaseException:
            client.cancel(exchange, _CALLER_LEFT)
            raise
        if call.attempt_ended(completion, False):
            return completion


class _Call:
    """One call: its attempts so far and, at its end, its measurement."""

    def __init__(self, client: Client, request: Request, labels: Labels) -> None:
        client.check_usable()
        self.started, self.started_unix_ns = monotonic_ns(), time_ns()
        self.client, self.request, self.policy = client, request, client.policy
        self.context = copy_context() if self.policy.observers else None
        self.arguments = {"messages": request.messages, "prompt": request.prompt, "max_tokens": request.max_tokens}
        self.labels = self.policy.labels_of(labels)
        self.parameters = parameters_of({**request.extra, **self.arguments})
        self.spans: tuple[Any, ...] = ()
        if self.policy.follows_calls:
            self.spans = self.policy.begin(
                CallStart(
                    client.target.api, client.model, client.streams, client.target.address, self.started_unix_ns,
                    self.parameters, self.labels,
                )
            )  # fmt: skip
        record = self.policy.record
        self.call_shape = record.begin(self.started, self.arguments) if record is not None else None
        if self.policy.retry is not None:
            self.policy.retry.begun()
        self.attempts: list[Attempt] = []
        self.attempt_started = self.started
        self.permit: Permit | None = None
        self.wait_s = 0.0  # before the next attempt
        self.flow = Flow()

    async def begin(self) -> None:
        """Before an attempt: wait the back-off, open the client if it is not open, wait for the throttle."""
        try:
            if self.wait_s:
                await asyncio.sleep(self.wait_s)
            if not self.client.is_open:
                await self.client.open()
            throttle = self.policy.throttle
            if throttle is not None:
                tokens, output = estimated_tokens(self.arguments) if throttle.counts_tokens else (0, 0)
                self.permit = await throttle.acquire(
                    key=self.client.key,
                    model=self.client.model,
                    tokens=tokens,
                    output_tokens=output,
                    max_wait_s=self.client.timeout_s,
                )
                self.client.check_usable()
        except BaseException as error:
            if self.permit is not None:
                self.permit.done(0)
            is_failure = isinstance(error, Exception)
            kind = "timeout_total" if isinstance(error, ThrottleTimeout) else "connect"
            failure = Failure(kind, self.client.target.redact(str(error))) if is_failure else _CALLER_LEFT
            unsent = Completion(request=self.request, due=self.started, done=monotonic_ns(), failure=failure)
            self._report(unsent, "failed" if is_failure else "cancelled")
            raise
        self.flow = Flow()
        self.attempt_started = monotonic_ns()

    def attempt_ended(self, completion: Completion, delivered: bool) -> bool:
        """An attempt has ended. Returns whether the call has ended too (it is then reported); else there is another."""
        failure, headers = completion.failure, completion.headers or {}
        refused = failure is not None and failure.http_status in (429, 503)
        self._release_permit(completion, refused)
        wait_s = None
        if failure is not None and self.policy.retry is not None:
            server_wait_s = retry_after_s(headers)
            attempts_made = len(self.attempts) + 1
            wait_s = self.policy.retry.wait_s(attempts_made, failure, asked_s=server_wait_s, delivered=delivered)
        waited_ns = 0 if wait_s is None else int(wait_s * 1e9)
        self.attempts.append(
            Attempt(started=self.attempt_started, ended=completion.done, failure=failure, waited_ns=waited_ns)
        )
        self.wait_s = wait_s or 0.0
        if wait_s is None:
            self._report(completion, "ok" if failure is None else "failed")
        return wait_s is None

    def abandoned(self, completion: Completion, error: BaseException) -> None:
        """The caller stopped waiting or reading: report the call as cancelled, abandoned, or ok if it was complete."""
        if collecting():  # a generator that nobody reads any more: the code below may hold any lock
            later(partial(self.abandoned, completion, error))
            return
        self._release_permit(completion, False)
        failure = completion.failure
        self.attempts.append(Attempt(started=self.attempt_started, ended=completion.done, failure=failure))
        cancelled = isinstance(error, asyncio.CancelledError | KeyboardInterrupt) and LOOP_LEFT not in error.args
        status: Status = "ok" if failure is None else "cancelled" if cancelled else "abandoned"
        self._report(completion, status)

    def _release_permit(self, completion: Completion, refused: bool) -> None:
        permit, self.permit = self.permit, None
        if permit is None:
            return
        permit.heed(completion.headers or {}, refused=refused)
        usage = completion.usage
        usage_known = usage.input is not None and usage.output is not None
        permit.done((usage.input or 0) + (usage.output or 0) if usage_known else 0 if refused else None, usage.output)

    def _report(self, completion: Completion, status: Status) -> None:
        client, policy, request = self.client, self.policy, self.request
        content = None
        if policy.keep_content:
            sent = request.messages if request.messages is not None else request.prompt
            text = completion.text or ""
            choice = Choice(text=text, finish_reason=completion.finish_reason, tool_calls=completion.tool_calls)
            content = Content(input=sent, output=text, choices=(choice,))
        measurement = from_completion(
            completion,
            api=client.target.api,
            streamed=client.streams,
            status=status,
            started=self.started,
            started_unix_ns=self.started_unix_ns,
            instants=tuple(self.flow.instants),
            attempts=tuple(self.attempts),
            model=client.model,
            server=client.target.address,
            prices=policy.prices,
            content=content,
            labels=self.labels,
            parameters=self.parameters,
            keep_text=policy.keep_content,
        )
        policy.tell(measurement, self.context, self.call_shape, self.spans)


class Client(Pool):
    """One endpoint, one model, one API. Create it in a running event loop; its first call opens it.

    `target` is a URL, or a parsed Target. With a URL, texts and headers are kept by default. If model or server are
    not given, a probe finds them when the client opens. `stream` and `complete` are throttled, retried and measured by
    `on_measurement`, `prices`, `throttle`, `retry`, `record`, `keep_content` and `labels` (see `instrument`). timeout_s
    and stall_timeout_s limit a call, and the time between two of its events; `timeout_ns` and `stall_timeout_ns` are
    the same in nanoseconds. All other parameters are those of `Pool`. It connects directly: proxies are not used.
    """

    def __init__(
        self,
        target: Target | str,
        *,
        model: str | None = None,
        quirk: Quirk | None = None,
        api: Api = "chat",
        server: str = "auto",
        stream: bool = True,
        api_key: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        extra_body: Mapping[str, Any] | None = None,
        timeout_ns: int = TIMEOUT_NS,
        stall_timeout_ns: int = STALL_TIMEOUT_NS,
        tls: Tls | None = None,
        keep_text: bool | None = None,
        keep_headers: bool | None = None,
        continuous_usage: bool = False,
        ahead: bool = False,
        sources: Sequence[str] = (),
        wire: Wire | None = None,
        on_measurement: Observers = None,
        prices: Prices = None,
        throttle: Throttle | None = None,
        retry: Retry | None = None,
        record: ShapeRecorder | None = None,
        keep_content: bool = False,
        labels: Labels = None,
        timeout_s: float | None = None,
        stall_timeout_s: float | None = None,
    ) -> None:
        for name, seconds in (("timeout_s", timeout_s), ("stall_timeout_s", stall_timeout_s)):
            if seconds is not None and not (isinstance(seconds, int | float) and 0 < seconds < 1e9):
                raise WrongUse(f"{name}={seconds!r}", "give seconds, above 0")
        timeout_ns = timeout_ns if timeout_s is None else int(timeout_s * 1e9)
        stall_timeout_ns = stall_timeout_ns if stall_timeout_s is None else int(stall_timeout_s * 1e9)
        given_url = isinstance(target, str)
        if isinstance(target, str):
            target = Target.parse(target, api=api, server=None if server == "auto" else server, deployment=model or "")
        if server != "auto":
            if server not in QUIRKS:
                raise WrongUse(f"unknown server {server!r}", f"known: auto, {', '.join(QUIRKS)}")
            quirk = quirk or QUIRKS[server]
        self._probe_arguments = (server, api_key, headers) if quirk is None or not model else None
        self.policy = make_policy(on_measurement, prices, throttle, retry, record, keep_content, labels)
        super().__init__(
            target,
            model=model or "",
            quirk=quirk or QUIRKS["generic"],
            stream=stream,
            api_key=api_key,
            headers=headers,
            extra_body=extra_body,
            timeout_ns=timeout_ns,
            stall_timeout_ns=stall_timeout_ns,
            tls=tls,
            keep_text=given_url or keep_content if keep_text is None else keep_text,
            keep_headers=given_url if keep_headers is None else keep_headers,
            continuous_usage=continuous_usage,
            ahead=ahead,
            sources=sources,
            wire=wire,
        )
        self.key = api_key or ""
        self.streams = stream
        self.timeout_s = timeout_ns / 1e9
        self._closed = False

    def check_usable(self) -> None:
        """Raises ClientError when this client is closed."""
        if self._closed:
            raise ClientError("this client is closed; make a new one")

    def close(self) -> None:
        """Close every connection. Calls in flight end as `interrupted`; later ones raise ClientError."""
        self._closed = True
        for exchange in [*self._by_due]:
            if not exchange.over:
                self.cancel(exchange, Failure("interrupted", "the client was closed"))
        super().close()

    async def open(self, connections: int = 0) -> None:
        """Probe the server if its model or kind is not known, resolve the host, and open this many connections.

        Raises TargetUnusable when no connection can be opened, or when the probe shows that no request can work.
        """
        self.check_usable()
        if self._probe_arguments is not None:
            await self._probe(*self._probe_arguments)
        await super().open(connections)

    async def _probe(self, server: str, api_key: str | None, headers: tuple[tuple[str, str], ...]) -> None:
        from ..probe.fetch import Fetcher
        from ..probe.probe import probe

        fetcher = Fetcher(self.target, self._tls)
        result = await probe(
            self.target,
            exchange=fetcher.exchange,
            connect=fetcher.connect,
            model=self.model or None,
            server=server,
            stream=self._streaming,
            api_key=api_key,
            headers=headers,
            extra_body=self._extra_body,
        )
        self.model, self.quirk = result.model, result.quirk
        self._reuse_ns = int(result.quirk.reuse_s * 1e9)
        self._probe_arguments = None

    async def __aenter__(self) -> Client:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def stream(self, request: Askable, *, labels: Labels = None) -> AsyncGenerator[Event, None]:
        """Yield the output events of a Request, a text or messages as they arrive. Opens the client if needed.

        Raises RequestFailed when the request is not ok, after the events that did arrive. A failure before the first
        event is retried as `retry` allows. Leaving the loop ends the request and its connection.
        """
        events = stream(self, request, labels)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def complete(self, request: Askable, *, labels: Labels = None, raise_on_failure: bool = False) -> Completion:
        """Send a request and wait for it. A failed request returns a Completion with its `failure`.

        raise_on_failure: raise RequestFailed instead. A failure is retried as `retry` allows, even in the middle of an
        answer, because no output was delivered. Raised in any case: TargetUnusable when the client cannot be opened,
        ThrottleTimeout, WrongUse for what cannot be asked, ClientError when the client is closed.
        """
        completion = await complete(self, request, labels)
        if raise_on_failure and (failure := completion.failure) is not None:
            raise RequestFailed(failure.kind, failure.text, failure.http_status)
        return completion
