"""The command line, one file per command: parse flags, make one call, print, return an exit code. No arithmetic.

Commands import their modules when they run, so that `loadgen --help` is fast.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Sequence
from typing import Any

import typer

from loadgen.cli.capacity import capacity
from loadgen.cli.compare import compare
from loadgen.cli.cost import cost
from loadgen.cli.doctor import doctor
from loadgen.cli.export import export
from loadgen.cli.mlperf import app as mlperf
from loadgen.cli.reference import reference
from loadgen.cli.report import report
from loadgen.cli.run import run
from loadgen.cli.schema import schema
from loadgen.cli.search import search
from loadgen.cli.selfcheck import selfcheck
from loadgen.cli.sim import sim
from loadgen.cli.sweep import sweep
from loadgen.cli.validate import validate
from loadgen.errors import OK, USAGE, ending

COLLECT_AFTER = 50_000  # new objects per collection (default 700): collections during imports took 10 % of startup

app = typer.Typer(
    name="loadgen",
    help="Measure what users of an LLM endpoint feel: TTFT, TPOT, ITL, E2E, throughput and goodput under load.",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"loadgen {version('loadgen')}")
        raise typer.Exit


@app.callback()
def _all(
    version: bool = typer.Option(
        False, "--version", help="Print the version and leave.", callback=_version, is_eager=True
    ),
) -> None:
    pass


app.command()(run)
app.command()(capacity)
app.command()(cost)
app.command()(reference)
app.command()(sweep)
app.command()(search)
app.add_typer(mlperf)
app.command()(report)
app.command()(compare)
app.command()(export)
app.command()(sim)
app.command()(selfcheck)
app.command()(schema)
app.command()(doctor)
app.command()(validate)

WrongUsage: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""The error class of the parser: from the copy of click inside typer, or in older versions from the package click."""

_NAME_AND_VALUE = re.compile(r"[a-z][a-z0-9_]*:\S+$")
_REPEATABLE = ("--goodput", "--slo")


def spread(arguments: Sequence[str]) -> list[str]:
    """Rewrite `--goodput ttft:2000 tpot:200`, as in other tools, to `--goodput ttft:2000 --goodput tpot:200`."""
    rewritten: list[str] = []
    repeatable_flag = ""
    values_seen = 0
    for argument in arguments:
        if argument in _REPEATABLE:
            repeatable_flag, values_seen = argument, 0
        elif repeatable_flag and _NAME_AND_VALUE.match(argument):
            if values_seen:
                rewritten.append(repeatable_flag)
            values_seen += 1
        else:
            repeatable_flag = ""
        rewritten.append(argument)
    return rewritten


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Exits with one of the codes in `loadgen.errors`."""
    gc.set_threshold(COLLECT_AFTER)

    def call() -> int:
        try:
            code = app(spread(sys.argv[1:] if arguments is None else arguments), standalone_mode=False)
        except WrongUsage as error:
            error.show()
            return USAGE
        except typer.Abort:
            raise KeyboardInterrupt from None
        return code if isinstance(code, int) else OK

    sys.exit(ending(call))
