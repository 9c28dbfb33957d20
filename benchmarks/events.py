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

from functools import partial
from typing import Any

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


def run_once(name: str, streams: int, rate: float, seconds: float) -> dict[str, Any]:
    """Run one contender against an endpoint of its own and return its result."""
    rate *= RATE_FRACTIONS.get(name, 1.0)
    itl_ms = streams / rate * 1e3
    tokens = max(40, round(seconds * 1e3 / itl_ms))  # fewer would measure requests
    with rig.serve_endpoint(
        ttft=f"normal:{4 * itl_ms:.3f}ms,{itl_ms:.3f}ms", itl=f"{itl_ms:.4f}ms", idle_close="60s"
    ) as server:
        arguments = {"url": server.url, "streams": streams, "tokens": tokens}
        result = rig.measure_with_server(
            server.url, lambda: rig.run_contender(CONTENDERS[name], name, arguments)
        )
    if result["events"] != result["expected"]:
        raise SystemExit(f"{name} read {result['events']} of {result['expected']} events")
    return result


def main() -> None:
    """Print the CPU per event of each contender and the ratios between them."""
    parser = rig.create_parser(__doc__, alone=True)
    parser.add_argument("--streams", default="256,1024")
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=EVENTS_PER_S, help="events/s")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each contender in a round")
    args = rig.parse_arguments(parser, streams="16", rounds=1, rate=2_000.0, seconds=0.5)
    rounds, seconds, rate = args.rounds, args.seconds, args.rate
    names = [name for name in CONTENDERS if name in args.only.split(",")]
    print(
        f"One core each for client and server; median of {rounds} interleaved rounds of "
        f"{seconds:g} s;"
    )
    print(
        "CPU-seconds of the client process; ratios within a round. `recorder`: with our Parquet "
        "process added.\n"
    )
    rows, conclusions = [], []
    for streams in map(int, args.streams.split(",")):
        results = rig.interleave_rounds(
            rounds, {name: partial(run_once, name, streams, rate, seconds) for name in names}
        )
        cpu_s_per_event = {
            name: [run["cpu_s"] / run["events"] for run in runs] for name, runs in results.items()
        }

        is_unbundled = {
            name: [run["reads_per_event"] >= rig.MIN_READS_PER_EVENT for run in runs]
            for name, runs in results.items()
        }

        def ratios(
            over: str,
            under: str,
            cpu_s_per_event: Any = cpu_s_per_event,
            is_unbundled: Any = is_unbundled,
        ) -> list[float]:
            """Return the ratios of the rounds in which both sides read one event at a time.

            Events that are read in bundles are cheaper than they should be.
            """
            pairs = zip(
                cpu_s_per_event[over],
                cpu_s_per_event[under],
                is_unbundled[over],
                is_unbundled[under],
                strict=True,
            )
            return [
                a / b
                for a, b, first_is_unbundled, second_is_unbundled in pairs
                if first_is_unbundled and second_is_unbundled
            ]

        for name in names:
            runs = results[name]
            with_recorder = rig.median(
                [(run["cpu_s"] + run.get("recorder_cpu_s", 0)) / run["events"] for run in runs]
            )
            baseline_ratios = ratios(name, "baseline") if "baseline" in names else []
            spread = (
                f"{min(cpu_s_per_event[name]) * 1e6:.1f} to {max(cpu_s_per_event[name]) * 1e6:.1f}"
            )
            rows.append(
                [
                    f"{NAMES[name]}, {streams} streams",
                    f"{rig.median([run['events'] / run['wall_s'] for run in runs]):,.0f}",
                    f"{rig.median(cpu_s_per_event[name]) * 1e6:.2f}",
                    spread,
                    f"{1 / rig.median(cpu_s_per_event[name]):,.0f}",
                    f"{1 / with_recorder:,.0f}" if name == "ours" else "",
                    f"{rig.median(baseline_ratios):.2f}" if baseline_ratios else "",
                    f"{rig.median([run['reads_per_event'] for run in runs]):.2f}",
                    f"{rig.median([run['cpu_s'] / run['wall_s'] for run in runs]):.0%}",
                    f"{rig.median([run['server_share'] for run in runs]):.0%}",
                    "; ".join(sorted({rig.describe_caveats(run) for run in runs} - {""})),
                ]
            )
        if "ours" in names:
            limits = (
                ("baseline", MOST_OF_BASELINE, True),
                ("lines", LEAST_OF_LINES, False),
                ("openai", LEAST_OF_OPENAI, False),
            )
            for second_is_unbundled, limit, most in limits:
                if second_is_unbundled in names:
                    values = (
                        ratios("ours", second_is_unbundled)
                        if most
                        else ratios(second_is_unbundled, "ours")
                    )
                    if not values:
                        conclusions.append(
                            f"- {streams} streams: not judged beside "
                            f"{NAMES[second_is_unbundled]}: events were bundled"
                        )
                        continue
                    value = rig.median(values)
                    comparison = (
                        "the CPU per event of" if most else "fewer CPU-seconds per event than"
                    )
                    line = (
                        f"{value:.2f}x {comparison} {NAMES[second_is_unbundled]}: "
                        f"{rig.describe_limit(value, limit, most=most)}"
                    )
                    line += f" ({len(values)} of {rounds} rounds)"
                    conclusions.append(f"- {streams} streams: {line}")
    columns = [
        "contender",
        "events/s",
        "µs/event",
        "range",
        "events/CPU-s",
        "recorder",
        "vs baseline",
        "reads/event",
    ]
    print(rig.format_table([*columns, "client CPU", "server CPU", "remarks"], rows))
    print()
    print("\n".join(conclusions))


if __name__ == "__main__":
    main()
