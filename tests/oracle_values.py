"""Reduce values to what `test_oracle.py` stores, and compare two stored values. Pure."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from functools import reduce
from typing import Any

MOVING = frozenset(
    (
        "started",
        "ended",
        "made",
        "host",
        "version",
        "command",
        "cpu_s",
        "peak_rss_bytes",
        "cpu_share_max",
        "waited_share_max",
    )
)
"""Keys of the wall clock, of this machine, of this version and of this process."""
VARYING = frozenset(("versions",))
"""Keys of mappings whose keys are those of this machine."""
NEAR = 1e-11  # relative: a figure is kept with 12 digits
NOTHING = 1e-12  # absolute: what is nothing but rounding
WIDE = 240
SENTENCE = "…"  # in the place of a sentence or a day
_DAY = re.compile(r"\b20\d\d-?[01]\d-?[0-3]\d(?!\d)")


def stable_values(value: Any) -> Any:
    """Numbers, codes and names of a JSON value: without its sentences, days and what moves."""
    if isinstance(value, dict):
        return {key: stable_values(child) for key, child in value.items() if key not in MOVING}
    if isinstance(value, list):
        return [stable_values(child) for child in value]
    if isinstance(value, str):
        return SENTENCE if " " in value or _DAY.search(value) else value
    return float(f"{value:.12g}") if isinstance(value, float) else value


def shape(value: Any) -> Any:
    """Return the tree of keys and types of a JSON value.

    A list becomes `[shape]`, where the shapes of its elements are merged.
    """
    if isinstance(value, dict):
        return {key: {} if key in VARYING else shape(child) for key, child in value.items()}
    if isinstance(value, list):
        return [reduce(over, map(shape, value))] if value else []
    if value is None or isinstance(value, bool):
        return "null" if value is None else "bool"
    return "text" if isinstance(value, str) else "number"


def over(first_shape: Any, other: Any) -> Any:
    """Merge two shapes: all keys and all types of both. A tree replaces a null."""
    if isinstance(first_shape, dict) and isinstance(other, dict):
        return (
            first_shape
            | other
            | {key: over(first_shape[key], other[key]) for key in first_shape.keys() & other.keys()}
        )
    if isinstance(first_shape, list) and isinstance(other, list):
        return [reduce(over, first_shape + other)] if first_shape + other else []
    if isinstance(first_shape, dict | list) or isinstance(other, dict | list):
        return other if first_shape == "null" else first_shape
    return "|".join(sorted({*first_shape.split("|"), *other.split("|")}))


def columns(table: Any) -> dict[str, Any]:
    """How many rows a table has, and a hash of each column. Sorted by slot."""
    table = table.sort_by("slot")
    return {"rows": table.num_rows} | {
        name: sha(stable_values(table[name].to_pylist())) for name in table.column_names
    }


def sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def differences(current: Any, stored: Any, place: str = "") -> Iterator[str]:
    """Each place at which two values differ, with both. Numbers are equal within NEAR."""
    if isinstance(current, dict) and isinstance(stored, dict):
        yield from (f"{place}.{key}: new" for key in current if key not in stored)
        yield from (f"{place}.{key}: gone" for key in stored if key not in current)
        for key in (key for key in stored if key in current):
            yield from differences(current[key], stored[key], f"{place}.{key}")
    elif isinstance(current, list) and isinstance(stored, list) and len(current) == len(stored):
        for i, (current_item, other) in enumerate(zip(current, stored, strict=True)):
            yield from differences(current_item, other, f"{place}[{i}]")
    elif isinstance(current, list) and isinstance(stored, list):
        new, gone = (
            [map_key for map_key in mine if map_key not in other_document]
            for mine, other_document in ((current, stored), (stored, current))
        )
        yield f"{place}: {len(current)} in place of {len(stored)}, new {new}, gone {gone}"
    elif not _equal(current, stored):
        yield f"{place}: {current!r} in place of {stored!r}"


def _equal(current: Any, stored: Any) -> bool:
    if isinstance(current, float) and isinstance(stored, float | int):
        return math.isclose(current, stored, rel_tol=NEAR, abs_tol=NOTHING)
    return type(current) is type(stored) and bool(current == stored)


def written(value: Any, indent: str = "") -> str:
    """JSON in which what fits on a line stands on one, so that a change shows where it is."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= WIDE:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        parts = [
            f"{json.dumps(key, ensure_ascii=False)}: {written(child, inner)}"
            for key, child in value.items()
        ]
    else:
        parts = [written(child, inner) for child in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{last}"
