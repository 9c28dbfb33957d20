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
from loadgen.runs import levels
from loadgen.search import capacity_files, experiment
from loadgen.search.capacity_files import ExperimentOutcome
from loadgen.search.experiment import ExperimentPlan
from loadgen.search.load_search import LoadSearch
from loadgen.search.search_results import SearchResult, TrialResult
from loadgen.search.search_settings import SearchSettings

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.workload import Workload
    from loadgen.runs.levels import SweepCurve

NOT_FINISHED = ("cut_off", "interrupted", "running")
"""The states of a run that has to run again."""


class JudgedSweep(NamedTuple):
    """A sweep with at least one run.

    Attributes:
        curve: The curve, or the curves of all lengths and targets.
        trials: The stored results, with the outcome that the curve gives each load point.
        result: The capacity that they give. Empty for a sweep over several lengths or targets.
    """

    curve: SweepCurve
    trials: list[TrialResult]
    result: SearchResult


def begin(folder: Path, plan: ExperimentPlan) -> ExperimentPlan:
    """Create the directory of a sweep, or add load points to an existing one.

    Return the stored plan. Raises UserError if the directory holds anything but this sweep.
    """
    experiment.begin(folder, plan)
    stored = experiment.read_plan(folder)
    requested = {point.name: point for point in (*stored.load_points, *plan.load_points)}
    merged = msgspec.structs.replace(
        stored,
        load_points=tuple(requested.values()),
        seed=plan.seed if stored.seed is None else stored.seed,
        command=plan.command,
    )
    if merged != stored:
        store.replace(folder / experiment.PLAN_FILE, format.document(merged))
    return merged


def resume_command(folder: Path, plan: ExperimentPlan) -> str:
    """Return the command that resumes a sweep: as it was typed, with its directory.

    Secrets are not stored, so the user has to add those again.
    """
    words = plan.command
    if words[1:2] != ("sweep",):
        return f"the same command, with -o {shlex.quote(str(folder))}"
    has_folder = any(word.startswith(("-o", "--out")) for word in words)
    return shlex.join([*words, *([] if has_folder else ["-o", str(folder)])])


def judge(
    folder: Path,
    runs: Sequence[Path],
    read_summary: Callable[[Path], Summary] = run_folder.summary,
) -> JudgedSweep:
    """Return what the runs of a sweep show. `runs` holds at least one directory.

    `read_summary` computes the summary of a run from its records, or reads the stored one.
    """
    named = [NamedSummary(run.name, read_summary(run)) for run in runs]
    curve = curve_of(folder, named)
    stored = experiment.read_results(folder, include_invalid=True)
    outcomes = {level.name: levels.outcome(level) for level in curve.levels}
    judged = [
        msgspec.structs.replace(
            trial, outcome=outcomes.get(trial.run_name, "invalid") if curve.slo else trial.outcome
        )
        for trial in stored
    ]
    if curve.groups:
        return JudgedSweep(curve, judged, _empty_result())
    return JudgedSweep(curve, judged, _sweep_result(curve, judged, [run.summary for run in named]))


def curve_of(folder: Path, named: Sequence[NamedSummary]) -> SweepCurve:
    """Return the curve of the runs of a sweep, with the load points that have not run."""
    if experiment.command_of(folder) != "sweep":  # its plan is damaged
        return levels.curve(named)
    plan = experiment.read_plan(folder)
    points = {point.name: point for point in plan.load_points}
    curve = levels.curve(named, points)
    finished = {level.name for level in curve.levels if level.state not in NOT_FINISHED}
    not_run = tuple(name for name in points if name not in finished)
    return msgspec.structs.replace(
        curve,
        not_run=not_run,
        resume=resume_command(folder, plan) if not_run else "",
    )


def _empty_result() -> SearchResult:
    return LoadSearch(SearchSettings(low=1.0, high=1.0)).result


def _sweep_result(
    curve: SweepCurve, judged: Sequence[TrialResult], summaries: Sequence[Summary]
) -> SearchResult:
    """Return the capacity that the load points of one curve give, with its interval."""
    loads = sorted(trial.load for trial in judged) or [1.0]
    settings = SearchSettings(low=loads[0], high=loads[-1], start=loads[0])
    if not any(summary.target.simulated for summary in summaries):
        # As in a search, a real server varies from run to run, and changes over time.
        durations_s = [summary.window.steady.duration_s for summary in summaries]
        known_s = [duration_s for duration_s in durations_s if duration_s]
        settings = msgspec.structs.replace(
            settings, run_spread=None, real_trial_s=min(known_s, default=None)
        )
    valid_trials = [trial for trial in judged if trial.is_valid]
    result = LoadSearch(settings, valid_trials).result
    growing = levels.grew_above(curve)
    growing_load = None
    if growing is not None:
        growing_load = next(
            (trial.load for trial in judged if trial.run_name == growing.name), None
        )
    return msgspec.structs.replace(result, unsustained_load=growing_load)


def outcome_of(folder: Path, sweep: JudgedSweep) -> ExperimentOutcome:
    """Return what the files of a sweep are derived from."""
    return ExperimentOutcome(folder, sweep.trials, sweep.result, sweep.curve)


def write(folder: Path, sweep: JudgedSweep, workload: Workload) -> None:
    """Write the curve as CSV, and the capacity if the sweep gives one."""
    capacity_files.write_outputs(outcome_of(folder, sweep), workload)


def store_capacity(folder: Path, workload: Workload) -> None:
    """Write what the sweep shows so far, for the case that it is killed.

    The summaries of the runs are read and not computed again, which would take longer with every
    load point.
    """
    runs = [run for run in run_folder.runs_in(folder) if (run / run_folder.SUMMARY).is_file()]
    if runs:
        write(folder, judge(folder, runs, run_folder.kept_summary), workload)


def facts_without_capacity(folder: Path) -> CapacityFacts:
    """Return why a sweep without a capacity file has no capacity.

    A sweep that was stopped before its first load point ended has a capacity of that state. A
    sweep with a single run says nothing, since its directory stands for this run.
    """
    plan = experiment.read_plan(folder)
    runs = [run for run in run_folder.runs_in(folder) if (run / run_folder.SUMMARY).is_file()]
    if not runs:
        stopped = capacity.Capacity(
            rate_per_s=0.0,
            method="sweep",
            lower_bound=True,
            lower_bound_reason=capacity_files.SWEEP_STOPPED,
            state="stopped",
            resume_command=resume_command(folder, plan),
        )
        return CapacityFacts(stopped)
    if len(runs) == 1:
        return CapacityFacts()
    name_one = f"or name one of its runs, like {runs[0]}"
    if len({point.group for point in plan.load_points}) > 1:
        return CapacityFacts(
            none_because="a sweep over several lengths or targets has no single capacity",
            hint=f"sweep one of them, {name_one}",
        )
    return CapacityFacts(
        none_because="a sweep without an SLO has no capacity",
        hint=f"sweep again with --slo, {name_one}",
    )
