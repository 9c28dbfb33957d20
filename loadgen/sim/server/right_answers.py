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
        """Let the server give the right answer to a request whose question is in the file.

        The response is written to the fields of the request. Any other request stays as it is.

        Args:
            request: The request.
            request_number: The number of the request, which decides how the answer is corrupted.
            is_corrupt: True to change one word of the answer (injected failure `corrupt`).
        """
        answer = self._answer_by_digest.get(request.digest)
        if answer is None:
            return

        text = answer.text
        if is_corrupt:
            text = corrupt_text(text, self._seed, request_number)
        tokens = split_into_tokens(text)

        # The response ends at the request's limit of output tokens.
        is_cut = request.max_tokens is not None and len(tokens) > request.max_tokens
        finish_reason = "tool_calls" if answer.called_tool else "stop"
        if is_cut:
            finish_reason = "length"

        request.answer_tokens = tokens[: request.max_tokens]
        request.output_tokens = len(request.answer_tokens)
        request.called_tool = answer.called_tool
        request.finish_reason = finish_reason


def _create_answer(known: KnownAnswer, question: int, rules: RequestRules) -> RightAnswer:
    """Return the answer that the server gives to a question.

    It is the right answer, unless the simulated model is a worse one, which chooses some words
    differently.

    Args:
        known: What is known about the right answer.
        question: The index of the question, which decides the words that are changed.
        rules: The options of the server. `worse` is the share of changed words.
    """
    text = right_response_text(known)
    if rules.worse:
        text = change_words(text, rules.worse, rules.seed, question)

    called_tool = tool_to_call(known) if known.check == TOOL_CALL_CHECK else ""
    return RightAnswer(text, called_tool)


def _find_digests(row: DatasetRow, rules: RequestRules) -> Iterator[bytes]:
    """Yield the digests of the requests that can be sent with the prompt of a row.

    Each API has a different request, and the server recognizes it by its digest. A request that the
    server refuses, for example because the prompt is too long, is left out.
    """
    for api, body in _list_bodies(row, rules.model):
        try:
            request = parse_completions_request(msgspec.json.encode(body), api, rules)
        except RefusalError:
            continue
        yield request.digest


def _list_bodies(row: DatasetRow, model: str) -> Iterator[tuple[CompletionsApi, dict[str, object]]]:
    """Yield the body of a request with the prompt of a row, for each API that it can be sent to.

    The chat API gets a plain prompt as the message of a user, and the completions API gets no
    messages.
    """
    messages = row.messages or [{"role": "user", "content": row.prompt}]
    chat_body: dict[str, object] = {"model": model, "messages": messages}
    if "tools" in row.extra:
        chat_body["tools"] = row.extra["tools"]
    yield "chat", chat_body

    if row.prompt is not None:
        yield "completions", {"model": model, "prompt": row.prompt}


def split_into_tokens(text: str) -> tuple[str, ...]:
    """Split a text into tokens of one word each, with the spaces after the word.

    For example, "a  b" has the tokens "a  " and "b". An empty text has one empty token, because
    every completion has at least one token.
    """
    tokens = re.findall(r"\S+\s*|\s+", text)
    return tuple(tokens) or ("",)
