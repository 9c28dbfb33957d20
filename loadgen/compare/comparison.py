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
from typing import Literal, NamedTuple

import msgspec

from loadgen.compare.block_errors import count_stretches_above
from loadgen.compare.comparison_notes import (
    OTHER_TOOL_METRICS,
    comparison_notes,
    describe_scope,
    run_label,
)
from loadgen.compare.estimates import NO_INTERVAL, estimate_side, measured_runs, side_value
from loadgen.compare.significance import (
    fisher_exact,
    holm_levels,
    load_needed,
    p_value,
    subtract,
)
from loadgen.compare.work_differences import describe_slo, describe_work_differences
from loadgen.core import format
from loadgen.core.analysis.within_run_variance import ScaledEstimate
from loadgen.core.metrics.columns import is_of_class, step_indices
from loadgen.core.metrics.part_summaries import ClassSummary, StepSummary
from loadgen.core.metrics.sections import Recovery
from loadgen.core.results.manifest import ReasonCode, StepPlan
from loadgen.core.stats import students_t
from loadgen.core.stats.intervals import LEVEL
from loadgen.repeated import comparable_metrics
from loadgen.repeated.comparable_metrics import SHARE_PATHS, Metric, find_metric
from loadgen.runs.compared import ComparedRun, Side, SideFacts

UNLIKE = "not the same work"
SAME = "one and the same run is on both sides"

POWER = 0.9
"""Probability with which the smallest detectable change is found."""

EQUIVALENT_CHANGE = 0.10
"""A relative change below this is small enough to call two sides equivalent."""

EQUIVALENT_POINTS = 0.01
"""The same for the difference of two fractions: one percentage point."""

MOST_LOG_CHANGE = 50.0
"""Bound of a logarithm, so that its exponential does not overflow."""

DIFFER: Literal["these two runs differ"] = "these two runs differ"
Word = Literal[
    "better", "worse", "different", "these two runs differ", "equivalent", "inconclusive"
]
Outcome = Literal["different", "equivalent", "inconclusive"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one side, compared with the first side.

    Attributes:
        metric: The path of the metric in `summary.json`.
        name: The name of the metric.
        unit: Its unit.
        side: The name of the side.
        before: The metric of the first side.
        after: The metric of the side.
        change: The relative change (0.1 is +10 %); for a fraction, the difference as a part of one.
        low: The lower end of its interval, at the level at which `word` was decided. None if there
            is no interval.
        high: The upper end.
        detectable: The smallest change that would be found with probability POWER.
        word: The outcome; a difference is called better or worse only between repeats.
        why: Why the outcome is inconclusive.
        within: If the sides are equivalent, the largest change that the interval allows.
        repeated: True if both sides are repeats, so that the outcome holds beyond these runs.
        needed: If more load would decide the outcome, how many times as much.
    """

    metric: str
    name: str
    unit: str
    side: str
    before: float | None
    after: float | None
    change: float | None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    word: Word = "inconclusive"
    why: str = ""
    within: float | None = None
    repeated: bool = False
    needed: float | None = None

    @property
    def absolute(self) -> bool:
        """True if `change` is a difference of fractions, and not a ratio minus one."""
        return self.metric.endswith(SHARE_PATHS)

    @property
    def outcome(self) -> Outcome:
        """Whether the sides are different, equivalent, or cannot be told apart or called equal."""
        if self.word in ("equivalent", "inconclusive"):
            return self.word
        return "different"


class SideRecovery(msgspec.Struct, frozen=True, kw_only=True):
    """How long a run of a side took to return to its SLO after an event. It is shown, not judged.

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
        scope: What the outcomes hold for.
        confidence: The confidence of all metrics together.
        notes: What a reader should know that does not forbid the comparison.
        valid: True if every run is VALID.
        simulated: The sides with a simulated server.
        differences: The difference of each metric of each side.
        codes: Why a run is not valid, by the label of the run.
        recovery: How long runs took to return to their SLO.
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
        obstacle = UNLIKE if unlike and not anyway else _obstacle(first, other)
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


def describe_needed_load(difference: Difference, needed: float | None, run_count: int) -> str:
    """Return how many runs, or how much longer runs, would decide a difference.

    Returns "" if it is not known.

    Args:
        difference: The difference.
        needed: How many times as much load is needed, or None.
        run_count: The number of runs on a side.
    """
    if needed is None:
        return ""
    if difference.repeated:
        needed_runs = max(math.ceil(run_count * needed), run_count + 1)
        return f"about {needed_runs:,} runs a side would decide"
    return f"about {format.quantity(max(needed, 1.1), 2)} times as long a run would decide"


def _metrics_to_compare(sides: Sequence[Side], also: Sequence[str]) -> list[Metric]:
    paths = list(comparable_metrics.default_metric_paths())
    if any(side.told for side in sides):
        paths += OTHER_TOOL_METRICS
    paths += also
    metrics = [find_metric(path) for path in dict.fromkeys(paths)]
    return [metric for metric in metrics if metric is not None]


def _is_same_work(sides: Sequence[Side], *, has_differences: bool) -> bool | None:
    if has_differences:
        return False
    for side in sides:
        if side.told or not side.runs or not side.runs[0].summary.fingerprints.recipe:
            return None
    return True


def _obstacle(first: Side, other: Side) -> str:
    """Return why two sides of the same work cannot be judged, or ""."""
    summaries = [run.summary for run in first.runs]
    if any(run.summary in summaries for run in other.runs):
        return SAME
    invalid = [
        side.name
        for side in (first, other)
        if any(not run.summary.verdict.valid for run in side.runs)
    ]
    if invalid:
        return f"{' and '.join(invalid)} {'is' if len(invalid) == 1 else 'are'} not valid"
    if first.told or other.told:
        return "figures only, defined otherwise"
    return ""


def _recoveries(sides: Sequence[Side]) -> Iterator[SideRecovery]:
    for side in sides:
        for run in side.runs:
            counts: Counter[str] = Counter()
            for recovery in run.summary.recovery:
                counts[recovery.event] += 1
                yield SideRecovery(
                    side=side.name,
                    run=run.name,
                    number=counts[recovery.event],
                    recovery=recovery,
                )


class _MetricPair(NamedTuple):
    """A metric of two sides before it is judged. Without an estimate it cannot be judged."""

    metric: Metric
    difference: Difference
    estimate: ScaledEstimate | None


_STEP_BLOCKS = ("requests", "bytes", "load", "tokens", "ttft_ms", "tpot_ms", "e2e_ms")
_BLOCKS = {"classes": (*_STEP_BLOCKS, "goodput", "sessions"), "steps": _STEP_BLOCKS}
"""The blocks of a summary that each request class, and each step of a task, has of its own."""


class _Comparer:
    """Compares the metrics of two sides."""

    def __init__(self, metrics: Sequence[Metric], also: Sequence[str], confidence: float) -> None:
        self._metrics = metrics
        self._also = also
        self._risk = 1 - confidence

    def compare_sides(self, first: Side, other: Side, obstacle: str) -> list[Difference]:
        """Return the difference of each metric. `obstacle` says why none can be judged."""
        return self._compare(first, other, self._metrics, self._also, obstacle)

    def compare_parts(self, first: Side, other: Side, obstacle: str) -> Iterator[Difference]:
        """Yield the differences of each request class, and of each step, that both sides have.

        The metrics of one class or step share a risk of a false alarm of their own.
        """
        if not first.runs:
            return
        for field, blocks in _BLOCKS.items():
            metrics = [
                metric for metric in self._metrics if metric.path.startswith((*blocks, "ok_share"))
            ]
            for part in getattr(first.runs[0].summary, field):
                key = _part_key(part)
                if not _has_part(first, field, key) or not _has_part(other, field, key):
                    continue
                part_metrics = metrics
                if isinstance(part, StepSummary) and part.kind != "chat":
                    part_metrics = [
                        metric for metric in metrics if not metric.path.startswith("tokens")
                    ]
                part_first = _restrict_to_part(first, field, key)
                part_other = _restrict_to_part(other, field, key)
                name = ".".join(key)
                for difference in self._compare(part_first, part_other, part_metrics, (), obstacle):
                    yield msgspec.structs.replace(
                        difference,
                        metric=f"{field}.{name}.{difference.metric}",
                        name=f"{name}: {difference.name}",
                    )

    def _compare(
        self,
        first: Side,
        other: Side,
        metrics: Sequence[Metric],
        also: Sequence[str],
        obstacle: str,
    ) -> list[Difference]:
        pairs = []
        for metric in metrics:
            pair = _pair_metric(first, other, metric, obstacle)
            difference = pair.difference
            is_missing = difference.before is None or difference.after is None
            if not is_missing or metric.path in also:
                pairs.append(pair)
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


def _pair_metric(first: Side, other: Side, metric: Metric, obstacle: str) -> _MetricPair:
    is_repeated = len(first.runs) > 1 and len(other.runs) > 1
    estimate = None
    reason = obstacle
    if not reason and "goodput" in metric.path and describe_slo(first) != describe_slo(other):
        reason = "the SLOs differ"
    if not reason:
        estimate_first = estimate_side(first, metric, is_repeated=is_repeated)
        estimate_other = estimate_side(other, metric, is_repeated=is_repeated)
        reason = estimate_first.reason or estimate_other.reason
        if estimate_first.estimate is not None and estimate_other.estimate is not None:
            estimate = subtract(
                estimate_first.estimate, estimate_other.estimate, is_pooled=is_repeated
            )
    before = side_value(first, metric)
    after = side_value(other, metric)
    difference = Difference(
        metric=metric.path,
        name=metric.name,
        unit=metric.unit,
        side=other.name,
        before=before,
        after=after,
        change=_change(before, after, is_share=metric.path in SHARE_PATHS),
        why=reason or NO_INTERVAL,
        repeated=is_repeated,
    )
    return _MetricPair(metric, difference, estimate)


def _change(before: float | None, after: float | None, *, is_share: bool) -> float | None:
    if before is None or after is None:
        return None
    if is_share:
        return after - before
    return after / before - 1 if before else None


def _part_key(part: ClassSummary | StepSummary | StepPlan) -> tuple[str, ...]:
    """Return the name of a class, or the name of a step after that of its class."""
    class_name = getattr(part, "of_class", "")
    return (class_name, part.name) if class_name else (part.name,)


def _has_part(side: Side, field: str, key: tuple[str, ...]) -> bool:
    """Return True if every run of a side has a class or step."""
    return all(
        any(_part_key(part) == key for part in getattr(run.summary, field)) for run in side.runs
    )


def _restrict_to_part(side: Side, field: str, key: tuple[str, ...]) -> Side:
    """Return a side with the requests and metrics of one class or step only."""
    runs = tuple(_restrict_run_to_part(run, field, key) for run in side.runs)
    return msgspec.structs.replace(side, runs=runs)


def _restrict_run_to_part(run: ComparedRun, field: str, key: tuple[str, ...]) -> ComparedRun:
    part = next(part for part in getattr(run.summary, field) if _part_key(part) == key)
    blocks = {block: getattr(part, block) for block in _BLOCKS[field]}
    summary = msgspec.structs.replace(run.summary, **blocks)
    header = run.header
    rows = run.rows
    if header is not None and rows is not None and field == "classes":
        rows = rows[is_of_class(header, part.name, rows)]
        slo = next(plan.slo for plan in header.classes if plan.name == part.name)
        header = msgspec.structs.replace(header, slo=slo)
    elif header is not None and rows is not None:
        step_index = [_part_key(plan) for plan in header.steps].index(key)
        rows = rows[step_indices(header, rows["request"], rows["turn"]) == step_index]
    return ComparedRun(name=run.name, summary=summary, header=header, rows=rows)


def judge(
    difference: Difference,
    estimate: ScaledEstimate,
    better: int,
    level: float,
    family_level: float,
) -> Difference:
    """Return a difference with its interval, its outcome and the smallest detectable change.

    Args:
        difference: The difference.
        estimate: Its estimate, with a standard error.
        better: -1 if a lower metric is better, 1 if a higher one is, and 0 if neither is.
        level: The significance level for the interval and the outcome.
        family_level: The significance level for the smallest detectable change.
    """
    freedom = estimate.freedom
    half_width = students_t.t_quantile(1 - level / 2, freedom) * estimate.error
    low = _to_change(difference, estimate.value - half_width)
    high = _to_change(difference, estimate.value + half_width)
    is_certain = low > 0 or high < 0
    detection_errors = students_t.t_quantile(1 - family_level / 2, freedom)
    detection_errors += students_t.t_quantile(POWER, freedom)
    detectable: float | None = _to_change(difference, detection_errors * estimate.error)
    if difference.absolute and difference.before is not None:
        # A fraction is between 0 and 1.
        before = difference.before
        if detection_errors * estimate.error > max(before, 1 - before):
            detectable = None
        low = max(low, -before)
        high = min(high, 1 - before)
    judged = msgspec.structs.replace(difference, low=low, high=high, detectable=detectable, why="")
    if is_certain:
        return msgspec.structs.replace(judged, word=_word_of_certain(judged, estimate, better))
    return _equivalent_or_inconclusive(judged, estimate, half_width)


def _to_change(difference: Difference, value: float) -> float:
    """Convert from the scale of an estimate to a change: ratios are compared as logarithms."""
    return value if difference.absolute else math.expm1(min(value, MOST_LOG_CHANGE))


def _word_of_certain(difference: Difference, estimate: ScaledEstimate, better: int) -> Word:
    """Return the outcome of a change whose interval does not contain zero."""
    if not difference.repeated:
        return DIFFER
    if not better:
        return "different"
    return "better" if (estimate.value > 0) == (better > 0) else "worse"


def _equivalent_or_inconclusive(
    difference: Difference, estimate: ScaledEstimate, half_width: float
) -> Difference:
    """Return a change whose interval contains zero as equivalent or as inconclusive.

    `half_width` is that of the interval, on the scale of the estimate.
    """
    assert difference.low is not None and difference.high is not None
    within = max(abs(difference.low), abs(difference.high))
    margin = EQUIVALENT_POINTS if difference.absolute else EQUIVALENT_CHANGE
    if within <= margin:
        return msgspec.structs.replace(difference, word="equivalent", within=within)
    scaled_margin = margin if difference.absolute else math.log1p(margin)
    distance_from_zero = abs(estimate.value)
    distance_to_decide = max(distance_from_zero, scaled_margin - distance_from_zero)
    return msgspec.structs.replace(
        difference,
        word="inconclusive",
        why="its interval is too wide to decide",
        needed=load_needed(distance_to_decide, half_width),
    )


def _check_stretches(
    difference: Difference, first: Side, other: Side, metric: Metric, level: float
) -> Difference:
    """Return the difference as inconclusive if it comes from a few stretches of time only.

    Three runs that met a slow period each, against three that met none, agree well among each
    other, but there are only three such periods. So the number of stretches of time whose own
    percentile is above the middle of both sides must differ, too.
    """
    if metric.p is None or not metric.per_request:
        return difference
    if not difference.before or not difference.after:
        return difference
    runs_first = measured_runs(first)
    runs_other = measured_runs(other)
    if len(runs_first) < len(first.runs) or len(runs_other) < len(other.runs):
        return difference
    middle_ns = math.sqrt(difference.before * difference.after) * 1e6
    stretches_first = count_stretches_above(runs_first, metric, middle_ns)
    stretches_other = count_stretches_above(runs_other, metric, middle_ns)
    if fisher_exact(*stretches_first, *stretches_other) <= level:
        return difference
    why = (
        f"they differ in a few stretches of time only "
        f"({stretches_first.above} of {stretches_first.total}, "
        f"{stretches_other.above} of {stretches_other.total})"
    )
    return msgspec.structs.replace(difference, word="inconclusive", why=why)
