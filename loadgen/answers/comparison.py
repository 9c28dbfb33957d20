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
        """Whether the scores of the endpoint are within the allowed loss. None if undecided.

        It is False as soon as one score is certainly too low. It is undecided if no score could be
        compared, if one of them is undecided, or if requests failed: a failed request scores 0,
        which says nothing about the model. It is also None if `allowed_loss` is not set.
        """
        if self.allowed_loss is None:
            return None

        outcomes = [ratio.is_within_loss for ratio in self.groups[0].ratios]
        if False in outcomes:
            return False
        if not outcomes or None in outcomes or self.failed > 0:
            return None

        return True


def exit_code(result: AnswersResult) -> int:
    """Return the exit code of a result: 3 without any answer, or that of the verdict."""
    if result.failed == result.prompts:
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

    return tuple(
        _add_other_endpoint(prompt, question, answer, other_answer)
        for prompt, question, answer, other_answer in zip(
            prompts, questions, answers, other_answers, strict=True
        )
    )


def _add_other_endpoint(
    prompt: ScoredPrompt, question: AnswerKey, answer: str | None, other_answer: str | None
) -> ScoredPrompt:
    """Return a scored prompt with the scores of the other endpoint, if that answered it."""
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
    """Return the scores of all prompts, and then those of each class by name.

    Args:
        prompts: The scores of every prompt.
        allowed_loss: The fraction by which a score may be lower than that of the other endpoint,
            or None.
        level: The confidence of the intervals.
    """
    groups = [_summarize_group("", prompts, allowed_loss, level)]
    for name in sorted({prompt.group for prompt in prompts} - {""}):
        members = [prompt for prompt in prompts if prompt.group == name]
        groups.append(_summarize_group(name, members, allowed_loss, level))
    return tuple(groups)


def unseen_share(count: int, level: float = LEVEL) -> float:
    """Return the largest fraction of all cases that `count` independent ones may not have met.

    The confidence is that of `intervals.observations_to_see`.
    """
    return -math.expm1(math.log((1 - level) / 2) / count)


def _score_answer(question: AnswerKey, answer: str | None) -> dict[str, float]:
    """Return the scores of an answer, which are all 0 if there is none."""
    scores = score_against_reference(
        answer or "",
        question.reference,
        is_choice=question.is_choice,
        wants_json=question.wants_json,
    )
    return dict.fromkeys(scores, 0.0) if answer is None else scores


def _score_similarity(answer: str | None, other: str) -> dict[str, float]:
    """Return how similar two answers are; 0 if the endpoint did not answer."""
    if answer is None:
        return dict.fromkeys(PAIR_SCORES, 0.0)
    return score_pair(answer, other)


def _summarize_group(
    name: str, prompts: Sequence[ScoredPrompt], allowed_loss: float | None, level: float
) -> ScoredGroup:
    """Return the mean scores of a class of prompts, and the ratios of both endpoints' scores.

    Args:
        name: The name of the class, or "" for all prompts.
        prompts: The scores of its prompts.
        allowed_loss: The fraction by which a score may be lower than that of the other endpoint,
            or None.
        level: The confidence of the intervals.
    """
    return ScoredGroup(
        group=name,
        scores=_mean_scores(REFERENCE_SCORES, [prompt.scores for prompt in prompts], level),
        other_scores=_mean_scores(
            REFERENCE_SCORES, [prompt.other_scores for prompt in prompts], level
        ),
        ratios=_compare_scores(prompts, allowed_loss, level),
        similarity=_mean_scores(PAIR_SCORES, [prompt.similarity for prompt in prompts], level),
    )


def _compare_scores(
    prompts: Sequence[ScoredPrompt], allowed_loss: float | None, level: float
) -> tuple[ScoreRatio, ...]:
    """Return the mean score of the endpoint divided by that of the other one, for each score.

    Which scores a prompt has depends on its question. A score that no prompt has is left out. A
    prompt that the other endpoint did not answer is not compared.
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
    """Return the mean of each score over the prompts that have it.

    Which scores a prompt has depends on its question, for example whether it expects JSON.
    """
    means = []
    for metric in metrics:
        values = [scores[metric] for scores in scores_of_prompts if metric in scores]
        if values:
            means.append(_estimate_mean(metric, values, level))
    return tuple(means)


def _estimate_mean(metric: str, values: Sequence[float], level: float) -> Score:
    """Return the mean of a score with its confidence interval, which few answers do not have."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < FEWEST_ANSWERS:
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
    """Return the confidence interval of a mean score, allowing for rare cases not in the sample.

    Student's interval is too narrow if almost all prompts have the same score. Prompts of a kind
    that is not in the sample may still be a share u = `unseen_share(n)` of all prompts. If they all
    score 0, the true mean is (1 - u) * mean. If they all score 1, it is (1 - u) * mean + u. The
    interval is widened to include both. For example, with a mean of 0.9 and u = 0.04, it includes
    0.864 and 0.904. The number of tokens has no highest value, so only its lower end is widened.

    Args:
        metric: The key of the score.
        values: The scores of the sample.
        mean: Their mean.
        level: The confidence of the interval.
    """
    student_interval = mean_of_runs(values, level)
    unseen = unseen_share(len(values), level)
    mean_with_zeros = mean * (1 - unseen)
    mean_with_ones = mean + unseen * (1 - mean)
    low = min(student_interval.low, mean_with_zeros)
    if metric in TOKEN_COUNTS:
        return _Bounds(low, student_interval.high)

    high = max(student_interval.high, mean_with_ones)
    return _Bounds(max(low, 0.0), min(high, 1.0))


class _PairedScores(NamedTuple):
    """The scores of the same prompts at both endpoints."""

    scores: Sequence[float]
    other_scores: Sequence[float]


def _estimate_ratio(
    metric: str, paired_scores: _PairedScores, allowed_loss: float | None, level: float
) -> ScoreRatio:
    """Return the ratio of two mean scores of the same prompts, with its confidence interval.

    Few prompts, or an unbounded interval, give no interval and no verdict.

    Args:
        metric: The key of the score.
        paired_scores: The scores of both endpoints.
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
    return msgspec.structs.replace(
        ratio,
        low=low,
        high=estimate.high,
        is_within_loss=_is_within_loss(low, estimate.high, allowed_loss),
    )


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

    If no pair differs, there is no variance, and Fieller's quadratic equation has no solution. The
    ratio is then exactly 1, unless all scores are 0.
    """
    scores, other_scores = paired_scores
    is_exactly_one = scores == other_scores and any(other_scores)
    if is_exactly_one:
        return _RatioEstimate(ratio=1.0, low=1.0, high=1.0)
    interval = ratio_of_means(scores, other_scores, paired=True, level=level)
    return _RatioEstimate(interval.value, interval.low, interval.high)


def _widen_lower_end(estimate: _RatioEstimate, count: int, level: float) -> float:
    """Return the lower end of an interval, allowing for rare kinds of prompts not in the sample.

    The endpoint may score 0 on up to `unseen_share` of all prompts (see
    `_interval_with_unseen_cases`), which would lower the ratio by this share.
    """
    ratio_with_unseen_zeros = estimate.ratio * (1 - unseen_share(count, level))
    return max(min(estimate.low, ratio_with_unseen_zeros), 0.0)


def _is_within_loss(low: float, high: float, allowed_loss: float | None) -> bool | None:
    """Return whether a ratio is at least 1 minus the allowed loss, or None if it is undecided.

    It is undecided if the limit is inside the confidence interval from `low` to `high`, or if there
    is no limit.
    """
    if allowed_loss is None:
        return None

    limit = 1 - allowed_loss
    if low >= limit:
        return True
    if high < limit:
        return False

    return None
