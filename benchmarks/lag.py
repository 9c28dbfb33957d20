"""How late requests are sent, and how late the timer under them is.

    python benchmarks/lag.py [--alone] [--seconds 10]

Poisson arrivals at growing loads: send lag (first byte handed to the kernel - due) over all requests and without the
first half second (what the start adds), and the variation of the real gaps (1.0 for Poisson). Below, the bare timers:
the wire's (timerfd in its own poll) and uvloop's `call_at` in an otherwise idle loop; below 0 is early.
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

WARM_NS = 500_000_000
ITL_MS = 10
LOADS = ((50.0, 200), (125.0, 200), (200.0, 200), (1_000.0, 4), (3_000.0, 4))  # requests/s, tokens


def quantiles(values_ns: Any, unit_ns: float) -> str:
    if not len(values_ns):
        return "-"
    found = (
        np.quantile(np.asarray(values_ns, float), (0.5, 0.99, 1.0), method="inverted_cdf") / unit_ns
    )
    return " / ".join(f"{value:.2f}" if unit_ns == 1e6 else f"{value:.0f}" for value in found)


def drive(rate: float, tokens: int, seconds: float) -> list[str]:
    """One row: `rate` requests/s of so many tokens."""
    options = {"ttft": "normal:100ms,20ms", "itl": f"{ITL_MS}ms", "idle_close": "60s"}
    with (
        tempfile.TemporaryDirectory(prefix="loadgen-lag-") as scratch,
        rig.endpoint(**options) as server,
    ):
        requests = {"input_tokens": 20, "output_tokens": tokens}
        arguments = {"url": server.url, "folder": scratch, "requests": requests}
        load = {"request_rate": rate, "duration": seconds}
        found = rig.watched(
            server.url, lambda: rig.contend("ours.py", "drive", {**arguments, **load})
        )
        rows = store.read_run(Path(scratch)).rows
    rows = rows[np.argsort(rows["sent_ns"])]
    lag = rows["sent_ns"] - rows["due_ns"]
    settled = rows["due_ns"] >= WARM_NS
    connect = (rows["ready_ns"] - rows["due_ns"])[settled & (rows["reused"] == 0)]
    gaps = [np.diff(np.sort(rows[name])) for name in ("due_ns", "sent_ns")]
    planned, real = (float(gap.std() / gap.mean()) for gap in gaps)
    return [
        f"{rate:,.0f} requests/s, {rate * tokens:,.0f} events/s",
        f"{len(rows):,}",
        quantiles(lag, 1e6),
        quantiles(lag[settled], 1e6),
        quantiles(lag[settled & (rows["reused"] == 1)], 1e6),
        f"{len(connect):,}",
        f"{real:.3f} / {planned:.3f}",
        f"{found['cpu_s'] / found['wall_s']:.0%}",
        f"{found['waited_s'] / found['wall_s']:.1%}",
        rig.remarks(found),
    ]


def timers(count: int) -> dict[str, list[int]]:
    """Lateness in ns of `count` instants some 2 ms apart, each timer alone in a uvloop loop."""
    import uvloop
    from loadgen_sdk.transport.reactor import FOREVER, Reactor

    steps = np.random.default_rng(1).integers(500_000, 4_000_000, count).tolist()

    async def reactor() -> list[int]:
        loop = asyncio.get_running_loop()
        timer = Reactor(loop)
        over = loop.create_future()
        late: list[int] = []
        due = [monotonic_ns() + 10_000_000]

        def wake(_: int) -> None:
            now = monotonic_ns()
            if now < due[0]:
                return
            late.append(now - due[0])
            if len(late) == count:
                timer.wake_at(FOREVER)
                over.set_result(None)
                return
            due[0] = now + steps[len(late)]
            timer.wake_at(due[0])

        timer.on_wake = wake
        timer.wake_at(due[0])
        await over
        timer.shut_down()
        return late

    async def call_at() -> list[int]:
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        late: list[int] = []

        def fire(due: int) -> None:
            now = monotonic_ns()
            late.append(now - due)
            if len(late) == count:
                over.set_result(None)
                return
            after = now + steps[len(late)]
            loop.call_at(loop.time() + (after - monotonic_ns()) / 1e9, fire, after)

        fire(monotonic_ns())
        await over
        return late[1:]

    found = {}
    for name, work in (("the wire's timer", reactor), ("uvloop's call_at", call_at)):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found[name] = runner.run(work())
    return found


def main() -> None:
    parser = rig.parser(__doc__, alone=True)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--loads", type=int, default=len(LOADS), help="the first so many of them")
    parser.add_argument("--instants", type=int, default=2_000, help="of each bare timer")
    flags = rig.given(parser, seconds=1.0, loads=1, instants=50)
    print(f"One core each for client and endpoint; {flags.seconds:g} s of Poisson arrivals.\n")
    columns = [
        "load",
        "requests",
        "send lag p50 / p99 / max, ms",
        "after 0.5 s",
        "on a used connection",
    ]
    columns += [
        "had to connect",
        "gap variation real / planned",
        "client CPU",
        "kept off its core",
        "remarks",
    ]
    print(rig.table(columns, [drive(*load, flags.seconds) for load in LOADS[: flags.loads]]))
    print()
    rig.settle(0, rig.cores()[0])
    rows = [
        [
            name,
            quantiles(late, 1e3),
            f"{min(late) / 1e3:.0f}",
            f"{sum(value < 0 for value in late) / len(late):.0%}",
        ]
        for name, late in timers(flags.instants).items()
    ]
    print(rig.table(["timer, idle loop", "late p50 / p99 / max, µs", "min", "early"], rows))


if __name__ == "__main__":
    main()
