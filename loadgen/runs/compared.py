"""What a run, or repeats of one, is for a comparison: values, and pure. `loadgen.compare` judges them."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.core.metrics.columns import Columns, is_measured
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import Header, TargetFacts


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its summary, and its rows if they were kept (`record.ROW`, all stages)."""

    name: str
    summary: Summary
    header: Header | None = None
    rows: NDArray[np.void] | None = None

    @property
    def targets(self) -> tuple[TargetFacts, ...]:
        return tuple(part.target for part in self.summary.targets) or (self.summary.target,)

    def measured(self) -> Columns | None:
        """The rows of measured stages as columns; None without rows."""
        if self.rows is None or self.header is None:
            return None
        return Columns(self.rows, is_measured(self.header, self.rows))


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a comparison: a run, repeats of it, or the figures that another tool reported (`told`, by path)."""

    name: str
    runs: tuple[ComparedRun, ...] = ()
    told: dict[str, float] = {}
    notes: tuple[str, ...] = ()
