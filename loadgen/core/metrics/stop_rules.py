"""Decides by the rules of `--stop-when` whether a run ends early. Pure.

Real time and virtual time use the same `StopRuleMonitor`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import CANCELLED, UNDEFINED, UNFINISHED, Columns
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.results.record import ROW, concatenate_rows, select_rows
from loadgen.core.slo import StopRule
from loadgen.core.stats.quantiles import quantile_index

WINDOW_NS = 10_000_000_000
"""A rule considers the requests that ended in this time before now."""

CHECK_INTERVAL_NS = 1_000_000_000
"""The rules are checked once in this time."""

MIN_REQUESTS = 20
"""A rule is not judged by fewer requests."""


class StopRuleMonitor:
    """Checks the rules of `--stop-when` while a load goes on.

    `breach` is the reason to stop the load, or None as long as no rule is broken.
    """

    def __init__(self, rules: Sequence[StopRule]) -> None:
        self._rules = rules
        self._recent = np.zeros(0, ROW)
        self.breach: ReasonCode | None = None

    def check(self, now_ns: int, ended: NDArray[np.void]) -> bool:
        """Return True if a rule is broken, and set `breach` to the reason to stop the load.

        Only the requests that ended in the last WINDOW_NS are considered.

        Args:
            now_ns: The time since the start of the run.
            ended: The records of the requests that ended since the last check.
        """
        is_still_recent = self._recent["done_ns"] > now_ns - WINDOW_NS
        still_recent = select_rows(self._recent, is_still_recent)
        self._recent = concatenate_rows((still_recent, ended))

        self.breach = find_breach(self._rules, self._recent, now_ns)
        return self.breach is not None


def find_breach(
    rules: Sequence[StopRule], rows: NDArray[np.void], now_ns: int
) -> ReasonCode | None:
    """Return the reason to stop a run early, or None if no rule is broken.

    A rule limits the share of failed requests, or a quantile of a latency. It is applied to the
    requests that ended in the last WINDOW_NS.

    Args:
        rules: The rules.
        rows: Records of requests. Some may have ended before the window, or not yet.
        now_ns: The end of the window.
    """
    done_ns = rows["done_ns"]
    is_done_in_window = (done_ns > now_ns - WINDOW_NS) & (done_ns <= now_ns)
    is_recent = _has_ended(rows) & is_done_in_window

    recent = Columns(select_rows(rows, is_recent))
    if len(recent) < MIN_REQUESTS:
        return None

    for rule in rules:
        reason = _judge_rule(rule, recent, now_ns)
        if reason is not None:
            return reason

    return None


def _judge_rule(rule: StopRule, requests: Columns, now_ns: int) -> ReasonCode | None:
    """Return the reason to stop a run early if these requests break a rule, else None.

    A rule limits the share of failed requests, or a quantile of a latency.

    Args:
        rule: The rule.
        requests: The requests that ended in the last WINDOW_NS.
        now_ns: The end of that window.
    """
    # The values that the sentence of the reason shows.
    sentence_values = {
        "rule": rule.written,
        "requests": len(requests),
        "window_s": WINDOW_NS / 1e9,
        "at_s": now_ns / 1e9,
    }

    if rule.quantile is None:  # the rule limits the share of failed requests
        failed = len(requests) - int(requests.is_ok.sum())
        is_broken = failed >= rule.limit * len(requests)
        code = "stopped_by_errors"
        sentence_values["failed"] = failed
    else:
        over_limit = int(_is_over(rule, requests).sum())
        is_broken = over_limit > _allowed_over_limit(len(requests), rule.quantile)
        code = "stopped_by_latency"
        sentence_values["over"] = over_limit

    return ReasonCode(code=code, values=sentence_values) if is_broken else None


def _allowed_over_limit(requests: int, quantile: float) -> int:
    """Return how many requests may be over the limit of a quantile: 1 of 200 requests for a p99.

    These are the requests after the quantile in order of latency.
    """
    index_of_quantile = quantile_index(requests, quantile)
    index_of_last = requests - 1
    return index_of_last - index_of_quantile


def _has_ended(rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Return which requests are done, and not because the client cancelled them."""
    status = rows["status"]
    is_done = rows["done_ns"] >= 0
    was_cut = (status == CANCELLED) | (status == UNFINISHED)
    ended: NDArray[np.bool_] = is_done & ~was_cut
    return ended


def _is_over(rule: StopRule, requests: Columns) -> NDArray[np.bool_]:
    """Return which requests count against a limit of a latency: failed ones, and those over it."""
    ok = requests.is_ok
    latencies = requests.measure(rule.metric)
    over: NDArray[np.bool_] = ~ok | ((latencies != UNDEFINED) & (latencies > rule.limit))
    return over
