"""A grid of sweeps: its cells with their levels, judged by their records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loadgen.core import format
from loadgen.result_kinds import RECORDS, ListRow, RegeneratedFile, ResultFunctions
from loadgen.runs.kind import kept
from loadgen.runs.levels import exit_code
from loadgen.search import grid, grid_text
from loadgen.search.experiment import report_files
from loadgen.search.grid import GridPlan, GridResult


def load(folder: Path) -> GridResult:
    """Raises UserError where no run is there yet."""
    return grid.result(folder)


def code(found: GridResult, strict: bool) -> int:
    return max(exit_code(one.curve, strict=strict) for one in found.cells)


def runs(folder: Path) -> list[Path]:
    return [run for _, found in grid.runs_of(folder) for run in found]


def list_row(folder: Path) -> ListRow:
    """Its cells are of different work: the list draws none of them; the page of the grid does."""
    plan, found = grid.read(folder), list(grid.runs_of(folder))
    done = sum(bool(runs) for _, runs in found)
    levels = sum(len(runs) for _, runs in found)
    word = f"{done} of {format.counted(len(found), 'cell')}, {format.counted(levels, 'level')}"
    targets = [plan.of.target, *(cell.target for cell in plan.cells)]
    named = kept(folder, [run for _, runs in found for run in runs][:1])
    simulated = any(target.startswith("sim:") for target in targets) or any(
        one.target.simulated for _, one in named
    )
    started = named[0][1].run.started if named else ""
    return ListRow(
        word=word,
        about=plan.of.workload,
        target=plan.of.target,
        simulated=simulated,
        started=started,
    )


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    for name, data in report_files(grid_text.report(load(folder)), grid.TABLE).items():
        yield RegeneratedFile(name, data, RECORDS)


FUNCTIONS = ResultFunctions(
    load=load,
    code=code,
    runs=runs,
    list_row=list_row,
    regenerate=regenerate,
    schema=GridPlan,
    headline=grid_text.headline,
    report=grid_text.report,
    document=format.document,
)
