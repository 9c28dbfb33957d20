"""A sweep over input and output lengths, and over targets: its cells, each a sweep of its own. Pure but for reading."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from loadgen.core import run_folder
from loadgen.core.errors import UserError
from loadgen.core.results.manifest import decoded
from loadgen.runs import levels
from loadgen.runs.levels import SweepCurve
from loadgen.search.experiment import ExperimentPlan

SCHEMA = 1
FILE = "grid.json"
TABLE = "grid.md"
MOST = 1_000  # runs of one grid


class GridCell(msgspec.Struct, frozen=True, kw_only=True):
    """One sweep of a grid. A length that is null is the workload's; a target that is "" is the only one."""

    isl: int | None = None
    osl: int | None = None
    target: str = ""

    @property
    def name(self) -> str:
        """Of its folder: isl500-osl100."""
        plain = re.sub(r"[^0-9A-Za-z.-]+", "-", self.target)
        lengths = (
            f"{axis}{length}"
            for axis, length in (("isl", self.isl), ("osl", self.osl))
            if length is not None
        )
        return "-".join([*lengths, *filter(None, (plain,))])

    @property
    def words(self) -> str:
        axes = (("ISL", self.isl), ("OSL", self.osl))
        return ", ".join(
            [
                *(f"{axis} {length:,}" for axis, length in axes if length),
                *filter(None, (self.target,)),
            ]
        )


class GridPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `grid.json`: what every cell has in common, and the cells; a later command may add some.

    of: its target and its flags are those that no axis changes. Its seed is that of every cell. levels: names of those
    that were asked for, by the name of their cell.
    """

    schema: int = SCHEMA
    of: ExperimentPlan
    cells: tuple[GridCell, ...]
    levels: dict[str, tuple[str, ...]] = {}


class CellCurve(msgspec.Struct, frozen=True, kw_only=True):
    """A cell and its levels. `front`: those on the Pareto front of all targets at its lengths."""

    cell: GridCell
    folder: str
    curve: SweepCurve
    front: tuple[str, ...] = ()


class GridResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a grid. `missing`: the folders of cells that have no run yet. `left`: how many levels of all have
    not run, and `go_on` the command that runs them.
    """

    workload: str
    cells: tuple[CellCurve, ...]
    missing: tuple[str, ...] = ()
    left: int = 0
    go_on: str = ""


def lengths(text: object, flag: str) -> tuple[int | None, ...]:
    """The lengths of `--isl 500,1000`, in ascending order; (None,) where none was given. Raises UserError."""
    if text is None:
        return (None,)
    parts = [part.strip() for part in str(text).split(",")]
    wrong = next(
        (part for part in parts if not re.fullmatch(r"[0-9]{1,9}", part) or int(part) < 1), None
    )
    if wrong is not None:
        raise UserError(
            "invalid_value",
            f'"{wrong}" is no number of tokens',
            f"{flag} {text}",
            "like 500,1000,4000",
        )
    found = sorted(map(int, parts))
    if len(set(found)) < len(found):
        raise UserError("duplicate", "each length once", f"{flag} {text}", "like 500,1000,4000")
    return tuple(found)


def cells(isl: object, osl: object, targets: Sequence[str]) -> list[GridCell]:
    """Every pair of lengths for every target. Raises UserError."""
    every = itertools.product(targets or ("",), lengths(isl, "--isl"), lengths(osl, "--osl"))
    made = [GridCell(isl=one, osl=other, target=target) for target, one, other in every]
    if len({cell.name for cell in made}) < len(made):
        raise UserError(
            "duplicate", "each target once", f"--target {','.join(targets)}", "names that differ"
        )
    return made


def is_grid(folder: Path) -> bool:
    return (folder / FILE).is_file()


def read(folder: Path) -> GridPlan:
    """Raises UserError."""
    path = folder / FILE
    return decoded(
        path.read_bytes(), GridPlan, str(path), "the plan of a grid of sweeps", schema=SCHEMA
    )


def runs_of(folder: Path) -> Iterator[tuple[GridCell, list[Path]]]:
    """Each cell with the folders of its runs, those without any too."""
    for cell in read(folder).cells:
        yield cell, run_folder.runs_in(folder / cell.name)


def result(folder: Path) -> GridResult:
    """The result as the records have it. Raises UserError for a grid without a run."""
    curves, missing = [], []
    for cell, runs in runs_of(folder):
        if runs:
            curve = levels.curve([(run.name, run_folder.open_run(run).summary) for run in runs])
            curves.append(CellCurve(cell=cell, folder=cell.name, curve=curve))
        else:
            missing.append(cell.name)
    if not curves:
        raise UserError(
            "no_result", "no run in this grid yet", str(folder), f"go on with: {going_on(folder)}"
        )
    with_front = tuple(msgspec.structs.replace(one, front=_front(one, curves)) for one in curves)
    cut = ("cut_off", "interrupted", "running")
    done = {
        (one.folder, level.name)
        for one in curves
        for level in one.curve.levels
        if level.state not in cut
    }
    left = sum(
        (cell, level) not in done for cell, asked in read(folder).levels.items() for level in asked
    )
    return GridResult(
        workload=curves[0].curve.workload,
        cells=with_front,
        missing=tuple(missing),
        left=left,
        go_on=going_on(folder) if left or missing else "",
    )


def going_on(folder: Path) -> str:
    """The command that goes on with a grid: as it was typed, with the folder; secrets are not stored."""
    words = read(folder).of.command
    if words[1:2] != ("sweep",):
        return f"the same command, with -o {shlex.quote(str(folder))}"
    has_folder = any(word.startswith(("-o", "--out")) for word in words)
    return shlex.join([*words, *([] if has_folder else ["-o", str(folder)])])


def _front(one: CellCurve, curves: Sequence[CellCurve]) -> tuple[str, ...]:
    """Names of the levels of a cell on the Pareto front of all targets at its lengths."""
    beside = [
        other
        for other in curves
        if (other.cell.isl, other.cell.osl) == (one.cell.isl, one.cell.osl)
    ]
    by_gpu = all(
        level.per_gpu is not None for other in beside for level in other.curve.levels if level.valid
    )
    points = {
        (other.folder, level.name): (
            level.per_gpu if by_gpu else level.output_per_s,
            level.per_user,
        )
        for other in beside
        for level in other.curve.levels
        if level.valid
    }
    return tuple(name for folder, name in sorted(levels.pareto(points)) if folder == one.folder)
