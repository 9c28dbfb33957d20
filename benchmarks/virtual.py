"""What a run in virtual time costs: CPU-seconds and peak memory of a rack and of agents on one machine.

    python benchmarks/virtual.py [--rounds 2] [--seconds 600] [--beside ANOTHER/CHECKOUT]

SIMULATED runs, the command as a user types it, each in a process of its own: from its start to its end, with imports,
summary and Parquet. CPU is user and system time of the process, memory its largest resident size, both as the kernel
counts them. With `--beside` the same runs of another checkout take turns with those of the loadgen that is
installed, and their summaries are held against each other.
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
SHARES = (1.0, 0.5)  # of --seconds, in the order of RUNS
MOVING = {
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
    requests: int
    cpu_s: float
    peak_mb: float
    summary: Any  # without what differs between two runs of one seed


def steady(value: Any) -> Any:
    """A summary without wall clock, machine and the process's own use."""
    if isinstance(value, dict):
        return {key: steady(one) for key, one in value.items() if key not in MOVING}
    return [steady(one) for one in value] if isinstance(value, list) else value


def once(checkout: Path | None, words: list[str], seconds: float) -> Cost:
    """One run by the code of a checkout, or by what is installed."""
    with tempfile.TemporaryDirectory(prefix="loadgen-virtual-") as scratch:
        path = (
            {}
            if checkout is None
            else {"PYTHONPATH": os.pathsep.join([str(checkout), str(checkout / "sdk")])}
        )
        command = [
            sys.executable,
            "-m",
            "loadgen",
            "run",
            *words,
            "--duration",
            f"{seconds:g}s",
            "--seed",
            "1",
        ]
        with open(Path(scratch) / "output.txt", "w+") as output:
            child = subprocess.Popen(
                [*command, "--out", "results"],
                cwd=scratch,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **path},
            )
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            if child.returncode not in (0, 1, 3):
                output.seek(0)
                raise SystemExit(f"exit code {child.returncode}:\n{output.read()[-2000:]}")
        summary = json.loads((Path(scratch) / "results" / "summary.json").read_bytes())
    cpu_s, peak_mb = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6
    return Cost(summary["requests"]["scheduled"], cpu_s, peak_mb, steady(summary))


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=600, help="of load on the rack; half of it on the machine"
    )
    parser.add_argument("--beside", type=Path, help="a checkout of another tree")
    flags = rig.given(parser, rounds=1, seconds=2)
    checkouts: list[Path | None] = (
        [None] if flags.beside is None else [flags.beside.resolve(), None]
    )
    found: dict[tuple[str, Path | None], list[Cost]] = {
        (name, each): [] for name in RUNS for each in checkouts
    }
    for _ in range(flags.rounds):
        for (name, words), share in zip(RUNS.items(), SHARES, strict=True):
            for each in checkouts:
                found[name, each].append(once(each, words, flags.seconds * share))
    rows = []
    for (name, each), costs in found.items():
        cpu = sorted(cost.cpu_s for cost in costs)
        rows.append(
            [
                name,
                rig.tree() if each is None else rig.tree(each),
                f"{costs[0].requests:,}",
                f"{statistics.median(cpu):.1f} ({cpu[0]:.1f} to {cpu[-1]:.1f})",
                f"{max(cost.peak_mb for cost in costs):,.0f}",
            ]
        )
    print(rig.table(["simulated run", "tree", "requests", "CPU-s", "peak MB"], rows))
    for name in RUNS if len(checkouts) > 1 else ():
        same = all(
            cost.summary == found[name, None][0].summary
            for each in checkouts
            for cost in found[name, each]
        )
        print(f"\n- {name}: the summaries are {'equal' if same else 'NOT equal'}")


if __name__ == "__main__":
    main()
