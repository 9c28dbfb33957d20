"""`loadgen run`: run one workload against one or several endpoints and print the results."""

from __future__ import annotations

from typing import Annotated

import typer

from loadgen.cli.options import Given, OneWorkload, takes


@takes()
def run(
    given: Given,
    workload: OneWorkload = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print summary.json instead of the table.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="A progress line instead of the live view; also where no terminal is.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 3 where the run cannot decide the SLO; without it that exits 0.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, send nothing.")] = False,
) -> int:
    """Drive a workload at an endpoint; print latencies, throughput, goodput and a verdict.

    Exit: 0 done and SLO met (or undecided: see --strict), 1 SLO missed, 2 wrong usage, 3 unreachable or not valid,
    70 bug, 130 interrupted.
    """
    from loadgen.errors import Fault, Faults, UserError, collecting
    from loadgen.workload import levels, placed
    from loadgen.workload.loading import given as load

    faults: list[Fault] = []
    with collecting(faults):
        how = given.repetition()
    with collecting(faults):
        settings = given.settings(to_store=True)
    with collecting(faults):
        steps = levels(given["concurrency"]) if given["concurrency"] else [None]
        workloads = [load(workload, given["trace"], given.overrides(concurrency=level)) for level in steps]
        if len(steps) > 1:  # levels of one seed must not send each other's prompts
            workloads = [placed(one, f"c{level}") for one, level in zip(workloads, steps, strict=True)]
        if len(workloads) > 1 and given["repeat"] is not None:
            hint = "loadgen sweep ... --repeat runs several levels again and again; or give one level"
            raise UserError("several levels, each to be repeated", f"--repeat {given['repeat']}", hint)
    if faults:
        raise Faults(faults)
    from loadgen.cli.show import Show, say

    show = Show(as_json=as_json, plain=plain, strict=strict)
    if dry_run:
        if how is not None:
            say(f"runs: {how.words}")
        return show.plans(workloads, settings)
    if how is not None:
        return show.repeats(workloads[0], settings, how)
    return show.levels(workloads, settings) if len(workloads) > 1 else show.one(workloads[0], settings)
