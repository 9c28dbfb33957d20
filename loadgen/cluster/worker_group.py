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
from collections import Counter
from collections.abc import Iterator, Sequence
from time import monotonic, monotonic_ns
from typing import Any

from msgspec.structs import replace

from loadgen.cluster import node_facts
from loadgen.cluster.cluster_report import cluster_notes, describe_cluster
from loadgen.cluster.node_agent import WorkerFileCopy
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
"""Longest time from the death of an agent to that of its node, if the node died."""
ATTEMPTS = 3
"""Attempts to start the workers if one does not respond on a node that does."""
HEAD_START_NS = 700_000_000
"""Time from sending the start time to the start, enough for every node to receive it."""
END_S = 5.0
"""Longest wait for the agents to end their workers."""
PIECE_BYTES = 64 << 10
"""Size of the pieces of a pickled job: Ray sends arguments of up to 100 KB with the call."""

FollowTask = asyncio.Task[WorkerResult | None]
"""The task that follows one worker, and has its result or None if it was lost or died."""


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

    async def place(self, plan: Plan, emit: Emit) -> list[str]:
        """Place an agent for each worker, check its node and return notes for the manifest.

        All nodes are checked before an error is raised, so that one command shows all problems.

        Args:
            plan: The plan of the run.
            emit: Called with an event if the agents have to wait for a node.

        Raises:
            CombinedError: Nodes cannot run a worker, differ from this machine, or cannot reach the
                target.
            UserError: There are more workers than CPUs.
            TargetError: All nodes were lost.
        """
        job = plan.job
        files = node_facts.list_input_files(job)
        packages = [plugin.package for plugin in job.plugins]
        local_facts = await asyncio.to_thread(node_facts.read_local_facts, files, packages)
        facts_or_errors = await self._place_agents(job, files, packages, emit)

        errors: list[LoadgenError] = []
        checked_nodes: list[tuple[str, NodeFacts]] = []
        for remote, facts in zip(self._workers, facts_or_errors, strict=True):
            if isinstance(facts, LoadgenError):
                errors.append(facts)
                continue
            label = remote.node.label
            checked_nodes.append((label, facts))
            errors += node_facts.find_differences(local_facts, facts, label)
        if not errors:
            errors += _connection_limit_errors(plan, checked_nodes)
        remote_nodes = node_facts.find_remote_nodes(local_facts, checked_nodes)
        errors += node_facts.check_target_is_reachable(job, remote_nodes, self._nodes.option)
        if errors:
            # Workers of one node have the same errors.
            unique_errors = {str(error): error for error in errors}
            raise CombinedError(list(unique_errors.values()))
        return list(node_facts.loopback_notes(job, remote_nodes))

    async def _place_agents(
        self, job: Job, files: Sequence[str], packages: Sequence[str], emit: Emit
    ) -> list[NodeFacts | LoadgenError]:
        """Place an agent for each worker and return the facts or the error of the node of each.

        If a node cannot be checked because it was lost meanwhile, all agents are placed again on
        the remaining nodes.

        Args:
            job: The job of the run.
            files: Paths whose digests are part of the facts.
            packages: Python packages whose versions are part of the facts.
            emit: Called with an event if the agents have to wait for a node.
        """
        while True:
            placed_agents = await self._nodes.place_agents(job.settings.workers, emit)
            self._workers = [
                RemoteWorker(index, node, agent, WorkerFileCopy(job.folder, index))
                for index, (node, agent) in enumerate(placed_agents)
            ]
            self._nodes.history.used = {
                remote.node.id: remote.node.label for remote in self._workers
            }
            facts_or_errors = await asyncio.gather(
                *(remote.read_facts(files, packages) for remote in self._workers)
            )
            has_error = any(isinstance(entry, LoadgenError) for entry in facts_or_errors)
            if not has_error or not await self._has_lost_node():
                return facts_or_errors
            await self._end_all()

    async def _has_lost_node(self) -> bool:
        """Return whether the node of a worker does not respond any more.

        This is called when a worker does not respond, to decide whether its node is the reason. A
        lost node is recorded and not used again. The nodes are checked for NODE_DEATH_S, because an
        agent can end before its node does.

        Raises ClusterLostError if the head of the cluster does not respond.
        """
        await self._nodes.check_cluster()
        nodes_by_id = {remote.node.id: remote.node for remote in self._workers}
        deadline_s = monotonic() + NODE_DEATH_S
        while True:
            responding = await responding_nodes(list(nodes_by_id.values()))
            lost_ids = nodes_by_id.keys() - {node.id for node in responding}
            if lost_ids or monotonic() > deadline_s:
                break
            await asyncio.sleep(POLL_S)
        self._nodes.history.mark_lost(lost_ids)
        return bool(lost_ids)

    # -- the load

    async def run(self, plan: Plan, emit: Emit) -> WorkerResult:
        """Send the load of a plan from the placed workers, and return their combined result.

        The unfinished requests of a worker that dies or is lost are recorded as `lost`. SIGINT and
        SIGTERM are passed on to all workers, as `backends.local.run` does.

        Args:
            plan: The plan of the run.
            emit: Called with events about the progress of the run.

        Raises:
            TargetError: The workers could not be started.
            KeyboardInterrupt: A signal came before all workers had started.
        """
        job = plan.job
        counters = SharedCounters(job.folder / "spool" / worker.COUNTERS_FILE, job.settings.workers)
        follow_tasks: list[FollowTask] = []
        try:
            with stop_signals.abort_start_on_signal(lambda: self._send_signal(signal.SIGKILL)):
                follow_tasks += await self._start(plan, counters, emit)
            with stop_signals.on_stop_signal(self._send_signal):
                await stop_signals.raise_pending_interrupt()
                return await self._send_load(plan, counters, follow_tasks, emit)
        finally:
            await _cancel(follow_tasks)
            counters.close()
            await self._end_workers()

    async def _send_load(
        self,
        plan: Plan,
        counters: SharedCounters,
        follow_tasks: Sequence[FollowTask],
        emit: Emit,
    ) -> WorkerResult:
        """Send the start time to the workers, wait until they end, and return their total result.

        The manifest of the run gets the entry and the notes about the nodes, which the result has.

        Args:
            plan: The plan of the run.
            counters: The counters of all workers, for the display of the progress.
            follow_tasks: The tasks that follow the workers, in the order of the workers.
            emit: Called with the events that the workers are placed and the load begins.
        """
        emit(WorkersPlaced(self._describe_cluster()))
        start_ns = monotonic_ns() + HEAD_START_NS
        load = RunningLoad(counters.sum, lambda: self._send_signal(signal.SIGINT))
        emit(LoadStarted(start_ns, load))
        await asyncio.gather(*(remote.send_start(start_ns) for remote in self._workers))
        late_ns = monotonic_ns() - start_ns  # negative if every worker got it in time

        worker_results = await asyncio.gather(*follow_tasks)
        death_reasons = [remote.death_reason for remote in self._workers]
        total = merge.merge_results(plan, worker_results, death_reasons)
        await asyncio.gather(*(remote.measure_drift() for remote in self._responding()))
        cluster = self._describe_cluster()
        notes = cluster_notes(self._workers, cluster, start_ns, late_ns)
        return replace(total, notes=tuple(notes), cluster=cluster)

    async def _start(self, plan: Plan, counters: SharedCounters, emit: Emit) -> list[FollowTask]:
        """Start the workers and return the tasks that follow them.

        If a worker does not respond, all of them are placed again: on the other nodes if its node
        died, and at most ATTEMPTS times if it did not.

        Raises TargetError if they cannot be started.
        """
        pickled_job = pickle.dumps(plan.job)
        job_pieces = [
            pickled_job[start : start + PIECE_BYTES]
            for start in range(0, len(pickled_job), PIECE_BYTES)
        ]
        attempts = 0
        while True:
            attempts += 1
            try:
                return await self._prepare_workers(job_pieces, counters)
            except WorkerLostError:
                if not await self._has_lost_node() and attempts >= ATTEMPTS:
                    raise
                await self._end_all()
                await self.place(plan, emit)

    async def _prepare_workers(
        self, job_pieces: Sequence[bytes], counters: SharedCounters
    ) -> list[FollowTask]:
        """Start the worker processes, wait until they are ready and compare their clocks.

        Returns the tasks that follow the workers, which run until the workers end. If one worker
        cannot be started, the tasks of all are cancelled.

        Raises:
            WorkerLostError: A worker does not respond.
            TargetError: A worker reports that it cannot send its part of the load.
        """
        follow_tasks: list[FollowTask] = []
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

    def _describe_cluster(self) -> Cluster:
        lost_nodes = self._nodes.history.lost_since_last_run
        return describe_cluster(self._workers, self._nodes.address, lost_nodes)

    def _responding(self) -> list[RemoteWorker]:
        return [remote for remote in self._workers if not remote.is_lost]

    def _stop_all(self) -> None:
        for remote in self._workers:
            remote.stop()

    def _send_signal(self, signum: int) -> None:
        for remote in self._workers:
            remote.send_signal(signum)

    async def _end_workers(self) -> None:
        """End the worker processes that are not lost, and delete their files on the nodes."""
        with contextlib.suppress(Exception):  # their agents end without a call after a while, too
            calls = [remote.end() for remote in self._responding()]
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), END_S)

    async def _end_all(self) -> None:
        """End the workers and their actors, so that they can be placed again."""
        await self._end_workers()
        self._nodes.end_agents()


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _connection_limit_errors(
    plan: Plan, nodes_of_workers: Sequence[tuple[str, NodeFacts]]
) -> Iterator[LoadgenError]:
    """Yield an error for each machine with too few open files or ports for its workers.

    Nodes with the same loopback interface are on one machine and share its limits. The connections
    of the run are divided among machines by the number of their workers.

    Args:
        plan: The plan of the run.
        nodes_of_workers: The label and the facts of the node of each worker.
    """
    connections = resource_limits.count_connections(plan.schedule, plan.job.workload.max_in_flight)
    if connections is None:
        return
    addresses = [result.target.address for result in plan.job.probe_results]
    workers_on_machine = Counter(facts.loopback_id for _, facts in nodes_of_workers)
    for loopback_id, worker_count in workers_on_machine.items():
        node_label, facts = next(
            (label, facts) for label, facts in nodes_of_workers if facts.loopback_id == loopback_id
        )
        demand = resource_limits.ConnectionDemand(
            total=math.ceil(connections * worker_count / len(nodes_of_workers)),
            workers=worker_count,
            addresses=addresses,
            source_addresses=0,
            is_simulated=False,
        )
        for error in resource_limits.limit_errors(demand, facts.limits):
            yield UserError(
                error.code,
                f"on {node_label}: {error.message}",
                error.where,
                f"more nodes; {error.hint}",
            )
