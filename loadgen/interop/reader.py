"""Reads result files of other tools: their metrics under their own definitions, without records.

A file is recognised by its content, not by its name. The rows of `loadgen.formats` do it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadgen import formats
from loadgen.core.errors import UserError, of_reading
from loadgen.formats import FORMATS, ForeignResult, FormatRow, ToolFile

READER_ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What a reader raises if a value in the file has an unexpected form."""

ZIP_MAGIC = b"PK"


def find_tool_file(folder: Path) -> Path | None:
    """Return the result file of another tool in a directory by its name, or None."""
    for row in FORMATS.rows():
        for name in row.files:
            path = folder / name
            if path.is_file():
                return path
    return None


def read_result(path: Path) -> ForeignResult:
    """Return the result in a file.

    Raises UserError for a file that cannot be read or that no known tool has written.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            of_reading(error), f"cannot be read: {error.strerror}", str(path), ""
        ) from None
    return parse_result(data, str(path))


def parse_result(data: bytes, where: str = "") -> ForeignResult:
    """Return the result in the content of a file.

    Raises UserError, with `where` as its place, for the file of an unknown tool.
    """
    if data.startswith(ZIP_MAGIC):
        raise UserError(
            "wrong_format",
            "this is an archive, not a result",
            where,
            f"if it is a bundle, extract it with unzip {where}, then give the folder result",
        )
    text = data.decode("utf-8", "replace")
    document = _parse_json(text)
    value = document.value if isinstance(document.value, dict) else {}
    file = ToolFile(where, text, value, document.line_count)
    row = _find_format(file)
    if row is None:
        if where.endswith((".yaml", ".yml")):
            raise _input_file_error(where, text)
        problem = f"the result of no known tool{document.problem}"
        raise UserError("wrong_format", problem, where, _known_tools())
    result = _read_with_format(row, file)
    if not result.metrics:
        problem = f"the result of {row.tool} has no metrics"
        raise UserError("no_figure", problem, where, "check that its run finished")
    return result


def _find_format(file: ToolFile) -> FormatRow | None:
    """Return the first format in the table that recognises a file, or None."""
    for row in FORMATS.rows():
        if formats.is_result(row, file):
            return row
    return None


class _Document(NamedTuple):
    """The JSON in a file.

    Attributes:
        value: The value; None if the file is not JSON.
        line_count: How many JSON lines the file has, of which the value is the last; else 0.
        problem: Why the file is not JSON, as the end of a sentence.
    """

    value: Any
    line_count: int = 0
    problem: str = ""


def _parse_json(text: str) -> _Document:
    """Return a JSON document, or the last of several JSON lines.

    Some tools append one line to a file for each run, and the last one is the newest.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        with contextlib.suppress(ValueError):
            return _Document(json.loads(text))
        last_line = lines[-1] if lines else ""
        return _Document(json.loads(last_line), len(lines))
    except RecursionError:
        return _Document(None, problem=": nested too deeply")
    except ValueError as error:
        return _Document(None, problem=f": not JSON ({error})")


def _input_file_error(where: str, text: str) -> UserError:
    """Return the error for a YAML file in place of a result: it has to be run or validated."""
    is_contract = re.search("(?m)^levels:", text) is not None
    kind = "contract" if is_contract else "workload"
    command = "validate" if is_contract else "run"
    return UserError(
        "wrong_format",
        f"a YAML file is not a result; it looks like a {kind}",
        where,
        f"run: loadgen {command} {shlex.quote(where)} --url http://HOST:8000",
    )


def _read_with_format(row: FormatRow, file: ToolFile) -> ForeignResult:
    """Return the result by the reader of its tool, with the name and the definitions of the tool.

    Raises:
        UserError: The reader fails, because a value in the file has an unexpected form.
    """
    try:
        result = formats.read_result(row, file)
    except READER_ERRORS as error:
        problem = (
            f"looks like a result of {row.tool}, but cannot be read: {type(error).__name__} {error}"
        )
        raise UserError("wrong_format", problem, file.where, _known_tools()) from None
    return msgspec.structs.replace(result, tool=row.tool, counts=row.definitions)


def _known_tools() -> str:
    tools = ", ".join(row.tool for row in FORMATS.builtin_rows if row.read)
    return f"known: {tools}"
