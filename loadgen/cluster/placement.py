"""Which worker goes to which node of a cluster. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class ClusterNode(NamedTuple):
    """A node of a Ray cluster.

    `name`: differs from those of all other nodes, together with the address. `port`: of its raylet. `cpus`: whole CPUs
    that are free, `total` with those that are taken.
    """

    id: str
    name: str
    address: str
    port: int
    cpus: int
    total: int

    @property
    def where(self) -> str:
        return f"{self.name} ({self.address})"


def nodes(
    listed: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]
) -> list[ClusterNode]:
    """The living nodes of `ray.nodes()`. `free`: of each node id what is available.

    Machines that were copied have one host name, and several nodes may be on one machine, one after the other too:
    these have the beginning of their id in their name.
    """
    alike = Counter((node["NodeManagerHostname"], node["NodeManagerAddress"]) for node in listed)
    found = []
    for node in (one for one in listed if one["Alive"]):
        id, host, address = node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"]
        name = f"{host} #{id[:6]}" if alike[host, address] > 1 else host
        cpus, total = (
            int(resources.get("CPU", 0)) for resources in (free.get(id, {}), node["Resources"])
        )
        found.append(ClusterNode(id, name, address, node["NodeManagerPort"], cpus, total))
    return found


def shared_out(workers: int, cpus: Mapping[str, int]) -> list[str]:
    """The node of each worker: one on each node first, the largest ahead, then in proportion to the nodes' CPUs.

    No node gets more workers than it has CPUs, unless there are more workers than CPUs. `cpus`: of at least one node,
    one or more.
    """
    taken = dict.fromkeys(sorted(cpus, key=lambda node: -cpus[node]), 0)
    placed = []
    for _ in range(workers):
        node = min(taken, key=lambda node: (taken[node] > 0, (taken[node] + 1) / cpus[node]))
        taken[node] += 1
        placed.append(node)
    return placed
