"""Judge runs against a contract: PASS, FAIL or INCONCLUSIVE for every term.

A term passes if the whole confidence interval of its metric meets the limit, and fails if the whole
interval violates it. Everything else is INCONCLUSIVE, with the reason and, if it is known, the load
that would decide the term. This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.contracts import run_checks
from loadgen.contracts.evaluate import CostFunction, TermEvaluator
from loadgen.contracts.level_plan import LIMITS_JUDGED_BY_CONTRACT
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
    decide_level_verdict,
)
from loadgen.contracts.verdict_text import format_interval, format_metric
from loadgen.core import format
from loadgen.core.metrics import reasons
from loadgen.core.stats import intervals, students_t
from loadgen.core.stats.intervals import Interval

MAX_WIDTH_RATIO = 100
"""The largest ratio of an interval's half width to the metric's distance from the limit for which a
sample size is recommended. The recommended sample is 100 ** 2 times the measured one.
"""

SIGNIFICANT_DIGITS = 9
"""Significant digits of metrics in `verdict.json`.

The last digits of a float depend on the order of a sum, and so on the version of numpy.
"""

DECIMAL_PLACES = 12
"""Decimal places of metrics in `verdict.json`."""

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
    """The verdict on a term.

    Attributes:
        verdict: The verdict.
        code: The code of the reason.
        reason: The reason, for people.
        sufficient_load_s: The load of all runs that decides the term if the server continues as it
            did. 0 if it is not known.
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

    Each extension adds runs, followed by an interim analysis of all runs so far. A term that is
    decided in one analysis stays decided.

    Each analysis has a chance to err, so later ones are judged at a higher confidence: analysis k
    at 1 - (1 - confidence) / 2^(k - 1). Each analysis errs on one side with half of the probability
    that its confidence leaves. The sum over all k is (1 - confidence) / 2 * (1 + 1/2 + 1/4 + ...),
    so all analyses together give a wrong verdict with a probability of at most 1 - confidence.

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
    for analysis, counts in enumerate(run_counts, start=1):
        runs_so_far = {
            name: replace(level, runs=level.runs[: counts.get(name, 0)])
            for name, level in measured_levels.items()
        }
        contract_of_analysis = contract.model_copy(update={"confidence": confidence})
        new_verdicts = tuple(
            _with_analysis(level, analysis)
            for level in judge_levels(contract_of_analysis, runs_so_far, cost_function)
        )
        if verdicts:
            verdicts = tuple(map(_keep_decided_terms, verdicts, new_verdicts))
        else:
            verdicts = new_verdicts
        confidence = intervals.next_interim_level(confidence)
    return verdicts


def _with_analysis(level: LevelVerdict, analysis: int) -> LevelVerdict:
    """Return the verdict on a level with the number of the interim analysis that it is from."""
    return replace(level, terms=tuple(replace(term, analysis=analysis) for term in level.terms))


def _keep_decided_terms(earlier: LevelVerdict, latest: LevelVerdict) -> LevelVerdict:
    """Return the latest verdict on a level, with terms that were decided earlier unchanged.

    A term that passed or failed in an earlier interim analysis keeps that verdict. To judge it
    again in each analysis would make a wrong verdict more likely each time.
    """
    has_new_runs = len(earlier.runs) != len(latest.runs)
    if not has_new_runs and all(term.is_decided for term in earlier.terms):
        return earlier
    terms = tuple(
        earlier_term if earlier_term.is_decided else latest_term
        for earlier_term, latest_term in zip(earlier.terms, latest.terms, strict=True)
    )
    is_any_decided = any(term.is_decided for term in terms)
    return replace(
        latest,
        terms=terms,
        verdict=decide_level_verdict(terms),
        failure_reason="" if is_any_decided else latest.failure_reason,
    )


def _judge_level(
    contract: Contract,
    level: ContractLevel,
    measured_levels: Mapping[str, MeasuredLevel],
    cost_function: CostFunction | None,
) -> LevelVerdict:
    """Return the verdict on one level, with the load and the warnings of its runs.

    If the runs cannot be used at all, for example because one is INVALID, no term is judged.
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
        _withdraw_verdict_of_unrepresentative_runs(
            judge.judge(term, requirement), term, measured_level.runs
        )
        for requirement, term in level.terms_by_requirement()
    )
    summaries = [run.summary for run in measured_level.runs]
    return LevelVerdict(
        name=level.name,
        verdict=decide_level_verdict(terms),
        workload=level.workload,
        load=summaries[0].load.arrival if summaries else "",
        runs=tuple(run.folder for run in measured_level.runs),
        requests=sum(summary.requests.scheduled for summary in summaries),
        ok=sum(summary.requests.ok for summary in summaries),
        terms=terms,
        failure_reason=failure_reason,
        notes=_collect_level_notes(measured_level.runs),
    )


def _without_dropped_requests(level: MeasuredLevel) -> MeasuredLevel:
    """Return a level without dropped requests, if the client dropped more than a few.

    The client drops a request if its limit on requests in flight is reached. A dropped request was
    not sent, so it does not show what the server can do. A few dropped requests are kept and count
    as errors.
    """
    if not run_checks.find_dropped_load(level.runs):
        return level
    return replace(level, runs=tuple(run.exclude_dropped() for run in level.runs))


def _collect_level_notes(runs: Sequence[RecordedRun]) -> tuple[str, ...]:
    """Return the warnings about the runs of a level, each of them once.

    Two warnings are left out, because the verdict on the terms says the same: that there are too
    few requests for an SLO, and that a limit is exceeded which the contract judges itself.
    """
    notes = [run_checks.find_dropped_load(runs)]
    for run in runs:
        for warning in run.summary.verdict.warning_codes:
            is_judged_by_contract = warning.values.get("limit") in LIMITS_JUDGED_BY_CONTRACT
            if warning.code != "slo_samples" and not is_judged_by_contract:
                notes.append(reasons.format_reason(warning))
    unique_notes = dict.fromkeys(note for note in notes if note)
    return tuple(unique_notes)


def _withdraw_verdict_of_unrepresentative_runs(
    verdict: TermVerdict, term: ContractTerm, runs: Sequence[RecordedRun]
) -> TermVerdict:
    """Return the verdict on a term, or INCONCLUSIVE if its runs do not represent the workload.

    Dropped requests, shorter responses and responses without TPOT make the server look better than
    it is. So a PASS of such runs is withdrawn, and a FAIL is kept. There is one exception: a rate
    that is below its minimum because the client dropped requests is not a FAIL of the server.

    Args:
        verdict: The verdict on the metric.
        term: The term.
        runs: The runs of the level.
    """
    dropped_reason = run_checks.find_dropped_load(runs)
    reason = dropped_reason or run_checks.find_unrepresentative_run(runs, term)
    if not reason:
        return verdict
    is_minimum_missed = verdict.verdict == FAIL and not term.is_upper_bound
    is_fail_of_client = is_minimum_missed and bool(dropped_reason)
    if verdict.verdict == PASS or is_fail_of_client:
        return replace(
            verdict,
            verdict="INCONCLUSIVE",
            code="not_judged",
            reason=f"{verdict.reason}; not counted, because {reason}",
        )
    return verdict


def judge_answers(
    contract: Contract, check: AnswerCheck, scored_answers: ScoredAnswers
) -> LevelVerdict:
    """Return the verdict on the terms about responses, in the form of one more level.

    Reports can then show it like the verdict on a load. It has no runs, and its requests are the
    prompts.
    """
    judge = TermJudge(
        scored_answers.evaluate, contract.confidence, ANSWERS_LEVEL, scored_answers.failure_reason
    )
    terms = tuple(
        judge.judge(term, requirement) for requirement, term in check.terms_by_requirement()
    )
    return LevelVerdict(
        name=ANSWERS_LEVEL,
        verdict=decide_level_verdict(terms),
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
        evaluate: Returns the metric of a term with its interval.
        confidence: The confidence of the interval.
        level: The name of the level.
        failure_reason: Why no term of the level can be judged, or "".
    """

    evaluate: EvaluateTerm
    confidence: float
    level: str
    failure_reason: str

    def judge(self, term: ContractTerm, requirement: Requirement) -> TermVerdict:
        """Return the verdict on one term.

        It is INCONCLUSIVE without a metric if the level cannot be judged, or if the metric cannot
        be computed from the records. Otherwise the metric is compared with the limit.

        Args:
            term: The term.
            requirement: The list of the contract that the term is in: `must` or `should`.
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
        """Return a verdict that has the decision on a term and the metric that it is based on.

        The recurrence horizon of the verdict follows from the length of the load: slowdowns that
        recur less often on average may have been missed. The additional load is what an undecided
        term lacks. Numbers are rounded, because `verdict.json` has to be equal when it is made
        again.

        Args:
            verdict: The verdict without a metric.
            term: The term.
            estimate: The metric.
            decision: The result of the comparison of the metric with the limit.
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
            value=_round_for_json(estimate.interval.value),
            low=_round_for_json(estimate.interval.low),
            high=_round_for_json(estimate.interval.high),
            limit=term.limit_in_unit,
            unit=term.unit,
            sample=estimate.sample_count,
            horizon_s=horizon_s or None,  # a term about responses has no load, and so no horizon
            effective_size=None if effective_size is None else round(effective_size),
            additional_load_s=additional_load_s,
        )


def _round_for_json(value: float) -> float | None:
    """Return a value for JSON: rounded, or None if it is infinite."""
    if not math.isfinite(value):
        return None
    return round(float(f"{value:.{SIGNIFICANT_DIGITS}g}"), DECIMAL_PLACES)


def compare_with_limit(
    term: ContractTerm, estimate: TermEstimate, confidence: float
) -> TermDecision:
    """Return the verdict on a term by comparing the interval of its metric with its limit.

    The outcomes, in this order:

    - PASS if the whole interval meets the limit.
    - FAIL if the whole interval violates it.
    - INCONCLUSIVE (`one_sided`) if the load was too short for both ends of the interval. The caveat
      of the estimate says why.
    - INCONCLUSIVE (`held_by_interval`) if the limit is inside the interval. The reason says how
      large a sample would decide the term.
    """
    metric = _describe_metric(term, estimate, confidence)
    limit = format_limit(term)
    if _is_met(term, estimate.interval):
        return TermDecision("PASS", "kept", f"{metric}, {limit}")
    if _is_violated(term, estimate.interval):
        return TermDecision("FAIL", "broken", f"{metric}, {limit}")
    if estimate.caveat:
        value = _format_value(term, estimate.interval)
        reason = f"{value} so far; {estimate.caveat}"
        return TermDecision("INCONCLUSIVE", "one_sided", reason, estimate.sufficient_load_s)
    required_sample = _find_required_sample(term, estimate, confidence)
    reason = f"{metric}, {limit}; the interval contains the limit: {required_sample.text}"
    return TermDecision("INCONCLUSIVE", "held_by_interval", reason, required_sample.load_s)


def _is_met(term: ContractTerm, interval: Interval) -> bool:
    """Return whether the whole interval of a metric meets the limit of a term."""
    if term.is_upper_bound:
        return interval.high <= term.limit_in_unit
    return interval.low >= term.limit_in_unit


def _is_violated(term: ContractTerm, interval: Interval) -> bool:
    """Return whether the whole interval of a metric violates the limit of a term."""
    if term.is_upper_bound:
        return interval.low > term.limit_in_unit
    return interval.high < term.limit_in_unit


def format_limit(term: ContractTerm) -> str:
    """Return the limit of a term, such as "limit 500 ms", or "minimum 99 %" for a lower bound."""
    noun = "limit" if term.is_upper_bound else "minimum"
    return f"{noun} {format_metric(term.limit_in_unit, term.unit)}"


def _describe_metric(term: ContractTerm, estimate: TermEstimate, confidence: float) -> str:
    """Return the metric of a term with its interval and the part of the load that it is from.

    For example "94.3 ms (95 % CI 94.1 ms to 94.6 ms, steady state from 1 min 29 s)".
    """
    value = _format_value(term, estimate.interval)
    ends = format_interval(estimate.interval, term.unit)
    load_description = f", {estimate.load_description}" if estimate.load_description else ""
    return f"{value} ({confidence * 100:g} % CI {ends}{load_description})"


def _format_value(term: ContractTerm, interval: Interval) -> str:
    """Return the metric of a term with its unit, or what an infinite metric means."""
    if not math.isinf(interval.value):
        return format_metric(interval.value, term.unit)
    if term.kind == "recovery":
        return "not recovered"
    return "a failed request"


class RequiredSample(NamedTuple):
    """The sample that would decide a term, as text, and its load (0 if it is not known)."""

    text: str
    load_s: float = 0.0


def _find_required_sample(
    term: ContractTerm, estimate: TermEstimate, confidence: float
) -> RequiredSample:
    """Return the sample that would decide a term whose limit is inside the interval.

    The metric is assumed to stay as it is, while its interval shrinks as the sample grows.
    """
    factor = _compute_required_factor(estimate.interval, term.limit_in_unit, confidence)
    if factor is None:
        return RequiredSample("a larger sample is needed")
    if math.isinf(factor):
        return RequiredSample("the metric is too close to the limit to decide by measuring")
    load_s = max(factor * estimate.load_s, estimate.sufficient_load_s)
    count = math.ceil(estimate.sample_count * factor)
    load = f" ({format.duration(load_s)} of load)" if load_s else ""
    sample = f"{count:,} {_get_sample_noun(term, estimate)}{load}"
    return RequiredSample(f"about {sample} would decide it", load_s)


def _get_sample_noun(term: ContractTerm, estimate: TermEstimate) -> str:
    """Return what the sample of a term consists of."""
    if term.is_about_tasks:
        return "tasks"
    # Only the prompts of a term about responses are sent without a load.
    return "requests" if estimate.load_s else "prompts"


def _compute_required_factor(interval: Interval, limit: float, confidence: float) -> float | None:
    """Return how many times larger a sample must be to decide a term at the next interim analysis.

    The half width of an interval shrinks with the square root of the sample size. It has to become
    as small as the distance from the metric to the limit. The next analysis has a higher
    confidence, so its interval is wider by the ratio of the two normal quantiles.

    Args:
        interval: The interval of the metric, which contains the limit.
        limit: The limit in the unit of the interval.
        confidence: The confidence of the interval.

    Returns:
        The factor, infinity if the limit is too close to the metric, or None if the interval has no
        end on the side of the limit.
    """
    value = interval.value
    half_width = value - interval.low if value > limit else interval.high - value
    distance = abs(limit - value)
    if not math.isfinite(half_width):
        return None
    if distance == 0 or half_width / distance > MAX_WIDTH_RATIO:
        return math.inf
    next_z = students_t.z_quantile(intervals.next_interim_level(confidence))
    z_ratio = next_z / students_t.z_quantile(confidence)
    return (half_width / distance * z_ratio) ** 2 * PLANNING_MARGIN
