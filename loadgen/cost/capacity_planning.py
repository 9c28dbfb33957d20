"""Capacity planning: the VMs and racks that users need at a measured rate, and what remains without a fault domain.

Pure: no money, no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from loadgen.core.errors import UserError
from loadgen.core.results.capacity import STILL_KEPT, RateInterval, replications
from loadgen.core.results.manifest import ReasonCode
from loadgen.pricing.evidence import Evidence
from loadgen.pricing.reasons import note

GPUS_PER_VM = 4  # ND GB300 v6; one fault domain
VMS_PER_RACK = 18  # one NVL72: 72 GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What N-1 VMs carry after the loss of one fault domain (one VM).

    `carried_per_s` is the remaining rate, `share` its share of the demand, `users` the number of users it serves.
    `share` is None without a demand, `users` without users.
    """

    vms: int  # N, before the loss
    gpus: int  # of the fault domain
    carried_per_s: float
    share: float | None
    users: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """The machines that `users` need. VMs are whole; `vms_low` and `vms_high` come from the interval of the rate.

    Without users, everything but the machine sizes, the rates and `rack_lost` is None.
    """

    gpus_per_vm: int
    vms_per_rack: int
    per_vm: RateInterval  # interactions per second within the SLO
    per_rack: RateInterval
    rack_lost: Loss  # loss of one VM of a full rack
    users: int | None = None
    think_s: float | None = None
    response_s: float | None = None  # mean time from due to the last output; of a task, its whole duration
    demand_per_s: float | None = None
    vms: int | None = None
    vms_low: int | None = None
    vms_high: int | None = None
    racks: int | None = None
    rack_users: int | None = None  # users that one rack carries
    lost: Loss | None = None  # loss of one of `vms` VMs


def scaled(rate: RateInterval, by: float) -> RateInterval:
    low, high = (None if bound is None else bound * by for bound in (rate.low, rate.high))
    return RateInterval(mid=rate.mid * by, low=low, high=high)


def demand(users: int, think_s: float, response_s: float) -> float:
    """Interactions per second of `users` who wait for each answer and then think.

    The interactive response time law: N / (R + Z).
    """
    return users / (think_s + response_s)


def needed(demand_per_s: float, each_per_s: float) -> int:
    """How many whole machines carry a demand, at least one."""
    return max(math.ceil(demand_per_s / each_per_s - ROUNDING), 1)


def fleet(
    rate: RateInterval, gpus: int, *, gpus_per_vm: int = GPUS_PER_VM, vms_per_rack: int = VMS_PER_RACK
) -> CapacityPlan:
    """Rates per VM and per rack, from a rate that `gpus` GPUs carried within the SLO.

    Rates scale with the number of GPUs: VMs count as independent replicas, and a router in front of them costs nothing.
    """
    per_vm = scaled(rate, gpus_per_vm / gpus)
    return CapacityPlan(
        gpus_per_vm=gpus_per_vm,
        vms_per_rack=vms_per_rack,
        per_vm=per_vm,
        per_rack=scaled(per_vm, vms_per_rack),
        rack_lost=_loss(vms_per_rack, per_vm, gpus_per_vm),
    )


def plan(by: CapacityPlan, users: int, think_s: float, response_s: float) -> CapacityPlan:
    """The plan for `users`; `by` is a result of `fleet`."""
    demand_per_s = demand(users, think_s, response_s)
    cycle_s = think_s + response_s

    vms = needed(demand_per_s, by.per_vm.mid)
    return replace(
        by,
        users=users,
        think_s=think_s,
        response_s=response_s,
        demand_per_s=demand_per_s,
        vms=vms,
        vms_low=None if by.per_vm.high is None else needed(demand_per_s, by.per_vm.high),
        vms_high=None if by.per_vm.low is None else needed(demand_per_s, by.per_vm.low),
        racks=math.ceil(vms / by.vms_per_rack),
        rack_users=math.floor(by.per_rack.mid * cycle_s + ROUNDING),
        lost=_loss(vms, by.per_vm, by.gpus_per_vm, demand_per_s, cycle_s),
        rack_lost=_loss(by.vms_per_rack, by.per_vm, by.gpus_per_vm, None, cycle_s),
    )


ROUNDING = 1e-9  # tolerance for binary floats: a demand of exactly three VMs needs three


def _loss(
    vms: int, per_vm: RateInterval, gpus: int, demand_per_s: float | None = None, cycle_s: float | None = None
) -> Loss:
    remaining_rate = (vms - 1) * per_vm.mid
    return Loss(
        vms=vms,
        gpus=gpus,
        carried_per_s=remaining_rate,
        share=None if demand_per_s is None else remaining_rate / demand_per_s,
        users=None if cycle_s is None else math.floor(remaining_rate * cycle_s + ROUNDING),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRate:
    """The measured rate behind a plan. `rate`: interactions per second within the SLO, of all `gpus` together."""

    name: str
    folder: str
    basis: str  # "capacity by search", "at this load"
    lower_bound: bool = False  # only a lower bound of the capacity was found
    bound_why: str = ""  # why; in words
    rate: RateInterval
    noun: str  # what an interaction is: "good requests", "requests", "conversations", "successful tasks"
    gpus: int
    response_s: float
    workload: str

    @property
    def kind(self) -> str:
        """What the interactions are, good or not: "requests", "conversations", "tasks"."""
        return self.noun.removeprefix("good ").removeprefix("successful ")

    @property
    def answer(self) -> str:
        """What a user waits for: "an answer", "a conversation"."""
        return "an answer" if self.kind == "requests" else f"a {self.kind[:-1]}"


ONE_LOAD = "the SLO was kept at this load, which may not be the highest (loadgen search finds it)"


def measured(evidence: Evidence, gpus: int) -> MeasuredRate:
    """The measured rate within the SLO.

    The rate of a capacity; else the steady rate of successful tasks where there are conversations; else of good
    requests; without an SLO, of ok requests. Raises UserError where the rate is zero.
    """
    summary, capacity = evidence.summary, evidence.capacity
    if evidence.at_once:
        what = "an Offline rate says nothing about users: everything was due at once, and nobody waited within a limit"
        raise UserError("no_figure", what, evidence.folder, "a run or search of the profile under its SLO")
    if capacity is not None:
        basis, noun = f"capacity by {capacity.method}", str(capacity.unit)
        bound_why = (capacity.bound_why or STILL_KEPT) if capacity.lower_bound else ""
        rate = RateInterval(mid=capacity.rate_per_s, low=capacity.low_per_s, high=capacity.high_per_s)
        if capacity.unit == "requests" and summary.sessions is not None:
            offered = summary.requests.decided
            rate, noun = scaled(rate, summary.sessions.count / offered), "conversations"
    else:
        run_count = len(evidence.summaries)
        basis = "at this load" if run_count == 1 else f"at this load, {run_count} repeats"
        noun, run_rates = _steady_rates(evidence)
        if not run_rates or min(run_rates) <= 0:
            what = f"no {noun} ended while load was offered"
            raise UserError(
                "no_figure", what, evidence.folder, "a longer run, or one at a load that the endpoint can carry"
            )
        rate = replications(run_rates)
        bound_why = ONE_LOAD if all(run.goodput.met for run in evidence.summaries) else ""
    answer_ms = summary.e2e_ms.mean if summary.sessions is None else summary.sessions.duration_ms.mean
    return MeasuredRate(
        name=evidence.name,
        folder=evidence.folder,
        basis=basis,
        rate=rate,
        noun=noun,
        gpus=gpus,
        response_s=(answer_ms or 0.0) / 1e3,
        lower_bound=bool(bound_why),
        bound_why=bound_why,
        workload=summary.run.workload,
    )


def _steady_rates(evidence: Evidence) -> tuple[str, list[float]]:
    """The noun of what is counted, and its steady rate in each run."""
    summaries = evidence.summaries
    if summaries[0].sessions is not None:
        noun, rates = "successful tasks", [s.sessions.steady_ok_per_s if s.sessions else None for s in summaries]
    elif evidence.valid and summaries[0].goodput.has_slo:
        noun, rates = "good requests", [summary.goodput.steady_rps for summary in summaries]
    else:
        noun, rates = "requests", [summary.load.steady_completed_rps for summary in summaries]
    return noun, [rate for rate in rates if rate is not None]


def one_load(evidence: Evidence, rate: MeasuredRate) -> Iterator[ReasonCode]:
    """That a rate is the one of a run that was given no more; of a capacity the notes on its evidence say it."""
    if evidence.capacity is None and rate.lower_bound:
        yield note("one_load", why=rate.bound_why)
