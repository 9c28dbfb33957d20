"""Do memory, descriptors and files stay flat under a long load over HTTP, without a latency trend?

    python benchmarks/soak.py [--streams 1000] [--duration 60m]

A closed loop of this many streams runs against the embedded endpoint. Every 10 s the script reads
from /proc the resident memory and the open descriptors of each process of the run, and the size of
its folder. The first quarter is the warm-up. After it, memory may grow by 5 % and 4 MiB per process
and descriptors by 8, and the trend of the run itself must be compatible with zero. Exit code 1 if
one of these conditions fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import rig

from loadgen.core import units


def list_descendants(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        child_pids = [int(child_pid) for child_pid in children.read_text().split()]
    except OSError:
        return []
    return [
        pid,
        *(descendant for child_pid in child_pids for descendant in list_descendants(child_pid)),
    ]


def process_name(pid: int) -> str:
    """Return a short name of a process: the last part of its loadgen module, if it runs one."""
    arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return next(
        (argument for argument in arguments if argument.startswith("loadgen")), arguments[0]
    ).rpartition(".")[2]


def sample_processes(pid: int) -> dict[str, tuple[int, int]]:
    """Return resident bytes and open descriptors by process."""
    sizes = {}
    for descendant in list_descendants(pid):
        try:
            pages = int(Path(f"/proc/{descendant}/statm").read_text().split()[1])
            sizes[f"{process_name(descendant)}-{descendant}"] = (
                pages * os.sysconf("SC_PAGE_SIZE"),
                len(os.listdir(f"/proc/{descendant}/fd")),
            )
        except OSError:
            continue
    return sizes


def measure_folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder, in bytes."""
    total_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it went meanwhile
            total_bytes += path.stat().st_size
    return total_bytes


def main() -> int:
    """Run the soak and return 1 if memory, descriptors or latencies drifted."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--duration", default="60m")
    parser.add_argument("--ttft", default="200ms")
    parser.add_argument("--itl", default="50ms")
    parser.add_argument(
        "--every", type=float, default=10.0, help="seconds between two looks at /proc"
    )
    parser.add_argument("--out", type=Path)
    args = rig.parse_arguments(parser, streams=8, duration="3s", every=0.5, ttft="20ms", itl="2ms")
    with contextlib.ExitStack() as stack:
        out = args.out or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "soak"
        url = stack.enter_context(rig.serve_endpoint(ttft=args.ttft, itl=args.itl)).url
        flags = [
            "--isl",
            "100",
            "--osl",
            "100",
            "--warmup",
            "0",
            "--progress",
            "plain",
            "--seed",
            "1",
        ]
        load = ["-c", str(args.streams), "-d", args.duration, "--url", url, "--out", str(out)]
        command = [sys.executable, "-P", "-m", "loadgen", "run", *flags, *load]
        run = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        )
        stack.callback(run.terminate)
        samples = [(0.0, sample_processes(run.pid), 0)]
        started_s = monotonic()
        while run.poll() is None:
            sleep(args.every)
            samples.append(
                (monotonic() - started_s, sample_processes(run.pid), measure_folder_bytes(out))
            )
        assert run.stdout is not None
        text = run.stdout.read().decode()
        summary = json.loads((out / "summary.json").read_bytes())
    ends_s = (
        units.duration_ns(args.duration, default_unit="s") / 1e9
    )  # after it the summary is made, which takes memory
    samples_in_load = [taken for taken in samples[1:] if taken[0] <= ends_s] or samples[
        :1
    ]  # none: a short load on a busy host
    is_flat = judge_growth(samples_in_load, summary, text)
    return 0 if is_flat or args.smoke else 1


def judge_growth(
    samples: list[tuple[float, dict[str, tuple[int, int]], int]], summary: dict[str, Any], text: str
) -> bool:
    """Print what grew after the warm-up quarter; return True if nothing did."""
    problems = []
    later_samples = samples[len(samples) // 4 :]
    for process in later_samples[0][1]:
        series = [sizes[process] for _, sizes, _ in later_samples if process in sizes]
        (rss, files), (rss_end, files_end) = series[0], series[-1]
        print(
            f"{process:32} {rss / 2**20:8.1f} to {rss_end / 2**20:8.1f} MiB, {files:5} to "
            f"{files_end:5} descriptors"
        )
        if rss_end > 1.05 * rss + (4 << 20):
            problems.append(f"{process} grows")
        if files_end > files + 8:
            problems.append(f"{process} keeps descriptors")
    requests, size = summary["requests"], max(size for _, _, size in samples)
    print(
        f"{samples[-1][0]:.0f} s, {requests['ok']:,} of {requests['scheduled']:,} ok, at most "
        f"{size / 2**20:.1f} MiB"
    )
    print(text)
    if requests["ok"] + requests["unfinished"] + requests["cancelled"] != requests["scheduled"]:
        problems.append("requests failed")
    problems += [
        code["code"]
        for code in summary["verdict"].get("warning_codes", ())
        if "drift" in code["code"]
    ]
    print("flat" if not problems else f"NOT FLAT: {', '.join(problems)}")
    return not problems


if __name__ == "__main__":
    sys.exit(main())
