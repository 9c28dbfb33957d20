"""Check whether the load of a level is long enough, and has enough requests, for its terms.

This module is pure.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from loadgen.contracts.drafts import ContractErrors, LevelDraft, Problem
from loadgen.contracts.level_plan import LevelPlan
from loadgen.contracts.load_checks import NEARLY_FULL_LENGTH
from loadgen.contracts.sample_sizes import MIN_WINDOWS, requests_for_ratio, required_requests
from loadgen.contracts.schema import Contract
from loadgen.contracts.terms import NS_PER_S, ContractTerm
from loadgen.core import format
from loadgen.core.stats import intervals
from loadgen.core.workload import Poisson, Workload
from loadgen.figures import pooled_metrics

MIN_REPEATS_FOR_POOLED_GAPS = 3
"""Runs that a term about pooled gaps needs: gaps are correlated within a run, so each run is one
sample.
"""


def check_samples(
    draft: LevelDraft, plan: LevelPlan, contract: Contract, errors: ContractErrors
) -> LevelPlan:
    """Report terms that cannot pass because the load is too short or has too few requests for them.

    For a level whose load the user shortened these are no errors: the returned plan names the
    terms.
    """
    level = plan.level
    if level.apart_ns is not None and level.repeats < 2:
        location = (*draft.location, "apart")
        text = "runs are to be apart in time, and there is one"
        errors.add(location, "too_few", text, "repeats: 2 or more")
    undecidable = []
    for placed_term in draft.terms:
        term = placed_term.term
        location = draft.location_of(placed_term)
        if term.kind in pooled_metrics() and level.repeats < MIN_REPEATS_FOR_POOLED_GAPS:
            errors.add_problem(location, term, _pooled_gaps_problem())
            continue
        if not plan.units_per_start(term):
            continue
        problem = _find_length_problem(term, plan, contract)
        if problem is None:
            problem = _find_count_problem(term, plan, contract.confidence)
        if problem is None:
            continue
        if plan.is_shortened:
            undecidable.append(term.text)
        else:
            errors.add_problem(location, term, problem)
    return replace(plan, undecidable=tuple(undecidable))


def _pooled_gaps_problem() -> Problem:
    """Return the problem of a term about gaps between tokens in a level with too few runs."""
    return Problem(
        "too_few",
        "gaps within an answer hang together, so one run has no interval for them",
        f"repeats: {MIN_REPEATS_FOR_POOLED_GAPS} or more; or promise tpot, which is per request",
    )


def _find_length_problem(term: ContractTerm, plan: LevelPlan, contract: Contract) -> Problem | None:
    """Return the problem if the load is too short to meet rare events, or None.

    Only latencies and shares of good requests need a length. How long a closed loop with a number
    of requests takes is known only after the run.
    """
    needs_length = term.is_latency or term.kind in ("goodput", "task_goodput", "fairness")
    if plan.duration_ns is None or not needs_length:
        return None
    repeats = plan.level.repeats
    load_s = plan.duration_ns / NS_PER_S * repeats
    horizon_s = contract.horizon_ns / NS_PER_S
    required_s = intervals.length_to_meet_s(horizon_s, contract.confidence)
    if load_s >= NEARLY_FULL_LENGTH * required_s:
        return None
    runs = f" in {repeats} runs" if repeats > 1 else ""
    text = (
        f"needs {format.duration(required_s)} of load to be shown, to see what comes back within "
        f"{format.duration(horizon_s)}; there are {format.duration(load_s)}{runs}"
    )
    required_starts = required_requests(term, contract.confidence) / plan.units_per_start(term)
    starts_per_run = math.inf if not plan.starts else plan.starts
    s_for_starts = required_starts * load_s / repeats / starts_per_run
    run_s = math.ceil(max(required_s, s_for_starts) / repeats)
    # Rounded down to tenths of a second, because a longer horizon would be refused again.
    covered_s = math.floor(intervals.longest_recurrence_s(load_s, contract.confidence) * 10) / 10
    hint = f"duration: {run_s}s or more; or, to promise less, horizon: {covered_s:g}s"
    return Problem("too_few", text, hint)


def _find_count_problem(term: ContractTerm, plan: LevelPlan, confidence: float) -> Problem | None:
    """Return the problem if the load has too few requests or windows for a term, or None.

    With too few requests a term stays INCONCLUSIVE even if every request meets its limit. A term
    with a window needs so many requests in each window.
    """
    if term.kind in pooled_metrics():
        return None
    window_s = term.window_ns / NS_PER_S
    if plan.duration_ns is not None and plan.duration_ns < MIN_WINDOWS * term.window_ns:
        length = format.duration(plan.duration_ns / NS_PER_S)
        text = f"a load of {length} has no two windows of {format.duration(window_s)}"
        hint = f"duration: {math.ceil(MIN_WINDOWS * window_s)}s or more"
        return Problem("too_few", text, hint)
    if plan.starts is None:
        # The number of requests of a closed loop that is limited by time is not known yet.
        return None
    repeats = plan.level.repeats
    units_per_start = plan.units_per_start(term)
    available = round(plan.starts * units_per_start * repeats)
    if window_s and plan.rate is not None:
        available = int(plan.rate * window_s)
    required = required_requests(term, confidence)
    if term.kind == "sustained" and _is_poisson(plan.workload):
        required = max(required, requests_for_ratio(term.limit, confidence))
    if available >= required:
        return None
    if window_s:
        scope = "each window has"
    elif repeats > 1:
        scope = f"{repeats} runs have"
    else:
        scope = "there are"
    noun = "tasks" if term.is_about_tasks else "requests"
    text = f"needs {required:,} {noun} to be shown at all, {scope} {available:,}"
    hint = _sample_hint(required / units_per_start, plan, is_windowed=window_s > 0)
    return Problem("too_few", text, hint)


def _is_poisson(workload: Workload) -> bool:
    """Return whether all measured arrivals of a workload are Poisson processes."""
    return all(isinstance(stage.arrival, Poisson) for stage in workload.stages if stage.measured)


def _sample_hint(required_starts: float, plan: LevelPlan, *, is_windowed: bool) -> str:
    """Return the hint that names the number of requests, and the length of load, that is enough.

    Args:
        required_starts: The starts that are enough, in all runs together or in one window.
        plan: The plan of the level.
        is_windowed: Whether the term compares windows, each of which needs so many starts.
    """
    runs = 1 if is_windowed else plan.level.repeats
    starts = math.ceil(required_starts / runs)
    duration = ""
    starts_per_s = plan.starts_per_s()
    if starts_per_s:  # not known for a closed loop, and 0 for an empty load
        seconds = starts / starts_per_s
        duration = f"{math.ceil(seconds)}s ({format.duration(seconds)} at this rate)"
    if is_windowed:
        return f"window: {duration} or more" if duration else "a longer window"
    or_duration = f", or duration: {duration}" if duration else ""
    return f"requests: {starts}{or_duration} or more; or a lower percentile"
