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
METRIC_LABELS = {
    "tpot_p50": "TPOT p50",
    "tpot_p90": "TPOT p90",
    "ttft_p50": "TTFT p50",
    "ttft_p90": "TTFT p90",
}
POWER_COLUMN = 4
"""The index of the column with the throughput per kW, after the throughput per user."""
CONCURRENCY_LABEL = "requests in flight, log"


def create_report(result: CurveResult) -> Report:
    """Return the report of a measured curve, for the terminal and as a page."""
    curve = result.curve
    notices = [disclosure_notice(curve.disclosure)]
    if curve.is_simulated:
        notices.insert(0, simulated_notice())

    return Report(
        title=f"MLPerf Endpoints rehearsal, unofficial: {curve.benchmark} on {curve.target}",
        generated_by="loadgen mlperf endpoints run",
        notices=notices,
        headline=[Paragraph(describe_result(result), large=True)],
        headline_last=True,
        sections=[
            section("", _facts(result)),
            section("Points", points_table(result), _missing_points(result)),
            section("Steady windows", windows_table(result), Bullets(list(_notes(result)), "warn")),
            section("Regions", regions_table(curve.curve.regions)),
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
    """Return a table with the throughput and the latency of each measurement point."""
    head = ["point", "region", "tokens/s", "per user", "TTFT p90 ms", "basis", "verdict"]
    has_power = result.curve.provisioned_power_kw is not None
    if has_power:
        head.insert(POWER_COLUMN, "per kW")
    rows = [_point_row(result, point, has_power=has_power) for point in result.points]
    return Table(head, rows, label_columns=2)


def _point_row(result: CurveResult, point: PointResult, *, has_power: bool) -> list[str]:
    """Return the table row of a measurement point, with throughput per kW if `has_power`."""
    metrics = point.metrics
    speed_per_user = format.quantity(metrics.tps_per_user)
    ttft = format.quantity(metrics.ttft_p90_ms)

    # An Offline run sends all queries at once. Most of them wait, so their latency means nothing.
    if point.point.is_offline_run:
        speed_per_user = format.NONE
        ttft = format.NONE

    cells = [
        point.point.name,
        describe_region(point.point),
        format.quantity(metrics.system_tps),
        speed_per_user,
        ttft,
        point.basis,
        point.verdict,
    ]
    if has_power:
        tps_per_kw = result.tps_per_kw(point)
        cells.insert(POWER_COLUMN, format.NONE if tps_per_kw is None else f"{tps_per_kw:,.1f}")
    return cells


def windows_table(result: CurveResult) -> Table:
    """Return a row per point with a fixed concurrency: its window, and what the rules require."""
    head = ("point", "queries", "passes", "window", "required", "passes in it", "status")
    return Table(head, [_window_row(point) for point in result.fixed_results])


def _window_row(point: PointResult) -> list[str]:
    """Return the table row of a measurement point about the steady window of its run."""
    state = point.steady_state
    if state is None:
        unknown_cells = [format.NONE] * 5
        return [point.point.name, f"{point.issued:,}", *unknown_cells]

    window = state.window
    return [
        point.point.name,
        f"{point.issued:,}",
        f"{state.super_passes:,}",
        format.NONE if window is None else format.duration(window.duration_s),
        format.duration(point.point.min_window_s),
        format.NONE if window is None else f"{window.super_passes:,}",
        state.status,
    ]


def _missing_points(result: CurveResult) -> Bullets:
    """Return which points have not run and how to run them, or nothing if all have run."""
    if not result.missing_points:
        return Bullets([])

    names = ", ".join(result.missing_points)
    hint = "The same command with the same --out measures them."
    return Bullets([f"Not measured: {names}. {hint}"], "warn")


def _notes(result: CurveResult) -> Iterator[str]:
    """Yield warnings about the runs of single measurement points, such as failed queries."""
    for point in result.points:
        for error in point.measurement_errors:
            yield f"{point.point.name} is not a valid measurement: {error}"
        if point.failed:
            yield f"{point.point.name}: {point.failed:,} of {point.issued:,} queries failed."
        if point.steady_state is not None:
            yield from _notes_on_steady_state(point.point.name, point.steady_state)


def _notes_on_steady_state(name: str, state: SteadyState) -> Iterator[str]:
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


def _facts(result: CurveResult) -> Facts:
    """Return the facts about the benchmark and the system at the top of the report."""
    curve = result.curve
    different_models = dict.fromkeys(point.load.model for point in result.points)
    power = ""
    if curve.provisioned_power_kw is not None:
        power = f"{curve.provisioned_power_kw:,.2f} kW provisioned"

    return Facts(
        [
            ("Benchmark", f"{curve.benchmark} ({curve.model})"),
            ("Server", curve.target),
            ("Model", ", ".join(different_models)),
            ("Data", curve.data_name),
            ("C_min, C_max", f"{curve.curve.c_min}, {curve.curve.c_max:,}"),
            ("Seed set", f"{curve.seed_set}, cohort {curve.target_cohort}"),
            ("Power", power),
        ]
    )


# -- charts ----------------------------------------------------------------------------------------


def _chart_sections(result: CurveResult) -> Iterator[Section]:
    """Yield the section with the charts of section 4.2, if a point was measured."""
    points = result.fixed_results
    if points:
        yield section("Charts", Charts(_charts(result, points)))


def _charts(result: CurveResult, points: Sequence[PointResult]) -> list[Chart]:
    """Return the charts of the report: the curve, and three metrics over the concurrency."""
    region_marks = _region_marks(result)
    return [
        _pareto_chart(result, points),
        _chart_over_concurrency(
            "System throughput",
            points,
            [point.metrics.system_tps for point in points],
            unit="tokens/s",
            color=CURVE_COLOR,
            marks=region_marks,
        ),
        _chart_over_concurrency(
            "TTFT p90",
            points,
            [point.metrics.ttft_p90_ms for point in points],
            unit="ms",
            color=TTFT_COLOR,
            marks=region_marks,
        ),
        _chart_over_concurrency(
            "Tokens/s per user",
            points,
            [point.metrics.tps_per_user for point in points],
            unit="tokens/s",
            color=USER_COLOR,
            marks=region_marks,
        ),
    ]


def _pareto_chart(result: CurveResult, points: Sequence[PointResult]) -> Chart:
    """Return the chart of the system throughput against the speed that each user gets.

    The rules define the curve between measurement points as a step function (section 5.2). The
    throughput of the Offline run, which sends all queries at once, is a horizontal line.
    """
    measured = [point for point in points if point.metrics.tps_per_user is not None]
    speeds = [point.metrics.tps_per_user or 0.0 for point in measured]
    throughputs = [point.metrics.system_tps for point in measured]

    offline = result.offline_result
    marks: tuple[Mark, ...] = ()
    if offline is not None and offline.point.is_offline_run:
        label = "Offline (throughput ceiling)"
        marks = (Mark(y=offline.metrics.system_tps, label=label, color=OFFLINE_COLOR),)

    step_x, step_y = _steps(speeds, throughputs)
    return Chart(
        title="Throughput against speed per user",
        note=rules.DISCLOSURE.partition(":")[0],
        x=Axis(label="tokens/s per user (1000 / TPOT p90 in ms)", unit="tokens/s", min=0),
        y=Axis(label="system tokens/s", unit="tokens/s", min=0),
        marks=marks,
        wide=True,
        series=(
            Series(x=step_x, y=step_y, color=CURVE_COLOR, name="step function"),
            Series(
                x=speeds,
                y=list(throughputs),
                color=CURVE_COLOR,
                width=0,
                dots=True,
                labels=tuple(point.point.name for point in measured),
                links=tuple(run_link(point.point.name) for point in measured),
            ),
        ),
    )


def _steps(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
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


def _region_marks(result: CurveResult) -> tuple[Mark, ...]:
    """Return a vertical line at the end of each region of concurrencies but the last."""
    regions = result.curve.curve.regions.regions
    marks = []
    for region in regions[:-1]:
        short_label = region.label.removesuffix(" Concurrency")
        marks.append(Mark(x=region.end, label=f"{short_label} |", color="soft"))
    return tuple(marks)
