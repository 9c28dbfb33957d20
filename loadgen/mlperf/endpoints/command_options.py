"""The options of `loadgen mlperf endpoints plan|run` and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import completion
from loadgen.cli.option_parsers import parse_option
from loadgen.core import units
from loadgen.core.errors import CombinedError, UserError
from loadgen.mlperf.endpoints.points import (
    Curve,
    OfflineChoice,
    build_curve,
    required_points,
    spread_concurrencies,
)
from loadgen.mlperf.endpoints.rules import MAX_POINTS, find_benchmark, find_seed_set, load_rules

if TYPE_CHECKING:
    from loadgen.mlperf.endpoints.workloads import CurveData

OFFLINE_CHOICES: tuple[OfflineChoice, ...] = ("dedicated", "elected")

DEFAULT_MAX_POINT_TIME = "12h"
"""The default limit on the time of one run. The rules have none."""


def list_benchmarks() -> list[str]:
    """Return the names of the benchmarks, for the completion of the shell."""
    return list(load_rules().benchmarks)


@dataclass(frozen=True, kw_only=True)
class CurveOptions:
    """The options that describe a curve."""

    benchmark: Annotated[
        str,
        typer.Option(
            "--benchmark",
            "-b",
            metavar="NAME",
            help="Benchmark: llama3.1-8b, gpt-oss-120b or deepseek-r1.",
            autocompletion=completion.complete_choice(list_benchmarks),
        ),
    ]
    c_max: Annotated[
        int | None,
        typer.Option(
            "--c-max",
            metavar="N",
            help="Maximum Supported Concurrency, above 32 (default: the highest --concurrency).",
        ),
    ] = None
    c_min: Annotated[
        int, typer.Option("--c-min", metavar="N", help="Lowest concurrency of the curve, 1 to 32.")
    ] = 1
    points: Annotated[
        int | None,
        typer.Option(
            "--points",
            metavar="N",
            help="Number of points, the Offline run included (default: the fewest allowed).",
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            "-c",
            metavar="LIST",
            help="Concurrencies of the points, instead of --c-min and --points: 1,8,32,128,512.",
        ),
    ] = None
    offline: Annotated[
        str,
        typer.Option(
            "--offline",
            metavar="HOW",
            help="Offline point: dedicated (a run of its own), or elected (the point at C_max).",
        ),
    ] = "dedicated"
    seed_set: Annotated[
        str, typer.Option("--seed-set", metavar="ID", help="Published seed set.")
    ] = "A"
    max_point_time: Annotated[
        str,
        typer.Option(
            "--max-point-time",
            metavar="TIME",
            help="Longest time of one run: 8h. A run sends complete passes of the data set.",
        ),
    ] = DEFAULT_MAX_POINT_TIME
    dataset: Annotated[
        Path | None,
        typer.Option(
            "--dataset",
            metavar="FILE",
            help="Official data set as .jsonl or .parquet (default: a synthetic set).",
        ),
    ] = None
    mean_input: Annotated[
        float | None,
        typer.Option(
            "--mean-input", metavar="TOKENS", help="Mean input length of the synthetic set."
        ),
    ] = None
    mean_output: Annotated[
        float | None,
        typer.Option(
            "--mean-output", metavar="TOKENS", help="Mean output length of the synthetic set."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PriceOptions:
    """The options for the cost of a curve."""

    price_per_hour: Annotated[
        float | None,
        typer.Option(
            "--price-per-hour", metavar="AMOUNT", min=0, help="Price of the system per hour."
        ),
    ] = None
    currency: Annotated[
        str, typer.Option("--currency", metavar="CODE", help="Currency of the price.")
    ] = "USD"


@dataclass(frozen=True, kw_only=True)
class StatedFactOptions:
    """The options that state facts about the system after its runs, for the package."""

    system: Annotated[
        Path | None,
        typer.Option(
            "--system",
            metavar="FILE",
            help="YAML file that describes the system, for --package. It adds to that of the runs.",
        ),
    ] = None
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--metadata",
            metavar="KEY=VALUE",
            help="Fact for --package: dataset_link=URL or power_source=URL. Repeatable.",
        ),
    ] = None


def read_stated_metadata(options: StatedFactOptions) -> dict[str, str]:
    """Return what the user says about the system, as values by key: {"host.os": "Ubuntu 24.04"}.

    The user can name a file with --system and single values with --metadata. A key that is in both
    has the value of --metadata.

    Raises:
        UserError: The system file cannot be read.
        CombinedError: The system file or a pair of --metadata has errors.
    """
    from loadgen.cli.user_metadata import parse_metadata
    from loadgen.core.execution.system_file import read_system_file

    parsed = parse_metadata(options.metadata or ())
    if parsed.errors:
        raise CombinedError(parsed.errors)

    metadata_of_options = dict(parsed.pairs)
    if options.system is None:
        return metadata_of_options

    metadata_of_file = read_system_file(options.system).metadata
    return {**metadata_of_file, **metadata_of_options}


def load_data(options: CurveOptions) -> CurveData:
    """Return the data set of the benchmark: the file of --dataset, or a synthetic data set.

    Raises:
        UserError: The benchmark is unknown, the file cannot be used, or options contradict it.
        CombinedError: Rows of the file have mistakes.
    """
    from loadgen.mlperf.endpoints import workloads

    find_benchmark(options.benchmark)  # raises UserError for an unknown name
    if options.dataset is None:
        return workloads.synthetic_data(
            options.benchmark, mean_input=options.mean_input, mean_output=options.mean_output
        )

    has_mean_lengths = bool(options.mean_input or options.mean_output)
    if has_mean_lengths:
        raise UserError(
            "conflict",
            "--mean-output and --mean-input apply to the synthetic set only",
            "--dataset",
            "remove --mean-output and --mean-input",
        )
    return workloads.read_data(options.benchmark, options.dataset)


def build_curve_from_options(options: CurveOptions, dataset_size: int) -> Curve:
    """Return the measurement points that the options describe.

    Raises:
        UserError: An option is wrong or missing.
    """
    find_seed_set(options.seed_set)  # raises UserError for an unknown name
    offline = _parse_offline(options.offline)
    concurrencies = _parse_concurrencies(options, offline)
    c_max = max(concurrencies) if options.c_max is None else options.c_max
    return build_curve(concurrencies, c_max=c_max, dataset_size=dataset_size, offline=offline)


def parse_max_point_s(options: CurveOptions) -> float:
    """Return the value of --max-point-time, the longest time of one run, in seconds.

    Raises:
        UserError: The value is no time, or 0.
    """
    max_point_s = parse_option("--max-point-time", options.max_point_time, units.seconds)
    if not max_point_s:
        raise UserError(
            "out_of_range",
            "must be above 0",
            f"--max-point-time {options.max_point_time}",
            "give --max-point-time 12h",
        )
    return max_point_s


def _parse_offline(text: str) -> OfflineChoice:
    """Return the value of --offline: how the Offline point is measured.

    Raises:
        UserError: The value is unknown.
    """
    for choice in OFFLINE_CHOICES:
        if choice == text:
            return choice
    raise UserError(
        "unknown_name",
        f"unknown Offline choice {text!r}",
        "--offline",
        f"known: {', '.join(OFFLINE_CHOICES)}",
    )


def _parse_concurrencies(options: CurveOptions, offline: OfflineChoice) -> list[int]:
    """Return the concurrencies of the measurement points.

    The option --concurrency lists the concurrencies. Without this option, as many concurrencies as
    --points says are spread from --c-min to --c-max.

    Raises:
        UserError: An option is missing or wrong.
    """
    if options.concurrency is not None:
        return [_parse_concurrency(text) for text in options.concurrency.split(",")]

    if options.c_max is None:
        raise UserError(
            "missing_option",
            "a curve needs its highest concurrency",
            "--c-max",
            "give --c-max 1024, or the points: --concurrency 1,4,11,33,101,321,1024",
        )

    least_count = required_points(offline)
    count = least_count if options.points is None else options.points
    if not least_count <= count <= MAX_POINTS:
        raise UserError(
            "out_of_range",
            f"a curve has {least_count} to {MAX_POINTS} points, not {count}",
            f"--points {count}",
            f"give --points {least_count} (sections 5.3 and 5.6 of the rules)",
        )

    # An Offline run is a point without a concurrency of its own.
    offline_runs = 1 if offline == "dedicated" else 0
    return spread_concurrencies(options.c_min, options.c_max, count - offline_runs)


def _parse_concurrency(text: str) -> int:
    """Return one number of the list of --concurrency.

    Raises:
        UserError: The text is not an integer, or the integer is 0.
    """
    concurrency = parse_option("--concurrency", text.strip(), units.count)
    if not concurrency:
        raise UserError(
            "out_of_range", "must be at least 1", f"--concurrency {text}", "give 1,8,32,128,512"
        )
    return concurrency
