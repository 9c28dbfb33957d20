"""The nodes of a Ray cluster: which respond and have free CPUs, and agents on them. IO."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep

from loadgen.cluster import placement
from loadgen.cluster.placement import ClusterNode
from loadgen.cluster.ray_client import RayAgent, RayClient
from loadgen.core import format
from loadgen.core.errors import TargetError, UserError
from loadgen.core.execution.events import Emit, WaitingFor

POLL_S = 0.5
"""Time between two looks at the nodes."""
JOIN_S = 30.0
"""Longest wait for a node to join if all nodes are lost."""
RELEASE_S = 3.0
"""Longest wait until the cluster counts the CPUs of a finished run as free."""
CONNECT_S = 3.0
"""Longest wait for a node to accept a connection."""


@dataclass(slots=True, eq=False)
class NodeHistory:
    """The nodes that the runs of one command have used.

    Attributes:
        used: Id and place of each node of the last run.
        lost: Id and place of each node that was lost since the first run.
        lost_since_last_run: The places of the nodes that were lost since the last run.
    """

    used: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    lost_since_last_run: list[str] = field(default_factory=list)

    def mark_lost(self, node_ids: Collection[str]) -> None:
        """Record that nodes of the last run do not respond any more."""
        for node_id in node_ids:
            place = self.used.pop(node_id)
            self.lost[node_id] = place
            self.lost_since_last_run.append(place)


class RayNodes:
    """The nodes of the Ray cluster that a command is connected to."""

    def __init__(self, client: RayClient, address: str, history: NodeHistory) -> None:
        self.address = address
        self.flag = f"--ray {address}"
        self.history = history
        self._client = client
        self._has_agents = False
        self._free_cpus_before = 0
        history.lost_since_last_run.clear()

    @property
    def free_cpus(self) -> int:
        """Number of CPUs that are free now."""
        cpus: int = self._client.call("free_cpus").result()
        return cpus

    async def place_agents(self, workers: int, tell: Emit) -> list[tuple[ClusterNode, RayAgent]]:
        """Start an agent for each worker on the nodes that respond.

        If there are more workers than CPUs, the agents without a CPU of their own request none.

        Raises UserError for more workers than CPUs, and TargetError if all nodes were lost.
        """
        usable = await self._wait_for_cpus(workers, tell)
        if not self._has_agents:
            self._free_cpus_before = sum(node.cpus for node in usable)
        nodes = {node.id: node for node in usable}
        free_cpus = {node.id: node.cpus for node in usable}
        agents: list[tuple[ClusterNode, RayAgent]] = []
        for node_id in placement.shared_out(workers, free_cpus.copy()):
            cpus = min(free_cpus[node_id], 1)
            free_cpus[node_id] -= cpus
            number = await asyncio.wrap_future(self._client.call("place_agent", node_id, cpus))
            agents.append((nodes[node_id], RayAgent(self._client, number)))
        self._has_agents = True
        return agents

    async def _wait_for_cpus(self, workers: int, tell: Emit) -> list[ClusterNode]:
        """Return the nodes that respond and have a free CPU.

        Fewer CPUs than workers are an error, unless nodes were lost: then the other nodes take all
        workers.
        """
        history = self.history
        deadline = monotonic() + JOIN_S
        has_told = False
        while True:
            responding = await self._responding_nodes()
            history.mark_lost(history.used.keys() - {node.id for node in responding})
            usable = [node for node in responding if node.cpus]
            if sum(node.cpus for node in usable) >= workers or (usable and history.lost):
                return usable
            if not history.lost:
                raise self._too_many_workers(workers, responding)
            if monotonic() > deadline:
                raise self._no_node_left()
            if not has_told:
                tell(WaitingFor(f"a node to join the cluster, {JOIN_S:g} s at most"))
                has_told = True
            await asyncio.sleep(POLL_S)

    async def _responding_nodes(self) -> list[ClusterNode]:
        listed, free = await asyncio.wrap_future(self._client.call("nodes"))
        return await responding_nodes(placement.nodes(listed, free))

    def _too_many_workers(self, workers: int, nodes: Sequence[ClusterNode]) -> UserError:
        free = sum(node.cpus for node in nodes)
        total = sum(node.total for node in nodes)
        busy = "" if free == total else f", {total - free} of {total} are taken by others"
        needed = format.counted(workers, "worker needs", "workers need")
        hosts = format.counted(len(nodes), "node")
        if free:
            hint = f"--workers {free}, or --workers auto"
        else:
            hint = "add nodes: ray start --address=HEAD:6379"
        return UserError(
            "resource_limit",
            f"{needed} a CPU each; the cluster has {free} free on {hosts}{busy}",
            f"--workers {workers} {self.flag}",
            hint,
        )

    def _no_node_left(self) -> TargetError:
        return TargetError(
            "node_lost",
            f"no node is left to send the load: lost {', '.join(self.history.lost.values())}",
            self.flag,
            "start nodes again: ray start --address=HEAD:6379; `ray status` shows the cluster",
        )

    async def check_cluster(self) -> None:
        """Raise ClusterLostError if the head does not respond, which Ray notices after a minute."""
        await asyncio.wrap_future(self._client.call("nodes"))

    def end_agents(self) -> None:
        """End the actors."""
        self._client.call("end_agents")

    def release(self) -> None:
        """End the actors and wait until their CPUs are free, because the next run may need them."""
        self.end_agents()
        deadline = monotonic() + RELEASE_S
        with contextlib.suppress(TargetError, TimeoutError):  # the next run reports what it lacks
            while self._has_agents and (remaining_s := deadline - monotonic()) > 0:
                if self._client.call("free_cpus").result(remaining_s) >= self._free_cpus_before:
                    break
                sleep(0.05)


async def responding_nodes(nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Return the nodes that accept a connection.

    Ray itself takes up to half a minute to notice that a node is gone.
    """
    responses = await asyncio.gather(*map(_accepts_connection, nodes))
    return [node for node, responds in zip(nodes, responses, strict=True) if responds]


async def _accepts_connection(node: ClusterNode) -> bool:
    connecting = asyncio.open_connection(node.address, node.port)
    try:
        _, writer = await asyncio.wait_for(connecting, CONNECT_S)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
