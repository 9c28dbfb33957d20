"""Reads requests of the user: rows with `prompt` or `messages`, or with the names that other tools and data sets use.

The whole file is checked when it is opened; faults name file:line:column. Only the offset of each row stays in memory,
so a file can be larger than memory. A row is read again when its request is built. Files that are not JSONL
(`data_files`) are written as JSONL into a nameless file of this process first.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import itertools
import os
import re
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loadgen.core.errors import (
    Code,
    CombinedError,
    LoadgenError,
    UserError,
    closest,
    enough,
    of_reading,
)
from loadgen.core.format import shortened
from loadgen.core.units import MOST_TOKENS, Wrong
from loadgen.core.workload import data_files
from loadgen.core.workload.extra_body import refused_fields

PROMPT_HINT = "a text that is not empty, or a list of token ids"

EXACT_LENGTHS = (
    "output_tokens",  # vLLM's custom data sets
    "output_tokens_count",  # GuideLLM
    "output_token_count",
    "output_length",  # AIPerf, Mooncake
    "output_len",  # SGLang, vLLM
    "expected_output_len",  # vLLM's SampleRequest
    "target_output_tokens",
    "num_output_tokens",
    "completion_tokens",  # recorded usage
    "generated_tokens",
    "osl",
)
"""Fields for the exact output length of a row, as data sets and tools call it."""
LENGTH_LIMITS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",  # OpenAI's Responses API
    "max_new_tokens",  # Hugging Face, TGI
    "max_gen_len",
    "n_predict",  # llama.cpp
)
"""Fields for an upper bound of the output length of a row."""
LENGTHS = (*EXACT_LENGTHS, *LENGTH_LIMITS)


# Body fields of the OpenAI API that a row may contain; they are copied into the request body unchanged.
PASSED: dict[str, tuple[str, Any]] = {
    "chat_template_kwargs": ("an object", dict),
    "frequency_penalty": ("a number", float),
    "guided_json": ("an object or a text", dict | str),
    "logit_bias": ("an object", dict),
    "min_p": ("a number", float),
    "min_tokens": ("an integer", int),
    "parallel_tool_calls": ("true or false", bool),
    "presence_penalty": ("a number", float),
    "priority": ("an integer", int),
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

# Other names, of data sets and tools, where a row has neither `prompt` nor `messages`; the first that is there counts.
CONVERSATIONS = ("conversations", "conversation")  # of ShareGPT: {"from": "human", "value": "..."}
TURNS = (
    "turns"  # of SPEED-Bench, Spec-Bench and MT-Bench: what a user says, one text after the other
)
PROMPTS = ("question", "instruction", "query", "text_input", "user", "input", "text")
SYSTEMS = ("system_prompt", "system")
ANSWERS = ("answer", "response", "output", "completion", "generated_text")
CONTINUES = ("continue_final_message", "add_generation_prompt")
"""Parameters of vLLM and SGLang with which a last message of the assistant is continued."""
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
}
BATCH = {"custom_id", "method", "url", "body"}  # of a row of OpenAI's batch files


Prompt = (
    Annotated[str, Meta(min_length=1)]
    | Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
)
Length = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]


FINISH_REASONS = frozenset(
    {
        "stop",
        "length",
        "content_filter",
        "tool_calls",
        "function_call",
        "end_turn",
        "max_tokens",
        "stop_sequence",
        "tool_use",
        "tool_call",
        "eos",
        "eos_token",
        "model_length",
        "abort",
    }
)
"""Names of the reasons why a response ends, of OpenAI, Anthropic, TGI, vLLM and Mistral."""


def is_finish_reason(value: Any) -> bool:
    """Return True if the `stop` of a row is a recorded finish reason and not a stop sequence."""
    return isinstance(value, str) and value in FINISH_REASONS


class BadRow(Wrong):
    """A line is not valid; `column` counts bytes from 1, 0 means the whole row."""

    def __init__(
        self, code: Code, problem: str, hint: str = "", key: str = "", *, column: int = 0
    ) -> None:
        super().__init__(code, problem, hint, key)
        self.column = column


class NoQuestion(BadRow):
    """A conversation in which nobody asks anything: left out, not a fault."""


class DatasetRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the user wrote it. Exactly one of `messages` and `prompt` is set.

    `answer`: the recorded response, which tells how long the response should be. `read_as`: the
    names of fields that were read under other names, as text.
    """

    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    output_tokens: int | None = None
    exact_output: bool = False
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    answer: str = ""
    read_as: str = ""


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a file: `len(rows)`, `rows[i]`. `sha256` is the hash of the bytes of the file."""

    path: Path
    sha256: str
    starts: array[int]  # byte offset of each row; the last entry is the size of the file
    ignored: tuple[str, ...]  # fields in some row that are not sent
    without_length: int = 0  # rows that do not say how long their response should be
    notes: tuple[str, ...] = ()  # what was read, where it is not plainly the file
    spool: _Spool | None = None  # the rows as JSONL, where the file is none

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> DatasetRow:
        """Read row `index` from the file. Raises UserError when the file has changed since it was checked."""
        try:
            return parse_row(self.line(index))
        except (OSError, BadRow) as error:
            raise UserError(
                "changed_file", f"the file changed during the run: {error}", str(self.path)
            ) from None

    def line(self, index: int) -> bytes:
        """The bytes of row `index`. Raises OSError."""
        start, end = self.starts[index], self.starts[index + 1]
        if self.spool is not None:
            return os.pread(self.spool.descriptor, end - start, start)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            return os.pread(descriptor, end - start, start).split(b"\n", 1)[
                0
            ]  # blank lines may follow it
        finally:
            os.close(descriptor)


class _Spool:
    """A file without a name, which is gone with this object: readers of other threads share it, and no position."""

    _made = itertools.count()

    def __init__(self) -> None:
        name = (
            f"{os.environ.get('TMPDIR') or '/tmp'}/loadgen-{os.getpid()}-{next(self._made)}.jsonl"
        )
        self.descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(name)
        weakref.finalize(self, os.close, self.descriptor)


class _Check:
    """Checks the rows of a file one after the other, and keeps what is to be said of all of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.starts, self.faults = array("Q"), list[LoadgenError]()
        self._ignored, self._read_as, self._left_out = dict[str, None](), dict[str, None](), 0
        self._without_length = 0

    def add(self, line: bytes, start: int, where: str) -> None:
        """Check one row that begins at `start`; `where` names it in a fault. Raises Faults where there are enough."""
        try:
            row = parse_row(line)
        except NoQuestion:
            self._left_out += 1
        except BadRow as wrong:
            place = where + (f":{wrong.column}" if wrong.column else "")
            self.faults.append(UserError(wrong.code, str(wrong), place, wrong.hint, key=wrong.key))
            if enough(self.faults, str(self._path)):
                raise CombinedError(self.faults) from None
        else:
            self._without_length += row.output_tokens is None and not row.answer
            self._ignored.update(dict.fromkeys(row.ignored))
            self._read_as.update(dict.fromkeys(filter(None, (row.read_as,))))
            self.starts.append(start)

    def rows(self, end: int, sha256: str, said: str, spool: _Spool | None = None) -> Rows:
        """The rows, where they are sound. Raises Faults or UserError."""
        if self.faults:
            raise CombinedError(self.faults)
        if not self.starts:
            raise UserError(
                "empty_file",
                "no requests in the file",
                str(self._path),
                'write one per line, like {"prompt": "Hello"}',
            )
        self.starts.append(end)
        left_out = ""
        if self._left_out:
            left_out = (
                f"{self._path.name}: left out {self._left_out:,} in which nobody asks anything"
            )
        read_as = [f"{self._path.name}: {words}" for words in self._read_as]
        notes = tuple(filter(None, (said, *read_as, left_out)))
        return Rows(
            path=self._path,
            sha256=sha256,
            starts=self.starts,
            ignored=tuple(self._ignored),
            without_length=self._without_length,
            notes=notes,
            spool=spool,
        )


def read_rows(path: str | Path) -> Rows:
    """Check every row of a data set; one that was read and has not changed is not read again.

    Raises Faults with the first FAULTS_SHOWN faults, or UserError for the file.
    """
    path = Path(path)
    files, said = data_files.resolve_data_set(path)
    try:
        states = [file.stat() for file in files]
        return _read_cached(
            path, tuple(files), said, tuple((state.st_size, state.st_mtime_ns) for state in states)
        )
    except OSError as error:
        raise UserError(
            of_reading(error),
            f"cannot read the requests: {error.strerror}",
            str(error.filename or path),
        ) from None


@functools.lru_cache(maxsize=4)
def _read_cached(
    path: Path, files: tuple[Path, ...], said: str, states: tuple[tuple[int, int], ...]
) -> Rows:
    if len(files) == 1 and data_files.is_jsonl(files[0]):
        return _lines(files[0], said)
    return _converted(path, files, said)


def _lines(path: Path, said: str) -> Rows:
    check, digest, offset = _Check(path), hashlib.sha256(), 0
    with path.open("rb") as file:
        for number, raw_line in enumerate(file, 1):
            digest.update(raw_line)
            start, offset = offset, offset + len(raw_line)
            line = raw_line
            if number == 1:
                line = raw_line.removeprefix(codecs.BOM_UTF8)
                start += len(raw_line) - len(line)
            if line.strip():
                check.add(line, start, f"{path}:{number}")
    return check.rows(offset, digest.hexdigest(), said)


def _converted(path: Path, files: Iterable[Path], said: str) -> Rows:
    """The rows of files of other forms, from a nameless file that has them as JSONL."""
    check, digest, spool, end = _Check(path), hashlib.sha256(), _Spool(), 0
    for file in files:
        with file.open("rb") as opened:
            while part := opened.read(1 << 20):
                digest.update(part)
        for where, row in read_located_rows(file):
            try:
                line = msgspec.json.encode(row)
            except (TypeError, ValueError) as error:
                raise UserError(
                    "unsupported", f"holds what JSON has no form for: {error}", where
                ) from None
            os.pwrite(spool.descriptor, line, end)
            check.add(line, end, where)
            if check.starts and check.starts[-1] == end:  # neither left out nor a fault
                end += len(line)
    return check.rows(end, digest.hexdigest(), said, spool)


def read_located_rows(file: Path) -> Iterator[data_files.LocatedRow]:
    """The rows of a file of any form, each with its place. Raises UserError."""
    if not data_files.is_jsonl(file):
        yield from data_files.read_converted_rows(file)
        return
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            if line.strip():
                try:
                    row = msgspec.json.decode(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        "invalid_syntax",
                        f"not JSON: {error}",
                        f"{file}:{number}",
                        "one JSON object per line",
                    ) from None
                row = with_messages(row)
                if not isinstance(row, dict):
                    raise UserError(
                        "wrong_type",
                        "not a JSON object",
                        f"{file}:{number}",
                        'objects like {"prompt": "..."}',
                    )
                yield f"{file}:{number}", row


def with_messages(row: Any) -> Any:
    """Return a row that is a list of messages as an object with these messages, else the row."""
    return {"messages": row} if data_files.is_conversation(row) else row


def parse_row(line: bytes) -> DatasetRow:
    """Parse one line. Raises BadRow."""
    try:
        line.decode()  # first, because the JSON decoder counts a bad byte from the start of its string
        row = msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        raise BadRow(
            "wrong_encoding", "not UTF-8", "save the file as UTF-8", column=error.start + 1
        ) from None
    except RecursionError:
        raise BadRow("too_large", "nested too deeply") from None
    except msgspec.DecodeError as error:
        byte_offset = re.search(r"\(byte (\d+)\)", str(error))
        message = re.sub(r" \(byte \d+\)", "", str(error)).removeprefix("JSON is malformed: ")
        message = message.replace(
            "Input data was truncated", "the line ends before the object does"
        )
        column = int(byte_offset[1]) + 1 if byte_offset else 0
        raise BadRow(
            "invalid_syntax", f"not JSON: {message}", "one JSON object per line", column=column
        ) from None
    row = with_messages(row)
    if not isinstance(row, dict):
        raise BadRow(
            "wrong_type", "not a JSON object", 'write {"prompt": "..."} or {"messages": [...]}'
        )
    row, read_as, answer = _under_our_names(row)
    if {"timestamp", "input_length"} <= row.keys():
        raise BadRow(
            "wrong_format", "a row of a trace, not a prompt", "--trace FILE replays a trace"
        )
    if ("prompt" in row) == ("messages" in row):
        problem = (
            "both `prompt` and `messages`" if "prompt" in row else "neither `prompt` nor `messages`"
        )
        similar = next((word for key in row if (word := closest(key, ("prompt", "messages")))), "")
        mistyped = similar and similar not in row
        others = "; or a name that data sets use: conversations, question, instruction, text"
        hint = "give exactly one of them" + ("" if "prompt" in row else others)
        if mistyped:
            hint = f'did you mean "{similar}"?'
        raise BadRow("conflict" if "prompt" in row else "missing_key", problem, hint)
    length, exact = _output_length(row)
    return DatasetRow(
        messages=_messages(row["messages"]) if "messages" in row else None,
        prompt=_checked(row, "prompt", Prompt, PROMPT_HINT) if "prompt" in row else None,
        output_tokens=length,
        exact_output=exact,
        extra=_extra_fields(row),
        ignored=tuple(key for key in row if key not in KNOWN),
        answer=answer,
        read_as=read_as,
    )


def _under_our_names(row: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """The row under the names of this file, under which others it was, in words, and an answer to be as long as.

    A row of OpenAI's batch files is its body. Of a conversation the first question is asked. Raises BadRow.
    """
    if row.keys() >= {"body", "url"} and row.keys() <= BATCH:
        return _batch(row), "rows of an OpenAI batch: their `body` is sent", ""
    if "prompt" in row or "messages" in row:
        return _without_response(row)
    for key in CONVERSATIONS:
        if isinstance(row.get(key), list):
            messages, answer = _first_question(row[key], key)
            rest = {name: value for name, value in row.items() if name != key}
            return (
                rest | {"messages": messages},
                f"the first question of each of its `{key}`, answered as long",
                answer,
            )
    turns = row.get(TURNS)
    if (
        isinstance(turns, list)
        and turns
        and all(isinstance(turn, str) for turn in turns)
        and turns[0]
    ):
        rest = {name: value for name, value in row.items() if name != TURNS}
        return rest | {"prompt": turns[0]}, f"the first of each of its `{TURNS}`", ""
    prompt = next((key for key in PROMPTS if isinstance(row.get(key), str) and row[key]), None)
    if prompt is None:
        return row, "", ""
    text, used, read_as = row[prompt], [prompt], f"prompts are `{prompt}`"
    if prompt == "instruction" and isinstance(row.get("input"), str):  # as Alpaca has it
        text, used = f"{text}\n\n{row['input']}".strip(), [*used, "input"]
        read_as += " and `input`"
    made: dict[str, Any] = {"prompt": text}
    system = next((key for key in SYSTEMS if isinstance(row.get(key), str) and row[key]), None)
    if system is not None:
        made = {
            "messages": [
                {"role": "system", "content": row[system]},
                {"role": "user", "content": text},
            ]
        }
        used, read_as = [*used, system], f"{read_as}, system prompts `{system}`"
    answered = next(
        (key for key in ANSWERS if key not in used and isinstance(row.get(key), str) and row[key]),
        None,
    )
    if answered is not None:
        used, read_as = [*used, answered], f"{read_as}, answers are as long as `{answered}`"
    rest = {name: value for name, value in row.items() if name not in used}
    return rest | made, read_as, "" if answered is None else row[answered]


def _without_response(row: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """Split a row with `prompt` or `messages` into what is sent and the recorded response.

    The response is the last message if it is the assistant's, unless the server is to continue it,
    else a field such as `completion`. It is not sent. Returns the row without it, where it was
    found as text, and the response; the last two are "" if there is none.
    """
    messages = row.get("messages")
    if isinstance(messages, list) and len(messages) > 1 and not _continues_last_message(row):
        last = messages[-1]
        if isinstance(last, dict) and last.get("role") == "assistant" and not last.get("prefix"):
            content = last.get("content")
            response = content if isinstance(content, str) else ""
            shorter = row | {"messages": messages[:-1]}
            return shorter, "the response at the end of `messages` is not sent", response
    answer = next((key for key in ANSWERS if isinstance(row.get(key), str) and row[key]), None)
    if answer is None:
        return row, "", ""
    rest = {key: value for key, value in row.items() if key != answer}
    return rest, f"answers are as long as `{answer}`", row[answer]


def _continues_last_message(row: dict[str, Any]) -> bool:
    extra_body = row.get("extra_body")
    fields = row | extra_body if isinstance(extra_body, dict) else row
    return any(key in fields for key in CONTINUES)


def _batch(row: dict[str, Any]) -> dict[str, Any]:
    url, body = row["url"], row["body"]
    if not isinstance(url, str) or not url.endswith("/completions"):
        hint = "rows for /v1/chat/completions or /v1/completions can be sent"
        raise BadRow("unsupported", f"a batch row for {shortened(url)}", hint)
    if not isinstance(body, dict):
        raise BadRow(
            "wrong_type",
            f"body is {shortened(body)}",
            'an object, like {"model": "...", "messages": [...]}',
            "body",
        )
    return body


def _first_question(turns: list[Any], key: str) -> tuple[list[dict[str, str]], str]:
    """The messages up to the first question of a conversation, and the answer to it ("" for none). Raises BadRow."""
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise BadRow(
                "wrong_type",
                f"{key}[{number}] is {shortened(turn)}",
                'like {"from": "human", "value": "Hello"}',
                f"{key}[{number}]",
            )
        speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise BadRow(
                "unknown_name",
                f"{key}[{number}] is from {shortened(speaker)}",
                f"known: {', '.join(SPEAKERS)}",
                f"{key}[{number}]",
            )
        if not isinstance(text, str):
            raise BadRow(
                "wrong_type",
                f"{key}[{number}] says {shortened(text)}",
                "a text",
                f"{key}[{number}]",
            )
        if role == "assistant" and messages and messages[-1]["role"] == "user":
            return messages, text
        if text and (
            role == "system"
            or (role == "user" and not any(one["role"] == "user" for one in messages))
        ):
            messages.append({"role": role, "content": text})
    if not messages or messages[-1]["role"] != "user":
        raise NoQuestion("missing_value", "nobody asks anything")
    return messages, ""


def _output_length(row: dict[str, Any]) -> tuple[int | None, bool]:
    keys = [key for key in LENGTHS if row.get(key) is not None]
    if not keys:
        return None, False
    lengths = {key: _length(row, key) for key in keys}
    if len(set(lengths.values())) > 1:
        hint = "output_tokens is the exact length, max_tokens an upper bound"
        raise BadRow("conflict", f"{' and '.join(keys)} together", hint, keys[0])
    return lengths[keys[0]], keys[0] in EXACT_LENGTHS


def _length(row: dict[str, Any], key: str) -> int:
    """Return the output length under a key; 12.0 is the whole number 12. Raises BadRow."""
    value = row[key]
    if isinstance(value, float) and value.is_integer():
        row = {key: int(value)}
    length: int = _checked(row, key, Length, f"a whole number from 1 to {MOST_TOKENS:,}")
    return length


def _checked(row: dict[str, Any], key: str, kind: Any, hint: str) -> Any:
    """The value of a key of this type. Raises BadRow."""
    try:
        return msgspec.convert(row[key], kind)
    except msgspec.ValidationError:
        raise BadRow("wrong_type", f"{key} is {shortened(row[key])}", hint, key) from None


def _messages(value: Any) -> list[dict[str, Any]]:
    hint = 'like [{"role": "user", "content": "Hello"}]'
    if not isinstance(value, list) or not value:
        raise BadRow("wrong_type", f"messages is {shortened(value)}", hint, "messages")
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadRow(
                "wrong_type", f"messages[{i}] is {shortened(message)}", hint, f"messages[{i}]"
            )
        if not isinstance(message.get("role"), str):
            raise BadRow(
                "wrong_type",
                f"messages[{i}].role is {shortened(message.get('role'))}",
                hint,
                f"messages[{i}].role",
            )
        content = message.get("content")
        if not isinstance(content, str | list) and not (
            content is None and "tool_calls" in message
        ):
            raise BadRow(
                "wrong_type",
                f"messages[{i}].content is {shortened(content)}",
                "a text, or a list of parts",
                f"messages[{i}].content",
            )
    return value


def _extra_fields(row: dict[str, Any]) -> dict[str, Any]:
    for key in PASSED.keys() & row.keys():
        expected, kind = PASSED[key]
        _checked(row, key, kind, expected)
    extra_body = _checked(row, "extra_body", dict, "an object") if "extra_body" in row else {}
    for field in refused_fields(extra_body):
        raise BadRow("unsupported", field.problem, field.row_hint, f"extra_body.{field.name}")
    passed = {key: row[key] for key in row if key in PASSED}
    if is_finish_reason(passed.get("stop")):
        del passed["stop"]
    return passed | extra_body
