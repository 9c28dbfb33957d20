"""What all benchmarks share: options, the endpoint, client processes, CPU time and tables.

The endpoint is the simulated server of loadgen, which runs on a core of its own. A contender is one
of the client programs that a benchmark compares: a function in a file of this folder that runs as
`python FILE NAME JSON` in its own process and prints one JSON object. Costs are measured in
CPU-seconds where possible, because the wall time of a shared machine is noisy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from loadgen.sim.server import embedded
from loadgen.sim.server.options import Options

BENCHMARKS_DIR = Path(__file__).parent
# Helper modules of the tests, which make request records and servers, are imported by scripts.
sys.path.append(str(BENCHMARKS_DIR.parent / "tests"))

# A process that uses more of its core than this is a bottleneck, which distorts what is measured.
SATURATED_CORE_FRACTION = 0.85
# If a client reads several events with one system call, its cost per event is lower than that of a
# client that reads each event alone, so the two cannot be compared.
MIN_READS_PER_EVENT = 0.9
SKIP_EXIT_CODE = 77  # exit code of a script that needs what this machine does not have
# Real-time scheduling for a process, but not for the processes that it starts
REALTIME_POLICY = os.SCHED_RR | os.SCHED_RESET_ON_FORK
T = TypeVar("T")


class RealtimePriority:
    """A switch for all of this process: do the client and the endpoint get real-time priority?

    Real-time priority keeps other processes of a shared machine from delaying what is measured. It
    changes latencies, but hardly CPU-seconds, so only benchmarks of latencies have the option
    `--alone` that sets the switch. The priority can only be set by root.
    """

    is_enabled = False


def create_parser(
    description: str | None, *, offers_realtime_priority: bool = False
) -> argparse.ArgumentParser:
    """Return the command-line parser of a script, with the option `--smoke`.

    Args:
        description: The text of `--help`; scripts pass their module docstring.
        offers_realtime_priority: Add the option `--alone`, which gives the client and the endpoint
            real-time priority.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="the smallest run, some seconds: shows that the script works, figures mean nothing",
    )

    if offers_realtime_priority:
        parser.add_argument(
            "--alone",
            action="store_true",
            help="real-time priority: other processes do not disturb latencies (needs root)",
        )

    return parser


def parse_arguments(parser: argparse.ArgumentParser, **smoke_defaults: Any) -> argparse.Namespace:
    """Parse the command line, print the conditions of the run, and return the options.

    The conditions are the command, the commit, the date and the machine. Each published number is
    quoted with them. If the script has the option `--alone` and it is passed, real-time priority is
    switched on.

    Args:
        parser: The parser that `create_parser` returned.
        smoke_defaults: New default values of options if `--smoke` is passed, by option name. They
            make the run as small as possible.
    """
    if "--smoke" in sys.argv:
        parser.set_defaults(**smoke_defaults)
    args = parser.parse_args()
    RealtimePriority.is_enabled = getattr(args, "alone", False)
    print_conditions(is_smoke=args.smoke)
    return args


def describe_commit_and_date() -> str:
    """Return the commit of this checkout and the date of today, for example "1a2b3c4d, 2026-11-30".

    Published numbers are quoted with this text.
    """
    return f"{describe_commit()}, {date.today()}"


def describe_commit(checkout: Path = BENCHMARKS_DIR) -> str:
    """Return the short hash of the commit of a checkout, followed by "+" if files were changed.

    Return the version of the installed loadgen package if `checkout` is not in a Git repository.
    """
    try:
        commit = _run_git(checkout, "rev-parse", "--short", "HEAD")
        changed_files = _run_git(checkout, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return version("loadgen")

    return f"{commit}+" if changed_files else commit


def _run_git(checkout: Path, *arguments: str) -> str:
    """Return what a Git command prints in a checkout, without white space at both ends."""
    completed = subprocess.run(
        ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True
    )
    return completed.stdout.strip()


def skip_script(reason: str) -> NoReturn:
    """Print why this machine cannot run the script, and exit with `SKIP_EXIT_CODE`."""
    print(f"skipped: {reason}")
    sys.exit(SKIP_EXIT_CODE)


class CoreAssignment(NamedTuple):
    """The cores on which a benchmark runs the client and the server.

    Each is a set of one core number, the form that `os.sched_setaffinity` takes.
    """

    client: set[int]
    server: set[int]


def assign_cores() -> CoreAssignment:
    """Return a core for the client and another one for the server.

    They are the last and the first core that this process may use, so they are the same core if it
    may use only one.
    """
    available_cores = sorted(os.sched_getaffinity(0))
    return CoreAssignment(client={available_cores[-1]}, server={available_cores[0]})


def pin_process(pid: int, cores: set[int]) -> None:
    """Pin a process to some cores, with real-time priority if that is switched on.

    The process ID 0 stands for the calling process.
    """
    os.sched_setaffinity(pid, cores)
    raise_priority(pid)


def raise_priority(pid: int = 0) -> None:
    """Give a process real-time priority if `RealtimePriority` is switched on; else do nothing.

    The process ID 0 stands for the calling process.
    """
    if RealtimePriority.is_enabled:
        lowest_realtime_priority = os.sched_param(1)
        os.sched_setscheduler(pid, REALTIME_POLICY, lowest_realtime_priority)


@contextlib.contextmanager
def serve_endpoint(**options: Any) -> Iterator[embedded.EmbeddedServer]:
    """Run the simulated server on the server's core while the `with` block runs.

    `options` are those of the simulated server. The yielded object has its `url` and `pid`.
    """
    with embedded.start(Options(**options)) as server:
        pin_process(server.pid, assign_cores().server)
        yield server


def read_url(url: str) -> bytes:
    """Return the body of the response to an HTTP GET request."""
    with urllib.request.urlopen(url) as response:
        body: bytes = response.read()
    return body


def read_counters(url: str) -> dict[str, float]:
    """Return what the simulated server has counted since its start.

    The keys are `events` (server-sent events), `requests` and `cpu_s` (its CPU-seconds).
    """
    counters: dict[str, float] = json.loads(read_url(url + "/_stats"))
    return counters


def print_conditions(*, is_smoke: bool) -> None:
    """Print the command, the commit, the date and the machine of this run.

    With `is_smoke`, also print that the figures of the run mean nothing.
    """
    script = Path(sys.argv[0]).absolute()
    is_benchmark = script.is_relative_to(BENCHMARKS_DIR)
    script_name = script.relative_to(BENCHMARKS_DIR) if is_benchmark else script.name
    command = " ".join([f"benchmarks/{script_name}", *sys.argv[1:]])
    print(f"`{command}` ({describe_commit_and_date()}); {describe_host()}\n", flush=True)

    if is_smoke:
        print(
            "SMOKE: the smallest run, which shows that the script works. Its figures mean "
            "nothing.\n",
            flush=True,
        )


class ResourceUsage(NamedTuple):
    """The resources that this process has used from its start to one moment.

    Attributes:
        monotonic_ns: That moment, on the monotonic clock.
        cpu_s: CPU-seconds in user mode and in the kernel.
        read_calls: System calls that read, such as read(2) and recv(2).
        waited_ns: How long the process was ready to run while other processes had the core.
    """

    monotonic_ns: int
    cpu_s: float
    read_calls: int
    waited_ns: int


class MeasurementWindow:
    """Measures what this process uses between one call of `begin` and one call of `end`.

    A client calls `begin` after its warm-up and `end` after its last request, so that start-up
    costs do not count. `result` is empty until `end` fills it with these keys:

        cpu_s        CPU-seconds in user mode and in the kernel
        wall_s       elapsed seconds
        read_calls   system calls that read
        waited_s     seconds in which the process was ready to run but had no core
    """

    def __init__(self) -> None:
        self._usage_at_begin: ResourceUsage | None = None
        self.result: dict[str, float] = {}

    def begin(self) -> None:
        """Start measuring."""
        self._usage_at_begin = _read_usage()

    def end(self) -> None:
        """Stop measuring, and fill `result` with what the process used since `begin`."""
        before = self._usage_at_begin
        assert before is not None, "begin() was not called"
        after = _read_usage()
        self.result = {
            "cpu_s": after.cpu_s - before.cpu_s,
            "wall_s": (after.monotonic_ns - before.monotonic_ns) / 1e9,
            "read_calls": after.read_calls - before.read_calls,
            "waited_s": (after.waited_ns - before.waited_ns) / 1e9,
        }


def _read_usage() -> ResourceUsage:
    """Return the resources that this process has used so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    io_lines = Path("/proc/self/io").read_text().splitlines()
    io_counters = dict(line.split(": ") for line in io_lines)

    # The three numbers of this file: ns on a core, ns of waiting for a core, number of time slices
    _, waited_ns, _ = Path("/proc/self/schedstat").read_text().split()

    return ResourceUsage(
        monotonic_ns=time.monotonic_ns(),
        cpu_s=usage.ru_utime + usage.ru_stime,
        read_calls=int(io_counters["syscr"]),
        waited_ns=int(waited_ns),
    )


def run_contender(
    file: str, name: str, arguments: Mapping[str, Any], timeout_s: float = 300
) -> dict[str, Any]:
    """Run a client program in its own process on the client's core, and return its JSON result.

    Raises SystemExit if the process fails or prints nothing.

    Args:
        file: The name of the script in this folder that has the client program.
        name: The name of the client program. The main program of `file` calls `run_as_contender`,
            which finds the function of that name.
        arguments: The keyword arguments of that function.
        timeout_s: After this time, the process is killed and subprocess.TimeoutExpired is raised.
    """
    command = [sys.executable, str(BENCHMARKS_DIR / file), name, json.dumps(arguments)]
    completed = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
        preexec_fn=lambda: pin_process(0, assign_cores().client),
    )
    output = completed.stdout.strip()
    if completed.returncode or not output:
        raise SystemExit(f"{name} ended with {completed.returncode}: {output[-500:]}")

    last_line = output.splitlines()[-1]
    result: dict[str, Any] = json.loads(last_line)
    return result


def run_as_contender(contenders: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Run one client program in this process, and print its result as one line of JSON.

    This is the main program of a script that `run_contender` starts. The command line has the name
    of the client program, which is a key of `contenders`, and its keyword arguments as JSON.
    """
    _, name, arguments_json = sys.argv
    run_client = contenders[name]
    raise_open_file_limit()
    result = run_client(**json.loads(arguments_json))
    print(json.dumps(result), flush=True)


def raise_open_file_limit() -> None:
    """Raise the number of files that this process may open to the hard limit of the system.

    Each connection of a load generator needs one.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def measure_client_and_server(url: str, run_client: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a client, and return its result together with what the server did meanwhile.

    The result of the client must have `wall_s`. These keys are added to it: `server_events`,
    `server_requests`, `server_cpu_s`, and `server_core_fraction`, which is the CPU time of the
    server as a fraction of one core.
    """
    before = read_counters(url)
    result = run_client()
    after = read_counters(url)

    for name in ("events", "requests", "cpu_s"):
        result[f"server_{name}"] = after[name] - before[name]
    result["server_core_fraction"] = result["server_cpu_s"] / result["wall_s"]

    return result


def interleave_rounds(
    rounds: int, measurements: Mapping[str, Callable[[], T]]
) -> dict[str, list[T]]:
    """Run each measurement once per round, and return the results of all rounds by name.

    The measurements alternate (A, B, A, B instead of A, A, B, B), so that a slow minute of the
    machine affects all measurements of a round alike.
    """
    results: dict[str, list[T]] = {name: [] for name in measurements}
    for _ in range(rounds):
        for name, measure_once in measurements.items():
            results[name].append(measure_once())
    return results


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median over all rounds of the ratio of two measurements of the same round."""
    ratios = [
        numerator / denominator
        for numerator, denominator in zip(numerators, denominators, strict=True)
    ]
    return median(ratios)


def measure_cpu_s(work: Callable[[], object], calls_per_round: int = 1, rounds: int = 5) -> float:
    """Return the CPU-seconds of this process that one call of `work` takes.

    Each round calls `work` several times and takes the mean. The smallest mean of all rounds is
    returned, because other work of the machine can only add time.
    """
    mean_cpu_s_per_call = []
    for _ in range(rounds):
        started_s = time.process_time()
        for _ in range(calls_per_round):
            work()
        elapsed_cpu_s = time.process_time() - started_s
        mean_cpu_s_per_call.append(elapsed_cpu_s / calls_per_round)
    return min(mean_cpu_s_per_call)


def describe_caveats(result: Mapping[str, Any], *, expects_one_event_per_read: bool = True) -> str:
    """Return why a result of `measure_client_and_server` must not be compared with others.

    The reasons are separated by commas. The text is empty if there is none.

    Args:
        result: The result of a client with what its server did. If the client counts its reads, it
            has `reads_per_event`.
        expects_one_event_per_read: Whether reading several events at once is a reason. Pass False
            if the server sends them together, so that no client can read them one by one.
    """
    caveats = []
    if result["server_core_fraction"] > SATURATED_CORE_FRACTION:
        caveats.append("server saturated")

    client_core_fraction = result["cpu_s"] / result["wall_s"]
    if client_core_fraction > SATURATED_CORE_FRACTION:
        caveats.append("client saturated")

    reads_per_event = result.get("reads_per_event", 1.0)
    if expects_one_event_per_read and reads_per_event < MIN_READS_PER_EVENT:
        caveats.append("events bundled")

    return ", ".join(caveats)


def median(values: Sequence[float]) -> float:
    """Return the median as a float."""
    return float(statistics.median(values))


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is aligned left and whose others are right.

    `columns` are the headings, and each row has the cells of all columns.
    """
    alignments = ["---"] + ["---:"] * (len(columns) - 1)
    lines = [_format_table_line(columns), "|" + "|".join(alignments) + "|"]
    lines += [_format_table_line(row) for row in rows]
    return "\n".join(lines)


def _format_table_line(cells: Sequence[str]) -> str:
    """Return one line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def describe_host() -> str:
    """Return one line with the CPU, its cores and load, the priority, and the software versions."""
    cores = len(os.sched_getaffinity(0))
    load_average_1_min, _, _ = os.getloadavg()
    host = f"{read_cpu_model()}, {cores} cores shared with others (load {load_average_1_min:.1f})"
    versions = f"Linux {platform.release()}, Python {platform.python_version()}"
    parts = [host, versions]

    if RealtimePriority.is_enabled:
        parts.append("client and endpoint with real-time priority")

    return ", ".join(parts)


def read_cpu_model() -> str:
    """Return the name of the CPU, or "unknown CPU" on a system without /proc."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown CPU"

    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()

    return "unknown CPU"


def format_limit_check(value: float, limit: float, *, is_upper_bound: bool) -> str:
    """Return whether a measured value meets its limit, for example "met (at most 1.5)".

    With `is_upper_bound`, the value must not be above the limit; otherwise, not below it.
    """
    if is_upper_bound:
        bound = f"at most {limit:g}"
        is_met = value <= limit
    else:
        bound = f"at least {limit:g}"
        is_met = value >= limit

    verdict = "met" if is_met else "**missed**"
    return f"{verdict} ({bound})"
