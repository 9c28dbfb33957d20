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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import rig
from scale_load import LoadResult, LoadSpec, run_load

from loadgen.core.execution.events import LoadStarted, RunEvent

NODE_OPTIONS = {"include_dashboard": False, "object_store_memory": 80_000_000}
MAX_HEAD_START_ATTEMPTS = 3


@contextlib.contextmanager
def start_cluster(nodes: int) -> Iterator[Any]:
    """Start a Ray cluster on this machine and yield its `ray.cluster_utils.Cluster`.

    It has a head without CPUs and this many nodes with one CPU each. With 0 nodes, it has only a
    head with two CPUs, which starts faster. The cluster ends with the `with` block.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    head_cpus = 0 if nodes else 2
    cluster = Cluster(initialize_head=False)
    try:
        start_head_node(cluster, head_cpus)
        for _ in range(nodes):
            cluster.add_node(num_cpus=1, **NODE_OPTIONS)
        yield cluster
    finally:
        cluster.shutdown()


def start_head_node(cluster: Any, num_cpus: int) -> None:
    """Start the head of a Ray cluster, and try again if it times out on a busy host.

    Ray waits 30 s for a node (`ray._private.node`), and no option changes this limit. The second
    attempt is faster, because the files of Ray are in the page cache by then.
    """
    for attempt in range(1, MAX_HEAD_START_ATTEMPTS + 1):
        try:
            # Without its monitor, the cluster adds and removes no nodes by itself.
            cluster.add_node(num_cpus=num_cpus, no_monitor=True, **NODE_OPTIONS)
        except Exception as error:  # Ray raises no more specific type
            is_timeout = "timed out during startup" in str(error)
            if not is_timeout or attempt == MAX_HEAD_START_ATTEMPTS:
                raise
        else:
            return


class RayCpu(NamedTuple):
    """CPU-seconds of Ray's processes: of its actors, and of its raylets, GCS and agents."""

    actors_s: float = 0.0
    daemons_s: float = 0.0


def read_ray_cpu() -> RayCpu:
    """Return the CPU-seconds that Ray's processes on this machine have used so far."""
    actors_s = 0.0
    daemons_s = 0.0
    for process_dir in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may end meanwhile
            command_line = (process_dir / "cmdline").read_bytes()
            if command_line.startswith(b"ray::"):
                actors_s += read_process_cpu_s(process_dir)
            elif b"/ray/" in command_line:
                daemons_s += read_process_cpu_s(process_dir)

    return RayCpu(actors_s, daemons_s)


# Positions in /proc/PID/stat after the name of the process; see proc(5)
USER_TICKS_INDEX = 11
SYSTEM_TICKS_INDEX = 12
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def read_process_cpu_s(process_dir: Path) -> float:
    """Return the CPU-seconds that a process has used so far, from its folder in /proc."""
    # The name is in parentheses and may contain spaces, so the fields are counted after it.
    _, _, after_name = (process_dir / "stat").read_text().rpartition(")")
    fields = after_name.split()
    ticks = int(fields[USER_TICKS_INDEX]) + int(fields[SYSTEM_TICKS_INDEX])
    return ticks / TICKS_PER_S


class RayCpuMeter:
    """Measures the CPU time that Ray's processes use while a run sends its load.

    It samples once a second, because the actors end with the run and their CPU time is unknown
    afterwards. `begin` is a listener of the run's events, and `end` is called after the run.
    """

    def __init__(self) -> None:
        self._used = RayCpu()
        self._elapsed_s = 0.0
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, daemon=True)

    def begin(self, event: RunEvent) -> None:
        """Start to sample when the load starts; other events are ignored."""
        if isinstance(event, LoadStarted):
            self._thread.start()

    def end(self) -> None:
        """Stop sampling."""
        self._is_stopped.set()
        self._thread.join()

    def format_core_fractions(self) -> list[str]:
        """Return the fractions of a core that actors and daemons used.

        Both are "not sampled" if the load ended before the first sample.
        """
        if not self._elapsed_s:
            return ["not sampled", "not sampled"]
        return [f"{cpu_s / self._elapsed_s:.1%}" for cpu_s in self._used]

    def _sample_until_stopped(self) -> None:
        """Update the used CPU time once a second, until the actors end or `end` is called."""
        at_start = read_ray_cpu()
        start_s = time.monotonic()
        while not self._is_stopped.wait(1.0):
            now = read_ray_cpu()
            actors_s = now.actors_s - at_start.actors_s
            has_actor_ended = actors_s < self._used.actors_s
            if not has_actor_ended:
                self._used = RayCpu(actors_s, now.daemons_s - at_start.daemons_s)
                self._elapsed_s = time.monotonic() - start_s


class RayTrial(NamedTuple):
    """A load on two workers, and the fractions of a core that Ray's processes used, as cells."""

    result: LoadResult
    ray_core_fractions: list[str]

    def format_cells(self) -> list[str]:
        """Return the cells of this load's row, after its title."""
        return [
            f"{self.result.events_per_s:,.0f}",
            f"{self.result.cpu_s_per_event * 1e6:.2f}",
            f"{self.result.summary.send_lag_ms.p99}",
            *self.ray_core_fractions,
        ]


WORKERS = 2
ITL_MS = 80  # so that each stream has 12.5 events/s
MAX_COST_INCREASE = 0.03  # of the CPU time per event, relative to local workers
NO_RAY_CELLS = ["", ""]  # the row of a local run has no CPU time of actors and daemons


def compare_with_local_workers(args: argparse.Namespace) -> None:
    """Compare two workers on a Ray cluster with two local ones, in alternate rounds.

    `args` are the options of `scale.py`: rounds, rate (events/s), seconds and smoke.
    """
    events_per_stream_s = 1000 / ITL_MS
    streams_per_worker = int(args.rate / events_per_stream_s / WORKERS)
    spec = LoadSpec(
        workers=WORKERS,
        streams=WORKERS * streams_per_worker,
        itl_ms=ITL_MS,
        tokens=int(args.seconds * events_per_stream_s),
    )
    nodes = 0 if args.smoke else WORKERS

    with start_cluster(nodes) as cluster:
        trials = rig.interleave_rounds(
            args.rounds,
            {
                "local": partial(run_local_trial, spec),
                "Ray": partial(run_ray_trial, spec, cluster.address),
            },
        )

    print(render_trials(trials, spec.streams))
    local_costs = [trial.result.cpu_s_per_event for trial in trials["local"]]
    ray_costs = [trial.result.cpu_s_per_event for trial in trials["Ray"]]
    print(f"\n- {describe_increase(local_costs, ray_costs)}")


def run_local_trial(spec: LoadSpec) -> RayTrial:
    """Run the load on workers of this machine, without Ray."""
    return RayTrial(run_load(spec), NO_RAY_CELLS)


def run_ray_trial(spec: LoadSpec, ray_address: str) -> RayTrial:
    """Run the load on a Ray cluster, and measure the CPU time of Ray's processes meanwhile."""
    meter = RayCpuMeter()
    ray_spec = replace(spec, ray_address=ray_address, listener=meter.begin)
    result = run_load(ray_spec)
    meter.end()
    return RayTrial(result, meter.format_core_fractions())


def render_trials(trials: dict[str, list[RayTrial]], streams: int) -> str:
    """Return a table with a row for each load; the keys say where the workers ran."""
    rows = []
    for placement, placement_trials in trials.items():
        title = f"{placement}, {streams} streams"
        rows += [[title, *trial.format_cells()] for trial in placement_trials]

    columns = [
        "two workers",
        "events/s",
        "CPU-µs per event",
        "send delay p99 ms",
        "Ray's actors, of a core",
        "Ray's daemons, of a core",
    ]
    return rig.format_table(columns, rows)


def describe_increase(local_costs: Sequence[float], ray_costs: Sequence[float]) -> str:
    """Return how much more CPU time per event workers use on Ray, and whether that is allowed.

    The costs are CPU-seconds per event of the runs, one of each for each round.
    """
    increases = [ray / local - 1 for local, ray in zip(local_costs, ray_costs, strict=True)]
    median_increase = statistics.median(increases)
    spread = f"{len(increases)} pairs, {min(increases):+.1%} to {max(increases):+.1%}"
    verdict = rig.format_limit_check(median_increase, MAX_COST_INCREASE, is_upper_bound=True)

    return (
        f"CPU per event of the workers on Ray, relative to local ones: "
        f"{median_increase:+.1%} ({spread}): {verdict}"
    )
