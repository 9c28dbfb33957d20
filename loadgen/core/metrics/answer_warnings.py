"""Add the scores of checked answers to a summary, with warnings about what they show. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.core.metrics.answer_scores import (
    AnswerScores,
    measure_answers,
    summarize_answers,
)
from loadgen.core.metrics.verdict import add_warning

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from loadgen.core.metrics.summary import Summary
    from loadgen.core.results.answer_files import ScoredAnswer
    from loadgen.core.results.manifest import RunManifest


def add_answer_scores(
    summary: Summary,
    manifest: RunManifest,
    rows: NDArray[np.void],
    scored_answers: Sequence[ScoredAnswer],
) -> Summary:
    """Return the summary with the scores of checked answers, and with warnings about them.

    Args:
        summary: The summary of the records.
        manifest: The manifest of the run.
        rows: The records of all requests.
        scored_answers: The outcomes of all checks.
    """
    measured_stages = [index for index, stage in enumerate(manifest.stages) if stage.measured]
    measured_answers = measure_answers(scored_answers, rows, measured_stages)
    answers = summarize_answers(measured_answers)

    verdict = summary.verdict
    for code, values in _find_warnings(answers):
        verdict = add_warning(verdict, code, values)

    return msgspec.structs.replace(summary, answers=answers, verdict=verdict)


def _find_warnings(answers: AnswerScores) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield warnings about responses that are worse under load, or that differ from a reference."""
    dependence = answers.load_dependence
    if dependence is not None and dependence.is_worse:
        values = {
            "in_flight": dependence.in_flight,
            "below": dependence.below.score,
            "above": dependence.above.score,
        }
        yield "answers_worse_under_load", values

    reference = answers.reference
    if reference is not None and reference.is_different:
        values = {
            "worse": reference.worse,
            "better": reference.better,
            "questions": reference.questions,
        }
        yield "answers_differ_from_reference", values
