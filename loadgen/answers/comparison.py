"""Aggregates the scores of one endpoint or two: means, intervals, ratios and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from loadgen.answers.questions import AnswerKey
from loadgen.answers.scores import (
    BINARY_SCORES,
    PAIR_SCORES,
    REFERENCE_SCORES,
    TOKEN_COUNTS,
    score_against_reference,
    score_pair,
)
from loadgen.core.errors import INCONCLUSIVE, OK, SLO_MISSED, UNSOUND
from loadgen.core.limits import FEWEST_ANSWERS
from loadgen.core.stats.intervals import LEVEL, mean_of_runs, ratio_of_means, wilson_interval

SCHEMA = 1
MIN_COMPARED_PROMPTS = FEWEST_ANSWERS
"""The ratio of scores of fewer prompts has no interval."""


class ScoredPrompt(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={
        "is_answered": "answered",
        "is_answered_by_other": "other_answered",
        "other_scores": "other",
        "similarity": "alike",
    },
):
    """The scores of one prompt, without its texts: a line of `scores.jsonl`.

    Attributes:
        group: The class of the prompt, or "".
        is_answered: False if the endpoint did not answer. Its scores are 0 then.
        is_answered_by_other: False if the other endpoint did not answer. `other_scores` and
            `similarity` are empty then.
        scores: The scores of the endpoint against the reference.
        other_scores: The scores of the other endpoint against the reference.
        similarity: How similar the two answers are.
    """

    group: str = ""
    is_answered: bool = True
    is_answered_by_other: bool = True
    scores: dict[str, float] = {}
    other_scores: dict[str, float] = {}
    similarity: dict[str, float] = {}


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of a score over several answers, with its confidence interval.

    Attributes:
        metric: The key of the score.
        count: The number of answers.
        mean: The mean.
        low: Lower end of its interval, or None for few answers.
        high: Upper end of its interval, or None for few answers.
    """

    metric: str
    count: int
    mean: float
    low: float | None
    high: float | None


class ScoreRatio(msgspec.Struct, frozen=True, kw_only=True, rename={"is_within_loss": "within"}):
    """A score of the endpoint divided by that of the other one, over the same prompts.

    Attributes:
        metric: The key of the score.
        count: The number of prompts.
        ratio: The ratio (0.99 is 1 % less), or None if it is not defined.
        low: Lower end of its interval, or None for few prompts.
        high: Upper end of its interval, or None for few prompts.
        is_within_loss: True if the ratio is at least 1 minus the allowed loss. None if it is
            undecided or no loss was allowed.
    """

    metric: str
    count: int
    ratio: float | None
    low: float | None
    high: float | None
    is_within_loss: bool | None = None


class ScoredGroup(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"other_scores": "other", "ratios": "changes", "similarity": "alike"},
):
    """The scores of all prompts, or of one class of them.

    Attributes:
        group: The class, or "" for all prompts.
        scores: The scores of the endpoint.
        other_scores: The scores of the other endpoint.
        ratios: The ratios of both.
        similarity: How similar the two answers to each prompt are.
    """

    group: str
    scores: tuple[Score, ...]
    other_scores: tuple[Score, ...] = ()
    ratios: tuple[ScoreRatio, ...] = ()
    similarity: tuple[Score, ...] = ()


class AnswersResult(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "other_url": "against",
        "other_model": "against_model",
        "other_failed": "failed_against",
        "allowed_loss": "loss",
        "groups": "parts",
    },
):
    """The content of `answers.json`.

    Attributes:
        schema: Version of the format.
        dataset: Name of the data set.
        dataset_sha256: Hash of the data set.
        version: Version of loadgen.
        url: URL of the endpoint.
        model: Its model.
        other_url: URL of the other endpoint, or "".
        other_model: The model of the other endpoint, or "".
        prompts: The number of prompts.
        failed: Prompts that the endpoint did not answer.
        other_failed: Prompts that the other endpoint did not answer.
        allowed_loss: The fraction by which a score may be lower than that of the other endpoint,
            or None.
        level: Confidence of the intervals.
        simulated: True if a server is simulated.
        notes: What a reader should know.
        groups: The scores of all prompts, and then of each class.
    """

    schema: int = SCHEMA
    dataset: str
    dataset_sha256: str = ""
    version: str = ""
    url: str
    model: str
    other_url: str = ""
    other_model: str = ""
    prompts: int
    failed: int
    other_failed: int = 0
    allowed_loss: float | None = None
    level: float = LEVEL
    simulated: bool = False
    notes: tuple[str, ...] = ()
    groups: tuple[ScoredGroup, ...]

    @property
    def is_within_loss(self) -> bool | None:
        """Whether no score is lower than that of the other endpoint by more than the allowed loss.

        None if undecided, or without an allowed loss. Failed requests leave a pass undecided,
        because a failed request scores 0, which says nothing about the model.
        """
        if self.allowed_loss is None:
            return None

        all_prompts = self.groups[0]
        outcomes = [ratio.is_within_loss for ratio in all_prompts.ratios]
        if False in outcomes:
            return False

        has_undecided_score = not outcomes or None in outcomes
        if has_undecided_score or self.failed > 0:
            return None

        return True


def exit_code(result: AnswersResult) -> int:
    """Return the exit code of a result, which says whether the scores are within the allowed loss.

    If all requests failed, the exit code says so. Without an allowed loss, any scores are OK.
    """
    has_no_answers = result.failed == result.prompts
    if has_no_answers:
        return UNSOUND
    if result.allowed_loss is None:
        return OK
    if result.is_within_loss is None:
        return INCONCLUSIVE
    return OK if result.is_within_loss else SLO_MISSED


def score_prompts(
    questions: Sequence[AnswerKey],
    answers: Sequence[str | None],
    other_answers: Sequence[str | None] | None,
) -> tuple[ScoredPrompt, ...]:
    """Score the answer of each endpoint to every prompt, and the similarity of the two answers.

    A missing answer scores 0. A prompt that only the other endpoint did not answer is scored, but
    not compared.

    Args:
        questions: How each answer is scored.
        answers: The answers of the endpoint. None if it did not answer.
        other_answers: The answers of the other endpoint, or None if there is no other one.

    Raises:
        UserError: A package that scores is not installed.
    """
    prompts = [
        ScoredPrompt(
            group=question.group,
            is_answered=answer is not None,
            scores=_score_answer(question, answer),
        )
        for question, answer in zip(questions, answers, strict=True)
    ]
    if other_answers is None:
        return tuple(prompts)

    compared_prompts = []
    columns = zip(prompts, questions, answers, other_answers, strict=True)
    for prompt, question, answer, other_answer in columns:
        compared_prompts.append(_add_other_endpoint(prompt, question, answer, other_answer))
    return tuple(compared_prompts)


def _add_other_endpoint(
    prompt: ScoredPrompt, question: AnswerKey, answer: str | None, other_answer: str | None
) -> ScoredPrompt:
    """Return a scored prompt with the scores of the other endpoint's answer added.

    Args:
        prompt: The scores of the first endpoint's answer.
        question: How an answer is scored.
        answer: The answer of the first endpoint, or None if its request failed.
        other_answer: The answer of the other endpoint, or None if its request failed.
    """
    if other_answer is None:
        return msgspec.structs.replace(prompt, is_answered_by_other=False)

    return msgspec.structs.replace(
        prompt,
        is_answered_by_other=True,
        other_scores=_score_answer(question, other_answer),
        similarity=_score_similarity(answer, other_answer),
    )


def summarize_scores(
    prompts: Sequence[ScoredPrompt], allowed_loss: float | None = None, level: float = LEVEL
) -> tuple[ScoredGroup, ...]:
    """Return the scores of all prompts, followed by the scores of each class of prompts.

    Args:
        prompts: The scores of every prompt.
        allowed_loss: The fraction by which a score may be lower than that of the other endpoint,
            or None.
        level: The confidence of the intervals.
    """
    all_prompts = _summarize_group("", prompts, allowed_loss, level)

    # A prompt without a class has the class name "".
    class_names = {prompt.group for prompt in prompts} - {""}
    groups = [all_prompts]
    for class_name in sorted(class_names):
        prompts_of_class = [prompt for prompt in prompts if prompt.group == class_name]
        groups.append(_summarize_group(class_name, prompts_of_class, allowed_loss, level))
    return tuple(groups)


def unseen_share(count: int, level: float = LEVEL) -> float:
    """Return the largest share of cases of which a sample of `count` cases may have none.

    A share u has no case in the sample with the probability (1 - u) ** count. The result is the u
    at which this probability is (1 - level) / 2: for 100 cases and a level of 0.95, it is 0.036.
    """
    miss_probability = (1 - level) / 2
    log_of_seen_share = math.log(miss_probability) / count
    return -math.expm1(log_of_seen_share)


def _score_answer(question: AnswerKey, answer: str | None) -> dict[str, float]:
    """Return the scores of an answer by name. A missing answer (None) scores 0 everywhere."""
    scores = score_against_reference(
        answer or "",
        question.reference,
        is_choice=question.is_choice,
        wants_json=question.wants_json,
    )
    if answer is None:
        return dict.fromkeys(scores, 0.0)
    return scores


def _score_similarity(answer: str | None, other: str) -> dict[str, float]:
    """Return how similar two answers are; 0 if the endpoint did not answer."""
    if answer is None:
        return dict.fromkeys(PAIR_SCORES, 0.0)
    return score_pair(answer, other)


def _summarize_group(
    name: str, prompts: Sequence[ScoredPrompt], allowed_loss: float | None, level: float
) -> ScoredGroup:
    """Return the mean scores of a class of prompts for each endpoint, and their ratios.

    Args:
        name: The name of the class, or "" for all prompts.
        prompts: The scores of the prompts of this class.
        allowed_loss: The fraction by which a score may be lower than that of the other endpoint,
            or None.
        level: The confidence of the intervals.
    """
    scores = [prompt.scores for prompt in prompts]
    other_scores = [prompt.other_scores for prompt in prompts]
    similarities = [prompt.similarity for prompt in prompts]

    return ScoredGroup(
        group=name,
        scores=_mean_scores(REFERENCE_SCORES, scores, level),
        other_scores=_mean_scores(REFERENCE_SCORES, other_scores, level),
        ratios=_compare_scores(prompts, allowed_loss, level),
        similarity=_mean_scores(PAIR_SCORES, similarities, level),
    )


def _compare_scores(
    prompts: Sequence[ScoredPrompt], allowed_loss: float | None, level: float
) -> tuple[ScoreRatio, ...]:
    """Return the ratio of the mean scores of two endpoints, for each kind of score.

    For example, mean scores of 0.72 and 0.80 have a ratio of 0.9. Only prompts that the other
    endpoint has answered are compared. A kind of score that no prompt has is left out.
    """
    ratios = []
    for metric in REFERENCE_SCORES:
        # `other_scores` is empty for a prompt that the other endpoint did not answer.
        compared_prompts = [prompt for prompt in prompts if metric in prompt.other_scores]
        if compared_prompts:
            paired_scores = _PairedScores(
                scores=[prompt.scores[metric] for prompt in compared_prompts],
                other_scores=[prompt.other_scores[metric] for prompt in compared_prompts],
            )
            ratios.append(_estimate_ratio(metric, paired_scores, allowed_loss, level))

    return tuple(ratios)


def _mean_scores(
    metrics: Sequence[str], scores_of_prompts: Sequence[Mapping[str, float]], level: float
) -> tuple[Score, ...]:
    """Return the mean of each kind of score, over the prompts that have this kind of score.

    For example, only prompts that expect JSON have a score for valid JSON.
    """
    means = []
    for metric in metrics:
        values = [scores[metric] for scores in scores_of_prompts if metric in scores]
        if values:
            means.append(_estimate_mean(metric, values, level))
    return tuple(means)


def _estimate_mean(metric: str, values: Sequence[float], level: float) -> Score:
    """Return the mean of a score with its confidence interval.

    With few values, the interval is unknown, so its ends are None.
    """
    count = len(values)
    mean = math.fsum(values) / count

    has_interval = count >= FEWEST_ANSWERS
    if not has_interval:
        return Score(metric=metric, count=count, mean=mean, low=None, high=None)

    if metric in BINARY_SCORES:
        # A score of 0 or 1 is a proportion.
        low, high = wilson_interval(mean, count, level)
    else:
        low, high = _interval_with_unseen_cases(metric, values, mean, level)

    return Score(metric=metric, count=count, mean=mean, low=low, high=high)


class _Bounds(NamedTuple):
    """The ends of a confidence interval."""

    low: float
    high: float


def _interval_with_unseen_cases(
    metric: str, values: Sequence[float], mean: float, level: float
) -> _Bounds:
    """Return the confidence interval of a mean score, widened for rare cases not in the sample.

    Student's interval is too narrow if almost all scores are equal, because up to a share u of all
    prompts may be of a kind that the sample does not have. The interval is widened to the mean if
    all these prompts score 0, and to the mean if they all score 1. For example, with a mean of 0.9
    and u = 0.04, the interval includes 0.9 * 0.96 = 0.864 and 0.9 * 0.96 + 0.04 = 0.904.
    """
    student_interval = mean_of_runs(values, level)
    unseen = unseen_share(len(values), level)

    mean_if_unseen_score_0 = mean * (1 - unseen)
    low = min(student_interval.low, mean_if_unseen_score_0)
    if metric in TOKEN_COUNTS:
        # A number of tokens has no highest value, so the upper end cannot be widened.
        return _Bounds(low, student_interval.high)

    mean_if_unseen_score_1 = mean + unseen * (1 - mean)
    high = max(student_interval.high, mean_if_unseen_score_1)
    return _Bounds(max(low, 0.0), min(high, 1.0))


class _PairedScores(NamedTuple):
    """The scores of the same prompts at both endpoints."""

    scores: Sequence[float]
    other_scores: Sequence[float]


def _estimate_ratio(
    metric: str, paired_scores: _PairedScores, allowed_loss: float | None, level: float
) -> ScoreRatio:
    """Return the ratio of the mean scores of two endpoints, with its confidence interval.

    With few prompts, or if the interval has no end, the result has no interval and no verdict.

    Args:
        metric: The name of the score.
        paired_scores: The scores of the same prompts at both endpoints.
        allowed_loss: The fraction by which the ratio may be below 1, or None.
        level: The confidence of the interval.
    """
    count = len(paired_scores.scores)
    estimate = _estimate_paired_ratio(paired_scores, level)
    ratio = ScoreRatio(
        metric=metric,
        count=count,
        ratio=estimate.ratio if math.isfinite(estimate.ratio) else None,
        low=None,
        high=None,
    )
    has_enough_prompts = count >= MIN_COMPARED_PROMPTS
    if not has_enough_prompts or not estimate.is_bounded:
        return ratio

    low = _widen_lower_end(estimate, count, level)
    high = estimate.high
    is_within_loss = _is_within_loss(low, high, allowed_loss)
    return msgspec.structs.replace(ratio, low=low, high=high, is_within_loss=is_within_loss)


class _RatioEstimate(NamedTuple):
    """The ratio of two means with its confidence interval, whose ends may be infinite."""

    ratio: float
    low: float
    high: float

    @property
    def is_bounded(self) -> bool:
        """Whether both ends of the interval are finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)


def _estimate_paired_ratio(paired_scores: _PairedScores, level: float) -> _RatioEstimate:
    """Return the ratio of the means of paired scores, with Fieller's confidence interval.

    Fieller's method has no solution if the scores of all pairs are equal. The ratio is then exactly
    1, unless all scores are 0.
    """
    scores = paired_scores.scores
    other_scores = paired_scores.other_scores

    are_all_equal = scores == other_scores
    if are_all_equal and any(other_scores):
        return _RatioEstimate(ratio=1.0, low=1.0, high=1.0)

    interval = ratio_of_means(scores, other_scores, paired=True, level=level)
    return _RatioEstimate(ratio=interval.value, low=interval.low, high=interval.high)


def _widen_lower_end(estimate: _RatioEstimate, count: int, level: float) -> float:
    """Return the lower end of an interval, widened for rare prompts that are not in the sample.

    The endpoint may score 0 on such prompts. For example, if they may be 4 % of all prompts, a
    ratio of 0.9 may in truth be 0.9 * 0.96 = 0.864.
    """
    unseen = unseen_share(count, level)
    ratio_if_unseen_score_0 = estimate.ratio * (1 - unseen)
    low = min(estimate.low, ratio_if_unseen_score_0)
    return max(low, 0.0)


def _is_within_loss(low: float, high: float, allowed_loss: float | None) -> bool | None:
    """Return whether a ratio with the confidence interval from `low` to `high` is large enough.

    With an allowed loss of 0.01, the ratio has to be at least 0.99. Return None without an allowed
    loss, or if the interval includes this limit.
    """
    if allowed_loss is None:
        return None

    limit = 1 - allowed_loss
    if low >= limit:
        return True
    if high < limit:
        return False

    return None
