"""One worker on a node of a cluster, as the driver starts, follows and ends it. IO."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, monotonic_ns
from typing import NamedTuple

from loadgen.cluster.clock_sync import ClockExchange, ClockOffset, estimate_offset
from loadgen.cluster.node_agent import (
    AgentLostError,
    AgentUnreachableError,
    WorkerFileCopy,
    WorkerUpdate,
)
from loadgen.cluster.node_facts import NodeFacts
from loadgen.cluster.placement import ClusterNode
from loadgen.cluster.ray_client import ClusterLostError, RayAgent
from loadgen.cluster.ray_nodes import POLL_S
from loadgen.core.errors import LoadgenError, TargetError, UserError
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
"""Ray's errors contain tracebacks: only the beginning of their message is shown."""

NOT_MEASURED = ClockOffset(0, 0)
"""The clock offset of a worker until it has been measured."""


class WorkerLostError(TargetError):
    """A worker does not respond before the load. The workers can then be placed again."""


class WorkerLoss(NamedTuple):
    """How a worker was lost during a run.

    Attributes:
        reason: What was lost: the node of the worker, or the whole cluster.
        detected_s: When the driver noticed, on its monotonic clock.
    """

    reason: str
    detected_s: float


class NodeCheck(NamedTuple):
    """The check of the node of a worker. It has either facts or an error.

    Attributes:
        node_label: The node in messages.
        facts: Facts about the node, for example its versions.
        error: Why the node cannot run a worker.
    """

    node_label: str
    facts: NodeFacts | None = None
    error: LoadgenError | None = None


def _create_future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class RemoteWorker:
    """Controls one worker of a run on a node of a cluster, through the agent on that node."""

    index: int
    """Its number among the workers of the run."""
    node: ClusterNode
    """The node that it runs on."""
    agent: RayAgent
    """The agent that runs the worker process on the node."""
    files: WorkerFileCopy
    """The copy of its files in the folder of the run."""

    ready: asyncio.Future[None] = field(default_factory=_create_future)
    """Done when the worker has prepared its part of the load, or failed with the reason."""
    clock_offset: ClockOffset = NOT_MEASURED
    """The clock of its node, compared with the clock of the driver, before the load."""
    drift_ns: int | None = None
    """The change of the clock offset during the load, or None if it is not known."""
    niceness: int = 0
    """The scheduling priority of the worker process."""
    hot_path: str = ""
    """What read its sockets, as in `manifest.Host`."""
    last_response_s: float = 0.0
    """When the agent responded last, on the monotonic clock of the driver."""
    loss: WorkerLoss | None = None
    """How it was lost, or None if it still responds."""
    host_error: str = ""
    """The error of its node that ended the worker, such as a full disk; empty if none did."""
    result: WorkerResult | None = None
    """The result of its part of the load, or None until it has reported one."""
    received_lines: int = 0
    """The number of output lines of the worker that were read."""

    @property
    def is_lost(self) -> bool:
        """Whether it does not respond any more."""
        return self.loss is not None

    @property
    def death_reason(self) -> str:
        """Why it has not reported a result, for the records of its unfinished requests."""
        if self.loss is not None:
            return self.loss.reason
        if self.host_error:
            return f"worker {self.index} was stopped on {self.node.label}: {self.host_error}"
        return f"worker {self.index} died on {self.node.label}"

    # -- before the load

    async def read_facts(self, files: Sequence[str], packages: Sequence[str]) -> NodeCheck:
        """Return the facts about its node, or the error if the node cannot run a worker.

        An error of one node is returned and not raised, so that the errors of all nodes can be
        reported together.

        Args:
            files: Paths whose digests are compared with those of the driver.
            packages: Python packages whose versions are compared.

        Raises:
            ClusterLostError: The whole cluster is lost.
        """
        try:
            call = self.agent.call("facts", files, packages)
            message = await asyncio.wait_for(call, AGENT_START_S)
        except ClusterLostError:
            raise
        except Exception as error:  # Ray has many error types for an actor that cannot start
            return NodeCheck(self.node.label, error=self._describe_start_error(error))
        return NodeCheck(self.node.label, facts=NodeFacts.from_message(message))

    def _describe_start_error(self, error: Exception) -> UserError:
        """Return the error that the node cannot run a worker, with the message of Ray's error.

        The text of Ray's error is a traceback, whose last line with an error type is the reason.
        """
        error_lines = [line for line in str(error).splitlines() if "Error" in line]
        message = error_lines[-1].strip() if error_lines else type(error).__name__
        return UserError(
            "process_failed",
            f"a node cannot run a worker: {message[:MAX_ERROR_CHARACTERS]}",
            self.node.label,
            f"install the same versions of loadgen and Python as here on {self.node.label}",
        )

    async def start(self, worker_count: int, job_pieces: Sequence[bytes]) -> None:
        """Start the worker process on the node. The future `ready` is done when it is ready.

        Args:
            worker_count: The number of workers of the run.
            job_pieces: The pickled job of the run, in pieces that Ray sends with the call.

        Raises:
            WorkerLostError: The agent does not respond.
        """
        call = self.agent.call("start", self.index, worker_count, *job_pieces)
        try:
            await asyncio.wait_for(call, AGENT_START_S)
        except Exception as error:  # Ray has many error types for an actor that is gone
            raise WorkerLostError(
                "process_failed",
                f"a worker could not be started: {type(error).__name__}",
                self.node.label,
            ) from None

    async def measure_clock_and_priority(self) -> None:
        """Measure the clock offset of its node, and read the priority of its worker process.

        The clock offset translates the start time into the clock of the node. A low priority
        becomes a warning of the run.

        Raises WorkerLostError if the worker does not respond.
        """
        try:
            self.clock_offset = await asyncio.wait_for(self._measure_offset(), LOST_S)
            self.niceness = await asyncio.wait_for(self.agent.call("niceness"), LOST_S)
        except Exception as error:  # Ray has many error types for an actor that is gone
            raise WorkerLostError(
                "process_failed",
                f"worker {self.index} was lost before the start: {type(error).__name__}",
                self.node.label,
            ) from None

    async def measure_drift(self) -> None:
        """Measure how the clock offset changed during the load.

        The drift stays unknown if the worker does not respond: its records count nevertheless.
        """
        with contextlib.suppress(Exception):
            offset = await asyncio.wait_for(self._measure_offset(), LOST_S)
            self.drift_ns = offset.offset_ns - self.clock_offset.offset_ns

    async def _measure_offset(self) -> ClockOffset:
        """Read the clock of the node several times and return its offset."""
        exchanges = []
        for _ in range(CLOCK_EXCHANGES):
            sent_ns = monotonic_ns()
            remote_ns = await self.agent.call("read_clock")
            exchanges.append(ClockExchange(sent_ns, remote_ns, monotonic_ns()))
        return estimate_offset(exchanges)

    # -- during the load

    async def follow(
        self, counters: SharedCounters, stop_others: Callable[[], None]
    ) -> WorkerResult | None:
        """Copy the files and counters of the worker and handle its output until it ends.

        Returns the result of its part of the load, or None if it was lost or died. If it fails
        before it is ready, the future `ready` gets the error.

        Args:
            counters: The counters of all workers, into which its own are copied.
            stop_others: Called if the worker ends the run because a target does not respond.
        """
        self.last_response_s = monotonic()
        try:
            return await self._copy_updates(counters, stop_others)
        except LoadgenError as error:
            if not self.ready.done():
                self.ready.set_exception(error)
            return None

    async def _copy_updates(
        self, counters: SharedCounters, stop_others: Callable[[], None]
    ) -> WorkerResult | None:
        """Copy the files, counters and output of the worker until it ends, and return its result.

        Returns None if the worker was lost during the load, or ended without a result.

        Args:
            counters: The counters of all workers, into which its own are copied.
            stop_others: Called if the worker ends the run because a target does not respond.

        Raises:
            WorkerLostError: The worker was lost before it was ready.
            TargetError: It ended or could not start before it was ready.
        """
        while True:
            update = await self._fetch_update()
            if update is None:
                self._raise_if_lost_before_ready()
                return None

            self.files.write_chunks(update.chunks)
            counters.paste(self.index, update.counters)

            for line in update.lines:
                self._handle_line(line, stop_others)

            if update.has_ended:
                self._raise_if_ended_before_ready()
                return self.result

            if not update.has_more:
                await asyncio.sleep(POLL_S)

    def _raise_if_lost_before_ready(self) -> None:
        """Raise WorkerLostError if the worker was lost before it was ready."""
        if self.loss is not None and not self.ready.done():
            raise WorkerLostError(
                "process_failed", f"{self.loss.reason} before the start", self.node.label
            )

    def _raise_if_ended_before_ready(self) -> None:
        """Raise TargetError if the worker process has ended without a first line."""
        if not self.ready.done():
            worker.check_is_ready(b"")

    def _handle_line(self, line: bytes, stop_others: Callable[[], None]) -> None:
        """Handle a line of the worker's output.

        The first line says that the worker is ready, or why it could not start. The last one has
        its result, or the error of its node that ended it, such as a full disk. A line between them
        means that the worker stops early, because a target does not respond.

        Args:
            line: The line.
            stop_others: Called if a target does not respond, to end the other workers.
        """
        self.received_lines += 1
        is_first_line = not self.ready.done()
        if is_first_line:
            self._check_first_line(line)
            self.ready.set_result(None)
        else:
            self._handle_later_line(line, stop_others)

    def _handle_later_line(self, line: bytes, stop_others: Callable[[], None]) -> None:
        """Store the result or the error of the node that a line contains, or stop the others."""
        try:
            result = worker.handle_result_line(line, stop_others)
        except OSError as error:  # raised for an error of its node that the worker has reported
            self.host_error = error.strerror or type(error).__name__
            return

        self.result = result
        if result is not None:
            self.hot_path = result.hot_path

    def _check_first_line(self, line: bytes) -> None:
        """Raise TargetError if the first line of the worker says that it could not start.

        `check_is_ready` raises TargetError for most reasons. If the operating system of the node
        refused something, usually because its disk is full, it raises OSError, which becomes a
        TargetError here that names the node.
        """
        try:
            worker.check_is_ready(line)
        except OSError as error:
            raise TargetError(
                "host_refused",
                f"worker {self.index} could not start: {error.strerror or type(error).__name__}",
                self.node.label,
                f"free some space in the temporary folder of {self.node.label}",
            ) from None

    async def _fetch_update(self) -> WorkerUpdate | None:
        """Return the new data of the worker, or None if it is lost.

        It is lost if its agent does not exist any more, or has not responded for LOST_S. Until
        then, a call to an agent that cannot be reached is repeated, which does no harm: each call
        says what was copied so far.
        """
        while True:
            remaining_s = self.last_response_s + LOST_S - monotonic()
            if remaining_s <= 0:
                self._mark_lost(has_lost_cluster=False)
                return None

            call = self.agent.call("read_update", self.files.copied, self.received_lines)
            try:
                update: WorkerUpdate = await asyncio.wait_for(call, remaining_s)
            except AgentUnreachableError:
                await asyncio.sleep(min(POLL_S, remaining_s))
            except (AgentLostError, TimeoutError):
                self._mark_lost(has_lost_cluster=False)
                return None
            except ClusterLostError:
                self._mark_lost(has_lost_cluster=True)
                return None
            else:
                self.last_response_s = monotonic()
                return update

    def _mark_lost(self, *, has_lost_cluster: bool) -> None:
        """Record that the worker was lost now, with its node or with the whole cluster."""
        cause = (
            f"the cluster, on {self.node.label}" if has_lost_cluster else f"node {self.node.label}"
        )
        reason = f"worker {self.index} was lost with {cause}"
        self.loss = WorkerLoss(reason, detected_s=monotonic())

    async def send_start(self, start_ns: int) -> None:
        """Send the start of the load, on the clock of the driver, to the worker."""
        line = f"{self.clock_offset.to_remote_ns(start_ns)}\n".encode()
        with contextlib.suppress(Exception):  # if it is lost, `follow` will notice
            await asyncio.wait_for(self.agent.call("send_line", line), LOST_S)

    def stop(self) -> None:
        """Let the worker end, because a target does not respond."""
        self.agent.call("send_line", worker.STOPPING)

    def send_signal(self, signum: int) -> None:
        """Send a signal to the worker process."""
        self.agent.call("send_signal", int(signum))

    def end(self) -> asyncio.Future[None]:
        """End the worker process and delete its files on the node."""
        return self.agent.call("end")
