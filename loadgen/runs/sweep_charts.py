"""The charts of a sweep: latency, throughput and SLO attainment over the load, the Pareto front.

Pure: a `SweepCurve` in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple
from urllib.parse import quote

from loadgen.render.page import COLORS, Axis, Chart, Mark, Series
from loadgen.runs.load_point_results import LoadPointResult
from loadgen.runs.sweep_curve import SweepCurve

P50_COLOR = "c1"
P99_COLOR = "c2"
THROUGHPUT_COLOR = "c3"
KNEE_COLOR = "c4"
FRONT_COLOR = "c4"
DOMINATED_COLOR = "c6"
P99_DASH = "5 4"
LINE_WIDTH = 1.8
THROUGHPUT_PER_GPU = "tokens/s per GPU"
TOTAL_THROUGHPUT = "total tokens/s"
GPUS_UNKNOWN = "total of all GPUs, because the number of GPUs is not known (--gpus)"


def run_link(run_name: str) -> str:
    """Return the address to which a point of a chart leads: the summary of its run.

    The address is relative to the page. `loadgen ui` shows the page of the run there.
    """
    return f"{quote(run_name)}/summary.json"


# One curve


def sweep_charts(curve: SweepCurve) -> Iterator[Chart]:
    """Yield the charts of a sweep of one target with one kind of request.

    They show latency over throughput, the Pareto front, and metrics over load.
    """
    points = [point for point in curve.load_points if point.output_per_s is not None]
    if not points:
        return

    marks = _throughput_marks(curve, points)
    yield Chart(
        title="TTFT against throughput",
        x=_throughput_axis(),
        y=_latency_axis(),
        marks=marks,
        series=(
            _latency_series(points, "ttft_p50", "p50", P50_COLOR),
            _latency_series(points, "ttft_p99", "p99", P99_COLOR, dash=P99_DASH),
        ),
    )

    yield Chart(
        title="E2E latency against throughput",
        x=_throughput_axis(),
        y=_latency_axis(),
        marks=marks,
        series=(_latency_series(points, "e2e_p50", "p50", P50_COLOR),),
    )
    yield from _pareto_charts(points)
    yield from _charts_over_load(points)


def _throughput_axis() -> Axis:
    return Axis(label="output tokens/s", unit="tokens/s", min=0)


def _latency_axis() -> Axis:
    return Axis(label="ms, log", unit="ms", log=True)


def _throughput_marks(curve: SweepCurve, points: Sequence[LoadPointResult]) -> tuple[Mark, ...]:
    """Return lines at the throughput of the knee and of the best load point within the SLO."""
    marks = []
    for point in points:
        if point.name == curve.knee:
            marks.append(Mark(x=point.output_per_s, label="knee", color=KNEE_COLOR))
        if point.name == curve.best:
            marks.append(Mark(x=point.output_per_s, label="← SLO met", color="good"))
    return tuple(marks)


def _latency_series(
    points: Sequence[LoadPointResult], latency_field: str, name: str, color: str, *, dash: str = ""
) -> Series:
    """Return the line of a latency over the throughput, in output tokens/s.

    A dashed line has no labels, because it has the same points as a solid one.

    Args:
        points: The load points.
        latency_field: The field of a load point with the latency, such as `ttft_p50`.
        name: The name of the line in the legend.
        color: The color of the line.
        dash: The pattern of a dashed line, or "" for a solid line.
    """
    is_dashed = bool(dash)
    return Series(
        name=name,
        x=[point.output_per_s or 0.0 for point in points],
        y=[getattr(point, latency_field) for point in points],
        color=color,
        dots=True,
        labels=() if is_dashed else tuple(point.name for point in points),
        dash=dash,
        links=_links(points),
    )


def _links(points: Sequence[LoadPointResult]) -> tuple[str, ...]:
    return tuple(run_link(point.name) for point in points)


def _charts_over_load(points: Sequence[LoadPointResult]) -> Iterator[Chart]:
    """Yield throughput and SLO attainment over the load, if several loads are known."""
    loads = [point.load_value for point in points if point.load_value is not None]
    if len(loads) < len(points) or len(points) == 1:
        return

    is_closed_loop = points[0].is_closed_loop
    load_label = "concurrent requests, log" if is_closed_loop else "offered requests/s, log"
    links = _links(points)
    throughputs = [point.output_per_s for point in points]
    yield Chart(
        title="Throughput against load",
        x=Axis(label=load_label, log=True),
        y=Axis(label="tokens/s", unit="tokens/s", min=0),
        series=(Series(x=loads, y=throughputs, color=THROUGHPUT_COLOR, dots=True, links=links),),
    )

    attainments = [point.slo_attainment for point in points]
    if any(attainment is not None for attainment in attainments):
        yield Chart(
            title="SLO attainment against load",
            x=Axis(label=load_label, log=True),
            y=Axis(label="% of requests", format="percent", min=0, max=1),
            series=(Series(x=loads, y=attainments, color="good", dots=True, links=links),),
        )


def _pareto_charts(points: Sequence[LoadPointResult]) -> Iterator[Chart]:
    """Yield the chart of throughput per GPU against throughput per user, if both are known.

    If the number of GPUs is not known, it shows the throughput of all GPUs together. The points on
    the Pareto front are those that no other point exceeds in both values.
    """
    known_points = [point for point in points if point.per_user is not None]
    if not known_points:
        return

    known_points.sort(key=_tokens_per_user)
    has_gpus = all(point.per_gpu is not None for point in known_points)
    unit = THROUGHPUT_PER_GPU if has_gpus else TOTAL_THROUGHPUT
    yield Chart(
        title=f"{_capitalize(unit)} against tokens/s per user",
        note="" if has_gpus else GPUS_UNKNOWN,
        x=Axis(label="tokens/s per user (1 / TPOT p50)", unit="tokens/s per user", pad=True),
        y=Axis(label=unit, unit=unit, min=0),
        series=tuple(_front_and_dominated_series(known_points, has_gpus=has_gpus)),
    )


def _front_and_dominated_series(
    points: Sequence[LoadPointResult], *, has_gpus: bool
) -> Iterator[Series]:
    """Yield the points on the Pareto front as a line, and the others as dots."""
    front = [point for point in points if point.on_pareto_front]
    if front:
        yield _pareto_series(front, "Pareto front", FRONT_COLOR, has_gpus=has_gpus)

    dominated = [point for point in points if not point.on_pareto_front]
    if dominated:
        yield _pareto_series(
            dominated, "dominated", DOMINATED_COLOR, has_gpus=has_gpus, line_width=0
        )


def _tokens_per_user(point: LoadPointResult) -> float:
    return point.per_user or 0.0


def _pareto_series(
    points: Sequence[LoadPointResult],
    name: str,
    color: str,
    *,
    has_gpus: bool,
    line_width: float = LINE_WIDTH,
) -> Series:
    """Return the throughput of load points over the throughput per user, per GPU if it is known."""
    return Series(
        name=name,
        x=[_tokens_per_user(point) for point in points],
        y=[point.per_gpu if has_gpus else point.output_per_s for point in points],
        color=color,
        width=line_width,
        dots=True,
        labels=tuple(point.name for point in points),
        links=_links(points),
    )


def _capitalize(text: str) -> str:
    """Return the text with an upper-case first letter, and the other letters as they are."""
    return text[:1].upper() + text[1:]


# Several targets


class _TargetAxis(NamedTuple):
    """A metric over which the throughput of several targets is compared."""

    metric: str
    label: str
    unit: str


TARGET_AXES = (
    _TargetAxis("per_user", "tokens/s per user (1 / TPOT p50)", "tokens/s per user"),
    _TargetAxis("ttft_p50", "TTFT p50, ms", "ms"),
)


def target_charts(curves: Sequence[SweepCurve]) -> Iterator[Chart]:
    """Yield the charts of a sweep of several targets with the same kind of request.

    Each chart has the throughput of the targets on the y axis, a line for each target, and one of
    the metrics in TARGET_AXES on the x axis. So the throughput of the targets can be compared at
    one speed per user or at one TTFT. A metric that no target has is left out.
    """
    valid_points = [point for curve in curves for point in curve.load_points if point.valid]

    # The throughput is shown per GPU only if the number of GPUs is known for every point.
    has_gpus = all(point.per_gpu is not None for point in valid_points)
    for axis in TARGET_AXES:
        lines = _target_lines(curves, axis.metric, has_gpus=has_gpus)
        has_points = any(line.x for line in lines)
        if has_points:
            yield _target_chart(axis, lines, has_gpus=has_gpus)


def _target_lines(
    curves: Sequence[SweepCurve], x_metric: str, *, has_gpus: bool
) -> tuple[Series, ...]:
    """Return the line of each target, in a color of its own."""
    return tuple(
        _target_series(curve, x_metric, COLORS[index % len(COLORS)], has_gpus=has_gpus)
        for index, curve in enumerate(curves)
    )


def _target_chart(x_metric: _TargetAxis, lines: tuple[Series, ...], *, has_gpus: bool) -> Chart:
    """Return the chart of throughput against a metric.

    The throughput is that per GPU, or that of all GPUs if their number is not known.
    """
    unit = THROUGHPUT_PER_GPU if has_gpus else TOTAL_THROUGHPUT
    return Chart(
        title=f"{_capitalize(unit)} against {x_metric.label}",
        note="" if has_gpus else GPUS_UNKNOWN,
        x=Axis(label=x_metric.label, unit=x_metric.unit, pad=True),
        y=Axis(label=f"output {unit}", unit=unit, min=0),
        series=lines,
    )


def _target_series(curve: SweepCurve, metric: str, color: str, *, has_gpus: bool) -> Series:
    """Return the valid load points of one target as a line, with `metric` on the x axis."""
    points = [
        point for point in curve.load_points if point.valid and getattr(point, metric) is not None
    ]
    points.sort(key=attrgetter(metric))
    return Series(
        name=curve.load_points[0].target,
        x=[getattr(point, metric) for point in points],
        y=[point.per_gpu if has_gpus else point.output_per_s for point in points],
        color=color,
        dots=True,
        labels=tuple(point.short_label for point in points),
        links=_links(points),
    )
