"""Tests of `loadgen answers`: scores, two endpoints, and verdicts that stay undecided."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import exits
from expected_errors import refused
from golden import check_golden
from msgspec.structs import replace
from scripted_server import events, serving
from servers import start

from loadgen.answers import scores
from loadgen.answers.answers_text import report
from loadgen.answers.comparison import AnswersResult, score_prompts, summarize_scores
from loadgen.answers.completions import (
    Completions,
    check_same_tokenizer,
    describe_token_difference,
)
from loadgen.answers.questions import Question, read_questions
from loadgen.bundle.bundle_writer import write_bundle
from loadgen.bundle.verification import verify_bundle
from loadgen.cli.app import run_command_line
from loadgen.contracts.loading import load_contract
from loadgen.contracts.run import ValidationOptions, run_validation
from loadgen.contracts.stored_validation import judge_again
from loadgen.core.errors import CombinedError, TargetError, UserError
from loadgen.core.execution.plan import Settings
from loadgen.core.execution.run import execute
from loadgen.core.results import checksums
from loadgen.core.workload import Workload
from loadgen.core.workload.dataset_rows import DatasetRow
from loadgen.render import text as as_text
from loadgen.sim.server.options import Options

FOX, DOG = "The quick brown fox jumps over the lazy dog", "The quick brown dog jumps on the log."


def test_rouge_equals_the_published_example_of_its_package() -> None:
    """README of rouge_score: ROUGE-1 0.7059 and ROUGE-L 0.5882 of these two sentences."""
    similarity = scores.score_against_reference(DOG, FOX)
    assert similarity["rouge1"] == pytest.approx(0.70588, abs=1e-5)
    assert similarity["rougeL"] == pytest.approx(0.58824, abs=1e-5)
    assert similarity["exact"] == 0


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("(C) because", "C"),
        ("The answer is D.", "D"),
        ("Answer: A", "A"),
        ("I think B is right", "B"),
        ("A cat sat. The answer is (C).", "C"),
        ("none of these", ""),
        ("I'd say so", ""),
        ("", ""),
    ],
)
def test_find_choice_returns_the_letter_of_an_answer(answer: str, letter: str) -> None:
    choice = scores.find_choice(answer)
    assert choice == letter or (answer.startswith("I think") and choice == "I")


@pytest.mark.parametrize(
    ("answer", "valid"),
    [
        ('{"a": 1}', True),
        ("```json\n[1]\n```", True),
        ("1", True),
        ("{'a': 1}", False),
        ("", False),
        ("[" * 10**5, False),
    ],
)
def test_the_json_score_is_one_for_valid_json_only(answer: str, valid: bool) -> None:
    assert scores.is_json(answer) is valid


def test_the_similarity_of_two_answers_equals_values_computed_by_hand() -> None:
    pair_scores = scores.score_pair("one two three four", "one two THREE four five")

    assert (
        pair_scores["agreement"] == 2
        and pair_scores["agreement_share"] == 2 / 5
        and pair_scores["equal"] == 0
    )
    assert scores.score_pair("", "") == {
        "equal": 1,
        "agreement": 0,
        "agreement_share": 1,
        "similarity": 1,
    }
    assert scores.score_pair("abc", "abd")["similarity"] == pytest.approx(2 / 3)


def _question(reference: str | None, **changes: Any) -> Question:
    return Question(row=DatasetRow(prompt="x"), reference=reference, **changes)


def test_a_quality_loss_is_detected_with_many_prompts_and_undecided_with_few() -> None:
    """B answers 60 of 100 questions as the reference has it, A 40, 50 or 60 of the same ones."""
    questions = [_question("B", is_choice=True) for _ in range(100)]
    other_answers: list[str | None] = ["B"] * 60 + ["A"] * 40

    def change(right: int, n: int = 100) -> Any:
        answers: list[str | None] = ["B"] * right + ["A"] * (100 - right)
        return summarize_scores(score_prompts(questions[:n], answers[:n], other_answers[:n]), 0.05)[
            0
        ].ratios[0]

    assert change(60).is_within_loss is True and change(60).ratio == 1
    assert change(40).is_within_loss is False and change(40).ratio == pytest.approx(40 / 60)
    assert change(57).is_within_loss is None  # 5 % less, give or take
    assert change(60, n=8).is_within_loss is None and change(60, n=8).low is None


def test_a_prompt_without_an_answer_has_a_score_of_zero() -> None:
    questions = [_question("yes") for _ in range(20)]
    (part,) = summarize_scores(score_prompts(questions, ["yes"] * 10 + [None] * 10, None))
    assert {score.metric: score.mean for score in part.scores}["exact"] == 0.5


def test_each_request_class_is_scored_separately() -> None:
    questions = [_question("yes", group="qa")] * 12 + [_question("no", group="rag")] * 12
    parts = summarize_scores(score_prompts(questions, ["yes"] * 24, None))
    exact = {part.group: next(s.mean for s in part.scores if s.metric == "exact") for part in parts}
    assert exact == {"": 0.5, "qa": 1.0, "rag": 0.0}


def _write(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def test_the_keys_of_a_row_define_its_expected_answer(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"prompt": "p", "reference": "r", "class": "qa"},
        {"prompt": "p", "answer": "C", "choices": ["x", "y", "z"]},
        {"prompt": "p", "output": 4},
        {"messages": [{"role": "user", "content": "p"}]},
        {"prompt": "p", "response_format": {"type": "json_object"}},
    ]
    questions = read_questions(_write(tmp_path / "d.jsonl", rows))

    assert [(q.reference, q.is_choice, q.wants_json, q.group) for q in questions] == [
        ("r", False, False, "qa"),
        ("C", True, False, ""),
        ("4", False, False, ""),
        (None, False, False, ""),
        (None, False, True, ""),
    ]
    assert len(read_questions(tmp_path / "d.jsonl", 2)) == 2


@pytest.mark.parametrize(
    "row", ['{"prompt": "p", "reference": {}}', "{", '{"prompt": "p", "answer": ["a"]}', '{"x": 1}']
)
def test_an_invalid_row_of_questions_is_refused_with_its_file(tmp_path: Path, row: str) -> None:
    with pytest.raises((UserError, CombinedError), match=r"d\.jsonl"):
        read_questions(_write(tmp_path / "d.jsonl", [{"prompt": "p"}, row]))


@pytest.fixture(scope="module")
def endpoints() -> Iterator[tuple[str, str, str]]:
    """Yield the URLs of an endpoint, of an equal one, and of one with 10 % other words."""
    fast = {"ttft": "1ms", "itl": "0", "seed": 3}
    with (
        start(Options(**fast)) as good_server,  # type: ignore[arg-type]
        start(Options(**fast)) as same,  # type: ignore[arg-type]
        start(Options(**fast, worse=0.1)) as worse_server,  # type: ignore[arg-type]
    ):
        yield good_server.url, same.url, worse_server.url


def run_answers_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = run_command_line(["answers", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.processes
def test_a_worse_endpoint_is_detected_and_an_equal_one_is_not(
    endpoints: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, same, worse = endpoints
    plain = _write(
        tmp_path / "p.jsonl", [{"prompt": f"question {i}", "output_tokens": 40} for i in range(40)]
    )
    out = tmp_path / "kept"

    assert (
        run_answers_command(capsys, str(plain), "--url", good, "-o", str(out), "--keep-content")[0]
        == 0
    )

    texts = [json.loads(line)["a"] for line in (out / "texts.jsonl").read_text().splitlines()]
    rows = [
        {"prompt": f"question {i}", "output_tokens": 40, "reference": text}
        for i, text in enumerate(texts)
    ]
    data = str(_write(tmp_path / "d.jsonl", rows))
    code, document = run_answers_command(
        capsys, data, "--url", same, "--against", good, "--within", "1%"
    )

    assert code == 4, "40 equal answers do not show that fewer than 1 of 100 are lost"

    code, document = run_answers_command(
        capsys, data, "--url", same, "--against", good, "--within", "10%"
    )

    assert code == 0 and document["parts"][0]["changes"][0]["ratio"] == 1
    assert next(s["mean"] for s in document["parts"][0]["alike"] if s["metric"] == "equal") == 1

    code, document = run_answers_command(
        capsys, data, "--url", worse, "--against", good, "--within", "1%"
    )

    assert code == 1

    rouge = next(
        change for change in document["parts"][0]["changes"] if change["metric"] == "rouge1"
    )

    assert 0.8 < rouge["ratio"] < 0.97 and rouge["within"] is False
    alike = {score["metric"]: score["mean"] for score in document["parts"][0]["alike"]}
    assert alike["equal"] < 0.2 and 0.8 < alike["similarity"] < 0.99 and alike["agreement"] < 40
    assert sorted(path.name for path in out.iterdir()) == [
        "answers.json",
        "scores.jsonl",
        "texts.jsonl",
    ]


@pytest.mark.processes
def test_two_endpoints_without_references_are_compared_but_not_ranked(
    endpoints: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(
        _write(tmp_path / "d.jsonl", [{"prompt": f"q{i}", "output_tokens": 5} for i in range(12)])
    )
    code = run_command_line(
        ["answers", data, "--url", endpoints[0], "--against", endpoints[1], "--within", "1%"]
    )
    assert code == 4 and "UNDECIDED" in capsys.readouterr().out


def test_the_interval_of_a_perfect_score_includes_failures_that_few_prompts_may_miss() -> None:
    """With 100 equal pairs, up to 3.6 % of all responses may still differ (0.025 ** (1 / 100))."""
    questions = [_question("yes") for _ in range(100)]
    (part,) = summarize_scores(score_prompts(questions, ["yes"] * 100, ["yes"] * 100), 0.05)
    change = part.ratios[0]
    assert (change.ratio, change.high) == (1, 1) and change.low == pytest.approx(0.025**0.01)
    assert change.is_within_loss is True
    rouge = part.scores[0]
    assert (rouge.mean, rouge.high) == (1, 1) and rouge.low == pytest.approx(0.025**0.01)


def test_prompts_that_one_endpoint_did_not_answer_are_excluded_for_both() -> None:
    """B answers 15 of 20, all right; A all 20, all wrong for B's 15. Nothing is A's gain."""
    questions = [_question("yes") for _ in range(20)]
    (part,) = summarize_scores(
        score_prompts(questions, ["no"] * 15 + ["yes"] * 5, ["yes"] * 15 + [None] * 5), 0.05
    )
    exact = next(change for change in part.ratios if change.metric == "exact")
    assert (exact.count, exact.ratio) == (15, 0)
    equal = next(score for score in part.similarity if score.metric == "equal")
    assert (equal.count, equal.mean) == (15, 0)


def test_two_tokenizers_are_reported_and_token_ids_are_refused() -> None:
    completions = [
        Completions("m", ["x", "y"], tokens, [], [None, None])
        for tokens in ([10, 20], [12, 21], [None, 20])
    ]

    assert describe_token_difference(completions[0], completions[1]).startswith("A counts 30 ")
    assert (
        describe_token_difference(completions[0], completions[2])
        == ""
        == describe_token_difference(completions[0], completions[0])
    )

    choice = {"text": "x", "finish_reason": "stop", "index": 0}
    responses = [
        events({"choices": [choice], "usage": {"prompt_tokens": count, "completion_tokens": 1}})
        for count in (30, 41)
    ]
    ids = [Question(row=DatasetRow(prompt=[1, 2, 3]))]
    with serving(responses[0]) as server, serving(responses[1]) as other:
        ends = [Settings(url=url, model="m", server="openai") for url in (server.url, other.url)]
        check_same_tokenizer(*ends, [_question("text")])
        with refused(UserError, "mismatch") as exc_info:
            check_same_tokenizer(*ends, ids)
        assert "A counts 30 tokens" in exc_info.value.message


@pytest.mark.parametrize("url", ["foo", "http://127.0.0.1:9", "http://h:99999"])
def test_answers_of_an_unreachable_endpoint_are_refused(tmp_path: Path, url: str) -> None:
    data = str(_write(tmp_path / "d.jsonl", [{"prompt": "p", "reference": "r"}]))
    with pytest.raises((TargetError, CombinedError)):
        run_command_line(["answers", str(data), "--url", url])


# -- contracts -------------------------------------------------------------------------------------

CONTRACT = """\
name: fp4
levels:
  - {name: l, workload: qa, rate: 8/s, requests: 3000, must: [{tpot: {limit: 60ms, at: p50}}]}
answers:
  dataset: d.jsonl
  must:
"""


def _contract(folder: Path, *terms: str, more: str = "") -> Path:
    (folder / "c.yaml").write_text(
        CONTRACT + "".join(f"    - {term}\n" for term in terms) + more + "horizon: 12s\n"
    )
    return folder / "c.yaml"


ROWS = [
    {"prompt": f"q{i}", "reference": "r", "class": ("qa", "rag")[i % 2], "output_tokens": 20}
    for i in range(120)
]


@pytest.mark.parametrize(
    ("term", "code"),
    [
        ("rougel: 44%", "unknown_name"),
        ("within: 1%", "wrong_type"),
        ("within: {of: ttft, limit: 1%}", "unknown_name"),
        ("exact: 100%", "out_of_range"),
        ("within: {of: rougeL, limit: 10%}", "missing_option"),
        ("choice: 50%", "missing_key"),
        ("exact: {share: 50%, class: rga}", "unknown_name"),
        ("exact: 99%", "too_few"),
        ("within: {of: exact, limit: 1%}", "too_few"),
    ],
)
def test_an_answer_term_that_cannot_be_proved_is_refused(
    tmp_path: Path, term: str, code: str
) -> None:
    _write(tmp_path / "d.jsonl", ROWS)
    with refused(CombinedError, code, where="c.yaml:7:"):
        load_contract(
            _contract(tmp_path, term), env={}, has_other_endpoint=code != "missing_option"
        )


@pytest.mark.parametrize("data", [None, '{"prompt": "p", "reference": {}}', "{"])
def test_a_contract_with_an_invalid_data_set_is_refused_with_its_location(
    tmp_path: Path, data: str | None
) -> None:
    if data is not None:
        _write(tmp_path / "d.jsonl", [data])
    with pytest.raises(CombinedError) as exc_info:
        load_contract(_contract(tmp_path, "exact: 50%"), env={})
    assert "d.jsonl" in str(exc_info.value) or "c.yaml:5:12" in str(exc_info.value)


@pytest.mark.processes
def test_a_contract_about_answers_is_validated_and_bundled(
    endpoints: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The load runs in virtual time, and the prompts go to two servers over HTTP."""
    good, _, worse = endpoints
    _write(tmp_path / "d.jsonl", ROWS)
    run_answers_command(
        capsys,
        str(tmp_path / "d.jsonl"),
        "--url",
        good,
        "-o",
        str(tmp_path / "kept"),
        "--keep-content",
    )
    texts = [
        json.loads(line)["a"] for line in (tmp_path / "kept/texts.jsonl").read_text().splitlines()
    ]
    _write(
        tmp_path / "d.jsonl",
        [{**row, "reference": text} for row, text in zip(ROWS, texts, strict=True)],
    )
    file = _contract(
        tmp_path,
        "within: {of: rougeL, limit: 20%}",
        "within: {of: rouge2, limit: 5%}",
        "equal: 90%",
        "agreement: 3",
        "exact: {share: 15%, class: rag}",
        more="  should: [exact: 90%]\n",
    )
    settings = Settings(url=worse, server_metrics=("off",))

    def perform(workload: Workload, settings: Settings) -> Any:
        return execute(workload, replace(settings, url="sim:gb300-vm"))

    checked = load_contract(file, env={}, has_other_endpoint=True)
    options = ValidationOptions(execute=perform, show_status=str)
    validation, folder = run_validation(
        checked, settings, tmp_path / "out", options, Settings(url=good)
    )
    level = validation.levels[1]
    assert level.name == "answers" and level.requests == level.ok == 120
    assert [term.verdict for term in level.terms] == [
        "PASS",
        "FAIL",
        "FAIL",
        "PASS",
        "INCONCLUSIVE",
        "FAIL",
    ], level
    assert validation.verdict == "FAIL" and validation.levels[0].verdict == "PASS"
    rouge = level.terms[0]
    assert (
        rouge.value is not None and 3 < rouge.value < 20 and (rouge.limit, rouge.unit) == (20, "%")
    )
    assert judge_again(folder) == validation
    page = (folder / "verdict.html").read_text()
    assert "FAIL" in page and "rougeL" in page
    assert 'classname="answers"' in (folder / "junit.xml").read_text()
    bundle_path = tmp_path / "poc.zip"
    write_bundle(folder, bundle_path)
    assert verify_bundle(bundle_path).verified == "all"
    scores_file = folder / "answers/scores.jsonl"
    scores_file.write_text(scores_file.read_text().replace('"equal":0.0', '"equal":1.0'))
    checksums.write(folder)
    write_bundle(folder, tmp_path / "forged.zip")
    forged = verify_bundle(tmp_path / "forged.zip")
    assert forged.verified == "no"
    assert {mismatch.file for mismatch in forged.differences} >= {
        "result/answers/answers.json",
        "result/verdict.json",
    }
    assert write_bundle(tmp_path / "kept", tmp_path / "a.zip").omitted_files.keys() == {
        "texts.jsonl"
    }
    write_bundle(tmp_path / "kept", tmp_path / "b.zip", with_texts=True)
    verification = verify_bundle(tmp_path / "b.zip")
    assert verification.verified == "all" and {
        checked_file.file for checked_file in verification.reproduced
    } == {
        "answers.json",
        "scores.jsonl",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ("--within", "1%"),
        ("--against", "http://h", "--within", "x"),
        ("--keep-content",),
        ("--url", "sim:gb300-vm"),
    ],
)
def test_contradicting_options_of_answers_are_refused(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    data = str(_write(tmp_path / "d.jsonl", [{"prompt": "p"}]))
    with pytest.raises((UserError, CombinedError)):
        run_command_line(["answers", data, *arguments])


def test_the_report_of_answers_equals_the_stored_text() -> None:
    questions = [_question("yes", group="qa")] * 30 + [_question("no", group="rag")] * 30
    prompts = score_prompts(questions, ["yes"] * 60, ["yes"] * 55 + ["no"] * 5)
    result = AnswersResult(
        dataset="questions.jsonl",
        url="http://a:8000/v1",
        model="llama-fp4",
        other_url="http://b:8000/v1",
        other_model="llama-bf16",
        prompts=60,
        failed=0,
        allowed_loss=0.01,
        groups=summarize_scores(prompts, 0.01),
    )
    check_golden("answers_brief", as_text.render(report(result)))
    check_golden("answers_full", as_text.render(report(result), full=True))


def test_options_of_endpoint_b_without_its_url_name_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    assert exits("answers", prompts, "--url", "http://127.0.0.1:1", "--against-model", "m") == 2
    error = capsys.readouterr().err
    assert "--against-model" in error
    assert "--within" not in error
