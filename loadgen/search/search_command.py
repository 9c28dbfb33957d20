"""`loadgen search`: find the highest load under an SLO."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import completion
from loadgen.cli.invocation import Invocation
from loadgen.cli.options import DryRunOption, FullOption, WorkloadArgument, add_options
from loadgen.cli.resume import resume_arguments
from loadgen.core.errors import OK

if TYPE_CHECKING:
    from loadgen.search.agent_tiers_run import TierSearches
    from loadgen.search.search_plan import PlannedSearch

SustainOption = Annotated[
    bool | None,
    typer.Option(
        "--sustain/--no-sustain",
        help="Also confirm the load in a trial twice as long, in which no queue may grow.",
        show_default="--sustain in virtual time",
    ),
]
RunSpreadOption = Annotated[
    str | None,
    typer.Option(
        "--run-spread",
        metavar="SHARE",
        help="Run-to-run variation of the server, if known from repeats: 3%.",
    ),
]


@add_options(
    without=(
        "trace_speed",
        "trace_loop",
        "request_rate",
        "concurrency",
        "burstiness",
        "num_requests",
        "num_warmups",
        "schedule_seed",
        "keep",
        "repeat",
    ),
    help_texts={
        "duration": "Full length of a trial.",
        "warmup": "Unmeasured load before each trial, ramped up to the highest load that passed. "
        "Use it for a server that scales out.",
        "seed": "Random seed of the search. Every trial derives its own.",
        "out": "Results directory of the search.",
    },
    default_texts={
        "duration": "600s; for tasks at least 10 times their time limit",
        "warmup": "none",
    },
)
def search(
    invocation: Invocation,
    workload: WorkloadArgument = None,
    percentile: Annotated[
        str | None,
        typer.Option(
            "--percentile",
            metavar="P",
            rich_help_panel="SLO",
            help="Percentile of --slo objectives that name none: 99, 95, 99.9.",
        ),
    ] = None,
    over: Annotated[
        str,
        typer.Option(
            "--over",
            metavar="LOAD",
            help="What to search over: rate (open loop), concurrency (closed loop), or sessions: "
            "concurrent agents, also per accelerator and per megawatt.",
            autocompletion=completion.complete_choice(lambda: ("rate", "concurrency", "sessions")),
        ),
    ] = "rate",
    tier: Annotated[
        list[str] | None,
        typer.Option(
            "--tier",
            metavar="SPEED:TTFT",
            rich_help_panel="SLO",
            help="Tier of AA-AgentPerf in place of --slo: p25 of the output speed of a request in "
            "tokens/s, and p95 of TTFT: 20:10s. Repeat it to search at one tier after the other.",
        ),
    ] = None,
    low: Annotated[
        float | None,
        typer.Option("--low", metavar="LOAD", min=0, help="Lower bound of the search."),
    ] = None,
    high: Annotated[
        float | None,
        typer.Option("--high", metavar="LOAD", min=0, help="Upper bound of the search."),
    ] = None,
    start: Annotated[
        float | None,
        typer.Option(
            "--start",
            metavar="LOAD",
            min=0,
            help="Load of the first trial, without --low and --high. Default: 1, or an estimate "
            "for a simulated target.",
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            "--precision",
            metavar="SHARE",
            help="Half-width of the confidence interval: 5%, or 0.05.",
        ),
    ] = "2%",
    max_probes: Annotated[
        int, typer.Option("--max-probes", metavar="N", min=1, help="Maximum number of trials.")
    ] = 40,
    max_time: Annotated[
        str | None,
        typer.Option(
            "--max-time", metavar="TIME", help="Maximum time of all trials together: 2h, 90m."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="FOLDER",
            help="Resume the unfinished search in this directory. Its options are stored there.",
        ),
    ] = None,
    sustain: SustainOption = None,
    run_spread: RunSpreadOption = None,
    dry_run: DryRunOption = False,
    full: FullOption = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", rich_help_panel="Output", help="Print search.json instead of the report."
        ),
    ] = False,
) -> int:
    """Find the highest rate (or concurrency) that meets every objective of the SLO.

    Exit: 0 found, 1 no load passed or none was confirmed, 2 wrong usage, 3 two INVALID trials in a
    row, or stopped by --max-time or --max-probes, 130 interrupted.

    Example: loadgen search rag --url http://HOST:8000 --slo ttft:2s --slo tpot:50ms -d 5m
    """
    from loadgen.search.agent_tiers_run import TierSearches
    from loadgen.search.search_plan import SearchOptions, check_options, plan_search
    from loadgen.search.search_run import run_planned_search

    if resume is not None and workload is None and not _names_workload(invocation):
        command = _stored_command(resume)
        if command:
            arguments = resume_arguments(command[1:], invocation.arguments, "--resume", resume)
            return invocation.run_command_line(arguments)

    tiers = tuple(tier or ())
    options = SearchOptions(
        percentile=percentile,
        over=over,
        tier=tiers[0] if tiers else None,
        low=low,
        high=high,
        start=start,
        precision=precision,
        max_trials=max_probes,
        max_time=max_time,
        sustain=sustain,
        run_spread=run_spread,
    )
    if len(tiers) > 1:
        searches = TierSearches(invocation, workload, options, tiers, resume)
        if dry_run:
            return _show_dry_runs(searches, invocation)
        return searches.run(as_json=as_json, full=full)

    checked = check_options(invocation, workload, options, resume)
    if resume is None and not dry_run:
        invocation.move_existing_results(checked.settings.out)

    planned = plan_search(invocation, checked)
    if dry_run:
        return _show_dry_run(planned, invocation)

    return run_planned_search(planned, invocation, "json" if as_json else "report", full=full)


def _names_workload(invocation: Invocation) -> bool:
    """Return whether the options name a workload, so that a stored command is not repeated."""
    options = ("trace", "dataset", "input_tokens")
    return any(invocation[option] is not None for option in options)


def _stored_command(output_dir: Path) -> tuple[str, ...]:
    """Return the command line of a search. Raises UserError if the directory is not that of one."""
    from loadgen.search import agent_tiers, experiment

    if agent_tiers.has_tiers(output_dir):
        return agent_tiers.read_tiers(output_dir).command
    return experiment.read_search_plan(output_dir).command


def _show_dry_runs(searches: TierSearches, invocation: Invocation) -> int:
    """Print what the search at each tier would do, and return the exit code."""
    for planned in searches.plan():
        _show_dry_run(planned, invocation)
    return OK


def _show_dry_run(planned: PlannedSearch, invocation: Invocation) -> int:
    """Print what a search would do, or what is left of it, and return the exit code."""
    from loadgen.search import experiment
    from loadgen.search.forecast import DryRun
    from loadgen.search.search_results import PlannedTrial

    search = planned.search
    runner = planned.runner
    for result in experiment.read_results(runner.output_dir):
        search.add_result(result)

    first_trial = search.next_trial()
    if first_trial is None:
        # A search that has ended has no next trial. Its workload is shown at the lowest load.
        first_trial = PlannedTrial(
            number=0, load=search.settings.low, kind="probe", may_pass_early=False
        )

    dry_run = DryRun(
        search,
        runner.make_workload(first_trial),
        runner.settings,
        invocation.budget(),
        trial_s=planned.trial_s,
        runs_to_end=bool(runner.goal.full_run_terms) or runner.settings.virtual,
        is_load_known=planned.is_load_known,
    )
    dry_run.show()
    return OK
