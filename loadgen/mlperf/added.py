"""What a test of MLPerf adds to the report of its run. Every report of a run asks here, so what only a test needs is
imported where there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.render.additions import ExtraSections

if TYPE_CHECKING:
    from loadgen.core.run_folder import OpenedRun


def additions(folder: Path, run: OpenedRun) -> ExtraSections | None:
    if (folder / "mlperf.json").is_file():
        from loadgen.mlperf import run as mlperf
        from loadgen.mlperf import text

        return text.addition(mlperf.read(folder), run.summary.target.gpus)
    if (folder / "plan.json").is_file():
        from loadgen.mlperf import text
        from loadgen.search import experiment

        if experiment.read_plan(folder).is_by_mlperf_rules:
            return ExtraSections(notices=(text.warned(),))  # a search for a peak that has none yet
    return None
