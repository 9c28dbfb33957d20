"""`loadgen report DIR`: print a stored result again, from its records, and write it as one HTML page.

Parses flags and prints: the kind of the result (`result_kinds`) opens it and renders it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from loadgen.cli import completion
from loadgen.cli.options import FullOption, StrictOption
from loadgen.cli.output import (
    text_width,
    find_foreign_pages,
    wants_color,
    print_status,
    warn_if_changed,
)
from loadgen.core.errors import UserError


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of a result or of several, another tool's result file, or calls of the SDK.",
            autocompletion=completion.complete_result,
        ),
    ],
    full: FullOption = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Where the page goes.",
            show_default="report.html in the folder",
        ),
    ] = None,
    no_html: Annotated[bool, typer.Option("--no-html", help="Print only.")] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            rich_help_panel="Output",
            help="Print summary.json, verdict.json, ... instead; no page unless --html.",
        ),
    ] = False,
    as_markdown: Annotated[
        bool,
        typer.Option(
            "--markdown",
            rich_help_panel="Output",
            help="Print Markdown instead, as for a build; no page unless --html.",
        ),
    ] = False,
    strict: StrictOption = False,
) -> int:
    """Print a stored result again, from its records, and write report.html: one file that opens without network.

    Exit: 0 sound and SLO met, 1 SLO missed, 2 not a result, 3 not valid, with --strict 4 undecided;
    searches, sweeps, verdicts, answers: theirs.

    Example: loadgen report results/qa-20261122-101500-1a2b --html page.html
    """
    from loadgen import result_kinds

    if as_json and as_markdown:
        raise UserError("conflict", "several formats at once", "--json, --markdown", "choose one")
    warn_if_changed(folder)
    opened = result_kinds.OpenedResult(folder, result_kinds.kind_of(folder) or result_kinds.RUN)
    if as_json:
        sys.stdout.buffer.write(opened.document)
        sys.stdout.buffer.flush()
    elif as_markdown:
        print(opened.markdown, end="", flush=True)
    else:
        print(
            opened.render_text(full=full, color=wants_color(), width=text_width(sys.stdout)),
            end="",
            flush=True,
        )
    only = as_json or as_markdown
    beside = opened.row.page_name if result_kinds.leaves_page_in(opened.row, folder) else ""
    if (
        not no_html
        and (html is not None or (beside and not only))
        and (page := opened.page) is not None
    ):
        _write(page, html if html is not None else folder / beside, within=folder)
    elif not no_html and not only and opened.row.page_name and not beside:
        print_status(f"no page: no result lies directly in {folder}; --html FILE writes one")
    if not only and folder.is_dir() and (pages := find_foreign_pages(folder)):
        print_status(
            f"note: {', '.join(pages[:5])}{' and more' * (len(pages) > 5)} in {folder}: not made by this version of "
            "loadgen. In a folder of somebody else such a page may run in your browser what its sender has written"
        )
    return opened.exit_code(strict=strict)


def _write(page: str, path: Path, within: Path) -> None:
    """Write the page, unless the file has it already, and print its path to stderr. Raises UserError.

    Of a link the user's own is followed (`/dev/stdout`), and one `within` the folder of the result is not.
    """
    from loadgen.core.results import checksums, files

    try:
        own = not path.parent.resolve().is_relative_to(within.resolve())
        if (
            (path.is_symlink() and not own)
            or not path.is_file()
            or path.read_bytes() != page.encode()
        ):
            if own:
                path.write_text(page, "utf-8")
            else:
                files.replace(path, page.encode(), shared=True)
    except OSError as error:
        hint = "give another place with --html FILE, or --no-html"
        raise UserError(
            "unwritable_file", f"cannot write the page: {error.strerror}", str(path), hint
        ) from None
    checksums.renew(path.parent, path)
    print(f"page: {path}", file=sys.stderr)
