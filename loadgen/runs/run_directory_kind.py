"""Runs of one load side by side in a folder, at several levels or again and again; what a folder of them answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Never

from loadgen.core import format, run_folder
from loadgen.core.errors import UserError, most_severe
from loadgen.core.metrics.summary import NamedSummary, dump_summary, exit_code
from loadgen.render.section import Report
from loadgen.repeated import capacity, repeats_text
from loadgen.repeated.repeats import is_valid, summarize_repeats
from loadgen.result_kinds import ListRow, RateInterval, RegeneratedFile, ResultFunctions
from loadgen.runs import repeats_report, sweep_report
from loadgen.runs.comparison_side import ComparedRun, Side
from loadgen.runs.headline import same_slo
from loadgen.runs.kind import capacity_facts, capacity_in, compared
from loadgen.runs.sweep_curve import SweepCurve, curve


class StoredRuns(NamedTuple):
    """The runs of a directory, with summaries that are computed from their records.

    Attributes:
        levels: Whether they are load points of one workload, and not repeats of one load.
    """

    folder: Path
    runs: tuple[NamedSummary, ...]
    levels: bool


def fits(folder: Path) -> bool:
    return folder.is_dir() and not run_folder.is_run(folder) and bool(runs(folder))


def runs(folder: Path) -> list[Path]:
    return run_folder.runs_in(folder)


def existing_runs(folder: Path) -> list[Path]:
    """Return the directories of the runs in a folder. Raises UserError if there are none."""
    found = runs(folder)
    if found:
        return found
    hint = "the command that made it goes on with it, or give the folder of a run"
    raise UserError("no_result", "no run in this folder yet", str(folder), hint)


def load(folder: Path) -> StoredRuns:
    """Read the runs of a folder. Raises UserError for runs of different work."""
    named = computed_summaries(folder, existing_runs(folder))
    levels = len({summary.fingerprints.recipe for _, summary in named}) > 1
    if levels:
        of_one_work(folder, named)
    return StoredRuns(folder, named, levels)


def computed_summaries(root: Path, folders: Sequence[Path]) -> tuple[NamedSummary, ...]:
    """Return the summaries of runs, computed from their records.

    Each is named by its path below `root`.
    """
    return tuple(
        NamedSummary(run.relative_to(root).as_posix(), run_folder.open_run(run).summary)
        for run in folders
    )


def headline(found: StoredRuns) -> str:
    if not found.levels:
        return repeats_text.headline(summarize_repeats(found.runs))
    return sweep_report.headline(curve(found.runs))


def report(found: StoredRuns) -> Report:
    levels = curve(found.runs)
    return (
        sweep_report.report(levels)
        if found.levels
        else repeats_report.report(summarize_repeats(found.runs), levels)
    )


def document(found: StoredRuns) -> bytes:
    """Return the summaries of the runs as a JSON list."""
    return dump_summaries(found.runs)


def dump_summaries(named: Sequence[NamedSummary]) -> bytes:
    """Return the summaries of named runs as a JSON list."""
    documents = [dump_summary(summary).decode().rstrip() for _, summary in named]
    return ("[" + ",\n".join(documents) + "]\n").encode()


def code(found: StoredRuns, strict: bool) -> int:
    """Return the most severe exit code of the runs."""
    return most_severe_exit_code(found.runs, strict)


def most_severe_exit_code(named: Sequence[NamedSummary], strict: bool) -> int:
    """Return the most severe exit code of named runs, 0 if there are none."""
    codes = [exit_code(summary, strict=strict, reported=True) for _, summary in named]
    return most_severe(codes)


def compare_side(folder: Path) -> Side:
    """One side: repeats of one run. Raises UserError for others."""
    return of_repeats(folder, runs(folder))


def of_repeats(folder: Path, runs: Sequence[Path]) -> Side:
    """Return the repeats in a folder as one side of a comparison, without those that are INVALID.

    A side of which every repeat is INVALID keeps them all, and `compare` judges none of it.
    Raises UserError for runs that are not repeats of one another.
    """
    repeats = tuple(compared(run) for run in runs)
    one_recipe(folder, [NamedSummary(run.name, run.summary) for run in repeats])
    valid_repeats = tuple(run for run in repeats if is_valid(run.summary))
    if not valid_repeats or len(valid_repeats) == len(repeats):
        return Side(name="", runs=repeats)
    return Side(name="", runs=valid_repeats, notes=(_left_out_note(repeats),))


def _left_out_note(repeats: Sequence[ComparedRun]) -> str:
    """Return the note that names the INVALID repeats a comparison leaves out, with the reasons."""
    invalid_repeats = [run for run in repeats if not is_valid(run.summary)]
    names = "; ".join(
        f"{run.name} ({'; '.join(run.summary.verdict.reasons)})" for run in invalid_repeats
    )
    counted = format.counted(len(repeats), "repeat")
    verb = "is" if len(invalid_repeats) == 1 else "are"
    return f"{len(invalid_repeats)} of {counted} {verb} INVALID and left out: {names}"


def one_recipe(folder: Path, named: Sequence[NamedSummary]) -> None:
    """Raises UserError unless all runs have one recipe."""
    recipes: dict[str, str] = {}
    for name, summary in named:
        recipes.setdefault(summary.fingerprints.recipe, name)
    if len(recipes) > 1:
        hint = f"name one of them: {folder / next(iter(recipes.values()))}"
        what = f"not repeats of one run: {', '.join(recipes.values())} have different recipes"
        raise UserError("mismatch", what, str(folder), hint)


def of_one_work(folder: Path, found: Sequence[NamedSummary]) -> None:
    """Raises UserError unless the runs are levels of one load: same requests, model, API and SLO."""
    (first, base), *others = found
    for name, summary in others:
        unlike = [
            what
            for what, a, b in (
                ("workload", base.run.workload, summary.run.workload),
                ("model", base.target.model, summary.target.model),
                ("API", (base.run.api, base.run.stream), (summary.run.api, summary.run.stream)),
                ("SLO", True, same_slo(base, summary)),
            )
            if a != b
        ]
        if unlike:
            what = f"runs of different work in one folder: {first} and {name} differ in {', '.join(unlike)}"
            raise UserError(
                "mismatch",
                what,
                str(folder),
                f"name one of them: {folder / first}; or hold them side by side: compare",
            )


def list_row_of_runs(found: tuple[NamedSummary, ...], folder: Path, word: str = "") -> ListRow:
    """The row of runs that may have found a capacity: this is what it says then, and its run is the one shown."""
    held = capacity_in(folder)
    interval = _interval(held, curve(found)) if found and held is not None else None
    if held is None:
        return ListRow(word=word, runs=found)
    return ListRow(word=held.description, answer=held.evidence, runs=found, interval=interval)


def _interval(found: capacity.Capacity, levels: SweepCurve) -> RateInterval | None:
    """Return the interval of a capacity in output tokens/s, or None if it is not known."""
    level = next((one for one in levels.levels if one.name == found.evidence), None)
    if level is None or level.per_user is None or not level.output_per_s or found.low_per_s is None:
        return None
    tokens_per_request = level.output_per_s / found.rate_per_s
    return RateInterval(
        per_user=level.per_user,
        low=found.low_per_s * tokens_per_request,
        high=(found.high_per_s or found.rate_per_s) * tokens_per_request,
    )


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    """Yield nothing: all derived files are in the directories of the runs."""
    return iter(())


FUNCTIONS = ResultFunctions(
    fits=fits,
    load=load,
    headline=headline,
    report=report,
    document=document,
    code=code,
    runs=runs,
    compare_side=compare_side,
    regenerate=regenerate,
)
"""Runs side by side, without a file that says what they are."""


CAPACITY: ResultFunctions[Never] = ResultFunctions(
    schema=capacity.Capacity,
    capacity=capacity_facts,
)
"""A capacity without the search that found it."""
