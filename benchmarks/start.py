"""How long does `loadgen run` take until its first request, and from its last token to its exit?

    python benchmarks/start.py [--rounds 5]

It runs the command as a user types it, against an endpoint that is already running. The first
request is the first of the load in the endpoint's log (probes have other names). CPU is that of the
command and every process it started, until that moment. An unmeasured run warms the caches. The
cost of prompts is the slope between two lengths. It takes about a minute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import rig
import tree

from loadgen.sim.server.send_log import parse_log

WALL_S, CPU_S, PER_1000_TOKENS_MS, EXIT_S = 1.0, 0.6, 0.2, 0.5
FEW, SHORT = 100, 150  # requests, and prompt tokens of the first length


def print_limits(
    short_prompts: StartTimes,
    long_prompts: StartTimes,
    many_requests: StartTimes,
    args: argparse.Namespace,
) -> None:
    """Print the medians that have a limit.

    The cost of prompts is the difference of two runs whose prompts differ in length.
    """
    more_prompt_tokens = FEW * (args.long - SHORT)
    prompt_cpu_ms = (long_prompts.cpu_s - short_prompts.cpu_s) * 1e3
    ms_per_1000_tokens = prompt_cpu_ms / (more_prompt_tokens / 1000)

    limits = (
        (f"start to first request, {FEW} requests", short_prompts.wall_s, "s", WALL_S),
        ("CPU till then", short_prompts.cpu_s, "s", CPU_S),
        ("CPU per 1,000 prompt tokens", ms_per_1000_tokens, "ms", PER_1000_TOKENS_MS),
        (f"last token to exit, {args.many:,} requests", many_requests.exit_s, "s", EXIT_S),
    )
    for description, value, unit, limit in limits:
        verdict = rig.format_limit_check(value, limit, is_upper_bound=True)
        print(f"- {description}: {value:.3f} {unit}: {verdict}")


def find_loadgen() -> list[str]:
    """Return the `loadgen` command of this interpreter's environment."""
    installed_command = Path(sys.executable).with_name("loadgen")
    if installed_command.exists():
        return [str(installed_command)]
    return [sys.executable, "-m", "loadgen"]


class Case(NamedTuple):
    """A load whose start and end are timed."""

    requests: int
    input_tokens: int
    concurrency: int

    @property
    def description(self) -> str:
        """The case in a few words."""
        return (
            f"{self.requests:,} requests of {self.input_tokens:,} prompt tokens, "
            f"{self.concurrency} in flight"
        )


class StartTimes(NamedTuple):
    """What a run took: seconds and CPU-seconds to its first request, seconds from the last token.

    The seconds begin with the start of the command; `exit_s` ends with its exit.
    """

    wall_s: float
    cpu_s: float
    exit_s: float


def measure_run(case: Case) -> StartTimes:
    """Run `loadgen run` as a user does, and time its start and its end by the endpoint's log."""
    options = {"ttft": "5ms", "itl": "1ms", "log_events": "ends", "idle_close": "60s"}
    with (
        tempfile.TemporaryDirectory(prefix="loadgen-start-") as scratch,
        rig.serve_endpoint(**options) as server,
    ):
        folder = Path(scratch)
        (folder / "start.yaml").write_text(
            f"name: start\nrequests: {{input_tokens: {case.input_tokens}, output_tokens: 4}}\n"
        )
        load = ["--concurrency", str(case.concurrency), "--num-requests", str(case.requests)]

        # A busy host must not make the run INVALID.
        results = ["--out", "results", "--set", "limit=cpu_share:100%"]
        command = [*find_loadgen(), "run", "start.yaml", "--url", server.url, *load, *results]
        watched = tree.watch_command(command, folder)
        log = parse_log(rig.read_url(server.url + "/_log"))

    # Requests of the load are named after the folder of the results, unlike the first request that
    # only looks at the endpoint.
    load_requests = [request for request in log.requests if request.id.startswith("results-")]
    if len(load_requests) != case.requests or watched.code not in (0, 3):
        raise SystemExit(
            f"{len(load_requests)} of {case.requests} requests came, exit code "
            f"{watched.code}:\n{watched.output[-2000:]}"
        )

    first_arrival_ns = min(request.arrival_ns for request in load_requests)
    last_send_ns = int(log.sent_ns.max())
    return StartTimes(
        wall_s=(first_arrival_ns - watched.begun_ns) / 1e9,
        cpu_s=watched.cpu_s_at(first_arrival_ns),
        exit_s=(watched.ended_ns - last_send_ns) / 1e9,
    )


class MeasuredCase(NamedTuple):
    """A case with the times of its runs."""

    case: Case
    runs: list[StartTimes]

    def median(self) -> StartTimes:
        """Return the median of each time."""
        return StartTimes(*(rig.median(times) for times in zip(*self.runs, strict=True)))

    def format_row(self) -> list[str]:
        """Return the row of the table: the median and the smallest value of each time."""
        cells = [
            f"{rig.median(times):.3f} ({min(times):.3f})" for times in zip(*self.runs, strict=True)
        ]
        return [self.case.description, *cells]


def main() -> None:
    """Print the time to the first request and to the exit, with their limits."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--many", type=int, default=10_000, help="requests, of which the exit is timed"
    )
    parser.add_argument(
        "--long", type=int, default=10_000, help="prompt tokens of the second length"
    )
    args = rig.parse_arguments(parser, rounds=1, many=300, long=1_000)
    print("The command and all its processes on one core, the endpoint on the other;")
    print(f"median of {args.rounds} rounds (best in brackets).\n")
    measure_run(Case(requests=10, input_tokens=SHORT, concurrency=4))  # warms the caches
    short_prompts, long_prompts, many_requests = (
        MeasuredCase(case, [measure_run(case) for _ in range(args.rounds)])
        for case in (
            Case(FEW, SHORT, concurrency=8),
            Case(FEW, args.long, concurrency=8),
            Case(args.many, input_tokens=20, concurrency=256),
        )
    )
    rows = [case.format_row() for case in (short_prompts, long_prompts, many_requests)]
    columns = ["load", "to first request, s", "CPU-s till then", "last token to exit, s"]
    print(rig.format_table(columns, rows))
    print()
    print_limits(short_prompts.median(), long_prompts.median(), many_requests.median(), args)


if __name__ == "__main__":
    main()
