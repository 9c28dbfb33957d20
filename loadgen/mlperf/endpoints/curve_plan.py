"""Prepares the run of a curve: its points, its data set, and how many requests each point sends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loadgen.cli.output import print_status
from loadgen.core import format
from loadgen.core.errors import UserError
from loadgen.core.execution.system_file import read_provisioned_kw
from loadgen.mlperf.endpoints import rate_sources
from loadgen.mlperf.endpoints.command_options import (
    CurveOptions,
    build_curve_from_options,
    load_data,
    parse_max_point_s,
)
from loadgen.mlperf.endpoints.curve_result import CURVE_FILE, StoredCurve, read_curve
from loadgen.mlperf.endpoints.curve_run import CurveRun
from loadgen.mlperf.endpoints.plan import CurvePlan, PlanSettings, plan_curve
from loadgen.mlperf.endpoints.rules import find_benchmark, find_seed_set

if TYPE_CHECKING:
    from loadgen.cli.invocation import Invocation
    from loadgen.core.execution.plan import Settings
    from loadgen.mlperf.endpoints.points import Curve
    from loadgen.mlperf.endpoints.rates import ConcurrencyRate
    from loadgen.mlperf.endpoints.workloads import CurveData


class CurveRequest(NamedTuple):
    """A curve as the user requested it.

    Attributes:
        options: The options that describe the curve.
        rates_from: Earlier runs that give the expected rates. None to measure them by trials.
        provisioned_power_kw: The provisioned power of the system in kW. None for that of the system
            file, if it has one.
    """

    options: CurveOptions
    rates_from: Path | None
    provisioned_power_kw: float | None


def prepare_curve_run(invocation: Invocation, request: CurveRequest, output_dir: Path) -> CurveRun:
    """Read the options and the data set of a curve, and decide how many requests each point sends.

    The first command with an output directory measures the speed of the server to decide this. A
    command that resumes the curve reads the numbers of requests from the directory.

    Raises:
        UserError: An option is wrong, or a point does not fit the limit on time.
        CombinedError: Options of the server are wrong.
    """
    from loadgen.runs.run_display import create_display

    options = request.options
    data = load_data(options)
    curve = build_curve_from_options(options, data.size)
    settings = invocation.settings(needs_text="MLPerf Endpoints measures generated tokens")
    max_point_s = parse_max_point_s(options)
    display = create_display(invocation, quiet=True, has_line_per_step=True)

    is_resumed = (output_dir / CURVE_FILE).is_file()
    if is_resumed:
        request_counts = read_curve(output_dir).requests
    else:
        plan = _plan_requests(request, data, curve, settings, max_point_s)
        request_counts = {planned.point.name: planned.requests for planned in plan.points}

    stored_curve = _create_stored_curve(
        request, data, curve, settings, request_counts=request_counts, max_point_s=max_point_s
    )
    execute = invocation.executor(display.event_handlers)
    return CurveRun(stored_curve, data, settings, output_dir, execute, display)


def _create_stored_curve(
    request: CurveRequest,
    data: CurveData,
    curve: Curve,
    settings: Settings,
    *,
    request_counts: dict[str, int],
    max_point_s: float,
) -> StoredCurve:
    """Return the description of a curve that is stored with its results.

    Args:
        request: The curve as the user requested it.
        data: The samples.
        curve: The measurement points.
        settings: The server, and how requests are sent.
        request_counts: How many requests each point sends, by the name of the point.
        max_point_s: The limit on the time of one run, in seconds.
    """
    provisioned_power_kw = request.provisioned_power_kw
    if provisioned_power_kw is None:
        provisioned_power_kw = read_provisioned_kw(dict(settings.metadata))

    options = request.options
    return StoredCurve(
        # The benchmark.
        benchmark=options.benchmark,
        model=find_benchmark(options.benchmark).model,
        data_name=data.name,
        dataset_size=data.size,
        seed_set=options.seed_set,
        target_cohort=find_seed_set(options.seed_set).cohort,
        # The load.
        curve=curve,
        requests=request_counts,
        max_point_s=max_point_s,
        # The system.
        target=settings.display_name,
        is_simulated=settings.backend.simulated,
        provisioned_power_kw=provisioned_power_kw,
        command=settings.command,
    )


def _plan_requests(
    request: CurveRequest,
    data: CurveData,
    curve: Curve,
    settings: Settings,
    max_point_s: float,
) -> CurvePlan:
    """Plan how many requests each measurement point sends, and print the plan.

    Raises:
        UserError: Sending each sample of the data set once takes longer than `max_point_s`.
    """
    options = request.options
    rates = _find_expected_rates(request, data, curve, settings)
    plan_settings = PlanSettings(
        benchmark=options.benchmark,
        dataset_size=data.size,
        accuracy_samples=0,  # loadgen sends no accuracy run
        seed_set=options.seed_set,
        target_cohort=find_seed_set(options.seed_set).cohort,
        max_point_s=max_point_s,
        price_per_hour=None,  # only the command `plan` computes a cost
        currency="",
    )
    plan = plan_curve(curve, rates, plan_settings, rate_source="", is_simulated=settings.virtual)
    _print_plan(plan)
    _check_complete_passes(plan, options)
    return plan


def _print_plan(plan: CurvePlan) -> None:
    """Print the rules that a curve does not meet, and the requests and the time of each point."""
    for problem in plan.problems:
        print_status(f"warning: the curve does not meet the rules: {problem}")

    for planned in plan.points:
        print_status(
            f"{planned.point.name}: {planned.passes} passes, {planned.requests:,} requests, about "
            f"{format.duration(planned.duration_s)}"
        )


def _find_expected_rates(
    request: CurveRequest, data: CurveData, curve: Curve, settings: Settings
) -> Sequence[ConcurrencyRate]:
    """Return the expected speed of the server at some concurrencies.

    The speed comes from earlier runs if the user named any, and otherwise from a short trial at the
    concurrency of each measurement point.
    """
    if request.rates_from is not None:
        return rate_sources.read_rates(request.rates_from)

    print_status("Short trials measure how many passes of the data set each point needs")
    seed_set = find_seed_set(request.options.seed_set)
    return rate_sources.measure_rates(curve.points, data, seed_set, settings)


def _check_complete_passes(plan: CurvePlan, options: CurveOptions) -> None:
    """Check that the limit on time is long enough to send the data set once at each point.

    Section 6.4 of the rules requires at least one complete pass over the data set.

    Raises:
        UserError: The limit is too short at a measurement point.
    """
    too_slow = [planned for planned in plan.points if planned.outlook == "less than one pass"]
    if too_slow:
        names = ", ".join(planned.point.name for planned in too_slow)
        longest_s = max(planned.pass_s for planned in too_slow)
        raise UserError(
            "out_of_range",
            f"one pass of the data set takes up to {format.duration(longest_s)} at {names}",
            f"--max-point-time {options.max_point_time}",
            "allow more time, or use a higher --c-min",
        )
