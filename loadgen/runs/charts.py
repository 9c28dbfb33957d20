"""Describes the charts on the page of a run.

Pure: each function takes the data of all charts and yields `page.Chart` objects.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from loadgen.core import format
from loadgen.core.server_metrics import series as server_series
from loadgen.render.page import COLORS, Axis, Chart, Mark, Series, ShadedBand
from loadgen.runs.page_data import (
    MAX_BINS,
    Bins,
    ChartData,
    ScatterPlot,
    ScatterPlots,
    StageSpan,
)
from loadgen.runs.percentile_curves import round_to
from loadgen.runs.slo_text import outcome_color

if TYPE_CHECKING:
    from loadgen.core.metrics.sections import Recovery, SlowRequest
    from loadgen.core.metrics.slo_terms import TermResult
    from loadgen.core.metrics.summary import Summary
    from loadgen.runs.percentile_curves import PercentileCurve

QUANTILE_COLORS = {"p50": "c1", "p90": "c3", "p99": "c2", "max": "c6"}

DASHED = "5 4"
DOTTED = "2 4"
_DASHES = {"max": DOTTED, "scheduled": DASHED}
"""Lines that are not solid, by the name of the series."""

LOG_RATIO = 30
"""Latencies that differ by more than this factor are shown on a logarithmic axis."""

NEAR_FACTOR = 3
"""A limit is drawn if it is below so many times the largest value. Drawing a limit far above would
compress all values into a line."""

MEASURED_STAGE_COLORS = ("c6", "card")
UNMEASURED_STAGE_COLOR = "c5"
DRAIN_COLOR = "c4"
"""The colors of bands behind charts over time, as `render.page` names colors."""

MIN_DRAIN_SHARE = 0.01
"""A drain is marked if it lasts longer than this share of the run."""


def _build_latency_axis(values: Sequence[float | None]) -> Axis:
    """Return an axis for latencies, logarithmic if they differ by more than LOG_RATIO."""
    known = [value for value in values if value is not None and value > 0]
    if known and max(known) > LOG_RATIO * min(known):
        return Axis(label="ms, log", unit="ms", log=True)
    return Axis(label="ms", unit="ms", min=0)


def _build_percent_axis(label: str, maximum: float | None = 1) -> Axis:
    return Axis(label=label, format="percent", min=0, max=maximum)


# -- percentile curves -----------------------------------------------------------------------------


class _CurveChart(NamedTuple):
    """A chart of percentile curves: title, metrics, and the metrics whose limits it shows."""

    title: str
    metrics: tuple[str, ...]
    limited_metrics: tuple[str, ...]


_CURVE_CHARTS = (
    _CurveChart("TTFT", ("ttft", "ttft_from_sent"), ("ttft", "ttft_from_sent")),
    _CurveChart(
        "TPOT and inter-chunk latency", ("tpot", "inter_chunk"), ("tpot", "inter_chunk", "itl")
    ),
    _CurveChart("E2E latency", ("e2e",), ("e2e",)),
    _CurveChart("Max ITL of a request", ("max_gap",), ("max_gap",)),
)


def build_percentile_charts(data: ChartData, summary: Summary) -> Iterator[Chart]:
    """Yield charts of percentile curves, with the limits of the SLO.

    A percentile curve shows the latency at each percentile. Its line is dashed where the samples
    are too few to support the percentile. Latencies that are omitted from the results, because the
    client could not measure them exactly, have no curve.
    """
    omitted_metrics = summary.metrics_withholding("p50")
    for chart in _CURVE_CHARTS:
        curve_by_metric = {
            metric: data.percentile_curves[metric]
            for metric in chart.metrics
            if metric not in omitted_metrics and metric in data.percentile_curves
        }
        terms = [term for term in summary.goodput.slo if term.metric in chart.limited_metrics]
        if curve_by_metric:
            yield _build_curve_chart(chart.title, curve_by_metric, terms)


def _build_curve_chart(
    title: str, curve_by_metric: Mapping[str, PercentileCurve], terms: Sequence[TermResult]
) -> Chart:
    """Return a chart of percentile curves, with a line for each limit of the SLO in `terms`.

    The first curve is the main one. A percentile is supported if there are enough samples for it.
    The note and a vertical mark state the highest percentile that the samples of the main curve
    support.
    """
    curves = list(curve_by_metric.values())
    main_curve = curves[0]
    values_ms = [value for curve in curves for value in curve.values_ms]
    last_position = max(curve.positions[-1] for curve in curves)

    marks = [_build_limit_mark(term, max(values_ms)) for term in terms]
    if main_curve.supported_until < last_position:
        label = f"p{_format_percentile(main_curve.supported_until)}"
        marks.append(Mark(x=main_curve.supported_until, label=label, color="soft"))

    return Chart(
        title=title,
        note=_describe_support(main_curve),
        x=Axis(label="percentile", format="nines", min=0, max=last_position),
        y=_build_latency_axis(values_ms),
        series=tuple(_build_curve_lines(curve_by_metric)),
        marks=tuple(marks),
    )


def _describe_support(curve: PercentileCurve) -> str:
    """Return up to which percentile the samples of a curve are enough, as a note of its chart."""
    percentile = f"p{_format_percentile(curve.supported_until)}"
    note = f"{format.counted(curve.count, 'sample')} support up to {percentile}"
    has_dashed_part = curve.supported_until < curve.positions[-1]
    return f"{note}; dashed beyond" if has_dashed_part else note


def _build_curve_lines(curve_by_metric: Mapping[str, PercentileCurve]) -> Iterator[Series]:
    """Yield the line of each percentile curve, each in a color of its own.

    A line is solid up to the highest percentile that the samples support, and dashed beyond. TTFT
    from the time of sending is always dashed.
    """
    # A chart has at most two curves, and COLORS is longer.
    colors = COLORS[: len(curve_by_metric)]
    for color, (metric, curve) in zip(colors, curve_by_metric.items(), strict=True):
        yield Series(
            name=curve.name,
            x=curve.positions,
            y=curve.values_ms,
            color=color,
            solid_until=curve.supported_until,
            dash=DASHED if metric == "ttft_from_sent" else "",
        )


def _build_limit_mark(term: TermResult, largest_ms: float) -> Mark:
    """Return the line of a limit of the SLO, in the color of its outcome.

    The axis is extended to show the limit if it was missed or is near the largest value. A limit
    far above that was met would compress all values, so it does not extend the axis.
    """
    is_missed = term.met is False
    is_near = term.limit_ms < NEAR_FACTOR * largest_ms
    return Mark(
        y=term.limit_ms,
        label=f"limit {term.limit_ms:,.10g} ms at p{term.quantile * 100:g}",
        color=outcome_color(term.met),
        extends_axis=is_missed or is_near,
    )


def _format_percentile(position: float) -> str:
    """Return a position on the percentile axis as a percentile: 2.0 is `99`.

    It is rounded down, so that it never claims more than the samples support.
    """
    decimals = max(int(position) - 1, 0)
    percent = (1 - 10**-position) * 100
    return f"{int(percent * 10**decimals) / 10**decimals:.{decimals}f}"


# -- over time -------------------------------------------------------------------------------------


def _build_time_axis(data: ChartData) -> Axis:
    return Axis(label="since the start of the run", format="time", min=0, max=data.length_s)


def _build_line_chart(
    data: ChartData,
    title: str,
    y: Axis,
    series: tuple[Series, ...],
    *,
    note: str = "",
    marks: tuple[Mark, ...] = (),
) -> Chart:
    """Return a chart of lines over the time of the run, with its stages as bands."""
    return Chart(
        title=title,
        x=_build_time_axis(data),
        y=y,
        series=series,
        bands=_build_stage_bands(data),
        note=note,
        marks=marks,
    )


def _build_binned_chart(
    data: ChartData,
    title: str,
    bins: Bins,
    y: Axis,
    note: str = "",
    marks: tuple[Mark, ...] = (),
) -> Chart:
    """Return a chart with a line for each series of the bins."""
    centers = _bin_centers(bins, data.length_s)
    has_legend = len(bins.series) > 1
    series = [
        Series(
            name=name if has_legend else "",
            x=centers,
            y=values,
            color=QUANTILE_COLORS.get(name, COLORS[index % len(COLORS)]),
            dash=_DASHES.get(name, ""),
        )
        for index, (name, values) in enumerate(bins.series.items())
    ]

    return _build_line_chart(data, title, y, tuple(series), note=note, marks=marks)


def _bin_centers(bins: Bins, length_s: float) -> tuple[float, ...]:
    """Return the middle of each bin in seconds. The last bin ends with the run."""
    count = max((len(values) for values in bins.series.values()), default=0)
    edges = [min(index * bins.width_s, length_s) for index in range(count + 1)]
    return tuple(round((start + end) / 2, 6) for start, end in pairwise(edges))


def _build_stage_bands(data: ChartData) -> tuple[ShadedBand, ...]:
    """Return the stages of the run as bands behind a chart over time, with the drain as the last.

    The drain is the time in which the run only waits for its last responses.
    """
    bands = [
        ShadedBand(start=stage.start_s, end=stage.end_s, label=stage.name, color=color)
        for stage, color in zip(data.stages, _choose_stage_colors(data.stages), strict=True)
        if color is not None
    ]
    load_end_s = max((stage.end_s for stage in data.stages), default=0.0)

    drain_s = data.length_s - load_end_s
    if data.stages and drain_s > MIN_DRAIN_SHARE * data.length_s:
        drain = ShadedBand(start=load_end_s, end=data.length_s, label="draining", color=DRAIN_COLOR)
        bands.append(drain)

    return tuple(bands)


def _choose_stage_colors(stages: Sequence[StageSpan]) -> Iterator[str | None]:
    """Yield the color of each stage, or None for a stage that is not shaded.

    Stages that are not measured, such as a warm-up, have one color. Several measured stages
    alternate between two colors so that they can be distinguished. A single one is not shaded.
    """
    has_several_measured = sum(stage.measured for stage in stages) > 1
    alternating_colors = cycle(MEASURED_STAGE_COLORS)
    for stage in stages:
        if not stage.measured:
            yield UNMEASURED_STAGE_COLOR
        elif has_several_measured:
            yield next(alternating_colors)
        else:
            yield None


def build_load_charts(data: ChartData) -> Iterator[Chart]:
    """Yield charts of request rates, output tokens per second and requests in flight over time."""
    load = data.load
    request_axis = Axis(label="req/s", unit="req/s", min=0)
    note = f"per {load.request_rates.width_s:g} s"
    yield _build_binned_chart(
        data, "Offered and completed load", load.request_rates, request_axis, note
    )
    token_axis = Axis(label="tok/s", unit="tok/s", min=0)
    yield _build_binned_chart(data, "Output throughput", load.output_rate, token_axis)
    in_flight_axis = Axis(label="requests", min=0)
    yield _build_binned_chart(data, "Requests in flight", load.in_flight, in_flight_axis)


def build_latency_charts(data: ChartData, summary: Summary) -> Iterator[Chart]:
    """Yield TTFT and TPOT over time, with the limits of the SLO.

    A latency that is omitted from the results, or has no values, has no chart.
    """
    omitted_metrics = summary.metrics_withholding("p50")
    for metric, title, bins, time_label in (
        ("ttft", "TTFT", data.latency.ttft, "by scheduled time"),
        ("tpot", "TPOT", data.latency.tpot, "by time of the last token"),
    ):
        terms = [term for term in summary.goodput.slo if term.metric == metric]
        has_values = any(value is not None for value in _all_values(bins))
        if has_values and metric not in omitted_metrics:
            yield _build_latency_chart(data, title, bins, time_label, terms)


def _all_values(bins: Bins) -> Iterator[float | None]:
    """Yield the values of all series of the bins. None is a bin without a value."""
    return chain.from_iterable(bins.series.values())


def _build_latency_chart(
    data: ChartData, title: str, bins: Bins, time_label: str, terms: Sequence[TermResult]
) -> Chart:
    """Return the chart of a latency over time, with the limits of the SLO.

    A limit that is near the values is drawn as a line. A limit far above them would compress them,
    so the note states it instead.

    Args:
        data: The data of all charts.
        title: The title of the chart.
        bins: The percentiles of the latency for each time bin, in ms, with at least one value.
        time_label: Which time of a request decides its bin.
        terms: The objectives of the SLO for this latency.
    """
    values_ms = [value for value in _all_values(bins) if value is not None]
    highest_near_limit_ms = NEAR_FACTOR * max(values_ms)
    near_terms = [term for term in terms if term.limit_ms < highest_near_limit_ms]
    far_terms = [term for term in terms if term.limit_ms >= highest_near_limit_ms]
    marks = [
        Mark(
            y=term.limit_ms,
            label=_limit_label(term),
            color=outcome_color(term.met),
            extends_axis=True,
        )
        for term in near_terms
    ]
    far_limits = [f"{_limit_label(term)} is {term.limit_ms:,.4g} ms" for term in far_terms]
    note = ", ".join((f"per {bins.width_s:g} s", time_label, *far_limits))
    latency_axis = _build_latency_axis(values_ms)

    return _build_binned_chart(data, title, bins, latency_axis, note, tuple(marks))


def _limit_label(term: TermResult) -> str:
    """Return a label such as `limit at p95`."""
    return f"limit at p{term.quantile * 100:g}"


def build_recovery_charts(data: ChartData, recoveries: Sequence[Recovery]) -> Iterator[Chart]:
    """Yield the SLO attainment over time, with each event and when the SLO was met again.

    An event is a change that a server has to recover from: a spike of the load, the loss of a
    server, or a scale-up. A run without an SLO has no chart.
    """
    attainment = data.load.slo_attainment
    if attainment is None:
        return

    marks = []
    for recovery in recoveries:
        label = f"{recovery.load_before} to {recovery.load_after}"
        marks.append(Mark(x=recovery.at_s, label=label, color="warn"))
        if recovery.recovered_after_s:
            recovered_s = recovery.at_s + recovery.recovered_after_s
            marks.append(Mark(x=recovered_s, label="met again", color="good"))

    note = f"per {attainment.width_s:g} s, by scheduled time"
    axis = _build_percent_axis("% of requests")
    yield _build_binned_chart(data, "SLO attainment", attainment, axis, note, tuple(marks))


def build_inter_chunk_charts(data: ChartData, summary: Summary) -> Iterator[Chart]:
    """Yield a heat map of the inter-chunk latencies over time, unless they are omitted.

    An inter-chunk latency is the time between two chunks of a streamed response. They are omitted
    from the results if the client could not measure them exactly.
    """
    cells = data.latency.inter_chunk
    omitted_metrics = summary.metrics_withholding("p50")
    if not cells or "inter_chunk" in omitted_metrics:
        return

    lowest_ms = min(cell.low for cell in cells)
    highest_ms = max(cell.high for cell in cells)
    yield Chart(
        kind="cells",
        title="Inter-chunk latency",
        note="darker is more frequent (log); stalls are at the top",
        x=_build_time_axis(data),
        y=Axis(label="ms, log", unit="ms", log=True, min=lowest_ms, max=highest_ms),
        cells=cells,
    )


# -- metrics of the servers ------------------------------------------------------------------------


class _ServerLineStyle(NamedTuple):
    """How a metric of the servers is drawn: its key in the samples, its label and its color."""

    metric: str
    label: str
    color: str


_SERVER_REQUEST_LINES = (
    _ServerLineStyle(server_series.RUNNING, "running, server", "c1"),
    _ServerLineStyle(server_series.WAITING, "queued, server", "c2"),
)
_SERVER_OUTPUT_LINES = (_ServerLineStyle(server_series.OUTPUT_TOKENS, "server", "c1"),)
_SERVER_CACHE_LINES = (
    _ServerLineStyle(server_series.KV_USE, "KV cache use", "c1"),
    _ServerLineStyle(server_series.CACHE_HIT_RATE, "prefix cache hit rate", "c3"),
)


def build_server_charts(
    data: ChartData, curve_by_metric: Mapping[str, server_series.MetricCurve]
) -> Iterator[Chart]:
    """Yield the servers' own metrics over time, next to what the client measured.

    There is a chart of requests, one of output tokens and one of caches. A chart is left out if
    the servers report none of its metrics.
    """
    request_lines = _build_server_lines(data, curve_by_metric, _SERVER_REQUEST_LINES)
    if request_lines:
        client_line = _build_client_line(data, data.load.in_flight, "in flight, client")
        axis = Axis(label="requests", min=0)
        lines = (*request_lines, client_line)
        yield _build_line_chart(data, "Requests in the server", axis, lines)

    output_lines = _build_server_lines(data, curve_by_metric, _SERVER_OUTPUT_LINES)
    if output_lines:
        client_line = _build_client_line(data, data.load.output_rate, "client")
        axis = Axis(label="tok/s", unit="tok/s", min=0)
        title = "Output throughput, server and client"
        yield _build_line_chart(data, title, axis, (*output_lines, client_line))

    cache_lines = _build_server_lines(data, curve_by_metric, _SERVER_CACHE_LINES)
    if cache_lines:
        axis = _build_percent_axis("%", None)
        yield _build_line_chart(data, "Server caches", axis, cache_lines)


def _build_server_lines(
    data: ChartData,
    curve_by_metric: Mapping[str, server_series.MetricCurve],
    styles: Iterable[_ServerLineStyle],
) -> tuple[Series, ...]:
    """Return the lines of a chart of server metrics.

    Args:
        data: The data of all charts, with the length of the run.
        curve_by_metric: The values that the servers reported, by metric.
        styles: The metrics to show, each with the label and the color of its line. Those that the
            servers did not report during the run are left out.
    """
    lines = [
        _build_server_line(data, curve_by_metric[style.metric], style)
        for style in styles
        if style.metric in curve_by_metric
    ]
    return tuple(line for line in lines if line is not None)


def _build_server_line(
    data: ChartData, curve: server_series.MetricCurve, style: _ServerLineStyle
) -> Series | None:
    """Return a metric of the servers as a line, or None if no reading falls within the run.

    Each point is the mean of several consecutive readings, so that there are at most MAX_BINS.
    """
    readings_per_point = max(math.ceil(len(curve.t_s) / MAX_BINS), 1)
    times_s = _average_groups(curve.t_s, readings_per_point)
    values = _average_groups(curve.values, readings_per_point)
    points_in_run = [
        (time_s, value)
        for time_s, value in zip(times_s, values, strict=True)
        if 0 <= time_s <= data.length_s
    ]
    if not points_in_run:
        return None

    return Series(
        name=style.label,
        x=[time_s for time_s, _ in points_in_run],
        y=[value for _, value in points_in_run],
        color=style.color,
    )


def _build_client_line(data: ChartData, bins: Bins, name: str) -> Series:
    """Return what the client measured as a line, with a mean over about 1 s per point.

    That is the time between two reads of a metrics page, so that the lines of the client and of the
    servers are equally smooth.
    """
    (values,) = bins.series.values()
    bins_per_point = max(round(1 / bins.width_s), 1)
    times_s = _average_groups(_bin_centers(bins, data.length_s), bins_per_point)
    means = _average_groups([value or 0.0 for value in values], bins_per_point)
    return Series(name=name, x=times_s, y=means, color="soft", dash=DASHED)


def _average_groups(values: Sequence[float], group_size: int) -> tuple[float, ...]:
    """Return the mean of every `group_size` consecutive values, to 5 significant digits."""
    groups = [values[start : start + group_size] for start in range(0, len(values), group_size)]
    return tuple(round_to(sum(group) / len(group), 5) for group in groups)


# -- scatter plots ---------------------------------------------------------------------------------


def build_length_charts(data: ChartData) -> Iterator[Chart]:
    """Yield latencies by length, requested and received lengths, and the cache hit rate.

    A chart is left out if its values are not known, such as a cache hit rate that the server does
    not report, or if all requests have the same length.
    """
    lengths = data.scatter
    prompt_axis = Axis(label="prompt tokens", unit="prompt tokens", pad=True)
    output_axis = Axis(label="output tokens", unit="output tokens", pad=True)
    length_charts = [
        _build_scatter_chart("TTFT by prompt length", lengths.ttft_by_input, prompt_axis, "ms"),
        _build_scatter_chart(
            "E2E latency by output length", lengths.e2e_by_output, output_axis, "ms"
        ),
        _build_received_length_chart(lengths),
        _build_cache_hit_rate_chart(data),
    ]
    yield from (chart for chart in length_charts if chart is not None)


def _build_received_length_chart(lengths: ScatterPlots) -> Chart | None:
    """Return the received output tokens over the requested ones, or None if none are requested."""
    if lengths.received_by_requested is None:
        return None

    requested_axis = Axis(label="requested tokens", unit="requested", pad=True)
    return _build_scatter_chart(
        "Requested and received output length",
        lengths.received_by_requested,
        requested_axis,
        "tokens received",
    )


def _build_cache_hit_rate_chart(data: ChartData) -> Chart | None:
    """Return the fraction of prompt tokens that the server had in its cache, over time.

    Return None if the server does not report it or if it is 0 throughout the run.
    """
    hit_rate = data.load.cache_hit_rate
    if hit_rate is None or not any(hit_rate.series["cached"]):
        return None

    axis = _build_percent_axis("% of prompt tokens")
    line = Series(
        x=_bin_centers(hit_rate, data.length_s),
        y=hit_rate.series["cached"],
        color="c3",
    )
    return _build_line_chart(data, "Prefix cache hit rate", axis, (line,))


def _build_scatter_chart(title: str, plot: ScatterPlot, x: Axis, unit: str) -> Chart | None:
    """Return the chart of a scatter plot, or None if it would show nothing new.

    A plot without points shows nothing, and one whose points all have the same x shows less than
    a percentile curve.

    Args:
        title: The title of the chart.
        plot: The plot: all points, or for many requests the number of points in each cell.
        x: The x axis.
        unit: The unit of the y axis.
    """
    lowest_x, highest_x = plot.x_range
    if plot.count == 0 or lowest_x == highest_x:
        return None
    y = Axis(label=f"{unit}, log" if plot.log_y else unit, unit=unit, log=plot.log_y, pad=True)
    if plot.points:
        return _build_point_chart(title, plot, x, y)
    return _build_density_chart(title, plot, x, y)


def _build_point_chart(title: str, plot: ScatterPlot, x: Axis, y: Axis) -> Chart:
    """Return a chart with a dot for each point of a plot."""
    x_values, y_values = zip(*plot.points, strict=True)
    points = Series(x=x_values, y=y_values, color="c1")
    return Chart(kind="cloud", title=title, x=x, y=y, series=(points,))


def _build_density_chart(title: str, plot: ScatterPlot, x: Axis, y: Axis) -> Chart:
    """Return a chart of cells, which are the darker, the more points of the plot are in them.

    The cells fill the range of the values, so the axes end there.
    """
    lowest_x, highest_x = plot.x_range
    lowest_y, highest_y = plot.y_range
    return Chart(
        kind="cells",
        title=title,
        note=f"{format.counted(plot.count, 'request')}; darker is more frequent (log)",
        x=msgspec.structs.replace(x, min=lowest_x, max=highest_x, pad=False),
        y=msgspec.structs.replace(y, min=lowest_y, max=highest_y, pad=False),
        cells=plot.cells,
    )


class _SlowRequestPlot(NamedTuple):
    """A scatter plot of TTFT against a possible reason for a long one.

    Attributes:
        title: The title of the chart.
        points: All requests.
        label: The label of the x axis.
        field: The field of `SlowRequest` that has the x of a slow request.
        format: How the x axis formats its values.
    """

    title: str
    points: ScatterPlot
    label: str
    field: Literal["input_tokens", "in_flight", "queue_ms", "due_s"]
    format: Literal["number", "time"] = "number"


def build_slow_request_charts(data: ChartData, summary: Summary) -> Iterator[Chart]:
    """Yield scatter plots of TTFT against what may have made it long.

    These are the prompt length, the concurrency, the queue time and the time of the run. The
    slowest requests are marked, and link to their rows in the table of slow requests.
    """
    slowest = [
        request
        for request in summary.slowest
        if request.by == "ttft" and request.ttft_ms is not None
    ]
    for plot in _list_slow_request_plots(data.scatter):
        x_unit = plot.label if plot.format == "number" else ""
        x = Axis(label=plot.label, unit=x_unit, format=plot.format, pad=True)
        chart = _build_scatter_chart(plot.title, plot.points, x, "ms")
        if chart is None:
            continue
        all_series = (*chart.series, *_mark_slowest_requests(slowest, plot.field))
        yield msgspec.structs.replace(chart, series=all_series)


def _list_slow_request_plots(scatter: ScatterPlots) -> tuple[_SlowRequestPlot, ...]:
    """Return the scatter plots of TTFT in the order in which a page shows them."""
    return (
        _SlowRequestPlot(
            title="TTFT by prompt length",
            points=scatter.ttft_by_input,
            label="prompt tokens",
            field="input_tokens",
        ),
        _SlowRequestPlot(
            title="TTFT by concurrency",
            points=scatter.ttft_by_in_flight,
            label="other requests in flight",
            field="in_flight",
        ),
        _SlowRequestPlot(
            title="TTFT by queue time",
            points=scatter.ttft_by_queue,
            label="ms in the server's queue",
            field="queue_ms",
        ),
        _SlowRequestPlot(
            title="TTFT over time",
            points=scatter.ttft_by_time,
            label="since the start of the run",
            field="due_s",
            format="time",
        ),
    )


def _mark_slowest_requests(slowest: Sequence[SlowRequest], x_field: str) -> Iterator[Series]:
    """Yield the slowest requests as labelled points, unless none has a value for the x axis.

    Args:
        slowest: The slowest requests by TTFT, which is on the y axis.
        x_field: The field of `SlowRequest` on the x axis, such as "queue_ms".
    """
    requests = [request for request in slowest if getattr(request, x_field) is not None]
    if not requests:
        return

    yield Series(
        name="slowest",
        x=[getattr(request, x_field) for request in requests],
        y=[request.ttft_ms for request in requests],
        color="bad",
        labels=tuple(request.id or str(request.slot) for request in requests),
        # The rows of the table of slow requests have these ids.
        links=tuple(f"#slow-ttft-{request.slot}" for request in requests),
    )


# -- errors and the load generator -----------------------------------------------------------------


def build_error_charts(data: ChartData) -> Iterator[Chart]:
    """Yield the requests that are not ok over time, as stacked bars by kind of error."""
    bins = data.load.errors
    if not bins.series:
        return

    colors = ("bad", *COLORS)
    centers = _bin_centers(bins, data.length_s)
    yield Chart(
        kind="bars",
        title="Requests that are not ok",
        note=f"per {bins.width_s:g} s, by kind, at the time of the error",
        x=_build_time_axis(data),
        y=Axis(label="requests", min=0),
        series=tuple(
            Series(name=kind, x=centers, y=values, color=colors[index % len(colors)])
            for index, (kind, values) in enumerate(bins.series.items())
        ),
        bands=_build_stage_bands(data),
        step=bins.width_s,
        stack=True,
        wide=True,
    )


def build_client_charts(data: ChartData, summary: Summary) -> Iterator[Chart]:
    """Yield the CPU use and the send delay of the load generator over time.

    Both show whether the load generator itself was the bottleneck. A chart without values is left
    out.
    """
    bins = data.load.client_overhead
    if _has_values(bins.series["cpu"]):
        yield _build_cpu_chart(data, bins, summary.verdict.limits.cpu_share)
    if _has_values(bins.series["largest send delay"]):
        yield _build_send_delay_chart(data, bins)


def _has_values(values: Sequence[float | None]) -> bool:
    return any(value is not None for value in values)


def _build_cpu_chart(data: ChartData, bins: Bins, cpu_limit: float) -> Chart:
    """Return the CPU use of the busiest worker, with the limit above which a run is not valid.

    The limit is a fraction of a core. The axis reaches at least to one core.
    """
    cpu_shares = bins.series["cpu"]
    known_shares = [share for share in cpu_shares if share is not None]
    highest_share = max(1.0, *known_shares)
    axis = _build_percent_axis("% of a core", highest_share)
    limit = Mark(y=cpu_limit, label="validity limit", color="bad")
    line = Series(x=_bin_centers(bins, data.length_s), y=cpu_shares, color="c1")
    return _build_line_chart(data, "CPU use of the busiest worker", axis, (line,), marks=(limit,))


def _build_send_delay_chart(data: ChartData, bins: Bins) -> Chart:
    """Return the largest delay in each bin from when a request was due to when it was sent."""
    delays_ms = bins.series["largest send delay"]
    axis = _build_latency_axis(delays_ms)
    line = Series(x=_bin_centers(bins, data.length_s), y=delays_ms, color="c2")
    note = f"per {bins.width_s:g} s"
    return _build_line_chart(data, "Largest send delay", axis, (line,), note=note)
