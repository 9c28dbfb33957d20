"""Whether a run is to end before its time: the rules of `--stop-when`, over the requests that ended last. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import CANCELLED, OK, UNDEFINED, UNFINISHED, Columns
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.results.record import picked
from loadgen.core.slo import StopRule
from loadgen.core.stats.quantiles import index

WINDOW_NS = 10_000_000_000  # a rule looks at the requests that ended in the last so many ns
FEWEST = 20  # of them, below which it says nothing


def breach(rules: Sequence[StopRule], rows: NDArray[np.void], now_ns: int) -> ReasonCode | None:
    """The first rule that the requests which ended in the window before `now_ns` break, as the reason to end the run.

    As with an SLO, a failed request is over every limit.
    """
    done = rows["done_ns"]
    recent = Columns(picked(rows, has_ended(rows) & (done > now_ns - WINDOW_NS) & (done <= now_ns)))
    return broken(rules, len(recent), (int(is_over(rule, recent).sum()) for rule in rules), now_ns)


def has_ended(rows: NDArray[np.void]) -> NDArray[np.bool_]:
    """Which requests ended by themselves: not those that were never sent or that the end of the run cut."""
    status = rows["status"]
    ended: NDArray[np.bool_] = (
        (rows["done_ns"] >= 0) & (status != CANCELLED) & (status != UNFINISHED)
    )
    return ended


def is_over(rule: StopRule, requests: Columns) -> NDArray[np.bool_]:
    """Which requests count against a rule: those that failed, and those over its limit."""
    ok = requests.where(OK)
    if rule.quantile is None:
        return ~ok
    latencies = requests.measure(rule.metric)
    over: NDArray[np.bool_] = ~ok | ((latencies != UNDEFINED) & (latencies > rule.limit))
    return over


def broken(
    rules: Sequence[StopRule], requests: int, over: Iterable[int], now_ns: int
) -> ReasonCode | None:
    """The first rule that is broken. `requests`: how many ended in the window. `over`: how many count against each."""
    if requests < FEWEST:
        return None
    for rule, count in zip(rules, over, strict=True):
        values = {
            "rule": rule.written,
            "requests": requests,
            "window_s": WINDOW_NS / 1e9,
            "at_s": now_ns / 1e9,
        }
        if rule.quantile is None:
            if count >= rule.limit * requests:
                return ReasonCode(code="stopped_by_errors", values={**values, "failed": count})
        elif count > requests - 1 - index(requests, rule.quantile):
            return ReasonCode(code="stopped_by_latency", values={**values, "over": count})
    return None
