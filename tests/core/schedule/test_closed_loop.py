"""Closed loops in virtual time: how virtual users start and hand over, and the metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import repository_paths
from command_line import exits
from make_examples import blank, seen
from numpy.typing import NDArray
from run_fixtures import says
from schedule_workloads import MS, S, closed, constant, poisson, workload
from test_dispatcher import Run, drive

from loadgen.core.execution import staggered_start
from loadgen.core.metrics import columns as metrics
from loadgen.core.metrics.load import count_in_flight as flying
from loadgen.core.metrics.summary import Summary, load_summary
from loadgen.core.results import store
from loadgen.core.results.manifest import RunManifest, StagePlan
from loadgen.core.results.record import SOURCES
from loadgen.core.run_summary import summarize
from loadgen.core.schedule.build import build_schedule
from loadgen.core.schedule.dispatcher import Dispatcher
from loadgen.core.schedule.schedule import Schedule
from loadgen.core.schedule.sessions import NOT_APPLICABLE
from loadgen.core.workload import Closed, FixedTokens, Poisson, Stage, Synthetic, Workload
from loadgen.repeated import capacity

TTFT_NS, ITL_NS, TOKENS = 600 * MS, 20 * MS, 32
TAKES_NS = TTFT_NS + (TOKENS - 1) * ITL_NS  # 1.22 s


def warm(stage: Stage) -> Stage:
    return stage.model_copy(update={"measured": False})


def answered(schedule: Schedule, run: Run) -> tuple[RunManifest, NDArray[np.void]]:
    """Return the records of a server with a TTFT of TTFT_NS and an ITL of ITL_NS."""
    starts = sorted(run.sent, key=lambda start: start.slot_id)
    rows = blank(len(starts))
    rows["slot"] = [start.slot_id for start in starts]
    for name in ("stage", "virtual_user", "turn", "session"):
        values = [getattr(start, name) for start in starts]
        rows[name] = [NOT_APPLICABLE if value is None else value for value in values]
    rows["request"] = rows["slot"]
    due = np.array([start.due_ns for start in starts])
    for name in ("due_ns", "ready_ns", "sent_ns"):
        rows[name] = due
    for name in ("first_byte_ns", "first_event_ns", "first_token_ns", "first_answer_ns"):
        rows[name] = due + TTFT_NS
    for name in ("last_token_ns", "end_ns", "done_ns"):
        rows[name] = due + TAKES_NS
    rows["output_tokens"] = rows["output_events"] = rows["asked_output"] = TOKENS
    rows["first_event_tokens"], rows["max_gap_ns"] = 1, ITL_NS
    rows["input_tokens"] = rows["built_tokens"] = 10
    rows["input_source"] = rows["output_source"] = SOURCES.index("server")
    stages = tuple(
        StagePlan(
            name=str(span.index),
            closed=bool(span.concurrency),
            measured=span.measured,
            concurrency=span.concurrency or None,
            slots=span.session_count,
            first_slot=span.first_session,
        )
        for span in schedule.stages
    )
    return RunManifest(state="finished", stages=stages), rows


def summary_of(*stages: Stage, seed: int = 1) -> Summary:
    """Return the summary of a run of these stages."""
    schedule = build_schedule(workload(*stages), seed)
    run = drive(Dispatcher(schedule), lambda _start: (TAKES_NS, True))
    manifest, rows = answered(schedule, run)
    gaps, timeline = seen(rows, len(manifest.stages))
    return summarize(manifest, rows, gaps, timeline)


# -- a warm-up before a closed loop ----------------------------------------------------------------


def test_a_warm_up_does_not_add_to_the_rate() -> None:
    """Four users with responses of 1.22 s complete 4 / 1.22 s, not the 4.07/s once printed."""
    summary = summary_of(warm(closed(4, duration_ns=2 * S)), closed(4, count=20))
    true_rate = 4 / (TAKES_NS / S)
    assert summary.load.in_flight_max == 4
    assert summary.load.steady_completed_rps == pytest.approx(true_rate, rel=0.002)
    assert summary.tokens.steady_output_per_s == pytest.approx(true_rate * TOKENS, rel=0.01)
    assert summary.requests.scheduled == 20 and summary.warmup.scheduled == 8
    assert summary.stages[1].load.steady_completed_rps == summary.load.steady_completed_rps


@pytest.mark.parametrize("count", [12, 20, 21, 40])
@pytest.mark.parametrize("ramp_ns", [0, TAKES_NS, 3 * TAKES_NS])
def test_the_rate_does_not_depend_on_how_virtual_users_start(count: int, ramp_ns: int) -> None:
    true_rate = 4 / (TAKES_NS / S)
    for stages in (
        [closed(4, ramp_ns, count=count)],
        [warm(closed(4, ramp_ns, duration_ns=4 * S)), closed(4, count=count)],
    ):
        summary = summary_of(*stages)
        window_s = summary.window.steady.duration_s
        if window_s is not None and window_s > 2:
            edge = 1 / (window_s * true_rate)  # one request more or less at an edge
            assert summary.load.steady_completed_rps == pytest.approx(true_rate, rel=edge + 1e-6)
            per_token = (summary.tokens.steady_output_per_s or 0) / TOKENS
            assert per_token == pytest.approx(summary.load.steady_completed_rps, rel=4 * edge)
        assert (summary.load.in_flight_max or 0) <= 4


def test_a_stage_counts_no_request_of_another_stage() -> None:
    summary = summary_of(
        closed(8, duration_ns=10 * S), closed(4, duration_ns=20 * S), closed(6, duration_ns=20 * S)
    )
    for stage, users in zip(summary.stages, (8, 4, 6), strict=True):
        assert stage.load.steady_completed_rps == pytest.approx(users / (TAKES_NS / S), rel=0.08)
        assert stage.tokens.steady_output_per_s == pytest.approx(
            users * TOKENS / (TAKES_NS / S), rel=0.08
        )


def test_an_open_loop_completes_no_more_than_it_offers() -> None:
    """A warm-up that is far denser than the measured load does not show in what that completed."""
    dense = warm(constant(40.0, duration_ns=3 * S))
    summary = summary_of(dense, poisson(6.0, duration_ns=60 * S))
    load = summary.load

    assert summary.window.steady.start_s == pytest.approx(3 + TAKES_NS / S, abs=0.05)
    assert load.offered_rps is not None and load.steady_completed_rps is not None
    assert load.steady_completed_rps == pytest.approx(load.offered_rps, rel=0.03)
    assert summary.tokens.steady_output_per_s == pytest.approx(
        load.steady_completed_rps * TOKENS, rel=0.02
    )


def test_a_load_without_steady_state_has_a_warning_and_no_steady_metrics() -> None:
    summary = summary_of(warm(constant(40.0, duration_ns=3 * S)), constant(10.0, count=10))
    assert summary.window.steady.duration_s is None and summary.load.steady_completed_rps is None
    assert says(summary.verdict.warning_codes, "never_steady")


# -- how users begin -------------------------------------------------------------------------------


class FixedLengthPrompts:
    """Prompts of which all have one length, for the forecast of a response time."""

    def request_ids(self, count: int) -> range:
        return range(count)

    def requested_input_tokens(self, _number: int) -> int:
        return 100

    def requested_output_tokens(self, _number: int) -> int:
        return TOKENS


ANSWER = staggered_start.estimate_from_probe(600.0, 20.0)  # 600 ms + 32 * 20 ms = 1.24 s


def begun(
    *stages: Stage, leave_out: bool = False
) -> list[tuple[str, bool, int | None, int | None, int | None, str]]:
    requests = Synthetic(
        input_tokens=FixedTokens(value=100), output_tokens=FixedTokens(value=TOKENS)
    )
    requested_workload, begins = staggered_start.decide_starts(
        Workload(name="x", requests=requests, stages=stages),
        FixedLengthPrompts(),
        ANSWER,
        leave_out_first_round=leave_out,
    )
    return [
        (stage.name, stage.measured, stage.duration_ns, stage.count, begin.ramp_ns, begin.source)
        for stage, begin in zip(requested_workload.stages, begins, strict=True)
    ]


def auto(users: int, **stop: Any) -> Stage:
    return Stage(name="load", arrival=Closed(concurrency=users), **stop)


E_NS = 1240 * MS
FIRST = staggered_start.FIRST_ROUND


def test_virtual_users_start_over_one_response_time_with_unmeasured_first_requests() -> None:
    assert begun(auto(4, count=20)) == [("load", True, None, 20, E_NS, "probe")], (
        "all requests of -n count"
    )
    by_time = begun(auto(4, duration_ns=60 * S))

    assert by_time == [
        (FIRST, False, E_NS, None, E_NS, "probe"),
        ("load", True, 60 * S, None, 0, "stage"),
    ]
    level = begun(auto(4, count=20), leave_out=True)
    assert level == [
        (FIRST, False, E_NS, None, E_NS, "probe"),
        ("load", True, None, 20, 0, "stage"),
    ]
    level = begun(auto(4, duration_ns=60 * S), leave_out=True)
    assert level[1] == ("load", True, 60 * S + E_NS, None, 0, "stage"), (
        "long enough for the first round to end"
    )


def test_the_requested_stagger_of_virtual_users_is_used() -> None:
    herd = Stage(name="load", arrival=Closed(concurrency=4, ramp_ns=0), duration_ns=60 * S)

    assert begun(herd) == [
        (FIRST, False, MS, None, 0, "asked"),
        ("load", True, 60 * S, None, 0, "stage"),
    ]
    slow = Stage(name="load", arrival=Closed(concurrency=4, ramp_ns=9 * S), count=20)
    assert begun(slow) == [("load", True, None, 20, 9 * S, "asked")]
    op = Stage(name="load", arrival=Poisson(rate=1.0), duration_ns=S)
    assert begun(op) == [("load", True, S, None, None, "")]


def test_the_warm_up_starts_the_virtual_users_of_the_next_stage() -> None:
    before = Stage(
        name="warm-up", arrival=Closed(concurrency=4), duration_ns=10 * S, measured=False
    )

    assert begun(before, auto(4, duration_ns=60 * S)) == [
        ("warm-up", False, 10 * S, None, E_NS, "probe"),
        ("load", True, 60 * S, None, 0, "stage"),
    ]
    short = before.model_copy(update={"duration_ns": S})
    assert begun(short, auto(4, duration_ns=60 * S))[0] == (FIRST, False, E_NS, None, E_NS, "probe")
    more = begun(before, auto(4, duration_ns=60 * S), auto(8, duration_ns=60 * S))
    assert [name for name, *_ in more] == ["warm-up", "load", FIRST, "load"], (
        "users that are new have a first round too"
    )


def test_the_text_describes_how_virtual_users_start() -> None:
    measured_by_probe = staggered_start.describe_start(1.24, "probe", 4)

    assert measured_by_probe.startswith("starts staggered over 1.24 s")
    assert "preflight request" in measured_by_probe
    assert staggered_start.describe_start(0.0, "asked", 4) == "all start at once"
    assert staggered_start.describe_start(30.0, "asked", 4) == "starts staggered over 30 s"
    assert (
        staggered_start.describe_start(0.0, "stage", 4)
        == staggered_start.describe_start(None, "", None)
        == staggered_start.describe_start(9.0, "probe", 1)
        == ""
    )


# -- the commands ----------------------------------------------------------------------------------


VM = ("--url", "sim:gb300-vm", "--gpus", "4", "--seed", "1")


def test_a_run_reports_and_stores_how_its_virtual_users_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("run", "rag", *VM, "-c", "8", "--output-tokens", "64", "--warmup", "0")

    assert exits(*common, "-n", "64", "-o", str(tmp_path / "n")) == 0
    captured = capsys.readouterr()
    assert "starts staggered over" in captured.err and "computed from the preset" in captured.err
    stages = json.loads((tmp_path / "n" / "run.json").read_bytes())["stages"]
    assert [stage["ramp_from"] for stage in stages] == ["preset"] and stages[0]["ramp_s"] > 0.5
    assert exits(*common, "-d", "20s", "-o", str(tmp_path / "d")) == 0
    assert "starts staggered over" in capsys.readouterr().err
    assert exits(*common, "-n", "64", "--stagger", "0", "-o", str(tmp_path / "herd")) == 0
    assert "all start at once" in capsys.readouterr().err

    for name in ("n", "d", "herd"):
        rows = store.read_run(tmp_path / name).rows
        changes = sorted([(at, 1) for at in rows["sent_ns"]] + [(at, -1) for at in rows["done_ns"]])
        assert max(np.cumsum([change for _, change in changes])) == 8
    first_records = store.read_run(tmp_path / "d").rows

    assert (first_records["stage"] == 0).sum() >= 8

    lanes_first = {
        int(row["virtual_user"]): int(row["stage"])
        for row in np.sort(first_records, order="due_ns")[::-1]
    }

    assert set(lanes_first.values()) == {0}, "the first request of every user is not measured"


def test_a_closed_and_an_open_loop_of_one_server_agree_by_littles_law(tmp_path: Path) -> None:
    """By Little's law either loop gives the load of the other: N = rate x latency."""

    def measure_load(name: str, *load: str) -> tuple[float, float, float]:
        assert (
            exits(
                "run",
                "rag",
                *VM,
                "--osl",
                "128",
                "--progress",
                "off",
                *load,
                "-o",
                str(tmp_path / name),
            )
            == 0
        )
        run = store.read_run(tmp_path / name)
        summary = load_summary((tmp_path / name / "summary.json").read_bytes())
        everything = [metrics.Columns(run.rows)]
        in_flight, _ = flying(everything, summary.window.steady)
        return (
            in_flight or 0,
            summary.load.steady_completed_rps or 0,
            (summary.e2e_ms.mean or 0) / 1e3,
        )

    in_flight, rate, takes_s = measure_load("closed", "-c", "64", "-n", "960")
    assert in_flight == pytest.approx(64, rel=0.03)
    assert rate * takes_s == pytest.approx(64, rel=0.02)
    in_flight, open_rate, open_takes_s = measure_load(
        "open", "--request-rate", f"{rate}", "-d", "60s", "--warmup", "10s"
    )
    assert open_rate == pytest.approx(rate, rel=0.05)
    assert open_rate * open_takes_s == pytest.approx(in_flight, rel=0.03)
    assert in_flight == pytest.approx(64, rel=0.1), (
        "Poisson arrivals at that rate hold as many in flight"
    )


@pytest.mark.commands
def test_a_sweep_states_the_capacity_of_a_search_or_a_lower_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "rag.yaml"  # the packaged profile with shorter answers
    profile = (repository_paths.ROOT / "workloads" / "rag.yaml").read_text()
    short.write_text(re.sub(r"output_tokens: *\d+", "output_tokens: 128", profile))
    common = (str(short), *VM, "--slo", "ttft:2s:p95", "--slo", "tpot:40ms:p95")
    search = ("search", *common, "-d", "25s", "--low", "20", "--high", "400", "--precision", "0.1")

    assert exits(*search, "-o", str(tmp_path / "search")) == 0

    search_capacity = capacity.load_capacity(
        (tmp_path / "search" / capacity.CAPACITY_FILE).read_bytes()
    )
    evidence = load_summary(
        (tmp_path / "search" / search_capacity.evidence / "summary.json").read_bytes()
    )
    users = round(
        search_capacity.rate_per_s * (evidence.e2e_ms.mean or 0) / 1e3
    )  # in flight at that rate
    levels = f"{users // 2},{round(users * 0.9)},{users * 3}"

    assert (
        exits("sweep", *common, "-c", levels, "-n", str(users * 6), "-o", str(tmp_path / "sweep"))
        == 0
    )

    stdout = capsys.readouterr().out
    swept = capacity.load_capacity((tmp_path / "sweep" / capacity.CAPACITY_FILE).read_bytes())
    assert swept.rate_per_s == pytest.approx(search_capacity.rate_per_s, rel=0.15), (
        "at nine tenths of the users"
    )
    assert swept.lower_bound and "the limit lies between" in swept.lower_bound_reason
    assert swept.lower_bound_reason in " ".join(stdout.split())


def test_virtual_users_that_start_at_once_give_a_lower_bound_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "s")
    common = (
        "sweep",
        "rag",
        *VM,
        "--output-tokens",
        "32",
        "--slo",
        "ttft:2s:p95",
        "--progress",
        "plain",
        "--warmup",
        "0",
    )

    assert exits(*common, "-c", "8,32", "-n", "200", "--stagger", "0", "-o", out) == 0

    capsys.readouterr()
    swept = capacity.load_capacity((tmp_path / "s" / capacity.CAPACITY_FILE).read_bytes())
    assert swept.lower_bound and "started at once" in swept.lower_bound_reason
    assert exits("report", out) == 0
    assert "lower bound" in capsys.readouterr().out


def test_without_stagger_every_virtual_user_starts_at_the_start_time(tmp_path: Path) -> None:
    load = ("run", "--url", "sim:gb300-vm", "-c", "4", "-n", "20", "--isl", "50", "--osl", "20")
    first_dues = {}
    for name, options in {"default": (), "at once": ("--stagger", "0")}.items():
        out = tmp_path / name
        assert exits(*load, "--warmup", "0", "--seed", "1", *options, "-o", str(out)) == 0
        first_dues[name] = sorted(store.read_run(out).rows["due_ns"].tolist())[:4]
    assert first_dues["at once"] == [0, 0, 0, 0]
    assert len(set(first_dues["default"])) == 4


@pytest.mark.parametrize(
    "options", [("--request-rate", "4", "--stagger", "2s"), ("-c", "4", "--stagger", "soon")]
)
def test_invalid_stagger_is_an_error(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    assert exits("run", "qa", "--url", "sim:gb300-vm", "-n", "20", *options) == 2
    assert "--stagger" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"), [((), "starts staggered over"), (("--stagger", "0"), "all start at once")]
)
def test_the_full_report_states_how_the_virtual_users_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], text: str
) -> None:
    load = ("run", "--url", "sim:gb300-vm", "-c", "4", "-n", "20", "--isl", "50", "--osl", "20")
    assert exits(*load, "--warmup", "0", *options, "--full", "-o", str(tmp_path / "r")) == 0
    assert text in " ".join(capsys.readouterr().out.split())
