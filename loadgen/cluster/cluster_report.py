"""The entry about the nodes of a cluster in run.json, and the notes about them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.cluster.clock_sync import MAX_CLOCK_ERROR_NS
from loadgen.cluster.remote_worker import RemoteWorker
from loadgen.core.results.manifest import Cluster, PlacedWorker

NS_PER_MS = 1e6
NS_PER_S = 1e9


def describe_cluster(
    workers: Sequence[RemoteWorker], address: str, lost_nodes: Sequence[str]
) -> Cluster:
    """Return the entry of run.json about the nodes: where workers ran, and how well clocks agreed.

    The start time is translated into the clock of each node, whose offset is known up to a bound.
    The largest bound is how far apart the workers may have started. The drift is the largest change
    of an offset during the run.

    Args:
        workers: The workers of the run.
        address: The address of the cluster, as in the option `--ray`.
        lost_nodes: The labels of the nodes that were lost before the load.
    """
    max_bound_ns = max(worker.clock_offset.bound_ns for worker in workers)
    drifts_ns = [abs(worker.drift_ns) for worker in workers if worker.drift_ns is not None]
    return Cluster(
        address=address,
        nodes=len({worker.node.id for worker in workers}),
        start_bound_ms=_to_ms(max_bound_ns),
        drift_ms=_to_ms(max(drifts_ns)) if drifts_ns else None,
        lost=tuple(lost_nodes),
        workers=tuple(_describe_worker(worker) for worker in workers),
    )


def _describe_worker(worker: RemoteWorker) -> PlacedWorker:
    """Return the entry of run.json about one worker: its node and the clock offset of the node."""
    return PlacedWorker(
        worker=worker.index,
        node=worker.node.name,
        address=worker.node.address,
        offset_ms=_to_ms(worker.clock_offset.offset_ns),
        bound_ms=_to_ms(worker.clock_offset.bound_ns),
        lost=worker.is_lost,
        hot_path=worker.hot_path,
    )


def _to_ms(duration_ns: int) -> float:
    return round(duration_ns / NS_PER_MS, 4)


def cluster_notes(
    workers: Sequence[RemoteWorker], cluster: Cluster, start_ns: int, start_delay_ns: int
) -> Iterator[str]:
    """Yield warnings about the nodes of a run, which the manifest of the run stores.

    Args:
        workers: The workers of the run.
        cluster: What `describe_cluster` returned for them.
        start_ns: The start of the load on the monotonic clock of the driver.
        start_delay_ns: How long after the start the last worker received the start time.
    """
    for node_label in cluster.lost:
        yield f"{node_label} was lost before the load. All workers ran on the remaining nodes."

    yield from _clock_notes(cluster)
    yield from _priority_notes(workers)

    if start_delay_ns > 0:
        yield (
            f"The last worker got the start time {start_delay_ns / NS_PER_MS:.0f} ms too "
            "late, so the load began unevenly. Start again, or use fewer workers."
        )

    yield from _loss_notes(workers, start_ns / NS_PER_S)


def _priority_notes(workers: Sequence[RemoteWorker]) -> Iterator[str]:
    """Yield a warning if workers have a low priority, with which they may send late."""
    low_priority_nodes = sorted({worker.node.label for worker in workers if worker.niceness > 0})
    if low_priority_nodes:
        yield (
            f"Workers on {', '.join(low_priority_nodes)} run with a low priority, "
            "which is Ray's default. Set RAY_worker_niceness=0 before `ray start`."
        )


def _loss_notes(workers: Sequence[RemoteWorker], start_s: float) -> Iterator[str]:
    """Yield a warning for each worker that was lost during the load: when, and how it was noticed.

    `start_s` is the start of the load on the monotonic clock of the driver.
    """
    for worker in workers:
        if worker.loss is None:
            continue
        detected_s = worker.loss.detected_s
        yield (
            f"{worker.loss.reason} {detected_s - start_s:.1f} s after the start, "
            f"detected {detected_s - worker.last_response_s:.1f} s after its last response"
        )


def _clock_notes(cluster: Cluster) -> Iterator[str]:
    """Yield a warning if the clocks of the nodes differ too much to compare their event times.

    Before the load, the offset of each clock is known up to `start_bound_ms`. During the load,
    clocks drift apart by `drift_ms`. Both must be at most the length of a bin of the timelines, so
    that an event is counted in the right bin, or in the next one.
    """
    limit_ms = MAX_CLOCK_ERROR_NS / NS_PER_MS
    if cluster.start_bound_ms > limit_ms:
        yield (
            f"The clocks of the nodes agree only within ±{cluster.start_bound_ms:.1f} "
            f"ms (limit {limit_ms:g} ms), so the workers may have started that far "
            "apart. Synchronize the nodes by NTP or PTP."
        )

    if cluster.drift_ms is not None and cluster.drift_ms > limit_ms:
        yield (
            f"The clocks of the nodes drifted by up to {cluster.drift_ms:.1f} ms "
            f"during the run (limit {limit_ms:g} ms). Synchronize the nodes by NTP or "
            "PTP."
        )
