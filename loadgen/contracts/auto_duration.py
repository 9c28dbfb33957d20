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
"""Independent observations of the queue per mean residence time of a request.

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

    longer_workload = _limit_by_time_only(plan.workload, round(required.seconds * NS_PER_S))
    longer_plan = plan_level(plan.level, longer_workload)
    longest_load_term = "" if required.term is None else required.term.text

    return replace(longer_plan, longest_load_term=longest_load_term, is_auto=True)


def _limit_by_time_only(workload: Workload, duration_ns: int) -> Workload:
    """Return the workload with measured stages that end after a time and by nothing else.

    A number of requests (`count`) or a minimum (`at_least`) could end a stage earlier or later.
    """
    stages = []
    for stage in workload.stages:
        if stage.measured:
            limits = {"duration_ns": duration_ns, "count": None, "at_least": None}
            stages.append(stage.model_copy(update=limits))
        else:
            stages.append(stage)

    return workload.model_copy(update={"stages": tuple(stages)})


def _get_workload_duration_s(plan: LevelPlan) -> float:
    """Return how long the load lasts according to the workload file, in seconds.

    Return 0 if the file does not determine the length, so that any length is allowed. This is so if
    the level replaces the load of the file by a rate or a concurrency of its own, or if the load
    ends after a number of requests that take an unknown time.
    """
    replaces_load_of_file = plan.level.rate is not None or plan.level.concurrency is not None
    if replaces_load_of_file or plan.duration_ns is None:
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

    A level is repeated in several runs, and a term is judged on all of them together. So each run
    only needs its share of the load. But a term that compares windows of time, such as the first
    hour of a run with its last hour, needs `MIN_WINDOWS` windows in each run.

    Args:
        term: The term.
        plan: The plan of the level.
        contract: The contract, for its confidence and its horizon.
        max_residence_s: How long a request may take, or None if the terms do not limit it.
    """
    total_load_s = _compute_total_load_s(term, plan, contract, max_residence_s)
    share_of_run_s = total_load_s / plan.level.repeats
    required_windows_s = MIN_WINDOWS * term.window_ns / NS_PER_S
    return STARTUP_AND_END_ALLOWANCE * max(share_of_run_s, required_windows_s)


def _compute_total_load_s(
    term: ContractTerm, plan: LevelPlan, contract: Contract, max_residence_s: float | None
) -> float:
    """Return how much load a term needs in all runs of a level together, in seconds.

    Up to three requirements apply, depending on the term, and the largest decides.

    Args:
        term: The term.
        plan: The plan of the level.
        contract: The contract, for its confidence and its horizon.
        max_residence_s: How long a request may take, or None if the terms do not limit it.
    """
    confidence = contract.confidence
    required_loads_s = [0.0]
    if term.is_sensitive_to_slowdowns:
        # The load must meet slowdowns of the server that recur within the horizon.
        horizon_s = contract.horizon_ns / NS_PER_S
        required_loads_s.append(intervals.length_to_meet_s(horizon_s, confidence))

    if term.is_latency:
        required_loads_s.append(_compute_queue_duration_s(term, plan, confidence, max_residence_s))

    has_windows = term.window_ns > 0
    if not has_windows:
        required_loads_s.append(_compute_requests_duration_s(term, plan, confidence))

    return max(required_loads_s)


def _compute_requests_duration_s(term: ContractTerm, plan: LevelPlan, confidence: float) -> float:
    """Return how long a load takes to have the number of requests that a term needs, in seconds.

    Return 0 if the load has no rate that is known before the run.
    """
    starts_per_s = plan.starts_per_s()
    if not plan.rate or starts_per_s is None:
        return 0.0
    requests_per_s = starts_per_s * plan.samples_per_start(term)
    return compute_required_requests(term, confidence) / requests_per_s


def _compute_queue_duration_s(
    term: ContractTerm, plan: LevelPlan, confidence: float, max_residence_s: float | None
) -> float:
    """Return how long a load must be to show the queue of the server often enough, in seconds.

    Requests that are on the server at the same time wait in the same queue, so they count as one
    observation of it. The queue changes about once per residence time of a request (the time from
    its scheduled start to its end). A percentile such as p99 needs a number of observations, so the
    longer requests take, the longer the load must be.

    Return 0 if the term is not about queueing, or if the load is a closed loop, whose queue is
    limited by its concurrency.

    Args:
        term: The term about a latency.
        plan: The plan of the level.
        confidence: The confidence of the contract.
        max_residence_s: How long a request may take, or None if the terms do not limit it.
    """
    if plan.is_closed_loop():
        return 0.0
    residence_s = _get_max_duration_s(term, max_residence_s)
    if residence_s is None:
        return 0.0
    required_samples = intervals.observations_to_see(term.quantile, confidence)
    return required_samples * residence_s / QUEUE_SAMPLES_PER_RESIDENCE


def _get_max_duration_s(term: ContractTerm, max_residence_s: float | None) -> float | None:
    """Return the longest time that a request or task may take under a term, in seconds.

    A task is a sequence of requests. Its longest time is the limit of the term itself, if that is
    a limit on the time of the whole task. Return None if there is no such limit, or if the metric
    of the term does not include time in the queue of the server.

    Args:
        term: The term about a latency.
        max_residence_s: How long a request may take, or None if the terms do not limit it.
    """
    if term.is_about_tasks:
        has_limit_on_task_time = term.metric == "e2e"
        if not has_limit_on_task_time:
            return None
        max_task_time_ns: int = term.limit
        return max_task_time_ns / NS_PER_S

    includes_queueing_time = term.kind in QUEUEING_METRICS
    if not includes_queueing_time:
        return None

    return max_residence_s


def _estimate_max_residence_s(plan: LevelPlan, terms: Sequence[ContractTerm]) -> float | None:
    """Return how long a request may take according to the latency terms of a level, in seconds.

    This is the lowest limit on E2E latency. Without one it is the limit on TTFT plus the limit on
    TPOT times the mean number of output tokens. Return None if the terms limit neither.
    """
    max_e2e_ns = _find_lowest_limit_ns(terms, "e2e")
    if max_e2e_ns is not None:
        return max_e2e_ns / NS_PER_S

    max_ttft_ns = _find_lowest_limit_ns(terms, "ttft")
    max_tpot_ns = _find_lowest_limit_ns(terms, "tpot")
    if max_ttft_ns is None or max_tpot_ns is None:
        return None

    max_generation_ns = _estimate_mean_output_tokens(plan.workload) * max_tpot_ns
    return (max_ttft_ns + max_generation_ns) / NS_PER_S


def _find_lowest_limit_ns(terms: Sequence[ContractTerm], metric: str) -> int | None:
    """Return the lowest limit that terms about all requests set for a latency, or None."""
    limits_ns: list[int] = [
        term.limit for term in terms if term.kind == metric and not term.class_name
    ]
    return min(limits_ns, default=None)


def _estimate_mean_output_tokens(workload: Workload) -> float:
    """Return the mean number of output tokens of the requests of a workload.

    The prompts are built as for a run, but from a fixed seed, so that the result is the same for
    each run. The salt, a number that makes the prompts of a run unique, follows from the seed.
    """
    fixed_seed = 0
    tokenizer = load_tokenizer(PACKAGED_NAME)  # the tokenizer that comes with loadgen
    salt = seeds.salt_number(seeds.resolve_salt(fixed_seed, None))
    prompts = build_prompts(workload, fixed_seed, salt, tokenizer)
    _, mean_output_tokens = mean_tokens(prompts)
    return mean_output_tokens
