"""Decide when the limits of a key and model allow the next call. Pure.

All times are in ns on one monotonic clock, and the caller passes the current time. A `Gate` either
allows a call or returns when to try again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import WrongUse
from .rate_limit_headers import ServerLevel, read_server_level, retry_after_s

FOREVER = 1 << 62
"""The time to try again for a call that must wait until another call ends."""

MAX_PAUSE_S = 60.0
"""A server that asks for a longer pause is tried again after this time."""

_MAX_FUTURE_NS = 1_000_000_000
"""Shared bookings that are later than now by more than this are from before the host was started.
"""

_MAX_EXPIRED_ENTRIES = 1000
_LONGEST_WAIT_S = 1e9

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

RATE_NAMES = ("requests", "tokens", "input_tokens", "output_tokens")


class Rate(NamedTuple):
    """At most `limit` requests or tokens within any interval of `period_ns`."""

    limit: float
    period_ns: int


class Limits(NamedTuple):
    """The limits of one key and model.

    Attributes:
        requests: The rate of requests, or None for no limit.
        tokens: The rate of input and output tokens together.
        input_tokens: The rate of input tokens.
        output_tokens: The rate of output tokens.
        concurrency: How many calls may be in flight.
        burst_ns: How much time's worth of a rate may go at once, or None for the whole limit.
        longest_ns: The longest pause that a server may ask for.
        grain: In how many parts the periods of shared rates are cut. Exact if 0.
    """

    requests: Rate | None = None
    tokens: Rate | None = None
    input_tokens: Rate | None = None
    output_tokens: Rate | None = None
    concurrency: int | None = None
    burst_ns: int | None = None
    longest_ns: int = int(MAX_PAUSE_S * 1e9)
    grain: int = 0

    def rates(self) -> dict[str, Rate]:
        """Return the rates that are limited, by their names."""
        rates: dict[str, Rate] = {}
        for name in RATE_NAMES:
            rate = getattr(self, name)
            if rate is not None:
                rates[name] = rate
        return rates

    @property
    def remembered_ns(self) -> int:
        """How long a state is of use.

        Nothing in it is older than the longest period, and nothing is later than a pause.
        """
        return self.longest_ns + max((rate.period_ns for rate in self.rates().values()), default=0)


class Booking(NamedTuple):
    """What a call has booked.

    Attributes:
        amounts: The amount of each kind: requests, tokens, input_tokens and output_tokens.
        at: When each of the limited kinds was booked.
    """

    amounts: dict[str, float]
    at: dict[str, int]


class Pause(NamedTuple):
    """How long a server asks for no calls, and how long that is obeyed, in ns."""

    requested_ns: int
    obeyed_ns: int


def parse_rate(text: str | int | float, name: str) -> Rate:
    """Parse `10/s` or `600/min`. A bare number is per minute, as providers state limits.

    A rate of less than one request per period becomes one request per longer period.

    Raises:
        WrongUse: The text is not a rate, or it allows nothing. The error has `name`.
    """
    hint = f'{name}="600/min", or "10/s"'
    amount, slash, unit = str(text).partition("/")
    period_ns = _PERIODS_NS.get(unit.strip() if slash else "min")
    try:
        limit = float(amount.replace(",", "").replace("_", ""))
    except ValueError:
        limit = math.nan
    if period_ns is None or math.isnan(limit):
        raise WrongUse("invalid_value", f"{name}={text!r} is not a rate", hint)
    if limit <= 0:
        message = f"{name}={text!r} allows nothing"
        raise WrongUse("out_of_range", message, f"{hint}, or leave it out")
    if math.isinf(limit):
        raise WrongUse("out_of_range", f"{name}=inf limits nothing", f"{hint}, or leave it out")
    if limit < 1 and name == "requests":
        return Rate(1.0, round(period_ns / limit))
    return Rate(limit, period_ns)


def amounts_of(tokens: float, output: float) -> dict[str, float]:
    """Return what one call uses of each kind. `tokens` are input and output together."""
    return {
        "requests": 1,
        "tokens": tokens,
        "input_tokens": tokens - output,
        "output_tokens": output,
    }


class Gate:
    """The limits of one key and model, and what was booked. It is not thread-safe.

    Attributes:
        in_flight: The number of calls in flight.
    """

    def __init__(self, limits: Limits) -> None:
        """Start without bookings."""
        self.in_flight = 0
        self._limits = limits
        self._paused_until = 0
        self._server_buckets: dict[str, _ServerBucket] = {}
        self._windows: dict[str, _Window] = {}
        for name, rate in limits.rates().items():
            grain_ns = rate.period_ns // limits.grain if limits.grain else 0
            self._windows[name] = _Window(rate, limits.burst_ns, grain_ns)

    def retry_at(self, now: int, tokens: float, output: float = 0) -> int:
        """Return 0 if a call is allowed now, else the time to try again. Nothing is booked.

        Args:
            now: The current time.
            tokens: The input and output tokens of the call.
            output: The output tokens among them.
        """
        allowed_at = self.retry_at_without_rates(now, tokens, output) or now
        amounts = amounts_of(tokens, output)
        for name, window in self._windows.items():
            allowed_at = max(allowed_at, window.allowed_at(now, amounts[name]))
        return 0 if allowed_at <= now else allowed_at

    def retry_at_without_rates(self, now: int, tokens: float, output: float = 0) -> int:
        """Return the same as `retry_at`, by the concurrency and the wishes of the server alone.

        This is for rates that are shared with other processes.
        """
        if self.in_flight >= (self._limits.concurrency or FOREVER):
            return FOREVER
        allowed_at = max(now, self._paused_until)
        amounts = amounts_of(tokens, output)
        for name, bucket in self._server_buckets.items():
            allowed_at = max(allowed_at, bucket.obeyed_at(amounts[name]))
        return 0 if allowed_at <= now else allowed_at

    def pause(self, until: int) -> None:
        """Allow no call before this time."""
        self._paused_until = max(self._paused_until, until)

    def book(self, now: int, tokens: float, output: float = 0) -> Booking:
        """Book a call that is allowed. Return the booking to pass to `end_call`."""
        self.in_flight += 1
        amounts = amounts_of(tokens, output)
        for name, bucket in self._server_buckets.items():
            bucket.book(now, amounts[name])
        booked_at = {
            name: window.book(now, amounts[name]) for name, window in self._windows.items()
        }
        return Booking(amounts, booked_at)

    def end_call(self, booking: Booking, tokens: float | None, output: float | None = None) -> None:
        """Correct the booking of a call that has ended.

        Args:
            booking: The booking.
            tokens: The tokens that the call used, or None to keep the estimate.
            output: The output tokens among them, or None if their number is not known.
        """
        self.in_flight -= 1
        if tokens is not None:
            self.correct(booking, tokens, output)

    def correct(self, booking: Booking, tokens: float, output: float | None = None) -> None:
        """Replace the estimate of a booking by the tokens that the call used."""
        if output is None:
            output = min(tokens, booking.amounts["output_tokens"])
        used = amounts_of(tokens, output)
        for name, window in self._windows.items():
            difference = used[name] - booking.amounts[name]
            if difference:
                window.correct(booking.at[name], difference)

    def apply_headers(self, now: int, headers: Mapping[str, str], refused: bool) -> Pause:
        """Apply the limits that the headers of a response state.

        These are `Retry-After` if the call was refused, and the x-ratelimit-* headers.
        """
        longest_ns = self._limits.longest_ns
        requested_ns = 0
        if refused:
            requested_ns = int(min(retry_after_s(headers) or 0, _LONGEST_WAIT_S) * 1e9)
        for name in ("requests", "tokens"):
            server_level = read_server_level(headers, name)
            if server_level is None:
                continue
            bucket = _ServerBucket(server_level, now, longest_ns)
            self._server_buckets[name] = bucket
            if name == "requests":
                requested_ns = max(requested_ns, bucket.free_at(1) - now)
        obeyed_ns = min(requested_ns, longest_ns)
        self.pause(now + obeyed_ns)
        return Pause(requested_ns, obeyed_ns)

    def state(self) -> dict[str, Any]:
        """Return what other processes need to keep the same limits.

        Calls in flight are counted by each process alone.
        """
        windows = {name: window.state() for name, window in self._windows.items()}
        return {"windows": windows, "paused_until": self._paused_until}

    def restore(self, state: dict[str, Any], now: int) -> None:
        """Continue from a state of this or another process."""
        window_states = state.get("windows", {})
        for name, window in self._windows.items():
            if name in window_states:
                window.restore(window_states[name], now)
        paused_until = int(state.get("paused_until", 0))
        if paused_until <= now + self._limits.longest_ns:
            self.pause(paused_until)


class _Window:
    """The amounts that were booked within the last period. They can be corrected later."""

    def __init__(self, rate: Rate, burst_ns: int | None = None, grain_ns: int = 0) -> None:
        """Start without bookings.

        Args:
            rate: The limit.
            burst_ns: How much time's worth may go at once, with the rest evenly spaced. None if the
                whole limit may go at once.
            grain_ns: Bookings within this time become one entry, which keeps shared windows small.
        """
        self._rate = rate
        self._burst_ns = burst_ns
        self._grain_ns = grain_ns
        self._times: list[int] = []
        self._amounts: list[float] = []
        self._first = 0  # the index of the first entry that is still in the window
        self._sum = 0.0
        self._paid_until = 0.0  # until when the rate is used up by what was booked

    def allowed_at(self, now: int, amount: float) -> int:
        """Return when an amount is allowed. One above the limit waits for an empty window."""
        self._drop_expired(now)
        times = self._times
        allowed_at = now
        if self._burst_ns is not None:
            allowed_at = max(allowed_at, math.ceil(self._paid_until) - self._burst_ns)
        if self._first == len(times):
            return allowed_at
        free = self._rate.limit - self._sum
        if amount <= free:
            return allowed_at
        for index in range(self._first, len(times)):
            free += self._amounts[index]
            if amount <= free:
                return max(allowed_at, times[index] + self._rate.period_ns)
        return max(allowed_at, times[-1] + self._rate.period_ns)

    def book(self, now: int, amount: float) -> int:
        """Book an amount. Return the time to pass to `correct`."""
        times = self._times
        if len(times) > self._first and self._is_same_entry(now, times[-1]):
            # The entry gets the later time, so that nothing leaves the window too early.
            times[-1] = max(now, times[-1])
            self._amounts[-1] += amount
        else:
            times.append(max(now, times[-1]) if times else now)
            self._amounts.append(float(amount))
        self._paid_until = max(self._paid_until, float(now))
        self._add(amount)
        return times[-1]

    def correct(self, booked_at: int, difference: float) -> None:
        """Add a difference to what was booked at a time, unless that has left the window."""
        index = bisect_left(self._times, booked_at, self._first)
        if index < len(self._times) and self._is_same_entry(booked_at, self._times[index]):
            self._amounts[index] += difference
            self._add(difference)

    def state(self) -> list[Any]:
        """Return what another process needs to continue."""
        return [self._times[self._first :], self._amounts[self._first :], self._paid_until]

    def restore(self, state: list[Any], now: int) -> None:
        """Continue from a state. One from before the host was started is dropped."""
        times, amounts, paid_until = state
        if times and times[-1] > now + _MAX_FUTURE_NS:
            times, amounts, paid_until = [], [], 0.0
        self._first = 0
        self._times = [*times]
        self._amounts = [*amounts]
        self._paid_until = float(paid_until)
        self._sum = math.fsum(amounts)

    def _drop_expired(self, now: int) -> None:
        """Drop the entries that have left the window."""
        first = self._first
        while first < len(self._times) and self._times[first] + self._rate.period_ns <= now:
            self._sum -= self._amounts[first]
            first += 1
        if first == len(self._times):
            self._sum = 0.0  # No rounding error stays.
        if first > _MAX_EXPIRED_ENTRIES and 2 * first > len(self._times):
            del self._times[:first]
            del self._amounts[:first]
            first = 0
        self._first = first

    def _add(self, amount: float) -> None:
        self._sum += amount
        self._paid_until += amount * self._rate.period_ns / self._rate.limit

    def _is_same_entry(self, time: int, booked_at: int) -> bool:
        if not self._grain_ns:
            return time == booked_at
        return time // self._grain_ns == booked_at // self._grain_ns


class _ServerBucket:
    """A limit as the server counts it, by the headers of its last response.

    The reset header states when the bucket is full again. Until then, `limit - remaining` come back
    evenly. If the limit is not stated (0), nothing is known to come back before the reset.
    """

    def __init__(self, level: ServerLevel, now: int, longest_ns: int) -> None:
        """Start from the level that the headers state. No pause is longer than `longest_ns`."""
        self._limit = level.limit
        self._remaining = level.remaining
        self._counted_at = now
        self._full_at = now + level.reset_ns
        self._latest = now + longest_ns
        self._ns_per_unit = 0.0
        if level.limit:
            self._ns_per_unit = level.reset_ns / (level.limit - level.remaining)

    def free_at(self, amount: float) -> int:
        """Return when the bucket has an amount. For one above the limit, it is when it is full."""
        needed = min(amount, self._limit) if self._limit else amount
        missing = needed - self._remaining
        if missing <= 0:
            return 0
        if not self._limit:
            return self._full_at
        return self._counted_at + math.ceil(missing * self._ns_per_unit)

    def obeyed_at(self, amount: float) -> int:
        """Return when the bucket has an amount, or when the longest pause that is obeyed ends."""
        return min(self.free_at(amount), self._latest)

    def book(self, now: int, amount: float) -> None:
        """Take an amount out of the bucket."""
        if self._ns_per_unit:
            returned = (now - self._counted_at) / self._ns_per_unit
            self._remaining = min(self._limit, self._remaining + returned)
            self._counted_at = now
        elif now >= min(self._full_at, self._latest):
            self._remaining = math.inf  # Nothing is known about the time after the reset.
        self._remaining -= amount
