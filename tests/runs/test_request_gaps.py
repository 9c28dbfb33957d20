"""`--keep gaps`: the ITL values of each request agree in the summary, logs and exports."""

from __future__ import annotations

import csv
import io
import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import exits
from expected_errors import refused
from run_fixtures import NO_PAGES
from servers import log, shared

import loadgen
from loadgen.core.errors import UserError
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.results import gaps, store
from loadgen.core.results.record_log import RecordLog
from loadgen.core.stats.histogram import Histogram
from loadgen.core.stats.quantiles import distribution_of
from loadgen.core.workload import load, read_flags
from loadgen.interop import aiperf_records, export, reader
from loadgen.runs import request_gaps
from loadgen.runs.request_gaps import Gaps
from loadgen.sim.server.options import Options

TALKS = """requests:
  turns: {count: 3, tool_result_tokens: 20}
  input_tokens: 60
  output_tokens: {uniform: {min: 1, max: 90}}"""
PLAIN = "requests: {input_tokens: 8, output_tokens: {uniform: {min: 1, max: 12}}}"


def ran(
    folder: Path, text: str, url: str, keep: str = "gaps", workers: int = 1, **flags: str
) -> Path:
    (folder / "w.yaml").write_text(f"name: w\n{text}\n")
    workload = load(str(folder / "w.yaml"), read_flags(**({"seed": "7", "warmup": "0"} | flags)))
    settings: dict[str, Any] = (
        {} if url.startswith("sim:") else {"model": "sim", "server": "trtllm"} | NO_PAGES
    )
    return execute(
        workload, Settings(url=url, keep=keep, workers=workers, out=folder / keep, **settings)
    )[1]  # type: ignore[arg-type]


def agree(folder: Path) -> Gaps:
    """Return the gaps of a run after comparing them with its records and histograms."""
    stored = request_gaps.read_run_with_gaps(folder)
    assert stored.gaps_ns_by_slot is not None
    rows, pooled = stored.rows, Histogram()
    for row in rows[rows["output_events"] > 1]:
        of_request = stored.gaps_ns_by_slot[int(row["slot"])]
        assert len(of_request) == row["output_events"] - 1 and of_request.max() == row["max_gap_ns"]
        assert of_request.sum() == row["last_token_ns"] - row["first_token_ns"]
        pooled.add(of_request)
    assert set(stored.gaps_ns_by_slot) == set(rows["slot"][rows["output_events"] > 1].tolist())
    summed = Histogram()
    for histogram in stored.gaps:
        summed.merge(histogram)
    assert pooled.to_bytes() == summed.to_bytes()
    return stored.gaps_ns_by_slot


@pytest.mark.parametrize("target", ["sim:gb300-vm", "sim:h200x8"])
def test_stored_gaps_of_a_virtual_run_are_exact(tmp_path: Path, target: str) -> None:
    flags = {"request_rate": "40", "num_requests": "300"}
    gaps_run_dir, plain = (ran(tmp_path, TALKS, target, keep, **flags) for keep in ("gaps", "raw"))
    gaps_ns_by_slot = agree(gaps_run_dir)
    gaps_summary, other = (loadgen.load(folder).summary for folder in (gaps_run_dir, plain))

    assert (gaps_summary.inter_chunk_ms, gaps_summary.tokens) == (
        other.inter_chunk_ms,
        other.tokens,
    )
    pooled = np.concatenate(list(gaps_ns_by_slot.values()))
    assert distribution_of(pooled).p99 == pytest.approx(gaps_summary.inter_chunk_ms.p99, rel=0.001)

    files = {
        file.relative_to(gaps_run_dir).as_posix()
        for file in gaps_run_dir.rglob("*")
        if file.is_file()
    }

    assert files - {file.relative_to(plain).as_posix() for file in plain.rglob("*")} == {
        "gaps/requests.parquet"
    }
    assert "gaps/requests.parquet" in (gaps_run_dir / "SHA256SUMS").read_text()


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_stored_gaps_over_http_equal_those_of_the_server_log(tmp_path: Path, workers: int) -> None:
    """A busy host delays sends after logging, so only half of the gaps must agree within 25 %."""
    endpoint = shared(Options(ttft="5ms", itl="8ms", log_events="all", log_bodies=True))
    folder = ran(tmp_path, PLAIN, endpoint.url, workers=workers, num_requests="40", concurrency="4")
    gaps_ns_by_slot, sent_requests = agree(folder), log(endpoint)
    number = {
        logged_request.id.rpartition("-")[2]: logged_request.number
        for logged_request in sent_requests.requests
    }
    differences = []
    for slot, of_request in gaps_ns_by_slot.items():
        theirs = np.diff(sent_requests.sent_ns[sent_requests.request == number[str(slot)]])
        differences.append(
            of_request - theirs[: len(of_request)]
        )  # the end of an answer is an event of theirs

    assert np.median(np.abs(np.concatenate(differences))) < 2_000_000


def test_every_export_has_the_stored_gaps(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = ran(tmp_path, PLAIN, "sim:gb300-vm", num_requests="50", concurrency="4")
    gaps_ns_by_slot, stored, result = (
        agree(folder),
        request_gaps.read_run_with_gaps(folder),
        loadgen.load(folder),
    )
    in_order = [gaps_ns_by_slot.get(slot) for slot in stored.rows["slot"].tolist()]

    assert any(gap_values is None for gap_values in in_order), "a request of one token has no gap"
    frame = result.frame("pyarrow", unit="ns")
    assert frame["inter_chunk_ns"].to_pylist() == [
        None if gap_values is None else gap_values.tolist() for gap_values in in_order
    ]
    assert exits("export", folder, "--as", "csv") == 0

    cells = [
        row["inter_chunk_ms"]
        for row in csv.DictReader(io.StringIO(capsysbinary.readouterr().out.decode()))
    ]

    assert cells == [
        "" if gap_values is None else json.dumps((gap_values / 1e6).tolist())
        for gap_values in in_order
    ]
    itls = export.export_vllm(result.summary, stored)["itls"]
    assert itls == [
        [] if gap_values is None else (gap_values / 1e9).tolist() for gap_values in in_order
    ]

    lines = b"".join(aiperf_records.write(result.summary, stored))
    for line, slot_gaps in zip(map(json.loads, lines.splitlines()), in_order, strict=True):
        listed = line["metrics"].get("inter_chunk_latency")
        assert listed == (
            None if slot_gaps is None else {"value": (slot_gaps / 1e6).tolist(), "unit": "ms"}
        )
    back = reader.parse_result(lines)

    assert (back.tool, back.metrics["requests.ok"]) == ("AIPerf", 50)
    assert back.metrics["inter_chunk_ms.p50"] == pytest.approx(
        result.summary.inter_chunk_ms.p50, rel=0.01
    )

    for name in (
        "ttft_ms.p99",
        "e2e_ms.mean",
        "tpot_ms.p50",
    ):  # theirs from the records, and from the summary
        written_foreign_result = reader.parse_result(
            json.dumps(export.export_aiperf(result.summary, stored)).encode()
        )
        assert back.metrics[name] == pytest.approx(written_foreign_result.metrics[name])


def test_a_bundle_has_the_stored_gaps_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    folder = ran(tmp_path, PLAIN, "sim:gb300-vm", num_requests="20", concurrency="4")
    bundle = tmp_path / "run.zip"
    assert exits("bundle", folder, "-o", bundle) == exits("verify", bundle) == 0
    file = folder / gaps.FILE
    file.write_bytes(file.read_bytes()[:-20])
    assert exits("bundle", folder, "-o", tmp_path / "other.zip") == 2
    with refused(UserError, "damaged_file", where="gaps"):
        request_gaps.read_request_gaps(folder)


def test_gaps_of_a_killed_worker_are_read_up_to_its_last_complete_request(tmp_path: Path) -> None:
    """By two workers; the file is made in parts that are smaller than a request."""
    for worker in (0, 1):
        record_log = RecordLog(tmp_path, worker)
        for number in range(5):
            record_log.add_event_times(
                f"run-{2 * number + worker}", array("q", range(100, 100 + number * 10, 10))
            )
        record_log.close()
    expected = {slot: [10] * (slot // 2 - 1) for slot in range(4, 10)}

    assert {
        slot: gap_values.tolist()
        for slot, gap_values in (request_gaps.read_request_gaps(tmp_path) or {}).items()
    } == expected

    torn = tmp_path / "spool" / "w1.events"
    torn.write_bytes(torn.read_bytes()[:-3])
    gaps_by_slot = request_gaps.read_request_gaps(tmp_path) or {}

    assert sorted(gaps_by_slot) == [4, 5, 6, 7, 8]

    gaps.write_request_gaps(tmp_path, gaps.read_event_files(tmp_path, 24))
    (tmp_path / "spool" / "w0.events").unlink()
    reread_gaps = request_gaps.read_request_gaps(tmp_path) or {}

    assert {slot: gap_values.tolist() for slot, gap_values in reread_gaps.items()} == {
        slot: gap_values.tolist() for slot, gap_values in gaps_by_slot.items()
    }


def test_a_run_that_does_not_store_gaps_has_no_file_of_gaps(tmp_path: Path) -> None:
    folder = ran(tmp_path, PLAIN, "sim:gb300-vm", "raw", num_requests="5", concurrency="1")
    assert request_gaps.read_request_gaps(folder) is None and not (folder / "gaps").exists()
    stored = request_gaps.read_run_with_gaps(folder)
    assert "itls" not in export.export_vllm(loadgen.load(folder).summary, stored)
    assert "inter_chunk_ms" not in loadgen.load(folder).frame("pyarrow").column_names


def test_the_file_of_gaps_is_empty_if_each_response_has_one_token(tmp_path: Path) -> None:
    """Of a run whose answers have one token each: they were kept, and there are none."""
    text = "requests: {input_tokens: 8, output_tokens: 1}"
    assert (
        request_gaps.read_request_gaps(
            ran(tmp_path, text, "sim:gb300-vm", num_requests="5", concurrency="1")
        )
        == {}
    )
    assert store.has_rows(tmp_path / "gaps")
