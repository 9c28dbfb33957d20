"""Results laid over one chart: what may stand on its axes, what a colour means, the limit of each. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import quote

from loadgen.render.page import COLORS, Axis, Band, Chart, Mark, Series
from loadgen.runs.load_point_results import LoadPointResult
from loadgen.ui.stored_result import StoredResult

HEIGHT = 420  # of a chart, in pixels
MOST_CURVES = 12


class Choice(NamedTuple):
    """What a reader has chosen. "": what is best for the results that are drawn.

    work: the name of a result whose kind of work is drawn. color: a key of `COLORED_BY`. x, y: keys of `ACROSS`, `UP`.
    """

    names: tuple[str, ...] = ()
    work: str = ""
    color: str = ""
    x: str = ""
    y: str = ""


class Measure(NamedTuple):
    """What an axis shows. `head`: in the title of the chart; {currency} is that of the prices."""

    head: str
    label: str
    unit: str
    value: Callable[[LoadPointResult, StoredResult], float | None]

    def of(self, currency: str) -> Measure:
        head, label, unit = (text.format(currency=currency) for text in self[:3])
        return Measure(head, label, unit, self.value)


ACROSS = {
    "user": Measure(
        "Speed of a user",
        "tokens/s of one user (1 / TPOT p50)",
        "tokens/s",
        lambda level, _: level.per_user,
    ),
    "e2e": Measure(
        "Answer time", "E2E p50 in s", "s", lambda level, _: level.e2e_p50 and level.e2e_p50 / 1000
    ),
    "ttft": Measure("Time to first token", "TTFT p99 in ms", "ms", lambda level, _: level.ttft_p99),
}
UP = {
    "gpu": Measure(
        "throughput of a GPU", "tokens/s per GPU", "tokens/s", lambda level, _: level.per_gpu
    ),
    "all": Measure(
        "throughput", "tokens/s in all", "tokens/s", lambda level, _: level.output_per_s
    ),
    "usd": Measure(
        "{currency} per million output tokens",
        "{currency} per million output tokens",
        "{currency}",
        lambda level, result: result.usd.get(level.name),
    ),
}
COLORED_BY: dict[str, Callable[[StoredResult], str]] = {
    "result": lambda result: result.name,
    "hardware": lambda result: result.hardware,
    "server": lambda result: result.software or "the server does not say",
    "model": lambda result: result.curve.model if result.curve is not None else "",
}
"""What has a colour of its own -> its value for a result."""


def colors(drawn: Sequence[StoredResult], by: str) -> dict[str, str]:
    """The colour of each result, by name."""
    value = COLORED_BY.get(by, COLORED_BY["result"])
    values = list(dict.fromkeys(map(value, drawn)))
    return {result.name: COLORS[values.index(value(result)) % len(COLORS)] for result in drawn}


def charts(
    drawn: Sequence[StoredResult], choice: Choice, currency: str, *, links: bool
) -> Iterator[Chart]:
    """The chart that was chosen; with prices and no choice, also that of the money. Nothing without figures.

    links: points lead to the pages of their runs, as `loadgen ui` serves them.
    """
    per_gpu = all(level.per_gpu is not None for result in drawn for level in result.load_points)
    first = choice.y or ("gpu" if per_gpu else "all")
    priced = [result for result in drawn if result.usd]
    across = ACROSS.get(choice.x, ACROSS["user"])
    for key in (first, *(["usd"] if priced and not choice.y else [])):
        shown = priced if key == "usd" else list(drawn)
        up = UP[key].of(currency)
        xs = [
            x
            for result in shown
            for level in result.load_points
            if (x := across.value(level, result)) is not None
        ]
        if not xs or not max(xs):
            continue
        most = max(xs) * 1.08  # room for the label of the last point
        painted = colors(drawn, choice.color)
        of_users = across is ACROSS["user"]
        bands, marks = _limits(shown, painted, most) if of_users else ((), ())
        unknown = " (not every result says its GPUs)" if key == "all" and not choice.y else ""
        yield Chart(
            kind="lines",
            title=f"{across.head} against {up.head}",
            wide=True,
            height=HEIGHT,
            x=Axis(label=across.label, unit=across.unit, min=0, max=most),
            y=Axis(label=up.label + unknown, unit=up.unit, min=0),
            bands=bands,
            marks=marks,
            series=(
                *_lines(shown, across, up, painted, choice.color, links=links),
                *(
                    _intervals(shown, painted, per_gpu=key == "gpu")
                    if of_users and key in ("gpu", "all")
                    else ()
                ),
            ),
        )


def _limits(
    drawn: Sequence[StoredResult], painted: dict[str, str], most: float
) -> tuple[tuple[Band, ...], tuple[Mark, ...]]:
    """Where TPOT is within what was promised: a region where all promise the same, else a line for each limit."""
    limits = {result.name: result.tpot_limit_ms for result in drawn}
    if len(set(limits.values())) == 1 and (limit := next(iter(limits.values()))):
        region = Band(start=1000 / limit, end=most, label=f"TPOT within {limit:g} ms", color="good")
        return (region,) if region.start < most else (), ()
    own = dict.fromkeys(
        (limit, painted[name]) for name, limit in limits.items() if limit and 1000 / limit < most
    )
    return (), tuple(
        Mark(x=1000 / limit, label=f"TPOT {limit:g} ms", color=color) for limit, color in own
    )


def _lines(
    drawn: Sequence[StoredResult],
    across: Measure,
    up: Measure,
    painted: dict[str, str],
    by: str,
    *,
    links: bool,
) -> Iterator[Series]:
    for result in drawn:
        points = [
            (level, x, y)
            for level in result.load_points
            if (x := across.value(level, result)) is not None
            and (y := up.value(level, result)) is not None
        ]
        points.sort(key=lambda point: point[1])
        said = COLORED_BY.get(by, COLORED_BY["result"])(result)
        name = result.name if said == result.name else f"{said}: {result.name}"
        for sound, called, dash in (
            (True, name, ""),
            (False, f"{name}: missed or not valid", "2 4"),
        ):
            group = [
                point
                for point in points
                if (point[0].valid and point[0].slo_met is not False) is sound
            ]
            if group:
                yield Series(
                    width=0
                    if result.kind == "search"
                    else 1.8,  # its probes are of several lengths: no curve
                    name=called,
                    x=[x for _, x, _ in group],
                    y=[y for *_, y in group],
                    dash=dash,
                    dots=True,
                    color=painted[result.name],
                    labels=tuple(_label(level, result) for level, *_ in group),
                    links=tuple(_address(level, result) for level, *_ in group) if links else (),
                )


def _label(level: LoadPointResult, result: StoredResult) -> str:
    """The load beside a point; of a search only that of its answer, else of the highest that held: they lie close."""
    if (
        result.kind == "search"
        and result.curve is not None
        and level.name != (result.answer or result.curve.best)
    ):
        return ""
    return asked(level)


def asked(level: LoadPointResult) -> str:
    """A load in the fewest words, as it was asked for: "40/s", "16" in flight; another law as its offered rate."""
    if plain := re.fullmatch(r"(?:\w+ ([\d.]+)(/s)|(\d+) in flight)", level.load_label):
        return f"{float(plain[1] or plain[3]):.4g}{plain[2] or ''}"
    return level.name if level.load_value is None else f"{level.load_value:.4g}"


def _address(level: LoadPointResult, result: StoredResult) -> str:
    """Return the address of the page of a point's run, as `loadgen ui` serves it.

    A mean of repeats has no run of its own, so it leads to the page of the result, as a single
    run does.
    """
    is_run_of_several = len(result.levels) > 1 and level in result.levels
    name = f"{result.name}/{level.name}" if is_run_of_several else result.name
    return f"result/{quote(name)}/"


def _intervals(
    drawn: Sequence[StoredResult], painted: dict[str, str], *, per_gpu: bool
) -> Iterator[Series]:
    """A vertical line each, over the interval of a capacity or of the mean of repeats."""
    for result in drawn:
        if result.interval is not None and result.curve is not None:
            interval = result.interval
            gpus = result.curve.gpus if per_gpu and result.curve.gpus else 1
            yield Series(
                x=[interval.per_user] * 2,
                y=[interval.low / gpus, interval.high / gpus],
                color=painted[result.name],
                width=5,
            )
