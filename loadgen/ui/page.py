"""The page of a folder of results: charts of several systems, and the list of results.

`loadgen report FOLDER` writes this page as a file. `loadgen ui` serves it with a form to choose
what is drawn, and with links to the page of each result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple
from urllib.parse import quote

from loadgen.core import format
from loadgen.render.page import Page
from loadgen.render.section import simulated_notice
from loadgen.render.table import format_text
from loadgen.runs.load_point_results import LoadPointResult
from loadgen.runs.sweep_curve import SweepCurve
from loadgen.runs.sweep_report import latency_cell
from loadgen.ui.charts import (
    COLOR_KEYS,
    COST,
    MAX_CURVES,
    X_METRICS,
    Y_METRICS,
    Choice,
    build_charts,
    short_load_label,
)
from loadgen.ui.stored_result import StoredResult, distinct_workloads, have_same_workload

DEFAULT_CHOICE = Choice()

LIST_REFRESH_S = 10
"""How often the list is loaded again while a listed run is running."""

CHART_LEGEND = (
    "Each point is one load (the mean of its repeats). Dotted lines: the SLO was missed or the "
    "measurement is invalid. Thick vertical lines: confidence interval of a capacity or of the "
    "mean of repeats."
)
NO_RESULTS = "No results yet. Runs, sweeps, searches and validations appear here when they end."
NO_COST_REASON = (
    "The price file has no price for its instance type (name it with --shape), or its runs are too "
    "short for a steady rate. `loadgen cost` explains which."
)


BUTTONS_HTML = (
    "<button>Draw</button> "
    '<button formaction="compare">Compare selected</button> '
    '<button formaction="share">Save as one page</button>'
)
"""The buttons of the form. They send the selected results to the page that `formaction` names."""


def select_results_to_draw(results: Sequence[StoredResult], choice: Choice) -> list[StoredResult]:
    """Return the results that the charts show, at most `MAX_CURVES`, all of one workload.

    A chart compares systems, so it never mixes workloads. Of the results with the chosen workload,
    those that the reader has selected by name are drawn. If none is selected, all are drawn.

    Args:
        results: All results of the folder, the newest first.
        choice: What the reader has selected: results by name, and a workload.
    """
    drawable = [result for result in results if result.curve is not None]
    workload_example = _choose_workload_example(drawable, choice)
    if workload_example is None:
        return []

    of_workload = [result for result in drawable if have_same_workload(result, workload_example)]
    selected_of_workload = [result for result in of_workload if result.name in choice.names]
    drawn_results = selected_of_workload or of_workload

    return drawn_results[:MAX_CURVES]


def _choose_workload_example(
    drawable: Sequence[StoredResult], choice: Choice
) -> StoredResult | None:
    """Return a result with the workload that the charts show, or None without results.

    It is, in this order: a result with the workload that the reader has selected, the first result
    that the reader has selected by name, or the newest result.
    """
    example = _find_by_name(drawable, choice.workload_of)
    if example is not None:
        return example
    for result in drawable:
        if result.name in choice.names:
            return result
    return drawable[0] if drawable else None


def _find_by_name(results: Sequence[StoredResult], name: str) -> StoredResult | None:
    return next((result for result in results if result.name == name), None)


def render(
    title: str,
    results: Sequence[StoredResult],
    choice: Choice = DEFAULT_CHOICE,
    *,
    version: str,
    filter_text: str = "",
    currency: str = "",
    served: bool = False,
) -> str:
    """Return the page of a folder of results as HTML: charts first, then the list.

    Args:
        title: The name of the folder.
        results: The results in it.
        choice: What the reader has selected to draw.
        version: The version of loadgen.
        filter_text: Only results that contain this text are listed.
        currency: The currency of the costs, or "" without prices.
        served: Whether `loadgen ui` serves the page, so that it has a form and links.
    """
    drawn_results = select_results_to_draw(results, choice)
    listed_results = [
        result for result in results if filter_text.lower() in _searchable_text(result)
    ]
    command = "ui" if served else "report"

    page = Page(f"Results in {title}", f"loadgen {version} {command}")
    if served:
        _refresh_while_running(page, listed_results)

    _add_simulation_notice(page, [*drawn_results, *listed_results])
    page.add_title(f"{title}: {format.counted(len(results), 'result')}")

    if not results:
        page.add_paragraph(NO_RESULTS)

    _add_charts(page, results, drawn_results, choice, currency=currency, has_links=served)
    page.add_heading("Results")

    if served:
        page.add_html(_form_html(results, drawn_results, listed_results, choice, filter_text))
    else:
        page.add_html(_static_list_html(listed_results, drawn_results))

    return page.render()


def _refresh_while_running(page: Page, listed_results: Sequence[StoredResult]) -> None:
    """Let the browser load the page again and again if a listed run is still running."""
    if any(result.is_running for result in listed_results):
        _refresh_page_every(page, LIST_REFRESH_S)


def _add_simulation_notice(page: Page, results: Sequence[StoredResult]) -> None:
    """Add a notice at the top of a page if one of its results is simulated."""
    if any(_is_simulated(result) for result in results):
        notice = simulated_notice(
            "some results come from a performance model, not from real hardware"
        )
        page.add_notice(notice.label, notice.text, notice.kind)


def _refresh_page_every(page: Page, seconds: int) -> None:
    """Let the browser load the page again regularly."""
    page.add_html(f'<meta http-equiv="refresh" content="{seconds}">')


def _add_charts(
    page: Page,
    results: Sequence[StoredResult],
    drawn_results: Sequence[StoredResult],
    choice: Choice,
    *,
    currency: str,
    has_links: bool,
) -> None:
    """Add the charts to a page, with the workload above them and explanations below.

    If there are prices, the cost is drawn unless the reader has chosen another metric.

    Args:
        page: The page.
        results: All results of the folder.
        drawn_results: The results that the charts show.
        choice: What the reader has selected to draw.
        currency: The currency of the costs, or "" without prices.
        has_links: Whether points lead to the pages of their runs.
    """
    if drawn_results:
        page.add_paragraph(_describe_workload(results, drawn_results[0]))

    page.add_charts(build_charts(drawn_results, choice, currency, links=has_links))
    has_prices = currency != ""

    is_cost_drawn = not choice.y or choice.y == COST
    if has_prices and is_cost_drawn:
        _add_missing_costs(page, drawn_results)

    if drawn_results:
        page.add_paragraph(CHART_LEGEND, "soft")


def _describe_workload(results: Sequence[StoredResult], example: StoredResult) -> str:
    """Return the workload that is drawn, and how many other workloads there are."""
    text = f"Workload: {example.workload_label}."
    undrawn = len(distinct_workloads(results)) - 1
    if undrawn:
        text += f" {format.counted(undrawn, 'other workload')} not drawn."
    return text


def _add_missing_costs(page: Page, drawn_results: Sequence[StoredResult]) -> None:
    """Name the results that have no cost, and explain why."""
    without_cost = [result.name for result in drawn_results if not result.cost_per_million_tokens]
    if without_cost:
        page.add_paragraph(f"No cost for {', '.join(without_cost)}. {NO_COST_REASON}", "soft")


def _is_simulated(result: StoredResult) -> bool:
    return result.simulated or any(run.simulated for run in result.runs)


def _searchable_text(result: StoredResult) -> str:
    """Return the text that the filter searches, in lower case."""
    texts = [result.name, result.kind, result.outcome, result.description, result.target]
    curve = result.curve
    if curve is not None:
        texts += [curve.workload, curve.model, curve.target, curve.slo, curve.region]
        texts += [result.hardware, result.software]
    return " ".join(texts).lower()


def render_text(results: Sequence[StoredResult]) -> str:
    """Return the list for a terminal, ending in a newline."""
    lines = format_text(
        TERMINAL_HEAD, [_list_cells(result).terminal_cells() for result in results], 3
    )
    return "\n".join(lines) + "\nLatencies in ms. ~: low confidence, too few samples.\n"


class ListCells(NamedTuple):
    """The cells of a result in the list. Cells are empty if the result has no metrics."""

    result: str
    kind: str
    outcome: str
    workload: str
    target: str
    gpus: str = ""
    load: str = ""
    throughput: str = ""
    ttft_p99: str = ""
    tpot_p99: str = ""
    started: str = ""

    def terminal_cells(self) -> tuple[str, ...]:
        """Return the cells that fit a terminal, without workload and target."""
        return (*self[:3], *self[5:])


LIST_HEAD = ListCells(
    result="result",
    kind="kind",
    outcome="outcome",
    workload="workload",
    target="target",
    gpus="GPUs",
    load="load",
    throughput="tokens/s",
    ttft_p99="TTFT p99",
    tpot_p99="TPOT p99",
    started="started",
)
TERMINAL_HEAD = LIST_HEAD.terminal_cells()


def _list_cells(result: StoredResult) -> ListCells:
    """Return the cells of a result in the list, on the page and in a terminal.

    A result without metrics, for example one that is running, has only cells that describe it. The
    metrics are those of the selected load point, which stands for the whole result.
    """
    curve = result.curve
    selected = result.selected_load_point

    started = result.started[:16].replace("T", " ")
    if curve is None or selected is None:
        return ListCells(
            result=result.name,
            kind=result.kind,
            outcome=result.outcome,
            workload=result.description,
            target=result.target,
            started=started,
        )

    return ListCells(
        result=result.name,
        kind=result.kind,
        outcome=result.outcome,
        workload=_join_present(" · ", curve.workload, curve.model),
        target=_join_present(", ", curve.target, curve.region),
        gpus=format.count(curve.gpus),
        load=_describe_load(result, curve, selected),
        throughput=format.quantity(selected.output_per_s),
        ttft_p99=latency_cell(selected, "ttft_p99"),
        tpot_p99=latency_cell(selected, "tpot_p99"),
        started=started,
    )


def _join_present(separator: str, *texts: str) -> str:
    """Return the texts that are not empty, joined by a separator."""
    return separator.join(filter(None, texts))


def _describe_load(result: StoredResult, curve: SweepCurve, selected: LoadPointResult) -> str:
    """Return the cell with the load of a result.

    For example "40.0 requests/s" for a single run, "3 x 40.0 requests/s" for repeats of one load,
    and "5, shown: 40/s" for five loads, of which the row shows the metrics of one. If the outcome
    in the same row names that load, the cell is just "5".

    Args:
        result: The result.
        curve: Its runs. Each repeat of a load is a point of its own.
        selected: The load whose metrics the row shows.
    """
    load_count = len(result.load_points)  # one per load, averaged over its repeats
    run_count = len(curve.load_points)  # one per run

    if load_count > 1:
        is_named_by_outcome = selected.name == result.selected_run
        if is_named_by_outcome:
            return str(load_count)
        return f"{load_count}, shown: {short_load_label(selected)}"

    if run_count > 1:
        return f"{run_count} x {selected.load_label}"

    return selected.load_label


class ListRowHtml(NamedTuple):
    """A row of the list on the page: its cells as HTML, and whether its workload is drawn."""

    cells: Sequence[str]
    is_drawable: bool


PAGE_HEAD = (
    "result",
    "kind",
    "outcome",
    "workload",
    "load",
    "tokens/s",
    "TTFT p99",
    "TPOT p99",
    "started",
)


def _row_html(
    result: StoredResult, name_html: str, drawn_results: Sequence[StoredResult]
) -> ListRowHtml:
    """Return the row of a result in the list. Target and GPUs stand below the workload.

    Args:
        result: The result.
        name_html: The cell with its name, which is a link or has a check box.
        drawn_results: The results in the charts, whose workload the row may share.
    """
    texts = _list_cells(result)
    gpus_text = f"{texts.gpus} GPUs" if texts.gpus else ""
    target_text = _join_present(" · ", texts.target, gpus_text)
    workload_html = f"{escape(texts.workload)}<br><small>{escape(target_text)}</small>"
    cells_html = [
        name_html,
        escape(texts.kind),
        escape(texts.outcome),
        workload_html,
        escape(texts.load),
        escape(texts.throughput),
        escape(texts.ttft_p99),
        escape(texts.tpot_p99),
        escape(texts.started),
    ]

    return ListRowHtml(cells_html, _can_be_drawn_with(result, drawn_results))


def _can_be_drawn_with(result: StoredResult, drawn_results: Sequence[StoredResult]) -> bool:
    """Return True if a result has the workload that is drawn, or nothing to draw."""
    if not drawn_results or result.curve is None:
        return True
    return have_same_workload(result, drawn_results[0])


def _static_list_html(
    listed_results: Sequence[StoredResult], drawn_results: Sequence[StoredResult]
) -> str:
    """Return the list of a page without a server: names lead to pages that are files."""
    rows = []
    for result in listed_results:
        name_html = escape(result.name)
        if result.page:
            name_html = f'<a href="{quote(result.page)}">{name_html}</a>'
        rows.append(_row_html(result, name_html, drawn_results))
    return _results_table_html(rows)


def _results_table_html(rows: Sequence[ListRowHtml]) -> str:
    """Return the table of results as HTML, or "" without rows. Rows of other workloads are grey."""
    if not rows:
        return ""

    head_html = "".join(f'<th scope="col">{escape(name)}</th>' for name in PAGE_HEAD)
    body_html = "".join(map(_table_row_html, rows))
    return (
        '<div class="scroll"><table class="results wide">'
        f"<thead><tr>{head_html}</tr></thead>"
        f"<tbody>{body_html}</tbody>"
        "</table></div>"
    )


def _table_row_html(row: ListRowHtml) -> str:
    """Return a row of the table. Each cell has the name of its column, for narrow screens."""
    attributes = "" if row.is_drawable else ' class="soft" title="another workload"'
    cells_html = "".join(
        f'<td data-head="{escape(name)}">{cell_html}</td>'
        for name, cell_html in zip(PAGE_HEAD, row.cells, strict=True)
    )
    return f"<tr{attributes}>{cells_html}</tr>"


def _form_html(
    results: Sequence[StoredResult],
    drawn_results: Sequence[StoredResult],
    listed_results: Sequence[StoredResult],
    choice: Choice,
    filter_text: str,
) -> str:
    """Return the list as a form, in which the reader selects results and what to draw.

    The names of the fields are those that `server.py` reads from the URL.

    Args:
        results: All results of the folder.
        drawn_results: The results that the charts show, whose boxes are checked.
        listed_results: The results that match the filter.
        choice: What the reader has selected to draw.
        filter_text: The filter.
    """
    drawn_names = {result.name for result in drawn_results}
    counts_text = (
        f"{len(listed_results):,} of {len(results):,} listed, {len(drawn_names)} drawn "
        f"(at most {MAX_CURVES}). Grey: another workload."
    )
    menus_html = _menus_html(results, drawn_results, choice)
    filter_html = _filter_html(filter_text)
    hidden_fields_html = _hidden_names_html(drawn_names, listed_results)
    table_html = _check_box_table_html(listed_results, drawn_results)

    return (
        '<form method="get" action="./">'
        f'<p class="choice">{menus_html} {BUTTONS_HTML}</p>'
        f'<p>{filter_html} <span class="soft">{counts_text}</span></p>'
        f"{hidden_fields_html}{table_html}"
        "</form>"
    )


def _check_box_table_html(
    listed_results: Sequence[StoredResult], drawn_results: Sequence[StoredResult]
) -> str:
    """Return the table of results with check boxes, which are checked for drawn results."""
    drawn_names = {result.name for result in drawn_results}
    rows = []
    for result in listed_results:
        name_html = _check_box_html(result, is_checked=result.name in drawn_names)
        rows.append(_row_html(result, name_html, drawn_results))
    return _results_table_html(rows)


def _filter_html(filter_text: str) -> str:
    """Return the field and the button of the filter as HTML."""
    return (
        f'<input type="search" name="q" value="{escape(filter_text)}" placeholder="filter" '
        'aria-label="filter"> <button>Filter</button>'
    )


def _check_box_html(result: StoredResult, *, is_checked: bool) -> str:
    """Return the check box that selects a result, and the link to its page.

    A result without metrics cannot be selected. A running one leads to the page of its progress.
    """
    name = escape(result.name)
    checked = " checked" if is_checked else ""
    disabled = "" if result.curve is not None else " disabled"

    if result.is_running:
        url = f"live?r={quote(result.name)}"
    else:
        url = f"result/{quote(result.name)}/"

    return (
        f'<input type="checkbox" name="r" value="{name}"{checked}{disabled} '
        f'aria-label="choose {name}"> <a href="{url}">{name}</a>'
    )


def _hidden_names_html(drawn_names: set[str], listed_results: Sequence[StoredResult]) -> str:
    """Return hidden fields that keep the drawn results chosen that the filter does not list."""
    hidden_names = drawn_names - {result.name for result in listed_results}
    return "".join(
        f'<input type="hidden" name="r" value="{escape(name)}">' for name in sorted(hidden_names)
    )


def _menus_html(
    results: Sequence[StoredResult], drawn_results: Sequence[StoredResult], choice: Choice
) -> str:
    """Return the menus for the workload, the axes and the color of the charts, as HTML.

    The names of their fields, w, x, y and c, are the parameters of the URL of the page.

    Args:
        results: All results of the folder, which decide what the menus offer.
        drawn_results: The results that the charts show.
        choice: What the reader has selected before.
    """
    has_costs = any(result.cost_per_million_tokens for result in results)
    x_options = {key: metric.label for key, metric in X_METRICS.items()}

    y_options = {"": "automatic"}
    for key, metric in Y_METRICS.items():
        if key != COST or has_costs:
            # The menu says "cost" where the axis of a chart names the currency, such as USD.
            y_options[key] = metric.with_currency("cost").label

    color_options = {key: key for key in COLOR_KEYS}
    drawn_name = drawn_results[0].name if drawn_results else ""
    menus = (
        _menu_html("workload", "w", drawn_name, _workload_options(results, drawn_results)),
        _menu_html("x axis", "x", choice.x, x_options),
        _menu_html("y axis", "y", choice.y, y_options),
        _menu_html("color by", "c", choice.color_by, color_options),
    )

    return "".join(menus)


def _workload_options(
    results: Sequence[StoredResult], drawn_results: Sequence[StoredResult]
) -> dict[str, str]:
    """Return the label of each workload in the folder, by the value that the menu sends.

    The value is the name of a result that has the workload. For the workload that is drawn, it is
    the first drawn result, which the menu shows as selected.
    """
    labels = {}
    for example in distinct_workloads(results):
        value = example.name
        if drawn_results and have_same_workload(drawn_results[0], example):
            value = drawn_results[0].name
        labels[value] = example.workload_label
    return labels


def _menu_html(label: str, field: str, selected: str, options: Mapping[str, str]) -> str:
    """Return a menu of the form as HTML.

    Args:
        label: The text before the menu.
        field: The name of the parameter of the URL that gets the selected value.
        selected: The value that is selected at first.
        options: The text of each value.
    """
    items = []
    for value, text in options.items():
        attribute = " selected" if value == selected else ""
        items.append(f'<option value="{escape(value)}"{attribute}>{escape(text)}</option>')
    return f'<label>{escape(label)} <select name="{field}">{"".join(items)}</select></label> '


def render_plain_page(
    title: str, text: str, home_url: str, *, version: str, refresh_s: int = 0
) -> str:
    """Return a page of preformatted text with a link to the list.

    Args:
        title: The title of the page.
        text: The text.
        home_url: The URL of the list.
        version: The version of loadgen.
        refresh_s: After so many seconds the browser loads the page again; 0 for never.
    """
    page = Page(title, f"loadgen {version} ui")
    if refresh_s:
        _refresh_page_every(page, refresh_s)
    page.add_html(f'<p><a href="{home_url}">all results</a></p>')
    page.add_title(title)
    page.add_html(f"<pre>{escape(text)}</pre>")
    return page.render()
