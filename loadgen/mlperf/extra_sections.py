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

    Returns None if the directory has no such result. While a search for the peak has no result yet,
    its report only gets the notice that such results are unofficial.
    """
    has_result = (run_dir / "mlperf.json").is_file()
    if has_result:
        return _sections_of_result(run_dir, run)
    has_search_plan = (run_dir / "plan.json").is_file()
    if has_search_plan:
        return _notice_of_search(run_dir)
    return None


def _sections_of_result(run_dir: Path, run: OpenedRun) -> ExtraSections:
    """Return the notice, verdict and sections of a result."""
    from loadgen.mlperf import text
    from loadgen.mlperf.run import read_result

    return text.create_extra_sections(read_result(run_dir), run.summary.target.gpus)


def _notice_of_search(run_dir: Path) -> ExtraSections | None:
    """Return the notice that MLPerf-style results are unofficial, or None for another search."""
    from loadgen.mlperf import text
    from loadgen.search import experiment

    if not experiment.read_plan(run_dir).is_by_mlperf_rules:
        return None
    return ExtraSections(notices=(text.disclosure_notice(),))
