"""Compares results: whether the work was the same, what differs, and how certain that is.

Pure. Requests of one run are correlated, so a single run is judged by blocks of its time, and
repeats are judged as whole runs. Metrics that are judged together share the risk of a false alarm
(Holm 1979). With one run on a side, the outcome holds for these runs only, so it is never called
better or worse.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from loadgen.compare.block_errors import count_stretches_above
from loadgen.compare.comparison_notes import (
    OTHER_TOOL_METRICS,
    comparison_notes,
    describe_scope,
    run_label,
)
from loadgen.compare.difference import Difference
from loadgen.compare.estimates import (
    NO_KNOWN_INTERVAL,
    estimate_side,
    measured_runs,
    side_value,
)
from loadgen.compare.judgement import judge
from loadgen.compare.parts import ComparedPart, restrict_to_part, shared_parts
from loadgen.compare.significance import fisher_exact, holm_levels, p_value, subtract
from loadgen.compare.work_differences import describe_slo, describe_work_differences
from loadgen.core.analysis.within_run_variance import ScaledEstimate
from loadgen.core.metrics.sections import Recovery
from loadgen.core.results.manifest import ReasonCode
from loadgen.core.stats.intervals import LEVEL
from loadgen.repeated import comparable_metrics
from loadgen.repeated.comparable_metrics import SHARE_PATHS, Metric, find_metric
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
        unlike: How the work of the sides differs.
        scope: Which variation the outcomes take into account.
        confidence: The confidence of all metrics together.
        notes: Differences that a reader should know, but that do not prevent the comparison.
        valid: True if every run is VALID.
        simulated: The sides with a simulated server.
        differences: The difference of each metric of each side.
        codes: Why a run is not valid, by the label of the run.
        recovery: How long runs took to meet their SLO again after an event.
        facts: What each side is.
    """

    sides: tuple[str, ...]
    runs: tuple[int, ...]
    same_work: bool | None
    unlike: tuple[str, ...]
    scope: str
    confidence: float
    notes: tuple[str, ...]
    valid: bool
    simulated: tuple[str, ...]
    differences: tuple[Difference, ...]
    codes: dict[str, tuple[ReasonCode, ...]] = {}
    recovery: tuple[SideRecovery, ...] = ()
    facts: tuple[SideFacts, ...] = ()


def compare(
    sides: Sequence[Side],
    *,
    also: Sequence[str] = (),
    confidence: float = LEVEL,
    anyway: bool = False,
) -> Comparison:
    """Return the comparison of every side with the first one.

    Args:
        sides: The sides.
        also: Paths of metrics to compare in addition to the default ones.
        confidence: The confidence of all metrics together.
        anyway: True to judge although the work differs. Without it, differences between sides of
            other work are shown, but not judged. Invalid runs are never judged.
    """
    first = sides[0]
    comparer = _Comparer(_metrics_to_compare(sides, also), also, confidence)
    differences: list[Difference] = []
    work_differences: dict[str, None] = {}
    for other in sides[1:]:
        unlike = describe_work_differences(first, other)
        work_differences.update(dict.fromkeys(unlike))
        obstacle = NOT_SAME_WORK if unlike and not anyway else _obstacle(first, other)
        differences += comparer.compare_sides(first, other, obstacle)
        differences += comparer.compare_parts(first, other, obstacle)
    invalid_runs = {
        run_label(side, run): run.summary.verdict.codes
        for side in sides
        for run in side.runs
        if not run.summary.verdict.valid
    }
    return Comparison(
        sides=tuple(side.name for side in sides),
        runs=tuple(len(side.runs) for side in sides),
        same_work=_is_same_work(sides, has_differences=bool(work_differences)),
        unlike=tuple(work_differences),
        scope=describe_scope(sides),
        confidence=confidence,
        notes=tuple(comparison_notes(sides)),
        valid=not invalid_runs,
        simulated=tuple(
            side.name for side in sides if any(run.summary.target.simulated for run in side.runs)
        ),
        differences=tuple(differences),
        codes=invalid_runs,
        recovery=tuple(_recoveries(sides)),
        facts=tuple(side.facts for side in sides),
    )


def _metrics_to_compare(sides: Sequence[Side], also: Sequence[str]) -> list[Metric]:
    """Return the default metrics, those that other tools report, and the additional ones."""
    paths = list(comparable_metrics.default_metric_paths())
    if any(side.reported_metrics for side in sides):
        paths += OTHER_TOOL_METRICS
    paths += also
    metrics = [find_metric(path) for path in dict.fromkeys(paths)]
    return [metric for metric in metrics if metric is not None]


def _is_same_work(sides: Sequence[Side], *, has_differences: bool) -> bool | None:
    """Return whether all sides did the same work. None if a side does not say what it did.

    Files of other tools do not say it, and neither do runs without a fingerprint of their requests.
    """
    if has_differences:
        return False
    for side in sides:
        if side.reported_metrics or not side.runs or not side.runs[0].summary.fingerprints.recipe:
            return None
    return True


def _obstacle(first: Side, other: Side) -> str:
    """Return why two sides of the same work cannot be judged, such as "b is not valid", or ""."""
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


def _recoveries(sides: Sequence[Side]) -> Iterator[SideRecovery]:
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
        difference: The difference, which says why it is not judged.
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

    def __init__(self, metrics: Sequence[Metric], also: Sequence[str], confidence: float) -> None:
        """Create a comparer of these metrics. The paths in `also` are kept without values, too."""
        self._metrics = metrics
        self._also = also
        self._risk = 1 - confidence

    def compare_sides(self, first: Side, other: Side, obstacle: str) -> list[Difference]:
        """Return the difference of each metric. `obstacle` says why none can be judged, or ""."""
        pairs = []
        for metric in self._metrics:
            pair = _pair_metric(first, other, metric, obstacle)
            if _has_both_values(pair.difference) or metric.path in self._also:
                pairs.append(pair)
        return self._judge_pairs(pairs, first, other)

    def compare_parts(self, first: Side, other: Side, obstacle: str) -> Iterator[Difference]:
        """Yield the differences of each request class, and of each step, that both sides have.

        The metrics of one class or step share a risk of a false alarm of their own.
        """
        for part in shared_parts(first, other):
            part_first = restrict_to_part(first, part)
            part_other = restrict_to_part(other, part)
            pairs = [
                _pair_metric(part_first, part_other, metric, obstacle)
                for metric in self._metrics_of(part)
            ]
            pairs = [pair for pair in pairs if _has_both_values(pair.difference)]
            for difference in self._judge_pairs(pairs, part_first, part_other):
                yield msgspec.structs.replace(
                    difference,
                    metric=f"{part.kind}.{part.name}.{difference.metric}",
                    name=f"{part.name}: {difference.name}",
                )

    def _metrics_of(self, part: ComparedPart) -> Iterator[Metric]:
        """Yield the metrics that a part has of its own. An embedding, for one, has no tokens."""
        for metric in self._metrics:
            is_of_part = metric.path.startswith((*part.blocks, "ok_share"))
            if is_of_part and (part.has_tokens or not metric.path.startswith("tokens")):
                yield metric

    def _judge_pairs(
        self, pairs: Sequence[_MetricPair], first: Side, other: Side
    ) -> list[Difference]:
        """Return the differences with their outcomes.

        The risk of a false alarm is shared among the metrics that can be judged by Holm's method.
        What each of them could detect is stated for its strictest level, the risk divided by their
        number.
        """
        p_values = [None if pair.estimate is None else p_value(pair.estimate) for pair in pairs]
        judged_count = sum(value is not None for value in p_values)
        family_level = self._risk / max(judged_count, 1)
        differences = []
        for pair, level in zip(pairs, holm_levels(p_values, self._risk), strict=True):
            difference = pair.difference
            if pair.estimate is not None:
                difference = judge(
                    difference, pair.estimate, pair.metric.better, level, family_level
                )
                if difference.word in ("better", "worse"):
                    difference = _check_stretches(difference, first, other, pair.metric, level)
            differences.append(difference)
        return differences


def _has_both_values(difference: Difference) -> bool:
    """Return True if both sides have the metric."""
    return difference.before is not None and difference.after is not None


def _pair_metric(first: Side, other: Side, metric: Metric, obstacle: str) -> _MetricPair:
    """Return a metric of two sides, and their estimates if it can be judged.

    Args:
        first: The side to compare with.
        other: The side to compare.
        metric: The metric.
        obstacle: Why no metric of these sides can be judged, or "".
    """
    is_repeated = len(first.runs) > 1 and len(other.runs) > 1
    before = side_value(first, metric)
    after = side_value(other, metric)
    estimate = None
    reason = obstacle
    if not reason and "goodput" in metric.path and describe_slo(first) != describe_slo(other):
        reason = "the SLOs differ"
    if not reason:
        first_estimate = estimate_side(first, metric, is_repeated=is_repeated)
        other_estimate = estimate_side(other, metric, is_repeated=is_repeated)
        reason = first_estimate.reason or other_estimate.reason
        if first_estimate.estimate is not None and other_estimate.estimate is not None:
            estimate = subtract(
                first_estimate.estimate, other_estimate.estimate, is_pooled=is_repeated
            )
    difference = Difference(
        metric=metric.path,
        name=metric.name,
        unit=metric.unit,
        side=other.name,
        before=before,
        after=after,
        change=_change(before, after, is_share=metric.path in SHARE_PATHS),
        reason=reason or NO_KNOWN_INTERVAL,
        repeated=is_repeated,
    )
    return _MetricPair(metric, difference, estimate)


def _change(before: float | None, after: float | None, *, is_share: bool) -> float | None:
    """Return the change of a metric: relative (0.1 is +10 %), or of a share in parts of one.

    Returns None if a value is missing, or if there is no relative change because it was zero.
    """
    if before is None or after is None:
        return None
    if is_share:
        return after - before
    return after / before - 1 if before else None


def _check_stretches(
    difference: Difference, first: Side, other: Side, metric: Metric, level: float
) -> Difference:
    """Return the difference as inconclusive if it comes from a few stretches of time only.

    Three runs that met one slow period each, against three that met none, agree well among each
    other, but the evidence is only three slow periods. So the runs are cut into stretches of time,
    and the stretches that are slow must be significantly more frequent on one side, too. A stretch
    is slow if its own percentile is above the geometric mean of the percentiles of both sides.

    A mean, or a percentile of runs without records, is returned as it is.
    """
    if metric.p is None or not metric.per_request:
        return difference
    if not difference.before or not difference.after:
        return difference
    first_runs = measured_runs(first)
    other_runs = measured_runs(other)
    if len(first_runs) < len(first.runs) or len(other_runs) < len(other.runs):
        return difference
    middle_ms = math.sqrt(difference.before * difference.after)
    first_stretches = count_stretches_above(first_runs, metric, middle_ms * 1e6)
    other_stretches = count_stretches_above(other_runs, metric, middle_ms * 1e6)
    if fisher_exact(*first_stretches, *other_stretches) <= level:
        return difference
    reason = (
        "the difference comes from a few periods of time only "
        f"({first_stretches.above} of {first_stretches.total} periods are slow vs. "
        f"{other_stretches.above} of {other_stretches.total})"
    )
    return msgspec.structs.replace(difference, word="inconclusive", reason=reason)
