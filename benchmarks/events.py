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

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import rig


class Contender(NamedTuple):
    """A client that is compared: its description, and the file that runs it."""

    description: str
    file: str


CONTENDERS = {
    "baseline": Contender("asyncio.Protocol, adds up lengths", "contenders.py"),
    "ours": Contender("this client, decoding and records", "ours.py"),
    "lines": Contender("aiohttp lines, json.loads", "contenders.py"),
    "openai": Contender("AsyncOpenAI stream", "contenders.py"),
}

# Costs are compared at a high rate, at which they matter. At 10,000 events/s an event costs every
# client more, because each wake-up of the event loop serves fewer events.
EVENTS_PER_S = 25_000.0

# AsyncOpenAI is saturated long before the others, so it gets a fraction of the rate.
RATE_FRACTIONS = {"openai": 0.08}

MIN_TOKENS_PER_STREAM = 40  # with fewer tokens, the cost of a request would outweigh that of events

COLUMNS = (
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
)


class EventLoad(NamedTuple):
    """A load of many streams: their number, the events/s of all together, and its duration."""

    streams: int
    events_per_s: float
    duration_s: float


def run_contender_once(name: str, load: EventLoad) -> dict[str, Any]:
    """Run one contender against a server of its own, and return what it and the server used.

    Each stream gets an equal part of the events/s, with a constant time between its events. Raises
    SystemExit if the contender did not receive every event.
    """
    events_per_s = load.events_per_s * RATE_FRACTIONS.get(name, 1.0)
    itl_ms = load.streams / events_per_s * 1e3
    tokens = max(MIN_TOKENS_PER_STREAM, round(load.duration_s * 1e3 / itl_ms))

    # The first tokens come at different times, so that the streams are not in step.
    ttft = f"normal:{4 * itl_ms:.3f}ms,{itl_ms:.3f}ms"
    with rig.serve_endpoint(ttft=ttft, itl=f"{itl_ms:.4f}ms", idle_close="60s") as server:
        arguments = {"url": server.url, "streams": load.streams, "tokens": tokens}
        run_client = partial(rig.run_contender, CONTENDERS[name].file, name, arguments)
        result = rig.measure_client_and_server(server.url, run_client)

    if result["events"] != result["expected"]:
        raise SystemExit(f"{name} read {result['events']} of {result['expected']} events")
    return result


class ContenderRuns:
    """The results of one contender, one per round, and the CPU time per event in each of them."""

    def __init__(self, name: str, results: list[dict[str, Any]]) -> None:
        self.name = name
        self.description = CONTENDERS[name].description
        self.results = results
        self.cpu_s_per_event = [result["cpu_s"] / result["events"] for result in results]

    def reads_single_events(self, round_index: int) -> bool:
        """Return whether the contender read its events one by one in a round."""
        reads_per_event: float = self.results[round_index]["reads_per_event"]
        return reads_per_event >= rig.MIN_READS_PER_EVENT

    def median_of(self, compute: Callable[[dict[str, Any]], float]) -> float:
        """Return the median over all rounds of a value that is computed from a result."""
        return rig.median([compute(result) for result in self.results])

    def cost_ratios(self, other: ContenderRuns) -> list[float]:
        """Return this contender's CPU time per event divided by that of another, for each round.

        Rounds in which one of the two read several events at once are left out. An event is cheaper
        then, so the ratio would compare different work.
        """
        return [
            self.cpu_s_per_event[round_index] / other.cpu_s_per_event[round_index]
            for round_index in range(len(self.results))
            if self.reads_single_events(round_index) and other.reads_single_events(round_index)
        ]


def measure_contenders(names: list[str], load: EventLoad, rounds: int) -> dict[str, ContenderRuns]:
    """Run each contender once per round, in turn, and return the runs of each by its name."""
    results_by_name = rig.interleave_rounds(
        rounds, {name: partial(run_contender_once, name, load) for name in names}
    )
    return {name: ContenderRuns(name, results) for name, results in results_by_name.items()}


def events_per_cpu_s_with_recorder(result: Mapping[str, float]) -> float:
    """Return the events per CPU-second of a run of loadgen, with the CPU time of its recorder."""
    return result["events"] / (result["cpu_s"] + result["recorder_cpu_s"])


def format_contender(
    contender: ContenderRuns, baseline: ContenderRuns | None, streams: int
) -> list[str]:
    """Return the row of a contender, with its ratio to the baseline if that was measured."""
    costs_us = [cpu_s * 1e6 for cpu_s in contender.cpu_s_per_event]
    median_cost_us = rig.median(costs_us)

    with_recorder = ""
    if contender.name == "ours":
        with_recorder = f"{contender.median_of(events_per_cpu_s_with_recorder):,.0f}"

    ratio_to_baseline = ""
    ratios = contender.cost_ratios(baseline) if baseline else []
    if ratios:
        ratio_to_baseline = f"{rig.median(ratios):.2f}"

    events_per_s = contender.median_of(lambda result: result["events"] / result["wall_s"])
    reads_per_event = contender.median_of(lambda result: result["reads_per_event"])
    client_cpu = contender.median_of(lambda result: result["cpu_s"] / result["wall_s"])
    server_cpu = contender.median_of(lambda result: result["server_core_fraction"])
    caveats = {rig.describe_caveats(result) for result in contender.results}

    return [
        f"{contender.description}, {streams} streams",
        f"{events_per_s:,.0f}",
        f"{median_cost_us:.2f}",
        f"{min(costs_us):.1f} to {max(costs_us):.1f}",
        f"{1e6 / median_cost_us:,.0f}",
        with_recorder,
        ratio_to_baseline,
        f"{reads_per_event:.2f}",
        f"{client_cpu:.0%}",
        f"{server_cpu:.0%}",
        "; ".join(sorted(caveats - {""})),
    ]


class RatioLimit(NamedTuple):
    """A limit on the ratio of CPU time per event between this client and another contender.

    The ratio of an upper bound is ours to theirs, that of a lower bound theirs to ours.
    """

    other_name: str
    limit: float
    is_upper_bound: bool


RATIO_LIMITS = (
    RatioLimit("baseline", 1.7, is_upper_bound=True),
    RatioLimit("lines", 3.0, is_upper_bound=False),
    RatioLimit("openai", 15.0, is_upper_bound=False),
)


def judge_ratio(ratio_limit: RatioLimit, ours: ContenderRuns, other: ContenderRuns) -> str:
    """Return a sentence with the median ratio of two contenders and whether it keeps its limit.

    No ratio is judged if one of the two read several events at once in every round.
    """
    if ratio_limit.is_upper_bound:
        ratios = ours.cost_ratios(other)
        comparison = "the CPU per event of"
    else:
        ratios = other.cost_ratios(ours)
        comparison = "fewer CPU-seconds per event than"

    if not ratios:
        return f"not compared with {other.description}: several events came with one read"

    ratio = rig.median(ratios)
    verdict = rig.format_limit_check(
        ratio, ratio_limit.limit, is_upper_bound=ratio_limit.is_upper_bound
    )
    judged_rounds = f"{len(ratios)} of {len(ours.results)} rounds"
    return f"{ratio:.2f}x {comparison} {other.description}: {verdict} ({judged_rounds})"


def judge_ratios(contenders: Mapping[str, ContenderRuns]) -> list[str]:
    """Return a sentence for each limit whose two contenders were measured."""
    if "ours" not in contenders:
        return []

    return [
        judge_ratio(ratio_limit, contenders["ours"], contenders[ratio_limit.other_name])
        for ratio_limit in RATIO_LIMITS
        if ratio_limit.other_name in contenders
    ]


def main() -> None:
    """Print the CPU time per event of each contender and the ratios between them."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument("--streams", default="256,1024")
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=EVENTS_PER_S, help="events/s")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each contender in a round")
    smoke_defaults = {"streams": "16", "rounds": 1, "rate": 2_000.0, "seconds": 0.5}
    args = rig.parse_arguments(parser, **smoke_defaults)

    print("One core for the client and one for the server. CPU-seconds are of the client process;")
    print("the column `recorder` adds those of our process that writes Parquet files.")
    print(f"Median of {args.rounds} interleaved rounds of {args.seconds:g} s; ratios in a round.\n")

    selected = args.only.split(",")
    names = [name for name in CONTENDERS if name in selected]
    rows = []
    conclusions = []
    for streams in map(int, args.streams.split(",")):
        load = EventLoad(streams, args.rate, args.seconds)
        contenders = measure_contenders(names, load, args.rounds)
        baseline = contenders.get("baseline")
        rows += [format_contender(runs, baseline, streams) for runs in contenders.values()]
        conclusions += [f"- {streams} streams: {text}" for text in judge_ratios(contenders)]

    print(rig.format_table(COLUMNS, rows))
    print("\n" + "\n".join(conclusions))


if __name__ == "__main__":
    main()
