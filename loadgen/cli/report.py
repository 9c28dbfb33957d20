"""The command `loadgen report`: print a stored result again and write its page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli import completion
from loadgen.cli.options import FullOption, StrictOption
from loadgen.cli.output import (
    find_foreign_pages,
    list_names,
    print_status,
    refuse_two_formats,
    text_width,
    wants_color,
    warn_if_changed,
)
from loadgen.core.errors import UserError
from loadgen.core.metrics.interactivity import DEFAULT_DEFINITION, InteractivityName

if TYPE_CHECKING:
    from loadgen.result_kinds import OpenedResult


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Results folder, folder of several results, or result file of another tool.",
            autocompletion=completion.complete_result,
        ),
    ],
    full: FullOption = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Path of the HTML page.",
            show_default="report.html in the folder",
        ),
    ] = None,
    no_html: Annotated[bool, typer.Option("--no-html", help="Write no HTML page.")] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            rich_help_panel="Output",
            help="Print the result as JSON. Writes a page only with --html.",
        ),
    ] = False,
    as_markdown: Annotated[
        bool,
        typer.Option(
            "--markdown",
            rich_help_panel="Output",
            help="Print Markdown, for CI. Writes a page only with --html.",
        ),
    ] = False,
    interactivity: Annotated[
        InteractivityName | None,
        typer.Option(
            "--interactivity",
            metavar="tpot50|endpoints|agentx",
            rich_help_panel="Output",
            help="Speed per user in the Pareto chart of a sweep: 1 / TPOT p50, 1 / TPOT p90 "
            "(MLPerf Endpoints), or 1 / p90 of E2E per output token (AgentX).",
            show_default="tpot50",
        ),
    ] = None,
    strict: StrictOption = False,
) -> int:
    """Print a stored result, computed from its records, and write it as one HTML page.

    Exit: 0 valid and SLO met, 1 SLO missed, 2 not a result, 3 not valid, 4 undecided with --strict.
    Searches, sweeps, validations and completion checks exit as their commands do.

    Example: loadgen report results/qa-20261122-101500-1a2b --html page.html
    """
    from loadgen import result_kinds

    refuse_two_formats(as_json=as_json, as_markdown=as_markdown)
    warn_if_changed(folder)

    # A folder of no kind is opened as a run, whose error message says what is missing.
    kind = result_kinds.kind_of(folder) or result_kinds.RUN
    result = result_kinds.OpenedResult(folder, kind, interactivity or "")
    prints_text = not as_json and not as_markdown

    if as_json:
        sys.stdout.buffer.write(result.document)
        sys.stdout.buffer.flush()
    elif as_markdown:
        print(result.markdown, end="", flush=True)
    else:
        text = result.render_text(full=full, color=wants_color(), width=text_width(sys.stdout))
        print(text, end="", flush=True)

    if html is not None and not no_html:
        _write_page(result, html, result_dir=folder)
    elif prints_text and not no_html:
        _write_default_page(result, folder)

    if prints_text and folder.is_dir():
        _warn_about_foreign_pages(folder)

    return result.exit_code(strict=strict)


def _write_default_page(result: OpenedResult, folder: Path) -> None:
    """Write the HTML page of a result into its folder, under the file name that its kind defines.

    No page is written in two cases. Some kinds of results have no page and define no file name. And
    a folder that only groups the results of several commands gets a page only if one of them lies
    directly in it. Otherwise, a page would be written into any folder far above some results. The
    user is told how to write it elsewhere.
    """
    from loadgen import result_kinds

    kind = result.row
    if not kind.page_name:
        return

    may_contain_page = result_kinds.can_write_page_to(kind, folder)
    if may_contain_page:
        _write_page(result, folder / _page_name(result), result_dir=folder)
    else:
        print_status(
            f"No page was written, because {folder} holds several results and is none "
            "itself. To write one: --html FILE"
        )


def _page_name(result: OpenedResult) -> str:
    """Return the file name of the page of a result, such as `report.html`.

    A page with another Pareto chart than that of the command gets a name of its own, such as
    `report-endpoints.html`, because `loadgen verify` compares `report.html`.
    """
    page_name = result.row.page_name
    if result.interactivity in ("", DEFAULT_DEFINITION):
        return page_name

    page = Path(page_name)
    return f"{page.stem}-{result.interactivity}{page.suffix}"


def _write_page(result: OpenedResult, path: Path, result_dir: Path) -> None:
    """Write the HTML page of a result to a file and print the path.

    A file that has the same content already is not written again. A symbolic link inside the folder
    of the result is replaced by the page, not followed: another author may have written the folder,
    and the link may lead to any file of the user. Outside, links are followed, for example
    `/dev/stdout`.

    Args:
        result: The result. Nothing is written if it has no page.
        path: The file.
        result_dir: The folder of the result.

    Raises:
        UserError: If the file cannot be written.
    """
    from loadgen.core.results import checksums, files

    page = result.page
    if page is None:
        return

    content = page.encode()
    try:
        is_in_result_dir = path.parent.resolve().is_relative_to(result_dir.resolve())
        is_untrusted_link = is_in_result_dir and path.is_symlink()
        is_up_to_date = not is_untrusted_link and _has_content(path, content)
        if not is_up_to_date and is_in_result_dir:
            files.replace(path, content, shared=True)  # replaces a link instead of following it
        elif not is_up_to_date:
            path.write_bytes(content)
    except OSError as error:
        raise UserError(
            "unwritable_file",
            f"the page cannot be written: {error.strerror}",
            str(path),
            "choose another path with --html FILE, or use --no-html",
        ) from None

    # A folder that lists the checksums of its files would otherwise report the page as modified.
    checksums.renew(path.parent, path)
    print_status(f"page: {path}")


def _has_content(path: Path, content: bytes) -> bool:
    """Return True if a file exists and consists of this content."""
    return path.is_file() and path.read_bytes() == content


def _warn_about_foreign_pages(folder: Path) -> None:
    """Warn on stderr about pages in a folder that could run scripts of another author."""
    pages = find_foreign_pages(folder)
    if pages:
        print_status(
            f"warning: this version of loadgen did not write {list_names(pages)} in {folder}. A "
            "page from another author can run scripts in your browser."
        )
