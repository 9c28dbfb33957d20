"""The commands `loadgen mlperf endpoints plan|run|check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli.help import Command, Group
from loadgen.cli.invocation import Invocation
from loadgen.cli.options import FullOption, add_options, default_output_folder
from loadgen.cli.output import add_resume_hint, print_result, print_status
from loadgen.cli.run_options import LOAD_OPTIONS
from loadgen.core.errors import INTERRUPTED, OK, SLO_MISSED, UserError
from loadgen.mlperf.endpoints.command_options import (
    CurveOptions,
    PriceOptions,
    StatedFactOptions,
    build_curve_from_options,
    load_data,
    parse_max_point_s,
    read_stated_metadata,
)
from loadgen.result_kinds import PAGE

app = typer.Typer(
    name="endpoints",
    help=(
        "Plan, rehearse and check a curve of MLPerf Endpoints (unofficial): points with a fixed "
        "concurrency, each measured in a steady window."
    ),
    rich_markup_mode=None,
    cls=Group,
    no_args_is_help=True,
)

SourceOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FOLDER",
        help="Runs with a fixed concurrency that give the rates, such as a sweep.",
    ),
]
PowerOption = Annotated[
    float | None,
    typer.Option(
        "--power-kw",
        metavar="KW",
        min=0.001,
        help="Provisioned power of the system in kW, for tokens/s per kW. Default: provisioned_kw "
        "of the system file (--system).",
    ),
]


@app.command("plan", cls=Command)
@add_options(only=("url",), help_texts={"url": "Simulated server that gives the rates."})
def plan_curve(
    invocation: Invocation,
    options: CurveOptions,
    price: PriceOptions,
    source: SourceOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print the plan as JSON.")
    ] = False,
    full: FullOption = False,
) -> int:
    """Show regions, points, time and cost of a curve, and which points get no steady window.

    Nothing is sent to a real server: rates come from --url sim:PRESET or from earlier runs.

    Exit: 0 every point is expected to get its steady window, 1 a point or the curve misses a rule, 2 wrong usage.

    Example: loadgen mlperf endpoints plan -b llama3.1-8b --c-max 1024 --url sim:gb300-vm --price-per-hour 60
    """  # noqa: E501 - the help prints a sentence per line
    from loadgen.mlperf.endpoints import plan_text, rate_sources, rules
    from loadgen.mlperf.endpoints.plan import PlanSettings
    from loadgen.mlperf.endpoints.plan import plan_curve as create_plan

    if source is None and invocation["url"] is None:
        raise UserError(
            "missing_option",
            "a plan needs the rates of the system",
            "--url",
            "use --url sim:PRESET, or --from FOLDER with a sweep",
        )

    # The measurement points.
    data = load_data(options)
    curve = build_curve_from_options(options, data.size)
    seed_set = rules.find_seed_set(options.seed_set)

    # The speed of the system, from earlier runs or from trials on a simulated server.
    if source is not None:
        rates = rate_sources.read_rates(source)
        rate_source = f"earlier runs in {source}"
        is_simulated = rate_sources.is_simulated(source)
    else:
        settings = invocation.settings()
        rates = rate_sources.simulate_rates(curve.points, data, seed_set, settings)
        rate_source = f"short trials on {settings.display_name}"
        is_simulated = True

    plan_settings = PlanSettings(
        benchmark=options.benchmark,
        dataset_size=data.size,
        accuracy_samples=rules.find_benchmark(options.benchmark).accuracy_samples,
        seed_set=options.seed_set,
        target_cohort=seed_set.cohort,
        max_point_s=parse_max_point_s(options),
        price_per_hour=price.price_per_hour,
        currency=price.currency,
    )
    plan = create_plan(
        curve, rates, plan_settings, rate_source=rate_source, is_simulated=is_simulated
    )
    print_result(plan, plan_text.create_report(plan), as_json=as_json, full=full)

    misses_rule = bool(plan.problems) or any(point.misses_window for point in plan.points)
    return SLO_MISSED if misses_rule else OK


@app.command("run", cls=Command)
@add_options(
    without=(*LOAD_OPTIONS, "keep", "stream", "repeat", "seed", "salt"),
    help_texts={
        "out": "Results folder. The same command with the same folder resumes the curve.",
    },
)
def run_curve(
    invocation: Invocation,
    options: CurveOptions,
    source: SourceOption = None,
    power_kw: PowerOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print endpoints.json.")
    ] = False,
    full: FullOption = False,
) -> int:
    """Run the points of a curve one after the other, and find the steady window of each.

    The order of samples and the salt follow from the published seed set. Without --from, short trials at each concurrency measure how many passes of the data set a run needs.

    Exit: 0 every point is measured, 2 wrong usage, 3 unreachable or a point is not a valid measurement, 130 interrupted.

    Example: loadgen mlperf endpoints run -b llama3.1-8b --c-max 1024 --url http://HOST:8000 -o curve
    """  # noqa: E501 - the help prints a sentence per line
    from loadgen.core.execution.folder_names import locked_folder
    from loadgen.mlperf.endpoints import curve_report, curve_run, kind
    from loadgen.mlperf.endpoints.curve_plan import CurveRequest, prepare_curve_run
    from loadgen.mlperf.endpoints.rules import find_benchmark

    find_benchmark(options.benchmark)  # raises UserError before a folder is created
    request = CurveRequest(options, rates_from=source, provisioned_power_kw=power_kw)
    output_dir = _prepare_output_dir(invocation, options.benchmark)
    resume_hint = f"the same command with --out {output_dir} resumes it"
    with locked_folder(output_dir), add_resume_hint(output_dir, resume_hint):
        prepared = prepare_curve_run(invocation, request, output_dir)
        outcome = curve_run.run_curve(prepared)

    result = outcome.result
    print_result(result, curve_report.create_report(result), as_json=as_json, full=full)
    print_status(f"Page: {output_dir / PAGE}. Rules: loadgen mlperf endpoints check {output_dir}")
    if outcome.is_interrupted:
        print_status(f"Interrupted: {resume_hint}")
        return INTERRUPTED
    return kind.exit_code(result)


def _prepare_output_dir(invocation: Invocation, benchmark: str) -> Path:
    """Return the directory of --out, or a new one in results/.

    With --force, results that are in it are moved away.
    """
    out: Path | None = None if invocation["out"] is None else Path(invocation["out"])
    invocation.move_existing_results(out)
    return out or default_output_folder(f"mlperf-endpoints-{benchmark}")


@app.command("check", cls=Command)
@add_options(only=())
def check_rules(
    facts: StatedFactOptions,
    folder: Annotated[Path, typer.Argument(help="Results folder of loadgen mlperf endpoints run.")],
    package: Annotated[
        Path | None,
        typer.Option(
            "--package",
            metavar="FOLDER",
            help="Also write the files in the layout of the reference submission checker.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print the checks as JSON.")
    ] = False,
    full: FullOption = False,
) -> int:
    """Check the rules on a curve, each by its section, with the value found.

    Metrics and windows are computed again from the records of the runs. Rules that files cannot show are listed as such.

    Exit: 0 nothing but the use of the reference client is missed, 1 a rule is missed or a point flagged, 2 wrong usage.

    Example: loadgen mlperf endpoints check curve --package package
    """  # noqa: E501 - the help prints a sentence per line
    from loadgen.cli.output import warn_if_changed
    from loadgen.mlperf.endpoints import check_text
    from loadgen.mlperf.endpoints.curve_result import read_curve
    from loadgen.mlperf.endpoints.curve_run import measure_curve
    from loadgen.mlperf.endpoints.rule_checks import check_curve
    from loadgen.mlperf.endpoints.submission_package import write_package
    from loadgen.mlperf.endpoints.system_files import add_stated_metadata

    stated_metadata = read_stated_metadata(facts)  # raises for a wrong file before anything is read
    stored_curve = read_curve(folder)
    warn_if_changed(folder)

    # The checks of the rules.
    result = measure_curve(folder, stored_curve)
    check = check_curve(result)
    print_result(check, check_text.create_report(check), as_json=as_json, full=full)

    # The files of a submission. They also have what the user stated about the system.
    if package is not None:
        result_with_facts = add_stated_metadata(result, stated_metadata)
        root = write_package(package, result_with_facts)
        print_status(f"Package: {root}, marked as a rehearsal")

    has_problem = check.count("missed") > 0 or check.count("flagged") > 0
    return SLO_MISSED if has_problem else OK
