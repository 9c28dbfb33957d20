"""The charts on the page of a run, and what each of them draws. Pure: takes `Figures`, returns `page.Chart` objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, pairwise
from typing import Any

import msgspec

from loadgen.core import format
from loadgen.core.metrics.sections import Recovery
from loadgen.core.metrics.summary import Summary
from loadgen.core.server_metrics import series as served
from loadgen.render.page import COLORS, Axis, Band, Chart, Mark, Series
from loadgen.runs.page_data import MOST_BINS, Bins, Cloud, Figures
from loadgen.runs.slo_text import outcome_color

QUANTILE_COLORS = {"p50": "c1", "p90": "c3", "p99": "c2", "max": "c6"}


def _ms_axis(values: Sequence[float | None]) -> Axis:
    """A logarithmic axis where the values differ so much (30 times) that no other shows them all."""
    known = [value for value in values if value is not None and value > 0]
    if known and max(known) > 30 * min(known):
        return Axis(label="ms, log", unit="ms", log=True)
    return Axis(label="ms", unit="ms", min=0)


# -- percentile curves ---------------------------------------------------------------------------------------------


def curves(figures: Figures, summary: Summary) -> Iterator[Chart]:
    """Percentile curves, dashed where the samples are too few to support them, with the SLO limits as lines."""
    for title, names in (
        ("Time to first token", ("ttft", "ttft_from_sent")),
        ("Time per output token, and gaps between events", ("tpot", "inter_chunk")),
        ("End to end", ("e2e",)),
        ("Largest gap of a request", ("max_gap",)),
    ):
        withheld = summary.metrics_without("p50")
        named_curves = [
            (name, figures.curves[name])
            for name in names
            if name not in withheld and name in figures.curves
        ]
        if not named_curves:
            continue
        terms = [term for term in summary.goodput.slo if term.metric in (*names, "itl")]
        if title != "Time per output token, and gaps between events":
            terms = [term for term in terms if term.metric != "itl"]
        last_place = max(curve.nines[-1] for _, curve in named_curves)
        values = [value for _, curve in named_curves for value in curve.ms]
        main = named_curves[0][1]
        note = f"{format.counted(main.count, 'sample')} carry it up to p{_percent(main.carried)}"
        yield Chart(
            title=title,
            note=f"{note}; dashed beyond" if main.carried < main.nines[-1] else note,
            x=Axis(label="percentile", format="nines", min=0, max=last_place),
            y=_ms_axis(values),
            series=tuple(
                Series(
                    name=curve.name,
                    x=curve.nines,
                    y=curve.ms,
                    color=COLORS[i],
                    solid_until=curve.carried,
                    dash="5 4" if name == "ttft_from_sent" else "",
                )
                for i, (name, curve) in enumerate(named_curves)
            ),
            marks=tuple(
                Mark(
                    y=term.limit_ms,
                    label=f"limit {term.limit_ms:,.10g} ms at p{term.quantile * 100:g}",
                    color=outcome_color(term.met),
                    extends_axis=term.met is False or term.limit_ms < 3 * max(values),
                )
                for term in terms
            )
            + (Mark(x=main.carried, label=f"p{_percent(main.carried)}", color="soft"),)
            * (main.carried < last_place),
        )


def _percent(nines: float) -> str:
    """A percentile as text, from its place in nines. Rounded down, so that it never claims more than is supported."""
    digits = max(int(nines) - 1, 0)
    return f"{int((1 - 10**-nines) * 100 * 10**digits) / 10**digits:.{digits}f}"


# -- over time -----------------------------------------------------------------------------------------------------


def _time_axis(figures: Figures) -> Axis:
    return Axis(label="since the start of the run", format="time", min=0, max=figures.length_s)


def _lines_over_time(
    figures: Figures, title: str, y: Axis, series: tuple[Series, ...], **more: Any
) -> Chart:
    """A chart of lines over the time of the run, with its stages as bands."""
    return Chart(
        title=title, x=_time_axis(figures), y=y, series=series, bands=bands(figures), **more
    )


def _centres(bins: Bins, length_s: float) -> tuple[float, ...]:
    """The middle of each bin, in seconds. The last bin counts only as far as the run lasted."""
    count = max((len(values) for values in bins.series.values()), default=0)
    edges = [min(i * bins.width_s, length_s) for i in range(count + 1)]
    return tuple(round((low + high) / 2, 6) for low, high in pairwise(edges))


def bands(figures: Figures) -> tuple[Band, ...]:
    """Stages as bands: unmeasured ones shaded, several measured ones shaded alternately; then the draining time."""
    stage_bands, count = [], sum(stage.measured for stage in figures.stages)
    shades = cycle(("c6", "card"))
    for stage in figures.stages:
        if count > 1 or not stage.measured:
            color = next(shades) if stage.measured else "c5"
            stage_bands.append(
                Band(start=stage.start_s, end=stage.end_s, label=stage.name, color=color)
            )
    stages_end_s = max((stage.end_s for stage in figures.stages), default=0)
    if figures.stages and figures.length_s - stages_end_s > 0.01 * figures.length_s:
        stage_bands.append(
            Band(start=stages_end_s, end=figures.length_s, label="draining", color="c4")
        )
    return tuple(stage_bands)


def over_time(figures: Figures) -> Iterator[Chart]:
    """Load, output tokens and requests in flight over time, with the stages marked."""
    each = f"per {figures.load.width_s:g} s: due by the schedule, sent, ended ok"
    load, tokens = (
        Axis(label="requests/s", unit="/s", min=0),
        Axis(label="tokens/s", unit="tokens/s", min=0),
    )
    yield _binned(figures, "Offered against delivered load", figures.load, load, each)
    yield _binned(figures, "Output tokens per second", figures.output, tokens)
    yield _binned(figures, "Requests in flight", figures.in_flight, Axis(label="requests", min=0))


def latency_over_time(figures: Figures, summary: Summary) -> Iterator[Chart]:
    """TTFT and TPOT over time, with their limits."""
    for title, name, bins, basis in (
        ("Time to first token", "ttft", figures.ttft, "by due instant"),
        ("Time per output token", "tpot", figures.tpot, "by the instant of the last token"),
    ):
        values = [value for series in bins.series.values() for value in series if value is not None]
        if name in summary.metrics_without("p50") or not values:
            continue
        terms = [t for t in summary.goodput.slo if t.metric == name]
        seen = [t for t in terms if t.limit_ms < 3 * max(values)]
        limits = tuple(
            Mark(
                y=t.limit_ms,
                label=f"limit at p{t.quantile * 100:g}",
                color=outcome_color(t.met),
                extends_axis=True,
            )
            for t in seen
        )
        above = (
            f"limit at p{t.quantile * 100:g} far above: {t.limit_ms:,.4g} ms"
            for t in terms
            if t not in seen
        )
        note = ", ".join((f"per {bins.width_s:g} s", basis, *above))
        yield _binned(figures, title, bins, _ms_axis(values), note, limits)


def recovery(figures: Figures, found: Sequence[Recovery]) -> Iterator[Chart]:
    """The share of requests within the SLO over time, with each event and when the SLO was back."""
    if figures.good is None:
        return
    marks = []
    for each in found:
        marks.append(
            Mark(x=each.at_s, label=f"{each.load_before} to {each.load_after}", color="warn")
        )
        if each.recovered_after_s:
            marks.append(Mark(x=each.at_s + each.recovered_after_s, label="back", color="good"))
    share = Axis(label="share", format="percent", min=0, max=1)
    note = f"per {figures.good.width_s:g} s, by due instant"
    yield _binned(figures, "Requests within the SLO", figures.good, share, note, tuple(marks))


def gaps_over_time(figures: Figures, summary: Summary) -> Iterator[Chart]:
    """The gaps between events over time."""
    if figures.gaps and "inter_chunk" not in summary.metrics_without("p50"):
        yield _gap_heat_chart(figures)


def _binned(
    figures: Figures, title: str, bins: Bins, y: Axis, note: str = "", marks: tuple[Mark, ...] = ()
) -> Chart:
    centres = _centres(bins, figures.length_s)
    series = tuple(
        Series(
            name=name if len(bins.series) > 1 else "", x=centres, y=values, color=color, dash=dash
        )
        for (name, values), (color, dash) in zip(bins.series.items(), _styles(bins), strict=False)
    )
    return _lines_over_time(figures, title, y, series, note=note, marks=marks)


def server(figures: Figures, curves_by_metric: Mapping[str, served.MetricCurve]) -> Iterator[Chart]:
    """The servers' own metrics over time, with the client's view of the same quantity where it has one."""

    def line(name: str, metric: str, color: str) -> tuple[Series, ...]:
        curve = curves_by_metric.get(metric)
        if curve is None:
            return ()
        means = _means(curve.t_s, curve.values, max(-(-len(curve.t_s) // MOST_BINS), 1))
        points = [(t, value) for t, value in zip(*means, strict=True) if 0 <= t <= figures.length_s]
        ts, values = zip(*points, strict=True) if points else ((), ())
        return (Series(name=name, x=ts, y=values, color=color),) if points else ()

    def client_series(bins: Bins, name: str) -> Series:
        """Means over about 1 s, the time between two reads of the metrics page, so that both lines are as smooth."""
        (values,) = bins.series.values()
        group = max(round(1 / bins.width_s), 1)
        t_s, means = _means(
            _centres(bins, figures.length_s), [value or 0.0 for value in values], group
        )
        return Series(name=name, x=t_s, y=means, color="soft", dash="5 4")

    requests = (
        *line("running, by the server", served.RUNNING, "c1"),
        *line("queued there", served.WAITING, "c2"),
    )
    shares = (
        *line("KV cache in use", served.KV_USE, "c1"),
        *line("prefix cache hits", served.HITS, "c3"),
    )
    tokens = line("by the server", served.OUTPUT, "c1")
    for title, series, y in (
        ("Requests in the server", requests, Axis(label="requests", min=0)),
        (
            "Output tokens per second, by both",
            tokens,
            Axis(label="tokens/s", unit="tokens/s", min=0),
        ),
        ("Caches of the server", shares, Axis(label="share", format="percent", min=0)),
    ):
        if series:
            client_lines = (
                [client_series(figures.in_flight, "in flight, by the client")]
                if series is requests
                else []
            )
            client_lines += (
                [client_series(figures.output, "by the client")] if series is tokens else []
            )
            yield _lines_over_time(figures, title, y, (*series, *client_lines))


def _means(
    x: Sequence[float], y: Sequence[float], group: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """X and y as means of consecutive groups of `group` points."""

    def group_means(values: Sequence[float]) -> tuple[float, ...]:
        parts = [values[i : i + group] for i in range(0, len(values), group)]
        return tuple(float(f"{sum(part) / len(part):.5g}") for part in parts)

    return group_means(x), group_means(y)


def _styles(bins: Bins) -> Iterator[tuple[str, str]]:
    """The colour and the dashes of each line."""
    for i, name in enumerate(bins.series):
        yield (
            QUANTILE_COLORS.get(name, COLORS[i % len(COLORS)]),
            {"max": "2 4", "due": "5 4"}.get(name, ""),
        )


def _gap_heat_chart(figures: Figures) -> Chart:
    low, high = min(cell[2] for cell in figures.gaps), max(cell[3] for cell in figures.gaps)
    return Chart(
        kind="cells",
        title="Gaps between output events",
        note="how many gaps of which length at which time: darker is more (log); stalls stand out at the top",
        x=_time_axis(figures),
        y=Axis(label="ms, log", unit="ms", log=True, min=low, max=high),
        cells=figures.gaps,
    )


# -- pairs, errors, the generator ----------------------------------------------------------------------------------


def lengths(figures: Figures) -> Iterator[Chart]:
    """TTFT over prompt length, E2E over output length, received over requested length, cache share over time."""
    tokens = Axis(label="prompt tokens", unit="prompt tokens", pad=True)
    out = Axis(label="output tokens", unit="output tokens", pad=True)
    yield from _cloud_chart("TTFT against prompt length", figures.ttft_by_input, tokens, "ms")
    yield from _cloud_chart("E2E against output length", figures.e2e_by_output, out, "ms")
    if figures.asked_by_output is not None:
        asked = Axis(label="asked for, tokens", unit="asked", pad=True)
        yield from _cloud_chart(
            "Output length: asked against received",
            figures.asked_by_output,
            asked,
            "tokens received",
        )
    if figures.cached is not None and any(figures.cached.series["cached"]):
        centres, share = (
            _centres(figures.cached, figures.length_s),
            Axis(label="share", format="percent", min=0, max=1),
        )
        series = (Series(x=centres, y=figures.cached.series["cached"], color="c3"),)
        yield _lines_over_time(figures, "Prompt tokens from the prefix cache", share, series)


def _cloud_chart(title: str, cloud: Cloud, x: Axis, unit: str) -> Iterator[Chart]:
    if cloud.count == 0 or cloud.x[0] == cloud.x[1]:
        return  # nothing, or all lengths are equal: the percentile curve shows more
    y = Axis(label=f"{unit}, log" if cloud.log_y else unit, unit=unit, log=cloud.log_y, pad=True)
    if cloud.points:
        xs, ys = zip(*cloud.points, strict=True)
        yield Chart(kind="cloud", title=title, x=x, y=y, series=(Series(x=xs, y=ys, color="c1"),))
        return
    x = msgspec.structs.replace(x, min=cloud.x[0], max=cloud.x[1], pad=False)
    y = msgspec.structs.replace(y, min=cloud.y[0], max=cloud.y[1], pad=False)
    note = f"{format.counted(cloud.count, 'request')}, counted in cells: darker is more (log)"
    yield Chart(kind="cells", title=title, note=note, x=x, y=y, cells=cloud.cells)


def slow(figures: Figures, summary: Summary) -> Iterator[Chart]:
    """TTFT against what may have made it long; the slowest requests are large points, and lead to their rows."""
    slowest = [
        request
        for request in summary.slowest
        if request.by == "ttft" and request.ttft_ms is not None
    ]
    for title, cloud, label, field in (
        (
            "TTFT against prompt length, slowest marked",
            figures.ttft_by_input,
            "prompt tokens",
            "input_tokens",
        ),
        (
            "TTFT against requests in flight",
            figures.ttft_by_in_flight,
            "others in flight",
            "in_flight",
        ),
        (
            "TTFT against the server's queue",
            figures.ttft_by_queue,
            "ms in the server's queue",
            "queue_ms",
        ),
        ("TTFT over the time of the run", figures.ttft_by_time, "", "due_s"),
    ):
        of_time = field == "due_s"
        x = Axis(
            label=label or "since the start of the run",
            unit=label,
            format="time" if of_time else "number",
            pad=True,
        )
        points = [
            (value, request)
            for request in slowest
            if (value := getattr(request, field)) is not None
        ]
        for chart in _cloud_chart(title, cloud, x, "ms"):
            marked = Series(
                name="slowest",
                x=[value for value, _ in points],
                y=[request.ttft_ms for _, request in points],
                color="bad",
                labels=tuple(request.id or str(request.slot) for _, request in points),
                links=tuple(f"#slow-ttft-{request.slot}" for _, request in points),
            )
            yield msgspec.structs.replace(
                chart, series=(*chart.series, marked) if points else chart.series
            )


def errors(figures: Figures) -> Iterator[Chart]:
    """Requests that are not ok, as stacked bars by kind of error."""
    bins = figures.errors
    if not bins.series:
        return
    centres = _centres(bins, figures.length_s)
    yield Chart(
        kind="bars",
        title="Requests that are not ok",
        note=f"per {bins.width_s:g} s, by kind, at the instant that it was known",
        x=_time_axis(figures),
        y=Axis(label="requests", min=0),
        series=tuple(
            Series(name=kind, x=centres, y=values, color=("bad", *COLORS)[i % 7])
            for i, (kind, values) in enumerate(bins.series.items())
        ),
        bands=bands(figures),
        step=bins.width_s,
        stack=True,
        wide=True,
    )


def client(figures: Figures, summary: Summary) -> Iterator[Chart]:
    """CPU use of the load generator, and its send lag."""
    bins = figures.client
    centres = _centres(bins, figures.length_s)
    cpu, lag = bins.series["cpu"], bins.series["send lag, largest"]
    if any(value is not None for value in cpu):
        share = Axis(
            label="of one core", format="percent", min=0, max=max(1.0, *(v or 0 for v in cpu))
        )
        marks = (
            Mark(y=summary.verdict.limits.cpu_share, label="limit of the verdict", color="bad"),
        )
        line = Series(x=centres, y=cpu, color="c1")
        yield _lines_over_time(figures, "CPU of the busiest worker", share, (line,), marks=marks)
    if any(value is not None for value in lag):
        line = Series(x=centres, y=lag, color="c2")
        yield _lines_over_time(
            figures, "Largest send lag", _ms_axis(lag), (line,), note=f"per {bins.width_s:g} s"
        )
