"""The charts of a sweep: latency, throughput and SLO attainment over the load, the Pareto front.

Pure: a `SweepCurve` in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import quote

from loadgen.core.metrics.interactivity import DEFINITION_BY_NAME
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
    yield from _pareto_charts(points, curve.interactivity)
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

    if any(point.answers is not None for point in points):
        yield _answer_chart(points, load_label)


def _answer_chart(points: Sequence[LoadPointResult], load_label: str) -> Chart:
    """Return the chart of the score of checked answers over the load, with its 95 % interval."""
    scored = [
        (point, point.answers.overall)
        for point in points
        if point.answers is not None and point.answers.overall.score is not None
    ]
    series = Series(
        x=[point.load_value or 0.0 for point, _ in scored],
        y=[score.score for _, score in scored],
        low=[score.low for _, score in scored],
        high=[score.high for _, score in scored],
        color=P50_COLOR,
        dots=True,
        links=_links([point for point, _ in scored]),
    )
    return Chart(
        title="Checked answers against load",
        note="With 95 % intervals.",
        x=Axis(label=load_label, log=True),
        y=Axis(label="% right", format="percent", max=1),
        series=(series,),
    )


def _pareto_charts(points: Sequence[LoadPointResult], interactivity: str) -> Iterator[Chart]:
    """Yield the chart of throughput per GPU against throughput per user, if both are known.

    If the number of GPUs is not known, it shows the throughput of all GPUs together. The points on
    the Pareto front are those that no other point exceeds in both values.

    Args:
        points: The load points of one curve.
        interactivity: The name of the definition of the throughput per user.
    """
    known_points = [point for point in points if point.speed_per_user(interactivity) is not None]
    if not known_points:
        return

    known_points.sort(key=lambda point: point.speed_per_user(interactivity) or 0.0)
    has_gpus = all(point.per_gpu is not None for point in known_points)
    unit = THROUGHPUT_PER_GPU if has_gpus else TOTAL_THROUGHPUT
    yield Chart(
        title=f"{_capitalize(unit)} against tokens/s per user",
        note="" if has_gpus else GPUS_UNKNOWN,
        x=Axis(label=_speed_label(interactivity), unit="tokens/s per user", pad=True),
        y=Axis(label=unit, unit=unit, min=0),
        series=tuple(_front_and_dominated_series(known_points, interactivity, has_gpus=has_gpus)),
    )


def _speed_label(interactivity: str) -> str:
    """Return the label of an axis with the speed per user, such as "... (1 / TPOT p50)"."""
    return f"tokens/s per user ({DEFINITION_BY_NAME[interactivity].formula})"


def _front_and_dominated_series(
    points: Sequence[LoadPointResult], interactivity: str, *, has_gpus: bool
) -> Iterator[Series]:
    """Yield the points on the Pareto front as a line, and the others as dots."""
    front = [point for point in points if point.on_pareto_front]
    if front:
        yield _pareto_series(front, "Pareto front", interactivity, FRONT_COLOR, has_gpus=has_gpus)

    dominated = [point for point in points if not point.on_pareto_front]
    if dominated:
        yield _pareto_series(
            dominated, "dominated", interactivity, DOMINATED_COLOR, has_gpus=has_gpus, line_width=0
        )


def _pareto_series(
    points: Sequence[LoadPointResult],
    name: str,
    interactivity: str,
    color: str,
    *,
    has_gpus: bool,
    line_width: float = LINE_WIDTH,
) -> Series:
    """Return the throughput of load points over the throughput per user, per GPU if it is known."""
    return Series(
        name=name,
        x=[point.speed_per_user(interactivity) or 0.0 for point in points],
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

    value: Callable[[LoadPointResult], float | None]
    label: str
    unit: str


def _target_axes(interactivity: str) -> tuple[_TargetAxis, ...]:
    """Return the metrics over which throughput is compared: the speed per user, and TTFT."""

    def speed_per_user(point: LoadPointResult) -> float | None:
        return point.speed_per_user(interactivity)

    def ttft_p50_ms(point: LoadPointResult) -> float | None:
        return point.ttft_p50

    return (
        _TargetAxis(speed_per_user, _speed_label(interactivity), "tokens/s per user"),
        _TargetAxis(ttft_p50_ms, "TTFT p50, ms", "ms"),
    )


def target_charts(curves: Sequence[SweepCurve]) -> Iterator[Chart]:
    """Yield the charts of a sweep of several targets with the same kind of request.

    Each chart has the throughput of the targets on the y axis, a line for each target, and a metric
    on the x axis: the speed per user, or TTFT. So the throughput of the targets can be compared at
    one speed per user or at one TTFT. A metric that no target has is left out.
    """
    valid_points = [point for curve in curves for point in curve.load_points if point.valid]

    # The throughput is shown per GPU only if the number of GPUs is known for every point.
    has_gpus = all(point.per_gpu is not None for point in valid_points)
    for axis in _target_axes(curves[0].interactivity):
        lines = _target_lines(curves, axis, has_gpus=has_gpus)
        has_points = any(line.x for line in lines)
        if has_points:
            yield _target_chart(axis, lines, has_gpus=has_gpus)


def _target_lines(
    curves: Sequence[SweepCurve], x_axis: _TargetAxis, *, has_gpus: bool
) -> tuple[Series, ...]:
    """Return the line of each target, in a color of its own."""
    return tuple(
        _target_series(curve, x_axis, COLORS[index % len(COLORS)], has_gpus=has_gpus)
        for index, curve in enumerate(curves)
    )


def _target_chart(x_axis: _TargetAxis, lines: tuple[Series, ...], *, has_gpus: bool) -> Chart:
    """Return the chart of throughput against a metric.

    The throughput is that per GPU, or that of all GPUs if their number is not known.
    """
    unit = THROUGHPUT_PER_GPU if has_gpus else TOTAL_THROUGHPUT
    return Chart(
        title=f"{_capitalize(unit)} against {x_axis.label}",
        note="" if has_gpus else GPUS_UNKNOWN,
        x=Axis(label=x_axis.label, unit=x_axis.unit, pad=True),
        y=Axis(label=f"output {unit}", unit=unit, min=0),
        series=lines,
    )


def _target_series(curve: SweepCurve, x_axis: _TargetAxis, color: str, *, has_gpus: bool) -> Series:
    """Return the valid load points of one target as a line, with a metric on the x axis."""
    points = [
        point for point in curve.load_points if point.valid and x_axis.value(point) is not None
    ]

    def x_of(point: LoadPointResult) -> float:
        return x_axis.value(point) or 0.0

    points.sort(key=x_of)
    return Series(
        name=curve.load_points[0].target,
        x=[x_of(point) for point in points],
        y=[point.per_gpu if has_gpus else point.output_per_s for point in points],
        color=color,
        dots=True,
        labels=tuple(point.short_label for point in points),
        links=_links(points),
    )
