"""Keeping below a provider's limits: requests and tokens per time, calls at once, per key and per model.

`Gate` is the sans-IO core: told the time, it grants or says when to ask again. `Throttle` waits, in tasks and in
threads alike (one object may serve both), first come, first served.
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
    """So many (requests, tokens) within any stretch of `period_ns`."""

    limit: float
    period_ns: int


def rate(text: str | int | float, what: str) -> Rate:
    """`10/s`, `600/min`; a bare number is per minute, as providers state their limits. Raises WrongUse."""
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
    if limit < 1 and what == "requests":  # a window must hold one request
        return Rate(1.0, round(period / limit))
    return Rate(limit, period)


class _Window:
    """What was let through within the last period; entries can be corrected afterwards."""

    __slots__ = ("_entries", "_rate", "_sum")

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._entries: deque[list[float]] = deque()
        self._sum = 0.0

    def free_at(self, now: int, amount: float) -> int:
        """The instant at which `amount` more is within the limit. More than the limit itself: when all is empty."""
        entries, period = self._entries, self._rate.period_ns
        while entries and entries[0][0] + period <= now:
            self._sum -= entries.popleft()[1]
        room = self._rate.limit - self._sum
        if amount <= room or not entries:
            return now
        for at, held in entries:
            room += held
            if amount <= room:
                return int(at) + period
        return int(entries[-1][0]) + period

    def book(self, now: int, amount: float) -> list[float]:
        entry = [float(now), float(amount)]
        self._entries.append(entry)
        self._sum += amount
        return entry

    def correct(self, entry: list[float], amount: float) -> None:
        if self._entries and entry[0] >= self._entries[0][0]:  # else it has left the window already
            self._sum += amount - entry[1]
            entry[1] = float(amount)


class Gate:
    """The limits of one key and model. Sans IO; instants are monotonic ns. Not thread-safe: `Throttle` locks it."""

    __slots__ = ("_cap", "_flying", "_paused", "_requests", "_reset", "_room", "_tokens")

    def __init__(self, requests: Rate | None, tokens: Rate | None, concurrency: int | None) -> None:
        self._requests = _Window(requests) if requests else None
        self._tokens = _Window(tokens) if tokens else None
        self._cap = concurrency or FOREVER
        self._flying = 0
        self._paused = 0  # nothing before this instant: the server said so
        self._room: float | None = None  # tokens left, as the server counts them, until `_reset`
        self._reset = 0

    @property
    def in_flight(self) -> int:
        return self._flying

    def ask(self, now: int, tokens: float) -> int:
        """0: granted, nothing is booked yet. Else the instant to ask again; FOREVER: when a call ends."""
        if self._flying >= self._cap:
            return FOREVER
        at = max(now, self._paused)
        if self._requests:
            at = max(at, self._requests.free_at(now, 1))
        if self._tokens:
            at = max(at, self._tokens.free_at(now, tokens))
        if self._room is not None and tokens > self._room and now < self._reset:
            at = max(at, self._reset)
        return 0 if at <= now else at

    def enter(self, now: int, tokens: float) -> list[float] | None:
        """Book a granted call; what comes back is for `leave`."""
        self._flying += 1
        if self._requests:
            self._requests.book(now, 1)
        if self._room is not None:
            self._room -= tokens
        return self._tokens.book(now, tokens) if self._tokens else None

    def leave(self, entry: list[float] | None, tokens: float | None) -> None:
        """A call has ended, having used `tokens` (None: as estimated)."""
        self._flying -= 1
        if self._tokens and entry is not None and tokens is not None:
            self._tokens.correct(entry, tokens)

    def heed(self, now: int, headers: Mapping[str, str], refused: bool) -> None:
        """What the head of a response asks for: `Retry-After` when it `refused`, and what is left of its limits."""
        if refused and (asked := retry_after_s(headers)) is not None:
            self._paused = max(self._paused, now + int(asked * 1e9))
        left, reset = headers.get("x-ratelimit-remaining-requests"), headers.get("x-ratelimit-reset-requests")
        if left is not None and reset is not None and _number(left, 1) <= 0:
            self._paused = max(self._paused, now + _duration_ns(reset))
        left, reset = headers.get("x-ratelimit-remaining-tokens"), headers.get("x-ratelimit-reset-tokens")
        if left is not None and reset is not None:
            self._room, self._reset = _number(left, math.inf), now + _duration_ns(reset)


class Permit:
    """Leave to make one call; `done` gives it back. Used by `Throttle`'s callers, once."""

    __slots__ = ("_entry", "_lane", "_obey", "over")

    def __init__(self, lane: _Lane, entry: list[float] | None, obey: bool) -> None:
        self._lane, self._entry, self._obey, self.over = lane, entry, obey, False

    def heed(self, headers: Mapping[str, str], *, refused: bool = False) -> None:
        """The head of the response has come. refused: it is a 429 or 503, whose Retry-After holds for all."""
        if self._obey:
            with self._lane.lock:
                self._lane.gate.heed(monotonic_ns(), headers, refused)

    def done(self, tokens: int | None = None) -> None:
        """The call is over. tokens: what it really used, which corrects the estimate. Calling twice is harmless."""
        if self.over:
            return
        self.over = True
        lane = self._lane
        with lane.lock:
            lane.gate.leave(self._entry, tokens)
            lane.wake()


class _Lane:
    """A gate and those who stand before it, in order."""

    __slots__ = ("_obey", "gate", "lock", "queue")

    def __init__(self, gate: Gate, obey: bool) -> None:
        self.gate, self._obey = gate, obey
        self.lock = threading.Lock()
        self.queue: deque[Callable[[], object]] = deque()  # each wakes one waiter

    def wake(self) -> None:
        """Let the first in the queue look again."""
        if self.queue:
            self.queue[0]()

    def attempt(self, bell: Callable[[], object], tokens: float) -> Permit | int:
        """For the waiter with this bell: its permit, or how many ns to wait at most unless its bell rings."""
        with self.lock:
            if bell not in self.queue:
                self.queue.append(bell)
            if self.queue[0] is not bell:
                return FOREVER
            now = monotonic_ns()
            until = self.gate.ask(now, tokens)
            if until:
                return until - now if until != FOREVER else FOREVER
            self.queue.popleft()
            entry = self.gate.enter(now, tokens)
            self.wake()
            return Permit(self, entry, self._obey)

    def forget(self, bell: Callable[[], object]) -> None:
        """A waiter has gone."""
        with self.lock:
            first = bool(self.queue) and self.queue[0] is bell
            if bell in self.queue:
                self.queue.remove(bell)
            if first:
                self.wake()


class Throttle:
    """Limits for the calls of one or several clients.

    requests, tokens: "600/min", "10/s" (a bare number is per minute), within any such stretch of time. `requests` may
    be an `asyncio_throttle.Throttler` that the application shares already (async clients only). Tokens are booked as
    estimated before a call and corrected when it ends. concurrency: calls at once. per: what the limits are counted
    for; () is all calls together. obey: wait as the server's Retry-After (after a 429 or 503) and x-ratelimit-*
    headers say. Raises WrongUse for limits that let nothing through.
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
        foreign = hasattr(requests, "acquire") and hasattr(requests, "rate_limit")
        self._throttler: Any = requests if foreign else None
        if foreign and not requests.rate_limit > 0:
            raise WrongUse(f"a Throttler of {requests.rate_limit} would let nothing through", "give it a rate above 0")
        self._requests = None if requests is None or foreign else rate(requests, "requests")
        self._tokens = None if tokens is None else rate(tokens, "tokens")
        if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
            raise WrongUse(f"concurrency={concurrency!r} would let nothing through", "at least 1, or leave it out")
        if isinstance(per, str) or not set(per) <= {"key", "model"}:
            raise WrongUse(f"per={per!r}", 'a tuple of "key" and "model"')
        self._cap, self._per, self._obey = concurrency, tuple(per), obey
        self._lanes: dict[tuple[str, ...], _Lane] = {}
        self._lock = threading.Lock()

    @property
    def counts_tokens(self) -> bool:
        """Whether callers need to say how many tokens a call may take."""
        return self._tokens is not None or self._obey

    def in_flight(self, *, key: str = "", model: str = "") -> int:
        """Calls under way for this key and model."""
        return self._lane(key, model).gate.in_flight

    async def acquire(self, *, key: str = "", model: str = "", tokens: float = 0) -> Permit:
        """Wait until a call of about `tokens` tokens may be made. Cancelling the wait gives up the place."""
        if self._throttler is not None:
            await self._throttler.acquire()
        lane, loop = self._lane(key, model), asyncio.get_running_loop()
        event = asyncio.Event()

        def bell() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

        granted = lane.attempt(bell, tokens)
        try:
            while not isinstance(granted, Permit):
                try:
                    async with asyncio.timeout(None if granted == FOREVER else granted / 1e9):
                        await event.wait()
                except TimeoutError:
                    pass
                event.clear()
                granted = lane.attempt(bell, tokens)
        except BaseException:
            lane.forget(bell)
            raise
        return granted

    def acquire_blocking(self, *, key: str = "", model: str = "", tokens: float = 0) -> Permit:
        """The same for a thread. Raises WrongUse where requests are counted by an asyncio Throttler."""
        if self._throttler is not None:
            raise WrongUse("an asyncio Throttler cannot make a thread wait", 'give requests="10/s" instead')
        lane = self._lane(key, model)
        event = threading.Event()
        bell = event.set
        granted = lane.attempt(bell, tokens)
        try:
            while not isinstance(granted, Permit):
                event.wait(None if granted == FOREVER else granted / 1e9)
                event.clear()
                granted = lane.attempt(bell, tokens)
        except BaseException:
            lane.forget(bell)
            raise
        return granted

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
        """The same for a thread."""
        permit = self.acquire_blocking(key=key, model=model, tokens=tokens)
        try:
            yield permit
        finally:
            permit.done()

    def _lane(self, key: str, model: str) -> _Lane:
        names = {"key": key, "model": model}
        which = tuple(names[name] for name in self._per)
        with self._lock:
            lane = self._lanes.get(which)
            if lane is None:
                lane = self._lanes[which] = _Lane(Gate(self._requests, self._tokens, self._cap), self._obey)
            return lane


def _number(text: str, otherwise: float) -> float:
    try:
        return float(text)
    except ValueError:
        return otherwise


def _duration_ns(text: str) -> int:
    """`6m0s`, `20ms`, `1.5s` or bare seconds, in ns; 0 for what cannot be read."""
    found = _DURATION.fullmatch(text.strip())
    if found and any(found.groups()):
        hours, minutes, seconds, millis = (float(part or 0) for part in found.groups())
        return round((hours * 3600 + minutes * 60 + seconds) * 1e9 + millis * 1e6)
    return max(0, round(_number(text, 0) * 1e9))
