"""What a run needs of one who decides its load while it goes (`schedule/steered.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from loadgen.results.manifest import AdaptivePlan
from loadgen.schedule.steered import Steering


class MakeSteering(Protocol):
    """Makes a steering of a load that begins; `plan`: what it was asked for."""

    @property
    def plan(self) -> AdaptivePlan: ...

    def __call__(self) -> Steering: ...

    def finish(self, folder: Path) -> None:
        """Store what the run in this folder found."""
