"""`loadgen sim --answers FILE`: the simulated server answers the questions of a file rightly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import servers
from command_line import exits
from hypothesis import given
from hypothesis import strategies as st

from loadgen.core import run_folder
from loadgen.core.errors import CombinedError, UserError
from loadgen.core.metrics.answer_scores import AnswerScores
from loadgen.sim.server.options import Options
from loadgen.sim.server.request_parser import RequestRules, parse_completions_request
from loadgen.sim.server.right_answers import RightAnswers, split_into_tokens

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Say how the weather is.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
ROWS: list[dict[str, Any]] = [
    {"prompt": "What is 1 + 1?", "answer": 2},
    {"prompt": "Choose. A: yes, B: no", "answer": "B"},
    {"prompt": "As JSON", "schema": SCHEMA},
    {"prompt": "Call a tool", "tools": [TOOL], "answer": "weather"},
    {"prompt": "Tell", "reference_responses": ['He said: "No\n\n  way."  É.', "Other."]},
    {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hm?"}]}
    | {"answer": "Two words"},
]
QUICK = Options(ttft="1ms", itl="0.1ms")


def write_questions(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder: Path, options: Options, questions: Path, *further: str) -> AnswerScores:
    """Run a load with questions against a server, and return the scores."""
    lengths = ("--input-tokens", "20", "--output-tokens", "4", "-n", "150", "-c", "8")
    checks = ("--check-answers", questions, "--check-share", "60%", "--warmup", "0")
    with servers.start(options) as server:
        exits("run", "--url", server.url, *lengths, *checks, *further, "-o", folder / "run")
    scores = run_folder.read_summary(folder / "run").answers
    assert scores is not None
    return scores


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flavor", "further"),
    [("trtllm", ()), ("openai", ()), ("openai", ("--no-stream",))],
)
def test_every_kind_of_check_is_right_over_http(
    tmp_path: Path, flavor: str, further: tuple[str, ...]
) -> None:
    questions = write_questions(tmp_path, ROWS)
    options = msgspec.structs.replace(QUICK, api_flavor=flavor, answers=str(questions))
    scores = run(tmp_path, options, questions, *further)
    assert scores.questions == len(ROWS)
    assert {part.name for part in scores.checks} == {
        "exact",
        "choice",
        "json",
        "tool_call",
        "similarity",
    }
    assert scores.overall.score == 1.0


@pytest.mark.processes
def test_the_completions_api_answers_prompts_rightly(tmp_path: Path) -> None:
    questions = write_questions(tmp_path, [row for row in ROWS[:5] if "tools" not in row])
    options = msgspec.structs.replace(QUICK, answers=str(questions))
    assert run(tmp_path, options, questions, "--api", "completions").overall.score == 1.0


@pytest.mark.processes
def test_corrupted_responses_are_wrong_answers(tmp_path: Path) -> None:
    questions = write_questions(tmp_path, ROWS)
    options = msgspec.structs.replace(QUICK, answers=str(questions), faults="corrupt:0.5")
    scores = run(tmp_path, options, questions)
    assert scores.overall.score is not None
    assert 0.25 < scores.overall.score < 0.75


def test_an_answer_ends_at_the_limit_of_output_tokens(tmp_path: Path) -> None:
    rules = RequestRules()
    answers = RightAnswers(str(write_questions(tmp_path, ROWS)), rules)
    body = {"model": "sim", "messages": ROWS[5]["messages"], "max_tokens": 1}
    request = parse_completions_request(msgspec.json.encode(body), "chat", rules)
    answers.answer(request, 0, is_corrupt=False)
    assert (request.answer_tokens, request.finish_reason) == (("Two ",), "length")
    unknown = parse_completions_request(
        msgspec.json.encode({"model": "sim", "prompt": "Something else"}), "completions", rules
    )
    answers.answer(unknown, 0, is_corrupt=False)
    assert unknown.answer_tokens == ()


def test_a_file_that_cannot_be_answered_is_refused(tmp_path: Path) -> None:
    with pytest.raises((UserError, CombinedError)):
        RightAnswers(str(tmp_path / "missing.jsonl"), RequestRules())
    without_answer = write_questions(tmp_path, [{"prompt": "?"}])
    with pytest.raises(CombinedError):
        RightAnswers(str(without_answer), RequestRules())


@given(st.text())
def test_tokens_are_the_whole_text(text: str) -> None:
    tokens = split_into_tokens(text)
    assert tokens
    assert "".join(tokens) == text
