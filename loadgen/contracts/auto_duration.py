"""Compute how long the load of a level lasts if its contract gives no duration (`duration: auto`).

A level without `duration` and `requests` lasts as long as its terms need to be decided. The length
is estimated before the run from the rules by which the terms are judged; a level that is undecided
after it is extended. This module is pure.
"""

from __future__ import annotations

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
"""Factor for the start-up and the end of a load, which are not judged."""


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
    measured = [stage.arrival for stage in workload.stages if stage.measured]
    return len(measured) == 1 and not isinstance(measured[0], Ramp | Replay)


def lengthen_load_for_terms(
    plan: LevelPlan, terms: Sequence[ContractTerm], contract: Contract
) -> LevelPlan:
    """Return the plan of a level with a load that lasts as long as its terms need.

    A load of the workload file, which is used if the level has no rate and no concurrency of its
    own, is lengthened and never shortened. The plan is unchanged if no term needs a particular
    length. It is also unchanged if the load varies over time, such as a ramp, because a longer one
    would be a different load.

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
    lengthened = plan_level(plan.level, plan.workload.model_copy(update={"stages": stages}))
    longest_load_term = "" if required.term is None else required.term.text
    return replace(lengthened, longest_load_term=longest_load_term, is_auto=True)


def _get_workload_duration_s(plan: LevelPlan) -> float:
    """Return how long the load lasts according to the workload file, in seconds.

    Return 0 if the length is not known, or if the level has a rate or a concurrency of its own: the
    length in the plan is then only provisional.
    """
    has_own_load = plan.level.rate is not None or plan.level.concurrency is not None
    if has_own_load or plan.duration_ns is None:
        return 0.0
    return plan.duration_ns / NS_PER_S


def find_required_duration(
    plan: LevelPlan, terms: Sequence[ContractTerm], contract: Contract
) -> RequiredDuration:
    """Return the longest time that one of these terms needs, in each run of the level.

    Terms about a class of requests that the load does not have are left out: no load shows them.
    """
    residence_s = _estimate_max_residence_s(plan, terms)
    longest = RequiredDuration(0.0, None)
    for term in terms:
        if not plan.samples_per_start(term):
            continue
        seconds = _compute_run_duration_s(term, plan, contract, residence_s)
        if seconds > longest.seconds:
            longest = RequiredDuration(seconds, term)
    return longest


def _compute_run_duration_s(
    term: ContractTerm, plan: LevelPlan, contract: Contract, residence_s: float | None
) -> float:
    """Return how long each run of a level has to last for a term, in seconds.

    This is the longest of several requirements:

    - The load for a latency or for goodput has to meet slowdowns that recur within the horizon of
      the contract.
    - The load for a latency has to meet enough independent states of the queue.
    - A term that compares two windows needs both windows in each run.
    - Any other term needs a minimum number of requests.

    The runs of a level are judged together, so each has to last for its part of the total only,
    except for windows.
    """
    repeats = plan.level.repeats
    total_s = 0.0
    if term.is_latency or term.kind in ("goodput", "task_goodput", "fairness"):
        horizon_s = contract.horizon_ns / NS_PER_S
        total_s = intervals.length_to_meet_s(horizon_s, contract.confidence)
    if term.is_latency:
        total_s = max(total_s, _compute_queue_duration_s(term, plan, contract, residence_s))
    run_s = total_s / repeats
    starts_per_s = plan.starts_per_s()
    if term.window_ns:
        run_s = max(run_s, MIN_WINDOWS * term.window_ns / NS_PER_S)
    elif plan.rate and starts_per_s is not None:
        samples_per_s = starts_per_s * plan.samples_per_start(term)
        requests = compute_required_requests(term, contract.confidence)
        run_s = max(run_s, requests / samples_per_s / repeats)
    return STARTUP_AND_END_ALLOWANCE * run_s


def _compute_queue_duration_s(
    term: ContractTerm, plan: LevelPlan, contract: Contract, residence_s: float | None
) -> float:
    """Return how long a load must be to meet enough independent states of the queue, in seconds.

    Requests that are served at the same time meet the same queue. So a percentile needs a number of
    independent states, each of which takes about the residence time of a request. The residence
    time of a task is at most the limit of the term. Return 0 if the term is not about queueing, or
    if the load is a closed loop, whose queue is limited by its concurrency.

    Args:
        term: The term about a latency.
        plan: The plan of the level.
        contract: The contract.
        residence_s: How long a request stays on the server at most, or None if this is not known.
    """
    if plan.is_closed_loop():
        return 0.0
    seconds_per_residence: float | None = None
    if not term.is_about_tasks and term.kind in QUEUEING_METRICS:
        seconds_per_residence = residence_s
    elif term.is_about_tasks and term.metric == "e2e":
        seconds_per_residence = term.limit / NS_PER_S
    if seconds_per_residence is None:
        return 0.0
    samples = intervals.observations_to_see(term.quantile, contract.confidence)
    return samples * seconds_per_residence / QUEUE_SAMPLES_PER_RESIDENCE


def _estimate_max_residence_s(plan: LevelPlan, terms: Sequence[ContractTerm]) -> float | None:
    """Return how long a request may take according to the latency terms, in seconds.

    This is the strictest limit on `e2e`. Without one it is the limit on TTFT plus the limit on TPOT
    times the mean number of output tokens. Return None if the terms do not limit it.
    """
    limits_ns: dict[str, float] = {}
    for term in terms:
        if term.is_latency and not term.class_name:
            limits_ns[term.kind] = min(term.limit, limits_ns.get(term.kind, term.limit))
    if "e2e" in limits_ns:
        return limits_ns["e2e"] / NS_PER_S
    if "ttft" not in limits_ns or "tpot" not in limits_ns:
        return None
    tokenizer = load_tokenizer(PACKAGED_NAME)
    salt = seeds.salt_number(seeds.salt_of(0, None))
    _, output_tokens = mean_tokens(build_prompts(plan.workload, 0, salt, tokenizer))
    return (limits_ns["ttft"] + output_tokens * limits_ns["tpot"]) / NS_PER_S
