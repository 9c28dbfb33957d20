"""Compute how long the load of a level lasts if its contract gives no duration (`duration: auto`).

A level without `duration` and `requests` lasts as long as its terms need to be decided. The length
is estimated before the run from the rules by which the terms are judged; a level that is undecided
after it is extended. This module is pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.contracts.level_plan import LevelPlan, plan_level
from loadgen.contracts.recorded_run import QUEUEING_METRICS
from loadgen.contracts.sample_sizes import MIN_WINDOWS, compute_required_requests
from loadgen.contracts.schema import Contract, ContractLevel
from loadgen.contracts.terms import NS_PER_S, ContractTerm
from loadgen.core import seeds
from loadgen.core.requests.build import build_prompts
from loadgen.core.requests.tokenizer import PACKAGED_NAME, load_tokenizer
from loadgen.core.schedule.forecast import mean_tokens
from loadgen.core.stats import intervals
from loadgen.core.workload import Ramp, Replay, Workload

PROVISIONAL_DURATION_NS = 3_600 * 10**9
"""The length of a load before its terms have decided it.

Any length will do: only the rates of the load are computed from it.
"""

QUEUE_SAMPLES_PER_RESIDENCE = 0.55
"""Independent states of the queue per mean residence time of a request.

The residence time is the time from the scheduled start of a request to its end. Loads of the
workload rag at 20 req/s on a simulated machine had 0.58 to 0.60, in 60 to 90 minutes.
"""

STARTUP_AND_END_ALLOWANCE = 1.05
"""Factor on a load for its start-up and its end, which are not part of the steady state."""


class RequiredDuration(NamedTuple):
    """How long each run of a level has to last, and the term that requires it.

    Attributes:
        seconds: The length of one run. 0 if no term needs a particular length.
        term: The term that needs this length, or None if there is none.
    """

    seconds: float
    term: ContractTerm | None


def has_auto_duration(level: ContractLevel) -> bool:
    """Return whether the terms of a level decide how long its load lasts."""
    return level.duration_ns is None and level.requests is None


def has_steady_load(workload: Workload) -> bool:
    """Return whether a workload has one measured stage, whose load does not change over time."""
    arrivals = [stage.arrival for stage in workload.stages if stage.measured]
    return len(arrivals) == 1 and not isinstance(arrivals[0], Ramp | Replay)


def lengthen_load_for_terms(
    plan: LevelPlan, terms: Sequence[ContractTerm], contract: Contract
) -> LevelPlan:
    """Return the plan of a level with a load that lasts as long as its terms need.

    This is for a level with `duration: auto`. The plan is returned unchanged

    - if no term needs a particular length,
    - if the load comes from the workload file and is long enough: it is never shortened, and
    - if the load varies over time, such as a ramp: a longer one would be a different load.

    Args:
        plan: The plan of the level.
        terms: The terms of the level.
        contract: The contract, for its confidence and its horizon.
    """
    if not has_steady_load(plan.workload):
        return plan
    required = find_required_duration(plan, terms, contract)
    if required.seconds <= _get_workload_duration_s(plan):
        return plan
    duration_ns = round(required.seconds * NS_PER_S)
    new_limits = {"duration_ns": duration_ns, "count": None, "at_least": None}
    stages = tuple(
        stage.model_copy(update=new_limits) if stage.measured else stage
        for stage in plan.workload.stages
    )
    longer_workload = plan.workload.model_copy(update={"stages": stages})
    longer_plan = plan_level(plan.level, longer_workload)
    longest_load_term = "" if required.term is None else required.term.text
    return replace(longer_plan, longest_load_term=longest_load_term, is_auto=True)


def _get_workload_duration_s(plan: LevelPlan) -> float:
    """Return how long the load lasts according to the workload file, in seconds.

    Return 0 if the length is not known, or if the level replaces the load of the file by a rate or
    a concurrency of its own. The length in the plan is provisional then.
    """
    has_own_load = plan.level.rate is not None or plan.level.concurrency is not None
    if has_own_load or plan.duration_ns is None:
        return 0.0
    return plan.duration_ns / NS_PER_S


def find_required_duration(
    plan: LevelPlan, terms: Sequence[ContractTerm], contract: Contract
) -> RequiredDuration:
    """Return how long each run of a level has to last, and the term that needs the longest load.

    A term about a class of requests that the load does not have is left out, because no length of
    the load gives it a request.

    Args:
        plan: The plan of the level.
        terms: The terms of the level.
        contract: The contract, for its confidence and its horizon.
    """
    max_residence_s = _estimate_max_residence_s(plan, terms)
    longest = RequiredDuration(seconds=0.0, term=None)
    for term in terms:
        if not plan.samples_per_start(term):
            continue
        seconds = _compute_run_duration_s(term, plan, contract, max_residence_s)
        if seconds > longest.seconds:
            longest = RequiredDuration(seconds, term)
    return longest


def _compute_run_duration_s(
    term: ContractTerm, plan: LevelPlan, contract: Contract, max_residence_s: float | None
) -> float:
    """Return how long each run of a level has to last for a term, in seconds.

    This is the longest of several requirements:

    - The load for a latency or for goodput has to contain slowdowns that recur within the
      recurrence horizon of the contract.
    - The load for a latency has to show enough independent states of the queue.
    - A term that compares two windows needs both windows in each run.
    - Any other term needs a minimum number of requests.

    The runs of a level are judged together, so each run only needs its part of the total, except
    for windows.

    Args:
        term: The term.
        plan: The plan of the level.
        contract: The contract, for its confidence and its horizon.
        max_residence_s: How long a request may take, or None if the terms do not limit it.
    """
    repeats = plan.level.repeats
    run_durations_s = [0.0]
    if term.is_sensitive_to_slowdowns:
        horizon_s = contract.horizon_ns / NS_PER_S
        load_s = intervals.length_to_meet_s(horizon_s, contract.confidence)
        run_durations_s.append(load_s / repeats)
    if term.is_latency:
        load_s = _compute_queue_duration_s(term, plan, contract, max_residence_s)
        run_durations_s.append(load_s / repeats)
    starts_per_s = plan.starts_per_s()
    if term.window_ns:
        run_durations_s.append(MIN_WINDOWS * term.window_ns / NS_PER_S)
    elif plan.rate and starts_per_s is not None:
        required_requests = compute_required_requests(term, contract.confidence)
        requests_per_s = starts_per_s * plan.samples_per_start(term)
        run_durations_s.append(required_requests / requests_per_s / repeats)
    return STARTUP_AND_END_ALLOWANCE * max(run_durations_s)


def _compute_queue_duration_s(
    term: ContractTerm, plan: LevelPlan, contract: Contract, max_residence_s: float | None
) -> float:
    """Return how long a load must be to show enough independent states of the queue, in seconds.

    Requests that are on the server at the same time meet the same queue. So the queue has about one
    independent state per residence time of a request (the time from its scheduled start to its
    end), and a percentile needs a number of them. The residence time of a task is at most the limit
    of a term about it.

    Return 0 if the term is not about queueing, or if the load is a closed loop, whose queue is
    limited by its concurrency.

    Args:
        term: The term about a latency.
        plan: The plan of the level.
        contract: The contract, for its confidence.
        max_residence_s: How long a request may take, or None if the terms do not limit it.
    """
    if plan.is_closed_loop():
        return 0.0
    residence_s: float | None = None
    if not term.is_about_tasks and term.kind in QUEUEING_METRICS:
        residence_s = max_residence_s
    elif term.is_about_tasks and term.metric == "e2e":
        residence_s = term.limit / NS_PER_S
    if residence_s is None:
        return 0.0
    required_samples = intervals.observations_to_see(term.quantile, contract.confidence)
    return required_samples * residence_s / QUEUE_SAMPLES_PER_RESIDENCE


def _estimate_max_residence_s(plan: LevelPlan, terms: Sequence[ContractTerm]) -> float | None:
    """Return how long a request may take according to the latency terms of a level, in seconds.

    This is the lowest limit on E2E latency. Without one it is the limit on TTFT plus the limit on
    TPOT times the mean number of output tokens. Return None if the terms limit neither.
    """
    lowest_limits_ns: dict[str, float] = {}
    for term in terms:
        if term.is_latency and not term.class_name:
            earlier_limit_ns = lowest_limits_ns.get(term.kind, math.inf)
            lowest_limits_ns[term.kind] = min(term.limit, earlier_limit_ns)
    if "e2e" in lowest_limits_ns:
        return lowest_limits_ns["e2e"] / NS_PER_S
    if "ttft" not in lowest_limits_ns or "tpot" not in lowest_limits_ns:
        return None
    mean_output_tokens = _estimate_mean_output_tokens(plan.workload)
    max_generation_ns = mean_output_tokens * lowest_limits_ns["tpot"]
    return (lowest_limits_ns["ttft"] + max_generation_ns) / NS_PER_S


def _estimate_mean_output_tokens(workload: Workload) -> float:
    """Return the mean number of output tokens of the requests of a workload.

    The prompts are built from a fixed seed and salt, so that the result is the same for each run.
    """
    fixed_seed = 0
    tokenizer = load_tokenizer(PACKAGED_NAME)
    salt = seeds.salt_number(seeds.salt_of(fixed_seed, None))
    prompts = build_prompts(workload, fixed_seed, salt, tokenizer)
    _, mean_output_tokens = mean_tokens(prompts)
    return mean_output_tokens
