"""Writes `docs/reference/summary.md`, the reference of `summary.json`, one field a line.

The types and units come from the structs of the summary, the list of metrics from their rows, and
the texts from `tests/data/summary_reference.yaml`. `python tests/make_summary_reference.py` writes
the page again; `test_summary_reference.py` checks that the page is what this script would write.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import make_figures
import msgspec
import yaml

from loadgen.core.metrics import reasons
from loadgen.core.metrics.summary import Summary

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/reference/summary.md"
TEXTS = TESTS / "data/summary_reference.yaml"
UNITS = {
    "_ms": "milliseconds",
    "_per_s": "per second",
    "_rps": "per second",
    "_s": "seconds",
    "_share": "fraction",
    "_bytes": "bytes",
}
"""The unit of a number by the end of its name. A longer ending stands before a shorter one."""
SCALARS = {
    int: "number",
    float: "number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}


def find_structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield every struct that a type contains, the outer ones first."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field_type in typing.get_type_hints(kind).values():
            yield from find_structs(field_type)
    for argument in typing.get_args(kind):
        yield from find_structs(argument)


def describe_type(kind: Any) -> str:
    """Return the type of a field as text, for example "list of [Cause](#cause)"."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(
            "null" if part is type(None) else describe_type(part) for part in arguments
        )
    if origin is typing.Literal:
        return "text"
    if origin is tuple:
        is_pair = Ellipsis not in arguments
        return "pair of numbers" if is_pair else f"list of {_plural(describe_type(arguments[0]))}"
    if origin is dict:
        return f"object whose values are {_plural(describe_type(arguments[1]))}"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    return SCALARS.get(kind, "any value")


def _plural(name: str) -> str:
    """Return a type in the plural; names of blocks stay as they are."""
    plurals = {"number": "numbers", "text": "texts", "pair of numbers": "pairs of numbers"}
    plurals["object whose values are numbers"] = "objects whose values are numbers"
    return plurals.get(name, name)


def _unit(name: str, type_text: str) -> str:
    """Return the unit of a field as ", milliseconds", or "" if it has none."""
    if type_text.startswith("number"):
        for ending, unit in UNITS.items():
            if name.endswith(ending):
                return f", {unit}"
    return ""


def render_struct(struct: type[msgspec.Struct], texts: Mapping[str, Any]) -> str:
    """Return the section of one struct.

    Raises ValueError if a field has no text, or a text has no field.
    """
    field_types = typing.get_type_hints(struct)
    names = dict(zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True))
    if set(texts["fields"]) != set(names):
        difference = set(texts["fields"]) ^ set(names)
        raise ValueError(f"{TEXTS.name}: {struct.__name__}: {sorted(difference)}")
    lines = [f"### {struct.__name__}", "", texts["text"], ""]
    for key, name in names.items():
        type_text = describe_type(field_types[name])
        unit = _unit(key, type_text)
        lines.append(f"- `{key}` ({type_text}{unit}): {texts['fields'][key]}")
    return "\n".join([*lines, ""])


def render_codes(groups: Mapping[str, Mapping[str, str]]) -> str:
    """Return the lists of reason codes. Raises ValueError for a code without a sentence."""
    lines = []
    for heading, codes in groups.items():
        unknown = set(codes) - set(reasons.SENTENCES)
        if unknown:
            raise ValueError(f"{TEXTS.name}: unknown codes {sorted(unknown)}")
        lines += [
            f"**{heading}**",
            "",
            *(f"- `{code}`: {text}" for code, text in codes.items()),
            "",
        ]
    return "\n".join(lines)


def render_page() -> str:
    """Return the text of the page."""
    texts = yaml.safe_load(TEXTS.read_text("utf-8"))
    sections = texts["sections"]
    structs = {struct.__name__: struct for struct in find_structs(Summary)}
    described = {name for section in sections for name in section.get("structs", {})}
    if described != set(structs):
        raise ValueError(f"{TEXTS.name}: {sorted(described ^ set(structs))}")
    parts = [texts["introduction"]]
    for section in sections:
        parts.append(f"## {section['title']}\n")
        if "text" in section:
            parts.append(f"{section['text']}\n")
        for name, struct_texts in section.get("structs", {}).items():
            parts.append(render_struct(structs[name], struct_texts))
        if "codes" in section:
            parts.append(render_codes(section["codes"]))
        if section is sections[0]:
            parts += [texts["metric_definitions"], make_figures.render_metrics(), ""]
    return "\n".join([*parts, texts["end"]])


if __name__ == "__main__":
    PAGE.write_text(render_page(), "utf-8")
