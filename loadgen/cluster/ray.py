"""Several workers on the nodes of a Ray cluster: one actor each, spread over the nodes.

Shares and worker processes are the same as on one machine. This is the only module that imports Ray. IO.

Ray places the actors and carries the calls; no request passes through it. The job contains API keys. So it is sent in
arguments small enough to go with the call itself, never through Ray's object store, which may be written to disk.

A node that is lost before the load is left out, and all workers are placed again on what is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import pickle
import signal
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, monotonic_ns, sleep
from typing import Any

from loadgen.cluster import clock_sync, lease, node_facts, placement, ray_agent
from loadgen.cluster.node_facts import NodeFacts
from loadgen.cluster.placement import ClusterNode
from loadgen.cluster.ray_agent import Copy, RayAgent
from loadgen.core import format
from loadgen.core.errors import Fault, Faults, TargetError, UserError
from loadgen.core.execution import resource_limits, stop_signals
from loadgen.core.execution.backends import merge, worker
from loadgen.core.execution.events import LoadStarted, RunningLoad, Tell, WorkersPlaced
from loadgen.core.execution.plan import Job, Plan, Settings
from loadgen.core.execution.share import Share
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.results import manifest

POLL_S = 0.5  # between two requests for new data; if a node is lost, the data up to the last answer is on disk here
LOST_S = 8.0  # time without an answer after which a node counts as lost, whatever Ray reports
BEGUN_S = 60.0  # longest time for an actor to start, with its imports
REACHED_S = 3.0  # longest wait for the raylet of a node to accept a connection
ANSWER_S = 10.0  # longest wait for the lease of another driver to say whose it is
FREED_S = 15.0  # longest wait for Ray to end the lease of a driver that has ended
SEEN_S = 2.0  # from the death of an actor to that of its raylet, where the node died
ATTEMPTS = 3  # to start the workers, where one does not answer on a node that does
JOINED_S = 30.0  # longest wait for a node where all are lost
RELEASED_S = 3.0  # longest wait for the cluster to count the CPUs of a run that ended as free
EXCHANGES = 20  # of clock readings with each worker
HEAD_START_NS = 700_000_000  # from the choice of the start instant to that instant
PIECE_BYTES = 64 << 10  # of a pickled job: Ray sends arguments of up to 100 KB with the call


@dataclass(slots=True, eq=False)
class _Connection:
    """This process and a cluster. A command keeps it, and the lease, until its process ends: from trial to trial.

    `opened`: by us. `placed`: node id -> place of the nodes of the last run, `lost`: of those that were lost since the
    first one.
    """

    address: str
    opened: bool
    lease: Any
    placed: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def close(self) -> None:
        import ray

        with contextlib.suppress(Exception):
            ray.kill(self.lease, no_restart=True)
        if self.opened:
            ray.shutdown()


_of_command: dict[str, _Connection] = {}
"""By its address the connection of the command of this process: one at most."""


@contextlib.contextmanager
def connected(settings: Settings) -> Iterator[RayCluster]:
    """Connect to the Ray cluster of these settings while inside. Raises UserError if there is none, or it is in use.

    The address is `auto` (the cluster of this machine, or RAY_ADDRESS), or host:port of the head node. If the caller is
    already connected to a cluster, that one is used and stays connected.
    """
    address = settings.ray or "auto"
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
    cluster = RayCluster(connection)
    try:
        yield cluster
    finally:
        cluster.leave()
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


class _LostError(TargetError):
    """A worker does not answer before the load."""


@dataclass(slots=True, eq=False)
class _Member:
    """The driver's view of one worker. `heard_at`, `lost_at`: monotonic time, s."""

    i: int
    node: ClusterNode
    actor: Any
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
class RayCluster:
    """A Ray cluster that this process is connected to. Call `place`, then `run`, once each."""

    _connection: _Connection
    _members: list[_Member] = field(default_factory=list)
    _lost: list[str] = field(default_factory=list)  # places of the nodes that were lost since the last run
    _free_before: int = 0  # CPUs, when the workers were not placed yet

    @property
    def cores(self) -> int:
        """Number of CPUs that are free now."""
        import ray

        return int(ray.available_resources().get("CPU", 0))

    # -- before the clock starts -----------------------------------------------------------------------------------

    async def place(self, plan: Plan) -> list[str]:
        """Create an actor for each worker and check its node; returns notes for the header.

        Raises Faults with the problems of all nodes, UserError for more workers than CPUs, and TargetError where nodes
        were there and none is left.
        """
        return await self._placed(plan)

    async def _placed(self, plan: Plan) -> list[str]:
        job = plan.job
        files, packages = node_facts.files_of(job), [one.package for one in job.plugins]
        local_facts = await asyncio.to_thread(node_facts.own_facts, files, packages)
        while True:
            self._create(job, await self._room(job.settings.workers))
            answers = await asyncio.gather(*(self._facts(member, files, packages) for member in self._members))
            if not (any(isinstance(answer, Fault) for answer in answers) and await self._nodes_died()):
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
        elsewhere = node_facts.elsewhere(local_facts, [(member.where, facts) for member, facts in known])
        faults += node_facts.unreachable(job, elsewhere, f"--ray {self._connection.address}")
        if faults:
            raise Faults(list({str(fault): fault for fault in faults}.values()))
        return list(node_facts.notes(job, elsewhere))

    async def _room(self, workers: int) -> list[ClusterNode]:
        """The nodes that answer and have a CPU free. What was lost since the last run is said.

        Raises UserError if there are fewer CPUs than workers, but where nodes were lost: those left take all workers.
        """
        connection, given_up_at = self._connection, monotonic() + JOINED_S
        while True:
            living = await self._living()
            self._name_lost(connection.placed.keys() - {node.id for node in living})
            room = [node for node in living if node.cpus]
            if sum(node.cpus for node in room) >= workers or (room and connection.lost):
                return room
            if not connection.lost:
                raise self._too_many(workers, living)
            if monotonic() > given_up_at:
                what = f"no node is left to send the load: lost {', '.join(connection.lost.values())}"
                hint = "start nodes again: ray start --address=HEAD:6379; `ray status` shows the cluster"
                raise TargetError("node_lost", what, f"--ray {connection.address}", hint)
            await asyncio.sleep(POLL_S)

    async def _living(self) -> list[ClusterNode]:
        """The nodes whose raylet accepts a connection: Ray itself takes up to half a minute to see that one is gone."""
        import ray

        listed = ray.nodes()
        free = ray._private.state.available_resources_per_node()
        found = placement.nodes(listed, free)
        answer = await asyncio.gather(*(_answers(node) for node in found))
        return [node for node, there in zip(found, answer, strict=True) if there]

    def _name_lost(self, ids: Collection[str]) -> None:
        placed, lost = self._connection.placed, self._connection.lost
        for id in ids:
            lost[id] = placed.pop(id)
            self._lost.append(lost[id])

    async def _nodes_died(self) -> bool:
        """Whether the node of a worker does not answer any more. Those are left out from now on."""
        placed = {member.node.id: member.node for member in self._members}
        given_up_at = monotonic() + SEEN_S
        while True:
            answer = await asyncio.gather(*(_answers(node) for node in placed.values()))
            lost = [id for id, there in zip(placed, answer, strict=True) if not there]
            if lost or monotonic() > given_up_at:
                break
            await asyncio.sleep(POLL_S)
        self._name_lost(lost)
        return bool(lost)

    def _too_many(self, workers: int, nodes: Sequence[ClusterNode]) -> UserError:
        free, total = sum(node.cpus for node in nodes), sum(node.total for node in nodes)
        busy = "" if free == total else f", {total - free} of {total} are taken by others"
        needy, hosts = format.counted(workers, "worker needs", "workers need"), format.counted(len(nodes), "node")
        what = f"{needy} a CPU each; the cluster has {free} free on {hosts}{busy}"
        hint = f"--workers {free}, or --workers auto" if free else "add nodes: ray start --address=HEAD:6379"
        return UserError("resource_limit", what, f"--workers {workers} --ray {self._connection.address}", hint)

    def _create(self, job: Job, room: Sequence[ClusterNode]) -> None:
        """An actor for each worker. Where there are more workers than CPUs, those that have none of their own ask for
        none."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._free_before = self._free_before or sum(node.cpus for node in room)
        by_id = {node.id: node for node in room}
        left = {node.id: node.cpus for node in room}
        actor_class = ray.remote(RayAgent)
        self._members = []
        for i, id in enumerate(placement.shared_out(job.settings.workers, left.copy())):
            options = {
                "num_cpus": min(left[id], 1),
                "max_restarts": 0,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(id, soft=False),
            }
            left[id] -= options["num_cpus"]
            ready = asyncio.get_running_loop().create_future()
            actor = actor_class.options(**options).remote()
            self._members.append(_Member(i, by_id[id], actor, Copy(job.folder, i), ready))
        self._connection.placed = {member.node.id: member.where for member in self._members}

    async def _facts(self, member: _Member, files: Sequence[str], packages: Sequence[str]) -> NodeFacts | Fault:
        try:
            reply = await asyncio.wait_for(member.actor.facts.remote(files, packages), BEGUN_S)
            files_open, ports = reply.get("room", (None, None))
            return NodeFacts(
                host=reply.get("host", ""),
                same=reply.get("same", {}),
                loopback=reply.get("loopback", ""),
                room=resource_limits.Room(files=files_open, ports=ports),
                files=reply.get("files", {}),
            )
        except Exception as error:  # Ray has many error types for an actor that cannot start
            messages = [line for line in str(error).splitlines() if "Error" in line] or [type(error).__name__]
            hint = f"the same loadgen in the Python that Ray was started with on {member.where}"
            return UserError(
                "process_failed", f"a node cannot run a worker: {messages[-1].strip()[:300]}", member.where, hint
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
                        await self._placed(plan)
            members = self._members
            with stop_signals.calling(self._pass_on):
                tell(WorkersPlaced(self._header()))
                start_ns = monotonic_ns() + HEAD_START_NS
                tell(LoadStarted(start_ns, RunningLoad(counters.sum, lambda: self._pass_on(signal.SIGINT))))
                await asyncio.gather(*(
                    self._send_line(member, f"{member.offset.there(start_ns)}\n".encode()) for member in members
                ))  # fmt: skip
                late_ns = monotonic_ns() - start_ns
                shares = await asyncio.gather(*followers)
                reasons = [member.lost or f"worker {member.i} died on {member.where}" for member in members]
                total = merge.total(plan, shares, reasons)
                await asyncio.gather(*(self._measure_drift(member) for member in members if not member.lost))
            return replace(total, notes=tuple(self._notes(start_ns, late_ns)), cluster=self._header())
        finally:
            await _cancelled(followers)
            counters.close()
            await self._end_agents([member for member in self._members if not member.lost])

    async def _ready(self, pieces: Sequence[bytes], counters: SharedCounters) -> list[asyncio.Task[Share | None]]:
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
            await asyncio.wait_for(member.actor.start.remote(member.i, len(self._members), *pieces), BEGUN_S)
        except Exception as error:  # see _facts
            raise _LostError(
                "process_failed", f"a worker could not be started: {type(error).__name__}", member.where
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
                        raise _LostError("process_failed", f"{member.lost} before the start", member.where)
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

    async def _take(self, member: _Member) -> ray_agent.Taken | None:
        """New data of a worker; None if it is lost."""
        from ray.exceptions import ActorUnavailableError, RayError

        while True:
            remaining_s = member.heard_at + LOST_S - monotonic()
            try:
                if remaining_s <= 0:
                    raise TimeoutError
                answer = member.actor.take.remote(dict(member.copy.have), member.lines)
                taken: ray_agent.Taken = await asyncio.wait_for(answer, remaining_s)
            except ActorUnavailableError:  # it may come back; a repeated call does no harm
                await asyncio.sleep(min(POLL_S, max(remaining_s, 0.0)))
                continue
            except (RayError, TimeoutError):
                member.lost_at = monotonic()
                member.lost = f"worker {member.i} was lost with node {member.where}"
                return None
            member.heard_at = monotonic()
            return taken

    async def _send_line(self, member: _Member, line: bytes) -> None:
        with contextlib.suppress(Exception):  # it is lost; `_follow` will detect that
            await asyncio.wait_for(member.actor.tell.remote(line), LOST_S)

    def _stop_others(self) -> None:
        for member in self._members:
            member.actor.tell.remote(worker.STOPPING)

    def _pass_on(self, number: int) -> None:
        for member in self._members:
            member.actor.signal.remote(int(number))

    async def _compare_clocks(self, member: _Member) -> None:
        """Measure the clock offset of a worker. Raises _LostError if it is lost before the start."""
        try:
            member.offset = await asyncio.wait_for(self._offset(member), LOST_S)
            member.niceness = await asyncio.wait_for(member.actor.niceness.remote(), LOST_S)
        except Exception as error:
            what = f"worker {member.i} was lost before the start: {type(error).__name__}"
            raise _LostError("process_failed", what, member.where) from None

    async def _measure_drift(self, member: _Member) -> None:
        with contextlib.suppress(Exception):
            after = await asyncio.wait_for(self._offset(member), LOST_S)
            member.drift_ns = after.ns - member.offset.ns

    async def _offset(self, member: _Member) -> clock_sync.Offset:
        exchanges = []
        for _ in range(EXCHANGES):
            asked = monotonic_ns()
            there = await member.actor.clock.remote()
            exchanges.append(clock_sync.ClockExchange(asked, there, monotonic_ns()))
        return clock_sync.offset(exchanges)

    # -- header and notes --------------------------------------------------------------------------------------------

    def _header(self) -> manifest.Cluster:
        drifts = [abs(member.drift_ns) for member in self._members if member.drift_ns is not None]
        return manifest.Cluster(
            address=self._connection.address,
            nodes=len({member.node.id for member in self._members}),
            start_bound_ms=round(max(member.offset.bound_ns for member in self._members) / 1e6, 4),
            drift_ms=round(max(drifts) / 1e6, 4) if drifts else None,
            lost=tuple(self._lost),
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
        for where in self._lost:
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
        """End their workers, and take away what they have on their nodes."""
        with contextlib.suppress(Exception):
            ended = [member.actor.end.remote() for member in members]
            await asyncio.wait_for(asyncio.gather(*ended, return_exceptions=True), 5.0)

    async def _end(self) -> None:
        """End the workers and their actors: they are placed again."""
        await self._end_agents([member for member in self._members if not member.lost])
        self._end_actors()

    def _end_actors(self) -> None:
        import ray

        with contextlib.suppress(Exception):
            for member in self._members:
                ray.kill(member.actor, no_restart=True)

    def leave(self) -> None:
        """End the actors and wait for the CPUs that they had: the next run may need them."""
        self._end_actors()
        with contextlib.suppress(Exception):
            given_up_at = monotonic() + RELEASED_S
            while self._members and self.cores < self._free_before and monotonic() < given_up_at:
                sleep(0.05)


async def _answers(node: ClusterNode) -> bool:
    """Whether the raylet of a node accepts a connection."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(node.address, node.port), REACHED_S)
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
            yield UserError(fault.code, f"on {where}: {fault.what}", fault.where, f"more nodes; {fault.hint}")
