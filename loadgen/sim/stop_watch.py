"""Ends a load in virtual time when a rule of `--stop-when` is broken. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from loadgen.core.execution.stop_watch import LOOK_NS
from loadgen.core.metrics.stop_rules import WINDOW_NS, breach
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.results.record import joined
from loadgen.core.slo import StopRule
from loadgen.sim.engine.replica import NEVER


class VirtualStopWatch:
    """Looks at a load that goes on, and ends it when a rule of `--stop-when` is broken: `broken`. Not later than
    `horizon_ns`: then there is nothing left to stop."""

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
