"""Aggregates the scores of one endpoint or two: means, intervals, ratios and the verdict. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
from loadgen.core.stats.intervals import LEVEL, ratio_of_means, replications, wilson

SCHEMA = 1


class ScoredPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The scores of one prompt, without its texts: a line of `scores.jsonl`.

    Attributes:
        group: The class of the prompt, or "".
        answered: False if the endpoint did not answer. Its scores are 0 then.
        other_answered: False if the other endpoint did not answer. `other` and `alike` are empty
            then.
        scores: The scores of the endpoint against the reference.
        other: The scores of the other endpoint against the reference.
        alike: How similar the two answers are.
    """

    group: str = ""
    answered: bool = True
    other_answered: bool = True
    scores: dict[str, float] = {}
    other: dict[str, float] = {}
    alike: dict[str, float] = {}


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of a score over `count` answers, with its interval.

    Both ends are None for few answers.
    """

    metric: str
    count: int
    mean: float
    low: float | None
    high: float | None


class ScoreRatio(msgspec.Struct, frozen=True, kw_only=True):
    """A score of the endpoint divided by that of the other one, over the same prompts.

    Attributes:
        metric: The key of the score.
        count: The number of prompts.
        ratio: The ratio (0.99 is 1 % less), or None if it is not defined.
        low: Lower end of its interval, or None for few prompts.
        high: Upper end of its interval, or None for few prompts.
        within: True if the ratio is at least 1 minus the allowed loss. None if it is undecided or
            no loss was allowed.
    """

    metric: str
    count: int
    ratio: float | None
    low: float | None
    high: float | None
    within: bool | None = None


class ScoredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of all prompts, or of one class of them.

    Attributes:
        group: The class, or "" for all prompts.
        scores: The scores of the endpoint.
        other: The scores of the other endpoint.
        changes: The ratios of both.
        alike: How similar the two answers to each prompt are.
    """

    group: str
    scores: tuple[Score, ...]
    other: tuple[Score, ...] = ()
    changes: tuple[ScoreRatio, ...] = ()
    alike: tuple[Score, ...] = ()


class AnswersResult(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `answers.json`.

    Attributes:
        schema: Version of the format.
        dataset: Name of the data set.
        dataset_sha256: Hash of the data set.
        version: Version of loadgen.
        url: URL of the endpoint.
        model: Its model.
        against: URL of the other endpoint, or "".
        against_model: The model of the other endpoint, or "".
        prompts: The number of prompts.
        failed: Prompts that the endpoint did not answer.
        failed_against: Prompts that the other endpoint did not answer.
        loss: The loss that is allowed, as a fraction, or None.
        level: Confidence of the intervals.
        simulated: True if a server is simulated.
        notes: What a reader should know.
        parts: The scores of all prompts, and of each class.
    """

    schema: int = SCHEMA
    dataset: str
    dataset_sha256: str = ""
    version: str = ""
    url: str
    model: str
    against: str = ""
    against_model: str = ""
    prompts: int
    failed: int
    failed_against: int = 0
    loss: float | None = None
    level: float = LEVEL
    simulated: bool = False
    notes: tuple[str, ...] = ()
    parts: tuple[ScoredGroup, ...]

    @property
    def verdict(self) -> bool | None:
        """True if every score is within the allowed loss.

        None if it is undecided or none is allowed.
        """
        if self.loss is None:
            return None
        outcomes = [change.within for change in self.parts[0].changes]
        if False in outcomes:
            return False
        if not outcomes or None in outcomes or self.failed:
            return None
        return True


def exit_code(result: AnswersResult) -> int:
    """Return the exit code of a result: 3 without any answer, or that of the verdict."""
    if result.failed == result.prompts:
        return UNSOUND
    if result.loss is None:
        return OK
    if result.verdict is None:
        return INCONCLUSIVE
    return OK if result.verdict else SLO_MISSED


def score_prompts(
    questions: Sequence[AnswerKey],
    answers: Sequence[str | None],
    other_answers: Sequence[str | None] | None,
) -> tuple[ScoredPrompt, ...]:
    """Return the scores of every prompt.

    Args:
        questions: How each answer is scored.
        answers: The answers of the endpoint. None if it did not answer.
        other_answers: The answers of the other endpoint, or None if there is no other one.

    Raises:
        UserError: A package that scores is not installed.
    """
    if other_answers is None:
        return tuple(
            ScoredPrompt(
                group=question.group,
                answered=answer is not None,
                scores=_score_answer(question, answer),
            )
            for question, answer in zip(questions, answers, strict=True)
        )
    return tuple(
        ScoredPrompt(
            group=question.group,
            answered=answer is not None,
            other_answered=other is not None,
            scores=_score_answer(question, answer),
            other={} if other is None else _score_answer(question, other),
            alike={} if other is None else _score_similarity(answer, other),
        )
        for question, answer, other in zip(questions, answers, other_answers, strict=True)
    )


def summarize_scores(
    prompts: Sequence[ScoredPrompt], loss: float | None = None, level: float = LEVEL
) -> tuple[ScoredGroup, ...]:
    """Return the scores of all prompts, and then those of each class by name.

    Args:
        prompts: The scores of every prompt.
        loss: The loss that is allowed, as a fraction, or None.
        level: The confidence of the intervals.
    """
    groups = [_summarize_group("", prompts, loss, level)]
    for name in sorted({prompt.group for prompt in prompts} - {""}):
        members = [prompt for prompt in prompts if prompt.group == name]
        groups.append(_summarize_group(name, members, loss, level))
    return tuple(groups)


def unseen_share(count: int, level: float = LEVEL) -> float:
    """Return the largest fraction of all cases that `count` independent ones may not have met.

    The confidence is that of `intervals.observations_to_see`.
    """
    return -math.expm1(math.log((1 - level) / 2) / count)


def _score_answer(question: AnswerKey, answer: str | None) -> dict[str, float]:
    """Return the scores of an answer, which are all 0 if there is none."""
    scores = score_against_reference(
        answer or "", question.reference, choice=question.choice, wants_json=question.json
    )
    return dict.fromkeys(scores, 0.0) if answer is None else scores


def _score_similarity(answer: str | None, other: str) -> dict[str, float]:
    """Return how similar two answers are; 0 if the endpoint did not answer."""
    if answer is None:
        return dict.fromkeys(PAIR_SCORES, 0.0)
    return score_pair(answer, other)


def _summarize_group(
    name: str, prompts: Sequence[ScoredPrompt], loss: float | None, level: float
) -> ScoredGroup:
    """Return the mean scores of a class of prompts, and the ratios of both endpoints' scores.

    Only prompts that both endpoints answered have a ratio. `loss` is by which fraction the endpoint
    may score less than the other one, and `level` is the confidence of the intervals.
    """
    return ScoredGroup(
        group=name,
        scores=_mean_scores(REFERENCE_SCORES, [prompt.scores for prompt in prompts], level),
        other=_mean_scores(REFERENCE_SCORES, [prompt.other for prompt in prompts], level),
        changes=_compare_scores(prompts, loss, level),
        alike=_mean_scores(PAIR_SCORES, [prompt.alike for prompt in prompts], level),
    )


def _compare_scores(
    prompts: Sequence[ScoredPrompt], loss: float | None, level: float
) -> tuple[ScoreRatio, ...]:
    """Return the ratio of both endpoints for each score that some prompt has.

    A prompt that the other endpoint did not answer has no score of it and does not count.
    """
    ratios = []
    for metric in REFERENCE_SCORES:
        compared_prompts = [prompt for prompt in prompts if metric in prompt.other]
        if compared_prompts:
            scores = [prompt.scores[metric] for prompt in compared_prompts]
            other_scores = [prompt.other[metric] for prompt in compared_prompts]
            ratios.append(_estimate_ratio(metric, scores, other_scores, loss, level))
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
    """Return the mean of a score with its confidence interval.

    A score of 0 or 1 is a proportion and has a Wilson interval. The interval of other scores is
    widened: rare cases that no prompt showed may have the worst or the best score, and their share
    is bounded by `unseen_share`. Token counts have no best score. Few answers have no interval.
    """
    count = len(values)
    mean = math.fsum(values) / count
    low: float | None = None
    high: float | None = None
    if count >= FEWEST_ANSWERS and metric in BINARY_SCORES:
        low, high = wilson(mean, count, level)
    elif count >= FEWEST_ANSWERS:
        interval = replications(values, level)
        unseen = unseen_share(count, level)
        low = min(interval.low, mean * (1 - unseen))
        high = interval.high
        if metric not in TOKEN_COUNTS:
            low = max(low, 0.0)
            high = min(max(high, mean + unseen * (1 - mean)), 1.0)
    return Score(metric=metric, count=count, mean=mean, low=low, high=high)


def _estimate_ratio(
    metric: str,
    scores: Sequence[float],
    other_scores: Sequence[float],
    loss: float | None,
    level: float,
) -> ScoreRatio:
    """Return the ratio of two mean scores of the same prompts, with its confidence interval.

    The lower end is reduced by the share of cases that may not have been met (`unseen_share`), in
    which the endpoint may score 0. Few prompts, or an unbounded interval, give no interval and no
    verdict.
    """
    count = len(scores)
    if scores == other_scores and any(other_scores):
        # No pair differs, so there is no variance, and Fieller's quadratic has no solution.
        value, low, high = 1.0, 1.0, 1.0
    else:
        interval = ratio_of_means(scores, other_scores, paired=True, level=level)
        value, low, high = interval.value, interval.low, interval.high
    is_known = count >= FEWEST_ANSWERS and math.isfinite(low) and math.isfinite(high)
    low = max(min(low, value * (1 - unseen_share(count, level))), 0.0)
    return ScoreRatio(
        metric=metric,
        count=count,
        ratio=value if math.isfinite(value) else None,
        low=low if is_known else None,
        high=high if is_known else None,
        within=_is_within(low, high, loss) if is_known else None,
    )


def _is_within(low: float, high: float, loss: float | None) -> bool | None:
    """Return whether a ratio loses at most the allowed fraction, or None if it is undecided."""
    if loss is None:
        return None
    if low >= 1 - loss:
        return True
    return False if high < 1 - loss else None
