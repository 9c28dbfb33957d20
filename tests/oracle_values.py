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
WORDS = "…"  # in the place of a sentence or a day
_DAY = re.compile(r"\b20\d\d-?[01]\d-?[0-3]\d(?!\d)")


def figures(value: Any) -> Any:
    """Numbers, codes and names of a JSON value: without its sentences, days and what moves."""
    if isinstance(value, dict):
        return {key: figures(one) for key, one in value.items() if key not in MOVING}
    if isinstance(value, list):
        return [figures(one) for one in value]
    if isinstance(value, str):
        return WORDS if " " in value or _DAY.search(value) else value
    return float(f"{value:.12g}") if isinstance(value, float) else value


def shape(value: Any) -> Any:
    """Return the tree of keys and types of a JSON value.

    A list becomes `[shape]`, where the shapes of its elements are merged.
    """
    if isinstance(value, dict):
        return {key: {} if key in VARYING else shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return [reduce(over, map(shape, value))] if value else []
    if value is None or isinstance(value, bool):
        return "null" if value is None else "bool"
    return "text" if isinstance(value, str) else "number"


def over(one: Any, other: Any) -> Any:
    """Merge two shapes: all keys and all types of both. A tree replaces a null."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one | other | {key: over(one[key], other[key]) for key in one.keys() & other.keys()}
    if isinstance(one, list) and isinstance(other, list):
        return [reduce(over, one + other)] if one + other else []
    if isinstance(one, dict | list) or isinstance(other, dict | list):
        return other if one == "null" else one
    return "|".join(sorted({*one.split("|"), *other.split("|")}))


def columns(table: Any) -> dict[str, Any]:
    """How many rows a table has, and a hash of each column. Sorted by slot."""
    table = table.sort_by("slot")
    return {"rows": table.num_rows} | {
        name: sha(figures(table[name].to_pylist())) for name in table.column_names
    }


def sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def differences(found: Any, stored: Any, place: str = "") -> Iterator[str]:
    """Each place at which two values differ, with both. Numbers are equal within NEAR."""
    if isinstance(found, dict) and isinstance(stored, dict):
        yield from (f"{place}.{key}: new" for key in found if key not in stored)
        yield from (f"{place}.{key}: gone" for key in stored if key not in found)
        for key in (key for key in stored if key in found):
            yield from differences(found[key], stored[key], f"{place}.{key}")
    elif isinstance(found, list) and isinstance(stored, list) and len(found) == len(stored):
        for i, (one, other) in enumerate(zip(found, stored, strict=True)):
            yield from differences(one, other, f"{place}[{i}]")
    elif isinstance(found, list) and isinstance(stored, list):
        new, gone = (
            [one for one in mine if one not in others]
            for mine, others in ((found, stored), (stored, found))
        )
        yield f"{place}: {len(found)} in place of {len(stored)}, new {new}, gone {gone}"
    elif not _equal(found, stored):
        yield f"{place}: {found!r} in place of {stored!r}"


def _equal(found: Any, stored: Any) -> bool:
    if isinstance(found, float) and isinstance(stored, float | int):
        return math.isclose(found, stored, rel_tol=NEAR, abs_tol=NOTHING)
    return type(found) is type(stored) and bool(found == stored)


def written(value: Any, indent: str = "") -> str:
    """JSON in which what fits on a line stands on one, so that a change shows where it is."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= WIDE:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        parts = [
            f"{json.dumps(key, ensure_ascii=False)}: {written(one, inner)}"
            for key, one in value.items()
        ]
    else:
        parts = [written(one, inner) for one in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{last}"
