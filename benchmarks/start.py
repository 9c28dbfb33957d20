"""From `loadgen run` to its first request, and from its last token to its exit.

    python benchmarks/start.py [--rounds 5]

The command as a user types it, against an endpoint that runs already. The first request is what the endpoint's log
says was the first of the load (the probes before it have other names); CPU is that of the command and every process it
started, up to that instant. Warm: an unmeasured run comes first. The prompt's cost is the slope between two lengths.
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


def loadgen() -> list[str]:
    """The command beside this interpreter, or the same thing through it."""
    beside = Path(sys.executable).with_name("loadgen")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "loadgen"]


def once(requests: int, input_tokens: int, lanes: int) -> dict[str, float]:
    """Of one run: seconds and CPU-seconds to its first request, seconds from last token to exit."""
    options = {"ttft": "5ms", "itl": "1ms", "log_events": "ends", "idle_close": "60s"}
    with (
        tempfile.TemporaryDirectory(prefix="loadgen-start-") as scratch,
        rig.endpoint(**options) as server,
    ):
        folder = Path(scratch)
        (folder / "start.yaml").write_text(
            f"name: start\nrequests: {{input_tokens: {input_tokens}, output_tokens: 4}}\n"
        )
        flags = [
            "--concurrency",
            str(lanes),
            "--num-requests",
            str(requests),
            "--out",
            "results",
            "--set",
        ]
        command = [
            *loadgen(),
            "run",
            "start.yaml",
            "--url",
            server.url,
            *flags,
            "limit=cpu_share:100%",
        ]
        seen = tree.watch(command, folder)
        log = parse_log(rig.get(server.url + "/_log"))
    load = [request for request in log.requests if request.id.startswith("results-")]
    if len(load) != requests or seen.code not in (0, 3):
        raise SystemExit(
            f"{len(load)} of {requests} requests came, exit code {seen.code}:\n{seen.output[-2000:]}"
        )
    first = min(request.arrival_ns for request in load)
    return {
        "wall_s": (first - seen.begun_ns) / 1e9,
        "cpu_s": seen.cpu_s_at(first),
        "exit_s": (seen.ended_ns - int(log.sent_ns.max())) / 1e9,
    }


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--many", type=int, default=10_000, help="requests, of which the exit is timed"
    )
    parser.add_argument(
        "--long", type=int, default=10_000, help="prompt tokens of the second length"
    )
    flags = rig.given(parser, rounds=1, many=300, long=1_000)
    print("The command and all its processes on one core, the endpoint on the other;")
    print(f"median of {flags.rounds} rounds (best in brackets).\n")
    once(10, SHORT, 4)
    cases = ((FEW, SHORT, 8), (FEW, flags.long, 8), (flags.many, 20, 256))
    found = [[once(*case) for _ in range(flags.rounds)] for case in cases]
    rows = []
    middle = [{key: rig.median([run[key] for run in runs]) for key in runs[0]} for runs in found]
    for (requests, tokens, lanes), runs, one in zip(cases, found, middle, strict=True):
        cells = [
            f"{one[key]:.3f} ({min(run[key] for run in runs):.3f})"
            for key in ("wall_s", "cpu_s", "exit_s")
        ]
        rows.append(
            [f"{requests:,} requests of {tokens:,} prompt tokens, {lanes} in flight", *cells]
        )
    print(
        rig.table(["load", "to first request, s", "CPU-s till then", "last token to exit, s"], rows)
    )
    slope = (middle[1]["cpu_s"] - middle[0]["cpu_s"]) * 1e3 / (FEW * (flags.long - SHORT) / 1000)
    print()
    limits = (
        (f"start to first request, {FEW} requests", middle[0]["wall_s"], "s", WALL_S),
        ("CPU till then", middle[0]["cpu_s"], "s", CPU_S),
        ("CPU per 1,000 prompt tokens", slope, "ms", PER_1000_TOKENS_MS),
        (f"last token to exit, {flags.many:,} requests", middle[2]["exit_s"], "s", EXIT_S),
    )
    print(
        "\n".join(
            f"- {what}: {x:.3f} {unit}: {rig.verdict(x, limit, most=True)}"
            for what, x, unit, limit in limits
        )
    )


if __name__ == "__main__":
    main()
