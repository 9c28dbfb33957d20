"""Repeated runs: their folder, seeds, number, pauses and table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import run_fixtures
from command_line import exits
from queueing import rows

from loadgen.bundle.bundle_writer import write_bundle
from loadgen.bundle.verification import verify_bundle
from loadgen.cli import repetition as flags
from loadgen.contracts.loading import load_contract
from loadgen.contracts.run import ValidationOptions, run_validation
from loadgen.contracts.stored_validation import judge_again
from loadgen.core import run_folder
from loadgen.core.errors import CombinedError
from loadgen.core.execution import run as execution
from loadgen.core.execution.load_description import describe_load
from loadgen.core.execution.plan import Settings
from loadgen.core.metrics.summary import NamedSummary, Summary
from loadgen.core.results import checksums
from loadgen.core.run_summary import summarize
from loadgen.core.stats import students_t
from loadgen.core.workload import load, read_flags
from loadgen.render import text as as_text
from loadgen.repeated.repeat_loop import run_repeats
from loadgen.repeated.repeats import RepeatSummary, Repetition, summarize_repeats
from loadgen.runs import repeats_report
from loadgen.runs.ci_report import create_ci_report
from loadgen.runs.command import RunPlan
from loadgen.runs.sweep_curve import build_curve

pytestmark = pytest.mark.commands

SIM = ("--url", "sim:gb300-vm", "--request-rate", "20", "--duration", "30s")


def summaries(*seeds: int, by: tuple[float, ...] = (1.0, 1.0, 1.0)) -> list[Summary]:
    results = []
    for seed, factor in zip(seeds, by, strict=False):
        records = rows(seed, 300, 8.0, factor)
        results.append(summarize(run_fixtures.manifest(f"r{seed}", len(records)), records))
    return results


def render_repeats(repeat_summary: RepeatSummary, runs: Sequence[Summary]) -> str:
    named_summaries = [
        NamedSummary(name, run) for name, run in zip(repeat_summary.runs, runs, strict=True)
    ]
    report = repeats_report.repeats_report(repeat_summary, build_curve(named_summaries))
    return as_text.render(report, full=True)


def test_the_interval_comes_from_the_variation_between_runs() -> None:
    three = summaries(1, 2, 3, by=(0.9, 1.0, 1.1))
    summary = summarize_repeats(
        [NamedSummary(f"r{i}", run_summary) for i, run_summary in enumerate(three)]
    )
    tpot = next(
        repeated_metric
        for repeated_metric in summary.metrics
        if repeated_metric.metric == "tpot_ms.p50"
    )
    values = [run_summary.tpot_ms.p50 for run_summary in three]

    assert tpot.values == tuple(values)
    assert tpot.mean == pytest.approx(np.mean(values))
    half = students_t.t_quantile(0.975, 2) * np.std(values, ddof=1) / np.sqrt(3)
    assert tpot.high is not None and tpot.high - tpot.mean == pytest.approx(half)
    assert tpot.spread == pytest.approx(0.1, abs=0.03)

    ok = next(
        repeated_metric
        for repeated_metric in summary.metrics
        if repeated_metric.metric == "ok_share"
    )

    assert ok.mean == 1.0 and ok.low is not None and 0.99 < ok.low < 0.999, (
        "900 requests without a failure"
    )
    text = render_repeats(summary, three)
    assert "TPOT p50, ms" in text and "spread" in text and "Student" in text


def test_repeats_report_whether_the_slo_was_met() -> None:
    """The list said "SLO missed", and the report of the same folder nothing but VALID."""
    three = summaries(1, 2, 3, by=(1.0, 20.0, 20.0))
    text = " ".join(
        render_repeats(
            summarize_repeats(
                [NamedSummary(f"r{i}", run_summary) for i, run_summary in enumerate(three)]
            ),
            three,
        ).split()
    )

    assert "missed by r1, r2: TTFT p99" in text
    assert " missed " in text
    same_summaries = [three[0]] * 2
    assert "2 of 2 runs: TTFT p99" in render_repeats(
        summarize_repeats(
            [NamedSummary("a", same_summaries[0]), NamedSummary("b", same_summaries[1])]
        ),
        same_summaries,
    )


def invalid(summary: Summary) -> Summary:
    """Return the same run with an INVALID verdict."""
    verdict = msgspec.structs.replace(summary.verdict, valid=False, reasons=("sent late",))
    return msgspec.structs.replace(summary, verdict=verdict)


def test_an_invalid_repeat_counts_in_no_mean() -> None:
    first_summary, second_summary, third_summary = summaries(1, 2, 3, by=(1.0, 1.0, 9.0))
    repeats = [
        NamedSummary("r1", first_summary),
        NamedSummary("r2", second_summary),
        NamedSummary("r3", invalid(third_summary)),
    ]
    summary = summarize_repeats(repeats)
    tpot = next(
        repeated_metric
        for repeated_metric in summary.metrics
        if repeated_metric.metric == "tpot_ms.p50"
    )

    assert tpot.values == (first_summary.tpot_ms.p50, second_summary.tpot_ms.p50)
    assert summary.valid and summary.excluded_runs == ("r3",) and summary.runs == ("r1", "r2", "r3")
    text = " ".join(
        render_repeats(summary, [first_summary, second_summary, invalid(third_summary)]).split()
    )
    assert "1 of 3 runs is INVALID" in text
    assert "means: r3" in text


def test_repeats_without_a_valid_run_keep_their_means_and_are_invalid() -> None:
    two = [invalid(run_summary) for run_summary in summaries(1, 2)]
    summary = summarize_repeats([NamedSummary("r1", two[0]), NamedSummary("r2", two[1])])
    assert not summary.valid and summary.excluded_runs == ()
    assert all(len(repeated_metric.values) == 2 for repeated_metric in summary.metrics)


def test_automatic_repeats_continue_until_enough_runs_are_valid() -> None:
    alike = summaries(1, 1, 1)
    auto = Repetition(count=None, most=6, precision=0.05)
    assert not auto.is_complete([alike[0], alike[1], invalid(alike[2])])
    assert auto.is_complete([*alike, invalid(alike[2])])


def test_a_single_run_has_no_confidence_interval() -> None:
    summary = summarize_repeats([NamedSummary("r1", summaries(1)[0])])
    assert all(
        repeated_metric.low is None
        and repeated_metric.high is None
        and repeated_metric.spread is None
        for repeated_metric in summary.metrics
    )
    assert "no confidence interval" in render_repeats(summary, summaries(1))


def test_automatic_repeats_end_at_the_precision_or_at_the_maximum() -> None:
    alike = summaries(1, 1, 1)
    apart = summaries(1, 2, 3, by=(0.8, 1.0, 1.3))
    auto = Repetition(count=None, most=4, precision=0.05)

    assert not auto.is_complete(alike[:2]) and auto.is_complete(alike), "two that agree are too few"
    assert not auto.is_complete(apart) and auto.is_complete([*apart, *alike])
    assert [Repetition(count=2).is_complete(alike[:n]) for n in range(4)] == [
        False,
        False,
        True,
        True,
    ]


def test_a_run_is_repeated_as_often_as_requested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a"

    assert exits("run", "qa", *SIM, "--seed", "5", "--repeat", "3,pause=10m", "-o", str(out)) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("SIMULATED")
    assert "3 runs" in captured.out
    assert "No pause" in captured.err
    document = msgspec.json.decode((out / "repeats.json").read_bytes(), type=RepeatSummary)
    assert (
        "repeats.json" in (checksums.read_checksums(out) or {})
        and not checksums.find_changes(out)
        and not checksums.unlisted(out)
    )
    assert (
        document.runs == ("r1", "r2", "r3")
        and document.seeds[0] == 5
        and len(set(document.seeds)) == 3
    )
    assert exits("run", "qa", *SIM, "--seed", "5", "-o", str(tmp_path / "alone")) == 0

    first, alone = (
        json.loads((folder / "summary.json").read_text())
        for folder in (out / "r1", tmp_path / "alone")
    )

    assert first["ttft_ms"] == alone["ttft_ms"], "the first repeat is the run without --repeat"
    assert exits("run", "qa", *SIM, "--repeat", "2", "-o", str(out)) == 2
    assert "already holds results" in capsys.readouterr().err
    assert exits("report", str(out), "--no-html") == 0
    assert "3 runs" in capsys.readouterr().out
    other = tmp_path / "b"
    assert exits("run", "qa", *SIM, "--repeat", "auto,within=20%", "-o", str(other), "--json") == 0
    assert json.loads(capsys.readouterr().out)["tight"] is True
    assert exits("compare", str(out), str(other)) == 0


def test_repeats_of_a_sweep_are_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "sweep",
        "qa",
        "--url",
        "sim:gb300-vm",
        "--request-rate",
        "10,20",
        "-d",
        "20s",
        "--seed",
        "3",
        "-o",
        str(tmp_path / "s"),
    )

    assert exits(*command, "--repeat", "2") == 0
    stdout = capsys.readouterr().out
    assert re.search(r"\n  r10 +2 .*±", stdout)
    assert exits(*command, "--repeat", "3", "--json") == 0
    captured = capsys.readouterr()
    assert captured.err.count("2 of 2 load points") == 2, "the first two sweeps stand"
    levels = json.loads(captured.out)["levels"]
    assert (
        levels["r20"]["runs"] == ["r1/r20", "r2/r20", "r3/r20"]
        and len(set(levels["r20"]["seeds"])) == 3
    )


@pytest.mark.parametrize(
    ("option", "expected_text"),
    [
        ("0", "must be an integer"),
        ("many", "must be an integer"),
        ("3,most=5", "need --repeat auto"),
        ("auto,most=2", "from 3 to 100"),
        ("auto,within=0%", "must be greater than 0"),
        ("3,pause=soon", "must be a duration"),
        ("3,break=10m", "known: pause=10m"),
    ],
)
def test_invalid_repeat_options_are_refused(option: str, expected_text: str) -> None:
    with pytest.raises(CombinedError) as faults:
        flags.parse_repetition(option)
    assert expected_text in str(faults.value)


def test_a_list_of_loads_is_refused_outside_of_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits("run", "qa", *SIM[:2], "-c", "1,2", "-n", "20", "--repeat", "3") == 2
    assert "loadgen sweep ... --repeat" in capsys.readouterr().err


def test_the_pause_between_repeats_can_be_interrupted() -> None:
    waited: list[float] = []
    attempts: list[int] = []
    how = Repetition(count=3, pause_ns=600_000_000_000)

    def attempt_run(number: int) -> bool:
        attempts.append(number)
        return True

    def repeated(wait: Callable[[float], None]) -> bool:
        attempts.clear()
        return run_repeats(
            how,
            lambda: len(attempts) == 3,
            attempt_run,
            virtual=False,
            print_line=lambda _: None,
            wait=wait,
        )

    assert repeated(waited.append) and waited == [600.0, 600.0] and attempts == [1, 2, 3]

    def broken_off(_: float) -> None:
        raise KeyboardInterrupt

    assert not repeated(broken_off) and attempts == [1]


CONTRACT = """\
name: twice
horizon: 12s
levels:
  - {name: load, workload: qa, rate: 8/s, requests: 1200, repeats: 2, apart: 30m,
     must: [{tpot: {limit: 60ms, at: p50}}]}
"""


def test_repeats_of_a_contract_level_are_stored_judged_and_bundled(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONTRACT)
    checked = load_contract(tmp_path / "c.yaml", env={})
    messages: list[str] = []
    options = ValidationOptions(execute=execution.execute, show_status=messages.append, seed=3)
    validation, folder = run_validation(
        checked, Settings(url="sim:gb300-vm"), tmp_path / "out", options
    )

    assert validation.levels[0].runs == ("load/r1", "load/r2") and validation.verdict == "PASS", (
        validation.levels[0].terms
    )
    assert any("No pause" in line for line in messages)
    assert judge_again(folder) == validation
    spread = json.loads((folder / "repeats.json").read_bytes())["levels"]["load"]
    assert spread["runs"] == ["load/r1", "load/r2"] and spread["figures"]
    assert "tokens/s" in (folder / "verdict.html").read_text()

    write_bundle(folder, tmp_path / "poc.zip")
    came = verify_bundle(tmp_path / "poc.zip")
    assert came.verified == "all" and "repeats.json" in {
        checked_file.file for checked_file in came.reproduced
    }, came.skipped
    four = load_contract(tmp_path / "c.yaml", repeats=4, env={})
    assert four.levels[0].level.repeats == 4

    options = ValidationOptions(
        execute=execution.execute, show_status=messages.append, repetition=Repetition(count=4)
    )
    validation, _ = run_validation(four, Settings(url="sim:gb300-vm"), tmp_path / "four", options)

    assert len(validation.levels[0].runs) == 4


def test_the_estimate_of_all_repeats_uses_the_seed_of_each_repeat(tmp_path: Path) -> None:
    """A Poisson load of fixed duration has another number of requests with each seed."""
    file = tmp_path / "w.yaml"
    file.write_text("name: w\nrequests: {input_tokens: 8, output_tokens: 4}\n")
    workload = load(str(file), read_flags(request_rate="20", duration="30s", seed="7", warmup="0"))
    settings = Settings(url="sim:gb300-vm")
    ci_report = create_ci_report(None, github=False, strict=False)
    repetition = Repetition(count=3)
    plan = RunPlan({"w": workload}, settings, repetition, ci_report)
    estimated = [
        describe_load(run.workload, run.settings).load.requests for run in plan.required_runs
    ]

    out = tmp_path / "repeats"
    exits("run", file, *SIM, "--seed", "7", "--warmup", "0", "--repeat", "3", "-o", out)
    sent = [run_folder.read_summary(out / f"r{n}").requests.scheduled for n in (1, 2, 3)]
    assert estimated == sent and len(set(sent)) > 1

    once = RunPlan({"w": workload}, settings, None, ci_report)
    assert [run.workload for run in once.required_runs] == [workload]
