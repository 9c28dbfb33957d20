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

ALLOWED_NOW = 0
"""The time to try again for a call that is allowed now."""

FOREVER = 1 << 62
"""The time to try again for a call that must wait until another call ends."""

MAX_PAUSE_S = 60.0
"""A server that asks for a longer pause is tried again after this time."""

_MAX_FUTURE_NS = 1_000_000_000
"""Shared bookings that are later than now by more than this are from before a restart of the host.
"""

_MAX_EXPIRED_ENTRIES = 1000
"""How many expired entries may stay at the start of a list. To delete one at a time is slow."""

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
    """Parse a rate such as `10/s` or `600/min`. A bare number is per minute, as providers write it.

    A request cannot be divided. A rate of requests such as `0.5/s` is therefore returned as one
    request in a longer period, here of 2 s.

    Args:
        text: The rate.
        name: The name of the option: "requests", "tokens", "input_tokens" or "output_tokens".

    Raises:
        WrongUse: The text is not a rate, or the rate is not a positive finite number.
    """
    hint = f'{name}="600/min", or "10/s"'
    amount_text, slash, unit = str(text).partition("/")
    period_ns = _PERIODS_NS.get(unit.strip() if slash else "min")
    limit = _parse_amount(amount_text)
    if period_ns is None or limit is None:
        raise WrongUse("invalid_value", f"{name}={text!r} is not a rate", hint)

    if limit <= 0:
        message = f"{name}={text!r} allows nothing"
        raise WrongUse("out_of_range", message, f"{hint}, or leave it out")

    if math.isinf(limit):
        raise WrongUse("out_of_range", f"{name}=inf limits nothing", f"{hint}, or leave it out")

    is_less_than_one_request = name == "requests" and limit < 1
    if is_less_than_one_request:
        return Rate(limit=1.0, period_ns=round(period_ns / limit))

    return Rate(limit, period_ns)


def _parse_amount(text: str) -> float | None:
    """Return a number that may have separators, such as "1,000", or None for any other text."""
    try:
        amount = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None
    return None if math.isnan(amount) else amount


def _retry_after_ns(headers: Mapping[str, str]) -> int:
    """Return how long the server asks to wait in ns, or 0 if it does not ask."""
    pause_s = min(retry_after_s(headers) or 0, _MAX_RETRY_AFTER_S)
    return int(pause_s * 1e9)


def _read_server_buckets(
    headers: Mapping[str, str], now: int, max_pause_ns: int
) -> dict[str, _ServerBucket]:
    """Return a token bucket for each limit that the headers of a response state, by its unit."""
    buckets = {}
    for unit in ("requests", "tokens"):
        server_limit = read_server_limit(headers, unit)
        if server_limit is not None:
            buckets[unit] = _ServerBucket(server_limit, now, max_pause_ns)
    return buckets


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
        """Create a limiter that has counted no calls yet.

        Each configured rate gets a sliding window. If `limits.entries_per_period` is set, a window
        has about that many entries at most: bookings within the same fraction of the period are
        merged into one entry.
        """
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
        """Return ALLOWED_NOW if a call is allowed now, else the time in ns to try again.

        The time is FOREVER if the call has to wait for the end of another one. This only reads the
        limits: `book` counts a call that is allowed.

        Args:
            now: The current time in monotonic ns.
            tokens: The input and output tokens of the call.
            output_tokens: The output tokens among them.
        """
        allowed_at = self._allowed_at_by_server_and_concurrency(now, tokens, output_tokens)
        amounts = call_amounts(tokens, output_tokens)
        for unit, window in self._windows.items():
            allowed_at = max(allowed_at, window.allowed_at(now, amounts[unit]))
        return ALLOWED_NOW if allowed_at <= now else allowed_at

    def retry_at_without_rates(self, now: int, tokens: float, output_tokens: float = 0) -> int:
        """Return the same as `retry_at`, but leave the configured rates out of account.

        This is used if several processes share the rates in a store, which decides about them. What
        remains are the calls in flight and the limits that the server states in its headers. The
        arguments are those of `retry_at`.
        """
        allowed_at = self._allowed_at_by_server_and_concurrency(now, tokens, output_tokens)
        return ALLOWED_NOW if allowed_at <= now else allowed_at

    def _allowed_at_by_server_and_concurrency(
        self, now: int, tokens: float, output_tokens: float
    ) -> int:
        """Return when the limits other than the configured rates allow a call.

        These are the number of calls in flight, the pause for which the server has asked, and the
        limits that it has stated (`_server_buckets`). The result is `now`, a later time in ns, or
        FOREVER if another call has to end first.
        """
        max_in_flight = self._limits.concurrency
        if max_in_flight is not None and self.in_flight >= max_in_flight:
            return FOREVER

        allowed_at = max(now, self._paused_until)
        amounts = call_amounts(tokens, output_tokens)
        for unit, bucket in self._server_buckets.items():
            allowed_at = max(allowed_at, bucket.allowed_at(amounts[unit]))

        return allowed_at

    def pause(self, until: int) -> None:
        """Allow no call before this time."""
        self._paused_until = max(self._paused_until, until)

    def book(self, now: int, tokens: float, output_tokens: float = 0) -> Booking:
        """Count a call that is allowed. Return the booking to pass to `end_call`.

        The amounts that the call uses (a request and its tokens) are added to the sliding windows
        of the configured rates, and taken out of the token buckets, which follow the limits that
        the server has stated.

        Args:
            now: The current time in monotonic ns.
            tokens: The estimated input and output tokens of the call.
            output_tokens: The output tokens among them.
        """
        self.in_flight += 1
        amounts = call_amounts(tokens, output_tokens)
        for unit, bucket in self._server_buckets.items():
            bucket.book(now, amounts[unit])

        booked_at: dict[str, int] = {}
        for unit, window in self._windows.items():
            booked_at[unit] = window.book(now, amounts[unit])

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

        The headers x-ratelimit-* state how many requests and tokens remain until a reset. They
        replace what was known of the server's limits before. All calls pause until the server
        accepts the next request, but not longer than the limit `max_pause_ns`.

        Args:
            now: The current time in monotonic ns.
            headers: The headers, by their names in lower case.
            is_refused: The status is 429 or 503, so that Retry-After pauses all calls.
        """
        max_pause_ns = self._limits.max_pause_ns
        new_buckets = _read_server_buckets(headers, now, max_pause_ns)
        self._server_buckets.update(new_buckets)
        requested_pause_ns = _retry_after_ns(headers) if is_refused else 0

        request_bucket = new_buckets.get("requests")
        if request_bucket is not None:
            # Too few tokens cause no pause, because calls need different numbers of them.
            next_request_at = request_bucket.available_at(amount=1)
            requested_pause_ns = max(requested_pause_ns, next_request_at - now)

        obeyed_pause_ns = min(requested_pause_ns, max_pause_ns)
        self.pause(now + obeyed_pause_ns)
        return Pause(requested_pause_ns, obeyed_pause_ns)

    def state(self) -> dict[str, Any]:
        """Return what other processes need to share the limits: bookings and a pause.

        Calls in flight are not in it, because each process counts its own.
        """
        windows = {name: window.state() for name, window in self._windows.items()}
        return {"windows": windows, "paused_until": self._paused_until}

    def restore(self, state: dict[str, Any], now: int) -> None:
        """Continue from a state of this or another process.

        The monotonic clock starts anew when the host is restarted. A pause that ends later than any
        allowed one was therefore stored before a restart, and is ignored.

        Args:
            state: The result of `state`.
            now: The current time.
        """
        window_states = state.get("windows", {})
        for name, window in self._windows.items():
            if name in window_states:
                window.restore(window_states[name], now)

        paused_until = int(state.get("paused_until", 0))
        is_from_before_restart = paused_until > now + self._limits.max_pause_ns
        if not is_from_before_restart:
            self.pause(paused_until)


class WindowState(NamedTuple):
    """The entries of a sliding window, as they are stored for other processes.

    Attributes:
        times: When each entry was booked, in ascending order.
        amounts: The amount of each entry.
        used_until: The virtual time of the window (see `_SlidingWindow`).
    """

    times: list[int]
    amounts: list[float]
    used_until: float


class _SlidingWindow:
    """The amounts of one unit that were booked within the last period of its rate.

    It keeps the limit within any interval of that length (a "sliding window log"). Amounts can be
    corrected while they are in the window.

    If bursts are limited, the bookings are spaced as well, by the generic cell rate algorithm
    (GCRA). It has a virtual time: the time at which all bookings would be used up if they were used
    one after the other, evenly at the rate. An amount is allowed if the virtual time is ahead of
    the real time by the burst size at most.
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
        self._virtual_time_ns = 0.0

    def allowed_at(self, now: int, amount: float) -> int:
        """Return when an amount can be booked, which is `now` or a later time in ns.

        Two rules have to allow it:

        - The amounts within one period may not exceed the limit.
        - If bursts are limited, the virtual time may not be ahead of the real time by more than the
          burst size. Virtual time is the time at which all bookings so far would be used up, if
          they were used one after the other at the rate.
        """
        self._drop_expired(now)
        allowed_at = max(now, self._room_available_at(now, amount))
        if self._burst_ns is not None:
            burst_allowed_at = math.ceil(self._virtual_time_ns) - self._burst_ns
            allowed_at = max(allowed_at, burst_allowed_at)
        return allowed_at

    def _room_available_at(self, now: int, amount: float) -> int:
        """Return when enough old entries have left the window to book an amount.

        An entry leaves the window one period after its booking, and its amount becomes available
        again. For example, with a limit of 10 and entries of 6 at 0 s and 4 at 1 s, the window is
        full. With a period of 60 s, an amount of 5 can be booked at 60 s, and one of 8 at 61 s.

        An amount above the limit itself waits until the window is empty.
        """
        available = self._rate.limit - self._sum
        if amount <= available:
            return now

        last_left_at = now
        for index in range(self._first, len(self._times)):
            available += self._amounts[index]
            last_left_at = self._times[index] + self._rate.period_ns
            if amount <= available:
                return last_left_at

        return last_left_at

    def book(self, now: int, amount: float) -> int:
        """Add an amount to the window. Return the time of its entry, to pass to `correct`.

        The amount becomes a new entry, or is added to the last entry if both belong to the same
        interval of `merge_ns`. The times of the entries are always in ascending order: if the last
        entry is later than `now`, because another process has booked it by a clock that is ahead,
        the time of that entry is used.

        Args:
            now: The current time in monotonic ns.
            amount: The amount, in the unit of the rate.
        """
        last_entry_time = self._times[-1] if self._times else now
        entry_time = max(now, last_entry_time)

        is_window_empty = self._first == len(self._times)
        if not is_window_empty and self._belongs_to_entry(now, last_entry_time):
            # The entry gets the later time, so that nothing leaves the window too early.
            self._times[-1] = entry_time
            self._amounts[-1] += amount
        else:
            self._times.append(entry_time)
            self._amounts.append(float(amount))

        # Virtual time never lags behind: what was not used in the past cannot be used later.
        self._virtual_time_ns = max(self._virtual_time_ns, float(now))
        self._add_to_totals(amount)
        return entry_time

    def correct(self, booked_at: int, difference: float) -> None:
        """Correct the amount of an earlier booking, unless it has left the window.

        Args:
            booked_at: The result of `book`.
            difference: The amount that was used minus the amount that was booked.
        """
        # Entries are sorted by time. Later bookings may have been merged into the entry, which then
        # got their time. The entry of the booking is therefore the first one of `booked_at` or
        # later, among those that have not left the window.
        index = bisect_left(self._times, booked_at, lo=self._first)
        is_later_than_all_entries = index == len(self._times)
        if is_later_than_all_entries:
            return
        if self._belongs_to_entry(booked_at, self._times[index]):
            self._amounts[index] += difference
            self._add_to_totals(difference)

    def state(self) -> WindowState:
        """Return what another process needs to continue."""
        return WindowState(
            self._times[self._first :], self._amounts[self._first :], self._virtual_time_ns
        )

    def restore(self, state: Sequence[Any], now: int) -> None:
        """Continue from a stored WindowState.

        The monotonic clock starts anew when the host is restarted. A state whose last entry is
        later than now by more than _MAX_FUTURE_NS was stored before a restart, and is dropped.

        Args:
            state: The fields of a WindowState, as a list.
            now: The current time.
        """
        times, amounts, used_until = state
        is_from_before_restart = bool(times) and times[-1] > now + _MAX_FUTURE_NS
        if is_from_before_restart:
            times, amounts, used_until = [], [], 0.0

        self._first = 0
        self._times = [*times]
        self._amounts = [*amounts]
        self._virtual_time_ns = float(used_until)
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

    def _add_to_totals(self, amount: float) -> None:
        """Add an amount, which may be negative, to the sum and to the virtual time."""
        self._sum += amount
        self._virtual_time_ns += amount * self._rate.period_ns / self._rate.limit

    def _belongs_to_entry(self, time: int, entry_time: int) -> bool:
        """Return True if a booking at a time belongs to the entry of another time.

        Time is divided into intervals of `merge_ns`. The bookings of one interval are one entry.
        """
        if not self._merge_ns:
            return time == entry_time
        return time // self._merge_ns == entry_time // self._merge_ns


class _ServerBucket:
    """A token bucket that follows a limit of the server, by the headers of its last response.

    The bucket contains what remains of the limit. The reset header states when it is full again.
    Until then, the used amount (`limit - remaining`) comes back evenly. If the limit is not stated
    (0), nothing is known to come back before the reset.
    """

    def __init__(self, server_limit: ServerLimit, now: int, max_pause_ns: int) -> None:
        """Create a bucket with the contents that the headers of a response state.

        For example, a server states a limit of 100 requests, of which 40 remain, and a reset in
        30 s. The 60 used requests come back evenly until then, so that the refill takes 0.5 s for
        each of them.

        Args:
            server_limit: What the headers state. A limit of 0 means that they do not state it.
            now: When the response arrived, in monotonic ns.
            max_pause_ns: How long calls are held back at most, whatever the server states.
        """
        self._limit = server_limit.limit
        self._remaining = server_limit.remaining
        self._updated_at = now
        self._full_at = now + server_limit.reset_ns
        self._longest_pause_ends_at = now + max_pause_ns
        self._refill_ns_per_unit = 0.0  # 0 if nothing is known of the refill
        is_limit_known = server_limit.limit > 0

        used = server_limit.limit - server_limit.remaining
        if is_limit_known and used > 0:
            self._refill_ns_per_unit = server_limit.reset_ns / used

    def available_at(self, amount: float) -> int:
        """Return when the bucket contains an amount, or 0 if it contains it already.

        An amount above the limit is available when the bucket is full. If the limit is not known,
        everything that is missing is available at the reset.
        """
        is_limit_known = self._limit > 0
        needed = min(amount, self._limit) if is_limit_known else amount
        missing = needed - self._remaining
        if missing <= 0:
            return 0
        if not is_limit_known:
            return self._full_at

        return self._updated_at + math.ceil(missing * self._refill_ns_per_unit)

    def allowed_at(self, amount: float) -> int:
        """Return when a call of an amount may start.

        That is when the amount is available, but not later than the longest pause allows.
        """
        return min(self.available_at(amount), self._longest_pause_ends_at)

    def book(self, now: int, amount: float) -> None:
        """Take an amount out of the bucket."""
        if self._refill_ns_per_unit:
            refilled = (now - self._updated_at) / self._refill_ns_per_unit
            self._remaining = min(self._limit, self._remaining + refilled)
            self._updated_at = now
        elif now >= min(self._full_at, self._longest_pause_ends_at):
            self._remaining = math.inf  # Nothing is known about the time after the reset.
        self._remaining -= amount
