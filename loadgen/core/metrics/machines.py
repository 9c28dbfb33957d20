"""What each of the machines of a cluster did that sent a load, and what was lost with it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from loadgen.core.metrics.client_use import select_full_seconds
from loadgen.core.metrics.columns import LOST, JoinedColumns, drop_undefined
from loadgen.core.stats.quantiles import Distribution, distribution_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from loadgen.core.metrics.columns import Columns
    from loadgen.core.metrics.windows import Window
    from loadgen.core.results.manifest import PlacedWorker, RunManifest, WorkerSample


LOST_BEFORE_LOAD = "lost before the load"
LOST_UNDER_LOAD = "lost under load"


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
    reference_latency_ms: float | None,
    measured_stages: Sequence[Columns],
    samples: Sequence[WorkerSample],
) -> tuple[MachineSummary, ...]:
    """Return a summary of each machine that sent a part of the load of a cluster.

    Machines that were lost before the load are listed last. Returns an empty tuple if a single
    machine sent the load and none was lost.

    Args:
        manifest: The manifest of the run.
        window: The measurement window.
        reference_latency_ms: The p50 of TTFT, or of E2E if responses were not streamed. A request
            is late if its send was delayed by more than a share of it. None if it is not known.
        measured_stages: The records of each measured stage.
        samples: The samples that each worker took of itself.
    """
    if manifest.cluster is None:
        return ()

    workers_by_machine = _group_workers(manifest.cluster.workers)
    lost_machines = [
        MachineSummary(name=name, workers=0, state=LOST_BEFORE_LOAD)
        for name in manifest.cluster.lost
    ]

    machine_count = len(workers_by_machine) + len(lost_machines)
    if machine_count < 2:
        return ()

    allowed_lag_ns = _allowed_lag_ns(manifest, reference_latency_ms)
    requests = _ClusterRequests(measured_stages, allowed_lag_ns)
    full_seconds = select_full_seconds(samples, window)
    machines = [
        _summarize_machine(name, workers, requests, full_seconds)
        for name, workers in workers_by_machine.items()
    ]
    return (*machines, *lost_machines)


def _allowed_lag_ns(manifest: RunManifest, reference_latency_ms: float | None) -> float | None:
    """Return how long after its due time a request may be sent without being late.

    It is a share of a typical latency, and None if the latency is not known.
    """
    if reference_latency_ms is None:
        return None

    reference_latency_ns = reference_latency_ms * 1e6
    return manifest.limits.send_lag_share * reference_latency_ns


def _group_workers(workers: Sequence[PlacedWorker]) -> dict[str, list[PlacedWorker]]:
    """Return the workers of each machine, by its name and address."""
    workers_by_machine: dict[str, list[PlacedWorker]] = {}
    for worker in workers:
        machine_name = f"{worker.node} ({worker.address})"
        workers_by_machine.setdefault(machine_name, []).append(worker)

    return workers_by_machine


class _RequestCounts(NamedTuple):
    """The measured requests that the workers of one machine were to send.

    Attributes:
        scheduled: Their number.
        lost: How many of them were lost.
        late: How many of them were sent late. None if the limit is not known.
        send_lag_ms: How much later than due they were sent.
    """

    scheduled: int
    lost: int
    late: int | None
    send_lag_ms: Distribution


class _ClusterRequests:
    """The measured requests of all machines of a cluster, from which each machine is summarized."""

    def __init__(self, measured_stages: Sequence[Columns], allowed_lag_ns: float | None) -> None:
        """Read for each request its worker, whether it was lost, and how late it was sent.

        Args:
            measured_stages: The records of each measured stage.
            allowed_lag_ns: How long after its due time a request may be sent without being late.
                None if not known.
        """
        # Each column is read once, so a cache of the columns would only take memory.
        columns = JoinedColumns(measured_stages, only_ok=False, keeps_columns=False)
        self._worker_number = columns["worker"]
        self._is_lost: NDArray[np.bool_] = columns["status"] == LOST
        self._send_lag_ns = columns.measure("send_lag")  # how much later than due it was sent
        self._allowed_lag_ns = allowed_lag_ns

    def count_of_workers(self, worker_numbers: list[int]) -> _RequestCounts:
        """Return how many requests one machine was to send, and how late it sent them.

        Args:
            worker_numbers: The numbers of the workers of the machine, which are the processes that
                send its requests.
        """
        is_of_machine = np.isin(self._worker_number, worker_numbers)
        send_lag_ns = drop_undefined(self._send_lag_ns[is_of_machine])

        # Without an allowed lag, no request is known to be late.
        late_requests = None
        if self._allowed_lag_ns is not None:
            is_late = send_lag_ns > self._allowed_lag_ns
            late_requests = int(is_late.sum())

        return _RequestCounts(
            scheduled=int(is_of_machine.sum()),
            lost=int(self._is_lost[is_of_machine].sum()),
            late=late_requests,
            send_lag_ms=distribution_of(send_lag_ns),
        )


def _summarize_machine(
    name: str,
    workers: list[PlacedWorker],
    all_requests: _ClusterRequests,
    full_seconds: Sequence[WorkerSample],
) -> MachineSummary:
    """Return the summary of one machine: the use of its cores and the requests of its workers.

    Args:
        name: The name of the machine.
        workers: The workers of the machine.
        all_requests: The requests of all machines.
        full_seconds: The samples of all workers over full seconds of the measurement window.
    """
    worker_numbers = [placed_worker.worker for placed_worker in workers]
    requests = all_requests.count_of_workers(worker_numbers)
    cpu_use = _measure_cpu_use(worker_numbers, full_seconds)
    has_lost_worker = any(worker.lost for worker in workers)

    return MachineSummary(
        name=name,
        workers=len(workers),
        requests=requests.scheduled,
        lost=requests.lost,
        late=requests.late,
        send_lag_ms=requests.send_lag_ms,
        cores=cpu_use.cores,
        cpu_share_max=cpu_use.largest_share,
        state=LOST_UNDER_LOAD if has_lost_worker else "",
    )


class _CpuUse(NamedTuple):
    """The use of cores by the workers of a machine. None without any sample.

    Attributes:
        cores: The number of cores that they used together, on average.
        largest_share: The share of one core that a worker used in its busiest second.
    """

    cores: float | None
    largest_share: float | None


def _measure_cpu_use(
    worker_numbers: Sequence[int], full_seconds: Sequence[WorkerSample]
) -> _CpuUse:
    """Return how much of the cores some workers used.

    Two workers that used 0.5 and 0.7 of a core on average used 1.2 cores together.

    Args:
        worker_numbers: The numbers of the workers.
        full_seconds: The samples of all workers, each over one second.
    """
    mean_shares = []
    largest_shares = []
    for number in worker_numbers:
        shares = [sample.cpu_share for sample in full_seconds if sample.worker == number]
        if shares:
            mean_shares.append(sum(shares) / len(shares))
            largest_shares.append(max(shares))

    if not mean_shares:
        return _CpuUse(cores=None, largest_share=None)
    return _CpuUse(cores=sum(mean_shares), largest_share=max(largest_shares))
