"""`loadgen sweep`: run one workload at several loads; the same command resumes a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from msgspec.structs import replace

from loadgen.cli.invocation import Invocation
from loadgen.cli.options import (
    DryRunOption,
    StrictOption,
    WorkloadArgument,
    add_options,
    default_output_folder,
)
from loadgen.cli.output import print_answer, say, telling_what_is_kept
from loadgen.core import format
from loadgen.core.errors import (
    INTERRUPTED,
    CombinedError,
    LoadgenError,
    UserError,
    collecting,
    most_severe,
)

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import NamedSummary
    from loadgen.repeated.repeats import Repetition
    from loadgen.search.sweep_plan import Sweep, SweepRun


@add_options(
    without=("keep",),
    help_texts={
        "concurrency": "Closed loop: 1,2,4,8 or 1,2,4,...,512.",
        "request_rate": "Open loop: 1,2,5,10 or 2,4,...,20 per second.",
        "num_requests": "Of each level.",
        "duration": "Of each level: 30s, 5m.",
        "warmup": "Unmeasured load before each level: 10s, 20req.",
        "input_tokens": "Prompt length; several add load points: 500,1000,4000.",
        "output_tokens": "Output length; several add load points: 100,500.",
        "seed": "Of lengths and arrivals, the same for every level; each has texts of its own.",
        "out": "Its folder; the same one again goes on where it stopped.",
    },
    default_texts={"num_requests": "as the workload says, at least 5 for each lane"},
)
def sweep(
    invocation: Invocation,
    workload: WorkloadArgument = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="A,B", help="One after the other: names of --targets, or URLs."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print the curve as JSON.")
    ] = False,
    as_markdown: Annotated[
        bool,
        typer.Option("--markdown", rich_help_panel="Output", help="Print the table as Markdown."),
    ] = False,
    strict: StrictOption = False,
    dry_run: DryRunOption = False,
) -> int:
    """Run a workload at several loads: the throughput-latency curve, its knee, tokens/s per GPU against per user.

    Several input or output lengths, or --target, add load points: each pair of lengths has a curve.

    Exit: 0, 2 wrong usage, 3 unreachable or a curve without a valid load point, with --strict 4 an
    SLO is undecided, 130 interrupted.

    Example: loadgen sweep rag --url http://HOST:8000 --concurrency 1,2,4,...,64 -d 1m -o sweep
    """
    from loadgen.core.execution.folder_names import alone
    from loadgen.runs.show import print_plans, shown
    from loadgen.search.sweep_plan import SweepRun, plan_sweep
    from loadgen.search.sweep_run import in_directory, runs_to_come

    faults: list[LoadgenError] = []
    with collecting(faults):
        repetition = invocation.repetition()
    with collecting(faults):
        planned = plan_sweep(invocation, workload, target)
    if faults:
        raise CombinedError(faults)
    output = _Output(as_json, as_markdown, strict)
    show = shown(invocation)
    if dry_run:
        return print_plans(planned.planned_runs, invocation.budget())
    folder = planned.settings.out or default_output_folder(f"sweep-{planned.workload.name}")
    sweep = in_directory(planned, folder)
    to_come = runs_to_come(sweep, folder, again=invocation["force"])
    show.expect(to_come * (1 if repetition is None else repetition.min_runs))
    invocation.move_existing_results(folder if invocation["out"] else None)
    resume = f"the same command with --out {folder} resumes it"
    with alone(folder), telling_what_is_kept(folder, resume):
        if repetition is not None:
            return _run_repeats(repetition, SweepRun(sweep, folder, show), output)
        return _run_once(SweepRun(sweep, folder, show), output)


class _Output(NamedTuple):
    """How the result of a sweep is printed and judged."""

    as_json: bool
    as_markdown: bool
    strict: bool


def _run_once(run: SweepRun, output: _Output) -> int:
    """Run a sweep, print its curve and return the exit code."""
    from loadgen.runs.levels_text import report
    from loadgen.search.sweep_run import files_text, outcome_code, run_sweep

    outcome = run_sweep(run)
    curve = outcome.curve
    if curve is None:
        say(f"nothing was measured; resume with: the same command and --out {run.folder}")
        return INTERRUPTED
    print_answer(curve, report(curve), as_json=output.as_json, as_markdown=output.as_markdown)
    resume = f"; resume with: {curve.resume}" if curve.resume else ""
    say(f"{files_text(run.folder)}{resume}")
    return outcome_code(outcome, strict=output.strict)


def _run_repeats(repetition: Repetition, run: SweepRun, output: _Output) -> int:
    """Run the whole sweep several times, as r1, r2, ... of one directory.

    So the runs of a load point lie as far apart as they can. Return the exit code.
    """
    from loadgen.core.results import store
    from loadgen.repeated.repeats import FILE, summarize_repeats
    from loadgen.runs.levels import curve
    from loadgen.runs.repeats_sections import report_of_levels
    from loadgen.runs.repetition import repeat
    from loadgen.search import experiment

    folder = run.folder
    if (folder / experiment.PLAN_FILE).is_file():
        raise UserError(
            "mismatch",
            "the folder holds a sweep that is not repeated",
            f"--out {folder}",
            "give another --out",
        )
    repeats = _RepeatedSweep(run, strict=output.strict)

    def is_enough() -> bool:
        counts = (
            repetition.is_complete([one for _, one in runs]) for runs in repeats.runs.values()
        )
        done = len(repeats.codes)
        return done >= repetition.max_runs or (done > 0 and all(counts))

    completed = repeat(
        repetition, is_enough, repeats.run_one, virtual=run.sweep.settings.virtual, say=say
    )
    within = repetition.within if repetition.count is None else None
    by_point = [
        (name, summarize_repeats(runs, within=within))
        for name, runs in repeats.runs.items()
        if runs
    ]
    if not by_point:
        return INTERRUPTED
    document = {"levels": dict(by_point)}
    store.replace(folder / FILE, format.document(document))
    all_runs = curve([run for runs in repeats.runs.values() for run in runs])
    print_answer(document, report_of_levels(by_point, all_runs), as_json=output.as_json)
    names = ", ".join(f"r{number}" for number in range(1, len(repeats.codes) + 1))
    say(f"results in {folder}: a sweep each in {names}")
    return most_severe(repeats.codes if completed else [*repeats.codes, INTERRUPTED])


class _RepeatedSweep:
    """The repeats of a sweep so far.

    Attributes:
        runs: The names and summaries of the runs of each load point, by the name of the point.
        codes: The exit code of each sweep.
    """

    def __init__(self, run: SweepRun, *, strict: bool) -> None:
        """Start without any repeat."""
        self._sweep_run = run
        self._strict = strict
        self.runs: dict[str, list[NamedSummary]] = {
            planned.point.name: [] for planned in run.sweep.points
        }
        self.codes: list[int] = []

    def run_one(self, number: int) -> bool:
        """Run repeat `number`, from 1. Return False if the user stopped it."""
        from loadgen.core import run_folder
        from loadgen.core.metrics.summary import NamedSummary
        from loadgen.core.results import store
        from loadgen.search.sweep_plan import SweepRun
        from loadgen.search.sweep_run import files_text, in_directory, outcome_code, run_sweep

        folder = self._sweep_run.folder / f"r{number}"
        repeat = SweepRun(in_directory(self._seeded(number), folder), folder, self._sweep_run.show)
        with store.nothing_left(folder):
            outcome = run_sweep(repeat)
        say(files_text(folder))
        self.codes.append(outcome_code(outcome, strict=self._strict))
        for name, runs in self.runs.items():
            if run_folder.is_run(folder / name):
                summary = run_folder.open_run(folder / name).summary
                runs.append(NamedSummary(f"r{number}/{name}", summary))
        return not outcome.interrupted

    def _seeded(self, number: int) -> Sweep:
        """Return the sweep with the seed of repeat `number`."""
        from loadgen.runs.repetition import seeded

        sweep = self._sweep_run.sweep
        points = tuple(
            replace(planned, workload=seeded(planned.workload, number)) for planned in sweep.points
        )
        return replace(sweep, points=points)
