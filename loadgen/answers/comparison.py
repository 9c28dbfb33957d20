"""Scores of one endpoint, or of two on the same prompts: means, intervals, differences, what they decide. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from loadgen.answers.questions import Question
from loadgen.answers.scores import (
    AGAINST_EACH_OTHER,
    AGAINST_REFERENCE,
    SHARES,
    against_each_other,
    against_reference,
)
from loadgen.stats.intervals import LEVEL, Interval, ratio, replications, wilson

SCHEMA = 1
FEWEST = 11  # answers, before a share or mean decides anything


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
    url: str
    model: str
    against: str = ""
    against_model: str = ""
    prompts: int
    failed: int  # prompts without an answer of the endpoint
    failed_against: int = 0
    loss: float | None = None  # that is allowed, as a share
    simulated: bool = False
    parts: tuple[ScoredGroup, ...]

    @property
    def verdict(self) -> bool | None:
        """Whether every score is within the allowed loss; None: undecided, or nothing was allowed."""
        known = [change.within for change in self.parts[0].changes]
        if self.loss is None or not known or False in known:
            return False if self.loss is not None and False in known else None
        return None if None in known or self.failed else True


def judge(
    questions: Sequence[Question],
    answers: Sequence[str | None],
    others: Sequence[str | None] | None,
    loss: float | None,
) -> tuple[ScoredGroup, ...]:
    """The part of all prompts, then those of their classes by name. None in `answers`: no answer came."""
    groups = sorted({question.group for question in questions} - {""})
    rows = range(len(questions))
    chosen = [("", list(rows)), *((group, [i for i in rows if questions[i].group == group]) for group in groups)]
    of_answers = _scored(questions, answers)
    of_others = None if others is None else _scored(questions, others)
    alike = (
        {}
        if others is None
        else {
            i: against_each_other(a, b)
            for i, (a, b) in enumerate(zip(answers, others, strict=True))
            if a is not None and b is not None
        }
    )
    parts = []
    for group, indexes in chosen:
        scores = {metric: _values(of_answers, indexes, metric) for metric in AGAINST_REFERENCE}
        other = {metric: _values(of_others or {}, indexes, metric) for metric in AGAINST_REFERENCE}
        parts.append(
            ScoredGroup(
                group=group,
                scores=tuple(_score(metric, list(found.values())) for metric, found in scores.items() if found),
                other=tuple(_score(metric, list(found.values())) for metric, found in other.items() if found),
                changes=tuple(
                    _change(metric, scores[metric], other[metric], loss)
                    for metric in AGAINST_REFERENCE
                    if scores[metric].keys() & other[metric].keys()
                ),
                alike=tuple(
                    _score(metric, [alike[i][metric] for i in indexes if i in alike])
                    for metric in AGAINST_EACH_OTHER
                    if alike
                ),
            )
        )
    return tuple(parts)


def _scored(questions: Sequence[Question], answers: Sequence[str | None]) -> dict[int, dict[str, float]]:
    """Index of a prompt -> its scores. A prompt without an answer has a score of 0 in what applies to it."""
    found = {}
    for i, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        scores = against_reference(answer or "", question.reference, choice=question.choice, wants_json=question.json)
        found[i] = scores if answer is not None else dict.fromkeys(scores, 0.0)
    return found


def _values(scored: Mapping[int, Mapping[str, float]], indexes: Sequence[int], metric: str) -> dict[int, float]:
    return {i: scored[i][metric] for i in indexes if i in scored and metric in scored[i]}


def _score(metric: str, values: Sequence[float]) -> Score:
    mean = math.fsum(values) / len(values) if values else 0.0
    low: float | None = None
    high: float | None = None
    if len(values) >= FEWEST and metric in SHARES:
        low, high = wilson(mean, len(values), LEVEL)
    elif len(values) >= FEWEST:
        low, high = _ends(replications(values))
    return Score(metric=metric, count=len(values), mean=mean, low=low, high=high)


def _change(metric: str, a: Mapping[int, float], b: Mapping[int, float], loss: float | None) -> Change:
    both = sorted(a.keys() & b.keys())
    above, below = [a[i] for i in both], [b[i] for i in both]
    if above == below and any(below):  # no difference between any pair: the interval has no width to estimate
        value, low, high = 1.0, 1.0, 1.0
        known = len(both) >= FEWEST
    else:
        found = ratio(above, below, paired=True)
        value = found.value
        ends = _ends(found)
        known = len(both) >= FEWEST and None not in ends
        low, high = ends[0] or 0.0, ends[1] or 0.0
    within = None
    if loss is not None and known:
        within = True if low >= 1 - loss else False if high < 1 - loss else None
    return Change(
        metric=metric,
        count=len(both),
        ratio=value if math.isfinite(value) else None,
        low=low if known else None,
        high=high if known else None,
        within=within,
    )


def _ends(interval: Interval) -> tuple[float | None, float | None]:
    low, high = interval.low, interval.high
    return (low, high) if math.isfinite(low) and math.isfinite(high) else (None, None)
