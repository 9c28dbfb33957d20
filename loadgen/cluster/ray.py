"""Several workers on the nodes of a Ray cluster: one actor each, spread over the nodes. IO.

`crew.py` leads the workers. What speaks with Ray is a process of its own (`ray_process.py`): this one goes on, and says
what was lost, where Ray ends that process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import Pipe
from time import monotonic, sleep
from typing import Any

from loadgen.cluster import lease, placement
from loadgen.cluster.crew import POLL_S, Agent, CarrierLostError, Crew, Roll, answering
from loadgen.cluster.node_agent import AwayError, GoneError
from loadgen.cluster.placement import ClusterNode
from loadgen.core import child_process, format
from loadgen.core.errors import TargetError, UserError
from loadgen.core.execution.backend import Backend
from loadgen.core.execution.events import Tell, Waits
from loadgen.core.execution.plan import Settings

JOINED_S = 30.0  # longest wait for a node where all are lost
RELEASED_S = 3.0  # longest wait for the cluster to count the CPUs of a run that ended as free


class _RayProcess:
    """The process that is connected to the cluster, and its answers."""

    def __init__(self, address: str) -> None:
        self._flag = f"--ray {address}"
        self._calls, theirs = Pipe()
        self._process = subprocess.Popen(
            child_process.command("loadgen.cluster.ray_process", str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what Ray has to say is in its log files
            start_new_session=True,  # Ctrl-C is handled by the run
        )
        theirs.close()
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._is_gone = False
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, what: str, *arguments: Any) -> Future[Any]:
        """Ask a question of `RayDriver`, now. The answer fails with CarrierLostError where the process has ended."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = answer
            try:
                self._calls.send((number, what, arguments))
            except OSError:
                self._is_gone = True
            if self._is_gone:
                del self._waiting[number]
                answer.set_exception(self._lost())
        return answer

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, worked, value = self._calls.recv()
                with self._lock:
                    answer = self._waiting.pop(number)
                if answer.set_running_or_notify_cancel():
                    (answer.set_result if worked else answer.set_exception)(value)
        with self._lock:
            self._is_gone = True
            waiting = [*self._waiting.values()]
            self._waiting.clear()
        for answer in waiting:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(self._lost())

    def _lost(self) -> CarrierLostError:
        what = "the Ray cluster is lost: its head, or its node on this machine, has ended"
        hint = "start it again: ray start --head; then on the other machines ray start --address=HEAD:6379"
        return CarrierLostError("node_lost", what, self._flag, hint)

    def close(self) -> None:
        """Leave the cluster, and end the process."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self._calls.send((next(self._numbers), "leave", ()))
        try:
            self._process.wait(child_process.LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(slots=True, eq=False)
class _Connection:
    """This process and a cluster. A command keeps it, and the lease, until its process ends: from trial to trial."""

    address: str
    process: _RayProcess
    roll: Roll = field(default_factory=Roll)


_of_command: dict[str, _Connection] = {}
"""By its address the connection of the command of this process: one at most."""


@contextlib.contextmanager
def connected(settings: Settings) -> Iterator[Crew]:
    """Connect to the Ray cluster of these settings while inside. Raises UserError if there is none, or it is in use.

    The address is `auto` (the cluster of this machine, or RAY_ADDRESS), or host:port of the head node. If the caller is
    already connected to a cluster, that one is used.
    """
    address = settings.ray or "auto"
    connection = _of_command.get(address) or _connect(address, settings.command)
    if settings.command[:1] == ("loadgen",):  # typed: its process ends with it
        if address not in _of_command:
            atexit.register(connection.process.close)
        _of_command[address] = connection
    nodes = RayNodes(connection)
    try:
        yield Crew(nodes)
    finally:
        nodes.leave()
        if address not in _of_command:
            connection.process.close()


RAY = Backend(senders=connected)
"""The nodes of a Ray cluster send the load over HTTP."""


def _connect(address: str, command: Sequence[str]) -> _Connection:
    ray: Any = sys.modules.get("ray")  # of the caller
    there = (
        ray.get_runtime_context().gcs_address
        if ray is not None and ray.is_initialized()
        else address
    )
    _check_reachable(there)
    process = _RayProcess(address)
    try:
        process.ask("connect", there, lease.holder(command), f"--ray {address}").result()
    except BaseException:
        process.close()
        raise
    return _Connection(address, process)


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
        raise UserError(
            "no_cluster", f"no Ray cluster answers: {error}", f"--ray {address}", hint
        ) from None


class _Actor:
    """An agent that Ray has placed."""

    def __init__(self, process: _RayProcess, number: int) -> None:
        self._process, self._number = process, number

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        answer = asyncio.wrap_future(self._process.ask("call", self._number, method, arguments))
        answer.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # not every caller waits for it
        return answer


class RayNodes:
    """The nodes of a Ray cluster that this process is connected to."""

    def __init__(self, connection: _Connection) -> None:
        self._process, self._placed = connection.process, False
        self._free_before = 0  # CPUs, when the workers were not placed yet
        self.roll, self.address, self.flag = (
            connection.roll,
            connection.address,
            f"--ray {connection.address}",
        )
        self.passing: tuple[type[Exception], ...] = (AwayError,)
        self.lost: tuple[type[Exception], ...] = (GoneError,)
        self.roll.missing.clear()

    @property
    def cores(self) -> int:
        """Number of CPUs that are free now."""
        found: int = self._process.ask("cores").result()
        return found

    async def _room(self, workers: int, tell: Tell) -> list[ClusterNode]:
        """The nodes that answer and have a CPU free. What was lost since the last run is said.

        Raises UserError if there are fewer CPUs than workers, but where nodes were lost: those left take all workers.
        """
        roll, given_up_at, told = self.roll, monotonic() + JOINED_S, False
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
            if not told:
                tell(Waits(f"a node to join the cluster, {JOINED_S:g} s at most"))
                told = True
            await asyncio.sleep(POLL_S)

    async def _living(self) -> list[ClusterNode]:
        """The nodes whose raylet accepts a connection: Ray itself takes up to half a minute to see that one is gone."""
        listed, free = await asyncio.wrap_future(self._process.ask("nodes"))
        return await answering(placement.nodes(listed, free))

    def _too_many(self, workers: int, nodes: Sequence[ClusterNode]) -> UserError:
        free, total = sum(node.cpus for node in nodes), sum(node.total for node in nodes)
        busy = "" if free == total else f", {total - free} of {total} are taken by others"
        needy, hosts = (
            format.counted(workers, "worker needs", "workers need"),
            format.counted(len(nodes), "node"),
        )
        what = f"{needy} a CPU each; the cluster has {free} free on {hosts}{busy}"
        hint = (
            f"--workers {free}, or --workers auto"
            if free
            else "add nodes: ray start --address=HEAD:6379"
        )
        return UserError("resource_limit", what, f"--workers {workers} {self.flag}", hint)

    async def agents(self, workers: int, tell: Tell) -> list[tuple[ClusterNode, Agent]]:
        """An actor for each worker. Where there are more workers than CPUs, those that have none of their own ask for
        none.
        """
        room = await self._room(workers, tell)
        self._free_before = self._free_before or sum(node.cpus for node in room)
        by_id = {node.id: node for node in room}
        left = {node.id: node.cpus for node in room}
        placed: list[tuple[ClusterNode, Agent]] = []
        for id in placement.shared_out(workers, left.copy()):
            cpus = min(left[id], 1)
            left[id] -= cpus
            number = await asyncio.wrap_future(self._process.ask("place", id, cpus))
            placed.append((by_id[id], _Actor(self._process, number)))
        self._placed = True
        return placed

    async def reached(self) -> None:
        """Asks the head, which Ray gives up after a minute."""
        await asyncio.wrap_future(self._process.ask("nodes"))

    def end(self) -> None:
        """End the actors."""
        self._process.ask("end")

    def leave(self) -> None:
        """End the actors and wait for the CPUs that they had: the next run may need them."""
        self.end()
        with contextlib.suppress(TargetError, TimeoutError):  # the next run says what it lacks
            given_up_at = monotonic() + RELEASED_S
            while self._placed and (left_s := given_up_at - monotonic()) > 0:
                if self._process.ask("cores").result(left_s) >= self._free_before:
                    break
                sleep(0.05)
