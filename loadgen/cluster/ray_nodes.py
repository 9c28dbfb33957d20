"""The nodes of a Ray cluster: which respond and have free CPUs, and agents on them. IO."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import NamedTuple

from loadgen.cluster import placement
from loadgen.cluster.placement import ClusterNode
from loadgen.cluster.ray_client import RayAgent, RayClient
from loadgen.core import format
from loadgen.core.errors import TargetError, UserError
from loadgen.core.execution.events import Emit, WaitingFor

POLL_S = 0.5
"""Time between two checks of the nodes, or two updates of a worker."""
JOIN_S = 30.0
"""Longest wait for a node to join if all nodes are lost."""
RELEASE_S = 10.0
"""Longest wait until the cluster counts the CPUs of ended agents as free: seconds if it is busy."""
RELEASE_POLL_S = 0.05
"""Time between two queries of the free CPUs."""
CONNECT_S = 3.0
"""Longest wait for a node to accept a connection."""


@dataclass(slots=True, eq=False)
class NodeHistory:
    """The nodes that the runs of one command have used.

    Attributes:
        used: The label of each node of the last run, by its id.
        lost: The label of each node that was lost since the first run, by its id.
        lost_since_last_run: The labels of the nodes that were lost since the last run.
    """

    used: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    lost_since_last_run: list[str] = field(default_factory=list)

    def mark_lost(self, node_ids: Collection[str]) -> None:
        """Record that nodes of the last run do not respond any more."""
        for node_id in node_ids:
            label = self.used.pop(node_id)
            self.lost[node_id] = label
            self.lost_since_last_run.append(label)


class PlacedAgent(NamedTuple):
    """An agent and the node that it runs on."""

    node: ClusterNode
    agent: RayAgent


class RayNodes:
    """The nodes of the Ray cluster that a command is connected to, for one run.

    Attributes:
        address: The address of the cluster, as in the option `--ray`.
        option: The option of the command line, which errors name.
        history: The nodes that this and earlier runs of the command have used.
    """

    def __init__(self, client: RayClient, address: str, history: NodeHistory) -> None:
        """Begin a run: no node has been lost since the last one yet."""
        self.address = address
        self.option = f"--ray {address}"
        self.history = history
        self._client = client
        self._has_agents = False
        self._free_cpus_by_node: dict[str, int] = {}
        history.lost_since_last_run.clear()

    @property
    def free_cpus(self) -> int:
        """Number of CPUs that are free now."""
        cpus: int = self._client.call("free_cpus").result()
        return cpus

    async def place_agents(self, worker_count: int, emit: Emit) -> list[PlacedAgent]:
        """Start an agent for each worker on the nodes that respond.

        An agent controls one worker on its node, and reserves one CPU in Ray. If nodes were lost,
        there may be more workers than free CPUs. The agents of the additional workers then reserve
        none, because Ray would never start them otherwise.

        Args:
            worker_count: The number of workers.
            emit: Called with an event if the agents have to wait for a node.

        Raises:
            UserError: There are more workers than CPUs.
            TargetError: All nodes were lost.
        """
        nodes = await self._wait_for_nodes(worker_count, emit)
        if not self._has_agents:
            # `release` waits until so many CPUs are free again.
            self._free_cpus_by_node = {node.id: node.free_cpus for node in nodes}
        agents = await self._start_agents(worker_count, nodes)
        self._has_agents = True
        return agents

    async def _start_agents(
        self, worker_count: int, nodes: Sequence[ClusterNode]
    ) -> list[PlacedAgent]:
        """Start an agent for each worker, which reserves a CPU if its node still has a free one."""
        nodes_by_id = {node.id: node for node in nodes}
        unreserved_cpus = {node.id: node.free_cpus for node in nodes}
        agents: list[PlacedAgent] = []

        node_ids = placement.assign_workers(worker_count, cpus_by_node=unreserved_cpus)
        for node_id in node_ids:
            cpus_to_reserve = 1 if unreserved_cpus[node_id] > 0 else 0
            unreserved_cpus[node_id] -= cpus_to_reserve
            agents.append(await self._start_agent(nodes_by_id[node_id], cpus=cpus_to_reserve))

        return agents

    async def _start_agent(self, node: ClusterNode, cpus: int) -> PlacedAgent:
        """Start an agent on a node, with so many reserved CPUs."""
        call = self._client.call("place_agent", node.id, cpus)
        agent_number = await asyncio.wrap_future(call)
        return PlacedAgent(node, RayAgent(self._client, agent_number))

    async def _wait_for_nodes(self, worker_count: int, emit: Emit) -> list[ClusterNode]:
        """Return the nodes that respond and have a free CPU, on which all workers can run.

        Normally every worker needs a CPU of its own, and too few CPUs are an error. After a node
        was lost, the workers share the CPUs of the remaining nodes. If none remains, this waits for
        a new node.

        Args:
            worker_count: The number of workers.
            emit: Called with an event before waiting.

        Raises:
            UserError: There are more workers than free CPUs, and no node was lost.
            TargetError: All nodes were lost, and no new one has joined.
        """
        responding = await self._find_responding_nodes()
        usable = _with_free_cpus(responding)
        has_cpu_for_each_worker = _count_free_cpus(usable) >= worker_count
        if not has_cpu_for_each_worker and not self.history.lost:
            raise self._too_many_workers_error(worker_count, responding)
        if usable:
            return usable

        return await self._wait_for_new_node(emit)

    async def _wait_for_new_node(self, emit: Emit) -> list[ClusterNode]:
        """Wait up to JOIN_S until there is a node with a free CPU, and return such nodes.

        Raises TargetError if no node has joined.
        """
        emit(WaitingFor(f"a node to join the cluster (up to {JOIN_S:g} s)"))
        deadline_s = monotonic() + JOIN_S
        while monotonic() <= deadline_s:
            await asyncio.sleep(POLL_S)
            usable = _with_free_cpus(await self._find_responding_nodes())
            if usable:
                return usable

        raise self._no_node_left_error()

    async def _find_responding_nodes(self) -> list[ClusterNode]:
        """Return the nodes that respond, and record nodes of the last run that do not as lost."""
        responding = await self._responding_nodes()
        responding_ids = {node.id for node in responding}
        self.history.mark_lost(self.history.used.keys() - responding_ids)
        return responding

    async def _responding_nodes(self) -> list[ClusterNode]:
        """Return the nodes that Ray lists as alive and that accept a connection."""
        ray_nodes, free_resources = await asyncio.wrap_future(self._client.call("nodes"))
        return await responding_nodes(placement.parse_alive_nodes(ray_nodes, free_resources))

    def _too_many_workers_error(self, worker_count: int, nodes: Sequence[ClusterNode]) -> UserError:
        """Return the error that the cluster has fewer free CPUs than workers.

        It says how many CPUs other jobs of the cluster use, and suggests a number of workers.
        """
        free_cpus = _count_free_cpus(nodes)
        total_cpus = sum(node.total_cpus for node in nodes)
        used_cpus = total_cpus - free_cpus
        used_text = f", because {used_cpus} of {total_cpus} are in use" if used_cpus else ""
        workers_text = format.counted(worker_count, "worker needs", "workers need")
        nodes_text = format.counted(len(nodes), "node")

        if free_cpus:
            hint = f"use --workers {free_cpus}, or --workers auto"
        else:
            hint = "add nodes: ray start --address=HEAD:6379"

        return UserError(
            "resource_limit",
            (
                f"{workers_text} one CPU each, but the cluster has {free_cpus} free CPUs "
                f"on {nodes_text}{used_text}"
            ),
            f"--workers {worker_count} {self.option}",
            hint,
        )

    def _no_node_left_error(self) -> TargetError:
        return TargetError(
            "node_lost",
            f"no node is left to send the load. Lost: {', '.join(self.history.lost.values())}",
            self.option,
            "start nodes again: ray start --address=HEAD:6379; `ray status` shows the cluster",
        )

    async def check_cluster(self) -> None:
        """Raise ClusterLostError if the head does not respond, which Ray notices after a minute."""
        await asyncio.wrap_future(self._client.call("nodes"))

    def end_agents(self) -> None:
        """End the actors."""
        self._client.call("end_agents")

    def release(self) -> None:
        """End the actors and wait until their CPUs are free, because the next agents may need them.

        This waits at most RELEASE_S, and not for the CPUs of lost nodes. If CPUs are still missing
        then, the next placement of agents reports it.
        """
        self.end_agents()
        if not self._has_agents:
            return

        cpus_without_agents = self._count_cpus_without_agents()
        deadline_s = monotonic() + RELEASE_S
        with contextlib.suppress(TargetError, TimeoutError):
            while monotonic() < deadline_s:
                remaining_s = deadline_s - monotonic()
                free_cpus = self._client.call("free_cpus").result(remaining_s)
                if free_cpus >= cpus_without_agents:
                    return
                sleep(RELEASE_POLL_S)

    def _count_cpus_without_agents(self) -> int:
        """Return how many CPUs of the nodes that are not lost were free before the first agent."""
        return sum(
            free_cpus
            for node_id, free_cpus in self._free_cpus_by_node.items()
            if node_id not in self.history.lost
        )


def _count_free_cpus(nodes: Sequence[ClusterNode]) -> int:
    return sum(node.free_cpus for node in nodes)


def _with_free_cpus(nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    return [node for node in nodes if node.free_cpus]


async def responding_nodes(nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Return the nodes that accept a connection.

    Ray itself takes up to half a minute to notice that a node is gone.
    """
    responses = await asyncio.gather(*map(_accepts_connection, nodes))
    return [node for node, responds in zip(nodes, responses, strict=True) if responds]


async def _accepts_connection(node: ClusterNode) -> bool:
    """Return True if Ray's process on a node accepts a connection within CONNECT_S."""
    connecting = asyncio.open_connection(node.address, node.port)
    try:
        _, writer = await asyncio.wait_for(connecting, CONNECT_S)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
