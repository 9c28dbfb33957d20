"""Runs that a rule ends early: when, why, and how the rest of the load is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from run_fixtures import NO_PAGES
from servers import start

from loadgen.core.errors import CombinedError
from loadgen.core.execution.events import RunEvent, Simulated
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.metrics.stop_rules import (
    CHECK_INTERVAL_NS,
    MIN_REQUESTS,
    WINDOW_NS,
    StopRuleMonitor,
    find_breach,
)
from loadgen.core.metrics.summary import exit_code
from loadgen.core.results import store
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.results.record import KIND, ROW, STATUS, STATUSES
from loadgen.core.slo import StopRule
from loadgen.core.workload import load, read_flags
from loadgen.core.workload.fingerprints import recipe_fingerprint
from loadgen.core.workload.slo_fields import parse_stop_rule
from loadgen.sim.server.options import Options

pytestmark = pytest.mark.commands

S = 1_000_000_000
ERRORS, SLOW = parse_stop_rule("errors:20%"), parse_stop_rule("ttft:p50:2s")


def rows(n: int, failed: int = 0, slow: int = 0, at_s: float = 5.0) -> np.ndarray:
    records = np.zeros(n, ROW)
    records["due_ns"], records["sent_ns"] = 0, 0
    records["first_token_ns"] = S
    records["first_token_ns"][n - slow :] = 3 * S
    records["done_ns"] = records["end_ns"] = int(at_s * S)
    records["status"][:failed], records["kind"][:failed] = STATUS["failed"], KIND["http_5xx"]
    return records


@pytest.mark.parametrize(
    ("records", "code"),
    [
        (rows(MIN_REQUESTS - 1, failed=MIN_REQUESTS - 1), None),
        (rows(100, failed=19), None),
        (rows(100, failed=20), "stopped_by_errors"),
        (rows(100, slow=49), None),
        (rows(100, slow=50), "stopped_by_latency"),
        (
            rows(100, failed=15, slow=36),
            "stopped_by_latency",
        ),  # a failed request is over every limit
        (rows(100, failed=100, at_s=30), None),  # too long ago
    ],
)
def test_a_stop_rule_judges_the_requests_that_ended_last(
    records: np.ndarray, code: str | None
) -> None:
    reason = find_breach(
        (ERRORS, SLOW), records, 8 * S if records["done_ns"][0] == 5 * S else 100 * S
    )
    assert (reason and reason.code) == code


def first_breach(
    rules: Sequence[StopRule], records: np.ndarray, step_ns: int
) -> tuple[int, ReasonCode] | None:
    """Return when a monitor that checks every `step_ns` finds a rule broken, and why."""
    monitor = StopRuleMonitor(rules)
    before_ns = -1
    for now_ns in range(step_ns, int(records["done_ns"].max(initial=0)) + 1, step_ns):
        done_ns = records["done_ns"]
        if monitor.check(now_ns, records[(done_ns > before_ns) & (done_ns <= now_ns)]):
            assert monitor.breach is not None
            return now_ns, monitor.breach
        before_ns = now_ns
    return None


def test_the_first_check_that_finds_a_violated_stop_rule_decides() -> None:
    both = np.concatenate(
        [rows(100, at_s=1), rows(60, failed=60, at_s=12.5), rows(60, failed=60, at_s=14.5)]
    )
    breach = first_breach((ERRORS,), both, S)

    assert breach is not None and breach[0] == 13 * S
    assert breach[1].values == {
        "rule": "errors:20%",
        "requests": 60,
        "window_s": 10.0,
        "at_s": 13.0,
        "failed": 60,
    }


RULES = [
    ERRORS,
    SLOW,
    parse_stop_rule("errors:60%"),
    parse_stop_rule("ttft:p90:2.5s"),
    parse_stop_rule("e2e:p50:3s"),
]


@given(
    chosen=st.lists(st.sampled_from(RULES), max_size=3),
    seed=st.integers(0, 1000),
    count=st.integers(0, 400),
    bad=st.floats(0, 0.6),
)
def test_a_monitor_that_reads_each_record_once_agrees_with_all_records(
    chosen: list[StopRule], seed: int, count: int, bad: float
) -> None:
    draw = np.random.default_rng(seed)
    records = rows(count)
    records["done_ns"] = records["end_ns"] = draw.integers(-1, 30, count) * S
    records["first_token_ns"] = draw.integers(-1, 5, count) * S
    records["status"] = np.where(
        draw.random(count) < bad, draw.integers(0, len(STATUSES), count), STATUS["ok"]
    )
    checks = (
        (now_ns, find_breach(chosen, records, now_ns))
        for now_ns in range(S, int(records["done_ns"].max(initial=0)) + 1, S)
    )

    assert first_breach(chosen, records, S) == next(
        ((now_ns, reason) for now_ns, reason in checks if reason), None
    )


def test_a_monitor_stores_only_the_records_of_its_window() -> None:
    monitor = StopRuleMonitor((ERRORS,))
    for second in range(1, 61):
        assert not monitor.check(second * S, rows(100, at_s=second))
    assert len(monitor._recent) == 100 * WINDOW_NS // CHECK_INTERVAL_NS


def test_a_stop_rule_ignores_unsent_requests() -> None:
    records = rows(100)
    records["status"][:60], records["done_ns"][:60] = STATUS["dropped"], -1
    assert find_breach((ERRORS,), records, 8 * S) is None


@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        ("errors", "is not a stop rule"),
        ("errors:2", "must be a percentage"),
        ("errors:120%", "must be at most 100%"),
        ("errors:0%", "stops every run"),
        ("ttft:30s", "is not a stop rule"),
        ("tfft:p50:30s", "is not a stop rule"),
        ("ttft:p50:30", "needs a unit"),
        ("time_to_first_token:p50:30s", ""),
        ("ttft:p100:30s", "must be a percentile"),
    ],
)
def test_an_invalid_stop_rule_is_reported(text: str, expected_text: str) -> None:
    if not expected_text:
        assert load("qa", read_flags(stop_when=[text])).stop_when == (
            parse_stop_rule("ttft:p50:30s"),
        )
        return
    with pytest.raises(CombinedError, match=expected_text):
        load("qa", read_flags(stop_when=[text]))


def test_a_stop_rule_in_a_file_does_not_change_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(
        "name: w\nrequests: {input_tokens: 1, output_tokens: 1}\nstop_when: [errors:20%]\n"
        "stages: [{arrival: {poisson: 1/s}, count: 5}]\n"
    )
    workload = load(str(tmp_path / "w.yaml"))

    assert workload.stop_when == (ERRORS,)
    assert recipe_fingerprint(workload, "server") == recipe_fingerprint(
        workload.model_copy(update={"stop_when": ()}), "server"
    )
    (tmp_path / "w.yaml").write_text((tmp_path / "w.yaml").read_text().replace("20%", "20"))
    with pytest.raises(CombinedError, match=r"w\.yaml:3:13"):
        load(str(tmp_path / "w.yaml"))


def test_a_virtual_run_ends_at_the_instant_of_the_violated_stop_rule(tmp_path: Path) -> None:
    workload = load(
        "qa",
        read_flags(
            request_rate="400", duration="120s", seed="1", stop_when=["ttft:p50:3s"], warmup="0"
        ),
    )
    summary, folder = execute(workload, Settings(url="sim:gb300-vm", out=tmp_path / "out"))
    stored = store.read_run(folder)
    reason = summary.verdict.codes[0]

    assert (summary.run.state, reason.code, exit_code(summary)) == (
        "stopped",
        "stopped_by_latency",
        3,
    )
    assert stored.manifest.stopped_by == reason
    at_ns = round(reason.values["at_s"] * S)
    assert 0 < at_ns < 120 * S
    sent = stored.rows["sent_ns"] >= 0
    assert stored.rows["due_ns"][sent].max() <= at_ns
    assert set(stored.rows["status"][~sent].tolist()) == {STATUS["cancelled"]}

    full_summary, _ = execute(
        workload.model_copy(update={"stop_when": ()}),
        Settings(url="sim:gb300-vm", out=tmp_path / "whole"),
    )

    assert full_summary.run.state == "finished" and full_summary.requests.scheduled == len(
        stored.rows
    )


@pytest.mark.parametrize("profile", ["agentic", "qa"])
def test_simulations_of_turns_and_closed_loops_end_at_the_violated_stop_rule(
    profile: str, tmp_path: Path
) -> None:
    """The simulation runs once, up to the instant at which the records violate the rule."""
    load_of = {"request_rate": "20"} if profile == "agentic" else {"concurrency": "2000"}
    rules = ["ttft:p50:100ms" if profile == "agentic" else "ttft:p50:1ms"]
    workload = load(
        profile, read_flags(**load_of, duration="60s", seed="1", stop_when=rules, warmup="0")
    )
    run_events: list[RunEvent] = []
    summary, folder = execute(
        workload, Settings(url="sim:gb300-vm", out=tmp_path / "out"), [run_events.append]
    )

    assert (summary.run.state, sum(isinstance(event, Simulated) for event in run_events)) == (
        "stopped",
        1,
    )

    _, full_run_dir = execute(
        workload.model_copy(update={"stop_when": ()}),
        Settings(url="sim:gb300-vm", out=tmp_path / "whole"),
    )
    breach = first_breach(workload.stop_when, store.read_run(full_run_dir).rows, S)

    assert breach is not None and store.read_run(folder).manifest.stopped_by == breach[1]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
def test_errors_over_http_end_a_run_with_a_stop_rule_within_seconds(
    tmp_path: Path, workers: int
) -> None:
    with start(Options(ttft="5ms", itl="0.1ms", faults="http_503:0.5", seed=3)) as endpoint:
        flags = read_flags(
            request_rate="60",
            duration="60s",
            num_requests="3000",
            seed="3",
            warmup="0",
            stop_when=["errors:20%"],
        )
        settings = Settings(
            url=endpoint.url, model="sim", server="trtllm", out=tmp_path / "out", **NO_PAGES
        )
        summary, folder = execute(load("qa", flags), structs.replace(settings, workers=workers))

    assert summary.run.state == "stopped"
    assert "stopped_by_errors" in [code.code for code in summary.verdict.codes]
    assert (summary.window.full_run.duration_s or 99) < 10
    assert summary.requests.scheduled == 3000 and summary.requests.cancelled > 2000
    assert store.read_run(folder).manifest.stopped_by is not None
