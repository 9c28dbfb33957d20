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
    node. The CPUs that the workers reserve in the cluster are released at the end of the context.

    Raises:
        UserError: There is no cluster, or another command uses it.
    """
    address = settings.ray or "auto"
    with _open_connection(address, settings.command) as connection:
        nodes = RayNodes(connection.client, address, connection.history)
        try:
            yield WorkerGroup(nodes)
        finally:
            nodes.release()


@contextlib.contextmanager
def _open_connection(address: str, command: Sequence[str]) -> Iterator[ClusterConnection]:
    """Yield a connection to a cluster, which no other command can use meanwhile.

    A command of the CLI, such as a search, makes several runs. It keeps the connection from one run
    to the next, until the process ends, so that no other command gets the cluster in between. For a
    run that a Python program starts, the connection is closed at the end of the context.

    Args:
        address: The address of the cluster, as in the option `--ray`.
        command: The command line; empty for a run of a Python program.
    """
    kept_connection = _command_connections.get(address)
    if kept_connection is not None:
        yield kept_connection
        return

    connection = _connect(address, command)
    if _is_cli_command(command):
        _command_connections[address] = connection
        atexit.register(connection.client.close)
        yield connection
        return

    try:
        yield connection
    finally:
        connection.client.close()


def _is_cli_command(command: Sequence[str]) -> bool:
    """Return whether a command line is one of the CLI, and not that of a Python program."""
    return len(command) > 0 and command[0] == "loadgen"


RAY = Backend(senders=open_worker_group)
"""The nodes of a Ray cluster send the load over HTTP."""


def _connect(option_address: str, command: Sequence[str]) -> ClusterConnection:
    """Join a cluster in a child process, and reserve it for a command.

    If a Python program has joined a cluster with `ray.init()`, its runs use that cluster, and the
    address in the option is only named in errors.

    Args:
        option_address: The address in the option `--ray`: `auto`, or host:port of the head node.
        command: The command line. Another command that finds the cluster reserved prints it.

    Raises:
        UserError: There is no cluster, or another command uses it.
    """
    head_address = _find_joined_cluster() or option_address
    _check_reachable(head_address)

    client = RayClient(option_address)
    try:
        holder = lease.describe_holder(command)
        option_text = f"--ray {option_address}"  # for errors
        client.call("connect", head_address, holder, option_text).result()
    except BaseException:
        client.close()
        raise

    return ClusterConnection(client)


def _find_joined_cluster() -> str | None:
    """Return the address of the head node of the cluster that this process has joined, or None.

    A Python program can call `ray.init()` and then start a run with the Python API of loadgen. This
    module does not import Ray, so Ray is looked up among the imported modules.
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
