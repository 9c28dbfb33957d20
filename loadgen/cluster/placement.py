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
        port: The port of its raylet.
        cpus: Number of whole CPUs that are free.
        total: Number of whole CPUs, free or not.
    """

    id: str
    name: str
    address: str
    port: int
    cpus: int
    total: int

    @property
    def where(self) -> str:
        """The node in messages: its name and address."""
        return f"{self.name} ({self.address})"


def nodes(
    listed: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]
) -> list[ClusterNode]:
    """Return the nodes that are alive.

    Several nodes may be on one machine, one after the other, too. Their names contain the beginning
    of their id.

    Args:
        listed: What `ray.nodes()` returns.
        free: The available resources of each node by its id.
    """
    same_host = Counter(map(_host_and_address, listed))
    alive = []
    for node in listed:
        if not node["Alive"]:
            continue
        node_id = node["NodeID"]
        host, address = _host_and_address(node)
        alive.append(
            ClusterNode(
                id=node_id,
                name=f"{host} #{node_id[:6]}" if same_host[host, address] > 1 else host,
                address=address,
                port=node["NodeManagerPort"],
                cpus=int(free.get(node_id, {}).get("CPU", 0)),
                total=int(node["Resources"].get("CPU", 0)),
            )
        )
    return alive


def _host_and_address(node: Mapping[str, Any]) -> tuple[str, str]:
    return node["NodeManagerHostname"], node["NodeManagerAddress"]


def shared_out(workers: int, cpus: Mapping[str, int]) -> list[str]:
    """Return the id of the node of each worker.

    Every node gets one worker first, the largest node before the others. Then the workers are
    divided in proportion to the CPUs of the nodes. No node gets more workers than it has CPUs,
    unless there are more workers than CPUs.

    Args:
        workers: Number of workers.
        cpus: Number of CPUs (one or more) of each node (at least one) by its id.
    """
    taken = dict.fromkeys(sorted(cpus, key=lambda node: -cpus[node]), 0)
    node_ids = []
    for _ in range(workers):
        node = min(taken, key=lambda node: (taken[node] > 0, (taken[node] + 1) / cpus[node]))
        taken[node] += 1
        node_ids.append(node)
    return node_ids
