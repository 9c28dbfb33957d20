"""Several workers: the load does not depend on their number, and quantiles merge exactly."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expected_errors import refused
from hypothesis import given, settings
from hypothesis import strategies as some
from queueing import rows
from run_fixtures import gaps_of, manifest, when_started
from servers import log, shared, start

from loadgen.core.errors import CombinedError
from loadgen.core.execution import plan, resource_limits, run
from loadgen.core.execution.events import Counters
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.resource_limits import ConnectionDemand, MachineLimits
from loadgen.core.execution.shared_counters import SharedCounters
from loadgen.core.metrics.columns import FAILED
from loadgen.core.results import store
from loadgen.core.results.manifest import encode_manifest
from loadgen.core.results.record import KINDS
from loadgen.core.results.record_log import RecordLog
from loadgen.core.run_summary import summarize
from loadgen.core.schedule.build import build_schedule
from loadgen.core.schedule.schedule import shard
from loadgen.core.sidecars.compactor import compact_records
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import distribution_of
from loadgen.core.workload import Workload, load, read_flags
from loadgen.sim.server import embedded
from loadgen.sim.server.options import Options


def workload(folder: Path, turns: int = 0, **flags: str) -> Workload:
    file = folder / "w.yaml"
    more = f", turns: {{count: {turns}, tool_result_tokens: 3}}" if turns else ""
    file.write_text(f"name: many\nrequests: {{input_tokens: 8, output_tokens: 4{more}}}\n")
    return load(str(file), read_flags(**({"seed": "7", "warmup": "0"} | flags)))


def to(server: embedded.EmbeddedServer, out: Path, **more: Any) -> Settings:
    return Settings(
        url=server.url,
        model="sim",
        server="trtllm",
        out=out,
        server_metrics=("off",),
        energy=("off",),
        **more,
    )


# -- the same load, however it is split ------------------------------------------------------------

LOADS: list[tuple[int, dict[str, str], int]] = [
    (0, {"request_rate": "400", "num_requests": "80"}, 4),
    (3, {"request_rate": "150", "num_requests": "30"}, 2),
    (0, {"concurrency": "9", "num_requests": "80"}, 2),
]


@pytest.mark.processes
@pytest.mark.parametrize(("turns", "flags", "most"), LOADS)
def test_one_and_many_workers_send_the_same_requests(
    tmp_path: Path, turns: int, flags: dict[str, str], most: int
) -> None:
    seen: list[Any] = []
    for workers in (1, most):
        server = shared()
        summary, out = run.execute(
            workload(tmp_path, turns, **flags), to(server, tmp_path / str(workers), workers=workers)
        )
        bodies = Counter(
            logged_request.body_sha256
            for logged_request in log(server).requests
            if logged_request.id
        )
        rows = store.read_run(out).rows
        rows = rows[np.argsort(rows["slot"])]
        assert summary.requests.ok == summary.requests.scheduled == len(rows) == bodies.total()
        assert sorted(set(rows["worker"].tolist())) == list(range(workers))
        assert summary.fingerprints.bodies
        dues = rows["due_ns"][rows["turn"] == 0].tolist() if "request_rate" in flags else []
        seen.append((bodies, dues, rows["slot"].tolist(), summary.fingerprints, summary.bytes.sent))

    assert seen[0] == seen[1]


@given(
    values=some.lists(some.integers(0, 10**12), min_size=1, max_size=300),
    parts=some.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
def test_merged_histograms_equal_the_histogram_of_all_records(
    values: list[int], parts: int
) -> None:
    all_values = np.array(values, np.int64)
    shares = [all_values[i::parts] for i in range(parts)]

    assert distribution_of(np.concatenate(shares)) == distribution_of(all_values)

    together, at_once = Histogram(), Histogram()
    at_once.add(all_values)
    for share in shares:
        histogram = Histogram()
        histogram.add(share)
        together.merge(Histogram.from_bytes(histogram.to_bytes()))

    assert together.to_bytes() == at_once.to_bytes()


@given(
    seed=some.integers(1, 10**6),
    count=some.integers(12, 400),
    workers=some.integers(1, 7),
    lazily=some.booleans(),
)
@settings(max_examples=6, deadline=None)
def test_the_summary_of_many_workers_equals_that_of_one(
    seed: int, count: int, workers: int, lazily: bool
) -> None:
    """Records of many workers are compared with those of one in every file. Some have failed."""
    draw = np.random.default_rng(seed)
    records = rows(seed, count)
    failed = draw.random(count) < 0.1
    records["status"][failed], records["kind"][failed], records["text"][failed] = (
        FAILED,
        KINDS.index("reset"),
        0,
    )
    records["worker"] = draw.integers(0, workers, count)
    with tempfile.TemporaryDirectory() as scratch, open(os.devnull) as ended:
        folder = Path(scratch)
        run_manifest = manifest("whole", count, workers=workers)
        (folder / "run.json").write_bytes(encode_manifest(run_manifest))
        for worker in range(workers):
            mine = draw.permutation(records[records["worker"] == worker])
            record_log = RecordLog(folder, worker)
            if (mine["text"] == 0).any():
                record_log.store_text("gone")
            record_log.add_record(mine.tobytes())
            if len(mine):
                record_log.write_event_counts(0, *gaps_of(mine))
            record_log.close()
        compact_records(folder, ended)
        merged = summarize(*store.read_run(folder, max_rows=0 if lazily else math.inf))
    gaps, timeline = gaps_of(records)

    assert merged == summarize(run_manifest, records, [gaps], [timeline], [], ["gone"])


@pytest.mark.parametrize("most", [1, 2, 7, 20, 21])
@pytest.mark.parametrize("workers", [1, 2, 7])
def test_worker_limits_add_up_to_the_limit_in_flight(most: int, workers: int) -> None:
    schedule = build_schedule(load("qa", read_flags(concurrency=8, num_requests=8)), 1)
    shards = [shard(schedule, index, workers) for index in range(workers)]
    assert sum(plan.share_of_limit(most, part) or 0 for part in shards) == most
    assert plan.share_of_limit(None, shards[0]) is None


@pytest.mark.processes
def test_the_limit_in_flight_applies_to_all_workers_together(tmp_path: Path) -> None:
    with start(Options(ttft="3s")) as server:
        run_settings = to(server, tmp_path / "out", workers=2)
        requested_workload = workload(
            tmp_path, request_rate="inf", num_requests="40", max_in_flight="5", grace="0.2s"
        )
        summary, _ = run.execute(requested_workload, run_settings)
    assert summary.requests.dropped == 35
    assert summary.load.in_flight_max == 5


# -- workers that the load can use -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "simulated", "expected"),
    [
        ({"request_rate": "10", "num_requests": "50"}, False, 1),
        ({"request_rate": "8000", "duration": "10s"}, False, 4),  # 4 events each: 32,000/s
        ({"request_rate": "100000", "duration": "1s"}, False, 8),
        ({"request_rate": "100000", "duration": "1s"}, True, 7),  # the simulation takes a core
        ({"request_rate": "100000", "duration": "1s", "max_in_flight": "3"}, False, 3),
        ({"concurrency": "2", "num_requests": "50"}, False, 1),
        ({"concurrency": "400", "duration": "5s"}, False, 7),
        (
            {"concurrency": "400", "num_requests": "900", "warmup": "400req"},
            False,
            1,
        ),  # a boundary that all share
    ],
)
def test_the_number_of_workers_depends_on_the_load(
    tmp_path: Path, flags: dict[str, str], simulated: bool, expected: int
) -> None:
    from loadgen.core.requests import tokenizer
    from loadgen.core.requests.build import build_prompts

    requested_workload = workload(tmp_path, **flags)
    requests = build_prompts(requested_workload, 7, 1, tokenizer.load_tokenizer(None))
    worker_count = plan.count_useful_workers(
        build_schedule(requested_workload, 7), requests, requested_workload, 8 - simulated
    )
    assert worker_count == expected


# -- room ------------------------------------------------------------------------------------------

AMPLE = MachineLimits(open_files=100_000, local_ports=28_000)


@pytest.mark.parametrize(
    ("need", "limits", "expected_texts"),
    [
        ({"total": 20_000}, AMPLE, []),
        ({"total": None}, MachineLimits(open_files=10, local_ports=10), []),
        ({"total": 20_000}, MachineLimits(open_files=None, local_ports=None), []),
        (
            {"total": 20_000, "workers": 1},
            MachineLimits(open_files=20_000, local_ports=None),
            ["--workers 2"],
        ),
        ({"total": 20_000, "workers": 2}, MachineLimits(open_files=20_000, local_ports=None), []),
        (
            {"total": 20_000, "workers": 2, "is_simulated": True},
            MachineLimits(open_files=20_000, local_ports=None),
            ["loadgen sim"],
        ),
        ({"total": 60_000}, AMPLE, ["3 addresses"]),
        ({"total": 60_000, "source_addresses": 3}, AMPLE, []),
        ({"total": 60_000, "addresses": ["a:1", "b:1", "c:1"]}, AMPLE, []),
        ({"total": 60_000, "addresses": ["a:1", "a:1", "c:1"]}, AMPLE, ["2 addresses"]),
        (
            {"total": 60_000, "workers": 1},
            MachineLimits(open_files=20_000, local_ports=28_000),
            ["--workers 4", "--set sources"],
        ),
    ],
)
def test_connections_above_the_limits_of_files_or_ports_are_reported(
    need: dict[str, Any], limits: MachineLimits, expected_texts: list[str]
) -> None:
    demand = ConnectionDemand(
        **{"workers": 4, "addresses": ["a:1"], "source_addresses": 0, "is_simulated": False} | need
    )
    user_errors = list(resource_limits.limit_errors(demand, limits))
    assert len(user_errors) == len(expected_texts)
    for fault, text in zip(user_errors, expected_texts, strict=True):
        assert text in fault.hint


def test_limits_of_open_files_and_local_ports_are_plausible() -> None:
    limits = resource_limits.read_machine_limits()
    assert limits.open_files is None or limits.open_files > 0
    assert limits.local_ports is None or 0 < limits.local_ports <= 65_535


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0), ("32768,40000-40010", 12), ("1-32767,70000", 0), ("1-99999", 28_232)],
)
def test_reserved_ports_are_not_counted_as_free(text: str, expected: int) -> None:
    assert resource_limits._count_reserved_ports(text, 32_768, 60_999) == expected


@pytest.mark.processes
def test_a_load_too_large_for_this_machine_is_refused_before_it_starts(tmp_path: Path) -> None:
    """Of a process that may open 100 files, more lanes than a port number can tell apart."""
    options = [
        "--workers",
        "2",
        "--set",
        "sources=203.0.113.9",
        "-c",
        "70000",
        "-n",
        "70000",
        "-o",
        str(tmp_path / "out"),
    ]
    server = shared()
    command = [sys.executable, "-m", "loadgen", "run", "qa", "--url", server.url, *options]
    process = subprocess.run(
        ["sh", "-c", 'ulimit -n 100; exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    received = log(server)

    assert process.returncode == 2, process.stderr
    assert "local ports" in process.stderr
    assert "open files" in process.stderr
    assert "203.0.113.9" in process.stderr
    assert not [logged_request for logged_request in received.requests if logged_request.id]


@pytest.mark.processes
def test_a_number_of_workers_beyond_the_memory_is_refused(tmp_path: Path) -> None:
    """5,000 processes of 60 MB each are started by a typing error otherwise."""
    with refused(CombinedError, "resource_limit", "--workers"):
        requested_workload = workload(tmp_path, concurrency="2", num_requests="4")
        run.execute(requested_workload, to(shared(), tmp_path / "out", workers=5_000))


@pytest.mark.processes
def test_a_limit_in_flight_below_the_number_of_workers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CombinedError, match="--> --max-in-flight"):
        requested_workload = workload(
            tmp_path, request_rate="50", num_requests="20", max_in_flight="3"
        )
        run.execute(requested_workload, to(shared(), tmp_path / "out", workers=4))


def _loopback(address: str) -> bool:
    with socket.socket() as connection:
        try:
            connection.bind((address, 0))
        except OSError:
            return False
    return True


@pytest.mark.processes
@pytest.mark.skipif(not _loopback("127.0.0.3"), reason="only Linux has all of 127/8")
def test_requests_are_sent_from_the_specified_addresses(tmp_path: Path) -> None:
    server = shared()
    port = server.url.rpartition(":")[2]
    run_settings = to(server, tmp_path / "out", sources=("127.0.0.2", "127.0.0.3"))
    seen: list[str] = []

    def check_connections(_: Any) -> None:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, here, there, *_rest = line.split()
            if int(there.rpartition(":")[2], 16) == int(port):
                seen.append(socket.inet_ntoa(bytes.fromhex(here.rpartition(":")[0])[::-1]))

    summary, _ = run.execute(
        workload(tmp_path, concurrency="6", num_requests="30"),
        run_settings,
        when_started(check_connections),
    )
    assert summary.requests.ok == 30
    assert {"127.0.0.2", "127.0.0.3"} <= set(seen)
    assert seen.count("127.0.0.2") == seen.count("127.0.0.3") == 3


# -- what one sees meanwhile -----------------------------------------------------------------------


def test_the_dashboard_adds_up_all_workers(tmp_path: Path) -> None:
    boards = [SharedCounters(tmp_path / "board", 3) for _ in range(3)]
    for i, board in enumerate(boards):
        counters = Counters()
        counters.sent, counters.ok, counters.events, counters.in_flight = 10 + i, 5, 100 * i, 1
        counters.recent_ttft_ns.extend(range(i * 1000, i * 1000 + 400))
        board.write(i, counters)
    total = SharedCounters(tmp_path / "board", 3).sum()

    assert (total.sent, total.ok, total.events, total.in_flight) == (33, 15, 300, 3)
    assert sorted(total.recent_ttft_ns) == [i * 1000 + j for i in range(3) for j in range(144, 400)]


@pytest.mark.processes
def test_event_handlers_follow_several_workers(tmp_path: Path) -> None:
    seen: list[Any] = []
    requested_workload = workload(
        tmp_path, request_rate="100", duration="1.5s"
    )  # the workers tell each second
    _, out = run.execute(
        requested_workload, to(shared(), tmp_path / "out", workers=2), when_started(seen.append)
    )
    (board,) = seen

    assert board.counters().sent > 0

    links = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    open_files = [str(link.readlink()) for link in links if link.is_symlink()]
    assert [name for name in open_files if name.startswith(str(out))] == [], (
        "who heard of the load holds none of its files"
    )
    assert not (out / "spool").exists()
    assert json.loads((out / "run.json").read_bytes())["workers"] == 2
