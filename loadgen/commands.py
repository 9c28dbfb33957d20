"""The table of commands. The help is made of its rows; a command is imported when it is used."""

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
        name: What is typed.
        group: The heading of the help under which the command is listed.
        help: One line.
        load: Imports and returns the function of the command, which has a signature that typer understands and returns
            an exit code; or a `typer.Typer` with several commands.
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
            "What stands in the way: a target, or what this host carries.",
            _load_doctor,
        ),
        CommandRow(
            "run", "start", "Drive a workload: latencies, throughput, goodput, verdict.", _load_run
        ),
        CommandRow(
            "report",
            "start",
            "A stored result again, from its records, with its page.",
            _load_report,
        ),
        CommandRow("ui", "start", "Look at a folder of results in a browser.", _load_ui),
        CommandRow(
            "sweep",
            "judge",
            "Several loads: the throughput-latency curve and its knee.",
            _load_sweep,
        ),
        CommandRow(
            "search", "judge", "The highest load at which every SLO term holds.", _load_search
        ),
        CommandRow(
            "compare",
            "judge",
            "Results against the first, or against one kept by name.",
            _load_compare,
        ),
        CommandRow(
            "validate",
            "judge",
            "Does it keep a contract: PASS, FAIL or INCONCLUSIVE.",
            _load_validate,
        ),
        CommandRow(
            "answers",
            "judge",
            "Are answers still right: against references or a peer.",
            _load_answers,
        ),
        CommandRow(
            "mlperf", "judge", "MLPerf-style tests, unofficial: VALID or INVALID.", _load_mlperf
        ),
        CommandRow(
            "bundle", "evidence", "One file with a result and all that it rests on.", _load_bundle
        ),
        CommandRow(
            "verify",
            "evidence",
            "Make all figures of a bundle again, name what differs.",
            _load_verify,
        ),
        CommandRow("export", "evidence", "Write a run in another tool's format.", _load_export),
        CommandRow(
            "size", "money", "How many machines for so many users, and what they cost.", _load_size
        ),
        CommandRow(
            "cost", "money", "What a request cost: measured runs and your prices.", _load_cost
        ),
        CommandRow(
            "merge", "tools", "One run of the parts that run --shard has sent.", _load_merge
        ),
        CommandRow(
            "fit", "tools", "Make a workload of a trace: its arrivals and lengths.", _load_fit
        ),
        CommandRow("sim", "tools", "Serve a simulated model over HTTP until Ctrl-C.", _load_sim),
    )


COMMANDS: OpenTable[CommandRow] = OpenTable("loadgen.commands", CommandRow, _load_rows)


def load_command(row: CommandRow) -> Callable[..., int] | typer.Typer:
    """Import the function, or the `typer.Typer`, of a command. Errors of a plug-in are reported as such."""
    command = COMMANDS.guard(row, row.load)()
    return COMMANDS.guard(row, command) if isfunction(command) else command


def call(name: str, *args: Any, **options: Any) -> int:
    """Call the function of a built-in command, as another command does to continue with it."""
    row = next(row for row in COMMANDS.own if row.name == name)
    command: Any = row.load()
    exit_code: int = command(*args, **options)
    return exit_code
