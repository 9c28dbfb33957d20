"""`loadgen sweep`: run one workload at several loads into one folder; the same command continues a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from loadgen.core import format
from loadgen.core.errors import INTERRUPTED, Fault, Faults, UserError, collecting
from loadgen.shell.invocation import Invocation
from loadgen.shell.options import (
    DryRunOption,
    StrictOption,
    WorkloadArgument,
    add_options,
    default_output_folder,
)
from loadgen.shell.output import print_answer, say, telling_what_is_kept

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.repeated.repeats import Repetition
    from loadgen.search.sweep_run import Sweep


@add_options(
    without=("keep",),
    help_texts={
        "concurrency": "Closed loop: 1,2,4,8 or 1,2,4,...,512.",
        "request_rate": "Open loop: 1,2,5,10 or 2,4,...,20 per second.",
        "num_requests": "Of each level.",
        "duration": "Of each level: 30s, 5m.",
        "warmup": "Unmeasured load before each level: 10s, 20req.",
        "input_tokens": "Prompt length; several make a grid: 500,1000,4000.",
        "output_tokens": "Output length; several make a grid: 100,500.",
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

    Several input or output lengths, or --target, make a grid: a sweep for each, a heat map, a front per cell.

    Exit: 0, 2 wrong usage, 3 unreachable or no level is valid, 130 interrupted.

    Example: loadgen sweep rag --url http://HOST:8000 --concurrency 1,2,4,...,64 -d 1m -o sweep
    """
    from loadgen.core.execution.folder_names import alone
    from loadgen.runs.levels_text import report
    from loadgen.runs.show import print_plans, shown
    from loadgen.search import grid_run
    from loadgen.search.sweep_run import carry_out, code, where

    faults: list[Fault] = []
    with collecting(faults):
        how = invocation.repetition()
    sweeps: list[grid_run.CellSweep] = []
    with collecting(faults):
        sweeps = grid_run.sweeps(invocation, workload, target)
    is_grid = len(sweeps) > 1 or bool(sweeps and sweeps[0].cell.name)
    if is_grid and how is not None:
        what = "a grid of sweeps is not repeated"
        faults.append(
            UserError(
                "unsupported",
                what,
                f"--repeat {invocation['repeat']}",
                "repeat the sweep of one cell",
            )
        )
    if faults:
        raise Faults(faults)
    show = shown(invocation)
    if dry_run:
        return print_plans([one for cell in sweeps for one in cell.planned], invocation.budget())
    first = sweeps[0]
    parent = first.settings.out or default_output_folder(
        f"{'grid' if is_grid else 'sweep'}-{first.workload.name}"
    )
    asked = [cell.asked(parent, show) for cell in sweeps]
    show.expect(
        [one for cell in asked for one in cell.left(again=invocation["force"])]
        * (1 if how is None else how.at_least)
    )
    invocation.move_existing_results(parent if invocation["out"] else None)
    with (
        alone(parent),
        telling_what_is_kept(parent, f"the same command with --out {parent} goes on"),
    ):
        if is_grid:
            return grid_run.carry_out(
                parent, sweeps, asked, as_json=as_json, as_markdown=as_markdown, strict=strict
            )
        if how is not None:
            return _repeated(how, asked[0], as_json=as_json, strict=strict)
        curve, interrupted = carry_out(asked[0])
        if curve is None:
            return INTERRUPTED
        print_answer(curve, report(curve), as_json=as_json, as_markdown=as_markdown)
        left = f"; go on with: the same command and --out {parent}" if interrupted else ""
        say(f"{where(parent)}{left}")
        return code(curve, interrupted, strict=strict)


def _repeated(how: Repetition, asked: Sweep, *, as_json: bool, strict: bool) -> int:
    """The whole sweep several times, as r1, r2, ... of one folder: each level's runs lie as far apart as can be."""
    from loadgen.core import run_folder
    from loadgen.core.results import store
    from loadgen.repeated.repeats import FILE, summarize_repeats
    from loadgen.runs.levels import curve
    from loadgen.runs.repeats_sections import report_of_levels
    from loadgen.runs.repetition import repeat, seeded
    from loadgen.search import experiment
    from loadgen.search import sweep as levels
    from loadgen.search.sweep_run import carry_out, code, where

    parent = asked.folder
    if (parent / experiment.PLAN).is_file():
        raise UserError(
            "mismatch",
            "the folder holds a sweep that is not repeated",
            f"--out {parent}",
            "give another --out",
        )
    by_level: dict[str, list[tuple[str, Summary]]] = {
        levels.name(asked.kind, amount): [] for amount in asked.grid
    }
    codes: list[int] = []

    def one(number: int) -> bool:
        folder = parent / f"r{number}"
        with store.nothing_left(folder):
            own = {amount: seeded(workload, number) for amount, workload in asked.grid.items()}
            found, interrupted = carry_out(
                replace(
                    asked, grid=own, settings=replace(asked.settings, out=folder), folder=folder
                )
            )
        say(where(folder))
        codes.append(INTERRUPTED if found is None else code(found, interrupted, strict=strict))
        for level, runs in by_level.items():
            if run_folder.is_run(folder / level):
                runs.append((f"r{number}/{level}", run_folder.open_run(folder / level).summary))
        return codes[-1] != INTERRUPTED

    def enough() -> bool:
        every_level = (how.enough([summary for _, summary in runs]) for runs in by_level.values())
        return len(codes) >= how.at_most or (bool(codes) and all(every_level))

    whole = repeat(how, enough, one, virtual=asked.settings.virtual, say=say)
    within = how.within if how.count is None else None
    made = [
        (level, summarize_repeats(runs, within=within)) for level, runs in by_level.items() if runs
    ]
    if not made:
        return INTERRUPTED
    store.replace(parent / FILE, format.document({"levels": dict(made)}))
    every = curve([run for runs in by_level.values() for run in runs])
    print_answer({"levels": dict(made)}, report_of_levels(made, every), as_json=as_json)
    say(f"results in {parent}: a sweep each in {', '.join(f'r{i + 1}' for i in range(len(codes)))}")
    return max(codes) if whole else max(*codes, INTERRUPTED)
