"""How long does `loadgen run` take until its first request, and from its last token to its exit?

    python benchmarks/start.py [--rounds 5]

It runs the command as a user types it, against an endpoint that is already running. The first
request is the first of the load in the endpoint's log (probes have other names). CPU is that of the
command and every process it started, until that moment. An unmeasured run warms the caches. The
cost of prompts is the slope between two lengths. It takes about a minute.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import rig
import tree

from loadgen.sim.server.send_log import SentRequests, parse_log

MAX_START_S = 1.0
MAX_START_CPU_S = 0.6
MAX_CPU_MS_PER_1000_PROMPT_TOKENS = 0.2
MAX_EXIT_S = 0.5

FEW_REQUESTS = 100
SHORT_PROMPT_TOKENS = 150

SERVER_OPTIONS = {"ttft": "5ms", "itl": "1ms", "log_events": "ends", "idle_close": "60s"}
RESULTS_DIR = "results"

SUCCESS_EXIT_CODES = (0, 3)  # 3: the run is invalid, for example because the host was too busy
SHOWN_OUTPUT_CHARS = 2_000  # of a command that failed

COLUMNS = ("load", "to first request, s", "CPU-s till then", "last token to exit, s")


class Load(NamedTuple):
    """A closed-loop load: the number of requests, the tokens of each, and the concurrency."""

    requests: int
    input_tokens: int
    output_tokens: int
    concurrency: int


def find_loadgen_command() -> list[str]:
    """Return the command that starts loadgen in this Python environment.

    It is `loadgen` as it was installed, or `python -m loadgen` if it was not installed.
    """
    installed_command = Path(sys.executable).with_name("loadgen")
    if installed_command.exists():
        return [str(installed_command)]
    return [sys.executable, "-m", "loadgen"]


def watch_loadgen_run(url: str, load: Load, folder: Path) -> tree.WatchedCommand:
    """Run `loadgen run` with a load in `folder` as a user does, and watch its processes.

    Raises SystemExit with the end of its output if it fails.
    """
    workload_path = folder / "workload.yaml"
    workload_path.write_text(
        f"name: bench\nrequests: {{input_tokens: {load.input_tokens}, "
        f"output_tokens: {load.output_tokens}}}\n"
    )
    command = [
        *find_loadgen_command(),
        "run",
        workload_path.name,
        f"--url={url}",
        f"--concurrency={load.concurrency}",
        f"--num-requests={load.requests}",
        f"--out={RESULTS_DIR}",
        "--set=limit=cpu_share:100%",  # a busy host must not make the run invalid
    ]
    watched = tree.watch_command(command, folder)
    if watched.code not in SUCCESS_EXIT_CODES:
        output_end = watched.output[-SHOWN_OUTPUT_CHARS:]
        raise SystemExit(f"loadgen exited with {watched.code}:\n{output_end}")
    return watched


class RunTimes(NamedTuple):
    """The times of one run of the command, or the medians of several.

    Attributes:
        start_s: The seconds from the start of the command to the first request of the load.
        start_cpu_s: The CPU-seconds of all its processes until then.
        exit_s: The seconds from the last token of the load to the exit of the command.
    """

    start_s: float
    start_cpu_s: float
    exit_s: float


def measure_run(load: Load) -> RunTimes:
    """Run `loadgen run` as a user does, and time its start and its end by the server's log.

    The log has the times of arrivals and sends on the same monotonic clock as those of the command.
    """
    with (
        tempfile.TemporaryDirectory(prefix="loadgen-start-") as folder,
        rig.serve_endpoint(**SERVER_OPTIONS) as server,
    ):
        watched = watch_loadgen_run(server.url, load, Path(folder))
        server_log = parse_log(rig.read_url(server.url + "/_log"))

    first_arrival_ns = find_first_arrival_ns(server_log, load.requests)
    last_sent_ns = int(server_log.sent_ns.max())
    return RunTimes(
        start_s=(first_arrival_ns - watched.begun_ns) / 1e9,
        start_cpu_s=watched.cpu_s_at(first_arrival_ns),
        exit_s=(watched.ended_ns - last_sent_ns) / 1e9,
    )


def find_first_arrival_ns(log: SentRequests, expected_requests: int) -> int:
    """Return when the first request of the load arrived at the server, on the monotonic clock.

    Requests of the load are named after the folder of the results. The probe, which is sent before
    the load, has another name. Raises SystemExit if a request of the load is missing.
    """
    arrivals_ns = [
        request.arrival_ns for request in log.requests if request.id.startswith(f"{RESULTS_DIR}-")
    ]
    if len(arrivals_ns) != expected_requests:
        raise SystemExit(f"{len(arrivals_ns)} of {expected_requests} requests arrived")
    return min(arrivals_ns)


class MeasuredLoad(NamedTuple):
    """A load and the times of its runs, one per round."""

    load: Load
    runs: list[RunTimes]

    def medians(self) -> RunTimes:
        """Return the median of each time over all runs."""
        return RunTimes(
            start_s=rig.median([run.start_s for run in self.runs]),
            start_cpu_s=rig.median([run.start_cpu_s for run in self.runs]),
            exit_s=rig.median([run.exit_s for run in self.runs]),
        )

    def format_row(self) -> list[str]:
        """Return the row of the load: the median of each time, with the smallest in brackets."""
        load = self.load
        description = (
            f"{load.requests:,} requests of {load.input_tokens:,} prompt tokens, "
            f"{load.concurrency} in flight"
        )
        return [
            description,
            format_times([run.start_s for run in self.runs]),
            format_times([run.start_cpu_s for run in self.runs]),
            format_times([run.exit_s for run in self.runs]),
        ]


def measure_load(load: Load, rounds: int) -> MeasuredLoad:
    """Run a load `rounds` times, and return the times of all runs."""
    return MeasuredLoad(load, [measure_run(load) for _ in range(rounds)])


def format_times(times_s: Sequence[float]) -> str:
    """Return the median of times in seconds, with the smallest in brackets."""
    return f"{rig.median(times_s):.3f} ({min(times_s):.3f})"


def compute_prompt_cpu_ms_per_1000_tokens(short: MeasuredLoad, long: MeasuredLoad) -> float:
    """Return the CPU-ms that 1,000 tokens of a prompt cost before the first request.

    It is the slope between two loads that differ only in the length of their prompts, so that the
    fixed costs of a start cancel out.
    """
    added_cpu_s = long.medians().start_cpu_s - short.medians().start_cpu_s
    added_tokens_per_request = long.load.input_tokens - short.load.input_tokens
    added_tokens = short.load.requests * added_tokens_per_request
    return added_cpu_s * 1e3 / (added_tokens / 1_000)


def print_limits(short: MeasuredLoad, long: MeasuredLoad, many: MeasuredLoad) -> None:
    """Print whether the medians keep their limits.

    Args:
        short: Few requests with short prompts, for the time of a start.
        long: As many requests with long prompts, for the cost of prompts.
        many: Many requests, for the time of an exit.
    """
    start = short.medians()
    print_limit(
        f"start to first request, {short.load.requests} requests", start.start_s, "s", MAX_START_S
    )
    print_limit("CPU till then", start.start_cpu_s, "s", MAX_START_CPU_S)
    print_limit(
        "CPU per 1,000 prompt tokens",
        compute_prompt_cpu_ms_per_1000_tokens(short, long),
        "ms",
        MAX_CPU_MS_PER_1000_PROMPT_TOKENS,
    )
    print_limit(
        f"last token to exit, {many.load.requests:,} requests",
        many.medians().exit_s,
        "s",
        MAX_EXIT_S,
    )


def print_limit(description: str, value: float, unit: str, max_value: float) -> None:
    """Print a value and whether it is at most `max_value`; both are in `unit`."""
    verdict = rig.format_limit_check(value, max_value, is_upper_bound=True)
    print(f"- {description}: {value:.3f} {unit}: {verdict}")


def main() -> None:
    """Print the time to the first request and to the exit, with their limits."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--many", type=int, default=10_000, help="requests of the load whose exit is timed"
    )
    parser.add_argument(
        "--long", type=int, default=10_000, help="prompt tokens of the second length"
    )
    smoke_defaults = {"rounds": 1, "many": 300, "long": 1_000}
    args = rig.parse_arguments(parser, **smoke_defaults)

    print("The command and all its processes on one core, the endpoint on the other;")
    print(f"median of {args.rounds} rounds (best in brackets).\n")

    short_load = Load(FEW_REQUESTS, SHORT_PROMPT_TOKENS, output_tokens=4, concurrency=8)
    long_load = short_load._replace(input_tokens=args.long)
    many_load = Load(args.many, input_tokens=20, output_tokens=4, concurrency=256)

    measure_run(short_load._replace(requests=10))  # warms the caches of the file system
    short = measure_load(short_load, args.rounds)
    long = measure_load(long_load, args.rounds)
    many = measure_load(many_load, args.rounds)

    rows = [short.format_row(), long.format_row(), many.format_row()]
    print(rig.format_table(COLUMNS, rows))
    print()
    print_limits(short, long, many)


if __name__ == "__main__":
    main()
