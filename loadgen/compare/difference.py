"""The difference of one metric between two sides of a comparison. Pure."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from loadgen.core import format
from loadgen.repeated.comparable_metrics import SHARE_PATHS

DIFFER: Literal["these two runs differ"] = "these two runs differ"
Word = Literal[
    "better", "worse", "different", "these two runs differ", "equivalent", "inconclusive"
]
Outcome = Literal["different", "equivalent", "inconclusive"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one side, compared with the first side.

    Attributes:
        metric: The path of the metric in `summary.json`.
        name: The name of the metric.
        unit: Its unit.
        side: The name of the side.
        before: The metric of the first side.
        after: The metric of the side.
        change: The relative change (0.1 is +10 %); for a fraction, the difference as a part of one.
        low: The lower end of its interval, at the level at which `word` was decided. None if there
            is no interval.
        high: The upper end.
        detectable: The smallest change that would be found with probability POWER.
        word: The outcome; a difference is called better or worse only between repeats.
        reason: Why the outcome is inconclusive.
        within: If the sides are equivalent, the largest change that the interval allows.
        repeated: True if both sides are repeats, so that the outcome holds beyond these runs.
        needed: If more load would decide the outcome, how many times as much.
    """

    metric: str
    name: str
    unit: str
    side: str
    before: float | None
    after: float | None
    change: float | None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    word: Word = "inconclusive"
    reason: str = msgspec.field(default="", name="why")
    within: float | None = None
    repeated: bool = False
    needed: float | None = None

    @property
    def absolute(self) -> bool:
        """True if `change` is a difference of fractions, and not a ratio minus one."""
        return self.metric.endswith(SHARE_PATHS)

    @property
    def outcome(self) -> Outcome:
        """Whether the sides are different, equivalent, or cannot be told apart or called equal."""
        if self.word in ("equivalent", "inconclusive"):
            return self.word
        return "different"


def describe_needed_load(difference: Difference, needed: float | None, run_count: int) -> str:
    """Return how many runs, or how much longer runs, would decide a difference.

    Repeats become more certain with their number, and single runs with their length.

    Args:
        difference: The difference.
        needed: How many times as much load is needed. None if it is not known, which returns "".
        run_count: The number of runs on a side.
    """
    if needed is None:
        return ""
    if difference.repeated:
        needed_runs = max(math.ceil(run_count * needed), run_count + 1)
        return f"about {needed_runs:,} runs per side needed"
    return f"runs {format.quantity(max(needed, 1.1), 2)} times as long needed"
