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
    """A connection to a cluster, and which of its nodes the runs of a command have used.

    Attributes:
        client: The connection to the child process that has joined the cluster.
        history: The nodes used and lost so far.
    """

    client: RayClient
    history: NodeHistory = field(default_factory=NodeHistory)


_command_connections: dict[str, ClusterConnection] = {}
"""The connections that the command of this process keeps open, by the address of their cluster.

A command, such as a search, keeps a connection and the lease of the cluster from run to run until
the process ends. A run that another Python program starts closes its connection at its end.
"""


@contextlib.contextmanager
def open_worker_group(settings: Settings) -> Iterator[WorkerGroup]:
    """Connect to the Ray cluster of these settings, and yield the workers of a run on its nodes.

    The address is `auto` (the cluster of this machine, or RAY_ADDRESS), or host:port of the head
    node. If the calling program is already connected to a cluster, that one is used. The CPUs of
    the workers are released at the end of the context. The connection is closed then too, unless a
    command of the command line keeps it for its next run.

    Raises:
        UserError: There is no cluster, or another command uses it.
    """
    address = settings.ray or "auto"
    is_command_line = settings.command[:1] == ("loadgen",)
    connection = _command_connections.get(address)
    if connection is None:
        connection = _connect(address, settings.command)
        if is_command_line:
            _command_connections[address] = connection
            atexit.register(connection.client.close)
    nodes = RayNodes(connection.client, address, connection.history)
    try:
        yield WorkerGroup(nodes)
    finally:
        nodes.release()
        if address not in _command_connections:
            connection.client.close()


RAY = Backend(senders=open_worker_group)
"""The nodes of a Ray cluster send the load over HTTP."""


def _connect(address: str, command: Sequence[str]) -> ClusterConnection:
    """Join the cluster in a child process and reserve it for a command.

    `address` is that of the option `--ray`, and `command` is the command line, which other commands
    see as the holder of the cluster.

    Raises UserError if there is no cluster, or if another command uses it.
    """
    head_address = _address_of_caller() or address
    _check_reachable(head_address)
    client = RayClient(address)
    try:
        holder = lease.describe_holder(command)
        client.call("connect", head_address, holder, f"--ray {address}").result()
    except BaseException:
        client.close()
        raise
    return ClusterConnection(client)


def _address_of_caller() -> str | None:
    """Return the address of the cluster that this process is connected to, or None.

    A Python program that uses Ray itself may start a run.
    """
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    address: str = ray.get_runtime_context().gcs_address
    return address


def _check_reachable(address: str) -> None:
    """Raise UserError if nothing listens at the address of the head node.

    Ray itself would wait for minutes or abort the process. Ray finds the address `auto` itself.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if address.startswith("ray://") or not host or not port.isdigit():
        raise UserError(
            "no_cluster",
            "not the address of a Ray cluster",
            f"--ray {address}",
            (
                "use auto, or HOST:6379 of the head node. From outside the cluster: ray "
                "job submit -- loadgen run ... --ray auto"
            ),
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise UserError(
            "no_cluster",
            f"cannot reach a Ray cluster: {error}",
            f"--ray {address}",
            "start a cluster there: ray start --head --port=6379",
        ) from None
