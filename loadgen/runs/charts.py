"""Describes the charts on the page of a run.

Pure: each function takes the data of all charts and yields `page.Chart` objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from loadgen.core import format
from loadgen.core.server_metrics import series as server_series
from loadgen.render.page import COLORS, Axis, Chart, Mark, Series, ShadedBand
from loadgen.runs.page_data import MAX_BINS, Bins, ChartData, ScatterPlot
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

MIN_DRAIN_SHARE = 0.01
"""A drain is marked if it lasts longer than this share of the run."""


def _ms_axis(values: Sequence[float | None]) -> Axis:
    """Return an axis for latencies, logarithmic if they differ by more than LOG_RATIO."""
    known = [value for value in values if value is not None and value > 0]
    if known and max(known) > LOG_RATIO * min(known):
        return Axis(label="ms, log", unit="ms", log=True)
    return Axis(label="ms", unit="ms", min=0)


def _share_axis(label: str, maximum: float | None = 1) -> Axis:
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


def curves(data: ChartData, summary: Summary) -> Iterator[Chart]:
    """Yield percentile curves with the limits of the SLO.

    Lines are dashed where the samples are too few to support the percentile.
    """
    omitted = summary.metrics_without("p50")
    for chart in _CURVE_CHARTS:
        curve_by_metric = {
            metric: data.percentile_curves[metric]
            for metric in chart.metrics
            if metric not in omitted and metric in data.percentile_curves
        }
        terms = [term for term in summary.goodput.slo if term.metric in chart.limited_metrics]
        if curve_by_metric:
            yield _curve_chart(chart.title, curve_by_metric, terms)


def _curve_chart(
    title: str, curve_by_metric: Mapping[str, PercentileCurve], terms: Sequence[TermResult]
) -> Chart:
    curves = list(curve_by_metric.values())
    main = curves[0]
    last_position = max(curve.positions[-1] for curve in curves)
    largest_ms = max(value for curve in curves for value in curve.values_ms)
    supported = f"p{_format_percentile(main.supported_until)}"
    note = f"{format.counted(main.count, 'sample')} support up to {supported}"
    if main.supported_until < main.positions[-1]:
        note += "; dashed beyond"
    marks = [_limit_mark(term, largest_ms) for term in terms]
    if main.supported_until < last_position:
        marks.append(Mark(x=main.supported_until, label=supported, color="soft"))
    return Chart(
        title=title,
        note=note,
        x=Axis(label="percentile", format="nines", min=0, max=last_position),
        y=_ms_axis([value for curve in curves for value in curve.values_ms]),
        series=tuple(
            Series(
                name=curve.name,
                x=curve.positions,
                y=curve.values_ms,
                color=color,
                solid_until=curve.supported_until,
                dash=DASHED if metric == "ttft_from_sent" else "",
            )
            for color, (metric, curve) in zip(COLORS, curve_by_metric.items(), strict=False)
        ),
        marks=tuple(marks),
    )


def _limit_mark(term: TermResult, largest_ms: float) -> Mark:
    """Return the line of a limit of the SLO, in the color of its outcome.

    A limit far above the largest value does not extend the axis (NEAR_FACTOR).
    """
    is_near = term.limit_ms < NEAR_FACTOR * largest_ms
    return Mark(
        y=term.limit_ms,
        label=f"limit {term.limit_ms:,.10g} ms at p{term.quantile * 100:g}",
        color=outcome_color(term.met),
        extends_axis=term.met is False or is_near,
    )


def _format_percentile(position: float) -> str:
    """Return a position on the percentile axis as a percentile: 2.0 is `99`.

    It is rounded down, so that it never claims more than the samples support.
    """
    decimals = max(int(position) - 1, 0)
    percent = (1 - 10**-position) * 100
    return f"{int(percent * 10**decimals) / 10**decimals:.{decimals}f}"


# -- over time -------------------------------------------------------------------------------------


def _time_axis(data: ChartData) -> Axis:
    return Axis(label="since the start of the run", format="time", min=0, max=data.length_s)


def _lines_over_time(
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
        x=_time_axis(data),
        y=y,
        series=series,
        bands=bands(data),
        note=note,
        marks=marks,
    )


def _binned_chart(
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
    return _lines_over_time(data, title, y, tuple(series), note=note, marks=marks)


def _bin_centers(bins: Bins, length_s: float) -> tuple[float, ...]:
    """Return the middle of each bin in seconds. The last bin ends with the run."""
    count = max((len(values) for values in bins.series.values()), default=0)
    edges = [min(index * bins.width_s, length_s) for index in range(count + 1)]
    return tuple(round((start + end) / 2, 6) for start, end in pairwise(edges))


def bands(data: ChartData) -> tuple[ShadedBand, ...]:
    """Return stages as bands of the time axis, and the drain.

    Stages that are not measured are shaded. Several measured stages are shaded alternately, and a
    single one is not shaded.
    """
    has_several = sum(stage.measured for stage in data.stages) > 1
    shades = cycle(("c6", "card"))
    stage_bands = []
    for stage in data.stages:
        if has_several or not stage.measured:
            color = next(shades) if stage.measured else "c5"
            stage_bands.append(
                ShadedBand(start=stage.start_s, end=stage.end_s, label=stage.name, color=color)
            )
    load_end_s = max((stage.end_s for stage in data.stages), default=0.0)
    drain_s = data.length_s - load_end_s
    if data.stages and drain_s > MIN_DRAIN_SHARE * data.length_s:
        drain = ShadedBand(start=load_end_s, end=data.length_s, label="draining", color="c4")
        stage_bands.append(drain)
    return tuple(stage_bands)


def over_time(data: ChartData) -> Iterator[Chart]:
    """Yield load, output tokens and requests in flight over time."""
    note = f"per {data.load.request_rates.width_s:g} s"
    requests = Axis(label="req/s", unit="req/s", min=0)
    tokens = Axis(label="tok/s", unit="tok/s", min=0)
    in_flight = Axis(label="requests", min=0)
    yield _binned_chart(data, "Offered and completed load", data.load.request_rates, requests, note)
    yield _binned_chart(data, "Output throughput", data.load.output_rate, tokens)
    yield _binned_chart(data, "Requests in flight", data.load.in_flight, in_flight)


def latency_over_time(data: ChartData, summary: Summary) -> Iterator[Chart]:
    """Yield TTFT and TPOT over time, with their limits."""
    omitted = summary.metrics_without("p50")
    for metric, title, bins, time_label in (
        ("ttft", "TTFT", data.latency.ttft, "by scheduled time"),
        ("tpot", "TPOT", data.latency.tpot, "by time of the last token"),
    ):
        values = [value for series in bins.series.values() for value in series if value is not None]
        if metric in omitted or not values:
            continue
        terms = [term for term in summary.goodput.slo if term.metric == metric]
        near = [term for term in terms if term.limit_ms < NEAR_FACTOR * max(values)]
        marks = [
            Mark(
                y=term.limit_ms,
                label=f"limit at p{term.quantile * 100:g}",
                color=outcome_color(term.met),
                extends_axis=True,
            )
            for term in near
        ]
        notes = [f"per {bins.width_s:g} s", time_label]
        notes += [
            f"limit at p{term.quantile * 100:g} is {term.limit_ms:,.4g} ms"
            for term in terms
            if term not in near
        ]
        yield _binned_chart(data, title, bins, _ms_axis(values), ", ".join(notes), tuple(marks))


def recovery(data: ChartData, recoveries: Sequence[Recovery]) -> Iterator[Chart]:
    """Yield the SLO attainment over time, with each event and when the SLO was met again."""
    attainment = data.load.slo_attainment
    if attainment is None:
        return
    marks = []
    for event in recoveries:
        label = f"{event.load_before} to {event.load_after}"
        marks.append(Mark(x=event.at_s, label=label, color="warn"))
        if event.recovered_after_s:
            recovered_s = event.at_s + event.recovered_after_s
            marks.append(Mark(x=recovered_s, label="met again", color="good"))
    note = f"per {attainment.width_s:g} s, by scheduled time"
    axis = _share_axis("% of requests")
    yield _binned_chart(data, "SLO attainment", attainment, axis, note, tuple(marks))


def inter_chunk_over_time(data: ChartData, summary: Summary) -> Iterator[Chart]:
    """Yield the inter-chunk latencies over time, unless they are omitted from the results."""
    cells = data.latency.inter_chunk
    if not cells or "inter_chunk" in summary.metrics_without("p50"):
        return
    lowest_ms = min(low for _, _, low, _, _ in cells)
    highest_ms = max(high for _, _, _, high, _ in cells)
    yield Chart(
        kind="cells",
        title="Inter-chunk latency",
        note="darker is more frequent (log); stalls are at the top",
        x=_time_axis(data),
        y=Axis(label="ms, log", unit="ms", log=True, min=lowest_ms, max=highest_ms),
        cells=cells,
    )


# -- metrics of the servers ------------------------------------------------------------------------


def server(
    data: ChartData, curve_by_metric: Mapping[str, server_series.MetricCurve]
) -> Iterator[Chart]:
    """Yield the servers' own metrics over time, next to what the client saw."""

    def lines(*labels: tuple[str, str, str]) -> tuple[Series, ...]:
        """Return a line for each (metric, name, color) that the servers report."""
        server_lines = [
            _server_line(data, curve_by_metric[metric], name, color)
            for metric, name, color in labels
            if metric in curve_by_metric
        ]
        return tuple(line for line in server_lines if line is not None)

    requests = lines(
        (server_series.RUNNING, "running, server", "c1"),
        (server_series.WAITING, "queued, server", "c2"),
    )
    if requests:
        client_line = _client_line(data, data.load.in_flight, "in flight, client")
        axis = Axis(label="requests", min=0)
        yield _lines_over_time(data, "Requests in the server", axis, (*requests, client_line))
    tokens = lines((server_series.OUTPUT, "server", "c1"))
    if tokens:
        client_line = _client_line(data, data.load.output_rate, "client")
        axis = Axis(label="tok/s", unit="tok/s", min=0)
        title = "Output throughput, server and client"
        yield _lines_over_time(data, title, axis, (*tokens, client_line))
    caches = lines(
        (server_series.KV_USE, "KV cache use", "c1"),
        (server_series.HITS, "prefix cache hit rate", "c3"),
    )
    if caches:
        yield _lines_over_time(data, "Server caches", _share_axis("%", None), caches)


def _server_line(
    data: ChartData, curve: server_series.MetricCurve, name: str, color: str
) -> Series | None:
    """Return a metric of the servers as a line of at most MAX_BINS points within the run."""
    group = max(-(-len(curve.t_s) // MAX_BINS), 1)
    t_s = _group_means(curve.t_s, group)
    values = _group_means(curve.values, group)
    points = [
        (time_s, value)
        for time_s, value in zip(t_s, values, strict=True)
        if 0 <= time_s <= data.length_s
    ]
    if not points:
        return None
    times_in_run, values_in_run = zip(*points, strict=True)
    return Series(name=name, x=times_in_run, y=values_in_run, color=color)


def _client_line(data: ChartData, bins: Bins, name: str) -> Series:
    """Return what the client saw, as means over about 1 s.

    That is the time between two reads of a metrics page, so that both lines are equally smooth.
    """
    (values,) = bins.series.values()
    group = max(round(1 / bins.width_s), 1)
    t_s = _group_means(_bin_centers(bins, data.length_s), group)
    means = _group_means([value or 0.0 for value in values], group)
    return Series(name=name, x=t_s, y=means, color="soft", dash=DASHED)


def _group_means(values: Sequence[float], group: int) -> tuple[float, ...]:
    """Return the means of consecutive groups of `group` values."""
    groups = [values[start : start + group] for start in range(0, len(values), group)]
    return tuple(float(f"{sum(group_values) / len(group_values):.5g}") for group_values in groups)


# -- scatter plots ---------------------------------------------------------------------------------


def lengths(data: ChartData) -> Iterator[Chart]:
    """Yield latencies by length, requested and received lengths, and the cache hit rate."""
    prompt = Axis(label="prompt tokens", unit="prompt tokens", pad=True)
    output = Axis(label="output tokens", unit="output tokens", pad=True)
    yield from _scatter_chart("TTFT by prompt length", data.scatter.ttft_by_input, prompt, "ms")
    yield from _scatter_chart(
        "E2E latency by output length", data.scatter.e2e_by_output, output, "ms"
    )
    received_by_requested = data.scatter.received_by_requested
    if received_by_requested is not None:
        requested = Axis(label="requested tokens", unit="requested", pad=True)
        title = "Requested and received output length"
        yield from _scatter_chart(title, received_by_requested, requested, "tokens received")
    hit_rate = data.load.cache_hit_rate
    if hit_rate is not None and any(hit_rate.series["cached"]):
        axis = _share_axis("% of prompt tokens")
        line = Series(
            x=_bin_centers(hit_rate, data.length_s),
            y=hit_rate.series["cached"],
            color="c3",
        )
        yield _lines_over_time(data, "Prefix cache hit rate", axis, (line,))


def _scatter_chart(title: str, plot: ScatterPlot, x: Axis, unit: str) -> Iterator[Chart]:
    """Yield a scatter plot.

    A plot without points is left out, and one with a single x, which a percentile curve shows
    better.
    """
    if plot.count == 0 or plot.x[0] == plot.x[1]:
        return
    y = Axis(label=f"{unit}, log" if plot.log_y else unit, unit=unit, log=plot.log_y, pad=True)
    if plot.points:
        x_values, y_values = zip(*plot.points, strict=True)
        points = Series(x=x_values, y=y_values, color="c1")
        yield Chart(kind="cloud", title=title, x=x, y=y, series=(points,))
        return
    yield Chart(
        kind="cells",
        title=title,
        note=f"{format.counted(plot.count, 'request')}; darker is more frequent (log)",
        x=msgspec.structs.replace(x, min=plot.x[0], max=plot.x[1], pad=False),
        y=msgspec.structs.replace(y, min=plot.y[0], max=plot.y[1], pad=False),
        cells=plot.cells,
    )


class _SlowPlot(NamedTuple):
    """A scatter plot of TTFT by something that may have made it long.

    `field` is the field of `SlowRequest` with the x of a slow request.
    """

    title: str
    points: ScatterPlot
    label: str
    field: str
    format: Literal["number", "time"] = "number"


def slow(data: ChartData, summary: Summary) -> Iterator[Chart]:
    """Yield TTFT by what may have made it long. The slowest requests link to their rows."""
    slowest = [
        request
        for request in summary.slowest
        if request.by == "ttft" and request.ttft_ms is not None
    ]
    plots = (
        _SlowPlot(
            "TTFT by prompt length", data.scatter.ttft_by_input, "prompt tokens", "input_tokens"
        ),
        _SlowPlot(
            "TTFT by concurrency",
            data.scatter.ttft_by_in_flight,
            "other requests in flight",
            "in_flight",
        ),
        _SlowPlot(
            "TTFT by queue time", data.scatter.ttft_by_queue, "ms in the server's queue", "queue_ms"
        ),
        _SlowPlot(
            "TTFT over time",
            data.scatter.ttft_by_time,
            "since the start of the run",
            "due_s",
            "time",
        ),
    )
    for plot in plots:
        unit = plot.label if plot.format == "number" else ""
        x = Axis(label=plot.label, unit=unit, format=plot.format, pad=True)
        for chart in _scatter_chart(plot.title, plot.points, x, "ms"):
            marked = _slowest_points(slowest, plot.field)
            yield msgspec.structs.replace(chart, series=(*chart.series, *marked))


def _slowest_points(slowest: Sequence[SlowRequest], field: str) -> Iterator[Series]:
    """Yield the slowest requests as labelled points, unless none has a value of the field."""
    requests = [request for request in slowest if getattr(request, field) is not None]
    if not requests:
        return
    yield Series(
        name="slowest",
        x=[getattr(request, field) for request in requests],
        y=[request.ttft_ms for request in requests],
        color="bad",
        labels=tuple(request.id or str(request.slot) for request in requests),
        links=tuple(f"#slow-ttft-{request.slot}" for request in requests),
    )


# -- errors and the load generator -----------------------------------------------------------------


def errors(data: ChartData) -> Iterator[Chart]:
    """Yield failed requests over time, as stacked bars by kind of error."""
    bins = data.load.errors
    if not bins.series:
        return
    colors = ("bad", *COLORS)
    centers = _bin_centers(bins, data.length_s)
    yield Chart(
        kind="bars",
        title="Requests that are not ok",
        note=f"per {bins.width_s:g} s, by kind, at the time of the error",
        x=_time_axis(data),
        y=Axis(label="requests", min=0),
        series=tuple(
            Series(name=kind, x=centers, y=values, color=colors[index % len(colors)])
            for index, (kind, values) in enumerate(bins.series.items())
        ),
        bands=bands(data),
        step=bins.width_s,
        stack=True,
        wide=True,
    )


def client(data: ChartData, summary: Summary) -> Iterator[Chart]:
    """Yield the CPU use and the send delay of the load generator."""
    bins = data.load.client_overhead
    centers = _bin_centers(bins, data.length_s)
    cpu = bins.series["cpu"]
    if any(value is not None for value in cpu):
        highest = max(1.0, *(value or 0.0 for value in cpu))
        limit = Mark(y=summary.verdict.limits.cpu_share, label="validity limit", color="bad")
        line = Series(x=centers, y=cpu, color="c1")
        title = "CPU use of the busiest worker"
        axis = _share_axis("% of a core", highest)
        yield _lines_over_time(data, title, axis, (line,), marks=(limit,))
    delays = bins.series["largest send delay"]
    if any(value is not None for value in delays):
        line = Series(x=centers, y=delays, color="c2")
        note = f"per {bins.width_s:g} s"
        yield _lines_over_time(data, "Largest send delay", _ms_axis(delays), (line,), note=note)
