"""The arithmetic of limits, without IO: given the time, a `Gate` grants a call or returns when to ask again."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import WrongUse
from .rate_limit_headers import Level, level, retry_after_s

FOREVER = 1 << 62
MAX_PAUSE_S = 60.0  # a server that asks for a longer pause is asked again after this time
EARLIER_BOOT_NS = (
    1_000_000_000  # shared bookings later than now by this much are of an earlier boot of this host
)
_PERIODS_NS = {
    "s": 10**9,
    "sec": 10**9,
    "second": 10**9,
    "min": 60 * 10**9,
    "minute": 60 * 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "hour": 3600 * 10**9,
}


class Rate(NamedTuple):
    """At most `limit` (requests or tokens) within any interval of `period_ns`."""

    limit: float
    period_ns: int


def rate(text: str | int | float, what: str) -> Rate:
    """Parse `10/s` or `600/min`; a bare number is per minute, as providers state limits. Raises WrongUse."""
    hint = f'{what}="600/min", or "10/s"'
    amount, slash, unit = str(text).partition("/")
    period = _PERIODS_NS.get(unit.strip() if slash else "min")
    try:
        limit = float(amount.replace(",", "").replace("_", ""))
    except ValueError:
        limit = math.nan
    if period is None or math.isnan(limit):
        raise WrongUse("invalid_value", f"{what}={text!r} is no rate", hint)
    if limit <= 0 or math.isinf(limit):
        problem = (
            f"{what}={text!r} would let nothing through"
            if limit <= 0
            else f"{what}=inf limits nothing"
        )
        raise WrongUse("out_of_range", problem, f"{hint}, or leave it out")
    if limit < 1 and what == "requests":  # the window must have room for one request
        return Rate(1.0, round(period / limit))
    return Rate(limit, period)


class _Window:
    """The amounts booked within the last period. A booked amount can be corrected later.

    burst_ns: None: the whole limit may go at once. Else at most this much time's worth may, and the rest is spaced
    evenly: `_paid_until` is the instant up to which the rate is used up by what was booked.
    """

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
        self._paid_until = max(self._paid_until, float(now))
        self._add(amount)
        return times[-1]

    def correct(self, booked_at: int, difference: float) -> None:
        """What was booked at `booked_at` was really `difference` more."""
        index = bisect_left(self._times, booked_at, self._head)
        if index < len(self._times) and self._same_entry(
            booked_at, self._times[index]
        ):  # else it left the window
            self._amounts[index] += difference
            self._add(difference)

    def _add(self, amount: float) -> None:
        self._sum += amount
        self._paid_until += amount * self._rate.period_ns / self._rate.limit

    def _same_entry(self, at: int, booked_at: int) -> bool:
        return (
            at // self._grain_ns == booked_at // self._grain_ns
            if self._grain_ns
            else at == booked_at
        )

    def state(self) -> list[Any]:
        """What another process needs to go on."""
        return [self._times[self._head :], self._amounts[self._head :], self._paid_until]

    def restore(self, state: list[Any], now: int) -> None:
        times, amounts, paid_until = state
        if times and times[-1] > now + EARLIER_BOOT_NS:
            times, amounts, paid_until = [], [], 0.0
        self._head, self._times, self._amounts, self._paid_until = (
            0,
            [*times],
            [*amounts],
            float(paid_until),
        )
        self._sum = math.fsum(amounts)


class _ServerBucket:
    """A limit as the server counts it. Its reset header is the time until the bucket is full again, so `limit -
    remaining` come back in that time, evenly. Without a limit (0) nothing is known to come back before the reset.
    """

    def __init__(self, level: Level, now: int, longest_ns: int) -> None:
        self._limit, self._left, self._at = level.limit, level.remaining, now
        self._full_at = now + level.reset_ns
        self._latest = now + longest_ns
        self._ns_each = level.reset_ns / (level.limit - level.remaining) if level.limit else 0.0

    def free_at(self, amount: float) -> int:
        """The instant at which `amount` more is there, however long that is. More than the limit: when it is full."""
        missing = (min(amount, self._limit) if self._limit else amount) - self._left
        if missing <= 0:
            return 0
        return self._at + math.ceil(missing * self._ns_each) if self._limit else self._full_at

    def obeyed_at(self, amount: float) -> int:
        """`free_at`, but not later than the longest pause that is obeyed."""
        return min(self.free_at(amount), self._latest)

    def book(self, now: int, amount: float) -> None:
        if self._ns_each:
            self._left, self._at = (
                min(self._limit, self._left + (now - self._at) / self._ns_each),
                now,
            )
        elif now >= min(self._full_at, self._latest):
            self._left = math.inf  # nothing is known of the time after the reset
        self._left -= amount


class Limits(NamedTuple):
    """The limits of one key and model. burst_ns: see `_Window`. longest_ns: of a pause that the server asks for."""

    requests: Rate | None = None
    tokens: Rate | None = None
    input_tokens: Rate | None = None
    output_tokens: Rate | None = None
    concurrency: int | None = None
    burst_ns: int | None = None
    longest_ns: int = int(MAX_PAUSE_S * 1e9)
    grain: int = 0  # periods are cut into this many parts, for shared windows; 0: exact

    def rates(self) -> dict[str, Rate]:
        """Those that are limited, by name."""
        names = ("requests", "tokens", "input_tokens", "output_tokens")
        return {name: rate for name in names if (rate := getattr(self, name)) is not None}

    @property
    def remembered_ns(self) -> int:
        """How long a state is of use: nothing in it is older than the longest period, nor later than a pause."""
        return self.longest_ns + max((rate.period_ns for rate in self.rates().values()), default=0)


class Booking(NamedTuple):
    """What a granted call has booked: amounts by kind (tokens, input_tokens, output_tokens), and when."""

    amounts: dict[str, float]
    at: dict[str, int]


class Gate:
    """The limits of one key and model, without IO. Instants are monotonic ns. Not thread-safe: `Throttle` locks it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._windows: dict[str, _Window] = {}
        for name, limit in limits.rates().items():
            grain_ns = limit.period_ns // limits.grain if limits.grain else 0
            self._windows[name] = _Window(limit, limits.burst_ns, grain_ns)
        self.in_flight = 0
        self._paused_until = 0  # the server asked for no call before this instant
        self._server: dict[str, _ServerBucket] = {}  # by its last answer

    def ask(self, now: int, tokens: float, output: float = 0) -> int:
        """0: granted (nothing is booked yet). Else the instant at which to ask again; FOREVER: when a call ends.

        `tokens`: input and output; `output`: of them.
        """
        grant_at = self.ask_beside_windows(now, tokens, output) or now
        amounts = amounts_of(tokens, output)
        for name, window in self._windows.items():
            grant_at = max(grant_at, window.free_at(now, amounts[name]))
        return 0 if grant_at <= now else grant_at

    def ask_beside_windows(self, now: int, tokens: float, output: float = 0) -> int:
        """`ask` without the rates, where they are shared: concurrency, and what the server asks for."""
        if self.in_flight >= (self._limits.concurrency or FOREVER):
            return FOREVER
        grant_at = max(now, self._paused_until)
        amounts = amounts_of(tokens, output)
        for name, bucket in self._server.items():
            grant_at = max(grant_at, bucket.obeyed_at(amounts[name]))
        return 0 if grant_at <= now else grant_at

    def pause(self, until: int) -> None:
        """No call before this instant."""
        self._paused_until = max(self._paused_until, until)

    def enter(self, now: int, tokens: float, output: float = 0) -> Booking:
        """Book a granted call. Returns the booking to pass to `leave`."""
        self.in_flight += 1
        amounts = amounts_of(tokens, output)
        for name, bucket in self._server.items():
            bucket.book(now, amounts[name])
        return Booking(
            amounts,
            {name: window.book(now, amounts[name]) for name, window in self._windows.items()},
        )

    def leave(self, booking: Booking, tokens: float | None, output: float | None = None) -> None:
        """A call has ended. `tokens`: what it used (None: keep the estimate); `output`: of them, None: not known."""
        self.in_flight -= 1
        if tokens is not None:
            self.correct(booking, tokens, output)

    def correct(self, booking: Booking, tokens: float, output: float | None = None) -> None:
        used = amounts_of(
            tokens, output if output is not None else min(tokens, booking.amounts["output_tokens"])
        )
        for name, window in self._windows.items():
            if used[name] != booking.amounts[name]:
                window.correct(booking.at[name], used[name] - booking.amounts[name])

    def heed(self, now: int, headers: Mapping[str, str], refused: bool) -> tuple[int, int]:
        """Apply a response's headers: `Retry-After` if the call was `refused`, and the x-ratelimit-* headers.

        Returns how long the server asks for no call, and how long it is obeyed, in ns from now.
        """
        longest = self._limits.longest_ns
        asked = int(min(retry_after_s(headers) or 0, 1e9) * 1e9) if refused else 0
        for name in ("requests", "tokens"):
            if (told := level(headers, name)) is not None:
                bucket = self._server[name] = _ServerBucket(told, now, longest)
                if name == "requests":
                    asked = max(asked, bucket.free_at(1) - now)
        obeyed = min(asked, longest)
        self.pause(now + obeyed)
        return asked, obeyed

    def state(self) -> dict[str, Any]:
        """What other processes need to keep the same limits. Calls in flight are each process's own."""
        windows = {name: window.state() for name, window in self._windows.items()}
        return {"windows": windows, "paused_until": self._paused_until}

    def restore(self, state: dict[str, Any], now: int) -> None:
        for name, window in self._windows.items():
            if name in state.get("windows", ()):
                window.restore(state["windows"][name], now)
        paused_until = int(state.get("paused_until", 0))
        if paused_until <= now + self._limits.longest_ns:
            self._paused_until = max(self._paused_until, paused_until)


def amounts_of(tokens: float, output: float) -> dict[str, float]:
    return {
        "requests": 1,
        "tokens": tokens,
        "input_tokens": tokens - output,
        "output_tokens": output,
    }
