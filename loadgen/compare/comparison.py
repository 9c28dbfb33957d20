"""Compares two or more results: whether the work was the same, what differs by how much, and whether that is certain.

Pure. Requests of one run are correlated, so a run is judged by blocks of its time, and repeats are judged as whole runs
(`stats/intervals.py`). Metrics judged together share the risk of a false alarm (Holm 1979). With one run on a side the
result holds for these runs only: the word is then DIFFER, never "better" or "worse".
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np

from loadgen.compare import block_errors
from loadgen.core import format
from loadgen.core.analysis import within_run_variance
from loadgen.core.analysis.within_run_variance import Known
from loadgen.core.limits import CACHED_SHARE, SHORTENED
from loadgen.core.metrics import outcomes
from loadgen.core.metrics.columns import OK, of_class, step_of
from loadgen.core.metrics.parts import ClassSummary, StepSummary
from loadgen.core.metrics.reasons import STATES
from loadgen.core.metrics.sections import Recovery
from loadgen.core.metrics.summary import Summary
from loadgen.core.metrics.validity import answered_share
from loadgen.core.results.manifest import ReasonCode, StepPlan
from loadgen.core.stats import intervals
from loadgen.core.stats.intervals import LEVEL
from loadgen.repeated import comparable_metrics
from loadgen.repeated.comparable_metrics import SHARE_PATHS, Metric, find_metric, metric_value
from loadgen.runs.compared import ComparedRun, Side, SideFacts
from loadgen.runs.headline import promises

UNLIKE = "not the same work"
SAME = "one and the same run is on both sides"
BOUNDS = {
    "grace, s": "grace_s",
    "timeout, s": "timeout_s",
    "stall timeout, s": "stall_timeout_s",
    "most in flight": "max_in_flight",
    "most in prefill": "max_in_prefill",
}
"""Of a load, as a reader knows them -> field of the header."""
DRAWN = 0.1  # share by which lengths and times of one recipe differ from seed to seed
POWER = 0.9  # probability of finding the smallest detectable change

EQUIVALENT_CHANGE = 0.10
"""A relative change below this is small enough to call two sides equivalent."""
EQUIVALENT_POINTS = 0.01
"""The same for the difference of two shares: one percentage point."""
MOST_NEEDED = 1000  # times as much load: beyond this no number of runs is named

DIFFER: Literal["these two runs differ"] = "these two runs differ"
Word = Literal[
    "better", "worse", "different", "these two runs differ", "equivalent", "inconclusive"
]
Outcome = Literal["different", "equivalent", "inconclusive"]


TOLD = ("tokens.output_per_s", "load.completed_rps")
"""Further metrics, when a side is the figures of another tool."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one side, compared with the first side.

    Attributes:
        change: The relative change (0.1 is +10 %); for a share, the difference as a part of one.
        low: The lower end of its interval, at the level at which `word` was decided. None if there
            is no interval.
        high: The upper end.
        detectable: The smallest change that would be found with probability POWER.
        word: The outcome; a difference is called better or worse only between repeats.
        why: Why the outcome is inconclusive.
        within: If the sides are equivalent, the largest change that the interval allows.
        repeated: Whether both sides are repeats, so that the outcome holds beyond these runs.
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
        """Whether `change` is a difference of shares, and not a ratio minus one."""
        return self.metric.endswith(SHARE_PATHS)

    @property
    def outcome(self) -> Outcome:
        """Whether the sides are different, equivalent, or cannot be told apart or called equal."""
        if self.word in ("equivalent", "inconclusive"):
            return self.word
        return "different"


class WayBack(msgspec.Struct, frozen=True, kw_only=True):
    """How long a run of a side took back to its SLO after an event, the `number`th of its kind. Shown, not judged."""

    side: str
    run: str
    number: int
    found: Recovery


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a comparison. `same_work`: null where a side has no fingerprint."""

    sides: tuple[str, ...]
    runs: tuple[int, ...]
    same_work: bool | None
    unlike: tuple[str, ...]  # what differs between the work of the sides, in words
    scope: str
    confidence: float
    notes: tuple[str, ...]
    valid: bool
    simulated: tuple[
        str, ...
    ]  # sides with a run against a simulated server: they say nothing about hardware
    differences: tuple[Difference, ...]
    codes: dict[str, tuple[ReasonCode, ...]] = {}  # run that is not valid -> why
    recovery: tuple[WayBack, ...] = ()
    facts: tuple[SideFacts, ...] = ()  # what each side is


def compare(
    sides: Sequence[Side],
    *,
    also: Sequence[str] = (),
    confidence: float = LEVEL,
    anyway: bool = False,
) -> Comparison:
    """Compare every side with the first one, over the metrics of `shown` and those in `also`.

    `anyway`: judge although the work differs. Without it, a difference between sides whose recipes differ is shown but
    not judged. Sides that are not valid are never judged.
    """
    first = sides[0]
    extra_metrics = TOLD if any(side.told for side in sides) else ()
    known_metrics = map(
        find_metric,
        dict.fromkeys((*comparable_metrics.default_metric_paths(), *extra_metrics, *also)),
    )
    metrics_compared = [one for one in known_metrics if one is not None]
    differences: list[Difference] = []
    for other in sides[1:]:
        unlike = _unlike(first, other)
        invalid = [
            side.name
            for side in (first, other)
            if any(not run.summary.verdict.valid for run in side.runs)
        ]
        why = "figures only, defined otherwise" if first.told or other.told else ""
        if unlike and not anyway:
            why = UNLIKE
        elif any(
            run.summary == one.summary for run in first.runs for one in other.runs
        ):  # its folder, or a copy
            why = SAME
        elif invalid:
            why = f"{' and '.join(invalid)} {'is' if len(invalid) == 1 else 'are'} not valid"
        differences += _differences(first, other, metrics_compared, also, confidence, why)
        differences += _of_parts(first, other, metrics_compared, confidence, why)
    all_unlike = tuple(dict.fromkeys(text for other in sides[1:] for text in _unlike(first, other)))
    unknown = any(
        side.told or not side.runs or not side.runs[0].summary.fingerprints.recipe for side in sides
    )
    return Comparison(
        sides=tuple(side.name for side in sides),
        runs=tuple(len(side.runs) for side in sides),
        same_work=False if all_unlike else None if unknown else True,
        unlike=all_unlike,
        scope=_scope(sides),
        confidence=confidence,
        notes=tuple(_notes(sides)),
        valid=all(run.summary.verdict.valid for side in sides for run in side.runs),
        simulated=tuple(
            side.name for side in sides if any(run.summary.target.simulated for run in side.runs)
        ),
        differences=tuple(differences),
        codes={
            _name(side, run): run.summary.verdict.codes
            for side in sides
            for run in side.runs
            if not run.summary.verdict.valid
        },
        recovery=tuple(_ways_back(sides)),
        facts=tuple(side.facts for side in sides),
    )


def _ways_back(sides: Sequence[Side]) -> Iterator[WayBack]:
    for side in sides:
        for run in side.runs:
            seen: Counter[str] = Counter()
            for found in run.summary.recovery:
                seen[found.event] += 1
                yield WayBack(side=side.name, run=run.name, number=seen[found.event], found=found)


def _name(side: Side, run: ComparedRun) -> str:
    return side.name if len(side.runs) == 1 else f"{side.name}/{run.name}"


# -- the same work? ------------------------------------------------------------------------------------------------


def _unlike(first: Side, other: Side) -> list[str]:
    """How the work of two sides differs, in words; empty when it does not, or when that is not known."""
    if not first.runs or not other.runs:
        return []
    a, b = first.runs[0].summary, other.runs[0].summary
    answered = [_answered(side) for side in (first, other)]
    if max(answered) - min(answered) > SHORTENED:
        shares = " against ".join(f"{share * 100:.1f} %" for share in answered)
        return [f"answers: {shares} of the output tokens asked for"]
    work_a, work_b = _work(a, b)
    if not work_a or not work_b or work_a == work_b:
        return []
    differences = [
        f"{name}: {first_value or 'none'} against {other_value or 'none'}"
        for name, first_value, other_value in (
            ("workload", a.run.workload, b.run.workload),
            ("load", a.load.arrival, b.load.arrival),
            ("SLO", ", ".join(promises(a)), ", ".join(promises(b))),
            (
                "output counted by",
                ", ".join(a.tokens.sources.output),
                ", ".join(b.tokens.sources.output),
            ),
            ("tokenizer file", _tokenizer(a), _tokenizer(b)),
        )
        if first_value != other_value
    ]
    if a.requests.scheduled != b.requests.scheduled and _apart(
        *(seconds := [_planned_s(first), _planned_s(other)])
    ):
        differences.append(f"load for: {' against '.join(map(format.duration, seconds))}")
    for subject, mean in (("prompt", _prompt), ("answer as asked", _asked)):
        if _apart(*(means := [mean(a), mean(b)])):
            differences.append(
                f"{subject}: {' against '.join(map(format.quantity, means))} tokens, mean"
            )
    for name, key in BOUNDS.items():
        bounds = [getattr(side.runs[0].header, key, None) for side in (first, other)]
        if bounds[0] != bounds[1]:
            said = ("none" if bound is None else f"{bound:g}" for bound in bounds)
            differences.append(f"{name}: {' against '.join(said)}")
    return differences or [f"recipe: {work_a} against {work_b}"]


def _apart(a: float | None, b: float | None) -> bool:
    """Whether two figures of the load differ by more than another draw of it would."""
    return a is not None and b is not None and abs(a - b) > DRAWN * max(a, b)


def _planned_s(side: Side) -> float | None:
    """How long the measured load was to last; None where that was not known before, or not kept."""
    header = side.runs[0].header
    ends = (
        [
            stage.end_ns and stage.end_ns - stage.start_ns
            for stage in header.stages
            if stage.measured
        ]
        if header
        else []
    )
    return sum(ends) / 1e9 if ends and all(ends) else None  # type: ignore[arg-type]


def _prompt(summary: Summary) -> float | None:
    return summary.tokens.input and summary.tokens.input / max(summary.requests.ok, 1)


def _asked(summary: Summary) -> float | None:
    return summary.tokens.asked_output and summary.tokens.asked_output / max(summary.requests.ok, 1)


def _work(a: Summary, b: Summary) -> tuple[str, str]:
    """The fingerprints of the work; those of the recipes, with the SLO, where a folder is older than these."""
    prints_a, prints_b = a.fingerprints, b.fingerprints
    if prints_a.work and prints_b.work:
        return prints_a.work, prints_b.work
    return prints_a.recipe, prints_b.recipe


def _answered(side: Side) -> float:
    """The share of the output tokens asked for that the answers of a side have."""
    return statistics.fmean(answered_share(run.summary.verdict) for run in side.runs)


def _tokenizer(summary: Summary) -> str:
    run = summary.run
    return f"{run.tokenizer} ({run.tokenizer_sha256[:12]})" if run.tokenizer_sha256 else ""


def _promised(side: Side) -> str:
    return ", ".join(promises(side.runs[0].summary)) if side.runs else ""


def _notes(sides: Sequence[Side]) -> list[str]:
    """What a reader should know that does not forbid the comparison."""
    notes: list[str] = []
    for side in sides:
        notes += [f"{side.name}: {note}" for note in side.notes]
        missing = [
            known_metric.name
            for path in (*comparable_metrics.default_metric_paths(), *TOLD)
            if path not in side.told and (known_metric := find_metric(path))
        ]
        if side.told and missing:
            notes.append(f"{side.name} does not say: {'; '.join(missing)}")
        for run in side.runs:
            name, verdict, state = _name(side, run), run.summary.verdict, run.summary.run.state
            if not verdict.valid:
                notes.append(f"{name} is not valid: {'; '.join(verdict.reasons)}")
            notes += [f"{name}: {caveat}" for caveat in verdict.caveats]
            notes += [
                f"{name}: {node.name} stands out, {node.metric.upper()} {node.change:+.1%} against the other "
                f"{run.summary.between.unit}s"
                for node in run.summary.between.odd
            ]
            if state != "finished":
                notes.append(f"{name}: {STATES.get(state, state)}")
            if run.rows is None:
                notes.append(
                    f"{name} has no records, only a summary: nothing can be told from it alone"
                )
    facts: tuple[tuple[str, Callable[[ComparedRun], set[str]]], ...] = (
        ("models", lambda run: {run.summary.target.model}),
        ("versions of loadgen", lambda run: {run.summary.run.version}),
        ("regions", lambda run: {target.region for target in run.targets}),  # "" where one has none
        ("software", lambda run: {", ".join(run.summary.target.software)}),
        ("metadata", lambda run: {format.pairs(dict(sorted(run.summary.run.metadata.items())))}),
    )
    for subject, values_of in facts:
        values = [set().union(*map(values_of, side.runs)) for side in sides if side.runs]
        if len(set(map(frozenset, values))) > 1:
            named = ("/".join(sorted(value)) or "none" for value in values)
            notes.append(f"different {subject}: {' against '.join(named)}")
    promises = [_promised(side) or "none" for side in sides if side.runs]
    if len(set(promises)) > 1:
        notes.append(
            f"different SLOs: {' against '.join(promises)}; what meets them is not compared"
        )
    seeds = [
        run.summary.run.seed
        for side in sides
        for run in side.runs
        if run.summary.run.seed is not None
    ]
    if len(seeds) > 1:
        notes.append(_seed_note(seeds, [run.summary for side in sides for run in side.runs]))
    cached = [
        share
        for side in sides
        for run in side.runs
        if (share := run.summary.tokens.cached_share) is not None
    ]
    if cached and max(cached) - min(cached) > CACHED_SHARE:
        notes.append(
            f"shares of cached prompt tokens differ: {min(cached) * 100:.1f} % to {max(cached) * 100:.1f} %"
        )
    return notes


def _seed_note(seeds: Sequence[int], summaries: Sequence[Summary]) -> str:
    if len(set(seeds)) > 1:
        return "seeds differ, as they should: the chance of the draw is inside the intervals"
    if (
        len({summary.fingerprints.prompts for summary in summaries}) == 1
        and summaries[0].fingerprints.prompts
    ):
        return "the seed is the same: equal prompts, a prefix cache may remember them"
    if len({summary.run.salt for summary in summaries}) > 1:
        return "the seed is the same, the salt is not: equal lengths and arrivals, other texts"
    return "the seed is the same: equal lengths and arrivals"


def _scope(sides: Sequence[Side]) -> str:
    if any(side.told for side in sides):
        return "another tool's figures stand without records: differences are shown, and cannot be judged"
    if all(len(side.runs) > 1 for side in sides):
        return "by repeated runs on every side"
    single = [side.name for side in sides if len(side.runs) < 2]
    return (
        f"by blocks of time within these runs: one run of {' and '.join(single)}. What another start of the server "
        "would show, they cannot tell: no word of better or worse. Repeats can: loadgen run ... --repeat 3"
    )


# -- figures with their standard errors ----------------------------------------------------------------------------


def _differences(
    first: Side,
    other: Side,
    metrics_compared: Sequence[Metric],
    also: Sequence[str],
    confidence: float,
    why: str,
) -> list[Difference]:
    repeated = len(first.runs) > 1 and len(other.runs) > 1
    results: list[tuple[Metric, Difference, Known | None]] = []
    for compared in metrics_compared:
        before, after = _value(first, compared), _value(other, compared)
        if (before is None or after is None) and compared.path not in also:
            continue
        known, reason = None, why
        if not why and "goodput" in compared.path and _promised(first) != _promised(other):
            reason = "the SLOs differ"
        elif not why:
            a, reason_a = _estimate(first, compared, repeated)
            b, reason_b = _estimate(other, compared, repeated)
            reason = reason_a or reason_b
            known = (
                _difference_of(a, b, pooled=repeated) if a is not None and b is not None else None
            )
        difference = Difference(
            metric=compared.path,
            name=compared.name,
            unit=compared.unit,
            side=other.name,
            before=before,
            after=after,
            change=_change(before, after, is_share=compared.path in SHARE_PATHS),
            why=reason or "no interval is known for it",
            repeated=repeated,
        )
        results.append((compared, difference, known))
    levels = _holm(
        [None if known is None else _p_value(known) for *_, known in results], 1 - confidence
    )
    family = max(sum(known is not None for *_, known in results), 1)
    made = []
    for (compared, difference, known), level in zip(results, levels, strict=True):
        if known is not None:
            difference = _judged(
                difference, known, compared.better, level, (1 - confidence) / family
            )
            if difference.word in ("better", "worse"):
                difference = _rests_on_few(difference, first, other, compared, level)
        made.append(difference)
    return made


def _change(before: float | None, after: float | None, *, is_share: bool) -> float | None:
    if before is None or after is None or (not is_share and not before):
        return None
    return after - before if is_share else after / before - 1


_OF_STEP = ("requests", "bytes", "load", "tokens", "ttft_ms", "tpot_ms", "e2e_ms")
_BLOCKS = {"classes": (*_OF_STEP, "goodput", "sessions"), "steps": _OF_STEP}
"""Parts of a summary -> its blocks of which each part has one of its own."""


def _of_parts(
    first: Side, other: Side, metrics_compared: Sequence[Metric], confidence: float, why: str
) -> Iterator[Difference]:
    """The differences of each class of requests, then of each step of tasks, that both sides have. Those of one share a
    risk of their own.
    """
    for parts, blocks in _BLOCKS.items():
        known = [one for one in metrics_compared if one.path.startswith((*blocks, "ok_share"))]
        for part in getattr(first.runs[0].summary, parts) if first.runs else ():
            key = _key(part)
            if any(
                key not in map(_key, getattr(run.summary, parts))
                for run in (*first.runs, *other.runs)
            ):
                continue
            has_tokens = parts == "classes" or part.kind == "chat"
            shown = [one for one in known if has_tokens or not one.path.startswith("tokens")]
            a, b, name = _only(first, parts, key), _only(other, parts, key), ".".join(key)
            for one in _differences(a, b, shown, (), confidence, why):
                yield msgspec.structs.replace(
                    one, metric=f"{parts}.{name}.{one.metric}", name=f"{name}: {one.name}"
                )


def _key(part: ClassSummary | StepSummary | StepPlan) -> tuple[str, ...]:
    """The name of a class, or of a step with its class."""
    return tuple(filter(None, (getattr(part, "of_class", ""), part.name)))


def _only(side: Side, parts: str, key: tuple[str, ...]) -> Side:
    """A side with the requests and the figures of one class or step."""
    runs = []
    for run in side.runs:
        part = next(one for one in getattr(run.summary, parts) if _key(one) == key)
        summary = msgspec.structs.replace(
            run.summary, **{block: getattr(part, block) for block in _BLOCKS[parts]}
        )
        header, rows = run.header, run.rows
        if header is not None and rows is not None and parts == "classes":
            rows = rows[of_class(header, part.name, rows)]
            slo = next(plan.slo for plan in header.classes if plan.name == part.name)
            header = msgspec.structs.replace(header, slo=slo)
        elif header is not None and rows is not None:
            index = [_key(plan) for plan in header.steps].index(key)
            rows = rows[step_of(header, rows["request"], rows["turn"]) == index]
        runs.append(ComparedRun(name=run.name, summary=summary, header=header, rows=rows))
    return msgspec.structs.replace(side, runs=tuple(runs))


def _rests_on_few(
    difference: Difference, first: Side, other: Side, compared: Metric, level: float
) -> Difference:
    """The difference, or that it cannot be told where a quantile differs in a few stretches of time only.

    Three runs that met a bad spell each, against three that met none, agree well among each other; but the spells are
    three. So the stretches of time whose own quantile is above the middle of both sides must differ in number too.
    """
    parts_a, parts_b = (
        [part for run in side.runs if (part := run.measured()) is not None]
        for side in (first, other)
    )
    if (
        compared.p is None
        or not compared.per_request
        or not difference.before
        or not difference.after
    ):
        return difference
    if len(parts_a) < len(first.runs) or len(parts_b) < len(other.runs):
        return difference
    middle_ns = math.sqrt(difference.before * difference.after) * 1e6
    above_a, total_a = block_errors.stretches_above(parts_a, compared, middle_ns)
    above_b, total_b = block_errors.stretches_above(parts_b, compared, middle_ns)
    if fisher(above_a, total_a, above_b, total_b) <= level:
        return difference
    why = (
        f"they differ in a few stretches of time only ({above_a} of {total_a}, "
        f"{above_b} of {total_b})"
    )
    return msgspec.structs.replace(difference, word="inconclusive", why=why)


def _value(side: Side, compared: Metric) -> float | None:
    """The figure of the summary; for repeats, the mean over the runs. None where a run has none."""
    if side.told:
        return side.told.get(compared.path)
    values = [metric_value(run.summary, compared.path) for run in side.runs]
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def _estimate(side: Side, compared: Metric, repeated: bool) -> tuple[Known | None, str]:
    """The figure with its standard error, on the scale of the comparison; or None and the reason."""
    if side.told or not side.runs:
        return None, f"{side.name} has figures only"
    family, _, statistic = compared.path.rpartition(".")
    metric = family.rpartition(".")[2].removesuffix("_ms")
    reasons = dict.fromkeys(
        reason
        for run in side.runs
        if metric_value(run.summary, compared.path) is None
        and (reason := run.summary.withheld_reason(metric, statistic))
    )
    if reasons:
        return None, f"withheld in {side.name}: {'; '.join(reasons)}"
    value = _value(side, compared)
    if value is None:
        return None, f"{side.name} has none"
    is_share = compared.path in SHARE_PATHS
    if not is_share and value <= 0:
        return None, "zero"
    if repeated:
        values = [metric_value(run.summary, compared.path) or 0.0 for run in side.runs]
        if not is_share and min(values) <= 0:
            return None, "zero"
        scaled = np.array(values) if is_share else np.log(values)
        error = float(scaled.std(ddof=1)) / math.sqrt(len(values))
        if is_share:  # three runs without a failure do not say that there is none
            requests = sum(run.summary.requests.scheduled for run in side.runs)
            error = max(error, within_run_variance.least_share_error(value * requests, requests))
        known = Known(float(scaled.mean()), error, len(values) - 1)
        recorded = [part for run in side.runs if (part := run.measured()) is not None]
        if compared.per_request and len(recorded) == len(side.runs):
            if too_few := block_errors.too_few_samples(recorded, compared):
                return None, too_few
            inside, freedom = block_errors.within_runs(recorded, compared)
            if inside > known.error:
                known = Known(known.value, inside, freedom)
        return known, ""
    parts = [run.measured() for run in side.runs]
    columns = [part for part in parts if part is not None]
    if len(columns) < len(parts):
        return None, f"{side.name} has no records"
    if compared.per_request:
        return block_errors.latency(columns, compared, value)
    if compared.path == "ok_share":
        return within_run_variance.share(
            [within_run_variance.marks(part, part.where(OK)) for part in columns], value
        ), ""
    if compared.path == "goodput.share":
        slo = next((run.header.slo for run in side.runs if run.header is not None), None)
        if slo is None:
            return None, "each class has an SLO of its own"
        return within_run_variance.share(
            [within_run_variance.marks(part, outcomes.meets(part, slo), slo) for part in columns],
            value,
        ), ""
    if compared.path == "tokens.steady_output_per_s":
        return block_errors.rate([run.summary.window.steady for run in side.runs], columns, value)
    return None, "no interval is known for it"


# -- differences ---------------------------------------------------------------------------------------------------


def _difference_of(a: Known, b: Known, *, pooled: bool = False) -> Known:
    """The difference b - a of two independent figures.

    `pooled`: as many runs on both sides, whose spread is taken for one (Student). With three runs a side Welch's
    degrees of freedom are themselves a guess, and cost half of the power.
    """
    freedom = intervals.welch(a.error**2, a.freedom, b.error**2, b.freedom)
    if pooled and a.freedom == b.freedom:
        freedom = a.freedom + b.freedom
    return Known(b.value - a.value, math.hypot(a.error, b.error), freedom)


def _p_value(difference: Known) -> float:
    """Two-sided p-value: the probability of a difference at least this large when there is none."""
    if difference.value == 0:
        return 1.0
    if difference.error == 0:
        return 0.0
    return 2 * (1 - intervals.t_below(abs(difference.value) / difference.error, difference.freedom))


def _holm(p_values: Sequence[float | None], risk: float) -> list[float]:
    """The risk at which each metric is judged, by the method of Holm (1979).

    The least p-value is judged at risk / m, the next at risk / (m - 1), and so on. The first one that is not
    significant stops this, and all the others share its level. `p_values`: None for metrics that are not
    judged.
    """
    order = sorted((p_value, i) for i, p_value in enumerate(p_values) if p_value is not None)
    levels = [risk] * len(p_values)
    level, stopped = risk, False
    for place, (p_value, i) in enumerate(order):
        if not stopped:
            level = risk / (len(order) - place)
            stopped = p_value > level
        levels[i] = level
    return levels


def _judged(
    difference: Difference, known: Known, better: int, level: float, family_level: float
) -> Difference:
    """The difference with its interval at `level`, its word, and what would be seen at `family_level`."""

    def to_change(value: float) -> float:
        """From the scale of the comparison to `change`: ratios are compared as logarithms."""
        return value if difference.absolute else math.expm1(min(value, 50.0))

    half = intervals.t_quantile(1 - level / 2, known.freedom) * known.error
    low, high = to_change(known.value - half), to_change(known.value + half)
    seen_from = intervals.t_quantile(1 - family_level / 2, known.freedom) + intervals.t_quantile(
        POWER, known.freedom
    )
    detectable: float | None = to_change(seen_from * known.error)
    is_certain = low > 0 or high < 0
    if difference.absolute and difference.before is not None:  # a share, which is from 0 to 1
        before = difference.before
        detectable = detectable if seen_from * known.error <= max(before, 1 - before) else None
        low, high = max(low, -before), min(high, 1 - before)
    found = msgspec.structs.replace(difference, low=low, high=high, detectable=detectable, why="")
    if is_certain:
        return msgspec.structs.replace(found, word=_word_of_certain(found, known, better))
    return _equivalent_or_not(found, known, half)


def _word_of_certain(difference: Difference, known: Known, better: int) -> Word:
    """Return the word for a change whose interval does not contain zero."""
    if not difference.repeated:
        return DIFFER
    if not better:
        return "different"
    return "better" if (known.value > 0) == (better > 0) else "worse"


def _equivalent_or_not(difference: Difference, known: Known, half_width: float) -> Difference:
    """Return a change whose interval contains zero as equivalent, or as inconclusive.

    `half_width`: of the interval, on the scale of `known`.
    """
    assert difference.low is not None and difference.high is not None
    within = max(abs(difference.low), abs(difference.high))
    margin = EQUIVALENT_POINTS if difference.absolute else EQUIVALENT_CHANGE
    if within <= margin:
        return msgspec.structs.replace(difference, word="equivalent", within=within)
    scaled_margin = margin if difference.absolute else math.log1p(margin)
    from_zero = abs(known.value)
    return msgspec.structs.replace(
        difference,
        word="inconclusive",
        why="its interval is too wide to decide",
        needed=load_needed(max(from_zero, scaled_margin - from_zero), half_width),
    )


def load_needed(distance: float, half_width: float) -> float | None:
    """Return how many times as much load narrows the half width of an interval to a distance.

    The half width falls with the square root of the load. Return None if that were more than
    MOST_NEEDED times as much.
    """
    if distance <= half_width / math.sqrt(MOST_NEEDED):
        return None
    return max((half_width / distance) ** 2, 1.0)


def needed_in_words(difference: Difference, needed: float | None, runs: int) -> str:
    """Return how many runs, or how much longer runs, would decide a difference; "" if unknown."""
    if needed is None:
        return ""
    if difference.repeated:
        return f"about {max(math.ceil(runs * needed), runs + 1):,} runs a side would decide"
    return f"about {format.quantity(max(needed, 1.1), 2)} times as long a run would decide"


def fisher(hits_a: int, n_a: int, hits_b: int, n_b: int) -> float:
    """Fisher's exact test, two-sided: the probability of counts as unequal as these, or more, from equal shares."""
    hits = hits_a + hits_b
    ways = [
        math.comb(n_a, i) * math.comb(n_b, hits - i)
        for i in range(max(0, hits - n_b), min(n_a, hits) + 1)
    ]
    seen = math.comb(n_a, hits_a) * math.comb(n_b, hits_b)
    return sum(way for way in ways if way <= seen) / math.comb(n_a + n_b, hits)
