"""Parse and check one row of a data set.

A row has `prompt` or `messages`, or the field names of other tools and data sets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from loadgen.core.errors import closest
from loadgen.core.format import shortened
from loadgen.core.units import MOST_TOKENS
from loadgen.core.workload.data_files import is_conversation
from loadgen.core.workload.extra_body import find_refused_fields
from loadgen.core.workload.foreign_rows import convert_row
from loadgen.core.workload.row_errors import BadRowError

EXACT_LENGTH_FIELDS = (
    "output_tokens",  # vLLM's custom data sets
    "output_tokens_count",  # GuideLLM
    "output_token_count",
    "output_length",  # AIPerf, Mooncake
    "output_len",  # SGLang, vLLM
    "expected_output_len",  # vLLM's SampleRequest
    "target_output_tokens",
    "num_output_tokens",
    "completion_tokens",  # recorded usage
    "generated_tokens",
    "osl",
)
"""Fields for the exact output length of a row, as data sets and tools call it."""
LENGTH_LIMIT_FIELDS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",  # OpenAI's Responses API
    "max_new_tokens",  # Hugging Face, TGI
    "max_gen_len",
    "n_predict",  # llama.cpp
)
"""Fields for an upper bound of the output length of a row."""
LENGTH_FIELDS = (*EXACT_LENGTH_FIELDS, *LENGTH_LIMIT_FIELDS)


class FieldType(NamedTuple):
    """The type of a field: a description for error messages, and the type itself."""

    description: str
    type: Any


BODY_FIELDS: dict[str, FieldType] = {
    "chat_template_kwargs": FieldType("an object", dict),
    "frequency_penalty": FieldType("a number", float),
    "guided_json": FieldType("an object or a text", dict | str),
    "logit_bias": FieldType("an object", dict),
    "min_p": FieldType("a number", float),
    "min_tokens": FieldType("an integer", int),
    "parallel_tool_calls": FieldType("true or false", bool),
    "presence_penalty": FieldType("a number", float),
    "priority": FieldType("an integer", int),
    "reasoning_effort": FieldType("a text", str),
    "response_format": FieldType("an object", dict),
    "seed": FieldType("an integer", int),
    "stop": FieldType("a text or a list of texts", str | list[str]),
    "temperature": FieldType("a number", float),
    "tool_choice": FieldType("a text or an object", str | dict),
    "tools": FieldType("a list of objects", list[dict[str, Any]]),
    "top_k": FieldType("an integer", int),
    "top_p": FieldType("a number", float),
}
"""Body fields of the OpenAI API that are copied from a row into the request body."""

KNOWN_FIELDS = ("prompt", "messages", *LENGTH_FIELDS, *BODY_FIELDS, "extra_body")

FINISH_REASONS = frozenset(
    {
        "stop",
        "length",
        "content_filter",
        "tool_calls",
        "function_call",
        "end_turn",
        "max_tokens",
        "stop_sequence",
        "tool_use",
        "tool_call",
        "eos",
        "eos_token",
        "model_length",
        "abort",
    }
)
"""Names of the reasons why a response ends, of OpenAI, Anthropic, TGI, vLLM and Mistral."""

Text = Annotated[str, Meta(min_length=1)]
TokenIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
PROMPT_TYPE = FieldType("a non-empty text or a list of token IDs", Text | TokenIds)
LENGTH_TYPE = FieldType(
    f"an integer from 1 to {MOST_TOKENS:,}", Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
)
EXTRA_BODY_TYPE = FieldType("an object", dict)
MESSAGES_HINT = 'like [{"role": "user", "content": "Hello"}]'


class DatasetRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a data set. Exactly one of `messages` and `prompt` is set.

    Attributes:
        messages: The messages of a chat.
        prompt: A text or token ids.
        output_tokens: The requested output tokens, or None if the row has no length.
        is_exact_length: Whether they are the exact length and not an upper bound.
        extra: Further fields of the request body.
        ignored_fields: Fields of the row that are not sent.
        recorded_response: The recorded response, which tells how long the response should be.
        conversion_note: A sentence about fields that were read under other names, or "".
    """

    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    output_tokens: int | None = None
    is_exact_length: bool = False
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    ignored_fields: tuple[str, ...] = ()
    recorded_response: str = ""
    conversion_note: str = ""


class _OutputLength(NamedTuple):
    """The output tokens that a row requests, None for no length, and whether they are exact."""

    tokens: int | None
    is_exact: bool


def parse_row(line: bytes) -> DatasetRow:
    """Parse and check one line of a JSONL file.

    Field names of other tools are converted first. Fields with unknown names are not sent. Their
    names are in `ignored_fields`, so that the user can be told.

    Raises BadRowError if the row has mistakes, and EmptyConversationError if it is a conversation
    without a question.
    """
    decoded_row = wrap_conversation(_decode_line(line))
    if not isinstance(decoded_row, dict):
        hint = 'write {"prompt": "..."} or {"messages": [...]}'
        raise BadRowError("wrong_type", "the row is not a JSON object", hint)

    converted = convert_row(decoded_row)
    row = converted.row
    _check_has_prompt(row)

    output_length = _output_length(row)
    is_chat = "messages" in row
    return DatasetRow(
        messages=_check_messages(row["messages"]) if is_chat else None,
        prompt=None if is_chat else _convert_value(row["prompt"], "prompt", PROMPT_TYPE),
        output_tokens=output_length.tokens,
        is_exact_length=output_length.is_exact,
        extra=_extra_fields(row),
        ignored_fields=tuple(field for field in row if field not in KNOWN_FIELDS),
        recorded_response=converted.response,
        conversion_note=converted.note,
    )


def is_finish_reason(value: object) -> bool:
    """Return True if the `stop` of a row is a recorded finish reason and not a stop sequence."""
    return isinstance(value, str) and value in FINISH_REASONS


def wrap_conversation(row: Any) -> Any:
    """Return a row that is a list of messages as an object with these messages, else the row."""
    return {"messages": row} if is_conversation(row) else row


def _decode_line(line: bytes) -> Any:
    """Return the JSON value of a line. Raises BadRowError with the column of a mistake."""
    try:
        # This finds the position of a bad byte in the line. The JSON decoder only says where the
        # byte is in a text inside the line.
        line.decode()
        return msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        column = error.start + 1
        raise BadRowError(
            "wrong_encoding", "not UTF-8", "save the file as UTF-8", column=column
        ) from None
    except RecursionError:
        raise BadRowError("too_large", "nested too deeply") from None
    except msgspec.DecodeError as error:
        raise _describe_syntax_error(str(error)) from None


def _describe_syntax_error(message: str) -> BadRowError:
    """Return the error of a line that is no JSON, by the message of the decoder.

    The decoder has no attribute for the position of a mistake. Its message is, for example, "JSON
    is malformed: invalid character (byte 17)", where bytes are counted from 0. If it has no
    position, the column of the result is 0, and no column is reported.
    """
    position = re.search(r" \(byte (?P<offset>\d+)\)", message)
    column = 0
    if position:
        column = int(position["offset"]) + 1
        message = message.replace(position[0], "")

    message = message.removeprefix("JSON is malformed: ")
    message = message.replace(
        "Input data was truncated", "the line ends before the JSON object is complete"
    )
    hint = "write one JSON object per line"

    return BadRowError("invalid_syntax", f"not JSON: {message}", hint, column=column)


def _check_has_prompt(row: dict[str, Any]) -> None:
    """Raise BadRowError unless a row has exactly one of `prompt` and `messages`.

    A row of a trace, which has lengths in place of a prompt, gets an error of its own.
    """
    if {"timestamp", "input_length"} <= row.keys():
        problem = "this is a row of a trace, not a prompt"
        raise BadRowError("wrong_format", problem, "use --trace FILE to replay a trace")

    if "prompt" in row and "messages" in row:
        problem = "the row has both `prompt` and `messages`"
        raise BadRowError("conflict", problem, "keep exactly one of them")

    if "prompt" not in row and "messages" not in row:
        problem = "the row has neither `prompt` nor `messages`"
        raise BadRowError("missing_key", problem, _hint_for_missing_prompt(row))


def _hint_for_missing_prompt(row: Mapping[str, object]) -> str:
    """Return a hint for a row without a prompt: a name that was mistyped, or all possible names."""
    for field in row:
        similar_name = closest(field, ("prompt", "messages"))
        if similar_name:
            return f'did you mean "{similar_name}"?'
    return (
        "give exactly one of them, or one of the names in common data sets: "
        "conversations, question, instruction, text"
    )


def _output_length(row: dict[str, Any]) -> _OutputLength:
    """Return the output length of a row.

    Raises BadRowError if several fields contradict each other.
    """
    fields = [field for field in LENGTH_FIELDS if row.get(field) is not None]
    if not fields:
        return _OutputLength(None, is_exact=False)

    lengths = [_convert_length(row, field) for field in fields]
    if len(set(lengths)) > 1:
        hint = "output_tokens is the exact length, max_tokens an upper bound"
        raise BadRowError("conflict", f"{' and '.join(fields)} together", hint, fields[0])

    return _OutputLength(lengths[0], is_exact=fields[0] in EXACT_LENGTH_FIELDS)


def _convert_length(row: dict[str, Any], field: str) -> int:
    """Return the output length in a field. 12.0 is the whole number 12. Raises BadRowError."""
    value = row[field]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    length: int = _convert_value(value, field, LENGTH_TYPE)
    return length


def _convert_value(value: Any, field: str, expected: FieldType) -> Any:
    """Return the value of a field, converted to a type. Raises BadRowError if it has another."""
    try:
        return msgspec.convert(value, expected.type)
    except msgspec.ValidationError:
        problem = f"{field} is {shortened(value)}"
        raise BadRowError("wrong_type", problem, expected.description, field) from None


def _check_messages(value: Any) -> list[dict[str, Any]]:
    """Return messages that are valid. Raises BadRowError."""
    if not isinstance(value, list) or not value:
        problem = f"messages is {shortened(value)}"
        raise BadRowError("wrong_type", problem, MESSAGES_HINT, "messages")
    for index, message in enumerate(value):
        _check_message(message, f"messages[{index}]")
    return value


def _check_message(message: object, path: str) -> None:
    """Raise BadRowError unless a message has a role, and content or tool calls."""
    if not isinstance(message, dict):
        raise BadRowError("wrong_type", f"{path} is {shortened(message)}", MESSAGES_HINT, path)

    role = message.get("role")
    if not isinstance(role, str):
        problem = f"{path}.role is {shortened(role)}"
        raise BadRowError("wrong_type", problem, MESSAGES_HINT, f"{path}.role")

    content = message.get("content")
    calls_tools = content is None and "tool_calls" in message
    if not isinstance(content, str | list) and not calls_tools:
        problem = f"{path}.content is {shortened(content)}"
        hint = "a text, or a list of parts"
        raise BadRowError("wrong_type", problem, hint, f"{path}.content")


def _extra_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that a row adds to the request body, those of `extra_body` included.

    Raises BadRowError if a field has another type than the API expects, or is not allowed.
    """
    return _read_body_fields(row) | _read_extra_body(row)


def _read_body_fields(row: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a row that are also fields of the request body, such as `temperature`.

    They are sent as they are written. Raises BadRowError if one has another type than the API
    expects.
    """
    body_fields = {field: value for field, value in row.items() if field in BODY_FIELDS}
    for field, value in body_fields.items():
        _check_type(value, field, BODY_FIELDS[field])
    if is_finish_reason(body_fields.get("stop")):
        # In a recorded response, `stop` is the reason why it ended, and no stop sequence.
        del body_fields["stop"]
    return body_fields


def _check_type(value: object, field: str, expected: FieldType) -> None:
    """Raise BadRowError unless the value of a field can be converted to a type."""
    _convert_value(value, field, expected)


def _read_extra_body(row: dict[str, Any]) -> dict[str, Any]:
    """Return the object `extra_body` of a row, {} without one.

    Raises BadRowError if it is no object or has a field that is not allowed.
    """
    if "extra_body" not in row:
        return {}

    extra_body: dict[str, Any] = _convert_value(row["extra_body"], "extra_body", EXTRA_BODY_TYPE)
    refused_field = next(find_refused_fields(extra_body), None)
    if refused_field is not None:
        path = f"extra_body.{refused_field.name}"
        raise BadRowError("unsupported", refused_field.problem, refused_field.row_hint, path)

    return extra_body
