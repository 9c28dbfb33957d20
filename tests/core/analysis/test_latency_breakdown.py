"""TTFT and E2E breakdowns by quantile, target and prompt length, and the slowest requests."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_page
from counted_rows import CountedRows
from hypothesis import given, settings
from hypothesis import strategies as st

import loadgen
from loadgen.core.analysis.latency_breakdown import (
    BANDS,
    _find_near_percentiles,
    list_slowest_requests,
)
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import RunManifest, StagePlan, TargetFacts
from loadgen.core.results.record import ROW
from loadgen.core.run_summary import summarize
from loadgen.runs.text import render

MS = 1_000_000
PARTS = ("client_ms", "connect_ms", "queue_ms", "prefill_ms", "transfer_ms", "rest_ms")


def rows(n: int = 1000, **columns: Any) -> np.ndarray[Any, Any]:
    """Return successful requests that are scheduled every 10 ms.

    Each one is sent 1 ms late, connects in 2 ms, waits in the server's queue for its number modulo
    100 in ms, and has 30 ms of prefill, 4 ms of network and 100 ms of decoding.
    """
    records = np.zeros(n, ROW)
    number = np.arange(n)
    records["slot"] = records["request"] = number
    records["due_ns"] = number * 10 * MS
    records["ready_ns"] = records["due_ns"] + 2 * MS
    records["sent_ns"] = records["ready_ns"] + 1 * MS
    records["server_queue_ns"] = number % 100 * MS
    records["server_prefill_ns"] = 30 * MS
    records["server_transfer_ns"] = -1
    for name, values in columns.items():
        records[name] = values
    reported_ns = np.maximum(records["server_queue_ns"], 0) + np.maximum(
        records["server_prefill_ns"], 0
    )
    first = records["sent_ns"] + reported_ns + 4 * MS
    records["first_token_ns"] = records["first_answer_ns"] = first
    records["last_token_ns"] = records["end_ns"] = records["done_ns"] = first + 100 * MS
    records["input_tokens"] = columns.get("input_tokens", 500)
    records["cached_tokens"], records["output_tokens"], records["output_events"] = 50, 11, 11
    records["max_gap_ns"] = columns.get("max_gap_ns", 10 * MS)
    return records


def summary(records: np.ndarray[Any, Any], **manifest: Any) -> Summary:
    return summarize(
        RunManifest(run="r", stages=(StagePlan(slots=len(records)),), **manifest), records
    )


def test_parts_of_ttft_add_up_to_its_mean_near_each_quantile() -> None:
    splits = summary(rows()).splits

    assert splits.reason == "" and splits.accounted == 1000

    [group] = splits.groups
    p50, p99, slowest = group.ttft
    assert (p50.at, p50.requests, p50.queue_ms) == ("p50", 100, 49.5)
    assert (p99.at, p99.requests) == ("p99", 10) and 97.9 < (p99.queue_ms or 0) <= 99
    assert (slowest.at, slowest.requests, slowest.queue_ms) == ("slowest", 10, 99)
    for split in group.ttft:
        assert (split.client_ms, split.connect_ms, split.prefill_ms, split.rest_ms) == (
            1,
            2,
            30,
            pytest.approx(4),
        )
        assert split.transfer_ms is None
        assert sum(getattr(split, part) or 0 for part in PARTS) == pytest.approx(split.ttft_ms)


def test_an_open_connection_has_no_connect_time() -> None:
    """A client that is late takes an open connection late: that is its own lateness."""
    split = summary(rows(reused=1)).splits.groups[0].ttft[0]
    assert (split.client_ms, split.connect_ms) == (3, 0)


def test_stalls_are_a_separate_part_of_latency() -> None:
    records = rows(max_gap_ns=np.where(np.arange(1000) % 50 == 0, 1500 * MS, 10 * MS))
    records["end_ns"] = records["last_token_ns"] = records["done_ns"] = (
        records["first_token_ns"] + 90 * MS + records["max_gap_ns"]
    )
    p50, p99, slowest = summary(records).splits.groups[0].e2e

    assert p50.stall_ms == 0 and slowest.stall_ms == 1500 == p99.stall_ms
    for split in (p50, p99, slowest):
        assert split.ttft_ms + split.decode_ms + split.stall_ms == pytest.approx(split.e2e_ms)
    assert slowest.decode_ms == pytest.approx(90)


@pytest.mark.parametrize(
    ("columns", "has_server_timing", "expected_text"),
    [
        (
            {"server_queue_ns": -1, "server_prefill_ns": -1},
            False,
            "some servers do with --server-timing",
        ),
        ({"server_queue_ns": -1, "server_prefill_ns": -1}, True, "sent no timing breakdown"),
        ({"server_queue_ns": -1}, False, "does not report queueing time"),
    ],
)
def test_a_latency_that_cannot_be_split_has_a_reason(
    columns: dict[str, int], has_server_timing: bool, expected_text: str
) -> None:
    measured_summary = summary(rows(**columns), server_timing=has_server_timing)
    split = measured_summary.splits.groups[0].ttft[0]

    assert split.queue_ms is None and split.client_ms == 1
    assert split.client_ms + split.connect_ms + (
        split.prefill_ms or 0
    ) + split.rest_ms == pytest.approx(split.ttft_ms)
    assert re.search(expected_text, measured_summary.splits.reason)
    codes = [code.code for code in measured_summary.verdict.warning_codes]
    assert ("server_timing_missing" in codes) == (
        has_server_timing
        and columns["server_queue_ns"] < 0
        and measured_summary.splits.accounted == 0
    )


def test_targets_and_prompt_lengths_have_separate_breakdowns() -> None:
    number = np.arange(1000)
    records = rows(
        target=number % 2, input_tokens=np.where(number % 4 == 0, 4000, 100 + number % 4)
    )
    records["first_token_ns"] += np.where(records["target"] == 1, 50 * MS, 0)
    splits = summary(records, targets=(TargetFacts(name="fast"), TargetFacts(name="slow"))).splits
    names = [(group.by, group.name, group.requests) for group in splits.groups]

    assert names == [
        ("all", "", 1000),
        ("target", "fast", 500),
        ("target", "slow", 500),
        ("prompt", "up to 101 tokens", 250),
        ("prompt", "102 tokens", 250),
        ("prompt", "103 tokens", 250),
        ("prompt", "over 103 tokens", 250),
    ]
    fast, slow = (group.ttft[0] for group in splits.groups[1:3])
    assert slow.rest_ms - fast.rest_ms == pytest.approx(50)


def test_prompts_of_one_length_are_not_divided_into_length_classes() -> None:
    """A response without prompt tokens once caused an internal error in a run of one length."""
    splits = summary(rows(input_tokens=np.where(np.arange(1000) == 7, -1, 500))).splits
    assert [(group.by, group.requests) for group in splits.groups] == [("all", 1000)]


def test_the_breakdown_of_few_requests_has_no_p99() -> None:
    assert [split.at for split in summary(rows(50)).splits.groups[0].ttft] == ["p50"]
    assert summary(rows(5)).splits.groups[0].ttft == ()
    failed = rows(20, status=1)
    assert summary(failed).splits.reason == "no request succeeded" and summary(failed).slowest == ()


def test_slowest_requests_state_how_many_others_were_in_flight() -> None:
    records = rows(200)
    records["first_token_ns"][150] = records["sent_ns"][150] + 900 * MS
    records["end_ns"][120] = records["done_ns"][120] = records["due_ns"][120] + 5000 * MS
    slowest_requests = summary(records).slowest

    assert [request.by for request in slowest_requests] == ["ttft"] * 5 + ["e2e"] * 5
    first_slow_request, longest = slowest_requests[0], slowest_requests[5]
    assert (
        first_slow_request.slot,
        first_slow_request.id,
        first_slow_request.ttft_ms,
        first_slow_request.input_tokens,
    ) == (150, "r-150", 903, 500)
    assert (longest.slot, longest.e2e_ms, longest.cached_tokens) == (120, 5000, 50)

    sent_ns, done_ns, token = records["sent_ns"], records["done_ns"], records["first_token_ns"]
    is_in_flight = (sent_ns <= sent_ns[150]) & (done_ns > sent_ns[150]) & (records["slot"] != 150)
    assert first_slow_request.in_flight == int(is_in_flight.sum())
    assert first_slow_request.waiting_input_tokens == 500 * int(
        (is_in_flight & (token > sent_ns[150])).sum()
    )


def test_all_fields_are_read_of_the_slowest_requests_only() -> None:
    """Only 7 fields of measured requests and 6 fields of the others are read for all requests."""
    records = rows(20_000).view(CountedRows)
    measured, other_columns = (Columns(records, records["slot"] % 2 == half) for half in (0, 1))
    CountedRows.seen.clear()
    slow_requests = list_slowest_requests([measured], [other_columns], RunManifest(run="r"))

    assert CountedRows.seen["picked"] < 10 * len(records)
    assert slow_requests == list_slowest_requests(
        [Columns(records, records["slot"] % 2 == 0, keep_all=True)],
        [other_columns],
        RunManifest(run="r"),
    )


def test_the_breakdown_of_a_simulated_run_leaves_no_unexplained_time(tmp_path: Path) -> None:
    run = loadgen.run(
        "qa", url="sim:gb300-vm", request_rate=60, num_requests=300, seed=1, out=tmp_path / "run"
    )
    [group, *_] = run.summary.splits.groups

    for split in group.ttft:
        assert split.rest_ms == pytest.approx(0, abs=1e-5) and split.client_ms == 0
        assert (split.queue_ms or 0) + (split.prefill_ms or 0) == pytest.approx(
            split.ttft_ms, abs=1e-5
        )
    text = render(run.summary)
    assert "TTFT breakdown (ms)" in text and "slowest by TTFT" in text
    table_html = run_page.render(run.summary).split('id="slow-requests"')[1].split("<h2")[0]
    assert "TTFT breakdown (ms)" in table_html and "slowest by E2E" in table_html
    assert (
        table_html.count('title="prefill ') == 10 and table_html.count('title="decode ') == 10
    )  # in the waterfall of each of the ten


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=300), st.randoms(use_true_random=False))
def test_requests_selected_near_a_quantile_equal_those_of_a_full_sort(
    few_values: list[int], draw: random.Random
) -> None:
    """Only these are put in order, among many equal values."""
    values = np.array(few_values, np.int64)
    due = np.array([draw.randrange(5) for _ in few_values], np.int64)
    positions = np.flatnonzero(values > 0)
    ordered = positions[np.lexsort((due[positions], values[positions]))]
    wanted = {
        at: ordered[
            (first := min(int(len(positions) * low), len(positions) - 1)) : max(
                int(len(positions) * high), first + 1
            )
        ].tolist()
        for at, (low, high, fewest) in BANDS.items()
        if len(positions) >= fewest
    }
    near_percentiles = _find_near_percentiles(values, due, values > 0)

    assert {percentile: indexes.tolist() for percentile, indexes in near_percentiles} == wanted
