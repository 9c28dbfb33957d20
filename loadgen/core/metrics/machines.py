"""What each of the machines of a cluster that sent a load did, and what was lost with it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from loadgen.core.metrics.columns import LOST, UNDEFINED, JoinedColumns
from loadgen.core.metrics.validity import inside
from loadgen.core.stats.quantiles import Distribution, exact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.metrics.windows import Window
    from loadgen.core.results.manifest import Placed, RunManifest, WorkerSample


class MachineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One of the machines that sent the load: its measured requests."""

    name: str  # with its address; no other one has it
    workers: int  # 0: lost before the load
    requests: int | None = None  # those that its workers were to send
    lost: int | None = None  # of these
    late: int | None = (
        None  # sent later than the send lag may be: `send_lag_share` of TTFT p50, else of E2E p50
    )
    send_lag_ms: Distribution = Distribution()
    cores: float | None = (
        None  # that its workers used, on the mean of the full seconds of the measured window
    )
    cpu_share_max: float | None = None  # of one core, the busiest second of one worker
    state: str = ""  # lost before the load, lost under load; "": neither


def of_cluster(
    header: RunManifest,
    window: Window,
    scale_ms: float | None,
    measured: Sequence[Columns],
    seconds: Sequence[WorkerSample],
) -> tuple[MachineSummary, ...]:
    """Return a row for each machine; () if one alone sent, and none was lost.

    Args:
        header: The header of the run.
        window: The measured window.
        scale_ms: The latency by which lateness is judged, see `validity.LatenessScale`.
        measured: The measured records.
        seconds: The samples that each worker takes of itself.
    """
    if header.cluster is None:
        return ()
    machines: dict[str, list[Placed]] = {}
    for placed in header.cluster.workers:
        machines.setdefault(f"{placed.node} ({placed.address})", []).append(placed)
    gone = tuple(
        MachineSummary(name=name, workers=0, state="lost before the load")
        for name in header.cluster.lost
    )
    if len(machines) + len(gone) < 2:
        return ()
    limit_ns = None if scale_ms is None else header.limits.send_lag_share * scale_ms * 1e6
    rows = JoinedColumns(measured, ok=False, keep=False)
    worker, status, lag = rows["worker"], rows["status"], rows.measure("send_lag")
    full = inside(seconds, window)

    def of_rows(own: list[int]) -> dict[str, Any]:
        chosen = np.isin(worker, own)
        lags = lag[chosen & (lag != UNDEFINED)]
        late = None if limit_ns is None else int((lags > limit_ns).sum())
        lost = int((status[chosen] == LOST).sum())
        return {
            "requests": int(chosen.sum()),
            "lost": lost,
            "late": late,
            "send_lag_ms": exact(lags),
        }

    def of_one(name: str, workers: list[Placed]) -> MachineSummary:
        own = [placed.worker for placed in workers]
        shares = [[second.cpu_share for second in full if second.worker == one] for one in own]
        known = [share for share in shares if share]
        return MachineSummary(
            name=name,
            workers=len(own),
            cores=sum(sum(share) / len(share) for share in known) if known else None,
            cpu_share_max=max(map(max, known), default=None),
            state="lost under load" if any(placed.lost for placed in workers) else "",
            **of_rows(own),
        )

    return (*(of_one(name, workers) for name, workers in machines.items()), *gone)
