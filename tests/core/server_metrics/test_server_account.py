"""Server timing breakdowns: known forms, damaged ones, and their way into the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from loadgen_sdk.wire_formats.request_body import with_timing_request
from loadgen_sdk.wire_formats.server_profiles import SERVER_PROFILES
from loadgen_sdk.wire_formats.server_timing import NO_SERVER_TIMING, ServerTiming
from loadgen_sdk.wire_formats.server_timing_lookup import parse_server_timing

import loadgen
from loadgen.core.results.manifest import RunManifest, decode_manifest
from loadgen.core.server_metrics import account_join, request_accounts

WORKLOAD = {"name": "few", "requests": {"input_tokens": 12, "output_tokens": 4}}
MS = 1_000_000
COLUMNS = ["server_queue_ns", "server_prefill_ns", "server_transfer_ns", "server_decode_ns"]


@pytest.mark.parametrize(
    ("timing", "expected"),
    [
        (  # trtllm-serve, the event after [DONE]: its time to first token holds the queue
            {
                "trtllm.perf_metrics": {
                    "Server-Timing": "server_queue;dur=1.25, server_ttft;dur=8.5, server_e2e;dur=24"
                }
            },
            ServerTiming(queue_ns=1_250_000, prefill_ns=7_250_000, decode_ns=15_500_000),
        ),
        (  # the header of a disaggregated server, which has prefill (ctx) and decode (gen) phases
            {
                "server-timing": "disagg_queue;dur=1, ctx_queue;dur=2, ctx_ttft;dur=12, "
                "gen_queue;dur=1, gen_ttft;dur=4, gen_e2e;dur=54, gen_kv_transfer;dur=3"
            },
            ServerTiming(
                queue_ns=2 * MS, prefill_ns=10 * MS, transfer_ns=3 * MS, decode_ns=50 * MS
            ),
        ),
        (  # vLLM: its time to first token begins after the queue
            {
                "metrics": {
                    "queue_time_ms": 5,
                    "time_to_first_token_ms": 20.5,
                    "generation_time_ms": 100,
                }
            },
            ServerTiming(queue_ns=5 * MS, prefill_ns=20_500_000, decode_ns=100 * MS),
        ),
        (  # Dynamo, as recorded
            {
                "nvext": {
                    "worker_id": {"prefill_worker_id": 1},
                    "timing": {
                        "request_received_ms": 1795222751607,
                        "prefill_wait_time_ms": 3.5,
                        "prefill_time_ms": 22.0,
                        "ttft_ms": 25.5,
                        "total_time_ms": 69.5,
                    },
                }
            },
            ServerTiming(queue_ns=3_500_000, prefill_ns=22 * MS, decode_ns=44 * MS),
        ),
        (  # llama-server, as recorded: nothing about its queue
            {
                "timings": {
                    "cache_n": 20,
                    "prompt_n": 1,
                    "prompt_ms": 1.5,
                    "predicted_n": 4,
                    "predicted_ms": 3.0,
                }
            },
            ServerTiming(prefill_ns=1_500_000, decode_ns=3 * MS, cached_tokens=20),
        ),
        (
            {"timings": {"prompt_ms": 1.0, "draft_n": 8, "draft_n_accepted": 5}},
            ServerTiming(prefill_ns=MS, drafted_tokens=8, accepted_tokens=5),
        ),
        (  # SGLang: instants and durations in s; its prefill ends at prefill_finished_ts
            {
                "meta_info": {
                    "queue_time": 0.25,
                    "request_received_ts": 99.0,
                    "request_sent_to_scheduler_ts": 100.0,
                    "prefill_finished_ts": 100.75,
                    "decode_finished_ts": 102.75,
                    "cached_tokens": 3,
                    "spec_draft_token_num": 8,
                    "spec_accept_token_num": 5,
                }
            },
            ServerTiming(
                queue_ns=250 * MS,
                prefill_ns=500 * MS,
                decode_ns=2000 * MS,
                cached_tokens=3,
                drafted_tokens=8,
                accepted_tokens=5,
            ),
        ),
        (  # its older versions: how long the launch of the prefill took is all that they say
            {
                "meta_info": {
                    "queue_time": 0.25,
                    "prefill_launch_delay": 0.01,
                    "prefill_launch_latency": 0.5,
                }
            },
            ServerTiming(queue_ns=250 * MS, prefill_ns=510 * MS),
        ),
        (  # trtllm-serve of 1.4: its drafts are a form of their own beside its times
            {
                "speculative_decoding": {"total_draft_tokens": 9, "total_accepted_draft_tokens": 4},
                "trtllm.perf_metrics": {"Server-Timing": "server_queue;dur=1, server_ttft;dur=8"},
            },
            ServerTiming(queue_ns=MS, prefill_ns=7 * MS, drafted_tokens=9, accepted_tokens=4),
        ),
        ({}, NO_SERVER_TIMING),
    ],
)
def test_every_format_of_server_timing_gives_the_same_durations(
    timing: dict[str, Any], expected: ServerTiming
) -> None:
    assert parse_server_timing(timing) == expected


@pytest.mark.parametrize(
    "timing",
    [
        {"trtllm.perf_metrics": 7},
        {"trtllm.perf_metrics": {"Server-Timing": 3}},
        {"server-timing": None},
        {"server-timing": "cache;desc=hit, db;dur=53"},
        {"server-timing": "server_queue;dur=now, server_ttft;dur=nan"},
        {"server-timing": "server_queue;dur=-3"},
        {"metrics": "fast"},
        {"metrics": [1]},
        {"metrics": {"queue_time_ms": True}},
        {"nvext": {"timing": "soon"}},
        {"nvext": {"timing": {"prefill_time_ms": None}}},
        {"timings": {"prompt_ms": "1"}},
        {"timings": {"cache_n": -4, "prompt_ms": float("inf")}},
        {"timings": {"prompt_ms": 1e303, "predicted_ms": 10**400}},  # beyond what an int64 holds
        {"timings": {"cache_n": 10**30, "draft_n": 2**63}},
        {"meta_info": {"queue_time": 1e300}},
        {"meta_info": {"queue_time": 10**400}},
        {"else": {"prompt_ms": 1}},
        {"meta_info": "x"},
        {"meta_info": {"queue_time": -1, "prefill_finished_ts": True}},
        {"speculative_decoding": "x"},
        {"speculative_decoding": {"total_draft_tokens": -1}},
    ],
)
def test_damaged_or_unknown_server_timing_is_ignored(timing: dict[str, Any]) -> None:
    assert parse_server_timing(timing) == NO_SERVER_TIMING


def test_timing_is_requested_in_the_form_of_each_server_type() -> None:
    assert with_timing_request(SERVER_PROFILES["trtllm"], (("A", "b"),), None, stream=True) == (
        (("X-TRTLLM-return-metrics", "1"), ("A", "b")),
        None,
    )

    _, fields = with_timing_request(
        SERVER_PROFILES["dynamo"], (), {"nvext": {"use_raw_prompt": True}}, stream=True
    )

    assert fields == {"nvext": {"extra_fields": ["timing"], "use_raw_prompt": True}}
    assert with_timing_request(SERVER_PROFILES["llamacpp"], (), None, stream=True) == ((), None)
    assert with_timing_request(SERVER_PROFILES["sglang"], (), None, stream=True) == ((), None)
    assert with_timing_request(SERVER_PROFILES["sglang"], (), None, stream=False) == (
        (),
        {"return_meta_info": True},
    )


def table(folder: Path) -> Any:
    return pq.read_table(folder / "requests" / "requests.parquet")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "settings_options"),
    [
        ({}, {"server_timing": True}),  # the event after [DONE]
        ({}, {"server_timing": True, "stream": False}),  # the header
        (
            {"api_flavor": "openai"},
            {"extra_body": {"include_metrics": True}},
        ),  # beside the usage, as vLLM writes it
        (
            {"api_flavor": "openai"},
            {"extra_body": {"return_meta_info": True}, "stream": False},
        ),  # SGLang's
    ],
    ids=["event", "header", "usage", "choice"],
)
def test_server_timing_of_the_embedded_server_is_in_the_records(
    tmp_path: Path, options: dict[str, str], settings_options: dict[str, Any]
) -> None:
    """Half of TTFT is queueing for one slot. The server's parts fit into the client's times."""
    embedded = {"ttft": "20ms", "itl": "1ms", "slots": 1} | options
    run = loadgen.run(
        WORKLOAD,
        embedded=embedded,
        concurrency=2,
        num_requests=12,
        output_tokens=8,
        out=tmp_path / "run",
        warmup=0,
        **settings_options,
    )
    columns = (
        table(tmp_path / "run").select([*COLUMNS, "due_ns", "first_token_ns", "end_ns"]).to_pylist()
    )

    assert run.summary.requests.ok == len(columns) == 12

    for row in columns:
        queue, prefill, transfer, decode = (row[name] for name in COLUMNS)
        assert transfer is None and queue is not None and decode >= 0
        assert prefill >= 19 * MS
        assert queue + prefill + decode <= row["end_ns"] - row["due_ns"] + MS


@pytest.mark.processes
def test_a_server_reports_no_timing_unless_it_is_requested(tmp_path: Path) -> None:
    loadgen.run(
        WORKLOAD,
        embedded={"ttft": "2ms", "itl": "1ms"},
        concurrency=1,
        num_requests=3,
        output_tokens=4,
        out=tmp_path / "run",
    )

    assert table(tmp_path / "run").column("server_prefill_ns").null_count == 3


def test_server_timing_of_a_virtual_run_is_exact(tmp_path: Path) -> None:
    loadgen.run(
        WORKLOAD,
        url="sim:gb300-vm",
        request_rate=20,
        num_requests=100,
        seed=1,
        out=tmp_path / "run",
    )

    for row in table(tmp_path / "run").to_pylist():
        assert (
            row["server_queue_ns"] + row["server_prefill_ns"]
            == row["first_token_ns"] - row["due_ns"]
        )
        assert row["server_decode_ns"] == row["last_token_ns"] - row["first_token_ns"]


@pytest.mark.processes
def test_missing_server_timing_is_reported_before_the_load(
    tmp_path: Path,
) -> None:
    """The preflight warns once that the server has no timing, and the records do not repeat it."""
    embedded = {"ttft": "2ms", "itl": "1ms", "api_flavor": "openai"}
    run = loadgen.run(
        WORKLOAD,
        embedded=embedded,
        concurrency=1,
        num_requests=12,
        out=tmp_path / "run",
        warmup=0,
        server_timing=True,
    )
    codes = [code.code for code in run.summary.verdict.warning_codes]

    assert codes.count("server_timing_missing") == 1
    assert any(
        "generic" in note and "--server-timing" in note
        for note in read_manifest(tmp_path / "run").warnings
    )


def read_manifest(folder: Path) -> RunManifest:
    return decode_manifest((folder / "run.json").read_bytes())


# -- an account that the server keeps to itself ----------------------------------------------------


def account(arrival: float, first: float, last: float) -> dict[str, Any]:
    """Return an entry of `/perf_metrics` with times in seconds on the server's clock."""
    timing = {
        "arrival_time": arrival,
        "first_scheduled_time": arrival + 0.01,
        "first_token_time": first,
    }
    return {
        "request_id": 2048,
        "perf_metrics": {"timing_metrics": timing | {"last_token_time": last}},
    }


def test_perf_metrics_of_trtllm_are_read_from_joint_and_disaggregated_servers() -> None:
    alone = account(5.0, 5.05, 6.0)
    alone["perf_metrics"]["speculative_decoding"] = {
        "total_draft_tokens": 9,
        "total_accepted_draft_tokens": 4,
    }
    apart = {
        "ctx_perf_metrics": account(5.0, 5.05, 5.05),
        "gen_perf_metrics": account(5.06, 5.1, 6.0),
    }
    apart["gen_perf_metrics"]["perf_metrics"]["timing_metrics"] |= {
        "kv_cache_transfer_start": 5.06,
        "kv_cache_transfer_end": 5.08,
    }
    timing_breakdown, other = request_accounts.parse_breakdowns(
        msgspec.json.encode([alone, apart]), 1
    )

    assert (timing_breakdown.queue, timing_breakdown.prefill, timing_breakdown.decode) == (
        10 * MS,
        40 * MS,
        950 * MS,
    )
    assert (timing_breakdown.drafted, timing_breakdown.accepted, timing_breakdown.target) == (
        9,
        4,
        1,
    )
    assert (other.queue, other.prefill, other.decode, other.transfer) == (
        10 * MS,
        40 * MS,
        900 * MS,
        20 * MS,
    )


@pytest.mark.parametrize(
    "page", [b"", b"{}", b"[1]", b'{"detail":"Not Found"}', b"[" * 5000, b"\xff"]
)
def test_an_invalid_list_of_server_timings_is_refused(page: bytes) -> None:
    with pytest.raises(ValueError):
        request_accounts.parse_breakdowns(page, 0)


def test_a_timing_record_without_its_instants_is_ignored() -> None:
    damaged = [
        {},
        {"perf_metrics": None},
        account(float("1e300"), 2, 3),
        {"perf_metrics": {"timing_metrics": 3}},
    ]
    assert request_accounts.parse_breakdowns(msgspec.json.encode(damaged), 0) == []


@pytest.mark.parametrize("lost", [0, 150])
def test_timings_match_their_requests_despite_lost_and_foreign_ones(lost: int) -> None:
    """Nearly all timings of this client's requests are matched, and none of another client.

    The server's clock has another start, and the network takes 1 ms.
    """
    random = np.random.default_rng(7)
    sent = np.sort(random.integers(0, 60_000 * MS, 2_000))
    ours = np.stack([sent, sent + random.integers(40 * MS, 400 * MS, 2_000), sent], axis=1)
    ours[:, 2] = ours[:, 1] + random.integers(100 * MS, 3_000 * MS, 2_000)
    offset = 987_654_321 * MS
    network = random.integers(0, MS, (2_000, 3)) * [1, -1, -1]
    theirs = (ours + network + offset)[lost:]
    foreign = theirs[::4] + random.integers(60 * MS, 900 * MS, (len(theirs[::4]), 3))
    request_of = account_join.match_breakdowns(np.concatenate([theirs, foreign]), ours)

    assert request_of is not None
    assert (request_of[: len(theirs)] == np.arange(lost, 2_000)).mean() > 0.995
    assert (request_of[len(theirs) :] >= 0).mean() < 0.01


def test_timings_of_another_server_match_no_request() -> None:
    random = np.random.default_rng(3)
    theirs, ours = (np.cumsum(random.integers(MS, 10_000 * MS, (300, 3)), axis=1) for _ in range(2))
    assert account_join.match_breakdowns(theirs, ours) is None


@pytest.mark.processes
@pytest.mark.parametrize("concurrency", [2, 5])
def test_timings_of_an_older_server_are_read_from_its_page(
    tmp_path: Path, concurrency: int
) -> None:
    embedded = {"ttft": "lognormal:20ms,0.5", "itl": "2ms", "slots": 2, "version": "1.2.0"}
    run = loadgen.run(
        WORKLOAD,
        embedded=embedded,
        concurrency=concurrency,
        num_requests=40,
        out=tmp_path / "run",
        warmup=0,
        server_timing=True,
    )

    assert (
        run.summary.requests.ok == 40 and run.summary.splits.accounted >= 20
    )  # a busy host hides some
    assert "server_timing_missing" not in [code.code for code in run.summary.verdict.warning_codes]

    for row in table(tmp_path / "run").to_pylist():
        if row["server_queue_ns"] is None:
            continue
        server = row["server_queue_ns"] + row["server_prefill_ns"]
        assert server <= row["first_token_ns"] - row["sent_ns"] + 10 * MS
        assert row["server_decode_ns"] <= row["last_token_ns"] - row["first_token_ns"] + 10 * MS
