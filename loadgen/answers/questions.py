"""Read questions: rows of a JSONL file, with their right answers if known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from loadgen.core.errors import CombinedError, LoadgenError, UserError, has_too_many
from loadgen.core.workload.dataset import read_question_rows
from loadgen.core.workload.dataset_rows import DatasetRow, parse_row
from loadgen.core.workload.known_answers import looks_like_choice, read_reference, requests_json
from loadgen.core.workload.row_errors import BadRowError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""The bytes with which some editors begin a file."""
_CLASS_KEY = "class"
"""The key of the class of prompts whose scores are also reported separately."""


class AnswerKey(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"is_choice": "choice", "wants_json": "json"},
):
    """How an answer is scored.

    Attributes:
        reference: A right answer, or None if none is known.
        is_choice: True if the reference is the letter of a choice.
        wants_json: True if the answer has to be JSON.
        group: The class that the answer is counted in, or "".
    """

    reference: str | None = None
    is_choice: bool = False
    wants_json: bool = False
    group: str = ""


class Question(AnswerKey, frozen=True, kw_only=True):
    """A prompt, and how the answer to it is scored."""

    row: DatasetRow


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Return the questions of a file, at most `limit` of them.

    An invalid row does not end the reading, so that the user sees all invalid rows together.

    Raises:
        CombinedError: Rows are invalid. The error contains one error for each invalid row.
    """
    rows = read_question_rows(path)
    row_count = len(rows) if limit is None else min(limit, len(rows))

    questions: list[Question] = []
    errors: list[LoadgenError] = []
    for row_index in range(row_count):
        line = rows.line(row_index)
        try:
            question = _parse_question(line)
        except BadRowError as bad_row:
            errors.append(_locate_error(bad_row, path, row_index))
            if has_too_many(errors, str(path)):
                break
        else:
            questions.append(question)

    if errors:
        raise CombinedError(errors)

    return questions


def _locate_error(bad_row: BadRowError, path: Path, row_index: int) -> UserError:
    """Return the error of a row with its file and its number, which counts from 1."""
    location = f"{path}: row {row_index + 1}"
    return UserError(bad_row.code, str(bad_row), location, bad_row.hint, key=bad_row.key)


def _parse_question(line: bytes) -> Question:
    """Return the question in one line of a JSONL file, with its right answer if there is one.

    Raises:
        BadRowError: A field has a wrong type.
    """
    line = line.removeprefix(_BYTE_ORDER_MARK)
    row: dict[str, Any] = msgspec.json.decode(line)

    right_answer = read_reference(row)
    is_choice = right_answer is not None and looks_like_choice(row, right_answer)
    class_name = str(row.get(_CLASS_KEY) or "")

    return Question(
        row=parse_row(line.strip()),
        reference=right_answer,
        is_choice=is_choice,
        wants_json=requests_json(row),
        group=class_name,
    )
