"""The entry about the nodes of a cluster in run.json, and the notes about them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.cluster.clock_sync import TOLERATED_NS
from loadgen.cluster.remote_worker import RemoteWorker
from loadgen.core.results.manifest import Cluster, PlacedWorker

NS_PER_MS = 1e6
NS_PER_S = 1e9


def describe_cluster(
    workers: Sequence[RemoteWorker], address: str, lost_nodes: Sequence[str]
) -> Cluster:
    """Return where the workers of a run are, and how well their clocks agree."""
    drifts_ns = [abs(worker.drift_ns) for worker in workers if worker.drift_ns is not None]
    return Cluster(
        address=address,
        nodes=len({worker.node.id for worker in workers}),
        start_bound_ms=_milliseconds(max(worker.offset.bound_ns for worker in workers)),
        drift_ms=_milliseconds(max(drifts_ns)) if drifts_ns else None,
        lost=tuple(lost_nodes),
        workers=tuple(
            PlacedWorker(
                worker=worker.index,
                node=worker.node.name,
                address=worker.node.address,
                offset_ms=_milliseconds(worker.offset.ns),
                bound_ms=_milliseconds(worker.offset.bound_ns),
                lost=worker.is_lost,
                hot_path=worker.hot_path,
            )
            for worker in workers
        ),
    )


def _milliseconds(duration_ns: int) -> float:
    return round(duration_ns / NS_PER_MS, 4)


def cluster_notes(
    workers: Sequence[RemoteWorker], cluster: Cluster, start_ns: int, late_ns: int
) -> Iterator[str]:
    """Yield what a reader of the result should know about the nodes.

    Args:
        workers: The workers of the run.
        cluster: What `describe_cluster` returned for them.
        start_ns: The start of the load on the monotonic clock of the driver.
        late_ns: How long after the start the last worker received the start time.
    """
    for place in cluster.lost:
        yield f"{place} was lost before the load. All workers ran on the remaining nodes."
    yield from _clock_notes(cluster)
    low_priority = sorted({worker.place for worker in workers if worker.niceness > 0})
    if low_priority:
        yield (
            f"Workers on {', '.join(low_priority)} have a low priority, because Ray starts them "
            "so. Set RAY_worker_niceness=0 before `ray start`."
        )
    if late_ns > 0:
        yield f"The last worker received the start time {late_ns / NS_PER_MS:.0f} ms too late."
    for worker in workers:
        if worker.is_lost:
            lost_after_s = worker.lost_at_s - start_ns / NS_PER_S
            silent_s = worker.lost_at_s - worker.last_response_s
            yield (
                f"{worker.lost_reason} {lost_after_s:.1f} s after the start, "
                f"detected {silent_s:.1f} s after its last response"
            )


def _clock_notes(cluster: Cluster) -> Iterator[str]:
    limit_ms = TOLERATED_NS / NS_PER_MS
    if cluster.start_bound_ms > limit_ms:
        yield (
            f"The clocks of the nodes agree only within ±{cluster.start_bound_ms:.1f} ms "
            f"(limit {limit_ms:g} ms), so the workers may have started that far apart."
        )
    if cluster.drift_ms is not None and cluster.drift_ms > limit_ms:
        yield (
            f"The clocks of the nodes drifted by up to {cluster.drift_ms:.1f} ms during the run "
            f"(limit {limit_ms:g} ms)."
        )
