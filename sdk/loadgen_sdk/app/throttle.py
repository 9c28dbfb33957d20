"""Keep calls below the limits of a provider: requests and tokens per time, and concurrent calls.

A `Throttle` makes tasks and threads wait, by priority and then in the order of arrival. A `Gate`
decides when a call is allowed. Limits that several processes share are kept in a file or in Redis
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
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import ThrottleTimeout, WrongUse
from . import event_loop
from .finishing import collecting, later
from .gate import FOREVER, MAX_PAUSE_S, Booking, Gate, Limits, Rate, parse_rate
from .steps import Steps, run_async, run_blocking

if TYPE_CHECKING:
    from .shared_gate import Grant
    from .shared_limits import SharedLimits

log = logging.getLogger("loadgen_sdk")

_NS_PER_PRIORITY_LEVEL = 10_000_000_000
"""A call overtakes calls of the next lower priority that came up to this much earlier."""

_MIN_BURST_NS = 50_000_000
"""An evenly spaced limit makes up for a late wake-up within this time."""

_MAX_SHARED_WAIT_NS = 1_000_000_000
"""Corrections of other processes may make room earlier than the store has predicted."""

_MIN_LOGGED_PAUSE_NS = 1_000_000_000
_SHARED_GRAIN = 500
_LONGEST_OPTION_S = 1e9

_priority: ContextVar[int] = ContextVar("loadgen_sdk_priority", default=0)
_arrival_numbers = count()


@contextmanager
def priority(level: int) -> Iterator[None]:
    """Let the calls inside this context overtake waiting calls of lower levels in every Throttle.

    The default level is 0. One level is worth 10 s of waiting: a call that has waited longer than
    that is not overtaken.

    Raises:
        WrongUse: The level is not an integer.
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
    """The permission of a Throttle to make one call.

    `done` or the end of a `with` block returns it.

    Attributes:
        over: The permit was returned.
    """

    __slots__ = ("_booking", "_gate_queue", "_grant", "_obeys_headers", "over")

    def __init__(
        self, gate_queue: _GateQueue, booking: Booking, grant: Grant | None, obeys_headers: bool
    ) -> None:
        """Keep what was booked.

        Args:
            gate_queue: The queue that gave the permit.
            booking: What was booked in this process.
            grant: What was booked in the store of several processes, or None.
            obeys_headers: Limits that the server states are obeyed.
        """
        self.over = False
        self._gate_queue = gate_queue
        self._booking = booking
        self._grant = grant
        self._obeys_headers = obeys_headers

    def __enter__(self) -> Permit:
        """Return the permit."""
        return self

    def __exit__(self, *_: object) -> None:
        """Return the permit to the Throttle."""
        self.done()

    def heed(self, headers: Mapping[str, str], *, refused: bool = False) -> None:
        """Apply the limits that the headers of the response state.

        `refused` says that the status is 429 or 503. Its Retry-After then holds for all calls.
        """
        if self._obeys_headers:
            self._gate_queue.apply_headers(headers, refused)

    def done(self, tokens: int | None = None, output_tokens: int | None = None) -> None:
        """Return the permit when the call is over. Further calls of this method do nothing.

        Args:
            tokens: The input and output tokens that the call used, which replace the estimate.
            output_tokens: The output tokens among them.
        """
        if self.over:
            return
        self.over = True
        self._gate_queue.end_call(self._booking, self._grant, tokens, output_tokens)


class _Waiter:
    """A caller that waits. Waiters are ordered by their arrival and by their priority.

    Attributes:
        wake: Makes the caller try again.
        order: The time of arrival, earlier for a higher priority, and a number for equal times.
        gone: The caller does not wait any more.
        permit: The permit that the caller got.
    """

    def __init__(self, wake: Callable[[], object], level: int) -> None:
        """Note the arrival of a caller with a priority."""
        self.wake = wake
        self.order = (monotonic_ns() - level * _NS_PER_PRIORITY_LEVEL, next(_arrival_numbers))
        self.gone = False
        self.permit: Permit | None = None

    def __lt__(self, other: _Waiter) -> bool:
        """Return True if this waiter comes first."""
        return self.order < other.order


@dataclass(frozen=True)
class _Waiting:
    """How a caller waits for its permit.

    Attributes:
        wake: Ends a wait. May be called from any thread.
        wait: Waits until `wake` is called, or for a number of seconds at most.
        limit_s: The longest wait in seconds, or None.
        deadline: The end of the longest wait, or None.
        run_apart: Runs work that may take long where it holds up nobody, or None to run it at once.
    """

    wake: Callable[[], object]
    wait: Callable[[float | None], Any]
    limit_s: float | None
    deadline: int | None
    run_apart: Callable[..., Any] | None = None


class _CallTokens(NamedTuple):
    """The estimated tokens of a call: input and output together, and the output among them."""

    total: float
    output: float


class _GateQueue:
    """A gate and the callers that wait for it.

    With limits that processes share, the rates are kept by all of them. This process then has a
    single place in their line, for the first of its callers.

    Attributes:
        gate: The limits of this process.
        throttler: A Throttler of asyncio-throttle, which every call passes first, or None.
        is_shared: The rates are shared with other processes.
    """

    def __init__(
        self,
        gate: Gate,
        obeys_headers: bool,
        name: str,
        shared: SharedLimits | None,
        throttler: Any,
    ) -> None:
        """Start without waiters. `name` is that of the key and model, in logs and in the store."""
        self.gate = gate
        self.throttler = throttler
        self.is_shared = shared is not None
        self._obeys_headers = obeys_headers
        self._name = name
        self._shared = shared
        # The lock of the gate is held while a store is used, and then never taken in an event loop.
        self._gate_lock = threading.Lock()
        self._waiters_lock = threading.Lock()
        self._waiters: list[_Waiter] = []  # a heap
        self._ticket = secrets.token_hex(8)
        self._is_in_line = False

    def permit(self, tokens: _CallTokens, waiting: _Waiting) -> Steps[Permit]:
        """Wait in the queue until a call is allowed.

        Raises:
            ThrottleTimeout: The deadline has passed.
        """
        waiter = _Waiter(waiting.wake, _priority.get())
        with self._waiters_lock:
            heapq.heappush(self._waiters, waiter)
        try_enter = partial(self._try_enter, waiter, tokens)
        try:
            while True:
                if waiting.run_apart is None:
                    result = try_enter()
                else:
                    result = yield partial(waiting.run_apart, try_enter)
                if isinstance(result, Permit):
                    return result
                wait_ns: int = result
                if waiting.deadline is not None:
                    wait_ns = min(wait_ns, waiting.deadline - monotonic_ns())
                    if wait_ns <= 0:
                        raise self.timeout_error(waiting.limit_s)
                yield partial(waiting.wait, None if wait_ns == FOREVER else wait_ns / 1e9)
        except BaseException:
            self._remove(waiter)
            raise

    def timeout_error(self, limit_s: float | None) -> ThrottleTimeout:
        """Return the exception for a caller that has waited for `limit_s`."""
        numbers = f"{self.gate.in_flight} calls in flight, {self.waiting_count()} waiting"
        hint = "raise the limit, or max_wait_s, or send less"
        return ThrottleTimeout(f"the throttle gave no permit within {limit_s:g} s: {numbers}", hint)

    def waiting_count(self) -> int:
        """Return how many callers wait."""
        return sum(not waiter.gone for waiter in self._waiters)

    def end_call(
        self, booking: Booking, grant: Grant | None, tokens: float | None, output: float | None
    ) -> None:
        """Correct what a call has booked by what it used, and let the next one in."""
        self._run_now_or_later(partial(self._end_call, booking, grant, tokens, output))

    def apply_headers(self, headers: Mapping[str, str], refused: bool) -> None:
        """Apply the limits that the headers of a response state."""
        self._run_now_or_later(partial(self._apply_headers, headers, refused))

    def _end_call(
        self, booking: Booking, grant: Grant | None, tokens: float | None, output: float | None
    ) -> None:
        with self._gate_lock:
            self.gate.end_call(booking, tokens, output)
            # Without a token count, the estimate in the store stays.
            if self._shared is not None and grant is not None and tokens is not None:
                self._shared.correct(self._name, grant, tokens, output)
        self._wake_first()

    def _apply_headers(self, headers: Mapping[str, str], refused: bool) -> None:
        with self._gate_lock:
            requested_ns, obeyed_ns = self.gate.apply_headers(monotonic_ns(), headers, refused)
            if obeyed_ns and self._shared is not None:
                self._shared.pause(self._name, obeyed_ns)
        if requested_ns < _MIN_LOGGED_PAUSE_NS:
            return
        cut = ""
        if obeyed_ns < requested_ns:
            cut = f"; calls go on after {obeyed_ns / 1e9:g} s (limit max_pause_s)"
        log.warning(
            "the server asks for no call of %s for %g s%s",
            self._name or "any key",
            requested_ns / 1e9,
            cut,
        )

    def _run_now_or_later(self, work: Callable[[], object]) -> None:
        """Run work now, or in the background where that could block.

        In a destructor the code below may hold the lock that the work takes. In an event loop a
        store may take too long.
        """
        if collecting() or (self.is_shared and event_loop.is_running()):
            later(work)
        else:
            work()

    def _try_enter(self, waiter: _Waiter, tokens: _CallTokens) -> Permit | int:
        """Return the permit for a waiter, or the longest time in ns to wait before the next try."""
        with self._waiters_lock:
            if self._first_waiter() is not waiter:
                return FOREVER
        with self._gate_lock:
            result = self._ask_gate(tokens)
        if isinstance(result, int):
            return result
        with self._waiters_lock:
            was_cancelled = waiter.gone
            waiter.gone = True
            waiter.permit = result
        if was_cancelled:
            result.done(0)
        self._wake_first()
        return result

    def _ask_gate(self, tokens: _CallTokens) -> Permit | int:
        """Book a call. Return its permit, or the longest time in ns to wait before the next try."""
        now = monotonic_ns()
        grant: Grant | None = None
        if self._shared is not None and not self.gate.retry_at_without_rates(now, *tokens):
            result = self._shared.enter(self._name, self._ticket, *tokens)
            self._is_in_line = isinstance(result, int)
            if isinstance(result, int):
                return min(result, _MAX_SHARED_WAIT_NS)
            grant = result
        if grant is None:
            retry_at = self.gate.retry_at(now, *tokens)
            if retry_at:
                return FOREVER if retry_at == FOREVER else retry_at - now
        return Permit(self, self.gate.book(now, *tokens), grant, self._obeys_headers)

    def _remove(self, waiter: _Waiter) -> None:
        """Take a caller that stopped waiting out of the queue."""
        if collecting():
            later(partial(self._remove, waiter))
            return
        with self._waiters_lock:
            waiter.gone = True
            is_last = self._first_waiter() is None
        if waiter.permit is not None:
            waiter.permit.done(0)
        if is_last and self._is_in_line:
            self._run_now_or_later(self._leave_line)
        self._wake_first()

    def _leave_line(self) -> None:
        """Give up the place in the line of the processes if nobody waits here any more."""
        with self._gate_lock:
            with self._waiters_lock:
                is_last = self._first_waiter() is None
            if is_last and self._shared is not None:
                self._is_in_line = False
                self._shared.cancel(self._name, self._ticket)

    def _first_waiter(self) -> _Waiter | None:
        while self._waiters and self._waiters[0].gone:
            heapq.heappop(self._waiters)
        return self._waiters[0] if self._waiters else None

    def _wake_first(self) -> None:
        """Wake the first waiting caller, which then tries again."""
        with self._waiters_lock:
            first = self._first_waiter()
        if first is not None:
            first.wake()


class Throttle:
    """Limits for the calls of one or several clients.

    A rate is written as "600/min" or "10/s", and a bare number is per minute. It holds within any
    interval of that length. Tokens are booked by an estimate before a call and corrected when it
    ends.
    """

    def __init__(  # noqa: PLR0913 - a public signature with keywords only
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
        """Check and keep the limits.

        Args:
            requests: The rate of requests, or an `asyncio_throttle.Throttler` that the application
                already shares. A Throttler is for async clients only.
            tokens: The rate of input and output tokens together.
            concurrency: How many calls may be in flight. Each process counts its own.
            each: The limits are counted separately for each key, model or both. An empty tuple
                counts all calls together.
            heed_headers: Wait as the server's Retry-After (after a 429 or 503) and x-ratelimit-*
                headers ask, for `max_pause_s` at most.
            input_tokens: The rate of input tokens.
            output_tokens: The rate of output tokens.
            burst_s: How many seconds' worth of a rate may go at once. 0 spaces calls evenly, and
                None lets the whole limit go at once.
            max_wait_s: The longest wait of a call, after which ThrottleTimeout is raised.
            max_pause_s: The longest pause that the server may ask for.
            shared: The path of a file by which all processes of this host keep the limits
                together, or "redis://HOST:6379/0#NAME", by which those of all hosts do, with the
                package redis.
            pacer: "asyncio-throttle" leaves `requests` to an `asyncio_throttle.Throttler` for each
                key and model, a plain limit for one event loop. It is for async clients only.

        Raises:
            WrongUse: The limits are not valid, or they allow no call.
        """
        is_throttler = hasattr(requests, "acquire") and hasattr(requests, "rate_limit")
        if is_throttler:
            _check_throttler(requests)
        _check_concurrency(concurrency)
        _check_each(each)
        _check_seconds("burst_s", burst_s)
        _check_seconds("max_wait_s", max_wait_s)
        _check_seconds("max_pause_s", max_pause_s)
        rate_options = {
            "requests": None if is_throttler else requests,
            "tokens": tokens,
            "input_tokens": input_tokens,
            "output_tokens": output_tokens,
        }
        rates = {
            name: parse_rate(text, name) for name, text in rate_options.items() if text is not None
        }
        self._make_throttler: Callable[[], Any] | None = None
        if pacer is not None:
            _check_pacer(pacer, rates, is_exclusive=shared is None and burst_s is None)
            self._make_throttler = _throttler_factory(rates.pop("requests"))
        elif is_throttler:
            self._make_throttler = lambda: requests
        self._limits = Limits(
            **rates,
            concurrency=concurrency,
            burst_ns=None if burst_s is None else max(_MIN_BURST_NS, int(burst_s * 1e9)),
            longest_ns=int(max_pause_s * 1e9),
            grain=0 if shared is None else _SHARED_GRAIN,
        )
        self._shared: SharedLimits | None = None
        if shared is not None:
            from .shared_limits import SharedLimits

            self._shared = SharedLimits(shared, self._limits, self._limits.remembered_ns)
        self.max_wait_s = max_wait_s
        self._each = tuple(each)
        self._obeys_headers = heed_headers
        self._gate_queues: dict[tuple[str, ...], _GateQueue] = {}
        self._lock = threading.Lock()
        _throttles.add(self)

    @property
    def counts_tokens(self) -> bool:
        """Whether `acquire` needs an estimate of the tokens of a call."""
        limits = self._limits
        has_token_limit = any((limits.tokens, limits.input_tokens, limits.output_tokens))
        return self._obeys_headers or has_token_limit

    def in_flight(self, *, key: str = "", model: str = "") -> int:
        """Return the number of calls in flight for this key and model."""
        return self._gate_queue(key, model).gate.in_flight

    def waiting(self, *, key: str = "", model: str = "") -> int:
        """Return the number of calls that wait for a permit, for this key and model."""
        return self._gate_queue(key, model).waiting_count()

    async def acquire(
        self,
        *,
        key: str = "",
        model: str = "",
        tokens: float = 0,
        output_tokens: float = 0,
        max_wait_s: float | None = None,
    ) -> Permit:
        """Wait until a call is allowed. A cancelled wait loses its place in the queue.

        Args:
            key: The key of the call.
            model: The model of the call.
            tokens: The estimated input and output tokens.
            output_tokens: The output tokens among them.
            max_wait_s: The longest wait, if it is shorter than that of the Throttle.

        Raises:
            ThrottleTimeout: The longest wait has passed.
        """
        limit_s = self._longest_wait_s(max_wait_s)
        deadline = _deadline_after(limit_s)
        queue = self._gate_queue(key, model)
        wake, wait = event_loop.wakeup()
        if queue.throttler is not None:
            await self._pass_throttler(queue, limit_s)
        run_apart = event_loop.in_thread if queue.is_shared else None
        waiting = _Waiting(wake, wait, limit_s, deadline, run_apart)
        return await run_async(queue.permit(_CallTokens(tokens, output_tokens), waiting))

    def acquire_blocking(
        self,
        *,
        key: str = "",
        model: str = "",
        tokens: float = 0,
        output_tokens: float = 0,
        max_wait_s: float | None = None,
    ) -> Permit:
        """Wait in a thread until a call is allowed. The arguments are those of `acquire`.

        Raises:
            ThrottleTimeout: The longest wait has passed.
            WrongUse: Requests are limited by a Throttler of asyncio.
        """
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

        limit_s = self._longest_wait_s(max_wait_s)
        waiting = _Waiting(event.set, wait, limit_s, _deadline_after(limit_s))
        queue = self._gate_queue(key, model)
        return run_blocking(queue.permit(_CallTokens(tokens, output_tokens), waiting))

    async def _pass_throttler(self, queue: _GateQueue, limit_s: float | None) -> None:
        """Wait for the Throttler of asyncio-throttle."""
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
            raise queue.timeout_error(limit_s) from None

    def _gate_queue(self, key: str, model: str) -> _GateQueue:
        """Return the queue of a key and model."""
        values = {"key": key, "model": model}
        key_values = tuple(values[name] for name in self._each)
        with self._lock:
            queue = self._gate_queues.get(key_values)
            if queue is None:
                queue = self._make_gate_queue(key_values, model)
                self._gate_queues[key_values] = queue
            return queue

    def _make_gate_queue(self, key_values: tuple[str, ...], model: str) -> _GateQueue:
        # The name is never the key itself, because it is logged and written into the shared file.
        name = model if "model" in self._each else ""
        if self._shared is not None:
            name = self._shared.state_name(key_values, name)
        throttler = None if self._make_throttler is None else self._make_throttler()
        return _GateQueue(Gate(self._limits), self._obeys_headers, name, self._shared, throttler)

    def _longest_wait_s(self, max_wait_s: float | None) -> float | None:
        """Return the shorter of the longest wait of a call and that of the Throttle."""
        limits_s = [limit for limit in (max_wait_s, self.max_wait_s) if limit is not None]
        return min(limits_s) if limits_s else None


def _deadline_after(limit_s: float | None) -> int | None:
    return None if limit_s is None else monotonic_ns() + int(limit_s * 1e9)


def _check_throttler(throttler: Any) -> None:
    if not throttler.rate_limit > 0:
        raise WrongUse(
            "out_of_range",
            f"a Throttler of {throttler.rate_limit} allows nothing",
            "give it a rate above 0",
        )


def _check_concurrency(concurrency: object) -> None:
    if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
        raise WrongUse(
            "out_of_range",
            f"concurrency={concurrency!r} allows nothing",
            "at least 1, or leave it out",
        )


def _check_each(each: object) -> None:
    if isinstance(each, str) or not set(each) <= {"key", "model"}:  # type: ignore[call-overload]
        raise WrongUse("unknown_name", f"each={each!r}", 'a tuple of "key" and "model"')


def _check_seconds(name: str, seconds: object) -> None:
    if seconds is None:
        return
    if not isinstance(seconds, int | float) or not 0 <= seconds < _LONGEST_OPTION_S:
        raise WrongUse("out_of_range", f"{name}={seconds!r}", "must be a number of seconds >= 0")


def _check_pacer(pacer: str, rates: Mapping[str, Rate], *, is_exclusive: bool) -> None:
    """Check the option `pacer`. `is_exclusive` says that neither shared nor burst_s is used."""
    if pacer != "asyncio-throttle":
        raise WrongUse(
            "unknown_name", f"pacer={pacer!r}", 'give "asyncio-throttle", or leave it out'
        )
    if "requests" not in rates:
        raise WrongUse(
            "missing_option",
            "asyncio-throttle limits requests, and no such limit is given",
            'add requests="10/s"',
        )
    if not is_exclusive:
        raise WrongUse(
            "conflict",
            "asyncio-throttle keeps a plain limit of one event loop",
            "leave out shared and burst_s",
        )


def _throttler_factory(rate: Rate) -> Callable[[], Any]:
    """Return a function that creates a Throttler of asyncio-throttle with a rate."""
    from asyncio_throttle.throttler import Throttler

    return partial(Throttler, rate_limit=int(rate.limit), period=rate.period_ns / 1e9)


def _reset_after_fork() -> None:
    """Reset all throttles in a child process.

    No call of the parent is in flight there, and no thread of the parent will release a lock.
    """
    for throttle in _throttles:
        throttle._lock = threading.Lock()
        throttle._gate_queues.clear()


_throttles: weakref.WeakSet[Throttle] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
