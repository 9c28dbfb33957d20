"""Sweeps: their loads, knee and front, how they are resumed, and the command in virtual time."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from pathlib import Path

import msgspec
import pytest
import run_fixtures
from browser import Browser, find
from command_line import exits
from hypothesis import given
from hypothesis import strategies as st
from load_point_results import make_load_point_result
from queueing import fail, rows
from servers import start

from loadgen.core import run_folder
from loadgen.core.errors import UserError
from loadgen.core.metrics.summary import NamedSummary, dump_summary, load_summary
from loadgen.core.results import store
from loadgen.core.results.manifest import Fingerprints, RunManifest, StagePlan, TargetFacts
from loadgen.core.run_summary import summarize
from loadgen.core.stats import intervals
from loadgen.render import html as as_page
from loadgen.render import markdown as as_markdown
from loadgen.render import text as as_text
from loadgen.repeated import capacity
from loadgen.runs import sweep_analysis, sweep_curve, sweep_report
from loadgen.runs.load_point_results import (
    STEADY_STATE_RATES,
    LoadPointResult,
    average_repeats,
    load_point_result,
)
from loadgen.search import capacity_files, experiment, stored_sweep, sweep
from loadgen.search.capacity_files import ExperimentOutcome
from loadgen.search.goal import Outcome
from loadgen.search.search_results import PlannedTrial, TrialResult
from loadgen.sim.server.options import Options

pytestmark = pytest.mark.commands


# -- the loads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", (8,)),
        ("1,2,4,8", (1, 2, 4, 8)),
        ("1,2,4,...,512", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
        ("1, 2, ..., 16", (1, 2, 4, 8, 16)),
        ("10,20,30,…,60", (10, 20, 30, 40, 50, 60)),
        ("5,7,...,11", (5, 7, 9, 11)),
    ],
)
def test_concurrencies_are_parsed_as_a_list_or_a_series(
    text: str, expected: tuple[float, ...]
) -> None:
    assert sweep.parse_loads(text, "--concurrency", "concurrency") == expected


def test_rates_are_parsed_as_a_list_or_a_series() -> None:
    assert sweep.parse_loads("0.5,1,2/s,...,8", "--request-rate", "request_rate") == (
        0.5,
        1,
        2,
        4,
        8,
    )
    assert sweep.parse_loads(
        "0.1,0.2,0.3,...,0.6", "--request-rate", "request_rate"
    ) == pytest.approx((0.1, 0.2, 0.3, 0.4, 0.5, 0.6))


@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        ("", "is not a load"),
        ("0,1", "is not a load"),
        ("1.5", "is not a load"),
        ("1,x", "is not a load"),
        ("2,1", "must ascend"),
        ("2,2", "must ascend"),
        ("1,...,8", "cannot be continued"),
        ("1,2,...", "cannot be continued"),
        ("1,2,4,...,500", "does not reach 500"),
        ("4,2,1,...,8", "does not reach 8"),
        ("1,2,3,...,999999", "does not reach"),
    ],
)
def test_an_invalid_list_of_loads_is_refused(text: str, expected_text: str) -> None:
    with pytest.raises(UserError, match=expected_text):
        sweep.parse_loads(text, "--concurrency", "concurrency")


@given(st.text("0123456789.,/s …", max_size=20))
def test_any_text_is_parsed_as_ascending_loads_or_refused(text: str) -> None:
    for kind in ("concurrency", "request_rate"):
        try:
            loads = sweep.parse_loads(text, "--x", kind)
        except UserError:
            continue
        assert list(loads) == sorted(set(loads)) and all(amount > 0 for amount in loads)


# -- what a sweep comes to -------------------------------------------------------------------------


def load_point(
    name: str, output: float, e2e: float, per_user: float = 10.0, *, valid: bool = True
) -> LoadPointResult:
    amount = float(name.rpartition("/")[2][1:])
    return make_load_point_result(
        name=name,
        load_label=name,
        load_value=amount,
        output_per_s=output,
        per_user=per_user,
        e2e_p50=e2e,
        valid=valid,
        is_closed_loop=name.rpartition("/")[2].startswith("c"),
    )


def test_the_knee_has_the_largest_ratio_of_throughput_to_latency() -> None:
    curve = [
        load_point("c1", 100, 10),
        load_point("c2", 195, 10.2),
        load_point("c4", 360, 11),
        load_point("c8", 400, 20),
        load_point("c16", 405, 40),
    ]

    assert sweep_analysis.find_knee(curve) == "c4"
    assert sweep_analysis.find_knee(curve[:3]) == "", "not reached yet"
    assert sweep_analysis.find_knee(curve[:2]) == ""

    unsound = [
        msgspec.structs.replace(curve_point, valid=curve_point.name != "c4")
        for curve_point in curve
    ]

    assert sweep_analysis.find_knee(unsound) == "c8" or sweep_analysis.find_knee(unsound) == "c2"


def test_a_load_point_with_many_errors_is_neither_the_knee_nor_on_the_front() -> None:
    points = [load_point("c1", 100, 10), load_point("c2", 195, 10.2), load_point("c4", 360, 11)]
    points += [load_point("c8", 400, 20), load_point("c16", 405, 40)]
    failing_load_points = [
        msgspec.structs.replace(curve_point, many_errors=curve_point.name == "c4")
        for curve_point in points
    ]

    assert sweep_analysis.find_knee(points) == "c4"
    assert sweep_analysis.find_knee(failing_load_points) != "c4"
    assert "c4" not in [
        curve_point.name
        for curve_point in sweep_curve.mark_pareto_front(failing_load_points, "tpot50")
        if curve_point.on_pareto_front
    ]


@pytest.mark.parametrize(("failing", "code"), [(1, 0), (2, 1)])
def test_a_sweep_in_which_every_load_point_has_many_errors_exits_1(failing: int, code: int) -> None:
    named = []
    for number in range(2):
        records = rows(number, 300)
        if number < failing:
            fail(records, 0.3)
        summary = summarize(RunManifest(state="finished"), records)
        named.append(NamedSummary(f"c{number + 1}", summary))
    curve = sweep_curve.build_curve(named)

    assert sweep_curve.exit_code(curve) == code


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8))
def test_no_load_point_is_better_than_one_on_the_pareto_front(
    points: list[tuple[int, int]],
) -> None:
    load_points = [
        load_point(f"c{i + 1}", float(x), 1.0, float(y)) for i, (x, y) in enumerate(points)
    ]
    front = sweep_analysis.pareto_front(
        {
            curve_point.name: (curve_point.output_per_s, curve_point.per_user)
            for curve_point in load_points
        }
    )

    assert front

    for curve_point, (x, y) in zip(load_points, points, strict=True):
        beaten = any(a >= x and b >= y and (a > x or b > y) for a, b in points)
        assert (curve_point.name in front) is not beaten


def store_summary(run: Path) -> None:
    """Write the summary of a run as its command does at its end."""
    (run / run_folder.SUMMARY).write_bytes(dump_summary(run_folder.open_run(run).summary))


def write_three_runs(folder: Path) -> Path:
    """Three levels of a closed loop, as a sweep leaves them."""
    for concurrency, rate in ((4, 3.0), (8, 6.0), (16, 9.0)):
        stage = StagePlan(
            name="load",
            arrival=f"{concurrency} in flight",
            closed=True,
            slots=150,
            concurrency=concurrency,
        )
        run_fixtures.write(
            folder / f"c{concurrency}",
            rows(concurrency, 150, rate),
            stages=(stage,),
            fingerprints=Fingerprints(recipe=f"{concurrency}"),
        )
    return folder


def test_a_directory_of_runs_is_reported_as_a_curve(tmp_path: Path) -> None:
    curve = sweep_curve.build_curve(
        [
            NamedSummary(f.name, run_folder.open_run(f).summary)
            for f in sorted(write_three_runs(tmp_path).glob("*/"))
        ]
    )

    assert [curve_point.name for curve_point in curve.load_points] == ["c4", "c8", "c16"], (
        "in order of load, not of letters"
    )
    assert [curve_point.load_value for curve_point in curve.load_points] == [4, 8, 16]
    for curve_point in curve.load_points:
        assert curve_point.per_gpu == pytest.approx((curve_point.output_per_s or 0) / 4)
        assert curve_point.per_user == pytest.approx(1000 / (curve_point.tpot_p50 or 1))
    assert curve.best == "c16"

    text, pasted = (
        as_text.render(sweep_report.sweep_report(curve)),
        as_markdown.render(sweep_report.sweep_report(curve)),
    )

    assert re.search(r"\n  4 in flight +met", text)
    assert "Test higher loads" in text, "no load point above the best one was tried"
    assert pasted.count("\n| ") == 10  # two tables of a header, its line and three rows
    assert "Best load point" in pasted


@pytest.mark.parametrize("simulated", [False, True])
def test_the_interval_of_a_sweep_includes_the_variation_from_run_to_run(
    tmp_path: Path, simulated: bool
) -> None:
    """A real server varies from run to run and over minutes, by whichever command it was asked."""
    outcomes: tuple[tuple[float, Outcome], ...] = ((3.0, "under"), (6.0, "over"))
    for number, (rate, outcome) in enumerate(outcomes):
        stage = StagePlan(name="load", arrival=f"poisson {rate:g}/s", slots=150, rate=rate)
        folder, targets = tmp_path / f"r{rate:g}", (TargetFacts(simulated=simulated),)
        run_fixtures.write(
            folder, rows(number, 150, rate), stages=(stage,), targets=targets, slo=None
        )
        store_summary(folder)
        trial = PlannedTrial(number=number, load=rate, kind="level", may_pass_early=False)
        experiment.append_result(
            tmp_path,
            TrialResult(
                trial=trial,
                outcome=outcome,
                ended_early=False,
                duration_s=50,
                offered_load=rate,
                sampling_noise=0.1,
                run_name=folder.name,
            ),
        )
    answer = stored_sweep.analyze_runs(tmp_path, run_folder.runs_in(tmp_path)).result

    assert answer.run_spread_source == ("simulated" if simulated else "learned")
    assert (answer.horizon_s is None) is simulated
    assert simulated or answer.horizon_s == pytest.approx(
        intervals.longest_recurrence_s(25), rel=0.2
    )


def curve_of(*load_points: LoadPointResult) -> sweep_curve.SweepCurve:
    best_point = sweep_analysis.best_load_point(load_points)
    return sweep_curve.SweepCurve(
        workload="w",
        model="m",
        target="t",
        gpus=4,
        version="0",
        started="2026-01-01",
        slo="TTFT p95 at most 2,000 ms",
        load_points=load_points,
        knee="",
        best="" if best_point is None else best_point.name,
    )


def describe_curve(*load_points: LoadPointResult) -> str:
    return " ".join(sweep_report.result_sentences(curve_of(*load_points)))


def load_point_with_slo(
    name: str, is_met: bool | None, *, valid: bool = True, **changes: object
) -> LoadPointResult:
    return msgspec.structs.replace(
        load_point(name, 100, 10, valid=valid), slo_met=is_met, **changes
    )


def test_the_text_states_why_no_load_point_is_the_best() -> None:
    none_valid = describe_curve(
        load_point_with_slo("c1", True, valid=False), load_point_with_slo("c2", True, valid=False)
    )

    assert "No load point" in none_valid
    assert "2 of 2 load points" in none_valid
    assert "2 of them met" in none_valid

    missed = describe_curve(
        load_point_with_slo("c1", True, valid=False), load_point_with_slo("c2", False)
    )

    assert "No load point met" in missed
    assert "even c2" in missed
    assert "1 of 2 load points" in missed
    assert "1 of them met" in missed
    undecided = describe_curve(load_point_with_slo("c1", None), load_point_with_slo("c2", None))
    assert "2 of 2 load points" in undecided
    cut_curve = describe_curve(load_point_with_slo("c1", True, state="interrupted"))
    assert "No load point" in cut_curve, "an interrupted run decides nothing"
    too_short = describe_curve(load_point_with_slo("c512", True, reached_concurrency=False))
    assert "No load point" in too_short


def test_the_text_states_why_the_best_load_point_is_a_lower_bound() -> None:
    passing_point, missed = load_point_with_slo("c4", True), load_point_with_slo("c8", False)

    assert "c8 missed it" in describe_curve(passing_point, missed)
    for other in (load_point_with_slo("c8", True, valid=False), load_point_with_slo("c8", None)):
        assert "no load point above c4" in describe_curve(passing_point, other)
    at_once = msgspec.structs.replace(passing_point, started_at_once=True)
    assert "started at once" in describe_curve(at_once, missed)
    assert "bound" not in describe_curve(
        load_point_with_slo("r4", True), load_point_with_slo("r8", False)
    ), "rates enclose it, and have an interval"


def test_a_load_point_above_one_that_missed_the_slo_is_not_the_best() -> None:
    curve = curve_of(
        load_point_with_slo("r1", True),
        load_point_with_slo("r2", True),
        load_point_with_slo("r4", False),
        load_point_with_slo("r8", True),
    )

    assert curve.best == "r2"
    assert "but r4 missed it" in describe_curve(*curve.load_points)
    none = describe_curve(load_point_with_slo("r4", False), load_point_with_slo("r8", True))
    assert "No load point met" not in none, "one did"
    assert "r4 missed it" in none
    assert "higher loads met it (r8)" in none

    best_name = curve_of(
        load_point_with_slo("r1/c4", True),
        load_point_with_slo("r2/c4", False),
        load_point_with_slo("r1/c8", True),
    ).best

    assert best_name == "", "of two runs of a load point one missed"


def test_the_best_load_point_of_a_closed_loop_completes_the_most() -> None:
    fewer, most = (
        load_point_with_slo("c8", True, requests_per_s=20.0),
        load_point_with_slo("c16", True, requests_per_s=19.5),
    )

    assert curve_of(fewer, most).best == "c8"
    assert "fewer requests: 19.5 req/s" in describe_curve(fewer, most)
    assert "lower bound" in describe_curve(fewer, most)

    open_loop = curve_of(
        load_point_with_slo("r8", True, requests_per_s=8.0),
        load_point_with_slo("r16", True, requests_per_s=7.9),
    )

    assert open_loop.best == "r16", (
        "the load of an open loop is what is offered; both rates stand beside it"
    )


def test_a_load_point_is_named_by_its_record_and_not_by_its_directory(tmp_path: Path) -> None:
    named_summaries = [
        NamedSummary(run.name, run_folder.open_run(run).summary)
        for run in sorted(write_three_runs(tmp_path).glob("*/"))
    ]
    curve = sweep_curve.build_curve(
        [NamedSummary(f"run of {name}", summary) for name, summary in named_summaries]
    )

    assert all(curve_point.is_closed_loop for curve_point in curve.load_points)
    assert sweep_curve.lower_bound_reason(curve) != ""

    stage = StagePlan(name="load", arrival="poisson 3/s", slots=150, rate=3.0)
    run_fixtures.write(tmp_path / "open", rows(1, 150, 3.0), stages=(stage,))
    (rate,) = sweep_curve.build_curve(
        [NamedSummary("cloud-a", run_folder.open_run(tmp_path / "open").summary)]
    ).load_points

    assert not rate.is_closed_loop and rate.load_value == pytest.approx(3.0, rel=0.2)


def test_a_load_point_that_was_not_sustained_is_never_the_best() -> None:
    lasts, grew_load_point = (
        load_point_with_slo("r8", True, sustained=True),
        load_point_with_slo("r16", True, sustained=False),
    )
    curve = curve_of(lasts, grew_load_point)

    assert curve.best == "r8"
    assert "r16 met the SLO but" in describe_curve(lasts, grew_load_point)
    assert "r16 was not sustained" in sweep_curve.lower_bound_reason(curve)
    assert curve_of(grew_load_point).best == ""
    assert "queue kept growing" in describe_curve(grew_load_point)
    assert "too few requests" not in describe_curve(grew_load_point)


def test_a_load_point_above_one_that_was_not_sustained_is_not_the_best() -> None:
    sustained = load_point_with_slo("r8", True, sustained=True)
    growing = load_point_with_slo("r16", True, sustained=False)
    passed_above = load_point_with_slo("r32", True)
    assert curve_of(sustained, growing, passed_above).best == "r8"
    assert "the lower load r16" in describe_curve(sustained, growing, passed_above)
    assert curve_of(growing, passed_above).best == ""


@pytest.mark.parametrize(("rates", "met", "best"), [((3.0, 6.0, 9.0), (True, False, True), "r3")])
def test_the_capacity_is_that_of_the_best_load_point(
    tmp_path: Path, rates: tuple[float, ...], met: tuple[bool, ...], best: str
) -> None:
    """What `cost`, `size`, `compare` and the list of results read is what text and page name."""
    for number, (rate, is_met) in enumerate(zip(rates, met, strict=True)):
        stage = StagePlan(name="load", arrival=f"poisson {rate:g}/s", slots=150, rate=rate)
        records = rows(number, 150, rate, slower=1.0 if is_met else 300.0)
        run_fixtures.write(tmp_path / f"r{rate:g}", records, stages=(stage,))
        store_summary(tmp_path / f"r{rate:g}")
        trial = PlannedTrial(number=number, load=rate, kind="level", may_pass_early=False)
        experiment.append_result(
            tmp_path,
            TrialResult(
                trial=trial,
                outcome="under",
                ended_early=False,
                duration_s=50,
                offered_load=rate,
                sampling_noise=0.1,
                run_name=f"r{rate:g}",
            ),
        )
    curve, judged_trial_results, answer = stored_sweep.analyze_runs(
        tmp_path, run_folder.runs_in(tmp_path)
    )
    finding = capacity_files.find_capacity(
        ExperimentOutcome(tmp_path, judged_trial_results, answer, curve)
    )

    assert curve.best == best and finding is not None and finding.evidence == best


# -- the folder ------------------------------------------------------------------------------------


def experiment_plan(**changes: object) -> experiment.ExperimentPlan:
    fields = {
        "command_name": "sweep",
        "load_kind": "concurrency",
        "workload": "qa",
        "source_text": "x",
        "target": "t",
        "options": {},
    }
    return experiment.ExperimentPlan(**{**fields, **changes})  # type: ignore[arg-type]


def trial_result(number: int, folder: str, outcome: str = "under") -> TrialResult:
    trial = PlannedTrial(number=number, load=float(number + 1), kind="level", may_pass_early=False)
    return TrialResult(
        trial=trial,
        outcome=outcome,
        ended_early=False,
        duration_s=1,
        offered_load=1,
        sampling_noise=0.1,
        run_name=folder,
    )  # type: ignore[arg-type]


def test_resuming_an_experiment_skips_its_invalid_and_removed_runs(tmp_path: Path) -> None:
    folder = tmp_path / "s"

    assert experiment.begin_experiment(folder, experiment_plan()) == []

    for name in ("c1", "c2", "c3"):
        (folder / name).mkdir()
        (folder / name / "summary.json").write_text("{}")
    trial_results = [
        trial_result(0, "c1"),
        trial_result(1, "c2", "invalid"),
        trial_result(2, "c3"),
        trial_result(3, "gone"),
    ]
    for result in trial_results:
        experiment.append_result(folder, result)

    assert experiment.begin_experiment(folder, experiment_plan()) == [
        trial_results[0],
        trial_results[2],
    ], "not what was invalid, nor what is not there any more"
    assert not experiment.new_run_dir(folder, "c2").exists()
    assert [path.name[:3] for path in (folder / "unfinished").iterdir()] == ["c2-"]


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({"target": "other"}, "another sweep, which differs in: target"),
        ({"source_text": "y"}, "differs in: workload"),
        ({"options": {"seed": "1"}}, "flags .seed: none there, 1 here."),
        ({"command_name": "search"}, "another sweep, which differs in: command"),
    ],
)
def test_a_different_experiment_is_refused_in_the_same_directory(
    tmp_path: Path, changes: dict[str, object], expected_text: str
) -> None:
    experiment.begin_experiment(tmp_path / "s", experiment_plan())
    with pytest.raises(UserError, match=expected_text):
        experiment.begin_experiment(tmp_path / "s", experiment_plan(**changes))


def test_a_sweep_refuses_a_directory_with_other_results(tmp_path: Path) -> None:
    run_fixtures.write(tmp_path / "r", rows(1, 20))

    with pytest.raises(UserError, match=r"/r(\n|$)"):
        experiment.begin_experiment(tmp_path / "r", experiment_plan())

    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "plan.json").write_text('{"schema": 9}')
    with pytest.raises(UserError, match=r"schema 9.* 1"):
        experiment.begin_experiment(tmp_path / "s", experiment_plan())
    (tmp_path / "s" / "plan.json").write_text('{"schema": 1}')
    with pytest.raises(UserError, match="`by`"):
        experiment.begin_experiment(tmp_path / "s", experiment_plan())


# -- the command -----------------------------------------------------------------------------------


def test_a_sweep_in_virtual_time_writes_its_curve_and_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"
    common = ("sweep", "qa", "--url", "sim:h100x8", "--gpus", "8", "-n", "60", "--out", str(out))

    assert exits(*common, "--concurrency", "4,8,...,16", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [level["name"] for level in document["levels"]] == ["c4", "c8", "c16"]
    assert all(
        level["simulated"] and level["valid"] and level["ok"] == 60 for level in document["levels"]
    )
    before = (out / "c8" / "summary.json").stat().st_mtime_ns
    assert exits(*common, "--concurrency", "4,8,16,32", "--markdown") == 0
    captured = capsys.readouterr()
    assert "3 of 4 load points" in captured.err and captured.out.startswith("**SIMULATED**")
    assert (out / "c8" / "summary.json").stat().st_mtime_ns == before
    assert (out / "sweep.md").read_text() == captured.out
    assert exits("report", str(out)) == 0
    stdout = capsys.readouterr().out
    assert stdout.startswith("SIMULATED") and "32 in flight" in stdout
    assert "Pareto" in (out / "report.html").read_text()
    assert (
        exits(
            "sweep",
            "qa",
            "--url",
            "sim:h100x8",
            "--concurrency",
            "4",
            "-n",
            "61",
            "--out",
            str(out),
        )
        == 2
    )
    assert "differs in: flags" in capsys.readouterr().err


def test_a_load_point_that_was_killed_at_once_is_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run in which no task ended does not know what was promised of tasks."""
    out = tmp_path / "s"
    common = (
        "--url",
        "sim:gb300-vm",
        "-d",
        "20s",
        "--warmup",
        "0",
        "--seed",
        "1",
        "--out",
        str(out),
    )

    assert exits("sweep", "rag-pipeline", "--request-rate", "2,3", *common) == 0

    (out / "r1").mkdir()
    shutil.copy(out / "r2" / "run.json", out / "r1" / "run.json")
    capsys.readouterr()
    exits("report", str(out))
    stdout = " ".join(capsys.readouterr().out.split())

    assert "2 conversations/s" in stdout or "poisson 2/s" in stdout
    assert "95 % of tasks within 15 s" in stdout

    other = (
        "run",
        "rag-pipeline",
        "--url",
        "sim:gb300-vm",
        "--request-rate",
        "4",
        "-d",
        "20s",
        "--slo",
        "ttft:9s:p95",
    )

    assert exits(*other, "--out", str(out / "r4")) == 0
    assert exits("report", str(out)) == 2
    assert "values of: SLO" in capsys.readouterr().err


def test_every_virtual_user_gets_at_least_five_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"

    assert (
        exits(
            "sweep",
            "qa",
            "--url",
            "sim:h100x8",
            "--concurrency",
            "2,100",
            "--out",
            str(out),
            "--json",
        )
        == 0
    )
    assert [level["ok"] for level in json.loads(capsys.readouterr().out)["levels"]] == [240, 500]


def test_a_note_is_printed_once_and_an_unreached_limit_is_a_lower_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text(
        "currency: USD\n"
        "rented:\n"
        "  - {provider: x, shape: eight, gpu: H100, gpus: 8, per_gpu_hour: 2,"
        " as_of: 2026-01, source: y}\n"
    )
    out = str(tmp_path / "s")
    flags = ["--slo", "ttft:60s", "--gpus", "8", "--shape", "eight", "--warmup", "0", "-n", "60"]

    assert (
        exits("sweep", "qa", "--url", "sim:h100x8", *flags, "--request-rate", "1,2,4", "--out", out)
        == 0
    )
    stderr_lines = capsys.readouterr().err.splitlines()
    assert len(stderr_lines) == len(set(stderr_lines))
    assert sum(line.startswith("Load: ") for line in stderr_lines) == 3
    assert capacity.load_capacity(
        (tmp_path / "s" / capacity.CAPACITY_FILE).read_bytes()
    ).lower_bound
    assert exits("cost", out, "--prices", str(prices)) == 0
    stdout = " ".join(capsys.readouterr().out.split())
    assert 0 <= stdout.find("LOWER BOUND") < 200, stdout  # in the first lines
    assert exits("cost", out, "--prices", str(prices), "--json") == 0
    assert json.loads(capsys.readouterr().out)["offers"][0]["lower_bound"] is True
    shutil.copytree(out, tmp_path / "again")
    assert exits("cost", out, str(tmp_path / "again"), "--prices", str(prices)) == 0
    assert "LOWER BOUND" in capsys.readouterr().out
    assert exits("size", "qa", out, "--users", "100", "-o", str(tmp_path / "sized")) == 0
    assert "at least 4.00" in capsys.readouterr().out


def test_a_sweep_over_rates_has_a_load_point_for_each_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s"
    common = ("sweep", "qa", "--url", "sim:h100x8", "-n", "50", "--warmup", "0", "--out", str(out))
    assert exits(*common, "--request-rate", "0.5,1,2", "--json") == 0
    assert [level["name"] for level in json.loads(capsys.readouterr().out)["levels"]] == [
        "r0.5",
        "r1",
        "r2",
    ]


def test_the_capacity_of_a_search_is_used_by_cost_and_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Search and sweep write the same kind of capacity, which cost and size both read."""
    prices = tmp_path / "prices.yaml"
    prices.write_text(
        "currency: USD\n"
        "rented:\n"
        "  - {provider: x, shape: four, gpu: GB200, gpus: 4, per_gpu_hour: 10.50,"
        " as_of: 2026-01, source: y}\n"
    )
    common = [
        "--url",
        "sim:gb200-vm",
        "--gpus",
        "4",
        "--shape",
        "four",
        "--slo",
        "tpot:40ms:p95",
        "-d",
        "20s",
    ]
    arguments = [
        "search",
        "qa",
        *common,
        "--low",
        "60",
        "--high",
        "240",
        "--precision",
        "0.1",
        "--seed",
        "5",
    ]

    assert exits(*arguments, "--out", str(tmp_path / "a")) == 0

    levels = [
        "sweep",
        "qa",
        *common,
        "--request-rate",
        "60,120,240",
        "--seed",
        "5",
        "--warmup",
        "0",
    ]

    assert exits(*levels, "--out", str(tmp_path / "b")) == 0

    a, b = (
        capacity.load_capacity((tmp_path / name / capacity.CAPACITY_FILE).read_bytes())
        for name in "ab"
    )

    assert (a.method, b.method) == ("search", "sweep")
    assert a.recipe == b.recipe != ""
    for stored_capacity in (a, b):
        assert not stored_capacity.lower_bound
        assert stored_capacity.low_per_s is not None and stored_capacity.high_per_s is not None
        assert stored_capacity.low_per_s <= stored_capacity.rate_per_s <= stored_capacity.high_per_s
    answer = json.loads((tmp_path / "a" / "search.json").read_bytes())["answer"]
    assert a.confirmed and not b.confirmed
    assert (
        a.rate_per_s <= answer["confirmed"] < answer["load"]
    )  # not the load at which half of the runs fail
    assert b.rate_per_s <= float(b.evidence.removeprefix("r"))  # nor one between two levels

    for name, stored_capacity in (("a", a), ("b", b)):
        file = tmp_path / name / stored_capacity.evidence / "summary.json"
        summary = load_summary(file.read_bytes())
        steady = summary.tokens.steady_output_per_s, summary.tokens.steady_total_per_s
        assert (stored_capacity.output_tokens_per_s, stored_capacity.total_tokens_per_s) == steady

    assert a.evidence.endswith(("-confirm", "-sustain")) and b.evidence in ("r60", "r120")

    rules = answer[
        "interval"
    ]  # a sweep asks the same: whether runs of one length pass, and not whether it is sustained

    assert rules["low"] <= b.high_per_s and b.low_per_s <= rules["high"], "they overlap"  # type: ignore[operator]
    assert a.high_per_s <= answer["not_steady"] and b.sustained is None  # type: ignore[operator]
    capsys.readouterr()
    assert exits("cost", str(tmp_path / "a"), str(tmp_path / "b"), "--prices", str(prices)) == 0
    stdout = " ".join(capsys.readouterr().out.split())
    assert "LOWER BOUND" not in stdout
    assert exits("cost", str(tmp_path / "a"), "--prices", str(prices), "--json") == 0

    (offer,) = json.loads(capsys.readouterr().out)["offers"]
    per_hour, rates = 4 * 10.50, offer["rates_per_s"]
    assert float(rates["million_output_tokens"]) * 1e6 == pytest.approx(
        a.output_tokens_per_s, rel=1e-6
    )
    per_million = float(offer["costs"]["million_output_tokens"]["total"])
    assert per_million == pytest.approx(
        per_hour / 3600 / (a.output_tokens_per_s or 0) * 1e6, rel=1e-6
    )
    assert "not comparable" not in stdout
    assert (
        exits("size", "qa", str(tmp_path / "a"), "--users", "5000", "-o", str(tmp_path / "sized"))
        == 0
    )
    assert "SIMULATED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--concurrency", "1", "--request-rate", "1"),
        ("--concurrency", "2,1"),
        ("--concurrency", "8,512", "--num-requests", "200"),
    ],
)
def test_invalid_sweep_options_are_refused(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits("sweep", "qa", *flags) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.processes
def test_every_chart_of_a_sweep_page_has_points_in_a_browser(tmp_path: Path) -> None:
    if find() is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    curve = sweep_curve.build_curve(
        [
            NamedSummary(f.name, run_folder.open_run(f).summary)
            for f in sorted(write_three_runs(tmp_path).glob("*/"))
        ]
    )
    path = tmp_path / "page.html"
    store.replace(path, as_page.render(sweep_report.sweep_report(curve)).encode())
    with Browser() as browser:
        for width in (1280, 390):
            browser.set_view(width=width)
            browser.open(path)
            assert browser.complaints == [] and browser.requests == []
            counts = browser.evaluate(
                "[...document.querySelectorAll('figure')]"
                ".map(f => f.querySelectorAll('circle').length)"
            )
            assert len(counts) == 5 and min(counts) >= 3


@pytest.mark.processes
@pytest.mark.parametrize(
    ("command_line", "first", "expected_text"),
    [
        ("sweep -c 2,200 -n 200", "c2", "the same command with --out {out} resumes it"),
        ("run -c 2 -n 20 --repeat 2,pause=1s", "r1", "loadgen report {out} shows it"),
    ],
)
def test_a_sweep_whose_server_stops_reports_its_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command_line: str,
    first: str,
    expected_text: str,
) -> None:
    """What was measured is a result, and the command says so."""
    out, over = tmp_path / "out", threading.Event()
    with start(Options(ttft="2ms", itl="1ms")) as server:

        def stop_after_the_first() -> None:
            while not over.wait(0.001):
                if (out / first / "summary.json").exists():
                    os.kill(server.pid, signal.SIGKILL)
                    return

        watcher = threading.Thread(target=stop_after_the_first)
        watcher.start()
        try:
            load = ("qa", "--isl", "8", "--osl", "2", "--warmup", "0", "--server-metrics", "off")
            code = exits(
                *command_line.split(), *load, "--energy", "off", "--url", server.url, "-o", str(out)
            )
        finally:
            over.set()
            watcher.join()
    stderr = capsys.readouterr().err
    assert code == 3 and f"are kept, and {expected_text.format(out=out)}" in stderr, stderr
    assert exits("report", str(out)) in (0, 3), "a busy host's senders are late"


def short_load_point(name: str, output: float, **changes: object) -> LoadPointResult:
    """Return a load point that met the SLO, whose load was too short for a steady state."""
    return load_point_with_slo(
        name,
        True,
        unsupported=STEADY_STATE_RATES,
        requests_per_s=13.1,
        output_per_s=output,
        e2e_p50=10_464.0,
        **changes,
    )


def test_the_throughput_of_a_load_point_without_steady_state_is_marked_and_explained() -> None:
    steady = load_point_with_slo("r20", True, requests_per_s=18.6)
    curve = curve_of(steady, short_load_point("r60", 8_329))

    for full in (False, True):
        output = as_text.render(sweep_report.sweep_report(curve), full=full)
        assert "*13.1" in output
        assert "*8,329" in output
        assert "*18.6" not in output
        explanation = " ".join(output.split())
        assert explanation.count("*: throughput includes ramp-up and drain") == 1
        assert "10.5 s" in explanation
        assert "--duration" in explanation

    without_short_points = as_text.render(sweep_report.sweep_report(curve_of(steady)))
    assert "ramp-up" not in without_short_points


def test_a_load_point_without_steady_state_is_no_evidence_of_a_knee() -> None:
    rising = [load_point("r10", 100, 10), load_point("r20", 195, 10.2)]
    short = [short_load_point(f"r{rate}", 150) for rate in (30, 40)]
    steady = [msgspec.structs.replace(point, unsupported=(), e2e_p50=20.0) for point in short]

    assert sweep_analysis.find_knee([*rising, *steady]) == "r20"
    assert sweep_analysis.find_knee([*rising, *short]) == ""
    assert "2 of 4 load points have a steady state" in describe_curve(*rising, *short)


def test_the_lower_bound_of_the_capacity_is_the_offered_load() -> None:
    text_of_short_curve = describe_curve(short_load_point("r60", 8_329))

    assert "lower bound of the capacity is r60 offered" in text_of_short_curve
    assert "13.1" not in text_of_short_curve, "the throughput is not that of a steady state"
    assert "highest load within the SLO" in text_of_short_curve
    assert "highest throughput within the SLO" in describe_curve(load_point_with_slo("c4", True))


def test_a_load_point_has_a_steady_state_if_its_rates_are_those_of_one(
    tmp_path: Path,
) -> None:
    stage = StagePlan(name="load", arrival="poisson 3/s", slots=150, rate=3.0)
    run_fixtures.write(tmp_path / "steady", rows(1, 150, 3.0), stages=(stage,))
    summary = run_folder.open_run(tmp_path / "steady").summary
    without_rates = msgspec.structs.replace(
        summary, load=msgspec.structs.replace(summary.load, steady_completed_rps=None)
    )

    steady = load_point_result("steady", summary, None)
    assert steady.has_steady_state
    short = load_point_result("short", without_rates, None)
    assert not short.has_steady_state
    assert not average_repeats([steady, short]).has_steady_state
