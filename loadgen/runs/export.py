"""`loadgen export`: a stored run as a result file of another tool, or its records as CSV; the schema of a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from loadgen import result_kinds
from loadgen.cli import completion
from loadgen.cli.output import print_json, write_file
from loadgen.cli.schema import KINDS
from loadgen.core import format
from loadgen.core.errors import OK, UserError
from loadgen.formats import FORMATS
from loadgen.plugins import check_type

_TEXT_NUMBERS = 131_072  # numbers that become text together
_NEXT = ",\n    "
FILES = ", ".join(row.name for row in FORMATS.builtin_rows if row.write)
_KINDS = ", ".join(KINDS)
TRACKERS = " or ".join(row.name for row in FORMATS.builtin_rows if row.send)
FORM = typer.Option(
    "--as",
    metavar="FORMAT",
    help=f"{FILES}; {TRACKERS}: into that tracker.",
    autocompletion=completion.complete_choice(
        lambda: (row.name for row in FORMATS.builtin_rows if row.write or row.send)
    ),
)


def export(
    folder: Annotated[
        Path | None,
        typer.Argument(help="Folder of a run.", autocompletion=completion.complete_result),
    ] = None,
    form: Annotated[str | None, FORM] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="File to write; of a tracker the folder of its store.",
            show_default="stdout, or what its environment says",
        ),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            "--schema",
            metavar="KIND",
            help=f"In place of a run: the JSON Schema of a file that you write: {_KINDS}.",
            autocompletion=completion.complete_choice(lambda: KINDS),
        ),
    ] = None,
) -> int:
    """Write a run in another tool's format, under that tool's definitions; csv: one line per request. mlflow and wandb
    get every figure, the facts of the run and its files.

    Exit: 0, 2 not a run.

    Example: loadgen export results/qa-20261122-101500-1a2b --as vllm -o vllm.json
    """
    if schema is not None:
        return _write_schema(schema, folder or form, out)
    if folder is None or form is None:
        lacking = "the folder of a run" if folder is None else "--as"
        raise UserError(
            "missing_value",
            f"{lacking} is missing",
            "loadgen export",
            "loadgen export RUN --as csv -o run.csv",
        )
    from loadgen.core.results import store
    from loadgen.core.run_folder import is_run, open_run
    from loadgen.core.run_summary import summarize
    from loadgen.runs import request_gaps

    row = FORMATS.find(form)
    if row is None or (row.write is None and row.send is None):
        known = ", ".join(
            [row.name for row in FORMATS.rows() if row.write]
            + [row.name for row in FORMATS.rows() if row.send]
        )
        raise UserError(
            "unknown_name", f'unknown format "{form}"', f"--as {form}", f"known: {known}"
        )
    if row.send is not None:
        where = FORMATS.guard(row, row.send)(folder, open_run(folder).summary, out)
        print(f"written to {form}: {where}", file=sys.stderr)
        return OK
    if is_run(folder) and not store.has_rows(folder):
        hint = "export a run with records"
        raise UserError(
            "no_records",
            "only the summary of this run was kept, not its records",
            str(folder),
            hint,
        )
    if not is_run(folder) and folder.is_dir() and (runs := result_kinds.runs_in(folder)):
        raise UserError(
            "ambiguous",
            "several runs, and one is exported",
            str(folder),
            f"name one of them, like {runs[-1]}",
        )
    stored = request_gaps.read(folder)
    assert row.write is not None
    write = FORMATS.guard(row, row.write, check_type(bytes, Mapping, Iterable))
    data = write(summarize(*stored), stored)
    parts = (
        [data]
        if isinstance(data, bytes)
        else json_parts(data)
        if isinstance(data, Mapping)
        else data
    )
    if out is None:
        sys.stdout.buffer.writelines(parts)
        return OK
    whole = True

    def told() -> Iterator[bytes]:
        nonlocal whole
        whole = False
        yield from parts
        whole = True

    try:
        write_file(out, told(), "--out")
    finally:
        if not whole and out.is_file():
            out.unlink()
    simulated = any(target.simulated for target in stored.manifest.targets)
    others = (
        [stage.name or "load" for stage in stored.manifest.stages if not stage.measured]
        if form == "csv"
        else []
    )
    unmeasured = (
        f"; its rows of stage {', '.join(others)} are in no figure of the report" if others else ""
    )
    mark = ""
    if simulated:
        place = "column `simulated`" if form == "csv" else "field `loadgen`"
        mark = f" (SIMULATED, no real server was measured: see its {place})"
    print(f"written: {out}{mark}{unmeasured}", file=sys.stderr)
    return OK


def json_parts(document: Mapping[str, Any], at_once: int = _TEXT_NUMBERS) -> Iterator[bytes]:
    """The document as `json.dumps(document, indent=2)` has it, a part after the other: of millions of numbers, which
    are arrays, neither all objects nor the whole text are in memory.
    """
    import numpy as np

    before = "{"
    for key, value in document.items():
        yield f"{before}\n  {json.dumps(key)}: ".encode()
        before = ","
        if isinstance(value, np.ndarray) and len(value):
            for first in range(0, len(value), at_once):
                numbers = json.dumps(value[first : first + at_once].tolist(), allow_nan=False)
                yield f"{',' if first else '['}\n    {numbers[1:-1].replace(', ', _NEXT)}".encode()
            yield b"\n  ]"
            continue
        own = value.tolist() if isinstance(value, np.ndarray) else value
        yield json.dumps(own, indent=2, allow_nan=False).replace("\n", "\n  ").encode()
    yield b"\n}\n" if document else b"{}\n"


def _write_schema(kind: str, beside: object, out: Path | None) -> int:
    from loadgen.cli import schema

    if beside is not None:
        raise UserError(
            "no_effect",
            "a schema is of no run",
            f"--schema {kind}",
            "leave the folder and --as out",
        )
    document = schema.schema(kind)
    if out is None:
        print_json(document)
    else:
        write_file(out, format.document(document), "--out")
    return OK
