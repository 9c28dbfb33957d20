"""The difference of one metric between two sides of a comparison. Pure."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from loadgen.core import format
from loadgen.repeated.comparable_metrics import SHARE_PATHS

DIFFER: Literal["these two runs differ"] = "these two runs differ"
"""The outcome of a difference between single runs, which says nothing about the next runs."""

SLOS_DIFFER = "the SLOs differ"
DEADLINES_DIFFER = "the token deadlines differ"
"""Reasons for which a metric that depends on the SLO is not compared."""

DetailedOutcome = Literal[
    "better", "worse", "different", "these two runs differ", "equivalent", "inconclusive"
]
Outcome = Literal["different", "equivalent", "inconclusive"]
"""A detailed outcome without the direction: every kind of difference is "different"."""


MIN_LENGTH_FACTOR = 1.1
"""The smallest factor that is named, because "1.0 times as long" would not sound like more."""


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
        low: The lower end of its confidence interval, at the level at which the outcome was
            decided. None if there is no interval.
        high: The upper end.
        detectable: The smallest change that would be found with probability POWER.
        detailed_outcome: The outcome. Only a difference between repeats is better or worse.
        reason: Why the outcome is inconclusive.
        equivalent_within: If the sides are equivalent, the largest change that the interval allows.
        is_repeated: True if both sides are repeats, so that the outcome holds beyond these runs.
        needed_load_factor: If more load would decide the outcome, how many times as much.
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
    detailed_outcome: DetailedOutcome = msgspec.field(default="inconclusive", name="word")
    reason: str = msgspec.field(default="", name="why")
    equivalent_within: float | None = msgspec.field(default=None, name="within")
    is_repeated: bool = msgspec.field(default=False, name="repeated")
    needed_load_factor: float | None = msgspec.field(default=None, name="needed")

    @property
    def is_fraction(self) -> bool:
        """True if the metric is a fraction, so that `change` is a difference, not a ratio - 1."""
        return self.metric.endswith(SHARE_PATHS)

    @property
    def is_compared(self) -> bool:
        """False if the sides have different SLOs, so that the values mean different things."""
        return self.reason not in (SLOS_DIFFER, DEADLINES_DIFFER)

    @property
    def outcome(self) -> Outcome:
        """Whether the sides are different, equivalent, or cannot be told apart or called equal."""
        if self.detailed_outcome in ("equivalent", "inconclusive"):
            return self.detailed_outcome
        return "different"


def describe_needed_load(difference: Difference, load_factor: float | None, run_count: int) -> str:
    """Return how many runs, or how much longer runs, would decide an inconclusive difference.

    Repeats become more certain with their number, and single runs with their length.

    Args:
        difference: The difference.
        load_factor: How many times as much load is needed. None if it is not known, which returns
            "".
        run_count: The number of runs on a side.
    """
    if load_factor is None:
        return ""
    if difference.is_repeated:
        needed_runs = max(math.ceil(run_count * load_factor), run_count + 1)
        return f"about {needed_runs:,} runs per side needed"
    length_factor = format.quantity(max(load_factor, MIN_LENGTH_FACTOR), 2)
    return f"runs that are {length_factor} times as long are needed"
