"""What is known about the right response to a question, and how a response is checked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from loadgen.core.workload.answer_checks import (
    CheckedAnswer,
    ResponseContent,
    ToolCall,
    check_answer,
    find_schema_problem,
    measure_agreement,
)
from loadgen.core.workload.known_answers import KnownAnswer, parse_known_answer
from loadgen.core.workload.row_errors import BadRowError

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def check(row: dict[str, Any], text: str = "", calls: tuple[ToolCall, ...] = ()) -> CheckedAnswer:
    known = parse_known_answer({"prompt": "?", **row}, 1)
    return check_answer(known, ResponseContent(text=text, calls=calls))


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"answer": "Paris"}, "exact"),
        ({"answer": 4}, "exact"),
        ({"answer": "B"}, "choice"),
        ({"answer": "b", "choices": ["1", "2"]}, "choice"),
        ({"answer": "2", "choices": ["1", "2"]}, "exact"),
        ({"answer": "K"}, "exact"),
        ({"response_format": {"type": "json_object"}}, "json"),
        ({"schema": PERSON}, "json"),
        ({"tools": [WEATHER]}, "tool_call"),
        ({"reference_responses": ["a", "b"]}, "similarity"),
        ({"answer": "A text.", "check": "similarity"}, "similarity"),
        ({"answer": "B", "check": "exact"}, "exact"),
    ],
)
def test_the_keys_of_a_row_determine_its_kind_of_check(row: dict[str, Any], kind: str) -> None:
    known = parse_known_answer({"prompt": "?", **row}, 7)
    assert known.check == kind
    assert known.row == 7


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({}, "missing_key"),
        ({"check": "poetry", "answer": "x"}, "unknown_name"),
        ({"check": "exact"}, "missing_key"),
        ({"check": "tool_call"}, "missing_key"),
        ({"tools": [{"type": "function"}]}, "missing_key"),
        ({"tools": [WEATHER], "answer": "clock"}, "unknown_name"),
        ({"check": "choice", "answer": "Lima"}, "invalid_value"),
        ({"check": "similarity"}, "wrong_type"),
        ({"reference_responses": [1]}, "wrong_type"),
        ({"reference_responses": []}, "wrong_type"),
        ({"schema": "person"}, "wrong_type"),
        ({"answer": True}, "wrong_type"),
        ([{"role": "user", "content": "Hello"}], "wrong_type"),
    ],
)
def test_a_row_without_a_usable_answer_is_an_error(row: Any, code: str) -> None:
    with pytest.raises(BadRowError) as caught:
        parse_known_answer(row, 1)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("text", "is_correct"),
    [("Paris", True), (" paris. ", True), ("Lyon", False), ("It is Paris", False), ("", False)],
)
def test_an_exact_answer_ignores_case_spaces_and_a_full_stop(text: str, is_correct: bool) -> None:
    assert check({"answer": "Paris"}, text).is_correct is is_correct


@pytest.mark.parametrize(
    ("text", "is_correct"),
    [("B", True), ("The answer is (B).", True), ("A", False), ("that", False), ("", False)],
)
def test_a_choice_is_the_letter_that_a_response_names(text: str, is_correct: bool) -> None:
    assert check({"answer": "B"}, text).is_correct is is_correct


@pytest.mark.parametrize(
    ("text", "is_correct"),
    [
        ('{"name": "Ada", "age": 36}', True),
        ('```json\n{"name": "Ada", "age": 36}\n```', True),
        ('{"name": "Ada"}', False),
        ('{"name": "Ada", "age": "36"}', False),
        ('{"name": "Ada", "age": 36', False),
        ("", False),
    ],
)
def test_json_has_to_fit_the_schema_of_the_question(text: str, is_correct: bool) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    assert check({"response_format": response_format}, text).is_correct is is_correct


def test_json_without_a_schema_only_has_to_be_json() -> None:
    row = {"response_format": {"type": "json_object"}}
    assert check(row, "[1, 2]").is_correct
    assert not check(row, "[1, 2").is_correct


@pytest.mark.parametrize(
    ("calls", "is_correct"),
    [
        ([("weather", {"city": "Bern"})], True),
        ([("weather", {"city": "Bern"}), ("weather", {"city": "Rome"})], True),
        ([("weather", {"city": 3})], False),
        ([("weather", {})], False),
        ([("weather", {"city": "Bern", "day": "today"})], False),
        ([("stocks", {"city": "Bern"})], False),
        ([("weather", {"city": "Bern"}), ("stocks", {})], False),
        ([], False),
    ],
)
def test_a_tool_call_has_to_fit_the_schema_of_its_tool(
    calls: list[tuple[str, Any]], is_correct: bool
) -> None:
    tool_calls = tuple(ToolCall(name, json.dumps(arguments)) for name, arguments in calls)
    assert check({"tools": [WEATHER]}, calls=tool_calls).is_correct is is_correct


def test_a_tool_call_is_correct_only_for_the_expected_tool() -> None:
    other = {"type": "function", "function": {"name": "stocks"}}
    row = {"tools": [WEATHER, other], "answer": "weather"}
    assert not check(row, calls=(ToolCall("stocks", "{}"),)).is_correct
    assert check(row, calls=(ToolCall("weather", '{"city": "Bern"}'),)).is_correct
    assert not check(row, calls=(ToolCall("weather", '{"city": '),)).is_correct


def test_agreement_with_references_is_the_share_before_the_first_difference() -> None:
    row = {"reference_responses": ["a b c d", "a b x d"]}
    checked = check(row, "a b c e")
    assert (checked.is_correct, checked.agreement, checked.reference_agreement) == (
        False,
        0.75,
        0.5,
    )
    assert check(row, "a b x d").is_correct


@pytest.mark.parametrize(
    ("first", "second", "agreement"),
    [("", "", 1.0), ("a", "", 0.0), ("a b", "a b", 1.0), ("a b", "a b c d", 0.5), ("a", "b", 0.0)],
)
def test_agreement_of_two_texts_is_a_fraction_of_the_longer_one(
    first: str, second: str, agreement: float
) -> None:
    assert measure_agreement(first, second) == agreement


def test_an_invalid_json_schema_is_reported() -> None:
    assert find_schema_problem(KnownAnswer(check="json", row=1, schema={"type": "nothing"}))
    assert find_schema_problem(KnownAnswer(check="json", row=1, schema=PERSON)) == ""
    assert find_schema_problem(KnownAnswer(check="exact", row=1, expected="x")) == ""
