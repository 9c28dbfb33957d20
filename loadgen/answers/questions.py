"""The questions: rows of a JSONL file as a load has them, with what is known of the right answer beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from loadgen.core.errors import CombinedError, LoadgenError, UserError, enough
from loadgen.core.workload.dataset import read_rows
from loadgen.core.workload.dataset_rows import DatasetRow, parse_row
from loadgen.core.workload.row_errors import BadRow

REFERENCES = ("reference", "answer", "output", "response", "target")
"""Keys under which data sets keep the right answer; the first one that a row has counts."""


class AnswerKey(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is judged.

    `reference`: a right answer, None where none is known. `choice`: the reference is the letter of a choice. `json`:
    the answer has to be JSON. `group`: the class it is counted in, "" for none.
    """

    reference: str | None = None
    choice: bool = False
    json: bool = False
    group: str = ""


class Question(AnswerKey, frozen=True, kw_only=True):
    """One prompt, and how its answer is judged."""

    row: DatasetRow


def read_questions(path: Path, most: int | None = None) -> list[Question]:
    """The questions of a file, at most so many. Raises Faults as `read_rows`, and for a reference that is no text."""
    rows = read_rows(path)
    questions: list[Question] = []
    faults: list[LoadgenError] = []
    for number in range(len(rows) if most is None else min(most, len(rows))):
        try:
            questions.append(_question(rows.line(number)))
        except BadRow as wrong:
            faults.append(
                UserError(
                    wrong.code, str(wrong), f"{path}: row {number + 1}", wrong.hint, key=wrong.key
                )
            )
            if enough(faults, str(path)):
                break
    if faults:
        raise CombinedError(faults)
    return questions


def _question(line: bytes) -> Question:
    row: dict[str, Any] = msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"))
    key = next((name for name in REFERENCES if row.get(name) is not None), None)
    reference = None if key is None else row[key]
    if isinstance(reference, int | float) and not isinstance(reference, bool):
        reference = str(reference)
    if reference is not None and not isinstance(reference, str):
        raise BadRow(
            "wrong_type",
            f"{key} is no text",
            "the right answer as a text; of a choice its letter",
            str(key),
        )
    choice = bool(row.get("choices")) or (
        reference is not None and len(reference) == 1 and reference.isupper()
    )
    wants_json = (row.get("response_format") or {}).get("type") in ("json_object", "json_schema")
    return Question(
        row=parse_row(line.removeprefix(b"\xef\xbb\xbf").strip()),
        reference=reference,
        choice=choice and reference is not None,
        json=wants_json,
        group=str(row.get("class") or ""),
    )
