"""Convert the rows of a data set to recorded sessions with all of their turns.

A session is recorded in one row, or in one row per message. One row per message is the format of
the agentic data set of MLPerf Endpoints (mlcommons/endpoints,
src/inference_endpoint/dataset_manager/agentic_inference_dataset.py, read on 2026-11-30).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from loadgen.core.format import shortened
from loadgen.core.units import LONGEST_NS, MOST_TOKENS, NS_PER_S
from loadgen.core.workload.dataset_rows import (
    BODY_FIELDS,
    EXACT_LENGTH_FIELDS,
    LENGTH_FIELDS,
)
from loadgen.core.workload.foreign_rows import (
    CONVERSATION_FIELDS,
    ROLE_OF_SPEAKER,
    SYSTEM_FIELDS,
    TURNS_FIELD,
)
from loadgen.core.workload.row_errors import BadRowError, EmptyConversationError

CONVERSATION_ID = "conversation_id"
"""The field of a row that is one message of a session, as in data sets of MLPerf Endpoints."""
METADATA_TYPE = "dataset_metadata"
"""The `_type` of a row of MLPerf Endpoints that describes the data set and is no message."""
MESSAGE_FIELDS = ("content", "name", "tool_calls", "reasoning_content")
"""The fields of a row that are also fields of a message."""
FIELDS_OF_SPEAKER_AND_TEXT = frozenset({"from", "value", "role"})
"""The fields of a message that are replaced when the message is converted to the OpenAI form."""
ROLES_AFTER = {
    "": ("user",),
    "user": ("assistant",),
    "assistant": ("tool", "user"),
    "tool": ("assistant", "user"),
}
"""Which role may follow a role in one row per message, by the rules of MLPerf Endpoints."""

Message = dict[str, Any]

TOOL_CALL_ID_HINT = (
    "write the id of an entry in tool_calls of an earlier message; servers like that of OpenAI "
    "answer such a request with status 400"
)
"""The error is "messages with role 'tool' must be a response to a preceeding message with
'tool_calls'" (simonw/llm, issue 937, 2025-05-12, read on 2026-11-30).
"""


class RecordedTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request of a recorded session, and the response to it.

    Attributes:
        messages: The messages that this turn adds to the conversation.
        response: The recorded response, or None if the data set has none.
        delay_ns: The recorded pause before the turn.
        output_tokens: The requested output tokens, or None if the row has no length.
        is_exact_length: Whether they are the exact length and not an upper bound.
    """

    messages: list[Message]
    response: Message | None = None
    delay_ns: int = 0
    output_tokens: int | None = None
    is_exact_length: bool = False


class Trajectory(msgspec.Struct, frozen=True, omit_defaults=True):
    """A recorded session: the trajectory of an agent, or a conversation.

    Attributes:
        name: Its id in the data set, or "".
        turns: Its requests, at least one.
        extra: Further fields of the body of each request, such as `tools`.
    """

    turns: list[RecordedTurn]
    name: str = ""
    extra: dict[str, Any] = {}


def has_one_message_per_row(row: Mapping[str, Any]) -> bool:
    """Return True if a row is one message of a session, and not a session by itself."""
    return CONVERSATION_ID in row


def is_metadata(row: Mapping[str, Any]) -> bool:
    """Return True if a row describes the data set and is no message."""
    return row.get("_type") == METADATA_TYPE


# -- one row per session -------------------------------------------------------------------------


def parse_session_row(row: Mapping[str, Any]) -> Trajectory:
    """Convert a row that contains a complete conversation to a recorded session.

    The row has a list of user messages (`turns`, as in SPEED-Bench), or a list of all messages
    (`conversations` as in ShareGPT, or `messages`).

    Raises:
        BadRowError: The row contains no conversation, or the conversation has mistakes.
        EmptyConversationError: The conversation has no message of the user.
    """
    turns = _group_into_turns(_read_messages(row))
    if not turns:
        raise EmptyConversationError("missing_value", "the conversation has no user message")

    length = _read_length(row)
    sized_turns = [
        msgspec.structs.replace(turn, output_tokens=length.tokens, is_exact_length=length.is_exact)
        for turn in turns
    ]
    return Trajectory(turns=sized_turns, extra=_read_body_fields(row))


def _read_messages(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a row that contains a complete conversation.

    Raises:
        BadRowError: The row has no conversation, or a message is not valid.
    """
    system_messages = _system_messages(row)
    user_texts = row.get(TURNS_FIELD)
    if isinstance(user_texts, list):
        return [*system_messages, *_read_user_texts(user_texts)]

    for field in (*CONVERSATION_FIELDS, "messages"):
        items = row.get(field)
        if isinstance(items, list):
            messages = [
                _read_message(item, f"{field}[{index}]") for index, item in enumerate(items)
            ]
            _check_tool_results(messages, field)
            return [*system_messages, *messages]

    hint = (
        f"write one row per message with `{CONVERSATION_ID}`, `turn` and `role`, or one row per "
        f"session with `{TURNS_FIELD}`, `conversations` or `messages`"
    )
    raise BadRowError("missing_key", "the row contains no conversation", hint)


def _read_user_texts(texts: list[Any]) -> list[Message]:
    """Return a message of the user for each text of a list.

    Raises:
        BadRowError: An item of the list is no text, or is empty.
    """
    messages = []
    for index, text in enumerate(texts):
        is_valid = isinstance(text, str) and text != ""
        if not is_valid:
            path = f"{TURNS_FIELD}[{index}]"
            raise BadRowError("wrong_type", f"{path} is {shortened(text)}", "a text", path)
        messages.append({"role": "user", "content": text})
    return messages


class ToolCallIds:
    """The ids of the tool calls in a session so far, which the results of tools refer to."""

    def __init__(self) -> None:
        self._ids: set[str] = set()

    def add_calls(self, response: Message) -> None:
        """Add the ids of the tool calls in a response, if it has any."""
        calls = response.get("tool_calls")
        if not isinstance(calls, list):
            return
        for call in calls:
            call_id = call.get("id") if isinstance(call, Mapping) else None
            if isinstance(call_id, str):
                self._ids.add(call_id)

    def check_result(self, message: Message, path: str) -> None:
        """Check that a tool result refers to an earlier tool call.

        A result without an id, as in data sets that do not record them, is accepted.

        Args:
            message: The message of role `tool`.
            path: Where the message is in its row, such as `messages[2]`.

        Raises:
            BadRowError: No earlier tool call of the session has the id.
        """
        call_id = message.get("tool_call_id")
        if call_id is None or call_id in self._ids:
            return
        key = f"{path}.tool_call_id"
        problem = f"{key} is {shortened(call_id)}, but no earlier tool call has this id"
        raise BadRowError("mismatch", problem, TOOL_CALL_ID_HINT, key)


def _check_tool_results(messages: Sequence[Message], field: str) -> None:
    """Check that each tool result in a conversation refers to an earlier tool call.

    Args:
        messages: The messages of the conversation.
        field: The field of the row that has them, for error messages.

    Raises:
        BadRowError: A tool result refers to no earlier tool call.
    """
    call_ids = ToolCallIds()
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            call_ids.check_result(message, f"{field}[{index}]")
        else:
            call_ids.add_calls(message)


def _system_messages(row: Mapping[str, Any]) -> list[Message]:
    """Return the system prompt of a row as a list with one message, or an empty list."""
    for field in SYSTEM_FIELDS:
        text = row.get(field)
        if isinstance(text, str) and text:
            return [{"role": "system", "content": text}]
    return []


def _read_message(item: object, path: str) -> Message:
    """Convert a message of a conversation to the form of the OpenAI API.

    OpenAI's form is `{"role": ..., "content": ...}`, ShareGPT's is `{"from": ..., "value": ...}`.

    Args:
        item: The message, as read from the row.
        path: Where the message is in the row, such as `messages[2]`, for error messages.

    Raises:
        BadRowError: The item is no message, or its role or content is not valid.
    """
    if not isinstance(item, Mapping):
        hint = 'like {"role": "user", "content": "Hello"}'
        raise BadRowError("wrong_type", f"{path} is {shortened(item)}", hint, path)

    role = _read_role(item, path)
    content = _read_content(item, path)
    other_fields = {
        field: value for field, value in item.items() if field not in FIELDS_OF_SPEAKER_AND_TEXT
    }
    return {**other_fields, "role": role, "content": content}


def _read_role(item: Mapping[str, Any], path: str) -> str:
    """Return the role of a message in the OpenAI API, such as "user" for ShareGPT's "human".

    Args:
        item: The message, as read from the row.
        path: Where the message is in the row, for error messages.

    Raises:
        BadRowError: The speaker of the message is unknown.
    """
    speaker = item["from"] if "from" in item else item.get("role")
    if speaker == "tool":
        return "tool"
    if str(speaker) in ROLE_OF_SPEAKER:
        return ROLE_OF_SPEAKER[str(speaker)]

    hint = f"known: {', '.join((*ROLE_OF_SPEAKER, 'tool'))}"
    problem = f"{path} is from the unknown speaker {shortened(speaker)}"
    raise BadRowError("unknown_name", problem, hint, path)


def _read_content(item: Mapping[str, Any], path: str) -> object:
    """Return the content of a message: a text, a list of parts, or None if it only calls tools.

    Args:
        item: The message, as read from the row.
        path: Where the message is in the row, for error messages.

    Raises:
        BadRowError: The content is anything else.
    """
    content = item["value"] if "value" in item else item.get("content")
    has_content = isinstance(content, str | list)
    only_calls_tools = content is None and "tool_calls" in item
    if not has_content and not only_calls_tools:
        raise BadRowError("wrong_type", f"{path} says {shortened(content)}", "a text", path)
    return content


def _group_into_turns(messages: Iterable[Message]) -> list[RecordedTurn]:
    """Split a conversation into turns: the messages up to a response, and the response.

    For example, the messages system, user, assistant, user, assistant are two turns. A message of
    the assistant before the first question is left out, because it answers nothing.
    """
    turns: list[RecordedTurn] = []
    new_messages: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            new_messages.append(message)
        elif _has_question(new_messages):
            turns.append(RecordedTurn(new_messages, message))
            new_messages = []

    if _has_question(new_messages):
        turns += _split_questions(new_messages)
    return turns


def _has_question(messages: list[Message]) -> bool:
    """Return True if any of the messages needs a response, that is, is no system message."""
    return any(message["role"] != "system" for message in messages)


def _split_questions(messages: list[Message]) -> list[RecordedTurn]:
    """Split messages without responses into turns, one for each message that needs a response.

    A system message needs no response, and belongs to the turn of the next message.
    """
    turns: list[RecordedTurn] = []
    new_messages: list[Message] = []
    for message in messages:
        new_messages.append(message)
        if message["role"] != "system":
            turns.append(RecordedTurn(new_messages))
            new_messages = []
    return turns


# -- one row per message -------------------------------------------------------------------------


class SessionBuilder:
    """Collects the rows of one session that has one row per message.

    Attributes:
        name: The id of the session.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._rows = 0
        self._last_role = ""
        self._last_row_calls_tools = False
        self._call_ids = ToolCallIds()
        self._system_prompt = ""
        self._body_fields: dict[str, Any] | None = None
        self._turns: list[RecordedTurn] = []

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Add the next message of the session.

        Raises:
            BadRowError: The message is not valid, or may not follow the one before it.
        """
        role = row.get("role")
        self._check_order(row, role)

        # The first system prompt of any row is that of the session.
        system_prompt = row.get("system")
        if not self._system_prompt and isinstance(system_prompt, str):
            self._system_prompt = system_prompt

        is_response = role == "assistant"
        if is_response:
            response = _read_response(row)
            self._call_ids.add_calls(response)
            self._add_response(response)
        else:
            self._add_turn(row, str(role))

        self._rows += 1
        self._last_role = str(role)
        self._last_row_calls_tools = is_response and bool(row.get("tool_calls"))

    def build(self) -> Trajectory:
        """Return the session that consists of the rows added so far.

        The system prompt becomes the first message of the first turn. There is always a first turn,
        because the first row has to be a message of the user.
        """
        first_turn = self._turns[0]
        later_turns = self._turns[1:]
        if self._system_prompt:
            system_message = {"role": "system", "content": self._system_prompt}
            messages = [system_message, *first_turn.messages]
            first_turn = msgspec.structs.replace(first_turn, messages=messages)

        turns = [first_turn, *later_turns]
        return Trajectory(turns=turns, name=self.name, extra=self._body_fields or {})

    def _check_order(self, row: Mapping[str, Any], role: object) -> None:
        """Check that a row has the next number, and a role that may come next.

        For example, the response of the assistant has to follow a message of the user, and tool
        results have to follow a response that calls tools.

        Raises:
            BadRowError: The number or the role is wrong.
        """
        turn_number = row.get("turn")
        expected_number = self._rows + 1
        if turn_number != expected_number:
            problem = f"turn is {shortened(turn_number)} in row {expected_number} of its session"
            hint = "number the rows of each session 1, 2, 3, ... in order"
            raise BadRowError("unordered", problem, hint, "turn")

        # After a response that calls tools, only their results may follow.
        possible_roles = ROLES_AFTER[self._last_role]
        if self._last_row_calls_tools:
            possible_roles = ("tool",)
        if role not in possible_roles:
            is_first_row = self._last_role == ""
            place = "first" if is_first_row else f"after {self._last_role}"
            problem = f"role is {shortened(role)}, which cannot come {place}"
            raise BadRowError("invalid_value", problem, " or ".join(possible_roles), "role")

    def _add_response(self, response: Message) -> None:
        """Add the recorded response to the last turn."""
        last_turn = self._turns.pop()
        self._turns.append(msgspec.structs.replace(last_turn, response=response))

    def _add_turn(self, row: Mapping[str, Any], role: str) -> None:
        """Add a turn that begins with a question of the user or with the results of tools.

        The first row of a session also has the fields that are the same in all of its requests,
        such as `tools`.
        """
        is_first_turn = self._body_fields is None
        if is_first_turn:
            self._body_fields = _read_body_fields(row)

        messages = self._read_checked_results(row) if role == "tool" else [_read_question(row)]
        length = _read_length(row)
        turn = RecordedTurn(
            messages=messages,
            delay_ns=_read_delay_ns(row),
            output_tokens=length.tokens,
            is_exact_length=length.is_exact,
        )
        self._turns.append(turn)

    def _read_checked_results(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the tool results of a row as messages, one for each result.

        Raises:
            BadRowError: A result is not valid, or refers to no earlier tool call.
        """
        messages = _read_tool_results(row)
        for index, message in enumerate(messages):
            self._call_ids.check_result(message, f"tool_results[{index}]")
        return messages


def read_session_name(row: Mapping[str, Any]) -> str:
    """Return the id of the session that a row belongs to.

    Raises:
        BadRowError: The id is empty, or neither a text nor an integer.
    """
    name = row.get(CONVERSATION_ID)
    is_valid = isinstance(name, str | int) and name != ""
    if not is_valid:
        problem = f"{CONVERSATION_ID} is {shortened(name)}"
        raise BadRowError("wrong_type", problem, "a text that is not empty", CONVERSATION_ID)
    return str(name)


def _read_question(row: Mapping[str, Any]) -> Message:
    """Return the user's message in a row of role "user", as a message of the OpenAI API.

    Raises:
        BadRowError: The message has no content, or content that is neither a text nor a list.
    """
    content = row.get("content")
    has_content = isinstance(content, str | list) and len(content) > 0
    if not has_content:
        problem = f"content is {shortened(content)}"
        hint = "a text, or a list of parts"
        raise BadRowError("wrong_type", problem, hint, key="content")
    return _message_of_row(row)


def _read_response(row: Mapping[str, Any]) -> Message:
    """Return the assistant's response in a row, as a message of the OpenAI API.

    A response that only calls tools has the content None.

    Raises:
        BadRowError: The response has neither content nor tool calls.
    """
    calls = row.get("tool_calls")
    has_calls = isinstance(calls, list) and bool(calls)
    has_content = bool(row.get("content"))
    if not has_content and not has_calls:
        problem = "a response needs content or tool_calls"
        hint = "leave out rows without a response"
        raise BadRowError("missing_value", problem, hint, key="content")

    message_without_content: Message = {"content": None}
    return message_without_content | _message_of_row(row)


def _message_of_row(row: Mapping[str, Any]) -> Message:
    """Return a message with the fields of a row that are fields of a message, such as `content`."""
    message: Message = {"role": row["role"]}
    for field in MESSAGE_FIELDS:
        if row.get(field) is not None:
            message[field] = row[field]
    return message


def _read_tool_results(row: Mapping[str, Any]) -> list[Message]:
    """Convert the tool results of a row to messages of the OpenAI API, one for each result.

    Raises:
        BadRowError: There are no results, or a result has no id of its tool call or no content.
    """
    results = row.get("tool_results")
    if not isinstance(results, list) or not results:
        problem = f"tool_results is {shortened(results)}"
        hint = 'like [{"tool_call_id": "c1", "content": "ok"}]'
        raise BadRowError("wrong_type", problem, hint, "tool_results")

    messages = []
    for index, result in enumerate(results):
        path = f"tool_results[{index}]"
        call_id = result.get("tool_call_id") if isinstance(result, Mapping) else None
        is_valid = isinstance(call_id, str) and result.get("content") is not None
        if not is_valid:
            problem = f"{path} is {shortened(result)}"
            hint = "an object with tool_call_id and content"
            raise BadRowError("wrong_type", problem, hint, path)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": result["content"]})
    return messages


def _read_delay_ns(row: Mapping[str, Any]) -> int:
    """Return the recorded pause before a turn, 0 if there is none.

    Raises:
        BadRowError: The pause is not a number, is negative, or is too long.
    """
    delay_s = row.get("delay_seconds")
    if delay_s is None:
        return 0

    # `bool` is a subclass of `int`.
    is_number = isinstance(delay_s, int | float) and not isinstance(delay_s, bool)
    longest_s = LONGEST_NS / NS_PER_S
    is_valid = is_number and 0 <= delay_s <= longest_s  # False for NaN
    if not is_valid:
        problem = f"delay_seconds is {shortened(delay_s)}"
        hint = "a number of seconds from 0 on"
        raise BadRowError("wrong_type", problem, hint, key="delay_seconds")
    delay_ns: int = round(delay_s * NS_PER_S)
    return delay_ns


# -- both forms ----------------------------------------------------------------------------------


class _OutputLength(NamedTuple):
    """The output tokens that a row requests, None for no length, and whether they are exact."""

    tokens: int | None
    is_exact: bool


def _read_length(row: Mapping[str, Any]) -> _OutputLength:
    """Return the number of output tokens that a row requests, from the first field that has it.

    Some fields request an exact number, others an upper limit.

    Raises:
        BadRowError: The number is no positive integer, or too large.
    """
    for field in LENGTH_FIELDS:
        value = row.get(field)
        if value is None:
            continue

        is_whole_number = isinstance(value, int | float) and value == int(value)
        is_valid = is_whole_number and 1 <= value <= MOST_TOKENS
        if not is_valid:
            hint = f"an integer from 1 to {MOST_TOKENS:,}"
            raise BadRowError("wrong_type", f"{field} is {shortened(value)}", hint, field)
        return _OutputLength(int(value), is_exact=field in EXACT_LENGTH_FIELDS)
    return _OutputLength(None, is_exact=False)


def _read_body_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that are sent in the body of each request, such as `tools`.

    The fields have the order of the row. Fields without a value are left out.

    Raises:
        BadRowError: A field has the wrong type.
    """
    known_fields = {
        field: value for field, value in row.items() if field in BODY_FIELDS and value is not None
    }
    body_fields = {}
    for field, value in known_fields.items():
        expected = BODY_FIELDS[field]
        try:
            body_fields[field] = msgspec.convert(value, expected.type)
        except msgspec.ValidationError:
            problem = f"{field} is {shortened(value)}"
            raise BadRowError("wrong_type", problem, expected.description, field) from None
    return body_fields
