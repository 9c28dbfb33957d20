"""Judge runs against a contract: PASS, FAIL or INCONCLUSIVE for every term.

A term passes if the whole confidence interval of its metric meets the limit, and fails if the
whole interval exceeds it. Everything else is INCONCLUSIVE, from missing data to a load generator
that was the bottleneck; the reason says what would decide. This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.contracts import run_checks
from loadgen.contracts.evaluate import CostFunction, TermEvaluator
from loadgen.contracts.level_plan import JUDGED_HERE
from loadgen.contracts.load_checks import PLANNING_MARGIN, EstimateError
from loadgen.contracts.recorded_run import MeasuredLevel, RecordedRun
from loadgen.contracts.schema import (
    ANSWERS_LEVEL,
    AnswerCheck,
    Contract,
    ContractLevel,
    Requirement,
)
from loadgen.contracts.term_estimate import TermEstimate
from loadgen.contracts.terms import NS_PER_S, ContractTerm
from loadgen.contracts.verdict import (
    FAIL,
    PASS,
    LevelVerdict,
    ReasonCode,
    TermVerdict,
    Verdict,
    level_verdict,
)
from loadgen.contracts.verdict_text import format_interval, format_metric
from loadgen.core import format
from loadgen.core.metrics import reasons
from loadgen.core.stats import intervals, students_t
from loadgen.core.stats.intervals import Interval

MAX_WIDTH_RATIO = 100
"""Widths of the interval per distance from the limit above which no reasonable sample decides."""

SIGNIFICANT_DIGITS = 9
"""Significant digits of metrics in `verdict.json`."""

EvaluateTerm = Callable[[ContractTerm], TermEstimate]
"""Returns the metric of a term. Raises EstimateError."""


class ScoredAnswers(NamedTuple):
    """The scores of the answers to the prompts of a contract.

    Attributes:
        evaluate: Returns the metric of a term about answers.
        load: How the prompts were sent, as text.
        prompts: The number of prompts.
        answered: The number of prompts with an answer.
        failure_reason: Why there are no scores, or "".
        notes: Warnings about the answers.
    """

    evaluate: EvaluateTerm
    load: str = ""
    prompts: int = 0
    answered: int = 0
    failure_reason: str = ""
    notes: tuple[str, ...] = ()


class TermDecision(NamedTuple):
    """The verdict on a metric, its reason, and the load that will decide it.

    The load is 0 if it is not known.
    """

    verdict: Verdict
    code: ReasonCode
    reason: str
    sufficient_load_s: float = 0.0


# -- levels ---------------------------------------------------------------------------------------


def judge_levels(
    contract: Contract,
    measured_levels: Mapping[str, MeasuredLevel],
    cost_function: CostFunction | None = None,
) -> tuple[LevelVerdict, ...]:
    """Return the verdict on every level of the contract, in its order."""
    return tuple(
        _judge_level(contract, level, measured_levels, cost_function) for level in contract.levels
    )


def judge_interim_analyses(
    contract: Contract,
    measured_levels: Mapping[str, MeasuredLevel],
    run_counts: Sequence[Mapping[str, int]],
    cost_function: CostFunction | None = None,
) -> tuple[LevelVerdict, ...]:
    """Return the verdict on every level of a validation that was extended.

    Each extension is followed by an interim analysis of all runs so far. Analysis k is judged at a
    confidence of 1 - (1 - confidence) / 2^(k - 1), and a term that is decided stays so. Then all
    analyses together pass a term that does not hold, or fail one that holds, with a probability of
    at most 1 - confidence: each errs on one side with half of what its confidence leaves, and the
    sum over all k is (1 - confidence) / 2 * (1 + 1/2 + 1/4 + ...).

    Args:
        contract: The contract.
        measured_levels: The runs of each level.
        run_counts: The number of runs of each level at each analysis. Empty if the validation was
            not extended.
        cost_function: Computes costs. None if there are no prices.
    """
    if not run_counts:
        return judge_levels(contract, measured_levels, cost_function)
    verdicts: tuple[LevelVerdict, ...] = ()
    confidence = contract.confidence
    for number, counts in enumerate(run_counts, start=1):
        runs_so_far = {
            name: replace(level, runs=level.runs[: counts.get(name, 0)])
            for name, level in measured_levels.items()
        }
        contract_now = contract.model_copy(update={"confidence": confidence})
        new_verdicts = tuple(
            _at_analysis(level, number)
            for level in judge_levels(contract_now, runs_so_far, cost_function)
        )
        if verdicts:
            verdicts = tuple(map(_keep_decided_terms, verdicts, new_verdicts))
        else:
            verdicts = new_verdicts
        confidence = intervals.next_interim_level(confidence)
    return verdicts


def _at_analysis(level: LevelVerdict, number: int) -> LevelVerdict:
    """Return the verdict on a level with the number of its interim analysis."""
    return replace(level, terms=tuple(replace(term, analysis=number) for term in level.terms))


def _keep_decided_terms(before: LevelVerdict, now: LevelVerdict) -> LevelVerdict:
    """Return the latest verdict on a level, with terms decided earlier unchanged.

    A term that passed or failed at an earlier interim analysis keeps that verdict. To judge it
    again at each analysis would make a wrong verdict more likely each time.
    """
    has_new_runs = len(before.runs) != len(now.runs)
    if not has_new_runs and all(term.is_decided for term in before.terms):
        return before
    terms = tuple(
        old_term if old_term.is_decided else new_term
        for old_term, new_term in zip(before.terms, now.terms, strict=True)
    )
    is_any_decided = any(term.is_decided for term in terms)
    return replace(
        now,
        terms=terms,
        verdict=level_verdict(terms),
        failure_reason="" if is_any_decided else now.failure_reason,
    )


def _judge_level(
    contract: Contract,
    level: ContractLevel,
    measured_levels: Mapping[str, MeasuredLevel],
    cost_function: CostFunction | None,
) -> LevelVerdict:
    """Return the verdict on one level, and what a reader needs to know about its runs.

    If the runs cannot be used at all, for example because one is not valid, no term is judged.
    """
    not_run = MeasuredLevel(failure_reason="it was not run")
    measured_level = measured_levels.get(level.name, not_run)
    failure_reason = run_checks.find_level_failure(level, measured_level)
    evaluator = TermEvaluator(
        _without_dropped_requests(measured_level),
        all_levels=measured_levels,
        confidence=contract.confidence,
        horizon_s=contract.horizon_ns / NS_PER_S,
        cost_function=cost_function,
    )
    judge = TermJudge(evaluator.evaluate, contract.confidence, level.name, failure_reason)
    terms = tuple(
        _withdraw_unrepresentative(judge.judge(term, requirement), term, measured_level.runs)
        for requirement, term in level.terms_by_requirement()
    )
    summaries = [run.summary for run in measured_level.runs]
    return LevelVerdict(
        name=level.name,
        verdict=level_verdict(terms),
        workload=level.workload,
        load=summaries[0].load.arrival if summaries else "",
        runs=tuple(run.folder for run in measured_level.runs),
        requests=sum(summary.requests.scheduled for summary in summaries),
        ok=sum(summary.requests.ok for summary in summaries),
        terms=terms,
        failure_reason=failure_reason,
        notes=_level_notes(measured_level.runs),
    )


def _without_dropped_requests(level: MeasuredLevel) -> MeasuredLevel:
    """Return a level without dropped requests, if the client dropped more than a few.

    The client drops a request if too many are in flight. As it was not sent, it says nothing about
    the server. A few dropped requests stay, and count as errors.
    """
    if not run_checks.find_dropped_load(level.runs):
        return level
    return replace(level, runs=tuple(run.without_dropped() for run in level.runs))


def _level_notes(runs: Sequence[RecordedRun]) -> tuple[str, ...]:
    """Return the warnings about the runs of a level, each of them once.

    A warning is left out if the contract judges the same thing itself: too few samples for an SLO,
    and a limit of the workload that the contract lifts.
    """
    notes = [run_checks.find_dropped_load(runs)]
    for run in runs:
        for warning in run.summary.verdict.warning_codes:
            is_judged_here = warning.values.get("limit") in JUDGED_HERE
            if warning.code != "slo_samples" and not is_judged_here:
                notes.append(reasons.format_reason(warning))
    notes_without_duplicates = dict.fromkeys(note for note in notes if note)
    return tuple(notes_without_duplicates)


def _withdraw_unrepresentative(
    verdict: TermVerdict, term: ContractTerm, runs: Sequence[RecordedRun]
) -> TermVerdict:
    """Return the verdict on a term, INCONCLUSIVE if its runs are not representative.

    A FAIL remains: the doubtful part is not in the metric, or speaks for the server. An exception
    is a rate that is too low because the load was not offered, which is not the fault of the
    server.
    """
    dropped_reason = run_checks.find_dropped_load(runs)
    reason = dropped_reason or run_checks.find_unrepresentative_run(runs, term)
    is_load_to_blame = bool(dropped_reason) and verdict.verdict == FAIL and not term.is_upper_bound
    if not reason or (verdict.verdict != PASS and not is_load_to_blame):
        return verdict
    return replace(
        verdict,
        verdict="INCONCLUSIVE",
        code="not_judged",
        reason=f"{verdict.reason}; but {reason}",
    )


def judge_answers(
    contract: Contract, check: AnswerCheck, scored_answers: ScoredAnswers
) -> LevelVerdict:
    """Return the verdict on the terms about answers, in the form of one more level.

    Reports then show it like that on a load. It has no runs: its requests are the prompts.
    """
    judge = TermJudge(
        scored_answers.evaluate, contract.confidence, ANSWERS_LEVEL, scored_answers.failure_reason
    )
    terms = tuple(
        judge.judge(term, requirement) for requirement, term in check.terms_by_requirement()
    )
    return LevelVerdict(
        name=ANSWERS_LEVEL,
        verdict=level_verdict(terms),
        workload=check.dataset,
        load=scored_answers.load,
        runs=(),
        requests=scored_answers.prompts,
        ok=scored_answers.answered,
        terms=terms,
        failure_reason=scored_answers.failure_reason,
        notes=scored_answers.notes,
    )


# -- terms ----------------------------------------------------------------------------------------


class TermJudge(NamedTuple):
    """Judges the terms of one level.

    Attributes:
        evaluate: Returns the metric of a term.
        confidence: The confidence of its interval.
        level: The name of the level.
        failure_reason: Why no term of the level can be judged, or "".
    """

    evaluate: EvaluateTerm
    confidence: float
    level: str
    failure_reason: str

    def judge(self, term: ContractTerm, requirement: Requirement) -> TermVerdict:
        """Return the verdict on one term.

        It is INCONCLUSIVE without a metric if the level cannot be judged, or if the records do not
        have the metric of the term.
        """
        not_judged = TermVerdict(
            term=term.text,
            level=self.level,
            requirement=requirement,
            verdict="INCONCLUSIVE",
            code="not_judged",
            reason=self.failure_reason,
        )
        if self.failure_reason:
            return not_judged
        try:
            estimate = self.evaluate(term)
        except EstimateError as error:
            return replace(
                not_judged,
                code="no_figure",
                reason=str(error),
                additional_load_s=error.additional_load_s or None,  # 0 means that it is not known
            )
        decision = compare_with_limit(term, estimate, self.confidence)
        return self._add_metric(not_judged, term, estimate, decision)

    def _add_metric(
        self,
        verdict: TermVerdict,
        term: ContractTerm,
        estimate: TermEstimate,
        decision: TermDecision,
    ) -> TermVerdict:
        """Return the verdict with the decision on a term and the metric that it rests on.

        The horizon says how rare an event may be that this load would still have met. The
        additional load is what an undecided term lacks.
        """
        horizon_s = round(intervals.longest_recurrence_s(estimate.load_s, self.confidence), 3)
        additional_load_s = None
        if decision.sufficient_load_s > estimate.load_s:
            additional_load_s = round(decision.sufficient_load_s - estimate.load_s, 3)
        effective_size = estimate.effective_size
        return replace(
            verdict,
            verdict=decision.verdict,
            code=decision.code,
            reason=decision.reason,
            value=_finite(estimate.interval.value),
            low=_finite(estimate.interval.low),
            high=_finite(estimate.interval.high),
            limit=term.limit_in_unit,
            unit=term.unit,
            sample=estimate.sample_count,
            horizon_s=horizon_s or None,  # a term about answers has no load, and so no horizon
            effective_size=None if effective_size is None else round(effective_size),
            additional_load_s=additional_load_s,
        )


def _finite(value: float) -> float | None:
    """Return a value for JSON: rounded, or None if it is infinite."""
    if not math.isfinite(value):
        return None
    return round(float(f"{value:.{SIGNIFICANT_DIGITS}g}"), 12)


def compare_with_limit(
    term: ContractTerm, estimate: TermEstimate, confidence: float
) -> TermDecision:
    """Return the verdict on a term from the interval of its metric.

    The whole interval has to be on one side of the limit. If it is not, the term is INCONCLUSIVE:
    either the sample bounds the metric on one side only, which the caveat of the estimate
    explains, or the limit is inside the interval, and the reason says how large a sample would
    decide.
    """
    interval = estimate.interval
    limit = term.limit_in_unit
    if term.is_upper_bound:
        is_met = interval.high <= limit
        is_exceeded = interval.low > limit
    else:
        is_met = interval.low >= limit
        is_exceeded = interval.high < limit
    metric_text = _metric_text(term, estimate, confidence)
    bound = "at most" if term.is_upper_bound else "at least"
    promise = f"the promise of {bound} {format_metric(limit, term.unit)}"
    if is_met:
        return TermDecision("PASS", "kept", f"{metric_text} keeps {promise}")
    if is_exceeded:
        return TermDecision("FAIL", "broken", f"{metric_text} breaks {promise}")
    if estimate.caveat:
        reason = f"{_value_text(term, interval)} in this sample; {estimate.caveat}"
        return TermDecision("INCONCLUSIVE", "one_sided", reason, estimate.sufficient_load_s)
    required = _find_required_sample(term, estimate, confidence)
    return TermDecision(
        "INCONCLUSIVE",
        "held_by_interval",
        f"{metric_text}: the interval holds {promise}; {required.text}",
        required.load_s,
    )


def _metric_text(term: ContractTerm, estimate: TermEstimate, confidence: float) -> str:
    """Return the metric of a term, its interval, and the part of the load that it is from."""
    value = _value_text(term, estimate.interval)
    ends = format_interval(estimate.interval, term.unit)
    load_part = f", {estimate.load_part}" if estimate.load_part else ""
    return f"{value} ({ends} at {confidence * 100:g} %{load_part})"


def _value_text(term: ContractTerm, interval: Interval) -> str:
    """Return the metric of a term with its unit, or what an infinite metric means."""
    if math.isinf(interval.value):
        return "not back" if term.kind == "recovery" else "a failed request"
    return format_metric(interval.value, term.unit)


class RequiredSample(NamedTuple):
    """The sample that would decide a term, as text, and its load (0 if it is not known)."""

    text: str
    load_s: float = 0.0


def _find_required_sample(
    term: ContractTerm, estimate: TermEstimate, confidence: float
) -> RequiredSample:
    """Return the sample that would decide a term whose limit is inside the interval.

    It assumes that the metric stays as it is and that only its interval shrinks as the sample
    grows.
    """
    factor = _required_factor(estimate.interval, term.limit_in_unit, confidence)
    if factor is None:
        return RequiredSample("more are needed")
    if math.isinf(factor):
        return RequiredSample("the two are too close for any sample of reasonable size")
    load_s = max(factor * estimate.load_s, estimate.sufficient_load_s)
    if term.is_about_tasks:
        noun = "tasks"
    elif estimate.load_s:
        noun = "requests"
    else:
        noun = "prompts"
    load = f", {format.duration(load_s)} of load," if load_s else ""
    count = math.ceil(estimate.sample_count * factor)
    return RequiredSample(f"about {count:,} {noun}{load} would decide it", load_s)


def _required_factor(interval: Interval, limit: float, confidence: float) -> float | None:
    """Return how many times larger a sample must be to decide at the next analysis.

    The width of an interval shrinks with the square root of the sample size. Return infinity if
    the limit is too close to the metric, and None if the interval has no end on the side of the
    limit.
    """
    value = interval.value
    half_width = value - interval.low if value > limit else interval.high - value
    distance = abs(limit - value)
    if not math.isfinite(half_width):
        return None
    if not distance or half_width / distance > MAX_WIDTH_RATIO:
        return math.inf
    next_z = students_t.z_quantile(intervals.next_interim_level(confidence))
    z_ratio = next_z / students_t.z_quantile(confidence)
    return (half_width / distance * z_ratio) ** 2 * PLANNING_MARGIN
