"""Request -> body bytes, by the table of quirks. Pure, and built ahead of the send: never in the way of the clock.

Nothing is sent that the row of the server does not list, except what the user asked for by name. No server is known
by name here: a rule that needs an `if name ==` belongs into `quirks.py` as a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import TargetUnusable
from ..request import Request
from .quirks import MAX_FIELDS, Api, Quirk

_encode = msgspec.json.Encoder().encode


def body(
    request: Request,
    quirk: Quirk,
    api: Api,
    model: str,
    stream: bool,
    *,
    extra_body: Mapping[str, Any] | None = None,
    continuous_usage: bool = False,
) -> bytes:
    """The JSON body of `request` for a server of this make, as bytes; the same input gives the same bytes.

    Asked-for length: `request.max_tokens` in the server's own field; with `exact_output` also the fields that force it.
    Sampling fields (temperature and the like) are sent only when `request.extra` or `extra_body` name them.
    `continuous_usage` asks for cumulative usage on every event where the server offers it, else it does nothing.
    `request.extra`, then `extra_body`, are merged last as JSON merge patches (RFC 7396): objects merge deeply, null
    takes a field out, anything else replaces. A limit named there under either spelling replaces ours.
    Raises TargetUnusable for a prompt of token ids where the API or the server takes none.
    """
    extra = merge(request.extra, extra_body) if request.extra and extra_body else extra_body or request.extra
    asked = request.max_tokens
    named = [field for field in MAX_FIELDS if field in extra] if extra else []
    if named:
        asked = extra[named[0]]
    value: dict[str, Any] = {}
    for field in quirk.fields(api):
        if field == "model":
            value[field] = model
        elif field == "messages":
            value[field] = _messages(request)
        elif field == "prompt":
            value[field] = _prompt(request, quirk)
        elif field == "stream":
            value[field] = stream
        elif field == "stream_options":
            if stream:  # without `stream: true` it is an error on several servers
                options = dict(quirk.stream_options)
                if continuous_usage and quirk.continuous_usage:
                    options["continuous_usage_stats"] = True
                value[field] = options
        elif asked is None:
            continue  # no length asked for: forcing one would run to the server's own limit
        elif field == "max_tokens":
            if not named:
                value[quirk.limit_field(api, model)] = asked
        elif request.exact_output:
            value[field] = asked if field == "min_tokens" else True
    return _encode(merge(value, extra) if extra else value)


def merge(value: Mapping[str, Any], patch: Mapping[str, Any] | None) -> dict[str, Any]:
    """`value` with the JSON merge patch `patch` (RFC 7396) applied; neither is changed."""
    merged = dict(value)
    for key, new in (patch or {}).items():
        if new is None:
            merged.pop(key, None)
        elif isinstance(new, Mapping):
            old = merged.get(key)
            merged[key] = merge(old if isinstance(old, Mapping) else {}, new)
        else:
            merged[key] = new
    return merged


def _messages(request: Request) -> list[dict[str, Any]]:
    if request.messages is not None:
        return request.messages
    if isinstance(request.prompt, str):
        return [{"role": "user", "content": request.prompt}]
    if request.prompt is None:
        raise ValueError(f"request {request.id} has neither messages nor a prompt")
    raise TargetUnusable(
        "a prompt of token ids cannot be sent as chat", "use --api completions, or give the prompt as text"
    )


def _prompt(request: Request, quirk: Quirk) -> str | list[int]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt
    if prompt is not None:
        if quirk.prompt_ids:
            return prompt
        raise TargetUnusable(f"{quirk.title} takes no token ids as prompt", "give the prompt as text")
    if request.messages is None:
        raise ValueError(f"request {request.id} has neither messages nor a prompt")
    return "\n".join(text for message in request.messages if (text := _text(message.get("content"))))


def _text(content: Any) -> str:
    """The text of a message's content: a string, a list of parts of which the text counts, or nothing."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
