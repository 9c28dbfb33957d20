"""Send the prompts of a contract and estimate the terms about responses from the scores.

A score says how good the response to one prompt is, such as `exact`: 1 if the response equals the
reference response, else 0. The scored endpoint is the target of the contract. It may be compared
with another endpoint, for example one that serves the same model without quantization.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.answers import answer_files
from loadgen.answers.comparison import (
    AnswersResult,
    Score,
    ScoredGroup,
    ScoreRatio,
    summarize_scores,
)
from loadgen.answers.completions import SendOptions
from loadgen.answers.questions import read_questions
from loadgen.answers.scoring_run import ScoringOptions, run_scoring
from loadgen.contracts.judge import ScoredAnswers
from loadgen.contracts.load_checks import EstimateError
from loadgen.contracts.schema import ANSWERS_LEVEL, AnswerCheck
from loadgen.contracts.term_estimate import TermEstimate
from loadgen.contracts.terms import ContractTerm
from loadgen.core import format
from loadgen.core.execution.backend import running_server
from loadgen.core.execution.plan import Settings
from loadgen.core.limits import FEWEST_ANSWERS
from loadgen.core.stats.intervals import Interval

DIRECTORY = ANSWERS_LEVEL
"""The directory of the responses in the results of a validation."""

NOT_SENT = "the prompts were not sent"

CONCURRENCY = 8
"""The number of prompts that are sent at the same time."""

PERCENT_DIGITS = 9
"""Decimal places of percentages: rounding makes 1 - 0.9 exactly 10 %, not 9.999999999999998 %."""


@dataclass(frozen=True)
class AnswerEndpoints:
    """The endpoint whose responses are scored, and the one they are compared with, if any."""

    scored: Settings
    other: Settings | None


def score_answers(
    check: AnswerCheck,
    dataset: Path,
    endpoints: AnswerEndpoints,
    output_dir: Path,
    confidence: float,
) -> None:
    """Send the prompts of a data set, score the responses, and write the scores to a directory.

    Args:
        check: The part of the contract that names the data set: how many of its rows are used, and
            how long a response may be.
        dataset: The file with the prompts.
        endpoints: The endpoints that the prompts are sent to.
        output_dir: The directory to write to.
        confidence: The confidence of the intervals of the mean scores.

    Raises:
        TargetError: An endpoint cannot be used.
        UserError, CombinedError: The data set cannot be read, or an endpoint has a wrong setting.
    """
    prompts = read_questions(dataset, check.rows)
    with running_server(endpoints.scored) as scored_endpoint:
        options = ScoringOptions(
            send=SendOptions(CONCURRENCY, check.max_tokens),
            out=output_dir,
            level=confidence,
            simulated=scored_endpoint.backend.simulated,
        )
        run_scoring(dataset, prompts, scored_endpoint, endpoints.other, options, _ignore_progress)


def _ignore_progress(name: str, done: int) -> None:
    """Show no progress."""


def read_scored_answers(output_dir: Path, failure_reason: str, confidence: float) -> ScoredAnswers:
    """Return the scores that `score_answers` wrote, or the reason why there are none.

    Args:
        output_dir: The directory of the scores.
        failure_reason: Why the prompts could not be sent, or "" if they were.
        confidence: The confidence of the intervals.

    Raises:
        UserError: The files cannot be read.
    """
    has_scores = (output_dir / answer_files.FILE).is_file()
    if failure_reason or not has_scores:
        evaluator_without_scores = AnswerTermEvaluator(groups=())
        return ScoredAnswers(
            evaluate=evaluator_without_scores.estimate, failure_reason=failure_reason or NOT_SENT
        )

    result = answer_files.read_result(output_dir)
    prompt_scores = answer_files.read_scores(output_dir)
    evaluator = AnswerTermEvaluator(summarize_scores(prompt_scores, level=confidence))

    load_description = "each prompt sent once, with temperature 0"
    if result.other_url:
        load_description += f"; compared with {result.other_model} at {result.other_url}"

    return ScoredAnswers(
        evaluate=evaluator.estimate,
        load=load_description,
        prompts=result.prompts,
        answered=result.prompts - result.failed,
        notes=tuple(_list_notes(result)),
    )


def _list_notes(result: AnswersResult) -> Iterator[str]:
    """Yield the warnings about scored responses: those of the scoring, and missing responses."""
    yield from result.notes
    prompts = format.counted(result.prompts, "prompt")
    if result.failed:
        yield f"{result.failed:,} of {prompts} got no response and score 0"

    if result.other_failed:
        yield (
            f"{result.other_failed:,} of {prompts} got no response from the other endpoint and "
            "are not compared"
        )


@dataclass(frozen=True)
class AnswerTermEvaluator:
    """Estimates the metrics of terms about responses from the scores of the responses.

    Attributes:
        groups: The scores of all prompts, and of each class of prompts. Empty if there are no
            responses.
    """

    groups: Sequence[ScoredGroup]

    def estimate(self, term: ContractTerm) -> TermEstimate:
        """Return the metric of a term about responses, in percent or tokens.

        There are two kinds of terms. A term such as `exact: 90%` limits the mean score of the
        target's responses. A term such as `within: {of: rougeL, limit: 5%}` limits by how much a
        score of the target is below that of another endpoint.

        Raises:
            EstimateError: The responses do not have the score.
        """
        if not self.groups:
            raise EstimateError(NOT_SENT)
        group = _find_group(self.groups, term.class_name)
        if term.kind == "within":
            compared_score = term.of
            return _estimate_decrease(group, compared_score)
        return _estimate_mean_score(group, term)


def _find_group(groups: Sequence[ScoredGroup], class_name: str) -> ScoredGroup:
    """Return the scores of a class of prompts, or those of all prompts if the name is "".

    Raises:
        EstimateError: There is no such class.
    """
    for group in groups:
        if group.group == class_name:
            return group
    raise EstimateError(f"no prompt has the class {class_name}")


def _estimate_mean_score(group: ScoredGroup, term: ContractTerm) -> TermEstimate:
    """Return the mean score that a term limits, over the prompts of a group.

    A score says how good a response is, such as `exact`, or how similar the responses of two
    endpoints are, such as `similarity`. A fraction becomes a percentage. A number of tokens stays.

    Args:
        group: The scores of all prompts, or of a class of prompts.
        term: The term, whose keyword is the name of the score.

    Raises:
        EstimateError: No prompt has the score, or the prompts are too few for an interval.
    """
    score = _find_score(group, term.kind)
    if score.low is None or score.high is None:
        raise EstimateError(_describe_too_few_prompts(score.count))
    interval = Interval(score.mean, score.low, score.high)
    if term.unit != "tokens":
        interval = interval.map(_to_percent)
    return TermEstimate(interval, score.count)


def _find_score(group: ScoredGroup, metric: str) -> Score:
    """Return the score of a group with this name. Raise EstimateError if there is none."""
    for score in (*group.scores, *group.similarity):
        if score.metric == metric:
            return score
    raise EstimateError(f"no prompt has the score {metric}")


def _estimate_decrease(group: ScoredGroup, metric: str) -> TermEstimate:
    """Return by how many percent a score of the target is below that of the other endpoint.

    For example, mean scores of 0.72 and 0.80 have a ratio of 0.9, which is a decrease of 10 %. A
    negative decrease means that the target is better.

    Args:
        group: The scores of the prompts.
        metric: The name of the score that is compared, such as `rougeL`.

    Raises:
        EstimateError: No prompt was scored for both endpoints, or too few were.
    """
    score_ratio = _find_score_ratio(group, metric)
    if score_ratio.ratio is None or score_ratio.low is None or score_ratio.high is None:
        raise EstimateError(_describe_too_few_prompts(score_ratio.count))

    # The larger the ratio, the smaller the decrease, so the ends of the interval change places.
    decrease = Interval(
        value=1 - score_ratio.ratio, low=1 - score_ratio.high, high=1 - score_ratio.low
    )
    return TermEstimate(decrease.map(_to_percent), score_ratio.count)


def _find_score_ratio(group: ScoredGroup, metric: str) -> ScoreRatio:
    """Return the ratio of a score between both endpoints. Raise EstimateError if there is none."""
    for score_ratio in group.ratios:
        if score_ratio.metric == metric:
            return score_ratio
    raise EstimateError(f"no prompt has the score {metric} for both endpoints")


def _to_percent(fraction: float) -> float:
    """Convert a fraction to a percentage."""
    return round(fraction * 100, PERCENT_DIGITS)


def _describe_too_few_prompts(count: int) -> str:
    """Return why the scores of so many prompts have no interval."""
    return (
        f"no confidence interval for {format.counted(count, 'prompt')}: at least {FEWEST_ANSWERS} "
        "needed, with scores that are not all 0"
    )
