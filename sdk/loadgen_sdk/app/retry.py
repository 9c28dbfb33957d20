"""Whether a failed call may be tried again, and after how long. Sans IO: it neither sleeps nor sends.

Rules: bounded in number, jittered, paid for out of a budget that successes fill (so that retries cannot multiply an
outage), and never once a token was delivered.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from time import time

from ..errors import WrongUse
from ..request import Failure

RETRIED = frozenset(("dns", "connect", "reset", "empty", "truncated", "http_429", "http_5xx"))
"""Kinds of failure that another try may cure; `http_4xx` only with a status of RETRIED_STATUS."""
RETRIED_STATUS = frozenset((408, 409, 425))
FINAL_STATUS = frozenset((501, 505, 511))  # 5xx that say "never"
FINAL_WORDS = ("insufficient_quota", "billing", "credit balance")  # 429 that waiting does not cure
LONGEST_ASKED_S = 60.0  # a server that asks for more is not waited for


class Retry:
    """A policy with a purse. One object may serve any number of clients, tasks and threads; they share the purse.

    attempts: tries in all, the first included. The n-th wait is drawn evenly from 0 to `first_s * 2 ** (n - 1)`, at
    most `most_s` ("full jitter"); a server's Retry-After is obeyed instead where it is longer, and ends the call where
    it is above 60 s. budget: retries per call on average beyond `reserve` of them saved up; 0.1 adds at most 10 % to
    the load of a server in trouble. Raises WrongUse.
    """

    def __init__(
        self,
        attempts: int = 3,
        *,
        first_s: float = 0.5,
        most_s: float = 8.0,
        budget: float = 0.1,
        reserve: int = 10,
        seed: int | None = None,
    ) -> None:
        if not isinstance(attempts, int) or attempts < 1:
            raise WrongUse(f"{attempts!r} attempts", "at least 1: the first try counts")
        if not 0 < first_s <= most_s:
            raise WrongUse(f"waits from {first_s} s to {most_s} s", "0 < first_s <= most_s")
        if budget < 0 or reserve < 0:
            raise WrongUse(f"a budget of {budget} and a reserve of {reserve}", "0 or more")
        self.attempts, self.first_s, self.most_s = attempts, first_s, most_s
        self.budget, self.reserve = budget, reserve
        self._saved = float(reserve)
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def begun(self) -> None:
        """A call begins: it pays its share into the purse."""
        with self._lock:
            self._saved = min(self.reserve, self._saved + self.budget)

    def wait_s(self, made: int, failure: Failure, *, asked_s: float | None = None, delivered: bool) -> float | None:
        """After `made` attempts, the last of which ended in `failure`: seconds to wait before the next, None: give up.

        asked_s: what the server's Retry-After says. delivered: whether any output reached the caller.
        """
        if delivered or made >= self.attempts or not curable(failure):
            return None
        if asked_s is not None and asked_s > LONGEST_ASKED_S:
            return None
        with self._lock:
            if self._saved < 1:
                return None
            self._saved -= 1
            drawn = self._random.uniform(0, min(self.most_s, self.first_s * 2.0 ** (made - 1)))
        return max(drawn, asked_s or 0.0)


def curable(failure: Failure) -> bool:
    """Whether the same request may fare better a second time."""
    kind, status = failure.kind, failure.http_status
    if kind == "http_4xx":
        return status in RETRIED_STATUS
    if kind == "http_429" and any(word in failure.text.lower() for word in FINAL_WORDS):
        return False
    return kind in RETRIED and status not in FINAL_STATUS


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """What `retry-after-ms` or `Retry-After` (seconds or a date, RFC 9110) asks for; None where they say nothing."""
    said = headers.get("retry-after-ms")
    try:
        if said:
            return max(0.0, float(said) / 1000)
        said = headers.get("retry-after")
        if not said:
            return None
        try:
            return max(0.0, float(said))
        except ValueError:
            return max(0.0, parsedate_to_datetime(said).timestamp() - time())
    except (ValueError, TypeError, OverflowError):
        return None
