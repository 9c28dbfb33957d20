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
from typing import Any, NamedTuple

import numpy as np
import rig
from numpy.typing import NDArray

from loadgen.core.results import store

WARM_UP_NS = 500_000_000
ITL_MS = 10


class Load(NamedTuple):
    """An open loop: requests per second, and the tokens of each response."""

    rate_per_s: float
    tokens: int


LOADS = (Load(50.0, 200), Load(125.0, 200), Load(200.0, 200), Load(1_000.0, 4), Load(3_000.0, 4))


def format_quantiles(values_ns: Any, unit_ns: float) -> str:
    """Return "p50 / p99 / max" in the given unit, or "-" if there are no values.

    Milliseconds (a unit of 1e6 ns) have two decimal places, other units none.
    """
    if not len(values_ns):
        return "-"
    quantiles_ns = np.quantile(
        np.asarray(values_ns, float), (0.5, 0.99, 1.0), method="inverted_cdf"
    )
    digits = 2 if unit_ns == 1e6 else 0
    return " / ".join(f"{value:.{digits}f}" for value in quantiles_ns / unit_ns)


def measure_rate(load: Load, seconds: float) -> list[str]:
    """Run a load and return its row of the table."""
    with tempfile.TemporaryDirectory(prefix="loadgen-lag-") as scratch:
        result = run_load(load, seconds, scratch)
        rows = store.read_run(Path(scratch)).rows

    rows = rows[np.argsort(rows["sent_ns"])]
    delay_ns = rows["sent_ns"] - rows["due_ns"]
    is_after_warm_up = rows["due_ns"] >= WARM_UP_NS
    has_connected = rows["reused"] == 0
    connect_ns = (rows["ready_ns"] - rows["due_ns"])[is_after_warm_up & has_connected]

    return [
        f"{load.rate_per_s:,.0f} requests/s, {load.rate_per_s * load.tokens:,.0f} events/s",
        f"{len(rows):,}",
        format_quantiles(delay_ns, 1e6),
        format_quantiles(delay_ns[is_after_warm_up], 1e6),
        format_quantiles(delay_ns[is_after_warm_up & ~has_connected], 1e6),
        f"{len(connect_ns):,}",
        f"{inter_arrival_cv(rows['sent_ns']):.3f} / {inter_arrival_cv(rows['due_ns']):.3f}",
        f"{result['cpu_s'] / result['wall_s']:.0%}",
        f"{result['waited_s'] / result['wall_s']:.1%}",
        rig.describe_caveats(result),
    ]


def run_load(load: Load, seconds: float, folder: str) -> dict[str, Any]:
    """Send a load from a process of its own into `folder`, and return what it cost."""
    options = {"ttft": "normal:100ms,20ms", "itl": f"{ITL_MS}ms", "idle_close": "60s"}
    with rig.serve_endpoint(**options) as server:
        arguments = {
            "url": server.url,
            "folder": folder,
            "requests": {"input_tokens": 20, "output_tokens": load.tokens},
            "request_rate": load.rate_per_s,
            "duration": seconds,
        }
        return rig.measure_client_and_server(
            server.url, lambda: rig.run_contender("ours.py", "drive", arguments)
        )


def inter_arrival_cv(times_ns: NDArray[np.int64]) -> float:
    """Return the coefficient of variation of the gaps between times; it is 1 for Poisson."""
    gaps_ns = np.diff(np.sort(times_ns))
    return float(gaps_ns.std() / gaps_ns.mean())


class ReactorTimer:
    """Measures how late the timer of the SDK's reactor (timerfd in its own poll) fires.

    The first time is 10 ms from now. `steps_ns` are the gaps to the following ones.
    """

    def __init__(self, steps_ns: list[int]) -> None:
        from loadgen_sdk.transport.reactor import FOREVER, Reactor

        loop = asyncio.get_running_loop()
        self._reactor = Reactor(loop)
        self._forever = FOREVER
        self._finished = loop.create_future()
        self._steps_ns = steps_ns
        self._lateness_ns: list[int] = []
        self._due_ns = monotonic_ns() + 10_000_000

    async def measure(self) -> list[int]:
        """Return the lateness of each time in ns; a negative value is early."""
        self._reactor.on_wake = self._wake
        self._reactor.wake_at(self._due_ns)
        await self._finished
        self._reactor.shut_down()
        return self._lateness_ns

    def _wake(self, _: int) -> None:
        """Record how late the timer fired, and set the next time."""
        now_ns = monotonic_ns()
        if now_ns < self._due_ns:
            return

        self._lateness_ns.append(now_ns - self._due_ns)
        if len(self._lateness_ns) == len(self._steps_ns):
            self._reactor.wake_at(self._forever)
            self._finished.set_result(None)
            return

        self._due_ns = now_ns + self._steps_ns[len(self._lateness_ns)]
        self._reactor.wake_at(self._due_ns)


class LoopTimer:
    """Measures how late `call_at` of the event loop calls.

    `steps_ns` are the gaps between the calls.
    """

    def __init__(self, steps_ns: list[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished = self._loop.create_future()
        self._steps_ns = steps_ns
        self._lateness_ns: list[int] = []

    async def measure(self) -> list[int]:
        """Return the lateness of each call in ns, without the first, which is made directly."""
        self._fire(monotonic_ns())
        await self._finished
        return self._lateness_ns[1:]

    def _fire(self, due_ns: int) -> None:
        """Record how late the call came, and schedule the next one."""
        now_ns = monotonic_ns()
        self._lateness_ns.append(now_ns - due_ns)

        if len(self._lateness_ns) == len(self._steps_ns):
            self._finished.set_result(None)
            return

        next_due_ns = now_ns + self._steps_ns[len(self._lateness_ns)]
        delay_s = (next_due_ns - monotonic_ns()) / 1e9
        self._loop.call_at(self._loop.time() + delay_s, self._fire, next_due_ns)


def measure_timers(count: int) -> dict[str, list[int]]:
    """Return the lateness in ns of `count` times about 2 ms apart, for two bare timers.

    Each timer runs alone in a uvloop event loop.
    """
    import uvloop

    steps_ns: list[int] = np.random.default_rng(1).integers(500_000, 4_000_000, count).tolist()

    async def measure_reactor() -> list[int]:
        return await ReactorTimer(steps_ns).measure()

    async def measure_call_at() -> list[int]:
        return await LoopTimer(steps_ns).measure()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        reactor_lateness_ns = runner.run(measure_reactor())

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        call_at_lateness_ns = runner.run(measure_call_at())

    return {"the wire's timer": reactor_lateness_ns, "uvloop's call_at": call_at_lateness_ns}


LOAD_COLUMNS = (
    "load",
    "requests",
    "send delay p50 / p99 / max, ms",
    "after 0.5 s",
    "on a used connection",
    "had to connect",
    "inter-arrival CV real / planned",
    "client CPU",
    "kept off its core",
    "remarks",
)


def format_timer(name: str, lateness_ns: list[int]) -> list[str]:
    """Return the row of a bare timer, in microseconds."""
    early_fraction = sum(late_ns < 0 for late_ns in lateness_ns) / len(lateness_ns)
    return [
        name,
        format_quantiles(lateness_ns, 1e3),
        f"{min(lateness_ns) / 1e3:.0f}",
        f"{early_fraction:.0%}",
    ]


def main() -> None:
    """Print the table of send delay by load and that of the bare timers."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each load")
    parser.add_argument(
        "--loads", type=int, default=len(LOADS), help="how many of the loads to run, from the first"
    )
    parser.add_argument(
        "--instants", type=int, default=2_000, help="how often each bare timer fires"
    )
    args = rig.parse_arguments(parser, seconds=1.0, loads=1, instants=50)
    print(f"One core each for client and endpoint; {args.seconds:g} s of Poisson arrivals.\n")
    rows = [measure_rate(load, args.seconds) for load in LOADS[: args.loads]]
    print(rig.format_table(LOAD_COLUMNS, rows))
    print()
    client_cores = rig.assign_cores().client
    rig.pin_process(0, client_cores)
    timers = measure_timers(args.instants)
    timer_rows = [format_timer(name, lateness_ns) for name, lateness_ns in timers.items()]
    columns = ["timer, idle loop", "late p50 / p99 / max, µs", "min", "early"]
    print(rig.format_table(columns, timer_rows))


if __name__ == "__main__":
    main()
