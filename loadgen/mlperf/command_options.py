"""The options of `loadgen mlperf server|interactive|offline` and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from msgspec.structs import replace

from loadgen.cli import completion
from loadgen.cli.invocation import Invocation
from loadgen.cli.option_parsers import parse_option
from loadgen.cli.options import FullOption, default_output_folder
from loadgen.core import units
from loadgen.core.errors import CombinedError, LoadgenError, UserError, collecting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadgen.core.execution.plan import Settings
    from loadgen.core.workload import Overrides
    from loadgen.mlperf.prepared_test import PreparedTest
    from loadgen.mlperf.rules import Scenario, Test
    from loadgen.mlperf.run import DatasetRequests

HARNESSES = ("own", "loadgen")
"""Who issues the queries: this load generator, or the official LoadGen."""


def _list_benchmarks() -> list[str]:
    """Return the names of the benchmarks, for the completion of the shell."""
    from loadgen.mlperf.rules import load_rules

    return list(load_rules().benchmarks)


JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", rich_help_panel="Output", help="Print mlperf.json instead of the report."
    ),
]
RoundOption = Annotated[
    str | None,
    typer.Option(
        "--round",
        metavar="ROUND",
        help="MLPerf round, which decides limits and seeds: v5.1 or v6.1.",
    ),
]
BenchmarkOption = Annotated[
    str, typer.Option("--benchmark", "-b", metavar="NAME", help="Benchmark: llama2-70b.")
]
OfficialDatasetOption = Annotated[
    Path,
    typer.Option(
        "--dataset", metavar="FILE", help="Official data set with its reference responses."
    ),
]


@dataclass(frozen=True, kw_only=True)
class TestOptions:
    """The options that the three performance tests share."""

    __test__ = False  # for pytest: not a test case

    benchmark: Annotated[
        str | None,
        typer.Option(
            "--benchmark",
            "-b",
            metavar="NAME",
            help="Benchmark: llama2-70b, llama3.1-8b, ... (see docs/reference/mlperf.md).",
            autocompletion=completion.complete_choice(_list_benchmarks),
        ),
    ] = None
    round_name: RoundOption = None
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset",
            metavar="FILE",
            help="Official data set as .jsonl or .parquet (default: a synthetic set).",
        ),
    ] = None
    mean_output: Annotated[
        float | None,
        typer.Option(
            "--mean-output",
            metavar="TOKENS",
            help="Mean output length of the synthetic set, to match a published result.",
        ),
    ] = None
    mean_input: Annotated[
        float | None,
        typer.Option(
            "--mean-input", metavar="TOKENS", help="Mean input length of the synthetic set."
        ),
    ] = None
    min_duration: Annotated[
        str | None,
        typer.Option(
            "--min-duration",
            metavar="TIME",
            help="Minimum duration in place of the rules' 10m. A number without a unit is in "
            "seconds. The result says that it differs from the rules.",
        ),
    ] = None
    harness: Annotated[
        str,
        typer.Option(
            "--harness",
            metavar="NAME",
            help=(
                "Who issues the queries: own (loadgen), or loadgen for the official MLPerf LoadGen."
            ),
        ),
    ] = "own"
    as_json: JsonOption = False
    full: FullOption = False


class CheckedTestOptions(NamedTuple):
    """Options without errors: the test, how requests are sent, and changes of the load."""

    test: Test
    settings: Settings
    overrides: Overrides


def check_options(
    invocation: Invocation, options: TestOptions, scenario: Scenario, *, find_peak: bool = False
) -> CheckedTestOptions:
    """Return the test and settings that the options specify, after all options were checked.

    Args:
        invocation: The command.
        options: The options of the test.
        scenario: The scenario of the command.
        find_peak: Whether the command searches for the peak, which the official LoadGen cannot.

    Raises:
        CombinedError: Options are wrong. It has all errors, so that one command shows them.
    """
    test: Test | None = None
    settings: Settings | None = None

    errors: list[LoadgenError] = []
    with collecting(errors):  # adds an error that is raised within, and goes on after the block
        test = _create_test(options, scenario)

    with collecting(errors):
        settings = invocation.settings(needs_text="MLPerf rules apply to generated tokens")

    if options.harness == "loadgen" and settings is not None:
        errors += _official_loadgen_errors(invocation, settings, find_peak=find_peak)

    overrides = invocation.overrides()
    errors += overrides.errors
    errors += _harness_errors(options)
    errors += _dataset_errors(invocation, options)
    if errors or test is None or settings is None:
        raise CombinedError(errors)

    return CheckedTestOptions(test, settings, overrides)


def _create_test(options: TestOptions, scenario: Scenario) -> Test:
    """Return the requirements of the test that the options select.

    Raises UserError for an unknown benchmark or round, or a minimum duration below 1 s.
    """
    from loadgen.mlperf import rules

    if options.benchmark is None:
        benchmarks = ", ".join(rules.load_rules().benchmarks)
        raise UserError(
            "missing_option",
            "the test needs a benchmark",
            "--benchmark",
            f"give -b with one of {benchmarks}",
        )

    min_duration_s = parse_option("--min-duration", options.min_duration, units.seconds)
    if min_duration_s is not None and min_duration_s < 1:
        raise UserError(
            "out_of_range",
            "must be at least 1 s",
            f"--min-duration {options.min_duration}",
            "give --min-duration 10m",
        )

    return rules.create_test(
        options.benchmark, scenario, options.round_name, min_duration_s=min_duration_s or 0
    )


def _harness_errors(options: TestOptions) -> Iterator[UserError]:
    """Yield an error if the harness, which issues the queries, is unknown."""
    if options.harness not in HARNESSES:
        yield UserError(
            "unknown_name",
            f"unknown harness {options.harness!r}",
            "--harness",
            f"known: {', '.join(HARNESSES)}",
        )


def _dataset_errors(invocation: Invocation, options: TestOptions) -> Iterator[UserError]:
    """Yield an error for each option that conflicts with --dataset.

    A data set from a file is sent unchanged. So options that change a generated data set cannot be
    used with it: the mean lengths, and the seed and salt of generated texts.

    Args:
        invocation: The command, with the options that all commands have, such as --seed.
        options: The options that only tests have, such as --dataset.
    """
    if options.dataset is None:
        return

    if options.mean_output or options.mean_input:
        yield UserError(
            "conflict",
            "--mean-output and --mean-input apply to the synthetic set only",
            "--dataset",
            "remove --mean-output and --mean-input",
        )

    for option_name in ("seed", "salt"):
        option_value = invocation[option_name]
        if option_value is not None:
            yield UserError(
                "conflict",
                "the data set is always sent unchanged",
                f"--{option_name} {option_value}",
                f"leave --{option_name} out",
            )


def _official_loadgen_errors(
    invocation: Invocation, settings: Settings, *, find_peak: bool
) -> Iterator[UserError]:
    """Yield an error for each option that the official LoadGen does not support.

    The official LoadGen issues queries from one process to one endpoint at a fixed rate, and waits
    for every query.

    Args:
        invocation: The command, with the options that all commands have.
        settings: The endpoints.
        find_peak: Whether the command searches for the peak.
    """
    endpoint_count = len(settings.endpoints)
    workers = invocation["workers"]

    if endpoint_count > 1:
        problem = f"it drives one endpoint, but {endpoint_count} are specified"
        yield _unsupported_by_loadgen(problem, hint="use one address for all of them")

    if workers not in (None, "1", "auto"):
        problem = f"it issues queries from one process, not from {workers}"
        yield _unsupported_by_loadgen(problem, hint="leave --workers out")

    if invocation["ray"] is not None:
        problem = "it issues queries from one process, not from a cluster"
        yield _unsupported_by_loadgen(problem, hint="leave --ray out")

    if find_peak:
        hint = "search with --find-peak first, then use the rate as --target-qps"
        yield _unsupported_by_loadgen("it tests one rate and does not search", hint=hint)

    if invocation["grace"] is not None:
        yield _unsupported_by_loadgen("it waits for every query", hint="leave --grace out")

    if invocation["server_metrics"] not in (None, ["off"]):
        problem = "server metrics are not collected during its run"
        yield _unsupported_by_loadgen(problem, hint="leave --server-metrics out")


def _unsupported_by_loadgen(problem: str, *, hint: str) -> UserError:
    """Return the error that the official LoadGen does not support an option, with what to do."""
    return UserError(
        "unsupported",
        f"the official LoadGen: {problem}",
        "--harness loadgen",
        f"{hint}; or use --harness own",
    )


def default_output_dir(test: Test) -> Path:
    """Return a new directory in results/ that is named after the test."""
    return default_output_folder(f"mlperf-{test.benchmark}-{test.scenario}")


def prepare_test(
    invocation: Invocation, options: TestOptions, checked: CheckedTestOptions, output_dir: Path
) -> PreparedTest:
    """Return the test with its data set, ready to run.

    The data set is the file of --dataset, or else a synthetic one. The requests of a file are
    written into the output directory, and the test gets its number of samples.

    Args:
        invocation: The command.
        options: The options as the user typed them.
        checked: The test and settings that `check_options` made from these options.
        output_dir: The directory of the results, which the caller has locked.

    Raises:
        UserError: The file of --dataset cannot be read.
        CombinedError: The file has prompts that cannot be sent.
    """
    from loadgen.mlperf import run
    from loadgen.mlperf.prepared_test import PreparedTest

    if options.dataset is not None:
        data, test = run.write_official_requests(checked.test, options.dataset, output_dir)
    else:
        data = _create_synthetic_data(options, checked)
        test = checked.test

    # Prompts of token IDs need the completions API, whatever the user specified.
    settings = replace(checked.settings, api=data.api or checked.settings.api)

    # The option --grace limits how long the last queries may take. By default they may take a day.
    drain_ns = checked.overrides.grace
    if drain_ns is None:
        drain_ns = run.MAX_WAIT_NS

    return PreparedTest(
        test=test,
        data=data,
        settings=settings,
        drain_ns=drain_ns,
        invocation=invocation,
        output_dir=output_dir,
        uses_official_loadgen=options.harness == "loadgen",
        as_json=options.as_json,
        full=options.full,
    )


def _create_synthetic_data(options: TestOptions, checked: CheckedTestOptions) -> DatasetRequests:
    """Return the synthetic data set with the mean lengths, seed and salt of the options."""
    from loadgen.mlperf import run

    data = run.synthetic_data(
        checked.test, mean_input=options.mean_input, mean_output=options.mean_output
    )
    return data._replace(seed=checked.overrides.seed, salt=checked.overrides.salt)
