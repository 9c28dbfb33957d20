"""Reads a sweep from its directory: the requested load points, and what their runs show."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadgen.core import format, run_folder
from loadgen.core.metrics.summary import NamedSummary
from loadgen.core.results import store
from loadgen.repeated import capacity
from loadgen.result_kinds import CapacityFacts
from loadgen.runs import sweep_analysis, sweep_curve
from loadgen.search import capacity_files, experiment
from loadgen.search.capacity_files import ExperimentOutcome
from loadgen.search.experiment import ExperimentPlan
from loadgen.search.goal import INVALID
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import SearchResult, TrialResult
from loadgen.search.search_settings import SearchSettings

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.workload import Workload
    from loadgen.runs.sweep_curve import SweepCurve

NOT_FINISHED = ("cut_off", "interrupted", "running")
"""The states of a run that has to run again."""


class SweepFindings(NamedTuple):
    """What the runs of a sweep show, of which there is at least one.

    Attributes:
        curve: The curve, or the curves of all lengths and targets.
        trials: The stored results of the load points, each with the outcome by the SLO that the
            curve gives it.
        result: The capacity that they give. Empty for a sweep over several lengths or targets.
    """

    curve: SweepCurve
    trials: list[TrialResult]
    result: SearchResult


def begin_sweep(output_dir: Path, plan: ExperimentPlan) -> ExperimentPlan:
    """Create the directory of a sweep, or add load points to an existing one.

    Return the stored plan, which has the load points of all commands so far, and the seed of the
    first one. Raises UserError if the directory holds anything but this sweep.
    """
    experiment.begin_experiment(output_dir, plan)
    stored = experiment.read_plan(output_dir)
    points_by_name = {point.name: point for point in (*stored.load_points, *plan.load_points)}

    merged = msgspec.structs.replace(
        stored,
        load_points=tuple(points_by_name.values()),
        seed=plan.seed if stored.seed is None else stored.seed,
        command=plan.command,
    )
    if merged != stored:
        store.replace(output_dir / experiment.PLAN_FILE, format.document(merged))

    return merged


def resume_command(output_dir: Path, plan: ExperimentPlan) -> str:
    """Return the command that resumes a sweep: as it was typed, with its directory.

    Secrets are not stored, so the user has to add those again. If the sweep was not started by
    `loadgen sweep`, the command is only described.
    """
    was_started_by_sweep = plan.command[1:2] == ("sweep",)
    if not was_started_by_sweep:
        return f"the same command, with -o {shlex.quote(str(output_dir))}"
    command = list(plan.command)
    if not any(word.startswith(("-o", "--out")) for word in command):
        command += ["-o", str(output_dir)]
    return shlex.join(command)


def analyze_runs(
    output_dir: Path,
    run_dirs: Sequence[Path],
    read_summary: Callable[[Path], Summary] = run_folder.summary,
) -> SweepFindings:
    """Return what the runs of a sweep show: the curve, the outcomes and the capacity.

    Args:
        output_dir: The directory of the sweep.
        run_dirs: The directories of its runs, at least one.
        read_summary: Returns the summary of a run. By default it is computed from the records.
    """
    runs = [NamedSummary(run_dir.name, read_summary(run_dir)) for run_dir in run_dirs]
    curve = read_curve(output_dir, runs)

    trials = experiment.read_results(output_dir, include_invalid=True)
    if curve.slo:
        trials = _with_outcomes(trials, curve)

    has_several_curves = bool(curve.groups)
    if has_several_curves:
        return SweepFindings(curve, trials, _empty_result())

    result = _estimate_capacity(curve, trials, [run.summary for run in runs])
    return SweepFindings(curve, trials, result)


def _with_outcomes(trials: Sequence[TrialResult], curve: SweepCurve) -> list[TrialResult]:
    """Return the trials with the outcomes that the curve gives their load points."""
    outcomes = {point.name: sweep_analysis.slo_outcome(point) for point in curve.load_points}
    return [
        msgspec.structs.replace(trial, outcome=outcomes.get(trial.run_name, INVALID))
        for trial in trials
    ]


def read_curve(output_dir: Path, runs: Sequence[NamedSummary]) -> SweepCurve:
    """Return the curve of the runs of a sweep, with the names of the load points that are left.

    Those come from the plan. If the plan is damaged, only the runs show the load points.
    """
    has_plan = experiment.command_of(output_dir) == "sweep"
    if not has_plan:
        return sweep_curve.build_curve(runs)

    plan = experiment.read_plan(output_dir)
    points_by_name = {point.name: point for point in plan.load_points}
    curve = sweep_curve.build_curve(runs, points_by_name)
    finished = {point.name for point in curve.load_points if point.state not in NOT_FINISHED}
    not_run = tuple(name for name in points_by_name if name not in finished)

    return msgspec.structs.replace(
        curve,
        not_run=not_run,
        resume=resume_command(output_dir, plan) if not_run else "",
    )


def _empty_result() -> SearchResult:
    """Return the result of a search that has not tried any load, which names no capacity."""
    return LoadSearch(SearchSettings(low=1.0, high=1.0)).result


def _estimate_capacity(
    curve: SweepCurve, trials: Sequence[TrialResult], summaries: Sequence[Summary]
) -> SearchResult:
    """Return the capacity that the load points of one curve give, with its interval.

    The load points are taken as the trials of a search that tried just these loads, so that the
    interval has the same meaning as that of `loadgen search`.

    Args:
        curve: The curve.
        trials: The results of the load points, with their outcomes by the SLO.
        summaries: The summaries of their runs.
    """
    valid_trials = [trial for trial in trials if trial.is_valid]
    result = LoadSearch(_equivalent_search_settings(trials, summaries), valid_trials).result
    return msgspec.structs.replace(result, unsustained_load=_growing_load(curve, trials))


def _equivalent_search_settings(
    trials: Sequence[TrialResult], summaries: Sequence[Summary]
) -> SearchSettings:
    """Return the settings of a search that would have tried the loads of these trials."""
    # Without any trial nothing is estimated, so that any load serves here.
    loads = [trial.load for trial in trials] or [1.0]
    settings = SearchSettings(low=min(loads), high=max(loads), start=min(loads))
    is_simulated = any(summary.target.simulated for summary in summaries)
    if is_simulated:
        return settings

    # A real server varies from run to run, by an amount that is not known, and changes over time.
    return msgspec.structs.replace(
        settings, run_spread=None, real_trial_s=_shortest_steady_state_s(summaries)
    )


def _shortest_steady_state_s(summaries: Sequence[Summary]) -> float | None:
    """Return how long the shortest steady state of the runs lasted, or None if no run has one."""
    durations_s = [summary.window.steady.duration_s for summary in summaries]
    known_durations_s = [duration_s for duration_s in durations_s if duration_s]
    return min(known_durations_s, default=None)


def _growing_load(curve: SweepCurve, trials: Sequence[TrialResult]) -> float | None:
    """Return the lowest load above the best one that was not sustained, or None."""
    growing_point = sweep_curve.lowest_growing_above_best(curve)
    if growing_point is None:
        return None
    return next((trial.load for trial in trials if trial.run_name == growing_point.name), None)


def as_outcome(output_dir: Path, findings: SweepFindings) -> ExperimentOutcome:
    """Return the findings in the form from which the files of an experiment are derived."""
    return ExperimentOutcome(output_dir, findings.trials, findings.result, findings.curve)


def write_outputs(output_dir: Path, findings: SweepFindings, workload: Workload) -> None:
    """Write the curve as CSV, and the capacity if the sweep gives one."""
    capacity_files.write_outputs(as_outcome(output_dir, findings), workload)


def save_progress(output_dir: Path, workload: Workload) -> None:
    """Write what the sweep shows so far, for the case that it is killed.

    The summaries of the runs are read and not computed again, which would take longer with every
    load point.
    """
    run_dirs = _runs_with_summary(output_dir)
    if run_dirs:
        findings = analyze_runs(output_dir, run_dirs, run_folder.read_summary)
        write_outputs(output_dir, findings, workload)


def _runs_with_summary(output_dir: Path) -> list[Path]:
    """Return the directories of the runs that came to their end, and so have a summary."""
    return [
        run_dir
        for run_dir in run_folder.runs_in(output_dir)
        if (run_dir / run_folder.SUMMARY).is_file()
    ]


def explain_missing_capacity(output_dir: Path) -> CapacityFacts:
    """Return what a command that needs a capacity reports of a sweep without a capacity file.

    - If no load point has ended: that the sweep was stopped, as a lower bound of 0.
    - If there is only one run: nothing. The directory then stands for this run.
    - If the sweep has several lengths or targets, or no SLO: the reason, and what to do instead.
    """
    plan = experiment.read_plan(output_dir)
    run_dirs = _runs_with_summary(output_dir)
    if not run_dirs:
        return CapacityFacts(_capacity_of_stopped_sweep(output_dir, plan))
    if len(run_dirs) == 1:
        return CapacityFacts()

    alternative = f"or name one of its runs, like {run_dirs[0]}"
    has_several_curves = len({point.group for point in plan.load_points}) > 1
    if has_several_curves:
        return CapacityFacts(
            missing_reason="a sweep over several lengths or targets has no single capacity",
            hint=f"sweep one of them, {alternative}",
        )

    return CapacityFacts(
        missing_reason="a sweep without an SLO has no capacity",
        hint=f"sweep again with --slo, {alternative}",
    )


def _capacity_of_stopped_sweep(output_dir: Path, plan: ExperimentPlan) -> capacity.Capacity:
    """Return the capacity of a sweep that was stopped before a load point ended: at least 0."""
    return capacity.Capacity(
        rate_per_s=0.0,
        method="sweep",
        lower_bound=True,
        lower_bound_reason=capacity_files.SWEEP_STOPPED,
        state="stopped",
        resume_command=resume_command(output_dir, plan),
    )
