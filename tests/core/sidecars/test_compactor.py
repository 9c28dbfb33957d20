"""Conversion of records to Parquet during a run, also after the death of a worker."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_fixtures import NO_PAGES, says, when_started
from servers import shared

from loadgen.core import run_folder
from loadgen.core.execution import run
from loadgen.core.execution.bodies import UNKNOWN
from loadgen.core.execution.plan import Settings, Tuning
from loadgen.core.metrics.summary import Summary
from loadgen.core.results import store
from loadgen.core.results.manifest import RunManifest, StagePlan, encode_manifest
from loadgen.core.results.record import ROW, RecordKey, encode_unsent_record
from loadgen.core.results.record_log import RecordLog, recorded_slots, segments
from loadgen.core.sidecars.compactor import ParquetParts
from loadgen.core.workload import load, read_flags


def go(
    folder: Path, workers: int = 1, segment_rows: int = 100, **flags: str
) -> tuple[Summary, Path]:
    folder.mkdir(exist_ok=True)
    file = folder / "w.yaml"
    file.write_text(
        "name: long\n"
        "requests: {input_tokens: 8, output_tokens: 4, turns: {count: 2, tool_result_tokens: 3}}\n"
    )
    workload = load(
        str(file), read_flags(**({"seed": "7", "warmup": "20req", "slo": ("ttft:60s",)} | flags))
    )
    settings = Settings(
        url=shared().url,
        model="sim",
        server="trtllm",
        out=folder / "out",
        workers=workers,
        route="sticky",
        tuning=Tuning(segment_rows=segment_rows),
        **NO_PAGES,
    )
    return run.execute(workload, settings)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_the_compactor_stores_all_records_of_many_small_files(tmp_path: Path, workers: int) -> None:
    summary, out = go(tmp_path, workers, 30, request_rate="300", num_requests="150")

    assert summary.requests.ok == summary.requests.scheduled == 300
    assert summary.warmup.ok == 40
    assert summary.sessions is not None
    assert summary.sessions.ok == 150
    assert summary.ttft_ms.count == 300
    assert summary.goodput.good == 300
    assert not (out / "spool").exists()
    second_summary = run_folder.summary(out)
    assert second_summary.requests == summary.requests
    assert second_summary.ttft_ms == summary.ttft_ms
    assert len(np.unique(store.read_run(out).rows["slot"])) == 340


def test_segments_are_created_and_removed_during_a_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(encode_manifest(RunManifest(stages=(StagePlan(),))))
    record_log = RecordLog(tmp_path, 3, 10)
    parts = ParquetParts(tmp_path)
    place = iter(range(1000))
    taken = 0
    for _ in range(7):
        for _ in range(4):
            record_log.add_record(
                encode_unsent_record(
                    RecordKey(next(place), 0, 0, 3, 0, -1, 0, -1),
                    5,
                    "in_flight_cap",
                    "dropped",
                    UNKNOWN,
                )
            )
        record_log.flush()
        for segment in segments(tmp_path)[
            :-1
        ]:  # what the recorder does with those that are complete
            rows = np.fromfile(segment.path, ROW)
            parts.add(segment, segment.first, rows[:4])
            parts.add(segment, segment.first + 4, rows[4:])
            parts.replace_segment(segment)
            segment.path.unlink()
            taken += len(rows)
        assert len(np.unique(store.read_run(tmp_path).rows["slot"])) == len(
            store.read_run(tmp_path).rows
        )
    record_log.close()

    assert taken == 24
    assert sorted(store.read_run(tmp_path).rows["slot"].tolist()) == list(range(28))
    assert sorted(recorded_slots(tmp_path, 3)["slot"].tolist()) == list(range(28))

    reopened_log = RecordLog(tmp_path, 3)  # of a worker that died: its file goes on
    reopened_log.add_record(
        encode_unsent_record(
            RecordKey(28, 0, 0, 3, 0, -1, 0, -1), 5, "worker_died", "lost", UNKNOWN
        )
    )
    reopened_log.close()

    assert sorted(recorded_slots(tmp_path, 3)["slot"].tolist()) == list(range(29))


@pytest.mark.processes
def test_a_worker_that_dies_loses_only_records_that_are_not_yet_in_parquet(
    tmp_path: Path,
) -> None:
    def kill(_: Any) -> None:
        loop = asyncio.get_running_loop()
        mine = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
        pids = [int(pid) for pid in Path(mine).read_text().split()]
        workers = [
            pid for pid in pids if "backends.worker" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        loop.call_later(1.2, os.kill, workers[1], signal.SIGKILL)

    file = tmp_path / "w.yaml"
    file.write_text("name: long\nrequests: {input_tokens: 8, output_tokens: 4}\n")
    workload = load(
        str(file), read_flags(seed="7", warmup="0", request_rate="100", num_requests="300")
    )
    settings = Settings(
        url=shared().url,
        model="sim",
        server="trtllm",
        out=tmp_path / "out",
        tuning=Tuning(segment_rows=30, compacted_rows=0),
        workers=2,
        **NO_PAGES,
    )
    summary, _ = run.execute(workload, settings, when_started(kill))
    requests = summary.requests
    assert requests.scheduled == 300
    assert requests.ok + requests.lost == 300
    assert requests.lost > 50
    assert not summary.verdict.valid
    assert says(summary.verdict.codes, "worker_died", worker=1)
