"""The live view: its numbers, how it reads growing files, and the process on a terminal."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import run_fixtures
from numpy.typing import NDArray
from queueing import fail, rows
from rich.console import Console

from loadgen.core.results import store
from loadgen.core.results.manifest import StagePlan, WorkerSample
from loadgen.core.results.record import KINDS
from loadgen.core.results.record_log import Tail
from loadgen.core.run_summary import summarize
from loadgen.core.server_metrics.series import MetricSample
from loadgen.core.slo import Slo, Term
from loadgen.core.stats.histogram import MAX_RELATIVE_ERROR
from loadgen.core.stats.quantiles import NEEDED_SAMPLES
from loadgen.runs.dashboard import (
    RECENT_S,
    Dashboard,
    LiveStatus,
    output_events_per_s,
    render,
    snapshot,
)

S = 1_000_000_000


def status_of(records: NDArray[np.void], now_s: float, **manifest: object) -> LiveStatus:
    """Return the status after the records were added in several parts, in order of their end."""
    status = LiveStatus(run_fixtures.manifest("r", len(records), **manifest))
    for part in np.array_split(records[np.argsort(records["done_ns"])], 7):
        status.add_records(part)
    status.now_s = now_s
    return status


def text_of(status: LiveStatus, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(render(status))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_numbers_of_the_dashboard_since_the_start_equal_those_of_the_summary() -> None:
    records = rows(1, 800)
    fail(records, 0.05)
    slo = Slo(terms=(Term(metric="ttft", limit_ns=S // 5),))
    summary = summarize(run_fixtures.manifest("r", 800, slo=slo), records)
    status = status_of(records, float(records["done_ns"].max()) / 1e9, slo=slo)

    assert NEEDED_SAMPLES["p99"] < 800
    for name, distribution in (("ttft", summary.ttft_ms), ("tpot", summary.tpot_ms)):
        assert status.latency(name).overall == pytest.approx(
            (distribution.p50, distribution.p99), rel=2 * MAX_RELATIVE_ERROR
        )
    assert (status.ok, status.finished, status.planned) == (summary.requests.ok, 800, 800)
    assert status.attainment == pytest.approx(summary.goodput.share)
    assert status.error_counts[KINDS.index("http_5xx")] == summary.requests.failed
    assert status.error_counts.sum() == summary.requests.failed


def test_recent_numbers_of_the_dashboard_cover_the_last_seconds_only() -> None:
    records = rows(2, 900)
    now_s = float(records["due_ns"].max()) / 1e9 - 20  # in the middle of the load
    ended_records = records[records["done_ns"] <= now_s * 1e9]
    status = status_of(ended_records, now_s)
    recent = ended_records[ended_records["done_ns"] >= round((now_s - RECENT_S) * 1e9)]
    ttft_ns = np.sort(recent["first_token_ns"] - recent["due_ns"])
    p50_ns = ttft_ns[len(ttft_ns) // 2]
    p99_ns = ttft_ns[int(len(ttft_ns) * 0.99)]

    assert status.latency("ttft").recent == pytest.approx((p50_ns / 1e6, p99_ns / 1e6))
    assert len(status.recent_records()["done_ns"]) == len(recent)
    assert status.recent_span_s == RECENT_S


def test_the_dashboard_has_the_current_stage_the_time_left_and_worker_samples() -> None:
    stages = (
        StagePlan(name="warm-up", arrival="poisson 5/s", measured=False, slots=50, end_ns=10 * S),
        StagePlan(name="load", arrival="poisson 10/s", start_ns=10 * S, slots=250, end_ns=35 * S),
    )
    status = LiveStatus(run_fixtures.manifest("r", 300, stages=stages))
    status.add_worker_samples(
        WorkerSample(t_s=t, worker=worker, in_flight=3, cpu_share=0.1 * worker)
        for t in range(1, 21)
        for worker in (0, 1)
    )

    assert (status.in_flight, status.last_sample_s, status.planned) == (6, 20.0, 300)
    assert status.busiest_worker_share == pytest.approx(0.1)
    status.now_s = 2.0
    assert status.stage == stages[0]
    status.now_s = 20.0
    assert (status.stage, status.load_left_s) == (stages[1], 15.0)
    status.now_s = 40.0
    assert status.load_left_s == 0.0


def test_the_dashboard_judges_objectives_since_the_start() -> None:
    records = rows(3, 600)
    slo = Slo(terms=(Term(metric="ttft", limit_ns=S // 1000), Term(metric="tpot", limit_ns=S)))
    status = status_of(records, float(records["done_ns"].max()) / 1e9, slo=slo)
    assert status.latency("ttft").is_met is False
    assert status.latency("tpot").is_met is True
    empty = LiveStatus(run_fixtures.manifest("r", 0, slo=slo))
    assert empty.latency("ttft").is_met is None
    assert empty.attainment is None


def test_the_dashboard_prints_the_last_samples_of_queue_and_cache() -> None:
    status = LiveStatus(run_fixtures.manifest("r", 600))
    for second in range(1, 100):
        status.add_server_samples(
            MetricSample(
                t_s=second, name=name, value=value, target=0, page="http://a/metrics", labels=""
            )
            for name, value in (
                ("vllm:num_requests_waiting", second),
                ("vllm:kv_cache_usage_perc", 0.5),
            )
        )

    assert "99 waiting, KV cache 50.0 % full" in text_of(status)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_dashboard_prints_every_quantity_within_the_terminal_width(width: int) -> None:
    records = rows(4, 600)
    fail(records, 0.1)
    status = status_of(records, 30.0)
    text = text_of(status, width)

    for label in (
        "load poisson",
        "/600",
        "In flight",
        "TTFT",
        "TPOT",
        "SLO attainment",
        "http_5xx",
    ):
        assert label in text
    assert max(map(len, text.splitlines())) <= width


def test_a_dashboard_without_records_is_rendered() -> None:
    status = LiveStatus(run_fixtures.manifest("r", 0, stages=()))
    status.now_s = 0.1
    assert "- / -" in text_of(status)


def test_an_incomplete_record_or_line_is_left_for_the_next_read(tmp_path: Path) -> None:
    records = rows(5, 30)
    run_dir = run_fixtures.write(tmp_path / "r", records)
    tail = Tail(run_dir)
    path = run_dir / "spool" / "w0.rows"
    data = path.read_bytes()
    path.write_bytes(data[: 10 * records.itemsize + 7])

    assert len(tail.rows()) == 10
    assert len(tail.rows()) == 0
    path.write_bytes(data)
    assert tail.rows()["slot"].tolist() == list(range(10, 30))

    seconds = run_dir / "spool" / "w0.seconds"
    complete = seconds.read_bytes()
    seconds.write_bytes(complete[:-9])

    assert len(tail.seconds()) >= 1
    seconds.write_bytes(complete)
    assert len(tail.seconds()) == 1
    counts = store.read_run(run_dir).timeline[0]
    assert output_events_per_s(run_dir, 1.0, 2.0) == pytest.approx(counts[100:200].sum())
    assert output_events_per_s(run_dir, 1.0, 1.0) is None
    store.delete_record_log(run_dir)
    assert len(tail.rows()) == 0
    assert tail.seconds() == []
    tail.close()


def test_a_snapshot_of_the_dashboard_counts_the_requests_in_the_record_log(tmp_path: Path) -> None:
    run_dir = run_fixtures.write(tmp_path / "r", rows(6, 200))
    assert "200/200" in snapshot(run_dir)


@pytest.mark.processes
def test_the_dashboard_process_renders_until_its_standard_input_ends(tmp_path: Path) -> None:
    run_dir = run_fixtures.write(tmp_path / "r", rows(6, 200))
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "loadgen.runs.dashboard", str(run_dir)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        terminal_output = b""
        while b"Client CPU" not in terminal_output:
            terminal_output += os.read(ours, 65536)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 0
    plain = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", terminal_output).decode()

    assert "200/200" in plain
    os.close(ours)


@pytest.mark.processes
def test_the_dashboard_of_a_run_that_has_ended_closes(tmp_path: Path) -> None:
    live = Dashboard(run_fixtures.write(tmp_path / "r", rows(7, 20)))
    live.close()
    assert live._process.returncode == 0
