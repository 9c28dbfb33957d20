"""Workers at agents that listen on other machines (`listening.py`), named one by one: `--ray agents:HOST:PORT*CPUS,...`

For machines that something else than Ray starts, as the pods of a Kubernetes Job. IO.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from time import monotonic
from typing import Any

from loadgen.cluster import channel, placement
from loadgen.cluster.crew import POLL_S, REACHED_S, Agent, Roll, answering
from loadgen.cluster.listening import LEAVE
from loadgen.cluster.placement import ClusterNode
from loadgen.core import format
from loadgen.core.errors import TargetError, UserError
from loadgen.core.execution.events import Tell, Waits

SCHEME = "agents:"
START = "python -m loadgen.cluster.listening HOST:PORT"
BEGUN_S = (
    600.0  # longest wait for all of them before the first run: machines start, images are fetched
)
BACK_S = 60.0  # longest wait for one that was lost: what has started it starts it again, under the same name
_ONE = re.compile(r"([^*\s]+):(\d+)(?:\*(\d+))?")


def nodes(address: str) -> list[ClusterNode]:
    """The nodes that an address names. Raises UserError."""
    found = [_ONE.fullmatch(one) for one in address.removeprefix(SCHEME).split(",")]
    several = Counter(match[1] for match in found if match)
    made: list[ClusterNode] = []
    for match in found:
        if match is None:
            hint = f"{SCHEME}HOST:PORT,... or HOST:PORT*CPUS"
            raise UserError(
                "invalid_value", "an agent has a host and a port", f"--ray {address}", hint
            )
        host, port, cpus = match[1], int(match[2]), int(match[3] or 1)
        label = host.split(".")[0]
        name = f"{host}:{port}" if several[host] > 1 or label.isdigit() else label
        if any(one.id == f"{host}:{port}" for one in made):
            hint = f"once, with its CPUs: {host}:{port}*2"
            raise UserError("duplicate", f"{host}:{port} is named twice", f"--ray {address}", hint)
        made.append(ClusterNode(f"{host}:{port}", name, host, port, cpus, cpus))
    return made


class _Caller:
    """An agent behind a connection."""

    def __init__(self, calls: channel.Channel) -> None:
        self._calls, self._numbers = calls, itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._gone = ""
        self._reader = asyncio.create_task(self._read())

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        answer.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # not every caller waits for it
        if self._gone:
            answer.set_exception(ConnectionError(self._gone))
        else:
            self._waiting[number] = answer
            self._calls.send((number, method, arguments))
        return answer

    async def _read(self) -> None:
        try:
            while True:
                number, worked, value = await self._calls.receive()
                answer = self._waiting.pop(number)
                if answer.done():
                    continue
                if worked:
                    answer.set_result(value)
                else:
                    answer.set_exception(RuntimeError(value))
        except OSError as error:
            self._gone = str(error)
        finally:
            self._gone = self._gone or "the connection was closed here"
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ConnectionError(self._gone))
            self._calls.close()

    def close(self) -> None:
        self._reader.cancel()


class ListeningNodes:
    """The machines on which agents listen. Every run makes its connections anew."""

    passing: tuple[type[Exception], ...] = ()
    lost: tuple[type[Exception], ...] = (ConnectionError,)

    def __init__(self, address: str, roll: Roll) -> None:
        self.address, self.flag, self.roll = address, f"--ray {address}", roll
        self._nodes, self._token = nodes(address), channel.token()
        self._callers: list[_Caller] = []
        roll.missing.clear()

    @property
    def cores(self) -> int:
        """Number of workers that these machines have room for."""
        return sum(node.cpus for node in self._nodes)

    async def agents(self, workers: int, tell: Tell) -> list[tuple[ClusterNode, Agent]]:
        """A connection for each worker."""
        room = await self._room(workers, tell)
        by_id = {node.id: node for node in room}
        places = placement.shared_out(workers, {node.id: node.cpus for node in room})
        self._callers = []
        for id in places:
            try:
                self._callers.append(await _connected(by_id[id], self._token))
            except (OSError, TimeoutError) as error:
                what = f"an agent ends the connection: {error}"
                hint = f"the same {channel.TOKEN} there and here"
                raise TargetError("node_lost", what, by_id[id].where, hint) from None
        return [(by_id[id], caller) for id, caller in zip(places, self._callers, strict=True)]

    async def _room(self, workers: int, tell: Tell) -> list[ClusterNode]:
        """The nodes that answer: all of them before the first run; later those that are there after BACK_S."""
        roll, told = self.roll, False
        first = not roll.placed and not roll.lost
        limit_s = BEGUN_S if first else BACK_S
        given_up_at = monotonic() + limit_s
        while (
            len(living := await answering(self._nodes)) < len(self._nodes)
            and monotonic() < given_up_at
        ):
            if not told:
                tell(
                    Waits(f"agents at {self._absent(living)}, {limit_s:g} s at most: {START} there")
                )
                told = True
            await asyncio.sleep(POLL_S)
        there = {node.id for node in living}
        roll.leave_out(roll.placed.keys() - there)
        roll.back(there)
        if not living or (first and len(living) < len(self._nodes)):
            what = f"no agent answers at {self._absent(living)}"
            raise TargetError(
                "node_lost",
                what,
                self.flag,
                f"start them: {START} there, with the {channel.TOKEN} of here",
            )
        if workers > self.cores:
            what = f"{format.counted(workers, 'worker needs', 'workers need')} a CPU each; there are {self.cores}"
            hint = f"--workers {self.cores}, or --workers auto"
            raise UserError("resource_limit", what, f"--workers {workers}", hint)
        return living

    def _absent(self, living: Sequence[ClusterNode]) -> str:
        return ", ".join(node.where for node in self._nodes if node not in living)

    async def reached(self) -> None:
        """Each agent is called over a connection of its own."""

    def end(self) -> None:
        """End the connections, and the workers with them."""
        for caller in self._callers:
            caller.close()


async def _connected(node: ClusterNode, known: bytes) -> _Caller:
    """A connection to an agent that has shown that it knows the token. Raises OSError."""
    async with asyncio.timeout(REACHED_S):
        reader, writer = await asyncio.open_connection(node.address, node.port)
        try:
            caller = _Caller(await channel.greet(reader, writer, known, asks=True))
            await caller.call("clock")
        except BaseException:
            writer.close()
            raise
        return caller


async def dismiss(named: Sequence[ClusterNode], known: bytes) -> None:
    """Tell agents that there is no run any more; who does not answer has ended already."""

    async def leave(node: ClusterNode) -> None:
        async with asyncio.timeout(REACHED_S):
            reader, writer = await asyncio.open_connection(node.address, node.port)
            try:
                calls = await channel.greet(reader, writer, known, asks=True)
                calls.send((0, LEAVE, ()))
                await reader.read()  # until the agent has closed it
            finally:
                writer.close()

    await asyncio.gather(*map(leave, named), return_exceptions=True)
