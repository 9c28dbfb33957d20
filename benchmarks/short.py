"""Requests per CPU-second with short answers, and events per CPU-second when a server floods.

    python benchmarks/short.py [--only flood]

Closed loop, 256 lanes, 4 tokens an answer: `paced` leaves time between the tokens, so that each event is a read of its
own; `at full speed` does not, and whichever of client and server is slower sets the pace. `flood`: 64 lanes, 500 tokens
an answer, some 50 events in one write. The window is the run from its first request to its last record.
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


def once(options: dict[str, Any], lanes: int, tokens: int, requests: int) -> dict[str, Any]:
    with rig.endpoint(**options, **KEEP) as server:
        shape = {"input_tokens": 20, "output_tokens": tokens}
        arguments = {
            "url": server.url,
            "requests": shape,
            "concurrency": lanes,
            "num_requests": requests,
        }
        found = rig.watched(server.url, lambda: rig.contend("ours.py", "drive", arguments))
    if found["ok"] != requests or found["events"] != requests * tokens:
        raise SystemExit(
            f"{found['ok']} of {requests} requests ok, {found['events']} of {requests * tokens} events"
        )
    return found


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="of the requests of each case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a case's name")
    flags = rig.given(parser, share=0.01, rounds=1)
    print(
        f"One core each for client and server; median of {flags.rounds} rounds; CPU of the client process,"
    )
    print("`recorder`: with our Parquet process added.\n")
    rows, ends = [], []
    for name, (options, lanes, tokens, requests) in CASES.items():
        if flags.only not in name:
            continue
        runs = [
            once(options, lanes, tokens, round(requests * flags.share)) for _ in range(flags.rounds)
        ]
        per_cpu = {
            what: rig.median([run[what] / run["cpu_s"] for run in runs])
            for what in ("requests", "events")
        }
        total = rig.median(
            [run["requests"] / (run["cpu_s"] + run["recorder_cpu_s"]) for run in runs]
        )
        rows.append(
            [
                name,
                f"{rig.median([run['requests'] / run['wall_s'] for run in runs]):,.0f}",
                f"{per_cpu['requests']:,.0f}",
                f"{total:,.0f}",
                f"{per_cpu['events']:,.0f}",
                f"{rig.median([run['reads_per_event'] for run in runs]):.3f}",
                f"{rig.median([run['cpu_s'] / run['wall_s'] for run in runs]):.0%}",
                f"{rig.median([run['server_share'] for run in runs]):.0%}",
                "; ".join(
                    sorted(
                        {rig.remarks(run, one_event_per_read=tokens == 4) for run in runs} - {""}
                    )
                ),
            ]
        )
        what, limit = (
            ("events", EVENTS_PER_CPU_S)
            if options.get("flood")
            else ("requests", REQUESTS_PER_CPU_S)
        )
        ends.append(
            f"- {name}: {per_cpu[what]:,.0f} {what}: {rig.verdict(per_cpu[what], limit, most=False)}"
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
    print(rig.table([*columns, "server CPU", "remarks"], rows))
    print()
    print("\n".join(ends))


if __name__ == "__main__":
    main()
