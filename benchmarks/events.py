"""How much CPU time does an event cost with many streams, compared with other clients?

    python benchmarks/events.py [--alone] [--streams 256,1024] [--only baseline,ours]

The contenders are a bare byte counter, this client, an aiohttp line loop and AsyncOpenAI. The
server sends one event per write; below saturation, a client reads one event at a time. Each
contender is a process on one core, with the server on another. CPU time is the contender's own
(getrusage) from the first request to the last byte. Rounds are interleaved and ratios are taken
within a round, because the speed of the machine changes from minute to minute. It takes some
minutes and prints a table and the limits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import rig

CONTENDERS = {
    "baseline": "contenders.py",
    "ours": "ours.py",
    "lines": "contenders.py",
    "openai": "contenders.py",
}
NAMES = {
    "baseline": "asyncio.Protocol, adds up lengths",
    "ours": "this client, decoding and records",
    "lines": "aiohttp lines, json.loads",
    "openai": "AsyncOpenAI stream",
}
# Events/s: where cost matters; a wake-up serves more events there than at 10,000, for everybody
EVENTS_PER_S = 25_000.0
RATE_FRACTIONS = {"openai": 0.08}  # of that rate: it is saturated long before the others
MOST_OF_BASELINE, LEAST_OF_OPENAI, LEAST_OF_LINES = 1.7, 15.0, 3.0  # ratios of CPU per event


def run_once(name: str, streams: int, rate: float, seconds: float) -> dict[str, object]:
    """Run one contender against an endpoint of its own and return its result."""
    rate *= RATE_FRACTIONS.get(name, 1.0)
    itl_ms = streams / rate * 1e3

    tokens = max(40, round(seconds * 1e3 / itl_ms))  # fewer would measure requests
    with rig.serve_endpoint(
        ttft=f"normal:{4 * itl_ms:.3f}ms,{itl_ms:.3f}ms", itl=f"{itl_ms:.4f}ms", idle_close="60s"
    ) as server:
        arguments = {"url": server.url, "streams": streams, "tokens": tokens}
        result = rig.measure_client_and_server(
            server.url, lambda: rig.run_contender(CONTENDERS[name], name, arguments)
        )

    if result["events"] != result["expected"]:
        raise SystemExit(f"{name} read {result['events']} of {result['expected']} events")

    return result


class ContenderRuns:
    """The runs of one contender, one per round, and what they cost.

    An event is bundled if the contender read it together with others. Bundled events are cheaper
    than they should be.
    """

    def __init__(self, name: str, runs: list[dict[str, Any]]) -> None:
        self.name = name
        self.runs = runs
        self.cpu_s_per_event = [run["cpu_s"] / run["events"] for run in runs]
        self.is_unbundled = [run["reads_per_event"] >= rig.MIN_READS_PER_EVENT for run in runs]

    def median_of(self, read: Callable[[dict[str, Any]], float]) -> float:
        """Return the median over all runs of what `read` computes of a run."""
        return rig.median([read(run) for run in self.runs])

    def ratios_to(self, other: ContenderRuns) -> list[float]:
        """Return the ratios of CPU per event of the rounds in which neither side bundled events."""
        rounds = zip(
            self.cpu_s_per_event,
            other.cpu_s_per_event,
            self.is_unbundled,
            other.is_unbundled,
            strict=True,
        )
        return [
            own_cost / other_cost
            for own_cost, other_cost, own_is_unbundled, other_is_unbundled in rounds
            if own_is_unbundled and other_is_unbundled
        ]


def measure_contenders(
    names: list[str], streams: int, rounds: int, rate: float, seconds: float
) -> dict[str, ContenderRuns]:
    """Run all contenders in turns, each once per round."""
    runs_by_name = rig.interleave_rounds(
        rounds, {name: partial(run_once, name, streams, rate, seconds) for name in names}
    )
    return {name: ContenderRuns(name, runs) for name, runs in runs_by_name.items()}


def format_row(contender: ContenderRuns, baseline: ContenderRuns | None, streams: int) -> list[str]:
    """Return the row of a contender, with its ratio to the baseline if that was measured."""
    cost_s = rig.median(contender.cpu_s_per_event)
    smallest_us = min(contender.cpu_s_per_event) * 1e6
    largest_us = max(contender.cpu_s_per_event) * 1e6

    with_recorder = ""
    if contender.name == "ours":
        cost_with_recorder_s = contender.median_of(
            lambda run: (run["cpu_s"] + run.get("recorder_cpu_s", 0)) / run["events"]
        )
        with_recorder = f"{1 / cost_with_recorder_s:,.0f}"

    ratios = contender.ratios_to(baseline) if baseline else []
    caveats = {rig.describe_caveats(run) for run in contender.runs}
    return [
        f"{NAMES[contender.name]}, {streams} streams",
        f"{contender.median_of(lambda run: run['events'] / run['wall_s']):,.0f}",
        f"{cost_s * 1e6:.2f}",
        f"{smallest_us:.1f} to {largest_us:.1f}",
        f"{1 / cost_s:,.0f}",
        with_recorder,
        f"{rig.median(ratios):.2f}" if ratios else "",
        f"{contender.median_of(lambda run: run['reads_per_event']):.2f}",
        f"{contender.median_of(lambda run: run['cpu_s'] / run['wall_s']):.0%}",
        f"{contender.median_of(lambda run: run['server_core_fraction']):.0%}",
        "; ".join(sorted(caveats - {""})),
    ]


class RatioLimit(NamedTuple):
    """A limit on the ratio of CPU per event between this client and another contender.

    If it is an upper bound, the ratio is ours to theirs, and theirs to ours otherwise.
    """

    contender: str
    limit: float
    is_upper_bound: bool


RATIO_LIMITS = (
    RatioLimit("baseline", MOST_OF_BASELINE, is_upper_bound=True),
    RatioLimit("lines", LEAST_OF_LINES, is_upper_bound=False),
    RatioLimit("openai", LEAST_OF_OPENAI, is_upper_bound=False),
)


def judge_ratio(
    ratio_limit: RatioLimit, ours: ContenderRuns, other: ContenderRuns, rounds: int
) -> str:
    """Return the sentence that says whether a ratio keeps its limit."""
    name = NAMES[other.name]
    if ratio_limit.is_upper_bound:
        ratios = ours.ratios_to(other)
        comparison = "the CPU per event of"
    else:
        ratios = other.ratios_to(ours)
        comparison = "fewer CPU-seconds per event than"

    if not ratios:
        return f"not judged beside {name}: events were bundled"

    ratio = rig.median(ratios)
    verdict = rig.format_limit_check(
        ratio, ratio_limit.limit, is_upper_bound=ratio_limit.is_upper_bound
    )
    return f"{ratio:.2f}x {comparison} {name}: {verdict} ({len(ratios)} of {rounds} rounds)"


def judge_limits(contenders: dict[str, ContenderRuns], rounds: int) -> list[str]:
    """Return a sentence for each limit whose contenders were measured."""
    ours = contenders.get("ours")
    if ours is None:
        return []

    return [
        judge_ratio(ratio_limit, ours, contenders[ratio_limit.contender], rounds)
        for ratio_limit in RATIO_LIMITS
        if ratio_limit.contender in contenders
    ]


def main() -> None:
    """Print the CPU per event of each contender and the ratios between them."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument("--streams", default="256,1024")
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=EVENTS_PER_S, help="events/s")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each contender in a round")
    args = rig.parse_arguments(parser, streams="16", rounds=1, rate=2_000.0, seconds=0.5)
    names = [name for name in CONTENDERS if name in args.only.split(",")]
    print(
        f"One core each for client and server; median of {args.rounds} interleaved rounds of "
        f"{args.seconds:g} s;"
    )
    print(
        "CPU-seconds of the client process; ratios within a round. `recorder`: with our Parquet "
        "process added.\n"
    )
    rows = []

    conclusions = []
    for streams in map(int, args.streams.split(",")):
        contenders = measure_contenders(names, streams, args.rounds, args.rate, args.seconds)
        baseline = contenders.get("baseline")
        rows += [format_row(contender, baseline, streams) for contender in contenders.values()]
        sentences = judge_limits(contenders, args.rounds)
        conclusions += [f"- {streams} streams: {sentence}" for sentence in sentences]

    columns = [
        "contender",
        "events/s",
        "µs/event",
        "range",
        "events/CPU-s",
        "recorder",
        "vs baseline",
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
