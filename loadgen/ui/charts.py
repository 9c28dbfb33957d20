"""The charts of `loadgen ui`: several systems on the same axes, one point per load."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from loadgen.render.page import Axis, Chart, Mark, Series, ShadedBand
from loadgen.runs.load_point_results import LoadPointResult
from loadgen.ui.stored_result import StoredResult

CHART_HEIGHT = 420  # pixels
MAX_CURVES = 12
CURVE_COLORS = ("c1", "c2", "c3", "c4", "c5", "c7", "c8", "c9", "c10", "c11", "c12", "c6")
"""A distinct color for each of `MAX_CURVES` results. c6 is grey, and so comes last."""

LOG_SCALE_RATIO = 8
"""If the largest value is so many times the median, an axis is logarithmic.

On a linear axis, such an outlier would press all other points together.
"""

LINE_WIDTH = 1.8
INTERVAL_WIDTH = 5
DOTTED = "2 4"
"""The pattern of a dotted line in SVG: dashes of 2 pixels and gaps of 4."""

MS_PER_S = 1000

X_MARGIN = 1.08
"""The x axis ends so far beyond the last point, which leaves room for the point's label."""


class Choice(NamedTuple):
    """What the reader has chosen to draw. An empty field means the default.

    Attributes:
        names: The names of the results to draw.
        workload_of: The name of a result; results with the same workload are drawn.
        color_by: A key of `COLOR_KEYS`.
        x: A key of `X_METRICS`.
        y: A key of `Y_METRICS`.
    """

    names: tuple[str, ...] = ()
    workload_of: str = ""
    color_by: str = ""
    x: str = ""
    y: str = ""


class AxisMetric(NamedTuple):
    """A metric that an axis can show. `{currency}` in a text stands for the currency of prices.

    Attributes:
        title: Its name in the title of the chart.
        label: Its name at the axis.
        unit: Its unit.
        value: Returns the metric of a load point of a result, or None if it is not known.
    """

    title: str
    label: str
    unit: str
    value: Callable[[LoadPointResult, StoredResult], float | None]

    def with_currency(self, currency: str) -> AxisMetric:
        """Return the metric with the currency filled in."""
        return self._replace(
            title=self.title.format(currency=currency),
            label=self.label.format(currency=currency),
            unit=self.unit.format(currency=currency),
        )


def _tokens_per_user(load_point: LoadPointResult, _result: StoredResult) -> float | None:
    return load_point.per_user


def _tokens_per_user_endpoints(load_point: LoadPointResult, _result: StoredResult) -> float | None:
    return load_point.per_user_endpoints


def _tokens_per_user_agentx(load_point: LoadPointResult, _result: StoredResult) -> float | None:
    return load_point.per_user_agentx


def _e2e_s(load_point: LoadPointResult, _result: StoredResult) -> float | None:
    return None if load_point.e2e_p50 is None else load_point.e2e_p50 / 1000


def _ttft_ms(load_point: LoadPointResult, _result: StoredResult) -> float | None:
    return load_point.ttft_p99


def _tokens_per_gpu(load_point: LoadPointResult, _result: StoredResult) -> float | None:
    return load_point.per_gpu


def _output_tokens(load_point: LoadPointResult, _result: StoredResult) -> float | None:
    return load_point.output_per_s


def _cost_per_million_tokens(load_point: LoadPointResult, result: StoredResult) -> float | None:
    return result.cost_per_million_tokens.get(load_point.name)


SPEED_PER_USER = "user"
THROUGHPUT_PER_GPU = "gpu"
THROUGHPUT = "all"
COST = "usd"

X_METRICS = {
    SPEED_PER_USER: AxisMetric(
        "output speed per user", "tokens/s per user (1 / TPOT p50)", "tokens/s", _tokens_per_user
    ),
    "endpoints": AxisMetric(
        "output speed per user, as in MLPerf Endpoints",
        "tokens/s per user (1 / TPOT p90)",
        "tokens/s",
        _tokens_per_user_endpoints,
    ),
    "agentx": AxisMetric(
        "output speed per user, as in InferenceX AgentX",
        "tokens/s per user (1 / p90 of E2E per output token)",
        "tokens/s",
        _tokens_per_user_agentx,
    ),
    "e2e": AxisMetric("E2E latency", "E2E latency p50 (s)", "s", _e2e_s),
    "ttft": AxisMetric("time to first token", "TTFT p99 (ms)", "ms", _ttft_ms),
}
Y_METRICS = {
    THROUGHPUT_PER_GPU: AxisMetric(
        "Throughput per GPU", "output tokens/s per GPU", "tokens/s", _tokens_per_gpu
    ),
    THROUGHPUT: AxisMetric("Throughput", "output tokens/s", "tokens/s", _output_tokens),
    COST: AxisMetric(
        "Cost", "{currency} per million output tokens", "{currency}", _cost_per_million_tokens
    ),
}


def _result_name(result: StoredResult) -> str:
    return result.name


def _result_hardware(result: StoredResult) -> str:
    return result.hardware


def _server_software(result: StoredResult) -> str:
    return result.software or "server not reported"


def _result_model(result: StoredResult) -> str:
    return result.curve.model if result.curve is not None else ""


COLOR_KEYS: dict[str, Callable[[StoredResult], str]] = {
    "result": _result_name,
    "hardware": _result_hardware,
    "server": _server_software,
    "model": _result_model,
}
"""By what results can be colored: returns the value that gets a color of its own."""


def build_charts(
    results: Sequence[StoredResult], choice: Choice, currency: str, *, links: bool
) -> Iterator[Chart]:
    """Yield the chosen chart and, if there are prices and no chosen y axis, the chart of costs.

    With `links`, points lead to the pages of their runs, as `loadgen ui` serves them. A chart
    without any point is left out.
    """
    priced_results = [result for result in results if result.cost_per_million_tokens]
    y_keys = [choice.y or _default_y_key(results)]
    if priced_results and not choice.y:
        y_keys.append(COST)

    x_key = choice.x if choice.x in X_METRICS else SPEED_PER_USER
    for y_key in y_keys:
        chart = _build_chart(
            results=priced_results if y_key == COST else results,
            choice=choice._replace(x=x_key, y=y_key),
            currency=currency,
            links=links,
        )
        if chart is not None:
            yield chart


def _default_y_key(results: Sequence[StoredResult]) -> str:
    """Return the throughput per GPU, or the total one if the GPUs of a result are not known."""
    load_points = [point for result in results for point in result.load_points]
    has_gpus = all(point.per_gpu is not None for point in load_points)
    return THROUGHPUT_PER_GPU if has_gpus else THROUGHPUT


def _build_chart(
    results: Sequence[StoredResult], choice: Choice, currency: str, *, links: bool
) -> Chart | None:
    """Return the chart of two metrics, or None if no result has both.

    Args:
        results: The results, each of which is a curve of its load points.
        choice: The metrics of the two axes, and by what results are colored.
        currency: The currency of costs.
        links: Whether points lead to the pages of their runs.
    """
    x_metric = X_METRICS[choice.x]
    y_metric = Y_METRICS[choice.y].with_currency(currency)
    points_by_result = {
        result.name: _result_points(result, x_metric, y_metric) for result in results
    }
    all_points = [point for points in points_by_result.values() for point in points]
    x_values = [point.x for point in all_points]
    if not x_values or max(x_values) == 0:
        return None

    x_max = max(x_values) * X_MARGIN
    colors = assign_colors(results, choice.color_by)

    # A limit on TPOT is a limit on the speed per user, so only charts of that speed show it.
    has_tpot_limits = choice.x == SPEED_PER_USER
    limits = _tpot_limits(results, colors, x_max) if has_tpot_limits else _TpotLimitMarks()
    return Chart(
        kind="lines",
        title=f"{y_metric.title} by {x_metric.title}",
        wide=True,
        height=CHART_HEIGHT,
        x=_build_axis(x_metric, x_values, x_max),
        y=_build_axis(y_metric, [point.y for point in all_points]),
        bands=limits.bands,
        marks=limits.marks,
        series=tuple(_chart_series(results, points_by_result, colors, choice, links=links)),
    )


def _chart_series(
    results: Sequence[StoredResult],
    points_by_result: Mapping[str, Sequence[_Point]],
    colors: Mapping[str, str],
    choice: Choice,
    *,
    links: bool,
) -> Iterator[Series]:
    """Yield the lines of a chart: those of the load points, then those of confidence intervals.

    Args:
        results: The results.
        points_by_result: The load points of each result by its name.
        colors: The color of each result by its name.
        choice: The metrics of the two axes, and by what results are colored.
        links: Whether points lead to the pages of their runs.
    """
    for result in results:
        label = _legend_label(result, choice.color_by)
        points = points_by_result[result.name]
        yield from _result_series(result, points, colors[result.name], label, links=links)
    if choice.x == SPEED_PER_USER:
        yield from _interval_series(results, colors, y_key=choice.y)


def _build_axis(metric: AxisMetric, values: Sequence[float], maximum: float | None = None) -> Axis:
    """Return the axis of a metric: from zero, or logarithmic if an outlier would crush the rest."""
    has_outlier = max(values) > LOG_SCALE_RATIO * statistics.median(values)
    if has_outlier and min(values) > 0:
        return Axis(label=f"{metric.label}, log scale", unit=metric.unit, log=True, max=maximum)
    return Axis(label=metric.label, unit=metric.unit, min=0, max=maximum)


class _Point(NamedTuple):
    """A load point in a chart, with its values on the two axes."""

    load_point: LoadPointResult
    x: float
    y: float

    @property
    def meets_slo(self) -> bool:
        """Whether the measurement is valid, and the SLO was not missed."""
        return self.load_point.valid and self.load_point.slo_met is not False


def _result_points(
    result: StoredResult, x_metric: AxisMetric, y_metric: AxisMetric
) -> list[_Point]:
    """Return the load points of a result that have both metrics, from left to right."""
    points = []
    for load_point in result.load_points:
        x = x_metric.value(load_point, result)
        y = y_metric.value(load_point, result)
        if x is not None and y is not None:
            points.append(_Point(load_point, x, y))
    return sorted(points, key=lambda point: point.x)


def assign_colors(results: Sequence[StoredResult], color_by: str) -> dict[str, str]:
    """Return the color of each result by its name. `color_by` is a key of `COLOR_KEYS`."""
    color_key = COLOR_KEYS.get(color_by, _result_name)
    values = list(dict.fromkeys(map(color_key, results)))
    return {
        result.name: CURVE_COLORS[values.index(color_key(result)) % len(CURVE_COLORS)]
        for result in results
    }


class _TpotLimitMarks(NamedTuple):
    """How a chart shows the TPOT limits of SLOs.

    Attributes:
        bands: Shaded regions within a limit.
        marks: Vertical lines at limits.
    """

    bands: tuple[ShadedBand, ...] = ()
    marks: tuple[Mark, ...] = ()


def _tpot_limits(
    results: Sequence[StoredResult], colors: Mapping[str, str], x_max: float
) -> _TpotLimitMarks:
    """Return the TPOT limits of SLOs on an axis of tokens/s per user, which is 1 / TPOT.

    If all results have the same limit, the region within it is shaded. Otherwise each limit is a
    vertical line in the color of its result. Limits beyond the axis are left out.

    Args:
        results: The results.
        colors: The color of each result by its name.
        x_max: The end of the axis.
    """
    common_limit_ms = _common_value(result.tpot_limit_ms for result in results)
    if common_limit_ms is None:
        return _TpotLimitMarks(marks=_tpot_limit_lines(results, colors, x_max))

    min_speed = _speed_at_tpot(common_limit_ms)
    if min_speed >= x_max:
        return _TpotLimitMarks()

    label = f"meets SLO: TPOT ≤ {common_limit_ms:g} ms"
    band = ShadedBand(start=min_speed, end=x_max, label=label, color="good")
    return _TpotLimitMarks(bands=(band,))


def _tpot_limit_lines(
    results: Sequence[StoredResult], colors: Mapping[str, str], x_max: float
) -> tuple[Mark, ...]:
    """Return a vertical line at the TPOT limit of each result that has one, without duplicates."""
    marks: list[Mark] = []
    for result in results:
        limit_ms = result.tpot_limit_ms
        if limit_ms is None or _speed_at_tpot(limit_ms) >= x_max:
            continue

        mark = Mark(
            x=_speed_at_tpot(limit_ms),
            label=f"SLO: TPOT ≤ {limit_ms:g} ms",
            color=colors[result.name],
        )
        if mark not in marks:
            marks.append(mark)

    return tuple(marks)


def _speed_at_tpot(tpot_ms: float) -> float:
    """Return the output speed of a user in tokens/s: the inverse of TPOT."""
    return MS_PER_S / tpot_ms


def _common_value(values: Iterable[float | None]) -> float | None:
    """Return the value if all values are equal, or None."""
    distinct_values = set(values)
    return distinct_values.pop() if len(distinct_values) == 1 else None


def _legend_label(result: StoredResult, color_by: str) -> str:
    """Return the name of a result in the legend, after the value that decides its color."""
    value = COLOR_KEYS.get(color_by, _result_name)(result)
    return result.name if value == result.name else f"{value}: {result.name}"


def _result_series(
    result: StoredResult, points: Sequence[_Point], color: str, label: str, *, links: bool
) -> Iterator[Series]:
    """Yield the curve of a result: a solid line and a dotted line through its load points.

    The solid line joins the load points that are valid and met the SLO. The dotted one joins those
    that are invalid or missed it. A line without points is left out.

    Args:
        result: The result.
        points: Its load points.
        color: Its color.
        label: Its name in the legend.
        links: Whether points lead to the pages of their runs.
    """
    met_points = [point for point in points if point.meets_slo]
    other_points = [point for point in points if not point.meets_slo]
    if met_points:
        yield _points_series(result, met_points, color, label, dash="", links=links)
    if other_points:
        other_label = f"{label}: SLO missed or invalid"
        yield _points_series(result, other_points, color, other_label, dash=DOTTED, links=links)


def _points_series(
    result: StoredResult,
    points: Sequence[_Point],
    color: str,
    label: str,
    *,
    dash: str,
    links: bool,
) -> Series:
    """Return load points of a result as dots of the chart, joined by a line.

    The dots of a search are not joined: its trials have different durations, so that a line
    through them would have no meaning.

    Args:
        result: The result.
        points: The load points, from left to right.
        color: The color of the dots and the line.
        label: The text in the legend.
        dash: The pattern of the line; "" for a solid one.
        links: Whether each dot leads to the page of its run.
    """
    has_line = result.kind != "search"
    run_urls = [_run_url(point.load_point, result) for point in points] if links else []
    return Series(
        name=label,
        x=[point.x for point in points],
        y=[point.y for point in points],
        color=color,
        width=LINE_WIDTH if has_line else 0,
        dash=dash,
        dots=True,
        labels=tuple(_point_label(point.load_point, result) for point in points),
        links=tuple(run_urls),
    )


def _point_label(load_point: LoadPointResult, result: StoredResult) -> str:
    """Return the label of a point, which is its load, or "" if the point has no label.

    The trials of a search lie so close together that their labels would overlap. So only one of
    them has a label: the trial that the search has selected as its result, or else the best one.
    """
    if result.kind == "search" and result.curve is not None:
        labelled_trial = result.selected_run or result.curve.best
        if load_point.name != labelled_trial:
            return ""
    return short_load_label(load_point)


def short_load_label(load_point: LoadPointResult) -> str:
    """Return a load as briefly as possible: "40/s", or "16" for a concurrency of 16."""
    rate = re.fullmatch(r"\w+ ([\d.]+)/s", load_point.load_label)
    if rate:
        return f"{float(rate[1]):.4g}/s"
    concurrency = re.fullmatch(r"(\d+) [a-z ]+", load_point.load_label)
    if concurrency:
        return f"{float(concurrency[1]):.4g}"
    return load_point.name if load_point.load_value is None else f"{load_point.load_value:.4g}"


def _run_url(load_point: LoadPointResult, result: StoredResult) -> str:
    """Return the URL of the page of a point's run, as `loadgen ui` serves it.

    A mean of repeats has no run of its own, so it leads to the page of the result, as a single
    run does.
    """
    is_run_of_several = len(result.runs) > 1 and load_point in result.runs
    name = f"{result.name}/{load_point.name}" if is_run_of_several else result.name
    return f"result/{quote(name)}/"


def _interval_series(
    results: Sequence[StoredResult], colors: Mapping[str, str], *, y_key: str
) -> Iterator[Series]:
    """Yield a thick vertical line for the confidence interval of the throughput of each result.

    A search has an interval for the highest load within the SLO, and repeats of a run have one for
    their mean. The position of the line on the x axis is the output speed per user at that load or
    of these repeats. A chart of costs has no such lines, because intervals are those of throughput.

    Args:
        results: The results.
        colors: The color of each result by its name.
        y_key: The key of the metric of the y axis.
    """
    if y_key == COST:
        return
    for result in results:
        interval = result.interval
        if interval is None or result.curve is None:
            continue

        divisor = 1
        if y_key == THROUGHPUT_PER_GPU and result.curve.gpus:
            divisor = result.curve.gpus

        yield Series(
            x=[interval.per_user, interval.per_user],
            y=[interval.low / divisor, interval.high / divisor],
            color=colors[result.name],
            width=INTERVAL_WIDTH,
        )
