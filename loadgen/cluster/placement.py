"""The assignment of workers to the nodes of a cluster. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class ClusterNode(NamedTuple):
    """A node of a Ray cluster.

    Attributes:
        id: Ray's id of the node.
        name: A name that is unique together with the address.
        address: Its IP address.
        port: The port of its raylet, Ray's process on the node.
        free_cpus: Number of whole CPUs that are free.
        total_cpus: Number of whole CPUs, free or not.
    """

    id: str
    name: str
    address: str
    port: int
    free_cpus: int
    total_cpus: int

    @property
    def label(self) -> str:
        """The node in messages: its name and address."""
        return f"{self.name} ({self.address})"


def parse_alive_nodes(
    ray_nodes: Sequence[Mapping[str, Any]],
    free_resources: Mapping[str, Mapping[str, float]],
) -> list[ClusterNode]:
    """Return the nodes of a cluster that are alive, from Ray's description of all its nodes.

    One machine can run several nodes, at the same time or one after the other. The name of such a
    node is the host name and the beginning of its id, so that messages distinguish them.

    Args:
        ray_nodes: What `ray.nodes()` returns, which includes dead nodes.
        free_resources: The free resources of each node by its id.
    """
    nodes_on_host = Counter(_host_and_address(ray_node) for ray_node in ray_nodes)
    alive_nodes = []
    for ray_node in ray_nodes:
        if not ray_node["Alive"]:
            continue

        node_id = ray_node["NodeID"]
        host, address = _host_and_address(ray_node)
        is_only_node = nodes_on_host[host, address] == 1
        node = ClusterNode(
            id=node_id,
            name=host if is_only_node else f"{host} #{node_id[:6]}",
            address=address,
            port=ray_node["NodeManagerPort"],
            free_cpus=int(free_resources.get(node_id, {}).get("CPU", 0)),
            total_cpus=int(ray_node["Resources"].get("CPU", 0)),
        )
        alive_nodes.append(node)

    return alive_nodes


def _host_and_address(ray_node: Mapping[str, Any]) -> tuple[str, str]:
    return ray_node["NodeManagerHostname"], ray_node["NodeManagerAddress"]


def assign_workers(worker_count: int, cpus_by_node: Mapping[str, int]) -> list[str]:
    """Return the id of the node that each worker should run on.

    Every node gets one worker first, beginning with the largest node. Each further worker goes to
    the node that then has the fewest workers per CPU. So no node gets more workers than it has
    CPUs, unless there are more workers than CPUs.

    Args:
        worker_count: Number of workers.
        cpus_by_node: Number of CPUs (one or more) of each node (at least one) by its id.
    """
    largest_first = sorted(cpus_by_node, key=lambda node_id: -cpus_by_node[node_id])
    workers_on_node = dict.fromkeys(largest_first, 0)

    def placement_cost(node_id: str) -> tuple[bool, float]:
        has_worker = workers_on_node[node_id] > 0
        workers_per_cpu = (workers_on_node[node_id] + 1) / cpus_by_node[node_id]
        return has_worker, workers_per_cpu

    node_ids = []
    for _ in range(worker_count):
        node_id = min(workers_on_node, key=placement_cost)
        workers_on_node[node_id] += 1
        node_ids.append(node_id)

    return node_ids
