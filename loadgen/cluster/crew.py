"""The workers of a run on the nodes of a cluster, as this machine leads them: placed, checked, started, followed.

Shares and worker processes are the same as on one machine. What places the agents and carries the calls to them is a
`Nodes` (`ray.py`). A node that is lost before the load is left out, and all workers are placed again
on what is there. IO.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import signal
from collections.abc import Awaitable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic, monotonic_ns
from typing import Any, Protocol

from msgspec.structs import replace

from loadgen.cluster import clock_sync, node_agent, node_facts
from loadgen.cluster.node_agent import Copy
from loadgen.cluster.node_facts import NodeFacts
from loadgen.cluster.placement import ClusterNode
from loadgen.core.errors import Fault, Faults, TargetError, UserError
from loadgen.core.execution import resource_limits, stop_signals
from loadgen.core.execution.backends import merge, worker
from loadgen.core.execution.events import LoadStarted, RunningLoad, Tell, WorkersPlaced
from loadgen.core.execution.plan import Job, Plan
from loadgen.core.execution.share import Share
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.results import manifest

POLL_S = 0.5  # between two requests for new data; if a node is lost, the data up to the last answer is on disk here
LOST_S = (
    8.0  # time without an answer after which a node counts as lost, whatever the cluster reports
)
BEGUN_S = (
    120.0  # longest time for an agent to start, with its imports; 60 were too few on two busy cores
)
REACHED_S = 3.0  # longest wait for a node to accept a connection
SEEN_S = 2.0  # from the death of an agent to that of its node, where the node died
ATTEMPTS = 3  # to start the workers, where one does not answer on a node that does
EXCHANGES = 20  # of clock readings with each worker
HEAD_START_NS = 700_000_000  # from the choice of the start instant to that instant
PIECE_BYTES = 64 << 10  # of a pickled job: Ray sends arguments of up to 100 KB with the call


class Agent(Protocol):
    """A `NodeAgent` elsewhere."""

    def call(self, method: str, *arguments: Any) -> Awaitable[Any]:
        """Call one of its methods, now; the answer may be awaited, and need not."""


@dataclass(slots=True, eq=False)
class Roll:
    """The nodes of a command, from run to run. `placed`: node id -> place of those of the last run, `lost`: of those
    that were lost since the first one; `missing`: the places of those that were lost since the last run.
    """

    placed: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def leave_out(self, ids: Collection[str]) -> None:
        """These do not answer any more."""
        for id in ids:
            self.lost[id] = self.placed.pop(id)
            self.missing.append(self.lost[id])


class Nodes(Protocol):
    """Where workers have room, and what carries calls to them. `flag`: what was typed; `lost`: errors of a call to an
    agent that is gone, `passing` of one that may come back.
    """

    roll: Roll
    flag: str
    address: str
    lost: tuple[type[Exception], ...]
    passing: tuple[type[Exception], ...]

    @property
    def cores(self) -> int:
        """How many workers there is room for now."""

    async def agents(self, workers: int, tell: Tell) -> list[tuple[ClusterNode, Agent]]:
        """An agent for each worker, on the nodes that answer; what was placed and does not is left out of `roll`.
        A wait for them is told.

        Raises UserError for more workers than there is room for, TargetError where nodes were there and none is left.
        """

    async def reached(self) -> None:
        """Raises CarrierLostError where no agent can be called any more."""

    def end(self) -> None:
        """End the agents."""


class CarrierLostError(TargetError):
    """What carries the calls to all agents is gone, and with it every one of them."""


class _LostError(TargetError):
    """A worker does not answer before the load."""


@dataclass(slots=True, eq=False)
class _Member:
    """The driver's view of one worker. `heard_at`, `lost_at`: monotonic time, s."""

    i: int
    node: ClusterNode
    agent: Agent
    copy: Copy
    ready: asyncio.Future[None]
    lines: int = 0  # number of lines received
    heard_at: float = 0.0
    lost: str = ""  # why it counts as lost; "": it does not
    lost_at: float = 0.0
    offset: clock_sync.Offset = field(default=clock_sync.Offset(0, 0))
    drift_ns: int | None = None
    niceness: int = 0  # of the worker process
    hot_path: str = ""

    @property
    def where(self) -> str:
        return self.node.where


@dataclass(slots=True, eq=False)
class Crew:
    """The workers on the nodes of a cluster. Call `place`, then `run`."""

    _nodes: Nodes
    _members: list[_Member] = field(default_factory=list)

    @property
    def cores(self) -> int:
        """Number of workers that the cluster has room for now."""
        return self._nodes.cores

    # -- before the clock starts -----------------------------------------------------------------------------------

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
                *(self._facts(member, files, packages) for member in self._members)
            )
            if not (
                any(isinstance(answer, Fault) for answer in answers) and await self._nodes_died()
            ):
                break
            await self._end()
        faults: list[Fault] = []
        known: list[tuple[_Member, NodeFacts]] = []
        for member, answer in zip(self._members, answers, strict=True):
            if isinstance(answer, Fault):
                faults.append(answer)
            else:
                known.append((member, answer))
                faults += node_facts.differences(local_facts, answer, member.where)
        if not faults:
            faults += _limit_faults(plan, known)
        elsewhere = node_facts.elsewhere(
            local_facts, [(member.where, facts) for member, facts in known]
        )
        faults += node_facts.unreachable(job, elsewhere, self._nodes.flag)
        if faults:
            raise Faults(list({str(fault): fault for fault in faults}.values()))
        return list(node_facts.notes(job, elsewhere))

    async def _take_agents(self, job: Job, tell: Tell) -> None:
        loop = asyncio.get_running_loop()
        self._members = [
            _Member(i, node, agent, Copy(job.folder, i), loop.create_future())
            for i, (node, agent) in enumerate(await self._nodes.agents(job.settings.workers, tell))
        ]
        self._nodes.roll.placed = {member.node.id: member.where for member in self._members}

    async def _nodes_died(self) -> bool:
        """Whether the node of a worker does not answer any more. Those are left out from now on."""
        await self._nodes.reached()
        placed = {member.node.id: member.node for member in self._members}
        given_up_at = monotonic() + SEEN_S
        while True:
            there = {node.id for node in await answering(list(placed.values()))}
            if there != placed.keys() or monotonic() > given_up_at:
                break
            await asyncio.sleep(POLL_S)
        lost = placed.keys() - there
        self._nodes.roll.leave_out(lost)
        return bool(lost)

    async def _facts(
        self, member: _Member, files: Sequence[str], packages: Sequence[str]
    ) -> NodeFacts | Fault:
        try:
            reply = await asyncio.wait_for(member.agent.call("facts", files, packages), BEGUN_S)
            files_open, ports = reply.get("room", (None, None))
            return NodeFacts(
                host=reply.get("host", ""),
                same=reply.get("same", {}),
                loopback=reply.get("loopback", ""),
                room=resource_limits.Room(files=files_open, ports=ports),
                files=reply.get("files", {}),
            )
        except CarrierLostError:
            raise
        except Exception as error:  # Ray has many error types for an actor that cannot start
            messages = [line for line in str(error).splitlines() if "Error" in line] or [
                type(error).__name__
            ]
            hint = f"the same loadgen and the same Python as here on {member.where}"
            return UserError(
                "process_failed",
                f"a node cannot run a worker: {messages[-1].strip()[:300]}",
                member.where,
                hint,
            )

    # -- while it runs -----------------------------------------------------------------------------------------------

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
                    except _LostError:
                        if not await self._nodes_died() and not left:
                            raise
                        await self._end()
                        await self.place(plan, tell)
            members = self._members
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
                    member.lost or f"worker {member.i} died on {member.where}" for member in members
                ]
                total = merge.total(plan, shares, reasons)
                await asyncio.gather(
                    *(self._measure_drift(member) for member in members if not member.lost)
                )
            return replace(
                total, notes=tuple(self._notes(start_ns, late_ns)), cluster=self._header()
            )
        finally:
            await _cancelled(followers)
            counters.close()
            await self._end_agents([member for member in self._members if not member.lost])

    async def _ready(
        self, pieces: Sequence[bytes], counters: SharedCounters
    ) -> list[asyncio.Task[Share | None]]:
        """Start the workers, follow them and compare clocks.

        Raises _LostError, and another TargetError for a worker that refuses.
        """
        members, followers = self._members, []
        try:
            await asyncio.gather(*(self._start_worker(member, pieces) for member in members))
            followers = [asyncio.create_task(self._follow(member, counters)) for member in members]
            await asyncio.gather(*(member.ready for member in members))
            await asyncio.gather(*(self._compare_clocks(member) for member in members))
        except BaseException:
            await _cancelled(followers)
            raise
        return followers

    async def _start_worker(self, member: _Member, pieces: Sequence[bytes]) -> None:
        try:
            await asyncio.wait_for(
                member.agent.call("start", member.i, len(self._members), *pieces), BEGUN_S
            )
        except Exception as error:  # see _facts
            raise _LostError(
                "process_failed",
                f"a worker could not be started: {type(error).__name__}",
                member.where,
            ) from None

    async def _follow(self, member: _Member, counters: SharedCounters) -> Share | None:
        """Copy files and counters of a worker and handle its lines until it ends or is lost. None: no share came."""
        share = None
        member.heard_at = monotonic()
        try:
            while True:
                taken = await self._take(member)
                if taken is None:
                    if not member.ready.done():
                        raise _LostError(
                            "process_failed", f"{member.lost} before the start", member.where
                        )
                    return None
                member.copy.add(taken.pieces)
                counters.paste(member.i, taken.board)
                for line in taken.lines:
                    member.lines += 1
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

    async def _take(self, member: _Member) -> node_agent.Taken | None:
        """New data of a worker; None if it is lost."""
        lost: tuple[type[Exception], ...] = (*self._nodes.lost, CarrierLostError, TimeoutError)
        while True:
            remaining_s = member.heard_at + LOST_S - monotonic()
            try:
                if remaining_s <= 0:
                    raise TimeoutError
                answer = member.agent.call("take", dict(member.copy.have), member.lines)
                taken: node_agent.Taken = await asyncio.wait_for(answer, remaining_s)
            except self._nodes.passing:  # it may come back; a repeated call does no harm
                await asyncio.sleep(min(POLL_S, max(remaining_s, 0.0)))
                continue
            except lost as error:
                member.lost_at = monotonic()
                with_what = "the cluster, on" if isinstance(error, CarrierLostError) else "node"
                member.lost = f"worker {member.i} was lost with {with_what} {member.where}"
                return None
            member.heard_at = monotonic()
            return taken

    async def _send_line(self, member: _Member, line: bytes) -> None:
        with contextlib.suppress(Exception):  # it is lost; `_follow` will detect that
            await asyncio.wait_for(member.agent.call("tell", line), LOST_S)

    def _stop_others(self) -> None:
        for member in self._members:
            member.agent.call("tell", worker.STOPPING)

    def _pass_on(self, number: int) -> None:
        for member in self._members:
            member.agent.call("signal", int(number))

    async def _compare_clocks(self, member: _Member) -> None:
        """Measure the clock offset of a worker. Raises _LostError if it is lost before the start."""
        try:
            member.offset = await asyncio.wait_for(self._offset(member), LOST_S)
            member.niceness = await asyncio.wait_for(member.agent.call("niceness"), LOST_S)
        except Exception as error:
            what = f"worker {member.i} was lost before the start: {type(error).__name__}"
            raise _LostError("process_failed", what, member.where) from None

    async def _measure_drift(self, member: _Member) -> None:
        """Of a worker that does not answer any more it stays unknown: the load is over, and its records count."""
        with contextlib.suppress(Exception):
            after = await asyncio.wait_for(self._offset(member), LOST_S)
            member.drift_ns = after.ns - member.offset.ns

    async def _offset(self, member: _Member) -> clock_sync.Offset:
        exchanges = []
        for _ in range(EXCHANGES):
            asked = monotonic_ns()
            there = await member.agent.call("clock")
            exchanges.append(clock_sync.ClockExchange(asked, there, monotonic_ns()))
        return clock_sync.offset(exchanges)

    # -- header and notes --------------------------------------------------------------------------------------------

    def _header(self) -> manifest.Cluster:
        drifts = [abs(member.drift_ns) for member in self._members if member.drift_ns is not None]
        return manifest.Cluster(
            address=self._nodes.address,
            nodes=len({member.node.id for member in self._members}),
            start_bound_ms=round(max(member.offset.bound_ns for member in self._members) / 1e6, 4),
            drift_ms=round(max(drifts) / 1e6, 4) if drifts else None,
            lost=tuple(self._nodes.roll.missing),
            workers=tuple(
                manifest.Placed(
                    worker=member.i,
                    node=member.node.name,
                    address=member.node.address,
                    offset_ms=round(member.offset.ns / 1e6, 4),
                    bound_ms=round(member.offset.bound_ns / 1e6, 4),
                    lost=bool(member.lost),
                    hot_path=member.hot_path,
                )
                for member in self._members
            ),
        )

    def _notes(self, start_ns: int, late_ns: int) -> Iterator[str]:
        cluster = self._header()
        for where in self._nodes.roll.missing:
            yield f"{where} was lost before the load: all workers were on the nodes that were left"
        limit = clock_sync.TOLERATED_NS / 1e6
        if cluster.start_bound_ms > limit:
            yield f"the common start is sure only within ±{cluster.start_bound_ms:.1f} ms, limit {limit:g} ms"
        if cluster.drift_ms is not None and cluster.drift_ms > limit:
            yield f"the nodes' clocks drifted by up to {cluster.drift_ms:.1f} ms during the run, limit {limit:g} ms"
        low_priority = sorted({member.where for member in self._members if member.niceness > 0})
        if low_priority:
            yield (
                f"workers on {', '.join(low_priority)} stand back for other processes, as Ray starts them: set "
                "RAY_worker_niceness=0 before `ray start`"
            )
        if late_ns > 0:
            yield f"the last worker was told the start {late_ns / 1e6:.0f} ms after it"
        for member in self._members:
            if member.lost:
                at_s = (member.lost_at * 1e9 - start_ns) / 1e9
                yield (
                    f"{member.lost} {at_s:.1f} s after the start, seen {member.lost_at - member.heard_at:.1f} s "
                    "after its last answer"
                )

    async def _end_agents(self, members: Sequence[_Member]) -> None:
        """End their workers, and take away what they have on their nodes; one that is lost is left to itself."""
        with contextlib.suppress(Exception):
            ended = [member.agent.call("end") for member in members]
            await asyncio.wait_for(asyncio.gather(*ended, return_exceptions=True), 5.0)

    async def _end(self) -> None:
        """End the workers and their actors: they are placed again."""
        await self._end_agents([member for member in self._members if not member.lost])
        self._nodes.end()


async def answering(nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """The nodes that accept a connection."""
    there = await asyncio.gather(*map(_answers, nodes))
    return [node for node, answers in zip(nodes, there, strict=True) if answers]


async def _answers(node: ClusterNode) -> bool:
    try:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection(node.address, node.port), REACHED_S
        )
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _limit_faults(plan: Plan, known: Sequence[tuple[_Member, NodeFacts]]) -> Iterator[Fault]:
    """Faults for nodes with too few open files or ports for their workers. `known`: of all workers."""
    total = resource_limits.connections(plan.timetable, plan.job.workload.max_in_flight)
    if total is None:
        return
    for loopback in dict.fromkeys(facts.loopback for _, facts in known):
        neighbours = [(member, facts) for member, facts in known if facts.loopback == loopback]
        where, room = neighbours[0][0].where, neighbours[0][1].room
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
