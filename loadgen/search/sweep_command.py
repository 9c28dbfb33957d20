"""`loadgen sweep`: run one workload at several loads; the same command resumes a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from loadgen.cli.invocation import Invocation
from loadgen.cli.options import (
    DryRunOption,
    FullOption,
    StrictOption,
    WorkloadArgument,
    add_options,
    default_output_folder,
)
from loadgen.cli.output import (
    add_resume_hint,
    print_result,
    print_status,
    refuse_two_formats,
)
from loadgen.core.errors import (
    INTERRUPTED,
    CombinedError,
    LoadgenError,
    collecting,
)

if TYPE_CHECKING:
    from loadgen.search.sweep_plan import SweepRun


@add_options(
    without=("keep",),
    help_texts={
        "concurrency": "Closed loop: 1,2,4,8 or 1,2,4,...,512.",
        "request_rate": "Open loop: 1,2,5,10 or 2,4,...,20 per second.",
        "num_requests": "Number of requests of each load point.",
        "duration": "Duration of each load point: 30s, 5m.",
        "warmup": "Unmeasured load before each load point: 10s, 20req.",
        "input_tokens": "Prompt length. Several lengths add load points: 500,1000,4000.",
        "output_tokens": "Output length. Several lengths add load points: 100,500.",
        "seed": "Random seed of lengths and arrivals, the same for every load point. Each has "
        "prompts of its own.",
        "out": "Results directory. The same command with the same directory resumes a sweep.",
    },
    default_texts={"num_requests": "as in the workload, at least 5 per virtual user"},
)
def sweep(
    invocation: Invocation,
    workload: WorkloadArgument = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="A,B",
            help="Targets to sweep one after the other: names of --targets, or URLs.",
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
    full: FullOption = False,
) -> int:
    """Run a workload at several loads and find the knee of the throughput-latency curve.

    Several input or output lengths, or --target, add load points: each pair of lengths has a curve.

    Exit: 0, 2 wrong usage, 3 unreachable or a curve without a valid load point, with --strict 4 an
    SLO is undecided, 130 interrupted.

    Example: loadgen sweep rag --url http://HOST:8000 --concurrency 1,2,4,...,64 -d 1m -o sweep
    """
    from loadgen.core.execution.folder_names import locked_folder
    from loadgen.runs.planned_runs import print_plans
    from loadgen.runs.run_display import create_display
    from loadgen.search.sweep_plan import SweepRun, plan_sweep
    from loadgen.search.sweep_repeats import RepeatedSweep
    from loadgen.search.sweep_run import expected_runs, with_run_settings

    errors: list[LoadgenError] = []
    with collecting(errors):
        refuse_two_formats(as_json=as_json, as_markdown=as_markdown)

    with collecting(errors):
        repetition = invocation.repetition()

    with collecting(errors):
        planned = plan_sweep(invocation, workload, target)

    if errors:
        raise CombinedError(errors)

    output = _Output(as_json, as_markdown, strict, full)
    display = create_display(invocation)
    if dry_run:
        return print_plans(planned.planned_runs, invocation.budget())

    output_dir = planned.settings.out or default_output_folder(f"sweep-{planned.workload.name}")
    sweep = with_run_settings(planned, output_dir)
    runs = expected_runs(sweep, output_dir, repeats_all=invocation["force"])
    display.announce_runs(runs * (1 if repetition is None else repetition.min_runs))
    invocation.move_existing_results(output_dir if invocation["out"] else None)
    resume = f"the same command with --out {output_dir} resumes it"

    sweep_run = SweepRun(sweep, output_dir, display)
    with locked_folder(output_dir), add_resume_hint(output_dir, resume):
        if repetition is not None:
            repeated_sweep = RepeatedSweep(repetition, sweep_run, strict=strict)
            return repeated_sweep.run(as_json=as_json)
        return _run_once(sweep_run, output)


class _Output(NamedTuple):
    """The options for how the result of a sweep is printed and what its exit code is.

    Attributes:
        as_json: Whether the curve is printed as JSON.
        as_markdown: Whether the table is printed as Markdown.
        strict: Whether the exit code tells whether the SLO is undecided.
        full: Whether every section of the report is printed.
    """

    as_json: bool
    as_markdown: bool
    strict: bool
    full: bool


def _run_once(sweep_run: SweepRun, output: _Output) -> int:
    """Run a sweep that is not repeated, print its curve and return the exit code."""
    from loadgen.runs.sweep_report import sweep_report
    from loadgen.search.sweep_run import describe_files, outcome_code, run_sweep

    outcome = run_sweep(sweep_run)
    curve = outcome.curve
    if curve is None:
        print_status(
            f"Nothing was measured. Repeat the command with --out {sweep_run.output_dir} to "
            "continue."
        )
        return INTERRUPTED

    print_result(
        curve,
        sweep_report(curve),
        as_json=output.as_json,
        as_markdown=output.as_markdown,
        full=output.full,
    )
    print_status(describe_files(sweep_run.output_dir))

    is_in_report = not output.as_json
    if curve.resume and not is_in_report:
        print_status(f"Resume with: {curve.resume}")

    return outcome_code(outcome, strict=output.strict)
