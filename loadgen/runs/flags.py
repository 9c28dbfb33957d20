"""`loadgen run` as it is typed: its flags and its help."""

from __future__ import annotations

from typing import Annotated

import typer

from loadgen.runs import command
from loadgen.shell.invocation import Invocation
from loadgen.shell.options import (
    DryRunOption,
    GithubOption,
    JunitOption,
    StrictOption,
    WorkloadArgument,
    add_options,
)


@add_options()
def run(
    invocation: Invocation,
    workload: WorkloadArgument = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", rich_help_panel="Output", help="Print summary.json instead of the table."
        ),
    ] = False,
    strict: StrictOption = False,
    dry_run: DryRunOption = False,
    junit: JunitOption = None,
    github: GithubOption = False,
) -> int:
    """Drive a workload at an endpoint; print latencies, throughput, goodput and a verdict.

    Exit: 0 done and SLO met (or undecided: see --strict), 1 SLO missed, 2 wrong usage, 3 unreachable or not valid,
    70 bug, 130 interrupted.

    Example: loadgen run qa --url http://HOST:8000 -c 16 -d 2m --slo ttft:2s --slo tpot:50ms
    """
    return command.run(
        invocation,
        workload,
        as_json=as_json,
        strict=strict,
        dry_run=dry_run,
        junit=junit,
        github=github,
    )
