"""Several workers on the nodes of a Ray cluster: an actor each, spread over the nodes, the same share by arithmetic and
the same worker process as on one machine. The only importer of Ray. IO.

Ray places the actors and carries calls; no request passes through it. The job travels as arguments small enough to go
with the call itself, never through Ray's object store, which may be written to disk: there are API keys in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import pickle
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic, monotonic_ns
from typing import Any

from loadgen.errors import Fault, Faults, TargetError, UserError
from loadgen.execution import resource_limits
from loadgen.execution.backends import clock_sync, merge, ray_agent, worker
from loadgen.execution.backends.ray_agent import Copy, Facts, RayAgent
from loadgen.execution.backends.single import Share
from loadgen.execution.plan import Job
from loadgen.execution.shared_counters import Counted, SharedCounters
from loadgen.results import manifest
from loadgen.schedule import timetable as schedule
from loadgen.workload import Replay

POLL_S = 0.5  # between two questions for what is new: what a lost node had finished is on disk here up to then
LOST_S = 8.0  # without an answer: a node is lost, whatever Ray still hopes
PLACED_S = 20.0  # until the actors have their places, where the CPUs are free
BEGUN_S = 60.0  # until a node's Python has imported what it needs
EXCHANGES = 20  # of clock readings with each worker
HEAD_START_NS = 700_000_000  # from telling the start instant to that instant
PIECE_BYTES = 64 << 10  # of a pickled job: Ray sends arguments of up to 100 KB with the call


@contextlib.contextmanager
def connected(address: str) -> Iterator[RayCluster]:
    """A Ray cluster, while inside: `auto` (the one of this machine, or RAY_ADDRESS) or host:port of its head. One that
    the caller is connected to already is used, and left connected. Raises UserError where there is none."""
    try:
        import ray
    except ImportError:
        raise UserError("Ray is not installed here", f"--ray {address}", "pip install 'loadgen[ray]'") from None
    ours = not ray.is_initialized()
    if ours:
        _reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="loadgen")
        except (ConnectionError, RuntimeError, ValueError) as error:
            what = " ".join(str(error).split())[:300]
            hint = "start one: ray start --head; the same Ray and Python on every node and here"
            raise UserError(f"no Ray cluster to join: {what}", f"--ray {address}", hint) from None
    cluster = RayCluster(address)
    try:
        yield cluster
    finally:
        cluster.leave()
        if ours:
            ray.shutdown()


def _reachable(address: str) -> None:
    """Ray itself may wait for minutes, or abort the process, where nobody listens."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if address.startswith("ray://") or not host or not port.isdigit():
        hint = "auto, or HOST:6379 of the head node; from outside: ray job submit -- loadgen run ... --ray auto"
        raise UserError("not the address of a Ray cluster", f"--ray {address}", hint)
    try:
        socket.create_connection((host.strip("[]"), int(port)), 5.0).close()
    except OSError as error:
        hint = "start one there: ray start --head --port=6379"
        raise UserError(f"no Ray cluster answers: {error}", f"--ray {address}", hint) from None


@dataclass(slots=True, eq=False)
class _Member:
    """A worker of the cluster, as the driver sees it."""

    i: int
    node_id: str
    node: str
    address: str
    courier: Any
    facts: Facts | None = None
    copy: Copy | None = None
    ready: asyncio.Future[None] | None = None
    lines: int = 0  # heard
    heard_at: float = 0.0
    lost: str = ""  # why
    lost_at: float = 0.0
    offset: clock_sync.Offset = field(default=clock_sync.Offset(0, 0))
    drift_ns: int | None = None
    niceness: int = 0  # of the worker process

    @property
    def where(self) -> str:
        return f"{self.node} ({self.address})"


@dataclass(slots=True, eq=False)
class RayCluster:
    """One that we are connected to. `place`, then `run`, once."""

    address: str
    _members: list[_Member] = field(default_factory=list)
    _group: Any = None

    @property
    def cores(self) -> int:
        """CPUs that are free now."""
        import ray

        return int(ray.available_resources().get("CPU", 0))

    def refuse_too_many(self, workers: int) -> None:
        """Raises UserError where there are not as many CPUs as workers."""
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        total = int(sum(node["Resources"].get("CPU", 0) for node in nodes))
        free = self.cores
        if workers > free:
            busy = "" if free == total else f", {total - free} of {total} are taken by others"
            what = f"{workers} workers need a CPU each; the cluster has {free} free on {len(nodes)} node(s){busy}"
            hint = f"--workers {free}, or --workers auto" if free else "add nodes: ray start --address=HEAD:6379"
            raise UserError(what, f"--workers {workers} --ray {self.address}", hint)

    # -- before the clock starts -----------------------------------------------------------------------------------

    async def place(self, job: Job, timetable: schedule.Schedule, *, simulated: bool) -> list[str]:
        """An actor for each worker, on nodes that can do their part; what is worth a note about them.

        Raises Faults with all that stands in the way, on whichever node.
        """
        import ray

        workers = job.settings.workers
        self.refuse_too_many(workers)
        where = await asyncio.to_thread(self._spread, workers)
        made = ray.remote(RayAgent)
        for i, (node_id, node, address) in enumerate(where):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=i
            )
            options = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": strategy}
            self._members.append(_Member(i, node_id, node, address, made.options(**options).remote()))
        files = _files(job)
        ours = await asyncio.to_thread(ray_agent.facts, files)
        faults: list[Fault] = []
        for told, member in zip(
            await asyncio.gather(*(self._facts(member, files) for member in self._members)), self._members, strict=True
        ):
            if isinstance(told, Fault):
                faults.append(told)
            else:
                member.facts = told
                faults += _unlike(ours, told, member.where)
        if not faults:
            faults += self._too_little(job, timetable)
        elsewhere = sorted({one.where for one in self._members if one.facts and one.facts.loopback != ours.loopback})
        notes = []
        if elsewhere and simulated:
            what = f"the embedded simulation listens on this machine alone, and workers run on {elsewhere[0]}"
            faults.append(
                UserError(what, f"--ray {self.address}", "start `loadgen sim` with --host and name it with --url")
            )
        elif elsewhere:
            notes = [
                f"{found.target.redacted} is the loopback address of each machine, and workers run on "
                f"{', '.join(elsewhere)}: each sends to its own machine"
                for found in job.found
                if _loopback(found.target.host)
            ]
        if faults:
            raise Faults(list({str(fault): fault for fault in faults}.values()))
        return notes

    def _spread(self, workers: int) -> list[tuple[str, str, str]]:
        """Reserve a CPU for each worker, on as many nodes as there are; id, name and address of each one's node."""
        import ray
        from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        able = sum(node["Resources"].get("CPU", 0) >= 1 for node in nodes.values())
        for strategy, patience_s in (("STRICT_SPREAD", 3.0), ("SPREAD", PLACED_S)):
            if strategy == "STRICT_SPREAD" and workers > able:
                continue
            group = placement_group([{"CPU": 1}] * workers, strategy=strategy)
            if group.wait(timeout_seconds=patience_s):
                self._group = group
                of = placement_group_table(group)["bundles_to_node_id"]
                found = [nodes[of[i]] for i in range(workers)]
                return [(one["NodeID"], one["NodeManagerHostname"], one["NodeManagerAddress"]) for one in found]
            remove_placement_group(group)
        what = f"no room for {workers} workers within {PLACED_S:g} s: free CPUs are not whole, or taken meanwhile"
        raise UserError(what, f"--workers {workers} --ray {self.address}", "fewer workers, or wait: `ray status`")

    async def _facts(self, member: _Member, files: Sequence[str]) -> Facts | Fault:
        try:
            told = await asyncio.wait_for(member.courier.facts.remote(files), BEGUN_S)
            files_open, ports = told.get("room", (None, None))
            return Facts(
                host=told.get("host", ""),
                same=told.get("same", {}),
                loopback=told.get("loopback", ""),
                room=resource_limits.Room(files=files_open, ports=ports),
                files=told.get("files", {}),
            )
        except Exception as error:  # whatever kept an actor from living: Ray has a dozen
            said = [line for line in str(error).splitlines() if "Error" in line] or [type(error).__name__]
            hint = f"the same loadgen in the Python that Ray was started with on {member.where}"
            return UserError(f"a node cannot run a worker: {said[-1].strip()[:300]}", member.where, hint)

    def _too_little(self, job: Job, timetable: schedule.Schedule) -> Iterator[Fault]:
        """Files and ports that a node lacks for the workers on it."""
        total = resource_limits.connections(timetable, job.workload.max_in_flight)
        if total is None:
            return
        by_network: dict[str, list[_Member]] = {}
        for member in self._members:
            assert member.facts is not None
            by_network.setdefault(member.facts.loopback, []).append(member)
        for here in by_network.values():
            assert here[0].facts is not None
            for fault in resource_limits.faults(
                total=math.ceil(total * len(here) / len(self._members)),
                workers=len(here),
                addresses=[found.target.address for found in job.found],
                sources=0,
                simulated=False,
                room=here[0].facts.room,
            ):
                yield UserError(f"on {here[0].where}: {fault.what}", fault.where, f"more nodes; {fault.hint}")

    # -- while it runs -----------------------------------------------------------------------------------------------

    async def run(
        self,
        job: Job,
        timetable: schedule.Schedule,
        on_drive: Callable[[Counted], Any] | None,
        begin: Callable[[int], None],
        placed: Callable[[manifest.Cluster], None],
    ) -> Share:
        """As `local.run`, on the placed actors. `placed` is told where the workers are and how sure their common start
        is, before the start instant and, with the drift of their clocks, after the end."""
        workers = len(self._members)
        (job.folder / "spool").mkdir(exist_ok=True)
        board = SharedCounters(job.folder / "spool" / worker.BOARD, workers)
        loop = asyncio.get_running_loop()
        data = pickle.dumps(job)
        pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._pass_on, number)
        following: list[asyncio.Task[Share | None]] = []
        try:
            for member in self._members:
                member.copy, member.ready = Copy(job.folder, member.i), loop.create_future()
            await asyncio.gather(*(self._started(member, pieces) for member in self._members))
            following = [asyncio.create_task(self._follow(member, board)) for member in self._members]
            await asyncio.gather(*(member.ready for member in self._members if member.ready is not None))
            await asyncio.gather(*(self._compare_clocks(member) for member in self._members))
            if on_drive is not None:
                on_drive(board)
            start_ns = monotonic_ns() + HEAD_START_NS
            begin(start_ns)
            placed(self._header())
            await asyncio.gather(*(
                self._tell(member, f"{member.offset.there(start_ns)}\n".encode()) for member in self._members
            ))  # fmt: skip
            late_ns = monotonic_ns() - start_ns
            told = await asyncio.gather(*following)
            total = merge.NOTHING
            for member, share in zip(self._members, told, strict=True):
                why = member.lost or f"worker {member.i} died on {member.where}"
                total = merge.add(total, share or merge.lost(job, timetable, member.i, workers, why))
            await asyncio.gather(*(self._measure_drift(member) for member in self._members if not member.lost))
            placed(self._header())
            return merge.add(total, _noted(*self._notes(start_ns, late_ns)))
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            with contextlib.suppress(Exception):
                living = [member.courier.end.remote() for member in self._members if not member.lost]
                await asyncio.wait_for(asyncio.gather(*living, return_exceptions=True), 5.0)

    async def _started(self, member: _Member, pieces: Sequence[bytes]) -> None:
        try:
            await asyncio.wait_for(member.courier.start.remote(member.i, len(self._members), *pieces), BEGUN_S)
        except Exception as error:  # see _facts
            raise TargetError(f"a worker could not be started: {type(error).__name__}", member.where) from None

    async def _follow(self, member: _Member, board: SharedCounters) -> Share | None:
        """Its files, its counters and what it says, until it ends or is lost. None: it has reported no share."""
        assert member.copy is not None and member.ready is not None
        share = None
        member.heard_at = monotonic()
        try:
            while True:
                taken = await self._taken(member)
                if taken is None:
                    if not member.ready.done():
                        raise TargetError(f"{member.lost} before the start", member.where)
                    return None
                member.copy.add(taken.pieces)
                board.paste(member.i, taken.board)
                for line in taken.lines:
                    member.lines += 1
                    if not member.ready.done():
                        worker.expect_ready(line)
                        member.ready.set_result(None)
                    else:
                        if line != worker.STOPPING:
                            share = worker.read_share(line)
                        if share is None or share.stopped:
                            for other in self._members:
                                other.courier.tell.remote(worker.STOPPING)
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

    async def _taken(self, member: _Member) -> ray_agent.Taken | None:
        """What is new of it; None when it is lost."""
        from ray.exceptions import ActorUnavailableError, RayError

        assert member.copy is not None
        while True:
            left = member.heard_at + LOST_S - monotonic()
            try:
                if left <= 0:
                    raise TimeoutError
                answer = member.courier.take.remote(dict(member.copy.have), member.lines)
                taken: ray_agent.Taken = await asyncio.wait_for(answer, left)
            except ActorUnavailableError:  # perhaps it comes back; asking again is harmless
                await asyncio.sleep(min(POLL_S, max(left, 0.0)))
                continue
            except (RayError, TimeoutError):
                member.lost_at = monotonic()
                member.lost = f"worker {member.i} was lost with node {member.where}"
                return None
            member.heard_at = monotonic()
            return taken

    async def _tell(self, member: _Member, line: bytes) -> None:
        with contextlib.suppress(Exception):  # it is lost, as `_follow` will see
            await asyncio.wait_for(member.courier.tell.remote(line), LOST_S)

    def _pass_on(self, number: int) -> None:
        for member in self._members:
            member.courier.signal.remote(int(number))

    async def _compare_clocks(self, member: _Member) -> None:
        """Raises TargetError for a worker that is lost before the start."""
        try:
            member.offset = await asyncio.wait_for(self._offset(member), LOST_S)
            member.niceness = await asyncio.wait_for(member.courier.niceness.remote(), LOST_S)
        except Exception as error:
            what = f"worker {member.i} was lost before the start: {type(error).__name__}"
            raise TargetError(what, member.where) from None

    async def _measure_drift(self, member: _Member) -> None:
        with contextlib.suppress(Exception):
            after = await asyncio.wait_for(self._offset(member), LOST_S)
            member.drift_ns = after.ns - member.offset.ns

    async def _offset(self, member: _Member) -> clock_sync.Offset:
        exchanges = []
        for _ in range(EXCHANGES):
            asked = monotonic_ns()
            there = await member.courier.clock.remote()
            exchanges.append(clock_sync.ClockExchange(asked, there, monotonic_ns()))
        return clock_sync.offset(exchanges)

    # -- what is said of it --------------------------------------------------------------------------------------------

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
                )
                for member in self._members
            ),
        )

    def _notes(self, start_ns: int, late_ns: int) -> Iterator[str]:
        told = self._header()
        limit = clock_sync.TOLERATED_NS / 1e6
        if told.start_bound_ms > limit:
            yield f"the common start is sure only within ±{told.start_bound_ms:.1f} ms, limit {limit:g} ms"
        if told.drift_ms is not None and told.drift_ms > limit:
            yield f"the nodes' clocks drifted by up to {told.drift_ms:.1f} ms during the run, limit {limit:g} ms"
        nice = sorted({member.where for member in self._members if member.niceness > 0})
        if nice:
            yield (
                f"workers on {', '.join(nice)} stand back for other processes, as Ray starts them: set "
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
        """End the actors and give their places back."""
        import ray

        with contextlib.suppress(Exception):
            for member in self._members:
                ray.kill(member.courier, no_restart=True)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)


def _noted(*notes: str) -> Share:
    return Share(prompts_total=0, prompts_count=0, late=0, interrupted=False, notes=notes)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _files(job: Job) -> list[str]:
    """Files that every worker reads for itself."""
    settings, requests = job.settings, job.workload.requests
    named: list[Any] = [settings.tokenizer, settings.tls.ca, settings.tls.cert, settings.tls.key]
    named += [getattr(requests, "path", None), getattr(requests, "trace", None)]
    named += [stage.arrival.file for stage in job.workload.stages if isinstance(stage.arrival, Replay)]
    found = [os.fspath(one) for one in named if isinstance(one, str | os.PathLike)]
    return [one for one in dict.fromkeys(found) if os.path.exists(one)]


def _unlike(ours: Facts, theirs: Facts, where: str) -> Iterator[Fault]:
    """What a node has otherwise than this machine, though the requests depend on it."""
    for name, value in ours.same.items():
        if theirs.same.get(name) != value:
            what = f"{name} {theirs.same.get(name)} there, {value} here"
            yield UserError(what, where, "the same on every node: the requests of a run depend on it")
    for path, digest in ours.files.items():
        if theirs.files.get(path) != digest:
            what = "no such file there" if not theirs.files.get(path) else "another file there than here"
            yield UserError(f"{path}: {what}", where, "put it on a shared folder, under the same absolute path")
