"""Keep calls below the limits of a provider: requests and tokens per time, and concurrent calls.

A `Throttle` makes tasks and threads wait, by priority and then in the order of arrival. A
`RateLimiter` decides when a call is allowed. Limits that several processes share are kept in a file
or in Redis (`shared_limits`).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ..errors import ThrottleTimeout, WrongUse
from . import event_loop
from .background import is_collecting_garbage, run_in_background
from .rate_limiter import (
    ALLOWED_NOW,
    FOREVER,
    MAX_PAUSE_S,
    Booking,
    Limits,
    Pause,
    Rate,
    RateLimiter,
    parse_rate,
)
from .steps import Steps, run_steps, run_steps_async

if TYPE_CHECKING:
    from .shared_limits import SharedLimits
    from .shared_rate_limiter import Grant

log = logging.getLogger("loadgen_sdk")

_NS_PER_PRIORITY_LEVEL = 10_000_000_000
"""A call overtakes calls of the next lower priority that came up to this much earlier."""

_MIN_BURST_NS = 50_000_000
"""An evenly spaced limit makes up for a late wake-up within this time."""

_MAX_SHARED_WAIT_NS = 1_000_000_000
"""Corrections of other processes may make room earlier than the store has predicted."""

_MIN_LOGGED_PAUSE_NS = 1_000_000_000
"""Shorter pauses are usual at a rate limit, so that they are not logged."""

_SHARED_ENTRIES_PER_PERIOD = 500
"""The most bookings that a shared window stores for a period of its rate.

All of them are read and written at each call. A call may wait up to 0.2 % of a period too long.
"""

_MAX_OPTION_S = 1e9

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
            "give an integer; 0 is the default, and higher values go first",
        )

    token = _priority.set(level)
    try:
        yield
    finally:
        _priority.reset(token)


class Throttler(Protocol):
    """The part of an `asyncio_throttle.Throttler` that a Throttle uses."""

    @property
    def rate_limit(self) -> float:
        """The calls that are allowed per period."""

    async def acquire(self) -> None:
        """Wait until the next call is allowed."""


class Permit:
    """The permission of a Throttle to make one call.

    `done` or the end of a `with` block returns it.

    Attributes:
        over: The permit was returned.
    """

    __slots__ = ("_booking", "_call_queue", "_obeys_headers", "_shared_grant", "over")

    def __init__(
        self,
        call_queue: _CallQueue,
        booking: Booking,
        shared_grant: Grant | None,
        *,
        obeys_headers: bool,
    ) -> None:
        """Create the permit of a call that was counted against the limits.

        Only a Throttle does this. Applications get permits from `Throttle.acquire`.

        Args:
            call_queue: The queue in which the call has waited. It takes the permit back.
            booking: What was counted in this process: one request and the estimated tokens.
            shared_grant: What was counted in the store that several processes share, or None if
                they share no limits.
            obeys_headers: Whether `heed` applies the limits that the server states.
        """
        self.over = False
        self._call_queue = call_queue
        self._booking = booking
        self._shared_grant = shared_grant
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
            self._call_queue.apply_headers(headers, is_refused=refused)

    def done(self, tokens: int | None = None, output_tokens: int | None = None) -> None:
        """Return the permit to the Throttle when the call is over, for the next waiting call.

        A second call of this method does nothing.

        Args:
            tokens: The input and output tokens that the call used, which replace the estimate.
            output_tokens: The output tokens among them.
        """
        if self.over:
            return
        self.over = True
        self._call_queue.end_call(self._booking, self._shared_grant, tokens, output_tokens)


class _Waiter:
    """A caller that waits for a permit. Waiters are sorted by arrival and priority.

    Attributes:
        wake: Makes the caller try again.
        sort_key: The time of arrival in ns, made earlier by the priority, and a number that decides
            between equal times.
        has_left: The caller does not wait any more: it got a permit, was cancelled or timed out.
        permit: The permit that the caller got, or None.
    """

    def __init__(self, wake: Callable[[], object], priority_level: int) -> None:
        """Note that a caller arrives now."""
        self.wake = wake
        effective_arrival_ns = monotonic_ns() - priority_level * _NS_PER_PRIORITY_LEVEL
        self.sort_key = (effective_arrival_ns, next(_arrival_numbers))
        self.has_left = False
        self.permit: Permit | None = None

    def __lt__(self, other: _Waiter) -> bool:
        """Return True if this waiter comes first."""
        return self.sort_key < other.sort_key


@dataclass(frozen=True)
class _WaitMethod:
    """How one caller waits: in a thread or in an event loop, and for how long at most.

    Attributes:
        wake: Ends a wait. May be called from any thread.
        wait: Waits until `wake` is called, or for a number of seconds at most.
        timeout_s: The longest wait in seconds, or None for no limit.
        deadline_ns: The monotonic time at which the longest wait ends, or None.
        run_in_thread: Calls a function in another thread. It is set in an event loop, which the
            input and output of a shared store would block. None calls the function directly.
    """

    wake: Callable[[], object]
    wait: Callable[[float | None], object]
    timeout_s: float | None
    deadline_ns: int | None
    run_in_thread: Callable[[Callable[[], PermitOrWait]], Awaitable[PermitOrWait]] | None = None

    def run_without_blocking(self, function: Callable[[], PermitOrWait]) -> Steps[PermitOrWait]:
        """Call a function and return its result. In an event loop, another thread calls it.

        This is a generator of `Steps`, because an event loop has to await the other thread.
        """
        if self.run_in_thread is None:
            return function()
        result: PermitOrWait = yield partial(self.run_in_thread, function)
        return result

    def has_timed_out(self) -> bool:
        """Return True if the deadline has passed."""
        return self.deadline_ns is not None and monotonic_ns() >= self.deadline_ns

    def next_wait_s(self, retry_after_ns: int) -> float | None:
        """Return how many seconds to wait before the next try, or None to wait to be woken.

        The wait ends at the deadline at the latest.

        Args:
            retry_after_ns: How long the limits have told the call to wait. FOREVER, if only the end
                of another call can help.
        """
        wait_ns = retry_after_ns
        if self.deadline_ns is not None:
            wait_ns = min(wait_ns, self.deadline_ns - monotonic_ns())
        if wait_ns == FOREVER:
            return None
        return max(0, wait_ns) / 1e9


PermitOrWait = Permit | int
"""The result of a try to get a permit: the permit, or how many ns to wait before the next try.

The number is FOREVER for a caller that has to wait until it is woken.
"""


class _CallTokens(NamedTuple):
    """The estimated tokens of a call: input and output together, and the output among them."""

    total: float
    output: float


class _CallQueue:
    """The calls of one key and model that wait for a permit, and the limiter that grants permits.

    If processes share the limits, the rates are counted in a store, and the store has a queue of
    processes. This process then has a single entry in that queue, for the first of its waiters.

    Attributes:
        limiter: The limits of this process.
        throttler: A Throttler of asyncio-throttle, which every call passes first, or None.
        is_shared: The rates are shared with other processes.
    """

    def __init__(
        self,
        limiter: RateLimiter,
        *,
        name: str,
        obeys_headers: bool,
        shared_limits: SharedLimits | None,
        throttler: Throttler | None,
    ) -> None:
        """Create a queue without waiters.

        Args:
            limiter: The limits of this process.
            name: The name of the key and model in logs and in the store.
            obeys_headers: Whether permits apply the limits that the server states.
            shared_limits: The rates that several processes share in a store, which is a file or
                Redis. None if they share none.
            throttler: A Throttler of asyncio-throttle, which every call passes first, or None.
        """
        self.limiter = limiter
        self.throttler = throttler
        self.is_shared = shared_limits is not None
        self._name = name
        self._obeys_headers = obeys_headers
        self._shared_limits = shared_limits

        # Protects the limits. It stays locked during the input and output of a store, which would
        # block an event loop. If there is a store, only other threads take this lock.
        self._limiter_lock = threading.Lock()

        # Protects the waiters. It is never locked for long.
        self._waiters_lock = threading.Lock()
        self._waiters: list[_Waiter] = []  # a heap, in the order of `_Waiter.sort_key`

        # The store has a queue of processes. This identifies the entry of this process in it.
        self._entry_id = secrets.token_hex(8)
        self._is_in_shared_queue = False

    def acquire(self, tokens: _CallTokens, wait_method: _WaitMethod) -> Steps[Permit]:
        """Wait in the queue until a call is allowed, and return its permit.

        The caller tries to get a permit. If it gets none, it waits, and tries again after the time
        that `_try_acquire` returns, or earlier if the end of another call wakes it.

        This generator serves threads and event loops. `yield function` means: call `function`, and
        await what it returns in an event loop (see `Steps`).

        Args:
            tokens: The estimated tokens of the call.
            wait_method: How the caller waits, and until when at most.

        Raises:
            ThrottleTimeout: The deadline has passed.
        """
        waiter = _Waiter(wait_method.wake, _priority.get())
        with self._waiters_lock:
            heapq.heappush(self._waiters, waiter)

        try_acquire = partial(self._try_acquire, waiter, tokens)
        try:
            while True:
                permit_or_wait_ns = yield from wait_method.run_without_blocking(try_acquire)
                if isinstance(permit_or_wait_ns, Permit):
                    # `_grant_permit` has removed the waiter from the queue.
                    return permit_or_wait_ns
                if wait_method.has_timed_out():
                    raise self.timeout_error(wait_method.timeout_s)

                wait_s = wait_method.next_wait_s(retry_after_ns=permit_or_wait_ns)
                yield partial(wait_method.wait, wait_s)
        except BaseException:
            # The caller has timed out or was cancelled. Other callers must not wait behind it.
            self._remove_waiter(waiter)
            raise

    def timeout_error(self, timeout_s: float | None) -> ThrottleTimeout:
        """Return the exception for a caller that has waited for `timeout_s`."""
        counts = (
            f"{self.limiter.in_flight} calls are in flight and {self.waiting_count()} are waiting"
        )
        hint = "raise the limit or max_wait_s, or send fewer calls"
        message = f"the throttle did not admit the call within {timeout_s:g} s: {counts}"
        return ThrottleTimeout(message, hint)

    def waiting_count(self) -> int:
        """Return how many callers wait."""
        return sum(not waiter.has_left for waiter in self._waiters)

    def end_call(
        self,
        booking: Booking,
        shared_grant: Grant | None,
        tokens: float | None,
        output_tokens: float | None,
    ) -> None:
        """Correct the counts for a call that has ended, which may let the first waiter start.

        This returns at once where it could block: another thread then does the work.

        Args:
            booking: What was counted for the call in this process.
            shared_grant: What was counted for it in the store that processes share, or None.
            tokens: The input and output tokens that the call used, which replace the estimate. None
                keeps the estimate.
            output_tokens: The output tokens among them, or None if their number is not known.
        """
        self._run_without_blocking(
            partial(self._correct_estimate, booking, shared_grant, tokens, output_tokens)
        )

    def apply_headers(self, headers: Mapping[str, str], *, is_refused: bool) -> None:
        """Apply the limits that the headers of a response state to all calls of this queue.

        `is_refused` says that the response is a 429 or 503, so that Retry-After is obeyed.
        """
        self._run_without_blocking(partial(self._pause_calls, headers, is_refused))

    def _correct_estimate(
        self,
        booking: Booking,
        shared_grant: Grant | None,
        tokens: float | None,
        output_tokens: float | None,
    ) -> None:
        """Replace the estimated tokens of a call that has ended by those that it used.

        This may block, because the store that processes share is a file or Redis. The first waiter
        is woken, because the limits may now allow its call.

        Args:
            booking: What was counted for the call in this process.
            shared_grant: What was counted for it in the store that processes share, or None.
            tokens: The input and output tokens that the call used. None keeps the estimate.
            output_tokens: The output tokens among them, or None if their number is not known.
        """
        with self._limiter_lock:
            self.limiter.end_call(booking, tokens, output_tokens)
            # The store has an entry to correct only if it has granted the call.
            if self._shared_limits is not None and shared_grant is not None and tokens is not None:
                self._shared_limits.correct(self._name, shared_grant, tokens, output_tokens)
        self._wake_first_waiter()

    def _pause_calls(self, headers: Mapping[str, str], is_refused: bool) -> None:
        """Pause all calls for as long as the headers of a response demand, and log a long pause.

        A server may demand a longer pause than the throttle accepts. The accepted pause
        (`obeyed_ns`) also holds for the other processes if the limits are shared. This may block,
        because the store of shared limits is a file or Redis.
        """
        with self._limiter_lock:
            pause = self.limiter.apply_headers(monotonic_ns(), headers, is_refused)
            if pause.obeyed_ns and self._shared_limits is not None:
                self._shared_limits.pause(self._name, pause.obeyed_ns)
        if pause.requested_ns >= _MIN_LOGGED_PAUSE_NS:
            self._log_pause(pause)

    def _log_pause(self, pause: Pause) -> None:
        """Log how long the server asks to pause, and whether the pause is cut short."""
        limit_text = ""
        if pause.obeyed_ns < pause.requested_ns:
            limit_text = f"; calls continue after {pause.obeyed_ns / 1e9:g} s (limit max_pause_s)"

        log.warning(
            "the server asks to pause calls of %s for %g s%s",
            self._name or "any key",  # The name is empty if all calls are counted together.
            pause.requested_ns / 1e9,
            limit_text,
        )

    def _run_without_blocking(self, function: Callable[[], object]) -> None:
        """Call a function now, or in the background where it could block.

        In a destructor, the code that the garbage collector has interrupted may hold the lock that
        the function takes. In an event loop, the input and output of a store may take too long.
        """
        if is_collecting_garbage() or (self.is_shared and event_loop.is_running()):
            run_in_background(function)
        else:
            function()

    def _try_acquire(self, waiter: _Waiter, tokens: _CallTokens) -> PermitOrWait:
        """Return a permit for a waiter, or how many ns it has to wait before the next try.

        Only the first waiter can get a permit. Any other one has to wait until it is woken, so that
        its number is FOREVER. If limits are shared, another thread than that of the event loop
        calls this, because the store would block the loop.
        """
        with self._waiters_lock:
            is_first = self._first_waiter() is waiter

        if not is_first:
            return FOREVER

        with self._limiter_lock:
            permit_or_wait_ns = self._book_if_allowed(tokens)

        if isinstance(permit_or_wait_ns, Permit):
            self._grant_permit(waiter, permit_or_wait_ns)

        return permit_or_wait_ns

    def _grant_permit(self, waiter: _Waiter, permit: Permit) -> None:
        """Remove the first waiter from the queue, because it gets a permit, and wake the next one.

        If limits are shared, a thread gets the permit while the waiter is in an event loop. The
        waiter may have been cancelled there, or have timed out, in the meantime. It will then not
        use the permit, which is returned here.
        """
        with self._waiters_lock:
            # A cancelled waiter was marked as having left before this method marks it.
            was_cancelled = waiter.has_left
            waiter.has_left = True
            waiter.permit = permit

        if was_cancelled:
            permit.done(tokens=0)

        # The limits may allow the next call as well.
        self._wake_first_waiter()

    def _book_if_allowed(self, tokens: _CallTokens) -> PermitOrWait:
        """Count a call against the limits and return its permit, if all limits allow it now.

        Otherwise nothing is counted. Return how many ns to wait before the next try, or FOREVER to
        wait for the end of another call.

        If processes share the rates, a store decides about the rates. This process decides about
        the rest: its own calls in flight, and the limits that the server states. If the store
        fails, this process decides about the rates, too.
        """
        now = monotonic_ns()
        if self._shared_limits is not None:
            # Do not ask the store for a call that this process does not allow.
            retry_at = self.limiter.retry_at_without_rates(now, *tokens)
            if retry_at == ALLOWED_NOW:
                grant_or_wait_ns = self._request_shared_grant(self._shared_limits, tokens)
                if isinstance(grant_or_wait_ns, int):
                    return min(grant_or_wait_ns, _MAX_SHARED_WAIT_NS)
                if grant_or_wait_ns is not None:
                    return self._book(now, tokens, shared_grant=grant_or_wait_ns)

        retry_at = self.limiter.retry_at(now, *tokens)
        if retry_at == ALLOWED_NOW:
            return self._book(now, tokens, shared_grant=None)

        return FOREVER if retry_at == FOREVER else retry_at - now

    def _book(self, now: int, tokens: _CallTokens, shared_grant: Grant | None) -> Permit:
        """Count a call that is allowed against the limits of this process. Return its permit.

        `shared_grant` is what was counted for it in the store that processes share, or None.
        """
        booking = self.limiter.book(now, *tokens)
        return Permit(self, booking, shared_grant, obeys_headers=self._obeys_headers)

    def _request_shared_grant(
        self, shared_limits: SharedLimits, tokens: _CallTokens
    ) -> Grant | int | None:
        """Ask the store that processes share whether the rates allow a call.

        The store has a queue of processes. If it does not allow the call, this process waits there.

        Args:
            shared_limits: The limits in the store.
            tokens: The estimated tokens of the call.

        Returns:
            A Grant, which is what the store has counted for an allowed call. An int, which is how
            many ns to wait before the next request. None if the store fails.
        """
        grant_or_wait_ns = shared_limits.enter(self._name, self._entry_id, *tokens)
        is_waiting = isinstance(grant_or_wait_ns, int)
        self._is_in_shared_queue = is_waiting
        return grant_or_wait_ns

    def _remove_waiter(self, waiter: _Waiter) -> None:
        """Remove a caller that was cancelled or has timed out from the queue.

        Another thread does this if the garbage collector is running. It closes a coroutine that
        nobody awaits any more, and the code that it has interrupted may hold the lock.
        """
        if is_collecting_garbage():
            run_in_background(partial(self._remove_waiter_now, waiter))
        else:
            self._remove_waiter_now(waiter)

    def _remove_waiter_now(self, waiter: _Waiter) -> None:
        """Remove a caller that was cancelled or has timed out, and wake the next one.

        If processes share limits, their store has a queue of processes. This process leaves that
        queue if none of its callers waits any more. The other processes would wait for it in vain.
        """
        with self._waiters_lock:
            waiter.has_left = True
            is_queue_empty = self._first_waiter() is None

        if waiter.permit is not None:
            # A thread got the permit before the caller was cancelled, so that nobody will use it.
            waiter.permit.done(tokens=0)

        if is_queue_empty and self._is_in_shared_queue:
            self._run_without_blocking(self._leave_shared_queue)

        self._wake_first_waiter()

    def _leave_shared_queue(self) -> None:
        """Remove the entry of this process from the queue of processes, unless a caller waits."""
        with self._limiter_lock:
            with self._waiters_lock:
                is_queue_empty = self._first_waiter() is None
            if is_queue_empty and self._shared_limits is not None:
                self._is_in_shared_queue = False
                self._shared_limits.cancel(self._name, self._entry_id)

    def _first_waiter(self) -> _Waiter | None:
        """Return the first caller that still waits. Those that have left are dropped here."""
        while self._waiters and self._waiters[0].has_left:
            heapq.heappop(self._waiters)
        return self._waiters[0] if self._waiters else None

    def _wake_first_waiter(self) -> None:
        """Wake the first waiting caller, which then tries again."""
        with self._waiters_lock:
            first_waiter = self._first_waiter()
        if first_waiter is not None:
            first_waiter.wake()


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
        shared: str | os.PathLike[str] | None = None,
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
            shared: Where processes keep the limits together: the path of a file for the processes
                of this host, or "redis://HOST:6379/0#NAME" for those of several hosts (with the
                package redis). None limits this process alone.
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

        rates = _parse_rates(
            requests=None if is_throttler else requests,
            tokens=tokens,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
        )
        self._create_throttler: Callable[[], Throttler] | None = None
        if pacer is not None:
            _check_pacer(pacer, rates, has_other_options=shared is not None or burst_s is not None)
            self._create_throttler = _throttler_factory(rates.pop("requests"))
        elif is_throttler:
            self._create_throttler = lambda: requests

        self._limits = Limits(
            **rates,
            concurrency=concurrency,
            burst_ns=None if burst_s is None else max(_MIN_BURST_NS, int(burst_s * 1e9)),
            max_pause_ns=int(max_pause_s * 1e9),
            entries_per_period=None if shared is None else _SHARED_ENTRIES_PER_PERIOD,
        )
        self._shared_limits = _open_shared_limits(shared, self._limits)
        self.max_wait_s = max_wait_s
        self._separated_by = tuple(each)
        self._obeys_headers = heed_headers
        self._call_queues: dict[tuple[str, ...], _CallQueue] = {}
        self._lock = threading.Lock()
        _throttles.add(self)  # so that it is reset in a forked child

    @property
    def counts_tokens(self) -> bool:
        """Whether `acquire` needs an estimate of the tokens of a call."""
        limits = self._limits
        has_token_limit = any((limits.tokens, limits.input_tokens, limits.output_tokens))
        return self._obeys_headers or has_token_limit

    def in_flight(self, *, key: str = "", model: str = "") -> int:
        """Return the number of calls in flight for this key and model."""
        return self._get_call_queue(key, model).limiter.in_flight

    def waiting(self, *, key: str = "", model: str = "") -> int:
        """Return the number of calls that wait for a permit, for this key and model."""
        return self._get_call_queue(key, model).waiting_count()

    async def acquire(
        self,
        *,
        key: str = "",
        model: str = "",
        tokens: float = 0,
        output_tokens: float = 0,
        max_wait_s: float | None = None,
    ) -> Permit:
        """Wait until a call is allowed, and return its permit.

        The call waits in a queue, which it leaves if it is cancelled.

        Args:
            key: The API key with which the call is made. Each key may have limits of its own.
            model: The model of the call. Each model may have limits of its own.
            tokens: The estimated input and output tokens.
            output_tokens: The output tokens among them.
            max_wait_s: The longest wait, if it is shorter than that of the Throttle.

        Raises:
            ThrottleTimeout: The longest wait has passed.
        """
        timeout_s = self._timeout_s(max_wait_s)
        deadline_ns = _deadline_after(timeout_s)
        queue = self._get_call_queue(key, model)
        wakeup = event_loop.create_wakeup()

        if queue.throttler is not None:
            # The application has chosen the package asyncio-throttle for the limit of requests. The
            # queue limits everything else.
            await self._wait_for_throttler(queue.throttler, queue, timeout_s)

        wait_method = _WaitMethod(
            wake=wakeup.wake,
            wait=wakeup.wait,
            timeout_s=timeout_s,
            deadline_ns=deadline_ns,
            # The store that processes share is a file or Redis, which would block the event loop.
            run_in_thread=event_loop.run_in_thread if queue.is_shared else None,
        )
        call_tokens = _CallTokens(tokens, output_tokens)
        return await run_steps_async(queue.acquire(call_tokens, wait_method))

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
            WrongUse: Requests are limited by a Throttler of the package asyncio-throttle.
        """
        if self._create_throttler is not None:
            raise WrongUse(
                "event_loop",
                "a Throttler of asyncio cannot make a thread wait",
                'give requests="10/s" instead',
            )

        timeout_s = self._timeout_s(max_wait_s)
        wait_method = _create_thread_wait_method(timeout_s)
        queue = self._get_call_queue(key, model)

        # The queue yields the functions that wait, and `run_steps` calls them in this thread.
        return run_steps(queue.acquire(_CallTokens(tokens, output_tokens), wait_method))

    async def _wait_for_throttler(
        self, throttler: Throttler, queue: _CallQueue, timeout_s: float | None
    ) -> None:
        """Wait until a Throttler of the package asyncio-throttle allows the call.

        Args:
            throttler: The Throttler.
            queue: The queue of the call, for the text of the error.
            timeout_s: The longest wait, or None for no limit.

        Raises:
            ThrottleTimeout: The call was not allowed within `timeout_s`.
            WrongUse: The call runs in trio, where asyncio-throttle does not work.
        """
        if not event_loop.is_asyncio_running():
            raise WrongUse(
                "event_loop",
                "asyncio-throttle can only wait in asyncio",
                'leave out pacer="asyncio-throttle"',
            )
        try:
            async with asyncio.timeout(timeout_s):
                await throttler.acquire()
        except TimeoutError:
            raise queue.timeout_error(timeout_s) from None

    def _get_call_queue(self, key: str, model: str) -> _CallQueue:
        """Return the queue for the calls of a key and model, and create it for their first call.

        The option `each` says whether calls of different keys, or of different models, have
        separate limits. Calls that are counted together have the same queue.
        """
        key_and_model = {"key": key, "model": model}
        queue_id = tuple(key_and_model[name] for name in self._separated_by)
        with self._lock:
            queue = self._call_queues.get(queue_id)
            if queue is None:
                queue = self._create_call_queue(queue_id, model)
                self._call_queues[queue_id] = queue
            return queue

    def _create_call_queue(self, queue_id: tuple[str, ...], model: str) -> _CallQueue:
        """Return a new queue for calls that are counted together.

        Args:
            queue_id: What the calls of the queue have in common: the API key and the model, one of
                them, or neither. The option `each` of the Throttle decides. The id is neither
                logged nor stored, because an API key is secret.
            model: The model of the first call.
        """
        # The queue has a name for logs and for the store. It is empty if the models have one queue.
        has_queue_per_model = "model" in self._separated_by
        queue_name = model if has_queue_per_model else ""
        if self._shared_limits is not None:
            # The store needs different names for the queues of different API keys.
            queue_name = self._shared_limits.state_name(queue_id, model=queue_name)

        throttler = None if self._create_throttler is None else self._create_throttler()
        return _CallQueue(
            RateLimiter(self._limits),
            name=queue_name,
            obeys_headers=self._obeys_headers,
            shared_limits=self._shared_limits,
            throttler=throttler,
        )

    def _timeout_s(self, max_wait_s: float | None) -> float | None:
        """Return the shorter of the longest wait of a call and that of the Throttle."""
        timeouts_s = [wait_s for wait_s in (max_wait_s, self.max_wait_s) if wait_s is not None]
        return min(timeouts_s) if timeouts_s else None


def _open_shared_limits(
    shared: str | os.PathLike[str] | None, limits: Limits
) -> SharedLimits | None:
    """Return the limits that processes share at a location, or None if there is no location."""
    if shared is None:
        return None
    # Imported here, because it needs a POSIX system, and most throttles are not shared.
    from .shared_limits import SharedLimits

    return SharedLimits(shared, limits)


def _parse_rates(**options: str | int | float | None) -> dict[str, Rate]:
    """Return the parsed rates by the names of their options. None stands for no limit."""
    return {name: parse_rate(text, name) for name, text in options.items() if text is not None}


def _create_thread_wait_method(timeout_s: float | None) -> _WaitMethod:
    """Return a wait method for the current thread, which waits for `timeout_s` at most.

    It waits for a `threading.Event`, which other threads set to wake it.
    """
    event = threading.Event()

    def wait(seconds: float | None) -> None:
        # It does not matter whether the event was set: the call tries again in either case.
        event.wait(seconds)
        event.clear()

    return _WaitMethod(
        wake=event.set, wait=wait, timeout_s=timeout_s, deadline_ns=_deadline_after(timeout_s)
    )


def _deadline_after(timeout_s: float | None) -> int | None:
    """Return the monotonic time in ns at which a timeout that begins now ends."""
    return None if timeout_s is None else monotonic_ns() + int(timeout_s * 1e9)


def _check_throttler(throttler: Throttler) -> None:
    """Raise WrongUse if a Throttler of the application allows no call."""
    if not throttler.rate_limit > 0:
        raise WrongUse(
            "out_of_range",
            f"a Throttler with a rate of {throttler.rate_limit} never admits a call",
            "give it a rate above 0",
        )


def _check_concurrency(concurrency: object) -> None:
    """Raise WrongUse if the option is neither a positive integer nor None (no limit)."""
    if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
        raise WrongUse(
            "out_of_range",
            f"concurrency={concurrency!r} allows nothing",
            "give at least 1, or leave it out",
        )


def _check_each(each: object) -> None:
    if isinstance(each, str) or not set(each) <= {"key", "model"}:  # type: ignore[call-overload]
        raise WrongUse("unknown_name", f"each={each!r}", 'give a tuple of "key" and "model"')


def _check_seconds(name: str, seconds: object) -> None:
    """Raise WrongUse if the option `name` is neither a number of seconds nor None (not set)."""
    if seconds is None:
        return
    if not isinstance(seconds, int | float) or not 0 <= seconds < _MAX_OPTION_S:
        raise WrongUse("out_of_range", f"{name}={seconds!r}", "must be a number of seconds >= 0")


def _check_pacer(pacer: str, rates: Mapping[str, Rate], *, has_other_options: bool) -> None:
    """Raise WrongUse if the option `pacer` is unknown or does not fit the other options.

    `has_other_options` says that `shared` or `burst_s` is used. A Throttler of asyncio-throttle has
    neither: it limits one event loop and does not space its calls.
    """
    if pacer != "asyncio-throttle":
        raise WrongUse(
            "unknown_name", f"pacer={pacer!r}", 'give "asyncio-throttle", or leave it out'
        )

    if "requests" not in rates:
        raise WrongUse(
            "missing_option",
            "asyncio-throttle limits requests, so it needs a limit of requests",
            'add requests="10/s"',
        )

    if has_other_options:
        raise WrongUse(
            "conflict",
            "asyncio-throttle supports only a plain limit in one event loop",
            "leave out shared and burst_s",
        )


def _throttler_factory(rate: Rate) -> Callable[[], Throttler]:
    """Return a function that creates a Throttler of asyncio-throttle with a rate."""
    from asyncio_throttle import throttler

    return partial(throttler.Throttler, rate_limit=int(rate.limit), period=rate.period_ns / 1e9)


def _reset_after_fork() -> None:
    """Reset all throttles in a child process.

    No call of the parent is in flight there, and no thread of the parent will release a lock.
    """
    for throttle in _throttles:
        throttle._lock = threading.Lock()
        throttle._call_queues.clear()


_throttles: weakref.WeakSet[Throttle] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
