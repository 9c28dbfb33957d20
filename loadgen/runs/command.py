"""`loadgen run`: run one workload against one or several endpoints and print the results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from loadgen.core.errors import INTERRUPTED, Fault, Faults, UserError, collecting
from loadgen.runs.builds import kept_by_build
from loadgen.runs.repeats import finish
from loadgen.shell.invocation import Invocation
from loadgen.shell.output import print_answer, print_report, say, telling_what_is_kept
from loadgen.shell.resume import merge_arguments

if TYPE_CHECKING:
    from loadgen.core.execution.plan import Settings
    from loadgen.core.metrics.summary import Summary
    from loadgen.core.workload import Workload
    from loadgen.repeated.repeats import Repetition
    from loadgen.runs.show import Show


def run(
    invocation: Invocation,
    workload: str | None = None,
    *,
    as_json: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    junit: Path | None = None,
    github: bool = False,
) -> int:
    """Carry out a run, several levels of it or its repeats; returns the exit code. Raises Fault or Faults."""
    from loadgen.core.execution.folder_names import check_empty

    faults: list[Fault] = []
    how = None
    with collecting(faults):
        how = invocation.repetition()
    with collecting(faults):
        settings = invocation.settings(can_use_store=True)
        if settings.out is not None and not invocation["force"]:
            check_empty(settings.out)
    with collecting(faults):
        workloads = _levels(invocation, workload)
    with collecting(faults):
        kept = kept_by_build(junit, github=github, strict=strict)
    if faults:
        raise Faults(faults)
    from loadgen.core.execution.run import execute
    from loadgen.core.metrics.summary import dump_summary, exit_code
    from loadgen.runs import text
    from loadgen.runs.headline import is_host_busy
    from loadgen.runs.show import print_plans, shown

    if dry_run:
        if how is not None:
            say(f"runs: {how.words}")
        return print_plans(
            [(workload, settings) for workload in workloads.values()], invocation.budget()
        )
    kept.begin("loadgen run")
    show = shown(invocation)
    show.expect(
        [(workload, settings) for workload in workloads.values()]
        * (1 if how is None else how.at_least)
    )
    invocation.move_existing_results(settings.out)
    if how is not None or len(workloads) > 1:
        named, whole = _several(invocation, workloads, settings, how, show, as_json=as_json)
    else:
        summary, folder = execute(next(iter(workloads.values())), settings, show.hearers)
        named, whole = [(summary.run.workload, summary)], True
        if as_json:
            sys.stdout.buffer.write(dump_summary(summary))
        else:
            print_report(text.report(summary))
            say(f"results in {folder}")
            if is_host_busy(summary.verdict):
                say(next_step(invocation.arguments, settings))
    kept.write("loadgen run", named, whole=whole)
    codes = [exit_code(summary, strict=strict) for _, summary in named]
    return max(codes) if whole else max(*codes, INTERRUPTED)


def _levels(invocation: Invocation, workload: str | None) -> dict[str, Workload]:
    """The workloads to run one after the other: several where --concurrency is a list. Raises Faults."""
    from loadgen.core.workload import levels, placed

    steps = levels(invocation["concurrency"]) if invocation["concurrency"] else [None]
    workloads = {
        f"c{level}": invocation.load_workload(workload, concurrency=level) for level in steps
    }
    if len(steps) > 1:  # levels of one seed must not send each other's prompts
        workloads = {name: placed(level, name) for name, level in workloads.items()}
    if len(workloads) > 1 and invocation["repeat"] is not None:
        hint = "loadgen sweep ... --repeat runs several levels again and again; or give one level"
        raise UserError(
            "conflict",
            "several levels, each to be repeated",
            f"--repeat {invocation['repeat']}",
            hint,
        )
    return workloads


def next_step(typed: Sequence[str], settings: Settings) -> str:
    """What to do after a run on a host that was too busy: for a simulation the same load in virtual time."""
    from loadgen.core.execution import backend

    known = backend.known(settings)
    if known is None or not known.virtual_url:
        return "next: the same from a host of its own; loadgen doctor --url ... says what disturbs this one"
    target = ["run", "--url", known.virtual_url]
    again = merge_arguments(
        typed, target if settings.out is None else [*target, "-o", f"{settings.out}-virtual"]
    )
    return f"next: the same load in virtual time, which no other work disturbs:\n  loadgen {shlex.join(again)}"


def _several(
    invocation: Invocation,
    workloads: dict[str, Workload],
    settings: Settings,
    how: Repetition | None,
    show: Show,
    *,
    as_json: bool,
) -> tuple[list[tuple[str, Summary]], bool]:
    """Levels of concurrency, or repeats of one load, each in a folder of its own in one folder; a table of all.

    Returns the runs, and whether they are all that was asked for.
    """
    from loadgen.core.execution.folder_names import taken
    from loadgen.core.metrics.summary import dump_summary
    from loadgen.core.results import checksums
    from loadgen.runs import levels_text, repeats_sections
    from loadgen.runs.levels import curve
    from loadgen.runs.repetition import repeat, seeded

    first = next(iter(workloads.values()))
    named: list[tuple[str, Summary]] = []
    execute = invocation.executor(show.hearers)
    show.begin(
        len(workloads) if how is None else how.at_most,
        at_most=how is not None and how.count is None,
    )

    def one(name: str, workload: Workload) -> bool:
        store = settings.store and f"{settings.store}/{name}"
        show.step(name)
        summary, _ = execute(workload, replace(settings, out=parent / name, store=store))
        show.finished(summary)
        named.append((name, summary))
        return summary.run.state != "interrupted"

    now = datetime.now().astimezone()
    with (
        taken(settings.out, first.name, now) as parent,
        telling_what_is_kept(parent, f"loadgen report {parent} shows it"),
    ):
        if how is None:
            whole = all(one(name, workload) for name, workload in workloads.items())
            checksums.write(parent)
            if as_json:
                documents = [dump_summary(summary).strip() for _, summary in named]
                sys.stdout.buffer.write(b"[" + b",\n".join(documents) + b"]\n")
            else:  # the same table as `loadgen report` of the folder
                print_report(levels_text.report(curve(named)))
                say(f"results in {parent}")
        else:
            whole = repeat(
                how,
                lambda: how.enough([summary for _, summary in named]),
                lambda number: one(f"r{number}", seeded(first, number)),
                virtual=settings.virtual,
                say=say,
            )
            made = finish(parent, how, named)
            print_answer(made, repeats_sections.report(made, curve(named)), as_json=as_json)
            side = shlex.quote(str(parent))
            say(
                f"results in {parent}; a folder of repeats is one side of: loadgen compare {side} OTHER"
            )
    return named, whole
