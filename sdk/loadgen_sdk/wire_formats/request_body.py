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

    The fields of the API come first. Those of the user, from `request.extra` and then from
    `body_format.extra_body`, are merged into them as JSON merge patches (RFC 7396). A user who sets
    the output limit or stop sequences in this way overrides `request.max_tokens` and
    `request.exact_output`.

    Raises:
        TargetUnusable: The prompt consists of token ids, and the API or the server accepts none.
        ValueError: The request has neither messages nor a prompt.
    """
    user_patches = [patch for patch in (request.extra, body_format.extra_body) if patch]
    fields = {"model": body_format.model, **_build_api_fields(request, body_format, user_patches)}

    is_messages_api = body_format.api == "messages"
    for patch in user_patches:
        # Users name the fields as in OpenAI's chat API. Anthropic's has other names for some.
        api_patch = convert_chat_fields(patch) if is_messages_api else patch
        fields = merge_patch(fields, api_patch)

    return _encode_json(fields)


def _build_api_fields(
    request: Request, body_format: BodyFormat, patches: Sequence[Mapping[str, object]]
) -> dict[str, Any]:
    """Return the body fields of an API, without the model and the fields of the user.

    Args:
        request: The request.
        body_format: What the bodies of all requests have in common.
        patches: The fields of the user, of which later ones take precedence. They decide the output
            limit, and whether the output length is forced.
    """
    user_fields = {field: value for patch in patches for field, value in patch.items()}
    max_tokens = _output_limit(request, user_fields)

    profile = body_format.server_profile
    match body_format.api:
        case "messages":
            return build_messages_fields(request, body_format.stream, max_tokens)
        case "responses":
            return _build_responses_fields(request, body_format.stream, max_tokens)
        case "embeddings":
            return _build_embeddings_fields(request, profile)
        case "rerank":
            return _build_rerank_fields(request, profile)
        case "chat" | "completions":
            return {
                **_build_prompt_fields(request, body_format),
                **_build_stream_fields(body_format),
                **_build_length_fields(request, body_format, max_tokens, user_fields),
            }


def _output_limit(request: Request, user_fields: Mapping[str, Any]) -> int | None:
    """Return the largest number of output tokens of a request, or None for no limit.

    A limit of the user replaces `request.max_tokens`, whichever of the two names it has. If the
    user sets both, `max_tokens` counts.
    """
    for field in OUTPUT_LIMIT_FIELDS:
        if field in user_fields:
            limit: int | None = user_fields[field]
            return limit
    return request.max_tokens


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
        """Return the JSON body of a request, which is the same as that of `encode_body`.

        Most requests of a load differ in their prompt alone. The bodies of such requests with the
        same output length share a template, the bytes before and after the prompt, so that only the
        prompt is encoded. Requests with messages, token ids or fields of their own have no
        template.
        """
        prompt = request.prompt
        if (
            not self._has_plain_prompt
            or not isinstance(prompt, str)
            or request.messages is not None
            or request.extra
        ):
            return encode_body(request, self._body_format)

        output_length = (request.max_tokens, request.exact_output)
        template = self._templates.get(output_length)
        if template is None:
            self._make_template_if_frequent(request)
            return encode_body(request, self._body_format)

        return template.before + _encode_json(prompt) + template.after

    def _make_template_if_frequent(self, request: Request) -> None:
        """Make a template for the output length of a request, if the length comes a second time.

        It is not made at the first time, because many lengths of a random distribution come only
        once. If the bodies of a length cannot have a template, no later request tries again. A load
        with more than _MAX_TEMPLATES lengths starts again without any, so that memory stays
        bounded.
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
        """Return the bytes before and after the prompt in the body of a request, or None.

        Two bodies are encoded that differ in their prompts only. If the bytes around both prompts
        are the same, they do not depend on the prompt, and serve every request of the same output
        length.

        There is no template if they differ. There is none either if a prompt is not in exactly one
        place of its body, for example because the user sets the same text in another field.
        """
        templates = []
        for prompt in _TEMPLATE_PROMPTS:
            body = encode_body(msgspec.structs.replace(request, prompt=prompt), self._body_format)
            json_prompt = _encode_json(prompt)
            if body.count(json_prompt) != 1:
                return None
            before, after = body.split(json_prompt)
            templates.append(_BodyTemplate(before, after))

        first_template, second_template = templates
        return first_template if first_template == second_template else None


def with_timing_request(
    server_profile: ServerProfile,
    headers: Sequence[tuple[str, str]],
    extra_body: Mapping[str, object] | None,
    *,
    stream: bool,
) -> TimingRequest:
    """Return the headers and body fields of a user, with those that request the server's timing.

    Some servers state how long a request waited and was processed, if the request asks for it. Some
    of them refuse a stream that asks for it, so they are asked only if `stream` is false. Fields of
    the user replace those of the server profile.

    Args:
        server_profile: The kind of server, which names the headers and fields that ask for it.
        headers: The headers of the user.
        extra_body: The body fields of the user, or None.
        stream: The responses are requested as streams.
    """
    timing_fields: dict[str, Any] = {}
    accepts_timing_request = server_profile.reports_timing_in_streams or not stream
    if accepts_timing_request:
        timing_fields = server_profile.timing_request_fields

    body_fields = merge_patch(timing_fields, extra_body)
    return TimingRequest(
        headers=(*server_profile.timing_request_headers, *headers),
        extra_body=body_fields or None,
    )


def merge_patch(value: Mapping[str, object], patch: Mapping[str, object] | None) -> dict[str, Any]:
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
    """Return the fields with the prompt of a chat or of a completion.

    TensorRT-LLM accepts token ids as the prompt of a chat, beside an empty message.
    """
    if body_format.api == "completions":
        return {"prompt": _prompt_of(request, body_format.server_profile)}
    if isinstance(request.prompt, list) and body_format.server_profile.accepts_chat_token_ids:
        return {"messages": _EMPTY_MESSAGES, "prompt_token_ids": request.prompt}
    return {"messages": _messages_of(request)}


def _build_stream_fields(body_format: BodyFormat) -> dict[str, Any]:
    """Return the field `stream`, and the options of the stream if there is one.

    Several servers refuse options without a stream. With continuous usage, each event of the stream
    states the output tokens so far, so that the client knows how many tokens an event has.
    """
    if not body_format.stream:
        return {"stream": False}
    profile = body_format.server_profile
    options = dict(profile.stream_options)
    if body_format.continuous_usage and profile.accepts_continuous_usage:
        options["continuous_usage_stats"] = True
    return {"stream": True, "stream_options": options}


def _build_length_fields(
    request: Request,
    body_format: BodyFormat,
    max_tokens: int | None,
    user_fields: Mapping[str, object],
) -> dict[str, Any]:
    """Return the fields that limit the output to `max_tokens` tokens, or force this length.

    An example is `{"max_tokens": 100, "min_tokens": 100, "ignore_eos": true}`. There are none if
    `max_tokens` is None. The limit itself is left out if the user sets it. The length is forced
    only if the request has `exact_output` and the user requests no earlier end by `stop`.

    Args:
        request: The request.
        body_format: The model, the API, and the profile of the server, which names the fields.
        max_tokens: The output limit, or None.
        user_fields: The body fields of the user.
    """
    if max_tokens is None:
        return {}

    server_profile = body_format.server_profile
    fields: dict[str, Any] = {}

    user_sets_limit = not user_fields.keys().isdisjoint(OUTPUT_LIMIT_FIELDS)
    if not user_sets_limit:
        limit_field = server_profile.output_limit_field_for(body_format.api, body_format.model)
        fields[limit_field] = max_tokens

    is_length_forced = request.exact_output and "stop" not in user_fields
    if is_length_forced:
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


def _convert_responses_content(content: object) -> Any:
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
    """Return the fields of an embeddings request, whose response has the numbers as JSON."""
    return {"input": _prompt_of(request, server_profile), "encoding_format": "float"}


def _build_rerank_fields(request: Request, server_profile: ServerProfile) -> dict[str, Any]:
    """Return the fields of a rerank request: the query, and a document that the server scores.

    The requests of a load have their documents in `request.extra`, which replaces the document here
    when `encode_body` merges it. Only a request without documents, such as that of the probe, is
    sent with this one, which is the query itself.

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


def _text_of_content(content: object) -> str:
    """Return the text of a message, whose content is a string, a list of parts, or missing."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    part_texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(text for text in part_texts if isinstance(text, str))
