"""`loadgen export DIR --as FORMAT`: write a stored run as a result file of another tool, or its records as CSV."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from loadgen.core.errors import OK, UserError
from loadgen.shell.output import write_file


def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    form: Annotated[
        str,
        typer.Option(
            "--as",
            help="vllm, aiperf, guidellm, mlcommons (result_summary.json), csv; mlflow or wandb: into that tracker.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write; of a tracker the folder of its store.",
            show_default="stdout, or what its environment says",
        ),
    ] = None,
) -> int:
    """Write a run in another tool's format, under that tool's definitions; csv: one line per request. mlflow and wandb
    get every figure, the facts of the run and its files.

    Exit: 0, 2 not a run.

    Example: loadgen export results/qa-20261122-101500-1a2b --as vllm -o vllm.json
    """
    from loadgen.core.metrics.summary import summarize
    from loadgen.core.results import store
    from loadgen.core.results.parquet import to_table
    from loadgen.core.run_folder import is_run, open_run
    from loadgen.interop import export as exports
    from loadgen.interop import trackers

    if form not in (*exports.FORMATS, *trackers.TRACKERS):
        known = ", ".join((*exports.FORMATS, *trackers.TRACKERS))
        raise UserError("unknown_name", f'unknown format "{form}"', f"--as {form}", f"known: {known}")
    if form in trackers.TRACKERS:
        where = trackers.TRACKERS[form](folder, open_run(folder).summary, out)
        print(f"written to {form}: {where}", file=sys.stderr)
        return OK
    if is_run(folder) and not store.has_rows(folder):
        hint = "export a run with records"
        raise UserError("no_records", "only the summary of this run was kept, not its records", str(folder), hint)
    stored = store.read_run(folder)
    if form == "csv":
        data = _csv(to_table(stored.rows, stored.texts))
    else:
        document = exports.WRITERS[form](summarize(*stored), stored.header, stored.rows, stored.gaps)
        data = (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()
    if out is None:
        sys.stdout.buffer.write(data)
    else:
        write_file(out, data, "--out")
        simulated = any(target.simulated for target in stored.header.targets)
        print(f"written: {out}{' (of a SIMULATED server: its format cannot say so)' * simulated}", file=sys.stderr)
    return OK


def _csv(table: Any) -> bytes:
    """CSV bytes with the columns of the Parquet files; null is an empty field."""
    import io

    import pyarrow as pa
    from pyarrow import csv

    columns = [column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column for column in table.columns]
    buffer = io.BytesIO()
    csv.write_csv(pa.table(columns, names=table.column_names), buffer)
    return buffer.getvalue()
