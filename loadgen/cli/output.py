"""What every command prints and writes: status on stderr, results on stdout, files of the user."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from loadgen.core import format
from loadgen.core.errors import TargetError, UserError

if TYPE_CHECKING:
    from loadgen.render.section import Report


MIN_COLUMNS = 60
MAX_COLUMNS = 160
"""The limits of the width of text on a terminal, whose own width counts between them.

Longer lines are hard to read. `WIDTH` of `render/table.py` is the width where there is no terminal.
"""

MAX_NAMED_FILES = 5
"""How many files a note names. The others are counted."""

BROWSER_PAGE_SUFFIXES = (".html", ".htm", ".xhtml", ".xht", ".svg", ".mhtml")
"""Files that a browser opens as a page and whose scripts it runs."""


def text_width(stream: TextIO) -> int:
    """Return the width, in columns, of the text that is written to a stream.

    On a terminal, it is the width of the terminal, but at least `MIN_COLUMNS` and at most
    `MAX_COLUMNS`. For a file, a pipe or a terminal of unknown size, it is a fixed default.
    """
    from loadgen.render.table import WIDTH as DEFAULT_COLUMNS

    if not stream.isatty():
        return DEFAULT_COLUMNS

    try:
        terminal_columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # ValueError: the stream has no file descriptor
        return DEFAULT_COLUMNS

    if terminal_columns == 0:  # some terminals, for example in a container, report no size
        return DEFAULT_COLUMNS

    return min(max(terminal_columns, MIN_COLUMNS), MAX_COLUMNS)


def print_status(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    print(format.document(value).decode(), end="", flush=True)


def print_result(
    value: object,
    report: Report | str,
    *,
    as_json: bool,
    as_markdown: bool = False,
    full: bool = False,
) -> None:
    """Print the result of a command on stdout, as JSON or as a report.

    Args:
        value: The result, which `--json` prints.
        report: The same result for people. A string is printed as it is and ends in a newline.
        as_json: True to print the value and not the report.
        as_markdown: True to print the report as Markdown and not as text.
        full: True to print every section of the text and not only its brief form.
    """
    if as_json:
        print_json(value)
    elif isinstance(report, str):
        print(report, end="", flush=True)
    else:
        print_report(report, as_markdown=as_markdown, full=full)


def refuse_two_formats(*, as_json: bool, as_markdown: bool) -> None:
    """Raise UserError if both JSON and Markdown are requested, of which only one can be printed."""
    if as_json and as_markdown:
        raise UserError(
            "conflict", "only one format can be printed", "--json --markdown", "give one of them"
        )


def print_report(report: Report, *, as_markdown: bool = False, full: bool = False) -> None:
    """Print a report on stdout, as text or as Markdown.

    The text has colors on a terminal. It is the brief form of the report, if it has one, unless
    `full` is True. Markdown always has every section.
    """
    if as_markdown:
        from loadgen.render import markdown

        rendered = markdown.render(report)
    else:
        from loadgen.render import text

        rendered = text.render(report, full=full, color=wants_color(), width=text_width(sys.stdout))
    print(rendered, end="", flush=True)


@contextmanager
def add_resume_hint(output_dir: Path, resume_hint: str) -> Iterator[None]:
    """Say how to resume if the target is lost or the user presses Ctrl-C in the `with` block.

    A command with several runs may lose its target after some of them. The hint of its TargetError
    then says that the finished runs are stored. Without a finished run in the folder, the error is
    left as it is. An interruption that leaves no report prints what is stored.

    Args:
        output_dir: The folder of the command, which contains the folders of its runs.
        resume_hint: How to resume the command, as a part of a sentence.
    """
    try:
        yield
    except KeyboardInterrupt:
        if _has_finished_run(output_dir):
            print_status(f"Finished runs are kept, and {resume_hint}.")
        else:
            print_status("Nothing was measured, because no run has finished. Repeat the command.")
        raise
    except TargetError as error:
        if not _has_finished_run(output_dir):
            raise

        hints = [error.hint, f"finished runs are kept, and {resume_hint}"]
        raise TargetError(
            error.code,
            error.message,
            error.where,
            "; ".join(filter(None, hints)),
            key=error.key,
            values=error.values,
        ) from None


@contextmanager
def explain_interruption(describe: Callable[[], str]) -> Iterator[None]:
    """Print what an interruption leaves and how to go on if Ctrl-C ends the `with` block.

    Args:
        describe: Returns the text. It is called after the interruption.
    """
    try:
        yield
    except KeyboardInterrupt:
        print_status(describe())
        raise


def describe_nothing_measured() -> str:
    """Return the text for a command that was interrupted before its load."""
    return "Nothing was measured, because the load had not begun. Repeat the command."


def _has_finished_run(output_dir: Path) -> bool:
    """Return whether a folder has a run with a summary, which is written when the run ends."""
    return any(output_dir.rglob("summary.json"))


def write_file(
    path: Path, data: str | bytes | Iterable[bytes], flag: str, *, append: bool = False
) -> None:
    """Write a file that the user named with an option, or append to it.

    Args:
        path: The file.
        data: The content: a text, bytes, or chunks of bytes that are written one after the other.
        flag: The option that names the file, for the error message.
        append: True to keep what the file contains and to write after it.

    Raises:
        UserError: If the file cannot be written.
    """
    chunks: Iterable[bytes]
    if isinstance(data, str):
        chunks = [data.encode()]
    elif isinstance(data, bytes):
        chunks = [data]
    else:
        chunks = data

    try:
        with path.open("ab" if append else "wb") as file:
            file.writelines(chunks)
    except OSError as error:
        raise UserError(
            "unwritable_file", f"cannot be written: {error.strerror}", f"{flag} {path}"
        ) from None


def wants_color() -> bool:
    """Return True if stdout is a terminal, unless the user has set NO_COLOR."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def find_foreign_pages(folder: Path) -> list[str]:
    """Return the pages below a folder that this version of loadgen did not write.

    Our pages begin with a content security policy, which limits what a browser runs. Other pages
    may contain scripts of the author of the folder.
    """
    from loadgen.render.page import build_page_head

    page_head = build_page_head().encode()
    return [
        file.relative_to(folder).as_posix()
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in BROWSER_PAGE_SUFFIXES and not _begins_with(file, page_head)
    ]


def list_names(names: Sequence[str]) -> str:
    """Return the first few names and how many more there are: "a, b and 3 more"."""
    first_names = ", ".join(names[:MAX_NAMED_FILES])
    omitted_count = len(names) - MAX_NAMED_FILES
    return f"{first_names} and {omitted_count} more" if omitted_count > 0 else first_names


def _begins_with(path: Path, content: bytes) -> bool:
    """Return True if a file can be read and begins with this content."""
    try:
        with path.open("rb") as file:
            return file.read(len(content)) == content
    except OSError:
        return False


def warn_if_changed(folder: Path) -> None:
    """Warn on stderr about files of a results folder that were changed or removed after the run.

    The folder stores a checksum of each file. Commands that read a stored result call this first.
    A path that is no folder is not checked.
    """
    from loadgen.core.results import checksums

    if not folder.is_dir():
        return

    changes = [f"{name} ({change})" for name, change in checksums.find_changes(folder).items()]
    if not changes:
        return

    print_status(
        f"warning: {folder} was modified after it was written: {list_names(changes)}. The metrics "
        f"below are those of the modified files. To list all changes: cd {folder} && sha256sum -c "
        f"{checksums.FILE}"
    )
