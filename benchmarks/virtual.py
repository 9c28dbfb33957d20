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
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import rig

RUNS = {
    "gb300-rack, 3,500 questions/s": ["qa", "--url", "sim:gb300-rack", "--request-rate", "3500"],
    "gb300-vm, 12.6 agents/s": [
        "agentic",
        "--url",
        "sim:gb300-vm",
        "--request-rate",
        "12.6",
        "--warmup",
        "0",
    ],
}
DURATION_FRACTIONS = (1.0, 0.5)  # of --seconds, in the order of RUNS
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


def without_varying_keys(value: Any) -> Any:
    """Return a summary without keys of the wall clock, the machine and resource use."""
    if isinstance(value, dict):
        return {
            key: without_varying_keys(item)
            for key, item in value.items()
            if key not in VARYING_KEYS
        }
    return [without_varying_keys(item) for item in value] if isinstance(value, list) else value


def measure_run(checkout: Path | None, arguments: list[str], seconds: float) -> Cost:
    """Run one simulated load with the code of a checkout, or with the installed package."""
    with tempfile.TemporaryDirectory(prefix="loadgen-virtual-") as scratch:
        environment = (
            {}
            if checkout is None
            else {"PYTHONPATH": os.pathsep.join([str(checkout), str(checkout / "sdk")])}
        )
        command = [
            sys.executable,
            "-m",
            "loadgen",
            "run",
            *arguments,
            "--duration",
            f"{seconds:g}s",
            "--seed",
            "1",
        ]
        with open(Path(scratch) / "output.txt", "w+") as output:
            process = subprocess.Popen(
                [*command, "--out", "results"],
                cwd=scratch,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode not in (0, 1, 3):
                output.seek(0)
                raise SystemExit(f"exit code {process.returncode}:\n{output.read()[-2000:]}")
        summary = json.loads((Path(scratch) / "results" / "summary.json").read_bytes())
    cpu_s, peak_mb = usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6
    return Cost(summary["requests"]["scheduled"], cpu_s, peak_mb, without_varying_keys(summary))


def main() -> None:
    """Print the cost of each simulated run, and whether the summaries of two trees are equal."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=600, help="of load on the rack; half of it on the machine"
    )
    parser.add_argument("--beside", type=Path, help="a checkout of another tree")
    args = rig.parse_arguments(parser, rounds=1, seconds=2)
    checkouts: list[Path | None] = [None] if args.beside is None else [args.beside.resolve(), None]
    costs_by_run: dict[tuple[str, Path | None], list[Cost]] = {
        (name, checkout): [] for name in RUNS for checkout in checkouts
    }
    for _ in range(args.rounds):
        for (name, arguments), fraction in zip(RUNS.items(), DURATION_FRACTIONS, strict=True):
            for checkout in checkouts:
                costs_by_run[name, checkout].append(
                    measure_run(checkout, arguments, args.seconds * fraction)
                )
    rows = []
    for (name, checkout), costs in costs_by_run.items():
        cpu = sorted(cost.cpu_s for cost in costs)
        rows.append(
            [
                name,
                rig.describe_commit() if checkout is None else rig.describe_commit(checkout),
                f"{costs[0].requests:,}",
                f"{statistics.median(cpu):.1f} ({cpu[0]:.1f} to {cpu[-1]:.1f})",
                f"{max(cost.peak_mb for cost in costs):,.0f}",
            ]
        )
    print(rig.format_table(["simulated run", "tree", "requests", "CPU-s", "peak MB"], rows))
    for name in RUNS if len(checkouts) > 1 else ():
        is_equal = all(
            cost.summary == costs_by_run[name, None][0].summary
            for checkout in checkouts
            for cost in costs_by_run[name, checkout]
        )
        print(f"\n- {name}: the summaries are {'equal' if is_equal else 'NOT equal'}")


if __name__ == "__main__":
    main()
