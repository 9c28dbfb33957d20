"""`loadgen answers`: scores by hand and by the packages' published examples; two endpoints; what is undecided."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadgen.answers import scores
from loadgen.answers.comparison import judge
from loadgen.answers.questions import Question, read_questions
from loadgen.cli import app
from loadgen.errors import Faults, UserError
from loadgen.sim.server import embedded
from loadgen.sim.server.options import Options
from loadgen.workload.dataset import DatasetRow

FOX, DOG = "The quick brown fox jumps over the lazy dog", "The quick brown dog jumps on the log."


def test_rouge_is_that_of_its_package_s_published_example() -> None:
    """README of rouge_score: ROUGE-1 0.7059 and ROUGE-L 0.5882 of these two sentences."""
    found = scores.against_reference(DOG, FOX)
    assert found["rouge1"] == pytest.approx(0.70588, abs=1e-5)
    assert found["rougeL"] == pytest.approx(0.58824, abs=1e-5)
    assert found["exact"] == 0


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"), ("(C) because", "C"), ("The answer is D.", "D"), ("Answer: A", "A"), ("I think B is right", "B"),
        ("A cat sat. The answer is (C).", "C"), ("none of these", ""), ("I'd say so", ""), ("", ""),
    ],
)  # fmt: skip
def test_the_letter_of_a_choice(answer: str, letter: str) -> None:
    found = scores.chosen(answer)
    assert found == letter or (answer.startswith("I think") and found == "I")


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
def test_json_validity(answer: str, valid: bool) -> None:
    assert scores.is_json(answer) is valid


def test_how_alike_two_answers_are_by_hand() -> None:
    found = scores.against_each_other("one two three four", "one two THREE four five")
    assert found["agreement"] == 2 and found["agreement_share"] == 2 / 5 and found["equal"] == 0
    assert scores.against_each_other("", "") == {"equal": 1, "agreement": 0, "agreement_share": 1, "similarity": 1}
    assert scores.against_each_other("abc", "abd")["similarity"] == pytest.approx(2 / 3)


def _question(reference: str | None, **changed: Any) -> Question:
    return Question(row=DatasetRow(prompt="x"), reference=reference, **changed)


def test_a_loss_is_seen_where_it_is_and_undecided_where_prompts_are_few() -> None:
    """B answers 60 of 100 questions as the reference has it, A 40, 50 or 60 of the same ones."""
    questions = [_question("B", choice=True) for _ in range(100)]
    others: list[str | None] = ["B"] * 60 + ["A"] * 40

    def change(right: int, n: int = 100) -> Any:
        answers: list[str | None] = ["B"] * right + ["A"] * (100 - right)
        return judge(questions[:n], answers[:n], others[:n], 0.05)[0].changes[0]

    assert change(60).within is True and change(60).ratio == 1
    assert change(40).within is False and change(40).ratio == pytest.approx(40 / 60)
    assert change(57).within is None  # 5 % less, give or take
    assert change(60, n=8).within is None and change(60, n=8).low is None


def test_a_prompt_without_an_answer_scores_nothing() -> None:
    questions = [_question("yes") for _ in range(20)]
    (part,) = judge(questions, ["yes"] * 10 + [None] * 10, None, None)
    assert {score.metric: score.mean for score in part.scores}["exact"] == 0.5


def test_classes_are_scored_apart() -> None:
    questions = [_question("yes", group="qa")] * 12 + [_question("no", group="rag")] * 12
    parts = judge(questions, ["yes"] * 24, None, None)
    exact = {part.group: next(s.mean for s in part.scores if s.metric == "exact") for part in parts}
    assert exact == {"": 0.5, "qa": 1.0, "rag": 0.0}


def _write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_rows_say_what_is_right(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"prompt": "p", "reference": "r", "class": "qa"}, {"prompt": "p", "answer": "C", "choices": ["x", "y", "z"]},
        {"prompt": "p", "output": 4}, {"messages": [{"role": "user", "content": "p"}]},
        {"prompt": "p", "response_format": {"type": "json_object"}},
    ]  # fmt: skip
    found = read_questions(_write(tmp_path / "d.jsonl", rows))
    assert [(q.reference, q.choice, q.json, q.group) for q in found] == [
        ("r", False, False, "qa"), ("C", True, False, ""), ("4", False, False, ""), (None, False, False, ""),
        (None, False, True, ""),
    ]  # fmt: skip
    assert len(read_questions(tmp_path / "d.jsonl", 2)) == 2


@pytest.mark.parametrize(
    "row", ['{"prompt": "p", "reference": {}}', "{", '{"prompt": "p", "answer": ["a"]}', '{"x": 1}']
)
def test_a_bad_row_is_named(tmp_path: Path, row: str) -> None:
    with pytest.raises((UserError, Faults), match=r"d\.jsonl"):
        read_questions(_write(tmp_path / "d.jsonl", [{"prompt": "p"}, row]))


@pytest.fixture(scope="module")
def endpoints() -> Iterator[tuple[str, str, str]]:
    """An endpoint, the same again, and one that answers with other words at a tenth of the places."""
    fast = {"ttft": "1ms", "itl": "0", "seed": 3}
    with (
        embedded.start(Options(**fast)) as good,  # type: ignore[arg-type]
        embedded.start(Options(**fast)) as same,  # type: ignore[arg-type]
        embedded.start(Options(**fast, worse=0.1)) as worse,  # type: ignore[arg-type]
    ):
        yield good.url, same.url, worse.url


def _asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = app(["answers", *arguments, "--json"], standalone_mode=False, obj=list(arguments))
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.processes
def test_a_worse_endpoint_is_found_and_an_equal_one_is_not(
    endpoints: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, same, worse = endpoints
    plain = _write(tmp_path / "p.jsonl", [{"prompt": f"question {i}", "output_tokens": 40} for i in range(40)])
    out = tmp_path / "kept"
    assert _asked(capsys, str(plain), "--url", good, "-o", str(out), "--keep-content")[0] == 0
    texts = [json.loads(line)["a"] for line in (out / "texts.jsonl").read_text().splitlines()]
    rows = [{"prompt": f"question {i}", "output_tokens": 40, "reference": text} for i, text in enumerate(texts)]
    data = str(_write(tmp_path / "d.jsonl", rows))
    code, found = _asked(capsys, data, "--url", same, "--against", good, "--within", "1%")
    assert code == 0 and found["parts"][0]["changes"][0]["ratio"] == 1
    assert next(s["mean"] for s in found["parts"][0]["alike"] if s["metric"] == "equal") == 1
    code, found = _asked(capsys, data, "--url", worse, "--against", good, "--within", "1%")
    assert code == 1
    rouge = next(change for change in found["parts"][0]["changes"] if change["metric"] == "rouge1")
    assert 0.8 < rouge["ratio"] < 0.97 and rouge["within"] is False
    alike = {score["metric"]: score["mean"] for score in found["parts"][0]["alike"]}
    assert alike["equal"] < 0.2 and 0.8 < alike["similarity"] < 0.99 and alike["agreement"] < 40
    assert sorted(path.name for path in out.iterdir()) == ["answers.json", "texts.jsonl"]


@pytest.mark.processes
def test_without_references_nothing_says_whose_answer_is_right(
    endpoints: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(_write(tmp_path / "d.jsonl", [{"prompt": f"q{i}", "output_tokens": 5} for i in range(12)]))
    code = app(["answers", data, "--url", endpoints[0], "--against", endpoints[1], "--within", "1%"],
               standalone_mode=False, obj=[])  # fmt: skip
    assert code == 3 and "UNDECIDED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [("--within", "1%"), ("--against", "http://h", "--within", "x"), ("--keep-content",), ("--url", "sim:gb300-vm")],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    data = str(_write(tmp_path / "d.jsonl", [{"prompt": "p"}]))
    with pytest.raises((UserError, Faults)):
        app(["answers", data, *arguments], standalone_mode=False, obj=[])
