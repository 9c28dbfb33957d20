"""Reads the results to compare: a run, a folder of repeats, or a file of another tool. IO.

It reports what cannot be compared: a folder that is no run, and runs that are not repeats of one another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from loadgen.compare.comparison import ComparedRun, Side
from loadgen.core import format, run_folder
from loadgen.core.errors import Faults, UserError
from loadgen.core.metrics.summary import Summary
from loadgen.core.run_folder import is_run, runs_in

LEFT_BY_OTHERS = (
    "profile_export_aiperf.json",
    "benchmarks.json",
    "summary_lifecycle_metrics.json",
    "result_summary.json",
    "mlperf_log_summary.txt",
)
"""Names of result files of other tools; a folder with one of them is a result of that tool."""


class ForeignFigures(Protocol):
    """The figures that another tool reported: by path, with a description of how the tool counts."""

    @property
    def tool(self) -> str: ...
    @property
    def counts(self) -> str: ...
    @property
    def figures(self) -> Mapping[str, float]: ...
    @property
    def notes(self) -> tuple[str, ...]: ...


def read_sides(paths: list[Path], read_other: Callable[[Path], ForeignFigures]) -> list[Side]:
    """One side per path, named by the shortest end of the path that is unique.

    `read_other` reads the result file of another tool and may raise UserError. Raises Faults with every fault found.
    """
    faults = []
    sides = []
    for path, name in zip(paths, format.short_names(paths), strict=True):
        try:
            sides.append(_side(path, name, read_other))
        except UserError as fault:
            faults.append(fault)
    if faults:
        raise Faults(faults)
    return sides


def _side(path: Path, name: str, read_other: Callable[[Path], ForeignFigures]) -> Side:
    other_file = by_another_tool(path)
    if other_file is not None:
        reported = read_other(other_file)
        notes = (f"figures of {reported.tool}: {reported.counts}", *reported.notes)
        return Side(name=name, told=dict(reported.figures), notes=notes)
    if is_run(path):
        return Side(name=name, runs=(read_run(path),))
    folders = runs_in(path)
    if not folders:
        what = "no run, and no folder of runs: no run.json here" if path.is_dir() else "no such file or folder"
        hint = "give the folder that `loadgen run` named, or the result file of another tool"
        raise UserError("no_result" if path.is_dir() else "missing_file", what, str(path), hint)
    runs = tuple(read_run(folder) for folder in folders)
    recipes: dict[str, str] = {}
    for run in runs:
        recipes.setdefault(run.summary.fingerprints.recipe, run.name)
    if len(recipes) > 1:
        hint = f"name one of them: {path / next(iter(recipes.values()))}"
        raise UserError(
            "mismatch", f"not repeats of one run: {', '.join(recipes.values())} have different recipes", str(path), hint
        )
    return Side(name=name, runs=runs)


def of_one_work(folder: Path, found: Sequence[tuple[str, Summary]]) -> None:
    """Raises UserError unless the runs are levels of one load: same requests, model, API and SLO."""
    (first, base), *others = found
    for name, summary in others:
        unlike = [
            what
            for what, a, b in (
                ("workload", base.run.workload, summary.run.workload),
                ("model", base.target.model, summary.target.model),
                ("API", (base.run.api, base.run.stream), (summary.run.api, summary.run.stream)),
                ("SLO", _promise(base), _promise(summary)),
            )
            if a != b
        ]
        if unlike:
            what = f"runs of different work in one folder: {first} and {name} differ in {', '.join(unlike)}"
            raise UserError(
                "mismatch", what, str(folder), f"name one of them: {folder / first}; or hold them side by side: compare"
            )


def _promise(summary: Summary) -> list[tuple[str, float, float]]:
    return [(term.metric, term.quantile, term.limit_ms) for term in summary.goodput.slo]


def by_another_tool(path: Path) -> Path | None:
    """The result file of another tool that a path names, directly or by its folder; None for a result of loadgen."""
    if path.is_file():
        return path
    if is_run(path):
        return None
    return next((path / name for name in LEFT_BY_OTHERS if (path / name).is_file()), None)


def read_run(folder: Path) -> ComparedRun:
    """A run as far as it was recorded; only its summary when it kept no records. Raises UserError."""
    summary, stored = run_folder.open_run(folder)
    if stored is None:
        return ComparedRun(name=folder.name, summary=summary)
    return ComparedRun(name=folder.name, summary=summary, header=stored.header, rows=stored.rows)
