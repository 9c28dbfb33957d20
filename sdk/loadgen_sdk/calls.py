"""An application's calls through the project's own client: throttled, retried while nothing was delivered, measured.

One attempt is `Client.send`, the generator's own way; here is only what stands around it. Instants are the kernel's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextvars import copy_context
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from .conduct import estimated_tokens
from .dialects.reader import Flow
from .errors import RequestFailed, WrongUse
from .measurement import Attempt, Content, Status, from_completion
from .request import Completion, Failure, Request
from .retry import retry_after_s

if TYPE_CHECKING:
    from .client import Client
    from .throttle import Permit

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
