"""Several workers on the nodes of a Ray cluster: one actor each, spread over the nodes.

`crew.py` leads the workers. This is the only module that imports Ray. IO.

Ray places the actors and carries the calls; no request passes through it. The job contains API keys. So it is sent in
arguments small enough to go with the call itself, never through Ray's object store, which may be written to disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

from loadgen.cluster import lease, listeners, placement
from loadgen.cluster.crew import POLL_S, Agent, Crew, Roll, answering
from loadgen.cluster.node_agent import NodeAgent
from loadgen.cluster.placement import ClusterNode
from loadgen.core import format
from loadgen.core.errors import TargetError, UserError
from loadgen.core.execution.plan import Settings

ANSWER_S = 10.0  # longest wait for the lease of another driver to say whose it is
FREED_S = 15.0  # longest wait for Ray to end the lease of a driver that has ended
JOINED_S = 30.0  # longest wait for a node where all are lost
RELEASED_S = 3.0  # longest wait for the cluster to count the CPUs of a run that ended as free


@dataclass(slots=True, eq=False)
class _Connection:
    """This process and a cluster. A command keeps it, and the lease, until its process ends: from trial to trial.

    `opened`: by us.
    """

    address: str
    opened: bool
    lease: Any
    roll: Roll = field(default_factory=Roll)

    def close(self) -> None:
        import ray

        with contextlib.suppress(Exception):
            ray.kill(self.lease, no_restart=True)
        if self.opened:
            ray.shutdown()


_of_command: dict[str, _Connection] = {}
"""By its address the connection of the command of this process: one at most."""


_rolls: dict[str, Roll] = {}
"""Of agents that listen, by their address: a command makes many runs with them."""


@contextlib.contextmanager
def connected(settings: Settings) -> Iterator[Crew]:
    """Connect to the Ray cluster of these settings while inside. Raises UserError if there is none, or it is in use.

    The address is `auto` (the cluster of this machine, or RAY_ADDRESS), or host:port of the head node. If the caller is
    already connected to a cluster, that one is used and stays connected. `agents:` names agents that listen, without
    Ray (`listeners.py`).
    """
    address = settings.ray or "auto"
    if address.startswith(listeners.SCHEME):
        listening = listeners.ListeningNodes(address, _rolls.setdefault(address, Roll()))
        try:
            yield Crew(listening)
        finally:
            listening.end()
        return
    typed = settings.command[:1] == ("loadgen",)  # its process ends with it, and Ray then closes what it opened
    if typed:  # what the raylets have to say is in their log files; read when Ray is imported
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^")
    try:
        import ray  # noqa: F401
    except ImportError:
        raise UserError(
            "not_installed", "Ray is not installed here", f"--ray {address}", "pip install 'loadgen[ray]'", key="ray"
        ) from None
    connection = _of_command.get(address) or _connect(address, settings.command)
    if typed:
        _of_command[address] = connection
    nodes = RayNodes(connection)
    try:
        yield Crew(nodes)
    finally:
        nodes.leave()
        if address not in _of_command:
            connection.close()


def _connect(address: str, command: Sequence[str]) -> _Connection:
    import ray

    opened = not ray.is_initialized()
    if opened:
        _check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace=lease.NAMESPACE)
        except (ConnectionError, RuntimeError, ValueError) as error:
            what = " ".join(str(error).split())[:300]
            hint = "start one: ray start --head; the same Ray and Python on every node and here"
            raise UserError("no_cluster", f"no Ray cluster to join: {what}", f"--ray {address}", hint) from None
    try:
        return _Connection(address, opened, take_lease(command, f"--ray {address}"))
    except BaseException:
        if opened:
            ray.shutdown()
        raise


def take_lease(command: Sequence[str], where: str) -> Any:
    """The actor that holds the cluster for this process. Raises UserError if another one has it."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "name": lease.NAME,
        "namespace": lease.NAMESPACE,
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": here,
    }
    given_up_at = monotonic() + FREED_S
    while True:
        with contextlib.suppress(ValueError):  # another one has the name
            return ray.remote(lease.Lease).options(**options).remote(lease.holder(command))
        who = "a command that does not answer"
        try:
            other = ray.get_actor(lease.NAME, namespace=lease.NAMESPACE)
            who = ray.get(other.holder.remote(), timeout=ANSWER_S)
        except (ValueError, RayError):  # it has ended, or ends
            if monotonic() < given_up_at:
                sleep(0.2)
                continue
        hint = "wait until it has ended, or end it: two loads from the same machines measure each other"
        raise UserError("cluster_in_use", f"the cluster is in use by {who}", where, hint)


def _check_reachable(address: str) -> None:
    """Raises UserError if nothing listens at the address: Ray itself would wait for minutes or abort the process."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if address.startswith("ray://") or not host or not port.isdigit():
        hint = "auto, or HOST:6379 of the head node; from outside: ray job submit -- loadgen run ... --ray auto"
        raise UserError("no_cluster", "not the address of a Ray cluster", f"--ray {address}", hint)
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
    except OSError as error:
        hint = "start one there: ray start --head --port=6379"
        raise UserError("no_cluster", f"no Ray cluster answers: {error}", f"--ray {address}", hint) from None


class _Actor:
    """An agent that Ray has placed."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        answer: Awaitable[Any] = getattr(self.actor, method).remote(*arguments)
        return answer


class RayNodes:
    """The nodes of a Ray cluster that this process is connected to."""

    def __init__(self, connection: _Connection) -> None:
        from ray.exceptions import ActorUnavailableError, RayError

        self._connection, self._actors = connection, list[_Actor]()
        self._free_before = 0  # CPUs, when the workers were not placed yet
        self.roll, self.address, self.flag = connection.roll, connection.address, f"--ray {connection.address}"
        self.passing: tuple[type[Exception], ...] = (ActorUnavailableError,)
        self.lost: tuple[type[Exception], ...] = (RayError,)
        self.roll.missing.clear()

    @property
    def cores(self) -> int:
        """Number of CPUs that are free now."""
        import ray

        return int(ray.available_resources().get("CPU", 0))

    async def _room(self, workers: int) -> list[ClusterNode]:
        """The nodes that answer and have a CPU free. What was lost since the last run is said.

        Raises UserError if there are fewer CPUs than workers, but where nodes were lost: those left take all workers.
        """
        roll, given_up_at = self.roll, monotonic() + JOINED_S
        while True:
            living = await self._living()
            roll.leave_out(roll.placed.keys() - {node.id for node in living})
            room = [node for node in living if node.cpus]
            if sum(node.cpus for node in room) >= workers or (room and roll.lost):
                return room
            if not roll.lost:
                raise self._too_many(workers, living)
            if monotonic() > given_up_at:
                what = f"no node is left to send the load: lost {', '.join(roll.lost.values())}"
                hint = "start nodes again: ray start --address=HEAD:6379; `ray status` shows the cluster"
                raise TargetError("node_lost", what, self.flag, hint)
            await asyncio.sleep(POLL_S)

    async def _living(self) -> list[ClusterNode]:
        """The nodes whose raylet accepts a connection: Ray itself takes up to half a minute to see that one is gone."""
        import ray

        listed = ray.nodes()
        free = ray._private.state.available_resources_per_node()
        return await answering(placement.nodes(listed, free))

    def _too_many(self, workers: int, nodes: Sequence[ClusterNode]) -> UserError:
        free, total = sum(node.cpus for node in nodes), sum(node.total for node in nodes)
        busy = "" if free == total else f", {total - free} of {total} are taken by others"
        needy, hosts = format.counted(workers, "worker needs", "workers need"), format.counted(len(nodes), "node")
        what = f"{needy} a CPU each; the cluster has {free} free on {hosts}{busy}"
        hint = f"--workers {free}, or --workers auto" if free else "add nodes: ray start --address=HEAD:6379"
        return UserError("resource_limit", what, f"--workers {workers} {self.flag}", hint)

    async def agents(self, workers: int) -> list[tuple[ClusterNode, Agent]]:
        """An actor for each worker. Where there are more workers than CPUs, those that have none of their own ask for
        none."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        room = await self._room(workers)
        self._free_before = self._free_before or sum(node.cpus for node in room)
        by_id = {node.id: node for node in room}
        left = {node.id: node.cpus for node in room}
        actor_class = ray.remote(NodeAgent)
        self._actors, places = [], placement.shared_out(workers, left.copy())
        for id in places:
            options = {
                "num_cpus": min(left[id], 1),
                "max_restarts": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(id, soft=False),
            }
            left[id] -= options["num_cpus"]
            self._actors.append(_Actor(actor_class.options(**options).remote()))
        return [(by_id[id], actor) for id, actor in zip(places, self._actors, strict=True)]

    def end(self) -> None:
        """End the actors."""
        import ray

        with contextlib.suppress(Exception):
            for agent in self._actors:
                ray.kill(agent.actor, no_restart=True)

    def leave(self) -> None:
        """End the actors and wait for the CPUs that they had: the next run may need them."""
        self.end()
        with contextlib.suppress(Exception):
            given_up_at = monotonic() + RELEASED_S
            while self._actors and self.cores < self._free_before and monotonic() < given_up_at:
                sleep(0.05)
