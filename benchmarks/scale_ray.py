"""What a Ray cluster costs beside local workers, as `python benchmarks/scale.py ray`.

The same load on two local workers and on two nodes of a Ray cluster on this machine, in turn. CPU is what the workers
measure of themselves; what Ray's own processes use meanwhile (raylets, GCS, agents, and the actors that carry the
workers' files) is read from /proc and printed apart.
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
def cluster(nodes: int) -> Iterator[Any]:
    """A Ray cluster of this many nodes of a CPU each, the head beside them without one; of 0, a head with two."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    small = {"include_dashboard": False, "object_store_memory": 80_000_000}
    head = {"num_cpus": 0 if nodes else 2, "no_monitor": True}  # nothing grows or shrinks by itself
    made = Cluster(initialize_head=True, head_node_args=small | head)
    try:
        for _ in range(nodes):
            made.add_node(num_cpus=1, **small)
        yield made
    finally:
        made.shutdown()


def ray_cpu_s() -> dict[str, float]:
    """CPU so far of Ray's processes of this machine, by kind."""
    found: dict[str, float] = {"actors": 0.0, "daemons": 0.0}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes()
            kind = (
                "actors" if words.startswith(b"ray::") else "daemons" if b"/ray/" in words else ""
            )
            if kind:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                found[kind] += (int(fields[11]) + int(fields[12])) * TICK_S
    return found


class Meter:
    """Ray's CPU from the start of a run's load on, sampled, as actors end with their run."""

    def __init__(self) -> None:
        self.used = {"actors": 0.0, "daemons": 0.0}
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def begin(self, event: RunEvent) -> None:
        if isinstance(event, LoadStarted):
            self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def shares(self) -> list[str]:
        """Of a core, by kind; "not seen" where the load was over before the first sample."""
        return [
            f"{used / self.seconds:.1%}" if self.seconds else "not seen"
            for used in self.used.values()
        ]

    def _watch(self) -> None:
        before, began = ray_cpu_s(), time.monotonic()
        while not self._over.wait(1.0):
            now = ray_cpu_s()
            if now["actors"] >= before["actors"] + self.used["actors"]:
                self.used = {kind: now[kind] - before[kind] for kind in now}
                self.seconds = time.monotonic() - began


def compare(
    flags: argparse.Namespace, drive: Callable[..., Any], per_event: Callable[..., float]
) -> None:
    """Two local workers against two on a cluster, in turn."""
    rows: list[list[str]] = []
    cost: dict[str, list[float]] = {"local": [], "Ray": []}
    each = int(flags.rate * 0.08 / 2)
    with cluster(0 if flags.smoke else 2) as made:
        for _ in range(flags.rounds):
            for where, found in cost.items():
                meter = Meter()
                summary, _ = drive(
                    workers=2,
                    servers=1,
                    streams=2 * each,
                    itl_ms=80,
                    tokens=int(flags.seconds * 12.5),
                    ray=made.address if where == "Ray" else None,
                    on_drive=meter.begin,
                )
                meter.end()
                found.append(per_event(summary))
                steady = summary.inter_chunk_ms.count / (summary.window.duration_s or 1)
                rows.append(
                    [
                        f"{where}, {2 * each} streams",
                        f"{steady:,.0f}",
                        f"{per_event(summary) * 1e6:.2f}",
                        f"{summary.send_lag_ms.p99}",
                        *(meter.shares() if where == "Ray" else ["", ""]),
                    ]
                )
    print(
        rig.table(
            [
                "two workers",
                "events/s",
                "µs/event",
                "send lag p99 ms",
                "actors, of a core",
                "Ray's daemons",
            ],
            rows,
        )
    )
    more = [b / a - 1 for a, b in zip(cost["local"], cost["Ray"], strict=True)]
    middle = statistics.median(more)
    spread = f"of {len(more)} pairs, {min(more):+.1%} to {max(more):+.1%}"
    kept = rig.verdict(middle, 0.03, most=True)
    print(f"\n- CPU per event in the workers, Ray against local: {middle:+.1%} ({spread}): {kept}")
