"""Join the pieces of tool calls in the events of a response. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from .event_fields import decode_any


def join_tool_calls(deltas: Sequence[msgspec.Raw]) -> tuple[dict[str, str], ...]:
    """Return the tool calls of a response: id, name and arguments (JSON, as text).

    Each delta is a list of pieces, or a single call of the older field `function_call`. Pieces with
    the same index belong to the same call: the first one has its id and name, and all have a part
    of its arguments.
    """
    calls_by_index: dict[int, dict[str, str]] = {}
    for delta in deltas:
        value = decode_any(delta)
        pieces = value if isinstance(value, list) else [{"function": value}]
        for position, piece in enumerate(pieces):
            if isinstance(piece, dict):
                _add_piece(calls_by_index, piece, position)

    return tuple(calls_by_index[index] for index in sorted(calls_by_index))


def _add_piece(
    calls_by_index: dict[int, dict[str, str]], piece: Mapping[str, object], position: int
) -> None:
    """Add a piece to its call, or begin a new call with it.

    A piece without an index belongs to the call at its position in the list of pieces. Fields of
    another type than expected are converted to text, because a server may send anything here.
    """
    index = piece.get("index")
    if not isinstance(index, int):
        index = position

    call = calls_by_index.setdefault(index, {"id": "", "name": "", "arguments": ""})
    function = piece.get("function")
    if not isinstance(function, dict):
        function = {}

    call["id"] = call["id"] or str(piece.get("id") or "")
    call["name"] = call["name"] or str(function.get("name") or "")
    call["arguments"] += str(function.get("arguments") or "")
