"""`loadgen sweep`: run one workload at several loads into one folder; the same command continues a sweep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.core import format
from loadgen.core.errors import INTERRUPTED, OK, UNSOUND, Fault, Faults, UserError, collecting
from loadgen.shell.options import DryRun, Given, OneWorkload, Strict, new_folder, takes
from loadgen.shell.output import print_answer, say

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.metrics.repeats import Repetition
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.workload import Workload
    from loadgen.runs.levels import SweepCurve
    from loadgen.runs.show import Show
    from loadgen.search.sweep import Kind

KINDS = ("concurrency", "request_rate")
PER_LANE = 5  # minimum requests per lane of a closed-loop level


@takes(
    without=("keep",),
    concurrency="Closed loop: 1,2,4,8 or 1,2,4,...,512.",
    request_rate="Open loop: 1,2,5,10 or 2,4,...,20 per second.",
    num_requests={"help": "Of each level.", "shown": "as the workload says, at least 5 for each lane"},
    duration="Of each level: 30s, 5m.",
    warmup="Unmeasured load before each level: 10s, 20req.",
    seed="Of lengths and arrivals, the same for every level; each has texts of its own.",
    out="Its folder; the same one again goes on where it stopped.",
)
def sweep(
    given: Given,
    workload: OneWorkload = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the curve as JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    strict: Strict = False,
    dry_run: DryRun = False,
) -> int:
    """Run a workload at several loads: the throughput-latency curve, its knee, tokens/s per GPU against per user.

    Exit: 0, 2 wrong usage, 3 unreachable or no level is valid, 130 interrupted.

    Example: loadgen sweep rag --url http://HOST:8000 --concurrency 1,2,4,...,64 -d 1m -o sweep
    """
    from loadgen.core import run_folder
    from loadgen.core.execution.folder_names import alone
    from loadgen.core.workload.flags import of_the_load
    from loadgen.runs.levels_text import report
    from loadgen.runs.show import print_plans, shown
    from loadgen.search import sweep as levels

    concurrency, request_rate = given["concurrency"], given["request_rate"]
    kind: Kind = "concurrency" if concurrency is not None else "request_rate"
    faults: list[Fault] = []
    with collecting(faults):
        how = given.repetition()
    with collecting(faults):
        settings = given.settings()
    grid: dict[float, Workload] = {}
    with collecting(faults):
        if (concurrency is None) == (request_rate is None):
            hint = "either --concurrency 1,2,4,...,64 or --request-rate 1,2,4,...,64"
            raise UserError("missing_option", "one kind of levels is needed", "loadgen sweep", hint)
        for amount in levels.grid(given[kind], f"--{kind.replace('_', '-')}", kind):
            grid[amount] = _level(given, workload, kind, amount)
    if faults:
        raise Faults(faults)
    if dry_run:
        return print_plans(grid.values(), settings, given.budget())
    parent = settings.out or new_folder(f"sweep-{next(iter(grid.values())).name}")
    flags = {name: str(value) for name, value in of_the_load(given.options).items() if name not in KINDS}
    settings = replace(settings, out=parent, leave_out_first_round=kind == "concurrency")
    asked = _Sweep(
        workload or str(given["trace"] or given["dataset"]), grid, kind, flags, settings, parent, shown(given)
    )
    left = [
        workload
        for amount, workload in grid.items()
        if given["force"] or not run_folder.is_run(parent / levels.name(kind, amount))
    ]
    asked.show.expect(left * (1 if how is None else how.at_least), settings)
    given.make_room(settings.out)
    with alone(parent):
        if how is not None:
            return _repeated(how, asked, as_json=as_json, strict=strict)
        curve, interrupted = _run(asked)
        if curve is None:
            return INTERRUPTED
        print_answer(curve, report(curve), as_json=as_json, as_markdown=as_markdown)
        say(f"results in {parent}, page: {parent / 'report.html'}, table: {parent / 'sweep.md'}")
        return _code(curve, interrupted, strict=strict)


@dataclass(frozen=True, slots=True)
class _Sweep:
    """What was asked for: a workload at each load of the grid, in one folder."""

    name: str
    grid: dict[float, Workload]
    kind: Kind
    flags: dict[str, str]
    settings: Settings
    folder: Path
    show: Show


def _level(given: Given, name: str | None, kind: Kind, amount: float) -> Workload:
    """The workload at one level. A closed loop without a given length gets at least PER_LANE requests per lane."""

    def at_level(**changed: str) -> Workload:
        return given.workload(name, **dict.fromkeys(KINDS) | {kind: f"{amount:g}"} | changed)

    workload = at_level()
    count = next((stage.count for stage in workload.stages if stage.measured), None)
    if kind == "request_rate" or count is None:
        return workload
    if given["num_requests"] is not None and count < amount:
        what = f"{count:,} requests are fewer than {amount:,.0f} lanes: so many would never be in flight"
        raise UserError(
            "out_of_range", what, f"--num-requests {count}", f"--num-requests {PER_LANE * amount:g}, or leave it out"
        )
    if given["num_requests"] is None and given["duration"] is None and count < PER_LANE * amount:
        return at_level(num_requests=f"{PER_LANE * amount:g}")
    return workload


def _repeated(how: Repetition, asked: _Sweep, *, as_json: bool, strict: bool) -> int:
    """The whole sweep several times, as r1, r2, ... of one folder: each level's runs lie as far apart as can be."""
    from loadgen.core import run_folder
    from loadgen.core.execution.repeats import repeat, seeded
    from loadgen.core.metrics.repeats import FILE, summarize_repeats
    from loadgen.core.results import store
    from loadgen.runs.levels import curve
    from loadgen.runs.repeats_sections import report_of_levels
    from loadgen.search import experiment
    from loadgen.search import sweep as levels

    parent = asked.folder
    if (parent / experiment.PLAN).is_file():
        raise UserError(
            "mismatch", "the folder holds a sweep that is not repeated", f"--out {parent}", "give another --out"
        )
    by_level: dict[str, list[tuple[str, Summary]]] = {levels.name(asked.kind, amount): [] for amount in asked.grid}
    codes: list[int] = []

    def one(number: int) -> bool:
        folder = parent / f"r{number}"
        with store.nothing_left(folder):
            own = {amount: seeded(workload, number) for amount, workload in asked.grid.items()}
            found, interrupted = _run(
                replace(asked, grid=own, settings=replace(asked.settings, out=folder), folder=folder)
            )
        say(f"results in {folder}, page: {folder / 'report.html'}, table: {folder / 'sweep.md'}")
        codes.append(INTERRUPTED if found is None else _code(found, interrupted, strict=strict))
        for level, runs in by_level.items():
            if run_folder.is_run(folder / level):
                runs.append((f"r{number}/{level}", run_folder.open_run(folder / level).summary))
        return codes[-1] != INTERRUPTED

    def enough() -> bool:
        every_level = (how.enough([summary for _, summary in runs]) for runs in by_level.values())
        return len(codes) >= how.at_most or (bool(codes) and all(every_level))

    whole = repeat(how, enough, one, virtual=asked.settings.virtual, say=say)
    within = how.within if how.count is None else None
    made = [(level, summarize_repeats(runs, within=within)) for level, runs in by_level.items() if runs]
    if not made:
        return INTERRUPTED
    store.replace(parent / FILE, format.document({"levels": dict(made)}))
    every = curve([run for runs in by_level.values() for run in runs])
    print_answer({"levels": dict(made)}, report_of_levels(made, every), as_json=as_json)
    say(f"results in {parent}: a sweep each in {', '.join(f'r{i + 1}' for i in range(len(codes)))}")
    return max(codes) if whole else max(*codes, INTERRUPTED)


def _run(asked: _Sweep) -> tuple[SweepCurve | None, bool]:
    """Run the levels that are not in the folder yet; write its files. The curve, and whether the user stopped it."""
    from loadgen.core import run_folder
    from loadgen.core.results import checksums, store
    from loadgen.core.slo import Slo
    from loadgen.present import html, markdown
    from loadgen.runs.levels import bound_why
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
        flags=asked.flags,
        seed=seed,
    )
    trials_done = experiment.begin(parent, plan)
    say(f"seed: {seed}")
    folders_done = {trial.folder for trial in trials_done}
    if folders_done:
        count = sum(levels.name(asked.kind, amount) in folders_done for amount in grid)
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
    interrupted = False
    to_do = {level: amount for amount in grid if (level := levels.name(asked.kind, amount)) not in folders_done}
    asked.show.begin(len(to_do))
    try:
        for level, amount in to_do.items():
            asked.show.step(f"level {level}")
            trial_number = max((trial.ask.number for trial in trials_done), default=-1) + 1
            trials_done.append(
                trial_runner.run(NextTrial(number=trial_number, load=amount, kind="level", early_under=False))
            )
            asked.show.finished(run_folder.kept_summary(parent / level))
    except trials.Interrupted:
        interrupted = True
    if not run_folder.runs_in(parent):
        return None, interrupted
    curve, judged, answer = experiment.swept(parent, trials_done)
    experiment.finish(parent, judged, answer, workload=first_workload, bound_why=bound_why(curve))
    said = report(curve)
    store.replace(parent / "sweep.md", markdown.render(said).encode(), shared=True)
    store.replace(parent / "report.html", html.render(said).encode(), shared=True)
    checksums.write(parent)
    return curve, interrupted


def _code(curve: SweepCurve, interrupted: bool, *, strict: bool) -> int:
    if interrupted:
        return INTERRUPTED
    undecided = strict and any(level.slo_undecided for level in curve.levels)
    return UNSOUND if undecided or not any(level.valid for level in curve.levels) else OK
