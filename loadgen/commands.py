"""The commands, one row each: the shell makes its help of the rows, and imports only what is asked for.

A leaf, like every table: a row names its command as text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from loadgen.plugins import OpenTable


class CommandRow(NamedTuple):
    """One command of the shell.

    group: under what the help lists it. help: one line. function: `module:function`, whose signature is read as typer
    reads it and which returns the exit code; of ours also a `typer.Typer` with several commands.
    """

    name: str
    group: str
    help: str
    function: str


COMMANDS: OpenTable[CommandRow] = OpenTable(
    "loadgen.commands",
    CommandRow,
    (
        CommandRow(
            "doctor",
            "start",
            "What stands in the way: a target, or what this host carries.",
            "loadgen.preflight.command:doctor",
        ),
        CommandRow(
            "run",
            "start",
            "Drive a workload: latencies, throughput, goodput, verdict.",
            "loadgen.runs.flags:run",
        ),
        CommandRow(
            "report",
            "start",
            "A stored result again, from its records, with its page.",
            "loadgen.shell.report:report",
        ),
        CommandRow(
            "ui", "start", "Look at a folder of results in a browser.", "loadgen.viewer.command:ui"
        ),
        CommandRow(
            "sweep",
            "judge",
            "Several loads: the throughput-latency curve and its knee.",
            "loadgen.search.sweep_command:sweep",
        ),
        CommandRow(
            "search",
            "judge",
            "The highest load at which every SLO term holds.",
            "loadgen.search.command:search",
        ),
        CommandRow(
            "compare",
            "judge",
            "Results against the first, or against one kept by name.",
            "loadgen.compare.command:compare",
        ),
        CommandRow(
            "validate",
            "judge",
            "Does it keep a contract: PASS, FAIL or INCONCLUSIVE.",
            "loadgen.contracts.command:validate",
        ),
        CommandRow(
            "answers",
            "judge",
            "Are answers still right: against references or a peer.",
            "loadgen.answers.command:answers",
        ),
        CommandRow(
            "mlperf",
            "judge",
            "MLPerf-style tests, unofficial: VALID or INVALID.",
            "loadgen.mlperf.command:app",
        ),
        CommandRow(
            "bundle",
            "evidence",
            "One file with a result and all that it rests on.",
            "loadgen.evidence.bundle_command:bundle",
        ),
        CommandRow(
            "verify",
            "evidence",
            "Make all figures of a bundle again, name what differs.",
            "loadgen.evidence.verify_command:verify",
        ),
        CommandRow(
            "export",
            "evidence",
            "Write a run in another tool's format.",
            "loadgen.runs.export:export",
        ),
        CommandRow(
            "size",
            "money",
            "How many machines for so many users, and what they cost.",
            "loadgen.cost.size_command:size",
        ),
        CommandRow(
            "cost",
            "money",
            "What a request cost: measured runs and your prices.",
            "loadgen.cost.command:cost",
        ),
        CommandRow(
            "fit",
            "tools",
            "Make a workload of a trace: its arrivals and lengths.",
            "loadgen.interop.fit_command:fit",
        ),
        CommandRow(
            "sim",
            "tools",
            "Serve a simulated model over HTTP until Ctrl-C.",
            "loadgen.sim.command:sim",
        ),
    ),
)
"""Of ours in the order in which people meet them, group by group."""


def call(name: str, *given: Any, **options: Any) -> Any:
    """Carry out one of our commands as another goes on with it: its function, with what would be typed."""
    row = next(row for row in COMMANDS.own if row.name == name)
    return COMMANDS.function(row, row.function)(*given, **options)
