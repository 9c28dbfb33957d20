"""Requests with known answers: the rows of a file whose responses are checked after the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from loadgen_sdk.request import Request

from loadgen.core.errors import CombinedError, LoadgenError, UserError, has_too_many
from loadgen.core.requests.file_prompts import FilePrompts, OutputLength
from loadgen.core.requests.mix import MixPrompts
from loadgen.core.requests.prompts import Prompts
from loadgen.core.requests.tokenizer import Tokenizer

if TYPE_CHECKING:
    from loadgen.core.workload.dataset import Rows
    from loadgen.core.workload.dataset_rows import DatasetRow
    from loadgen.core.workload.known_answers import KnownAnswer
    from loadgen.core.workload.request_kinds import FromFile
    from loadgen.core.workload.row_errors import BadRowError

GREEDY_SAMPLING = {"temperature": 0, "seed": 1}
"""The sampling of requests with known answers, so that no response depends on chance."""

DEFAULT_OUTPUT_LIMIT = 256
"""The limit of output tokens of a question that has none, as in `loadgen answers`."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""The bytes with which some editors begin a file."""

QuestionFinder = Callable[[int], int | None]
"""Returns the index of the question that a request asks, or None if its answer is not known."""


class QuestionPrompts(FilePrompts):
    """The rows of a file with known answers.

    A response ends where the model ends it. Its length is only limited, because a response that is
    forced to a length cannot be right.

    Attributes:
        known_answers: What is known about the right response to each row.
    """

    def __init__(
        self, source: FromFile, seed: int, tokenizer: Tokenizer, api: str = "chat"
    ) -> None:
        """Read and check a file whose rows are questions with known answers.

        Args:
            source: The section of the workload that names the file.
            seed: Decides all random draws.
            tokenizer: Counts the tokens of prompts.
            api: The API of the server, such as "chat".

        Raises:
            CombinedError: Rows have no known answer, or an answer that is not valid.
            UserError: A package that checks responses is not installed.
        """
        super().__init__(source, seed, tokenizer, api)
        self.known_answers = read_known_answers(self.rows)

    def row_of(self, request_id: int) -> int:
        """Return the index of the row that a request sends.

        The rows are sent in the order of the file or in a random order, and repeat after the last.
        """
        position = request_id % len(self.rows)
        if self._row_order is None:
            return position
        return int(self._row_order[position])

    def __getitem__(self, request_id: int) -> Request:
        """Build a request from its row, with greedy sampling unless the row samples otherwise."""
        request = super().__getitem__(request_id)
        return msgspec.structs.replace(request, extra=GREEDY_SAMPLING | request.extra)

    def _output_length(self, row: DatasetRow, request_id: int) -> OutputLength:
        """Return how many output tokens the response to a row may have at most.

        The limit is that of the row. If the row has none, it is drawn from `output_tokens` of the
        workload. If the workload has none either, it is DEFAULT_OUTPUT_LIMIT.
        """
        if row.output_tokens is not None:
            limit = row.output_tokens
        elif self._output_sampler is not None:
            limit = self._output_sampler(self._lengths_key, "output", request_id)
        else:
            limit = DEFAULT_OUTPUT_LIMIT

        # An answer that is forced to an exact length cannot be right.
        return OutputLength(limit, is_exact=False)

    def warnings(
        self,
        request_count: int,  # noqa: ARG002 - part of the protocol
    ) -> list[str]:
        """Return no warnings. The base class warns of fields that are not sent to the server.

        Here these fields are the known answers, which the server must not see.
        """
        return []


def read_known_answers(rows: Rows) -> tuple[KnownAnswer, ...]:
    """Return the known answer of each row: the right response, and how to check a response.

    Reading continues after an invalid row, so that the user sees the errors of all rows at once. It
    ends early after very many errors.

    Raises:
        CombinedError: Rows are invalid. The error contains one error per row.
        UserError: A package that a check needs is not installed.
    """
    # Workers without known answers do not need this module.
    from loadgen.core.workload.row_errors import BadRowError

    known_answers: list[KnownAnswer] = []
    errors: list[LoadgenError] = []
    for row_index in range(len(rows)):
        try:
            known_answer = _read_known_answer(rows, row_index)
        except BadRowError as bad_row:
            errors.append(_add_location(bad_row, rows, row_index))
            if has_too_many(errors, str(rows.path)):
                break
        else:
            known_answers.append(known_answer)

    if errors:
        raise CombinedError(errors)
    return tuple(known_answers)


def _add_location(bad_row: BadRowError, rows: Rows, row_index: int) -> UserError:
    """Return the error of a row as one that states the file and the number of the row, from 1."""
    location = f"{rows.path}: row {row_index + 1}"
    return UserError(bad_row.code, str(bad_row), location, bad_row.hint, key=bad_row.key)


def _read_known_answer(rows: Rows, row_index: int) -> KnownAnswer:
    """Return the known answer of one row.

    Raises:
        BadRowError: The row has no known answer, or one that is not valid.
        UserError: A package that the check needs is not installed.
    """
    # Workers without known answers do not need this module.
    from loadgen.core.workload.known_answers import parse_known_answer

    line = rows.line(row_index).removeprefix(BYTE_ORDER_MARK)
    row: Any = msgspec.json.decode(line)
    known = parse_known_answer(row, row_index + 1)
    _check_schemas(known)
    return known


def _check_schemas(known: KnownAnswer) -> None:
    """Check the JSON Schemas that the response to a question has to match.

    Raises:
        BadRowError: A schema is not valid.
        UserError: A schema needs the package `jsonschema`, which is not installed.
    """
    from loadgen.core.workload.answer_checks import find_schema_problem
    from loadgen.core.workload.row_errors import BadRowError

    schema_problem = find_schema_problem(known)
    if schema_problem:
        problem = f"the JSON Schema is not valid: {schema_problem}"
        place = "parameters of its tools" if known.tools else "schema or response_format"
        raise BadRowError("invalid_value", problem, f"correct the {place}")


def list_known_answers(prompts: Prompts) -> list[KnownAnswer]:
    """Return the known answers of all questions of a workload. Empty if it has no questions."""
    known_answers: list[KnownAnswer] = []
    for questions in _iterate_questions(prompts):
        known_answers += questions.known_answers
    return known_answers


def _iterate_questions(prompts: Prompts) -> Iterator[QuestionPrompts]:
    """Yield the requests with known answers: those of the workload, or of some of its classes."""
    parts = prompts.class_prompts if isinstance(prompts, MixPrompts) else [prompts]
    for part in parts:
        if isinstance(part, QuestionPrompts):
            yield part


def create_question_finder(prompts: Prompts) -> QuestionFinder | None:
    """Return a function that finds the question which a request asks, by the request's id.

    The function returns an index into `list_known_answers(prompts)`, or None for a request without
    a question. Return None instead of a function if the whole workload has no questions.
    """
    if isinstance(prompts, QuestionPrompts):
        return prompts.row_of

    if not isinstance(prompts, MixPrompts):
        return None

    has_questions = bool(list_known_answers(prompts))
    return _MixQuestionFinder(prompts).find_question if has_questions else None


class _MixQuestionFinder:
    """Finds the question of a request in a mix of request classes, of which some have questions."""

    def __init__(self, mix: MixPrompts) -> None:
        self._mix = mix
        self._first_questions = _first_question_by_class(mix)

    def find_question(self, request_id: int) -> int | None:
        """Return the index of the question of a request among the questions of all classes.

        Return None if the class of the request has no questions.
        """
        class_index, id_in_class = self._mix.class_and_id(request_id)
        prompts_of_class = self._mix.class_prompts[class_index]
        if not isinstance(prompts_of_class, QuestionPrompts):
            return None

        question_in_class = prompts_of_class.row_of(id_in_class)
        return self._first_questions[class_index] + question_in_class


def _first_question_by_class(mix: MixPrompts) -> dict[int, int]:
    """Return the index of the first question of each class that has questions.

    Questions are numbered class by class: with 3 questions in class 0 and 5 in class 2, the result
    is {0: 0, 2: 3}.
    """
    first_questions: dict[int, int] = {}
    question_count = 0
    for class_index, class_prompts in enumerate(mix.class_prompts):
        if isinstance(class_prompts, QuestionPrompts):
            first_questions[class_index] = question_count
            question_count += len(class_prompts.known_answers)
    return first_questions
