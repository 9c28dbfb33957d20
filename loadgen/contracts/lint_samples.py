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

    If the user shortened the load of a level with `--duration`, these are no errors: the terms are
    returned as text, and the plan shows them.

    Args:
        draft: The level with its terms.
        plan: The planned load of the level.
        contract: The contract, for its confidence and its recurrence horizon.
        errors: Collects the errors.
    """
    level = plan.level
    if level.apart_ns is not None and level.repeats < 2:
        location = (*draft.location, "apart")
        text = "apart needs at least two runs, the level has one"
        errors.add(location, "too_few", text, "repeats: 2 or more")
    undecidable_terms = []
    for placed_term in draft.terms:
        term = placed_term.term
        location = draft.location_of(placed_term)
        if term.kind in pooled_metrics() and level.repeats < MIN_REPEATS_FOR_POOLED_GAPS:
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


def _find_sample_problem(term: ContractTerm, plan: LevelPlan, contract: Contract) -> Problem | None:
    """Return the problem of a term whose load is too short or has too few requests, or None.

    A term about tasks, or about a class of requests, of which the load has none is reported
    elsewhere.
    """
    if not plan.samples_per_start(term):
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
    """Return the problem of a term if the load is too short for the contract's recurrence horizon.

    A PASS covers slowdowns of the server that recur within the horizon, so the load must be long
    enough to meet them. Terms about latency and goodput need this, because slowdowns change them.
    Return None if the load is long enough, or if its length is only known after the run: that of a
    closed loop with a number of requests.
    """
    if plan.duration_ns is None or not term.is_sensitive_to_slowdowns:
        return None
    repeats = plan.level.repeats
    load_s = plan.duration_ns / NS_PER_S * repeats
    horizon_s = contract.horizon_ns / NS_PER_S
    required_s = intervals.length_to_meet_s(horizon_s, contract.confidence)
    if load_s >= NEARLY_FULL_LENGTH * required_s:
        return None
    runs = f" in {repeats} runs" if repeats > 1 else ""
    text = (
        f"the load is too short: {format.duration(load_s)}{runs}, {format.duration(required_s)} "
        f"needed for the horizon of {format.duration(horizon_s)}"
    )
    # The hint names a length with which the term also has enough requests.
    sufficient_s = max(required_s, _compute_load_for_count_s(term, plan, contract))
    sufficient_run_s = math.ceil(sufficient_s / repeats)
    max_horizon_s = intervals.longest_recurrence_s(load_s, contract.confidence)
    # Rounded down to tenths of a second, because a longer horizon would be refused again.
    max_horizon_s = math.floor(max_horizon_s * 10) / 10
    hint = (
        f"duration: {sufficient_run_s}s or more, or a shorter horizon (horizon: {max_horizon_s:g}s)"
    )
    return Problem("too_few", text, hint)


def _compute_load_for_count_s(term: ContractTerm, plan: LevelPlan, contract: Contract) -> float:
    """Return the load in which a term gets the number of requests that it needs, in seconds.

    Return 0 if the number of starts is not known before the run.
    """
    if not plan.starts or plan.duration_ns is None:
        return 0.0
    required_requests = compute_required_requests(term, contract.confidence)
    required_starts = required_requests / plan.samples_per_start(term)
    return required_starts * plan.duration_ns / NS_PER_S / plan.starts


def _find_count_problem(term: ContractTerm, plan: LevelPlan, confidence: float) -> Problem | None:
    """Return the problem if the load has too few requests or windows for a term, or None.

    With too few requests a term stays INCONCLUSIVE even if every request meets its limit. A term
    that compares two windows needs that many requests in each window.
    """
    if term.kind in pooled_metrics():
        return None
    window_s = term.window_ns / NS_PER_S
    if plan.duration_ns is not None and plan.duration_ns < MIN_WINDOWS * term.window_ns:
        length = format.duration(plan.duration_ns / NS_PER_S)
        text = f"{length} of load has no two windows of {format.duration(window_s)}"
        hint = f"duration: {math.ceil(MIN_WINDOWS * window_s)}s or more"
        return Problem("too_few", text, hint)
    if plan.starts is None:
        # The number of requests of a closed loop that is limited by time is not known yet.
        return None
    required_count = _compute_required_count(term, plan, confidence)
    expected_count = _compute_expected_count(term, plan)
    if expected_count >= required_count:
        return None
    noun = "tasks" if term.is_about_tasks else "requests"
    scope = _describe_counted_load(term, plan)
    text = f"{required_count:,} {noun} needed to decide the term, {scope} {expected_count:,}"
    required_starts = required_count / plan.samples_per_start(term)
    hint = _format_sample_hint(required_starts, plan, is_windowed=window_s > 0)
    return Problem("too_few", text, hint)


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


def _format_sample_hint(required_starts: float, plan: LevelPlan, *, is_windowed: bool) -> str:
    """Return the hint that says how many requests, or which length of load, would be enough.

    Args:
        required_starts: The starts (of requests, conversations or tasks) that are enough, in all
            runs together or in one window.
        plan: The plan of the level.
        is_windowed: Whether the term compares two windows. Each of them needs that many starts.
    """
    runs = 1 if is_windowed else plan.level.repeats
    starts_per_run = math.ceil(required_starts / runs)
    duration = ""
    starts_per_s = plan.starts_per_s()
    if starts_per_s:  # not known for a closed loop, and 0 for an empty load
        seconds = starts_per_run / starts_per_s
        duration = f"{math.ceil(seconds)}s ({format.duration(seconds)} at this rate)"
    if is_windowed:
        return f"window: {duration} or more" if duration else "use a longer window"
    or_duration = f", or duration: {duration}" if duration else ""
    return f"requests: {starts_per_run}{or_duration} or more, or a lower percentile"
