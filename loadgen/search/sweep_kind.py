"""The result kind of a sweep: its load points, on one curve for each pair of lengths and target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from loadgen.core import run_folder
from loadgen.core.metrics.summary import NamedSummary, Summary
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
    """A sweep that was read from its directory: the summaries of its runs, and their curve."""

    runs: tuple[NamedSummary, ...]
    curve: SweepCurve


def load(output_dir: Path) -> StoredSweep:
    """Read a sweep with the summaries of its runs, computed from their records.

    Raises UserError if it has no run, or if the runs of one curve sent different workloads, which
    may not be compared.
    """
    runs = run_directory_kind.computed_summaries(
        output_dir, run_directory_kind.existing_run_dirs(output_dir)
    )
    curve = stored_sweep.read_curve(output_dir, runs)
    for curve_of_group in curve.split():
        names = {point.name for point in curve_of_group.load_points}
        runs_of_group = [run for run in runs if run.name in names]
        run_directory_kind.check_same_workload(output_dir, runs_of_group)

    return StoredSweep(runs, curve)


def headline(sweep: StoredSweep) -> str:
    """Return the result in one sentence."""
    return sweep_report.headline(sweep.curve)


def report(sweep: StoredSweep) -> Report:
    """Return the report of the sweep."""
    return sweep_report.sweep_report(sweep.curve)


def with_interactivity(sweep: StoredSweep, interactivity: str) -> StoredSweep:
    """Return the sweep with its Pareto front by another definition of the speed per user."""
    return sweep._replace(curve=sweep_curve.with_interactivity(sweep.curve, interactivity))


def document(sweep: StoredSweep) -> bytes:
    """Return the summaries of the runs as a JSON list."""
    return run_directory_kind.dump_summaries(sweep.runs)


def code(sweep: StoredSweep, strict: bool) -> int:
    """Return the exit code of the sweep."""
    return sweep_curve.exit_code(sweep.curve, strict=strict)


def list_row(output_dir: Path) -> ListRow:
    """Return the row of a sweep in the list of all results, as `loadgen list` prints it.

    The row of a sweep with one curve has the metrics of its runs. With several lengths or targets
    the row only states how many load points are done, because their metrics cannot be compared.
    """
    runs = stored_summaries(output_dir, run_directory_kind.run_dirs(output_dir))
    has_plan = experiment.command_of(output_dir) == "sweep"
    if not has_plan:
        return run_directory_kind.list_row_of_runs(runs, output_dir)

    plan = experiment.read_plan(output_dir)
    has_several_curves = len({point.group for point in plan.load_points}) > 1
    if not has_several_curves:
        return run_directory_kind.list_row_of_runs(runs, output_dir)

    return _list_row_of_curves(plan, [run.summary for run in runs])


def _list_row_of_curves(plan: ExperimentPlan, summaries: Sequence[Summary]) -> ListRow:
    """Return the row of a sweep over several lengths or targets in the list of all results.

    `summaries` are those of the load points that are done.
    """
    targets = [plan.target, *(point.target for point in plan.load_points)]
    distinct_targets = dict.fromkeys(filter(None, targets))

    # Without a finished run, only the name of a target shows that it is simulated.
    has_simulated_target = any(target.startswith("sim:") for target in targets)
    has_simulated_run = any(summary.target.simulated for summary in summaries)
    return ListRow(
        outcome=f"{len(summaries)} of {counted_points(len(plan.load_points))}",
        description=plan.workload,
        target=", ".join(distinct_targets),
        simulated=has_simulated_target or has_simulated_run,
        started=min((summary.run.started for summary in summaries), default=""),
    )


def capacity_facts(output_dir: Path) -> CapacityFacts:
    """Return the capacity of a sweep, or why it has none."""
    found_capacity = capacity_in(output_dir)
    if found_capacity is not None or experiment.command_of(output_dir) != "sweep":
        return CapacityFacts(found_capacity)
    return stored_sweep.explain_missing_capacity(output_dir)


def regenerate(output_dir: Path) -> Iterator[RegeneratedFile]:
    """Yield the derived files of a sweep, generated again from its runs, for `loadgen verify`."""
    trials = experiment.read_results(output_dir, include_invalid=True)
    yield regenerate_trials(output_dir, trials)
    findings = stored_sweep.analyze_runs(output_dir, run_folder.runs_in(output_dir))

    reports = capacity_files.render_sweep_reports(
        sweep_report.sweep_report(findings.curve), TABLE_FILE
    )
    for name, content in reports.items():
        yield RegeneratedFile(name, content, RECORDS)

    yield from regenerate_outputs(stored_sweep.as_outcome(output_dir, findings))


FUNCTIONS = ResultFunctions(
    load=load,
    code=code,
    list_row=list_row,
    regenerate=regenerate,
    fits=experiment.is_sweep,
    schema=ExperimentPlan,
    headline=headline,
    report=report,
    with_interactivity=with_interactivity,
    document=document,
    runs=run_directory_kind.run_dirs,
    compare_side=run_directory_kind.compare_side,
    capacity=capacity_facts,
)
