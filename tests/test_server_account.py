"""The server's own account of a request: every form that is known, damaged ones, and its way into the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from loadgen_sdk.dialects.body import asking_for_timing
from loadgen_sdk.dialects.quirks import QUIRKS
from loadgen_sdk.dialects.server_account import NO_ACCOUNT, ServerAccount, server_account

import loadgen
from loadgen.results.manifest import Header, decode

WORKLOAD = {"name": "few", "requests": {"input_tokens": 12, "output_tokens": 4}}
MS = 1_000_000
COLUMNS = ["server_queue_ns", "server_prefill_ns", "server_transfer_ns", "server_decode_ns"]


@pytest.mark.parametrize(
    ("timing", "expected"),
    [
        (  # trtllm-serve, the event after [DONE]: its time to first token holds the queue
            {"trtllm.perf_metrics": {"Server-Timing": "server_queue;dur=1.25, server_ttft;dur=8.5, server_e2e;dur=24"}},
            ServerAccount(queue=1_250_000, prefill=7_250_000, decode=15_500_000),
        ),
        (  # the same as a header, of a disaggregated server: the prefill and the decoding are two phases
            {
                "server-timing": "disagg_queue;dur=1, ctx_queue;dur=2, ctx_ttft;dur=12, gen_queue;dur=1, "
                "gen_ttft;dur=4, gen_e2e;dur=54, gen_kv_transfer;dur=3"
            },
            ServerAccount(queue=2 * MS, prefill=10 * MS, transfer=3 * MS, decode=50 * MS),
        ),
        (  # vLLM: its time to first token begins after the queue
            {"metrics": {"queue_time_ms": 5, "time_to_first_token_ms": 20.5, "generation_time_ms": 100}},
            ServerAccount(queue=5 * MS, prefill=20_500_000, decode=100 * MS),
        ),
        (  # Dynamo, as recorded
            {
                "nvext": {
                    "worker_id": {"prefill_worker_id": 1},
                    "timing": {
                        "request_received_ms": 1795222751607, "prefill_wait_time_ms": 3.5, "prefill_time_ms": 22.0,
                        "ttft_ms": 25.5, "total_time_ms": 69.5,
                    },
                }
            },
            ServerAccount(queue=3_500_000, prefill=22 * MS, decode=44 * MS),
        ),
        (  # llama-server, as recorded: nothing about its queue
            {"timings": {"cache_n": 20, "prompt_n": 1, "prompt_ms": 1.5, "predicted_n": 4, "predicted_ms": 3.0}},
            ServerAccount(prefill=1_500_000, decode=3 * MS, cached=20),
        ),
        (
            {"timings": {"prompt_ms": 1.0, "draft_n": 8, "draft_n_accepted": 5}},
            ServerAccount(prefill=MS, drafted=8, accepted=5),
        ),
        ({}, NO_ACCOUNT),
    ],
)  # fmt: skip
def test_every_form_says_the_same_few_durations(timing: dict[str, Any], expected: ServerAccount) -> None:
    assert server_account(timing) == expected


@pytest.mark.parametrize(
    "timing",
    [
        {"trtllm.perf_metrics": 7}, {"trtllm.perf_metrics": {"Server-Timing": 3}}, {"server-timing": None},
        {"server-timing": "cache;desc=hit, db;dur=53"}, {"server-timing": "server_queue;dur=now, server_ttft;dur=nan"},
        {"server-timing": "server_queue;dur=-3"}, {"metrics": "fast"}, {"metrics": [1]},
        {"metrics": {"queue_time_ms": True}},
        {"nvext": {"timing": "soon"}}, {"nvext": {"timing": {"prefill_time_ms": None}}},
        {"timings": {"prompt_ms": "1"}},
        {"timings": {"cache_n": -4, "prompt_ms": float("inf")}}, {"else": {"prompt_ms": 1}},
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_form_says_nothing(timing: dict[str, Any]) -> None:
    assert server_account(timing) == NO_ACCOUNT


def test_each_server_is_asked_in_its_own_way() -> None:
    assert asking_for_timing(QUIRKS["trtllm"], (("A", "b"),), None) == (
        (("X-TRTLLM-return-metrics", "1"), ("A", "b")), None,
    )  # fmt: skip
    _, fields = asking_for_timing(QUIRKS["dynamo"], (), {"nvext": {"use_raw_prompt": True}})
    assert fields == {"nvext": {"extra_fields": ["timing"], "use_raw_prompt": True}}
    assert asking_for_timing(QUIRKS["llamacpp"], (), None) == ((), None)


def table(folder: Path) -> Any:
    return pq.read_table(folder / "requests" / "requests.parquet")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {"server_timing": True}),  # the event after [DONE]
        ({}, {"server_timing": True, "stream": False}),  # the header
        ({"dialect": "openai"}, {"extra_body": {"include_metrics": True}}),  # beside the usage, as vLLM writes it
    ],
    ids=["event", "header", "usage"],
)
def test_the_account_of_the_embedded_server_is_in_the_records(
    tmp_path: Path, options: dict[str, str], asked: dict[str, Any]
) -> None:
    """Half of the time to first token is spent in the queue of one slot; the server's parts fit into the client's."""
    embedded = {"ttft": "20ms", "itl": "1ms", "slots": 1} | options
    run = loadgen.run(
        WORKLOAD,
        embedded=embedded,
        concurrency=2,
        num_requests=12,
        output_tokens=8,
        out=tmp_path / "run",
        warmup=0,
        **asked,
    )
    columns = table(tmp_path / "run").select([*COLUMNS, "due_ns", "first_token_ns", "end_ns"]).to_pylist()
    assert run.summary.requests.ok == len(columns) == 12
    for row in columns:
        queue, prefill, transfer, decode = (row[name] for name in COLUMNS)
        assert transfer is None and queue is not None and decode >= 0
        assert prefill >= 19 * MS
        assert queue + prefill + decode <= row["end_ns"] - row["due_ns"] + MS


@pytest.mark.processes
def test_a_server_that_is_not_asked_gives_no_account(tmp_path: Path) -> None:
    loadgen.run(
        WORKLOAD,
        embedded={"ttft": "2ms", "itl": "1ms"},
        concurrency=1,
        num_requests=3,
        output_tokens=4,
        out=tmp_path / "run",
    )
    assert table(tmp_path / "run").column("server_prefill_ns").null_count == 3


def test_the_account_of_a_virtual_run_is_exact(tmp_path: Path) -> None:
    loadgen.run(WORKLOAD, url="sim:gb300-vm", request_rate=20, num_requests=100, seed=1, out=tmp_path / "run")
    for row in table(tmp_path / "run").to_pylist():
        assert row["server_queue_ns"] + row["server_prefill_ns"] == row["first_token_ns"] - row["due_ns"]
        assert row["server_decode_ns"] == row["last_token_ns"] - row["first_token_ns"]


@pytest.mark.processes
def test_a_server_that_gives_none_though_it_is_asked_is_told_before_the_load(tmp_path: Path) -> None:
    """An older trtllm-serve: one warning, from the probe, and not a second one from the records."""
    embedded = {"ttft": "2ms", "itl": "1ms", "version": "1.2.0"}
    run = loadgen.run(
        WORKLOAD, embedded=embedded, concurrency=1, num_requests=12, out=tmp_path / "run", warmup=0, server_timing=True
    )
    codes = [code.code for code in run.summary.verdict.warning_codes]
    assert codes.count("server_timing_missing") == 1
    assert any("trtllm" in note and "--server-timing" in note for note in decode_header(tmp_path / "run").notes)


def decode_header(folder: Path) -> Header:
    return decode((folder / "run.json").read_bytes())
