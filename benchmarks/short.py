"""How many short requests, and how many events of a flood, does the client handle per CPU-second?

    python benchmarks/short.py [--only flood]

Closed loop. `paced`: concurrency 256 and 4 tokens per response, with time between the tokens, so
that each event is one read. `at full speed`: the same without pauses, so that the slower of client
and server sets the pace. `flood`: concurrency 64 and 500 tokens, about 50 events per write. The
window lasts from the first request to the last record. It takes some minutes and prints a table and
the limits.
"""

from __future__ import annotations

from typing import Any

import rig

REQUESTS_PER_CPU_S, EVENTS_PER_CPU_S = 10_000, 500_000
KEEP = {"idle_close": "60s"}
CASES: dict[
    str, tuple[dict[str, Any], int, int, int]
] = {  # options of the server, lanes, tokens, requests
    "short, paced (4 tokens 2 ms apart)": (
        {"ttft": "normal:50ms,10ms", "itl": "2ms"},
        256,
        4,
        20_000,
    ),
    "short, at full speed": ({"ttft": "1ms", "itl": "0.1ms"}, 256, 4, 30_000),
    "flood (some 50 events per write)": ({"ttft": "1ms", "flood": True}, 64, 500, 6_000),
}


def measure_once(
    options: dict[str, Any], concurrency: int, tokens: int, requests: int
) -> dict[str, Any]:
    """Run our client once against an endpoint with these options."""
    with rig.serve_endpoint(**options, **KEEP) as server:
        shape = {"input_tokens": 20, "output_tokens": tokens}
        arguments = {
            "url": server.url,
            "requests": shape,
            "concurrency": concurrency,
            "num_requests": requests,
        }
        result = rig.measure_with_server(
            server.url, lambda: rig.run_contender("ours.py", "drive", arguments)
        )
    if result["ok"] != requests or result["events"] != requests * tokens:
        raise SystemExit(
            f"{result['ok']} of {requests} requests ok, {result['events']} of {requests * tokens} "
            f"events"
        )
    return result


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
    rows, conclusions = [], []
    for name, (options, concurrency, tokens, requests) in CASES.items():
        if args.only not in name:
            continue
        runs = [
            measure_once(options, concurrency, tokens, round(requests * args.share))
            for _ in range(args.rounds)
        ]
        per_cpu = {
            unit: rig.median([run[unit] / run["cpu_s"] for run in runs])
            for unit in ("requests", "events")
        }
        requests_per_cpu_s_with_recorder = rig.median(
            [run["requests"] / (run["cpu_s"] + run["recorder_cpu_s"]) for run in runs]
        )
        rows.append(
            [
                name,
                f"{rig.median([run['requests'] / run['wall_s'] for run in runs]):,.0f}",
                f"{per_cpu['requests']:,.0f}",
                f"{requests_per_cpu_s_with_recorder:,.0f}",
                f"{per_cpu['events']:,.0f}",
                f"{rig.median([run['reads_per_event'] for run in runs]):.3f}",
                f"{rig.median([run['cpu_s'] / run['wall_s'] for run in runs]):.0%}",
                f"{rig.median([run['server_share'] for run in runs]):.0%}",
                "; ".join(
                    sorted(
                        {rig.describe_caveats(run, one_event_per_read=tokens == 4) for run in runs}
                        - {""}
                    )
                ),
            ]
        )
        unit, limit = (
            ("events", EVENTS_PER_CPU_S)
            if options.get("flood")
            else ("requests", REQUESTS_PER_CPU_S)
        )
        conclusions.append(
            f"- {name}: {per_cpu[unit]:,.0f} {unit}: "
            f"{rig.describe_limit(per_cpu[unit], limit, most=False)}"
        )
    columns = [
        "load",
        "requests/s",
        "requests/CPU-s",
        "recorder",
        "events/CPU-s",
        "reads/event",
        "client CPU",
    ]
    print(rig.format_table([*columns, "server CPU", "remarks"], rows))
    print()
    print("\n".join(conclusions))


if __name__ == "__main__":
    main()
