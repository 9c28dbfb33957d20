"""A budget that stops: a call that may cost more than is left of it is refused before anything is sent.

A call is booked before it is sent, by an estimate at the application's own prices, and settled by what it cost. The sum
of a period is kept in this process, in a file that processes of this host lock, or in Redis.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol

import msgspec

from ..errors import BudgetExceeded, WrongUse
from . import event_loop
from .finishing import collecting, later, lock_of
from .shared_limits import DOWN_NS, is_redis, locked_file, redacted, redis_client, writable

log = logging.getLogger("loadgen_sdk")

_PERIODS = {"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d", "month": "%Y-%m", "": "ever"}
_WRITTEN = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?) *([A-Z]{3}) *(?:/ *(hour|day|month))?")
_KEPT_S = 40 * 86_400  # of a period in Redis: longer than a month


class Sum(NamedTuple):
    """What a ledger answers. spent: in this period by all. booked: the amount was added."""

    spent: float
    booked: bool


class Ledger(Protocol):
    """Where the sum of a period is. Each step may raise one of `errors`."""

    errors: tuple[type[Exception], ...]

    def add(self, period: str, amount: float, limit: float) -> Sum:
        """Add `amount` unless the sum would be above `limit`. What is added to a period that is over counts no more."""


class MemoryLedger:
    """The sum of this process."""

    errors: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self._period, self._spent = "", 0.0
        self._lock = lock_of(self)

    def add(self, period: str, amount: float, limit: float) -> Sum:
        with self._lock:
            if period < self._period:
                return Sum(self._spent, booked=False)
            if period > self._period:
                self._period, self._spent = period, 0.0
            if booked := self._spent + amount <= limit:
                self._spent = max(0.0, self._spent + amount)
            return Sum(self._spent, booked)

    def learn(self, period: str, spent: float) -> None:
        """Others say what was spent in all."""
        with self._lock:
            self._period, self._spent = period, spent


class FileLedger:
    """A file of one line, `{"period":"2026-11-23","spent":12.5}`, which is locked while it is read and written."""

    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, path: Any) -> None:
        self._path = writable(path)

    def __str__(self) -> str:
        return str(self._path)

    def add(self, period: str, amount: float, limit: float) -> Sum:
        with locked_file(str(self._path)) as file:
            ledger = MemoryLedger()
            if old := file.read():
                try:
                    ledger.learn(**msgspec.json.decode(old, type=dict[str, Any]))
                except (msgspec.MsgspecError, TypeError) as error:
                    raise OSError(f"it is no ledger of a budget: {error}") from None
            answer = ledger.add(period, amount, limit)
            if answer.booked:
                new = msgspec.json.encode({"period": period, "spent": answer.spent}) + b"\n"
                file.seek(0)
                file.write(new)
                file.truncate(len(new))
            return answer


_SCRIPT = """
local spent = tonumber(redis.call('GET', KEYS[1]) or '0')
local after = spent + tonumber(ARGV[1])
if after > tonumber(ARGV[2]) then return {0, string.format('%.17g', spent)} end
redis.call('SET', KEYS[1], string.format('%.17g', math.max(0, after)), 'EX', ARGV[3])
return {1, string.format('%.17g', math.max(0, after))}
"""


class RedisLedger:
    """A number in Redis for each period (`loadgen_sdk:budget:NAME:2026-11-23`), one round trip a step."""

    def __init__(self, url: str) -> None:
        self._redis, self._name, self.errors = redis_client(url, "a budget")
        self._script, self._where = self._redis.register_script(_SCRIPT), redacted(url)

    def __str__(self) -> str:
        return self._where

    def add(self, period: str, amount: float, limit: float) -> Sum:
        # Redis reads no "inf"; a settled call is added whatever the limit.
        most = repr(min(limit, 1e300))
        key = f"loadgen_sdk:budget:{self._name}:{period}"
        booked, spent = self._script(keys=[key], args=[repr(amount), most, _KEPT_S])
        return Sum(float(spent), bool(booked))


class BudgetHold:
    """What a call has booked of a Budget, until `settle`."""

    __slots__ = ("_amount", "_budget", "_period")

    def __init__(self, budget: Budget, period: str, amount: float) -> None:
        self._budget, self._period, self._amount = budget, period, amount

    def settle(self, cost: float) -> None:
        """The call has really cost this. Once."""
        difference = cost - self._amount
        if difference:
            self._budget._aside(partial(self._budget._add, self._period, difference, float("inf")))


class Budget:
    """The most that calls may cost: `Budget("50 USD/day")`; `/hour`, `/day` and `/month` are those of UTC, without one
    it is for ever. The amount is in the currency of the prices; a currency that they name has to be this one.

    A call that may cost more than is left raises BudgetExceeded before anything is sent, and so does a call of a model
    without a price. It is booked by an estimate (its prompt, and its output limit or 256 tokens), and settled by the
    server's counts; where there are none, the estimate stays, but for a call that the server refused. So the sum goes
    above the limit only by what the calls in flight are longer than estimated.

    shared: the path of a file by which all processes of this host keep one sum, or "redis://HOST:6379/0#NAME", by which
    those of all hosts do. Without it the sum is this process's, and begins at 0. Where the store fails, that is logged
    once, and this process goes on by what it knows of the sum. One object may serve several clients.
    Raises WrongUse for a text that is no budget.
    """

    def __init__(self, limit: str, *, shared: Any = None) -> None:
        match = _WRITTEN.fullmatch(limit.strip()) if isinstance(limit, str) else None
        if match is None:
            raise WrongUse(
                "invalid_value",
                f"{limit!r} is no budget",
                'budget="50 USD/day"; or /hour, /month, or none',
            )
        self.limit = float(match[1].replace(",", "").replace("_", ""))
        self.currency, self._period_form = match[2], _PERIODS[match[3] or ""]
        self._text, self._own, self._store = limit.strip(), MemoryLedger(), _ledger(shared)
        self._down_until, self._warned = 0, False

    @property
    def spent(self) -> float:
        """What was spent in this period, calls in flight by their estimate; of a shared one, what its store says."""
        return self._add(self._period(), 0.0, float("inf")).spent

    def book(self, cost: float | None, model: str) -> BudgetHold:
        """Book a call that will cost about so much; None: nobody knows. Raises BudgetExceeded."""
        period = self._period()
        if cost is None:
            problem = f"the model {model!r} has no price, and a budget of {self._text} holds: add it to prices="
            raise BudgetExceeded(problem, self.limit, 0.0)
        answer = self._add(period, cost, self.limit)
        if not answer.booked:
            problem = f"a call of about {cost:.4g} {self.currency} is refused: {answer.spent:.4g} of {self._text} is spent"
            raise BudgetExceeded(problem, self.limit, answer.spent)
        return BudgetHold(self, period, cost)

    def booker(
        self, blocking: bool
    ) -> Callable[[float | None, str], BudgetHold | Awaitable[BudgetHold]]:
        """`book`, or in an event loop where it may wait for a store, the same in a thread."""
        if blocking or self._store is None:
            return self.book
        return lambda cost, model: event_loop.in_thread(partial(self.book, cost, model))

    def _period(self) -> str:
        return datetime.now(UTC).strftime(self._period_form)

    def _aside(self, work: Callable[[], object]) -> None:
        """As of a Throttle: in a destructor a lock may be held, in an event loop a store may take too long."""
        if collecting() or (self._store is not None and event_loop.is_running()):
            later(work)
        else:
            work()

    def _add(self, period: str, amount: float, limit: float) -> Sum:
        if self._store is not None and monotonic_ns() >= self._down_until:
            try:
                answer = self._store.add(period, amount, limit)
                self._own.learn(period, answer.spent)
                return answer
            except self._store.errors as error:
                self._down_until = monotonic_ns() + DOWN_NS
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "a budget is not shared with other processes: %s: %s", self._store, error
                    )
        return self._own.add(period, amount, limit)


def _ledger(shared: Any) -> Ledger | None:
    if shared is None:
        return None
    return RedisLedger(shared) if is_redis(shared) else FileLedger(shared)


Given = Budget | str | None


def checked_budget(budget: Given, currencies: set[str], *, priced: bool) -> Budget | None:
    """`budget` as one, a text too. Raises WrongUse, also for one without prices, or with prices of another currency."""
    if budget is None:
        return None
    if isinstance(budget, str):
        budget = Budget(budget)
    if not isinstance(budget, Budget):
        raise WrongUse(
            "wrong_type", f"budget is a {type(budget).__name__}", 'give budget="50 USD/day"'
        )
    if not priced:
        raise WrongUse(
            "missing_option",
            "a budget without prices would never be used up",
            "give prices= as well",
        )
    if others := sorted(currencies - {"", budget.currency}):
        raise WrongUse(
            "conflict",
            f"a budget in {budget.currency}, and prices in {', '.join(others)}",
            "one currency",
        )
    return budget
