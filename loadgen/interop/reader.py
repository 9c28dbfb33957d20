"""Reads result files of other tools: their metrics under their own definitions, without records.

A file is recognised by its content, not by its name. The rows of `loadgen.formats` do it.
"""

from __future__ import annotations

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

BEGINNING_OF_VALUE = re.compile(r"""-?[a-zA-Z]*|"(?:[^"\\\n]|\\.)*\\?""")
"""What is left of a JSON value that was cut: nothing, a part of a word, or an open string."""


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
            of_reading(error),
            f"cannot be read: {error.strerror}",
            str(path),
            "check the path and its permissions",
        ) from None
    return parse_result(data, str(path))


def parse_result(data: bytes, where: str = "") -> ForeignResult:
    """Return the result in the content of a result file that another tool wrote.

    The tool is recognised by the content. Its reader in `loadgen.formats` then reads the metrics.

    Args:
        data: The content of the file.
        where: The path of the file for error messages, "" if there is no file.

    Raises:
        UserError: No known tool has written the file, or it has no metrics.
    """
    if data.startswith(ZIP_MAGIC):
        raise _archive_error(where)

    if not data.strip():
        raise UserError(
            "empty_file",
            "the file is empty",
            where,
            "repeat the run of the tool, or copy its result again",
        )

    text = data.decode("utf-8", "replace")
    document = _parse_json(text)
    json_object = document.value if isinstance(document.value, dict) else {}
    file = ToolFile(where, text, json_object, document.line_count)
    tool_format = _find_format(file)
    if tool_format is None:
        raise _unknown_format_error(file, document)

    result = _read_with_format(tool_format, file)
    if not result.metrics:
        problem = f"the result of {tool_format.tool} has no metrics"
        raise UserError("no_figure", problem, where, "check that its run finished")

    return result


def _archive_error(where: str) -> UserError:
    """Return the error for a ZIP archive, such as a bundle, in place of a result."""
    return UserError(
        "wrong_format",
        "this is an archive, not a result",
        where,
        f"if it is a bundle, extract it with unzip {where}, then give the folder result",
    )


def _unknown_format_error(file: ToolFile, document: _Document) -> UserError:
    """Return the error for a file that is not the result of a tool that loadgen knows.

    Results are JSON. A YAML file is usually an input of loadgen that was passed by mistake, so it
    gets an error of its own, and so does a file that is only the beginning of a JSON document.
    """
    is_yaml = file.where.endswith((".yaml", ".yml"))
    if is_yaml:
        return _input_file_error(file.where, file.text)
    if document.is_truncated:
        return UserError(
            "damaged_file",
            f"the file ends before its JSON is complete{document.problem}",
            file.where,
            "copy the file again, or repeat the run of the tool: it may have been stopped while it "
            "wrote the file",
        )
    message = f"the result of no known tool{document.problem}"
    return UserError("wrong_format", message, file.where, _known_tools())


def _find_format(file: ToolFile) -> FormatRow | None:
    """Return the first format in the table that recognises a file, or None."""
    for tool_format in FORMATS.rows():
        if formats.is_result(tool_format, file):
            return tool_format
    return None


class _Document(NamedTuple):
    """The JSON in a file.

    Attributes:
        value: The value; None if the file is not JSON.
        line_count: How many JSON lines the file has, of which the value is the last; else 0.
        problem: Why the file is not JSON, such as ": nested too deeply", to be appended to a
            message. "" if it is JSON.
        is_truncated: Whether the file is the beginning of a JSON document.
    """

    value: Any
    line_count: int = 0
    problem: str = ""
    is_truncated: bool = False


_TOO_DEEP_DOCUMENT = _Document(None, problem=": nested too deeply")
"""Stands for a file for which `json.loads` raises RecursionError."""


def _parse_json(text: str) -> _Document:
    """Return a JSON document, or the last of several JSON lines.

    Some tools append one line to a file for each run, and the last one is the newest.
    """
    try:
        return _Document(json.loads(text))
    except RecursionError:
        return _TOO_DEEP_DOCUMENT
    except json.JSONDecodeError as error:
        if _is_truncated(error):
            return _Document(None, problem=_describe_syntax_error(error), is_truncated=True)
        return _parse_last_json_line(text)
    except ValueError:
        return _parse_last_json_line(text)


def _parse_last_json_line(text: str) -> _Document:
    """Return the JSON value in the last line of a text that is not blank.

    If this line is no JSON, or if all lines are blank, the result has no value but the problem.
    """
    nonblank_lines = [line for line in text.splitlines() if line.strip()]
    last_line = nonblank_lines[-1] if nonblank_lines else ""
    try:
        return _Document(json.loads(last_line), line_count=len(nonblank_lines))
    except RecursionError:
        return _TOO_DEEP_DOCUMENT
    except json.JSONDecodeError as error:
        return _Document(
            None, problem=_describe_syntax_error(error), is_truncated=_is_truncated(error)
        )
    except ValueError as error:
        return _Document(None, problem=f": not JSON ({error})")


def _describe_syntax_error(error: json.JSONDecodeError) -> str:
    """Return why a text is not JSON, as the end of a message."""
    return f": not JSON ({error})"


def _is_truncated(error: json.JSONDecodeError) -> bool:
    """Return whether a text is the beginning of a JSON object or list, which ends too early.

    The parser then fails at the end of the text, in an open string, or in the beginning of a word
    such as "tru" or of a negative number.
    """
    is_document = error.doc.lstrip().startswith(("{", "["))
    unparsed = error.doc[error.pos :].strip()
    return is_document and BEGINNING_OF_VALUE.fullmatch(unparsed) is not None


def _input_file_error(where: str, text: str) -> UserError:
    """Return the error for a YAML file in place of a result, with the command that takes the file.

    Results are JSON. A YAML file is an input of loadgen: a workload, which `run` takes, or a
    contract, which `validate` takes. Only a contract has the top-level key `levels`.
    """
    is_contract = re.search("(?m)^levels:", text) is not None
    kind = "contract" if is_contract else "workload"
    command = "validate" if is_contract else "run"

    return UserError(
        "wrong_format",
        f"a YAML file is not a result; it looks like a {kind}",
        where,
        f"run: loadgen {command} {shlex.quote(where)} --url http://HOST:8000",
    )


def _read_with_format(tool_format: FormatRow, file: ToolFile) -> ForeignResult:
    """Read a file with the reader of its format, and add the name and definitions of the tool.

    Raises:
        UserError: The reader fails, because a value in the file has an unexpected form.
    """
    tool = tool_format.tool
    try:
        result = formats.read_result(tool_format, file)
    except READER_ERRORS as error:
        problem = (
            f"looks like a result of {tool}, but cannot be read: {type(error).__name__} {error}"
        )
        raise UserError("wrong_format", problem, file.where, _known_tools()) from None

    # `counts` is a sentence that says how the tool counts and measures.
    return msgspec.structs.replace(result, tool=tool, counts=tool_format.definitions)


def _known_tools() -> str:
    tools = ", ".join(row.tool for row in FORMATS.builtin_rows if row.read)
    return f"known: {tools}"
