"""The table of commands. The help shows its rows, and a command is imported when it is used."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from loadgen.plugins import OpenTable

if TYPE_CHECKING:
    import typer


class CommandRow(Struct, frozen=True):
    """One command.

    Attributes:
        name: Its name on the command line.
        group: The heading of the help under which the command is listed.
        help: A summary that fits one line.
        load: Imports and returns the function of the command, or a `typer.Typer` with several
            commands. Typer reads the options from the signature of the function, which returns an
            exit code.
    """

    name: str
    group: str
    help: str
    load: Callable[[], Callable[..., int] | typer.Typer]


def _load_doctor() -> Callable[..., int]:
    from loadgen.doctor.command import doctor

    return doctor


def _load_run() -> Callable[..., int]:
    from loadgen.runs.command import run

    return run


def _load_report() -> Callable[..., int]:
    from loadgen.cli.report import report

    return report


def _load_ui() -> Callable[..., int]:
    from loadgen.ui.command import ui

    return ui


def _load_sweep() -> Callable[..., int]:
    from loadgen.search.sweep_command import sweep

    return sweep


def _load_search() -> Callable[..., int]:
    from loadgen.search.search_command import search

    return search


def _load_compare() -> Callable[..., int]:
    from loadgen.compare.command import compare

    return compare


def _load_explain() -> Callable[..., int]:
    from loadgen.explain.command import explain

    return explain


def _load_validate() -> Callable[..., int]:
    from loadgen.contracts.command import validate

    return validate


def _load_answers() -> Callable[..., int]:
    from loadgen.answers.command import answers

    return answers


def _load_mlperf() -> typer.Typer:
    from loadgen.mlperf.command import app

    return app


def _load_bundle() -> Callable[..., int]:
    from loadgen.bundle.bundle_command import bundle

    return bundle


def _load_verify() -> Callable[..., int]:
    from loadgen.bundle.verify_command import verify

    return verify


def _load_export() -> Callable[..., int]:
    from loadgen.runs.export import export

    return export


def _load_size() -> Callable[..., int]:
    from loadgen.cost.size_command import size

    return size


def _load_cost() -> Callable[..., int]:
    from loadgen.cost.command import cost

    return cost


def _load_merge() -> Callable[..., int]:
    from loadgen.shards.command import merge

    return merge


def _load_fit() -> Callable[..., int]:
    from loadgen.interop.fit_command import fit

    return fit


def _load_sim() -> Callable[..., int]:
    from loadgen.sim.command import sim

    return sim


def _load_rows() -> tuple[CommandRow, ...]:
    """Return the commands in the order in which people meet them, group by group."""
    return (
        CommandRow(
            "doctor",
            "start",
            "Check a server, or the host that sends the load.",
            _load_doctor,
        ),
        CommandRow(
            "run", "start", "Send a workload and report latency, throughput and goodput.", _load_run
        ),
        CommandRow(
            "report",
            "start",
            "Print a stored result and write its HTML page.",
            _load_report,
        ),
        CommandRow("ui", "start", "Browse and compare results in a browser.", _load_ui),
        CommandRow(
            "sweep",
            "measure",
            "Measure several loads: the throughput-latency curve.",
            _load_sweep,
        ),
        CommandRow("search", "measure", "Find the maximum load that meets the SLO.", _load_search),
        CommandRow(
            "compare",
            "measure",
            "Compare results with a baseline.",
            _load_compare,
        ),
        CommandRow(
            "explain",
            "measure",
            "Explain why the result of another tool differs.",
            _load_explain,
        ),
        CommandRow(
            "validate",
            "measure",
            "Test a contract: PASS, FAIL or INCONCLUSIVE.",
            _load_validate,
        ),
        CommandRow(
            "answers",
            "measure",
            "Check completions against references or another server.",
            _load_answers,
        ),
        CommandRow(
            "mlperf",
            "measure",
            "Run unofficial MLPerf-style tests: VALID or INVALID.",
            _load_mlperf,
        ),
        CommandRow(
            "bundle", "evidence", "Pack a result and its raw data into one file.", _load_bundle
        ),
        CommandRow(
            "verify",
            "evidence",
            "Recompute every number of a bundle from its raw data.",
            _load_verify,
        ),
        CommandRow(
            "export", "evidence", "Convert a run to the format of another tool.", _load_export
        ),
        CommandRow(
            "size", "cost", "Compute how many machines serve N users, and their cost.", _load_size
        ),
        CommandRow(
            "cost", "cost", "Compute the cost per request from runs and prices.", _load_cost
        ),
        CommandRow(
            "merge", "tools", "Merge the results of `run --shard` into one run.", _load_merge
        ),
        CommandRow("fit", "tools", "Create a workload file from a trace.", _load_fit),
        CommandRow("sim", "tools", "Serve a simulated model over HTTP until Ctrl-C.", _load_sim),
    )


COMMANDS: OpenTable[CommandRow] = OpenTable("loadgen.commands", CommandRow, _load_rows)


def load_command(row: CommandRow) -> Callable[..., int] | typer.Typer:
    """Import the function or `typer.Typer` of a command. A plug-in that fails raises UserError."""
    command = COMMANDS.guard(row, row.load)()
    return COMMANDS.guard(row, command) if isfunction(command) else command


def call(name: str, *args: Any, **options: Any) -> int:
    """Call the function of a built-in command, as another command does to continue with it."""
    row = next(row for row in COMMANDS.builtin_rows if row.name == name)
    command: Any = row.load()
    exit_code: int = command(*args, **options)
    return exit_code
