"""Compare workers on a Ray cluster with local workers, for `python benchmarks/scale.py ray`.

The same load runs alternately on two local workers and on two nodes of a Ray cluster on this
machine. CPU time is what the workers measure of themselves. The CPU time of Ray's own processes
(raylets, GCS, agents, and the actors that transfer the workers' files) is printed separately.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rig

from loadgen.core.execution.events import LoadStarted, RunEvent

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def start_cluster(nodes: int) -> Iterator[Any]:
    """Start a Ray cluster of this many one-CPU nodes and a head without CPUs.

    With 0 nodes, start only a head with two CPUs. The cluster ends with the `with` block.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    small = {"include_dashboard": False, "object_store_memory": 80_000_000}
    head = {"num_cpus": 0 if nodes else 2, "no_monitor": True}  # nothing grows or shrinks by itself

    ray_cluster = Cluster(initialize_head=False)
    try:
        _add_head_node(ray_cluster, small | head)
        for _ in range(nodes):
            ray_cluster.add_node(num_cpus=1, **small)
        yield ray_cluster
    finally:
        ray_cluster.shutdown()


def _add_head_node(ray_cluster: Any, options: dict[str, Any], attempts: int = 3) -> None:
    """Start the head of a Ray cluster, and try again if Ray gives up on a busy host.

    Ray waits 30 s for a node (`ray._private.node`), and this limit has no option. The second
    attempt is faster, because the files of Ray are in the page cache by then.
    """
    for attempt in range(1, attempts + 1):
        try:
            ray_cluster.add_node(**options)
        except Exception as error:  # Ray raises no more specific type
            if attempt == attempts or "timed out during startup" not in str(error):
                raise
        else:
            return


def read_ray_cpu_s() -> dict[str, float]:
    """Return the CPU-seconds so far of Ray's processes on this machine, by kind.

    The kinds are "actors" and "daemons" (raylets, GCS, agents).
    """
    cpu_s_by_kind: dict[str, float] = {"actors": 0.0, "daemons": 0.0}
    for process_dir in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may end meanwhile
            kind = find_ray_kind((process_dir / "cmdline").read_bytes())
            if kind:
                cpu_s_by_kind[kind] += read_cpu_s(process_dir)
    return cpu_s_by_kind


def find_ray_kind(command_line: bytes) -> str:
    """Return the kind of a process of Ray by its command line, or "" for another process."""
    if command_line.startswith(b"ray::"):
        return "actors"
    if b"/ray/" in command_line:
        return "daemons"
    return ""


# Fields of /proc/PID/stat that follow the name of the process; see proc(5)
USER_TICKS_FIELD, SYSTEM_TICKS_FIELD = 11, 12


def read_cpu_s(process_dir: Path) -> float:
    """Return the CPU-seconds of a process so far, from its folder in /proc."""
    # The name is in parentheses and may contain spaces.
    fields = (process_dir / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[USER_TICKS_FIELD]) + int(fields[SYSTEM_TICKS_FIELD])) * TICK_S


class RayCpuMeter:
    """Samples Ray's CPU time while a run sends its load, because actors end with the run."""

    def __init__(self) -> None:
        self.used = {"actors": 0.0, "daemons": 0.0}
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def begin(self, event: RunEvent) -> None:
        """Start to sample when the load starts."""
        if isinstance(event, LoadStarted):
            self._thread.start()

    def end(self) -> None:
        """Stop sampling."""
        self._over.set()
        self._thread.join()

    def shares(self) -> list[str]:
        """Return the fraction of one core by kind, or "not seen" if there was no sample."""
        return [
            f"{cpu_s / self.seconds:.1%}" if self.seconds else "not seen"
            for cpu_s in self.used.values()
        ]

    def _watch(self) -> None:
        """Sample once a second until `end` is called."""
        before, began = read_ray_cpu_s(), time.monotonic()
        while not self._over.wait(1.0):
            now = read_ray_cpu_s()
            if now["actors"] >= before["actors"] + self.used["actors"]:
                self.used = {kind: now[kind] - before[kind] for kind in now}
                self.seconds = time.monotonic() - began


ITL_MS = 80  # so that a stream has 12.5 events/s


MAX_COST_INCREASE = 0.03


def compare_with_local_workers(
    flags: argparse.Namespace, drive: Callable[..., Any], per_event: Callable[..., float]
) -> None:
    """Compare two local workers with two on a cluster, in alternate rounds.

    Args:
        flags: The options of `scale.py`.
        drive: Runs a load: `scale.run_load`.
        per_event: Returns the CPU-seconds per event of a summary.
    """
    events_per_stream_s = 1000 / ITL_MS
    streams = 2 * int(flags.rate / events_per_stream_s / 2)
    rows: list[list[str]] = []

    costs: dict[str, list[float]] = {"local": [], "Ray": []}
    with start_cluster(0 if flags.smoke else 2) as ray_cluster:
        for _ in range(flags.rounds):
            for placement in ("local", "Ray"):
                is_on_ray = placement == "Ray"
                meter = RayCpuMeter()
                summary, _ = drive(
                    workers=2,
                    servers=1,
                    streams=streams,
                    itl_ms=ITL_MS,
                    tokens=int(flags.seconds * events_per_stream_s),
                    ray=ray_cluster.address if is_on_ray else None,
                    on_drive=meter.begin,
                )
                meter.end()
                cost_s = per_event(summary)
                costs[placement].append(cost_s)
                events_per_s = summary.inter_chunk_ms.count / (summary.window.duration_s or 1)
                rows.append(
                    [
                        f"{placement}, {streams} streams",
                        f"{events_per_s:,.0f}",
                        f"{cost_s * 1e6:.2f}",
                        f"{summary.send_lag_ms.p99}",
                        *(meter.shares() if is_on_ray else ["", ""]),
                    ]
                )

    columns = [
        "two workers",
        "events/s",
        "µs/event",
        "send delay p99 ms",
        "actors, of a core",
        "Ray's daemons",
    ]
    print(rig.format_table(columns, rows))
    print(f"\n- {describe_increase(costs['local'], costs['Ray'])}")


def describe_increase(local_costs: list[float], ray_costs: list[float]) -> str:
    """Return how much more CPU workers use per event on Ray, and whether that keeps its limit."""
    increases = [ray / local - 1 for local, ray in zip(local_costs, ray_costs, strict=True)]
    median_increase = statistics.median(increases)
    spread = f"of {len(increases)} pairs, {min(increases):+.1%} to {max(increases):+.1%}"
    verdict = rig.format_limit_check(median_increase, MAX_COST_INCREASE, is_upper_bound=True)

    return (
        f"CPU per event in the workers, Ray against local: {median_increase:+.1%} ({spread}): "
        f"{verdict}"
    )
