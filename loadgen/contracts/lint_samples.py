"""Check whether the load of a level is long enough, and has enough requests, for its terms.

This module is pure.
"""

from __future__ import annotations

import math

from loadgen.contracts.drafts import ContractErrors, LevelDraft, Problem
from loadgen.contracts.level_plan import LevelPlan
from loadgen.contracts.load_checks import NEARLY_FULL_LENGTH
from loadgen.contracts.sample_sizes import (
    MIN_WINDOWS,
    compute_requests_for_ratio,
    compute_required_requests,
)
from loadgen.contracts.schema import Contract
from loadgen.contracts.terms import NS_PER_S, ContractTerm
from loadgen.core import format
from loadgen.core.slo import ANSWERS
from loadgen.core.stats import intervals
from loadgen.core.workload import Poisson, Workload
from loadgen.figures import pooled_metrics

MIN_REPEATS_FOR_POOLED_GAPS = 3
"""The number of runs that a term about times between tokens needs.

These times are correlated within a run, so each run counts as one value. Two values have a very
wide interval.
"""


def check_samples(
    draft: LevelDraft, plan: LevelPlan, contract: Contract, errors: ContractErrors
) -> tuple[str, ...]:
    """Report terms that cannot pass because the load is too short or has too few requests for them.

    If the user shortened the load of a level with `--duration`, a load that is too small is no
    error: the terms that cannot pass are returned as text, and the plan shows them.

    Args:
        draft: The level with its terms.
        plan: The planned load of the level.
        contract: The contract, for its confidence and its recurrence horizon.
        errors: Collects the errors.
    """
    _check_repeats(draft, plan, errors)
    undecidable_terms = []
    for placed_term in draft.terms:
        term = placed_term.term
        location = draft.location_of(placed_term)
        if _has_too_few_runs(term, plan):
            errors.add_problem(location, term, _create_pooled_gaps_problem())
            continue

        problem = _find_sample_problem(term, plan, contract)
        if problem is None:
            continue

        if plan.is_shortened:
            undecidable_terms.append(term.text)
        else:
            errors.add_problem(location, term, problem)

    return tuple(undecidable_terms)


def _check_repeats(draft: LevelDraft, plan: LevelPlan, errors: ContractErrors) -> None:
    """Report a level that requires pauses between its runs (`apart`) but has only one run."""
    level = plan.level
    if level.apart_ns is not None and level.repeats < 2:
        location = (*draft.location, "apart")
        text = "apart is a pause between runs, but the level has only one run"
        errors.add(location, "too_few", text, "repeats: 2 or more")


def _has_too_few_runs(term: ContractTerm, plan: LevelPlan) -> bool:
    """Return whether a term is about times between tokens and the level has too few runs for it."""
    return term.kind in pooled_metrics() and plan.level.repeats < MIN_REPEATS_FOR_POOLED_GAPS


def _find_sample_problem(term: ContractTerm, plan: LevelPlan, contract: Contract) -> Problem | None:
    """Return the problem of a term whose load is too short or has too few requests, or None.

    A term without any requests, because the load has no tasks or no such class of requests, is
    skipped: `lint.py` reports it.
    """
    has_requests = plan.samples_per_start(term) > 0
    if not has_requests:
        return None
    length_problem = _find_length_problem(term, plan, contract)
    if length_problem is not None:
        return length_problem
    return _find_count_problem(term, plan, contract.confidence)


def _create_pooled_gaps_problem() -> Problem:
    """Return the problem of a term about times between tokens in a level with too few runs."""
    return Problem(
        "too_few",
        f"times between tokens need {MIN_REPEATS_FOR_POOLED_GAPS} runs for an interval",
        f"repeats: {MIN_REPEATS_FOR_POOLED_GAPS} or more; or use tpot, which is per request",
    )


def _find_length_problem(term: ContractTerm, plan: LevelPlan, contract: Contract) -> Problem | None:
    """Return the problem if the load is too short for the recurrence horizon of the contract.

    A PASS of a latency or goodput covers slowdowns of the server that recur within the horizon,
    such as 12 minutes, so the load must be long enough to meet such a slowdown.

    Return None if the load is long enough or the term is not affected by slowdowns. Return None
    also for a closed loop with a number of requests, whose length is only known after the run.
    """
    if plan.duration_ns is None or not term.is_sensitive_to_slowdowns:
        return None

    repeats = plan.level.repeats
    planned_s = plan.duration_ns / NS_PER_S * repeats
    horizon_s = contract.horizon_ns / NS_PER_S
    required_s = intervals.length_to_meet_s(horizon_s, contract.confidence)
    if planned_s >= NEARLY_FULL_LENGTH * required_s:
        return None

    runs = f" in {repeats} runs" if repeats > 1 else ""
    text = (
        f"the load is too short: {format.duration(planned_s)}{runs}, {format.duration(required_s)} "
        f"needed for the horizon of {format.duration(horizon_s)}"
    )

    # The hint names a length with which the term also has enough requests.
    sufficient_s = max(required_s, _compute_duration_for_count_s(term, plan, contract))
    covered_horizon_s = _compute_covered_horizon_s(planned_s, contract.confidence)
    return Problem("too_few", text, _format_length_hint(sufficient_s / repeats, covered_horizon_s))


def _format_length_hint(sufficient_run_s: float, covered_horizon_s: float) -> str:
    """Return the two ways to correct a load that is too short for the horizon of the contract.

    Args:
        sufficient_run_s: How long each run would have to be.
        covered_horizon_s: The longest horizon for which the planned load is long enough.
    """
    return (
        f"duration: {math.ceil(sufficient_run_s)}s or more, or a shorter horizon "
        f"(horizon: {covered_horizon_s:g}s)"
    )


def _compute_covered_horizon_s(load_s: float, confidence: float) -> float:
    """Return the longest horizon for which a load is long enough, in seconds.

    It is rounded down to tenths of a second, because a longer horizon would be refused again.
    """
    return math.floor(intervals.longest_recurrence_s(load_s, confidence) * 10) / 10


def _compute_duration_for_count_s(term: ContractTerm, plan: LevelPlan, contract: Contract) -> float:
    """Return how long a load must be so that a term gets enough requests, in seconds.

    A load consists of starts, each of which begins one request, conversation or task, so a term
    about requests may get several values from one start.

    Return 0 if the number of starts is not known before the run.
    """
    if not plan.starts or plan.duration_ns is None:
        return 0.0
    required_requests = compute_required_requests(term, contract.confidence)
    required_starts = required_requests / plan.samples_per_start(term)
    planned_s = plan.duration_ns / NS_PER_S
    return required_starts * planned_s / plan.starts


def _find_count_problem(term: ContractTerm, plan: LevelPlan, confidence: float) -> Problem | None:
    """Return the problem if the load has too few requests or windows for a term, or None.

    With too few requests a term stays INCONCLUSIVE even if every request meets its limit. A term
    that compares two windows of time needs that many requests in each window.
    """
    is_pooled = term.kind in pooled_metrics()
    if is_pooled:
        # The times between the tokens of all responses are one value per run, not per request.
        return None
    if _has_too_few_windows(term, plan):
        return _create_windows_problem(term, plan)
    if plan.starts is None:
        # The number of requests of a closed loop that is limited by time is not known yet.
        return None

    required_count = _compute_required_count(term, plan, confidence)
    expected_count = _compute_expected_count(term, plan)
    if expected_count >= required_count:
        return None

    return _create_count_problem(term, plan, required_count, expected_count)


def _create_count_problem(
    term: ContractTerm, plan: LevelPlan, required_count: int, expected_count: int
) -> Problem:
    """Return the problem of a load that has too few requests or tasks for a term.

    Args:
        term: The term.
        plan: The plan of the level.
        required_count: The number of requests or tasks that the term needs.
        expected_count: The number that the load is expected to have.
    """
    noun = "tasks" if term.is_about_tasks else "requests"
    if term.kind == ANSWERS:
        noun = "questions"
    counted_load = _describe_counted_load(term, plan)
    text = f"{required_count:,} {noun} needed to decide the term, {counted_load} {expected_count:,}"

    required_starts = required_count / plan.samples_per_start(term)
    if term.window_ns:
        hint = _format_window_hint(required_starts, plan)
    else:
        hint = _format_requests_hint(required_starts, plan)

    return Problem("too_few", text, hint)


def _has_too_few_windows(term: ContractTerm, plan: LevelPlan) -> bool:
    """Return whether a load is known to be shorter than the two windows that a term compares."""
    return plan.duration_ns is not None and plan.duration_ns < MIN_WINDOWS * term.window_ns


def _create_windows_problem(term: ContractTerm, plan: LevelPlan) -> Problem:
    """Return the problem of a load that is shorter than the two windows that a term compares."""
    assert plan.duration_ns is not None
    length = format.duration(plan.duration_ns / NS_PER_S)
    window_s = term.window_ns / NS_PER_S
    text = f"{length} of load has no two windows of {format.duration(window_s)}"
    return Problem("too_few", text, f"duration: {math.ceil(MIN_WINDOWS * window_s)}s or more")


def _compute_required_count(term: ContractTerm, plan: LevelPlan, confidence: float) -> int:
    """Return how many requests or tasks a term needs, in each window if it compares windows.

    With Poisson arrivals, chance alone makes the numbers of requests in two windows differ. A term
    that compares the rates of two windows then needs more requests.
    """
    required_count = compute_required_requests(term, confidence)
    if term.kind == "sustained" and _is_poisson(plan.workload):
        count_for_ratio = compute_requests_for_ratio(term.limit, confidence)
        required_count = max(required_count, count_for_ratio)
    return required_count


def _compute_expected_count(term: ContractTerm, plan: LevelPlan) -> int:
    """Return how many requests or tasks are expected, in each window if a term compares windows."""
    if term.window_ns and plan.rate is not None:
        return int(plan.rate * term.window_ns / NS_PER_S)
    assert plan.starts is not None
    return round(plan.starts * plan.samples_per_start(term) * plan.level.repeats)


def _describe_counted_load(term: ContractTerm, plan: LevelPlan) -> str:
    """Return the part of the load in which requests are counted, such as "the 3 runs have"."""
    if term.window_ns:
        return "each window has"
    if plan.level.repeats > 1:
        return f"the {plan.level.repeats} runs have"
    return "the run has"


def _is_poisson(workload: Workload) -> bool:
    """Return whether all measured arrivals of a workload are Poisson processes."""
    return all(isinstance(stage.arrival, Poisson) for stage in workload.stages if stage.measured)


def _format_requests_hint(required_starts: float, plan: LevelPlan) -> str:
    """Return the hint that says how many requests, or which length of each run, would be enough.

    Args:
        required_starts: The number of starts (of requests, conversations or tasks) that all runs
            together need.
        plan: The plan of the level.
    """
    starts_per_run = math.ceil(required_starts / plan.level.repeats)
    duration = _format_duration_of_starts(starts_per_run, plan)
    if not duration:
        return f"requests: {starts_per_run} or more, or a lower percentile"
    return f"requests: {starts_per_run}, or duration: {duration} or more, or a lower percentile"


def _format_window_hint(required_starts: float, plan: LevelPlan) -> str:
    """Return the hint that says which length of a window would be enough.

    Args:
        required_starts: The number of starts (of requests, conversations or tasks) that each window
            needs.
        plan: The plan of the level.
    """
    duration = _format_duration_of_starts(math.ceil(required_starts), plan)
    return f"window: {duration} or more" if duration else "use a longer window"


def _format_duration_of_starts(starts: int, plan: LevelPlan) -> str:
    """Return how long a number of starts takes, such as "193s (3 min 13 s at this rate)".

    Return "" if the starts per second are not known, as for a closed loop, or 0.
    """
    starts_per_s = plan.starts_per_s()
    if not starts_per_s:
        return ""
    seconds = starts / starts_per_s
    return f"{math.ceil(seconds)}s ({format.duration(seconds)} at this rate)"
