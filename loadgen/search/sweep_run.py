"""Carries out a sweep in a directory, where the same command resumes it or adds load points."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from loadgen.cli.output import print_status
from loadgen.cli.settings import request_options
from loadgen.core import run_folder
from loadgen.core.errors import INTERRUPTED, TargetError
from loadgen.core.execution import run
from loadgen.core.results import checksums, store
from loadgen.core.slo import Slo
from loadgen.result_kinds import PAGE
from loadgen.runs.load_points import counted_points
from loadgen.runs.sweep_curve import SweepCurve, exit_code
from loadgen.runs.sweep_report import sweep_report
from loadgen.search import capacity_files, experiment, stored_sweep
from loadgen.search.goal import Goal
from loadgen.search.search_results import PlannedTrial, TrialResult
from loadgen.search.trial_runner import TrialInterruptedError, TrialRunner

if TYPE_CHECKING:
    from loadgen.core.execution.run import Execute
    from loadgen.runs.planned_runs import PlannedRun
    from loadgen.runs.run_display import RunDisplay
    from loadgen.search.experiment import ExperimentPlan
    from loadgen.search.sweep_plan import PlannedPoint, Sweep, SweepRun

TABLE_FILE = "sweep.md"


class SweepOutcome(NamedTuple):
    """What a sweep has found.

    Attributes:
        curve: The curve of its load points, or None if none has run.
        is_interrupted: Whether the user stopped it.
    """

    curve: SweepCurve | None
    is_interrupted: bool


def run_sweep(sweep_run: SweepRun) -> SweepOutcome:
    """Run the load points that are not in the directory yet, and write the files of the sweep.

    Raises TargetError if the target or the nodes are lost, after the files are written.
    """
    sweep = sweep_run.sweep
    output_dir = sweep_run.output_dir
    plan = stored_sweep.begin_sweep(output_dir, _experiment_plan(sweep, output_dir))
    earlier_results = experiment.read_results(output_dir)
    points = points_to_run(sweep, output_dir)
    print_status(f"Reproduce with --seed {plan.seed}")

    if earlier_results:
        print_status(_describe_resumed(sweep, output_dir, points_left=len(points)))

    sweep_run.display.begin_steps(len(points), weights=_relative_durations(points))

    point_runner = _PointRunner(output_dir, plan, sweep_run.display)
    is_interrupted = False
    try:
        point_runner.run_all(points, earlier_results)
    except TrialInterruptedError:
        is_interrupted = True
    except TargetError:
        _write_result(sweep, output_dir)
        raise

    return SweepOutcome(_write_result(sweep, output_dir), is_interrupted)


def _describe_resumed(sweep: Sweep, output_dir: Path, *, points_left: int) -> str:
    """Return how many load points of a resumed sweep are done, as a line for the user."""
    done_count = len(sweep.points) - points_left
    verb = "is" if done_count == 1 else "are"
    total = counted_points(len(sweep.points))
    return f"Resuming {output_dir}: {done_count} of {total} {verb} done"


def points_to_run(sweep: Sweep, output_dir: Path) -> list[PlannedPoint]:
    """Return the load points that have no valid run in the directory, in their planned order."""
    done_names = {result.run_name for result in experiment.read_results(output_dir)}
    return [planned for planned in sweep.points if planned.point.name not in done_names]


def expected_runs(sweep: Sweep, output_dir: Path, *, repeats_all: bool) -> list[PlannedRun]:
    """Return the runs that are not in the directory yet, or with `repeats_all` all of them."""
    from loadgen.runs.planned_runs import PlannedRun

    return [
        PlannedRun(planned.workload, planned.settings)
        for planned in sweep.points
        if repeats_all or not run_folder.is_run(output_dir / planned.point.name)
    ]


def with_run_settings(sweep: Sweep, output_dir: Path) -> Sweep:
    """Return the sweep with the settings that its runs need.

    Each run is stored below `output_dir`. In a closed loop all virtual users start at once, so
    their first requests are not typical, and the runs leave this first round out of their metrics.
    """
    is_closed_loop = sweep.load_kind == "concurrency"
    points = []
    for planned in sweep.points:
        settings = msgspec.structs.replace(
            planned.settings, out=output_dir, leave_out_first_round=is_closed_loop
        )
        points.append(replace(planned, settings=settings))

    return replace(sweep, points=tuple(points))


def describe_files(output_dir: Path) -> str:
    """Return where the files of a sweep are."""
    return (
        f"Report: {output_dir / PAGE}. Table: {output_dir / TABLE_FILE}. All details: loadgen "
        f"report {output_dir} --full"
    )


def outcome_code(outcome: SweepOutcome, *, strict: bool) -> int:
    """Return the exit code of a sweep that was just carried out."""
    if outcome.is_interrupted or outcome.curve is None:
        return INTERRUPTED
    return exit_code(outcome.curve, strict=strict)


def _experiment_plan(sweep: Sweep, output_dir: Path) -> ExperimentPlan:
    """Return what was requested, in the form in which `plan.json` stores it.

    The seed is that of an earlier command with the same directory, if there was one.
    """
    settings = sweep.settings
    return experiment.ExperimentPlan(
        command_name="sweep",
        load_kind=sweep.load_kind,
        workload=sweep.workload_name,
        source_text=sweep.workload.source_text,
        target=sweep.target,
        metadata=dict(settings.metadata),
        options=sweep.options | request_options(settings),
        seed=experiment.choose_seed(output_dir, sweep.workload.seed),
        command=settings.command,
        load_points=tuple(planned.point for planned in sweep.points),
    )


def _relative_durations(points: Sequence[PlannedPoint]) -> list[float]:
    """Return how long the load points take relative to each other, to forecast the time left.

    On a real server all load points take the same time. In a simulation the time is proportional to
    the load, because it depends on the number of simulated requests.
    """
    return [planned.point.load if planned.settings.virtual else 1.0 for planned in points]


class _PointRunner:
    """Runs load points one after the other, and stores after each what the sweep shows so far.

    The stored files are complete even if the process is killed during a later load point.
    """

    def __init__(self, output_dir: Path, plan: ExperimentPlan, display: RunDisplay) -> None:
        """Prepare to run load points in a directory, and to show their progress."""
        self._output_dir = output_dir
        self._plan = plan
        self._display = display
        # What is learned about a target before its first run is the same for all its load points.
        self._execute: Execute = partial(run.execute, probe_cache={})

    def run_all(
        self, points: Sequence[PlannedPoint], earlier_results: Sequence[TrialResult]
    ) -> None:
        """Run load points one after the other, each as a trial that runs to its end.

        Their numbers continue those of the earlier results in the directory.
        """
        last_number = max((result.number for result in earlier_results), default=-1)
        for number, planned in enumerate(points, last_number + 1):
            self._display.begin_step(f"Load point {planned.point.name}")
            trial = PlannedTrial(
                number=number, load=planned.point.load, kind="level", may_pass_early=False
            )
            self._make_trial_runner(planned).run(trial)
            run_dir = self._output_dir / planned.point.name
            self._display.print_finished(run_folder.read_summary(run_dir))
            stored_sweep.save_progress(self._output_dir, planned.workload)

    def _make_trial_runner(self, planned: PlannedPoint) -> TrialRunner:
        """Return the runner of one load point.

        Load points are compared with each other. Each therefore runs to its full length, and all of
        them have the same arrivals. The workload and the name do not depend on the trial, because
        the runner runs only this load point.
        """
        assert self._plan.seed is not None, "a sweep always has a seed"
        return TrialRunner(
            output_dir=self._output_dir,
            goal=Goal(slo=planned.workload.slo or Slo(terms=())),
            make_workload=lambda _: planned.workload,
            settings=planned.settings,
            seed=self._plan.seed,
            has_seed_per_trial=False,
            may_end_early=False,
            name_run=lambda _: planned.point.name,
            event_handlers=self._display.event_handlers,
            execute=self._execute,
        )


def _write_result(sweep: Sweep, output_dir: Path) -> SweepCurve | None:
    """Write the files that are derived from the runs of a sweep, and return its curve.

    The files are `curve.csv`, `capacity.json`, the table, the page and the hashes of all files.
    Return None if there is no run.
    """
    run_dirs = run_folder.runs_in(output_dir)
    if not run_dirs:
        return None

    findings = stored_sweep.analyze_runs(output_dir, run_dirs)
    stored_sweep.write_outputs(output_dir, findings, sweep.workload)

    reports = capacity_files.render_sweep_reports(sweep_report(findings.curve), TABLE_FILE)
    for name, content in reports.items():
        store.replace(output_dir / name, content, shared=True)

    checksums.write(output_dir)
    return findings.curve
