"""The files of scored answers: what came out, the scores of every prompt, the texts where they were asked for. IO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from loadgen.answers.comparison import AnswersResult, ScoredPrompt, judge, score
from loadgen.answers.questions import AnswerKey, Question
from loadgen.core import format
from loadgen.core.results import files
from loadgen.core.results.manifest import decoded

FILE, SCORES, TEXTS = "answers.json", "scores.jsonl", "texts.jsonl"
_Row = TypeVar("_Row")
_USE_ORIGINAL = "take the folder as it was handed over"


class KeptTexts(AnswerKey, frozen=True, kw_only=True):
    """A line of `texts.jsonl`: the two answers to one prompt, and what they are scored by. It holds no prompt."""

    a: str | None
    b: str | None = None


def kept_texts(
    questions: Sequence[Question],
    answers: Sequence[str | None],
    others: Sequence[str | None] | None,
) -> list[KeptTexts]:
    return [
        KeptTexts(
            a=answer,
            b=None if others is None else others[i],
            reference=question.reference,
            choice=question.choice,
            json=question.json,
            group=question.group,
        )
        for i, (question, answer) in enumerate(zip(questions, answers, strict=True))
    ]


def write(
    folder: Path,
    result: AnswersResult,
    prompts: Sequence[ScoredPrompt],
    texts: Sequence[KeptTexts] | None = None,
) -> None:
    """Write the files of a result. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files.replace(folder / SCORES, _lines(prompts))
    if texts is not None:
        files.replace(folder / TEXTS, _lines(texts))
    files.replace(folder / FILE, format.document(result))


def outputs_again(folder: Path) -> dict[str, bytes]:
    """The derived files of a folder, made again: the result of the scores, and the scores of the texts if kept."""
    stored = read(folder)
    prompts = read_scores(folder)
    result = msgspec.structs.replace(
        stored,
        prompts=len(prompts),
        failed=sum(not prompt.answered for prompt in prompts),
        failed_against=sum(not prompt.other_answered for prompt in prompts),
        parts=judge(prompts, stored.loss, stored.level),
    )
    made = {FILE: format.document(result)}
    if (folder / TEXTS).is_file():
        texts = _read_lines(folder / TEXTS, KeptTexts)
        others = [one.b for one in texts] if stored.against else None
        made[SCORES] = _lines(score(texts, [one.a for one in texts], others))
    return made


def read(folder: Path) -> AnswersResult:
    """The result in a folder. Raises UserError for a damaged one, OSError where there is none."""
    file = folder / FILE
    return decoded(
        file.read_bytes(), AnswersResult, str(file), "a result of `loadgen answers`", _USE_ORIGINAL
    )


def read_scores(folder: Path) -> list[ScoredPrompt]:
    """The scores of every prompt. Raises UserError for damaged ones, OSError where there are none."""
    return _read_lines(folder / SCORES, ScoredPrompt)


def _read_lines(file: Path, kind: type[_Row]) -> list[_Row]:
    rows = b"[" + b",".join(file.read_bytes().splitlines()) + b"]"
    what = "the scores of answers"
    return decoded(rows, list[kind], str(file), what, _USE_ORIGINAL, verbatim=True)  # type: ignore[valid-type]


def _lines(rows: Sequence[msgspec.Struct]) -> bytes:
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
