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
    """Return what is known about the right response to the question in a row.

    Args:
        row: The decoded row of the file.
        row_number: Its number, from 1.

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
            tools = _read_tools(row)
            called_tool = read_reference(row) or ""
            return KnownAnswer(check=check, row=row_number, tools=tools, expected=called_tool)
        case "json":
            example = read_reference(row) or ""
            schema = _read_schema(row)
            return KnownAnswer(check=check, row=row_number, schema=schema, expected=example)
        case "exact" | "choice":
            right_answer = read_reference(row)
            if right_answer is None:
                hint = f"add the right answer as one of {', '.join(REFERENCE_KEYS)}"
                raise BadRowError("missing_key", "the row has no right answer", hint)
            return KnownAnswer(check=check, row=row_number, expected=right_answer)


def _choose_check(row: Mapping[str, Any]) -> CheckKind:
    """Return the kind of check of a row: the one that it names, or the one that its keys imply.

    Raises BadRowError if the row names an unknown check, or implies none.
    """
    named_check = row.get("check")
    if named_check is not None:
        if named_check not in CHECK_KINDS:
            problem = f"check is {named_check!r}"
            hint = f"use one of {', '.join(CHECK_KINDS)}"
            raise BadRowError("unknown_name", problem, hint, "check")
        return _as_check_kind(named_check)

    if row.get(RECORDED_KEY) is not None:
        return "similarity"
    if row.get("tools"):
        return "tool_call"
    if requests_json(row) or row.get("schema") is not None:
        return "json"

    reference = read_reference(row)
    if reference is None:
        hint = "add the right answer, for example as answer, or recorded reference_responses"
        raise BadRowError("missing_key", "the row has no known answer", hint)
    return "choice" if is_choice_letter(row, reference) else "exact"


def _as_check_kind(name: str) -> CheckKind:
    """Return the name of a check with its type."""
    return next(kind for kind in CHECK_KINDS if kind == name)


def requests_json(row: Mapping[str, Any]) -> bool:
    """Return True if a row requests a response in JSON."""
    response_format = row.get("response_format")
    if not isinstance(response_format, Mapping):
        return False
    return response_format.get("type") in JSON_FORMATS


def is_choice_letter(row: Mapping[str, Any], reference: str) -> bool:
    """Return True if the right answer of a row is the letter of a choice.

    It is if the row lists choices, or if the answer is a single capital letter.
    """
    is_letter = len(reference) == 1 and reference.isupper()
    return bool(row.get("choices")) or is_letter


def read_reference(row: Mapping[str, Any]) -> str | None:
    """Return the right answer of a row as text, or None if it has none.

    It is the value of the first key in REFERENCE_KEYS that is not null. A number becomes a text.

    Raises:
        BadRowError: The value is neither a string nor a number.
    """
    for key in REFERENCE_KEYS:
        value = row.get(key)
        if value is not None:
            return _reference_to_text(value, key)
    return None


def _reference_to_text(value: object, key: str) -> str:
    """Return a right answer as text. Raises BadRowError if it is neither a string nor a number.

    `key` is the key of the value in the row, for the error. A boolean is refused, although it is an
    integer in Python, because its text "True" is unlikely to be an answer.
    """
    if isinstance(value, str):
        return value

    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number:
        return str(value)

    raise BadRowError(
        "wrong_type",
        f"{key} must be a text",
        "use the right answer, or the letter of a choice",
        key,
    )


def _read_references(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the recorded responses of a reference endpoint. Raises BadRowError if there are none.

    A row without recorded responses may have its reference response under one of REFERENCE_KEYS.
    """
    recorded = row.get(RECORDED_KEY)
    if recorded is None:
        reference = read_reference(row)
        recorded = [] if reference is None else [reference]

    is_list_of_texts = isinstance(recorded, list) and all(
        isinstance(text, str) for text in recorded
    )
    if not is_list_of_texts or not recorded:
        problem = f"{RECORDED_KEY} must be a list of at least one text"
        hint = "record them: loadgen answers FILE --url REFERENCE --record NEW_FILE"
        raise BadRowError("wrong_type", problem, hint, RECORDED_KEY)
    return tuple(recorded)


def _read_schema(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the JSON Schema of a response, or None if it only has to be JSON.

    It is the value of `schema`, or that of `response_format` as OpenAI's API defines it.
    """
    schema = row.get("schema")
    if schema is None and isinstance(row.get("response_format"), Mapping):
        wrapper = row["response_format"].get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if schema is None:
        return None
    if not isinstance(schema, dict):
        raise BadRowError("wrong_type", "schema must be an object", "write a JSON Schema", "schema")
    return schema


def _read_tools(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schemas of the arguments of all tools that a row offers, by name.

    Raises BadRowError if the row offers no tool, or if a tool has no name.
    """
    tools = row.get("tools")
    schemas: dict[str, dict[str, Any]] = {}
    for tool in tools if isinstance(tools, list) else []:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, dict) else {}

    if not schemas:
        problem = "the row has no tools whose call could be checked"
        hint = 'add tools: [{"type": "function", "function": {"name": ..., "parameters": {...}}}]'
        raise BadRowError("missing_key", problem, hint, "tools")
    return schemas
