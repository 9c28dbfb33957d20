"""Check a response against the known answer of its question. Pure.

Every check says whether the response is right. The check against recorded responses of a reference
endpoint also says how far the response agrees with them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from loadgen.core.errors import not_installed
from loadgen.core.workload.known_answers import CheckKind, KnownAnswer

STATED_CHOICE = re.compile(r"(?i:answer|choice|option)\W{0,3}(?:is)?\W{0,3}\b([A-J])\b")
"""A letter after one of three words, with "is" and up to three other characters between them."""
LONE_CHOICE = re.compile(r"(?<![A-Za-z'])([A-J])(?![A-Za-z'])")
"""A letter that is no part of a word, nor of a contraction such as "I'd"."""


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool in a response. `arguments` is JSON as text."""

    name: str
    arguments: str


class ResponseContent(msgspec.Struct, frozen=True, kw_only=True):
    """What a response consists of: its text, and the tool calls in it."""

    text: str
    calls: tuple[ToolCall, ...] = ()


class CheckedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the check of one response.

    Attributes:
        is_correct: Whether the response is right.
        agreement: The fraction of the response before its first difference from the first recorded
            response, counted in words. None for the other kinds of checks.
        reference_agreement: The same fraction for the second recorded response. None if there is
            only one.
    """

    is_correct: bool
    agreement: float | None = None
    reference_agreement: float | None = None


def check_answer(known: KnownAnswer, response: ResponseContent) -> CheckedAnswer:
    """Return whether a response is right, by the kind of check of its question.

    Raises:
        UserError: The package `jsonschema` is needed and not installed.
    """
    check_response = _CHECKS[known.check]
    return check_response(known, response)


def _check_exact(known: KnownAnswer, response: ResponseContent) -> CheckedAnswer:
    """Check that a response is the right answer, apart from case, spaces and a final full stop."""
    is_equal = normalize_text(response.text) == normalize_text(known.expected)
    return CheckedAnswer(is_correct=is_equal)


def _check_choice(known: KnownAnswer, response: ResponseContent) -> CheckedAnswer:
    """Check that a response names the letter of the right choice."""
    is_right = find_choice(response.text) == known.expected.strip().upper()
    return CheckedAnswer(is_correct=is_right)


def _check_json(known: KnownAnswer, response: ResponseContent) -> CheckedAnswer:
    """Check that a response is JSON, and that it fits the schema if the question has one."""
    json_text = _without_fence(response.text)
    return CheckedAnswer(is_correct=_fits_schema(json_text, known.schema))


def _check_tool_call(known: KnownAnswer, response: ResponseContent) -> CheckedAnswer:
    """Check that a response calls the right tool with arguments that fit the tool's JSON Schema.

    If the question names an expected tool, the first call has to be of this tool. All calls have to
    be of tools that the question offers.
    """
    if not response.calls:
        return CheckedAnswer(is_correct=False)

    is_any_tool_right = known.expected == ""
    first_call = response.calls[0]
    is_first_call_right = is_any_tool_right or first_call.name == known.expected

    are_calls_valid = all(_is_valid_call(call, known) for call in response.calls)
    return CheckedAnswer(is_correct=is_first_call_right and are_calls_valid)


def _is_valid_call(call: ToolCall, known: KnownAnswer) -> bool:
    """Return True if a call is of a tool that the question offers, with arguments that fit it."""
    is_known_tool = call.name in known.tools
    if not is_known_tool:
        return False

    arguments_schema = known.tools[call.name]
    return _fits_schema(call.arguments, arguments_schema)


def _check_similarity(known: KnownAnswer, response: ResponseContent) -> CheckedAnswer:
    """Check that a response is equal to a recorded response of a reference endpoint.

    A response that differs agrees up to its first difference, so the result also has the fraction
    of the response that agrees with the first recorded response. If there is a second recorded
    response, the result has the fraction of that one, too. It shows how much the responses of the
    reference endpoint differ from each other.
    """
    first_recorded = known.references[0]
    agreement = measure_agreement(response.text, first_recorded)

    agreement_of_second_recorded = None
    has_second_recorded = len(known.references) > 1
    if has_second_recorded:
        second_recorded = known.references[1]
        agreement_of_second_recorded = measure_agreement(second_recorded, first_recorded)

    return CheckedAnswer(
        is_correct=response.text in known.references,
        agreement=agreement,
        reference_agreement=agreement_of_second_recorded,
    )


_CHECKS: dict[CheckKind, Callable[[KnownAnswer, ResponseContent], CheckedAnswer]] = {
    "exact": _check_exact,
    "choice": _check_choice,
    "json": _check_json,
    "tool_call": _check_tool_call,
    "similarity": _check_similarity,
}


def find_choice(answer: str) -> str:
    """Return the letter from A to J that an answer chooses, or "" if there is no such letter.

    For example, "The answer is (B)" chooses B. Without a word such as "answer", "choice" or
    "option", the first letter that stands alone counts: "C, because ..." chooses C.
    """
    match = STATED_CHOICE.search(answer) or LONE_CHOICE.search(answer)
    return "" if match is None else match[1]


def is_json(answer: str) -> bool:
    """Return True if the whole answer is JSON. A Markdown fence around it is ignored."""
    return _fits_schema(_without_fence(answer), schema=None)


def _without_fence(answer: str) -> str:
    """Return the text inside the Markdown fence around an answer, or the answer without a fence."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?```\s*", answer, re.DOTALL)
    return answer if fenced is None else fenced[1]


def _fits_schema(json_text: str, schema: Mapping[str, Any] | None) -> bool:
    """Return True if a text is JSON and its value fits a JSON Schema, if there is a schema."""
    try:
        value = json.loads(json_text)
    except (ValueError, RecursionError):
        return False

    if not schema:
        return True

    # The validator is cached by the text of the schema, because a dict cannot be a cache key.
    schema_text = json.dumps(schema, sort_keys=True)
    validator = _validator_of(schema_text)
    is_valid: bool = validator.is_valid(value)
    return is_valid


@functools.lru_cache(maxsize=1024)
def _validator_of(schema_text: str) -> Any:
    """Return the validator of a JSON Schema.

    Raises:
        UserError: The package `jsonschema` is not installed.
    """
    validators = _import_validators()
    schema = json.loads(schema_text)
    validator_type = validators.validator_for(schema)
    return validator_type(schema)


def _import_validators() -> Any:
    """Return the module `jsonschema.validators`.

    Raises:
        UserError: The package is not installed.
    """
    try:
        from jsonschema import validators
    except ImportError:
        problem = "checking a JSON Schema needs the package jsonschema"
        raise not_installed(problem, "jsonschema", "loadgen run", "answers") from None
    return validators


def find_schema_problem(known: KnownAnswer) -> str:
    """Return what is wrong with the first invalid JSON Schema of a question, or "".

    A question may have a schema of its response, and a schema of the arguments of each tool.

    Raises:
        UserError: There is a schema, and the package `jsonschema` is not installed.
    """
    possible_schemas = [known.schema, *known.tools.values()]
    schemas = [schema for schema in possible_schemas if schema]
    if not schemas:
        return ""

    validators = _import_validators()
    from jsonschema.exceptions import SchemaError

    for schema in schemas:
        validator_type = validators.validator_for(schema)
        try:
            validator_type.check_schema(schema)
        except SchemaError as error:
            return str(error.message)
    return ""


def measure_agreement(first: str, second: str) -> float:
    """Return the fraction of the longer of two texts before the first difference, in words.

    For example, "a b c d" and "a b x" agree in 2 of 4 words, which is 0.5. Two empty texts agree
    completely.
    """
    first_words = split_words(first)
    second_words = split_words(second)

    longer_length = max(len(first_words), len(second_words))
    if longer_length == 0:
        return 1.0

    equal_words = common_prefix_length(first_words, second_words)
    return equal_words / longer_length


def common_prefix_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many words two texts have in common before their first difference."""
    shorter_length = min(len(first), len(second))
    for index in range(shorter_length):
        if first[index] != second[index]:
            return index
    return shorter_length


def normalize_text(text: str) -> str:
    """Return a text in lower case with single spaces and without a full stop at its end."""
    return " ".join(text.split()).strip(" .").casefold()


def split_words(text: str) -> list[str]:
    """Return the words and punctuation marks of a text."""
    return re.findall(r"\w+|[^\w\s]", text)
