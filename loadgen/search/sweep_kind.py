"""The result kind of a sweep: its load points, on one curve for each pair of lengths and target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from loadgen.core import run_folder
from loadgen.core.metrics.summary import NamedSummary
from loadgen.render.section import Report
from loadgen.result_kinds import (
    RECORDS,
    CapacityFacts,
    ListRow,
    RegeneratedFile,
    ResultFunctions,
)
from loadgen.runs import levels, levels_text
from loadgen.runs import levels_kind as runs
from loadgen.runs.kind import capacity_in, stored_summaries
from loadgen.runs.levels import SweepCurve
from loadgen.runs.load_points import counted_points
from loadgen.search import capacity_files, experiment, stored_sweep
from loadgen.search.experiment import ExperimentPlan
from loadgen.search.search_kind import regenerate_outputs, regenerate_trials
from loadgen.search.sweep_run import TABLE_FILE


class StoredSweep(NamedTuple):
    """A sweep as `report` reads it: judged by its records."""

    runs: tuple[NamedSummary, ...]
    curve: SweepCurve


def load(folder: Path) -> StoredSweep:
    """Read a sweep. Raises UserError without a run, and for runs of different work on a curve."""
    named = runs.computed_summaries(folder, runs.existing_runs(folder))
    curve = stored_sweep.curve_of(folder, named)
    for one in curve.split():
        names = {level.name for level in one.levels}
        runs.of_one_work(folder, [run for run in named if run.name in names])
    return StoredSweep(named, curve)


def headline(sweep: StoredSweep) -> str:
    """Return the result in one sentence."""
    return levels_text.headline(sweep.curve)


def report(sweep: StoredSweep) -> Report:
    """Return the report of the sweep."""
    return levels_text.report(sweep.curve)


def document(sweep: StoredSweep) -> bytes:
    """Return the summaries of the runs as a JSON list."""
    return runs.dump_summaries(sweep.runs)


def code(sweep: StoredSweep, strict: bool) -> int:
    """Return the exit code of the sweep."""
    return levels.exit_code(sweep.curve, strict=strict)


def list_row(folder: Path) -> ListRow:
    """Return the row of a sweep in the list of results.

    The list draws one kind of work on a chart, so of a sweep over several lengths or targets it
    says only how far it got; its own page draws it.
    """
    named = stored_summaries(folder, runs.runs(folder))
    plan = experiment.read_plan(folder) if experiment.command_of(folder) == "sweep" else None
    groups = {point.group for point in plan.load_points} if plan is not None else set()
    if plan is None or len(groups) < 2:
        return runs.list_row_of_runs(named, folder)
    summaries = [summary for _, summary in named]
    targets = [plan.target, *(point.target for point in plan.load_points)]
    is_simulated = any(target.startswith("sim:") for target in targets)
    return ListRow(
        word=f"{len(named)} of {counted_points(len(plan.load_points))}",
        about=plan.workload,
        target=", ".join(dict.fromkeys(filter(None, targets))),
        simulated=is_simulated or any(summary.target.simulated for summary in summaries),
        started=min((summary.run.started for summary in summaries), default=""),
    )


def capacity_facts(folder: Path) -> CapacityFacts:
    """Return the capacity of a sweep, or why it has none."""
    found = capacity_in(folder)
    if found is not None or experiment.command_of(folder) != "sweep":
        return CapacityFacts(found)
    return stored_sweep.facts_without_capacity(folder)


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    """Yield the derived files of a sweep, generated again from its runs."""
    trials = experiment.read_results(folder, include_invalid=True)
    yield regenerate_trials(folder, trials)
    found = stored_sweep.judge(folder, run_folder.runs_in(folder))
    reports = capacity_files.render_sweep_reports(levels_text.report(found.curve), TABLE_FILE)
    for name, content in reports.items():
        yield RegeneratedFile(name, content, RECORDS)
    yield from regenerate_outputs(stored_sweep.outcome_of(folder, found))


FUNCTIONS = ResultFunctions(
    load=load,
    code=code,
    list_row=list_row,
    regenerate=regenerate,
    fits=experiment.is_sweep,
    schema=ExperimentPlan,
    headline=headline,
    report=report,
    document=document,
    runs=runs.runs,
    compare_side=runs.compare_side,
    capacity=capacity_facts,
)
