"""Scores of one endpoint, or of two on the same prompts: means, intervals, differences, what they decide. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from loadgen.answers.questions import AnswerKey
from loadgen.answers.scores import (
    AGAINST_EACH_OTHER,
    AGAINST_REFERENCE,
    COUNTS,
    SHARES,
    against_each_other,
    against_reference,
)
from loadgen.core.errors import INCONCLUSIVE, OK, SLO_MISSED, UNSOUND
from loadgen.core.limits import FEWEST_ANSWERS
from loadgen.core.stats.intervals import LEVEL, ratio, replications, wilson

SCHEMA = 1


class ScoredPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one prompt came to, without its texts: a line of `scores.jsonl`.

    `scores`, `other`: against the reference, of the endpoint and of the other one. `alike`: of the two answers.
    A prompt that the endpoint did not answer scores 0; one that the other did not answer has no `other` and no `alike`.
    """

    group: str = ""
    answered: bool = True
    other_answered: bool = True
    scores: dict[str, float] = {}
    other: dict[str, float] = {}
    alike: dict[str, float] = {}


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The mean of one score over `count` answers, with its interval; None where there are too few."""

    metric: str
    count: int
    mean: float
    low: float | None
    high: float | None


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A score of the endpoint over that of the other one, of the same prompts: 0.99 is 1 % less. None: not known.

    `within`: whether it is at least 1 - the loss that is allowed; None: undecided, or nothing was allowed.
    """

    metric: str
    count: int
    ratio: float | None
    low: float | None
    high: float | None
    within: bool | None = None


class ScoredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of all prompts (`group` ""), or of one class of them."""

    group: str
    scores: tuple[Score, ...]
    other: tuple[Score, ...] = ()  # of the other endpoint
    changes: tuple[Change, ...] = ()
    alike: tuple[Score, ...] = ()  # of the two answers to each prompt


class AnswersResult(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `answers.json`."""

    schema: int = SCHEMA
    dataset: str
    dataset_sha256: str = ""
    version: str = ""  # of loadgen
    url: str
    model: str
    against: str = ""
    against_model: str = ""
    prompts: int
    failed: int  # prompts without an answer of the endpoint
    failed_against: int = 0
    loss: float | None = None  # that is allowed, as a share
    level: float = LEVEL  # of the intervals
    simulated: bool = False
    notes: tuple[str, ...] = ()
    parts: tuple[ScoredGroup, ...]

    @property
    def verdict(self) -> bool | None:
        """Whether every score is within the allowed loss; None: undecided, or nothing was allowed."""
        known = [change.within for change in self.parts[0].changes]
        if self.loss is None or not known or False in known:
            return False if self.loss is not None and False in known else None
        return None if None in known or self.failed else True


def unseen_share(n: int, level: float = LEVEL) -> float:
    """The largest share of all cases that n independent ones may not have met, as sure as `intervals.observations_to_see`."""
    return -math.expm1(math.log((1 - level) / 2) / n)


def exit_code(result: AnswersResult) -> int:
    """Return 1 beyond the allowed loss, 4 if that is undecided, 3 without a response, else 0."""
    if result.failed == result.prompts:
        return UNSOUND
    if result.loss is None:
        return OK
    if result.verdict is None:
        return INCONCLUSIVE
    return OK if result.verdict else SLO_MISSED


def score(
    questions: Sequence[AnswerKey],
    answers: Sequence[str | None],
    others: Sequence[str | None] | None,
) -> tuple[ScoredPrompt, ...]:
    """The scores of every prompt. None in `answers` and `others`: no answer came. `others` None: there is one endpoint.

    Raises UserError where a package that scores is not installed.
    """
    found = []
    for i, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        other = None if others is None else others[i]
        found.append(
            ScoredPrompt(
                group=question.group,
                answered=answer is not None,
                other_answered=others is None or other is not None,
                scores=_against_reference(question, answer),
                other={} if other is None else _against_reference(question, other),
                alike={} if other is None else _against_each_other(answer, other),
            )
        )
    return tuple(found)


def _against_reference(question: AnswerKey, answer: str | None) -> dict[str, float]:
    scores = against_reference(
        answer or "", question.reference, choice=question.choice, wants_json=question.json
    )
    return scores if answer is not None else dict.fromkeys(scores, 0.0)


def _against_each_other(answer: str | None, other: str) -> dict[str, float]:
    return (
        dict.fromkeys(AGAINST_EACH_OTHER, 0.0)
        if answer is None
        else against_each_other(answer, other)
    )


def judge(
    prompts: Sequence[ScoredPrompt], loss: float | None = None, level: float = LEVEL
) -> tuple[ScoredGroup, ...]:
    """The part of all prompts, then those of their classes by name. `level`: of the intervals."""
    groups = sorted({prompt.group for prompt in prompts} - {""})
    chosen = [
        ("", prompts),
        *((group, [one for one in prompts if one.group == group]) for group in groups),
    ]
    return tuple(_group(group, of_group, loss, level) for group, of_group in chosen)


def _group(
    group: str, prompts: Sequence[ScoredPrompt], loss: float | None, level: float
) -> ScoredGroup:
    def means(metrics: Sequence[str], of: Sequence[Mapping[str, float]]) -> tuple[Score, ...]:
        values = (
            (metric, [scores[metric] for scores in of if metric in scores]) for metric in metrics
        )
        return tuple(_score(metric, found, level) for metric, found in values if found)

    changes = []
    for metric in AGAINST_REFERENCE:
        pairs = [(one.scores[metric], one.other[metric]) for one in prompts if metric in one.other]
        changes += [_change(metric, pairs, loss, level)] if pairs else []
    return ScoredGroup(
        group=group,
        scores=means(AGAINST_REFERENCE, [one.scores for one in prompts]),
        other=means(AGAINST_REFERENCE, [one.other for one in prompts]),
        changes=tuple(changes),
        alike=means(AGAINST_EACH_OTHER, [one.alike for one in prompts]),
    )


def _score(metric: str, values: Sequence[float], level: float) -> Score:
    mean = math.fsum(values) / len(values)
    low: float | None = None
    high: float | None = None
    if len(values) >= FEWEST_ANSWERS and metric in SHARES:
        low, high = wilson(mean, len(values), level)
    elif len(values) >= FEWEST_ANSWERS:
        interval, unseen = replications(values, level), unseen_share(len(values), level)
        low, high = min(interval.low, mean * (1 - unseen)), interval.high
        if metric not in COUNTS:
            low, high = max(low, 0.0), min(max(high, mean + unseen * (1 - mean)), 1.0)
    return Score(metric=metric, count=len(values), mean=mean, low=low, high=high)


def _change(
    metric: str, pairs: Sequence[tuple[float, float]], loss: float | None, level: float
) -> Change:
    above, below = ([pair[i] for pair in pairs] for i in (0, 1))
    if above == below and any(
        below
    ):  # no pair differs: no spread, and Fieller's quadratic has no solution
        value, low, high = 1.0, 1.0, 1.0
    else:
        found = ratio(above, below, paired=True, level=level)
        value, low, high = found.value, found.low, found.high
    known = len(pairs) >= FEWEST_ANSWERS and math.isfinite(low) and math.isfinite(high)
    low = max(
        min(low, value * (1 - unseen_share(len(pairs), level))), 0.0
    )  # a few lost answers may not have been met
    within = None
    if loss is not None and known:
        within = True if low >= 1 - loss else False if high < 1 - loss else None
    return Change(
        metric=metric,
        count=len(pairs),
        ratio=value if math.isfinite(value) else None,
        low=low if known else None,
        high=high if known else None,
        within=within,
    )
