"""Writes `docs/reference/summary.md`, the reference of `summary.json`, one field a line.

The types and units come from the structs of the summary, the list of metrics from their rows, and
the texts from `tests/data/summary_reference.yaml`. `python tests/make_summary_reference.py` writes
the page again; `test_summary_reference.py` checks that the page is what this script would write.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
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
MAX_PATHS = 2
"""How many places of a block the page names."""
SCALARS = {
    int: "number",
    float: "number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}


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


def find_paths(kind: Any, path: str = "") -> Iterator[tuple[type[msgspec.Struct], str]]:
    """Yield every struct that a type contains, with its path in summary.json.

    `[]` in a path stands for the entries of a list, and `NAME` for the keys of an object.
    """
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind, path
        names = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
        for name, field_type in typing.get_type_hints(kind).items():
            yield from find_paths(field_type, f"{path}.{names[name]}".lstrip("."))
        return
    origin = typing.get_origin(kind)
    if origin is tuple:
        path = f"{path}[]"
    if origin is dict:
        path = f"{path}.NAME"
    for argument in typing.get_args(kind):
        yield from find_paths(argument, path)


def describe_paths(paths: Sequence[str]) -> str:
    """Return the sentence that says where a block stands and introduces its fields."""
    if paths == [""]:
        return "It has the following fields:"
    unique_paths = list(dict.fromkeys(paths))
    shortest = sorted(unique_paths, key=path_depth)[:MAX_PATHS]
    listed = " and ".join(f"`{path}`" for path in shortest)
    if len(unique_paths) > MAX_PATHS:
        return f"This block is stored at {listed}, among others. It has these fields:"
    return f"This block is stored at {listed}. It has these fields:"


def path_depth(path: str) -> int:
    """Return the number of names in a path."""
    return path.count(".")


def render_struct(
    struct: type[msgspec.Struct], texts: Mapping[str, Any], paths: Sequence[str]
) -> str:
    """Return the section of one struct.

    Raises ValueError if a field has no text, or a text has no field.
    """
    field_types = typing.get_type_hints(struct)
    names = dict(zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True))
    if set(texts["fields"]) != set(names):
        difference = set(texts["fields"]) ^ set(names)
        raise ValueError(f"{TEXTS.name}: {struct.__name__}: {sorted(difference)}")
    lines = [f"### {struct.__name__}", "", texts["text"], "", describe_paths(paths), ""]
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
    structs: dict[str, type[msgspec.Struct]] = {}
    paths: dict[str, list[str]] = {}
    for struct, path in find_paths(Summary):
        structs[struct.__name__] = struct
        paths.setdefault(struct.__name__, []).append(path)
    described = {name for section in sections for name in section.get("structs", {})}
    if described != set(structs):
        raise ValueError(f"{TEXTS.name}: {sorted(described ^ set(structs))}")
    parts = [texts["introduction"]]
    for section in sections:
        parts.append(f"## {section['title']}\n")
        if "text" in section:
            parts.append(f"{section['text']}\n")
        for name, struct_texts in section.get("structs", {}).items():
            parts.append(render_struct(structs[name], struct_texts, paths[name]))
        if "codes" in section:
            parts.append(render_codes(section["codes"]))
        if section is sections[0]:
            parts += [texts["metric_definitions"], make_figures.render_metrics(), ""]
    return "\n".join([*parts, texts["end"]])


if __name__ == "__main__":
    PAGE.write_text(render_page(), "utf-8")
