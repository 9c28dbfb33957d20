"""What a run needs of one who decides its load while it goes (`schedule/steered.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from loadgen.core.format import duration
from loadgen.core.results.manifest import AdaptivePlan
from loadgen.core.schedule.steered import Steering


class MakeSteering(Protocol):
    """Makes a steering of a load that begins; `plan`: what it was asked for."""

    @property
    def plan(self) -> AdaptivePlan: ...

    def __call__(self) -> Steering: ...

    def finish(self, folder: Path) -> None:
        """Store what the run in this folder found."""


def words(plan: AdaptivePlan) -> str:
    """What an adaptive load does, as text."""
    unit = "/s" if plan.over == "rate" else " in flight"
    kind = "poisson" if plan.over == "rate" else "closed loop"
    longest = "" if plan.longest_s is None else f"; no step begins after {duration(plan.longest_s)}"
    return (
        f"adaptive, {kind}: from {plan.start:g}{unit} up, twice as much while the SLO holds over windows of "
        f"{duration(plan.window_s)}, then closer and closer to its limit; what was found is sustained for "
        f"{duration(plan.sustain_s)}{longest}"
    )
