"""Reads the user's own requests: a JSONL file, one object per line, with `prompt` or `messages`.

Everything that can be wrong with the file is found when it is opened, with file:line:column. What stays in memory is
where each row begins, so that a file may be larger than memory; a row is read again when its request is built.
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

# How a row asks for its output length, and whether that is the exact length or an upper bound.
LENGTHS = {"output_tokens": True, "max_tokens": False, "max_completion_tokens": False}


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list(value: Any) -> bool:
    return isinstance(value, list)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


# Body fields of the OpenAI API that a row may carry; they go into the body as they are.
PASSED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "chat_template_kwargs": ("an object", _object),
    "frequency_penalty": ("a number", _number),
    "logit_bias": ("an object", _object),
    "min_p": ("a number", _number),
    "parallel_tool_calls": ("true or false", _flag),
    "presence_penalty": ("a number", _number),
    "reasoning_effort": ("a text", _text),
    "response_format": ("an object", _object),
    "seed": ("an integer", _integer),
    "stop": ("a text or a list of texts", lambda value: _text(value) or (_list(value) and all(map(_text, value)))),
    "temperature": ("a number", _number),
    "tool_choice": ("a text or an object", lambda value: _text(value) or _object(value)),
    "tools": ("a list of objects", lambda value: _list(value) and all(map(_object, value))),
    "top_k": ("an integer", _integer),
    "top_p": ("a number", _number),
}
KNOWN = ("prompt", "messages", *LENGTHS, *PASSED, "extra_body")


class BadRow(ValueError):
    """What is wrong with a line; `column` counts bytes from 1, 0 when it is the row as a whole."""

    def __init__(self, what: str, hint: str = "", column: int = 0) -> None:
        super().__init__(what)
        self.hint, self.column = hint, column


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRow:
    """One request as the user wrote it; exactly one of `messages` and `prompt` is set."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    output_tokens: int | None = None
    exact_output: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a file: `len(rows)`, `rows[i]`. `sha256` is that of the file's bytes."""

    path: Path
    sha256: str
    starts: array[int]  # byte offset of each row; one more at the end: the size of the file
    ignored: tuple[str, ...]  # fields that some row has and no request carries

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> DatasetRow:
        """Read row `index` again. Raises UserError when the file has changed since it was checked."""
        begin, end = self.starts[index], self.starts[index + 1]
        try:
            file = os.open(self.path, os.O_RDONLY)
            try:
                line = os.pread(file, end - begin, begin)
            finally:
                os.close(file)
            return parse_row(_first_line(line))
        except (OSError, BadRow) as error:
            raise UserError(f"the file changed during the run: {error}", str(self.path)) from None


def read_rows(path: str | Path) -> Rows:
    """Check every row of a JSONL file. Raises Faults with the first FAULTS_SHOWN faults, or UserError for the file."""
    path = Path(path)
    starts, faults, ignored, digest, at = array("Q"), list[UserError](), dict[str, None](), hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                digest.update(raw)
                begin, at = at, at + len(raw)
                line = raw
                if number == 1:
                    line = raw.removeprefix(codecs.BOM_UTF8)
                    begin += len(raw) - len(line)
                    _refuse_other_formats(line, path)
                if not line.strip():
                    continue
                try:
                    ignored.update(dict.fromkeys(parse_row(line).ignored))
                    starts.append(begin)
                except BadRow as wrong:
                    where = f"{path}:{number}" + (f":{wrong.column}" if wrong.column else "")
                    faults.append(UserError(str(wrong), where, wrong.hint))
                    if len(faults) == FAULTS_SHOWN:
                        faults.append(UserError(f"checking stopped after {FAULTS_SHOWN} faults", str(path)))
                        break
    except OSError as error:
        raise UserError(f"cannot read the requests: {error.strerror}", str(path)) from None
    if faults:
        raise Faults(faults)
    if not starts:
        raise UserError("no requests in the file", str(path), 'write one per line, like {"prompt": "Hello"}')
    starts.append(at)
    return Rows(path=path, sha256=digest.hexdigest(), starts=starts, ignored=tuple(ignored))


def parse_row(line: bytes) -> DatasetRow:
    """One line → Row. Raises Wrong."""
    try:
        line.decode()  # first, because the decoder below counts the place of a bad byte from the start of its string
        row = msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        raise BadRow("not UTF-8", "save the file as UTF-8", error.start + 1) from None
    except RecursionError:
        raise BadRow("nested too deeply") from None
    except msgspec.DecodeError as error:
        place = re.search(r"\(byte (\d+)\)", str(error))
        text = re.sub(r" \(byte \d+\)", "", str(error)).removeprefix("JSON is malformed: ")
        text = text.replace("Input data was truncated", "the line ends before the object does")
        raise BadRow(f"not JSON: {text}", "one JSON object per line", int(place[1]) + 1 if place else 0) from None
    if not isinstance(row, dict):
        raise BadRow("not a JSON object", 'write {"prompt": "..."} or {"messages": [...]}')
    if ("prompt" in row) == ("messages" in row):
        what = "both `prompt` and `messages`" if "prompt" in row else "neither `prompt` nor `messages`"
        close = next((near for key in row for near in difflib.get_close_matches(key, ("prompt", "messages"), 1)), None)
        raise BadRow(what, f'did you mean "{close}"?' if close and close not in row else "give exactly one of them")
    length, exact = _length(row)
    return DatasetRow(
        messages=_messages(row["messages"]) if "messages" in row else None,
        prompt=_prompt(row["prompt"]) if "prompt" in row else None,
        output_tokens=length,
        exact_output=exact,
        extra=_extra(row),
        ignored=tuple(key for key in row if key not in KNOWN),
    )


def _length(row: dict[str, Any]) -> tuple[int | None, bool]:
    given = [key for key in LENGTHS if row.get(key) is not None]
    if not given:
        return None, False
    if len(given) > 1:
        raise BadRow(f"{' and '.join(given)} together", "output_tokens is the exact length, max_tokens an upper bound")
    value = row[given[0]]
    if not _integer(value) or not 1 <= value <= MOST_OUTPUT_TOKENS:
        raise BadRow(f"{given[0]} is {_shown(value)}", f"a whole number from 1 to {MOST_OUTPUT_TOKENS:,}")
    return value, LENGTHS[given[0]]


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_integer(token) and token >= 0 for token in value):
        return value
    raise BadRow(f"prompt is {_shown(value)}", "a text that is not empty, or a list of token ids")


def _messages(value: Any) -> list[dict[str, Any]]:
    hint = 'like [{"role": "user", "content": "Hello"}]'
    if not isinstance(value, list) or not value:
        raise BadRow(f"messages is {_shown(value)}", hint)
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadRow(f"messages[{i}] is {_shown(message)}", hint)
        if not isinstance(message.get("role"), str):
            raise BadRow(f"messages[{i}].role is {_shown(message.get('role'))}", hint)
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and "tool_calls" in message):
            raise BadRow(f"messages[{i}].content is {_shown(content)}", "a text, or a list of parts")
    return value


def _extra(row: dict[str, Any]) -> dict[str, Any]:
    for key in PASSED.keys() & row.keys():
        needed, fits = PASSED[key]
        if not fits(row[key]):
            raise BadRow(f"{key} is {_shown(row[key])}", needed)
    more = row.get("extra_body", {})
    if not isinstance(more, dict):
        raise BadRow(f"extra_body is {_shown(more)}", "an object")
    return {key: row[key] for key in row if key in PASSED} | more


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."


def _first_line(block: bytes) -> bytes:
    """The row at the head of a block, which may be followed by blank lines."""
    return block.split(b"\n", 1)[0]


def _refuse_other_formats(line: bytes, path: Path) -> None:
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError("the file is UTF-16", str(path), "save it as UTF-8")
    if line.startswith(b"PAR1"):
        raise UserError("this is a Parquet file", str(path), "write it as JSONL, one object per line")
    if line.lstrip().startswith(b"["):
        hint = f"write one object per line: jq -c '.[]' {path.name} > {path.stem}.jsonl"
        raise UserError("this is a JSON list, not JSONL", str(path), hint)
