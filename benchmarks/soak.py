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
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import rig

from loadgen.core import units

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessUsage(NamedTuple):
    """Resident memory and open descriptors of a process."""

    resident_bytes: int
    descriptors: int


class Sample(NamedTuple):
    """The processes of a run by their names, and the size of its folder, at one time."""

    elapsed_s: float
    processes: dict[str, ProcessUsage]
    folder_bytes: int


class SoakResult(NamedTuple):
    """A finished run: its samples, its summary.json, and what it printed."""

    samples: list[Sample]
    summary: dict[str, Any]
    stdout: str


def run_soak(args: argparse.Namespace, run_dir: Path) -> SoakResult:
    """Run the load against the embedded endpoint, and sample its processes until it ends."""
    with rig.serve_endpoint(ttft=args.ttft, itl=args.itl) as server:
        command = run_command(args, server.url, run_dir)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            try:
                samples = sample_until_end(process, run_dir, args.every)
            finally:
                process.terminate()  # does nothing if the run has ended
            assert process.stdout is not None
            stdout = process.stdout.read()

    summary = json.loads((run_dir / "summary.json").read_bytes())
    return SoakResult(samples, summary, stdout)


def run_command(args: argparse.Namespace, url: str, run_dir: Path) -> list[str]:
    """Return the command of the run: a closed loop of requests of 100 and 100 tokens."""
    requests = ["--isl", "100", "--osl", "100", "--warmup", "0", "--seed", "1"]
    load = ["-c", str(args.streams), "-d", args.duration, "--progress", "plain"]
    target = ["--url", url, "--out", str(run_dir)]
    return [sys.executable, "-P", "-m", "loadgen", "run", *requests, *load, *target]


def sample_until_end(
    process: subprocess.Popen[str], run_dir: Path, interval_s: float
) -> list[Sample]:
    """Return a sample at the start of a run, and one after each interval until it ends."""
    samples = [Sample(0.0, measure_processes(process.pid), folder_bytes=0)]
    start_s = monotonic()
    while process.poll() is None:
        sleep(interval_s)
        elapsed_s = monotonic() - start_s
        sample = Sample(elapsed_s, measure_processes(process.pid), measure_folder_bytes(run_dir))
        samples.append(sample)
    return samples


def measure_processes(root_pid: int) -> dict[str, ProcessUsage]:
    """Return the usage of a process and of its descendants, by a name such as "worker-4711"."""
    usage_by_name = {}
    for pid in list_descendants(root_pid):
        with contextlib.suppress(OSError):  # the process may end meanwhile
            name = f"{read_process_name(pid)}-{pid}"
            usage_by_name[name] = read_process_usage(pid)
    return usage_by_name


def list_descendants(pid: int) -> list[int]:
    """Return the PIDs of a process and of all its descendants, or [] if it has ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []

    pids = [pid]
    for child in children:
        pids += list_descendants(int(child))
    return pids


def read_process_name(pid: int) -> str:
    """Return the last part of the loadgen module that a process runs, or else of its program."""
    arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    modules = [argument for argument in arguments if argument.startswith("loadgen")]
    name = modules[0] if modules else arguments[0]
    return name.rpartition(".")[2]


def read_process_usage(pid: int) -> ProcessUsage:
    """Return the resident memory and the open descriptors of a process, from /proc."""
    page_counts = Path(f"/proc/{pid}/statm").read_text().split()
    resident_pages = int(page_counts[1])  # after the total size; see proc(5)
    return ProcessUsage(
        resident_bytes=resident_pages * PAGE_BYTES,
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
    )


def measure_folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder."""
    total_bytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the run may remove a file meanwhile
            total_bytes += path.stat().st_size
    return total_bytes


def select_samples_in_load(samples: Sequence[Sample], duration: str) -> list[Sample]:
    """Return the samples during the load, which lasts for a `duration` such as "60m".

    After the load the summary is computed, which takes memory, and at the start the processes are
    not complete. If a short load has no sample because the host is busy, the first one is returned.
    """
    load_s = units.duration_ns(duration, default_unit="s") / 1e9
    in_load = [sample for sample in samples[1:] if sample.elapsed_s <= load_s]
    return in_load or [samples[0]]


class ProcessGrowth(NamedTuple):
    """The usage of a process in the first and in the last sample that it is in."""

    name: str
    first: ProcessUsage
    last: ProcessUsage

    @property
    def description(self) -> str:
        """Return the growth in a line of fixed columns."""
        memory = (
            f"{to_mib(self.first.resident_bytes):8.1f} to {to_mib(self.last.resident_bytes):8.1f}"
        )
        descriptors = f"{self.first.descriptors:5} to {self.last.descriptors:5}"
        return f"{self.name:32} {memory} MiB, {descriptors} descriptors"

    def find_problems(self) -> list[str]:
        """Return what grew more than is allowed, as short phrases."""
        problems = []
        max_bytes = MAX_MEMORY_RATIO * self.first.resident_bytes + MAX_MEMORY_GROWTH_BYTES
        if self.last.resident_bytes > max_bytes:
            problems.append(f"memory of {self.name} grows")

        if self.last.descriptors > self.first.descriptors + MAX_DESCRIPTOR_GROWTH:
            problems.append(f"descriptors of {self.name} grow")

        return problems


# A process may grow by 5 % and by 4 MiB more, because an allocator returns little memory.
MAX_MEMORY_RATIO = 1.05
MAX_MEMORY_GROWTH_BYTES = 4 << 20
MAX_DESCRIPTOR_GROWTH = 8
WARM_UP_DIVISOR = 4  # the first quarter of the samples is the warm-up


def judge_soak(samples: Sequence[Sample], summary: dict[str, Any], stdout: str) -> bool:
    """Print what grew after the warm-up and what the run printed; return True if nothing grew.

    Failed requests and a trend of the latencies count as growth. `summary` is the JSON of
    summary.json, and `stdout` is what the run printed.
    """
    growths = measure_growth(samples[len(samples) // WARM_UP_DIVISOR :])
    for growth in growths:
        print(growth.description)

    requests = summary["requests"]
    max_folder_bytes = max(sample.folder_bytes for sample in samples)
    print(f"{samples[-1].elapsed_s:.0f} s, {requests['ok']:,} of {requests['scheduled']:,} ok")
    print(f"Largest size of the run's folder: {to_mib(max_folder_bytes):.1f} MiB")
    print(stdout)

    problems = [problem for growth in growths for problem in growth.find_problems()]
    problems += find_summary_problems(summary)
    print(f"NOT FLAT: {', '.join(problems)}" if problems else "flat")
    return not problems


def measure_growth(samples: Sequence[Sample]) -> list[ProcessGrowth]:
    """Return the first and the last usage of each process of the first sample."""
    growths = []
    for name in samples[0].processes:
        usages = [sample.processes[name] for sample in samples if name in sample.processes]
        growths.append(ProcessGrowth(name, usages[0], usages[-1]))
    return growths


def find_summary_problems(summary: dict[str, Any]) -> list[str]:
    """Return whether requests failed, and the codes of the run's warnings about a trend.

    Requests that were unfinished or cancelled at the end of the load did not fail.
    """
    requests = summary["requests"]
    not_failed_count = requests["ok"] + requests["unfinished"] + requests["cancelled"]
    problems = []
    if not_failed_count != requests["scheduled"]:
        problems.append("requests failed")

    warnings = summary["verdict"].get("warning_codes", [])
    problems += [warning["code"] for warning in warnings if "drift" in warning["code"]]
    return problems


def to_mib(size_bytes: int) -> float:
    """Return a size in MiB."""
    return size_bytes / 2**20


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
        result = run_soak(args, args.out or Path(scratch) / "soak")

    samples = select_samples_in_load(result.samples, args.duration)
    is_flat = judge_soak(samples, result.summary, result.stdout)
    return 0 if is_flat or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
