"""Renders the result of a rehearsed curve as text and as a page. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.core import format
from loadgen.mlperf.endpoints import rules
from loadgen.mlperf.endpoints.curve_result import CurveResult, PointResult
from loadgen.mlperf.endpoints.plan_text import describe_region, regions_table
from loadgen.mlperf.endpoints.steady_window import SteadyState
from loadgen.mlperf.text import disclosure_notice
from loadgen.render.page import Axis, Chart, Mark, Series
from loadgen.render.section import (
    Bullets,
    Charts,
    Facts,
    Paragraph,
    Report,
    Section,
    Table,
    section,
    simulated_notice,
)
from loadgen.runs.sweep_charts import run_link

CURVE_COLOR = "c1"
TTFT_COLOR = "c2"
USER_COLOR = "c3"
OFFLINE_COLOR = "c4"
SHORT_DISCLOSURE = rules.DISCLOSURE.partition(":")[0]
"""The first words of the disclosure, which say that the result is unofficial."""
METRIC_LABELS = {
    "tpot_p50": "TPOT p50",
    "tpot_p90": "TPOT p90",
    "ttft_p50": "TTFT p50",
    "ttft_p90": "TTFT p90",
}

WINDOW_HEAD = ("point", "queries", "passes", "window", "required", "passes in it", "status")
CONCURRENCY_LABEL = "requests in flight, log"


def create_report(result: CurveResult) -> Report:
    """Return the report of a measured curve, for the terminal and as a page."""
    curve = result.curve
    notices = [disclosure_notice(curve.disclosure)]
    if curve.is_simulated:
        notices = [simulated_notice(), *notices]

    warnings = Bullets(list(_list_run_warnings(result)), "warn")
    return Report(
        title=f"MLPerf Endpoints rehearsal, unofficial: {curve.benchmark} on {curve.target}",
        generated_by="loadgen mlperf endpoints run",
        notices=notices,
        headline=[Paragraph(describe_result(result), large=True)],
        headline_last=True,
        sections=[
            section("", _describe_system(result)),
            section("Points", points_table(result), _missing_points(result)),
            section("Steady windows", windows_table(result), warnings),
            section("Regions", regions_table(curve.curve.regions)),
            # Only a page has charts, so they are created when it is rendered.
            lambda: _chart_sections(result),
        ],
    )


def describe_result(result: CurveResult) -> str:
    """Return in one sentence how many points were measured, and the highest throughput."""
    planned_points = result.curve.curve.points
    parts = [f"{len(result.points)} of {len(planned_points)} points measured"]

    # An Offline run, which has no fixed concurrency, needs no steady window.
    if result.fixed_results:
        window_count = sum(1 for point in result.fixed_results if point.has_official_window)
        parts.append(
            f"{window_count} of {len(result.fixed_results)} fixed-concurrency points have a steady "
            "window of the required length"
        )

    if result.points:
        parts.append(f"up to {format.quantity(result.max_system_tps)} tokens/s")
    return f"Rehearsal, unofficial: {'; '.join(parts)}."


def points_table(result: CurveResult) -> Table:
    """Return a table with the throughput and the latency of each measurement point.

    It has the throughput per kW if the user stated the power of the system.
    """
    has_power = result.curve.provisioned_power_kw is not None
    power_head = ["per kW"] if has_power else []
    head = [
        "point",
        "region",
        "tokens/s",
        "per user",
        *power_head,
        "TTFT p90 ms",
        "basis",
        "verdict",
    ]
    rows = [_point_row(result, point, has_power=has_power) for point in result.points]
    return Table(head, rows, label_columns=2)


def _point_row(result: CurveResult, point: PointResult, *, has_power: bool) -> list[str]:
    """Return the table row of a measurement point, with throughput per kW if `has_power`.

    An Offline run has no speed per user and no TTFT: it sends all queries at once, and most of them
    wait, so their latency means nothing.
    """
    metrics = point.metrics
    has_latency = not point.point.is_offline_run
    power_cells = []
    if has_power:
        tps_per_kw = result.tps_per_kw(point)
        power_cells = [format.NONE if tps_per_kw is None else f"{tps_per_kw:,.1f}"]

    return [
        point.point.name,
        describe_region(point.point),
        format.quantity(metrics.system_tps),
        format.quantity(metrics.tps_per_user) if has_latency else format.NONE,
        *power_cells,
        format.quantity(metrics.ttft_p90_ms) if has_latency else format.NONE,
        point.basis,
        point.verdict,
    ]


def windows_table(result: CurveResult) -> Table:
    """Return a row per point with a fixed concurrency: its window, and what the rules require."""
    return Table(WINDOW_HEAD, [_window_row(point) for point in result.fixed_results])


def _window_row(point: PointResult) -> list[str]:
    """Return the table row of a measurement point about the steady window of its run.

    The steady window is the part of the run in which the latency is stable. A run without a window
    has "-" for its length, and a run without queries has "-" in all columns after the queries.
    """
    cells = [point.point.name, f"{point.issued:,}"]
    state = point.steady_state
    if state is None:
        columns_after_queries = len(WINDOW_HEAD) - len(cells)
        return [*cells, *[format.NONE] * columns_after_queries]

    window_duration = format.NONE
    passes_in_window = format.NONE
    if state.window is not None:
        window_duration = format.duration(state.window.duration_s)
        passes_in_window = f"{state.window.super_passes:,}"

    required_duration = format.duration(point.point.min_window_s)
    passes = f"{state.super_passes:,}"
    return [*cells, passes, window_duration, required_duration, passes_in_window, state.status]


def _missing_points(result: CurveResult) -> Bullets:
    """Return which points have not run and how to run them, or nothing if all have run."""
    if not result.missing_points:
        return Bullets([])

    names = ", ".join(result.missing_points)
    hint = "The same command with the same --out measures them."
    return Bullets([f"Not measured: {names}. {hint}"], "warn")


def _list_run_warnings(result: CurveResult) -> Iterator[str]:
    """Yield warnings about the runs of single measurement points, such as failed queries."""
    for point in result.points:
        for error in point.measurement_errors:
            yield f"{point.point.name} is not a valid measurement: {error}"
        if point.failed:
            yield f"{point.point.name}: {point.failed:,} of {point.issued:,} queries failed."
        if point.steady_state is not None:
            yield from _list_drift_warnings(point.point.name, point.steady_state)


def _list_drift_warnings(name: str, state: SteadyState) -> Iterator[str]:
    """Yield warnings about a run that is not steady after the start of its window.

    Args:
        name: The name of the measurement point.
        state: The steady state of its run.
    """
    drifting_metrics = [metric for metric, trend in state.trends.items() if trend != "none"]
    if drifting_metrics:
        labels = ", ".join(METRIC_LABELS[metric] for metric in drifting_metrics)
        yield f"{name}: a trend after the start of the window in {labels}"

    if state.reason:
        yield f"{name}: {state.reason}"

    if state.level_shift is not None:
        change = format.percent(state.level_shift.change)
        pass_number = state.level_shift.super_pass + 1
        yield (
            f"{name}: TPOT changes by {change} at pass {pass_number}; the result is that of the "
            "first level."
        )


def _describe_system(result: CurveResult) -> Facts:
    """Return the benchmark and the system, for the top of the report.

    C_min and C_max are the lowest and the highest concurrency of the curve. Servers that name
    different models at different points have all of them in the list, in the order of the points.
    """
    stored_curve = result.curve
    models_in_order = dict.fromkeys(point.load.model for point in result.points)
    lowest = stored_curve.curve.c_min
    highest = stored_curve.curve.c_max
    power = ""
    if stored_curve.provisioned_power_kw is not None:
        power = f"{stored_curve.provisioned_power_kw:,.2f} kW provisioned"

    return Facts(
        [
            ("Benchmark", f"{stored_curve.benchmark} ({stored_curve.model})"),
            ("Server", stored_curve.target),
            ("Model", ", ".join(models_in_order)),
            ("Data", stored_curve.data_name),
            ("C_min, C_max", f"{lowest}, {highest:,}"),
            ("Seed set", f"{stored_curve.seed_set}, cohort {stored_curve.target_cohort}"),
            ("Power", power),
        ]
    )


# -- charts ----------------------------------------------------------------------------------------


def _chart_sections(result: CurveResult) -> Iterator[Section]:
    """Yield the section with the charts of section 4.2, if a point was measured."""
    points = result.fixed_results
    if points:
        yield section("Charts", Charts(_create_charts(result, points)))


def _create_charts(result: CurveResult, points: Sequence[PointResult]) -> list[Chart]:
    """Return the charts of the report: the curve, and three metrics over the concurrency.

    The concurrency is the number of requests in flight. Vertical lines mark the ends of the regions
    into which the rules divide it.
    """
    region_ends = _mark_region_ends(result)
    throughput = _chart_over_concurrency(
        "System throughput",
        points,
        [point.metrics.system_tps for point in points],
        unit="tokens/s",
        color=CURVE_COLOR,
        marks=region_ends,
    )
    ttft = _chart_over_concurrency(
        "TTFT p90",
        points,
        [point.metrics.ttft_p90_ms for point in points],
        unit="ms",
        color=TTFT_COLOR,
        marks=region_ends,
    )
    speed_per_user = _chart_over_concurrency(
        "Tokens/s per user",
        points,
        [point.metrics.tps_per_user for point in points],
        unit="tokens/s",
        color=USER_COLOR,
        marks=region_ends,
    )
    return [_pareto_chart(result, points), throughput, ttft, speed_per_user]


def _pareto_chart(result: CurveResult, points: Sequence[PointResult]) -> Chart:
    """Return the chart of the system throughput against the speed that each user gets.

    The rules define the curve between measurement points as a step function (section 5.2), which is
    one line of the chart. The measured points themselves are dots. Points without a speed per user
    are left out.
    """
    measured = [point for point in points if point.metrics.tps_per_user is not None]
    speeds = [point.metrics.tps_per_user or 0.0 for point in measured]
    throughputs = [point.metrics.system_tps for point in measured]
    corner_speeds, corner_throughputs = _find_step_corners(speeds, throughputs)

    step_line = Series(
        x=corner_speeds, y=corner_throughputs, color=CURVE_COLOR, name="step function"
    )
    point_dots = Series(
        x=speeds,
        y=list(throughputs),
        color=CURVE_COLOR,
        width=0,  # no line between the dots
        dots=True,
        labels=tuple(point.point.name for point in measured),
        links=tuple(run_link(point.point.name) for point in measured),
    )
    return Chart(
        title="Throughput against speed per user",
        note=SHORT_DISCLOSURE,
        x=Axis(label="tokens/s per user (1000 / TPOT p90 in ms)", unit="tokens/s", min=0),
        y=Axis(label="system tokens/s", unit="tokens/s", min=0),
        marks=_mark_offline_throughput(result),
        wide=True,
        series=(step_line, point_dots),
    )


def _mark_offline_throughput(result: CurveResult) -> tuple[Mark, ...]:
    """Return a horizontal line at the throughput of the Offline run, or nothing without one.

    An Offline run sends all queries at once, so no point should have a higher throughput.
    """
    offline = result.offline_result
    if offline is None or not offline.point.is_offline_run:
        return ()
    label = "Offline (throughput ceiling)"
    return (Mark(y=offline.metrics.system_tps, label=label, color=OFFLINE_COLOR),)


def _find_step_corners(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the x and y values of the corners of a step function through some points.

    The function keeps the y of a point until the x of the next one: the points (1, 5) and (2, 7)
    give the corners (1, 5), (2, 5) and (2, 7).
    """
    step_x: list[float] = list(x[:1])
    step_y: list[float] = list(y[:1])
    next_points = zip(x[1:], y[1:], strict=True)
    for index, (next_x, next_y) in enumerate(next_points):
        step_x += [next_x, next_x]
        step_y += [y[index], next_y]
    return step_x, step_y


def _chart_over_concurrency(
    title: str,
    points: Sequence[PointResult],
    values: Sequence[float | None],
    *,
    unit: str,
    color: str,
    marks: tuple[Mark, ...],
) -> Chart:
    """Return a chart of a metric over the concurrency, the number of requests in flight.

    Args:
        title: The heading of the chart.
        points: The measurement points.
        values: The metric at each point, None where it is not known.
        unit: The unit of the metric.
        color: The color of the line.
        marks: Vertical lines at the ends of the regions.
    """
    names = tuple(point.point.name for point in points)
    return Chart(
        title=title,
        x=Axis(label=CONCURRENCY_LABEL, log=True),
        y=Axis(label=unit, unit=unit, min=0),
        marks=marks,
        series=(
            Series(
                x=[float(point.point.concurrency) for point in points],
                y=list(values),
                color=color,
                dots=True,
                labels=names,
                links=tuple(run_link(name) for name in names),
            ),
        ),
    )


def _mark_region_ends(result: CurveResult) -> tuple[Mark, ...]:
    """Return a vertical line at the end of each region of concurrencies but the last."""
    regions = result.curve.curve.regions.regions
    marks = []
    for region in regions[:-1]:
        short_label = region.label.removesuffix(" Concurrency")
        marks.append(Mark(x=region.end, label=f"{short_label} |", color="soft"))
    return tuple(marks)
