"""The workers of a run on the nodes of a Ray cluster, as the driver leads them. IO.

The shares and the worker processes are the same as on one machine. The driver places an agent for
each worker, checks the nodes, starts all workers at one instant and copies their files. A node that
is lost before the load is left out, and all workers are placed again on the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic, monotonic_ns
from typing import Any

from msgspec.structs import replace

from loadgen.cluster import clock_sync, node_facts
from loadgen.cluster.node_agent import AwayError, Copy, GoneError, Taken
from loadgen.cluster.node_facts import NodeFacts
from loadgen.cluster.placement import ClusterNode
from loadgen.cluster.ray_client import ClusterLostError, RayAgent
from loadgen.cluster.ray_nodes import POLL_S, RayNodes, responding_nodes
from loadgen.core.errors import Fault, Faults, TargetError, UserError
from loadgen.core.execution import resource_limits, stop_signals
from loadgen.core.execution.backends import merge, worker
from loadgen.core.execution.events import LoadStarted, RunningLoad, Tell, WorkersPlaced
from loadgen.core.execution.plan import Job, Plan
from loadgen.core.execution.share import Share
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.results import manifest

LOST_S = 8.0
"""Time without a response after which a node counts as lost, whatever the cluster reports."""
AGENT_START_S = 120.0
"""Longest time for an agent to start with its imports; 60 s were too few on two busy cores."""
NODE_DEATH_S = 2.0
"""Longest time from the death of an agent to that of its node, if the node died."""
ATTEMPTS = 3
"""Attempts to start the workers if one does not respond on a node that does."""
CLOCK_EXCHANGES = 20
"""Clock readings that are exchanged with each worker."""
HEAD_START_NS = 700_000_000
"""Time from the choice of the start to the start."""
PIECE_BYTES = 64 << 10
"""Size of the pieces of a pickled job: Ray sends arguments of up to 100 KB with the call."""


class WorkerLostError(TargetError):
    """A worker does not respond before the load."""


@dataclass(slots=True, eq=False)
class RemoteWorker:
    """What the driver knows of one worker.

    Attributes:
        ready: Done when the worker has prepared its share.
        received_lines: Number of its output lines received so far.
        last_response_s: When it responded last, on the monotonic clock.
        lost_reason: Why it counts as lost; empty if it does not.
        lost_at_s: When it was found to be lost, on the monotonic clock.
        drift_ns: Change of the clock offset during the load; None if unknown.
        niceness: Scheduling priority of the worker process.
    """

    index: int
    node: ClusterNode
    agent: RayAgent
    copy: Copy
    ready: asyncio.Future[None]
    received_lines: int = 0
    last_response_s: float = 0.0
    lost_reason: str = ""
    lost_at_s: float = 0.0
    offset: clock_sync.Offset = field(default=clock_sync.Offset(0, 0))
    drift_ns: int | None = None
    niceness: int = 0
    hot_path: str = ""

    @property
    def place(self) -> str:
        """The node that it runs on, for messages."""
        return self.node.where


@dataclass(slots=True, eq=False)
class WorkerGroup:
    """The workers on the nodes of a cluster. Call `place`, then `run`."""

    _nodes: RayNodes
    _workers: list[RemoteWorker] = field(default_factory=list)

    @property
    def cores(self) -> int:
        """Number of workers that the cluster has CPUs for now."""
        return self._nodes.free_cpus

    # -- before the clock starts

    async def place(self, plan: Plan, tell: Tell) -> list[str]:
        """Take an agent for each worker and check its node; returns notes for the header.

        Raises Faults with the problems of all nodes, UserError for more workers than CPUs, and TargetError where nodes
        were there and none is left.
        """
        job = plan.job
        files, packages = node_facts.files_of(job), [one.package for one in job.plugins]
        local_facts = await asyncio.to_thread(node_facts.own_facts, files, packages)
        while True:
            await self._take_agents(job, tell)
            answers = await asyncio.gather(
                *(self._facts(member, files, packages) for member in self._workers)
            )
            if not (
                any(isinstance(answer, Fault) for answer in answers) and await self._nodes_died()
            ):
                break
            await self._end()
        faults: list[Fault] = []
        known: list[tuple[RemoteWorker, NodeFacts]] = []
        for member, answer in zip(self._workers, answers, strict=True):
            if isinstance(answer, Fault):
                faults.append(answer)
            else:
                known.append((member, answer))
                faults += node_facts.differences(local_facts, answer, member.place)
        if not faults:
            faults += _limit_faults(plan, known)
        elsewhere = node_facts.elsewhere(
            local_facts, [(member.place, facts) for member, facts in known]
        )
        faults += node_facts.unreachable(job, elsewhere, self._nodes.flag)
        if faults:
            raise Faults(list({str(fault): fault for fault in faults}.values()))
        return list(node_facts.notes(job, elsewhere))

    async def _take_agents(self, job: Job, tell: Tell) -> None:
        loop = asyncio.get_running_loop()
        self._workers = [
            RemoteWorker(i, node, agent, Copy(job.folder, i), loop.create_future())
            for i, (node, agent) in enumerate(
                await self._nodes.place_agents(job.settings.workers, tell)
            )
        ]
        self._nodes.history.used = {member.node.id: member.place for member in self._workers}

    async def _nodes_died(self) -> bool:
        """Whether the node of a worker does not answer any more. Those are left out from now on."""
        await self._nodes.check_cluster()
        placed = {member.node.id: member.node for member in self._workers}
        deadline = monotonic() + NODE_DEATH_S
        while True:
            there = {node.id for node in await responding_nodes(list(placed.values()))}
            if there != placed.keys() or monotonic() > deadline:
                break
            await asyncio.sleep(POLL_S)
        lost = placed.keys() - there
        self._nodes.history.mark_lost(lost)
        return bool(lost)

    async def _facts(
        self, member: RemoteWorker, files: Sequence[str], packages: Sequence[str]
    ) -> NodeFacts | Fault:
        try:
            answer_fields = await asyncio.wait_for(
                member.agent.call("facts", files, packages), AGENT_START_S
            )
            files_open, ports = answer_fields.get("room", (None, None))
            return NodeFacts(
                host=answer_fields.get("host", ""),
                same=answer_fields.get("same", {}),
                loopback=answer_fields.get("loopback", ""),
                room=resource_limits.Room(files=files_open, ports=ports),
                files=answer_fields.get("files", {}),
            )
        except ClusterLostError:
            raise
        except Exception as error:  # Ray has many error types for an actor that cannot start
            messages = [line for line in str(error).splitlines() if "Error" in line] or [
                type(error).__name__
            ]
            hint = f"the same loadgen and the same Python as here on {member.place}"
            return UserError(
                "process_failed",
                f"a node cannot run a worker: {messages[-1].strip()[:300]}",
                member.place,
                hint,
            )

    # -- while it runs

    async def run(self, plan: Plan, tell: Tell) -> Share:
        """As `local.run`, on the placed actors."""
        job = plan.job
        counters = SharedCounters(job.folder / "spool" / worker.BOARD, job.settings.workers)
        data = pickle.dumps(job)
        pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
        followers: list[asyncio.Task[Share | None]] = []
        try:
            with stop_signals.ending_start(lambda: self._pass_on(signal.SIGKILL)):
                for left in reversed(range(ATTEMPTS)):
                    try:
                        followers += await self._ready(pieces, counters)
                        break
                    except WorkerLostError:
                        if not await self._nodes_died() and not left:
                            raise
                        await self._end()
                        await self.place(plan, tell)
            members = self._workers
            with stop_signals.calling(self._pass_on):
                await stop_signals.heard()
                tell(WorkersPlaced(self._header()))
                start_ns = monotonic_ns() + HEAD_START_NS
                tell(
                    LoadStarted(
                        start_ns, RunningLoad(counters.sum, lambda: self._pass_on(signal.SIGINT))
                    )
                )
                await asyncio.gather(
                    *(
                        self._send_line(member, f"{member.offset.there(start_ns)}\n".encode())
                        for member in members
                    )
                )
                late_ns = monotonic_ns() - start_ns
                shares = await asyncio.gather(*followers)
                reasons = [
                    member.lost_reason or f"worker {member.index} died on {member.place}"
                    for member in members
                ]
                total = merge.total(plan, shares, reasons)
                await asyncio.gather(
                    *(self._measure_drift(member) for member in members if not member.lost_reason)
                )
            return replace(
                total, notes=tuple(self._notes(start_ns, late_ns)), cluster=self._header()
            )
        finally:
            await _cancelled(followers)
            counters.close()
            await self._end_agents([member for member in self._workers if not member.lost_reason])

    async def _ready(
        self, pieces: Sequence[bytes], counters: SharedCounters
    ) -> list[asyncio.Task[Share | None]]:
        """Start the workers, follow them and compare clocks.

        Raises WorkerLostError, and another TargetError for a worker that refuses.
        """
        members, followers = self._workers, []
        try:
            await asyncio.gather(*(self._start_worker(member, pieces) for member in members))
            followers = [asyncio.create_task(self._follow(member, counters)) for member in members]
            await asyncio.gather(*(member.ready for member in members))
            await asyncio.gather(*(self._compare_clocks(member) for member in members))
        except BaseException:
            await _cancelled(followers)
            raise
        return followers

    async def _start_worker(self, member: RemoteWorker, pieces: Sequence[bytes]) -> None:
        try:
            await asyncio.wait_for(
                member.agent.call("start", member.index, len(self._workers), *pieces), AGENT_START_S
            )
        except Exception as error:  # see _facts
            raise WorkerLostError(
                "process_failed",
                f"a worker could not be started: {type(error).__name__}",
                member.place,
            ) from None

    async def _follow(self, member: RemoteWorker, counters: SharedCounters) -> Share | None:
        """Copy files and counters of a worker and handle its lines until it ends or is lost. None: no share came."""
        share = None
        member.last_response_s = monotonic()
        try:
            while True:
                taken = await self._take(member)
                if taken is None:
                    if not member.ready.done():
                        raise WorkerLostError(
                            "process_failed", f"{member.lost_reason} before the start", member.place
                        )
                    return None
                member.copy.add(taken.pieces)
                counters.paste(member.index, taken.board)
                for line in taken.lines:
                    member.received_lines += 1
                    if not member.ready.done():
                        worker.expect_ready(line)
                        member.ready.set_result(None)
                    else:
                        share = worker.read_share(line, self._stop_others)
                        member.hot_path = share.hot_path if share else ""
                if taken.ended:
                    if not member.ready.done():
                        worker.expect_ready(b"")
                    return share
                if not taken.more:
                    await asyncio.sleep(POLL_S)
        except Fault as fault:
            if not member.ready.done():
                member.ready.set_exception(fault)
            return None

    async def _take(self, member: RemoteWorker) -> Taken | None:
        """New data of a worker; None if it is lost."""
        while True:
            remaining_s = member.last_response_s + LOST_S - monotonic()
            try:
                if remaining_s <= 0:
                    raise TimeoutError
                answer = member.agent.call("take", dict(member.copy.have), member.received_lines)
                taken: Taken = await asyncio.wait_for(answer, remaining_s)
            except AwayError:  # it may come back; a repeated call does no harm
                await asyncio.sleep(min(POLL_S, max(remaining_s, 0.0)))
                continue
            except (GoneError, ClusterLostError, TimeoutError) as error:
                member.lost_at_s = monotonic()
                with_what = "the cluster, on" if isinstance(error, ClusterLostError) else "node"
                member.lost_reason = (
                    f"worker {member.index} was lost with {with_what} {member.place}"
                )
                return None
            member.last_response_s = monotonic()
            return taken

    async def _send_line(self, member: RemoteWorker, line: bytes) -> None:
        with contextlib.suppress(Exception):  # it is lost; `_follow` will detect that
            await asyncio.wait_for(member.agent.call("tell", line), LOST_S)

    def _stop_others(self) -> None:
        for member in self._workers:
            member.agent.call("tell", worker.STOPPING)

    def _pass_on(self, number: int) -> None:
        for member in self._workers:
            member.agent.call("signal", int(number))

    async def _compare_clocks(self, member: RemoteWorker) -> None:
        """Measure the clock offset of a worker. Raises WorkerLostError if it is lost before the start."""
        try:
            member.offset = await asyncio.wait_for(self._offset(member), LOST_S)
            member.niceness = await asyncio.wait_for(member.agent.call("niceness"), LOST_S)
        except Exception as error:
            what = f"worker {member.index} was lost before the start: {type(error).__name__}"
            raise WorkerLostError("process_failed", what, member.place) from None

    async def _measure_drift(self, member: RemoteWorker) -> None:
        """Of a worker that does not answer any more it stays unknown: the load is over, and its records count."""
        with contextlib.suppress(Exception):
            after = await asyncio.wait_for(self._offset(member), LOST_S)
            member.drift_ns = after.ns - member.offset.ns

    async def _offset(self, member: RemoteWorker) -> clock_sync.Offset:
        exchanges = []
        for _ in range(CLOCK_EXCHANGES):
            asked = monotonic_ns()
            there = await member.agent.call("clock")
            exchanges.append(clock_sync.ClockExchange(asked, there, monotonic_ns()))
        return clock_sync.offset(exchanges)

    # -- header and notes

    def _header(self) -> manifest.Cluster:
        drifts = [abs(member.drift_ns) for member in self._workers if member.drift_ns is not None]
        return manifest.Cluster(
            address=self._nodes.address,
            nodes=len({member.node.id for member in self._workers}),
            start_bound_ms=round(max(member.offset.bound_ns for member in self._workers) / 1e6, 4),
            drift_ms=round(max(drifts) / 1e6, 4) if drifts else None,
            lost=tuple(self._nodes.history.lost_since_last_run),
            workers=tuple(
                manifest.Placed(
                    worker=member.index,
                    node=member.node.name,
                    address=member.node.address,
                    offset_ms=round(member.offset.ns / 1e6, 4),
                    bound_ms=round(member.offset.bound_ns / 1e6, 4),
                    lost=bool(member.lost_reason),
                    hot_path=member.hot_path,
                )
                for member in self._workers
            ),
        )

    def _notes(self, start_ns: int, late_ns: int) -> Iterator[str]:
        cluster = self._header()
        for where in self._nodes.history.lost_since_last_run:
            yield f"{where} was lost before the load: all workers were on the nodes that were left"
        limit = clock_sync.TOLERATED_NS / 1e6
        if cluster.start_bound_ms > limit:
            yield f"the common start is sure only within ±{cluster.start_bound_ms:.1f} ms, limit {limit:g} ms"
        if cluster.drift_ms is not None and cluster.drift_ms > limit:
            yield f"the nodes' clocks drifted by up to {cluster.drift_ms:.1f} ms during the run, limit {limit:g} ms"
        low_priority = sorted({member.place for member in self._workers if member.niceness > 0})
        if low_priority:
            yield (
                f"workers on {', '.join(low_priority)} stand back for other processes, as Ray starts them: set "
                "RAY_worker_niceness=0 before `ray start`"
            )
        if late_ns > 0:
            yield f"the last worker was told the start {late_ns / 1e6:.0f} ms after it"
        for member in self._workers:
            if member.lost_reason:
                at_s = (member.lost_at_s * 1e9 - start_ns) / 1e9
                yield (
                    f"{member.lost_reason} {at_s:.1f} s after the start, seen {member.lost_at_s - member.last_response_s:.1f} s "
                    "after its last answer"
                )

    async def _end_agents(self, members: Sequence[RemoteWorker]) -> None:
        """End their workers, and take away what they have on their nodes; one that is lost is left to itself."""
        with contextlib.suppress(Exception):
            ended = [member.agent.call("end") for member in members]
            await asyncio.wait_for(asyncio.gather(*ended, return_exceptions=True), 5.0)

    async def _end(self) -> None:
        """End the workers and their actors: they are placed again."""
        await self._end_agents([member for member in self._workers if not member.lost_reason])
        self._nodes.end_agents()


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _limit_faults(plan: Plan, known: Sequence[tuple[RemoteWorker, NodeFacts]]) -> Iterator[Fault]:
    """Faults for nodes with too few open files or ports for their workers. `known`: of all workers."""
    total = resource_limits.connections(plan.timetable, plan.job.workload.max_in_flight)
    if total is None:
        return
    for loopback in dict.fromkeys(facts.loopback for _, facts in known):
        neighbours = [(member, facts) for member, facts in known if facts.loopback == loopback]
        where, room = neighbours[0][0].place, neighbours[0][1].room
        for fault in resource_limits.faults(
            total=math.ceil(total * len(neighbours) / len(known)),
            workers=len(neighbours),
            addresses=[probed.target.address for probed in plan.job.found],
            sources=0,
            simulated=False,
            room=room,
        ):
            yield UserError(
                fault.code, f"on {where}: {fault.what}", fault.where, f"more nodes; {fault.hint}"
            )
