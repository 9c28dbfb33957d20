"""Rows and files of traces for tests, one function for each format."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def written(path: Path, *rows: Any) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_text(text, "utf-8")
    return path


def mooncake(at: float, read: int, write: int, *hashes: int) -> dict[str, Any]:
    return {"timestamp": at, "input_length": read, "output_length": write, "hash_ids": list(hashes)}


def bailian(
    chat: int, parent: int, at: float, read: int, write: int, *hashes: int
) -> dict[str, Any]:
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": at,
        "input_length": read,
        "output_length": write,
        "type": "text",
        "turn": 1,
        "hash_ids": list(hashes),
    }


def shape(at: float, read: int, write: int, *hashes: int, **more: Any) -> dict[str, Any]:
    size = {
        "block_size": read / len(hashes),
        "input_source": "server",
        "status": "ok",
        "stream": True,
    }
    return {**mooncake(at, read, write, *hashes), **size, **more}


def weka(name: str, *requests: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": name,
        "models": ["m"],
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": list(requests),
    }


def call(at: float, read: int, write: int, *hashes: int, kind: str = "n") -> dict[str, Any]:
    return {"t": at, "type": kind, "model": "m", "in": read, "out": write, "hash_ids": list(hashes)}


def subagent(at: float, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"type": "subagent", "t": at, "agent_id": "x", "requests": list(requests)}


def tracelab(session: str, second: int, prefix: int, added: int, write: int) -> dict[str, Any]:
    events = [
        {"event_type": "tool_result", "timestamp": "2026-06-08T10:00:00Z"},
        {"event_type": "user_message", "timestamp": f"2026-06-08T10:00:{second:02d}.500Z"},
        {"event_type": "text", "timestamp": "2026-06-08T10:09:00Z"},
    ]
    return {
        "session_id": session,
        "round_index": 0,
        "input_tokens_total": prefix + added,
        "prefix_tokens": prefix,
        "newly_append_tokens": added,
        "output_tokens": write,
        "timing_events": events,
    }


def span(
    start_ns: int, read: int | None, write: int | None, operation: str = "chat"
) -> dict[str, Any]:
    usage = (("input_tokens", read), ("output_tokens", write))
    counts = [
        {"key": f"gen_ai.usage.{name}", "value": {"intValue": str(n)}}
        for name, n in usage
        if n is not None
    ]
    kind = {"key": "gen_ai.operation.name", "value": {"stringValue": operation}}
    talk = {"key": "gen_ai.conversation.id", "value": {"stringValue": "talk"}}
    return {"startTimeUnixNano": str(start_ns), "attributes": [kind, talk, *counts]}


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def captured(
    second: int, read: int, write: int, *, binary: bool = False, usage: bool = True
) -> dict[str, Any]:
    answer = json.dumps(
        {"usage": {"prompt_tokens": read, "completion_tokens": write}} if usage else {}
    )
    data = base64.b64encode(answer.encode()).decode() if binary else answer
    return {
        "captureData": {
            "endpointInput": {"data": "{}", "encoding": "JSON"},
            "endpointOutput": {"data": data, "encoding": "BASE64" if binary else "JSON"},
        },
        "eventMetadata": {"inferenceTime": f"2026-04-29T00:03:{second:02d}Z"},
    }
