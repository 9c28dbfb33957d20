"""A budget that stops: a call that may cost more than is left is refused before anything is sent.

A call is booked by an estimate before it is sent, and settled by what it cost. The sum of a period
is kept in this process, in a file that processes of this host lock, or in Redis.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol

import msgspec

from ..errors import BudgetExceeded, WrongUse
from . import event_loop
from .background import create_fork_safe_lock, is_collecting_garbage, run_in_background
from .shared_limits import (
    RETRY_FAILED_STORE_NS,
    check_writable_path,
    connect_to_redis,
    is_redis_url,
    locked_file,
    redact_url,
)

log = logging.getLogger("loadgen_sdk")

_NO_LIMIT = float("inf")
_MAX_REDIS_LIMIT = 1e300
"""Stands for no limit in Redis, which reads no "inf"."""

_PERIOD_FORMATS = {"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d", "month": "%Y-%m", "": "ever"}
_BUDGET_TEXT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?) *([A-Z]{3}) *(?:/ *(hour|day|month))?")
_REDIS_LIFETIME_S = 40 * 86_400
"""How long Redis keeps a period, which is longer than a month."""


class BudgetEntry(NamedTuple):
    """The result of adding an amount to a store.

    Attributes:
        spent: The sum of this period, by all processes.
        is_booked: The amount was added.
    """

    spent: float
    is_booked: bool


class BudgetStore(Protocol):
    """Stores what calls have cost in the current period. `add` may raise one of `errors`.

    A period is a text such as "2026-11-23" for a day. Later periods are greater texts.
    """

    errors: tuple[type[Exception], ...]

    def add(self, period: str, amount: float, limit: float) -> BudgetEntry:
        """Add an amount unless the sum would be above the limit.

        An amount for a period that is over does not count any more.
        """


class MemoryBudgetStore:
    """Keeps the sum of this process."""

    errors: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        """Start without a period."""
        self._period = ""
        self._spent = 0.0
        self._lock = create_fork_safe_lock(self)

    def add(self, period: str, amount: float, limit: float) -> BudgetEntry:
        """Add an amount to the sum of a period, unless the sum would be above the limit.

        The sum of the current period is stored, and no other. A later period starts with a sum of
        0 and becomes the current one. The amount is dropped if its period is over: the call began
        in that period, and ended in the current one.

        Args:
            period: The period as text, such as "2026-11-23". The texts sort in the order of time.
            amount: The amount. It is negative if a call cost less than its estimate.
            limit: The largest sum that is allowed.
        """
        with self._lock:
            is_earlier_period = period < self._period
            if is_earlier_period:
                return BudgetEntry(self._spent, is_booked=False)

            is_new_period = period > self._period
            if is_new_period:
                self._period = period
                self._spent = 0.0

            is_allowed = self._spent + amount <= limit
            if is_allowed:
                # A correction may be negative. Rounding must not make the sum negative, too.
                self._spent = max(0.0, self._spent + amount)

            return BudgetEntry(self._spent, is_allowed)

    def set_spent(self, period: str, spent: float) -> None:
        """Replace the sum by that of all processes."""
        with self._lock:
            self._period = period
            self._spent = spent


class FileBudgetStore:
    """Keeps the sum in a file of one line, `{"period":"2026-11-23","spent":12.5}`.

    The file is locked while it is read and written.
    """

    errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Keep the path. Raises WrongUse if its directory cannot be written."""
        self._path = check_writable_path(path)

    def __str__(self) -> str:
        """Return the path."""
        return str(self._path)

    def add(self, period: str, amount: float, limit: float) -> BudgetEntry:
        """Add an amount to the sum in the file unless it would be above the limit.

        The file is unchanged if the amount is not added.

        Raises:
            OSError: The file cannot be read, locked or written.
        """
        with locked_file(str(self._path)) as file:
            store = _read_budget_file(file.read())
            entry = store.add(period, amount, limit)
            if entry.is_booked:
                content = msgspec.json.encode({"period": period, "spent": entry.spent}) + b"\n"
                file.seek(0)
                file.write(content)
                file.truncate(len(content))

            return entry


def _read_budget_file(content: bytes) -> MemoryBudgetStore:
    """Return a store with the period and the sum in the content of a budget file.

    The file is empty when it was just created, and the returned store is then empty, too.

    Raises:
        OSError: The file has other content, which must not be overwritten. A file that cannot be
            opened raises the same error, so that callers handle both in the same way.
    """
    store = MemoryBudgetStore()
    if not content:
        return store

    try:
        store.set_spent(**msgspec.json.decode(content, type=dict[str, Any]))
    except (msgspec.MsgspecError, TypeError) as error:
        raise OSError(f"not a budget file: {error}") from None

    return store


_SCRIPT = """
local spent = tonumber(redis.call('GET', KEYS[1]) or '0')
local after = spent + tonumber(ARGV[1])
if after > tonumber(ARGV[2]) then return {0, string.format('%.17g', spent)} end
redis.call('SET', KEYS[1], string.format('%.17g', math.max(0, after)), 'EX', ARGV[3])
return {1, string.format('%.17g', math.max(0, after))}
"""


class RedisBudgetStore:
    """Keeps the sum of each period under a key of Redis, `loadgen_sdk:budget:NAME:2026-11-23`.

    Each step takes one round trip.
    """

    def __init__(self, url: str) -> None:
        """Connect to Redis. Raises WrongUse if that is not possible."""
        connection = connect_to_redis(url, "a budget")
        self.errors = connection.errors
        self._name = connection.name
        self._script = connection.client.register_script(_SCRIPT)
        self._redacted_url = redact_url(url)

    def __str__(self) -> str:
        """Return the URL without user and password."""
        return self._redacted_url

    def add(self, period: str, amount: float, limit: float) -> BudgetEntry:
        """Add an amount unless the sum would be above the limit."""
        is_booked, spent = self._script(
            keys=[f"loadgen_sdk:budget:{self._name}:{period}"],
            args=[repr(amount), repr(min(limit, _MAX_REDIS_LIMIT)), _REDIS_LIFETIME_S],
        )
        return BudgetEntry(float(spent), bool(is_booked))


class BudgetHold:
    """The estimated cost that a call has booked of a Budget, until `settle` replaces it."""

    __slots__ = ("_amount", "_budget", "_period")

    def __init__(self, budget: Budget, period: str, amount: float) -> None:
        """Keep the booked amount and its period, to which a later correction belongs."""
        self._budget = budget
        self._period = period
        self._amount = amount

    def settle(self, cost: float) -> None:
        """Replace the estimate by what the call has cost. To be called once."""
        self._budget.correct(self._period, cost - self._amount)


class Budget:
    """The most that calls may cost: `Budget("50 USD/day")`.

    The periods `/hour`, `/day` and `/month` are those of UTC. A budget without a period holds for
    ever. It is in the currency of the prices; a currency that the prices name has to be the same.

    A call that may cost more than is left raises BudgetExceeded before anything is sent, and so
    does a call of a model without a price. A call is booked by an estimate (its prompt, and its
    output limit or 256 tokens), and settled by the token counts of the server. Without counts the
    estimate stays, except for a call that the server refused. The sum therefore exceeds the limit
    only by what the calls in flight are longer than estimated.

    One object may serve several clients.

    Attributes:
        limit: The amount.
        currency: Its currency.
    """

    def __init__(self, limit: str, *, shared: str | os.PathLike[str] | None = None) -> None:
        """Create a budget from its text.

        Args:
            limit: The amount, the currency and the period, such as "50 USD/day".
            shared: Where several processes keep the sum of their costs: the path of a file for the
                processes of this host, or "redis://HOST:6379/0#NAME" for those of several hosts. If
                this store fails, the failure is logged once, and this process continues with the
                last sum that it knows. With None, only the costs of this process count.

        Raises:
            WrongUse: The text is not a budget, or the store cannot be used.
        """
        match = _BUDGET_TEXT.fullmatch(limit.strip()) if isinstance(limit, str) else None
        if match is None:
            raise WrongUse(
                "invalid_value",
                f"{limit!r} is not a budget",
                'write budget="50 USD/day", with /hour, /day, /month or no period',
            )

        amount, currency, period = match.groups()
        self.limit = float(amount.replace(",", "").replace("_", ""))
        self.currency = currency
        self._limit_text = limit.strip()  # for error messages
        self._period_format = _PERIOD_FORMATS[period or ""]
        self._local_store = MemoryBudgetStore()
        self._store = _open_store(shared)
        self._store_failed_until = 0
        self._has_warned = False

    @property
    def spent(self) -> float:
        """The sum of this period. Calls in flight count by their estimates."""
        return self._add(self._current_period(), 0.0, _NO_LIMIT).spent

    def book(self, cost: float | None, model: str) -> BudgetHold:
        """Add the estimated cost of a call to the sum, before the call is sent.

        Args:
            cost: The estimated cost, or None if the model has no price.
            model: The model, for the error message.

        Raises:
            BudgetExceeded: The call may cost more than is left, or its model has no price.
        """
        if cost is None:
            message = (
                f"the model {model!r} has no price, so the budget of {self._limit_text} "
                "cannot be checked. Add the model to prices="
            )
            raise BudgetExceeded(message, self.limit, 0.0)

        period = self._current_period()
        entry = self._add(period, cost, self.limit)
        if not entry.is_booked:
            message = (
                f"a call of about {cost:.4g} {self.currency} was refused, because "
                f"{entry.spent:.4g} of the budget of {self._limit_text} is spent"
            )
            raise BudgetExceeded(message, self.limit, entry.spent)

        return BudgetHold(self, period, cost)

    def select_book_function(
        self, *, is_blocking: bool
    ) -> Callable[[float | None, str], BudgetHold | Awaitable[BudgetHold]]:
        """Return the function that books the estimated cost of a call, which is `book` or like it.

        Both take the cost and the model. `book` returns the booking at once. A coroutine function
        that calls `book` in a thread is returned for an async caller if processes share the budget,
        because the input and output of its store would block the event loop.
        """
        would_block_event_loop = not is_blocking and self._store is not None
        return self._book_in_thread if would_block_event_loop else self.book

    def correct(self, period: str, difference: float) -> None:
        """Correct the sum of a period after a call, whose estimated cost was added by `book`.

        The limit does not apply, because the money is spent already.

        Args:
            period: The period in which the call was booked.
            difference: The cost of the call minus its estimated cost.
        """
        if not difference:
            return

        add_difference = partial(self._add, period, difference, _NO_LIMIT)

        # The garbage collector may have called this, in the middle of code that holds the lock.
        # To wait for the lock in the same thread would be a deadlock.
        may_deadlock = is_collecting_garbage()

        # A store that processes share is a file or Redis, whose input and output take time.
        would_block_event_loop = self._store is not None and event_loop.is_running()
        if may_deadlock or would_block_event_loop:
            run_in_background(add_difference)
        else:
            add_difference()

    async def _book_in_thread(self, cost: float | None, model: str) -> BudgetHold:
        return await event_loop.run_in_thread(partial(self.book, cost, model))

    def _current_period(self) -> str:
        return datetime.now(UTC).strftime(self._period_format)

    def _add(self, period: str, amount: float, limit: float) -> BudgetEntry:
        """Add an amount to the shared sum, or to that of this process while the store fails."""
        entry = self._add_to_store(period, amount, limit)
        if entry is None:
            return self._local_store.add(period, amount, limit)
        self._local_store.set_spent(period, entry.spent)
        return entry

    def _add_to_store(self, period: str, amount: float, limit: float) -> BudgetEntry | None:
        """Add an amount to the shared sum, or return None if there is no store or it fails.

        After a failure the store is left alone for RETRY_FAILED_STORE_NS, so that calls do not wait
        for it again and again. Only the first failure is logged.
        """
        if self._store is None or monotonic_ns() < self._store_failed_until:
            return None
        try:
            return self._store.add(period, amount, limit)
        except self._store.errors as error:
            self._store_failed_until = monotonic_ns() + RETRY_FAILED_STORE_NS
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "the budget is not shared with other processes: %s: %s", self._store, error
                )
            return None


def _open_store(shared: str | os.PathLike[str] | None) -> BudgetStore | None:
    if shared is None:
        return None
    if is_redis_url(shared):
        return RedisBudgetStore(shared)
    return FileBudgetStore(shared)


BudgetOption = Budget | str | None


def validate_budget(
    budget: BudgetOption, currencies: set[str], *, has_prices: bool
) -> Budget | None:
    """Return the Budget of the option `budget=`, which may be a text such as "50 USD/day".

    Args:
        budget: The option.
        currencies: The currencies of the prices.
        has_prices: There are prices, without which no call has a cost.

    Raises:
        WrongUse: The option is not a budget, there are no prices, or they have another currency.
    """
    if budget is None:
        return None

    if isinstance(budget, str):
        budget = Budget(budget)

    if not isinstance(budget, Budget):
        raise WrongUse(
            "wrong_type",
            f"budget must be a text or a Budget, not a {type(budget).__name__}",
            'give budget="50 USD/day"',
        )

    if not has_prices:
        raise WrongUse(
            "missing_option",
            "a budget needs prices to know what a call costs",
            "give prices= as well",
        )

    other_currencies = sorted(currencies - {"", budget.currency})
    if other_currencies:
        message = (
            f"the budget is in {budget.currency}, but prices are in {', '.join(other_currencies)}"
        )
        raise WrongUse("conflict", message, "one currency")

    return budget
