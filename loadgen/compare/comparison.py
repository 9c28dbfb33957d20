"""Compares results: whether the work was the same, what differs, and how certain that is.

Pure. Requests of one run are correlated, so a single run is judged by blocks of its time, and
repeats are judged as whole runs. Metrics that are judged together share the risk of a false alarm
(Holm 1979). With one run on a side, the outcome holds for these runs only, so it is never called
better or worse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from loadgen.compare.accepted_lengths import (
    list_accepted_length_notes,
    measure_accepted_lengths,
)
from loadgen.compare.answer_difference import (
    EXACT_TEST,
    AnswerDifference,
    compare_answers,
    judge_answer_score,
)
from loadgen.compare.comparison_notes import (
    OTHER_TOOL_METRICS,
    describe_scope,
    format_run_label,
    list_notes,
)
from loadgen.compare.difference import DEADLINES_DIFFER, SLOS_DIFFER, Difference
from loadgen.compare.difference_estimators import DifferenceEstimator, IndependentRuns
from loadgen.compare.estimates import NO_KNOWN_INTERVAL, compute_side_value
from loadgen.compare.judgement import judge, to_change
from loadgen.compare.parts import ComparedPart, list_shared_parts, restrict_to_part
from loadgen.compare.significance import holm_levels, p_value
from loadgen.compare.work_differences import (
    describe_slo_of_requests,
    describe_token_deadlines,
    describe_work_differences,
)
from loadgen.core.analysis.within_run_variance import ScaledEstimate
from loadgen.core.metrics.sections import Recovery
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.stats.intervals import LEVEL
from loadgen.repeated import comparable_metrics
from loadgen.repeated.comparable_metrics import ANSWER_SCORE, SHARE_PATHS, Metric, find_metric
from loadgen.runs.comparison_side import Side, SideFacts

NOT_SAME_WORK = "different workloads"
SAME_RUN = "both sides are the same run"
"""Reasons for which no difference of two sides is judged."""


class SideRecovery(msgspec.Struct, frozen=True, kw_only=True):
    """How long a run of a side took to meet its SLO again after an event. It is shown, not judged.

    Attributes:
        side: The name of the side.
        run: The name of the run.
        number: The number of the event among those of its kind, from 1.
        recovery: The recovery.
    """

    side: str
    run: str
    number: int
    recovery: Recovery = msgspec.field(name="found")


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a comparison.

    Attributes:
        sides: The names of the sides.
        runs: The number of runs of each side.
        same_work: True if all sides did the same work. None if a side has no fingerprint.
        work_differences: How the work of the sides differs.
        scope: Which variation the outcomes take into account.
        confidence: The confidence of all metrics together.
        notes: Differences that a reader should know, but that do not prevent the comparison.
        valid: True if every run is VALID.
        simulated: The sides with a simulated server.
        differences: The difference of each metric of each side.
        codes: Why a run is not valid, by the label of the run.
        recovery: How long runs took to meet their SLO again after an event.
        facts: What each side is.
        answers: The scores of checked answers of each side. Empty without checked answers.
        accepted_lengths: The accepted length of speculative decoding of each side that has one.
        accepted_length_notes: What makes speeds not comparable for this reason. Also in `notes`.
    """

    sides: tuple[str, ...]
    runs: tuple[int, ...]
    same_work: bool | None
    work_differences: tuple[str, ...] = msgspec.field(name="unlike")
    scope: str
    confidence: float
    notes: tuple[str, ...]
    valid: bool
    simulated: tuple[str, ...]
    differences: tuple[Difference, ...]
    codes: dict[str, tuple[ReasonCode, ...]] = {}
    recovery: tuple[SideRecovery, ...] = ()
    facts: tuple[SideFacts, ...] = ()
    answers: tuple[AnswerDifference, ...] = ()
    accepted_lengths: dict[str, float] = {}
    accepted_length_notes: tuple[str, ...] = ()


def compare(
    sides: Sequence[Side],
    *,
    extra_metrics: Sequence[str] = (),
    confidence: float = LEVEL,
    allow_different_work: bool = False,
    estimator: DifferenceEstimator | None = None,
) -> Comparison:
    """Return the comparison of every side with the first one.

    Two sides did the same work if they sent the same workload with the same load and limits, and
    got about the same part of the requested output. Only then does a difference of their metrics
    show a difference of the servers.

    Args:
        sides: The sides.
        extra_metrics: Paths of metrics to compare in addition to the default ones.
        confidence: The confidence of all metrics together.
        allow_different_work: True to judge the metrics of sides that did different work, too.
            Otherwise their differences are shown without an outcome. Invalid runs are never judged.
        estimator: How differences are estimated. None for `IndependentRuns`.
    """
    first = sides[0]
    metrics = _list_metrics_to_compare(sides, extra_metrics)
    comparer = _Comparer(metrics, extra_metrics, confidence, estimator or IndependentRuns())
    differences: list[Difference] = []
    answer_differences: list[AnswerDifference] = []

    work_differences: list[str] = []
    for other in sides[1:]:
        work_differences_of_side = describe_work_differences(first, other)
        work_differences += work_differences_of_side

        if work_differences_of_side and not allow_different_work:
            reason_not_judged = NOT_SAME_WORK
        else:
            reason_not_judged = _find_reason_not_judged(first, other)

        answers = compare_answers(first, other, confidence, reason_not_judged)
        if answers is not None:
            answer_differences.append(answers)

        differences += [
            judge_answer_score(difference, answers)
            for difference in comparer.compare_sides(first, other, reason_not_judged)
        ]
        differences += comparer.compare_parts(first, other, reason_not_judged)

    codes_of_invalid_runs = {
        format_run_label(side, run): run.summary.verdict.codes
        for side in sides
        for run in side.runs
        if not run.summary.verdict.valid
    }

    return Comparison(
        sides=tuple(side.name for side in sides),
        runs=tuple(len(side.runs) for side in sides),
        same_work=_is_same_work(sides, has_differences=bool(work_differences)),
        work_differences=tuple(dict.fromkeys(work_differences)),
        scope=describe_scope(sides),
        confidence=confidence,
        notes=tuple(list_notes(sides)),
        valid=not codes_of_invalid_runs,
        simulated=tuple(side.name for side in sides if _is_simulated(side)),
        differences=tuple(differences),
        codes=codes_of_invalid_runs,
        recovery=tuple(_list_recoveries(sides)),
        facts=tuple(side.facts for side in sides),
        answers=tuple(answer_differences),
        accepted_lengths=measure_accepted_lengths(sides),
        accepted_length_notes=tuple(list_accepted_length_notes(sides)),
    )


def _is_simulated(side: Side) -> bool:
    """Return True if a run of the side had a simulated server."""
    return any(run.summary.target.simulated for run in side.runs)


def _list_metrics_to_compare(sides: Sequence[Side], extra_metrics: Sequence[str]) -> list[Metric]:
    """Return the default metrics, those that other tools report, and the additional ones."""
    paths = list(comparable_metrics.default_metric_paths())
    if any(side.reported_metrics for side in sides):
        paths += OTHER_TOOL_METRICS
    paths.append(ANSWER_SCORE)
    paths += extra_metrics
    metrics = [find_metric(path) for path in dict.fromkeys(paths)]
    return [metric for metric in metrics if metric is not None]


def _is_same_work(sides: Sequence[Side], *, has_differences: bool) -> bool | None:
    """Return whether all sides did the same work, or None if that is not known of a side.

    It is not known of results of other tools, and of runs without a fingerprint of their requests.
    `has_differences` is True if differences of the work were found.
    """
    if has_differences:
        return False
    for side in sides:
        if side.reported_metrics or not side.runs or not side.runs[0].summary.fingerprints.recipe:
            return None
    return True


def _find_reason_not_judged(first: Side, other: Side) -> str:
    """Return why the metrics of two sides must not be judged, such as "b is INVALID", or "".

    They are shown without an outcome if a run is on both sides, if a run is invalid, or if another
    tool measured one of the sides.
    """
    first_summaries = [run.summary for run in first.runs]
    if any(run.summary in first_summaries for run in other.runs):
        return SAME_RUN

    invalid_sides = [
        side.name
        for side in (first, other)
        if any(not run.summary.verdict.valid for run in side.runs)
    ]
    if invalid_sides:
        verb = "is" if len(invalid_sides) == 1 else "are"
        return f"{' and '.join(invalid_sides)} {verb} INVALID"

    if first.reported_metrics or other.reported_metrics:
        return "other tools define these metrics differently"

    return ""


def _list_recoveries(sides: Sequence[Side]) -> Iterator[SideRecovery]:
    """Yield how every run recovered from its events, such as the second spike of its load."""
    for side in sides:
        for run in side.runs:
            event_counts: Counter[str] = Counter()
            for recovery in run.summary.recovery:
                event_counts[recovery.event] += 1
                yield SideRecovery(
                    side=side.name,
                    run=run.name,
                    number=event_counts[recovery.event],
                    recovery=recovery,
                )


class _MetricPair(NamedTuple):
    """A metric of two sides before it is judged.

    Attributes:
        metric: The metric.
        difference: The difference, with both values but without an outcome. Its `reason` says why
            it is not judged, and is replaced when it is.
        estimate: The difference of the estimates of both sides. None if it cannot be judged.
    """

    metric: Metric
    difference: Difference
    estimate: ScaledEstimate | None


class _Comparer:
    """Compares the metrics of two sides.

    Every call of a method judges its metrics as one family: the probability that any of them is
    called different by chance is at most one minus the confidence.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        extra_metrics: Sequence[str],
        confidence: float,
        estimator: DifferenceEstimator,
    ) -> None:
        """Create a comparer.

        Args:
            metrics: The metrics to compare.
            extra_metrics: The paths of those that are kept even if a side has no value of them.
            confidence: The confidence of all metrics together.
            estimator: Estimates the difference of each metric.
        """
        self._metrics = metrics
        self._extra_metrics = extra_metrics
        self._risk = 1 - confidence
        self._estimator = estimator

    def compare_sides(self, first: Side, other: Side, reason_not_judged: str) -> list[Difference]:
        """Return the difference of each metric.

        `reason_not_judged` says why none of them may have an outcome, or is "".
        """
        pairs = []
        for metric in self._metrics:
            pair = self._pair_metric(first, other, metric, reason_not_judged)
            if _has_both_values(pair.difference) or metric.path in self._extra_metrics:
                pairs.append(pair)
        return self._judge_pairs(pairs, first, other)

    def compare_parts(
        self, first: Side, other: Side, reason_not_judged: str
    ) -> Iterator[Difference]:
        """Yield the differences of each request class, and of each step, that both sides have.

        The metrics of one class or step are one family: their risk of a false alarm is not shared
        with those of other classes or of the whole runs. `reason_not_judged` says why no difference
        may have an outcome, or is "".
        """
        for part in list_shared_parts(first, other):
            first_part = restrict_to_part(first, part)
            other_part = restrict_to_part(other, part)
            pairs = [
                self._pair_metric(first_part, other_part, metric, reason_not_judged)
                for metric in self._select_metrics(part)
            ]

            complete_pairs = [pair for pair in pairs if _has_both_values(pair.difference)]
            for difference in self._judge_pairs(complete_pairs, first_part, other_part):
                yield msgspec.structs.replace(
                    difference,
                    metric=f"{part.path_prefix}{difference.metric}",
                    name=f"{part.name}: {difference.name}",
                )

    def _select_metrics(self, part: ComparedPart) -> Iterator[Metric]:
        """Yield the metrics that a class or step has itself, and not only the run as a whole.

        Additional metrics may name one class or step, such as `classes.chat.goodput.steady_rps`.
        A step that computes embeddings generates no text, so it has no metrics of tokens.
        """
        extra_metrics = [
            find_metric(path.removeprefix(part.path_prefix))
            for path in self._extra_metrics
            if path.startswith(part.path_prefix)
        ]
        known_extra_metrics = [metric for metric in extra_metrics if metric is not None]
        for metric in dict.fromkeys([*self._metrics, *known_extra_metrics]):
            is_of_part = metric.path.startswith((*part.summary_fields, "ok_share"))
            if is_of_part and (part.has_tokens or not metric.path.startswith("tokens")):
                yield metric

    def _pair_metric(
        self, first: Side, other: Side, metric: Metric, reason_not_judged: str
    ) -> _MetricPair:
        """Return a metric of two sides, and the estimate of its difference if it can be judged.

        Args:
            first: The side to compare with.
            other: The side to compare.
            metric: The metric.
            reason_not_judged: Why no metric of these sides may be judged, or "".
        """
        estimate = None
        reason = reason_not_judged or _find_slo_difference(first, other, metric)
        if not reason and metric.path == ANSWER_SCORE:
            reason = EXACT_TEST
        if not reason:
            estimate, reason = self._estimator.estimate(first, other, metric)

        before = compute_side_value(first, metric)
        after = compute_side_value(other, metric)
        difference = Difference(
            metric=metric.path,
            name=metric.name,
            unit=metric.unit,
            side=other.name,
            before=before,
            after=after,
            change=_compute_change(before, after, is_fraction=metric.path in SHARE_PATHS),
            reason=reason or NO_KNOWN_INTERVAL,
            is_repeated=self._estimator.is_repeated(first, other),
        )
        if estimate is not None and self._estimator.is_paired:
            change = to_change(difference, estimate.value)
            difference = msgspec.structs.replace(difference, change=change)

        return _MetricPair(metric, difference, estimate)

    def _judge_pairs(
        self, pairs: Sequence[_MetricPair], first: Side, other: Side
    ) -> list[Difference]:
        """Return the differences of some metrics with their outcomes.

        The metrics with an estimate are one family, whose risk of a false alarm Holm's method
        distributes. The smallest detectable change of each of them is stated for the strictest
        level of that method, the risk divided by their number (Bonferroni).
        """
        p_values = [None if pair.estimate is None else p_value(pair.estimate) for pair in pairs]
        levels = holm_levels(p_values, self._risk)
        judged_count = len(p_values) - p_values.count(None)
        strictest_level = self._risk / max(judged_count, 1)

        differences = []
        for pair, level in zip(pairs, levels, strict=True):
            difference = pair.difference
            if pair.estimate is not None:
                difference = judge(
                    difference, pair.estimate, pair.metric.better, level, strictest_level
                )

            if difference.detailed_outcome in ("better", "worse"):
                difference = self._estimator.confirm(difference, first, other, pair.metric, level)

            differences.append(difference)

        return differences


def _has_both_values(difference: Difference) -> bool:
    """Return True if both sides have the metric."""
    return difference.before is not None and difference.after is not None


def _find_slo_difference(first: Side, other: Side, metric: Metric) -> str:
    """Return why a metric cannot be judged between sides with different SLOs, or "".

    Goodput depends on all limits of the SLO except that of right answers, and the fluidity index on
    its token deadlines.
    """
    is_goodput = "goodput" in metric.path
    if is_goodput and describe_slo_of_requests(first) != describe_slo_of_requests(other):
        return SLOS_DIFFER

    is_fluidity = metric.path.startswith("fluidity.")
    if is_fluidity and describe_token_deadlines(first) != describe_token_deadlines(other):
        return DEADLINES_DIFFER
    return ""


def _compute_change(
    before: float | None, after: float | None, *, is_fraction: bool
) -> float | None:
    """Return the change of a metric: relative (0.1 is +10 %), or the difference of two fractions.

    Returns None if a value is missing, or if the first value is zero, from which no relative change
    can be computed.
    """
    if before is None or after is None:
        return None
    if is_fraction:
        return after - before
    if before == 0:
        return None
    return after / before - 1
