"""Computes the rate that a result shows within its SLO, and the machines that a demand needs.

Pure: no money, no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from msgspec import Struct

from loadgen.core.errors import UserError
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import ReasonCode
from loadgen.pricing.cost_basis import find_task_sessions
from loadgen.pricing.estimate import Estimate, estimate_rate
from loadgen.pricing.evidence import Evidence, compute_mean_interaction_ms, count_interactions
from loadgen.pricing.reasons import make_note
from loadgen.repeated.capacity import HIGHEST_LOAD_PASSED, Capacity, rate_unit

ROUNDING_TOLERANCE = 1e-9
"""Tolerance for binary floats: a demand of exactly three machines needs three, not four."""

SINGLE_LOAD = "the SLO was met at this load, and a higher load may meet it too (loadgen search)"


class MeasuredRate(Struct, frozen=True, kw_only=True):
    """The rate of interactions that a source served within its SLO.

    It is stored in `size.json`. Where its key differs from the name of a field, the field names it.

    Attributes:
        name: How reports call the source.
        folder: The result folder, or where a published rate is from.
        basis: How the rate was obtained, such as "capacity by search" or "at this load".
        is_lower_bound: True if the capacity is at least this rate, and may be higher.
        lower_bound_reason: Why the rate is only a lower bound.
        rate: Interactions per second of all GPUs together.
        unit: What an interaction is: "good requests", "requests", "conversations", "successful
            tasks", or "starts" for a mix of requests and conversations.
        gpus: GPUs that were measured.
        response_s: How long an interaction lasts, or 0 if it is not known.
        workload: Name of the workload.
    """

    name: str
    folder: str
    basis: str
    is_lower_bound: bool = msgspec.field(default=False, name="lower_bound")
    lower_bound_reason: str = msgspec.field(default="", name="bound_why")
    rate: Estimate[float]
    unit: str = msgspec.field(name="noun")
    gpus: int
    response_s: float
    workload: str

    @property
    def interaction_noun(self) -> str:
        """The unit without "good" or "successful", such as "requests"."""
        return self.unit.removeprefix("good ").removeprefix("successful ")

    @property
    def response_noun(self) -> str:
        """What a user waits for, such as "a response" or "a conversation"."""
        if self.interaction_noun == "requests":
            return "a response"
        if self.interaction_noun == "starts":
            return "a response or conversation"
        return f"a {self.interaction_noun.removesuffix('s')}"


def scale_rate(rate: Estimate[float], factor: float) -> Estimate[float]:
    """Return the rate and its interval multiplied by a factor, such as the number of machines.

    This assumes that machines are independent and that a router in front of them costs nothing.
    The interval is scaled too, because all machines share the error of the one that was measured.
    """
    return rate.map(lambda value: value * factor)


def compute_interactions_per_s(users: int, think_s: float, response_s: float) -> float:
    """Return the interactions per second of users who wait for each response and then think.

    This is the interactive response time law: N / (R + Z).
    """
    return users / (think_s + response_s)


def count_needed_machines(demand_per_s: float, machine_rate_per_s: float) -> int:
    """Return how many whole machines serve a demand, at least one."""
    return max(math.ceil(demand_per_s / machine_rate_per_s - ROUNDING_TOLERANCE), 1)


def derive_measured_rate(evidence: Evidence, gpus: int) -> MeasuredRate:
    """Return the rate that the evidence shows a machine to serve, to plan capacity with.

    If the evidence is of a search, this is the capacity that it found. Otherwise it is the rate
    at which the runs completed interactions in the steady state; `_measure_steady_rates` says what
    counts as one.

    Raises:
        UserError: The rate is zero, or the run was Offline.
    """
    if evidence.is_offline:
        raise UserError(
            "no_figure",
            "the rate of an Offline run cannot be used for users, because it has no latency limit",
            evidence.folder,
            "use a run or a search with an SLO",
        )

    if evidence.capacity is not None:
        return _derive_rate_of_capacity(evidence, evidence.capacity, gpus)

    return _derive_rate_of_runs(evidence, gpus)


def _derive_rate_of_capacity(evidence: Evidence, capacity: Capacity, gpus: int) -> MeasuredRate:
    """Return the capacity that a search found, in interactions per second.

    If the workload has conversations and the capacity is in requests, the capacity is multiplied by
    the number of interactions per request in the run that confirms it.
    """
    summary = evidence.summary
    rate = Estimate(mid=capacity.rate_per_s, low=capacity.low_per_s, high=capacity.high_per_s)
    if capacity.unit == "requests" and summary.sessions is not None:
        interactions_per_request = count_interactions(summary) / summary.requests.decided
        rate = scale_rate(rate, interactions_per_request)

    lower_bound_reason = ""
    if capacity.lower_bound:
        lower_bound_reason = capacity.lower_bound_reason or HIGHEST_LOAD_PASSED

    state = f", {capacity.state}" if capacity.state else ""
    basis = f"capacity by {capacity.method}{state}"
    return _create_measured_rate(
        evidence,
        gpus,
        rate=rate,
        unit=str(rate_unit(summary)),
        basis=basis,
        lower_bound_reason=lower_bound_reason,
    )


def _derive_rate_of_runs(evidence: Evidence, gpus: int) -> MeasuredRate:
    """Return the rate of interactions that a run, or the mean of its repeats, completed.

    If the SLO was met, a higher load might meet it too, so the rate is only a lower bound of the
    capacity.

    Raises:
        UserError: A run completed nothing in its steady-state window.
    """
    steady = _measure_steady_rates(evidence)
    if not steady.rates or min(steady.rates) <= 0:
        raise UserError(
            "no_figure",
            f"no {steady.unit} completed in the steady-state window",
            evidence.folder,
            "use a longer run, or a lower load",
        )

    run_count = len(evidence.summaries)
    basis = "at this load" if run_count == 1 else f"at this load, {run_count} repeats"
    is_slo_met = all(summary.goodput.met for summary in evidence.summaries)
    lower_bound_reason = SINGLE_LOAD if is_slo_met else ""

    return _create_measured_rate(
        evidence,
        gpus,
        rate=estimate_rate(steady.rates),
        unit=steady.unit,
        basis=basis,
        lower_bound_reason=lower_bound_reason,
    )


def _create_measured_rate(
    evidence: Evidence,
    gpus: int,
    *,
    rate: Estimate[float],
    unit: str,
    basis: str,
    lower_bound_reason: str,
) -> MeasuredRate:
    """Return a rate together with the name, folder, workload and response time of its evidence.

    Args:
        evidence: The measurements.
        gpus: GPUs that were measured.
        rate: Interactions per second of all GPUs together.
        unit: What an interaction is, such as "good requests".
        basis: How the rate was obtained, such as "at this load".
        lower_bound_reason: Why the rate is only a lower bound of the capacity, or "" if it is the
            capacity.
    """
    summary = evidence.summary

    # A response time of 0 says that it is not known.
    response_ms = compute_mean_interaction_ms(summary) or 0.0
    return MeasuredRate(
        name=evidence.name,
        folder=evidence.folder,
        basis=basis,
        rate=rate,
        unit=unit,
        gpus=gpus,
        response_s=response_ms / 1e3,
        is_lower_bound=bool(lower_bound_reason),
        lower_bound_reason=lower_bound_reason,
        workload=summary.run.workload,
    )


class _SteadyRates(NamedTuple):
    """The steady rate of each run that has one, and what it counts, such as "good requests"."""

    unit: str
    rates: list[float]


def _measure_steady_rates(evidence: Evidence) -> _SteadyRates:
    """Return the rate of each run in its steady-state window, and what the rate counts.

    What counts is what a user waits for and what succeeded. The first case that applies decides:

    1. Conversations together with single requests: interactions that were completed, because the
       two kinds have no goodput in common.
    2. Conversations alone: successful tasks.
    3. Valid runs with an SLO: good requests.
    4. Otherwise: requests that were completed.
    """
    summaries = evidence.summaries
    first = summaries[0]
    has_conversations = first.sessions is not None

    has_single_requests_too = has_conversations and find_task_sessions(first) is None
    if has_single_requests_too:
        unit = str(rate_unit(first))
        rates = [_compute_steady_interactions_per_s(summary) for summary in summaries]
    elif has_conversations:
        unit = "successful tasks"
        rates = [
            None if summary.sessions is None else summary.sessions.steady_ok_per_s
            for summary in summaries
        ]
    elif evidence.is_valid and first.goodput.has_slo:
        unit = "good requests"
        rates = [summary.goodput.steady_rps for summary in summaries]
    else:
        unit = "requests"
        rates = [summary.load.steady_completed_rps for summary in summaries]

    return _SteadyRates(unit, [rate for rate in rates if rate is not None])


def _compute_steady_interactions_per_s(summary: Summary) -> float | None:
    """Return the steady request rate times the interactions per request, or None without a rate."""
    requests_per_s = summary.load.steady_completed_rps
    if requests_per_s is None:
        return None
    interactions_per_request = count_interactions(summary) / summary.requests.decided
    return requests_per_s * interactions_per_request


def list_single_load_notes(evidence: Evidence, rate: MeasuredRate) -> Iterator[ReasonCode]:
    """Yield a note if the rate is only that of a load, and the capacity may be higher.

    The notes on a capacity are among those of its evidence.
    """
    if evidence.capacity is None and rate.is_lower_bound:
        yield make_note("one_load", why=rate.lower_bound_reason)
