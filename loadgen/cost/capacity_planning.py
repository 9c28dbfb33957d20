"""Capacity planning: what a result was seen to carry, what users ask for, and how many machines that takes.

Pure: no money, no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

from loadgen.core.errors import UserError
from loadgen.core.results.manifest import ReasonCode
from loadgen.pricing.cost_basis import tasks_of
from loadgen.pricing.estimate import Estimate, estimate_rate
from loadgen.pricing.evidence import Evidence, count_arrivals, mean_arrival_duration_ms
from loadgen.pricing.reasons import note
from loadgen.repeated.capacity import HIGHEST_LOAD_PASSED, rate_unit


def scaled(rate: Estimate[float], by: float) -> Estimate[float]:
    """So many times a rate. From GPUs to GPUs: machines count as independent, a router in front of them as free. The
    interval grows alike: it is that of one measured machine, whose error all of them share.
    """
    return rate.map(lambda end: end * by)


def demand(users: int, think_s: float, response_s: float) -> float:
    """Interactions per second of `users` who wait for each answer and then think.

    The interactive response time law: N / (R + Z).
    """
    return users / (think_s + response_s)


def needed(demand_per_s: float, each_per_s: float) -> int:
    """How many whole machines carry a demand, at least one."""
    return max(math.ceil(demand_per_s / each_per_s - ROUNDING), 1)


ROUNDING = 1e-9  # tolerance for binary floats: a demand of exactly three VMs needs three


class MeasuredRate(Struct, frozen=True, kw_only=True):
    """The measured rate behind a size. `rate`: interactions per second within the SLO, of all `gpus` together."""

    name: str
    folder: str
    basis: str  # "capacity by search", "at this load"
    lower_bound: bool = False  # only a lower bound of the capacity was found
    bound_why: str = ""  # why; in words
    rate: Estimate[float]
    noun: str  # what an interaction is: "good requests", "requests", "conversations", "successful tasks", "starts"
    gpus: int
    response_s: float
    workload: str

    @property
    def kind(self) -> str:
        """What the interactions are, good or not: "requests", "conversations", "tasks", "starts" of a mix."""
        return self.noun.removeprefix("good ").removeprefix("successful ")

    @property
    def answer(self) -> str:
        """What a user waits for: "an answer", "a conversation", of a mix either."""
        words = {"requests": "an answer", "starts": "an answer or conversation"}
        return words.get(self.kind, f"a {self.kind[:-1]}")


ONE_LOAD = "the SLO was kept at this load, which may not be the highest (loadgen search finds it)"


def measured(evidence: Evidence, gpus: int) -> MeasuredRate:
    """The measured rate within the SLO.

    The rate of a capacity; else the steady rate of successful tasks where there are conversations alone, of all starts
    where there are single requests too; else of good requests; without an SLO, of ok requests. Raises UserError where
    the rate is zero.
    """
    summary, capacity = evidence.summary, evidence.capacity
    if evidence.at_once:
        what = "an Offline rate says nothing about users: everything was due at once, and nobody waited within a limit"
        raise UserError(
            "no_figure", what, evidence.folder, "a run or search of the profile under its SLO"
        )
    if capacity is not None:
        state = f", {capacity.state}" if capacity.state else ""
        basis, noun = f"capacity by {capacity.method}{state}", str(rate_unit(summary))
        bound_why = (
            (capacity.lower_bound_reason or HIGHEST_LOAD_PASSED) if capacity.lower_bound else ""
        )
        rate = Estimate(mid=capacity.rate_per_s, low=capacity.low_per_s, high=capacity.high_per_s)
        if capacity.unit == "requests" and summary.sessions is not None:
            rate = scaled(rate, count_arrivals(summary) / summary.requests.decided)
    else:
        run_count = len(evidence.summaries)
        basis = "at this load" if run_count == 1 else f"at this load, {run_count} repeats"
        noun, run_rates = _steady_rates(evidence)
        if not run_rates or min(run_rates) <= 0:
            what = f"no {noun} ended in the steady-state window"
            raise UserError(
                "no_figure",
                what,
                evidence.folder,
                "a longer run, or one at a load that the endpoint can carry",
            )
        rate = estimate_rate(run_rates)
        bound_why = ONE_LOAD if all(run.goodput.met for run in evidence.summaries) else ""
    return MeasuredRate(
        name=evidence.name,
        folder=evidence.folder,
        basis=basis,
        rate=rate,
        noun=noun,
        gpus=gpus,
        response_s=(mean_arrival_duration_ms(summary) or 0.0) / 1e3,
        lower_bound=bool(bound_why),
        bound_why=bound_why,
        workload=summary.run.workload,
    )


def _steady_rates(evidence: Evidence) -> tuple[str, list[float]]:
    """The noun of what is counted, and its steady rate in each run."""
    summaries = evidence.summaries
    if summaries[0].sessions is not None and tasks_of(summaries[0]) is None:
        noun, steady = (
            str(rate_unit(summaries[0])),
            [(one.load.steady_completed_rps, one) for one in summaries],
        )
        rates = [
            None if rate is None else rate * count_arrivals(one) / one.requests.decided
            for rate, one in steady
        ]
    elif summaries[0].sessions is not None:
        noun, rates = (
            "successful tasks",
            [s.sessions.steady_ok_per_s if s.sessions else None for s in summaries],
        )
    elif evidence.valid and summaries[0].goodput.has_slo:
        noun, rates = "good requests", [summary.goodput.steady_rps for summary in summaries]
    else:
        noun, rates = "requests", [summary.load.steady_completed_rps for summary in summaries]
    return noun, [rate for rate in rates if rate is not None]


def one_load(evidence: Evidence, rate: MeasuredRate) -> Iterator[ReasonCode]:
    """That a rate is the one of a run that was given no more; of a capacity the notes on its evidence say it."""
    if evidence.capacity is None and rate.lower_bound:
        yield note("one_load", why=rate.bound_why)
