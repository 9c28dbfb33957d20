"""What each of the machines of a cluster did that sent a load, and what was lost with it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from loadgen.core.metrics.client_use import full_seconds_within
from loadgen.core.metrics.columns import LOST, UNDEFINED, JoinedColumns
from loadgen.core.stats.quantiles import Distribution, distribution_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.metrics.windows import Window
    from loadgen.core.results.manifest import PlacedWorker, RunManifest, WorkerSample


class MachineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One of the machines that sent the load: its measured requests.

    Attributes:
        name: The name with the address, which no other machine has.
        workers: The number of its workers, 0 if it was lost before the load.
        requests: The requests that its workers were to send.
        lost: Those of them that were lost.
        late: Those sent later than the limit `send_lag_share` of the p50 of TTFT, or of E2E.
        send_lag_ms: How much later than due its requests were sent.
        cores: The cores that its workers used, mean of the full seconds of the measurement window.
        cpu_share_max: The share of one core in the busiest second of one worker.
        state: "lost before the load", "lost under load", or "".
    """

    name: str
    workers: int
    requests: int | None = None
    lost: int | None = None
    late: int | None = None
    send_lag_ms: Distribution = Distribution()
    cores: float | None = None
    cpu_share_max: float | None = None
    state: str = ""


def summarize_machines(
    manifest: RunManifest,
    window: Window,
    scale_ms: float | None,
    measured: Sequence[Columns],
    samples: Sequence[WorkerSample],
) -> tuple[MachineSummary, ...]:
    """Return a summary of each machine of a cluster, also of those that were lost before the load.

    Returns an empty tuple if a single machine sent the load and none was lost.

    Args:
        manifest: The manifest of the run.
        window: The measurement window.
        scale_ms: The latency by which lateness is judged, see `run_evidence.LatenessScale`.
        measured: The measured records.
        samples: The samples that each worker took of itself.
    """
    if manifest.cluster is None:
        return ()
    workers_of_machine: dict[str, list[PlacedWorker]] = {}
    for worker in manifest.cluster.workers:
        machine_name = f"{worker.node} ({worker.address})"
        workers_of_machine.setdefault(machine_name, []).append(worker)
    lost_machines = [
        MachineSummary(name=name, workers=0, state="lost before the load")
        for name in manifest.cluster.lost
    ]
    if len(workers_of_machine) + len(lost_machines) < 2:
        return ()
    full_seconds = full_seconds_within(samples, window)
    late_ns = None if scale_ms is None else manifest.limits.send_lag_share * scale_ms * 1e6
    requests = _MachineRequests(measured, late_ns)
    machines = [
        _summarize_machine(name, workers, requests, full_seconds)
        for name, workers in workers_of_machine.items()
    ]
    return (*machines, *lost_machines)


class _MachineRequests:
    """The measured requests of all machines, from which those of one machine are selected."""

    def __init__(self, measured: Sequence[Columns], late_ns: float | None) -> None:
        """Take the records, and the send lag above which a request is late, None if unknown."""
        columns = JoinedColumns(measured, only_ok=False, keeps_columns=False)
        self._worker = columns["worker"]
        self._is_lost: NDArray[np.bool_] = columns["status"] == LOST
        self._send_lag_ns = columns.measure("send_lag")
        self._late_ns = late_ns

    def add_to_summary(self, machine: MachineSummary, worker_numbers: list[int]) -> MachineSummary:
        """Return the summary of a machine with the requests of its workers: their number and lag.

        Args:
            machine: The summary without requests.
            worker_numbers: The numbers of the workers on the machine.
        """
        is_selected = np.isin(self._worker, worker_numbers)
        send_lag_ns = self._send_lag_ns[is_selected & (self._send_lag_ns != UNDEFINED)]
        late = None if self._late_ns is None else int((send_lag_ns > self._late_ns).sum())
        return msgspec.structs.replace(
            machine,
            requests=int(is_selected.sum()),
            lost=int(self._is_lost[is_selected].sum()),
            late=late,
            send_lag_ms=distribution_of(send_lag_ns),
        )


def _summarize_machine(
    name: str,
    workers: list[PlacedWorker],
    requests: _MachineRequests,
    full_seconds: Sequence[WorkerSample],
) -> MachineSummary:
    """Return the summary of a machine: the use of its cores and the requests of its workers.

    The cores are the sum, over its workers, of the mean share of a core that each used.
    """
    worker_numbers = [worker.worker for worker in workers]
    cpu_shares_of_workers = [
        [sample.cpu_share for sample in full_seconds if sample.worker == number]
        for number in worker_numbers
    ]
    known_shares = [shares for shares in cpu_shares_of_workers if shares]
    machine = MachineSummary(
        name=name,
        workers=len(workers),
        cores=sum(sum(shares) / len(shares) for shares in known_shares) if known_shares else None,
        cpu_share_max=max(map(max, known_shares), default=None),
        state="lost under load" if any(worker.lost for worker in workers) else "",
    )
    return requests.add_to_summary(machine, worker_numbers)
