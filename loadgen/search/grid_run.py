"""Carries out a grid: a sweep for every pair of lengths and every target, one after the other, in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from loadgen.core import format, seeds
from loadgen.core.errors import INTERRUPTED, Fault, Faults, UserError, closest, collecting
from loadgen.core.results import checksums, store
from loadgen.core.workload.flags import of_the_load
from loadgen.core.workload.overrides import placed
from loadgen.search import grid, grid_kind, grid_text, sweep_run
from loadgen.search import sweep as levels
from loadgen.search.experiment import ExperimentPlan, of_requests, refuse_other, report_files
from loadgen.search.grid import GridCell, GridPlan
from loadgen.search.sweep_run import KINDS, Sweep
from loadgen.shell.invocation import Invocation
from loadgen.shell.output import print_answer, say

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Workload
    from loadgen.runs.show import PlannedRun, Show
    from loadgen.search.sweep import Kind

AXES = ("input_tokens", "output_tokens")


class CellSweep(msgspec.Struct, frozen=True):
    """One cell as it was asked for: its workload at each load, against its target. A plain sweep has one without name.

    shared: the flags that no axis of a grid changes.
    """

    cell: GridCell
    name: str
    kind: Kind
    loads: dict[float, Workload]
    settings: Settings
    shared: dict[str, str]

    @property
    def workload(self) -> Workload:
        return next(iter(self.loads.values()))

    @property
    def planned(self) -> list[PlannedRun]:
        return [(workload, self.settings) for workload in self.loads.values()]

    def asked(self, parent: Path, show: Show) -> Sweep:
        folder = parent / self.cell.name
        settings = replace(
            self.settings, out=folder, leave_out_first_round=self.kind == "concurrency"
        )
        lengths = zip(AXES, (self.cell.isl, self.cell.osl), strict=True)
        flags = self.shared | {axis: str(length) for axis, length in lengths if length is not None}
        return Sweep(self.name, self.loads, self.kind, flags, settings, folder, show)


def sweeps(invocation: Invocation, workload: str | None, target: str | None) -> list[CellSweep]:
    """The sweeps that are asked for; one, without a name, where nothing is varied but the load. Raises Faults."""
    concurrency, request_rate = invocation["concurrency"], invocation["request_rate"]
    kind: Kind = "concurrency" if concurrency is not None else "request_rate"
    faults: list[Fault] = []
    targets: dict[str, Settings] = {}
    loads: tuple[float, ...] = ()
    cells: list[GridCell] = []
    with collecting(faults):
        targets = _targets(invocation, target)
    with collecting(faults):
        if (concurrency is None) == (request_rate is None):
            hint = "either --concurrency 1,2,4,...,64 or --request-rate 1,2,4,...,64"
            raise UserError("missing_option", "one kind of levels is needed", "loadgen sweep", hint)
        loads = levels.grid(invocation[kind], f"--{kind.replace('_', '-')}", kind)
    is_grid = target is not None or any("," in str(invocation[axis] or "") for axis in AXES)
    varied = AXES if is_grid else ()
    with collecting(faults):
        isl, osl = (invocation[axis] if axis in varied else None for axis in AXES)
        cells = grid.cells(isl, osl, [*targets] if target is not None else [])
        if len(cells) * len(loads) > grid.MOST:
            what = f"{len(cells)} cells of {len(loads)} levels are too many"
            raise UserError("too_large", what, "loadgen sweep", f"at most {grid.MOST:,} runs")
    found = of_the_load(invocation.options)
    shared = {name: str(value) for name, value in found.items() if name not in (*KINDS, *varied)}
    made = []
    for cell in cells if targets or is_grid else [GridCell()]:
        own = {
            axis: str(length)
            for axis, length in zip(AXES, (cell.isl, cell.osl), strict=True)
            if length is not None
        }
        at_loads: dict[float, Workload] = {}
        with collecting(faults):
            for amount in loads:
                at_loads[amount] = sweep_run.level(invocation, workload, kind, amount, **own)
        if faults:
            break
        name = workload or str(invocation["trace"] or invocation["dataset"])
        made.append(CellSweep(cell, name, kind, at_loads, targets[cell.target], shared))
    if faults:
        raise Faults(faults)
    return made


def _targets(invocation: Invocation, asked: str | None) -> dict[str, Settings]:
    """The settings for each target by its name; "" where none is named. Raises Fault or Faults."""
    if asked is None:
        return {"": invocation.settings()}
    names = [part.strip() for part in asked.split(",")]
    if len(set(names)) < len(names) or not all(names):
        raise UserError(
            "duplicate", "each target once, by a name", f"--target {asked}", "--target a,b"
        )
    if invocation["targets"] is None:
        if invocation["url"]:
            raise UserError(
                "conflict",
                "--url and --target exclude each other",
                f"--target {asked}",
                "leave out --url",
            )
        return {name: invocation.with_options(url=[name]).settings() for name in names}
    settings = invocation.settings()
    known = {endpoint.name: endpoint for endpoint in settings.endpoints}
    if unknown := next((name for name in names if name not in known), None):
        hint = closest(unknown, [*known]) or f"known: {', '.join(known)}"
        raise UserError("unknown_name", f"no target is called {unknown}", f"--target {asked}", hint)
    return {name: replace(settings, targets=(known[name],), url=known[name].url) for name in names}


def carry_out(
    parent: Path,
    cells: Sequence[CellSweep],
    asked: Sequence[Sweep],
    *,
    as_json: bool,
    as_markdown: bool,
    strict: bool,
) -> int:
    """Run what is not in the folder yet, cell by cell; write and print the result. The exit code."""
    plan = _begin(parent, cells)
    seed = plan.of.seed
    size = f"{format.counted(len(cells), 'cell')} of {format.counted(len(cells[0].loads), 'level')}"
    say(f"grid: {size}, repeat with --seed {seed}")
    interrupted = False
    weights = [weight for one in asked for weight in one.weights(one.to_do.values())]
    asked[0].show.begin(len(weights), weights=weights)
    for number, (cell, one) in enumerate(zip(cells, asked, strict=True), 1):
        say(f"cell {number} of {len(cells)}: {cell.cell.words}")
        own = {
            amount: placed(workload.model_copy(update={"seed": seed}), cell.cell.name)
            for amount, workload in one.grid.items()
        }
        _, interrupted = sweep_run.carry_out(replace(one, grid=own, counted=True))
        if interrupted:
            break
    found = grid.result(parent) if any(runs for _, runs in grid.runs_of(parent)) else None
    if found is None:
        say(f"go on with: {grid.going_on(parent)}")
        return INTERRUPTED
    said = grid_text.report(found)
    for name, data in report_files(said, grid.TABLE).items():
        store.replace(parent / name, data, shared=True)
    checksums.write(parent)
    print_answer(found, said, as_json=as_json, as_markdown=as_markdown)
    say(sweep_run.where(parent, grid.TABLE))
    return INTERRUPTED if interrupted else grid_kind.code(found, strict)


def _begin(parent: Path, cells: Sequence[CellSweep]) -> GridPlan:
    """Write what is asked for, with the cells that an earlier command has made. Raises UserError for another grid."""
    first = cells[0]
    before = grid.read(parent) if grid.is_grid(parent) else None
    if before is None and any(entry.is_dir() for entry in parent.iterdir()):
        raise UserError(
            "mismatch", "the folder holds runs, and no grid", str(parent), "give another --out"
        )
    of = ExperimentPlan(
        by="sweep",
        kind=first.kind,
        workload=first.name,
        source_text=first.workload.source_text,
        target="" if first.cell.target else first.settings.shown,
        flags=first.shared | of_requests(first.settings),
        metadata=dict(first.settings.metadata),
        seed=first.workload.seed,
        command=first.settings.command,
    )
    old = () if before is None else before.cells
    if before is not None:
        refuse_other(before.of, of, parent)
    if of.seed is None:
        of = msgspec.structs.replace(of, seed=seeds.fresh() if before is None else before.of.seed)
    asked = {} if before is None else dict(before.levels)
    for one in cells:
        names = (levels.name(one.kind, amount) for amount in one.loads)
        asked[one.cell.name] = tuple(dict.fromkeys((*asked.get(one.cell.name, ()), *names)))
    plan = GridPlan(
        of=of, cells=(*old, *(one.cell for one in cells if one.cell not in old)), levels=asked
    )
    checksums.begin(parent)
    store.replace(parent / grid.FILE, format.document(plan))
    return plan
