"""A run of ten requests worked out by hand, and both sides of each validity limit."""

import itertools
import json
import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import repository_paths
import run_page
from expected_errors import refused
from loadgen_sdk.request import Completion
from loadgen_sdk.transport.exchange import Exchange
from make_examples import DATA, EXAMPLES, blank
from numpy.typing import NDArray
from oracle_values import differences
from pytest import approx as about
from queueing import rows
from run_fixtures import says

import loadgen
from loadgen.core import errors as codes
from loadgen.core import format
from loadgen.core.errors import UserError
from loadgen.core.limits import ValidityLimits
from loadgen.core.metrics import (
    reasons,
    timing_evidence,
    validity,
    validity_warnings,
    withholding,
)
from loadgen.core.metrics.request_counts import ErrorKind, RequestCounts
from loadgen.core.metrics.summary import Summary, dump_summary, exit_code, load_summary
from loadgen.core.metrics.windows import Window
from loadgen.core.results import record
from loadgen.core.results.manifest import (
    ReasonCode,
    RunManifest,
    StagePlan,
    TargetFacts,
    WorkerSample,
    decode_manifest,
    decode_worker_samples,
    encode_manifest,
)
from loadgen.core.results.record import (
    FINISH_REASONS,
    KINDS,
    SOURCES,
    STATUSES,
    RecordKey,
    RequestFacts,
)
from loadgen.core.results.record_log import Timeline
from loadgen.core.run_summary import summarize
from loadgen.core.slo import Slo, Term
from loadgen.core.stats.histogram import Histogram
from loadgen.figures import METRICS
from loadgen.runs import text
from loadgen.runs.rates import select_headline_rates

MS = 1_000_000
STOP = FINISH_REASONS.index("stop")

# One request per line, with times in ms. The first one belongs to the warm-up stage. `answer` is
# the first token after reasoning, `reason` the reasoning tokens, `n1` tokens of the first event.
TABLE = """
status    due  ready sent first answer last end  done out reason n1 events in  cached asked insrc
ok        0    0     0    100   100    300  300  300  3   -1     0  3      10  -1     -1    server
ok        1000 1000  1001 1101  1101   1301 1302 1305 5   -1     0  5      100 20     5     server
ok        1500 1500  1500 1700  1700   2000 2000 2003 7   -1     4  4      100 -1     8     server
ok        2000 1999  2002 2302  2302   2402 2402 2402 110 100    0  10     100 -1     -1    server
ok        2500 2500  2500 2600  2800   2900 2900 2900 31  20     0  31     -1  -1     -1    -
ok        3000 3000  3000 3050  3050   3050 3050 3050 1   -1     0  1      50  -1     -1    estimate
failed    3500 3500  3500 -1    -1     -1   -1   3510 -1  -1     0  0      -1  -1     -1    -
dropped   3600 -1    -1   -1    -1     -1   -1   -1   -1  -1     0  0      -1  -1     -1    -
cancelled 3700 3700  3700 3750  3750   3760 -1   3800 -1  -1     0  2      -1  -1     -1    -
lost      3800 3800  3800 -1    -1     -1   -1   -1   -1  -1     0  0      -1  -1     -1    -
"""
COLUMNS = {
    "due": "due_ns",
    "ready": "ready_ns",
    "sent": "sent_ns",
    "first": "first_token_ns",
    "answer": "first_answer_ns",
    "last": "last_token_ns",
    "end": "end_ns",
    "done": "done_ns",
    "out": "output_tokens",
    "reason": "reasoning_tokens",
    "n1": "first_event_tokens",
    "events": "output_events",
    "in": "input_tokens",
    "cached": "cached_tokens",
    "asked": "asked_output",
}


def handmade_records() -> NDArray[np.void]:
    head, *lines = (line.split() for line in TABLE.strip().splitlines())
    rows = blank(len(lines))
    for row, line in zip(rows, lines, strict=True):
        for name, cell in zip(head, line, strict=True):
            if name == "status":
                row["status"] = STATUSES.index(cell)
            elif name == "insrc":
                row["input_source"] = SOURCES.index("" if cell == "-" else cell)
                row["output_source"] = SOURCES.index("server" if row["output_tokens"] >= 0 else "")
            else:
                field = COLUMNS[name]
                row[field] = int(cell) * (MS if field.endswith("_ns") and cell != "-1" else 1)
    rows["slot"] = range(len(rows))
    rows["stage"][1:] = 1
    rows["kind"][6:] = [
        KINDS.index(kind) for kind in ("http_5xx", "in_flight_cap", "interrupted", "worker_died")
    ]
    rows["http_status"][6] = 503
    rows["text"][7] = 1
    rows["worker"][9] = 2
    rows["bytes_sent"], rows["bytes_received"] = 10, 100
    return rows


MANIFEST = RunManifest(
    run="r",
    state="finished",
    stages=(
        StagePlan(name="warm", measured=False, arrival="poisson 1/s"),
        StagePlan(name="main", arrival="poisson 2/s", slots=9),
    ),
    slo=Slo(
        terms=(
            Term(metric="ttft", limit_ns=250 * MS, quantile=0.5),
            Term(metric="tpot", limit_ns=100 * MS, quantile=0.5),
        ),
        goodput_share=0.5,
    ),
    targets=(TargetFacts(url="http://h", gpus=4),),
)


def handmade_summary() -> Summary:
    return summarize(MANIFEST, handmade_records(), texts=["", "too many in flight"])


def statistics_of(distribution: Any) -> tuple[int, list[float]]:
    return distribution.count, [distribution.min, distribution.p50, distribution.max]


@pytest.mark.parametrize(
    ("metric", "count", "three"),
    [
        ("ttft_ms", 5, [50, 101, 302]),  # of 101, 200, 302, 100, 50; place floor(5 * 0.5) = 2
        ("ttft_from_sent_ms", 5, [50, 100, 300]),  # 100, 200, 300, 100, 50
        ("first_answer_ms", 5, [50, 200, 302]),  # 101, 200, 302, 300, 50
        # 200/(5-1); 300/(7-4): the first event had four; 100/(110-100-1): reasoning not streamed;
        # 300/(31-1): it was; one token: none. 50, 100, 11.1, 10 -> place 2 of 10, 11.1, 50, 100
        ("tpot_ms", 4, [10, 50, 100]),
        ("tpot_mlperf_ms", 4, [100 / 109, 50, 50.25]),  # 201/4, 300/6, 100/109, 300/30
        ("e2e_ms", 5, [50, 400, 500]),  # 302, 500, 402, 400, 50
        (
            "connect_ms",
            8,
            [0, 0, 0],
        ),  # all that were sent; a connection that was ready before its time took nothing
        ("send_lag_ms", 8, [0, 0, 2]),
    ],
)
def test_latencies_equal_those_computed_by_hand(
    metric: str, count: int, three: list[float]
) -> None:
    statistics = statistics_of(getattr(handmade_summary(), metric))
    assert statistics == (count, pytest.approx(three, abs=1e-6))


def test_turns_after_a_failed_turn_do_not_count_as_dropped() -> None:
    """If the first turn of a conversation is dropped at the limit, so is the rest."""
    after = {"previous_turn_failed": ErrorKind(count=3, first_text="")}
    rest = {"ok": 7, "failed": 0, "cancelled": 0, "lost": 0, "resent": 0, "by_error": after}
    assert RequestCounts(scheduled=10, dropped=3, **rest).dropped_share == 0
    assert RequestCounts(scheduled=11, dropped=4, **rest).dropped_share == 4 / 11


def test_counts_windows_load_and_tokens_equal_those_computed_by_hand() -> None:
    s = handmade_summary()
    r = s.requests

    assert (r.scheduled, r.ok, r.failed, r.dropped, r.cancelled, r.lost) == (9, 5, 1, 1, 1, 1)
    assert (s.warmup.scheduled, s.warmup.ok) == (1, 1)
    assert {kind: (error.count, error.first_text) for kind, error in r.by_error.items()} == {
        "http_5xx": (1, "HTTP 503"),
        "in_flight_cap": (1, "too many in flight"),
        "interrupted": (1, ""),
        "worker_died": (1, ""),
    }
    assert (s.bytes.sent, s.bytes.received) == (90, 900)
    w = s.window
    assert (w.start_s, w.end_s, w.duration_s) == (
        1.0,
        3.76,
        2.76,
    )  # last token of all: the cancelled one's
    assert (w.steady.start_s, w.steady.end_s, w.full_run.end_s) == (1.0, 3.8, 3.8)
    assert w.last_issued.duration_s is None  # the one sent last never ended
    # in flight: 304 + 503 + 400 + 400 + 50 + 10 + 60 of 2,760 ms; request 2 is in flight until
    # 2,003, 3 from 2,002
    assert s.load.in_flight_mean == pytest.approx(1727 / 2760)
    assert s.load.in_flight_max == 2
    assert s.load.offered_rps == pytest.approx(8 / 2.8)
    assert s.load.achieved_rps == pytest.approx(7 / 2.799)
    assert s.load.completed_rps == pytest.approx(5 / 2.76)
    assert s.load.steady_completed_rps == pytest.approx(5 / 2.8)
    t = s.tokens
    assert (t.input, t.output, t.cached, t.reasoning, t.asked_output) == (350, 154, 20, 120, 13)
    assert (t.cached_share, t.length_mismatch_share) == (0.2, 0.5)
    assert t.per_event == pytest.approx((5 + 7 + 10 + 31 + 1) / 51)
    assert t.output_per_s == pytest.approx(154 / 2.76)
    assert t.total_per_s == pytest.approx(504 / 2.76)
    assert t.steady_output_per_s == pytest.approx(154 / 2.8)  # no timeline: all answers lie inside
    assert t.steady_input_per_s == pytest.approx(350 / 2.8)
    assert t.whole_output_per_s == pytest.approx(157 / 3.8)
    assert t.sources.input == {"server": 3, "estimate": 1, "none": 1}
    assert t.sources.output == {"server": 5}
    assert s.tpot_undefined == 1
    assert s.itl_ms is None  # no histogram was given
    assert "two output events" in s.itl_undefined_reason


def test_goodput_equals_that_computed_by_hand() -> None:
    g = handmade_summary().goodput

    # TTFT at most 250: not 3. TPOT at most 100: all that have one. Good: 1, 2, 4, 5 of 8; the
    # cancelled one left out.
    assert (g.good, g.counted, g.share, g.met) == (4, 8, 0.5, None) and g.not_judged, (
        "the run is not valid"
    )
    assert g.rps == pytest.approx(4 / 2.76)
    assert g.steady_rps == pytest.approx(4 / 2.8)
    ttft, tpot = g.slo
    # 50, 100, 101, 200, 302, then three that never came: place floor(8 * 0.5) = 4
    assert (ttft.value_ms, ttft.margin_ms, ttft.met, ttft.over, ttft.count) == (
        302,
        -52,
        None,
        4,
        8,
    )
    # 10, 11.1, 50, 100, never, never, never: place 3, exactly at the limit
    assert (tpot.value_ms, tpot.margin_ms, tpot.met, tpot.over, tpot.count) == (100, 0, None, 3, 7)
    assert (tpot.needed, tpot.supported) == (11, False)


def test_slots_without_a_record_are_lost() -> None:
    manifest = msgspec.structs.replace(
        MANIFEST, stages=(MANIFEST.stages[0], StagePlan(name="main", slots=12))
    )
    s = summarize(manifest, handmade_records())

    assert (s.requests.scheduled, s.requests.lost, s.requests.by_error["no_record"].count) == (
        12,
        4,
        3,
    )
    assert (s.goodput.counted, s.goodput.good) == (11, 4)
    assert (s.warmup.scheduled, s.warmup.lost) == (1, 0)


def test_a_stage_without_a_planned_number_of_slots_loses_none() -> None:
    stages = (*MANIFEST.stages, StagePlan(name="timed", concurrency=2))
    summary = summarize(msgspec.structs.replace(MANIFEST, stages=stages), handmade_records())
    assert (summary.requests.scheduled, summary.requests.lost) == (9, 1)


def test_a_resent_request_counts_once() -> None:
    rows = handmade_records()
    rows["resent"][1] = 2
    counts = summarize(MANIFEST, rows).requests
    assert (counts.scheduled, counts.ok, counts.resent) == (9, 5, 2)


def test_slots_of_the_warm_up_without_a_record_are_lost_in_the_warm_up() -> None:
    warm_up = msgspec.structs.replace(MANIFEST.stages[0], slots=6)
    manifest = msgspec.structs.replace(MANIFEST, stages=(warm_up, StagePlan(name="main", slots=12)))
    summary = summarize(manifest, handmade_records())
    assert (summary.requests.scheduled, summary.requests.lost) == (12, 4)
    assert (summary.warmup.scheduled, summary.warmup.lost) == (6, 5)


def test_requests_of_a_run_cut_off_that_were_sent_without_a_record_are_lost() -> None:
    """What was due after the cut was counted as lost, and as over every limit."""
    stages = (MANIFEST.stages[0], StagePlan(name="main", slots=5000))
    manifest = msgspec.structs.replace(MANIFEST, state="running", stages=stages)
    rows = handmade_records()
    sent = len(rows) - 1  # one was dropped
    samples = [
        WorkerSample(t_s=2, worker=1, sent=3),
        WorkerSample(t_s=1, sent=4),
        WorkerSample(t_s=2, sent=sent),
    ]
    s = summarize(manifest, rows, worker_samples=samples)

    assert (s.requests.scheduled, s.requests.lost, s.requests.by_error["no_record"].count) == (
        12,
        4,
        3,
    )
    assert (s.goodput.counted, s.goodput.good) == (11, 4)
    assert summarize(manifest, rows).requests.scheduled == 9, "nothing is known of what was sent"
    assert s.run.state == "cut_off"
    assert says(s.verdict.warning_codes, "cut_off")


def test_the_summary_does_not_depend_on_the_order_of_records() -> None:
    draw = np.random.default_rng(3)
    rows = np.concatenate([handmade_records()] * 20)
    for field in (
        "due_ns",
        "ready_ns",
        "sent_ns",
        "first_token_ns",
        "last_token_ns",
        "end_ns",
        "done_ns",
    ):
        shifted = rows[field] + np.repeat(np.arange(20) * 5_000 * MS, 10)
        rows[field] = np.where(rows[field] < 0, -1, shifted)
    events = draw.exponential(9 * MS, 500).astype(np.int64)
    histogram, halves = Histogram(), [Histogram(), Histogram()]
    histogram.add(events)
    halves[0].add(events[:200])
    halves[1].add(events[200:])
    halves[0].merge(halves[1])
    manifest = msgspec.structs.replace(
        MANIFEST, stages=(MANIFEST.stages[0], StagePlan(name="main"))
    )
    summary = summarize(manifest, rows, [Histogram(), histogram])

    assert summary == summarize(manifest, draw.permutation(rows), [Histogram(), halves[0]])
    assert summary.inter_chunk_ms.count == 500


def test_a_conversation_is_ok_if_every_turn_is() -> None:
    rows = blank(7)
    rows["session"], rows["turn"] = [5, 5, 6, 6, 7, 7, -1], [0, 1, 0, 1, 0, 1, 0]
    rows["due_ns"] = np.array([0, 3, 1, 4, 2, 5, 6]) * 1000 * MS
    rows["sent_ns"], rows["end_ns"] = rows["due_ns"], rows["due_ns"] + 500 * MS
    rows["last_token_ns"] = rows["first_token_ns"] = rows["done_ns"] = rows["end_ns"]
    rows["status"][3], rows["status"][5] = STATUSES.index("failed"), STATUSES.index("cancelled")
    cut_sessions = summarize(
        RunManifest(turns_per_session=3), rows
    ).sessions  # the same rows, had there been a third turn to come

    assert cut_sessions is not None
    assert (cut_sessions.count, cut_sessions.cut, cut_sessions.ok) == (0, 3, 0)
    sessions = summarize(RunManifest(turns_per_session=2), rows).sessions
    assert sessions is not None
    assert (sessions.count, sessions.ok, sessions.duration_ms.p50) == (2, 1, 3500)
    assert sessions.cut == 1, "the one with a cancelled request"
    assert sessions.ok_per_s == pytest.approx(1 / 6.5)


def test_the_rates_of_targets_add_up_to_the_rate_of_the_run() -> None:
    rows = handmade_records()
    rows["target"] = rows["slot"] % 2
    targets = (
        TargetFacts(url="http://a", gpus=4, model="m"),
        TargetFacts(url="http://b", gpus=8, model="m"),
    )
    s = summarize(msgspec.structs.replace(MANIFEST, targets=targets), rows)

    assert (s.target.gpus, s.target.model, s.target.url) == (12, "m", "")
    assert [part.requests.scheduled for part in s.targets] == [4, 5]
    assert sum(part.tokens.output_per_s or 0 for part in s.targets) == pytest.approx(
        s.tokens.output_per_s
    )
    assert sum(part.goodput.good or 0 for part in s.targets) == s.goodput.good


@pytest.mark.parametrize("n", [0, 1])
def test_a_run_without_measured_requests_is_not_valid(n: int) -> None:
    rows = blank(n)
    rows["status"] = LOST
    s = summarize(RunManifest(slo=MANIFEST.slo), rows)
    assert not s.verdict.valid
    assert load_summary(dump_summary(s)) == s


# -- the verdict -----------------------------------------------------------------------------------


def valid_records(n: int = 1000) -> NDArray[np.void]:
    """Return requests 10 ms apart with a TTFT of 100 ms and five tokens 10 ms apart."""
    rows = blank(n)
    rows["due_ns"] = np.arange(n) * 10 * MS
    rows["ready_ns"] = rows["sent_ns"] = rows["due_ns"]
    rows["first_token_ns"] = rows["first_answer_ns"] = rows["due_ns"] + 100 * MS
    rows["last_token_ns"] = rows["end_ns"] = rows["done_ns"] = rows["due_ns"] + 140 * MS
    rows["output_events"] = rows["output_tokens"] = rows["asked_output"] = 5
    rows["input_tokens"] = rows["built_tokens"] = 100
    rows["input_source"] = rows["output_source"] = SOURCES.index("server")
    return rows


def summarize_changed_records(
    change: dict[str, tuple[int, Any]] | None = None,
    seconds: list[WorkerSample] | None = None,
    **manifest: Any,
) -> Summary:
    """Summarize a valid run with changed fields: {field: (number of first rows, value)}."""
    rows = valid_records()
    for field, (k, value) in (change or {}).items():
        rows[field][:k] = value
    gaps = Histogram()
    gaps.add(np.full(4000, 10 * MS))
    return summarize(
        RunManifest(**({"state": "finished", "template_tokens": 0} | manifest)),
        rows,
        [gaps],
        [],
        seconds or [],
    )


FAILED, LOST = STATUSES.index("failed"), STATUSES.index("lost")
TTFT_P95 = Slo(terms=(Term(metric="ttft", limit_ns=2000 * MS, quantile=0.95),))
CLIENT_RESOURCE = KINDS.index("client_resource")
LATE = np.arange(10) * 10 * MS
BUSY = WorkerSample(t_s=5.0, worker=3, cpu_share=0.91)


@pytest.mark.parametrize(
    ("change", "seconds", "manifest", "reason"),
    [
        ({}, [], {}, None),
        (
            {"sent_ns": (10, LATE + 5 * MS)},
            [],
            {},
            None,
        ),  # p99 of 1,000 is at place 990, the tenth from above
        ({"sent_ns": (9, LATE[:9] + 6 * MS)}, [], {}, None),
        (
            {"sent_ns": (10, LATE + 6 * MS)},
            [],
            {},
            ("sent_late", {"quantile": "p99", "value_ms": 6.0, "limit": 0.05}),
        ),
        (
            {"sent_ns": (10, LATE + 6 * MS)},
            [],
            {"limits": ValidityLimits(send_lag_share=0.06)},
            None,
        ),
        ({"stamp_error_ns": (10, 5 * MS)}, [], {}, None),
        (
            {"stamp_error_ns": (10, 6 * MS)},
            [],
            {},
            ("arrivals_unsure", {"quantile": "p99", "value_ms": 6.0}),
        ),
        ({"client_lag_ns": (500, 90 * MS)}, [], {}, None),  # the verdict uses the stamp error
        (
            {},
            [BUSY],
            {},
            ("generator_busy", {"worker": 3, "cpu_share": 0.91, "at_s": 5.0, "limit": 0.9}),
        ),
        ({}, [msgspec.structs.replace(BUSY, cpu_share=0.9)], {}, None),
        ({}, [msgspec.structs.replace(BUSY, span_s=0.4)], {}, None),  # not a full second
        ({}, [msgspec.structs.replace(BUSY, t_s=12.0)], {}, None),  # after the window
        ({"status": (300, FAILED)}, [], {}, None),  # the server's failures, not the client's
        ({"status": (1000, FAILED)}, [], {}, None),
        ({"status": (10, FAILED), "kind": (10, CLIENT_RESOURCE)}, [], {}, None),
        (
            {"status": (11, FAILED), "kind": (11, CLIENT_RESOURCE)},
            [],
            {},
            ("client_failures", {"failed": 11, "requests": 1000, "limit": 0.01}),
        ),
        ({"status": (11, LOST)}, [], {}, ("client_failures", {"failed": 11, "requests": 1000})),
        (
            {"status": (1, LOST), "kind": (1, KINDS.index("worker_died"))},
            [],
            {},
            ("worker_died", {"worker": 0, "node": None}),
        ),
    ],
)
def test_each_validity_limit_is_exclusive(
    change: dict[str, Any],
    seconds: list[WorkerSample],
    manifest: dict[str, Any],
    reason: tuple[str, dict[str, Any]] | None,
) -> None:
    s = summarize_changed_records(change, seconds, **manifest)
    assert s.verdict.valid is (reason is None), s.verdict.reasons
    assert reason is None or says(s.verdict.codes[:1], reason[0], **reason[1])


@pytest.mark.parametrize(("failed", "code"), [(10, 0), (11, 1), (300, 1), (1000, 1)])
def test_without_an_slo_an_error_rate_above_one_percent_ends_with_exit_code_1(
    failed: int, code: int
) -> None:
    s = summarize_changed_records(
        {"status": (failed, FAILED), "kind": (failed, KINDS.index("http_429"))}
    )
    assert s.verdict.valid
    assert exit_code(s) == code
    assert says(s.verdict.caveat_codes, "failures") is (code == 1)


def test_failures_of_the_server_are_misses_of_the_slo_and_not_an_invalid_run() -> None:
    s = summarize_changed_records({"status": (300, FAILED)}, slo=TTFT_P95)
    assert s.verdict.valid
    assert s.goodput.met is False
    assert exit_code(s) == 1


def test_failures_that_the_slo_allows_leave_it_met() -> None:
    s = summarize_changed_records({"status": (30, FAILED)}, slo=TTFT_P95)
    assert (s.verdict.valid, s.goodput.met, exit_code(s)) == (True, True, 0)
    assert says(s.verdict.caveat_codes, "failures", failed=30, requests=1000)


@pytest.mark.parametrize(
    ("cpu_share", "waited_share", "remedy"),
    [
        (0.7, None, {"remedy": "lower_load"}),
        (0.7, 0.1, {"remedy": "lower_load"}),
        (0.7, 0.11, {"remedy": "other_processes", "worker": 3, "waited_share": 0.11, "at_s": 5.0}),
        (0.4, 0.0, {"remedy": "host", "cpu_share": 0.4}),
        (0.4, 0.5, {"remedy": "other_processes", "worker": 3, "waited_share": 0.5}),
    ],
)
def test_the_remedy_names_the_cause_of_late_sends(
    cpu_share: float, waited_share: float | None, remedy: dict[str, Any]
) -> None:
    second_worker_sample = WorkerSample(
        t_s=5.0, worker=3, cpu_share=cpu_share, waited_share=waited_share
    )
    s = summarize_changed_records(
        {"sent_ns": (10, LATE + 6 * MS)},
        [second_worker_sample, WorkerSample(t_s=7.0, cpu_share=0.1, waited_share=0.0)],
    )
    assert says(s.verdict.codes[:1], "sent_late", **remedy)
    assert s.client.waited_share_max == waited_share


@pytest.mark.parametrize(
    ("write_share", "waited_share", "remedy"),
    [(0.1, 0, "host"), (0.2, 0, "disk"), (0.2, 0.2, "other_processes")],
)
def test_records_that_take_long_to_write_are_the_cause_of_late_sends(
    write_share: float, waited_share: float, remedy: str
) -> None:
    """Unless other processes kept this one waiting: then its writes lasted too."""
    seconds = [
        WorkerSample(t_s=5.0, cpu_share=0.2, waited_share=waited_share, write_share=write_share)
    ]
    (code,) = summarize_changed_records({"sent_ns": (10, LATE + 6 * MS)}, seconds).verdict.codes
    assert code.values["remedy"] == remedy
    assert ("on a faster disk" in reasons.format_reason(code)) is (remedy == "disk")


@pytest.mark.parametrize(
    ("change", "manifest", "warning"),
    [
        (
            {"output_source": (3, SOURCES.index("tokenizer"))},
            {},
            ("usage_missing", {"missing": 3, "ok": 1000}),
        ),
        ({"output_source": (3, SOURCES.index("tokenizer"))}, {"requests_usage": False}, None),
        (
            {"input_source": (7, SOURCES.index("estimate"))},
            {},
            ("counts_estimated", {"estimated": 7, "ok": 1000}),
        ),
        ({"input_tokens": (1000, 102)}, {}, None),
        (
            {"input_tokens": (1000, 103)},
            {},
            ("prompt_counts_differ", {"share": about(0.03), "template_known": True}),
        ),
        ({"input_tokens": (1000, 103)}, {"template_tokens": 3}, None),
        (
            {"input_tokens": (1000, 103)},
            {"template_tokens": None},
            ("prompt_counts_differ", {"template_known": False}),
        ),
        ({"cached_tokens": (1000, 5)}, {}, None),
        ({"cached_tokens": (1000, 6)}, {}, ("cached", {"share": about(0.06)})),
        ({"cached_tokens": (1000, 60)}, {"shares_prompts": True}, None),
        ({"output_tokens": (20, 4)}, {}, None),
        ({"output_tokens": (21, 4)}, {}, ("lengths_differ", {"share": about(0.021)})),
        ({"request": (4, 9)}, {}, ("prompts_repeated", {"requests": 4})),
        (
            {"sent_ns": (1000, 100 * MS + np.arange(1000) // 100 * 1000 * MS)},
            {},
            ("gaps_differ", {}),
        ),
        (
            {},
            {"warnings": ("the server does not check model names",)},
            ("note", {"text": "the server does not check model names"}),
        ),
        (
            {},
            {"limits": ValidityLimits(cpu_share=0.95)},
            ("limit_changed", {"limit": "cpu_share", "value": 0.95, "default": 0.9}),
        ),
        (
            {},
            {"slo": Slo(terms=(Term(metric="ttft", limit_ns=MS, quantile=0.999),))},
            ("slo_samples", {"samples": 1000, "needed": 6636}),
        ),
        (
            {
                "output_tokens": (1000, 10),
                "asked_output": (1000, 10),
                "first_event_tokens": (1000, 2),
            },
            {},
            None,
        ),
    ],
)
def test_each_warning_appears_only_beyond_its_limit(
    change: dict[str, Any], manifest: dict[str, Any], warning: tuple[str, dict[str, Any]] | None
) -> None:
    warnings = summarize_changed_records(change, **manifest).verdict.warning_codes
    assert len(warnings) == (warning is not None), warnings
    assert warning is None or says(warnings, warning[0], **warning[1]), warnings


# -- each family has a guard of its own ------------------------------------------------------------


def stopped_client(
    *, stop_ms: int = 100, every_ms: int = 300, answers: int = 60, tokens: int = 200
) -> Summary:
    """Summarize responses with an ITL of 5 ms, read by a client that is stopped repeatedly.

    The bytes go through the reader of a real run. Data that arrives while the client is stopped is
    read at once afterwards, with the timestamp of the newest packet, as the kernel merges it.
    """
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )

    def chunk(text: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(text), text)

    token = chunk(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
    usage = b'"usage":{"prompt_tokens":9,"completion_tokens":%d}' % tokens
    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}],%s}\n\n' % usage
    timeline = Timeline(0)
    rows = []
    for number in range(answers):
        due = number * 37 * MS
        arrivals = [(due + (100 + 5 * i) * MS, token) for i in range(tokens)]
        arrivals[0] = (arrivals[0][0], head + token)
        arrivals.append((arrivals[-1][0] + 50_000, chunk(end) + b"0\r\n\r\n"))
        reads: dict[int, list[tuple[int, bytes]]] = {}
        for at, data in arrivals:
            phase = at % (every_ms * MS)
            reads.setdefault(at if phase >= stop_ms * MS else at - phase + stop_ms * MS, []).append(
                (at, data)
            )
        completions: list[Completion] = []
        exchange = Exchange(
            None, b"", b"", due, completions.append, timeline.events, is_stream_requested=True
        )
        exchange.ready_at = due
        exchange.sent_at = due
        for read_at, packets in reads.items():
            stood_still = read_at % (every_ms * MS) == stop_ms * MS
            empty_at = read_at - (stop_ms * MS if stood_still else 200_000)
            exchange.feed_reads(
                [(b"".join(data for _, data in packets), packets[-1][0], read_at, empty_at, True)]
            )
        exchange.report_completion()
        place = RecordKey(number, number, 0, 0, 0, -1, 0, -1)
        rows.append(
            record.encode_sent_record(
                place,
                completions[0],
                0,
                text_index=-1,
                request_facts=RequestFacts(9, "tokenizer", tokens),
            )
        )
    assert (
        timeline.count_new_events()
        == sum(timeline.bins)
        == timeline.gaps.count + len(rows)
        == timeline.uncertainties.count
    )
    records = np.frombuffer(b"".join(rows), record.ROW).copy()
    terms = tuple(
        Term(metric=metric, limit_ns=300 * MS, quantile=0.5)
        for metric in ("ttft", "tpot", "itl", "max_gap")
    )
    manifest = RunManifest(
        state="finished", template_tokens=0, slo=Slo(terms=terms), percentiles=(0.5, 0.255)
    )
    return summarize(
        manifest,
        records,
        [timeline.gaps],
        [timeline.bins[: timeline.bin_count]],
        (),
        (),
        [timeline.uncertainties],
    )


def test_gaps_between_tokens_are_withheld_if_the_client_stops_reading() -> None:
    s = stopped_client()

    assert s.verdict.valid, s.verdict.reasons  # TTFT p50 is the newest stamp of a read, or nearly
    assert set(s.withheld_statistics) >= {"itl", "inter_chunk", "max_gap"}
    assert s.event_error_ms.p99 and s.event_error_ms.p99 > 90
    assert s.event_unsure_share == pytest.approx(0.31, abs=0.03)
    assert s.itl_ms is not None
    quantiles = (s.itl_ms.p50, s.itl_ms.p90, s.itl_ms.p95, s.itl_ms.p99, s.itl_ms.p99_9)
    assert set(quantiles) == {None}
    assert s.itl_ms.mean == pytest.approx(5, rel=0.02), "it follows from first and last token"
    assert (s.inter_chunk_ms.p99, s.inter_chunk_ms.count) == (None, 60 * 199)
    assert s.max_gap_ms.p50 is None
    assert s.tpot_ms.p50 == pytest.approx(5, rel=0.02)  # the errors of two stamps of 200 are small
    ttft, tpot, itl, max_gap = s.goodput.slo
    assert [term.met for term in (ttft, tpot, itl)] == [True, True, None]
    assert max_gap.met is True, "its whole range is within the limit"
    assert max_gap.high_ms is not None and max_gap.high_ms < max_gap.limit_ms
    assert (s.goodput.met, s.goodput.undecided) == (None, True)
    assert (exit_code(s), exit_code(s, strict=True)) == (0, 4)
    page = " ".join(text.render(s).split())
    assert " ".join(s.verdict.caveats[0].split()) in page
    assert s.percentiles["itl_ms"] == {}
    assert s.percentiles["ttft_ms"].keys() == {"p50"}
    assert (
        s.percentiles["tpot_ms"]["p50"] == s.tpot_ms.p50 and s.percentiles["tpot_ms"]["p25_5"] > 0
    )
    assert "requested, ms p50 p25.5 samples" in page
    assert "SLO UNDECIDED" in page and "VALID: with a caveat" in page
    reloaded_summary = load_summary(dump_summary(s))
    assert reloaded_summary == s and json.loads(dump_summary(s))["inter_chunk_ms"]["p99"] is None


@pytest.mark.parametrize(
    ("unsure_share", "read_at_once", "url", "remedy"),
    [
        (0.97, True, "http://gpu-1", "holds events back"),
        (0.97, False, "http://gpu-1", "off its core"),
        (0.1, True, "http://gpu-1", "off its core"),
        (0.1, True, "http://localhost:8000", "Client and server share the cores"),
        (0.1, True, "http://127.0.0.1:8000", "Client and server share the cores"),
    ],
)
def test_the_remedy_for_uncertain_times_fits_their_cause(
    unsure_share: float, read_at_once: bool, url: str, remedy: str
) -> None:
    manifest = RunManifest(targets=(TargetFacts(url=url),))
    evidence = timing_evidence.TimingEvidence(
        uncertain_event_share=unsure_share,
        is_read_promptly=read_at_once,
        is_local=timing_evidence.is_local(manifest),
        samples=[WorkerSample(t_s=float(t), cpu_share=0.2, waited_share=0.3) for t in range(1, 9)],
        window=Window(start_s=0.0, end_s=9.0),
    )

    assert remedy in timing_evidence.explain_uncertain_times(evidence)


def test_three_tokens_in_two_events_have_no_itl() -> None:
    short = {"output_tokens": (1000, 3), "output_events": (1000, 2), "asked_output": (1000, 3)}
    assert summarize_changed_records(short).itl_undefined_reason.startswith(
        "events carry 1.50 tokens"
    )
    assert (
        summarize_changed_records({**short, "finish_reason": (1000, STOP)}).itl_undefined_reason
        == ""
    )


def test_one_percent_of_late_reads_withholds_the_tail_of_itl_only() -> None:
    s = stopped_client(stop_ms=11, every_ms=1300)

    assert s.event_unsure_share is not None and 0.002 < s.event_unsure_share < 0.014
    assert s.itl_ms is not None
    assert s.itl_ms.p50 == pytest.approx(5, rel=0.01)
    assert s.itl_ms.mean == pytest.approx(5, rel=0.01)
    assert (s.itl_ms.p99_9, s.itl_ms.max) == (None, None)
    assert s.withheld_statistics["itl"] == s.withheld_statistics["inter_chunk"]
    assert "tpot" not in s.withheld_statistics
    notes = [code for code in s.verdict.caveat_codes if code.code == "withheld"]
    assert len(notes) == 1 and "inter_chunk" not in notes[0].values["statistics"]
    page = " ".join(text.render(s).split())
    assert page.count("too uncertain") == 1


def test_a_client_that_reads_without_delay_reports_the_gaps_between_tokens() -> None:
    s = stopped_client(stop_ms=0)
    assert (s.withheld_metrics, s.withheld_statistics) == ({}, {})
    assert s.verdict.valid and s.itl_ms is not None
    assert s.itl_ms.p99 == pytest.approx(5, rel=0.001) and s.max_gap_ms.max == 5
    assert s.event_error_ms.max == 0 and s.goodput.met is True


def test_a_rare_stop_of_the_client_withholds_the_largest_gap_only() -> None:
    s = stopped_client(stop_ms=20, every_ms=5000, answers=200, tokens=400)
    assert s.itl_ms is not None and s.itl_ms.p99 == pytest.approx(5, rel=0.001)
    assert (s.itl_ms.max, s.max_gap_ms.max) == (None, None)


def test_tpot_is_withheld_by_the_timestamp_uncertainty_of_its_last_token() -> None:
    """Five tokens 10 ms apart: the error of either end moves TPOT by a quarter of it."""
    assert (
        "tpot"
        not in summarize_changed_records(
            {"last_token_error_ns": (1000, 2 * MS)}
        ).withheld_statistics
    )

    errors = {"last_token_error_ns": (1000, 3 * MS), "stamp_error_ns": (1000, MS)}
    s = summarize_changed_records(errors)
    assert s.verdict.valid and {"tpot", "tpot_mlperf"} <= set(s.withheld_statistics)
    assert (s.tpot_ms.p50, s.tpot_mlperf_ms.p50, s.drift.tpot_p50) == (None, None, None)
    assert s.withheld_statistics["tpot"].ranges["p50"] == (9.25, 10.25)
    assert s.itl_ms is not None
    looser = {"limits": ValidityLimits(tpot_error_share=0.08)}
    assert "tpot" not in summarize_changed_records(errors, **looser).withheld_statistics
    unknown = {"last_token_error_ns": (1000, -1), "stamp_error_ns": (1000, MS)}
    assert "tpot" not in summarize_changed_records(unknown).withheld_statistics


@pytest.mark.parametrize(
    ("n", "late", "quantile"),
    [
        (11, 0, ""),
        (30, 1, ""),  # p99 of 30 is the largest of them
        (30, 14, ""),
        (30, 15, "p50"),
        (100, 9, ""),
        (100, 10, "p90"),
        (661, 33, ""),
        (661, 34, "p95"),
        (662, 6, ""),
        (662, 7, "p99"),
    ],
)
def test_lateness_is_judged_by_the_highest_supported_quantile(
    n: int, late: int, quantile: str
) -> None:
    rows = valid_records(n)
    rows["sent_ns"][:late] += 50 * MS
    verdict = summarize(RunManifest(state="finished"), rows).verdict
    assert verdict.valid is not quantile
    assert not quantile or says(verdict.codes[:1], "sent_late", quantile=quantile), verdict.reasons


def test_a_mean_that_one_late_request_may_have_changed_is_withheld() -> None:
    """One of 48 requests was sent and read so late that its TTFT may be the client's."""
    rows = valid_records(48)
    rows["sent_ns"][0] += 500 * MS
    rows["first_token_ns"][0] += 1000 * MS
    rows["last_token_ns"][0] += 1000 * MS
    rows["end_ns"][0] += 1000 * MS
    rows["stamp_error_ns"][0] = 500 * MS
    s = summarize(RunManifest(state="finished"), rows)

    assert s.verdict.valid
    assert s.ttft_ms.p50 == pytest.approx(100, rel=0.05)
    assert (s.ttft_ms.mean, s.ttft_ms.max) == (None, None)
    low, high = s.withheld_statistics["ttft"].ranges["mean"]
    assert (low, high) == (pytest.approx(100, rel=0.05), pytest.approx(120, rel=0.05))
    assert says(s.verdict.caveat_codes, "withheld")


@pytest.mark.parametrize(("late", "is_shown"), [(4, True), (7, False)])
def test_a_median_is_withheld_if_late_sends_may_have_changed_it(late: int, is_shown: bool) -> None:
    """32 requests with a TTFT from 84 to 115 ms, some of which were sent 45 ms late."""
    rows = valid_records(32)
    rows["first_token_ns"] = rows["due_ns"] + np.arange(84, 116) * MS
    rows["sent_ns"][:late] += 45 * MS
    rows["first_token_ns"][:late] += 45 * MS
    s = summarize(RunManifest(state="finished"), rows)
    assert (s.ttft_ms.p50 is not None) is is_shown


def test_every_metric_that_can_be_withheld_is_removed_from_the_summary() -> None:
    """Each field is named in `without_withheld_values`, so a new one could be forgotten there."""
    definitions = [definition for definition in METRICS.builtin_rows if definition.guards]
    withheld_metrics = {definition.name: "a reason" for definition in definitions}
    for example in EXAMPLES.values():
        summary = msgspec.structs.replace(summarize(*example()), withheld_metrics=withheld_metrics)
        reported = withholding.without_withheld_values(summary)
        for definition in definitions:
            distribution = (
                reported.other_metrics.get(definition.field)
                if definition.block
                else getattr(reported, definition.field)
            )
            assert distribution is None or distribution.mean is None, definition.name


def test_withholding_ttft_does_not_make_a_late_client_valid() -> None:
    rows = valid_records(100)
    rows["sent_ns"] += 50 * MS
    s = summarize(RunManifest(state="finished"), rows)
    assert s.ttft_ms.p50 is None
    assert says(s.verdict.codes, "sent_late", basis="TTFT p50")


@pytest.mark.parametrize(
    ("first_event", "limit_ms", "is_met"),
    [(0, 11, True), (0, 9, None), (0, 7, False), (5, 11, True), (5, 9, False), (1, 9, True)],
)
def test_an_slo_within_the_range_of_tpot_is_undecided_and_outside_it_decided(
    first_event: int, limit_ms: int, is_met: bool | None
) -> None:
    """25 tokens in 21 events over 200 ms: 8.3 ms if the first event has one, 10 ms if five."""
    rows = valid_records(700)
    rows["output_tokens"] = rows["asked_output"] = 25
    rows["output_events"] = 21
    rows["first_event_tokens"] = first_event
    rows["last_token_ns"] = rows["end_ns"] = rows["first_token_ns"] + 200 * MS
    slo = Slo(terms=(Term(metric="tpot", limit_ns=limit_ms * MS, quantile=0.5),))
    s = summarize(RunManifest(state="finished", slo=slo), rows)
    (term,) = s.goodput.slo

    assert (s.verdict.valid, term.met) == (True, is_met)
    assert (s.tpot_ms.p50 is None) is (first_event == 0)
    if first_event == 0:
        assert (term.low_ms, term.high_ms) == (pytest.approx(8.33, abs=0.01), 10)
        assert s.withheld_statistics["tpot"].ranges["p50"] == (term.low_ms, term.high_ms)


def test_tpot_is_reported_for_events_with_many_tokens() -> None:
    """500 tokens in 125 events: the first one has at most a few times as many as the others."""
    rows = valid_records(700)
    rows["output_tokens"] = rows["asked_output"] = 500
    rows["output_events"] = 125
    rows["first_event_tokens"] = 0
    rows["last_token_ns"] = rows["end_ns"] = rows["first_token_ns"] + 4990 * MS
    s = summarize(RunManifest(state="finished"), rows)
    assert s.tpot_ms.p50 == 10


def test_a_token_without_text_does_not_make_tpot_uncertain() -> None:
    rows = valid_records(700)
    rows["output_tokens"] = rows["asked_output"] = 16
    rows["output_events"] = 15
    rows["first_event_tokens"] = 0
    rows["finish_reason"] = STOP
    s = summarize(RunManifest(state="finished"), rows)
    assert s.tpot_ms.p50 is not None


def test_ten_requests_support_no_quantile() -> None:
    verdict = summarize(RunManifest(state="finished"), valid_records(10)).verdict
    assert not verdict.valid and says(verdict.codes, "too_few", requests=10)


def test_a_term_is_undecided_if_no_response_has_a_value_of_its_metric() -> None:
    rows = valid_records(30)
    rows["output_tokens"] = rows["output_events"] = rows["asked_output"] = 1
    rows["last_token_ns"] = rows["first_token_ns"]
    slo = Slo(
        terms=(
            Term(metric="tpot", limit_ns=MS),
            Term(metric="itl", limit_ns=MS),
            Term(metric="ttft", limit_ns=MS),
        )
    )
    s = summarize(RunManifest(state="finished", slo=slo), rows)

    assert [term.met for term in s.goodput.slo] == [None, None, False]
    assert s.goodput.slo[0].undecided.startswith("no response had two tokens")
    assert s.goodput.met is False, "a missed term decides"
    s = summarize(RunManifest(state="finished", slo=Slo(terms=slo.terms[:1])), rows)
    assert s.goodput.undecided and exit_code(s) == 0 and exit_code(s, strict=True) == 4
    assert "MISSED" not in text.render(s)
    rows["status"] = FAILED
    assert summarize(RunManifest(slo=Slo(terms=slo.terms[:1])), rows).goodput.met is False, (
        "failed requests are over"
    )


def test_a_run_needs_requests_for_all_virtual_users_of_its_largest_stage() -> None:
    stages = (StagePlan(name="small", concurrency=2), StagePlan(name="large", concurrency=50))
    rows = valid_records(20)
    rows["stage"][10:] = 1
    verdict = summarize(RunManifest(state="finished", stages=stages), rows).verdict
    assert says(verdict.caveat_codes, "lanes_unfilled", requests=20, lanes=50)


def test_responses_in_one_event_leave_terms_other_than_tpot_decided() -> None:
    rows = valid_records(1000)
    rows["last_token_ns"][:200] = rows["first_token_ns"][:200]
    terms = (Term(metric="tpot", limit_ns=20 * MS), Term(metric="ttft", limit_ns=200 * MS))
    summary = summarize(RunManifest(state="finished", slo=Slo(terms=terms)), rows)
    assert [term.met for term in summary.goodput.slo] == [None, True]


def test_responses_shorter_than_requested_are_a_caveat() -> None:
    s = summarize_changed_records({"asked_output": (1000, 50)})
    assert s.verdict.valid
    assert says(s.verdict.caveat_codes, "shortened", got=5_000, asked=50_000, share=0.1)
    assert "VALID: with a caveat" in text.render(s) and s.verdict.warnings == ()
    assert summarize_changed_records({"asked_output": (20, 6)}).verdict.caveats == ()


def test_itl_is_reported_only_if_each_event_carries_one_token() -> None:
    assert summarize_changed_records().itl_ms == summarize_changed_records().inter_chunk_ms
    assert (
        summarize_changed_records(
            {"output_tokens": (1000, 6), "asked_output": (1000, 6), "finish_reason": (1000, STOP)}
        ).itl_ms
        is not None
    )  # the end token has no text
    one_event_per_two_tokens = summarize_changed_records({"output_tokens": (1000, 10)})

    assert one_event_per_two_tokens.itl_undefined_reason.startswith("events carry 2.00 tokens")
    assert (
        "tokens were not counted"
        in summarize_changed_records(
            {"output_source": (1000, SOURCES.index("events"))}
        ).itl_undefined_reason
    )


def test_the_steady_output_rate_counts_tokens_in_the_timeline() -> None:
    rows = valid_records()
    timeline = np.zeros(1100, np.int64)
    timeline[:1000] = 7  # events per 10 ms; two tokens each
    rows["output_tokens"] = rows["asked_output"] = 10
    s = summarize(RunManifest(), rows, [], [timeline])
    assert s.tokens.steady_output_per_s == pytest.approx(7 * 2 * 100)


@pytest.mark.parametrize(
    ("interrupted", "valid", "is_met", "code"),
    [
        (True, False, False, 130),
        (False, False, False, 3),
        (False, True, False, 1),
        (False, True, True, 0),
        (False, True, None, 0),
    ],
)
def test_exit_codes_follow_their_precedence(
    interrupted: bool, valid: bool, is_met: bool | None, code: int
) -> None:
    summary = handmade_summary()
    changed_summary = msgspec.structs.replace(
        summary,
        run=msgspec.structs.replace(
            summary.run, state="interrupted" if interrupted else "finished"
        ),
        verdict=msgspec.structs.replace(summary.verdict, valid=valid),
        goodput=msgspec.structs.replace(summary.goodput, met=is_met),
    )

    assert exit_code(changed_summary) == code


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_stored_examples_equal_the_output_of_their_script(name: str) -> None:
    data = (DATA / name).read_bytes()
    stored = load_summary(data)
    summary_json = dump_summary(summarize(*EXAMPLES[name]()))
    assert list(differences(json.loads(summary_json), json.loads(data))) == []
    assert dump_summary(stored) == data
    assert exit_code(stored) == (0 if stored.verdict.valid else 3)


def test_a_manifest_is_read_as_written_and_unknown_fields_are_ignored() -> None:
    assert decode_manifest(encode_manifest(MANIFEST)) == MANIFEST
    assert decode_manifest(b'{"schema": 1, "run": "x", "unknown": [1]}') == RunManifest(run="x")
    assert [
        second_worker_sample.t_s
        for second_worker_sample in decode_worker_samples(b'{"t_s": 1.0}\n{"t_s": 2.0}\n{"t_s": 3')
    ] == [
        1,
        2,
    ]


@pytest.mark.parametrize("read", [load_summary, decode_manifest])
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "wrong_format"),
        (b"[]", "wrong_format"),
        (b'{"schema": "1"}', "wrong_format"),
        (b"\xff\xfe", "wrong_format"),
        (b'{"schema": 99}', "newer_version"),
        (b'{"schema": 0}', "damaged_file"),
        (b'{"schema": 1, "run": 7}', "damaged_file"),
    ],
)
def test_a_damaged_file_of_a_run_is_reported_with_its_path_and_a_hint(
    read: Any, data: bytes, code: str
) -> None:
    with refused(UserError, code) as exc_info:
        read(data, "some/file.json")
    assert exc_info.value.where == "some/file.json"
    assert exc_info.value.hint


def test_the_error_about_a_truncated_summary_has_the_command_to_regenerate_it() -> None:
    """It said "give the folder that a run has written", of such a folder."""
    with refused(UserError, "wrong_format") as exc_info:
        load_summary(b'{"schema": 1, "ru')
    assert (
        exc_info.value.message.startswith("not a summary of a run")
        and "loadgen report" in exc_info.value.hint
    )


# -- the document ----------------------------------------------------------------------------------


def structs_within(kind: Any) -> "itertools.chain[Any]":
    """Every Struct that a type is made of, itself first."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        inner = [structs_within(hint) for hint in typing.get_type_hints(kind).values()]
        return itertools.chain([kind], *inner)
    if typing.get_origin(kind) in (types.UnionType, typing.Union, tuple, dict):
        return itertools.chain(*(structs_within(part) for part in typing.get_args(kind)))
    return itertools.chain()


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a pattern stands for: `{start,end}_s` gives two."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def test_exactly_the_fields_of_a_summary_are_documented() -> None:
    text = (repository_paths.ROOT / "docs/reference/summary.md").read_text()
    sections = {
        part.split("\n", 1)[0].strip(): part for part in re.split(r"^##+ ", text, flags=re.M)[1:]
    }
    del sections["Metric definitions"]  # made from their rows
    del sections["Reason codes"]
    heads = {
        name: re.findall(r"^- ((?:`[\w{},]+`(?:, )?)+)", part, flags=re.M)
        for name, part in sections.items()
    }
    names = {name: re.findall(r"`([^`]+)`", " ".join(head)) for name, head in heads.items()}
    documented = {
        name: sorted(itertools.chain(*map(expand_braces, terms)))
        for name, terms in names.items()
        if terms
    }
    namespace = {
        kind.__name__: sorted(kind.__struct_encode_fields__) for kind in structs_within(Summary)
    }

    assert documented == namespace


def test_every_code_has_a_sentence_and_is_documented() -> None:
    text = (repository_paths.ROOT / "docs/reference/summary.md").read_text()
    section = text.partition("## Reason codes")[2].partition("\n## ")[0]
    listed = set(re.findall(r"(?m)^- `(\w+)`:", section))
    only_words = {
        "counts_contradict",
        "output_unseen",
        "no_kernel_times",
        "times_uncertain",
        "first_event_uncertain",
    }  # in `withheld_metrics` of a summary

    assert listed == set(reasons.SENTENCES) - only_words

    modules = (timing_evidence, validity, validity_warnings, withholding)
    source = "".join(Path(module.__file__).read_text() for module in modules)
    raised = re.findall(r'(?:_code\(|code=)\s*"(\w+)"', source)

    assert set(raised) <= set(reasons.SENTENCES)


def test_a_reason_whose_values_do_not_fit_its_sentence_is_printed_as_its_code() -> None:
    """Of a damaged run.json: it was "a bug in loadgen"."""
    assert reasons.format_reason(ReasonCode(code="failures", values={})) == "failures"
    assert (
        reasons.format_reason(
            ReasonCode(code="failures", values={"failed": "many", "requests": []})
        )
        == "failures"
    )


def test_goodput_is_part_of_the_throughput_of_the_same_window() -> None:
    """A reader compares the two printed rates, so both count completed requests."""
    for example in EXAMPLES.values():
        summary = summarize(*example())
        headline_rates = select_headline_rates(summary)
        assert headline_rates.goodput is not None and headline_rates.requests is not None
        assert headline_rates.steady and 0 < headline_rates.goodput <= headline_rates.requests
        assert (
            headline_rates.requests
            == summary.load.steady_completed_rps
            != summary.load.completed_rps
        )
        printed = f"goodput {format.quantity(headline_rates.goodput)} req/s"
        for output in (text.render(summary), run_page.render(summary)):
            # The goodput of an INVALID run is not judged.
            assert (printed in output) is summary.verdict.valid


@pytest.mark.commands
def test_a_single_request_has_no_completed_rate(tmp_path: Path) -> None:
    run = loadgen.run(
        "qa",
        url="sim:gb300-vm",
        request_rate=0.01,
        num_requests=1,
        warmup=0,
        seed=1,
        out=tmp_path / "run",
    )
    summary = run.summary

    assert summary.requests.ok == 1
    assert summary.load.completed_rps is None and summary.load.steady_completed_rps is None


def test_an_slo_that_rests_on_too_few_samples_is_inconclusive_under_strict() -> None:
    """p99 needs 662 samples: 300 good ones pass without --strict, and decide nothing with it."""
    slo = Slo(terms=(Term(metric="ttft", limit_ns=60_000 * MS, quantile=0.99),))
    few_summary = summarize(RunManifest(slo=slo, state="finished"), rows(1, 300))
    enough = summarize(RunManifest(slo=slo, state="finished"), rows(1, 700))

    assert (
        few_summary.verdict.valid
        and few_summary.goodput.met
        and not few_summary.goodput.slo[0].supported
    )
    assert (exit_code(few_summary), exit_code(few_summary, strict=True)) == (0, 4)
    assert (exit_code(enough), exit_code(enough, strict=True)) == (0, 0)

    slow = Slo(terms=(Term(metric="ttft", limit_ns=1, quantile=0.99),))
    missed = summarize(RunManifest(slo=slow, state="finished"), rows(1, 300))
    assert exit_code(missed, strict=True) == 1, "a miss decides"


def test_the_most_severe_exit_code_wins_over_a_larger_one() -> None:
    assert codes.most_severe([]) == 0
    assert codes.most_severe([0, 4, 1]) == 1
    assert codes.most_severe([4, 3, 1]) == 3
    assert codes.most_severe([4, 0]) == 4
    assert codes.most_severe([3, 130]) == 130


def test_the_steady_input_rate_counts_a_prompt_read_at_the_start_of_the_window() -> None:
    rows = valid_records(20)
    due_ns = rows["due_ns"].copy()
    rows["first_token_ns"] = rows["last_token_ns"] = rows["end_ns"] = due_ns
    s = summarize(RunManifest(state="finished"), rows)
    steady = s.window.steady

    assert steady.start_s == due_ns.min() / 1e9
    assert s.tokens.steady_input_per_s is not None and steady.duration_s is not None
    counted = s.tokens.steady_input_per_s * steady.duration_s
    assert counted == pytest.approx(rows["input_tokens"].sum())


@pytest.mark.parametrize(
    ("counted", "manifest", "caveat"),
    [
        (253, {"random_words": True}, "prompt_lengths"),
        (104, {"random_words": True}, None),
        (253, {"random_words": True, "template_tokens": None}, None),
        (253, {"prompt_lengths_requested": True}, "prompt_lengths"),
        (40, {"prompt_lengths_requested": True}, "prompt_lengths"),
        (253, {}, None),
    ],
    ids=[
        "153 % too long",
        "4 % too long",
        "the template is not known",
        "153 % too long, natural text",
        "60 % too short, natural text",
        "prompts of the user",
    ],
)
def test_generated_prompts_of_another_length_are_a_caveat(
    counted: int, manifest: dict[str, Any], caveat: str | None
) -> None:
    s = summarize_changed_records({"input_tokens": (1000, counted)}, **manifest)
    assert s.verdict.valid
    expected = [] if caveat is None else [caveat]
    assert [code.code for code in s.verdict.caveat_codes] == expected
    assert says(s.verdict.warning_codes, "prompt_counts_differ") is (caveat is None)
