"""Count the machine instructions that the SDK adds to calls and streams, for `sdk_overhead.py`.

valgrind counts the instructions of whole processes. So each piece of work runs in two child
processes, in the second one twice as often. The difference of the two counts is the work itself,
without the start of a process. Run as a script, this file is the program under valgrind.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from sdk_work import TimedPair, create_pairs

VALGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")


class InstructionCount(NamedTuple):
    """Machine instructions of one unit of work: without the SDK, and those that it adds."""

    name: str
    without_sdk: float
    added: float


class ChildRun(NamedTuple):
    """How often a child process did which piece of work.

    `work_index` is the position in the list of `list_work`.
    """

    pid: int
    work_index: int
    rounds: int


def count_instructions(rounds: int) -> list[InstructionCount]:
    """Return the machine instructions of one unit of each pair's work, counted by valgrind."""
    completed = run_under_valgrind(rounds)
    child_runs = parse_child_runs(completed.stdout)
    instructions_by_pid = parse_instructions(completed.stderr)
    all_counts = count_by_work(child_runs, instructions_by_pid)

    # The first and the last function do nothing. The last one measures the cost of a fork.
    _, *work_counts, fork_count = all_counts

    with asyncio.Runner() as runner:
        pairs = create_pairs(runner, [])

    results = []
    for pair_index, pair in enumerate(pairs):
        without_sdk = work_counts[2 * pair_index]
        with_sdk = work_counts[2 * pair_index + 1]
        units = rounds * pair.without_sdk.units
        results.append(
            InstructionCount(
                pair.name,
                without_sdk=(without_sdk - fork_count) / units,
                added=(with_sdk - without_sdk) / units,
            )
        )

    return results


def run_under_valgrind(rounds: int) -> subprocess.CompletedProcess[str]:
    """Run this file as a script under valgrind.

    The script prints a line for each child process on stdout, and valgrind the instructions of each
    process on stderr.
    """
    return subprocess.run(
        [*VALGRIND, sys.executable, __file__, str(rounds)],
        capture_output=True,
        text=True,
        check=True,
        # A fixed seed of hashes, so that dicts and sets do the same work in every run.
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )


def parse_child_runs(stdout: str) -> list[ChildRun]:
    """Return the child processes, each from a line "PID WORK_INDEX ROUNDS"."""
    return [ChildRun(*map(int, line.split())) for line in stdout.splitlines()]


def parse_instructions(stderr: str) -> dict[int, int]:
    """Return the instructions of each process by its PID.

    valgrind prints a line such as "==4711== I refs: 1,234,567" for each process.
    """
    matches = re.findall(r"==(\d+)==\s*I\s+refs:\s+([\d,]+)", stderr)
    return {int(pid): int(count.replace(",", "")) for pid, count in matches}


def count_by_work(child_runs: list[ChildRun], instructions_by_pid: dict[int, int]) -> list[int]:
    """Return the instructions of each piece of work, in the order of its index.

    Each piece of work has two child processes. The second one did it for twice as many rounds as
    the first one, so the difference of the two is the work of the first one alone.
    """
    counts: dict[int, list[int]] = {}
    for child_run in child_runs:
        counts.setdefault(child_run.work_index, []).append(instructions_by_pid[child_run.pid])

    return [second - first for _, (first, second) in sorted(counts.items())]


def run_work_in_children(rounds: int) -> None:
    """Run each piece of work in two child processes, and print which process ran what.

    A child is forked from this process, in which all caches are warm. The second child does the
    work twice as often, so that the difference of both is the work without the fork.
    """
    with asyncio.Runner() as runner:
        work = list_work(create_pairs(runner, []))
        for measure in work:
            measure()  # fills the caches

        gc.disable()  # a collection would be counted in whichever child it happens
        for work_index, measure in enumerate(work):
            for child_rounds in (rounds, 2 * rounds):
                pid = os.fork()
                if pid == 0:
                    run_in_child(measure, child_rounds)
                os.waitpid(pid, 0)
                print(pid, work_index, child_rounds, flush=True)


def list_work(pairs: list[TimedPair]) -> list[Callable[[], float]]:
    """Return the functions to count: both sides of each pair in turn, between two that do nothing.

    The count of a child begins with that of its parent. So the difference of two children includes
    what the parent did between their forks. The last function, which does nothing, measures how
    much that is. The parent does more after its very first fork, so the first function does
    nothing, too, and its count is not used.
    """
    work: list[Callable[[], float]] = [do_nothing]
    for pair in pairs:
        work.append(pair.without_sdk.measure_cpu_s)
        work.append(pair.with_sdk.measure_cpu_s)
    work.append(do_nothing)
    return work


def do_nothing() -> float:
    """Return 0 CPU-seconds, as work without instructions."""
    return 0.0


def run_in_child(measure: Callable[[], float], rounds: int) -> NoReturn:
    """Call a function `rounds` times and end this process, which was forked for it.

    The background thread of the SDK is not started, so that only the instructions of the calling
    thread are counted.
    """
    from loadgen_sdk.app.background import _State

    _State.is_started = True
    for _ in range(rounds):
        measure()
    os._exit(0)


if __name__ == "__main__":
    run_work_in_children(int(sys.argv[1]))
