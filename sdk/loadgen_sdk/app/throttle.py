"""Keeps calls below a provider's limits: requests and tokens per time, concurrent calls, per key and per model.

`Gate` is the core without IO: given the time, it grants a call or returns when to ask again. `Throttle` does the
waiting, for tasks and threads (one object may serve both): by priority, then in the order of arrival. Limits that
several processes share are kept in a file (`shared_limits`).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import os
import re
import threading
import weakref
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from itertools import count
from time import monotonic_ns, time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import ThrottleTimeout, WrongUse
from .finishing import collecting, later
from .retry import EPOCH_S, retry_after_s

if TYPE_CHECKING:
    from .shared_limits import SharedLimits

log = logging.getLogger("loadgen_sdk")

FOREVER = 1 << 62
LONGEST_OBEYED_S = 60.0  # a server that asks for a longer pause is asked again after this time
AGING_S = 10.0  # one step of priority overtakes calls that came up to this much earlier
SLACK_NS = 50_000_000  # an evenly spaced limit makes up for a late wake-up within this time
LOGGED_NS = 1_000_000_000  # pauses shorter than this are not logged
_PERIODS_NS = {"s": 10**9, "sec": 10**9, "second": 10**9, "min": 60 * 10**9, "minute": 60 * 10**9, "m": 60 * 10**9,
               "h": 3600 * 10**9, "hour": 3600 * 10**9}  # fmt: skip
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")

_priority: ContextVar[int] = ContextVar("loadgen_sdk_priority", default=0)


@contextmanager
def priority(level: int) -> Iterator[None]:
    """`with priority(1):` calls in this block pass waiting calls of a lower level (default 0) in every Throttle.

    One level is worth 10 s of waiting: a call that has waited longer than that is not overtaken.
    """
    if isinstance(level, bool) or not isinstance(level, int):
        raise WrongUse(f"priority({level!r})", "give a whole number; 0 is the default, higher goes first")
    token = _priority.set(level)
    try:
        yield
    finally:
        _priority.reset(token)


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
    """The amounts booked within the last period. A booked amount can be corrected later.

    burst_ns: None: the whole limit may go at once. Else at most this much time's worth may, and the rest is spaced
    evenly: `_paid_until` is the instant up to which the rate is used up by what was booked.
    """

    __slots__ = ("_amounts", "_burst_ns", "_grain_ns", "_head", "_paid_until", "_rate", "_sum", "_times")

    def __init__(self, rate: Rate, burst_ns: int | None = None, grain_ns: int = 0) -> None:
        self._rate, self._burst_ns, self._grain_ns = rate, burst_ns, grain_ns
        self._times: list[int] = []
        self._amounts: list[float] = []
        self._head = 0  # index of the first entry that is still in the window
        self._sum = 0.0
        self._paid_until = 0.0

    def free_at(self, now: int, amount: float) -> int:
        """The instant at which `amount` more is allowed. An amount above the limit waits for an empty window."""
        times, amounts, period = self._times, self._amounts, self._rate.period_ns
        head = self._head
        while head < len(times) and times[head] + period <= now:
            self._sum -= amounts[head]
            head += 1
        if head > 1000 and 2 * head > len(times):
            del times[:head], amounts[:head]
            head = 0
        self._head = head
        at = now
        if self._burst_ns is not None:
            at = max(at, math.ceil(self._paid_until) - self._burst_ns)
        if head == len(times):
            self._sum = 0.0  # no rounding error stays
            return at
        free = self._rate.limit - self._sum
        if amount <= free:
            return at
        for index in range(head, len(times)):
            free += amounts[index]
            if amount <= free:
                return max(at, times[index] + period)
        return max(at, times[-1] + period)

    def book(self, now: int, amount: float) -> int:
        """Book `amount` at `now`. Returns the instant to pass to `correct`."""
        times = self._times
        if len(times) > self._head and self._same_entry(now, times[-1]):
            # One entry per grain keeps a shared window small. Its instant is the later one: never too early.
            times[-1] = max(now, times[-1])
            self._amounts[-1] += amount
        else:
            times.append(max(now, times[-1]) if times else now)
            self._amounts.append(float(amount))
        self._sum += amount
        self._paid_until = max(self._paid_until, float(now)) + amount * self._rate.period_ns / self._rate.limit
        return times[-1]

    def correct(self, booked_at: int, difference: float) -> None:
        """What was booked at `booked_at` was really `difference` more."""
        index = bisect_left(self._times, booked_at, self._head)
        if index < len(self._times) and self._same_entry(booked_at, self._times[index]):  # else it left the window
            self._amounts[index] += difference
            self._sum += difference
            self._paid_until += difference * self._rate.period_ns / self._rate.limit

    def _same_entry(self, at: int, booked_at: int) -> bool:
        return at // self._grain_ns == booked_at // self._grain_ns if self._grain_ns else at == booked_at

    def state(self) -> list[Any]:
        """What another process needs to go on."""
        return [self._times[self._head :], self._amounts[self._head :], self._paid_until]

    def restore(self, state: list[Any], now: int) -> None:
        times, amounts, paid_until = state
        self._head = 0
        if times and times[-1] > now + LOGGED_NS:  # of an earlier boot of this host: its clock began anew
            times, amounts, paid_until = [], [], 0.0
        self._times, self._amounts, self._paid_until = [*times], [*amounts], float(paid_until)
        self._sum = math.fsum(amounts)


class Limits(NamedTuple):
    """The limits of one key and model. burst_ns: see `_Window`. longest_ns: of a pause that the server asks for."""

    requests: Rate | None = None
    tokens: Rate | None = None
    input_tokens: Rate | None = None
    output_tokens: Rate | None = None
    concurrency: int | None = None
    burst_ns: int | None = None
    longest_ns: int = int(LONGEST_OBEYED_S * 1e9)
    grain: int = 0  # periods are cut into this many parts, for shared windows; 0: exact


class Booking(NamedTuple):
    """What a granted call has booked: amounts by kind (tokens, input_tokens, output_tokens), and when."""

    amounts: dict[str, float]
    at: dict[str, int]


class Gate:
    """The limits of one key and model, without IO. Instants are monotonic ns. Not thread-safe: `Throttle` locks it."""

    __slots__ = (
        "_cap",
        "_in_flight",
        "_limits",
        "_paused_until",
        "_server_reset_at",
        "_server_tokens_left",
        "_windows",
    )

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._windows: dict[str, _Window] = {}
        for name in ("requests", "tokens", "input_tokens", "output_tokens"):
            if (limit := getattr(limits, name)) is not None:
                grain_ns = limit.period_ns // limits.grain if limits.grain else 0
                self._windows[name] = _Window(limit, limits.burst_ns, grain_ns)
        self._cap = limits.concurrency or FOREVER
        self._in_flight = 0
        self._paused_until = 0  # the server asked for no call before this instant
        self._server_tokens_left: float | None = None  # tokens left by the server's count, until `_server_reset_at`
        self._server_reset_at = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def ask(self, now: int, tokens: float, output: float = 0) -> int:
        """0: granted (nothing is booked yet). Else the instant at which to ask again; FOREVER: when a call ends.

        `tokens`: input and output; `output`: of them.
        """
        if self._in_flight >= self._cap:
            return FOREVER
        grant_at = max(now, self._paused_until)
        amounts = _amounts(tokens, output)
        for name, window in self._windows.items():
            grant_at = max(grant_at, window.free_at(now, amounts[name]))
        if self._server_tokens_left is not None and tokens > self._server_tokens_left and now < self._server_reset_at:
            grant_at = max(grant_at, self._server_reset_at)
        return 0 if grant_at <= now else grant_at

    def enter(self, now: int, tokens: float, output: float = 0) -> Booking:
        """Book a granted call. Returns the booking to pass to `leave`."""
        self._in_flight += 1
        if self._server_tokens_left is not None:
            self._server_tokens_left -= tokens
        amounts = _amounts(tokens, output)
        return Booking(amounts, {name: window.book(now, amounts[name]) for name, window in self._windows.items()})

    def leave(self, booking: Booking, tokens: float | None, output: float | None = None) -> None:
        """A call has ended. `tokens`: what it used (None: keep the estimate); `output`: of them, None: not known."""
        self._in_flight -= 1
        self.correct(booking, tokens, output)

    def correct(self, booking: Booking, tokens: float | None, output: float | None = None) -> None:
        if tokens is None:
            return
        used = _amounts(tokens, output if output is not None else min(tokens, booking.amounts["output_tokens"]))
        for name, window in self._windows.items():
            if used[name] != booking.amounts[name]:
                window.correct(booking.at[name], used[name] - booking.amounts[name])

    def heed(self, now: int, headers: Mapping[str, str], refused: bool) -> tuple[int, int]:
        """Apply a response's headers: `Retry-After` if the call was `refused`, and the x-ratelimit-* headers.

        Returns how long the server asks for no call, and how long it is obeyed, in ns from now.
        """
        longest = self._limits.longest_ns
        asked = 0
        if refused and (server_wait_s := retry_after_s(headers)) is not None:
            asked = int(min(server_wait_s, 1e9) * 1e9)
        remaining, reset = headers.get("x-ratelimit-remaining-requests"), headers.get("x-ratelimit-reset-requests")
        if remaining is not None and reset is not None and _number(remaining, 1) <= 0:
            asked = max(asked, _duration_ns(reset))
        obeyed = min(asked, longest)
        self._paused_until = max(self._paused_until, now + obeyed)
        remaining, reset = headers.get("x-ratelimit-remaining-tokens"), headers.get("x-ratelimit-reset-tokens")
        if remaining is not None and reset is not None:
            self._server_tokens_left = _number(remaining, math.inf)
            self._server_reset_at = now + min(_duration_ns(reset), longest)
        return asked, obeyed

    def state(self) -> dict[str, Any]:
        """What other processes need to keep the same limits. Calls in flight are each process's own."""
        return {
            "windows": {name: window.state() for name, window in self._windows.items()},
            "paused_until": self._paused_until,
        }

    def restore(self, state: dict[str, Any], now: int) -> None:
        for name, window in self._windows.items():
            if name in state.get("windows", ()):
                window.restore(state["windows"][name], now)
        paused_until = int(state.get("paused_until", 0))
        if paused_until <= now + self._limits.longest_ns:
            self._paused_until = max(self._paused_until, paused_until)


def _amounts(tokens: float, output: float) -> dict[str, float]:
    return {"requests": 1, "tokens": tokens, "input_tokens": tokens - output, "output_tokens": output}


class Permit:
    """Permission to make one call, from `Throttle`. `done` returns it."""

    __slots__ = ("_booking", "_gate_queue", "_obey", "over")

    def __init__(self, gate_queue: _GateQueue, booking: Booking, obey: bool) -> None:
        self._gate_queue, self._booking, self._obey, self.over = gate_queue, booking, obey, False

    def heed(self, headers: Mapping[str, str], *, refused: bool = False) -> None:
        """Apply the headers of the response. refused: the status is 429 or 503; its Retry-After holds for all calls."""
        if self._obey:
            self._gate_queue.heed(headers, refused)

    def done(self, tokens: int | None = None, output_tokens: int | None = None) -> None:
        """The call is over. tokens: what it really used, input and output, to correct the estimate; output_tokens: of
        them. May be called twice."""
        if self.over:
            return
        self.over = True
        self._gate_queue.leave(self._booking, tokens, output_tokens)


class _Waiter:
    """A caller that waits: `wake` makes it try again. Ordered by arrival, earlier by AGING_S per step of priority."""

    __slots__ = ("gone", "order", "wake")

    def __init__(self, wake: Callable[[], object], level: int) -> None:
        self.wake = wake
        self.order = (monotonic_ns() - level * int(AGING_S * 1e9), next(_arrivals))
        self.gone = False

    def __lt__(self, other: _Waiter) -> bool:
        return self.order < other.order


_arrivals = count()


class _GateQueue:
    """A gate and the callers that wait for it: by priority, then in order of arrival."""

    __slots__ = ("_name", "_obey", "_shared", "_waiters", "gate", "lock")

    def __init__(self, gate: Gate, obey: bool, name: str, shared: SharedLimits | None) -> None:
        self.gate, self._obey, self._name, self._shared = gate, obey, name, shared
        self.lock = threading.Lock()
        self._waiters: list[_Waiter] = []  # a heap

    def _first(self) -> _Waiter | None:
        while self._waiters and self._waiters[0].gone:
            heapq.heappop(self._waiters)
        return self._waiters[0] if self._waiters else None

    def _wake_first(self) -> None:
        """Wake the first waiting caller, which then tries again."""
        if (first := self._first()) is not None:
            first.wake()

    def join(self, waiter: _Waiter) -> None:
        with self.lock:
            heapq.heappush(self._waiters, waiter)

    def try_enter(self, waiter: _Waiter, tokens: float, output: float) -> Permit | int:
        """The permit for this waiter, or the most ns to wait before the next try."""
        with self.lock:
            if self._first() is not waiter:
                return FOREVER
            now = monotonic_ns()
            gate = self.gate
            if self._shared is None:
                retry_at = gate.ask(now, tokens, output)
                if retry_at == 0:
                    booking = gate.enter(now, tokens, output)
            else:
                with self._shared.state_of(self._name, gate, now) as locked:
                    if not locked:  # another process has it for some microseconds
                        return self._shared.retry_ns
                    retry_at = gate.ask(now, tokens, output)
                    if retry_at == 0:
                        booking = gate.enter(now, tokens, output)
            if retry_at:
                return retry_at - now if retry_at != FOREVER else FOREVER
            heapq.heappop(self._waiters)
            waiter.gone = True
            self._wake_first()
            return Permit(self, booking, self._obey)

    def leave(self, booking: Booking, tokens: float | None, output: float | None) -> None:
        if collecting():  # in a destructor: the code below may hold this very lock
            later(partial(self.leave, booking, tokens, output))
            return
        with self.lock:
            if self._shared is None or tokens is None:
                self.gate.leave(booking, tokens, output)
            else:
                self.gate.leave(booking, None)
                with self._shared.state_of(self._name, self.gate, monotonic_ns(), wait=True) as locked:
                    if locked:  # else the estimate stays
                        self.gate.correct(booking, tokens, output)
            self._wake_first()

    def heed(self, headers: Mapping[str, str], refused: bool) -> None:
        with self.lock:
            asked, obeyed = self.gate.heed(monotonic_ns(), headers, refused)
            if obeyed and self._shared is not None:
                with self._shared.state_of(self._name, self.gate, monotonic_ns(), wait=True):
                    pass  # written back with the pause
        if asked >= LOGGED_NS:
            cut = f"; calls go on after {obeyed / 1e9:g} s (limit longest_obeyed_s)" if obeyed < asked else ""
            log.warning("the server asks for no call of %s for %g s%s", self._name or "any key", asked / 1e9, cut)

    def remove(self, waiter: _Waiter) -> None:
        """A caller stopped waiting: take it out of the queue."""
        if collecting():
            later(partial(self.remove, waiter))
            return
        with self.lock:
            if not waiter.gone:
                first = self._first() is waiter
                waiter.gone = True
                if first:
                    self._wake_first()

    def waiting(self) -> int:
        return sum(not waiter.gone for waiter in self._waiters)


class Throttle:
    """Limits for the calls of one or several clients.

    requests, tokens, input_tokens, output_tokens: "600/min", "10/s" (a bare number is per minute), within any interval
    of that length. Tokens are booked by an estimate before a call and corrected when it ends. concurrency: most calls
    in flight. burst_s: how many seconds' worth may go at once; 0 spaces calls evenly; None: the whole limit. per: the
    limits are counted separately for each key, model or both; () counts all calls together. obey: also wait as the
    server's Retry-After (after a 429 or 503) and x-ratelimit-* headers ask, at most longest_obeyed_s. max_wait_s: the
    longest wait of a call; then ThrottleTimeout is raised. shared: the path of a file by which all processes of this
    host that name it keep the limits together (concurrency stays each process's own); needs the package filelock.

    kept_by="asyncio-throttle" leaves `requests` to an `asyncio_throttle.Throttler` for each key and model: a plain
    limit for one event loop. `requests` may also be a Throttler that the application already shares. Both are for async
    clients only. Raises WrongUse for limits that allow no call.
    """

    def __init__(
        self,
        *,
        requests: Any = None,
        tokens: str | int | float | None = None,
        concurrency: int | None = None,
        per: tuple[Literal["key", "model"], ...] = ("key", "model"),
        obey: bool = True,
        input_tokens: str | int | float | None = None,
        output_tokens: str | int | float | None = None,
        burst_s: float | None = None,
        max_wait_s: float | None = None,
        longest_obeyed_s: float = LONGEST_OBEYED_S,
        shared: Any = None,
        kept_by: Literal["gate", "asyncio-throttle"] = "gate",
    ) -> None:
        is_throttler = hasattr(requests, "acquire") and hasattr(requests, "rate_limit")
        self._throttler: Any = requests if is_throttler else None
        self._throttlers: dict[tuple[str, ...], Any] = {}
        self._throttler_rate: Rate | None = None
        if is_throttler and not requests.rate_limit > 0:
            raise WrongUse(f"a Throttler of {requests.rate_limit} would let nothing through", "give it a rate above 0")
        if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
            raise WrongUse(f"concurrency={concurrency!r} would let nothing through", "at least 1, or leave it out")
        if isinstance(per, str) or not set(per) <= {"key", "model"}:
            raise WrongUse(f"per={per!r}", 'a tuple of "key" and "model"')
        for name, seconds in (("burst_s", burst_s), ("max_wait_s", max_wait_s), ("longest_obeyed_s", longest_obeyed_s)):
            if seconds is not None and not (isinstance(seconds, int | float) and 0 <= seconds < 1e9):
                raise WrongUse(f"{name}={seconds!r}", "give seconds, 0 or more")
        requests_rate = None if requests is None or is_throttler else rate(requests, "requests")
        if kept_by not in ("gate", "asyncio-throttle"):
            raise WrongUse(f"kept_by={kept_by!r}", 'give "gate" or "asyncio-throttle"')
        if kept_by == "asyncio-throttle":
            if requests_rate is None:
                raise WrongUse("asyncio-throttle limits requests, and no such limit is given", 'add requests="10/s"')
            if shared is not None or burst_s is not None:
                raise WrongUse("asyncio-throttle keeps a plain limit of one event loop", "leave out shared and burst_s")
            self._throttler_rate, requests_rate = requests_rate, None
        self._shared: SharedLimits | None = None
        if shared is not None:
            from .shared_limits import SharedLimits

            self._shared = SharedLimits(shared)
        self._limits = Limits(
            requests=requests_rate,
            tokens=None if tokens is None else rate(tokens, "tokens"),
            input_tokens=None if input_tokens is None else rate(input_tokens, "input_tokens"),
            output_tokens=None if output_tokens is None else rate(output_tokens, "output_tokens"),
            concurrency=concurrency,
            burst_ns=None if burst_s is None else max(SLACK_NS, int(burst_s * 1e9)),
            longest_ns=int(longest_obeyed_s * 1e9),
            grain=0 if shared is None else 500,
        )
        self.max_wait_s = max_wait_s
        self._per, self._obey = tuple(per), obey
        self._gate_queues: dict[tuple[str, ...], _GateQueue] = {}
        self._lock = threading.Lock()
        _throttles.add(self)

    @property
    def counts_tokens(self) -> bool:
        """Whether `acquire` needs an estimate of the tokens of a call."""
        limits = self._limits
        return self._obey or any((limits.tokens, limits.input_tokens, limits.output_tokens))

    def in_flight(self, *, key: str = "", model: str = "") -> int:
        """The number of calls in flight for this key and model."""
        return self._gate_queue(key, model).gate.in_flight

    def waiting(self, *, key: str = "", model: str = "") -> int:
        """The number of calls that wait for a permit, for this key and model."""
        return self._gate_queue(key, model).waiting()

    async def acquire(
        self,
        *,
        key: str = "",
        model: str = "",
        tokens: float = 0,
        output_tokens: float = 0,
        max_wait_s: float | None = None,
    ) -> Permit:
        """Wait until a call of about `tokens` tokens is allowed. A cancelled wait loses its place in the queue.

        `tokens`: input and output; `output_tokens`: of them. Raises ThrottleTimeout after the shorter of `max_wait_s`
        here and that of the Throttle.
        """
        limit_s, deadline = self._deadline(max_wait_s)
        gate_queue, loop = self._gate_queue(key, model), asyncio.get_running_loop()
        throttler = self._throttler if self._throttler_rate is None else self._throttler_of(key, model)
        if throttler is not None:
            try:
                async with asyncio.timeout(None if limit_s is None else limit_s):
                    await throttler.acquire()
            except TimeoutError:
                raise _timed_out(limit_s, gate_queue) from None
        event = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

        waiter = _Waiter(wake, _priority.get())
        gate_queue.join(waiter)
        try:
            while not isinstance(answer := gate_queue.try_enter(waiter, tokens, output_tokens), Permit):
                wait_s = _next_wait_s(answer, deadline)
                if wait_s is not None and wait_s <= 0:
                    raise _timed_out(limit_s, gate_queue)
                try:
                    async with asyncio.timeout(wait_s):
                        await event.wait()
                except TimeoutError:
                    pass
                event.clear()
        except BaseException:
            gate_queue.remove(waiter)
            raise
        return answer

    def acquire_blocking(
        self,
        *,
        key: str = "",
        model: str = "",
        tokens: float = 0,
        output_tokens: float = 0,
        max_wait_s: float | None = None,
    ) -> Permit:
        """`acquire` for a thread. Raises WrongUse when requests are limited by an asyncio Throttler."""
        if self._throttler is not None or self._throttler_rate is not None:
            raise WrongUse("an asyncio Throttler cannot make a thread wait", 'give requests="10/s" instead')
        limit_s, deadline = self._deadline(max_wait_s)
        gate_queue = self._gate_queue(key, model)
        event = threading.Event()
        waiter = _Waiter(event.set, _priority.get())
        gate_queue.join(waiter)
        try:
            while not isinstance(answer := gate_queue.try_enter(waiter, tokens, output_tokens), Permit):
                wait_s = _next_wait_s(answer, deadline)
                if wait_s is not None and wait_s <= 0:
                    raise _timed_out(limit_s, gate_queue)
                event.wait(wait_s)
                event.clear()
        except BaseException:
            gate_queue.remove(waiter)
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
        key_values = self._key_values(key, model)
        with self._lock:
            gate_queue = self._gate_queues.get(key_values)
            if gate_queue is None:
                # Never the key itself: this name is logged, and written into the file that processes share.
                name = model if "model" in self._per else ""
                if self._shared is not None:
                    name = self._shared.lane_name(key_values, name)
                gate_queue = _GateQueue(Gate(self._limits), self._obey, name, self._shared)
                self._gate_queues[key_values] = gate_queue
            return gate_queue

    def _key_values(self, key: str, model: str) -> tuple[str, ...]:
        values = {"key": key, "model": model}
        return tuple(values[name] for name in self._per)

    def _throttler_of(self, key: str, model: str) -> Any:
        key_values = self._key_values(key, model)
        with self._lock:
            if key_values not in self._throttlers:
                from asyncio_throttle.throttler import Throttler

                limit = self._throttler_rate
                assert limit is not None
                self._throttlers[key_values] = Throttler(rate_limit=int(limit.limit), period=limit.period_ns / 1e9)
            return self._throttlers[key_values]

    def _deadline(self, max_wait_s: float | None) -> tuple[float | None, int | None]:
        """The longest wait in seconds, and the instant of its end; None: no limit."""
        limits = [limit for limit in (max_wait_s, self.max_wait_s) if limit is not None]
        limit_s = min(limits) if limits else None
        return limit_s, None if limit_s is None else monotonic_ns() + int(limit_s * 1e9)


def _after_fork() -> None:
    """In a child process: no call of the parent is in flight here, and no thread of it will release a lock."""
    for throttle in _throttles:
        throttle._lock = threading.Lock()
        throttle._gate_queues.clear()
        throttle._throttlers.clear()


_throttles: weakref.WeakSet[Throttle] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _next_wait_s(wait_ns: int, deadline: int | None) -> float | None:
    """Seconds until the next try; None: until woken; 0 or less: the time is over."""
    if deadline is None:
        return None if wait_ns == FOREVER else wait_ns / 1e9
    return min(wait_ns, deadline - monotonic_ns()) / 1e9


def _timed_out(limit_s: float | None, gate_queue: _GateQueue) -> ThrottleTimeout:
    gate = gate_queue.gate
    return ThrottleTimeout(
        f"the throttle gave no permit within {limit_s:g} s: {gate.in_flight} calls in flight, {gate_queue.waiting()}"
        " waiting",
        "raise the limit, or max_wait_s, or send less",
    )


def _number(text: str, default: float) -> float:
    """A number of a header; `default` for what is none, or not finite."""
    try:
        value = float(text)
    except ValueError:
        return default
    return value if math.isfinite(value) else default


def _duration_ns(text: str) -> int:
    """`6m0s`, `20ms`, `1.5s`, a bare number of seconds, or an instant (epoch in s or ms, ISO 8601): ns from now.

    0 when it cannot be parsed.
    """
    text = text.strip()
    match = _DURATION.fullmatch(text)
    if match and any(match.groups()):
        hours, minutes, seconds, millis = (float(group or 0) for group in match.groups())
        return round((hours * 3600 + minutes * 60 + seconds) * 1e9 + millis * 1e6)
    seconds = _number(text, 0)
    if not seconds and "T" in text:
        try:
            seconds = datetime.fromisoformat(text).timestamp()
        except ValueError:
            return 0
    if seconds >= EPOCH_S * 1000:
        seconds /= 1000
    if seconds >= EPOCH_S:
        seconds -= time()
    return max(0, round(seconds * 1e9))
