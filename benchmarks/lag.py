"""How late are requests sent, and how late is the timer that sends them?

    python benchmarks/lag.py [--alone] [--seconds 10]

Poisson arrivals at growing loads. The table has the send delay (first byte handed to the kernel
minus scheduled time) of all requests, and without the first half second, which contains the start.
It also has the CV of the real gaps between requests (1.0 for Poisson). The second table shows two
bare timers in an idle loop: the reactor's (timerfd in its own poll) and `call_at` of uvloop; a
negative value is early. It takes about a minute.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
import rig

from loadgen.core.results import store

WARM_UP_NS = 500_000_000
ITL_MS = 10
LOADS = ((50.0, 200), (125.0, 200), (200.0, 200), (1_000.0, 4), (3_000.0, 4))  # requests/s, tokens


def format_quantiles(values_ns: Any, unit_ns: float) -> str:
    """Return "p50 / p99 / max" in the given unit, or "-" if there are no values."""
    if not len(values_ns):
        return "-"
    values = (
        np.quantile(np.asarray(values_ns, float), (0.5, 0.99, 1.0), method="inverted_cdf") / unit_ns
    )
    return " / ".join(f"{value:.2f}" if unit_ns == 1e6 else f"{value:.0f}" for value in values)


def measure_rate(rate: float, tokens: int, seconds: float) -> list[str]:
    """Run `rate` requests/s of `tokens` tokens each and return the row of the table."""
    options = {"ttft": "normal:100ms,20ms", "itl": f"{ITL_MS}ms", "idle_close": "60s"}
    with (
        tempfile.TemporaryDirectory(prefix="loadgen-lag-") as scratch,
        rig.serve_endpoint(**options) as server,
    ):
        requests = {"input_tokens": 20, "output_tokens": tokens}
        arguments = {"url": server.url, "folder": scratch, "requests": requests}
        load = {"request_rate": rate, "duration": seconds}
        result = rig.measure_with_server(
            server.url, lambda: rig.run_contender("ours.py", "drive", {**arguments, **load})
        )
        rows = store.read_run(Path(scratch)).rows
    rows = rows[np.argsort(rows["sent_ns"])]
    send_lag_ns = rows["sent_ns"] - rows["due_ns"]
    is_after_warm_up = rows["due_ns"] >= WARM_UP_NS
    connect_ns = (rows["ready_ns"] - rows["due_ns"])[is_after_warm_up & (rows["reused"] == 0)]
    gaps = [np.diff(np.sort(rows[name])) for name in ("due_ns", "sent_ns")]
    planned, real = (float(gap.std() / gap.mean()) for gap in gaps)
    return [
        f"{rate:,.0f} requests/s, {rate * tokens:,.0f} events/s",
        f"{len(rows):,}",
        format_quantiles(send_lag_ns, 1e6),
        format_quantiles(send_lag_ns[is_after_warm_up], 1e6),
        format_quantiles(send_lag_ns[is_after_warm_up & (rows["reused"] == 1)], 1e6),
        f"{len(connect_ns):,}",
        f"{real:.3f} / {planned:.3f}",
        f"{result['cpu_s'] / result['wall_s']:.0%}",
        f"{result['waited_s'] / result['wall_s']:.1%}",
        rig.describe_caveats(result),
    ]


def measure_timers(count: int) -> dict[str, list[int]]:
    """Return the lateness in ns of `count` instants about 2 ms apart, for two bare timers.

    Each timer runs alone in a uvloop event loop.
    """
    import uvloop
    from loadgen_sdk.transport.reactor import FOREVER, Reactor

    steps = np.random.default_rng(1).integers(500_000, 4_000_000, count).tolist()

    async def reactor() -> list[int]:
        """Measure the timer of the SDK's reactor."""
        loop = asyncio.get_running_loop()
        timer = Reactor(loop)
        finished = loop.create_future()
        lateness_ns: list[int] = []
        next_due_ns = [monotonic_ns() + 10_000_000]

        def wake(_: int) -> None:
            """Record how late the timer fired, and set the next instant."""
            now_ns = monotonic_ns()
            if now_ns < next_due_ns[0]:
                return
            lateness_ns.append(now_ns - next_due_ns[0])
            if len(lateness_ns) == count:
                timer.wake_at(FOREVER)
                finished.set_result(None)
                return
            next_due_ns[0] = now_ns + steps[len(lateness_ns)]
            timer.wake_at(next_due_ns[0])

        timer.on_wake = wake
        timer.wake_at(next_due_ns[0])
        await finished
        timer.shut_down()
        return lateness_ns

    async def call_at() -> list[int]:
        """Measure `call_at` of uvloop."""
        loop = asyncio.get_running_loop()
        finished = loop.create_future()
        lateness_ns: list[int] = []

        def fire(due_ns: int) -> None:
            """Record how late the call came, and schedule the next one."""
            now_ns = monotonic_ns()
            lateness_ns.append(now_ns - due_ns)
            if len(lateness_ns) == count:
                finished.set_result(None)
                return
            next_due_ns = now_ns + steps[len(lateness_ns)]
            loop.call_at(loop.time() + (next_due_ns - monotonic_ns()) / 1e9, fire, next_due_ns)

        fire(monotonic_ns())
        await finished
        return lateness_ns[1:]

    lateness = {}
    for name, run_timer in (("the wire's timer", reactor), ("uvloop's call_at", call_at)):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            lateness[name] = runner.run(run_timer())
    return lateness


def main() -> None:
    """Print the table of send delay by load and that of the bare timers."""
    parser = rig.create_parser(__doc__, alone=True)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--loads", type=int, default=len(LOADS), help="the first so many of them")
    parser.add_argument("--instants", type=int, default=2_000, help="of each bare timer")
    args = rig.parse_arguments(parser, seconds=1.0, loads=1, instants=50)
    print(f"One core each for client and endpoint; {args.seconds:g} s of Poisson arrivals.\n")
    columns = [
        "load",
        "requests",
        "send delay p50 / p99 / max, ms",
        "after 0.5 s",
        "on a used connection",
    ]
    columns += [
        "had to connect",
        "inter-arrival CV real / planned",
        "client CPU",
        "kept off its core",
        "remarks",
    ]
    print(
        rig.format_table(
            columns, [measure_rate(*load, args.seconds) for load in LOADS[: args.loads]]
        )
    )
    print()
    rig.pin_process(0, rig.client_and_server_cores()[0])
    rows = [
        [
            name,
            format_quantiles(lateness_ns, 1e3),
            f"{min(lateness_ns) / 1e3:.0f}",
            f"{sum(value < 0 for value in lateness_ns) / len(lateness_ns):.0%}",
        ]
        for name, lateness_ns in measure_timers(args.instants).items()
    ]
    print(rig.format_table(["timer, idle loop", "late p50 / p99 / max, µs", "min", "early"], rows))


if __name__ == "__main__":
    main()
