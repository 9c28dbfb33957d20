"""`loadgen run`: run one workload against one or several endpoints and print the results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from msgspec.structs import replace

from loadgen.cli.invocation import Invocation
from loadgen.cli.options import (
    DryRunOption,
    FullOption,
    GithubOption,
    JunitOption,
    StrictOption,
    WorkloadArgument,
    add_options,
)
from loadgen.cli.output import (
    add_resume_hint,
    describe_nothing_measured,
    explain_interruption,
    print_report,
    print_result,
    print_status,
)
from loadgen.cli.resume import merge_arguments
from loadgen.core.errors import (
    INTERRUPTED,
    CombinedError,
    LoadgenError,
    UserError,
    collecting,
    most_severe,
)
from loadgen.core.metrics.summary import NamedSummary
from loadgen.repeated.repeat_loop import write_repeat_summary
from loadgen.runs.ci_report import CiReport, create_ci_report

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.workload import Workload
    from loadgen.repeated.repeats import Repetition
    from loadgen.runs.planned_runs import PlannedRun
    from loadgen.runs.run_display import RunDisplay

COMMAND = "loadgen run"


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options of `run` that decide what is printed and written, and the exit code."""

    full: FullOption = False
    as_json: Annotated[
        bool,
        typer.Option("--json", rich_help_panel="Output", help="Print summary.json instead."),
    ] = False
    strict: StrictOption = False
    dry_run: DryRunOption = False
    junit: JunitOption = None
    github: GithubOption = False


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """The options of `run` that divide a load into independent parts."""

    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            rich_help_panel="Load",
            help="Send part I of N of the load from this machine. The parts do not communicate; "
            "loadgen merge joins their results. Requires --seed and --start-at.",
        ),
    ] = None
    start_at: Annotated[
        str | None,
        typer.Option(
            "--start-at",
            metavar="TIME",
            rich_help_panel="Load",
            help="Time at which all parts of --shard start, for example 2026-12-01T10:00:00Z.",
        ),
    ] = None


class RunPlan(NamedTuple):
    """The runs of a command, checked together.

    Attributes:
        workloads: The workload of each run by its name; several if --concurrency is a list.
        settings: The settings of all runs.
        repetition: How often the only workload is run; None if it is run once.
        ci_report: The files that tell a CI system the outcome.
    """

    workloads: dict[str, Workload]
    settings: Settings
    repetition: Repetition | None
    ci_report: CiReport

    @property
    def only_workload(self) -> Workload:
        """The workload of a command that has just one, in one run or several repeats of it."""
        (workload,) = self.workloads.values()
        return workload

    @property
    def runs(self) -> list[PlannedRun]:
        """The workload of each run with its settings."""
        from loadgen.runs.planned_runs import PlannedRun

        return [PlannedRun(workload, self.settings) for workload in self.workloads.values()]

    @property
    def required_runs(self) -> list[PlannedRun]:
        """The runs that the command needs at least: with repeats, each has a seed of its own."""
        from loadgen.repeated.repeat_loop import with_repeat_seed
        from loadgen.runs.planned_runs import PlannedRun

        if self.repetition is None:
            return self.runs
        numbers = range(1, self.repetition.min_runs + 1)
        return [
            PlannedRun(with_repeat_seed(self.only_workload, number), self.settings)
            for number in numbers
        ]


class Outcome(NamedTuple):
    """The summaries of the runs of a command, by name, and whether all runs were finished."""

    runs: list[NamedSummary]
    is_complete: bool


@add_options()
def run(
    invocation: Invocation,
    report_options: ReportOptions,
    shard_options: ShardOptions,
    workload: WorkloadArgument = None,
) -> int:
    """Send a workload to an endpoint and print latencies, throughput and the SLO result.

    Exit codes: 0 SLO met, undecided or not set; 1 SLO missed, or without an SLO more than 1 % of
    the requests failed; 2 wrong usage; 3 INVALID or target unreachable; 4 SLO undecided (with
    --strict); 70 bug; 130 interrupted.

    Example: loadgen run qa --url http://HOST:8000 -c 16 -d 2m --slo ttft:2s --slo tpot:50ms
    """
    from loadgen.core.metrics.summary import exit_code

    with explain_interruption(describe_nothing_measured):
        plan = _plan_runs(invocation, report_options, shard_options, workload)
    if report_options.dry_run:
        return _print_plan(invocation, plan)

    outcome = _execute_plan(invocation, plan, report_options)
    codes = [exit_code(run.summary, strict=report_options.strict) for run in outcome.runs]
    if not outcome.is_complete:
        codes.append(INTERRUPTED)

    return most_severe(codes)


def _print_plan(invocation: Invocation, plan: RunPlan) -> int:
    """Print what the runs would send and cost, and return the exit code OK."""
    from loadgen.runs.planned_runs import print_plans

    if plan.repetition is not None:
        print_status(f"runs: {plan.repetition.description}")
    return print_plans(plan.runs, invocation.budget())


def _execute_plan(invocation: Invocation, plan: RunPlan, options: ReportOptions) -> Outcome:
    """Execute the runs of a command, print their results, and write the files for a CI system."""
    from loadgen.runs.run_display import create_display

    plan.ci_report.begin(COMMAND)
    display = create_display(invocation)
    display.announce_runs(plan.required_runs)
    invocation.move_existing_results(plan.settings.out)

    with display.explain_interruption():
        if plan.repetition is not None:
            outcome = _run_repeatedly(invocation, plan, plan.repetition, display, options)
        elif len(plan.workloads) > 1:
            outcome = _run_load_points(invocation, plan, display, options)
        else:
            outcome = _run_once(invocation, plan, display, options)

    plan.ci_report.write(COMMAND, outcome.runs, is_complete=outcome.is_complete)
    return outcome


def _plan_runs(
    invocation: Invocation,
    report_options: ReportOptions,
    shard_options: ShardOptions,
    workload: str | None,
) -> RunPlan:
    """Check all options and return the runs that they request.

    Raises CombinedError with the errors of all options, so that the user can correct them at once.
    """
    from loadgen.runs.sharding import check_divisible

    # `collecting` catches the error of its block and adds it to the list.
    errors: list[LoadgenError] = []
    repetition = None
    with collecting(errors):
        repetition = invocation.repetition()

    with collecting(errors):
        settings = _load_settings(invocation, shard_options)

    with collecting(errors):
        workloads = _load_workloads(invocation, workload)

    with collecting(errors):
        ci_report = create_ci_report(
            report_options.junit, github=report_options.github, strict=report_options.strict
        )

    if errors:
        raise CombinedError(errors)

    # Without errors, each block has assigned its variable.
    check_divisible(settings, workloads.values(), is_repeated=repetition is not None)
    return RunPlan(workloads, settings, repetition, ci_report)


def _load_settings(invocation: Invocation, shard_options: ShardOptions) -> Settings:
    """Return the settings of the runs.

    Raises UserError or CombinedError for wrong options, and if the output directory has results
    that the user does not want to replace with --force.
    """
    from loadgen.core.execution.folder_names import check_no_results
    from loadgen.runs.sharding import with_shard

    settings = invocation.settings(can_use_store=True)
    settings = with_shard(settings, shard_options.shard, shard_options.start_at)
    if settings.out is not None and not invocation["force"]:
        check_no_results(settings.out)

    return settings


def _load_workloads(invocation: Invocation, name: str | None) -> dict[str, Workload]:
    """Return the workload of each run of the command, by the name of the run.

    A command has one run, named "run". With a list of concurrencies, such as `--concurrency 1,8`,
    it has one run for each: "c1" and "c8". Raises UserError or CombinedError.

    Args:
        invocation: The command with its options.
        name: The file or the name of the workload, if the command line has one.
    """
    from loadgen.core.workload import parse_concurrency_levels

    option = invocation["concurrency"]
    concurrencies = parse_concurrency_levels(option) if option else []
    if len(concurrencies) > 1:
        return _load_workload_per_concurrency(invocation, name, concurrencies)

    concurrency = concurrencies[0] if concurrencies else None
    return {"run": invocation.load_workload(name, concurrency=concurrency)}


def _load_workload_per_concurrency(
    invocation: Invocation, name: str | None, concurrencies: Sequence[int]
) -> dict[str, Workload]:
    """Return a workload for each concurrency by the name of its run, such as "c8".

    The runs send different prompts, so that a server does not have them in its cache from the run
    before. Raises UserError if the command has the option `--repeat` too.
    """
    from loadgen.core.workload import with_unique_prompts

    workloads = {
        f"c{concurrency}": invocation.load_workload(name, concurrency=concurrency)
        for concurrency in concurrencies
    }
    if len(workloads) > 1:
        _check_not_repeated(invocation)

    return {
        run_name: with_unique_prompts(workload, run_name)
        for run_name, workload in workloads.items()
    }


def _check_not_repeated(invocation: Invocation) -> None:
    """Raise UserError if a command with several load points has the option --repeat.

    Only `loadgen sweep` repeats several load points, as its report can show their spread.
    """
    if invocation["repeat"] is not None:
        raise UserError(
            "conflict",
            "several load points cannot be repeated by run",
            f"--repeat {invocation['repeat']}",
            "use loadgen sweep ... --repeat, or a single value of --concurrency",
        )


def _run_once(
    invocation: Invocation, plan: RunPlan, display: RunDisplay, options: ReportOptions
) -> Outcome:
    """Execute the run of a command that has a single one, and print its result.

    After a run on a host that was too busy to measure, a hint says what to do next.
    """
    from loadgen.core.execution.run import execute
    from loadgen.runs.client_text import is_host_busy

    summary, run_dir = execute(plan.only_workload, plan.settings, display.event_handlers)
    _print_run(summary, run_dir, options)

    if is_host_busy(summary.verdict) and not options.as_json:
        print_status(suggest_next_step(invocation.arguments, plan.settings))

    return Outcome([NamedSummary(summary.run.workload, summary)], is_complete=True)


def _print_run(summary: Summary, run_dir: Path, options: ReportOptions) -> None:
    """Print the report of a run, or with `--json` its `summary.json`."""
    from loadgen.core.metrics.summary import dump_summary
    from loadgen.runs import text

    if options.as_json:
        sys.stdout.buffer.write(dump_summary(summary))
        print_status(f"results in {run_dir}")
    else:
        print_report(text.report(summary, run_dir=run_dir), full=options.full)


def suggest_next_step(arguments: Sequence[str], settings: Settings) -> str:
    """Return what to do after a run on a host that was too busy to measure.

    A simulated target can be measured in virtual time instead, where the speed of the host does not
    matter. Then the text has the command for that.

    Args:
        arguments: The command line of the run, without "loadgen".
        settings: The settings of the run.
    """
    from loadgen.core.execution import backend

    # This is None for a target that is not simulated.
    simulated_target = backend.known(settings)
    if simulated_target is None or not simulated_target.virtual_url:
        return (
            "Next: repeat the run from a dedicated host. loadgen doctor --url ... reports what "
            "disturbs this one."
        )

    changed_arguments = ["run", "--url", simulated_target.virtual_url]
    if settings.out is not None:
        changed_arguments += ["-o", f"{settings.out}-virtual"]

    command = shlex.join(merge_arguments(arguments, changed_arguments))
    return (
        "Next: repeat the run in virtual time, which a busy host does not affect:\n"
        f"  loadgen {command}"
    )


class _RunSeries:
    """Executes several runs, each in a directory of its own below one directory."""

    def __init__(
        self, invocation: Invocation, settings: Settings, display: RunDisplay, output_dir: Path
    ) -> None:
        """Prepare for runs.

        Args:
            invocation: The command, which executes the runs with its budget and its plug-ins.
            settings: The settings of each run, apart from its directory.
            display: Shows the progress of the runs.
            output_dir: The directory in which each run gets a directory of its own.
        """
        self.output_dir = output_dir
        self.runs: list[NamedSummary] = []
        self._execute = invocation.executor(display.event_handlers)
        self._settings = settings
        self._display = display

    def run_all(self, workloads: Mapping[str, Workload]) -> bool:
        """Execute a run for each named workload. Stop and return False if one is interrupted."""
        is_complete = True
        for name, workload in workloads.items():
            is_complete = self.run(name, workload)
            if not is_complete:
                break
        return is_complete

    def run(self, name: str, workload: Workload) -> bool:
        """Execute a run and return False if it was interrupted."""
        store = f"{self._settings.store}/{name}" if self._settings.store else None
        self._display.begin_step(name)
        settings = replace(self._settings, out=self.output_dir / name, store=store)
        summary, _ = self._execute(workload, settings)
        self._display.print_finished(summary)
        self.runs.append(NamedSummary(name, summary))
        return summary.run.state != "interrupted"


@contextmanager
def _open_series(
    invocation: Invocation, plan: RunPlan, display: RunDisplay
) -> Iterator[_RunSeries]:
    """Create and lock a directory for several runs, and yield the object that executes them.

    Each run gets a subdirectory. The directory is named after the workload and the time, unless the
    user named it with `-o`. If an exception ends the command, its message also says that `loadgen
    report` shows the runs that have finished until then.
    """
    from loadgen.core.execution.folder_names import new_run_folder

    # All runs have the workload of the command, so any of them has its name.
    first_workload = next(iter(plan.workloads.values()))
    now = datetime.now().astimezone()
    with (
        new_run_folder(plan.settings.out, first_workload.name, now) as output_dir,
        add_resume_hint(output_dir, f"loadgen report {output_dir} shows it"),
    ):
        yield _RunSeries(invocation, plan.settings, display, output_dir)


def _run_load_points(
    invocation: Invocation, plan: RunPlan, display: RunDisplay, options: ReportOptions
) -> Outcome:
    """Execute one run per concurrency, and print one table with a row for each run.

    It is the table that `loadgen report` prints for the directory of the runs. That directory also
    gets a file with the checksums of the results.
    """
    from loadgen.core.results import checksums

    display.begin_steps(len(plan.workloads), at_most=False)
    with _open_series(invocation, plan, display) as series:
        is_complete = series.run_all(plan.workloads)
        checksums.write(series.output_dir)
        _print_load_points(series, options)

    return Outcome(series.runs, is_complete)


def _print_load_points(series: _RunSeries, options: ReportOptions) -> None:
    """Print the runs as a table, or their summaries as a JSON array."""
    from loadgen.core.metrics.summary import dump_summary
    from loadgen.runs.sweep_curve import build_curve
    from loadgen.runs.sweep_report import sweep_report

    if options.as_json:
        summaries = [dump_summary(run.summary).strip() for run in series.runs]
        json_array = b"[" + b",\n".join(summaries) + b"]\n"
        sys.stdout.buffer.write(json_array)
        return

    print_report(sweep_report(build_curve(series.runs)), full=options.full)
    print_status(f"results in {series.output_dir}")


def _run_repeatedly(
    invocation: Invocation,
    plan: RunPlan,
    repetition: Repetition,
    display: RunDisplay,
    options: ReportOptions,
) -> Outcome:
    """Execute the same load several times and print the means and the spread of the runs.

    Each repeat has its own seed. The number of repeats is fixed, or open: then they go on until
    their means are as precise as the user requested.
    """
    from loadgen.repeated.repeat_loop import run_repeats, with_repeat_seed

    is_open_ended = repetition.count is None
    display.begin_steps(repetition.max_runs, at_most=is_open_ended)

    with _open_series(invocation, plan, display) as series:

        def has_enough_repeats() -> bool:
            return repetition.is_complete([run.summary for run in series.runs])

        def run_repeat(number: int) -> bool:
            return series.run(f"r{number}", with_repeat_seed(plan.only_workload, number))

        was_completed = run_repeats(
            repetition,
            has_enough_repeats=has_enough_repeats,
            run_repeat=run_repeat,
            virtual=plan.settings.virtual,
            print_line=print_status,
        )
        _write_and_print_repeats(series, repetition, options)

    return Outcome(series.runs, was_completed)


def _write_and_print_repeats(
    series: _RunSeries, repetition: Repetition, options: ReportOptions
) -> None:
    """Write `repeats.json`, the summary of repeated runs, and print a report of it.

    The report has the means and their confidence intervals. A last line has the directory of the
    results and the command that compares them with another result.
    """
    from loadgen.runs.repeats_report import repeats_report
    from loadgen.runs.sweep_curve import build_curve

    repeats = write_repeat_summary(series.output_dir, repetition, series.runs)
    report = repeats_report(repeats, build_curve(series.runs))
    print_result(repeats, report, as_json=options.as_json, full=options.full)
    output_dir = shlex.quote(str(series.output_dir))
    print_status(f"results in {output_dir}; compare them with loadgen compare {output_dir} OTHER")
