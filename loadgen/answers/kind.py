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
"""Patterns of fields of `answers.json` that cannot be computed from the scores."""


def load(folder: Path) -> AnswersResult:
    """Return the result in a folder."""
    return answer_files.read_result(folder)


def code(result: AnswersResult, strict: bool) -> int:  # noqa: ARG001 - as the other kinds
    """Return the exit code of a result. Too few prompts always have a code of their own."""
    return exit_code(result)


def list_row(folder: Path) -> ListRow:
    """Return the row of a result in the list of all results."""
    result = load(folder)

    target = result.url
    if result.other_url:
        target += f", against {result.other_url}"

    return ListRow(
        outcome=answers_text.outcome(result),
        description=f"{result.dataset} · {result.model}",
        target=target,
        simulated=result.simulated,
    )


def regenerate(folder: Path) -> Iterator[RegeneratedFile]:
    """Yield the files of a result as computed again from stored data.

    `answers.json` is computed from the scores of every prompt, except for fields such as the URL.
    `scores.jsonl` is computed from the texts of the answers, if these texts were stored.
    """
    content_by_name = answer_files.regenerate_files(folder)

    yield RegeneratedFile(
        name=answer_files.FILE,
        data=content_by_name[answer_files.FILE],
        basis="the scores of every prompt",
        leave=FIELDS_NOT_FROM_SCORES,
    )

    scores_content = content_by_name.get(answer_files.SCORES)
    if scores_content is not None:
        yield RegeneratedFile(
            name=answer_files.SCORES,
            data=scores_content,
            basis="the texts of the answers",
        )


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
