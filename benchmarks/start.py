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
from pathlib import Path

import rig
import tree

from loadgen.sim.server.send_log import parse_log

WALL_S, CPU_S, PER_1000_TOKENS_MS, EXIT_S = 1.0, 0.6, 0.2, 0.5
FEW, SHORT = 100, 150  # requests, and prompt tokens of the first length


def find_loadgen() -> list[str]:
    """Return the `loadgen` command of this interpreter's environment."""
    installed_command = Path(sys.executable).with_name("loadgen")
    return (
        [str(installed_command)]
        if installed_command.exists()
        else [sys.executable, "-m", "loadgen"]
    )


def measure_run(requests: int, input_tokens: int, concurrency: int) -> dict[str, float]:
    """Return seconds and CPU-seconds to the first request, and seconds from last token to exit."""
    options = {"ttft": "5ms", "itl": "1ms", "log_events": "ends", "idle_close": "60s"}
    with (
        tempfile.TemporaryDirectory(prefix="loadgen-start-") as scratch,
        rig.serve_endpoint(**options) as server,
    ):
        folder = Path(scratch)
        (folder / "start.yaml").write_text(
            f"name: start\nrequests: {{input_tokens: {input_tokens}, output_tokens: 4}}\n"
        )
        flags = [
            "--concurrency",
            str(concurrency),
            "--num-requests",
            str(requests),
            "--out",
            "results",
            "--set",
        ]
        command = [
            *find_loadgen(),
            "run",
            "start.yaml",
            "--url",
            server.url,
            *flags,
            "limit=cpu_share:100%",
        ]
        command_result = tree.watch_command(command, folder)
        log = parse_log(rig.read_url(server.url + "/_log"))
    load_requests = [request for request in log.requests if request.id.startswith("results-")]
    if len(load_requests) != requests or command_result.code not in (0, 3):
        raise SystemExit(
            f"{len(load_requests)} of {requests} requests came, exit code "
            f"{command_result.code}:\n{command_result.output[-2000:]}"
        )
    first_arrival_ns = min(request.arrival_ns for request in load_requests)
    return {
        "wall_s": (first_arrival_ns - command_result.begun_ns) / 1e9,
        "cpu_s": command_result.cpu_s_at(first_arrival_ns),
        "exit_s": (command_result.ended_ns - int(log.sent_ns.max())) / 1e9,
    }


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
    measure_run(10, SHORT, 4)
    cases = ((FEW, SHORT, 8), (FEW, args.long, 8), (args.many, 20, 256))
    runs_by_case = [[measure_run(*case) for _ in range(args.rounds)] for case in cases]
    rows = []
    medians = [
        {key: rig.median([run[key] for run in runs]) for key in runs[0]} for runs in runs_by_case
    ]
    for (requests, tokens, concurrency), runs, median in zip(
        cases, runs_by_case, medians, strict=True
    ):
        cells = [
            f"{median[key]:.3f} ({min(run[key] for run in runs):.3f})"
            for key in ("wall_s", "cpu_s", "exit_s")
        ]
        rows.append(
            [f"{requests:,} requests of {tokens:,} prompt tokens, {concurrency} in flight", *cells]
        )
    print(
        rig.format_table(
            ["load", "to first request, s", "CPU-s till then", "last token to exit, s"], rows
        )
    )
    slope = (medians[1]["cpu_s"] - medians[0]["cpu_s"]) * 1e3 / (FEW * (args.long - SHORT) / 1000)
    print()
    limits = (
        (f"start to first request, {FEW} requests", medians[0]["wall_s"], "s", WALL_S),
        ("CPU till then", medians[0]["cpu_s"], "s", CPU_S),
        ("CPU per 1,000 prompt tokens", slope, "ms", PER_1000_TOKENS_MS),
        (f"last token to exit, {args.many:,} requests", medians[2]["exit_s"], "s", EXIT_S),
    )
    print(
        "\n".join(
            f"- {description}: {value:.3f} {unit}: {rig.describe_limit(value, limit, most=True)}"
            for description, value, unit, limit in limits
        )
    )


if __name__ == "__main__":
    main()
