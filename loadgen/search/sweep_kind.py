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
from loadgen.runs import run_directory_kind, sweep_curve, sweep_report
from loadgen.runs.kind import capacity_in, stored_summaries
from loadgen.runs.load_points import counted_points
from loadgen.runs.sweep_curve import SweepCurve
from loadgen.search import capacity_files, experiment, stored_sweep
from loadgen.search.experiment import ExperimentPlan
from loadgen.search.search_kind import regenerate_outputs, regenerate_trials
from loadgen.search.sweep_run import TABLE_FILE


class StoredSweep(NamedTuple):
    """A sweep as `report` reads it: judged by its records."""

    runs: tuple[NamedSummary, ...]
    curve: SweepCurve


def load(output_dir: Path) -> StoredSweep:
    """Read a sweep. Raises UserError without a run, and for runs of different work on a curve."""
    named = run_directory_kind.computed_summaries(
        output_dir, run_directory_kind.existing_run_dirs(output_dir)
    )
    curve = stored_sweep.read_curve(output_dir, named)
    for group_curve in curve.split():
        names = {point.name for point in group_curve.load_points}
        run_directory_kind.check_same_workload(
            output_dir, [run for run in named if run.name in names]
        )
    return StoredSweep(named, curve)


def headline(sweep: StoredSweep) -> str:
    """Return the result in one sentence."""
    return sweep_report.headline(sweep.curve)


def report(sweep: StoredSweep) -> Report:
    """Return the report of the sweep."""
    return sweep_report.sweep_report(sweep.curve)


def document(sweep: StoredSweep) -> bytes:
    """Return the summaries of the runs as a JSON list."""
    return run_directory_kind.dump_summaries(sweep.runs)


def code(sweep: StoredSweep, strict: bool) -> int:
    """Return the exit code of the sweep."""
    return sweep_curve.exit_code(sweep.curve, strict=strict)


def list_row(output_dir: Path) -> ListRow:
    """Return the row of a sweep in the list of results.

    The list draws one kind of work on a chart, so of a sweep over several lengths or targets it
    says only how far it got; its own page draws it.
    """
    named = stored_summaries(output_dir, run_directory_kind.run_dirs(output_dir))
    if experiment.command_of(output_dir) != "sweep":
        return run_directory_kind.list_row_of_runs(named, output_dir)
    plan = experiment.read_plan(output_dir)
    if len({point.group for point in plan.load_points}) < 2:
        return run_directory_kind.list_row_of_runs(named, output_dir)
    summaries = [summary for _, summary in named]
    targets = [plan.target, *(point.target for point in plan.load_points)]
    is_simulated = any(target.startswith("sim:") for target in targets)
    return ListRow(
        outcome=f"{len(named)} of {counted_points(len(plan.load_points))}",
        description=plan.workload,
        target=", ".join(dict.fromkeys(filter(None, targets))),
        simulated=is_simulated or any(summary.target.simulated for summary in summaries),
        started=min((summary.run.started for summary in summaries), default=""),
    )


def capacity_facts(output_dir: Path) -> CapacityFacts:
    """Return the capacity of a sweep, or why it has none."""
    found_capacity = capacity_in(output_dir)
    if found_capacity is not None or experiment.command_of(output_dir) != "sweep":
        return CapacityFacts(found_capacity)
    return stored_sweep.facts_without_capacity(output_dir)


def regenerate(output_dir: Path) -> Iterator[RegeneratedFile]:
    """Yield the derived files of a sweep, generated again from its runs."""
    trials = experiment.read_results(output_dir, include_invalid=True)
    yield regenerate_trials(output_dir, trials)
    judged = stored_sweep.judge(output_dir, run_folder.runs_in(output_dir))
    reports = capacity_files.render_sweep_reports(
        sweep_report.sweep_report(judged.curve), TABLE_FILE
    )
    for name, content in reports.items():
        yield RegeneratedFile(name, content, RECORDS)
    yield from regenerate_outputs(stored_sweep.outcome_of(output_dir, judged))


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
    runs=run_directory_kind.run_dirs,
    compare_side=run_directory_kind.compare_side,
    capacity=capacity_facts,
)
