"""Ends a load in virtual time when a rule of `--stop-when` is broken. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.core.execution.stop_watch import LOOK_NS
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.stop_rules import WINDOW_NS, breach, broken, has_ended, is_over
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.results.record import joined
from loadgen.core.slo import StopRule
from loadgen.sim.engine.replica import NEVER


class VirtualStopWatch:
    """Looks at a load that goes on, and ends it when a rule of `--stop-when` is broken: `broken`. Not later than
    `horizon_ns`: then there is nothing left to stop.
    """

    def __init__(self, rules: Sequence[StopRule], horizon_ns: int | None) -> None:
        self._rules, self._horizon_ns = rules, NEVER if horizon_ns is None else horizon_ns
        self._recent: deque[NDArray[np.void]] = deque(maxlen=WINDOW_NS // LOOK_NS)
        self.broken: ReasonCode | None = None

    def ends(self, now_ns: int, news: NDArray[np.void]) -> bool:
        """Whether a rule is broken. `news`: what has ended since the last look."""
        self._recent.append(news)
        if now_ns < self._horizon_ns:
            self.broken = breach(self._rules, joined(self._recent), now_ns)
        return self.broken is not None


def first_breach(
    rules: Sequence[StopRule], rows: NDArray[np.void], step_ns: int
) -> tuple[int, ReasonCode] | None:
    """When a watch that looks every `step_ns` would have ended this run, and why: the first `breach` of its looks.

    Each row is looked at once, and none where there is no rule.
    """
    if not rules:
        return None
    ended = Columns(rows, has_ended(rows))
    order = np.argsort(ended["done_ns"], kind="stable")
    done = ended["done_ns"][order]
    over = [
        np.concatenate([[0], np.cumsum(is_over(rule, ended)[order])]) for rule in rules
    ]  # among the first n
    looks = np.arange(step_ns, int(done.max(initial=0)) + 1, step_ns)
    begins, ends = (
        np.searchsorted(done, instants, "right") for instants in (looks - WINDOW_NS, looks)
    )
    for now_ns, begin, end in zip(looks.tolist(), begins.tolist(), ends.tolist(), strict=True):
        if reason := broken(
            rules, end - begin, (int(count[end] - count[begin]) for count in over), now_ns
        ):
            return now_ns, reason
    return None
