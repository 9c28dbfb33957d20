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
from loadgen.core.results.json_files import decode_json

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
    """Return the texts of the answers with what they are scored by.

    They are stored with `--keep-content`, so that `loadgen verify` can compute the scores again.
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
    """Write the files of a result. Raises OSError if they cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    files.replace(folder / SCORES, _encode_lines(prompts))
    if texts is not None:
        files.replace(folder / TEXTS, _encode_lines(texts))
    files.replace(folder / FILE, format.document(result))


def regenerate_files(folder: Path) -> dict[str, bytes]:
    """Compute the derived files of a result again, for `loadgen verify`.

    The result (`answers.json`) is computed from the scores (`scores.jsonl`), and the scores from
    the texts. Texts may contain personal data and are therefore not always stored. The scores are
    then raw data, and not part of what is returned.

    Returns:
        The content of each derived file, by its name.
    """
    regenerated = {FILE: _regenerate_result(folder)}
    if (folder / TEXTS).is_file():
        regenerated[SCORES] = _regenerate_scores(folder)
    return regenerated


def _regenerate_result(folder: Path) -> bytes:
    """Return `answers.json` with all counts and statistics computed from the stored scores."""
    stored = read_result(folder)
    prompts = read_scores(folder)
    result = msgspec.structs.replace(
        stored,
        prompts=len(prompts),
        failed=sum(not prompt.is_answered for prompt in prompts),
        other_failed=sum(not prompt.is_answered_by_other for prompt in prompts),
        groups=summarize_scores(prompts, stored.allowed_loss, stored.level),
    )

    return format.document(result)


def _regenerate_scores(folder: Path) -> bytes:
    """Return `scores.jsonl` computed from the stored texts."""
    has_other_endpoint = bool(read_result(folder).other_url)
    texts = _read_json_lines(folder / TEXTS, AnswerTexts)
    answers = [line.answer for line in texts]
    other_answers = [line.other_answer for line in texts] if has_other_endpoint else None
    return _encode_lines(score_prompts(texts, answers, other_answers))


def read_result(folder: Path) -> AnswersResult:
    """Return the result in a folder.

    Raises:
        UserError: The file is damaged.
        OSError: There is no such file.
    """
    file = folder / FILE
    return decode_json(
        file.read_bytes(), AnswersResult, str(file), "a result of `loadgen answers`", _DAMAGED_HINT
    )


def read_scores(folder: Path) -> list[ScoredPrompt]:
    """Return the scores of every prompt. Raises like `read_result`."""
    return _read_json_lines(folder / SCORES, ScoredPrompt)


def _read_json_lines(file: Path, row_type: type[_Row]) -> list[_Row]:
    """Return the rows of a JSONL file, which has one JSON object for each prompt.

    The lines are joined to one JSON array, because a decoding error then names the index of the
    damaged row.

    Raises:
        UserError: The file is damaged. The message calls it the scores, although it may have the
            texts.
        OSError: There is no such file.
    """
    lines = file.read_bytes().splitlines()
    json_array = b"[" + b",".join(lines) + b"]"
    return decode_json(
        json_array,
        list[row_type],  # type: ignore[valid-type]
        str(file),
        "the scores of answers",
        _DAMAGED_HINT,
        verbatim=True,
    )


def _encode_lines(rows: Sequence[msgspec.Struct]) -> bytes:
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
