"""The client of an application: its calls, throttled, retried while nothing was delivered, and measured.

One attempt is `Pool.send`, the generator's own way; here is only what stands around it. Instants are the kernel's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextvars import copy_context
from time import monotonic_ns, time_ns
from typing import Any, NamedTuple

from ..dialects.quirks import QUIRKS, Api, Quirk
from ..dialects.reader import Flow
from ..errors import RequestFailed, WrongUse
from ..request import Completion, Failure, Request
from ..transport.pool import STALL_TIMEOUT_NS, TIMEOUT_NS, Pool
from ..transport.target import Target
from ..transport.wire import Tls, Wire
from .measurement import Attempt, Content, Prices, Status, from_completion
from .policy import Observers, conduct
from .prompt_text import estimated_tokens
from .retry import Retry, retry_after_s
from .throttle import Permit, Throttle
from .trace_recorder import ShapeRecorder

LEFT = "the loop over the stream was left"
"""The message of a cancellation that is no wish of the application's, but how another thread leaves a loop."""

_LEFT = Failure("interrupted", "the caller stopped listening")


class Event(NamedTuple):
    """One output event as an application sees it: its text, its reasoning text, and when it arrived (monotonic ns)."""

    text: str
    reasoning: str
    at_ns: int


Askable = Request | str | Sequence[dict[str, Any]]
"""What can be asked: a whole Request, a text, or the messages of a chat."""


def as_request(asked: Askable) -> Request:
    """`asked` as a Request; a text or messages without a limit on the answer's length. Raises WrongUse."""
    if isinstance(asked, Request):
        return asked
    name = secrets.token_hex(8)
    if isinstance(asked, str):
        return Request(id=name, messages=[{"role": "user", "content": asked}], exact_output=False)
    if (
        not isinstance(asked, str)
        and isinstance(asked, Sequence)
        and asked
        and all(isinstance(message, dict) for message in asked)
    ):
        return Request(id=name, messages=[*asked], exact_output=False)
    raise WrongUse(f"cannot ask a {type(asked).__name__}", 'give a text, messages ([{"role": …}]), or a Request')


async def stream(client: Client, asked: Askable) -> AsyncGenerator[Event, None]:
    """See `Client.stream`."""
    call = _Call(client, as_request(asked))
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
            client.cancel(exchange, _LEFT)
            while completion is None:  # there is one now, behind whatever was not listened to
                item = queue.get_nowait()
                completion = item if isinstance(item, Completion) else None
            call.given_up(completion, error)
            raise
        if call.ended(completion, delivered):
            if failure := completion.failure:
                raise RequestFailed(failure.kind, failure.text, failure.http_status)
            return


async def complete(client: Client, asked: Askable) -> Completion:
    """See `Client.complete`."""
    call = _Call(client, as_request(asked))
    while True:
        await call.begin()
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        def done(completion: Completion, future: asyncio.Future[Completion] = future) -> None:
            if not future.done():
                future.set_result(completion)
            elif future.cancelled():
                call.given_up(completion, asyncio.CancelledError())

        exchange = client.send(call.request, client.prepare(call.request), monotonic_ns(), done, call.flow)
        try:
            completion = await future
        except BaseException:
            client.cancel(exchange, _LEFT)
            raise
        if call.ended(completion, False):
            return completion


class _Call:
    """One call: its attempts so far, and its one measurement at the end."""

    def __init__(self, client: Client, request: Request) -> None:
        self.started, self.started_unix_ns = monotonic_ns(), time_ns()
        self.client, self.request, self.manner = client, request, client.conduct
        self.context = copy_context() if self.manner.observers else None
        self.arguments = {"messages": request.messages, "prompt": request.prompt, "max_tokens": request.max_tokens}
        record = self.manner.record
        self.sighting = record.begin(self.started, self.arguments) if record is not None else None
        if self.manner.retry is not None:
            self.manner.retry.begun()
        self.attempts: list[Attempt] = []
        self.attempt_started = self.started
        self.permit: Permit | None = None
        self.wait_s = 0.0  # before the next attempt
        self.flow = Flow()

    async def begin(self) -> None:
        """Before an attempt: back off after the last one, open the client if nobody has, wait for the throttle."""
        try:
            if self.wait_s:
                await asyncio.sleep(self.wait_s)
            if not self.client.is_open:
                await self.client.open()
            throttle = self.manner.throttle
            if throttle is not None:
                tokens = estimated_tokens(self.arguments) if throttle.counts_tokens else 0
                self.permit = await throttle.acquire(key=self.client.key, model=self.client.model, tokens=tokens)
        except BaseException as error:
            unusable = isinstance(error, Exception)
            failure = Failure("connect", self.client.target.redact(str(error))) if unusable else _LEFT
            never = Completion(request=self.request, due=self.started, done=monotonic_ns(), failure=failure)
            self._tell(never, "failed" if unusable else "cancelled")
            raise
        self.flow = Flow()
        self.attempt_started = monotonic_ns()

    def ended(self, completion: Completion, delivered: bool) -> bool:
        """An attempt is over, and with it the call, which is then told of; else there is to be another one."""
        failure, headers = completion.failure, completion.headers or {}
        refused = failure is not None and failure.http_status in (429, 503)
        self._give_back(completion, refused)
        wait_s = None
        if failure is not None and self.manner.retry is not None:
            asked = retry_after_s(headers)
            made = len(self.attempts) + 1
            wait_s = self.manner.retry.wait_s(made, failure, asked_s=asked, delivered=delivered)
        waited = 0 if wait_s is None else int(wait_s * 1e9)
        self.attempts.append(
            Attempt(started=self.attempt_started, ended=completion.done, failure=failure, waited_ns=waited)
        )
        self.wait_s = wait_s or 0.0
        if wait_s is None:
            self._tell(completion, "ok" if failure is None else "failed")
        return wait_s is None

    def given_up(self, completion: Completion, error: BaseException) -> None:
        """The caller has left."""
        self._give_back(completion, False)
        failure = completion.failure
        self.attempts.append(Attempt(started=self.attempt_started, ended=completion.done, failure=failure))
        cancelled = isinstance(error, asyncio.CancelledError | KeyboardInterrupt) and LEFT not in error.args
        status: Status = "ok" if failure is None else "cancelled" if cancelled else "abandoned"
        self._tell(completion, status)

    def _give_back(self, completion: Completion, refused: bool) -> None:
        permit, self.permit = self.permit, None
        if permit is None:
            return
        permit.heed(completion.headers or {}, refused=refused)
        usage = completion.usage
        known = usage.input is not None and usage.output is not None
        permit.done((usage.input or 0) + (usage.output or 0) if known else 0 if refused else None)

    def _tell(self, completion: Completion, status: Status) -> None:
        client, manner, request = self.client, self.manner, self.request
        content = None
        if manner.keep_content:
            sent = request.messages if request.messages is not None else request.prompt
            content = Content(input=sent, output=completion.text or "")
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
            prices=manner.prices,
            content=content,
        )
        manner.tell(measurement, self.context, self.sighting)


class Client(Pool):
    """One endpoint, one model, one API. Create it inside a running event loop; it opens with its first call.

    Give a URL: what is not said of model and server is found out by a probe when it opens, texts and headers are kept,
    and `stream` and `complete` are throttled, retried and measured as `on_measurement`, `prices`, `throttle`, `retry`,
    `record` and `keep_content` say (see `instrument`). The rest is as in `Pool`.
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
    ) -> None:
        by_url = isinstance(target, str)
        if isinstance(target, str):
            target = Target.parse(target, api=api, server=None if server == "auto" else server, deployment=model or "")
        if server != "auto":
            if server not in QUIRKS:
                raise WrongUse(f"unknown server {server!r}", f"known: auto, {', '.join(QUIRKS)}")
            quirk = quirk or QUIRKS[server]
        self._unknown = (server, api_key, headers) if quirk is None or not model else None
        self.conduct = conduct(on_measurement, prices, throttle, retry, record, keep_content)
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
            keep_text=by_url if keep_text is None else keep_text,
            keep_headers=by_url if keep_headers is None else keep_headers,
            continuous_usage=continuous_usage,
            ahead=ahead,
            sources=sources,
            wire=wire,
        )
        self.key = api_key or ""
        self.streams = stream

    async def open(self, connections: int = 0) -> None:
        """Resolve the host, find out what nobody said of it, and open this many connections.

        Raises TargetUnusable when none can be opened, or the probe finds that nothing can work.
        """
        if self._unknown is not None:
            await self._learn(*self._unknown)
        await super().open(connections)

    async def _learn(self, server: str, api_key: str | None, headers: tuple[tuple[str, str], ...]) -> None:
        from ..probe.fetch import Fetcher
        from ..probe.probe import probe

        direct = Fetcher(self.target, self._tls)
        found = await probe(
            self.target,
            exchange=direct.exchange,
            connect=direct.connect,
            model=self.model or None,
            server=server,
            stream=self._stream_on,
            api_key=api_key,
            headers=headers,
            extra_body=self._extra_body,
        )
        self.model, self.quirk = found.model, found.quirk
        self._reuse_ns = int(found.quirk.reuse_s * 1e9)
        self._unknown = None

    async def __aenter__(self) -> Client:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def stream(self, request: Askable) -> AsyncGenerator[Event, None]:
        """Output events as they arrive, of a Request, a text or messages; opens the client when nobody has.

        Raises RequestFailed when the request is not ok, after what did arrive. A failure before the first event is
        retried as `retry` allows. Leaving the loop ends the request and its connection.
        """
        events = stream(self, request)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def complete(self, request: Askable) -> Completion:
        """Send and wait; a request that fails comes back as a Completion with its `failure`, not as an exception.

        A failure is retried as `retry` allows, even one that came in the middle: nothing of it was delivered.
        """
        return await complete(self, request)
