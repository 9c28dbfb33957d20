"""Independent parts of a run: together they are the run of one process, and a merge names gaps."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, time_ns
from typing import Any

import numpy as np
import pytest
from command_line import exits
from expected_errors import refused
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray
from run_fixtures import NO_PAGES, says
from servers import QUICK, shared

from loadgen.core import run_folder
from loadgen.core.errors import CombinedError, UserError
from loadgen.core.execution.driver import make_drive_settings
from loadgen.core.execution.events import RunEvent, RunPlanned
from loadgen.core.execution.plan import Settings, build_plan
from loadgen.core.execution.run import execute
from loadgen.core.execution.shard import Shard, parse_shard
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.token_deadlines import DeadlineCounts, count_token_deadlines
from loadgen.core.results import checksums, store
from loadgen.core.results.manifest import RunManifest, decode_manifest, encode_manifest
from loadgen.core.results.record import STATUS
from loadgen.core.results.stored_gaps import iterate_stored_gaps
from loadgen.core.schedule.schedule import shard
from loadgen.core.slo import TokenDeadlines
from loadgen.core.workload import Workload, load, read_flags
from loadgen.shards.merge import merge_parts
from loadgen.shards.parts import read_parts

REQUESTS = "{input_tokens: 8, output_tokens: 4}"
CONVERSATIONS = "{input_tokens: 8, output_tokens: 4, turns: {count: 3, tool_result_tokens: 5}}"
START_LATER_NS = 300_000_000


def make_workload(folder: Path, requests: str = REQUESTS, **flags: Any) -> Workload:
    file = folder / "w.yaml"
    file.write_text(f"name: divided\nrequests: {requests}\n")
    return load(str(file), read_flags(**({"seed": "7", "warmup": "0"} | flags)))


def settings_for(out: Path, **changes: Any) -> Settings:
    url = shared(QUICK).url
    return Settings(url=url, model="sim", server="trtllm", out=out, **(NO_PAGES | changes))


def run_parts(
    folder: Path, workload: Workload, count: int, *, workers: Sequence[int] = ()
) -> list[Path]:
    """Send all parts of a run one after the other; all but the first start late."""
    start_at_ns = time_ns() + START_LATER_NS
    parts = []
    for index in range(1, count + 1):
        own_shard = Shard(index=index, count=count, start_at_ns=start_at_ns)
        number = workers[index - 1] if workers else 1
        out = folder / f"part-{index}"
        execute(workload, settings_for(out, shard=own_shard, workers=number))
        parts.append(out)
    return parts


def merge(folder: Path, parts: Sequence[Path]) -> tuple[Summary, Path]:
    merged = folder / "merged"
    merged.mkdir()
    return merge_parts(read_parts(parts), merged), merged


def rows_by_slot(folder: Path) -> NDArray[np.void]:
    rows = store.read_run(folder).rows
    return rows[np.argsort(rows["slot"])]


def manifest_of(folder: Path) -> RunManifest:
    return decode_manifest((folder / "run.json").read_bytes())


def stage_counts(summary: Summary) -> list[tuple[str, int, int]]:
    return [
        (stage_summary.name, stage_summary.requests.scheduled, stage_summary.requests.ok)
        for stage_summary in summary.stages
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("requests", "flags", "count", "workers"),
    [
        (REQUESTS, {"request_rate": "100", "num_requests": "60"}, 2, (2, 1)),
        (REQUESTS, {"request_rate": "200", "num_requests": "80", "warmup": "0.2s"}, 8, ()),
        (REQUESTS, {"concurrency": "5", "num_requests": "33"}, 2, ()),
        (CONVERSATIONS, {"request_rate": "40", "num_requests": "45"}, 3, ()),
    ],
)
def test_merged_shards_equal_the_run_of_one_process(
    tmp_path: Path, requests: str, flags: dict[str, str], count: int, workers: tuple[int, ...]
) -> None:
    workload = make_workload(tmp_path, requests, **flags)
    full_summary, whole_folder = execute(workload, settings_for(tmp_path / "whole"))
    parts = run_parts(tmp_path, workload, count, workers=workers)
    summary, merged = merge(tmp_path, parts)

    assert stage_counts(summary) == stage_counts(full_summary)
    assert summary.requests.scheduled == summary.requests.ok == full_summary.requests.ok
    assert summary.fingerprints == full_summary.fingerprints
    assert summary.load.arrival == full_summary.load.arrival
    assert summary.bytes.sent > 0
    rows, expected = rows_by_slot(merged), rows_by_slot(whole_folder)
    for column in (
        "slot",
        "stage",
        "session",
        "turn",
        "virtual_user",
        "asked_output",
        "output_tokens",
    ):
        assert rows[column].tolist() == expected[column].tolist(), column
    assert len(np.unique(rows["worker"])) == sum(workers) if workers else count

    manifest, whole_manifest = manifest_of(merged), manifest_of(whole_folder)
    without_ramp = [
        replace(stage_plan, ramp_s=None, ramp_from="") for stage_plan in manifest.stages
    ]

    assert without_ramp == [
        replace(stage_plan, ramp_s=None, ramp_from="") for stage_plan in whole_manifest.stages
    ]
    assert manifest.shard is None and manifest.workers == sum(workers or [1] * count)
    assert checksums.find_changes(merged) == {}
    assert run_folder.open_run(merged).summary.ttft_ms == summary.ttft_ms


FLUIDITY = ("ttft:0.1ms:p50", "tpot:0.1ms:p50", "fluidity:90%:p50")
DEADLINES = TokenDeadlines(100_000, 100_000)


def deadlines_of_all(folders: Sequence[Path]) -> DeadlineCounts:
    """Return the token deadlines of the records and token times of several folders together."""
    rows = np.concatenate([store.read_run(folder).rows for folder in folders])
    gaps = [block for folder in folders for block in iterate_stored_gaps(folder) or ()]
    return count_token_deadlines([Columns(rows)], gaps, DEADLINES)


@pytest.mark.processes
def test_the_fluidity_index_of_merged_shards_is_that_of_all_their_responses(tmp_path: Path) -> None:
    workload = make_workload(tmp_path, request_rate="100", num_requests="40", slo=FLUIDITY)
    parts = run_parts(tmp_path, workload, 2)
    expected = deadlines_of_all(parts)
    summary, merged = merge(tmp_path, parts)

    fluidity = summary.fluidity
    assert fluidity is not None and fluidity.objective is not None
    assert fluidity.requests == len(expected.slots) == 40
    assert fluidity.deadlines == int(expected.deadlines.sum())
    assert fluidity.missed == int(expected.missed.sum()) > 0
    assert (fluidity.mean, fluidity.min) == (expected.indices.mean(), expected.indices.min())
    assert fluidity.objective.below == int((expected.indices < 0.9).sum())
    assert (fluidity.objective.count, fluidity.objective.undecided) == (40, "")
    assert run_folder.open_run(merged).summary.fluidity == fluidity
    assert checksums.find_changes(merged) == {}


@pytest.mark.processes
def test_lost_requests_of_a_missing_shard_count_as_below_the_objective(tmp_path: Path) -> None:
    workload = make_workload(tmp_path, request_rate="100", num_requests="40", slo=FLUIDITY)
    parts = run_parts(tmp_path, workload, 2)
    (parts[0] / "gaps" / "requests.parquet").unlink()
    without_times, _ = merge(tmp_path, parts)
    assert without_times.fluidity is not None and without_times.fluidity.objective is not None
    assert without_times.fluidity.requests == 20
    assert without_times.fluidity.objective.met is None

    (tmp_path / "missing").mkdir()
    missing = merge_parts(read_parts(parts[1:]), tmp_path / "missing")
    assert missing.fluidity is not None and missing.fluidity.objective is not None
    assert missing.fluidity.requests == 20
    assert missing.fluidity.objective.below >= 20
    assert missing.fluidity.objective.count == 40


@pytest.mark.processes
def test_a_late_shard_is_shifted_to_its_true_time(tmp_path: Path) -> None:
    workload = make_workload(tmp_path, request_rate="100", num_requests="40")
    parts = run_parts(tmp_path, workload, 2)
    summary, merged = merge(tmp_path, parts)
    late_shard_part = manifest_of(parts[1]).shard

    assert (
        late_shard_part is not None
        and late_shard_part.start_delay_ms is not None
        and late_shard_part.start_delay_ms > 100
    )

    rows, part_rows = rows_by_slot(merged), rows_by_slot(parts[1])
    moved = rows[rows["worker"] == 1]
    delay_ns = round(late_shard_part.start_delay_ms * 1e6)

    assert (moved["due_ns"] - part_rows["due_ns"]).tolist() == [delay_ns] * 20
    assert (moved["done_ns"] - part_rows["done_ns"]).tolist() == [delay_ns] * 20
    assert (moved["sent_ns"] - moved["due_ns"]).tolist() == (
        part_rows["sent_ns"] - part_rows["due_ns"]
    ).tolist()

    (warning,) = [
        reason_code
        for reason_code in summary.verdict.warning_codes
        if reason_code.code == "part_late"
    ]

    assert warning.values == {
        "part": 2,
        "parts": 2,
        "delay_ms": late_shard_part.start_delay_ms,
        "limit_ms": 100.0,
    }


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "lost_slots"),
    [
        ({"request_rate": "100", "num_requests": "40"}, list(range(1, 40, 2))),
        ({"concurrency": "4", "num_requests": "20"}, [n for n in range(20) if n % 4 % 2]),
    ],
)
def test_requests_of_a_missing_shard_are_lost(
    tmp_path: Path, flags: dict[str, str], lost_slots: list[int]
) -> None:
    workload = make_workload(tmp_path, **flags)
    parts = run_parts(tmp_path, workload, 2)
    summary, merged = merge(tmp_path, parts[:1])
    rows = rows_by_slot(merged)
    lost_records = rows[rows["status"] == STATUS["lost"]]

    assert lost_records["slot"].tolist() == lost_slots
    assert summary.requests.lost == len(lost_slots)
    assert not summary.verdict.valid
    node = "part 2 of 2 (missing)"
    assert says(summary.verdict.codes, "worker_died", worker=1, node=node)
    assert [
        (merged_part.index, merged_part.state) for merged_part in manifest_of(merged).merged_parts
    ] == [
        (1, "finished"),
        (2, "missing"),
    ]


@pytest.mark.processes
def test_each_virtual_user_of_a_missing_shard_lost_a_request(tmp_path: Path) -> None:
    """A stage that its duration limits has no number of requests that could all be lost."""
    parts = run_parts(tmp_path, make_workload(tmp_path, concurrency="4", duration="0.3s"), 2)
    assert manifest_of(parts[0]).fingerprints == manifest_of(parts[1]).fingerprints
    _, merged = merge(tmp_path, parts[1:])
    rows = rows_by_slot(merged)
    lost_records = rows[rows["status"] == STATUS["lost"]]
    for stage in np.unique(rows["stage"]):
        assert lost_records["virtual_user"][lost_records["stage"] == stage].tolist() == [0, 2]
        assert set(rows["virtual_user"][rows["stage"] == stage].tolist()) == {0, 1, 2, 3}


@pytest.mark.processes
def test_shards_of_different_runs_are_refused(tmp_path: Path) -> None:
    parts = run_parts(tmp_path, make_workload(tmp_path, request_rate="200", num_requests="8"), 2)

    with refused(CombinedError, "duplicate", where=str(parts[0])):
        read_parts([parts[0], parts[0]])
    with refused(CombinedError, "missing_file"):
        read_parts([tmp_path / "nothing"])
    (tmp_path / "empty").mkdir()
    with refused(CombinedError, "no_result", where="empty"):
        read_parts([tmp_path / "empty"])

    full_run_dir = tmp_path / "whole"
    execute(
        make_workload(tmp_path, request_rate="200", num_requests="8"), settings_for(full_run_dir)
    )

    with refused(CombinedError, "wrong_format", where="whole"):
        read_parts([full_run_dir])
    manifest = manifest_of(parts[1])
    assert manifest.shard is not None

    for name, changed_run_manifest in {
        "seed": replace(manifest, seed=8),
        "salt": replace(manifest, salt="other"),
        "number of parts": replace(manifest, shard=replace(manifest.shard, count=3)),
        "start": replace(manifest, shard=replace(manifest.shard, start_at="2026-12-01T10:00:00Z")),
        "workload": replace(manifest, fingerprints=replace(manifest.fingerprints, recipe="other")),
        "tokens of the chat template": replace(manifest, template_tokens=99),
    }.items():
        (parts[1] / "run.json").write_bytes(encode_manifest(changed_run_manifest))
        with refused(CombinedError, "mismatch", where=str(parts[1])) as exc_info:
            read_parts(parts)
        assert name in str(exc_info.value)


@pytest.mark.processes
def test_a_single_shard_is_reported_and_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = make_workload(tmp_path, request_rate="200", num_requests="20")
    first, second = run_parts(tmp_path, workload, 2)
    exits("report", first, "--full")

    assert "part 1 of 2: poisson 200/s" in capsys.readouterr().out
    for command in (
        ("compare", first, second),
        ("cost", first, "--prices", "docs/prices.example.yaml", "--accept-sample-prices"),
    ):
        assert exits(*command) == 2
        assert "part 1 of 2" in capsys.readouterr().err
    assert exits("merge", second, first, "-o", tmp_path / "merged") in (0, 1, 3)
    assert "part 2 of 2" in capsys.readouterr().err
    assert exits("merge", second, first, "-o", tmp_path / "merged") == 2
    assert exits("compare", tmp_path / "merged", tmp_path / "merged", "--anyway") != 2


@pytest.mark.parametrize(
    ("shard", "start_at", "code"),
    [
        ("0/8", "2126-12-01T10:00:00Z", "invalid_value"),
        ("9/8", "2126-12-01T10:00:00Z", "invalid_value"),
        ("3", "2126-12-01T10:00:00Z", "invalid_value"),
        ("3/8", "tomorrow", "invalid_value"),
        ("3/8", "2126-12-01T10:00:00", "invalid_value"),
        ("3/8", "2026-01-01T10:00:00Z", "out_of_range"),
    ],
)
def test_an_invalid_shard_or_start_time_is_refused(shard: str, start_at: str, code: str) -> None:
    with refused(UserError, code):
        parse_shard(shard, start_at)


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(10**12, 4 * 10**12))
def test_a_printed_shard_number_is_parsed_to_the_same_shard(
    index: int, more: int, start_at_ms: int
) -> None:
    shard = Shard(index=index, count=index + more, start_at_ns=start_at_ms * 10**6)
    if start_at_ms * 10**6 > time_ns():
        assert parse_shard(f"{index}/{index + more}", shard.start_at) == shard


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ("--shard 1/2", "--shard"),
        ("--start-at 2126-12-01T10:00:00Z", "--start-at"),
        ("--shard 1/2 --start-at 2126-12-01T10:00:00Z", "--seed"),
        ("--shard 1/2 --start-at 2126-12-01T10:00:00Z --seed 1 --salt fresh", "--salt fresh"),
        ("--shard 1/2 --start-at 2126-12-01T10:00:00Z --seed 1 --repeat 2", "--repeat"),
        ("--shard 1/2 --start-at 2126-12-01T10:00:00Z --seed 1 --ray auto", "--ray"),
        ("--shard 1/2 --start-at 2126-12-01T10:00:00Z --seed 1 --keep gaps", "--keep"),
        ("--shard 1/2 --start-at 2126-12-01T10:00:00Z --seed 1 --url sim:gb300-vm", "virtual"),
    ],
)
def test_a_load_that_cannot_be_divided_is_refused_before_it_starts(
    options: str, where: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = () if "--url" in options else ("--url", "http://127.0.0.1:9")
    code = exits("run", "qa", "--request-rate", "5", *options.split(), *url, "-o", tmp_path / "o")
    assert code == 2
    assert where in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sweep", "search", "validate"])
def test_other_commands_refuse_the_option_shard(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(command, "qa", "--shard", "1/2") == 2
    assert "--shard" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize(("limit", "count", "workers"), [(10, 4, 1), (11, 3, 2), (8, 8, 1)])
def test_shares_of_the_limit_in_flight_add_up_to_it(
    tmp_path: Path, limit: int, count: int, workers: int
) -> None:
    planned: list[RunPlanned] = []

    def keep_plan(event: RunEvent) -> None:
        if isinstance(event, RunPlanned):
            planned.append(event)

    workload = make_workload(
        tmp_path, request_rate="400", num_requests="48", max_in_flight=str(limit)
    )
    execute(workload, settings_for(tmp_path / "whole"), (keep_plan,))
    job = planned[0].plan.job
    limits: list[int] = []
    slots: list[int] = []
    for index in range(1, count + 1):
        own_shard = Shard(index=index, count=count, start_at_ns=0)
        plan = build_plan(replace(job, settings=replace(job.settings, shard=own_shard)))
        for worker in range(workers):
            part = shard(plan.schedule, worker, workers)
            limits.append(make_drive_settings(plan, part, worker).max_in_flight or 0)
            slots += part.slot_ids()
    assert sum(limits) == limit
    assert max(limits) - min(limits) <= 1
    assert sorted(slots) == list(range(48))


def start_part(folder: Path, url: str, index: int, start_at: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "loadgen", "run", "w.yaml", "--url", url, "--model"]
    command += ["sim", "--server", "trtllm", "--request-rate", "80", "-d", "3s", "--warmup", "0"]
    command += ["--server-metrics", "off", "--energy", "off", "--seed", "7", "--out", f"p{index}"]
    command += ["--shard", f"{index}/8", "--start-at", start_at]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)


def wait_for_rows(folder: Path) -> None:
    """Wait until a part has records on disk."""
    deadline = monotonic() + 60
    file = folder / "spool" / "w0.rows"
    while not (file.exists() and file.stat().st_size):
        assert monotonic() < deadline
        select.select([], [], [], 0.02)


@pytest.mark.processes
def test_eight_shards_are_merged_although_one_is_killed_and_one_is_late(tmp_path: Path) -> None:
    workload = make_workload(tmp_path, request_rate="80", duration="3s")
    full_summary, whole_folder = execute(workload, settings_for(tmp_path / "whole"))
    url = shared(QUICK).url
    shard = Shard(index=1, count=8, start_at_ns=time_ns() + 15 * 10**9)
    processes = [start_part(tmp_path, url, index, shard.start_at) for index in range(1, 8)]
    try:
        wait_for_rows(tmp_path / "p3")
        os.kill(processes[2].pid, signal.SIGKILL)
        processes.append(start_part(tmp_path, url, 8, shard.start_at))
        for process in processes:
            process.wait(60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    parts = [tmp_path / f"p{index}" for index in range(1, 9)]
    summary, merged = merge(tmp_path, parts)
    rows, expected = rows_by_slot(merged), rows_by_slot(whole_folder)

    assert rows["slot"].tolist() == expected["slot"].tolist() == list(range(len(rows)))
    assert stage_counts(summary)[0][1] == stage_counts(full_summary)[0][1] == len(rows)

    of_third = rows[rows["slot"] % 8 == 2]
    lost_records = rows[rows["status"] == STATUS["lost"]]
    assert 0 < len(lost_records) < len(of_third)
    assert set(lost_records["slot"].tolist()) <= set(of_third["slot"].tolist())
    assert summary.requests.ok == len(rows) - len(lost_records)
    assert says(summary.verdict.codes, "worker_died", worker=2)

    states = {
        merged_part.index: merged_part.state for merged_part in manifest_of(merged).merged_parts
    }

    assert states == dict.fromkeys(range(1, 9), "finished") | {3: "killed"}
    late_merged_part = manifest_of(merged).merged_parts[7]
    assert late_merged_part.start_delay_ms is not None and late_merged_part.start_delay_ms > 500
    assert json.loads((merged / "summary.json").read_bytes())["requests"]["lost"] == len(
        lost_records
    )
