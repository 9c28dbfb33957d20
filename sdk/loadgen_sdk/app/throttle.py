"""Keeps calls below a provider's limits: requests and tokens per time, concurrent calls, per key and per model.

`Gate` is the core without IO: given the time, it grants a call or returns when to ask again. `Throttle` does the
waiting, for tasks and threads (one object may serve both), in the order of arrival.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from time import monotonic_ns
from typing import Any, Literal, NamedTuple

from ..errors import WrongUse
from .retry import retry_after_s

FOREVER = 1 << 62
_PERIODS_NS = {"s": 10**9, "sec": 10**9, "second": 10**9, "min": 60 * 10**9, "minute": 60 * 10**9, "m": 60 * 10**9,
               "h": 3600 * 10**9, "hour": 3600 * 10**9}  # fmt: skip
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")


class Rate(NamedTuple):
    """At most `limit` (requests or tokens) within any interval of `period_ns`."""

    limit: float
    period_ns: int


def rate(text: str | int | float, what: str) -> Rate:
    """Parse `10/s` or `600/min`; a bare number is per minute, as providers state limits. Raises WrongUse."""
    hint = f'{what}="600/min", or "10/s"'
    amount, slash, unit = str(text).partition("/")
    period = _PERIODS_NS.get(unit.strip()) if slash else _PERIODS_NS["min"]
    try:
        limit = float(amount.replace(",", "").replace("_", ""))
    except ValueError:
        limit = math.nan
    if period is None or math.isnan(limit):
        raise WrongUse(f"{what}={text!r} is no rate", hint)
    if limit <= 0 or math.isinf(limit):
        raise WrongUse(f"{what}={text!r} would let nothing through" if limit <= 0 else f"{what}=inf limits nothing",
                       hint + ", or leave it out")  # fmt: skip
    if limit < 1 and what == "requests":  # the window must have room for one request
        return Rate(1.0, round(period / limit))
    return Rate(limit, period)


class _Window:
    """The amounts booked within the last period. A booked amount can be corrected later."""

    __slots__ = ("_entries", "_rate", "_sum")

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._entries: deque[list[float]] = deque()
        self._sum = 0.0

    def free_at(self, now: int, amount: float) -> int:
        """The instant at which `amount` more is allowed. An amount above the limit waits for an empty window."""
        entries, period = self._entries, self._rate.period_ns
        while entries and entries[0][0] + period <= now:
            self._sum -= entries.popleft()[1]
        free = self._rate.limit - self._sum
        if amount <= free or not entries:
            return now
        for booked_at, booked in entries:
            free += booked
            if amount <= free:
                return int(booked_at) + period
        return int(entries[-1][0]) + period

    def book(self, now: int, amount: float) -> list[float]:
        entry = [float(now), float(amount)]
        self._entries.append(entry)
        self._sum += amount
        return entry

    def correct(self, entry: list[float], amount: float) -> None:
        if self._entries and entry[0] >= self._entries[0][0]:  # else it has already left the window
            self._sum += amount - entry[1]
            entry[1] = float(amount)


class Gate:
    """The limits of one key and model, without IO. Instants are monotonic ns. Not thread-safe: `Throttle` locks it."""

    __slots__ = (
        "_cap",
        "_in_flight",
        "_paused_until",
        "_requests",
        "_server_reset_at",
        "_server_tokens_left",
        "_tokens",
    )

    def __init__(self, requests: Rate | None, tokens: Rate | None, concurrency: int | None) -> None:
        self._requests = _Window(requests) if requests else None
        self._tokens = _Window(tokens) if tokens else None
        self._cap = concurrency or FOREVER
        self._in_flight = 0
        self._paused_until = 0  # the server asked for no call before this instant
        self._server_tokens_left: float | None = None  # tokens left by the server's count, until `_server_reset_at`
        self._server_reset_at = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def ask(self, now: int, tokens: float) -> int:
        """0: granted (nothing is booked yet). Else the instant at which to ask again; FOREVER: when a call ends."""
        if self._in_flight >= self._cap:
            return FOREVER
        grant_at = max(now, self._paused_until)
        if self._requests:
            grant_at = max(grant_at, self._requests.free_at(now, 1))
        if self._tokens:
            grant_at = max(grant_at, self._tokens.free_at(now, tokens))
        if self._server_tokens_left is not None and tokens > self._server_tokens_left and now < self._server_reset_at:
            grant_at = max(grant_at, self._server_reset_at)
        return 0 if grant_at <= now else grant_at

    def enter(self, now: int, tokens: float) -> list[float] | None:
        """Book a granted call. Returns the entry to pass to `leave`."""
        self._in_flight += 1
        if self._requests:
            self._requests.book(now, 1)
        if self._server_tokens_left is not None:
            self._server_tokens_left -= tokens
        return self._tokens.book(now, tokens) if self._tokens else None

    def leave(self, entry: list[float] | None, tokens: float | None) -> None:
        """A call has ended. `tokens`: what it used (None: keep the estimate)."""
        self._in_flight -= 1
        if self._tokens and entry is not None and tokens is not None:
            self._tokens.correct(entry, tokens)

    def heed(self, now: int, headers: Mapping[str, str], refused: bool) -> None:
        """Apply a response's headers: `Retry-After` if the call was `refused`, and the x-ratelimit-* headers."""
        if refused and (server_wait_s := retry_after_s(headers)) is not None:
            self._paused_until = max(self._paused_until, now + int(server_wait_s * 1e9))
        remaining, reset = headers.get("x-ratelimit-remaining-requests"), headers.get("x-ratelimit-reset-requests")
        if remaining is not None and reset is not None and _number(remaining, 1) <= 0:
            self._paused_until = max(self._paused_until, now + _duration_ns(reset))
        remaining, reset = headers.get("x-ratelimit-remaining-tokens"), headers.get("x-ratelimit-reset-tokens")
        if remaining is not None and reset is not None:
            self._server_tokens_left, self._server_reset_at = _number(remaining, math.inf), now + _duration_ns(reset)


class Permit:
    """Permission to make one call, from `Throttle`. `done` returns it."""

    __slots__ = ("_entry", "_gate_queue", "_obey", "over")

    def __init__(self, gate_queue: _GateQueue, entry: list[float] | None, obey: bool) -> None:
        self._gate_queue, self._entry, self._obey, self.over = gate_queue, entry, obey, False

    def heed(self, headers: Mapping[str, str], *, refused: bool = False) -> None:
        """Apply the headers of the response. refused: the status is 429 or 503; its Retry-After holds for all calls."""
        if self._obey:
            with self._gate_queue.lock:
                self._gate_queue.gate.heed(monotonic_ns(), headers, refused)

    def done(self, tokens: int | None = None) -> None:
        """The call is over. tokens: what it really used, to correct the estimate. May be called twice."""
        if self.over:
            return
        self.over = True
        gate_queue = self._gate_queue
        with gate_queue.lock:
            gate_queue.gate.leave(self._entry, tokens)
            gate_queue.wake_first()


class _GateQueue:
    """A gate and the callers that wait for it, in order of arrival."""

    __slots__ = ("_obey", "gate", "lock", "queue")

    def __init__(self, gate: Gate, obey: bool) -> None:
        self.gate, self._obey = gate, obey
        self.lock = threading.Lock()
        self.queue: deque[Callable[[], object]] = deque()  # each function wakes one waiting caller

    def wake_first(self) -> None:
        """Wake the first waiting caller, which then tries again."""
        if self.queue:
            self.queue[0]()

    def try_enter(self, wake_waiter: Callable[[], object], tokens: float) -> Permit | int:
        """The permit for the caller that `wake_waiter` wakes, or the most ns to wait before the next try."""
        with self.lock:
            if wake_waiter not in self.queue:
                self.queue.append(wake_waiter)
            if self.queue[0] is not wake_waiter:
                return FOREVER
            now = monotonic_ns()
            retry_at = self.gate.ask(now, tokens)
            if retry_at:
                return retry_at - now if retry_at != FOREVER else FOREVER
            self.queue.popleft()
            entry = self.gate.enter(now, tokens)
            self.wake_first()
            return Permit(self, entry, self._obey)

    def remove(self, wake_waiter: Callable[[], object]) -> None:
        """A caller stopped waiting: take it out of the queue."""
        with self.lock:
            first = bool(self.queue) and self.queue[0] is wake_waiter
            if wake_waiter in self.queue:
                self.queue.remove(wake_waiter)
            if first:
                self.wake_first()


class Throttle:
    """Limits for the calls of one or several clients.

    requests, tokens: "600/min", "10/s" (a bare number is per minute), within any interval of that length. `requests`
    may be an `asyncio_throttle.Throttler` that the application already shares (async clients only). Tokens are booked
    by an estimate before a call and corrected when it ends. concurrency: most calls in flight. per: the limits are
    counted separately for each key, model or both; () counts all calls together. obey: also wait as the server's
    Retry-After (after a 429 or 503) and x-ratelimit-* headers ask. Raises WrongUse for limits that allow no call.
    """

    def __init__(
        self,
        *,
        requests: Any = None,
        tokens: str | int | float | None = None,
        concurrency: int | None = None,
        per: tuple[Literal["key", "model"], ...] = ("key", "model"),
        obey: bool = True,
    ) -> None:
        is_throttler = hasattr(requests, "acquire") and hasattr(requests, "rate_limit")
        self._throttler: Any = requests if is_throttler else None
        if is_throttler and not requests.rate_limit > 0:
            raise WrongUse(f"a Throttler of {requests.rate_limit} would let nothing through", "give it a rate above 0")
        self._requests = None if requests is None or is_throttler else rate(requests, "requests")
        self._tokens = None if tokens is None else rate(tokens, "tokens")
        if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
            raise WrongUse(f"concurrency={concurrency!r} would let nothing through", "at least 1, or leave it out")
        if isinstance(per, str) or not set(per) <= {"key", "model"}:
            raise WrongUse(f"per={per!r}", 'a tuple of "key" and "model"')
        self._cap, self._per, self._obey = concurrency, tuple(per), obey
        self._gate_queues: dict[tuple[str, ...], _GateQueue] = {}
        self._lock = threading.Lock()

    @property
    def counts_tokens(self) -> bool:
        """Whether `acquire` needs an estimate of the tokens of a call."""
        return self._tokens is not None or self._obey

    def in_flight(self, *, key: str = "", model: str = "") -> int:
        """The number of calls in flight for this key and model."""
        return self._gate_queue(key, model).gate.in_flight

    async def acquire(self, *, key: str = "", model: str = "", tokens: float = 0) -> Permit:
        """Wait until a call of about `tokens` tokens is allowed. A cancelled wait loses its place in the queue."""
        if self._throttler is not None:
            await self._throttler.acquire()
        gate_queue, loop = self._gate_queue(key, model), asyncio.get_running_loop()
        event = asyncio.Event()

        def wake_waiter() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

        answer = gate_queue.try_enter(wake_waiter, tokens)
        try:
            while not isinstance(answer, Permit):
                try:
                    async with asyncio.timeout(None if answer == FOREVER else answer / 1e9):
                        await event.wait()
                except TimeoutError:
                    pass
                event.clear()
                answer = gate_queue.try_enter(wake_waiter, tokens)
        except BaseException:
            gate_queue.remove(wake_waiter)
            raise
        return answer

    def acquire_blocking(self, *, key: str = "", model: str = "", tokens: float = 0) -> Permit:
        """`acquire` for a thread. Raises WrongUse when requests are limited by an asyncio Throttler."""
        if self._throttler is not None:
            raise WrongUse("an asyncio Throttler cannot make a thread wait", 'give requests="10/s" instead')
        gate_queue = self._gate_queue(key, model)
        event = threading.Event()
        wake_waiter = event.set
        answer = gate_queue.try_enter(wake_waiter, tokens)
        try:
            while not isinstance(answer, Permit):
                event.wait(None if answer == FOREVER else answer / 1e9)
                event.clear()
                answer = gate_queue.try_enter(wake_waiter, tokens)
        except BaseException:
            gate_queue.remove(wake_waiter)
            raise
        return answer

    @asynccontextmanager
    async def slot(self, *, key: str = "", model: str = "", tokens: float = 0) -> AsyncIterator[Permit]:
        """`async with throttle.slot(tokens=900) as permit:`; call `permit.done(tokens=...)` inside to correct it."""
        permit = await self.acquire(key=key, model=model, tokens=tokens)
        try:
            yield permit
        finally:
            permit.done()

    @contextmanager
    def slot_blocking(self, *, key: str = "", model: str = "", tokens: float = 0) -> Iterator[Permit]:
        """`slot` for a thread."""
        permit = self.acquire_blocking(key=key, model=model, tokens=tokens)
        try:
            yield permit
        finally:
            permit.done()

    def _gate_queue(self, key: str, model: str) -> _GateQueue:
        values = {"key": key, "model": model}
        key_values = tuple(values[name] for name in self._per)
        with self._lock:
            gate_queue = self._gate_queues.get(key_values)
            if gate_queue is None:
                gate_queue = self._gate_queues[key_values] = _GateQueue(
                    Gate(self._requests, self._tokens, self._cap), self._obey
                )
            return gate_queue


def _number(text: str, default: float) -> float:
    try:
        return float(text)
    except ValueError:
        return default


def _duration_ns(text: str) -> int:
    """`6m0s`, `20ms`, `1.5s` or a bare number of seconds, in ns; 0 when it cannot be parsed."""
    match = _DURATION.fullmatch(text.strip())
    if match and any(match.groups()):
        hours, minutes, seconds, millis = (float(group or 0) for group in match.groups())
        return round((hours * 3600 + minutes * 60 + seconds) * 1e9 + millis * 1e6)
    return max(0, round(_number(text, 0) * 1e9))
