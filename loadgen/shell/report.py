"""`loadgen report DIR`: print a stored run again from its records, and write it as one HTML page.

Parses flags and prints: `run_folder` opens a run, `report` renders it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from loadgen.core.errors import OK, UNSOUND, UserError
from loadgen.search import adaptive_command as of_adaptive
from loadgen.search.command import code as search_code
from loadgen.search.command import resuming
from loadgen.shell.options import Strict
from loadgen.shell.output import in_color, print_answer, say_changed
from loadgen.shell.results_list import is_collection, results_in

if TYPE_CHECKING:
    from loadgen.core.metrics.summary import Summary
    from loadgen.mlperf.result import MlperfResult
    from loadgen.search.adaptive import StoredAdaptive
    from loadgen.search.experiment import StoredSearch


def report(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of a run or of several, another tool's result file, or calls of the SDK."),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", help="Where the page goes.", show_default="report.html in the folder")
    ] = None,
    no_html: Annotated[bool, typer.Option("--no-html", help="Print only.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print summary.json instead of the table; no page unless --html.")
    ] = False,
    strict: Strict = False,
) -> int:
    """Print a stored run again, from its records, and write report.html: one file that opens without network.

    Exit: 0 sound and SLO met, 1 SLO missed, 2 not a run, 3 the run is not valid; of a search as `loadgen search`.

    Example: loadgen report results/qa-20261122-101500-1a2b --html page.html
    """
    from loadgen.compare import inputs
    from loadgen.core.metrics.summary import dump_summary
    from loadgen.core.metrics.validity import exit_code
    from loadgen.search import adaptive_run, experiment

    is_search = (folder / experiment.PLAN).is_file()  # one of mlperf leaves LoadGen's log files beside its runs
    other_tool_file = None if is_search else inputs.by_another_tool(folder)
    if other_tool_file is not None:
        return _reported(other_tool_file, html, as_json=as_json)
    if is_collection(folder):
        return _collected(folder, html)
    say_changed(folder)
    opened = open_result(folder, page=not no_html and (html is not None or not as_json), color=in_color())
    if as_json and opened.adaptive is not None:
        sys.stdout.buffer.write(adaptive_run.dump(opened.adaptive))
    elif as_json:
        documents = [dump_summary(summary).decode().rstrip() for summary in opened.summaries]
        print("[" + ",\n".join(documents) + "]" if opened.several else documents[0])
    else:
        print(opened.text, end="", flush=True)
    if opened.page is not None:
        _write(opened.page, html, folder / "report.html")
    if opened.search is not None:
        return UNSOUND if opened.search.answer.reason == "interrupted" else search_code(opened.search.answer)
    worst = max(
        exit_code(
            interrupted=False,
            valid=summary.verdict.valid,
            slo_met=summary.goodput.met,
            undecided=summary.goodput.undecided,
            strict=strict,
        )
        for summary in opened.summaries
    )
    if opened.adaptive is not None:
        worst = max(worst, of_adaptive.code(opened.adaptive, strict=strict))
    return worst


class Opened(NamedTuple):
    """A stored result, rendered. `several`: a folder of runs. `page`: None without one, or where none was asked for."""

    text: str
    page: str | None
    summaries: list[Summary]
    several: bool
    search: StoredSearch | None
    adaptive: StoredAdaptive | None = None


def open_result(folder: Path, *, page: bool, color: bool = False) -> Opened:
    """A run, or a folder of runs: levels, a search, repeats. Raises UserError for runs of different work."""
    from loadgen.compare import inputs
    from loadgen.core import run_folder
    from loadgen.core.metrics import repeats
    from loadgen.runs import repeats_text as repeats_table
    from loadgen.runs import text
    from loadgen.search import adaptive_run, adaptive_text, experiment

    folders = [] if run_folder.is_run(folder) else run_folder.runs_in(folder)
    loaded = [_read(run, page=page and not folders) for run in folders or [folder]]
    adaptive = None if folders else adaptive_run.read(folder)
    summaries = [summary for summary, _ in loaded]
    sheet = loaded[0][1]
    named = [(run.name, summary) for run, summary in zip(folders, summaries, strict=False)]
    search = experiment.stored_search(folder) if folders else None
    if search is not None:
        answer, sheet = _search(folder, search, named, page)
    elif folders and len({summary.fingerprints.recipe for summary in summaries}) > 1:
        inputs.of_one_work(folder, named)
        answer, sheet = _levels(named, page)
    elif folders:
        answer = text.render_levels(summaries, color=color)
        answer += "\n" + repeats_table.render_text(repeats.summarize_repeats(named))
    else:
        answer = text.render(summaries[0], color=color) + _mlperf_text(folder, summaries[0])
        if adaptive is not None:
            answer += f"\n{adaptive_text.render(adaptive)}\n"
    if folders:
        answer += _mlperf_text(folder, summaries[0])
    if search is None and experiment.begun_by(folder) == "search":
        answer += f"\nThe search has no answer yet. Go on with: {resuming(folder, experiment.plan_of(folder))}\n"
    return Opened(answer, sheet, summaries, bool(folders), search, adaptive)


def _collected(folder: Path, html: Path | None) -> int:
    """List the results of several commands in one folder, and write the page over them."""
    from importlib.metadata import version

    from loadgen.viewer import page as results_page

    results = results_in(folder)
    print(results_page.render_text(results), end="")
    page = results_page.render(folder.resolve().name, results, version=version("loadgen"))
    _write(page, html, folder / "report.html")
    return OK


def _mlperf_result(folder: Path) -> MlperfResult | None:
    """The result of an MLPerf-style run in this folder; None of another run."""
    from loadgen.mlperf import run

    return run.read(folder) if (folder / run.RESULT).is_file() else None


def _mlperf_text(folder: Path, summary: Summary) -> str:
    """The result of an MLPerf-style run, to print below the report; "" of another run."""
    from loadgen.mlperf import text as mlperf

    result = _mlperf_result(folder)
    return "" if result is None else "\n" + mlperf.render(result, gpus=summary.target.gpus)


def _read(folder: Path, *, page: bool) -> tuple[Summary, str | None]:
    """The summary, and the HTML page if `page`: from the records, or from `summary.json` if no records were kept."""
    from loadgen.core import run_folder
    from loadgen.core.results import store
    from loadgen.core.results.spool import HEAT_EDGES_NS
    from loadgen.interop.other_definitions import reported
    from loadgen.runs import page as html
    from loadgen.runs.page_data import figures
    from loadgen.search import adaptive_run

    summary, stored = run_folder.open_run(folder)
    if not page:
        return summary, None
    result, adaptive = _mlperf_result(folder), adaptive_run.read(folder)
    if stored is None:
        return summary, html.render(summary, mlperf=result)
    chart_data = figures(*stored, store.heat(folder), HEAT_EDGES_NS)
    other_definitions = reported(summary, stored.header, stored.rows, stored.gaps)
    return summary, html.render(
        summary, stored.header, chart_data, other_definitions, store.server(folder), result, adaptive
    )


def _search(
    folder: Path, search: StoredSearch, named_summaries: list[tuple[str, Summary]], page: bool
) -> tuple[str, str | None]:
    """The folder of a search: the table that the search printed, and the HTML page if `page`."""
    from loadgen.core.results import capacity
    from loadgen.search import experiment
    from loadgen.search import page as search_page
    from loadgen.search import text as report

    chained = any(summary.sessions is not None for _, summary in named_summaries)
    unit = experiment.unit_of(experiment.plan_of(folder), chained=chained)
    text = report.render(search.answer, search.told, search.names, unit=unit, simulated=search.simulated)
    if not page:
        return text, None
    file = folder / capacity.FILE
    evidence = capacity.load_capacity(file.read_bytes(), str(file)).evidence if file.is_file() else ""
    result = _mlperf_result(folder)
    return text, search_page.render(search, named_summaries, unit=unit, evidence=evidence, mlperf=result)


def _levels(named_summaries: list[tuple[str, Summary]], page: bool) -> tuple[str, str | None]:
    """Runs of one workload at several loads: the table, and the HTML page if `page`."""
    from loadgen.search import sweep_text as sweep
    from loadgen.search.sweep import curve

    levels = curve(named_summaries)
    return sweep.render_text(levels), sweep.render_html(levels) if page else None


def _reported(file: Path, html: Path | None, *, as_json: bool) -> int:
    """Print a result file of another tool, with its own definitions; write a page only if `html` is given."""
    from loadgen.interop import application_calls, reader
    from loadgen.interop import text as other_tools

    if application_calls.is_calls(file):
        from loadgen.interop.application_calls_text import render_text

        groups = application_calls.read(file)
        print_answer(groups, render_text(groups), as_json=as_json)
        return OK
    result = reader.read_result(file)
    print_answer(result, other_tools.render_text(result), as_json=as_json)
    if html is not None:
        _write(other_tools.render_html(result), html, html)
    return OK


def _write(page: str, chosen: Path | None, default: Path) -> None:
    """Write the page to `chosen`, else to `default`, and print its path to stderr. Raises UserError."""
    from loadgen.core.results import checksums

    path = chosen if chosen is not None else default
    try:
        path.write_text(page, "utf-8")
    except OSError as error:
        hint = "give another place with --html FILE, or --no-html"
        raise UserError("unwritable_file", f"cannot write the page: {error.strerror}", str(path), hint) from None
    checksums.renew(path.parent, path)
    print(f"page: {path}", file=sys.stderr)
