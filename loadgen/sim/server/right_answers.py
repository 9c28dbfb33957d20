"""The right answers that the simulated server gives to the questions of a file (`--answers`).

A simulated model has no knowledge. With the file of questions that a run checks, it recognizes each
question by its prompt, and responds with what is known to be right. Chat and completions only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadgen.core.requests.question_prompts import read_known_answers
from loadgen.core.workload.dataset import read_question_rows
from loadgen.sim.server.error_responses import RefusalError
from loadgen.sim.server.request_parser import (
    CompletionsApi,
    RequestRules,
    parse_completions_request,
)
from loadgen.sim.simulated_answers import (
    TOOL_CALL_CHECK,
    change_words,
    corrupt_text,
    right_response_text,
    tool_to_call,
)

if TYPE_CHECKING:
    from loadgen.core.workload.dataset_rows import DatasetRow
    from loadgen.core.workload.known_answers import KnownAnswer
    from loadgen.sim.server.wire_format import ParsedRequest


class RightAnswer(NamedTuple):
    """The right answer to a question: a text, or the arguments of a call of a tool.

    `called_tool` is the name of the tool, or "" for a text.
    """

    text: str
    called_tool: str


class RightAnswers:
    """The right answers of a file, by the digest of the prompt of their question."""

    def __init__(self, path: str, rules: RequestRules) -> None:
        """Read the questions of a file. An empty path stands for no questions.

        Raises UserError or CombinedError if the file is missing, or if rows have no known answer.

        Args:
            path: The path of the JSONL file, as for `loadgen run --check-answers`.
            rules: Which requests the server accepts. They decide the digest of a prompt.
        """
        self._answer_by_digest: dict[bytes, RightAnswer] = {}
        self._seed = rules.seed
        if not path:
            return

        rows = read_question_rows(Path(path))
        for index, known in enumerate(read_known_answers(rows)):
            answer = _create_answer(known, index, rules)
            for digest in _find_digests(rows.read(index), rules):
                self._answer_by_digest[digest] = answer

    def answer(self, request: ParsedRequest, request_number: int, *, is_corrupt: bool) -> None:
        """Let a request be answered rightly, if its question is in the file.

        The answer is cut at the request's limit of output tokens. With the injected failure
        `corrupt`, one word of it is changed.
        """
        answer = self._answer_by_digest.get(request.digest)
        if answer is None:
            return

        text = answer.text
        if is_corrupt:
            text = corrupt_text(text, self._seed, request_number)

        tokens = split_into_tokens(text)
        is_cut = request.max_tokens is not None and len(tokens) > request.max_tokens
        request.answer_tokens = tokens[: request.max_tokens]
        request.output_tokens = len(request.answer_tokens)
        request.called_tool = answer.called_tool
        complete_reason = "tool_calls" if answer.called_tool else "stop"
        request.finish_reason = "length" if is_cut else complete_reason


def _create_answer(known: KnownAnswer, question: int, rules: RequestRules) -> RightAnswer:
    """Return the right answer to a question, with some words changed if the server is a worse one.

    Args:
        known: What is known about the right answer.
        question: The index of the question, which decides the words that are changed.
        rules: The options of the server, with the share of changed words (`worse`).
    """
    text = right_response_text(known)
    if rules.worse:
        text = change_words(text, rules.worse, rules.seed, question)

    is_tool_call = known.check == TOOL_CALL_CHECK
    return RightAnswer(text, tool_to_call(known) if is_tool_call else "")


def _find_digests(row: DatasetRow, rules: RequestRules) -> Iterator[bytes]:
    """Yield the digest of the prompt of a row in each API that the row can be sent to.

    The digest is that of a request which the server parses, so the request is built and parsed. A
    row that the server refuses, for example because it is too long, has none.
    """
    for api, body in _list_bodies(row, rules.model):
        try:
            request = parse_completions_request(msgspec.json.encode(body), api, rules)
        except RefusalError:
            continue
        yield request.digest


def _list_bodies(row: DatasetRow, model: str) -> Iterator[tuple[CompletionsApi, dict[str, object]]]:
    """Yield the body of a row for each API, with the fields that are a part of the prompt."""
    messages = row.messages or [{"role": "user", "content": row.prompt}]
    chat_body: dict[str, object] = {"model": model, "messages": messages}
    if "tools" in row.extra:
        chat_body["tools"] = row.extra["tools"]
    yield "chat", chat_body

    if row.prompt is not None:
        yield "completions", {"model": model, "prompt": row.prompt}


def split_into_tokens(text: str) -> tuple[str, ...]:
    """Return a text as tokens of one word each, with the spaces after it. Joined, they are equal.

    An empty text has one empty token, because every completion has at least one.
    """
    tokens = re.findall(r"\S+\s*|\s+", text)
    return tuple(tokens) or ("",)
