"""How many short requests, and how many events of a flood, does the client handle per CPU-second?

    python benchmarks/short.py [--only flood]

Closed loop. `paced`: concurrency 256 and 4 tokens per response, with time between the tokens, so
that each event is one read. `at full speed`: the same without pauses, so that the slower of client
and server sets the pace. `flood`: concurrency 64 and 500 tokens, about 50 events per write. The
window lasts from the first request to the last record. It takes some minutes and prints a table and
the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import rig


class Case(NamedTuple):
    """A closed-loop load whose cost has a limit.

    Attributes:
        server_options: The options of the endpoint.
        concurrency: The number of requests in flight.
        tokens: The tokens of each response.
        requests: The number of requests in all.
        limited_unit: Whether "requests" or "events" per CPU-second have a limit.
    """

    server_options: dict[str, Any]
    concurrency: int
    tokens: int
    requests: int
    limited_unit: str = "requests"


CASES = {
    "short, paced (4 tokens 2 ms apart)": Case(
        {"ttft": "normal:50ms,10ms", "itl": "2ms"}, concurrency=256, tokens=4, requests=20_000
    ),
    "short, at full speed": Case(
        {"ttft": "1ms", "itl": "0.1ms"}, concurrency=256, tokens=4, requests=30_000
    ),
    "flood (some 50 events per write)": Case(
        {"ttft": "1ms", "flood": True},
        concurrency=64,
        tokens=500,
        requests=6_000,
        limited_unit="events",
    ),
}

# The least that the client must handle per CPU-second, by the unit
MIN_PER_CPU_S = {"requests": 10_000, "events": 500_000}

COLUMNS = (
    "load",
    "requests/s",
    "requests/CPU-s",
    "with recorder",
    "events/CPU-s",
    "reads/event",
    "client CPU",
    "server CPU",
    "remarks",
)


def measure_once(case: Case) -> dict[str, Any]:
    """Run loadgen's client once, in a process of its own, and return what the load cost.

    The script of that process is `ours.py`. Raises SystemExit if a request failed or an event is
    missing.
    """
    # The server keeps idle connections open, so that no run pays for new ones.
    with rig.serve_endpoint(**case.server_options, idle_close="60s") as server:
        arguments = {
            "url": server.url,
            "requests": {"input_tokens": 20, "output_tokens": case.tokens},
            "concurrency": case.concurrency,
            "num_requests": case.requests,
        }
        run_client = partial(rig.run_contender, "ours.py", "load", arguments)
        result = rig.measure_client_and_server(server.url, run_client)

    expected_events = case.requests * case.tokens
    if result["ok"] != case.requests or result["events"] != expected_events:
        raise SystemExit(
            f"{result['ok']} of {case.requests} requests succeeded, with {result['events']} of "
            f"{expected_events} events"
        )
    return result


class CaseRuns:
    """A case and the results of its runs, one per round, each as `measure_once` returns it."""

    def __init__(self, name: str, case: Case, results: Sequence[dict[str, Any]]) -> None:
        self.name = name
        self.case = case
        self.results = results

    def median_of(self, compute: Callable[[dict[str, Any]], float]) -> float:
        """Return the median over all runs of a value that is computed from a result."""
        return rig.median([compute(result) for result in self.results])

    def median_per_cpu_s(self, unit: str) -> float:
        """Return the median of the "requests" or "events" per CPU-second of the client process."""
        return self.median_of(lambda result: result[unit] / result["cpu_s"])

    def describe_caveats(self) -> str:
        """Return the reasons for which a run cannot be taken at face value, or "".

        Several events per read are a reason only for short responses: in a flood, the server sends
        them together.
        """
        is_flood = self.case.limited_unit == "events"
        caveats = {
            rig.describe_caveats(result, expects_one_event_per_read=not is_flood)
            for result in self.results
        }
        return "; ".join(sorted(caveats - {""}))


def requests_per_cpu_s_with_recorder(result: dict[str, float]) -> float:
    """Return the requests per CPU-second, including the process that writes Parquet files."""
    return result["requests"] / (result["cpu_s"] + result["recorder_cpu_s"])


def format_case(runs: CaseRuns) -> list[str]:
    """Return the row of a case, with the median of each value over all runs."""
    requests_per_s = runs.median_of(lambda result: result["requests"] / result["wall_s"])
    reads_per_event = runs.median_of(lambda result: result["reads_per_event"])
    client_cpu = runs.median_of(lambda result: result["cpu_s"] / result["wall_s"])
    server_cpu = runs.median_of(lambda result: result["server_core_fraction"])
    return [
        runs.name,
        f"{requests_per_s:,.0f}",
        f"{runs.median_per_cpu_s('requests'):,.0f}",
        f"{runs.median_of(requests_per_cpu_s_with_recorder):,.0f}",
        f"{runs.median_per_cpu_s('events'):,.0f}",
        f"{reads_per_event:.3f}",
        f"{client_cpu:.0%}",
        f"{server_cpu:.0%}",
        runs.describe_caveats(),
    ]


def judge_case(runs: CaseRuns) -> str:
    """Return the line that says whether a case keeps its limit per CPU-second."""
    unit = runs.case.limited_unit
    per_cpu_s = runs.median_per_cpu_s(unit)
    verdict = rig.format_limit_check(per_cpu_s, MIN_PER_CPU_S[unit], is_upper_bound=False)
    return f"- {runs.name}: {per_cpu_s:,.0f} {unit} per CPU-second: {verdict}"


def main() -> None:
    """Print requests and events per CPU-second for each case, with their limits."""
    parser = rig.create_parser(__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a case's name")
    smoke_defaults = {"share": 0.01, "rounds": 1}
    args = rig.parse_arguments(parser, **smoke_defaults)

    print("One core for the client and one for the server. CPU is that of the client process;")
    print("`with recorder` adds the process that writes our Parquet files.")
    print(f"Median of {args.rounds} rounds.\n")

    measured_cases = []
    for name, full_case in CASES.items():
        if args.only in name:
            case = full_case._replace(requests=round(full_case.requests * args.share))
            results = [measure_once(case) for _ in range(args.rounds)]
            measured_cases.append(CaseRuns(name, case, results))

    print(rig.format_table(COLUMNS, [format_case(runs) for runs in measured_cases]))
    print()
    for runs in measured_cases:
        print(judge_case(runs))


if __name__ == "__main__":
    main()
