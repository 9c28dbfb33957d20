"""Makes the body of a request as bytes, by the table of server profiles. Pure. Bodies are made before their requests are due.

A body has only the common fields, those that the server's row lists, and those that the user names.
No code here depends on the name of a server: a rule that needs an `if name ==` belongs in
`server_profiles.py`, as a column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ..errors import TargetUnusable
from ..request import Request
from .messages_request import message_extra, message_fields
from .server_profiles import NON_GENERATIVE_APIS, OUTPUT_LIMIT_FIELDS, Api, ServerProfile

_encode = msgspec.json.Encoder().encode
ONE_PROMPT = ("chat", "completions")  # APIs whose bodies have a prompt as it is, in one place
MOST_ENDS = 4096  # lengths of answers, of which a body was made
_NO_MESSAGE = [{"role": "user", "content": ""}]  # a chat must have one


def encode_body(
    request: Request,
    server_profile: ServerProfile,
    api: Api,
    model: str,
    stream: bool,
    *,
    extra_body: Mapping[str, Any] | None = None,
    continuous_usage: bool = False,
) -> bytes:
    """The JSON body of `request` for this kind of server, as bytes. The same input gives the same bytes.

    The output limit is `request.max_tokens`, in the server's own field. With `exact_output`, the
    fields that force this length are added, unless the user asks for an earlier end by `stop`.
    Sampling fields (such as temperature) are sent only if `request.extra` or `extra_body` has them.
    `continuous_usage` requests cumulative usage on every event if the server offers it; otherwise
    it has no effect. `request.extra`, then `extra_body`, are merged last as JSON merge patches (RFC
    7396): objects merge deeply, null removes a field, any other value replaces. An output limit in
    them, in either spelling, replaces ours. Raises TargetUnusable for a prompt of token ids if the
    API or the server does not accept it.
    """
    extra = (
        merge(request.extra, extra_body)
        if request.extra and extra_body
        else extra_body or request.extra
    )
    max_tokens = request.max_tokens
    user_limit_fields = [field for field in OUTPUT_LIMIT_FIELDS if field in extra] if extra else []
    if user_limit_fields:
        max_tokens = extra[user_limit_fields[0]]
    if api == "messages":
        return _encode(
            merge(
                {"model": model, **message_fields(request, stream, max_tokens)},
                message_extra(extra or {}),
            )
        )
    if api == "responses" or api in NON_GENERATIVE_APIS:
        made = (
            _response_fields(request, stream, max_tokens)
            if api == "responses"
            else _value_fields(request, server_profile, api)
        )
        return _encode(merge({"model": model, **made}, extra))
    fields: dict[str, Any] = {"model": model}
    if api == "chat" and isinstance(request.prompt, list) and server_profile.accepts_chat_token_ids:
        fields |= {"messages": _NO_MESSAGE, "prompt_token_ids": request.prompt}
    elif api == "chat":
        fields["messages"] = _messages(request)
    else:
        fields["prompt"] = _prompt(request, server_profile)
    fields["stream"] = stream
    if stream:  # several servers reject the options without `stream: true`
        fields["stream_options"] = dict(server_profile.stream_options)
        if continuous_usage and server_profile.continuous_usage:
            fields["stream_options"]["continuous_usage_stats"] = True
    if (
        max_tokens is not None
    ):  # without a limit, forcing a length would generate up to the server's own limit
        if not user_limit_fields:
            fields[server_profile.output_limit_field_for(api, model)] = max_tokens
        for field in (
            server_profile.length_fields
            if request.exact_output and "stop" not in (extra or ())
            else ()
        ):
            fields[field] = max_tokens if field == "min_tokens" else True
    return _encode(merge(fields, extra) if extra else fields)


def make_body_encoder(
    server_profile: ServerProfile,
    api: Api,
    model: str,
    stream: bool,
    *,
    extra_body: Mapping[str, Any] | None = None,
    continuous_usage: bool = False,
) -> Callable[[Request], bytes]:
    """`encode_body` of a request, for one kind of server. What bodies have in common but for their prompt is made once."""
    ends: dict[
        tuple[int | None, bool], tuple[bytes, bytes] | None
    ] = {}  # what is before and behind a prompt

    def whole(request: Request) -> bytes:
        return encode_body(
            request,
            server_profile,
            api,
            model,
            stream,
            extra_body=extra_body,
            continuous_usage=continuous_usage,
        )

    def make(request: Request) -> bytes:
        prompt = request.prompt
        if not isinstance(prompt, str) or request.messages is not None or request.extra:
            return whole(request)
        what = request.max_tokens, request.exact_output
        found = ends.get(what)
        if found is None:
            if len(ends) >= MOST_ENDS:
                ends.clear()
            ends[what] = (
                _ends(whole, request) if what in ends else None
            )  # the first may be the only one
            return whole(request)
        return found[0] + _encode(prompt) + found[1]

    return make if api in ONE_PROMPT else whole


def _ends(whole: Callable[[Request], bytes], request: Request) -> tuple[bytes, bytes] | None:
    """What is before and behind the prompt in the body of a request; None where it is not in one place alone."""
    found = []
    for prompt in ("one prompt", "another"):
        parts = whole(msgspec.structs.replace(request, prompt=prompt)).split(_encode(prompt))
        found.append((parts[0], parts[-1]) if len(parts) == 2 else None)
    return found[0] if found[0] == found[1] else None


def _response_fields(request: Request, stream: bool, max_tokens: int | None) -> dict[str, Any]:
    """The fields of the Responses API. It has none that force a length; texts only, no token ids."""
    if isinstance(request.prompt, list):
        raise TargetUnusable(
            "unsupported",
            "a prompt of token ids cannot be sent as a response",
            "use --api completions",
        )
    said: Any = request.prompt
    if request.messages is not None:
        said = [
            message | {"content": _response_content(message.get("content"))}
            for message in request.messages
        ]
    limit = {} if max_tokens is None else {"max_output_tokens": max_tokens}
    return {"input": said, "stream": stream, **limit}


def _response_content(content: Any) -> Any:
    """A message's content with its parts under the names of the Responses API."""
    if not isinstance(content, list):
        return content
    parts: list[Any] = []
    for part in content:
        if part.get("type") == "text":
            parts.append({"type": "input_text", "text": part["text"]})
        elif part.get("type") == "image_url":
            parts.append({"type": "input_image", "image_url": part["image_url"]["url"]})
        else:
            parts.append(part)
    return parts


def _value_fields(request: Request, server_profile: ServerProfile, api: Api) -> dict[str, Any]:
    """The fields of embeddings (texts or token ids), and of rerank, whose documents are in `extra`."""
    prompt = _prompt(request, server_profile)
    if api == "embeddings":
        return {"input": prompt, "encoding_format": "float"}
    if isinstance(prompt, list):
        raise TargetUnusable(
            "unsupported", "a query of token ids cannot be reranked", "give the prompt as text"
        )
    return {"query": prompt, "documents": [prompt]}  # the probe has no other


def add_timing_request(
    server_profile: ServerProfile,
    headers: Sequence[tuple[str, str]],
    extra_body: Mapping[str, Any] | None,
    *,
    stream: bool,
) -> tuple[tuple[tuple[str, str], ...], dict[str, Any] | None]:
    """The user's headers and body fields, and those that ask this kind of server for its account of each request."""
    fields = merge(
        server_profile.timing_request_fields
        if server_profile.reports_timing_in_streams or not stream
        else {},
        extra_body,
    )
    return (*server_profile.timing_request_headers, *headers), fields or None


def merge(value: Mapping[str, Any], patch: Mapping[str, Any] | None) -> dict[str, Any]:
    """`value` with the JSON merge patch `patch` (RFC 7396) applied. Neither argument is changed."""
    merged = dict(value)
    for key, new_value in (patch or {}).items():
        if new_value is None:
            merged.pop(key, None)
        elif isinstance(new_value, Mapping):
            old_value = merged.get(key)
            merged[key] = merge(old_value if isinstance(old_value, Mapping) else {}, new_value)
        else:
            merged[key] = new_value
    return merged


def _messages(request: Request) -> list[dict[str, Any]]:
    if request.messages is not None:
        return request.messages
    if isinstance(request.prompt, str):
        return [{"role": "user", "content": request.prompt}]
    if request.prompt is None:
        raise ValueError(f"request {request.id} has neither messages nor a prompt")
    raise TargetUnusable(
        "unsupported",
        "a prompt of token ids cannot be sent as chat",
        "use --api completions, or give the prompt as text",
    )


def _prompt(request: Request, server_profile: ServerProfile) -> str | list[int]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt
    if prompt is not None:
        if server_profile.accepts_prompt_token_ids:
            return prompt
        raise TargetUnusable(
            "unsupported",
            f"{server_profile.title} takes no token ids as prompt",
            "give the prompt as text",
        )
    if request.messages is None:
        raise ValueError(f"request {request.id} has neither messages nor a prompt")
    return "\n".join(
        text for message in request.messages if (text := _text(message.get("content")))
    )


def _text(content: Any) -> str:
    """The text of a message's content, which is a string, a list of parts (their texts are joined), or missing."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(
        part["text"]
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    )
