"""Scored answers of one endpoint, or of two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loadgen.answers import folder as answers
from loadgen.answers import text as words
from loadgen.answers.comparison import AnswersResult, exit_code
from loadgen.result_kinds import ListRow, Remade


def value(folder: Path) -> AnswersResult:
    return answers.read(folder)


def code(result: AnswersResult, strict: bool) -> int:
    return exit_code(result)


def listed(folder: Path) -> ListRow:
    result = answers.read(folder)
    return ListRow(
        word=words.word(result),
        about=f"{result.dataset} · {result.model}",
        target=result.url + (f", against {result.against}" if result.against else ""),
        simulated=result.simulated,
    )


def derived(folder: Path) -> Iterator[Remade]:
    again = answers.outputs_again(folder)
    given = (
        "dataset*",
        "version",
        "url",
        "model",
        "against*",
        "loss",
        "level",
        "simulated",
        "notes*",
    )
    yield Remade(answers.FILE, again[answers.FILE], "the scores of every prompt", given)
    if answers.SCORES in again:
        yield Remade(answers.SCORES, again[answers.SCORES], "the texts of the answers")
