"""A folder of results as one page: the list, and any of its systems laid over one Pareto chart. Pure.

The same page is written by `loadgen report RESULTS/` and served by `loadgen ui`, which adds links and a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from urllib.parse import quote

import msgspec

from loadgen.core import format
from loadgen.present import page, table
from loadgen.present.page import COLORS, Axis, Band, Chart, Series
from loadgen.runs.levels import SweepCurve, SweepLevel
from loadgen.runs.levels_text import level_ms

MOST_CURVES = len(COLORS)
HEIGHT = 420  # of a chart, in pixels


class StoredResult(msgspec.Struct, frozen=True, kw_only=True):
    """One result of a folder. `curve`: its runs by load, one of a single run; None where nothing was summarized.

    `word`: the outcome of a search or validation, or why the result cannot be read. `answer`: the run that it stands
    on. `interval`: tokens/s of a user, and
    the ends of the tokens/s in all of a capacity or of repeats there. `usd`: name of a run -> its cost per million
    output tokens, where it has a price. `page`: its own page beside this one, "" where there is none.
    """

    name: str  # its folder, relative to the one that is listed
    kind: str
    word: str = ""
    answer: str = ""
    curve: SweepCurve | None = None
    tpot_limit_ms: float | None = None  # of its SLO
    interval: tuple[float, float, float] | None = None
    usd: dict[str, float] = {}
    page: str = ""
    going_on: bool = False
    about: str = ""  # workload and model, where there is no curve; as are the next two
    target: str = ""
    simulated: bool = False

    @property
    def started(self) -> str:
        return self.curve.started if self.curve is not None else ("~" if self.going_on else "")


def chosen(results: Sequence[StoredResult], names: Sequence[str]) -> list[StoredResult]:
    """The results that are drawn: those named, else the newest that have figures; at most MOST_CURVES."""
    known = [result for result in results if result.curve is not None]
    return ([result for result in known if result.name in names] if names else known)[:MOST_CURVES]


def render(
    title: str,
    results: Sequence[StoredResult],
    names: Sequence[str] = (),
    *,
    version: str,
    wanted: str = "",
    currency: str = "USD",
    served: bool = False,
) -> str:
    """The whole page. names: of the results to draw. wanted: a text that listed results contain.

    served: by `loadgen ui`: with a form to choose and links to each result's page.
    """
    drawn = chosen(results, names)
    listed = [result for result in results if wanted.lower() in _searched(result)]
    sheet = page.Page(f"Results in {title}", f"loadgen {version}" + (" ui" if served else " report of a folder"))
    if any(level.simulated for result in drawn for level in _levels(result)) or any(one.simulated for one in listed):
        sheet.mark("SIMULATED", "some of these were answered by a model of a server: not hardware")
    sheet.heading(f"{title}: {format.counted(len(results), 'result')}")
    if not results:
        sheet.say("No results yet. Runs, sweeps, searches and validations appear here when they end.")
    sheet.charts(_charts(drawn, currency))
    if drawn:
        sheet.say(
            "One point is one load: further right each user reads faster, further up a GPU does more. Dotted: the SLO "
            "was missed, or the measurement is not valid. Thick vertical lines: the interval of a capacity, or of the "
            "mean of repeats.",
            "soft",
        )
    sheet.section("Results")
    sheet.add(_form(results, drawn, listed, wanted) if served else _table(listed))
    return sheet.render()


def _searched(result: StoredResult) -> str:
    curve = result.curve
    facts: tuple[str, ...] = (result.about, result.target)
    if curve is not None:
        facts = curve.workload, curve.model, curve.target, curve.slo, curve.region
    return " ".join((result.name, result.kind, result.word, *facts)).lower()


def _levels(result: StoredResult) -> tuple[SweepLevel, ...]:
    return result.curve.levels if result.curve is not None else ()


def render_text(results: Sequence[StoredResult]) -> str:
    """The list for a terminal, ending in a newline."""
    head = HEAD[:3] + HEAD[5:]
    rows = [row[:3] + row[5:] for row in map(_row, results)]
    return "\n".join(table.text(head, rows, left=3)) + "\nlatencies in ms; ~: too few samples\n"


# -- charts --------------------------------------------------------------------------------------------------------


def _charts(drawn: Sequence[StoredResult], currency: str) -> Iterator[Chart]:
    per_gpu = all(level.per_gpu is not None for result in drawn for level in _levels(result))
    most_per_user = max((level.per_user or 0.0 for result in drawn for level in _levels(result)), default=0.0)
    if not most_per_user:
        return
    most = most_per_user * 1.08  # room for the label of the last point
    per_user = Axis(label="tokens/s of one user (1 / TPOT p50)", unit="tokens/s", min=0, max=most)
    bands = tuple(_slo_region(drawn, most))
    unit = "tokens/s per GPU" if per_gpu else "tokens/s in all (not every result says its GPUs)"
    yield Chart(
        kind="lines", title=f"Speed of a user against throughput{' of a GPU' if per_gpu else ''}", x=per_user,
        y=Axis(label=unit, unit="tokens/s", min=0), bands=bands, wide=True, height=HEIGHT,
        series=(
            *_lines(drawn, lambda level, _: level.per_gpu if per_gpu else level.output_per_s),
            *_intervals(drawn, per_gpu),
        ),
    )  # fmt: skip
    if any(result.usd for result in drawn):
        priced = [result for result in drawn if result.usd]
        yield Chart(
            kind="lines", title=f"Speed of a user against {currency} per million output tokens", x=per_user,
            y=Axis(label=f"{currency} per million output tokens", unit=currency, min=0),
            bands=bands, wide=True, height=HEIGHT,
            series=tuple(_lines(priced, lambda level, result: result.usd.get(level.name))),
        )  # fmt: skip


def _slo_region(drawn: Sequence[StoredResult], most: float) -> Iterator[Band]:
    """Where TPOT is within the strictest limit that the drawn results were promised; nothing where none was."""
    limits = [result.tpot_limit_ms for result in drawn if result.tpot_limit_ms]
    if limits and 1000 / min(limits) < most:
        label = f"TPOT within {min(limits):g} ms"
        yield Band(start=1000 / min(limits), end=most, label=label, color="good")


def _lines(
    drawn: Sequence[StoredResult], value: Callable[[SweepLevel, StoredResult], float | None]
) -> Iterator[Series]:
    for color, result in zip(COLORS, drawn, strict=False):
        points = [
            (level, level.per_user, y)
            for level in _levels(result)
            if level.per_user is not None and (y := value(level, result)) is not None
        ]
        points.sort(key=lambda point: point[1])
        for sound, name, dash in ((True, result.name, ""), (False, f"{result.name}: missed or not valid", "2 4")):
            group = [point for point in points if (point[0].valid and point[0].slo_met is not False) is sound]
            if group:
                yield Series(
                    name=name, x=[x for _, x, _ in group], y=[y for *_, y in group], color=color, dash=dash, dots=True,
                    labels=tuple(_label(level, result) for level, *_ in group),
                )  # fmt: skip


def _label(level: SweepLevel, result: StoredResult) -> str:
    """The load beside a point; of a search only that of the highest that held: its points lie close."""
    if result.kind == "search" and result.curve is not None and level.name != result.curve.best:
        return ""
    return f"{level.amount:.4g}" if level.amount is not None else level.name


def _intervals(drawn: Sequence[StoredResult], per_gpu: bool) -> Iterator[Series]:
    """A vertical line each, over the interval of a capacity or of the mean of repeats."""
    for color, result in zip(COLORS, drawn, strict=False):
        if result.interval is not None and result.curve is not None:
            per_user, *ends = result.interval
            share = result.curve.gpus if per_gpu and result.curve.gpus else 1
            yield Series(x=[per_user] * 2, y=[end / share for end in ends], color=color, width=5)


# -- the list ------------------------------------------------------------------------------------------------------

HEAD = (
    "result",
    "what",
    "outcome",
    "workload",
    "target",
    "GPUs",
    "loads",
    "tokens/s",
    "TTFT p99",
    "TPOT p99",
    "started",
)


def _row(result: StoredResult) -> tuple[str, ...]:
    curve = result.curve
    if curve is None:
        word = "going on" if result.going_on else result.word
        return (result.name, result.kind, word, result.about, result.target, *("",) * (len(HEAD) - 5))
    levels = {level.name: level for level in curve.levels}
    shown = (
        levels.get(result.answer)
        or levels.get(curve.best or "")
        or max(curve.levels, key=lambda level: level.output_per_s or 0.0)
    )
    return (
        result.name,
        result.kind,
        _outcome(result),
        " · ".join(filter(None, (curve.workload, curve.model))),
        curve.target + (f", {curve.region}" if curve.region else ""),
        format.count(curve.gpus),
        _loads(result, curve, shown),
        format.quantity(shown.output_per_s),
        level_ms(shown, "ttft_p99"),
        level_ms(shown, "tpot_p99"),
        curve.started[:16].replace("T", " "),
    )


def _loads(result: StoredResult, curve: SweepCurve, shown: SweepLevel) -> str:
    """The load of a run; of several how many, and which one is shown, unless the outcome says that."""
    if len(curve.levels) == 1:
        return shown.load
    return (
        str(len(curve.levels)) if shown.name == result.answer else f"{len(curve.levels)}, here {shown.amount or 0:.4g}"
    )


def _outcome(result: StoredResult) -> str:
    """The word of a result: of a validation its verdict, of others validity and SLO."""
    levels = _levels(result)
    if result.word or len(levels) != 1:
        invalid = sum(not level.valid for level in levels)
        held = result.kind == "sweep" and not result.word and result.curve is not None and result.curve.best
        words = (
            result.word,
            "a load within the SLO" if held else "",
            f"{invalid} of {len(levels)} INVALID" if invalid else "",
        )
        return ", ".join(filter(None, words))
    level = levels[0]
    if not level.valid:
        return "INVALID"
    return {True: "VALID, SLO met", False: "VALID, SLO missed", None: "VALID"}[level.slo_met]


def _table(results: Sequence[StoredResult]) -> str:
    cells = [
        [
            f'<a href="{quote(result.page)}">{escape(row[0])}</a>' if result.page else escape(row[0]),
            *map(escape, row[1:]),
        ]
        for result, row in ((result, _row(result)) for result in results)
    ]
    return _of_cells(HEAD, cells)


def _form(
    results: Sequence[StoredResult], drawn: Sequence[StoredResult], listed: Sequence[StoredResult], wanted: str
) -> str:
    """The list as a form: boxes of what is drawn, and buttons to draw or to compare."""
    on = {result.name for result in drawn}
    rows = []
    for result in listed:
        name = escape(result.name)
        checked = " checked" if result.name in on else ""
        disabled = "" if result.curve is not None else " disabled"
        box = f'<input type="checkbox" name="r" value="{name}"{checked}{disabled} aria-label="choose {name}">'
        where = "live" if result.going_on else "result"
        link = f'<a href="{where}?r={quote(result.name)}">{name}</a>'
        rows.append([f"{box} {link}", *map(escape, _row(result)[1:])])
    hidden = "".join(
        f'<input type="hidden" name="r" value="{escape(name)}">'
        for name in sorted(on - {result.name for result in listed})
    )
    return (
        f'<form method="get" action="./"><p><input type="search" name="q" value="{escape(wanted)}" '
        'placeholder="filter" aria-label="filter"> <button>Filter and draw</button> '
        '<button formaction="compare">Compare the chosen</button> <span class="soft">'
        f"{len(listed):,} of {len(results):,} listed, {len(on)} drawn, at most {MOST_CURVES}</span></p>"
        f"{hidden}{_of_cells(HEAD, rows)}</form>"
    )


def _of_cells(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>' if rows else ""
    )


def plain(title: str, text: str, *, version: str, refresh_s: int = 0) -> str:
    """A page of preformatted text. refresh_s: it asks for itself again after so many seconds."""
    sheet = page.Page(title, f"loadgen {version} ui")
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    sheet.add(f'{again}<p><a href="./">all results</a></p><h1>{escape(title)}</h1><pre>{escape(text)}</pre>')
    return sheet.render()
