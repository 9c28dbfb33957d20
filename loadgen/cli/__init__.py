"""The command line, one file per command: flags in, one call, an answer printed, an exit code.

No arithmetic here. A command imports what it needs when it runs, so that `loadgen --help` answers at once.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import typer

from loadgen.cli import streams
from loadgen.cli.answers import answers
from loadgen.cli.baseline import app as baseline
from loadgen.cli.bundle import bundle
from loadgen.cli.capacity import capacity
from loadgen.cli.compare import compare
from loadgen.cli.cost import cost
from loadgen.cli.doctor import doctor
from loadgen.cli.ending import ending
from loadgen.cli.export import export
from loadgen.cli.fit import fit
from loadgen.cli.help import Command, in_order
from loadgen.cli.mlperf import app as mlperf
from loadgen.cli.reference import reference
from loadgen.cli.report import report
from loadgen.cli.run import run
from loadgen.cli.schema import schema
from loadgen.cli.search import search
from loadgen.cli.selfcheck import selfcheck
from loadgen.cli.sim import sim
from loadgen.cli.size import size
from loadgen.cli.sweep import sweep
from loadgen.cli.ui import ui
from loadgen.cli.validate import validate
from loadgen.cli.verify import verify
from loadgen.cli.wrong_usage import fault_of
from loadgen.errors import OK, USAGE, UserError

COLLECT_AFTER = 200_000  # new objects, not 700: imports make many that stay; a tenth of the start went into them

COMMANDS: tuple[Any, ...] = (
    doctor, run, report, sweep, search, compare, baseline, validate, bundle, verify, mlperf, ui, size, cost, capacity,
    answers, export, fit, sim, reference, selfcheck, schema,
)  # fmt: skip
"""In the order in which people meet them."""

app = typer.Typer(
    name="loadgen",
    help="Measure what users of an LLM endpoint feel: TTFT, TPOT, ITL, E2E, throughput and goodput under load.",
    rich_markup_mode=None,
    cls=in_order(
        str(command.info.name) if isinstance(command, typer.Typer) else command.__name__ for command in COMMANDS
    ),
    pretty_exceptions_enable=False,
    no_args_is_help=True,
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


for command in COMMANDS:
    if isinstance(command, typer.Typer):
        app.add_typer(command)
    else:
        app.command(cls=Command)(command)

WrongUsage: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""What the parser raises: typer's own copy of click or, before it had one, the package's."""

_PAIR = re.compile(r"[a-z][a-z0-9_]*:\S+$")
_MANY = ("--goodput", "--slo")


def spread(arguments: Sequence[str]) -> list[str]:
    """`--goodput ttft:2000 tpot:200`, as the field writes it, is `--goodput ttft:2000 --goodput tpot:200`."""
    out: list[str] = []
    many = ""
    values = 0
    for argument in arguments:
        if argument in _MANY:
            many, values = argument, 0
        elif many and _PAIR.match(argument):
            if values:
                out.append(many)
            values += 1
        else:
            many = ""
        out.append(argument)
    return out


@cache
def parser() -> Any:
    """The parser of all commands. Making it takes as long as many a command, so a process makes it once."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: exits with one of the codes of `loadgen.errors`."""
    gc.set_threshold(COLLECT_AFTER)
    streams.prepare()

    def call() -> int:
        if sys.platform == "win32":
            hint = "use it in WSL2 or a container"
            raise UserError("wrong_platform", "loadgen takes Linux (or macOS, to read what is stored)", "", hint)
        try:
            typed = sys.argv[1:] if arguments is None else list(arguments)
            code = parser()(spread(typed), standalone_mode=False, obj=typed)
        except WrongUsage as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
                return USAGE
            raise fault_of(error) from None
        except typer.Abort:
            raise KeyboardInterrupt from None
        return code if isinstance(code, int) else OK

    code = ending(call)
    if arguments is None:  # the process ends here; its interpreter would look at all that is left several times
        gc.freeze()
    sys.exit(code)
