"""`loadgen export`: writes a stored run for another tool, its records as CSV, or a JSON Schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen import result_kinds
from loadgen.cli import completion
from loadgen.cli.output import print_json, write_file
from loadgen.cli.schema import KINDS
from loadgen.core import format
from loadgen.core.errors import OK, UserError
from loadgen.formats import FORMATS
from loadgen.plugins import check_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.formats import FormatRow
    from loadgen.runs.request_gaps import StoredWithGaps

_NUMBERS_PER_PART = 131_072
"""So many numbers become text together."""

_NEXT_LINE_OF_VALUE = "\n  "
"""Starts a further line of a value in a document, whose keys are indented by two spaces."""

_NEXT_NUMBER = ",\n    "
FILES = ", ".join(row.name for row in FORMATS.builtin_rows if row.write)
_KINDS = ", ".join(KINDS)
TRACKERS = " or ".join(row.name for row in FORMATS.builtin_rows if row.send)
FORMAT_OPTION = typer.Option(
    "--as",
    metavar="FORMAT",
    help=f"Format: {FILES}; or a tracker: {TRACKERS}.",
    autocompletion=completion.complete_choice(
        lambda: (row.name for row in FORMATS.builtin_rows if row.write or row.send)
    ),
)


RunArgument = Annotated[
    Path | None,
    typer.Argument(help="Directory of a run.", autocompletion=completion.complete_result),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="File to write; for mlflow and wandb, the directory in which they store runs.",
        show_default="stdout, or for a tracker its configured store, as in MLFLOW_TRACKING_URI",
    ),
]
SchemaOption = Annotated[
    str | None,
    typer.Option(
        "--schema",
        metavar="KIND",
        help=f"Print the JSON Schema of a file that you write, instead of a run: {_KINDS}.",
        autocompletion=completion.complete_choice(lambda: KINDS),
    ),
]


def export(
    folder: RunArgument = None,
    format_name: Annotated[str | None, FORMAT_OPTION] = None,
    out: OutOption = None,
    schema: SchemaOption = None,
) -> int:
    """Write a run in the format of another tool, with the definitions of that tool.

    csv writes one line per request. mlflow and wandb receive every metric, the facts of the run and
    its files.

    Exit codes: 0 written; 2 not a run.

    Example: loadgen export results/qa-20261122-101500-1a2b --as vllm -o vllm.json
    """
    if schema is not None:
        return _write_schema(schema, out, has_run=folder is not None or format_name is not None)
    if folder is None:
        raise _missing_argument("the directory of a run")
    if format_name is None:
        raise _missing_argument("--as")

    export_format = _find_format(format_name)
    if export_format.send is not None:
        return _send_to_tracker(export_format, format_name, folder, out)

    _check_exportable(folder)
    return _export_file(export_format, folder, out)


def _missing_argument(name: str) -> UserError:
    """Return the error for a command line that lacks an argument of `export`."""
    example = "loadgen export RUN --as csv -o run.csv"
    return UserError("missing_value", f"{name} is missing", "loadgen export", example)


def _find_format(format_name: str) -> FormatRow:
    """Return the format with a name, if it can write files or send runs to a tracker.

    Raises UserError for another name, which lists the names of all such formats.
    """
    export_format = FORMATS.find(format_name)
    if export_format is not None and (export_format.write or export_format.send):
        return export_format

    rows = FORMATS.rows()
    file_formats = [row.name for row in rows if row.write]
    trackers = [row.name for row in rows if row.send]
    raise UserError(
        "unknown_name",
        f'unknown format "{format_name}"',
        f"--as {format_name}",
        f"known: {', '.join(file_formats + trackers)}",
    )


def _send_to_tracker(
    export_format: FormatRow, format_name: str, run_dir: Path, out: Path | None
) -> int:
    """Send a run to an experiment tracker, such as MLflow, and print where it is stored there.

    Returns the exit code of the command. Raises UserError if the tracker fails.
    """
    from loadgen.core.run_folder import open_run

    send = export_format.send
    assert send is not None  # Only trackers have this function.

    # A tracker may come from a plug-in. The guard turns an exception in it into a UserError.
    guarded_send = FORMATS.guard(export_format, send)
    location = guarded_send(run_dir, open_run(run_dir).summary, out)
    print(f"written to {format_name}: {location}", file=sys.stderr)

    return OK


def _check_exportable(folder: Path) -> None:
    """Raise UserError for a run without records, and for a directory of several runs.

    A directory that is no result at all passes: reading it reports a better error.
    """
    from loadgen.core.results import store
    from loadgen.core.run_folder import is_run

    if is_run(folder) and not store.has_rows(folder):
        raise UserError(
            "no_records",
            "only the summary of this run was kept, not its records",
            str(folder),
            "export a run with records",
        )

    if is_run(folder) or not folder.is_dir():
        return

    runs = result_kinds.runs_in(folder)
    if runs:
        raise UserError(
            "ambiguous",
            "the directory has several runs, but only one run can be exported at a time",
            str(folder),
            f"use the directory of one run, for example {runs[-1]}",
        )


def _export_file(export_format: FormatRow, run_dir: Path, out: Path | None) -> int:
    """Write a run as a file of another tool, to `out` or to stdout.

    A line on stderr states what a reader of the file has to know, for example that the server was
    simulated. It is left out if the file is written to stdout. Returns the exit code of the
    command.
    """
    from loadgen.runs import request_gaps

    stored_run = request_gaps.read_run_with_gaps(run_dir)
    content = _convert_run(export_format, stored_run)

    parts = _split_content(content)
    if out is None:
        sys.stdout.buffer.writelines(parts)
        return OK

    _write_completely(out, parts)
    limitations = _describe_limitations(stored_run, export_format)
    print(f"written: {out}{limitations}", file=sys.stderr)

    return OK


def _convert_run(
    export_format: FormatRow, stored_run: StoredWithGaps
) -> bytes | Mapping[str, Any] | Iterable[bytes]:
    """Return a run as the content of a file in a format: bytes, a JSON document, or parts.

    The format may come from a plug-in. Raises UserError that names the plug-in if it fails, or if
    it returns a value of another type.
    """
    from loadgen.core.run_summary import summarize

    assert export_format.write is not None
    check_content = check_type(bytes, Mapping, Iterable)
    write = FORMATS.guard(export_format, export_format.write, check_content)
    return write(summarize(*stored_run), stored_run)


def _split_content(content: bytes | Mapping[str, object] | Iterable[bytes]) -> Iterable[bytes]:
    """Return the content of a file in parts, from bytes, a JSON document, or parts already."""
    if isinstance(content, bytes):
        return [content]
    if isinstance(content, Mapping):
        return json_parts(content)
    return content


class _TrackedParts:
    """The parts of a file, which also tells whether only some of them were written.

    Attributes:
        is_partial: Whether writing has begun and did not come to the end of the parts.
    """

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._parts = parts
        self.is_partial = False

    def __iter__(self) -> Iterator[bytes]:
        self.is_partial = True
        yield from self._parts
        self.is_partial = False


def _write_completely(out: Path, parts: Iterable[bytes]) -> None:
    """Write a file, and remove it if an error ends the computation of its parts.

    The parts are computed while they are written. A file that was not begun is left alone, so that
    a file that cannot be opened for writing is not removed.
    """
    tracked_parts = _TrackedParts(parts)
    try:
        write_file(out, tracked_parts, "--out")
    finally:
        if tracked_parts.is_partial and out.is_file():
            out.unlink()


def _describe_limitations(stored: StoredWithGaps, export_format: FormatRow) -> str:
    """Return what limits the use of an exported file, or "" if nothing does.

    The text is printed directly after the name of the file. There are two limitations: the server
    was simulated, and a file of some formats also has requests that are not measured, such as those
    of a warm-up.
    """
    manifest = stored.manifest

    simulated_text = ""
    if any(target.simulated for target in manifest.targets):
        where = "the file does not say so"
        if export_format.simulated_mark:
            where = f"see its {export_format.simulated_mark}"
        simulated_text = f" (SIMULATED, no real server was measured: {where})"

    unmeasured_text = ""
    unmeasured_stages = [stage.name or "load" for stage in manifest.stages if not stage.measured]
    if export_format.has_unmeasured_requests and unmeasured_stages:
        stages = ", ".join(unmeasured_stages)
        unmeasured_text = f"; rows of stage {stages} are not part of the metrics"

    return simulated_text + unmeasured_text


def json_parts(
    document: Mapping[str, object], numbers_per_part: int = _NUMBERS_PER_PART
) -> Iterator[bytes]:
    """Yield a document as `json.dumps(document, indent=2)` writes it, part by part.

    The values may be numpy arrays of millions of numbers. At most `numbers_per_part` of them are
    converted to text at a time, which takes little memory.
    """
    if not document:
        yield b"{}\n"
        return

    yield b"{"
    for index, (key, value) in enumerate(document.items()):
        comma = "," if index else ""
        yield f"{comma}\n  {json.dumps(key)}: ".encode()
        yield from _value_parts(value, numbers_per_part)

    yield b"\n}\n"


def _value_parts(value: Any, numbers_per_part: int) -> Iterator[bytes]:
    """Yield the JSON text of the value of one key of a document.

    An array of numpy is converted in parts of at most `numbers_per_part` numbers. Any other value
    is converted at once.
    """
    import numpy as np

    is_array = isinstance(value, np.ndarray)
    if is_array and len(value):
        yield from _array_parts(value, numbers_per_part)
        return

    # An empty array of numpy is an empty list in JSON.
    plain_value = [] if is_array else value
    text = json.dumps(plain_value, indent=2, allow_nan=False)

    # The value is inside a document, so all lines but the first are indented by one more level.
    yield text.replace("\n", _NEXT_LINE_OF_VALUE).encode()


def _array_parts(values: NDArray[Any], numbers_per_part: int) -> Iterator[bytes]:
    """Yield the JSON text of an array that is not empty, with one number per line."""
    for first in range(0, len(values), numbers_per_part):
        numbers = values[first : first + numbers_per_part].tolist()
        text_in_brackets = json.dumps(numbers, allow_nan=False)
        text = text_in_brackets.removeprefix("[").removesuffix("]").replace(", ", _NEXT_NUMBER)
        opening = "," if first else "["
        yield f"{opening}\n    {text}".encode()
    yield b"\n  ]"


def _write_schema(kind: str, out: Path | None, *, has_run: bool) -> int:
    """Write the JSON Schema of a kind of file to `out` or stdout, and return the exit code OK.

    Raises UserError if the command line also names a run or a format (`has_run`).
    """
    from loadgen.cli import schema

    if has_run:
        raise UserError(
            "no_effect",
            "--schema does not export a run",
            f"--schema {kind}",
            "leave out the run and --as",
        )

    document = schema.build_file_schema(kind)
    if out is None:
        print_json(document)
    else:
        write_file(out, format.document(document), "--out")

    return OK
