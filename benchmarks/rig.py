"""Share the parts of all benchmarks: options, the endpoint, contenders, CPU time and tables.

The endpoint runs on a core of its own. A contender is a function in a file of this folder that runs
as `python FILE NAME JSON` in its own process and prints one JSON object. Costs are measured in
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
sys.path.append(str(BENCHMARKS_DIR.parent / "tests"))  # where servers and rows are made
SATURATED_CORE_FRACTION = 0.85  # of a core: a server busier than this shapes what its clients see
REALTIME_POLICY = (
    os.SCHED_RR | os.SCHED_RESET_ON_FORK
)  # real time for a process, not for its children
# Reads per event: fewer means that the client read several events at once, which is cheaper
MIN_READS_PER_EVENT = 0.9
T = TypeVar("T")
SKIP_EXIT_CODE = 77  # exit code of a script that needs what this machine has not


class RealtimePriority:
    """Whether client and endpoint run with real-time priority.

    It keeps other processes of a shared machine out of latencies. CPU-seconds hardly change, so
    only benchmarks of latencies offer it. Setting the priority needs root.
    """

    is_enabled = False


def create_parser(doc: str | None, *, alone: bool = False) -> argparse.ArgumentParser:
    """Return the command-line parser of a script, with its docstring as the help text.

    `alone` adds the option `--alone`, which gives client and endpoint real-time priority.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="the smallest form, some seconds: it runs, and says nothing",
    )

    if alone:
        parser.add_argument(
            "--alone",
            action="store_true",
            help="real-time priority: without the noise of others (root)",
        )

    return parser


def parse_arguments(parser: argparse.ArgumentParser, **smoke_defaults: Any) -> argparse.Namespace:
    """Parse the command line, print under which conditions the script runs, and return the options.

    `smoke_defaults` replace the defaults of the options with `--smoke`, the smallest run of a
    script. The printed conditions are the command, the commit, the date and the machine, because a
    number is always quoted with them. `--alone` sets RealtimePriority.
    """
    if "--smoke" in sys.argv:
        parser.set_defaults(**smoke_defaults)
    args = parser.parse_args()
    RealtimePriority.is_enabled = getattr(args, "alone", False)
    print_conditions(is_smoke=args.smoke)
    return args


def describe_tree_and_date() -> str:
    """Return the commit and the date with which a number is quoted."""
    return f"{describe_commit()}, {date.today()}"


def describe_commit(checkout: Path = BENCHMARKS_DIR) -> str:
    """Return the short commit of a checkout, with a `+` if it has changes.

    Return the version of the installed package if there is no Git repository.
    """

    def git(*arguments: str) -> str:
        """Return what a Git command prints for the checkout."""
        completed = subprocess.run(
            ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True
        )
        return completed.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            "+" if git("status", "--porcelain", "-uno") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return version("loadgen")


def skip_script(reason: str) -> NoReturn:
    """Print why this machine cannot run the script, and exit with `SKIP_EXIT_CODE`."""
    print(f"skipped: {reason}")
    sys.exit(SKIP_EXIT_CODE)


def pin_process(pid: int, cores: set[int]) -> None:
    """Pin a process (0 is this one) to a set of cores and raise its priority if asked to."""
    os.sched_setaffinity(pid, cores)
    raise_priority(pid)


def raise_priority(pid: int = 0) -> None:
    """Give a process (0 is this one) real-time priority if `--alone` was passed."""
    if RealtimePriority.is_enabled:
        os.sched_setscheduler(pid, REALTIME_POLICY, os.sched_param(1))


def client_and_server_cores() -> tuple[set[int], set[int]]:
    """Return the core of the client and that of the server.

    They are the same core on a machine with one core.
    """
    available_cores = sorted(os.sched_getaffinity(0))
    return {available_cores[-1]}, {available_cores[0]}


@contextlib.contextmanager
def serve_endpoint(**options: Any) -> Iterator[embedded.EmbeddedServer]:
    """Serve the embedded endpoint on the server's core inside the `with` block."""
    with embedded.start(Options(**options)) as server:
        pin_process(server.pid, client_and_server_cores()[1])
        yield server


def read_url(url: str) -> bytes:
    """Return the body of an HTTP GET."""
    with urllib.request.urlopen(url) as response:
        body: bytes = response.read()
    return body


def read_counters(url: str) -> dict[str, float]:
    """Return the endpoint's own counters: events, requests and cpu_s."""
    counters: dict[str, float] = json.loads(read_url(url + "/_stats"))
    return counters


def print_conditions(*, is_smoke: bool) -> None:
    """Print the command, the commit, the date and the machine of this run."""
    script = Path(sys.argv[0]).absolute()
    is_benchmark = script.is_relative_to(BENCHMARKS_DIR)
    name = script.relative_to(BENCHMARKS_DIR) if is_benchmark else script.name
    command = " ".join([f"benchmarks/{name}", *sys.argv[1:]])
    print(f"`{command}` ({describe_tree_and_date()}); {describe_host()}\n", flush=True)

    if is_smoke:
        print(
            "SMOKE: the smallest form, which shows that the script runs. Its figures say "
            "nothing.\n",
            flush=True,
        )


class ResourceUsage(NamedTuple):
    """What this process has used since its start."""

    cpu_s: float
    monotonic_ns: int  # the time of this reading
    read_calls: int  # system calls of the kind read(2)
    waited_ns: int  # ready to run, but without a core


class MeasurementWindow:
    """CPU time, wall time and read(2) calls of this process between `begin` and `end`.

    `waited_s` is the time during which the process was ready to run but had no core. Each of the
    two methods is called once.
    """

    def __init__(self) -> None:
        self._usage_at_begin: ResourceUsage | None = None
        self.result: dict[str, float] = {}

    def begin(self) -> None:
        """Open the window."""
        self._usage_at_begin = _read_usage()

    def end(self) -> None:
        """Close the window and fill `result` with what the process used since `begin`."""
        before = self._usage_at_begin
        assert before is not None, "the window was never opened"
        after = _read_usage()
        self.result = {
            "cpu_s": after.cpu_s - before.cpu_s,
            "wall_s": (after.monotonic_ns - before.monotonic_ns) / 1e9,
            "syscalls_read": after.read_calls - before.read_calls,
            "waited_s": (after.waited_ns - before.waited_ns) / 1e9,
        }


def run_contender(
    file: str, name: str, arguments: Mapping[str, Any], timeout_s: float = 300
) -> dict[str, Any]:
    """Run one contender in its own process on the client's core and return its JSON result.

    A contender is a function of `file` that `run_as_contender` serves under `name`. Raises
    SystemExit if it fails or prints nothing.
    """
    command = [sys.executable, str(BENCHMARKS_DIR / file), name, json.dumps(arguments)]
    completed = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
        preexec_fn=lambda: pin_process(0, client_and_server_cores()[0]),
    )
    if completed.returncode or not completed.stdout.strip():
        raise SystemExit(f"{name} ended with {completed.returncode}: {completed.stdout[-500:]}")

    result: dict[str, Any] = json.loads(completed.stdout.strip().splitlines()[-1])
    return result


def run_as_contender(contenders: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Run the contender named on the command line: the main program of a file of contenders."""
    raise_open_file_limit()
    print(json.dumps(contenders[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)


def raise_open_file_limit() -> None:
    """Raise the limit of open files to the hard limit of the system."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def measure_with_server(url: str, run_client: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a client and add to its result what the server did meanwhile.

    The added keys are `server_events`, `server_requests`, `server_cpu_s` and `server_share`, which
    is the CPU time of the server as a fraction of one core. The result of the client must have
    `wall_s`.
    """
    before = read_counters(url)
    result = run_client()
    after = read_counters(url)
    for name in ("events", "requests", "cpu_s"):
        result[f"server_{name}"] = after[name] - before[name]
    result["server_share"] = result["server_cpu_s"] / result["wall_s"]
    return result


def interleave_rounds(rounds: int, sides: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Return the results of each side, run alternately round by round.

    A slow minute of the machine then affects all sides of its round alike.
    """
    results: dict[str, list[T]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, measure_once in sides.items():
            results[name].append(measure_once())
    return results


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median of the ratios within each round."""
    return median([a / b for a, b in zip(numerators, denominators, strict=True)])


def measure_cpu_s(work: Callable[[], object], times: int = 1, rounds: int = 5) -> float:
    """Return the CPU-seconds of one call of `work` in this process.

    Each round takes the mean of `times` calls. The smallest mean of all rounds counts, because
    other work of the machine only adds time.
    """
    means = []
    for _ in range(rounds):
        started = time.process_time()
        for _ in range(times):
            work()
        means.append((time.process_time() - started) / times)
    return min(means)


def describe_caveats(result: Mapping[str, Any], *, one_event_per_read: bool = True) -> str:
    """Return the reasons for which a result cannot be taken at face value, or ""."""
    caveats = []
    if result["server_share"] > SATURATED_CORE_FRACTION:
        caveats.append("server saturated")

    if result["cpu_s"] / result["wall_s"] > SATURATED_CORE_FRACTION:
        caveats.append("client saturated")

    if one_event_per_read and result.get("reads_per_event", 1.0) < MIN_READS_PER_EVENT:
        caveats.append("events bundled")

    return ", ".join(caveats)


def median(values: Sequence[float]) -> float:
    """Return the median as a float."""
    return float(statistics.median(values))


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose first column is text and whose others are numbers."""
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _read_usage() -> ResourceUsage:
    """Return what this process has used so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    io_counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())

    # /proc/self/schedstat: ns on a core, ns waiting for one, number of time slices
    waited_ns = int(Path("/proc/self/schedstat").read_text().split()[1])
    return ResourceUsage(
        cpu_s=usage.ru_utime + usage.ru_stime,
        monotonic_ns=time.monotonic_ns(),
        read_calls=int(io_counters["syscr"]),
        waited_ns=waited_ns,
    )


def describe_host() -> str:
    """Return the machine, its load and its versions in one line."""
    cores = len(os.sched_getaffinity(0))
    load_average = os.getloadavg()[0]
    host = f"{read_cpu_model()}, {cores} cores shared with others (load {load_average:.1f})"
    versions = f"Linux {platform.release()}, Python {platform.python_version()}"

    priority = ""
    if RealtimePriority.is_enabled:
        priority = ", client and endpoint with real-time priority"

    return f"{host}, {versions}{priority}"


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


def describe_limit(value: float, limit: float, *, most: bool) -> str:
    """Return whether a value keeps its limit, for example "met (at most 1.5)".

    With `most`, the limit is an upper bound, and a lower bound otherwise.
    """
    is_met = value <= limit if most else value >= limit
    verdict = "met" if is_met else "**missed**"
    bound = "at most" if most else "at least"
    return f"{verdict} ({bound} {limit:g})"
