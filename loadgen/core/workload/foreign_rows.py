"""Convert rows of data sets of other tools to rows with `prompt` or `messages`.

Recorded responses are separated from what is sent. They only tell how long a response should be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from loadgen.core.format import shortened
from loadgen.core.workload.row_errors import BadRowError, EmptyConversationError

CONVERSATION_FIELDS = ("conversations", "conversation")
"""Fields with a list of turns, as in ShareGPT: {"from": "human", "value": "..."}."""
TURNS_FIELD = "turns"
"""A field with a list of user messages, as in SPEED-Bench, Spec-Bench and MT-Bench."""
PROMPT_FIELDS = ("question", "instruction", "query", "text_input", "user", "input", "text")
SYSTEM_FIELDS = ("system_prompt", "system")
RESPONSE_FIELDS = ("answer", "response", "output", "completion", "generated_text")
CONTINUATION_FIELDS = ("continue_final_message", "add_generation_prompt")
"""Parameters of vLLM and SGLang with which a last message of the assistant is continued."""
ROLE_OF_SPEAKER = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
}
BATCH_FIELDS = {"custom_id", "method", "url", "body"}
"""The fields of a row of a batch file of OpenAI."""

Row = dict[str, Any]


class ConvertedRow(NamedTuple):
    """A row with `prompt` or `messages`, if any of the known names is in it.

    Attributes:
        row: The row, without the recorded response.
        note: What the user is told about the fields that were read, or "". For example "prompts are
            `question`".
        response: The recorded response, or "".
    """

    row: Row
    note: str = ""
    response: str = ""


def convert_row(row: Row) -> ConvertedRow:
    """Convert a row of another tool or data set to the field names of this package.

    The first of these forms that a row has is used:

    1. A row of an OpenAI batch file: the request body in it is sent.
    2. A row with `prompt` or `messages`, as in this package.
    3. A conversation, as in ShareGPT: its first question is sent.
    4. A list of user messages, as in MT-Bench: the first one is sent.
    5. A row with another name for the prompt, such as `question`.

    Any other row is returned as it is. Raises BadRowError if a batch row or conversation has
    mistakes.
    """
    if _is_batch_row(row):
        return ConvertedRow(_batch_body(row), "rows of an OpenAI batch: the field `body` is sent")
    if "prompt" in row or "messages" in row:
        return _separate_recorded_response(row)

    for field in CONVERSATION_FIELDS:
        if isinstance(row.get(field), list):
            return _convert_conversation(row, field)

    first_message = _first_text(row.get(TURNS_FIELD))
    if first_message:
        return _convert_user_messages(row, first_message)

    prompt_field = _first_text_field(row, PROMPT_FIELDS)
    if prompt_field is None:
        return ConvertedRow(row)

    return _convert_prompt(row, prompt_field)


def _is_batch_row(row: Row) -> bool:
    """Return True for a row of a batch file of OpenAI: it has a URL, a body and nothing else."""
    return row.keys() >= {"body", "url"} and row.keys() <= BATCH_FIELDS


def _convert_user_messages(row: Row, first_message: str) -> ConvertedRow:
    """Convert a row with a list of user messages to one whose prompt is the first of them."""
    converted = _without(row, [TURNS_FIELD])
    converted["prompt"] = first_message
    return ConvertedRow(converted, f"the first user message of each list `{TURNS_FIELD}` is sent")


def _convert_conversation(row: Row, field: str) -> ConvertedRow:
    """Convert a row with a conversation to one with the messages up to its first question."""
    question = _find_first_question(row[field], field)
    return ConvertedRow(
        _without(row, [field]) | {"messages": question.messages},
        f"the first question of each conversation (`{field}`) is sent, with the length of its "
        "recorded response",
        question.recorded_response,
    )


def _convert_prompt(row: Row, prompt_field: str) -> ConvertedRow:
    """Convert a row whose prompt is in the field `prompt_field`.

    The row may also have a system prompt, with which it becomes a chat of two messages, and a
    recorded response, whose length the new response should have. A field is used for one of these
    three parts only, because data sets use the same names for different contents.
    """
    prompt = _read_prompt(row, prompt_field)
    quoted_fields = " and ".join(f"`{field}`" for field in prompt.used_fields)
    notes = [f"prompts are {quoted_fields}"]

    # Each call removes the field that it returns from the remaining ones.
    remaining_fields = _without(row, prompt.used_fields)
    system_prompt = _take_text_field(remaining_fields, SYSTEM_FIELDS)
    response = _take_text_field(remaining_fields, RESPONSE_FIELDS)
    if system_prompt is not None:
        notes.append(f"system prompts from `{system_prompt.field}`")
    if response is not None:
        notes.append(f"output lengths from `{response.field}`")

    return ConvertedRow(
        row=remaining_fields | _request_fields(prompt.text, system_prompt),
        note=", ".join(notes),
        response="" if response is None else response.text,
    )


def _request_fields(prompt_text: str, system_prompt: _TextField | None) -> Row:
    """Return the fields of a row that are sent: a prompt, or a chat with a system prompt."""
    if system_prompt is None:
        return {"prompt": prompt_text}
    system_message = {"role": "system", "content": system_prompt.text}
    return {"messages": [system_message, {"role": "user", "content": prompt_text}]}


class _TextField(NamedTuple):
    """The name of a field of a row, and its text."""

    field: str
    text: str


def _take_text_field(row: Row, fields: Iterable[str]) -> _TextField | None:
    """Remove the first of some fields that has a text, and return it, or None if none has."""
    field = _first_text_field(row, fields)
    return None if field is None else _TextField(field, row.pop(field))


class _Prompt(NamedTuple):
    """The text of a prompt, and the fields of the row that it is made of."""

    text: str
    used_fields: list[str]


def _read_prompt(row: Row, prompt_field: str) -> _Prompt:
    """Return the prompt of a row. In Alpaca's data set, an instruction may come with an input."""
    text = row[prompt_field]
    if prompt_field == "instruction" and isinstance(row.get("input"), str):
        return _Prompt(f"{text}\n\n{row['input']}".strip(), ["instruction", "input"])
    return _Prompt(text, [prompt_field])


def _separate_recorded_response(row: Row) -> ConvertedRow:
    """Separate the recorded response of a row with `prompt` or `messages` from what is sent.

    The recorded response must not be sent to the server. Only its length is used, as the length
    that the new response should have. It is the last message if the assistant sent it, unless the
    row asks the server to continue that message. Otherwise it is in a field such as `completion`.
    """
    messages = row.get("messages")
    if _ends_with_response(messages) and not _continues_last_message(row):
        content = messages[-1].get("content")
        return ConvertedRow(
            row=row | {"messages": messages[:-1]},
            note="the response at the end of `messages` is not sent",
            response=content if isinstance(content, str) else "",
        )

    response_field = _first_text_field(row, RESPONSE_FIELDS)
    if response_field is None:
        return ConvertedRow(row)

    return ConvertedRow(
        row=_without(row, [response_field]),
        note=f"output lengths from `{response_field}`",
        response=row[response_field],
    )


def _continues_last_message(row: Row) -> bool:
    """Return True if the server is to continue the last message of a row."""
    extra_body = row.get("extra_body")
    fields = row | extra_body if isinstance(extra_body, dict) else row
    return any(field in fields for field in CONTINUATION_FIELDS)


def _ends_with_response(messages: Any) -> TypeGuard[list[Any]]:
    """Return True if the last of several messages is a complete response of the assistant.

    A single message of the assistant answers nothing, so it is no response. A message with `prefix`
    is only the beginning of a response, which the server continues.
    """
    if not isinstance(messages, list) or len(messages) < 2:
        return False
    last_message = messages[-1]
    if not isinstance(last_message, dict):
        return False
    is_complete = not last_message.get("prefix")
    return last_message.get("role") == "assistant" and is_complete


def _batch_body(row: Row) -> Row:
    """Return the request body in a row of a batch file of OpenAI.

    Raises BadRowError if the URL of the row is not that of a completions API, or if the body is not
    an object.
    """
    url = row["url"]
    body = row["body"]

    is_completions_api = isinstance(url, str) and url.endswith("/completions")
    if not is_completions_api:
        hint = "only rows for /v1/chat/completions or /v1/completions can be sent"
        raise BadRowError("unsupported", f"this is a batch row for {shortened(url)}", hint)

    if not isinstance(body, dict):
        hint = 'write an object, like {"model": "...", "messages": [...]}'
        raise BadRowError("wrong_type", f"body is {shortened(body)}", hint, "body")

    return body


class _Turn(NamedTuple):
    """A turn of a conversation: who speaks (system, user or assistant), and the text."""

    role: str
    text: str


class _FirstQuestion(NamedTuple):
    """The messages up to the first question of a conversation, and the recorded response to it.

    The response is "" if none is recorded.
    """

    messages: list[dict[str, str]]
    recorded_response: str


def _find_first_question(turns: Sequence[object], field: str) -> _FirstQuestion:
    """Return the messages to send for the first question of a conversation, and its response.

    The messages are the system messages before the question, and the question itself, which is the
    first message of the user. Turns without a text, and turns of the assistant before the question,
    are not sent.

    Args:
        turns: The turns of the conversation, as they are in the row.
        field: The name of this list in the row, for error messages.

    Raises:
        BadRowError: A turn has mistakes.
        EmptyConversationError: There is no question.
    """
    turns_to_question = _read_turns_to_question(turns, field)
    messages = [
        {"role": turn.role, "content": turn.text}
        for turn in turns_to_question
        if turn.role != "assistant" and turn.text
    ]

    turns_after_question = _parse_turns(turns, field, first_index=len(turns_to_question))
    recorded_response = _find_response(turns_after_question)
    return _FirstQuestion(messages, recorded_response)


def _parse_turns(turns: Sequence[object], field: str, first_index: int = 0) -> Iterator[_Turn]:
    """Yield the turns of a conversation from `first_index` on.

    A turn is only parsed when it is needed, so that mistakes in turns that are never used are not
    reported. `field` is the name of the list in its row, for error messages.
    """
    for index in range(first_index, len(turns)):
        yield _parse_turn(turns[index], f"{field}[{index}]")


def _read_turns_to_question(turns: Sequence[object], field: str) -> list[_Turn]:
    """Return all turns up to the first question, which is the first user turn with a text.

    The arguments are those of `_parse_turns`. Raises EmptyConversationError if there is no
    question.
    """
    turns_to_question: list[_Turn] = []
    for turn in _parse_turns(turns, field):
        turns_to_question.append(turn)
        if turn.role == "user" and turn.text:
            return turns_to_question

    raise EmptyConversationError("missing_value", "the conversation has no user message")


def _find_response(turns_after_question: Iterator[_Turn]) -> str:
    """Return the recorded response to the first question of a conversation, "" if there is none.

    Further questions before the response are ignored. A conversation with a system message before
    the response cannot be used: the response depends on that message, which is not sent with the
    question. It is left out in the same way as a conversation without a question.

    Raises:
        EmptyConversationError: A system message comes before the response.
        BadRowError: A turn has mistakes.
    """
    for turn in turns_after_question:
        if turn.role == "assistant":
            return turn.text

        has_system_message = turn.role == "system" and turn.text != ""
        if has_system_message:
            _check_remaining_turns(turns_after_question)
            raise EmptyConversationError("missing_value", "the conversation has no user message")

    return ""


def _check_remaining_turns(unparsed_turns: Iterator[_Turn]) -> None:
    """Raise BadRowError if one of the remaining turns of a conversation has mistakes.

    A conversation that is left out is only skipped silently if all its turns are valid. The
    iterator parses each turn that it yields, so iterating over it is the check.
    """
    for _ in unparsed_turns:
        pass


def _parse_turn(turn: object, path: str) -> _Turn:
    """Return the role and the text of a turn of a conversation.

    `path` says where the turn is in its row, such as `conversations[2]`, for error messages. Raises
    BadRowError if the turn is no object, its speaker is not known, or what it says is no text.
    """
    if not isinstance(turn, Mapping):
        hint = 'like {"from": "human", "value": "Hello"}'
        raise BadRowError("wrong_type", f"{path} is {shortened(turn)}", hint, path)

    speaker = turn.get("from", turn.get("role"))
    role = ROLE_OF_SPEAKER.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        hint = f"known: {', '.join(ROLE_OF_SPEAKER)}"
        raise BadRowError(
            "unknown_name", f"{path} is from the unknown speaker {shortened(speaker)}", hint, path
        )

    text = turn.get("value", turn.get("content"))
    if not isinstance(text, str):
        raise BadRowError("wrong_type", f"{path} says {shortened(text)}", "a text", path)

    return _Turn(role, text)


def _first_text_field(row: Row, fields: Iterable[str]) -> str | None:
    """Return the first of some fields that has a text which is not empty, or None."""
    for field in fields:
        if isinstance(row.get(field), str) and row[field]:
            return field
    return None


def _first_text(value: object) -> str:
    """Return the first item of a list of texts, or "" for anything else."""
    if not isinstance(value, list) or not value:
        return ""
    return value[0] if all(isinstance(item, str) for item in value) else ""


def _without(row: Row, fields: Sequence[str]) -> Row:
    """Return a copy of a row without some fields."""
    return {name: value for name, value in row.items() if name not in fields}
