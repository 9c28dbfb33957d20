"""A folder of results as one page: the list, and any of its systems laid over one Pareto chart. Pure.

The same page is written by `loadgen report RESULTS/` and served by `loadgen ui`, which adds links and a choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from urllib.parse import quote

from loadgen.core import format
from loadgen.render import page, table
from loadgen.runs.load_point_results import LoadPointResult
from loadgen.runs.sweep_curve import SweepCurve
from loadgen.runs.sweep_report import latency_cell
from loadgen.ui.charts import ACROSS, COLORED_BY, MOST_CURVES, UP, Choice, asked, charts
from loadgen.ui.stored_result import StoredResult, of_one_work, works

AS_IT_IS_BEST = Choice()
LOOKS_AGAIN_S = 10  # while a listed run goes on


def chosen(results: Sequence[StoredResult], choice: Choice) -> list[StoredResult]:
    """The results that are drawn, at most MOST_CURVES: those named, else the newest; all of one kind of work, which is
    that of `choice.work`, else of the first of them.
    """
    named = [
        result for result in results if result.curve is not None and result.name in choice.names
    ]
    candidates = named or [result for result in results if result.curve is not None]
    work = next(
        (result for result in results if result.name == choice.work and result.curve is not None),
        None,
    )
    if work is not None and not any(of_one_work(result, work) for result in candidates):
        candidates = [
            result for result in results if result.curve is not None
        ]  # another kind of work was chosen
    work = work or next(iter(candidates), None)
    return [result for result in candidates if work is not None and of_one_work(result, work)][
        :MOST_CURVES
    ]


def render(
    title: str,
    results: Sequence[StoredResult],
    choice: Choice = AS_IT_IS_BEST,
    *,
    version: str,
    wanted: str = "",
    currency: str = "",
    served: bool = False,
) -> str:
    """The whole page. wanted: a text that listed results contain.

    served: by `loadgen ui`: with a form to choose and links to each result's page.
    """
    drawn = chosen(results, choice)
    listed = [result for result in results if wanted.lower() in _searched(result)]
    sheet = page.Page(
        f"Results in {title}", f"loadgen {version}" + (" ui" if served else " report of a folder")
    )
    if served and any(result.going_on for result in listed):
        sheet.add_html(f'<meta http-equiv="refresh" content="{LOOKS_AGAIN_S}">')
    if any(level.simulated for result in drawn for level in result.levels) or any(
        one.simulated for one in listed
    ):
        sheet.add_notice(
            "SIMULATED", "some of these were answered by a model of a server: not hardware"
        )
    sheet.add_title(f"{title}: {format.counted(len(results), 'result')}")
    if not results:
        sheet.add_paragraph(
            "No results yet. Runs, sweeps, searches and validations appear here when they end."
        )
    if drawn:
        others = len(works(results)) - 1
        more = f" {format.counted(others, 'other kind')} of work not drawn." if others else ""
        sheet.add_paragraph(f"Drawn: {drawn[0].work}.{more}")
    sheet.add_charts(charts(drawn, choice, currency, links=served))
    unpriced = [result.name for result in drawn if not result.usd]
    if drawn and currency and choice.y in ("", "usd") and unpriced:
        why = "its machine has no price (--shape names it), or its runs are too short for a steady rate"
        sheet.add_paragraph(
            f"No cost of {', '.join(unpriced)}: {why}. loadgen cost says which.", "soft"
        )
    if drawn:
        sheet.add_paragraph(
            "One point is one load, the mean of its repeats. Dotted: the SLO was missed, or the "
            "measurement is not valid. Dashed vertical lines: the limit of the SLO. Thick ones: the "
            "interval of a capacity, or of the mean of repeats.",
            "soft",
        )
    sheet.add_heading("Results")
    sheet.add_html(
        _form(results, drawn, listed, choice, wanted) if served else _table(listed, drawn)
    )
    return sheet.render()


def _searched(result: StoredResult) -> str:
    curve = result.curve
    facts: tuple[str, ...] = (result.about, result.target)
    if curve is not None:
        facts = (
            curve.workload,
            curve.model,
            curve.target,
            curve.slo,
            curve.region,
            result.hardware,
            result.software,
        )
    return " ".join((result.name, result.kind, result.outcome, *facts)).lower()


def render_text(results: Sequence[StoredResult]) -> str:
    """The list for a terminal, ending in a newline."""
    head = HEAD[:3] + HEAD[5:]
    rows = [row[:3] + row[5:] for row in map(_row, results)]
    return (
        "\n".join(table.format_text(head, rows, label_columns=3))
        + "\nlatencies in ms; ~: too few samples\n"
    )


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
    curve, shown, when = result.curve, result.shown, result.started[:16].replace("T", " ")
    if curve is None or shown is None:
        return (
            result.name,
            result.kind,
            result.outcome,
            result.about,
            result.target,
            *("",) * (len(HEAD) - 6),
            when,
        )
    return (
        result.name,
        result.kind,
        result.outcome,
        " · ".join(filter(None, (curve.workload, curve.model))),
        curve.target + (f", {curve.region}" if curve.region else ""),
        format.count(curve.gpus),
        _loads(result, curve, shown),
        format.quantity(shown.output_per_s),
        latency_cell(shown, "ttft_p99"),
        latency_cell(shown, "tpot_p99"),
        when,
    )


def _loads(result: StoredResult, curve: SweepCurve, shown: LoadPointResult) -> str:
    """The load of a run; of several how many, and which one is shown, unless all are one or the outcome says it."""
    number = len(result.load_points)
    if number == 1:
        repeats = len(curve.load_points)
        return shown.load_label if repeats == 1 else f"{repeats} times {shown.load_label}"
    return str(number) if shown.name == result.answer else f"{number}, shown: {asked(shown)}"


SHOWN = tuple(
    name for name in HEAD if name not in ("target", "GPUs")
)  # these two stand below the workload


def _cells(row: Sequence[str], name: str) -> list[str]:
    """The cells of `SHOWN` as HTML, of which the first is given."""
    by_head = dict(zip(HEAD, row, strict=True))
    gpus = by_head["GPUs"] and f"{by_head['GPUs']} GPUs"
    where = " · ".join(filter(None, (by_head["target"], gpus)))
    work = f"{escape(by_head['workload'])}<br><small>{escape(where)}</small>"
    return [name, *(work if head == "workload" else escape(by_head[head]) for head in SHOWN[1:])]


def _table(results: Sequence[StoredResult], drawn: Sequence[StoredResult]) -> str:
    rows = []
    for result in results:
        name = (
            f'<a href="{quote(result.page)}">{escape(result.name)}</a>'
            if result.page
            else escape(result.name)
        )
        rows.append((_like(result, drawn), _cells(_row(result), name)))
    return _of_cells(rows)


def _form(
    results: Sequence[StoredResult],
    drawn: Sequence[StoredResult],
    listed: Sequence[StoredResult],
    choice: Choice,
    wanted: str,
) -> str:
    """The list as a form: what to draw and how, and buttons to draw, to compare or to share."""
    on = {result.name for result in drawn}
    rows = []
    for result in listed:
        name = escape(result.name)
        checked = " checked" if result.name in on else ""
        disabled = "" if result.curve is not None else " disabled"
        box = f'<input type="checkbox" name="r" value="{name}"{checked}{disabled} aria-label="choose {name}">'
        where = (
            f"live?r={quote(result.name)}" if result.going_on else f"result/{quote(result.name)}/"
        )
        link = f'{box} <a href="{where}">{name}</a>'
        rows.append((_like(result, drawn), _cells(_row(result), link)))
    hidden = "".join(
        f'<input type="hidden" name="r" value="{escape(name)}">'
        for name in sorted(on - {result.name for result in listed})
    )
    kinds = {
        next((one.name for one in drawn if of_one_work(one, kind)), kind.name): kind.work
        for kind in works(results)
    }
    work = next((kind.name for kind in works(results) if drawn and of_one_work(kind, drawn[0])), "")
    priced = any(result.usd for result in results)
    up = {key: m.head.format(currency="money") for key, m in UP.items() if key != "usd" or priced}
    selects = (
        _select("work", "w", work, kinds),
        _select("across", "x", choice.x, {key: measure.head for key, measure in ACROSS.items()}),
        _select("up", "y", choice.y, {"": "as known", **up}),
        _select("colour by", "c", choice.color, {key: key for key in COLORED_BY}),
    )
    return (
        f'<form method="get" action="./"><p class="choice">{"".join(selects)} <button>Draw</button> '
        '<button formaction="compare">Compare the chosen</button> '
        '<button formaction="share">Save as one page</button></p>'
        f'<p><input type="search" name="q" value="{escape(wanted)}" placeholder="filter" aria-label="filter"> '
        f'<button>Filter</button> <span class="soft">{len(listed):,} of {len(results):,} listed, {len(on)} drawn, '
        f"at most {MOST_CURVES}; grey: another kind of work</span></p>"
        f"{hidden}{_of_cells(rows)}</form>"
    )


def _select(label: str, name: str, chosen: str, options: Mapping[str, str]) -> str:
    items = "".join(
        f'<option value="{escape(key)}"{" selected" if key == chosen else ""}>{escape(text)}</option>'
        for key, text in options.items()
    )
    return f'<label>{escape(label)} <select name="{name}">{items}</select></label> '


def _like(result: StoredResult, drawn: Sequence[StoredResult]) -> bool:
    """Whether a result may be drawn on this chart: it did the same kind of work."""
    return not drawn or result.curve is None or of_one_work(result, drawn[0])


def _of_cells(rows: Sequence[tuple[bool, Sequence[str]]]) -> str:
    """The table of `SHOWN`; its cells are HTML already. Rows of another kind of work are grey."""
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in SHOWN)
    body = "".join(
        f"<tr{'' if like else GREY}>"
        + "".join(
            f'<td data-head="{escape(head)}">{cell}</td>'
            for head, cell in zip(SHOWN, row, strict=True)
        )
        + "</tr>"
        for like, row in rows
    )
    table = (
        f'<table class="results wide"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
    )
    return f'<div class="scroll">{table}</div>' if rows else ""


GREY = ' class="soft" title="another kind of work than the one that is drawn"'


def plain(title: str, text: str, home: str, *, version: str, refresh_s: int = 0) -> str:
    """A page of preformatted text. home: address of the list. refresh_s: it asks for itself again so often."""
    sheet = page.Page(title, f"loadgen {version} ui")
    again = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    sheet.add_html(
        f'{again}<p><a href="{home}">all results</a></p><h1>{escape(title)}</h1><pre>{escape(text)}</pre>'
    )
    return sheet.render()
