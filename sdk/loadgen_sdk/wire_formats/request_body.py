"""Encode requests as JSON bodies for a kind of server, by its server profile. Pure.

A body has only the fields of its API, those that the server profile names, and those of the user,
because half of the servers refuse unknown fields. No code here depends on the name of a server: a
rule that differs between servers is a field of `ServerProfile`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ..errors import TargetUnusable
from ..request import Request
from .messages_request import build_messages_fields, convert_chat_fields
from .server_profiles import OUTPUT_LIMIT_FIELDS, Api, ServerProfile

_encode_json = msgspec.json.Encoder().encode

_APIS_WITH_PLAIN_PROMPT = ("chat", "completions")
"""APIs whose bodies contain the prompt unchanged, so that a template can be split at it."""

_MAX_TEMPLATES = 4096
"""The most templates in memory. A load with more output lengths than this learns them anew."""

_EMPTY_MESSAGES = [{"role": "user", "content": ""}]
"""Sent with a prompt of token ids, because a chat must have a message."""

_TEMPLATE_PROMPTS = ("one prompt", "another")
"""Two bodies with these prompts show whether anything but the prompt depends on the prompt."""


@dataclass(frozen=True)
class BodyFormat:
    """What the bodies of all requests to one endpoint have in common.

    Attributes:
        server_profile: The kind of server.
        api: The API of the endpoint.
        model: The name of the model.
        stream: The responses are requested as streams.
        extra_body: Fields that the user adds to each body.
        continuous_usage: Cumulative usage is requested with each event if the server offers it.
    """

    server_profile: ServerProfile
    api: Api
    model: str
    stream: bool
    extra_body: Mapping[str, Any] | None = None
    continuous_usage: bool = False


class TimingRequest(NamedTuple):
    """The headers and body fields of the user with those that request the server's own timing."""

    headers: tuple[tuple[str, str], ...]
    extra_body: dict[str, Any] | None


_OutputLength = tuple[int | None, bool]
"""`Request.max_tokens` and `Request.exact_output`. A plain tuple is the fastest key per request."""


class _BodyTemplate(NamedTuple):
    """The bytes of a body before and after its prompt."""

    before: bytes
    after: bytes


def encode_body(request: Request, body_format: BodyFormat) -> bytes:
    """Return the JSON body of a request. The same input gives the same bytes.

    The output limit is `request.max_tokens`, in the field of the server profile. With
    `exact_output`, the fields that force this length are added, unless the user requests an
    earlier end by `stop`. Sampling fields such as the temperature are sent only if the user
    specifies them.

    `request.extra`, then `body_format.extra_body`, are applied last as JSON merge patches (RFC
    7396). An output limit in them, under any of its names, replaces `request.max_tokens`. The body
    then has that name alone, because some servers refuse a body with both.

    Raises:
        TargetUnusable: The prompt consists of token ids, and the API or the server accepts none.
        ValueError: The request has neither messages nor a prompt.
    """
    patches = [patch for patch in (request.extra, body_format.extra_body) if patch]
    # A field of `extra_body` wins over the same field of `request.extra`, as in the merge below.
    user_fields = {field: value for patch in patches for field, value in patch.items()}
    max_tokens = request.max_tokens
    user_limit_fields = [field for field in OUTPUT_LIMIT_FIELDS if field in user_fields]
    if user_limit_fields:
        max_tokens = user_fields[user_limit_fields[0]]
    fields: dict[str, Any] = {"model": body_format.model}
    if body_format.api == "messages":
        fields |= build_messages_fields(request, body_format.stream, max_tokens)
        patches = [convert_chat_fields(patch) for patch in patches]
    elif body_format.api == "responses":
        fields |= _build_responses_fields(request, body_format.stream, max_tokens)
    elif body_format.api == "embeddings":
        fields |= _build_embeddings_fields(request, body_format.server_profile)
    elif body_format.api == "rerank":
        fields |= _build_rerank_fields(request, body_format.server_profile)
    else:
        fields |= _build_prompt_fields(request, body_format)
        fields |= _build_stream_fields(body_format)
        if max_tokens is not None:
            fields |= _build_length_fields(request, body_format, max_tokens, user_fields)
    for patch in patches:
        fields = merge_patch(fields, patch)
    return _encode_json(fields)


class BodyEncoder:
    """Encodes the bodies of many requests to one endpoint.

    Bodies that differ in their prompt alone share a template, so that only the prompt is encoded
    for most requests. This saves about 8 us per body.
    """

    def __init__(self, body_format: BodyFormat) -> None:
        """Keep the format, which must not change."""
        self._body_format = body_format
        self._has_plain_prompt = body_format.api in _APIS_WITH_PLAIN_PROMPT
        self._templates: dict[_OutputLength, _BodyTemplate] = {}
        self._request_counts: dict[_OutputLength, int] = {}

    def encode(self, request: Request) -> bytes:
        """Return the same bytes as `encode_body`.

        A template is used for requests that have a text as prompt and no fields of their own.
        """
        prompt = request.prompt
        if (
            not self._has_plain_prompt
            or not isinstance(prompt, str)
            or request.messages is not None
            or request.extra
        ):
            return encode_body(request, self._body_format)
        template = self._templates.get((request.max_tokens, request.exact_output))
        if template is None:
            self._consider_template(request)
            return encode_body(request, self._body_format)
        return template.before + _encode_json(prompt) + template.after

    def _consider_template(self, request: Request) -> None:
        """Make the template for the output length of a request when that length comes again.

        The first request has none, because many lengths of a distribution come only once. If the
        body cannot be split at the prompt, no later request of this length tries again.
        """
        if len(self._request_counts) >= _MAX_TEMPLATES:
            self._request_counts.clear()
            self._templates.clear()
        output_length = (request.max_tokens, request.exact_output)
        request_count = self._request_counts.get(output_length, 0) + 1
        self._request_counts[output_length] = request_count
        if request_count == 2:
            template = self._make_template(request)
            if template is not None:
                self._templates[output_length] = template

    def _make_template(self, request: Request) -> _BodyTemplate | None:
        """Return the bytes before and after the prompt of a body.

        Return None if the prompt is not in exactly one place, for example because the user sets
        the same text in another field, or if other bytes than the prompt depend on it. Bodies with
        two different prompts are compared to find that out.
        """
        templates = []
        for prompt in _TEMPLATE_PROMPTS:
            body = encode_body(msgspec.structs.replace(request, prompt=prompt), self._body_format)
            bytes_around_prompt = body.split(_encode_json(prompt))
            if len(bytes_around_prompt) != 2:
                return None
            templates.append(_BodyTemplate(*bytes_around_prompt))
        first_template, second_template = templates
        return first_template if first_template == second_template else None


def add_timing_request(
    server_profile: ServerProfile,
    headers: Sequence[tuple[str, str]],
    extra_body: Mapping[str, Any] | None,
    *,
    stream: bool,
) -> TimingRequest:
    """Return the user's headers and body fields with a request for the server's own timing.

    Fields of the user replace those of the server profile. The body asks a server that has no
    timing in its streams only if the response is not streamed, because it refuses a stream with
    these fields.
    """
    timing_fields: dict[str, Any] = {}
    if server_profile.reports_timing_in_streams or not stream:
        timing_fields = server_profile.timing_request_fields
    body_fields = merge_patch(timing_fields, extra_body)
    return TimingRequest(
        headers=(*server_profile.timing_request_headers, *headers),
        extra_body=body_fields or None,
    )


def merge_patch(value: Mapping[str, Any], patch: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `value` with a JSON merge patch (RFC 7396) applied. Neither argument is changed.

    Objects are merged deeply, null removes a field, and any other value replaces the old one. For
    example, `{"a": 1, "b": {"c": 2}}` with the patch `{"a": null, "b": {"d": 3}}` becomes
    `{"b": {"c": 2, "d": 3}}`.
    """
    merged = dict(value)
    for field, new_value in (patch or {}).items():
        if new_value is None:
            merged.pop(field, None)
        elif isinstance(new_value, Mapping):
            old_value = merged.get(field)
            if not isinstance(old_value, Mapping):
                old_value = {}
            merged[field] = merge_patch(old_value, new_value)
        else:
            merged[field] = new_value
    return merged


def _build_prompt_fields(request: Request, body_format: BodyFormat) -> dict[str, Any]:
    """Return the fields of a chat or a completion that have the prompt.

    TensorRT-LLM accepts token ids as the prompt of a chat, beside an empty message.
    """
    if body_format.api == "completions":
        return {"prompt": _prompt_of(request, body_format.server_profile)}
    if isinstance(request.prompt, list) and body_format.server_profile.accepts_chat_token_ids:
        return {"messages": _EMPTY_MESSAGES, "prompt_token_ids": request.prompt}
    return {"messages": _messages_of(request)}


def _build_stream_fields(body_format: BodyFormat) -> dict[str, Any]:
    """Return `stream` and its options, which several servers refuse if `stream` is false.

    Continuous usage is the usage so far in each event, which tells how many tokens an event has.
    """
    if not body_format.stream:
        return {"stream": False}
    profile = body_format.server_profile
    options = dict(profile.stream_options)
    if body_format.continuous_usage and profile.accepts_continuous_usage:
        options["continuous_usage_stats"] = True
    return {"stream": True, "stream_options": options}


def _build_length_fields(
    request: Request, body_format: BodyFormat, max_tokens: int, user_fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields that limit the output to `max_tokens` tokens or force this length.

    The limit is left out if the user sets it in `user_fields`, under any of its names. The length
    is forced if the request has `exact_output` and the user requests no earlier end by `stop`. Of
    the fields that force it, `min_tokens` has the number, and others, such as `ignore_eos`, are
    switches.
    """
    server_profile = body_format.server_profile
    fields: dict[str, Any] = {}
    user_sets_limit = not user_fields.keys().isdisjoint(OUTPUT_LIMIT_FIELDS)
    if not user_sets_limit:
        limit_field = server_profile.output_limit_field_for(body_format.api, body_format.model)
        fields[limit_field] = max_tokens
    if request.exact_output and "stop" not in user_fields:
        for field in server_profile.length_fields:
            fields[field] = max_tokens if field == "min_tokens" else True
    return fields


def _build_responses_fields(
    request: Request, stream: bool, max_tokens: int | None
) -> dict[str, Any]:
    """Return the fields of the Responses API. It has no field that forces a length.

    Raises:
        TargetUnusable: The prompt consists of token ids.
    """
    if isinstance(request.prompt, list):
        raise TargetUnusable(
            "unsupported",
            "a prompt of token IDs cannot be sent to the responses API",
            "use --api completions",
        )
    fields: dict[str, Any] = {"input": request.prompt, "stream": stream}
    if request.messages is not None:
        fields["input"] = [
            message | {"content": _convert_responses_content(message.get("content"))}
            for message in request.messages
        ]
    if max_tokens is not None:
        fields["max_output_tokens"] = max_tokens
    return fields


def _convert_responses_content(content: Any) -> Any:
    """Return the content of a chat message with its parts as the Responses API names them."""
    if not isinstance(content, list):
        return content
    return [_convert_responses_part(part) for part in content]


def _convert_responses_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a text or an image of a chat message under its name in the Responses API.

    Other parts are kept, because a user may write them in the form of the Responses API.
    """
    if part.get("type") == "text":
        return {"type": "input_text", "text": part["text"]}
    if part.get("type") == "image_url":
        return {"type": "input_image", "image_url": part["image_url"]["url"]}
    return part


def _build_embeddings_fields(request: Request, server_profile: ServerProfile) -> dict[str, Any]:
    return {"input": _prompt_of(request, server_profile), "encoding_format": "float"}


def _build_rerank_fields(request: Request, server_profile: ServerProfile) -> dict[str, Any]:
    """Return the fields of rerank, with the query as its only document.

    A load has its documents in `request.extra`, which `encode_body` merges into these fields later,
    so that they replace this one. It is sent only by requests without documents, such as those of
    the probe.

    Raises:
        TargetUnusable: The prompt consists of token ids.
    """
    query = _prompt_of(request, server_profile)
    if isinstance(query, list):
        raise TargetUnusable(
            "unsupported", "a query of token IDs cannot be reranked", "give the prompt as text"
        )
    return {"query": query, "documents": [query]}


def _messages_of(request: Request) -> list[dict[str, Any]]:
    """Return the messages of a chat, or the prompt as a message of the user.

    Raises:
        TargetUnusable: The prompt consists of token ids.
        ValueError: The request has neither messages nor a prompt.
    """
    if request.messages is not None:
        return request.messages
    if isinstance(request.prompt, str):
        return [{"role": "user", "content": request.prompt}]
    if request.prompt is None:
        raise ValueError(f"request {request.id} has neither messages nor a prompt")
    raise TargetUnusable(
        "unsupported",
        "a prompt of token IDs cannot be sent to the chat API",
        "use --api completions, or give the prompt as text",
    )


def _prompt_of(request: Request, server_profile: ServerProfile) -> str | list[int]:
    """Return the prompt, or the texts of the messages, joined by line ends, if there is no prompt.

    Raises:
        TargetUnusable: The prompt consists of token ids, which the server does not accept.
        ValueError: The request has neither messages nor a prompt.
    """
    prompt = request.prompt
    if isinstance(prompt, list) and not server_profile.accepts_prompt_token_ids:
        raise TargetUnusable(
            "unsupported",
            f"{server_profile.title} does not accept token IDs as a prompt",
            "give the prompt as text",
        )
    if prompt is not None:
        return prompt
    if request.messages is None:
        raise ValueError(f"request {request.id} has neither messages nor a prompt")
    texts = [_text_of_content(message.get("content")) for message in request.messages]
    return "\n".join(text for text in texts if text)


def _text_of_content(content: Any) -> str:
    """Return the text of a message, whose content is a string, a list of parts, or missing."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    part_texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(text for text in part_texts if isinstance(text, str))
