"""Builds the types of the `openai` package for streamed responses before a call is sent.

pydantic builds the validators of a type when it is first used. For the events of the Responses API
that takes half a second of CPU time, once in a process, and without this module it falls between
the first bytes of the first response and its first event, so that it looks like the server's time.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

log = logging.getLogger("loadgen_sdk")

_MESSAGE: dict[str, Any] = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "", "annotations": []}],
}
_RESPONSE: dict[str, Any] = {
    "id": "r",
    "object": "response",
    "created_at": 0,
    "status": "completed",
    "model": "m",
    "output": [_MESSAGE],
    "parallel_tool_calls": False,
    "tool_choice": "auto",
    "tools": [],
}
_EVENTS: tuple[dict[str, Any], ...] = (
    {"type": "response.created", "response": _RESPONSE},
    {"type": "response.output_item.added", "output_index": 0, "item": _MESSAGE},
    {"type": "response.content_part.added", "part": _MESSAGE["content"][0]},
    {"type": "response.output_text.delta", "delta": "", "logprobs": []},
    {"type": "response.completed", "response": _RESPONSE},
)
"""One event of each kind whose type takes long to build."""


@functools.cache
def build_response_event_types() -> None:
    """Make openai and pydantic build the types of the events of a streamed response.

    Parsing one event of each kind builds its type. The cache makes every call after the first one
    return at once.
    """
    try:
        from openai._models import construct_type
        from openai.types.responses import ResponseStreamEvent

        for event in _EVENTS:
            construct_type(type_=ResponseStreamEvent, value=event)
    except Exception:
        # Another version of the package has other types. Its first stream only starts slower.
        log.debug("the types of streamed responses could not be prepared", exc_info=True)
