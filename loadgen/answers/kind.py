"""Scored answers of one endpoint, or of two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loadgen.answers import folder as answers
from loadgen.answers import text as words
from loadgen.answers.comparison import AnswersResult, exit_code
from loadgen.core import format
from loadgen.result_kinds import ListRow, RegeneratedFile, ResultFunctions


def load(folder: Path) -> AnswersResult:
    """Read the stored scores."""
    return answers.read(folder)


def code(result: AnswersResult, strict: bool) -> int:
    return exit_code(result)


def list_row(folder: Path) -> ListRow:
    result = answers.read(folder)
    return ListRow(
        word=words.word(result),
        about=f"{result.dataset} · {result.model}",
        target=result.url + (f", against {result.against}" if result.against else ""),
        simulated=result.simulated,
    )


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
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
    yield RegeneratedFile(answers.FILE, again[answers.FILE], "the scores of every prompt", given)
    if answers.SCORES in again:
        yield RegeneratedFile(answers.SCORES, again[answers.SCORES], "the texts of the answers")


FUNCTIONS = ResultFunctions(
    load=load,
    code=code,
    list_row=list_row,
    regenerate=regenerate,
    schema=AnswersResult,
    headline=words.headline,
    report=words.report,
    document=format.document,
)
