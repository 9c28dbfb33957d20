"""Carries out a sweep: one workload at each load of a grid, in one folder, which the same command takes up again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from loadgen.core import format
from loadgen.core.errors import INTERRUPTED, UserError
from loadgen.result_kinds import PAGE
from loadgen.shell.output import say

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Workload
    from loadgen.runs.levels import SweepCurve
    from loadgen.runs.show import PlannedRun, Show
    from loadgen.search.sweep import Kind
    from loadgen.shell.invocation import Invocation

TABLE = "sweep.md"
KINDS = ("concurrency", "request_rate")
PER_LANE = 5  # minimum requests per lane of a closed-loop level


class Sweep(Struct, frozen=True):
    """What was asked for: a workload at each load, in one folder. `counted`: its levels are steps of a grid."""

    name: str
    grid: dict[float, Workload]
    kind: Kind
    flags: dict[str, str]
    settings: Settings
    folder: Path
    show: Show
    counted: bool = False

    @property
    def to_do(self) -> dict[str, float]:
        """The levels that are not done yet, by their names."""
        from loadgen.search import experiment
        from loadgen.search import sweep as levels

        done = {trial.folder for trial in experiment.told(self.folder)}
        return {
            level: amount
            for amount in self.grid
            if (level := levels.name(self.kind, amount)) not in done
        }

    def weights(self, to_do: Iterable[float]) -> list[float]:
        """How long levels take beside each other: real ones last alike; in virtual time one costs what it sends."""
        return [amount if self.settings.virtual else 1.0 for amount in to_do]

    def left(self, *, again: bool) -> list[PlannedRun]:
        """The runs that are not in the folder yet; `again`: all."""
        from loadgen.core import run_folder
        from loadgen.search import sweep as levels

        return [
            (workload, self.settings)
            for amount, workload in self.grid.items()
            if again or not run_folder.is_run(self.folder / levels.name(self.kind, amount))
        ]


def level(
    invocation: Invocation, name: str | None, kind: Kind, amount: float, **other: Any
) -> Workload:
    """The workload at one level. A closed loop without a given length gets at least PER_LANE requests per lane.

    other: options with other values than those typed.
    """

    def at_level(**changed: str) -> Workload:
        return invocation.load_workload(
            name, **other | dict.fromkeys(KINDS) | {kind: f"{amount:g}"} | changed
        )

    workload = at_level()
    count = next((stage.count for stage in workload.stages if stage.measured), None)
    if kind == "request_rate" or count is None:
        return workload
    if invocation["num_requests"] is not None and count < amount:
        few = format.counted(count, "request is", "requests are")
        what = f"{few} fewer than {amount:,.0f} lanes: so many would never be in flight"
        raise UserError(
            "out_of_range",
            what,
            f"--num-requests {count}",
            f"--num-requests {PER_LANE * amount:g}, or leave it out",
        )
    if (
        invocation["num_requests"] is None
        and invocation["duration"] is None
        and count < PER_LANE * amount
    ):
        return at_level(num_requests=f"{PER_LANE * amount:g}")
    return workload


def carry_out(asked: Sweep) -> tuple[SweepCurve | None, bool]:
    """Run the levels that are not in the folder yet; write its files. The curve, and whether the user stopped it.

    Raises TargetError where the target or the nodes are lost: the files are written.
    """
    from loadgen.core import run_folder
    from loadgen.core.errors import TargetError
    from loadgen.core.results import checksums, store
    from loadgen.core.slo import Slo
    from loadgen.runs.levels_text import report
    from loadgen.search import experiment, trials
    from loadgen.search import sweep as levels
    from loadgen.search.load_search import NextTrial
    from loadgen.search.watch import Goal

    grid, parent = asked.grid, asked.folder
    first_workload = next(iter(grid.values()))
    seed = experiment.seed_of(parent, first_workload.seed)
    plan = experiment.ExperimentPlan(
        by="sweep",
        kind=asked.kind,
        workload=asked.name,
        source_text=first_workload.source_text,
        target=asked.settings.shown,
        metadata=dict(asked.settings.metadata),
        flags=asked.flags | experiment.of_requests(asked.settings),
        seed=seed,
    )
    trials_done = experiment.begin(parent, plan)
    say(f"repeat with --seed {seed}")
    to_do = asked.to_do
    if trials_done:
        count = len(grid) - len(to_do)
        say(f"going on with {parent}: {count} of {format.counted(len(grid), 'level')} are done")
    trial_runner = trials.Trials(
        folder=parent,
        goal=Goal(slo=first_workload.slo or Slo(terms=())),
        make=lambda ask: grid[ask.load],
        settings=asked.settings,
        seed=seed,
        seeded=False,
        watched=False,
        name=lambda ask: levels.name(asked.kind, ask.load),
        hearers=asked.show.hearers,
    )
    interrupted, lost = False, None
    if not asked.counted:
        asked.show.begin(len(to_do), weights=asked.weights(to_do.values()))
    try:
        for level, amount in to_do.items():
            asked.show.step(f"level {level}")
            trial_number = max((trial.ask.number for trial in trials_done), default=-1) + 1
            trials_done.append(
                trial_runner.run(
                    NextTrial(number=trial_number, load=amount, kind="level", early_under=False)
                )
            )
            asked.show.finished(run_folder.kept_summary(parent / level))
    except trials.Interrupted:
        interrupted = True
    except TargetError as error:
        lost = error
    if not run_folder.runs_in(parent):
        if lost is not None:
            raise lost
        return None, interrupted
    curve, judged, answer = experiment.swept(parent, trials_done)
    experiment.finish(parent, judged, answer, workload=first_workload, table=curve)
    for name, data in experiment.report_files(report(curve), TABLE).items():
        store.replace(parent / name, data, shared=True)
    checksums.write(parent)
    if lost is not None:
        raise lost
    return curve, interrupted


def where(folder: Path, table: str = TABLE) -> str:
    """Where the files of a sweep, or of a grid, are."""
    return f"results in {folder}, page: {folder / PAGE}, table: {folder / table}"


def code(curve: SweepCurve, interrupted: bool, *, strict: bool) -> int:
    from loadgen.runs.levels import exit_code

    return INTERRUPTED if interrupted else exit_code(curve, strict=strict)
