"""What every command needs to speak: lines on stderr, JSON on stdout, files that the user has named."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from loadgen.core import format
from loadgen.core.errors import TargetError, UserError

if TYPE_CHECKING:
    from loadgen.render.section import Report


LEAST_COLUMNS = 60
MOST_COLUMNS = 160
"""The widths between which text follows the terminal. Lines of prose beyond are hard to read."""


def text_width(stream: TextIO) -> int:
    """Return the columns of a text on this stream: those of its terminal, or a fixed number."""
    from loadgen.render.table import WIDTH

    if not stream.isatty():
        return WIDTH
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return WIDTH
    if not columns:
        return WIDTH
    return min(max(columns, LEAST_COLUMNS), MOST_COLUMNS)


def print_status(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print a value as JSON on stdout."""
    print(format.document(value).decode(), end="", flush=True)


def print_result(
    value: Any,
    answer: Report | str,
    *,
    as_json: bool,
    as_markdown: bool = False,
    full: bool = False,
) -> None:
    """Print the answer of a command on stdout: the value as JSON, or its report, or a text that ends in a newline."""
    if as_json:
        print_json(value)
    elif isinstance(answer, str):
        print(answer, end="", flush=True)
    else:
        print_report(answer, as_markdown=as_markdown, full=full)


def print_report(report: Report, *, as_markdown: bool = False, full: bool = False) -> None:
    """Print a report on stdout, as text or as Markdown.

    The text has colors on a terminal. It is the brief form of the report, if it has one, unless
    `full` is True. Markdown always has every section.
    """
    if as_markdown:
        from loadgen.render import markdown

        answer = markdown.render(report)
    else:
        from loadgen.render import text

        answer = text.render(report, full=full, color=wants_color(), width=text_width(sys.stdout))
    print(answer, end="", flush=True)


@contextmanager
def add_resume_hint(parent: Path, going_on: str) -> Iterator[None]:
    """Where the target or the nodes are lost between two runs of a folder, the fault says what is left to do."""
    try:
        yield
    except TargetError as error:
        if not any(parent.rglob("summary.json")):
            raise
        hint = "; ".join(filter(None, (error.hint, f"what was measured is kept, and {going_on}")))
        raise TargetError(
            error.code, error.what, error.where, hint, key=error.key, values=error.values
        ) from None


def write_file(
    path: Path, data: str | bytes | Iterable[bytes], flag: str, *, add: bool = False
) -> None:
    """Write a file that the user named with `flag`, or `add` to it. Raises UserError."""
    if isinstance(data, str | bytes):
        data = [data if isinstance(data, bytes) else data.encode()]
    try:
        with path.open("ab" if add else "wb") as file:
            file.writelines(data)
    except OSError as error:
        raise UserError(
            "unwritable_file", f"cannot be written: {error.strerror}", f"{flag} {path}"
        ) from None


def wants_color() -> bool:
    """Whether stdout is a terminal that wants colour."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def find_foreign_pages(folder: Path) -> list[str]:
    """Files below a folder that a browser opens as a page, and that do not begin as ours do, with what keeps it in."""
    from loadgen.render.page import head

    ours = head().encode()
    return [
        file.relative_to(folder).as_posix()
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in (".html", ".htm", ".xhtml", ".xht", ".svg", ".mhtml")
        and not _begins(file, ours)
    ]


def _begins(file: Path, content: bytes) -> bool:
    """Whether a file begins with this content; one that cannot be read does not."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(content)) == content
    except OSError:
        return False


def warn_if_changed(folder: Path) -> None:
    """Say which files of a results folder are not as the command that wrote it left them; nothing when all are."""
    from loadgen.core.results import checksums

    if not folder.is_dir():
        return
    differences = checksums.changed(folder)
    if not differences:
        return
    listed = ", ".join(f"{name} ({what})" for name, what in list(differences.items())[:5])
    more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
    print_status(
        f"note: {folder} is not as it was written: {listed}{more}. The figures below are of the files as they are now. "
        f"To see every change: cd {folder} && sha256sum -c {checksums.FILE}"
    )
