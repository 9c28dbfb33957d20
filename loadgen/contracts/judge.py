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
from loadgen.contracts.load_checks import PLANNING_MARGIN, EstimateError, UnmeasurableError
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
    """The scores of the responses to the prompts of a contract.

    Attributes:
        evaluate: Returns the metric of a term about responses.
        load: How the prompts were sent, as text.
        prompts: The number of prompts.
        answered: The number of prompts with a response.
        failure_reason: Why there are no scores, or "".
        notes: Warnings about the responses.
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

    Each analysis has a chance to err, so each has a higher confidence than the one before it:
    95 %, 97.5 %, 98.75 % and so on (error spending). The chances to err in one direction are then
    2.5 %, 1.25 %, 0.625 %, ..., which add up to at most 5 %, however many analyses there are.

    Args:
        contract: The contract.
        measured_levels: The runs of each level.
        run_counts: The number of runs of each level at each analysis. Empty if the validation was
            not extended.
        cost_function: Computes costs. None if there are no prices.
    """
    if not run_counts:
        return judge_levels(contract, measured_levels, cost_function)

    confidence = contract.confidence
    verdicts: tuple[LevelVerdict, ...] = ()
    for analysis_number, counts in enumerate(run_counts, start=1):
        contract_of_analysis = contract.model_copy(update={"confidence": confidence})
        runs_of_analysis = _select_first_runs(measured_levels, counts)
        new_verdicts = judge_levels(contract_of_analysis, runs_of_analysis, cost_function)
        new_verdicts = tuple(_with_analysis(level, analysis_number) for level in new_verdicts)

        is_first_analysis = analysis_number == 1
        if is_first_analysis:
            verdicts = new_verdicts
        else:
            verdicts = tuple(map(_keep_decided_terms, verdicts, new_verdicts))

        confidence = intervals.next_interim_level(confidence)

    return verdicts


def _select_first_runs(
    measured_levels: Mapping[str, MeasuredLevel], run_counts: Mapping[str, int]
) -> dict[str, MeasuredLevel]:
    """Return the levels with the runs that they had at an earlier analysis.

    Args:
        measured_levels: The levels with all their runs, in the order in which they were made.
        run_counts: Level -> the number of runs that it had. A level that is not in it had none.
    """
    return {
        name: replace(level, runs=level.runs[: run_counts.get(name, 0)])
        for name, level in measured_levels.items()
    }


def _with_analysis(level: LevelVerdict, analysis: int) -> LevelVerdict:
    """Return the verdict on a level with the number of the interim analysis that it is from."""
    return replace(level, terms=tuple(replace(term, analysis=analysis) for term in level.terms))


def _keep_decided_terms(earlier: LevelVerdict, latest: LevelVerdict) -> LevelVerdict:
    """Return the latest verdict on a level, with terms that were decided earlier unchanged.

    A term that passed or failed in an earlier interim analysis keeps that verdict. To judge it
    again in each analysis would make a wrong verdict more likely each time.
    """
    has_new_runs = len(earlier.runs) != len(latest.runs)
    was_fully_decided = all(term.is_decided for term in earlier.terms)
    if was_fully_decided and not has_new_runs:
        return earlier  # nothing about the level can have changed

    terms = tuple(
        earlier_term if earlier_term.is_decided else latest_term
        for earlier_term, latest_term in zip(earlier.terms, latest.terms, strict=True)
    )

    # The failure reason says that no term could be judged, which is wrong if one was.
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

    If the runs cannot be used at all, for example because one is INVALID, no term is judged. If the
    client dropped requests, because too many were in flight, the terms are evaluated without these
    requests, and verdicts that may be wrong because of them become INCONCLUSIVE.

    Args:
        contract: The contract.
        level: The level.
        measured_levels: The runs of all levels, because a term may compare two levels.
        cost_function: Computes costs. None if there are no prices.
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

    terms = []
    for requirement, term in level.terms_by_requirement():
        verdict = judge.judge(term, requirement)
        terms.append(_discount_misleading_runs(verdict, term, measured_level.runs))

    return _create_level_verdict(level, terms, measured_level.runs, failure_reason)


def _create_level_verdict(
    level: ContractLevel,
    terms: Sequence[TermVerdict],
    runs: Sequence[RecordedRun],
    failure_reason: str,
) -> LevelVerdict:
    """Return the verdict on a level from the verdicts on its terms, with facts about its runs.

    Args:
        level: The level.
        terms: The verdict on each term.
        runs: The runs of the level.
        failure_reason: Why no term could be judged, or "".
    """
    summaries = [run.summary for run in runs]
    return LevelVerdict(
        name=level.name,
        verdict=decide_level_verdict(terms),
        workload=level.workload,
        load=summaries[0].load.arrival if summaries else "",
        runs=tuple(run.folder for run in runs),
        requests=sum(summary.requests.scheduled for summary in summaries),
        ok=sum(summary.requests.ok for summary in summaries),
        terms=tuple(terms),
        failure_reason=failure_reason,
        notes=_collect_level_notes(runs),
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

    Two kinds of warnings of a run are left out, because the verdicts on the terms say the same:

    - A warning that there are too few requests for the SLO (`slo_samples`).
    - A warning that a limit is exceeded which the contract judges itself.
    """
    notes = [run_checks.find_dropped_load(runs)]
    for run in runs:
        for warning in run.summary.verdict.warning_codes:
            is_about_sample_size = warning.code == "slo_samples"
            is_judged_by_contract = warning.values.get("limit") in LIMITS_JUDGED_BY_CONTRACT
            if not is_about_sample_size and not is_judged_by_contract:
                notes.append(reasons.format_reason(warning))

    unique_notes = dict.fromkeys(note for note in notes if note)
    return tuple(unique_notes)


def _discount_misleading_runs(
    verdict: TermVerdict, term: ContractTerm, runs: Sequence[RecordedRun]
) -> TermVerdict:
    """Return the verdict on a term, or INCONCLUSIVE if its runs are misleading about the server.

    - Dropped requests, shorter responses and responses without TPOT make the server look better
      than it is, so a PASS is not trusted. A FAIL is, because the server failed although its task
      was easier.
    - If the client dropped requests, the server got less work. A rate below its minimum may then be
      the fault of the client, so such a FAIL is not trusted.

    Args:
        verdict: The verdict on the metric.
        term: The term.
        runs: The runs of the level.
    """
    dropped_reason = run_checks.find_dropped_load(runs)
    misleading_reason = dropped_reason or run_checks.find_unrepresentative_run(runs, term)
    if not misleading_reason:
        return verdict

    is_pass = verdict.verdict == PASS
    is_below_minimum = verdict.verdict == FAIL and not term.is_upper_bound
    may_be_caused_by_client = is_below_minimum and dropped_reason != ""
    is_trusted = not (is_pass or may_be_caused_by_client)
    if is_trusted:
        return verdict

    return replace(
        verdict,
        verdict="INCONCLUSIVE",
        code="not_judged",
        reason=f"{verdict.reason}; not counted, because {misleading_reason}",
    )


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
                code="unmeasurable" if isinstance(error, UnmeasurableError) else "no_figure",
                reason=str(error),
                additional_load_s=error.additional_load_s or None,  # 0 means that it is not known
            )

        decision = compare_with_limit(term, estimate, self.confidence)
        return self._add_decision(not_judged, term, estimate, decision)

    def _add_decision(
        self,
        not_judged: TermVerdict,
        term: ContractTerm,
        estimate: TermEstimate,
        decision: TermDecision,
    ) -> TermVerdict:
        """Return the verdict on a term, with the metric that it is based on.

        Numbers are rounded, so that `verdict.json` is the same whenever it is computed again from
        the same records.

        Args:
            not_judged: The verdict without a decision, which names the term and the level.
            term: The term.
            estimate: The metric with its confidence interval.
            decision: The result of the comparison of the metric with the limit.
        """
        effective_size = estimate.effective_size
        return replace(
            not_judged,
            verdict=decision.verdict,
            code=decision.code,
            reason=decision.reason,
            value=_round_for_json(estimate.interval.value),
            low=_round_for_json(estimate.interval.low),
            high=_round_for_json(estimate.interval.high),
            limit=term.limit_in_unit,
            unit=term.unit,
            sample=estimate.sample_count,
            horizon_s=self._compute_covered_horizon_s(estimate),
            effective_size=None if effective_size is None else round(effective_size),
            additional_load_s=_compute_additional_load_s(estimate, decision),
        )

    def _compute_covered_horizon_s(self, estimate: TermEstimate) -> float | None:
        """Return how rarely a slowdown of the server may recur so that the load has met it.

        The result is the longest mean time between such slowdowns, in seconds, for which the load
        contains one with the confidence of the interval. It is None for a metric without a load,
        such as a score of responses.
        """
        horizon_s = round(intervals.longest_recurrence_s(estimate.load_s, self.confidence), 3)
        return horizon_s if horizon_s > 0 else None


def _compute_additional_load_s(estimate: TermEstimate, decision: TermDecision) -> float | None:
    """Return how much load an undecided term lacks, in seconds. None if it lacks none."""
    if decision.sufficient_load_s <= estimate.load_s:
        return None
    return round(decision.sufficient_load_s - estimate.load_s, 3)


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
    - INCONCLUSIVE if the load was too short, so that one end of the interval is not known. The
      caveat of the estimate says why.
    - INCONCLUSIVE if the limit is inside the interval. The reason says how large a sample would
      decide the term.

    Args:
        term: The term.
        estimate: Its metric with an interval.
        confidence: The confidence of the interval.
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

    deciding_sample = _estimate_deciding_sample(term, estimate, confidence)
    sample_text = _describe_deciding_sample(term, estimate, deciding_sample)
    reason = f"{metric}, {limit}; the interval contains the limit: {sample_text}"
    sufficient_load_s = 0.0 if deciding_sample is None else deciding_sample.load_s

    return TermDecision("INCONCLUSIVE", "held_by_interval", reason, sufficient_load_s)


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


class DecidingSample(NamedTuple):
    """The sample that would decide a term.

    Attributes:
        size: The number of requests, tasks or prompts. Infinite if the metric is so close to the
            limit that no sample of practical size decides it.
        load_s: The load that gives this number. 0 if it is not known.
    """

    size: float
    load_s: float = 0.0


def _estimate_deciding_sample(
    term: ContractTerm, estimate: TermEstimate, confidence: float
) -> DecidingSample | None:
    """Return the sample that would decide a term whose limit is inside the interval of its metric.

    The metric is assumed to stay as it is, while its interval shrinks as the sample grows. Return
    None if it cannot be estimated.

    Args:
        term: The term.
        estimate: Its metric with an interval.
        confidence: The confidence of the interval.
    """
    growth = _compute_required_growth(estimate.interval, term.limit_in_unit, confidence)
    if growth is None:
        return None
    if math.isinf(growth):
        return DecidingSample(math.inf)

    return DecidingSample(
        size=math.ceil(estimate.sample_count * growth),
        load_s=max(growth * estimate.load_s, estimate.sufficient_load_s),
    )


def _describe_deciding_sample(
    term: ContractTerm, estimate: TermEstimate, sample: DecidingSample | None
) -> str:
    """Return which sample would decide a term.

    For example "about 1,200 requests (10 min 00 s of load) would decide it".
    """
    if sample is None:
        return "a larger sample is needed"
    if math.isinf(sample.size):
        return "the metric is too close to the limit to decide by measuring"
    load = f" ({format.duration(sample.load_s)} of load)" if sample.load_s else ""
    noun = _get_sample_noun(term, estimate)
    return f"about {sample.size:,.0f} {noun}{load} would decide it"


def _get_sample_noun(term: ContractTerm, estimate: TermEstimate) -> str:
    """Return what the sample of a term consists of."""
    if term.is_about_tasks:
        return "tasks"
    # Only the prompts of a term about responses are sent without a load.
    return "requests" if estimate.load_s else "prompts"


def _compute_required_growth(interval: Interval, limit: float, confidence: float) -> float | None:
    """Return how many times larger a sample must be to decide a term at the next interim analysis.

    A term is undecided while its limit is inside the confidence interval of its metric. To decide
    it, the half width of the interval (on the side of the limit) must shrink to the distance from
    the metric to the limit. A half width is proportional to z / sqrt(n) for the sample size n and
    the normal quantile z of the confidence. The next analysis of the extended sample has a higher
    confidence, and so a larger z.

    Args:
        interval: The interval of the metric, which contains the limit.
        limit: The limit in the unit of the interval.
        confidence: The confidence of the interval.

    Returns:
        The factor, infinity if the limit is too close to the metric, or None if the interval has no
        end on the side of the limit.
    """
    half_width = _get_half_width_towards(interval, limit)
    if not math.isfinite(half_width):
        return None

    distance = abs(limit - interval.value)
    if distance == 0 or half_width / distance > MAX_WIDTH_RATIO:
        return math.inf

    z = students_t.z_quantile(confidence)
    next_z = students_t.z_quantile(intervals.next_interim_level(confidence))
    widening_at_next_analysis = next_z / z
    required_shrinkage = half_width / distance * widening_at_next_analysis

    # A half width shrinks with the square root of the sample. The margin allows for chance.
    return required_shrinkage**2 * PLANNING_MARGIN


def _get_half_width_towards(interval: Interval, limit: float) -> float:
    """Return the distance from the value of an interval to its end on the side of a limit."""
    is_limit_below = limit < interval.value
    if is_limit_below:
        return interval.value - interval.low
    return interval.high - interval.value
