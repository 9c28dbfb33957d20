"""One worker on a node of a cluster, as the driver sees it: started, followed, copied. IO."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from time import monotonic, monotonic_ns

from loadgen.cluster import clock_sync
from loadgen.cluster.clock_sync import ClockExchange, Offset
from loadgen.cluster.node_agent import AwayError, Copy, GoneError, Taken
from loadgen.cluster.node_facts import NodeFacts
from loadgen.cluster.placement import ClusterNode
from loadgen.cluster.ray_client import ClusterLostError, RayAgent
from loadgen.cluster.ray_nodes import POLL_S
from loadgen.core.errors import LoadgenError, TargetError, UserError
from loadgen.core.execution import resource_limits
from loadgen.core.execution.backends import worker
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.execution.worker_resources import WorkerResult

LOST_S = 8.0
"""Time without a response after which a node counts as lost, whatever the cluster reports."""
AGENT_START_S = 120.0
"""Longest time for an agent to start with its imports; 60 s were too few on two busy cores."""
CLOCK_EXCHANGES = 20
"""Clock readings that are exchanged with each worker."""
MAX_ERROR_CHARACTERS = 300


class WorkerLostError(TargetError):
    """A worker does not respond before the load."""


class RemoteWorker:
    """One worker of a run.

    Attributes:
        index: Its number among the workers of the run.
        node: The node that it runs on.
        ready: Done when the worker has prepared its share.
        last_response_s: When it responded last, on the monotonic clock.
        lost_reason: Why it counts as lost; empty if it does not.
        lost_at_s: When it was found to be lost, on the monotonic clock.
        host_error: The error of its node that ended it, such as a full disk; empty if none did.
        offset: The clock of its node, compared with the clock of the driver.
        drift_ns: Change of the offset during the load; None if unknown.
        niceness: Scheduling priority of the worker process.
        hot_path: What read its sockets, as in `manifest.Host`.
    """

    def __init__(self, index: int, node: ClusterNode, agent: RayAgent, copy: Copy) -> None:
        self.index = index
        self.node = node
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last_response_s = 0.0
        self.lost_reason = ""
        self.lost_at_s = 0.0
        self.host_error = ""
        self.offset = Offset(0, 0)
        self.drift_ns: int | None = None
        self.niceness = 0
        self.hot_path = ""
        self._agent = agent
        self._copy = copy
        self._received_lines = 0

    @property
    def place(self) -> str:
        """The node that it runs on, for messages."""
        return self.node.where

    @property
    def is_lost(self) -> bool:
        """Whether it does not respond any more."""
        return bool(self.lost_reason)

    @property
    def death_reason(self) -> str:
        """Why it has not reported its share, for the records of its unfinished slots."""
        if self.lost_reason:
            return self.lost_reason
        if self.host_error:
            return f"worker {self.index} was ended on {self.place}: {self.host_error}"
        return f"worker {self.index} died on {self.place}"

    # -- before the load

    async def read_facts(
        self, files: Sequence[str], packages: Sequence[str]
    ) -> NodeFacts | LoadgenError:
        """Return the facts about its node, or the error if the node cannot run a worker.

        Raises ClusterLostError if the cluster is lost.
        """
        try:
            call = self._agent.call("facts", files, packages)
            facts = await asyncio.wait_for(call, AGENT_START_S)
        except ClusterLostError:
            raise
        except Exception as error:  # Ray has many error types for an actor that cannot start
            return self._cannot_run(error)
        open_files, ports = facts.get("room", (None, None))
        return NodeFacts(
            host=facts.get("host", ""),
            same=facts.get("same", {}),
            loopback=facts.get("loopback", ""),
            room=resource_limits.MachineLimits(open_files=open_files, local_ports=ports),
            files=facts.get("files", {}),
        )

    def _cannot_run(self, error: Exception) -> UserError:
        messages = [line for line in str(error).splitlines() if "Error" in line]
        message = messages[-1].strip() if messages else type(error).__name__
        return UserError(
            "process_failed",
            f"a node cannot run a worker: {message[:MAX_ERROR_CHARACTERS]}",
            self.place,
            f"the same loadgen and the same Python as here on {self.place}",
        )

    async def start(self, workers: int, job_pieces: Sequence[bytes]) -> None:
        """Start the worker process. Raises WorkerLostError if it does not start."""
        call = self._agent.call("start", self.index, workers, *job_pieces)
        try:
            await asyncio.wait_for(call, AGENT_START_S)
        except Exception as error:  # Ray has many error types for an actor that is gone
            raise WorkerLostError(
                "process_failed",
                f"a worker could not be started: {type(error).__name__}",
                self.place,
            ) from None

    async def compare_clocks(self) -> None:
        """Measure the clock offset of its node. Raises WorkerLostError if it is lost meanwhile."""
        try:
            self.offset = await asyncio.wait_for(self._measure_offset(), LOST_S)
            self.niceness = await asyncio.wait_for(self._agent.call("niceness"), LOST_S)
        except Exception as error:
            raise WorkerLostError(
                "process_failed",
                f"worker {self.index} was lost before the start: {type(error).__name__}",
                self.place,
            ) from None

    async def measure_drift(self) -> None:
        """Measure how the clock offset changed during the load.

        The drift stays unknown if the worker does not respond: its records count nevertheless.
        """
        with contextlib.suppress(Exception):
            offset = await asyncio.wait_for(self._measure_offset(), LOST_S)
            self.drift_ns = offset.ns - self.offset.ns

    async def _measure_offset(self) -> Offset:
        exchanges = []
        for _ in range(CLOCK_EXCHANGES):
            sent_ns = monotonic_ns()
            remote_ns = await self._agent.call("clock")
            exchanges.append(ClockExchange(sent_ns, remote_ns, monotonic_ns()))
        return clock_sync.offset(exchanges)

    # -- during the load

    async def follow(
        self, counters: SharedCounters, stop_others: Callable[[], None]
    ) -> WorkerResult | None:
        """Copy the files and counters of the worker and handle its output until it ends.

        Returns its share, or None if it was lost or died. An error before the worker is ready is
        the result of `ready`.

        Args:
            counters: Where its counters are shown.
            stop_others: Called if the worker ends the run because a target does not respond.
        """
        self.last_response_s = monotonic()
        try:
            return await self._follow(counters, stop_others)
        except LoadgenError as error:
            if not self.ready.done():
                self.ready.set_exception(error)
            return None

    async def _follow(
        self, counters: SharedCounters, stop_others: Callable[[], None]
    ) -> WorkerResult | None:
        share = None
        while (taken := await self._take()) is not None:
            self._copy.add(taken.pieces)
            counters.paste(self.index, taken.board)
            for line in taken.lines:
                share = self._read_line(line, stop_others)
            if taken.ended:
                if not self.ready.done():
                    worker.check_is_ready(b"")
                return share
            if not taken.more:
                await asyncio.sleep(POLL_S)
        if not self.ready.done():
            raise WorkerLostError(
                "process_failed", f"{self.lost_reason} before the start", self.place
            )
        return None

    def _read_line(self, line: bytes, stop_others: Callable[[], None]) -> WorkerResult | None:
        self._received_lines += 1
        if not self.ready.done():
            self._expect_ready(line)
            self.ready.set_result(None)
            return None
        try:
            share = worker.read_result(line, stop_others)
        except OSError as error:  # for example, the disk of its node is full
            self.host_error = error.strerror or type(error).__name__
            return None
        self.hot_path = share.hot_path if share else ""
        return share

    def _expect_ready(self, line: bytes) -> None:
        """Check the first line of the worker. Raises TargetError if it could not start."""
        try:
            worker.check_is_ready(line)
        except OSError as error:
            raise TargetError(
                "host_refused",
                f"worker {self.index} could not start: {error.strerror or type(error).__name__}",
                self.place,
                f"free space in the temporary folder of {self.place}",
            ) from None

    async def _take(self) -> Taken | None:
        """Return new data of the worker, or None if it is lost."""
        while True:
            remaining_s = self.last_response_s + LOST_S - monotonic()
            try:
                if remaining_s <= 0:
                    raise TimeoutError
                call = self._agent.call("take", dict(self._copy.have), self._received_lines)
                taken: Taken = await asyncio.wait_for(call, remaining_s)
            except AwayError:  # it may come back, and repeating the call does no harm
                await asyncio.sleep(min(POLL_S, max(remaining_s, 0.0)))
            except (GoneError, ClusterLostError, TimeoutError) as error:
                self._mark_lost(error)
                return None
            else:
                self.last_response_s = monotonic()
                return taken

    def _mark_lost(self, error: Exception) -> None:
        self.lost_at_s = monotonic()
        lost = "the cluster, on" if isinstance(error, ClusterLostError) else "node"
        self.lost_reason = f"worker {self.index} was lost with {lost} {self.place}"

    async def send_start(self, start_ns: int) -> None:
        """Send the start of the load, on the clock of the driver, to the worker."""
        line = f"{self.offset.there(start_ns)}\n".encode()
        with contextlib.suppress(Exception):  # if it is lost, `follow` will notice
            await asyncio.wait_for(self._agent.call("tell", line), LOST_S)

    def stop(self) -> None:
        """Let the worker end, because a target does not respond."""
        self._agent.call("tell", worker.STOPPING)

    def send_signal(self, number: int) -> None:
        """Send a signal to the worker process."""
        self._agent.call("signal", int(number))

    def end(self) -> asyncio.Future[None]:
        """End the worker process and delete its files on the node."""
        return self._agent.call("end")
