"""Applies every change of `tests/mutations/table.toml` and writes `benchmarks/mutations.md`.

`python tests/make_mutations.py --jobs 2` takes about half an hour on two cores.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from loadgen_sdk import compiled
from mutations.guard import Outcome, ProjectCopy, project_copy
from mutations.table import Mode, Mutation, modes_of, read_dropped, read_mutations

Case = tuple[Mutation, Mode]
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "benchmarks" / "mutations.md"
INTRODUCTION = """# Changes of rules, and the tests that notice them

This page is for whoever changes a rule of the schedule, of records, of metrics, of the verdict
or of retries, and wants to know whether tests protect it. `python tests/make_mutations.py` applied
each change below to a copy of the project and ran the tests that `tests/mutations/table.toml` names
for it. It did so in each mode: with the compiled modules and in pure Python and, where the rule
decides when requests start, in virtual time and over HTTP. The last column is the first test that
failed.

A change with a seed was drawn at random (`tests/mutations/draw.py`); the others were chosen.
`pytest -m mutations` runs all changes again, and CI runs a sample.
"""
HEADER = "| rule | change | seed | mode | test that failed |\n|---|---|---|---|---|"
DROPPED_HEADER = "| file | change | why no test notices it |\n|---|---|---|"


def main() -> None:
    """Run all changes in all modes and write the page."""
    parser = argparse.ArgumentParser(description="Apply every change and publish the outcomes.")
    parser.add_argument("--jobs", type=int, default=1, help="changes that are tested at a time")
    jobs = parser.parse_args().jobs
    outcomes = run_all(all_cases(read_mutations()), jobs)
    PAGE.write_text(render(outcomes), "utf-8")
    survivors = [outcome for outcome in outcomes if not outcome.failed_test]
    print(f"{len(outcomes)} runs, {len(survivors)} without a failing test")


def all_cases(mutations: list[Mutation]) -> list[Case]:
    """Return each change in each of its modes."""
    is_compiled = compiled.module is not None
    return [
        (mutation, mode)
        for mutation in mutations
        for mode in modes_of(mutation, is_compiled=is_compiled)
    ]


def run_all(cases: list[Case], jobs: int) -> list[Outcome]:
    """Run all changes, in so many copies of the project at a time, and print each outcome.

    Raises RuntimeError if a test fails without a change.
    """
    mutations_by_mode: dict[Mode, list[Mutation]] = {}
    for mutation, mode in cases:
        mutations_by_mode.setdefault(mode, []).append(mutation)
    idle_copies: SimpleQueue[ProjectCopy] = SimpleQueue()

    def check_unchanged(mode: Mode) -> None:
        project = idle_copies.get()
        project.check_unchanged(mutations_by_mode[mode], mode)
        idle_copies.put(project)

    def run(case: Case) -> Outcome:
        project = idle_copies.get()
        outcome = project.run(*case)
        idle_copies.put(project)
        name = outcome.failed_test or "SURVIVED"
        print(f"{outcome.mutation.name} | {outcome.mode} | {name}", flush=True)
        return outcome

    with ExitStack() as stack, ThreadPoolExecutor(jobs) as pool:
        for _ in range(jobs):
            idle_copies.put(stack.enter_context(project_copy()))
        list(pool.map(check_unchanged, mutations_by_mode))
        return list(pool.map(run, cases))


def render(outcomes: list[Outcome]) -> str:
    """Return the page: one table for each changed file."""
    lines = [INTRODUCTION]
    file = ""
    for outcome in sorted(outcomes, key=order_of_outcome):
        mutation = outcome.mutation
        if mutation.file != file:
            file = mutation.file
            lines += [f"\n## {file}\n", HEADER]
        cells = [
            mutation.rule,
            f"{mutation.name}: {code(mutation.old)} becomes {code(mutation.new)}",
            "" if mutation.seed is None else str(mutation.seed),
            str(outcome.mode),
            code(outcome.failed_test) if outcome.failed_test else "**survived**",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["\n## Drawn and left out\n", DROPPED_HEADER]
    for dropped in read_dropped():
        cells = [dropped.file, f"{code(dropped.old)} becomes {code(dropped.new)}", dropped.reason]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def order_of_outcome(outcome: Outcome) -> tuple[str, str, str]:
    """Return the key by which outcomes are listed."""
    return outcome.mutation.file, outcome.mutation.name, str(outcome.mode)


def code(text: str) -> str:
    """Return text as code in a cell of a Markdown table."""
    one_line = " ".join(text.split()).replace("|", "\\|")
    return f"`{one_line}`"


if __name__ == "__main__":
    main()
