"""Spikes: how they are written, and how long after one the SLO held again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen.core.errors import Faults
from loadgen.core.metrics import recovery
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.recovery import Recovery
from loadgen.core.results.manifest import Header, StagePlan
from loadgen.core.results.record import ROW
from loadgen.core.slo import Slo, Term
from loadgen.core.workload import Closed, Gamma, Poisson, load
from loadgen.runs import recovery as recovery_words
from loadgen.shell.app import main

S = 1_000_000_000
SLO = Slo(terms=(Term(metric="ttft", limit_ns=S),))
STAGES = (
    StagePlan(name="before", arrival="poisson 10/s", rate=10.0),
    StagePlan(name="spike", arrival="poisson 30/s", rate=30.0, start_ns=10 * S),
    StagePlan(name="after", arrival="poisson 10/s", rate=10.0, start_ns=20 * S),
)


def found(late: tuple[float, float] | None, *, slo: Slo | None = SLO, until_s: float = 60.0) -> tuple[Recovery, ...]:
    """Ten requests a second over three stages; those due in `late` have a TTFT of 2 s, the others one of 0.1 s."""
    due = np.arange(0, until_s, 0.1)
    rows = np.zeros(len(due), ROW)
    rows["due_ns"] = rows["sent_ns"] = np.round(due * S).astype(np.int64)
    rows["stage"] = np.searchsorted([10.0, 20.0], due + 1e-6)
    ttft = np.full(len(due), S // 10)
    if late is not None:
        ttft[(due > late[0] - 1e-6) & (due < late[1] - 1e-6)] = 2 * S
    for name in ("first_token_ns", "first_answer_ns", "last_token_ns", "end_ns", "done_ns"):
        rows[name] = rows["due_ns"] + ttft
    rows = rows[np.random.default_rng(1).permutation(len(rows))]  # rows of several workers come in any order
    return recovery.of_rows([Columns(rows)], Header(state="finished", stages=STAGES, slo=slo))


def test_the_slo_is_back_with_the_first_request_after_the_last_group_that_misses_it() -> None:
    (one,) = found((12, 29))  # groups of 20 requests last 2 s: the last one with a miss is that from 28 to 30 s
    assert (one.spike, one.after, one.at_s) == ("poisson 30/s", "poisson 10/s", 20)
    assert (one.broken, one.back_s) == (True, 10.0)
    assert recovery_words.back(one) == "held again after 10.0 s"


def test_a_late_miss_counts_and_what_is_not_back_by_the_end_is_said_so() -> None:
    (late,) = found((50, 50.1))
    assert late.back_s == 32.0
    (never,) = found((12, 60))
    assert (never.broken, never.back_s) == (True, None) and never.seen_s == pytest.approx(39.9)
    assert recovery_words.back(never) == "NOT BACK within 39.9 s"


def test_a_share_that_the_quantile_allows_to_be_late_breaks_nothing() -> None:
    allowed = Slo(terms=(Term(metric="ttft", limit_ns=S, quantile=0.9),))
    assert found((30, 30.2), slo=allowed)[0].broken is False  # 2 of a group of 20
    assert found((30, 30.3), slo=allowed)[0].back_s == 12.0
    assert found((30, 30.2), slo=Slo(goodput_share=0.95))[0].broken is False  # no term: every ok request is good


def test_the_slo_may_hold_at_once_or_all_the_time_or_there_is_nothing_to_tell() -> None:
    assert recovery_words.back(found(None)[0]) == "held all the time"
    assert recovery_words.back(found((11, 19))[0]) == "held again at once"
    assert "fewer than 20 requests" in recovery_words.back(found((11, 19), until_s=21.5)[0])
    assert found((11, 19), slo=None) == ()


def test_only_a_fall_of_the_measured_load_is_the_end_of_a_spike() -> None:
    def falls(*stages: StagePlan) -> list[int]:
        return list(recovery._after_spikes(stages))

    before, spike, after = STAGES
    assert falls(*STAGES) == [2] and falls(spike, after, spike, after) == [1, 3]
    assert falls(before, spike) == falls(msgspec.structs.replace(spike, measured=False), after) == []
    lanes = [StagePlan(closed=True, concurrency=n) for n in (8, 24, 8)]
    assert falls(*lanes) == [2] and falls(spike, lanes[0]) == []


def written(tmp_path: Path, stages: str) -> Any:
    file = tmp_path / "w.yaml"
    file.write_text(f"name: w\nrequests: {{input_tokens: 50, output_tokens: 20}}\nstages:\n{stages}")
    return load(str(file))


def test_a_spike_is_the_stage_before_at_so_many_times_its_load(tmp_path: Path) -> None:
    stages = written(
        tmp_path,
        "  - {arrival: {poisson: 10/s}, duration: 30s}\n  - spike: 3x for 60s\n"
        "  - {arrival: {gamma: {rate: 2/s, burstiness: 0.5}}, count: 9}\n  - {spike: 1.5 x for 1m, name: more}\n"
        "  - {arrival: {closed: 8}, duration: 5s}\n  - {spike: 2x for 5s, warmup: true}\n",
    ).stages
    assert [stage.arrival for stage in stages[:4]] == [
        Poisson(rate=10), Poisson(rate=30), Gamma(rate=2, burstiness=0.5), Gamma(rate=3, burstiness=0.5)
    ]  # fmt: skip
    assert isinstance(stages[5].arrival, Closed) and stages[5].arrival.concurrency == 16
    assert [stage.duration_ns for stage in (stages[1], stages[3], stages[5])] == [60 * S, 60 * S, 5 * S]
    assert [(stage.name, stage.measured) for stage in stages[1::2]] == [
        ("spike", True), ("more", True), ("spike-2", False)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{spike: 3x}", "a spike that is none"),
        ("{spike: 1x for 60s}", "a spike that is none"),
        ("{spike: 3x for 60}", "without its unit"),
        ("{spike: 3x for 60s, count: 5}", "a spike and an arrival"),
        ("{arrival: {ramp: {from: 1/s, to: 2/s}}, duration: 5s}\n  - spike: 3x for 60s", "without a load before it"),
    ],
)
def test_what_is_no_spike_is_refused_where_it_stands(tmp_path: Path, bad: str, words: str) -> None:
    with pytest.raises(Faults) as refused:
        written(tmp_path, f"  - {{arrival: {{poisson: 10/s}}, duration: 30s}}\n  - {bad}\n")
    assert words in str(refused.value) and "stages[" in str(refused.value)


@pytest.mark.commands
def test_a_simulated_server_that_is_overrun_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "spiky.yaml"
    file.write_text(
        "name: spiky\nrequests: {input_tokens: 2000, output_tokens: 100}\nslo: {ttft: 500ms}\nseed: 1\nstages:\n"
        "  - {arrival: {poisson: 10/s}, duration: 10s}\n  - spike: 6x for 10s\n"
        "  - {arrival: {poisson: 10/s}, duration: 60s}\n"
    )
    with pytest.raises(SystemExit) as ending:
        main(["run", str(file), "--url", "sim:h100x8", "--out", str(tmp_path / "r")])
    assert ending.value.code == 1  # the SLO of the whole run is missed
    (one,) = json.loads((tmp_path / "r" / "summary.json").read_text())["recovery"]
    assert one["broken"] is True and 1 < one["back_s"] < 40
    shown = " ".join(capsys.readouterr().out.split())
    assert "poisson 60/s poisson 10/s 20.0 s held again after" in shown
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "r")])
    page = (tmp_path / "r" / "report.html").read_text("utf-8")
    assert "After a spike" in page and "held again after" in page
