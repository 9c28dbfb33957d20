"""Computes the rate that a result shows within its SLO, and the machines that a demand needs.

Pure: no money, no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from loadgen.core.errors import UserError
from loadgen.core.metrics.summary import Summary
from loadgen.core.results.manifest import ReasonCode
from loadgen.pricing.cost_basis import tasks_of
from loadgen.pricing.estimate import Estimate, estimate_rate
from loadgen.pricing.evidence import Evidence, count_interactions, mean_interaction_duration_ms
from loadgen.pricing.reasons import note
from loadgen.repeated.capacity import HIGHEST_LOAD_PASSED, Capacity, rate_unit

ROUNDING_TOLERANCE = 1e-9
"""Tolerance for binary floats: a demand of exactly three machines needs three, not four."""

SINGLE_LOAD = "the SLO was met at this load, and a higher load may meet it too (loadgen search)"


class MeasuredRate(Struct, frozen=True, kw_only=True):
    """A measured rate of interactions within the SLO. The field names are keys of `size.json`.

    Attributes:
        name: How reports call the source.
        folder: The result folder, or where a published rate is from.
        basis: How the rate was obtained, such as "capacity by search" or "at this load".
        lower_bound: True if the capacity is at least this rate.
        bound_why: Why the rate is only a lower bound.
        rate: Interactions per second of all GPUs together.
        noun: What an interaction is: "good requests", "requests", "conversations", "successful
            tasks", or "starts" for a mix of requests and conversations.
        gpus: GPUs that were measured.
        response_s: How long an interaction lasts, or 0 if it is not known.
        workload: Name of the workload.
    """

    name: str
    folder: str
    basis: str
    lower_bound: bool = False
    bound_why: str = ""
    rate: Estimate[float]
    noun: str
    gpus: int
    response_s: float
    workload: str

    @property
    def kind(self) -> str:
        """The noun without "good" or "successful", such as "requests"."""
        return self.noun.removeprefix("good ").removeprefix("successful ")

    @property
    def answer(self) -> str:
        """What a user waits for, such as "a response" or "a conversation"."""
        if self.kind == "requests":
            return "a response"
        if self.kind == "starts":
            return "a response or conversation"
        return f"a {self.kind.removesuffix('s')}"


def scale_rate(rate: Estimate[float], factor: float) -> Estimate[float]:
    """Return the rate of `factor` times as many GPUs.

    Machines are taken as independent, and a router in front of them as free. The interval is
    scaled, too: all machines share the error of the one that was measured.
    """
    return rate.map(lambda value: value * factor)


def interactions_per_s(users: int, think_s: float, response_s: float) -> float:
    """Return the interactions per second of users who wait for each response and then think.

    This is the interactive response time law: N / (R + Z).
    """
    return users / (think_s + response_s)


def machines_needed(demand_per_s: float, machine_rate_per_s: float) -> int:
    """Return how many whole machines serve a demand, at least one."""
    return max(math.ceil(demand_per_s / machine_rate_per_s - ROUNDING_TOLERANCE), 1)


def measured_rate_of(evidence: Evidence, gpus: int) -> MeasuredRate:
    """Return the rate within the SLO that the evidence shows.

    It is the rate of a capacity, if there is one. Otherwise it is the steady rate of successful
    tasks for conversations, of all arrivals for a mix of conversations and single requests, of
    good requests under an SLO, and of successful requests without one.

    Raises:
        UserError: The rate is zero, or the run was Offline.
    """
    if evidence.at_once:
        raise UserError(
            "no_figure",
            "the rate of an Offline run cannot be used for users, because it has no latency limit",
            evidence.folder,
            "use a run or a search with an SLO",
        )
    if evidence.capacity is not None:
        return _rate_of_capacity(evidence, evidence.capacity, gpus)
    return _rate_of_runs(evidence, gpus)


def _rate_of_capacity(evidence: Evidence, capacity: Capacity, gpus: int) -> MeasuredRate:
    """Return the rate of a capacity in interactions.

    A capacity in requests per second of a workload with conversations is converted by the number of
    interactions per request in its run.
    """
    summary = evidence.summary
    rate = Estimate(mid=capacity.rate_per_s, low=capacity.low_per_s, high=capacity.high_per_s)
    if capacity.unit == "requests" and summary.sessions is not None:
        rate = scale_rate(rate, count_interactions(summary) / summary.requests.decided)
    bound_why = ""
    if capacity.lower_bound:
        bound_why = capacity.lower_bound_reason or HIGHEST_LOAD_PASSED
    state = f", {capacity.state}" if capacity.state else ""
    basis = f"capacity by {capacity.method}{state}"
    return _to_measured_rate(evidence, gpus, rate, str(rate_unit(summary)), basis, bound_why)


def _rate_of_runs(evidence: Evidence, gpus: int) -> MeasuredRate:
    """Return the mean steady rate of a run or its repeats.

    If the SLO was met, a higher load might meet it too, so the rate is only a lower bound.

    Raises:
        UserError: A run completed nothing in its steady-state window.
    """
    steady = _steady_rates(evidence)
    if not steady.rates or min(steady.rates) <= 0:
        raise UserError(
            "no_figure",
            f"no {steady.noun} completed in the steady-state window",
            evidence.folder,
            "use a longer run, or a lower load",
        )
    run_count = len(evidence.summaries)
    basis = "at this load" if run_count == 1 else f"at this load, {run_count} repeats"
    is_slo_met = all(summary.goodput.met for summary in evidence.summaries)
    bound_why = SINGLE_LOAD if is_slo_met else ""
    return _to_measured_rate(
        evidence, gpus, estimate_rate(steady.rates), steady.noun, basis, bound_why
    )


def _to_measured_rate(
    evidence: Evidence, gpus: int, rate: Estimate[float], noun: str, basis: str, bound_why: str
) -> MeasuredRate:
    """Return a rate with the facts of its evidence.

    Args:
        evidence: The measurements.
        gpus: GPUs that were measured.
        rate: Interactions per second of all GPUs together.
        noun: What an interaction is, such as "good requests".
        basis: How the rate was obtained, such as "at this load".
        bound_why: Why the rate is only a lower bound of the capacity, or "" if it is the capacity.
    """
    summary = evidence.summary
    # A response time of 0 says that it is not known.
    response_ms = mean_interaction_duration_ms(summary) or 0.0
    return MeasuredRate(
        name=evidence.name,
        folder=evidence.folder,
        basis=basis,
        rate=rate,
        noun=noun,
        gpus=gpus,
        response_s=response_ms / 1e3,
        lower_bound=bool(bound_why),
        bound_why=bound_why,
        workload=summary.run.workload,
    )


class _SteadyRates(NamedTuple):
    """The steady rate of each run that has one, and what is counted."""

    noun: str
    rates: list[float]


def _steady_rates(evidence: Evidence) -> _SteadyRates:
    """Return the steady rates of runs at the load that was given, and the noun for what they count.

    What counts is what the user waits for and what succeeded: tasks, else good requests if there
    is an SLO, else requests. A mix of conversations and single requests has no goodput in common,
    so it counts the interactions that were completed.
    """
    summaries = evidence.summaries
    first = summaries[0]
    rates: list[float | None]
    if first.sessions is not None and tasks_of(first) is None:
        noun = str(rate_unit(first))
        rates = [_steady_interactions_per_s(summary) for summary in summaries]
    elif first.sessions is not None:
        noun = "successful tasks"
        sessions_of_runs = [summary.sessions for summary in summaries]
        rates = [
            None if sessions is None else sessions.steady_ok_per_s for sessions in sessions_of_runs
        ]
    elif evidence.valid and first.goodput.has_slo:
        noun = "good requests"
        rates = [summary.goodput.steady_rps for summary in summaries]
    else:
        noun = "requests"
        rates = [summary.load.steady_completed_rps for summary in summaries]
    return _SteadyRates(noun, [rate for rate in rates if rate is not None])


def _steady_interactions_per_s(summary: Summary) -> float | None:
    """Return the steady request rate times the interactions per request, or None without a rate."""
    requests_per_s = summary.load.steady_completed_rps
    if requests_per_s is None:
        return None
    interactions_per_request = count_interactions(summary) / summary.requests.decided
    return requests_per_s * interactions_per_request


def single_load_notes(evidence: Evidence, rate: MeasuredRate) -> Iterator[ReasonCode]:
    """Yield a note if the rate is only that of a load, and the capacity may be higher.

    The notes on a capacity are among those of its evidence.
    """
    if evidence.capacity is None and rate.lower_bound:
        yield note("one_load", why=rate.bound_why)
