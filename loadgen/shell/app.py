"""The command line: all commands, help, faults as exit codes.

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

from loadgen.answers.command import answers
from loadgen.compare.baseline import app as baseline
from loadgen.compare.command import compare
from loadgen.contracts.command import validate
from loadgen.core.errors import OK, USAGE, UserError
from loadgen.cost.capacity_command import capacity
from loadgen.cost.command import cost
from loadgen.cost.published_command import reference
from loadgen.cost.size_command import size
from loadgen.evidence.bundle_command import bundle
from loadgen.evidence.verify_command import verify
from loadgen.interop.fit_command import fit
from loadgen.mlperf.command import app as mlperf
from loadgen.preflight.command import doctor
from loadgen.preflight.selfcheck_command import selfcheck
from loadgen.runs.command import run
from loadgen.runs.export import export
from loadgen.search.command import search
from loadgen.search.sweep_command import sweep
from loadgen.shell import streams
from loadgen.shell.ending import ending
from loadgen.shell.help import Command, in_order
from loadgen.shell.report import report
from loadgen.shell.schema import schema
from loadgen.shell.wrong_usage import fault_of
from loadgen.sim.command import sim
from loadgen.viewer.command import ui

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
    """The entry point: exits with one of the codes of `loadgen.core.errors`."""
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
