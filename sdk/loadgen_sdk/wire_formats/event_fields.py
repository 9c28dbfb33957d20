"""The fields of events and of whole responses that are read, under the names of every known server.

An event whose fields have the usual types is decoded in one step. `lenient_decoding.py` reads one
of other types into the same shape, and `other_apis.py` one of another API. Pure.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from ..request import Usage
from .implementation import token_count
from .sse import NamedEvent
from .usage import check_usage

ERROR_TEXT_CHARS = 500
"""The longest text of an error in a result."""

ABSENT = msgspec.Raw(b"null")
"""The value of a field that was not sent. msgspec decodes a union of Raw and None as None only."""


def is_set(raw: msgspec.Raw) -> bool:
    """Return True if a field was sent and is not null."""
    return raw is not ABSENT and bytes(raw) != b"null"


class DeltaFields(msgspec.Struct, gc=False):
    """A piece of a streamed response, or the message of a whole one."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    refusal: str | None = None
    token_ids: list[int] | None = None


class ChoiceFields(msgspec.Struct, gc=False):
    """One of the completions of a response, or a piece of it."""

    delta: DeltaFields | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    message: DeltaFields | None = None
    # SGLang's own timing, in responses that are not streamed
    meta_info: msgspec.Raw = ABSENT
    # TensorRT-LLM 1.4 with per_request_spec_decode_stats
    speculative_decoding: msgspec.Raw = ABSENT


class CountDetails(msgspec.Struct, gc=False):
    """The parts of the prompt tokens or of the output tokens of a usage."""

    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None


_NO_DETAILS = CountDetails()


class UsageFields(msgspec.Struct, gc=False):
    """A usage object as a server sends it."""

    prompt_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    completion_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    # The Responses API and Anthropic's messages have these names.
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: CountDetails | None = None
    completion_tokens_details: CountDetails | None = None
    # The Responses API has these names.
    input_tokens_details: CountDetails | None = None
    output_tokens_details: CountDetails | None = None
    # Anthropic's messages and gateways in front of them have these names.
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    # DeepSeek
    prompt_cache_hit_tokens: int | None = None
    # Moonshot
    cached_tokens: int | None = None
    total_tokens: int | None = None

    def output(self) -> int | None:
        """Return the output tokens, or None if the server sends no count or an impossible one.

        The name `completion_tokens` takes precedence over `output_tokens`, even if its value is
        null. `token_count` says which counts are possible.
        """
        return token_count(
            self.output_tokens
            if self.completion_tokens is msgspec.UNSET
            else self.completion_tokens
        )

    def usage(self) -> Usage:
        """Return the token counts, checked against each other, by the names of `Usage`.

        Each server sends only a few of the fields. If a count comes under two names, that of the
        chat API takes precedence over that of the other APIs, and details of a count over fields
        beside it. `token_count` replaces an impossible count by None.
        """
        prompt_tokens = self.prompt_tokens
        if prompt_tokens is msgspec.UNSET:
            prompt_tokens = self.input_tokens

        output_tokens = self.completion_tokens
        if output_tokens is msgspec.UNSET:
            output_tokens = self.output_tokens

        prompt_details = self.prompt_tokens_details or self.input_tokens_details or _NO_DETAILS
        output_details = self.completion_tokens_details or self.output_tokens_details or _NO_DETAILS
        cached_tokens = _first_known(
            prompt_details.cached_tokens,
            self.cache_read_input_tokens,
            self.prompt_cache_hit_tokens,
            self.cached_tokens,
        )

        cache_written_tokens = prompt_details.cache_write_tokens
        if cache_written_tokens is None:
            cache_written_tokens = self.cache_creation_input_tokens

        usage = Usage(
            input=token_count(prompt_tokens),
            output=token_count(output_tokens),
            cached=token_count(cached_tokens),
            reasoning=token_count(output_details.reasoning_tokens),
            cache_written=token_count(cache_written_tokens),
        )
        return check_usage(usage, total=self.total_tokens)


class EventFields(msgspec.Struct, gc=False):
    """One event of a stream, or a response that was not streamed.

    Attributes:
        choices: The completions, or pieces of them.
        usage: The token counts.
        error: An error.
        message: An error of trtllm-serve or SGLang, which is at the top level.
        detail: Details of such an error.
        timings: llama-server's own timing.
        nvext: Dynamo's extensions, its own timing among them.
        metrics: vLLM's own timing.
        data: The numbers of embeddings.
        results: The scores of rerank.
        output: The output of the Responses API, not streamed.
        type: The type of an event of the Responses API or of Anthropic's messages.
    """

    choices: list[ChoiceFields] | None = None
    usage: UsageFields | None = None
    error: msgspec.Raw = ABSENT
    message: msgspec.Raw = ABSENT
    detail: msgspec.Raw = ABSENT
    timings: msgspec.Raw = ABSENT
    nvext: msgspec.Raw = ABSENT
    metrics: msgspec.Raw = ABSENT
    data: msgspec.Raw = ABSENT
    results: msgspec.Raw = ABSENT
    output: msgspec.Raw = ABSENT
    type: str = ""


class IdFields(msgspec.Struct, gc=False):
    """The id of a response, at the top level of its events or in their field `response`."""

    id: str = ""
    response: "IdFields | None" = None  # of the Responses API


decode_event = msgspec.json.Decoder(EventFields).decode
_decode_id = msgspec.json.Decoder(IdFields).decode
decode_any = msgspec.json.decode
NOT_JSON = (msgspec.MsgspecError, ValueError, RecursionError)
"""The exceptions that decoders of JSON raise."""

EMPTY = (b"null", b"[]", b"{}", b'""')
"""JSON values without content."""


def id_of(payload: bytes | NamedEvent) -> str:
    """Return the id of the response in an event, or "" if it has none."""
    try:
        fields = _decode_id(payload if isinstance(payload, bytes) else payload.data)
    except NOT_JSON:
        return ""
    if fields.id or fields.response is None:
        return fields.id
    return fields.response.id


KNOWN_DELTA_FIELDS = frozenset(("role", *DeltaFields.__struct_fields__))


class _ChoiceWithAnyDelta(msgspec.Struct, gc=False):
    """A choice whose delta keeps the fields that are not known."""

    delta: dict[str, msgspec.Raw] | None = None


class _EventWithAnyDelta(msgspec.Struct, gc=False):
    """An event whose deltas keep the fields that are not known."""

    choices: list[_ChoiceWithAnyDelta] | None = None


_decode_any_delta = msgspec.json.Decoder(_EventWithAnyDelta).decode


def unknown_text_field(payload: bytes) -> str:
    """Return the name of a field of a delta that is not known and has a text, or "".

    Such a field may be output, for example reasoning under a name of the server's own.
    """
    try:
        event = _decode_any_delta(payload)
    except NOT_JSON:
        return ""

    for choice in event.choices or ():
        for name, raw_value in (choice.delta or {}).items():
            json_text = bytes(raw_value)
            has_text = json_text.startswith(b'"') and json_text != b'""'
            if has_text and name not in KNOWN_DELTA_FIELDS:
                return name

    return ""


def nested_value(value: Mapping[str, object], outer: str, name: str) -> Any:
    """Return `value[outer][name]`, or None if either field is missing or not in an object."""
    nested = value.get(outer)
    return nested.get(name) if isinstance(nested, dict) else None


def error_text(body: bytes) -> str:
    """Return the error message in the body of an error response, as a text for the user.

    Servers send `{"error": {"message": "..."}}`, `{"detail": "..."}` and other forms. The error is
    the field `error` of the body, or else the body itself. A message of another type than text,
    such as FastAPI's list of validation errors, is returned as JSON. Of a body that is not JSON,
    the beginning is returned.
    """
    try:
        value = decode_any(body)
    except NOT_JSON:
        return body[:ERROR_TEXT_CHARS].decode("utf-8", "replace").strip()

    error = value
    if isinstance(value, dict) and "error" in value:
        error = value["error"]

    message = _message_of(error)
    if not isinstance(message, str):
        message = msgspec.json.encode(message).decode()

    return message[:ERROR_TEXT_CHARS]


def _first_known(*counts: int | None) -> int | None:
    """Return the first count that is not None, or None if there is none."""
    for count in counts:
        if count is not None:
            return count
    return None


def _message_of(error: Any) -> Any:
    """Return the message of an error object, or the error itself if it has none.

    The message of `{"message": "overloaded", "code": 3}` is "overloaded".
    """
    if isinstance(error, dict):
        for name in ("message", "detail", "msg"):
            if error.get(name):
                return error[name]
    return error
