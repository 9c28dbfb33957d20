"""The shapes of events and of whole answers, as every known server sends them, read into one. Pure.

What has the usual types is decoded in one step, what has not is made into the same shape here, and what is of another
API in `other_apis.py`.
"""

import json
from typing import Any

import msgspec

from ..request import Usage
from .implementation import token_count
from .sse import Named
from .usage import checked_usage

ERROR_TEXT_CHARS = 500


ABSENT = msgspec.Raw(b"null")
"""The value of a field that was not sent. (msgspec would decode a union of Raw and None as None only.)"""


def is_set(raw: msgspec.Raw) -> bool:
    return raw is not ABSENT and bytes(raw) != b"null"


class DeltaFields(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    refusal: str | None = None
    token_ids: list[int] | None = None


class ChoiceFields(msgspec.Struct, gc=False):
    delta: DeltaFields | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    message: DeltaFields | None = None
    meta_info: msgspec.Raw = ABSENT  # SGLang's account of a whole answer
    speculative_decoding: msgspec.Raw = (
        ABSENT  # TensorRT-LLM's of 1.4, with per_request_spec_decode_stats
    )


class CountDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None


class UsageFields(msgspec.Struct, gc=False):
    """A usage object as a server sends it."""

    prompt_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    completion_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    input_tokens: int | None = None  # read where the names above are not sent
    output_tokens: int | None = None
    prompt_tokens_details: CountDetails | None = None
    completion_tokens_details: CountDetails | None = None
    input_tokens_details: CountDetails | None = None  # of the Responses API
    output_tokens_details: CountDetails | None = None
    cache_creation_input_tokens: int | None = None  # of messages, and of gateways in front of them
    cache_read_input_tokens: int | None = None  # the same
    prompt_cache_hit_tokens: int | None = None  # DeepSeek
    cached_tokens: int | None = None  # Moonshot
    total_tokens: int | None = None

    def output(self) -> int | None:
        return token_count(
            self.output_tokens
            if self.completion_tokens is msgspec.UNSET
            else self.completion_tokens
        )

    def usage(self) -> Usage:
        before = self.prompt_tokens_details or self.input_tokens_details
        after = self.completion_tokens_details or self.output_tokens_details
        written = self.cache_creation_input_tokens
        if before is not None and before.cache_write_tokens is not None:
            written = before.cache_write_tokens
        prompt = self.input_tokens if self.prompt_tokens is msgspec.UNSET else self.prompt_tokens
        cached = self._cached()
        usage = Usage(
            input=token_count(prompt),
            output=self.output(),
            cached=None if cached is None else token_count(cached),
            reasoning=None if after is None else token_count(after.reasoning_tokens),
            cache_written=None if written is None else token_count(written),
        )
        return checked_usage(usage, self.total_tokens)

    def _cached(self) -> int | None:
        """Return the prompt tokens that came from a cache, under any of the servers' names."""
        before = self.prompt_tokens_details or self.input_tokens_details
        if before is not None and before.cached_tokens is not None:
            return before.cached_tokens
        for count in (
            self.cache_read_input_tokens,
            self.prompt_cache_hit_tokens,
            self.cached_tokens,
        ):
            if count is not None:
                return count
        return None


class EventFields(msgspec.Struct, gc=False):
    choices: list[ChoiceFields] | None = None
    usage: UsageFields | None = None
    error: msgspec.Raw = ABSENT
    message: msgspec.Raw = ABSENT  # trtllm-serve and SGLang put the error at the top level
    detail: msgspec.Raw = ABSENT
    timings: msgspec.Raw = ABSENT  # llama-server
    nvext: msgspec.Raw = ABSENT  # Dynamo
    metrics: msgspec.Raw = ABSENT  # vLLM
    data: msgspec.Raw = ABSENT  # embeddings
    results: msgspec.Raw = ABSENT  # rerank
    output: msgspec.Raw = ABSENT  # a whole answer of the Responses API
    type: str = ""  # of an event of the Responses API, or of messages


class IdFields(msgspec.Struct, gc=False):
    id: str = ""
    response: "IdFields | None" = None  # of the Responses API


decode_event = msgspec.json.Decoder(EventFields).decode
_decode_id = msgspec.json.Decoder(IdFields).decode
decode_any = msgspec.json.decode
NOT_JSON = (msgspec.MsgspecError, ValueError, RecursionError)


def decode_leniently(text: bytes) -> Any:
    """Return the value of JSON that a strict decoder may refuse.

    Half of a surrogate pair and bytes that are not UTF-8 become U+FFFD, numbers may be larger than
    a double holds, and a byte order mark may stand first. Raises one of NOT_JSON.
    """
    try:
        return decode_any(text)
    except msgspec.MsgspecError:
        return _whole_texts(json.loads(text.decode("utf-8-sig", "replace")))


def _whole_texts(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_whole_texts(key): _whole_texts(one) for key, one in value.items()}
    return [_whole_texts(one) for one in value] if isinstance(value, list) else value


EMPTY = (b"null", b"[]", b"{}", b'""')


def counts_of(value: dict[str, Any]) -> UsageFields:
    try:
        return msgspec.convert(value, UsageFields)
    except msgspec.ValidationError:
        return _lenient_counts(value)


def _lenient_counts(value: Any) -> UsageFields:
    """Return the counts of a usage of which some are no integers.

    Output tokens that are no count become -1.
    """
    if not isinstance(value, dict):
        return UsageFields()
    counts: dict[str, Any] = {}
    for name in UsageFields.__struct_fields__:
        if name not in value:
            continue
        if name.endswith("_details"):
            counts[name] = _lenient_details(value[name])
        else:
            counts[name] = token_count(value[name])
    for name in ("completion_tokens", "output_tokens"):
        if value.get(name) is not None and counts[name] is None:
            counts[name] = -1
    return UsageFields(**counts)


def _lenient_details(value: Any) -> CountDetails | None:
    if not isinstance(value, dict):
        return None
    names = CountDetails.__struct_fields__
    return CountDetails(**{name: token_count(value.get(name)) for name in names})


def id_of(payload: bytes | Named) -> str:
    try:
        found = _decode_id(payload if isinstance(payload, bytes) else payload.data)
        return found.id or (found.response.id if found.response is not None else "")
    except NOT_JSON:
        return ""


KNOWN_DELTA_FIELDS = frozenset(("role", *DeltaFields.__struct_fields__))


class _ChoiceWithAnyDelta(msgspec.Struct, gc=False):
    delta: dict[str, msgspec.Raw] | None = None


class _EventWithAnyDelta(msgspec.Struct, gc=False):
    choices: list[_ChoiceWithAnyDelta] | None = None


_decode_any_delta = msgspec.json.Decoder(_EventWithAnyDelta).decode


def unknown_text_field(payload: bytes) -> str:
    """Return the name of a field of a delta that is not known and has a text, or ""."""
    try:
        event = _decode_any_delta(payload)
    except NOT_JSON:
        return ""
    for choice in event.choices or ():
        for name, raw in (choice.delta or {}).items():
            value = bytes(raw)
            if name not in KNOWN_DELTA_FIELDS and value.startswith(b'"') and value != b'""':
                return name
    return ""


def nested_value(value: dict[str, Any], outer: str, name: str) -> Any:
    nested = value.get(outer)
    return nested.get(name) if isinstance(nested, dict) else None


def error_text(body: bytes) -> str:
    """The message in an error body of any server, else the beginning of the body."""
    try:
        value = decode_any(body)
    except NOT_JSON:
        return body[:ERROR_TEXT_CHARS].decode("utf-8", "replace").strip()
    inner = value
    if isinstance(value, dict):
        inner = value.get("error", value)
    if isinstance(inner, dict):
        for key in ("message", "detail", "msg"):
            if inner.get(key):
                inner = inner[key]
                break
    text = inner if isinstance(inner, str) else msgspec.json.encode(inner).decode()
    return text[:ERROR_TEXT_CHARS]


def lenient_event(value: dict[str, Any]) -> EventFields:
    """An event whose known fields have unexpected types: keep what can be read, drop the rest."""

    def text(item: Any) -> str | None:
        if isinstance(item, str):
            return item
        if isinstance(item, list):  # content as parts
            return (
                "".join(
                    p["text"]
                    for p in item
                    if isinstance(p, dict) and isinstance(p.get("text"), str)
                )
                or None
            )
        return None

    def raw(item: Any) -> msgspec.Raw:
        return ABSENT if item is None else msgspec.Raw(msgspec.json.encode(item))

    def ids(item: Any) -> list[int] | None:
        return [i for i in item if isinstance(i, int)] if isinstance(item, list) else None

    def delta(item: Any) -> DeltaFields | None:
        if not isinstance(item, dict):
            return None
        return DeltaFields(
            content=text(item.get("content")),
            reasoning_content=text(item.get("reasoning_content")),
            reasoning=text(item.get("reasoning")),
            tool_calls=raw(item.get("tool_calls")),
            function_call=raw(item.get("function_call")),
            refusal=text(item.get("refusal")),
            token_ids=ids(item.get("token_ids")),
        )

    choices = (
        [
            ChoiceFields(
                delta=delta(choice.get("delta")),
                text=text(choice.get("text")),
                finish_reason=text(choice.get("finish_reason")),
                token_ids=ids(choice.get("token_ids")),
                message=delta(choice.get("message")),
            )
            for choice in value.get("choices") or ()
            if isinstance(choice, dict)
        ]
        if isinstance(value.get("choices"), list)
        else None
    )
    usage = None if value.get("usage") is None else _lenient_counts(value["usage"])
    names = ("error", "message", "detail", "timings", "nvext", "metrics")
    others: dict[str, Any] = {name: raw(value.get(name)) for name in names}
    return EventFields(choices=choices, usage=usage, **others)
