"""Several workers on the nodes of a Ray cluster: one actor each, spread over the nodes.

Shares and worker processes are the same as on one machine. This is the only module that imports Ray. IO.

Ray places the actors and carries the calls; no request passes through it. The job contains API keys. So it is sent in
arguments small enough to go with the call itself, never through Ray's object store, which may be written to disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import pickle
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic, monotonic_ns, sleep
from typing import Any

from loadgen.cluster import clock_sync, node_facts, ray_agent
from loadgen.cluster.node_facts import NodeFacts
from loadgen.cluster.ray_agent import Copy, RayAgent
from loadgen.core import format
from loadgen.core.errors import Fault, Faults, TargetError, UserError
from loadgen.core.execution import resource_limits, stop_signals
from loadgen.core.execution.backends import merge, worker
from loadgen.core.execution.events import LoadStarted, RunningLoad, Tell, WorkersPlaced
from loadgen.core.execution.plan import Plan
from loadgen.core.execution.share import Share
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.results import manifest

POLL_S = 0.5  # between two requests for new data; if a node is lost, the data up to the last answer is on disk here
LOST_S = 8.0  # time without an answer after which a node counts as lost, whatever Ray reports
PLACED_S = 20.0  # longest time to place the actors when enough CPUs are free
BEGUN_S = 60.0  # longest time for an actor to start, with its imports
RELEASED_S = 3.0  # longest wait for the cluster to count the CPUs of a run that ended as free
EXCHANGES = 20  # of clock readings with each worker
HEAD_START_NS = 700_000_000  # from the choice of the start instant to that instant
PIECE_BYTES = 64 << 10  # of a pickled job: Ray sends arguments of up to 100 KB with the call


@contextlib.contextmanager
def connected(address: str) -> Iterator[RayCluster]:
    """Connect to a Ray cluster while inside. Raises UserError if there is none.

    `address`: `auto` (the cluster of this machine, or RAY_ADDRESS), or host:port of the head node. If the caller is
    already connected to a cluster, that one is used and stays connected.
    """
    try:
        import ray
    except ImportError:
        raise UserError(
            "not_installed", "Ray is not installed here", f"--ray {address}", "pip install 'loadgen[ray]'", key="ray"
        ) from None
    opened_here = not ray.is_initialized()
    if opened_here:
        _check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="loadgen")
        except (ConnectionError, RuntimeError, ValueError) as error:
            what = " ".join(str(error).split())[:300]
            hint = "start one: ray start --head; the same Ray and Python on every node and here"
            raise UserError("no_cluster", f"no Ray cluster to join: {what}", f"--ray {address}", hint) from None
    cluster = RayCluster(address)
    try:
        yield cluster
    finally:
        cluster.leave()
        if opened_here:
            ray.shutdown()


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


@dataclass(slots=True, eq=False)
class _Member:
    """The driver's view of one worker. `heard_at`, `lost_at`: monotonic time, s."""

    i: int
    node_id: str
    node: str
    address: str
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
        return f"{self.node} ({self.address})"


@dataclass(slots=True, eq=False)
class RayCluster:
    """A Ray cluster that this process is connected to. Call `place`, then `run`, once each."""

    address: str
    _members: list[_Member] = field(default_factory=list)
    _placement_group: Any = None
    _free_before: int = 0  # CPUs, when the workers were not placed yet

    @property
    def cores(self) -> int:
        """Number of CPUs that are free now."""
        import ray

        return int(ray.available_resources().get("CPU", 0))

    def refuse_too_many(self, workers: int) -> None:
        """Raises UserError if there are fewer free CPUs than workers."""
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        total = int(sum(node["Resources"].get("CPU", 0) for node in nodes))
        free = self.cores
        if workers > free:
            busy = "" if free == total else f", {total - free} of {total} are taken by others"
            needy, hosts = format.counted(workers, "worker needs", "workers need"), format.counted(len(nodes), "node")
            what = f"{needy} a CPU each; the cluster has {free} free on {hosts}{busy}"
            hint = f"--workers {free}, or --workers auto" if free else "add nodes: ray start --address=HEAD:6379"
            raise UserError("resource_limit", what, f"--workers {workers} --ray {self.address}", hint)

    # -- before the clock starts -----------------------------------------------------------------------------------

    async def place(self, plan: Plan) -> list[str]:
        """Create an actor for each worker and check its node; returns notes for the header.

        Raises Faults with the problems of all nodes.
        """
        import ray

        job, workers = plan.job, plan.job.settings.workers
        self.refuse_too_many(workers)
        self._free_before = self.cores
        placement = await asyncio.to_thread(self._spread, workers)
        actor_class = ray.remote(RayAgent)
        for i, (node_id, node, address) in enumerate(placement):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._placement_group, placement_group_bundle_index=i
            )
            options = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": strategy}
            actor = actor_class.options(**options).remote()
            ready = asyncio.get_running_loop().create_future()
            self._members.append(_Member(i, node_id, node, address, actor, Copy(job.folder, i), ready))
        files, packages = node_facts.files_of(job), [one.package for one in job.plugins]
        local_facts = await asyncio.to_thread(node_facts.own_facts, files, packages)
        faults: list[Fault] = []
        known: list[tuple[_Member, NodeFacts]] = []
        answers = await asyncio.gather(*(self._facts(member, files, packages) for member in self._members))
        for member, answer in zip(self._members, answers, strict=True):
            if isinstance(answer, Fault):
                faults.append(answer)
            else:
                known.append((member, answer))
                faults += node_facts.differences(local_facts, answer, member.where)
        if not faults:
            faults += _limit_faults(plan, known)
        elsewhere = node_facts.elsewhere(local_facts, [(member.where, facts) for member, facts in known])
        faults += node_facts.unreachable(job, elsewhere, f"--ray {self.address}")
        if faults:
            raise Faults(list({str(fault): fault for fault in faults}.values()))
        return list(node_facts.notes(job, elsewhere))

    def _spread(self, workers: int) -> list[tuple[str, str, str]]:
        """Reserve a CPU for each worker, spread over the nodes; returns id, name and address of each worker's node."""
        import ray
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        usable = sum(node["Resources"].get("CPU", 0) >= 1 for node in nodes.values())
        for strategy, patience_s in (("STRICT_SPREAD", 3.0), ("SPREAD", PLACED_S)):
            if strategy == "STRICT_SPREAD" and workers > usable:
                continue
            group = placement_group([{"CPU": 1}] * workers, strategy=strategy)
            if group.wait(timeout_seconds=patience_s):
                self._placement_group = group
                node_ids = placement_group_table(group)["bundles_to_node_id"]
                placed_nodes = [nodes[node_ids[i]] for i in range(workers)]
                return [
                    (node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"]) for node in placed_nodes
                ]
            remove_placement_group(group)
        asked = format.counted(workers, "worker")
        what = f"no room for {asked} within {PLACED_S:g} s: free CPUs are not whole, or taken meanwhile"
        raise UserError(
            "resource_limit", what, f"--workers {workers} --ray {self.address}", "fewer workers, or wait: `ray status`"
        )

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
        job, members = plan.job, self._members
        counters = SharedCounters(job.folder / "spool" / worker.BOARD, len(members))
        data = pickle.dumps(job)
        pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
        followers: list[asyncio.Task[Share | None]] = []
        try:
            with stop_signals.ending_start(lambda: self._pass_on(signal.SIGKILL)):
                await asyncio.gather(*(self._start_worker(member, pieces) for member in members))
                followers = [asyncio.create_task(self._follow(member, counters)) for member in members]
                await asyncio.gather(*(member.ready for member in members))
                await asyncio.gather(*(self._compare_clocks(member) for member in members))
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
            for task in followers:
                task.cancel()
            await asyncio.gather(*followers, return_exceptions=True)
            counters.close()
            with contextlib.suppress(Exception):
                living = [member.actor.end.remote() for member in members if not member.lost]
                await asyncio.wait_for(asyncio.gather(*living, return_exceptions=True), 5.0)

    async def _start_worker(self, member: _Member, pieces: Sequence[bytes]) -> None:
        try:
            await asyncio.wait_for(member.actor.start.remote(member.i, len(self._members), *pieces), BEGUN_S)
        except Exception as error:  # see _facts
            raise TargetError(
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
                        raise TargetError("process_failed", f"{member.lost} before the start", member.where)
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
        """Measure the clock offset of a worker. Raises TargetError if it is lost before the start."""
        try:
            member.offset = await asyncio.wait_for(self._offset(member), LOST_S)
            member.niceness = await asyncio.wait_for(member.actor.niceness.remote(), LOST_S)
        except Exception as error:
            what = f"worker {member.i} was lost before the start: {type(error).__name__}"
            raise TargetError("process_failed", what, member.where) from None

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
            address=self.address,
            nodes=len({member.node_id for member in self._members}),
            start_bound_ms=round(max(member.offset.bound_ns for member in self._members) / 1e6, 4),
            drift_ms=round(max(drifts) / 1e6, 4) if drifts else None,
            workers=tuple(
                manifest.Placed(
                    worker=member.i,
                    node=member.node,
                    address=member.address,
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

    def leave(self) -> None:
        """End the actors and release the CPUs that were reserved for them: the next run may need them."""
        import ray

        with contextlib.suppress(Exception):
            for member in self._members:
                ray.kill(member.actor, no_restart=True)
            if self._placement_group is not None:
                ray.util.remove_placement_group(self._placement_group)
                given_up_at = monotonic() + RELEASED_S
                while self.cores < self._free_before and monotonic() < given_up_at:
                    sleep(0.05)


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
