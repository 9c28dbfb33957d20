"""Reads requests of the user from a JSONL file: one object per line, with `prompt` or `messages`.

The whole file is checked when it is opened; faults name file:line:column. Only the offset of each row stays in memory,
so a file can be larger than memory. A row is read again when its request is built.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loadgen.errors import Fault, Faults, UserError, closest, enough
from loadgen.format import shortened
from loadgen.units import MOST_TOKENS, Wrong

PROMPT_HINT = "a text that is not empty, or a list of token ids"

# Fields that set the output length of a row; True: the exact length, False: an upper bound.
LENGTHS = {"output_tokens": True, "max_tokens": False, "max_completion_tokens": False}


# Body fields of the OpenAI API that a row may contain; they are copied into the request body unchanged.
PASSED: dict[str, tuple[str, Any]] = {
    "chat_template_kwargs": ("an object", dict),
    "frequency_penalty": ("a number", float),
    "logit_bias": ("an object", dict),
    "min_p": ("a number", float),
    "parallel_tool_calls": ("true or false", bool),
    "presence_penalty": ("a number", float),
    "reasoning_effort": ("a text", str),
    "response_format": ("an object", dict),
    "seed": ("an integer", int),
    "stop": ("a text or a list of texts", str | list[str]),
    "temperature": ("a number", float),
    "tool_choice": ("a text or an object", str | dict),
    "tools": ("a list of objects", list[dict[str, Any]]),
    "top_k": ("an integer", int),
    "top_p": ("a number", float),
}
KNOWN = ("prompt", "messages", *LENGTHS, *PASSED, "extra_body")


Prompt = Annotated[str, Meta(min_length=1)] | Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
Length = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]


class BadRow(Wrong):
    """A line is not valid; `column` counts bytes from 1, 0 means the whole row."""

    def __init__(self, problem: str, hint: str = "", column: int = 0) -> None:
        super().__init__(problem, hint)
        self.column = column


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
            return parse_row(line.split(b"\n", 1)[0])  # blank lines may follow it
        except (OSError, BadRow) as error:
            raise UserError(f"the file changed during the run: {error}", str(self.path)) from None


def read_rows(path: str | Path) -> Rows:
    """Check every row of a JSONL file. Raises Faults with the first FAULTS_SHOWN faults, or UserError for the file."""
    path = Path(path)
    starts, faults, ignored, digest, offset = array("Q"), list[Fault](), dict[str, None](), hashlib.sha256(), 0
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
                    if enough(faults, str(path)):
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
        column = int(byte_offset[1]) + 1 if byte_offset else 0
        raise BadRow(f"not JSON: {message}", "one JSON object per line", column) from None
    if not isinstance(row, dict):
        raise BadRow("not a JSON object", 'write {"prompt": "..."} or {"messages": [...]}')
    if ("prompt" in row) == ("messages" in row):
        problem = "both `prompt` and `messages`" if "prompt" in row else "neither `prompt` nor `messages`"
        similar = next((word for key in row if (word := closest(key, ("prompt", "messages")))), "")
        mistyped = similar and similar not in row
        raise BadRow(problem, f'did you mean "{similar}"?' if mistyped else "give exactly one of them")
    length, exact = _output_length(row)
    return DatasetRow(
        messages=_messages(row["messages"]) if "messages" in row else None,
        prompt=_checked(row, "prompt", Prompt, PROMPT_HINT) if "prompt" in row else None,
        output_tokens=length,
        exact_output=exact,
        extra=_extra_fields(row),
        ignored=tuple(key for key in row if key not in KNOWN),
    )


def _output_length(row: dict[str, Any]) -> tuple[int | None, bool]:
    keys = [key for key in LENGTHS if row.get(key) is not None]
    if not keys:
        return None, False
    if len(keys) > 1:
        hint = "output_tokens is the exact length, max_tokens an upper bound"
        raise BadRow(f"{' and '.join(keys)} together", hint)
    [key] = keys
    return _checked(row, key, Length, f"a whole number from 1 to {MOST_TOKENS:,}"), LENGTHS[key]


def _checked(row: dict[str, Any], key: str, kind: Any, hint: str) -> Any:
    """The value of a key of this type. Raises BadRow."""
    try:
        return msgspec.convert(row[key], kind)
    except msgspec.ValidationError:
        raise BadRow(f"{key} is {shortened(row[key])}", hint) from None


def _messages(value: Any) -> list[dict[str, Any]]:
    hint = 'like [{"role": "user", "content": "Hello"}]'
    if not isinstance(value, list) or not value:
        raise BadRow(f"messages is {shortened(value)}", hint)
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadRow(f"messages[{i}] is {shortened(message)}", hint)
        if not isinstance(message.get("role"), str):
            raise BadRow(f"messages[{i}].role is {shortened(message.get('role'))}", hint)
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and "tool_calls" in message):
            raise BadRow(f"messages[{i}].content is {shortened(content)}", "a text, or a list of parts")
    return value


def _extra_fields(row: dict[str, Any]) -> dict[str, Any]:
    for key in PASSED.keys() & row.keys():
        expected, kind = PASSED[key]
        _checked(row, key, kind, expected)
    extra_body = _checked(row, "extra_body", dict, "an object") if "extra_body" in row else {}
    return {key: row[key] for key in row if key in PASSED} | extra_body


def _refuse_other_formats(line: bytes, path: Path) -> None:
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError("the file is UTF-16", str(path), "save it as UTF-8")
    if line.startswith(b"PAR1"):
        raise UserError("this is a Parquet file", str(path), "write it as JSONL, one object per line")
    if line.lstrip().startswith(b"["):
        hint = f"write one object per line: jq -c '.[]' {path.name} > {path.stem}.jsonl"
        raise UserError("this is a JSON list, not JSONL", str(path), hint)
