"""Whether a run is to end before its time: the rules of `--stop-when`, over the requests that ended last. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import CANCELLED, OK, UNDEFINED, UNFINISHED, Columns
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.slo import StopRule
from loadgen.core.stats.quantiles import index

WINDOW_NS = 10_000_000_000  # a rule looks at the requests that ended in the last so many ns
FEWEST = 20  # of them, below which it says nothing


def breach(rules: Sequence[StopRule], rows: NDArray[np.void], now_ns: int) -> ReasonCode | None:
    """The first rule that the requests which ended in the window before `now_ns` break, as the reason to end the run.

    As with an SLO, a failed request is over every limit.
    """
    done = rows["done_ns"]
    cut = (rows["status"] == CANCELLED) | (rows["status"] == UNFINISHED)
    recent = Columns(rows[(done > now_ns - WINDOW_NS) & (done <= now_ns) & ~cut])
    requests = len(recent)
    if requests < FEWEST:
        return None
    for rule in rules:
        values = {"rule": rule.written, "requests": requests, "window_s": WINDOW_NS / 1e9, "at_s": now_ns / 1e9}
        if rule.quantile is None:
            failed = requests - int(recent.where(OK).sum())
            if failed >= rule.limit * requests:
                return ReasonCode(code="stopped_by_errors", values={**values, "failed": failed})
            continue
        latencies = recent.measure(rule.metric)[recent.where(OK)]
        over = requests - int(((latencies == UNDEFINED) | (latencies <= rule.limit)).sum())
        if over > requests - 1 - index(requests, rule.quantile):
            return ReasonCode(code="stopped_by_latency", values={**values, "over": over})
    return None


def first_breach(rules: Sequence[StopRule], rows: NDArray[np.void], step_ns: int) -> tuple[int, ReasonCode] | None:
    """When a watch that looks every `step_ns` would have ended this run, and why."""
    rows = rows[rows["done_ns"] >= 0]
    rows = rows[np.argsort(rows["done_ns"], kind="stable")]
    for now_ns in range(step_ns, int(rows["done_ns"].max(initial=0)) + 1, step_ns):
        first, end = np.searchsorted(rows["done_ns"], (now_ns - WINDOW_NS, now_ns), "right")
        if reason := breach(rules, rows[first:end], now_ns):
            return now_ns, reason
    return None
