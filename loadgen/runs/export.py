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

_NEXT_NUMBER = ",\n    "
FILES = ", ".join(row.name for row in FORMATS.builtin_rows if row.write)
_KINDS = ", ".join(KINDS)
TRACKERS = " or ".join(row.name for row in FORMATS.builtin_rows if row.send)
FORM = typer.Option(
    "--as",
    metavar="FORMAT",
    help=f"Format: {FILES}; or a tracker: {TRACKERS}.",
    autocompletion=completion.complete_choice(
        lambda: (row.name for row in FORMATS.builtin_rows if row.write or row.send)
    ),
)


def export(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Directory of a run.", autocompletion=completion.complete_result),
    ] = None,
    form: Annotated[str | None, FORM] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="File to write, or the directory of the store of a tracker.",
            show_default="stdout, or the store that the environment of the tracker names",
        ),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            "--schema",
            metavar="KIND",
            help=f"Print the JSON Schema of a file that you write, instead of a run: {_KINDS}.",
            autocompletion=completion.complete_choice(lambda: KINDS),
        ),
    ] = None,
) -> int:
    """Write a run in the format of another tool, with the definitions of that tool.

    csv writes one line per request. mlflow and wandb receive every metric, the facts of the run and
    its files.

    Exit codes: 0 written; 2 not a run.

    Example: loadgen export results/qa-20261122-101500-1a2b --as vllm -o vllm.json
    """
    if schema is not None:
        return _write_schema(schema, folder or form, out)
    if folder is None or form is None:
        missing = "the directory of a run" if folder is None else "--as"
        raise UserError(
            "missing_value",
            f"{missing} is missing",
            "loadgen export",
            "loadgen export RUN --as csv -o run.csv",
        )
    row = _find_format(form)
    if row.send is not None:
        return _send_to_tracker(row, form, folder, out)
    _check_exportable(folder)
    return _export_file(row, form, folder, out)


def _find_format(form: str) -> FormatRow:
    """Return a format that runs can be exported to. Raises UserError for another name."""
    row = FORMATS.find(form)
    if row is not None and (row.write is not None or row.send is not None):
        return row
    rows = FORMATS.rows()
    names = [row.name for row in rows if row.write] + [row.name for row in rows if row.send]
    raise UserError(
        "unknown_name", f'unknown format "{form}"', f"--as {form}", f"known: {', '.join(names)}"
    )


def _send_to_tracker(row: FormatRow, form: str, folder: Path, out: Path | None) -> int:
    """Send a run to an experiment tracker and print where it is."""
    from loadgen.core.run_folder import open_run

    assert row.send is not None
    location = FORMATS.guard(row, row.send)(folder, open_run(folder).summary, out)
    print(f"written to {form}: {location}", file=sys.stderr)
    return OK


def _check_exportable(folder: Path) -> None:
    """Raise UserError unless the directory is one run with records."""
    from loadgen.core.results import store
    from loadgen.core.run_folder import is_run

    if is_run(folder):
        if not store.has_rows(folder):
            raise UserError(
                "no_records",
                "only the summary of this run was kept, not its records",
                str(folder),
                "export a run with records",
            )
        return
    runs = result_kinds.runs_in(folder) if folder.is_dir() else []
    if runs:
        raise UserError(
            "ambiguous",
            "the directory has several runs, and one can be exported",
            str(folder),
            f"give the directory of one of them, for example {runs[-1]}",
        )


def _export_file(row: FormatRow, form: str, folder: Path, out: Path | None) -> int:
    """Write a run as a file of another tool, to stdout without `out`."""
    from loadgen.core.run_summary import summarize
    from loadgen.runs import request_gaps

    stored = request_gaps.read_run_with_gaps(folder)
    assert row.write is not None
    write = FORMATS.guard(row, row.write, check_type(bytes, Mapping, Iterable))
    parts = _file_parts(write(summarize(*stored), stored))
    if out is None:
        sys.stdout.buffer.writelines(parts)
        return OK
    _write_completely(out, parts)
    print(f"written: {out}{_export_notes(stored, form)}", file=sys.stderr)
    return OK


def _file_parts(data: bytes | Mapping[str, Any] | Iterable[bytes]) -> Iterable[bytes]:
    """Return the content of a file in parts: bytes, a JSON document, or parts already."""
    if isinstance(data, bytes):
        return [data]
    if isinstance(data, Mapping):
        return json_parts(data)
    return data


def _write_completely(out: Path, parts: Iterable[bytes]) -> None:
    """Write a file, and remove it if its parts cannot all be computed."""
    is_partial = False

    def tracked_parts() -> Iterator[bytes]:
        nonlocal is_partial
        is_partial = True
        yield from parts
        is_partial = False

    try:
        write_file(out, tracked_parts(), "--out")
    finally:
        if is_partial and out.is_file():
            out.unlink()


def _export_notes(stored: StoredWithGaps, form: str) -> str:
    """Return what a reader of the file has to know: that it is simulated, and unmeasured rows."""
    manifest = stored.manifest
    notes = ""
    if any(target.simulated for target in manifest.targets):
        place = "column `simulated`" if form == "csv" else "field `loadgen`"
        notes += f" (SIMULATED, no real server was measured: see its {place})"
    unmeasured = [stage.name or "load" for stage in manifest.stages if not stage.measured]
    if form == "csv" and unmeasured:
        notes += f"; rows of stage {', '.join(unmeasured)} are not part of the metrics"
    return notes


def json_parts(
    document: Mapping[str, Any], numbers_per_part: int = _NUMBERS_PER_PART
) -> Iterator[bytes]:
    """Yield a document as `json.dumps(document, indent=2)` writes it, part by part.

    Arrays may have millions of numbers, so neither all of them as objects nor the whole text is in
    memory at one time.
    """
    import numpy as np

    if not document:
        yield b"{}\n"
        return
    separator = "{"
    for key, value in document.items():
        yield f"{separator}\n  {json.dumps(key)}: ".encode()
        separator = ","
        if isinstance(value, np.ndarray) and len(value):
            yield from _array_parts(value, numbers_per_part)
            continue
        plain_value = value.tolist() if isinstance(value, np.ndarray) else value
        text = json.dumps(plain_value, indent=2, allow_nan=False)
        yield text.replace("\n", "\n  ").encode()
    yield b"\n}\n"


def _array_parts(values: NDArray[Any], numbers_per_part: int) -> Iterator[bytes]:
    """Yield a list of numbers, one per line."""
    for first in range(0, len(values), numbers_per_part):
        numbers = values[first : first + numbers_per_part].tolist()
        text = json.dumps(numbers, allow_nan=False)[1:-1].replace(", ", _NEXT_NUMBER)
        opening = "," if first else "["
        yield f"{opening}\n    {text}".encode()
    yield b"\n  ]"


def _write_schema(kind: str, other_argument: object, out: Path | None) -> int:
    """Write the JSON Schema of a file. Raises UserError if a run was specified too."""
    from loadgen.cli import schema

    if other_argument is not None:
        raise UserError(
            "no_effect",
            "--schema does not export a run",
            f"--schema {kind}",
            "leave out the run and --as",
        )
    document = schema.schema(kind)
    if out is None:
        print_json(document)
    else:
        write_file(out, format.document(document), "--out")
    return OK
