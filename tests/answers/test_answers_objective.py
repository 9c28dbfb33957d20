"""The objective `--slo answers:95%` agrees in summary, reports, JUnit and exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import run_page
from command_line import exits

from loadgen.core import run_folder
from loadgen.core.errors import CombinedError
from loadgen.core.metrics.answer_objective import AnswersObjective
from loadgen.core.metrics.summary import Summary
from loadgen.core.workload import read_flags
from loadgen.core.workload.loading import load
from loadgen.runs import outcome, text
from loadgen.runs.slo_text import describe_result, list_objectives, missed_objectives

LOAD = ("-c", "50", "--input-tokens", "50", "--output-tokens", "20", "--seed", "1")


def write_questions(folder: Path) -> Path:
    rows = [{"prompt": f"What is {number} + 1?", "answer": number + 1} for number in range(50)]
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder: Path, wrong: str, *options: str) -> int:
    """Run a load with questions, of which a percentage is answered wrongly; return the code."""
    preset = folder / "defect.yaml"
    preset.write_text(f"extends: gb300-vm\nanswers: {{wrong: {wrong}}}\n")
    questions = ("--check-answers", str(write_questions(folder)), "--check-share", "20%")
    command = ("run", "--url", f"sim:{preset}", *LOAD, *questions, "-o", str(folder / "run"))
    return exits(*command, *options)


def read_objective(summary: Summary) -> AnswersObjective:
    assert summary.answers is not None
    assert summary.answers.objective is not None
    return summary.answers.objective


@pytest.mark.parametrize(
    ("wrong", "requests", "is_met", "exit_code", "case_outcome"),
    [
        ("0%", "2000", True, 0, "passed"),
        ("30%", "2000", False, 1, "failed"),
        ("0%", "200", None, 4, "error"),
    ],
)
def test_all_outputs_agree_on_the_answers_objective(
    tmp_path: Path,
    wrong: str,
    requests: str,
    is_met: bool | None,
    exit_code: int,
    case_outcome: str,
) -> None:
    options = ("-n", requests, "--slo", "answers:95%", "--slo", "ttft:10s:p50", "--strict")
    assert run(tmp_path, wrong, *options) == exit_code
    folder = tmp_path / "run"
    summary = run_folder.read_summary(folder)
    objective = read_objective(summary)
    assert (objective.met, summary.goodput.met) == (is_met, is_met)
    assert run_folder.summary(folder).answers == summary.answers

    assert objective.text in list_objectives(summary)
    assert len(list(missed_objectives(summary))) == (is_met is False)
    assert bool(objective.undecided) is (is_met is None)
    for is_full in (True, False):
        report = text.render(summary, color=False, full=is_full)
        assert "Right answers" in report
        assert ("too few checked answers" in " ".join(report.split())) is (is_met is None)
    assert objective.text in run_page.render(summary)

    cases = outcome.build_cases([("run", summary)], strict=True)
    (case,) = [case for case in cases if case.name == objective.text]
    assert case.outcome == case_outcome


def test_an_slo_with_only_an_answers_objective_is_judged(tmp_path: Path) -> None:
    assert run(tmp_path, "30%", "-n", "2000", "--slo", "answers:95%") == 1
    summary = run_folder.read_summary(tmp_path / "run")
    assert summary.goodput.met is False
    assert not summary.goodput.has_slo
    assert "95 %" in describe_result(summary)
    assert exits("run", "qa", "--url", "sim:gb300-vm", "--slo", "answers:95%") == 2


def test_an_invalid_run_has_no_outcome_of_its_answers_objective(tmp_path: Path) -> None:
    assert run(tmp_path, "0%", "-n", "5", "--slo", "answers:95%") == 3
    summary = run_folder.read_summary(tmp_path / "run")
    assert not summary.verdict.valid
    assert read_objective(summary).met is None
    assert summary.goodput.met is None
    assert "NOT JUDGED" in text.render(summary, color=False, full=False)


def test_a_run_without_any_outcome_of_a_check_is_undecided(tmp_path: Path) -> None:
    """As after a kill before the first response to a question."""
    run(tmp_path, "0%", "-n", "2000", "--slo", "answers:95%")
    folder = tmp_path / "run"
    for name in ("answers.jsonl", "wrong_answers.jsonl", "known_answers.jsonl"):
        (folder / name).unlink()
    summary = run_folder.summary(folder)
    objective = read_objective(summary)
    assert (objective.met, objective.count, objective.needed) == (None, 0, 73)
    assert objective.undecided
    assert summary.goodput.met is None


@pytest.mark.parametrize(
    ("term", "code"),
    [
        ("answers", "invalid_value"),
        ("answers:0.9", "invalid_value"),
        ("answers:0%", "out_of_range"),
        ("answers:100%", "out_of_range"),
        ("answers:101%", "out_of_range"),
        ("answers:90%:p95", "invalid_value"),
    ],
)
def test_an_invalid_answers_objective_is_refused(term: str, code: str) -> None:
    with pytest.raises(CombinedError) as refused:
        load("qa", read_flags(slo=(term,), request_rate="1"))
    (error,) = refused.value.errors
    assert error.code == code
    assert "answers:9" in str(error)


FILE = """name: w
slo: SLO
requests:
  classes:
    chat: {weight: 80%, requests: {input_tokens: 60, output_tokens: 40}CLASS_SLO}
    questions: {weight: 20%, requests: {from: questions.jsonl, check_answers: true}}
"""


@pytest.mark.parametrize(
    ("slo", "class_slo", "is_accepted"),
    [
        ("{answers: 95%}", "", True),
        ("{answers: 95%, ttft: 9s}", ", slo: {e2e: 90s}", False),
        ("{answers: 100%}", "", False),
        ("{ttft: 9s}", ", slo: {answers: 95%}", False),
    ],
)
def test_a_workload_file_accepts_an_answers_objective(
    tmp_path: Path, slo: str, class_slo: str, is_accepted: bool
) -> None:
    write_questions(tmp_path)
    file = tmp_path / "w.yaml"
    file.write_text(FILE.replace("CLASS_SLO", class_slo).replace("SLO", slo))
    options = ("--request-rate", "20", "-n", "1000", "--seed", "1", "-o", str(tmp_path / "run"))
    exit_code = exits("run", file, "--url", "sim:gb300-vm", *options)
    assert exit_code == (0 if is_accepted else 2)
    if is_accepted:
        summary = run_folder.read_summary(tmp_path / "run")
        assert read_objective(summary).met is True
        assert summary.goodput.met is True


def test_a_search_confirms_the_load_up_to_which_answers_are_correct(tmp_path: Path) -> None:
    preset = tmp_path / "defect.yaml"
    preset.write_text("extends: gb300-vm\nanswers: {wrong: 50%, above_in_flight: 40}\n")
    questions = ("--check-answers", str(write_questions(tmp_path)), "--check-share", "50%")
    search = ("search", "--url", f"sim:{preset}", "--over", "concurrency", "--no-sustain")
    bounds = ("--low", "8", "--high", "128", "-d", "30s", "--seed", "1", "--max-probes", "8")
    lengths = ("--input-tokens", "50", "--output-tokens", "20")
    slo = ("--slo", "answers:90%", "--slo", "ttft:9s")
    exits(*search, *bounds, *lengths, *questions, *slo, "-o", str(tmp_path / "search"))
    result = json.loads((tmp_path / "search" / "search.json").read_text())
    assert 30 < result["answer"]["load"] < 60


def question_options(folder: Path) -> tuple[str, ...]:
    return ("--check-answers", str(write_questions(folder)), "--check-share", "40%")


def test_a_part_of_a_run_with_questions_is_refused_before_its_target_is_probed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = ("--shard", "1/2", "--start-at", "2999-01-01T00:00:00Z", "--seed", "1")
    command = ("run", "qa", "--url", "http://127.0.0.1:9", "--request-rate", "8", *part)
    assert exits(*command, *question_options(tmp_path), "-o", str(tmp_path / "run")) == 2
    printed = capsys.readouterr()
    assert "--check-answers" in printed.err
    assert "Target" not in printed.out + printed.err
    assert not (tmp_path / "run").exists()


SHORT_LOAD = ("-d", "20s", "--request-rate", "8", "--slo", "+answers:95%", "--seed", "1")


def test_repeats_name_the_runs_that_cannot_decide_the_answers_objective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_dir = tmp_path / "repeats"
    command = ("run", "qa", "--url", "sim:gb300-vm", *question_options(tmp_path), *SHORT_LOAD)
    exits(*command, "--repeat", "3", "-o", str(output_dir))
    out = " ".join(capsys.readouterr().out.split())

    undecided_runs = []
    for run_dir in run_folder.runs_in(output_dir):
        summary = run_folder.read_summary(run_dir)
        if summary.goodput.met is None:
            undecided_runs.append(run_dir.name)
            assert read_objective(summary).undecided in out
    assert undecided_runs
    assert f"undecided in {len(undecided_runs)} ({', '.join(undecided_runs)})" in out
    page = tmp_path / "page.html"
    exits("report", str(output_dir), "--html", str(page))
    assert f"undecided in {len(undecided_runs)}" in page.read_text()


@pytest.mark.parametrize("slo", ["answers:95%", "+answers:95%"])
def test_a_sweep_says_how_many_answers_its_load_points_lack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], slo: str
) -> None:
    output_dir = tmp_path / "sweep"
    load_points = ("-c", "8,32", "-n", "150", "--seed", "1", "--slo", slo, "--strict")
    command = ("sweep", "qa", "--url", "sim:gb300-vm", *question_options(tmp_path), *load_points)
    assert exits(*command, "-o", str(output_dir)) == 4
    out = " ".join(capsys.readouterr().out.split())

    assert "too few requests" not in out
    for run_dir in run_folder.runs_in(output_dir):
        assert read_objective(run_folder.read_summary(run_dir)).undecided in out
