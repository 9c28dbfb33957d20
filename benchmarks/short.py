"""How many short requests, and how many events of a flood, does the client handle per CPU-second?

    python benchmarks/short.py [--only flood]

Closed loop. `paced`: concurrency 256 and 4 tokens per response, with time between the tokens, so
that each event is one read. `at full speed`: the same without pauses, so that the slower of client
and server sets the pace. `flood`: concurrency 64 and 500 tokens, about 50 events per write. The
window lasts from the first request to the last record. It takes some minutes and prints a table and
the limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import rig

# An idle connection stays open, so that no run pays for new ones.
KEEP_CONNECTIONS = {"idle_close": "60s"}


class Case(NamedTuple):
    """A closed loop: options of the endpoint, virtual users, tokens per response and requests."""

    server_options: dict[str, Any]
    concurrency: int
    tokens: int
    requests: int

    @property
    def counted_unit(self) -> str:
        """What is limited per CPU-second: events of a flood, else requests."""
        return "events" if self.server_options.get("flood") else "requests"


CASES = {
    "short, paced (4 tokens 2 ms apart)": Case(
        {"ttft": "normal:50ms,10ms", "itl": "2ms"}, concurrency=256, tokens=4, requests=20_000
    ),
    "short, at full speed": Case(
        {"ttft": "1ms", "itl": "0.1ms"}, concurrency=256, tokens=4, requests=30_000
    ),
    "flood (some 50 events per write)": Case(
        {"ttft": "1ms", "flood": True}, concurrency=64, tokens=500, requests=6_000
    ),
}


MIN_PER_CPU_S = {"requests": 10_000, "events": 500_000}


def measure_once(case: Case) -> dict[str, Any]:
    """Run our client once, in a process of its own, and return what the load cost.

    `ours.py` is the script of that process. Raises SystemExit if a request failed or an event is
    missing.
    """
    with rig.serve_endpoint(**case.server_options, **KEEP_CONNECTIONS) as server:
        arguments = {
            "url": server.url,
            "requests": {"input_tokens": 20, "output_tokens": case.tokens},
            "concurrency": case.concurrency,
            "num_requests": case.requests,
        }
        result = rig.measure_client_and_server(
            server.url, lambda: rig.run_contender("ours.py", "drive", arguments)
        )

    expected_events = case.requests * case.tokens
    if result["ok"] != case.requests or result["events"] != expected_events:
        raise SystemExit(
            f"{result['ok']} of {case.requests} requests ok, {result['events']} of "
            f"{expected_events} events"
        )

    return result


def median_of(runs: list[dict[str, Any]], read: Callable[[dict[str, Any]], float]) -> float:
    """Return the median over all runs of what `read` computes of a run."""
    return rig.median([read(run) for run in runs])


def format_row(name: str, case: Case, runs: list[dict[str, Any]]) -> list[str]:
    """Return the row of a case; CPU-seconds with the recorder include our Parquet process."""
    is_short = case.tokens == 4  # few tokens come one at a time, many of them together
    caveats = {rig.describe_caveats(run, expects_one_event_per_read=is_short) for run in runs}
    with_recorder = median_of(
        runs, lambda run: run["requests"] / (run["cpu_s"] + run["recorder_cpu_s"])
    )

    return [
        name,
        f"{median_of(runs, lambda run: run['requests'] / run['wall_s']):,.0f}",
        f"{median_of(runs, lambda run: run['requests'] / run['cpu_s']):,.0f}",
        f"{with_recorder:,.0f}",
        f"{median_of(runs, lambda run: run['events'] / run['cpu_s']):,.0f}",
        f"{median_of(runs, lambda run: run['reads_per_event']):.3f}",
        f"{median_of(runs, lambda run: run['cpu_s'] / run['wall_s']):.0%}",
        f"{median_of(runs, lambda run: run['server_core_fraction']):.0%}",
        "; ".join(sorted(caveats - {""})),
    ]


def judge_case(name: str, case: Case, runs: list[dict[str, Any]]) -> str:
    """Return the line that says whether a case keeps its limit per CPU-second."""
    unit = case.counted_unit
    per_cpu_s = median_of(runs, lambda run: run[unit] / run["cpu_s"])
    verdict = rig.format_limit_check(per_cpu_s, MIN_PER_CPU_S[unit], is_upper_bound=False)
    return f"- {name}: {per_cpu_s:,.0f} {unit}: {verdict}"


def main() -> None:
    """Print requests and events per CPU-second for each case, with their limits."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a case's name")
    args = rig.parse_arguments(parser, share=0.01, rounds=1)
    print(
        f"One core each for client and server; median of {args.rounds} rounds; CPU of the client "
        f"process,"
    )
    print("`recorder`: with our Parquet process added.\n")
    rows = []

    conclusions = []
    for name, full_case in CASES.items():
        if args.only not in name:
            continue
        case = full_case._replace(requests=round(full_case.requests * args.share))
        runs = [measure_once(case) for _ in range(args.rounds)]
        rows.append(format_row(name, case, runs))
        conclusions.append(judge_case(name, case, runs))

    columns = [
        "load",
        "requests/s",
        "requests/CPU-s",
        "recorder",
        "events/CPU-s",
        "reads/event",
        "client CPU",
        "server CPU",
        "remarks",
    ]
    print(rig.format_table(columns, rows))
    print()
    print("\n".join(conclusions))


if __name__ == "__main__":
    main()
