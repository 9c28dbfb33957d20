"""Read questions: rows of a JSONL file, with their right answers if known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from loadgen.core.errors import CombinedError, LoadgenError, UserError, has_too_many
from loadgen.core.workload.dataset import read_rows
from loadgen.core.workload.dataset_rows import DatasetRow, parse_row
from loadgen.core.workload.known_answers import is_choice_letter, read_reference, requests_json
from loadgen.core.workload.row_errors import BadRowError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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

    All rows are read even if one of them is invalid, so that the user can correct them together.
    Reading ends early only if too many are invalid.

    Raises:
        CombinedError: Rows are invalid. It contains one error for each of them.
    """
    rows = read_rows(path)
    row_count = len(rows) if limit is None else min(limit, len(rows))
    questions: list[Question] = []

    errors: list[LoadgenError] = []
    for row_index in range(row_count):
        try:
            questions.append(_parse_question(rows.line(row_index)))
        except BadRowError as bad_row:
            errors.append(_locate_error(bad_row, path, row_index))
            # If so, this also adds an error that says that there are more.
            if has_too_many(errors, str(path)):
                break

    if errors:
        raise CombinedError(errors)

    return questions


def _locate_error(bad_row: BadRowError, path: Path, row_index: int) -> UserError:
    """Return the error of a row with its file and its number, which counts from 1."""
    location = f"{path}: row {row_index + 1}"
    return UserError(bad_row.code, str(bad_row), location, bad_row.hint, key=bad_row.key)


def _parse_question(line: bytes) -> Question:
    """Return the question in a row of the data set.

    The reference is the letter of a choice if the row lists choices, or if it is a capital letter.

    Raises:
        BadRowError: A field has a wrong type.
    """
    line = line.removeprefix(_BYTE_ORDER_MARK)
    row: dict[str, Any] = msgspec.json.decode(line)
    reference = read_reference(row)

    return Question(
        row=parse_row(line.strip()),
        reference=reference,
        is_choice=reference is not None and is_choice_letter(row, reference),
        wants_json=requests_json(row),
        group=str(row.get("class") or ""),
    )
