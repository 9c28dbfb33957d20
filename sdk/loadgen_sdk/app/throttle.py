"""Keeps calls below a provider's limits: requests and tokens per time, concurrent calls, per key and per model.

`Throttle` does the waiting, for tasks and threads (one object may serve both): by priority, then in the order of
arrival. What is allowed when is decided by a `Gate`. Limits that several processes share are kept in a file or in Redis
(`shared_limits`).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import count
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ThrottleTimeout, WrongUse
from . import event_loop
from .finishing import collecting, later
from .gate import FOREVER, MAX_PAUSE_S, Booking, Gate, Limits, rate
from .steps import Steps, run_async, run_blocking

if TYPE_CHECKING:
    from .shared_gate import Grant
    from .shared_limits import SharedLimits

log = logging.getLogger("loadgen_sdk")

AGING_S = 10.0  # one step of priority overtakes calls that came up to this much earlier
SLACK_NS = 50_000_000  # an evenly spaced limit makes up for a late wake-up within this time
LOOK_AGAIN_NS = 1_000_000_000  # corrections of other processes may have made room before the turn that was foretold
LOGGED_NS = 1_000_000_000  # pauses shorter than this are not logged

_priority: ContextVar[int] = ContextVar("loadgen_sdk_priority", default=0)
_arrivals = count()


@contextmanager
def priority(level: int) -> Iterator[None]:
    """`with priority(1):` calls in this block pass waiting calls of a lower level (default 0) in every Throttle.

    One level is worth 10 s of waiting: a call that has waited longer than that is not overtaken.
    """
    if isinstance(level, bool) or not isinstance(level, int):
        raise WrongUse(
            "wrong_type",
            f"priority({level!r})",
            "give a whole number; 0 is the default, higher goes first",
        )
    token = _priority.set(level)
    try:
        yield
    finally:
        _priority.reset(token)


class Permit:
    """Permission to make one call, from `Throttle`. `done`, or the end of a `with` block, returns it."""

    __slots__ = ("_booking", "_gate_queue", "_grant", "_heeds", "over")

    def __init__(
        self, gate_queue: _GateQueue, booking: Booking, grant: Grant | None, heeds: bool
    ) -> None:
        self._gate_queue, self._booking, self._grant = gate_queue, booking, grant
        self._heeds, self.over = heeds, False

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        self.done()

    def heed(self, headers: Mapping[str, str], *, refused: bool = False) -> None:
        """Apply the headers of the response. refused: the status is 429 or 503; its Retry-After holds for all calls."""
        if self._heeds:
            self._gate_queue.heed(headers, refused)

    def done(self, tokens: int | None = None, output_tokens: int | None = None) -> None:
        """The call is over. tokens: what it really used, input and output, to correct the estimate; output_tokens: of
        them. May be called twice.
        """
        if self.over:
            return
        self.over = True
        self._gate_queue.leave(self._booking, self._grant, tokens, output_tokens)


class _Waiter:
    """A caller that waits: `wake` makes it try again. Ordered by arrival, earlier by AGING_S per step of priority."""

    def __init__(self, wake: Callable[[], object], level: int) -> None:
        self.wake = wake
        self.order = (monotonic_ns() - level * int(AGING_S * 1e9), next(_arrivals))
        self.gone = False
        self.permit: Permit | None = None

    def __lt__(self, other: _Waiter) -> bool:
        return self.order < other.order


class _GateQueue:
    """A gate and the callers that wait for it: by priority, then in order of arrival.

    throttler: of asyncio-throttle, which every call passes first; None: none. With `shared`, the rates are kept by all
    processes, in whose line this one has a single place, for the first of its callers.
    """

    def __init__(
        self, gate: Gate, heeds: bool, name: str, shared: SharedLimits | None, throttler: Any
    ) -> None:
        self.gate, self._heeds, self._name, self._shared, self.throttler = (
            gate,
            heeds,
            name,
            shared,
            throttler,
        )
        self._gate_lock = (
            threading.Lock()
        )  # held while the store is asked: never taken in an event loop then
        self._lock = threading.Lock()  # of the waiters
        self._waiters: list[_Waiter] = []  # a heap
        self.is_shared = shared is not None
        self._ticket = secrets.token_hex(8)
        self._in_line = False

    def permit(
        self,
        wake: Callable[[], object],
        wait: Callable[[float | None], Any],
        tokens: float,
        output: float,
        limit_s: float | None,
        deadline: int | None,
        aside: Callable[..., Any] | None = None,
    ) -> Steps[Permit]:
        """Wait in the queue until a call is allowed. `wait`: for `wake`, at most so many seconds; `aside`: does what
        may take long where it holds up nobody.
        """
        waiter = _Waiter(wake, _priority.get())
        with self._lock:
            heapq.heappush(self._waiters, waiter)
        try_enter = partial(self._try_enter, waiter, tokens, output)
        try:
            while not isinstance(
                answer := try_enter() if aside is None else (yield partial(aside, try_enter)),
                Permit,
            ):
                if deadline is not None:
                    answer = min(answer, deadline - monotonic_ns())
                    if answer <= 0:
                        raise self.timed_out(limit_s)
                yield partial(wait, None if answer == FOREVER else answer / 1e9)
        except BaseException:
            self._remove(waiter)
            raise
        return answer

    def timed_out(self, limit_s: float | None) -> ThrottleTimeout:
        numbers = f"{self.gate.in_flight} calls in flight, {self.waiting()} waiting"
        hint = "raise the limit, or max_wait_s, or send less"
        return ThrottleTimeout(f"the throttle gave no permit within {limit_s:g} s: {numbers}", hint)

    def waiting(self) -> int:
        return sum(not waiter.gone for waiter in self._waiters)

    def leave(
        self, booking: Booking, grant: Grant | None, tokens: float | None, output: float | None
    ) -> None:
        self._aside(partial(self._leave, booking, grant, tokens, output))

    def _leave(
        self, booking: Booking, grant: Grant | None, tokens: float | None, output: float | None
    ) -> None:
        with self._gate_lock:
            self.gate.leave(booking, tokens, output)
            if (
                self._shared is not None and grant is not None and tokens is not None
            ):  # None: the estimate stays
                self._shared.correct(self._name, grant, tokens, output)
        self._wake_first()

    def heed(self, headers: Mapping[str, str], refused: bool) -> None:
        self._aside(partial(self._heed, headers, refused))

    def _heed(self, headers: Mapping[str, str], refused: bool) -> None:
        with self._gate_lock:
            asked, obeyed = self.gate.heed(monotonic_ns(), headers, refused)
            if obeyed and self._shared is not None:
                self._shared.pause(self._name, obeyed)
        if asked >= LOGGED_NS:
            cut = (
                f"; calls go on after {obeyed / 1e9:g} s (limit max_pause_s)"
                if obeyed < asked
                else ""
            )
            log.warning(
                "the server asks for no call of %s for %g s%s",
                self._name or "any key",
                asked / 1e9,
                cut,
            )

    def _aside(self, work: Callable[[], object]) -> None:
        """Do `work` now, or in the background: in a destructor the code below may hold the very lock that it takes, and
        in an event loop a store may take too long.
        """
        if collecting() or (self.is_shared and event_loop.is_running()):
            later(work)
        else:
            work()

    def _try_enter(self, waiter: _Waiter, tokens: float, output: float) -> Permit | int:
        """The permit for this waiter, or the most ns to wait before the next try."""
        with self._lock:
            if self._first() is not waiter:
                return FOREVER
        with self._gate_lock:
            now, grant = monotonic_ns(), None
            if self._shared is not None and not (
                again_at := self.gate.ask_beside_windows(now, tokens, output)
            ):
                answer = self._shared.enter(self._name, self._ticket, tokens, output)
                self._in_line = isinstance(answer, int)
                if isinstance(answer, int):
                    return min(answer, LOOK_AGAIN_NS)
                grant = answer
            if grant is None and (again_at := self.gate.ask(now, tokens, output)):
                return again_at - now if again_at != FOREVER else FOREVER
            permit = Permit(self, self.gate.enter(now, tokens, output), grant, self._heeds)
        with self._lock:
            left, waiter.gone, waiter.permit = waiter.gone, True, permit
        if left:  # it was cancelled meanwhile
            permit.done(0)
        self._wake_first()
        return permit

    def _remove(self, waiter: _Waiter) -> None:
        """A caller stopped waiting: take it out of the queue."""
        if collecting():
            later(partial(self._remove, waiter))
            return
        with self._lock:
            waiter.gone = True
            is_last = self._first() is None
        if waiter.permit is not None:
            waiter.permit.done(0)
        if is_last and self._in_line:
            self._aside(self._leave_line)
        self._wake_first()

    def _leave_line(self) -> None:
        """Nobody waits here any more: give up the place among the processes."""
        with self._gate_lock:
            with self._lock:
                is_last = self._first() is None
            if is_last and self._shared is not None:
                self._in_line = False
                self._shared.cancel(self._name, self._ticket)

    def _first(self) -> _Waiter | None:
        while self._waiters and self._waiters[0].gone:
            heapq.heappop(self._waiters)
        return self._waiters[0] if self._waiters else None

    def _wake_first(self) -> None:
        """Wake the first waiting caller, which then tries again."""
        with self._lock:
            first = self._first()
        if first is not None:
            first.wake()


class Throttle:
    """Limits for the calls of one or several clients.

    requests, tokens, input_tokens, output_tokens: "600/min", "10/s" (a bare number is per minute), within any interval
    of that length. Tokens are booked by an estimate before a call and corrected when it ends. concurrency: most calls
    in flight. burst_s: how many seconds' worth may go at once; 0 spaces calls evenly; None: the whole limit. each: the
    limits are counted separately for each key, model or both; () counts all calls together. heed_headers: also wait as
    the server's Retry-After (after a 429 or 503) and x-ratelimit-* headers ask, at most max_pause_s. max_wait_s: the
    longest wait of a call; then ThrottleTimeout is raised. shared: the path of a file by which all processes of this
    host that name it keep the limits together; or "redis://HOST:6379/0#NAME", by which those of all hosts do, with the
    package redis. concurrency stays each process's own.

    pacer="asyncio-throttle" leaves `requests` to an `asyncio_throttle.Throttler` for each key and model: a plain
    limit for one event loop. `requests` may also be a Throttler that the application already shares. Both are for async
    clients only. Raises WrongUse for limits that allow no call.
    """

    def __init__(
        self,
        *,
        requests: Any = None,
        tokens: str | int | float | None = None,
        concurrency: int | None = None,
        each: tuple[Literal["key", "model"], ...] = ("key", "model"),
        heed_headers: bool = True,
        input_tokens: str | int | float | None = None,
        output_tokens: str | int | float | None = None,
        burst_s: float | None = None,
        max_wait_s: float | None = None,
        max_pause_s: float = MAX_PAUSE_S,
        shared: Any = None,
        pacer: Literal["asyncio-throttle"] | None = None,
    ) -> None:
        is_throttler = hasattr(requests, "acquire") and hasattr(requests, "rate_limit")
        if is_throttler and not requests.rate_limit > 0:
            raise WrongUse(
                "out_of_range",
                f"a Throttler of {requests.rate_limit} would let nothing through",
                "give it a rate above 0",
            )
        if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
            raise WrongUse(
                "out_of_range",
                f"concurrency={concurrency!r} would let nothing through",
                "at least 1, or leave it out",
            )
        if isinstance(each, str) or not set(each) <= {"key", "model"}:
            raise WrongUse("unknown_name", f"each={each!r}", 'a tuple of "key" and "model"')
        for name, seconds in (
            ("burst_s", burst_s),
            ("max_wait_s", max_wait_s),
            ("max_pause_s", max_pause_s),
        ):
            if seconds is not None and not (
                isinstance(seconds, int | float) and 0 <= seconds < 1e9
            ):
                raise WrongUse("out_of_range", f"{name}={seconds!r}", "give seconds, 0 or more")
        if pacer not in (None, "asyncio-throttle"):
            raise WrongUse(
                "unknown_name", f"pacer={pacer!r}", 'give "asyncio-throttle", or leave it out'
            )
        given = {
            "requests": None if is_throttler else requests,
            "tokens": tokens,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
        }
        rates = {name: rate(text, name) for name, text in given.items() if text is not None}
        self._make_throttler: Callable[[], Any] | None = (
            (lambda: requests) if is_throttler else None
        )
        if pacer is not None:
            if "requests" not in rates:
                raise WrongUse(
                    "missing_option",
                    "asyncio-throttle limits requests, and no such limit is given",
                    'add requests="10/s"',
                )
            if shared is not None or burst_s is not None:
                raise WrongUse(
                    "conflict",
                    "asyncio-throttle keeps a plain limit of one event loop",
                    "leave out shared and burst_s",
                )
            from asyncio_throttle.throttler import Throttler

            limit, period_ns = rates.pop("requests")
            self._make_throttler = partial(Throttler, rate_limit=int(limit), period=period_ns / 1e9)
        self._limits = Limits(
            **rates,
            concurrency=concurrency,
            burst_ns=None if burst_s is None else max(SLACK_NS, int(burst_s * 1e9)),
            longest_ns=int(max_pause_s * 1e9),
            grain=0 if shared is None else 500,
        )
        self._shared: SharedLimits | None = None
        if shared is not None:
            from .shared_limits import SharedLimits

            self._shared = SharedLimits(shared, self._limits, self._limits.remembered_ns)
        self.max_wait_s = max_wait_s
        self._each, self._heeds = tuple(each), heed_headers
        self._gate_queues: dict[tuple[str, ...], _GateQueue] = {}
        self._lock = threading.Lock()
        _throttles.add(self)

    @property
    def counts_tokens(self) -> bool:
        """Whether `acquire` needs an estimate of the tokens of a call."""
        limits = self._limits
        return self._heeds or any((limits.tokens, limits.input_tokens, limits.output_tokens))

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
        queue, (wake, wait) = self._gate_queue(key, model), event_loop.wakeup()
        if queue.throttler is not None:
            await self._pass_throttler(queue, limit_s)
        aside = event_loop.in_thread if queue.is_shared else None
        return await run_async(
            queue.permit(wake, wait, tokens, output_tokens, limit_s, deadline, aside)
        )

    async def _pass_throttler(self, queue: _GateQueue, limit_s: float | None) -> None:
        if asyncio._get_running_loop() is None:
            raise WrongUse(
                "event_loop",
                "asyncio-throttle waits in asyncio alone",
                'leave out pacer="asyncio-throttle"',
            )
        try:
            async with asyncio.timeout(limit_s):
                await queue.throttler.acquire()
        except TimeoutError:
            raise queue.timed_out(limit_s) from None

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
        if self._make_throttler is not None:
            raise WrongUse(
                "event_loop",
                "an asyncio Throttler cannot make a thread wait",
                'give requests="10/s" instead',
            )
        event = threading.Event()

        def wait(seconds: float | None) -> None:
            event.wait(seconds)
            event.clear()

        queue = self._gate_queue(key, model)
        return run_blocking(
            queue.permit(event.set, wait, tokens, output_tokens, *self._deadline(max_wait_s))
        )

    def _gate_queue(self, key: str, model: str) -> _GateQueue:
        values = {"key": key, "model": model}
        key_values = tuple(values[name] for name in self._each)
        with self._lock:
            queue = self._gate_queues.get(key_values)
            if queue is None:
                # Never the key itself: this name is logged, and written into the file that processes share.
                name = model if "model" in self._each else ""
                if self._shared is not None:
                    name = self._shared.lane_name(key_values, name)
                throttler = None if self._make_throttler is None else self._make_throttler()
                queue = _GateQueue(Gate(self._limits), self._heeds, name, self._shared, throttler)
                self._gate_queues[key_values] = queue
            return queue

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


_throttles: weakref.WeakSet[Throttle] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
