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


class Cost(NamedTuple):
    """What one simulated run cost, and its summary without keys that differ between runs."""

    requests: int
    cpu_s: float
    peak_mb: float
    summary: Any  # without what differs between two runs of one seed


def without_varying_keys(value: object) -> object:
    """Return a summary without keys of the wall clock, the machine and resource use."""
    if isinstance(value, dict):
        return {
            key: without_varying_keys(item)
            for key, item in value.items()
            if key not in VARYING_KEYS
        }
    return [without_varying_keys(item) for item in value] if isinstance(value, list) else value


class SimulatedLoad(NamedTuple):
    """A run in virtual time: options of `loadgen run`, and its length as a part of `--seconds`."""

    name: str
    arguments: list[str]
    duration_fraction: float


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


def measure_run(checkout: Path | None, arguments: list[str], seconds: float) -> Cost:
    """Run one simulated load in a process of its own and return what it cost.

    `checkout` is the root of another tree whose code runs; with None it is the installed package.
    """
    environment = dict(os.environ)
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(checkout), str(checkout / "sdk")])

    length = ["--duration", f"{seconds:g}s", "--seed", "1", "--out", "results"]
    command = [sys.executable, "-m", "loadgen", "run", *arguments, *length]
    with tempfile.TemporaryDirectory(prefix="loadgen-virtual-") as scratch:
        usage = run_and_wait(command, Path(scratch), environment)
        summary = json.loads((Path(scratch) / "results" / "summary.json").read_bytes())

    return Cost(
        requests=summary["requests"]["scheduled"],
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_mb=usage.ru_maxrss * 1024 / 1e6,  # the kernel counts in KiB
        summary=without_varying_keys(summary),
    )


def run_and_wait(
    command: list[str], folder: Path, environment: dict[str, str]
) -> resource.struct_rusage:
    """Run a command in a folder and return the resources that it used.

    Raises SystemExit if the exit code says that there is no result.
    """
    with open(folder / "output.txt", "w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)

        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 1, 3):
            output.seek(0)
            raise SystemExit(f"exit code {process.returncode}:\n{output.read()[-2000:]}")
    return usage


def main() -> None:
    """Print the cost of each simulated run, and whether the summaries of two trees are equal."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=600, help="of load on the rack; half of it on the machine"
    )
    parser.add_argument("--beside", type=Path, help="a checkout of another tree")
    args = rig.parse_arguments(parser, rounds=1, seconds=2)

    checkouts: list[Path | None] = [None]
    if args.beside is not None:
        checkouts = [args.beside.resolve(), None]

    measured_loads = [
        MeasuredLoad(load.name, {checkout: [] for checkout in checkouts}) for load in LOADS
    ]
    for _ in range(args.rounds):
        for load, measured in zip(LOADS, measured_loads, strict=True):
            seconds = args.seconds * load.duration_fraction
            for checkout in checkouts:
                cost = measure_run(checkout, load.arguments, seconds)
                measured.costs_by_checkout[checkout].append(cost)

    rows = [row for measured in measured_loads for row in measured.format_rows()]
    print(rig.format_table(["simulated run", "tree", "requests", "CPU-s", "peak MB"], rows))

    if args.beside is not None:
        for measured in measured_loads:
            equal = "equal" if measured.has_equal_summaries() else "NOT equal"
            print(f"\n- {measured.name}: the summaries are {equal}")


class MeasuredLoad(NamedTuple):
    """A load and what its runs cost, by the checkout that ran it (None: the installed package)."""

    name: str
    costs_by_checkout: dict[Path | None, list[Cost]]

    def has_equal_summaries(self) -> bool:
        """Return whether all runs of all checkouts have the same summary."""
        all_costs = [cost for costs in self.costs_by_checkout.values() for cost in costs]
        return all(cost.summary == all_costs[0].summary for cost in all_costs)

    def format_rows(self) -> list[list[str]]:
        """Return a row of the table for each checkout."""
        rows = []
        for checkout, costs in self.costs_by_checkout.items():
            cpu_s = sorted(cost.cpu_s for cost in costs)
            tree = rig.describe_commit() if checkout is None else rig.describe_commit(checkout)
            rows.append(
                [
                    self.name,
                    tree,
                    f"{costs[0].requests:,}",
                    f"{statistics.median(cpu_s):.1f} ({cpu_s[0]:.1f} to {cpu_s[-1]:.1f})",
                    f"{max(cost.peak_mb for cost in costs):,.0f}",
                ]
            )

        return rows


if __name__ == "__main__":
    main()
