"""Decides whether a failed call may be tried again, and after how long. Without IO: it neither sleeps nor sends.

Rules: the number of attempts is limited, waits are random, retries are paid from a budget that calls fill (so that
retries cannot multiply the load of an outage), and there is no retry after output has reached the caller.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from ..errors import WrongUse
from ..request import Failure
from .finishing import lock_of

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
"""Kinds of failure that a retry may cure. `http_4xx` is retried only with a status in RETRIED_STATUS."""
RETRIED_STATUS = frozenset((408, 409, 425))
FINAL_STATUS = frozenset((501, 505, 511))  # 5xx statuses that a retry cannot cure
FINAL_WORDS = (
    "insufficient_quota",
    "billing",
    "credit balance",
)  # texts of a 429 that waiting does not cure
LONGEST_ASKED_S = 60.0  # a call whose server asks for a longer wait is given up


class Retry:
    """A retry policy with a budget. One object may serve several clients, tasks and threads; they share the budget.

    attempts: the most attempts per call, with the first. The n-th wait is uniformly random between 0 and
    `first_wait_s * 2 ** (n - 1)`, at most `max_wait_s` ("full jitter"). A longer Retry-After of the server is used
    instead; one above 60 s ends the call. A timeout is tried again, and its next attempt has the whole time.

    budget: retries that each call adds to a balance, of at most `reserve` retries; each retry takes one. The reserve is
    for bad moments: 500 retries, as many as 250 failing calls make. When it is used up, an outage that lasts has at
    most `budget` retries for each call, 10 % more load. budget=2 never runs dry at three attempts: every call then has
    all its attempts, as with the retries of the openai package.

    retry_if: a function of the Failure of an attempt, asked first: True: try again; False: do not; None: by the rules
    here, and by the server's `x-should-retry`. It does not overrule attempts, budget and what was delivered.
    Raises WrongUse.
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
        if not isinstance(attempts, int) or attempts < 1:
            raise WrongUse(
                "out_of_range", f"{attempts!r} attempts", "at least 1: the first try counts"
            )
        if not 0 < first_wait_s <= max_wait_s:
            raise WrongUse(
                "out_of_range",
                f"waits from {first_wait_s} s to {max_wait_s} s",
                "0 < first_wait_s <= max_wait_s",
            )
        if budget < 0 or reserve < 0:
            raise WrongUse(
                "out_of_range", f"a budget of {budget} and a reserve of {reserve}", "0 or more"
            )
        if retry_if is not None and not callable(retry_if):
            raise WrongUse(
                "wrong_type",
                f"retry_if is a {type(retry_if).__name__}",
                "give a function of one Failure",
            )
        self.attempts, self.first_wait_s, self.max_wait_s = attempts, first_wait_s, max_wait_s
        self.budget, self.reserve = budget, reserve
        self._retry_if = retry_if
        self._balance = float(reserve)
        self._random = random.Random(seed)
        self._lock = lock_of(self)

    def begun(self) -> None:
        """A call begins: add its share to the budget."""
        with self._lock:
            self._balance = min(self.reserve, self._balance + self.budget)

    def wait_s(
        self,
        made: int,
        failure: Failure,
        *,
        asked_s: float | None = None,
        server_says: bool | None = None,
        delivered: bool,
    ) -> float | None:
        """Seconds to wait before the next attempt, after `made` attempts, the last with `failure`. None: give up.

        asked_s: the server's Retry-After in seconds. server_says: its `x-should-retry`. delivered: whether any output
        reached the caller.
        """
        if delivered or made >= self.attempts or not self._may_help(failure, server_says):
            return None
        if asked_s is not None and asked_s > LONGEST_ASKED_S:
            return None
        with self._lock:
            if self._balance < 1:
                return None
            self._balance -= 1
            backoff_s = self._random.uniform(
                0, min(self.max_wait_s, self.first_wait_s * 2.0 ** (made - 1))
            )
        return max(backoff_s, asked_s or 0.0)

    def _may_help(self, failure: Failure, server_says: bool | None) -> bool:
        """The first of application, server and rule that says something."""
        if self._retry_if is not None:
            try:
                if (own := self._retry_if(failure)) is not None:
                    return bool(own)
            except Exception:
                log.exception("retry_if of a Retry failed")
        return curable(failure) if server_says is None else server_says


def curable(failure: Failure) -> bool:
    """Whether the same request may succeed at a second try."""
    kind, status = failure.kind, failure.http_status
    if kind == "http_4xx":
        return status in RETRIED_STATUS
    if kind == "http_429" and any(word in failure.text.lower() for word in FINAL_WORDS):
        return False
    return kind in RETRIED and status not in FINAL_STATUS
