"""Decide whether a failed call is tried again, and after how long.

Pure: it neither sleeps nor sends.

The number of attempts is limited, waits are random, and there is no retry after output has reached
the caller. Retries are paid from a budget that calls fill, so that they cannot multiply the load
of an outage.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from ..errors import WrongUse
from ..request import Failure
from .background import create_fork_safe_lock

log = logging.getLogger("loadgen_sdk")

RETRIED = frozenset(
    (
        "dns",
        "connect",
        "client_resource",
        "reset",
        "timeout_total",
        "timeout_stall",
        "empty",
        "truncated",
        "http_429",
        "http_5xx",
    )
)
"""Kinds of failure that a retry may cure.

`http_4xx` is retried only with a status in RETRIED_STATUS.
"""
RETRIED_STATUS = frozenset((408, 409, 425))

FINAL_STATUS = frozenset((501, 505, 511))
"""Statuses above 500 that a retry cannot cure."""

FINAL_WORDS = ("insufficient_quota", "billing", "credit balance")
"""Words in the text of a 429 that waiting does not cure."""

MAX_SERVER_WAIT_S = 60.0
"""There is no further attempt if the server asks for a longer wait."""


class Retry:
    """A retry policy with a budget. Clients, tasks and threads may share one object and its budget.

    The n-th wait is uniformly random between 0 and `first_wait_s * 2 ** (n - 1)`, at most
    `max_wait_s` ("full jitter"). A longer Retry-After of the server is used instead, and one above
    60 s ends the call. A timeout is tried again, and its next attempt has the whole time.

    Each call adds `budget` retries to a balance of at most `reserve`, and each retry takes one
    from it. The reserve is for short outages: 500 retries, as many as 250 failing calls make. When
    it is used up, an outage that lasts has at most `budget` retries for each call, which is 10 %
    more load. With budget=2 and three attempts the balance never runs dry, so that every call has
    all its attempts, as with the retries of the openai package.
    """

    def __init__(
        self,
        attempts: int = 3,
        *,
        first_wait_s: float = 0.5,
        max_wait_s: float = 8.0,
        budget: float = 0.1,
        reserve: int = 500,
        retry_if: Callable[[Failure], bool | None] | None = None,
        seed: int | None = None,
    ) -> None:
        """Create a retry policy.

        Retries are paid from a balance, to which each call adds. An outage, in which all calls
        fail, therefore cannot multiply the load of the server.

        Args:
            attempts: The most attempts per call, the first one included.
            first_wait_s: The upper limit of the first random wait, which doubles with each attempt.
            max_wait_s: The upper limit of all waits.
            budget: How many retries each call adds to the balance. With 0.1, ten calls add one.
            reserve: The largest balance, which is also the one at the start.
            retry_if: A function that gets the Failure of an attempt. It returns True to try again,
                False not to, and None to leave the decision to the server's `x-should-retry` and
                the rules of this class. There is no retry in any case if all attempts are used up,
                if the balance is empty, or if output was delivered.
            seed: The seed of the random waits.

        Raises:
            WrongUse: An argument is not valid.
        """
        if not isinstance(attempts, int) or attempts < 1:
            raise WrongUse(
                "out_of_range",
                f"{attempts!r} attempts",
                "must be at least 1, because the first try counts",
            )

        if not 0 < first_wait_s <= max_wait_s:
            raise WrongUse(
                "out_of_range",
                f"first_wait_s is {first_wait_s} and max_wait_s is {max_wait_s}",
                "use 0 < first_wait_s <= max_wait_s",
            )

        if budget < 0 or reserve < 0:
            raise WrongUse(
                "out_of_range", f"budget is {budget} and reserve is {reserve}", "0 or more"
            )

        if retry_if is not None and not callable(retry_if):
            raise WrongUse(
                "wrong_type",
                f"retry_if must be a function, not a {type(retry_if).__name__}",
                "give a function that takes one Failure",
            )

        self.attempts = attempts
        self.first_wait_s = first_wait_s
        self.max_wait_s = max_wait_s
        self.budget = budget
        self.reserve = reserve
        self._retry_if = retry_if
        self._balance = float(reserve)
        self._random = random.Random(seed)
        self._lock = create_fork_safe_lock(self)

    def call_started(self) -> None:
        """Add `budget` retries to the balance, because a new call begins."""
        with self._lock:
            self._balance = min(self.reserve, self._balance + self.budget)

    def wait_s(
        self,
        attempts_made: int,
        failure: Failure,
        *,
        server_wait_s: float | None = None,
        server_says_retry: bool | None = None,
        delivered: bool,
    ) -> float | None:
        """Decide about a retry. Return the seconds to wait before it, or None for no retry.

        A call is not retried if output was delivered, if all attempts are used up, if a retry would
        not help, if the server asks for too long a wait, or if the balance of retries is empty. A
        retry takes 1 from the balance. The wait is exponential back-off with full jitter, but not
        shorter than the server asks.

        Args:
            attempts_made: The number of attempts so far.
            failure: The failure of the last attempt.
            server_wait_s: The server's Retry-After, if it sent one.
            server_says_retry: The server's `x-should-retry`, if it sent one.
            delivered: Output has reached the caller.
        """
        if delivered or attempts_made >= self.attempts:
            return None
        if not self._may_help(failure, server_says_retry):
            return None
        if server_wait_s is not None and server_wait_s > MAX_SERVER_WAIT_S:
            return None

        max_backoff_s = min(self.max_wait_s, self.first_wait_s * 2.0 ** (attempts_made - 1))
        with self._lock:
            if self._balance < 1:
                return None
            self._balance -= 1
            backoff_s = self._random.uniform(0, max_backoff_s)

        return max(backoff_s, server_wait_s or 0.0)

    def _may_help(self, failure: Failure, server_says_retry: bool | None) -> bool:
        """Return True if the same request may succeed at another attempt.

        The function `retry_if` of the application decides first. If it returns None, the server's
        `x-should-retry` decides, and without that header the kind of the failure (`is_curable`).
        """
        decision = self._ask_application(failure)
        if decision is not None:
            return decision
        if server_says_retry is not None:
            return server_says_retry
        return is_curable(failure)

    def _ask_application(self, failure: Failure) -> bool | None:
        """Return the decision of `retry_if`, or None if there is none or the function fails."""
        if self._retry_if is None:
            return None

        try:
            decision = self._retry_if(failure)
        except Exception:
            log.exception("retry_if of a Retry raised an error")
            return None

        return None if decision is None else bool(decision)


def is_curable(failure: Failure) -> bool:
    """Return True if a failure is of a kind after which the same request may succeed later.

    Examples are a timeout, HTTP 503, and HTTP 429 (too many requests), unless the quota of the
    account is exhausted. After most 4xx statuses, and after statuses such as 501 (not implemented),
    the same request would fail again.
    """
    if failure.kind == "http_4xx":
        return failure.http_status in RETRIED_STATUS
    if failure.kind == "http_429":
        return not _is_quota_exhausted(failure.text)
    has_final_status = failure.http_status in FINAL_STATUS
    return failure.kind in RETRIED and not has_final_status


def _is_quota_exhausted(text: str) -> bool:
    """Return True if the text of a 429 response says that waiting does not help."""
    lower_text = text.lower()
    return any(word in lower_text for word in FINAL_WORDS)
