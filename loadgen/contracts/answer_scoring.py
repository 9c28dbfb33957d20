"""Send the prompts of a contract and estimate the terms about answers from the scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loadgen.answers import answer_files
from loadgen.answers.comparison import ScoredGroup, summarize_scores
from loadgen.answers.completions import SendOptions
from loadgen.answers.questions import read_questions
from loadgen.answers.scoring_run import ScoringOptions, run_scoring
from loadgen.contracts.judge import ScoredAnswers
from loadgen.contracts.load_shortage import EstimateError
from loadgen.contracts.schema import ANSWERS_LEVEL, AnswerCheck
from loadgen.contracts.term_estimate import TermEstimate
from loadgen.contracts.terms import ContractTerm
from loadgen.core import format
from loadgen.core.execution.backend import serving
from loadgen.core.execution.plan import Settings
from loadgen.core.limits import FEWEST_ANSWERS
from loadgen.core.stats.intervals import Interval

DIRECTORY = ANSWERS_LEVEL
"""The directory of the answers in the results of a validation."""

CONCURRENCY = 8
"""Prompts that are sent at the same time."""

PERCENT_DIGITS = 9
"""Decimal places of percentages, so that 1 - 0.9 is 10 %."""


@dataclass(frozen=True)
class AnswerEndpoints:
    """The endpoint whose answers are scored, and the one they are compared with, if any."""

    scored: Settings
    other: Settings | None


def score_answers(
    check: AnswerCheck,
    dataset: Path,
    endpoints: AnswerEndpoints,
    output_dir: Path,
    confidence: float,
) -> None:
    """Send all prompts, score the answers, and write the scores to a directory.

    Args:
        check: What the contract says about answers.
        dataset: The file of the prompts.
        endpoints: The endpoints that the prompts are sent to.
        output_dir: The directory to write to.
        confidence: The confidence of the contract.

    Raises:
        TargetError: An endpoint cannot be used.
        UserError, CombinedError: The data set or the settings are wrong.
    """
    questions = read_questions(dataset, check.rows)
    with serving(endpoints.scored) as scored:
        options = ScoringOptions(
            SendOptions(CONCURRENCY, check.max_tokens),
            out=output_dir,
            level=confidence,
            simulated=scored.backend.simulated,
        )
        run_scoring(dataset, questions, scored, endpoints.other, options, _ignore_progress)


def _ignore_progress(name: str, done: int) -> None:
    """Show no progress."""


def read_scored_answers(output_dir: Path, failure_reason: str, confidence: float) -> ScoredAnswers:
    """Return the scores that `score_answers` wrote, or only the reason why there are none.

    Raises:
        UserError: The files cannot be read.
    """
    if failure_reason or not (output_dir / answer_files.FILE).is_file():
        reason = failure_reason or "the prompts were not asked"
        return ScoredAnswers(_refuse_term, failure_reason=reason)
    result = answer_files.read_result(output_dir)
    groups = summarize_scores(answer_files.read_scores(output_dir), level=confidence)
    notes = list(result.notes)
    if result.failed:
        prompts = format.counted(result.prompts, "prompt")
        notes.append(f"{result.failed:,} of {prompts} had no answer: they score 0")
    if result.failed_against:
        notes.append(
            f"{result.failed_against:,} prompts had no answer of the other endpoint: "
            "they are not compared"
        )
    other = f", against {result.against_model} at {result.against}" if result.against else ""
    return ScoredAnswers(
        evaluate=partial(estimate_answer_term, groups),
        load=f"asked once, greedily{other}",
        prompts=result.prompts,
        answered=result.prompts - result.failed,
        notes=tuple(notes),
    )


def _refuse_term(_term: ContractTerm) -> TermEstimate:
    """Raise EstimateError for any term."""
    raise EstimateError("the prompts were not asked")


def estimate_answer_term(groups: Sequence[ScoredGroup], term: ContractTerm) -> TermEstimate:
    """Return the metric of a term about answers, in percent or tokens.

    Raises:
        EstimateError: The answers do not have it.
    """
    for group in groups:
        if group.group == term.class_name:
            break
    else:
        raise EstimateError(f"there is no prompt of class {term.class_name}")
    if term.kind == "within":
        return _estimate_decrease(group, term)
    for score in (*group.scores, *group.alike):
        if score.metric == term.kind:
            break
    else:
        raise EstimateError(f"no prompt has a score of this kind ({term.kind})")
    if score.low is None or score.high is None:
        raise EstimateError(_too_few_text(score.count))
    interval = Interval(score.mean, score.low, score.high)
    if term.unit != "tokens":
        interval = interval.map(_to_percent)
    return TermEstimate(interval, score.count)


def _estimate_decrease(group: ScoredGroup, term: ContractTerm) -> TermEstimate:
    """Return by how many percent a score is below that of the other endpoint."""
    for change in group.changes:
        if change.metric == term.of:
            break
    else:
        raise EstimateError(f"no prompt has a {term.of} of both endpoints")
    if change.ratio is None or change.low is None or change.high is None:
        raise EstimateError(_too_few_text(change.count))
    decrease = Interval(1 - change.ratio, 1 - change.high, 1 - change.low)
    return TermEstimate(decrease.map(_to_percent), change.count)


def _to_percent(share: float) -> float:
    return round(share * 100, PERCENT_DIGITS)


def _too_few_text(count: int) -> str:
    return (
        f"{count:,} prompts say too little: {FEWEST_ANSWERS} or more, and scores that are not all 0"
    )
