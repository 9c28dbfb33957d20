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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic, monotonic_ns

from msgspec.structs import replace

from loadgen.cluster import node_facts
from loadgen.cluster.cluster_report import cluster_notes, describe_cluster
from loadgen.cluster.node_agent import WorkerFileCopy
from loadgen.cluster.node_facts import CheckedNode, NodeFacts
from loadgen.cluster.ray_nodes import POLL_S, RayNodes, responding_nodes
from loadgen.cluster.remote_worker import NodeCheck, RemoteWorker, WorkerLostError
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
        """Place an agent for each worker on a node, and check that the nodes can run the workers.

        An agent is a process on a node that starts and controls one worker for the driver. The
        facts about each node, such as its versions, are compared with those of this machine.

        Args:
            plan: The plan of the run.
            emit: Called with an event if the agents have to wait for a node.

        Returns:
            Notes about the nodes for the manifest of the run.

        Raises:
            CombinedError: Nodes cannot run a worker, differ from this machine, or cannot reach the
                target. It has the errors of all nodes.
            UserError: There are more workers than CPUs.
            TargetError: All nodes were lost.
        """
        job = plan.job
        files = node_facts.list_input_files(job)
        packages = [plugin.package for plugin in job.plugins]
        local_facts = await asyncio.to_thread(node_facts.read_local_facts, files, packages)
        node_checks = await self._place_and_check_agents(job, files, packages, emit)
        checked_nodes = _nodes_with_facts(node_checks)
        remote_nodes = node_facts.find_remote_nodes(local_facts, checked_nodes)

        errors = _find_errors_of_nodes(plan, node_checks, local_facts)
        errors += node_facts.unreachable_target_errors(job, remote_nodes, self._nodes.option)
        if errors:
            raise CombinedError(_without_duplicates(errors))

        return list(node_facts.loopback_notes(job, remote_nodes))

    async def _place_and_check_agents(
        self, job: Job, files: Sequence[str], packages: Sequence[str], emit: Emit
    ) -> list[NodeCheck]:
        """Place an agent for each worker, and return the check of the node of each worker.

        A check can fail because its node was lost meanwhile. All agents are then placed again on
        the remaining nodes. Other errors are returned as part of the check.

        Args:
            job: The job of the run.
            files: Paths whose digests are part of the facts about a node.
            packages: Python packages whose versions are part of the facts.
            emit: Called with an event if the agents have to wait for a node.
        """
        while True:
            self._workers = await self._create_workers(job, emit)
            checks = await asyncio.gather(
                *(remote.read_facts(files, packages) for remote in self._workers)
            )
            has_error = any(check.error is not None for check in checks)
            if not has_error:
                return checks

            is_error_of_lost_node = await self._has_lost_node()
            if not is_error_of_lost_node:
                return checks

            await self._end_all()

    async def _create_workers(self, job: Job, emit: Emit) -> list[RemoteWorker]:
        """Place an agent for each worker of a run, and record which nodes the run uses."""
        placed_agents = await self._nodes.place_agents(job.settings.workers, emit)
        self._nodes.history.used = {node.id: node.label for node, _agent in placed_agents}
        return [
            RemoteWorker(index, node, agent, WorkerFileCopy(job.folder, index))
            for index, (node, agent) in enumerate(placed_agents)
        ]

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

        A signal, such as that of Ctrl-C, has one of two effects. Before all workers have started,
        it kills them, and there is no result. Afterwards it is passed on to the workers, which stop
        the load and report what they have measured. The unfinished requests of a worker that dies
        or is lost are recorded as `lost`.

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
                # A signal that came between the two contexts aborts the start as well.
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
        """Start the load on all workers, wait until they end, and return their merged result.

        The result also describes the nodes, for the manifest of the run.

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
        start_delay_ns = await self._send_start_time(start_ns)

        worker_results = await asyncio.gather(*follow_tasks)
        death_reasons = [remote.death_reason for remote in self._workers]
        merged_result = merge.merge_results(plan, worker_results, death_reasons)

        # Shows how far the clocks of the nodes have drifted apart during the load.
        await asyncio.gather(*(remote.measure_drift() for remote in self._responding()))
        return self._with_cluster_description(merged_result, start_ns, start_delay_ns)

    async def _send_start_time(self, start_ns: int) -> int:
        """Send the start of the load, on the clock of the driver, to all workers.

        Returns how long after the start the last one received it, in ns. That is negative if every
        worker received it in time.
        """
        await asyncio.gather(*(remote.send_start(start_ns) for remote in self._workers))
        return monotonic_ns() - start_ns

    def _with_cluster_description(
        self, merged_result: WorkerResult, start_ns: int, start_delay_ns: int
    ) -> WorkerResult:
        """Return the result with its fields `cluster` and `notes`, which describe the nodes.

        Args:
            merged_result: The result of all workers together.
            start_ns: The start of the load on the clock of the driver.
            start_delay_ns: How long after the start the last worker received the start time.
                Negative if every worker received it in time.
        """
        cluster = self._describe_cluster()
        notes = cluster_notes(self._workers, cluster, start_ns, start_delay_ns)
        return replace(merged_result, notes=tuple(notes), cluster=cluster)

    async def _start(self, plan: Plan, counters: SharedCounters, emit: Emit) -> list[FollowTask]:
        """Start the workers and return the tasks that follow them.

        If a worker does not respond, all workers are placed again, on the nodes that remain if its
        node was lost. From the ATTEMPTS-th attempt on, a worker that does not respond although its
        node does is an error.

        Args:
            plan: The plan of the run.
            counters: The counters of all workers.
            emit: Called with an event if the workers have to wait for a node.

        Raises:
            TargetError: The workers cannot be started.
        """
        job_pieces = _split_job(plan.job)
        attempts = 0
        while True:
            attempts += 1
            try:
                return await self._prepare_workers(job_pieces, counters)
            except WorkerLostError:
                has_lost_node = await self._has_lost_node()
                has_attempts_left = attempts < ATTEMPTS
                if not has_lost_node and not has_attempts_left:
                    raise

            await self._end_all()
            await self.place(plan, emit)

    async def _prepare_workers(
        self, job_pieces: Sequence[bytes], counters: SharedCounters
    ) -> list[FollowTask]:
        """Start the worker processes, wait until they are ready and compare their clocks.

        Returns the tasks that follow the workers, which run until the workers end. If one worker
        cannot be started, no task is left running.

        Args:
            job_pieces: The pickled job of the run, which says what to send, in pieces.
            counters: The counters of all workers.

        Raises:
            WorkerLostError: A worker does not respond.
            TargetError: A worker reports that it cannot send its part of the load.
        """
        workers = self._workers
        await asyncio.gather(*(remote.start(len(workers), job_pieces) for remote in workers))

        follow_tasks = [
            asyncio.create_task(remote.follow(counters, self._stop_all)) for remote in workers
        ]
        try:
            await asyncio.gather(*(remote.ready for remote in workers))
            await asyncio.gather(*(remote.measure_clock_and_priority() for remote in workers))
        except BaseException:  # also if this is cancelled by a signal
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
        """End the workers and their actors, and wait for their CPUs to place them again."""
        await self._end_workers()
        await asyncio.to_thread(self._nodes.release)


def _split_job(job: Job) -> list[bytes]:
    """Return the pickled job in pieces that are small enough for Ray to send with a call."""
    pickled_job = pickle.dumps(job)
    return [
        pickled_job[start : start + PIECE_BYTES]
        for start in range(0, len(pickled_job), PIECE_BYTES)
    ]


def _nodes_with_facts(node_checks: Sequence[NodeCheck]) -> list[CheckedNode]:
    """Return the node of each worker whose facts could be read."""
    return [
        CheckedNode(check.node_label, check.facts)
        for check in node_checks
        if check.facts is not None
    ]


def _find_errors_of_nodes(
    plan: Plan, node_checks: Sequence[NodeCheck], local_facts: NodeFacts
) -> list[LoadgenError]:
    """Return why nodes cannot run their workers, or an empty list.

    Only if all nodes could be checked, it is known how many workers each machine runs. So only then
    the limits of the machines on connections are checked.

    Args:
        plan: The plan of the run.
        node_checks: The check of the node of each worker.
        local_facts: The facts about this machine, with which those of the nodes are compared.
    """
    errors: list[LoadgenError] = []
    for check in node_checks:
        errors += _find_node_errors(check, local_facts)
    if not errors:
        errors += _connection_limit_errors(plan, _nodes_with_facts(node_checks))
    return errors


def _find_node_errors(check: NodeCheck, local_facts: NodeFacts) -> Iterator[LoadgenError]:
    """Yield why a node cannot run a worker, or how it differs from this machine."""
    if check.error is not None:
        yield check.error
    if check.facts is not None:
        yield from node_facts.find_differences(local_facts, check.facts, check.node_label)


def _without_duplicates(errors: Sequence[LoadgenError]) -> list[LoadgenError]:
    """Return errors with different texts. Workers of one node have the same errors."""
    errors_by_text = {str(error): error for error in errors}
    return list(errors_by_text.values())


async def _cancel(tasks: Sequence[asyncio.Task[object]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _connection_limit_errors(plan: Plan, nodes: Sequence[CheckedNode]) -> Iterator[LoadgenError]:
    """Yield an error for each machine whose limits allow too few connections for its workers.

    The limits are those of open files and local ports. They belong to a machine, and several nodes
    of the cluster can be on one machine. Each machine opens a share of the connections of the run
    that is proportional to its number of workers.

    Args:
        plan: The plan of the run.
        nodes: The node of each worker.
    """
    connections = resource_limits.count_connections(plan.schedule, plan.job.workload.max_in_flight)
    if connections is None:
        return

    for machine_nodes in _group_by_machine(nodes):
        workers_on_machine = len(machine_nodes)
        demand = resource_limits.ConnectionDemand(
            total=math.ceil(connections * workers_on_machine / len(nodes)),
            workers=workers_on_machine,
            addresses=[result.target.address for result in plan.job.probe_results],
            source_addresses=0,  # the system chooses the local address
            is_simulated=False,  # only the connections of the workers count
        )

        first_node = machine_nodes[0]
        for error in resource_limits.limit_errors(demand, first_node.facts.limits):
            yield _error_on_node(error, first_node.label)


def _group_by_machine(nodes: Sequence[CheckedNode]) -> Iterable[list[CheckedNode]]:
    """Return the nodes of each machine. Nodes on one machine have the same loopback interface."""
    nodes_by_machine: dict[str, list[CheckedNode]] = defaultdict(list)
    for node in nodes:
        nodes_by_machine[node.facts.loopback_id].append(node)
    return nodes_by_machine.values()


def _error_on_node(error: LoadgenError, node_label: str) -> UserError:
    """Return the error with the name of the node, and with the hint to use more nodes."""
    return UserError(
        error.code,
        f"on {node_label}: {error.message}",
        error.where,
        f"more nodes; {error.hint}",
    )
