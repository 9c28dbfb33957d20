"""`loadgen report DIR`: a stored run, printed again from its records and made into one HTML page.

Flags, one call, a print, an exit code: `loadgen.store` knows what a run is made of, `loadgen.summary` what it says.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from loadgen.metrics.summary import Summary


def report(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of a run, or of several (levels, repeats), or another tool's result file."),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", help="Where the page goes; without it: report.html in the folder.")
    ] = None,
    no_html: Annotated[bool, typer.Option("--no-html", help="Print only.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print summary.json instead of the table; no page unless --html.")
    ] = False,
) -> int:
    """Print a stored run again, from its records, and write report.html: one file that opens without network.

    Exit: 0 sound and SLO met, 1 SLO missed, 2 not a run, 3 the run is not valid.
    """
    from loadgen.compare import inputs
    from loadgen.metrics import summary_json
    from loadgen.metrics.validity import exit_code
    from loadgen.report import text

    other = inputs.by_another_tool(folder)
    if other is not None:
        return _reported(other, html, as_json=as_json)
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    wanted = not no_html and (html is not None or not as_json)
    several = [] if inputs.is_run(folder) else sorted(filter(inputs.is_run, folder.glob("*/")), key=_natural)
    read = [_read(one, page=wanted and not several) for one in several or [folder]]
    summaries = [summary for summary, _ in read]
    page = read[0][1]
    if several and len({summary.fingerprints.recipe for summary in summaries}) > 1:
        named = [(one.name, summary) for one, summary in zip(several, summaries, strict=True)]
        inputs.of_one_work(folder, named)
        told, page = _levels(named, wanted)
    elif several:
        told = text.render_levels(summaries, color=color)
    else:
        told = text.render(summaries[0], color=color)
    if as_json:
        written = [summary_json.dump_summary(summary).decode().rstrip() for summary in summaries]
        print("[" + ",\n".join(written) + "]" if several else written[0])
    else:
        print(told, end="", flush=True)
    if page is not None:
        _write(page, html, folder / "report.html")
    return max(
        exit_code(interrupted=False, valid=summary.verdict.valid, slo_met=summary.goodput.met) for summary in summaries
    )


def _natural(folder: Path) -> tuple[int, str]:
    """c2 before c16."""
    return int("".join(filter(str.isdigit, folder.name)) or 0), folder.name


def _read(folder: Path, *, page: bool) -> tuple[Summary, str | None]:
    """The summary and, if wanted, the page: from the records, or from `summary.json` where only that was kept."""
    from loadgen import run_folder
    from loadgen.compare import inputs as sides
    from loadgen.interop.other_definitions import reported
    from loadgen.metrics import summary_json as machine
    from loadgen.metrics.summary import summarize
    from loadgen.report import html
    from loadgen.report.run_data import figures
    from loadgen.results import store
    from loadgen.results.spool import HEAT_EDGES_NS
    from loadgen.run_folder import with_server

    kept = folder / "summary.json"
    if not sides.has_records(folder) and (kept.is_file() or (folder / "run.json").is_file()):
        summary = machine.load_summary(kept.read_bytes(), str(kept)) if kept.is_file() else run_folder.summary(folder)
        return summary, html.render(summary) if page else None
    stored = store.read_lightly(folder)
    summary = with_server(folder, summarize(*stored))
    if not page:
        return summary, None
    drawn = figures(*stored, store.heat(folder), HEAT_EDGES_NS)
    others = reported(summary, stored.header, stored.rows, stored.gaps)
    return summary, html.render(summary, stored.header, drawn, others, store.server(folder))


def _levels(named: list[tuple[str, Summary]], page: bool) -> tuple[str, str | None]:
    """Runs of one workload at several loads: table and, if wanted, page."""
    from loadgen.report import sweep
    from loadgen.search.sweep import curve

    found = curve(named)
    return sweep.render_text(found), sweep.render_html(found) if page else None


def _reported(file: Path, html: Path | None, *, as_json: bool) -> int:
    """A result file of another tool: its figures under its own definitions; a page only where it was asked for."""
    import msgspec

    from loadgen.errors import OK
    from loadgen.interop import reader
    from loadgen.report import other_tools

    result = reader.read_result(file)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
    else:
        print(other_tools.render_text(result), end="")
    if html is not None:
        _write(other_tools.render_html(result), html, html)
    return OK


def _write(page: str, asked: Path | None, default: Path) -> None:
    """The page, where it was asked for or into the run's folder; its path goes to stderr."""
    from loadgen.errors import UserError

    path = asked if asked is not None else default
    try:
        path.write_text(page, "utf-8")
    except OSError as error:
        hint = "give another place with --html FILE, or --no-html"
        raise UserError(f"cannot write the page: {error.strerror}", str(path), hint) from None
    print(f"page: {path}", file=sys.stderr)
