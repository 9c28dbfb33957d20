"""What the header of a run and its notes say about the nodes of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loadgen.cluster.clock_sync import TOLERATED_NS
from loadgen.cluster.remote_worker import RemoteWorker
from loadgen.core.results.manifest import Cluster, PlacedWorker

NS_PER_MS = 1e6
NS_PER_S = 1e9


def cluster_header(
    workers: Sequence[RemoteWorker], address: str, lost_nodes: Sequence[str]
) -> Cluster:
    """Return where the workers of a run are, and how well their clocks agree."""
    drifts_ns = [abs(one.drift_ns) for one in workers if one.drift_ns is not None]
    return Cluster(
        address=address,
        nodes=len({one.node.id for one in workers}),
        start_bound_ms=_milliseconds(max(one.offset.bound_ns for one in workers)),
        drift_ms=_milliseconds(max(drifts_ns)) if drifts_ns else None,
        lost=tuple(lost_nodes),
        workers=tuple(
            PlacedWorker(
                worker=one.index,
                node=one.node.name,
                address=one.node.address,
                offset_ms=_milliseconds(one.offset.ns),
                bound_ms=_milliseconds(one.offset.bound_ns),
                lost=one.is_lost,
                hot_path=one.hot_path,
            )
            for one in workers
        ),
    )


def _milliseconds(duration_ns: int) -> float:
    return round(duration_ns / NS_PER_MS, 4)


def cluster_notes(
    workers: Sequence[RemoteWorker], header: Cluster, start_ns: int, late_ns: int
) -> Iterator[str]:
    """Yield what a reader of the result should know about the nodes.

    Args:
        workers: The workers of the run.
        header: What `cluster_header` returned for them.
        start_ns: The start of the load on the monotonic clock of the driver.
        late_ns: How long after the start the last worker was told it.
    """
    for place in header.lost:
        yield f"{place} was lost before the load: all workers were on the nodes that were left"
    yield from _clock_notes(header)
    low_priority = sorted({one.place for one in workers if one.niceness > 0})
    if low_priority:
        yield (
            f"workers on {', '.join(low_priority)} have a low priority, as Ray starts them: "
            "set RAY_worker_niceness=0 before `ray start`"
        )
    if late_ns > 0:
        yield f"the last worker was told the start {late_ns / NS_PER_MS:.0f} ms after it"
    for one in workers:
        if one.is_lost:
            lost_after_s = one.lost_at_s - start_ns / NS_PER_S
            silent_s = one.lost_at_s - one.last_response_s
            yield (
                f"{one.lost_reason} {lost_after_s:.1f} s after the start, "
                f"seen {silent_s:.1f} s after its last answer"
            )


def _clock_notes(header: Cluster) -> Iterator[str]:
    limit_ms = TOLERATED_NS / NS_PER_MS
    if header.start_bound_ms > limit_ms:
        yield (
            f"the common start is known only within ±{header.start_bound_ms:.1f} ms, "
            f"limit {limit_ms:g} ms"
        )
    if header.drift_ms is not None and header.drift_ms > limit_ms:
        yield (
            f"the nodes' clocks drifted by up to {header.drift_ms:.1f} ms during the run, "
            f"limit {limit_ms:g} ms"
        )
