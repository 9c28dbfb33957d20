"""Results to hold against each other, read from where they lie: a run, a folder of repeats, a file of another tool. IO.

What cannot be compared is said here: a folder that is no run, runs that are no repeats of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from loadgen import run_folder
from loadgen.compare.comparison import ComparedRun, Side
from loadgen.errors import Faults, UserError
from loadgen.metrics import summary_json
from loadgen.metrics.summary import Summary, summarize
from loadgen.results import store

LEFT_BY_OTHERS = (
    "profile_export_aiperf.json",
    "benchmarks.json",
    "summary_lifecycle_metrics.json",
    "result_summary.json",
    "mlperf_log_summary.txt",
)
"""The file in a folder of another tool that holds its figures."""


class ForeignFigures(Protocol):
    """What another tool has reported, as its reader leaves it: figures by path, and how it counts."""

    @property
    def tool(self) -> str: ...
    @property
    def counts(self) -> str: ...
    @property
    def figures(self) -> Mapping[str, float]: ...
    @property
    def notes(self) -> tuple[str, ...]: ...


def read_sides(paths: list[Path], read_other: Callable[[Path], ForeignFigures]) -> list[Side]:
    """One side each, named by as much of its path as tells them apart. Raises Faults with everything that is wrong.

    `read_other` reads a file of another tool. Raises UserError."""
    faults = []
    sides = []
    for path, name in zip(paths, names(paths), strict=True):
        try:
            sides.append(_side(path, name, read_other))
        except UserError as fault:
            faults.append(fault)
    if faults:
        raise Faults(faults)
    return sides


def names(paths: list[Path]) -> list[str]:
    """The last parts of each path, as many as tell them all apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, 12):
        found = ["/".join(part[-depth:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return [str(path) for path in paths]


def _side(path: Path, name: str, read_other: Callable[[Path], ForeignFigures]) -> Side:
    other = by_another_tool(path)
    if other is not None:
        told = read_other(other)
        notes = (f"figures of {told.tool}: {told.counts}", *told.notes)
        return Side(name=name, told=dict(told.figures), notes=notes)
    if is_run(path):
        return Side(name=name, runs=(read_run(path),))
    folders = sorted(filter(is_run, path.glob("*/"))) if path.is_dir() else []
    if not folders:
        what = "no run, and no folder of runs: no run.json here" if path.is_dir() else "no such file or folder"
        hint = "give the folder that `loadgen run` named, or the result file of another tool"
        raise UserError(what, str(path), hint)
    runs = tuple(read_run(folder) for folder in folders)
    recipes: dict[str, str] = {}
    for one in runs:
        recipes.setdefault(one.summary.fingerprints.recipe, one.name)
    if len(recipes) > 1:
        hint = f"name one of them: {path / next(iter(recipes.values()))}"
        raise UserError(
            f"not repeats of one run: {', '.join(recipes.values())} have different recipes", str(path), hint
        )
    return Side(name=name, runs=runs)


def of_one_work(folder: Path, found: Sequence[tuple[str, Summary]]) -> None:
    """Raises UserError for runs that are no levels of one load: other requests, another model, another promise."""
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
                what, str(folder), f"name one of them: {folder / first}; or hold them side by side: compare"
            )


def _promise(summary: Summary) -> list[tuple[str, float, float]]:
    return [(term.metric, term.quantile, term.limit_ms) for term in summary.goodput.slo]


def by_another_tool(path: Path) -> Path | None:
    """The result file of another tool that a path names, itself or by its folder; None for anything of ours."""
    if path.is_file():
        return path
    if is_run(path):
        return None
    return next((path / name for name in LEFT_BY_OTHERS if (path / name).is_file()), None)


def is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file() or (folder / "summary.json").is_file()


def read_run(folder: Path) -> ComparedRun:
    """A run as far as it got; of one that kept its summary alone, that. Raises UserError."""
    path = folder / "summary.json"
    if not has_records(folder) and (path.is_file() or (folder / "run.json").is_file()):
        kept = summary_json.load_summary(path.read_bytes(), str(path)) if path.is_file() else run_folder.summary(folder)
        return ComparedRun(name=folder.name, summary=kept)
    stored = store.read_run(folder)
    return ComparedRun(name=folder.name, summary=summarize(*stored), header=stored.header, rows=stored.rows)


def has_records(folder: Path) -> bool:
    return store.has_rows(folder)
