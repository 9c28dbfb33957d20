"""Answers checked inside the measured load: from the command to the files, in virtual time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import servers
from command_line import exits

from loadgen.answers.questions import read_questions
from loadgen.core import run_folder
from loadgen.core.errors import CombinedError, UserError
from loadgen.core.metrics.answer_scores import AnswerScores
from loadgen.core.results.answer_files import RecordedResponse, WrongAnswer
from loadgen.core.results.json_files import decode_json_lines
from loadgen.core.workload import read_flags
from loadgen.core.workload.loading import load_from_options
from loadgen.search import sweep_kind
from loadgen.sim.server.options import Options

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def write_questions(path: Path, copies: int = 10) -> Path:
    """Write questions of every kind of check."""
    rows = []
    for number in range(copies):
        reference = " ".join(f"word{number}x{index}" for index in range(20))
        rows += [
            {"prompt": f"What is {number} + {number}?", "answer": 2 * number},
            {"prompt": f"Choose {number}. A: yes, B: no", "answer": "B"},
            {"prompt": f"As JSON {number}", "schema": SCHEMA},
            {"prompt": f"Call a tool {number}", "tools": [TOOL]},
            {"prompt": f"Tell a story {number}", "reference_responses": [reference, reference]},
        ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_preset(folder: Path, answers: str) -> str:
    """Write a simulated server whose responses have defects, and return its URL."""
    path = folder / "defect.yaml"
    path.write_text(f"extends: gb300-vm\nanswers: {answers}\n")
    return f"sim:{path}"


def run(tmp_path: Path, url: str, *options: str) -> AnswerScores:
    """Run a load of 100 virtual users with questions, and return the scores in its summary."""
    questions = write_questions(tmp_path / "questions.jsonl")
    fixed = ("-c", "100", "-n", "2000", "--seed", "1", "--input-tokens", "50")
    lengths = ("--output-tokens", "20", "--check-answers", str(questions))
    exits("run", "--url", url, *fixed, *lengths, "-o", str(tmp_path / "run"), *options)
    scores = run_folder.read_summary(tmp_path / "run").answers
    assert scores is not None
    return scores


def test_a_correct_model_has_a_score_of_one_for_every_kind_of_check(tmp_path: Path) -> None:
    scores = run(tmp_path, "sim:gb300-vm", "--check-share", "20%")
    assert scores.overall.score == 1.0
    assert 330 < scores.overall.checked < 470  # 20 % of 2,000
    assert scores.questions == 50
    assert {part.name for part in scores.checks} == {
        "exact",
        "choice",
        "json",
        "tool_call",
        "similarity",
    }
    assert scores.reference is not None
    assert not scores.reference.is_different


def test_every_kind_of_check_detects_corrupted_responses(tmp_path: Path) -> None:
    scores = run(tmp_path, write_preset(tmp_path, "{wrong: 100%}"))
    assert scores.overall.correct == 0
    assert all(part.correct == 0 for part in scores.checks)
    with (tmp_path / "run" / "wrong_answers.jsonl").open("rb") as lines:
        wrong = list(decode_json_lines(lines, WrongAnswer))
    assert len(wrong) == scores.overall.checked
    exact = next(answer for answer in wrong if answer.check == "exact")
    assert exact.expected.isdigit()
    assert exact.response != exact.expected
    codes = [code.code for code in run_folder.read_summary(tmp_path / "run").verdict.warning_codes]
    assert "answers_all_wrong" in codes


def test_another_model_differs_from_the_reference(tmp_path: Path) -> None:
    url = write_preset(tmp_path, "{changed_words: 100%}")
    scores = run(tmp_path, url, "--check-share", "30%")
    assert scores.reference is not None
    assert scores.reference.is_different
    codes = [code.code for code in run_folder.read_summary(tmp_path / "run").verdict.warning_codes]
    assert "answers_differ_from_reference" in codes


def test_a_sweep_detects_corruption_above_a_load(tmp_path: Path) -> None:
    questions = write_questions(tmp_path / "questions.jsonl")
    url = write_preset(tmp_path, "{wrong: 10%, above_in_flight: 64}")
    options = ("-c", "32,128", "-n", "3000", "--seed", "1", "--check-answers", str(questions))
    lengths = ("--input-tokens", "50", "--output-tokens", "20", "--check-share", "20%")
    exits("sweep", "--url", url, *options, *lengths, "-o", str(tmp_path / "sweep"))
    curve = sweep_kind.load(tmp_path / "sweep").curve
    assert curve.answers is not None
    assert curve.answers.is_worse
    assert curve.answers.below.score == 1.0
    points = {point.name: point.answers for point in curve.load_points}
    assert points["c32"] is not None
    assert points["c32"].overall.score == 1.0
    assert points["c128"] is not None
    assert 0.85 < points["c128"].overall.score < 0.95
    header, *rows = (tmp_path / "sweep" / "curve.csv").read_text().splitlines()
    column = header.split(",").index("answers_right")
    assert rows[0].split(",")[column] == "1"


def test_a_bundle_without_texts_contains_the_scores(tmp_path: Path) -> None:
    scores = run(tmp_path, write_preset(tmp_path, "{wrong: 10%}"))
    folder = tmp_path / "run"
    for name in ("known_answers.jsonl", "wrong_answers.jsonl"):
        (folder / name).unlink()
    assert run_folder.summary(folder).answers == scores


def test_the_responses_of_a_killed_run_are_checked_when_it_is_read(tmp_path: Path) -> None:
    """A killed run has no outcomes of checks, but what its workers have recorded until then."""
    run(tmp_path, "sim:gb300-vm")
    folder = tmp_path / "run"
    outcomes = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    outcomes = [outcome for outcome in outcomes if outcome["check"] == "exact"]
    for name in ("answers.jsonl", "wrong_answers.jsonl", "summary.json"):
        (folder / name).unlink()
    (folder / "spool").mkdir()
    responses = [
        RecordedResponse(slot=outcome["slot"], question=outcome["question"], text="no number")
        for outcome in outcomes
    ]
    lines = b"".join(msgspec.json.encode(response) + b"\n" for response in responses)
    (folder / "spool" / "w0.answers").write_bytes(lines + b'{"slot": 3, "quest')
    scores = run_folder.summary(folder).answers
    assert scores is not None
    assert scores.overall.checked == len(responses)
    assert scores.overall.correct == 0


def test_outcomes_before_a_damaged_line_of_the_file_are_read(tmp_path: Path) -> None:
    run(tmp_path, "sim:gb300-vm")
    path = tmp_path / "run" / "answers.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]) + b"no json\n" + b"".join(lines[5:]))
    scores = run_folder.summary(tmp_path / "run").answers
    assert scores is not None
    assert scores.overall.checked == 5


def test_a_run_without_a_request_has_no_score(tmp_path: Path) -> None:
    run(tmp_path, "sim:gb300-vm")
    folder = tmp_path / "run"
    shutil.rmtree(folder / "requests")
    (folder / "answers.jsonl").unlink()
    scores = run_folder.summary(folder).answers
    assert scores is not None
    assert (scores.overall.checked, scores.overall.score) == (0, None)


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ("", ()),
        ('{"prompt": "What?"}\n', ()),
        ('{"prompt": "What?", "answer": "x", "check": "poem"}\n', ()),
        ('{"prompt": "What?", "schema": {"type": "nothing"}}\n', ()),
        ('{"prompt": "What?", "answer": "x"}\n', ("--check-share", "0%")),
        ('{"prompt": "What?", "answer": "x"}\n', ("--check-share", "100%")),
        ('{"prompt": "What?", "answer": "x"}\n', ("--check-share", "many")),
        (None, ()),
        (None, ("--check-share", "5%")),
    ],
)
def test_invalid_questions_and_options_of_answer_checks_are_refused(
    tmp_path: Path, content: str | None, options: tuple[str, ...]
) -> None:
    file = tmp_path / "questions.jsonl"
    if content is not None:
        file.write_text(content)
    url = ("--url", "sim:gb300-vm", "--check-answers", str(file))
    assert exits("run", "qa", *url, "-d", "5s", "-o", str(tmp_path / "out"), *options) == 2


@pytest.mark.parametrize("share", ["0%", "100%"])
def test_the_error_for_a_share_names_the_option_and_its_value(tmp_path: Path, share: str) -> None:
    questions = write_questions(tmp_path / "questions.jsonl")
    options = read_flags(concurrency="2", check_answers=str(questions), check_share=share)
    with pytest.raises(CombinedError) as caught:
        load_from_options("qa", None, options)
    (error,) = caught.value.errors
    assert error.code == "out_of_range"
    assert error.message.startswith(f"--check-share {share} ")


def test_the_hint_for_an_empty_file_of_questions_has_a_valid_example(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(UserError) as caught:
        read_questions(empty)
    assert caught.value.code == "empty_file"

    example = tmp_path / "example.jsonl"
    example.write_text(caught.value.hint.partition("like ")[2] + "\n")
    assert len(read_questions(example)) == 1


def test_a_share_of_checked_answers_without_questions_is_refused(tmp_path: Path) -> None:
    command = ("run", "qa", "--url", "sim:gb300-vm", "-d", "5s", "-o", str(tmp_path / "out"))
    assert exits(*command, "--check-share", "5%") == 2


def test_questions_are_added_to_the_classes_of_a_workload(tmp_path: Path) -> None:
    questions = write_questions(tmp_path / "questions.jsonl")
    options = ("--check-answers", str(questions), "-d", "20s", "--seed", "1")
    exits("run", "mixed", "--url", "sim:gb300-vm", *options, "-o", str(tmp_path / "run"))
    summary = run_folder.read_summary(tmp_path / "run")
    assert summary.answers is not None
    assert summary.answers.overall.checked > 0
    assert "answers" in {part.name for part in summary.classes}
    assert len(summary.classes) > 2


@pytest.mark.processes
def test_a_recorded_reference_detects_a_server_that_corrupts_responses(tmp_path: Path) -> None:
    """Over HTTP: the reference is recorded twice, and then checked in the load of two servers."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"Tell me about {number}.", "max_tokens": 8} for number in range(30)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reference = tmp_path / "reference.jsonl"
    quick = Options(ttft="1ms", itl="0.1ms")
    good = servers.shared(quick)
    assert exits("answers", prompts, "--url", good.url, "--record", reference) == 0

    lengths = ("--input-tokens", "20", "--output-tokens", "4", "-n", "200", "-c", "8")
    checks = ("--check-answers", reference, "--check-share", "50%", "--warmup", "0")
    exits("run", "--url", good.url, *lengths, *checks, "-o", tmp_path / "good")
    scores = run_folder.read_summary(tmp_path / "good").answers
    assert scores is not None
    assert scores.overall.checked > 60
    assert scores.overall.score == 1.0
    assert not list((tmp_path / "good").glob("spool/*"))

    with servers.start(msgspec.structs.replace(quick, faults="corrupt:0.5")) as bad:
        exits("run", "--url", bad.url, *lengths, *checks, "-o", tmp_path / "bad")
    scores = run_folder.read_summary(tmp_path / "bad").answers
    assert scores is not None
    assert scores.overall.score is not None
    assert 0.25 < scores.overall.score < 0.75
    assert scores.reference is not None
    assert scores.reference.is_different


@pytest.mark.processes
def test_recording_a_reference_without_a_response_is_refused(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello", "max_tokens": 4}\n')
    with servers.start(Options(ttft="1ms", itl="0.1ms", faults="truncate@1:1")) as server:
        command = ("answers", prompts, "--url", server.url, "--record", tmp_path / "out.jsonl")
        assert exits(*command) == 3
        assert exits(*command, "--within", "1%") == 2
    assert not (tmp_path / "out.jsonl").exists()
