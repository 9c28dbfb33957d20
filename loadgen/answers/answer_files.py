"""Read and write the files of scored answers: the result, the scores, and the texts if stored."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from loadgen.answers.comparison import (
    AnswersResult,
    ScoredPrompt,
    score_prompts,
    summarize_scores,
)
from loadgen.answers.questions import AnswerKey, Question
from loadgen.core import format
from loadgen.core.results import files
from loadgen.core.results.json_files import decode_json, encode_json_lines

FILE = "answers.json"
SCORES = "scores.jsonl"
TEXTS = "texts.jsonl"
_Row = TypeVar("_Row")
_DAMAGED_HINT = "use a folder that `loadgen answers` wrote, without changes"


class AnswerTexts(
    AnswerKey,
    frozen=True,
    kw_only=True,
    rename={"answer": "a", "other_answer": "b", "is_choice": "choice", "wants_json": "json"},
):
    """The answers to one prompt, and how they are scored: a line of `texts.jsonl`.

    It does not contain the prompt.

    Attributes:
        answer: The answer of the endpoint, or None if it did not answer.
        other_answer: The answer of the other endpoint, or None if it did not answer or there is
            none.
    """

    answer: str | None
    other_answer: str | None = None


def collect_texts(
    questions: Sequence[Question],
    answers: Sequence[str | None],
    other_answers: Sequence[str | None] | None,
) -> list[AnswerTexts]:
    """Return one row for each question, with the answers and the reference they are scored by.

    The scores can be computed again from these rows.

    Args:
        questions: The questions.
        answers: The answer of the endpoint to each question. None if a request failed.
        other_answers: The answers of the other endpoint, or None without another endpoint.
    """
    if other_answers is None:
        other_answers = [None] * len(answers)

    return [
        AnswerTexts(
            answer=answer,
            other_answer=other_answer,
            reference=question.reference,
            is_choice=question.is_choice,
            wants_json=question.wants_json,
            group=question.group,
        )
        for question, answer, other_answer in zip(questions, answers, other_answers, strict=True)
    ]


def write_result(
    folder: Path,
    result: AnswersResult,
    prompts: Sequence[ScoredPrompt],
    texts: Sequence[AnswerTexts] | None = None,
) -> None:
    """Write the result, the scores of each prompt and, if any, the texts to a folder.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)

    files.replace(folder / SCORES, encode_json_lines(prompts))
    if texts is not None:
        files.replace(folder / TEXTS, encode_json_lines(texts))
    files.replace(folder / FILE, format.document(result))


def regenerate_files(folder: Path) -> dict[str, bytes]:
    """Compute the files of a result again from stored data, and return their content by file name.

    The result (`answers.json`) is computed from the scores (`scores.jsonl`). The scores are
    computed from the texts of the answers, and are only returned if these texts were stored.
    """
    content_by_name = {FILE: _regenerate_result(folder)}

    has_texts = (folder / TEXTS).is_file()
    if has_texts:
        content_by_name[SCORES] = _regenerate_scores(folder)

    return content_by_name


def _regenerate_result(folder: Path) -> bytes:
    """Return `answers.json` with all counts and statistics computed from the stored scores."""
    stored = read_result(folder)
    prompts = read_scores(folder)

    failed = [prompt for prompt in prompts if not prompt.is_answered]
    failed_by_other = [prompt for prompt in prompts if not prompt.is_answered_by_other]
    regenerated = msgspec.structs.replace(
        stored,
        prompts=len(prompts),
        failed=len(failed),
        other_failed=len(failed_by_other),
        groups=summarize_scores(prompts, stored.allowed_loss, stored.level),
    )

    return format.document(regenerated)


def _regenerate_scores(folder: Path) -> bytes:
    """Return the content of `scores.jsonl`, computed from the stored texts of the answers."""
    rows = _read_json_lines(folder / TEXTS, AnswerTexts)
    answers = [row.answer for row in rows]

    other_answers = None
    has_other_endpoint = bool(read_result(folder).other_url)
    if has_other_endpoint:
        other_answers = [row.other_answer for row in rows]

    scored_prompts = score_prompts(rows, answers, other_answers)
    return encode_json_lines(scored_prompts)


def read_result(folder: Path) -> AnswersResult:
    """Return the result in a folder.

    Raises:
        UserError: The file is damaged.
        OSError: There is no such file.
    """
    file = folder / FILE
    content = file.read_bytes()
    expected = "a result of `loadgen answers`"
    return decode_json(content, AnswersResult, str(file), expected, _DAMAGED_HINT)


def read_scores(folder: Path) -> list[ScoredPrompt]:
    """Return the scores of every prompt. Raises like `read_result`."""
    return _read_json_lines(folder / SCORES, ScoredPrompt)


def _read_json_lines(file: Path, row_type: type[_Row]) -> list[_Row]:
    """Return the rows of a JSONL file, which has one JSON object in each line.

    Raises:
        UserError: The file is damaged.
        OSError: There is no such file.
    """
    lines = file.read_bytes().splitlines()

    # A decoding error of one JSON array names the index of the damaged row.
    json_array = b"[" + b",".join(lines) + b"]"
    return decode_json(
        json_array,
        list[row_type],  # type: ignore[valid-type]
        str(file),
        "the scores of answers",
        _DAMAGED_HINT,
        verbatim=True,
    )
