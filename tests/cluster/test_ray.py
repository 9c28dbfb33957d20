"""The same load on a cluster as on one machine, a common start, a lost node, and refused runs.

One test starts one real Ray cluster of three nodes on this machine, so that there is never a second
one at the same time. Its steps are the functions above it; the last steps remove nodes.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import select
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import pytest
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as some
from loadgen_sdk import compiled
from loadgen_sdk.transport.target import Target
from msgspec.structs import replace
from ray_nodes import kill, started
from run_fixtures import NO_PAGES, says, when_started
from servers import log, shared

from loadgen.cluster import clock_sync, lease, node_agent, node_facts, placement, ray_process
from loadgen.cluster import ray as cluster
from loadgen.core.errors import UserError
from loadgen.core.execution import run
from loadgen.core.execution.events import RunEvent, RunningLoad, RunPlanned
from loadgen.core.execution.plan import Plan, Settings
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.results import store
from loadgen.core.results.manifest import decode_manifest
from loadgen.core.results.record import STATUS
from loadgen.core.results.record_log import (
    RecordLog,
    complete_rows,
    recorded_slots,
    segments,
    worker_texts,
)
from loadgen.core.slo import Slo, Term
from loadgen.core.stats.quantiles import distribution_of
from loadgen.core.workload import Workload, load, read_flags
from loadgen.search.goal import Goal
from loadgen.search.search_results import PlannedTrial
from loadgen.search.trial_runner import TrialRunner
from loadgen.search.trial_workload import as_trial_workload, with_load
from loadgen.sim.server.options import Options

SECRET = "sk-never-written-4711"
QUICK = Options(ttft="5ms", itl="0.2ms", log_bodies=True)


def workload(folder: Path, **flags: str) -> Workload:
    file = folder / "w.yaml"
    file.write_text("name: many\nrequests: {input_tokens: 8, output_tokens: 4}\n")
    return load(str(file), read_flags(**({"seed": "7", "warmup": "0"} | flags)))


# -- clocks ----------------------------------------------------------------------------------------

ways = some.lists(
    some.tuples(some.integers(0, 10**8), some.integers(0, 10**8)), min_size=1, max_size=30
)


@given(offset_ns=some.integers(-(10**15), 10**15), ways=ways)
def test_the_true_clock_offset_is_within_the_estimated_bound(
    offset_ns: int, ways: list[tuple[int, int]]
) -> None:
    exchanges, now = [], 10**12
    for there, back in ways:
        exchanges.append(clock_sync.ClockExchange(now, now + there + offset_ns, now + there + back))
        now += there + back + 1
    clock_offset = clock_sync.estimate_offset(exchanges)

    assert abs(clock_offset.offset_ns - offset_ns) <= clock_offset.bound_ns
    assert (
        clock_offset.bound_ns <= min(there + back for there, back in ways) // 2 + 1
    )  # never worse than NTP's
    assert abs(clock_offset.to_remote_ns(5) - (5 + offset_ns)) <= clock_offset.bound_ns


def test_contradicting_clock_readings_use_the_fastest_response() -> None:
    clock_offset = clock_sync.estimate_offset(
        [clock_sync.ClockExchange(0, 1000, 10), clock_sync.ClockExchange(20, 9000, 400)]
    )
    assert clock_offset == clock_sync.ClockOffset(995, 5)


# -- files on their way ----------------------------------------------------------------------------


def test_records_never_precede_their_texts_and_are_complete_despite_lost_responses(
    tmp_path: Path,
) -> None:
    """Although half of the replies are lost, the copy equals the file in the end."""
    from loadgen.core.results.record import ROW
    from loadgen.core.stats.histogram import Histogram

    remote_dir, local_dir = tmp_path / "there", tmp_path / "here"
    sender = node_agent.NodeAgent()
    sender._folder, sender._worker_index = remote_dir, 0
    record_log = RecordLog(remote_dir, 0)
    sender._counters = SharedCounters(remote_dir / "spool" / "board", 1)
    copy = node_agent.WorkerFileCopy(local_dir, 0)
    histogram, draw = Histogram(), np.random.default_rng(1)
    bins = np.zeros(0, np.int64)
    for step in range(60):
        rows = np.zeros(3, ROW)
        rows["text"] = record_log.store_text(f"error {step}")
        record_log.add_record(rows.tobytes())
        record_log.add_event_times(f"run-{step}", array("q", range(step)))
        histogram.add(draw.integers(1, 10**9, 5))
        bins = np.concatenate([bins, draw.integers(0, 9, 150)])
        first = max(0, len(bins) - 1_000)
        bins[first:] += 1
        record_log.write_event_counts(0, histogram, bins[first:], first)
        if step % 3:
            record_log.flush()
        taken = _now(sender.read_update(copy.copied, 0))
        if step % 2:
            copy.write_chunks(taken.chunks)
            texts = worker_texts(local_dir, 0)
            records = complete_rows(local_dir / "spool" / "w0.rows")
            assert (records["text"] < len(texts)).all()
    record_log.close()
    copy.write_chunks(_now(sender.read_update(copy.copied, 0)).chunks)
    files = {
        path.relative_to(remote_dir)
        for path in remote_dir.rglob("*")
        if path.is_file() and path.name != "board"
    }
    assert len(files) == 7
    for file in files:
        assert (local_dir / file).read_bytes() == (remote_dir / file).read_bytes(), file


def test_segments_are_deleted_from_the_node_after_their_transfer(tmp_path: Path) -> None:
    from loadgen.core.results.record import ROW

    remote_dir, local_dir = tmp_path / "there", tmp_path / "here"
    sender = node_agent.NodeAgent(max_record_bytes=7 * ROW.itemsize)
    sender._folder, sender._worker_index = remote_dir, 0
    record_log = RecordLog(remote_dir, 0, segment_rows=10)
    sender._counters = SharedCounters(remote_dir / "spool" / "board", 1)
    for number in range(35):
        row = np.zeros(1, ROW)
        row["slot"] = number
        record_log.add_record(row.tobytes())
        record_log.flush()
    record_log.close()
    copy = node_agent.WorkerFileCopy(local_dir, 0)
    more = True
    while more:
        taken = _now(sender.read_update(copy.copied, 0))
        copy.write_chunks(taken.chunks)
        more = taken.has_more
    assert recorded_slots(local_dir, 0)["slot"].tolist() == list(range(35))
    _now(sender.read_update(copy.copied, 0))
    assert len(segments(remote_dir, 0)) == 1 < len(segments(local_dir, 0))


def _now(call: Any) -> Any:
    """Return the value of a coroutine that waits for nothing."""
    try:
        call.send(None)
    except StopIteration as error:
        return error.value
    raise AssertionError("it waited")


# -- a place for the results -----------------------------------------------------------------------


@pytest.mark.processes
def test_the_run_directory_is_copied_to_the_store_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    import loadgen

    requested_workload = {"name": "s", "requests": {"input_tokens": 8, "output_tokens": 4}}
    flags: dict[str, Any] = {"request_rate": "50", "num_requests": "10", "warmup": "0", "seed": "1"}
    flags |= {
        "url": shared(QUICK).url,
        "model": "sim",
        "server": "trtllm",
        "out": f"file://{tmp_path}/bucket/run-1",
    }
    result = loadgen.run(requested_workload, **flags)
    remote_dir = tmp_path / "bucket" / "run-1"
    assert {path.name for path in remote_dir.rglob("*.*")} >= {
        "run.json",
        "summary.json",
        "requests.parquet",
    }
    assert store.read_run(remote_dir).rows.tobytes() == store.read_run(result.folder).rows.tobytes()
    with refused(UserError, "file_exists", "--out"):
        loadgen.run(requested_workload, **flags)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("nonsense://x/y", "invalid_url"),
        ("az://container/run", "not_installed"),
        ("file:///proc/no/run", "unwritable_file"),
    ],
)
def test_an_unwritable_directory_is_reported_before_the_first_request(url: str, code: str) -> None:
    from loadgen.core.results import object_store

    with refused(UserError, code):
        object_store.open_folder(url)


def test_the_error_for_a_missing_ray_package_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(UserError, "not_installed", "ray") as exc_info:
        ray_process.RayDriver().connect("auto", "alice", "--ray auto")
    assert "pip install 'loadgen[ray]'" in exc_info.value.hint


@pytest.mark.parametrize(
    ("address", "hint"),
    [("127.0.0.1:9", ""), ("ray://host:10001", "ray job submit"), ("host", "HOST:6379")],
)
def test_an_address_without_a_cluster_is_reported_at_once(address: str, hint: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'loadgen[ray]'")
    with (
        refused(UserError, "no_cluster") as exc_info,
        cluster.open_worker_group(Settings(ray=address)),
    ):
        pass
    assert hint in exc_info.value.hint


@pytest.mark.parametrize("differing", ["loadgen", "Python", "numpy"])
def test_nodes_with_different_versions_or_data_are_refused(differing: str, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("{}")
    our_node_facts = node_facts.read_local_facts([str(data)])

    assert (
        list(
            node_facts.find_differences(
                our_node_facts, node_facts.read_local_facts([str(data)]), "node"
            )
        )
        == []
    )

    (fault,) = node_facts.find_differences(
        our_node_facts,
        our_node_facts._replace(versions=our_node_facts.versions | {differing: "other"}),
        "node",
    )

    assert (fault.code, fault.key) == ("nodes_differ", differing)

    (fault,) = node_facts.find_differences(
        our_node_facts, our_node_facts._replace(file_digests={str(data): ""}), "node"
    )

    assert (fault.code, fault.key) == ("nodes_differ", str(data))

    data.write_text("[]")
    (fault,) = node_facts.find_differences(
        our_node_facts, node_facts.read_local_facts([str(data)]), "node"
    )
    assert (fault.code, fault.key) == ("nodes_differ", str(data))


@pytest.mark.parametrize(
    ("url", "simulated", "faults", "notes"),
    [
        ("http://127.0.0.1:1", True, 1, 1),  # the embedded endpoint
        ("http://127.0.0.1:1", False, 0, 1),
        ("http://localhost:1", False, 0, 1),
        ("http://gpu.example", False, 0, 0),
    ],
)
def test_a_loopback_address_with_nodes_on_other_machines_is_reported(
    tmp_path: Path, url: str, simulated: bool, faults: int, notes: int
) -> None:
    planned_plans: list[Plan] = []

    def hear(event: RunEvent) -> None:
        if isinstance(event, RunPlanned):
            planned_plans.append(event.plan)

    settings = Settings(url="sim:gb300-vm", out=tmp_path / "run")
    run.execute(workload(tmp_path, concurrency="1", num_requests="1"), settings, (hear,))
    job = planned_plans[0].job
    probe_result = msgspec.structs.replace(job.probe_results[0], target=Target.parse(url))
    job = msgspec.structs.replace(job, simulated=simulated, probe_results=(probe_result,))
    here = node_facts.read_local_facts([])
    nodes = [("a", here), ("b", here._replace(loopback_id="another machine"))]
    assert node_facts.find_remote_nodes(here, nodes[:1]) == []
    assert [
        *node_facts.unreachable_target_errors(job, [], "--ray"),
        *node_facts.loopback_notes(job, []),
    ] == []
    elsewhere = node_facts.find_remote_nodes(here, nodes)
    assert elsewhere == ["b"]
    assert len([*node_facts.unreachable_target_errors(job, elsewhere, "--ray")]) == faults
    assert len([*node_facts.loopback_notes(job, elsewhere)]) == notes


# -- a place for each worker -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "cpus", "shares"),
    [
        (3, (8, 8, 2), (1, 1, 1)),  # a node each before any has two
        (9, (8, 8, 2), (4, 4, 1)),  # then by size
        (18, (8, 8, 2), (8, 8, 2)),
        (2, (1, 4, 2), (0, 1, 1)),  # the largest first
        (5, (1, 1), (3, 2)),  # a node was lost: more workers than CPUs
    ],
)
def test_workers_are_assigned_in_proportion_to_the_size_of_nodes(
    workers: int, cpus: tuple[int, ...], shares: tuple[int, ...]
) -> None:
    names = [str(i) for i in range(len(cpus))]
    counts = Counter(placement.assign_workers(workers, dict(zip(names, cpus, strict=True))))
    assert tuple(counts[name] for name in names) == shares


def test_nodes_have_unique_names() -> None:
    def node(id: str, host: str, address: str, *, alive: bool = True) -> dict[str, Any]:
        return {
            "NodeID": id,
            "NodeManagerHostname": host,
            "NodeManagerAddress": address,
            "NodeManagerPort": 1,
            "Alive": alive,
            "Resources": {"CPU": 4.0},
        }

    listed = [
        node("a" * 9, "vm", "10.0.0.1"),
        node("b" * 9, "vm", "10.0.0.2"),
        node("c" * 9, "vm", "10.0.0.2"),
    ]
    cluster_nodes = placement.parse_alive_nodes(listed, {"a" * 9: {"CPU": 2.5}})
    assert [cluster_node.label for cluster_node in cluster_nodes] == [
        "vm (10.0.0.1)",
        "vm #bbbbbb (10.0.0.2)",
        "vm #cccccc (10.0.0.2)",
    ]
    assert [
        (cluster_node.free_cpus, cluster_node.total_cpus) for cluster_node in cluster_nodes
    ] == [(2, 4), (0, 4), (0, 4)]
    lost = [*listed[:2], node("c" * 9, "vm", "10.0.0.2", alive=False)]
    assert [cluster_node.label for cluster_node in placement.parse_alive_nodes(lost, {})] == [
        "vm (10.0.0.1)",
        "vm #bbbbbb (10.0.0.2)",
    ], "it keeps it"


# -- a real cluster --------------------------------------------------------------------------------


@pytest.fixture
def nodes() -> Iterator[Any]:
    """Three nodes of a CPU each, one of them without the compiled part."""
    with started({}, {compiled.PURE: "1"}) as started_nodes:
        yield started_nodes


def build_settings(
    nodes: Any, url: str | None, out: Path, workers: int = 3, **more: Any
) -> Settings:
    where: dict[str, Any] = (
        {} if url is None else {"url": url, "model": "sim", "server": "trtllm", "api_key": SECRET}
    )
    arguments = {"command": ("loadgen", "run")}  # a command keeps its connection from run to run
    return Settings(
        ray=nodes.address, workers=workers, out=out, **(where | arguments | NO_PAGES | more)
    )


def _a_cluster_sends_what_one_machine_sends(tmp_path: Path, nodes: Any) -> None:
    """Check that a cluster sends the same as one worker; test_scale checks 1, 2 and 4 workers."""
    seen: list[Any] = []
    for workers in (1, 3):
        server = shared(QUICK)
        settings = build_settings(nodes, server.url, tmp_path / str(workers), workers)
        settings = settings if workers == 3 else replace(settings, ray=None)
        summary, out = run.execute(
            workload(tmp_path, request_rate="100", num_requests="60"), settings
        )
        received = log(server)
        rows = store.read_run(out).rows
        rows = rows[np.argsort(rows["slot"])]
        assert summary.requests.ok == summary.requests.scheduled == len(rows)
        assert sorted(set(rows["worker"].tolist())) == list(range(workers))
        expected = distribution_of(rows["first_token_ns"] - rows["due_ns"])
        withheld = summary.withheld_statistics.get("ttft")
        assert summary.ttft_ms == expected.without(withheld.ranges if withheld else ())
        bodies = Counter(
            logged_request.body_sha256 for logged_request in received.requests if logged_request.id
        )
        seen.append(
            (
                bodies,
                rows["due_ns"].tolist(),
                rows["slot"].tolist(),
                summary.fingerprints,
                summary.bytes.sent,
            )
        )
    assert seen[0] == seen[1]
    _check_placement(out)
    assert not (out / "spool").exists()
    assert SECRET.encode() not in b"".join(
        path.read_bytes() for path in out.rglob("*") if path.is_file()
    )


def _check_placement(out: Path) -> None:
    """Check that there is a worker on each node and the clock offset is within its bound.

    All nodes share the clock of this machine, so the true offset is 0.
    """
    manifest = decode_manifest((out / "run.json").read_bytes())
    cluster = manifest.cluster
    assert cluster is not None
    assert sorted(node_worker.hot_path for node_worker in cluster.workers) == sorted(
        [compiled.RUNS] * 2 + ["python"]
    )
    assert manifest.host.hot_path == "python", "one of them"
    assert cluster.nodes == len(cluster.workers) == 3
    assert cluster.drift_ms is not None
    assert (
        cluster.start_bound_ms == max(node_worker.bound_ms for node_worker in cluster.workers) > 0
    )
    for worker in cluster.workers:
        assert abs(worker.offset_ms) <= worker.bound_ms + 1e-3


def _what_cannot_be_is_told_before_the_first_request(tmp_path: Path, nodes: Any) -> None:
    requested_workload = workload(tmp_path, request_rate="50", num_requests="20")
    url = shared(QUICK).url
    with pytest.raises(UserError, match="4 workers need one CPU each"):
        run.execute(requested_workload, build_settings(nodes, url, tmp_path / "a", workers=4))


def wait_until(is_over: Callable[[], bool]) -> None:
    """Wait for an event of the cluster, at most until no machine would need so long."""
    deadline_s = monotonic() + 60
    while not is_over():
        assert monotonic() < deadline_s, "the event did not come"
        select.select([], [], [], 0.02)


def count_copied_records(run_dir: Path) -> list[int]:
    """Return the number of records of each of three workers that were copied from its node."""
    return [len(recorded_slots(run_dir, worker)) for worker in range(3)]


def count_growing(earlier: list[int], later: list[int]) -> int:
    """Return how many workers have at least 20 more records than before."""
    return sum(new >= old + 20 for old, new in zip(earlier, later, strict=True))


def check_all_ok_until_stop(worker_records: Any) -> None:
    """Check that a worker has finished its requests in their order until the load was stopped."""
    statuses = worker_records[np.argsort(worker_records["due_ns"])]["status"].tolist()
    finished_requests = statuses.count(STATUS["ok"])
    unsent_requests = statuses.count(STATUS["cancelled"])
    assert statuses == [STATUS["ok"]] * finished_requests + [STATUS["cancelled"]] * unsent_requests
    assert finished_requests > 20


def _a_lost_node_leaves_what_it_had_finished(tmp_path: Path, nodes: Any) -> None:
    """Kill a node during a run: its records up to then are kept, its other slots are lost.

    The load would last longer than any machine needs to kill a node. It is stopped when the other
    nodes have gone on after the loss.
    """
    out = tmp_path / "out"
    copied_before_kill: list[int] = []

    def kill_and_stop(load: RunningLoad, loop: asyncio.AbstractEventLoop) -> None:
        try:
            wait_until(lambda: min(count_copied_records(out)) > 0)
            copied_before_kill.extend(count_copied_records(out))
            kill(nodes)
            copied_at_kill = count_copied_records(out)
            wait_until(lambda: count_growing(copied_at_kill, count_copied_records(out)) == 2)
        finally:
            loop.call_soon_threadsafe(load.stop)

    def start_killing(load: RunningLoad) -> None:
        arguments = (load, asyncio.get_running_loop())
        threading.Thread(target=kill_and_stop, args=arguments).start()

    server = shared(QUICK)
    summary, _ = run.execute(
        workload(tmp_path, request_rate="60", duration="200s"),
        build_settings(nodes, server.url, out),
        when_started(start_killing),
    )
    received = log(server)
    told_of = decode_manifest((out / "run.json").read_bytes())
    assert told_of.cluster is not None
    (gone,) = [
        placed_worker.worker for placed_worker in told_of.cluster.workers if placed_worker.lost
    ]
    rows = store.read_run(out).rows
    worker_records = rows[rows["worker"] == gone]
    completed_records, lost_worker_record = (
        worker_records[worker_records["status"] == STATUS["ok"]],
        worker_records[worker_records["status"] == STATUS["lost"]],
    )
    assert len(rows) == len(set(rows["slot"].tolist())) == summary.requests.scheduled
    assert summary.requests.lost == len(lost_worker_record) > 0
    assert len(completed_records) >= copied_before_kill[gone] > 0
    sent = {
        int(logged_request.id.rpartition("-")[2])
        for logged_request in received.requests
        if logged_request.id
    }
    assert set(completed_records["slot"].tolist()) <= sent
    for worker in {0, 1, 2} - {gone}:
        check_all_ok_until_stop(rows[rows["worker"] == worker])
    assert not summary.verdict.valid
    where = next(
        f"{placed_worker.node} ({placed_worker.address})"
        for placed_worker in told_of.cluster.workers
        if placed_worker.lost
    )
    assert says(summary.verdict.codes, "worker_died", worker=gone, node=where)
    (note,) = [note for note in told_of.warnings if "was lost" in note]
    detection_delay = re.search(r"detected ([\d.]+) s after", note)
    assert detection_delay is not None
    assert float(detection_delay[1]) < 15


def _a_search_ends_its_trial_early_there_too(tmp_path: Path, nodes: Any) -> None:
    """End a trial early; the next run needs the CPUs that the trial must release."""
    goal = Goal(slo=Slo(terms=(Term(metric="ttft", limit_ns=1),)))
    requested_workload = as_trial_workload(
        workload(tmp_path, request_rate="40", duration="60s"), 60 * 10**9
    )
    settings = build_settings(nodes, shared(QUICK).url, tmp_path, workers=2)
    runs = TrialRunner(
        output_dir=tmp_path / "s",
        goal=goal,
        make_workload=lambda trial: with_load(requested_workload, trial.load),
        settings=settings,
        seed=7,
        check_interval_s=0.2,
    )
    result = runs.run(PlannedTrial(number=0, load=40.0, kind="probe", may_pass_early=True))
    manifest = decode_manifest((tmp_path / "s" / result.run_name / "run.json").read_bytes())
    assert manifest.cluster is not None and len(manifest.cluster.workers) == 2
    if result.outcome != "invalid":  # a busy host's senders are late, which decides nothing
        assert (manifest.state, result.duration_s < 30) == ("decided", True)


def _a_node_lost_before_the_load_is_left_out(tmp_path: Path, nodes: Any) -> None:
    """Kill a node after placement and before the start: the other node runs all workers."""
    gone: list[str] = []

    def hear(event: RunEvent) -> None:
        if isinstance(event, RunPlanned) and not gone:
            gone.append(kill(nodes))

    settings = build_settings(nodes, shared(QUICK).url, tmp_path / "out", workers=2)
    summary, out = run.execute(
        workload(tmp_path, request_rate="40", num_requests="40"), settings, (hear,)
    )
    manifest = decode_manifest((out / "run.json").read_bytes())
    assert (
        manifest.cluster is not None
        and manifest.cluster.nodes == 1
        and len(manifest.cluster.workers) == 2
    )
    assert summary.requests.ok == summary.requests.scheduled == 40
    before = [note for note in manifest.warnings if "was lost before the load" in note]
    assert sum(gone[0][:6] in note for note in before) == 1, (
        "nodes of one machine: their names differ by their id"
    )


def _one_command_at_a_time(nodes: Any) -> None:
    import ray

    with cluster.open_worker_group(Settings(ray=nodes.address, command=("loadgen.run",))):
        lease_actor = ray.get_actor(lease.NAME, namespace=lease.NAMESPACE)
        ray.get(lease_actor.holder.remote())  # its process runs: it takes long on a busy machine
        with refused(UserError, "cluster_in_use", "--ray") as exc_info:
            ray_process.acquire_lease("bob", f"--ray {nodes.address}")
        assert f"(process {os.getpid()}), loadgen.run, since 20" in exc_info.value.message


def _no_key_is_written_by_ray(nodes: Any) -> None:
    """After all that ran before on this cluster."""
    folder = Path(nodes.head_node.get_session_dir_path())
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def _nothing_is_left_on_the_nodes(nodes: Any) -> None:
    """But for what the two killed ones could not take away."""
    scratch = Path(nodes.head_node.get_temp_dir_path()).parent
    assert len(list(scratch.glob("loadgen-*-w*"))) <= 2


@pytest.mark.early
@pytest.mark.processes
def test_a_run_on_a_real_cluster_has_every_record(tmp_path: Path, nodes: Any) -> None:
    import ray

    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    ray.init(
        address=nodes.address, log_to_driver=False, logging_level="ERROR"
    )  # as a program inside a cluster has it
    try:
        _one_command_at_a_time(nodes)
        _what_cannot_be_is_told_before_the_first_request(
            folder("refused"), nodes
        )  # the lease was given back
    finally:
        ray.shutdown()
    try:  # over the connection of the run before
        _a_search_ends_its_trial_early_there_too(folder("search"), nodes)
        _a_cluster_sends_what_one_machine_sends(folder("same"), nodes)
        _a_lost_node_leaves_what_it_had_finished(folder("lost"), nodes)
        _a_node_lost_before_the_load_is_left_out(folder("before"), nodes)
    finally:
        cluster_connection = cluster._command_connections.pop(nodes.address)
        atexit.unregister(cluster_connection.client.close)
        cluster_connection.client.close()
    _no_key_is_written_by_ray(nodes)
    _nothing_is_left_on_the_nodes(nodes)
