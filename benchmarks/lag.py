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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np
import rig
from numpy.typing import ArrayLike, NDArray

from loadgen.core.results import store

# The start of a load, in which all connections are opened, is left out of some columns.
START_PHASE_NS = 500_000_000

NS_PER_US = 1e3
NS_PER_MS = 1e6
SERVER_OPTIONS = {"ttft": "normal:100ms,20ms", "itl": "10ms", "idle_close": "60s"}

FIRST_TIMER_DELAY_NS = 10_000_000
MIN_TIMER_GAP_NS, MAX_TIMER_GAP_NS = 500_000, 4_000_000

LOAD_COLUMNS = (
    "load",
    "requests",
    "send delay p50 / p99 / max, ms",
    "after 0.5 s",
    "on a reused connection",
    "new connections",
    "inter-arrival CV real / planned",
    "client CPU",
    "ready without a core",
    "remarks",
)
TIMER_COLUMNS = ("timer, idle loop", "late p50 / p99 / max, µs", "min", "early")


class Load(NamedTuple):
    """An open-loop load: requests per second, and the tokens of each response."""

    rate_per_s: float
    tokens: int


LOADS = (Load(50.0, 200), Load(125.0, 200), Load(200.0, 200), Load(1_000.0, 4), Load(3_000.0, 4))


class LoadResult(NamedTuple):
    """What a load cost, and the record of each of its requests in the order of sending.

    The fields of a record are times in ns since the start of the load: `due_ns` (scheduled),
    `ready_ns` (connection ready) and `sent_ns`. `reused` is 0 if a connection had to be opened.
    """

    usage: dict[str, Any]
    records: NDArray[np.void]


def run_load(load: Load, duration_s: float) -> LoadResult:
    """Send a load from a process of its own, and return what it cost and its request records."""
    with (
        tempfile.TemporaryDirectory(prefix="loadgen-lag-") as run_dir,
        rig.serve_endpoint(**SERVER_OPTIONS) as server,
    ):
        arguments = {
            "url": server.url,
            "folder": run_dir,
            "requests": {"input_tokens": 20, "output_tokens": load.tokens},
            "request_rate": load.rate_per_s,
            "duration": duration_s,
        }
        run_client = partial(rig.run_contender, "ours.py", "load", arguments)
        usage = rig.measure_client_and_server(server.url, run_client)
        records = store.read_run(Path(run_dir)).rows

    return LoadResult(usage, records[np.argsort(records["sent_ns"])])


def format_load(load: Load, result: LoadResult) -> list[str]:
    """Return the row of a load: its send delays, its arrival process, and the CPU of the client."""
    usage, records = result
    is_connection_reused = records["reused"] != 0
    send_delay_ns = records["sent_ns"] - records["due_ns"]
    is_after_start = records["due_ns"] >= START_PHASE_NS
    new_connections = int((is_after_start & ~is_connection_reused).sum())
    events_per_s = load.rate_per_s * load.tokens
    real_cv = inter_arrival_cv(records["sent_ns"])
    planned_cv = inter_arrival_cv(records["due_ns"])

    return [
        f"{load.rate_per_s:,.0f} requests/s, {events_per_s:,.0f} events/s",
        f"{len(records):,}",
        format_quantiles(send_delay_ns, NS_PER_MS),
        format_quantiles(send_delay_ns[is_after_start], NS_PER_MS),
        format_quantiles(send_delay_ns[is_after_start & is_connection_reused], NS_PER_MS),
        f"{new_connections:,}",
        f"{real_cv:.3f} / {planned_cv:.3f}",
        f"{usage['cpu_s'] / usage['wall_s']:.0%}",
        f"{usage['waited_s'] / usage['wall_s']:.1%}",
        rig.describe_caveats(usage),
    ]


def format_quantiles(values_ns: ArrayLike, ns_per_unit: float) -> str:
    """Return "p50 / p99 / max" in another unit than ns, or "-" if there are no values.

    Milliseconds have two decimal places, other units none.
    """
    values = np.asarray(values_ns, float) / ns_per_unit
    if not len(values):
        return "-"

    decimals = 2 if ns_per_unit == NS_PER_MS else 0
    quantiles = np.quantile(values, (0.5, 0.99, 1.0), method="inverted_cdf")
    return " / ".join(f"{quantile:.{decimals}f}" for quantile in quantiles)


def inter_arrival_cv(times_ns: NDArray[np.int64]) -> float:
    """Return the coefficient of variation of the gaps between times; it is 1 for Poisson."""
    gaps_ns = np.diff(np.sort(times_ns))
    return float(gaps_ns.std() / gaps_ns.mean())


class ReactorTimer:
    """Measures how late the timer of the SDK's reactor fires, which is a timerfd in its own poll.

    It fires once for each of `gaps_ns`. A gap is the time from one firing to the next due time; the
    first one is not used, because the timer first fires after FIRST_TIMER_DELAY_NS.
    """

    def __init__(self, gaps_ns: Sequence[int]) -> None:
        from loadgen_sdk.transport.reactor import Reactor

        loop = asyncio.get_running_loop()
        self._reactor = Reactor(loop)
        self._finished = loop.create_future()
        self._gaps_ns = gaps_ns
        self._lateness_ns: list[int] = []
        self._due_ns = 0

    async def measure(self) -> list[int]:
        """Return the lateness of each firing in ns; a negative value is early."""
        self._reactor.on_wake = self._on_wake
        self._set_timer(monotonic_ns() + FIRST_TIMER_DELAY_NS)
        await self._finished
        self._reactor.shut_down()
        return self._lateness_ns

    def _set_timer(self, due_ns: int) -> None:
        """Let the reactor wake at a time on the monotonic clock."""
        self._due_ns = due_ns
        self._reactor.wake_at(due_ns)

    def _on_wake(self, _now_ns: int) -> None:
        """Record how late the timer fired, and set it again."""
        from loadgen_sdk.transport.reactor import FOREVER

        now_ns = monotonic_ns()
        if now_ns < self._due_ns:
            return  # the reactor woke for another reason

        self._lateness_ns.append(now_ns - self._due_ns)
        firing_count = len(self._lateness_ns)
        if firing_count < len(self._gaps_ns):
            self._set_timer(now_ns + self._gaps_ns[firing_count])
        else:
            self._reactor.wake_at(FOREVER)
            self._finished.set_result(None)


class LoopTimer:
    """Measures how late `call_at` of the running event loop calls, once for each of `gaps_ns`.

    A gap is the time from one call to the next due time. The first call is made directly, to start
    the chain, so the first gap is not used.
    """

    def __init__(self, gaps_ns: Sequence[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished = self._loop.create_future()
        self._gaps_ns = gaps_ns
        self._lateness_ns: list[int] = []

    async def measure(self) -> list[int]:
        """Return the lateness of each call in ns, without the first; a negative value is early."""
        self._on_call(monotonic_ns())
        await self._finished
        return self._lateness_ns[1:]

    def _on_call(self, due_ns: int) -> None:
        """Record how late the loop called, and schedule the next call."""
        now_ns = monotonic_ns()
        self._lateness_ns.append(now_ns - due_ns)

        call_count = len(self._lateness_ns)
        if call_count == len(self._gaps_ns):
            self._finished.set_result(None)
            return

        # `call_at` takes the time of the loop, which has another origin than the monotonic clock.
        next_due_ns = now_ns + self._gaps_ns[call_count]
        delay_s = (next_due_ns - monotonic_ns()) / 1e9
        self._loop.call_at(self._loop.time() + delay_s, self._on_call, next_due_ns)


def measure_timers(count: int) -> dict[str, list[int]]:
    """Return the lateness in ns of two timers that fire about `count` times, by their names.

    Each runs alone in a uvloop event loop. Both get the same random gaps of some milliseconds.
    """
    import uvloop

    random = np.random.default_rng(1)
    gaps_ns: list[int] = random.integers(MIN_TIMER_GAP_NS, MAX_TIMER_GAP_NS, count).tolist()

    async def measure_reactor() -> list[int]:
        return await ReactorTimer(gaps_ns).measure()

    async def measure_call_at() -> list[int]:
        return await LoopTimer(gaps_ns).measure()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        reactor_lateness_ns = runner.run(measure_reactor())

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        call_at_lateness_ns = runner.run(measure_call_at())

    return {"timer of the reactor": reactor_lateness_ns, "call_at of uvloop": call_at_lateness_ns}


def format_timer(name: str, lateness_ns: Sequence[int]) -> list[str]:
    """Return the row of a timer: quantiles and minimum of its lateness, and how often it is early.

    Times are in microseconds.
    """
    early_fraction = sum(late_ns < 0 for late_ns in lateness_ns) / len(lateness_ns)
    return [
        name,
        format_quantiles(lateness_ns, NS_PER_US),
        f"{min(lateness_ns) / NS_PER_US:.0f}",
        f"{early_fraction:.0%}",
    ]


def main() -> None:
    """Print the send delays of each load and the lateness of the bare timers."""
    parser = rig.create_parser(__doc__, offers_realtime_priority=True)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each load")
    parser.add_argument(
        "--loads", type=int, default=len(LOADS), help="how many of the loads to run, from the first"
    )
    parser.add_argument(
        "--instants", type=int, default=2_000, help="how often each bare timer fires"
    )
    smoke_defaults = {"seconds": 1.0, "loads": 1, "instants": 50}
    args = rig.parse_arguments(parser, **smoke_defaults)

    print(f"One core each for client and endpoint; {args.seconds:g} s of Poisson arrivals.\n")
    load_rows = [format_load(load, run_load(load, args.seconds)) for load in LOADS[: args.loads]]
    print(rig.format_table(LOAD_COLUMNS, load_rows))
    print()

    client_cores = rig.assign_cores().client
    rig.pin_process(0, client_cores)
    timers = measure_timers(args.instants)
    timer_rows = [format_timer(name, lateness_ns) for name, lateness_ns in timers.items()]
    print(rig.format_table(TIMER_COLUMNS, timer_rows))


if __name__ == "__main__":
    main()
