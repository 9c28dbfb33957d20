"""The result kind `answers`: scored answers of one endpoint, or of two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from loadgen.answers import answer_files, answers_text
from loadgen.answers.comparison import AnswersResult, exit_code
from loadgen.core import format
from loadgen.result_kinds import ListRow, RegeneratedFile, ResultFunctions

FIELDS_NOT_FROM_SCORES = (
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
"""Fields of `answers.json` that do not follow from the scores."""


def load(folder: Path) -> AnswersResult:
    """Return the result in a folder."""
    return answer_files.read_result(folder)


def code(result: AnswersResult, strict: bool) -> int:  # noqa: ARG001 - as the other kinds
    """Return the exit code of a result. Too few prompts always have a code of their own."""
    return exit_code(result)


def list_row(folder: Path) -> ListRow:
    """Return the row of a result in the list of results."""
    result = load(folder)
    return ListRow(
        outcome=answers_text.outcome(result),
        description=f"{result.dataset} · {result.model}",
        target=result.url + (f", against {result.other_url}" if result.other_url else ""),
        simulated=result.simulated,
    )


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    """Yield the derived files of a folder, for `loadgen verify`.

    `answers.json` follows from the scores, and the scores from the texts, if these are stored.
    """
    regenerated = answer_files.regenerate_files(folder)
    yield RegeneratedFile(
        answer_files.FILE,
        regenerated[answer_files.FILE],
        "the scores of every prompt",
        FIELDS_NOT_FROM_SCORES,
    )
    if answer_files.SCORES in regenerated:
        scores = regenerated[answer_files.SCORES]
        yield RegeneratedFile(answer_files.SCORES, scores, "the texts of the answers")


FUNCTIONS = ResultFunctions(
    load=load,
    code=code,
    list_row=list_row,
    regenerate=regenerate,
    schema=AnswersResult,
    headline=answers_text.headline,
    report=answers_text.report,
    document=format.document,
)
