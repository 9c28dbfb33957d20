"""`loadgen fit`: a trace in, a workload out. Parses flags, fits, prints; the arithmetic is in `laws.py`."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from loadgen.cli.option_parsers import parse_option
from loadgen.cli.output import print_json, write_file
from loadgen.core import units
from loadgen.core.errors import OK


def fit(  # noqa: PLR0913 - one parameter for each option of the command
    trace: Annotated[
        Path,
        typer.Argument(help="A trace in one of the formats of docs/reference/data-sets.md."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Where to write the workload. Default: stdout."
        ),
    ] = None,
    trace_slice: Annotated[
        str | None,
        typer.Option(
            "--trace-slice", metavar="FROM..TO", help="Only what came in this time: 10m..20m."
        ),
    ] = None,
    trace_unit: Annotated[
        units.TimeUnit | None,
        typer.Option(
            "--trace-unit",
            metavar="UNIT",
            help="Unit of the times of a trace whose format leaves it open: s, ms, us or ns.",
        ),
    ] = None,
    on_bad_row: Annotated[
        Literal["fail", "skip"],
        typer.Option(
            "--on-bad-row", metavar="WHAT", help="A row with something wrong in it: fail, or skip."
        ),
    ] = "fail",
    as_json: Annotated[
        bool, typer.Option("--json", rich_help_panel="Output", help="Print JSON.")
    ] = False,
) -> int:
    """Make a workload of a trace: arrivals and lengths as laws, and how good each fits.

    Laws are fitted to every other request and compared with the rest. Without one that fits, lengths are values of the
    trace itself; with rates that change, every hour is a stage.

    Exit: 0 done, 2 wrong flags or a trace that cannot be read.

    Example: loadgen fit traffic.jsonl -o traffic.yaml
    """
    from loadgen.core.workload.traces import read_trace
    from loadgen.interop import fit as fitting
    from loadgen.interop import fit_text as report

    part = parse_option("--trace-slice", trace_slice, partial(units.time_slice, bare="s"))
    replayed = read_trace(trace, part=part, skip_bad=on_bad_row == "skip", unit=trace_unit)
    fitted = fitting.fit(replayed)
    workload = fitting.as_yaml(fitted, trace.name.partition(".")[0] or "trace")
    words = report.words(fitted)
    text = "".join(f"# {line}\n" for line in ["Made by loadgen fit.", *words]) + workload
    if out is not None:
        write_file(out, text, "--out")
        words.append(f"wrote {out}: loadgen run {shlex.quote(str(out))}")
    if as_json:
        print_json(report.data(fitted, workload))
    elif out is not None:
        print("\n".join(words))
    else:
        print("\n".join(words), file=sys.stderr)
        print(text, end="")
    return OK
