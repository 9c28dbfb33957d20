"""Reads result files of other tools: their figures under their own definitions, never as records.

A file is recognised by its content, not by its name: by the rows of `loadgen.formats`.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec

from loadgen import formats
from loadgen.core.errors import UserError, of_reading
from loadgen.formats import FORMATS, ForeignResult, FormatRow, ToolFile

BROKEN = (
    KeyError,
    TypeError,
    ValueError,
    AttributeError,
    IndexError,
)  # what a reader makes of a value of another form


def left_by_tools(folder: Path) -> Path | None:
    """The result file of another tool in a folder, by its name; None where there is none."""
    for row in FORMATS.rows():
        for name in row.files:
            if (folder / name).is_file():
                return folder / name
    return None


def read_result(path: Path) -> ForeignResult:
    """The result in a file. Raises UserError for a file that cannot be read or that no known tool has written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            of_reading(error), f"cannot be read: {error.strerror}", str(path), ""
        ) from None
    return parse_result(data, str(path))


def parse_result(data: bytes, where: str = "") -> ForeignResult:
    """The result in the bytes of a file; `where` names it. Raises UserError for the file of an unknown tool."""
    if data.startswith(b"PK"):
        hint = f"of a bundle: unzip {where}, then give result"
        raise UserError("wrong_format", "an archive, not a result", where, hint)
    text = data.decode("utf-8", "replace")
    try:
        value, line_count = _json(text)
        problem = ""
    except (ValueError, RecursionError) as error:
        value, line_count = None, 0
        problem = (
            ": nested too deeply" if isinstance(error, RecursionError) else f": no JSON ({error})"
        )
    file = ToolFile(where, text, value if isinstance(value, dict) else {}, line_count)
    row = next((row for row in FORMATS.rows() if formats.is_result(row, file)), None)
    if row is None and where.endswith((".yaml", ".yml")):
        raise _input_file(where, text)
    if row is None:
        raise UserError("wrong_format", f"not the result of a known tool{problem}", where, _known())
    parsed = _read(row, file)
    if not parsed.metrics:
        raise UserError(
            "no_figure", f"a result of {row.tool} without one figure", where, "did its run finish?"
        )
    return parsed


def _input_file(where: str, text: str) -> UserError:
    """Return the error for a YAML file in the place of a result: it is run or validated first."""
    is_contract = re.search("(?m)^levels:", text) is not None
    kind, command = ("contract", "validate") if is_contract else ("workload", "run")
    hint = f"type: loadgen {command} {shlex.quote(where)} --url http://HOST:8000"
    what = f"a YAML file is no result; it looks like a {kind}"
    return UserError("wrong_format", what, where, hint)


def _read(row: FormatRow, file: ToolFile) -> ForeignResult:
    try:
        parsed = formats.read_result(row, file)
    except BROKEN as error:
        what = f"looks like a result of another tool, but not one that can be read: {type(error).__name__} {error}"
        raise UserError("wrong_format", what, file.where, _known()) from None
    return msgspec.structs.replace(parsed, tool=row.tool, counts=row.definitions)


def _known() -> str:
    return f"known: {', '.join(row.tool for row in FORMATS.builtin_rows if row.read)}"


def _json(text: str) -> tuple[Any, int]:
    """A JSON document and 0, or the last of several JSON lines and the number of lines."""
    try:
        return json.loads(text), 0
    except json.JSONDecodeError:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 1:
            raise
        return json.loads(lines[-1]), len(lines)
