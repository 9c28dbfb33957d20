"""How long the load of a level lasts where its contract has no duration (`duration: auto`). Pure.

A level without `duration` and `requests` lasts as long as its terms need to be decided. The length
is estimated before the run from the rules by which the terms are judged; a level that is undecided
after it is extended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.contracts import level_plan
from loadgen.contracts.sample_sizes import WINDOWS, required_requests
from loadgen.contracts.schema import (
    OF_TASKS,
    Contract,
    ContractLevel,
    Planned,
    Promise,
    is_time,
    words,
)
from loadgen.contracts.steady_samples import QUEUED
from loadgen.core import seeds
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.tokenizer import PACKAGED_NAME, load_tokenizer
from loadgen.core.schedule.forecast import mean_tokens
from loadgen.core.stats import intervals
from loadgen.core.workload import Closed, Ramp, Replay, Workload

PROVISIONAL_NS = 3_600 * 10**9
"""The length of a level's load until its terms have decided it: rates are known from it."""
WITHOUT_TERMS_S = 600.0
"""The length of a load whose terms need no particular time, for example errors of a closed loop."""
LOOKS_PER_STAY = 0.55
"""How many independent samples of the queue a load gives in the mean time that a request stays.

Loads of rag at 20/s on a simulated machine gave 0.58 to 0.60, in 60 to 90 minutes.
"""
LATE_TERMS = 1.05  # the start-up of a load and the time after its last request are not judged


class NeededLength(NamedTuple):
    """The length of one run of a level, and the term that needs it."""

    seconds: float
    term: Promise | None


def is_auto(level: ContractLevel) -> bool:
    """Return True if the terms of a level decide how long its load lasts."""
    return level.duration_ns is None and level.requests is None


def has_steady_load(workload: Workload) -> bool:
    """Return True if a workload has one measured stage, whose load is the same all the time."""
    measured = [stage.arrival for stage in workload.stages if stage.measured]
    return len(measured) == 1 and not isinstance(measured[0], Ramp | Replay)


def with_needed_length(plan: Planned, terms: Sequence[Promise], contract: Contract) -> Planned:
    """Return the plan of a level with a load that lasts as long as its terms need.

    A load that the workload itself describes is lengthened and never shortened.
    """
    if not has_steady_load(plan.workload):
        return plan
    is_own_load = plan.level.rate is None and plan.level.concurrency is None
    own_s = (plan.duration_ns or 0) / 1e9 if is_own_load else 0.0
    longest = needed_length(plan, terms, contract)
    if longest.seconds <= own_s:
        return plan
    length_ns = round((longest.seconds or WITHOUT_TERMS_S) * 1e9)
    stages = tuple(
        stage.model_copy(update={"duration_ns": length_ns, "count": None, "at_least": None})
        if stage.measured
        else stage
        for stage in plan.workload.stages
    )
    lengthened = level_plan.planned(plan.level, plan.workload.model_copy(update={"stages": stages}))
    reason = "" if longest.term is None else words(longest.term)
    return replace(lengthened, decided_by=reason, is_auto=True)


def needed_length(plan: Planned, terms: Sequence[Promise], contract: Contract) -> NeededLength:
    """Return the longest time that one of these terms needs, in each run of the level."""
    stay_s = _longest_stay_s(plan, terms)
    longest = NeededLength(0.0, None)
    for term in terms:
        if not level_plan.each(term, plan):
            continue
        seconds = _needed_by(term, plan, contract, stay_s)
        if seconds > longest.seconds:
            longest = NeededLength(seconds, term)
    return longest


def _needed_by(term: Promise, plan: Planned, contract: Contract, stay_s: float | None) -> float:
    """Return how long each run of a level has to last for a term, in seconds."""
    repeats = plan.level.repeats
    in_all_s = 0.0
    if is_time(term.kind) or term.kind in ("goodput", "task_goodput", "fairness"):
        horizon_s = contract.horizon_ns / 1e9
        in_all_s = intervals.length_for(horizon_s, contract.confidence)
    if is_time(term.kind):
        in_all_s = max(in_all_s, _seconds_for_queue(term, plan, contract, stay_s))
    per_run_s = in_all_s / repeats
    window_s = term.window_ns / 1e9
    if window_s:
        per_run_s = max(per_run_s, WINDOWS * window_s)
    elif plan.rate:
        starts_per_s = plan.starts / (plan.duration_ns / 1e9)  # type: ignore[operator]
        of_term_per_s = starts_per_s * level_plan.each(term, plan)
        least = required_requests(term, contract.confidence)
        per_run_s = max(per_run_s, least / of_term_per_s / repeats)
    return LATE_TERMS * per_run_s


def _seconds_for_queue(
    term: Promise, plan: Planned, contract: Contract, stay_s: float | None
) -> float:
    """Return the load in which a latency that includes queueing is seen often enough.

    Requests that are served at the same time see the same queue. So a percentile needs a number of
    loads that each last as long as a request stays.
    """
    if any(isinstance(stage.arrival, Closed) for stage in plan.workload.stages if stage.measured):
        return 0.0
    if term.kind in OF_TASKS:
        stay_s = term.limit / 1e9 if OF_TASKS[term.kind] == "e2e" else None
    elif term.kind not in QUEUED:
        return 0.0
    if stay_s is None:
        return 0.0
    looks = intervals.unseen(term.quantile, contract.confidence)
    return looks * stay_s / LOOKS_PER_STAY


def _longest_stay_s(plan: Planned, terms: Iterable[Promise]) -> float | None:
    """Return how long a request may take by the limits that are promised, in seconds.

    None if they do not bound it.
    """
    limits_ns: dict[str, float] = {}
    for term in terms:
        if is_time(term.kind) and not term.class_name:
            limits_ns[term.kind] = min(term.limit, limits_ns.get(term.kind, term.limit))
    if "e2e" in limits_ns:
        return limits_ns["e2e"] / 1e9
    if "ttft" not in limits_ns or "tpot" not in limits_ns:
        return None
    tokens = load_tokenizer(PACKAGED_NAME)
    requests = build_prompts(plan.workload, 0, seeds.salt_number(seeds.salt_of(0, None)), tokens)
    _, output_tokens = mean_tokens(requests)
    return (limits_ns["ttft"] + output_tokens * limits_ns["tpot"]) / 1e9
