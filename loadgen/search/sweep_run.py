"""Carries out a sweep in a directory, where the same command resumes it or adds load points."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from loadgen.cli.output import say
from loadgen.core import run_folder
from loadgen.core.errors import INTERRUPTED, TargetError
from loadgen.core.execution import run
from loadgen.core.results import checksums, store
from loadgen.core.slo import Slo
from loadgen.result_kinds import PAGE
from loadgen.runs.levels import SweepCurve, exit_code
from loadgen.runs.levels_text import report
from loadgen.runs.load_points import counted_points
from loadgen.search import capacity_files, experiment, stored_sweep
from loadgen.search.goal import Goal
from loadgen.search.search_results import PlannedTrial, TrialResult
from loadgen.search.trial_runner import TrialInterruptedError, TrialRunner

if TYPE_CHECKING:
    from loadgen.core.execution.run import Execute
    from loadgen.runs.show import PlannedRun, Show
    from loadgen.search.sweep_plan import PlannedPoint, Sweep, SweepRun

TABLE_FILE = "sweep.md"


class SweepOutcome(NamedTuple):
    """What a sweep has found; `curve` is None if no load point has run."""

    curve: SweepCurve | None
    interrupted: bool


def points_to_run(sweep: Sweep, folder: Path) -> list[PlannedPoint]:
    """Return the load points that have no valid run in the directory."""
    done = {trial.run_name for trial in experiment.read_results(folder)}
    return [planned for planned in sweep.points if planned.point.name not in done]


def runs_to_come(sweep: Sweep, folder: Path, *, again: bool) -> list[PlannedRun]:
    """Return the runs that are not in the directory yet, or with `again` all of them."""
    return [
        (planned.workload, planned.settings)
        for planned in sweep.points
        if again or not run_folder.is_run(folder / planned.point.name)
    ]


def run_sweep(sweep_run: SweepRun) -> SweepOutcome:
    """Run the load points that are not in the directory yet, and write the files of the sweep.

    Raises TargetError if the target or the nodes are lost, after the files are written.
    """
    sweep, folder, show = sweep_run
    plan = stored_sweep.begin(folder, _plan(sweep, folder))
    done = experiment.read_results(folder)
    say(f"repeat with --seed {plan.seed}")
    to_run = points_to_run(sweep, folder)
    if done:
        count = len(sweep.points) - len(to_run)
        total = counted_points(len(sweep.points))
        say(f"resuming {folder}: {count} of {total} {'is' if count == 1 else 'are'} done")
    show.begin(len(to_run), weights=_weights(to_run))
    interrupted = False
    lost: TargetError | None = None
    try:
        _run_points(to_run, folder, plan, done, show)
    except TrialInterruptedError:
        interrupted = True
    except TargetError as error:
        lost = error
    curve = _write_result(sweep, folder)
    if lost is not None:
        raise lost
    return SweepOutcome(curve, interrupted)


def _plan(sweep: Sweep, folder: Path) -> experiment.ExperimentPlan:
    """Return the plan of a sweep, with the seed that its directory was begun with."""
    settings = sweep.settings
    return experiment.ExperimentPlan(
        command_name="sweep",
        load_kind=sweep.kind,
        workload=sweep.name,
        source_text=sweep.workload.source_text,
        target=sweep.target,
        metadata=dict(settings.metadata),
        options=sweep.flags | experiment.request_options(settings),
        seed=experiment.choose_seed(folder, sweep.workload.seed),
        command=settings.command,
        load_points=tuple(planned.point for planned in sweep.points),
    )


def _weights(to_run: Sequence[PlannedPoint]) -> list[float]:
    """Return how long the load points take relative to each other.

    Real ones take the same time; in virtual time the cost is what they send.
    """
    return [planned.point.load if planned.settings.virtual else 1.0 for planned in to_run]


def _run_points(
    to_run: Sequence[PlannedPoint],
    folder: Path,
    plan: experiment.ExperimentPlan,
    done: list[TrialResult],
    show: Show,
) -> None:
    """Run load points one after the other, and store after each what a killed sweep leaves."""
    assert plan.seed is not None
    # What a preflight finds out about a target is the same for all its load points.
    execute: Execute = partial(run.execute, known={})
    number = max((result.number for result in done), default=-1)
    for planned in to_run:
        number += 1
        show.step(f"load point {planned.point.name}")
        trial_runner = _trial_runner(planned, folder, plan.seed, show, execute)
        trial_runner.run(
            PlannedTrial(number=number, load=planned.point.load, kind="level", may_pass_early=False)
        )
        show.finished(run_folder.kept_summary(folder / planned.point.name))
        stored_sweep.store_capacity(folder, planned.workload)


def _trial_runner(
    planned: PlannedPoint, folder: Path, seed: int, show: Show, execute: Execute
) -> TrialRunner:
    return TrialRunner(
        output_dir=folder,
        goal=Goal(slo=planned.workload.slo or Slo(terms=())),
        make_workload=lambda _: planned.workload,
        settings=planned.settings,
        seed=seed,
        has_seed_per_trial=False,
        may_end_early=False,
        name_run=lambda _: planned.point.name,
        event_handlers=show.hearers,
        execute=execute,
    )


def _write_result(sweep: Sweep, folder: Path) -> SweepCurve | None:
    """Write the curve, the capacity, the table and the page. Return None without any run."""
    if not run_folder.runs_in(folder):
        return None
    found = stored_sweep.judge(folder, run_folder.runs_in(folder))
    stored_sweep.write(folder, found, sweep.workload)
    reports = capacity_files.render_sweep_reports(report(found.curve), TABLE_FILE)
    for name, content in reports.items():
        store.replace(folder / name, content, shared=True)
    checksums.write(folder)
    return found.curve


def files_text(folder: Path) -> str:
    """Return where the files of a sweep are."""
    return f"results in {folder}, page: {folder / PAGE}, table: {folder / TABLE_FILE}"


def outcome_code(outcome: SweepOutcome, *, strict: bool) -> int:
    """Return the exit code of a sweep that was just carried out."""
    if outcome.interrupted or outcome.curve is None:
        return INTERRUPTED
    return exit_code(outcome.curve, strict=strict)


def in_directory(sweep: Sweep, folder: Path) -> Sweep:
    """Return the sweep with the settings of runs below a directory."""
    points = tuple(
        replace(
            planned,
            settings=msgspec.structs.replace(
                planned.settings,
                out=folder,
                leave_out_first_round=sweep.kind == "concurrency",
            ),
        )
        for planned in sweep.points
    )
    return replace(sweep, points=points)
