"""The workers of a run on the nodes of a Ray cluster, as the driver controls them.

The worker processes and their shares of the load are the same as on one machine. The driver places
an agent for each worker, checks the nodes, starts all workers at the same time and copies their
files. If a node is lost before the load, all workers are placed again on the remaining nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import signal
from collections.abc import Iterator, Sequence
from time import monotonic, monotonic_ns
from typing import Any

from msgspec.structs import replace

from loadgen.cluster import node_facts
from loadgen.cluster.cluster_report import cluster_notes, describe_cluster
from loadgen.cluster.node_agent import Copy
from loadgen.cluster.node_facts import NodeFacts
from loadgen.cluster.ray_nodes import POLL_S, RayNodes, responding_nodes
from loadgen.cluster.remote_worker import RemoteWorker, WorkerLostError
from loadgen.core.errors import CombinedError, LoadgenError, UserError
from loadgen.core.execution import resource_limits, stop_signals
from loadgen.core.execution.backends import merge, worker
from loadgen.core.execution.events import Emit, LoadStarted, RunningLoad, WorkersPlaced
from loadgen.core.execution.plan import Job, Plan
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.execution.worker_resources import WorkerResult
from loadgen.core.results.manifest import Cluster

NODE_DEATH_S = 2.0
"""Time from the death of an agent to that of its node, if the node died."""
ATTEMPTS = 3
"""Attempts to start the workers if one does not respond on a node that does."""
HEAD_START_NS = 700_000_000
"""Time from the choice of the start to the start."""
END_S = 5.0
"""Longest wait for the agents to end their workers."""
PIECE_BYTES = 64 << 10
"""Size of the pieces of a pickled job: Ray sends arguments of up to 100 KB with the call."""


class WorkerGroup:
    """The workers on the nodes of a cluster. Call `place`, then `run`."""

    def __init__(self, nodes: RayNodes) -> None:
        self._nodes = nodes
        self._workers: list[RemoteWorker] = []

    @property
    def cores(self) -> int:
        """Number of workers that the cluster has CPUs for now."""
        return self._nodes.free_cpus

    # -- before the load

    async def place(self, plan: Plan, tell: Emit) -> list[str]:
        """Place an agent for each worker, check its node and return notes for the manifest.

        Raises CombinedError with the problems of all nodes, UserError if there are more workers
        than CPUs, and TargetError if all nodes were lost.
        """
        job = plan.job
        files = node_facts.files_of(job)
        packages = [plugin.package for plugin in job.plugins]
        local_facts = await asyncio.to_thread(node_facts.own_facts, files, packages)
        remote_facts = await self._place_agents(job, files, packages, tell)
        errors: list[LoadgenError] = []
        known: list[tuple[str, NodeFacts]] = []
        for remote_worker, facts in zip(self._workers, remote_facts, strict=True):
            if isinstance(facts, LoadgenError):
                errors.append(facts)
            else:
                known.append((remote_worker.place, facts))
                errors += node_facts.differences(local_facts, facts, remote_worker.place)
        if not errors:
            errors += _exceeded_limits(plan, known)
        elsewhere = node_facts.elsewhere(local_facts, known)
        errors += node_facts.unreachable(job, elsewhere, self._nodes.flag)
        if errors:
            raise CombinedError(list({str(error): error for error in errors}.values()))
        return list(node_facts.notes(job, elsewhere))

    async def _place_agents(
        self, job: Job, files: Sequence[str], packages: Sequence[str], tell: Emit
    ) -> list[NodeFacts | LoadgenError]:
        """Place the agents and return the facts about the node of each.

        If a node died meanwhile, all agents are placed again on the others.
        """
        while True:
            placements = await self._nodes.place_agents(job.settings.workers, tell)
            self._workers = [
                RemoteWorker(index, node, agent, Copy(job.folder, index))
                for index, (node, agent) in enumerate(placements)
            ]
            self._nodes.history.used = {remote.node.id: remote.place for remote in self._workers}
            facts = await asyncio.gather(
                *(remote.read_facts(files, packages) for remote in self._workers)
            )
            if (
                not any(isinstance(entry, LoadgenError) for entry in facts)
                or not await self._has_lost_node()
            ):
                return facts
            await self._end_all()

    async def _has_lost_node(self) -> bool:
        """Return whether the node of a worker does not respond any more.

        Such nodes are left out from now on.
        """
        await self._nodes.check_cluster()
        used = {remote.node.id: remote.node for remote in self._workers}
        deadline = monotonic() + NODE_DEATH_S
        while True:
            responding = {node.id for node in await responding_nodes(list(used.values()))}
            lost = used.keys() - responding
            if lost or monotonic() > deadline:
                break
            await asyncio.sleep(POLL_S)
        self._nodes.history.mark_lost(lost)
        return bool(lost)

    # -- the load

    async def run(self, plan: Plan, tell: Emit) -> WorkerResult:
        """Carry out a plan on the placed agents and return the sum of their shares.

        The unfinished slots of a worker that dies or is lost are recorded as `lost`. Signals are
        passed on to all workers, as `backends.local.run` does.

        Raises TargetError if the workers could not be started, and KeyboardInterrupt if a signal
        came before all had started.
        """
        job = plan.job
        counters = SharedCounters(job.folder / "spool" / worker.COUNTERS_FILE, job.settings.workers)
        follow_tasks: list[asyncio.Task[WorkerResult | None]] = []
        try:
            with stop_signals.abort_start_on_signal(lambda: self._send_signal(signal.SIGKILL)):
                follow_tasks += await self._start(plan, counters, tell)
            with stop_signals.on_stop_signal(self._send_signal):
                await stop_signals.raise_pending_interrupt()
                tell(WorkersPlaced(self._describe_cluster()))
                start_ns = monotonic_ns() + HEAD_START_NS
                load = RunningLoad(counters.sum, lambda: self._send_signal(signal.SIGINT))
                tell(LoadStarted(start_ns, load))
                await asyncio.gather(*(remote.send_start(start_ns) for remote in self._workers))
                late_ns = monotonic_ns() - start_ns
                shares = await asyncio.gather(*follow_tasks)
                total = merge.merge_results(plan, shares, self._reasons_of_death())
                await asyncio.gather(*(remote.measure_drift() for remote in self._responding()))
            cluster = self._describe_cluster()
            notes = cluster_notes(self._workers, cluster, start_ns, late_ns)
            return replace(total, notes=tuple(notes), cluster=cluster)
        finally:
            await _cancel(follow_tasks)
            counters.close()
            await self._end_workers()

    async def _start(
        self, plan: Plan, counters: SharedCounters, tell: Emit
    ) -> list[asyncio.Task[WorkerResult | None]]:
        """Start the workers and return the tasks that follow them.

        Workers that do not respond are placed again: on other nodes if their node died, and at most
        ATTEMPTS times if it did not.
        """
        data = pickle.dumps(plan.job)
        job_pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
        attempts = 0
        while True:
            attempts += 1
            try:
                return await self._prepare_workers(job_pieces, counters)
            except WorkerLostError:
                if not await self._has_lost_node() and attempts >= ATTEMPTS:
                    raise
                await self._end_all()
                await self.place(plan, tell)

    async def _prepare_workers(
        self, job_pieces: Sequence[bytes], counters: SharedCounters
    ) -> list[asyncio.Task[WorkerResult | None]]:
        """Start the worker processes, wait until they are ready and compare their clocks.

        Raises WorkerLostError, or another TargetError if a worker refuses its share.
        """
        follow_tasks: list[asyncio.Task[WorkerResult | None]] = []
        workers = self._workers
        try:
            await asyncio.gather(*(remote.start(len(workers), job_pieces) for remote in workers))
            follow_tasks += [
                asyncio.create_task(remote.follow(counters, self._stop_all)) for remote in workers
            ]
            await asyncio.gather(*(remote.ready for remote in workers))
            await asyncio.gather(*(remote.compare_clocks() for remote in workers))
        except BaseException:
            await _cancel(follow_tasks)
            raise
        return follow_tasks

    def _reasons_of_death(self) -> list[str]:
        """Return why each worker would be missing if it has reported no share."""
        return [remote.death_reason for remote in self._workers]

    def _describe_cluster(self) -> Cluster:
        lost_nodes = self._nodes.history.lost_since_last_run
        return describe_cluster(self._workers, self._nodes.address, lost_nodes)

    def _responding(self) -> list[RemoteWorker]:
        return [remote for remote in self._workers if not remote.is_lost]

    def _stop_all(self) -> None:
        for remote in self._workers:
            remote.stop()

    def _send_signal(self, number: int) -> None:
        for remote in self._workers:
            remote.send_signal(number)

    async def _end_workers(self) -> None:
        """End the worker processes and delete their files, but for those that are lost."""
        with contextlib.suppress(Exception):
            ends = [remote.end() for remote in self._responding()]
            await asyncio.wait_for(asyncio.gather(*ends, return_exceptions=True), END_S)

    async def _end_all(self) -> None:
        """End the workers and their actors, so that they can be placed again."""
        await self._end_workers()
        self._nodes.end_agents()


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _exceeded_limits(plan: Plan, known: Sequence[tuple[str, NodeFacts]]) -> Iterator[LoadgenError]:
    """Yield an error for each machine with too few open files or ports for its workers.

    Args:
        plan: The plan of the run.
        known: The place and the facts of the node of each worker.
    """
    total = resource_limits.count_connections(plan.schedule, plan.job.workload.max_in_flight)
    if total is None:
        return
    for loopback in dict.fromkeys(facts.loopback for _, facts in known):
        of_machine = [(place, facts) for place, facts in known if facts.loopback == loopback]
        place, facts = of_machine[0]
        demand = resource_limits.ConnectionDemand(
            total=math.ceil(total * len(of_machine) / len(known)),
            workers=len(of_machine),
            addresses=[result.target.address for result in plan.job.probe_results],
            source_addresses=0,
            is_simulated=False,
        )
        for error in resource_limits.limit_errors(demand, facts.room):
            yield UserError(
                error.code, f"on {place}: {error.what}", error.where, f"more nodes; {error.hint}"
            )
