"""Spikes: how they are written, and how long after one the SLO held again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen.cli.app import main
from loadgen.core import format
from loadgen.core.analysis import recovery
from loadgen.core.errors import CombinedError
from loadgen.core.metrics.columns import Columns
from loadgen.core.metrics.sections import Recovery
from loadgen.core.results.manifest import ReasonCode, RunManifest, StagePlan
from loadgen.core.results.record import ROW
from loadgen.core.server_metrics.series import MetricSample
from loadgen.core.slo import Slo, Term
from loadgen.core.workload import Closed, Gamma, Poisson, load
from loadgen.runs import charts
from loadgen.runs import recovery as recovery_text
from loadgen.runs.page_data import ChartData, compute_chart_data

S = 1_000_000_000
SLO = Slo(terms=(Term(metric="ttft", limit_ns=S),))
STAGES = (
    StagePlan(name="before", arrival="poisson 10/s", rate=10.0),
    StagePlan(name="spike", arrival="poisson 30/s", rate=30.0, start_ns=10 * S),
    StagePlan(name="after", arrival="poisson 10/s", rate=10.0, start_ns=20 * S),
)


def rows_of(late: tuple[float, float] | None, until_s: float, stages: Sequence[StagePlan]) -> Any:
    due = np.arange(0, until_s, 0.1)
    rows = np.zeros(len(due), ROW)
    rows["due_ns"] = rows["sent_ns"] = np.round(due * S).astype(np.int64)
    rows["stage"] = np.searchsorted([plan.start_ns / 1e9 for plan in stages[1:]], due + 1e-6)
    ttft = np.full(len(due), S // 10)
    if late is not None:
        ttft[(due > late[0] - 1e-6) & (due < late[1] - 1e-6)] = 2 * S
    for name in ("first_token_ns", "first_answer_ns", "last_token_ns", "end_ns", "done_ns"):
        rows[name] = rows["due_ns"] + ttft
    return rows[
        np.random.default_rng(1).permutation(len(rows))
    ]  # rows of several workers come in any order


def measured_recoveries(
    late: tuple[float, float] | None,
    *,
    slo: Slo | None = SLO,
    until_s: float = 60.0,
    stages: Sequence[StagePlan] = STAGES,
    samples: Sequence[MetricSample] = (),
    codes: dict[str, ReasonCode] | None = None,
) -> tuple[Recovery, ...]:
    """Return the recoveries of a run with 10 requests/s whose TTFT is 2 s in `late`, else 0.1 s."""
    manifest = RunManifest(
        state="finished", stages=tuple(stages), slo=slo, warning_codes=codes or {}
    )
    return recovery.measure_recoveries([Columns(rows_of(late, until_s, stages))], manifest, samples)


def figures_of(start_s: float, end_s: float, stages: Sequence[StagePlan]) -> ChartData:
    manifest = RunManifest(state="finished", stages=tuple(stages), slo=SLO)
    return compute_chart_data(manifest, rows_of((start_s, end_s), 60.0, stages))


def test_the_slo_is_back_with_the_first_request_after_the_last_group_that_misses_it() -> None:
    (event_recovery,) = measured_recoveries(
        (12, 29)
    )  # groups of 20 requests last 2 s: the last one with a miss is that from 28 to 30 s

    assert (event_recovery.load_before, event_recovery.load_after, event_recovery.at_s) == (
        "poisson 30/s",
        "poisson 10/s",
        20,
    )
    assert (event_recovery.slo_missed, event_recovery.recovered_after_s) == (True, 10.0)
    assert recovery_text.describe_recovery(event_recovery) == "met again after 10.0 s"


def test_an_slo_not_met_again_by_the_end_of_the_run_has_no_recovery_time() -> None:
    (late_recovery,) = measured_recoveries((50, 50.1))
    assert late_recovery.recovered_after_s == 32.0
    (never,) = measured_recoveries((12, 60))
    assert (never.slo_missed, never.recovered_after_s) == (
        True,
        None,
    ) and never.observed_s == pytest.approx(39.9)
    assert recovery_text.describe_recovery(never) == "NOT MET AGAIN within 39.9 s"


def test_late_requests_within_the_quantile_do_not_violate_the_slo() -> None:
    allowed = Slo(terms=(Term(metric="ttft", limit_ns=S, quantile=0.9),))
    assert measured_recoveries((30, 30.2), slo=allowed)[0].slo_missed is False  # 2 of a group of 20
    assert measured_recoveries((30, 30.3), slo=allowed)[0].recovered_after_s == 12.0
    assert (
        measured_recoveries((30, 30.2), slo=Slo(goodput_share=0.95))[0].slo_missed is False
    )  # no term: every ok request is good


def test_the_text_states_whether_recovery_was_immediate_unneeded_or_not_measurable() -> None:
    assert recovery_text.describe_recovery(measured_recoveries(None)[0]) == "met all the time"
    assert recovery_text.describe_recovery(measured_recoveries((11, 19))[0]) == "met again at once"
    assert "fewer than 20 requests" in recovery_text.describe_recovery(
        measured_recoveries((11, 19), until_s=21.5)[0]
    )
    assert measured_recoveries((11, 19), slo=None) == ()


def test_only_a_fall_of_the_measured_load_is_the_end_of_a_spike() -> None:
    def falls(*stages: StagePlan) -> list[int]:
        return list(recovery.find_stages_after_spikes(stages))

    before, spike, after = STAGES
    assert falls(*STAGES) == [2] and falls(spike, after, spike, after) == [1, 3]
    assert (
        falls(before, spike) == falls(msgspec.structs.replace(spike, measured=False), after) == []
    )
    stage_plans = [StagePlan(closed=True, concurrency=n) for n in (8, 24, 8)]
    assert falls(*stage_plans) == [2] and falls(spike, stage_plans[0]) == []


def up(t_s: float, url: str, value: float = 1, target: int | None = 0) -> MetricSample:
    return MetricSample(t_s=t_s, target=target, page=url, name="up", labels="", value=value)


def ready(t_s: float, pods: float) -> list[MetricSample]:
    """Return the samples of a gateway's metrics page that counts its ready pods."""
    sample = msgspec.structs.replace(up(t_s, "epp", pods, None), name="inference_pool_ready_pods")
    return [sample, up(t_s, "epp", target=None)]


READY = [*ready(-1, 4), *ready(5, 3), *ready(40, 4)]
UP = [up(-1, "a"), up(-0.9, "b"), up(5, "a", 0), up(40, "a")]


@pytest.mark.parametrize(("samples", "counts"), [(READY, (4, 3)), (UP, (2, 1))])
def test_lost_and_added_replicas_on_metrics_pages_are_events(
    samples: list[MetricSample], counts: tuple[int, int]
) -> None:
    gone_recovery, come = measured_recoveries((5, 9), samples=samples, stages=STAGES[:1])

    assert [
        (
            event_recovery.event,
            event_recovery.load_before,
            event_recovery.load_after,
            event_recovery.at_s,
        )
        for event_recovery in (gone_recovery, come)
    ] == [
        ("loss", f"{counts[0]} replicas", format.counted(counts[1], "replica"), 5.0),
        ("scale_up", format.counted(counts[1], "replica"), f"{counts[0]} replicas", 40.0),
    ]
    assert (gone_recovery.slo_missed, gone_recovery.recovered_after_s) == (
        True,
        4.0,
    ) and gone_recovery.observed_s == pytest.approx(54.9)
    assert recovery_text.describe_recovery(come) == "met all the time"
    (_, slow) = measured_recoveries((35, 43), samples=samples, stages=STAGES[:1])
    assert (slow.slo_missed, slow.recovered_after_s) == (True, 4.0), (
        "it was asked for, since the SLO was missed"
    )
    (lost_recovery, _) = measured_recoveries((5, 43), samples=samples, stages=STAGES[:1])
    assert lost_recovery.recovered_after_s == 38.0, "the replica that came was part of the way back"


def test_a_recovery_ends_where_the_next_event_begins() -> None:
    """The way back of a spike had the miss of a replica lost long after it."""
    spike, lost_recovery = measured_recoveries((31, 33), samples=[*ready(-1, 4), *ready(30, 3)])

    assert (spike.event, spike.recovered_after_s, spike.observed_s) == (
        "spike",
        0.0,
        pytest.approx(9.9),
    )
    assert (lost_recovery.event, lost_recovery.recovered_after_s) == ("loss", 4.0)
    before, _ = measured_recoveries((25, 26), samples=[*ready(-1, 4), *ready(8, 3)])
    assert (before.event, before.observed_s) == ("loss", pytest.approx(1.9)), (
        "to the beginning of the spike"
    )


def test_a_target_that_stops_answering_is_a_loss_if_the_load_had_begun() -> None:
    codes = {"words": ReasonCode(code="target_gone", values={"target": "b", "at_s": 30.0})}
    (event_recovery,) = measured_recoveries((30, 31), codes=codes, stages=STAGES[:1])

    assert (
        event_recovery.event,
        event_recovery.load_before,
        event_recovery.load_after,
        event_recovery.at_s,
        event_recovery.recovered_after_s,
    ) == (
        "loss",
        "b",
        "gone",
        30.0,
        2.0,
    )
    assert (
        measured_recoveries((30, 31), samples=[*ready(-2, 1), *ready(-1, 4)], stages=STAGES[:1])
        == ()
    )
    chart = next(charts.build_recovery_charts(figures_of(30, 31, STAGES[:1]), (event_recovery,)))
    assert [mark.x for mark in chart.marks] == [
        30.0,
        32.0,
    ] and chart.title == "SLO attainment"
    assert min(value for value in chart.series[0].y if value is not None) == 0.5


def written(tmp_path: Path, stages: str) -> Any:
    file = tmp_path / "w.yaml"
    file.write_text(
        f"name: w\nrequests: {{input_tokens: 50, output_tokens: 20}}\nstages:\n{stages}"
    )
    return load(str(file))


def test_a_spike_stage_repeats_the_previous_arrival_law_at_a_multiple_of_its_rate(
    tmp_path: Path,
) -> None:
    stages = written(
        tmp_path,
        "  - {arrival: {poisson: 10/s}, duration: 30s}\n  - spike: 3x for 60s\n"
        "  - {arrival: {gamma: {rate: 2/s, burstiness: 0.5}}, count: 9}\n"
        "  - {spike: 1.5 x for 1m, name: more}\n"
        "  - {arrival: {closed: 8}, duration: 5s}\n  - {spike: 2x for 5s, warmup: true}\n",
    ).stages

    assert [stage.arrival for stage in stages[:4]] == [
        Poisson(rate=10),
        Poisson(rate=30),
        Gamma(rate=2, burstiness=0.5),
        Gamma(rate=3, burstiness=0.5),
    ]
    assert isinstance(stages[5].arrival, Closed) and stages[5].arrival.concurrency == 16
    assert [stage.duration_ns for stage in (stages[1], stages[3], stages[5])] == [
        60 * S,
        60 * S,
        5 * S,
    ]
    assert [(stage.name, stage.measured) for stage in stages[1::2]] == [
        ("spike", True),
        ("more", True),
        ("spike-2", False),
    ]


def test_options_that_replace_a_spike_cause_a_warning(tmp_path: Path, capsys: Any) -> None:
    """Only the docs said so: the run looked like one of the file."""
    written(tmp_path, "  - {arrival: {poisson: 10/s}, duration: 30s}\n  - spike: 3x for 60s\n")
    command = ["run", str(tmp_path / "w.yaml"), "--url", "sim:gb300-vm", "--request-rate", "5"]

    with pytest.raises(SystemExit):
        main([*command, "-o", str(tmp_path / "r")])

    warning_text = "the load on the command line replaces 2 stages of the file: load, spike"
    captured = capsys.readouterr()
    assert f"Warning: {warning_text}" in captured.err
    assert (
        warning_text
        in json.loads((tmp_path / "r" / "summary.json").read_bytes())["verdict"]["warnings"]
    )
    with pytest.raises(SystemExit):
        main([*command, "--dry-run"])
    assert warning_text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bad", "expected_text"),
    [
        ("{spike: 3x}", "a spike that is not of the form"),
        ("{spike: 1x for 60s}", "a spike that is not of the form"),
        ("{spike: 3x for 60}", "needs a unit"),
        ("{spike: 3x for 60s, count: 5}", "a spike together with an arrival"),
        (
            "{arrival: {ramp: {from: 1/s, to: 2/s}}, duration: 5s}\n  - spike: 3x for 60s",
            "but no load before it",
        ),
    ],
)
def test_an_invalid_spike_is_refused_with_its_location(
    tmp_path: Path, bad: str, expected_text: str
) -> None:
    with pytest.raises(CombinedError) as exc_info:
        written(tmp_path, f"  - {{arrival: {{poisson: 10/s}}, duration: 30s}}\n  - {bad}\n")
    assert expected_text in str(exc_info.value) and "stages[" in str(exc_info.value)


@pytest.mark.commands
def test_an_overloaded_simulated_server_recovers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "spiky.yaml"
    file.write_text(
        "name: spiky\n"
        "requests: {input_tokens: 2000, output_tokens: 100}\n"
        "slo: {ttft: 500ms}\n"
        "seed: 1\n"
        "stages:\n"
        "  - {arrival: {poisson: 10/s}, duration: 10s}\n  - spike: 6x for 10s\n"
        "  - {arrival: {poisson: 10/s}, duration: 60s}\n"
    )

    with pytest.raises(SystemExit) as ending:
        main(["run", str(file), "--url", "sim:h100x8", "--full", "--out", str(tmp_path / "r")])
    assert ending.value.code == 1  # the SLO of the whole run is missed
    (event_recovery,) = json.loads((tmp_path / "r" / "summary.json").read_text())["recovery"]
    assert event_recovery["broken"] is True and 1 < event_recovery["back_s"] < 40
    stdout = " ".join(capsys.readouterr().out.split())
    assert "spike poisson 60/s poisson 10/s 20.0 s" in stdout
    with pytest.raises(SystemExit):
        main(["report", str(tmp_path / "r")])
    page = (tmp_path / "r" / "report.html").read_text("utf-8")
    assert "Recovery" in page and "met again after" in page and "SLO attainment" in page

    contract = tmp_path / "c.yaml"
    contract.write_text(
        f"name: c\nslo: {{ttft: 500ms}}\nlevels:\n- name: a\n  workload: {file.name}\n  must:\n"
        "  - recovery: 60s\n  should:\n  - recovery: 500ms\n"
    )

    with pytest.raises(SystemExit) as ending:
        main(
            [
                "validate",
                str(contract),
                "--url",
                "sim:h100x8",
                "--out",
                str(tmp_path / "v"),
                "--seed",
                "1",
            ]
        )
    assert ending.value.code == 0
    (level,) = json.loads((tmp_path / "v" / "verdict.json").read_text())["levels"]
    assert [term["verdict"] for term in level["terms"]] == ["PASS", "FAIL"]
    assert level["terms"][0]["sample"] == 1
