"""Decide when the limits of a key and model allow the next call. Pure.

All times are in ns on one monotonic clock, and the caller passes the current time. A `RateLimiter`
either allows a call or returns when to try again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import WrongUse
from .rate_limit_headers import ServerLimit, read_server_limit, retry_after_s

FOREVER = 1 << 62
"""The time to try again for a call that must wait until another call ends."""

MAX_PAUSE_S = 60.0
"""A server that asks for a longer pause is tried again after this time."""

_MAX_FUTURE_NS = 1_000_000_000
"""Shared bookings that are later than now by more than this are from before the host was started.
"""

_MAX_EXPIRED_ENTRIES = 1000
"""So many expired entries may stay at the start of a list. To delete one at a time is slow."""

_MAX_RETRY_AFTER_S = 1e9
"""Longer waits are cut, so that they fit into an int64 of ns."""

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
        burst_ns: The burst size as a time: the calls that are due within it may start together,
            while further ones are evenly spaced. None allows a burst of the whole limit.
        max_pause_ns: The longest pause that a server may ask for.
        entries_per_period: How many bookings a window stores for a period at most. Bookings that
            are closer in time are merged, which keeps the state of shared limits small. None
            stores each booking.
    """

    requests: Rate | None = None
    tokens: Rate | None = None
    input_tokens: Rate | None = None
    output_tokens: Rate | None = None
    concurrency: int | None = None
    burst_ns: int | None = None
    max_pause_ns: int = int(MAX_PAUSE_S * 1e9)
    entries_per_period: int | None = None

    def rates(self) -> dict[str, Rate]:
        """Return the rates that are limited, by their names."""
        rates: dict[str, Rate] = {}
        for name in RATE_NAMES:
            rate = getattr(self, name)
            if rate is not None:
                rates[name] = rate
        return rates

    @property
    def state_lifetime_ns(self) -> int:
        """How long a state that nobody changes has to be stored.

        Bookings expire after the period of their rate, and a pause ends after `max_pause_ns`.
        """
        periods_ns = [rate.period_ns for rate in self.rates().values()]
        return self.max_pause_ns + max(periods_ns, default=0)


class Booking(NamedTuple):
    """What a call was counted as when it was allowed.

    Attributes:
        amounts: The amount of each unit: requests, tokens, input_tokens and output_tokens.
        at: When the amount of each limited unit was booked.
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


def call_amounts(tokens: float, output_tokens: float) -> dict[str, float]:
    """Return what one call uses of each unit. `tokens` are input and output together."""
    return {
        "requests": 1,
        "tokens": tokens,
        "input_tokens": tokens - output_tokens,
        "output_tokens": output_tokens,
    }


class RateLimiter:
    """The limits of one key and model, and what was booked. It is not thread-safe.

    Three things limit calls: the concurrency, the configured rates (a sliding window for each), and
    what the server states in its headers (Retry-After, and a token bucket for each x-ratelimit-*).

    Attributes:
        in_flight: The number of calls in flight.
    """

    def __init__(self, limits: Limits) -> None:
        """Create a limiter without bookings."""
        self.in_flight = 0
        self._limits = limits
        self._paused_until = 0
        self._server_buckets: dict[str, _ServerBucket] = {}
        self._windows: dict[str, _SlidingWindow] = {}
        for unit, rate in limits.rates().items():
            merge_ns = 0
            if limits.entries_per_period is not None:
                merge_ns = rate.period_ns // limits.entries_per_period
            self._windows[unit] = _SlidingWindow(rate, limits.burst_ns, merge_ns)

    def retry_at(self, now: int, tokens: float, output_tokens: float = 0) -> int:
        """Return 0 if a call is allowed now, else the time to try again. Nothing is booked.

        The time is FOREVER if the call has to wait for the end of another one.

        Args:
            now: The current time.
            tokens: The input and output tokens of the call.
            output_tokens: The output tokens among them.
        """
        allowed_at = self.retry_at_without_rates(now, tokens, output_tokens) or now
        amounts = call_amounts(tokens, output_tokens)
        for unit, window in self._windows.items():
            allowed_at = max(allowed_at, window.allowed_at(now, amounts[unit]))
        return 0 if allowed_at <= now else allowed_at

    def retry_at_without_rates(self, now: int, tokens: float, output_tokens: float = 0) -> int:
        """Return the same as `retry_at`, but without the configured rates.

        Only the concurrency and what the server states in its headers count. This is for rates that
        processes share: their store decides about these.
        """
        max_in_flight = self._limits.concurrency
        if max_in_flight is not None and self.in_flight >= max_in_flight:
            return FOREVER
        allowed_at = max(now, self._paused_until)
        amounts = call_amounts(tokens, output_tokens)
        for unit, bucket in self._server_buckets.items():
            allowed_at = max(allowed_at, bucket.obeyed_at(amounts[unit]))
        return 0 if allowed_at <= now else allowed_at

    def pause(self, until: int) -> None:
        """Allow no call before this time."""
        self._paused_until = max(self._paused_until, until)

    def book(self, now: int, tokens: float, output_tokens: float = 0) -> Booking:
        """Count a call that is allowed. Return the booking to pass to `end_call`."""
        self.in_flight += 1
        amounts = call_amounts(tokens, output_tokens)
        for unit, bucket in self._server_buckets.items():
            bucket.book(now, amounts[unit])
        booked_at = {
            unit: window.book(now, amounts[unit]) for unit, window in self._windows.items()
        }
        return Booking(amounts, booked_at)

    def end_call(
        self, booking: Booking, tokens: float | None, output_tokens: float | None = None
    ) -> None:
        """Note that a call has ended, and correct its booking.

        Args:
            booking: The booking.
            tokens: The tokens that the call used, or None to keep the estimate.
            output_tokens: The output tokens among them, or None if their number is not known.
        """
        self.in_flight -= 1
        if tokens is not None:
            self.correct(booking, tokens, output_tokens)

    def correct(self, booking: Booking, tokens: float, output_tokens: float | None = None) -> None:
        """Replace the estimate of a booking by the tokens that the call used."""
        if output_tokens is None:
            output_tokens = min(tokens, booking.amounts["output_tokens"])
        used_amounts = call_amounts(tokens, output_tokens)
        for unit, window in self._windows.items():
            difference = used_amounts[unit] - booking.amounts[unit]
            if difference:
                window.correct(booking.at[unit], difference)

    def apply_headers(self, now: int, headers: Mapping[str, str], is_refused: bool) -> Pause:
        """Apply the limits that the headers of a response state. Return the pause to log.

        `Retry-After` pauses all calls if the response refused the call (429 or 503). The
        x-ratelimit-* headers state how many requests and tokens remain until a reset; they replace
        what was known of the server's limits before.
        """
        max_pause_ns = self._limits.max_pause_ns
        requested_ns = 0
        if is_refused:
            pause_s = min(retry_after_s(headers) or 0, _MAX_RETRY_AFTER_S)
            requested_ns = int(pause_s * 1e9)
        for unit in ("requests", "tokens"):
            server_limit = read_server_limit(headers, unit)
            if server_limit is None:
                continue
            bucket = _ServerBucket(server_limit, now, max_pause_ns)
            self._server_buckets[unit] = bucket
            if unit == "requests":
                # No request at all is possible before the next one has come back.
                requested_ns = max(requested_ns, bucket.available_at(1) - now)
        obeyed_ns = min(requested_ns, max_pause_ns)
        self.pause(now + obeyed_ns)
        return Pause(requested_ns, obeyed_ns)

    def state(self) -> dict[str, Any]:
        """Return what other processes need to share the limits: bookings and a pause.

        Calls in flight are not in it, because each process counts its own.
        """
        windows = {name: window.state() for name, window in self._windows.items()}
        return {"windows": windows, "paused_until": self._paused_until}

    def restore(self, state: dict[str, Any], now: int) -> None:
        """Continue from a state of this or another process.

        A pause that ends later than any allowed one is from before the host was started, when the
        clock was another one. It is ignored.
        """
        window_states = state.get("windows", {})
        for name, window in self._windows.items():
            if name in window_states:
                window.restore(window_states[name], now)
        paused_until = int(state.get("paused_until", 0))
        if paused_until <= now + self._limits.max_pause_ns:
            self.pause(paused_until)


class WindowState(NamedTuple):
    """The entries of a sliding window, as they are stored for other processes.

    Attributes:
        times: When each entry was booked, in ascending order.
        amounts: The amount of each entry.
        used_until: The time until which the bookings use up the rate.
    """

    times: list[int]
    amounts: list[float]
    used_until: float


class _SlidingWindow:
    """The amounts of one unit that were booked within the last period of its rate.

    It keeps the limit within any interval of that length (a "sliding window log"). Amounts can be
    corrected while they are in the window. If bursts are limited, a virtual clock spaces the
    bookings, too: each one advances `_used_until` by the time that its amount takes at the rate
    (GCRA, the generic cell rate algorithm).
    """

    def __init__(self, rate: Rate, burst_ns: int | None = None, merge_ns: int = 0) -> None:
        """Create an empty window.

        Args:
            rate: The limit and its period.
            burst_ns: How far the bookings may run ahead of an even spacing. None if the whole limit
                may be booked at once.
            merge_ns: Bookings within an interval of this length become one entry, which keeps the
                state of shared limits small. 0 keeps them apart.
        """
        self._rate = rate
        self._burst_ns = burst_ns
        self._merge_ns = merge_ns
        # An entry is a time of `_times` and the amount at the same index of `_amounts`.
        self._times: list[int] = []
        self._amounts: list[float] = []
        self._first = 0  # the index of the first entry that has not expired
        self._sum = 0.0  # of the amounts that have not expired
        self._used_until = 0.0  # the virtual clock: until when the bookings use up the rate

    def allowed_at(self, now: int, amount: float) -> int:
        """Return when an amount can be booked, which is `now` or later.

        That is when enough older entries have left the window. An amount above the limit itself
        waits until the window is empty.
        """
        self._drop_expired(now)
        times = self._times
        allowed_at = now
        if self._burst_ns is not None:
            allowed_at = max(allowed_at, math.ceil(self._used_until) - self._burst_ns)
        is_empty = self._first == len(times)
        if is_empty:
            return allowed_at

        available = self._rate.limit - self._sum
        if amount <= available:
            return allowed_at
        for index in range(self._first, len(times)):
            available += self._amounts[index]
            if amount <= available:
                return max(allowed_at, times[index] + self._rate.period_ns)
        return max(allowed_at, times[-1] + self._rate.period_ns)

    def book(self, now: int, amount: float) -> int:
        """Add an amount to the window. Return the time of its entry, to pass to `correct`."""
        times = self._times
        has_entries = len(times) > self._first
        if has_entries and self._is_same_entry(now, times[-1]):
            # The entry gets the later time, so that nothing leaves the window too early.
            times[-1] = max(now, times[-1])
            self._amounts[-1] += amount
        else:
            # The times stay sorted, also if another process has booked with a later clock.
            entry_time = max(now, times[-1]) if times else now
            times.append(entry_time)
            self._amounts.append(float(amount))
        self._used_until = max(self._used_until, float(now))
        self._add(amount)
        return times[-1]

    def correct(self, booked_at: int, difference: float) -> None:
        """Add a difference to the entry of a time, unless that has left the window."""
        index = bisect_left(self._times, booked_at, self._first)
        if index < len(self._times) and self._is_same_entry(booked_at, self._times[index]):
            self._amounts[index] += difference
            self._add(difference)

    def state(self) -> WindowState:
        """Return what another process needs to continue."""
        return WindowState(
            self._times[self._first :], self._amounts[self._first :], self._used_until
        )

    def restore(self, state: Sequence[Any], now: int) -> None:
        """Continue from a stored WindowState, which decodes as a plain list.

        Entries later than now are from before the host was started, because the monotonic clock
        then began anew. Such a state is dropped.
        """
        times, amounts, used_until = state
        is_from_before_restart = bool(times) and times[-1] > now + _MAX_FUTURE_NS
        if is_from_before_restart:
            times, amounts, used_until = [], [], 0.0
        self._first = 0
        self._times = [*times]
        self._amounts = [*amounts]
        self._used_until = float(used_until)
        self._sum = math.fsum(amounts)

    def _drop_expired(self, now: int) -> None:
        """Drop the entries that have left the window.

        They are skipped by moving `_first`, and deleted only when they are many and more than half
        of the list, so that the cost per entry stays constant.
        """
        first = self._first
        while first < len(self._times) and self._times[first] + self._rate.period_ns <= now:
            self._sum -= self._amounts[first]
            first += 1
        if first == len(self._times):
            self._sum = 0.0  # The window is empty: no rounding error stays.
        if first > _MAX_EXPIRED_ENTRIES and 2 * first > len(self._times):
            del self._times[:first]
            del self._amounts[:first]
            first = 0
        self._first = first

    def _add(self, amount: float) -> None:
        """Add an amount, which may be negative, to the sum and to the virtual clock."""
        self._sum += amount
        self._used_until += amount * self._rate.period_ns / self._rate.limit

    def _is_same_entry(self, time: int, entry_time: int) -> bool:
        """Return True if a booking at a time belongs to the entry of another time."""
        if not self._merge_ns:
            return time == entry_time
        return time // self._merge_ns == entry_time // self._merge_ns


class _ServerBucket:
    """A token bucket that follows a limit of the server, by the headers of its last response.

    The reset header states when the bucket is full again. Until then, `limit - remaining` come back
    evenly. If the limit is not stated (0), nothing is known to come back before the reset.
    """

    def __init__(self, server_limit: ServerLimit, now: int, max_pause_ns: int) -> None:
        """Fill the bucket as the headers of a response state.

        `max_pause_ns` limits how long calls are held back, whatever the server states.
        """
        self._limit = server_limit.limit
        self._remaining = server_limit.remaining
        self._updated_at = now
        self._full_at = now + server_limit.reset_ns
        self._obeyed_until = now + max_pause_ns
        self._refill_ns_per_unit = 0.0
        if server_limit.limit:
            used = server_limit.limit - server_limit.remaining
            self._refill_ns_per_unit = server_limit.reset_ns / used

    def available_at(self, amount: float) -> int:
        """Return when the bucket contains an amount, or 0 if it does now.

        For an amount above the limit, it is when the bucket is full.
        """
        needed = min(amount, self._limit) if self._limit else amount
        missing = needed - self._remaining
        if missing <= 0:
            return 0
        if not self._limit:
            return self._full_at
        return self._updated_at + math.ceil(missing * self._refill_ns_per_unit)

    def obeyed_at(self, amount: float) -> int:
        """Return when a call of an amount may start: when it is available or the pause too long."""
        return min(self.available_at(amount), self._obeyed_until)

    def book(self, now: int, amount: float) -> None:
        """Take an amount out of the bucket."""
        if self._refill_ns_per_unit:
            refilled = (now - self._updated_at) / self._refill_ns_per_unit
            self._remaining = min(self._limit, self._remaining + refilled)
            self._updated_at = now
        elif now >= min(self._full_at, self._obeyed_until):
            self._remaining = math.inf  # Nothing is known about the time after the reset.
        self._remaining -= amount
