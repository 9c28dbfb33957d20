"""What does a run in virtual time cost, in CPU-seconds and peak memory?

    python benchmarks/virtual.py [--rounds 2] [--seconds 600] [--beside ANOTHER/CHECKOUT]

SIMULATED runs of a rack and of agents on one machine. Each is the command as a user types it, in
its own process, from its start to its end. CPU is user and system time, memory is the largest
resident size, both as the kernel counts them. With `--beside`, runs of another checkout alternate
with those of the installed loadgen, and their summaries are compared.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import rig

# Keys of a summary whose values differ between two runs with the same seed
VARYING_KEYS = {
    "started",
    "ended",
    "host",
    "version",
    "command",
    "cpu_s",
    "peak_rss_bytes",
    "cpu_share_max",
}


class SimulatedLoad(NamedTuple):
    """A run in virtual time: options of `loadgen run`, and its length as a part of `--seconds`."""

    name: str
    arguments: list[str]
    length_fraction: float


LOADS = (
    SimulatedLoad(
        "gb300-rack, 3,500 questions/s",
        ["qa", "--url", "sim:gb300-rack", "--request-rate", "3500"],
        1.0,
    ),
    SimulatedLoad(
        "gb300-vm, 12.6 agents/s",
        ["agentic", "--url", "sim:gb300-vm", "--request-rate", "12.6", "--warmup", "0"],
        0.5,
    ),
)


class RunCost(NamedTuple):
    """What one simulated run cost, and its summary without VARYING_KEYS."""

    requests: int
    cpu_s: float
    peak_mb: float
    comparable_summary: Any


def measure_run(checkout: Path | None, arguments: list[str], length_s: float) -> RunCost:
    """Run one simulated load in a process of its own and return what it cost.

    `checkout` is the root of another checkout whose code runs; with None it is the installed
    package.
    """
    command = [sys.executable, "-m", "loadgen", "run", *arguments]
    command += ["--duration", f"{length_s:g}s", "--seed", "1", "--out", "results"]

    with tempfile.TemporaryDirectory(prefix="loadgen-virtual-") as scratch:
        usage = run_and_wait(command, Path(scratch), create_environment(checkout))
        summary = json.loads((Path(scratch) / "results" / "summary.json").read_bytes())

    return RunCost(
        requests=summary["requests"]["scheduled"],
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_mb=usage.ru_maxrss * 1024 / 1e6,  # the kernel counts in KiB
        comparable_summary=without_varying_keys(summary),
    )


def create_environment(checkout: Path | None) -> dict[str, str]:
    """Return the environment variables with which Python imports loadgen from a checkout.

    With None, it imports the installed package.
    """
    environment = dict(os.environ)
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(checkout), str(checkout / "sdk")])
    return environment


SUCCESS_EXIT_CODES = (0, 1, 3)  # of `loadgen run`: there is a result, even if it is not good


def run_and_wait(
    command: list[str], work_dir: Path, environment: dict[str, str]
) -> resource.struct_rusage:
    """Run a command in a directory and return the resources that it used.

    Raises SystemExit with the end of its output if the command fails.
    """
    with open(work_dir / "output.txt", "w+") as output:
        process = subprocess.Popen(
            command, cwd=work_dir, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        # wait4 and not process.wait(), because it also returns the resources of the process.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)

        if process.returncode not in SUCCESS_EXIT_CODES:
            output.seek(0)
            raise SystemExit(f"exit code {process.returncode}:\n{output.read()[-2000:]}")
    return usage


def without_varying_keys(value: object) -> object:
    """Return a JSON value without the keys in VARYING_KEYS, at any depth."""
    if isinstance(value, dict):
        return {
            key: without_varying_keys(item)
            for key, item in value.items()
            if key not in VARYING_KEYS
        }
    if isinstance(value, list):
        return [without_varying_keys(item) for item in value]
    return value


class MeasuredLoad(NamedTuple):
    """A load and what its runs cost, by the checkout that ran it (None: the installed package)."""

    name: str
    costs_by_checkout: dict[Path | None, list[RunCost]]

    def has_equal_summaries(self) -> bool:
        """Return whether all runs of all checkouts have the same summary."""
        all_costs = [cost for costs in self.costs_by_checkout.values() for cost in costs]
        first_summary = all_costs[0].comparable_summary
        return all(cost.comparable_summary == first_summary for cost in all_costs)

    def format_rows(self) -> list[list[str]]:
        """Return a row of the table for each checkout."""
        return [
            self._format_row(checkout, costs) for checkout, costs in self.costs_by_checkout.items()
        ]

    def _format_row(self, checkout: Path | None, costs: list[RunCost]) -> list[str]:
        """Return the row of a checkout: the median CPU-seconds with their range, and the memory."""
        commit = rig.describe_commit() if checkout is None else rig.describe_commit(checkout)
        cpu_s = sorted(cost.cpu_s for cost in costs)
        peak_mb = max(cost.peak_mb for cost in costs)
        return [
            self.name,
            commit,
            f"{costs[0].requests:,}",
            f"{statistics.median(cpu_s):.1f} ({cpu_s[0]:.1f} to {cpu_s[-1]:.1f})",
            f"{peak_mb:,.0f}",
        ]


def measure_loads(
    checkouts: list[Path | None], rounds: int, full_length_s: float
) -> list[MeasuredLoad]:
    """Run each load with each checkout in every round, and return what the runs cost.

    Runs of the checkouts alternate, so that a slow minute of the machine affects all of them.
    """
    measured_loads = [
        MeasuredLoad(load.name, {checkout: [] for checkout in checkouts}) for load in LOADS
    ]
    for _ in range(rounds):
        for load, measured in zip(LOADS, measured_loads, strict=True):
            length_s = full_length_s * load.length_fraction
            for checkout in checkouts:
                cost = measure_run(checkout, load.arguments, length_s)
                measured.costs_by_checkout[checkout].append(cost)

    return measured_loads


def main() -> None:
    """Print the cost of each simulated run, and whether two checkouts give the same summaries."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=600, help="of load on the rack; half of it on the machine"
    )
    parser.add_argument("--beside", type=Path, help="another checkout")
    args = rig.parse_arguments(parser, rounds=1, seconds=2)

    checkouts: list[Path | None] = [None]
    if args.beside is not None:
        checkouts = [args.beside.resolve(), None]
    measured_loads = measure_loads(checkouts, args.rounds, args.seconds)

    rows = [row for measured in measured_loads for row in measured.format_rows()]
    columns = ["simulated run", "commit", "requests", "CPU-s", "peak MB"]
    print(rig.format_table(columns, rows))

    if args.beside is not None:
        for measured in measured_loads:
            verdict = "equal" if measured.has_equal_summaries() else "NOT equal"
            print(f"\n- {measured.name}: the summaries are {verdict}")


if __name__ == "__main__":
    main()
