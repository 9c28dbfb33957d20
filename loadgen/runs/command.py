"""`loadgen run`: run one workload against one or several endpoints and print the results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
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
    GithubOption,
    JunitOption,
    StrictOption,
    WorkloadArgument,
    add_options,
)
from loadgen.cli.output import print_answer, print_report, say, telling_what_is_kept
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
from loadgen.runs.builds import KeptByBuild, kept_by_build

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Workload
    from loadgen.repeated.repeats import Repetition
    from loadgen.runs.show import Show

COMMAND = "loadgen run"


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options of `run` that say what is printed and written, and how it exits."""

    as_json: Annotated[
        bool,
        typer.Option(
            "--json", rich_help_panel="Output", help="Print summary.json instead of the table."
        ),
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
            help="Send part I of N of the load, without communication between the parts; "
            "`loadgen merge` joins their results. Needs --seed and --start-at.",
        ),
    ] = None
    start_at: Annotated[
        str | None,
        typer.Option(
            "--start-at",
            metavar="TIME",
            rich_help_panel="Load",
            help="With --shard, when all parts start: 2026-12-01T10:00:00Z.",
        ),
    ] = None


class RunPlan(NamedTuple):
    """The runs of a command, checked together.

    Attributes:
        workloads: The workload of each run by its name; several if --concurrency is a list.
        settings: The settings of all runs.
        repetition: How often the only workload is run; None if it is run once.
        build: Where the outcome is written for a build server.
    """

    workloads: dict[str, Workload]
    settings: Settings
    repetition: Repetition | None
    build: KeptByBuild

    @property
    def runs(self) -> list[tuple[Workload, Settings]]:
        """The workload of each run with its settings."""
        return [(workload, self.settings) for workload in self.workloads.values()]


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
    """Drive a workload at an endpoint; print latencies, throughput, goodput and a verdict.

    Exit: 0 done and SLO met (or undecided: see --strict), 1 SLO missed, or more than
    1% of the requests failed without an SLO, 2 wrong usage, 3 unreachable or not valid, 4 with
    --strict an SLO is undecided, 70 bug, 130 interrupted.

    Example: loadgen run qa --url http://HOST:8000 -c 16 -d 2m --slo ttft:2s --slo tpot:50ms
    """
    plan = _check(invocation, report_options, shard_options, workload)
    from loadgen.core.metrics.summary import exit_code
    from loadgen.runs.show import print_plans, shown

    repetition = plan.repetition
    if report_options.dry_run:
        if repetition is not None:
            say(f"runs: {repetition.description}")
        return print_plans(plan.runs, invocation.budget())
    plan.build.begin(COMMAND)
    show = shown(invocation)
    show.expect(plan.runs * (1 if repetition is None else repetition.min_runs))
    invocation.move_existing_results(plan.settings.out)
    as_json = report_options.as_json
    if repetition is not None:
        outcome = _run_repeatedly(invocation, plan, repetition, show, as_json=as_json)
    elif len(plan.workloads) > 1:
        outcome = _run_levels(invocation, plan, show, as_json=as_json)
    else:
        outcome = _run_once(invocation, plan, show, as_json=as_json)
    plan.build.write(COMMAND, outcome.runs, whole=outcome.is_complete)
    codes = [exit_code(summary, strict=report_options.strict) for _, summary in outcome.runs]
    return most_severe(codes if outcome.is_complete else [*codes, INTERRUPTED])


def _check(
    invocation: Invocation,
    report_options: ReportOptions,
    shard_options: ShardOptions,
    workload: str | None,
) -> RunPlan:
    """Return the plan of the runs. Raises Faults with every error that was found."""
    from loadgen.core.execution.folder_names import check_no_results
    from loadgen.runs.sharding import check_divisible, with_shard

    errors: list[LoadgenError] = []
    repetition = None
    with collecting(errors):
        repetition = invocation.repetition()
    with collecting(errors):
        settings = invocation.settings(can_use_store=True)
        settings = with_shard(settings, shard_options.shard, shard_options.start_at)
        if settings.out is not None and not invocation["force"]:
            check_no_results(settings.out)
    with collecting(errors):
        workloads = _load_levels(invocation, workload)
    with collecting(errors):
        build = kept_by_build(
            report_options.junit, github=report_options.github, strict=report_options.strict
        )
    if errors:
        raise CombinedError(errors)
    check_divisible(settings, workloads.values(), is_repeated=repetition is not None)
    return RunPlan(workloads, settings, repetition, build)


def _load_levels(invocation: Invocation, name: str | None) -> dict[str, Workload]:
    """Return the workload at each concurrency of a list, or one workload. Raises Faults."""
    from loadgen.core.workload import parse_concurrency_levels, with_unique_prompts

    concurrency = invocation["concurrency"]
    steps = parse_concurrency_levels(concurrency) if concurrency else [None]
    workloads = {f"c{step}": invocation.load_workload(name, concurrency=step) for step in steps}
    if len(workloads) > 1 and invocation["repeat"] is not None:
        raise UserError(
            "conflict",
            "several levels, each to be repeated",
            f"--repeat {invocation['repeat']}",
            "loadgen sweep ... --repeat runs several levels again and again; or give one level",
        )
    if len(steps) > 1:  # runs with the same seed must not send each other's prompts
        return {
            level: with_unique_prompts(workload, level) for level, workload in workloads.items()
        }
    return workloads


def _run_once(invocation: Invocation, plan: RunPlan, show: Show, *, as_json: bool) -> Outcome:
    """Execute the only run and print its result."""
    from loadgen.core.execution.run import execute
    from loadgen.core.metrics.summary import dump_summary
    from loadgen.runs import text
    from loadgen.runs.headline import is_host_busy

    (workload,) = plan.workloads.values()
    summary, folder = execute(workload, plan.settings, show.hearers)
    if as_json:
        sys.stdout.buffer.write(dump_summary(summary))
    else:
        print_report(text.report(summary))
        say(f"results in {folder}")
        if is_host_busy(summary.verdict):
            say(next_step(invocation.arguments, plan.settings))
    return Outcome([NamedSummary(summary.run.workload, summary)], is_complete=True)


def next_step(arguments: Sequence[str], settings: Settings) -> str:
    """Return what to do after a run on a host that was too busy to measure."""
    from loadgen.core.execution import backend

    known = backend.known(settings)
    if known is None or not known.virtual_url:
        return (
            "next: the same from a host of its own; loadgen doctor --url ... says what disturbs "
            "this one"
        )
    changes = ["run", "--url", known.virtual_url]
    if settings.out is not None:
        changes += ["-o", f"{settings.out}-virtual"]
    command = shlex.join(merge_arguments(arguments, changes))
    return (
        f"next: the same load in virtual time, which no other work disturbs:\n  loadgen {command}"
    )


class _RunSeries:
    """Executes several runs, each in a folder of its own below one folder."""

    def __init__(
        self, invocation: Invocation, settings: Settings, show: Show, folder: Path
    ) -> None:
        """Use the settings for each run, with its own folder."""
        self.folder = folder
        self.runs: list[NamedSummary] = []
        self._execute = invocation.executor(show.hearers)
        self._settings = settings
        self._show = show

    def run(self, name: str, workload: Workload) -> bool:
        """Execute a run and return False if it was interrupted."""
        store = f"{self._settings.store}/{name}" if self._settings.store else None
        self._show.step(name)
        settings = replace(self._settings, out=self.folder / name, store=store)
        summary, _ = self._execute(workload, settings)
        self._show.finished(summary)
        self.runs.append(NamedSummary(name, summary))
        return summary.run.state != "interrupted"


@contextmanager
def _open_series(invocation: Invocation, plan: RunPlan, show: Show) -> Iterator[_RunSeries]:
    """Create the folder of several runs and hold it while they are executed."""
    from loadgen.core.execution.folder_names import new_run_folder

    name = next(iter(plan.workloads.values())).name
    now = datetime.now().astimezone()
    with (
        new_run_folder(plan.settings.out, name, now) as folder,
        telling_what_is_kept(folder, f"loadgen report {folder} shows it"),
    ):
        yield _RunSeries(invocation, plan.settings, show, folder)


def _run_levels(invocation: Invocation, plan: RunPlan, show: Show, *, as_json: bool) -> Outcome:
    """Execute one run per concurrency and print a table of all."""
    from loadgen.core.metrics.summary import dump_summary
    from loadgen.core.results import checksums
    from loadgen.runs.sweep_curve import build_curve
    from loadgen.runs.sweep_report import sweep_report

    show.begin(len(plan.workloads), at_most=False)
    with _open_series(invocation, plan, show) as series:
        is_complete = all(series.run(name, level) for name, level in plan.workloads.items())
        checksums.write(series.folder)
        if as_json:
            documents = [dump_summary(summary).strip() for _, summary in series.runs]
            sys.stdout.buffer.write(b"[" + b",\n".join(documents) + b"]\n")
        else:  # the same table as `loadgen report` of the folder
            print_report(sweep_report(build_curve(series.runs)))
            say(f"results in {series.folder}")
    return Outcome(series.runs, is_complete)


def _run_repeatedly(
    invocation: Invocation, plan: RunPlan, repetition: Repetition, show: Show, *, as_json: bool
) -> Outcome:
    """Execute the same load several times and print the spread between the runs."""
    from loadgen.repeated.repeat_loop import run_repeats, with_repeat_seed
    from loadgen.runs.repeats_report import repeats_report
    from loadgen.runs.sweep_curve import build_curve

    (workload,) = plan.workloads.values()
    show.begin(repetition.max_runs, at_most=repetition.count is None)
    with _open_series(invocation, plan, show) as series:
        is_complete = run_repeats(
            repetition,
            lambda: repetition.is_complete([summary for _, summary in series.runs]),
            lambda number: series.run(f"r{number}", with_repeat_seed(workload, number)),
            virtual=plan.settings.virtual,
            say=say,
        )
        repeats = write_repeat_summary(series.folder, repetition, series.runs)
        report = repeats_report(repeats, build_curve(series.runs))
        print_answer(repeats, report, as_json=as_json)
        folder = shlex.quote(str(series.folder))
        say(
            f"results in {folder}; a folder of repeats is one side of: "
            f"loadgen compare {folder} OTHER"
        )
    return Outcome(series.runs, is_complete)
