"""Damage the values of a document so that it is still a document.

Documents are JSON, JSON lines, YAML, a zip of such files, or a directory of files in one input.
Randomly changed bytes seldom get past the first parser. To reach the code behind it, a value is
replaced, removed, duplicated, renamed or moved to the position of another value.
"""

from __future__ import annotations

import io
import json
import lzma
import zipfile
import zlib
from copy import deepcopy
from random import Random
from typing import Any

import yaml

_OF_ARCHIVES = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError)
BETWEEN = b"\0\0file\0\0"  # two files of a folder
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    2**31,
    2**63,
    -(2**63),
    10**30,
    "",
    " ",
    "0",
    "1e3",
    "5s",
    "10ms",
    "p99",
    "p100",
    "nan",
    "../x",
    "/dev/null",
    "a" * 300,
    "\x00",
    "\x1b[31m",
    "\u202e",
    "ß",
    "http://[::1",
    "2026-02-30",
    "1103-01-01T00:00:00Z",
    "null",
    "${X}",
    [],
    {},
    [[]],
    [{}],
    {"": None},
    [None] * 40,
)
TREES = {
    "workload": "yaml",
    "contract": "yaml",
    "prices": "yaml",
    "targets": "yaml",
    "preset": "yaml",
    "foreign": "json",
    "run_json": "json",
    "summary": "json",
    "capacity": "json",
    "page": "json",
    "facts": "json",
    "request": "json",
    "trace": "lines",
    "dataset": "lines",
    "questions": "lines",
    "calls": "lines",
    "metrics_page": "lines",
    "mlperf_log": "lines",
    "bundle": "zip",
    "folder": "files",
}
"""Name of a parser -> what it reads."""


def changed(name: str, data: bytes, random: Random) -> bytes:
    """Return `data`, an input of the parser `name`, with one to three values changed.

    Data that is no document is returned unchanged.
    """
    return _changed(TREES.get(name, ""), data, random)


def _changed(kind: str, data: bytes, random: Random) -> bytes:
    try:
        if kind in ("json", "yaml"):
            return _document(kind, data, random)
        if kind == "lines":
            return _one_of(data.split(b"\n"), b"\n", random)
        if kind == "files":
            return _one_of(data.split(BETWEEN), BETWEEN, random)
        if kind == "zip":
            return _archive(data, random)
    except (ValueError, RecursionError, yaml.YAMLError, *_OF_ARCHIVES):
        pass
    return data


def _document(kind: str, data: bytes, random: Random) -> bytes:
    try:
        tree = json.loads(data)
    except ValueError:
        if kind != "yaml":
            raise
        tree = yaml.load(data, yaml.CSafeLoader)  # in JSON's form from here on, which is YAML too
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        tree = _tree(tree, random)
    return json.dumps(tree, ensure_ascii=random.random() < 0.5, default=str).encode(
        "utf-8", "surrogatepass"
    )


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every value of a tree, as what holds it and its key there."""
    locations: list[tuple[Any, Any]] = []
    left = [tree]
    while left:
        holder = left.pop()
        keys = (
            holder.keys()
            if isinstance(holder, dict)
            else range(len(holder))
            if isinstance(holder, list)
            else ()
        )
        for key in keys:
            locations.append((holder, key))
            left.append(holder[key])
    return locations


def _tree(tree: Any, random: Random) -> Any:
    places = _places(tree)
    if not places:
        return deepcopy(random.choice(ODD))
    holder, key = random.choice(places)
    other = random.choice(places)
    value = holder[key]
    match random.randrange(8):
        case 0:
            del holder[key]
        case 1:
            holder[key] = deepcopy(other[0][other[1]])
        case 2 if isinstance(holder, list):
            holder.insert(key, value)
        case 2 | 3 if isinstance(holder, dict):
            holder[str(key)[:-1] if random.random() < 0.5 else str(other[1])] = holder.pop(key)
        case 4 if isinstance(value, int | float):
            holder[key] = random.choice(
                (-value, value * 1000, value / 1000, value + 1, str(value), [value])
            )
        case 4 | 5 if isinstance(value, str):
            at = random.randrange(len(value) + 1)
            holder[key] = (
                value[:at]
                + random.choice(("", " ", "-", ".", "0", "9" * 20, "\n", "é", ","))
                + value[at + 1 :]
            )
        case 6:
            holder[key] = [value] if random.random() < 0.5 else {"x": value}
        case _:
            holder[key] = deepcopy(random.choice(ODD))
    return tree


def _one_of(parts: list[bytes], between: bytes, random: Random) -> bytes:
    at = random.randrange(len(parts))
    match random.randrange(6):
        case 0:
            del parts[at]
        case 1:
            parts.insert(at, random.choice(parts))
        case _:
            name, nul, content = parts[at].rpartition(b"\0")
            parts[at] = name + nul + _line(content, random)
    return between.join(parts)


def _line(line: bytes, random: Random) -> bytes:
    """Return a line of JSON with one value changed, or another line with one word replaced."""
    if line[:1] in (b"{", b"["):
        return b"\n".join(_changed("json", text_line, random) for text_line in line.split(b"\n"))
    fields = line.split(b" ")
    fields[random.randrange(len(fields))] = str(random.choice(ODD)).encode("utf-8", "replace")
    return b" ".join(fields)


def _archive(data: bytes, random: Random) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(member.filename, archive.read(member)) for member in archive.infolist()]
    if not members:
        return data
    at = random.randrange(len(members))
    name, content = members[at]
    match random.randrange(4):
        case 0:
            members[at] = (
                random.choice(("../x", "/x", "a/../../x", "C:\\x", " ", "x" * 300, members[0][0])),
                content,
            )
        case 1:
            del members[at]
        case _:
            members[at] = (
                name,
                _changed("json" if name.endswith(".json") else "lines", content, random),
            )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in dict(members).items():
            archive.writestr(name, content)
    return buffer.getvalue()
