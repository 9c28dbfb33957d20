"""Do memory, descriptors and files stay flat under a long load over HTTP, without a latency trend?

    python benchmarks/soak.py [--streams 1000] [--duration 60m]

A closed loop of this many streams runs against the embedded endpoint. Every 10 s the script reads
from /proc the resident memory and the open descriptors of each process of the run, and the size of
its folder. The first quarter is the warm-up. After it, memory may grow by 5 % and 4 MiB per process
and descriptors by 8, and the trend of the run itself must be compatible with zero. Exit code 1 if
one of these conditions fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import rig

from loadgen.core import units


def list_descendants(pid: int) -> list[int]:
    """Return a process and all its descendants; an empty list if it has ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []

    pids = [pid]
    for child in children:
        pids += list_descendants(int(child))

    return pids


def process_name(pid: int) -> str:
    """Return a short name of a process: the last part of its loadgen module, if it runs one."""
    arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    modules = [argument for argument in arguments if argument.startswith("loadgen")]
    name = modules[0] if modules else arguments[0]
    return name.rpartition(".")[2]


class ProcessSize(NamedTuple):
    """Resident bytes and open descriptors of a process."""

    resident_bytes: int
    descriptors: int


class Sample(NamedTuple):
    """A sample of a run: the seconds since its start, its processes by name, and its files."""

    elapsed_s: float
    processes: dict[str, ProcessSize]
    folder_bytes: int


def sample_processes(pid: int) -> dict[str, ProcessSize]:
    """Return resident bytes and open descriptors of a process and its descendants, by name."""
    sizes = {}
    for descendant in list_descendants(pid):
        try:
            pages = int(Path(f"/proc/{descendant}/statm").read_text().split()[1])
            sizes[f"{process_name(descendant)}-{descendant}"] = ProcessSize(
                resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
                descriptors=len(os.listdir(f"/proc/{descendant}/fd")),
            )
        except OSError:  # the process has just ended
            continue

    return sizes


def measure_folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder, in bytes."""
    total_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it went meanwhile
            total_bytes += path.stat().st_size
    return total_bytes


class SoakRun(NamedTuple):
    """A finished run: its samples, its summary, and what it printed."""

    samples: list[Sample]
    summary: dict[str, Any]
    text: str


def run_soak(args: argparse.Namespace, out: Path) -> SoakRun:
    """Run the load against the embedded endpoint, and sample its processes until it ends."""
    with rig.serve_endpoint(ttft=args.ttft, itl=args.itl) as server:
        requests = ["--isl", "100", "--osl", "100", "--warmup", "0", "--seed", "1"]
        load = ["-c", str(args.streams), "-d", args.duration, "--progress", "plain"]
        target = ["--url", server.url, "--out", str(out)]

        command = [sys.executable, "-P", "-m", "loadgen", "run", *requests, *load, *target]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            try:
                samples = sample_until_end(process, out, args.every)
            finally:
                process.terminate()
            assert process.stdout is not None
            text = process.stdout.read().decode()

    summary = json.loads((out / "summary.json").read_bytes())
    return SoakRun(samples, summary, text)


def sample_until_end(
    process: subprocess.Popen[bytes], out: Path, interval_s: float
) -> list[Sample]:
    """Return a sample at the start of a run, and one after each interval until it ends."""
    samples = [Sample(0.0, sample_processes(process.pid), 0)]
    started_s = monotonic()
    while process.poll() is None:
        sleep(interval_s)
        elapsed_s = monotonic() - started_s
        samples.append(Sample(elapsed_s, sample_processes(process.pid), measure_folder_bytes(out)))
    return samples


def main() -> int:
    """Run the soak and return 1 if memory, descriptors or latencies drifted."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--duration", default="60m")
    parser.add_argument("--ttft", default="200ms")
    parser.add_argument("--itl", default="50ms")
    parser.add_argument(
        "--every", type=float, default=10.0, help="seconds between two samples of /proc"
    )
    parser.add_argument("--out", type=Path)

    args = rig.parse_arguments(parser, streams=8, duration="3s", every=0.5, ttft="20ms", itl="2ms")
    with tempfile.TemporaryDirectory() as scratch:
        soak_run = run_soak(args, args.out or Path(scratch) / "soak")

    samples = select_samples_in_load(soak_run.samples, args.duration)
    is_flat = judge_growth(samples, soak_run.summary, soak_run.text)
    return 0 if is_flat or args.smoke else 1


def select_samples_in_load(samples: list[Sample], duration: str) -> list[Sample]:
    """Return the samples during the load, without the one at the start.

    After the load the summary is computed, which takes memory. If there is no sample during the
    load, as of a short one on a busy host, the one at the start is returned.
    """
    load_s = units.duration_ns(duration, default_unit="s") / 1e9
    in_load = [sample for sample in samples[1:] if sample.elapsed_s <= load_s]
    return in_load or samples[:1]


# What may grow after the warm-up
MAX_MEMORY_GROWTH, MAX_MEMORY_GROWTH_BYTES = 1.05, 4 << 20


MAX_MORE_DESCRIPTORS = 8


def judge_growth(samples: list[Sample], summary: dict[str, Any], text: str) -> bool:
    """Print what grew after the warm-up, the first quarter; return True if nothing did."""
    after_warm_up = samples[len(samples) // 4 :]
    problems = find_growth(after_warm_up)
    requests = summary["requests"]
    max_folder_mib = max(sample.folder_bytes for sample in samples) / 2**20
    print(
        f"{samples[-1].elapsed_s:.0f} s, {requests['ok']:,} of {requests['scheduled']:,} ok, at "
        f"most {max_folder_mib:.1f} MiB"
    )
    print(text)

    if requests["ok"] + requests["unfinished"] + requests["cancelled"] != requests["scheduled"]:
        problems.append("requests failed")

    problems += [
        warning["code"]
        for warning in summary["verdict"].get("warning_codes", ())
        if "drift" in warning["code"]
    ]
    print("flat" if not problems else f"NOT FLAT: {', '.join(problems)}")
    return not problems


def find_growth(samples: list[Sample]) -> list[str]:
    """Print the first and the last size of each process, and return what grew too much."""
    problems = []
    for process in samples[0].processes:
        sizes = [sample.processes[process] for sample in samples if process in sample.processes]
        first = sizes[0]
        last = sizes[-1]
        print(
            f"{process:32} {first.resident_bytes / 2**20:8.1f} to "
            f"{last.resident_bytes / 2**20:8.1f} MiB, {first.descriptors:5} to "
            f"{last.descriptors:5} descriptors"
        )

        max_bytes = MAX_MEMORY_GROWTH * first.resident_bytes + MAX_MEMORY_GROWTH_BYTES
        if last.resident_bytes > max_bytes:
            problems.append(f"{process} grows")

        if last.descriptors > first.descriptors + MAX_MORE_DESCRIPTORS:
            problems.append(f"{process} keeps descriptors")

    return problems


if __name__ == "__main__":
    sys.exit(main())
