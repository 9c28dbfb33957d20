"""A sweep: its levels, in the order of their loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loadgen.result_kinds import RECORDS, ListRow, RegeneratedFile, ResultFunctions
from loadgen.runs import levels
from loadgen.runs import levels_kind as runs
from loadgen.runs.kind import capacity_facts, kept
from loadgen.runs.levels import exit_code
from loadgen.runs.levels_text import report
from loadgen.search import experiment
from loadgen.search.experiment import ExperimentPlan
from loadgen.search.kind import of_trials, retold
from loadgen.search.sweep_run import TABLE


def load(folder: Path) -> runs.StoredRuns:
    """Raises UserError for runs of different work."""
    return runs.load(folder)._replace(levels=True)


def code(found: runs.StoredRuns, strict: bool) -> int:
    return exit_code(levels.curve(found.named), strict=strict)


def list_row(folder: Path) -> ListRow:
    return runs.list_row_of_runs(kept(folder, runs.runs(folder)), folder)


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    told = experiment.told(folder, invalid_too=True)
    yield retold(folder, told)
    curve, judged, answer = experiment.swept(folder, told)
    for name, data in experiment.report_files(report(curve), TABLE).items():
        yield RegeneratedFile(name, data, RECORDS)
    yield from of_trials(folder, judged, answer, curve)


FUNCTIONS = ResultFunctions(
    load=load,
    code=code,
    list_row=list_row,
    regenerate=regenerate,
    fits=experiment.is_sweep,
    schema=ExperimentPlan,
    headline=runs.headline,
    report=runs.report,
    document=runs.document,
    runs=runs.runs,
    compare_side=runs.compare_side,
    capacity=capacity_facts,
)
