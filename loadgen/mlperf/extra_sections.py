"""The sections that an MLPerf-style result adds to the report of its run or search.

Every report of a run asks this module, so modules that only such a result needs are imported when
there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from loadgen.render.additions import ExtraSections

if TYPE_CHECKING:
    from loadgen.core.run_folder import OpenedRun


def create_extra_sections(run_dir: Path, run: OpenedRun) -> ExtraSections | None:
    """Return what the MLPerf-style result in a directory adds to the report of its run.

    Returns None if the directory has no such result. A search for the peak that has no result yet
    adds only the notice that it is unofficial.
    """
    if (run_dir / "mlperf.json").is_file():
        from loadgen.mlperf import text
        from loadgen.mlperf.run import read_result

        return text.create_extra_sections(read_result(run_dir), run.summary.target.gpus)
    if (run_dir / "plan.json").is_file():
        from loadgen.mlperf import text
        from loadgen.search import experiment

        if experiment.read_plan(run_dir).is_by_mlperf_rules:
            return ExtraSections(notices=(text.disclosure_notice(),))
    return None
