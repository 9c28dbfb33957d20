"""A grid of sweeps: its cells with their levels, judged by their records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loadgen.core import format
from loadgen.result_kinds import RECORDS, ListRow, Remade
from loadgen.runs.kind import kept
from loadgen.runs.levels import exit_code
from loadgen.search import grid, grid_text
from loadgen.search.experiment import report_files
from loadgen.search.grid import GridResult


def value(folder: Path) -> GridResult:
    """Raises UserError where no run is there yet."""
    return grid.result(folder)


def code(found: GridResult, strict: bool) -> int:
    return max(exit_code(one.curve, strict=strict) for one in found.cells)


def runs(folder: Path) -> list[Path]:
    return [run for _, found in grid.runs_of(folder) for run in found]


def listed(folder: Path) -> ListRow:
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


def derived(folder: Path) -> Iterator[Remade]:
    for name, data in report_files(grid_text.report(value(folder)), grid.TABLE).items():
        yield Remade(name, data, RECORDS)
