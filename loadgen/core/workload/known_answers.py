"""Known answers: what the response to a question of a file must be, and how it is checked.

A row of the file has a prompt or messages, as every data set, and what is known about the right
response. The key `check` names the kind of check. Without it, the other keys of the row decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from loadgen.core.workload.row_errors import BadRowError

CheckKind = Literal["exact", "choice", "json", "tool_call", "similarity"]
CHECK_KINDS: tuple[CheckKind, ...] = get_args(CheckKind)
CHECK_NAMES: dict[CheckKind, str] = {
    "exact": "exact match",
    "choice": "right choice",
    "json": "valid JSON",
    "tool_call": "valid tool call",
    "similarity": "same as reference",
}
"""The names of the checks in reports."""

REFERENCE_KEYS = ("reference", "answer", "output", "response", "target")
"""Keys under which data sets have the right answer. The first one that a row has counts."""

RECORDED_KEY = "reference_responses"
"""The key of the responses that a reference endpoint gave, as `loadgen answers --record` writes."""

CHECK_KEY = "check"
"""The key of the kind of check."""
SCHEMA_KEY = "schema"
"""The key of the JSON Schema that responses have to fit."""
TOOLS_KEY = "tools"
"""The key of the tools that the model may call."""

CHOICE_LETTERS = tuple("ABCDEFGHIJ")
"""The letters of choices that a response can name."""

JSON_FORMATS = ("json_object", "json_schema")
"""Values of `response_format.type` that request JSON."""


class KnownAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known about the right response to one question.

    Attributes:
        check: How a response is checked.
        row: The number of the row in its file, from 1.
        expected: The right answer, the letter of the right choice, the name of the tool that has to
            be called ("" for any tool), or an example of the right JSON ("" if there is none).
        schema: The JSON Schema of the response. None if it only has to be JSON.
        tools: The JSON Schema of the arguments of each tool, by the name of the tool.
        references: The responses of a reference endpoint to this question.
    """

    check: CheckKind
    row: int
    expected: str = ""
    schema: dict[str, Any] | None = None
    tools: dict[str, dict[str, Any]] = {}
    references: tuple[str, ...] = ()


def parse_known_answer(row: Mapping[str, Any], row_number: int) -> KnownAnswer:
    """Return the right response to the question in a row of a file, and how to check responses.

    Args:
        row: The decoded JSON row. Its keys decide the kind of check.
        row_number: The number of the row in the file, from 1.

    Raises:
        BadRowError: The row has nothing to check a response by, or a value has a wrong type.
    """
    if not isinstance(row, Mapping):
        hint = 'write an object with a prompt and an answer: {"prompt": "...", "answer": "..."}'
        raise BadRowError("wrong_type", "the row is not a JSON object", hint)

    check = _choose_check(row)
    match check:
        case "similarity":
            return KnownAnswer(check=check, row=row_number, references=_read_references(row))
        case "tool_call":
            return _parse_tool_call(row, row_number)
        case "json":
            return _parse_json_answer(row, row_number)
        case "exact" | "choice":
            return _parse_right_answer(row, row_number, check)


def _parse_tool_call(row: Mapping[str, Any], row_number: int) -> KnownAnswer:
    """Return the known answer of a question whose response has to call a tool.

    The right answer of the row is the name of the tool. A row without one accepts any of its tools.

    Raises:
        BadRowError: The row has no tools, or the right one is not among them.
    """
    tools = _read_tools(row)
    expected_tool = read_reference(row) or ""
    _check_tool_is_offered(expected_tool, tools)
    return KnownAnswer(check="tool_call", row=row_number, tools=tools, expected=expected_tool)


def _parse_json_answer(row: Mapping[str, Any], row_number: int) -> KnownAnswer:
    """Return the known answer of a question whose response has to be JSON.

    A row may have a JSON Schema of the response. Its right answer, if any, is only an example.

    Raises:
        BadRowError: The schema or the example has a wrong type.
    """
    example = read_reference(row) or ""
    schema = _read_schema(row)
    return KnownAnswer(check="json", row=row_number, schema=schema, expected=example)


def _parse_right_answer(row: Mapping[str, Any], row_number: int, check: CheckKind) -> KnownAnswer:
    """Return the known answer of a question with one right text, or with one right choice.

    Raises:
        BadRowError: The row has no right answer, or one that is not the letter of a choice.
    """
    right_answer = read_reference(row)
    if right_answer is None:
        hint = f"add the right answer as one of {', '.join(REFERENCE_KEYS)}"
        raise BadRowError("missing_key", "the row has no right answer", hint)

    if check == "choice":
        _check_choice_letter(right_answer)
    return KnownAnswer(check=check, row=row_number, expected=right_answer)


def _check_tool_is_offered(expected_tool: str, tools: Mapping[str, object]) -> None:
    """Check that the tool which a response has to call is one of the tools of its request.

    Args:
        expected_tool: The name of the right tool, or "" if any tool is right.
        tools: The tools of the request, by name.

    Raises:
        BadRowError: The right tool is no tool of the request, so no response could be right.
    """
    if expected_tool and expected_tool not in tools:
        problem = f'the right tool "{expected_tool}" is none of the tools of the row'
        hint = f"use one of these names as answer: {', '.join(tools)}"
        raise BadRowError("unknown_name", problem, hint)


def _check_choice_letter(right_answer: str) -> None:
    """Check that the right answer of a choice is a letter that responses can be searched for.

    Raises:
        BadRowError: The right answer is no letter from A to J, so no response could be right.
    """
    if not _is_choice_letter(right_answer):
        problem = f'the right answer "{right_answer}" is not the letter of a choice'
        hint = 'use a letter from A to J, or compare the whole text with "check": "exact"'
        raise BadRowError("invalid_value", problem, hint)


def _is_choice_letter(right_answer: str) -> bool:
    """Return True if a right answer is a letter from A to J, which responses can name."""
    return right_answer.strip().upper() in CHOICE_LETTERS


def _choose_check(row: Mapping[str, Any]) -> CheckKind:
    """Return how responses to the question in a row are checked.

    The key `check` names the kind of check. Without this key, the other keys of the row decide.

    Raises:
        BadRowError: The row names an unknown check, or has no known answer.
    """
    named_check = row.get(CHECK_KEY)
    if named_check is not None:
        return _parse_check_kind(named_check)
    return _infer_check(row)


def _infer_check(row: Mapping[str, Any]) -> CheckKind:
    """Return the kind of check that fits the keys of a row which names none.

    Recorded responses are compared, tools have to be called, and a response in JSON has to be
    valid. In a row without any of these keys, the right answer is the letter of a choice, or a text
    that the response has to be equal to.

    Raises:
        BadRowError: The row has no known answer.
    """
    has_recorded_responses = row.get(RECORDED_KEY) is not None
    if has_recorded_responses:
        return "similarity"

    has_tools = bool(row.get(TOOLS_KEY))
    if has_tools:
        return "tool_call"

    has_schema = row.get(SCHEMA_KEY) is not None
    if has_schema or requests_json(row):
        return "json"

    right_answer = read_reference(row)
    if right_answer is None:
        hint = f"add the right answer as answer, or {SCHEMA_KEY}, {TOOLS_KEY} or {RECORDED_KEY}"
        raise BadRowError("missing_key", "the row has no known answer", hint)

    is_choice = looks_like_choice(row, right_answer) and _is_choice_letter(right_answer)
    return "choice" if is_choice else "exact"


def _parse_check_kind(name: object) -> CheckKind:
    """Return the kind of check with a name.

    Raises:
        BadRowError: The name is unknown.
    """
    for kind in CHECK_KINDS:
        if kind == name:
            return kind

    problem = f"check is {name!r}"
    hint = f"use one of {', '.join(CHECK_KINDS)}"
    raise BadRowError("unknown_name", problem, hint, CHECK_KEY)


def requests_json(row: Mapping[str, Any]) -> bool:
    """Return True if a row requests a response in JSON."""
    response_format = row.get("response_format")
    if not isinstance(response_format, Mapping):
        return False
    return response_format.get("type") in JSON_FORMATS


def looks_like_choice(row: Mapping[str, Any], reference: str) -> bool:
    """Return True if the question in a row probably has choices with letters, such as "B".

    It lists choices, or its right answer is a single capital letter.
    """
    has_choices = bool(row.get("choices"))
    is_capital_letter = len(reference) == 1 and reference.isupper()
    return has_choices or is_capital_letter


def read_reference(row: Mapping[str, Any]) -> str | None:
    """Return the right answer of a row as text, or None if the row has no right answer.

    The first key of REFERENCE_KEYS that has a value counts. A number is returned as text.

    Raises:
        BadRowError: The value is neither a string nor a number.
    """
    for key in REFERENCE_KEYS:
        value = row.get(key)
        if value is not None:
            return _reference_to_text(value, key)
    return None


def _reference_to_text(value: object, key: str) -> str:
    """Return a right answer as text.

    Args:
        value: The right answer.
        key: The key of the value in its row, for the error.

    Raises:
        BadRowError: The value is neither a string nor a number.
    """
    if isinstance(value, str):
        return value

    # A boolean is an integer in Python, but its text "True" is unlikely to be an answer.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number:
        return str(value)

    raise BadRowError(
        "wrong_type",
        f"{key} must be a text",
        "use the right answer, the letter of a choice, or the name of a tool",
        key,
    )


def _read_references(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the responses to compare with: the recorded responses, or else the right answer.

    Raises:
        BadRowError: The row has neither, or the recorded responses are no list of texts.
    """
    references = row.get(RECORDED_KEY)
    if references is None:
        right_answer = read_reference(row)
        references = [] if right_answer is None else [right_answer]

    is_list = isinstance(references, list)
    has_only_texts = is_list and all(isinstance(text, str) for text in references)
    if not has_only_texts or not references:
        problem = f"{RECORDED_KEY} must be a list of at least one text"
        hint = "record them: loadgen answers FILE --url REFERENCE --record NEW_FILE"
        raise BadRowError("wrong_type", problem, hint, RECORDED_KEY)

    return tuple(references)


def _read_schema(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the JSON Schema that responses have to fit, or None if any JSON is right.

    The schema is the value of `schema`, or `response_format.json_schema.schema` as in requests of
    OpenAI's API.

    Raises:
        BadRowError: The schema is not a JSON object.
    """
    schema = row.get(SCHEMA_KEY)
    if schema is None:
        response_format = _as_mapping(row.get("response_format"))
        schema_format = _as_mapping(response_format.get("json_schema"))
        schema = schema_format.get("schema")

    if schema is None:
        return None

    if not isinstance(schema, dict):
        problem = "schema must be an object"
        raise BadRowError("wrong_type", problem, "write a JSON Schema", SCHEMA_KEY)

    return schema


def _as_mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON value if the value is an object, or else an empty object."""
    return value if isinstance(value, Mapping) else {}


def _read_tools(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of the arguments of each tool of a row, by the name of the tool.

    A tool is written as in OpenAI's API: {"function": {"name": ..., "parameters": schema}}. A tool
    without a name is ignored.

    Raises:
        BadRowError: The row has no tool with a name.
    """
    tools = row.get(TOOLS_KEY)
    if not isinstance(tools, list):
        tools = []

    schema_by_tool: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = _as_mapping(_as_mapping(tool).get("function"))
        name = function.get("name")
        if isinstance(name, str):
            parameters = function.get("parameters")
            schema_by_tool[name] = parameters if isinstance(parameters, dict) else {}

    if not schema_by_tool:
        problem = "the row has no tools whose call could be checked"
        hint = 'add tools: [{"type": "function", "function": {"name": ..., "parameters": {...}}}]'
        raise BadRowError("missing_key", problem, hint, TOOLS_KEY)

    return schema_by_tool
