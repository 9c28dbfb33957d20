"""Reads requests of the user from a JSONL file: one object per line, with `prompt` or `messages`.

The whole file is checked when it is opened; faults name file:line:column. Only the offset of each row stays in memory,
so a file can be larger than memory. A row is read again when its request is built.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import os
import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from loadgen.errors import Faults, UserError

FAULTS_SHOWN = 20
MOST_OUTPUT_TOKENS = 10_000_000

# Fields that set the output length of a row; True: the exact length, False: an upper bound.
LENGTHS = {"output_tokens": True, "max_tokens": False, "max_completion_tokens": False}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


# Body fields of the OpenAI API that a row may contain; they are copied into the request body unchanged.
PASSED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "chat_template_kwargs": ("an object", _is_object),
    "frequency_penalty": ("a number", _is_number),
    "logit_bias": ("an object", _is_object),
    "min_p": ("a number", _is_number),
    "parallel_tool_calls": ("true or false", _is_bool),
    "presence_penalty": ("a number", _is_number),
    "reasoning_effort": ("a text", _is_text),
    "response_format": ("an object", _is_object),
    "seed": ("an integer", _is_integer),
    "stop": (
        "a text or a list of texts",
        lambda value: _is_text(value) or (_is_list(value) and all(map(_is_text, value))),
    ),
    "temperature": ("a number", _is_number),
    "tool_choice": ("a text or an object", lambda value: _is_text(value) or _is_object(value)),
    "tools": ("a list of objects", lambda value: _is_list(value) and all(map(_is_object, value))),
    "top_k": ("an integer", _is_integer),
    "top_p": ("a number", _is_number),
}
KNOWN = ("prompt", "messages", *LENGTHS, *PASSED, "extra_body")


class BadRow(ValueError):
    """A line is not valid: `hint` says what to write; `column` counts bytes from 1, 0 means the whole row."""

    def __init__(self, problem: str, hint: str = "", column: int = 0) -> None:
        super().__init__(problem)
        self.hint, self.column = hint, column


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    """One request as the user wrote it. Exactly one of `messages` and `prompt` is set."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    output_tokens: int | None = None
    exact_output: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a file: `len(rows)`, `rows[i]`. `sha256` is the hash of the bytes of the file."""

    path: Path
    sha256: str
    starts: array[int]  # byte offset of each row; the last entry is the size of the file
    ignored: tuple[str, ...]  # fields in some row that are not sent

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> DatasetRow:
        """Read row `index` from the file. Raises UserError when the file has changed since it was checked."""
        start, end = self.starts[index], self.starts[index + 1]
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                line = os.pread(descriptor, end - start, start)
            finally:
                os.close(descriptor)
            return parse_row(_first_line(line))
        except (OSError, BadRow) as error:
            raise UserError(f"the file changed during the run: {error}", str(self.path)) from None


def read_rows(path: str | Path) -> Rows:
    """Check every row of a JSONL file. Raises Faults with the first FAULTS_SHOWN faults, or UserError for the file."""
    path = Path(path)
    starts, faults, ignored, digest, offset = array("Q"), list[UserError](), dict[str, None](), hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            for number, raw_line in enumerate(file, 1):
                digest.update(raw_line)
                start, offset = offset, offset + len(raw_line)
                line = raw_line
                if number == 1:
                    line = raw_line.removeprefix(codecs.BOM_UTF8)
                    start += len(raw_line) - len(line)
                    _refuse_other_formats(line, path)
                if not line.strip():
                    continue
                try:
                    ignored.update(dict.fromkeys(parse_row(line).ignored))
                    starts.append(start)
                except BadRow as wrong:
                    position = f"{path}:{number}" + (f":{wrong.column}" if wrong.column else "")
                    faults.append(UserError(str(wrong), position, wrong.hint))
                    if len(faults) == FAULTS_SHOWN:
                        faults.append(UserError(f"checking stopped after {FAULTS_SHOWN} faults", str(path)))
                        break
    except OSError as error:
        raise UserError(f"cannot read the requests: {error.strerror}", str(path)) from None
    if faults:
        raise Faults(faults)
    if not starts:
        raise UserError("no requests in the file", str(path), 'write one per line, like {"prompt": "Hello"}')
    starts.append(offset)
    return Rows(path=path, sha256=digest.hexdigest(), starts=starts, ignored=tuple(ignored))


def parse_row(line: bytes) -> DatasetRow:
    """Parse one line. Raises BadRow."""
    try:
        line.decode()  # first, because the JSON decoder counts a bad byte from the start of its string
        row = msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        raise BadRow("not UTF-8", "save the file as UTF-8", error.start + 1) from None
    except RecursionError:
        raise BadRow("nested too deeply") from None
    except msgspec.DecodeError as error:
        byte_offset = re.search(r"\(byte (\d+)\)", str(error))
        message = re.sub(r" \(byte \d+\)", "", str(error)).removeprefix("JSON is malformed: ")
        message = message.replace("Input data was truncated", "the line ends before the object does")
        raise BadRow(
            f"not JSON: {message}", "one JSON object per line", int(byte_offset[1]) + 1 if byte_offset else 0
        ) from None
    if not isinstance(row, dict):
        raise BadRow("not a JSON object", 'write {"prompt": "..."} or {"messages": [...]}')
    if ("prompt" in row) == ("messages" in row):
        problem = "both `prompt` and `messages`" if "prompt" in row else "neither `prompt` nor `messages`"
        similar = next(
            (match for key in row for match in difflib.get_close_matches(key, ("prompt", "messages"), 1)), None
        )
        raise BadRow(
            problem, f'did you mean "{similar}"?' if similar and similar not in row else "give exactly one of them"
        )
    length, exact = _output_length(row)
    return DatasetRow(
        messages=_messages(row["messages"]) if "messages" in row else None,
        prompt=_prompt(row["prompt"]) if "prompt" in row else None,
        output_tokens=length,
        exact_output=exact,
        extra=_extra_fields(row),
        ignored=tuple(key for key in row if key not in KNOWN),
    )


def _output_length(row: dict[str, Any]) -> tuple[int | None, bool]:
    length_keys = [key for key in LENGTHS if row.get(key) is not None]
    if not length_keys:
        return None, False
    if len(length_keys) > 1:
        raise BadRow(
            f"{' and '.join(length_keys)} together", "output_tokens is the exact length, max_tokens an upper bound"
        )
    value = row[length_keys[0]]
    if not _is_integer(value) or not 1 <= value <= MOST_OUTPUT_TOKENS:
        raise BadRow(f"{length_keys[0]} is {_shortened(value)}", f"a whole number from 1 to {MOST_OUTPUT_TOKENS:,}")
    return value, LENGTHS[length_keys[0]]


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_integer(token) and token >= 0 for token in value):
        return value
    raise BadRow(f"prompt is {_shortened(value)}", "a text that is not empty, or a list of token ids")


def _messages(value: Any) -> list[dict[str, Any]]:
    hint = 'like [{"role": "user", "content": "Hello"}]'
    if not isinstance(value, list) or not value:
        raise BadRow(f"messages is {_shortened(value)}", hint)
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadRow(f"messages[{i}] is {_shortened(message)}", hint)
        if not isinstance(message.get("role"), str):
            raise BadRow(f"messages[{i}].role is {_shortened(message.get('role'))}", hint)
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and "tool_calls" in message):
            raise BadRow(f"messages[{i}].content is {_shortened(content)}", "a text, or a list of parts")
    return value


def _extra_fields(row: dict[str, Any]) -> dict[str, Any]:
    for key in PASSED.keys() & row.keys():
        expected, is_valid = PASSED[key]
        if not is_valid(row[key]):
            raise BadRow(f"{key} is {_shortened(row[key])}", expected)
    extra_body = row.get("extra_body", {})
    if not isinstance(extra_body, dict):
        raise BadRow(f"extra_body is {_shortened(extra_body)}", "an object")
    return {key: row[key] for key in row if key in PASSED} | extra_body


def _shortened(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."


def _first_line(block: bytes) -> bytes:
    """The first line of a block of bytes; blank lines may follow it."""
    return block.split(b"\n", 1)[0]


def _refuse_other_formats(line: bytes, path: Path) -> None:
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError("the file is UTF-16", str(path), "save it as UTF-8")
    if line.startswith(b"PAR1"):
        raise UserError("this is a Parquet file", str(path), "write it as JSONL, one object per line")
    if line.lstrip().startswith(b"["):
        hint = f"write one object per line: jq -c '.[]' {path.name} > {path.stem}.jsonl"
        raise UserError("this is a JSON list, not JSONL", str(path), hint)
