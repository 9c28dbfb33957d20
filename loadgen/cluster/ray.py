"""The backend that sends a load from the nodes of a Ray cluster: one worker per actor. IO."""

from __future__ import annotations

import atexit
import contextlib
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.cluster import lease
from loadgen.cluster.ray_client import RayClient
from loadgen.cluster.ray_nodes import NodeHistory, RayNodes
from loadgen.cluster.worker_group import WorkerGroup
from loadgen.core.errors import UserError
from loadgen.core.execution.backend import Backend
from loadgen.core.execution.plan import Settings

CONNECT_S = 5.0
"""Longest wait for the head node to accept a connection."""


@dataclass(slots=True, eq=False)
class ClusterConnection:
    """A connection to a cluster, and what happened to the nodes since it was made."""

    client: RayClient
    history: NodeHistory = field(default_factory=NodeHistory)


_command_connections: dict[str, ClusterConnection] = {}
"""The connection of the command of this process by its address.

A command keeps it, and the lease of the cluster, from run to run until the process ends.
"""


@contextlib.contextmanager
def connected(settings: Settings) -> Iterator[WorkerGroup]:
    """Connect to the Ray cluster of these settings while inside the context.

    The address is `auto` (the cluster of this machine, or RAY_ADDRESS), or host:port of the head
    node. If the caller is already connected to a cluster, that one is used.

    Raises UserError if there is no cluster, or if another command uses it.
    """
    address = settings.ray or "auto"
    connection = _command_connections.get(address) or _connect(address, settings.command)
    is_command_line = settings.command[:1] == ("loadgen",)
    if is_command_line:
        if address not in _command_connections:
            atexit.register(connection.client.close)
        _command_connections[address] = connection
    nodes = RayNodes(connection.client, address, connection.history)
    try:
        yield WorkerGroup(nodes)
    finally:
        nodes.release()
        if address not in _command_connections:
            connection.client.close()


RAY = Backend(senders=connected)
"""The nodes of a Ray cluster send the load over HTTP."""


def _connect(address: str, command: Sequence[str]) -> ClusterConnection:
    head_address = _address_of_caller() or address
    _check_reachable(head_address)
    client = RayClient(address)
    try:
        holder = lease.holder(command)
        client.call("connect", head_address, holder, f"--ray {address}").result()
    except BaseException:
        client.close()
        raise
    return ClusterConnection(client)


def _address_of_caller() -> str | None:
    """Return the address of the cluster that this process is connected to, if it is."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    address: str = ray.get_runtime_context().gcs_address
    return address


def _check_reachable(address: str) -> None:
    """Raise UserError if nothing listens at the address.

    Ray itself would wait for minutes or abort the process.
    """
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if address.startswith("ray://") or not host or not port.isdigit():
        raise UserError(
            "no_cluster",
            "not the address of a Ray cluster",
            f"--ray {address}",
            "auto, or HOST:6379 of the head node; "
            "from outside: ray job submit -- loadgen run ... --ray auto",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise UserError(
            "no_cluster",
            f"no Ray cluster answers: {error}",
            f"--ray {address}",
            "start one there: ray start --head --port=6379",
        ) from None
