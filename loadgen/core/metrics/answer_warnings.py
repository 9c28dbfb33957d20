"""Add the scores of checked answers to a summary, with warnings about what they show. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from loadgen.core.metrics.answer_objective import (
    include_answers_outcome,
    judge_answers_objective,
)
from loadgen.core.metrics.answer_scores import (
    AnswerScores,
    measure_answers,
    summarize_answers,
)
from loadgen.core.metrics.goodput import without_outcomes_if_invalid
from loadgen.core.metrics.verdict import add_warning

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from loadgen.core.metrics.summary import Summary
    from loadgen.core.results.answer_files import ScoredAnswer
    from loadgen.core.results.manifest import RunManifest

WORSE_UNDER_LOAD = "answers_worse_under_load"
"""The code of the warning about more wrong responses with more requests in flight."""
ALL_WRONG = "answers_all_wrong"
"""The code of the warning that no checked answer is right, which is seldom the model's fault."""
MIN_ANSWERS_OF_ALL_WRONG = 5
"""Fewer wrong answers may be a coincidence."""
DIFFERENT_FROM_REFERENCE = "answers_differ_from_reference"
"""The code of the warning about responses that differ from a reference server's."""


def add_answer_scores(
    summary: Summary,
    manifest: RunManifest,
    rows: NDArray[np.void],
    scored_answers: Sequence[ScoredAnswer],
) -> Summary:
    """Return the summary of a run with the scores of its checked answers.

    The objective of the SLO on answers is judged, and becomes a part of the outcome of the SLO.
    Warnings about the scores are added to the verdict.

    Args:
        summary: The summary of the run without checked answers.
        manifest: The manifest of the run, which lists its stages.
        rows: The records of all requests.
        scored_answers: The outcomes of all checks.
    """
    measured_stages = [index for index, stage in enumerate(manifest.stages) if stage.measured]
    measured_answers = measure_answers(scored_answers, rows, measured_stages)
    answers = summarize_answers(measured_answers)

    objective = judge_answers_objective(manifest.slo, answers.overall)
    answers = msgspec.structs.replace(answers, objective=objective)
    goodput = include_answers_outcome(summary.goodput, objective, manifest.slo)

    verdict = summary.verdict
    for warning in _find_warnings(answers):
        verdict = add_warning(verdict, warning.code, warning.values)

    scored_summary = msgspec.structs.replace(
        summary, answers=answers, goodput=goodput, verdict=verdict
    )
    return without_outcomes_if_invalid(scored_summary)


class _AnswerWarning(NamedTuple):
    """The code of a warning, and the values in its text."""

    code: str
    values: dict[str, Any]


def _find_warnings(answers: AnswerScores) -> Iterator[_AnswerWarning]:
    """Yield a warning if all answers are wrong, worse under load, or unlike a reference server's.

    The last two have a probability of a false alarm of at most 1 % each.
    """
    overall = answers.overall
    if overall.correct == 0 and overall.checked >= MIN_ANSWERS_OF_ALL_WRONG:
        yield _AnswerWarning(ALL_WRONG, {"checked": overall.checked})

    dependence = answers.load_dependence
    if dependence is not None and dependence.is_worse:
        values = {
            "in_flight": dependence.in_flight,
            "below": dependence.below.score,
            "above": dependence.above.score,
        }
        yield _AnswerWarning(WORSE_UNDER_LOAD, values)

    reference = answers.reference
    if reference is not None and reference.is_different:
        values = {
            "worse": reference.worse,
            "better": reference.better,
            "questions": reference.questions,
        }
        yield _AnswerWarning(DIFFERENT_FROM_REFERENCE, values)
