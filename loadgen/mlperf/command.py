"""The commands `loadgen mlperf server|interactive|offline|accuracy|verdict`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.answers.command import show_progress
from loadgen.cli.help import Command, Group
from loadgen.cli.invocation import Invocation
from loadgen.cli.options import TARGET_OPTIONS, FullOption, add_options
from loadgen.cli.output import print_result, print_status
from loadgen.cli.resume import resume_arguments
from loadgen.cli.run_options import LOAD_OPTIONS
from loadgen.core.errors import INTERRUPTED, UNSOUND, UserError
from loadgen.mlperf.command_options import (
    BenchmarkOption,
    CheckedTestOptions,
    JsonOption,
    OfficialDatasetOption,
    RoundOption,
    TestOptions,
    check_options,
    default_output_dir,
    prepare_test,
)
from loadgen.mlperf.endpoints.command import app as endpoints_app
from loadgen.search.search_command import RunSpreadOption, SustainOption

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.mlperf.accuracy_run import AccuracyRequest
    from loadgen.mlperf.rules import Scenario

app = typer.Typer(
    name="mlperf",
    help=(
        "Run MLPerf-style tests (unofficial): the schedule, metrics and verdict of MLPerf LoadGen "
        "against any endpoint."
    ),
    rich_markup_mode=None,
    cls=Group,
    no_args_is_help=True,
)
app.add_typer(endpoints_app)

TargetRateOption = Annotated[
    float | None,
    typer.Option("--target-qps", metavar="RATE", min=0.001, help="Poisson arrivals in queries/s."),
]
FindPeakOption = Annotated[
    bool,
    typer.Option(
        "--find-peak", help="Search for the highest rate whose run is VALID, then run it."
    ),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="FOLDER",
        help="Resume an interrupted --find-peak in its folder. No other option is needed.",
    ),
]
AccuracyConcurrencyOption = Annotated[
    int,
    typer.Option(
        "-c",
        "--concurrency",
        metavar="N",
        min=1,
        max=100_000,
        help="Number of concurrent requests.",
    ),
]
ExpectedRateOption = Annotated[
    float | None,
    typer.Option(
        "--target-qps",
        "--expected-qps",
        metavar="RATE",
        min=0.001,
        help="Expected samples/s. It sets the size of the query so that the test takes 600 s.",
    ),
]
OfflineConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        "-c",
        metavar="N",
        min=1,
        help="Concurrent requests over HTTP for each target (default 1024).",
    ),
]

with_test_options = add_options(
    without=(
        *(LOAD_OPTIONS - {"grace", "seed", "salt"}),
        "keep",
        "stream",
        "repeat",
    ),
    help_texts={
        "grace": (
            "How long queries may take after the last one was issued. A query that is cut off "
            "did not complete, so the result is INVALID."
        ),
        "seed": "Random seed of synthetic texts. The rules fix lengths and arrival times.",
        "out": "Results folder.",
    },
    default_texts={"grace": "no limit, as in LoadGen"},
)


@app.command(
    "interactive",
    cls=Command,
    help=(
        "Run the Interactive scenario: the Server scenario with tighter limits.\n\n"
        "Example: loadgen mlperf interactive -b llama2-70b --url http://HOST:8000 --target-qps 20"
    ),
)
@app.command("server", cls=Command)
@with_test_options
def run_server_test(
    invocation: Invocation,
    options: TestOptions,
    target_qps: TargetRateOption = None,
    find_peak: FindPeakOption = False,
    resume: ResumeOption = None,
    sustain: SustainOption = None,
    run_spread: RunSpreadOption = None,
) -> int:
    """Run the Server scenario: Poisson arrivals for at least 600 s, limits on TTFT and TPOT p99.

    Exit: 0 VALID, 1 a limit was missed, 3 too short, too few queries, incomplete, or not a valid measurement.

    Example: loadgen mlperf server -b llama2-70b --url http://HOST:8000 --find-peak
    """  # noqa: E501 - the help prints a sentence per line
    from loadgen.core.execution.folder_names import locked_folder
    from loadgen.search.search_plan import choose_sustain_factor, parse_run_spread

    # With a benchmark, the typed options count. They have to describe the same search.
    if resume is not None and options.benchmark is None:
        stored_arguments = _read_search_arguments(resume, invocation)
        if stored_arguments:
            return invocation.run_command_line(stored_arguments)

    scenario: Scenario = "interactive" if invocation.command == "interactive" else "server"
    checked = check_options(invocation, options, scenario, find_peak=find_peak)
    _check_rate_options(target_qps, find_peak=find_peak, resume=resume)
    run_spread_fraction = parse_run_spread(run_spread, checked.settings)

    output_dir = resume or _claim_output_dir(invocation, checked, find_peak=find_peak)
    with locked_folder(output_dir):
        test = prepare_test(invocation, options, checked, output_dir)
        if find_peak:
            sustain_factor = choose_sustain_factor(sustain, checked.settings)
            return test.find_peak(target_qps, sustain_factor, run_spread_fraction)
        assert target_qps is not None  # checked by `_check_rate_options`
        return test.run_once(target_qps)


def _read_search_arguments(search_dir: Path, invocation: Invocation) -> list[str]:
    """Return the command line that resumes the search in a directory, without the program's name.

    The directory stores the command line that started the search. So `mlperf server --resume DIR`
    alone gives, for example, `mlperf server -b llama2-70b --find-peak ... --resume DIR`. The list
    is empty if no command line is stored, because a Python program started the search.
    """
    from loadgen.search import experiment

    stored_command = experiment.read_plan(search_dir).command
    if not stored_command:
        return []
    stored_arguments = stored_command[1:]  # without the name of the program
    return resume_arguments(stored_arguments, invocation.arguments, "--resume", search_dir, depth=2)


def _claim_output_dir(
    invocation: Invocation, checked: CheckedTestOptions, *, find_peak: bool = False
) -> Path:
    """Return the directory for the results of a new test: that of --out, or a new one in results/.

    With --force, results that are in it are moved away.

    Args:
        invocation: The command, which may have the option --force.
        checked: The test, and the settings with the value of --out.
        find_peak: Whether the command is a search for the peak. A search accepts a directory with
            results, because it resumes the search in it.

    Raises:
        UserError: The directory has results of another test.
    """
    from loadgen.core.execution.folder_names import check_no_results

    invocation.move_existing_results(checked.settings.out)
    output_dir = checked.settings.out or default_output_dir(checked.test)
    if not find_peak:
        check_no_results(output_dir)
    return output_dir


def _check_rate_options(target_qps: float | None, *, find_peak: bool, resume: Path | None) -> None:
    """Check the options for the rate and for resuming a search.

    Args:
        target_qps: The query rate.
        find_peak: Whether the command searches for the highest rate.
        resume: The directory of the search to resume, or None to start a new test.

    Raises:
        UserError: There is no rate, the command is no search but should be resumed, or the
            directory has no search.
    """
    from loadgen.search import experiment

    if target_qps is None and not find_peak:
        raise UserError(
            "missing_option",
            "the test needs a query rate",
            "--target-qps",
            "use --target-qps 182, or --find-peak to search for the highest rate",
        )

    if resume is not None and not find_peak:
        raise UserError("no_effect", "only a search can be resumed", "--resume", "add --find-peak")

    if resume is not None:
        experiment.read_plan(resume)  # raises UserError if the folder has no search


@app.command("offline", cls=Command)
@with_test_options
def run_offline_test(
    invocation: Invocation,
    options: TestOptions,
    target_qps: ExpectedRateOption = None,
    concurrency: OfflineConcurrencyOption = None,
) -> int:
    """Run the Offline scenario: one query of all samples; tokens/s until the last one completes.

    Without --target-qps, a pass of the data set is run first, to size the query so that it takes 600 s.
    Exit: 0 VALID, 3 too short or incomplete.

    Example: loadgen mlperf offline -b llama2-70b --url http://HOST:8000
    """  # noqa: E501 - the help prints a sentence per line
    from loadgen.core.execution.folder_names import locked_folder

    checked = check_options(invocation, options, "offline")
    output_dir = _claim_output_dir(invocation, checked)
    with locked_folder(output_dir):
        test = prepare_test(invocation, options, checked, output_dir)
        total_concurrency = _offline_concurrency(concurrency, checked.settings)
        expected_rate = target_qps or test.measure_offline_rate(total_concurrency)
        if expected_rate is None:
            return INTERRUPTED
        return test.run_once(expected_rate, total_concurrency)


def _offline_concurrency(per_target: int | None, settings: Settings) -> int | None:
    """Return the concurrent requests of all targets, or None to send every sample at once.

    Only a simulated server in virtual time gets every sample at once: no client can hold open a
    million connections.
    """
    from loadgen.mlperf.run import OFFLINE_CONCURRENCY

    if per_target is None:
        if settings.virtual:
            return None
        per_target = OFFLINE_CONCURRENCY
    return per_target * len(settings.endpoints)


@app.command("accuracy", cls=Command)
@add_options(
    only=TARGET_OPTIONS,
    without=("stream",),
    help_texts={"tokenizer": "Tokenizer that writes token IDs to mlperf_log_accuracy.json."},
)
def measure_accuracy(
    invocation: Invocation,
    benchmark: BenchmarkOption,
    dataset: OfficialDatasetOption,
    round_name: RoundOption = None,
    concurrency: AccuracyConcurrencyOption = 64,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FOLDER", help="Results folder.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print mlperf_accuracy.json.")
    ] = False,
    full: FullOption = False,
) -> int:
    """Send every sample once, compare ROUGE with the rules' targets, and make the checks of TEST06.

    Latencies are not measured. With --tokenizer, mlperf_log_accuracy.json is written in LoadGen's format.

    Exit: 0 99 % is met, 1 it is missed, 2 wrong usage, 3 samples or responses are missing, or not reachable.

    Example: loadgen mlperf accuracy -b llama2-70b --dataset open_orca.parquet --url http://HOST:8000 --tokenizer ./llama2
    """  # noqa: E501 - the help prints a sentence per line
    from loadgen.core.execution.backend import running_server
    from loadgen.core.execution.folder_names import check_no_results, locked_folder
    from loadgen.mlperf import rules
    from loadgen.mlperf.accuracy import reference_accuracy
    from loadgen.mlperf.accuracy_run import AccuracyRequest

    reference_accuracy(benchmark)  # raises UserError for a benchmark that is not scored
    test = rules.create_test(benchmark, "offline", round_name)
    settings = invocation.settings(needs_text="accuracy is scored on texts")
    _check_single_endpoint(settings)
    output_dir = out or default_output_dir(test)
    check_no_results(output_dir)

    with locked_folder(output_dir), running_server(settings) as endpoint:
        request = AccuracyRequest(
            test=test,
            dataset_path=dataset,
            endpoint=endpoint,
            output_dir=output_dir,
            tokenizer_name=settings.tokenizer,
            concurrency=concurrency,
            simulated=settings.backend.simulated,
        )
        return _run_and_print_accuracy(request, as_json=as_json, full=full)


def _run_and_print_accuracy(request: AccuracyRequest, *, as_json: bool, full: bool) -> int:
    """Run accuracy mode with a progress display, print the result and return the exit code."""
    from loadgen.mlperf.accuracy_run import run_accuracy_test
    from loadgen.mlperf.accuracy_text import create_report

    total_samples = request.test.samples
    result, failures = run_accuracy_test(
        request, on_progress=lambda done: show_progress("samples", done, total_samples)
    )
    print_result(result, create_report(result, failures), as_json=as_json, full=full)

    if not as_json:
        print_status(f"Results: {request.output_dir}")

    return int(result.exit_code)


def _check_single_endpoint(settings: Settings) -> None:
    """Raise UserError unless the target is one endpoint over HTTP, as accuracy mode requires."""
    if settings.targets or settings.virtual:
        raise UserError(
            "unsupported",
            "accuracy mode sends to one endpoint over HTTP",
            "--url",
            "give --url http://HOST:8000",
        )


@app.command("verdict", cls=Command)
def recompute_verdict(
    folder: Annotated[
        Path,
        typer.Argument(
            help=(
                "Folder of a loadgen mlperf run. For a search, the folder of its confirmation run."
            )
        ),
    ],
    as_json: JsonOption = False,
    full: FullOption = False,
) -> int:
    """Compute the verdict of a stored run again from its records. Nothing is written.

    Exit: that of the run; 3 if the verdict differs from the stored one.

    Example: loadgen mlperf verdict results/mlperf-llama2-70b-server
    """
    from loadgen.core.run_folder import read_summary
    from loadgen.mlperf import run, text
    from loadgen.runs.part_sections import part_sections

    stored = run.read_result(folder)
    summary = read_summary(folder)
    recomputed = run.recompute_result(folder, summary)
    report = text.create_report(
        recomputed,
        gpus=summary.target.gpus,
        part_sections=part_sections(summary),
        run_dir=str(folder),
    )
    print_result(recomputed, report, as_json=as_json, full=full)

    if not recomputed.has_same_values(stored):
        print_status(
            "The records give another result than the stored one, so one of them was changed"
        )
        return UNSOUND

    if not run.is_reliable(summary):
        return UNSOUND

    return int(recomputed.exit_code)
